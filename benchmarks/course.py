"""The runs of the lessons of docs/course.md, each with three seeds, and the tables of that page.

    python benchmarks/course.py run      # makes the runs that data/course.jsonl lacks: half an hour of one core
    python benchmarks/course.py table    # prints the tables

A run is a command of the page with another --seed. It takes at most a minute and a half of one core.
"""

import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

import common

RESULTS = common.DATA / "course.jsonl"
SEEDS = 1, 2, 3
SHORT = "--num-iterations 6 --sft-steps 30 --eval-episodes 64"
FORTY = "--num-iterations 40 --eval-episodes 64"
# Of each lesson: {what the table calls a run: (patch, flags)}
LESSONS = {
    "2": {
        "float32": ("", SHORT),
        "bfloat16": ("", f"{SHORT} --dtype bfloat16"),
        "bfloat16, the sampler's log-probs are the old ones": (
            "", f"{SHORT} --dtype bfloat16 --no-recompute-old-logprobs"),
    },
    "4": {
        "a critic": ("", FORTY),
        "no critic": ("", f"{FORTY} --critic-epochs 0"),
        "groups of four samples": ("group_normalised", FORTY),
    },
    "5": {
        "healthy": ("", FORTY),
        "learning rate of the actor times ten": ("", f"{FORTY} --actor-lr 5e-3"),
        "learning rate of the actor divided by ten": ("", f"{FORTY} --actor-lr 5e-5"),
    },
}  # fmt: skip
# Of each lesson: [(title of a column, metric, "max", "last ten" or an iteration from 1 on, form)]
COLUMNS = {
    "2": [("`debug/sampler_trainer_logprob_diff`", "debug/sampler_trainer_logprob_diff", "max", ".0e"),
          ("`ratio/first_dev`", "ratio/first_dev", "max", ".0e"),
          ("`ratio/last_dev` in iteration 1", "ratio/last_dev", 1, ".2f")],
    "4": [("mean value in iteration 20", "critic/value_mean", 20, ".2f"),
          ("mean return in iteration 20", "critic/return_mean", 20, ".2f"),
          ("explained variance, iterations 31 to 40", "critic/explained_variance", "last ten", ".2f"),
          ("reward, iterations 31 to 40", "objective/reward", "last ten", ".2f")],
    "5": [("`approx_kl` in iteration 1", "actor/approx_kl", 1, ".2g"),
          ("`clipfrac` in iteration 1", "actor/clipfrac", 1, ".2f"),
          ("reward in iteration 1", "objective/reward", 1, ".2f"),
          ("KL, iterations 31 to 40, nats", "objective/kl", "last ten", ".1f"),
          ("reward, iterations 31 to 40", "objective/reward", "last ten", ".2f")],
}  # fmt: skip
METRICS = sorted({metric for columns in COLUMNS.values() for _, metric, *_ in columns})


def execute(patch: str, flags: str, seed: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run = common.run_script(
            common.patched_script(patch), [*shlex.split(flags), "--seed", str(seed)], Path(folder)
        )
        seconds = time.perf_counter() - start
        rows = common.read_lines(run / "metrics.jsonl")
    columns = {name: [float(f"{row.get(name, 0.0):.4g}") for row in rows] for name in METRICS}
    return {"patch": patch, "flags": flags, "seed": seed, "seconds": round(seconds), "columns": columns}


def results() -> dict:
    lines = common.read_lines(RESULTS) if RESULTS.exists() else []
    return {(line["patch"], line["flags"], line["seed"]): line for line in lines}


def number(line: dict, metric: str, when) -> float:
    column = line["columns"][metric]
    if isinstance(when, int):
        return column[when - 1]
    return {"max": max, "last ten": lambda x: statistics.mean(x[-10:])}[when](column)


def table(lesson: str) -> str:
    """Of each run the numbers of three seeds."""
    done, columns = results(), COLUMNS[lesson]
    lines = [f"| run | {' | '.join(title for title, *_ in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for label, (patch, flags) in LESSONS[lesson].items():
        cells = []
        for _, metric, when, form in columns:
            numbers = [number(done[patch, flags, seed], metric, when) for seed in SEEDS]
            cells.append(", ".join("0" if x == 0 else format(x, form) for x in numbers))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run"]:
            for seed in SEEDS:
                for lesson, runs in LESSONS.items():
                    for patch, flags in runs.values():
                        if (patch, flags, seed) not in results():
                            common.add_line(RESULTS, execute(patch, flags, seed))
                            print(lesson, patch, flags, seed, flush=True)
        case ["table"]:
            for lesson in LESSONS:
                print(f"Lesson {lesson}\n\n{table(lesson)}\n")
        case _:
            sys.exit(__doc__)
