"""The second script is the first with another rollout, and neither imports the other."""

import ast
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
        "head", "Part I", *"12345", "Part II", *"6789", "10", "11", "12"]  # fmt: skip


@pytest.mark.parametrize("title", [title for title in FIRST if title not in ("head", "5. Rollout")])
def test_section_is_the_same_in_both_scripts(title):
    assert FIRST[title] == SECOND.get(title)


@pytest.mark.parametrize(
    "name", ["Slots", "decode_step", "compiled_decode_step", "Decoder", "play", "to_rollout", "padded"])
def test_what_decodes_is_the_same_in_both_scripts(name):
    """So tests of it may run on the first alone."""
    definitions = [next(node for node in tree.body if getattr(node, "name", "") == name) for tree in TREES.values()]
    first, second = (ast.get_source_segment(TEXTS[file], node) for file, node in zip(NAMES, definitions, strict=True))
    assert first == second


@pytest.mark.parametrize("name", NAMES)
def test_a_script_begins_with_imports_but_none_of_ours_and_ends_with_main(name):
    head = ast.parse(sections(name)["head"]).body
    assert all(isinstance(node, ast.Import | ast.ImportFrom) for node in head[1:])
    nodes = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.name for node in nodes for alias in node.names} | {getattr(node, "module", "") for node in nodes}
    ours = {path.stem for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    assert "torch" in modules and not {str(module).split(".")[0] for module in modules} & ours
    assert TEXTS[name].endswith('\n\nif __name__ == "__main__":\n    main()\n')
