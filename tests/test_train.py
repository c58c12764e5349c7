"""The training loop, run for real on the embedded model: what takes effect, what does not change results."""

import contextlib
import gc
import itertools
import json
import math
import random
import shutil
import zlib
from pathlib import Path
from unittest import mock

import environments
import pytest
import torch
import torch.nn.attention
import torch.utils.flop_counter
from test_rollout import make_model

pytestmark = pytest.mark.shared  # but for what a rollout has a part in

PHASES = ("rollout", "score", "critic", "actor", "diagnose")
SMALL = dict(
    num_iterations=2,
    rollout_batch_size=8,
    n_samples_per_prompt=2,
    train_batch_size=8,
    sft_steps=0,
    eval_episodes=2,
    env_id="environments:Plain-v0",
)


@pytest.fixture
def run(ppo, tmp_path, monkeypatch):
    """run(**flags) trains, returns (summary, metrics rows, folder).

    Inside look run.models {head: trained model}, run.steps, run.batches and run.samplers, the models of these batches.
    """
    monkeypatch.setattr(ppo, "SummaryWriter", mock.Mock())  # its files cost more than the runs
    original_step, original_rollout = torch.optim.AdamW.step, ppo.rollout
    original_init = ppo.Learner.__init__

    def init(learner, model, *rest):
        original_init(learner, model, *rest)
        run.models[model.head] = model
        learner.optimizer.head = model.head

    def step(optimizer, *rest):
        run.steps.append(optimizer.head)
        return original_step(optimizer, *rest)

    def rollout(actor, *rest, **kwargs):
        batch = original_rollout(actor, *rest, **kwargs)
        run.batches.append(batch)
        run.samplers.append(actor)
        return batch

    def run(**flags):
        run.steps, run.models, run.batches, run.samplers = [], {}, [], []
        run.count = getattr(run, "count", 0) + 1
        args = ppo.Args(**(SMALL | dict(log_dir=str(tmp_path), run_name=f"run{run.count}") | flags))
        summary = ppo.train(args)
        folder = tmp_path / args.run_name
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return summary, rows, folder

    monkeypatch.setattr(ppo.Learner, "__init__", init)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    monkeypatch.setattr(ppo, "rollout", rollout)
    return run


def spy(ppo, monkeypatch, name):
    """The calls of ppo.<name> as (arguments, result)."""
    calls, original = [], getattr(ppo, name)
    monkeypatch.setattr(ppo, name, lambda *args: calls.append((args, original(*args))) or calls[-1][1])
    return calls


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def without_clock(rows):
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "perf/")) and k != "charts/SPS"} for row in rows
    ]


def assert_same_metrics(rows, others, tolerance):
    """All but the clock's, and those of each actor step."""
    for row, other in zip(without_clock(rows), without_clock(others), strict=True):
        for steps in zip(row.pop("ratio/steps"), other.pop("ratio/steps"), strict=True):
            assert steps[0] == pytest.approx(steps[1], abs=tolerance)
        assert row == pytest.approx(other, abs=tolerance)


@pytest.mark.both
@pytest.mark.parametrize("seed", range(4))
def test_optimizer_steps_of_a_run_are_those_of_the_plan(ppo, run, seed):
    rng = random.Random(seed)
    flags = dict(
        rollout_batch_size=rng.choice([4, 6, 12]),
        n_samples_per_prompt=rng.choice([1, 2, 4]),
        ppo_epochs=rng.randint(1, 3),
        critic_epochs=rng.choice([None, 1, 3]),
        critic_warmup_iterations=rng.randint(0, 2),
        num_iterations=2,
    )
    flags["train_batch_size"] = flags["rollout_batch_size"] * flags["n_samples_per_prompt"] // rng.choice([1, 2])
    plan = ppo.plan_steps(ppo.Args(**flags))
    summary, _, _ = run(**flags)
    assert run.steps.count("lm") == plan.actor_steps_total == summary["update_steps"]
    assert run.steps.count("scalar") == plan.critic_steps_total
    assert sum(len(batch.texts) for batch in run.batches[2:-2]) == plan.episodes_total  # two evaluations around


