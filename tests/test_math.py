"""The formulas: masked statistics, KL, GAE, losses, chunked log-probabilities; arithmetic and ranges of the flags."""

import itertools
import math
import random
import re
import time

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.shared

NAN = math.nan


def close(a, b, tolerance=1e-6):
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def random_mask(rows=6, width=11, p=0.6):
    mask = torch.rand(rows, width) < p
    mask[0], mask[1] = False, True  # an empty row and a full one
    return mask


def nan_outside(x, mask):
    return torch.where(mask, x, NAN)


# --- Masked statistics


def test_masked_mean_is_over_the_mask_alone(ppo):
    x, mask = torch.randn(6, 11), random_mask()
    close(ppo.masked_mean(x, mask), x[mask].mean())
    close(ppo.masked_mean(nan_outside(x, mask), mask), x[mask].mean())


def test_masked_mean_of_nothing_is_zero(ppo):
    assert ppo.masked_mean(torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.bool)) == 0


def test_masked_whiten_has_mean_0_and_unbiased_std_1_and_0_outside(ppo):
    mask = random_mask(3, 4)  # few tokens, so that the unbiased and the biased deviation differ
    x = torch.randn(3, 4) * 7 + 3
    white = ppo.masked_whiten(nan_outside(x, mask), mask)
    close(white[mask].mean(), 0.0)
    close(white[mask].std(unbiased=True), 1.0, 1e-5)
    close(white[mask], (x[mask] - x[mask].mean()) / x[mask].std(), 1e-5)
    assert (white[~mask] == 0).all()


@pytest.mark.parametrize("tokens", [0, 1])
def test_masked_whiten_of_fewer_than_two_tokens_is_zero(ppo, tokens):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mask[1, :tokens] = True
    assert (ppo.masked_whiten(nan_outside(torch.full((2, 3), 5.0), mask), mask) == 0).all()


def test_masked_whiten_of_equal_values_is_finite(ppo):
    assert (ppo.masked_whiten(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)) == 0).all()


# --- KL estimators


def test_kl_estimators_follow_their_formulas(ppo):
    logprobs, ref = torch.randn(3, 5) - 2, torch.randn(3, 5) - 2
    r = (ref - logprobs).exp()  # pi_ref / pi
    close(ppo.kl_estimate(logprobs, ref, "k1"), -r.log())
    close(ppo.kl_estimate(logprobs, ref, "k2"), r.log() ** 2 / 2)
    close(ppo.kl_estimate(logprobs, ref, "k3"), r - 1 - r.log(), 1e-5)
    assert (ppo.kl_estimate(logprobs, ref, "k3") >= 0).all()


def test_kl_estimators_in_expectation_over_the_policy(ppo):
    """k1 and k3 are unbiased; k2 agrees to second order, that is for close distributions."""
    policy = torch.randn(8, dtype=torch.float64).log_softmax(0)
    for scale, kinds in ((1.0, ("k1", "k3")), (1e-3, ("k1", "k2", "k3"))):
        ref = (policy + scale * torch.randn(8, dtype=torch.float64)).log_softmax(0)
        exact = F.kl_div(ref, policy, log_target=True, reduction="sum")
        for kind in kinds:
            expected = (policy.exp() * ppo.kl_estimate(policy, ref, kind)).sum()
            assert expected / exact == pytest.approx(1, rel=1e-2 if kind == "k2" else 1e-6)


def test_kl_in_the_loss_pulls_to_the_reference(ppo):
    """Expected gradients by enumeration: k2's is that of the exact KL, k3's has its direction, k1's is zero."""
    ref = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64).log()
    gradients = {}
    for kind in ("k1", "k2", "k3"):
        logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        logprobs = logits.log_softmax(0)
        (logprobs.detach().exp() * ppo.kl_estimate(logprobs, ref, kind)).sum().backward()
        gradients[kind] = logits.grad
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    F.kl_div(ref, logits.log_softmax(0), log_target=True, reduction="sum").backward()
    close(gradients["k1"], torch.zeros(3))
    close(gradients["k2"], logits.grad)
    assert (gradients["k3"].sign() == logits.grad.sign()).all()


