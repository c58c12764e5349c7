"""The critic: its two lambdas, metrics that do not flatter, and faults that its diagnosis has to name."""

import math
from unittest import mock

import pytest
import torch
from test_train import lines, record

pytestmark = pytest.mark.shared


def describe(ppo, returns, values, mask):
    returns, values = (torch.tensor(x, dtype=torch.float32) for x in (returns, values))
    return ppo.describe_values(values, returns, torch.tensor(mask, dtype=torch.bool))


def test_explained_variance_by_hand(ppo):
    """Of all seven tokens, of the first ones, whose returns are 1 3 2, and of the last ones."""
    mask = [[0, 1, 1, 1], [0, 1, 0, 1], [1, 0, 1, 0]]
    returns = [[0, 1, 1, 1], [0, 3, 0, 3], [2, 0, 2, 0]]
    values = [[9, 1, 2, 1], [9, 1, 9, 3], [2, 9, 1, 9]]  # errors 0 -1 0, 2 0 and 0 1; first 0 2 0; last 0 0 1
    stats = describe(ppo, returns, values, mask)
    returns, errors = (torch.tensor(x, dtype=torch.float64) for x in ([1, 1, 1, 3, 3, 2, 2], [0, -1, 0, 2, 0, 0, 1]))
    assert stats["explained_variance"] == pytest.approx(float(1 - errors.var() / returns.var()), abs=1e-6)
    assert stats["explained_variance_first"] == pytest.approx(1 - (4 / 3) / 1, abs=1e-6)
    assert stats["explained_variance_last"] == pytest.approx(1 - (1 / 3) / 1, abs=1e-6)
    assert stats["value_mean"] == pytest.approx(11 / 7) and stats["return_mean"] == pytest.approx(13 / 7)
    assert stats["return_std"] == pytest.approx(float(returns.std()))


def test_of_equal_returns_nothing_can_be_explained(ppo):
    """Their variance is rounding, and so would be a share of it."""
    returns, values, mask = 0.7 + 1e-7 * torch.rand(9, 2), torch.rand(9, 2), torch.ones(9, 2, dtype=torch.bool)
    stats = ppo.describe_values(values, returns, mask)
    assert all(math.isnan(stats[name]) for name in stats if name.startswith("explained") or name == "gain")


def test_gain_is_1_for_a_constant_above_for_knowledge_and_below_for_noise(ppo):
    """It is the variance of the advantages with lambda 1 and the mean return as every value, over that with values."""
    rewards = torch.zeros(64, 4)
    rewards[:, 3] = torch.arange(64) % 7 / 3
    mask = torch.tensor([False, True, True, True]).expand(64, 4)
    _, returns = ppo.compute_gae(rewards, torch.zeros(64, 4), mask, 1.0, 1.0)
    mean = returns[mask].mean()
    noise = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    gains = []
    for values in (0 * returns, 0 * returns + mean, mean + 0.7 * (returns - mean), mean + 0.5 * noise):
        gains.append(ppo.describe_values(values, returns, mask)["gain"])
        with_critic, constant = (ppo.compute_gae(rewards, v, mask, 1.0, 1.0)[0] for v in (values, 0 * values + mean))
        assert gains[-1] == pytest.approx(float(constant[mask].var() / with_critic[mask].var()), rel=1e-4)
    assert gains[:2] == pytest.approx([1, 1], abs=1e-4) and gains[2] > 4 and gains[3] < 0.9


def test_a_critic_that_only_repeats_itself_explains_nothing(ppo, tmp_path):
    """Returns of a small lambda are nearly the values. The metric takes those of lambda 1."""
    run = record(ppo, tmp_path, critic_lambda=0.0, critic_lr=0.01, kl_coef=0.0)
    experience, gae = run.experiences[1], run.calls["compute_gae"][1]
    mask, values = experience.mask, experience.values
    _, expected = ppo.compute_gae(gae["rewards"], values, mask, 1.0, 1.0)
    flattered = ppo.explained_variance(values[mask], experience.returns[mask])
    logged = run.rows[1]["critic/explained_variance"]
    assert logged == pytest.approx(ppo.explained_variance(values[mask], expected[mask]), abs=1e-4)
    assert abs(logged - flattered) > 0.1


def test_advantages_and_returns_have_lambdas_of_their_own(ppo, tmp_path):
    run = record(ppo, tmp_path, gae_lambda=0.3, critic_lambda=0.8, critic_lr=0.01, kl_coef=0.1, kl_in="reward")
    experience, gae = run.experiences[1], run.calls["compute_gae"][1]
    rewards, values, mask = gae["rewards"], gae["values"], experience.mask
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for i in range(len(experience)):
        columns = mask[i].nonzero()[:, 0].tolist()
        for lambda_, out in ((0.3, advantages), (0.8, returns)):
            chain, nextvalue = 0.0, 0.0
            for t in reversed(columns):
                chain = rewards[i, t] + nextvalue - values[i, t] + lambda_ * chain
                nextvalue, out[i, t] = values[i, t], chain
    assert values[mask].abs().min() > 1e-4
    torch.testing.assert_close(experience.advantages, ppo.masked_whiten(advantages, mask), rtol=0, atol=1e-4)
    torch.testing.assert_close(experience.returns, (returns + values) * mask, rtol=0, atol=1e-5)


HEALTHY = dict(
    explained_variance=0.4, explained_variance_first=0.1, explained_variance_last=0.5, gain=1.6, value_mean=0.5,
    value_std=0.2, return_mean=0.55, return_std=0.3, explained_after=0.5, change=0.05, change_over_clip=0.25,
    distance=0.05, distance_before=0.06, scale=0.35, reward_std=0.3, last_reward_weight=0.5, steps=8)  # fmt: skip
