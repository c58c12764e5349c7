"""Rollout of `ppo_llm.py` against `generate` of transformers: the same model, prompts and response lengths.

    python benchmarks/decode.py                           # some minutes: a random Qwen2, float32 and bfloat16
    python benchmarks/decode.py smoke                     # a minute: does it run
    python benchmarks/decode.py real FOLDER [rows ...]    # a Hugging Face checkpoint, float32; default 1 8 16 64

Prints tokens per second of each side on one thread of the CPU, and ratios. All in one process and in turn, greedy, no
row ends early. Greedy tokens are compared before any timing. Our side computes log-probs and calls an environment for
each prompt and response, `generate` returns tokens alone.

With a checkpoint also the time of a decode step, from the first sampled token to the last and thus without the prefill.
"""

import statistics
import sys
import time

import common
import torch
import transformers
from common import ppo_llm

CPU = dict(shape=common.SMALL, rows=32, prompt=32, new=128, pairs=7)
SMOKE = dict(shape=common.TINY, rows=4, prompt=4, new=8, pairs=1)
REAL = dict(new=64, pairs=5)
PEERS = {"dynamic cache": (None, False), "static cache": ("static", False), "static, compiled": ("static", True)}


class Clock(transformers.LogitsProcessor):
    """Notes when `generate` has the logits of a token."""

    def __init__(self, times: list[float]):
        self.times = times

    def __call__(self, input_ids, scores):
        self.times.append(time.perf_counter())
        return scores


class Sides:
    def __init__(self, folder: str, dtype: torch.dtype, prompts: list[str], new: int):
        self.tokenizer, self.prompts, self.new = ppo_llm.HFTokenizer(folder), prompts, new
        self.actor = common.load_sampler(ppo_llm, folder, dtype)
        self.peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.peer.generation_config.eos_token_id = None  # it takes effect where generate is given None
        self.ids = torch.tensor([self.tokenizer.encode_prompt(text) for text in prompts])
        self.times = []  # when the tokens of the last run were there
        self.runs = {"ours": lambda: self.ours("off"), "ours, --compile on": lambda: self.ours("on")}
        self.runs |= {f"generate, {name}": lambda how=how: self.generate(*how) for name, how in PEERS.items()}

    def ours(self, compiled: str) -> torch.Tensor:
        sizes = dict(max_prompt_tokens=self.ids.shape[1], max_new_tokens=self.new, rollout_slots=len(self.prompts))
        args, rows = ppo_llm.Args(compile=compiled, temperature=0.0, **sizes), range(len(self.prompts))
        decoder, _ = common.make_decoder(ppo_llm, self.actor, self.tokenizer, len(rows), args)
        envs = [common.Prompts(self.prompts) for _ in rows]
        self.times.clear()
        with common.forced(ppo_llm, [self.new] * len(rows), lambda: self.times.append(time.perf_counter())):
            episodes = ppo_llm.rollout_share(decoder, self.tokenizer, envs, rows, rows, 0, args)
        return torch.tensor([episode.ids for episode in episodes])

    def generate(self, cache: str | None, compiled: bool) -> torch.Tensor:
        config = transformers.CompileConfig(mode="default")  # "reduce-overhead" is for CUDA graphs
        config._compile_all_devices = True  # else transformers compiles on GPUs alone
        self.times.clear()
        return self.peer.generate(
            self.ids, attention_mask=torch.ones_like(self.ids), do_sample=False, max_new_tokens=self.new,
            eos_token_id=None, pad_token_id=0, cache_implementation=cache, disable_compile=not compiled,
            compile_config=config if compiled else None, logits_processor=[Clock(self.times)])  # fmt: skip

    def same_tokens(self) -> dict[str, float]:
        """Share of greedy tokens that agree with ours: rows agree until two tokens are nearly tied."""
        tokens = {name: run()[:, self.ids.shape[1] :] for name, run in self.runs.items()}
        assert all(x.shape == (len(self.prompts), self.new) for x in tokens.values())
        return {name: float((x == tokens["ours"]).int().cumprod(1).float().mean()) for name, x in tokens.items()}

    def measure(self, pairs: int) -> tuple[dict, dict]:
        """Seconds of whole runs, and of their decode steps: {side: [of each run]}."""
        seconds, steps = {name: [] for name in self.runs}, {name: [] for name in self.runs}
        for _ in range(pairs):
            for name, run in self.runs.items():
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
                assert len(self.times) == self.new, len(self.times)
                steps[name].append((self.times[-1] - self.times[0]) / (self.new - 1))
        return seconds, steps


def of_best_peer(seconds: dict[str, list[float]]) -> dict[str, str]:
    """How many times as fast as the best `generate` a side is."""
    best = min(list(seconds)[-len(PEERS) :], key=lambda name: statistics.median(seconds[name]))
    pairs = {name: zip(seconds[best], mine, strict=True) for name, mine in seconds.items()}
    return {name: common.spread([theirs / ours for theirs, ours in pair]) for name, pair in pairs.items()}


def random_model(shape, rows, prompt, new, pairs):
    sizes = ", ".join(f"{key} {value}" for key, value in shape.items())
    print(f"{sizes}; {rows} rows, {prompt} + {new} tokens; {common.hardware(transformers)}; "
          f"medians of {pairs} runs of each\n")  # fmt: skip
    folder, tokenizer = common.random_checkpoint(prompt + new, shape)
    common.table(["dtype", "side", "same greedy tokens", "tokens/s", "of the best `generate`"])
    for dtype in (torch.float32, torch.bfloat16):
        sides = Sides(folder, dtype, common.random_prompts(tokenizer, rows, prompt), new)
        same, (seconds, _) = sides.same_tokens(), sides.measure(pairs)
        ratios = of_best_peer(seconds)
        for name, mine in seconds.items():
            speed = rows * new / statistics.median(mine)
            common.line([str(dtype).removeprefix("torch."), name, f"{same[name]:.1%}", f"{speed:,.0f}", ratios[name]])


def real_model(folder, rows_of_runs, new, pairs):
    print(f"{folder}, float32; {new} new tokens; {common.hardware(transformers)}; medians of {pairs} runs of each\n")
    common.table(["rows", "side", "same greedy tokens", "tokens/s", "of the best `generate`", "ms per decode step",
                  "step, of the best `generate`"])  # fmt: skip
    for rows in rows_of_runs:
        torch.compiler.reset()  # else the second number of rows runs code for any number
        sides = Sides(folder, torch.float32, common.sums(rows), new)
        same = sides.same_tokens()  # compiles
        seconds, steps = sides.measure(pairs)
        ratios, step_ratios = of_best_peer(seconds), of_best_peer(steps)
        for name, mine in seconds.items():
            speed, step = rows * new / statistics.median(mine), statistics.median(steps[name])
            common.line([rows, name, f"{same[name]:.1%}", f"{speed:,.1f}", ratios[name], f"{1000 * step:.1f}",
                         step_ratios[name]])  # fmt: skip


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if sys.argv[1:2] == ["real"]:
        real_model(sys.argv[2], [int(x) for x in sys.argv[3:]] or [1, 8, 16, 64], **REAL)
    else:
        random_model(**(SMOKE if "smoke" in sys.argv else CPU))


if __name__ == "__main__":
    main()