def test_plan_equals_a_count_of_the_loops_for_random_settings(ppo):
    rng = random.Random(0)
    for _ in range(300):
        prompts, n, epochs, critic_epochs = rng.randint(1, 64), rng.randint(1, 8), rng.randint(1, 5), rng.randint(1, 5)
        iterations, warmup = rng.randint(1, 9), rng.randint(0, 9)
        batch = rng.choice([b for b in range(1, prompts * n + 1) if prompts * n % b == 0])
        plan = ppo.plan_steps(
            ppo.Args(
                rollout_batch_size=prompts,
                n_samples_per_prompt=n,
                ppo_epochs=epochs,
                critic_epochs=critic_epochs,
                train_batch_size=batch,
                num_iterations=iterations,
                critic_warmup_iterations=warmup,
            )
        )
        actor = sum(
            1 for i in range(iterations) if i >= warmup for _ in range(epochs) for _ in range(0, prompts * n, batch)
        )
        critic = sum(1 for _ in range(iterations) for _ in range(critic_epochs) for _ in range(0, prompts * n, batch))
        assert (plan.actor_steps_total, plan.critic_steps_total) == (actor, critic)


def test_every_epoch_visits_every_sample_once_in_a_new_order(ppo):
    args = ppo.Args(train_batch_size=4)
    epochs = [ppo.shuffled_minibatches(args, 16, iteration, epoch) for iteration in (0, 1) for epoch in (0, 1)]
    orders = [torch.cat(minibatches).tolist() for minibatches in epochs]
    assert all(sorted(order) == list(range(16)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.both
def test_samples_of_one_prompt_share_it_and_prompts_run_on(run):
    run(n_samples_per_prompt=2, rollout_batch_size=4, env_id="SortDigits-v0")
    first, second = (batch.prompts for batch in run.batches[2:4])
    assert first[0::2] == first[1::2] and len(set(first)) == 4
    assert not set(first) & set(second)


def test_critic_warmup_leaves_the_actor_bit_identical_for_exactly_k_iterations(ppo, run, monkeypatch):
    seen = []
    original = ppo.diagnose_ratio
    monkeypatch.setattr(ppo, "diagnose_ratio", lambda signals: seen.append(signals) or original(signals))
    _, rows, _ = run(num_iterations=4, critic_warmup_iterations=2, lr_end=0.5)
    assert [s["phase"] for s in seen] == ["critic_warmup"] * 2 + ["train"] * 2
    assert [s["changed_frac"] > 0 for s in seen] == [False, False, True, True]
    assert [row["charts/actor_steps"] for row in rows] == [0, 0, 4, 8]
    assert rows[0]["charts/actor_lr"] == rows[1]["charts/actor_lr"] == 3e-4  # the schedule waits
    assert rows[0]["losses/value_loss"] >= 0 and rows[3]["charts/actor_lr"] < 3e-4


def test_critic_updates_before_the_actor(run):
    run(num_iterations=1)
    assert run.steps == ["scalar"] * 4 + ["lm"] * 4


@pytest.mark.both
def test_two_runs_with_one_seed_write_the_same_files(run):
    flags = dict(sft_steps=3, sft_batch_size=16, kl_coef=0.1, n_samples_per_prompt=2)
    (_, a, folder_a), (_, b, folder_b) = run(**flags), run(**flags)
    assert without_clock(a) == without_clock(b)
    assert (folder_a / "completions.jsonl").read_text() == (folder_b / "completions.jsonl").read_text()
    _, c, _ = run(**flags, seed=2)
    assert without_clock(a) != without_clock(c)


@pytest.mark.both
@pytest.mark.parametrize("flags", [dict(micro_batch_tokens=40), dict(rollout_slots=3), dict(max_prompt_tokens=40)])
def test_microbatches_slots_and_padding_do_not_change_a_run(run, flags):
    _, a, _ = run()
    before = weights(run.models["lm"])
    _, b, _ = run(**flags)
    assert torch.allclose(before, weights(run.models["lm"]), atol=1e-5)
    assert a[0]["losses/policy_loss"] == pytest.approx(b[0]["losses/policy_loss"], abs=1e-6)
    assert a[0]["grad/actor_norm"] == pytest.approx(b[0]["grad/actor_norm"], rel=1e-4)


@pytest.mark.both
def test_first_ratio_is_one_with_recorded_and_recomputed_old_logprobs(run):
    for recompute in (True, False):
        _, rows, _ = run(recompute_old_logprobs=recompute)
        assert all(row["ratio/first_dev"] < 1e-4 for row in rows)
        assert all(row["debug/sampler_trainer_logprob_diff"] < (1e-5 if recompute else 1e-9) for row in rows)
        assert all(row["ratio/last_dev"] > 1e-3 for row in rows)


@pytest.mark.both
def test_temperature_is_the_same_in_sampling_and_training(run):
    _, rows, _ = run(temperature=0.6, recompute_old_logprobs=False, sft_steps=5, sft_batch_size=16)
    assert all(row["ratio/first_dev"] < 1e-4 for row in rows)


def test_kl_coef_zero_allocates_no_reference_and_else_it_starts_at_the_actor(ppo, run, monkeypatch):
    alive, original = [], ppo.compute_gae
    monkeypatch.setattr(ppo, "compute_gae", lambda *args: alive.append(count()) or original(*args))

    def count():
        gc.collect()
        return sum(issubclass(type(x), ppo.Transformer) for x in gc.get_objects())

    before = count()
    _, rows, _ = run(kl_coef=0.0)
    assert [n - before for n in alive] == [2, 2]  # actor and critic
    assert not any(name in row for row in rows for name in ("objective/kl", "objective/kl_coef"))
    _, rows, _ = run(kl_coef=0.1)
    assert [n - before for n in alive[2:]] == [3, 3]
    assert abs(rows[0]["objective/kl"]) < 1e-5 and abs(rows[1]["objective/kl"]) > 1e-4


def test_ref_sync_moves_the_reference_only_when_asked(run):
    _, apart, _ = run(num_iterations=3, kl_coef=0.1)
    _, synced, _ = run(num_iterations=3, kl_coef=0.1, ref_sync_every=1)
    assert all(abs(row["objective/kl"]) < 1e-5 for row in synced)
    assert abs(apart[2]["objective/kl"]) > 1e-4


def test_adaptive_kl_follows_the_formula(run):
    _, rows, _ = run(num_iterations=3, kl_coef=0.1, kl_target=1e-6, kl_horizon=100)
    for row, following in itertools.pairwise(rows):
        error = max(-0.2, min(0.2, row["objective/kl"] / 1e-6 - 1))
        assert following["objective/kl_coef"] == pytest.approx(row["objective/kl_coef"] * (1 + error * 16 / 100))


def test_kl_in_reward_is_taken_from_every_sampled_token(ppo, run, monkeypatch):
    calls = spy(ppo, monkeypatch, "compute_gae")
    _, rows, _ = run(kl_coef=5.0)
    batch, rewards = run.batches[3], calls[1][0][0]
    taken = batch.rewards - rewards
    assert float(taken.sum()) / 16 == pytest.approx(5.0 * rows[1]["objective/kl"], abs=1e-4)
    assert (taken[batch.mask] != 0).all() and not taken[~batch.mask].any()


def test_kl_in_loss_leaves_rewards_alone_and_holds_the_actor_near_the_reference(ppo, run, monkeypatch):
    calls, losses = spy(ppo, monkeypatch, "compute_gae"), {}
    for kl_coef in (1e-6, 100.0):
        _, rows, _ = run(num_iterations=4, kl_coef=kl_coef, kl_in="loss")
        assert torch.equal(calls[-1][0][0], run.batches[5].rewards)
        losses[kl_coef] = rows[-1]["losses/kl_loss"]
    assert 0 <= losses[100.0] < 0.5 * losses[1e-6]


def test_missing_eos_penalty_falls_on_rows_cut_by_length(ppo, run, monkeypatch):
    seen = []
    original = ppo.compute_gae
    monkeypatch.setattr(
        ppo, "compute_gae", lambda rewards, *rest: seen.append(rewards.clone()) or original(rewards, *rest)
    )
    run(missing_eos_penalty=0.5, num_iterations=1, max_new_tokens=4)
    batch = run.batches[2]
    cut = torch.tensor([stop == "length" for stop in batch.stop])
    assert 0 < cut.sum()
    difference = seen[0] - batch.rewards
    assert torch.equal(difference.sum(1), -0.5 * cut)
    assert all(difference[i, batch.lengths[i] - 1] == -0.5 for i in cut.nonzero()[:, 0])


def test_bootstrap_is_the_value_after_the_last_token_of_truncated_rows_only(ppo, run, monkeypatch):
    seen = []
    original = ppo.compute_gae
    monkeypatch.setattr(ppo, "compute_gae", lambda *a: seen.append((a, dict(run.models))) or original(*a))
    run(bootstrap_truncated=True, max_new_tokens=4)
    arguments, _models = seen[1]
    batch, bootstrap = run.batches[3], arguments[-1]
    assert bootstrap.shape == (16,) and bootstrap.abs().sum() > 0
    assert all((value == 0) == (stop == "eos") for value, stop in zip(bootstrap, batch.stop, strict=True))
    run(num_iterations=1, max_new_tokens=4)
    assert seen[-1][0][-1] is None


def test_truncated_importance_weights_scale_the_advantages(ppo, run, monkeypatch):
    seen = []
    original = ppo.policy_loss
    monkeypatch.setattr(ppo, "policy_loss", lambda *a: seen.append(a[2].clone()) or original(*a))
    sampled = ppo.rollout

    def biased(*args, **kwargs):  # a sampler whose log-probs are off by log 2: weights 1/2, or 2 capped at 1.5
        batch = sampled(*args, **kwargs)
        batch.logprobs = torch.where(batch.mask, batch.logprobs + shift, 0.0)
        return batch

    monkeypatch.setattr(ppo, "rollout", biased)
    results = {}
    for shift, cap in ((0.0, None), (0.6931472, 1.5), (-0.6931472, 1.5)):
        run(num_iterations=1, rollout_is_cap=cap)
        results[shift] = seen[0].clone()
        seen.clear()
    plain, halved, capped = results.values()
    assert torch.allclose(halved, plain * 0.5, atol=1e-4) and torch.allclose(capped, plain * 1.5, atol=1e-4)


def test_flags_reach_the_mathematics(ppo, run, monkeypatch):
    calls = {name: spy(ppo, monkeypatch, name) for name in ("policy_loss", "value_loss", "compute_gae")}
    run(num_iterations=1, clip_low=0.1, clip_high=0.3, dual_clip=4.0, value_clip=0.7, gamma=0.9, gae_lambda=0.8)
    assert all(args[4:7] == (0.1, 0.3, 4.0) for args, _ in calls["policy_loss"])
    assert all(args[4] == 0.7 for args, _ in calls["value_loss"])
    assert all(args[3:5] == (0.9, 0.8) for args, _ in calls["compute_gae"])


def test_advantages_are_whitened_over_the_rollout_and_returns_are_not(ppo, run, monkeypatch):
    calls = {name: spy(ppo, monkeypatch, name) for name in ("policy_loss", "value_loss", "compute_gae")}
    run(num_iterations=1, ppo_epochs=1)
    advantages = torch.cat([args[2][args[3]] for args, _ in calls["policy_loss"]])
    returns = torch.cat([args[2][args[3]] for args, _ in calls["value_loss"]])
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-5) and float(advantages.std()) == pytest.approx(
        1, rel=1e-3
    )
    raw = calls["compute_gae"][0][1][1][run.batches[2].mask]
    assert torch.allclose(returns.sort().values, raw.sort().values)


def test_losses_are_divided_by_the_tokens_of_the_whole_minibatch(ppo, run, monkeypatch):
    calls = {name: spy(ppo, monkeypatch, name) for name in ("policy_loss", "value_loss")}
    run(num_iterations=1, ppo_epochs=1, micro_batch_tokens=30)
    assert len(calls["policy_loss"]) == len(calls["value_loss"]) > 2  # several microbatches a minibatch
    for args, _ in calls["policy_loss"] + calls["value_loss"]:
        assert args[-1] > int(args[3].sum())
    assert sum({args[-1] for args, _ in calls["policy_loss"]}) == int(run.batches[2].mask.sum())


def test_means_are_weighted_by_tokens(ppo):
    learner = ppo.Learner(torch.nn.Linear(1, 1), 1e-3, 1.0, 10, ppo.Args())
    learner.step({"loss": 1.0}, 10)
    learner.step({"loss": 4.0}, 30)
    assert learner.end_iteration()["means"]["loss"] == pytest.approx((10 * 1.0 + 30 * 4.0) / 40)
    learner.step({"loss": 7.0}, 5)
    assert learner.end_iteration()["means"]["loss"] == 7.0  # each iteration for itself


def test_gradients_are_clipped_to_max_grad_norm(ppo, monkeypatch):
    model = torch.nn.Linear(3, 1)
    learner, seen = ppo.Learner(model, 1e-3, 1.0, 10, ppo.Args(max_grad_norm=0.5)), []
    monkeypatch.setattr(
        learner.optimizer, "step", lambda: seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    )
    (100 * model(torch.ones(1, 3)).sum()).backward()
    learner.step({}, 1)
    assert float(seen[0].norm()) == pytest.approx(0.5, rel=1e-4)
    assert learner.end_iteration()["means"]["grad_norm"] == pytest.approx(200)


def test_reward_model_adds_its_score_of_the_last_token(ppo, run, monkeypatch, tmp_path):
    args = ppo.Args(**SMALL)
    ppo.validate(args)
    tokenizer, actor, config = ppo.embedded_model(args, ppo.make_envs(args, 1)[0])
    scorer = ppo.critic_from(actor)
    torch.nn.init.normal_(scorer.score.weight)
    ppo.save_hf_checkpoint(scorer, config, tokenizer, tmp_path / "scorer")
    calls = spy(ppo, monkeypatch, "compute_gae")
    run(num_iterations=1, reward_model=str(tmp_path / "scorer"))
    batch, rewards = run.batches[2], calls[0][0][0]
    for i, length in enumerate(batch.lengths.tolist()):
        score = scorer(batch.tokens[i : i + 1, :length])[0, -1].detach()
        assert rewards[i].sum() - batch.rewards[i].sum() == pytest.approx(float(score), abs=1e-5)
        assert rewards[i, length - 1] - batch.rewards[i, length - 1] == pytest.approx(float(score), abs=1e-5)


def test_critic_starts_as_the_actor_with_a_head_of_zeros(ppo):
    args = ppo.Args(**SMALL)
    ppo.validate(args)
    _, actor, _ = ppo.embedded_model(args, ppo.make_envs(args, 1)[0])
    critic = ppo.critic_from(actor)
    assert not critic.score.weight.any()
    assert all(
        torch.equal(p, critic.state_dict()[name]) for name, p in actor.state_dict().items() if name != "lm_head.weight"
    )
    assert critic.model.norm.weight is not actor.model.norm.weight


def test_evaluation_prompts_are_held_out(run):
    run(env_id="SortDigits-v0", eval_episodes=30)
    held_out = lambda prompt: zlib.crc32(prompt[:-1].encode()) % 10 == 0
    before, greedy, *training, after, _ = run.batches
    assert all(map(held_out, before.prompts)) and before.prompts == after.prompts == greedy.prompts
    assert not any(held_out(prompt) for batch in training for prompt in batch.prompts)


@pytest.mark.both
def test_an_interrupted_run_leaves_its_actor(ppo, run, monkeypatch, tmp_path):
    original = ppo.evaluate
    monkeypatch.setattr(ppo, "evaluate", lambda *args: interrupt() if args[-1] == 1 else original(*args))

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(num_iterations=3, eval_every=1)
    actor, _ = ppo.load_hf_checkpoint(tmp_path / "run1" / "model")
    assert torch.equal(weights(actor), weights(run.models["lm"]))
    assert json.loads((tmp_path / "run1" / "summary.json").read_text())["status"] == "interrupted"


def test_target_kl_ends_the_actor_steps_of_a_rollout(run):
    _, rows, _ = run(target_kl=1e-7, ppo_epochs=3)
    assert all(row["ratio/early_stop"] == 1 and len(row["ratio/steps"]) < 6 for row in rows)
    assert run.steps.count("scalar") == 12


def test_entropy_bonus_raises_entropy(run):
    _, low, _ = run(num_iterations=3, entropy_coef=0.0, sft_steps=20, sft_batch_size=64)
    _, high, _ = run(num_iterations=3, entropy_coef=1.0, sft_steps=20, sft_batch_size=64)
    assert high[-1]["objective/entropy"] > low[-1]["objective/entropy"] + 0.05


def test_gradients_ignore_what_lies_in_masked_slots(ppo, run, monkeypatch):
    """Rewards, values, log-probs and tokens outside the mask are filled with garbage behind the loop's back."""
    _, clean, _ = run()
    sampled = ppo.rollout

    def dirty(*args, **kwargs):
        batch = sampled(*args, **kwargs)
        beyond = torch.arange(batch.tokens.shape[1]) >= batch.lengths[:, None]
        batch.tokens = torch.where(beyond, 5, batch.tokens)
        batch.logprobs = torch.where(batch.mask, batch.logprobs, 7.0)
        return batch

    monkeypatch.setattr(ppo, "rollout", dirty)
    _, dirtied, _ = run()
    for name in ("losses/policy_loss", "losses/value_loss", "grad/actor_norm", "grad/critic_norm"):
        assert clean[-1][name] == pytest.approx(dirtied[-1][name], rel=1e-5)


def test_learning_rates_fall_linearly_to_their_end(run):
    _, rows, _ = run(num_iterations=4, lr_end=0.2, actor_lr=1e-3, critic_lr=2e-3)
    steps = [row["charts/actor_steps"] for row in rows]
    assert steps == [4, 8, 12, 16]
    for row, made in zip(rows, steps, strict=True):
        fraction = 1 - 0.8 * (made - 1) / 16
        assert row["charts/actor_lr"] == pytest.approx(1e-3 * fraction)
        assert row["charts/critic_lr"] == pytest.approx(2e-3 * fraction)


@pytest.mark.both
def test_run_folder_holds_what_it_should(ppo, run):
    summary, _, folder = run(log_completions=3)
    assert {path.name for path in folder.iterdir()} >= {
        "config.json",
        "summary.json",
        "metrics.jsonl",
        "completions.jsonl",
        "model",
        "checkpoints",
        f"{ppo.__name__}.py",
    }
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    for when in ("eval_before", "eval_after"):
        assert set(summary[when]) == {"accuracy", "greedy_accuracy", "reward", "response_tokens"}
    assert json.loads((folder / "config.json").read_text())["args"]["critic_lr"] == 5e-4  # resolved
    completions = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    assert len(completions) == 6
    assert set(completions[0]) == {"step", "prompt", "response", "reward", "stop", "n_tokens"}  # no reference: no "kl"
    actor, _ = ppo.load_hf_checkpoint(folder / "model")
    assert torch.equal(weights(actor), weights(run.models["lm"]))


def test_evaluations_on_the_way_are_of_the_policy_that_samples_the_rollout(ppo, run):
    """Row i has that of the actor after i iterations; the first and the last are eval_before and eval_after."""
    flags = dict(eval_episodes=16)
    _, rows, _ = run(num_iterations=5, eval_every=2, **flags)
    assert [row["iteration"] for row in rows if "eval/accuracy" in row] == [2, 4]
    summary, _, _ = run(num_iterations=2, lr_end=1 - 0.95 * 2 / 5, **flags)  # the first two of the five
    assert summary["eval_after"] == {name: rows[2][f"eval/{name}"] for name in summary["eval_after"]}


@pytest.mark.both
def test_readme_names_every_metric(run):
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    _, rows, _ = run(eval_every=1, kl_coef=0.1, kl_in="loss")
    missing = [name for row in rows for name in row if name != "iteration" and f"`{name}`" not in readme]
    assert not missing


def test_model_flops_are_those_that_torch_counts(ppo):
    changes = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=12, tie_word_embeddings=True)
    model = make_model(ppo, 40, **changes)
    for n in (1, 7):
        kernel = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)  # others are not counted
        with kernel, torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            model(torch.zeros(3, n, dtype=torch.int64), select=torch.arange(2))
        never_needed = 2 * 2 * 4 * 12 * 3 * n * n  # torch counts all scores: 2 H D n^2 more in both layers, three rows
        ours = ppo.forward_flops(model.config, torch.full((3,), n), outputs=2)
        assert counter.get_total_flops() == ours + never_needed


