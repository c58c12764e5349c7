"""The rules that `python tests/exercise.py check NAME` tests, as functions of a module: the script, or a copy of it.

A rule raises Broken if the module breaks it. Most rules then show a case that a student can compute by hand.
"""

import contextlib
import dataclasses
import io
import json
import math
import tempfile
import types
from collections import defaultdict
from pathlib import Path
from unittest import mock

import torch
from torch import tensor

T, NAN = True, math.nan
RULES = defaultdict(list)  # {name of an exercise: [(the rule in words, its function)]}


class Broken(Exception):
    """`given` is a dictionary of inputs. `what` says what `expected` and `got` are."""

    def __init__(self, given, expected, got, what="result"):
        super().__init__(what)
        self.given, self.expected, self.got, self.what = given, expected, got, what


def rule(exercise: str, words: str):
    def add(function):
        RULES[exercise].append((words, function))
        return function

    return add


def copied(x):
    return x.clone() if isinstance(x, torch.Tensor) else x


def call(function, given: dict):
    """function(**given), with copies of the tensors, so that no rule sees what another one changed."""
    return function(**{name: copied(x) for name, x in given.items()})


def same(given: dict, expected, got, what="result", tolerance=1e-4):
    """Raise Broken unless `got` is `expected`, with its type, shape and dtype."""
    if isinstance(expected, float):
        got = got.detach() if isinstance(got, torch.Tensor) else got
        number = float(got) if isinstance(got, int | float | torch.Tensor) else math.nan
        holds(math.isclose(number, expected, rel_tol=tolerance, abs_tol=tolerance * 0.01), given, expected, got, what)
        return
    if not isinstance(expected, torch.Tensor):
        holds(got == expected, given, expected, got, what)
        return
    if not isinstance(got, torch.Tensor):
        raise Broken(given, "a tensor", f"{type(got).__name__}: {got!r:.80}", f"type of {what}")
    if got.shape != expected.shape:
        raise Broken(given, list(expected.shape), list(got.shape), f"shape of {what}")
    if got.dtype != expected.dtype:
        raise Broken(given, expected.dtype, got.dtype, f"dtype of {what}")
    if not torch.allclose(got.detach().double(), expected.double(), rtol=tolerance, atol=tolerance * 0.1):
        raise Broken(given, expected, got, what)


def holds(condition, given, expected, got, what="result"):
    if not condition:
        raise Broken(given, expected, got, what)


def unchanged(function, given: dict):
    """Raise Broken if the function changes one of its inputs in place."""
    passed = {name: copied(x) for name, x in given.items()}
    function(**passed)
    for name, x in given.items():
        if isinstance(x, torch.Tensor) and not torch.allclose(passed[name], x, rtol=0, atol=0, equal_nan=True):
            raise Broken({name: x}, x, passed[name], f"{name} after the call")


def outputs(result, count: int, given, names: str) -> tuple:
    """The result, if it is a tuple of so many."""
    if not isinstance(result, tuple) or len(result) != count:
        raise Broken(given, f"a tuple ({names})", f"{type(result).__name__}: {result!r:.80}", "type of result")
    return result


# === Random cases ===
# They have what a case by hand leaves out: rows with different gaps, numbers or NaN outside the mask, no symmetry.
# What is expected is computed token by token, in Python's floats.

RANDOM = "All of this holds in random cases with several rows, whose masks have gaps."


def random_masks(count=20):
    """Masks [3, 6], each with the generator that makes the numbers of its case. The first one is empty."""
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        yield generator, torch.rand(3, 6, generator=generator) < min(0.6, 0.6 * seed)


def random_numbers(generator, mask, size=2.0):
    """Numbers between -size and size, with one decimal. Outside the mask all of them are NaN, or none."""
    x = size * (2 * torch.rand(mask.shape, generator=generator) - 1)
    x = (10 * x).round() / 10
    return torch.where(mask, x, choice(generator, torch.full_like(x, NAN), x))


def choice(generator, *options):
    return options[int(torch.randint(len(options), (), generator=generator))]


def by_token(mask, *tensors):
    """Rows of (index, number, ...) of the tokens in the mask."""
    for row in range(len(mask)):
        yield [((row, t), *(float(x[row, t]) for x in tensors)) for t in range(mask.shape[1]) if mask[row, t]]


# === whiten ===


def whitened(ppo, x, mask):
    given = {"x": tensor(x), "mask": tensor(mask)}
    return given, call(ppo.masked_whiten, given)


@rule("whiten", "The whitened numbers of the sampled tokens have mean 0.")
def _(ppo):
    given, got = whitened(ppo, [[2.0, 4.0, 9.0]], [[T, T, T]])
    same(given, tensor([[2.0, 4.0, 9.0]]).shape, got.shape, "shape of result")
    same(given, 0.0, float(got.sum() / 3), "mean of the result")


@rule("whiten", "Their variance is 1: the sum of squares, outliers included, over the number of tokens minus 1.")
def _(ppo):
    given, got = whitened(ppo, [[2.0, 4.0, 9.0]], [[T, T, T]])
    same(given, 1.0, float((got - got.mean()).square().sum() / 2), "sum of squares / 2")
    given, got = whitened(ppo, [[36.0] + 35 * [0.0]], [36 * [T]])  # mean 1, standard deviation 6
    same(given, 35 / 6, got.max(), "largest number of the result")
    same(given, 1.0, float((got - got.mean()).square().sum() / 35), "sum of squares / 35")


@rule("whiten", "Entries outside the mask do not count, even if they are NaN.")
def _(ppo):
    given, got = whitened(ppo, [[2.0, NAN], [4.0, 100.0]], [[T, False], [T, False]])
    same(given, tensor([-0.7071, 0.7071]), got[:, 0], "result at the sampled tokens", 1e-3)


@rule("whiten", "Entries outside the mask become 0.")
def _(ppo):
    given, got = whitened(ppo, [[2.0, NAN], [4.0, 100.0]], [[T, False], [T, False]])
    same(given, tensor([0.0, 0.0]), got[:, 1], "result outside the mask")


@rule("whiten", "The statistics are those of all rows together.")
def _(ppo):
    given, got = whitened(ppo, [[1.0, 1.0], [3.0, 3.0]], [[T, T], [T, T]])
    same(given, tensor([[-0.8660, -0.8660], [0.8660, 0.8660]]), got, tolerance=1e-3)


@rule("whiten", "Equal numbers become 0 and not NaN. So does a single one.")
def _(ppo):
    for mask in [[T, T, T]], [[T, False, False]], [[False, False, False]]:
        given, got = whitened(ppo, [[5.0, 5.0, 5.0]], mask)
        same(given, torch.zeros(1, 3), got)


@rule("whiten", "Small numbers are whitened like large ones, but for the 1e-8 that is added to the variance.")
def _(ppo):
    given, got = whitened(ppo, [[0.002, 0.004, 0.009]], [[T, T, T]])
    same(given, tensor([[-0.8321, -0.2774, 1.1094]]), got, tolerance=5e-3)
    given, got = whitened(ppo, [[0.0, 1e-4, 2e-4]], [[T, T, T]])  # The variance is 1e-8 itself.
    same(given, tensor([[-0.7071, 0.0, 0.7071]]), got, tolerance=5e-3)


@rule("whiten", "Large numbers that are near one another keep their digits: subtract the mean before you square.")
def _(ppo):
    given, got = whitened(ppo, [[10000.0, 10001.0, 10002.0]], [[T, T, T]])
    same(given, tensor([[-1.0, 0.0, 1.0]]), got, tolerance=5e-3)


def whitened_by_hand(x, mask):
    numbers = x[mask].tolist()
    mean = sum(numbers) / max(1, len(numbers))
    variance = sum((x - mean) ** 2 for x in numbers) / max(1, len(numbers) - 1)
    expected = torch.zeros(x.shape)
    expected[mask] = tensor([(x - mean) / math.sqrt(variance + 1e-8) for x in numbers])
    return expected


@rule("whiten", RANDOM)
def _(ppo):
    for generator, mask in random_masks():
        given = {"x": random_numbers(generator, mask, size=choice(generator, 2.0, 50.0)), "mask": mask}
        same(given, whitened_by_hand(**given), call(ppo.masked_whiten, given), tolerance=1e-3)


@rule("whiten", "The inputs stay as they are.")
def _(ppo):
    unchanged(ppo.masked_whiten, {"x": tensor([[2.0, 4.0, NAN]]), "mask": tensor([[T, T, False]])})


# === kl ===


def kl_case(ppo, kind, logprobs=(-1.0, -2.0), ref=(-1.5, -1.0)):
    given = {"logprobs": tensor([logprobs]), "ref_logprobs": tensor([ref]), "kind": kind}
    return given, call(ppo.kl_estimate, given)


@rule("kl", "k1 is log pi - log pi_ref. It is negative where the reference finds the token more likely.")
def _(ppo):
    given, got = kl_case(ppo, "k1")
    same(given, tensor([[0.5, -1.0]]), got)


@rule("kl", "k2 is half the square of the log-ratio.")
def _(ppo):
    given, got = kl_case(ppo, "k2")
    same(given, tensor([[0.125, 0.5]]), got)


@rule("kl", "k3 is r - 1 - log r with r = pi_ref / pi.")
def _(ppo):
    given, got = kl_case(ppo, "k3")
    same(given, tensor([[0.10653, 0.71828]]), got)


@rule("kl", "k3 stays exact where the policies nearly agree: use expm1 instead of exp and - 1.")
def _(ppo):
    given, got = kl_case(ppo, "k3", (1e-4, -1e-4), (0.0, 0.0))
    same(given, tensor([[5.0, 5.0]]), got * 1e9, "result, in units of 1e-9", tolerance=0.02)


@rule("kl", "On average over the tokens that pi samples, k1 and k3 are KL(pi || pi_ref).")
def _(ppo):
    pi, ref = tensor([[0.5, 0.3, 0.2]]), tensor([[0.2, 0.2, 0.6]])
    kl = float((pi * (pi / ref).log()).sum())
    for kind in "k1", "k3":
        given = {"logprobs": pi.log(), "ref_logprobs": ref.log(), "kind": kind}
        got = float((pi * call(ppo.kl_estimate, given)).sum())
        same({"pi": pi, "pi_ref": ref, "kind": kind}, kl, got, f"mean of {kind} over pi")


@rule("kl", "The gradients with respect to log pi are 1 for k1, the log-ratio for k2, and 1 - r for k3.")
def _(ppo):
    for kind, expected in ("k1", [[1.0, 1.0]]), ("k2", [[0.5, -1.0]]), ("k3", [[0.39347, -1.71828]]):
        logprobs = tensor([[-1.0, -2.0]], requires_grad=True)
        ref = tensor([[-1.5, -1.0]])
        given = {"logprobs": logprobs.detach(), "ref_logprobs": ref, "kind": kind}
        estimate = ppo.kl_estimate(logprobs, ref, kind)
        holds(getattr(estimate, "requires_grad", False), given, "a result with a gradient", "a constant")
        estimate.sum().backward()
        same(given, tensor(expected), logprobs.grad, "gradient of the log-probs")


@rule("kl", "Large log-ratios count in full.")
def _(ppo):
    k3 = [[39.0, math.exp(30) - 31]]
    for kind, expected in ("k1", [[40.0, -30.0]]), ("k2", [[800.0, 450.0]]), ("k3", k3):
        given, got = kl_case(ppo, kind, (-1.0, -31.0), (-41.0, -1.0))
        same(given, tensor(expected), got)


@rule("kl", "All of this holds in random cases with several rows.")
def _(ppo):
    for generator, mask in random_masks():
        logprobs, ref = (-random_numbers(generator, mask | ~mask).abs() for _ in range(2))
        x = (logprobs - ref).double()
        for kind, expected in {"k1": x, "k2": x**2 / 2, "k3": torch.exp(-x) - 1 + x}.items():
            given = {"logprobs": logprobs, "ref_logprobs": ref, "kind": kind}
            same(given, expected.float(), call(ppo.kl_estimate, given), tolerance=1e-3)


@rule("kl", "The inputs stay as they are.")
def _(ppo):
    for kind in "k1", "k2", "k3":
        given = {"logprobs": tensor([[-1.0, -2.0]]), "ref_logprobs": tensor([[-1.5, -1.0]]), "kind": kind}
        unchanged(ppo.kl_estimate, given)


# === gae ===


