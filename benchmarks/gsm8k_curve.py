"""GSM8K: accuracy on test problems and training reward over iterations, with two samples.

    python benchmarks/gsm8k_curve.py                  # the runs in benchmarks/gpu_gsm8k
    python benchmarks/gsm8k_curve.py FOLDER OTHER     # each with metrics.jsonl, completions.jsonl, log.txt

Prints a table for each run, with the accuracies of verl's published log as the last column, and draws
pictures/gsm8k.png. The second run has no critic. The picture shows two samples of the first run: the first logged
sample of its first iteration and that of its last iteration.
"""

import math
import re
import sys
import textwrap
from pathlib import Path
from statistics import mean

import common
import matplotlib.pyplot as plt

# Another model and prompt: Qwen2.5-0.5B-Instruct, batches of 256, responses of up to 512 tokens. Accuracy on 1,312 test
# problems, by iterations:
# github.com/eric-haibin-lin/verl-data/blob/experiments/gsm8k/Qwen2.5-0.5B-bsz256_2-prompt1024-resp512-0.567.log
VERL = {0: 0.001, 10: 0.013, 20: 0.176, 30: 0.458, 40: 0.463, 50: 0.480, 60: 0.495, 70: 0.496, 80: 0.512, 90: 0.506,
        100: 0.531}  # fmt: skip
PROBLEMS = 256  # of an evaluation


def evaluated(folder: Path, iterations: int) -> dict[int, dict]:
    """The evaluations that a log tells, by the number of iterations before them."""
    log = (folder / "log.txt").read_text()
    ends = {"before PPO": 0, "after PPO": iterations}  # as the log of an older form has it
    evaluations = {}
    for at, text in re.findall(r"^(before PPO|after .*?): (.*accuracy.*)", log, re.MULTILINE):
        done = ends[at] if at in ends else int(at.split()[1])
        numbers = re.findall(r"(\w+)'?:? ([\d.]+)", text)
        evaluations[done] = {name: float(number) for name, number in numbers}
    return evaluations


def table(evaluations: dict[int, dict], rows: list[dict]) -> None:
    """Evaluations, and means of the ten iterations that follow each."""
    common.table(["iterations", "greedy", "sampled", "tokens", "training reward", "KL", "explained", "verl"])
    for i, evaluation in evaluations.items():
        means = [mean(row[name] for row in rows[i : i + 10]) if i < len(rows) else math.nan
                 for name in ("objective/reward", "objective/kl", "critic/explained_variance")]  # fmt: skip
        shares = [f"{evaluation[kind]:.3f}" for kind in ("greedy_accuracy", "accuracy")]
        tokens = f"{evaluation['response_tokens']:.0f}"
        common.line([i, *shares, tokens, *(f"{value:.2f}" for value in means), VERL.get(i, "-")])


def curve(axes, evaluations: dict[int, dict], rows: list[dict], label: str, color: str) -> None:
    right = [evaluation["greedy_accuracy"] for evaluation in evaluations.values()]
    errors = [100 * (p * (1 - p) / PROBLEMS) ** 0.5 for p in right]
    axes.errorbar(evaluations.keys(), [100 * p for p in right], errors, fmt="o-", color=color, markersize=4,
                  elinewidth=1, label=f"test, greedy, {label}")  # fmt: skip
    rewards = [100 * row["objective/reward"] for row in rows]
    axes.plot(rewards, color=color, alpha=0.4, linewidth=1, label=f"training, sampled, {label}")


def sample(axes, samples: list[dict], iteration: int, share: float) -> None:
    first = next(each for each in samples if each["iteration"] == iteration)
    question = first["prompt"].split("\n\n")[0]
    response = re.sub(r"\\\[\s*(.*?)\s*\\\]", r"\\[ \1 \\]", first["response"], flags=re.DOTALL)  # on a line
    lines = [textwrap.fill(line, 72) for line in response.split("\n") if line.strip()]
    color, word = ("#d5ecd5", "right") if first["reward"] == 1 else ("#f5dada", "wrong")
    axes.axis("off")
    axes.set_title(f"iteration {iteration + 1} ({share:.0%} right), first sample: {word}", fontsize=10, loc="left")
    axes.text(0.01, 0.97, "\n".join([textwrap.fill(question, 72), "", *lines]), fontsize=8.5, va="top",
              transform=axes.transAxes, parse_math=False, in_layout=False,
              bbox={"facecolor": color, "linewidth": 0})  # fmt: skip


def main():
    here = common.ROOT / "benchmarks" / "gpu_gsm8k"
    folders = [Path(folder) for folder in sys.argv[1:]] or [here, here / "no_critic"]
    figure, axes = plt.subplot_mosaic([["curve", "curve"], ["first", "last"]], figsize=(10, 6.6), layout="constrained",
                                      height_ratios=[5, 6])  # fmt: skip
    for folder, label, color in zip(folders, ("with a critic", "without"), ("C1", "C0")):
        rows = common.read_lines(folder / "metrics.jsonl")
        evaluations = evaluated(folder, len(rows))
        table(evaluations, rows)
        curve(axes["curve"], evaluations, rows, label, color)
    axes["curve"].set(xlabel="iterations", ylabel="answers right, %", xlim=(-1, 75), ylim=(0, 50))
    axes["curve"].legend(loc="lower right", fontsize=9)
    rows, samples = (common.read_lines(folders[0] / f"{name}.jsonl") for name in ("metrics", "completions"))
    for name, iteration in ("first", 0), ("last", len(rows) - 1):
        sample(axes[name], samples, iteration, rows[iteration]["objective/reward"])
    figure.savefig(common.PICTURES / "gsm8k.png", dpi=110)


if __name__ == "__main__":
    main()
