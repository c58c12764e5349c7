"""The same run with one process and with several ranks, meshes and placements: how far apart are the numbers?

    python benchmarks/ranks.py           # up to 4 ranks
    python benchmarks/ranks.py many      # 8 and 16, many more than cores: does it start, agree and end
    python benchmarks/ranks.py plot      # draws pictures/decoupled.png from data/rollout_ranks.json

Prints the largest differences from the first run, and seconds.
Actor and critic are apart in a copy of the script with forks/critic_ranks.patch, which adds the flag --critic-ranks.
All other runs are those of the script itself.
A run makes three iterations of the default task in float32 on the CPU, with most of what the loop can do switched on.
It is compared in four completions per iteration, in all numbers of metrics.jsonl except timings and memory, and in the
exported weights. A start is the time until the run folder is made: imports, rendezvous, models.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import safetensors.torch
from common import hardware, line, patched_script, read_lines, table

FLAGS = (
    "--num-iterations 3 --rollout-batch-size 64 --n-samples-per-prompt 2 --train-batch-size 32 "
    "--micro-batch-tokens 200 --sft-steps 5 --eval-episodes 32 --kl-coef 0.05 "
    "--entropy-coef 0.01 --truncation-penalty 0.1"
).split()
RUNS = {  # name: (ranks, further flags); 0 ranks: no torchrun
    "1 process": (0, ""), "1 process, microbatches of 10,000 tokens": (0, "--micro-batch-tokens 10000"),
    "1 rank": (1, ""), "2 ranks": (2, ""), "4 ranks": (4, ""),
    "2 ranks, actor and critic apart": (2, "--critic-ranks 1"), "4 ranks, 3 + 1": (4, "--critic-ranks 1"),
    "4 ranks, 2 + 2": (4, "--critic-ranks 2"), "2 ranks, activation checkpointing": (2, "--activation-checkpointing"),
}  # fmt: skip
MANY = {"1 process": (0, ""), "8 ranks": (8, ""), "8 ranks, 6 + 2": (8, "--critic-ranks 2"), "16 ranks": (16, ""),
        "16 ranks, 12 + 4": (16, "--critic-ranks 4"),
        "16 ranks, activation checkpointing": (16, "--activation-checkpointing")}  # fmt: skip
SKIPPED = ("time/", "perf/")


def numbers(value, name=""):
    if isinstance(value, dict):
        return {k: x for key in value for k, x in numbers(value[key], f"{name}/{key}").items()}
    if isinstance(value, list):
        return {k: x for i, item in enumerate(value) for k, x in numbers(item, f"{name}/{i}").items()}
    return {name: value} if isinstance(value, int | float) else {}


def results(folder: Path):
    rows = read_lines(folder / "metrics.jsonl")
    rows = [{key: value for key, value in row.items() if not key.startswith(SKIPPED)} for row in rows]
    texts = [row["response"] for row in read_lines(folder / "completions.jsonl")]
    return numbers(rows), texts, safetensors.torch.load_file(folder / "model" / "model.safetensors")


def plot() -> None:
    """Three iterations of the default task on two ranks. Blanks are waiting and exchange."""
    rows = json.loads((common.DATA / "rollout_ranks.json").read_text())["spans"]
    title = "If one rank samples while the other one updates, an iteration takes about half the time"
    figure, axes = common.new_picture(title, 4.2, 2, 1)
    places = [("both", 1), ("both", 0), ("apart", 1), ("apart", 0)]
    names = ["both ranks do both: rank 1", "rank 0", "one samples: rank 1", "one updates: rank 0"]
    colors = {"sample": common.SKY, "update": common.ORANGE}
    answers = {"fast": "environments that answer at once", "slow": "environments that answer after a second"}
    for axis, (kind, answer) in zip(axes, answers.items()):
        for row in rows:
            if row["environments"] == kind:
                y = places.index((row["placement"], row["rank"]))
                for start, end in row["spans"]:
                    axis.barh(y, end - start, left=start, color=colors[row["what"]], height=0.7)
                start, end = row["spans"][0]
                if end - start > (0.5 if kind == "slow" else 0.2):  # The bar is wide enough for its name.
                    axis.text((start + end) / 2, y, row["what"], ha="center", va="center", fontsize=8)
        axis.set(title=answer, yticks=range(4), yticklabels=names, ylim=(3.5, -0.5), xlim=(0, None))
        axis.axhline(1.5, color=common.GREY, linewidth=0.8)
        axis.grid(visible=False)
    axes[1].set_xlabel("seconds")
    common.save_picture(figure, common.PICTURES / "decoupled.png")


def distances(runs: dict[str, tuple[int, str]], base_flags: list[str]):
    """Makes the runs. Gives of each, as it ends, how far it is from the first one.

    The numbers are: name, equal responses, responses, the largest difference of a metric, the name of that metric, the
    largest difference of a weight, seconds of the start, seconds of the rest.
    """
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as work:
        for i, (name, (ranks, flags)) in enumerate(runs.items()):
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
            script = patched_script("critic_ranks" if "--critic-ranks" in flags else "")
            command = [sys.executable, *launch, str(script), *base_flags, *flags.split()]
            command += ["--log-dir", work, "--run-name", str(i)]
            started = time.perf_counter()
            run = subprocess.run(command, env=env, text=True, capture_output=True, timeout=1800)
            whole = time.perf_counter() - started
            if run.returncode:
                sys.exit(f"{name}: exit code {run.returncode}\n{run.stderr[-3000:]}")
            metrics, texts, weights = results(Path(work, str(i)))
            if i == 0:
                first = metrics, texts, weights
            assert metrics.keys() == first[0].keys()
            # Relative for numbers above 1.
            worst = {key: abs(x - first[0][key]) / max(1, abs(first[0][key])) for key, x in metrics.items()}
            key = max(worst, key=worst.get)
            shift = max(float((weights[k] - first[2][k]).abs().max()) for k in weights)
            rest = json.loads(Path(work, str(i), "summary.json").read_text())["seconds"]
            same = sum(a == b for a, b in zip(texts, first[1]))
            yield name, same, len(texts), worst[key], key, shift, whole - rest, rest


def main() -> None:
    runs = MANY if sys.argv[1:] == ["many"] else RUNS
    print(f"{os.cpu_count()} cores, {hardware()}\n")
    table(["run", "same responses", "largest difference of a metric", "of a weight", "start, s", "the rest, s"])
    for name, same, count, worst, key, shift, start, rest in distances(runs, FLAGS):
        where = f" ({key.partition('/')[2].partition('/')[2]})" if worst else ""
        line([name, f"{same} of {count}", f"{worst:.1e}{where}", f"{shift:.1e}", f"{start:.0f}", f"{rest:.0f}"])


if __name__ == "__main__":
    main()
