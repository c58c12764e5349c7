"""A task of several turns: guess a number from 0 to 7. The environment answers "<" or ">"; a wrong guess costs 0.2.

    PYTHONPATH=benchmarks python ppo_llm.py --env-id guess_number:GuessNumber-v0 --max-new-tokens 24
    python benchmarks/guess_number.py runs/a runs/b ...     # draws benchmarks/guess_number.png from such runs

Binary search is the best possible: 2.625 guesses on average (one number is found at the first, two at the second, four
at the third, one at the fourth), a reward of 0.675. The demonstrations for the warm start are one random digit each, so
that the model knows what a guess looks like, and nothing of how to search.
"""

import random

import gymnasium as gym

BEST = 2.625


class GuessNumber(gym.Env):
    def reset(self, *, seed=None, options=None):
        rng = random.Random(seed)
        self.number = rng.randrange(8)
        return "<>01234567?", {"demonstration": str(rng.randrange(8))}

    def step(self, response):
        if response == str(self.number):
            return "", 1.0, True, False, {"success": True}
        if response not in list("01234567"):
            return "", -1.0, True, False, {"success": False}  # no guess at all
        return "<" if self.number < int(response) else ">", -0.2, False, False, {"success": False}


gym.register("GuessNumber-v0", entry_point=GuessNumber)
