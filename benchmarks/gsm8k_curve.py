"""GSM8K: accuracy on test problems and training reward over iterations, beside verl's published log, with two samples.

    python benchmarks/gsm8k_curve.py           # of the run in benchmarks/gpu_gsm8k
    python benchmarks/gsm8k_curve.py FOLDER    # with metrics.jsonl, completions.jsonl, and the output as log.txt

Prints a table and draws pictures/gsm8k.png. The samples are the first that are logged of the first and of the last
iteration.
"""

import ast
import math
import re
import sys
import textwrap
from pathlib import Path
from statistics import mean

import common
import matplotlib.pyplot as plt

# Qwen2.5-0.5B-Instruct, batches of 256, responses of up to 512 tokens, accuracy on 1,312 test problems by iterations:
# github.com/eric-haibin-lin/verl-data/blob/experiments/gsm8k/Qwen2.5-0.5B-bsz256_2-prompt1024-resp512-0.567.log
VERL = {0: 0.001, 10: 0.013, 20: 0.176, 30: 0.458, 40: 0.463, 50: 0.480, 60: 0.495, 70: 0.496, 80: 0.512, 90: 0.506,
        100: 0.531}  # fmt: skip
PROBLEMS = 256  # of an evaluation


def table(evaluations: dict[int, dict], rows: list[dict]) -> None:
    """Evaluations, and means of the ten iterations that follow each."""
    common.table(["iterations", "greedy", "sampled", "tokens", "training reward", "KL", "explained", "verl"])
    for i, evaluation in evaluations.items():
        means = [mean(row[name] for row in rows[i : i + 10]) if i < len(rows) else math.nan
                 for name in ("objective/reward", "objective/kl", "critic/explained_variance")]  # fmt: skip
        shares = [f"{evaluation[kind]:.3f}" for kind in ("greedy_accuracy", "accuracy")]
        tokens = f"{evaluation['response_tokens']:.0f}"
        common.line([i, *shares, tokens, *(f"{value:.2f}" for value in means), VERL.get(i, "-")])


def draw(evaluations: dict[int, dict], rows: list[dict], samples: list[dict]) -> None:
    figure, axes = plt.subplot_mosaic([["curve", "curve"], ["first", "last"]], figsize=(10, 6.6), layout="constrained",
                                      height_ratios=[5, 6])  # fmt: skip
    curve = axes["curve"]
    for kind, label, color in ("greedy_accuracy", "test, greedy", "C1"), ("accuracy", "test, sampled", "C0"):
        right = [evaluation[kind] for evaluation in evaluations.values()]
        errors = [100 * (p * (1 - p) / PROBLEMS) ** 0.5 for p in right]
        curve.errorbar(evaluations.keys(), [100 * p for p in right], errors, fmt="o-", color=color, markersize=4,
                       elinewidth=1, label=label)  # fmt: skip
    rewards = [100 * row["objective/reward"] for row in rows]
    curve.plot(rewards, color="C2", alpha=0.5, linewidth=1, label="training, sampled")
    verl = [100 * right for right in VERL.values()]
    curve.plot(VERL.keys(), verl, ".--", color="0.6", linewidth=1, label="verl's log (another model and prompt), test")
    curve.set(xlabel="iterations", ylabel="answers right, %", xlim=(-1, 101), ylim=(0, 60))
    curve.legend(loc="lower right", fontsize=9)

    for name, iteration in ("first", 0), ("last", len(rows) - 1):
        sample = next(sample for sample in samples if sample["iteration"] == iteration)
        question = sample["prompt"].split("\n\n")[0]
        response = re.sub(r"\\\[\s*(.*?)\s*\\\]", r"\\[ \1 \\]", sample["response"], flags=re.DOTALL)  # on a line
        lines = [textwrap.fill(line, 72) for line in response.split("\n") if line.strip()]
        color, word = ("#d5ecd5", "right") if sample["reward"] == 1 else ("#f5dada", "wrong")
        axes[name].axis("off")
        axes[name].set_title(f"iteration {iteration + 1} ({rewards[iteration]:.0f} % right), first sample: {word}",
                             fontsize=10, loc="left")  # fmt: skip
        axes[name].text(0.01, 0.97, "\n".join([textwrap.fill(question, 72), "", *lines]), fontsize=8.5, va="top",
                        transform=axes[name].transAxes, parse_math=False, in_layout=False,
                        bbox={"facecolor": color, "linewidth": 0})  # fmt: skip
    figure.savefig(common.PICTURES / "gsm8k.png", dpi=110)


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else common.ROOT / "benchmarks" / "gpu_gsm8k"
    rows, samples = (common.read_lines(folder / f"{name}.jsonl") for name in ("metrics", "completions"))
    logged = re.findall(r"^(before PPO|after .*): (\{.*\})", (folder / "log.txt").read_text(), re.MULTILINE)
    ends = {"before PPO": 0, "after PPO": len(rows)}
    evaluations = {ends[at] if at in ends else int(at.split()[1]): ast.literal_eval(text) for at, text in logged}
    table(evaluations, rows)
    draw(evaluations, rows, samples)


if __name__ == "__main__":
    main()
