"""docs/derivation.md on a policy that is small enough to sum over all of its responses.

A response has two tokens of a vocabulary of three. `theta` has the logits of the four states: no token yet, and each
first token. Expectations are sums over the nine responses, so they are exact, and so are the gradients.
"""

import itertools
import re
import types

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

pytestmark = pytest.mark.shared

PAGE = (ROOT / "docs" / "derivation.md").read_text()

RESPONSES = torch.tensor(list(itertools.product(range(3), repeat=2)))  # [9, 2]
STATES = torch.stack([torch.zeros(9).long(), 1 + RESPONSES[:, 0]], 1)  # [9, 2]
MASK = torch.ones(9, 2).bool()
RANDOM = torch.Generator().manual_seed(1)
numbers = lambda *shape: torch.randn(*shape, generator=RANDOM).double()
REWARDS = numbers(3)[RESPONSES[:, 0], None] * torch.tensor([1, 0]) + numbers(9)[:, None] * torch.tensor([0, 1])
POLICY, OLD, REFERENCE, VALUES = numbers(4, 3), numbers(4, 3), numbers(4, 3), numbers(4)
BETA = 0.3
PAIRS = torch.tensor(list(itertools.product(range(9), repeat=2)))  # [81, 2]


@pytest.fixture(autouse=True)
def the_same_numbers_alone_and_in_any_order():
    RANDOM.manual_seed(1)


def logprobs_of(theta):
    return theta.log_softmax(1)[STATES, RESPONSES]  # [9, 2]


def probabilities(theta):
    return logprobs_of(theta).sum(1).exp()  # [9]


def gradient(function, theta=POLICY):
    """Of function(theta), a number."""
    theta = theta.clone().requires_grad_()
    return torch.autograd.grad(function(theta), theta)[0]


def expected_reward(theta):
    return probabilities(theta) @ REWARDS.sum(1)


def true_values(theta, rewards=REWARDS):
    """[9, 2]: what the tokens from here on earn on average, in the states of each response."""
    second = theta.softmax(1)[1:]  # [3, 3]
    later = (second * rewards[:, 1].view(3, 3)).sum(1)  # [3]
    first = theta.softmax(1)[0] @ (rewards[::3, 0] + later)
    return torch.stack([first.expand(9), later[RESPONSES[:, 0]]], 1).detach()


def expected_loss(ppo, theta, advantages, old, clip=1e9):
    """The script's loss, over all responses of the old policy."""
    logprobs, old_logprobs = logprobs_of(theta), logprobs_of(old)
    rows = [ppo.policy_loss(logprobs[i : i + 1], old_logprobs[i : i + 1], advantages[i : i + 1], MASK[:1],
                            clip_low=clip, clip_high=clip, dual_clip=None, denom=1)[0]
            for i in range(9)]  # fmt: skip
    return probabilities(old) @ torch.stack(rows)


def expected_gradient(ppo, rewards, values, gae_lambda=1.0, policy=POLICY, old=None):
    old = policy if old is None else old
    advantages, _ = ppo.compute_gae(rewards, values, MASK, 1.0, gae_lambda)
    return gradient(lambda theta: expected_loss(ppo, theta, advantages, old), policy)


def true_advantages(ppo, old, rewards=REWARDS):
    return ppo.compute_gae(rewards, true_values(old, rewards), MASK, 1.0, 0.0)[0]


def surrogate(ppo, theta, old, rewards=REWARDS):
    """L of the page."""
    return probabilities(old) @ rewards.sum(1) - expected_loss(ppo, theta, true_advantages(ppo, old, rewards), old)


def test_the_expected_gradient_of_the_loss_is_that_of_the_objective_for_any_baseline(ppo):
    exact = gradient(expected_reward)
    for values in torch.zeros(9, 2).double(), VALUES[STATES], true_values(POLICY):
        torch.testing.assert_close(expected_gradient(ppo, REWARDS, values), -exact)
    leaking = VALUES[STATES] + numbers(3)[RESPONSES]  # a value that knows the token
    assert (expected_gradient(ppo, REWARDS, leaking) + exact).abs().max() > 0.01