# --- Generalized advantage estimation


def naive_gae(rewards, values, mask, gamma, lam, bootstrap):
    """Row by row, advantage k of the chain = sum over l of (gamma * lam)^l * delta_{k + l}, written out."""
    advantages = torch.zeros(mask.shape, dtype=torch.float64)
    for b in range(len(mask)):
        chain = mask[b].nonzero()[:, 0].tolist()
        v = [float(values[b, t]) for t in chain] + [float(bootstrap[b])]
        deltas = [float(rewards[b, t]) + gamma * v[k + 1] - v[k] for k, t in enumerate(chain)]
        for k, t in enumerate(chain):
            advantages[b, t] = sum((gamma * lam) ** (i - k) * deltas[i] for i in range(k, len(chain)))
    return advantages


@pytest.mark.parametrize(
    "gamma, lam, expected",
    [(0.9, 0.5, [0.075775, 0.0795, 0.11, 0.2]), (1.0, 0.95, [0.456725, 0.3755, 0.29, 0.2])],
)
def test_gae_bridges_a_gap_as_computed_by_hand(ppo, gamma, lam, expected):
    mask = torch.tensor([[1, 1, 0, 0, 0, 1, 1]])
    values = torch.tensor([[0.5, 0.6, 9, 9, 9, 0.7, 0.8]])
    rewards = torch.tensor([[0.0, 0, 0, 0, 0, 0, 1]])
    for outside in (9.0, NAN):
        advantages, returns = ppo.compute_gae(rewards, torch.where(mask.bool(), values, outside), mask, gamma, lam)
        close(advantages[mask.bool()], expected)
        close(returns[mask.bool()], torch.tensor(expected) + values[mask.bool()])
        assert (advantages[mask == 0] == 0).all() and (returns[mask == 0] == 0).all()


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (0.99, 1.0), (0.7, 0.0), (0.0, 0.9)])
@pytest.mark.parametrize("bootstrapped", [False, True])
def test_gae_equals_the_sum_of_discounted_errors_on_gappy_masks(ppo, gamma, lam, bootstrapped):
    mask, rewards, values = random_mask(), torch.randn(6, 11), torch.randn(6, 11)
    bootstrap = torch.randn(6) if bootstrapped else None
    expected = naive_gae(rewards, values, mask, gamma, lam, torch.zeros(6) if bootstrap is None else bootstrap)
    advantages, returns = ppo.compute_gae(
        nan_outside(rewards, mask), nan_outside(values, mask), mask, gamma, lam, bootstrap
    )
    close(advantages, expected, 1e-5)
    close(returns, torch.where(mask, expected + values, 0.0), 1e-5)


def test_bootstrap_is_the_value_after_the_last_token(ppo):
    ones = torch.ones(2, 2, dtype=torch.bool)
    advantages, returns = ppo.compute_gae(
        torch.zeros(2, 2), torch.zeros(2, 2), ones, 0.5, 1.0, torch.tensor([8.0, 0.0])
    )
    close(returns, [[2.0, 4.0], [0.0, 0.0]])
    close(advantages, returns)


def test_gae_leaves_its_inputs_alone(ppo):
    inputs = [torch.randn(2, 5), torch.randn(2, 5), torch.rand(2, 5) < 0.5, torch.randn(2)]
    copies = [x.clone() for x in inputs]
    ppo.compute_gae(*inputs[:3], 0.9, 0.9, inputs[3])
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


# --- Policy loss


def policy_case(rows=6, width=11, spread=0.5):
    mask, old = random_mask(rows, width), torch.randn(rows, width) - 2
    return old + spread * torch.randn(rows, width), old, torch.randn(rows, width), mask


