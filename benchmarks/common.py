"""What the benchmarks share: folders, tables, random models and prompts, and rollouts of given lengths. No command."""

import contextlib
import copy
import functools
import json
import math
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import unittest.mock
from pathlib import Path

import gymnasium as gym
import torch
import transformers

sys.path.append(str(Path(__file__).resolve().parent.parent))
import ppo_llm

ROOT = Path(__file__).resolve().parent.parent
PICTURES, DATA = ROOT / "benchmarks" / "pictures", ROOT / "benchmarks" / "data"

SMALL = dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
             num_key_value_heads=2, vocab_size=4096)  # fmt: skip
QWEN_05B = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                num_key_value_heads=2, vocab_size=151936)  # fmt: skip
QWEN_15B = dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
                num_key_value_heads=2, vocab_size=151936)  # fmt: skip
TINY = SMALL | dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=512)


def hardware(*packages, device: str = "cpu") -> str:
    """Device, threads and versions, also of these packages."""
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", info.read_text()) if info.is_file() else None
    threads = torch.get_num_threads()
    where = f"{cpu[1] if cpu else platform.machine()}, {threads} thread{'s' * (threads > 1)}"
    if device == "cuda":
        where = torch.cuda.get_device_name()
    versions = [f"{package.__name__} {package.__version__}" for package in (torch, *packages)]
    return f"{where}; {', '.join(versions)}, Python {platform.python_version()}"


def spread(values: list[float], form: str = ".2f") -> str:
    """Median and range."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def read_lines(path: Path) -> list[dict]:
    """The lines of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def add_line(path: Path, row: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def table(columns, rows=()) -> None:
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for row in rows:
        line(row)


def line(cells) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run) -> float:
    """That run() takes, on a GPU until it has done its work."""
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def character_tokenizer(vocab_size: int) -> ppo_llm.HFTokenizer:
    """A character a token, but for pad, eos and unk; beyond 20,000 characters ids go unused."""
    return ppo_llm.HFTokenizer.from_texts(["".join(chr(0x4E00 + i) for i in range(min(vocab_size - 3, 20_000)))])


def random_prompts(tokenizer: ppo_llm.HFTokenizer, samples: int, length: int) -> list[str]:
    torch.manual_seed(0)
    symbols = len(tokenizer.hf) - 3
    return ["".join(chr(0x4E00 + i) for i in row) for row in torch.randint(symbols, (samples, length)).tolist()]


def sums(samples: int) -> list[str]:
    """Questions of the same number of tokens, where a digit is a token."""
    numbers = random.Random(0)
    return [f"What is {numbers.randint(10, 99)} + {numbers.randint(10, 99)}?" for _ in range(samples)]


def write_checkpoint(folder: str, tokenizer: ppo_llm.HFTokenizer, context: int, shape: dict) -> None:
    """A random Qwen2, whose logits are spread wide enough for greedy tokens to vary."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True, max_position_embeddings=context,
        eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id, **shape)  # fmt: skip
    actor = ppo_llm.Transformer(ppo_llm.check_config(config))
    for p in actor.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.05)
    ppo_llm.save_hf_checkpoint(actor, tokenizer, Path(folder))


@functools.cache
def temporary_folder():
    return tempfile.TemporaryDirectory()  # as long as the process


@functools.cache
def patched_script(patch: str) -> Path:
    """The path of a copy of ppo_llm.py with tests/forks/<patch>.patch applied."""
    copied = Path(temporary_folder().name, patch, "ppo_llm.py")
    copied.parent.mkdir()
    copied.write_bytes((ROOT / "ppo_llm.py").read_bytes())
    subprocess.run(["git", "apply", ROOT / "tests" / "forks" / f"{patch}.patch"], cwd=copied.parent, check=True)
    return copied


def forced_lengths(name: str, samples: int, mean: int, longest: int) -> list[int]:
    """Response lengths of the given mean, then cut to `longest`, from a fixed seed."""
    torch.manual_seed(0)
    u = torch.rand(samples)
    lengths = {
        "constant": torch.full((samples,), float(mean)),
        "uniform": 1 + u * (2 * mean - 1),
        "exponential": -mean * u.log(),
        "log-normal": mean * (torch.randn(samples) - 0.5).exp(),  # sigma 1
        "90 / 10": torch.where(u < 0.9, mean / 3, 7.0 * mean),
    }[name]
    return lengths.round().clamp(1, longest).int().tolist()


@contextlib.contextmanager
def forced(ppo, lengths: list[int], after=lambda: None):
    """Within, sample i of a rollout gets lengths[i] tokens. Gives (start, end, rows that decode) of every K steps.

    K is `steps_per_wait` of Decoder, on the CPU 1. `after` is called after them. On an accelerator start and end tell
    when they were launched.
    """
    blocks, limits, made, rollout, begin, step = [], {}, 0, ppo.rollout, ppo.Decoder.begin, ppo.Decoder.step

    def forced_begin(decoder, rows, episodes, args):
        begin(decoder, rows, episodes, args)
        decoder.stop_ids.fill_(decoder.sampler.config.vocab_size)  # never sampled
        limit = [e.prompt_length + limits[e.noise_key] for e in episodes]
        decoder.limit[list(rows)] = torch.tensor(limit).to(decoder.limit)

    def forced_rollout(decoder, tokenizer, envs, seeds, sample_ids, iteration, args):
        keys = ppo.sample_keys(args.seed, iteration, sample_ids).tolist()
        limits.update((key, lengths[i]) for key, i in zip(keys, sample_ids, strict=True))
        tokenizer = copy.copy(tokenizer)
        tokenizer.stop_ids = [decoder.sampler.config.vocab_size]
        return rollout(decoder, tokenizer, envs, seeds, sample_ids, iteration, args)

    def watched_step(decoder, attend):
        nonlocal made
        if made % decoder.steps_per_wait == 0:
            blocks.append((time.perf_counter(), decoder.alive.sum()))
        step(decoder, attend)
        made += 1
        if made % decoder.steps_per_wait == 0:
            start, rows = blocks[-1]
            blocks[-1] = start, time.perf_counter(), rows
            after()

    with contextlib.ExitStack() as stack:
        patch = lambda *change: stack.enter_context(unittest.mock.patch.object(*change))
        patch(ppo, "rollout", forced_rollout)
        patch(ppo.Decoder, "begin", forced_begin)
        patch(ppo.Decoder, "step", watched_step)
        yield blocks


def make_decoder(ppo, sampler, tokenizer, rows: int, args):
    """A decoder, and the number of environments that it needs."""
    return ppo.Decoder(sampler, rows, tokenizer.stop_ids, args), math.ceil(rows * getattr(ppo, "ENVS_PER_ROW", 1))


def load_sampler(ppo, config, dtype, device="cpu"):
    """A model that decodes, with undefined weights, or those of a folder."""
    dtype = str(dtype).removeprefix("torch.")
    args = ppo.Args(dtype=dtype, device=str(device), compile="off")
    if not isinstance(config, str):
        return ppo.build_model(config, "lm", args, sampler=True)
    model = ppo.build_model(ppo.load_config(config), "lm", args, sampler=True)
    ppo.load_weights(model, config)
    return model


class Prompts(gym.Env):
    """Prompt `seed` of a list; every response ends its episode."""

    def __init__(self, prompts):
        self.prompts = prompts

    def reset(self, *, seed=None, options=None):
        return self.prompts[seed % len(self.prompts)], {}

    def step(self, response):
        return "", 0.0, True, False, {}
