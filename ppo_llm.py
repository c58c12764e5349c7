r"""PPO for language models, in one file and in plain PyTorch.

A language model (the actor) answers prompts, a text environment rewards the answers, and Proximal
Policy Optimization (https://arxiv.org/abs/1707.06347) makes tokens of good answers more likely. A
second transformer (the critic) predicts the reward still to come, and a frozen copy of the actor
(the reference) limits how far it drifts.

    python ppo_llm.py           # a tiny model learns to sort digits, on the CPU, in two minutes
    python ppo_llm.py --model DIR --env-id GSM8K-v0 --env-kwargs '{"path": "train.jsonl"}' \
        --eval-env-kwargs '{"path": "test.jsonl"}'
    torchrun --nproc-per-node 8 ppo_llm.py --model DIR ...    # models sharded over eight GPUs

Part I is PPO: 1. arguments, 2. mathematics, 3. training loop (`ppo`), 4. rollout. Part II is
reference material: 5. transformer, 6. tokenizer and Hugging Face checkpoints, 7. text environments,
8. metrics, evaluation, diagnosis of the ratio, 9. ranks, sharding, models, collecting samples,
10. run folder, saving, resuming.

Terminology. The actor is the policy being trained. An unsharded copy of it on every rank samples
(the sampler). The old policy is the actor before the updates of an iteration; it exists only as
`old_logprobs`. A sample is one episode: prompt, response, further turns. An iteration is a rollout
and the updates on it, a minibatch one optimizer step, a microbatch one forward and backward pass.

Layout. Rows start at index 0 and are right-padded. Everything is stored at the token's own index:
`mask[b, t]` is 1 if the actor sampled token t, `logprobs[b, t]` = log pi(token t | tokens < t),
`rewards[b, t]` is what token t earned, `values[b, t]` = V(tokens < t). Dimensions: B rows, T
tokens, S cache positions, H / Hkv heads, D head size, V vocabulary, N samples of a rollout; n
tokens of a microbatch, m of them sampled.
Compute is sharded over ranks, experience is replicated. `# FORK:` marks where people edit.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import copy
import ctypes
import dataclasses
import datetime
import functools
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
import types
import warnings
import zlib
from collections import namedtuple
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Literal

import gymnasium as gym
import safetensors.torch
import tokenizers
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

# ########################################## Part I: PPO ##########################################

# === 1. Arguments ===


@dataclass
class Args:
    """PPO for language models. Defaults that depend on other flags are printed at start."""

    seed: int = 1  # of weights, sampling and minibatches
    run_name: str | None = None  # default <env>__<script>__<seed>__<time>
    log_dir: str = "runs"  # run folders go here
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # compute dtype; auto: bfloat16 on cuda
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: on with cuda
    critic_ranks: int = 0  # ranks that hold only the critic, numbered after the actor's
    rollout_ranks: int = 0  # the last ranks, which only sample, one iteration ahead
    activation_checkpointing: bool = False  # recompute activations in the backward pass

    model: str | None = None  # Hugging Face folder; default a tiny Llama
    env_id: str = "SortDigits-v0"  # or GSM8K-v0, or my_module:MyEnv-v0
    env_kwargs: str = "{}"  # its arguments, a JSON object
    env_timeout: float = 60.0  # time limit of one reset() or step(), seconds

    num_iterations: int = 270  # rollouts, each with its updates
    rollout_batch_size: int = 256  # prompts per iteration
    n_samples_per_prompt: int = 1
    rollout_slots: int = 256  # samples decoded at once on each rank
    max_prompt_tokens: int | None = None  # default 16 (512 with --model)
    max_new_tokens: int | None = None  # after the prompt, all turns; default 8 (256 with --model)
    temperature: float = 1.0  # of the policy: in sampling and in all log-probs
    sft_steps: int | None = None  # warm-start steps; default 60 (0 with --model)
    sft_lr: float | None = None  # default 1.3e-3 (1e-5 with --model)

    ppo_epochs: int = 2  # passes of the actor over a rollout
    critic_epochs: int | None = None  # passes of the critic; default ppo_epochs
    train_batch_size: int = 64  # samples per optimizer step
    micro_batch_tokens: int = 4096  # tokens per forward and rank
    actor_lr: float | None = None  # default 5e-4 (1e-5 with --model)
    critic_lr: float | None = None  # default 1e-3 (1e-5 with --model)
    adam_beta1: float | None = None  # Adam's momentum; default 0.5 (0.9 with --model)
    lr_end: float = 0.05  # linear decay to this fraction of the learning rates
    critic_warmup_iterations: int = 0  # train only the critic for this many iterations first
    max_grad_norm: float = 1.0  # gradient clipping norm of each model

    gamma: float = 1.0  # discount per token
    gae_lambda: float = 0.95
    clip_low: float = 0.2  # the ratio is clipped to 1 - clip_low
    clip_high: float = 0.2  # ... 1 + clip_high
    value_clip: float | None = 0.2  # values are clipped to old value +- this
    dual_clip: float | None = None  # c > 1: caps the loss at c * abs(A) where A < 0
    entropy_coef: float = 0.0  # weight of the entropy bonus
    target_kl: float | None = None  # stop the actor's updates of an iteration above this approx_kl
    recompute_old_logprobs: bool = True  # if off, use the sampler's
    rollout_is_cap: float | None = None  # caps pi_old / pi_sampler; default off (2 with --rollout-ranks)
    kl_coef: float | None = None  # KL to the reference; default 0.02 (0.01 with --model)
    kl_in: Literal["reward", "loss"] = "reward"
    kl_estimator: Literal["k1", "k2", "k3"] | None = None  # default k1, in the loss k3
    ref_sync_every: int = 0  # iterations between updates of the reference; 0: never
    ref_sync_alpha: float = 1.0  # reference = alpha * actor + (1 - alpha) * reference
    missing_eos_penalty: float = 0.0  # subtracted if the last token is no stop token
    bootstrap_truncated: bool = False  # bootstrap truncated samples with V(last state)

    eval_episodes: int = 512  # sampled at temperature 1, and greedy
    eval_env_kwargs: str = "{}"  # merged over env_kwargs
    save_every: int = 50  # iterations between checkpoints; 0: none
    keep_checkpoints: int = 2
    resume: str | None = None  # auto (if --run-name exists), run folder or checkpoint


DEFAULTS = {  # of flags that are None: without --model, with --model
    "max_prompt_tokens": (16, 512), "max_new_tokens": (8, 256), "sft_steps": (60, 0),
    "sft_lr": (1.3e-3, 1e-5), "actor_lr": (5e-4, 1e-5), "critic_lr": (1e-3, 1e-5),
    "adam_beta1": (0.5, 0.9), "kl_coef": (0.02, 0.01),
}

Plan = namedtuple("Plan", "samples_per_iteration minibatches update_steps critic_update_steps "
                          "actor_steps_total critic_steps_total episodes_total")  # fmt: skip


def plan_steps(args: Args, world_size: int = 1) -> Plan:
    """Samples and optimizer steps of an iteration and of the run.

    The same for any `world_size`: all sizes are global. Raises UserError if they do not divide.
    """
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if samples % args.train_batch_size:
        raise UserError(f"--train-batch-size {args.train_batch_size}: must divide {samples} samples")
    minibatches = samples // args.train_batch_size
    actor_steps = minibatches * args.ppo_epochs
    critic_steps = minibatches * (args.critic_epochs or args.ppo_epochs)
    actor_iterations = max(0, args.num_iterations - args.critic_warmup_iterations)
    return Plan(samples, minibatches, actor_steps, critic_steps, actor_steps * actor_iterations,
                critic_steps * args.num_iterations, samples * args.num_iterations)


# === 2. Mathematics of PPO ===


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over mask, 0 if it is empty. Outside the mask x may be NaN."""
    return torch.where(mask.bool(), x, 0.0).sum() / mask.sum().clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """x with mean 0 and standard deviation 1 over mask, 0 elsewhere."""
    centered = torch.where(mask.bool(), x - masked_mean(x, mask), 0.0)
    variance = centered.square().sum() / (mask.sum() - 1).clamp(min=1)
    return centered * torch.rsqrt(variance + 1e-8)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """k1, k2, k3 of KL(pi || pi_ref), from tokens of pi (http://joschu.net/blog/kl-approx.html)."""
    logratio = logprobs - ref_logprobs
    k3 = torch.exp(-logratio) - 1 + logratio
    return {"k1": logratio, "k2": logratio.square() / 2, "k3": k3}[kind]