FAR = dict(distance=3.0, distance_before=3.05, explained_variance=0.0, gain=1.0)
DONE = dict(return_std=0.05, explained_variance=-0.5, gain=0.7)  # nearly all samples earn the same
NAN = dict.fromkeys(("explained_variance", "gain", "explained_after"), float("nan"))


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, None), (dict(steps=0), "critic_not_trained"), (dict(reward_std=0.0), "reward_constant"),
    (FAR | dict(change=0.2, change_over_clip=1.0), "value_clip_binds"), (FAR, "critic_lr_too_small"),
    (FAR | dict(change=1.0), "critic_behind"), (FAR | dict(change=1.0, distance_before=4.0), None),  # it catches up
    (FAR | dict(distance_before=4.0), "critic_lr_too_small"),  # too slowly
    (dict(explained_variance=0.0, value_std=0.01, gain=1.0), "values_constant"), (dict(value_std=0.01), None),
    (dict(gain=0.7, explained_after=0.9), "critic_overfits"),
    (dict(gain=0.7, explained_after=0.1), "worse_than_constant"), (DONE, None), (DONE | dict(value_std=0.0), None),
    (dict(last_reward_weight=0.001, explained_variance=0.1), "lambda_hides_reward"),
    (dict(last_reward_weight=0.001), None), (NAN, None),
])  # fmt: skip
def test_diagnosis_of_signals(ppo, changes, expected):
    cause, advice = ppo.diagnose_values(HEALTHY | changes)
    assert cause == expected and (advice or expected is None)


def test_a_fault_is_named_after_five_iterations_with_one(ppo):
    state, named = ppo.TrainState(), []
    for changes in (FAR, dict(steps=0), {}, FAR, dict(reward_std=0.0), FAR, dict(steps=0), FAR, dict(steps=0), {}):
        signals = HEALTHY | changes
        named.append(state.remember(ppo.Diagnosis(*ppo.diagnose_values(signals), signals)).cause)
    assert named == [None] * 7 + ["critic_lr_too_small", "critic_not_trained", None]


def with_rewards(shape):
    """`shape(batch, iteration)` [N] takes the place of the samples' rewards."""

    def roll(original, *args):
        batch = original(*args)
        batch.rewards.zero_()
        batch.rewards[torch.arange(len(batch.lengths)), batch.lengths - 1] = shape(batch, args[5])
        return batch

    return "rollout", roll


def noise(batch, iteration):
    return torch.randn(len(batch.lengths), generator=torch.Generator().manual_seed(iteration + 100))


def mean_value(original, critic, mb):
    values = original(critic, mb)
    return values.sum() / max(1, mb.n_tokens) * mb.mask


def noisy_value(original, critic, mb):
    values = original(critic, mb)
    return (values + torch.randn(values.shape, generator=torch.Generator().manual_seed(mb.n_tokens))) * mb.mask


def restless_value(original, critic, mb):
    """Neither constant nor worth anything, but hardly worse than a constant either."""
    return original(critic, mb) + 0.02 * (mb.tokens % 2) * mb.mask


LENGTH = with_rewards(lambda batch, iteration: batch.mask.sum(1).float())
FAULTS = {  # name: (flags, cause, function of the script, what replaces it)
    "healthy": ({}, None),
    "no epochs": (dict(critic_epochs=0), "critic_not_trained"),
    "constant reward": (dict(env_id="environments:Constant-v0"), "reward_constant"),
    "large rewards": ({}, "value_clip_binds", *with_rewards(lambda batch, _: 20 + batch.mask.sum(1).float())),
    "tiny learning rate": (dict(critic_lr=1e-7), "critic_lr_too_small", *LENGTH),
    "rewards that run away": (
        dict(value_clip=None), "critic_behind",
        *with_rewards(lambda batch, i: 0.6 * i + batch.mask.sum(1) / 10)),
    "small lambda": (dict(gae_lambda=0.2), "lambda_hides_reward", "sampled_values", restless_value),
    "one value for all states": ({}, "values_constant", "sampled_values", mean_value),
    "memory": (
        dict(critic_epochs=40, critic_lr=2e-3, value_clip=None, train_batch_size=64),
        "critic_overfits", *with_rewards(noise)),
    "noise": ({}, "worse_than_constant", "sampled_values", noisy_value),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_in_the_loop_is_named_after_five_iterations(ppo, tmp_path, monkeypatch, name):
    flags, expected, *replaced = FAULTS[name]
    if replaced:
        function, change = replaced
        original = getattr(ppo, function)
        monkeypatch.setattr(ppo, function, lambda *args: change(original, *args))
    printed = []
    monkeypatch.setattr(ppo, "print0", printed.append)
    monkeypatch.setattr(ppo, "SummaryWriter", mock.Mock())
    sizes = dict(rollout_batch_size=64, train_batch_size=16, num_iterations=12, sft_steps=0, max_new_tokens=5,
                 eval_episodes=1, save_every=0, env_id="environments:Plain-v0", actor_lr=1e-5)  # fmt: skip
    ppo.train(ppo.Args(**sizes | flags | dict(log_dir=str(tmp_path), run_name="run")))
    causes = [row.get("critic/diagnosis") for row in lines(tmp_path / "run")]
    printed = [line.split(": ")[1] for line in printed if line.startswith("  critic: ")]
    assert causes[:4] == [None] * 4  # not at once
    assert printed == ([expected] if expected else []) and set(causes[4:]) >= {expected}, (causes, printed)
