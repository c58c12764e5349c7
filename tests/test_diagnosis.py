"""Faults are put into the real training loop; the diagnosis has to name them, and nothing when there is none."""

import copy
import json
from unittest import mock

import pytest
import torch

pytestmark = pytest.mark.shared

SMALL = dict(
    rollout_batch_size=16,
    train_batch_size=8,
    num_iterations=3,
    sft_steps=0,
    eval_episodes=1,
    log_completions=0,
    env_id="environments:Plain-v0",
)
HEALTHY = dict(
    first_dev=1e-7,
    last_dev=0.1,
    post_dev=0.1,
    out_of_clip=0.1,
    steps=8,
    planned=8,
    skipped=0,
    early_stop=False,
    tokens=100,
    adv_raw_std=0.5,
    reward_std=0.5,
    grad_norm=1.0,
    lr=1e-3,
    changed_frac=1.0,
    update_norm=1.0,
    param_norm=10.0,
    param_dtype="torch.float32",
    signed_t=5.0,
    sampler_diff=1e-7,
    phase="train",
)


@pytest.fixture
def causes(ppo, tmp_path, monkeypatch):
    """causes(**flags) trains and returns the cause named in each iteration."""
    monkeypatch.setattr(ppo, "SummaryWriter", mock.Mock())

    def causes(**flags):
        found, diagnose, causes.lines = [], ppo.diagnose_ratio, []
        monkeypatch.setattr(ppo, "diagnose_ratio", lambda signals: found.append(diagnose(signals)) or found[-1])
        monkeypatch.setattr(ppo.tqdm, "write", causes.lines.append)
        try:
            ppo.train(ppo.Args(**(SMALL | dict(log_dir=str(tmp_path), run_name=f"run{len(flags)}") | flags)))
        finally:
            monkeypatch.setattr(ppo, "diagnose_ratio", diagnose)
        return [diagnosis.cause for diagnosis in found]

    return causes