def test_a_lambda_below_1_is_biased_unless_the_values_are_true(ppo):
    exact = gradient(expected_reward)
    for gae_lambda in 0.0, 0.5:
        torch.testing.assert_close(expected_gradient(ppo, REWARDS, true_values(POLICY), gae_lambda), -exact)
        assert (expected_gradient(ppo, REWARDS, VALUES[STATES], gae_lambda) + exact).abs().max() > 0.01


@pytest.mark.parametrize(("gae_lambda", "advantages"), [
    (1.0, [-0.7, -0.7, -0.7, -0.1]), (0.5, [-0.1625, -0.325, -0.65, -0.1]), (0.0, [0.0, 0.0, -0.6, -0.1]),
])  # fmt: skip
def test_at_lambda_1_the_tokens_before_the_bad_one_share_its_blame(ppo, gae_lambda, advantages):
    values, rewards = torch.tensor([[0.7, 0.7, 0.7, 0.1]]), torch.zeros(1, 4)
    found, _ = ppo.compute_gae(rewards, values, torch.ones(1, 4).bool(), 1.0, gae_lambda)
    torch.testing.assert_close(found, torch.tensor([advantages]))
    assert ", ".join(f"{x:g}" for x in advantages[:3]) + f" and {advantages[3]:g}" in " ".join(PAGE.split())


def test_with_a_discount_later_tokens_are_not_weighted(ppo):
    """Row 0 of the logits chooses the first token, the others the second."""
    gamma = 0.5
    advantages, _ = ppo.compute_gae(REWARDS, VALUES[STATES], MASK, gamma, 1.0)
    found = gradient(lambda theta: expected_loss(ppo, theta, advantages, POLICY))
    discounted = gradient(lambda theta: probabilities(theta) @ (REWARDS * torch.tensor([1, gamma])).sum(1))
    torch.testing.assert_close(found[0], -discounted[0])
    torch.testing.assert_close(gamma * found[1:], -discounted[1:])
    undiscounted = gradient(expected_reward)
    torch.testing.assert_close(found[1:], -undiscounted[1:])
    assert (found[0] + undiscounted[0]).abs().max() > 0.01


def test_true_values_have_the_least_variance(ppo):
    def variance(values):
        advantages, _ = ppo.compute_gae(REWARDS, values, MASK, 1.0, 1.0)
        return probabilities(POLICY) @ advantages.square().sum(1)

    assert variance(true_values(POLICY)) < min(variance(VALUES[STATES]), variance(torch.zeros(9, 2).double()))


def test_the_performance_difference_is_exact_for_any_two_policies(ppo):
    for new, old in (POLICY, OLD), (OLD, POLICY), (REFERENCE, 5 * OLD):
        of_tokens = true_advantages(ppo, old)
        for at_state, weights in (of_tokens[::3, 0], old[:1]), (of_tokens[:, 1].view(3, 3), old[1:]):
            assert (weights.softmax(1) * at_state).sum(1).abs().max() < 1e-12  # mean 0 in each state
        advantages = of_tokens.sum(1)
        torch.testing.assert_close(probabilities(new) @ advantages, expected_reward(new) - expected_reward(old))
        assert abs(probabilities(old) @ advantages) < 1e-12
        of_the_new = true_advantages(ppo, new).sum(1)  # which are not the right ones
        assert abs(probabilities(new) @ of_the_new - (expected_reward(new) - expected_reward(old))) > 0.01


def test_the_surrogate_is_exact_at_the_old_policy_and_for_responses_of_one_token(ppo):
    torch.testing.assert_close(surrogate(ppo, OLD, OLD), expected_reward(OLD))
    torch.testing.assert_close(gradient(lambda theta: surrogate(ppo, theta, OLD), OLD), gradient(expected_reward, OLD))
    assert abs(surrogate(ppo, POLICY, OLD) - expected_reward(POLICY)) > 0.01
    at_once = REWARDS * torch.tensor([1, 0])  # Nothing that happens after the first token is rewarded.
    torch.testing.assert_close(surrogate(ppo, POLICY, OLD, at_once), probabilities(POLICY) @ at_once.sum(1))


