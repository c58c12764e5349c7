"""What a GPU can do, and how much of that is used: decoding, a ladder of techniques, a whole iteration.

    python benchmarks/gpu.py                          # CUDA, bfloat16, all parts: roofline ladder workload iteration
    python benchmarks/gpu.py ladder iteration         # some of them
    python benchmarks/gpu.py smoke                    # a minute; tiny shapes, without a GPU on the CPU: does it run

Prints a table for each part, tokens per second beside what the card could do. First the copy bandwidth and the rate of
large matrix products on this device. A decode step can take no less than reading the weights and all live keys and
values at that bandwidth, or its arithmetic at that rate. Random weights.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import common
import torch
import transformers
from common import ppo_llm, seconds, synchronize

import ppo_llm_continuous_batching as continuous

SMOKE = "smoke" in sys.argv
DEVICE = torch.device("cpu" if SMOKE and not torch.cuda.is_available() else "cuda")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
SHAPES = {"tiny": common.TINY} if SMOKE else {"0.5B": common.QWEN_05B, "1.5B": common.QWEN_15B}
ROWS, PROMPT, NEW = ((1, 4), 4, 24) if SMOKE else ((1, 64, 256), 128, 256)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of copying a GiB."""
    a = torch.ones(2**20 if SMOKE else 2**28, device=DEVICE)
    b = torch.empty_like(a)
    return 2 * a.nbytes / min(seconds(lambda: b.copy_(a)) for _ in range(5))


def matrix_rate() -> float:
    """FLOP/s of large matrix products, the best of five."""
    n = 256 if SMOKE else 8192
    x = torch.rand(n, n, device=DEVICE).to(DTYPE)
    return 2 * n**3 / min(seconds(lambda: x @ x) for _ in range(5))


class Bench:
    """A random Qwen2 here and, if asked for, in transformers; prompts of the given lengths."""

    def __init__(self, shape: dict, peer: bool = False):
        config = transformers.Qwen2Config(tie_word_embeddings=True, max_position_embeddings=4096, **shape)
        self.config, self.tokenizer = ppo_llm.check_config(config), common.character_tokenizer(shape["vocab_size"])
        self.actor = common.load_sampler(ppo_llm, self.config, DTYPE, DEVICE)
        torch.manual_seed(0)
        for name, p in self.actor.named_parameters():
            torch.nn.init.normal_(p, std=0.02) if p.ndim == 2 else torch.nn.init.constant_(p, float("norm" in name))
        if peer:
            with torch.device(DEVICE):
                self.peer = transformers.Qwen2ForCausalLM(self.config).to(DTYPE).eval()
            self.peer.load_state_dict(self.actor.state_dict())

    def ours(self, ppo, slots: int, prompt_lengths: list[int], lengths: list[int], compiled: str) -> dict:
        """Medians of three rollouts after a warm-up: seconds, and those of a decode step but the first."""
        texts = common.random_prompts(self.tokenizer, len(lengths), max(prompt_lengths))
        prompts = [text[:n] for text, n in zip(texts, prompt_lengths, strict=True)]
        sizes = dict(max_prompt_tokens=max(prompt_lengths), max_new_tokens=max(lengths), rollout_slots=slots)
        args, rows, runs = ppo.Args(compile=compiled, **sizes), range(len(lengths)), []
        decoder, count = common.make_decoder(ppo, self.actor, self.tokenizer, min(slots, len(rows)), args)

        def run():
            envs = [common.Prompts(prompts) for _ in range(count)]
            ppo.rollout_share(decoder, self.tokenizer, envs, rows, rows, 0, args)

        def after():
            if not first:  # the prompts' forward and the first steps are done
                synchronize()
                first.append(time.perf_counter())

        for _ in range(4):
            first = []
            with common.forced(ppo, lengths, after) as blocks:
                total = seconds(run)
            runs.append((total, (time.perf_counter() - first[0]) / (decoder.steps_per_wait * (len(blocks) - 1))))
        return dict(zip(("seconds", "step"), map(statistics.median, zip(*runs[1:], strict=True)), strict=True))

    def generate(self, rows: int, cache: str | None) -> float:
        ids = torch.randint(3, self.config.vocab_size, (rows, PROMPT), device=DEVICE)
        run = lambda: self.peer.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW,
            eos_token_id=None, pad_token_id=0, cache_implementation=cache)  # fmt: skip
        run()
        return statistics.median(seconds(run) for _ in range(3))


def roofline(bandwidth: float, rate: float) -> None:
    common.table(["model", "rows", "compile", "ms a step", "at least, ms", "of the roofline", "tokens/s"])
    for name, shape in SHAPES.items():
        bench = Bench(shape)
        count = sum(p.numel() for p in bench.actor.parameters())
        heads = shape["num_hidden_layers"] * shape["num_key_value_heads"]
        per_token = 2 * heads * bench.config.head_dim * DTYPE.itemsize
        for rows in ROWS:
            read = count * DTYPE.itemsize + rows * per_token * (PROMPT + NEW / 2)
            least = max(read / bandwidth, 2 * count * rows / rate)
            for compiled in ("off", "on"):
                each = bench.ours(ppo_llm, rows, [PROMPT] * rows, [NEW] * rows, compiled)["step"]
                common.line([name, rows, compiled, f"{1e3 * each:.2f}", f"{1e3 * least:.2f}", f"{least / each:.0%}",
                             f"{rows / each:,.0f}"])  # fmt: skip