def gae(ppo, rewards, values, mask, gamma=1.0, gae_lambda=1.0):
    given = {"rewards": tensor(rewards), "values": tensor(values), "mask": tensor(mask), "gamma": gamma,
             "gae_lambda": gae_lambda}  # fmt: skip
    advantages, returns = outputs(call(ppo.compute_gae, given), 2, given, "advantages, returns")
    return given, advantages, returns


@rule("gae", "The value after the last sampled token is 0.")
def _(ppo):
    given, advantages, _ = gae(ppo, [[0.0, 1.0, 0.0]], [[0.0, 0.25, 8.0]], [[False, T, False]])
    same(given, tensor([0.75]), advantages[:, 1], "advantage of the sampled token")
    given, advantages, _ = gae(ppo, [[0.0, 1.0]], [[0.0, 0.25]], [[False, T]])  # at the end of the row
    same(given, tensor([0.75]), advantages[:, 1], "advantage of the sampled token")


@rule("gae", "With lambda 0 an advantage is reward + gamma * next value - value.")
def _(ppo):
    given, advantages, _ = gae(ppo, [[1.0, 2.0]], [[3.0, 4.0]], [[T, T]], gamma=0.5, gae_lambda=0.0)
    same(given, tensor([[0.0, -2.0]]), advantages, "advantages")


@rule("gae", "The advantage of the next token enters with the factor gamma * lambda.")
def _(ppo):
    given, advantages, _ = gae(ppo, [[0.0, 0.0, 1.0]], [[0.0, 0.0, 0.0]], [[T, T, T]], gamma=0.5, gae_lambda=0.4)
    same(given, tensor([[0.04, 0.2, 1.0]]), advantages, "advantages")
    given = {"rewards": torch.ones(1, 300), "values": torch.zeros(1, 300), "mask": torch.ones(1, 300) > 0, "gamma": 0.5,
             "gae_lambda": 0.4}  # fmt: skip
    advantages, _ = outputs(call(ppo.compute_gae, given), 2, given, "advantages, returns")
    # The geometric series 1 + 0.2 + 0.04 + ... has the sum 1.25.
    given |= {"rewards": "300 times 1", "values": "300 times 0", "mask": "all 300 tokens"}
    same(given, tensor([1.25, 1.25, 1.25, 1.24, 1.2, 1.0]), advantages[0, [0, 1, 150, 297, 298, 299]],
         "advantages at 0, 1, 150, 297, 298, 299")  # fmt: skip


@rule("gae", "With gamma and lambda 1 an advantage is the sum of the rewards from there on, minus the value.")
def _(ppo):
    given, advantages, _ = gae(ppo, [[1.0, 2.0, 4.0]], [[0.5, 0.25, 3.0]], [[T, T, T]])
    same(given, tensor([[6.5, 5.75, 1.0]]), advantages, "advantages")


@rule("gae", "A token of the environment passes the advantage through unchanged: no gamma, no lambda.")
def _(ppo):
    given, advantages, _ = gae(ppo, [[0.0, 0.0, 1.0]], [[0.0, 0.0, 0.0]], [[T, False, T]], gamma=0.5, gae_lambda=0.4)
    same(given, tensor([[0.2, 1.0]]), advantages[:, ::2], "advantages of the sampled tokens")


@rule("gae", "The next value is that of the next sampled token, not of a token of the environment.")
def _(ppo):
    given, advantages, _ = gae(ppo, [[0.0, 0.0, 0.0]], [[0.0, 8.0, 0.5]], [[T, False, T]], gamma=1.0, gae_lambda=0.0)
    same(given, tensor([[0.5, -0.5]]), advantages[:, ::2], "advantages of the sampled tokens")


@rule("gae", "Rewards and values outside the mask do not count, even if they are NaN.")
def _(ppo):
    given, advantages, _ = gae(ppo, [[NAN, 0.0, 5.0, 1.0, NAN]], [[NAN, 0.0, NAN, 0.5, NAN]],
                               [[False, T, False, T, False]])  # fmt: skip
    same(given, tensor([[1.0, 0.5]]), advantages[:, 1::2], "advantages of the sampled tokens")


@rule("gae", "Each row is a trajectory of its own.")
def _(ppo):
    given, advantages, _ = gae(ppo, [[1.0, 2.0], [0.0, 1.0]], [[0.0, 0.0], [0.5, 0.0]], [[T, T], [T, T]])
    same(given, tensor([[3.0, 2.0], [0.5, 1.0]]), advantages, "advantages")


@rule("gae", "A return is the advantage plus the value at a sampled token.")
def _(ppo):
    given, _, returns = gae(ppo, [[0.0, 1.0, 1.0]], [[9.0, 0.5, 0.25]], [[False, T, T]], gamma=1.0, gae_lambda=0.0)
    same(given, tensor([1.25, 1.0]), returns[0, 1:], "returns of the sampled tokens")


@rule("gae", "So it is whatever lambda is: with lambda 1 and gamma 1 it is the sum of the rewards from there on.")
def _(ppo):
    given, _, returns = gae(ppo, [[0.0, 0.0, 1.0]], [[0.3, 0.2, 0.6]], [[T, T, T]])
    same(given, tensor([[1.0, 1.0, 1.0]]), returns, "returns")
    given, _, returns = gae(ppo, [[0.0, 0.0, 1.0]], [[0.3, 0.2, 0.6]], [[T, T, T]], gae_lambda=0.5)
    same(given, tensor([[0.5, 0.8, 1.0]]), returns, "returns")


@rule("gae", "Advantages and returns outside the mask are 0, even if rewards and values are NaN there.")
def _(ppo):
    for x in 9.0, NAN:
        given, advantages, returns = gae(ppo, [[x, 1.0, x]], [[x, 0.5, x]], [[False, T, False]])
        same(given, tensor([0.0, 0.0]), advantages[0, ::2], "advantages outside the mask")
        same(given, tensor([0.0, 0.0]), returns[0, ::2], "returns outside the mask")


@rule("gae", "Rows with different gaps do not disturb one another.")
def _(ppo):
    given, advantages, returns = gae(
        ppo, [[0.0, 5.0, 1.0], [0.5, 0.0, 2.0]], [[0.5, 8.0, 0.25], [0.0, 1.0, 8.0]], [[T, False, T], [T, T, False]],
        gae_lambda=0.0)  # fmt: skip
    same(given, tensor([[-0.25, 0.0, 0.75], [1.5, -1.0, 0.0]]), advantages, "advantages")
    same(given, tensor([[0.25, 0.0, 1.0], [1.5, 0.0, 0.0]]), returns, "returns")


def gae_by_hand(rewards, values, mask, gamma, gae_lambda):
    advantages, returns = torch.zeros(2, *mask.shape)
    for row in by_token(mask, rewards, values):
        next_value = advantage = 0.0
        for place, reward, value in reversed(row):
            advantage = reward + gamma * next_value - value + gamma * gae_lambda * advantage
            next_value = value
            advantages[place], returns[place] = advantage, advantage + value
    return advantages, returns


@rule("gae", RANDOM)
def _(ppo):
    for generator, mask in random_masks():
        rewards, values = random_numbers(generator, mask), random_numbers(generator, mask)
        gamma, gae_lambda = (choice(generator, 0.5, 0.8, 1.0) for _ in range(2))
        given, *got = gae(ppo, rewards.tolist(), values.tolist(), mask.tolist(), gamma, gae_lambda)
        for name, expected, found in zip(("advantages", "returns"), gae_by_hand(**given), got):
            same(given, expected, found, name, 1e-3)


@rule("gae", "The inputs stay as they are.")
def _(ppo):
    unchanged(ppo.compute_gae, {
        "rewards": tensor([[NAN, 1.0, 1.0]]), "values": tensor([[9.0, 0.5, 0.25]]),
        "mask": tensor([[False, T, T]]), "gamma": 0.9, "gae_lambda": 0.8})  # fmt: skip


# === surrogate ===


def surrogate(ppo, ratio, advantages, low=0.2, high=0.3, dual=None, denom=1, mask=None):
    ratio = tensor([ratio])
    given = {"logprobs": ratio.log(), "old_logprobs": torch.zeros_like(ratio), "advantages": tensor([advantages]),
             "mask": torch.ones_like(ratio) > 0 if mask is None else tensor([mask]), "clip_low": low,
             "clip_high": high, "dual_clip": dual, "denom": denom}  # fmt: skip
    loss, stats = outputs(call(ppo.policy_loss, given), 2, given, "loss, statistics")
    shown = {"ratio": ratio} | {name: x for name, x in given.items() if name not in ("logprobs", "old_logprobs")}
    same(shown, torch.tensor(0.0).shape, loss.shape, "shape of the loss")
    return shown, loss, stats


def statistic(given, stats, name):
    if not isinstance(stats, dict) or name not in stats:
        raise Broken(given, f"an entry {name!r}", stats, "statistics")
    return float(torch.as_tensor(stats[name]).detach())


@rule("surrogate", "Where the ratio is 1, the loss of a token is minus its advantage.")
def _(ppo):
    given, loss, _ = surrogate(ppo, [1.0], [2.0])
    same(given, -2.0, float(loss), "loss")


@rule("surrogate", "A good token, whose advantage is positive, earns no more than (1 + clip_high) * A.")
def _(ppo):
    given, loss, _ = surrogate(ppo, [1.5], [1.0])
    same(given, -1.3, float(loss), "loss")


@rule("surrogate", "A bad token whose ratio has fallen below 1 - clip_low earns no more than (1 - clip_low) * A.")
def _(ppo):
    given, loss, _ = surrogate(ppo, [0.5], [-1.0])
    same(given, 0.8, float(loss), "loss")


@rule("surrogate", "The clip never hides that a token got worse: of both objectives the smaller one counts.")
def _(ppo):
    given, loss, _ = surrogate(ppo, [0.5, 2.0], [1.0, -1.0])  # a good token less likely, a bad one more likely
    same(given, -0.5 + 2.0, float(loss), "loss")


@rule("surrogate", "The gradient of a log-prob is -ratio * A, or 0 where the clip holds.")
def _(ppo):
    ratio, advantages = tensor([[1.0, 1.5, 0.5, 2.0]]), tensor([[1.0, 1.0, 1.0, -1.0]])
    logprobs = ratio.log().requires_grad_()
    loss, _ = ppo.policy_loss(logprobs, torch.zeros(1, 4), advantages, ratio > 0, 0.2, 0.3, None, 1)
    given = {"ratio": ratio, "advantages": advantages, "clip_low": 0.2, "clip_high": 0.3, "denom": 1}
    holds(loss.requires_grad, given, "a loss with a gradient", "a constant")
    loss.backward()
    same(given, tensor([[-1.0, 0.0, -0.5, 2.0]]), logprobs.grad, "gradient of the log-probs")


@rule("surrogate", "The loss is the sum over the tokens divided by `denom`, not by their number.")
def _(ppo):
    given, loss, _ = surrogate(ppo, [1.0, 1.0], [1.0, 2.0], denom=10)
    same(given, -0.3, float(loss), "loss")


@rule("surrogate", "Tokens outside the mask do not count, even if their ratio and advantage are NaN.")
def _(ppo):
    given, loss, stats = surrogate(ppo, [1.0, 9.0, NAN], [1.0, 5.0, NAN], mask=[T, False, False])
    same(given, -1.0, float(loss), "loss")
    for name in "clipfrac", "approx_kl", "ratio_dev":
        same(given, 0.0, statistic(given, stats, name), name)


@rule("surrogate", "Tokens outside the mask have gradient 0, even if their advantage or old log-prob is NaN.")
def _(ppo):
    for name in "advantages", "old_logprobs":
        logprobs, mask = tensor([[-1.0, -2.0]], requires_grad=True), tensor([[T, False]])
        given = {"old_logprobs": tensor([[-1.0, -1.0]]), "advantages": tensor([[2.0, 3.0]])}
        given[name][0, 1] = NAN
        loss, _ = ppo.policy_loss(logprobs, **given, mask=mask, clip_low=0.2, clip_high=0.3, dual_clip=3.0, denom=1)
        given = {"logprobs": logprobs.detach(), **given, "mask": mask, "denom": 1}
        holds(loss.requires_grad, given, "a loss with a gradient", "a constant")
        same(given, -2.0, float(loss.detach()), "loss")
        loss.backward()
        same(given, tensor([0.0]), logprobs.grad[:, 1], "gradient of the log-prob outside the mask")


@rule("surrogate", "With dual_clip the loss of a token with a negative advantage is at most dual_clip * |A|.")
def _(ppo):
    given, loss, _ = surrogate(ppo, [5.0, 2.0], [-1.0, -1.0], dual=3.0)
    same(given, 3.0 + 2.0, float(loss), "loss")
    given, loss, _ = surrogate(ppo, [5.0], [-0.5], dual=3.0)
    same(given, 1.5, float(loss), "loss")