def distances(new, old):
    """Of two policies in their worst states: total variation, and KL(old || new)."""
    variation = (new.softmax(1) - old.softmax(1)).abs().sum(1).max() / 2
    kl = (old.softmax(1) * (old.log_softmax(1) - new.log_softmax(1))).sum(1).max()
    return variation, kl


def test_the_bound_on_the_error_of_the_surrogate(ppo):
    n, used = 2, []
    for scale in [0.01, 0.1, 1.0, 10.0] * 50:
        old = numbers(4, 3)
        new = old + scale * numbers(4, 3)
        error = abs(expected_reward(new) - surrogate(ppo, new, old))
        largest, (alpha, kl) = true_advantages(ppo, old).abs().max(), distances(new, old)
        bound = 2 * n * (n - 1) * alpha**2 * largest
        assert error <= bound + 1e-12 and bound <= n * (n - 1) * largest * kl + 1e-12
        used.append(float(error / bound))
    assert 0.1 < max(used)  # A bound ten times as small would be wrong.


def test_the_error_of_the_surrogate_is_quadratic_in_the_step_and_the_gain_is_not(ppo):
    errors, gains = [], []
    for step in 0.01, 0.001:
        new = OLD + step * POLICY
        errors.append(float(expected_reward(new) - surrogate(ppo, new, OLD)))
        gains.append(float(expected_reward(new) - expected_reward(OLD)))
    assert 80 < errors[0] / errors[1] < 125 and 8 < gains[0] / gains[1] < 12.5


def kl_of_responses(theta, prefixes=None):
    """KL(pi || pi_ref) of whole responses. With `prefixes`, their policy does not change with theta."""
    kls = (theta.softmax(1) * (theta.log_softmax(1) - REFERENCE.log_softmax(1))).sum(1)  # [4]
    first = (theta if prefixes is None else prefixes).softmax(1)[0]
    return kls[0] + first @ kls[1:]


def test_k1_in_the_reward_is_a_penalty_for_the_kl_of_the_whole_response(ppo):
    exact = gradient(lambda theta: expected_reward(theta) - BETA * kl_of_responses(theta))
    k1 = ppo.kl_estimate(logprobs_of(POLICY), logprobs_of(REFERENCE), "k1")
    torch.testing.assert_close(expected_gradient(ppo, REWARDS - BETA * k1, VALUES[STATES]), -exact)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimators_as_a_term_of_the_loss(ppo, kind):
    old = probabilities(POLICY)
    logratio = lambda theta: ppo.kl_estimate(logprobs_of(theta), logprobs_of(REFERENCE), kind)
    of_tokens = gradient(lambda theta: old @ logratio(theta).sum(1))

    def reverse(theta):  # KL(pi_ref || pi) at each token, after the prefixes of the policy
        kls = (REFERENCE.softmax(1) * (REFERENCE.log_softmax(1) - theta.log_softmax(1))).sum(1)
        return kls[0] + POLICY.softmax(1)[0] @ kls[1:]

    exact = {
        "k1": torch.zeros(4, 3).double(),
        "k2": gradient(lambda theta: kl_of_responses(theta, prefixes=POLICY)),
        "k3": gradient(reverse),
    }
    torch.testing.assert_close(of_tokens, exact[kind])
    assert (of_tokens - gradient(kl_of_responses)).abs().max() > 0.01  # later tokens are not charged


def test_samples_of_the_old_policy_with_the_product_of_ratios_and_with_one_ratio_per_token(ppo):
    exact = gradient(expected_reward)
    weighted = lambda theta: probabilities(OLD) @ (
        (logprobs_of(theta) - logprobs_of(OLD)).sum(1).exp() * REWARDS.sum(1)
    )
    torch.testing.assert_close(gradient(weighted), exact)
    distances = []
    for step in 0.1, 0.01:
        old = POLICY + step * OLD
        found = expected_gradient(ppo, REWARDS, true_values(old), old=old)
        distances.append(float((found + exact).abs().max()))
    assert 0 < distances[1] < 0.2 * distances[0] < 0.2  # an approximation, exact for equal policies