@pytest.mark.parametrize("late", [0.0, 100.0])
def test_utilization_is_that_of_real_tokens(ppo, run, monkeypatch, late):
    """Also with a critic and a reward model of other shapes, and while another rank is `late` with the critic."""
    monkeypatch.setattr(ppo, "matrix_rate", lambda *args: 1e6)
    load_models, gather, kept = ppo.load_models, ppo.Ranks.gather, {}

    def load(*args):
        tokenizer, actor, _, _ = load_models(*args)
        critic, scorer = (make_model(ppo, actor.config.vocab_size, intermediate_size=n) for n in (40, 72))
        critic, scorer = (ppo.Transformer(model.config, "scalar") for model in (critic, scorer))
        kept.update(critic=critic.config, scorer=scorer.config)
        return tokenizer, actor, critic, scorer

    def reports_of_two(ranks, value):
        if not (isinstance(value, dict) and "clock" in value):
            return gather(ranks, value)
        clock = [t + late * (i > 2) for i, t in enumerate(value["clock"])]
        return [value, value | {"clock": clock}]

    monkeypatch.setattr(ppo, "load_models", load)
    monkeypatch.setattr(ppo.Ranks, "gather", reports_of_two)
    _, rows, _ = run(ppo_epochs=3, critic_epochs=2, kl_coef=0.1, critic_warmup_iterations=1)
    batches = run.batches[2:4]  # after two of the evaluation
    for row, batch, epochs in zip(rows, batches, (0, 3), strict=True):
        trained = int(batch.mask.sum())
        whole = ppo.forward_flops(run.models["lm"].config, batch.lengths, trained)
        critic, scorer = (ppo.forward_flops(kept[name], batch.lengths, 0) for name in ("critic", "scorer"))
        update, seconds = 3 * (2 * critic + epochs * whole), {name: row[f"time/{name}"] for name in PHASES}
        updates, total = seconds["critic"] + seconds["actor"] + late, sum(seconds.values()) + late
        assert row["perf/update_mfu"] * 1e6 * updates == pytest.approx(update)
        assert row["perf/mfu"] * 1e6 * total == pytest.approx(update + critic + scorer + 3 * whole)
        assert row["perf/response_tokens_per_second"] * total == pytest.approx(trained)
        assert row["perf/rollout_tokens_per_second"] * seconds["rollout"] == pytest.approx(trained)
        assert row["charts/SPS"] * total == pytest.approx(16)