@rule("surrogate", "dual_clip does nothing to a token with a positive advantage.")
def _(ppo):
    given, loss, _ = surrogate(ppo, [5.0, 0.01], [1.0, 1.0], dual=3.0)
    same(given, -1.3 - 0.01, float(loss), "loss")


@rule("surrogate", "clipfrac counts the ratios beyond either bound, whatever A and dual_clip are, divided by denom.")
def _(ppo):
    given, _, stats = surrogate(ppo, [1.0, 1.5, 0.5, 1.25], [1.0, -1.0, 1.0, 1.0], denom=8)
    same(given, 0.25, statistic(given, stats, "clipfrac"), "clipfrac")
    given, _, stats = surrogate(ppo, [1.25, 1.5, 5.0], [-1.0, -1.0, -1.0], dual=1.1, denom=8)  # 1.25 is within
    same(given, 0.25, statistic(given, stats, "clipfrac"), "clipfrac")


@rule("surrogate", "approx_kl is the sum of r - 1 - log r, divided by denom. It is never negative.")
def _(ppo):
    given, _, stats = surrogate(ppo, [3.0, 0.7], [1.0, 1.0], denom=8)
    same(given, 0.119757, statistic(given, stats, "approx_kl"), "approx_kl")


@rule("surrogate", "approx_kl stays exact where the ratio is nearly 1: use expm1.")
def _(ppo):
    logprobs = tensor([[-0.0001, 0.0002]])
    given = {"logprobs": logprobs, "old_logprobs": torch.zeros(1, 2), "advantages": torch.ones(1, 2),
             "mask": tensor([[T, T]]), "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "denom": 1}  # fmt: skip
    _, stats = outputs(call(ppo.policy_loss, given), 2, given, "loss, statistics")
    same(given, 25.0, 1e9 * statistic(given, stats, "approx_kl"), "approx_kl, in units of 1e-9", 0.02)


@rule("surrogate", "ratio_dev is the sum of |r - 1|, divided by denom.")
def _(ppo):
    given, _, stats = surrogate(ppo, [1.5, 0.75], [1.0, 1.0], denom=10)
    same(given, 0.075, statistic(given, stats, "ratio_dev"), "ratio_dev")


@rule("surrogate", "token_share is the number of tokens in the mask, divided by denom.")
def _(ppo):
    given, _, stats = surrogate(ppo, [1.5, 0.5, 1.0], [1.0, 1.0, 1.0], mask=[T, T, False], denom=8)
    same(given, 0.25, statistic(given, stats, "token_share"), "token_share")


@rule("surrogate", "The statistics have no gradient.")
def _(ppo):
    logprobs = torch.zeros(1, 2, requires_grad=True)
    x, mask = torch.zeros(1, 2), tensor([[T, T]])
    _, stats = ppo.policy_loss(logprobs, x, x, mask, 0.2, 0.2, None, 2)
    wrong = [name for name, number in stats.items() if getattr(number, "requires_grad", False)]
    holds(not wrong, {}, "no statistic with a gradient", ", ".join(wrong))


@rule("surrogate", "Log-ratios are clamped to [-20, 20], so that a log-ratio of 500 gives a finite loss.")
def _(ppo):
    zeros, mask = torch.zeros(1, 1), tensor([[T]])
    for logratio, clamped in (500.0, 20.0), (15.0, 15.0), (-500.0, -20.0):
        logprobs = tensor([[logratio]], requires_grad=True)
        loss, stats = ppo.policy_loss(logprobs, zeros, zeros - 1, mask, 0.2, 0.2, None, 2)
        loss.backward()
        given = {"logprobs": logprobs.detach(), "old_logprobs": zeros, "advantages": zeros - 1, "clip_low": 0.2,
                 "denom": 2}  # fmt: skip
        finite = bool(loss.isfinite() and logprobs.grad.isfinite().all())
        holds(finite, given, "a finite loss and gradient", f"loss {loss.item()}, gradient {logprobs.grad.tolist()}")
        same(given, max(math.exp(clamped), 0.8) / 2, float(loss.detach()), "loss")
        same(given, (math.expm1(clamped) - clamped) / 2, statistic(given, stats, "approx_kl"), "approx_kl")


def surrogate_by_hand(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip, denom):
    loss, gradient = 0.0, torch.zeros(mask.shape)
    stats = {"clipfrac": 0.0, "approx_kl": 0.0, "ratio_dev": 0.0, "token_share": 0.0}
    for row in by_token(mask, logprobs, old_logprobs, advantages):
        for place, logprob, old, advantage in row:
            ratio = math.exp(logprob - old)
            clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
            of_ratio, of_clipped = -advantage * ratio, -advantage * clipped
            is_bound = dual_clip is not None and advantage < 0 and of_ratio > -advantage * dual_clip
            loss += -advantage * dual_clip if is_bound else max(of_ratio, of_clipped)
            gradient[place] = 0.0 if is_bound or of_clipped > of_ratio else of_ratio / denom
            stats["clipfrac"] += ratio != clipped
            stats["approx_kl"] += ratio - 1 - (logprob - old)
            stats["ratio_dev"] += abs(ratio - 1)
            stats["token_share"] += 1
    return loss / denom, gradient, {name: x / denom for name, x in stats.items()}


@rule("surrogate", RANDOM)
def _(ppo):
    for generator, mask in random_masks():
        given = {name: random_numbers(generator, mask) for name in ("logprobs", "old_logprobs", "advantages")}
        given |= {"mask": mask, "clip_low": choice(generator, 0.1, 0.3), "clip_high": choice(generator, 0.25, 0.6),
                  "dual_clip": choice(generator, None, 1.2, 2.5), "denom": choice(generator, 5, 30)}  # fmt: skip
        loss, gradient, statistics = surrogate_by_hand(**given)
        logprobs = given["logprobs"].clone().requires_grad_()
        got, stats = outputs(call(ppo.policy_loss, given | {"logprobs": logprobs}), 2, given, "loss, statistics")
        same(given, loss, float(got.detach()), "loss", 1e-3)
        for name, expected in statistics.items():
            same(given, float(expected), statistic(given, stats, name), name, 1e-3)
        if mask.any():
            [found] = torch.autograd.grad(got, logprobs)
            same(given, gradient, found, "gradient of the log-probs", 1e-3)


@rule("surrogate", "The inputs stay as they are.")
def _(ppo):
    x = tensor([[0.0, NAN]])
    unchanged(ppo.policy_loss, {"logprobs": x, "old_logprobs": x - 0.5, "advantages": x, "mask": tensor([[T, False]]),
                                "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "denom": 1})  # fmt: skip


# === value ===


def value_case(ppo, values, old, returns, clip=None, denom=1, mask=None):
    given = {"values": tensor([values]), "old_values": tensor([old]), "returns": tensor([returns]),
             "mask": torch.ones(1, len(values)) > 0 if mask is None else tensor([mask]), "clip": clip,
             "denom": denom}  # fmt: skip
    return given, call(ppo.value_loss, given)[0]


@rule("value", "The loss of a token is half the square of value minus return.")
def _(ppo):
    given, loss = value_case(ppo, [3.0], [0.0], [1.0])
    same(given, 2.0, loss, "loss")


@rule("value", "The loss is the sum over the tokens divided by `denom`, not by their number.")
def _(ppo):
    given, loss = value_case(ppo, [1.0, 2.0], [0.0, 0.0], [0.0, 0.0], denom=10)
    same(given, 0.25, loss, "loss")


@rule("value", "Tokens outside the mask do not count, even if they are NaN.")
def _(ppo):
    for clip in None, 0.5:
        given, loss = value_case(ppo, [2.0, NAN], [2.0, NAN], [0.0, NAN], clip, mask=[T, False])
        same(given, 2.0, loss, "loss")


@rule("value", "Tokens outside the mask have gradient 0, even if their return or old value is NaN.")
def _(ppo):
    for clip, name in (None, "returns"), (0.5, "returns"), (0.5, "old_values"):
        values, mask = tensor([[2.0, 3.0]], requires_grad=True), tensor([[T, False]])
        given = {"old_values": tensor([[2.0, 2.0]]), "returns": tensor([[0.0, 1.0]])}
        given[name][0, 1] = NAN
        ppo.value_loss(values, **given, mask=mask, clip=clip, denom=1)[0].backward()
        given = {"values": values.detach(), **given, "mask": mask, "clip": clip, "denom": 1}
        same(given, tensor([0.0]), values.grad[:, 1], "gradient of the value outside the mask")


@rule("value", "Without a clip the old values do not matter.")
def _(ppo):
    given, loss = value_case(ppo, [3.0], [-50.0], [1.0])
    same(given, 2.0, loss, "loss")


@rule("value", "With a clip, a value that moved further than `clip`, up or down, is cut there, but not in value_dev.")
def _(ppo):
    for value in 1.0, -1.0:  # it has reached its target, and is pulled no further
        given, loss = value_case(ppo, [value], [0.0], [value], clip=0.5)
        same(given, 0.125, loss, "loss")
        _, stats = call(ppo.value_loss, given)
        same(given, 1.0, statistic(given, stats, "value_dev"), "value_dev, which the line after your part computes")


@rule("value", "The clip is around the old value, wherever that is.")
def _(ppo):
    given, loss = value_case(ppo, [3.0], [2.0], [3.0], clip=0.5)
    same(given, 0.125, loss, "loss")


@rule("value", "A clip of 0 is a clip: the value stays at the old one.")
def _(ppo):
    given, loss = value_case(ppo, [1.0], [0.0], [1.0], clip=0.0)
    same(given, 0.5, loss, "loss")


@rule("value", "The larger of the clipped and the unclipped square counts, token by token.")
def _(ppo):
    given, loss = value_case(ppo, [2.0], [0.0], [0.0], clip=0.5)
    same(given, 2.0, loss, "loss")
    given, loss = value_case(ppo, [2.0, 3.0], [0.0, 0.0], [0.0, 3.0], clip=0.5)
    same(given, 2.0 + 3.125, loss, "loss")


@rule("value", "The gradient reaches the values where they are not clipped.")
def _(ppo):
    values = tensor([[3.0, 1.0]], requires_grad=True)
    ppo.value_loss(values, tensor([[3.0, 0.0]]), tensor([[1.0, 1.0]]), tensor([[T, T]]), 0.5, 2)[0].backward()
    given = {"values": values.detach(), "old_values": [[3.0, 0.0]], "returns": [[1.0, 1.0]], "clip": 0.5, "denom": 2}
    same(given, tensor([[1.0, 0.0]]), values.grad, "gradient of the values")


def value_loss_by_hand(values, old_values, returns, mask, clip, denom):
    loss, gradient = 0.0, torch.zeros(mask.shape)
    for row in by_token(mask, values, old_values, returns):
        for place, value, old, target in row:
            clipped = value if clip is None else min(max(value, old - clip), old + clip)
            square, of_clipped = (value - target) ** 2, (clipped - target) ** 2
            loss += max(square, of_clipped) / 2 / denom
            gradient[place] = 0.0 if of_clipped > square else (value - target) / denom
    return loss, gradient


@rule("value", RANDOM)
def _(ppo):
    for generator, mask in random_masks():
        given = {name: random_numbers(generator, mask) for name in ("values", "old_values", "returns")}
        given |= {"mask": mask, "clip": choice(generator, None, 0.55), "denom": choice(generator, 5, 30)}
        loss, gradient = value_loss_by_hand(**given)
        values = given["values"].clone().requires_grad_()
        got = call(ppo.value_loss, given | {"values": values})[0]
        same(given, loss, got, "loss", 1e-3)
        if mask.any():
            [found] = torch.autograd.grad(got, values)
            same(given, gradient, found, "gradient of the values", 1e-3)


@rule("value", "The inputs stay as they are.")
def _(ppo):
    x = tensor([[3.0, NAN]])
    unchanged(ppo.value_loss, {"values": x, "old_values": x + 1, "returns": x - 1, "mask": tensor([[T, False]]),
                               "clip": 0.5, "denom": 2})  # fmt: skip


# === schedule ===


def schedule(ppo, first, end_fraction, progress, expected):
    given = {"first": first, "end_fraction": end_fraction, "progress": progress}
    same(given, expected, ppo.linear_schedule(**given))


@rule("schedule", "At progress 0 the value is `first`.")
def _(ppo):
    schedule(ppo, 0.5, 0.1, 0.0, 0.5)


@rule("schedule", "At progress 1 the value is first * end_fraction.")
def _(ppo):
    schedule(ppo, 0.5, 0.1, 1.0, 0.05)


@rule("schedule", "Half way the value is the mean of both ends, however small they are.")
def _(ppo):
    schedule(ppo, 0.5, 0.1, 0.5, 0.275)
    given = {"first": 1e-6, "end_fraction": 0.1, "progress": 0.5}
    same(given, 550.0, 1e9 * ppo.linear_schedule(**given), "result, in units of 1e-9")


@rule("schedule", "The way down is a straight line: after a quarter of the way, a quarter of the fall is done.")
def _(ppo):
    schedule(ppo, 0.5, 0.2, 0.25, 0.4)
    schedule(ppo, 0.5, 0.2, 0.1, 0.46)
    schedule(ppo, 2.0, 0.5, 0.9, 1.1)


@rule("schedule", "Beyond progress 1 the value stays at its end, even if that is 0.")
def _(ppo):
    schedule(ppo, 0.5, 0.1, 1.5, 0.05)
    schedule(ppo, 0.5, 0.0, 1.5, 0.0)


@rule("schedule", "An end_fraction of 1 is a constant, and one of 0 ends at 0.")
def _(ppo):
    schedule(ppo, 0.5, 1.0, 0.7, 0.5)
    schedule(ppo, 0.5, 0.0, 1.0, 0.0)


# === rewards ===


class Table:
    """A model whose log-prob, or value, of a token is `numbers[id]`."""

    def __init__(self, *numbers):
        self.numbers = tensor(numbers)

    def sampled_logprobs(self, mb, temperature):
        return self.numbers[mb.tokens] * mb.mask, torch.zeros(mb.tokens.shape)

    def sampled_values(self, mb):
        return self.numbers[mb.tokens] * mb.mask


ACTOR, REFERENCE = Table(0.0, -0.1, -0.2, -0.3, -4.0, -0.5), Table(0.0, -0.3, -0.1, -0.9, -0.2, -3.5)
CRITIC = Table(0.0, 0.1, 0.2, 0.6, -0.3, 0.5)


def episode(ppo, ids, rewards, stop="terminated", prompt=1):
    e = ppo.Episode(0)
    e.add(ids[:prompt])
    e.add(ids[prompt:], [-0.1 * i for i in ids[prompt:]])
    e.rewards = list(map(float, rewards))
    e.prompt_length, e.stop = prompt, stop
    return e


def arguments(ppo, **changes):
    return ppo.Args(**{"device": "cpu", "dtype": "float32", "compile": "off", "critic_lambda": 0.0} | changes)


def experience_of(ppo, episodes, critic=None, **flags):
    args = arguments(ppo, **flags)
    reference = REFERENCE if args.kl_coef else None
    return ppo.make_experience(episodes, ACTOR, critic, reference, ppo.TrainState(), args)


def two_episodes(ppo):
    """The first has been cut. It is shorter than the second, as after a longer prompt."""
    return [episode(ppo, [5, 1, 2], [0, 0, 0.5], "length"), episode(ppo, [5, 1, 2, 3], [0, 0.25, 0, 1])]


TWO = {"tokens": [[5, 1, 2], [5, 1, 2, 3]], "sampled": [[0, 1, 1], [0, 1, 1, 1]],
       "rewards of the environment": [[0, 0, 0.5], [0, 0.25, 0, 1]], "stop": ["length", "terminated"]}  # fmt: skip
LOGS = {"log pi": [[0, -0.1, -0.2], [0, -0.1, -0.2, -0.3]], "log pi_ref": [[0, -0.3, -0.1], [0, -0.3, -0.1, -0.9]]}


def used_rewards(ppo, **flags):
    """The rewards that the returns are made of: with --critic-lambda 0 and without a critic they are the returns."""
    return TWO | (LOGS if flags["kl_coef"] else {}) | flags, experience_of(ppo, two_episodes(ppo), **flags)


@rule("rewards", "Without a KL and a penalty, the rewards are those of the environment, each at its token.")
def _(ppo):
    given, e = used_rewards(ppo, kl_coef=0.0)
    same(given, tensor([[0.0, 0.0, 0.5, 0.0], [0.0, 0.25, 0.0, 1.0]]), e.returns, "rewards")


@rule("rewards", "A token's reward is reduced by kl_coef * (log pi - log pi_ref) of that token, whatever gamma is.")
def _(ppo):
    for gamma in 1.0, 0.5:
        given, e = used_rewards(ppo, kl_coef=0.5, gamma=gamma)
        same(given, tensor([[0.0, -0.1, 0.55, 0.0], [0.0, 0.15, 0.05, 0.7]]), e.returns, "rewards")


@rule("rewards", "The KL is that of the old log-probs, not of those that the sampler recorded. All stay as they are.")
def _(ppo):
    episodes = two_episodes(ppo)
    for e in episodes:
        e.logprobs = [x - 1.0 for x in e.logprobs]
    given, e = TWO | LOGS | {"kl_coef": 0.5}, experience_of(ppo, episodes, kl_coef=0.5)
    same(given, tensor([[0.0, -0.1, 0.55, 0.0], [0.0, 0.15, 0.05, 0.7]]), e.returns, "rewards")
    same(given, ppo.padded(LOGS["log pi"]), e.old_logprobs, "experience.old_logprobs")
    same(given, ppo.padded(LOGS["log pi_ref"]), e.ref_logprobs, "experience.ref_logprobs")
    same(given, ppo.padded(e.logprobs for e in episodes), e.sampler_logprobs, "experience.sampler_logprobs")
    given, e = used_rewards(ppo, kl_coef=0.0)
    holds(e.ref_logprobs.isnan().all(), given | {"reference": None}, NAN, e.ref_logprobs, "experience.ref_logprobs")


@rule("rewards", "With --kl-loss the KL is a term of the loss, and the rewards have none.")
def _(ppo):
    given, e = used_rewards(ppo, kl_coef=0.5, kl_loss="k3")
    same(given, tensor([[0.0, 0.0, 0.5, 0.0], [0.0, 0.25, 0.0, 1.0]]), e.returns, "rewards")


@rule("rewards", "A cut sample, successful or not, loses truncation_penalty once, at its last token, not the row's.")
def _(ppo):
    for success in False, True:
        episodes = two_episodes(ppo)
        episodes[0].success = success
        given = TWO | {"episodes[0].success": success, "kl_coef": 0, "truncation_penalty": 0.25}
        e = experience_of(ppo, episodes, kl_coef=0.0, truncation_penalty=0.25)
        same(given, tensor([0.0, 0.0, 0.25, 0.0]), e.returns[0], "rewards of the first sample")


@rule("rewards", "A sample that the environment ended loses nothing, even if it ended it early.")
def _(ppo):
    episodes = [episode(ppo, [5, 1, 2], [0, 0, 0.5], "truncated"), episode(ppo, [5, 1], [0, 1], "terminated")]
    given = {"tokens": [[5, 1, 2], [5, 1]], "rewards of the environment": [[0, 0, 0.5], [0, 1]],
             "stop": ["truncated", "terminated"], "truncation_penalty": 0.25}  # fmt: skip
    e = experience_of(ppo, episodes, kl_coef=0.0, truncation_penalty=0.25)
    same(given, tensor([[0.0, 0.0, 0.5], [0.0, 1.0, 0.0]]), e.returns, "rewards")


@rule("rewards", "`experience.rewards`, which is logged, contains the penalty but not the KL.")
def _(ppo):
    given, e = used_rewards(ppo, kl_coef=0.5, truncation_penalty=0.25)
    same(given, tensor([[0.0, 0.0, 0.25, 0.0], [0.0, 0.25, 0.0, 1.0]]), e.rewards, "experience.rewards")


@rule("rewards", "The score of a reward model is added at the last token of its sample, and is logged.")
def _(ppo):
    episodes = two_episodes(ppo)
    episodes[0].score, episodes[1].score = 2.0, -1.0
    e = experience_of(ppo, episodes, kl_coef=0.0)
    expected = tensor([[0.0, 0.0, 2.5, 0.0], [0.0, 0.25, 0.0, 0.0]])
    for name, got in ("rewards", e.returns), ("experience.rewards", e.rewards):
        same(TWO | {"score": [2, -1], "kl_coef": 0}, expected, got, name)


def random_episodes(ppo, generator):
    """Four episodes of different lengths. Some have an answer of the environment, tokens that were not sampled."""
    episodes = []
    for _ in range(4):
        prompt, n = choice(generator, 1, 2), choice(generator, 1, 2, 3, 4)
        ids = torch.randint(1, 6, (prompt + n,), generator=generator).tolist()
        rewards = [0.0] * prompt + [choice(generator, 0.0, 0.0, 0.5, -1.0) for _ in range(n)]
        e = episode(ppo, ids, rewards, choice(generator, "length", "terminated", "truncated"), prompt)
        if n > 2 and choice(generator, True, False):
            e.mask[prompt + 1], e.logprobs[prompt + 1], e.rewards[prompt + 1] = False, 0.0, 0.0
        e.score = choice(generator, 0.0, 1.5, -0.5)
        e.success = sum(e.rewards) > 0
        episodes.append(e)
    return episodes


def of_episodes(episodes):
    return {"tokens": [e.ids for e in episodes], "sampled": [e.mask for e in episodes],
            "rewards of the environment": [e.rewards for e in episodes], "stop": [e.stop for e in episodes],
            "score": [e.score for e in episodes]}  # fmt: skip


def rewards_by_hand(episodes, kl_coef, kl_loss, truncation_penalty):
    """(those that are logged, those that are used), lists of lists."""
    logged, used = [], []
    for e in episodes:
        row = list(e.rewards)
        row[-1] += e.score - truncation_penalty * (e.stop == "length")
        coef = 0.0 if kl_loss else kl_coef
        kls = [float(ACTOR.numbers[i] - REFERENCE.numbers[i]) * m for i, m in zip(e.ids, e.mask)]
        logged.append(row)
        used.append([reward - coef * kl for reward, kl in zip(row, kls)])
    return logged, used


@rule("rewards", "All of this holds in random cases.")
def _(ppo):
    for generator, _ in random_masks():
        flags = {"kl_coef": choice(generator, 0.0, 0.5), "truncation_penalty": choice(generator, 0.0, 0.25)}
        flags["kl_loss"] = choice(generator, None, None, "k2") if flags["kl_coef"] else None
        episodes = random_episodes(ppo, generator)
        given = of_episodes(episodes) | flags
        given |= {"log pi of the ids 0 to 5": ACTOR.numbers, "log pi_ref of the ids 0 to 5": REFERENCE.numbers}
        logged, used = map(ppo.padded, rewards_by_hand(episodes, **flags))
        e = experience_of(ppo, episodes, **flags)
        same(given, logged, e.rewards, "experience.rewards")
        same(given, used * e.mask, e.returns, "rewards at the sampled tokens")


# === advantages ===


def advantage_case(ppo, rewards=(0.5, 1.0), **flags):
    """Two samples of two tokens, with CRITIC's values 0.1 and 0.2."""
    episodes = [episode(ppo, [5, 1, 2], [0, 0, reward]) for reward in rewards]
    flags = {"kl_coef": 0.0, "critic_lambda": 1.0} | flags
    e = experience_of(ppo, episodes, CRITIC, **flags)
    given = {"rewards": [[0, 0, reward] for reward in rewards], "values": [[0, 0.1, 0.2]] * len(rewards),
             "sampled": [[0, 1, 1]] * len(rewards)} | flags  # fmt: skip
    return given, e


@rule("advantages", "`experience.values` are the critic's values of all samples.")
def _(ppo):
    given, e = advantage_case(ppo)
    same(given, tensor([[0.0, 0.1, 0.2]] * 2), e.values, "experience.values")


@rule("advantages", "Without a critic the values are 0.")
def _(ppo):
    e = experience_of(ppo, two_episodes(ppo), kl_coef=0.0)
    same(TWO | {"critic": None}, torch.zeros(2, 4), e.values, "experience.values")


@rule("advantages", "Returns are made with --critic-lambda, whatever --gae-lambda is, and are not whitened.")
def _(ppo):
    given, e = advantage_case(ppo, critic_lambda=0.0, gae_lambda=1.0)
    same(given, tensor([[0.0, 0.2, 0.5], [0.0, 0.2, 1.0]]), e.returns, "experience.returns")


@rule("advantages", "Both use --gamma.")
def _(ppo):
    given, e = advantage_case(ppo, gamma=0.5)
    same(given, tensor([[0.0, 0.25, 0.5], [0.0, 0.5, 1.0]]), e.returns, "experience.returns")
    same(given, tensor([0.15, 0.3, 0.4, 0.8]).std().item(), e.advantage_std, "experience.advantage_std")


@rule("advantages", "Advantages are made with --gae-lambda, whatever --critic-lambda is.")
def _(ppo):
    given, e = advantage_case(ppo, critic_lambda=1.0, gae_lambda=0.0)
    raw = tensor([0.1, 0.3, 0.1, 0.8])  # 0.2 - 0.1 and reward - 0.2
    same(given, raw.std().item(), e.advantage_std, "experience.advantage_std")


@rule("advantages", "Advantages are whitened over the sampled tokens of all samples together, even of a single one.")
def _(ppo):
    given, e = advantage_case(ppo, rewards=(0.5, 1.0, -0.6))
    raw = tensor([[0.4, 0.3], [0.9, 0.8], [-0.7, -0.8]])
    same(given, (raw - raw.mean()) / raw.std(), e.advantages[:, 1:], "advantages of the sampled tokens")
    same(given, torch.zeros(3), e.advantages[:, 0], "advantages of the prompt")
    given, e = advantage_case(ppo, rewards=(0.5,))
    same(given, tensor([[0.0, 0.5**0.5, -(0.5**0.5)]]), e.advantages, "experience.advantages")  # of 0.4 and 0.3


@rule("advantages", "`experience.advantage_std` is their standard deviation before whitening, over the sampled tokens.")
def _(ppo):
    for rewards, raw in ((0.5, 1.0), [0.4, 0.3, 0.9, 0.8]), ((0.5,), [0.4, 0.3]):
        given, e = advantage_case(ppo, rewards)
        same(given, tensor(raw).std().item(), e.advantage_std, "experience.advantage_std")


@rule("advantages", "`experience.advantage_std` is a float, and 0 if there is one sampled token or none.")
def _(ppo):
    _, e = advantage_case(ppo)
    holds(type(e.advantage_std) is float, {}, "float", type(e.advantage_std).__name__, "type of advantage_std")
    for ids in [[5, 2]], [[5]], [[5, 2], [5]]:
        episodes = [episode(ppo, row, [0.0] * (len(row) - 1) + [1.0]) for row in ids]
        e = experience_of(ppo, episodes, CRITIC, kl_coef=0.0)
        given = {"tokens": ids, "sampled": [e.mask for e in episodes], "reward of each sample": 1}
        holds(e.advantage_std == 0, given, 0.0, e.advantage_std, "experience.advantage_std")
        same(given, torch.zeros(len(ids), len(ids[0])), e.advantages, "experience.advantages")


@rule("advantages", "Small advantages are whitened as well, down to a standard deviation of 1e-6.")
def _(ppo):
    episodes = [episode(ppo, [5, 1, 2], [0, 0, reward]) for reward in (0.001, 0.004)]
    e = experience_of(ppo, episodes, kl_coef=0.0)
    given = {"rewards": [[0, 0, 0.001], [0, 0, 0.004]], "critic": None}
    expected = tensor([[-0.866, -0.866], [0.866, 0.866]])
    same(given, expected, e.advantages[:, 1:], "advantages of the sampled tokens", 0.01)
    # Their standard deviation is 2e-6. masked_whiten makes 0.02 of it, and without its 1e-8 it would be 1.
    episodes = [episode(ppo, [5, 1, 2], [0, 0, reward]) for reward in (0.0, 3.5e-6)]
    e = experience_of(ppo, episodes, kl_coef=0.0)
    given = {"rewards": [[0, 0, 0.0], [0, 0, 3.5e-6]], "critic": None}
    ok = (e.advantages[0, 1:] < -0.01).all() and (e.advantages[1, 1:] > 0.01).all()
    holds(ok, given, "a row below -0.01 and one above 0.01", e.advantages[:, 1:], "advantages of the sampled tokens")


@rule("advantages", "They are made of `rewards`, with the KL, and not of those that are logged. So are the returns.")
def _(ppo):
    e = experience_of(ppo, two_episodes(ppo), kl_coef=0.5, critic_lambda=1.0)
    given = TWO | LOGS | {"kl_coef": 0.5, "critic": None}
    same(given, tensor([[0.0, 0.45, 0.55, 0.0], [0.0, 0.9, 0.75, 0.7]]), e.returns, "experience.returns")
    same(given, tensor([0.45, 0.55, 0.9, 0.75, 0.7]).std().item(), e.advantage_std, "experience.advantage_std")


@rule("advantages", "All of this holds in random cases, with several minibatches.")
def _(ppo):
    for generator, _ in random_masks():
        flags = {"kl_coef": choice(generator, 0.0, 0.5), "gamma": choice(generator, 0.9, 1.0)}
        flags |= {"gae_lambda": choice(generator, 0.0, 0.5, 1.0), "critic_lambda": choice(generator, 0.2, 1.0)}
        episodes, critic = random_episodes(ppo, generator), choice(generator, None, CRITIC)
        given = of_episodes(episodes) | flags | {"critic": "a table" if critic else None, "train_batch_size": 2}
        _, used = rewards_by_hand(episodes, flags["kl_coef"], None, 0.0)
        mask, rewards = ppo.padded(e.mask for e in episodes), ppo.padded(used)
        values = ppo.padded(e.ids for e in episodes)
        values = CRITIC.numbers[values] * mask if critic else torch.zeros(mask.shape)
        advantages, _ = gae_by_hand(rewards, values, mask, flags["gamma"], flags["gae_lambda"])
        _, returns = gae_by_hand(rewards, values, mask, flags["gamma"], flags["critic_lambda"])
        std = float(advantages[mask].std())
        e = experience_of(ppo, episodes, critic, train_batch_size=2, **flags)
        same(given, values, e.values, "experience.values")
        same(given, returns, e.returns, "experience.returns", 1e-3)
        same(given, std if std > 1e-6 else 0.0, e.advantage_std, "experience.advantage_std", 1e-3)
        same(given, whitened_by_hand(advantages, mask) * (std > 1e-6), e.advantages, "experience.advantages", 1e-3)


@rule("advantages", "Advantages that differ by rounding only become 0, and not noise. Returns stay as they are.")
def _(ppo):
    episodes = [episode(ppo, [5, 1, 2], [0, 0, reward]) for reward in (1.0, 1.0 + 2e-7)]
    e = experience_of(ppo, episodes, kl_coef=0.0, critic_lambda=1.0)
    given = {"rewards": [[0, 0, 1.0], [0, 0, 1.0 + 2e-7]], "critic": None}
    same(given, torch.zeros(2, 3), e.advantages, "advantages")
    holds((e.advantages == 0).all(), given, "0 everywhere", e.advantages[:, 1:], "advantages of the sampled tokens")
    same(given, tensor([[0.0, 1.0, 1.0]] * 2), e.returns, "experience.returns")


# === sampling ===


def decoder(ppo, logits, temperature=1.0, noise_scale=1.0, keys=None, length=2, S=6, **changes):
    """Rows with the newest token at index length - 1, all alive, whose model always gives these logits [B, V]."""
    B = len(logits)
    rows = lambda x, dtype=torch.int64: x if isinstance(x, torch.Tensor) else torch.full((B,), x, dtype=dtype)
    model = types.SimpleNamespace(next_logits=lambda *_: logits.clone())
    values = dict(
        sampler=model, cache=None, dummy_position=S, tokens=torch.zeros(B, S + 1, dtype=torch.int64),
        logprobs=torch.zeros(B, S + 1), length=rows(length), limit=rows(S), alive=rows(T, torch.bool),
        noise_keys=ppo.sample_keys(1, 0, range(B)) if keys is None else keys, temperature=tensor(temperature),
        noise_scale=tensor(noise_scale), draws_noise=True, stop_ids=tensor([99]))  # fmt: skip
    return types.SimpleNamespace(**values | changes)


class Written(Exception):
    """What is written into decoder.tokens or decoder.logprobs."""


class Columns:
    """In place of one of them: `scatter_` raises Written."""

    def gather(self, dim, index):
        return torch.zeros_like(index)

    def scatter_(self, dim, index, x):
        raise Written(x)


@rule("sampling", "`token` is [B, 1] and int64. `logprob` is [B, 1] and float32.")
def _(ppo):
    for name, dtype in ("tokens", torch.int64), ("logprobs", torch.float32):
        d = decoder(ppo, tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]]), **{name: Columns()})
        if name == "logprobs":
            d.tokens = types.SimpleNamespace(gather=Columns().gather, scatter_=lambda *_: None)
        try:
            ppo.sample_token(d, 16)
        except Written as written:
            [x] = written.args
            what = name.removesuffix("s")
            same({"B": 2}, torch.zeros(2, 1, dtype=dtype), torch.zeros_like(x), what)


