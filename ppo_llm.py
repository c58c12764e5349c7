# `uv run ppo_llm.py` installs these packages in an environment of their own. On Linux it downloads
# 2.8 GB, since PyTorch's package brings CUDA along. Without a GPU, 0.3 GB are enough:
#     uv run --find-links https://download.pytorch.org/whl/cpu/torch/ ppo_llm.py
# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#     "torch==2.13.0",
#     "tokenizers>=0.22.1,<1",
#     "transformers>=5.4,<6",
#     "huggingface_hub>=1.5",
#     "tensorboard>=2.21",
#     "tyro>=1.0",
#     "tqdm>=4.66",
#     "gymnasium>=1.0",
#     "safetensors>=0.5",
# ]
# ///
r"""PPO for language models, in one file and in plain PyTorch.

    # A tiny model learns to sort digits, in about two minutes on a CPU.
    python ppo_llm.py

    # Word problems with Qwen2.5-Coder-0.5B-Instruct, on one GPU (peak memory 55 GB). In one run of
    # an earlier version 24% of the greedy answers to test problems were right at first, and 33%
    # after 70 iterations.
    python ppo_llm.py --model DIR --env-id GSM8K-v0 --env-kwargs '{"path": "train.jsonl"}' \
        --eval-env-kwargs '{"path": "test.jsonl"}' --max-prompt-tokens 256 --max-new-tokens 512 \
        --num-iterations 100 --ppo-epochs 1 --actor-lr 1e-6 --critic-lr 1e-5 --lr-end 1 \
        --kl-coef 0.001 --value-clip 0.5 --micro-batch-tokens 32768

    # The models are sharded over eight GPUs.
    torchrun --nproc-per-node 8 ppo_llm.py --model DIR ...

Part I is PPO (https://arxiv.org/abs/1707.06347). It is meant to be read from top to bottom:
1. arguments, 2. mathematics, 3. training loop, 4. experience, 5. rollout. Part II is what PPO
stands on: 6. transformer, 7. tokenizer and checkpoints of Hugging Face, 8. text environments,
9. statistics, evaluation and diagnosis, 10. errors, flags, ranks and models, 11. run folder, saving
and resuming.

Models. The actor is the policy that is trained. Its weights are float32, whatever --dtype is. The
old log-probs, those of pi_old in the ratio pi / pi_old, are the actor's before the updates of an
iteration, or with --no-recompute-old-logprobs those that the sampler recorded. The critic predicts
the sum of the rewards still to come, less their KL penalties. It starts as a copy of the actor with
a scalar head of zeros, or from --critic-model, and is trained on the returns of GAE with
--critic-lambda. The reference is the actor as it was when PPO began, after any warm start. The
optional reward model is a frozen classifier. The sampler, an unsharded copy of the actor on every
rank, generates text. It receives the actor's new weights at the end of each iteration.

Layout. A sample is an episode: a prompt, a response and, in environments of several turns, further
messages and responses. It is one row of a tensor [N, T] or [B, T]. Rows start at index 0 and are
padded on the right. What belongs to a token is stored at the index of that token:

    mask[b, t]      is True if token t is trained on: it was sampled, and its episode has a reward
    logprobs[b, t]  = log pi(token t | tokens before t), for each policy pi
    values[b, t]    is the critic's value of the state in which token t was sampled
    rewards[b, t]   is the reward of token t. The environment's reward of a turn is at the last
                    token of the response. Its dense rewards are at tokens within the response.

Dimensions: N counts the samples of a rollout, B the rows of a microbatch or of the decoder, T the
tokens of the longest row. S is the largest T that is allowed. V is the size of the vocabulary, H
the number of query heads, Hkv that of key heads, G = H / Hkv, and D the size of a head. The models
get a microbatch without its padding: n counts its tokens, and m its sampled tokens. A minibatch is
the data of an optimizer step. A microbatch (`mb`) is the data of a forward and backward pass.

Ranks are the processes that torchrun starts. RANK is the index of this process, from 0, and
WORLD_SIZE the number of processes (section 10). All ranks hold the same experience. Each plays its
share of the episodes and trains on its share of every minibatch. The loss of a rank is the sum over
its share divided by the number of sampled tokens of the whole minibatch. Gradients are summed over
the ranks, so up to rounding they equal those of a single process.

Not here. Of PPO: the adaptive KL coefficient of its section 4, and a network that actor and critic
share (forks/joint_loss.patch). Of RLHF: the training of a reward model (docs/reward_models.md),
groups of samples in place of a critic, as in GRPO (forks/group_normalised.patch), LoRA
(forks/lora.patch), rollouts that overlap with the updates (forks/rollout_ranks.patch), sampling
with top-p or top-k, and images. Of models: other families than those of section 6
(forks/any_model.patch).

`# FORK:` marks the places to edit if you want to change the algorithm.
"""

from __future__ import annotations

import asyncio
import atexit
import bisect
import contextlib
import copy
import dataclasses
import datetime
import fcntl
import functools
import hashlib
import inspect
import json
import math
import os
import pkgutil
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Literal

# This variable is set before torch is imported, which reads it. GPU memory then fragments less.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import gymnasium as gym
import safetensors.torch
import tokenizers
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import tyro
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import AutoConfig, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import chat_template_utils

# ########################################## Part I: PPO ##########################################

# === 1. Arguments ===


DEFAULTS_BY_MODEL = {  # defaults that depend on --model: (without it, with it)
    "max_prompt_tokens": (16, 512),
    "max_new_tokens": (8, 256),
    "sft_steps": (150, 0),
    "actor_lr": (5e-4, 1e-5),
}


@dataclass
class Args:
    """PPO for language models. `--flag None` sets a flag to None."""

    # --- Run

    # seeds the weights of the built-in model, the training prompts, the sampling noise and the
    # order of minibatches
    seed: int = 1
    # name of the run's folder; default: <environment>__<script>__<seed>__<time>-<random>
    run_name: str | None = None
    log_dir: str = "runs"  # folder in which the run's folder is made
    track: bool = False  # also log to Weights & Biases
    wandb_project: str = "ppo_llm"  # project on Weights & Biases, for --track
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one, else the CPU
    # precision of the forward and backward passes and of the sampler; auto: bfloat16 on a GPU from
    # the Ampere generation on, float32 on older GPUs and on a CPU
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # use torch.compile, and CUDA graphs for decoding; auto: on with a GPU, off on a CPU
    compile: Literal["auto", "on", "off"] = "auto"
    # recompute activations in the backward pass, which saves memory and costs time
    activation_checkpointing: bool = False

    # --- Models and data

    # the actor: a folder, or ORG/NAME[@REVISION] on the Hugging Face Hub, with a Llama, Qwen2,
    # Qwen3 or Mistral model; default: a tiny Llama with random weights
    model: str | None = None
    # folder or Hub name of the model that the critic starts from; default: a copy of the actor with
    # a head of zeros
    critic_model: str | None = None
    # folder or Hub name of a sequence classifier with one label, whose score is added to the
    # reward; default: no reward model
    reward_model: str | None = None
    env_id: str = "SortDigits-v0"  # SortDigits-v0, GSM8K-v0, Prompts-v0 or my_module:MyEnv-v0
    env_kwargs: str = "{}"  # arguments of the environment, as JSON
    # arguments of the environment in evaluations, as JSON, such as the path of held-out data; an
    # argument that is not given here has its value from --env-kwargs
    eval_env_kwargs: str = "{}"
    chat_template_kwargs: str = "{}"  # arguments of the actor's chat template, as JSON

    # --- Rollout

    num_iterations: int = 200  # number of iterations, each a rollout and the updates on it
    rollout_batch_size: int = 256  # number of prompts per rollout, on all ranks together
    n_samples_per_prompt: int = 1  # number of episodes per prompt
    rollout_slots: int = 256  # maximum number of episodes that a rank decodes at once
    # maximum number of tokens per prompt; a longer prompt is an error; default: 512 if --model is
    # given, else 16
    max_prompt_tokens: int | None = None
    # maximum number of tokens after the prompt, over all turns, with the environment's messages;
    # default: 256 if --model is given, else 8
    max_new_tokens: int | None = None
    # temperature of the sampling in rollouts; PPO computes all log-probs at this temperature
    temperature: float = 1.0
    # compute the old log-probs with the actor, before the updates; with
    # --no-recompute-old-logprobs they are those that the sampler recorded, whose rounding is then
    # in the ratio and in the KL as well
    recompute_old_logprobs: bool = True
    # number of supervised steps on the environment's demonstrations before PPO (the warm start);
    # the learning rate falls from --actor-lr to 0; default: 0 if --model is given, else 150
    sft_steps: int | None = None

    # --- Optimisation

    # number of samples per optimizer step (the minibatch), on all ranks together; the number of
    # samples of a rollout must be a multiple of it
    train_batch_size: int = 64
    # maximum number of tokens per microbatch on a rank; a longer sample is a microbatch of its own;
    # on GPUs of 80 GB set 16384 or more
    micro_batch_tokens: int = 4096
    ppo_epochs: int = 2  # actor epochs per rollout
    # critic epochs per rollout, by default --ppo-epochs; 0: there is no critic, values are 0, and an
    # advantage, before it is whitened, is the sum of the rewards of its token and of later ones,
    # discounted by gamma * lambda
    critic_epochs: int | None = None
    # learning rate of the actor at the start, and of the warm start; default: 1e-5 if --model is
    # given, else 5e-4
    actor_lr: float | None = None
    # learning rate of the critic at the start; default: 0.064 / hidden_size of the critic, which is
    # 1e-3 for the built-in model and 7e-5 for Qwen2.5-0.5B
    critic_lr: float | None = None
    lr_end: float = 0.05  # both learning rates fall linearly to this fraction of their start
    # initial iterations that train only the critic; the actor's learning rate falls over the
    # iterations after them, the critic's over all iterations
    critic_warmup_iterations: int = 0
    max_grad_norm: float = 1.0  # maximum norm of a gradient; a larger gradient is scaled down

    # --- Algorithm

    gamma: float = 1.0  # discount factor per token
    gae_lambda: float = 1.0  # lambda of the advantages, in generalized advantage estimation
    critic_lambda: float = 1.0  # lambda of the returns that the critic learns
    clip_low: float = 0.2  # the ratio is clipped to at least 1 - clip_low
    clip_high: float = 0.2  # the ratio is clipped to at most 1 + clip_high
    # where a token's advantage A is negative, its loss is at most dual_clip * |A|; 3 is customary;
    # default: no bound
    dual_clip: float | None = None
    # new values are clipped to within this distance of the old values, in units of reward;
    # default: no clipping
    value_clip: float | None = None
    entropy_coef: float = 0.0  # coefficient of the entropy bonus in the actor's loss
    # stop the actor's updates of an iteration once a minibatch has a larger KL(old || new) per
    # token, without a step on that minibatch; default: no limit
    target_kl: float | None = None
    kl_coef: float = 0.01  # coefficient of KL(actor || reference); 0: there is no reference
    # with k2 or k3, this estimator of the KL is a term of the actor's loss, and kl_coef is relative
    # to whitened advantages; by default the KL is in the rewards: kl_coef * log(pi / pi_ref), the
    # estimator k1, is subtracted from them, and kl_coef is relative to rewards
    kl_loss: Literal["k2", "k3"] | None = None
    # amount subtracted from a sample's reward if it ended at --max-new-tokens, or because the
    # environment's reply did not fit; the sample is trained on all the same
    truncation_penalty: float = 0.0

    # --- Evaluation and saving

    # number of episodes per evaluation, each played twice, at temperature 1 and greedily; 0: no
    # evaluations
    eval_episodes: int = 512
    # number of iterations between evaluations; 0: evaluate only before and after training
    eval_every: int = 0
    # number of iterations between checkpoints; 0: no checkpoints, unless a signal stops the run
    save_every: int = 50
    # folder of the checkpoint to resume from; or "auto": the newest checkpoint of --run-name, or a
    # new run if it has none
    resume: str | None = None


# === 2. Mathematics of PPO ===
# Tensors are [N, T] or [B, T]. `mask` is True at the tokens that are trained on: those that were
# sampled in episodes with a reward. Comments call them the sampled tokens. Other entries are
# ignored.


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x over the mask, 0 if the mask is empty. Outside the mask x may be NaN."""
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """x with mean 0 and standard deviation 1 over the mask, and 0 elsewhere.

    If the standard deviation of x is below 1e-3, the result's is noticeably below 1, because
    1e-8 is added to the variance.
    """
    centered = torch.where(mask, x - masked_mean(x, mask), 0.0)
    variance = centered.square().sum() / (mask.sum() - 1).clamp(min=1)
    return centered * torch.rsqrt(variance + 1e-8)  # 1e-8: finite even if x is constant


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Estimates of KL(pi || pi_ref) from sampled tokens: http://joschu.net/blog/kl-approx.html.

    In the reward, k1 is part of the returns, so a token pays for its own KL and for that of all
    later tokens. In the loss, a token pays for its own KL alone. In the loss k1 is useless, because
    its expected gradient over samples of pi is 0. The expected gradient of k2 is that of
    KL(pi || pi_ref) in the state of the token. The expected gradient of k3 is that of the other
    direction, KL(pi_ref || pi). The samples are of pi_old, so the loop weights a KL in the loss by
    pi / pi_old.
    """
    logratio = logprobs - ref_logprobs
    if kind == "k1":
        return logratio
    if kind == "k2":
        return logratio.square() / 2
    return torch.expm1(-logratio) + logratio


def compute_gae(rewards, values, mask, gamma, gae_lambda) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (https://arxiv.org/abs/1506.02438, eq. 16).

        delta[t] = reward[t] + gamma * value[t + 1] - value[t]
        advantage[t] = delta[t] + gamma * lambda * advantage[t + 1]

    Tensors are [N, T]. The sampled tokens of a row are one trajectory, and t + 1 is the next
    sampled token: text of the environment in between is skipped, with its rewards. The value after
    the last sampled token is 0, even if the response was cut off. Returns the advantages and the
    returns, return[t] = advantage[t] + value[t].
    """
    values = torch.where(mask, values, 0.0)
    nextvalues = lastgaelam = values.new_zeros(len(values))  # [N]
    advantages = torch.zeros_like(values)
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * nextvalues - values[:, t]
        lastgaelam = torch.where(mask[:, t], delta + gamma * gae_lambda * lastgaelam, lastgaelam)
        nextvalues = torch.where(mask[:, t], values[:, t], nextvalues)
        advantages[:, t] = lastgaelam
    advantages = torch.where(mask, advantages, 0.0)
    return advantages, advantages + values


def check_denom(denom):
    """Raise TypeError for a tensor: it probably counts the tokens of one microbatch."""
    if isinstance(denom, Tensor):
        raise TypeError("denom must be the number of tokens of the whole minibatch, an int")


def policy_loss(
    logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip, denom
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate of PPO (https://arxiv.org/abs/1707.06347, eq. 7) as a loss.

    A token's loss is -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) with r = pi / pi_old.
    With recomputed old log-probs the ratios of an iteration's first minibatch are 1, as
    `make_experience` explains. "clipfrac" is the share of tokens whose ratio is outside the clip
    range. It also counts tokens that still have a gradient.

    Loss and statistics are sums over the mask divided by `denom`, the number of sampled tokens in
    the whole minibatch, so the results of its microbatches add up. dual_clip is that of
    https://arxiv.org/abs/1912.09729, eq. 5.
    """
    check_denom(denom)
    advantages = torch.where(mask, advantages, 0.0)
    logratio = torch.where(mask, logprobs - old_logprobs, 0.0).clamp(-20, 20)  # exp stays finite
    ratio = logratio.exp()  # 1 outside the mask
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * clipped
    losses = torch.max(pg_loss1, pg_loss2)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.min(losses, -advantages * dual_clip), losses)
    with torch.no_grad():
        stats = {
            "clipfrac": (ratio != clipped).sum() / denom,
            "approx_kl": (logratio.expm1() - logratio).sum() / denom,  # KL(old || new), by k3
            "ratio_dev": (ratio - 1).abs().sum() / denom,
            "token_share": mask.sum() / denom,  # The microbatches of a minibatch add up to 1.
        }
    return losses.sum() / denom, stats