def test_matrix_rate_is_a_rate(ppo):
    assert 1e8 < ppo.matrix_rate(torch.device("cpu"), torch.float32) < 1e14


def no_compiler(*args, **kwargs):
    raise RuntimeError("no g++")


@pytest.mark.parametrize(("iterations", "ranks", "compiler", "expected"),
                         [(200, 1, True, "off"), (20_000, 1, True, "on"), (20_000, 64, True, "off"),
                          (20_000, 1, False, "off")])  # fmt: skip
def test_compile_auto_is_for_long_runs_on_a_cpu(ppo, monkeypatch, capsys, iterations, ranks, compiler, expected):
    monkeypatch.setattr(torch, "compile", (lambda f: f) if compiler else no_compiler)
    args = ppo.Args(num_iterations=iterations)
    plan = ppo.validate(args)
    config = make_model(ppo, 16, hidden_size=64, intermediate_size=128).config
    ppo.resolve_compile(args, config, plan, torch.device("cpu"), ranks)
    said = capsys.readouterr().out
    assert args.compile == expected and ("--compile auto: on" in said) == (expected == "on")
    assert ("WARNING: --compile auto: torch.compile fails here" in said and "no g++" in said) == (not compiler)
    for mode in ("on", "off"):
        args = ppo.Args(num_iterations=iterations, compile=mode)
        plan, works = ppo.validate(args), contextlib.nullcontext()
        fails = pytest.raises(ppo.UserError, match=r"--compile on: torch\.compile fails here.*no g")
        with works if compiler or mode == "off" else fails:
            ppo.resolve_compile(args, config, plan, torch.device("cpu"), ranks)
        assert args.compile == mode