@rule("sampling", "At noise_scale 0, which is greedy decoding, the token is the most likely one.")
def _(ppo):
    logits = tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    for draws_noise in True, False:
        d = decoder(ppo, logits, noise_scale=0.0, draws_noise=draws_noise)
        ppo.sample_token(d, 16)
        given = {"logits": logits, "noise_scale": 0, "draws_noise": draws_noise}
        same(given, tensor([1, 0]), d.tokens[:, 2], "tokens")


@rule("sampling", "Tokens come as often as softmax(logits / temperature) says, and none are filtered out.")
def _(ppo):
    row, B = tensor([0.0, 1.0, 2.0, -1.0]), 10_000
    for temperature in 1.0, 0.5:
        d = decoder(ppo, row.expand(B, 4).clone(), temperature)
        ppo.sample_token(d, 16)
        shares = torch.bincount(d.tokens[:, 2], minlength=4) / B
        expected = (row / temperature).softmax(0)
        given = {"logits": row, "temperature": temperature, "rows": B}
        holds((shares - expected).abs().max() < 0.02, given, expected, shares, "shares of the tokens")
    row, B = torch.linspace(0.0, 1.0, 60), 10_000
    d = decoder(ppo, row.expand(B, 60).clone())
    ppo.sample_token(d, 16)
    share, expected = float((d.tokens[:, 2] < 30).float().mean()), float(row.softmax(0)[:30].sum())
    given = {"logits": "60 numbers, at equal distances from 0 to 1", "rows": B}
    holds(abs(share - expected) < 0.02, given, expected, share, "share of the 30 least likely tokens")
    row = tensor([0.0, 0.0, 0.0, -5.0])  # The last token, one of 446, is expected 22 times.
    d = decoder(ppo, row.expand(B, 4).clone())
    ppo.sample_token(d, 16)
    seen = int((d.tokens[:, 2] == 3).sum())
    holds(seen > 0, {"logits": row, "rows": B}, "some 22", seen, "how often the rare token came")


