"""What PPO does to each token: one wrong and one right response of a real iteration.

    python benchmarks/anatomy.py --model DIR --env-id ... --num-iterations 5 ...    # flags of ppo_llm.py

Runs ppo_llm.py with these flags and draws, from the last iteration, the response with the lowest and the one with the
highest reward: reward minus KL penalty, values and returns, whitened advantages, and the ratio of the actor after all
updates of the iteration to the one that sampled. Writes anatomy.png beside this script and prints the same numbers.
"""

import unittest.mock
from pathlib import Path

import common
import matplotlib.pyplot as plt
import torch
import tyro
from common import ppo_llm


def run(args) -> tuple:
    """The last iteration's rollout and experience, and the run folder."""
    log, last = ppo_llm.RunFolder.log, []

    def keep(folder, batch, experience, *rest):
        last[:] = batch, experience, folder.path
        log(folder, batch, experience, *rest)

    with unittest.mock.patch.object(ppo_llm.RunFolder, "log", keep):
        ppo_llm.train(args)
    return tuple(last)


def columns(args, batch, experience, actor, tokenizer, sample: int) -> dict[str, list]:
    """What belongs to each sampled token of a sample."""
    mb = experience[torch.tensor([sample])]  # [1, T]
    with torch.no_grad():
        newlogprobs = ppo_llm.sampled_logprobs(actor, mb, args.temperature)[0]
    rewards = batch.rewards[[sample], : mb.tokens.shape[1]].to(mb.tokens.device)
    rewards[0, -1] += mb.sample_rewards[0] - rewards.sum()  # the penalty for a missing stop token
    kl = ppo_llm.kl_estimate(mb.old_logprobs, mb.ref_logprobs, args.kl_estimator)
    penalty = args.kl_coef * kl if args.kl_in == "reward" else torch.zeros_like(kl)
    numbers = {
        "reward": rewards, "KL": kl, "reward - penalty": rewards - penalty, "value": mb.values,
        "return": mb.returns, "advantage": mb.advantages, "old log-prob": mb.old_logprobs,
        "ratio": (newlogprobs - mb.old_logprobs).exp(),
    }  # fmt: skip
    text = [tokenizer.hf.decode([i]) for i in mb.tokens[mb.mask].tolist()]
    return {"token": text} | {name: x[mb.mask].tolist() for name, x in numbers.items()}


def draw(samples: list[dict], titles: list[str], args) -> None:
    width = [max(4, len(sample["token"])) for sample in samples]
    figure, axes = plt.subplots(4, len(samples), figsize=(10, 6.4), sharey="row", layout="constrained",
                                width_ratios=width)  # fmt: skip
    for column, (sample, title) in enumerate(zip(samples, titles, strict=True)):
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
            axis.set_xticks(x, [] if axis is not ratio else [token.replace("\n", "\\n") for token in sample["token"]],
                            rotation=60, fontsize=8, family="monospace")  # fmt: skip
    for axis, name in zip(axes[:, 0], ("reward\n- KL penalty", "value, return", "advantage\n(whitened)",
                                       "ratio after\nthe updates")):  # fmt: skip
        axis.set_ylabel(name, fontsize=9)
    axes[1, 0].legend(fontsize=8)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


def main():
    args = tyro.cli(ppo_llm.Args)
    batch, experience, folder = run(args)
    tokenizer = ppo_llm.HFTokenizer(folder / "model")
    actor, _ = ppo_llm.load_hf_checkpoint(folder / "model", device=experience.tokens.device)
    order = experience.sample_rewards.argsort(stable=True)
    samples, titles = [], []
    for i in (int(order[0]), int(order[-1])):
        samples.append(columns(args, batch, experience, actor, tokenizer, i))
        titles.append(f"{batch.prompts[i]:.60}  reward {float(experience.sample_rewards[i]):g}")
        print(f"\n{titles[-1]}\n")
        text, *numbers = samples[-1].values()
        common.table(samples[-1], zip(text, *([f"{x:.3f}" for x in column] for column in numbers), strict=True))
    draw(samples, titles, args)


if __name__ == "__main__":
    main()