@pytest.mark.both
def test_bfloat16_trains_float32_weights_and_samples_from_a_cast_copy(ppo, run):
    _, rows, _ = run(dtype="bfloat16", num_iterations=3)
    assert {p.dtype for model in run.models.values() for p in model.parameters()} == {torch.float32}
    assert {p.dtype for sampler in run.samplers for p in sampler.parameters()} == {torch.bfloat16}
    assert all(0 < row["debug/sampler_trainer_logprob_diff"] < 0.05 for row in rows)  # stale weights would show here


@pytest.mark.both
def test_a_float32_actor_samples_itself(run):
    run()
    assert all(sampler is run.models["lm"] for sampler in run.samplers)


def test_activation_checkpointing_recomputes_each_block_and_changes_no_metric(ppo, run, monkeypatch):
    calls, original = [], ppo.Block.forward
    monkeypatch.setattr(
        ppo.Block, "forward", lambda *args: calls.append(torch.is_grad_enabled()) or original(*args)
    )
    _, plain, _ = run()
    count = calls.count(True)
    assert count == 2 * len(run.steps) == 2 * 16  # two blocks, each minibatch in one microbatch
    calls.clear()
    _, checkpointed, _ = run(activation_checkpointing=True)
    assert calls.count(True) == 2 * count
    assert_same_metrics(plain, checkpointed, 1e-5)


