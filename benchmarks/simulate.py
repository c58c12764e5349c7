"""Decode steps that N responses of known lengths take in B slots, by counting: the oracle of tests and benchmarks.

Each slot is a counter of tokens still to come; a step takes one from every counter. Nothing here is shared with the
scripts, which compute the same numbers with a heap and by sums of maxima.
"""


def continuous_steps(lengths: list[int], slots: int) -> int:
    """Greedy list scheduling: a slot that is free takes the next response at once."""
    waiting, left, steps = list(lengths)[::-1], [0] * slots, 0
    while waiting or any(left):
        left = [n or (waiting.pop() if waiting else 0) for n in left]
        left = [max(0, n - 1) for n in left]
        steps += 1
    return steps


def static_steps(lengths: list[int], slots: int) -> int:
    """Waves: the next `slots` responses begin when all of the last ones have ended."""
    return sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))
