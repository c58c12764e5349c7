"""PPO for language models, in one file and in plain PyTorch, with a rollout that refills a slot the moment it is free.

This is `ppo_llm.py` with continuous batching: that file samples in waves, here the next sample begins as soon as one
ends. They differ in this docstring, `--prefill-tokens` and section 4: `prefill`, `rollout` and what they need.

A language model (the actor) answers the prompts of a text environment, the environment rewards the answers, and
Proximal Policy Optimization (https://arxiv.org/abs/1707.06347) makes rewarded tokens more likely. A second transformer
(the critic) predicts the reward still to come; a frozen copy (the reference) holds the actor near where it began. Each
rollout is used for `ppo_epochs` epochs of minibatches. It is the PPO of Atari: actions are tokens, states are texts.

    python ppo_llm_continuous_batching.py    # --help and all flags as there, and --prefill-tokens

Words. The *actor* is trained, and it also samples: there is no separate "old model". The *old policy* is the actor as
it was when it sampled; it exists only as `old_logprobs`. The *reference* serves the KL penalty alone. A *sample* is one
episode: prompt, response, further turns if there are any. An *iteration* is one rollout and all updates on it, a
*minibatch* one optimizer step, a *microbatch* one forward and backward.

Layout. Rows are right-padded and start at index 0, and all is stored at the token's own index: `mask[b, t]` is 1 iff
the actor sampled token t, `logprobs[b, t]` = log pi(token t | tokens < t), `values[b, t]` = V(state before token t).
In shapes: B rows, T tokens, S cache positions, H / Hkv heads, D head size, V vocabulary, N samples of a rollout.
Several ranks share the work, not the knowledge: each has all N rows of a rollout, and its part of every minibatch.

Reading order: `ppo` at the end tells the story, section 6 is its mathematics, section 4 its rollout. Left out: LoRA,
methods without critic, top-p and top-k (they make the ratio wrong). Background: "The 37 implementation details of PPO"
(https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details) and "The N implementation details of RLHF with
PPO" (https://huggingface.co/blog/the_n_implementation_details_of_rlhf_with_ppo).
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import heapq
import inspect
import itertools
import json
import math
import os
import pickle
import queue
import random
import re
import resource
import shutil
import signal
import sys
import threading
import time
import types
import warnings
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import gymnasium as gym
import jinja2.sandbox
import safetensors.torch
import tokenizers
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


class UserError(ValueError):
    """Something the user can mend: shown as one line without a traceback, exit code 2."""

    common = False  # whether all ranks raise it (see Ranks.agree), so that only the first says it

    def __str__(self):
        return " ".join(super().__str__().split())


@contextlib.contextmanager
def blame(what: str):
    """Turn whatever goes wrong inside into a UserError that begins with `what`."""
    try:
        yield
    except UserError:
        raise
    except (Exception, dcp.api.CheckpointException) as error:
        if isinstance(error, dcp.api.CheckpointException):  # no Exception; holds those of several ranks
            error = next(iter(error.failures.values()))[0]
        raise UserError(f"{what} ({type(error).__name__}: {error!s:.300})") from error


class Interrupted(KeyboardInterrupt):
    """SIGTERM or Ctrl-C; args[0] is the signal's number."""


def say(text: str) -> None:
    """Print, on rank 0 alone, without breaking a progress bar."""
    if os.environ.get("RANK", "0") == "0":
        tqdm.write(text)


# === 1. Arguments ===


@dataclass
class Args:
    """PPO for language models. Defaults that depend on the job (None below) are printed at start."""

    seed: int = 1  # of weights, sampling noise and minibatch order; the environment's prompts are always the same
    run_name: str | None = None  # name of the run's folder; default <env>__<script>__<seed>__<time>
    log_dir: str = "runs"  # where run folders are made
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if there is one
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of forward passes; auto: bfloat16 on cuda
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: on cuda, and on a CPU in long runs
    critic_ranks: int = 0  # the last so many ranks update the critic while the others update the actor; 0: all do both
    fsdp_shard_size: int | None = None  # ranks that a model is sharded over, copies beyond these; None: all its ranks
    activation_checkpointing: bool = False  # keep no activations of a block, compute them again in the backward pass

    model: str | None = None  # the actor, a Hugging Face folder or hub id org/name; default: a tiny one, warm-started
    critic_model: str | None = None  # checkpoint that the critic starts from; default: the actor as it is before PPO
    reward_model: str | None = None  # *ForSequenceClassification of the actor's tokenizer; adds to the reward
    env_id: str = "SortDigits-v0"  # SortDigits-v0, GSM8K-v0, or your own (Gymnasium, text) as pkg.module:MyEnv-v0
    env_kwargs: str = "{}"  # the environment's arguments, a JSON object
    env_timeout: float = 60.0  # seconds for an answer of reset() or step(); environments share one Python, and its lock

    num_iterations: int = 200  # iterations, each one rollout and all updates on it
    rollout_batch_size: int = 512  # prompts an iteration
    n_samples_per_prompt: int = 1  # samples of each prompt
    rollout_slots: int = 512  # samples decoded at once, by each rank; memory of the KV cache grows with it
    prefill_tokens: int = 65536  # prompt and environment tokens, padding included, computed between two decode blocks
    max_prompt_tokens: int | None = None  # a longer prompt is an error; default 16, with --model 512
    max_new_tokens: int | None = None  # all after the prompt, environment's text included; default 8, with --model 256
    temperature: float = 1.0  # divides the logits, alike in sampling, old, new and reference log-probs and entropy
    sft_steps: int | None = None  # supervised steps on demonstrations before PPO; default 100, with --model 0
    sft_batch_size: int = 256  # demonstrations in a supervised step
    sft_lr: float | None = None  # learning rate of the supervised steps, linear to 0; default 1.3e-3, with --model 1e-5

    ppo_epochs: int = 2  # passes of the actor over one rollout
    critic_epochs: int | None = None  # passes of the critic over one rollout; default ppo_epochs
    train_batch_size: int = 128  # samples in a minibatch, that is in an optimizer step
    micro_batch_tokens: int = 16384  # padded tokens in a rank's forward and backward: memory and speed, no gradient
    actor_lr: float | None = None  # learning rate of the actor's AdamW; default 3e-4, with --model 1e-6
    critic_lr: float | None = None  # learning rate of the critic's AdamW; default 5e-4, with --model 1e-5
    lr_end: float = 0.05  # both fall linearly to this fraction of their start; 1: constant
    critic_warmup_iterations: int = 0  # first iterations, for the critic alone: the actor and its schedule do not move
    max_grad_norm: float = 1.0  # larger gradients are scaled down to this norm, actor's and critic's each on its own

    gamma: float = 1.0  # discount per token
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    clip_low: float = 0.2  # the ratio is clipped below at 1 - clip_low
    clip_high: float = 0.2  # the ratio is clipped above at 1 + clip_high
    value_clip: float | None = 0.2  # values are clipped to old value +- this; None: not
    dual_clip: float | None = None  # c > 1 bounds the loss of a negative advantage A at -A * c; None: not
    entropy_coef: float = 0.0  # weight of the entropy bonus
    target_kl: float | None = None  # nats a token; a minibatch's approx_kl above it ends the rollout's actor steps
    recompute_old_logprobs: bool = True  # by the training forward: the first ratio is 1; else the sampler's
    rollout_is_cap: float | None = None  # weight losses by min(pi_old / pi_sampler, cap), if the two differ; None: not
    kl_coef: float | None = None  # weight of the KL to the reference; 0: no reference. Default 0, with --model 0.01
    kl_in: Literal["reward", "loss"] = "reward"  # subtract the KL from each token's reward, or add it to the loss
    kl_estimator: Literal["k1", "k2", "k3"] | None = None  # default k1 in the reward, k3 in the loss
    kl_target: float | None = None  # adapt kl_coef towards this KL, in nats a sample; None: fixed
    kl_horizon: int = 10_000  # samples over which kl_coef adapts
    ref_sync_every: int = 0  # iterations between moves of the reference towards the actor; 0: never
    ref_sync_alpha: float = 1.0  # such a move makes it alpha * actor + (1 - alpha) * reference
    missing_eos_penalty: float = 0.0  # subtracted from the reward of a sample that does not end with a stop id
    bootstrap_truncated: bool = False  # a truncated row ends with V(state after its last token), not with 0

    max_skipped_steps: int = 20  # non-finite optimizer steps in a row after which the run stops
    eval_every: int = 0  # iterations between evaluations; 0: only before and after
    eval_episodes: int = 512  # episodes of an evaluation, once sampled at temperature 1 and once greedy
    eval_env_kwargs: str = "{}"  # merged over env_kwargs; SortDigits adds its test split, GSM8K the order of the file
    log_completions: int = 4  # samples an iteration in completions.jsonl
    save_every: int = 50  # iterations between checkpoints; 0: only when a signal or an explained error ends the run
    keep_checkpoints: int = 2  # the newest so many are kept
    resume: str | None = None  # auto: go on with --run-name if it has checkpoints; or a run's folder; or a checkpoint


Plan = collections.namedtuple("Plan", "samples_per_iteration minibatches update_steps critic_update_steps "
                                      "actor_steps_total critic_steps_total episodes_total")  # fmt: skip


def plan_steps(args: Args, world_size: int = 1) -> Plan:
    """Samples and optimizer steps of a run, for the printed table, the progress bar and the learning-rate schedules.

    update_steps = rollout_batch_size * n_samples_per_prompt * ppo_epochs / train_batch_size, the actor's an iteration.
    All sizes are global, whatever the world size. Raises UserError if they do not divide.
    """
    samples, batch = args.rollout_batch_size * args.n_samples_per_prompt, args.train_batch_size
    if samples % batch:
        divisors = sorted((d for d in range(1, samples + 1) if samples % d == 0), key=lambda d: abs(d - batch))
        raise UserError(f"--train-batch-size {batch}: must divide the {samples} samples of an iteration (rollout batch "
                        f"size x samples per prompt); nearest valid: {' or '.join(map(str, sorted(divisors[:2])))}")
    minibatches, trained = samples // batch, max(0, args.num_iterations - args.critic_warmup_iterations)
    actor, critic = minibatches * args.ppo_epochs, minibatches * (args.critic_epochs or args.ppo_epochs)
    totals = actor * trained, critic * args.num_iterations, samples * args.num_iterations
    return Plan(samples, minibatches, actor, critic, *totals)


def validate(args: Args, world_size: int = 1) -> Plan:
    """Fill the defaults that depend on the job, check every flag. Raises UserError: flag, value and what is valid."""
    kl_estimator, teams = "k1" if args.kl_in == "reward" else "k3", (world_size - args.critic_ranks, args.critic_ranks)
    for name, embedded, with_model in [
        ("max_prompt_tokens", 16, 512), ("max_new_tokens", 8, 256), ("sft_steps", 100, 0), ("sft_lr", 1.3e-3, 1e-5),
        ("actor_lr", 3e-4, 1e-6), ("critic_lr", 5e-4, 1e-5), ("kl_coef", 0.0, 0.01),
        ("critic_epochs", args.ppo_epochs, args.ppo_epochs), ("kl_estimator", kl_estimator, kl_estimator),
    ]:
        if getattr(args, name) is None:
            setattr(args, name, with_model if args.model else embedded)
    for names, valid, text in [
        ("num_iterations rollout_batch_size n_samples_per_prompt rollout_slots max_prompt_tokens max_new_tokens "
         "kl_horizon sft_batch_size ppo_epochs critic_epochs train_batch_size micro_batch_tokens eval_episodes "
         "max_skipped_steps prefill_tokens", lambda x: x >= 1, "must be at least 1"),
        ("seed", lambda x: 0 <= x < 2**31, "must lie in [0, 2**31)"),
        ("num_iterations", lambda x: x < 10**6, "must be below 1,000,000: checkpoints are numbered by six digits"),
        ("sft_steps sft_lr actor_lr critic_lr entropy_coef kl_coef critic_warmup_iterations ref_sync_every "
         "missing_eos_penalty eval_every log_completions save_every critic_ranks",
         lambda x: 0 <= x < math.inf, "must be finite, at least 0"),
        ("temperature clip_high value_clip target_kl rollout_is_cap kl_target max_grad_norm env_timeout",
         lambda x: 0 < x < math.inf, "must be finite, above 0"),
        ("gamma gae_lambda lr_end ref_sync_alpha", lambda x: 0 <= x <= 1, "must lie in [0, 1]"),
        ("clip_low", lambda x: 0 < x < 1, "must lie in (0, 1)"),
        ("dual_clip", lambda x: 1 < x < math.inf, "must be finite, above 1"),
        ("kl_estimator", lambda x: x != "k1" or args.kl_in == "reward",
         "has an expected gradient of zero in the loss; with --kl-in loss use k2 or k3"),
        ("rollout_is_cap", lambda x: args.recompute_old_logprobs, "needs --recompute-old-logprobs"),
        ("kl_target", lambda x: args.kl_coef > 0, "needs a --kl-coef above 0 to start from"),
        ("ref_sync_every", lambda x: x == 0 or args.kl_coef > 0, "needs a reference, that is a --kl-coef above 0"),
        ("critic_warmup_iterations", lambda x: x <= args.num_iterations, "must be at most --num-iterations"),
        ("rollout_batch_size", lambda x: x >= world_size, f"must be at least 1 for each of {world_size} ranks"),
        ("critic_ranks", lambda x: x < world_size, f"must leave a rank for the actor; there are {world_size} in all"),
        ("fsdp_shard_size", lambda x: x >= 1 and not any(n % x for n in teams),
         f"must divide the numbers of ranks that hold a model, {' and '.join(str(n) for n in teams if n)}"),
        ("keep_checkpoints", lambda x: x >= 2, "must be at least 2: the newest may turn out to be damaged"),
        ("resume", lambda x: x != "auto" or args.run_name, "needs --run-name"),
    ]:
        for name in names.split():
            if (value := getattr(args, name)) is not None and not valid(value):
                raise UserError(f"--{name.replace('_', '-')} {value}: {text}")
    parse_json(args.env_kwargs, "--env-kwargs")
    parse_json(args.eval_env_kwargs, "--eval-env-kwargs")
    return plan_steps(args, world_size)


# === 2. Tokenizer ===


def read_text(path: Path) -> str:
    with blame(f"{path}: cannot be read as UTF-8 text"):
        return path.read_text(encoding="utf-8")


def parse_json(text: str, name: str | Path) -> dict:
    with blame(f"{name} {text:.80}: must be a JSON object such as {{\"key\": 1}}"):
        return dict(json.loads(text).items())


