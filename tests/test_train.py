"""The training loop, run for real on the embedded model: what takes effect, and what does not change results."""

import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import math
import random
import subprocess
import sys
import traceback
import types
import zlib
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.shared

SMALL = dict(num_iterations=2, rollout_batch_size=8, train_batch_size=4, max_new_tokens=5, sft_steps=0, eval_episodes=2,
             save_every=0, kl_coef=0.0, device="cpu", env_id="environments:Plain-v0")  # fmt: skip
STEPS = 4  # optimizer steps of the actor, and of the critic, in an iteration of these


def lines(folder, name="metrics"):
    refuse = mock.Mock(side_effect=ValueError("NaN and Infinity are not JSON"))
    return [json.loads(line, parse_constant=refuse) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def flat(tensors):
    """A copy, in one piece; also of FSDP's."""
    return torch.cat([(x.full_tensor() if hasattr(x, "full_tensor") else x).detach().flatten() for x in tensors])


def weights(model):
    return flat(model.parameters())


def changed(function, change):
    return functools.wraps(function)(lambda *args, **kwargs: change(function(*args, **kwargs)))


def record(ppo, folder, tensorboard=False, **flags):
    """Train in folder/run. Returns results and what was seen on the way.

    steps: (model, learning rate, norm of the gradient) of every optimizer.step(); calls[function]: their arguments;
    batches, weights {model: before the rollout} and experiences of every iteration; evaluations: (batch, args, greedy).
    """
    run = types.SimpleNamespace(steps=[], calls=collections.defaultdict(list), batches=[], weights=[], experiences=[],
                                evaluations=[], folder=folder / flags.get("run_name", "run"))  # fmt: skip

    def models_built(result, **_):
        run.tokenizer, models = result
        run.models = dict(zip(("actor", "critic", "reference", "sampler"), models, strict=True))

    def optimizer_made(result, model, args):
        name = {"lm": "actor", "scalar": "critic"}[model.head]
        [group] = [group for group in result.param_groups if group["betas"] == (args.adam_beta1, 0.999)]
        norm = lambda: float(flat(p.grad for p in group["params"]).norm())
        result.register_step_post_hook(lambda *_: run.steps.append((name, group["lr"], norm())))

    def rolled_out(result, args, iteration, greedy=False, **_):
        if iteration < 0:
            run.evaluations.append((result, args, greedy))
        else:
            run.batches.append(result)
            run.weights.append({name: weights(model) for name, model in run.models.items() if model})

    with contextlib.ExitStack() as stack:

        def watch(owner, name, look):
            original = getattr(owner, name)

            def wrapper(*args, **kwargs):
                result = original(*args, **kwargs)
                look(result, **inspect.signature(original).bind(*args, **kwargs).arguments)
                return result

            stack.enter_context(mock.patch.object(owner, name, wrapper))

        watch(ppo, "build_models", models_built)
        watch(ppo, "make_optimizer", optimizer_made)
        watch(ppo, "rollout", rolled_out)
        watch(ppo.RunFolder, "log", lambda _, experience, **rest: run.experiences.append(experience))
        for name in ("compute_gae", "policy_loss", "value_loss"):
            watch(ppo, name, lambda _, name=name, **arguments: run.calls[name].append(arguments))
        stack.enter_context(mock.patch.object(ppo, "SFT_BATCH_SIZE", 16))
        if not tensorboard:  # its files cost more than the run
            stack.enter_context(mock.patch.object(ppo, "SummaryWriter"))
        run.summary = ppo.train(ppo.Args(**(SMALL | dict(log_dir=str(folder), run_name="run") | flags)))
    run.rows = lines(run.folder)
    # The first of an iteration is for advantages. With other lambdas, returns and Monte Carlo returns have their own.
    run.calls["compute_gae"] = run.calls["compute_gae"][:: len(run.calls["compute_gae"]) // len(run.experiences)]
    return run


RUNS = {}


@pytest.fixture
def run(ppo, tmp_path_factory):
    """run(**flags) is such a record, made once; where something is patched, use `record`."""

    def get(**flags):
        key = (ppo.__name__, str(sorted(flags.items())))
        if key not in RUNS:
            RUNS[key] = record(ppo, tmp_path_factory.mktemp("run"), **flags)
        return RUNS[key]

    return get


def without_clock(rows):
    return [{name: x for name, x in row.items() if not name.startswith(("time/", "perf/"))} for row in rows]


def assert_same_metrics(rows, others, tolerance=1e-5):
    """Their numbers, but for the clock, and the rollout, whose batches may differ."""
    numbers = []
    for row in without_clock(rows), without_clock(others):
        steps = {f"{i} {j} {name}": x for i, r in enumerate(row) for j, step in enumerate(r.pop("ratio/steps"))
                 for name, x in step.items()}  # fmt: skip
        rest = {f"{i} {name}": x for i, r in enumerate(row) for name, x in r.items()
                if not name.startswith("rollout/") and not isinstance(x, str)}  # fmt: skip
        numbers.append(steps | rest)
    assert len(numbers[0]) > 20 and numbers[0] == pytest.approx(numbers[1], rel=1e-3, abs=tolerance)


@pytest.mark.parametrize(("flags", "actor", "critic"), [
    (dict(), 2 * 2 * 2, 2 * 2 * 2),  # iterations, epochs, minibatches
    (dict(rollout_batch_size=6, n_samples_per_prompt=2, train_batch_size=3, ppo_epochs=1, critic_epochs=3), 8, 24),
    (dict(num_iterations=3, critic_warmup_iterations=2, ppo_epochs=3), 1 * 3 * 2, 3 * 3 * 2),
    (dict(rollout_batch_size=1, train_batch_size=1, max_new_tokens=1), 4, 4),  # one sample of one token
])  # fmt: skip
def test_counted_optimizer_steps_are_those_of_the_plan(ppo, run, flags, actor, critic):
    seen = run(**flags)
    names = [name for name, *_ in seen.steps]
    plan = ppo.validate(ppo.Args(**(SMALL | flags)))
    assert (names.count("actor"), names.count("critic")) == (actor, critic)
    assert (plan.actor_steps_total, plan.critic_steps_total) == (actor, critic)
    assert seen.summary["update_steps"] == seen.rows[-1]["charts/actor_steps"] == actor
    assert sum(len(batch.texts) for batch in seen.batches) == plan.episodes_total
    assert [name for name, _ in itertools.groupby(names)][:2] == ["critic", "actor"]
    assert dataclasses.astuple(ppo.validate(ppo.Args())) == (256, 4, 8, 8, 2160, 2160, 69120)  # what the README says


def test_critic_warmup_leaves_the_actor_and_its_schedule_alone_for_exactly_k_iterations(run):
    seen = run(num_iterations=4, critic_warmup_iterations=2, lr_end=0.2, actor_lr=1e-3, critic_lr=2e-3)
    actors, critics = ([entry[name] for entry in seen.weights] for name in ("actor", "critic"))
    assert torch.equal(actors[0], actors[2]) and not torch.equal(actors[2], actors[3])
    assert not torch.equal(critics[0], critics[1])
    body = len(critics[0]) - 64  # without the head, which comes last
    assert torch.equal(critics[0][:body], actors[0][:body]) and not critics[0][body:].any()
    assert [row["charts/actor_steps"] for row in seen.rows] == [0, 0, STEPS, 2 * STEPS]
    assert [row["ratio/changed_frac"] > 0 for row in seen.rows] == [False, False, True, True]
    rates = {name: [lr for model, lr, _ in seen.steps if model == name] for name in ("actor", "critic")}
    assert rates["actor"] == pytest.approx([1e-3 * (1 - 0.8 * step / 8) for step in range(8)])
    assert rates["critic"] == pytest.approx([2e-3 * (1 - 0.8 * step / 16) for step in range(16)])
    assert [row.get("charts/actor_lr") for row in seen.rows] == [None, None, rates["actor"][3], rates["actor"][7]]


def test_training_prompts_depend_on_the_seed_and_are_not_those_of_the_evaluation(ppo, run):
    """Of an environment without a split: seeds of the evaluation are the same for all, training has others."""
    with_seed = [run(seed=seed, env_id="SortDigits-v0", eval_env_kwargs='{"split": "train"}') for seed in (1, 2)]
    trained = [[prompt for batch in seen.batches for prompt in batch.prompts] for seen in with_seed]
    evaluated = [[prompt for batch, *_ in seen.evaluations for prompt in batch.prompts] for seen in with_seed]
    assert evaluated[0] == evaluated[1] and not set(trained[0]) & set(trained[1])
    assert not set(evaluated[0]) & {*trained[0], *trained[1]}


def test_an_epoch_over_a_file_asks_every_row_once(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) + "\n" for i in range(24)))
    flags = dict(env_id="GSM8K-v0", env_kwargs=json.dumps({"path": str(path)}), max_prompt_tokens=99)
    prompts = [prompt for batch in run(num_iterations=3, **flags).batches for prompt in batch.prompts]
    assert len(prompts) == len(set(prompts)) == 24