@rule("sampling", "The log-prob is that of softmax(logits / temperature), without the noise, even for large logits.")
def _(ppo):
    row = tensor([0.0, 0.3, 0.1])
    for temperature in 0.5, 2.0:
        d = decoder(ppo, row.repeat(32, 1), temperature)
        ppo.sample_token(d, 16)
        token = d.tokens[:, 2]
        expected = (row / temperature).log_softmax(-1)[token]
        given = {"logits of each row": row, "temperature": temperature, "sampled tokens": token}
        same(given, expected, d.logprobs[:, 2], "log-probs")
    # Rows differ in their logits.
    logits = tensor([[0.0, 1.0, 3.0], [2.0, 0.0, 0.0]])
    d = decoder(ppo, logits, noise_scale=0.0)
    ppo.sample_token(d, 16)
    same({"logits": logits, "noise_scale": 0}, tensor([-0.1698, -0.2395]), d.logprobs[:, 2], "log-probs", 1e-3)
    for logits, words in (tensor([[200.0, 200.0]]), "200, 200"), (torch.zeros(1, 1000), "1000 zeros"):
        d = decoder(ppo, logits, noise_scale=0.0)
        ppo.sample_token(d, 16)
        given = {"logits": words, "noise_scale": 0}
        same(given, tensor([-math.log(logits.shape[1])]), d.logprobs[:, 2], "log-prob")


@rule("sampling", "A log-prob is not 0 in greedy decoding either: it is that of the policy.")
def _(ppo):
    logits = tensor([[0.0, 1.0]])
    d = decoder(ppo, logits, noise_scale=0.0)
    ppo.sample_token(d, 16)
    same({"logits": logits, "noise_scale": 0}, logits.log_softmax(-1)[:, 1], d.logprobs[:, 2], "log-prob")


