"""Faults are put into the real training loop; the diagnosis has to name them, and nothing when there is none."""

import copy
import math
import traceback
from unittest import mock

import pytest
import torch

pytestmark = pytest.mark.shared

SMALL = dict(
    rollout_batch_size=16, train_batch_size=8, num_iterations=2, sft_steps=0, eval_episodes=1, save_every=0,
    env_id="environments:Plain-v0")  # fmt: skip
HEALTHY = dict(
    first_dev=1e-7, first_kl=0.0, last_dev=0.1, post_dev=0.1, out_of_clip=0.1, steps=8, planned=8, skipped=0,
    early_stop=False, tokens=100, adv_raw_std=0.5, grad_norm=1.0, lr=1e-3, changed_frac=1.0, update_norm=1.0,
    param_norm=10.0, param_dtype="torch.float32", compute_dtype="torch.float32", signed_t=5.0, sampler_diff=1e-7,
    phase="train")  # fmt: skip
STUCK = dict(last_dev=1e-7, post_dev=1e-7)
BF16 = dict(first_dev=0.01, last_dev=0.01, post_dev=0.01, compute_dtype="torch.bfloat16", signed_t=0.5)
NAN = dict(first_dev=math.nan, last_dev=math.nan, post_dev=math.nan, signed_t=math.nan, grad_norm=0.0)


@pytest.mark.parametrize("changes, expected", [
    ({}, None), (STUCK | dict(phase="critic_warmup", tokens=0), "critic_warmup"),
    (STUCK | dict(early_stop=True, steps=0), "kl_early_stop"),
    (dict(last_dev=1e-7, post_dev=0.2, steps=1, planned=1), "one_update_by_design"),
    (STUCK | dict(skipped=8, steps=0), "steps_skipped"),
    (NAN | dict(skipped=8, steps=0), "steps_skipped"), (NAN | dict(skipped=1, steps=7, last_dev=0.1), "steps_skipped"),
    (STUCK | dict(tokens=0), "empty_mask"), (STUCK | dict(post_dev=0.2), "old_logprob_recomputed"),
    (STUCK | dict(adv_raw_std=1e-9), "advantage_zero"), (STUCK | dict(grad_norm=0.0), "no_grad_to_actor"),
    (STUCK | dict(lr=0.0, changed_frac=0.0, update_norm=0.0), "lr_or_clip_too_small"),
    (STUCK | dict(param_dtype="torch.bfloat16", changed_frac=0.01, signed_t=0.5), "bf16_underflow"),
    (dict(param_dtype="torch.bfloat16", changed_frac=0.01), "bf16_underflow"),  # the few that changed did move it
    (STUCK | dict(update_norm=1e-9), "lr_or_clip_too_small"), (STUCK, "forward_ignores_update"),
    (dict(first_dev=0.01), "forward_mismatch"), (dict(first_dev=0.3, last_dev=0.3), "forward_mismatch"),
    (dict(sampler_diff=0.01), "sampler_mismatch"), (dict(out_of_clip=0.95), "too_tight_clip"),
    (BF16 | dict(signed_t=9.0, sampler_diff=0.01), None),  # the ratio is noisy in bfloat16: drift decides
    (BF16 | dict(signed_t=9.0, first_dev=1.5), None),  # one token far off by rounding
    (BF16 | dict(signed_t=9.0, first_dev=0.1, last_dev=0.5, first_kl=0.005), "forward_mismatch"),
    # In bfloat16 signed_t may be small although the ratio moved, in spite of an early stop or a skipped step.
    (BF16 | dict(last_dev=3.0, early_stop=0.05, steps=6), None), (BF16 | dict(last_dev=3.0, skipped=1, steps=7), None),
    # What looks like a reason for a ratio near 1 does not hide that the first ratio is off.
    (dict(first_dev=0.3, last_dev=0.3, first_kl=0.2, early_stop=0.2, steps=0), "forward_mismatch"),
    (dict(first_dev=0.005, last_dev=0.005, post_dev=0.2, steps=1, planned=1), "forward_mismatch"),
    (BF16 | dict(first_dev=0.5, first_kl=0.2, signed_t=9.0, steps=1, planned=1), "forward_mismatch"),
    (BF16 | dict(update_norm=1e-9), "lr_or_clip_too_small"), (STUCK | dict(changed_frac=0.0), "optimizer_noop"),
])  # fmt: skip
def test_diagnosis_of_signals(ppo, changes, expected):
    signals = HEALTHY | changes
    cause, advice = ppo.diagnose_ratio(signals)
    assert cause == expected and (advice or expected is None)
    assert ("undecided" in signals) == (changes.get("signed_t") == 0.5)


def first_model(stale, model):
    """A copy of the first model that is seen, kept in `stale`."""
    return stale.setdefault("model", copy.deepcopy(model))


