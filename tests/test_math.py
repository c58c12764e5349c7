"""The formulas against values by hand and naive code, masks, the shift by one, packing, microbatches, log-probs."""

import dataclasses
import math
import time

import pytest
import torch
import torch.nn.functional as F
from test_rollout import make_model
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.shared


def close(a, b, tolerance=1e-6):
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def random_mask(rows=6, width=11, p=0.6):
    mask = torch.rand(rows, width) < p
    mask[0], mask[1] = False, True  # an empty row and a full one
    return mask


nan_outside = lambda x, mask: torch.where(mask, x, math.nan)


def test_masked_statistics_are_over_the_mask_alone(ppo):
    mask = random_mask(3, 4)  # few tokens, so that the unbiased and the biased deviation differ
    x = torch.randn(3, 4) * 7 + 3
    close(ppo.masked_mean(nan_outside(x, mask), mask), x[mask].mean())
    white = ppo.masked_whiten(nan_outside(x, mask), mask)
    close(white[mask], (x[mask] - x[mask].mean()) / x[mask].std(unbiased=True), 1e-5)
    assert (white[~mask] == 0).all()
    for tokens in (0, 1, 3):  # none, one, and equal ones
        mask = torch.arange(6) < tokens
        x = nan_outside(torch.full((6,), 5.0), mask)
        assert ppo.masked_mean(x, mask) == (5 if tokens else 0) and (ppo.masked_whiten(x, mask) == 0).all()


def test_kl_estimators_follow_their_formulas_also_near_zero(ppo):
    logprobs, ref = torch.randn(3, 5) - 2, torch.randn(3, 5) - 2
    r = (ref - logprobs).exp()  # pi_ref / pi
    for kind, expected in {"k1": -r.log(), "k2": r.log() ** 2 / 2, "k3": r - 1 - r.log()}.items():
        close(ppo.kl_estimate(logprobs, ref, kind), expected, 1e-5)
    x, zero, mask = torch.tensor([1e-4, -1e-4]), torch.zeros(2), torch.tensor([True, True])
    close(1e9 * ppo.kl_estimate(x, zero, "k3"), [5.0, 5.0], 0.01)
    close(1e9 * ppo.policy_loss(x, zero, zero, mask, 0.2, 0.2, None, 2)[1]["approx_kl"], 5.0, 0.01)


def test_gae_equals_the_sum_of_discounted_errors_on_gappy_masks(ppo, gamma=0.9, lam=0.5):
    """Advantage k of a row's chain is the sum over l of (gamma * lam)^l * delta_{k + l}, written out."""
    mask, rewards, values = random_mask(), torch.randn(6, 11), torch.randn(6, 11)
    expected = torch.zeros(mask.shape)
    for b in range(6):
        chain = mask[b].nonzero()[:, 0].tolist()
        v = [*values[b, chain].tolist(), 0.0]
        deltas = [float(rewards[b, t]) + gamma * v[k + 1] - v[k] for k, t in enumerate(chain)]
        for k, t in enumerate(chain):
            expected[b, t] = sum((gamma * lam) ** (i - k) * deltas[i] for i in range(k, len(chain)))
    rewards, values = nan_outside(rewards, mask), nan_outside(values, mask)
    advantages, returns = ppo.compute_gae(rewards, values, mask, gamma, lam)
    close(advantages, expected, 1e-5)
    close(returns, torch.where(mask, expected + values, 0.0), 1e-5)


def policy_case(spread=0.5):
    mask, old = random_mask(), torch.randn(6, 11) - 2
    return old + spread * torch.randn(6, 11), old, torch.randn(6, 11), mask


@pytest.mark.parametrize("low, high, dual", [(0.2, 0.2, None), (0.4, 0.1, None), (0.2, 0.28, 1.5)])
def test_policy_loss_equals_a_loop_over_tokens(ppo, low, high, dual):
    logprobs, old, advantages, mask = policy_case(spread=0.8)
    inputs = (nan_outside(x, mask) for x in (logprobs, old, advantages))
    loss, stats = ppo.policy_loss(*inputs, mask, low, high, dual, 99)  # of a larger minibatch
    sums = dict.fromkeys(("loss", "clipfrac", "approx_kl", "ratio_dev", "token_share"), 0.0)
    for b, t in mask.nonzero().tolist():
        logratio, advantage = float(logprobs[b, t] - old[b, t]), float(advantages[b, t])
        ratio = math.exp(logratio)
        objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        if dual is not None and advantage < 0:
            objective = max(objective, dual * advantage)
        sums["loss"] -= objective
        sums["clipfrac"] += not 1 - low <= ratio <= 1 + high
        sums["approx_kl"] += ratio - 1 - logratio
        sums["ratio_dev"] += abs(ratio - 1)
        sums["token_share"] += 1
    for name, value in (stats | {"loss": loss}).items():
        close(value, sums[name] / 99, 1e-5)
    assert 0 < stats["clipfrac"] < 1
    with pytest.raises(TypeError, match="of the whole minibatch, an int"):
        ppo.policy_loss(logprobs, old, advantages, mask, low, high, dual, mask.sum())
    with pytest.raises(TypeError, match="of the whole minibatch, an int"):
        ppo.value_loss(logprobs, old, advantages, mask, None, mask.sum())


