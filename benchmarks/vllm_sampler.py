"""vLLM as the sampler (forks/vllm.patch) beside the script's own sampler. docs/vllm.md has the results.

    python benchmarks/checkpoints.py smollm2 DIR
    python benchmarks/vllm_sampler.py sums DIR 1 vllm    # one-digit sums with seed 1, by vLLM; or `own`
    python benchmarks/vllm_sampler.py table              # prints the table

A run adds a line to data/vllm.jsonl. It takes seven minutes of one core, and with vLLM it needs the environment of
benchmarks/vllm.sh.
"""

import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

import common

RESULTS = common.DATA / "vllm.jsonl"
SUMS = """--env-id benchmarks.tasks:Sums-v0 --eval-env-kwargs '{"split": "test"}' --critic-epochs 0 --num-iterations 6
    --actor-lr 2e-5 --rollout-batch-size 32 --train-batch-size 16 --max-prompt-tokens 64 --max-new-tokens 12
    --eval-episodes 100"""


def sums(folder: str, seed: int, sampler: str, *more: str) -> None:
    """A run of the sums: right answers before and after, and how far the sampler is from the actor."""
    patch, cache = ("vllm", ["--vllm-cache-gb", "0.5"]) if sampler == "vllm" else ("", [])
    flags = ["--model", folder, "--seed", str(seed), *shlex.split(SUMS), *cache, *more]
    with tempfile.TemporaryDirectory() as runs:
        run = common.run_script(common.patched_script(patch), flags, Path(runs))
        summary, rows = json.loads((run / "summary.json").read_text()), common.read_lines(run / "metrics.jsonl")
    names = ("ratio/first_dev", "debug/sampler_trainer_logprob_diff", "objective/reward", "time/rollout",
             "time/hand_over", "time/iteration")  # fmt: skip
    common.add_line(RESULTS, {
        "kind": "sums", "sampler": sampler, "seed": seed, "flags": " ".join(more), "commit": common.commit(),
        "before": summary["eval_before"], "after": summary["eval_after"],
        "rows": [{name: row[name] for name in names} for row in rows],
    })  # fmt: skip


def table() -> None:
    runs = common.read_lines(RESULTS)
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


def main():
    match sys.argv[1:]:
        case ["sums", folder, seed, ("own" | "vllm") as sampler, *more]:
            sums(str(Path(folder).resolve()), int(seed), sampler, *more)
        case ["table"]:
            table()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
