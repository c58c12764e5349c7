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

# Another model and prompt: Qwen2.5-0.5B-Instruct, batches of 256, responses of up to 512 tokens. Accuracy on 1,312 test
# problems, by iterations:
# github.com/eric-haibin-lin/verl-data/blob/experiments/gsm8k/Qwen2.5-0.5B-bsz256_2-prompt1024-resp512-0.567.log
VERL = {0: 0.001, 10: 0.013, 20: 0.176, 30: 0.458, 40: 0.463, 50: 0.480, 60: 0.495, 70: 0.496, 80: 0.512, 90: 0.506,
        100: 0.531}  # fmt: skip
PROBLEMS = 256  # of an evaluation
CHARACTERS = 52  # of a line of a sample


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


def curve(axes, evaluations: dict[int, dict], rows: list[dict], color: str) -> None:
    right = [evaluation["greedy_accuracy"] for evaluation in evaluations.values()]
    errors = [(p * (1 - p) / PROBLEMS) ** 0.5 for p in right]
    axes.errorbar(evaluations.keys(), right, errors, fmt="o-", color=color, markersize=4, elinewidth=1)
    axes.plot([row["objective/reward"] for row in rows], color=color, alpha=0.6, linewidth=0.7)


def sample(axes, samples: list[dict], iteration: int, share: float) -> None:
    first = next(each for each in samples if each["iteration"] == iteration)
    question = first["prompt"].split("\n\n")[0]
    response = re.sub(r"\\\[\s*(.*?)\s*\\\]", r"\\[ \1 \\]", first["response"], flags=re.DOTALL)  # on a line
    lines = [textwrap.fill(line, CHARACTERS) for line in response.split("\n") if line.strip()]
    color, word = (common.FAINT_GREEN, "right") if first["reward"] == 1 else (common.FAINT_RED, "wrong")
    axes.axis("off")
    share = f"{100 * share:.0f} % of its samples are right"
    axes.set_title(f"the first sample of iteration {iteration + 1} is {word}\n({share})")
    axes.text(0.01, 0.98, "\n".join([textwrap.fill(question, CHARACTERS), "", *lines]), fontsize=7.5, va="top",
              transform=axes.transAxes, parse_math=False, in_layout=False,
              bbox={"facecolor": color, "linewidth": 0})  # fmt: skip


def main():
    here = common.ROOT / "benchmarks" / "gpu_gsm8k"
    folders = [Path(folder) for folder in sys.argv[1:]] or [here, here / "no_critic"]
    title = "A 0.5B improves on GSM8K, and no difference between a run with a critic and one without is shown"
    mosaic = [["curve", "curve"], ["first", "last"]]
    figure, axes = common.new_picture(title, 7.4, mosaic, height_ratios=[4, 6])
    labels = ("with a critic", 0.27, common.ORANGE), ("without", 0.43, common.BLUE)
    for folder, (label, height, color) in zip(folders, labels):
        rows = common.read_lines(folder / "metrics.jsonl")
        evaluations = evaluated(folder, len(rows))
        table(evaluations, rows)
        curve(axes["curve"], evaluations, rows, color)
        axes["curve"].text(74, height, label, color=color, ha="right", va="center")
    name = "right answers: thick to test problems, greedy; thin to training problems, sampled"
    axes["curve"].set(xlabel="iterations", xlim=(-1, 75), ylim=(0, 0.5), title=name)
    common.percent(axes["curve"])
    rows, samples = (common.read_lines(folders[0] / f"{name}.jsonl") for name in ("metrics", "completions"))
    for name, iteration in ("first", 0), ("last", len(rows) - 1):
        sample(axes[name], samples, iteration, rows[iteration]["objective/reward"])
    common.save_picture(figure, common.PICTURES / "gsm8k.png")


if __name__ == "__main__":
    main()
