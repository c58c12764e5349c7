"""Links between the pages of the documentation."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def anchors(page: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    pages = [ROOT / "README.md", *(ROOT / "benchmarks").glob("*.md")]
    links = 0
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if target.startswith("http"):
                continue
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(file.read_text()), f"{page.name}: {target}"
            links += 1
    assert links > 20