def test_the_clip_stops_gradients_where_the_paper_says(ppo):
    """Slope: d loss / d logprob, 0 where the clip holds the policy."""
    advantages = torch.tensor([[1, 1, 1, 1, -1, -1, -1, -1, -1]])
    ratio = torch.tensor([[1, 1.1, 1.3, 0.5, 1, 0.9, 0.7, 1.9, 2.1]])
    slopes = torch.tensor([[-1, -1.1, 0, -0.5, 1, 0.9, 0, 1.9, 0]])
    logprobs = ratio.log().requires_grad_()
    ppo.policy_loss(logprobs, 0 * ratio, advantages, ratio > 0, 0.2, 0.25, 2.0, 1)[0].backward()
    close(logprobs.grad, slopes, 1e-5)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_equals_a_loop_over_tokens(ppo, clip):
    values, old, returns, mask = policy_case(spread=1.0)
    sums = dict.fromkeys(("loss", "value_dev", "token_share"), 0.0)
    for b, t in mask.nonzero().tolist():
        v, v_old, target = float(values[b, t]), float(old[b, t]), float(returns[b, t])
        error = (v - target) ** 2
        if clip is not None:
            error = max(error, (min(max(v, v_old - clip), v_old + clip) - target) ** 2)
        sums["loss"] += 0.5 * error
        sums["value_dev"] += abs(v - v_old)
        sums["token_share"] += 1
    loss, stats = ppo.value_loss(*(nan_outside(x, mask) for x in (values, old, returns)), mask, clip, 9)
    for name, value in (stats | {"loss": loss}).items():
        close(value, sums[name] / 9, 1e-5)


def test_values_that_rise_and_values_that_fall_are_clipped(ppo):
    """Both have reached their returns, and are 0.8 away from them where the clip holds them."""
    values = torch.tensor([[-1.0, 1.0]])
    loss, _ = ppo.value_loss(values, 0 * values, values, values != 0, 0.2, 2)
    close(loss, 0.5 * 0.8**2)


def test_an_empty_mask_gives_loss_zero_and_huge_log_ratios_finite_losses(ppo):
    empty, x = torch.zeros(2, 3, dtype=torch.bool), torch.full((2, 3), math.nan)
    assert ppo.policy_loss(x, x, x, empty, 0.2, 0.2, None, 1)[0] == 0 and ppo.value_loss(x, x, x, empty, 0.2, 1)[0] == 0
    logprobs = torch.tensor([[500.0, -500.0]], requires_grad=True)
    both = torch.tensor([[True, True]])
    loss, _ = ppo.policy_loss(logprobs, torch.zeros(1, 2), -torch.ones(1, 2), both, 0.2, 0.2, None, 2)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logprobs.grad).all()


