"""Accuracy of sampled responses over wall time, of runs.

    python benchmarks/learning_curve.py runs/a runs/b ...      # draws benchmarks/learning_curve.png

Seconds are those of the iterations, without start, warm start and evaluations.
"""

import itertools
import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

PHASES = ("rollout", "score", "critic", "actor", "hand_over", "diagnose")


def main():
    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    for folder in map(Path, sys.argv[1:]):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        seconds = itertools.accumulate(sum(row.get(f"time/{phase}", 0.0) for phase in PHASES) for row in rows)
        axes.plot(list(seconds), [100 * row["objective/accuracy"] for row in rows], label=folder.name, linewidth=1)
    axes.set(xlabel="seconds", ylabel="right responses, %", ylim=(0, 100))
    axes.legend(loc="lower right")
    figure.savefig(Path(__file__).parent / "learning_curve.png", dpi=110)


main()
