"""The training loop, run for real on the embedded model: what takes effect, and what does not change results."""

import collections
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import math
import random
import re
import subprocess
import sys
import types
import zlib
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from distributed_worker import on_call
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import LlamaConfig

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


WATCHED = "make_optimizer rollout make_experience compute_gae policy_loss value_loss kl_estimate print0".split()


def record(ppo, folder, tensorboard=False, **flags):
    """Train in folder/run. Returns results and what was seen on the way.

    steps: (model, learning rate, norm of the gradient) of every optimizer.step(); calls[function]: arguments, result;
    weights: {model: after the rollout}, episodes and experiences of every iteration; evaluations: (episodes, args).
    """
    calls = collections.defaultdict(list)
    run = types.SimpleNamespace(steps=[], weights=[], calls=calls, folder=folder / flags.get("run_name", "run"))
    models = lambda: {key: calls["make_experience"][0][key] for key in ("actor", "critic", "reference")}

    def watched(name):
        original = getattr(ppo, name)

        def wrapper(*args, **kwargs):
            result = original(*args, **kwargs)
            call = inspect.signature(original).bind(*args, **kwargs).arguments
            calls[name].append(call | {"result": result})
            if name == "make_experience":
                run.weights.append({key: weights(model) for key, model in models().items() if model})
            if name == "make_optimizer":
                key = "actor" if call["model"].head == "lm" else "critic"
                norm = lambda: float(flat(p.grad for p in call["model"].parameters() if p.grad is not None).norm())
                step = lambda *_: run.steps.append((key, result.param_groups[0]["lr"], norm()))
                result.register_step_post_hook(step)
            return result

        return wrapper

    patches = {name: watched(name) for name in WATCHED} | {"SFT_BATCH_SIZE": 16}
    if not tensorboard:  # its files cost more than the run
        patches["SummaryWriter"] = mock.Mock()
    args = ppo.Args(**(SMALL | dict(log_dir=str(folder), run_name="run") | flags))
    given = dataclasses.replace(args)
    with mock.patch.multiple(ppo, **patches):
        try:
            run.summary = ppo.train(args)
        except SystemExit as end:
            run.code = end.code
    assert args == given  # the caller's
    calls["compute_gae"] = calls["compute_gae"][::2]  # of advantages; others are of returns
    run.models, run.rows = models(), lines(run.folder)
    run.printed = [call["text"] for call in calls["print0"]]
    run.experiences, run.episodes = ([call[key] for call in calls["make_experience"]] for key in ("result", "episodes"))
    run.evaluations = [(call["result"], call["args"]) for call in calls["rollout"] if call["iteration"] < 0]
    return run


@pytest.fixture
def run(ppo, tmp_path_factory):
    """run(**flags) is such a record; where something is patched, use `record`."""
    return lambda **flags: record(ppo, tmp_path_factory.mktemp("run"), **flags)


def without_clock(rows):
    return [{name: x for name, x in row.items() if not name.startswith(("time/", "perf/"))} for row in rows]


def assert_same_metrics(rows, others, tolerance=1e-5):
    """Their numbers, but for the clock."""
    numbers = []
    for run in without_clock(rows), without_clock(others):
        parts = [part for row in run for part in (row, *row["ratio/steps"])]
        numbers.append({(i, name): x for i, part in enumerate(parts) for name, x in part.items()
                        if isinstance(x, int | float)})  # fmt: skip
    assert len(numbers[0]) > 20 and numbers[0] == pytest.approx(numbers[1], rel=1e-3, abs=tolerance)


@pytest.mark.parametrize(("flags", "actor", "critic"), [
    (dict(), 2 * 2 * 2, 2 * 2 * 2),  # iterations, epochs, minibatches
    (dict(rollout_batch_size=6, n_samples_per_prompt=2, train_batch_size=3, ppo_epochs=1, critic_epochs=3), 8, 24),
    (dict(rollout_batch_size=1, train_batch_size=1, max_new_tokens=1), 4, 4),  # one sample of one token
])  # fmt: skip
def test_counted_optimizer_steps_are_those_of_the_plan(ppo, run, flags, actor, critic):
    seen = run(**flags)
    names = [name for name, *_ in seen.steps]
    args = ppo.fill_in_defaults(ppo.Args(**(SMALL | flags)))
    plan = ppo.plan_steps(args)
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    assert plan.update_steps == samples * args.ppo_epochs / args.train_batch_size
    assert plan.update_steps * plan.actor_iterations == actor
    assert plan.critic_steps * args.num_iterations == critic
    assert (names.count("actor"), names.count("critic")) == (actor, critic)
    assert [name for name, _ in itertools.groupby(names)][:2] == ["critic", "actor"]
    assert seen.summary["update_steps"] == sum(len(row["ratio/steps"]) for row in seen.rows) == actor
    [printed] = [text for text in seen.printed if "optimizer steps" in text]
    assert f" samples = {plan.update_steps} optimizer steps\n  warm-up" in printed