class Largest(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


def full_logprobs(hidden, weight, targets, temperature):
    logprobs = F.log_softmax((hidden @ weight.T).float() / temperature, dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def with_gradients(function, hidden, weight, targets, temperature):
    """[log-probs, entropies, gradients of hidden and weight], and elements of the largest tensor."""
    hidden, weight = (x.clone().requires_grad_() for x in (hidden, weight))
    with Largest() as largest:
        logprobs, entropies = function(hidden, weight, targets, temperature)
        (logprobs * targets.cos() + entropies * targets.sin()).sum().backward()
    return [logprobs.detach(), entropies.detach(), hidden.grad, weight.grad], largest.numel


@pytest.mark.parametrize("n, vocab, temperature", [(7, 50, 0.7), (64, 2**18, 1.5)])
def test_token_logprobs_equals_full_logits_with_gradients_and_never_holds_them(ppo, n, vocab, temperature):
    case = torch.randn(n, 4), torch.randn(vocab, 4), torch.randint(vocab, (n,)), temperature
    (results, ours), (expected, all_logits) = (with_gradients(f, *case) for f in (ppo.token_logprobs, full_logprobs))
    for x, y in zip(results, expected, strict=True):
        assert (x - y).abs().max() <= 1e-4 * y.abs().max()
    assert all_logits == n * vocab and (n == 7 or ours <= n * vocab / 4)


def test_token_logprobs_of_bfloat16_round_no_more_than_the_whole_product(ppo):
    """Logits, softmax and the sum over the chunks are in float32: 4 chunks of 16 tokens."""
    hidden, weight = torch.randn(64, 4).bfloat16(), torch.randn(2**18, 4).bfloat16()
    rest = torch.randint(8, (64,)), 1.0
    exact, _ = with_gradients(full_logprobs, hidden.float(), weight.float(), *rest)
    (ours, _), (whole, _) = (with_gradients(f, hidden, weight, *rest) for f in (ppo.token_logprobs, full_logprobs))
    for x, y, z in zip(ours, whole, exact, strict=True):
        assert (x - z).norm() <= 1.1 * (y - z).norm()
    close(torch.stack(ours[:2]), torch.stack(exact[:2]), 1e-4)
    assert ours[0].dtype == torch.float32 and ours[3].dtype == torch.bfloat16


def tiny_model(ppo, head="lm"):
    model = make_model(ppo, 19, "qwen2", head, tie_word_embeddings=True)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def tiny_experience(ppo):
    """Rows of different length: a prompt of one token or more, then sampled tokens with gaps."""
    lengths = torch.tensor([4, 12, 7, 2, 9])
    real = torch.arange(12) < lengths[:, None]
    mask = (torch.rand(5, 12) < 0.7) & real
    mask[:, 0], mask[:, 1] = False, True
    x = torch.randn(5, 12) * mask
    return ppo.Experience(
        tokens=torch.randint(19, (5, 12)) * real, mask=mask, sampler_logprobs=x, rewards=x.abs(), lengths=lengths,
        old_logprobs=x + 0.1 * mask)


@torch.no_grad()
def test_the_output_one_earlier_predicts_a_sampled_token_and_values_its_state(ppo):
    """The padding-free forward, in microbatches, is the padded one. With an index that is shifted it is another."""
    model, critic, e = tiny_model(ppo), tiny_model(ppo, "scalar"), tiny_experience(ppo)
    policy, states = torch.distributions.Categorical(logits=model(e.tokens) / 0.6), critic(e.tokens)
    expected = torch.zeros(3, 5, 12)
    for b, t in e.mask.nonzero().tolist():
        predicted = policy.logits[b, t - 1, e.tokens[b, t]], policy.entropy()[b, t - 1], states[b, t - 1]
        expected[:, b, t] = torch.stack(predicted)
    logprobs, entropies = (lambda mb, i=i: model.sampled_logprobs(mb, 0.6)[i] for i in (0, 1))
    values = lambda mb: critic.sampled_values(mb)
    args = ppo.Args(micro_batch_tokens=20, device="cpu", compile="off")
    for function, correct in zip((logprobs, entropies, values), expected, strict=True):
        for minibatches in [torch.arange(5)], [torch.tensor([2, 0]), torch.tensor([4, 1, 3])]:
            close(ppo.forward_all(function, e, minibatches, args), correct, 1e-5)
        assert not ppo.forward_all(function, e, [torch.tensor([0, 1])], args)[2:].any()
        mb = e.microbatch(torch.arange(5), "cpu")
        assert len(mb.packing.flat_index) == mb.packing.starts[-1] == e.lengths.sum()
        for name in ("position", "flat_index", "sampled"):
            packing = dataclasses.replace(mb.packing, **{name: (getattr(mb.packing, name) - 1).clamp(min=0)})
            assert (function(dataclasses.replace(mb, packing=packing)) - correct).abs().max() > 0.01


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_gradients_do_not_depend_on_microbatches_padding_order_or_garbage(ppo, head):
    model, e = tiny_model(ppo, head), tiny_experience(ppo)
    new = {"lm": lambda mb: model.sampled_logprobs(mb, 0.8)[0], "scalar": lambda mb: model.sampled_values(mb)}
    old = ppo.forward_all(new[head], e, [torch.arange(5)], ppo.Args(device="cpu", compile="off"))
    old += 0.1 * torch.randn(5, 12)
    e = dataclasses.replace(e, old_logprobs=old, values=old, advantages=torch.randn(5, 12), returns=torch.randn(5, 12))

    def gradient(e, budget):
        args = ppo.Args(train_batch_size=5, micro_batch_tokens=budget, device="cpu")
        [(n_tokens, minibatch)] = ppo.minibatches(e, 1, ppo.TrainState(), args)
        for mb in minibatch:
            loss, _ = ppo.value_loss(new[head](mb), mb.values, mb.returns, mb.mask, 0.2, n_tokens)
            if head == "lm":
                case = (new[head](mb), mb.old_logprobs, mb.advantages, mb.mask, 0.2, 0.2)
                loss = ppo.policy_loss(*case, None, n_tokens)[0] - model.sampled_logprobs(mb, 0.8)[1].sum() / 99
            loss.backward()
        result = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
        return 100 * result, len(minibatch)

    whole, count = gradient(e, 10**6)
    assert count == 1 and whole.abs().max() > 1
    garbage = {x: nan_outside(getattr(e, x), e.mask) for x in ("old_logprobs", "values", "advantages", "returns")}
    garbage["tokens"] = torch.where(torch.arange(12) < e.lengths[:, None], e.tokens, torch.randint(19, (5, 12)))
    for other, budget, microbatches in [
        (e, 1, 5), (e, 20, 2), (e.select(torch.tensor([3, 0, 4, 1, 2])), 10**6, 1),
        (dataclasses.replace(e, **garbage), 99, 1), (e.apply(lambda x: F.pad(x, (0, 9)) if x.ndim > 1 else x), 99, 1),
    ]:  # fmt: skip
        result, count = gradient(other, budget)
        assert count >= microbatches
        close(result, whole, 1e-4)


def test_the_number_in_the_last_box_or_after_the_last_hashes_is_found(ppo):
    numbers = {"2\n#### 1,234.5": 1234.5, "#### - $ 7": -7, "#### $-7 dollars": -7, "#### .5": 0.5, "#### 1 #### 2": 2,
               "####" + "\n" * 999 + "4": 4, "18": None, "#### x": None, "**#### 72**": 72, "#### 1,": 1,
               r"so \(\boxed{7}\).": 7, r"\boxed{\$1,250.50}": 1250.5, r"\boxed{-3 \text{ km}}": -3, "#### ,,": None,
               r"#### 1, that is \boxed{2}": 2, r"\boxed{1}, not #### 2": 1, r"\boxed{1} and \boxed{2}": 2,
               r"\boxed{72} in \boxed{}": 72, r"\boxed{x = 72}": 72, r"#### Total = $72": 72, "#### \u22125": -5,
               "\\boxed{\u22121,000}": -1000, "#### 1 000": 1000, r"\boxed{12 345 678.5}": 12345678.5,
               r"\boxed{x}": None}  # fmt: skip
    assert {text: ppo.parse_number(text) for text in numbers} == numbers


@pytest.mark.parametrize("answer", [
    "5/6", "6 / 7", "10^6", "10^{6}", "10\u00b2", r"2\frac{1}{2}", "2\u00bd", r"2\ \frac12", "1 2", r"1\ 2", "1 00",
    "1,2", "1, 2", "1,00", "1.000,5", "1 or 2", "3:30", "2-3", "2 + 3", r"3 \times 4", r"1.5 \times 10^3", "5e3",
    r"2\pi", r"2\sqrt{3}", "2x", "5k", r"2 \text{ million}", "2 and a half", r"12\text{ h } 30\text{ min}",
    "x = y = 5", "1 = 72",
])  # fmt: skip
def test_what_is_no_number_is_not_another_one(ppo, answer):
    assert ppo.parse_number(f"#### {answer}") is None
    for text in rf"\boxed{{{answer}}}", rf"so \boxed{{5}} is \boxed{{{answer}}}", rf"#### 5, not \boxed{{{answer}}}":
        assert ppo.parse_number(text) is None, text
    for cut in rf"\boxed{{{answer}", r"\boxed{7", r"\boxed{5}, no, \boxed{":  # by the token limit
        assert ppo.parse_number(cut) is None


@pytest.mark.parametrize("heading", ["1. Check", "1) Check", "1: Check", "1 - Check", "Check", "Step 1"])
def test_a_heading_after_the_answer_is_no_answer(ppo, heading):
    assert ppo.parse_number(f"#### {heading}") is None
    assert ppo.parse_number(f"#### 72\n\n#### {heading}\n") == 72
    assert ppo.parse_number(f"\\boxed{{72}}\n\n#### {heading}\n8 * 9 = 72") == 72


def test_long_answers_are_read_in_milliseconds(ppo):
    start = time.perf_counter()
    for part in "9", "1 000 ", "1,", "{", "}", "\\boxed{", "\\text{", "a ", "a=", " ", "- ", "#", "#### 1 ", "$", "% ":
        for before, after in ("", ""), ("#### ", "/"), ("\\boxed{", "/}"), ("\\boxed{1 a", "2}"):
            ppo.parse_number(before + part * (30_000 // len(part)) + after)
    assert time.perf_counter() - start < 2  # 60 texts of 30,000 characters