@rule("sampling", "A row's token depends on its noise key, not on its place in the batch or on earlier calls.")
def _(ppo):
    keys, logits = ppo.sample_keys(1, 0, range(16)), torch.zeros(16, 50)
    both = []
    for order in torch.arange(16), torch.arange(16).flip(0):
        d = decoder(ppo, logits, keys=keys[order])
        ppo.sample_token(d, 16)
        both.append(d.tokens[:, 2])
    same({"noise_keys": "16 keys, then the same in reverse"}, both[0], both[1].flip(0), "tokens by key")


@rule("sampling", "A row's token depends on its own length, and not on those of other rows.")
def _(ppo):
    keys, logits, length = ppo.sample_keys(1, 0, range(16)), torch.zeros(16, 50), torch.arange(16) % 4 + 1
    d = decoder(ppo, logits, keys=keys, length=length.clone())
    ppo.sample_token(d, 16)
    together = d.tokens.gather(1, length[:, None])[:, 0]
    alone = []
    for row in range(16):
        d = decoder(ppo, logits[:1], keys=keys[row : row + 1], length=length[row : row + 1].clone())
        ppo.sample_token(d, 16)
        alone.append(int(d.tokens[0, length[row]]))
    given = {"logits": "all 0", "length": length, "noise_keys": "16 keys"}
    same(given, tensor(alone), together, "tokens, expected those of each row alone")


@rule("sampling", "The noise is gumbel_noise of a row's key and of the index that its new token will have.")
def _(ppo):
    for length in 2, 3:
        d = decoder(ppo, torch.zeros(16, 50), length=length)
        noise = ppo.gumbel_noise(d.noise_keys, d.length, 50)
        ppo.sample_token(d, 16)
        same({"logits": "all 0", "length": length}, noise.argmax(1), d.tokens[:, length], "tokens")


@rule("sampling", "A finished row writes to its dummy position. Other lengths grow by 1. Temperature and keys stay.")
def _(ppo):
    d = decoder(ppo, tensor([[0.0, 2.0], [0.0, 2.0]]), 0.5, noise_scale=0.0, alive=tensor([T, False]))
    before = {name: getattr(d, name).clone() for name in ("temperature", "noise_keys")}
    ppo.sample_token(d, 16)
    for name, expected in before.items():
        same({}, expected, getattr(d, name), f"decoder.{name} after the call")
    same({"alive": [T, False], "length": [2, 2]}, tensor([3, 2]), d.length, "length")
    same({"alive": [T, False], "length": [2, 2]}, tensor([1, 0]), d.tokens[:, 2], "tokens at index 2")


@rule("sampling", "The host does not wait: no tensor becomes a Python number or decides an `if`.")
def _(ppo):
    def refused(name):
        def refuse(self, *_):
            raise Broken({}, "only operations on tensors", f"{name} of a tensor", "sample_token")

        return refuse

    d = decoder(ppo, tensor([[0.0, 2.0], [1.0, 0.0]]))
    names = "item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__"
    with mock.patch.multiple(torch.Tensor, **{name: refused(name) for name in names}):
        ppo.sample_token(d, 16)


# === gradient ===


def gradient_case(ppo, d_logprobs, d_entropies, temperature=1.0, logits=((0.0, 1.0, 2.0), (1.0, 1.0, 0.0))):
    """The weight is the unit matrix, so that the hidden states are the logits before the temperature."""
    hidden = tensor(logits)
    return {"hidden": hidden, "weight": torch.eye(3), "targets": tensor([2, 0]), "temperature": temperature,
            "d_logprobs": tensor(d_logprobs), "d_entropies": tensor(d_entropies)}  # fmt: skip


def by_autograd(hidden, weight, targets, temperature, d_logprobs, d_entropies):
    logits = (hidden @ weight.T).double().requires_grad_()
    logprobs = (logits / temperature).log_softmax(-1)
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    (chosen * d_logprobs + entropies * d_entropies).sum().backward()
    return logits.grad.float()


def compare_gradient(ppo, *case):
    given = gradient_case(ppo, *case)
    got = call(ppo.chunk_gradients, given)
    same(given, by_autograd(**given), got, "gradient of the logits")


@rule("gradient", "The gradient of the log-probs is right: autograd, from log_softmax, finds the same.")
def _(ppo):
    compare_gradient(ppo, [1.0, 1.0], [0.0, 0.0])


@rule("gradient", "Each row is multiplied by its own d_logprobs.")
def _(ppo):
    compare_gradient(ppo, [2.0, -3.0], [0.0, 0.0])


@rule("gradient", "So is the gradient of the entropies, and each row is multiplied by its own d_entropies.")
def _(ppo):
    compare_gradient(ppo, [0.0, 0.0], [1.0, 2.0])


@rule("gradient", "p is the softmax of logits / temperature.")
def _(ppo):
    given = gradient_case(ppo, [1.0, 1.0], [0.0, 0.0], 0.5)
    got, expected = call(ppo.chunk_gradients, given), by_autograd(**given)
    scale = float(got.abs().sum() / expected.abs().sum())
    same(given, expected, got / scale, "gradient of the logits, up to a factor")


@rule("gradient", "The gradient is that of the logits before the division, so it is divided by the temperature.")
def _(ppo):
    compare_gradient(ppo, [1.0, 1.0], [0.5, 0.0], 0.5)


@rule("gradient", "A row sums to 0, since adding a number to all logits changes nothing.")
def _(ppo):
    given = gradient_case(ppo, [1.0, -2.0], [0.5, 1.0], 0.7)
    same(given, torch.zeros(2), call(ppo.chunk_gradients, given).sum(-1), "sums of the rows")


def random_gradient_case(seed=0, V=7, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=generator)
    return {"hidden": (scale * normal(3, 4)).to(dtype), "weight": normal(V, 4).to(dtype),
            "targets": torch.randint(V - 1, (3,), generator=generator), "temperature": 0.7, "d_logprobs": normal(3),
            "d_entropies": normal(3)}  # fmt: skip


@rule("gradient", "It holds for a weight [V, d] of any V and d, for targets that are not the last id, and for no rows.")
def _(ppo):
    for seed in range(10):
        given = random_gradient_case(seed, V=5 + seed)
        same(given, by_autograd(**given), call(ppo.chunk_gradients, given), "gradient of the logits", 1e-3)
    given |= {name: given[name][:0] for name in ("hidden", "targets", "d_logprobs", "d_entropies")}
    same(given, torch.zeros(0, 14), call(ppo.chunk_gradients, given), "gradient of the logits")


@rule("gradient", "Logits of 200 are no problem, nor are probabilities that are rounded to 0, even that of a target.")
def _(ppo):
    given = gradient_case(ppo, [1.0, -2.0], [0.5, 1.0], 1.0, ((0.0, 100.0, 200.0), (-200.0, 1.0, 0.0)))
    same(given, by_autograd(**given), call(ppo.chunk_gradients, given), "gradient of the logits")


@rule("gradient", "It is exact with a large vocabulary, in which all probabilities are small.")
def _(ppo):
    given = random_gradient_case(V=20_000)
    expected, got = by_autograd(**given), call(ppo.chunk_gradients, given)
    named = {"weight": "[20000, 4]", "hidden": "[3, 4]", "temperature": 0.7}
    same(named, expected.shape, got.shape, "shape of the result")
    error = float((got - expected).norm(dim=1).max() / expected.norm(dim=1).min())
    entropy = given | {"d_logprobs": torch.zeros(3)}
    expected, got = by_autograd(**entropy), call(ppo.chunk_gradients, entropy)
    error = max(error, float((got - expected).norm() / expected.norm()))
    holds(error < 1e-3, named, "at most 0.001", error, "relative error of the gradient")


@rule("gradient", "In bfloat16 the result is rounded once, at the end, to the dtype of the weight.")
def _(ppo):
    for seed in range(5):
        given = random_gradient_case(seed, V=50, scale=4.0, dtype=torch.bfloat16)
        got = call(ppo.chunk_gradients, given)
        named = {"dtype of hidden and weight": torch.bfloat16, "hidden": "[3, 4]", "weight": "[50, 4]"}
        holds(got.dtype == torch.bfloat16, named, torch.bfloat16, got.dtype, "dtype of the result")
        expected = by_autograd(**given | {name: given[name].float() for name in ("hidden", "weight")})
        error = float((got.float() - expected).norm() / expected.norm())
        holds(error < 3e-3, named, "at most 0.003, as by rounding once", error, "relative error of the gradient")
    given = gradient_case(ppo, [1.0, 1.0], [0.0, 0.0], 1.0, ((0.0, 0.0, 4.5), (4.0, 0.0, 1.0)))
    given |= {name: given[name].bfloat16() for name in ("hidden", "weight")}
    same(given, tensor([-0.01087, -0.01087, 0.02173]), call(ppo.chunk_gradients, given)[0].float(), "first row", 0.01)


@rule("gradient", "The inputs stay as they are.")
def _(ppo):
    unchanged(ppo.chunk_gradients, gradient_case(ppo, [1.0, -2.0], [0.5, 1.0], 0.7))


# === minibatches ===


def numbered(ppo, lengths=(3, 4, 5, 6, 7, 8, 9, 10), prompts=1):
    """Sample i has lengths[i] tokens, of which the first are the prompt. Lengths differ, so they name the samples."""
    lengths = tensor(lengths)
    real = torch.arange(int(lengths.max())) < lengths[:, None]
    mask = real & (torch.arange(real.shape[1]) >= prompts)
    zeros = torch.zeros(real.shape)
    return ppo.Experience(lengths=lengths, tokens=zeros.long(), mask=mask, sampler_logprobs=zeros, rewards=zeros)


def epoch_of(ppo, experience, epoch=0, iteration=0, seed=1, size=4, budget=4096, state=None, **flags):
    """[(n_tokens, the lengths of the samples of each microbatch)] of an epoch."""
    args = arguments(ppo, seed=seed, train_batch_size=size, micro_batch_tokens=budget, **flags)
    parts = []
    for part in ppo.minibatches(experience, epoch, state or ppo.TrainState(iteration), args):
        n_tokens, minibatch = outputs(part, 2, {}, "n_tokens, microbatches")
        lengths = []
        for mb in minibatch:
            kind = type(mb).__name__
            holds(isinstance(mb, ppo.Microbatch), {}, "Microbatch", kind, "type of a microbatch that is yielded")
            lengths.append(experience.lengths[mb.rows].tolist())
        parts.append((n_tokens, lengths))
    return parts


def epoch_on_ranks(ppo, ranks, *case, **flags):
    """`epoch_of` on each rank, one after another. In a second pass `all_reduce` has the sums of the first one."""
    seen = [[] for _ in range(ranks)]

    def epoch(rank, all_reduce):
        with mock.patch.multiple(ppo, RANK=rank, WORLD_SIZE=ranks, all_reduce=all_reduce):
            return epoch_of(ppo, *case, **flags)

    for rank in range(ranks):
        epoch(rank, lambda x: seen[rank].append(x.clone()) or x)
    epochs = []
    for rank in range(ranks):
        sums = map(sum, zip(*seen))
        epochs.append(epoch(rank, lambda x: next(sums)))
    return epochs


def in_words(parts):
    """What `epoch_of` found, as a text: "24 tokens: samples of 3 4 | 5 6" has two microbatches."""
    microbatches = lambda minibatch: " | ".join(" ".join(map(str, lengths)) for lengths in minibatch)
    return "; ".join(f"{n_tokens} tokens: samples of {microbatches(minibatch)}" for n_tokens, minibatch in parts)


EIGHT = {"lengths of the samples": [3, 4, 5, 6, 7, 8, 9, 10], "train_batch_size": 4, "prompt": "1 token"}
flat = lambda parts: [length for _, minibatch in parts for mb in minibatch for length in mb]


@rule("minibatches", "An epoch visits every sample once.")
def _(ppo):
    got = sorted(flat(epoch_of(ppo, numbered(ppo))))
    same(EIGHT, [3, 4, 5, 6, 7, 8, 9, 10], got, "lengths of the samples of an epoch")


@rule("minibatches", "A minibatch has train_batch_size samples. The last one has those that are left.")
def _(ppo):
    cases = (4, 4096, [4, 4]), (4, 12, [4, 4]), (3, 4096, [3, 3, 2]), (5, 4096, [5, 3]), (7, 4096, [7, 1])
    for size, budget, expected in cases:
        prompts = {"rollout_batch_size": 4, "n_samples_per_prompt": 2}
        parts = epoch_of(ppo, numbered(ppo), size=size, budget=budget, **prompts)
        given = EIGHT | {"train_batch_size": size, "micro_batch_tokens": budget} | prompts
        same(given, expected, [sum(map(len, minibatch)) for _, minibatch in parts], "samples of the minibatches")