def test_critic_warmup_leaves_the_actor_and_its_schedule_alone_for_exactly_k_iterations(run):
    seen = run(num_iterations=4, critic_warmup_iterations=2, lr_end=0.2, actor_lr=1e-3, critic_lr=2e-3)
    actors, critics = ([entry[name] for entry in seen.weights] for name in ("actor", "critic"))
    assert torch.equal(actors[0], actors[2]) and not torch.equal(actors[2], actors[3])
    assert not torch.equal(critics[0], critics[1])
    body = len(critics[0]) - 64  # without the head, which comes last
    assert torch.equal(critics[0][:body], actors[0][:body]) and not critics[0][body:].any()
    assert [len(row["ratio/steps"]) for row in seen.rows] == [0, 0, STEPS, STEPS]
    rates = {name: [lr for model, lr, _ in seen.steps if model == name] for name in ("actor", "critic")}
    assert rates["actor"] == pytest.approx([1e-3 * (1 - 0.8 * step / 8) for step in range(8)])
    assert rates["critic"] == pytest.approx([2e-3 * (1 - 0.8 * step / 16) for step in range(16)])


def test_a_critic_of_no_epochs_is_none_with_values_of_0(ppo, tmp_path):
    none, still = (record(ppo, tmp_path, run_name=name, save_every=2, **flags) for name, flags in (
        ("none", dict(critic_epochs=0)), ("still", dict(critic_lr=0.0))))  # fmt: skip
    assert none.models["critic"] is None and not (none.folder / "critic").exists()
    assert none.steps == [step for step in still.steps if step[0] == "actor"] and len(none.steps) == 2 * STEPS
    for e, other in zip(none.experiences, still.experiences, strict=True):
        assert not e.values.any() and torch.equal(e.advantages, other.advantages)
    resumed = record(ppo, tmp_path, run_name="none", num_iterations=3, resume="auto", critic_epochs=0)
    assert len(resumed.rows) == 3


def test_every_epoch_visits_every_sample_once_in_a_new_order(ppo):
    lengths, tokens, orders = torch.arange(8) + 1, torch.zeros(8, 8), set()  # lengths tell the samples apart
    experience = ppo.Experience(
        tokens=tokens.long(), mask=tokens == 0, sampler_logprobs=tokens, rewards=tokens, lengths=lengths)
    for iteration, epoch, seed in itertools.product((0, 1), (0, 1), (0, 1)):
        args = ppo.Args(train_batch_size=4, device="cpu", seed=seed)
        parts = [part for _, part in ppo.minibatches(experience, epoch, ppo.TrainState(iteration), args)]
        order = [tuple(length for mb in part for length in mb.lengths.tolist()) for part in parts]
        assert [len(part) for part in order] == [4, 4] and sorted(order[0] + order[1]) == lengths.tolist()
        orders.add(tuple(order))
    assert len(orders) == 8


def test_what_saves_memory_does_not_change_a_run(ppo, tmp_path):
    """Losses, gradients and metrics of a minibatch are those of its microbatches together."""
    seen, forward = [], ppo.Block.forward
    for flags in (dict(), dict(micro_batch_tokens=30), dict(activation_checkpointing=True)):
        count = itertools.count()
        flags |= dict(entropy_coef=0.01, kl_coef=0.1, kl_loss="k3", value_clip=0.5, max_grad_norm=100.0, sft_steps=1)
        with mock.patch.object(ppo.Block, "forward", lambda *args, count=count: next(count) < 0 or forward(*args)):
            seen.append((record(ppo, tmp_path, run_name=str(len(seen)), **flags), next(count)))
    (plain, forwards), *others = seen
    for other, more_forwards in others:
        assert_same_metrics(plain.rows, other.rows)
        assert [norm for *_, norm in plain.steps] == pytest.approx([norm for *_, norm in other.steps], rel=1e-3)
        assert torch.allclose(weights(plain.models["actor"]), weights(other.models["actor"]), atol=1e-4)
        assert more_forwards > 1.2 * forwards


def test_flags_reach_the_mathematics(run):
    flags = dict(clip_low=0.1, clip_high=0.3, dual_clip=4.0, value_clip=0.7, gamma=0.9, gae_lambda=0.8)
    seen = run(**flags, max_grad_norm=0.01)
    for call in seen.calls["policy_loss"]:
        assert (call["clip_low"], call["clip_high"], call["dual_clip"]) == (0.1, 0.3, 4.0)
        assert call["denom"] == call["mask"].sum()  # of a minibatch that is one microbatch
    assert {(call["gamma"], call["gae_lambda"]) for call in seen.calls["compute_gae"]} == {(0.9, 0.8)}
    assert {call["clip"] for call in seen.calls["value_loss"]} == {0.7}
    assert all(norm == pytest.approx(0.01, rel=1e-3) for *_, norm in seen.steps)
    assert seen.rows[0]["actor/grad_norm"] > 0.1 < seen.rows[0]["critic/grad_norm"]  # before clipping