def wrap(monkeypatch, ppo, name, change):
    """Replace ppo.<name> by change(original, *args)."""
    original = getattr(ppo, name)
    monkeypatch.setattr(ppo, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def optimizer_over_a_copy(ppo, monkeypatch):
    def init(learner, model, *rest):
        original(learner, copy.deepcopy(model), *rest)
        learner.model = model

    original = ppo.Learner.__init__
    monkeypatch.setattr(ppo.Learner, "__init__", init)


def detached_logprobs(ppo, monkeypatch):
    wrap(monkeypatch, ppo, "policy_loss", lambda loss, logprobs, *rest: loss(logprobs.detach(), *rest))


def recomputed_old_logprobs(ppo, monkeypatch):
    wrap(monkeypatch, ppo, "policy_loss", lambda loss, logprobs, old, *rest: loss(logprobs, logprobs.detach(), *rest))


def nan_loss(ppo, monkeypatch):
    def change(loss, *args):
        value, stats = loss(*args)
        return value * float("nan"), stats

    wrap(monkeypatch, ppo, "policy_loss", change)


def empty_mask(ppo, monkeypatch):
    def change(rollout, *args, **kwargs):
        batch = rollout(*args, **kwargs)
        batch.mask, batch.logprobs = torch.zeros_like(batch.mask), torch.zeros_like(batch.logprobs)
        return batch

    wrap(monkeypatch, ppo, "rollout", change)


def fitted_critic(ppo, monkeypatch):
    wrap(
        monkeypatch,
        ppo,
        "compute_gae",
        lambda gae, rewards, values, *rest: gae(rewards, torch.ones_like(values), *rest),
    )


def bfloat16_weights(ppo, monkeypatch):
    def change(make, *args):
        tokenizer, actor, config = make(*args)
        return tokenizer, actor.to(torch.bfloat16), config

    wrap(monkeypatch, ppo, "embedded_model", change)


def stale_sampler(ppo, monkeypatch):
    first = []

    def change(rollout, actor, *args, **kwargs):
        first.append(copy.deepcopy(actor))
        return rollout(first[0], *args, **kwargs)

    wrap(monkeypatch, ppo, "rollout", change)


def stale_forward(ppo, monkeypatch):
    first = {}

    def change(at_sampled, model, *args):
        out, entropy = at_sampled(model, *args)
        if model.head == "lm":
            with torch.no_grad():
                stale, _ = at_sampled(first.setdefault(id(model), copy.deepcopy(model)), *args)
            out = stale + out - out.detach()
        return out, entropy

    wrap(monkeypatch, ppo, "at_sampled", change)


def dropout(ppo, monkeypatch, after=0, p=0.1):
    forward, calls = ppo.MLP.forward, []
    wrap(monkeypatch, ppo, "rollout", lambda rollout, *a, **k: calls.append(1) or rollout(*a, **k))

    def change(self, x):
        out = forward(self, x)
        return torch.nn.functional.dropout(out, p) if torch.is_grad_enabled() and len(calls) > after else out

    monkeypatch.setattr(ppo.MLP, "forward", change)


def nothing(ppo, monkeypatch):
    pass


def late_dropout(ppo, monkeypatch):
    dropout(ppo, monkeypatch, after=3)  # two evaluations and the first iteration


FAULTS = [
    ("healthy", nothing, {}, None),
    ("learning rate 0", nothing, dict(actor_lr=0.0), "lr_zero"),
    ("optimizer over a copy", optimizer_over_a_copy, {}, "optimizer_noop"),
    ("detached log-probs", detached_logprobs, {}, "no_grad_to_actor"),
    ("recomputed old log-probs", recomputed_old_logprobs, {}, "old_logprob_recomputed"),
    (
        "constant reward",
        nothing,
        dict(env_id="environments:Constant-v0", env_kwargs='{"reward": 0.0}'),
        "advantage_zero",
    ),
    (
        "constant reward, fitted critic",
        fitted_critic,
        dict(env_id="environments:Constant-v0", env_kwargs='{"reward": 1.0}'),
        "advantage_zero",
    ),
    ("empty mask", empty_mask, {}, "empty_mask"),
    ("all steps skipped", nan_loss, {}, "steps_skipped"),
    ("one update by design", nothing, dict(ppo_epochs=1, train_batch_size=16), "one_update_by_design"),
    ("bfloat16 weights", bfloat16_weights, dict(actor_lr=1e-6), "bf16_underflow"),
    ("tiny learning rate", nothing, dict(actor_lr=1e-9), "lr_or_clip_too_small"),
    ("stale forward", stale_forward, {}, "forward_ignores_update"),
    ("stale sampler weights", stale_sampler, {}, "sampler_mismatch"),
    ("too tight clip", nothing, dict(clip_low=1e-6, clip_high=1e-6), "too_tight_clip"),
    ("dropout", late_dropout, {}, "forward_mismatch"),
    ("target KL", nothing, dict(target_kl=1e-9), "kl_early_stop"),
    ("warm-up", nothing, dict(critic_warmup_iterations=3), "critic_warmup"),
]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("fault, flags, expected", [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_fault_in_the_loop_is_named(ppo, causes, monkeypatch, fault, flags, expected, seed):
    fault(ppo, monkeypatch)
    found = causes(seed=seed, **flags)
    assert found[1:] == [expected] * 2
    printed = [line for line in causes.lines if "ratio: " in line]
    assert len(printed) == (expected is not None)  # once, not in every iteration
    if expected:
        assert expected in printed[0]


def test_dropout_in_the_first_iteration_ends_the_run(ppo, causes, monkeypatch):
    dropout(ppo, monkeypatch)
    with pytest.raises(ppo.UserError, match="dropout"):
        causes()


def test_skipped_steps_change_nothing_and_end_the_run(ppo, causes, monkeypatch, tmp_path):
    """Four steps an iteration: the sixth is in the second one, which ends as any other, with a checkpoint behind it."""
    nan_loss(ppo, monkeypatch)
    with pytest.raises(ppo.UserError, match="max-skipped-steps 6"):
        causes(max_skipped_steps=6, run_name="skips")
    assert any("model.embed_tokens.weight" in line for line in causes.lines)
    rows = [json.loads(line) for line in (tmp_path / "skips" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["grad/skipped_actor"], row["param/changed_frac"]) for row in rows] == [(4, 0), (4, 0)]
    assert (tmp_path / "skips" / "checkpoints" / "iter_000002").is_dir()
    summary = json.loads((tmp_path / "skips" / "summary.json").read_text())
    assert (summary["iterations"], summary["update_steps"]) == (2, 8)


def test_a_changed_cause_is_printed_again(ppo, causes, monkeypatch):
    causes(num_iterations=4, critic_warmup_iterations=2, actor_lr=0.0)
    assert [line.split(": ")[2] for line in causes.lines if "ratio: " in line] == ["critic_warmup", "lr_zero"]


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, None),
        (dict(last_dev=1e-7, post_dev=1e-7, lr=0.0), "lr_zero"),
        (dict(last_dev=1e-7, phase="critic_warmup", tokens=0), "critic_warmup"),
        (dict(last_dev=1e-7, post_dev=0.2), "old_logprob_recomputed"),
        (dict(last_dev=1e-7, post_dev=0.2, steps=1, planned=1), "one_update_by_design"),
        (
            dict(
                last_dev=0.01,
                first_dev=0.01,
                post_dev=0.01,
                signed_t=0.5,
                param_dtype="torch.bfloat16",
                changed_frac=0.01,
            ),
            "bf16_underflow",
        ),
        (dict(last_dev=0.01, first_dev=0.01, post_dev=0.01, signed_t=9.0, param_dtype="torch.bfloat16"), None),
        (dict(signed_t=3.2, param_dtype="torch.bfloat16", changed_frac=0.01), "bf16_underflow"),  # a few did move it
        (
            dict(first_dev=0.01, signed_t=0.5, compute_dtype="torch.bfloat16", changed_frac=0.01, update_norm=1e-9),
            "lr_or_clip_too_small",
        ),
        (dict(out_of_clip=0.95), "too_tight_clip"),
        (dict(sampler_diff=0.01), "sampler_mismatch"),
        (dict(sampler_diff=0.01, first_dev=0.01), "forward_mismatch"),
    ],
)
def test_diagnosis_of_signals(ppo, changes, expected):
    diagnosis = ppo.diagnose_ratio(HEALTHY | changes)
    assert diagnosis.cause == expected
    assert expected is None or (diagnosis.evidence and diagnosis.advice)


def test_undecided_is_said_under_bfloat16(ppo):
    signals = HEALTHY | dict(last_dev=0.01, first_dev=0.01, post_dev=0.01, signed_t=1.0, param_dtype="torch.bfloat16")
    assert "undecided" in ppo.diagnose_ratio(signals).evidence
    assert "undecided" not in ppo.diagnose_ratio(signals | dict(signed_t=9.0)).evidence
