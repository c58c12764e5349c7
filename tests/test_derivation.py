"""docs/derivation.md on a policy that is small enough to sum over all of its responses.

A response has two tokens of a vocabulary of three. `theta` has the logits of the four states: no token yet, and each
first token. Expectations are sums over the nine responses, so they are exact, and so are the gradients.
"""

import itertools

import pytest
import torch

pytestmark = pytest.mark.shared

RESPONSES = torch.tensor(list(itertools.product(range(3), repeat=2)))  # [9, 2]
STATES = torch.stack([torch.zeros(9).long(), 1 + RESPONSES[:, 0]], 1)  # [9, 2]
MASK = torch.ones(9, 2).bool()
RANDOM = torch.Generator().manual_seed(1)
numbers = lambda *shape: torch.randn(*shape, generator=RANDOM).double()
REWARDS = numbers(3)[RESPONSES[:, 0], None] * torch.tensor([1, 0]) + numbers(9)[:, None] * torch.tensor([0, 1])
POLICY, OLD, REFERENCE, VALUES = numbers(4, 3), numbers(4, 3), numbers(4, 3), numbers(4)
BETA = 0.3


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


def expected_gradient(ppo, rewards, values, gae_lambda=1.0, policy=POLICY, old=None, clip=1e9):
    """Of the script's loss, over all responses of the old policy."""
    old = policy if old is None else old
    advantages, _ = ppo.compute_gae(rewards, values, MASK, 1.0, gae_lambda)

    def loss(theta):
        logprobs, old_logprobs = logprobs_of(theta), logprobs_of(old)
        rows = [ppo.policy_loss(logprobs[i : i + 1], old_logprobs[i : i + 1], advantages[i : i + 1], MASK[:1],
                                clip_low=clip, clip_high=clip, dual_clip=None, denom=1)[0]
                for i in range(9)]  # fmt: skip
        return probabilities(old) @ torch.stack(rows)

    return gradient(loss, policy)


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


def test_true_values_have_the_least_variance(ppo):
    def variance(values):
        advantages, _ = ppo.compute_gae(REWARDS, values, MASK, 1.0, 1.0)
        return probabilities(POLICY) @ advantages.square().sum(1)

    assert variance(true_values(POLICY)) < min(variance(VALUES[STATES]), variance(torch.zeros(9, 2).double()))


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
    pairs = torch.tensor(list(itertools.product(range(9), repeat=2)))  # groups of two
    rewards = REWARDS.sum(1)[pairs]  # [81, 2]
    weights = probabilities(POLICY)[pairs].prod(1)

    def surrogate(theta):
        advantages = rewards - rewards.mean(1, keepdim=True)
        return weights @ (advantages * logprobs_of(theta).sum(1)[pairs]).mean(1)

    torch.testing.assert_close(gradient(surrogate), gradient(expected_reward) / 2)


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