def test_target_kl_ends_the_actor_steps_before_the_one_that_exceeds_it(run):
    flags = dict(num_iterations=1, ppo_epochs=4, actor_lr=1e-3)
    approx_kls = [step["approx_kl"] for step in run(**flags).rows[0]["ratio/steps"]]
    stop = next(i for i in range(2, 8) if approx_kls[i] > 1.1 * max(approx_kls[:i]))
    seen = run(**flags, target_kl=(approx_kls[stop] + max(approx_kls[:stop])) / 2)
    assert [step["approx_kl"] for step in seen.rows[0]["ratio/steps"]] == approx_kls[:stop]
    assert [name for name, *_ in seen.steps] == ["critic"] * 8 + ["actor"] * stop
    assert len(seen.calls["policy_loss"]) == stop + 1 < 8  # all epochs end, and leave no gradient
    assert [name for name, *_ in run(**flags, target_kl=0.0).steps].count("actor") == 1  # 0 is a limit, too
    assert seen.rows[0]["ratio/early_stop_kl"] == approx_kls[stop]
    assert not any(p.grad is not None and p.grad.any() for p in seen.models["actor"].parameters())


def test_every_step_begins_without_a_gradient(run):
    """With learning rates of 0 and a minibatch of all samples, the steps of a model have the same gradient."""
    steps = run(num_iterations=1, train_batch_size=8, ppo_epochs=3, actor_lr=0, critic_lr=0, max_grad_norm=9.0).steps
    for model in ("actor", "critic"):
        norms = [norm for name, _, norm in steps if name == model]
        assert norms[0] > 0 and norms == pytest.approx(3 * norms[:1], rel=1e-3)


def test_every_epoch_learns_from_the_experience_as_it_is(run):
    seen = run(value_clip=0.1)
    for i, experience in enumerate(seen.experiences):
        fields = dict(policy_loss=("old_logprobs", "advantages"), value_loss=("old_values", "returns"))
        for function, names in fields.items():
            calls = seen.calls[function][STEPS * i : STEPS * (i + 1)]
            for name, epoch in itertools.product(names, (calls[:2], calls[2:])):
                used = torch.cat([call[name][call["mask"]] for call in epoch])
                expected = getattr(experience, name.replace("old_values", "values"))[experience.mask]
                torch.testing.assert_close(used.sort().values, expected.sort().values)


def test_a_fork_may_leave_tokens_out_of_the_mask(ppo, tmp_path, capsys):
    minibatches = ppo.minibatches
    even = lambda experience: experience.mask & (torch.arange(len(experience.mask)) % 2 == 0)[:, None]
    narrowed = lambda experience, *rest: minibatches(dataclasses.replace(experience, mask=even(experience)), *rest)
    with mock.patch.object(ppo, "minibatches", narrowed):
        seen = record(ppo, tmp_path, kl_coef=0.1, kl_loss="k3")
    assert abs(seen.rows[0]["ratio/steps"][0]["kl_loss"]) < 1e-5  # the reference is the actor
    assert "critic: its first values" not in capsys.readouterr().out


def test_evaluations_have_noise_and_environments_of_their_own_and_the_newest_weights(run):
    seen = run(env_id="environments:Constant-v0", env_kwargs='{"reward": 1}', eval_env_kwargs='{"reward": 2}')
    assert [call["iteration"] for call in seen.calls["rollout"]] == [-1, -1, 0, 1, -3, -3]
    assert {row["objective/reward"] for row in seen.rows} == {1} and seen.summary["eval_before"]["reward"] == 2
    assert torch.equal(weights(seen.calls["rollout"][-1]["decoder"].sampler), weights(seen.models["actor"]))


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted(ppo, tmp_path):
    calls = itertools.count()
    spoil = lambda result: (result[0] * (math.nan if next(calls) == 1 else 1.0), result[1])
    with mock.patch.object(ppo, "policy_loss", changed(ppo.policy_loss, spoil)):
        seen = record(ppo, tmp_path)
    assert [step["skipped"] for step in seen.rows[0]["ratio/steps"]] == [0, 1, 0, 0]
    assert [row["actor/skipped"] for row in seen.rows] == [1 / STEPS, 0]
    assert [name for name, *_ in seen.steps].count("actor") == 2 * STEPS - 1
    assert weights(seen.models["actor"]).isfinite().all()


def test_entropy_bonus_raises_entropy(run):
    flags = dict(env_id="environments:Constant-v0", env_kwargs='{"reward": 0.0}')  # nothing else moves the actor
    before, after = run(**flags, sft_steps=20, actor_lr=1e-3, entropy_coef=0.5).rows
    assert after["actor/entropy"] > before["actor/entropy"] + 0.05


def test_an_entropy_without_a_coefficient_is_not_in_the_loss(ppo, tmp_path):
    """So one that is NaN, as after a truncation that makes logits -inf, does no harm."""
    spoiled = changed(ppo.chunk_logprobs, lambda outputs: (outputs[0], outputs[1] * math.nan))
    with mock.patch.object(ppo, "chunk_logprobs", spoiled):
        seen = record(ppo, tmp_path)
    assert [row["actor/skipped"] for row in seen.rows] == [0, 0]
    assert "actor/entropy" not in seen.rows[0]  # which is not finite