def policy_reference(logprobs, old, advantages, mask, low, high, dual):
    """One token after the other, from the definitions."""
    tokens = mask.nonzero().tolist()
    loss = clipped_tokens = outside = kl = total_ratio = 0.0
    for b, t in tokens:
        logratio, advantage = float(logprobs[b, t] - old[b, t]), float(advantages[b, t])
        ratio = math.exp(logratio)
        objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        clipped_tokens += objective < ratio * advantage - 1e-9
        if dual is not None and advantage < 0:
            objective = max(objective, dual * advantage)
        loss -= objective
        outside += not 1 - low <= ratio <= 1 + high
        kl += ratio - 1 - logratio
        total_ratio += ratio
    names = ("loss", "clipfrac", "out_of_clip", "approx_kl", "ratio_mean")
    sums = (loss, clipped_tokens, outside, kl, total_ratio)
    return {name: value / len(tokens) for name, value in zip(names, sums, strict=True)}


@pytest.mark.parametrize("low, high, dual", [(0.2, 0.2, None), (0.2, 0.28, None), (0.4, 0.1, None), (0.2, 0.2, 1.5)])
def test_policy_loss_equals_a_loop_over_tokens(ppo, low, high, dual):
    logprobs, old, advantages, mask = policy_case(spread=0.8)
    loss, stats = ppo.policy_loss(logprobs, old, advantages, mask, low, high, dual)
    expected = policy_reference(logprobs, old, advantages, mask, low, high, dual)
    close(loss, expected.pop("loss"), 1e-5)
    for name, value in expected.items():
        close(stats[name], value, 1e-5)
    ratio = (logprobs - old)[mask].exp()
    close(stats["ratio_max"], ratio.max(), 1e-5)
    close(stats["ratio_min"], ratio.min(), 1e-5)
    assert 0 < stats["clipfrac"] < stats["out_of_clip"] < 1  # the case has tokens of every kind


@pytest.mark.parametrize(
    "advantage, ratio, slope",  # slope: d loss / d logprob, 0 where the clip holds the policy
    [
        (1.0, 1.1, -1.1), (1.0, 1.3, 0.0), (1.0, 0.5, -0.5),
        (-1.0, 0.9, 0.9), (-1.0, 0.7, 0.0), (-1.0, 1.9, 1.9), (-1.0, 2.1, 0.0),
    ],
)  # fmt: skip
def test_the_clip_stops_gradients_where_the_paper_says(ppo, advantage, ratio, slope):
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    one = torch.ones(1, 1)
    loss, _ = ppo.policy_loss(logprobs, 0 * one, advantage * one, one.bool(), 0.2, 0.25, 2.0)
    loss.backward()
    close(logprobs.grad, [[slope]], 1e-5)


def test_the_first_gradient_is_the_policy_gradient(ppo):
    """At ratio 1 nothing is clipped, and the gradient is -A / tokens."""
    _, old, advantages, mask = policy_case()
    logprobs = old.clone().requires_grad_()
    loss, stats = ppo.policy_loss(logprobs, old, advantages, mask, 0.2, 0.2)
    loss.backward()
    close(logprobs.grad, torch.where(mask, -advantages, 0.0) / mask.sum())
    assert (stats["clipfrac"], stats["out_of_clip"], stats["approx_kl"]) == (0, 0, 0)
    assert (stats["ratio_max"], stats["ratio_min"]) == (1, 1)


def test_losses_and_stats_add_up_over_microbatches(ppo):
    logprobs, old, advantages, mask = policy_case()
    returns = torch.randn_like(old)
    whole, whole_stats = ppo.policy_loss(logprobs, old, advantages, mask, 0.2, 0.2)
    whole_value = ppo.value_loss(logprobs, old, returns, mask, 0.2)
    parts = [torch.arange(6) < 2, torch.arange(6) >= 2]
    policy = [
        ppo.policy_loss(logprobs[p], old[p], advantages[p], mask[p], 0.2, 0.2, denom=mask.sum()) for p in parts
    ]
    close(sum(loss for loss, _ in policy), whole)
    for name, value in whole_stats.items():
        reduce = {"ratio_max": max, "ratio_min": min}.get(name, sum)
        close(reduce([float(stats[name]) for _, stats in policy]), value)
    value = [ppo.value_loss(logprobs[p], old[p], returns[p], mask[p], 0.2, denom=int(mask.sum())) for p in parts]
    close(sum(value), whole_value)


