"""Three tasks for a small instruct model: single-turn environments with held-out prompts (split="test").

python ppo_llm.py --model DIR --env-id benchmarks.tasks:Sums-v0 --eval-env-kwargs '{"split": "test"}' ...
"""

import random
import re

import gymnasium as gym

TOPICS = """the sea, my garden, winter, the moon, a rainy day, old books, your favourite food, a train ride, dogs,
the first day of school, mountains, coffee, a broken bicycle, the desert, music, an empty house, spiders, mornings,
a lost key, the forest at night, snow, a hospital, birthdays, traffic, the stars, cooking for friends, a storm,
growing old, an exam, trees, a river, my neighbour, the dentist, painting, a funeral, bread, the internet, chess, a
letter from home, taxes, horses, a flat tyre, the opera, summer, mice, a cold bath, the moonlight, football, an old
castle, waiting""".replace("\n", " ").split(", ")


def split_rows(rows: list, split: str) -> list:
    """A fifth of the rows is held out."""
    if split not in ("train", "test"):
        raise ValueError("split must be train or test")
    rows = random.Random(0).sample(rows, len(rows))
    return rows[: len(rows) // 5] if split == "test" else rows[len(rows) // 5 :]


class Sums(gym.Env):
    """Prompts "What is 8 + 9?", numbers of up to `digits` digits. Reward 1 if the last number of the answer is it.

    partial: a wrong number of the right length gets half the share of its digits that are right. think: the prompt asks
    for it. curriculum: numbers grow over this many prompts from seed `first` on, ppo_llm.first_prompt(args).
    order: a number for that of the prompts.
    """

    def __init__(self, split: str = "train", digits: int = 1, partial: bool = False, curriculum: int = 0,
                 first: int = 0, think: bool = False, order: int = 0):  # fmt: skip
        numbers = range(10**digits)
        self.rows = split_rows([(a, b) for a in numbers for b in numbers], split)
        if order:
            random.Random(order).shuffle(self.rows)
        self.partial, self.curriculum, self.first = partial, curriculum if split == "train" else 0, first
        self.task = " Think step by step, then give the answer." if think else ""
        if self.curriculum:
            self.rows.sort(key=max)

    def reset(self, *, seed=None, options=None):
        seed, row = seed or 0, (seed or 0) % len(self.rows)
        if self.curriculum:  # from the first 64
            known = 64 + len(self.rows) * max(0, seed - self.first) // self.curriculum
            row = random.Random(seed).randrange(min(known, len(self.rows)))
        self.a, self.b = self.rows[row]
        return f"What is {self.a} + {self.b}?{self.task}", {}

    def step(self, response):
        number, right = (re.findall(r"\d+", response.replace(",", "")) or [""])[-1], str(self.a + self.b)
        reward = float(number == right)
        if self.partial and number != right and len(number) == len(right):
            reward = sum(map(str.__eq__, number, right)) / len(right) / 2
        return "", reward, True, False, {"success": number == right}


class Largest(gym.Env):
    """Prompts "Which of the numbers 59, 63, 15, 43 is the largest? ...", reward 1 if the answer's first number is it.

    The answer is to go on with an explanation: its first tokens decide on a reward that comes with the last.
    """

    def __init__(self, split: str = "train"):
        rng = random.Random(1)
        self.rows = split_rows([rng.sample(range(10, 100), 4) for _ in range(2000)], split)

    def reset(self, *, seed=None, options=None):
        self.numbers = self.rows[(seed or 0) % len(self.rows)]
        numbers = ", ".join(map(str, self.numbers))
        return f"Which of the numbers {numbers} is the largest? Begin with the number, then explain.", {}

    def step(self, response):
        first = re.search(r"\d+", response)
        return "", float(first is not None and int(first[0]) == max(self.numbers)), True, False, {}


class Cheerful(gym.Env):
    """Prompts "Tell me about the sea.", reward the sentiment of the answer, -1 to 1, by VADER, a lexicon with rules.

    https://github.com/cjhutto/vaderSentiment; the package vaderSentiment.
    """

    def __init__(self, split: str = "train"):
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

        self.rows, self.scorer = split_rows(TOPICS, split), SentimentIntensityAnalyzer()

    def reset(self, *, seed=None, options=None):
        return f"Tell me about {self.rows[(seed or 0) % len(self.rows)]}.", {}

    def step(self, response):
        return "", self.scorer.polarity_scores(response)["compound"], True, False, {}


gym.register("Sums-v0", entry_point=Sums)
gym.register("Largest-v0", entry_point=Largest)
gym.register("Cheerful-v0", entry_point=Cheerful)
