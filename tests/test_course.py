"""The course: its runs are commands of the page, and its tables are what the runs gave."""

import re
import sys

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))
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
    assert blanks == set(re.findall(r"^\| `(\w+)` \|", exercises, re.MULTILINE))
    letters = set(re.findall(r"\b[A-Z]\b", assigned))
    assert letters == set(re.findall(r"^### ([A-Z])\b", exercises, re.MULTILINE))
    headings = {name.lower() for name in re.findall(r"^## (.*)$", projects, re.MULTILINE)}
    assert {name.replace("\n", " ").lower() for name in re.findall(r"\[([^\]]*)\]\(projects\.md#", PAGE)} <= headings