def test_the_line_of_an_iteration_names_the_share_of_samples_without_a_reward(ppo, tmp_path, capsys):
    """A function without a return gives None. The first of two iterations has no reward, and the second has all."""
    step, steps = ppo.checked_step, itertools.count()
    some = lambda text, reward, *rest: (text, reward if next(steps) >= 8 else None, *rest)
    with mock.patch.object(ppo, "checked_step", lambda *args: some(*step(*args))):
        seen = record(ppo, tmp_path, eval_episodes=0)
    assert [row["objective/unscored"] for row in seen.rows] == [1, 0]
    text = capsys.readouterr().out
    assert "1/2: reward 0.000, accuracy 0.0%, 0.0 tokens, 100% without a reward, KL" in text
    assert text.count("without a reward") == 1 and "ratio: empty_mask: no token is trained on. Are all rewards" in text


def test_a_fork_may_train_on_no_sample_and_the_log_is_of_all(ppo, tmp_path):
    minibatches, diagnose, nothing = ppo.minibatches, ppo.diagnose_ratio, torch.arange(0)
    patches = dict(minibatches=lambda e, *rest: minibatches(e.select(nothing), *rest),
                   diagnose_ratio=lambda a, e, *rest: diagnose(a, e.select(nothing), *rest))  # fmt: skip
    with mock.patch.multiple(ppo, **patches):
        seen = record(ppo, tmp_path)
    assert not seen.steps and torch.equal(*(entry["actor"] for entry in seen.weights))
    for row, episodes in zip(seen.rows, seen.episodes, strict=True):
        assert row["ratio/steps"] == [] and row["ratio/diagnosis"] == "empty_mask"
        assert row["objective/response_tokens"] == sum(sum(e.mask) for e in episodes) / 8


def test_reference_stays_the_actor_of_the_start(run):
    seen = run(num_iterations=3, kl_coef=0.1)
    actors, references = ([entry[name] for entry in seen.weights] for name in ("actor", "reference"))
    assert all(torch.equal(reference, actors[0]) for reference in references)
    assert not torch.equal(actors[2], actors[0])
    without = run(kl_coef=0.0)
    assert without.models["reference"] is None and not any("objective/kl" in row for row in without.rows)


def test_prompts_run_on_and_evaluation_is_on_held_out_ones_at_temperature_one(run):
    flags = dict(n_samples_per_prompt=2, rollout_batch_size=4, env_id="SortDigits-v0", eval_episodes=9, temperature=0.5)
    seen, other = run(**flags), run(**flags, seed=2)
    prompts = lambda episodes: [episode.conversation[0]["content"] for episode in episodes]
    held_out = lambda prompt: zlib.crc32(prompt[:-1].encode()) % 10 == 0
    first, second = map(prompts, seen.episodes)
    assert first[0::2] == first[1::2] and len(set(first)) == 4
    assert len({episode.noise_key for episode in seen.episodes[0]}) == 8  # samples of a prompt have other noise
    assert not set(first) & set(second) and not set(first) & set(prompts(other.episodes[0]))
    assert not any(map(held_out, first + second))
    evaluated = prompts(seen.evaluations[0][0])
    assert len(set(evaluated)) == 9 and all(map(held_out, evaluated))
    assert all(prompts(episodes) == evaluated for episodes, _ in seen.evaluations + other.evaluations)
    assert [args.temperature for _, args in seen.evaluations] == [1.0, 0.0] * 2  # 0 is greedy


def test_evaluations_on_the_way_are_logged_and_change_nothing(run):
    plain, seen = (run(num_iterations=3, eval_every=n, env_id="environments:TwoTurns-v0") for n in (0, 2))
    assert len(plain.evaluations) == 2 * 2 and len(seen.evaluations) == 2 * 3  # sampled and greedy
    evaluated = {row["iteration"]: row["eval/reward"] for row in seen.rows if "eval/reward" in row}
    rewards = [sum(sum(episode.rewards) for episode in episodes) / 2 for episodes, _ in seen.evaluations[::2]]
    assert evaluated == {0: rewards[0], 2: rewards[1]}
    both = [[{name: x for name, x in row.items() if not name.startswith("eval/")} for row in rows]
            for rows in (seen.rows, plain.rows)]  # fmt: skip
    assert_same_metrics(*both)
    assert torch.equal(weights(seen.models["actor"]), weights(plain.models["actor"]))
    for i, name in (0, "eval_before"), (-1, "eval_after"):
        assert seen.summary[name] == plain.summary[name] and seen.summary[name]["reward"] == rewards[i]


def test_seconds_are_those_of_the_phases_without_the_evaluations(ppo, tmp_path):
    """By a clock that nearly stands still but in these functions. If it stood still, threads would not end.

    An evaluation, before an iteration, plays two rollouts.
    """
    now, real, ticks = [0.0], ppo.time.monotonic(), itertools.count()

    def lasts(name, seconds):
        function = getattr(ppo, name)

        def lasting(*args, **kwargs):
            now[0] += seconds
            return function(*args, **kwargs)

        return functools.wraps(function)(lasting)

    seconds = dict(rollout=1, make_experience=10, value_loss=100, policy_loss=1000, update_sampler=10_000)
    with mock.patch.multiple(ppo, **{name: lasts(name, x) for name, x in seconds.items()}):
        with mock.patch.object(ppo.time, "monotonic", lambda: real + now[0] + 1e-6 * next(ticks)):
            seen = record(ppo, tmp_path, eval_every=1, num_iterations=2)
    phases = {"rollout": 1, "score": 10, "critic": 100 * STEPS, "actor": 1000 * STEPS, "hand_over": 10_000}
    assert len(seen.evaluations) == 2 * 3
    for row in seen.rows:
        times = {name: round(x) for name, x in row.items() if name.startswith("time/")}
        assert times == {f"time/{name}": x for name, x in phases.items()} | {"time/iteration": 14_411}