def test_garbage_outside_the_mask_reaches_neither_loss_nor_gradient(ppo):
    logprobs, old, advantages, mask = policy_case()
    results = []
    for outside in (0.0, NAN, 1e30):
        a, b, c = (torch.where(mask, x, outside).requires_grad_(x is logprobs) for x in (logprobs, old, advantages))
        policy, stats = ppo.policy_loss(a, b, c, mask, 0.2, 0.2, 3.0)
        value = ppo.value_loss(a, b, c, mask, 0.2)
        (policy + value).backward()
        assert all(torch.isfinite(x).all() for x in stats.values())
        results.append((policy.detach(), value.detach(), a.grad))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))
    assert (results[0][2][~mask] == 0).all()


def test_an_empty_mask_gives_loss_zero(ppo):
    empty, x = torch.zeros(2, 3, dtype=torch.bool), torch.full((2, 3), NAN)
    assert ppo.policy_loss(x, x, x, empty, 0.2, 0.2)[0] == 0
    assert ppo.value_loss(x, x, x, empty, 0.2) == 0


def test_log_ratios_are_clamped_before_exp(ppo):
    logprobs = torch.tensor([[500.0, -500.0]], requires_grad=True)
    one = torch.ones(1, 2)
    loss, stats = ppo.policy_loss(logprobs, 0 * one, -one, one.bool(), 0.2, 0.2)
    loss.backward()
    close(stats["ratio_max"], math.exp(20), 1e-4)
    close(stats["ratio_min"], math.exp(-20), 1e-9)
    assert torch.isfinite(loss) and torch.isfinite(logprobs.grad).all()


# --- Value loss


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_value_loss_equals_a_loop_over_tokens(ppo, clip):
    values, old, returns, mask = policy_case(spread=1.0)
    expected = 0.0
    for b, t in mask.nonzero().tolist():
        v, v_old, target = float(values[b, t]), float(old[b, t]), float(returns[b, t])
        error = (v - target) ** 2
        if clip is not None:
            error = max(error, (min(max(v, v_old - clip), v_old + clip) - target) ** 2)
        expected += 0.5 * error / int(mask.sum())
    close(ppo.value_loss(values, old, returns, mask, clip), expected, 1e-5)


def test_value_clip_stops_gradients_of_values_that_went_far(ppo):
    """Old value 0, clip 0.2, return 1: a value of 0.5 has moved enough, one of -0.5 must come back."""
    values = torch.tensor([[0.5, -0.5, 0.1]], requires_grad=True)
    ppo.value_loss(values, torch.zeros(1, 3), torch.ones(1, 3), torch.ones(1, 3), 0.2, denom=1).backward()
    close(values.grad, [[0.0, -1.5, -0.9]])


# --- Log-probabilities in chunks


