"""PPO for language models, in one file and in plain PyTorch, with continuous batching.

This is ppo_llm.py with a different section 5. There, samples are decoded in waves, and a wave lasts
as long as its longest sample; here, a slot takes the next sample as soon as its own ends. Flags,
samples and results are the same.

A language model (the actor) answers prompts, a text environment rewards the answers, and Proximal
Policy Optimization (https://arxiv.org/abs/1707.06347) makes the tokens of good answers more likely.
A second transformer (the critic) predicts the reward that is still to come, and a copy of the actor
as it was when PPO began (the reference) limits how far the actor drifts. A frozen classifier (the
reward model) may add to the rewards.

    python ppo_llm_continuous_batching.py --rollout-slots 128

Part I is PPO itself and is meant to be read from top to bottom: 1. arguments, 2. mathematics,
3. training loop, 4. experience, 5. rollout. Part II is what it is built on and is meant for
reference: 6. transformer, 7. tokenizer and Hugging Face checkpoints, 8. text environments,
9. statistics, evaluation and diagnosis, 10. errors, check of the flags, plan, 11. ranks and models,
12. run folder, saving and resuming.

Terminology. The actor is the policy that is trained. The sampler is an unsharded copy of the actor,
one on every rank, which generates text. The old policy is the actor as it was before the updates of
an iteration. Only its log-probs are kept, as `old_logprobs`; with --no-recompute-old-logprobs,
those that the sampler recorded take their place. Actor and sampler have the same weights, but their
log-probs differ by rounding: one reads whole samples, the other decodes token by token. A sample is
one episode: a prompt and a response, perhaps followed by more turns, each of them a text of the
environment and another response. A stop token is one by which the model ends a response, such as
<eos>. An iteration is a rollout and the updates on it; a minibatch is the data of one optimizer
step, and a microbatch (`mb`) is the data of one forward and backward pass.

Layout. Tensors of experience are [B, T] or [N, T]: a row is a sample that starts at index 0 and is
padded on the right. What belongs to a token is stored at the index of that token:

    mask[b, t]      is True if the actor sampled token t, False for all other tokens and padding
    logprobs[b, t]  = log pi(token t | tokens before t)
    values[b, t]    = V(tokens before t), of the state in which token t was sampled
    rewards[b, t]   is what token t earned

Dimensions: N samples of a rollout, B rows of a microbatch, T tokens, V vocabulary, and in the
model S cache positions, H and Hkv heads, D head size.

torchrun starts several processes, as a rule one for each GPU. They are called ranks, and all do the
same work: each plays a share of the episodes, receives the samples of all ranks, and computes a
share of each minibatch. Every model except the sampler is sharded: each rank stores a part of every
weight, and FSDP gathers the whole weights, block by block, when they are needed. The experience is
the same on all ranks. `world` (a World, section 11) describes them; a single process is a world of
one. UserError (section 10) is an error that the user can fix: the script prints its message as one
line and exits with code 2. Comments that begin with `FORK:` mark where forks change the algorithm.
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
import heapq
import itertools
import json
import math
import os
import pkgutil
import random
import re
import shutil
import signal
import sys
import time
import traceback
import types
import typing
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated, Literal

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


@dataclass(frozen=True)
class Range:
    """The values that a flag may have. It is a part of the flag's type; `validate` checks it."""

    low: float
    high: float = 2**31 - 1


Count = Annotated[int, Range(1)]
CountOrZero = Annotated[int, Range(0)]
Positive = Annotated[float, Range(1e-9)]
PositiveOrZero = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]


@dataclass
class Args:
    """PPO for language models.

    To set a flag to None, write the word: `--value-clip None`. Some defaults are None because they
    depend on other flags, as their help says; the values in use are printed at the start.
    """

    # Random seed. It determines the initial weights, the choice of training prompts, the sampled
    # tokens, and the order of the minibatches. The prompts of evaluations do not depend on it.
    seed: CountOrZero = 1
    # Name of the run and of its folder. Default: <environment>__<script>__<seed>__<time>.
    run_name: str | None = None
    # Folder that contains the folders of the runs.
    log_dir: str = "runs"
    # Device to compute on. With auto, a GPU is used if there is one, and otherwise the CPU.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Precision of the forward and backward passes. Trained weights and the optimizer's state are
    # always float32. With auto, it is bfloat16 on a GPU and float32 on the CPU.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # Compile the transformer's blocks and the decode step with torch.compile; on a GPU, decode
    # steps are then also recorded as CUDA graphs. With auto, this applies only on a GPU.
    compile: Literal["auto", "on", "off"] = "auto"
    # Recompute the activations of each block in the backward pass instead of storing them. This
    # saves memory, but makes the updates take about a third longer.
    activation_checkpointing: bool = False

    # Folder of a Hugging Face checkpoint (Llama, Qwen2 or Qwen3) from which the actor starts; names
    # on the Hub are not resolved. Default: a tiny, randomly initialized Llama whose tokens are the
    # characters that the environment uses.
    model: str | None = None
    # Text environment that provides prompts and rewards: SortDigits-v0, GSM8K-v0, Prompts-v0, which
    # takes its prompts from a file and, optionally, a reward function, or your own environment as
    # my_module:MyEnv-v0.
    env_id: str = "SortDigits-v0"
    # Arguments of the environment's constructor, as a JSON object, for example
    # '{"path": "prompts.jsonl", "reward": "my_module:reward"}' for Prompts-v0.
    env_kwargs: str = "{}"
    # Seconds that the environment may take for one call of reset() or step(). A call that takes
    # longer ends the run with an error.
    env_timeout: Positive = 60.0
    # Folder of a reward model: a Hugging Face sequence classifier with one label (Llama, Qwen2 or
    # Qwen3). It reads text through its own tokenizer and, if it has one, its own chat template. Its
    # score is added to the reward of a sample's last token, in training and in evaluations. It
    # scores the whole conversation, as text, at the last token; it cannot see that a response was
    # cut.
    reward_model: str | None = None
    # Folder of a checkpoint from which the critic starts: a reward model, the critic of an earlier
    # run, or a language model, to which a value head of zeros is added. Its tokenizer must have the
    # same vocabulary as the actor's. The critic may be smaller than the actor. Default: a copy of
    # the actor as it was when PPO began, with a value head of zeros.
    critic_model: str | None = None

    # Number of iterations: each is a rollout and the updates that are made on it. The learning rate
    # of the critic decays over all of them, that of the actor over those in which it is trained.
    num_iterations: Count = 270
    # Prompts in a rollout, on all ranks together.
    rollout_batch_size: Count = 256
    # Responses that the actor samples for each prompt of a rollout. PPO treats them as independent
    # samples; responses to one prompt are adjacent rows, for forks that compare them.
    n_samples_per_prompt: Count = 1
    # Maximum number of samples that a rank decodes at the same time, each in a row of its KV cache.
    # If a rank has fewer samples than this, the cache has only as many rows as samples.
    rollout_slots: Count = 256
    # Maximum length of a prompt in tokens, including the chat template. A longer prompt ends the
    # run with an error when it is drawn. Default: 16, or 512 with --model.
    max_prompt_tokens: Count | None = None
    # Maximum number of tokens after the prompt, counted over all turns of an episode and including
    # the environment's text. A response that is cut there is rewarded and trained on like others;
    # see --missing-eos-penalty and --bootstrap-truncated. Default: 8, or 256 with --model.
    max_new_tokens: Count | None = None
    # Temperature of the policy. It divides the logits in sampling and in all log-probs alike,
    # except in evaluations and in the warm start, which are at 1.
    temperature: Positive = 1.0
    # Number of supervised steps on the environment's demonstrations before PPO (the warm start).
    # Default: 60, or 0 with --model.
    sft_steps: CountOrZero | None = None
    # Initial learning rate of the supervised steps, which decays linearly to 0. Default: 1.3e-3, or
    # 1e-5 with --model.
    sft_lr: PositiveOrZero | None = None

    # Number of passes over each rollout in which the actor is updated.
    ppo_epochs: Count = 2
    # Number of passes over each rollout in which the critic is updated. With 0 it is not trained.
    # Default: the value of --ppo-epochs.
    critic_epochs: CountOrZero | None = None
    # Samples per minibatch, that is per optimizer step, on all ranks together. Must divide
    # rollout_batch_size * n_samples_per_prompt.
    train_batch_size: Count = 64
    # Maximum number of tokens in a microbatch on each rank, without padding; a longer sample is a
    # microbatch of its own. This affects memory and speed; results change only by rounding.
    micro_batch_tokens: Count = 4096
    # Initial learning rate of the actor. Default: 5e-4, or 1e-5 with --model, which suits small
    # models; for 7B models, 1e-6 is customary.
    actor_lr: PositiveOrZero | None = None
    # Initial learning rate of the critic. Default: 0.064 divided by the critic's hidden_size, which
    # is 1e-3 without --model, 1.1e-4 for SmolLM2-135M and 1.8e-5 for Qwen2.5-7B.
    critic_lr: PositiveOrZero | None = None
    # Adam's beta1, the decay rate of its momentum. Default: 0.5, with which the tiny model also
    # learns tasks with dense rewards, or the usual 0.9 with --model.
    adam_beta1: Annotated[float, Range(0, 0.9999)] | None = None
    # The learning rates decay linearly to this fraction of their first value, which they reach
    # after the last step. If --target-kl leaves out steps, that of the actor ends higher.
    lr_end: Fraction = 0.05
    # Number of iterations at the beginning in which the critic is trained, but not the actor, whose
    # learning rate begins to decay after them.
    critic_warmup_iterations: CountOrZero = 0
    # Gradient clipping: a gradient whose norm is larger is scaled down to this norm. The norms of
    # actor and critic are separate.
    max_grad_norm: Positive = 1.0

    # Discount factor per token.
    gamma: Fraction = 1.0
    # Lambda of generalized advantage estimation (GAE). With 1, and a gamma of 1, the advantage of a
    # token is the sum of the rewards from that token on, minus the value of its state. With 0, it
    # is the token's reward plus the value of the next state, minus the value of its state. Values
    # in between interpolate: with 0.95, which is customary for short answers, a reward 100 tokens
    # later has a weight of 0.6 %. Advantages are then whitened over the rollout.
    gae_lambda: Fraction = 1.0
    # Lambda of the returns that the critic learns to predict. With 1, they are discounted sums of
    # rewards, including the KL penalty if --kl-in is reward; below 1, they also contain the
    # critic's own values.
    critic_lambda: Fraction = 1.0
    # The probability ratio of new and old policy is clipped from below at 1 - clip_low.
    clip_low: Annotated[float, Range(1e-9, 1)] = 0.2
    # The probability ratio of new and old policy is clipped from above at 1 + clip_high.
    clip_high: Positive = 0.2
    # The critic's loss is the larger of two squared errors: that of the new value, and that of the
    # new value clipped to within this distance of the old value. It is in units of the reward: if
    # rewards are large, raise it, or turn clipping off with None.
    value_clip: Positive | None = 0.2
    # Bounds the loss of a token with a negative advantage A at dual_clip * |A|; 3 is customary.
    # None: no bound.
    dual_clip: Annotated[float, Range(1.001)] | None = None
    # Weight of the entropy bonus in the actor's loss.
    entropy_coef: PositiveOrZero = 0.0
    # Limit of the approximate KL from the old to the new policy, a mean over the tokens of a
    # minibatch. The first minibatch that exceeds it ends the actor's epochs of the iteration,
    # before a step is taken on it. The learning rate does not decay for the steps that are left
    # out. With None there is no limit.
    target_kl: Positive | None = None
    # Compute the old log-probs with a forward pass of the actor after the rollout. If this is off,
    # the log-probs recorded by the sampler are used, which saves that pass, but the ratio then
    # differs from 1 at the start by as much as sampler and actor differ. In both cases the run ends
    # with an error if the approximate KL of its first minibatch is above 1e-3.
    recompute_old_logprobs: bool = True
    # Weight the policy loss of each token by its importance ratio pi_old / pi_sampler, truncated at
    # this value, to correct for differences between actor and sampler; 2 is customary. With None
    # there are no weights. Needs --recompute-old-logprobs: without it, the ratio of the loss is
    # that to the sampler already.
    rollout_is_cap: Positive | None = None
    # Weight of the KL penalty with respect to the reference, for each token, in units of the
    # reward. With 0 there is no reference. Default: 0.02, or 0.01 with --model.
    kl_coef: PositiveOrZero | None = None
    # Whether the KL penalty is subtracted from the rewards or added to the actor's loss.
    kl_in: Literal["reward", "loss"] = "reward"
    # Estimator of the KL (http://joschu.net/blog/kl-approx.html). Default: k1 in the reward, k3 in
    # the loss. What counts in the loss is the gradient: on average, that of k2 is the gradient of
    # KL(actor || reference) and that of k3 the gradient of KL(reference || actor), while that of k1
    # is 0, for which reason k1 is refused there.
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    # Number of iterations between updates of the reference, which move it towards the actor and so
    # let the actor drift further. With 0 the reference never changes.
    ref_sync_every: CountOrZero = 0
    # How far each update moves the reference: reference = alpha * actor + (1 - alpha) * reference.
    # With an alpha of 0.05 and an update in every iteration, for example, the reference is an
    # exponential moving average of the actor.
    ref_sync_alpha: Fraction = 1.0
    # Penalty that is subtracted, in training only, from the reward of a sample whose last token is
    # not a stop token. It is useful with a reward model, which cannot see that a response was cut.
    missing_eos_penalty: PositiveOrZero = 0.0
    # Let the return of a truncated sample end with the critic's value of its last state, instead of
    # with 0. A sample is truncated if the token limit cut its last response or left no room for
    # another turn, or if the environment says that it truncated the episode. If nearly all samples
    # are truncated, the critic learns from little but its own values.
    bootstrap_truncated: bool = False

    # Episodes of an evaluation. They are played twice: sampled at temperature 1, and greedily.
    eval_episodes: Count = 512
    # Arguments of the evaluation's environment that differ from --env-kwargs, as a JSON object, for
    # example '{"path": "test.jsonl"}'. Without them, an environment that reads a file is evaluated
    # on prompts that are also used in training.
    eval_env_kwargs: str = "{}"
    # Number of iterations between evaluations during training. With 0, there are evaluations only
    # before the first iteration and after the last.
    eval_every: CountOrZero = 0
    # Number of iterations between checkpoints; there is also one at the end. With 0, none is saved
    # unless a signal ends the run. If the critic is as large as the actor, a checkpoint takes 28
    # bytes for each parameter of the actor, or 24 without a reference: the weights of actor and
    # critic in float32 and Adam's two moments of each, and the weights of the reference.
    save_every: CountOrZero = 50
    # Number of checkpoints that are kept; older ones are removed after a new one is complete.
    keep_checkpoints: Count = 2
    # Run to continue: the path of its folder, or `auto` for the run that --run-name names, which is
    # started if it has no checkpoint yet. With the path of a checkpoint, a new run begins from it.
    # The other flags are not restored: give them again.
    resume: str | None = None


DEFAULTS = {  # of flags whose default depends on --model: (without it, with it)
    "max_prompt_tokens": (16, 512),
    "max_new_tokens": (8, 256),
    "sft_steps": (60, 0),
    "sft_lr": (1.3e-3, 1e-5),
    "actor_lr": (5e-4, 1e-5),
    "adam_beta1": (0.5, 0.9),
    "kl_coef": (0.02, 0.01),
}


# === 2. Mathematics of PPO ===


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x over the mask, 0 if the mask is empty. Outside the mask x may be NaN."""
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """x with mean 0 and standard deviation 1 over the mask, and 0 elsewhere."""
    centered = torch.where(mask, x - masked_mean(x, mask), 0.0)
    variance = centered.square().sum() / (mask.sum() - 1).clamp(min=1)
    return centered * torch.rsqrt(variance + 1e-8)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Estimates of KL(pi || pi_ref) from single tokens that pi, or nearly pi, sampled.

    See http://joschu.net/blog/kl-approx.html: as values, k1 and k3 are unbiased, and k2 and k3 are
    never negative. As to their gradients, see --kl-estimator.
    """
    logratio = logprobs - ref_logprobs
    if kind == "k1":
        return logratio
    if kind == "k2":
        return logratio.square() / 2
    return torch.exp(-logratio) - 1 + logratio


def compute_gae(rewards, values, mask, gamma, gae_lambda, bootstrap=0.0) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (https://arxiv.org/abs/1506.02438, eq. 16).

    The sampled tokens of a row are one trajectory; the environment's text between them is skipped.
    rewards, values and mask (bool) are [B, T]. gae_lambda is a number, or one for each row, [B].
    bootstrap [B] is V of the state after the last token, by default 0. Returns advantages and
    returns, [B, T] each and 0 outside the mask. Rewards outside the mask are ignored;
    make_experience refuses them.
    """
    values = torch.where(mask, values, 0.0)
    nextvalues = bootstrap
    lastgaelam = 0.0  # after the first step of the loop a tensor [B]
    advantages = torch.zeros_like(values)
    for t in reversed(range(mask.shape[1])):
        # If token t was not sampled, it is skipped: lastgaelam and nextvalues stay as they are.
        delta = rewards[:, t] + gamma * nextvalues - values[:, t]
        lastgaelam = torch.where(mask[:, t], delta + gamma * gae_lambda * lastgaelam, lastgaelam)
        nextvalues = torch.where(mask[:, t], values[:, t], nextvalues)
        advantages[:, t] = lastgaelam
    advantages = torch.where(mask, advantages, 0.0)
    return advantages, advantages + values


def policy_loss(
    logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip=None, denom=None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate of PPO (https://arxiv.org/abs/1707.06347, eq. 7) as a loss.

    All tensors have the shape of the mask, which is bool. dual_clip: see
    https://arxiv.org/abs/1912.09729, eq. 5. The loss is a sum over the mask divided by `denom`, by
    default the number of tokens in the mask. If `denom` is the number of tokens in a whole
    minibatch, the losses of its microbatches add up to that of the minibatch, and so do their
    gradients. The statistics do not depend on `denom`: they are means over the mask, except
    `dev_max`, the largest |ratio - 1|.
    """
    mask_size = mask.sum().clamp(min=1)
    advantages = torch.where(mask, advantages, 0.0)
    logratio = torch.where(mask, logprobs - old_logprobs, 0.0).clamp(-20, 20)  # exp stays finite
    ratio = logratio.exp()  # 1 outside the mask, where losses and statistics are then 0
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.max(pg_loss1, pg_loss2)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.min(losses, -advantages * dual_clip), losses)
    with torch.no_grad():
        stats = {
            # The share of tokens whose loss is the clipped term, so that they have no gradient.
            "clipfrac": (pg_loss2 > pg_loss1).sum() / mask_size,
            # The share of tokens whose ratio is outside of the clip range, whether they have a
            # gradient or not. CleanRL calls this clipfrac.
            "out_of_clip": ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).sum() / mask_size,
            "approx_kl": (ratio - 1 - logratio).sum() / mask_size,  # k3 of KL(old || new)
            "ratio_mean": (ratio * mask).sum() / mask_size,
            "dev_max": (ratio - 1).abs().max(),
        }
    return losses.sum() / (mask_size if denom is None else denom), stats