def value_loss(values, old_values, returns, mask, clip, denom) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over the mask of 0.5 * (V - R)^2, and statistics, divided by `denom` as in `policy_loss`.

    With `clip` a token's loss is 0.5 * max((V - R)^2, (W - R)^2), where W is V clipped to
    [V_old - clip, V_old + clip]. "value_dev" is the mean |V - V_old|. Like |ratio - 1|, it is 0 in
    the first minibatch of an iteration.
    """
    check_denom(denom)
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    losses = (values - returns).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        losses = torch.max(losses, (clipped - returns).square())
    loss = 0.5 * losses.sum() / denom
    with torch.no_grad():
        stats = {
            "value_dev": (values - old_values).abs().sum() / denom,
            "token_share": mask.sum() / denom,
        }
    return loss, stats


# === 3. Training loop ===


def train(args: Args) -> dict:
    """Run PPO. Returns the content of summary.json. Raises UserError for what the user can fix."""
    args = fill_in_defaults(args)  # This also connects the ranks. From here on no flag changes.
    stop = StopSignals()
    with make_envs(args) as envs, make_envs(args, evaluation=True) as eval_envs, stop.restore:
        try:
            return run_ppo(args, envs, eval_envs, stop)
        finally:
            env_threads(len(envs)).terminate()  # After an error, turns that wait are not played.
            env_threads.cache_clear()


def run_ppo(args, envs, eval_envs, stop: StopSignals) -> dict:
    # --- Models. A new run warm-starts the actor. A resumed run loads its weights further down.
    checkpoint_path = find_checkpoint(args)  # None in a new run
    tokenizer, actor = build_actor(args, envs[0])
    check_prompts(envs[:1] + eval_envs[:1], tokenizer, args)
    if not checkpoint_path:
        warm_start(actor, tokenizer, envs[0], args)
    # FORK: several critics. Every call of build_critic returns the same weights, and critics that
    # begin equal and see the same minibatches stay equal: give each its own share of the samples.
    critic = build_critic(actor, tokenizer, args) if args.critic_epochs else None
    reference = copy_model(actor, args) if args.kl_coef else None
    # FORK: another frozen model. `frozen_model` returns a pair: `teacher, its_tokenizer =
    # frozen_model(path, "lm", args)` loads a teacher, for example. If the teacher reads the actor's
    # token ids, call `check_vocabulary(its_tokenizer, tokenizer)` first. In make_experience,
    # `logprobs_of_all(teacher, ...)` scores the samples.
    reward_model = frozen_model(args.reward_model, "scalar", args) if args.reward_model else None
    actor_optimizer = make_optimizer(actor)
    critic_optimizer = make_optimizer(critic) if critic else None

    # A checkpoint holds `state` and the models below. Add every other model whose weights change,
    # and its optimizer if you train it.
    checkpointed = {
        "actor": (actor, actor_optimizer),
        "critic": (critic, critic_optimizer),
        "reference": (reference, None),
    }
    state = TrainState()
    if checkpoint_path:
        state = load_checkpoint(checkpoint_path, checkpointed, args)
    # The sampler is copied after load_checkpoint, which changes the actor.
    sampler = copy_model(actor, args, sampler=True)
    plan = plan_steps(args)
    run = Run(args, state, checkpoint_path, stop.restore)
    stop.catch()
    print_plan(args, plan, envs, eval_envs)
    decoder = Decoder(sampler, decoder_rows(args), tokenizer.stop_ids, args)
    evaluate_now = functools.partial(evaluate, decoder, tokenizer, reward_model, eval_envs)
    if state.eval_before is None:
        state.eval_before = evaluate_now(state.iteration, args)

    while state.iteration < args.num_iterations and not stop.number:
        evaluation = {}  # of the actor before this iteration, if it is evaluated
        if state.iteration == 0:
            evaluation = state.eval_before
        elif args.eval_every and state.iteration % args.eval_every == 0:
            evaluation = evaluate_now(state.iteration, args)
        clock = Clock()

        # --- Rollout. Each rank plays its share of the episodes and receives all of them.
        # FORK: choice of prompts. The environment derives a prompt from a seed. All ranks need the
        # same seeds, after a resume as well: see "Prompts" in forks/README.md. The next iteration
        # begins after `state.prompts` prompts, which are counted at the end of the loop.
        first = first_training_seed(args, envs[0]) + state.prompts
        prompt_seeds = range(first, first + args.rollout_batch_size)
        seeds = [seed for seed in prompt_seeds for _ in range(args.n_samples_per_prompt)]
        # FORK: samples that the policy did not draw, such as demonstrations. All that is logged of
        # `episodes` is then that of the mixture, and all ranks need the same list. The scores of a
        # reward model are set below.
        episodes = rollout(decoder, tokenizer, envs, seeds, state.iteration, args)
        clock.end("rollout")

        # --- Old log-probs, values, rewards, advantages: computed once, constant from here on.
        # FORK: several reward models. `evaluate` calls set_scores as well.
        if reward_model:
            set_scores(episodes, reward_model, args)
        experience = make_experience(episodes, actor, critic, reference, state, args)
        # FORK: choice of samples, for the critic as well. All of `experience` is logged, and
        # advantages are already whitened over all of it.
        trained = experience  # or experience.select(rows)
        check_ranks_agree(prompts=seeds, samples=trained, state=state)
        clock.end("score")

        # --- Critic epochs. They could also come after the actor's: `experience` is constant.
        critic_step_stats = []
        for epoch in range(args.critic_epochs):
            for n_tokens, minibatch in minibatches(trained, epoch, state, args):
                microbatch_stats = []
                for mb in minibatch:
                    newvalues = critic.sampled_values(mb)  # [B, T], 0 outside the mask
                    # FORK: value loss.
                    v_loss, mb_stats = value_loss(
                        newvalues, mb.values, mb.returns, mb.mask, args.value_clip, denom=n_tokens
                    )
                    # Gradients add up over microbatches and, by `shard`, over ranks. The sum is the
                    # gradient of the minibatch's mean loss per token.
                    v_loss.backward()
                    microbatch_stats.append(mb_stats | {"value_loss": v_loss})
                iterations_done = state.iteration + len(critic_step_stats) / plan.critic_steps
                progress = iterations_done / args.num_iterations
                lr = linear_schedule(args.critic_lr, args.lr_end, progress)
                step = sum_over_ranks(microbatch_stats)
                step |= optimizer_step(critic, critic_optimizer, lr, args)
                critic_step_stats.append(step)
                state.critic_steps += 1
        clock.end("critic")

        # --- Actor epochs. There are none in the first --critic-warmup-iterations.
        actor_iteration = state.iteration - args.critic_warmup_iterations
        epochs = args.ppo_epochs if actor_iteration >= 0 else 0
        actor_step_stats = []
        early_stop = None  # statistics of the minibatch at which --target-kl ended the epochs
        for epoch in range(epochs):
            for n_tokens, minibatch in minibatches(trained, epoch, state, args):
                microbatch_stats = []
                for mb in minibatch:
                    newlogprobs, entropies = actor.sampled_logprobs(mb, args.temperature)
                    # FORK: policy loss. To leave tokens out, see forks/README.md.
                    pg_loss, mb_stats = policy_loss(
                        newlogprobs, mb.old_logprobs, mb.advantages, mb.mask,
                        clip_low=args.clip_low, clip_high=args.clip_high,
                        dual_clip=args.dual_clip, denom=n_tokens,
                    )  # fmt: skip
                    entropy = entropies.sum() / n_tokens
                    loss = pg_loss
                    if args.entropy_coef:
                        loss = loss - args.entropy_coef * entropy
                    if args.kl_loss:
                        kls = kl_estimate(newlogprobs, mb.ref_logprobs, args.kl_loss)
                        ratios = torch.exp(newlogprobs - mb.old_logprobs).detach()  # pi / pi_old
                        mb_stats["kl_loss"] = (ratios * kls * mb.mask).sum() / n_tokens
                        loss = loss + args.kl_coef * mb_stats["kl_loss"]
                    loss.backward()
                    microbatch_stats.append(mb_stats | {"policy_loss": pg_loss, "entropy": entropy})
                step = sum_over_ranks(microbatch_stats)
                if args.target_kl is not None and step["approx_kl"] > args.target_kl:
                    early_stop = step
                    actor_optimizer.zero_grad()
                    break
                iterations_done = actor_iteration + len(actor_step_stats) / plan.update_steps
                progress = iterations_done / plan.actor_iterations
                lr = linear_schedule(args.actor_lr, args.lr_end, progress)
                step |= optimizer_step(actor, actor_optimizer, lr, args)
                actor_step_stats.append(step)
                state.actor_steps += 1
            if early_stop:
                break
        clock.end("actor")

        # --- The sampler gets the new weights. Then come diagnosis, log and checkpoint.
        relative_update = update_sampler(actor, sampler)
        # FORK: memory across iterations. Add fields to `TrainState`, which is saved as JSON.
        # FORK: a reference that is renewed. Call copy_weights(actor, reference) every so often.
        clock.end("hand_over")
        # A selection is trained on in other microbatches than those in which it was scored. They
        # round differently, so after a selection the first ratio is 1 only up to rounding.
        same_microbatches = trained is experience
        metrics = iteration_metrics(
            episodes, experience, tokenizer, actor_step_stats, critic_step_stats, evaluation, clock
        ) | diagnose_ratio(
            actor, trained, actor_step_stats, early_stop, relative_update, same_microbatches,
            state, args,
        )  # fmt: skip
        check_iteration(
            metrics, episodes, experience, actor_step_stats, critic_step_stats, same_microbatches,
            plan, state, args,
        )  # fmt: skip
        # FORK: other numbers to log. Write them as in metrics["mine/number"] = float(...).
        tokens = logged_tokens(episodes, experience, trained, actor, tokenizer, args)
        run.log(metrics, episodes, experience, tokens, same_microbatches)
        # state.iteration changes only here, because the order of the minibatches depends on it.
        state.iteration += 1
        state.prompts += args.rollout_batch_size
        stop.agree()  # All ranks learn whether one has received a signal.
        is_last = state.iteration == args.num_iterations
        if stop.number or (args.save_every and (is_last or state.iteration % args.save_every == 0)):
            save_checkpoint(run.path, checkpointed, state, args)

    save_hf_checkpoint(actor, tokenizer, run.path / "model")
    if critic:
        save_hf_checkpoint(critic, tokenizer, run.path / "critic")
    stop.agree()
    if not stop.number:
        with stop.at_once():  # All is saved, so a signal may end the evaluation at once.
            run.summary["eval_after"] = evaluate_now(state.iteration, args)
    if stop.number:
        run.close("interrupted")
        raise SystemExit(128 + stop.number)
    return run.close("completed")


def linear_schedule(first: float, end_fraction: float, progress: float) -> float:
    """The value at `progress`: `first` at 0, falling linearly to `first * end_fraction` at 1.

    Beyond 1 it stays there.
    """
    return first * (1 - (1 - end_fraction) * min(1.0, progress))


def optimizer_step(model: Transformer, optimizer, lr: float, args) -> dict:
    """Clip the gradient, step, and clear the gradient. Returns the norm before the clipping.

    There is no step if the norm of the gradient is infinite or NaN.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    norm = float(full_tensor(nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)))
    skipped = not math.isfinite(norm)
    if not skipped:
        optimizer.step()
    optimizer.zero_grad()
    return {"grad_norm": norm, "lr": lr, "skipped": skipped}


# === 4. Experience ===


@dataclass(kw_only=True)
class Experience:
    """What the updates learn from: N samples, on the CPU.

    A field that you add, a tensor [N] or [N, T], is cut into microbatches like the others.
    """

    lengths: Tensor  # [N] number of tokens of each sample, prompt included, padding excluded
    sample_ids: Tensor | None = None  # [N] index of each sample in the rollout
    # All other tensors are [N, T]. At tokens that are not trained on, log-probs and values are 0.
    tokens: Tensor
    mask: Tensor  # bool: True at the tokens that are trained on
    sampler_logprobs: Tensor
    rewards: Tensor  # from the environment; make_experience adds score and penalty, but no KL
    # `make_experience` fills in the rest.
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None  # all NaN if there is no reference
    values: Tensor | None = None  # 0 without a critic
    returns: Tensor | None = None
    advantages: Tensor | None = None
    advantage_std: float = 0.0  # standard deviation of the advantages before whitening
    metrics: dict[str, float] = field(default_factory=dict)  # FORK: numbers to log, by name

    @classmethod
    def from_episodes(cls, episodes: list[Episode]) -> Experience:
        return cls(
            lengths=torch.tensor([len(e.ids) for e in episodes]),
            sample_ids=torch.arange(len(episodes)),
            tokens=padded(e.ids for e in episodes),
            mask=padded(e.mask for e in episodes),
            sampler_logprobs=padded(e.logprobs for e in episodes),
            rewards=padded(e.rewards for e in episodes),
        )

    def apply(self, function: Callable) -> Experience:
        """A copy in which every tensor x is replaced by function(x)."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        return dataclasses.replace(self, **{name: function(x) for name, x in tensors.items()})

    def select(self, rows: Tensor, T: int | None = None) -> Experience:
        """The samples `rows` [B], cropped to T tokens."""
        return self.apply(lambda x: x[rows, :T] if x.ndim > 1 else x[rows])

    def microbatch(self, rows: Tensor, device: str) -> Microbatch:
        """The samples `rows` [B], cropped to the longest of them, on the device.

        `rows` may be empty. FSDP needs the forward and backward pass of every rank. A rank without
        samples therefore gets one token of a prompt, which is not in the mask: its loss is 0.
        """
        forwarded, lengths = rows, self.lengths[rows]
        if len(rows) == 0:
            forwarded, lengths = torch.tensor([0]), torch.tensor([1])
        selected = self.select(forwarded, int(lengths.max()))
        packing = Packing.from_lengths(lengths, selected.mask, device)
        fields = vars(selected.apply(lambda x: upload(x, device)))
        return Microbatch(packing=packing, rows=upload(rows, device), **fields)

    def microbatches(self, rows: Tensor, args) -> Iterator[Microbatch]:
        """This rank's share of the samples `rows` [k], in microbatches."""
        for share in microbatch_rows(rows, self.lengths, args.micro_batch_tokens):
            yield self.microbatch(share, args.device)


@dataclass(kw_only=True)
class Microbatch(Experience):
    """B samples of an experience, on the device, for one forward and backward pass."""

    packing: Packing  # where the real tokens of [B, T] are, so that the models skip padding
    rows: Tensor  # [B] which samples of the experience these are; empty if the rank has none


# The updates call two methods of the models, with a microbatch [B, T]. If they computed padding as
# well, they would be:
#
#     logprobs, entropies = actor.sampled_logprobs(mb, temperature)
#         log_p = F.log_softmax(actor(tokens) / temperature, dim=-1)[:, :-1]  # of tokens[:, 1:]
#         logprobs[:, 1:] = log_p.gather(2, tokens[:, 1:, None])[..., 0] * mask[:, 1:]
#         entropies[:, 1:] = -(log_p.exp() * log_p).sum(-1) * mask[:, 1:]
#
#     values = critic.sampled_values(mb)
#         values[:, 1:] = critic(tokens)[:, :-1] * mask[:, 1:]
#
# The methods, in section 6, skip padding and never hold all logits at once.


@torch.no_grad()
def forward_all(function: Callable, experience: Experience, groups, args) -> Tensor:
    """Apply `function` to all samples, microbatch by microbatch, and return [N, T].

    Each rank computes its share. `groups` is a list of index tensors, and a microbatch has samples
    of one group. If the groups are the minibatches of an epoch, the microbatches are those in which
    the updates of that epoch see the samples. The rows of samples that are in no group are 0.
    """
    out = torch.zeros(experience.tokens.shape, device=args.device)
    for group in groups:
        for mb in experience.microbatches(group, args):
            # Compiled models score with gradients on. With gradients off, torch.compile builds
            # another graph, which rounds differently: in bfloat16 the first ratio would not be 1.
            with torch.set_grad_enabled(args.compile == "on"):
                result = function(mb)[: len(mb.rows)]  # This is empty if the rank has no rows.
            out[mb.rows, : result.shape[1]] = result.detach()
    return all_reduce(out).cpu()  # A row was computed by one rank and is 0 on the others.


def logprobs_of_all(model: Transformer, experience: Experience, groups, args) -> Tensor:
    """Log-probs [N, T] of all samples, by the forward pass of the updates."""
    logprobs = lambda mb: model.sampled_logprobs(mb, args.temperature)[0]
    return forward_all(logprobs, experience, groups, args)


def make_experience(episodes, actor, critic, reference, state, args) -> Experience:
    """Compute all that the updates need. `state` is that of the loop."""
    experience = Experience.from_episodes(episodes)
    mask = experience.mask

    # --- Log-probs. Actor, reference and critic score the samples in the microbatches of the first
    # epoch. The last bits of a result depend on what else is in its batch. With the same batches,
    # the first ratio is exactly 1, or in float32 on a GPU off by up to 1e-7. It says nothing
    # about the sampler: debug/sampler_trainer_logprob_diff shows how far its log-probs differ.
    # FORK: other old log-probs. The ratio reads them, and so do the KL in the reward, objective/kl,
    # objective/entropy and debug/sampler_trainer_logprob_diff.
    first_epoch = minibatch_rows(experience, 0, state, args)
    experience.old_logprobs = experience.sampler_logprobs  # those of the actor, up to rounding
    if args.recompute_old_logprobs:
        experience.old_logprobs = logprobs_of_all(actor, experience, first_epoch, args)
    experience.ref_logprobs = torch.full_like(experience.old_logprobs, math.nan)
    if reference:
        experience.ref_logprobs = logprobs_of_all(reference, experience, first_epoch, args)

    # --- Rewards. The environment's are on tokens of the responses. The reward model's score, and
    # the penalty for a response that was cut off, are added to the last token of the sample. This
    # is `experience.rewards`, which is logged. The advantages use `rewards`, less the KL.
    # FORK: reward shaping. The lines below change the logged reward as well. To leave it as it is,
    # change `rewards`, further down, and not `experience.rewards`. Put a sample's reward on its
    # last token, and skip rows whose mask is empty: see "Rewards" in forks/README.md.
    last = torch.arange(len(episodes)), experience.lengths - 1  # index of each sample's last token
    experience.rewards[last] += torch.tensor([episode.score for episode in episodes])
    was_cut = torch.tensor([episode.stop == "length" for episode in episodes])
    experience.rewards[last] -= args.truncation_penalty * was_cut
    # FORK: KL penalty. Its coefficient may be a tensor [N, T], say a function of mask.cumsum(1).
    kl_penalty = 0.0
    if args.kl_coef and not args.kl_loss:
        kl = kl_estimate(experience.old_logprobs, experience.ref_logprobs, "k1")
        kl_penalty = args.kl_coef * kl
    rewards = experience.rewards - kl_penalty
    # masked_whiten sums the squares of the advantages. Without a critic, the number below is an
    # upper bound of that sum. If it is finite, the sum is finite. Samples without a reward are not
    # trained on, so they may have any number.
    if not (rewards[mask.any(1)].square().sum() * mask.shape[1] ** 2).isfinite():
        raise UserError("a reward, or its penalty for the KL, is not finite, or is too large")

    # --- Values, returns, advantages. Advantages are whitened over all sampled tokens.
    experience.values = torch.zeros_like(rewards)
    # FORK: values, such as those of a critic that reads more than the actor.
    if critic:
        experience.values = forward_all(critic.sampled_values, experience, first_epoch, args)
    # FORK: advantages. Compute statistics over [mask] only. Log with experience.metrics[name].
    advantages, _ = compute_gae(rewards, experience.values, mask, args.gamma, args.gae_lambda)
    _, returns = compute_gae(rewards, experience.values, mask, args.gamma, args.critic_lambda)
    experience.returns = returns
    experience.advantage_std = float(advantages[mask].std()) if mask.sum() > 1 else 0.0
    # If all advantages are equal but for rounding, or nearer than 1e-6, they become 0. Their mean
    # has a rounding error that is proportional to their size, and whitening would amplify it.
    if experience.advantage_std < 1e-6 * max(1.0, float(advantages.abs().max())):
        advantages = torch.zeros_like(advantages)
    experience.advantages = masked_whiten(advantages, mask)
    return experience


def minibatch_rows(experience: Experience, epoch: int, state, args) -> list[Tensor]:
    """The indices of the samples of each minibatch of an epoch, in a random order.

    The order is a function of (seed, iteration, epoch), so that a resumed run repeats it. So critic
    and actor have the same minibatches in epochs of the same number, and make_experience scores the
    samples in those of epoch 0.
    """
    seed = ((args.seed * 1_000_003 + state.iteration) * 1_000_003 + epoch) % 2**63
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(experience.tokens), generator=generator)
    # Minibatches without sampled tokens are left out. Their gradients are 0, but the momentum of
    # Adam would move the weights.
    return [rows for rows in order.split(args.train_batch_size) if experience.mask[rows].any()]


def minibatches(experience: Experience, epoch: int, state, args):
    """Yield (n_tokens, microbatches) for each minibatch of an epoch.

    `n_tokens` counts the sampled tokens of the minibatch on all ranks. Losses are divided by it.
    `microbatches` are those of this rank.
    """
    for rows in progress_bar(minibatch_rows(experience, epoch, state, args), "minibatches"):
        parts = list(experience.microbatches(rows, args))
        yield int(experience.mask[rows].sum()), parts


# === 5. Rollout ===
# The decoder (section 6) generates text in B rows at once. A row holds the text of one episode, and
# four tensors say how far it is:
#
#     tokens [B, S + 1]  the text so far: prompt, responses, messages of the environment
#     length [B]         the number of its tokens, which is the index of the next one
#     limit [B]          the length at which the episode is cut off
#     alive [B]          whether the row generates: no stop token came, and length < limit
#
# A row that does not generate stays in the batch, because shapes must not change. It runs and
# writes the dummy position, index S, which no text reaches (see Decoder). Its results are not used.


@dataclass
class Episode:
    """One sample. The lists ids, mask, logprobs and rewards have an item per token."""

    env_seed: int  # determines the prompt
    noise_key: int = 0  # determines the sampling noise
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)  # True for sampled tokens
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # of the environment
    conversation: list[dict] = field(default_factory=list)  # messages, with role and content
    prompt_length: int = 0  # number of tokens of the prompt
    prompt_messages: int = 0  # number of messages of the prompt
    response_starts: list[int] = field(default_factory=list)  # index of each response's first token
    # Why the episode ended. "": it goes on; "terminated", "truncated": the environment ended it;
    # "length": it reached --max-new-tokens, or the environment's reply did not fit; "unscored": the
    # reward was None, so the episode is not trained on.
    stop: str = ""
    # info["success"] of the last step; without it, whether the environment's rewards sum to > 0
    success: bool = False
    score: float = 0.0  # of the reward model; `rewards` do not contain it
    metrics: dict = field(default_factory=dict)  # newest value of each name in info["metrics"]

    def add(self, ids: list[int], logprobs: list[float] | None = None):
        """Append tokens: sampled ones with their log-probs, given ones without."""
        self.ids += ids
        self.mask += [logprobs is not None] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)
        self.rewards += [0.0] * len(ids)

    def begin(self, env: gym.Env, tokenizer: HFTokenizer, args) -> dict:
        """Take the environment's prompt. Return the environment's info, for the warm start."""
        self.conversation, info = checked_reset(env, self.env_seed)
        self.prompt_messages = len(self.conversation)
        self.add(tokenizer.encode_prompt(self.conversation))
        self.prompt_length = len(self.ids)
        if not 1 <= self.prompt_length <= args.max_prompt_tokens:
            flag = f"--max-prompt-tokens {args.max_prompt_tokens}"
            what = f"{self.conversation[-1]['content']!r:.80} has {self.prompt_length} tokens"
            raise UserError(f"{flag}: the prompt {what}")
        return info

    def end_turn(self, env: gym.Env, start: int, tokenizer: HFTokenizer, args):
        """Give the environment the response, which is ids[start:], and take its answer."""
        self.response_starts.append(start)
        response = tokenizer.decode(self.ids[start:])
        messages, reward, end, info = checked_step(env, response)
        self.conversation.append({"role": "assistant", "content": response})
        if reward is None:  # The episode is not trained on.
            self.stop, self.success = "unscored", False
            self.mask = [False] * len(self.ids)
            self.logprobs = [0.0] * len(self.ids)
            return
        add_rewards(self, reward, info, start, tokenizer)
        self.success = bool(info.get("success", sum(self.rewards) > 0))
        if self.ids[-1] not in tokenizer.stop_ids:  # It was cut off.
            self.stop = "length"
        elif end:
            self.stop = end
        else:
            # Encode only the new text. Encoding the response again could change its ids.
            feedback = tokenizer.encode_feedback(messages, self.ids[-1])
            if len(self.ids) + len(feedback) < self.prompt_length + args.max_new_tokens:
                self.add(feedback)
                self.conversation += messages
            else:
                self.stop = "length"


def sample_token(decoder: Decoder, n_visible: int):
    """Sample one token in every row that is alive. The host does not wait for the device.

    The input is the newest token of each row. Its keys and values are not in the cache yet: this
    pass puts them there. Attention sees at most the first `n_visible` positions of the cache.
    """
    position = torch.where(decoder.alive, decoder.length - 1, decoder.dummy_position)  # [B]
    position = position[:, None]
    newest = decoder.tokens.gather(1, position)
    logits = decoder.sampler.next_logits(newest, position, decoder.cache, n_visible)  # [B, V]
    # FORK: sampling. If you add top-p or top-k, record the log-probs of the filtered policy and
    # weight the loss by exp(old_logprobs - sampler_logprobs), as forks/sampler_correction.patch
    # does. The weight cannot correct for the tokens that the filter removes, so a bias remains.
    # Do not filter old and new log-probs: after an update the filter may remove a sampled token.
    logits /= decoder.temperature
    noisy_logits = logits  # [B, V]
    # The argmax of logits plus Gumbel noise is a sample. In greedy decoding the noise is left out
    # or, in a compiled step, multiplied by 0.
    if decoder.draws_noise:
        noise = gumbel_noise(decoder.noise_keys, decoder.length, logits.shape[1])
        noisy_logits = logits + decoder.noise_scale * noise
    token = noisy_logits.argmax(-1, keepdim=True)  # [B, 1]
    logprob = logits.gather(1, token) - logits.logsumexp(-1, keepdim=True)
    index = torch.where(decoder.alive, decoder.length, decoder.dummy_position)[:, None]  # [B, 1]
    decoder.tokens.scatter_(1, index, token)
    decoder.logprobs.scatter_(1, index, logprob)
    decoder.length += decoder.alive
    decoder.alive &= (token != decoder.stop_ids).all(-1) & (decoder.length < decoder.limit)


