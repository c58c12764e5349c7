"""What the bugs of docs/exercises.md do to a run: each beside the healthy script, with two seeds.

    python benchmarks/exercises.py run           # makes the runs that data/exercises.jsonl lacks
    python benchmarks/exercises.py run C 1       # those of bug C with seed 1 alone
    python benchmarks/exercises.py table C       # the metrics of bug C, as on the page, and more
    python benchmarks/exercises.py plot          # docs/pictures/exercises_*.png

Most runs take a quarter of a minute of one core, those of 40 iterations a minute. This file does not name the bugs.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

sys.path.append(str(common.ROOT / "tests"))
from exercise import bug_text
from exercise_bugs import BUGS

RESULTS = common.DATA / "exercises.jsonl"
PICTURES = common.ROOT / "docs" / "pictures"
SEEDS = 1, 2
METRICS = sorted({metric for bug in BUGS.values() for metric in bug.metrics} | {"objective/reward", "actor/approx_kl"})
TOLD = re.compile(r"^(error:|  ratio:|  critic:|  sampler:|  loss)")  # lines of the output that are kept


def execute(letter: str | None, flags: str, seed: int) -> dict:
    """A run of the script with bug `letter`, or of the healthy one."""
    text = bug_text(letter) if letter else (common.ROOT / "ppo_llm.py").read_text()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "exercise.py").write_text(text)
        command = f"exercise.py {flags} --seed {seed} --run-name run"
        start = time.perf_counter()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *command.split()], cwd=folder, env=environment, capture_output=True,
                              text=True)  # fmt: skip
        seconds = time.perf_counter() - start
        run = Path(folder, "runs", "run")
        rows = common.read_lines(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
        samples = common.read_lines(run / "completions.jsonl") if rows else []
        summary = json.loads((run / "summary.json").read_text()) if done.returncode == 0 else {}
    number = lambda x: len(x) if isinstance(x, list) else x if x is None else float(f"{x:.6g}")
    told = [line for line in (done.stdout + done.stderr).splitlines() if TOLD.match(line)]
    return {
        "letter": letter, "flags": flags, "seed": seed, "seconds": round(seconds), "told": told,
        "metrics": {name: [number(row.get(name)) for row in rows] for name in METRICS},
        "before": summary.get("eval_before"), "after": summary.get("eval_after"),
        "last_samples": [{name: line[name] for name in ("prompt", "response", "reward")} for line in samples[-4:]],
    }  # fmt: skip


def results() -> dict:
    """{(letter or None, flags, seed): run}"""
    lines = common.read_lines(RESULTS) if RESULTS.exists() else []
    return {(line["letter"], line["flags"], line["seed"]): line for line in lines}


def run(letters, seeds):
    for seed in seeds:
        for letter in letters:
            for which in None, letter:
                key = which, BUGS[letter].flags, seed
                if key not in results():
                    common.add_line(RESULTS, execute(*key))
                    print(*key, flush=True)


def of(letter: str, sick: bool, seed: int) -> dict | None:
    return results().get((letter if sick else None, BUGS[letter].flags, seed))


def table(letter: str) -> str:
    """The table of the page: short runs with all iterations, others with five of them."""
    length = max(len(of(letter, False, seed)["metrics"]["objective/reward"]) for seed in SEEDS)
    places = range(1, length + 1) if length < 10 else [1, *range(length // 4, length + 1, length // 4)]
    digits = lambda x: "nan" if x is None else "0" if x == 0 else f"{x:.2g}" if abs(x) < 1e4 else f"{x:.0f}"
    lines = [f"| iterations {', '.join(map(str, places))} | healthy | with the bug |", "|---|---|---|"]
    for metric in BUGS[letter].metrics:
        for seed in SEEDS:
            curves = [of(letter, sick, seed)["metrics"][metric] for sick in (False, True)]
            cells = [", ".join(digits(curve[i - 1]) for i in places if i <= len(curve)) for curve in curves]
            lines.append(f"| `{metric}`, seed {seed} | {cells[0]} | {cells[1] or 'the run ends'} |")
    return "\n".join(lines)


def details(letter: str):
    """What else is known of the runs."""
    for sick in False, True:
        for seed in SEEDS:
            line = of(letter, sick, seed)
            print(f"{'sick' if sick else 'healthy':8} seed {seed}: {line['seconds']} s", *line["told"])
            for when in "before", "after":
                print(f"  {when}: {line[when]}")
            print("  last samples:", *(f"{x['prompt']}{x['response']} {x['reward']:.4g}" for x in line["last_samples"]))


# Sheets of small pictures: the letters and the metric that shows each bug.
SHEETS = {
    "exercises_1": {
        "A": "objective/entropy",
        "B": "objective/kl",
        "C": "ratio/steps",
        "D": "actor/clipfrac",
        "E": "objective/reward",
        "G": "critic/value_mean",
        "I": "objective/kl",
        "J": "debug/sampler_trainer_logprob_diff",
    },
    "exercises_2": {
        "K": "objective/reward",
        "L": "objective/kl",
        "M": "objective/kl",
        "N": "critic/grad_norm",
        "O": "critic/grad_norm",
        "P": "objective/reward",
        "Q": "actor/clipfrac",
        "R": "ratio/relative_update",
    },
    "exercises_3": {
        "S": "objective/truncated",
        "T": "actor/grad_norm",
        "U": "critic/value_mean",
        "V": "objective/reward",
        "W": "objective/reward",
    },
}
TITLES = {"debug/sampler_trainer_logprob_diff": "sampler_trainer_logprob_diff"}  # where there is little room
LOG = {"J", "N", "O", "R", "T"}


def plot():
    import matplotlib.pyplot as plt

    PICTURES.mkdir(exist_ok=True)
    plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    for name, panels in SHEETS.items():
        rows = 1 if len(panels) < 6 else 2
        figure, axes = plt.subplots(rows, len(panels) // rows, figsize=(11, 2.4 * rows), layout="constrained")
        for axis, (letter, metric) in zip(axes.flat, panels.items(), strict=True):
            for sick, colour, label in (False, "0.55", "healthy"), (True, "C3", "with the bug"):
                for seed in SEEDS:
                    curve = of(letter, sick, seed)["metrics"][metric]
                    places = range(1, len(curve) + 1)
                    style = "o-" if len(curve) < 10 else "-"
                    shown = [math.nan if x is None else x for x in curve]
                    axis.plot(places, shown, style, color=colour, markersize=3, linewidth=1,
                              label=label if seed == 1 else None)  # fmt: skip
            axis.set(
                title=f"{letter}: {TITLES.get(metric, metric)}",
                xlabel="iteration",
                yscale="log" if letter in LOG else "linear",
            )
        figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
        figure.savefig(PICTURES / f"{name}.png", dpi=90)


def main():
    verb, *rest = sys.argv[1:] or [""]
    if verb == "run":
        run(rest[:1] or BUGS, [int(seed) for seed in rest[1:]] or SEEDS)
    elif verb == "table":
        print(table(*rest))
        details(*rest)
    elif verb == "plot":
        plot()
    else:
        print(__doc__)


if __name__ == "__main__":
    main()
