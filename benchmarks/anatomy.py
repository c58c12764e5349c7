"""What PPO does to each token: a response that fails at one token, and the best one, of a real iteration.

    python benchmarks/anatomy.py --num-iterations 5 ...    # flags of ppo_llm.py; as long as its run with these flags
    python benchmarks/anatomy.py plot                      # draws the picture from data/anatomy.json again

Runs ppo_llm.py and prints two responses of the last iteration: the one in which the critic's value falls most after a
single token, which is neither the first nor the last, and the one with the highest reward. Of each it prints reward
minus KL penalty, values and returns, whitened advantages, and the ratio of the actor after all updates of the iteration
to the one that sampled. Writes these numbers to data/anatomy.json and draws pictures/anatomy.png.
docs/one_iteration.md has the command that made those of the repository.
"""

import json
import sys
import unittest.mock

import common
import torch
import tyro
from common import ppo_llm

RESULTS = common.DATA / "anatomy.json"


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
    penalty = args.kl_coef * kl if args.kl_coef and not args.kl_loss else 0.0
    numbers = {
        "reward": mb.rewards, "KL": kl, "reward - penalty": mb.rewards - penalty, "value": mb.values,
        "return": mb.returns, "advantage": mb.advantages, "old log-prob": mb.old_logprobs,
        "ratio": (newlogprobs - mb.old_logprobs).exp(),
    }  # fmt: skip
    text = [tokenizer.hf.decode([i]) for i in mb.tokens[mb.mask].tolist()]
    return {"token": text} | {name: x[mb.mask].tolist() for name, x in numbers.items()}


def largest_fall(values: list[float], rewards: list[float]) -> tuple[float, int]:
    """How much the value falls after a token, beyond the reward that the token earns, and after which token.

    The first token and the last one, after which there is no value, do not count.
    """
    falls = [(values[t] - values[t + 1] - rewards[t], t) for t in range(1, len(values) - 1)]
    return max(falls, default=(0.0, 0))


def draw() -> None:
    data = json.loads(RESULTS.read_text())
    samples, (low, high) = data["samples"], data["clip_range"]
    _, i = largest_fall(samples[0]["value"], samples[0]["reward"])
    before, after = samples[0]["value"][i : i + 2]
    title = f"Token {i + 1} of the first response decides: the critic's value falls from {before:.2f} to {after:.2f}"
    width = [max(4, len(sample["token"])) for sample in samples]
    figure, axes = common.new_picture(title, 6.4, 4, len(samples), sharey="row", width_ratios=width)
    for (reward, values, advantage, ratio), sample, name in zip(axes.T, samples, data["titles"]):
        x = range(len(sample["token"]))
        reward.bar(x, sample["reward - penalty"], color=common.BLUE)
        ends = []
        for kind, style, color in ("value", "o-", common.BLUE), ("return", "s--", common.ORANGE):
            values.plot(x, sample[kind], style, color=color, markersize=4, linewidth=1.5)
            ends.append((sample[kind][-1], kind, color))
        colors = [common.BLUE if a > 0 else common.RED for a in sample["advantage"]]
        advantage.bar(x, sample["advantage"], color=colors)
        ratio.plot(x, sample["ratio"], "o", color=common.INK, markersize=5)
        for axis, line in (reward, 0), (values, 0), (advantage, 0), (ratio, 1):
            axis.axhline(line, color=common.GREY, linewidth=0.8, zorder=0)
            axis.set_xticks(x, [])
            axis.set_xlim(-0.6, len(x) - 0.4)
            axis.tick_params(axis="x", length=0)
            axis.spines.bottom.set_visible(False)
        for bound in (low, high):
            ratio.axhline(bound, color=common.RED, linewidth=1, linestyle=":")
        ratios = [low, high, *(x for each in samples for x in each["ratio"])]
        ratio.set_ylim(min(ratios) - 0.03, max(ratios) + 0.03)
        tokens = [token.strip() or "\N{OPEN BOX}" for token in sample["token"]]
        ratio.set_xticks(x, tokens, rotation=60, family="DejaVu Sans Mono")
        reward.set_title(f"{name}\nreward minus KL penalty")
        values.set_title("value and return")
        advantage.set_title("whitened advantage")
        ratio.set_title("ratio after the updates, and the clip range")
    common.label_ends(values, ends)
    common.save_picture(figure, common.PICTURES / "anatomy.png")


def main():
    if sys.argv[1:] == ["plot"]:
        return draw()
    args = tyro.cli(ppo_llm.Args)
    episodes, experience, folder = run(args)
    tokenizer = ppo_llm.HFTokenizer(folder / "model")
    actor, _ = ppo_llm.load_hf_checkpoint(folder / "model")
    rewards = experience.rewards.sum(1)
    falls = [
        largest_fall(values[mask].tolist(), earned[mask].tolist())[0]
        for values, earned, mask in zip(experience.values, experience.rewards, experience.mask)
    ]
    samples, titles = [], []
    for i in (falls.index(max(falls)), int(rewards.argsort(stable=True)[-1])):
        samples.append(columns(args, experience, actor, tokenizer, i))
        titles.append(f"{episodes[i].conversation[0]['content']:.60}  reward {float(rewards[i]):g}")
        print(f"\n{titles[-1]}\n")
        text, *numbers = samples[-1].values()
        common.table(samples[-1], zip(text, *([f"{x:.3f}" for x in column] for column in numbers)))
    clip_range = [1 - args.clip_low, 1 + args.clip_high]
    RESULTS.write_text(json.dumps({"clip_range": clip_range, "titles": titles, "samples": samples}) + "\n")
    draw()


if __name__ == "__main__":
    main()
