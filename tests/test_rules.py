"""What a run checks itself, what resuming and exporting keep, and small mistakes that no other test sees."""

import contextlib
import copy
import dataclasses
import errno
import importlib.util
import json
import math
import os
import re
import signal
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import slow_but
from distributed_worker import on_call, run_on_ranks
from environments import TextEnv, gym
from test_bad_input import main, refuse
from test_checkpoints import tensors_of
from test_data import THINKS
from test_diagnosis import FAULTS, broken, in_training, is_training
from test_distributed import flags_of
from test_math import close
from test_rollout import ALPHABET, make_envs, make_model, run, scripted_model
from test_train import SMALL, changed, lines, record
from test_transformers import FAMILIES, VOCABULARY, hf_folder, load_theirs
from torch.multiprocessing import ProcessRaisedException

import ppo_llm_continuous_batching as continuous

pytestmark = pytest.mark.shared

# Prompts of 1 to 40 tokens, several microbatches in a minibatch, a critic that learns.
RAGGED = dict(env_id="environments:Lengths-v0", max_prompt_tokens=40, max_new_tokens=6, rollout_batch_size=12,
              train_batch_size=6, micro_batch_tokens=60, critic_lr=0.05, eval_episodes=0)  # fmt: skip
BOTH_DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


# --- The first minibatch of an iteration


@pytest.mark.both
@BOTH_DTYPES
def test_first_ratio_is_exactly_1_and_first_values_are_exactly_the_old_ones(ppo, tmp_path, dtype):
    seen = record(ppo, tmp_path, **RAGGED, dtype=dtype, compile="off")
    assert len(seen.calls["policy_loss"]) > 2 * sum(len(row["ratio/steps"]) for row in seen.rows)
    assert seen.experiences[1].values.abs().max() > 1e-3
    for row in seen.rows:
        assert row["ratio/first_dev"] == row["ratio/steps"][0]["ratio_dev"] == row["critic/first_dev"] == 0
        assert row["ratio/last_dev"] > 1e-4


def rounded_in_training(product, a, b):
    return product(a, b).bfloat16().float() if is_training() else product(a, b)


def trained_meanwhile(original, episodes, actor, *rest):
    """The samples are those of an earlier policy."""
    experience = original(episodes, actor, *rest)
    with torch.no_grad():
        for p in actor.parameters():
            p.mul_(1.1)
    return experience


MISMATCHES = {  # what a fork may do wrong: (owner, function, what replaces it)
    "dropout": ("MLP", "forward", lambda original, *args: F.dropout(original(*args), 0.1, is_training())),
    "shifted by one": ("Transformer", "sampled_logprobs", in_training(lambda x: x.roll(1, dims=1))[1]),
    "another temperature": ("Transformer", "sampled_logprobs", lambda original, model, mb, temperature: original(
        model, mb, temperature * (0.9 if is_training() else 1.0))),
    "an earlier policy": (None, "make_experience", trained_meanwhile),
    "half-precision softmax": (None, "float32_product", rounded_in_training),
}  # fmt: skip


@BOTH_DTYPES
@pytest.mark.parametrize("name", MISMATCHES)
def test_a_first_ratio_that_is_not_1_ends_the_run_in_its_first_iteration(ppo, tmp_path, name, dtype):
    owner, function, change = MISMATCHES[name]
    owner = getattr(ppo, owner) if owner else ppo
    original, kept = getattr(owner, function), {"kept": {}} if name == "shifted by one" else {}
    with mock.patch.object(owner, function, lambda *args: change(original, *args, **kept)):
        refuse(ppo, tmp_path, "the first ratio of the run is not 1", begun=True, dtype=dtype, compile="off")
    assert lines(tmp_path / "runs" / "run") == []


@BOTH_DTYPES
def test_first_values_that_are_not_the_old_ones_end_the_run_in_its_first_iteration(ppo, tmp_path, dtype):
    wrong = lambda e: dataclasses.replace(e, values=e.values + 0.01 * e.mask)
    with mock.patch.object(ppo, "make_experience", changed(ppo.make_experience, wrong)):
        refuse(ppo, tmp_path, "the first values of the critic are not those of the experience", begun=True, dtype=dtype)


@contextlib.contextmanager
def forked(ppo, folder, old, new):
    """The script as a module, with `new` in place of the text `old`."""
    text = Path(ppo.__file__).read_text()
    assert text.count(old) == 1
    (folder / "ppo_fork.py").write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("ppo_fork", folder / "ppo_fork.py")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, ppo_fork=module):
        spec.loader.exec_module(module)
        yield module


@BOTH_DTYPES
def test_a_choice_of_samples_may_round_differently(ppo, tmp_path, dtype):
    # On some processors the choice alone changes nothing.
    rounded = "trained.old_logprobs *= 1 + 2e-6; trained.values += 5e-5"
    choice = f"trained = experience.select(torch.arange(1, 12, 2)); {rounded}  #"
    with forked(ppo, tmp_path, "trained = experience  #", choice) as fork:
        seen = record(fork, tmp_path, **RAGGED, dtype=dtype, compile="off")
    assert [len(row["ratio/steps"]) for row in seen.rows] == [2, 2]
    warned = [text for text in seen.printed if re.match("  (ratio|critic): ", text)]
    assert not warned and all(row["ratio/first_dev"] < 0.05 for row in seen.rows)