def ladder() -> None:
    name, shape = next(iter(SHAPES.items()))
    bench, rows = Bench(shape, peer=True), ROWS[1]
    print(f"\n{name}, {rows} rows, {PROMPT} + {NEW} tokens; the last two: {4 * rows} samples of log-normal lengths\n")
    common.table(["", "tokens/s", "of the first"])
    first, equal, mean = None, [NEW] * rows, NEW // 4
    unequal = common.forced_lengths("log-normal", 4 * rows, mean, NEW)
    for label, tokens, run in [
        ("generate, dynamic cache", rows * NEW, lambda: bench.generate(rows, None)),
        ("generate, static cache, compiled", rows * NEW, lambda: bench.generate(rows, "static")),
        *((f"ours, compile {c}", rows * NEW, lambda c=c: bench.ours(
            ppo_llm, rows, [PROMPT] * rows, equal, c)["seconds"]) for c in ("off", "on")),
        ("ours, waves", sum(unequal), lambda: bench.ours(
            ppo_llm, rows, [PROMPT] * len(unequal), unequal, "on")["seconds"]),
        ("ours, continuous", sum(unequal), lambda: bench.ours(
            continuous, rows, [PROMPT] * len(unequal), unequal, "on")["seconds"]),
    ]:  # fmt: skip
        speed = tokens / run()
        first = first or speed
        common.line([label, f"{speed:,.0f}", f"{speed / first:.2f}"])


def workload() -> None:
    """256 requests of 100 to 1024 tokens in and out, as in https://github.com/GeeeekExplorer/nano-vllm."""
    name, shape = next(iter(SHAPES.items()))
    requests, low, high = (4, 12, 24) if SMOKE else (256, 100, 1024)
    torch.manual_seed(0)
    prompts, lengths = (torch.randint(low, high + 1, (requests,)).tolist() for _ in range(2))
    run = Bench(shape).ours(continuous, requests, prompts, lengths, "on")
    print(f"\n{name}, {requests} requests of {low} to {high} tokens in and out: {sum(lengths) / run['seconds']:,.0f} "
          f"tokens/s, {run['seconds']:.1f} s")  # fmt: skip


def iteration() -> None:
    """One PPO iteration, the third of three."""
    name, shape = next(iter(SHAPES.items()))
    samples, mean = (8, 4) if SMOKE else (1024, 256)
    lengths, tokenizer = common.forced_lengths("log-normal", samples, mean, 8 * mean), common.character_tokenizer(
        shape["vocab_size"])  # fmt: skip

    common.gym.register("Listed-v0", entry_point=common.Prompts)
    prompts = json.dumps({"prompts": common.random_prompts(tokenizer, samples // 4, PROMPT)})
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder, common.forced(continuous, lengths):
        common.write_checkpoint(f"{folder}/model", tokenizer, PROMPT + 8 * mean, shape)
        continuous.train(continuous.Args(
            model=f"{folder}/model", env_id="Listed-v0", env_kwargs=prompts, log_dir=folder, run_name="run",
            save_every=0, num_iterations=3, rollout_batch_size=samples // 4, n_samples_per_prompt=4,
            rollout_slots=256, train_batch_size=samples // 4, ppo_epochs=1, micro_batch_tokens=32768,
            max_prompt_tokens=PROMPT, max_new_tokens=8 * mean, eval_episodes=1, device=DEVICE.type,
            compile="off" if SMOKE else "on"))  # fmt: skip
        row = common.read_lines(Path(folder, "run", "metrics.jsonl"))[-1]
    made = sum(lengths) / samples
    print(f"\none iteration, {name}, {samples} samples, prompts of {PROMPT}, responses of mean {made:.0f}\n")
    keys = [key for key in row if key.startswith(("time/", "perf/"))]
    common.table(["", ""], [(key, f"{row[key]:,.3f}") for key in keys])


def main():
    parts = {"roofline": roofline, "ladder": ladder, "workload": workload, "iteration": iteration}
    if unknown := {*sys.argv[1:]} - {*parts, "smoke"}:
        sys.exit(f"{', '.join(unknown)}: must be among {', '.join(parts)}, smoke")
    transformers.logging.set_verbosity_error()
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # else the rest would run uncompiled, with a warning alone
    bandwidth, rate = copy_bandwidth(), matrix_rate()
    print(f"{common.hardware(transformers, device=DEVICE.type)}, {DTYPE}; copies {bandwidth / 1e9:,.0f} GB/s, "
          f"matrix products {rate / 1e12:,.2f} TFLOP/s\n", flush=True)  # fmt: skip
    for name, part in parts.items():
        if name in sys.argv or not set(parts) & set(sys.argv):
            part(*([bandwidth, rate] if part is roofline else []))


if __name__ == "__main__":
    main()
