"""Links and commands of the documentation."""

import re
import shlex
from pathlib import Path

import pytest
import tyro

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "benchmarks").glob("*.md"))]
# Flags of other programs, and those that only patches have.
OTHERS = (
    "nproc-per-node shutdown-timeout rdzv-id rdzv-endpoint rdzv-backend pid no-deps nnodes max-restarts logdir "
    "local-dir help gpu sampler-ranks slow"
).split()


def anchors(page: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    links = 0
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if target.startswith("http"):
                continue
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(file.read_text()), f"{page.name}: {target}"
            links += 1
    assert links > 20


def commands(page: str) -> list[str]:
    """What follows the name of a script in indented and fenced blocks, and between backticks."""
    blocks = re.findall(r"(?:^    .*\n)+", page, re.MULTILINE) + re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    inline = [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", prose)]
    found = [re.search(r"\bppo_llm(?:_continuous_batching)?\.py\s+(-.*)", code) for code in lines + inline]
    return [match[1] for match in found if match]


@pytest.mark.shared
def test_commands_have_flags_that_exist(ppo):
    assert sum(len(commands(page.read_text())) for page in PAGES) > 20
    for page in PAGES:
        for command in commands(page.read_text()):
            flags = [word for word in shlex.split(command, comments=True) if word not in ("...", "--help")]
            tyro.cli(ppo.Args, args=flags)  # exits if a flag or a value is not right


@pytest.mark.shared
def test_flags_exist(ppo):
    fields = [name.replace("_", "-") for name in ppo.Args.__dataclass_fields__]
    known = {f"--{name}" for name in [*fields, *OTHERS]} | {f"--no-{name}" for name in fields}
    for page in PAGES:
        flags = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", page.read_text())
        assert set(flags) <= known, f"{page.name}: {set(flags) - known}"