class HFTokenizer:
    """Text <-> ids, chat template and stop ids of a checkpoint folder in Hugging Face format.

    `files` {name: text} stands in for a folder that does not exist (the embedded model's).
    """

    def __init__(self, folder: str | Path, files: dict[str, str] | None = None):
        self.folder = folder = Path(folder)
        names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
                 "generation_config.json", "config.json")
        self.files = files or {n: read_text(folder / n) for n in names if (folder / n).is_file()}
        if "tokenizer.json" not in self.files:
            raise UserError(f"{folder}: has no tokenizer.json (save_pretrained of a fast tokenizer writes it)")
        with blame(f"{folder / 'tokenizer.json'}: not a tokenizer"):
            self.tokenizer = tokenizers.Tokenizer.from_str(self.files["tokenizer.json"])
        self.tokenizer.no_padding()  # saved with the tokenizer, these two would change prompts silently
        self.tokenizer.no_truncation()
        config, generation, special, settings = (
            parse_json(self.files.get(f"{n}.json", "{}"), folder / f"{n}.json")
            for n in ("config", "generation_config", "special_tokens_map", "tokenizer_config")
        )
        settings = special | settings
        tokens = {k: v["content"] if isinstance(v, dict) else v for k, v in settings.items() if k.endswith("_token")}
        self.special_tokens = {k: v for k, v in tokens.items() if isinstance(v, str)}
        eos, pad = (self.tokenizer.token_to_id(self.special_tokens.get(k, "")) for k in ("eos_token", "pad_token"))
        stop_ids = {eos}
        for ids in (config.get("eos_token_id"), generation.get("eos_token_id")):
            stop_ids.update(ids if isinstance(ids, list) else [ids])
        self.stop_ids = sorted(stop_ids - {None})
        if not self.stop_ids:
            raise UserError(f"{folder}: no eos token in config.json, generation_config.json or tokenizer_config.json")
        self.eos_id = self.stop_ids[0] if eos is None else eos  # ends demonstrations
        self.pad_id = self.eos_id if pad is None else pad  # may be an eos: nothing is ever inferred from it
        self.vocab_size = max(*self.tokenizer.get_vocab(with_added_tokens=True).values(), *self.stop_ids) + 1

        template = self.files.get("chat_template.jinja", settings.get("chat_template"))
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        env.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # jinja2's own escapes HTML
        env.globals.update(raise_exception=self._raise, strftime_now=time.strftime)
        with blame(f"{folder}: the chat template does not parse"):
            self.template = env.from_string(template) if template else None

    @classmethod
    def from_texts(cls, texts: list[str]) -> HFTokenizer:
        """A character tokenizer over what `texts` contain: a BPE without merges."""
        special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
        vocab = {token: i for i, token in enumerate([*special.values(), *sorted(set("".join(texts)))])}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>"))
        tokenizer.decoder = tokenizers.decoders.Fuse()
        tokenizer.add_special_tokens(list(special.values()))
        config = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
        return cls("embedded", {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": config})

    @staticmethod
    def _raise(message: str):
        raise jinja2.TemplateError(message)

    def _render(self, *turns: tuple[str, str]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        with blame(f"{self.folder}: the chat template does not render"):
            return self.template.render(messages=messages, add_generation_prompt=True, **self.special_tokens)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_prompt(self, prompt: str) -> list[int]:
        """A user turn in the chat template; without one the plain text, after BOS where the tokenizer adds it."""
        text = self._render(("user", prompt)) if self.template else prompt
        return self.encode(text, add_special_tokens=not self.template)

    def encode_feedback(self, text: str) -> list[int]:
        """The environment's message after a sampled turn: what the template puts between two turns of the assistant."""
        if self.template is not None:
            marker = "<<assistant turn>>"
            whole = self._render(("user", "-"), ("assistant", marker), ("user", text))
            _, found, text = whole.partition(marker)
            if not found:
                raise UserError(f"{self.folder}: the chat template leaves out the assistant's turn")
            for stop_id in self.stop_ids:  # the actor has sampled the end of its turn itself
                text = text.removeprefix(self.tokenizer.id_to_token(stop_id) or "")
        return self.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens; ids that the tokenizer does not know (padding rows of the model) are skipped."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


# === 3. Model ===


@dataclass
class ModelConfig:
    """Shape of a Llama, Qwen2 or Qwen3 decoder. `raw` is the config.json it came from, written back on export."""

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
    def from_hf(cls, raw: dict, path: str | Path = "config.json") -> ModelConfig:
        """Read a config.json of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""
        kind, rope = raw.get("model_type"), raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        for key, value, supported in [
            ("model_type", kind, ("llama", "qwen2", "qwen3")), ("rope type", rope_type, ("default", "llama3")),
            ("hidden_act", raw.get("hidden_act", "silu"), ("silu",)),
            ("use_sliding_window", raw.get("use_sliding_window"), (None, False)),
        ]:
            if value not in supported:
                raise UserError(f"{path}: {key} {value!r}: must be one of {', '.join(map(str, supported))}")
        required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [key for key in required if not isinstance(raw.get(key), int)]:
            raise UserError(f"{path}: {missing[0]} is missing or not an integer")
        optional = ("rms_norm_eps", "tie_word_embeddings", "max_position_embeddings")
        # Bias: Qwen2 has it on q, k, v; Llama and Qwen3 by attention_bias on q, k, v, o, Llama by mlp_bias in the MLP.
        bias, heads = raw.get("attention_bias", False), raw["num_attention_heads"]
        return cls(
            **{key: raw[key] for key in (*required, *optional) if key in raw}, raw=raw,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            rope_theta=rope.get("rope_theta", raw.get("rope_theta", 10000.0)),
            rope_scaling=rope if rope_type == "llama3" else None,
            qkv_bias=kind == "qwen2" or bias, o_bias=kind != "qwen2" and bias,
            mlp_bias=kind == "llama" and raw.get("mlp_bias", False), qk_norm=kind == "qwen3",
        )


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Rotary frequencies [D / 2] (https://arxiv.org/abs/2104.09864), stretched where Llama 3.1's scaling asks."""
    exponents = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
    frequencies, s = config.rope_theta**-exponents, config.rope_scaling
    if s is None:
        return frequencies
    turns = s["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # over the original context
    smooth = ((turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])).clamp(0, 1)
    return (1 - smooth) * frequencies / s["factor"] + smooth * frequencies


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, T, H, D] by angles with cos, sin [B, T, 1, D / 2], in fp32. Pairs are (i, i + D / 2), as in HF."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


# x @ weight.T + bias for a weight that oneDNN has laid out for its kernels; that one no longer tells its shape, so the
# number of output features is passed. An operator of its own: torch.compile takes oneDNN's for constant weights only.
namespace = re.sub(r"\W", "_", __name__)
operators = torch.library.Library(namespace, "FRAGMENT")
operators.define("packed_linear(Tensor x, Tensor weight, Tensor? bias, int features) -> Tensor")
operators.impl("packed_linear", lambda x, weight, bias, features: torch.ops.mkldnn._linear_pointwise.default(
    x, weight, bias, "none", [], ""), "CompositeExplicitAutograd")  # fmt: skip
torch.library.register_fake(f"{namespace}::packed_linear", lambda x, weight, bias, features: x.new_empty(
    *x.shape[:-1], features))  # fmt: skip
packed_linear = getattr(torch.ops, namespace).packed_linear.default


class Linear(nn.Linear):
    """nn.Linear that a rollout on the CPU packs: else each product with a few rows would lay out the weight again."""

    packed = None

    def pack(self, rows: int) -> None:
        """Lay out the weight, as it is now, for products with `rows` rows; 0 takes that back."""
        able = self.weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        if self.weight.dtype == torch.bfloat16:
            able = able and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), rows) if able and rows else None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return super().forward(x)
        return packed_linear(x, self.packed, self.bias, self.out_features)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.D, hidden = layer, config.head_dim, config.hidden_size
        self.H, self.Hkv = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = Linear(hidden, self.H * self.D, bias=config.qkv_bias)
        self.k_proj = Linear(hidden, self.Hkv * self.D, bias=config.qkv_bias)
        self.v_proj = Linear(hidden, self.Hkv * self.D, bias=config.qkv_bias)
        self.o_proj = Linear(self.H * self.D, hidden, bias=config.o_bias)
        norm = functools.partial(nn.RMSNorm, self.D, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()

    def forward(self, x, cos, sin, cache=None, positions=None, mask=None):
        B, T, _ = x.shape
        q = apply_rope(self.q_norm(self.q_proj(x).view(B, T, self.H, self.D)), cos, sin)
        k = apply_rope(self.k_norm(self.k_proj(x).view(B, T, self.Hkv, self.D)), cos, sin)
        v = self.v_proj(x).view(B, T, self.Hkv, self.D)
        if cache is None:
            # Rows start at index 0, so causality alone hides the padding on the right: no mask, the fast kernel stays.
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H or Hkv, T, D]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.H != self.Hkv)
            return self.o_proj(out.transpose(1, 2).flatten(2))
        # With a mask, `enable_gqa` takes the slow math kernel: the G query heads of a key head become queries of it.
        k, v = cache.update(self.layer, k, v, positions)  # [B, Hkv, S, D]
        q = q.view(B, T, self.Hkv, -1, self.D).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, Hkv, G * T, D]
        out = torch.cat([  # of one half of the rows, then of the other, whose longest may be shorter
            F.scaled_dot_product_attention(q[a:b], k[a:b, :, :live], v[a:b, :, :live], attn_mask=mask[a:b, ..., :live])
            for a, b, live in cache.parts])  # fmt: skip
        out = out.view(B, self.Hkv, -1, T, self.D).permute(0, 3, 1, 2, 4)  # [B, T, Hkv, G, D]
        return self.o_proj(out.flatten(2))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.self_attn, self.mlp = Attention(config, layer), MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, *context) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *context)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """Actor and reference (head="lm"), critic and reward model (head="scalar"). Parameters are named as in HF."""

    def __init__(self, config: ModelConfig, head: Literal["lm", "scalar"] = "lm"):
        super().__init__()
        self.config, self.head, self.checkpointing = config, head, False
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers)),
            "norm": nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
        })
        if head == "lm":
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        else:
            self.score = nn.Linear(config.hidden_size, 1, bias=False)
        self.register_buffer("rope", rope_frequencies(config), persistent=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.head == "lm" and self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens, positions=None, cache=None, select=None, targets=None, temperature=1.0):
        """Logits [B, T, V] of `tokens` [B, T]; scalar head: [B, T]. The one entry point, for FSDP's hooks.

        `select` [n], flat indices into B * T, limits the head to those positions: logits [n, V], scalars [n]. With
        `targets` [n] the result is (log-probs [n], entropy [n]) at `temperature`, and logits never exist as a whole.
        The rollout passes `positions` [B, T] and its `cache`, which keys and values are written to and read from.
        """
        B, T = tokens.shape
        angles = torch.arange(T, device=tokens.device)[None] if positions is None else positions  # [B or 1, T]
        angles = angles[..., None, None].float() * self.rope  # [B or 1, T, 1, D / 2]
        context = (angles.cos(), angles.sin())
        if cache is not None:
            G = self.config.num_attention_heads // self.config.num_key_value_heads
            # Repeated as a whole, since Attention folds [G, T] queries in this order: mask [B, 1, G * T, S].
            context += (cache, positions, cache.mask(positions).repeat(1, G, 1)[:, None])
        x = self.model.embed_tokens(tokens)  # [B, T, hidden]
        for block in self.model.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, *context, use_reentrant=False)
            else:
                x = block(x, *context)
        x = self.model.norm(x).flatten(0, 1)  # [B * T, hidden]
        x = x if select is None else x[select]  # [n, hidden]
        if targets is not None:
            return token_logprobs(x, self.lm_head.weight, targets, temperature)
        # Values and rewards in fp32: bfloat16 would round them by more than the value clip resolves.
        out = self.lm_head(x) if self.head == "lm" else self.score(x.float())[:, 0].clone()  # FSDP wants no view
        return out if select is not None else out.unflatten(0, (B, T))


def find_checkpoint(flag: str, name: str) -> Path:
    """Folder of a checkpoint: `name` itself, or a snapshot of the hub's org/name."""
    if Path(name).is_dir():
        return Path(name)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise UserError(f"--{flag} {name}: no such folder, and not a hub id of the form org/name")
    import huggingface_hub

    with blame(f"--{flag} {name}: no such folder, and the hub cannot be reached or lacks it"):
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))


def load_hf_checkpoint(path, dtype=torch.float32, device="cpu", head="lm") -> tuple[Transformer, ModelConfig]:
    """Load config.json and safetensors, single or sharded, of folder `path`. Raises UserError naming file or tensor.

    With head="scalar" an lm head in the files is passed over, and a missing score head starts from zeros.
    """
    path = Path(path)
    json_path, index, files = path / "config.json", path / "model.safetensors.index.json", ["model.safetensors"]
    with blame(f"{json_path}: malformed"), torch.device("meta"):
        config = ModelConfig.from_hf(parse_json(read_text(json_path), json_path), json_path)
        model = Transformer(config, head)
    if index.is_file():
        with blame(f"{index}: has no weight_map of file names"):
            files = sorted({str(file) for file in parse_json(read_text(index), index)["weight_map"].values()})
    state, passed_over = {}, ["rotary_emb.inv_freq", "score.weight" if head == "lm" else "lm_head.weight"]
    if config.tie_word_embeddings:
        passed_over.append("lm_head.weight")
    for file in files:
        with blame(f"{path / file}: missing or corrupt; only safetensors are read"):
            tensors = safetensors.torch.load_file(path / file, device=str(device))
        state |= {name: x.to(dtype) for name, x in tensors.items() if not name.endswith(tuple(passed_over))}
    if head == "scalar":
        state.setdefault("score.weight", torch.zeros(1, config.hidden_size, dtype=dtype, device=device))
    elif config.tie_word_embeddings and "model.embed_tokens.weight" in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with blame(f"{path}: the weights do not fit config.json"):
        model.load_state_dict(state, assign=True)  # names the tensors that are missing, unknown or of another shape
    model.tie_weights()  # `assign` has untied them
    return model.to(device), config