def test_warm_start_trains_the_answers_alone_and_comes_before_critic_and_reference(ppo, tmp_path):
    """At temperature 1, with a rate that falls to 0, on the demonstrations of the prompts that train first."""
    trained, flags = [], dict(kl_coef=0.1, sft_steps=2, num_iterations=1, temperature=0.5, actor_lr=1e-3)
    look = lambda _, mb, temperature: trained.extend([*mb.mask.sum(1).tolist(), temperature])
    reset, seen_by = mock.Mock(wraps=ppo.checked_reset), on_call(ppo.Transformer, "sampled_logprobs", 1, look)
    with seen_by, mock.patch.object(ppo, "checked_reset", reset):
        seen = record(ppo, tmp_path, **flags)
    assert trained == [len("fab") + 1] * 16 + [1.0]  # and their end
    seeds = [call.args[1] for call in reset.call_args_list]
    prompt = seen.episodes[0][0].env_seed  # which trains first
    assert seeds[256:289] == [prompt, *range(prompt, prompt + 32)]  # after those of the alphabet
    assert [step[1] for step in seen.steps[:2]] == [1e-3, 5e-4]
    first = seen.weights[0]
    body = len(first["critic"]) - 64  # without the head
    assert torch.equal(first["reference"], first["actor"])
    assert torch.equal(first["critic"][:body], first["actor"][:body])


def test_the_warm_start_ends_answers_as_the_chat_template_does(ppo, tmp_path):
    """Base models may have a template that ends a turn by another token than their eos token."""
    ended, from_episodes = [], ppo.Experience.from_episodes
    look = lambda episodes: ended.append({e.ids[-1] for e in episodes}) or from_episodes(episodes)
    with (
        mock.patch.object(ppo.HFTokenizer, "find_end_of_turn", lambda tokenizer: 5),
        mock.patch.object(ppo.Experience, "from_episodes", look),
    ):
        record(ppo, tmp_path, sft_steps=2, num_iterations=1)
    assert ended[:2] == [{5}, {5}]