def test_prompts_of_a_file_in_both_formats(ppo, tmp_path):
    """In the order that the seeds always had; the reward function gets prompt, response and the row of the file."""
    rows = [{"prompt": f"{i}?", "demonstration": str(i), "key": i} for i in range(12)]
    rows += [{"messages": [{"role": "user", "content": f"{i}?"}], "key": i} for i in range(12, 24)]
    path, calls = tmp_path / "rows.jsonl", []
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = ppo.Prompts(str(path))
    env.reward = lambda *arguments: calls.append(arguments) or 0.5
    for seed in (*range(24), 24 * 10**6 + 1, None):
        i = random.Random(0).sample(range(24), 24)[(seed or 0) % 24]
        prompt, info = env.reset(seed=seed)
        assert prompt == f"{i}?" and info.get("demonstration") == (str(i) if i < 12 else None)
        assert env.step("answer") == ("", 0.5, True, False, {})
        assert calls[-1] == (f"{i}?", "answer", rows[i] | {"prompt": f"{i}?"})


def test_gsm8k_are_prompts_of_a_file(ppo, tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"question": f"{i}?", "answer": f"It is {i}.\n#### {i}"} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = ppo.GSM8K(str(path))
    for seed, i in enumerate(random.Random(0).sample(range(24), 24)):
        prompt, info = env.reset(seed=seed)
        assert prompt == f"{i}?\n\nThink step by step. End with a line of the form: #### number"
        assert info["demonstration"] == rows[i]["answer"]
        assert env.step(f"#### {i}.0") == ("", 1.0, True, False, {"success": True})
        assert env.step("#### 99") == env.step(f"{i}") == ("", 0.0, True, False, {"success": False})