def test_a_mean_that_includes_the_response_itself_shrinks_the_gradient():
    rewards = REWARDS.sum(1)[PAIRS]  # [81, 2]: groups of two
    weights = probabilities(POLICY)[PAIRS].prod(1)

    def of_groups(theta):
        advantages = rewards - rewards.mean(1, keepdim=True)
        return weights @ (advantages * logprobs_of(theta).sum(1)[PAIRS]).mean(1)

    torch.testing.assert_close(gradient(of_groups), gradient(expected_reward) / 2)


def test_adam_hides_a_factor_but_not_from_other_terms_nor_from_the_clipping_of_the_norm(ppo):
    gradients, of_other_term = torch.randn(5, 3, generator=RANDOM), torch.tensor([[0.5, -1.0, 1.0]])

    def weights(factor, other=0.0, max_norm=1e9):
        model = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = ppo.make_optimizer(model)
        for g in gradients:
            model.weight.grad = factor * g[None] + other * of_other_term
            ppo.optimizer_step(model, optimizer, 0.1, types.SimpleNamespace(max_grad_norm=max_norm))
        return model.weight.detach()

    close = lambda x, y: bool(((x - y).abs() < 1e-5).all())
    assert close(weights(0.75), weights(1.0)) and weights(1.0).abs().max() > 0.1
    assert not close(weights(0.75, other=0.1), weights(1.0, other=0.1))
    assert close(weights(0.75, other=0.075), weights(1.0, other=0.1))  # it weighs 4 / 3 times as much
    assert not close(weights(0.75, max_norm=1.0), weights(1.0, max_norm=1.0))


@pytest.mark.parametrize(("advantage", "ratio", "trains"), [
    (1.0, 1.1, True), (1.0, 1.3, False), (1.0, 0.7, True), (-1.0, 0.9, True), (-1.0, 0.7, False), (-1.0, 1.3, True),
])  # fmt: skip
def test_where_the_clip_leaves_a_gradient(ppo, advantage, ratio, trains):
    def loss(logprobs):
        old, mask = torch.zeros(1, 1).double(), torch.ones(1, 1).bool()
        return ppo.policy_loss(logprobs, old, torch.tensor([[advantage]]).double(), mask, clip_low=0.2, clip_high=0.2,
                               dual_clip=None, denom=1)[0]  # fmt: skip

    slope = gradient(loss, torch.tensor([[ratio]]).double().log())
    torch.testing.assert_close(slope, torch.tensor([[-advantage * ratio * trains]]).double())


def test_the_clip_switches_off_a_kl_in_the_reward_but_not_in_the_loss(ppo):
    """A token with a ratio of 1.3, a reward of 1, and a reference that finds it less likely by 0.5 nats."""
    beta, ref, mask = 0.3, torch.tensor([[-0.5]]).double(), torch.ones(1, 1).bool()

    def slope(in_the_reward, in_the_loss, clip):
        def loss(logprobs):
            old = torch.zeros(1, 1).double()
            advantages = 1 - in_the_reward * ppo.kl_estimate(old, ref, "k1")
            pg_loss, _ = ppo.policy_loss(logprobs, old, advantages, mask, clip, clip, None, denom=1)
            weight = (logprobs - old).exp().detach()
            return pg_loss + in_the_loss * (weight * ppo.kl_estimate(logprobs, ref, "k2")).sum()

        return float(gradient(loss, torch.tensor([[1.3]]).double().log()))

    assert slope(beta, 0.0, clip=0.2) == 0.0
    k1 = float(torch.tensor(1.3).log()) + 0.5  # of the present policy; that of the rollout is 0.5
    assert slope(0.0, beta, clip=0.2) == pytest.approx(1.3 * beta * k1)
    assert slope(beta, 0.0, clip=1e9) == pytest.approx(-1.3 * (1 - beta * 0.5))
    assert slope(0.0, beta, clip=1e9) == pytest.approx(-1.3 * (1 - beta * k1))


# --- A learned reward, and the best policy under a KL penalty.


