"""Links, commands, flags and metrics that the documentation names exist."""

import re
import shlex
from pathlib import Path

import pytest
import tyro
from test_train import record

pytestmark = pytest.mark.shared

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *sorted(f"benchmarks/{page.name}" for page in (ROOT / "benchmarks").glob("*.md"))]
# Flags of other programs, and those that only patches have.
OTHERS = (
    "nproc-per-node shutdown-timeout rdzv-id rdzv-endpoint rdzv-backend pid no-deps nnodes max-restarts logdir "
    "local-dir help gpu sampler-ranks slow rollout-is-cap rollout-is-band rollout-is-sequence"
).split()


def anchors(page: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert target.startswith("http") or file.exists(), target
        assert target.startswith("http") or not anchor or anchor in anchors(file.read_text()), target


@pytest.mark.parametrize("name", PAGES)
def test_commands_and_flags_exist(ppo, name):
    page = (ROOT / name).read_text()
    fields = [name.replace("_", "-") for name in ppo.Args.__dataclass_fields__]
    known = {f"--{name}" for name in [*fields, *OTHERS]} | {f"--no-{name}" for name in fields}
    unknown = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", page)) - known
    assert not unknown
    code = page.replace("\\\n", " ")
    for command in re.findall(r"\bppo_llm(?:_continuous_batching)?\.py\s+(-[^\n`|]*)", code):
        flags = [word for word in shlex.split(command, comments=True) if word not in ("...", "--help")]
        tyro.cli(ppo.Args, args=flags)  # exits if a flag or a value is not right


def test_defaults_are_those_of_the_table(ppo):
    """Adam's are those of PyTorch, but without weight decay."""
    args = vars(ppo.Args()) | {name: with_model for name, (_, with_model) in ppo.DEFAULTS.items()}
    table = (ROOT / "benchmarks/details.md").read_text().split("## Names elsewhere")[1]
    cells = "; ".join(["gamma = 1; gae_lambda = 1; clip_low = 0.2", *re.findall(r"^\| (`.*?) \|", table, re.M)])
    found = re.findall(r"(\w+) = ([\d.e-]+|on|off|none)(?=[;,]|$)", cells.replace("`", ""))
    words = {"on": True, "off": False, "none": None}
    wrong = [name for name, text in found if args[name] != (words[text] if text in words else float(text))]
    assert len(found) > 20 and not wrong
    defaults = ppo.make_optimizer(ppo.nn.Linear(1, 1)).defaults
    assert (defaults["betas"], defaults["weight_decay"]) == ((0.9, 0.999), 0.0)


def test_metrics_of_the_pages_are_logged(ppo, tmp_path):
    run = record(ppo, tmp_path, kl_coef=0.1, kl_loss="k3", eval_every=1, actor_lr=0.0)  # so that there is a diagnosis
    logged = {name for row in run.rows for name in row}
    kinds = {name.split("/")[0] for name in logged if "/" in name} | {"losses", "charts", "rollout", "grad"}
    pages = (ROOT / "README.md").read_text(), (ROOT / "benchmarks/critic.md").read_text()
    table = (ROOT / "benchmarks/details.md").read_text().split("## Metrics")[1].split("\n## ")[0]
    for text in *pages, table:
        named = set(re.findall(rf"`((?:{'|'.join(kinds)})/[a-z0-9_]+)`", text))
        assert named and named - {"ratio/early_stop_kl"} <= logged  # it did not stop early
    assert {name for name in logged if re.match("actor|critic|objective|ratio", name)} <= named  # by the table