@pytest.mark.parametrize(("reward", "right"), [
    (lambda *_: 2, True), (lambda *_: -0.5, False), (lambda *_: torch.tensor(0.25), True), (lambda *_: True, True),
    (lambda *_: (-0.5, True), True), (lambda *_: (0.5, False), False), (None, False),
])  # fmt: skip
def test_reward_functions_return_a_number_or_number_and_success(run, tmp_path, monkeypatch, reward, right):
    """A number alone counts as success if it is above 0. Without a function all rewards are 0."""
    monkeypatch.setitem(sys.modules, "judge", types.SimpleNamespace(reward=reward))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab="}')
    kwargs = {"path": str(tmp_path / "rows.jsonl")} | ({"reward": "judge:reward"} if reward else {})
    batch = run(env_id="Prompts-v0", env_kwargs=json.dumps(kwargs), num_iterations=1).batches[0]
    value = reward() if reward else 0
    assert batch.success == [right] * 8
    assert batch.rewards.sum(1).tolist() == [float(value[0] if isinstance(value, tuple) else value)] * 8


def test_a_run_on_prompts_and_rewards_of_the_working_directory(ppo, tmp_path):
    """As a user starts it, with the script elsewhere. The evaluation has another file and the same function."""
    (tmp_path / "judge.py").write_text("def reward(prompt, response, row):\n    return row['value'], row['right']\n")
    for name, value in (("train", 0.25), ("test", 0.75)):
        rows = [dict(prompt=f"{name}{i}", demonstration="ab", value=value, right=name == "test") for i in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = SMALL | dict(
        env_id="Prompts-v0", env_kwargs='{"path": "train.jsonl", "reward": "judge:reward"}', sft_steps=1,
        eval_env_kwargs='{"path": "test.jsonl"}', log_dir=".", run_name="run")  # fmt: skip
    command = [sys.executable, ppo.__file__, *(f"--{k.replace('_', '-')}={v}" for k, v in flags.items())]
    result = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True)
    assert result.returncode == 0 and "warm start: 1 steps" in result.stdout, result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["eval_after"]["accuracy"] == 1.0
    rewards = [(row["objective/reward"], row["objective/accuracy"]) for row in lines(tmp_path / "run")]
    assert rewards == [(0.25, 0.0)] * 2


