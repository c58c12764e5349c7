"""Faults are put into the real training loop; the diagnosis has to name them, and nothing when there is none."""

import copy
import dataclasses
import functools
import math
import traceback
from unittest import mock

import pytest
import torch
from conftest import slow_but
from test_train import changed, record

pytestmark = pytest.mark.shared


def is_training():
    """Scoring may run with gradients, too."""
    return not any(frame.name == "forward_all" for frame in traceback.extract_stack())


def stale_forward(original, model, *args, kept):
    logprobs, entropy = original(model, *args)
    old, _ = original(kept.setdefault("model", copy.deepcopy(model)), *args)
    return old.detach() + (logprobs - logprobs.detach()), entropy


def in_training(change, after=0):
    """`change` the log-probs of training, after a number of microbatches."""

    def replaced(original, *args, kept):
        kept["calls"] = kept.get("calls", 0) + is_training()
        logprobs, entropy = original(*args)
        return change(logprobs) if is_training() and kept["calls"] > after else logprobs, entropy

    return "sampled_logprobs", replaced


def attends_to_padding(original, model, e, minibatches, args, kept):
    """The log-probs of rows that begin with four padding tokens, which no mask hides."""
    logits = model(torch.nn.functional.pad(e.tokens, (4, 0)))[:, 3:-1] / args.temperature
    return logits.detach().log_softmax(-1).gather(2, e.tokens[..., None])[..., 0] * e.mask


def nan_statistics(original, *args, kept, **flags):
    """As of a fork that divides them by the tokens of a mask of its own, which may have none."""
    loss, stats = original(*args, **flags)
    return loss, stats | {"ratio_dev": stats["ratio_dev"] * math.nan}


dropout = lambda logprobs: logprobs + 0.003 * torch.randn_like(logprobs)
FAULTS = {  # name: (flags, cause, function of the script, what replaces it)
    "healthy": ({}, None),
    "NaN in the statistics alone": ({}, None, "policy_loss", nan_statistics),
    "warm-up": (dict(critic_warmup_iterations=2), "critic_warmup"),
    "empty mask": ({}, "empty_mask", "rollout", lambda play, *args, kept: [
        dataclasses.replace(episode, mask=[False] * len(episode.ids)) for episode in play(*args)]),
    "dropout in the second iteration": ({}, "forward_mismatch", *in_training(dropout, after=4)),
    "target KL": (dict(target_kl=1e-9), "kl_early_stop"),
    "NaN": ({}, "steps_skipped", *in_training(lambda logprobs: logprobs * math.nan)),
    "bfloat16 weights": (
        dict(actor_lr=1e-8), "bf16_underflow", "build_model", lambda build, config, head, *rest, kept: build(
            config, head, *rest).to(torch.bfloat16 if head == "lm" else torch.float32)),
    "one update": (dict(ppo_epochs=1, train_batch_size=16), "one_update_by_design"),
    "equal advantages": ({}, "advantage_zero", "compute_gae", lambda gae, *args, kept: [0 * x for x in gae(*args)]),
    "gradient of 0": (
        {}, "no_grad_to_actor", "policy_loss", lambda loss, new, *rest, kept, **flags: loss(
            new.detach() + 0 * new, *rest, **flags)),
    "optimizer over a copy": (
        {}, "optimizer_noop", "make_optimizer", lambda make, model, kept: make(copy.deepcopy(model))),
    "tiny learning rate": (dict(actor_lr=1e-9), "lr_or_clip_too_small"),
    "recomputed old log-probs": (
        {}, "old_logprob_recomputed", "policy_loss", lambda loss, a, b, *rest, kept, **flags: loss(
            a, a.detach(), *rest, **flags)),
    "stale forward": ({}, "forward_ignores_update", "sampled_logprobs", stale_forward),
}  # fmt: skip
MISMATCHES = {  # from the first update on
    "dropout": (dict(target_kl=1e-6), *in_training(dropout)),  # no step is made
    "https://github.com/jingyaogong/minimind/pull/814": ({}, *in_training(lambda x: x.bfloat16().float())),
    "https://github.com/CarperAI/trlx/issues/107": ({}, "logprobs_of_all", attends_to_padding),
    "shifted by one": ({}, *in_training(lambda logprobs: logprobs.roll(1, dims=1))),
}


def broken(ppo, folder, flags, function=None, change=None):
    flags = dict(rollout_batch_size=16, train_batch_size=8) | flags
    if function is None:
        return record(ppo, folder, **flags)
    owner = ppo.Transformer if function == "sampled_logprobs" else ppo
    original, kept = getattr(owner, function), {}
    replaced = functools.wraps(original)(lambda *args, **more: change(original, *args, kept=kept, **more))
    with mock.patch.object(owner, function, replaced):
        return record(ppo, folder, **flags)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_in_the_loop_is_named_once(ppo, tmp_path, name):
    """Without another forward pass."""
    flags, cause, *fault = FAULTS[name]
    with mock.patch.object(ppo, "logprobs_of_all", wraps=ppo.logprobs_of_all) as scored:
        run = broken(ppo, tmp_path, flags, *fault)
    assert scored.call_count == 2 * len(run.rows)  # the second: new log-probs of the logged samples
    assert all(math.isfinite(row["ratio/relative_update"]) for row in run.rows)
    assert run.rows[1].get("ratio/diagnosis") == cause
    printed = [text for text in run.printed if text.startswith("  ratio: ")]
    assert len(printed) == (cause is not None) and all(f"ratio: {cause}: " in text for text in printed)