def stale_forward(original, model, *args, stale):
    logprobs, entropy = original(model, *args)
    with torch.no_grad():
        old, _ = original(first_model(stale, model), *args)
    return old + logprobs - logprobs.detach(), entropy


def empty_mask(original, *args, stale):
    batch = original(*args)
    for x in (batch.mask, batch.logprobs, batch.rewards):
        x.zero_()
    return batch


def is_training():
    """Scoring may run with gradients, too."""
    return not any(frame.name == "forward_all" for frame in traceback.extract_stack())


def dropout(original, *args, stale):
    logprobs, entropy = original(*args)
    return logprobs + 0.003 * is_training() * torch.randn_like(logprobs), entropy


def late_dropout(original, *args, stale):
    """From the second iteration on: the first trains on 4 microbatches."""
    stale["calls"] = stale.get("calls", 0) + is_training()
    logprobs, entropy = original(*args)
    return logprobs + 0.003 * (stale["calls"] > 4) * torch.randn_like(logprobs), entropy


def nan_while_training(original, *args, stale):
    logprobs, entropy = original(*args)
    return logprobs * (math.nan if is_training() else 1.0), entropy


CONSTANT = dict(env_id="environments:Constant-v0")
FAULTS = {  # name: (flags, cause, function of the script, what replaces it)
    "healthy": ({}, None),
    "learning rate 0": (dict(actor_lr=0.0), "lr_or_clip_too_small"),
    "constant reward": (CONSTANT | dict(env_kwargs='{"reward": 0.0}'), "advantage_zero"),
    "one update by design": (dict(ppo_epochs=1, train_batch_size=16), "one_update_by_design"),
    "tiny learning rate": (dict(actor_lr=1e-9), "lr_or_clip_too_small"),
    "too tight clip": (dict(clip_low=1e-6, clip_high=1e-6), "too_tight_clip"),
    "target KL": (dict(target_kl=1e-9), "kl_early_stop"),
    "warm-up": (dict(critic_warmup_iterations=2), "critic_warmup"),
    "optimizer over a copy": (
        {}, "optimizer_noop", "make_optimizer", lambda make, model, args, stale: make(copy.deepcopy(model), args)),
    "detached log-probs": (
        {}, "no_grad_to_actor", "policy_loss", lambda loss, new, *rest, stale: loss(new.detach(), *rest)),
    "recomputed old log-probs": (
        {}, "old_logprob_recomputed", "policy_loss", lambda loss, a, b, *rest, stale: loss(a, a.detach(), *rest)),
    "fitted critic": (
        CONSTANT, "advantage_zero", "compute_gae", lambda gae, rewards, values, *rest, stale: gae(
            rewards, torch.ones_like(values), *rest)),
    "bfloat16 weights": (
        dict(actor_lr=1e-6), "bf16_underflow", "on_meta", lambda make, config, head="lm", dtype=None, stale=None: make(
            config, head, torch.bfloat16 if head == "lm" else torch.float32)),
    "stale sampler weights": (
        {}, "sampler_mismatch", "rollout", lambda roll, actor, *args, stale: roll(first_model(stale, actor), *args)),
    "empty mask": ({}, "empty_mask", "rollout", empty_mask),
    "stale forward": ({}, "forward_ignores_update", "sampled_logprobs", stale_forward),
    "dropout": ({}, "forward_mismatch", "sampled_logprobs", late_dropout),
    "dropout, one update": (
        dict(ppo_epochs=1, train_batch_size=16), "forward_mismatch", "sampled_logprobs", dropout),
    "dropout, target KL": (dict(target_kl=1e-6), "forward_mismatch", "sampled_logprobs", dropout),  # no step is made
    "NaN": ({}, "steps_skipped", "sampled_logprobs", nan_while_training),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_in_the_loop_is_named(ppo, tmp_path, monkeypatch, name):
    flags, expected, *replaced = FAULTS[name]
    for function, change in [replaced] if replaced else []:
        original, stale = getattr(ppo, function), {}
        monkeypatch.setattr(ppo, function, lambda *args: change(original, *args, stale=stale))
    found, printed, diagnose = [], [], ppo.diagnose_ratio
    monkeypatch.setattr(ppo, "diagnose_ratio", lambda signals: found.append(diagnose(signals)) or found[-1])
    monkeypatch.setattr(ppo, "print0", printed.append)
    monkeypatch.setattr(ppo, "SummaryWriter", mock.Mock())
    ppo.train(ppo.Args(**(SMALL | flags | dict(log_dir=str(tmp_path)))))
    assert len(found) == 2 and found[1][0] == expected
    printed = [line for line in printed if "ratio: " in line]
    assert len(printed) == (expected is not None)  # once, not in every iteration
    assert expected is None or expected in printed[0]
