"""The second script is the first with another rollout. Both keep to their budgets of lines and bytes."""

import ast
import importlib
import re

import pytest
from conftest import ROOT

NAMES = ("ppo_llm.py", "ppo_llm_continuous_batching.py")
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}
TREES = {name: ast.parse(text) for name, text in TEXTS.items()}


def sections(name):
    """{title: text}; what stands before the first banner is called "head"."""
    parts = re.split(r"(?m)^# (?:===|#+) (.+?) [=#]+$", TEXTS[name])
    return {"head": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


FIRST, SECOND = map(sections, NAMES)


def test_sections_are_in_the_same_order():
    assert list(FIRST) == list(SECOND)
    assert [title.split(":")[0].split(".")[0] for title in FIRST] == [
        "head", "Part I", *"1234", "Part II", *"56789", "10"]  # fmt: skip


@pytest.mark.parametrize("title", [title for title in FIRST if title not in ("head", "4. Rollout")])
def test_section_is_the_same_in_both_scripts(title):
    assert FIRST[title] == SECOND.get(title)


@pytest.mark.parametrize("name", NAMES)
def test_a_script_begins_with_imports_but_none_of_ours_and_ends_with_main(name):
    head = ast.parse(sections(name)["head"]).body
    assert all(isinstance(node, ast.Import | ast.ImportFrom) for node in head[1:])
    nodes = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.name for node in nodes for alias in node.names} | {getattr(node, "module", "") for node in nodes}
    ours = {path.stem for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    assert "torch" in modules and not {str(module).split(".")[0] for module in modules} & ours
    assert TEXTS[name].endswith('\n\nif __name__ == "__main__":\n    main()\n')


def test_scripts_and_part_one_of_the_first_keep_to_their_budgets():
    part = re.split(r"(?m)^# #+ Part II\b", TEXTS[NAMES[0]])[0]
    for text, lines, size in ((TEXTS[NAMES[0]], 2188, 116_100), (part, 800, 43_000), (TEXTS[NAMES[1]], 2294, 121_300)):
        assert (len(text.splitlines()) <= lines, len(text.encode()) <= size) == (True, True)
        assert sum(len(line) > 100 for line in text.splitlines()) <= 60


@pytest.mark.parametrize("name", NAMES)
def test_functions_are_short(name):
    length = lambda node: node.end_lineno - node.lineno + 1
    functions = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.FunctionDef)]
    long = [node for node in functions if length(node) > 60]
    assert len(long) == 1, [node.name for node in long]  # the one with the loop over iterations
    loops = [length(node) for node in ast.walk(long[0]) if isinstance(node, ast.While)]
    assert len(loops) == 1 and loops[0] <= 100
    code = importlib.import_module(name.removesuffix(".py")).ppo.__code__
    assert len(code.co_varnames + code.co_cellvars) <= 55


def test_readme_and_tests_keep_to_their_budget():
    tests = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "tests").glob("*.py"))
    assert tests <= 3200 and len((ROOT / "README.md").read_bytes()) <= 16_000