def test_compile_is_of_the_trained_blocks_and_not_of_the_copy_that_samples(ppo, run, monkeypatch):
    calls, flags = [], dict(kl_coef=0.1, sft_steps=2, sft_batch_size=16)

    def compile(module, **kwargs):
        module._compiled_call_impl = lambda *args: calls.append(module) or module._call_impl(*args)

    _, plain, _ = run(**flags)
    monkeypatch.setattr(torch, "compile", lambda f: f)  # is only tried
    monkeypatch.setattr(ppo, "compiled_step", ppo.Engine.decode_step)
    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    _, compiled, _ = run(**flags, compile="on")
    blocks = [block for model in run.models.values() for block in model.model.layers]
    assert all(block._compiled_call_impl for block in blocks) and set(calls) >= set(blocks)
    sampler, actor = run.samplers[0], run.models["lm"]
    assert all(other is sampler for other in run.samplers) and sampler is not actor
    assert not any(module._compiled_call_impl for module in sampler.modules())
    assert torch.equal(weights(sampler), weights(actor))
    assert_same_metrics(plain, compiled, 1e-5)


def test_blocks_of_four_shapes_and_many_batches_stay_compiled(ppo, run, monkeypatch):
    """They are one piece of code; beyond a number of variants the rest would run uncompiled, with a warning alone."""
    load_models, compile = ppo.load_models, torch.nn.Module.compile

    def load(*args):
        tokenizer, actor, _, _ = load_models(*args)
        others = (make_model(ppo, actor.config.vocab_size, **changes).config
                  for changes in (dict(num_attention_heads=2), dict(attention_bias=True, mlp_bias=True)))  # fmt: skip
        return tokenizer, actor, *(ppo.Transformer(config, "scalar") for config in others)

    monkeypatch.setattr(ppo, "resolve_compile", lambda *args: None)  # would ask for a C++ compiler
    monkeypatch.setattr(ppo, "compiled_step", ppo.Engine.decode_step)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block, **kwargs: compile(block, backend="eager", **kwargs))
    monkeypatch.setattr(ppo, "load_models", load)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=8):
        for tokens in (1, 60, 200):
            run(compile="on", kl_coef=0.1, micro_batch_tokens=tokens)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on the CPU")
