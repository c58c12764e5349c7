"""The formulas against hand-computed and naively computed values, the shift by one, microbatches, flags."""

import dataclasses
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from test_rollout import make_model
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


def test_kl_estimators_follow_their_formulas(ppo):
    logprobs, ref = torch.randn(3, 5) - 2, torch.randn(3, 5) - 2
    r = (ref - logprobs).exp()  # pi_ref / pi
    close(ppo.kl_estimate(logprobs, ref, "k1"), -r.log())
    close(ppo.kl_estimate(logprobs, ref, "k2"), r.log() ** 2 / 2)
    close(ppo.kl_estimate(logprobs, ref, "k3"), r - 1 - r.log(), 1e-5)


@pytest.mark.parametrize("gamma, lam, expected", [
    (0.9, 0.5, [0.075775, 0.0795, 0.11, 0.2]), (1.0, 0.95, [0.456725, 0.3755, 0.29, 0.2])])  # fmt: skip
def test_gae_bridges_a_gap_as_computed_by_hand(ppo, gamma, lam, expected):
    mask = torch.tensor([[1, 1, 0, 0, 0, 1, 1]]).bool()
    values = torch.tensor([[0.5, 0.6, 9, 9, 9, 0.7, 0.8]])
    rewards = torch.tensor([[0.0, 0, 0, 0, 0, 0, 1]])
    advantages, returns = ppo.compute_gae(rewards, values, mask, gamma, lam)
    close(advantages[mask.bool()], expected)
    close(returns[mask.bool()], torch.tensor(expected) + values[mask.bool()])
    assert (advantages[mask == 0] == 0).all() and (returns[mask == 0] == 0).all()


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (0.7, 0.0), (0.0, 0.9)])
@pytest.mark.parametrize("bootstrapped", [False, True])
def test_gae_equals_the_sum_of_discounted_errors_on_gappy_masks(ppo, gamma, lam, bootstrapped):
    """Advantage k of a row's chain is the sum over l of (gamma * lam)^l * delta_{k + l}, written out."""
    mask, rewards, values = random_mask(), torch.randn(6, 11), torch.randn(6, 11)
    bootstrap = torch.randn(6) if bootstrapped else 0.0
    expected = torch.zeros(mask.shape)
    for b in range(6):
        chain = mask[b].nonzero()[:, 0].tolist()
        v = [*values[b, chain].tolist(), float(bootstrap[b]) if bootstrapped else 0.0]
        deltas = [float(rewards[b, t]) + gamma * v[k + 1] - v[k] for k, t in enumerate(chain)]
        for k, t in enumerate(chain):
            expected[b, t] = sum((gamma * lam) ** (i - k) * deltas[i] for i in range(k, len(chain)))
    rewards, values = nan_outside(rewards, mask), nan_outside(values, mask)
    advantages, returns = ppo.compute_gae(rewards, values, mask, gamma, lam, bootstrap)
    close(advantages, expected, 1e-5)
    close(returns, torch.where(mask, expected + values, 0.0), 1e-5)


def policy_case(spread=0.5):
    mask, old = random_mask(), torch.randn(6, 11) - 2
    return old + spread * torch.randn(6, 11), old, torch.randn(6, 11), mask


@pytest.mark.parametrize("low, high, dual", [(0.2, 0.2, None), (0.4, 0.1, None), (0.2, 0.28, 1.5)])
def test_policy_loss_equals_a_loop_over_tokens(ppo, low, high, dual):
    logprobs, old, advantages, mask = policy_case(spread=0.8)
    loss, stats = ppo.policy_loss(logprobs, old, advantages, mask, low, high, dual)
    sums, tokens = dict.fromkeys(("loss", "clipfrac", "out_of_clip", "approx_kl", "ratio_mean"), 0.0), int(mask.sum())
    for b, t in mask.nonzero().tolist():
        logratio, advantage = float(logprobs[b, t] - old[b, t]), float(advantages[b, t])
        ratio = math.exp(logratio)
        objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        sums["clipfrac"] += (objective < ratio * advantage - 1e-9) / tokens
        if dual is not None and advantage < 0:
            objective = max(objective, dual * advantage)
        sums["loss"] -= objective / tokens
        sums["out_of_clip"] += (not 1 - low <= ratio <= 1 + high) / tokens
        sums["approx_kl"] += (ratio - 1 - logratio) / tokens
        sums["ratio_mean"] += ratio / tokens
    for name, value in sums.items():
        close((stats | {"loss": loss})[name], value, 1e-5)
    close(stats["dev_max"], ((logprobs - old)[mask].exp() - 1).abs().max(), 1e-5)
    assert 0 < stats["clipfrac"] < stats["out_of_clip"] < 1  # the case has tokens of every kind


