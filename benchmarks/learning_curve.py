"""The default task: accuracy on held-out prompts over samples, five seeds, with responses of the first one.

    python benchmarks/learning_curve.py            # runs the seeds, ten minutes of one core
    python benchmarks/learning_curve.py 1 3        # some seeds
    python benchmarks/learning_curve.py plot       # of what is there

Prints a table and draws pictures/learning_curve.png. The runs evaluate every 20 iterations, which does not change the
training. They stay in runs/learning_curve.
"""

import json
import subprocess
import sys
from pathlib import Path

import common
import matplotlib.pyplot as plt
from common import ROOT, ppo_llm

EVERY = 20  # iterations
RUNS = Path("runs/learning_curve")


def curve(folder: Path) -> list[tuple[int, dict]]:
    """(samples, evaluation) of a run."""
    summary, per_iteration = json.loads((folder / "summary.json").read_text()), ppo_llm.Args().rollout_batch_size
    points = [(0, summary["eval_before"])]
    for row in common.read_lines(folder / "metrics.jsonl"):
        evaluation = {name.removeprefix("eval/"): row[name] for name in row if name.startswith("eval/")}
        if evaluation:
            points.append((row["iteration"] * per_iteration, evaluation))
    return [*points, (summary["iterations"] * per_iteration, summary["eval_after"])]


def table(folders: list[Path]) -> None:
    print(common.hardware())
    common.table(["seed", "sampled before", "sampled after", "greedy before", "greedy after", "samples to 90 %",
                  "seconds"])  # fmt: skip
    for folder in folders:
        points = curve(folder)
        ends = [f"{points[i][1][kind]:.1%}" for kind in ("accuracy", "greedy_accuracy") for i in (0, -1)]
        reached = [samples for samples, evaluation in points if evaluation["accuracy"] >= 0.9]
        seconds = json.loads((folder / "summary.json").read_text())["seconds"]
        common.line([folder.name, *ends, f"{reached[0]:,}" if reached else "-", f"{seconds:.0f}"])


def draw(folders: list[Path]) -> None:
    figure, (axes, text) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained", width_ratios=[3, 2])
    for folder in folders:
        samples, evaluations = zip(*curve(folder))
        for kind, label, color in ("accuracy", "sampled", "C0"), ("greedy_accuracy", "greedy", "C1"):
            right = [100 * evaluation[kind] for evaluation in evaluations]
            axes.plot(samples, right, color=color, linewidth=1, label=label if folder == folders[0] else None)
    axes.set(xlabel="samples", ylabel="held-out prompts right, %", ylim=(-2, 102))
    axes.legend(loc="lower right", title=f"{len(folders)} seeds")

    rows = common.read_lines(folders[0] / "completions.jsonl")
    last = rows[-1]["iteration"]
    iterations = 0, last // 3, last
    columns = [[row for row in rows if row["iteration"] == iteration] for iteration in iterations]
    cells = [[f"{row['prompt']}{row['response']}" for row in line] for line in zip(*columns)]
    names = [f"iteration {iteration + 1}" for iteration in iterations]
    text.axis("off")
    grid = text.table(cells, colLabels=names, loc="center", cellLoc="center")
    for (line, column), cell in grid.get_celld().items():
        if line:
            cell.set_text_props(family="monospace")
            prompt, _, response = cells[line - 1][column].partition("=")
            cell.set_facecolor("#d5ecd5" if response == "".join(sorted(prompt)) else "#f5dada")
    grid.scale(1, 1.6)
    text.set_title("samples of the rollouts", fontsize=10)
    figure.savefig(common.PICTURES / "learning_curve.png", dpi=110)


def main():
    for seed in [] if "plot" in sys.argv else sys.argv[1:] or ["1", "2", "3", "4", "5"]:
        flags = ["--seed", seed, "--eval-every", str(EVERY), "--save-every", "0", "--log-dir", str(RUNS)]
        subprocess.run([sys.executable, str(ROOT / "ppo_llm.py"), *flags, "--run-name", seed], check=True)
    folders = sorted(RUNS.iterdir())
    table(folders)
    draw(folders)


if __name__ == "__main__":
    main()