def test_a_stop_by_target_kl_after_a_warm_up_is_told_from_it(ppo, tmp_path):
    """Neither iteration has a step of the actor."""
    far = changed(ppo.policy_loss, lambda result: (result[0], result[1] | {"approx_kl": result[1]["approx_kl"] + 1}))
    with mock.patch.object(ppo, "policy_loss", far):
        run = record(ppo, tmp_path, critic_warmup_iterations=1, target_kl=0.5)
    assert [row["ratio/diagnosis"] for row in run.rows] == ["critic_warmup", "kl_early_stop"]


@pytest.mark.parametrize("name", MISMATCHES)
def test_first_ratio_of_the_run_that_is_not_1_ends_it(ppo, tmp_path, name):
    with pytest.raises(ppo.UserError, match="the first ratio of the run is not 1"):
        broken(ppo, tmp_path, *MISMATCHES[name])


@pytest.mark.parametrize("dtype", slow_but(["float32"], ["float32", "bfloat16"]))
def test_healthy_run_with_the_defaults_is_silent(ppo, tmp_path, dtype):
    names = ("env_id", "kl_coef", "rollout_batch_size", "train_batch_size", "max_new_tokens")
    defaults = {name: getattr(ppo.Args(), name) for name in names}
    run = record(ppo, tmp_path, num_iterations=3, sft_steps=40, dtype=dtype, **defaults)
    assert not any(text.startswith(("  ratio: ", "  critic: ", "  sampler: ")) for text in run.printed)
    assert all(row["ratio/last_dev"] > row["ratio/first_dev"] == row["critic/first_dev"] == 0 for row in run.rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_values_that_are_not_those_of_the_experience_are_named_once(ppo, tmp_path, dtype):
    """A fork gives all tokens of a response the value of the first, and the critic trains as before."""

    def of_first_token(experience):
        first = experience.mask & (experience.mask.cumsum(1) == 1)
        values = (experience.values * first).sum(1, keepdim=True) * experience.mask
        return dataclasses.replace(experience, values=values)

    with mock.patch.object(ppo, "make_experience", changed(ppo.make_experience, of_first_token)):
        run = record(ppo, tmp_path, num_iterations=4, dtype=dtype, critic_lr=0.01)
    assert sum("critic: its first values" in text for text in run.printed) == 1
    assert run.rows[0]["critic/first_dev"] == 0  # the head starts at 0: so are all values
    assert all(row["critic/first_dev"] > 1e-3 for row in run.rows[1:])


@pytest.mark.both
@pytest.mark.parametrize("flags", [dict(), dict(env_id="environments:TwoTurns-v0", temperature=0.6)])
def test_first_ratio_is_one_and_then_moves(ppo, tmp_path, flags):
    """And the sampler computes what the trainer does, temperature included."""
    for row in record(ppo, tmp_path, **flags).rows:
        assert row["ratio/first_dev"] == row["ratio/steps"][0]["ratio_dev"] == row["critic/first_dev"] == 0
        assert row["ratio/last_dev"] == row["ratio/steps"][-1]["ratio_dev"] > 1e-4
        assert row["debug/sampler_trainer_logprob_diff"] < 1e-5


@pytest.mark.parametrize("recompute", [True, False])
def test_old_logprobs_are_those_of_the_actor_or_of_the_sampler(ppo, tmp_path, recompute):
    add = lambda e: dataclasses.replace(e, logprobs=[x + 0.1 * sampled for x, sampled in zip(e.logprobs, e.mask)])
    with mock.patch.object(ppo, "rollout", changed(ppo.rollout, lambda episodes: [*map(add, episodes)])):
        run = record(ppo, tmp_path, recompute_old_logprobs=recompute, kl_coef=0.1)
    row = run.rows[0]
    kl = 0 if recompute else 0.1 * row["objective/response_tokens"]  # of what the ratio calls old
    assert row["objective/kl"] == pytest.approx(kl, abs=1e-4)
    assert row["ratio/first_dev"] == pytest.approx(0 if recompute else 1 - math.exp(-0.1), abs=1e-5)
    assert row["debug/sampler_trainer_logprob_diff"] == pytest.approx(0.1 if recompute else 0, abs=1e-5)
    assert "ratio/diagnosis" not in row
    [warning] = [text for text in run.printed if text.startswith("  sampler: ")]
    assert ("debug/sampler" if recompute else "ratio/first_dev") in warning
