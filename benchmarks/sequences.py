"""Partial credit: continue a sequence of digits, as "258:" -> "14703" (steps of 3, modulo 10).

    export PYTHONPATH=benchmarks
    python ppo_llm.py --env-id sequences:Dense-v0 --sft-steps 0       # each right character is rewarded where it stands
    python ppo_llm.py --env-id sequences:AtEnd-v0 --sft-steps 0       # the same sum, on the last token
    python benchmarks/sequences.py dense=runs/a dense=runs/b end=runs/c ...    # draws benchmarks/sequences.png
"""

import random

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