@rule("minibatches", "The order is another one in another epoch, in another iteration and with another seed.")
def _(ppo):
    first = epoch_of(ppo, numbered(ppo))
    for change in {"epoch": 1}, {"iteration": 1}, {"seed": 2}:
        got = epoch_of(ppo, numbered(ppo), **change)
        given = EIGHT | {"epoch": 0, "iteration": 0, "seed": 1} | change
        holds(got != first, given, "others than in epoch 0 of iteration 0 with seed 1", in_words(got), "minibatches")


@rule("minibatches", "Any two samples meet in a minibatch in some epochs, and do not meet in others.")
def _(ppo):
    experience, together = numbered(ppo), torch.zeros(11, 11)
    for epoch in range(40):
        for _, minibatch in epoch_of(ppo, experience, epoch):
            lengths = tensor([length for mb in minibatch for length in mb])
            together[lengths[:, None], lengths] += 1
    for i in range(3, 11):
        for j in range(3, i):
            given = EIGHT | {"two samples, by length": [j, i], "epochs": 40}
            n = int(together[i, j])
            holds(0 < n < 40, given, "more than 0, fewer than 40", n, "epochs together")


@rule("minibatches", "The order depends on nothing else, and an epoch changes no state, so a resumed run repeats it.")
def _(ppo):
    state, epochs = ppo.TrainState(3), []
    for seed in 1, 2:
        torch.manual_seed(seed)
        untouched = torch.get_rng_state()
        epochs.append(in_words(epoch_of(ppo, numbered(ppo), state=state)))
        given = EIGHT | {"torch.manual_seed": seed, "state.iteration": 3}
        same(given, 3, state.iteration, "state.iteration after the epoch")
        drawn = not torch.equal(untouched, torch.get_rng_state())
        holds(not drawn, given, "as before the epoch", "another one", "state of PyTorch's own generator")
    same(EIGHT | {"torch.manual_seed": [1, 2]}, *epochs, "minibatches")


@rule("minibatches", "The minibatches are those of `minibatch_rows`, which returns a list: it is read more than once.")
def _(ppo):
    experience, args = numbered(ppo), arguments(ppo, seed=1, train_batch_size=4)
    for epoch in 0, 1:
        given = EIGHT | {"epoch": epoch}
        rows = ppo.minibatch_rows(experience, epoch, ppo.TrainState(), args)
        holds(isinstance(rows, list), given, "list", type(rows).__name__, "type of what minibatch_rows returns")
        expected = [sorted(experience.lengths[part].tolist()) for part in rows]
        parts = [sorted(flat([part])) for part in epoch_of(ppo, experience, epoch)]
        same(given, expected, parts, "lengths of the samples of the minibatches")


@rule("minibatches", "n_tokens counts the sampled tokens of the whole minibatch, without the prompts.")
def _(ppo):
    for n_tokens, minibatch in epoch_of(ppo, numbered(ppo), budget=12) + epoch_of(ppo, numbered(ppo), 1, budget=12):
        lengths = [length for mb in minibatch for length in mb]
        given = {"lengths of its samples": lengths, "prompt": "1 token", "micro_batch_tokens": 12}
        same(given, sum(lengths) - len(lengths), int(n_tokens), "n_tokens")


@rule("minibatches", "On several ranks n_tokens counts all samples. Each has its share, in equally many microbatches.")
def _(ppo):
    for ranks, budget, size in (2, 4096, 4), (2, 12, 4), (3, 4096, 4), (2, 4096, 1):
        epochs = epoch_on_ranks(ppo, ranks, numbered(ppo), budget=budget, size=size)
        given = EIGHT | {"ranks": ranks, "micro_batch_tokens": budget, "train_batch_size": size}
        given |= {f"minibatches of rank {rank}": in_words(epoch) for rank, epoch in enumerate(epochs)}
        visited = sorted(length for epoch in epochs for length in flat(epoch))
        same(given, [3, 4, 5, 6, 7, 8, 9, 10], visited, "lengths of the samples of all ranks in an epoch")
        same(given, [8 // size] * ranks, [len(epoch) for epoch in epochs], "minibatches of the ranks")
        for k, minibatches in enumerate(zip(*epochs)):
            counts = [len(minibatch) for _, minibatch in minibatches]
            # A rank that skipped one would hang the others, which wait for it in the forward pass.
            same(given, counts[:1] * ranks, counts, f"microbatches of minibatch {k}, on each rank")
            lengths = [length for _, minibatch in minibatches for mb in minibatch for length in mb]
            expected = [sum(lengths) - len(lengths)] * ranks
            same(given, expected, [int(n) for n, _ in minibatches], f"n_tokens of minibatch {k}, on each rank")


@rule("minibatches", "n_tokens is an int, not a tensor: it belongs to the minibatch and not to a microbatch.")
def _(ppo):
    for n_tokens, _ in epoch_of(ppo, numbered(ppo)):
        holds(type(n_tokens) is int, EIGHT, "int", type(n_tokens).__name__, "type of n_tokens")


@rule("minibatches", "A microbatch has at most micro_batch_tokens tokens. A longer sample is one of its own.")
def _(ppo):
    for budget in 12, 8:
        for _, minibatch in epoch_of(ppo, numbered(ppo), budget=budget):
            for mb in minibatch:
                given = EIGHT | {"micro_batch_tokens": budget}
                holds(sum(mb) <= budget or len(mb) == 1, given, f"at most {budget}", sum(mb), "tokens of a microbatch")


@rule("minibatches", "A minibatch without sampled tokens, and no other, is left out: Adam would move weights.")
def _(ppo):
    experience = numbered(ppo)
    experience.mask[:] = False
    same(EIGHT | {"mask": "all False"}, "", in_words(epoch_of(ppo, experience)), "minibatches")
    experience = numbered(ppo)
    experience.mask[3] = False  # that of length 6
    got = sorted(flat(epoch_of(ppo, experience, size=1)))
    given = EIGHT | {"train_batch_size": 1, "without sampled tokens": "the sample of length 6"}
    same(given, [3, 4, 5, 7, 8, 9, 10], got, "lengths of the samples of an epoch")
    experience = numbered(ppo)
    experience.mask[:, 2:] = False
    for size in 4, 1:
        given = EIGHT | {"sampled tokens": "the second token of each sample, which is not its last one"}
        got = sorted(flat(epoch_of(ppo, experience, size=size)))
        given |= {"train_batch_size": size}
        same(given, [3, 4, 5, 6, 7, 8, 9, 10], got, "lengths of the samples of an epoch")


@rule("minibatches", "A sample without sampled tokens keeps its place in a minibatch that has others with them.")
def _(ppo):
    for empty in [3], [0, 5]:
        experience = numbered(ppo)
        experience.mask[empty] = False
        given = EIGHT | {"without sampled tokens": [f"the sample of length {i + 3}" for i in empty]}
        parts = epoch_of(ppo, experience)
        given["minibatches"] = in_words(parts)
        same(given, [4, 4], [sum(map(len, minibatch)) for _, minibatch in parts], "samples of the minibatches")
        same(given, [3, 4, 5, 6, 7, 8, 9, 10], sorted(flat(parts)), "lengths of the samples of an epoch")
        full, ours = (in_words([(0, minibatch) for _, minibatch in x]) for x in (epoch_of(ppo, numbered(ppo)), parts))
        same(given, full, ours, "minibatches, expected those of samples that all have sampled tokens")
        same(given, 44 - sum(i + 2 for i in empty), sum(int(n) for n, _ in parts), "sum of n_tokens")


@rule("minibatches", "The gradients of the microbatches add up to that of the minibatch.")
def _(ppo):
    experience = numbered(ppo)
    returns = torch.arange(80.0).reshape(8, 10)
    zeros = torch.zeros(8, 10)
    experience = dataclasses.replace(experience, values=zeros, returns=returns, old_logprobs=zeros, advantages=zeros)
    found = []
    for budget in 4096, 12:
        values = torch.zeros(8, 10, requires_grad=True)
        args = arguments(ppo, train_batch_size=8, micro_batch_tokens=budget)
        for n_tokens, minibatch in ppo.minibatches(experience, 0, ppo.TrainState(), args):
            for mb in minibatch:
                new = values[mb.lengths - 3][:, : mb.mask.shape[1]]
                ppo.value_loss(new, mb.values, mb.returns, mb.mask, None, n_tokens)[0].backward()
        found.append(values.grad.norm().item())
    same(EIGHT | {"micro_batch_tokens": [4096, 12]}, found[0], found[1], "norm of the gradient of the value loss")


# === packing ===

DOCSTRING = {"tokens": [["a", "b", "C", "D"], ["a", "E", ".", "."]], "lengths": [4, 2],
             "mask": [[0, 0, 1, 1], [0, 1, 0, 0]]}  # fmt: skip
LETTERS = tensor([[1, 2, 13, 14], [1, 15, 0, 0]])


def example(ppo):
    mask = tensor(DOCSTRING["mask"]) > 0
    return ppo.Packing.from_lengths(tensor([4, 2]), mask, "cpu")


def widened(x, sizes):
    """x [...] as [..., *sizes]: with the same number in all further dimensions."""
    return x.view(*x.shape, *(1 for _ in sizes)).expand(*x.shape, *sizes)


def packing_field(ppo, name, expected):
    same(DOCSTRING, expected, getattr(example(ppo), name), name)


@rule("packing", "`flat_index` has the indices of the real tokens in the flattened [B, T], without padding.")
def _(ppo):
    packing_field(ppo, "flat_index", tensor([0, 1, 2, 3, 4, 5]))
    mask = tensor([[False, T, False], [False, T, T]])
    got = ppo.Packing.from_lengths(tensor([2, 3]), mask, "cpu").flat_index
    same({"lengths": [2, 3], "T": 3}, tensor([0, 1, 3, 4, 5]), got, "flat_index")


@rule("packing", "`position` is the index of a token in its own sample: it starts again at 0 with every sample.")
def _(ppo):
    packing_field(ppo, "position", tensor([0, 1, 2, 3, 0, 1]))


@rule("packing", "`sampled` has the indices of the sampled tokens among the n packed ones.")
def _(ppo):
    packing_field(ppo, "sampled", tensor([2, 3, 5]))
    mask = tensor([[False, T, False], [False, T, T]])
    got = ppo.Packing.from_lengths(tensor([2, 3]), mask, "cpu").sampled
    same({"lengths": [2, 3], "mask": mask}, tensor([1, 3, 4]), got, "sampled")


@rule("packing", "`starts` says where each sample starts, and where the last one ends, as int32.")
def _(ppo):
    packing_field(ppo, "starts", tensor([0, 4, 6], dtype=torch.int32))


@rule("packing", "`shape` is [B, T], that of the mask, even if all samples are shorter.")
def _(ppo):
    same(DOCSTRING, [2, 4], list(example(ppo).shape), "shape")
    packing = ppo.Packing.from_lengths(tensor([2, 3]), tensor([[0, 1, 0, 0], [0, 1, 1, 0]]) > 0, "cpu")
    given = {"lengths": [2, 3], "mask": [[0, 1, 0, 0], [0, 1, 1, 0]]}
    same(given, [2, 4], list(packing.shape), "shape")
    same(given, tensor([0, 1, 4, 5, 6]), packing.flat_index, "flat_index")


@rule("packing", "`pack` lays the samples one after another, with further dimensions if there are any.")
def _(ppo):
    same(DOCSTRING, tensor([1, 2, 13, 14, 1, 15]), example(ppo).pack(LETTERS), "pack(tokens)")
    for sizes in (3,), (3, 2), (2, 1):
        given = DOCSTRING | {"x": f"[B, T, {', '.join(map(str, sizes))}]"}
        expected = widened(tensor([1, 2, 13, 14, 1, 15]), sizes)
        same(given, expected, example(ppo).pack(widened(LETTERS, sizes)), "pack(x)")


@rule("packing", "`unpack` puts numbers back at their places in [B, T, ...], and 0 elsewhere.")
def _(ppo):
    packing, x = example(ppo), tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    expected = tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 0.0, 0.0]])
    same(DOCSTRING | {"x": x}, expected, packing.unpack(x, packing.flat_index), "unpack(x, flat_index)")
    for sizes in (2,), (3, 2), (2, 1):
        got = packing.unpack(widened(x, sizes), packing.flat_index)
        given = DOCSTRING | {"x": f"[6, {', '.join(map(str, sizes))}]"}
        same(given, widened(expected, sizes), got, "unpack(x, flat_index)")


