"""Rollout ranks: one rank samples while the other updates, against both ranks doing first one, then the other.

    python benchmarks/decoupled.py             # who does what when, with fast and with slow environments
    python benchmarks/decoupled.py learning    # the default task, three seeds each: samples to 90 %

Two ranks of one thread each, which run a copy of ppo_llm.py with tests/forks/rollout_ranks.patch applied: it adds the
flag --rollout-ranks. Draws benchmarks/decoupled.png and benchmarks/decoupled_learning.png.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import gymnasium as gym
from common import ROOT, hardware, line, patched_script, ppo_llm, spread, table

RANK = int(os.environ.get("RANK", 0))
PLACEMENTS = {"both ranks do both": [], "1 + 1": ["--rollout-ranks=1"]}
ENVIRONMENTS = {"at once": "SortDigits-v0", "after a second": "decoupled:SlowSortDigits-v0"}
ITERATIONS = 12  # of the timeline


class SlowSortDigits(ppo_llm.SortDigits):
    def step(self, response):
        time.sleep(1)
        return super().step(response)


gym.register("SlowSortDigits-v0", entry_point=SlowSortDigits)


def launch(folder: Path, *flags: str) -> None:
    """The default task on two ranks, whose ppo_llm is the patched copy."""
    path = f"{patched_script('rollout_ranks').parent}:{ROOT / 'benchmarks'}"
    elastic = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *elastic, __file__, "worker", str(folder), *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
    run = subprocess.run(command, env=env, text=True, capture_output=True)
    if run.returncode:
        sys.exit(f"{flags}: exit code {run.returncode}\n{run.stdout[-2000:]}{run.stderr[-3000:]}")


def worker(folder: Path, flags: list[str]) -> None:
    """Runs on each rank: trains, and writes spans (what, start, end) of training to spans.<rank>.json."""
    spans, start = [], [0.0]
    rollout, make_experience, log = ppo_llm.rollout, ppo_llm.make_experience, ppo_llm.Run.log

    def timed_rollout(decoder, tokenizer, envs, seeds, sample_ids, iteration, args):
        begin = time.time()
        episodes = rollout(decoder, tokenizer, envs, seeds, sample_ids, iteration, args)
        if iteration >= 0:  # no evaluation
            spans.append(("sample", begin, time.time()))
        return episodes

    def timed_make_experience(*arguments):  # not on a rank that only samples, and neither is log
        start[0] = time.time()
        return make_experience(*arguments)

    def timed_log(*arguments):
        spans.append(("update", start[0], time.time()))
        log(*arguments)

    sys.argv[1:] = [*flags, f"--log-dir={folder}", "--run-name=run", "--save-every=0"]
    with (
        mock.patch.object(ppo_llm, "rollout", timed_rollout),
        mock.patch.object(ppo_llm, "make_experience", timed_make_experience),
        mock.patch.object(ppo_llm.Run, "log", timed_log),
    ):
        ppo_llm.main()
    (folder / f"spans.{RANK}.json").write_text(json.dumps(spans))


def iteration_time(spans: list) -> float:
    """Median time between the starts of updates, without the first two iterations."""
    starts = [start for what, start, _ in spans if what == "update"][2:]
    return statistics.median(b - a for a, b in itertools.pairwise(starts))


def timeline() -> None:
    import matplotlib.pyplot as plt

    print(f"{hardware()}; seconds")
    table(["environments answer", *PLACEMENTS, "ratio (range of pairs)", "sample", "update"])
    figure, axes = plt.subplots(2, 2, figsize=(10, 3.2), layout="constrained", sharey=True)
    for row, (answer, env) in zip(axes, ENVIRONMENTS.items()):
        times = {name: [] for name in PLACEMENTS}
        for repeat in range(5):
            for axis, (name, placement) in zip(row, PLACEMENTS.items()):
                size = [f"--num-iterations={ITERATIONS}", "--eval-episodes=2"]
                flags = [f"--env-id={env}", *size, *placement]
                with tempfile.TemporaryDirectory() as folder:
                    launch(Path(folder), *flags)
                    ranks = [json.loads(Path(folder, f"spans.{rank}.json").read_text()) for rank in range(2)]
                times[name].append(iteration_time(ranks[0]))
                if repeat == 0:
                    draw(axis, ranks, f"{name}, environments answer {answer}")
        spans = [(what, end - start) for rank in ranks for what, start, end in rank]  # of the last run, 1 + 1
        phases = [statistics.median(x for what, x in spans if what == phase) for phase in ("sample", "update")]
        both, apart = times.values()
        medians = [f"{statistics.median(x):.2f}" for x in (both, apart)]
        line([answer, *medians, spread([b / a for a, b in zip(both, apart)]), *(f"{x:.2f}" for x in phases)])
    axes[1][0].set_xlabel("seconds")
    axes[1][1].set_xlabel("seconds")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in ("C0", "C1")]
    figure.legend(handles, ["sample", "update"], loc="outside right")
    figure.savefig(Path(__file__).parent / "decoupled.png", dpi=110)


def draw(axis, ranks: list, title: str) -> None:
    """Three iterations; the blank is waiting and exchange."""
    updates = [start for what, start, _ in ranks[0] if what == "update"]
    first, last = updates[4], updates[7]
    for rank, spans in enumerate(ranks):
        for what, start, end in spans:
            start, end = max(start, first), min(end, last)
            color = {"sample": "C0", "update": "C1"}[what]
            if start < end:
                axis.barh(rank, end - start, left=start - first, color=color, height=0.6)
    axis.set_title(title, fontsize=9)
    axis.set_yticks([0, 1], ["rank 0", "rank 1"])


def learning() -> None:
    import matplotlib.pyplot as plt

    print(hardware())
    table(["seed", *(f"{name}: samples to 90 %, at the end" for name in PLACEMENTS)])
    figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for seed in (1, 2, 3):
        cells = []
        for i, (name, flags) in enumerate(PLACEMENTS.items()):
            with tempfile.TemporaryDirectory() as folder:
                launch(Path(folder), f"--seed={seed}", *flags)
                rows = [json.loads(text) for text in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
                after = json.loads(Path(folder, "run", "summary.json").read_text())["eval_after"]["accuracy"]
            accuracy = [row["objective/accuracy"] for row in rows]
            means = [statistics.mean(accuracy[max(0, k - 4) : k + 1]) for k in range(len(rows))]
            samples = [256 * (row["iteration"] + 1) for row in rows]
            reached = next((n for n, mean in zip(samples, means) if mean >= 0.9), None)
            cells.append(f"{reached:,}, {after:.1%}" if reached else f"never, {after:.1%}")
            axis.plot(samples, [100 * x for x in means], color=f"C{i}", linewidth=1, label=name if seed == 1 else None)
        line([seed, *cells])
    axis.set(xlabel="samples", ylabel="right responses, %", ylim=(0, 100))
    axis.legend(loc="lower right")
    figure.savefig(Path(__file__).parent / "decoupled_learning.png", dpi=110)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(Path(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1:] == ["learning"]:
        learning()
    else:
        timeline()
