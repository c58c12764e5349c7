"""Rollout of `ppo_llm.py` against `generate` of transformers: the same random Qwen2, prompts and response lengths.

    python benchmarks/decode.py               # CPU, one thread, float32 and bfloat16, some minutes
    python benchmarks/decode.py smoke         # seconds: does it run

All in one process and in turn, greedy, no row ends early. Greedy tokens are compared before any timing. Our side
computes log-probs and calls an environment for each prompt and response, `generate` returns tokens alone.
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
PEERS = {"dynamic cache": (None, False), "static cache": ("static", False), "static, compiled": ("static", True)}


class Sides:
    def __init__(self, dtype, shape, rows, prompt, new, pairs):
        self.tokenizer, self.rows, self.new = common.character_tokenizer(shape["vocab_size"]), rows, new
        folder = common.temporary_folder().name
        common.write_checkpoint(folder, self.tokenizer, prompt + new, shape)
        self.actor, _ = ppo_llm.load_hf_checkpoint(folder, dtype)
        self.peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.prompts = common.random_prompts(self.tokenizer, rows, prompt)
        self.ids = torch.tensor([self.tokenizer.encode_prompt(text) for text in self.prompts])
        self.tokenizer.stop_ids = [shape["vocab_size"]]  # never sampled

    def ours(self, compiled: str) -> torch.Tensor:
        sizes = dict(max_prompt_tokens=self.ids.shape[1], max_new_tokens=self.new, rollout_slots=self.rows)
        args, rows = ppo_llm.Args(compile=compiled, **sizes), range(self.rows)
        envs = [common.Prompts(self.prompts) for _ in rows]
        return ppo_llm.rollout(self.actor, self.tokenizer, envs, rows, rows, args, 0, greedy=True).tokens

    def generate(self, cache: str | None, compiled: bool) -> torch.Tensor:
        config = transformers.CompileConfig(mode="default")  # "reduce-overhead" is for CUDA graphs
        config._compile_all_devices = True  # else transformers compiles on GPUs alone
        return self.peer.generate(
            self.ids, attention_mask=torch.ones_like(self.ids), do_sample=False, max_new_tokens=self.new,
            min_new_tokens=self.new, eos_token_id=None, pad_token_id=0, cache_implementation=cache,
            disable_compile=not compiled, compile_config=config if compiled else None)  # fmt: skip


def main():
    settings = SMOKE if "smoke" in sys.argv else CPU
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    sizes = ", ".join(f"{key} {value}" for key, value in settings["shape"].items())
    print(f"{sizes}; {settings['rows']} rows, {settings['prompt']} + {settings['new']} tokens; "
          f"{common.hardware(transformers)}; medians of {settings['pairs']} runs of each\n")  # fmt: skip
    common.table(["dtype", "side", "same greedy tokens", "tokens/s", "of the best `generate`"])
    for dtype in (torch.float32, torch.bfloat16):
        sides = Sides(dtype, **settings)
        runs = {"ours": lambda: sides.ours("off"), "ours, --compile on": lambda: sides.ours("on")}
        runs |= {f"generate, {name}": lambda how=how: sides.generate(*how) for name, how in PEERS.items()}
        # Rows agree until two tokens are nearly tied; then they go different ways.
        tokens = {name: run()[:, settings["prompt"] :] for name, run in runs.items()}
        same = {name: (x == tokens["ours"]).int().cumprod(1).float().mean() for name, x in tokens.items()}
        seconds = {name: [] for name in runs}
        for _ in range(settings["pairs"]):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
        best = min(list(runs)[-len(PEERS) :], key=lambda name: statistics.median(seconds[name]))
        for name, mine in seconds.items():
            ratio = common.spread([theirs / ours for theirs, ours in zip(seconds[best], mine, strict=True)])
            speed = settings["rows"] * settings["new"] / statistics.median(mine)
            common.line([str(dtype).removeprefix("torch."), name, f"{same[name]:.1%}", f"{speed:,.0f}", ratio])
        for name in ("ours", "ours, --compile on"):
            print(f"\n{dtype}, {name}: {common.operators(runs[name])}\n")


if __name__ == "__main__":
    main()
