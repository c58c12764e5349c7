"""vLLM as the sampler (forks/vllm.patch) beside the scripts' own samplers. docs/vllm.md has the results.

    python benchmarks/checkpoints.py smollm2 DIR
    python benchmarks/vllm_sampler.py sums DIR 1 vllm    # one-digit sums with seed 1, by vLLM; or `own`
    python benchmarks/vllm_sampler.py rollouts DIR       # seconds of rollouts and of the hand-over
    python benchmarks/vllm_sampler.py table              # prints the tables

The results are lines of data/vllm.jsonl. The first two need the environment of benchmarks/vllm.sh. A run of sums takes
ten minutes of one core. In `rollouts` all samplers are in one process, with the same weights, prompts and limit, and
play in turn. Their samples differ, since their noise does, so the measure is tokens per second.
"""

import concurrent.futures
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest.mock
from pathlib import Path

import common
import torch
from common import ROOT

RESULTS = common.DATA / "vllm.jsonl"
SUMS = """--env-id benchmarks.tasks:Sums-v0 --eval-env-kwargs '{"split": "test"}' --critic-epochs 0 --num-iterations 6
    --actor-lr 2e-5 --rollout-batch-size 32 --train-batch-size 16 --max-prompt-tokens 64 --max-new-tokens 12
    --eval-episodes 100 --save-every 0"""
QUESTIONS = ["Why is the sky blue?", "Name three rivers.", "Say hello.", "Write a poem about snow.", "What is 2 + 2?",
             "Tell me a story about a dog.", "What is a verb?", "Is ice cold? Answer yes or no."]  # fmt: skip
ROLLOUTS = {  # name: (prompts, largest number of new tokens)
    "answers of 12 tokens": (common.sums(64), 12),
    "answers of 2 to 96 tokens": ([QUESTIONS[i % 8] for i in range(64)], 96),
}
PAIRS = 3


def script(patch: str | None) -> Path:
    return common.patched_script(patch) if patch else ROOT / "ppo_llm.py"


def sums(folder: str, seed: int, sampler: str, *more: str) -> None:
    """A run of the sums: right answers before and after, and how far the sampler is from the actor."""
    vllm = sampler == "vllm"
    flags = shlex.split(SUMS) + (["--vllm-cache-gb", "0.5"] if vllm else []) + list(more)
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, script("vllm" if vllm else None), "--model", folder, "--seed", str(seed), *flags,
                   "--log-dir", runs, "--run-name", "run"]  # fmt: skip
        subprocess.run(list(map(str, command)), check=True, cwd=ROOT, stdout=sys.stderr)
        summary = json.loads(Path(runs, "run", "summary.json").read_text())
        rows = common.read_lines(Path(runs, "run", "metrics.jsonl"))
    names = ("ratio/first_dev", "debug/sampler_trainer_logprob_diff", "objective/reward", "time/rollout",
             "time/hand_over", "time/iteration")  # fmt: skip
    common.add_line(RESULTS, {
        "kind": "sums", "sampler": sampler, "seed": seed, "flags": " ".join(more), "commit": common.commit(),
        "before": summary["eval_before"], "after": summary["eval_after"],
        "rows": [{name: row[name] for name in names} for row in rows],
    })  # fmt: skip


def loaded(path: Path) -> types.ModuleType:
    module = types.ModuleType("ppo_llm")
    module.__file__ = str(path)
    with unittest.mock.patch.dict(sys.modules, ppo_llm=module):
        exec(compile(path.read_text(), path, "exec"), module.__dict__)
    return module


class Side:
    """A sampler in this process, with the checkpoint's weights in float32."""

    def __init__(self, name: str, folder: str):
        patch = "vllm" if name == "vllm" else None
        twin = ROOT / "ppo_llm_continuous_batching.py"
        self.ppo = loaded(twin if name == "continuous batching" else script(patch))
        self.folder, self.name, self.decoders = folder, name, {}
        more = {"vllm_cache_gb": 1.0} if patch else {}
        sizes = dict(max_prompt_tokens=64, max_new_tokens=96, rollout_batch_size=64, train_batch_size=64)
        self.args = self.ppo.fill_in_defaults(self.ppo.Args(model=folder, device="cpu", compile="off", **sizes, **more))
        if patch:
            self.engine = self.ppo.Engine(self.args)
        self.tokenizer, self.actor = self.ppo.build_actor(self.args, None)
        if patch:
            self.engine.load(self.actor)
        else:
            self.sampler = self.ppo.copy_model(self.actor, self.args, sampler=True)

    def hand_over(self) -> None:
        self.ppo.update_sampler(self.actor, self.engine if self.name == "vllm" else self.sampler)

    def play(self, prompts: list[str], limit: int, rows: int, iteration: int) -> tuple[float, int]:
        """Seconds and tokens of a rollout with one sample of each prompt."""
        args = self.ppo.dataclasses.replace(self.args, max_new_tokens=limit)
        if self.name == "vllm":
            decoder, count = self.engine, rows
        else:
            decoder, count = common.make_decoder(self.ppo, self.sampler, self.tokenizer, rows, args)
        envs = [common.Prompts(prompts) for _ in range(count)]
        seeds = range(len(prompts))
        start = time.perf_counter()
        episodes = self.ppo.rollout_share(decoder, self.tokenizer, envs, seeds, seeds, iteration, args)
        return time.perf_counter() - start, sum(sum(episode.mask) for episode in episodes)


