"""Three small tasks that the built-in model learns: sorting digits (the default task), sequences, guessing a number.

    python benchmarks/table.py --only default dense turns                   # makes the runs, 125 minutes of one core
    python benchmarks/learning_curve.py read runs/table/CODE/*/line.json    # adds them to data/learning_curve.jsonl
    python benchmarks/learning_curve.py                                     # prints a table and draws the pictures

The newest run of a seed counts. The pictures are learning_curve.png, sequences.png and guess_number.png. The runs of
the default task evaluate every 20 iterations, which does not change the training.
"""

import json
import statistics
import sys
from pathlib import Path

import common
import numpy as np
from common import BLUE, INK, MEAN_OF, ORANGE, RED, mean_columns
from experiments import SAMPLES

RESULTS = common.DATA / "learning_curve.jsonl"
DENSE = "--env-id benchmarks.tasks:Dense-v0 --num-iterations 270 --max-new-tokens 7 --kl-coef 0.02 --gamma 0.5"
TASKS = {  # {task: {run: flags}}
    "default": {"default": "--eval-every 20"},
    "sequences": {
        "dense": DENSE,
        "dense, constant baseline": f"{DENSE} --critic-epochs 0",
        "at the end": "--env-id benchmarks.tasks:AtEnd-v0 --num-iterations 270 --max-new-tokens 7 --kl-coef 0.02",
    },
    "guess": {"guess": "--env-id benchmarks.tasks:Guess-v0 --num-iterations 270 --max-new-tokens 24"},
}
COLUMNS = {"objective/reward": "reward", "objective/accuracy": "accuracy", "objective/response_tokens": "tokens"}
SHOWN = 1, 40, 200  # iterations whose first logged sample is shown
BINARY_SEARCH = 2.625  # guesses on average: 1, 2, 4 and 1 of 8 numbers are found at the first to the fourth guess


def read(folder: Path, name: str, seed: int) -> dict:
    """What is kept of a run: means of MEAN_OF iterations, evaluations, and samples."""
    summary = json.loads((folder / "summary.json").read_text())
    rows, completions = (common.read_lines(folder / f"{x}.jsonl") for x in ("metrics", "completions"))
    within = [(row["iteration"], {key.removeprefix("eval/"): row[key] for key in row}) for row in rows[1:]]
    evaluations = [(0, summary["eval_before"]), *within, (summary["iterations"], summary["eval_after"])]
    names = "accuracy", "greedy_accuracy", "reward"
    columns = mean_columns(rows, COLUMNS)
    columns["guesses"] = [tokens / 2 for tokens in columns["tokens"]]  # A guess is a digit and an end of text.
    first = {row["iteration"] + 1: row for row in reversed(completions)}
    samples = [[i, first[i]["prompt"], first[i]["response"], first[i]["reward"]] for i in SHOWN if i in first]
    return {
        "run": name, "seed": seed, "seconds": round(summary["seconds"]), "columns": columns,
        "evaluations": [[i * SAMPLES, *(row[x] for x in names)] for i, row in evaluations if "greedy_accuracy" in row],
        "samples": samples,
    }  # fmt: skip


def of(name: str) -> list[dict]:
    """The newest results of a run, one for each seed."""
    newest = {row["seed"]: row for row in common.read_lines(RESULTS) if row["run"] == name}
    return [newest[seed] for seed in sorted(newest)]


def table() -> None:
    common.table(["run", "seed", "sampled before", "sampled after", "greedy before", "greedy after", "reward after",
                  "samples to 90%", "seconds"])  # fmt: skip
    for name in (name for runs in TASKS.values() for name in runs):
        for row in of(name):
            points = row["evaluations"]
            ends = [f"{100 * points[i][kind]:.1f}%" for kind in (1, 2) for i in (0, -1)]
            reached = [point[0] for point in points if point[1] >= 0.9]
            cells = [*ends, f"{points[-1][3]:.3f}", f"{reached[0]:,}" if reached else "-", row["seconds"]]
            common.line([name, row["seed"], *cells])


