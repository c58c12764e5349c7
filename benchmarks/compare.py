"""Is my run what it should be? A run beside reference runs with other seeds.

    python benchmarks/compare.py runs/mine             # beside the runs of the same task
    python benchmarks/compare.py runs/mine --task sums
    python benchmarks/compare.py add sums runs/a ...   # adds runs to reference.jsonl: the same flags, other seeds

Prints what differs in the flags, a line for each metric, the first metric that leaves its band and where, and at last
`inside` or `outside`. Draws runs/mine/compare.png. A run may be unfinished. The band around the mean of the reference
runs is WIDTH standard deviations of a run, from one seed to another, plus a little; curves are smoothed over a
fiftieth of the run.
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

RESULTS = Path(__file__).with_name("reference.jsonl")
METRICS = (
    "objective/reward", "objective/accuracy", "objective/kl", "objective/entropy", "objective/response_tokens",
    "actor/approx_kl", "actor/clipfrac", "actor/grad_norm", "critic/explained_variance", "critic/value_loss",
    "critic/value_mean", "ratio/first_dev", "ratio/last_dev", "ratio/relative_update")  # fmt: skip
MAY_DIFFER = ("seed", "run_name", "log_dir", "resume", "save_every", "eval_every", "eval_episodes", "track",
              "wandb_project", "rollout_slots", "micro_batch_tokens", "compile", "device")  # fmt: skip
WIDTH = 5.0


def read(folder: Path) -> dict:
    """{"args": flags, "metrics": {name: [a number or None for each iteration]}} of a run folder."""
    args = json.loads((folder / "config.json").read_text())["args"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    round_off = lambda x: None if x is None else float(f"{x:.4g}")
    return {"args": args, "metrics": {name: [round_off(row.get(name)) for row in rows] for name in METRICS}}


def differences(args: dict, reference: dict) -> list[str]:
    return [f"--{name.replace('_', '-')} {args.get(name)}, in the reference {value}"
            for name, value in reference.items() if name not in MAY_DIFFER and args.get(name) != value]  # fmt: skip


def smooth(curve: list, n: int) -> np.ndarray:
    """Means of n iterations each; NaN where there is no number."""
    curve = np.array([np.nan if x is None else x for x in curve])
    usable = curve[: len(curve) // n * n].reshape(-1, n)
    return usable.mean(axis=1)


def band(curves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and half the width of the band, [points], of the curves [runs, points].

    The deviation at a point is estimated from the points around it, too, as a few runs say little about it.
    """
    mean = curves.mean(axis=0)
    variance = curves.var(axis=0, ddof=1)
    around = np.pad(variance, 2, mode="edge")
    variance = np.mean([around[i : i + len(variance)] for i in range(5)], axis=0)
    return mean, WIDTH * np.sqrt(variance * (1 + 1 / len(curves))) + 0.02 * np.abs(curves).max(axis=0) + 1e-6


def compare(mine: dict, references: list[dict], n: int) -> dict:
    """{metric: (my curve, mean, half width, first point outside or None)}"""
    found = {}
    for name in METRICS:
        curves = np.array([smooth(run["metrics"][name], n) for run in references])
        curve = smooth(mine["metrics"][name], n)[: curves.shape[1]]
        mean, width = band(curves)
        outside = ~(np.abs(curve - mean[: len(curve)]) <= width[: len(curve)]) & ~np.isnan(mean[: len(curve)])
        first = int(outside.argmax()) if outside.any() else None
        found[name] = curve, mean, width, first
    return found


def draw(found: dict, n: int, path: Path):
    figure, axes = plt.subplots(4, 4, figsize=(14, 9), layout="constrained")
    for axis in axes.flat[len(found) :]:
        axis.remove()
    for axis, (name, (curve, mean, width, first)) in zip(axes.flat, found.items(), strict=False):
        x = n * (np.arange(len(mean)) + 0.5)
        axis.fill_between(x, mean - width, mean + width, color="0.85")
        axis.plot(x, mean, color="0.5")
        axis.plot(x[: len(curve)], curve, color="tab:blue" if first is None else "tab:red")
        axis.set_title(name, fontsize=9)
    figure.savefig(path, dpi=100)


def main(folder: str, task: str | None = None) -> bool:
    runs = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    mine = read(Path(folder))
    tasks = {run["task"]: run for run in runs}
    if task is None:  # the task from whose flags mine differ least
        task = min(tasks, key=lambda name: len(differences(mine["args"], tasks[name]["args"])))
    references = [run for run in runs if run["task"] == task]
    iterations = len(references[0]["metrics"][METRICS[0]])
    n = max(1, iterations // 50)
    print(f"beside {len(references)} runs of {task!r} at {references[0]['commit']}: {references[0]['command']}")
    for line in differences(mine["args"], references[0]["args"]):
        print(f"  {line}")
    found = compare(mine, references, n)
    done = len(mine["metrics"][METRICS[0]])
    print(f"{done} of {iterations} iterations, in means of {n}\n\n| metric | mine | band | leaves it at iteration |\n|---|---|---|---|")
    for name, (curve, mean, width, first) in found.items():
        at = len(curve) - 1 if first is None else first
        low, high = mean[at] - width[at], mean[at] + width[at]
        where = "-" if first is None else f"{n * first + 1} to {n * (first + 1)}"
        print(f"| {name} | {curve[at]:.4g} | {low:.4g} to {high:.4g} | {where} |")
    draw(found, n, Path(folder) / "compare.png")
    left = {name: first for name, (*_, first) in found.items() if first is not None}
    if left:
        name = min(left, key=left.get)
        print(f"\nthe first to leave its band: {name}, at iteration {n * left[name] + 1}")
    print("outside" if left else "inside")
    return not left


if __name__ == "__main__":
    if sys.argv[1:2] == ["add"]:
        task, *folders = sys.argv[2:]
        commit, command = sys.stdin.read().strip().split(" ", 1)  # "COMMIT COMMAND"
        with RESULTS.open("a") as file:
            for folder in folders:
                file.write(json.dumps({"task": task, "commit": commit, "command": command} | read(Path(folder))) + "\n")
    else:
        task = sys.argv[sys.argv.index("--task") + 1] if "--task" in sys.argv else None
        sys.exit(not main(sys.argv[1], task))
