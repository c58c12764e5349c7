"""Rewards, advantages and returns of an iteration, and the metrics by which the critic is judged."""

import functools
import math
import warnings
from unittest import mock

import pytest
import torch
from test_train import changed, record

pytestmark = pytest.mark.shared


def test_rewards_are_those_of_the_episodes_minus_kl_and_truncation_penalty(ppo, tmp_path):
    """The penalty is not for episodes that the environment ends."""
    flags = dict(env_id="environments:DenseTurns-v0", rollout_batch_size=16, max_new_tokens=8)
    run = record(ppo, tmp_path, kl_coef=5.0, truncation_penalty=0.5, **flags)
    experience, episodes = run.experiences[1], run.episodes[1]
    logratio = experience.old_logprobs - experience.ref_logprobs
    assert (logratio[experience.mask].abs() > 1e-6).all() and not logratio[~experience.mask].any()
    expected = torch.zeros_like(logratio)
    for i, episode in enumerate(episodes):
        expected[i, : len(episode.ids)] = torch.tensor(episode.rewards)
        expected[i, len(episode.ids) - 1] -= 0.5 * (episode.stop == "length")
    assert {episode.stop for episode in episodes} >= {"length", "truncated"}
    torch.testing.assert_close(run.calls["compute_gae"][1]["rewards"], expected - 5.0 * logratio)
    returns = (expected - 5.0 * logratio).flip(1).cumsum(1).flip(1) * experience.mask  # gamma and lambda are 1
    torch.testing.assert_close(experience.returns, returns, rtol=0, atol=1e-5)
    assert run.rows[1]["objective/reward"] == pytest.approx(float(expected.sum(1).mean()))  # without the KL


@pytest.mark.parametrize(("kind", "slope"), [("k2", lambda x: x), ("k3", lambda x: 1 - (-x).exp())])
def test_kl_in_the_loss_leaves_rewards_alone_and_weighs_samples_of_the_old_policy(ppo, tmp_path, kind, slope):
    """In the first iteration the reference is the old policy, so that logratios to both are the same."""
    loss, flags = ppo.policy_loss, dict(kl_coef=5.0, kl_loss=kind, clip_low=1, clip_high=1e9, actor_lr=0.01)
    kept = functools.wraps(loss)(lambda logprobs, *rest, **kw: logprobs.retain_grad() or loss(logprobs, *rest, **kw))
    with mock.patch.object(ppo, "policy_loss", kept):
        run = record(ppo, tmp_path, **flags)
    for call in run.calls["policy_loss"][:4]:
        logratio = (call["logprobs"] - call["old_logprobs"]).detach()
        expected = logratio.exp() * (5.0 * slope(logratio) - call["advantages"]) * call["mask"] / call["denom"]
        torch.testing.assert_close(call["logprobs"].grad, expected, rtol=1e-4, atol=1e-5)
    assert (5 * logratio).abs().max() > 1
    for call, experience in zip(run.calls["compute_gae"], run.experiences, strict=True):
        assert torch.equal(call["rewards"], experience.rewards)
    assert run.rows[0]["ratio/steps"][0]["kl_loss"] < 1e-6 < run.rows[0]["ratio/steps"][-1]["kl_loss"]


def test_advantages_are_whitened_over_the_rollout_and_returns_have_a_lambda_of_their_own(ppo, tmp_path):
    flags = dict(env_id="environments:DenseTurns-v0", gae_lambda=0.3, critic_lambda=0.8, gamma=0.9, critic_lr=0.01)
    run = record(ppo, tmp_path, **flags)  # some episodes are truncated: the value after their end is 0, too
    experience, rewards = run.experiences[1], run.calls["compute_gae"][1]["rewards"]
    values, mask = experience.values, experience.mask
    advantages, returns = (torch.zeros_like(values) for _ in range(2))
    for i in range(len(values)):
        for lambda_, out in ((0.3, advantages), (0.8, returns)):
            chain, nextvalue = 0.0, 0.0
            for t in reversed(mask[i].nonzero()[:, 0].tolist()):
                chain = rewards[i, t] + 0.9 * nextvalue - values[i, t] + 0.9 * lambda_ * chain
                nextvalue, out[i, t] = values[i, t], chain
    assert values[mask].abs().min() > 1e-4
    torch.testing.assert_close(experience.returns, (returns + values) * mask, rtol=0, atol=1e-5)
    whitened = (advantages - advantages[mask].mean()) / advantages[mask].std() * mask
    torch.testing.assert_close(experience.advantages, whitened, rtol=0, atol=1e-4)
    errors = experience.returns[mask] - values[mask]
    expected = 1 - float(errors.var() / experience.returns[mask].var())
    assert run.rows[1]["critic/explained_variance"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("factor", "skipped"), [(1e-8, 0), (math.nan, 1)])
def test_whitening_neither_blows_up_rounding_nor_hides_nan(ppo, tmp_path, factor, skipped):
    broken = changed(ppo.compute_gae, lambda result: (result[0] * factor, result[1]))
    with mock.patch.object(ppo, "compute_gae", broken):
        run = record(ppo, tmp_path)
    assert [row["actor/skipped"] for row in run.rows] == [skipped] * 2
    assert not run.experiences[0].advantages.nan_to_num().any()


def test_equal_advantages_are_zero_whatever_their_size(ppo, tmp_path):
    """The mean of 1,723 numbers of 12345.678 is off by 0.002."""
    equal = lambda rewards, values, mask, *rest: 2 * (torch.where(mask, 12345.678, 0.0),)
    with mock.patch.object(ppo, "compute_gae", equal):
        run = record(ppo, tmp_path, rollout_batch_size=400, train_batch_size=400)
    [e, _] = run.experiences
    assert e.mask.sum() > 1000 and e.advantages.abs().max() == 0
    assert run.rows[0]["ratio/diagnosis"] == "advantage_zero"


def test_explained_variance_by_hand(ppo):
    """Errors are 0 -1 0 and 2 0, 0 1. A constant error explains all, and of equal returns nothing can be explained."""
    returns, values = torch.tensor([[1.0, 1, 1, 3, 3, 2, 2], [1, 2, 1, 1, 3, 2, 1]])
    errors = (returns - values).double()
    expected = 1 - float(errors.var() / returns.double().var())
    assert ppo.explained_variance(values, returns) == pytest.approx(expected) == pytest.approx(-2 / 17)
    assert ppo.explained_variance(values + 5, returns) == pytest.approx(expected, abs=1e-5)
    assert ppo.explained_variance(returns - 5, returns) == 1 and ppo.explained_variance(0 * returns, returns) == 0
    assert math.isnan(ppo.explained_variance(values, 0.7 + 1e-7 * returns))


@pytest.mark.parametrize("count", [0, 1])
def test_explained_variance_of_no_token_or_one_is_nan_without_a_warning(ppo, count):
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isnan(ppo.explained_variance(torch.ones(count), torch.zeros(count)))
    torch.set_warn_always(False)


def test_weights_that_nobody_initializes_are_noticed(ppo, tmp_path, capsys):
    with mock.patch.object(torch.nn.init, "zeros_"):  # of the critic's head
        record(ppo, tmp_path, num_iterations=1)
    assert "critic: steps are skipped, since gradients are not finite" in capsys.readouterr().out
