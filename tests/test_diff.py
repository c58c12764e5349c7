"""The second script is the first with another rollout, and nothing else."""

import ast
import re
import subprocess

import pytest
from conftest import ROOT

NAMES = ("ppo_llm.py", "ppo_llm_continuous_batching.py")


def sections(name):
    """{title: text}; what stands before the first banner is called "head"."""
    parts = re.split(r"(?m)^# === (.+?) ===$", (ROOT / name).read_text())
    return {"head": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


FIRST, SECOND = map(sections, NAMES)


def test_sections_are_in_the_same_order():
    assert list(FIRST) == list(SECOND) and len(FIRST) == 11
    assert [title.split(".")[0] for title in list(FIRST)[1:]] == [str(i) for i in range(1, 11)]


@pytest.mark.parametrize("title", [title for title in FIRST if not title.startswith(("head", "1.", "4."))])
def test_section_is_the_same(title):
    assert FIRST[title] == SECOND[title]


def test_heads_differ_in_docstring_and_standard_library_imports_alone():
    bodies = []
    for text in (FIRST["head"], SECOND["head"]):
        body = [node for node in ast.parse(text).body[1:] if not isinstance(node, ast.Import)]
        bodies.append([ast.unparse(node) for node in body])
    assert bodies[0] == bodies[1] and len(bodies[0]) > 10
    imports = [set(re.findall(r"(?m)^import (.+)$", text)) for text in (FIRST["head"], SECOND["head"])]
    assert imports[1] - imports[0] == {"heapq"} and imports[0] <= imports[1]


def test_arguments_differ_in_one_flag():
    kept = [line.replace(" prefill_tokens", "") for line in SECOND["1. Arguments"].split("\n")]
    kept = [line for line in kept if not line.startswith("   : int = ")]
    assert [line for line in kept if "prefill_tokens" in line] == []
    assert kept == FIRST["1. Arguments"].split("\n")


def test_difference_is_small():
    command = ["git", "diff", "--no-index", "--numstat", *NAMES]
    added, removed, _ = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split(maxsplit=2)
    assert 0 < int(added) <= 120 and 0 < int(removed) <= 60


@pytest.mark.parametrize("name", NAMES)
def test_a_script_imports_nothing_of_ours(name):
    tree = ast.parse((ROOT / name).read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.name for node in nodes for alias in node.names} | {getattr(node, "module", "") for node in nodes}
    assert not any(str(module).startswith("ppo_llm") for module in modules) and "torch" in modules
