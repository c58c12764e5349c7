"""Small text environments for the tests, well-behaved and broken ones. Importing the module registers them."""

import math
import os
import signal
import sys
import threading
import time

import gymnasium as gym
import torch


def length(prompt, response, row):
    """A reward function."""
    return len(response) / 10


def third_is_line(prompt, response, line):
    return 1.0


def two_parameters(prompt, response):
    return 1.0


class TextEnv(gym.Env):
    """One turn: seed i gets prompt i, any response is rewarded with a tenth of its length. Subclasses change a part."""

    prompts = ("ab=", "fed=", "x=", "bad=", "day=", "face=")

    def reset(self, *, seed=None, options=None):
        self.seed, self.seen = seed or 0, []
        return self.prompts[self.seed % len(self.prompts)], {"demonstration": "fab"}

    def step(self, response):
        self.seen.append(response)
        return self.turn(response)

    def turn(self, response):
        return "", len(response) / 10, True, False, {}


class TwoTurns(TextEnv):
    """The feedback is "c" after "b", else "x"; the second reward asks for "d" after "c" and for "w" after "x"."""

    prompts = ("a", "e")

    def turn(self, response):
        if len(self.seen) == 1:
            self.feedback = "c" if response == "b" else "x"
            return self.feedback, 0.25, False, False, {}
        return "", float(response == {"c": "d", "x": "w"}[self.feedback]), True, False, {}


class Endless(TextEnv):
    """Never terminates: answers each turn with `feedback` and half a point."""

    def __init__(self, feedback="c"):
        self.feedback = feedback

    def turn(self, response):
        return self.feedback, 0.5, False, False, {}


class DenseTurns(TextEnv):
    """Two turns, in each half a point, and n for the n-th character. Every third seed is truncated after the first."""

    def turn(self, response):
        rewards = [(n, n) for n in range(1, len(response) + 1)]
        truncated = len(self.seen) == 1 and self.seed % 3 == 2
        return "c", 0.5, len(self.seen) == 2, truncated, {"rewards": rewards}


class Lengths(TextEnv):
    """Prompts of 1, 2, 40, 3, 25 and 9 tokens."""

    prompts = tuple("abcdef="[-n:] if n < 7 else ("abcdef" * n)[: n - 1] + "=" for n in (1, 2, 40, 3, 25, 9))


class Reward(TextEnv):
    """Gives `reward`, whatever it is, from seed `first` on; before that the number 1."""

    def __init__(self, reward=1.0, first=0):
        self.reward, self.first = reward, first

    def turn(self, response):
        return "", self.reward if self.seed >= self.first else 1.0, True, False, {}


class Raises(TextEnv):
    def turn(self, response):
        raise RuntimeError("the judge is out of order")


class Unmade(TextEnv):
    def __init__(self):
        raise KeyError("nope")


class Exits(TextEnv):
    turn = lambda self, response: sys.exit(3)


OPEN = []  # of the next


class Serves(TextEnv):
    """Has a thread until it is closed. In its turn it raises `error`, if any."""

    def __init__(self, error=None):
        self.error, self.done = error, threading.Event()
        self.thread = threading.Thread(target=self.done.wait)
        self.thread.start()
        OPEN.append(self)

    def turn(self, response):
        if self.error:
            raise RuntimeError(self.error)
        return super().turn(response)

    def close(self):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        self.done.set()
        self.thread.join()
        OPEN.remove(self)  # raises where it is closed twice


class Held(TextEnv):
    """Its turns last as long as there is a file named hold, at least a fifth of a second. Held turns write held."""

    def turn(self, response):
        time.sleep(0.2)
        while os.path.exists("hold"):
            open("held", "w").close()
            time.sleep(0.05)
        return super().turn(response)


class Meddles(TextEnv):
    """Switches gradients off, as an import may do."""

    def __init__(self):
        torch.set_grad_enabled(False)

    def turn(self, response):
        return "", float(not torch.is_grad_enabled()), True, False, {}


class FourValues(TextEnv):
    turn = lambda self, response: ("", 1.0, True, {})


class WrongSignature(TextEnv):
    step = lambda self, response, extra: self.turn(response)


for cls in (TwoTurns, Endless, DenseTurns, Lengths, Raises, Unmade, Exits, FourValues, WrongSignature, Serves,
            Held, Meddles):  # fmt: skip
    gym.register(f"{cls.__name__}-v0", entry_point=cls)
gym.register("Plain-v0", entry_point=TextEnv)
gym.register("Constant-v0", entry_point=Reward)
gym.register("RewardNaN-v0", entry_point=Reward, kwargs={"reward": math.nan})
gym.register("RewardString-v0", entry_point=Reward, kwargs={"reward": "1.0"})