def show_sample(axis, text: str, point: tuple[float, float], place: tuple[float, float], color: str) -> None:
    """The text of a sample at a place of the axes, and a line from there to its point on the curve."""
    axis.annotate(text, point, place, family="DejaVu Sans Mono", fontsize=9, linespacing=1.35, va="center",
                  bbox={"facecolor": color, "linewidth": 0, "boxstyle": "round,pad=0.4"},
                  arrowprops={"arrowstyle": "-", "color": common.GREY, "linewidth": 0.8, "shrinkB": 3})  # fmt: skip


def draw_default() -> None:
    rows = of("default")
    last = [100 * row["evaluations"][-1][1] for row in rows]
    shares = f"{min(last):.1f}–{max(last):.1f}%"
    title = f"All {len(rows)} seeds learn to sort: at the end {shares} of the answers to held-out prompts are right"
    figure, axis = common.new_picture(title, 3.9)
    samples = [point[0] for point in rows[0]["evaluations"]]
    ends = []
    for kind, label, color in (2, "greedy", ORANGE), (1, "sampled", BLUE):
        curves = [[point[kind] for point in row["evaluations"]] for row in rows]
        ends.append((common.draw_seeds(axis, samples, curves, color), label, color))
    median = [statistics.median(row["evaluations"][i][1] for row in rows) for i in range(len(samples))]
    places = (12_500, 0.13), (21_000, 0.45), (38_000, 0.68)
    for (iteration, prompt, response, reward), place in zip(rows[0]["samples"], places):
        text = f"iteration {iteration}\n{prompt}{response}\nreward {reward:.1f}"
        point = iteration * SAMPLES, np.interp(iteration * SAMPLES, samples, median)
        show_sample(axis, text, point, place, common.FAINT_GREEN if reward == 1 else common.FAINT_RED)
    axis.set(xlabel="samples", xlim=(0, samples[-1]), ylim=(-0.02, 1.02),
             title="right answers to held-out prompts, and the first sample that three iterations log")  # fmt: skip
    common.thousands(axis)
    common.percent(axis)
    common.label_ends(axis, ends)
    common.save_picture(figure, common.PICTURES / "learning_curve.png")


def curves_of(name: str, column: str) -> list[list[float]]:
    """The curves of a run, one for each seed."""
    return [row["columns"][column] for row in of(name)]


def draw_sequences() -> None:
    title = "Rewards at the digits that earned them are learned, and the same rewards at the end are not"
    figure, axis = common.new_picture(title, 3.4)
    ends = []
    for label, color in zip(TASKS["sequences"], (BLUE, INK, RED)):
        curves = curves_of(label, "accuracy")
        samples = [SAMPLES * MEAN_OF * (i + 1) for i in range(len(curves[0]))]
        ends.append((common.draw_seeds(axis, samples, curves, color), label.replace(", ", ",\n"), color))
    axis.set(xlabel="samples", title="exact answers in the rollouts", xlim=(0, samples[-1]), ylim=(-0.02, 1.02))
    common.thousands(axis)
    common.percent(axis)
    common.label_ends(axis, ends)
    common.save_picture(figure, common.PICTURES / "sequences.png")


def draw_guess() -> None:
    curves = curves_of("guess", "guesses")
    figure, axis = common.new_picture("All three seeds learn to guess a number by binary search", 3.4)
    samples = [SAMPLES * MEAN_OF * (i + 1) for i in range(len(curves[0]))]
    axis.axhline(BINARY_SEARCH, color=ORANGE, linewidth=1.5, linestyle="--")
    common.draw_seeds(axis, samples, curves, BLUE)
    axis.set(xlabel="samples", title="guesses per game, on average", xlim=(0, samples[-1]), ylim=(0, 7))
    axis.text(samples[-1], BINARY_SEARCH - 0.2, "binary search: 2.6 guesses", color=ORANGE, ha="right", va="top")
    common.thousands(axis)
    common.save_picture(figure, common.PICTURES / "guess_number.png")


def main():
    match sys.argv[1:]:
        case ["read", *lines]:
            names = {flags: name for runs in TASKS.values() for name, flags in runs.items()}
            for name, seed, folder, _ in common.runs_of_table(lines, names):
                common.add_line(RESULTS, read(folder, name, seed))
        case []:
            table()
            draw_default()
            draw_sequences()
            draw_guess()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
