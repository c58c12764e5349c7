"""What PPO does to each token: one wrong and one right response of a real iteration.

    python benchmarks/anatomy.py --num-iterations 5 ...    # flags of ppo_llm.py; as long as its run with these flags

Runs ppo_llm.py and prints, from the last iteration, the response with the lowest and the one with the highest reward:
reward minus KL penalty, values and returns, whitened advantages, and the ratio of the actor after all updates of the
iteration to the one that sampled. Draws them as pictures/anatomy.png.
"""

import unittest.mock

import common
import matplotlib.pyplot as plt
import torch
import tyro
from common import ppo_llm


def run(args) -> tuple:
    """The last iteration's episodes and experience, and the run folder."""
    metrics, log, last = ppo_llm.iteration_metrics, ppo_llm.Run.log, {}

    def keep(episodes, experience, *rest):
        last.update(episodes=episodes, experience=experience)
        return metrics(episodes, experience, *rest)

    def keep_folder(run, *rest):
        last["folder"] = run.path
        log(run, *rest)

    with (
        unittest.mock.patch.object(ppo_llm, "iteration_metrics", keep),
        unittest.mock.patch.object(ppo_llm.Run, "log", keep_folder),
    ):
        ppo_llm.train(args)
    return last["episodes"], last["experience"], last["folder"]


@torch.no_grad()
def columns(args, experience, actor, tokenizer, sample: int) -> dict[str, list]:
    """What belongs to each sampled token of a sample."""
    mb = experience.microbatch(torch.tensor([sample]), "cpu")  # [1, T]
    newlogprobs, _ = actor.sampled_logprobs(mb, args.temperature)
    kl = ppo_llm.kl_estimate(mb.old_logprobs, mb.ref_logprobs, "k1")
    penalty = 0.0 if args.kl_loss else args.kl_coef * kl
    numbers = {
        "reward": mb.rewards, "KL": kl, "reward - penalty": mb.rewards - penalty, "value": mb.values,
        "return": mb.returns, "advantage": mb.advantages, "old log-prob": mb.old_logprobs,
        "ratio": (newlogprobs - mb.old_logprobs).exp(),
    }  # fmt: skip
    text = [tokenizer.hf.decode([i]) for i in mb.tokens[mb.mask].tolist()]
    return {"token": text} | {name: x[mb.mask].tolist() for name, x in numbers.items()}


def draw(samples: list[dict], titles: list[str], args) -> None:
    width = [max(4, len(sample["token"])) for sample in samples]
    figure, axes = plt.subplots(4, len(samples), figsize=(10, 6.4), sharey="row", layout="constrained",
                                width_ratios=width)  # fmt: skip
    for column, (sample, title) in enumerate(zip(samples, titles)):
        x = range(len(sample["token"]))
        reward, values, advantage, ratio = axes[:, column]
        reward.set_title(title, fontsize=10)
        reward.bar(x, sample["reward - penalty"], color="C2")
        values.plot(x, sample["value"], "o-", markersize=3, label="value")
        values.plot(x, sample["return"], "s--", markersize=3, label="return")
        advantage.bar(x, sample["advantage"], color=["C2" if a > 0 else "C3" for a in sample["advantage"]])
        ratio.plot(x, sample["ratio"], "o", color="C4")
        for bound in (1 - args.clip_low, 1, 1 + args.clip_high):
            ratio.axhline(bound, color="gray", linewidth=0.8, linestyle="-" if bound == 1 else ":")
        for axis in (reward, values, advantage):
            axis.axhline(0, color="gray", linewidth=0.8)
        for axis in axes[:, column]:
            axis.set_xlim(-0.6, len(x) - 0.4)
            axis.set_xticks(x, [])
        tokens = [token.replace("\n", "\\n") for token in sample["token"]]
        ratio.set_xticks(x, tokens, rotation=60, fontsize=8, family="monospace")
    names = "reward\n- KL penalty", "value, return", "advantage\n(whitened)", "ratio after\nthe updates"
    for axis, name in zip(axes[:, 0], names):
        axis.set_ylabel(name, fontsize=9)
    axes[1, 0].legend(fontsize=8)
    figure.savefig(common.PICTURES / "anatomy.png", dpi=110)


def main():
    args = tyro.cli(ppo_llm.Args)
    episodes, experience, folder = run(args)
    tokenizer = ppo_llm.HFTokenizer(folder / "model")
    actor, _ = ppo_llm.load_hf_checkpoint(folder / "model")
    rewards = experience.rewards.sum(1)
    order = rewards.argsort(stable=True)
    samples, titles = [], []
    for i in (int(order[0]), int(order[-1])):
        samples.append(columns(args, experience, actor, tokenizer, i))
        titles.append(f"{episodes[i].conversation[0]['content']:.60}  reward {float(rewards[i]):g}")
        print(f"\n{titles[-1]}\n")
        text, *numbers = samples[-1].values()
        common.table(samples[-1], zip(text, *([f"{x:.3f}" for x in column] for column in numbers)))
    draw(samples, titles, args)


if __name__ == "__main__":
    main()