def preferences(rewards):
    """[81]: the probability, by Bradley and Terry, that the first response of a pair is preferred."""
    return torch.sigmoid(rewards[PAIRS[:, 0]] - rewards[PAIRS[:, 1]])


def loss_of_pairs(scores, rewards):
    """The expected loss of pairs that are as frequent as each other, if the choices follow `rewards`."""
    margin, chosen = scores[PAIRS[:, 0]] - scores[PAIRS[:, 1]], preferences(rewards)
    return -(chosen * F.logsigmoid(margin) + (1 - chosen) * F.logsigmoid(-margin)).mean()


def best_policy(rewards, reference, beta):
    """pi* of the page: the logits [4, 3] whose responses have the probabilities pi_ref exp(R / beta) / Z."""
    wanted = (logprobs_of(reference).sum(1) + rewards.sum(1) / beta).softmax(0).view(3, 3)
    return torch.cat([wanted.sum(1)[None], wanted]).log()


def test_bradley_terry_scores_are_the_true_ones_up_to_a_constant():
    true = REWARDS.sum(1)
    for scores in true, true + 5.0:
        assert gradient(lambda x: loss_of_pairs(x, true), scores).abs().max() < 1e-12
    for _ in range(20):
        assert loss_of_pairs(true + 0.1 * numbers(9), true) > loss_of_pairs(true, true)
    torch.testing.assert_close(gradient(lambda theta: probabilities(theta) @ (true + 5.0)), gradient(expected_reward))
    shifted = best_policy(REWARDS + 2.5, REFERENCE, BETA)
    torch.testing.assert_close(shifted.softmax(1), best_policy(REWARDS, REFERENCE, BETA).softmax(1))


def test_the_best_policy_under_a_kl_penalty():
    best = best_policy(REWARDS, REFERENCE, BETA)
    log_z = (logprobs_of(REFERENCE).sum(1) + REWARDS.sum(1) / BETA).logsumexp(0)
    objective = lambda theta: expected_reward(theta) - BETA * kl_of_responses(theta)
    torch.testing.assert_close(objective(best), BETA * log_z)
    for theta in POLICY, OLD, REFERENCE, best + 0.01 * POLICY:
        to_best = probabilities(theta) @ (logprobs_of(theta) - logprobs_of(best)).sum(1)
        assert to_best > 1e-6
        torch.testing.assert_close(objective(theta), BETA * (log_z - to_best))
    torch.testing.assert_close(best_policy(3 * REWARDS, REFERENCE, 3 * BETA).softmax(1), best.softmax(1))
    odds = (probabilities(best) / probabilities(REFERENCE)).log()  # A reward that is higher by beta: e times the odds.
    torch.testing.assert_close(odds - odds[0], (REWARDS.sum(1) - REWARDS.sum(1)[0]) / BETA)


def test_the_share_of_right_responses_of_the_best_policy():
    rows = re.findall(r"^  \| \$\\beta = ([\d.]+)\$ \| (.*) \|$", PAGE, re.MULTILINE)
    [heads] = re.findall(r"^  \| \|(.*)\|$", PAGE, re.MULTILINE)
    shares = [float(p) for p in re.findall(r"p = ([\d.]+)", heads)]
    assert len(rows) == 4 and len(shares) == 3
    for beta, cells in rows:
        for p, cell in zip(shares, cells.split(" | "), strict=True):
            reference = torch.cat([torch.tensor([[p, (1 - p) / 2, (1 - p) / 2]]), torch.ones(3, 3)]).double().log()
            right = torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 0.0]] * 6).double()  # The first token decides.
            best = best_policy(right, reference, float(beta))
            assert f"{float(best.softmax(1)[0, 0]):.3f}" == cell
            logratio = (logprobs_of(best) - logprobs_of(reference)).sum(1)
            kl = float(torch.where(probabilities(best) > 0, probabilities(best) * logratio, 0.0).sum())
            assert kl <= -torch.tensor(p).log() + 1e-6
    assert f"{-float(torch.tensor(1e-4).log()):.1f} nats for $p = 0.0001$" in PAGE