class Largest(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


def plain_logprobs(hidden, weight, targets, temperature):
    """The formula, with all logits in memory."""
    logprobs = F.log_softmax(hidden @ weight.T / temperature, dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize(
    "use, n, vocab, temperature",
    [("both", 7, 50, 1.0), ("both", 7, 50, 0.7), ("logprobs", 7, 50, 0.7), ("entropy", 7, 50, 0.7),
     ("both", 37, 2**18, 1.5)],
)  # fmt: skip
def test_token_logprobs_equals_the_plain_formula_with_gradients(ppo, use, n, vocab, temperature):
    """To the rounding of float32, which over a large vocabulary is what the plain formula itself shows."""
    weight_of = {"both": (1.0, 1.0), "logprobs": (1.0, 0.0), "entropy": (0.0, 1.0)}[use]
    hidden, weight, targets = torch.randn(n, 4), torch.randn(vocab, 4), torch.randint(vocab, (n,))
    upstream = torch.randn(2, n)  # gradients that differ from token to token
    results = []
    runs = ((ppo.token_logprobs, torch.float32), (plain_logprobs, torch.float32), (plain_logprobs, torch.float64))
    for function, dtype in runs:
        h, w = (x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight))
        out = function(h, w, targets, temperature)
        sum((u * x).sum() for u, x, c in zip(upstream, out, weight_of, strict=True) if c).backward()
        results.append([*(x.detach() for x in out), h.grad, w.grad])
    for ours, plain, exact in zip(*results, strict=True):
        rounding = (plain - exact).abs().max()
        assert (ours - exact).abs().max() <= 3 * rounding + 3e-6 * exact.abs().max()


def test_token_logprobs_never_holds_all_logits(ppo):
    n, vocab = 64, 2**18
    hidden, weight = torch.randn(n, 4, requires_grad=True), torch.randn(vocab, 4, requires_grad=True)
    with Largest() as largest:
        logprobs, entropy = ppo.token_logprobs(hidden, weight, torch.arange(n))
        (logprobs.sum() + entropy.sum()).backward()
    assert vocab * 4 <= largest.numel < n * vocab / 1.9


def test_token_logprobs_of_no_positions(ppo):
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    logprobs, entropy = ppo.token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64))
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert (weight.grad == 0).all() and hidden.grad.shape == (0, 4)


def test_token_logprobs_of_bfloat16_are_computed_in_float32(ppo):
    """The logits are bfloat16, what follows is not: probabilities sum to 1, weights get gradients of their dtype."""
    hidden, weight = torch.randn(1, 4).bfloat16(), torch.randn(300, 4).bfloat16().requires_grad_()
    logprobs, _ = ppo.token_logprobs(hidden.expand(300, 4), weight, torch.arange(300))
    assert logprobs.dtype == torch.float32
    close(logprobs.exp().sum().detach(), 1.0, 1e-4)
    logprobs[:3].sum().backward()
    assert weight.grad.dtype == torch.bfloat16 and weight.grad.abs().sum() > 0


def test_gradients_of_bfloat16_weights_add_up_over_chunks_in_float32(ppo):
    """A chunk a position: 1 and eight times 2**-10 make 1 + 2**-7, but 1 where bfloat16 rounds after each."""
    hidden, weight = torch.ones(9, 1).bfloat16(), torch.zeros(2**22, 1).bfloat16().requires_grad_()
    logprobs, _ = ppo.token_logprobs(hidden, weight, torch.zeros(9, dtype=torch.int64))
    (logprobs * torch.tensor([1.0, *8 * [2**-10]])).sum().backward()
    assert weight.grad[0] == 1 + 2**-7


# --- Microbatches and the shift by one


def test_microbatches_are_a_partition_within_the_budget(ppo):
    for _ in range(50):
        lengths = torch.randint(1, 40, (30,))
        indices, budget = torch.randperm(30)[: random.randint(1, 30)], random.choice([1, 7, 40, 100, 10_000])
        groups = ppo.microbatches(indices, lengths, budget)
        assert sorted(torch.cat(groups).tolist()) == sorted(indices.tolist())
        sizes = [lengths[group].tolist() for group in groups]
        fits = lambda rows: len(rows) * max(rows) <= budget and len(rows) * max(rows) - sum(rows) <= budget // 16
        assert all(len(rows) == 1 or fits(rows) for rows in sizes)
        assert not any(fits([*rows, max(after)]) for rows, after in itertools.pairwise(sizes))  # no needless cut