def compute_gae(rewards, values, mask, gamma, gae_lambda, bootstrap=None) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (https://arxiv.org/abs/1506.02438, eq. 16).

    The sampled tokens of a row are one trajectory, without the environment's text. rewards, values,
    mask [B, T]; bootstrap [B] = V(state after the last token), default 0. Returns (advantages,
    returns) [B, T], 0 off the mask.
    """
    mask = mask.bool()
    values = torch.where(mask, values, 0.0)
    nextvalues = torch.zeros_like(values[:, 0]) if bootstrap is None else bootstrap  # [B]
    lastgaelam = torch.zeros_like(values[:, 0])
    advantages = torch.zeros_like(values)
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * nextvalues - values[:, t]
        lastgaelam = torch.where(mask[:, t], delta + gamma * gae_lambda * lastgaelam, lastgaelam)
        nextvalues = torch.where(mask[:, t], values[:, t], nextvalues)
        advantages[:, t] = lastgaelam
    advantages = torch.where(mask, advantages, 0.0)
    return advantages, advantages + values


def policy_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip=None, denom=None):
    """Clipped surrogate (https://arxiv.org/abs/1707.06347 eq. 7).

    dual_clip: https://arxiv.org/abs/1912.09729, eq. 5. All of one shape. Returns (loss, stats) of
    sums over the mask, divided by denom (default mask.sum()). Divided by the token count of the
    minibatch they add up over microbatches and ranks, except ratio_max and ratio_min.
    """
    mask = mask.bool()
    denom = mask.sum().clamp(min=1) if denom is None else denom
    advantages = torch.where(mask, advantages, 0.0)
    logratio = torch.where(mask, logprobs - old_logprobs, 0.0).clamp(-20, 20)
    ratio = logratio.exp()  # outside the mask 1, where losses and statistics below are 0
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.max(pg_loss1, pg_loss2)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.min(losses, -advantages * dual_clip), losses)
    with torch.no_grad():
        ratios = ratio if ratio.numel() else ratio.new_ones(1)  # a rank may have no tokens
        stats = {
            "clipfrac": (pg_loss2 > pg_loss1).sum() / denom,
            "out_of_clip": ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).sum() / denom,
            "approx_kl": (ratio - 1 - logratio).sum() / denom,  # k3 of KL(old || new)
            "ratio_mean": (ratio * mask).sum() / denom,
            "ratio_max": ratios.max(),
            "ratio_min": ratios.min(),
        }
    return losses.sum() / denom, stats


def value_loss(values, old_values, returns, mask, clip=None, denom=None) -> Tensor:
    """0.5 max((V - R)^2, (clipped V - R)^2), clipped to old_values +- clip; summed as in policy_loss."""
    mask = mask.bool()
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    losses = (values - returns).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        losses = torch.max(losses, (clipped - returns).square())
    denom = mask.sum().clamp(min=1) if denom is None else denom
    return 0.5 * losses.sum() / denom


# === 3. Training loop ===


@dataclass
class Rollout:
    """N samples of up to T tokens, on the CPU."""

    tokens: Tensor  # [N, T] prompt, response, text of the environment, padding
    mask: Tensor  # [N, T] bool: sampled by the actor
    logprobs: Tensor  # [N, T] log-prob when sampled, 0 outside the mask
    rewards: Tensor  # [N, T] of a turn: on its last sampled token; dense ones: where earned
    lengths: Tensor  # [N]
    stop: list[str]  # "eos": terminated; "length": no room for more; "env": truncated by it
    texts: list[str]  # what followed the prompt
    stats: dict[str, float]
    prompts: list[str]
    success: list[bool]  # info["success"] of the last step, else sum of rewards > 0


class Microbatch(types.SimpleNamespace):
    """The n tokens of B samples, one after the other without padding, of which m were sampled.

    `tokens` [n], `positions` [n] in their sample, `layout` (place [n] in B * T, B, T) for attention.
    `sampled` [m]: where the sampled tokens are in n; `stored` [m]: where in N * T, the experience.
    Its other fields are here for the sampled tokens only: `old_logprobs` [m], ..., `mask` all ones.

    The shift by one is in `sampled_logprobs` and `sampled_values` and nowhere else in training: the
    output at t - 1 predicts token t, and values the state before it. Every sample starts with a
    prompt, so t - 1 is in the same sample.
        tokens [a b C D | a E]   mask [0 0 1 1 0 1]   ->   sampled [2 3 5], predicted at [1 2 4]
    """


@dataclass(frozen=True)
class Experience:
    """A Rollout on the device, and what is computed from it before the updates."""

    tokens: Tensor  # [N, T]
    mask: Tensor  # [N, T] bool
    logprobs: Tensor  # [N, T] of the sampler
    rewards: Tensor  # [N, T]
    truncated: Tensor  # [N] bool: stop is not "eos"
    lengths: Tensor  # [N] on the CPU
    old_logprobs: Tensor | None = None  # [N, T], like the next four; 0 outside the mask
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    scores: Tensor | None = None  # [N] reward without the KL
    kl: Tensor | None = None  # [N] k1 of the response, in nats

    @classmethod
    def from_rollout(cls, batch: Rollout, device: torch.device) -> Experience:
        truncated = torch.tensor([stop != "eos" for stop in batch.stop])
        tensors = (batch.tokens, batch.mask, batch.logprobs, batch.rewards, truncated)
        return cls(*(x.to(device) for x in tensors), lengths=batch.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    @functools.cached_property
    def cpu_mask(self) -> Tensor:
        """The mask, from which the host counts tokens without waiting for the device."""
        return self.mask.cpu()

    def microbatch(self, rows: Tensor) -> Microbatch:
        """The samples `rows` [B], indices on the CPU."""
        lengths = self.lengths[rows]
        if len(rows) == 0:  # FSDP's calls are collective: run one prompt token
            rows, lengths = torch.tensor([0]), torch.tensor([1])
        B, T = len(rows), int(lengths.max())
        b, position = (torch.arange(T) < lengths[:, None]).nonzero().T.contiguous()  # [n] each
        index = rows[b] * self.tokens.shape[1] + position  # [n] in N * T, the experience
        place = b * T + position  # [n] in B * T, what attention pads
        sampled = self.cpu_mask.flatten()[index].nonzero()[:, 0]  # [m] in n
        to_device = functools.partial(upload, device=self.tokens.device)
        index, position, place, sampled = map(to_device, (index, position, place, sampled))
        stored = index[sampled]  # [m] in N * T
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        mb = {k: x.flatten()[stored] for k, x in fields.items() if x is not None and x.ndim == 2}
        mb["tokens"] = self.tokens.flatten()[index]  # [n], all of them for the forward
        layout = (place, B, T)
        return Microbatch(**mb, positions=position, layout=layout, sampled=sampled, stored=stored)


def sampled_logprobs(model: Transformer, mb: Microbatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs [m] of the sampled tokens, and entropy [m] of the distributions they came from.

    Given `targets`, the model computes both without holding all logits.
    """
    return model(mb.tokens, mb.positions, select=mb.sampled - 1, targets=mb.tokens[mb.sampled],
                 temperature=temperature, layout=mb.layout)  # fmt: skip


def sampled_values(critic: Transformer, mb: Microbatch, shift: int = 1) -> Tensor:
    """Values [m] of the states in which tokens were sampled; with shift 0, of those after them."""
    return critic(mb.tokens, mb.positions, select=mb.sampled - shift, layout=mb.layout)


@torch.no_grad()
def forward_all(model, function, experience, ranks, trainers, args, some=slice(None)) -> Tensor:
    """`function(model, microbatch)` [m] of all samples, or the slice `some`: [N, T], elsewhere 0.

    Each of the `ranks` that hold the model fills in a share; all `trainers` get the whole.
    """
    out = torch.zeros(experience.tokens.shape, device=experience.tokens.device)
    samples = torch.arange(len(experience))[some]
    mine = microbatches(samples, experience.lengths, ranks, args.micro_batch_tokens) if model else []
    for rows in progress(mine, "scoring, microbatches"):
        mb = experience.microbatch(rows)
        out.view(-1)[mb.stored] = function(model, mb).float()
    return trainers.all_reduce(out)


def make_experience(batch: Rollout, models, tokenizer: HFTokenizer, roles: Roles, args: Args):
    """All that the updates need, computed before the first of them and constant from then on.

    `roles`: who holds which model, see `ppo`. Returns the experience and the raw advantages' std.
    """
    actor, critic, reference = models
    device = roles.world.device
    # FORK: tokens to train: dataclasses.replace(batch, mask=mask, logprobs=batch.logprobs * mask)
    experience = Experience.from_rollout(batch, device)
    mask = experience.mask

    # --- Old log-probs, reference log-probs, values. Old log-probs are recomputed by the function
    # that the updates call: until the first optimizer step the ratio is 1 up to rounding
    score = functools.partial(forward_all, experience=experience, trainers=roles.trainers, args=args)
    logprobs_of = lambda model, mb: sampled_logprobs(model, mb, args.temperature)[0]
    old_logprobs = experience.logprobs
    if args.recompute_old_logprobs:
        old_logprobs = score(actor, logprobs_of, ranks=roles.actors)
    ref_logprobs = old_logprobs  # without a reference the KL is 0
    if args.kl_coef > 0:
        ref_logprobs = score(reference, logprobs_of, ranks=roles.actors)
    values = score(critic, sampled_values, ranks=roles.critics)

    # --- Rewards [N, T]: of turns, dense ones; minus missing-EOS penalty (last token), KL (each)
    rewards = experience.rewards.clone()
    samples = torch.arange(len(experience), device=device)
    last = upload(batch.lengths - 1, device)  # [N] index of the last token, always a sampled one
    stop_ids = upload(torch.tensor(tokenizer.stop_ids), device)
    no_eos = ~torch.isin(experience.tokens[samples, last], stop_ids)  # [N]
    rewards[samples, last] -= args.missing_eos_penalty * no_eos
    # FORK: reward shaping. Every rank runs it on all samples: it must be deterministic.
    scores = rewards.sum(1)  # [N], logged
    if args.kl_in == "reward":
        rewards -= args.kl_coef * kl_estimate(old_logprobs, ref_logprobs, args.kl_estimator)
    if rewards[~mask].count_nonzero():
        raise UserError("GAE ignores rewards of tokens outside the mask: move them to others")

    # --- Advantages, whitened over the rollout; returns are not
    # FORK: advantages.
    bootstrap = None
    if args.bootstrap_truncated:  # V(state after the last token, which must be in the mask)
        after = score(critic, functools.partial(sampled_values, shift=0), ranks=roles.critics)  # [N, T]
        bootstrap = after[samples, last] * experience.truncated  # [N]
    advantages, returns = compute_gae(rewards, values, mask, args.gamma, args.gae_lambda, bootstrap)
    advantage_std = float(advantages[mask].std()) if mask.sum() > 1 else 0.0
    if advantage_std >= 1e-6:  # otherwise it would amplify rounding errors
        advantages = masked_whiten(advantages, mask)
    if args.rollout_is_cap:  # capped importance weights; whitening would rescale them
        advantages *= (old_logprobs - experience.logprobs).exp().clamp(max=args.rollout_is_cap)
    experience = dataclasses.replace(
        experience, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, values=values, returns=returns,
        advantages=advantages, scores=scores, kl=(old_logprobs - ref_logprobs).sum(1))
    return experience, advantage_std


def shuffled_minibatches(experience: Experience, ranks: Ranks, args: Args, iteration, epoch):
    """Yields n_tokens, sampled in a minibatch on all ranks, and this rank's microbatches of it."""
    seed = ((args.seed * 1_000_003 + iteration) * 1_000_003 + epoch) % 2**63
    generator = torch.Generator().manual_seed(seed)  # each epoch has an order of its own
    # FORK: which samples make a minibatch.
    minibatches = torch.randperm(len(experience), generator=generator).split(args.train_batch_size)
    for rows in progress(minibatches, f"epoch {epoch + 1}, minibatches"):
        n_tokens = int(experience.cpu_mask[rows].sum())
        mine = microbatches(rows, experience.lengths, ranks, args.micro_batch_tokens)
        if n_tokens > 0:  # else there is nothing to learn
            yield n_tokens, [experience.microbatch(mb_rows) for mb_rows in mine]


def linear_schedule(first: float, end_fraction: float, step: int, total_steps: int) -> float:
    """From `first` to `first * end_fraction` over `total_steps`, then constant."""
    return first * (1 - (1 - end_fraction) * min(1.0, step / max(1, total_steps)))


def optimizer_step(optimizer: torch.optim.Optimizer, step: dict) -> None:
    """Skipped if the gradient is not finite."""
    for group in optimizer.param_groups:  # FORK: learning rates: groups with an "lr_scale"
        group["lr"] = step["lr"] * group.get("lr_scale", 1.0)
    if not step["skipped"]:
        optimizer.step()
    optimizer.zero_grad()


def sync_reference(reference: Transformer, actor: Transformer, args: Args) -> None:
    for target, source in zip(reference.parameters(), actor.parameters()):
        target.detach().lerp_(source.detach(), args.ref_sync_alpha)


def train(args: Args) -> dict:
    """Run PPO; returns what summary.json holds. Raises UserError."""
    with contextlib.ExitStack() as stack:  # closes the run folder whatever happens
        return ppo(args, stack)


def ppo(args: Args, stack: contextlib.ExitStack) -> dict:
    # --- Set-up. Ranks by role: `actors` hold actor and reference, `critics` the critic, `trainers`
    # are these together, `players` sample; by default each is all ranks. A model is None on ranks
    # that do not hold it, and so is its optimizer
    plan = validate(args, WORLD_SIZE)  # fills in the flags that are None, too
    roles, dtype = connect(args)
    world, trainers, actors, critics, _ = roles
    N = args.rollout_batch_size * args.n_samples_per_prompt  # samples
    envs = make_envs(args, N, roles.players)
    eval_envs = make_envs(args, args.eval_episodes, world, evaluation=True)
    tokenizer, models = build_models(args, envs[0], roles, dtype)
    actor, critic, reference, _ = models
    actor_optimizer, critic_optimizer = make_optimizer(actor, args), make_optimizer(critic, args)
    # What a checkpoint holds: (model, optimizer, ranks that hold them)
    saved = {"actor": (actor, actor_optimizer, actors), "critic": (critic, critic_optimizer, critics),
             "reference": (reference, None, actors)}  # fmt: skip
    state = resume(args, saved)
    run = RunFolder(args, state, world)
    stack.push(run)
    print0(f"{run.path}: {world.device.type}, {dtype}, {world.size} ranks")
    print0(step_table(args, plan))
    collector = Collector(envs, models, tokenizer, roles, state, args, catch_signals(stack))
    collector.publish_weights()
    print0(memory_line(models, min(args.rollout_slots, -(-N // roles.players.size)), args))
    state.eval_before = state.eval_before or evaluate(collector.play, eval_envs, args, state.iteration)
    run.print_results("before", state.eval_before)
    # A rollout rank only samples, in a loop that takes `state.iteration` to its end
    interrupt = collector.run() if trainers.index is None else 0

    while state.iteration < args.num_iterations and not interrupt:
        iteration = state.iteration
        clock = [time.time()]  # ends of phases

        # --- Rollout: each of the players plays some episodes, every rank gets all of them
        batch, age = collector.collect()  # age of the weights that sampled, in iterations
        # FORK: which samples train. batch = select(batch, indices, plan)
        clock.append(time.time())

        # --- Old log-probs, reference log-probs, values, rewards, advantages
        experience, advantage_std = make_experience(batch, (actor, critic, reference), tokenizer, roles, args)
        clock.append(time.time())

        # --- Critic epochs. Before or after the actor's is the same: both use the frozen experience
        critic_steps = []  # statistics of each optimizer step
        for epoch in range(args.critic_epochs if critic else 0):
            for n_tokens, minibatch in shuffled_minibatches(experience, critics, args, iteration, epoch):
                stats = []
                for mb in minibatch:  # gradients add up, over ranks too, see `shard`
                    newvalues = sampled_values(critic, mb)
                    # FORK: value loss.
                    v_loss = value_loss(newvalues, mb.values, mb.returns, mb.mask, args.value_clip, n_tokens)
                    v_loss.backward()
                    stats.append({"value_loss": v_loss})
                grad_norm = nn.utils.clip_grad_norm_(critic.parameters(), args.max_grad_norm)
                step = read_step(stats, grad_norm, n_tokens, critics)  # sums, norm, "skipped"
                done = state.critic_steps + len(critic_steps)
                step["lr"] = linear_schedule(args.critic_lr, args.lr_end, done, plan.critic_steps_total)
                optimizer_step(critic_optimizer, step)
                critic_steps.append(step)
        clock.append(time.time())

        # --- Actor epochs; none during critic warm-up
        warmup = iteration < args.critic_warmup_iterations
        actor_steps, early_stop = [], False
        weights_before = probe_weights(actor)  # for the diagnosis
        for epoch in range(args.ppo_epochs if actor and not warmup else 0):
            for n_tokens, minibatch in shuffled_minibatches(experience, actors, args, iteration, epoch):
                stats = []
                for mb in minibatch:
                    newlogprobs, entropy = sampled_logprobs(actor, mb, args.temperature)
                    # FORK: policy loss.
                    pg_loss, mb_stats = policy_loss(newlogprobs, mb.old_logprobs, mb.advantages, mb.mask,
                                                    args.clip_low, args.clip_high, args.dual_clip, n_tokens)
                    mb_stats["dev_max"] = torch.maximum(  # max |ratio - 1|, from the extremes
                        mb_stats.pop("ratio_max") - 1, 1 - mb_stats.pop("ratio_min"))
                    mb_stats |= {"policy_loss": pg_loss, "entropy": entropy.sum() / n_tokens}
                    loss = pg_loss - args.entropy_coef * mb_stats["entropy"]
                    if args.kl_in == "loss" and reference:
                        kls = kl_estimate(newlogprobs, mb.ref_logprobs, args.kl_estimator)
                        mb_stats["kl_loss"] = kls.sum() / n_tokens
                        loss = loss + args.kl_coef * mb_stats["kl_loss"]
                    loss.backward()
                    stats.append(mb_stats)
                grad_norm = nn.utils.clip_grad_norm_(actor.parameters(), args.max_grad_norm)
                step = read_step(stats, grad_norm, n_tokens, actors)
                early_stop = args.target_kl is not None and step["approx_kl"] > args.target_kl
                if early_stop:  # before the step
                    actor_optimizer.zero_grad()
                    break
                done = state.actor_steps + len(actor_steps)
                step["lr"] = linear_schedule(args.actor_lr, args.lr_end, done, plan.actor_steps_total)
                optimizer_step(actor_optimizer, step)
                actor_steps.append(step)
            if early_stop:
                break
        clock.append(time.time())
        if args.ref_sync_every and (iteration + 1) % args.ref_sync_every == 0 and reference:
            sync_reference(reference, actor, args)

        # --- New weights to the samplers, diagnosis of the ratio, log, checkpoint
        actor_steps, early_stop = trainers.gather((actor_steps, early_stop))[0]  # an actor's rank
        critic_steps = trainers.gather(critic_steps)[-1]  # a critic's rank
        state.advance(args, actor_steps, critic_steps)
        collector.sample_ahead()  # only --rollout-ranks: the next samples, from the old weights
        collector.publish_weights()
        interrupt = collector.interrupted()
        clock.append(time.time())
        signals = ratio_signals(actor, weights_before, experience, actor_steps, roles, args)
        signals |= {"sampler_age": age, "old_age": 0 if args.recompute_old_logprobs else age,
                    "phase": "critic_warmup" if warmup else "train", "planned": plan.update_steps,
                    "early_stop": early_stop, "adv_raw_std": advantage_std, "compute_dtype": str(dtype)}
        diagnosis = diagnose_ratio(signals)
        clock.append(time.time())
        run.log(metrics(state, args, batch, experience, actor_steps, critic_steps, signals, clock),
                batch, experience, diagnosis)  # fmt: skip
        if diagnosis.cause == "forward_mismatch" and signals["first_dev"] > 1e-2:
            if state.actor_steps == len(actor_steps):  # the first updates of the run: abort
                raise UserError(f"the first ratio is off: {diagnosis.advice} ({diagnosis.evidence})")
        at_end = state.iteration == args.num_iterations
        if interrupt or (args.save_every and (at_end or state.iteration % args.save_every == 0)):
            save_checkpoint(run, saved, state, args, trainers)

    if actor:
        save_hf_checkpoint(actor, actor.config, tokenizer, run.path / "model")
    world.gather(None)  # a barrier: when one rank exits, torchrun ends the others
    if interrupt:
        raise SystemExit(128 + interrupt)
    run.print_results("after", evaluate(collector.play, eval_envs, args, state.iteration))
    return run.summary


# === 4. Rollout ===
# In waves of `rollout_slots` rows. A wave lasts as long as its longest episode.


@dataclass
class Episode:
    """A sample in progress, on the host."""

    env: gym.Env
    where: str  # for error messages
    prompt: str = ""
    prompt_length: int = 0
    limit: int = 0  # tokens at most
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)  # was it sampled?
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    cached: int = 0  # tokens in the KV cache; the newest token never is
    turn: int = 0  # index of the first token of the newest response
    stop: str = ""  # see Rollout; empty while it goes on
    success: bool = False

    def extend(self, ids: list[int], logprobs: list[float] | None = None) -> None:
        """Append tokens, sampled ones with their log-probs."""
        if logprobs is not None:  # a response starts
            self.turn = len(self.ids)
        self.ids += ids
        self.mask += [logprobs is not None] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)
        self.rewards += [0.0] * len(ids)

    def begin(self, prompt: str, tokenizer: HFTokenizer, args: Args) -> None:
        self.prompt = prompt
        self.where += f", prompt {prompt!r:.80}"
        self.extend(tokenizer.encode_prompt(prompt))
        self.prompt_length = len(self.ids)
        if not 1 <= self.prompt_length <= args.max_prompt_tokens:
            too_long = f"--max-prompt-tokens {args.max_prompt_tokens}: {self.prompt_length} tokens"
            raise UserError(f"{too_long}, {self.where}")
        self.limit = self.prompt_length + args.max_new_tokens

    def add_dense_rewards(self, pairs: list, tokenizer: HFTokenizer) -> None:
        """(end, reward) is for response[:end] and goes to the token that completes it."""
        ids = self.ids[self.turn :]
        response = tokenizer.decode(ids)
        valid = f"info['rewards'] must hold (end, finite reward), 1 <= end <= {len(response)}"
        with rephrase(f"{self.where}: {valid}"):
            for end, reward in pairs:
                if not (1 <= end <= len(response) and math.isfinite(reward)):
                    raise ValueError(f"not {(end, reward)}")
                # Index of the first token whose decoded prefix covers response[:end].
                completes = lambda n: tokenizer.decode(ids[: n + 1]).startswith(response[:end])
                n = bisect.bisect_left(range(len(ids)), True, key=completes)
                self.rewards[self.turn + n] += reward

    def take_answer(self, answer: tuple, tokenizer: HFTokenizer) -> None:
        """Rewards, and the end of the episode or text for another turn."""
        text, reward, terminated, truncated, info = answer
        self.rewards[-1] = float(reward)
        if info.get("rewards"):
            self.add_dense_rewards(info["rewards"], tokenizer)
        self.success = bool(info.get("success", sum(self.rewards) > 0))
        if self.ids[-1] not in tokenizer.stop_ids:  # cut, even if the environment says terminated
            self.stop = "length"
        elif terminated or truncated:
            self.stop = "eos" if terminated else "env"
        else:
            feedback = tokenizer.encode_feedback(text)  # ids are never decoded and encoded again
            if len(self.ids) + len(feedback) < self.limit:
                self.extend(feedback)
            else:
                self.stop = "length"


class Slots:
    """B rows that decode together, on the device. Dead rows write to the scratch column S."""

    def __init__(self, B: int, S: int, stop_ids: list[int], device: torch.device):
        zeros = functools.partial(torch.zeros, device=device)
        self.tokens = zeros(B, S + 1, dtype=torch.int64)
        self.logprobs = zeros(B, S + 1)
        self.length = zeros(B, dtype=torch.int64)
        self.limit = zeros(B, dtype=torch.int64)
        self.alive = zeros(B, dtype=torch.bool)  # still decoding
        self.noise_keys = zeros(B, dtype=torch.int32)  # see sampling_noise
        self.stop_ids = torch.tensor(stop_ids, device=device)


def decode_step(actor: Transformer, cache: KVCache, slots: Slots, temperature: float, greedy: bool) -> None:
    """Sample one token in every row that is alive. Fixed shapes, no host sync."""
    newest = torch.where(slots.alive, slots.length - 1, cache.scratch)[:, None]  # [B, 1]
    logits = actor(slots.tokens.gather(1, newest), newest, cache)[:, 0]  # [B, V]
    # FORK: sampling. Top-p or top-k must go into every log-prob too, or the ratio is wrong.
    logprobs = F.log_softmax(logits.float() / temperature, dim=-1)
    preference = logprobs
    if not greedy:  # argmax of p / exponential noise draws from p; multinomial would block the host
        preference = logprobs.exp() / sampling_noise(slots.noise_keys, slots.length, logits.shape[1])
    token = preference.argmax(dim=-1, keepdim=True)  # [B, 1]
    index = torch.where(slots.alive, slots.length, cache.scratch)[:, None]  # [B, 1]
    slots.tokens.scatter_(1, index, token)
    slots.logprobs.scatter_(1, index, logprobs.gather(1, token))
    slots.length += slots.alive
    slots.alive &= (token != slots.stop_ids).all(dim=-1) & (slots.length < slots.limit)


compiled_decode_step = torch.compile(decode_step, dynamic=True)


def begin_turn(actor: Transformer, cache: KVCache, slots: Slots, playing: dict, args: Args) -> None:
    """Upload the tokens of `playing` {row: episode}, prefill the cache, mark rows alive."""
    ids = padded([e.ids for e in playing.values()], 0)
    numbers = torch.tensor([(row, len(e.ids), e.limit, e.cached) for row, e in playing.items()])
    width = max(len(e.ids) - 1 - e.cached for e in playing.values())  # without the newest
    rows, length, limit, cached = numbers.to(slots.tokens.device).T  # [R] each
    slots.tokens[rows, : ids.shape[1]] = ids.to(rows.device)
    slots.length[rows], slots.limit[rows], slots.alive[rows] = length, limit, True
    if width == 0:
        return
    positions = cached[:, None] + torch.arange(width, device=rows.device)  # [R, width]
    positions = torch.where(positions < length[:, None] - 1, positions, cache.scratch)  # padding
    new = slots.tokens[rows[:, None], positions]  # [R, width]
    no_logits = rows[:0]
    size = max(1, args.micro_batch_tokens // width)
    for start in range(0, len(playing), size):  # a view limits what is read, not written
        part = slice(start, start + size)
        actor(new[part], positions[part], cache.view(ids.shape[1], rows[part]), select=no_logits)


def end_turn(slots: Slots, playing: dict[int, Episode], tokenizer: HFTokenizer, args: Args) -> None:
    """Hand what the rows of `playing` have sampled to environments, and process the answers."""
    tokens, logprobs = slots.tokens.tolist(), slots.logprobs.tolist()
    lengths, calls = slots.length.tolist(), []
    for row, episode in playing.items():
        new = slice(len(episode.ids), lengths[row])
        episode.extend(tokens[row][new], logprobs[row][new])
        episode.cached = len(episode.ids) - 1
        response = tokenizer.decode(tokens[row][new])
        calls.append(EnvCall(episode.env, "step", episode.where, args, response))
    for episode, call in zip(playing.values(), calls):
        episode.take_answer(call.result(), tokenizer)


def envs_needed(args: Args, samples: int) -> int:
    return min(args.rollout_slots, samples)  # at a time


@torch.no_grad()
def rollout(actor, tokenizer, envs, seeds, sample_ids, args, iteration, greedy=False) -> Rollout:
    """Sample an episode for each of `seeds` [N], in waves of min(rollout_slots, len(envs)).

    `actor` is the sampler. `sample_ids` [N] and `iteration` (below 0: evaluation) choose the noise.
    """
    N, S = len(seeds), args.max_prompt_tokens + args.max_new_tokens
    B = min(args.rollout_slots, len(envs), N)
    weight = actor.model.norm.weight
    cache = KVCache(actor.config, B, S, weight.dtype, weight.device)
    slots = Slots(B, S, tokenizer.stop_ids, weight.device)
    keys = sample_keys(args.seed, iteration, sample_ids, weight.device)  # [N]
    decode = compiled_decode_step if args.compile == "on" else decode_step
    K = 8 if weight.is_cuda else 1  # decode steps between host syncs
    episodes, steps = [], 0
    bar = progress(desc="rollout, samples" if iteration >= 0 else "evaluation, samples", total=N)
    for start in range(0, N, B):
        samples = range(start, min(start + B, N))
        wave = [Episode(env, f"sample {sample_ids[i]}, seed {seeds[i]}") for i, env in zip(samples, envs)]
        slots.noise_keys[: len(wave)] = keys[start : start + len(wave)]
        calls = [EnvCall(e.env, "reset", e.where, args, seed=seeds[i]) for i, e in zip(samples, wave)]
        for episode, call in zip(wave, calls):
            episode.begin(call.result()[0], tokenizer, args)
        playing = dict(enumerate(wave))
        while playing:  # one turn of every row
            begin_turn(actor, cache, slots, playing, args)
            attend = max(len(episode.ids) for episode in playing.values())  # cache positions in use
            alive = len(playing)
            while alive:
                for _ in range(K):
                    decode(actor, cache.view(attend), slots, args.temperature, greedy)
                    attend += 1
                steps += K
                alive = int(slots.alive.sum())  # the host waits for the device
                bar.update(len(episodes) + len(wave) - alive - bar.n)
            end_turn(slots, playing, tokenizer, args)
            playing = {row: episode for row, episode in playing.items() if not episode.stop}
        episodes += wave
    bar.close()
    sampled = sum(sum(episode.mask) for episode in episodes)
    stats = {"rollout/decode_steps": steps, "rollout/slot_occupancy": sampled / (steps * B)}
    return to_rollout(episodes, tokenizer, stats)


def to_rollout(episodes: list[Episode], tokenizer: HFTokenizer, stats: dict[str, float]) -> Rollout:
    return Rollout(
        tokens=padded([e.ids for e in episodes], 0), mask=padded([e.mask for e in episodes], False),
        logprobs=padded([e.logprobs for e in episodes], 0.0),
        rewards=padded([e.rewards for e in episodes], 0.0),
        lengths=torch.tensor([len(e.ids) for e in episodes]), stop=[e.stop for e in episodes],
        texts=[tokenizer.decode(e.ids[e.prompt_length :]) for e in episodes], stats=stats,
        prompts=[e.prompt for e in episodes], success=[e.success for e in episodes])


def padded(rows: list[list], blank: float) -> Tensor:
    """[N, T] on the CPU, padded on the right with `blank`."""
    T = max(map(len, rows))
    return torch.tensor([row + [blank] * (T - len(row)) for row in rows])


# ################################# Part II: what PPO stands on #################################

# === 5. Transformer, KV cache, log-probs, sampling noise ===


@dataclass
class ModelConfig:
    """Shape of a Llama, Qwen2 or Qwen3 decoder. `raw`: its config.json, written back on export."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # Llama 3's
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_position_embeddings: int = 2048
    raw: dict = field(default_factory=dict)

    @classmethod
    def from_hf(cls, raw: dict) -> ModelConfig:
        """Read config.json of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""
        kind, act = raw.get("model_type"), raw.get("hidden_act", "silu")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        known = kind in ("llama", "qwen2", "qwen3") and rope_type in ("default", "llama3")
        if not known or act != "silu" or raw.get("use_sliding_window"):
            raise ValueError(f"model_type {kind!r}, rope {rope_type!r}, {act!r}: must be llama, qwen2 or "
                             "qwen3, rope default or llama3, silu, without use_sliding_window")
        heads = raw["num_attention_heads"]
        shared = {f.name: raw[f.name] for f in dataclasses.fields(cls) if f.name in raw}
        bias = raw.get("attention_bias", False)  # on q, k, v, o; Qwen2 always has it on q, k, v
        return cls(**shared | {
            "num_key_value_heads": raw.get("num_key_value_heads") or heads,
            "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
            "rope_theta": rope.get("rope_theta", raw.get("rope_theta", 10000.0)),
            "rope_scaling": rope if rope_type == "llama3" else None, "qkv_bias": kind == "qwen2" or bias,
            "o_bias": kind != "qwen2" and bias, "qk_norm": kind == "qwen3", "raw": raw,
        })  # fmt: skip


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Rotary frequencies [D / 2] (https://arxiv.org/abs/2104.09864), low ones as in Llama 3.1."""
    exponents = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / scaling["factor"] + smooth * frequencies


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of x [..., H, D], as in HF, in fp32. cos, sin [..., 1, D]."""
    swapped = x.float().roll(x.shape[-1] // 2, dims=-1)  # [second half, first half]; signs: sin
    return (x.float() * cos + swapped * sin).to(x.dtype)


def pad(x: Tensor, place: Tensor, B: int, T: int) -> Tensor:
    """[n, H, D] -> [B, T, H, D], 0 elsewhere. place [n]: indices into B * T."""
    return x.new_zeros(B * T, *x.shape[1:]).index_copy(0, place, x).unflatten(0, (B, T))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.D, hidden = layer, config.head_dim, config.hidden_size
        self.H, self.Hkv = config.num_attention_heads, config.num_key_value_heads
        self.grouped = self.H != self.Hkv  # in forward it would break the compiled graph
        # FORK: model surgery, such as adapters.
        self.q_proj = nn.Linear(hidden, self.H * self.D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, self.Hkv * self.D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, self.Hkv * self.D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.H * self.D, hidden, bias=config.o_bias)
        self.q_norm = nn.RMSNorm(self.D, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.D, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x, cos, sin, layout=None, cache=None, positions=None, mask=None):
        q = self.q_proj(x).unflatten(-1, (self.H, self.D))  # [..., H, D]
        k = self.k_proj(x).unflatten(-1, (self.Hkv, self.D))  # [..., Hkv, D]
        v = self.v_proj(x).unflatten(-1, (self.Hkv, self.D))
        q, k = apply_rope(self.q_norm(q), cos, sin), apply_rope(self.k_norm(k), cos, sin)
        if cache is None:
            if layout:  # on an accelerator torch.nn.attention.varlen would avoid the padding
                q, k, v = pad(q, *layout), pad(k, *layout), pad(v, *layout)  # [B, T, H or Hkv, D]
            # Rows start at index 0, so causality alone hides the padding on the right.
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H or Hkv, T, D]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
            out = out.transpose(1, 2)  # [B, T, H, D]
            if layout:
                out = out.flatten(0, 1).index_select(0, layout[0])  # [n, H, D]
            return self.o_proj(out.flatten(-2))
        B, T = positions.shape
        # enable_gqa is slow with a mask: fold the G query heads of a key head into the queries.
        k, v = cache.update(self.layer, k, v, positions)  # [B, Hkv, S, D]
        q = q.view(B, T, self.Hkv, -1, self.D).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, T, D]
        q = q.flatten(2, 3)  # [B, Hkv, G * T, D]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = out.view(B, self.Hkv, -1, T, self.D).permute(0, 3, 1, 2, 4)  # [B, T, Hkv, G, D]
        return self.o_proj(out.flatten(2))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.self_attn, self.mlp = Attention(config, layer), MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, *context) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *context)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """Actor and reference (head="lm"), or critic (head="scalar"). Parameters are named as in HF."""

    def __init__(self, config: ModelConfig, head: Literal["lm", "scalar"] = "lm"):
        super().__init__()
        self.config, self.head, self.checkpointing = config, head, False
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers)),
            "norm": nn.RMSNorm(config.hidden_size, config.rms_norm_eps),
        })
        if head == "lm":
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        else:
            self.score = nn.Linear(config.hidden_size, 1, bias=False)
        self.register_buffer("rope", rope_frequencies(config), persistent=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.head == "lm" and self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens, positions=None, cache=None, select=None, targets=None,
                temperature=1.0, layout=None):  # fmt: skip
        """Logits [B, T, V] of `tokens` [B, T], or values [B, T]. FSDP hooks this method alone.

        Training passes tokens without padding: `tokens`, `positions` [n] and their `layout`, for
        logits [n, V]. With `select` [m], flat indices of tokens: of these alone. With `targets` [m],
        too: their log-probs [m] and the entropy [m]. The rollout passes `positions` [B, T], `cache`.
        """
        at = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        angles = at[..., None, None].float() * self.rope  # [..., 1, D / 2]
        cos, sin = angles.cos(), angles.sin()
        context = (torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1), layout)
        if cache is not None:
            G = self.config.num_attention_heads // self.config.num_key_value_heads
            mask = cache.attention_mask(positions).repeat(1, G, 1)[:, None]  # [B, 1, G * T, S]
            context += (cache, positions, mask)
        x = self.model.embed_tokens(tokens)  # [..., hidden]
        for block in self.model.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, *context, use_reentrant=False)
            else:
                x = block(x, *context)
        x = self.model.norm(x).flatten(0, -2)  # [n or B * T, hidden]
        if select is not None:
            x = x[select]  # [m, hidden]
        if targets is not None:
            return token_logprobs(x, self.lm_head.weight, targets, temperature)
        if self.head == "lm":
            out = self.lm_head(x)
        else:  # in fp32: bfloat16 is coarser than the value clip. clone: FSDP wants no view
            out = self.score(x.float())[:, 0].clone()
        return out if select is not None else out.unflatten(0, tokens.shape)


class KVCache:
    """Keys and values of every layer, [rows, Hkv, S, D] each. Padding goes to index `scratch`."""

    def __init__(self, config: ModelConfig, rows, size, dtype=torch.float32, device="cpu"):
        self.scratch = size
        self.attend = round_up(size + 1)  # attention reads the indices below
        self.rows, self.all_rows = torch.arange(rows, device=device), True  # of the next forward
        shape = (rows, config.num_key_value_heads, self.attend, config.head_dim)
        zeros = functools.partial(torch.zeros, shape, dtype=dtype, device=device)
        self.layers = [(zeros(), zeros()) for _ in range(config.num_hidden_layers)]

    def view(self, attend: int, rows: Tensor | None = None) -> KVCache:
        """The same memory, for a forward of `rows` (default all) over `attend` positions."""
        view = copy.copy(self)
        view.attend = min(round_up(attend), self.attend)
        if rows is not None:
            view.rows, view.all_rows = rows, False
        return view

    def attention_mask(self, positions: Tensor) -> Tensor:
        """[B, T, attend], 0 or -inf: a query sees its own position and those before."""
        hidden = torch.arange(self.attend, device=positions.device) > positions[..., None]
        return self.layers[0][0].new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)

    def update(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v [B, T, Hkv, D] at `positions` [B, T]; returns both, [B, Hkv, attend, D]."""
        keys, values = self.layers[layer]
        keys[self.rows[:, None], :, positions] = k
        values[self.rows[:, None], :, positions] = v
        rows = slice(None) if self.all_rows else self.rows  # a slice does not copy
        return keys[rows, :, : self.attend], values[rows, :, : self.attend]


def round_up(n: int) -> int:
    """To a multiple of 16: few shapes, aligned masks."""
    return -(-n // 16) * 16


def token_logprobs(hidden, weight, targets, temperature=1.0) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at `targets`, entropy, from [n, d], [V, d], [n].

    The chunked equivalent of these lines, whose logits [n, V] may take more memory than the model:
        logprobs = F.log_softmax((hidden @ weight.T).float() / temperature, dim=-1)
        return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
    """
    return ChunkedLogprobs.apply(hidden, weight, targets, temperature)


class ChunkedLogprobs(torch.autograd.Function):
    """`token_logprobs` in chunks of positions, whose logits the backward pass computes again."""

    @staticmethod
    def chunks(hidden, weight, targets, temperature):
        logits = 2**26 if hidden.is_cuda else 2**22  # in a chunk: 256 MB, on the CPU 16 MB
        rows = max(1, logits // len(weight))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = (hidden[part] @ weight.T).float().div_(temperature)  # [rows, V]
            yield part, F.log_softmax(logits, dim=-1), targets[part, None]

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        logprobs = hidden.new_zeros(len(hidden), dtype=torch.float32)
        entropy = torch.zeros_like(logprobs)
        for part, log_p, target in ChunkedLogprobs.chunks(hidden, weight, targets, temperature):
            logprobs[part] = log_p.gather(1, target)[:, 0]
            entropy[part] = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, targets, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part, log_p, target in ChunkedLogprobs.chunks(hidden, weight, targets, ctx.temperature):
            # d loss / d logits = onehot * g - p * (g + grad_entropy * (log p + entropy)), in place
            g, p = grad_logprobs[part, None], log_p.exp()
            log_p.add_(entropy[part, None]).mul_(grad_entropy[part, None]).add_(g)
            grad = p.mul_(log_p).neg_().scatter_add_(1, target, g)
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight += grad.T @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def hash32(x: Tensor) -> Tensor:
    """lowbias32 (https://github.com/skeeto/hash-prospector) on int32; `>>` keeps the sign: mask."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * -0x7B935975  # 0x846CA68B as int32; products wrap
    return x ^ (x >> 16 & 0xFFFF)


def sample_keys(seed: int, iteration: int, sample_ids, device="cpu") -> Tensor:
    """A key [N] for each sample: its text depends on neither batch, slot nor rank."""
    int32 = lambda x: torch.tensor(x, device=device).to(torch.int32)
    return hash32(hash32(hash32(int32(seed)) ^ int32(iteration)) ^ int32(list(sample_ids)))


def sampling_noise(keys: Tensor, index: Tensor, vocab_size: int) -> Tensor:
    """Exponential noise [B, V], a function of sample key [B], token index [B] and vocabulary id."""
    token_keys = hash32(hash32(keys ^ 0x5851F42D) ^ index.to(torch.int32))
    ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    x = hash32(hash32(ids ^ keys[:, None]) ^ token_keys[:, None])  # [B, V]
    # 31 bits, clamped: if u were 1, or coarser near 0, rare tokens would come too often or never.
    u = ((x >> 1) & 0x7FFFFFFF).float().add(0.5).mul(2**-31).clamp(max=1 - 2**-24)
    return -torch.log1p(-u)


# === 6. Tokenizer and Hugging Face checkpoints ===


class HFTokenizer:
    """Text <-> ids, chat template and stop ids of a Hugging Face folder."""

    def __init__(self, folder: str | Path, tokenizer: PreTrainedTokenizerFast | None = None):
        self.folder = Path(folder)
        with rephrase(f"{folder}: cannot load tokenizer.json and tokenizer_config.json"):
            self.hf = tokenizer or PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        self.tokenizer = self.hf.backend_tokenizer  # much faster than through transformers
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        stop_ids = {self.hf.eos_token_id}
        for name in ("config.json", "generation_config.json"):
            if (self.folder / name).is_file():
                ids = read_json(self.folder / name).get("eos_token_id")
                stop_ids.update(ids if isinstance(ids, list) else [ids])
        self.stop_ids = sorted(stop_ids - {None})
        if not self.stop_ids:
            raise UserError(f"{folder}: no eos token in config.json or tokenizer_config.json")
        self.eos_id = self.stop_ids[0] if self.hf.eos_token_id is None else self.hf.eos_token_id
        self.pad_id = self.eos_id if self.hf.pad_token_id is None else self.hf.pad_token_id
        self.vocab_size = max(*self.hf.get_vocab().values(), *self.stop_ids) + 1

    @classmethod
    def from_texts(cls, texts: list[str]) -> HFTokenizer:
        """A character tokenizer over what `texts` contain: a BPE without merges."""
        special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
        characters = sorted(set("".join(texts)))
        vocab = {token: i for i, token in enumerate([*special.values(), *characters])}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>"))
        tokenizer.decoder = tokenizers.decoders.Fuse()
        return cls("embedded", PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special))

    def render(self, *turns: tuple[str, str]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        with rephrase(f"{self.folder}: the chat template does not render"):
            return self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_prompt(self, prompt: str) -> list[int]:
        """A user turn in the chat template, or plain text, with BOS where the tokenizer adds it."""
        if self.hf.chat_template:
            return self.encode(self.render(("user", prompt)))
        return self.encode(prompt, add_special_tokens=True)

    def encode_feedback(self, text: str) -> list[int]:
        """What the chat template puts between two turns of the assistant, around `text`."""
        if self.hf.chat_template:
            whole = self.render(("user", "-"), ("assistant", "<<turn>>"), ("user", text))
            text = whole.partition("<<turn>>")[2]
            for stop_id in self.stop_ids:  # the actor has sampled it
                text = text.removeprefix(self.hf.convert_ids_to_tokens(stop_id) or "")
        return self.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def read_json(path: Path) -> dict:
    with rephrase(f"{path}: must be a JSON object"):
        return dict(**json.loads(path.read_text()))


def load_config(folder: str | Path) -> ModelConfig:
    with rephrase(f"{folder}/config.json"):
        return ModelConfig.from_hf(read_json(Path(folder, "config.json")))


def load_hf_checkpoint(path, dtype=torch.float32, device="cpu", head="lm"):
    """(Transformer, ModelConfig) of config.json and safetensors, single or sharded; or UserError."""
    config = load_config(path)
    model = materialize(on_meta(config, head).to(dtype), device)
    load_weights(model, path)
    return model, config


def load_weights(model: Transformer, folder: str | Path) -> None:
    """Fill `model`, which may be sharded. A scalar head that the files lack starts from zeros."""
    if model.head == "scalar":
        nn.init.zeros_(model.score.weight)
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    read_tensors(tensors, folder, {"score.weight"} | {"lm_head.weight"} - tensors.keys())


def read_tensors(tensors: dict[str, Tensor], folder: str | Path, optional=frozenset()) -> None:
    """Fill `tensors`, sharded or not, from safetensors. UserError if names or shapes differ."""
    with rephrase(f"{folder}: safetensors are missing, corrupt or of another model"):
        reader = dcp.HuggingFaceStorageReader(str(folder))
        saved = {name: x.size for name, x in reader.read_metadata().state_dict_metadata.items()}
        shapes = {name: x.shape for name, x in tensors.items()}
        differ = {name for name, _ in saved.items() ^ shapes.items()} - set(optional)
        differ = sorted(name for name in differ if "rotary_emb" not in name)
        if differ:
            raise ValueError(f"other names or shapes: {', '.join(differ)}")
        found = {name: x for name, x in tensors.items() if name in saved}
        dcp.load(found, storage_reader=reader, no_dist=True)


def save_hf_checkpoint(model: Transformer, config, tokenizer: HFTokenizer, path: str | Path) -> None:
    """Write a folder that transformers can load. All ranks of a sharded model call it."""
    whole = ((name, full(p.detach())) for name, p in model.named_parameters())
    weights = {name: x.cpu().contiguous() for name, x in whole if RANK == 0}  # on one host
    if RANK > 0:
        return
    path = Path(path)
    tokenizer.hf.save_pretrained(path)
    if (tokenizer.folder / "generation_config.json").is_file():
        shutil.copy(tokenizer.folder / "generation_config.json", path)
    safetensors.torch.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    dtype = str(weights["model.norm.weight"].dtype).removeprefix("torch.")
    raw = config.raw | {"torch_dtype": dtype, "dtype": dtype}
    (path / "config.json").write_text(json.dumps(raw, indent=2))


# === 7. Text environments ===
# gymnasium.Env with text as observation and action: reset(seed=...) -> (prompt, info),
# step(response) -> (text, reward, terminated, truncated, info). A seed always gives the same prompt.
# info["demonstration"] of reset serves the warm start, info["success"] of the last step accuracy.
# info["rewards"] of step: dense rewards besides `reward`, [(end, reward), ...] for response[:end].
# FORK: write yours like these two and pass --env-id my_module:MyEnv-v0.


class SortDigits(gym.Env):
    """Prompt "52814=", answer "12458", reward the share of digits in place, 0 if the length is wrong.

    Demonstrations are in random order: sorting is learned from the reward alone. A tenth of the
    prompts, by CRC, are held out.
    """

    def __init__(self, split: Literal["train", "test"] = "train", digits: int = 5):
        if split not in ("train", "test") or digits < 1:
            raise ValueError("split must be train or test, digits at least 1")
        self.test, self.digits = split == "test", digits

    def reset(self, *, seed=None, options=None):
        rng, text = random.Random(seed), ""
        while not text or (zlib.crc32(text.encode()) % 10 == 0) != self.test:
            text = "".join(rng.choices("0123456789", k=self.digits))
        self.answer = "".join(sorted(text))
        return f"{text}=", {"demonstration": "".join(rng.sample(text, len(text)))}

    def step(self, response):
        right = sum(a == b for a, b in zip(response, self.answer))
        reward = right / self.digits if len(response) == self.digits else 0.0
        return "", reward, True, False, {"success": response == self.answer}


def parse_number(text: str) -> float | None:
    """The last `#### number`, without dollar signs and thousands separators."""
    found = re.findall(r"####[\s$]*((?:-[\s$]*)?[\d,]*\.?\d+)", text)
    return float(re.sub(r"[\s$,]", "", found[-1])) if found else None


@functools.cache
def load_gsm8k(path: str) -> list[tuple[str, str, float]]:
    """(question, answer, number) of each line of https://github.com/openai/grade-school-math."""
    rows = []
    for i, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        valid = "UTF-8 JSON with a question, and an answer ending in '#### number'"
        with rephrase(f"{path}, line {i}: must be {valid}"):
            row = json.loads(line)
            rows.append((row["question"], row["answer"], float(parse_number(row["answer"]))))
    if not rows:
        raise UserError(f"no rows in {path}")
    return random.Random(0).sample(rows, len(rows))  # consecutive seeds see every row once


class GSM8K(gym.Env):
    """Word problems (https://arxiv.org/abs/2110.14168), reward 1 for the right number after `####`."""

    def __init__(self, path: str):
        self.rows = load_gsm8k(str(path))

    def reset(self, *, seed=None, options=None):
        question, answer, self.number = self.rows[(seed or 0) % len(self.rows)]
        prompt = f"{question}\n\nThink step by step. End with a line of the form: #### number"
        return prompt, {"demonstration": answer}

    def step(self, response):
        success = parse_number(response) == self.number
        return "", float(success), True, False, {"success": success}


gym.register("SortDigits-v0", entry_point=SortDigits)
gym.register("GSM8K-v0", entry_point=GSM8K)


@functools.cache
def env_threads(count: int) -> ThreadPool:
    """Daemon threads: an environment that hangs does not keep the process from ending."""
    threads = ThreadPool(count)
    atexit.register(threads.terminate)
    return threads


class EnvCall:
    """Starts a call of an environment on another thread. `where` names it in errors."""

    def __init__(self, env: gym.Env, method: str, where: str, args: Args, *arguments, **keywords):
        self.env, self.method, self.where, self.timeout = env, method, where, args.env_timeout
        threads = env_threads(max(512, 2 * args.rollout_slots))  # more threads than calls at a time
        self.deadline = time.monotonic() + args.env_timeout
        self.answer = threads.apply_async(getattr(env, method), arguments, keywords)

    def result(self) -> tuple:
        """Wait for (prompt, info) or (text, reward, terminated, truncated, info), or UserError."""
        try:
            value = self.answer.get(timeout=max(0.0, self.deadline - time.monotonic()))
        except multiprocessing.TimeoutError:
            raise self.error(f"gave no answer within --env-timeout {self.timeout:g} s") from None
        except Exception as error:
            raise self.error(f"raised {type(error).__name__}: {error}") from error
        try:
            text, *numbers, info = value
            assert isinstance(text, str) and isinstance(info, dict)
            assert all(map(math.isfinite, numbers)) and len(numbers) == 3 * (self.method == "step")
        except (AssertionError, TypeError, ValueError):
            form = "text, finite reward, terminated, truncated, info"
            form = "(text, info)" if self.method == "reset" else f"({form})"
            raise self.error(f"returned {value!r:.200}, expected {form}") from None
        return value

    def error(self, what: str) -> UserError:
        name = self.env.spec.id if self.env.spec else type(self.env).__name__
        return UserError(f"environment {name}, {self.where}: {self.method}() {what}")


def reset(env: gym.Env, seed: int, args: Args) -> tuple[str, dict]:
    return EnvCall(env, "reset", f"seed {seed}", args, seed=seed).result()


def make_envs(args: Args, samples: int, players: Ranks, evaluation: bool = False) -> list[gym.Env]:
    """This rank's environments for a rollout of `samples` by `players`; one on other ranks."""
    flags = f"--env-id {args.env_id}, --env-kwargs {args.env_kwargs}"
    with rephrase(f"{flags}, --eval-env-kwargs {args.eval_env_kwargs}"):
        kwargs = dict(**json.loads(args.env_kwargs))
        if evaluation:
            kwargs |= {"split": "test"} if args.env_id == "SortDigits-v0" else {}
            kwargs |= dict(**json.loads(args.eval_env_kwargs))
        count = 1 if players.index is None else envs_needed(args, -(-samples // players.size))
        return [gym.make(args.env_id, disable_env_checker=True, **kwargs) for _ in range(count)]


# === 8. Metrics, evaluation, diagnosis of the ratio ===


def read_step(stats: list[dict], grad_norm: Tensor, n_tokens: int, ranks: Ranks) -> dict[str, float]:
    """Statistics of an optimizer step, from `stats` {name: scalar tensor} of its microbatches.

    They are sums / n_tokens and add up, over ranks, too; names ending in _max are reduced by max.
    """
    if any(not isinstance(x, Tensor) or x.ndim > 0 for mb_stats in stats for x in mb_stats.values()):
        raise UserError("statistics must be scalar tensors: sums / n_tokens, or maxima named *_max")
    table = [torch.stack([x.detach().double() for x in mb_stats.values()]) for mb_stats in stats]
    sums = ranks.all_reduce(torch.stack(table).sum(0))  # [names]
    maxima = ranks.all_reduce(torch.stack(table).amax(0), dist.ReduceOp.MAX)
    is_max = upload(torch.tensor([name.endswith("_max") for name in stats[0]]), sums.device)
    numbers = torch.where(is_max, maxima, sums)
    *numbers, norm = torch.cat((numbers, full(grad_norm)[None])).tolist()  # the host waits
    step = dict(zip(stats[0], numbers))
    return step | {"tokens": n_tokens, "grad_norm": norm, "skipped": not math.isfinite(norm)}


def metrics(state, args, batch, experience, actor_steps, critic_steps, signals, clock) -> dict:
    """A line of metrics.jsonl. Means over steps are weighted by tokens, without skipped steps."""
    N, mask, seconds = len(experience), experience.mask, clock[-1] - clock[0]
    returns, values = experience.returns[mask], experience.values[mask]
    row = batch.stats | {
        "iteration": state.iteration - 1, "charts/episodes": state.iteration * N,
        "charts/actor_steps": state.actor_steps,
        "objective/reward": float(experience.scores.mean()),
        "objective/accuracy": sum(batch.success) / N,
        "objective/response_tokens": int(batch.mask.sum()) / N,
        "objective/entropy": -float(masked_mean(experience.old_logprobs, mask)),
        "objective/truncated": float(experience.truncated.float().mean()),
        "objective/kl": float(experience.kl.mean()) if args.kl_coef else None,
        "losses/explained_variance": float(1 - (returns - values).var() / returns.var()),
        "time/iteration": seconds,
        "perf/response_tokens_per_second": int(batch.mask.sum()) / seconds,
    }
    if torch.cuda.is_initialized():
        row["perf/peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    row |= {f"ratio/{name}": value for name, value in signals.items()}
    sampler_diff = row.pop("ratio/sampler_diff")
    if args.recompute_old_logprobs:
        row["debug/sampler_trainer_logprob_diff"] = sampler_diff
    if args.rollout_is_cap:
        weights = (experience.old_logprobs - experience.logprobs).exp()  # 1 outside the mask
        row["rollout/is_weight_mean"] = float(masked_mean(weights, mask))
        row["rollout/is_weight_max"] = float(weights.max())
        row["rollout/is_capped"] = float(masked_mean((weights > args.rollout_is_cap).float(), mask))
    row["ratio/steps"] = actor_steps  # statistics of each, instead of their number
    phases = ("rollout", "score", "critic", "actor", "hand_over", "diagnose")
    for phase, start, end in zip(phases, clock, clock[1:]):
        row[f"time/{phase}"] = end - start
    for model, steps in (("actor", actor_steps), ("critic", critic_steps)):
        made = [step for step in steps if not step["skipped"]]
        row[f"grad/skipped_{model}"] = len(steps) - len(made)
        row[f"grad/{model}_norm"] = token_mean(made, "grad_norm")
        row[f"charts/{model}_lr"] = steps[-1]["lr"] if steps else None
        for name in made[0].keys() - {"tokens", "grad_norm", "skipped", "lr", "dev_max"} if made else ():
            row[f"losses/{name}"] = token_mean(made, name)
    return row


def token_mean(steps: list[dict], name: str) -> float | None:
    """Mean over the tokens of the steps, None without any."""
    tokens = sum(step["tokens"] for step in steps)
    return sum(step[name] * step["tokens"] for step in steps) / tokens if tokens else None


def evaluate(play, envs: list, args: Args, iteration: int) -> dict[str, float]:
    """Means over episodes sampled at temperature 1, and greedy accuracy."""
    args, N = dataclasses.replace(args, temperature=1.0), args.eval_episodes
    sampled = play(envs, range(N), args, -1 - iteration)  # negative: other noise than in training
    greedy = play(envs, range(N), args, -1 - iteration, greedy=True)
    return {"accuracy": sum(sampled.success) / N, "greedy_accuracy": sum(greedy.success) / N,
            "reward": float(sampled.rewards.sum()) / N, "response_tokens": float(sampled.mask.sum()) / N}


Diagnosis = namedtuple("Diagnosis", "cause evidence advice")


def diagnose_ratio(signals: dict) -> Diagnosis:
    """Why is the importance ratio stuck at 1, or clipping saturated? `cause` None: it is healthy.

    `signals` (see `ratio_signals`): first_dev, last_dev, post_dev are max |ratio - 1| on the first
    minibatch, the last, and of the updated actor. In bfloat16 these are mostly rounding; there
    signed_t says whether the policy moved.
    """
    s = types.SimpleNamespace(**{"sampler_age": 0, "old_age": 0, "compute_dtype": ""} | signals)
    rounded = {k: f"{x:.2g}" if isinstance(x, float) else x for k, x in signals.items()}
    evidence = ", ".join(f"{k} {x}" for k, x in rounded.items())
    noise = 2 * max(s.first_dev, 1e-6)
    moved = s.post_dev > 5 * noise
    stuck = s.last_dev <= noise and s.first_dev <= 1e-2
    bf16 = "bfloat16" in s.param_dtype + s.compute_dtype
    if bf16:
        moved = s.signed_t > 3
        stuck = not moved or s.steps <= 1 or s.last_dev <= 2e-6
        evidence += "" if moved else " (undecided: bfloat16 noise)"
    because = functools.partial(Diagnosis, evidence=evidence)

    if s.phase == "critic_warmup":
        return because("critic_warmup", advice="see --critic-warmup-iterations")
    if stuck and s.early_stop and s.steps < s.planned:
        return because("kl_early_stop", advice="raise --target-kl or lower --actor-lr")
    if s.tokens == 0:
        return because("empty_mask", advice="look at --max-new-tokens, eos, mask")
    if s.steps == 0 or (stuck and s.skipped > 0):
        return because("steps_skipped", advice="NaN in log-probs? large rewards? lower --actor-lr")
    if stuck and s.planned == s.steps == 1 and moved:
        return because("one_update_by_design", advice="correct; more epochs make it move")
    if stuck and s.adv_raw_std < 1e-6:
        return because("advantage_zero", advice="constant reward? no signal is left")
    if stuck and s.grad_norm == 0:
        return because("no_grad_to_actor", advice="detached log-probs or frozen parameters")
    if stuck and s.changed_frac == 0 and s.lr > 1e-10:
        return because("optimizer_noop", advice="the optimizer holds other parameters")
    if stuck and s.steps > 1 and moved:
        return because("old_logprob_recomputed", advice="record them once, before the first update")
    if "bfloat16" in s.param_dtype and s.changed_frac < 0.5:  # few weights change
        return because("bf16_underflow", advice="keep float32 weights")
    if stuck and s.update_norm < 1e-6 * s.param_norm:
        return because("lr_or_clip_too_small", advice="raise --actor-lr or --max-grad-norm")
    if stuck and s.changed_frac > 0 and s.post_dev <= (2e-6 if bf16 else noise):
        return because("forward_ignores_update", advice="a stale copy runs")
    if not s.old_age and (math.isnan(s.first_dev) or s.first_dev > (1.0 if bf16 else 1e-4)):
        return because("forward_mismatch", advice="the first ratio must be 1: dropout? shifted mask or "
                       "positions? temperature? the sampler's log-probs?")  # fmt: skip
    if not s.sampler_age and s.sampler_diff > (0.05 if bf16 else 1e-3):  # rollout ranks: on purpose
        return because("sampler_mismatch", advice="stale weights? other numerics: --rollout-is-cap")
    if s.out_of_clip > 0.9:
        return because("too_tight_clip", advice="widen it or lower --actor-lr")
    return because(None, advice="")


def probe_weights(actor: Transformer | None) -> Tensor:
    """Some 16,384 elements of this rank's part of every weight, in one tensor."""
    weights = [local(p).detach() for p in (actor.parameters() if actor else ())]
    parts = [p.flatten()[:: 1 + p.numel() // 2**14] for p in weights]
    return torch.cat(parts) if parts else torch.zeros(0)


def ratio_signals(actor, weights_before, experience, actor_steps, roles, args) -> dict:
    """For `diagnose_ratio`: what the updates did to weights and (one forward) to some log-probs."""
    some = slice(max(1, len(experience) // 8))  # an eighth of the samples, to save time
    logprobs_of = lambda model, mb: sampled_logprobs(model, mb, args.temperature)[0]
    newlogprobs = forward_all(
        actor, logprobs_of, experience, roles.actors, roles.trainers, args, some)[some]
    mask = experience.mask[some]
    logratio = (newlogprobs - experience.old_logprobs[some])[mask]  # [n]
    drift = logratio * experience.advantages[some][mask].sign()  # [n], > 0: moved as it should
    weights = probe_weights(actor)
    change = (weights - weights_before).double()
    sums = (change != 0).double(), torch.ones_like(change), change**2, weights.double() ** 2
    sums = torch.stack(sums).sum(1).to(mask.device)
    changed, probed, update, weight = roles.trainers.all_reduce(sums).tolist()
    made = [step for step in actor_steps if not step["skipped"]]
    steps = actor_steps or [dict.fromkeys(("dev_max", "lr", "out_of_clip"), 0.0)]
    gap = (experience.logprobs - experience.old_logprobs).abs()
    n = len(logratio)
    return {
        "first_dev": steps[0]["dev_max"], "last_dev": steps[-1]["dev_max"],
        "post_dev": float(logratio.expm1().abs().max()) if n else 0.0,
        "signed_t": float(drift.mean() / (drift.std() + 1e-12)) * n**0.5 if n > 1 else 0.0,
        "out_of_clip": steps[-1]["out_of_clip"], "lr": steps[-1]["lr"],
        "tokens": int(experience.cpu_mask.sum()), "steps": len(made),
        "skipped": len(actor_steps) - len(made), "grad_norm": token_mean(made, "grad_norm") or 0.0,
        "changed_frac": changed / max(1, probed), "update_norm": update**0.5,
        "param_norm": weight**0.5, "param_dtype": str(weights.dtype),
        "sampler_diff": float(masked_mean(gap, experience.mask)),
    }


# === 9. Ranks, sharding, models, collecting samples ===

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
SFT_BATCH_SIZE = 256  # demonstrations per step
# Bars after a second, on rank 0, on a terminal (disable=None).
progress = functools.partial(tqdm, leave=False, delay=1.0, disable=RANK > 0 or None)
AT_MOST_1 = "gamma gae_lambda lr_end ref_sync_alpha clip_low adam_beta1".split()
ABOVE_0 = """env_timeout num_iterations rollout_batch_size n_samples_per_prompt rollout_slots
max_prompt_tokens max_new_tokens temperature ppo_epochs critic_epochs train_batch_size clip_low
micro_batch_tokens max_grad_norm clip_high value_clip target_kl eval_episodes keep_checkpoints""".split()
AT_LEAST_0 = """seed critic_ranks rollout_ranks sft_steps sft_lr actor_lr critic_lr adam_beta1 lr_end
critic_warmup_iterations gamma gae_lambda entropy_coef kl_coef rollout_is_cap ref_sync_every
ref_sync_alpha missing_eos_penalty save_every""".split()


class UserError(ValueError):
    """An error the user can fix: one line, exit code 2."""

    def __str__(self):
        return " ".join(super().__str__().split())


@contextlib.contextmanager
def rephrase(what: str, kinds=(Exception, dcp.api.CheckpointException)):
    """Re-raise exceptions of these kinds as UserError, prefixed with `what`."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise UserError(f"{what} ({type(error).__name__}: {error!s:.300})") from error


def print0(text: str) -> None:
    if RANK == 0:
        print(text, flush=True)


def validate(args: Args, world_size: int = 1) -> Plan:
    """Fill in defaults and check the flags. Raises UserError: flag, value, what is valid."""
    for name, (embedded, with_model) in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, with_model if args.model else embedded)
    args.critic_epochs = args.ppo_epochs if args.critic_epochs is None else args.critic_epochs
    if args.rollout_ranks and args.recompute_old_logprobs and args.rollout_is_cap is None:
        args.rollout_is_cap = 2.0
    args.kl_estimator = args.kl_estimator or {"reward": "k1", "loss": "k3"}[args.kl_in]
    for name in ABOVE_0 + AT_LEAST_0:
        value, low = getattr(args, name), "above" if name in ABOVE_0 else "at least"
        high = 1 if name in AT_MOST_1 else 2**31 - 1
        if value is not None and not (0 < value <= high or (value == 0 and low == "at least")):
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} {value}: must be {low} 0 and at most {high}")
    for wrong, text in [
        (args.kl_in == "loss" and args.kl_estimator == "k1", "--kl-estimator k1: with --kl-in loss use "
         "k2 or k3, the gradient of k1 is 0 on average"),
        (args.dual_clip is not None and args.dual_clip <= 1, f"--dual-clip {args.dual_clip}: must be above 1"),
        (args.rollout_is_cap and not args.recompute_old_logprobs,
         "--rollout-is-cap: needs --recompute-old-logprobs"),
        (args.ref_sync_every and not args.kl_coef, "--ref-sync-every: needs --kl-coef above 0"),
        (args.critic_ranks + args.rollout_ranks >= world_size, f"--critic-ranks {args.critic_ranks}, "
         f"--rollout-ranks {args.rollout_ranks}: must leave at least one of {world_size} ranks"),
        (args.resume == "auto" and not args.run_name, "--resume auto: needs --run-name"),
    ]:
        if wrong:
            raise UserError(text)
    if args.train_batch_size < world_size:
        print0(f"--train-batch-size {args.train_batch_size}: some of {world_size} ranks are idle")
    return plan_steps(args, world_size)


class Ranks:
    """Ranks that hold a model, or all of them, the world. Collectives are no-ops on one process."""

    def __init__(self, ranks: range, device: torch.device):
        self.index = ranks.index(RANK) if RANK in ranks else None  # None: not a member
        self.device, self.size, self.group, self.mesh = device, len(ranks), None, None
        if dist.is_initialized():  # all ranks make groups and meshes together, members or not
            two_hours = datetime.timedelta(hours=2)  # rollouts may take long
            self.group = dist.new_group(list(ranks), timeout=two_hours)
            self.mesh = dist.DeviceMesh(device.type, list(ranks))

    def all_reduce(self, x: Tensor, op=dist.ReduceOp.SUM) -> Tensor:
        """Sum over the ranks, or `op`, in place."""
        if self.size > 1:
            dist.all_reduce(x, op, group=self.group)
        return x

    def gather(self, value) -> list:
        """`value` of every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values


Roles = namedtuple("Roles", "world trainers actors critics players")  # of ranks


def connect(args: Args) -> tuple[Roles, torch.dtype]:
    """Join the other processes. Returns the ranks by role, and the dtype of forward passes."""
    use_cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = torch.device("cpu")
    if use_cuda:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # for many shapes
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        with rephrase(f"--device {args.device}: there is no {device}"):
            torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it would build a plan for every new shape
    else:  # keep freed memory: page faults would take a tenth of the time
        with contextlib.suppress(AttributeError):  # without glibc
            ctypes.CDLL(None).mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    if args.compile == "auto":
        args.compile = "on" if use_cuda else "off"
    bf16 = args.dtype == "bfloat16" or (args.dtype == "auto" and use_cuda)
    store = dist.HashStore()
    if "RANK" in os.environ:
        store = next(dist.rendezvous("env://"))[0]
        # After a restart torchrun's store still has the addresses of dead processes.
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    if ("RANK" in os.environ or bf16) and not dist.is_initialized():  # FSDP2 does mixed precision
        backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD_SIZE)
    world = trainers = players = Ranks(range(WORLD_SIZE), device)
    end = WORLD_SIZE - args.rollout_ranks  # [actors, critics, players]
    if args.rollout_ranks:
        trainers, players = Ranks(range(end), device), Ranks(range(end, WORLD_SIZE), device)
    actors = critics = Ranks(range(end - args.critic_ranks), device)
    if args.critic_ranks:
        critics = Ranks(range(end - args.critic_ranks, end), device)
    roles = Roles(world, trainers, actors, critics, players)
    return roles, torch.bfloat16 if bf16 else torch.float32


def microbatches(samples: Tensor, lengths: Tensor, ranks: Ranks, token_budget: int) -> list[Tensor]:
    """This rank's microbatches of `samples` [n], on the CPU; the same number on every rank.

    Longest first, so that attention pads little. A microbatch has up to `token_budget` tokens,
    padded twice that, or is one longer sample.
    """
    lengths = lengths.tolist()
    order = sorted(samples.tolist(), key=lengths.__getitem__, reverse=True)
    parts, tokens, area, longest = [], token_budget, 0, 0  # full: the first sample opens one
    for start in range(0, len(order), ranks.size):
        turn = order[start : start + ranks.size]  # a sample for each rank
        if tokens + lengths[turn[0]] > token_budget or area + longest > 2 * token_budget:
            parts.append([])
            tokens, area, longest = 0, 0, lengths[turn[0]]
        tokens += lengths[turn[0]]  # upper bound for every rank
        area += longest  # with what attention pads
        if start // ranks.size % 2:
            turn.reverse()  # 0 1 2 2 1 0 0 1 ... keeps ranks in balance
        parts[-1] += turn[ranks.index : ranks.index + 1]
    return [torch.tensor(part, dtype=torch.int64) for part in parts]


def upload(x: Tensor, device: torch.device) -> Tensor:
    """From the CPU to `device`, through pinned memory: otherwise the host would wait."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def on_meta(config: ModelConfig, head: str = "lm") -> Transformer:
    """A model without storage: it is sharded first, then materialized."""
    with torch.device("meta"):
        return Transformer(config, head)


def shard(model: Transformer, ranks: Ranks, args: Args, dtype: torch.dtype) -> Transformer:
    """Activation checkpointing, torch.compile, FSDP2, in this order."""
    model.checkpointing = args.activation_checkpointing
    if args.compile == "on":
        torch._dynamo.config.recompile_limit = 64  # blocks of all models share one piece of code
        for block in model.model.layers:  # in place, so that names stay
            block.compile(dynamic=True)
    value_head = [] if model.head == "lm" else [model.score]  # stays in float32
    tied = model.head == "lm" and model.config.tie_word_embeddings
    embedding = [] if tied else [model.model.embed_tokens]  # large
    for unit in (*model.model.layers, *value_head, *embedding, model) if ranks.mesh else ():
        precision = torch.float32 if unit in value_head else dtype
        policy = MixedPrecisionPolicy(precision, torch.float32, cast_forward_inputs=False)
        # The root, too, must reshard: its weights must be DTensors between forward and backward.
        fully_shard(unit, mesh=ranks.mesh, reshard_after_forward=True, mp_policy=policy)
        # Gradients add up: losses are divided by all ranks' tokens. gloo needs the second call.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return model


def materialize(model: Transformer, device: torch.device | str) -> Transformer:
    model.to_empty(device=device)
    model.tie_weights()
    model.rope = rope_frequencies(model.config).to(device)  # in float32, whatever the weights are
    return model


def full(x: Tensor) -> Tensor:
    """The whole of a tensor, a collective call if it is sharded."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def local(x: Tensor) -> Tensor:
    """This rank's part of a tensor, which may be sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


@torch.no_grad()
def copy_weights(source, target, sources: Ranks, ranks: Ranks, skip=()) -> None:
    """Copy `source`, sharded over `sources`, to `target`, but for the names to `skip`.

    All `ranks` call it, with None for a model they do not hold. Raises ValueError if names differ.
    """
    weights = dict(source.named_parameters()) if source else {}
    targets = dict(target.named_parameters()) if target else {}
    only_one = (weights.keys() ^ targets.keys()) - set(skip)
    if source and target and only_one:
        raise ValueError(f"cannot copy weights that only one model has: {sorted(only_one)}")
    for name in [name for name in targets or weights if name not in skip]:
        like = (targets or weights)[name]
        if source:
            whole = full(weights[name].to(like.dtype))
        else:
            whole = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        if sources.size < ranks.size:
            dist.broadcast(whole, src=0, group=ranks.group)
        if target and isinstance(like, DTensor):
            whole = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
        if target:
            like.copy_(whole)


def embedded_model(args: Args, env: gym.Env) -> tuple[HFTokenizer, Transformer]:
    """The default actor: a tiny random Llama over the characters of the environment."""
    resets = [reset(env, seed, args) for seed in range(256)]
    texts = [f"{prompt}{info.get('demonstration', '')}" for prompt, info in resets]
    tokenizer = HFTokenizer.from_texts(texts)
    config = ModelConfig.from_hf({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": tokenizer.vocab_size,
        "max_position_embeddings": args.max_prompt_tokens + args.max_new_tokens,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id,
    })
    torch.manual_seed(args.seed)
    actor = Transformer(config)
    for name, p in actor.named_parameters():  # as GPT-2: residual branches end in smaller weights
        ends_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
        if p.ndim == 2:
            nn.init.normal_(p, std=0.01 if ends_branch else 0.02)
    return tokenizer, actor


def build_models(args: Args, env: gym.Env, roles: Roles, dtype: torch.dtype):
    """Tokenizer and (actor, critic, reference, sampler), None where this rank holds none.

    The sampler, in the dtype of forward passes, is whole on every rank.
    """
    if args.model:
        config, tokenizer = load_config(args.model), HFTokenizer(args.model)
    else:
        tokenizer, embedded = embedded_model(args, env)
        config = embedded.config
    longest = args.max_prompt_tokens + args.max_new_tokens
    if tokenizer.vocab_size > config.vocab_size or longest > config.max_position_embeddings:
        raise UserError(f"{args.model}: {config.vocab_size} ids, {config.max_position_embeddings} positions: "
                        f"needs {tokenizer.vocab_size}, {longest} (--max-prompt-tokens + --max-new-tokens)")
    Episode(env, "seed 0").begin(reset(env, 0, args)[0], tokenizer, args)  # is the prompt too long?
    _, trainers, actors, critics, _ = roles

    def build(ranks, head="lm"):
        if ranks.index is None:
            return None
        return materialize(shard(on_meta(config, head), ranks, args, dtype), ranks.device)

    actor, critic = build(actors), build(critics, "scalar")
    reference = build(actors) if args.kl_coef > 0 else None
    if actor and args.model:
        load_weights(actor, args.model)
    elif actor:
        copy_weights(embedded, actor, actors, actors)
    if actor and not checkpoints_to_resume(args):
        warm_start(actor, tokenizer, env, args, actors)
    copy_weights(actor, critic, actors, trainers, skip=("lm_head.weight", "score.weight"))
    if critic:
        nn.init.zeros_(critic.score.weight)
    if reference:
        copy_weights(actor, reference, actors, actors)
    sampler = materialize(on_meta(config).to(dtype), trainers.device)
    return tokenizer, (actor, critic, reference, sampler)


def make_optimizer(model: Transformer | None, args: Args) -> torch.optim.AdamW | None:
    """AdamW for the parameters that train. It allocates its moments at the first step."""
    if model:
        trained = [p for p in model.parameters() if p.requires_grad]
        betas = (args.adam_beta1, 0.999)
        return torch.optim.AdamW(trained, betas=betas, weight_decay=0.0, fused=True)


def warm_start(actor: Transformer, tokenizer, env: gym.Env, args: Args, actors: Ranks) -> None:
    """Supervised steps on the environment's demonstrations."""
    if args.sft_steps == 0 or "demonstration" not in reset(env, 0, args)[1]:
        return print0("warm start: none")
    optimizer = make_optimizer(actor, args)
    for i in progress(range(args.sft_steps), "warm start, steps"):
        episodes = []
        for seed in range(i * SFT_BATCH_SIZE, (i + 1) * SFT_BATCH_SIZE):
            prompt, info = reset(env, seed, args)
            answer = [*tokenizer.encode(info["demonstration"]), tokenizer.eos_id]
            episode = Episode(env, f"seed {seed}")
            episode.begin(prompt, tokenizer, args)
            episode.extend(answer[: args.max_new_tokens], [0.0] * min(len(answer), args.max_new_tokens))
            episodes.append(episode)
        batch = Experience.from_rollout(to_rollout(episodes, tokenizer, {}), actors.device)
        n_tokens, stats, samples = int(batch.cpu_mask.sum()), [], torch.arange(len(batch))
        for rows in microbatches(samples, batch.lengths, actors, args.micro_batch_tokens):
            loss = -sampled_logprobs(actor, batch.microbatch(rows), 1.0)[0].sum() / n_tokens
            loss.backward()
            stats.append({"loss": loss})
        grad_norm = nn.utils.clip_grad_norm_(actor.parameters(), args.max_grad_norm)
        step = read_step(stats, grad_norm, n_tokens, actors)
        step["lr"] = linear_schedule(args.sft_lr, 0.0, i, args.sft_steps)
        optimizer_step(optimizer, step)
    print0(f"warm start: {args.sft_steps} steps, loss {step['loss']:.3f} a token")


def select(batch: Rollout, samples: list[int], plan: Plan) -> Rollout:
    """The `samples` with these indices, which must be as many as planned. Raises UserError."""
    if len(samples) != plan.samples_per_iteration:
        planned = plan.samples_per_iteration
        raise UserError(f"{len(samples)} samples selected: must be {planned}, see plan_steps")
    fields = dict(vars(batch))
    for name, x in fields.items():
        if isinstance(x, Tensor):
            fields[name] = x[samples]
        elif isinstance(x, list):
            fields[name] = [x[i] for i in samples]
    return Rollout(**fields)


def concatenate(parts: list):
    """The samples of several Experiences, or Rollouts, padded to the longest."""
    T = max(part.tokens.shape[1] for part in parts)

    def join(*values):
        if isinstance(values[0], list):
            return [item for value in values for item in value]
        if isinstance(values[0], dict):  # means of statistics
            return {name: sum(value[name] for value in values) / len(values) for name in values[0]}
        return torch.cat([F.pad(x, (0, T - x.shape[1])) if x.ndim == 2 else x for x in values])

    names = [field.name for field in dataclasses.fields(parts[0])]
    return type(parts[0])(*(join(*(getattr(part, name) for part in parts)) for name in names))


class Collector:
    """Rollouts for the training loop, and new weights for the sampler.

    With --rollout-ranks these sample for iteration i + 1 while the trainers update on iteration i.
    The policy that sampled is then one iteration old; importance weights pi_old / pi_sampler
    correct for it, as in decoupled PPO (https://arxiv.org/abs/2110.00641).
    """

    def __init__(self, envs, models, tokenizer, roles: Roles, state, args: Args, signals: list):
        self.actor, _, _, self.sampler = models
        self.envs, self.tokenizer, self.roles = envs, tokenizer, roles
        self.state, self.args, self.signals = state, args, signals
        self.N = args.rollout_batch_size * args.n_samples_per_prompt
        if state.ahead and (not args.rollout_ranks or len(state.ahead.prompts) != self.N):
            state.ahead = None  # saved under other flags: discard and sample again

    def play(self, envs, seeds, args, iteration, greedy=False, players=None) -> Rollout:
        """`rollout` of `seeds` [N]: each of `players` (default all) plays some; all get all."""
        world, mine = self.roles.world, None
        players = players or world
        if players.index is not None:
            first = len(seeds) * players.index // players.size
            last = len(seeds) * (players.index + 1) // players.size
            if first < last:  # there may be fewer samples than ranks
                mine = rollout(self.sampler, self.tokenizer, envs, seeds[first:last],
                               range(first, last), args, iteration, greedy)  # fmt: skip
        return concatenate([each for each in world.gather(mine) if each])

    def sample(self) -> Rollout:
        """The samples of `state.iteration`, the same at each call; those of a prompt are adjacent."""
        args, state = self.args, self.state
        seeds = [state.next_prompt + i // args.n_samples_per_prompt for i in range(self.N)]
        return self.play(self.envs, seeds, args, state.iteration, players=self.roles.players)

    def collect(self) -> tuple[Rollout, int]:
        """The samples of this iteration, and the age in iterations of the weights they are from."""
        ahead, self.state.ahead = self.state.ahead, None
        return (ahead, 1) if ahead else (self.sample(), 0)

    def sample_ahead(self) -> None:
        """After state.advance: --rollout-ranks finish the next samples, with weights they have."""
        if self.args.rollout_ranks and self.state.iteration < self.args.num_iterations:
            self.state.ahead = self.sample()  # trainers wait for them

    def publish_weights(self) -> None:
        """Copy the actor's weights to every rank's sampler."""
        copy_weights(self.actor, self.sampler, self.roles.actors, self.roles.world)

    def interrupted(self) -> int:
        """A signal that any rank has received, or 0."""
        return max(self.roles.world.gather(max(self.signals, default=0)))

    def run(self) -> int:
        """The loop of a rollout rank, in step with the trainers'. Returns a signal, or 0."""
        interrupt = 0
        while self.state.iteration < self.args.num_iterations and not interrupt:
            self.collect()
            self.state.advance(self.args, [], [])
            self.sample_ahead()
            self.publish_weights()
            interrupt = self.interrupted()
        return interrupt


# === 10. Run folder, saving, resuming ===

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of DCP in a single process


@dataclass
class TrainState:
    """What one iteration leaves to the next, besides weights and moments. Saved as JSON."""

    iteration: int = 0  # iterations done
    next_prompt: int = 0  # its seed
    actor_steps: int = 0  # skipped ones included
    critic_steps: int = 0
    skipped_in_a_row: list = field(default_factory=lambda: [0, 0])  # of actor and critic
    last_cause: str | None = None  # of the diagnosis
    eval_before: dict | None = None
    ahead: Rollout | None = None  # of rollout ranks, for the next iteration
    file_sizes: dict = field(default_factory=dict)  # of *.jsonl, in bytes

    def advance(self, args: Args, actor_steps: list[dict], critic_steps: list[dict]) -> None:
        self.iteration += 1
        self.next_prompt += args.rollout_batch_size
        self.actor_steps += len(actor_steps)
        self.critic_steps += len(critic_steps)
        for i, steps in enumerate((actor_steps, critic_steps)):
            for step in steps:
                self.skipped_in_a_row[i] = self.skipped_in_a_row[i] + 1 if step["skipped"] else 0
        if max(self.skipped_in_a_row) >= 20:
            raise UserError("20 consecutive gradients were not finite: lower the learning rates")


def catch_signals(stack: contextlib.ExitStack) -> list[int]:
    """Collect SIGTERM and Ctrl-C: they end the run after this iteration, with a checkpoint."""
    received = []

    def handle(signum, frame):
        received.append(int(signum))
        os.write(2, b"\nstopping after this iteration; Ctrl-\\ stops at once\n")

    for signum in (signal.SIGTERM, signal.SIGINT):
        stack.callback(signal.signal, signum, signal.signal(signum, handle))
    return received


class RunFolder:
    """<log_dir>/<run_name>/: TensorBoard, *.jsonl, {config,summary}.json, checkpoints/, model/."""

    def __init__(self, args: Args, state: TrainState, world: Ranks):
        self.args, self.state, self.started, self.summary = args, state, time.monotonic(), {}
        env, now = args.env_id.split(":")[-1], time.strftime("%Y%m%d-%H%M%S")
        name = world.gather(f"{env}__{Path(__file__).stem}__{args.seed}__{now}")[0]
        self.path, resumed = Path(args.log_dir, args.run_name or name), args.resume == "auto"
        if args.resume and Path(args.resume, "checkpoints").is_dir():
            self.path, resumed = Path(args.resume), True
        if RANK > 0:
            return
        if self.path.exists() and not resumed:
            raise UserError(f"--run-name: {self.path} exists: choose another, or --resume auto")
        with rephrase(f"--log-dir {args.log_dir}: cannot write {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
            config = json.dumps({"args": vars(args), "argv": sys.argv}, indent=2)
            (self.path / "config.json").write_text(config)
        names = ("metrics", "completions")
        self.files = {name: open(self.path / f"{name}.jsonl", "a") for name in names}
        for name, file in self.files.items():
            size = state.file_sizes.get(name, 0)
            file.truncate(min(size, file.tell()))  # what came after will be written again
        self.writer = SummaryWriter(self.path, purge_step=state.iteration)

    def append(self, name: str, row: dict) -> None:
        """Write a line of JSON, without NaN, Infinity and None."""
        row = json.loads(json.dumps(row), parse_constant=lambda constant: None)
        line = json.dumps({key: value for key, value in row.items() if value is not None})
        self.files[name].write(line + "\n")
        self.files[name].flush()

    def log(self, row: dict, batch: Rollout, experience: Experience, diagnosis: Diagnosis) -> None:
        """Report an iteration: *.jsonl, TensorBoard, terminal."""
        if RANK > 0:
            return
        i, N, cause = row["iteration"], self.args.num_iterations, diagnosis.cause
        self.append("metrics", row | {"ratio/diagnosis": cause})
        for name, value in row.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, i)
        for k in range(min(4, len(experience))):
            self.append("completions", {
                "step": i, "prompt": batch.prompts[k], "response": batch.texts[k],
                "stop": batch.stop[k], "reward": float(experience.scores[k]),
                "n_tokens": int(experience.cpu_mask[k].sum()), "kl": float(experience.kl[k])})
        if i % max(1, N // 5) == 0:
            print0(f"  {batch.prompts[0]!r:.80} -> {batch.texts[0]!r:.200} (reward {experience.scores[0]:g})")
        if cause and cause != self.state.last_cause:
            print0(f"  ratio: {cause}: {diagnosis.advice} ({diagnosis.evidence})")
        self.state.last_cause = cause
        kl = f"KL {row['objective/kl']:.4f}, " if self.args.kl_coef else ""
        print0(f"{i + 1}/{N}: reward {row['objective/reward']:.3f}, accuracy "
               f"{row['objective/accuracy']:.1%}, {row['objective/response_tokens']:.1f} tokens, "
               f"max|ratio-1| {row['ratio/last_dev']:.2g}, {kl}{row['time/iteration']:.2f} s")

    def print_results(self, when: str, results: dict) -> None:
        self.summary[f"eval_{when}"] = results
        sampled, greedy = results["accuracy"], results["greedy_accuracy"]
        print0(f"accuracy {when} PPO: {sampled:.1%} sampled, {greedy:.1%} greedy")

    def __exit__(self, kind, error, traceback) -> None:
        status = {None: "completed", SystemExit: "interrupted"}.get(kind, "failed")
        self.summary |= {"status": status, "iterations": self.state.iteration,
                         "update_steps": self.state.actor_steps, "seconds": time.monotonic() - self.started}
        if RANK == 0:
            (self.path / "summary.json").write_text(json.dumps(self.summary, indent=2))
            for file in (self.writer, *self.files.values()):
                file.close()


def step_table(args, plan) -> str:
    """What an iteration and the run consist of, and the defaults that depend on other flags."""
    batches = f"epochs x {plan.minibatches} minibatches of {args.train_batch_size} samples"
    ahead = f", one iteration ahead, on {args.rollout_ranks} ranks" if args.rollout_ranks else ""
    prompts, n = args.rollout_batch_size, args.n_samples_per_prompt
    return f"""\
  rollout    {prompts} prompts x {n} = {prompts * n} samples{ahead}
  critic     then {args.critic_epochs} {batches} = {plan.critic_update_steps} optimizer steps
  actor      then {args.ppo_epochs} {batches} = {plan.update_steps} optimizer steps
  reference  {f"KL ({args.kl_estimator}) x {args.kl_coef:g} in the {args.kl_in}" if args.kl_coef else "none"}
  run        {args.num_iterations} iterations, the first {args.critic_warmup_iterations} for the critic alone: \
{plan.episodes_total:,} episodes, {plan.actor_steps_total:,} actor and {plan.critic_steps_total:,} critic steps
  defaults   {", ".join(f"{name} {getattr(args, name):g}" for name in DEFAULTS)}"""


def memory_line(models: tuple, rows: int, args: Args) -> str:
    """What rank 0 holds, `rows` in the KV cache."""
    size = lambda model: sum(local(p).nbytes for p in model.parameters()) / 1e9 if model else 0.0
    actor, critic, reference, sampler = map(size, models)
    config, itemsize = models[-1].config, models[-1].model.norm.weight.itemsize
    tokens = args.max_prompt_tokens + args.max_new_tokens
    keys = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    cache = 2 * keys * rows * tokens * itemsize / 1e9
    return f"""\
  memory     weights {actor + critic + reference:.2g}, gradients {max(actor, critic):.2g}, \
Adam {2 * (actor + critic):.2g}, sampler {sampler:.2g}, KV cache of {rows} x {tokens} tokens {cache:.2g} GB"""


def checkpoint_tensors(model, optimizer) -> dict[str, dict[str, Tensor]]:
    """{"weights": {name: tensor}} and, after a step, AdamW's "exp_avg", "exp_avg_sq" and "step"."""
    if model is None:
        return {}
    tensors = {"weights": {name: p.detach() for name, p in model.named_parameters()}}
    for name, p in model.named_parameters() if optimizer else ():
        for kind, x in optimizer.state.get(p, {}).items():  # none if it has never had a gradient
            tensors.setdefault(kind, {})[name] = x
    return tensors


def save_checkpoint(run: RunFolder, saved: dict, state: TrainState, args: Args, trainers: Ranks) -> None:
    """Write checkpoints/iter_<iterations>: appears when complete, can be resumed on any ranks."""
    path = run.path / "checkpoints" / f"iter_{state.iteration:06d}"
    partial = path.with_name("partial")
    failed = f"{path} cannot be written, earlier ones are intact; make room and --resume the run"
    with rephrase(failed, (OSError, dcp.api.CheckpointException)):
        if RANK == 0:
            shutil.rmtree(partial, ignore_errors=True)
        trainers.gather(None)  # wait for rank 0
        for name, (model, optimizer, ranks) in progress(saved.items(), "saving, models"):
            for kind, tensors in checkpoint_tensors(model, optimizer).items():
                writer = dcp.HuggingFaceStorageWriter(str(partial / name / kind), save_distributed=True)
                dcp.save(tensors, storage_writer=writer, process_group=ranks.group,
                         no_dist=ranks.group is None)  # fmt: skip
        trainers.gather(None)  # wait for all
        if RANK > 0:
            return
        state.file_sizes = {name: file.tell() for name, file in run.files.items()}
        found = partial.rglob("*.safetensors")
        files = {str(file.relative_to(partial)): file.stat().st_size for file in found}
        plain = lambda x: x.tolist() if isinstance(x, Tensor) else vars(x)  # of state.ahead
        content = json.dumps({"state": vars(state), "files": files}, default=plain)
        (partial / "state.json").write_text(content)
        partial.rename(path)
        for old in sorted(path.parent.glob("iter_*"), reverse=True)[args.keep_checkpoints :]:
            shutil.rmtree(old)
    print0(f"saved {path}")


def checkpoints_to_resume(args: Args) -> list[Path]:
    """Checkpoints, newest first; none for a new run. Raises UserError if --resume names none."""
    if args.resume is None:
        return []
    folder = Path(args.log_dir, args.run_name) if args.resume == "auto" else Path(args.resume)
    found = sorted(folder.glob("checkpoints/iter_*"), reverse=True)
    if (folder / "state.json").is_file():
        found = [folder]
    if not found and args.resume != "auto":
        raise UserError(f"--resume {args.resume}: no checkpoint there")
    return found


def resume(args: Args, saved: dict) -> TrainState:
    """Read the newest checkpoint into models and optimizers. Raises UserError."""
    path, before = [*checkpoints_to_resume(args), None, None][:2]
    if path is None:
        return TrainState()
    try:
        state = load_checkpoint(path, saved)
    except Exception as error:
        advice = f"; the one before is {before}, if this one is damaged remove it" if before else ""
        raise UserError(f"{path} cannot be read: {error!s:.500}{advice}") from error
    print0(f"resuming from {path}, after {state.iteration} iterations")
    return state


def load_checkpoint(path: Path, saved: dict) -> TrainState:
    content = json.loads((path / "state.json").read_text())
    for name, size in content["files"].items():  # DCP silently ignores a missing file
        if (path / name).stat().st_size != size:
            raise ValueError(f"{name} has not the size it was saved with")
    for name, (model, optimizer, _) in saved.items():
        kinds = {folder.name for folder in (path / name).glob("*")} - {"weights"}
        groups = optimizer.param_groups if optimizer else ()
        for p in [p for group in groups for p in group["params"]]:
            step = torch.zeros((), device=p.device)
            zeros = {kind: torch.zeros_like(p.detach()) for kind in kinds - {"step"}}
            optimizer.state[p] = zeros | ({"step": step} if "step" in kinds else {})
        for kind, tensors in checkpoint_tensors(model, optimizer).items():
            never_updated = tensors.keys() if kind != "weights" else ()  # may lack moments
            read_tensors(tensors, path / name / kind, optional=never_updated)
    state = TrainState(**content["state"])
    if state.ahead:
        names = [f.name for f in dataclasses.fields(Rollout) if f.type == "Tensor"]
        tensors = {name: torch.tensor(state.ahead[name]) for name in names}
        state.ahead = Rollout(**state.ahead | tensors)
    return state


def main() -> None:
    try:
        train(tyro.cli(Args, console_outputs=RANK == 0))
    except UserError as error:
        if RANK > 0:
            time.sleep(5)  # let rank 0 report first, then torchrun ends the others
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