def rollout(decoder, tokenizer, envs, seeds, iteration, args) -> list[Episode]:
    """Play an episode for each of `seeds`. Each rank plays its share and receives all of them.

    The sampling noise depends on `iteration`, which is negative in evaluations, and on the index in
    `seeds`. It does not depend on the number of ranks.
    """
    first = len(seeds) * RANK // WORLD_SIZE
    end = len(seeds) * (RANK + 1) // WORLD_SIZE
    share, sample_ids = seeds[first:end], range(first, end)
    played = rollout_share(decoder, tokenizer, envs, share, sample_ids, iteration, args)
    return [episode for part in of_all_ranks(played) for episode in part]


# --- Waves. B episodes begin together, one in each row, and a wave lasts as long as its longest
# episode. The next wave begins after that.


def generate_turn(decoder: Decoder, episodes: list[Episode], cached: int, args):
    """Sample the next response of every unfinished episode, and append it.

    The cache already has the first `cached` tokens of every unfinished episode.
    """
    decoder.begin(range(len(episodes)), episodes, args)
    # Prefill: write all tokens but the last into the cache. The last token is the first input of
    # `sample_token`. Finished and unused rows write as well, but nothing reads what they write.
    used = max(len(e.ids) for e in episodes if not e.stop) - 1  # number of cache positions in use
    last = decoder.length[:, None] - 1  # [B, 1] index of each row's last token
    chunk = max(1, args.micro_batch_tokens // len(last))  # positions per pass, to limit the memory
    for start in range(cached, used, chunk):
        index = torch.arange(start, min(start + chunk, used), device=last.device)
        positions = torch.where(index < last, index, decoder.dummy_position)  # [B, chunk]
        # Kernels need an attention mask whose last dimension is a multiple of 16.
        n_visible = round_up(start + len(index), 16)
        decoder.sampler.prefill(decoder.tokens[:, index], positions, decoder.cache, n_visible)
    for _ in progress_bar(range(0, args.max_new_tokens, decoder.steps_per_wait), "decoding"):
        if not decoder.alive.any():  # Here the host waits for the device.
            break
        used += decoder.steps_per_wait
        for _ in range(decoder.steps_per_wait):  # A row that finishes meanwhile idles.
            decoder.step(used)
    tokens, logprobs = decoder.tokens.tolist(), decoder.logprobs.tolist()
    for row, (episode, end) in enumerate(zip(episodes, decoder.length.tolist())):
        new = slice(len(episode.ids), end)  # empty if the episode had ended before
        episode.add(tokens[row][new], logprobs[row][new])


def in_threads(method: Callable, turns, envs: list[gym.Env]):
    """Call play_turn(method, *turn) on threads, for each of `turns`."""
    calls = env_threads(len(envs)).imap_unordered(lambda turn: play_turn(method, *turn), turns)
    with attempt(f"play a turn, rewards included, in {ENV_TIMEOUT} seconds"):
        for _ in turns:
            calls.next(ENV_TIMEOUT)  # This raises the first error at once.


@torch.no_grad()
def rollout_share(decoder, tokenizer, envs, seeds, sample_ids, iteration, args) -> list[Episode]:
    """Play this rank's share: an episode for each of `seeds`, in waves.

    A wave has as many episodes as the decoder has rows. `sample_ids` are the indices of these
    episodes in the list of all ranks.
    """
    keys = sample_keys(args.seed, iteration, sample_ids).tolist()
    episodes = [Episode(seed, key) for seed, key in zip(seeds, keys, strict=True)]
    B = len(envs)  # one environment for each row
    for start in range(0, len(episodes), B):
        wave = episodes[start : start + B]
        in_threads(Episode.begin, [(e, env, tokenizer, args) for e, env in zip(wave, envs)], envs)
        cached = 0
        while any(not episode.stop for episode in wave):  # one turn of each unfinished episode
            turns = [
                (episode, env, len(episode.ids), tokenizer, args)
                for episode, env in zip(wave, envs)
                if not episode.stop
            ]
            generate_turn(decoder, wave, cached, args)
            # In each row the cache now has all tokens but the newest. The messages that end_turn
            # appends are not in it. The next prefill begins at the end of the shortest row, so in
            # longer rows it writes some tokens a second time.
            cached = min(len(episode.ids) for episode, *_ in turns) - 1
            in_threads(Episode.end_turn, turns, envs)
    return episodes


# ################################# Part II: what PPO stands on #################################

# === 6. Transformer, KV cache, log-probs, sampling noise ===


# longrope is left out: its frequencies depend on the length of the whole text. The frequencies of
# "dynamic" are fixed up to max_position_embeddings. `load_model` (section 10) keeps samples within
# it. A reward model encodes conversations anew, and that length is not checked.
ROPE_TYPES = "default", "linear", "dynamic", "yarn", "llama3"


def check_config(config: PretrainedConfig) -> PretrainedConfig:
    """Reject what the Transformer below does not compute. Fill in head_dim where it is missing."""
    if config.model_type not in ("llama", "mistral", "qwen2", "qwen3"):
        raise ValueError(
            f"model_type {config.model_type!r}: must be llama, mistral, qwen2, qwen3; for other "
            "families see docs/other_models.md"
        )
    if config.rope_parameters["rope_type"] not in ROPE_TYPES:
        raise ValueError(f"{config.rope_parameters}: rope_type must be one of {ROPE_TYPES}")
    if not getattr(config, "is_causal", True):
        raise ValueError("is_causal false: attention must be causal")
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act {config.hidden_act!r}: must be silu")
    # Mistral has no use_sliding_window. Its window is in use wherever it is not None.
    uses_window = getattr(config, "use_sliding_window", config.model_type == "mistral")
    if uses_window and getattr(config, "sliding_window", None) is not None:
        raise ValueError(f"sliding_window {config.sliding_window}: attention must have no window")
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    rope_frequencies(config)  # This raises an error if rope_theta is text.
    return config


def rope_frequencies(config: PretrainedConfig) -> tuple[Tensor, float]:
    """Rotary frequencies [D / 2] (https://arxiv.org/abs/2104.09864), and a factor for cos, sin."""
    with torch.device("cpu"):  # The model may be made on the meta device.
        if config.rope_parameters["rope_type"] != "default":
            return ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, "cpu")
        exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        return config.rope_parameters["rope_theta"] ** -exponents, 1.0


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of x [..., H, D]; cos, sin [..., 1, D].

    For the halves x1, x2 of x and the plain sin, the result is x1 * cos - x2 * sin, then
    x2 * cos + x1 * sin. Transformers negates x2, in rotate_half. Here `hidden_states` has negated
    the first half of sin instead, once for all layers.
    """
    swapped = x.float().roll(x.shape[-1] // 2, dims=-1)  # second half, first half
    return (x.float() * cos + swapped * sin).to(x.dtype)


@dataclass(frozen=True)
class Packing:
    """Where the n real tokens of a microbatch [B, T] are, and which m of them were sampled.

    In training a tensor [n, ...] holds one sample after another, without padding. Where attention
    has no kernel for this layout, queries, keys and values are unpacked to [B, T, ...]. In this
    example capitals were sampled, and dots are padding:

        tokens  [[a b C D]     packed  [a b C D a E a F]     flat_index [0 1 2 3 4 5 8 9]
                 [a E . .]     index    0 1 2 3 4 5 6 7      position   [0 1 2 3 0 1 0 1]
                 [a F . .]]    starts  [0 4 6 8]             sampled    [2 3 5 7]
    """

    shape: tuple[int, int]
    flat_index: Tensor  # [n] index of each real token in the flattened [B * T]
    position: Tensor  # [n] index of each real token in its sample
    sampled: Tensor  # [m] which of the n real tokens were sampled, as indices
    starts: Tensor  # [B + 1] packed index at which each sample starts, then n; int32

    @classmethod
    def from_lengths(cls, lengths: Tensor, mask: Tensor, device: str) -> Packing:
        """`lengths` and `mask` are on the CPU: `nonzero` on the device would make the host wait."""
        T = mask.shape[1]
        flat_index = (torch.arange(T) < lengths[:, None]).flatten().nonzero()[:, 0]
        sampled = mask.flatten()[flat_index].nonzero()[:, 0]
        starts = F.pad(lengths.cumsum(0), (1, 0)).int()
        indices = flat_index, flat_index % T, sampled, starts
        return cls(mask.shape, *(upload(x, device) for x in indices))

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [n, ...]"""
        return x.flatten(0, 1).index_select(0, self.flat_index)

    def unpack(self, x: Tensor, flat_index: Tensor) -> Tensor:
        """[k, ...] at the indices `flat_index` [k] of B * T -> [B, T, ...], 0 elsewhere"""
        blank = x.new_zeros(math.prod(self.shape), *x.shape[1:])
        return blank.index_copy(0, flat_index, x).unflatten(0, self.shape)

    def unpack_sampled(self, x: Tensor) -> Tensor:
        """[m] -> [B, T]"""
        # Under FSDP (`shard`, section 10) a hook on the result gathers the weights before the
        # backward pass. `unflatten` returns a view, and if a caller changed a view in place, the
        # hook would be lost. A clone keeps it.
        return self.unpack(x, self.flat_index[self.sampled]).clone()


# In older versions of PyTorch `varlen_attn` lacks grouped heads and `seqused_k`. Versions, not
# strings, are compared here: torch.__version__ is a TorchVersion.
HAS_VARLEN = torch.__version__ >= "2.12"
# Whether CUDA's kernels are used where they fit. `try_kernels` turns off those that fail.
KERNELS = {
    "packed attention": HAS_VARLEN,
    "attention by lengths": HAS_VARLEN,
    "float32 product": True,
}


def has_varlen(kernel: str, x: Tensor, head_dim: int) -> bool:
    """Whether `kernel`, a variable-length attention kernel, is used for x."""
    fits = head_dim % 8 == 0 and head_dim <= 256  # Flash attention refuses other sizes.
    return KERNELS[kernel] and x.is_cuda and x.dtype == torch.bfloat16 and fits


@dataclass(frozen=True)
class Context:
    """What all layers need to know about the tokens [B, T] or, packed, [n] of a forward pass.

    A token sees itself and the tokens before it. With a `packing`, as in training, these are the
    earlier tokens of its sample. With a `cache`, as in decoding, they are those of its row in the
    cache, at the first `n_visible` positions. Otherwise they are those of its row of the input.
    """

    positions: Tensor  # index of each token in its sample
    cos: Tensor  # its rotation, [..., 1, D]
    sin: Tensor
    packing: Packing | None = None
    cache: KVCache | None = None
    n_visible: int | None = None
    # The attention mask, bool [B * Hkv, 1, G * T, n_visible], says what is seen of the cache. With
    # a cache and no mask, `attend_to_lengths` computes the attention.
    mask: Tensor | None = None


def attend_padded(q, k, v) -> Tensor:
    """Causal attention within padded rows. q [B, T, H, D]; k, v [B, T, Hkv, D] -> [B, T, H, D]"""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # Not every kernel that saves memory takes grouped heads.
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    # Rows start at index 0, so causality alone hides the padding on the right.
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def attend_packed(q, k, v, packing: Packing) -> Tensor:
    """Causal attention within packed samples. q [n, H, D]; k, v [n, Hkv, D] -> [n, H, D]"""
    if has_varlen("packed attention", q, q.shape[-1]):
        starts, T = packing.starts, packing.shape[1]
        return varlen_attn(  # The window (-1, 0) is causal: all tokens before, none after.
            q, k, v, starts, starts, T, T, window_size=(-1, 0), enable_gqa=True
        )
    return packing.pack(attend_padded(*(packing.unpack(x, packing.flat_index) for x in (q, k, v))))