def test_the_clip_stops_gradients_where_the_paper_says(ppo):
    """Slope: d loss / d logprob, 0 where the clip holds the policy."""
    cases = [  # (advantage, ratio, slope)
        (1.0, 1.0, -1.0), (1.0, 1.1, -1.1), (1.0, 1.3, 0.0), (1.0, 0.5, -0.5),
        (-1.0, 1.0, 1.0), (-1.0, 0.9, 0.9), (-1.0, 0.7, 0.0), (-1.0, 1.9, 1.9), (-1.0, 2.1, 0.0),
    ]  # fmt: skip
    advantages, ratio, slopes = torch.tensor(cases).T[:, None]  # [1, 9] each
    logprobs = ratio.log().requires_grad_()
    mask = torch.ones(1, 9, dtype=torch.bool)
    ppo.policy_loss(logprobs, torch.zeros(1, 9), advantages, mask, 0.2, 0.25, 2.0, 1)[0].backward()
    close(logprobs.grad, slopes, 1e-5)


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


def test_losses_and_stats_add_up_over_microbatches(ppo):
    case = policy_case()
    whole, whole_stats = ppo.policy_loss(*case, 0.2, 0.2)
    parts = [[x[rows] for x in case] for rows in (slice(0, 2), slice(2, 6))]
    losses, stats = zip(*(ppo.policy_loss(*part, 0.2, 0.2, None, case[3].sum()) for part in parts), strict=True)
    close(sum(losses), whole)
    shares = [float(case[3][rows].sum() / case[3].sum()) for rows in (slice(0, 2), slice(2, 6))]
    for name, value in whole_stats.items():
        means = [part[name] * share for part, share in zip(stats, shares, strict=True)]
        close(max(part[name] for part in stats) if name == "dev_max" else sum(means), value)
    close(sum(ppo.value_loss(*part, 0.2, case[3].sum()) for part in parts), ppo.value_loss(*case, 0.2))