def test_compiled_blocks_train_alike(ppo, run, monkeypatch):
    _, plain, _ = run()
    monkeypatch.setattr(ppo, "compiled_step", ppo.Engine.decode_step)  # another test's
    _, compiled, _ = run(compile="on")
    assert_same_metrics(plain, compiled, 1e-4)


def test_environments_are_closed_however_a_run_ends(ppo, run, monkeypatch):
    monkeypatch.setattr(environments.TextEnv, "close", lambda env: closed.append(env))
    for env_id, ends in (("Plain", contextlib.nullcontext()), ("Raises", pytest.raises(ppo.UserError))):
        closed = []
        with ends:
            run(env_id=f"environments:{env_id}-v0")
        rows = [ppo.episodes_at_once(ppo.Args(), episodes) for episodes in (16, 2)]
        assert len(closed) == len(set(closed)) == sum(rows)


def test_demonstrations_that_are_cut_are_counted(run, capsys):
    run(sft_steps=2, sft_batch_size=5, max_new_tokens=4)
    assert "cut to" not in capsys.readouterr().out
    run(sft_steps=2, sft_batch_size=5, max_new_tokens=3)  # "fab" and eos are four
    assert "10 were cut to --max-new-tokens 3" in capsys.readouterr().out


def test_what_is_not_finite_stays_out_of_tensorboard(ppo, run, monkeypatch):
    _, rows, _ = run(rollout_batch_size=1, n_samples_per_prompt=1, train_batch_size=1, max_new_tokens=1)
    assert "losses/explained_variance" not in rows[0]  # NaN, of a single token
    logged = {call.args[0]: call.args[1] for call in ppo.SummaryWriter.return_value.add_scalar.call_args_list}
    assert set(logged) > {"objective/reward", "losses/value_loss"} and all(map(math.isfinite, logged.values()))


@pytest.mark.both
def test_never_ending_environment_and_one_sample_are_fine(run, monkeypatch):
    _, rows, _ = run(rollout_batch_size=1, n_samples_per_prompt=1, train_batch_size=1, max_new_tokens=1)
    assert rows[0]["objective/response_tokens"] == 1


@pytest.mark.slow
def test_the_default_task_is_learned(ppo, tmp_path):
    summary = ppo.train(ppo.Args(log_dir=str(tmp_path), run_name="learn", num_iterations=60, eval_episodes=512))
    assert summary["eval_before"]["accuracy"] < 0.4
    assert summary["eval_after"]["accuracy"] > summary["eval_before"]["accuracy"] + 0.3
