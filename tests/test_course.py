"""The course: its runs are commands of the page, and its tables are what the runs gave; a case; the citation."""

import json
import re
import sys

import pytest
import torch
import yaml
from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import cases
import course

PAGE = (ROOT / "docs" / "course.md").read_text()


def lesson(number: str) -> str:
    return PAGE.split(f"## Lesson {number}:")[1].split("\n## ")[0]


@pytest.mark.parametrize("number", course.LESSONS)
def test_runs_are_commands_of_the_page(number):
    for patch, flags in course.LESSONS[number].values():
        assert f"\n    python ppo_llm.py {flags}\n" in lesson(number)
        assert not patch or f"git apply forks/{patch}.patch\n" in lesson(number)


@pytest.mark.parametrize("number", course.LESSONS)
def test_tables_are_what_the_runs_gave(number):
    assert course.table(number) in lesson(number)


def test_exercises_and_projects_exist():
    """Each name, letter and project of the page is one that the exercises have, and none is left out."""
    exercises = (ROOT / "docs" / "exercises.md").read_text()
    projects = (ROOT / "docs" / "projects.md").read_text()
    assigned = " ".join(re.findall(r"^\*\*Exercises\.\*\*(.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL))
    blanks = set(re.findall(r"`blank\s+(\w+)`", assigned))
    part_one = exercises.split("\n## Part 2")[0]
    assert blanks == set(re.findall(r"^\| `(\w+)` \|", part_one, re.MULTILINE))
    letters = set(re.findall(r"\b[A-Z]\b", assigned))
    assert letters == set(re.findall(r"^### ([A-Z])\b", exercises, re.MULTILINE))
    headings = {name.lower() for name in re.findall(r"^## (.*)$", projects, re.MULTILINE)}
    assert {name.replace("\n", " ").lower() for name in re.findall(r"\[([^\]]*)\]\(projects\.md#", PAGE)} <= headings


def test_the_kl_without_right_answers_is_that_of_the_data():
    """The page shows that it falls, and that of the healthy run rises."""
    page, data = (ROOT / "docs" / "cases.md").read_text(), json.loads(cases.RESULTS.read_text())
    [heads] = re.findall(r"^\| KL in nats.*? \| ([\d |]+) \|$", page, re.MULTILINE)
    iterations = [int(x) for x in heads.split(" | ")]
    ends = []
    for label, run in ("with a warm start", cases.CASES["flat"].runs[1]), ("healthy", cases.HEALTHY):
        for seed in (1, 2):
            kl = data[f"{run.command()} ; {seed}"]["columns"][cases.KL]
            cells = " | ".join(f"{kl[n // cases.MEAN_OF - 1]:.2f}" for n in iterations)
            assert f"| {label}, seed {seed} | {cells} |" in page
            ends.append(kl[-1] / max(kl))
    assert max(ends[:2]) < 0.1 and min(ends[2:]) > 0.9
    assert "from 0.67 to 0.03 and from 0.89 to 0.02 nats" in " ".join(PAGE.split())


def test_the_collapse_of_the_entropy_is_in_the_data():
    """At a reward of 0.45, and in the first 45 iterations, the entropy is below that of the healthy run."""
    data = json.loads(cases.RESULTS.read_text())
    for seed in (1, 2):
        [failing, healthy] = [data[f"{run.command()} ; {seed}"]["columns"]
                              for run in (cases.CASES["rate"].runs[0], cases.HEALTHY)]  # fmt: skip
        pairs = list(zip(failing[cases.ENTROPY], healthy[cases.ENTROPY]))
        assert all(low < high for low, high in pairs[:9])
        rewards = list(zip(failing[cases.REWARD], healthy[cases.REWARD]))
        assert all(low < high for low, high in rewards[3:])
        at = lambda run: min(zip(run[cases.REWARD], run[cases.ENTROPY]), key=lambda pair: abs(pair[0] - 0.45))[1]
        assert at(failing) < 0.55 and at(healthy) > 1.0


def test_the_citation_names_the_authors_and_the_license_of_the_license():
    citation, license_text = yaml.safe_load((ROOT / "CITATION.cff").read_text()), (ROOT / "LICENSE").read_text()
    [author] = citation["authors"]
    assert author["name"].lower() in license_text.lower() and citation["license"] in license_text
    assert str(citation["date-released"].year) in license_text and "doi" not in citation


def test_the_picture_of_a_real_run_shows_what_the_page_says():
    data = json.loads((ROOT / "benchmarks" / "data" / "anatomy.json").read_text())
    failing, best = data["samples"]
    page = " ".join((ROOT / "docs" / "one_iteration.md").read_text().split())
    assert failing["token"][:3] == ["1", "2", "5"] and sorted("9512327273")[:3] == ["1", "2", "2"]
    assert data["titles"][0].startswith("9512327273=")
    assert "expects another {:.2f}, and after it {:.2f}".format(*failing["value"][2:4]) in page
    first, second, decisive, *later = failing["advantage"]
    assert f"lowest advantage, {decisive:.1f}" in page and f"have {first:.1f} and {second:.1f}" in page
    assert decisive < min(first, second) < max(first, second) < 2 * min(later)
    assert sum(x == pytest.approx(0.1) for x in best["reward"]) == 9 and min(best["advantage"][:9]) > 1
    assert f"ratio of {failing['ratio'][0]:.3f}" in page and failing["ratio"][2] < 1
    assert f"{torch.tensor(failing['old log-prob'][0]).exp():.2f}" in page