FORKS = {  # what a fork may do wrong: (text of the script, what takes its place, the error, or a warning)
    "an episode that goes on": (
        "        clock.end(\"rollout\")\n", "        episodes[3].stop = \"\"\n        clock.end(\"rollout\")\n",
        "an episode has not ended: its `stop` is empty"),
    "two critics whose steps are in one list": (
        "                critic_step_stats.append(step)\n", "                critic_step_stats += [step, step]\n",
        "8 steps of the critic, but plan_steps says 4"),
    "an epoch more than the plan has": (
        "epochs = args.ppo_epochs if", "epochs = args.ppo_epochs + 1 if",
        "6 steps of the actor, but plan_steps says 4"),
    "a policy loss divided by the tokens of the microbatch": (
        "dual_clip=args.dual_clip, denom=n_tokens,", "dual_clip=args.dual_clip, denom=int(mb.mask.sum()),",
        "the actor's loss: denom must be the number of tokens of the whole minibatch"),
    "a value loss divided by the tokens of the microbatch": (
        "mb.mask, args.value_clip, denom=n_tokens", "mb.mask, args.value_clip, denom=int(mb.mask.sum())",
        "the critic's loss: denom must be the number of tokens of the whole minibatch"),
    "a reference at another temperature": (
        "logprobs_of_all(reference, experience, first_epoch, args)",
        "logprobs_of_all(reference, experience, first_epoch, dataclasses.replace(args, temperature=0.9))",
        r"the actor is the reference, but old_logprobs and ref_logprobs are 0\.0\d+ nats apart"),
    "old log-probs of a demonstration": (
        "    experience.ref_logprobs = torch.full_like", "    experience.old_logprobs[3] = 0.0\n"
        "    experience.ref_logprobs = torch.full_like", "the first ratio of the run is not 1"),
    "another mask for the policy loss": (
        "newlogprobs, mb.old_logprobs, mb.advantages, mb.mask,",
        "newlogprobs, mb.old_logprobs, mb.advantages, mb.mask & (mb.tokens % 2 == 0),",
        r"  actor: its loss has fewer tokens than denom \(actor/token_share\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORKS)
def test_a_fork_that_is_wrong_is_told_so_in_its_first_iteration(ppo, tmp_path, name):
    old, new, message = FORKS[name]
    with forked(ppo, tmp_path, old, new) as fork:
        train = lambda: record(fork, tmp_path, micro_batch_tokens=30, kl_coef=0.1, num_iterations=1)
        if message.startswith("  "):
            assert sum(bool(re.match(message, text)) for text in train().printed) == 1
        else:
            with pytest.raises(fork.UserError, match=message):
                train()


@BOTH_DTYPES
@pytest.mark.parametrize("flags", [
    dict(env_id="environments:Constant-v0", env_kwargs='{"reward": null}'), dict(target_kl=1e-9),
    dict(critic_warmup_iterations=1), dict(recompute_old_logprobs=False),
    dict(env_id="environments:TwoTurns-v0", temperature=0.6, critic_epochs=0)], ids=str)  # fmt: skip
def test_a_right_run_is_not_told_that_it_is_wrong(ppo, tmp_path, dtype, flags):
    """Whether or not there are samples with a reward, and although the actor's first step may come late."""
    seen = record(ppo, tmp_path, dtype=dtype, compile="off", micro_batch_tokens=30, **dict(kl_coef=0.1) | flags)
    assert len(seen.rows) == 2
    assert not [text for text in seen.printed if re.match("  (critic|sampler|actor): ", text)]


def test_the_rewards_of_the_environment_are_logged_as_they_were(ppo, tmp_path):
    """Although a fork changes those of the experience."""
    line = "    experience.rewards[last] -= args.truncation_penalty * was_cut\n"
    flags = dict(env_id="environments:Constant-v0", env_kwargs='{"reward": 0.5}', truncation_penalty=0.25)
    with forked(ppo, tmp_path, line, line + "    experience.rewards[last] -= 0.1\n") as fork:
        rows = record(fork, tmp_path, **flags).rows
    for row in rows:
        assert row["objective/env_reward"] == 0.5
        assert row["objective/reward"] == pytest.approx(0.4 - 0.25 * row["objective/truncated"], abs=1e-6)


# --- The sampler

WARNING = "  sampler: its log-probs differ from "


def shifted(episodes):
    return [dataclasses.replace(e, logprobs=[*e.logprobs[1:], 0.0]) for e in episodes]


SAMPLERS = {  # name: (flags, whether it is warned of, functions of the script and what replaces them)
    "healthy": (dict(), False, {}),
    "of the old weights": (dict(), True, dict(update_sampler=lambda actor, sampler: 1.0)),
    "shifted by one": (dict(), True, dict(rollout=shifted)),
    "healthy, its log-probs are the old ones": (dict(recompute_old_logprobs=False), False, {}),
    "shifted by one, its log-probs are the old ones": (dict(recompute_old_logprobs=False), True, dict(rollout=shifted)),
}


@BOTH_DTYPES
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_that_is_not_the_actor_is_warned_of_once(ppo, tmp_path, name, dtype):
    flags, warned, patches = SAMPLERS[name]
    patches = {key: changed(ppo.rollout, f) if key == "rollout" else f for key, f in patches.items()}
    with mock.patch.multiple(ppo, **patches) if patches else contextlib.nullcontext():
        seen = record(ppo, tmp_path, **flags, actor_lr=0.05, dtype=dtype, ppo_epochs=1, critic_epochs=0)
    assert [text.startswith(WARNING) for text in seen.printed].count(True) == warned


def test_what_rounding_explains_depends_on_dtype_and_temperature(ppo):
    cases = ("float32", 1.0, 1e-4), ("float32", 2.0, 1e-4), ("float32", 0.1, 1e-3), ("bfloat16", 1.0, 0.1)
    for dtype, temperature, limit in (*cases, ("bfloat16", 0.5, 0.2)):
        args = ppo.Args(dtype=dtype, temperature=temperature)
        metrics = {"ratio/diagnosis": None, "critic/first_dev": 0.0, "ratio/first_dev": 1.0}
        for factor in (0.9, 1.1):
            metrics["debug/sampler_trainer_logprob_diff"] = factor * limit
            said = ppo.find_mistakes(metrics, types.SimpleNamespace(values=torch.zeros(1)), True, args)
            assert [text.startswith(WARNING) for text in said] == [True] * (factor > 1)


# --- Precision


def test_logprobs_of_bfloat16_weights_are_those_of_float64_and_so_are_gradients(ppo):
    """Rounded to bfloat16, logits near 20 would be off by 0.06. Gradients of the head add up over three chunks."""
    states, weight = torch.randn(40, 64).bfloat16(), (torch.randn(5000, 64) / 2).bfloat16()
    x, w = (t.double().requires_grad_() for t in (states, weight))
    targets, d_outputs = torch.randint(5000, (40,)), torch.randn(2, 40)
    backward = lambda outputs: sum((d * y).sum() for d, y in zip(d_outputs, outputs)).backward()
    predicted = torch.distributions.Categorical(logits=x @ w.T / 0.7, validate_args=False)
    expected = predicted.log_prob(targets), predicted.entropy()
    assert 15 < (x @ w.T / 0.7).abs().max() < 40
    backward(expected)
    for result, reference, tolerance in zip(ppo.token_logprobs(states, weight, targets, 0.7), expected, (1e-5, 1e-4)):
        assert (result - reference).abs().max() < tolerance
    settings = dict(settings=(0.7, 16, "off"), needs_input_grad=(True, True))
    ctx = types.SimpleNamespace(saved_tensors=(states, weight, targets), **settings)
    for gradient, reference in zip(ppo.ChunkedLogprobs.backward(ctx, *d_outputs), (x.grad, w.grad)):
        assert gradient.dtype == torch.float32 and (gradient - reference).norm() < 3e-6 * reference.norm()
    inputs = states.requires_grad_(), weight.requires_grad_()
    backward(ppo.ChunkedLogprobs.apply(*inputs, targets, 0.7, 16, "off"))
    for tensor, reference in zip(inputs, (x.grad, w.grad)):  # rounded once
        assert (tensor.grad.double() - reference).norm() < 2e-3 * reference.norm()


@torch.no_grad()
def test_next_logits_of_bfloat16_weights_are_those_of_float64(ppo):
    model = make_model(ppo, 5000, hidden_size=64).bfloat16()
    torch.nn.init.normal_(model.lm_head.weight, std=0.6)
    tokens, at = torch.randint(5000, (9, 1)), torch.zeros(9, 1, dtype=torch.int64)
    states, logits = (method(tokens, at, ppo.KVCache(model.config, 9, 4, torch.bfloat16), 16)
                      for method in (model.prefill, model.next_logits))  # fmt: skip
    assert 10 < logits.abs().max() < 40 and logits.dtype == torch.float32
    close(logits, states[:, 0].double() @ model.lm_head.weight.double().T, 1e-5)


def test_values_of_bfloat16_states_are_float32(ppo):
    critic, x = make_model(ppo, 10, head="scalar"), (8 * torch.randn(5, 7, 32)).bfloat16()
    values = critic.values(x)
    assert values.dtype == torch.float32
    close(values, x.float() @ critic.score.weight[0], 1e-5)


def test_rotations_of_bfloat16_models_are_float32_in_training_too(ppo, tmp_path):
    seen, rope = [], ppo.apply_rope
    with mock.patch.object(ppo, "apply_rope", lambda x, *rest: seen.append(rest) or rope(x, *rest)):
        record(ppo, tmp_path, dtype="bfloat16", num_iterations=1)
    assert len(seen) > 100 and {x.dtype for pair in seen for x in pair} == {torch.float32}


# --- Checkpoints


def complete_checkpoint(run, iteration):
    """The least that counts as one."""
    folder = run / "checkpoints" / f"iter_{iteration:06d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text('{"files": []}')
    return folder


def auto(ppo, tmp_path):
    return ppo.Args(log_dir=str(tmp_path), run_name="run", resume="auto")


def raises(error):
    return mock.Mock(side_effect=error)


@pytest.mark.parametrize("listing", [
    lambda names: names[:1], lambda names: [], lambda names: [*names, "iter_000003"], raises(PermissionError("?")),
], ids=["newest missing", "empty", "a newer incomplete one", "unreadable"])  # fmt: skip
def test_ranks_that_see_other_folders_resume_the_checkpoint_of_rank_0(ppo, tmp_path, listing):
    """As with a disk of the network, which shows a file to some ranks earlier than to others."""
    for iteration in (1, 2):
        complete_checkpoint(tmp_path / "run", iteration)
    names, sent, chosen = ["iter_000001", "iter_000002"], [], []

    def gather(of_ranks, mine):
        sent.append(mine)
        of_ranks[:] = sent

    for rank, seen_by_rank in enumerate([lambda _: names, lambda _: listing(names)]):
        listdir, rank = mock.patch.object(ppo.os, "listdir", seen_by_rank), mock.patch.object(ppo, "RANK", rank)
        with listdir, rank, mock.patch.object(ppo.dist, "all_gather_object", gather):
            chosen.append(ppo.find_checkpoint(auto(ppo, tmp_path)))
    assert chosen == 2 * [tmp_path / "run" / "checkpoints" / "iter_000002"]


def test_no_rank_writes_a_checkpoint_before_what_was_left_of_another_is_removed(ppo, tmp_path):
    """A rank that is ahead of rank 0 would lose its file, and the list of files would not have it either."""
    order, note = [], lambda name: lambda *_, **__: order.append(name)
    removed = mock.patch.object(ppo.shutil, "rmtree", note("removed"))
    met = mock.patch.object(ppo.dist, "barrier", note("met"))
    with removed, met, mock.patch.object(ppo.dcp, "save", raises(KeyError("now"))):
        with pytest.raises(ppo.UserError, match=r"cannot write \S*iter_000000; earlier ones are intact: KeyError"):
            ppo.save_checkpoint(tmp_path, {}, ppo.TrainState(), ppo.Args())
    assert order == ["removed", "met"]


BROKEN_DISKS = {  # what fails, and how
    "folder": ("os", "listdir", PermissionError(errno.EACCES, "Permission denied")),
    "state.json": (None, "read_json", OSError(errno.EIO, "Input/output error")),
    "tensors": ("safetensors", "safe_open", OSError(errno.EIO, "Input/output error")),
    "rights": (None, "open", PermissionError(errno.EACCES, "Permission denied")),
}


@pytest.mark.parametrize("what", BROKEN_DISKS)
def test_what_cannot_be_read_is_an_error_and_not_a_damaged_checkpoint(ppo, tmp_path, capsys, what):
    """Passing over it would throw the work away that it holds."""
    owner, name, error = BROKEN_DISKS[what]
    folder = complete_checkpoint(tmp_path / "run", 1)
    (folder / "state.json").write_text('{"files": ["a.safetensors"]}')
    (folder / "a.safetensors").touch()
    broken_disk = mock.patch.object(getattr(ppo, owner) if owner else ppo, name, raises(error), create=name == "open")
    message = rf"^cannot read the checkpoints of \S*run: .*{error.strerror}"
    with broken_disk, pytest.raises(ppo.UserError, match=message):
        ppo.find_checkpoint(auto(ppo, tmp_path))
    assert "passed over" not in capsys.readouterr().out


def test_a_checkpoint_that_is_cut_or_a_file_is_passed_over(ppo, tmp_path, capsys):
    """Also one that is cut to nothing, as after a power failure."""
    complete_checkpoint(tmp_path / "run", 1)
    for iteration, content in (2, "{"), (3, ""), (4, '{"files": ["a"]}'):
        (complete_checkpoint(tmp_path / "run", iteration) / "state.json").write_text(content)
    (complete_checkpoint(tmp_path / "run", 5) / "a").write_bytes(b"")
    (tmp_path / "run" / "checkpoints" / "iter_000005" / "state.json").write_text('{"files": ["a"]}')
    assert ppo.find_checkpoint(auto(ppo, tmp_path)).name == "iter_000001"
    assert capsys.readouterr().out.count("passed over") == 4


def test_a_file_with_the_name_of_a_checkpoint_is_passed_over(ppo, tmp_path):
    complete_checkpoint(tmp_path / "run", 1).with_name("iter_000002").write_text("")
    assert ppo.find_checkpoint(auto(ppo, tmp_path)).name == "iter_000001"


def test_a_folder_whose_state_is_unknown_is_not_one_without_checkpoints(ppo, tmp_path):
    """As on a disk of the network that answers only the second time."""
    complete_checkpoint(tmp_path / "run", 1)
    broken_disk = mock.patch.object(os, "listdir", raises(OSError(errno.EIO, "Input/output error")))
    with broken_disk, pytest.raises(ppo.UserError):
        ppo.find_checkpoint(auto(ppo, tmp_path))


class Hides(TextEnv):
    """Rank 1 does not see the newest checkpoint of a run."""

    def __init__(self):
        if os.environ.get("RANK") == "1":
            os.listdir = lambda path, listdir=os.listdir: [name for name in listdir(path) if name != "iter_000002"]


gym.register("Hides-v0", entry_point=Hides)


@pytest.mark.slow
def test_two_ranks_that_see_other_folders_resume_the_same_iteration(ppo, tmp_path):
    flags = SMALL | dict(save_every=1, env_id="test_rules:Hides-v0", ppo_epochs=1, kl_coef=0.1)
    resumed = flags | dict(resume="auto", num_iterations=3, run_name="run")
    run_on_ranks(ppo, tmp_path, 2, ("run", flags, None), ("again", resumed, None))
    first, second = (json.loads((tmp_path / f"again.{rank}.json").read_text())["episodes"] for rank in (0, 1))
    assert len(first) == 8 + 2 * 2 and first == second and len(lines(tmp_path / "run")) == 3


LEFT = {  # what a run has left: (status in its summary, damaged checkpoints, whether it may begin anew)
    "finished": ("completed", False, False),
    "interrupted": ("interrupted", False, False),
    "failed, with damaged checkpoints": ("failed", True, False),
    "killed, with damaged checkpoints": (None, True, False),
    "failed": ("failed", False, True),
    "killed": (None, False, True),
    "nothing": (None, None, True),
}


@pytest.mark.parametrize("left", LEFT)
def test_auto_begins_anew_only_where_nothing_is_lost(ppo, tmp_path, left):
    status, damaged, anew = LEFT[left]
    folder, args = tmp_path / "run", auto(ppo, tmp_path)
    if damaged:
        os.truncate(complete_checkpoint(folder, 1) / "state.json", 3)
    if damaged is not None:
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text('{"iteration": 0}\n')
    if status:
        (folder / "summary.json").write_text(json.dumps({"status": status}))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    if anew:
        assert ppo.find_checkpoint(args) is None
    else:
        with pytest.raises(ppo.UserError, match=r"--resume auto: \S*run has results, but no complete checkpoint\. To"):
            ppo.train(dataclasses.replace(args, **SMALL))
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_run_that_failed_before_its_first_checkpoint_begins_anew(ppo, tmp_path):
    with mock.patch.object(ppo, "policy_loss", raises(RuntimeError("out of memory"))), pytest.raises(RuntimeError):
        record(ppo, tmp_path)
    assert ppo.read_json(tmp_path / "run" / "summary.json")["status"] == "failed"
    assert record(ppo, tmp_path, resume="auto").summary["status"] == "completed"
    with pytest.raises(ppo.UserError, match="has results, but no complete checkpoint"):
        record(ppo, tmp_path, resume="auto")


# --- Errors, flags, signals

CODE = """import gymnasium as gym
class Mine(gym.Env):
    def __init__(self):
        pass  # constructor
    def reset(self, *, seed=None, options=None):
        pass  # reset
        return "ab=", {}
    def step(self, response):
        pass  # step
        return "", 1.0, True, False, {}
def reward(prompt, response, row):
    pass  # reward
    return 1.0
pass  # import
gym.register("Mine-v0", entry_point=Mine)
"""


@pytest.mark.both
@pytest.mark.parametrize("place", ["constructor", "reset", "step", "reward", "import", "import of a reward"])
def test_an_error_in_the_users_code_is_shown_with_file_and_line(ppo, tmp_path, monkeypatch, capsys, place):
    module = f"mine_{place.replace(' ', '_')}_{ppo.__name__}"
    code = CODE.replace(f"pass  # {place.split()[0]}", "1 / 0")
    (tmp_path / f"{module}.py").write_text(code)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab="}')
    kwargs = json.dumps({"path": str(tmp_path / "rows.jsonl"), "reward": f"{module}:reward"})
    flags = dict(env_id="Prompts-v0", env_kwargs=kwargs) if "reward" in place else dict(env_id=f"{module}:Mine-v0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", [ppo.__file__, *flags_of(log_dir=tmp_path, **flags)])
    with mock.patch.object(ppo, "SummaryWriter"), pytest.raises(SystemExit) as end:
        main(ppo)
    err = capsys.readouterr().err
    *before, last = err.splitlines()
    assert end.value.code == 2 and last.startswith("error: cannot ") and "ZeroDivisionError: division by zero" in last
    line = 1 + code.splitlines().index(next(x for x in code.splitlines() if "1 / 0" in x))
    assert any(re.search(rf'File "{tmp_path}/{module}\.py", line {line}, in ', x) for x in before)


class Scarce(TextEnv):
    """After those of training and evaluation there are no more."""

    made = 0

    def __init__(self):
        Scarce.made += 1
        if Scarce.made > 16:
            raise ConnectionError("no more connections")


gym.register("Scarce-v0", entry_point=Scarce)


def test_an_environment_that_cannot_be_made_later_is_an_error_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setattr(Scarce, "made", 0)
    with pytest.raises(continuous.CodeError, match="no more connections"):
        record(continuous, tmp_path, env_id="test_rules:Scarce-v0")


@pytest.mark.parametrize(("flags", "error"), [
    *[({name: x}, f"--{name.replace('_', '-')} {x}: must be from 0 to 1")
      for name, x in [("gae_lambda", 95.0), ("gamma", 3.0), ("lr_end", 7.0), ("critic_lambda", 2.0)]],
    *[(dict(dual_clip=x), f"--dual-clip {x}: must be above 1") for x in (0.0, 1.0)],
    (dict(kl_loss="k3", kl_coef=0.0), "--kl-loss k3: needs a --kl-coef above 0"),
])  # fmt: skip
def test_flags_out_of_range(ppo, tmp_path, flags, error):
    refuse(ppo, tmp_path, error, **flags)


def test_flags_at_the_ends_of_their_range(ppo):
    ppo.fill_in_defaults(ppo.Args(gae_lambda=1, gamma=0, lr_end=1, critic_lambda=0.0, dual_clip=1.01, kl_loss="k2"))


def test_only_a_second_ctrl_c_stops_at_once(ppo):
    """SIGTERM, which torchrun sends after the first, is none, and neither is a second SIGTERM."""
    stop = ppo.StopSignals()

    def stops(number):
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            return True

    with stop.restore:
        stop.catch()
        assert not any(map(stops, (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM)))
        assert stops(signal.SIGINT)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_last_evaluation(ppo, tmp_path, number, code):
    with on_call(ppo, "rollout", 3 + 2, lambda *_: signal.raise_signal(number)):  # after 2 of an evaluation and 2 more
        seen = record(ppo, tmp_path, save_every=9)
    summary = json.loads((seen.folder / "summary.json").read_text())
    assert (seen.code, summary["status"], summary["iterations"]) == (code, "interrupted", 2)
    assert summary["eval_before"] and "eval_after" not in summary and len(seen.evaluations) == 2
    saved = tensors_of(seen.folder / "checkpoints" / "iter_000002")
    exported = tensors_of(seen.folder / "model")
    assert exported and all(torch.equal(x, saved[f"actor.{name}"]) for name, x in exported.items())


def test_a_signal_while_the_last_export_is_written_ends_the_run_without_an_evaluation(ppo, tmp_path):
    with on_call(ppo, "save_hf_checkpoint", 1, lambda *_: signal.raise_signal(signal.SIGTERM)):
        seen = record(ppo, tmp_path, num_iterations=1)
    assert "eval_after" not in json.loads((seen.folder / "summary.json").read_text()) and seen.code == 143


# --- Environments, plan, devices


def prompts_file(tmp_path, name="rows.jsonl", rows=7, **kwargs):
    path = tmp_path / name
    path.write_text("\n".join(json.dumps({"prompt": "abcdef"[: 1 + i % 6] + "=" * (1 + i // 6)}) for i in range(rows)))
    return json.dumps({"path": str(path), "reward": "environments:length"} | kwargs)


def test_the_plan_says_when_evaluations_use_the_prompts_of_training(ppo, tmp_path):
    kwargs, other = (prompts_file(tmp_path, f"{rows}.jsonl", rows) for rows in (7, 5))
    for flags, said in [
        (dict(), True), (dict(eval_env_kwargs=kwargs), True), (dict(eval_env_kwargs=other), False),
        (dict(eval_episodes=0), False), (dict(env_id="SortDigits-v0", env_kwargs="{}"), False),
    ]:  # fmt: skip
        name = f"run{len(list(tmp_path.iterdir()))}"
        flags = dict(env_id="Prompts-v0", env_kwargs=kwargs, run_name=name, num_iterations=1) | flags
        [plan] = [text for text in record(ppo, tmp_path, **flags).printed if "\n  evaluation " in text]
        assert ("on other seeds, but on the prompts of training: see --eval-env-kwargs" in plan) == said


def test_the_plan_counts_the_steps_of_a_warm_up(ppo, capsys):
    """3 iterations of 4 steps, of which the first makes none of the actor."""
    args = ppo.fill_in_defaults(ppo.Args(**SMALL | dict(num_iterations=3, critic_warmup_iterations=1)))
    ppo.print_plan(args, ppo.plan_steps(args), [types.SimpleNamespace(unwrapped=None)], [])
    said = capsys.readouterr().out
    assert "3 iterations: 8 steps of the actor, 12 of the critic\n" in said
    assert "warm-up    1 iterations without steps of the actor" in said


def test_attributes_of_other_kinds_than_ours_mean_something_else(ppo, capsys):
    """Such as the number of rows of a board, or a method."""
    args = ppo.fill_in_defaults(ppo.Args(**SMALL))
    env_with = lambda **attributes: types.SimpleNamespace(unwrapped=types.SimpleNamespace(**attributes))
    seed = ppo.first_training_seed(args, env_with())
    assert ppo.first_training_seed(args, env_with(num_prompts=7)) == seed + -seed % 7 > seed
    for value in None, 0, 5.0, torch.tensor([2, 3]), len:
        env = env_with(num_prompts=value)
        assert ppo.first_training_seed(args, env) == seed, value
        ppo.check_prompts([env], None, args)  # It plays none.
        env.reset = lambda seed: ("a", {})
        ppo.warm_start(None, None, env, dataclasses.replace(args, sft_steps=1))
        assert "no warm start" in capsys.readouterr().out

    def is_named(rows):
        both = [[env_with(rows=copy.deepcopy(rows))] for _ in range(2)]
        ppo.print_plan(args, ppo.plan_steps(args), *both)
        return "on the prompts of training" in capsys.readouterr().out

    assert not any(map(is_named, [None, 4, torch.zeros(2), len]))
    assert is_named([{"prompt": "a"}]) and is_named([{"prompt": "a", "x": torch.zeros(2)}])


@pytest.mark.parametrize(("episodes", "made"), [(0, 8), (2, 16)])
def test_without_evaluations_there_are_no_environments_for_them(ppo, tmp_path, episodes, made):
    with mock.patch.object(ppo.gym, "make", wraps=ppo.gym.make) as make:
        record(ppo, tmp_path, eval_episodes=episodes, num_iterations=1)
    assert make.call_count == made


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_dtype_auto_is_bfloat16_where_the_gpu_has_it(ppo, capability, expected):
    cuda = mock.patch.multiple(ppo.torch.cuda, is_available=lambda: True, get_device_capability=lambda: capability)
    with cuda, mock.patch.object(ppo, "connect"):
        args = ppo.fill_in_defaults(ppo.Args(compile="off"))
        assert (args.device, args.dtype) == ("cuda", expected)
        assert ppo.fill_in_defaults(ppo.Args(compile="off", dtype="float32")).dtype == "float32"
        if expected == "float32":
            with pytest.raises(ppo.UserError, match="--dtype bfloat16: this GPU, from before Ampere, has no bfloat16"):
                ppo.fill_in_defaults(ppo.Args(compile="off", dtype="bfloat16"))
        else:
            assert ppo.fill_in_defaults(ppo.Args(compile="off", dtype="bfloat16")).dtype == "bfloat16"
    assert ppo.fill_in_defaults(ppo.Args(device="cpu")).dtype == "float32"


def test_every_pass_over_the_prompts_has_all_of_them_in_an_order_of_its_own(ppo, tmp_path):
    n, first = 7, ppo.FIRST_TRAINING_SEED
    path = json.loads(prompts_file(tmp_path, rows=n))["path"]
    order = lambda seeds, env: [env.reset(seed=seed)[0] for seed in seeds]
    env, begin = ppo.Prompts(path), -(-first // n) * n
    evaluated = order(range(n), env)
    assert order(range(n, 3 * n), env) == 2 * evaluated and len(set(evaluated)) == n
    in_file = [json.loads(line)["prompt"] for line in Path(path).read_text().splitlines()]
    assert sorted(evaluated) == sorted(in_file) and evaluated != in_file  # which may be sorted, as by difficulty
    passes = [order(range(begin + i * n, begin + (i + 1) * n), env) for i in range(9)]
    assert all(sorted(rows) == sorted(evaluated) for rows in passes) and len(set(map(tuple, passes))) == 9
    ppo.shuffled_indices.cache_clear()
    again = ppo.Prompts(path)
    backwards = order(range(begin + 9 * n - 1, begin - 1, -1), again)
    assert backwards[::-1] == [row for rows in passes for row in rows]  # a function of the seed alone
    assert order(range(begin - 1, begin), env) == order(range(begin - 1, begin), again)
    assert ppo.first_training_seed(ppo.Args(), env) % n == 0  # a pass begins with the run
    orders = {tuple(order(range(seed, seed + n), env))
              for seed in (ppo.first_training_seed(ppo.Args(seed=s), env) for s in range(9))}  # fmt: skip
    assert len(orders) == 9


def test_training_seeds_are_above_those_of_evaluations(ppo):
    env = ppo.SortDigits()
    assert all(2**20 <= ppo.first_training_seed(ppo.Args(seed=seed), env) < 2**31 for seed in range(20_000))


def test_an_end_that_is_both_is_terminated(ppo):
    env = types.SimpleNamespace(step=lambda _: ("", 1.0, True, True, {}))
    assert ppo.checked_step(env, "a") == ([], 1.0, "terminated", {})


# --- Exports, Mistral


def test_an_export_is_replaced_only_by_a_complete_one(ppo, tmp_path):
    tokenizer, model = ppo.embedded_model(ppo.fill_in_defaults(ppo.Args()), ppo.SortDigits())
    path, first = tmp_path / "model", copy.deepcopy(model)
    ppo.save_hf_checkpoint(model, tokenizer, path)
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0)
    disk_is_full = mock.patch.object(ppo.safetensors.torch, "save_file", raises(OSError("No space left")))
    with disk_is_full, pytest.raises(ppo.UserError, match=rf"^cannot write {path}: OSError: No space left"):
        ppo.save_hf_checkpoint(model, tokenizer, path)
    for expected in first, model:  # the second is saved below
        loaded, _ = ppo.load_hf_checkpoint(path)
        assert all(torch.equal(x, expected.state_dict()[name]) for name, x in loaded.state_dict().items())
        assert ppo.HFTokenizer(path).encode("12=") == tokenizer.encode("12=")
        ppo.save_hf_checkpoint(model, tokenizer, path)
    assert [folder.name for folder in tmp_path.iterdir()] == ["model"]


MISTRAL = {"mistral": (transformers.MistralConfig, dict(num_key_value_heads=2, sliding_window=None))}


@torch.no_grad()
def test_mistral_without_a_window_has_the_logits_of_transformers_here_and_in_the_export(ppo, tmp_path):
    tokens = torch.randint(3, VOCABULARY, (2, 100))
    with mock.patch.dict(FAMILIES, MISTRAL):
        folder = hf_folder(tmp_path / "in", "mistral")
    theirs, ours = load_theirs(folder)[0], ppo.load_hf_checkpoint(folder)[0]
    assert type(theirs) is transformers.MistralForCausalLM and theirs(tokens).logits.std() > 0.5
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
    ppo.save_hf_checkpoint(ours, ppo.HFTokenizer(folder), tmp_path / "out")
    exported = load_theirs(tmp_path / "out")[0]
    assert type(exported) is transformers.MistralForCausalLM and exported.config.sliding_window is None
    assert torch.equal(exported(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("family", ["mistral", "qwen2, tied", "qwen3, several files"])
def test_attention_with_a_window_is_refused(ppo, tmp_path, family):
    with mock.patch.dict(FAMILIES, MISTRAL):
        folder = hf_folder(tmp_path / "model", family)
    config = json.loads((folder / "config.json").read_text()) | {"sliding_window": 4096, "use_sliding_window": True}
    if family == "mistral":
        del config["use_sliding_window"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ppo.UserError, match=r"config\.json: .*sliding_window 4096: attention must have no window"):
        ppo.load_hf_checkpoint(folder)
    if family != "mistral":  # Qwen's configurations name a window that they do not use
        (folder / "config.json").write_text(json.dumps(config | {"use_sliding_window": False}))
        ppo.load_hf_checkpoint(folder)


# --- What forks add


def test_numbers_of_a_fork_are_logged_as_floats(ppo, tmp_path):
    def measure(experience):
        experience.metrics["mine/rows"] = experience.mask.sum()
        experience.metrics["mine/half"] = torch.tensor(0.5)
        return experience

    with mock.patch.object(ppo, "make_experience", changed(ppo.make_experience, measure)):
        seen = record(ppo, tmp_path)
    for row, e in zip(seen.rows, seen.experiences, strict=True):
        assert repr(row["mine/rows"]) == repr(float(e.mask.sum())) and row["mine/half"] == 0.5


@pytest.mark.both
@pytest.mark.parametrize("feedback", ["fe", ""])
def test_responses_of_all_turns_have_their_start(ppo, feedback):
    """"bc" and <eos> in each turn; an empty message leaves no gap between two responses."""
    tokenizer = ppo.HFTokenizer.from_texts([ALPHABET])
    actor = scripted_model(ppo, tokenizer, {"=": "b", "b": "c", "e": "b"})
    if not feedback:
        actor = scripted_model(ppo, tokenizer, {"=": "b", "b": "c", "<eos>": "b"})
    envs = make_envs("Endless", 3, feedback=feedback)
    width = 3 + len(feedback)
    for episode in run(ppo, actor, tokenizer, envs, samples=3, max_new_tokens=2 * width - 1 + (not feedback)):
        first = episode.prompt_length
        assert episode.response_starts == [first, first + width] and not any(episode.mask[:first])
        assert all(episode.mask[i] and tokenizer.decode([episode.ids[i]]) == "b" for i in episode.response_starts)
        assert sum(not sampled for sampled in episode.mask) == first + len(feedback)


def with_field(ppo, value):
    """A TrainState with a field `extra`."""
    field = ("extra", object, dataclasses.field(default_factory=lambda: copy.deepcopy(value)))
    return mock.patch.object(ppo, "TrainState", dataclasses.make_dataclass("State", [field], bases=(ppo.TrainState,)))


@pytest.mark.parametrize("value", [{1: 0.5}, (1, 2), {1, 2}, [(1, 2)], {"a": {2: 1}}], ids=str)
def test_a_state_that_would_come_back_different_is_refused_in_the_first_iteration(ppo, tmp_path, value):
    with with_field(ppo, value):
        refuse(ppo, tmp_path, f"cannot save TrainState.extra, {value!r}, as JSON: ", begun=True)
    assert lines(tmp_path / "runs" / "run") == []


@pytest.mark.parametrize("value", [math.nan, {"a": [1, 2.5, None, True]}, "text", -math.inf], ids=str)
def test_a_state_of_json_comes_back_as_it_was(ppo, tmp_path, value):
    loaded = []
    resume = changed(ppo.load_checkpoint, lambda state: loaded.append(state.extra) or state)
    with with_field(ppo, value), mock.patch.object(ppo, "load_checkpoint", resume):
        record(ppo, tmp_path, num_iterations=1, save_every=1)
        record(ppo, tmp_path, resume="auto", save_every=1)
    assert repr(loaded) == repr([value])


def ranks_agree(ppo, mine, other):
    """check_ranks_agree on rank 0 of two."""
    seen = []

    def gather(of_ranks, x):
        seen.append(x)
        of_ranks[:] = seen[::-1]

    with mock.patch.object(ppo.dist, "all_gather_object", gather):
        for parts in other, mine:
            ppo.check_ranks_agree(**parts)


def test_ranks_that_do_not_compute_alike_are_an_error_that_names_what(ppo):
    tokens = torch.randint(9, (4, 5))
    e = ppo.Experience(lengths=tokens[:, 0], tokens=tokens, mask=tokens > 3, sampler_logprobs=0.0 * tokens,
                       rewards=0.0 * tokens)  # fmt: skip
    same = dict(prompts=[5, 6, 7], samples=e, state=ppo.TrainState(3, eval_before={"reward": math.nan}))
    ranks_agree(ppo, copy.deepcopy(same), copy.deepcopy(same))
    for part, name, other in [
        ("prompts", "the seeds of the prompts", [5, 7, 6]),
        ("samples", "the samples that are trained on", e.select(torch.tensor([0, 1, 2]))),
        ("samples", "the samples that are trained on", dataclasses.replace(e, mask=~e.mask)),
        ("samples", "the samples that are trained on", dataclasses.replace(e, tokens=tokens.flip(0))),
        ("state", "TrainState", ppo.TrainState(3, 1, eval_before={"reward": math.nan})),
    ]:  # fmt: skip
        for ranks in (same, same | {part: other}), (same | {part: other}, same):
            error = f"the ranks differ in {name}: compute it identically on every rank"
            with pytest.raises(ppo.UserError, match=error):
                ranks_agree(ppo, *ranks)


class Disagrees(TextEnv):
    """Makes rank 1 choose other prompts."""

    def __init__(self):
        if os.environ.get("RANK") == "1":
            sys.modules["ppo_llm"].first_training_seed = lambda args, env: 2**21


gym.register("Disagrees-v0", entry_point=Disagrees)


@pytest.mark.slow
def test_two_ranks_that_choose_other_prompts_end_with_an_error(ppo, tmp_path):
    flags = SMALL | dict(env_id="test_rules:Disagrees-v0")
    error = "UserError: the ranks differ in the seeds of the prompts: compute it identically on every rank"
    with pytest.raises(ProcessRaisedException, match=error):
        run_on_ranks(ppo, tmp_path, 2, ("run", flags, None))
    assert lines(tmp_path / "run") == []


def test_every_iteration_checks_what_the_ranks_must_compute_alike(ppo, tmp_path):
    with mock.patch.object(ppo, "check_ranks_agree") as check:
        seen = record(ppo, tmp_path)
    assert [call.kwargs["samples"] for call in check.call_args_list] == seen.experiences
    assert [call.kwargs["prompts"] for call in check.call_args_list] == [[e.env_seed for e in x] for x in seen.episodes]
    assert all(type(call.kwargs["state"]) is ppo.TrainState for call in check.call_args_list)


def test_a_tensor_as_denominator_is_refused(ppo):
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for loss in (lambda denom: ppo.policy_loss(x, x, x, mask, 0.2, 0.2, None, denom),
                 lambda denom: ppo.value_loss(x, x, x, mask, None, denom)):  # fmt: skip
        loss(6)
        with pytest.raises(TypeError, match="denom must be the number of tokens of the whole minibatch, an int"):
            loss(mask.sum())


# --- Diagnosis in bfloat16


IN_BFLOAT16 = ["healthy", "tiny learning rate", "gradient of 0", "recomputed old log-probs"]


@pytest.mark.parametrize("name", slow_but(IN_BFLOAT16[:2], IN_BFLOAT16))
def test_a_ratio_that_stays_at_1_is_named_in_bfloat16_too(ppo, tmp_path, name):
    """Although rounding moves it in the second epoch, whose microbatches are others."""
    flags, cause, *fault = FAULTS[name]
    flags = RAGGED | dict(dtype="bfloat16", compile="off") | flags | (dict(actor_lr=1e-12) if flags else {})
    seen = broken(ppo, tmp_path, flags, *fault)
    assert len(seen.rows[1]["ratio/steps"]) == 4 and seen.rows[1].get("ratio/diagnosis") == cause
    if name in ("tiny learning rate", "gradient of 0"):
        assert seen.rows[0]["ratio/diagnosis"] == cause and seen.rows[1]["ratio/steps"][-1]["ratio_dev"] > 1e-6


# --- Flags that reach their user, what lasts longer than an iteration, and what scales


def test_arguments_of_the_chat_template_reach_the_actor(ppo, tmp_path):
    folder = hf_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(THINKS)
    for kwargs, thinks in ("{}", True), ('{"enable_thinking": false}', False):
        args = ppo.Args(model=str(folder), chat_template_kwargs=kwargs, max_new_tokens=9, max_prompt_tokens=9)
        tokenizer, _ = ppo.build_actor(ppo.fill_in_defaults(args), None)
        assert tokenizer.render(ppo.as_messages("a")).endswith("<think>\n\n</think>\n\n") != thinks


def test_no_prompt_is_left_out_between_two_iterations(ppo, tmp_path):
    seen = record(ppo, tmp_path, n_samples_per_prompt=4, rollout_batch_size=2, eval_episodes=0)
    first = ppo.first_training_seed(ppo.Args(), ppo.SortDigits())
    expected = [[first + 2 * i + k for k in (0, 0, 0, 0, 1, 1, 1, 1)] for i in range(2)]
    assert [call["seeds"] for call in seen.calls["rollout"]] == expected


def test_the_kl_penalty_is_that_of_the_old_logprobs_at_the_temperature_of_the_rollout(ppo, tmp_path):
    """The sampler's are made wrong by 0.1. At first the reference is the actor."""
    add = lambda e: dataclasses.replace(e, logprobs=[x + 0.1 * sampled for x, sampled in zip(e.logprobs, e.mask)])
    with mock.patch.object(ppo, "rollout", changed(ppo.rollout, lambda episodes: [*map(add, episodes)])):
        seen = record(ppo, tmp_path, kl_coef=0.1, temperature=0.6, actor_lr=0.01)
    assert abs(seen.rows[0]["objective/kl"]) < 1e-5 and abs(seen.rows[1]["objective/kl"]) > 1e-3
    for call, e in zip(seen.calls["compute_gae"], seen.experiences, strict=True):
        close(call["rewards"], e.rewards - 0.1 * (e.old_logprobs - e.ref_logprobs))


def test_an_early_stop_ends_its_own_iteration_alone(ppo, tmp_path):
    calls = []
    kl = lambda: torch.tensor(float(calls.append(0) or len(calls) == 2))
    large = lambda result: (result[0], result[1] | {"approx_kl": kl()})
    with mock.patch.object(ppo, "policy_loss", changed(ppo.policy_loss, large)):
        seen = record(ppo, tmp_path, target_kl=0.5)
    assert [len(row["ratio/steps"]) for row in seen.rows] == [1, 4]


def test_one_skipped_step_of_several_is_no_diagnosis(ppo, tmp_path):
    calls = []
    spoil = lambda result: (result[0] * (math.nan if calls.append(0) or len(calls) == 2 else 1.0), result[1])
    with mock.patch.object(ppo, "policy_loss", changed(ppo.policy_loss, spoil)):
        seen = record(ppo, tmp_path)
    assert [step["skipped"] for step in seen.rows[0]["ratio/steps"]] == [0, 1, 0, 0]
    assert not any("ratio/diagnosis" in row for row in seen.rows)


def test_the_name_of_a_run_is_that_of_rank_0(ppo, tmp_path):
    gather = lambda of_ranks, mine: of_ranks.__setitem__(slice(None), ["of rank 0", mine])
    with mock.patch.object(ppo, "RANK", 1), mock.patch.object(ppo.dist, "all_gather_object", gather):
        run = ppo.Run(ppo.Args(log_dir=str(tmp_path)), ppo.TrainState(), None, contextlib.ExitStack())
    assert run.path == tmp_path / "of rank 0" and not run.path.exists()


def test_a_file_that_cannot_be_written_is_the_earlier_one(ppo, tmp_path):
    """As with a full disk. Otherwise a run that has failed could not begin anew."""
    path = tmp_path / "summary.json"
    ppo.write_json(path, {"status": "failed"})

    def half(self, content):
        with open(self, "wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError("No space left")

    with mock.patch.object(type(path), "write_bytes", half), pytest.raises(OSError, match="No space left"):
        ppo.write_json(path, {"status": "completed"})
    assert ppo.read_json(path) == {"status": "failed"}


def test_ranks_agree_on_a_signal_that_several_have_received(ppo):
    """The exit code is 128 and its number."""
    stop = ppo.StopSignals()
    stop.received = signal.SIGTERM
    with mock.patch.object(ppo, "of_all_ranks", lambda x: [x, x]):
        stop.agree()
    assert stop.number == signal.SIGTERM


def test_rewards_of_a_hundredth_train_like_large_ones(ppo, tmp_path):
    with mock.patch.object(ppo, "compute_gae", changed(ppo.compute_gae, lambda result: [0.01 * x for x in result])):
        [e] = record(ppo, tmp_path, num_iterations=1).experiences
    assert 1e-4 < e.advantage_std < 5e-3 and e.advantages[e.mask].std() == pytest.approx(1, rel=0.01)


def test_whitening_keeps_a_small_deviation(ppo):
    x, mask = 0.01 * torch.randn(9, 50), torch.rand(9, 50) < 0.5
    assert ppo.masked_whiten(x, mask)[mask].std() == pytest.approx(1, rel=1e-3)


def test_the_logged_deviation_of_advantages_is_over_the_mask(ppo, tmp_path):
    seen = record(ppo, tmp_path)
    for row, call in zip(seen.rows, seen.calls["compute_gae"], strict=True):
        advantages = call["result"][0][call["mask"]]
        assert row["ratio/advantage_std"] == pytest.approx(float(advantages.std()))


def test_rewards_and_kl_are_logged_of_samples_with_a_reward(ppo, tmp_path):
    """The first turn of the others gives half a point."""
    seen = record(ppo, tmp_path, env_id="test_data:Unscored-v0", max_new_tokens=64, kl_coef=0.1, actor_lr=0.01)
    for row, e, episodes in zip(seen.rows, seen.experiences, seen.episodes, strict=True):
        scored = [i for i, episode in enumerate(episodes) if episode.stop != "unscored"]
        assert 0 < len(scored) < 8 and all(sum(episode.rewards) > 0 for episode in episodes)
        assert row["objective/reward"] == pytest.approx(sum(sum(episodes[i].rewards) for i in scored) / len(scored))
        kls = ((e.old_logprobs - e.ref_logprobs) * e.mask).sum(1)[scored]
        assert row["objective/kl"] == pytest.approx(float(kls.mean()), abs=1e-6)
    assert abs(row["objective/kl"]) > 1e-3


def test_means_of_three_episodes_by_hand(ppo):
    """One ended, one was cut, one has no reward; the number "a" is of one, "b" of two, "c" of the one without."""
    ended, cut, unscored = (ppo.Episode(i, mask=[False, *[True] * n]) for i, n in enumerate([2, 3, 0]))
    ended.rewards, ended.stop, ended.success, ended.score = [0.0, 0.5, 0.5], "terminated", True, 0.25
    cut.rewards, cut.stop = [0.0, 0.0, 0.0, -0.5], "length"
    unscored.rewards, unscored.stop, unscored.success, unscored.score = [8.0], "unscored", True, 9.0
    ended.metrics, cut.metrics, unscored.metrics = {"a": 6.0, "b": 1.0}, {"b": 2.0}, {"c": 1.0}
    assert ppo.episode_means([ended, cut, unscored], "x/") == {
        "x/reward": 0.375, "x/accuracy": 0.5, "x/response_tokens": 2.5, "x/truncated": 0.5,
        "x/unscored": pytest.approx(1 / 3), "x/reward_model": 0.125, "env/a": 6.0, "env/b": 1.5}  # fmt: skip
    nothing = ppo.episode_means([unscored])
    assert nothing.pop("unscored") == 1 and set(nothing.values()) == {0}


def test_a_number_of_the_environment_is_the_last_turns(ppo):
    tokenizer, episode = ppo.HFTokenizer.from_texts([ALPHABET]), ppo.Episode(0)
    for turn in (1, 2):
        episode.add(tokenizer.encode("a"), [0.0])
        ppo.add_rewards(episode, 1.0, {"metrics": {"turn": turn, f"turn{turn}": turn}}, turn - 1, tokenizer)
    assert episode.metrics == {"turn": 2, "turn1": 1, "turn2": 2}


def test_the_warm_start_encodes_demonstrations_after_their_prompts_and_clips_gradients(ppo, tmp_path):
    """Some tokenizers begin a text with a space."""
    contexts, encode = [], ppo.HFTokenizer.encode

    def encode_seen(tokenizer, text, context="", *rest, **kwargs):
        if text == "fab":
            contexts.append(context)
        return encode(tokenizer, text, context, *rest, **kwargs)

    with mock.patch.object(ppo.HFTokenizer, "encode", encode_seen):
        seen = record(ppo, tmp_path, sft_steps=2, max_grad_norm=0.01, num_iterations=1)
    first = ppo.first_training_seed(ppo.Args(), ppo.SortDigits())
    prompts = ("ab=", "fed=", "x=", "bad=", "day=", "face=")
    assert contexts == [prompts[(first + i) % 6] for i in range(2 * 16)]
    assert [norm for _, _, norm in seen.steps[:2]] == pytest.approx([0.01] * 2, rel=1e-3)


@pytest.mark.parametrize("end", ["completed", "interrupted", "failed"])
def test_the_last_events_are_written_and_the_summary_says_how_the_run_ended(ppo, tmp_path, end):
    writer, number = mock.Mock(), signal.SIGTERM
    ends = {"interrupted": lambda *_: signal.raise_signal(number), "failed": raises(RuntimeError("out of memory"))}
    failure = pytest.raises(RuntimeError) if end == "failed" else contextlib.nullcontext()
    with mock.patch.object(ppo, "SummaryWriter", writer), failure:
        with on_call(ppo, "policy_loss", 2, ends.get(end, lambda *_: None)):
            record(ppo, tmp_path, tensorboard=True)
    writer.return_value.close.assert_called_once()
    assert ppo.read_json(tmp_path / "run" / "summary.json")["status"] == end


def test_a_file_stays_as_it_was_if_its_new_content_does_not_fit_on_the_disk(ppo, tmp_path):
    def write_half(path, content):
        with open(path, "wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left")

    ppo.write_json(tmp_path / "config.json", {"seed": 1})
    with mock.patch.object(Path, "write_bytes", write_half), pytest.raises(OSError, match="No space left"):
        ppo.write_json(tmp_path / "config.json", {"seed": 2})
    assert ppo.read_json(tmp_path / "config.json") == {"seed": 1}


def test_a_full_disk_does_not_hide_the_error_of_the_run(ppo, tmp_path):
    write_json = ppo.write_json
    full = lambda path, content: raises(OSError("No space"))() if path.name == "summary.json" else write_json(path, content)  # noqa: E501
    with mock.patch.object(ppo, "write_json", full), mock.patch.object(ppo, "policy_loss", raises(KeyError("first"))):
        with pytest.raises(KeyError, match="first"):
            record(ppo, tmp_path)


def test_tensorboard_of_a_resumed_run_forgets_what_will_be_written_again(ppo, tmp_path):
    for flags in dict(), dict(resume="auto", num_iterations=3):
        writer = mock.Mock()
        with mock.patch.object(ppo, "SummaryWriter", writer):
            record(ppo, tmp_path, tensorboard=True, save_every=1, **flags)
        assert writer.call_args == mock.call(tmp_path / "run", purge_step=2 if flags else 0)