def test_every_epoch_visits_every_sample_once_in_a_new_order(ppo, run):
    experience = run().experiences[0]
    ranks, args, orders = ppo.World(torch.device("cpu")), ppo.Args(train_batch_size=4), set()
    experience = dataclasses.replace(experience, extras={"row": torch.arange(8)})
    for iteration in (0, 1):
        experience = dataclasses.replace(experience, iteration=iteration)
        parts = [part for _, part in ppo.minibatches(experience, 2, args, ranks)]
        order = [frozenset(row for mb in part for row in mb.extras["row"].tolist()) for part in parts]
        for epoch in (order[:2], order[2:]):
            assert [len(rows) for rows in epoch] == [4, 4] and epoch[0] | epoch[1] == set(range(8))
            orders.add(tuple(epoch))
    assert len(orders) == 4


def test_data_of_forks_stay_with_their_samples(ppo, tmp_path):
    """Extras [N] and [N, T] go over ranks, through `select` and into the microbatches; another shape is an error."""
    collect, getitem, differences = ppo.play, ppo.Experience.__getitem__, []

    def play(sampler, tokenizer, envs, seeds, iteration, *rest, **kwargs):
        batch = collect(sampler, tokenizer, envs, seeds, iteration, *rest, **kwargs)
        if iteration < 0:
            return batch
        batch.extras = {"first": batch.tokens[:, 0].clone(), "copy": 10 * batch.tokens}
        short = {name: getattr(batch, name)[:, :7] for name in ("tokens", "mask", "logprobs", "rewards")}
        extras = {name: x[..., :7] if x.ndim > 1 else x for name, x in batch.extras.items()}
        other = dataclasses.replace(batch, **short, extras=extras)  # as of a rank whose longest sample is shorter
        both = ppo.concatenate([other, batch])
        return ppo.select(both, list(range(8, 16)), ppo.validate(ppo.Args(**SMALL)))

    def watched(experience, rows):
        mb = getitem(experience, rows)
        differences.append((mb.tokens[:, 0] - mb.extras["first"]).abs().sum())
        differences.append((10 * mb.tokens - mb.extras["copy"]).abs().sum())
        return mb

    with mock.patch.object(ppo, "play", play), mock.patch.object(ppo.Experience, "__getitem__", watched):
        record(ppo, tmp_path, micro_batch_tokens=30)
    assert len(differences) > 40 and not any(differences)
    x, lengths = torch.zeros(2, 5), torch.tensor([5, 5])
    for extra in (torch.zeros(2, 4), torch.zeros(3), torch.zeros(2, 5, 1)):
        batch = ppo.Rollout(x, x > 0, x, x, lengths, ["eos"] * 2, [], {}, [], [], [], {"x": extra})
        with pytest.raises(ppo.UserError, match=r"extras: x is \[.*\]: must be \[N\] or \[N, T\]"):
            ppo.Experience.from_rollout(batch, torch.device("cpu"))


@pytest.mark.parametrize("flags", [
    dict(micro_batch_tokens=30), dict(activation_checkpointing=True), dict(rollout_slots=3), dict(max_prompt_tokens=40),
])  # fmt: skip
def test_what_saves_memory_does_not_change_a_run(ppo, run, tmp_path, flags):
    original, blocks = ppo.Block.forward, collections.Counter()

    def forward(*args):
        scoring = any(frame.name == "forward_all" for frame in traceback.extract_stack())
        blocks[torch.is_grad_enabled() and not scoring] += 1
        return original(*args)

    common = dict(bootstrap_truncated=True, entropy_coef=0.01)
    plain = run(**common)
    with mock.patch.object(ppo.Block, "forward", forward):
        other = record(ppo, tmp_path, **common, **flags)
    assert_same_metrics(plain.rows, other.rows)
    assert torch.allclose(weights(plain.models["actor"]), weights(other.models["actor"]), atol=1e-4)
    minibatches, microbatches = (len(x.calls["policy_loss"] + x.calls["value_loss"]) for x in (plain, other))
    assert (microbatches > minibatches) == ("micro_batch_tokens" in flags)
    assert blocks[True] == 2 * microbatches * (2 if "activation_checkpointing" in flags else 1)  # two layers


