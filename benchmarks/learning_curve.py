"""The default task: held-out accuracy over samples, five seeds, with responses at the start, in the middle, at the end.

    python benchmarks/learning_curve.py            # runs the seeds, then draws benchmarks/learning_curve.png
    python benchmarks/learning_curve.py 1 3        # some seeds
    python benchmarks/learning_curve.py plot       # draws what is there again

Every 20 iterations the sampler answers the 512 held-out prompts of the evaluation, sampled and greedy. Training draws
the same samples with and without it.
"""

import contextlib
import io
import json
import sys
import tempfile
import unittest.mock
from pathlib import Path

import torch
from common import ppo_llm

EVERY, EPISODES = 20, 512
RESULTS = Path("runs/learning_curve.json")


def train(seed: int) -> list[dict]:
    """Samples, accuracy and greedy accuracy, and the first greedy responses, over the run."""
    points, rollout = [], ppo_llm.rollout
    envs = [ppo_llm.gym.make("SortDigits-v0", disable_env_checker=True, split="test") for _ in range(EPISODES)]

    def watched_rollout(actor, tokenizer, train_envs, seeds, sample_ids, iteration, args, greedy=False):
        if iteration >= 0 and iteration % EVERY == 0:
            evaluate(actor, tokenizer, args, iteration)
        return rollout(actor, tokenizer, train_envs, seeds, sample_ids, iteration, args, greedy)

    def evaluate(actor, tokenizer, args, iteration):
        noise, numbers = -1 - iteration, range(EPISODES)
        sampled, best = (rollout(actor, tokenizer, envs, numbers, numbers, noise, args, greedy)
                         for greedy in (False, True))  # fmt: skip
        points.append({
            "samples": iteration * args.rollout_batch_size, "sampled": sum(sampled.success) / EPISODES,
            "greedy": sum(best.success) / EPISODES, "prompts": sampled.prompts[:6], "responses": sampled.texts[:6],
        })  # fmt: skip

    def export(model, tokenizer, folder):  # the end of a run
        if model.head != "lm":  # the critic
            return
        args = ppo_llm.Args(seed=seed)
        ppo_llm.validate(args)
        evaluate(model, tokenizer, args, args.num_iterations)

    with (
        tempfile.TemporaryDirectory() as folder,
        unittest.mock.patch.object(ppo_llm, "rollout", watched_rollout),
        unittest.mock.patch.object(ppo_llm, "save_hf_checkpoint", export),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        ppo_llm.train(ppo_llm.Args(seed=seed, device="cpu", log_dir=folder, save_every=0, eval_episodes=1))
    return points


def draw(curves: dict[str, list[dict]]) -> None:
    import matplotlib.pyplot as plt

    figure, (axes, text) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained", width_ratios=[3, 2])
    for seed, points in curves.items():
        samples = [point["samples"] for point in points]
        for kind, color in (("sampled", "C0"), ("greedy", "C1")):
            label = kind if seed == next(iter(curves)) else None
            axes.plot(samples, [100 * point[kind] for point in points], color=color, linewidth=1, label=label)
    axes.set(xlabel="samples", ylabel="held-out prompts right, %", ylim=(-2, 102))
    axes.legend(loc="lower right", title=f"{len(curves)} seeds")
    points = next(iter(curves.values()))
    columns = [points[0], points[len(points) // 3], points[-1]]
    cells = [list(row) for row in zip(columns[0]["prompts"], *(point["responses"] for point in columns))]
    names = ["prompt", *(f"{point['samples']:,}" for point in columns)]
    text.axis("off")
    table = text.table(cells, colLabels=names, loc="center", cellLoc="center")
    for (row, column), cell in table.get_celld().items():
        cell.set_text_props(family="monospace")
        if row and column:
            right = cells[row - 1][column] == "".join(sorted(cells[row - 1][0][:-1]))
            cell.set_facecolor("#d5ecd5" if right else "#f5dada")
    table.scale(1, 1.6)
    text.set_title("sampled responses after so many samples", fontsize=10)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


def main():
    torch.set_num_threads(1)
    RESULTS.parent.mkdir(exist_ok=True)
    for seed in [] if "plot" in sys.argv else sys.argv[1:] or ["1", "2", "3", "4", "5"]:
        points = train(int(seed))
        curves = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(curves | {seed: points}))
        print(seed, [(point["samples"], point["sampled"], point["greedy"]) for point in points], flush=True)
    draw(dict(sorted(json.loads(RESULTS.read_text()).items())))


if __name__ == "__main__":
    main()