def test_an_empty_mask_gives_loss_zero_and_huge_log_ratios_finite_losses(ppo):
    empty, x = torch.zeros(2, 3, dtype=torch.bool), torch.full((2, 3), NAN)
    assert ppo.policy_loss(x, x, x, empty, 0.2, 0.2)[0] == 0 and ppo.value_loss(x, x, x, empty, 0.2) == 0
    logprobs, one = torch.tensor([[500.0, -500.0]], requires_grad=True), torch.ones(1, 2)
    loss, _ = ppo.policy_loss(logprobs, 0 * one, -one, one.bool(), 0.2, 0.2)
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
    """The formula, with all logits in memory."""
    logprobs = F.log_softmax(hidden @ weight.T / temperature, dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("factors, n, vocab, temperature", [  # factors: None for an output that is not used
    ((1, 1), 7, 50, 0.7), ((1, None), 7, 50, 0.7), ((None, 1), 7, 50, 1.0), ((1, 1), 20, 2**18, 1.5),
])  # fmt: skip
def test_token_logprobs_equals_full_logits_with_gradients_and_never_holds_them(ppo, factors, n, vocab, temperature):
    hidden, weight, targets = torch.randn(n, 4), torch.randn(vocab, 4), torch.randint(vocab, (n,))
    upstream, results, sizes = torch.randn(2, n), [], []
    for function in (ppo.token_logprobs, full_logprobs):
        h, w = (x.clone().requires_grad_() for x in (hidden, weight))
        with Largest() as largest:
            out = function(h, w, targets, temperature)
            sum((u * x).sum() for u, x, factor in zip(upstream, out, factors, strict=True) if factor).backward()
        results.append([*(x.detach() for x in out), h.grad, w.grad])
        sizes.append(largest.numel)
    for ours, plain in zip(*results, strict=True):
        assert (ours - plain).abs().max() <= 1e-4 * plain.abs().max()
    assert sizes[1] == n * vocab and (n == 7 or sizes[0] < n * vocab)


def test_token_logprobs_of_bfloat16_are_computed_in_float32(ppo):
    hidden, weight = torch.randn(1, 4).bfloat16(), torch.randn(300, 4).bfloat16().requires_grad_()
    logprobs, _ = ppo.token_logprobs(hidden.expand(300, 4), weight, torch.arange(300))
    close(logprobs.exp().sum().detach(), 1.0, 1e-4)
    logprobs[0].backward()
    assert weight.grad.dtype == torch.bfloat16 and weight.grad.any()


def tiny_model(ppo, head="lm"):
    config = make_model(ppo, 19, model_type="qwen2", tie_word_embeddings=True).config
    model = ppo.Transformer(config, head)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def tiny_experience(ppo):
    """Rows of different length: a prompt of one token or more, then sampled tokens with gaps."""
    lengths = torch.tensor([4, 12, 7, 2, 9])
    real = torch.arange(12) < lengths[:, None]
    mask = (torch.rand(5, 12) < 0.7) & real
    mask[:, 0], mask[:, 1] = False, True
    x, stop = torch.randn(5, 12) * mask, ["eos", "length", "env", "eos", "eos"]
    batch = ppo.Rollout(torch.randint(19, (5, 12)) * real, mask, x, x.abs(), lengths, stop, [], {}, [], [], [])
    return dataclasses.replace(ppo.Experience.from_rollout(batch, torch.device("cpu")), old_logprobs=x + 0.1 * mask)


def test_a_microbatch_holds_the_tokens_of_its_samples_and_no_padding(ppo):
    e = tiny_experience(ppo)
    e.extras = {"weight": torch.arange(5.0), "depth": torch.arange(60).view(5, 12)}
    mb = e[torch.tensor([2, 0])]
    for name in ("tokens", "mask", "old_logprobs"):
        assert torch.equal(getattr(mb, name), getattr(e, name)[[2, 0], :7])
    assert mb.extras["weight"].tolist() == [2, 0] and torch.equal(mb.extras["depth"], e.extras["depth"][[2, 0], :7])
    assert mb.lengths.tolist() == [7, 4] and mb.n_tokens == int(mb.mask.sum())
    packing = mb.packing
    assert torch.equal(packing.pack(mb.tokens), torch.cat((e.tokens[2, :7], e.tokens[0, :4])))
    assert packing.position.tolist() == [*range(7), *range(4)]
    assert torch.equal(packing.sampled, torch.cat((e.mask[2, :7], e.mask[0, :4])).nonzero()[:, 0])
    padded = packing.unpack(1.0 + torch.arange(11)[:, None])
    assert padded.shape == (2, 7, 1) and padded[..., 0].tolist() == [[*range(1, 8)], [8, 9, 10, 11, 0, 0, 0]]


def test_a_rank_without_samples_computes_a_token_that_trains_nothing(ppo):
    blank, model, critic = tiny_experience(ppo)[torch.arange(0)], tiny_model(ppo), tiny_model(ppo, "scalar")
    assert blank.tokens.shape == (1, 1) and not blank.mask.any() and len(blank.packing.sampled) == 0
    logprobs, entropy = ppo.sampled_logprobs(model, blank, 1.0)
    (logprobs.sum() + entropy.sum() + ppo.sampled_values(critic, blank).sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in [*model.parameters(), *critic.parameters()])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@torch.no_grad()
def test_the_output_one_earlier_predicts_a_sampled_token_and_values_its_state(ppo, temperature):
    model, critic, e = tiny_model(ppo), tiny_model(ppo, "scalar"), tiny_experience(ppo)
    args, ranks = ppo.Args(micro_batch_tokens=20), ppo.World(torch.device("cpu"))
    run = lambda model, function: ppo.forward_all(lambda mb: function(model, mb), e, args, ranks)  # [5, 12]
    logprobs = run(model, lambda model, mb: ppo.sampled_logprobs(model, mb, temperature)[0])
    entropy = run(model, lambda model, mb: ppo.sampled_logprobs(model, mb, temperature)[1])
    values = run(critic, ppo.sampled_values)
    policy, states = torch.distributions.Categorical(logits=model(e.tokens) / temperature), critic(e.tokens)
    for b, t in e.mask.nonzero().tolist():
        close(logprobs[b, t], policy.logits[b, t - 1, e.tokens[b, t]], 1e-5)
        close(entropy[b, t], policy.entropy()[b, t - 1], 1e-5)
        close(values[b, t], states[b, t - 1], 1e-5)
    assert not logprobs[~e.mask].any() and not entropy[~e.mask].any() and not values[~e.mask].any()


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_gradients_do_not_depend_on_microbatches_padding_order_or_garbage(ppo, head):
    model, e = tiny_model(ppo, head), tiny_experience(ppo)
    new = {"lm": lambda mb: ppo.sampled_logprobs(model, mb, 0.8)[0], "scalar": lambda mb: ppo.sampled_values(model, mb)}
    one = ppo.World(torch.device("cpu"))
    old = ppo.forward_all(new[head], e, ppo.Args(), one) + 0.1 * torch.randn(5, 12)
    e = dataclasses.replace(e, old_logprobs=old, values=old, advantages=torch.randn(5, 12), returns=torch.randn(5, 12))

    def gradient(e, budget):
        """Of the actor's or the critic's loss over a minibatch, and the number of microbatches."""
        args = ppo.Args(train_batch_size=5, micro_batch_tokens=budget)
        [(n_tokens, minibatch)] = ppo.minibatches(e, 1, args, one)
        for mb in minibatch:
            loss = ppo.value_loss(new[head](mb), mb.values, mb.returns, mb.mask, 0.2, n_tokens)
            if head == "lm":
                case = (new[head](mb), mb.old_logprobs, mb.advantages, mb.mask, 0.2, 0.2)
                loss = ppo.policy_loss(*case, denom=n_tokens)[0] - ppo.sampled_logprobs(model, mb, 0.8)[1].sum() / 99
            loss.backward()
        result = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
        return 100 * result, len(minibatch)

    whole, count = gradient(e, 10**6)
    assert count == 1 and whole.abs().max() > 1
    garbage = {name: nan_outside(getattr(e, name), e.mask) for name in ("old_logprobs", "values", "advantages")}
    garbage["returns"] = torch.where(e.mask, e.returns, 1e30)
    garbage["tokens"] = torch.where(torch.arange(12) < e.lengths[:, None], e.tokens, torch.randint(19, (5, 12)))
    tensors = {name: x for name, x in vars(e).items() if isinstance(x, torch.Tensor)}
    changed = lambda change: dataclasses.replace(e, **{name: change(x) for name, x in tensors.items()})
    for other, budget, microbatches in [
        (e, 1, 5), (e, 20, 2), (changed(lambda x: x[torch.tensor([3, 0, 4, 1, 2])]), 10**6, 1),
        (dataclasses.replace(e, **garbage), 99, 1), (changed(lambda x: F.pad(x, (0, 9)) if x.ndim > 1 else x), 99, 1),
    ]:  # fmt: skip
        result, count = gradient(other, budget)
        assert count >= microbatches
        close(result, whole, 1e-4)


def test_defaults_fill_what_was_not_given(ppo):
    embedded, with_model = [16, 8, 60, 1.3e-3, 5e-4, 0.5, 0.02], [512, 256, 0, 1e-5, 1e-5, 0.9, 0.01]
    for args, expected in ((ppo.Args(), embedded), (ppo.Args(model="folder"), with_model)):
        ppo.validate(args)
        assert [getattr(args, name) for name in ppo.DEFAULTS] == expected
        assert args.critic_epochs == args.ppo_epochs and args.kl_estimator == "k1"
    args = ppo.Args(model="folder", kl_coef=0.0, actor_lr=0.0, critic_epochs=5, kl_in="loss", gamma=0.0)
    ppo.validate(args)
    assert (args.kl_coef, args.actor_lr, args.critic_epochs, args.kl_estimator) == (0, 0, 5, "k3")


def test_statistics_of_a_step_do_not_depend_on_microbatches_or_on_the_denominator_of_the_loss(ppo):
    case = policy_case()
    parts = [[x[rows] for x in case] for rows in (slice(0, 1), slice(1, 4), slice(4, 6))]
    steps = []
    for batches, loss_denom in ([case], 11.0), (parts, 11.0), (parts, 100.0):
        stats = ppo.StepStats(int(case[3].sum()), ppo.World(torch.device("cpu")))
        for part in batches:
            loss, means = ppo.policy_loss(*part, 0.2, 0.2, None, loss_denom)
            stats.add_loss_terms(loss=loss * loss_denom)
            stats.add_means(int(part[3].sum()), **means)
        steps.append(stats.read(torch.tensor(1.0)))
    assert steps[0] == pytest.approx(steps[1], rel=1e-5) and steps[0] == pytest.approx(steps[2], rel=1e-5)
    assert steps[0]["dev_max"] > 0 < steps[0]["clipfrac"] and steps[0]["tokens"] == int(case[3].sum())


def test_conversations_are_scored_once_by_one_of_the_ranks(ppo):
    """By the value at the last token of a conversation, whatever is beside it in a batch."""
    tokenizer, critic, seen = ppo.HFTokenizer.from_texts(["abcdef="]), tiny_model(ppo, "scalar"), []
    pairs = [("a=", "b"), ("abc=", ""), ("b=", "abcabc"), ("fe=", "dd"), ("f=", "e")]
    turns = [[("user", prompt), ("assistant", response)] for prompt, response in pairs]
    ids = [[*tokenizer.encode(a + b), tokenizer.eos_id] for a, b in pairs]
    reward_model = ppo.RewardModel(critic, tokenizer)
    expected = [critic(torch.tensor([row]))[0, -1].detach() for row in ids]
    args = ppo.Args(micro_batch_tokens=9)
    for size in (1, 2, 8):  # with eight ranks some have nothing to score
        of_ranks = []
        for rank in range(size):
            world = ppo.World(torch.device("cpu"), rank, size)
            with mock.patch.object(ppo.World, "all_reduce", lambda world, x: x):
                of_ranks.append(reward_model.score(turns, args, world))
        seen.append(sum((scores != 0).int() for scores in of_ranks))
        close(sum(of_ranks), torch.stack(expected), 1e-5)
    assert all(torch.equal(count, torch.ones(5, dtype=torch.int32)) for count in seen)
    critic.config.max_position_embeddings = 10
    with pytest.raises(ppo.UserError, match="10 positions, a conversation has 11"):
        reward_model.score([[("user", "abcdef="), ("assistant", "abc")]], args, ppo.World(torch.device("cpu")))


def test_the_number_behind_the_last_hashes_is_found(ppo):
    numbers = {
        "#### 18": 18, "2\n#### 1,234.5": 1234.5, "#### -7": -7, "#### - $ 7": -7, "#### $-7 dollars": -7,
        "#### .5": 0.5, "#### 1 #### 2": 2, "####" + "\n" * 999 + "4": 4, "18": None, "#### x": None, "#" * 9999: None}
    assert {text: ppo.parse_number(text) for text in numbers} == numbers