@pytest.mark.both
@pytest.mark.parametrize("flags", [dict(), dict(env_id="environments:TwoTurns-v0", temperature=0.6)])
@pytest.mark.parametrize("recompute", [True, False])
def test_first_ratio_is_one_and_then_moves(run, flags, recompute):
    """With the sampler's log-probs, too: it computes what the trainer does, temperature included."""
    seen = run(recompute_old_logprobs=recompute, **flags)
    for row in seen.rows:
        steps = row["ratio/steps"]
        assert steps[0]["dev_max"] < 1e-5 and steps[0]["ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert row["ratio/first_dev"] == steps[0]["dev_max"] and row["ratio/last_dev"] == steps[-1]["dev_max"] > 1e-3
        assert ("debug/sampler_trainer_logprob_diff" in row) == recompute
        assert row.get("debug/sampler_trainer_logprob_diff", 0.0) < 1e-5


def biased_rollout(ppo, shift):
    """`rollout` by a sampler whose log-probs are off by `shift`."""
    bias = lambda batch: dataclasses.replace(batch, logprobs=torch.where(batch.mask, batch.logprobs + shift, 0.0))
    return mock.patch.object(ppo, "rollout", changed(ppo.rollout, bias))


@pytest.mark.parametrize("flags", [{}, dict(target_kl=1e-3)])  # which allows no step
def test_sampler_that_is_taken_for_the_old_policy_ends_the_run_if_it_is_another(ppo, tmp_path, flags):
    with biased_rollout(ppo, 0.1), pytest.raises(ppo.UserError, match=r"ratio.* is off.*(0\.095|9\.5e-02)"):
        record(ppo, tmp_path, recompute_old_logprobs=False, **flags)  # 1 - exp(-0.1)


@pytest.mark.parametrize(("shift", "weight"), [(math.log(2), 0.5), (-math.log(2), 1.5)])
def test_recomputed_old_logprobs_and_truncated_importance_weights(ppo, run, tmp_path, shift, weight):
    with biased_rollout(ppo, shift):
        seen = record(ppo, tmp_path, num_iterations=1, rollout_is_cap=1.5)
    assert seen.rows[0]["debug/sampler_trainer_logprob_diff"] == pytest.approx(abs(shift), rel=1e-3)
    assert seen.rows[0]["ratio/first_dev"] < 1e-5
    assert torch.allclose(seen.experiences[0].advantages, weight * run().experiences[0].advantages, atol=1e-4)


@pytest.mark.parametrize(("kind", "kl"), [
    ("k1", lambda x: x), ("k2", lambda x: x**2 / 2), ("k3", lambda x: (-x).exp() - 1 + x)])  # fmt: skip
def test_kl_in_the_reward_is_taken_from_every_sampled_token(run, kind, kl):
    seen = run(kl_coef=5.0, kl_estimator=kind)
    batch, experience, rewards = seen.batches[1], seen.experiences[1], seen.calls["compute_gae"][1]["rewards"]
    logratio = experience.old_logprobs - experience.ref_logprobs
    assert (logratio[batch.mask].abs() > 1e-6).all() and not logratio[~batch.mask].any()
    assert torch.allclose(rewards, batch.rewards - 5.0 * kl(logratio), atol=1e-6)
    assert torch.equal(experience.sample_rewards, batch.rewards.sum(1))  # the logged reward is without it
    assert seen.rows[1]["objective/kl"] == pytest.approx(float(logratio.sum(1).mean()), abs=1e-6)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_kl_in_the_loss_leaves_rewards_alone_and_holds_the_actor(run, kind):
    free, held = (run(kl_coef=x, kl_in="loss", kl_estimator=kind) for x in (1e-6, 100.0))
    for call, batch in zip(held.calls["compute_gae"], held.batches, strict=True):
        assert torch.equal(call["rewards"], batch.rewards)
    assert 0 <= held.rows[-1]["losses/kl_loss"] < 0.5 * free.rows[-1]["losses/kl_loss"]


def test_kl_in_the_loss_is_that_of_the_tokens_in_the_mask_of_the_actor(ppo, tmp_path):
    """A fork may train the actor on fewer tokens than the experience has."""

    def halved(experience):
        mask = experience.cpu_mask.clone()
        mask[:, ::2] = False
        return dataclasses.replace(experience, cpu_mask=mask)

    every = ppo.minibatches
    fewer = lambda experience, *args: every(halved(experience), *args)
    with mock.patch.object(ppo, "minibatches", fewer):
        seen = record(ppo, tmp_path, num_iterations=1, kl_coef=1.0, kl_in="loss")
    assert abs(seen.rows[0]["ratio/steps"][0]["kl_loss"]) < 1e-6  # the reference is still the actor
    assert seen.rows[0]["losses/kl_loss"] > 1e-5


def test_reference_starts_as_the_actor_and_takes_it_in_when_asked(ppo, run):
    seen = run(num_iterations=3, kl_coef=0.1, ref_sync_every=2, ref_sync_alpha=0.25)
    actors, references = ([entry[name] for entry in seen.weights] for name in ("actor", "reference"))
    assert torch.equal(references[0], actors[0]) and torch.equal(references[1], actors[0])
    assert torch.allclose(references[2], 0.25 * actors[2] + 0.75 * actors[0], atol=1e-7)
    args = ppo.Args(ref_sync_every=2, ref_sync_alpha=0.25, critic_lr=1e-3)
    assert "in the reward; moves by 0.25 every 2 iterations" in ppo.step_table(args, ppo.validate(args))
    assert run().models["reference"] is None and not any(row.get("objective/kl") for row in run().rows)  # kl_coef 0


def test_truncated_rows_pay_the_missing_eos_penalty_and_end_with_their_value(run):
    seen = run(missing_eos_penalty=0.5, max_new_tokens=4, bootstrap_truncated=True)
    batch, call = seen.batches[1], seen.calls["compute_gae"][1]
    cut = torch.tensor([stop == "length" for stop in batch.stop])
    rewards = batch.rewards.clone()
    rewards[cut, batch.lengths[cut] - 1] -= 0.5
    assert 0 < cut.sum() < 8 and torch.equal(call["rewards"], rewards)
    critic = seen.models["critic"]
    torch.nn.utils.vector_to_parameters(seen.weights[1]["critic"], critic.parameters())
    for i, length in enumerate(batch.lengths.tolist()):
        value = float(critic(batch.tokens[i : i + 1, :length])[0, -1].detach())
        assert abs(value) > 1e-4 and float(call["bootstrap"][i]) == pytest.approx(value if cut[i] else 0, abs=1e-6)
    assert run().calls["compute_gae"][1]["bootstrap"] == 0


def test_advantages_are_whitened_over_the_rollout_and_returns_are_not(ppo, run, tmp_path):
    for call, experience in zip(run().calls["compute_gae"], run().experiences, strict=True):
        raw, returns = ppo.compute_gae(**call)
        advantages = experience.advantages[experience.mask]
        assert float(advantages.mean()) == pytest.approx(0, abs=1e-5)
        assert float(advantages.std()) == pytest.approx(1, rel=1e-3)
        assert torch.equal(experience.returns, returns) and abs(float(raw[experience.mask].std()) - 1) > 0.1
    rounding = changed(ppo.compute_gae, lambda result: (result[0] * 1e-8, result[1]))  # is not to be blown up
    with mock.patch.object(ppo, "compute_gae", rounding):
        assert not any(e.advantages.any() for e in record(ppo, tmp_path).experiences)


def test_values_that_are_not_finite_skip_steps_and_are_counted(ppo, tmp_path):
    """They must not pass for advantages without a spread, which are set to 0."""
    broken = changed(ppo.compute_gae, lambda result: (result[0] * math.nan, result[1]))
    with mock.patch.object(ppo, "compute_gae", broken):
        seen = record(ppo, tmp_path)
    assert [row["grad/skipped_actor"] for row in seen.rows] == [STEPS, STEPS]
    assert {row["ratio/diagnosis"] for row in seen.rows} == {"steps_skipped"}


def test_flags_reach_the_mathematics(run):
    flags = dict(clip_low=0.1, clip_high=0.3, dual_clip=4.0, value_clip=0.7, gamma=0.9, gae_lambda=0.8)
    seen = run(**flags, max_grad_norm=0.01)
    for name in ("clip_low", "clip_high", "dual_clip"):
        assert {call[name] for call in seen.calls["policy_loss"]} == {flags[name]}
    assert {(call["gamma"], call["gae_lambda"]) for call in seen.calls["compute_gae"]} == {(0.9, 0.8)}
    assert {call["clip"] for call in seen.calls["value_loss"]} == {0.7}
    assert all(norm == pytest.approx(0.01, rel=1e-3) for *_, norm in seen.steps)
    assert seen.rows[0]["grad/actor_norm"] > 0.1 < seen.rows[0]["grad/critic_norm"]  # before clipping


def test_target_kl_ends_the_actor_steps_before_the_one_that_exceeds_it(run):
    flags = dict(num_iterations=1, ppo_epochs=4, actor_lr=1e-3)
    approx_kls = [step["approx_kl"] for step in run(**flags).rows[0]["ratio/steps"]]
    stop = next(i for i in range(2, 8) if approx_kls[i] > 1.1 * max(approx_kls[:i]))
    seen = run(**flags, target_kl=(approx_kls[stop] + max(approx_kls[:stop])) / 2)
    assert [step["approx_kl"] for step in seen.rows[0]["ratio/steps"]] == approx_kls[:stop]
    assert seen.rows[0]["ratio/early_stop"] == pytest.approx(approx_kls[stop])  # what ended them is logged
    assert "ratio/early_stop" not in run(**flags).rows[0]
    assert [name for name, *_ in seen.steps] == ["critic"] * 8 + ["actor"] * stop


def test_entropy_bonus_raises_entropy(run):
    flags = dict(env_id="environments:Constant-v0", env_kwargs='{"reward": 0.0}')  # nothing else moves the actor
    before, after = run(**flags, sft_steps=20, actor_lr=1e-3, entropy_coef=0.5).rows
    assert after["losses/entropy"] > before["losses/entropy"] + 0.05


def test_temperature_divides_the_logits_of_reference_and_entropy_too(ppo, run):
    seen = run(temperature=0.3, kl_coef=0.1, sft_steps=20, num_iterations=1, train_batch_size=8, ppo_epochs=1)
    assert abs(seen.rows[0]["objective/kl"]) < 1e-5
    actor, experience = ppo.Transformer(seen.models["actor"].config), seen.experiences[0]
    torch.nn.utils.vector_to_parameters(seen.weights[0]["actor"], actor.parameters())
    logits = actor(experience.tokens)[:, :-1][experience.mask[:, 1:]].detach() / 0.3
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert seen.rows[0]["losses/entropy"] == pytest.approx(float(entropy), rel=1e-4)


def nan_loss(ppo, bad):
    """policy_loss with a loss that is NaN in the calls of `bad`."""
    calls = itertools.count()
    spoil = lambda result: (result[0] * (math.nan if next(calls) in bad else 1.0), result[1])
    return mock.patch.object(ppo, "policy_loss", changed(ppo.policy_loss, spoil))


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted(ppo, tmp_path):
    with nan_loss(ppo, bad=[1]):
        seen = record(ppo, tmp_path)
    assert [row["grad/skipped_actor"] for row in seen.rows] == [1, 0]
    assert [row["charts/actor_steps"] for row in seen.rows] == [STEPS, 2 * STEPS]
    assert [name for name, *_ in seen.steps].count("actor") == 2 * STEPS - 1
    assert [step["skipped"] for step in seen.rows[0]["ratio/steps"]] == [0, 1, 0, 0]
    assert weights(seen.models["actor"]).isfinite().all()
    made = [step for step in seen.rows[0]["ratio/steps"] if not step["skipped"]]
    for name, metric in (("policy_loss", "losses/policy_loss"), ("grad_norm", "grad/actor_norm")):
        mean = sum(step[name] * step["tokens"] for step in made) / sum(step["tokens"] for step in made)
        assert seen.rows[0][metric] == pytest.approx(mean)  # over tokens, without the skipped step


@pytest.mark.parametrize(("flags", "bad", "iterations"), [
    (dict(num_iterations=10), range(100), 20 / STEPS),
    (dict(ppo_epochs=12), range(20), 1),  # the last steps of the iteration are fine
])  # fmt: skip
def test_many_bad_gradients_in_a_row_end_the_run(ppo, tmp_path, flags, bad, iterations):
    """20 of the actor, although the critic's steps between them are fine."""
    with nan_loss(ppo, bad=bad), pytest.raises(ppo.UserError, match="20 non-finite gradients in a row"):
        record(ppo, tmp_path, **flags)
    assert len(lines(tmp_path / "run")) == iterations  # valid JSON
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.both
def test_prompts_run_on_and_evaluation_is_on_held_out_ones_at_temperature_one(run):
    seen = run(n_samples_per_prompt=2, rollout_batch_size=4, env_id="SortDigits-v0", eval_episodes=30, temperature=0.5)
    first, second = (batch.prompts for batch in seen.batches)
    assert first[0::2] == first[1::2] and len(set(first)) == 4 and not set(first) & set(second)
    held_out = lambda prompt: zlib.crc32(prompt[:-1].encode()) % 10 == 0
    assert [(args.temperature, greedy) for _, args, greedy in seen.evaluations] == [(1.0, False), (1.0, True)] * 2
    assert all(map(held_out, seen.evaluations[0][0].prompts)) and not any(map(held_out, first + second))
    assert all(batch.prompts == seen.evaluations[0][0].prompts for batch, _, _ in seen.evaluations)


@pytest.mark.both
def test_evaluations_on_the_way_are_logged_and_change_nothing(run):
    plain, seen = (run(num_iterations=5, eval_every=n, env_id="environments:TwoTurns-v0") for n in (0, 2))
    assert len(plain.evaluations) == 2 * 2 and len(seen.evaluations) == 2 * 4  # sampled and greedy
    evaluated = {row["iteration"]: row["eval/reward"] for row in seen.rows if "eval/reward" in row}
    rewards = [float(batch.rewards.sum()) / 2 for batch, _, greedy in seen.evaluations if not greedy]
    assert evaluated == {2: rewards[1], 4: rewards[2]}
    for row in seen.rows:
        for name in [name for name in row if name.startswith("eval/")]:
            del row[name]
    assert without_clock(seen.rows) == without_clock(plain.rows)
    assert all(torch.equal(x.tokens, y.tokens) for x, y in zip(plain.batches, seen.batches, strict=True))
    for name in "eval_before", "eval_after":
        assert seen.summary[name] == plain.summary[name]


def test_the_last_evaluation_is_not_made_twice(run):
    seen = run(num_iterations=2, eval_every=1)
    assert len(seen.evaluations) == 2 * 3 and "eval/accuracy" not in seen.rows[0]


def test_warm_start_teaches_the_demonstrations_and_their_end(run):
    before, after = (run(num_iterations=1, sft_lr=3e-3, sft_steps=n).evaluations[1][0] for n in (0, 60))  # greedy
    assert set(after.texts) == {"fab"} and set(after.stop) == {"eos"} and "fab" not in before.texts


def test_run_folder_holds_what_it_should(ppo, tmp_path):
    seen = record(ppo, tmp_path, tensorboard=True, rollout_batch_size=12)
    folder, summary = seen.folder, seen.summary
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert summary["status"] == "completed" and summary["iterations"] == len(seen.rows) == 2
    for when in ("eval_before", "eval_after"):
        assert set(summary[when]) == {"accuracy", "greedy_accuracy", "reward", "response_tokens"}
    args = json.loads((folder / "config.json").read_text())["args"]
    assert args["critic_lr"] == 1e-3 and args["rollout_batch_size"] == 12  # with what None has become
    completions = lines(folder, "completions")
    assert len(completions) == 2 * 4 and completions[0]["prompt"] == seen.batches[0].prompts[0]
    assert set(completions[0]) == {"iteration", "prompt", "response", "reward", "stop", "n_tokens", "kl"}
    events = EventAccumulator(str(folder)).Reload()
    for name in ("objective/reward", "losses/value_loss", "ratio/last_dev"):
        assert [x.value for x in events.Scalars(name)] == pytest.approx([row[name] for row in seen.rows])
    actor, _ = ppo.load_hf_checkpoint(folder / "model")
    assert torch.equal(weights(actor), weights(seen.models["actor"]))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ppo.UserError, match=r"--run-name: \S*run exists"):
        record(ppo, tmp_path)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
