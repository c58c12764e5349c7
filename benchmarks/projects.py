"""The eight small projects of docs/projects.md: their runs, tables and pictures.

    python benchmarks/projects.py list                                 # the projects and the commands of their runs
    python benchmarks/projects.py run [--only NAME] [--seeds 1 2 3]    # adds to data/projects.jsonl
    python benchmarks/projects.py table [--only NAME] [--seeds 1 2 3]  # prints the tables of the page
    python benchmarks/projects.py draw [--only NAME] [--seeds 1 2 3]   # --folder/project_NAME.png

The page is the source of the projects: `run` executes the commands that stand on it, with the patches and the modules
that stand on it. A run takes about a minute of one core. A run that is in projects.jsonl is not made again, unless its
command, its patches or its modules have changed. benchmarks/README.md has the commits of the repository's
projects.jsonl. Move it away before you make runs of another version.
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import common
from common import DATA, MEAN_OF, PICTURES, ROOT

PAGE = ROOT / "docs" / "projects.md"
RESULTS = DATA / "projects.jsonl"
COLUMNS = {  # metric: its name in projects.jsonl
    "objective/reward": "reward", "objective/accuracy": "accuracy", "objective/kl": "kl",
    "objective/entropy": "entropy", "objective/response_tokens": "tokens", "objective/truncated": "truncated",
    "actor/approx_kl": "approx_kl", "actor/clipfrac": "clipfrac", "critic/explained_variance": "explained",
    "ratio/first_dev": "first_dev", "ratio/advantage_std": "advantage_std",
    "debug/sampler_trainer_logprob_diff": "sampler_diff", "eval/accuracy": "eval_accuracy",
}  # fmt: skip
END = 2  # points at the end of a curve, whose mean is the number "at the end"


@dataclasses.dataclass
class Column:
    """A column of a table. `when` is "end" or a number of iterations."""

    title: str
    metric: str
    when: str | int = "end"
    form: str = ".2f"

    def cell(self, row: dict) -> str:
        return format(self.number(row), self.form).removesuffix("%")

    def number(self, row: dict) -> float:
        if self.metric == "seconds":
            return row["seconds"]
        if self.metric in row["evaluations"]:
            return row["evaluations"][self.metric]
        column = row["columns"][self.metric]
        return statistics.mean(column[-END:]) if self.when == "end" else column[self.when // MEAN_OF - 1]


@dataclasses.dataclass
class Project:
    heading: str  # of its section of the page
    columns: list[Column]
    drawn: tuple[str, ...]  # metrics of the picture


REWARD, RIGHT = Column("reward at the end", "reward"), Column("right at the end, %", "accuracy", form=".1%")
KL = Column("KL at the end, nats", "kl", form=".1f")
SECONDS = Column("CPU seconds", "seconds", form="d")
PROJECTS = {
    "lambda": Project("Lambda on dense rewards", [Column("reward after 30 iterations", "reward", 30), REWARD, RIGHT],
                      ("reward", "explained")),
    "critic": Project("Critic or group", [Column("reward after 40 iterations", "reward", 40), REWARD, SECONDS],
                      ("reward", "explained")),
    "kl": Project("KL in the reward or in the loss",
                  [REWARD, RIGHT, KL, Column("standard deviation of the advantages", "advantage_std")],
                  ("reward", "kl")),
    "epochs": Project("Epochs and clip",
                      [REWARD, RIGHT, Column("approx_kl, iterations 6 to 10", "approx_kl", 10, ".3f"), SECONDS],
                      ("reward", "approx_kl")),
    "length": Project("A length penalty",
                      [REWARD, RIGHT, Column("tokens, iterations 6 to 10", "tokens", 10, ".1f"),
                       Column("tokens at the end", "tokens", form=".1f")], ("reward", "tokens")),
    "hack": Project("A hacked reward",
                    [REWARD, RIGHT, Column("right, greedy, %", "greedy_accuracy after", form=".1%"), KL],
                    ("reward", "accuracy")),
    "sampler": Project("Old log-probs of a sampler in bfloat16",
                       [Column("distance between log-probs", "sampler_diff", form=".3f"),
                        Column("distance of the first ratio from 1", "first_dev", form=".3f"),
                        Column("clipfrac at the end", "clipfrac"), REWARD, RIGHT], ("reward", "first_dev")),
    "curriculum": Project("A curriculum",
                          [*(Column(f"after {n} iterations, %", "eval_accuracy", n + MEAN_OF, ".1%")
                             for n in (40, 60, 80)),
                           Column("after 100 iterations, %", "accuracy after", form=".1%"),
                           Column("after 100, greedy, %", "greedy_accuracy after", form=".1%")],
                          ("accuracy", "eval_accuracy")),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
    """A command of the page, with the patches that are applied when it stands there."""

    project: str
    variant: str  # the comment behind the command
    command: str
    patches: tuple[str, ...]  # file names
    files: tuple[tuple[str, str], ...]  # of the section's code blocks: (name, text)

    @property
    def code(self) -> int:
        """A checksum of all that the command runs besides the script: the lines that patches add, and modules."""
        blocks = dict(self.files)
        patches = [blocks[name] if name in blocks else (ROOT / name).read_text() for name in self.patches]
        texts = ["\n".join(re.findall(r"^[+](?![+]{2} ).*", text, re.M)) for text in patches]
        texts += [text for name, text in self.files if f" {name.removesuffix('.py')}:" in self.command]
        return zlib.crc32("\n".join(texts).encode())

    def key(self, seed: int) -> tuple:
        return self.command, self.code, seed


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.*)\n", PAGE.read_text(), flags=re.MULTILINE)
    texts = dict(zip(parts[1::2], parts[2::2]))
    return {name: texts[project.heading] for name, project in PROJECTS.items()}


@functools.cache
def runs(project: str) -> list[Run]:
    section = sections()[project]
    blocks = re.findall(r"^```(?:python|diff)\n# (\S+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    found, patches = [], []
    for line in re.sub(r"\\\n *", "", section).splitlines():
        match shlex.split(line, comments=True) if line.startswith("    ") else []:
            case ["git", "apply", "-R", patch]:
                patches.remove(patch)
            case ["git", "apply", patch]:
                patches.append(patch)
            case ["python", "ppo_llm.py", *_]:
                command, _, variant = line.partition("  # ")
                found.append(Run(project, variant.strip(), " ".join(command.split()), tuple(patches), tuple(blocks)))
    return found


def prepare(run: Run, folder: Path) -> None:
    """Write the script, with its patches, and the modules of the section into the folder."""
    (folder / "ppo_llm.py").write_bytes((ROOT / "ppo_llm.py").read_bytes())
    for name, text in run.files:
        (folder / name).write_text(text)
    for patch in run.patches:
        path = patch if (folder / patch).exists() else ROOT / patch
        common.git_apply(path, folder)


def measure(run: Run, seed: int) -> dict:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(run, folder)
        words = [sys.executable, *shlex.split(run.command)[1:], "--seed", str(seed), "--run-name", "run",
                 "--log-dir", name, "--save-every", "0"]  # fmt: skip
        paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # of benchmarks/tasks.py
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=os.environ | paths)
        seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
        rows = common.read_lines(folder / "run" / "metrics.jsonl")
        summary = json.loads((folder / "run" / "summary.json").read_text())
    columns = common.mean_columns(rows, COLUMNS)
    columns = {name: column for name, column in columns.items() if set(column) != {None}}
    kinds = "accuracy", "greedy_accuracy"
    evaluations = {f"{kind} {when}": summary[f"eval_{when}"][kind] for kind in kinds for when in ("before", "after")}
    return {
        "project": run.project, "variant": run.variant, "seed": seed, "command": run.command, "code": run.code,
        "seconds": round(seconds), "evaluations": evaluations, "columns": columns,
    }  # fmt: skip


def results() -> dict[tuple, dict]:
    """All runs of projects.jsonl, by their keys."""
    rows = common.read_lines(RESULTS) if RESULTS.exists() else []
    return {(row["command"], row["code"], row["seed"]): row for row in rows}


def execute(names: list[str], seeds: list[int]) -> None:
    wanted = [(run, seed) for seed in seeds for name in names for run in runs(name)]
    for i, (run, seed) in enumerate(wanted, start=1):
        if run.key(seed) not in results():
            common.add_line(RESULTS, measure(run, seed))
        row = results()[run.key(seed)]
        last = {name: f"{column[-1]:.3g}" for name, column in row["columns"].items() if column[-1] is not None}
        print(f"{i}/{len(wanted)} {run.project}, {run.variant}, seed {seed}, {row['seconds']} s: {last}", flush=True)


def list_all(names: list[str]) -> None:
    for name in names:
        print(f"{name}: {PROJECTS[name].heading}")
        for run in runs(name):
            print(f"  {run.variant:24} {run.command}{f'  # {run.patches}' if run.patches else ''}")


def of(run: Run, seeds: list[int]) -> list[dict]:
    """The results of a run that have been made."""
    done = results()
    return [done[run.key(seed)] for seed in seeds if run.key(seed) in done]


def minutes(name: str, seeds: list[int]) -> int:
    """Of the CPU, for all runs with one seed."""
    return max(round(sum(row["seconds"] for run in runs(name) for row in of(run, [seed])) / 60) for seed in seeds)


def table(name: str, seeds: list[int]) -> str:
    """In Markdown. A cell has a number for each seed."""
    columns = PROJECTS[name].columns
    lines = [["", *(column.title for column in columns)], ["---"] * (len(columns) + 1)]
    for run in runs(name):
        rows = of(run, seeds)
        lines.append([run.variant, *(", ".join(column.cell(row) for row in rows) for column in columns)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw(name: str, seeds: list[int], folder: Path) -> None:
    """A thick line is the median of the seeds. A thin line is one seed."""
    import matplotlib.pyplot as plt

    length = lambda row: len(row["columns"]["reward"])
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), layout="constrained")
    for axis, metric in zip(axes, PROJECTS[name].drawn):
        for i, run in enumerate(runs(name)):
            rows = of(run, seeds)
            if length(rows[0]) != length(of(runs(name)[0], seeds)[0]):
                continue  # A run of another length stands in the table alone.
            curves = [row["columns"][metric] for row in rows]
            points = [k for k, y in enumerate(curves[0]) if y is not None]
            at_start = metric == "eval_accuracy"  # The evaluation comes before the first of the five iterations.
            x = [(k + (not at_start)) * MEAN_OF for k in points]
            for curve in curves:
                axis.plot(x, [curve[k] for k in points], color=f"C{i}", linewidth=0.4, alpha=0.5)
            median = [statistics.median(curve[k] for curve in curves) for k in points]
            axis.plot(x, median, color=f"C{i}", label=run.variant, linewidth=1.4)
        axis.set(xlabel="iterations", ylabel=metric.replace("_", " "))
    axes[0].legend(fontsize=7)
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / f"project_{name}.png", dpi=90)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["list", "run", "table", "draw"])
    parser.add_argument("--only", choices=PROJECTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, default=PICTURES)
    args = parser.parse_args()
    names = [args.only] if args.only else list(PROJECTS)
    if args.what == "list":
        list_all(names)
    elif args.what == "run":
        execute(names, args.seeds)
    elif args.what == "table":
        for name in names:
            print(f"\n## {PROJECTS[name].heading}\n\n{table(name, args.seeds)}")
    else:
        for name in names:
            draw(name, args.seeds, args.folder)


if __name__ == "__main__":
    main()
