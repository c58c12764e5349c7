"""Links, commands, flags, metrics, code and numbers of the pages."""

import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import tyro
from test_train import record

pytestmark = pytest.mark.shared

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = "docs", "benchmarks", "forks"
PAGES = ["README.md", *sorted(f"{folder}/{page.name}" for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))]
# Flags of other programs, and those that only patches have.
OTHERS = (
    "nproc-per-node shutdown-timeout rdzv-id rdzv-endpoint rdzv-backend pid no-deps nnodes max-restarts logdir "
    "local-dir help gpu length-penalty my-coef lambda-alpha tokens critic-ranks sampler-ranks slow rollout-is-cap "
    "rollout-is-band rollout-is-sequence model-dir only seeds penalise-success-only sampler-dtype sampler-bits "
    "find-links largest watch patches "
    "nodes ntasks-per-node gpus-per-node cpus-per-task time signal requeue open-mode dependency job-name "  # of sbatch
    "signals-to-handle standalone "
    "explain secret bodies limit"
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
        file = (page.parent / path).resolve() if path else page
        assert target.startswith("http") or file.exists(), target
        assert target.startswith("http") or not anchor or anchor in anchors(file.read_text()), target


def test_the_loop_of_the_front_page_is_that_of_the_script():
    """Every line of the excerpt, in the same order. Lines between them are left out."""
    readme = (ROOT / "README.md").read_text()
    [excerpt] = re.findall(r"```python\n(while .*?)```", readme, re.DOTALL)
    script = iter((ROOT / "ppo_llm.py").read_text().splitlines())
    for line in excerpt.splitlines():
        assert line.strip() == "..." or f"    {line}" in script, line


def test_the_plan_on_the_pages_is_that_of_the_defaults(ppo, capsys):
    args = ppo.fill_in_defaults(ppo.Args(device="cpu"))
    ppo.print_plan(args, ppo.plan_steps(args), *[[types.SimpleNamespace(unwrapped=None)]] * 2)
    printed = capsys.readouterr().out.splitlines()
    [whole] = re.findall(r"```\n(  models .*?)```", (ROOT / "docs" / "reading_a_run.md").read_text(), re.DOTALL)
    assert whole.splitlines() == printed
    [part] = re.findall(r"```\n(  rollout .*?)  \.\.\.\n", (ROOT / "README.md").read_text(), re.DOTALL)
    assert set(part.splitlines()) <= set(printed)
    for page in "README.md", "docs/reading_a_run.md":
        [iterations] = re.findall(r"(?m)^\d+/(\d+): reward", (ROOT / page).read_text())
        assert int(iterations) == args.num_iterations


def test_the_defaults_beside_those_of_other_projects(ppo):
    rows = re.findall(r"(?m)^\| (`.*?) \| ", (ROOT / "docs" / "coming_from.md").read_text())
    args = vars(ppo.Args()) | {name: with_model for name, (_, with_model) in ppo.DEFAULTS_BY_MODEL.items()}
    found = [
        (name, number)
        for row in rows
        for names, number in re.findall(r"((?:`\w+`, )*`\w+`) = ([\d.e-]*\d)(?![\d.]| /)", row)
        for name in re.findall(r"\w+", names)
    ]
    assert len(found) >= 18 and {name: args[name] for name, _ in found} == {name: float(x) for name, x in found}


def test_the_lengths_that_the_front_page_names():
    lines = (ROOT / "ppo_llm.py").read_text().splitlines()
    [part_two] = [i for i, line in enumerate(lines) if "Part II: what PPO stands on" in line]
    text = (ROOT / "README.md").read_text()
    [(whole, first)] = re.findall(r"The file has some ([\d,]+) lines, and the first (\d+) are PPO", text)
    assert abs(int(whole.replace(",", "")) - len(lines)) < 20 and abs(int(first) - part_two) < 10


NUMBER = r"-?\d+\.\d+"


@pytest.mark.slow
def test_one_iteration_by_hand_shows_what_its_script_prints():
    """The last digit depends on how a processor rounds."""
    page = (ROOT / "docs/one_iteration.md").read_text()
    blocks = re.findall(r"```\n(.*?)```", page, re.DOTALL)
    command = [sys.executable, ROOT / "docs/one_iteration.py"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    shown = " ".join("\n".join(blocks).split())
    printed = " ".join(printed.split())
    assert re.sub(NUMBER, "x", shown) == re.sub(NUMBER, "x", printed)
    numbers = [[float(x) for x in re.findall(NUMBER, text)] for text in (shown, printed)]
    assert len(numbers[0]) > 200 and numbers[0] == pytest.approx(numbers[1], abs=0.01)


@pytest.mark.parametrize("name", PAGES)
def test_commands_and_flags_exist(ppo, name):
    if name in ("docs/projects.md", "docs/vllm.md"):  # with flags of patches: see test_projects.py, test_vllm.py
        return
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
    args = vars(ppo.Args()) | {name: with_model for name, (_, with_model) in ppo.DEFAULTS_BY_MODEL.items()}
    table = (ROOT / "docs/coming_from.md").read_text().split("## Names elsewhere")[1]
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
    table = (ROOT / "docs/reading_a_run.md").read_text().split("## Metrics")[1].split("\n## ")[0]
    for text in *((ROOT / name).read_text() for name in PAGES), table:
        named = set(re.findall(rf"`((?:{'|'.join(kinds)})/[a-z0-9_]+)`", text))
        assert named - {"ratio/early_stop_kl"} <= logged  # it did not stop early
    assert {name for name in logged if re.match("actor|critic|objective|ratio", name)} <= named  # by the table


def test_the_drawings_are_those_of_their_script():
    sys.path.append(str(ROOT / "benchmarks"))
    import figures

    assert {path.stem for path in figures.FOLDER.glob("*.svg")} == figures.DRAWINGS.keys()
    for name, draw in figures.DRAWINGS.items():
        assert (figures.FOLDER / f"{name}.svg").read_text() == draw()