def value_loss(values, old_values, returns, mask, clip=None, denom=None) -> Tensor:
    """0.5 * max((V - R)^2, (clipped V - R)^2), where V is clipped to old value +- `clip`.

    A sum over the mask divided by `denom`, as in policy_loss.
    """
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    losses = (values - returns).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        losses = torch.max(losses, (clipped - returns).square())
    denom = mask.sum().clamp(min=1) if denom is None else denom
    return 0.5 * losses.sum() / denom


# === 3. Training loop ===
# Each minibatch is split into microbatches; `n_tokens` is the number of sampled tokens of the whole
# minibatch, on all ranks. The loss of a microbatch is a sum over its sampled tokens divided by
# `n_tokens`. backward() accumulates the gradients, and FSDP sums them over the ranks (`shard` turns
# off its averaging). The gradient of a step is therefore that of the mean loss over all sampled
# tokens of the minibatch.


def train(args: Args) -> dict:
    """Run PPO. Returns what summary.json holds. Raises UserError for what the user can fix."""
    plan = validate(args)  # checks the flags, fills in defaults, and counts the steps
    world = connect(args)  # joins the other ranks, and fills in the flags that are "auto"
    envs = make_envs(args, world)
    eval_envs = make_envs(args, world, evaluation=True)
    reward_model = build_reward_model(args, world)  # None without --reward-model
    # Also makes the supervised warm start, before reference and critic are copied from the actor.
    tokenizer, models = build_models(args, envs[0], world)
    actor, critic, reference, sampler = models  # the reference is None if kl_coef is 0
    actor_optimizer = make_optimizer(actor, args)
    critic_optimizer = make_optimizer(critic, args)
    # FORK: another model that trains, such as a second critic: see make_optimizer.
    checkpointed = {"actor": (actor, actor_optimizer), "critic": (critic, critic_optimizer)}
    if reference is not None:
        checkpointed["reference"] = (reference, None)
    # Counters and the next prompt: new, or from a checkpoint, which then also fills the models.
    state = resume(args, checkpointed)
    interrupt = 0  # the number of the signal that asked the run to stop
    evaluate_now = lambda: evaluate(
        sampler, tokenizer, reward_model, eval_envs, state.iteration, args, world
    )

    with RunFolder(args, state, world) as run:
        print0(f"{run.path}: {world.device.type}, {args.dtype}, {world.size} ranks")
        print0(step_table(args, plan))
        copy_weights(actor, sampler)
        if state.eval_before is None:
            state.eval_before = evaluate_now()
        run.summary["eval_before"] = state.eval_before
        run.print_results("before", state.eval_before)

        while state.iteration < args.num_iterations and not interrupt:
            evaluation = {}  # of the policy that is about to sample the rollout
            if state.is_due_for_evaluation(args):
                evaluation = evaluate_now()
                run.print_results(f"after {state.iteration} iterations of", evaluation)

            clock = Clock()
            # --- Rollout: every rank plays a share of the episodes and gets the samples of all. A
            # seed of the environment stands for a prompt. Later seeds are other prompts, until an
            # environment that reads a file starts over.
            # FORK: choice of the prompts. Any `rollout_batch_size` seeds will do, and the samples
            # come in the order of `seeds`. To draw seeds at random, use a generator that is seeded
            # with (seed, iteration), so that a resumed run gets the same prompts, and keep success
            # rates and the like in `state`.
            prompt_seeds = range(state.next_seed, state.next_seed + args.rollout_batch_size)
            state.next_seed = prompt_seeds.stop
            seeds = [seed for seed in prompt_seeds for _ in range(args.n_samples_per_prompt)]
            batch = play(sampler, tokenizer, envs, seeds, state.iteration, args, world)
            # Statistics of the batch are logged with the iteration.
            batch.stats |= {f"eval/{name}": value for name, value in evaluation.items()}
            clock.end("rollout")

            # --- Old log-probs, values, rewards, advantages: computed once, constant from here on
            if reward_model:
                add_scores(batch, reward_model, args, world)
            # FORK: choice of the samples to train on. There must be as many as were planned:
            # batch = select(batch, indices, plan), see section 11.
            experience = make_experience(batch, models, tokenizer, state, args, world)
            clock.end("score")

            # --- Critic epochs. They could equally come after the actor's epochs: both learn from
            # the experience, which is constant, and neither model is an input of the other's loss
            critic_stats = []  # of each optimizer step
            for n_tokens, minibatch in minibatches(experience, args.critic_epochs, args, world):
                loss_denom = n_tokens  # FORK: loss normalization, see `minibatches`.
                stats = StepStats(n_tokens, world)
                for mb in minibatch:
                    newvalues = sampled_values(critic, mb)  # [B, T]
                    # FORK: value loss.
                    v_loss = value_loss(newvalues, mb.values, mb.returns, mb.mask,
                                        args.value_clip, loss_denom)  # fmt: skip
                    v_loss.backward()
                    stats.add_loss_terms(value_loss=v_loss)  # sums over the microbatches
                grad_norm = nn.utils.clip_grad_norm_(critic.parameters(), args.max_grad_norm)
                step_stats = stats.read(grad_norm)  # as floats, over the microbatches of all ranks
                lr = linear_schedule(args.critic_lr, args.lr_end, state.critic_steps,
                                     plan.critic_steps_total)  # fmt: skip
                optimizer_step(critic_optimizer, lr, step_stats["grad_norm"])
                critic_stats.append(step_stats | {"lr": lr})
                state.critic_steps += 1
            clock.end("critic")

            # --- Actor epochs; none while only the critic is trained
            # FORK: tokens that only the critic learns from: see "Forks" in the README.
            epochs = args.ppo_epochs if state.iteration >= args.critic_warmup_iterations else 0
            actor_stats = []  # of each optimizer step
            early_stop = None  # statistics of the minibatch at which --target-kl ended the epochs
            # Copies some of the actor's weights, so that the diagnosis sees how far they move.
            weights_before = some_weights(actor)
            for n_tokens, minibatch in minibatches(experience, epochs, args, world):
                loss_denom = n_tokens  # FORK: loss normalization, see `minibatches`.
                stats = StepStats(n_tokens, world)
                for mb in minibatch:
                    newlogprobs, entropies = sampled_logprobs(actor, mb, args.temperature)  # [B, T]
                    # FORK: policy loss.
                    pg_loss, mb_stats = policy_loss(
                        newlogprobs, mb.old_logprobs, mb.advantages, mb.mask, args.clip_low,
                        args.clip_high, args.dual_clip, loss_denom)  # fmt: skip
                    # Like all results of sampled_logprobs, entropies are 0 outside the mask.
                    entropy = entropies.sum() / loss_denom
                    loss = pg_loss - args.entropy_coef * entropy
                    if args.kl_in == "loss" and reference is not None:
                        # FORK: KL in the loss. Coefficients [B, T] belong before the sum; see
                        # make_experience for positions.
                        kls = kl_estimate(newlogprobs, mb.ref_logprobs, args.kl_estimator)
                        kl_loss = (kls * mb.mask).sum() / loss_denom
                        loss = loss + args.kl_coef * kl_loss
                        stats.add_loss_terms(kl_loss=kl_loss)
                    loss.backward()
                    stats.add_loss_terms(policy_loss=pg_loss, entropy=entropy)
                    # Means are weighted by mb.n_tokens; names that end in _max are maxima.
                    stats.add_means(mb.n_tokens, **mb_stats)
                grad_norm = nn.utils.clip_grad_norm_(actor.parameters(), args.max_grad_norm)
                step_stats = stats.read(grad_norm)
                if args.target_kl is not None and step_stats["approx_kl"] > args.target_kl:
                    early_stop = step_stats
                    actor_optimizer.zero_grad()
                    break  # the steps that are not made do not advance the schedule
                # FORK: learning rate.
                lr = linear_schedule(args.actor_lr, args.lr_end, state.actor_steps,
                                     plan.actor_steps_total)  # fmt: skip
                optimizer_step(actor_optimizer, lr, step_stats["grad_norm"])
                actor_stats.append(step_stats | {"lr": lr})
                state.actor_steps += 1
            clock.end("actor")

            # --- New weights for sampler and reference, diagnoses, log, checkpoint
            copy_weights(actor, sampler)  # each weight is cast and gathered from all ranks
            if args.ref_sync_every and (state.iteration + 1) % args.ref_sync_every == 0:
                sync_reference(reference, actor, args.ref_sync_alpha)
            interrupt = run.received_signal()
            clock.end("hand_over")
            diagnosis = diagnose_actor(actor, weights_before, experience, actor_stats, early_stop,
                                       plan, state, args, world)  # fmt: skip
            critic_diagnosis = diagnose_critic(critic, experience, critic_stats, state, args, world)
            clock.end("diagnose")
            run.log(batch, experience, actor_stats, critic_stats, diagnosis, critic_diagnosis,
                    clock)  # fmt: skip
            # Ends the run if the approximate KL of its very first minibatch was above 1e-3.
            diagnosis.refuse_broken_ratio()
            # Counts the iteration. 20 gradients in a row that are not finite end the run.
            state.end_iteration(actor_stats, critic_stats)
            if interrupt or state.is_due_for_saving(args):
                save_checkpoint(run, checkpointed, state, args, world)

        save_hf_checkpoint(actor, tokenizer, run.path / "model")
        save_hf_checkpoint(critic, tokenizer, run.path / "critic")
        # Rank 0 may still be writing, and torchrun kills all ranks as soon as one exits with a
        # nonzero code.
        world.barrier()
        if interrupt:
            raise SystemExit(128 + interrupt)
        run.summary["eval_after"] = evaluate_now()
        run.print_results("after", run.summary["eval_after"])
    return run.summary


def linear_schedule(first: float, end_fraction: float, step: int, total_steps: int) -> float:
    """From `first` at step 0 to `first * end_fraction` at `total_steps`, and constant after it."""
    return first * (1 - (1 - end_fraction) * min(1.0, step / total_steps))


def optimizer_step(optimizer: torch.optim.Optimizer, lr: float, grad_norm: float) -> None:
    """Update the weights, unless the gradient is not finite, and clear the gradient."""
    for group in optimizer.param_groups:
        # FORK: learning rates of parameter groups: give them an "lr_scale" in make_optimizer.
        group["lr"] = lr * group.get("lr_scale", 1.0)
    if math.isfinite(grad_norm):
        optimizer.step()
    optimizer.zero_grad()


def sync_reference(reference: Transformer, actor: Transformer, alpha: float) -> None:
    """reference = alpha * actor + (1 - alpha) * reference."""
    for target, source in zip(reference.parameters(), actor.parameters()):
        target.detach().lerp_(source.detach(), alpha)


# === 4. Experience ===
# This section turns a Rollout, which is what sampler and environments produce, into the Experience
# that the updates learn from, and splits the Experience into minibatches and microbatches.


Conversation = list[tuple[str, str]]  # (role, text) of each message, the prompt first


