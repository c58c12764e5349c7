"""Environments: sums, products, the largest of four numbers; dense and bad rewards; a game of several turns.

    python ppo_llm.py --model DIR --env-id benchmarks.tasks:Sums-v0 --eval-env-kwargs '{"split": "test"}' ...
    python ppo_llm.py --env-id benchmarks.tasks:Dense-v0 --max-new-tokens 7 --gamma 0.5    # each right digit at once
    python ppo_llm.py --env-id benchmarks.tasks:AtEnd-v0 --max-new-tokens 7                # all with the last token
    python ppo_llm.py --env-id benchmarks.tasks:Ascending-v0                               # a reward with a hole
    python ppo_llm.py --env-id benchmarks.tasks:Guess-v0 --max-new-tokens 24         # several turns

The first four are for a small instruct model, which answers once; prompts of split="test" are held out. The others
take two minutes.
"""

import itertools
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

    A fifth of the pairs is held out, each with its swapped pair: of one digit 20 prompts of 100.
    partial: a wrong number of the right length gets half the share of its digits that are right.
    think: the prompt asks for it. order: prompts are shuffled by this seed.
    """

    def __init__(self, split: str = "train", digits: int = 1, partial: bool = False, think: bool = False,
                 order: int = 0):  # fmt: skip
        numbers = range(10**digits)
        pairs = split_rows([(a, b) for a in numbers for b in numbers if a <= b], split)  # 3 + 5 stays with 5 + 3
        self.rows = list(dict.fromkeys(row for a, b in pairs for row in ((a, b), (b, a))))
        random.Random(order).shuffle(self.rows)
        self.partial = partial
        self.task = " Think step by step, then give the answer." if think else ""

    def reset(self, *, seed=None, options=None):
        self.a, self.b = self.rows[(seed or 0) % len(self.rows)]
        return f"What is {self.a} + {self.b}?{self.task}", {}

    def step(self, response):
        number, right = (re.findall(r"\d+", response.replace(",", "")) or [""])[-1], str(self.a + self.b)
        reward = float(number == right)
        if self.partial and number != right and len(number) == len(right):
            reward = sum(map(str.__eq__, number, right)) / len(right) / 2
        return "", reward, True, False, {"success": number == right}


class Products(gym.Env):
    """Prompts "What is 47 * 8? ...", reward 1 if the last number of the answer is it."""

    def __init__(self, split: str = "train"):
        self.rows = split_rows([(a, b) for a in range(10, 100) for b in range(2, 10)], split)

    def reset(self, *, seed=None, options=None):
        self.a, self.b = self.rows[(seed or 0) % len(self.rows)]
        return f"What is {self.a} * {self.b}? Answer with the number alone.", {}

    def step(self, response):
        numbers = re.findall(r"\d+", response.replace(",", ""))
        return "", float(bool(numbers) and int(numbers[-1]) == self.a * self.b), True, False, {}


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


class Sequences(gym.Env):
    """Continue a sequence of digits, as "258:" -> "14703" (steps of 3, modulo 10). A right digit earns a sixth.

    So does an answer of five characters. dense: each digit is rewarded where it stands, else all are on the last token.
    """

    def __init__(self, dense: bool):
        self.dense = dense

    def reset(self, *, seed=None, options=None):
        rng = random.Random(seed)
        first, step = rng.randrange(10), rng.randrange(10)
        terms = "".join(str((first + i * step) % 10) for i in range(8))
        self.answer = terms[3:]
        return terms[:3] + ":", {}

    def step(self, response):
        ends = [end for end, (a, b) in enumerate(zip(response, self.answer), start=1) if a == b]
        reward = float(len(response) == 5) / 6
        info = {"success": response == self.answer}
        if self.dense:
            info["rewards"] = [(end, 1 / 6) for end in ends]
        else:
            reward += len(ends) / 6
        return "", reward, True, False, info


class Guess(gym.Env):
    """Guess a number from 0 to 7. A wrong guess costs 0.2 and is answered by "<" or ">". docs/your_task.md has it."""

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


class Exact(gym.Wrapper):
    """The default task without partial rewards."""

    def step(self, response):
        text, _, *ends, info = self.env.step(response)
        return text, float(info["success"]), *ends, info


class Prefix(gym.Wrapper):
    """Sort digits, and each one is rewarded where it stands, until the first that is wrong."""

    def step(self, response):
        text, _, *ends, info = self.env.step(response)
        answer = self.env.answer
        right = itertools.takewhile(lambda i: response[:i] == answer[:i], range(1, len(answer) + 1))
        info["rewards"] = [(end, 1 / len(answer)) for end in right]
        return text, 0.0, *ends, info


class Ascending(gym.Wrapper):
    """A reward with a hole: the share of neighbours in ascending order, whatever digits they are. "00000" earns 1."""

    def step(self, response):
        text, _, *ends, info = self.env.step(response)
        reward = sum(a <= b for a, b in itertools.pairwise(response)) / 4 if len(response) == 5 else 0.0
        return text, reward, *ends, info


def sort_digits(**kwargs):
    return gym.make("SortDigits-v0", disable_env_checker=True, **kwargs).unwrapped  # of ppo_llm.py


gym.register("Sums-v0", entry_point=Sums)
gym.register("Products-v0", entry_point=Products)
gym.register("Largest-v0", entry_point=Largest)
gym.register("Dense-v0", entry_point=Sequences, kwargs={"dense": True})
gym.register("AtEnd-v0", entry_point=Sequences, kwargs={"dense": False})
gym.register("Guess-v0", entry_point=Guess)
gym.register("Exact-v0", entry_point=lambda: Exact(sort_digits()))
gym.register("Prefix-v0", entry_point=lambda digits: Prefix(sort_digits(digits=digits)))
gym.register("Ascending-v0", entry_point=lambda: Ascending(sort_digits()))
