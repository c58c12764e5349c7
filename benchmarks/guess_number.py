"""A task of several turns: guess a number from 0 to 7. The environment answers "<" or ">"; a wrong guess costs 0.2.

    PYTHONPATH=benchmarks python ppo_llm.py --env-id guess_number:GuessNumber-v0 --max-new-tokens 24
    python benchmarks/guess_number.py runs/a runs/b ...     # of such runs: a table, and benchmarks/guess_number.png

Binary search is the best possible: 2.625 guesses on average (one number is found at the first, two at the second, four
at the third, one at the fourth), a reward of 0.675. The demonstrations for the warm start are one random digit each, so
that the model knows what a guess looks like, and nothing of how to search.
"""

import json
import random
import sys
from pathlib import Path

import common
import gymnasium as gym
from common import ppo_llm

BEST = 2.625  # guesses


class GuessNumber(gym.Env):
    def reset(self, *, seed=None, options=None):
        rng = random.Random(seed)
        self.number, self.hint = rng.randrange(8), "?"
        return "<>01234567?", {"demonstration": str(rng.randrange(8))}

    def step(self, response):
        if response == str(self.number):
            return "", 1.0, True, False, {"success": True}
        if response in list("01234567"):  # else the hint is repeated
            self.hint = "<" if self.number < int(response) else ">"
        return self.hint, -0.2, False, False, {"success": False}


gym.register("GuessNumber-v0", entry_point=GuessNumber)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class EachNumber(GuessNumber):
    def reset(self, *, seed=None, options=None):
        prompt, info = super().reset(seed=seed)
        self.number = seed % 8
        return prompt, info


def play(folder: Path, temperature: float) -> list[str]:
    """Reward and guesses of the trained model, means of 512 episodes, 64 of each number."""
    model, _ = ppo_llm.load_hf_checkpoint(folder / "model")
    tokenizer = ppo_llm.HFTokenizer(folder / "model")
    args = ppo_llm.Args(max_prompt_tokens=16, max_new_tokens=24, temperature=temperature)
    envs = [EachNumber() for _ in range(512)]
    decoder = ppo_llm.Decoder(model, 512, tokenizer.stop_ids, args)
    episodes = ppo_llm.rollout(decoder, tokenizer, envs, range(512), range(512), -1, args)
    rewards, sampled = (sum(map(sum, column)) for column in zip(*[(e.rewards, e.mask) for e in episodes]))
    return [f"{rewards / 512:.3f}", f"{sampled / 1024:.3f}"]  # two tokens a guess


def main():
    import matplotlib.pyplot as plt

    common.table(["run", "reward, sampled", "guesses, sampled", "reward, greedy", "guesses, greedy"])
    for folder in map(Path, sys.argv[1:]):
        common.line([folder.name, *play(folder, temperature=1.0), *play(folder, temperature=0.0)])
    figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained", width_ratios=[2, 1, 1])
    for folder in map(Path, sys.argv[1:]):
        rows = read(folder / "metrics.jsonl")
        guesses = [row["objective/response_tokens"] / 2 for row in rows]  # a digit and EOS each
        samples = [256 * (row["iteration"] + 1) for row in rows]
        axes[0].plot(samples, guesses, linewidth=1, label=folder.name)
    axes[0].axhline(BEST, color="black", linestyle=":", label="binary search")
    axes[0].set(xlabel="samples", ylabel="guesses on average", ylim=(2, 8))
    axes[0].legend()
    texts = [row["response"] for row in read(Path(sys.argv[1], "completions.jsonl"))]
    for axis, title, some in (axes[1], "before", texts[:40]), (axes[2], "after", texts[-160:]):
        table = [[0.0] * 8 for _ in range(4)]  # share of the episodes in which this was the guess
        for k in range(4):
            for text in some:
                if text[2 * k : 2 * k + 1].isdigit():
                    table[k][int(text[2 * k])] += 1 / len(some)
        axis.imshow(table, cmap="Blues", vmin=0, vmax=0.7)
        axis.set(title=title, xlabel="number", xticks=range(8), yticks=range(4))
        axis.set_yticklabels(["1st guess", "2nd", "3rd", "4th"])
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