def tiny_model(ppo, head="lm"):
    raw = {
        "model_type": "qwen2", "vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    model = ppo.Transformer(ppo.ModelConfig.from_hf(raw), head)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return model


def tiny_batch():
    """Rows of different length; a prompt of one token or more, then gappy sampled tokens. (tokens, mask, lengths)"""
    lengths = torch.tensor([4, 12, 7, 2, 9])
    mask = torch.rand(5, 12) < 0.7
    mask[:, 1] = True
    mask &= torch.arange(12) < lengths[:, None]
    mask[:, 0] = False
    return torch.randint(19, (5, 12)), mask, lengths


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_output_one_earlier_predicts_a_sampled_token(ppo, temperature):
    model, (tokens, mask, _) = tiny_model(ppo), tiny_batch()
    logprobs, entropy = ppo.at_sampled(model, tokens, mask, temperature)
    full = F.log_softmax(model(tokens) / temperature, dim=-1)
    for b, t in itertools.product(range(5), range(12)):
        if mask[b, t]:
            close(logprobs[b, t].detach(), full[b, t - 1, tokens[b, t]].detach(), 1e-5)
            close(entropy[b, t].detach(), -(full[b, t - 1].exp() * full[b, t - 1]).sum().detach(), 1e-5)
    assert (logprobs[~mask] == 0).all() and (entropy[~mask] == 0).all()


def test_values_are_of_the_state_before_a_token(ppo):
    model, (tokens, mask, _) = tiny_model(ppo, "scalar"), tiny_batch()
    values, _ = ppo.at_sampled(model, tokens, mask)
    full = model(tokens)
    close(values[:, 1:].detach(), torch.where(mask[:, 1:], full[:, :-1], 0.0).detach(), 1e-5)
    assert (values[:, 0] == 0).all()


def loss_gradient(ppo, head, model, batch, budget):
    """Gradient of the actor's or the critic's loss over a minibatch, summed over microbatches, and their number."""
    tokens, mask, lengths, old, advantages = batch
    model.zero_grad()
    groups = ppo.microbatches(torch.arange(len(tokens)), lengths, budget)
    for rows in groups:
        width = max(int(lengths[rows].max()), tokens.shape[1] if budget > 1000 else 0)
        crop = lambda x: x[rows, :width]
        new, entropy = ppo.at_sampled(model, crop(tokens), crop(mask))
        if head == "lm":
            loss, _ = ppo.policy_loss(
                new, crop(old), crop(advantages), crop(mask), 0.2, 0.2, denom=mask.sum()
            )
            loss = loss - 0.1 * entropy.sum() / mask.sum()
        else:
            loss = ppo.value_loss(new, crop(old), crop(advantages), crop(mask), 0.2, denom=mask.sum())
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), len(groups)


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_gradients_do_not_depend_on_microbatches_padding_order_or_garbage(ppo, head):
    model, (tokens, mask, lengths) = tiny_model(ppo, head), tiny_batch()
    with torch.no_grad():
        old = ppo.at_sampled(model, tokens, mask)[0] + 0.1 * torch.randn(5, 12)
    batch = (tokens, mask, lengths, old, torch.randn(5, 12))
    whole, count = loss_gradient(ppo, head, model, batch, 10**6)
    assert count == 1 and whole.abs().max() > 1e-2

    def same(other, budget, groups):
        gradient, count = loss_gradient(ppo, head, model, other, budget)
        assert count >= groups
        close(gradient / whole.abs().max(), whole / whole.abs().max(), 1e-5)

    same(batch, 1, 5)  # a row each
    same(batch, 24, 2)
    same([F.pad(x, (0, 9)) if x.ndim == 2 else x for x in batch], 10**6, 1)  # wider
    order = torch.randperm(5)
    same([x[order] for x in batch], 10**6, 1)
    padding = torch.arange(12) >= lengths[:, None]
    garbage = torch.where(padding, torch.randint(19, (5, 12)), tokens)
    assert not torch.equal(garbage, tokens)
    same((garbage, mask, lengths, nan_outside(old, mask), nan_outside(batch[4], mask)), 10**6, 1)