def save_hf_checkpoint(model: Transformer, config: ModelConfig, tokenizer: HFTokenizer, path: str | Path) -> None:
    """Write a folder that transformers' AutoModelForCausalLM and AutoTokenizer load, in place of an earlier one."""
    path, partial = Path(path), Path(f"{path}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    state = {name: p.detach().cpu().contiguous() for name, p in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    safetensors.torch.save_file(state, partial / "model.safetensors", metadata={"format": "pt"})
    dtype_key = "dtype" if "dtype" in config.raw else "torch_dtype"  # of transformers 5 and 4
    raw = config.raw | {dtype_key: str(model.model.norm.weight.dtype).removeprefix("torch.")}
    for name, text in (tokenizer.files | {"config.json": json.dumps(raw, indent=2)}).items():
        (partial / name).write_text(text, encoding="utf-8")
    old = Path(f"{path}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    shutil.rmtree(old, ignore_errors=True)


# === 4. Rollout ===


def free_memory(device: torch.device) -> float:
    """Bytes, as far as the system tells."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    with contextlib.suppress(OSError, TypeError):
        return 1024 * int(re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())[1])
    return math.inf


class KVCache:
    """Keys and values of `rows` rows, [L][2][rows, Hkv, size + 1, D]; padding is written to position `size`."""

    def __init__(self, config: ModelConfig, rows: int, size: int, dtype=torch.float32, device="cpu"):
        L, Hkv, D = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        row, free = 2 * L * Hkv * (size + 1) * D * dtype.itemsize, free_memory(torch.device(device))  # bytes
        if rows * row > free:
            raise UserError(
                f"--rollout-slots: a KV cache of 2 x {L} layers x {rows} rows x {Hkv} heads x {size + 1} tokens x {D} "
                f"x {dtype.itemsize} bytes takes {rows * row / 1e9:,.1f} GB; {free / 1e9:,.1f} GB are free, enough for "
                f"{100 * free // (rows * row):.0f}% of these rows; or lower --max-prompt-tokens and --max-new-tokens")
        buffer = functools.partial(torch.zeros, rows, Hkv, size + 1, D, dtype=dtype, device=device)
        self.layers = [(buffer(), buffer()) for _ in range(L)]  # as one tensor compiled code would copy it each step
        self.size, self.all_rows = size, torch.arange(rows, device=device)
        self.look_at(size + 1)

    def look_at(self, *lives: int, rows: Tensor | None = None) -> None:
        """The next forwards are of `rows` (default all) in as many parts as `lives`, the positions they attend to."""
        count, n = len(self.all_rows if rows is None else rows), len(lives)
        lives = [min(-(-live // 16) * 16, self.size + 1) for live in lives]  # in steps: fewer shapes
        parts = ((count * i // n, count * (i + 1) // n, live) for i, live in enumerate(lives))
        self.parts, self.live, self.rows = [part for part in parts if part[0] < part[1]], max(lives), rows

    def mask(self, positions: Tensor) -> Tensor:
        """[B, T, live]: a query sees positions up to its own; what an earlier sample left behind lies beyond.

        To add to scores, 0 or -infinity: of booleans attention would make this in every layer.
        """
        beyond = torch.arange(self.live, device=positions.device) > positions[..., None]
        return self.layers[0][0].new_zeros(beyond.shape).masked_fill_(beyond, -math.inf)

    def update(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Write k, v [B, T, Hkv, D] at `positions` [B, T]; returns all live keys and values, [B, Hkv, live, D] each."""
        buffers, rows = self.layers[layer], self.all_rows if self.rows is None else self.rows
        taken = slice(len(rows)) if self.rows is None else rows
        for buffer, new in zip(buffers, (k, v), strict=True):
            buffer[rows[:, None], :, positions] = new
        return tuple(buffer[taken, :, : self.live] for buffer in buffers)


def hash32(x: Tensor) -> Tensor:
    """Finalizer lowbias32 (https://github.com/skeeto/hash-prospector) on int32, whose `>>` keeps the sign: mask."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * -0x7B935975  # 0x846CA68B as int32; products wrap
    return x ^ (x >> 16 & 0xFFFF)


def sample_keys(seed: int, iteration: int, sample_ids, device="cpu") -> Tensor:
    """One key word [N] for each sample of an iteration."""
    word = lambda x: torch.tensor(list(x), device=device).to(torch.int32)
    return hash32(hash32(hash32(word([seed])) ^ word([iteration])) ^ word(sample_ids))


def exponential_noise(keys: Tensor, index: Tensor, vocab_size: int) -> Tensor:
    """Exponential noise [B, V], a pure function of key word, token index [B] and vocabulary id: no generator, no state.

    A sample's text then does not depend on its batch or slot, on order, ranks or a resume.
    """
    second = hash32(hash32(keys ^ 0x5851F42D) ^ index.to(torch.int32))  # the token's key word; any constant will do
    ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    x = hash32(hash32(ids ^ keys[:, None]) ^ second[:, None])  # [B, V]
    # 31 bits: with the top 24 alone u rounds to 1, and rare tokens are drawn too often.
    u = ((x >> 1) & 0x7FFFFFFF).float().add(0.5).mul(2**-31).clamp(max=1 - 2**-24)
    return -torch.log1p(-u)


@dataclass
class Rollout:
    """N samples of up to T tokens, on the CPU."""

    tokens: Tensor  # [N, T] int64: prompt, response, text of the environment
    mask: Tensor  # [N, T] bool: the actor sampled this token
    logprobs: Tensor  # [N, T] fp32: log-prob with which it did, 0 outside the mask
    rewards: Tensor  # [N, T] fp32: a turn's reward on its last sampled token
    lengths: Tensor  # [N] int64
    stop: list[str]  # "eos": the episode ended; "length": cut by max_new_tokens; "env": truncated by the environment
    texts: list[str]  # what followed the prompt
    stats: dict[str, float]  # logged as they are
    prompts: list[str]
    success: list[bool]  # info["success"] of the last step, else whether the rewards sum to more than 0


def episodes_at_once(args: Args, samples: int) -> int:
    """How many environments a rollout of `samples` can use: those of its slots and of the spare rows."""
    return min(args.rollout_slots + max(1, args.rollout_slots // 4), samples)


class Engine:
    """Samples episodes in B slots, the rows that decode, in one shape. A row holds a sample at a time, `ids` its text.

    Between two host reads K tokens are decoded. A row that ends earlier is dead for the rest of the block: it reads and
    writes the scratch position. A row's newest token is never in the cache: the next `decode_step` feeds it.
    In spare rows of the cache the prompts of the next samples are prefilled, many at a time, and wait for a slot.
    """

    def __init__(self, actor, tokenizer, envs, seeds, sample_ids, args, iteration, greedy):
        self.actor, self.tokenizer, self.args, self.greedy = actor, tokenizer, args, greedy
        self.envs = [env if isinstance(env, EnvThread) else EnvThread(env, args.env_timeout) for env in envs]
        self.seeds, self.sample_ids, N, weight = list(seeds), list(sample_ids), len(seeds), actor.model.norm.weight
        self.rows = min(episodes_at_once(args, N), len(envs))
        self.slots = B = min(args.rollout_slots, self.rows)
        self.K = 8 if weight.is_cuda else 1  # on the CPU a host read costs nothing
        self.S = S = args.max_prompt_tokens + args.max_new_tokens
        self.cache = KVCache(actor.config, self.rows, S, weight.dtype, weight.device)
        self.cache.all_rows = self.cache.all_rows[:B]  # those that decode
        zeros, self.tensor = (functools.partial(make, device=weight.device) for make in (torch.zeros, torch.tensor))
        # By sample; column S is scratch.
        self.tokens, self.mask = zeros(N, S + 1, dtype=torch.int64), zeros(N, S + 1, dtype=torch.bool)
        self.logprobs = zeros(N, S + 1)
        self.rewards, self.lengths, self.success = torch.zeros(N, S), [0] * N, [False] * N
        self.prompts, self.texts, self.stop = [""] * N, [""] * N, [""] * N
        self.keys = sample_keys(args.seed, iteration, self.sample_ids, weight.device)
        self.new_tokens = [args.max_new_tokens] * N  # how many may follow the prompt; benchmarks force lengths here
        # By slot, on the device: the sample it holds, the row's length and limit, whether the row decodes.
        self.sample, self.length, self.limit = (zeros(B, dtype=torch.int64) for _ in range(3))
        self.alive, self.stop_ids = zeros(B, dtype=torch.bool), torch.tensor(tokenizer.stop_ids, device=weight.device)
        # By row, on the host: sample, its token ids, how many of them are in the cache, how many are the prompt.
        self.holds, self.ids, self.cached, self.prompt_length = ([0] * self.rows for _ in range(4))
        self.prompt_in = [None] * self.rows  # the prompt, but its last token, whose keys the row begins with
        # A row is free, or its environment is at work ({row: call}), or it waits for its prefill, or it decodes.
        self.pending, self.waiting, self.decoding, self.staged, self.free = {}, [], [], [], list(range(self.rows))
        self.turns = [[] for _ in range(N)]  # by sample: decode blocks of each turn
        self.patience = 0.5  # seconds still to be spent on waiting for environments while rows could decode
        # Rows and width of a prefill. Fixed, since a GPU rounds differently in other shapes, and timing would show.
        self.R, self.C = (16, 64) if weight.is_cuda else (256, 8)
        self.budget = max(1, args.prefill_tokens // self.C)  # chunks between two decode blocks
        self.counts = collections.Counter()
        self.compiled = args.compile == "on"

    def admit(self, slot: int, sample: int) -> None:
        """Give a row to a sample, whose environment begins."""
        self.free.remove(slot)
        self.holds[slot], self.pending[slot] = sample, self.envs[slot].submit("reset", seed=self.seeds[sample])

    def free_rows(self) -> list[int]:
        """Rows for the next samples: spare ones, and slots beyond those that samples in spare rows will come to."""
        free, slots = sorted(self.free), sum(row < self.slots for row in self.free)
        return free[min(slots, self.rows - self.slots - (len(free) - slots)) :]

    def answered(self) -> list[int]:
        """Rows whose environment has answered, or is too late."""
        start = time.monotonic()
        if self.patience > 0:  # while all answer at once the clock has no say in what is decoded together
            concurrent.futures.wait(self.pending.values(), timeout=self.patience)
            self.patience -= max(0.0, time.monotonic() - start - 0.001)
        late = lambda call: start - call.started >= self.args.env_timeout
        return sorted(row for row, call in self.pending.items() if call.done() or late(call))

    @torch.no_grad()
    def prefill(self, budget: int) -> int:
        """Write keys and values of the waiting rows' new tokens, all but the newest, to the cache.

        A forward takes R chunks of C tokens, also several of a prompt: each layer writes all keys before it reads any.
        At most `budget` chunks, other rows go on waiting; returns what is left. A prompt that a row has is copied.
        """
        chunks, copies, ready = [], [], []  # of chunks: row, tokens, positions
        for row in self.waiting:
            new = self.ids[row][:-1]
            if self.cached[row] == 0 and new in self.prompt_in:
                copies.append((row, self.prompt_in.index(new)))
                self.cached[row] = len(new)
            while (start := self.cached[row]) < len(new) and len(chunks) < budget:
                self.prompt_in[row] = new if start == 0 else self.prompt_in[row]
                self.cached[row] = end = min(start + self.C, len(new))
                padding = start + self.C - end
                chunks.append((row, new[start:end] + [0] * padding, [*range(start, end)] + [self.S] * padding))
                self.counts["prefill_tokens"] += end - start
            if start < len(new):
                break
            ready.append(row)
        self.waiting = self.waiting[len(ready) :]
        for first in range(0, len(chunks), self.R):
            part = chunks[first : first + self.R]
            if self.tokens.is_cuda:
                part += [(0, [0] * self.C, [self.S] * self.C)] * (self.R - len(part))
            rows, tokens, positions = map(self.tensor, zip(*part, strict=True))  # [R], [R, C], [R, C]
            self.cache.look_at(max(self.cached[row] for row, *_ in part), rows=rows)
            self.actor(tokens, positions, self.cache, select=rows[:0])  # no logits wanted
        self.copy_rows(copies)
        for row, source in copies:
            self.prompt_in[row] = self.prompt_in[source]
        self.staged += [row for row in ready if row >= self.slots]
        self.start_decoding([row for row in ready if row < self.slots])
        return budget - len(chunks)

    def seat(self) -> list[int]:
        """Let samples in spare rows decode in free slots, which it returns; long rows gather in the second half."""
        slots = [row for row in sorted(self.free) if row < self.slots][: len(self.staged)]
        for slot in slots:
            first_half = [row for row in self.decoding if row < self.slots // 2 <= slot and not self.compiled]
            path = [slot, *heapq.nlargest(1, first_half, key=lambda row: len(self.ids[row]))]
            for target, row in itertools.pairwise([*path, self.staged.pop(0)]):
                for state in (self.envs, self.holds, self.ids, self.cached, self.prompt_length):
                    state[target], state[row] = state[row], state[target]
                self.free[self.free.index(target)], self.prompt_in[target] = row, self.prompt_in[row]
                self.decoding = [other for other in self.decoding if other != row]
                for buffer in itertools.chain(*self.cache.layers):  # one by one is faster than by index
                    buffer[target, :, : len(self.ids[target])] = buffer[row, :, : len(self.ids[target])]
            self.start_decoding(path)
        return slots

    def copy_rows(self, copies: list[tuple[int, int]]) -> None:
        """For each (target, source) copy the keys and values of the text that the target holds."""
        if copies:
            (targets, sources), live = self.tensor(copies).T, max(len(self.ids[target]) for target, _ in copies)
            for buffer in itertools.chain(*self.cache.layers):
                buffer[targets, :, :live] = buffer[sources, :, :live]

    def start_decoding(self, slots: list[int]) -> None:
        """Put the text of rows, whose cache is filled, and their state on the device."""
        if not slots:
            return
        texts, self.decoding = [self.ids[slot] for slot in slots], self.decoding + slots
        rows, width = self.tensor(slots), max(map(len, texts))
        state = [(self.holds[slot], len(self.ids[slot]), len(self.ids[slot]) + self.room(slot)) for slot in slots]
        self.sample[rows], self.length[rows], self.limit[rows] = self.tensor(state).T
        self.tokens[self.sample[rows], :width] = self.tensor([text + [0] * (width - len(text)) for text in texts])
        self.alive[rows] = True

    def decode_step(self) -> Tensor:
        """Sample one token in every row that is alive; returns them [B]. Fixed shapes, no host read."""
        position = torch.where(self.alive, self.length - 1, self.S)
        newest = self.tokens[self.sample, position]
        logits = self.actor(newest[:, None], position[:, None], self.cache, select=self.cache.all_rows)  # [B, V]
        logprobs = scores = F.log_softmax(logits.float() / self.args.temperature, dim=-1)
        if not self.greedy:  # argmax of p / exponential noise draws from p, without the sync of torch.multinomial
            scores = logprobs.exp() / exponential_noise(self.keys[self.sample], self.length, logits.shape[1])
        token = scores.argmax(dim=-1)
        position = torch.where(self.alive, self.length, self.S)
        self.tokens[self.sample, position], self.mask[self.sample, position] = token, True
        self.logprobs[self.sample, position] = logprobs.gather(1, token[:, None])[:, 0]
        self.length += self.alive
        self.alive &= ~torch.isin(token, self.stop_ids) & (self.length < self.limit)
        return token

    @torch.no_grad()
    def decode_block(self) -> list[int]:
        """Decode K tokens, then read them in one go; returns the slots whose turn has ended."""
        lives = [len(self.ids[slot]) + self.K if slot in self.decoding else 1 for slot in range(self.slots)]
        # Compiled code takes all rows at once: else it would be made anew for either half being the shorter one.
        halves = [lives] if self.compiled else [lives[: self.slots // 2] or [1], lives[self.slots // 2 :]]
        self.cache.look_at(*map(max, halves))
        step = compiled_step if self.compiled else Engine.decode_step
        block = torch.stack([step(self) for _ in range(self.K)], dim=1).tolist()  # [B, K]
        ended, self.counts["row_steps"] = [], self.counts["row_steps"] + self.K * self.slots
        for slot in self.decoding:
            for token in block[slot]:
                self.ids[slot].append(token)
                self.counts["useful_row_steps"] += 1
                if token in self.tokenizer.stop_ids or self.room(slot) == 0:
                    ended.append(slot)
                    break
        self.decoding = sorted(set(self.decoding) - set(ended))
        self.counts["decode_steps"] += self.K
        return ended

    def room(self, slot: int) -> int:
        """How many more tokens the row of `slot` may take."""
        return self.prompt_length[slot] + self.new_tokens[self.holds[slot]] - len(self.ids[slot])

    def submit_turn(self, slot: int) -> None:
        """Hand a finished turn to its environment, which works beside the decoding of other rows."""
        turn = self.ids[slot][self.cached[slot] + 1 :]
        self.turns[self.holds[slot]].append(-(-len(turn) // self.K))
        self.pending[slot] = self.envs[slot].submit("step", self.tokenizer.decode(turn))

    def take_answer(self, slot: int) -> None:
        """Take what the environment says: queue a prompt, or book a reward and queue a text, or end the sample."""
        sample, ids, env, future = self.holds[slot], self.ids[slot], self.envs[slot], self.pending.pop(slot)
        if future.method == "reset":
            self.prompts[sample], _ = env.result(future, f"seed {self.seeds[sample]}")
            self.ids[slot] = prompt_ids(self.tokenizer, self.prompts[sample], self.args)
            self.prompt_length[slot], prompt = len(self.ids[slot]), self.ids[slot][:-1]
            same = prompt == self.prompt_in[slot]  # as the sample before in this row: its keys are there already
            self.prompt_in[slot], self.cached[slot] = (prompt, len(prompt)) if same else (None, 0)
            self.waiting.append(slot)
            return
        where = f"sample {self.sample_ids[sample]} with seed {self.seeds[sample]}, prompt {self.prompts[sample]!r:.80}"
        text, reward, terminated, truncated, info = env.result(future, where)
        self.rewards[sample, len(ids) - 1] = float(reward)
        if ids[-1] not in self.tokenizer.stop_ids:  # cut in mid-turn, whatever the environment makes of it
            stop = "length"
        elif terminated or truncated:
            stop = "eos" if terminated else "env"
        else:
            feedback = self.tokenizer.encode_feedback(text)
            stop = "" if len(feedback) < self.room(slot) else "length"
        if not stop:
            self.cached[slot], self.ids[slot] = len(ids) - 1, ids + feedback  # the newest token is not in the cache
            self.waiting.append(slot)
            return
        self.stop[sample], self.lengths[sample] = stop, len(ids)
        self.texts[sample] = self.tokenizer.decode(ids[self.prompt_length[slot] :])
        self.free.append(slot)
        self.success[sample] = bool(info.get("success", float(self.rewards[sample].sum()) > 0))

    def result(self) -> Rollout:
        T, counts = max(self.lengths), self.counts
        stats = {f"rollout/{name}": counts[name] for name in ("decode_steps", "prefill_tokens")}
        stats["rollout/slot_occupancy"] = counts["useful_row_steps"] / counts["row_steps"]
        # Decode blocks that waves of these turns would take; at best each sample begins where a slot is free first.
        B, ends, starts = self.slots, [0] * self.slots, range(0, len(self.turns), self.slots)
        static = sum(max(turns) for i in starts for turns in itertools.zip_longest(*self.turns[i : i + B], fillvalue=0))
        for turns in self.turns:
            heapq.heapreplace(ends, ends[0] + sum(turns))
        gain, ideal = static * self.K / counts["decode_steps"], static / max(ends)
        stats |= {"rollout/gain_over_static": gain, "rollout/ideal_gain": ideal}
        tensors = (x[:, :T].cpu() for x in (self.tokens, self.mask, self.logprobs, self.rewards))
        return Rollout(*tensors, torch.tensor(self.lengths), self.stop, self.texts, stats, self.prompts, self.success)


compiled_step = torch.compile(Engine.decode_step, dynamic=True)  # at its first call; one for all rollouts


@contextlib.contextmanager
def packed(actor: Transformer, rows: int, args: Args):
    """With --compile on: the actor's weights laid out for products with `rows` rows. They must not change meanwhile."""
    linears = [module for module in actor.modules() if isinstance(module, Linear)] if args.compile == "on" else []
    try:
        for linear in linears:
            linear.pack(rows)
        yield
    finally:
        for linear in linears:
            linear.pack(0)


def rollout(actor, tokenizer, envs, seeds, sample_ids, args, iteration, greedy=False) -> Rollout:
    """Sample one episode for each of `seeds` [N] with `actor`, up to rollout_slots (and len(envs)) at a time.

    `sample_ids` [N] and `iteration` pick the noise. Raises UserError that names environment, sample and prompt.
    """
    with packed(actor, min(args.rollout_slots, len(seeds), len(envs)), args):
        engine = Engine(actor, tokenizer, envs, seeds, sample_ids, args, iteration, greedy)
        samples, budget = collections.deque(range(len(seeds))), engine.budget
        while samples or len(engine.free) < engine.rows:
            for row in engine.free_rows()[: len(samples)]:
                engine.admit(row, samples.popleft())
            if answered := engine.answered():
                for row in answered:
                    engine.take_answer(row)
                continue  # what is free now is filled before any decodes
            urgent = sum(row < engine.slots for row in engine.free) > len(engine.staged) or not engine.decoding
            if engine.waiting and (urgent or min(engine.waiting) < engine.slots):  # else prompts wait for company
                budget = engine.prefill(budget)
            if engine.seat():
                continue
            if engine.decoding:
                for slot in engine.decode_block():
                    engine.submit_turn(slot)
            elif not engine.waiting:  # all environments are at work
                concurrent.futures.wait(engine.pending.values(), 0.1, concurrent.futures.FIRST_COMPLETED)
            budget = engine.budget
        return engine.result()


# === 5. Text environments ===
# gymnasium.Env with text as observation and action: reset(seed=...) -> (prompt, info), step(response) -> (text, reward,
# terminated, truncated, info). A seed always gives the same prompt. info["demonstration"] of reset, a good response,
# feeds the warm start; info["success"] of the last step counts for accuracy.
# NOTE for forks: write yours like these two and pass --env-id my_module:MyEnv-v0; nothing else has to change.


class SortDigits(gym.Env):
    """Prompt "52814=", right answer "12458". A tenth of the strings, by their CRC, is the held-out test split."""

    def __init__(self, split: Literal["train", "test"] = "train", digits: int = 5):
        if split not in ("train", "test") or digits < 1:
            raise ValueError(f"split {split!r}, digits {digits}: split must be train or test, digits at least 1")
        self.test, self.digits = split == "test", digits

    def reset(self, *, seed=None, options=None):
        rng, text = random.Random(seed), ""
        while not text or (zlib.crc32(text.encode()) % 10 == 0) != self.test:
            text = "".join(rng.choices("0123456789", k=self.digits))
        self.answer = "".join(sorted(text))
        return f"{text}=", {"demonstration": self.answer}

    def step(self, response):
        return "", float(response == self.answer), True, False, {"success": response == self.answer}


def parse_number(text: str) -> float | None:
    """The number behind the last `####`, without currency sign and thousands separators."""
    found = re.findall(r"####\s*(?:(-)\s*)?(?:\$\s*)?(-?[\d,]*\.?\d+)", text)
    return float("".join(found[-1]).replace(",", "").replace("--", "-")) if found else None


@functools.lru_cache
def load_gsm8k(path: str) -> list[tuple[str, str, float]]:
    """(question, answer, number) of each line of GSM8K's JSONL (https://github.com/openai/grade-school-math)."""
    rows = []
    for i, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        if line.strip():
            with blame(f"{path}, line {i}: must be UTF-8 JSON with a question, and an answer ending in '#### number'"):
                row = json.loads(line.decode("utf-8"))
                rows.append((row["question"], row["answer"], float(parse_number(row["answer"]))))
    if not rows:
        raise ValueError(f"{path}: is empty")
    return rows


class GSM8K(gym.Env):
    """Grade-school word problems (https://arxiv.org/abs/2110.14168), reward 1 for the right number behind `####`."""

    def __init__(self, path: str, shuffle: bool = True):
        self.rows, self.shuffle, self.order = load_gsm8k(str(path)), shuffle, (None, None)

    def reset(self, *, seed=None, options=None):
        epoch, i = divmod(seed or 0, len(self.rows))  # consecutive seeds see every row once an epoch
        if self.shuffle and self.order[0] != epoch:
            self.order = epoch, random.Random(epoch).sample(range(len(self.rows)), len(self.rows))
        question, answer, self.number = self.rows[self.order[1][i] if self.shuffle else i]
        return f"{question}\n\nThink step by step. End with a line of the form: #### number", {"demonstration": answer}

    def step(self, response):
        success = parse_number(response) == self.number
        return "", float(success), True, False, {"success": success}


gym.register("SortDigits-v0", entry_point=SortDigits)
gym.register("GSM8K-v0", entry_point=GSM8K)


class EnvThread:
    """An environment on a daemon thread of its own: calls run beside decoding, and a hung one cannot keep us alive."""

    def __init__(self, env: gym.Env, timeout: float):
        self.timeout, self.jobs = timeout, queue.SimpleQueue()
        self.name = env.spec.id if getattr(env, "spec", None) else type(env).__name__
        threading.Thread(target=self._work, args=(env, self.jobs), daemon=True).start()

    @staticmethod
    def _work(env, jobs):
        while job := jobs.get():
            future, args, kwargs = job
            try:
                future.set_result(getattr(env, future.method)(*args, **kwargs))
            except BaseException as error:  # raised again by `result`, in the main thread
                future.set_exception(error)

    def __del__(self):
        self.jobs.put(None)

    def submit(self, method: str, *args, **kwargs) -> concurrent.futures.Future:
        future = concurrent.futures.Future()
        future.method, future.started = method, time.monotonic()
        self.jobs.put((future, args, kwargs))
        return future

    def result(self, future: concurrent.futures.Future, where: str) -> tuple:
        """Wait for a call and check what it returned. Raises UserError that names environment, call and `where`."""
        at = f"environment {self.name}, {where}: {future.method}()"
        try:
            value = future.result(timeout=max(0.0, future.started + self.timeout - time.monotonic()))
        except (Exception, SystemExit) as error:
            if not future.done():
                raise UserError(f"{at} gave no answer within --env-timeout {self.timeout:g} s") from None
            raise UserError(f"{at} raised {type(error).__name__}: {error}") from error
        parts = ("prompt: str", "info: dict")
        if future.method == "step":
            parts = ("text: str", "reward: finite number", "terminated", "truncated", "info: dict")
        with blame(f"{at} returned {value!r:.200}, expected ({', '.join(parts)})"):
            fine = isinstance(value, tuple) and len(value) == len(parts)
            fine = fine and isinstance(value[0], str) and isinstance(value[-1], dict)
            if not fine or (future.method == "step" and not math.isfinite(value[1])):
                raise ValueError("not of this form")
        return value

    def reset(self, seed: int) -> tuple[str, dict]:
        return self.result(self.submit("reset", seed=seed), f"seed {seed}")


def make_envs(args: Args, count: int, evaluation: bool = False) -> list[EnvThread]:
    """`count` environments, the first one tried. Raises UserError for an unknown id, wrong arguments or signature."""
    kwargs = json.loads(args.env_kwargs)
    if evaluation:
        kwargs |= {"SortDigits-v0": {"split": "test"}, "GSM8K-v0": {"shuffle": False}}.get(args.env_id, {})
        kwargs |= json.loads(args.eval_env_kwargs)
    with blame(f"--env-id {args.env_id} with arguments {json.dumps(kwargs)}"):
        envs = [gym.make(args.env_id, disable_env_checker=True, **kwargs) for _ in range(count)]
        inspect.signature(envs[0].unwrapped.step).bind("response")
        threads = [EnvThread(env, args.env_timeout) for env in envs]
    threads[0].reset(0)
    return threads


def prompt_ids(tokenizer: HFTokenizer, prompt: str, args: Args) -> list[int]:
    """Ids of a prompt. Raises UserError if it has none, or more than max_prompt_tokens."""
    ids = tokenizer.encode_prompt(prompt)
    if not 1 <= len(ids) <= args.max_prompt_tokens:
        raise UserError(f"--max-prompt-tokens {args.max_prompt_tokens}: {len(ids)} tokens in prompt {prompt!r:.80}")
    return ids


# === 6. PPO math ===


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over mask, 0 if it is empty. Outside of it x may be anything, NaN too."""
    return torch.where(mask.bool(), x, 0.0).sum() / mask.sum().clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """x with mean 0 and unbiased standard deviation 1 over mask, 0 outside; all 0 for fewer than two tokens."""
    centered = torch.where(mask.bool(), x - masked_mean(x, mask), 0.0)
    return centered * torch.rsqrt(centered.square().sum() / (mask.sum() - 1).clamp(min=1) + 1e-8)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Per-token estimates k1, k2, k3 of KL(pi || pi_ref) from tokens of pi (http://joschu.net/blog/kl-approx.html)."""
    logratio = logprobs - ref_logprobs
    return {"k1": logratio, "k2": logratio.square() / 2, "k3": torch.exp(-logratio) - 1 + logratio}[kind]


def compute_gae(rewards, values, mask, gamma, gae_lambda, bootstrap=None) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (https://arxiv.org/abs/1506.02438, eq. 16) over each row's mask=1 tokens.

    They form one chain that skips the environment's text. rewards, values, mask [B, T]; bootstrap [B] = V(state after
    the last token), default 0. Returns (advantages, returns) [B, T], not whitened, 0 outside the mask.
    """
    mask = mask.bool()
    rewards, values = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)
    nextvalues = torch.zeros_like(values[:, 0]) if bootstrap is None else bootstrap  # [B]
    lastgaelam, advantages = torch.zeros_like(nextvalues), torch.zeros_like(values)
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * nextvalues - values[:, t]
        lastgaelam = torch.where(mask[:, t], delta + gamma * gae_lambda * lastgaelam, lastgaelam)
        nextvalues = torch.where(mask[:, t], values[:, t], nextvalues)
        advantages[:, t] = lastgaelam
    advantages = torch.where(mask, advantages, 0.0)
    return advantages, advantages + values


def policy_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip=None, denom=None):
    """Clipped surrogate (https://arxiv.org/abs/1707.06347, eq. 7), dual clip (https://arxiv.org/abs/1912.09729, eq. 5).

    All [B, T]. Returns (loss, stats): sums over mask / denom (default mask.sum()), so that with the global token count
    as denom they add up over microbatches and ranks; ratio_max and ratio_min reduce by max and min.
    """
    mask = mask.bool()
    denom = mask.sum().clamp(min=1) if denom is None else denom
    total = lambda x: torch.where(mask, x, 0.0).sum() / denom
    advantages = torch.where(mask, advantages, 0.0)
    logratio = torch.where(mask, logprobs - old_logprobs, 0.0).clamp(-20, 20)
    ratio = logratio.exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.max(unclipped, clipped)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.min(losses, -advantages * dual_clip), losses)
    with torch.no_grad():
        stats = {
            "clipfrac": total((clipped > unclipped).float()),
            "out_of_clip": total(((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).float()),
            "approx_kl": total(ratio - 1 - logratio),  # k3 of KL(old || new)
            "ratio_mean": total(ratio), "ratio_max": ratio.max(), "ratio_min": ratio.min(),  # 1 outside the mask
        }
    return total(losses), stats


def value_loss(values, old_values, returns, mask, clip=None, denom=None) -> Tensor:
    """Half the squared error, the larger of unclipped and clipped to old_values +- clip; sum over mask / denom."""
    mask = mask.bool()
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    losses = (values - returns).square()
    if clip is not None:
        losses = torch.max(losses, (old_values + (values - old_values).clamp(-clip, clip) - returns).square())
    return 0.5 * losses.sum() / (mask.sum().clamp(min=1) if denom is None else denom)


class TokenLogprobs(torch.autograd.Function):
    """Log-probs and entropy in chunks of positions, whose logits backward computes again: [n, V] never exists."""

    @staticmethod
    def chunks(hidden, weight, targets, temperature):
        rows = max(1, 2 ** (26 if hidden.is_cuda else 22) // len(weight))  # fp32 logits of 16 MB, on a GPU 256 MB
        for part in torch.arange(len(hidden), device=hidden.device).split(rows):
            logprobs = F.log_softmax((hidden[part] @ weight.T).float().div_(temperature), dim=-1)  # [rows, V]
            yield part, logprobs, logprobs.exp(), targets[part, None]

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # the gradient of an unused output comes as None
        out = [hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(2)]
        for part, logprobs, p, target in TokenLogprobs.chunks(hidden, weight, targets, temperature):
            out[0][part], out[1][part] = logprobs.gather(1, target)[:, 0], -(p * logprobs).sum(-1)
        return out[0], out[1]

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for part, logprobs, p, target in TokenLogprobs.chunks(hidden, weight, targets, ctx.temperature):
            # Of the logits: d logprob = onehot - p, d entropy = -p * (log p + entropy). In place: memory.
            factor = 0.0 if grad_logprobs is None else grad_logprobs[part, None]
            if grad_entropy is not None:
                factor = logprobs.sub_((p * logprobs).sum(-1, keepdim=True)).mul_(grad_entropy[part, None]).add_(factor)
            grad = p.mul_(factor).neg_()
            if grad_logprobs is not None:
                grad.scatter_add_(1, target, grad_logprobs[part, None])
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight += grad.T @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def token_logprobs(hidden, weight, targets, temperature=1.0) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at `targets`, and its entropy: [n, d], [V, d], [n] -> [n], [n]."""
    return TokenLogprobs.apply(hidden, weight, targets, temperature)


def at_sampled(model: Transformer, tokens, mask, temperature=1.0) -> tuple[Tensor, Tensor | None]:
    """What `model` says of the tokens under `mask`: (log-probs, entropy) or (values, None), [B, T], 0 elsewhere.

    The output at t - 1 predicts token t, and values the state before it. Nothing else in this file shifts by one.
    """
    rows, cols = mask.nonzero(as_tuple=True)
    select = rows * mask.shape[1] + cols - 1  # [n], flat; cols >= 1, since a prompt has a token
    spread = lambda flat: flat.new_zeros(mask.shape).masked_scatter(mask, flat)
    if model.head == "scalar":
        return spread(model(tokens, select=select)), None
    logprobs, entropy = model(tokens, select=select, targets=tokens[rows, cols], temperature=temperature)
    return spread(logprobs), spread(entropy)


def microbatches(indices: Tensor, lengths: Tensor, token_budget: int) -> list[Tensor]:
    """Cut `indices` into groups of like length: rows x longest within `token_budget`, padding in a sixteenth of it.

    Without the second limit the few longest rows take short ones along; one much tighter makes too many groups.
    """
    order = indices[lengths[indices].argsort(descending=True, stable=True)]
    sizes, cuts, first, padding = lengths[order].tolist(), [], 0, 0
    for i, n in enumerate(sizes):
        padding += sizes[first] - n
        if i > first and ((i + 1 - first) * sizes[first] > token_budget or padding > token_budget // 16):
            cuts.append(i)
            first, padding = i, 0
    return list(order.tensor_split(cuts)) if sizes else []


def crop(rows: Tensor, lengths: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Rows of tensors [N, T], cut to the longest of them: [b, t]. For no rows a blank one that carries no weight."""
    if len(rows) == 0:
        return [x.new_zeros(1, 2) for x in tensors]
    width = int(lengths[rows].max())
    return [x[rows, :width] for x in tensors]


@torch.no_grad()
def over_rollout(model: Transformer, tokens: Tensor, mask: Tensor, lengths: Tensor, args: Args) -> Tensor:
    """Log-probs or values of `at_sampled`, without gradient, [N, T]: this rank's share of the rows, 0 elsewhere."""
    out = torch.zeros(mask.shape, device=mask.device)
    for rows in model.ranks.microbatches(torch.arange(len(lengths)), lengths, args.micro_batch_tokens):
        mb_tokens, mb_mask = crop(rows, lengths, tokens, mask)
        out[rows, : mb_mask.shape[1]], _ = at_sampled(model, mb_tokens, mb_mask, args.temperature)
    return out


# === 7. Ratio diagnosis ===

Diagnosis = collections.namedtuple("Diagnosis", "cause evidence advice")


def diagnose_ratio(signals: dict) -> Diagnosis:
    """Why is the importance ratio stuck at 1, or clipping saturated? `cause` is None for a healthy iteration.

    `signals` of one iteration: phase ("train", "critic_warmup"); first_dev, last_dev, post_dev: max |ratio - 1| on the
    first, last minibatch and of the updated actor; out_of_clip: share on the last; steps, planned, skipped, early_stop;
    tokens; adv_raw_std, reward_std; grad_norm, lr; changed_frac, update_norm, param_norm, param_dtype of its weights;
    signed_t: t value of sign(advantage) * (post - old log-prob); sampler_diff: mean |sampler's - trainer's log-prob|.
    """
    s = types.SimpleNamespace(**signals)
    noise, relative_update = 2 * max(s.first_dev, 1e-6), s.update_norm / max(s.param_norm, 1e-30)
    half = "bfloat16" in f"{s.param_dtype} {signals.get('compute_dtype')}"  # there, |ratio - 1| is rounding noise
    moved = s.signed_t > 3 if half else s.post_dev > 5 * noise
    devs = f"max|ratio-1| {s.first_dev:.1e} on the first, {s.last_dev:.1e} on the last minibatch, then {s.post_dev:.1e}"
    if half and s.signed_t <= 3:
        devs += f" (undecided: bfloat16 noise, drift t = {s.signed_t:.1f})"
    steps = f"{s.steps} of {s.planned} steps made"
    if s.skipped:
        steps += f", {s.skipped} skipped for gradients that are not finite, the last in {signals.get('bad_tensor')}"
    stds = f"std of advantages {s.adv_raw_std:.1e}, of rewards {s.reward_std:.1e}"
    why_zero = "the critic fits perfectly, or rewards land outside the mask"
    if s.reward_std < 1e-6:
        why_zero = "the reward is constant: look at the environment and at how hard the task is"
    underflow = ("bf16_underflow", "bfloat16" in s.param_dtype and s.changed_frac < 0.5,
                 f"{s.changed_frac:.1%} of {s.param_dtype} parameters changed",
                 "updates are rounded away: keep float32 master weights")  # fmt: skip
    stuck = [  # (cause, whether it holds, evidence, advice); the first that holds is it
        ("critic_warmup", s.phase == "critic_warmup", "no actor steps", "ends with --critic-warmup-iterations"),
        ("kl_early_stop", s.early_stop and s.steps < s.planned, steps, "raise --target-kl or lower --actor-lr"),
        ("one_update_by_design", s.planned == s.steps == 1 and moved, devs, "correct; more epochs make it move"),
        ("steps_skipped", s.tokens > 0 and (s.skipped > 0 or s.steps == 0), steps, "look at rewards, lower --actor-lr"),
        ("empty_mask", s.tokens == 0, "0 trained tokens", "all truncated or filtered: --max-new-tokens, eos, mask"),
        ("advantage_zero", s.adv_raw_std < 1e-6, stds, why_zero),
        ("no_grad_to_actor", s.grad_norm == 0, "gradient norm 0", "log-probs are detached or parameters frozen"),
        ("lr_zero", s.lr == 0, "learning rate 0", "--actor-lr, or a schedule that starts or ends at 0"),
        ("optimizer_noop", s.changed_frac == 0 and s.lr > 1e-10, f"lr {s.lr:.1e}, no weight changed",
         "the optimizer holds other parameters than the model: it was built before a copy, cast or wrap"),
        ("old_logprob_recomputed", s.steps > 1 and moved, devs,
         "the loss takes the current policy for the old one: record old_logprobs once, before the first update"),
        underflow,
        ("lr_or_clip_too_small", relative_update < 1e-6, f"relative update {relative_update:.1e}",
         "raise --actor-lr (with an optimizer like SGD also --max-grad-norm)"),
        ("forward_ignores_update", s.changed_frac > 0 and s.post_dev <= (2e-6 if half else noise), devs,
         "a stale copy of the weights runs"),
    ]
    always = [
        underflow,  # the few weights that do change may move the ratio
        ("forward_mismatch", s.first_dev > 1e-4 and not half, devs,
         "the first ratio must be 1: look for dropout, shifted mask or positions, temperature, sampler log-probs"),
        ("sampler_mismatch", s.sampler_diff > (0.05 if half else 1e-3), f"mean log-prob gap {s.sampler_diff:.1e}",
         "sampler and trainer disagree: stale rollout weights, or other arithmetic (then see --rollout-is-cap)"),
        ("too_tight_clip", s.out_of_clip > 0.9, f"{s.out_of_clip:.0%} of tokens", "widen it or lower --actor-lr"),
    ]
    at_noise = (s.signed_t <= 3 or s.steps <= 1) if half else s.last_dev <= noise
    pinned = s.last_dev <= 2e-6 or at_noise
    for cause, holds, evidence, advice in (stuck if pinned else []) + always:
        if holds:
            return Diagnosis(cause, evidence, advice)
    return Diagnosis(None, devs, "")


# === 8. Parallelism ===
# Compute is sharded, experience is replicated: every rank holds all of a rollout and computes its share of the rows of
# each minibatch. What ranks must agree on follows from what all of them hold, so they make the same collective calls.


# Long enough for a rank whose rollout takes longer than the others'. Of ranks that die torchrun knows at once.
TIMEOUT = datetime.timedelta(hours=2)


class Ranks:
    """The processes that hold a model, or all of them, the world. Alone a process talks to nobody."""

    def __init__(self, ranks, device: torch.device, shard_size: int | None = None):
        self.ranks, self.device, self.group, self.mesh = list(ranks), device, None, None
        self.rank, self.size = int(os.environ.get("RANK", 0)), len(self.ranks)
        self.mine = self.rank in self.ranks
        if dist.is_initialized():  # groups are made by all ranks together, members or not
            self.group = dist.new_group(self.ranks, timeout=TIMEOUT)
            grid = torch.tensor(self.ranks).view(-1, shard_size or self.size).squeeze(0)
            self.mesh = dist.DeviceMesh(device.type, grid, mesh_dim_names=("replicate", "shard")[-grid.ndim :])

    def gather(self, value) -> list:
        """`value`, anything that can be pickled, of every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, self.group)
        return values

    @contextlib.contextmanager
    def agree(self):
        """What the block raises on one rank is raised on all: none goes on alone and waits for the others forever."""
        error = None
        try:
            yield
        except (Exception, KeyboardInterrupt) as caught:
            error = caught
        ours = isinstance(error, UserError | KeyboardInterrupt | None)  # others may not survive pickling
        errors = self.gather(error if ours else RuntimeError(f"rank {self.rank}: {error!r}"))
        if not ours:
            raise error
        for first in filter(None, errors):
            first.common = True
            raise first

    def sum(self, x: Tensor) -> Tensor:
        """x summed over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def total(self, parts: list[dict[str, Tensor]]) -> dict[str, float]:
        """Over microbatches and ranks: sums, of `max_*` maxima. Reads the device, as do norms and `at_sampled`."""
        names, parts = list(parts[0]), [torch.stack([x.detach().double() for x in part.values()]) for part in parts]
        parts = torch.stack(parts)  # [microbatches, names]
        sums, peaks = self.sum(parts.sum(0)), parts.amax(0)
        if self.size > 1:
            dist.all_reduce(peaks, dist.ReduceOp.MAX, group=self.group)
        sums, peaks = torch.stack([sums, peaks]).tolist()
        return {name: peaks[i] if name.startswith("max_") else sums[i] for i, name in enumerate(names)}

    def microbatches(self, rows: Tensor, lengths: Tensor, token_budget: int) -> list[Tensor]:
        """This rank's microbatches of `rows`, which are dealt out so that each rank gets about as many tokens.

        All ranks get equally many: a forward of sharded weights is a collective call, and a missing one hangs the
        others. Those without rows are for `crop` to fill.
        """
        shares, loads, size = [[] for _ in self.ranks], [0] * self.size, lengths.tolist()
        for row in sorted(rows.tolist(), key=lambda row: -size[row]):  # longest first, to whom has least
            least = loads.index(min(loads))
            shares[least].append(row)
            loads[least] += size[row]
        groups = [microbatches(torch.tensor(share, dtype=torch.int64), lengths, token_budget) for share in shares]
        mine = groups[self.ranks.index(self.rank)]
        return mine + [rows[:0]] * (max(map(len, groups)) - len(mine))


def fresh_store() -> tuple[dist.Store, int, int]:
    """torchrun's store, in a part of it that is this attempt's alone, rank and world size.

    A restarted job gets the store of the one before, and would hang on the addresses left in it. So every rank leaves
    a new name there; rank 0 answers all names that it finds, old ones too, with a room, until all have come in.
    """
    store, rank, size = next(dist.rendezvous("env://"))
    room = name = os.urandom(16).hex()
    if rank > 0:
        store.set(f"hello/{rank}", name)
        room = store.get(f"welcome/{name}").decode()
        store.set(f"{room}/{rank}", "")
    others = range(1, size if rank == 0 else 0)
    while not all(store.check([f"{room}/{other}"]) for other in others):
        for other in others:
            if store.check([f"hello/{other}"]):
                store.set(f"welcome/{store.get(f'hello/{other}').decode()}", room)
        time.sleep(0.05)
    return dist.PrefixStore(room, store), rank, size


def connect(args: Args, stack: contextlib.ExitStack) -> tuple[torch.device, torch.dtype, Ranks, Ranks, Ranks]:
    """Join the other processes and check the flags together.

    Returns device, dtype of forward passes, and who is who: the world, the actor's ranks, the critic's. FSDP2 serves
    one process too, wherever forward passes are in another precision than the weights.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is available")
    use_cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if use_cuda else torch.device("cpu")
    dtype = torch.bfloat16 if args.dtype == "bfloat16" or (args.dtype == "auto" and use_cuda) else torch.float32
    if use_cuda:
        torch.cuda.set_device(device)
    if "RANK" in os.environ or use_cuda or dtype != torch.float32:
        store, rank, size = fresh_store() if "RANK" in os.environ else (dist.HashStore(), 0, 1)
        backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        # Not after an error that this rank has alone: it would wait for the others, and they for it.
        common = (type(None), UserError, KeyboardInterrupt) if "RANK" in os.environ else object
        stack.push(lambda kind, error, trace: dist.destroy_process_group() if isinstance(error, common) else None)
    W = dist.get_world_size() if dist.is_initialized() else 1
    world, K = Ranks(range(W), device), args.critic_ranks
    with world.agree():
        validate(args, W)
    actors = Ranks(range(W - K), device, args.fsdp_shard_size)
    return device, dtype, world, actors, Ranks(range(W - K, W), device, args.fsdp_shard_size) if K else actors


def shard(model: Transformer, ranks: Ranks, args: Args, dtype: torch.dtype) -> Transformer:
    """Prepare a model for training and scoring on `ranks`: activation checkpointing, torch.compile, FSDP2."""
    model.ranks, model.checkpointing = ranks, args.activation_checkpointing
    if args.compile == "on":
        torch._dynamo.config.recompile_limit = 64  # the blocks of all models are one piece of code, in several shapes
        for block in model.model.layers:  # in place, so that names stay, and before FSDP: its hooks surround the code
            block.compile(dynamic=True)
    if ranks.mesh is None:
        return model
    value_head = [] if model.head == "lm" else [model.score]  # stays in float32
    for unit in (*model.model.layers, *value_head, model):
        precision = torch.float32 if unit in value_head else dtype
        policy = MixedPrecisionPolicy(precision, reduce_dtype=torch.float32, cast_forward_inputs=False)
        # The root, too, must give its weights back after forward: else they are no DTensors until the next backward.
        fully_shard(unit, mesh=ranks.mesh, reshard_after_forward=True, mp_policy=policy)
        # Losses are divided by the token count of all ranks already: gradients add up, on every unit (neither call
        # recurses), and without the second call gloo would refuse the first.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return model


def local(x: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


@torch.no_grad()
def copy_weights(actor: Transformer | None, target: Transformer, actors: Ranks) -> None:
    """Bring `target`, unsharded, up to date in place, on every rank: those without the actor pass None."""
    if actor is target:
        return
    for name, p in target.named_parameters():
        if actor is None:
            whole = torch.empty(p.shape, dtype=p.dtype, device=actors.device)
        else:
            whole = actor.get_parameter(name).detach().to(p.dtype)
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        if dist.is_initialized() and actors.size < dist.get_world_size():
            dist.broadcast(whole, src=0)
        p.copy_(whole)


def unsharded(config: ModelConfig, device="cpu", dtype=torch.float32, keep: bool = True) -> Transformer:
    """A whole actor for `copy_weights` to fill. Every rank needs one to take part; without `keep` it holds no data."""
    with torch.device("meta"):
        model = Transformer(config).to(dtype).requires_grad_(False)
    if keep:
        model.to_empty(device=device).tie_weights()
        model.rope = rope_frequencies(config).to(device)  # in float32, whatever the weights are
    return model


class Signals:
    """SIGTERM and Ctrl-C end a rollout at once, what follows it not before the next one begins."""

    def __init__(self, stack: contextlib.ExitStack):
        self.received, self.at_once = None, False
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for signum in (signal.SIGTERM, signal.SIGINT):
                stack.callback(signal.signal, signum, signal.signal(signum, self.handle))

    def handle(self, signum: int, frame) -> None:
        self.received = signum
        if self.at_once:
            self.at_once = False  # torchrun sends it again
            raise Interrupted(signum)
        if os.environ.get("RANK", "0") == "0":  # no `say`: what this interrupts may be printing
            os.write(2, b"\nstopping after this iteration; Ctrl-\\ ends the run at once, without a checkpoint\n")

    @contextlib.contextmanager
    def interrupt(self):
        self.at_once = True
        try:
            if self.received:
                raise Interrupted(self.received)
            yield
        finally:
            self.at_once = False


def shared_rollout(world: Ranks, signals: Signals, actor, tokenizer, envs, seeds, args, iteration, greedy=False):
    """`rollout` of `seeds` [N] by all ranks, each a part of consecutive samples; every rank gets all, on its device."""
    first, last = (len(seeds) * rank // world.size for rank in (world.rank, world.rank + 1))
    part = None
    with world.agree(), signals.interrupt():
        if first < last:
            part = rollout(actor, tokenizer, envs, seeds[first:last], range(first, last), args, iteration, greedy)
    parts = [part for part in world.gather(part) if part]  # with fewer episodes than ranks some have none
    whole, width = {}, max(part.tokens.shape[1] for part in parts)
    for name in ("tokens", "mask", "logprobs", "rewards"):
        rows = [getattr(part, name) for part in parts]
        whole[name] = torch.cat([F.pad(x, (0, width - x.shape[1])) for x in rows]).to(world.device)
    for name in ("lengths", "stop", "texts", "prompts", "success"):
        whole[name] = [item for part in parts for item in getattr(part, name)]
    whole["lengths"] = torch.tensor(whole["lengths"])
    whole["stats"] = {name: sum(part.stats[name] for part in parts) / len(parts) for name in parts[0].stats}
    return Rollout(**whole)


# === 9. Checkpoints ===


class RunFolder:
    """<log_dir>/<run_name>/: TensorBoard events, *.jsonl, config.json, summary.json, this script, checkpoints/, model/.

    Rank 0 writes; on the others all methods do nothing.
    """

    def __init__(self, args: Args, world: Ranks, resume: Resume):
        name = f"{args.env_id.split(':')[-1]}__{Path(__file__).stem}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        self.path, state = resume.folder or Path(args.log_dir) / (args.run_name or world.gather(name)[0]), resume.state
        self.writes, self.files, self.writers = world.rank == 0, {}, ()
        self.started = time.monotonic() - (state["seconds"] if state else 0)
        self.summary = {"status": "failed", "iterations": 0, "update_steps": 0}
        versions = {"python": sys.version} | {m.__name__: m.__version__ for m in (torch, gym, tokenizers)}
        config = {"args": dataclasses.asdict(args), "argv": sys.argv, "ranks": world.size, "versions": versions}
        if not self.writes:
            return
        with blame(f"--log-dir {args.log_dir}: cannot write {self.path}"):
            if self.path.exists() and not resume.folder:
                raise UserError(f"--run-name: {self.path} exists; --resume auto goes on with it, else choose another")
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / Path(__file__).name).write_bytes(Path(__file__).read_bytes())  # may be the same file
            (self.path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
            for name in ("metrics", "completions"):
                self.files[name] = open(self.path / f"{name}.jsonl", "a", encoding="utf-8")
                # What was written after the checkpoint will be written again.
                size = state["bytes"][name] if state and resume.folder else 0
                self.files[name].truncate(min(size, self.files[name].tell()))
            for newer in checkpoints_in(self.path / "checkpoints"):
                if newer > resume.checkpoint:  # damaged: put aside, so that it is not among those kept
                    shutil.rmtree(f"{newer}.damaged", ignore_errors=True)
                    newer.rename(f"{newer}.damaged")
        # On resume TensorBoard cuts all of a folder at one step, and ratios are logged by actor step: two folders.
        actor_steps = state["learners"]["actor"]["steps"] if state and state["learners"] else 0
        self.writers = [SummaryWriter(self.path, purge_step=state["iteration"] if state else 0),
                        SummaryWriter(self.path / "ratios", purge_step=actor_steps)]

    def sizes(self) -> dict[str, int]:
        """Bytes of each *.jsonl, all of them on the disk: a resumed run cuts the files there."""
        for file in self.files.values():
            os.fsync(file.fileno())
        return {name: os.fstat(file.fileno()).st_size for name, file in self.files.items()}

    def write(self, name: str, row: dict) -> None:
        """Append a line to <name>.jsonl. What is None or not finite is left out: NaN and Infinity are not JSON."""
        if self.writes:
            row = json.loads(json.dumps(row), parse_constant=lambda constant: None)
            row = {name: value for name, value in row.items() if value is not None}
            with blame(f"{self.path}: cannot write {name}.jsonl"):
                self.files[name].write(json.dumps(row, ensure_ascii=False) + "\n")
                self.files[name].flush()

    def log(self, row: dict) -> None:
        """Log an iteration; TensorBoard gets its numbers by iteration, and those in ratio/steps by actor step."""
        self.write("metrics", row)
        for name, value in row.items() if self.writes else ():
            if isinstance(value, int | float) and math.isfinite(value) and name != "iteration":
                self.writers[0].add_scalar(name, value, row["iteration"])
        for step in row["ratio/steps"] if self.writes else ():
            for name in ("dev", "ratio_mean", "clipfrac", "out_of_clip", "approx_kl"):
                self.writers[1].add_scalar(f"ratio/{name}", step[name], step["step"])

    def __exit__(self, kind, error, traceback) -> None:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.summary["status"] = "interrupted" if interrupted else "failed" if kind else "completed"
        self.summary |= {"seconds": time.monotonic() - self.started, "peak_memory_bytes": peak_memory()}
        with contextlib.suppress(OSError) if kind else blame(f"{self.path}: cannot be written"):
            if self.writes:
                (self.path / "summary.json").write_text(json.dumps(self.summary, indent=2), encoding="utf-8")
            for file in (*self.writers, *self.files.values()):
                file.close()


def peak_memory() -> int:
    """Bytes: of the GPU if one is in use, else resident ones of this process (ru_maxrss counts KiB on Linux)."""
    on_gpu = torch.cuda.is_initialized()
    return torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Checkpoints:
    """Saves and restores a run between two iterations: `now` and the weights and moments of `models`.

    `models` {name: (model, its Learner or None, its Ranks)} are those that this rank holds. They are written by DCP
    (torch.distributed.checkpoint), a folder each, so that a run may go on with other ranks or another placement.
    """

    def __init__(self, run: RunFolder, world: Ranks, args: Args, config: ModelConfig, now, models: dict, export):
        self.run, self.world, self.args, self.now, self.models, self.export = run, world, args, now, models, export
        self.config, self.folder, self.saved = config, run.path / "checkpoints", None

    def each_model(self, transfer, path: Path) -> None:
        """dcp.save or dcp.load of every model's tensors: {"weights": {name: tensor}, "moments": {name: {...}}}."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            for name, (model, learner, ranks) in self.models.items():
                tensors, states = {"weights": {}}, learner.optimizer.state if learner else {}
                for key, p in model.named_parameters():
                    tensors["weights"][key] = p.detach()
                    if p in states:  # none before the first step, and DCP's own helper would make that step
                        tensors.setdefault("moments", {})[key] = states[p]
                transfer(tensors, checkpoint_id=path / name, process_group=ranks.group, no_dist=ranks.group is None)

    def save(self) -> None:
        """Write iter_<iterations done>, if it is not there, and prune. Raises UserError, on all ranks.

        The folder gets its name when all of it, a manifest of all files last, is on the disk: what has it is complete.
        """
        world, path = self.world, self.folder / f"iter_{self.now.iteration:06d}"
        if path == self.saved:
            return
        partial, first = self.folder / "partial", world.rank == 0
        failed = f"{path} cannot be written: make room, or move the run and --resume it. Earlier checkpoints are intact"
        with world.agree(), blame(failed):
            if first:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                state = vars(self.now) | {"args": dataclasses.asdict(self.args), "config": self.config.raw}
                state |= {"seconds": time.monotonic() - self.run.started, "bytes": self.run.sizes()}
                write_synced(partial / "state.json", state)
        with world.agree(), blame(failed):
            self.each_model(dcp.save, partial)
        with world.agree(), blame(failed):
            files = [str(file.relative_to(partial)) for file in partial.rglob("*") if file.is_file()]
        files = world.gather(files)[0]  # rank 0's, since a file system may be late to show them to others
        with world.agree(), blame(failed):
            mine = {name: digest(partial / name) for name in files[world.rank :: world.size]}
        manifest = {name: entry for part in world.gather(mine) for name, entry in part.items()}
        with world.agree(), blame(failed):
            if first:
                write_synced(partial / "manifest.json", manifest)
                partial.rename(path)
                directory = os.open(self.folder, os.O_RDONLY)
                os.fsync(directory)
                os.close(directory)
                for old in [p for p in checkpoints_in(self.folder) if p <= path][self.args.keep_checkpoints :]:
                    shutil.rmtree(old.rename(partial))
        self.saved = path
        say(f"saved {path}")

    def load(self, resume: Resume) -> None:
        """Go on from a verified checkpoint: fills `now`, weights and moments in place."""
        state, then = resume.state, resume.state["args"]
        vars(self.now).update({name: state[name] for name in vars(self.now)})
        if self.args.kl_coef != then["kl_coef"]:
            self.now.kl_coef = self.args.kl_coef
        for name, (_, learner, _) in self.models.items():
            if learner and self.now.learners:
                learner.restore(self.now.learners[name])
        with self.world.agree(), blame(f"{resume.checkpoint}: does not fit this run"):
            self.each_model(dcp.load, resume.checkpoint)
        self.saved = resume.checkpoint
        say(f"going on from {resume.checkpoint}, after {self.now.iteration} iterations")
        for name, value in dataclasses.asdict(self.args).items():
            if value != then.get(name) and name not in ("resume", "run_name", "log_dir"):
                say(f"  --{name.replace('_', '-')} was {then.get(name)}, is now {value}")

    @contextlib.contextmanager
    def on_stop(self):
        """A signal, or an error that all ranks have agreed on, leaves a checkpoint and the exported model behind."""
        try:
            yield
        except (UserError, KeyboardInterrupt):
            self.save()
            self.export()
            say(f"--resume {self.run.path} goes on from there")
            raise


def write_synced(path: Path, value: dict) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def digest(path: Path) -> dict:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def checkpoints_in(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("iter_" + "[0-9]" * 6), reverse=True)


class MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's metadata of tensors and refuses any other name: a pickle may call whatever it names.

    That holds for BytesStorageMetadata too: with it DCP would unpickle a whole object where a tensor should be.
    """

    NAMES: ClassVar = {
        "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata TensorProperties ChunkStorageMetadata "
                                                 "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo", "torch.serialization": "_get_layout",
        "torch": "Size float32", "pathlib": "PosixPath", "pathlib._local": "PosixPath",
    }  # fmt: skip

    @staticmethod
    def member(enum, name):
        """What Python 3.11.2 pickles as `getattr(enum, name)`, which on anything else would open all of Python."""
        if enum is not dcp.metadata._MEM_FORMAT_ENCODING:
            raise pickle.UnpicklingError(f"refused to call getattr of {enum!r}")
        return enum[name]

    def find_class(self, module, name):
        if (module, name) == ("builtins", "getattr"):
            return self.member
        if name not in self.NAMES.get(module, "").split():
            raise pickle.UnpicklingError(f"refused to call {module}.{name}")
        return super().find_class(module, name)


def verify_checkpoint(path: Path, world: Ranks) -> dict:
    """The state in a checkpoint, all of whose files are as they were saved. Raises UserError, on all ranks, if not."""
    with world.agree(), blame(f"{path} is damaged"):
        manifest = parse_json(read_text(path / "manifest.json"), path / "manifest.json")
        for name in sorted({*manifest, "state.json"})[world.rank :: world.size]:
            if digest(path / name) != manifest[name]:
                raise ValueError(f"{name} is not as it was saved")
        for metadata in path.glob("*/*.metadata"):
            with open(metadata, "rb") as file:
                MetadataUnpickler(file).load()
        return parse_json(read_text(path / "state.json"), path / "state.json")


# Run folder to go on in (None: a new one), checkpoint and its state to go on from, summary if there is nothing to do.
Resume = collections.namedtuple("Resume", "folder checkpoint state finished", defaults=[None] * 4)


def find_resume(args: Args, config: ModelConfig, world: Ranks) -> Resume:
    """What --resume means. Damaged checkpoints are named and passed over. Raises UserError: none left, none that fits.

    A run's folder is gone on with in place; from a single checkpoint a new run begins.
    """
    if args.resume is None:
        return Resume()
    folder = Path(args.log_dir, args.run_name) if args.resume == "auto" else Path(args.resume)
    single = args.resume != "auto" and folder.name.startswith("iter_") and not (folder / "checkpoints").exists()
    summary = {}
    with contextlib.suppress(UserError):
        summary = parse_json(read_text(folder / "summary.json"), "summary.json")
    summary = world.gather(summary)[0]  # "completed", too, while a longer run that goes on from there is not
    completed = summary if summary.get("status") == "completed" else None
    found, state = world.gather([folder] if single else checkpoints_in(folder / "checkpoints"))[0], None
    for path in found:
        try:
            state = verify_checkpoint(path, world)
            break
        except UserError as error:
            say(f"WARNING: {error}")
    if not state and (found or args.resume != "auto"):
        raise UserError(f"--resume {args.resume}: {'only damaged checkpoints' if found else 'no checkpoint'} there")
    if not state and completed:  # with --save-every 0
        return Resume(folder, finished=completed)
    if not state:
        say(f"--resume auto: no checkpoint in {folder} yet, starting afresh")
        return Resume(folder)
    for key, now in vars(config).items():
        then = getattr(ModelConfig.from_hf(state["config"]), key)
        if now != then and key not in ("raw", "max_position_embeddings"):
            raise UserError(f"--resume {path}: its model has {key} {then}, this run's {now}")
    if args.kl_coef > 0 and state["args"]["kl_coef"] == 0:
        raise UserError(f"--kl-coef {args.kl_coef}: {path} has no reference, its run began with --kl-coef 0")
    if single:
        return Resume(None, path, state)
    done = completed and completed["iterations"] == state["iteration"] >= args.num_iterations
    return Resume(folder, path, state, completed if done else None)


def export_model(actor: Transformer | None, config: ModelConfig, tokenizer, actors: Ranks, world: Ranks, path: Path):
    """`save_hf_checkpoint` of an actor that may be sharded; all ranks take part."""
    whole = unsharded(config, keep=world.rank == 0)
    copy_weights(actor, whole, actors)
    with world.agree(), blame(f"{path}: the model cannot be written"):
        if world.rank == 0:
            save_hf_checkpoint(whole, config, tokenizer, path)


# === 10. Training loop ===


def embedded_model(args: Args, env: EnvThread) -> tuple[HFTokenizer, Transformer, ModelConfig]:
    """The default actor: a small random Llama over the characters of the environment's prompts and demonstrations."""
    resets = map(env.reset, range(256))
    with blame(f"environment {env.name}: info['demonstration'] must be text"):
        tokenizer = HFTokenizer.from_texts([prompt + info.get("demonstration", "") for prompt, info in resets])
    config = ModelConfig.from_hf({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": tokenizer.vocab_size,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "rms_norm_eps": 1e-6, "max_position_embeddings": args.max_prompt_tokens + args.max_new_tokens,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id,
    })
    actor = Transformer(config)
    for name, p in actor.named_parameters():  # as GPT-2: std 0.02, what ends a residual branch scaled by depth
        if p.ndim == 2:
            nn.init.normal_(p, std=0.01 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)
    return tokenizer, actor, config


def load_models(args: Args, env: EnvThread, eval_env: EnvThread):
    """(tokenizer, actor, critic or None, reward model or None), on the CPU, checked against flags and prompts."""
    if args.model:
        folder = find_checkpoint("model", args.model)
        with blame(f"{folder}: the tokenizer's files are malformed"):
            tokenizer = HFTokenizer(folder)
        models = {"model": load_hf_checkpoint(folder)[0]}
    else:
        tokenizer, actor, _ = embedded_model(args, env)
        models = {"model": actor}
    for flag, name in (("critic-model", args.critic_model), ("reward-model", args.reward_model)):
        models[flag] = load_hf_checkpoint(find_checkpoint(flag, name), head="scalar")[0] if name else None
    for flag, model in models.items():
        if model and tokenizer.vocab_size > model.config.vocab_size:
            sizes = f"{model.config.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}"
            raise UserError(f"--{flag}: the model's vocabulary of {sizes}")
        tokens = args.max_prompt_tokens + args.max_new_tokens
        if model and tokens > (context := model.config.max_position_embeddings):
            sizes = f"--max-prompt-tokens {args.max_prompt_tokens} + --max-new-tokens {args.max_new_tokens}"
            raise UserError(f"{sizes}: must be at most the context of --{flag}, {context} tokens")
    if models["reward-model"] and not models["reward-model"].score.weight.any():
        raise UserError(f"--reward-model {args.reward_model}: has no score.weight, is no sequence classifier")
    for each in (env, eval_env):
        prompt_ids(tokenizer, each.reset(0)[0], args)
    tokenizer.encode_feedback("-")
    return tokenizer, *models.values()


def critic_from(actor: Transformer) -> Transformer:
    """A critic with the actor's body and a value head of zeros."""
    with torch.device("meta"):
        critic = Transformer(actor.config, head="scalar")
    body = {name: x.clone() for name, x in actor.state_dict().items() if name != "lm_head.weight"}
    critic.load_state_dict(body | {"score.weight": torch.zeros(1, actor.config.hidden_size)}, assign=True)
    return critic


class Learner:
    """AdamW for one model: linear schedule, clipping, no step if a gradient is not finite, means of what is logged."""

    def __init__(self, model: Transformer, lr: float, lr_end: float, total_steps: int, args: Args):
        self.model, self.args = model, args
        self.first_lr, self.lr_end, self.total_steps = lr, lr_end, max(1, total_steps)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)
        self.steps, self.streak, self.bad_tensor, self.complaint = 0, 0, "", None
        self.sums, self.tokens, self.skipped = collections.Counter(), 0, 0  # of the iteration

    def lr_at(self, step: int) -> float:
        return self.first_lr * (1 - (1 - self.lr_end) * min(1.0, step / self.total_steps))

    def step(self, stats: dict[str, float], tokens: int) -> None:
        """One optimizer step, counted even if skipped; `stats` are means over the minibatch's trained `tokens`."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr_at(self.steps)
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        norm = nn.utils.get_total_norm(gradients.values())
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if norm.isfinite():
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.args.max_grad_norm, norm)
            self.optimizer.step()
            self.streak, self.tokens = 0, self.tokens + tokens
            self.sums.update({name: value * tokens for name, value in (stats | {"grad_norm": float(norm)}).items()})
        else:
            bad = next((n for n, grad in gradients.items() if not local(grad).isfinite().all()), None)
            self.bad_tensor = next(filter(None, self.model.ranks.gather(bad)), "their norm")
            self.skipped, self.streak = self.skipped + 1, self.streak + 1
            if self.streak >= self.args.max_skipped_steps:
                self.complaint = (f"--max-skipped-steps {self.args.max_skipped_steps}: so many gradients in a row were "
                                  f"not finite, the last in {self.bad_tensor}")
        self.optimizer.zero_grad()
        self.steps += 1

    def end_iteration(self) -> dict:
        """What this iteration's log, diagnosis and checkpoint need; `means` are token-weighted over the steps made."""
        means = {name: value / max(1, self.tokens) for name, value in self.sums.items()}
        counters = {"steps": self.steps, "streak": self.streak, "has_moments": len(self.optimizer.state) > 0}
        report = {"lr": self.lr_at(max(0, self.steps - 1)), "skipped": self.skipped}
        self.sums, self.tokens, self.skipped = collections.Counter(), 0, 0
        return report | dict(means=means, counters=counters, bad_tensor=self.bad_tensor, complaint=self.complaint)

    def restore(self, counters: dict) -> None:
        """Make room for the moments that a checkpoint with these counters will be read into."""
        self.steps, self.streak = counters["steps"], counters["streak"]
        for p in self.model.parameters() if counters["has_moments"] else ():
            state = {name: torch.zeros_like(p.detach()) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[p] = {"step": torch.zeros((), device=p.device), **state}


def shuffled_minibatches(args: Args, samples: int, iteration: int, epoch: int) -> tuple[Tensor, ...]:
    """A new permutation each epoch, a function of (seed, iteration, epoch): there is no generator state to save."""
    generator = torch.Generator().manual_seed(((args.seed * 1_000_003 + iteration) * 1_000_003 + epoch) % 2**63)
    return torch.randperm(samples, generator=generator).split(args.train_batch_size)


def warm_start(actor: Transformer, tokenizer: HFTokenizer, env: EnvThread, args: Args) -> None:
    """Supervised steps on the environment's demonstrations, with an optimizer of their own that is then discarded."""
    if args.sft_steps == 0 or "demonstration" not in env.reset(0)[1]:
        say(f"warm start: none, {env.name + ' has no demonstrations' if args.sft_steps else '--sft-steps 0'}")
        return
    learner, ranks, device = Learner(actor, args.sft_lr, 0.0, args.sft_steps, args), actor.ranks, actor.rope.device
    cut = 0
    for step in tqdm(range(args.sft_steps), desc="warm start", leave=False, disable=ranks.rank > 0):
        rows, starts, losses = [], [], []
        with ranks.agree():
            for seed in range(step * args.sft_batch_size, (step + 1) * args.sft_batch_size):
                prompt, info = env.reset(seed)
                with blame(f"environment {env.name}, seed {seed}: info['demonstration'] must be text"):
                    answer = [*tokenizer.encode(info["demonstration"]), tokenizer.eos_id]
                cut += len(answer) > args.max_new_tokens
                starts.append(len(ids := prompt_ids(tokenizer, prompt, args)))
                rows.append(torch.tensor([*ids, *answer[: args.max_new_tokens]], device=device))
        lengths, tokens = torch.tensor([len(row) for row in rows]), nn.utils.rnn.pad_sequence(rows, batch_first=True)
        columns = torch.arange(tokens.shape[1])
        mask = ((columns >= torch.tensor(starts)[:, None]) & (columns < lengths[:, None])).to(device)  # [B, T]
        for part in ranks.microbatches(torch.arange(len(rows)), lengths, args.micro_batch_tokens):
            loss = -at_sampled(actor, *crop(part, lengths, tokens, mask))[0].sum() / mask.sum()
            loss.backward()
            losses.append({"loss": loss})
        learner.step(loss := ranks.total(losses), 0)
        if learner.complaint:
            raise UserError(learner.complaint)
    say(f"warm start: {args.sft_steps} steps of {args.sft_batch_size} demonstrations, loss {loss['loss']:.3f} a token"
        + (f"; {cut:,} were cut to --max-new-tokens {args.max_new_tokens}" if cut else ""))


def forward_flops(config: ModelConfig, lengths: Tensor, outputs: int) -> float:
    """Multiplications and additions of a forward over rows of `lengths` [N] tokens, with logits for `outputs` of them.

    Two for each weight and token, and 2 H D n^2 for the causal attention of a layer to a row of n tokens: half of what
    PaLM counts (https://arxiv.org/abs/2204.02311, appendix B), since half of the scores are never needed.
    """
    n, heads = lengths.double(), config.num_attention_heads + config.num_key_value_heads
    weights = config.hidden_size * (2 * config.head_dim * heads + 3 * config.intermediate_size)  # of a layer
    layer = 2 * weights * n + 2 * config.num_attention_heads * config.head_dim * n.square()
    return float(config.num_hidden_layers * layer.sum()) + 2 * outputs * config.hidden_size * config.vocab_size


@functools.cache
def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of large matrix products here, the best of five: a model FLOPs utilization of 100 %."""
    n, times = 8192 if device.type == "cuda" else 1024, []
    x = torch.rand(n, n, device=device).to(dtype)
    for _ in range(5):
        start = time.perf_counter()
        x @ x
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times)


def resolve_compile(args: Args, config: ModelConfig, plan: Plan, device: torch.device, ranks: int) -> None:
    """Replace --compile auto, and try whether torch.compile works. Raises UserError if it is asked for and does not.

    On a CPU compiling takes a minute or two, which half an hour of arithmetic repays. At 5e10 FLOP/s, about two cores:
    by a measured rate a run could choose otherwise when it is resumed.
    """
    rows = torch.full((plan.samples_per_iteration,), args.max_prompt_tokens + args.max_new_tokens)  # at most
    passes = 4 + 3 * (args.ppo_epochs + args.critic_epochs)
    flops = args.num_iterations * passes * forward_flops(config, rows, len(rows) * args.max_new_tokens)
    asked, repays = args.compile, device.type == "cuda" or flops / ranks / 5e10 > 1800
    args.compile = "on" if asked == "on" or (asked == "auto" and repays) else "off"
    if args.compile == "off":
        return
    try:
        with blame(f"--compile {asked}: torch.compile fails here; it needs a C++ compiler and Python's headers"):
            torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
    except UserError as problem:
        if asked == "on":
            raise
        args.compile = "off"
        say(f"WARNING: {problem}. The run is not compiled")
        return
    if asked == "auto" and device.type == "cpu":
        say("--compile auto: on, for a run this long; the first iteration takes a minute or two more")


def evaluate(sample, envs: list, args: Args, iteration: int) -> dict[str, float]:
    """Means over the evaluation episodes, sampled at temperature 1 (the policy PPO trains), and greedy accuracy."""
    args, episodes = dataclasses.replace(args, temperature=1.0), range(args.eval_episodes)
    sampled = sample(envs, episodes, args, -1 - iteration)  # negative: noise of its own
    greedy = sample(envs, episodes, args, -1 - iteration, greedy=True)
    sums = {"accuracy": sum(sampled.success), "greedy_accuracy": sum(greedy.success),
            "reward": float(sampled.rewards.sum()), "response_tokens": float(sampled.mask.sum())}
    return {name: value / len(episodes) for name, value in sums.items()}


def show(results: dict[str, float]) -> str:
    return f"{results['accuracy']:.1%} sampled at temperature 1, {results['greedy_accuracy']:.1%} greedy"


def step_table(args: Args, plan: Plan) -> str:
    """What an iteration and the run consist of, and the defaults that depend on the job."""
    batches = f"{plan.minibatches} minibatches of {args.train_batch_size} samples"
    kl = f"KL x {args.kl_coef:g} in the {args.kl_in}, {args.kl_estimator}" if args.kl_coef else "none (--kl-coef 0)"
    defaults = ("actor_lr", "critic_lr", "kl_coef", "sft_steps", "sft_lr", "max_prompt_tokens", "max_new_tokens")
    return f"""\
  rollout    {args.rollout_batch_size} prompts x {args.n_samples_per_prompt} = {plan.samples_per_iteration} samples
  critic     then {args.critic_epochs} epochs x {batches} = {plan.critic_update_steps} optimizer steps
  actor      then {args.ppo_epochs} epochs x {batches} = {plan.update_steps} optimizer steps
  reference  {kl}
  run        {args.num_iterations} iterations, the first {args.critic_warmup_iterations} for the critic alone: \
{plan.episodes_total:,} episodes, {plan.actor_steps_total:,} actor and {plan.critic_steps_total:,} critic steps
  defaults   {", ".join(f"{name} {getattr(args, name):g}" for name in defaults)}"""


def train(args: Args) -> dict:
    """Run PPO; returns what summary.json holds. Raises UserError for what the user can mend."""
    with contextlib.ExitStack() as stack:  # closes the run folder whatever happens, and keeps the loop below flat
        return ppo(args, stack)


def ppo(args: Args, stack: contextlib.ExitStack) -> dict:
    device, dtype, world, actors, critics = connect(args, stack)
    plan, peak_rate = plan_steps(args, world.size), matrix_rate(device, dtype)
    samples = plan.samples_per_iteration
    torch.manual_seed(args.seed)

    # --- Load and try all that can be wrong, before anything is written
    with world.agree():
        envs = make_envs(args, episodes_at_once(args, -(-samples // world.size)))
        eval_envs = make_envs(args, episodes_at_once(args, -(-args.eval_episodes // world.size)), evaluation=True)
        # They may have processes or files to close, and get five seconds.
        stack.callback(lambda: concurrent.futures.wait([e.submit("close") for e in envs + eval_envs], timeout=5))
        tokenizer, actor, critic, scorer = load_models(args, envs[0], eval_envs[0])
        config, critic_config, scorer_config = (m.config if m else None for m in (actor, critic or actor, scorer))
        resolve_compile(args, config, plan, device, world.size)
    with world.agree():
        resume = find_resume(args, config, world)
    if resume.finished:
        say(f"{resume.folder}: finished; from its last checkpoint, if any, a larger --num-iterations would go on")
        return resume.finished
    with world.agree():
        stack.push(run := RunFolder(args, world, resume))
    where = f"{device.type}, {dtype}, {world.size} rank{'s' * (world.size > 1)}"
    say(f"{run.path}: {sum(p.numel() for p in actor.parameters()):,} parameters, {where}\n{step_table(args, plan)}")
    if not tokenizer.template:
        say("no chat template: prompts are encoded as plain text")

    # --- Warm start, then critic and reference from the actor as it is now. A model that a rank does not hold is None
    sampler = actor if actors.mesh is None and args.compile != "on" else unsharded(config, device, dtype)
    actor = shard(actor, actors, args, dtype) if actors.mine else None
    with world.agree():
        if actor and not resume.state:
            warm_start(actor, tokenizer, envs[0], args)
    whole = unsharded(config)
    copy_weights(actor, whole, actors)
    critic = shard(critic or critic_from(whole), critics, args, dtype) if critics.mine else None
    scorer = shard(scorer.requires_grad_(False), critics, args, dtype) if scorer and critics.mine else None
    reference = shard(whole, actors, args, dtype) if args.kl_coef > 0 and actors.mine else None
    del whole
    actor_learner = Learner(actor, args.actor_lr, args.lr_end, plan.actor_steps_total, args) if actor else None
    critic_learner = Learner(critic, args.critic_lr, args.lr_end, plan.critic_steps_total, args) if critic else None
    stop_ids = torch.tensor(tokenizer.stop_ids, device=device)
    has_split = args.env_id == "SortDigits-v0" or json.loads(args.eval_env_kwargs) != {}

    # --- Nothing but `now`, weights and moments goes from one iteration to the next: this is what a checkpoint holds
    now = types.SimpleNamespace(
        iteration=0, prompts=0, episodes=0, kl_coef=args.kl_coef, last_cause=None, eval_before=None, learners={})
    held = {"actor": (actor, actor_learner, actors), "critic": (critic, critic_learner, critics),
            "reference": (reference, None, actors)}  # fmt: skip
    held = {name: entry for name, entry in held.items() if entry[0]}
    export = functools.partial(export_model, actor, config, tokenizer, actors, world, run.path / "model")
    checkpoints = Checkpoints(run, world, args, config, now, held, export)
    if resume.state:
        checkpoints.load(resume)
    copy_weights(actor, sampler, actors)
    sample = functools.partial(shared_rollout, world, Signals(stack), sampler, tokenizer)
    with checkpoints.on_stop():
        now.eval_before = before = now.eval_before or evaluate(sample, eval_envs, args, 0)
    steps_done = now.learners["actor"]["steps"] if now.learners else 0
    run.summary |= {"eval_before": before, "iterations": now.iteration, "update_steps": steps_done}
    say(f"accuracy before PPO: {show(before)}")
    bar = stack.enter_context(tqdm(total=args.num_iterations, initial=now.iteration, desc="PPO", unit="it",
                                   dynamic_ncols=True, disable=world.rank > 0))  # fmt: skip

    for iteration in range(now.iteration, args.num_iterations):
        if args.save_every and iteration % args.save_every == 0 and iteration > 0:
            checkpoints.save()

        # --- Rollout: the current actor samples, on all ranks
        seeds, evaluation = [now.prompts + i // args.n_samples_per_prompt for i in range(samples)], {}
        with checkpoints.on_stop():
            if args.eval_every and iteration % args.eval_every == 0 and iteration > 0:
                evaluation = evaluate(sample, eval_envs, args, iteration)
            clock = [time.time()]
            batch = sample(envs, seeds, args, iteration)
        tokens, mask, lengths = batch.tokens, batch.mask, batch.lengths  # [N, T], [N, T], [N]
        token_counts = mask.sum(1).cpu()  # [N]
        trained_tokens = int(token_counts.sum())
        clock.append(time.time())

        # --- Old policy, reference and values, recorded once, before the first update; every rank computes some rows
        # V(state after the last token) sits one column beyond it, where the next token would be.
        beyond = torch.arange(mask.shape[1] + 1, device=device) == lengths.to(device)[:, None]  # [N, T + 1]
        longer, sampled, zeros = F.pad(tokens, (0, 1)), F.pad(mask, (0, 1)), torch.zeros(beyond.shape, device=device)
        passes = [(actor if args.recompute_old_logprobs else None, sampled), (reference, sampled),
                  (critic, sampled | beyond), (scorer, beyond)]  # fmt: skip
        recorded = [over_rollout(model, longer, at, lengths + 1, args) if model else zeros for model, at in passes]
        old_logprobs, ref_logprobs, values, model_rewards = world.sum(torch.stack(recorded))  # [N, T + 1] each
        old_logprobs = old_logprobs[:, :-1] if args.recompute_old_logprobs else batch.logprobs
        ref_logprobs = ref_logprobs[:, :-1] if args.kl_coef > 0 else old_logprobs
        truncated = torch.tensor([stop != "eos" for stop in batch.stop], device=device)  # [N]
        bootstrap = values[beyond] * truncated if args.bootstrap_truncated else None
        values = values[:, :-1] * mask

        # --- Rewards: environment, missing-EOS penalty and reward model on the last token, KL on every token
        # NOTE for forks: shape rewards here.
        rewards, last = batch.rewards.clone(), (torch.arange(samples, device=device), lengths.to(device) - 1)
        rewards[last] -= args.missing_eos_penalty * ~torch.isin(tokens[last], stop_ids)
        rewards[last] += model_rewards[beyond]
        scores, kl = rewards.sum(1), (old_logprobs - ref_logprobs).sum(1)  # [N]; log-probs are 0 outside the mask
        if args.kl_in == "reward":
            rewards -= now.kl_coef * kl_estimate(old_logprobs, ref_logprobs, args.kl_estimator)

        # --- Advantages. Returns come from the raw ones; whitening is over the whole rollout
        advantages, returns = compute_gae(rewards, values, mask, args.gamma, args.gae_lambda, bootstrap)
        adv_raw_std = float(advantages[mask].std()) if trained_tokens > 1 else 0.0
        advantages = masked_whiten(advantages, mask) if adv_raw_std >= 1e-6 else advantages
        if args.rollout_is_cap:  # truncated importance weights: the sampler is not quite the old policy
            advantages = advantages * (old_logprobs - batch.logprobs).exp().clamp(max=args.rollout_is_cap)
        explained = 1 - float((returns - values)[mask].var() / returns[mask].var()) if trained_tokens > 1 else math.nan
        clock.append(time.time())

        # --- Critic epochs first. Old values and log-probs are frozen: before, after or beside the actor, all the same
        report = {}  # of this rank
        for epoch in range(args.critic_epochs if critic else 0):
            for minibatch in shuffled_minibatches(args, samples, iteration, epoch):
                denom, parts = max(1, int(token_counts[minibatch].sum())), []
                for rows in critics.microbatches(minibatch, lengths, args.micro_batch_tokens):
                    mb_tokens, mb_mask, mb_old, mb_returns = crop(rows, lengths, tokens, mask, values, returns)
                    new_values, _ = at_sampled(critic, mb_tokens, mb_mask)
                    loss = value_loss(new_values, mb_old, mb_returns, mb_mask, args.value_clip, denom)
                    loss.backward()
                    parts.append({"value_loss": loss})
                critic_learner.step(critics.total(parts), denom)
        clock.append(time.time())
        if critic:
            report["critic"] = critic_learner.end_iteration()

        # --- Actor epochs; none during critic warm-up
        warmup, early_stop, steps = iteration < args.critic_warmup_iterations, False, []
        probes = [local(p.detach()).flatten()[:: 1 + p.numel() // 2**16] for p in actor.parameters()] if actor else []
        old_probes = [p.clone() for p in probes]  # a part of every weight
        for epoch in range(args.ppo_epochs if actor and not warmup else 0):
            for i, minibatch in enumerate(shuffled_minibatches(args, samples, iteration, epoch)):
                denom, parts = max(1, int(token_counts[minibatch].sum())), []
                for rows in actors.microbatches(minibatch, lengths, args.micro_batch_tokens):
                    mb_tokens, mb_mask, mb_old, mb_ref, mb_advantages = crop(
                        rows, lengths, tokens, mask, old_logprobs, ref_logprobs, advantages)  # [b, t]
                    logprobs, entropy = at_sampled(actor, mb_tokens, mb_mask, args.temperature)
                    # NOTE for forks: another policy objective goes here.
                    loss, part = policy_loss(
                        logprobs, mb_old, mb_advantages, mb_mask, args.clip_low, args.clip_high, args.dual_clip, denom)
                    part["max_dev"] = torch.maximum(part.pop("ratio_max") - 1, 1 - part.pop("ratio_min"))
                    part |= {"policy_loss": loss, "entropy": entropy.sum() / denom}
                    if args.entropy_coef:
                        loss = loss - args.entropy_coef * part["entropy"]
                    if args.kl_in == "loss" and reference:
                        part["kl_loss"] = kl_estimate(logprobs, mb_ref, args.kl_estimator).sum() / denom
                        loss = loss + now.kl_coef * part["kl_loss"]
                    if loss.requires_grad:  # detached log-probs are diagnosed below, they need not crash here
                        loss.backward()
                    parts.append(part)
                stats = actors.total(parts)  # of all ranks, so that they decide alike
                early_stop = bool(args.target_kl and stats["approx_kl"] > args.target_kl)
                if early_stop:
                    actor_learner.optimizer.zero_grad()
                    break
                steps.append({"step": actor_learner.steps, "epoch": epoch, "minibatch": i, "dev": stats.pop("max_dev"),
                              **{name: stats[name] for name in ("ratio_mean", "clipfrac", "out_of_clip", "approx_kl")}})
                actor_learner.step(stats, denom)
            if early_stop:
                break
        clock.append(time.time())
        copy_weights(actor, sampler, actors)

        # --- What the updates did to the first minibatch, by one more forward, and to a part of every weight
        if actor:
            rows = shuffled_minibatches(args, samples, iteration, 0)[0]
            drift = actors.sum(over_rollout(actor, tokens[rows], mask[rows], lengths[rows], args)) - old_logprobs[rows]
            drift, signed = drift[mask[rows]], (drift * advantages[rows].sign())[mask[rows]]  # [n]
            weights, old_weights = torch.cat(probes).double(), torch.cat(old_probes).double()
            change = weights - old_weights
            norms = actors.total([{"changed": (change != 0).sum(), "probed": torch.ones_like(change).sum(),
                                   "update": change.square().sum(), "weights": weights.square().sum()}])  # fmt: skip
            report["actor"] = actor_learner.end_iteration() | dict(
                ratio_steps=steps, early_stop=early_stop, changed_frac=norms["changed"] / norms["probed"],
                update_norm=norms["update"] ** 0.5, param_norm=norms["weights"] ** 0.5,
                param_dtype=str(probes[0].dtype),
                post_dev=float(drift.expm1().abs().max()) if len(drift) else 0.0,
                signed_t=float(signed.mean() / (signed.std() + 1e-12)) * len(signed) ** 0.5 if len(signed) > 1 else 0.0)
        clock.append(time.time())
        report |= {"clock": clock, "peak_memory": peak_memory()}
        reports = world.gather(report)
        of_actor, of_critic = reports[0]["actor"], reports[-1]["critic"]  # the first rank has one, the last the other
        steps = of_actor["ratio_steps"]
        first, last_step = (steps[0], steps[-1]) if steps else ({"dev": 0.0}, {"dev": 0.0, "out_of_clip": 0.0})
        signals = of_actor | dict(
            phase="critic_warmup" if warmup else "train", planned=plan.update_steps, tokens=trained_tokens,
            steps=len(steps) - of_actor["skipped"], first_dev=first["dev"], last_dev=last_step["dev"],
            out_of_clip=last_step["out_of_clip"], adv_raw_std=adv_raw_std, compute_dtype=str(dtype),
            reward_std=float(scores.std()) if samples > 1 else 0.0, grad_norm=of_actor["means"].get("grad_norm", 0.0),
            sampler_diff=float(masked_mean((batch.logprobs - old_logprobs).abs(), mask)),
        )
        diagnosis = diagnose_ratio(signals)
        if diagnosis.cause not in (None, now.last_cause):
            say(f"iteration {iteration + 1}: ratio: {diagnosis.cause}: {diagnosis.evidence}; {diagnosis.advice}")
        made_before = of_actor["counters"]["steps"] - len(steps)
        with world.agree():
            if diagnosis.cause == "forward_mismatch" and made_before == 0 and first["dev"] > 1e-2:
                raise UserError(f"the ratio of the first update is off by {first['dev']:.1e}: {diagnosis.advice}")

        # --- Adaptive KL (https://arxiv.org/abs/1909.08593, section 2.2) and reference
        mean_kl, kl_coef = (float(kl.mean()), now.kl_coef) if args.kl_coef > 0 else (None, None)
        if args.kl_target and not warmup:
            now.kl_coef *= 1 + max(-0.2, min(0.2, mean_kl / args.kl_target - 1)) * min(1, samples / args.kl_horizon)
        if args.ref_sync_every and (iteration + 1) % args.ref_sync_every == 0 and reference:
            with torch.no_grad():
                old, new = ([local(p) for p in model.parameters()] for model in (reference, actor))
                torch._foreach_lerp_(old, new, args.ref_sync_alpha)
        now.prompts, now.episodes = now.prompts + args.rollout_batch_size, now.episodes + samples
        now.iteration, now.last_cause = iteration + 1, diagnosis.cause
        now.learners = {"actor": of_actor["counters"], "critic": of_critic["counters"]}

        # --- Arithmetic of real tokens: a backward pass counts twice its forward, what is computed again not at all
        actor_pass = forward_flops(config, lengths, trained_tokens)
        critic_pass, scorer_pass = (forward_flops(c, lengths, 0) if c else 0.0 for c in (critic_config, scorer_config))
        update_flops = 3 * (len(steps) / plan.minibatches * actor_pass + args.critic_epochs * critic_pass)
        actor_passes = 1 + args.recompute_old_logprobs + (args.kl_coef > 0)
        flops = update_flops + actor_passes * actor_pass + critic_pass + scorer_pass

        # --- Log. Every mean is weighted by tokens over all minibatches and ranks
        means, critic_means = of_actor["means"], of_critic["means"]
        latest = [max(times) for times in zip(*(other["clock"] for other in reports), strict=True)]  # of all ranks
        _, _, scored, _, updated, finished = latest
        seconds, phases = finished - clock[0], ("rollout", "score", "critic", "actor", "diagnose")
        row = {
            "iteration": iteration, "charts/episodes": now.episodes, "charts/SPS": samples / seconds,
            "charts/actor_steps": of_actor["counters"]["steps"], "charts/actor_lr": of_actor["lr"],
            "charts/critic_lr": of_critic["lr"],
            "objective/reward": float(scores.mean()), "objective/accuracy": sum(batch.success) / samples,
            "objective/kl": mean_kl, "objective/kl_coef": kl_coef, "objective/advantage_std": adv_raw_std,
            "objective/entropy": -float(masked_mean(old_logprobs, mask)),
            "objective/response_tokens": trained_tokens / samples,
            "objective/truncated": 1 - batch.stop.count("eos") / samples,
            **{f"losses/{name}": value for name, value in (critic_means | means).items() if name != "grad_norm"},
            "losses/explained_variance": explained, "grad/critic_norm": critic_means.get("grad_norm"),
            "grad/actor_norm": means.get("grad_norm"), "grad/skipped_actor": of_actor["skipped"],
            "grad/skipped_critic": of_critic["skipped"],
            **{f"ratio/{n}": signals[n] for n in ("first_dev", "last_dev", "post_dev", "out_of_clip", "signed_t")},
            "ratio/early_stop": int(of_actor["early_stop"]), "ratio/steps": steps, "ratio/diagnosis": diagnosis.cause,
            "param/changed_frac": signals["changed_frac"],
            "param/relative_update": signals["update_norm"] / signals["param_norm"],
            "debug/sampler_trainer_logprob_diff": signals["sampler_diff"], **batch.stats,
            **{f"time/{phase}": end - start for phase, start, end in zip(phases, clock, clock[1:], strict=False)},
            "time/ranks": [[t - clock[0] for t in other["clock"]] for other in reports],
            "perf/response_tokens_per_second": trained_tokens / seconds,
            "perf/rollout_tokens_per_second": trained_tokens / (clock[1] - clock[0]),
            "perf/mfu": flops / seconds / world.size / peak_rate,
            "perf/update_mfu": update_flops / (updated - scored) / world.size / peak_rate,
            "perf/peak_memory_bytes": max(other["peak_memory"] for other in reports),
            **{f"eval/{name}": value for name, value in evaluation.items()},
        }
        run.summary |= {"iterations": iteration + 1, "update_steps": of_actor["counters"]["steps"]}
        with checkpoints.on_stop(), world.agree():
            run.log(row)
            for i in range(min(args.log_completions, samples)):
                run.write("completions", {
                    "step": iteration, "prompt": batch.prompts[i], "response": batch.texts[i], "stop": batch.stop[i],
                    "reward": float(scores[i]), "n_tokens": int(token_counts[i]),
                    "kl": float(kl[i]) if args.kl_coef > 0 else None,
                })
            if complaint := of_actor["complaint"] or of_critic["complaint"]:
                raise UserError(complaint)
        say(f"{iteration + 1:>5}: reward {float(scores.mean()):.3f}, accuracy {row['objective/accuracy']:.1%}, "
            f"{row['objective/response_tokens']:.1f} tokens, max|ratio-1| {signals['last_dev']:.2g}, clipped "
            f"{means.get('clipfrac', 0):.1%}, explained variance {explained:.2f}, {seconds:.2f} s"
            + (f", KL {mean_kl:.4f}" if kl_coef else ""))
        if iteration % max(1, args.num_iterations // 5) == 0:
            for i in range(min(2, samples)):
                say(f"       {batch.prompts[i]!r:.80} -> {batch.texts[i]!r:.200} (reward {scores[i]:g})")
        bar.update()

    bar.close()
    if args.save_every:
        checkpoints.save()
    with checkpoints.on_stop():
        run.summary["eval_after"] = after = evaluate(sample, eval_envs, args, args.num_iterations)
    export()
    say(f"accuracy before PPO: {show(before)}\naccuracy after PPO:  {show(after)}, {args.eval_episodes} episodes of "
        f"{'held-out' if has_split else 'the training'} prompts; all is in {run.path}")
    return run.summary


def main() -> None:
    first = os.environ.get("RANK", "0") == "0"
    try:
        train(tyro.cli(Args, console_outputs=first))
    except (UserError, SystemExit) as error:
        if not first:
            time.sleep(10)  # torchrun ends all ranks when one exits: leave the first time to say why
        if isinstance(error, SystemExit):  # by tyro
            raise
        if first or not error.common:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as error:
        sys.exit(128 + (error.args[0] if isinstance(error, Interrupted) else signal.SIGINT))


if __name__ == "__main__":
    main()