def test_the_end_of_training_is_the_best_policy_with_k1_in_the_reward_but_not_with_k2_in_the_loss(ppo):
    best = best_policy(REWARDS, REFERENCE, BETA)
    k1 = ppo.kl_estimate(logprobs_of(best), logprobs_of(REFERENCE), "k1")
    assert expected_gradient(ppo, REWARDS - BETA * k1, VALUES[STATES], policy=best).abs().max() < 1e-9

    def of_the_loss(rewards, theta, coefficient, std=1.0):
        advantages, _ = ppo.compute_gae(rewards, VALUES[STATES], MASK, 1.0, 1.0)
        old = probabilities(theta)
        penalty = lambda x: old @ ppo.kl_estimate(logprobs_of(x), logprobs_of(REFERENCE), "k2").sum(1)
        return gradient(lambda x: expected_loss(ppo, x, advantages / std, theta) + coefficient * penalty(x), theta)

    assert of_the_loss(REWARDS, best, BETA).abs().max() > 0.01
    at_once = REWARDS * torch.tensor([1, 0])  # as for responses of one token
    best, std = best_policy(at_once, REFERENCE, BETA), 0.25
    assert of_the_loss(at_once, best, BETA / std, std).abs().max() < 1e-9  # beta = coefficient * std
    assert of_the_loss(at_once, best, BETA, std).abs().max() > 0.01


def test_dpo_ends_at_the_same_best_policy():
    def loss(theta):
        scores = BETA * (logprobs_of(theta) - logprobs_of(REFERENCE)).sum(1)
        return loss_of_pairs(scores, REWARDS.sum(1))

    best = best_policy(REWARDS, REFERENCE, BETA)
    assert gradient(loss, best).abs().max() < 1e-12 < 1e-3 < gradient(loss, POLICY).abs().max()
    for theta in POLICY, REFERENCE, best + 0.01 * POLICY:
        assert loss(theta) > loss(best)


@pytest.mark.parametrize("beta", [0.01, 0.3])
def test_equal_rewards_leave_a_pull_to_the_reference_whatever_its_weight(ppo, beta):
    """The policy is uniform, so that the nine responses, each once, are its distribution."""
    uniform = torch.zeros(4, 3).double()
    k1 = ppo.kl_estimate(logprobs_of(uniform), logprobs_of(REFERENCE), "k1")
    advantages, _ = ppo.compute_gae(torch.zeros(9, 2) - beta * k1, torch.zeros(9, 2).double(), MASK, 1.0, 1.0)
    whitened = ppo.masked_whiten(advantages, MASK)
    found = gradient(lambda theta: expected_loss(ppo, theta, whitened, uniform), uniform)
    pull = gradient(kl_of_responses, uniform)
    torch.testing.assert_close(found, beta / advantages.std() * pull, rtol=1e-3, atol=1e-6)
    assert 0.1 < found.abs().max()  # of a size that does not depend on beta


# --- The page.


def test_the_tests_that_the_page_names_exist():
    named = re.findall(r"`(\w+)`", " ".join(re.findall(r"\(Tests?: (.*?)\)", " ".join(PAGE.split()))))
    mine = [name for name in globals() if name.startswith("test_")]
    assert len(named) > 15 and all(any(word in name for name in mine) for word in named)


def test_formulas_are_written_so_that_markdown_does_not_change_them():
    """A line has whole formulas, no start of a list, and no backslash before a punctuation mark."""
    blocks = PAGE.split("\n$$\n")
    assert len(blocks) % 2 and len(blocks) > 30
    for line in "\n".join(blocks[::2]).splitlines():
        assert line.count("$") % 2 == 0, line
        for formula in re.findall(r"\$(.*?)\$", line):
            assert formula == formula.strip() != "" and not re.search(r"\}_", formula), line
    for formula in [*blocks[1::2], *re.findall(r"\$(.*?)\$", "\n".join(blocks[::2]))]:
        assert not re.search(r"\\[^A-Za-z]", formula) and formula.count("{") == formula.count("}"), formula
        assert not re.search(r"^([-+*>#]|=+$)(\s|$)", formula, re.MULTILINE), formula  # a list, a quotation, a heading