# --- Step arithmetic


def test_update_steps_follow_the_formula(ppo):
    args = ppo.Args(
        rollout_batch_size=256, n_samples_per_prompt=16, ppo_epochs=1, train_batch_size=128, num_iterations=10
    )
    plan = ppo.plan_steps(args)
    assert (plan.samples_per_iteration, plan.update_steps) == (4096, 32)
    assert (plan.actor_steps_total, plan.critic_steps_total, plan.episodes_total) == (320, 320, 40960)


def test_plans_of_random_settings_count_the_loops(ppo):
    rng = random.Random(0)
    for _ in range(100):
        train, epochs, critic_epochs = rng.randint(1, 20), rng.randint(1, 4), rng.choice([None, 1, 3])
        n, iterations = rng.randint(1, 5), rng.randint(1, 6)
        warmup = rng.randint(0, iterations)
        args = ppo.Args(
            rollout_batch_size=train * rng.randint(1, 4), n_samples_per_prompt=n, train_batch_size=train,
            ppo_epochs=epochs, critic_epochs=critic_epochs, num_iterations=iterations, critic_warmup_iterations=warmup,
        )  # fmt: skip
        actor = critic = samples = 0
        for iteration in range(iterations):
            minibatches = len(torch.arange(args.rollout_batch_size * n).split(train))
            samples += args.rollout_batch_size * n
            critic += minibatches * (critic_epochs or epochs)
            actor += minibatches * epochs if iteration >= warmup else 0
        plan = ppo.plan_steps(args)
        assert (plan.actor_steps_total, plan.critic_steps_total, plan.episodes_total) == (actor, critic, samples)


def test_critic_warmup_longer_than_the_run_plans_no_actor_steps(ppo):
    args = ppo.Args(num_iterations=3, critic_warmup_iterations=5)
    assert ppo.plan_steps(args).actor_steps_total == 0


@pytest.mark.parametrize("samples, batch, nearest", [(10, 4, "5"), (10, 64, "10"), (96, 25, "24"), (7, 3, "1")])
def test_sizes_that_do_not_divide_name_the_nearest_valid(ppo, samples, batch, nearest):
    args = ppo.Args(rollout_batch_size=samples, train_batch_size=batch)
    with pytest.raises(ppo.UserError, match=f"--train-batch-size {batch}") as error:
        ppo.plan_steps(args)
    suggested = re.findall(r"\d+", str(error.value).rsplit("nearest", 1)[1])
    assert nearest in suggested and all(samples % int(x) == 0 for x in suggested)


# --- Ranges of flags

