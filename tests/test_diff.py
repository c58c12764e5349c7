"""The two scripts differ in the header and at the end of section 5 only, and import nothing of ours."""

import ast
import re
import tomllib

import plant_faults
import pytest
from conftest import ROOT, SCRIPTS

TEXTS = [(ROOT / f"{name}.py").read_text(encoding="utf-8") for name in SCRIPTS]


def sections(text):
    """{title: text}; what stands before "Part I" of the docstring is called "header"."""
    header, body = re.split(r"(?m)^(?=Part I is PPO)", text)
    parts = re.split(r"(?m)^# (?:===|#+) (.+?) [=#]+$", body)
    return {"header": header, "imports": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def test_sections_are_the_same_but_for_the_header_and_the_rollout():
    first, second = map(sections, TEXTS)
    assert list(first) == list(second)
    assert [title for title in first if first[title] != second[title]] == ["header", "5. Rollout"]
    assert [title.split(":")[0].split(".")[0] for title in first] == [
        "header", "imports", "Part I", *"12345", "Part II", *"6789", "10", "11"]  # fmt: skip


def test_the_rollouts_differ_below_their_last_heading_only():
    """Tests of what stands above it may run on the first script alone."""
    halves = [sections(text)["5. Rollout"].split("\n# --- ") for text in TEXTS]
    first, second = (shared for shared, _ in halves)
    assert first == second and "class Episode" in first and "def rollout(" in first


def test_every_fault_of_the_list_can_be_planted():
    for tests, old, new in plant_faults.read_faults().values():
        assert plant_faults.plant(old, new) and tests.startswith(("tests/test_", "lives: "))


@pytest.mark.parametrize("text", TEXTS, ids=SCRIPTS)
def test_the_packages_that_uv_installs_for_a_script_are_those_of_requirements_txt(text):
    """All but pytest's. Its inline metadata is found as https://peps.python.org/pep-0723/ says."""
    [block] = re.findall(r"(?m)^# /// script$\s(?:^#(?:| .*)$\s)+^# ///$", text)
    metadata = tomllib.loads("\n".join(line[2:] for line in block.splitlines()[1:-1]))
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert metadata["dependencies"] == [line for line in lines if not line.startswith(("#", "pytest"))]
    assert text.index(block) < text.index('r"""')


@pytest.mark.parametrize("text", TEXTS, ids=SCRIPTS)
def test_a_script_imports_nothing_of_ours_and_ends_with_main(text):
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.name for node in nodes for alias in node.names} | {getattr(node, "module", "") for node in nodes}
    ours = {path.stem for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    assert "torch" in modules and not {module.split(".")[0] for module in modules} & ours
    assert text.endswith('\n\nif __name__ == "__main__":\n    main()\n')