def attend_cached(q, k, v, layer: int, context: Context) -> Tensor:
    """Write k, v [B, T, Hkv, D] into the cache. Attend to it with q [B, T, H, D] -> [B, T, H, D].

    T is 1 in decoding. G = H / Hkv query heads share a key head. They become further queries of it,
    because enable_gqa would be slow with a mask. For one row, with T = 2 tokens a, b, H = 4 query
    heads and Hkv = 2 key heads:

        q [B, T, H, D]              a0 a1 a2 a3      token a, query heads 0 to 3
                                    b0 b1 b2 b3
        q [B, Hkv, G * T, D]        a0 b0 a1 b1      key head 0, the queries of heads 0 and 1
                                    a2 b2 a3 b3      key head 1, the queries of heads 2 and 3
        q [B * Hkv, 1, G * T, D]    the same: a key head of a row is a row of the batch

    `Transformer.prefill` makes the mask in this order of queries. If a is at position 0, b at 1 and
    n_visible is 2, the mask of each key head is a0 [1 0], b0 [1 1], a1 [1 0], b1 [1 1].
    """
    B, T, Hkv, D = k.shape
    k, v = context.cache.update(layer, k, v, context.positions)  # [B, Hkv, size, D]
    q = q.view(B, T, Hkv, -1, D).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, Hkv, G * T, D]
    if context.mask is None:
        out = attend_to_lengths(q, k, v, context)
    else:
        k, v = (x[:, :, : context.n_visible] for x in (k, v))
        q, k, v = (x.flatten(0, 1)[:, None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=context.mask)
    return out.view(B, Hkv, -1, T, D).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [B, T, H, D]


def attend_to_lengths(q, k, v, context: Context) -> Tensor:
    """Attention of one token per row. q [B, Hkv, G, D]; k, v [B, Hkv, size, D] -> [B*Hkv*G, 1, D]

    In each row the kernel reads the positions that the row has filled. With a mask it would read
    `n_visible` positions in every row. A finished row stands at the dummy position, and its result
    is not used. It reads one position if the dummy position is beyond the first `n_visible` ones.
    """
    B, Hkv, G, D = q.shape
    lengths = torch.where(context.positions < context.n_visible, context.positions + 1, 1)  # [B, 1]
    lengths = lengths.int().expand(B, Hkv).flatten()
    # A sequence of the kernel is a key head of a row, with its G queries. They are of one token, so
    # nothing is causal among them. cu_seqlens say where each sequence starts. With B = 2, Hkv = 1,
    # G = 2 and size 256 they are [0 2 4] and [0 256 512]. If row 0 is at position 3 and row 1 has
    # finished, lengths are [4 1] for n_visible = 128.
    q, k, v = (x.reshape(-1, 1, D) for x in (q, k, v))  # k, v [B * Hkv * size, 1, D]
    sequences = context.cache.sequences  # 0, 1, ..., B * Hkv
    cu_seqlens_q, cu_seqlens_k = sequences * G, sequences * context.cache.size
    return varlen_attn(q, k, v, cu_seqlens_q, cu_seqlens_k, G, context.n_visible, seqused_k=lengths)


class Attention(nn.Module):
    def __init__(self, config: PretrainedConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.H, self.Hkv = config.num_attention_heads, config.num_key_value_heads
        self.D, hidden = config.head_dim, config.hidden_size
        o_bias = config.model_type in ("llama", "qwen3") and config.attention_bias
        qkv_bias = o_bias or config.model_type == "qwen2"
        self.q_proj = nn.Linear(hidden, self.H * self.D, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden, self.Hkv * self.D, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden, self.Hkv * self.D, bias=qkv_bias)
        self.o_proj = nn.Linear(self.H * self.D, hidden, bias=o_bias)
        norm = nn.RMSNorm if config.model_type == "qwen3" else nn.Identity
        self.q_norm = norm(self.D, config.rms_norm_eps)
        self.k_norm = norm(self.D, config.rms_norm_eps)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.H, self.D))  # [..., H, D]
        k = self.k_proj(x).unflatten(-1, (self.Hkv, self.D))  # [..., Hkv, D]
        v = self.v_proj(x).unflatten(-1, (self.Hkv, self.D))
        q = apply_rope(self.q_norm(q), context.cos, context.sin)
        k = apply_rope(self.k_norm(k), context.cos, context.sin)
        if context.packing is not None:
            out = attend_packed(q, k, v, context.packing)
        elif context.cache is not None:
            out = attend_cached(q, k, v, self.layer, context)
        else:
            out = attend_padded(q, k, v)
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: PretrainedConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        bias = config.model_type == "llama" and config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: PretrainedConfig, layer: int):
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """A language model (head="lm"), or a critic or reward model (head="scalar").

    Its parameters have the names of Hugging Face.
    """

    def __init__(self, config, head="lm", checkpointing=False, compile_head="off"):
        super().__init__()
        self.config = config
        self.head = head
        self.tied = head == "lm" and config.tie_word_embeddings
        self.checkpointing = checkpointing  # activation checkpointing
        self.compile_head = compile_head  # see token_logprobs
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers)),
            "norm": nn.RMSNorm(config.hidden_size, config.rms_norm_eps),
        })
        if head == "lm":
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        else:
            self.score = nn.Linear(config.hidden_size, 1, bias=False)
        frequencies, self.rope_factor = rope_frequencies(config)
        self.register_buffer("rope", frequencies, persistent=False)
        self.tie_weights()

    def tie_weights(self):
        if self.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] or, with a scalar head, values [B, T] after each of `tokens` [B, T]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.hidden_states(tokens, positions)
        return self.lm_head(x) if self.head == "lm" else self.values(x)

    def sampled_logprobs(self, mb: Microbatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs of the sampled tokens, and entropies, [B, T] each. Section 4 defines them."""
        packing = mb.packing
        x = self.states_before_sampled(mb.tokens, packing)  # [m, hidden]
        targets = packing.pack(mb.tokens)[packing.sampled]  # [m]
        weight = self.lm_head.weight
        logprobs, entropies = token_logprobs(x, weight, targets, temperature, self.compile_head)
        return packing.unpack_sampled(logprobs), packing.unpack_sampled(entropies)

    def sampled_values(self, mb: Microbatch) -> Tensor:
        """Values [B, T] of the states in which tokens were sampled. Section 4 defines them.

        Models with the same tokenizer may have vocabularies of different sizes, with unused ids at
        the end. An id that the critic does not have is replaced by its last id.
        """
        tokens = mb.tokens.clamp(max=self.config.vocab_size - 1)
        x = self.states_before_sampled(tokens, mb.packing)  # [m, hidden]
        return mb.packing.unpack_sampled(self.values(x))

    def prefill(self, tokens, positions, cache: KVCache, n_visible: int) -> Tensor:
        """Write keys and values of tokens [B, T] into the cache, at `positions` [B, T].

        `next_logits` calls it as well, with one token per row. A token sees the positions up to its
        own, at most the first `n_visible`. Returns the hidden states of the tokens [B, T, hidden].
        """
        mask = None  # With one token per row and a varlen kernel, `attend_to_lengths` needs none.
        weight, D = self.model.norm.weight, self.config.head_dim
        if tokens.shape[1] > 1 or not has_varlen("attention by lengths", weight, D):
            Hkv = self.config.num_key_value_heads
            G = self.config.num_attention_heads // Hkv
            # The position of each query, in the order that attend_cached shows: [B * Hkv, G * T]
            queries = positions.repeat(1, G).repeat_interleave(Hkv, 0)
            mask = torch.arange(n_visible, device=tokens.device) <= queries[:, None, :, None]
        return self.hidden_states(tokens, positions, cache=cache, n_visible=n_visible, mask=mask)

    def next_logits(self, tokens, positions, cache: KVCache, n_visible: int) -> Tensor:
        """As `prefill`, with one token per row. Returns the logits [B, V] of the next one."""
        x = self.prefill(tokens, positions, cache, n_visible)[:, 0]
        return float32_product(x, self.lm_head.weight.T)

    def hidden_states(self, tokens: Tensor, positions: Tensor, **context) -> Tensor:
        """The input of the head, [..., hidden], for tokens [B, T] or, with a packing, [n]."""
        angles = positions[..., None, None].float() * self.rope  # [..., 1, D / 2]
        # This negates the first half of sin, but not of cos: sin(-a) = -sin(a), cos(-a) = cos(a).
        angles = torch.cat((-angles, angles), dim=-1)
        cos, sin = angles.cos() * self.rope_factor, angles.sin() * self.rope_factor
        context = Context(positions, cos, sin, **context)
        x = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, context, use_reentrant=False)
            else:
                x = block(x, context)
        return self.model.norm(x)

    def states_before_sampled(self, tokens: Tensor, packing: Packing) -> Tensor:
        """Hidden states [m, hidden] from which the m sampled tokens of [B, T] were sampled."""
        x = self.hidden_states(packing.pack(tokens), packing.position, packing=packing)
        # This is the shift by one. The log-prob and the value of a sampled token come from the
        # output one token earlier. It is of the same sample, since every sample begins with a
        # prompt.
        return x[packing.sampled - 1]

    def values(self, x: Tensor) -> Tensor:
        """The head's values, [..., hidden] -> [...].

        They are float32, because bfloat16 would round values too coarsely. `shard` keeps the weight
        of the head in float32.
        """
        return self.score(x.float())[..., 0]


class KVCache:
    """Keys and values of every layer, [B, Hkv, size, D] each.

    A forward pass may write to all positions, but reads at most the first `n_visible` ones, so the
    time of a decode step depends on the length of the texts, not on the limit. `size` is the number
    of positions, rounded up to a multiple of 16. Decoder shows an example.
    """

    def __init__(self, config: PretrainedConfig, B, positions, dtype=torch.float32, device="cpu"):
        self.size = round_up(positions, 16)
        self.batch_index = torch.arange(B, device=device)[:, None]
        shape = (B, config.num_key_value_heads, self.size, config.head_dim)
        # 0, 1, ..., B * Hkv, for `attend_to_lengths`
        self.sequences = torch.arange(shape[0] * shape[1] + 1, device=device, dtype=torch.int32)
        zeros = functools.partial(torch.zeros, shape, dtype=dtype, device=device)
        self.layers = [(zeros(), zeros()) for _ in range(config.num_hidden_layers)]

    def update(self, layer: int, k, v, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v [B, T, Hkv, D] at `positions` [B, T]. Returns all, [B, Hkv, size, D]."""
        keys, values = self.layers[layer]
        # Indexed by [B, 1], a slice and [B, T], keys [B, Hkv, size, D] give [B, T, Hkv, D], as k:
        # PyTorch puts the indexed dimensions first.
        keys[self.batch_index, :, positions] = k
        values[self.batch_index, :, positions] = v
        return keys, values


class Decoder:
    """B rows that decode together, on the device. Compiled steps on a GPU run as CUDA graphs.

    A graph replays the hundreds of small kernels of a step by one launch, on the same addresses.
    Weights, cache and rows therefore stay where they are for the whole run, and are modified in
    place.

    These are two rows before a step, for samples of at most S = 6 tokens. The text of row 0 is
    "a b c d" and goes on. The text of row 1 was "a b c" and has ended:

        index             0 1 2 3 4 5 6 7 ... 15
        tokens   row 0    a b c d . . .             d is the newest token
                 row 1    a b c . . . -             6 is the dummy position
        cache    row 0    a b c . . . . . ... .     d is not in the cache yet
                 row 1    a b . . . . - . ... .

    In row 0 the step runs d. It writes the keys and values of d at 3, reads 0 to 3, and writes the
    token that it samples at 4. In row 1 it runs what stands at 6, reads 0 to 6, and writes keys,
    values and a token at 6. That token is never used: the length of row 1 does not grow, and no
    text reads 6.
    """

    def __init__(self, sampler: Transformer, B: int, stop_ids: list[int], args):
        weight = next(sampler.parameters())
        self.sampler = sampler
        S = max_sample_length(args)
        self.dummy_position = S
        self.cache = KVCache(sampler.config, B, S + 1, weight.dtype, weight.device)
        zeros = functools.partial(torch.zeros, device=weight.device)
        self.tokens = zeros(B, S + 1, dtype=torch.int64)
        self.logprobs = zeros(B, S + 1)
        self.length = zeros(B, dtype=torch.int64)
        self.limit = zeros(B, dtype=torch.int64)  # maximum length
        self.noise_keys = zeros(B, dtype=torch.int32)  # see gumbel_noise
        self.alive = zeros(B, dtype=torch.bool)  # still decoding
        self.temperature = zeros(())
        # Greedy decoding has no noise. A compiled step multiplies it by 0, an eager one draws none.
        self.noise_scale = zeros(())
        self.draws_noise = True
        self.stop_ids = torch.tensor(stop_ids, device=weight.device)
        self.steps_per_wait = 8 if weight.is_cuda else 1  # steps until the host waits
        self.sample_token = maybe_compiled(sample_token, args.compile)
        self.use_graphs = weight.is_cuda and args.compile == "on"
        self.graphs = {}  # {n_visible: CUDA graph of a step}
        self.pool = torch.cuda.graph_pool_handle() if self.use_graphs else None

    def begin(self, rows, episodes: list[Episode], args):
        """Put the tokens of an episode in each of `rows`, to decode its next response."""
        rows = torch.tensor(rows, device=self.tokens.device)
        ids = padded([e.ids for e in episodes]).to(rows.device)  # [len(rows), T]
        self.tokens[rows, : ids.shape[1]] = ids
        numbers = [
            (len(e.ids), e.prompt_length + args.max_new_tokens, e.noise_key, not e.stop)
            for e in episodes
        ]
        numbers = torch.tensor(numbers, device=rows.device)  # [len(rows), 4], in one upload
        lengths, limits, noise_keys, alive = numbers.T
        self.length[rows], self.limit[rows] = lengths, limits
        self.noise_keys[rows], self.alive[rows] = noise_keys.int(), alive.bool()
        self.temperature.fill_(args.temperature or 1.0)
        greedy = args.temperature == 0
        self.noise_scale.fill_(not greedy)
        # Only an eager step leaves the noise out. A compiled step would need a second graph for it.
        self.draws_noise = not greedy or args.compile == "on"

    def step(self, used: int):
        """Run `sample_token` in all rows. No row then has more than `used` tokens in the cache."""
        n_visible = min(round_up(used, 128), self.cache.size)  # few shapes and graphs
        if n_visible in self.graphs:
            self.graphs[n_visible].replay()
            return
        self.sample_token(self, n_visible)
        if self.use_graphs:
            graph = torch.cuda.CUDAGraph()
            # "thread_local" lets the threads of an environment use the GPU meanwhile.
            with torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
                self.sample_token(self, n_visible)  # This is recorded. It does not run.
            self.graphs[n_visible] = graph


# functools.cache makes all callers share one compiled function.
@functools.cache
def maybe_compiled(function: Callable, compile: str) -> Callable:
    return torch.compile(function, dynamic=True) if compile == "on" else function


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32. In bfloat16 logits near 20 would be rounded to steps of 0.125."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda and KERNELS["float32 product"]:
        return torch.mm(a, b, out_dtype=torch.float32)  # without a float32 copy of b
    # CPUs have no such product. Copies of small parts of b stay in the processor's cache.
    return torch.cat([a.float() @ part.float() for part in b.split(4096, dim=1)], dim=1)


def chunk_logprobs(hidden, weight, targets, temperature) -> tuple[Tensor, Tensor]:
    """log p[i] = logits[i] - logsumexp, and the entropy, logsumexp - sum(p * logits)."""
    logits = float32_product(hidden, weight.T) / temperature  # [chunk_size, V]
    logsumexp = logits.logsumexp(dim=-1)
    probs = torch.exp(logits - logsumexp[:, None])
    chosen = -F.nll_loss(logits, targets, reduction="none")  # logits[i, targets[i]]
    return chosen - logsumexp, logsumexp - (probs * logits).sum(-1)


def chunk_gradients(hidden, weight, targets, temperature, d_logprobs, d_entropies) -> Tensor:
    """The gradient [chunk_size, V] with respect to the logits before the temperature divides them.

    With z = logits / temperature, p = softmax(z) and the entropy H, the gradient of log p[i] with
    respect to z is onehot(i) - p, and that of H is -p * (log p + H).
    """
    logits = float32_product(hidden, weight.T) / temperature
    logprobs = logits - logits.logsumexp(-1, keepdim=True)
    probs = logprobs.exp()
    entropies = -(probs * logprobs).sum(-1, keepdim=True)
    one_hot = (torch.arange(len(weight), device=weight.device) == targets[:, None]).float()
    d_logits = d_logprobs[:, None] * (one_hot - probs)
    d_logits -= d_entropies[:, None] * probs * (logprobs + entropies)
    return (d_logits / temperature).to(weight.dtype)


def token_logprobs(hidden, weight, targets, temperature=1.0, compile="off"):
    """Log-probs [m] of `targets` [m] and entropies [m]; hidden [m, hidden], weight [V, hidden].

    Logits are computed in chunks, and again in the backward pass, because all of them would need
    more memory than the model.
    """
    # `logits` is the number of logits in a chunk: 16 MB on a CPU, 512 MB on a GPU, and 256 MB there
    # without compile. `chunk_size` is its number of tokens.
    logits = 2**22 if not hidden.is_cuda else 2**27 if compile == "on" else 2**26
    chunk_size = max(1, logits // len(weight))
    if len(hidden) % chunk_size == 1:  # A last chunk of one token would be compiled separately.
        chunk_size -= 1
    return ChunkedLogprobs.apply(hidden, weight, targets, temperature, chunk_size, compile)


class ChunkedLogprobs(torch.autograd.Function):
    """Log-probs and entropies, chunk by chunk, and their gradients.

    The gradients of the weight add up in one tensor in float32. Autograd rounds the sum once, to
    the dtype of the weight. Left to autograd, the sum would be rounded after every chunk. On a CPU,
    which has no product of bfloat16 matrices in float32, all of this is computed from copies in
    float32, made once for all chunks.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk_size, compile):
        ctx.save_for_backward(hidden, weight, targets)
        ctx.settings = temperature, chunk_size, compile
        if not hidden.is_cuda:
            hidden, weight = hidden.float(), weight.float()
        function = maybe_compiled(chunk_logprobs, compile)
        chunks = zip(hidden.split(chunk_size), targets.split(chunk_size))
        logprobs, entropies = zip(*(function(h, weight, t, temperature) for h, t in chunks))
        return torch.cat(logprobs), torch.cat(entropies)

    @staticmethod
    def backward(ctx, *d_outputs):
        hidden, weight, targets = ctx.saved_tensors
        temperature, chunk_size, compile = ctx.settings
        if not hidden.is_cuda:
            hidden, weight = hidden.float(), weight.float()
        function = maybe_compiled(chunk_gradients, compile)
        d_hidden, d_weight = [], None
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(weight, dtype=torch.float32)
        parts = (x.split(chunk_size) for x in (hidden, targets, *d_outputs))
        for h, t, d_logprobs, d_entropies in zip(*parts):
            d_logits = function(h, weight, t, temperature, d_logprobs, d_entropies)
            d_hidden.append(d_logits @ weight)
            if d_weight is not None:
                d_weight += float32_product(d_logits.T, h)
        return torch.cat(d_hidden), d_weight, None, None, None, None


def hash32(x: Tensor, key=0) -> Tensor:
    """The hash lowbias32 of https://github.com/skeeto/hash-prospector, on int32.

    The masks turn `>>` into the shift of unsigned integers. Products overflow, as they should.
    `key` enters between the two products. Operations are in place where they can be: allocating
    another [B, V] takes longer than filling it.
    """
    x = x ^ (x >> 16 & 0xFFFF)  # not in place: x belongs to the caller
    x *= 0x7FEB352D
    x ^= key
    x ^= x >> 15 & 0x1FFFF
    x *= -0x7B935975  # 0x846CA68B as int32
    x ^= x >> 16 & 0xFFFF
    return x


def sample_keys(seed: int, iteration: int, sample_ids) -> Tensor:
    """Keys [N] of the samples' noise. A key does not depend on batch, row or rank."""
    seed, iteration, sample_ids = (
        torch.tensor(x, dtype=torch.int32) for x in (seed, iteration, sample_ids)
    )
    return hash32(hash32(hash32(seed) ^ iteration) ^ sample_ids)


def gumbel_noise(keys: Tensor, index: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise [B, V], a function of sample key [B], token index [B] and vocabulary id."""
    token_keys = hash32(hash32(keys ^ 0x5851F42D) ^ index.int())  # The constant is arbitrary.
    ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    # The token keys 4 and 5 would give the same noise with neighbours swapped: id 0 of one is id 1
    # of the other. The second key prevents it.
    x = hash32(ids ^ token_keys[:, None], hash32(token_keys ^ keys)[:, None])  # [B, V]
    # u is uniform in (0, 1), from 31 bits. Near 0 the noise is large, about -log(u), and rare
    # tokens need the fine steps that u has there. The largest u would be rounded to 1, where the
    # noise is -inf.
    u = (x & 0x7FFFFFFF).float().add_(0.5).mul_(2**-31).clamp_(max=1 - 2**-24)
    return u.neg_().log1p_().neg_().log_().neg_()  # -log(-log(1 - u))


# === 7. Tokenizer and Hugging Face checkpoints ===


def read_json(path: Path):
    return json.loads(path.read_text("utf-8"))


def write_file(path: Path, content: bytes):
    """Replace a file. If this is interrupted, or the disk is full, the earlier file stays."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def write_json(path: Path, content: dict):
    write_file(path, json.dumps(content, indent=2).encode())


class FixedDate(datetime.datetime):
    """Some chat templates write today's date. A resumed run must have the same prompts."""

    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


chat_template_utils.datetime = FixedDate  # `strftime_now` in a template calls it


class HFTokenizer:
    """The tokenizer, the chat template and the stop ids of a Hugging Face folder."""

    def __init__(self, folder: str | Path, tokenizer: PreTrainedTokenizerFast | None = None):
        self.folder = Path(folder)
        self.template_kwargs = "{}"  # as JSON
        with attempt(f"load tokenizer.json and tokenizer_config.json of {folder}"):
            self.hf = tokenizer or PreTrainedTokenizerFast.from_pretrained(folder)
            self.backend = self.hf.backend_tokenizer  # This is much faster than self.hf.
            self.backend.no_padding()
            self.backend.no_truncation()
            stop_ids = {self.hf.eos_token_id}
            for name in ("config.json", "generation_config.json"):
                if (self.folder / name).is_file():
                    ids = read_json(self.folder / name).get("eos_token_id")
                    stop_ids.update(ids if isinstance(ids, list) else [ids])
            end_of_turn = self.find_end_of_turn()
            stop_ids.add(end_of_turn)
            # A negative id means that there is none.
            self.stop_ids = sorted(i for i in stop_ids - {None} if i >= 0)
        if not self.stop_ids:
            raise UserError(f"{folder}: no eos token in any of its config files")
        self.eos_id = self.stop_ids[0] if self.hf.eos_token_id is None else self.hf.eos_token_id
        self.pad_id = self.eos_id if self.hf.pad_token_id is None else self.hf.pad_token_id
        self.end_of_turn_id = self.eos_id if end_of_turn is None else end_of_turn
        self.vocab_size = max(*self.hf.get_vocab().values(), *self.stop_ids) + 1
        special = (i for i, token in self.hf.added_tokens_decoder.items() if token.special)
        self.special_ids = {*special} - {*self.stop_ids}  # `decode` leaves them out as well

    @classmethod
    def from_texts(cls, texts: list[str]) -> HFTokenizer:
        """A character tokenizer over what `texts` contain: a BPE without merges."""
        special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
        vocab = [*special.values(), *sorted(set("".join(texts)))]
        bpe = tokenizers.models.BPE({x: i for i, x in enumerate(vocab)}, [], unk_token="<unk>")
        tokenizer = tokenizers.Tokenizer(bpe)
        tokenizer.decoder = tokenizers.decoders.Fuse()
        return cls("embedded", PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special))

    def find_end_of_turn(self) -> int | None:
        """The id of the special token that ends an assistant's turn in the chat template, if any.

        Base models may have a template that ends a turn by another token than their eos token.
        """
        with contextlib.suppress(UserError):  # The template may refuse these messages.
            turns = [*as_messages("-"), {"role": "assistant", "content": "<<turn>>"}]
            _, found, tail = self.render(turns, generation_prompt=False).rpartition("<<turn>>")
            ids = self.encode(tail.lstrip()) if found else []
            added = self.hf.added_tokens_decoder.get(ids[0]) if ids else None
            return ids[0] if added and added.special else None
        return None

    def render(self, messages: list[dict], generation_prompt: bool = True) -> str:
        """The messages in the chat template, or as plain text if there is none.

        With `generation_prompt` the text ends with the header of an answer.
        """
        if not self.hf.chat_template:
            return "".join(message["content"] for message in messages)
        with attempt(f"render with {self.template_kwargs} the chat template of {self.folder}"):
            kwargs = json.loads(self.template_kwargs)
            return self.hf.apply_chat_template(
                messages,
                chat_template=self.hf.get_chat_template(tools=kwargs.get("tools")),
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **kwargs,
            )

    def encode(self, text: str, context: str = "", add_special_tokens: bool = False) -> list[int]:
        """The ids of `text` where it follows `context`.

        Alone it may have other ids, since some tokenizers put a space before a text. If a token
        spans the boundary, as "=1" does between "2=" and "1", `text` is encoded as it is after a
        newline. If a token spans that boundary as well, `text` is encoded alone.
        """
        encode = functools.partial(self.backend.encode, add_special_tokens=add_special_tokens)
        for before in (context, "\n", ""):
            start, whole = encode(before).ids if before else [], encode(before + text).ids
            if whole[: len(start)] == start:
                break
        return whole[len(start) :]

    def encode_prompt(self, prompt: str | list[dict]) -> list[int]:
        """The ids of a prompt. The chat template, or without one the tokenizer, adds BOS."""
        text = self.render(as_messages(prompt))
        return self.encode(text, add_special_tokens=not self.hf.chat_template)

    def encode_conversation(self, messages: list[dict]) -> list[int]:
        """The ids of complete messages, as a reward model reads them."""
        text = self.render(messages, generation_prompt=False)
        if self.hf.chat_template:
            return self.encode(text)
        return [*self.encode(text, add_special_tokens=True), self.eos_id]

    def encode_feedback(self, text: str | list[dict], stop_id: int) -> list[int]:
        """The ids that follow a response: `text` in the chat template, up to the next response.

        A conversation with a dummy response is rendered, and what follows that response is encoded.
        If this begins with the response's stop token, `stop_id`, the token is left out, because it
        was sampled. After another stop token, such as "</answer>", the template's end of the turn
        follows.
        """
        messages = as_messages(text)
        stop_token = self.hf.convert_ids_to_tokens(stop_id) or ""  # The vocabulary may lack it.
        if self.hf.chat_template:
            turns = [*as_messages("-"), {"role": "assistant", "content": "<<turn>>"}, *messages]
            whole = self.render(turns)
            _, found, tail = whole.partition("<<turn>>")
            if not found:
                raise UserError(f"the chat template of {self.folder} leaves out earlier turns")
        else:
            whole = tail = stop_token + self.render(messages)
        # In ChatML `tail` is "<|im_end|>", a line break, "<|im_start|>user" and so on. After a
        # sampled <|im_end|>, what is encoded begins with the line break.
        if stop_token and tail.lstrip().startswith(stop_token):
            tail = tail.lstrip().removeprefix(stop_token)
        return self.encode(tail, context=whole.removesuffix(tail))

    def decode(self, ids: list[int]) -> str:
        """The text of ids, without special tokens and without stop tokens."""
        ids = [i for i in ids if i not in self.stop_ids]
        return self.backend.decode(ids, skip_special_tokens=True)

    def pieces(self, ids: list[int]) -> list[str]:
        """The text of each token, also of special tokens. Joined, the pieces are the whole text.

        If several tokens spell a character, the last of them has it, and the others are empty.
        """
        decode = functools.partial(self.backend.decode, skip_special_tokens=False)
        whole, pieces, start = decode(ids), [], 0
        # A long text is divided where that does not change it. The loop below is quadratic.
        middles = range(len(ids) // 2, len(ids) // 2 + 8) if len(ids) > 32 else ()
        for middle in middles:
            if decode(ids[:middle]) + decode(ids[middle:]) == whole:
                return self.pieces(ids[:middle]) + self.pieces(ids[middle:])
        for n in range(1, len(ids) + 1):
            text, end = decode(ids[:n]), start
            # If ids[:n] end within a character, `text` ends with a sign that `whole` does not have.
            while end < len(whole) and text[end : end + 1] == whole[end]:
                end += 1
            pieces.append(whole[start:end])
            start = end
        return pieces


def check_file(path: Path):
    """Raise UserError if a model's file is empty, or a pointer of Git LFS."""
    with open(path, "rb") as file:
        start = file.read(40)
    if start.startswith(b"version https://git-lfs"):
        raise UserError(f"{path} is a pointer of Git LFS, not the file: run `git lfs pull`")
    if not start.strip():
        raise UserError(f"{path} is empty: download it again, or remove it")


HUB_FILES = [
    "*config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "*.jinja",
    "model*.safetensors*",
]


def locate_model(name: str) -> str:
    """The absolute folder of a model that is named by a folder, or by a repository of the Hub.

    Locks of the Hub's cache make one process of a node download, and the others wait.
    """
    name = os.path.expanduser(name)
    if not Path(name).is_dir():
        repository, _, revision = name.partition("@")
        with attempt(f"find a folder {name}, or this repository on the Hub"):
            name = snapshot_download(
                repository, revision=revision or None, allow_patterns=HUB_FILES
            )
    return os.path.abspath(name)


def load_config(folder: str) -> PretrainedConfig:
    with attempt(f"use {folder}/config.json"):
        for path in Path(folder).glob("*.json"):
            check_file(path)
        # Code that comes with a model is not run. By default transformers would ask on the terminal.
        return check_config(
            AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        )


def load_hf_checkpoint(path, head="lm") -> tuple[Transformer, PretrainedConfig]:
    """The model of a Hugging Face folder on the CPU, for use outside of a run.

    head="scalar": a critic or a reward model.
    """
    config = load_config(path)
    model = Transformer(config, head)
    load_weights(model, path)
    return model, config


def check_vocabulary(tokenizer: HFTokenizer, actors: HFTokenizer):
    """Raise UserError unless a model can read the ids of the actor's tokens."""
    if tokenizer.hf.get_vocab() != actors.hf.get_vocab():
        raise UserError(f"{tokenizer.folder}: its vocabulary is not that of the actor")


HEADS = "lm_head.weight", "score.weight"


def load_weights(model: Transformer, folder: str, needs_head: bool = True):
    """Fill `model`, which may be sharded, from the safetensors in `folder`.

    PyTorch's distributed checkpoint (DCP) reads them, because with it each rank reads its own
    shards alone. All ranks must call it. A head in the files that the model does not have is
    ignored. With needs_head=False the files may lack the model's head, which then keeps its
    weights.
    """
    weights = {name: p.detach() for name, p in model.named_parameters()}
    task = f"load the safetensors in {folder}"
    with attempt(task), tempfile.TemporaryDirectory() as links:
        # DCP's reader reads all safetensors of a folder. It gets a folder of links to those of the
        # model alone.
        for path in weight_files(Path(folder)):
            check_file(path)
            Path(links, path.name).symlink_to(path.absolute())
        reader = dcp.HuggingFaceStorageReader(links)
        in_files = reader.read_metadata().state_dict_metadata  # {name: metadata of a tensor}
        for name, metadata in in_files.items():
            if name not in weights and name not in HEADS and "rotary_emb" not in name:
                raise ValueError(f"the model has no {name}")
            if len(metadata.chunks) > 1:
                raise ValueError(f"{name} is in more than one file")
        if not needs_head:
            optional = [name for name in HEADS if name not in in_files]
            weights = {name: p for name, p in weights.items() if name not in optional}
        if missing := [name for name in weights if name not in in_files]:
            raise ValueError(f"the files lack {', '.join(missing[:3])}")
        # A tied model has no head of its own. If the files have one, it is loaded to be compared.
        has_spare_head = model.tied and "lm_head.weight" in in_files
        embedding = weights["model.embed_tokens.weight"]
        if has_spare_head:
            weights["lm_head.weight"] = torch.empty_like(embedding)
        dcp.load(weights, storage_reader=reader)
        if has_spare_head:
            if not torch.equal(full_tensor(weights["lm_head.weight"]), full_tensor(embedding)):
                raise ValueError(
                    "lm_head.weight differs from the embedding, to which config.json ties it: set "
                    "tie_word_embeddings to false there"
                )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a model: model.safetensors, or those in its index, or all of a folder."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index.is_file():
        return [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            "there are none. If the weights are in *.bin files, load them with "
            "AutoModelForCausalLM.from_pretrained and save them with save_pretrained"
        )
    return files


@torch.no_grad()
def copy_weights(source: Transformer, target: Transformer):
    """Copy the weights that both models have. If their heads differ, the head is left out.

    Either model may be sharded. All ranks must call it: one parameter after another is gathered on
    all ranks. The target's tensors stay in place, because CUDA graphs hold their addresses.
    """
    sources = dict(source.named_parameters())
    for name, p in target.named_parameters():
        if name in sources:
            whole = full_tensor(sources[name].to(p.dtype))
            if isinstance(p, DTensor):  # None: each rank cuts its shard from its own `whole`.
                whole = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
            p.copy_(whole)


def full_tensor(x: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded. If it is, all ranks must call this."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def save_hf_checkpoint(model: Transformer, tokenizer: HFTokenizer, path: Path):
    """Write a folder for transformers. A critic becomes a sequence classifier with one label."""
    weights = {}
    for name, p in model.named_parameters():
        whole = full_tensor(p.detach())  # All ranks must call it.
        if RANK == 0:
            weights[name] = whole.cpu()
    if RANK == 0:
        config = copy.deepcopy(model.config)
        config.dtype = weights["model.norm.weight"].dtype
        config.eos_token_id = tokenizer.stop_ids
        task = "CausalLM" if model.head == "lm" else "SequenceClassification"
        config.architectures = [f"{config.model_type.capitalize()}For{task}"]
        if model.head != "lm":
            config.num_labels = 1
            config.pad_token_id = tokenizer.pad_id  # transformers finds the last token by it
        rope = config.rope_parameters
        model_config = config.to_dict()
        model_config.pop("quantization_config", None)  # The weights are not quantized any longer.
        # Transformers 4 reads these names. Without them it would use its default of rope_theta.
        model_config["rope_theta"] = rope["rope_theta"]
        model_config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        partial = path.with_name(f"{path.name}.partial")
        with attempt(f"write {path}"):
            shutil.rmtree(partial, ignore_errors=True)
            tokenizer.hf.save_pretrained(partial)
            safetensors.torch.save_file(weights, partial / "model.safetensors", {"format": "pt"})
            write_json(partial / "config.json", model_config)
            tokenizer_config = read_json(partial / "tokenizer_config.json")
            # Transformers 4 reads these names alone. Transformers 5 reads them as well.
            special_tokens = tokenizer_config.pop("extra_special_tokens", [])
            tokenizer_config["additional_special_tokens"] = special_tokens
            tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
            write_json(partial / "tokenizer_config.json", tokenizer_config)
            shutil.rmtree(path, ignore_errors=True)  # an earlier export, now that this is complete
            partial.rename(path)
            print0(f"saved {path}")
    if dist.is_initialized():
        dist.barrier()


# === 8. Text environments ===
# A text environment is a gymnasium.Env whose observations and actions are text:
#
#     reset(seed=...) -> (prompt, info)
#     step(response) -> (text, reward, terminated, truncated, info)
#
# A prompt is text, which becomes a user message, or a list of messages with role and content. So is
# `text`, the next prompt if the episode goes on. `response` has no special tokens and no stop
# tokens. step also gets a response that was cut off. The episode then ends, even if step has a next
# prompt for it. A reward of None ends the episode as well, and none of its tokens are trained on.
#
# The same seed must always give the same prompt. Evaluations use the seeds from 0 on. Training uses
# consecutive seeds from a random one on, which is at least FIRST_TRAINING_SEED. An environment that
# knows its prompts may have an int `num_prompts`: the seeds below it must give all of them. Prompts
# that are too long are then found before the run begins.
#
# info may have these keys, all of them optional:
#
#     demonstration  of reset: an answer to learn in the warm start
#     success        of the last step: whether the sample counts as right in the accuracy
#     rewards        of a step: dense rewards in addition to `reward`, as pairs (end, reward), each
#                    for the token that completes response[:end]
#     metrics        of a step: {name: number}, whose means are logged
#
# truncated=True is final: the critic's value of what might have followed is not added to the
# rewards. Suppose that it were added. If gamma is 1 and every episode is cut off, the targets would
# then determine the values only up to a constant, and a network would drift. If a time limit is not
# part of the task, let the environment add an estimate of the missing reward to the last one.
#
# To use another task, write a reward function for Prompts-v0, or pass --env-id
# my_module:MyEnv-v0.


FIRST_TRAINING_SEED = 2**20


class SortDigits(gym.Env):
    """The answer to "52814=" is "12458". The reward is the share of digits in place.

    A response of another length than the answer has the reward 0.

    Demonstrations show the digits in random order, so that sorting is learned from the reward
    alone. A tenth of the prompts, chosen by CRC, is held out for evaluations.
    """

    def __init__(self, digits: int = 5):
        self.digits = digits

    def reset(self, *, seed=None, options=None):
        rng = random.Random(seed)
        held_out = seed < FIRST_TRAINING_SEED
        text = ""
        while not text or (zlib.crc32(text.encode()) % 10 == 0) != held_out:
            text = "".join(rng.choices("0123456789", k=self.digits))
        self.answer = "".join(sorted(text))
        return f"{text}=", {"demonstration": "".join(rng.sample(text, len(text)))}

    def step(self, response):
        right = sum(a == b for a, b in zip(response, self.answer))
        reward = right / self.digits if len(response) == self.digits else 0.0
        return "", reward, True, False, {"success": response == self.answer}


@functools.cache
def load_rows(path: str, convert: Callable) -> list[dict]:
    """The JSON objects of a file, one per line or in an array. Their order is shuffled once."""
    rows = []
    with attempt(f"read {path}, which must be text, with a JSON object on each line"):
        text = Path(path).read_text("utf-8-sig")
        lines = text.split("\n")
        if text.lstrip().startswith("["):
            lines = [json.dumps(row) for row in json.loads(text)]
    for i, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        with attempt(f"use line {i} of {path} (see docs/your_task.md)"):
            row = convert(json.loads(line))
            as_messages(row["prompt"])  # raises if it is malformed
            rows.append(row)
    if not rows:
        raise UserError(f"no rows in {path}")
    return random.Random(0).sample(rows, len(rows))


@functools.lru_cache(maxsize=2)
def shuffled_indices(n: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(n), n)


SHUFFLE_LOCK = threading.Lock()  # Only one thread computes an order that many need.


class Prompts(gym.Env):
    """Prompts from a file and, optionally, rewards from your own function, named by `reward`.

    Each line of the file has a "prompt" or "messages", text or a list of messages. It may have a
    "demonstration", and other keys for the function. The function my_module:reward is called as
    reward(prompt, response, row=row), from many threads at the same time. It returns a number,
    or a tuple of a number and, in any order, whether the sample is a success (a bool) and metrics
    (a dictionary of numbers). Without a bool, a number above 0 is a success. None in place of the
    number means that the sample is not trained on. The function may be a coroutine function.
    """

    def __init__(self, path: str, reward: str | None = None):
        self.rows = load_rows(str(path), self.convert)
        self.num_prompts = len(self.rows)
        if reward:
            if ":" not in str(reward):
                raise UserError(f"the reward function {reward!r} must be 'my_module:my_function'")
            with attempt(f"import the reward function {reward}", CodeError):
                self.reward = pkgutil.resolve_name(reward)  # It takes the place of the method.
            with attempt(f"call {reward} as reward(prompt, response, row=row)"):
                with contextlib.suppress(ValueError):  # Some functions in C have no signature.
                    signature = inspect.signature(self.reward, follow_wrapped=False)
                    signature.bind("", "", row={})

    @staticmethod
    def convert(row):
        if "prompt" not in row and "messages" not in row:
            raise ValueError(f'neither "prompt" nor "messages" is among its keys: {[*row]!r:.200}')
        return row if "prompt" in row else row | {"prompt": row["messages"]}

    def row_index(self, seed: int) -> int:
        """The index of the row that a seed selects. Every pass of training shuffles the rows anew.

        A pass is as many consecutive seeds as there are rows. Training begins with a whole pass. If
        there were 7 rows, and FIRST_TRAINING_SEED were 10:

            seeds 0 ... 9       evaluations: rows 0 to 6, then rows 0 to 2 again
            seeds 14 ... 20     training, pass 2: the 7 rows in a random order
            seeds 21 ... 27     training, pass 3: the 7 rows in another random order

        Here training begins with pass 2, the first whole one. In a run its first pass is random
        (first_training_seed). A file may have more rows than FIRST_TRAINING_SEED. The seeds of pass
        0 then give its rows in order, and training begins with pass 1 or a later one.
        """
        pass_index, i = divmod(seed, self.num_prompts)
        if seed < FIRST_TRAINING_SEED or pass_index == 0:
            return i
        with SHUFFLE_LOCK:
            return shuffled_indices(self.num_prompts, pass_index)[i]

    def reset(self, *, seed=None, options=None):
        self.row = copy.deepcopy(self.rows[self.row_index(seed)])
        return self.row["prompt"], self.row

    def step(self, response):
        reward = self.reward(self.row["prompt"], response, row=self.row)
        if asyncio.iscoroutine(reward):
            reward = asyncio.run(reward)
        info = {}
        if isinstance(reward, tuple):
            reward, *extras = reward
            info = {"metrics" if isinstance(x, dict) else "success": x for x in extras}
        return "", reward, True, False, info

    def reward(self, prompt, response, row):
        return 0.0  # for runs in which a reward model gives all rewards


def parse_number(text: str) -> float | None:
    r"""The number in the last `\boxed{}` or, without a box, the last number after `####`.

    A dollar sign or `x =` may stand before it, a unit or a percent sign after it. They are ignored.
    Commas or spaces may separate thousands, LaTeX's as well: 8{,}000, 8,\!000, 8\,000. Everything
    else is None and not another number: 5/6, 10^6, 2\frac{1}{2}, 2 million, 1 or 2, and a heading
    such as "#### 1. Check".
    """
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[,;: ]|~", " ", text.replace("{,}", ",").replace("\N{MINUS SIGN}", "-"))
    # Remove \!, dollar signs, the backslash of \% and the exponent of a unit, as in m^2.
    text = re.sub(r"\\!|\\?\$|\\(?=%)|(?<=[a-z])\^(?:[23]|\{[23]\})", "", text)
    # `++` and `(?>...)` never give back what they matched. Otherwise a thousand digits would be
    # tried in many ways. A number may have a minus, separators of thousands, and decimals.
    number = r"(?>-?\s*(?:\d{1,3}(?:[,\s]\d{3})+|\d*)(?:\.\d+)?)(?<=\d)"
    # Words that change the number, such as "million", are no unit. Other words are one, as long as
    # no digit and no backslash follows them.
    factor = r"[knxyM]\b|.*(?:half|dozen|hundred|thousand|illion)"
    unit = rf"[\s%]*+(?!{factor})[A-Za-z(][^\d\\]*"
    # A box with braces inside, or one that is not closed, gives "", which is no number.
    boxes = re.findall(r"\\boxed\{(?!\})(?:([^{}]*+)\})?", text)
    parts = boxes[-1:] or re.findall(r"####\s*+([^\n#]*)", text)
    # All of a part must be: words and "=", which may be missing, the number, punctuation or a unit.
    pattern = rf"(?:[A-Za-z ]++=\s*)?({number})(?:[\s.,*%]*|{unit})"
    found = [match[1] for part in parts if (match := re.fullmatch(pattern, part.strip()))]
    return float(re.sub(r"[,\s]", "", found[-1])) if found else None


class GSM8K(Prompts):
    """Word problems of https://github.com/openai/grade-school-math, reward 1 if right."""

    @staticmethod
    def convert(row):
        if parse_number(row["answer"]) is None:
            raise ValueError("no '#### number' in the answer")
        task = "Please reason step by step, and put your final answer within \\boxed{}."
        return row | {"prompt": f"{row['question']}\n\n{task}", "demonstration": row["answer"]}

    def reward(self, prompt, response, row):
        success = parse_number(response) == parse_number(row["answer"])
        return float(success), success


gym.register("SortDigits-v0", entry_point=SortDigits)
gym.register("Prompts-v0", entry_point=Prompts)
gym.register("GSM8K-v0", entry_point=GSM8K)

ENV_TIMEOUT = 600  # seconds without an answer from any environment, after which a turn fails


def start_threads(count: int) -> ThreadPool:
    """A thread for each of `count` environments, but at most 256 threads.

    Most threads wait, for example for a judge model.
    """
    count = min(count, 256)
    with attempt(f"start {count} threads for environments: see ulimit -u, or --rollout-slots"):
        try:
            threads = ThreadPool(count, set_up_thread, (False,))
        except OSError as error:
            raise UserError(
                "cannot make the semaphores of a ThreadPool, which are files in /dev/shm: it must "
                f"exist, be writable, and have space left: {type(error).__name__}: {error}"
            ) from error
    return threads  # They are daemons: one that hangs does not keep the process alive.


env_threads = functools.cache(start_threads)  # All turns of a run share them. `train` ends them.
atexit.register(env_threads.cache_clear)  # for code that calls `rollout` without `train`


def set_up_thread(gradients: bool):
    """Restore thread and process settings that user code may have changed.

    Gradients and GPU are settings of a thread. The default dtype is one of the process.
    """
    torch.set_grad_enabled(gradients)
    torch.set_default_dtype(torch.float32)
    if torch.cuda.is_initialized():
        torch.cuda.set_device(LOCAL_RANK)


def as_messages(text) -> list[dict]:
    """Text becomes a user message. Messages are checked: the last one is not the assistant's.

    The result has copies of messages, because an environment may change its own later.
    """
    if isinstance(text, str):
        text = [{"role": "user", "content": text}]
    if not isinstance(text, list | tuple):
        raise TypeError(f"neither text nor a list of messages: {text!r:.80}")
    for message in text:
        for part in (message["role"], message["content"]):
            if not isinstance(part, str):
                raise TypeError(f"{message!r:.80}: role and content must be text")
            part.encode()  # This raises an error if half of a surrogate pair is in it.
    if not text or text[-1]["role"] == "assistant":
        raise ValueError(
            "there must be a message, and the last one must not be the assistant's, because the "
            "model writes that one"
        )
    return list(map(copy.copy, text))


def checked_reset(env: gym.Env, seed: int) -> tuple[list[dict], dict]:
    """Reset an environment. Returns the prompt as messages, and info."""
    with attempt(f"reset the environment with seed {seed}", CodeError):
        result = env.reset(seed=seed)
        torch.set_default_dtype(torch.float32)  # User code may have set another one.
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"reset must return a tuple (prompt, info), not {result!r:.80}")
        prompt, info = result
        f"{info.get('demonstration', '')}".encode()  # as in as_messages
        return as_messages(prompt), info


def checked_step(env: gym.Env, response: str) -> tuple[list[dict], float | None, str, dict]:
    """Step an environment. Returns messages, reward, "terminated", "truncated" or "", and info."""
    result = env.step(response)
    torch.set_default_dtype(torch.float32)  # User code may have set another one.
    if not isinstance(result, tuple) or len(result) != 5:
        raise TypeError(
            "step must return a tuple (message, reward, terminated, truncated, info), "
            f"not {result!r:.80}"
        )
    text, reward, terminated, truncated, info = result
    flags = terminated, truncated, info.get("success", False)
    if not all(flag in (True, False) for flag in flags):
        raise ValueError(
            f"terminated, truncated and success must be True or False, not {flags!r:.200}"
        )
    end = "terminated" if terminated else "truncated" if truncated else ""
    return [] if end or reward is None else as_messages(text), reward, end, info


def to_float(x, name: str) -> float:
    """A finite number, which may be one of numpy or torch, as a float."""
    if not hasattr(x, "__float__") or not math.isfinite(x):
        raise ValueError(f"{name} must be a finite number, not {x!r:.80}")
    return float(x)


def play_turn(method: Callable, episode: Episode, *args):
    """Call a method of the episode. An error of the environment then names seed and message."""
    messages = episode.conversation[-1:]  # Before `reset` there are none.
    with attempt(f"play the episode with seed {episode.env_seed}: {messages!r:.200}", CodeError):
        method(episode, *args)


def add_rewards(episode: Episode, reward, info, start, tokenizer):
    """Add the rewards of a step to the tokens of its response, those from `start` on.

    `reward` goes to the last token. info["rewards"] has pairs (end, reward), each for the token
    that completes response[:end].
    """
    ids = episode.ids[start:]
    response = tokenizer.decode(ids)
    episode.rewards[-1] += to_float(reward, "the reward of a step")
    for end, part in info.get("rewards", ()):
        if not 1 <= end <= len(response):
            raise ValueError(f"info['rewards']: {end} is not within the response {response!r:.80}")
        # The first token after which the text has response[:end]. A binary search finds it with few
        # calls of `decode`.
        index = bisect.bisect_left(
            range(len(ids)),
            True,
            key=lambda i: tokenizer.decode(ids[: i + 1]).startswith(response[:end]),
        )
        episode.rewards[start + index] += to_float(part, "a number in info['rewards']")
    for name, x in info.get("metrics", {}).items():
        episode.metrics[str(name)] = to_float(x, f"the metric {name!r}")


def decoder_rows(args) -> int:
    """Number of rows of a rank's decoder, at most --rollout-slots.

    A rank plays its share of a rollout in as few waves as possible. The waves are
    about equally large.
    """
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    share = -(-samples // WORLD_SIZE)  # of a rank, rounded up
    waves = -(-share // args.rollout_slots)
    return -(-share // waves)


@contextlib.contextmanager
def make_envs(args, evaluation: bool = False) -> Iterator[list[gym.Env]]:
    """This rank's environments for rollouts, or for evaluations. They are closed at the end."""
    count = decoder_rows(args) if args.eval_episodes or not evaluation else 0
    flags = f"--env-id {args.env_id} --env-kwargs {args.env_kwargs}"
    if evaluation:
        flags += f" --eval-env-kwargs {args.eval_env_kwargs}"
    with attempt(f"read the JSON of {flags}"):
        kwargs = json.loads(args.env_kwargs)
        if evaluation:
            kwargs |= json.loads(args.eval_env_kwargs)
    envs = []
    if not evaluation:
        load_rows.cache_clear()  # An earlier run of this process may have read an older version.
    try:
        with attempt(f"make the environment of {flags}", CodeError):
            if args.env_id == "Prompts-v0" and not (kwargs.get("reward") or args.reward_model):
                raise UserError(
                    "Prompts-v0: nothing gives rewards. Add --reward-model, or a reward function "
                    'in --env-kwargs, "reward": "my_module:my_function"'
                )
            for _ in progress_bar(range(count), "environments"):
                envs.append(gym.make(args.env_id, disable_env_checker=True, **kwargs))
        set_up_thread(gradients=True)
        yield envs
    except BaseException:
        with contextlib.suppress(UserError):  # The first error is the one to show.
            close_envs(envs)
        raise
    close_envs(envs)


def close_envs(envs: list[gym.Env]):
    """Close all environments, side by side. Then raise the first error."""
    if envs:
        threads = start_threads(len(envs))  # The threads of env_threads may hang.
        try:
            with attempt("close the environments", CodeError):
                threads.map_async(lambda env: env.close(), envs, chunksize=1).get(ENV_TIMEOUT)
        finally:
            threads.close()


def env_attribute(env: gym.Env, name: str, kind: type):
    """An attribute of the environment. One of another kind is not ours, and counts as None."""
    x = getattr(env.unwrapped, name, None)
    return x if isinstance(x, kind) else None


def check_prompts(envs: list[gym.Env], tokenizer: HFTokenizer, args):
    """Reject prompts that are too long, where the environment says how many it has."""
    for env in envs:
        for seed in progress_bar(range(env_attribute(env, "num_prompts", int) or 0), "prompts"):
            Episode(seed).begin(env, tokenizer, args)


# === 9. Statistics, evaluation, diagnosis ===


class Clock:
    """Seconds that the phases of an iteration take."""

    def __init__(self):
        self.last = time.monotonic()
        self.phases = {}

    def end(self, phase: str):
        now = time.monotonic()
        self.phases[phase] = now - self.last
        self.last = now


def sum_over_ranks(stats: list[dict[str, Tensor]]) -> dict[str, float]:
    """Sum statistics over the microbatches of all ranks. Here the host waits for the device."""
    numbers = torch.stack([torch.stack(list(of_mb.values())) for of_mb in stats])  # [mbs, names]
    sums = all_reduce(numbers.detach().double().sum(0))
    return dict(zip(stats[0], sums.tolist()))


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(return - value) / Var(return), of tensors [m].

    It is 1 if the values predict the returns up to a constant, 0 for values that are all the same.
    """
    if not len(returns):
        return math.nan
    variance = returns.var(correction=0)
    explained = 1 - (returns - values).var(correction=0) / variance
    return float(explained) if variance > 1e-10 else math.nan


def evaluate(decoder, tokenizer, reward_model, envs, iteration, args) -> dict[str, float]:
    """Play episodes at temperature 1, and play them again greedily. Prints and returns the means.

    Of the greedy episodes it returns the accuracy alone. The reward does not contain
    --truncation-penalty.
    """
    if args.eval_episodes == 0:
        return {}
    noise = -1 - iteration  # It is negative, so that the noise is not that of a rollout.

    def play_at(temperature):
        settings = dataclasses.replace(args, temperature=temperature)
        return rollout(decoder, tokenizer, envs, range(args.eval_episodes), noise, settings)

    sampled, greedy = play_at(1.0), play_at(0.0)
    if reward_model:
        set_scores(sampled, reward_model, args)
    greedy_accuracy = episode_means(greedy)["accuracy"]
    result = episode_means(sampled) | {"greedy_accuracy": greedy_accuracy}
    numbers = ", ".join(f"{name} {round(x, 4)}" for name, x in result.items())
    print0(f"after {iteration} iterations: {numbers}")
    return result


def episode_means(episodes: list[Episode], prefix="") -> dict:
    """Means that are logged of a rollout and of an evaluation.

    Those of info["metrics"] are called env/<name>. Samples without a reward count in `unscored`
    alone.
    """
    scored = [e for e in episodes if e.stop != "unscored"]
    N = max(1, len(scored))
    result = {
        f"{prefix}reward": sum(sum(e.rewards) + e.score for e in scored) / N,
        f"{prefix}accuracy": sum(e.success for e in scored) / N,
        f"{prefix}response_tokens": sum(sum(e.mask) for e in scored) / N,
        f"{prefix}truncated": sum(e.stop != "terminated" for e in scored) / N,
        f"{prefix}unscored": 1 - len(scored) / len(episodes),
        f"{prefix}reward_model": sum(e.score for e in scored) / N,
    }
    for name in sorted({name for e in scored for name in e.metrics}):
        values = [e.metrics[name] for e in scored if name in e.metrics]
        result[f"env/{name}"] = sum(values) / len(values)
    return result


def special_token_share(episodes: list[Episode], tokenizer: HFTokenizer) -> float:
    """Share of the scored samples in which special tokens were sampled other than stop tokens.

    A stop token ends its response. Rewards do not see special tokens, since `decode` leaves them
    out.
    """
    special = tokenizer.special_ids
    scored = [e for e in episodes if e.stop != "unscored"]
    found = [any(i in special for i, sampled in zip(e.ids, e.mask) if sampled) for e in scored]
    return sum(found) / max(1, len(scored))


def iteration_metrics(
    episodes, experience, tokenizer, actor_step_stats, critic_step_stats, evaluation, clock
) -> dict:
    """All that is logged of an iteration, except for the diagnosis of the ratio."""
    e, mask = experience, experience.mask
    scored = mask.any(1)
    env_rewards = torch.tensor([sum(episode.rewards) for episode in episodes])
    metrics = episode_means(episodes, "objective/") | {
        # This replaces the reward of episode_means. In addition it contains --truncation-penalty.
        # Neither contains the KL.
        "objective/reward": float(masked_mean(e.rewards.sum(1), scored)),
        # of the environment alone, as the episodes were played
        "objective/env_reward": float(masked_mean(env_rewards, scored)),
        "objective/entropy": -float(masked_mean(e.old_logprobs, mask)),
        "objective/kl": float(masked_mean((e.old_logprobs - e.ref_logprobs).sum(1), scored)),
        "objective/special_tokens": special_token_share(episodes, tokenizer),
        "critic/explained_variance": explained_variance(e.values[mask], e.returns[mask]),
        "critic/value_mean": float(masked_mean(e.values, mask)),
        "critic/return_mean": float(masked_mean(e.returns, mask)),
        "critic/first_dev": critic_step_stats[0]["value_dev"] if critic_step_stats else 0.0,
        "time/iteration": sum(clock.phases.values()),
        "perf/peak_memory_bytes": torch.cuda.max_memory_allocated(),
        "debug/sampler_trainer_logprob_diff": sampler_gap(experience),
        "ratio/steps": actor_step_stats,  # a list, for metrics.jsonl alone
    }
    for prefix, numbers in (("eval", evaluation), ("time", clock.phases)):
        metrics |= {f"{prefix}/{name}": value for name, value in numbers.items()}
    metrics |= {name: float(x) for name, x in experience.metrics.items()}
    for model, steps in (("actor", actor_step_stats), ("critic", critic_step_stats)):
        for name in steps[0] if steps else ():
            metrics[f"{model}/{name}"] = sum(step[name] for step in steps) / len(steps)
    return metrics


LOGGED_SAMPLES = 4  # of each iteration
LOGGED_BYTES = 2**19  # about the most that is written to tokens.jsonl in an iteration


def logged_samples(episodes: list[Episode], experience: Experience) -> list[dict]:
    """The first samples of a rollout, for completions.jsonl."""
    samples = []
    rewards = experience.rewards.sum(1).tolist()
    for episode, reward in zip(episodes[:LOGGED_SAMPLES], rewards):
        texts = [message["content"] for message in episode.conversation]
        n = episode.prompt_messages
        samples.append({
            "prompt": "\n".join(texts[:n]),
            "response": "\n".join(texts[n:]),  # with the messages between the turns
            "stop": episode.stop,
            "reward": None if episode.stop == "unscored" else reward,
            "n_tokens": sum(episode.mask),
        })
    return samples


def logged_tokens(episodes, experience, trained, actor, tokenizer, args) -> list[dict]:
    """The rows of tokens.jsonl: a few samples, with what was computed for each of their tokens.

    They are the samples of completions.jsonl and the one with the lowest reward. `ids`, `text`,
    `mask` and `trained` have an item for each token. The lists of `tensors` have one for each token
    of the mask. These are all tensors [N, T] of floats in the experience, and the log-probs of the
    actor after the updates. Of a sample that is too long, tokens in the middle are left out.
    """
    mask, rewards = experience.mask, experience.rewards.sum(1)
    lowest = torch.where(mask.any(1), rewards, math.inf).argmin()
    # Rank 0 chooses for all. If rounding made the ranks choose differently, they would hang below.
    lowest = int(all_reduce((lowest * (RANK == 0)).to(args.device)))
    rows = list(range(min(LOGGED_SAMPLES, len(episodes))))
    rows += [lowest] if lowest not in rows else []
    new_logprobs = logprobs_of_all(actor, experience, [torch.tensor(rows)], args)
    tensors = {
        name: x
        for name, x in (vars(experience) | {"new_logprobs": new_logprobs}).items()
        if isinstance(x, Tensor) and x.shape == mask.shape and x.is_floating_point()
        and not x[mask].isnan().all()  # as the reference's are if there is none
    }  # fmt: skip
    per_token = 30 + 11 * len(tensors)  # bytes: text, id and masks, and up to 11 for a number
    room = LOGGED_BYTES // (len(rows) * per_token)  # number of tokens of a sample
    samples = []
    for row in rows if RANK == 0 else ():
        ids, in_mask = episodes[row].ids, mask[row].tolist()
        # A fork may train on a selection of the samples, or with a smaller mask.
        same = trained.sample_ids == experience.sample_ids[row]
        is_trained = trained.mask[same].any(0).tolist()
        cut = max(0, len(ids) - room)  # number of tokens that are left out
        head = room // 2 if cut else len(ids)
        kept = [*range(head), *range(head + cut, len(ids))]
        sampled = [i for i in kept if in_mask[i]]
        samples.append({
            "sample": row,
            "chosen": "lowest reward" if row >= LOGGED_SAMPLES else None,
            "stop": episodes[row].stop,
            "reward": None if episodes[row].stop == "unscored" else float(rewards[row]),
            "response_starts": episodes[row].response_starts,
            "left_out": [head, head + cut] if cut else None,  # the first, and the first after them
            "ids": [ids[i] for i in kept],
            "text": tokenizer.pieces(ids[:head]) + tokenizer.pieces(ids[head + cut :]),
            "mask": [int(in_mask[i]) for i in kept],
            "trained": [int(is_trained[i]) for i in kept],
            "tensors": {k: six_digits(x[row][sampled].tolist()) for k, x in tensors.items()},
        })
    return samples


def six_digits(numbers: list[float]) -> list[float | str]:
    """Rounded numbers. NaN and infinity, which JSON does not have, become "nan" and "inf"."""
    return [float(f"{x:.6g}") if math.isfinite(x) else str(x) for x in numbers]


ADVICE = {  # by the cause of a ratio that stays at 1, or does not begin there
    "critic_warmup": "see --critic-warmup-iterations",
    "empty_mask": "no token is trained on. Are all rewards None, since the reward function returns "
    "nothing? If not, check --max-new-tokens, the mask and the choice of samples",
    "forward_mismatch": "dropout? shifted mask? another temperature? samples of an earlier policy?",
    "kl_early_stop": "raise --target-kl or lower --actor-lr",
    "no_step": "no step was taken: were there minibatches?",
    "steps_skipped": "gradients are not finite: large rewards? NaN in log-probs?",
    "bf16_underflow": "updates are rounded away: keep the weights in float32",
    "one_update_by_design": "this is correct; with more epochs or minibatches the ratio moves",
    "advantage_zero": "all advantages are equal: is the reward constant, or did a change of "
    "make_experience make them equal?",
    "no_grad_to_actor": "detached log-probs or frozen parameters",
    "optimizer_noop": "the optimizer does not hold the actor's parameters",
    "lr_or_clip_too_small": "raise --actor-lr or --max-grad-norm",
    "old_logprob_recomputed": "the old log-probs are computed again after each step. Compute them "
    "once, before the first update. In bfloat16 a forward pass that runs a stale copy of the model "
    "looks the same",
    "forward_ignores_update": "the forward pass runs a stale copy of the model",
}


def sampler_gap(e: Experience) -> float:
    """Mean distance of the log-probs of sampler and trainer, in nats."""
    return float(masked_mean((e.sampler_logprobs - e.old_logprobs).abs(), e.mask))


def sampler_tolerance(args) -> float:
    """The sampler_gap that rounding explains.

    Seen in float32: up to 6e-6. In bfloat16: up to 0.04 with pretrained models, 0.05 with random
    ones. A log-prob that is shifted by one token is off by 0.9.
    """
    tolerance = 0.1 if args.dtype == "bfloat16" else 1e-4
    return tolerance / min(1.0, args.temperature)  # Logits are divided by it, with their rounding.


def diagnose_ratio(
    actor, experience, steps, early_stop, relative_update, same_microbatches, state, args
) -> dict:
    """The metrics ratio/...: how far the ratio was from 1 and, if it stayed there, why.

    make_experience scores the samples in microbatches. If the first epoch has the
    `same_microbatches`, the ratio of its first minibatch is exactly 1 (see make_experience). The
    other minibatches of the first epoch have the ratio 1 as well, until a step changes the actor.
    In later epochs the microbatches differ, and rounding alone moves the ratio.
    """
    measured = steps or [early_stop or {"ratio_dev": 0.0}]  # statistics of minibatches
    first_dev = measured[0]["ratio_dev"]  # mean |ratio - 1| of the first minibatch
    n_first = len(minibatch_rows(experience, 0, state, args))  # minibatches of the first epoch
    # Later epochs round differently, so only the first one is judged. If it is one minibatch, its
    # ratio is 1 in any case, and all epochs are judged. In bfloat16 rounding then counts as a move,
    # and a ratio that stays at 1 may go unnoticed.
    judged = measured[:n_first] if n_first > 1 else measured
    taken = [step for step in steps if not step["skipped"]]
    lr = steps[-1]["lr"] if steps else 0.0
    # The change of the weights is measured on the sampler. In bfloat16 small changes vanish there.
    bf16 = args.dtype == "bfloat16"
    tolerance = sampler_tolerance(args)
    gap = sampler_gap(experience)
    # The ratio has moved if in one of the judged minibatches the mean |ratio - 1| is NaN, or more
    # than twice what rounding explains. Rounding explains first_dev, and at least 1e-7. In float32
    # it also explains the gap, up to the tolerance. In bfloat16 the gap is so large that it would
    # hide a real move.
    # In float32, first_dev 0 and a gap of 2e-6 give a rounding of 2e-6, so 5e-6 is a move.
    rounding = max(first_dev, 1e-7, 0.0 if bf16 else min(gap, tolerance))
    moved = not all(step["ratio_dev"] <= 2 * rounding for step in judged)
    # The first cause that holds is reported. These come before the question whether the ratio has
    # moved. kl_early_stop comes before no_step, since a stop at the first minibatch makes no step.
    causes = {
        "critic_warmup": state.iteration < args.critic_warmup_iterations,
        "empty_mask": not experience.mask.any(),
        "forward_mismatch": args.recompute_old_logprobs
        and first_dev > (1e-6 if same_microbatches else tolerance),
        "kl_early_stop": early_stop and not moved,
        "no_step": not steps,
        "steps_skipped": not taken,
    }
    if not moved:  # These explain a ratio that stays at 1.
        causes |= {
            "bf16_underflow": next(actor.parameters()).dtype != torch.float32,
            "advantage_zero": not experience.advantages.any(),
            "no_grad_to_actor": all(step["grad_norm"] == 0 for step in taken),
            "optimizer_noop": relative_update == 0 and lr > (1e-7 if bf16 else 1e-10),
            "one_update_by_design": len(steps) == 1 and relative_update > 0,
            "lr_or_clip_too_small": relative_update < (1e-4 if bf16 else 1e-6),
            # The sampler has the actor's earlier updates. If the actor's forward pass ignores them,
            # its log-probs differ from the sampler's.
            "forward_ignores_update": gap > tolerance,
            # This is what remains. In the first iteration of the actor the sampler has no earlier
            # updates, so that a forward pass that ignores updates would look the same.
            "old_logprob_recomputed": args.recompute_old_logprobs
            and state.actor_steps > len(steps),
        }
    return {
        "ratio/first_dev": first_dev,
        "ratio/last_dev": measured[-1]["ratio_dev"],
        "ratio/relative_update": relative_update,  # of the weights, in the sampler's precision
        "ratio/advantage_std": experience.advantage_std,
        "ratio/early_stop_kl": early_stop and early_stop["approx_kl"],  # at which the epochs ended
        "ratio/diagnosis": next((cause for cause, holds in causes.items() if holds), None),
    }


def check_iteration(
    metrics, episodes, experience, actor_step_stats, critic_step_stats, same_microbatches,
    plan, state, args,
):  # fmt: skip
    """Raise UserError if an iteration shows that a change of the code is wrong.

    In every iteration all episodes have ended, no more steps were made than the plan has, and a
    loss has no more tokens than denom. When PPO begins, the first ratio is 1, the first KL is 0,
    and the first values of the critic are the old ones, because each pair is computed by the same
    weights in the same microbatches. Later in a run, find_mistakes warns of such a ratio or value,
    so that a long run goes on.
    """
    if not all(episode.stop for episode in episodes):
        raise UserError("an episode has not ended: its `stop` is empty")
    for model, steps, planned in (
        ("actor", actor_step_stats, plan.update_steps),
        ("critic", critic_step_stats, plan.critic_steps),
    ):
        if len(steps) > planned:
            raise UserError(f"{len(steps)} steps of the {model}, but plan_steps says {planned}")
        if any(step.get("token_share", 1) > 1.001 for step in steps):
            raise UserError(
                f"the {model}'s loss: denom must be the number of tokens of the whole minibatch"
            )
    # All steps that the actor has ever made are those of this iteration, or there were none yet.
    is_first = state.actor_steps == len(actor_step_stats)
    mismatch = metrics["ratio/diagnosis"] == "forward_mismatch"
    if is_first and same_microbatches and mismatch:
        raise UserError(
            "the first ratio of the run is not 1: |ratio - 1| is "
            f"{metrics['ratio/first_dev']:.2g} on average: {ADVICE['forward_mismatch']}"
        )
    kl = (experience.old_logprobs - experience.ref_logprobs).abs()
    kl = float(masked_mean(kl, experience.mask))  # NaN without a reference
    if is_first and args.recompute_old_logprobs and kl > 1e-6:
        raise UserError(
            "when PPO begins, the actor is the reference, but old_logprobs and ref_logprobs are "
            f"{kl:.2g} nats apart on average: another temperature? samples of another policy?"
        )
    is_first = state.critic_steps == len(critic_step_stats)
    tolerance = value_tolerance(experience, same_microbatches, args)
    if is_first and same_microbatches and metrics["critic/first_dev"] > tolerance:
        raise UserError(
            "the first values of the critic are not those of the experience, but "
            f"{metrics['critic/first_dev']:.2g} away on average: {CRITIC_ADVICE}"
        )


CRITIC_ADVICE = "does make_experience change them, or do the updates run another forward pass?"


def value_tolerance(experience: Experience, same_microbatches: bool, args) -> float:
    """Mean distance of the first values from the old ones that rounding explains."""
    rounding = 1e-6 if same_microbatches else sampler_tolerance(args)
    return rounding * max(1.0, float(experience.values.abs().max()))


def some_weights(model: Transformer) -> Tensor:
    """A copy of up to 16,384 elements of every weight, in one tensor."""
    return torch.cat([p.detach().flatten()[:: 1 + p.numel() // 2**14] for p in model.parameters()])


def update_sampler(actor: Transformer, sampler: Transformer) -> float:
    """Give the sampler the actor's weights. Returns the relative change of some of them."""
    before = some_weights(sampler)
    copy_weights(actor, sampler)
    after = some_weights(sampler)
    return float((after - before).double().norm() / after.double().norm())


def find_mistakes(
    metrics: dict, experience: Experience, same_microbatches: bool, args
) -> Iterator[str]:
    """Warnings. The caller prints each text once in a run."""
    cause = metrics["ratio/diagnosis"]
    if cause:
        yield f"  ratio: {cause}: {ADVICE[cause]}"
    if metrics.get("critic/skipped"):
        yield "  critic: steps are skipped, since gradients are not finite"
    if metrics["critic/first_dev"] > value_tolerance(experience, same_microbatches, args):
        yield f"  critic: its first values are not those of the experience: {CRITIC_ADVICE}"
    for model in "actor", "critic":
        share = metrics.get(f"{model}/token_share", 1)
        if share < 0.999:
            yield (
                f"  {model}: its loss has fewer tokens than denom ({model}/token_share). "
                f"The gradient and {model}/* are means over all of these tokens. To leave tokens "
                "out, replace the mask of the samples that `minibatches` gets"
            )
    # With --no-recompute-old-logprobs the sampler's log-probs are the old ones. Then only the first
    # ratio compares the sampler with the actor.
    gap = "debug/sampler_trainer_logprob_diff" if args.recompute_old_logprobs else "ratio/first_dev"
    if metrics[gap] > sampler_tolerance(args):
        yield (
            "  sampler: its log-probs differ from the actor's by more than rounding explains "
            f"({gap}): does it have the actor's weights and temperature?"
        )


# === 10. Errors, flags, ranks, models ===

# torchrun sets these variables.
RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


class UserError(ValueError):
    """An error that the user can fix. It is printed without a traceback. The exit code is 2."""


class CodeError(UserError):
    """An error in the user's code, such as a reward function. Its traceback is printed as well."""

    def has_traceback(self) -> bool:
        """Whether there is code of the user in it, not only this script, gymnasium and Python."""
        known = {__name__, "gymnasium", *sys.stdlib_module_names}
        error, modules = self.__cause__, set()
        while error:
            for frame, _ in traceback.walk_tb(error.__traceback__):
                modules.add(frame.f_globals.get("__name__", "").partition(".")[0])
            error = error.__cause__ or error.__context__
        return bool(modules - known)


@contextlib.contextmanager
def attempt(task: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Turn exceptions into a UserError that says which task failed, and how."""
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # A reward function may call sys.exit.
        if isinstance(error, dcp.api.CheckpointException):
            error, _ = next(iter(error.failures.values()))  # the error of one rank
        text = " ".join(f"{error}".split())  # in one line
        raise kind(f"cannot {task}: {type(error).__name__}: {text:.300}") from error


# Rank 0 shows it, on a terminal, after a second.
progress_bar = functools.partial(tqdm, leave=False, delay=1.0, disable=RANK > 0 or None)


def print0(text: str):
    if RANK == 0:
        # Letters that the encoding of stdout lacks are written in ASCII, as in \xe9.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        with contextlib.suppress(OSError, ValueError):  # stdout may be closed.
            print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def fill_in_defaults(args: Args) -> Args:
    """Check the flags, and return a copy in which defaults that depend on others are filled in.

    This joins the ranks first, because the default of --dtype depends on the GPU of this rank. The
    models are located here, because the default of --critic-lr depends on the size of the critic.
    """
    args = dataclasses.replace(args)
    for name, defaults in DEFAULTS_BY_MODEL.items():
        if getattr(args, name) is None:
            setattr(args, name, defaults[bool(args.model)])
    if args.critic_epochs is None:
        args.critic_epochs = args.ppo_epochs
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.compile == "auto":
        args.compile = "on" if args.device == "cuda" else "off"
    # User code may change the working directory.
    args.log_dir = args.log_dir and os.path.abspath(os.path.expanduser(args.log_dir))
    if args.resume and args.resume != "auto":
        args.resume = os.path.abspath(os.path.expanduser(args.resume))
    check_flags(args)
    connect(args)
    is_old_gpu = args.device == "cuda" and torch.cuda.get_device_capability() < (8, 0)
    if args.dtype == "auto":
        args.dtype = "float32" if args.device == "cpu" or is_old_gpu else "bfloat16"
    if args.dtype == "bfloat16" and is_old_gpu:
        raise UserError("--dtype bfloat16: this GPU, from before Ampere, has no bfloat16")
    configure_torch(args)

    for flag in ("model", "critic_model", "reward_model"):
        if getattr(args, flag):
            setattr(args, flag, locate_model(getattr(args, flag)))
    if args.critic_lr is None:
        # The head starts at zero, and a step of Adam moves each of its weights by the rate. The
        # elements of the hidden state are about as large as the weights of the last norm, which
        # are 1 in the built-in model. There a step moves a value by up to about rate * hidden_size,
        # which is 0.064. Pretrained norms may have larger weights: see docs/design.md.
        folder = args.critic_model or args.model
        args.critic_lr = 0.064 / (load_config(folder).hidden_size if folder else EMBEDDED_WIDTH)
    return args


EMBEDDED_WIDTH = 64  # hidden_size of the default model
NOT_ZERO = (
    "temperature", "rollout_slots", "rollout_batch_size", "n_samples_per_prompt",
    "train_batch_size", "max_new_tokens", "max_grad_norm")  # fmt: skip
AT_MOST_ONE = "gamma", "gae_lambda", "critic_lambda", "clip_low", "lr_end"


def check_flags(args):
    """Raise UserError, which names the flag, its value and what is valid."""
    for name, value in vars(args).items():
        if value == "":
            raise UserError(
                f"--{name.replace('_', '-')} is empty: is a variable of the shell unset?"
            )
        highest = 1 if name in AT_MOST_ONE else 2**31 - 1
        if isinstance(value, int | float) and not 0 <= value <= highest:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be from 0 to {highest}")
        if value == 0 and name in NOT_ZERO:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be above 0")
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if samples % args.train_batch_size:
        flag = f"--train-batch-size {args.train_batch_size}"
        raise UserError(f"{flag}: must divide the {samples} samples of an iteration")
    if args.dual_clip is not None and args.dual_clip <= 1:
        raise UserError(f"--dual-clip {args.dual_clip}: must be above 1")
    if args.kl_loss and args.kl_coef == 0:
        raise UserError(f"--kl-loss {args.kl_loss}: needs a --kl-coef above 0")
    if args.critic_epochs == 0 and (args.critic_model or args.critic_warmup_iterations):
        raise UserError(
            "--critic-epochs 0: there is no critic, so --critic-model and "
            "--critic-warmup-iterations must not be given"
        )
    if args.resume == "auto" and not args.run_name:
        raise UserError("--resume auto: needs --run-name")
    if args.track:
        with attempt("use --track, which needs the package wandb"):
            pkgutil.resolve_name("wandb")
    if args.run_name and args.resume != "auto":
        path = Path(args.log_dir, args.run_name)
        if path.exists():
            raise UserError(f"--run-name: {path} exists: choose another, or --resume auto")


def plan_steps(args) -> types.SimpleNamespace:
    """Minibatches and optimizer steps of an iteration, and the iterations that train the actor."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    per_epoch = samples // args.train_batch_size
    return types.SimpleNamespace(
        steps_per_epoch=per_epoch,
        update_steps=per_epoch * args.ppo_epochs,  # of the actor
        critic_steps=per_epoch * args.critic_epochs,
        actor_iterations=max(0, args.num_iterations - args.critic_warmup_iterations),
    )


def print_plan(args, plan, envs: list[gym.Env], eval_envs: list[gym.Env]):
    batches = f"epochs x {plan.steps_per_epoch} minibatches of {args.train_batch_size} samples"
    kl = f"KL x {args.kl_coef:g} in the {'loss' if args.kl_loss else 'reward'}"
    models = f"actor {args.model or 'built-in, with random weights'}"
    if args.critic_epochs:
        models += f", critic {args.critic_model or 'a copy of the actor'}"
    rewards = f"{args.env_id} {args.env_kwargs}"
    if args.reward_model:
        rewards += f" and {args.reward_model}"
    evaluation = "none"
    if eval_envs:
        evaluation = f"{args.eval_episodes} episodes, sampled and greedy, on other seeds"
        prompts, eval_prompts = (
            env_attribute(env, "rows", list) for env in (envs[0], eval_envs[0])
        )
        if prompts and repr(prompts) == repr(eval_prompts):  # With arrays, == may raise.
            evaluation += ", but on the prompts of training: see --eval-env-kwargs"
    print0(f"""\
  models     {models}
  rewards    {rewards}
  ranks      {WORLD_SIZE}, {args.device}, {args.dtype}, compile {args.compile}
  rollout    {args.rollout_batch_size} prompts x {args.n_samples_per_prompt} samples
  critic     {args.critic_epochs} {batches} = {plan.critic_steps} optimizer steps
  actor      {args.ppo_epochs} {batches} = {plan.update_steps} optimizer steps
  warm-up    {args.critic_warmup_iterations} iterations without steps of the actor
  reference  {kl if args.kl_coef else "none"}
  evaluation {evaluation}
  run        {args.num_iterations} iterations: {plan.update_steps * plan.actor_iterations:,} steps \
of the actor, {plan.critic_steps * args.num_iterations:,} of the critic
  settings   max_prompt_tokens {args.max_prompt_tokens}, max_new_tokens {args.max_new_tokens}, \
actor_lr {args.actor_lr:g}, critic_lr {args.critic_lr:g}""")


def connect(args):
    """Join the other ranks, each with its device."""
    use_cuda = args.device == "cuda"
    if len({"RANK", "WORLD_SIZE"} & os.environ.keys()) == 1:
        raise UserError(
            "only one of the variables RANK and WORLD_SIZE is set: use torchrun, or unset that one"
        )
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ and tasks not in ("", "1"):
        raise UserError(
            f"SLURM_NTASKS is {tasks}, but RANK is not set: the {tasks} tasks would be runs of their "
            "own. Let srun start torchrun, in one task per node, as docs/slurm.md shows. For a "
            "single process, unset SLURM_NTASKS"
        )
    if use_cuda:
        with attempt("use --device cuda"):
            torch.cuda.set_device(LOCAL_RANK)
    if not dist.is_initialized():
        # Without torchrun this process is the only rank. HashStore needs no network.
        alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        with attempt(
            "join the ranks (use torchrun, with --standalone if the port is in use; for a single "
            "process, unset RANK and WORLD_SIZE)"
        ):
            dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo", **alone)


def configure_torch(args):
    """Settings of PyTorch for the whole process."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # It would build a plan for every new shape.
    if args.device == "cpu" and not args.model:
        torch.set_num_threads(1)  # The default model is too small for more.
    if args.compile == "on":
        variable, *names = ("CC", "gcc", "clang") if args.device == "cuda" else ("CXX", "g++")
        names = os.environ[variable].split()[:1] if variable in os.environ else names
        if not any(map(shutil.which, names)):
            raise UserError(
                f"--compile on: torch.compile needs the compiler {' or '.join(names)}, which is not "
                "installed: install it, or use --compile off"
            )
        # The limit is the number of graphs of a function, and all layers and models share theirs.
        torch._dynamo.config.recompile_limit = 64
        # Keep one kernel for the backward pass of the norms. By default it depends on the number of
        # tokens, and the blocks would be compiled again for another kernel.
        torch._inductor.config.triton.mix_order_reduction_non_strict_mode = True


def try_kernels(actor: Transformer, args):
    """Turn off the kernels that fail on this GPU, on all ranks if they fail on one."""
    if args.device == "cpu" or args.dtype == "float32":  # They are used in bfloat16 alone.
        return
    failures = kernel_failures(actor.config, args.device)
    if args.critic_model:  # Its heads may have another size.
        failures |= kernel_failures(load_config(args.critic_model), args.device)
    for gpu, of_rank in of_all_ranks((torch.cuda.get_device_name(), failures)):
        for kernel, (failure, replacement) in of_rank.items():
            if KERNELS[kernel]:
                KERNELS[kernel] = False
                print0(
                    f"warning: {kernel} is turned off, because on {gpu} with torch "
                    f"{torch.__version__} it {failure}. {replacement} is used instead, which is "
                    "slower. Please report this line to the project."
                )


def kernel_failures(config: PretrainedConfig, device: str) -> dict[str, tuple[str, str]]:
    """Try the kernels on small random inputs, with the heads of a model.

    The expected numbers come from the same functions in float32, which use no kernel of KERNELS.
    Returns {kernel: (how it failed, what is used instead)}.
    """
    H, Hkv, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    lengths, size = torch.tensor([1, 200, 77, 130]), 304  # of samples, of a cache
    B, n, hidden = len(lengths), int(lengths.sum()), config.hidden_size
    packing = Packing.from_lengths(lengths, torch.zeros(B, 200, dtype=torch.bool), device)
    sequences = torch.arange(B * Hkv + 1, dtype=torch.int32, device=device)
    cache = types.SimpleNamespace(size=size, sequences=sequences)
    newest = lengths[:, None].to(device) - 1  # the position of the newest token of each row [B, 1]
    context = Context(newest, None, None, cache=cache, n_visible=256)
    mask = torch.arange(size, device=device) <= newest[..., None, None]  # [B, 1, 1, size]

    def packed(q, k, v, d_out):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = attend_packed(q, k, v, packing)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)

    def by_lengths(q, k, v):
        if has_varlen("attention by lengths", q, D):
            return (attend_to_lengths(q, k, v, context).view(q.shape),)
        return (F.scaled_dot_product_attention(q, k, v, attn_mask=mask),)

    def products(hidden, weight, d_logits):
        return float32_product(hidden, weight.T), float32_product(d_logits.T, hidden)

    # Rounding to bfloat16 changes a number by up to 2^-8 of it. Attention rounds several times, the
    # product never. The largest difference is relative to the largest number that is expected.
    q, kv, newest_q, cached = (n, H, D), (n, Hkv, D), (B, Hkv, H // Hkv, D), (B, Hkv, size, D)
    matrices = (64, hidden), (1000, hidden), (64, 1000)
    trials = {  # (function, shapes of its inputs, largest difference allowed, what is used instead)
        "packed attention": (packed, (q, kv, kv, q), 2**-5, "Padded attention"),
        "attention by lengths": (by_lengths, (newest_q, cached, cached), 2**-5, "Masked attention"),
        "float32 product": (products, matrices, 2**-12, "A product of float32 copies"),
    }
    generator = torch.Generator().manual_seed(0)  # The random numbers of the run stay the same.
    failures = {}
    for kernel, (function, shapes, allowed, replacement) in trials.items():
        try:
            inputs = [torch.randn(s, generator=generator).bfloat16().to(device) for s in shapes]
            for x, expected in zip(function(*inputs), function(*(x.float() for x in inputs))):
                difference = float((x - expected).abs().max() / expected.abs().max())
                if not difference <= allowed:  # NaN is not.
                    failure = f"differs from float32 by {difference:.2%} of the largest number"
                    failures[kernel] = failure, replacement
        except Exception as error:
            text = " ".join(str(error).split())  # in one line
            failures[kernel] = f"raises {type(error).__name__}: {text:.300}", replacement
    return failures


def all_reduce(x: Tensor) -> Tensor:
    """Sum over the ranks, in place."""
    if WORLD_SIZE > 1:  # With one rank gloo would take a millisecond for nothing.
        dist.all_reduce(x)
    return x


def of_all_ranks(x) -> list:
    """The x of every rank, an object of Python, in the order of the ranks."""
    of_ranks = [None] * WORLD_SIZE
    dist.all_gather_object(of_ranks, x)
    return of_ranks


def check_ranks_agree(prompts: list[int], samples: Experience, state: TrainState):
    """Raise UserError if the ranks differ in seeds, trained tokens, mask, or `state`.

    Rewards and advantages are not compared, because rounding may make them differ.
    """
    parts = {
        "the seeds of the prompts": repr(prompts).encode(),
        "the samples that are trained on": samples.tokens.numpy().tobytes()
        + samples.mask.numpy().tobytes(),
        "TrainState": repr(state).encode(),
    }
    mine = {name: zlib.crc32(part) for name, part in parts.items()}
    for other in of_all_ranks(mine):
        for name in mine:
            if other[name] != mine[name]:
                raise UserError(f"the ranks differ in {name}: compute it identically on every rank")


def upload(x: Tensor, device: str) -> Tensor:
    """Copy a CPU tensor through pinned memory, so that the host need not wait for it."""
    return x.pin_memory().to(device, non_blocking=True) if device == "cuda" else x


def padded(rows) -> Tensor:
    """[N, T] of N lists, padded on the right with 0."""
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def microbatch_rows(rows: Tensor, lengths: Tensor, token_budget: int) -> list[Tensor]:
    """Indices of this rank's microbatches of the samples `rows` [k]. All ranks have equally many.

    Together the ranks have each sample once. The longest come first, so that attention pads little.
    A microbatch has at most `token_budget` tokens, with padding at most twice that budget. A longer
    sample is a microbatch of its own. Six samples on two ranks, with a budget of 12 tokens:

        samples, by length          9 7    6 4    3 2
        microbatches of rank 0      [9]    [6      3]     9 and 9 tokens
        microbatches of rank 1      [7]    [4      2]     7 and 6 tokens

    The result has the indices of these samples in place of their lengths.
    """
    lengths = lengths.tolist()
    order = sorted(rows.tolist(), key=lengths.__getitem__, reverse=True)
    parts = []
    # These count the newest microbatch of rank 0: its tokens, its tokens with padding, and those of
    # its longest sample. Rank 0 has the longest of every group, so all ranks keep the limits.
    tokens = area = longest = 0
    for start in range(0, len(order), WORLD_SIZE):
        group = order[start : start + WORLD_SIZE]  # a sample for each rank
        length = lengths[group[0]]  # of the longest of them
        if not parts or tokens + length > token_budget or area + longest > 2 * token_budget:
            parts.append([])
            tokens = area = 0
            longest = length
        tokens += length
        area += longest
        parts[-1] += group[RANK : RANK + 1]
    return [torch.tensor(part, dtype=torch.int64) for part in parts]


def shard(model: Transformer, args):
    """Split the weights over the ranks by FSDP2, which also does mixed precision."""
    if WORLD_SIZE == 1 and args.dtype == "float32":
        return
    mesh = dist.DeviceMesh(args.device, list(range(WORLD_SIZE)))
    value_head = [] if model.head == "lm" else [model.score]  # It stays in float32.
    # The weights of a unit are gathered before it runs and freed after it. A layer is a unit, and
    # so is the embedding, which is large. A tied embedding belongs to the root.
    embedding = [] if model.tied else [model.model.embed_tokens]
    # The last unit, the model itself, is the root. It has what no other unit has: the last norm,
    # the head of a language model and a tied embedding.
    for unit in (*model.model.layers, *value_head, *embedding, model):
        precision = torch.float32 if unit in value_head else getattr(torch, args.dtype)
        # Weights are cast to `precision`, gradients are reduced in float32. Inputs are not cast,
        # because FSDP would cast cos and sin in the Context as well.
        policy = fsdp.MixedPrecisionPolicy(precision, torch.float32, cast_forward_inputs=False)
        # By default the root would keep whole weights after a forward pass, until a backward pass.
        # Scoring has no backward pass.
        fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        # Gradients are summed, not averaged: losses are divided by the tokens of all ranks already.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    # FSDP gathers the weights before `forward`, and before the methods that are named here.
    for method in ("sampled_logprobs", "sampled_values"):
        fsdp.register_fsdp_forward_method(model, method)


def build_model(config: PretrainedConfig, head: str, args, sampler=False) -> Transformer:
    """A model without weights: all are NaN, except for a scalar head, which is 0.

    It is sharded. A sampler is whole, and in the precision of the forward pass.
    """
    # 1. Make the model without storage, so that each rank allocates only its own shards.
    with torch.device("meta"):
        model = Transformer(config, head, args.activation_checkpointing, args.compile)
    # 2. A sampler is cast. Other models are compiled, then sharded: FSDP2 needs this order.
    if sampler:
        for p in model.parameters():  # Buffers stay float32.
            p.data = p.data.to(getattr(torch, args.dtype))
    else:
        if args.compile == "on":
            for block in model.model.layers:
                block.compile(dynamic=True)
        shard(model, args)
    # 3. Allocate.
    model.to_empty(device=args.device)
    # 4. Fill. A weight that nobody initializes later is noticed, because it stays NaN.
    for p in model.parameters():
        nn.init.constant_(p, math.nan)
    if head == "scalar":
        nn.init.zeros_(model.score.weight)
    # 5. Restore what to_empty has lost: tied weights have two storages, the buffer `rope` is empty.
    model.tie_weights()
    model.rope = rope_frequencies(config)[0].to(args.device)
    return model


def embedded_model(args, env: gym.Env) -> tuple[HFTokenizer, Transformer]:
    """The default actor, a tiny random Llama, and a tokenizer of the environment's characters."""
    resets = [checked_reset(env, seed) for seed in range(256)]
    texts = [f"{info.get('demonstration', '')}" for _, info in resets]
    texts += [message["content"] for messages, _ in resets for message in messages]
    tokenizer = HFTokenizer.from_texts(texts)
    config = LlamaConfig(
        hidden_size=EMBEDDED_WIDTH,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=max_sample_length(args),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
    )
    torch.manual_seed(args.seed)
    actor = Transformer(config)
    for name, p in actor.named_parameters():
        # As in GPT-2, the last layers of residual branches start smaller.
        ends_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
        if p.ndim == 2:
            nn.init.normal_(p, std=0.01 if ends_branch else 0.02)
    return tokenizer, actor


def max_sample_length(args) -> int:
    """Maximum number of tokens of a sample, S."""
    return args.max_prompt_tokens + args.max_new_tokens


def load_model(folder: str, head: str, args, needs_head=True) -> tuple[HFTokenizer, Transformer]:
    """The tokenizer and the model of a folder.

    Raises UserError if the model takes no texts as long as a sample may be.
    """
    config, tokenizer = load_config(folder), HFTokenizer(folder)
    length, positions = max_sample_length(args), config.max_position_embeddings
    if length > positions:
        raise UserError(
            f"--max-prompt-tokens and --max-new-tokens: {length} tokens in total, but {folder} takes "
            f"at most {positions}"
        )
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder}: the model has a vocabulary of {config.vocab_size} tokens, but the "
            f"tokenizer needs {tokenizer.vocab_size}"
        )
    model = build_model(config, head, args)
    load_weights(model, folder, needs_head)
    return tokenizer, model


def build_actor(args, env: gym.Env) -> tuple[HFTokenizer, Transformer]:
    """The tokenizer and the actor, with the weights of --model or random ones."""
    if args.model:
        tokenizer, actor = load_model(args.model, "lm", args)
        tokenizer.template_kwargs = args.chat_template_kwargs
    else:
        tokenizer, embedded = embedded_model(args, env)
        actor = copy_model(embedded, args)
    if args.chat_template_kwargs != "{}" and not tokenizer.hf.chat_template:
        raise UserError("--chat-template-kwargs: the actor has no chat template")
    try_kernels(actor, args)
    return tokenizer, actor


def build_critic(actor: Transformer, tokenizer: HFTokenizer, args) -> Transformer:
    """A copy of the actor, or --critic-model. Its head is zero unless --critic-model brings one."""
    if args.critic_model:
        critic_tokenizer, critic = load_model(args.critic_model, "scalar", args, needs_head=False)
        check_vocabulary(critic_tokenizer, tokenizer)
    else:
        critic = build_model(actor.config, "scalar", args)
        copy_weights(actor, critic)
    return critic


def copy_model(model: Transformer, args, sampler=False) -> Transformer:
    copied = build_model(model.config, model.head, args, sampler)
    copy_weights(model, copied)
    return copied


def frozen_model(folder: str, head: str, args) -> tuple[Transformer, HFTokenizer]:
    """A model that never changes, so that checkpoints do not contain it, and its tokenizer."""
    tokenizer, model = load_model(folder, head, args)
    return model.requires_grad_(False), tokenizer


def set_scores(episodes: list[Episode], reward_model: tuple[Transformer, HFTokenizer], args):
    """Set Episode.score to the reward model's score of the conversation.

    The reward model reads the conversation in its own chat template, with its own tokenizer. The
    score is its output at the last token. The reward model does not see whether a response was cut
    off. For that there is --truncation-penalty.
    """
    model, tokenizer = reward_model
    texts = []
    for episode in episodes:
        ids = tokenizer.encode_conversation(episode.conversation)
        # Classifiers of transformers read their output at the last token that is not padding.
        while ids[-1] == model.config.pad_token_id and len(ids) > 1:
            ids.pop()
        text = Episode(episode.env_seed)  # used as a list of ids, of which none was sampled
        text.add(ids)
        texts.append(text)
    experience = Experience.from_episodes(texts)
    everything = [torch.arange(len(texts))]
    scores = forward_all(lambda mb: model(mb.tokens), experience, everything, args)  # [N, T]
    for episode, row, length in zip(episodes, scores, experience.lengths, strict=True):
        episode.score = float(row[length - 1])


def make_optimizer(model: Transformer) -> torch.optim.AdamW:
    """AdamW, whose moments exist from the beginning, so that all checkpoints have them."""
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, betas=(0.9, 0.999), weight_decay=0.0, fused=True)
    for p in params:
        optimizer.state[p] = {
            "step": torch.zeros((), device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


def first_training_seed(args, env: gym.Env) -> int:
    """The environment's seed for the first training prompt, far from those of evaluations.

    It is a multiple of the number of prompts, if the environment knows it: a pass begins there.
    """
    n = env_attribute(env, "num_prompts", int) or 1
    return round_up(random.Random(args.seed).randrange(FIRST_TRAINING_SEED, 2**31), n)


SFT_BATCH_SIZE = 256  # demonstrations per step


def warm_start(actor: Transformer, tokenizer: HFTokenizer, env: gym.Env, args):
    """Supervised steps on the environment's demonstrations of the first training prompts."""
    first = first_training_seed(args, env)
    if args.sft_steps == 0:
        return
    # An environment that knows its prompts gives all of them for these seeds.
    seeds = range(env_attribute(env, "num_prompts", int) or 0) or [first]
    lacking = [seed for seed in seeds if checked_reset(env, seed)[1].get("demonstration") is None]
    if len(lacking) == len(seeds):
        print0("no warm start: the environment gives no demonstrations")
        return
    if lacking:
        prompt = checked_reset(env, lacking[0])[0][-1]["content"]
        raise UserError(
            f"--sft-steps {args.sft_steps}: {len(lacking)} of {len(seeds)} prompts have no "
            f"demonstration, for example {prompt!r:.80}: give one to all of them, or to none"
        )
    print0(f"warm start: {args.sft_steps} steps on demonstrations")
    optimizer = make_optimizer(actor)
    for i in range(args.sft_steps):
        episodes = []
        for k in range(SFT_BATCH_SIZE):
            episode = Episode(first + i * SFT_BATCH_SIZE + k)
            info = episode.begin(env, tokenizer, args)
            with attempt(f"use the demonstration of seed {episode.env_seed}"):
                ids = tokenizer.encode(
                    info["demonstration"], tokenizer.render(episode.conversation)
                )
            ids = [*ids, tokenizer.end_of_turn_id][: args.max_new_tokens]
            # `add` puts tokens with log-probs into the mask. The value 0 is not used.
            episode.add(ids, [0.0] * len(ids))
            episodes.append(episode)
        experience = Experience.from_episodes(episodes)
        n_tokens = int(experience.mask.sum())
        microbatch_stats = []
        for mb in experience.microbatches(torch.arange(len(episodes)), args):
            loss = -actor.sampled_logprobs(mb, 1.0)[0].sum() / n_tokens
            loss.backward()
            microbatch_stats.append({"loss": loss})
        lr = linear_schedule(args.actor_lr, 0.0, i / args.sft_steps)
        optimizer_step(actor, optimizer, lr, args)
    print0(f"  loss {sum_over_ranks(microbatch_stats)['loss']:.3f} per token in the last step")


# === 11. Run folder, saving, resuming ===


@dataclass
class TrainState:
    """All that an iteration passes on to the next besides weights and moments. Saved as JSON."""

    iteration: int = 0  # number of iterations done
    prompts: int = 0  # number of training prompts played
    actor_steps: int = 0
    critic_steps: int = 0
    eval_before: dict | None = None


# A lost terminal sends SIGHUP. Schedulers announce the end of a job by one of the last three.
SIGNALS = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
)  # fmt: skip


def heed_signals(numbers: list[int]):
    """In a process that a reward function has forked: let signals end it, as they do by default."""
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


class StopSignals:
    """From `catch` on, SIGNALS end the run after the current iteration. SIGINT is Ctrl-C.

    A handler may run between any two instructions of Python. A collective in it would meet another
    one of the other ranks, so it takes a note. All ranks must stop after the same iteration, and
    exchange their notes at the end of each one. This is SIGTERM, which is 15, at rank 1 of two:

                                  during iteration 7     `agree` at its end     then
        rank 0                    received = 0           number = 15            a checkpoint,
        rank 1    SIGTERM ->      received = 15          number = 15            exports, the end
    """

    def __init__(self):
        self.received = 0  # the signal that this rank has received
        self.number = 0  # the signal that any rank had received when `agree` was called
        self.immediate = False
        # On exit it sets the earlier handlers again. Run adds what ends with the run.
        self.restore = contextlib.ExitStack()

    def catch(self):
        if threading.current_thread() is not threading.main_thread():
            return  # Only the main thread can handle signals.
        # nohup has SIGHUP ignored, and user code may handle signals. These are left as they are,
        # but for SIGTERM and SIGINT.
        numbers = [
            number
            for number in SIGNALS
            if number in (signal.SIGTERM, signal.SIGINT)
            or signal.getsignal(number) == signal.SIG_DFL
        ]
        for number in numbers:
            self.restore.callback(signal.signal, number, signal.signal(number, self.receive))
        self.restore.callback(numbers.clear)  # Then the functions below do nothing.
        # Signals are blocked during a fork, so that the child gets none before heed_signals.
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, numbers),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers),
            after_in_child=lambda: heed_signals(numbers),
        )

    def receive(self, number: int, frame):
        is_first, self.received = not self.received, number
        if number == signal.SIGINT:  # The second one stops at once.
            signal.signal(number, signal.default_int_handler)
        if self.immediate:
            self.immediate = False
            raise KeyboardInterrupt
        if is_first:  # A limit of CPU time sends SIGXCPU every second.
            with contextlib.suppress(OSError):  # stderr may be closed.
                os.write(2, b"\nstopping after this iteration; a second Ctrl-C stops at once\n")

    @contextlib.contextmanager
    def at_once(self):
        """A signal ends the body of this context at once, and is then in `number`."""
        try:
            self.immediate = True
            yield
        except KeyboardInterrupt:
            self.number = self.received
        finally:
            self.immediate = False

    def agree(self):
        self.number = max(of_all_ranks(self.received))


def lines_before(path: Path, iteration: int) -> Iterator[bytes]:
    """The lines of earlier iterations. Damaged lines are left out."""
    for line in path.read_bytes().splitlines():
        try:
            if json.loads(line)["iteration"] < iteration:
                yield line + b"\n"
        except Exception:
            print0(f"left out a damaged line of {path}: {line!r:.80}")


def script_version() -> dict:
    """The hash of this script, as git computes it.

    In a repository that has the script also the commit of HEAD, and whether the script was changed
    since.
    """
    version, path = {}, Path(__file__).absolute()
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        text = path.read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % len(text) + text, usedforsecurity=False).hexdigest()
        version["script"] = blob
        command = ["git", "-C", path.parent, "rev-parse", "HEAD", f"HEAD:./{path.name}"]
        git = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        version["commit"], committed = git.stdout.split()
        version["changed"] = blob != committed
    return version


class Run:
    """The folder <log_dir>/<run_name>/: *.jsonl, TensorBoard's file, config.json, summary.json."""

    def __init__(self, args, state, checkpoint_path: Path | None, restore: contextlib.ExitStack):
        self.args, self.state, self.summary = args, state, {}
        self.started = time.monotonic()
        self.print_once = functools.cache(print0)
        env, now = args.env_id.split(":")[-1], time.strftime("%Y%m%d-%H%M%S-") + os.urandom(2).hex()
        name = args.run_name or f"{env}__{Path(__file__).stem}__{args.seed}__{now}"
        self.path = Path(args.log_dir, of_all_ranks(name)[0])  # of rank 0, whose clock counts
        if RANK > 0:
            return
        with attempt(f"write {self.path}"):
            self.path.mkdir(parents=True, exist_ok=args.resume == "auto")
            self.lock(restore)
            # The models were loaded before the lock was there. An earlier process of this run, which
            # was still ending, may have saved a checkpoint meanwhile.
            if args.resume == "auto" and newest_checkpoint(self.path) != checkpoint_path:
                raise UserError(
                    f"--resume auto: another process has written a checkpoint in {self.path} since "
                    "this one began. Start this one again: it resumes from that checkpoint"
                )
            config = {"args": vars(args), "argv": sys.argv} | script_version()
            write_json(self.path / "config.json", config)
            for name in ("metrics", "completions", "tokens"):
                # The lines of iterations after the checkpoint will be written again.
                path = self.path / f"{name}.jsonl"
                path.touch()
                write_file(path, b"".join(lines_before(path, state.iteration)))
        if args.track:
            with attempt("start Weights & Biases for --track"):
                import wandb

                wandb.init(
                    project=args.wandb_project,
                    id=self.path.name,
                    dir=self.path,
                    config=vars(args),
                    sync_tensorboard=True,
                    resume="allow" if args.resume == "auto" else "never",
                )
        self.writer = SummaryWriter(self.path, purge_step=state.iteration)
        restore.callback(self.fail)

    def lock(self, restore: contextlib.ExitStack):
        """Reject a folder in which another process runs. The lock ends with the run or process."""
        file = restore.enter_context(open(self.path / "lock", "w"))
        # A process that a reward function forks would keep the lock for as long as it lives.
        os.register_at_fork(after_in_child=file.close)
        try:
            # A lock of lockf would be lost when user code reads the file, as in a copy of the folder.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            message = f"another process runs in {self.path}: choose another --run-name"
            raise UserError(message) from None
        except OSError:
            return  # This disk has no locks.

    def log(self, metrics: dict, episodes, experience: Experience, tokens, same_microbatches):
        """Report an iteration: *.jsonl, TensorBoard, terminal."""
        i = self.state.iteration
        samples = logged_samples(episodes, experience)
        # This is checked in every iteration: a fault shows long before the first checkpoint.
        for name, value in vars(self.state).items():
            with attempt(f"save TrainState.{name}, {value!r:.80}, as JSON"):
                loaded = json.loads(json.dumps(value))
                if repr(loaded) != repr(value):
                    raise ValueError(f"a resumed run would read {loaded!r:.80}")
        if RANK == 0:
            self.append("metrics", {"iteration": i} | metrics)
            for name, value in metrics.items():
                if isinstance(value, int | float):
                    self.writer.add_scalar(name, value, i)
            for sample in samples:
                self.append("completions", {"iteration": i} | sample)
            for sample in tokens:
                self.append("tokens", {"iteration": i} | sample)
        if i % max(1, self.args.num_iterations // 5) == 0:
            print0(f"  {[samples[0]['prompt'], samples[0]['response']]!r:.280}")
        truncated = metrics["objective/truncated"]
        cut = f" ({truncated:.0%} cut)" if truncated >= 0.005 else ""
        unscored = metrics["objective/unscored"]
        left_out = f"{unscored:.0%} without a reward, " if unscored >= 0.005 else ""
        print0(
            f"{i + 1}/{self.args.num_iterations}: reward {metrics['objective/reward']:.3f}, "
            f"accuracy {metrics['objective/accuracy']:.1%}, "
            f"{metrics['objective/response_tokens']:.1f} tokens{cut}, {left_out}"
            f"KL {metrics['objective/kl']:.4f}, "
            f"approx_kl {metrics.get('actor/approx_kl', 0.0):.2g}, "
            f"clipfrac {metrics.get('actor/clipfrac', 0.0):.3f}, "
            f"explained {metrics['critic/explained_variance']:.2f}, "
            f"{metrics['time/iteration']:.2f} s"
        )
        for text in find_mistakes(metrics, experience, same_microbatches, self.args):
            self.print_once(text)

    def append(self, name: str, row: dict):
        """Write a line of JSON. What is NaN, infinite or None is left out; in a list it is null."""
        row = json.loads(json.dumps(row), parse_constant=lambda constant: None)
        line = json.dumps({key: value for key, value in row.items() if value is not None})
        with open(self.path / f"{name}.jsonl", "a") as file:
            file.write(line + "\n")

    def fail(self):
        """Close a run that an error has ended. The error is shown, not that of a full disk here."""
        if "status" not in self.summary:
            with contextlib.suppress(OSError):
                self.close("failed")

    def close(self, status: str) -> dict:
        self.summary |= {
            "status": status,
            "eval_before": self.state.eval_before,
            "iterations": self.state.iteration,
            "update_steps": self.state.actor_steps,
            "seconds": time.monotonic() - self.started,
        }
        if RANK == 0:
            write_json(self.path / "summary.json", self.summary)
            self.writer.close()
            if self.args.track:  # Else the next run of this process would be logged to this one.
                import wandb

                wandb.finish(exit_code=int(status == "failed"))
        return self.summary


def checkpoint_tensors(checkpointed: dict) -> dict[str, Tensor]:
    """Weights and moments by name, sharded or not. DCP saves them, or loads into them."""
    tensors = {}
    for key, (model, optimizer) in checkpointed.items():
        for name, p in model.named_parameters() if model else ():
            tensors[f"{key}.{name}"] = p.detach()
            for kind, x in optimizer.state[p].items() if optimizer else ():
                tensors[f"{key}.{name}.{kind}"] = x
    return tensors


def is_complete(path: Path) -> bool:
    """Whether all files are there, with headers that fit their sizes. DCP does not check this.

    Raises OSError if they cannot be read: such a checkpoint may be complete.
    """
    try:
        for name in read_json(path / "state.json")["files"]:
            # `open` raises the true error, such as PermissionError. safe_open would raise
            # FileNotFoundError for it, and the checkpoint would count as incomplete.
            with open(path / name, "rb"):
                safetensors.safe_open(path / name, "pt")
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False  # A file is missing.
    except OSError:
        raise  # The disk does not answer, so all files may be there.
    except Exception:
        return False  # A file is damaged.


def run_checkpoints(run_folder: Path) -> list[Path]:
    """The checkpoints of a run, newest first. Folders with other names are left out.

    Raises OSError if the folder cannot be read.
    """
    folder, names = run_folder / "checkpoints", []
    with contextlib.suppress(FileNotFoundError):
        names = [name for name in os.listdir(folder) if re.fullmatch(r"iter_[0-9]{6}", name)]
    return [folder / name for name in sorted(names, reverse=True)]


def files_of_all_ranks(folder: Path) -> list[str]:
    """The names of the safetensors that the ranks have written. Raises OSError if they differ.

    The listing of a network disk may lag behind, so there are several attempts.
    """
    for _ in range(30):
        seen = sorted(file.name for file in folder.glob("*.safetensors"))
        if all(files == seen for files in of_all_ranks(seen)):
            return seen
        time.sleep(1)
    raise OSError(f"the ranks see different files in {folder}: do all nodes share this disk?")


KEEP_CHECKPOINTS = 2
FILE_ELEMENTS = 2**26  # of a checkpoint's file, on each rank: 256 MB


def save_checkpoint(folder: Path, checkpointed: dict, state: TrainState, args):
    """Write checkpoints/iter_<iterations>. The folder gets this name when it is complete.

    It holds weights and moments, TrainState and args. All randomness is a function of these.
    """
    path = folder / "checkpoints" / f"iter_{state.iteration:06d}"
    partial = path.with_name("partial")
    if RANK == 0:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    tensors = checkpoint_tensors(checkpointed)
    # The writer holds a file twice in memory, so the tensors are spread over many files. If
    # FILE_ELEMENTS were 4, tensors of 6, 4, 3 and 5 elements would be in files 1, 2, 3 and 4 of a
    # single rank, and in files 1, 1, 2 and 2 of two ranks, each with its shards.
    index_of, elements = {}, 0
    for name, x in tensors.items():
        index_of[name] = 1 + elements // (FILE_ELEMENTS * WORLD_SIZE)
        elements += x.numel()
    with attempt(f"write {path}; earlier ones are intact"):
        writer = dcp.HuggingFaceStorageWriter(str(partial), index_of, save_distributed=True)
        dcp.save(tensors, storage_writer=writer)
        files = files_of_all_ranks(partial)
        if RANK == 0:
            content = {"state": vars(state), "args": vars(args), "files": files}
            write_json(partial / "state.json", content)
            shutil.rmtree(path, ignore_errors=True)  # an incomplete one
            partial.rename(path)
            with contextlib.suppress(OSError):  # What cannot be read is not deleted.
                for old in list(filter(is_complete, run_checkpoints(folder)))[KEEP_CHECKPOINTS:]:
                    shutil.rmtree(old, ignore_errors=True)  # It does not remove a symbolic link.
    print0(f"saved {path}")


def newest_checkpoint(run_folder: Path) -> Path | None:
    """The newest complete checkpoint of a run; None if there is none, and no results are lost.

    Raises UserError if there is no complete checkpoint, but a new run would overwrite results.
    """
    with attempt(f"read the checkpoints of {run_folder}"):
        paths = run_checkpoints(run_folder)
        for path in paths:
            if is_complete(path):
                return path
            print0(f"passed over {path}: files are missing or damaged")
        summary = run_folder / "summary.json"
        ended = summary.exists() and read_json(summary)["status"] != "failed"
        if paths or ended or (run_folder / "model").exists():
            raise UserError(
                f"--resume auto: {run_folder} has results, but no complete checkpoint. To keep "
                "them, choose another --run-name. To begin anew, delete the folder"
            )
    return None


def find_checkpoint(args) -> Path | None:
    """The checkpoint to resume; None for a new run. Rank 0 chooses it for all ranks."""
    if args.resume != "auto":
        return Path(args.resume) if args.resume else None
    chosen = newest_checkpoint(Path(args.log_dir, args.run_name)) if RANK == 0 else None
    return of_all_ranks(chosen)[0]


def load_checkpoint(path: Path, checkpointed: dict, args) -> TrainState:
    """Load a checkpoint into models and optimizers."""
    with attempt(f"resume from {path}"):
        if not is_complete(path):
            raise ValueError("files are missing or damaged; is it a checkpoints/iter_* folder?")
        content = read_json(path / "state.json")
        for name, value in vars(args).items():
            before = content["args"].get(name)
            value = json.loads(json.dumps(value))  # as it is in the file: a tuple becomes a list
            if value != before and name not in ("resume", "run_name", "log_dir"):
                print0(f"  --{name.replace('_', '-')} {value}, in the checkpoint {before}")
        reader, tensors = dcp.HuggingFaceStorageReader(path), checkpoint_tensors(checkpointed)
        dcp.load(tensors, storage_reader=reader)
        if unused := sorted(reader.read_metadata().state_dict_metadata.keys() - tensors.keys()):
            print0(f"  {len(unused)} of its tensors are not used, for example {unused[0]}")
        state = TrainState(**content["state"])
    print0(f"resuming from {path}, after {state.iteration} iterations")
    return state


def main():
    sys.path.append(os.getcwd())  # Modules of the user may be in the working directory.
    args = tyro.cli(Args, description=Args.__doc__, console_outputs=RANK == 0)
    try:
        train(args)
    except UserError as error:
        if RANK > 0:
            time.sleep(5)  # Rank 0 reports first. Then torchrun ends the others.
        if isinstance(error, CodeError) and error.has_traceback():
            traceback.print_exception(error.__cause__)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        # A thread of gloo may still have to let go of the last collective's tensors. While Python
        # shuts down, that aborts the process: https://github.com/pytorch/pytorch/pull/179291.
        time.sleep(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