def peak_of(work) -> tuple[float, float]:
    """Seconds of `work`, and the memory of this process that it needed in addition, in MB."""
    pages = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
    before, most, done = pages(), [0.0], threading.Event()

    def watch():
        while not done.wait(0.005):
            most[0] = max(most[0], pages())

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(watch)
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        done.set()
    return seconds, max(0.0, most[0] - before)


def rollouts(folder: str) -> None:
    torch.set_num_threads(1)  # vLLM makes this a no-op later
    sides = [Side(name, folder) for name in ("vllm", "waves", "continuous batching")]
    for side in sides[:2]:
        side.hand_over()
        found = [peak_of(side.hand_over) for _ in range(PAIRS)]
        row = {"seconds": [x for x, _ in found], "MB": [x for _, x in found]}
        common.add_line(RESULTS, {"kind": "hand-over", "sampler": side.name, "commit": common.commit(), **row})
    for lengths, (prompts, limit) in ROLLOUTS.items():
        for rows in 8, 64:
            chosen = prompts[: max(16, rows)]
            found = {side.name: [] for side in sides}
            for pair in range(PAIRS + 1):  # the first one warms up
                for side in sides:
                    seconds, tokens = side.play(chosen, limit, rows, pair)
                    found[side.name].append((seconds, tokens))
                    print(lengths, rows, side.name, f"{tokens / seconds:.1f}/s", file=sys.stderr, flush=True)
            for name, runs in found.items():
                per_second = [tokens / seconds for seconds, tokens in runs[1:]]
                common.add_line(RESULTS, {
                    "kind": "rollout", "sampler": name, "lengths": lengths, "rows": rows, "samples": len(chosen),
                    "tokens": [tokens for _, tokens in runs[1:]], "per_second": per_second, "commit": common.commit(),
                    "where": common.hardware(),
                })  # fmt: skip


def table() -> None:
    found = common.read_lines(RESULTS)
    runs = [row for row in found if row["kind"] == "sums"]
    common.table(["sampler", "flags", "seeds", "sampled before, %", "after, %", "greedy after, %",
                  "largest first ratio - 1", "distance, nats per token", "rollout, s", "hand-over, s"])  # fmt: skip
    for sampler, flags in dict.fromkeys((row["sampler"], row["flags"]) for row in runs):
        some = [row for row in runs if (row["sampler"], row["flags"]) == (sampler, flags)]
        rows = [row for run in some for row in run["rows"]]
        percent = lambda when, name: common.spread([100 * run[when][name] for run in some], ".0f")
        column = lambda name: [row[name] for row in rows]
        common.line([
            sampler, flags, len(some), percent("before", "accuracy"), percent("after", "accuracy"),
            percent("after", "greedy_accuracy"), f"{max(column('ratio/first_dev')):g}",
            f"{max(column('debug/sampler_trainer_logprob_diff')):.1e}",
            f"{statistics.median(column('time/rollout')):.1f}", f"{statistics.median(column('time/hand_over')):.2f}",
        ])  # fmt: skip
    print()
    common.table(["samples of", "rows", "vLLM, tokens/s", "vLLM / waves", "vLLM / continuous batching"])
    by = {(row["lengths"], row["rows"], row["sampler"]): row["per_second"] for row in found if row["kind"] == "rollout"}
    for lengths, rows in dict.fromkeys(key[:2] for key in by):
        of = lambda name: by[lengths, rows, name]
        ratios = [common.spread([a / b for a, b in zip(of("vllm"), of(other), strict=True)])
                  for other in ("waves", "continuous batching")]  # fmt: skip
        common.line([lengths, rows, common.spread(of("vllm"), ".0f"), *ratios])
    print()
    common.table(["hand-over", "seconds", "more memory, MB"])
    for row in found:
        if row["kind"] == "hand-over":
            common.line([row["sampler"], common.spread(row["seconds"]), common.spread(row["MB"], ".0f")])


def main():
    match sys.argv[1:]:
        case ["sums", folder, seed, ("own" | "vllm") as sampler, *more]:
            sums(str(Path(folder).resolve()), int(seed), sampler, *more)
        case ["rollouts", folder]:
            rollouts(str(Path(folder).resolve()))
        case ["table"]:
            table()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