@rule("packing", "`unpack_sampled` does so with one number for each sampled token, in its dtype.")
def _(ppo):
    for dtype in torch.bfloat16, torch.float32:
        x = tensor([7, 8, 9], dtype=dtype)
        expected = tensor([[0, 0, 7, 8], [0, 9, 0, 0]], dtype=dtype)
        same(DOCSTRING | {"x": x}, expected, example(ppo).unpack_sampled(x), "unpack_sampled(x)")
    mask = tensor([[False, T, False], [False, T, T]])
    packing = ppo.Packing.from_lengths(tensor([2, 3]), mask, "cpu")
    expected = tensor([[0.0, 7.0, 0.0], [0.0, 8.0, 9.0]])
    same({"lengths": [2, 3], "mask": mask, "x": x}, expected, packing.unpack_sampled(x), "unpack_sampled(x)")


@rule("packing", "`unpack` puts the i-th number at the i-th index, whatever the order of the indices, in x's dtype.")
def _(ppo):
    for x in tensor([7.0, 8.0, 9.0]), tensor([7, 8, 9]), tensor([7.0, 8.0, 9.0], dtype=torch.bfloat16):
        expected = tensor([[0, 9, 0, 0], [0, 7, 0, 8]]).to(x.dtype)
        got = example(ppo).unpack(x, tensor([5, 7, 1]))
        same(DOCSTRING | {"x": x, "dtype of x": x.dtype, "flat_index": [5, 7, 1]}, expected, got, "unpack(x, ...)")


@rule("packing", "What `unpack_sampled` returns is no view of another tensor: a caller may change it in place.")
def _(ppo):
    got = example(ppo).unpack_sampled(tensor([7.0, 8.0, 9.0]))
    holds(not got._is_view(), DOCSTRING, "a tensor of its own, as by clone()", "a view", "unpack_sampled(x)")


@rule("packing", "All indices are on the device, and the results of `unpack` and `unpack_sampled` on that of x.")
def _(ppo):
    with mock.patch.object(ppo, "upload", lambda x, device: x.to(device)):
        packing = ppo.Packing.from_lengths(tensor([4, 2]), tensor(DOCSTRING["mask"]) > 0, "meta")
    for name in "flat_index", "position", "sampled", "starts":
        got = getattr(packing, name).device.type
        holds(got == "meta", {"device": "meta"}, "meta", got, f"device of {name}")
    packing, x = example(ppo), torch.ones(3)
    given = {"device of x": "cpu", "device of torch.zeros(...) without a device": "meta"}
    with torch.device("meta"):
        for name, arguments in ("unpack", (x, tensor([5, 7, 1], device="cpu"))), ("unpack_sampled", (x,)):
            got = getattr(packing, name)(*arguments).device.type
            holds(got == "cpu", given, "cpu", got, f"device of {name}(x)")


@rule("packing", "Gradients go back through `pack`, `unpack` and `unpack_sampled`.")
def _(ppo):
    packing, x = example(ppo), torch.ones(2, 4, requires_grad=True)
    (packing.unpack(packing.pack(x), packing.flat_index) * 2).sum().backward()
    same(DOCSTRING, tensor([[2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 0.0, 0.0]]), x.grad, "gradient of x")
    x = torch.ones(3, requires_grad=True)
    (packing.unpack_sampled(x) * tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])).sum().backward()
    same(DOCSTRING, tensor([3.0, 4.0, 6.0]), x.grad, "gradient of x, of unpack_sampled")


@rule("packing", "All of this holds in random cases, with samples of several turns.")
def _(ppo):
    for generator, mask in random_masks():
        B = choice(generator, 1, 3)
        lengths = torch.randint(1, 7, (B,), generator=generator)
        real = torch.arange(6) < lengths[:, None]
        mask = mask[:B] & real
        places = [(row, t) for row in range(B) for t in range(6) if real[row, t]]
        chosen = [k for k, place in enumerate(places) if mask[place]]
        given = {"lengths": lengths, "mask": mask}
        packing = ppo.Packing.from_lengths(lengths, mask, "cpu")
        same(given, tensor([6 * row + t for row, t in places]), packing.flat_index, "flat_index")
        same(given, tensor([t for _, t in places]), packing.position, "position")
        same(given, tensor(chosen, dtype=torch.int64), packing.sampled, "sampled")
        starts = [int(lengths[:row].sum()) for row in range(B + 1)]
        same(given, tensor(starts, dtype=torch.int32), packing.starts, "starts")
        x = torch.randn(B, 6, 2, generator=generator)
        packed = torch.stack([x[place] for place in places])
        same(given | {"x": f"random, [{B}, 6, 2]"}, packed, packing.pack(x), "pack(x)")
        same(given | {"x": "[n, 2]"}, x * real[..., None], packing.unpack(packed, packing.flat_index), "unpack(x, ...)")
        numbers = torch.arange(1.0, len(chosen) + 1)
        expected = torch.zeros(B, 6)
        expected[mask] = numbers
        same(given | {"x": numbers}, expected, packing.unpack_sampled(numbers), "unpack_sampled(x)")


# === shift ===


def small_model(ppo, head="lm"):
    config = ppo.LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                             num_key_value_heads=2, vocab_size=11, max_position_embeddings=16)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    model = ppo.Transformer(ppo.check_config(config), head)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator) * 0.5
    return model


def shift_case(ppo):
    """The third sample has two turns, with an answer of the environment between them."""
    samples = [([7, 8, 9], 1), ([3, 4, 5, 6], 2), ([2, 8, 0, 10, 7], 1)]  # ids, and the length of the prompt
    episodes = [episode(ppo, ids, [0] * len(ids), prompt=n) for ids, n in samples]
    episodes[2].mask[2:4] = [False, False]
    e = ppo.Experience.from_episodes(episodes)
    given = {"tokens": [[7, 8, 9], [3, 4, 5, 6], [2, 8, 0, 10, 7]],
             "sampled": [[0, 1, 1], [0, 0, 1, 1], [0, 1, 0, 0, 1]]}  # fmt: skip
    return given, e, e.microbatch(torch.arange(3), "cpu")


RANDOM_MODEL = {"model": "random, so this case cannot be computed by hand"}


@rule("shift", "The result is [m, hidden], in the model's dtype: a state for each of the m sampled tokens, if any.")
def _(ppo):
    given, e, mb = shift_case(ppo)
    for dtype in torch.float32, torch.bfloat16:
        got = small_model(ppo).to(dtype).states_before_sampled(mb.tokens, mb.packing)
        given |= {"dtype of the model": dtype}
        same(given, [6, 16], list(got.shape), "shape of result")
        same(given, dtype, got.dtype, "dtype of result")
    e.mask[:] = False
    mb = e.microbatch(torch.arange(3), "cpu")
    got = small_model(ppo).states_before_sampled(mb.tokens, mb.packing)
    same(given | {"sampled": "none"}, [0, 16], list(got.shape), "shape of result")


@rule("shift", "It is the state after the token before the sampled one, at its position in the sample.")
def _(ppo):
    """Here the state after a token is its id and its position."""
    given, _, mb = shift_case(ppo)
    model = small_model(ppo)
    model.hidden_states = lambda x, positions, **_: torch.stack([x, positions.expand_as(x)], -1).float()
    expected = tensor([[7.0, 0.0], [8.0, 1.0], [4.0, 1.0], [5.0, 2.0], [2.0, 0.0], [10.0, 3.0]])
    got = model.states_before_sampled(mb.tokens, mb.packing)
    same(given | {"state after a token": "[its id, its position]"}, expected, got, "states")


@rule("shift", "The log-prob of a sampled token comes from the output one token earlier.")
@torch.no_grad()
def _(ppo):
    given, e, mb = shift_case(ppo)
    model = small_model(ppo)
    got, _ = model.sampled_logprobs(mb, 1.0)
    given |= RANDOM_MODEL
    logprobs = model(e.tokens).log_softmax(-1)[:, :-1]
    expected = torch.zeros(3, 5)
    expected[:, 1:] = logprobs.gather(2, e.tokens[:, 1:, None])[..., 0] * e.mask[:, 1:]
    same(given, expected, got, "log-probs", 1e-3)


@rule("shift", "The value of a sampled token is that of the state before it, which has not seen it.")
@torch.no_grad()
def _(ppo):
    given, e, mb = shift_case(ppo)
    given |= RANDOM_MODEL
    critic = small_model(ppo, "scalar")
    expected = torch.zeros(3, 5)
    expected[:, 1:] = critic(e.tokens)[:, :-1] * e.mask[:, 1:]
    same(given, expected, critic.sampled_values(mb), "values", 1e-3)


@rule("shift", "The tokens of a sample see nothing of the sample before it.")
@torch.no_grad()
def _(ppo):
    given, e, mb = shift_case(ppo)
    model = small_model(ppo)
    got, _ = model.sampled_logprobs(mb, 1.0)
    alone, _ = model.sampled_logprobs(e.microbatch(tensor([1]), "cpu"), 1.0)
    given |= RANDOM_MODEL
    same(given, alone[0], got[1, :4], "log-probs of the second sample, expected those of it alone", 1e-3)


@rule("shift", "Gradients reach the weights of actor and critic, and are those of rows with padding.")
def _(ppo):
    given, e, mb = shift_case(ppo)
    given |= RANDOM_MODEL
    numbers = torch.arange(15.0).reshape(3, 5) * e.mask
    actor, critic = small_model(ppo), small_model(ppo, "scalar")
    ours = (actor.sampled_logprobs(mb, 1.0)[0] * numbers).sum(), (critic.sampled_values(mb) * numbers).sum()
    logprobs = actor(e.tokens).log_softmax(-1)[:, :-1].gather(2, e.tokens[:, 1:, None])[..., 0]
    padded = (logprobs * numbers[:, 1:]).sum(), (critic(e.tokens)[:, :-1] * numbers[:, 1:]).sum()
    for name, model, loss, expected in zip(("actor", "critic"), (actor, critic), ours, padded):
        weights = dict(model.named_parameters())
        gradients = torch.autograd.grad(expected, list(weights.values()))
        loss.backward()
        for (weight, p), gradient in zip(weights.items(), gradients):
            which = f"gradient of {weight} of the {name}"
            holds(p.grad is not None, given, "a gradient", "none", which)
            error = float(((p.grad - gradient).abs() / (gradient.abs() + 0.1)).max())
            holds(error <= 1e-3, given, "at most 0.001", error, f"largest error / (0.1 + size) in the {which}")


# === A small run, for the bugs ===


@contextlib.contextmanager
def small_run(ppo, **flags):
    """Train a few samples in a second, in an environment that rewards long answers.

    Within, the run's folder exists. Yields it, the rows of metrics.jsonl, the summary, what was printed, the actor, and
    for each iteration the experience, and the weights of actor and reference after the rollout.
    """
    flags = dict(
        num_iterations=2, rollout_batch_size=8, train_batch_size=4, max_new_tokens=5, sft_steps=0, eval_episodes=2,
        save_every=0, device="cpu", run_name="run", env_id="environments:Plain-v0") | flags  # fmt: skip
    printed = io.StringIO()
    seen = types.SimpleNamespace(experiences=[], weights=[])
    make_experience = ppo.make_experience

    def remembered(episodes, actor, critic, reference, *rest):
        models, seen.actor = {"actor": actor, "reference": reference}, actor
        seen.weights.append({name: flat_weights(model) for name, model in models.items() if model})
        seen.experiences.append(make_experience(episodes, actor, critic, reference, *rest))
        return seen.experiences[-1]

    patches = {"make_experience": remembered, "SummaryWriter": mock.Mock(), "SFT_BATCH_SIZE": 8}
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(ppo, **patches):
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            summary = ppo.train(ppo.Args(log_dir=folder, **flags))
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        yield types.SimpleNamespace(rows=rows, summary=summary, printed=printed.getvalue(),
                                    folder=Path(folder, "run"), **vars(seen))  # fmt: skip


def flat_weights(model):
    """A copy of all weights, in float32 and in one piece. In bfloat16 they are those of FSDP."""
    weights = [p.detach() for p in model.parameters()]
    return torch.cat([(x.full_tensor() if hasattr(x, "full_tensor") else x).float().flatten() for x in weights])