@dataclass
class Rollout:
    """N samples of up to T tokens, on the CPU."""

    tokens: Tensor  # [N, T] prompt, response, text of the environment, padding
    mask: Tensor  # [N, T] bool: sampled by the actor
    logprobs: Tensor  # [N, T] log-probs of the sampler, 0 outside the mask
    rewards: Tensor  # [N, T] a response's reward on its last token, dense rewards where earned
    lengths: Tensor  # [N] tokens without padding
    # How each sample ended. "eos": the environment terminated it, after a stop token. "length": the
    # token limit cut its last response, or left no room for another turn. "env": the environment
    # truncated it.
    stop: list[str]
    texts: list[str]  # what followed the prompt
    stats: dict[str, float]  # of the rollout as a whole; logged under these names
    prompts: list[str]
    success: list[bool]  # info["success"] of the last step, else whether rewards.sum() > 0
    conversations: list[Conversation]  # what a reward model reads
    # FORK: data of your own: tensors [N], or [N, T] with a number for each token. They go with the
    # samples through `select`, over the ranks, and into every microbatch, as mb.extras[name]. More
    # may be added to experience.extras in make_experience.
    extras: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Experience:
    """What the updates learn from: a Rollout on the device, and what is computed from it.

    `experience[rows]` is the experience of some samples, cropped to the longest: a microbatch.
    """

    tokens: Tensor  # [N, T], as are all tensors whose comment names no other shape
    logprobs: Tensor  # the sampler's, not the actor's
    lengths: Tensor  # [N] on the CPU
    # [N, T] bool: sampled by the actor. Log-probs, values, advantages and returns are 0 where it is
    # False. It is on the CPU, since counting on the device would make the host wait; `mask` is a
    # copy on the device.
    cpu_mask: Tensor
    extras: dict[str, Tensor]  # of the Rollout
    # What follows is filled in by `make_experience`.
    iteration: int = 0
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    sample_rewards: Tensor | None = None  # [N] without the KL, for the log
    # Returns with a lambda of 1: the discounted sums of the rewards still to come (and, with
    # bootstrap_truncated, of the last values). The log judges the critic by them.
    mc_returns: Tensor | None = None
    advantage_std: float = 0.0  # before whitening, for the diagnosis

    @classmethod
    def from_rollout(cls, batch: Rollout, device: torch.device) -> Experience:
        for name, x in batch.extras.items():
            if x.shape not in (batch.lengths.shape, batch.tokens.shape):
                raise UserError(f"extras: {name} is {list(x.shape)}: must be [N] or [N, T]")
        return cls(
            tokens=batch.tokens.to(device),
            logprobs=batch.logprobs.to(device),
            lengths=batch.lengths,
            cpu_mask=batch.mask,
            extras={name: x.to(device) for name, x in batch.extras.items()},
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def mask(self) -> Tensor:
        """[N, T] bool, on the device."""
        return upload(self.cpu_mask, self.tokens.device)

    @property
    def n_tokens(self) -> int:
        """How many tokens were sampled."""
        return int(self.cpu_mask.sum())

    @property
    def packing(self) -> Packing:
        """Where the real tokens and the sampled ones are: models compute no padding (section 6)."""
        return Packing.of(self.lengths, self.cpu_mask, self.tokens.device)

    @property
    def kls(self) -> Tensor:
        """[N] k1 of the KL of each sample to the reference, in nats."""
        return (self.old_logprobs - self.ref_logprobs).sum(1)

    def __getitem__(self, rows: Tensor) -> Experience:
        """The samples `rows` [B], indices on the CPU, cropped to the longest of them.

        `rows` may be empty. With FSDP a forward pass waits until all ranks take part in it, so that
        a rank without samples must run its models, too. It gets the first token of sample 0, which
        belongs to a prompt: the mask is False there and the loss 0.
        """
        lengths = self.lengths[rows]
        if len(rows) == 0:
            rows, lengths = torch.tensor([0]), torch.tensor([1])
        T = int(lengths.max())
        selected = {"lengths": lengths, "cpu_mask": self.cpu_mask[rows, :T]}
        rows = upload(rows, self.tokens.device)  # the other tensors are on the device
        crop = lambda x: x[rows, :T] if x.ndim > 1 else x[rows]  # x is [N, T] or [N]
        for name, x in vars(self).items():
            if isinstance(x, Tensor) and name not in selected:
                selected[name] = crop(x)
        selected["extras"] = {name: crop(x) for name, x in self.extras.items()}
        return dataclasses.replace(self, **selected)


def sampled_logprobs(
    model: Transformer, mb: Experience, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs of the sampled tokens, and entropies of the model's distributions at these places.

    Both are [B, T], stored at the index of the sampled token, and 0 outside the mask. The result is
    that of the following code, but padding is skipped and the logits are never held all at once:
        log_p = F.log_softmax(model(tokens) / temperature, dim=-1)[:, :-1]  # of tokens[:, 1:]
        logprobs[:, 1:] = log_p.gather(2, tokens[:, 1:, None])[..., 0] * mask[:, 1:]
        entropies[:, 1:] = -(log_p.exp() * log_p).sum(-1) * mask[:, 1:]
    """
    # A packing says which tokens are real and which were sampled (section 6). Given one, the model
    # returns log-probs and entropies instead of logits.
    return model(mb.tokens, packing=mb.packing, temperature=temperature)


def sampled_values(critic: Transformer, mb: Experience) -> Tensor:
    """Values [B, T] of the states in which tokens were sampled, 0 outside the mask.

    What one would compute as values[:, 1:] = critic(tokens)[:, :-1] * mask[:, 1:].
    """
    # Given a packing, the model returns values of the states before the tokens, not after them.
    return critic(critic_tokens(critic, mb), packing=mb.packing)


def critic_tokens(critic: Transformer, mb: Experience) -> Tensor:
    """The tokens, [B, T]. Ids beyond the critic's vocabulary become its last id.

    Models with the same tokenizer may have different numbers of ids that it does not use, such as
    Qwen2.5-7B (152,064 ids) and Qwen2.5-0.5B (151,936). The actor can sample them all the same.
    """
    return mb.tokens.clamp(max=critic.config.vocab_size - 1)


@torch.no_grad()
def forward_all(function: Callable, experience: Experience, args: Args, world: World) -> Tensor:
    """`function(microbatch)` [B, T] of all samples, [N, T]. Every rank computes a share of it."""
    device = experience.tokens.device
    out = torch.zeros(experience.tokens.shape, device=device)
    everything = torch.arange(len(experience))
    shares = microbatches(everything, experience.lengths, args.micro_batch_tokens, world)
    for rows in progress(shares, "scoring, microbatches"):
        # torch.compile uses a different graph for forward passes without gradients, which rounds
        # differently: in bfloat16 the first ratio would be visibly off 1. Compiled models therefore
        # score with gradients enabled, although they are not used; `detach` frees the activations
        # of a microbatch before the next one.
        with torch.set_grad_enabled(args.compile == "on"):
            result = function(experience[rows]).detach().float()
        # For empty `rows` the result has a row all the same, see Experience.__getitem__: drop it.
        out[upload(rows, device), : result.shape[1]] = result[: len(rows)]
    # A row was computed by one rank and is 0 on the others: the sum of the ranks has all rows.
    return world.all_reduce(out)


def logprobs_of_all(
    model: Transformer, experience: Experience, args: Args, world: World
) -> Tensor:
    """Log-probs [N, T] of all sampled tokens under `model`, by the function that the updates call.

    With these as old log-probs, the ratio is therefore 1 until the actor's first optimizer step of
    the iteration. Small rounding errors remain, because the microbatches are other ones here.
    """
    logprobs = lambda mb: sampled_logprobs(model, mb, args.temperature)[0]
    return forward_all(logprobs, experience, args, world)


def add_scores(batch: Rollout, reward_model: RewardModel, args: Args, world: World) -> None:
    """Add the reward model's score of each sample to the reward of its last token."""
    scores = reward_model.score(batch.conversations, args, world).cpu()  # [N]
    batch.rewards[torch.arange(len(scores)), batch.lengths - 1] += scores
    batch.stats["objective/reward_model"] = float(scores.mean())


def make_experience(
    batch: Rollout,
    models: tuple,
    tokenizer: HFTokenizer,
    state: TrainState,
    args: Args,
    world: World,
) -> Experience:
    """All that the updates need, computed before the first of them and constant from then on."""
    actor, critic, reference, _ = models
    # FORK: choice of the tokens to train on. Make their mask [N, T] before anything is computed
    # from it, and move rewards from tokens that are dropped to tokens that remain:
    # batch = dataclasses.replace(batch, mask=mask, logprobs=batch.logprobs * mask, rewards=rewards)
    experience = Experience.from_rollout(batch, world.device)
    mask = experience.mask

    # --- Log-probs [N, T]
    if args.recompute_old_logprobs:
        old_logprobs = logprobs_of_all(actor, experience, args, world)
    else:
        # The sampler's. Its difference from the actor is then in the ratio, and in the KL.
        old_logprobs = experience.logprobs
    ref_logprobs = old_logprobs  # without a reference the KL is 0
    if reference is not None:
        ref_logprobs = logprobs_of_all(reference, experience, args, world)

    # --- Rewards [N, T]. The reward of a token is
    #     batch.rewards: its dense rewards, the environment's reward if it is the last token of a
    #         response, and the reward model's score if it is the last token of the sample,
    #     minus missing_eos_penalty, if it is the last token of the sample and not a stop token,
    #     minus kl_coef * its KL to the reference, for every sampled token (with --kl-in reward)
    rewards = batch.rewards.to(world.device, copy=True)
    rows = torch.arange(len(experience), device=world.device)
    # [N] The last token. It was sampled, since text of the environment is appended only if there is
    # room for a response to it.
    last = upload(batch.lengths - 1, world.device)
    stop_ids = upload(torch.tensor(tokenizer.stop_ids), world.device)
    no_eos = ~torch.isin(experience.tokens[rows, last], stop_ids)  # [N]
    rewards[rows, last] -= args.missing_eos_penalty * no_eos
    # FORK: reward shaping. Every rank does this for all samples, and all must get the same numbers.
    # Changes of the rewards before the next line are part of `objective/reward` in the log; changes
    # after it are not. Statistics of earlier rollouts belong in `state`.
    sample_rewards = rewards.sum(1)  # [N]
    if args.kl_in == "reward":
        # FORK: KL in the reward. Its coefficient may depend on state.iteration, or on the position:
        # `n = mask.cumsum(1)` counts the sampled tokens from 1 through all responses of a sample,
        # and `n - torch.where(mask, 0, n).cummax(1).values` from 1 in each response.
        kls = kl_estimate(old_logprobs, ref_logprobs, args.kl_estimator)
        rewards = rewards - args.kl_coef * kls
    if not rewards.isfinite().all():
        raise UserError("a reward, or its penalty for the KL, is not finite")
    if rewards[~mask].count_nonzero():
        raise UserError("GAE ignores rewards of tokens outside the mask: move them to others")

    # --- Values, advantages and returns. Advantages are whitened, over the whole rollout, so that
    #     those of a sample do not depend on its minibatch; returns are not.
    # FORK: advantages.
    values = forward_all(lambda mb: sampled_values(critic, mb), experience, args, world)
    bootstrap = 0.0  # the return of a truncated sample ends with 0, like that of a complete one
    if args.bootstrap_truncated:
        # [N, T] the value of the state after each token; sampled_values gives that before it.
        state_values = lambda mb: critic(critic_tokens(critic, mb))
        values_after = forward_all(state_values, experience, args, world)
        truncated = upload(torch.tensor([stop != "eos" for stop in batch.stop]), world.device)
        bootstrap = values_after[rows, last] * truncated  # [N]
    # With a lambda of 1, returns are Monte Carlo returns, by which the log judges the critic. Equal
    # lambdas are computed only once: on a GPU, thousands of small operations take their time.
    gae = {}
    for lam in {args.gae_lambda, args.critic_lambda, 1.0}:
        gae[lam] = compute_gae(rewards, values, mask, args.gamma, lam, bootstrap)
    advantages, _ = gae[args.gae_lambda]
    _, returns = gae[args.critic_lambda]
    _, mc_returns = gae[1.0]
    advantage_std = float(advantages[mask].std()) if experience.n_tokens > 1 else 0.0
    if advantage_std < 1e-6:
        # All tokens are equally good up to rounding errors, which whitening would amplify.
        advantages = torch.zeros_like(advantages)
    else:
        advantages = masked_whiten(advantages, mask)
    if args.rollout_is_cap:
        # Truncated importance weights. A positive factor of a token's advantage is a factor of its
        # loss. It comes after whitening, which would rescale the weights.
        weights = (old_logprobs - experience.logprobs).exp().clamp(max=args.rollout_is_cap)
        advantages = advantages * weights
    return dataclasses.replace(
        experience, iteration=state.iteration, old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs, values=values, advantages=advantages, returns=returns,
        sample_rewards=sample_rewards, mc_returns=mc_returns,
        advantage_std=advantage_std)  # fmt: skip


def minibatches(
    experience: Experience, epochs: int, args: Args, world: World
) -> Iterator[tuple[int, list[Experience]]]:
    """The minibatches of `epochs` passes over the experience, in a new random order in each pass.

    Yields the number of sampled tokens that a minibatch has on all ranks, and this rank's
    microbatches of it. Losses are divided by that number, which makes them means over tokens. To
    get means over samples instead, set `loss_denom = args.train_batch_size` in both loops of
    `train`, and divide four things by the following before they are summed: `losses` in policy_loss
    and in value_loss, and the entropies and the KL in the actor's loop.

        mask.sum(1, keepdim=True).clamp(min=1)  # [B, 1] sampled tokens of each sample
    """
    for epoch in range(epochs):
        # A function of (seed, iteration, epoch), so that a resumed run has the same orders.
        seed = ((args.seed * 1_000_003 + experience.iteration) * 1_000_003 + epoch) % 2**63
        order = torch.randperm(len(experience), generator=torch.Generator().manual_seed(seed))
        # FORK: which samples make a minibatch. If that changes how many there are, plan_steps has
        # to change, too: the learning rates decay over its totals.
        parts = order.split(args.train_batch_size)
        for rows in progress(parts, f"epoch {epoch + 1}, minibatches"):
            n_tokens = int(experience.cpu_mask[rows].sum())
            shares = microbatches(rows, experience.lengths, args.micro_batch_tokens, world)
            if n_tokens > 0:  # the mask of a fork may be empty: nothing to learn
                yield n_tokens, [experience[share] for share in shares]


# === 5. Rollout ===
# Continuous batching: a slot takes the next sample the moment its own ends. While an environment
# computes a step, its slot idles. In this section B rows decode together, R of them begin a turn,
# and after K decode steps the host looks at the results. `cache.view(n, rows)` is the KV cache
# (section 6) for a forward pass of these rows, by default of all, which attends to their first n
# positions, or a few more. Position S of the cache, `cache.scratch`, is a dummy: rows that are
# finished, and padding, write there, so that shapes stay the same.

# Seconds that a rollout may spend, in total, on waiting for environments while other rows could
# decode. A short wait pays off: an environment that answers at once does not miss the next step.
PATIENCE = 0.5


@dataclass(eq=False)
class Episode:
    """A sample in progress, on the host. No other episode uses its environment until it ends."""

    env: gym.Env
    where: str  # sample, seed and prompt, for error messages
    key: int = 0  # of its sampling noise
    call: EnvCall | None = None  # of the environment, until its answer is taken
    turns: list[int] = field(default_factory=list)  # sampled tokens of each turn
    prompt: str = ""
    prompt_length: int = 0
    limit: int = 0  # tokens that it may have at most
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)  # which were sampled
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    cached: int = 0  # tokens whose keys and values are in the KV cache
    response_start: int = 0  # index of the first token of the newest response
    stop: str = ""  # see Rollout; empty while the episode goes on
    success: bool = False
    info: dict = field(default_factory=dict)  # of the environment's last answer
    conversation: Conversation = field(default_factory=list)

    def add_text(self, ids: list[int]) -> None:
        """Append tokens of the prompt or of the environment."""
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.rewards += [0.0] * len(ids)

    def add_response(self, ids: list[int], logprobs: list[float]) -> None:
        """Append tokens that the actor sampled."""
        self.response_start = len(self.ids)
        self.ids += ids
        self.mask += [True] * len(ids)
        self.logprobs += logprobs
        self.rewards += [0.0] * len(ids)

    def begin(self, prompt: str, tokenizer: HFTokenizer, args: Args) -> None:
        self.prompt = prompt
        self.conversation.append(("user", prompt))
        self.where += f", prompt {prompt!r:.80}"
        self.add_text(tokenizer.encode_prompt(prompt))
        self.prompt_length = len(self.ids)
        if not 1 <= self.prompt_length <= args.max_prompt_tokens:
            flag = f"--max-prompt-tokens {args.max_prompt_tokens}"
            raise UserError(f"{flag}: the prompt has {self.prompt_length} tokens, {self.where}")
        self.limit = self.prompt_length + args.max_new_tokens

    def take_answer(self, answer: tuple, tokenizer: HFTokenizer) -> None:
        """Take the rewards, and either the end of the episode or the text for another turn."""
        text, reward, terminated, truncated, self.info = answer
        self.rewards[-1] = float(reward)
        # Each dense reward (end, reward) goes to the token that completes the text response[:end].
        if self.info.get("rewards"):
            with attempt(f"use info['rewards'] of {self.where}"):
                ids = self.ids[self.response_start :]
                for index, part in dense_rewards(self.info["rewards"], ids, tokenizer):
                    self.rewards[self.response_start + index] += part
        self.success = bool(self.info.get("success", sum(self.rewards) > 0))
        if self.ids[-1] not in tokenizer.stop_ids:  # cut, even if the environment says terminated
            self.stop = "length"
        elif terminated:
            self.stop = "eos"
        elif truncated:
            self.stop = "env"
        else:
            # The new text alone: to encode the response again could change its ids.
            feedback = tokenizer.encode_feedback(text)
            if len(self.ids) + len(feedback) < self.limit:
                self.add_text(feedback)
                self.conversation.append(("user", text))
            else:
                self.stop = "length"


class Slots:
    """B rows that decode together, on the device.

    A row that is finished stays in the batch, so that shapes do not change; what it reads and
    writes is in column S, that is `cache.scratch`, and means nothing.
    """

    def __init__(self, B: int, S: int, stop_ids: list[int], device: torch.device):
        zeros = functools.partial(torch.zeros, device=device)
        self.tokens = zeros(B, S + 1, dtype=torch.int64)
        self.logprobs = zeros(B, S + 1)
        self.length = zeros(B, dtype=torch.int64)
        self.limit = zeros(B, dtype=torch.int64)
        self.alive = zeros(B, dtype=torch.bool)  # still decoding
        self.noise_keys = zeros(B, dtype=torch.int32)  # see sampling_noise
        self.stop_ids = torch.tensor(stop_ids, device=device)


def decode_step(
    sampler: Transformer, cache: KVCache, slots: Slots, temperature: float, greedy: bool
) -> None:
    """Sample one token in every row that is alive. The host does not wait for the device.

    The input is the newest token of a row. It is not in the cache yet: this forward puts it there.
    """
    position = torch.where(slots.alive, slots.length - 1, cache.scratch)[:, None]  # [B, 1]
    logits = sampler(slots.tokens.gather(1, position), position, cache)[:, 0]  # [B, V]
    # FORK: sampling. Top-p or top-k must go into every log-prob too, or the ratio is wrong.
    logprobs = F.log_softmax(logits.float() / temperature, dim=-1)
    preference = logprobs
    if not greedy:
        # If each probability is divided by independent exponential noise, the argmax is a sample
        # of the distribution (as with Gumbel noise on the log-probs). torch.multinomial would make
        # the host wait.
        noise = sampling_noise(slots.noise_keys, slots.length, logits.shape[1])
        preference = logprobs.exp() / noise
    token = preference.argmax(dim=-1, keepdim=True)  # [B, 1]
    index = torch.where(slots.alive, slots.length, cache.scratch)[:, None]  # [B, 1]
    slots.tokens.scatter_(1, index, token)
    slots.logprobs.scatter_(1, index, logprobs.gather(1, token))
    slots.length += slots.alive
    slots.alive &= (token != slots.stop_ids).all(dim=-1) & (slots.length < slots.limit)


@functools.cache
def compiled_decode_step() -> Callable:
    """decode_step through torch.compile, one for all rollouts of a process.

    It is made when it is first needed, because torch.compile takes seconds to import its compiler.
    """
    return torch.compile(decode_step, dynamic=True)


class Decoder:
    """Runs K decode steps at a time: on a GPU with torch.compile, as CUDA graphs.

    A decode step launches hundreds of kernels, which are so small that the host needs longer to
    launch them than the GPU needs to run them. A CUDA graph is a recording of such launches that
    the host replays with a single launch; it runs the same kernels on the same addresses. Therefore
    weights, cache and slots must be modified in place. Attention reads only the first positions of
    the cache; their number grows in steps of 128, and there is a graph for each. A decoder serves
    one rollout.
    """

    def __init__(
        self, sampler: Transformer, cache: KVCache, slots: Slots, args: Args, greedy: bool
    ):
        on_cuda = sampler.model.norm.weight.is_cuda
        self.K = 8 if on_cuda else 1  # decode steps between host syncs
        self.use_graphs = on_cuda and args.compile == "on"
        self.graphs = {}  # by the number of positions
        # The graphs share the memory of their intermediate results, since each leaves nothing there
        # that another needs.
        self.pool = torch.cuda.graph_pool_handle() if self.use_graphs else None
        step = compiled_decode_step() if args.compile == "on" else decode_step
        self.step = lambda view: step(sampler, view, slots, args.temperature, greedy)
        self.cache, self.slots = cache, slots

    def run(self, attend: int) -> None:
        """Make K steps. In the first, up to `attend` positions of the cache are in use."""
        attend += self.K - 1
        view = self.cache.view(round_up(attend, 128) if self.use_graphs else attend)
        for _ in range(self.K):
            if view.attend in self.graphs:
                self.graphs[view.attend].replay()
                continue
            self.step(view)  # compiles what is not compiled yet
            if self.use_graphs:
                graph = self.graphs[view.attend] = torch.cuda.CUDAGraph()
                # An environment's threads may use the GPU meanwhile: "thread_local" lets them.
                with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                    self.step(view)  # is recorded for the steps that follow, and does not run


def prefill(sampler: Transformer, cache: KVCache, episodes: dict[int, Episode], args: Args) -> None:
    """Add the keys and values that are missing for `episodes` {row of the cache: episode}.

    The newest token does not go into the cache: it is the input of the first decode step.
    """
    width = max(len(e.ids) - 1 - e.cached for e in episodes.values())
    if width == 0:
        return
    texts = [torch.tensor(e.ids[e.cached : -1], dtype=torch.int64) for e in episodes.values()]
    spans = [torch.arange(e.cached, len(e.ids) - 1) for e in episodes.values()]
    device = cache.rows.device
    rows = upload(torch.tensor(list(episodes)), device)  # [R]
    tokens = upload(padded(texts), device)  # [R, width]
    # Padding goes to the dummy position. If two rows lack 3 and 5 tokens, for example, the
    # positions are 0, 1, 2, scratch, scratch and 0, 1, 2, 3, 4.
    positions = upload(padded(spans, cache.scratch), device)  # [R, width]
    attend = max(len(episode.ids) for episode in episodes.values())
    rows_per_forward = max(1, args.micro_batch_tokens // width)
    for start in range(0, len(episodes), rows_per_forward):
        part = slice(start, start + rows_per_forward)
        sampler(tokens[part], positions[part], cache.view(attend, rows[part]), prefill=True)
    for episode in episodes.values():
        episode.cached = len(episode.ids) - 1


def fill_slots(
    sampler, cache: KVCache, prompts: KVCache, free: list, ahead: list, staged: dict, args: Args
) -> dict[int, Episode]:
    """Seat the next episodes in the slots `free`, as far as their prompts have arrived.

    Prefilling one prompt takes nearly as long as prefilling several. Therefore several of the
    episodes in `ahead`, which have no slot yet, are prefilled together, in rows of the cache
    `prompts`. They wait there, as `staged` {row of `prompts`: episode}, until they get a slot, to
    which their keys and values are then copied. Returns {slot: episode}.
    """
    seated = {}
    while free:
        if not staged:
            ready = [episode for episode in ahead if not episode.call][: len(prompts.rows)]
            if not ready:
                break
            staged.update(enumerate(ready))
            prefill(sampler, prompts, staged, args)
            ahead[:] = [episode for episode in ahead if episode not in ready]
        slot = free.pop(0)
        source = next(iter(staged))
        seated[slot] = staged.pop(source)
        length = seated[slot].cached
        for layer, prompt_layer in zip(cache.layers, prompts.layers):
            for x, prompt in zip(layer, prompt_layer):  # keys, then values
                x[slot, :, :length] = prompt[source, :, :length]
    return seated


def begin_turn(slots: Slots, episodes: dict[int, Episode]) -> None:
    """Set up the rows of `episodes` {row: episode}, whose keys and values are in the cache."""
    numbers = [(row, e.ids[-1], len(e.ids), e.limit, e.key) for row, e in episodes.items()]
    table = upload(torch.tensor(numbers), slots.tokens.device)
    rows, newest, length, limit, keys = table.T  # [R] each
    slots.tokens[rows, length - 1] = newest
    slots.length[rows] = length
    slots.limit[rows] = limit
    slots.noise_keys[rows] = keys.int()
    slots.alive[rows] = True


def end_turn(
    slots: Slots, episodes: dict[int, Episode], tokenizer: HFTokenizer, args: Args
) -> None:
    """Pass the responses of `episodes` {slot: episode} to the environments, without waiting."""
    rows = torch.tensor(list(episodes), device=slots.tokens.device)
    tokens, logprobs = slots.tokens[rows].tolist(), slots.logprobs[rows].tolist()
    lengths = slots.length[rows].tolist()
    for i, episode in enumerate(episodes.values()):
        new = slice(len(episode.ids), lengths[i])
        sampled = tokens[i][new]
        episode.add_response(sampled, logprobs[i][new])
        episode.cached = len(episode.ids) - 1
        episode.turns.append(len(sampled))
        response = tokenizer.decode(sampled)
        episode.conversation.append(("assistant", response))
        episode.call = EnvCall(episode.env, "step", episode.where, args, response)


def take_answers(episodes: list[Episode], tokenizer: HFTokenizer, args: Args) -> None:
    """Take the answers that have arrived. Raises UserError if one is malformed or too late."""
    for episode in episodes:
        call = episode.call
        if call and (call.answer.ready() or time.monotonic() > call.deadline):
            if call.method == "reset":
                prompt, _ = call.result()
                episode.begin(prompt, tokenizer, args)
            else:
                episode.take_answer(call.result(), tokenizer)
            episode.call = None


def wait(episodes: list[Episode], seconds: float) -> float:
    """Wait up to `seconds` for answers of the environments. Returns the seconds that are left."""
    start = time.monotonic()
    for episode in episodes:
        if episode.call:
            episode.call.answer.wait(timeout=max(0.0, start + seconds - time.monotonic()))
    waited = time.monotonic() - start
    return seconds - max(0.0, waited - 0.001)  # a millisecond does not count


def envs_needed(args: Args, n_episodes: int) -> int:
    """How many environments a rollout of `n_episodes` on one rank needs.

    One for each slot, and a quarter more that are asked for prompts ahead of time.
    """
    return min(args.rollout_slots + max(1, args.rollout_slots // 4), n_episodes)


@torch.no_grad()
def rollout(sampler, tokenizer, envs, seeds, sample_ids, iteration, args, greedy=False) -> Rollout:
    """Play an episode for each of `seeds` [N], min(rollout_slots, len(envs)) at the same time.

    `sample_ids` [N], the indices of the episodes among those of all ranks, and `iteration`, which
    is negative in evaluations, choose the sampling noise.
    """
    N, S = len(seeds), args.max_prompt_tokens + args.max_new_tokens
    B = min(args.rollout_slots, len(envs), N)
    weight = sampler.model.norm.weight
    cache = KVCache(sampler.config, B, S, weight.dtype, weight.device)
    # The cache of the prompts of episodes that wait for a slot, see fill_slots.
    prompts = KVCache(
        sampler.config, max(1, B // 4), args.max_prompt_tokens, weight.dtype, weight.device
    )
    slots = Slots(B, S, tokenizer.stop_ids, weight.device)
    keys = sample_keys(args.seed, iteration, sample_ids).tolist()
    decoder = Decoder(sampler, cache, slots, args, greedy)
    episodes = []  # all that have been started, in the order of `seeds`
    ahead = []  # those that have no slot yet, see fill_slots
    staged = {}  # {row of `prompts`: episode} of those whose prompts are prefilled
    playing = {}  # {slot: episode} of those that have a slot
    decoding = {}  # {slot: length of its text} of the slots that are decoding
    free_envs = list(envs)
    patience = PATIENCE
    steps = 0
    bar = progress(desc="rollout, samples" if iteration >= 0 else "evaluation, samples", total=N)
    while len(episodes) < N or len(free_envs) < len(envs):
        # Ask for prompts, also ahead of time.
        while free_envs and len(episodes) < N:
            i = len(episodes)
            env = free_envs.pop()
            where = f"sample {sample_ids[i]}, seed {seeds[i]}"
            call = EnvCall(env, "reset", where, args, seed=seeds[i])
            ahead.append(Episode(env, where, keys[i], call))
            episodes.append(ahead[-1])

        # Take answers. Wait only for those without which a slot cannot go on: of the episodes in
        # slots and, if free slots lack prompts, of the next ones.
        free = [slot for slot in range(B) if slot not in playing]
        next_ones = ahead if len(free) > len(staged) else []
        waiting = [*playing.values(), *next_ones]
        # Rows that could go on wait for the others, but no longer than their patience lasts.
        if (free and staged) or any(not e.call or e.call.answer.ready() for e in waiting):
            patience = wait(waiting, patience)
        take_answers([*playing.values(), *ahead], tokenizer, args)
        ended = [slot for slot, episode in playing.items() if episode.stop]
        if ended:
            free_envs += [playing.pop(slot).env for slot in ended]
            bar.update(len(ended))
            continue  # ask for more prompts

        # Begin turns, in slots that are free and in those whose environment has answered.
        playing |= fill_slots(sampler, cache, prompts, free, ahead, staged, args)
        begun = {slot: e for slot, e in playing.items() if not e.call and slot not in decoding}
        if begun:
            prefill(sampler, cache, begun, args)  # the environment's text; prompts are in the cache
            begin_turn(slots, begun)
            decoding |= {slot: len(episode.ids) for slot, episode in begun.items()}
        if not decoding:  # every episode waits for its environment
            time.sleep(0.001)
            continue

        # Decode.
        decoder.run(max(decoding.values()))
        decoding = {slot: length + decoder.K for slot, length in decoding.items()}
        steps += decoder.K
        alive = slots.alive.tolist()  # the host waits for the device
        ended = {slot: playing[slot] for slot in decoding if not alive[slot]}
        if ended:
            end_turn(slots, ended, tokenizer, args)
            decoding = {slot: length for slot, length in decoding.items() if alive[slot]}
    bar.close()
    return to_rollout(episodes, tokenizer, rollout_stats(episodes, B, decoder.K, steps))


def rollout_stats(episodes: list[Episode], B: int, K: int, steps: int) -> dict[str, float]:
    """Decode steps, and how many other schedules would take, computed from the lengths.

    gain_over_static is the steps of waves, in which each turn is as long as its longest response,
    divided by the steps taken here. ideal_gain is the steps of waves divided by those of a schedule
    in which no slot ever waits, but takes the next sample as soon as its own ends.
    """
    # Each length is rounded up to the K steps between two looks at the device.
    turns = [[-(-length // K) * K for length in episode.turns] for episode in episodes]
    waves = 0
    ends = [0] * B
    for start in range(0, len(turns), B):
        waves += sum(map(max, itertools.zip_longest(*turns[start : start + B], fillvalue=0)))
    for lengths in turns:
        heapq.heapreplace(ends, ends[0] + sum(lengths))
    return {
        "rollout/decode_steps": steps,
        "rollout/slot_occupancy": sum(sum(episode.turns) for episode in episodes) / (steps * B),
        "rollout/gain_over_static": waves / steps,
        "rollout/ideal_gain": waves / max(ends),
    }


def to_rollout(
    episodes: list[Episode], tokenizer: HFTokenizer, stats: dict[str, float]
) -> Rollout:
    """The episodes as rows of tensors."""
    return Rollout(
        tokens=padded([e.ids for e in episodes]),
        mask=padded([e.mask for e in episodes]),
        logprobs=padded([e.logprobs for e in episodes]),
        rewards=padded([e.rewards for e in episodes]),
        lengths=torch.tensor([len(e.ids) for e in episodes]),
        stop=[e.stop for e in episodes],
        texts=[tokenizer.decode(e.ids[e.prompt_length :]) for e in episodes],
        stats=stats,
        prompts=[e.prompt for e in episodes],
        success=[e.success for e in episodes],
        conversations=[e.conversation for e in episodes],
        # FORK: for example {"level": torch.tensor([e.info.get("level", 0) for e in episodes])}.
        extras={},
    )


def padded(rows: list, fill: int = 0) -> Tensor:
    """[N, T] of N rows, which are lists or tensors, padded on the right with `fill`."""
    rows = [torch.as_tensor(row) for row in rows]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def play(sampler, tokenizer, envs, seeds, iteration, args, world, greedy=False) -> Rollout:
    """An episode for each of `seeds` [N]: every rank plays a share, and gets the samples of all."""
    first = len(seeds) * world.rank // world.size
    end = len(seeds) * (world.rank + 1) // world.size
    mine = None
    if first < end:  # there may be fewer episodes than ranks
        mine = rollout(
            sampler, tokenizer, envs, seeds[first:end], range(first, end), iteration, args, greedy
        )
    return concatenate([part for part in world.gather(mine) if part is not None])


# ################################# Part II: what PPO stands on #################################

# === 6. Transformer, KV cache, log-probs, sampling noise ===


@dataclass
class ModelConfig:
    """The shape of a Llama, Qwen2 or Qwen3 decoder."""

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
    raw: dict = field(default_factory=dict)  # all of config.json, written back on export

    @classmethod
    def from_hf(cls, raw: dict) -> ModelConfig:
        """Read config.json of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""
        kind = raw.get("model_type")
        act = raw.get("hidden_act", "silu")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("llama", "qwen2", "qwen3"):
            raise ValueError(f"model_type {kind!r}: must be llama, qwen2 or qwen3")
        if rope_type not in ("default", "llama3"):
            raise ValueError(f"rope type {rope_type!r}: must be default or llama3")
        if (rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ValueError("partial_rotary_factor: must be 1")
        if act != "silu" or raw.get("use_sliding_window"):
            raise ValueError(f"hidden_act {act!r}: must be silu; use_sliding_window must be off")
        heads = raw["num_attention_heads"]
        bias = raw.get("attention_bias", False)  # on q, k, v, o; Qwen2 always has it on q, k, v
        same_name = {f.name: raw[f.name] for f in dataclasses.fields(cls) if f.name in raw}
        other = {
            "num_key_value_heads": raw.get("num_key_value_heads") or heads,
            "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
            "rope_theta": rope.get("rope_theta", raw.get("rope_theta", 10000.0)),
            "rope_scaling": rope if rope_type == "llama3" else None,
            "qkv_bias": kind == "qwen2" or bias,
            "o_bias": kind != "qwen2" and bias,
            "qk_norm": kind == "qwen3",
            "raw": raw,
        }
        return cls(**same_name | other)


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Rotary frequencies [D / 2] (https://arxiv.org/abs/2104.09864).

    With `rope_scaling`, low frequencies are divided by a factor, as in Llama 3.1.
    """
    exponents = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    rotations = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    smooth = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / scaling["factor"] + smooth * frequencies


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of x [..., H, D], as in HF, in fp32.

    cos and sin are [..., 1, D]; the first half of sin is negated.
    """
    swapped = x.float().roll(x.shape[-1] // 2, dims=-1)  # second half, first half
    return (x.float() * cos + swapped * sin).to(x.dtype)


@dataclass(frozen=True)
class Packing:
    """Where the n real tokens of a microbatch [B, T] are, and which m of them were sampled.

    In training the model computes only real tokens: outside attention, a tensor [n, ...] holds one
    sample after another, without padding. Attention is the only operation that relates the tokens
    of a sample to each other, and the attention kernels that run everywhere take rows of equal
    length. Queries, keys and values are therefore unpacked to [B, T, ...] for it, and its output is
    packed again. In this example B = 2 and T = 4; capitals were sampled, and dots are padding:

        tokens  [[a b C D]     packed  [a b C D a E]     place    [0 1 2 3 4 5]
                 [a E . .]]    index    0 1 2 3 4 5      position [0 1 2 3 0 1]
                                                         sampled  [2 3 5]

    The indices are computed on the CPU, where `nonzero` does not make the host wait for the device.
    """

    B: int
    T: int
    place: Tensor  # [n] index of each real token in B * T
    position: Tensor  # [n] its index in its sample
    sampled: Tensor  # [m] indices in n of the sampled tokens

    @classmethod
    def of(cls, lengths: Tensor, mask: Tensor, device: torch.device) -> Packing:
        """For samples of these lengths [B] and this mask [B, T], both on the CPU."""
        B, T = mask.shape
        is_real = torch.arange(T) < lengths[:, None]  # [B, T]
        place = is_real.flatten().nonzero()[:, 0]
        sampled = mask.flatten()[place].nonzero()[:, 0]
        indices = (upload(x, device) for x in (place, place % T, sampled))
        return cls(B, T, *indices)

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [n, ...]"""
        return x.flatten(0, 1).index_select(0, self.place)

    def unpack(self, x: Tensor) -> Tensor:
        """[n, ...] -> [B, T, ...], 0 in the padding"""
        return self.put(x, self.place)

    def unpack_sampled(self, x: Tensor) -> Tensor:
        """[m] -> [B, T], 0 where nothing was sampled"""
        # clone, since a model must not return a view: if somebody changed it in place, FSDP would
        # not gather the weights for the backward pass, and the gradients would be wrong.
        return self.put(x, self.place[self.sampled]).clone()

    def put(self, x: Tensor, place: Tensor) -> Tensor:
        """[k, ...] -> [B, T, ...], at the indices `place` [k] of B * T, 0 elsewhere"""
        blank = x.new_zeros(self.B * self.T, *x.shape[1:])
        return blank.index_copy(0, place, x).unflatten(0, (self.B, self.T))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.H = config.num_attention_heads
        self.Hkv = config.num_key_value_heads
        self.D = config.head_dim
        hidden = config.hidden_size
        self.grouped = self.H != self.Hkv  # comparing in forward would break the compiled graph
        # FORK: model surgery, such as adapters. Do not initialize a sharded weight at random: every
        # rank would draw the same numbers for its shard.
        self.q_proj = nn.Linear(hidden, self.H * self.D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, self.Hkv * self.D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, self.Hkv * self.D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.H * self.D, hidden, bias=config.o_bias)
        norm = nn.RMSNorm if config.qk_norm else nn.Identity  # which ignores its arguments
        self.q_norm = norm(self.D, config.rms_norm_eps)
        self.k_norm = norm(self.D, config.rms_norm_eps)

    def forward(self, x, cos, sin, packing=None, cache=None, positions=None, mask=None):
        q = self.q_proj(x).unflatten(-1, (self.H, self.D))  # [..., H, D]
        k = self.k_proj(x).unflatten(-1, (self.Hkv, self.D))  # [..., Hkv, D]
        v = self.v_proj(x).unflatten(-1, (self.Hkv, self.D))
        q = apply_rope(self.q_norm(q), cos, sin)
        k = apply_rope(self.k_norm(k), cos, sin)
        if cache is not None:
            return self.o_proj(self.attend_to_cache(q, k, v, cache, positions, mask))
        if packing is not None:
            q, k, v = (packing.unpack(x) for x in (q, k, v))  # [B, T, H or Hkv, D]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H or Hkv, T, D]
        grouped = self.grouped
        if grouped and q.is_cuda and q.dtype == torch.float32:
            # On a GPU only flash attention supports grouped heads, and it does not support float32.
            # The kernel that would take over holds all scores [B, H, T, T].
            grouped = False
            k, v = (x.repeat_interleave(self.H // self.Hkv, dim=1) for x in (k, v))
        # Rows start at index 0, so causality alone hides the padding on the right.
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        out = out.transpose(1, 2)  # [B, T, H, D]
        if packing is not None:
            out = packing.pack(out)  # [n, H, D]
        return self.o_proj(out.flatten(-2))

    def attend_to_cache(self, q, k, v, cache, positions, mask):
        """Add k and v [B, T, Hkv, D] to the cache, attend to all that is in it: [B, T, H * D]."""
        B, T = positions.shape
        k, v = cache.update(self.layer, k, v, positions)  # [B, Hkv, S, D]
        # enable_gqa is slow with a mask: fold the G query heads of a key head into the queries.
        q = q.view(B, T, self.Hkv, -1, self.D).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, T, D]
        q = q.flatten(2, 3)  # [B, Hkv, G * T, D]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = out.view(B, self.Hkv, -1, T, self.D).permute(0, 3, 1, 2, 4)  # [B, T, Hkv, G, D]
        return out.flatten(2)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden = config.hidden_size
        inner = config.intermediate_size
        bias = config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, *context) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *context)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """Language model (head="lm"), critic or reward model ("scalar"). Parameter names are HF's."""

    def __init__(self, config: ModelConfig, head: Literal["lm", "scalar"] = "lm"):
        super().__init__()
        self.config = config
        self.head = head
        self.tied = head == "lm" and config.tie_word_embeddings
        self.checkpointing = False
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
        if self.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, tokens, positions=None, cache=None, prefill=False, packing=None, temperature=1.0
    ):
        """Run the model on `tokens` [B, T], in one of three ways.

        Plain: returns logits [B, T, V] for the token after each token or, with a scalar head, the
        value [B, T] of the state after each token. Rows may be padded on the right.
        In training, with a `packing`: see sampled_logprobs and sampled_values, which call this.
        In the rollout, with a `cache`: returns logits for the token after each token. The tokens
        are at `positions` [B, T] and also attend to what is in the cache. With `prefill`, the
        tokens only go into the cache, and nothing is returned.

        All of it is one method because FSDP gathers the weights in hooks of `forward` alone.
        """
        if packing is not None:
            tokens = packing.pack(tokens)  # [n]
            positions = packing.position  # [n]
        elif positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        angles = positions[..., None, None].float() * self.rope  # [..., 1, D / 2]
        cos = angles.cos()
        sin = angles.sin()
        context = (torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1), packing)
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
        x = self.model.norm(x)
        if prefill:
            return None
        if packing is None:
            return self.lm_head(x) if self.head == "lm" else self.values(x)

        # The shift by one: the log-prob of a sampled token, and the value of the state in which it
        # was sampled, come from the output one token earlier. That token belongs to the same
        # sample, since every sample begins with a prompt.
        x = x[packing.sampled - 1]  # [m, hidden]
        if self.head == "scalar":
            return packing.unpack_sampled(self.values(x))
        targets = tokens[packing.sampled]  # [m]
        logprobs, entropies = token_logprobs(x, self.lm_head.weight, targets, temperature)
        return packing.unpack_sampled(logprobs), packing.unpack_sampled(entropies)

    def values(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [...], in fp32, since bfloat16 would round values too coarsely."""
        return self.score(x.float())[..., 0].clone()  # clone: see Packing.unpack_sampled


class KVCache:
    """Keys and values of every layer, [rows, Hkv, S, D] each.

    Entries that must not be kept, that is, padding and the tokens of finished rows, are written to
    position `scratch`. A forward pass may write to any position but reads only the first `attend`
    positions, so that the time of a decode step depends on how long the texts are, not on how long
    they may become.
    """

    def __init__(self, config: ModelConfig, rows, size, dtype=torch.float32, device="cpu"):
        self.scratch = size
        self.attend = round_up(size + 1)  # attention reads the positions below this one
        self.rows = torch.arange(rows, device=device)  # the rows that the next forward computes
        self.read = slice(None)  # the same rows, for reading; a slice does not copy
        shape = (rows, config.num_key_value_heads, self.attend, config.head_dim)
        zeros = functools.partial(torch.zeros, shape, dtype=dtype, device=device)
        self.layers = [(zeros(), zeros()) for _ in range(config.num_hidden_layers)]

    def view(self, attend: int, rows: Tensor | None = None) -> KVCache:
        """The same memory, for a forward of `rows` (default: all) that reads `attend` positions."""
        view = copy.copy(self)
        view.attend = min(round_up(attend), self.attend)
        if rows is not None:
            view.rows = view.read = rows
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
        return keys[self.read, :, : self.attend], values[self.read, :, : self.attend]


def round_up(n: int, unit: int = 16) -> int:
    """To a multiple of `unit`, so that there are few shapes to compile, and masks are aligned."""
    return -(-n // unit) * unit


def token_logprobs(hidden, weight, targets, temperature=1.0) -> tuple[Tensor, Tensor]:
    """Log-probs [n] of `targets` [n] and entropies [n], from hidden [n, d] and weight [V, d].

    These lines in chunks, since their logits [n, V] may take more memory than the model:
        logprobs = F.log_softmax((hidden @ weight.T).float() / temperature, dim=-1)
        return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
    """
    return ChunkedLogprobs.apply(hidden, weight, targets, temperature)


class ChunkedLogprobs(torch.autograd.Function):
    """`token_logprobs` in chunks of positions, whose logits the backward pass computes again."""

    @staticmethod
    def chunks(hidden, weight, targets, temperature):
        chunk = 2**26 if hidden.is_cuda else 2**22  # logits; they take 256 MB, on the CPU 16 MB
        rows = max(1, chunk // len(weight))
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
            g = grad_logprobs[part, None]
            p = log_p.exp()
            log_p.add_(entropy[part, None]).mul_(grad_entropy[part, None]).add_(g)
            grad = p.mul_(log_p).neg_().scatter_add_(1, target, g)
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight += grad.T @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def hash32(x: Tensor) -> Tensor:
    """The hash lowbias32 of https://github.com/skeeto/hash-prospector, on int32.

    The masks make `>>` the shift of unsigned integers. Products overflow, as they should.
    """
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * -0x7B935975  # 0x846CA68B as int32
    return x ^ (x >> 16 & 0xFFFF)


def sample_keys(seed: int, iteration: int, sample_ids) -> Tensor:
    """A key [N] for the noise of each sample: a hash of seed, iteration and index of the sample.

    So the noise does not depend on the batch, the slot or the rank in which a text is computed.
    """
    int32 = lambda x: torch.tensor(x, dtype=torch.int32)
    return hash32(hash32(hash32(int32(seed)) ^ int32(iteration)) ^ int32(sample_ids))


def sampling_noise(keys: Tensor, index: Tensor, vocab_size: int) -> Tensor:
    """Exponential noise [B, V], a function of sample key [B], token index [B] and vocabulary id."""
    token_keys = hash32(hash32(keys ^ 0x5851F42D) ^ index.to(torch.int32))
    ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    x = hash32(hash32(ids ^ keys[:, None]) ^ token_keys[:, None])  # [B, V]
    # u is uniform in (0, 1), from 31 bits. It must not become 1, and it must be fine near 0:
    # otherwise rare tokens would be sampled too often, or never.
    u = ((x >> 1) & 0x7FFFFFFF).float().add(0.5).mul(2**-31).clamp(max=1 - 2**-24)
    return -torch.log1p(-u)


# === 7. Tokenizer and Hugging Face checkpoints ===


class HFTokenizer:
    """Text <-> ids, chat template and stop ids of a Hugging Face folder."""

    def __init__(self, folder: str | Path, tokenizer: PreTrainedTokenizerFast | None = None):
        self.folder = Path(folder)
        self.hf = tokenizer
        if tokenizer is None:
            with attempt(f"load tokenizer.json and tokenizer_config.json of {folder}"):
                self.hf = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        self.tokenizer = self.hf.backend_tokenizer  # much faster than through transformers
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        stop_ids = {self.hf.eos_token_id}
        for name in ("config.json", "generation_config.json"):
            path = self.folder / name
            if path.is_file():
                ids = read_json(path).get("eos_token_id")
                stop_ids.update(ids if isinstance(ids, list) else [ids])
        self.stop_ids = sorted(stop_ids - {None})
        if not self.stop_ids:
            raise UserError(f"{folder}: no eos token in any of its config files")
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

    def render(self, *turns: tuple[str, str], generation_prompt: bool = True) -> str:
        """(role, content) of each turn in the chat template; at the end the header of an answer."""
        messages = [{"role": role, "content": content} for role, content in turns]
        with attempt(f"render the chat template of {self.folder}"):
            return self.hf.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation_prompt
            )

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_prompt(self, prompt: str) -> list[int]:
        """A user turn in the chat template, or plain text, with BOS where the tokenizer adds it."""
        if self.hf.chat_template:
            return self.encode(self.render(("user", prompt)))
        return self.encode(prompt, add_special_tokens=True)

    def encode_conversation(self, *turns: tuple[str, str]) -> list[int]:
        """(role, content) of each turn, complete, as a reward model reads them."""
        if self.hf.chat_template:
            return self.encode(self.render(*turns, generation_prompt=False))
        text = "".join(content for _, content in turns)
        return [*self.encode(text, add_special_tokens=True), self.eos_id]

    def encode_feedback(self, text: str) -> list[int]:
        """What the chat template puts between two turns of the assistant, around `text`."""
        if self.hf.chat_template:
            whole = self.render(("user", "-"), ("assistant", "<<turn>>"), ("user", text))
            _, answer, text = whole.partition("<<turn>>")
            if not answer:
                raise UserError(f"the chat template of {self.folder} leaves out earlier turns")
            for token in self.hf.convert_ids_to_tokens(self.stop_ids):
                # The actor has sampled it. Llama 2's template puts a space before it.
                if token and text.lstrip().startswith(token):
                    text = text.lstrip().removeprefix(token)
        return self.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens, and without stop tokens, which may not be special."""
        ids = [i for i in ids if i not in self.stop_ids]
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def read_json(path: Path) -> dict:
    with attempt(f"read {path}"):
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
        return content


def load_config(folder: str | Path) -> ModelConfig:
    raw = read_json(Path(folder, "config.json"))
    with attempt(f"use {folder}/config.json"):
        return ModelConfig.from_hf(raw)


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2))


def load_config_and_tokenizer(folder: str):
    """Load both from a folder. Raises UserError if the tokenizer has ids that the model lacks."""
    config = load_config(folder)
    tokenizer = HFTokenizer(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder}: a vocabulary of {config.vocab_size}, "
            f"the tokenizer needs {tokenizer.vocab_size}"
        )
    return config, tokenizer


def load_hf_checkpoint(path, dtype=torch.float32, device="cpu", head="lm"):
    """(Transformer, ModelConfig) of config.json and safetensors, which may be several files.

    head="scalar" is for a reward model or a critic, with one label: a folder of a language model,
    which has no such head, is an error.
    """
    config = load_config(path)
    model = materialize(on_meta(config, head, dtype), device)
    load_weights(model, path)
    return model, config


def load_weights(model: Transformer, folder: str | Path, needs_head: bool = True) -> None:
    """Fill `model`, which may be sharded. The files may have another head in addition to its own.

    If the files lack the model's head, an error is raised, unless needs_head=False: then the head
    keeps its weights.
    """
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    heads = {"lm_head.weight", "score.weight"}
    read_tensors(tensors, folder, optional=heads - tensors.keys() if needs_head else heads)


def read_tensors(tensors: dict[str, Tensor], folder: str | Path, optional=frozenset()) -> None:
    """Fill `tensors`, sharded or not, from the safetensors in `folder`.

    Raises UserError if names or shapes differ, except for names in `optional`, which either side
    may lack.
    """
    with attempt(f"load the safetensors of {folder}"):
        reader = dcp.HuggingFaceStorageReader(str(folder))
        saved = {name: x.size for name, x in reader.read_metadata().state_dict_metadata.items()}
        differ = []
        for name in sorted(saved.keys() | tensors.keys()):
            there = list(saved[name]) if name in saved else "missing"
            here = list(tensors[name].shape) if name in tensors else "missing"
            may_be_missing = name in optional or "rotary_emb" in name
            if there != here and not (may_be_missing and "missing" in (there, here)):
                differ.append(f"{name} is {there} in the files, {here} in the model")
        if differ:
            raise ValueError(f"other names or shapes: {'; '.join(differ[:3])}")
        found = {name: x for name, x in tensors.items() if name in saved}
        dcp.load(found, storage_reader=reader, no_dist=True)


def save_hf_checkpoint(
    model: Transformer, tokenizer: HFTokenizer, path: str | Path
) -> None:
    """Write a folder that transformers can load: a language model or, of a critic, a classifier.

    All ranks of a sharded model call it.
    """
    weights = {}
    for name, p in model.named_parameters():
        whole = full_tensor(p.detach())  # a collective call
        if RANK == 0:
            weights[name] = whole.cpu().contiguous()
    if RANK > 0:
        return
    dtype = str(weights["model.norm.weight"].dtype).removeprefix("torch.")
    raw = model.config.raw | {"torch_dtype": dtype, "dtype": dtype}
    if model.head == "scalar":
        family = raw["model_type"].capitalize()  # Llama, Qwen2, Qwen3
        raw |= {
            "architectures": [f"{family}ForSequenceClassification"],
            "id2label": {"0": "value"},  # transformers counts the labels
            "label2id": {"value": 0},
            "pad_token_id": tokenizer.pad_id,  # transformers finds the last token by it
        }
    path = Path(path)
    generation_config = tokenizer.folder / "generation_config.json"
    with attempt(f"write {path}"):
        tokenizer.hf.save_pretrained(path)
        # Transformers 4, on which other tools may rely, does not know the class that 5 names.
        saved = path / "tokenizer_config.json"
        write_json(saved, read_json(saved) | {"tokenizer_class": "PreTrainedTokenizerFast"})
        if generation_config.is_file():
            (path / generation_config.name).write_bytes(generation_config.read_bytes())
        safetensors.torch.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        write_json(path / "config.json", raw)


# === 8. Text environments ===
# A text environment is a gymnasium.Env whose observations and actions are text:
#
#     reset(seed=...) -> (prompt, info)
#     step(response) -> (text, reward, terminated, truncated, info)
#
# The same seed must always give the same prompt and demonstration, since every rank asks for them
# itself. Evaluations use the seeds from 0 on; training uses consecutive seeds that start at a large
# number, which depends on --seed. If the episode goes on, `text` is the next prompt.
# info["demonstration"] of reset is an answer to learn in the warm start. info["success"] of the
# last step counts for accuracy. info["rewards"] of a step may hold dense rewards in addition to
# `reward`: [(end, reward), ...], each for the characters response[:end].
# FORK: if the prompts are in a file and episodes have one turn, write a reward function and pass it
# to Prompts-v0. Otherwise write an environment like these and pass --env-id my_module:MyEnv-v0.


class SortDigits(gym.Env):
    """The answer to "52814=" is "12458". The reward is the share of digits in place.

    It is 0 for another length. Demonstrations show the digits in random order, so that sorting is
    learned from the reward alone. A tenth of the prompts, chosen by CRC, is held out.
    """

    def __init__(self, split: Literal["train", "test"] = "train", digits: int = 5):
        if split not in ("train", "test") or digits < 1:
            raise ValueError("split must be train or test, digits at least 1")
        self.test = split == "test"
        self.digits = digits

    def reset(self, *, seed=None, options=None):
        rng = random.Random(seed)
        text = ""
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
def load_rows(path: str, convert: Callable) -> list[dict]:
    """The JSON objects of a file, one per line, in a random order that is always the same.

    `convert` adds the "prompt" to a row, or raises an exception if it cannot.
    """
    rows = []
    for i, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        with attempt(f"use line {i} of {path}"):
            row = convert(json.loads(line))
            if {type(row["prompt"]), type(row.get("demonstration", ""))} != {str}:
                raise ValueError("prompt and demonstration must be text")
            row["prompt"].encode()  # raises for half of a surrogate pair
            rows.append(row)
    if not rows:
        raise UserError(f"no rows in {path}")
    return random.Random(0).sample(rows, len(rows))  # consecutive seeds see every row once


class Prompts(gym.Env):
    """Prompts from a file and, optionally, rewards from your own function, named by `reward`.

    Each line of the file is a row {"prompt": text}, or {"messages": [{"role": "user", "content":
    text}]}. It may have a "demonstration", and other keys for the function. The function
    my_module:reward is called as reward(prompt, response, row), from many threads at the same time.
    It returns a number, which counts as success if it is above 0, or (number, success). Without a
    function, all rewards are 0.
    """

    def __init__(self, path: str, reward: str | None = None):
        self.rows = load_rows(str(path), self.convert)
        if reward:
            with attempt(f"import the reward function {reward}"):
                self.reward = pkgutil.resolve_name(reward)  # in place of the method below
                if not callable(self.reward):
                    raise ValueError("not a function")

    @staticmethod
    def convert(row):
        if "messages" not in row:
            return row
        # The tokenizer makes a single user turn of a prompt. To drop other messages would be to
        # train on other conversations than those of the file.
        if [message["role"] for message in row["messages"]] != ["user"]:
            raise ValueError("messages must be a single one, with the role user")
        return row | {"prompt": row["messages"][0]["content"]}

    def reset(self, *, seed=None, options=None):
        self.row = self.rows[(seed or 0) % len(self.rows)]
        return self.row["prompt"], self.row

    def step(self, response):
        reward = self.reward(self.row["prompt"], response, self.row)
        info = {}
        if isinstance(reward, tuple) and len(reward) == 2:  # EnvCall refuses other tuples
            reward, info["success"] = reward
        return "", reward, True, False, info

    def reward(self, prompt, response, row):
        return 0.0  # for runs in which a reward model gives all rewards


class GSM8K(Prompts):
    """Word problems (https://arxiv.org/abs/2110.14168), reward 1 for the right number.

    The files are those of https://github.com/openai/grade-school-math.
    """

    @staticmethod
    def convert(row):
        if parse_number(row["answer"]) is None:
            raise ValueError("no '#### number' in the answer")
        task = "Think step by step. End with a line of the form: #### number"
        return row | {"prompt": f"{row['question']}\n\n{task}", "demonstration": row["answer"]}

    def reward(self, prompt, response, row):
        success = parse_number(response) == parse_number(row["answer"])
        return float(success), success


gym.register("SortDigits-v0", entry_point=SortDigits)
gym.register("Prompts-v0", entry_point=Prompts)
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
        self.env = env
        self.method = method
        self.where = where
        self.timeout = args.env_timeout
        samples = max(args.eval_episodes, args.rollout_batch_size * args.n_samples_per_prompt)
        of_rank = -(-samples // WORLD_SIZE)
        threads = env_threads(max(64, 2 * envs_needed(args, of_rank)))  # more than calls at a time
        self.deadline = time.monotonic() + args.env_timeout
        self.answer = threads.apply_async(getattr(env, method), arguments, keywords)

    def result(self) -> tuple:
        """Wait for (prompt, info) or (text, reward, terminated, truncated, info), or UserError."""
        self.answer.wait(timeout=max(0.0, self.deadline - time.monotonic()))
        if not self.answer.ready():
            raise self.error(
                f"gave no answer within --env-timeout {self.timeout:g} s: "
                "does it take longer, hang, or call sys.exit()?"
            )
        try:
            value = self.answer.get()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise self.error(
                f"raised {type(error).__name__}: {error} "
                f"({place.filename}, line {place.lineno})"
            ) from error
        form = "(text, info)"
        if self.method == "step":
            form = "(text, finite reward, terminated, truncated, info)"
        if not self.is_well_formed(value):
            raise self.error(f"returned {value!r:.200}, expected {form}")
        return value

    def is_well_formed(self, value) -> bool:
        try:
            text, *numbers, info = value
            finite = all(map(math.isfinite, numbers))
        except (TypeError, ValueError, OverflowError):
            return False
        count = 0 if self.method == "reset" else 3  # reward, terminated, truncated
        right_types = isinstance(text, str) and isinstance(info, dict)
        return right_types and finite and len(numbers) == count

    def error(self, what: str) -> UserError:
        name = self.env.spec.id if self.env.spec else type(self.env).__name__
        return UserError(f"environment {name}, {self.where}: {self.method}() {what}")


def dense_rewards(
    pairs: list[tuple[int, float]], ids: list[int], tokenizer: HFTokenizer
) -> Iterator[tuple[int, float]]:
    """Yield (token index, reward) for rewards (end, reward), each of which is for response[:end].

    A reward goes to the token that completes response[:end], that is, the first token up to which
    the decoded text starts with response[:end].
    """
    response = tokenizer.decode(ids)
    for end, reward in pairs:
        if not (1 <= end <= len(response) and math.isfinite(reward)):
            raise ValueError(
                f"{(end, reward)}: must be (end, finite reward) with 1 <= end <= {len(response)}"
            )
        completes = lambda n: tokenizer.decode(ids[: n + 1]).startswith(response[:end])
        yield bisect.bisect_left(range(len(ids)), True, key=completes), reward


def reset(env: gym.Env, seed: int, args: Args) -> tuple[str, dict]:
    return EnvCall(env, "reset", f"seed {seed}", args, seed=seed).result()


def make_envs(args: Args, world: World, evaluation: bool = False) -> list[gym.Env]:
    """This rank's environments for a rollout, or for an evaluation."""
    n_episodes = args.rollout_batch_size * args.n_samples_per_prompt
    flags = f"--env-id {args.env_id} --env-kwargs {args.env_kwargs}"
    if evaluation:
        n_episodes = args.eval_episodes
        flags += f" --eval-env-kwargs {args.eval_env_kwargs}"
    count = envs_needed(args, -(-n_episodes // world.size))
    # Other exceptions are bugs of the environment: its author needs the traceback.
    kinds = (gym.error.Error, ImportError, OSError, TypeError, ValueError)
    with attempt(f"make the environment of {flags}", kinds):
        kwargs = dict(**json.loads(args.env_kwargs))
        if evaluation:
            if args.env_id == "SortDigits-v0":
                kwargs["split"] = "test"
            kwargs |= dict(**json.loads(args.eval_env_kwargs))
        return [gym.make(args.env_id, disable_env_checker=True, **kwargs) for _ in range(count)]


# === 9. Statistics, evaluation, diagnosis ===


class Clock:
    """Seconds that the phases of an iteration take."""

    def __init__(self):
        self.last = time.monotonic()
        self.phases = {}

    def end(self, phase: str) -> None:
        now = time.monotonic()
        self.phases[phase] = now - self.last
        self.last = now


class StepStats:
    """Statistics of an optimizer step, collected from its microbatches on all ranks.

    Each is a scalar tensor. Terms of the loss are sums divided by the same number in all
    microbatches, so they add up, as their gradients do. Other statistics are means over the sampled
    tokens of a microbatch and become the mean over those of the minibatch, except those whose
    names end in _max, which are maxima and remain maxima.
    """

    def __init__(self, n_tokens: int, world: World):
        self.n_tokens = n_tokens  # sampled tokens of the minibatch, on all ranks
        self.world = world
        self.sums = {}
        self.maxima = {}

    def add_loss_terms(self, **terms: Tensor) -> None:
        """Terms of the loss of a microbatch, divided by loss_denom already: they are added up."""
        self.add_means(self.n_tokens, **terms)

    def add_means(self, n_tokens: int, **means: Tensor) -> None:
        """Means, and maxima, over a microbatch with `n_tokens` sampled tokens."""
        share = n_tokens / self.n_tokens
        for name, x in means.items():
            if name.endswith("_max"):
                self.maxima[name] = torch.maximum(x.double(), self.maxima.get(name, x))
            else:
                self.sums[name] = self.sums.get(name, 0.0) + x.detach().double() * share

    def read(self, grad_norm: Tensor) -> dict[str, float]:
        """All of them, and the norm of the gradient. Here the host waits for the device."""
        numbers = self.world.all_reduce(torch.stack([*self.sums.values()]))
        if self.maxima:
            maxima = torch.stack([*self.maxima.values()])
            numbers = torch.cat((numbers, self.world.all_reduce(maxima, dist.ReduceOp.MAX)))
        *numbers, norm = torch.cat((numbers, full_tensor(grad_norm)[None])).tolist()
        step = dict(zip([*self.sums, *self.maxima], numbers))
        skipped = not math.isfinite(norm)  # by optimizer_step
        return step | {"tokens": self.n_tokens, "grad_norm": norm, "skipped": skipped}


def token_mean(steps: list[dict], name: str) -> float | None:
    """Mean over the tokens of the steps, None without any."""
    tokens = sum(step["tokens"] for step in steps)
    return sum(step[name] * step["tokens"] for step in steps) / tokens if tokens else None


def metrics(
    state, args, batch, experience, actor_stats, critic_stats, diagnosis, critic_diagnosis, clock
) -> dict:
    """A line of metrics.jsonl. Means over steps are weighted by tokens, without skipped steps."""
    N = len(experience)
    mask = experience.mask
    seconds = sum(clock.phases.values())
    row = {
        "iteration": state.iteration,
        "charts/episodes": (state.iteration + 1) * N,
        "charts/actor_steps": state.actor_steps,
        "objective/reward": float(experience.sample_rewards.mean()),
        "objective/accuracy": sum(batch.success) / N,
        "objective/response_tokens": experience.n_tokens / N,
        "objective/entropy": -float(masked_mean(experience.old_logprobs, mask)),
        "objective/truncated": sum(stop != "eos" for stop in batch.stop) / N,
        "objective/kl": float(experience.kls.mean()) if args.kl_coef else None,
        "time/iteration": seconds,
        "perf/peak_memory_bytes": torch.cuda.max_memory_allocated() or None,  # 0 without a GPU
        "perf/response_tokens_per_second": experience.n_tokens / seconds,
    }
    row |= {f"time/{phase}": passed for phase, passed in clock.phases.items()}
    for subject, found in (("critic", critic_diagnosis), ("ratio", diagnosis)):
        row |= {f"{subject}/{name}": value for name, value in found.signals.items()}
        row[f"{subject}/diagnosis"] = found.cause
    row["ratio/steps"] = actor_stats  # the statistics of each step take the place of their number
    sampler_diff = row.pop("ratio/sampler_diff")
    if args.recompute_old_logprobs:
        row["debug/sampler_trainer_logprob_diff"] = sampler_diff
    if args.rollout_is_cap:
        weights = (experience.old_logprobs - experience.logprobs).exp()  # 1 outside the mask
        row["rollout/is_weight_mean"] = float(masked_mean(weights, mask))
        row["rollout/is_weight_max"] = float(weights.max())
        row["rollout/is_capped"] = float(masked_mean((weights > args.rollout_is_cap).float(), mask))
    for model, steps in (("actor", actor_stats), ("critic", critic_stats)):
        made = [step for step in steps if not step["skipped"]]
        row[f"grad/skipped_{model}"] = len(steps) - len(made)
        row[f"grad/{model}_norm"] = token_mean(made, "grad_norm")
        row[f"charts/{model}_lr"] = steps[-1]["lr"] if steps else None
        for name in made[0] if made else ():
            if name not in ("tokens", "grad_norm", "skipped", "lr") and not name.endswith("_max"):
                row[f"losses/{name}"] = token_mean(made, name)
    if twice := sorted(row.keys() & batch.stats.keys()):
        raise UserError(f"batch.stats: {twice[0]} is the name of another metric: choose another")
    return batch.stats | row


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(return - value) / Var(return), of tensors [n].

    It is 1 if the values predict the returns up to a constant, 0 for values that are all the same,
    and below 0 for values that are worse than that. NaN if all returns are equal up to rounding.
    """
    variance = returns.var(correction=0)
    explained = 1 - (returns - values).var(correction=0) / variance
    return float(explained) if variance > 1e-10 else math.nan


def describe_values(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """How good the values [N, T] of a rollout are. The critic has not learned from it yet.

    `returns` must be Monte Carlo returns. The returns that the critic learns contain the values
    themselves if --critic-lambda is below 1: to explain these says nothing about the critic. With
    --bootstrap-truncated, even Monte Carlo returns contain the last value of truncated samples, and
    the numbers are too good if there are many of these.

    gain is the variance of the advantages with a constant baseline, divided by their variance with
    the critic, both with a lambda of 1. It says how many times more samples a constant baseline
    would need. Below 1, the critic adds noise (https://arxiv.org/abs/2604.19485). A lambda below 1
    lowers both variances by withholding the reward from early tokens, which says nothing about the
    critic.
    """
    n = mask.cumsum(1)  # [N, T] at a sampled token: which of its sample it is, from 1
    first = mask & (n == 1)
    last = mask & (n == n[:, -1:])
    all_values = values[mask]
    all_returns = returns[mask]
    explained = explained_variance(all_values, all_returns)
    return {
        "explained_variance": explained,
        "explained_variance_first": explained_variance(values[first], returns[first]),
        "explained_variance_last": explained_variance(values[last], returns[last]),
        "gain": 1 / max(1 - explained, 1e-6),  # NaN if that is
        "value_mean": float(all_values.mean()),
        "value_std": float(all_values.std()),
        "return_mean": float(all_returns.mean()),
        "return_std": float(all_returns.std()),
    }


def evaluate(sampler, tokenizer, reward_model, envs, iteration, args, world) -> dict[str, float]:
    """Means over episodes sampled at temperature 1, and greedy accuracy."""
    N = args.eval_episodes
    args = dataclasses.replace(args, temperature=1.0)
    noise = -1 - iteration  # negative: other noise than in training
    sampled = play(sampler, tokenizer, envs, range(N), noise, args, world)
    greedy = play(sampler, tokenizer, envs, range(N), noise, args, world, greedy=True)
    if reward_model:
        add_scores(sampled, reward_model, args, world)
    return {
        "accuracy": sum(sampled.success) / N,
        "greedy_accuracy": sum(greedy.success) / N,
        "reward": float(sampled.rewards.sum()) / N,
        "response_tokens": float(sampled.mask.sum()) / N,
    }


@dataclass
class Diagnosis:
    """What is wrong with the importance ratio, or with the critic."""

    cause: str | None  # None: healthy
    advice: str
    signals: dict  # see diagnose_ratio and diagnose_values

    @property
    def evidence(self) -> str:
        rounded = lambda x: f"{x:.2g}" if isinstance(x, float) else x
        return ", ".join(f"{name} {rounded(x)}" for name, x in self.signals.items())

    def refuse_broken_ratio(self) -> None:
        """End the run if its first updates were made with a ratio that did not begin at 1."""
        # A mean over tokens: a single token may be far off by rounding.
        is_broken = self.cause == "forward_mismatch" and self.signals["first_kl"] > 1e-3
        if is_broken and self.signals["steps_before"] == 0:
            raise UserError(f"the first ratio is off: {self.advice} ({self.evidence})")


def some_weights(actor: Transformer) -> Tensor:
    """A copy of up to 16,384 elements of this rank's part of every weight, in one tensor."""
    weights = [local_tensor(p).detach() for p in actor.parameters()]
    return torch.cat([p.flatten()[:: 1 + p.numel() // 2**14] for p in weights])


def diagnose_actor(
    actor, weights_before, experience, steps, early_stop, plan, state, args, world
) -> Diagnosis:
    """Diagnose the ratio after the actor's updates, with a forward pass of some samples.

    `weights_before` are those of some_weights before the updates; `steps` and `early_stop` are the
    statistics of the updates and of the minibatch at which --target-kl ended them.
    """
    made = [step for step in steps if not step["skipped"]]
    nothing = {"dev_max": 0.0, "approx_kl": 0.0, "out_of_clip": 0.0}
    seen = steps or [early_stop or nothing]  # if no step was made, there is still a first ratio
    first, last = seen[0], seen[-1]
    gap = (experience.logprobs - experience.old_logprobs).abs()
    # --- How the updates changed the weights
    weights = some_weights(actor)
    change = (weights - weights_before).double()
    sums = (change != 0).double(), torch.ones_like(change), change**2, weights.double() ** 2
    sums = torch.stack(sums).sum(1).to(world.device)
    changed, probed, update, weight = world.all_reduce(sums).tolist()
    # --- How they changed the log-probs of the first eighth of the samples
    some = experience[torch.arange(max(1, len(experience) // 8))]
    newlogprobs = logprobs_of_all(actor, some, args, world)
    logratio = (newlogprobs - some.old_logprobs)[some.mask]  # [n]
    drift = logratio * some.advantages[some.mask].sign()  # [n], > 0: moved as it should
    n = len(logratio)
    signals = {
        "first_dev": first["dev_max"],
        "first_kl": first["approx_kl"],
        "last_dev": last["dev_max"],
        "out_of_clip": last["out_of_clip"],
        "lr": last.get("lr", 0.0),
        "tokens": experience.n_tokens,
        "steps": len(made),
        "skipped": len(steps) - len(made),
        "steps_before": state.actor_steps - len(steps),  # in earlier iterations
        "planned": plan.update_steps,
        "early_stop": early_stop and early_stop["approx_kl"],
        "grad_norm": token_mean(made, "grad_norm") or 0.0,
        "adv_raw_std": experience.advantage_std,
        "sampler_diff": float(masked_mean(gap, experience.mask)),
        "compute_dtype": args.dtype,
        "phase": "critic_warmup" if state.iteration < args.critic_warmup_iterations else "train",
        "changed_frac": changed / probed,
        "update_norm": update**0.5,
        "param_norm": weight**0.5,
        "param_dtype": str(weights.dtype),
        "post_dev": float(logratio.expm1().abs().max()) if n else 0.0,
        "signed_t": float(drift.mean() / (drift.std() + 1e-12)) * n**0.5 if n > 1 else 0.0,
    }
    return Diagnosis(*diagnose_ratio(signals), signals)


def diagnose_ratio(signals: dict) -> tuple[str | None, str]:
    """Cause and advice: the first cause below that fits the signals (see diagnose_actor).

    first_dev, last_dev and post_dev are max |ratio - 1| on the first minibatch, on the last one,
    and with the updated actor; first_kl is the approximate KL on the first minibatch, a mean over
    tokens. In bfloat16 the maxima are mostly rounding. There, signed_t says whether the policy
    moved: it is how far the log-probs moved in the direction of the advantages, in standard errors.
    """
    s = types.SimpleNamespace(**signals)
    noise = 2 * max(s.first_dev, 1e-6)
    moved = s.post_dev > 5 * noise
    stuck = near_one = s.last_dev <= noise  # as near to 1 as the first ratio
    bf16 = "bfloat16" in s.param_dtype + s.compute_dtype
    first_is_off = s.first_kl > 1e-3 if bf16 else s.first_dev > 1e-4
    if bf16:
        moved = s.signed_t > 3
        stuck = not moved or s.steps <= 1 or s.last_dev <= 2e-6
        if not moved:
            signals["undecided"] = "bfloat16 noise"

    if s.phase == "critic_warmup":
        return "critic_warmup", "see --critic-warmup-iterations"
    if s.tokens == 0:
        return "empty_mask", "no token was sampled: check --max-new-tokens, eos, mask"
    # Comes before the causes of a ratio that stays at 1: none of them explains a first ratio that
    # is off.
    if first_is_off:
        return "forward_mismatch", (
            "look for dropout, a shifted mask, shifted positions, another temperature, or the "
            "sampler's log-probs used as old ones"
        )
    if near_one and s.early_stop and s.steps < s.planned:
        return "kl_early_stop", "raise --target-kl or lower --actor-lr"
    if s.steps == 0 or (s.skipped > 0 and (near_one or math.isnan(s.first_dev))):
        return "steps_skipped", "NaN in log-probs? large rewards? If not, lower --actor-lr"
    if stuck and s.planned == s.steps == 1 and moved:
        return "one_update_by_design", "this is correct; with more epochs the ratio moves"
    if stuck and s.adv_raw_std < 1e-6:
        return "advantage_zero", "all advantages are equal: is the reward constant?"
    if stuck and s.grad_norm == 0:
        return "no_grad_to_actor", "detached log-probs or frozen parameters"
    if stuck and s.changed_frac == 0 and s.lr > 1e-10:
        return "optimizer_noop", "the optimizer does not hold the actor's parameters"
    if stuck and s.steps > 1 and moved:
        return "old_logprob_recomputed", "record them once, before the first update"
    if "bfloat16" in s.param_dtype and s.changed_frac < 0.5:  # few weights change
        return "bf16_underflow", "updates are rounded away: keep the weights in float32"
    if stuck and s.update_norm < 1e-6 * s.param_norm:
        return "lr_or_clip_too_small", "raise --actor-lr or --max-grad-norm"
    if stuck and s.changed_frac > 0 and s.post_dev <= (2e-6 if bf16 else noise):
        return "forward_ignores_update", "the forward pass runs a stale copy of the model"
    if s.sampler_diff > (0.05 if bf16 else 1e-3):
        return "sampler_mismatch", "stale weights? other numerics? see --rollout-is-cap"
    if s.out_of_clip > 0.9:
        return "too_tight_clip", "widen --clip-low and --clip-high, or lower --actor-lr"
    return None, ""


def diagnose_critic(critic, experience, steps, state, args, world) -> Diagnosis:
    """Diagnose the critic after its updates, with a forward pass of some samples.

    The state remembers what the next iteration compares with. A cause is named only if each of the
    last few iterations had one, see TrainState.remember.
    """
    N = len(experience)
    some = experience[torch.arange(min(N, max(8, N // 8)))]
    newvalues = forward_all(lambda mb: sampled_values(critic, mb), some, args, world)
    change = float((newvalues - some.values)[some.mask].abs().mean())
    tokens = experience.n_tokens / N  # of a sample
    signals = describe_values(experience.values, experience.mc_returns, experience.mask)
    distance = abs(signals["value_mean"] - signals["return_mean"])
    signals |= {
        "explained_after": explained_variance(newvalues[some.mask], some.mc_returns[some.mask]),
        "change": change,
        "change_over_clip": change / args.value_clip if args.value_clip else 0.0,
        "distance": distance,
        "distance_before": state.value_distance,
        "scale": max(state.return_scale, signals["return_std"]),
        "reward_std": float(experience.sample_rewards.std(correction=0)),
        "last_reward_weight": (args.gamma * args.gae_lambda) ** max(0.0, tokens - 1),
        "steps": sum(not step["skipped"] for step in steps),
    }
    return state.remember(Diagnosis(*diagnose_values(signals), signals))


def diagnose_values(signals: dict) -> tuple[str | None, str]:
    """Cause and advice: the first cause below that fits the signals of a critic.

    In addition to those of describe_values, which are from before the updates, the signals are

        explained_after     the explained variance after the updates, of samples they were made on
        change              by how much the updates changed the values, a mean over tokens
        change_over_clip    the same as a multiple of --value-clip
        distance            of the mean value from the mean return
        distance_before     the same in the iteration before
        scale               the largest return_std of the run so far
        reward_std          the standard deviation of the samples' rewards, without KL
        last_reward_weight  the weight of a sample's last reward in the advantage of its first token
        steps               optimizer steps of the critic
    """
    s = types.SimpleNamespace(**signals)
    # The critic takes a while to learn the level of the returns. To be far from it is a fault only
    # if the distance does not shrink, or if it would take more than 20 iterations.
    is_far = s.distance > s.scale / 2
    stays_far = is_far and s.distance > 0.95 * s.distance_before
    # Towards the end of a successful run nearly all samples earn the same. What is left of the
    # variance is then noise, which no critic can predict.
    returns_vary = s.return_std > s.scale / 4

    if s.steps == 0:
        return "critic_not_trained", "is --critic-epochs 0, or are values NaN?"
    if s.reward_std < 1e-6:
        return "reward_constant", "all samples earn the same: are all right, or none?"
    if stays_far and s.change_over_clip > 0.8:
        return "value_clip_binds", "large rewards: raise --value-clip, or set it to None"
    if is_far and s.change < s.distance / 20:
        return "critic_lr_too_small", "values hardly move: raise --critic-lr"
    if stays_far:
        return "critic_behind", "returns move faster than values: raise --critic-epochs"
    if returns_vary and s.explained_variance < 0.05 and s.value_std < s.return_std / 20:
        return "values_constant", "raise --critic-lr, unless rewards cannot be predicted"
    if returns_vary and s.gain < 0.98 and s.explained_after > 0.5:
        return "critic_overfits", "lower --critic-epochs, or more samples an iteration"
    if returns_vary and s.gain < 0.98:
        return "worse_than_constant", "lower --critic-lr, raise --critic-warmup-iterations"
    if s.last_reward_weight < 0.01 and s.explained_variance < 0.2:
        return "lambda_hides_reward", (
            "early tokens learn nothing from a reward at the end: raise --gae-lambda, or --gamma "
            "if it is below 1, and also --critic-lambda, without which the critic does not predict "
            "that reward early, either"
        )
    return None, ""


# === 10. Errors, check of the flags, plan ===

# As torchrun sets them. A World has the same numbers, but does not exist yet where these are used.
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
# Progress bars appear after a second, on rank 0, if it writes to a terminal (disable=None).
progress = functools.partial(tqdm, leave=False, delay=1.0, disable=RANK > 0 or None)


class UserError(ValueError):
    """An error that the user can fix. It is printed as one line, and the exit code is 2."""

    def __str__(self):
        return " ".join(super().__str__().split())


@contextlib.contextmanager
def attempt(task: str, kinds=(Exception, dcp.api.CheckpointException)):
    """Turn exceptions of these kinds into a UserError that says which task failed, and how."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise UserError(f"cannot {task}: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """Kind and message of an error, or of the first one that a CheckpointException contains."""
    if isinstance(error, dcp.api.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error!s:.300}"


def print0(text: str) -> None:
    if RANK == 0:
        # Ctrl-C also ends the `tee` that reads the output. The run has to go on all the same.
        with contextlib.suppress(BrokenPipeError):
            print(text, flush=True)


def validate(args: Args) -> Plan:
    """Fill in defaults and check the flags. A UserError names flag, value and what is valid."""
    for name, (embedded, with_model) in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, with_model if args.model else embedded)
    if args.critic_epochs is None:
        args.critic_epochs = args.ppo_epochs
    if args.kl_estimator is None:
        args.kl_estimator = {"reward": "k1", "loss": "k3"}[args.kl_in]

    for name, flag_type in typing.get_type_hints(type(args), include_extras=True).items():
        value = getattr(args, name)
        parts = (flag_type, *typing.get_args(flag_type))  # of Annotated[int, Range(1)] | None
        ranges = [x for part in parts for x in typing.get_args(part) if isinstance(x, Range)]
        for valid in ranges:
            if value is not None and not valid.low <= value <= valid.high:
                raise UserError(
                    f"--{name.replace('_', '-')} {value}: must be at least {valid.low:g} "
                    f"and at most {valid.high:.10g}"
                )

    if args.kl_in == "loss" and args.kl_estimator == "k1":
        raise UserError("--kl-estimator k1: in the loss its gradient is 0 on average, use k2, k3")
    if args.rollout_is_cap and not args.recompute_old_logprobs:
        raise UserError("--rollout-is-cap: needs --recompute-old-logprobs")
    if args.ref_sync_every and not args.kl_coef:
        raise UserError("--ref-sync-every: needs --kl-coef above 0")
    if args.critic_warmup_iterations and args.critic_epochs == 0:
        raise UserError("--critic-warmup-iterations: needs --critic-epochs above 0")
    if args.resume == "auto" and not args.run_name:
        raise UserError("--resume auto: needs --run-name")
    return plan_steps(args, WORLD_SIZE)


@dataclass
class Plan:
    """Samples and optimizer steps of an iteration and of the run, on any number of ranks."""

    samples_per_iteration: int
    minibatches: int
    update_steps: int  # of the actor in an iteration
    critic_update_steps: int
    actor_steps_total: int
    critic_steps_total: int
    episodes_total: int


def plan_steps(args: Args, world_size: int = 1) -> Plan:
    """Raises UserError if the sizes do not divide. The number of ranks only affects a warning."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if samples % args.train_batch_size:
        raise UserError(
            f"--train-batch-size {args.train_batch_size}: "
            f"must divide the {samples} samples of an iteration"
        )
    if args.train_batch_size < world_size:
        print0(f"--train-batch-size {args.train_batch_size}: some of {world_size} ranks are idle")
    minibatches = samples // args.train_batch_size
    actor_steps = minibatches * args.ppo_epochs
    critic_steps = minibatches * args.critic_epochs
    actor_iterations = max(0, args.num_iterations - args.critic_warmup_iterations)
    return Plan(
        samples_per_iteration=samples,
        minibatches=minibatches,
        update_steps=actor_steps,
        critic_update_steps=critic_steps,
        actor_steps_total=actor_steps * actor_iterations,
        critic_steps_total=critic_steps * args.num_iterations,
        episodes_total=samples * args.num_iterations,
    )


def step_table(args: Args, plan: Plan) -> str:
    """What an iteration and the run consist of, and the defaults that depend on other flags."""
    batches = f"epochs x {plan.minibatches} minibatches of {args.train_batch_size} samples"
    prompts, n = args.rollout_batch_size, args.n_samples_per_prompt
    kl = f"KL ({args.kl_estimator}) x {args.kl_coef:g} in the {args.kl_in}"
    if args.ref_sync_every:
        kl += f"; moves by {args.ref_sync_alpha:g} every {args.ref_sync_every} iterations"
    defaults = ", ".join(f"{name} {getattr(args, name):g}" for name in [*DEFAULTS, "critic_lr"])
    compiles = "on: the start takes minutes longer" if args.compile == "on" else "off"
    return f"""\
  rollout    {prompts} prompts x {n} = {prompts * n} samples
  critic     then {args.critic_epochs} {batches} = {plan.critic_update_steps} optimizer steps
  actor      then {args.ppo_epochs} {batches} = {plan.update_steps} optimizer steps
  reference  {kl if args.kl_coef else "none"}
  run        {args.num_iterations} iterations, the first {args.critic_warmup_iterations} for the \
critic alone: {plan.episodes_total:,} episodes, {plan.actor_steps_total:,} actor and \
{plan.critic_steps_total:,} critic steps
  compile    {compiles}
  defaults   {defaults}"""


# === 11. Ranks, what they share, models ===


@dataclass(frozen=True)
class World:
    """All ranks, and which of them this process is. Collectives are no-ops in a single process."""

    device: torch.device
    rank: int = 0
    size: int = 1
    mesh: dist.DeviceMesh | None = None  # of all ranks; None: models are not sharded

    def all_reduce(self, x: Tensor, op=dist.ReduceOp.SUM) -> Tensor:
        """Sum over the ranks, or `op`, in place."""
        if self.size > 1:
            dist.all_reduce(x, op)
        return x

    def gather(self, value) -> list:
        """`value` of every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.gather(None)


def connect(args: Args) -> World:
    """Choose device and dtype, and join the other processes. Fills in the flags that are auto."""
    use_cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = torch.device("cpu")
    if use_cuda:
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        count = torch.cuda.device_count()
        if "RANK" in os.environ and "LOCAL_RANK" not in os.environ:
            raise UserError("RANK without LOCAL_RANK: which GPU to use? Start with torchrun")
        if local_rank >= count:
            raise UserError(
                f"--device {args.device}: there are {count} GPUs, none for local rank {local_rank}"
            )
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            # Microbatches have many shapes, which would fragment the memory without this setting.
            # It is made by a private function, since the environment variable must be set before
            # torch is imported.
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it would build a plan for every new shape
    else:
        # Let malloc keep freed memory. Otherwise it returns large blocks to the system, and the
        # page faults of getting them again take a tenth of the time of updates.
        with contextlib.suppress(AttributeError):  # of a C library without mallopt
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
            mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        # The default model is too small to gain anything from a second thread. As soon as another
        # process is running, several threads wait for each other most of the time.
        if not args.model and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
    if args.compile == "auto":
        args.compile = "on" if use_cuda else "off"
    if args.dtype == "auto":
        args.dtype = "bfloat16" if use_cuda else "float32"

    store = dist.HashStore()
    if "RANK" in os.environ:
        store = next(dist.rendezvous("env://"))[0]
        # After a restart torchrun's store still has the addresses of dead processes.
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    shards = "RANK" in os.environ or args.dtype == "bfloat16"  # FSDP2 does mixed precision, too
    if shards and not dist.is_initialized():
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if use_cuda else "gloo",
            store=store,
            rank=RANK,
            world_size=WORLD_SIZE,
            timeout=datetime.timedelta(hours=2),  # rollouts may take long
        )
    mesh = None
    if dist.is_initialized():
        mesh = dist.DeviceMesh(device.type, list(range(WORLD_SIZE)))
    return World(device, RANK, WORLD_SIZE, mesh)


def upload(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to `device` through pinned memory, so that the host need not wait for it.

    If `device` is the CPU, the tensor itself is returned: the result must not be changed in place.
    """
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


@dataclass
class RewardModel:
    """A transformer with a scalar head that scores conversations. It never changes."""

    model: Transformer
    tokenizer: HFTokenizer  # the model's, which need not be the actor's

    def score(self, conversations: list[Conversation], args: Args, world: World) -> Tensor:
        """[N] what the model says at the last token of each conversation.

        Each conversation is scored once, by one rank, and all ranks get all the scores. What the
        model reads is text: it sees neither the special tokens that the actor sampled nor whether a
        response was cut off; --missing-eos-penalty is for the latter.
        """
        ids = [self.tokenizer.encode_conversation(*turns) for turns in conversations]
        for row in ids:  # classifiers of transformers read the last token that is not padding
            while row[-1] == self.model.config.raw.get("pad_token_id") and len(row) > 1:
                row.pop()
        longest, positions = max(map(len, ids)), self.model.config.max_position_embeddings
        if longest > positions:
            raise UserError(
                f"{self.tokenizer.folder}: {positions} positions, a conversation has {longest}"
            )
        tokens, lengths = padded(ids).to(world.device), torch.tensor([len(row) for row in ids])
        nothing = torch.zeros(tokens.shape)
        experience = Experience(tokens, nothing.to(world.device), lengths, nothing.bool(), {})
        scores = forward_all(lambda mb: self.model(mb.tokens), experience, args, world)  # [N, T]
        return scores[torch.arange(len(ids)), lengths - 1]


def microbatches(
    rows: Tensor, lengths: Tensor, token_budget: int, world: World
) -> list[Tensor]:
    """This rank's microbatches of the samples `rows` [n], as indices on the CPU.

    All ranks have equally many. The longest samples come first, so that attention pads little. A
    microbatch has at most `token_budget` tokens, and with padding at most twice as many; a longer
    sample is a microbatch of its own.
    """
    lengths = lengths.tolist()
    order = sorted(rows.tolist(), key=lengths.__getitem__, reverse=True)
    parts = []
    tokens = area = longest = 0  # of the newest microbatch, on the rank that has most
    for start in range(0, len(order), world.size):
        group = order[start : start + world.size]  # a sample for each rank
        length = lengths[group[0]]  # of the longest of them
        is_full = tokens + length > token_budget or area + longest > 2 * token_budget
        if not parts or is_full:
            parts.append([])
            tokens = area = 0
            longest = length
        tokens += length
        area += longest
        if start // world.size % 2:
            group.reverse()  # 0 1 2 2 1 0 0 1 ... keeps the ranks in balance
        parts[-1] += group[world.rank : world.rank + 1]
    return [torch.tensor(part, dtype=torch.int64) for part in parts]


# The fields of a Rollout that have an entry for each sample, besides `extras`.
OF_SAMPLES = (
    "tokens", "mask", "logprobs", "rewards", "lengths", "stop", "texts", "prompts", "success",
    "conversations")  # fmt: skip


def select(batch: Rollout, indices: list[int], plan: Plan) -> Rollout:
    """The samples with these indices, which must be as many as planned.

    For forks. tests/forks/best_and_worst.patch shows how to sample more than are planned.
    """
    planned = plan.samples_per_iteration
    if len(indices) != planned:
        raise UserError(f"{len(indices)} samples selected: must be {planned}, see plan_steps")
    pick = lambda x: x[indices] if isinstance(x, Tensor) else [x[i] for i in indices]
    fields = {name: pick(getattr(batch, name)) for name in OF_SAMPLES}
    extras = {name: pick(x) for name, x in batch.extras.items()}
    return Rollout(stats=batch.stats, extras=extras, **fields)


def concatenate(parts: list[Rollout]) -> Rollout:
    """The samples of all parts, padded to the longest; of statistics, the means."""

    def join(values: list) -> Tensor | list:
        samples = [sample for x in values for sample in x]
        if not isinstance(values[0], Tensor):
            return samples
        return torch.stack(samples) if values[0].ndim == 1 else padded(samples)

    fields = {name: join([getattr(part, name) for part in parts]) for name in OF_SAMPLES}
    first = parts[0]
    stats = {k: sum(part.stats[k] for part in parts) / len(parts) for k in first.stats}
    extras = {k: join([part.extras[k] for part in parts]) for k in first.extras}
    return Rollout(stats=stats, extras=extras, **fields)


def on_meta(config: ModelConfig, head: str = "lm", dtype=torch.float32) -> Transformer:
    """A model without storage. It is sharded first, and then each rank materializes its shard."""
    with torch.device("meta"):
        model = Transformer(config, head).to(dtype)
    if head == "scalar":
        model.score.float()  # whatever the dtype of the others
    return model


def shard(model: Transformer, args: Args, world: World) -> Transformer:
    """Activation checkpointing, torch.compile, FSDP2, in this order."""
    model.checkpointing = args.activation_checkpointing
    if args.compile == "on":
        torch._dynamo.config.recompile_limit = 64  # blocks of all models share one piece of code
        for block in model.model.layers:  # in place, so that names stay
            block.compile(dynamic=True)
    if world.mesh is None:
        return model
    dtype = getattr(torch, args.dtype)
    value_head = [] if model.head == "lm" else [model.score]  # stays in float32
    embedding = [] if model.tied else [model.model.embed_tokens]  # large
    for unit in (*model.model.layers, *value_head, *embedding, model):
        precision = torch.float32 if unit in value_head else dtype
        policy = MixedPrecisionPolicy(precision, torch.float32, cast_forward_inputs=False)
        # The root, too, must reshard: its weights must be DTensors between forward and backward.
        fully_shard(unit, mesh=world.mesh, reshard_after_forward=True, mp_policy=policy)
        # Gradients are summed over the ranks, not averaged, since every loss is divided by the
        # tokens of all ranks already. With gloo the sum needs the second call.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return model


def materialize(model: Transformer, device: torch.device | str) -> Transformer:
    """Give a model of `on_meta` its storage. The weights are still undefined."""
    model.to_empty(device=device)
    model.tie_weights()
    model.rope = rope_frequencies(model.config).to(device)  # in float32, whatever the weights are
    return model


def full_tensor(x: Tensor) -> Tensor:
    """The whole of a tensor. If it is sharded this is a collective call."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def local_tensor(x: Tensor) -> Tensor:
    """This rank's part of a tensor, which may be sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


@torch.no_grad()
def copy_weights(source: Transformer, target: Transformer, skip=()) -> None:
    """Copy all weights but the names in `skip`. Either model may be sharded over all ranks."""
    sources = dict(source.named_parameters())
    targets = dict(target.named_parameters())
    only_one = (sources.keys() ^ targets.keys()) - set(skip)
    if only_one:
        raise ValueError(f"cannot copy weights that only one model has: {sorted(only_one)}")
    for name, p in targets.items():
        if name in skip:
            continue
        whole = full_tensor(sources[name].to(p.dtype))
        if isinstance(p, DTensor):
            whole = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
        p.copy_(whole)


def embedded_model(args: Args, env: gym.Env) -> tuple[HFTokenizer, Transformer]:
    """The default actor, a tiny random Llama, and its tokenizer.

    Tokens are the characters of the prompts and demonstrations of seeds 0 to 255.
    """
    resets = [reset(env, seed, args) for seed in range(256)]
    texts = [f"{prompt}{info.get('demonstration', '')}" for prompt, info in resets]
    tokenizer = HFTokenizer.from_texts(texts)
    config = ModelConfig.from_hf({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": tokenizer.vocab_size,
        "max_position_embeddings": args.max_prompt_tokens + args.max_new_tokens,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    })
    torch.manual_seed(args.seed)
    actor = Transformer(config)
    for name, p in actor.named_parameters():
        # As in GPT-2, the last layers of residual branches start smaller.
        ends_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
        if p.ndim == 2:
            nn.init.normal_(p, std=0.01 if ends_branch else 0.02)
    return tokenizer, actor


def build_model(config: ModelConfig, head: str, args: Args, world: World) -> Transformer:
    """A model to train or to score with, sharded over the ranks, with undefined weights."""
    return materialize(shard(on_meta(config, head), args, world), world.device)


def build_models(args: Args, env: gym.Env, world: World):
    """Tokenizer and (actor, critic, reference, sampler); the reference is None if kl_coef is 0.

    Actor, critic and reference are sharded over the ranks. The sampler is whole on every rank, in
    the dtype of forward passes.
    """
    if args.model:
        config, tokenizer = load_config_and_tokenizer(args.model)
    else:
        tokenizer, embedded = embedded_model(args, env)
        config = embedded.config
    critic_config = config
    if args.critic_model:
        critic_config, critic_tokenizer = load_config_and_tokenizer(args.critic_model)
        if critic_tokenizer.hf.get_vocab() != tokenizer.hf.get_vocab():
            raise UserError(
                f"--critic-model {args.critic_model}: a critic reads the actor's tokens, "
                "but its tokenizer has another vocabulary"
            )
    if args.critic_lr is None:
        # A step of Adam moves each weight of the head by about the learning rate, and so the values
        # by about the rate times the width. The head starts at zero and has to reach the level of
        # the returns. This takes equally long at all widths if the rate is inversely proportional
        # to the width, as in maximal update parametrization (https://arxiv.org/abs/2203.03466).
        args.critic_lr = 0.064 / critic_config.hidden_size
    longest = args.max_prompt_tokens + args.max_new_tokens
    for folder, model_config in ((args.model, config), (args.critic_model, critic_config)):
        if longest > model_config.max_position_embeddings:
            raise UserError(
                f"{folder}: {model_config.max_position_embeddings} positions, "
                f"--max-prompt-tokens + --max-new-tokens need {longest}"
            )
    prompt, _ = reset(env, 0, args)
    Episode(env, "seed 0").begin(prompt, tokenizer, args)  # raises if the prompt is too long

    actor = build_model(config, "lm", args, world)
    if args.model:
        load_weights(actor, args.model)
    else:
        copy_weights(embedded, actor)
    if not checkpoints_to_resume(args):
        warm_start(actor, tokenizer, env, args, world)
    critic = build_model(critic_config, "scalar", args, world)
    nn.init.zeros_(critic.score.weight)  # all values are 0 at first, unless a head is loaded
    if args.critic_model:
        load_weights(critic, args.critic_model, needs_head=False)
    else:
        copy_weights(actor, critic, skip=("lm_head.weight", "score.weight"))
    reference = None
    if args.kl_coef > 0:
        reference = build_model(config, "lm", args, world)
        copy_weights(actor, reference)
    sampler = materialize(on_meta(config, "lm", getattr(torch, args.dtype)), world.device)
    return tokenizer, (actor, critic, reference, sampler)


def build_reward_model(args: Args, world: World) -> RewardModel | None:
    """The reward model, sharded over the ranks; None if there is none.

    Checkpoints do not contain it, since it never changes: a resumed run reads its folder again.
    """
    if args.reward_model is None:
        return None
    config, tokenizer = load_config_and_tokenizer(args.reward_model)
    tokenizer.encode_conversation(("user", "-"), ("assistant", "-"))  # raises if the template does
    model = build_model(config, "scalar", args, world)
    load_weights(model, args.reward_model)
    model.requires_grad_(False)  # or forward_all would keep activations for a backward pass
    return RewardModel(model, tokenizer)


def make_optimizer(model: Transformer, args: Args) -> torch.optim.AdamW:
    """AdamW for the trainable parameters. It allocates its moments at the first step.

    FORK: another model that trains, such as a second critic. Build it in build_models, and in train
    give it an optimizer and an entry in `checkpointed`, so that it is saved and resumed. Nothing
    warns of the following mistakes:
    - Critics with the same start and the same minibatches remain equal. Give each its own order, by
      minibatches(..., dataclasses.replace(args, seed=...), world), and more than one minibatch in
      an epoch, since the order of the samples within one makes no difference.
    - The value loss clips around old values. If `values` is the mean of several critics, each of
      them, including the first, needs its own old values: keep them in experience.extras.
    - Each model needs a counter of its steps in TrainState, for its learning rate, and a place in
      end_iteration, which ends a run whose gradients are not finite.
    - In make_experience `values_after`, for --bootstrap-truncated, is that of one critic.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    betas = (args.adam_beta1, 0.999)
    return torch.optim.AdamW(trained, betas=betas, weight_decay=0.0, fused=True)


def first_prompt(args: Args) -> int:
    """The environment's seed of the first training prompt; those of the others follow it.

    It depends on --seed, so that runs with different seeds train on different prompts, and it is
    far from the seeds of the evaluation, which begin at 0. Environments that read a file take the
    seed modulo its rows, and consecutive seeds see every row once an epoch wherever they begin.
    """
    return random.Random(args.seed).randrange(2**20, 2**31)


SFT_BATCH_SIZE = 256  # demonstrations per step


def warm_start(
    actor: Transformer, tokenizer: HFTokenizer, env: gym.Env, args: Args, world: World
) -> None:
    """Supervised steps on the environment's demonstrations, for the prompts that train first."""
    first = first_prompt(args)
    _, info = reset(env, first, args)
    if args.sft_steps == 0 or "demonstration" not in info:
        print0("warm start: none (--sft-steps is 0, or the environment has no demonstrations)")
        return
    optimizer = make_optimizer(actor, args)
    for i in progress(range(args.sft_steps), "warm start, steps"):
        start = first + i * SFT_BATCH_SIZE
        episodes = []
        for seed in range(start, start + SFT_BATCH_SIZE):
            prompt, info = reset(env, seed, args)
            with attempt(f"use the demonstration of seed {seed}, prompt {prompt!r:.80}"):
                answer = [*tokenizer.encode(info["demonstration"]), tokenizer.eos_id]
            answer = answer[: args.max_new_tokens]
            episode = Episode(env, f"seed {seed}")
            episode.begin(prompt, tokenizer, args)
            episode.add_response(answer, [0.0] * len(answer))
            episodes.append(episode)
        batch = Experience.from_rollout(to_rollout(episodes, tokenizer, {}), world.device)
        everything = torch.arange(len(batch))
        stats = StepStats(batch.n_tokens, world)
        for rows in microbatches(everything, batch.lengths, args.micro_batch_tokens, world):
            logprobs, _ = sampled_logprobs(actor, batch[rows], 1.0)
            loss = -logprobs.sum() / batch.n_tokens
            loss.backward()
            stats.add_loss_terms(loss=loss)
        grad_norm = nn.utils.clip_grad_norm_(actor.parameters(), args.max_grad_norm)
        step = stats.read(grad_norm)
        lr = linear_schedule(args.sft_lr, 0.0, i, args.sft_steps)
        optimizer_step(optimizer, lr, step["grad_norm"])
    print0(f"warm start: {args.sft_steps} steps, loss {step['loss']:.3f} per token")


# === 12. Run folder, saving, resuming ===

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of DCP in a single process


@dataclass
class TrainState:
    """What one iteration passes on to the next, besides weights and moments.

    It is saved as JSON: fields must be Python's numbers and strings, lists of these, or dicts whose
    keys are strings. JSON would make lists of tuples, and strings of keys that are numbers.
    FORK: a field of your own, with a default, is saved and resumed with the others.
    """

    iteration: int = 0  # iterations done
    next_seed: int = 0  # the environment's seed of the next training prompt
    actor_steps: int = 0  # skipped ones included
    critic_steps: int = 0
    skipped_in_a_row: list = field(default_factory=lambda: [0, 0])  # of actor and critic
    last_cause: str | None = None  # of the diagnosis of the ratio
    critic_faults_in_a_row: int = 0  # iterations in which the diagnosis of the critic had a cause
    value_distance: float = math.inf  # see diagnose_values
    return_scale: float = 0.0  # see diagnose_values
    eval_before: dict | None = None

    def end_iteration(self, actor_stats: list[dict], critic_stats: list[dict]) -> None:
        self.iteration += 1
        for i, steps in enumerate((actor_stats, critic_stats)):
            for step in steps:
                self.skipped_in_a_row[i] = self.skipped_in_a_row[i] + 1 if step["skipped"] else 0
                if self.skipped_in_a_row[i] >= 20:
                    raise UserError("20 non-finite gradients in a row: lower the learning rates")
        with attempt("save TrainState"):  # now, and not at the first checkpoint
            for name, value in vars(self).items():
                if repr(json.loads(json.dumps(value))) != repr(value):
                    raise ValueError(f"JSON changes {name}, see TrainState")

    LASTING = 5  # iterations after which a fault of the critic is named; not a field

    def remember(self, diagnosis: Diagnosis) -> Diagnosis:
        """Keep what the critic's next diagnosis compares with.

        Returns the diagnosis, but without its cause if any of the last LASTING iterations had none.
        The causes need not be the same: samples are few, and a critic that does not learn may look
        far from the returns in one iteration and constant in the next.
        """
        self.value_distance = diagnosis.signals["distance"]
        self.return_scale = diagnosis.signals["scale"]
        self.critic_faults_in_a_row = self.critic_faults_in_a_row + 1 if diagnosis.cause else 0
        has_lasted = self.critic_faults_in_a_row >= self.LASTING
        return diagnosis if has_lasted else dataclasses.replace(diagnosis, cause=None)

    def is_due_for_evaluation(self, args: Args) -> bool:
        """At the beginning of every `eval_every`-th iteration; before the first there was one."""
        return args.eval_every > 0 and self.iteration > 0 and self.iteration % args.eval_every == 0

    def is_due_for_saving(self, args: Args) -> bool:
        """After every `save_every` iterations, and after the last."""
        is_last = self.iteration == args.num_iterations
        return args.save_every > 0 and (is_last or self.iteration % args.save_every == 0)


class RunFolder:
    """The folder <log_dir>/<run_name>/, with TensorBoard's files, *.jsonl, *.json, and subfolders.

    These are checkpoints/ and, at the end, model/ and critic/. In the `with` block of a RunFolder,
    SIGTERM and Ctrl-C are caught and end the run after the current iteration.
    """

    def __init__(self, args: Args, state: TrainState, world: World):
        self.args = args
        self.state = state
        self.world = world
        self.started = time.monotonic()
        self.summary = {}
        env = args.env_id.split(":")[-1]
        now = time.strftime("%Y%m%d-%H%M%S")
        name = world.gather(f"{env}__{Path(__file__).stem}__{args.seed}__{now}")[0]
        self.path = Path(args.log_dir, args.run_name or name)
        resumed = args.resume == "auto"
        if args.resume and Path(args.resume, "checkpoints").is_dir():
            self.path = Path(args.resume)
            resumed = True
            if args.run_name not in (None, self.path.resolve().name):
                raise UserError("--run-name: --resume with the folder of a run continues that run; "
                                "to begin another one, name one of its checkpoints")  # fmt: skip
        if RANK > 0:
            return
        if self.path.exists() and not resumed:
            raise UserError(f"--run-name: {self.path} exists: choose another, or --resume auto")
        with attempt(f"write {self.path}, in --log-dir {args.log_dir}"):
            self.path.mkdir(parents=True, exist_ok=True)
            config = self.path / "config.json"
            if config.exists():  # it stays; that of the resumed run is beside it
                config = self.path / f"config_{state.iteration:06d}.json"
            write_json(config, {"args": vars(args), "argv": sys.argv})
            self.files = {}
            for name in ("metrics", "completions"):
                path = self.path / f"{name}.jsonl"
                self.files[name] = open(path, "a")
                self.files[name].truncate(size_of_lines_before(state.iteration, path))
        self.writer = SummaryWriter(self.path, purge_step=state.iteration)

    def __enter__(self) -> RunFolder:
        self.signal = 0  # the number of the one that was received last

        def handle(signum, frame):
            self.signal = int(signum)
            with contextlib.suppress(BrokenPipeError):  # see print0
                os.write(2, b"\nstopping after this iteration; Ctrl-\\ stops at once\n")

        numbers = (signal.SIGTERM, signal.SIGINT)
        self.handlers = {number: signal.signal(number, handle) for number in numbers}
        return self

    def received_signal(self) -> int:
        """The number of a signal that any rank has received, or 0."""
        return max(self.world.gather(self.signal))

    def append(self, name: str, row: dict) -> None:
        """Write a line of JSON, without NaN, Infinity and None."""
        row = json.loads(json.dumps(row), parse_constant=lambda constant: None)
        line = json.dumps({key: value for key, value in row.items() if value is not None})
        print(line, file=self.files[name], flush=True)

    def log(
        self, batch, experience, actor_stats, critic_stats, diagnosis, critic_diagnosis, clock
    ) -> None:
        """Report an iteration: *.jsonl, TensorBoard, terminal."""
        args = self.args
        state = self.state
        row = metrics(state, args, batch, experience, actor_stats, critic_stats, diagnosis,
                      critic_diagnosis, clock)  # fmt: skip
        if RANK > 0:
            return
        i = row["iteration"]
        N = args.num_iterations
        cause = diagnosis.cause
        self.append("metrics", row)
        for name, value in row.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, i)
        for k in range(min(4, len(experience))):
            self.append("completions", {
                "iteration": i,
                "prompt": batch.prompts[k],
                "response": batch.texts[k],
                "stop": batch.stop[k],
                "reward": float(experience.sample_rewards[k]),
                "n_tokens": int(experience.cpu_mask[k].sum()),
                "kl": float(experience.kls[k]),
            })
        if i % max(1, N // 5) == 0:
            print0(
                f"  {batch.prompts[0]!r:.80} -> {batch.texts[0]!r:.200} "
                f"(reward {experience.sample_rewards[0]:g})"
            )
        if cause and cause != state.last_cause:
            print0(f"  ratio: {cause}: {diagnosis.advice} ({diagnosis.evidence})")
        state.last_cause = cause
        if critic_diagnosis.cause and state.critic_faults_in_a_row == state.LASTING:
            print0(
                f"  critic: {critic_diagnosis.cause}: {critic_diagnosis.advice} "
                f"({critic_diagnosis.evidence})"
            )
        kl = f"KL {row['objective/kl']:.4f}, " if args.kl_coef else ""
        print0(
            f"{i + 1}/{N}: reward {row['objective/reward']:.3f}, accuracy "
            f"{row['objective/accuracy']:.1%}, {row['objective/response_tokens']:.1f} tokens, "
            f"max|ratio-1| {row['ratio/last_dev']:.2g}, {kl}{row['time/iteration']:.2f} s"
        )

    def print_results(self, when: str, results: dict) -> None:
        sampled, greedy = results["accuracy"], results["greedy_accuracy"]
        accuracy = f"{sampled:.1%} sampled, {greedy:.1%} greedy"
        print0(f"accuracy {when} PPO: {accuracy}; reward {results['reward']:.3f}")

    def __exit__(self, kind, error, traceback) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.summary |= {
            "status": {None: "completed", SystemExit: "interrupted"}.get(kind, "failed"),
            "iterations": self.state.iteration,
            "update_steps": self.state.actor_steps,
            "seconds": time.monotonic() - self.started,
        }
        if RANK > 0:
            return
        # After a failure, for example because the disk is full, its error is the one to see.
        with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
            write_json(self.path / "summary.json", self.summary)
            for file in (self.writer, *self.files.values()):
                file.close()


def size_of_lines_before(iteration: int, path: Path) -> int:
    """The size in bytes of the lines of a *.jsonl that belong to iterations before this one.

    Lines after them were logged after the checkpoint that is resumed, and will be logged again.
    """
    size = 0
    for line in path.read_bytes().splitlines(keepends=True):
        is_complete = line.endswith(b"\n")  # False if the disk was full when it was written
        if not is_complete or json.loads(line)["iteration"] >= iteration:
            break
        size += len(line)
    return size


def checkpoint_tensors(model, optimizer) -> dict[str, dict[str, Tensor]]:
    """{"weights": {name: tensor}} and, after a step, AdamW's "exp_avg", "exp_avg_sq" and "step"."""
    tensors = {"weights": {name: p.detach() for name, p in model.named_parameters()}}
    for name, p in model.named_parameters() if optimizer else ():
        for kind, x in optimizer.state.get(p, {}).items():  # none if it has never had a gradient
            tensors.setdefault(kind, {})[name] = x
    return tensors


def save_checkpoint(
    run: RunFolder, checkpointed: dict, state: TrainState, args: Args, world: World
) -> None:
    """Write checkpoints/iter_<iterations>, which appears once complete.

    A run of any number of ranks can resume it.
    """
    path = run.path / "checkpoints" / f"iter_{state.iteration:06d}"
    partial = path.with_name("partial")
    try:
        if RANK == 0:
            shutil.rmtree(partial, ignore_errors=True)
        world.barrier()
        for name, (model, optimizer) in progress(checkpointed.items(), "saving, models"):
            for kind, tensors in checkpoint_tensors(model, optimizer).items():
                folder = str(partial / name / kind)
                writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True)
                dcp.save(tensors, storage_writer=writer)
        world.barrier()
        if RANK > 0:
            return
        found = partial.rglob("*.safetensors")
        files = {str(file.relative_to(partial)): file.stat().st_size for file in found}
        content = {"state": vars(state), "args": vars(args), "files": files}
        write_json(partial / "state.json", content)
        partial.rename(path)
    except (OSError, dcp.api.CheckpointException) as error:
        if RANK == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"{path} cannot be written, earlier ones are intact: {describe(error)}; "
            "make room and --resume the run"
        ) from error
    for old in sorted(path.parent.glob("iter_*"), reverse=True)[args.keep_checkpoints :]:
        shutil.rmtree(old, ignore_errors=True)  # if it is in use, the next save tries again
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


def resume(args: Args, checkpointed: dict) -> TrainState:
    """Load the newest checkpoint, if there is one. Raises UserError if it cannot be read."""
    found = checkpoints_to_resume(args)
    if not found:
        if args.resume:
            print0(f"--resume auto: {args.run_name} has no checkpoint yet and starts from scratch")
        return TrainState(next_seed=first_prompt(args))
    if "reference" in checkpointed and not (found[0] / "reference").exists():
        raise UserError(f"{found[0]} was saved without a reference: resume it with --kl-coef 0")
    try:
        saved = load_checkpoint(found[0], checkpointed, args)
    except Exception as error:
        advice = ""
        if len(found) > 1:
            advice = f"; the one before is {found[1]}: if this one is damaged, remove it"
        raise UserError(f"{found[0]} cannot be read: {error!s:.500}{advice}") from error
    if unknown := saved.keys() - vars(TrainState()).keys():
        raise UserError(
            f"{found[0]}: another version of the script saved it, whose TrainState has "
            f"{', '.join(sorted(unknown))}: resume it with that version"
        )
    state = TrainState(**saved)
    print0(f"resuming from {found[0]}, after {state.iteration} iterations")
    return state


def load_checkpoint(path: Path, checkpointed: dict, args: Args) -> dict:
    """Fill the models and optimizers in `checkpointed`, and print which flags differ.

    Returns the fields of the TrainState.
    """
    content = read_json(path / "state.json")
    for name, value in vars(args).items():
        before = content["args"].get(name)
        if value != before and name not in ("resume", "run_name", "log_dir"):
            print0(f"  --{name.replace('_', '-')} {value}, in the checkpoint {before}")
    for name, size in content["files"].items():  # DCP silently ignores a missing file
        if (path / name).stat().st_size != size:
            raise ValueError(f"{name} does not have the size with which it was saved")
    for name, (model, optimizer) in checkpointed.items():
        kinds = {folder.name for folder in (path / name).glob("*")} - {"weights"}
        for group in optimizer.param_groups if optimizer else ():
            for p in group["params"]:  # moments to read into, in the same order on all ranks
                moments = {kind: torch.zeros_like(p.detach()) for kind in sorted(kinds - {"step"})}
                if "step" in kinds:
                    moments["step"] = torch.zeros((), device=p.device)
                optimizer.state[p] = moments
        for kind, tensors in checkpoint_tensors(model, optimizer).items():
            never_updated = tensors.keys() if kind != "weights" else ()  # may lack moments
            read_tensors(tensors, path / name / kind, optional=never_updated)
    return content["state"]


def main() -> None:
    sys.path.append("")  # find modules of the user in the working directory, too
    try:
        train(tyro.cli(Args, console_outputs=RANK == 0))
    except UserError as error:
        if RANK > 0:
            time.sleep(5)  # let rank 0 report first, then torchrun ends the others
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if dist.is_initialized():  # all ranks have ended: NCCL warns if its communicators are left open
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