BAD = {
    "num_iterations": [0, -1], "rollout_batch_size": [0], "n_samples_per_prompt": [0], "rollout_slots": [0],
    "max_prompt_tokens": [0], "max_new_tokens": [0], "sft_batch_size": [0], "ppo_epochs": [0], "critic_epochs": [0],
    "train_batch_size": [0, -8], "micro_batch_tokens": [0], "kl_horizon": [0], "max_skipped_steps": [0],
    "eval_episodes": [0], "sft_steps": [-1], "critic_warmup_iterations": [-1, 201], "ref_sync_every": [-1],
    "eval_every": [-1], "log_completions": [-1], "actor_lr": [-1e-6, NAN, math.inf], "critic_lr": [-1.0, NAN],
    "sft_lr": [-1.0], "entropy_coef": [-0.1, NAN], "kl_coef": [-0.1, NAN, math.inf], "missing_eos_penalty": [-1.0, NAN],
    "temperature": [0.0, -1.0, NAN], "clip_low": [0.0, 1.0, 1.5, NAN], "clip_high": [0.0, -0.1, NAN],
    "value_clip": [0.0, -1.0], "dual_clip": [1.0, 0.5, NAN], "target_kl": [0.0, -0.1], "rollout_is_cap": [0.0, -1.0],
    "kl_target": [0.0, -1.0], "max_grad_norm": [0.0, -1.0, NAN], "env_timeout": [0.0, -1.0],
    "gamma": [-0.01, 1.01, NAN], "gae_lambda": [-0.01, 1.01, NAN], "lr_end": [-0.1, 1.1],
    "ref_sync_alpha": [-0.1, 1.1], "env_kwargs": ["{", "[1]", "3"], "eval_env_kwargs": ["{'a': 1}", "null"],
}  # fmt: skip


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD.items() for value in values])
def test_values_out_of_range_are_refused_with_flag_and_value(ppo, name, value):
    with pytest.raises(ppo.UserError) as error:
        ppo.validate(ppo.Args(**{name: value}))
    assert f"--{name.replace('_', '-')} {value}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flag, settings",
    [
        ("--kl-estimator k1", {"kl_in": "loss", "kl_estimator": "k1", "kl_coef": 0.1}),
        ("--rollout-is-cap 2.0", {"rollout_is_cap": 2.0, "recompute_old_logprobs": False}),
        ("--kl-target 6.0", {"kl_target": 6.0, "kl_coef": 0.0}),
        ("--ref-sync-every 3", {"ref_sync_every": 3, "kl_coef": 0.0}),
    ],
)
def test_settings_that_cannot_go_together_are_refused(ppo, flag, settings):
    with pytest.raises(ppo.UserError, match=flag):
        ppo.validate(ppo.Args(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"gamma": 0.0, "gae_lambda": 0.0}, {"gamma": 1.0, "gae_lambda": 1.0}, {"clip_low": 0.2, "clip_high": 3.0},
        {"value_clip": None, "dual_clip": 3.0}, {"actor_lr": 0.0, "critic_lr": 0.0}, {"kl_in": "loss", "kl_coef": 0.1},
        {"kl_in": "reward", "kl_estimator": "k1"}, {"kl_in": "loss", "kl_estimator": "k2", "kl_coef": 0.1},
        {"critic_warmup_iterations": 200}, {"sft_steps": 0},
    ],
)  # fmt: skip
def test_valid_settings_pass(ppo, settings):
    ppo.validate(ppo.Args(**settings))


def test_defaults_of_the_job_fill_what_was_not_given(ppo):
    for model, expected in ((None, (3e-4, 5e-4, 100, 0, 8)), ("folder", (1e-6, 1e-5, 0, 0.01, 256))):
        args = ppo.Args(model=model)
        ppo.validate(args)
        assert (args.actor_lr, args.critic_lr, args.sft_steps, args.kl_coef, args.max_new_tokens) == expected
        assert args.critic_epochs == args.ppo_epochs and args.kl_estimator == "k1"
    args = ppo.Args(model="folder", kl_coef=0.0, actor_lr=0.0, critic_epochs=5, kl_in="loss")
    ppo.validate(args)
    assert (args.kl_coef, args.actor_lr, args.critic_epochs, args.kl_estimator) == (0, 0, 5, "k3")


# --- GSM8K's answers ---


@pytest.mark.parametrize(("text", "number"), [
    ("#### 18", 18), ("2\n#### 1,234.5", 1234.5), ("#### -7", -7), ("#### - $ 7", -7), ("#### $7 dollars", 7),
    ("#### $-7", -7), ("#### .5", 0.5), ("#### 1 #### 2", 2), ("####\n3", 3), ("18", None), ("#### none", None),
    ("####" + " " * 1_000, None), ("####" + "\n" * 1_000 + "4", 4), ("#" * 100_000, None),
    ("#### " + "," * 100_000, None),
])  # fmt: skip
def test_the_number_behind_the_last_hashes_is_found_in_time(ppo, text, number):
    start = time.monotonic()
    assert ppo.parse_number(text) == number
    assert time.monotonic() - start < 2
