"""Partial credit: continue a sequence of digits, as "258:" -> "14703" (steps of 3, modulo 10).

    export PYTHONPATH=benchmarks
    python ppo_llm.py --env-id sequences:Dense-v0 --max-new-tokens 7 --gamma 0.5  # each right digit where it stands
    python ppo_llm.py --env-id sequences:AtEnd-v0 --max-new-tokens 7              # their sum, on the last token
    python benchmarks/sequences.py dense=runs/a dense=runs/b end=runs/c ...    # draws benchmarks/sequences.png
"""

import json
import random
import sys
from pathlib import Path

import gymnasium as gym

TERMS = 5


class Sequences(gym.Env):
    def __init__(self, dense: bool):
        self.dense = dense

    def reset(self, *, seed=None, options=None):
        rng = random.Random(seed)
        first, step = rng.randrange(10), rng.randrange(10)
        terms = [str((first + i * step) % 10) for i in range(3 + TERMS)]
        self.answer = "".join(terms[3:])
        return "".join(terms[:3]) + ":", {}

    def step(self, response):
        right = [end for end in range(1, min(len(response), TERMS) + 1) if response[end - 1] == self.answer[end - 1]]
        credit, stop = 1 / (TERMS + 1), float(len(response) == TERMS)
        success = response == self.answer
        if self.dense:
            rewards = [(end, credit) for end in right]
            return "", credit * stop, True, False, {"rewards": rewards, "success": success}
        return "", credit * (stop + len(right)), True, False, {"success": success}


gym.register("Dense-v0", entry_point=Sequences, kwargs={"dense": True})
gym.register("AtEnd-v0", entry_point=Sequences, kwargs={"dense": False})


def main():
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    labels = list(dict.fromkeys(argument.partition("=")[0] for argument in sys.argv[1:]))
    for argument in sys.argv[1:]:
        label, _, folder = argument.partition("=")
        rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        for axis, name in zip(axes, ("reward", "accuracy")):
            seen = axis.get_legend_handles_labels()[1]
            samples = [256 * (row["iteration"] + 1) for row in rows]
            axis.plot(samples, [row[f"objective/{name}"] for row in rows], linewidth=1,
                      color=f"C{labels.index(label)}", label=None if label in seen else label)  # fmt: skip
            axis.set(xlabel="samples", ylabel={"reward": "reward", "accuracy": "exact answers"}[name], ylim=(0, 1))
            axis.legend()
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