def test_a_run_without_demonstrations_says_that_it_makes_no_warm_start(ppo, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab="}')
    kwargs = json.dumps({"path": str(tmp_path / "rows.jsonl"), "reward": "environments:length"})
    record(ppo, tmp_path, env_id="Prompts-v0", env_kwargs=kwargs, sft_steps=1, num_iterations=1)
    assert "no warm start: the environment gives no demonstrations" in capsys.readouterr().out


def test_sort_digits_by_hand(ppo):
    env = ppo.SortDigits()
    shown = [(*env.reset(seed=seed), env.answer) for seed in range(20)]
    assert all(sorted(prompt[:-1]) == sorted(info["demonstration"]) == list(answer) for prompt, info, answer in shown)
    assert sum(info["demonstration"] == answer for _, info, answer in shown) < 5  # in random order
    env.answer = "12458"
    for answer, reward in ("12458", 1.0), ("12548", 0.6), ("1245", 0.0), ("124588", 0.0), ("", 0.0):
        assert env.step(answer) == ("", reward, True, False, {"success": reward == 1})


def test_flash_attention_is_for_the_head_sizes_that_it_computes(ppo, tmp_path):
    x, asked = types.SimpleNamespace(is_cuda=True, dtype=torch.bfloat16), set()
    with mock.patch.dict(ppo.KERNELS, {"packed attention": True, "attention by lengths": False}):
        sizes = 8, 64, 100, 128, 256, 264
        assert [size for size in sizes if ppo.has_varlen("packed attention", x, size)] == [8, 64, 128, 256]
        assert not any(ppo.has_varlen("attention by lengths", x, size) for size in sizes)
    with mock.patch.object(ppo, "has_varlen", lambda kernel, x, head_dim: asked.add((kernel, head_dim))):
        seen = record(ppo, tmp_path, num_iterations=1)
    head_dim = seen.models["actor"].config.head_dim
    assert asked == {("packed attention", head_dim), ("attention by lengths", head_dim)}


def raises(*_, **more):
    raise RuntimeError("no kernel image\nis available")


def raises_in_the_gradient(call, *args, **more):
    out = call(*args, **more)
    out.requires_grad and out.register_hook(raises)
    return out


def is_not_causal(call, *args, window_size, **more):
    return call(*args, window_size=(-1, -1), **more)


def has_a_larger_gradient(call, *args, **more):
    out = call(*args, **more)
    return out + 0.1 * (out - out.detach())


def mixes_up_key_heads(call, q, k, v, *args, **more):
    return call(q, k.flip(1), v.flip(1), *args, **more)


def reads_one_too_many(call, *args, seqused_k, **more):
    return call(*args, seqused_k=seqused_k + 1, **more)


def is_nan_in_a_place(call, *args, **more):
    out = call(*args, **more)
    return out.index_fill(0, torch.tensor([len(out) - 1], device=out.device), torch.nan)


def is_rounded(call, *args, **more):
    return call(*args, **more).bfloat16().float()


FAILURES = {  # of kernels
    "packed attention": (raises, has_a_larger_gradient, raises_in_the_gradient, is_not_causal, mixes_up_key_heads),
    "attention by lengths": (raises, reads_one_too_many, is_nan_in_a_place),
    "float32 product": (raises, is_rounded, is_nan_in_a_place),
}


def varlen_on_the_cpu(q, k, v, starts_q, starts_k, max_q, max_k, *, window_size=(-1, -1), seqused_k=None, **_):
    """What the kernel of a GPU computes, with as much rounding."""
    used, out = starts_k.diff() if seqused_k is None else seqused_k, []
    for i, (start, end) in enumerate(itertools.pairwise(starts_q)):
        keys = slice(starts_k[i], starts_k[i] + used[i])
        out.append(F.scaled_dot_product_attention(
            *(x[None].transpose(1, 2) for x in (q[start:end], k[keys], v[keys])), is_causal=window_size == (-1, 0),
            enable_gqa=True).transpose(1, 2)[0])  # fmt: skip
    return torch.cat(out)


@pytest.mark.parametrize(("kernel", "failure"), [
    (None, None), *((kernel, failure) for kernel, failures in FAILURES.items() for failure in failures)])  # fmt: skip
def test_kernels_that_fail_are_found_on_small_inputs(ppo, kernel, failure):
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    calls, product = collections.Counter(), ppo.float32_product

    def call(name, function, *args, **more):
        calls[name] += 1
        return failure(function, *args, **more) if name == kernel else function(*args, **more)

    def varlen_attn(*args, **more):
        name = "packed attention" if "seqused_k" not in more else "attention by lengths"
        return call(name, varlen_on_the_cpu, *args, **more)

    def float32_product(a, b):
        return call("float32 product", product, a, b) if a.dtype == torch.bfloat16 else product(a, b)

    has_varlen = lambda kernel, x, head_dim: x.dtype == torch.bfloat16
    fake = dict(has_varlen=has_varlen, varlen_attn=varlen_attn, float32_product=float32_product)
    state = torch.get_rng_state()
    with mock.patch.multiple(ppo, **fake):
        found = ppo.kernel_failures(config, "cpu")
    assert found.keys() == {kernel} - {None} and calls.keys() == ppo.KERNELS.keys()
    for how, _ in found.values():
        raised = "raises RuntimeError: no kernel image is available"
        assert (raised if failure.__name__.startswith("raises") else "% of the largest number") in how, how
    assert torch.equal(state, torch.get_rng_state())  # the run has the random numbers of one that tries nothing


def test_a_kernel_that_fails_on_one_rank_for_one_model_is_turned_off_on_all(ppo):
    """The kernels are tried with the heads of the actor and of another critic, on GPUs in bfloat16 alone."""
    failures = {"packed attention": ("raises an error", "Padded attention")}
    of_models = {"actor's": {"float32 product": ("is wrong", "A product of float32 copies")}, "critic's": failures}
    tried, gathered, printed = [], [], []
    actor = types.SimpleNamespace(config="actor's")
    args = types.SimpleNamespace(device="cuda", dtype="bfloat16", critic_model="folder")
    fake = dict(
        kernel_failures=lambda config, device: tried.append((config, device)) or dict(of_models[config]),
        load_config={"folder": "critic's"}.get, print0=printed.append,
        of_all_ranks=lambda mine: gathered.append(mine) or [("here", {}), ("there", failures), ("there", failures)],
    )  # fmt: skip
    on = dict.fromkeys(ppo.KERNELS, True)
    with mock.patch.multiple(ppo, **fake), mock.patch.dict(ppo.KERNELS, on), \
         mock.patch.object(torch.cuda, "get_device_name", lambda: "mine"):  # fmt: skip
        for changes in dict(device="cpu"), dict(dtype="float32"):
            ppo.try_kernels(actor, types.SimpleNamespace(**vars(args) | changes))
        assert not tried and not gathered
        ppo.try_kernels(actor, args)
        assert on | {"packed attention": False} == ppo.KERNELS
    assert tried == [("actor's", "cuda"), ("critic's", "cuda")]
    assert gathered == [("mine", failures | of_models["actor's"])]
    assert printed == [
        f"warning: packed attention is turned off, because on there with torch {torch.__version__} it raises an error. "
        "Padded attention is used instead, which is slower. Please report this line to the project."]  # fmt: skip


def test_kernels_are_tried_once_in_a_run_before_a_model_computes(ppo, tmp_path):
    events = []

    def noted(owner, name):
        original = getattr(owner, name)
        return mock.patch.object(owner, name, lambda *args, **more: events.append(name) or original(*args, **more))

    with noted(ppo, "try_kernels"), noted(ppo, "warm_start"), noted(ppo.Transformer, "hidden_states"):
        record(ppo, tmp_path)
    assert events[:3] == ["try_kernels", "warm_start", "hidden_states"] and events.count("try_kernels") == 1


def test_prompts_and_gsm8k_read_files_and_call_the_reward_function(ppo, tmp_path):
    """Every row is asked once in a pass, in both formats. The function gets prompt, response and the row."""
    rows = [{"prompt": "0?", "demonstration": "zero"}, *({"prompt": f"{i}?"} for i in range(1, 12))]
    rows += [{"messages": [{"role": "user", "content": f"{i}?"}]} for i in range(12, 24)]
    path, calls = tmp_path / "rows.jsonl", []
    path.write_text("\n".join(json.dumps(row | {"key": i}) for i, row in enumerate(rows)))
    env = ppo.Prompts(str(path))
    env.reward = lambda prompt, response, row: calls.append((prompt, response, row)) or (0.5, False)
    order = random.Random(0).sample(range(24), 24)  # the order of the file does not matter
    passes = [[env.row_index(24 * n + i) for i in range(24)] for n in (0, 1, 10**6, 10**6 + 1)]
    assert passes[0] == passes[1] == list(range(24)) and passes[2] != passes[3]  # training shuffles every pass anew
    assert passes[0] == sorted(passes[2]) == sorted(passes[3]) != passes[2]
    for seed in (*range(24), 24 * 10**6 + 1):
        prompt, info = env.reset(seed=seed)
        i = order[env.row_index(seed)]
        assert prompt == rows[i].get("prompt", rows[i].get("messages")) and info.get("demonstration") == rows[i].get("demonstration")  # noqa: E501
        assert env.step("answer") == ("", 0.5, True, False, {"success": False})
        assert calls[-1] == (prompt, "answer", rows[i] | {"prompt": prompt, "key": i})
    with mock.patch.object(ppo, "FIRST_TRAINING_SEED", 16):  # A long file has more rows than this.
        assert [env.row_index(seed) for seed in range(24)] == [*range(24)]
        assert [env.row_index(24 + i) for i in range(24)] != [*range(24)]
    path.write_text(json.dumps({"question": "1 + 1?", "answer": "It is two.\n#### 2"}))
    gsm8k = ppo.GSM8K(f"{tmp_path}/./rows.jsonl")
    prompt, info = gsm8k.reset(seed=7)
    assert prompt == "1 + 1?\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert info["demonstration"] == "It is two.\n#### 2"
    assert gsm8k.step("#### 2.0") == gsm8k.step(r"\boxed{2}") == ("", 1.0, True, False, {"success": True})
    assert gsm8k.step("#### 9") == gsm8k.step("2") == ("", 0.0, True, False, {"success": False})


def test_run_folder_holds_what_it_should(ppo, tmp_path, capsys):
    seen = record(ppo, tmp_path, tensorboard=True, rollout_batch_size=12, kl_coef=0.1, eval_episodes=6)
    folder, summary = seen.folder, seen.summary
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert summary["status"] == "completed" and summary["iterations"] == len(seen.rows) == 2
    for i, when in (0, "eval_before"), (2, "eval_after"):
        sampled, greedy = (episodes for episodes, _ in seen.evaluations[i : i + 2])
        accuracy, greedy_accuracy = (sum(e.success for e in episodes) / 6 for episodes in (sampled, greedy))
        assert (summary[when]["accuracy"], summary[when]["greedy_accuracy"]) == (accuracy, greedy_accuracy)
        assert summary[when]["response_tokens"] == sum(sum(e.mask) for e in sampled) / 6
        assert summary[when]["reward"] == pytest.approx(sum(sum(e.rewards) for e in sampled) / 6)
    config = json.loads((folder / "config.json").read_text())
    args, text = config["args"], Path(ppo.__file__).read_bytes()
    assert args["critic_lr"] == 1e-3 and args["rollout_batch_size"] == 12  # with what None has become
    assert config["script"] == hashlib.sha1(b"blob %d\0%b" % (len(text), text)).hexdigest()
    completions = lines(folder, "completions")
    assert len(completions) == 2 * 4 and completions[0]["prompt"] == seen.episodes[0][0].conversation[0]["content"]
    assert set(completions[0]) == {"iteration", "prompt", "response", "reward", "stop", "n_tokens"}
    events = EventAccumulator(str(folder)).Reload()
    for name in ("objective/reward", "critic/value_loss", "ratio/last_dev"):
        assert [x.step for x in events.Scalars(name)] == [0, 1]
        assert [x.value for x in events.Scalars(name)] == pytest.approx([row[name] for row in seen.rows])
    capsys.readouterr()
    with pytest.raises(ppo.UserError, match=r"--run-name: \S*run exists: choose another"):
        record(ppo, tmp_path)
    assert lines(folder) == seen.rows and not capsys.readouterr().out  # nothing was done before


def test_the_version_of_the_script_is_that_of_git(ppo, tmp_path, monkeypatch):
    """Without git, a repository or a commit of the script there is its hash alone."""
    git = lambda *command: subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.split()  # noqa: E501
    script = tmp_path / "script.py"
    script.write_text("one")
    monkeypatch.setattr(ppo, "__file__", str(script))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    alone = {"script": "43dd47ea691c90a5fa7827892c70241913351963"}
    assert ppo.script_version() == alone
    git("init", "-q")
    assert ppo.script_version() == alone
    git("add", "script.py")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one")
    [commit], [blob] = git("rev-parse", "HEAD"), git("hash-object", "script.py")
    assert ppo.script_version() == alone | {"commit": commit, "changed": False} and blob == alone["script"]
    script.write_text("two")
    assert ppo.script_version() == {"script": git("hash-object", "script.py")[0], "commit": commit, "changed": True}
    script.write_text("one")
    monkeypatch.setenv("PATH", "")
    assert ppo.script_version() == alone
    script.unlink()
    assert ppo.script_version() == {}


def test_the_row_of_an_iteration_is_that_of_its_episodes_experience_and_losses(run):
    seen = run(env_id="environments:DenseTurns-v0", kl_coef=0.1, entropy_coef=0.1, rollout_batch_size=16,
               max_new_tokens=8)  # fmt: skip
    row, e, episodes = seen.rows[1], seen.experiences[1], seen.episodes[1]
    mean, of_tokens = lambda of: sum(map(of, episodes)) / 16, lambda x: float(x[e.mask].mean())
    kls = ((e.old_logprobs - e.ref_logprobs) * e.mask).sum(1)
    expected = {
        "objective/reward": mean(lambda x: sum(x.rewards)), "objective/accuracy": mean(lambda x: x.success),
        "objective/response_tokens": mean(lambda x: sum(x.mask)), "objective/kl": float(kls.mean()),
        "objective/truncated": mean(lambda x: x.stop != "terminated"), "objective/entropy": -of_tokens(e.old_logprobs),
        "critic/value_mean": of_tokens(e.values), "critic/return_mean": of_tokens(e.returns),
        "actor/policy_loss": sum(call["result"][0].item() for call in seen.calls["policy_loss"][8:]) / 8,
        "critic/value_loss": sum(call["result"][0].item() for call in seen.calls["value_loss"][8:]) / 8,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)
    gap = of_tokens((e.sampler_logprobs - e.old_logprobs).abs())
    assert row["debug/sampler_trainer_logprob_diff"] == pytest.approx(gap, rel=0.05, abs=0)
    assert {x.stop for x in episodes} >= {"length", "truncated"} and row["objective/kl"] != 0
    for sample, x in zip(lines(seen.folder, "completions")[4:], episodes, strict=False):
        numbers = sample["reward"], sample["n_tokens"]
        assert numbers == pytest.approx((sum(x.rewards), sum(x.mask)), abs=1e-5) and sample["stop"] == x.stop
        assert [sample["prompt"], *sample["response"].split("\n")] == [message["content"] for message in x.conversation]


def test_the_line_of_an_iteration(run):
    seen = run(kl_coef=0.1)
    shown = [text for text in seen.printed if re.match(r"\d/2: ", text)]
    names = ("objective/reward", "objective/accuracy", "objective/response_tokens", "objective/kl", "actor/approx_kl",
             "actor/clipfrac", "critic/explained_variance", "time/iteration")  # fmt: skip
    form = "{}/2: reward #, accuracy #%, # tokens, KL #, approx_kl #, clipfrac #, explained #, # s"
    for i, (text, row) in enumerate(zip(shown, seen.rows, strict=True), 1):
        numbers = re.fullmatch(form.format(i).replace("#", r"(-?\d[-.\de]*)"), re.sub(r" \((\d+)% cut\)", "", text)).groups()  # noqa: E501
        cut = row["objective/truncated"]
        assert (f" ({cut:.0%} cut)" in text) == (cut > 0)
        expected = [row[name] * (100 if name == "objective/accuracy" else 1) for name in names]
        assert [float(x) for x in numbers] == pytest.approx(expected, abs=0.006, rel=0.06)
        assert row["actor/clipfrac"] == pytest.approx(sum(step["clipfrac"] for step in row["ratio/steps"]) / STEPS)


def test_weights_and_biases_gets_flags_and_what_tensorboard_gets(ppo, tmp_path):
    """By its own name only, in rank 0, and the run that is resumed is the same. Tried with wandb offline."""
    wandb = mock.Mock()
    with mock.patch.dict(sys.modules, wandb=wandb):
        for more in dict(save_every=1, num_iterations=1), dict(resume="auto"):
            record(ppo, tmp_path, track=True, wandb_project="sums", **more)
        with mock.patch.object(ppo, "rollout", side_effect=OSError), pytest.raises(OSError):
            record(ppo, tmp_path, track=True, run_name="failed")
    assert [name for name, *_ in wandb.mock_calls] == ["init", "finish"] * 3
    assert [call.kwargs for call in wandb.finish.call_args_list] == [{"exit_code": code} for code in (0, 0, 1)]
    first, again, _ = (call.kwargs for call in wandb.init.call_args_list)
    assert first["config"]["train_batch_size"] == SMALL["train_batch_size"] and first["sync_tensorboard"]
    assert (first["project"], first["id"], first["resume"]) == ("sums", "run", "never")
    assert (again["project"], again["id"], again["resume"]) == ("sums", "run", "allow")
    error = "cannot use --track, which needs the package wandb: ModuleNotFoundError: "
    with mock.patch.dict(sys.modules, wandb=None), pytest.raises(ppo.UserError, match=error):
        record(ppo, tmp_path / "without", track=True)
    assert not (tmp_path / "without").exists()
