"""All results that need only two CPU cores, measured on one version of the scripts.

    python benchmarks/table.py                          # makes all runs that are missing, except those of EXTRA rows
    python benchmarks/table.py --only default sums      # only those of these rows
    python benchmarks/table.py --seeds 1 2              # only these seeds, pairs or parts
    python benchmarks/table.py list                     # prints the rows, their runs and the minutes that they need
    python benchmarks/table.py stale                    # prints which runs are missing, and which are of other code
    python benchmarks/table.py show                     # prints the table, without runs of other code
    python benchmarks/table.py carry                    # after a change that should not change results
    python benchmarks/table.py run sums TRL 1           # makes one run, prints its numbers, and keeps nothing

A finished run appends a line to data/table.jsonl. A run whose line is there is not made again, so the command can be
interrupted and repeated, and runs of several days add up. A line counts as long as the code is the same. The code of a
run is the syntax tree of both scripts, without comments, docstrings and the texts of errors, of the patched script, of
the files that the row names, and of the function that reads its numbers. After each run the command writes table.md
anew, from the newest line of each run.

After a change that should not change results, `carry` makes the first iterations of the run with seed 1 of each
variant, with the row's own schedule. Runs of the script in one process are stopped and resumed in between. It makes
them with the code of the earlier line as well, from its commit, unless that line has their fingerprints and they agree:
other processors round in other ways, so a difference counts only if one machine made both sides. A fingerprint is a
hash of an iteration's metrics, to the last bit, and of its logged responses; of a run of TRL, of its weights. If all of
them agree, the lines of all seeds count for the new code too, and name the commit of their run. If not, `carry` says
what differs, and the runs must be made again. So must rows that measure time, and the planted bugs.

--jobs runs (default 2) are made at a time, each on one thread. Rows that measure time come last. Their runs are made
one at a time, and wait until the processor is idle. --model-dir, or the variable MODEL_DIR, is the folder that
`python benchmarks/checkpoints.py smollm2 DIR` writes. --smoke shortens all runs to a few iterations, prints their
numbers, and writes no line. The outputs and metrics of the runs stay in runs/table/CODE, from where learning_curve.py
and cases.py can read them for their pictures.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import common
import in_turn
import learning_curve
import short_runs
import torch
from cases import CASES
from common import ROOT
from short_runs import METRICS, by_name, fingerprints, first_difference, run_until

DATA, PAGE = common.DATA / "table.jsonl", ROOT / "benchmarks" / "table.md"
SCRIPTS = ("ppo_llm.py", "ppo_llm_continuous_batching.py")
IDLE = 0.3  # the cores that other processes may use while a time is measured
PATIENCE = 600  # seconds that a run that measures time waits for an idle processor


# --- Rows. A row has variants, and a variant is a command of the script, or a function below.


@dataclasses.dataclass(frozen=True)
class Run:
    flags: str = ""  # of ppo_llm.py
    minutes: float = 3  # on one quiet core
    patch: str = ""  # a name in forks/
    make: str = "script_numbers"  # the function that makes the run and returns its numbers
    argument: object = None  # for that function
    typed: str = ""  # what a reader types, if it is no command of ppo_llm.py
    files: tuple[str, ...] = ()  # further files that the numbers depend on, beside those of the row
    repeats: bool = True  # whether the same seed gives the same numbers

    def command(self, row: str, variant: str, seed: int | str) -> str:
        if self.typed:
            return self.typed.replace("SEED", str(seed))
        if self.make != "script_numbers":
            return f"python benchmarks/table.py run {shlex.quote(row)} {shlex.quote(variant)} {seed}"
        start = f"git apply forks/{self.patch}.patch && " if self.patch else ""
        return f"{start}python ppo_llm.py {self.flags} --seed {seed}".replace("  ", " ")


@dataclasses.dataclass(frozen=True)
class Row:
    claim: str
    variants: dict[str, Run]
    shown: tuple[str, ...]  # names of NUMBERS
    seeds: int = 5  # the first ones
    unit: str = "seeds"
    statistic: str = "mean"  # how the table combines runs: mean, median, range, worst or sum
    against: tuple[tuple[str, str, str], ...] = ()  # triples (variant, number, "quotient" or "difference")
    alone: bool = False  # no other run beside it
    extra: bool = False  # made only if --only names the row
    files: tuple[str, ...] = ()  # other files that the numbers depend on
    texts: dict[str, str] = dataclasses.field(default_factory=dict)  # {number: what it is called, unless as in NUMBERS}


DEFAULT = Run(learning_curve.TASKS["default"]["default"])  # its evaluations do not change the training
SUMS = ("--model smollm2 --env-id benchmarks.tasks:Sums-v0 --eval-env-kwargs '{\"split\": \"test\"}' "
        "--num-iterations 10 --actor-lr 2e-5 --train-batch-size 16 --max-prompt-tokens 64 --max-new-tokens 12 "
        "--eval-episodes 100 --rollout-batch-size")  # fmt: skip
PREFIX = ("--env-id benchmarks.tasks:Prefix-v0 --env-kwargs '{\"digits\": 10}' --num-iterations 120 "
          "--max-prompt-tokens 11 --max-new-tokens 12")  # fmt: skip
SEQUENCES, GUESS = learning_curve.TASKS["sequences"], learning_curve.TASKS["guess"]["guess"]
ENDS = ("before", "greedy_before", "after", "greedy_after")
TESTS = ("tests/*.py", "tests/faults.txt")
ROWS = {
    "sums": Row(
        "SmolLM2-135M learns one-digit sums", {
            "critic": Run(f"{SUMS} 32", minutes=20),
            "constant": Run(f"{SUMS} 32 --critic-epochs 0", minutes=13),
            "group": Run(f"{SUMS} 8 --n-samples-per-prompt 4", minutes=13, patch="group_normalised"),
            "TRL": Run(make="sums_with_trl", minutes=25, repeats=False),  # It shuffles without a seed.
        }, (*ENDS, "accuracy_end"), against=(
            ("TRL", "after", "difference"), ("constant", "after", "difference"),
            ("constant", "accuracy_end", "difference"),
        ), files=("benchmarks/learning_real.py",)),
    "default": Row("The default task is learned", {"critic": DEFAULT}, (*ENDS, "samples_to_90", "samples"),
                   seeds=10),
    "sort": Row(
        "Samples of the default task until 90% are right", {
            "critic": DEFAULT, "constant": Run(f"{DEFAULT.flags} --critic-epochs 0", minutes=2),
            "group": Run(DEFAULT.flags, minutes=2, patch="group_normalised"),
        }, ("samples_to_level", "after"), seeds=10, against=(("constant", "samples_to_level", "quotient"),)),
    "prefix": Row(
        "Samples of `prefix` until the reward is 0.5", {
            "critic": Run(PREFIX, minutes=2), "constant": Run(f"{PREFIX} --critic-epochs 0", minutes=1.5),
            "group": Run(PREFIX, minutes=1.5, patch="group_normalised"),
        }, ("samples_to_level", "reward_end"), seeds=10, against=(("constant", "samples_to_level", "quotient"),)),
    "dense": Row(
        "`Dense-v0` with a discount of 0.5, and the same rewards at the end without a discount", {
            "critic": Run(SEQUENCES["dense"]), "constant": Run(SEQUENCES["dense, constant baseline"], minutes=2),
            "at the end": Run(SEQUENCES["at the end"]),
        }, ("after", "greedy_after", "accuracy_end", "samples_to_level"), seeds=10,
        against=(("constant", "after", "difference"), ("constant", "accuracy_end", "difference"))),
    "undiscounted": Row(
        "`Dense-v0` without a discount", {
            "critic": Run(SEQUENCES["dense"].replace(" --gamma 0.5", "")),
            "constant": Run(SEQUENCES["dense, constant baseline"].replace(" --gamma 0.5", ""), minutes=2),
        }, ("after", "greedy_after", "accuracy_end"),
        against=(("constant", "after", "difference"), ("constant", "accuracy_end", "difference"))),
    "turns": Row(
        "Binary search is learned in several turns",
        {"critic": Run(GUESS, minutes=5, make="guess_number", typed=f"python ppo_llm.py {GUESS} --seed SEED")},
        ("reward_by_number", "reward_after"), seeds=3),
    "lora": Row("LoRA learns the default task", {"LoRA": Run("--actor-lr 3e-3", minutes=3, patch="lora")}, ENDS),
    "second script": Row(
        "The script with continuous batching learns the default task",
        {"critic": Run(make="second_script", minutes=4,
                       typed="python ppo_llm_continuous_batching.py --eval-every 0 --seed SEED")}, ENDS, seeds=3),
    "families": Row(
        "Other families learn the default task", {
            name: Run(make="other_family", argument=kind, minutes=5, patch="any_model")
            for name, kind in {"Gemma 3": "gemma3_text", "mixture of experts": "qwen3_moe"}.items()
        }, ("after", "greedy_after"), seeds=3, files=("benchmarks/other_models.py",)),
    "cases": Row(
        "Case histories", {
            "healthy": DEFAULT,
            **{f"{name}: {run.label}": Run(run.flags) for name, case in CASES.items() if name != "healthy"
               for run in case.runs},
        }, ("first_approx_kl", "first_clipfrac", "samples_to_level", "reward_end", "accuracy_end", "kl_end",
            "truncated_end", "explained", "advantage_std"), seeds=2, statistic="range"),
    "resume": Row(
        "A run that was stopped and resumed is the uninterrupted run", {
            "SIGTERM": Run(make="resumed_beside_uninterrupted", argument=signal.SIGTERM, minutes=1.5),
            "SIGKILL": Run(make="resumed_beside_uninterrupted", argument=signal.SIGKILL, minutes=1.5),
        }, ("other_metrics", "other_responses", "other_weights"), seeds=1, unit="runs", statistic="worst",
        files=("benchmarks/ranks.py",)),
    "pages": Row(
        "Runs of three pages, made again", {
            name: Run(make="made_again", argument=name, minutes=minutes, patch=patch,
                      files=(f"benchmarks/{name}.py", f"benchmarks/data/{name}.jsonl"))
            for name, minutes, patch in (("course", 3, "group_normalised"), ("exercises", 8, ""),
                                         ("projects", 32, "group_normalised"))
        }, ("runs", "compared", "other_numbers"), seeds=1, statistic="worst"),
    "faults": Row(
        "Planted bugs that make a test fail",
        {"the list": Run(make="planted_faults", minutes=12, typed="python tests/plant_faults.py")},
        ("killed", "planted"), seeds=6, unit="parts", statistic="sum", files=TESTS),
    "ranks": Row(
        "Ranks have the numbers of one process", {
            "2 and 4": Run(make="ranks_beside_one", argument=(2, 4), minutes=2, typed="python benchmarks/ranks.py"),
            "8 and 16": Run(make="ranks_beside_one", argument=(8, 16), minutes=6,
                            typed="python benchmarks/ranks.py many"),
        }, ("metrics_differ_by", "weights_differ_by", "other_responses"), seeds=1, unit="runs", statistic="worst",
        alone=True, files=("benchmarks/ranks.py",)),
    "any model time": Row(
        "`any_model.patch` on a Qwen3, compared with the built-in one",
        {"default iteration": Run(make="time_of_any_model", argument="qwen3", minutes=2, patch="any_model")},
        ("ratio", "megabytes", "megabytes_built_in"), seeds=5, unit="pairs", statistic="median", alone=True,
        files=("benchmarks/other_models.py", "benchmarks/in_turn.py"),
        texts={"ratio": "CPU time per iteration, divided by that of the built-in one"}),
    "critic time": Row(
        "An iteration with a critic takes longer", {"default task": Run(make="time_of_critic", minutes=1.5)},
        ("ratio", "iteration_seconds"), unit="pairs", statistic="median", alone=True, files=("benchmarks/in_turn.py",),
        texts={"ratio": "CPU time per iteration, divided by that without a critic",
               "iteration_seconds": "CPU seconds per iteration, with a critic"}),
    "iteration": Row(
        "An iteration of SmolLM2-135M beside TRL's",
        {"16 samples": Run(make="iteration_beside_trl", minutes=11,
                           typed="python benchmarks/ppo_update.py real smollm2 1")},
        ("whole iteration_ratio", "updates_ratio", "rollout_ratio", "scoring_ratio", "compiled_ratio",
         "whole iteration_ours", "whole iteration_trl", "gigabytes_ours", "gigabytes_trl"),
        seeds=3, unit="pairs", statistic="median", alone=True, files=("benchmarks/ppo_update.py",)),
    "decode": Row(
        "Decoding of SmolLM2-135M compared with the best `generate` of transformers", {
            f"{n} row{'s' * (n > 1)}": Run(make="decode_beside_generate", argument=n, minutes=3,
                                           typed=f"python benchmarks/decode.py real smollm2 {n}")
            for n in (1, 8, 64)
        }, ("ratio", "tokens_per_second", "generate_per_second", "step_ms"), seeds=3, unit="runs", statistic="median",
        alone=True, files=("benchmarks/decode.py",),
        texts={"ratio": "tokens per second, divided by those of the best `generate`"}),
    "batching": Row(
        "Continuous batching, log-normal lengths",
        {"32 slots": Run(make="batching", minutes=3, typed="python benchmarks/rollout.py cpu log-normal")},
        ("over_waves", "over_transformers", "tokens_per_second", "steps", "steps_of_waves"), seeds=6, unit="pairs",
        statistic="median", alone=True, files=("benchmarks/rollout.py",)),
    "tests": Row(
        "Tests, on two cores", {
            "fast": Run(make="time_of_tests", argument=("-m", "pytest"), minutes=2, typed="python -m pytest"),
            "CI": Run(make="time_of_tests", argument=("bash", ".ci/run"), minutes=15, typed="bash .ci/run"),
        }, ("seconds", "passed", "failed"), seeds=1, unit="runs", statistic="worst", alone=True, files=TESTS),
    "preferences": Row(
        "PPO on a reward model of 300 pairs",
        {"KL weight 0.05": Run(make="preferences", minutes=75,
                               typed="python benchmarks/preferences.py ppo smollm2 300 0.05 SEED")},
        ("learned_first", "learned_end", "true_first", "true_end", "kl_end", "explained", "on_topic_before",
         "on_topic", "agreement"), seeds=3, extra=True, files=("benchmarks/preferences.py",),
        texts={"kl_end": "KL, last four iterations, nats per response",
               "explained": "explained variance, mean of the middle half of the iterations"}),
}  # fmt: skip
NUMBERS = {  # name: (what the table calls it, factor, digits after the point or a format)
    "before": ("right before training, sampled, %", 100, 1), "after": ("right after training, sampled, %", 100, 1),
    "greedy_before": ("right before training, greedy, %", 100, 1),
    "greedy_after": ("right after training, greedy, %", 100, 1),
    "samples": ("samples", 1, 0), "samples_to_90": ("samples until 90% of held-out answers are right", 1, 0),
    "samples_to_level": ("samples to the level", 1, 0), "reward_end": ("reward, last five iterations", 1, 3),
    "accuracy_end": ("right, last five iterations, %", 100, 1), "kl_end": ("KL at the end, nats per response", 1, 1),
    "truncated_end": ("cut off, last five iterations, %", 100, 1),
    "first_approx_kl": ("approx_kl of iteration 1", 1, 2), "first_clipfrac": ("clipfrac of iteration 1", 1, 2),
    "explained": ("explained variance, median over iterations", 1, 2),
    "advantage_std": ("standard deviation of the advantages, median over iterations", 1, 3),
    "reward_after": ("mean reward of the evaluation", 1, 3),
    "reward_by_number": ("mean reward, 64 episodes for each number", 1, 3),
    "iteration_seconds": ("seconds per iteration", 1, 2), "ratio": ("ratio", 1, 2),
    "other_metrics": ("metrics that differ", 1, 0), "other_responses": ("responses that differ", 1, 0),
    "other_weights": ("weights that differ", 1, 0), "runs": ("runs", 1, 0), "compared": ("numbers", 1, 0),
    "other_numbers": ("numbers that differ", 1, 0), "killed": ("caught", 1, 0), "planted": ("planted", 1, 0),
    "metrics_differ_by": ("largest difference of a metric", 1, ".1e"),
    "weights_differ_by": ("largest difference of a weight", 1, ".1e"),
    "whole iteration_ratio": ("TRL's time / ours, whole iteration", 1, 2),
    "updates_ratio": ("TRL's time / ours, updates", 1, 2), "rollout_ratio": ("TRL's time / ours, rollout", 1, 2),
    "scoring_ratio": ("TRL's time / ours, scoring", 1, 2),
    "compiled_ratio": ("TRL's time / ours with --compile on, whole iteration", 1, 2),
    "whole iteration_ours": ("seconds per iteration", 1, 1),
    "whole iteration_trl": ("seconds per iteration, TRL", 1, 1),
    "gigabytes_ours": ("peak memory, GB", 1, 2), "gigabytes_trl": ("peak memory, GB, TRL", 1, 2),
    "megabytes": ("peak memory, MB", 1, 0), "megabytes_built_in": ("peak memory of the built-in one, MB", 1, 0),
    "tokens_per_second": ("tokens per second", 1, 1),
    "generate_per_second": ("tokens per second, best `generate`", 1, 1),
    "step_ms": ("milliseconds per decode step", 1, 1), "steps": ("decode steps", 1, 0),
    "steps_of_waves": ("decode steps of waves", 1, 0), "over_waves": ("times as fast as waves", 1, 2),
    "over_transformers": ("times as fast as transformers' continuous batching", 1, 2), "seconds": ("seconds", 1, 0),
    "passed": ("tests passed", 1, 0), "failed": ("tests failed", 1, 0),
    "learned_first": ("learned reward, first four iterations", 1, 2),
    "learned_end": ("learned reward, last four iterations", 1, 2),
    "true_first": ("true reward, first four iterations", 1, 2), "true_end": ("true reward, last four iterations", 1, 2),
    "on_topic_before": ("answers with the last word of the prompt, before, %", 100, 0),
    "on_topic": ("answers with the last word of the prompt, after, %", 100, 0),
    "agreement": ("held-out pairs on which the reward model agrees, %", 100, 1),
}  # fmt: skip

NOTES = {  # what a reader of a row needs to know
    "sums": """
        All runs have 320 samples, the same prompts, and the same evaluations. `group` is four samples for each of 8
        prompts, with `group_normalised.patch`. `TRL` is TRL's `PPOTrainer`, which shuffles the samples of an iteration
        without a seed, so the same command gives other numbers each time. [A real
        checkpoint](real_checkpoint.md#smollm2-learns-sums) says more.
    """,
    "default": """
        Held-out prompts are evaluated every 5,120 samples. [Learning small tasks](learning.md#default-task) says more.
    """,
    "sort": """
        The level is reached when 90% of the answers in the rollouts are right, on average over five iterations.
        `constant` has no critic. `group` is four samples for each of 64 prompts. [The critic](critic.md#does-it-pay)
        says more.
    """,
    "prefix": """
        The level is reached when the reward of the rollouts is 0.5, on average over five iterations. [The
        critic](critic.md#does-it-pay) says more.
    """,
    "dense": """
        The answers are sequences of digits. The level is reached when 90% of the answers in the rollouts are right, on
        average over five iterations. [Dense rewards](learning.md#dense-rewards) says more.
    """,
    "undiscounted": """
        [Dense rewards](learning.md#dense-rewards) says more.
    """,
    "turns": """
        Binary search is optimal, and earns a mean reward of 0.675. [Several turns](learning.md#several-turns) says
        more.
    """,
    "cases": """
        [Case histories](../docs/cases.md) explains the runs. The word before the colon is the name of the case. The
        level is that 90% of the answers in the rollouts are right. An empty cell means that the level was not reached,
        or that there is no reference for the KL.
    """,
    "resume": """
        A run of 12 iterations was stopped by the signal after at least 8, and resumed. [Stop and
        resume](../docs/long_runs.md#stop-and-resume) says more.
    """,
    "pages": """
        Earlier commits made the runs of [the course](../docs/course.md), [the exercises](../docs/exercises.md) and [the
        projects](../docs/projects.md). Here the runs with seed 1 that the pages then had are made again, on the
        processor of the first time. The row "numbers" counts the numbers and texts in the data file of the page. On an
        AMD EPYC of another kind (family 25, model 1), which rounds otherwise, 1,321 numbers of the course differed.
    """,
    "faults": """
        The list is run in six parts, so that the run can be interrupted. [Planted
        bugs](../docs/verification.md#planted-bugs) says what this shows, and what it does not.
    """,
    "ranks": """
        The table has the runs in which all ranks hold all models, without activation checkpointing. The commands make
        further runs. [The same numbers](ranks_and_scale.md#the-same-numbers-on-any-number-of-ranks) says more.
    """,
    "any model time": """
        [What it costs](../docs/other_models.md#what-it-costs) says more.
    """,
    "iteration": """
        A quotient above 1 means that this script is faster. [Whole iteration](speed.md#whole-iteration-against-trl)
        says what is compared.
    """,
    "decode": """
        The script runs without `--compile on`. A quotient below 1 means that it is slower. The rows are those of a
        batch. [Decoding](speed.md#decoding) says more.
    """,
    "batching": """
        [Continuous batching](speed.md#continuous-batching) says what is compared.
    """,
    "preferences": """
        [From preferences to PPO](preferences.md) says more.
    """,
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a row: what it is, where it is made."""

    row: str
    variant: str
    seed: int
    model_dir: str = "smollm2"
    smoke: bool = False
    own_folder: str = ""  # of its files, instead of the usual one

    @property
    def run(self) -> Run:
        return ROWS[self.row].variants[self.variant]

    @property
    def flags(self) -> str:
        return self.run.flags + " --num-iterations 2 --eval-episodes 4" * self.smoke  # the last of two flags counts

    @property
    def command(self) -> str:
        return self.run.command(self.row, self.variant, self.seed)

    @property
    def code(self) -> str:
        return code_of(self.run, ROWS[self.row].files + self.run.files)

    @property
    def folder(self) -> Path:
        if self.own_folder:
            return Path(self.own_folder)
        name = re.sub(r"\W+", "_", f"{self.row} {self.variant} {self.seed}{' smoke' * self.smoke}")
        return ROOT / "runs" / "table" / self.code / name


# --- What is measured: functions of a job that return its numbers.


def train(job: Job, flags: str, name: str = "run", script: str = SCRIPTS[0]) -> Path:
    """Run the script, patched if the run says so. Returns the folder of its run, without weights."""
    script = common.patched_script(job.run.patch) if job.run.patch else ROOT / script
    flags = [job.model_dir if flag == "smollm2" else flag for flag in shlex.split(flags)]
    return common.run_script(script, [*flags, "--seed", str(job.seed), "--device", "cpu"], job.folder, name)


def script_numbers(job: Job) -> dict:
    return numbers_of(train(job, job.flags), job.row)


def second_script(job: Job) -> dict:
    return numbers_of(train(job, job.flags, script=SCRIPTS[1]), job.row)


def numbers_of(folder: Path, row: str) -> dict:
    """Evaluations of a finished run, and means of the last five iterations, as ppo_llm.py wrote them."""
    import critic_pays

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "completed", summary["status"]
    args = json.loads((folder / "config.json").read_text())["args"]
    samples, rows = args["rollout_batch_size"] * args["n_samples_per_prompt"], common.read_lines(folder / METRICS)
    before, after = summary["eval_before"], summary["eval_after"]
    points = [(row["iteration"] * samples, row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
    points.append((len(rows) * samples, after["accuracy"]))
    columns = {name: [row.get(name) for row in rows] for name in ("objective/accuracy", "objective/reward")}
    level = critic_pays.reached({"task": row if row in critic_pays.LEVELS else "sort"} | columns)

    def end(name: str) -> float | None:
        values = [row[name] for row in rows[-5:] if name in row]
        return statistics.mean(values) if values else None

    return {
        "before": before["accuracy"], "greedy_before": before["greedy_accuracy"],
        "after": after["accuracy"], "greedy_after": after["greedy_accuracy"], "reward_after": after["reward"],
        "samples": len(rows) * samples,
        "samples_to_90": next((n for n, accuracy in points if accuracy >= 0.9), None) if args["eval_every"] else None,
        "samples_to_level": level and level * samples,
        "reward_end": end("objective/reward"), "accuracy_end": end("objective/accuracy"), "kl_end": end("objective/kl"),
        "entropy_end": end("objective/entropy"), "truncated_end": end("objective/truncated"),
        "first_approx_kl": rows[0].get("actor/approx_kl"), "first_clipfrac": rows[0].get("actor/clipfrac"),
        "explained": statistics.median(row.get("critic/explained_variance", 0.0) for row in rows),
        "advantage_std": statistics.median(row.get("ratio/advantage_std", 0.0) for row in rows),
        "iteration_seconds": statistics.median(row["time/iteration"] for row in rows),
    }  # fmt: skip


def sums_with_trl(job: Job) -> dict:
    """The example of the README with TRL's loop: the same prompts, samples, settings and evaluations."""
    import learning_real

    flags = learning_real.TASKS["sums, short"]
    if job.smoke:
        flags = flags | dict(num_iterations=2, eval_episodes=4, rollout_batch_size=4, train_batch_size=2)
    evaluation = learning_real.Evaluation(job.model_dir, flags, job.seed)
    rows = learning_real.trl(job.model_dir, flags, job.seed, evaluation)["rows"]
    before, after = evaluation.points
    return {
        "before": before["accuracy"], "greedy_before": before["greedy_accuracy"],
        "after": after["accuracy"], "greedy_after": after["greedy_accuracy"], "samples": evaluation.total,
        "iteration_seconds": statistics.median(row["time/iteration"] for row in rows),
    }  # fmt: skip


def guess_number(job: Job) -> dict:
    """A run of the script, and the mean reward of 64 sampled episodes for each of the eight numbers."""
    import tasks

    folder = train(job, job.flags)
    model, _ = common.ppo_llm.load_hf_checkpoint(folder / "model")
    tokenizer = common.ppo_llm.HFTokenizer(folder / "model")
    seeds, env = {number: [] for number in range(8)}, tasks.Guess()
    for seed in range(10_000):
        env.reset(seed=seed)
        seeds[env.number].append(seed)
    seeds = [seed for of_number in seeds.values() for seed in of_number[:64]]
    args = common.ppo_llm.Args(max_prompt_tokens=16, max_new_tokens=24, seed=job.seed)
    decoder = common.ppo_llm.Decoder(model, len(seeds), tokenizer.stop_ids, args)
    envs = [common.gym.make("Guess-v0", disable_env_checker=True) for _ in seeds]
    episodes = common.ppo_llm.rollout_share(decoder, tokenizer, envs, seeds, range(len(seeds)), -1, args)
    reward = statistics.mean(sum(episode.rewards) for episode in episodes)
    return numbers_of(folder, job.row) | {"reward_by_number": reward}


def preferences(job: Job) -> dict:
    """PPO on a reward model of 300 pairs. The first run of a version makes the pairs and the reward model."""
    import preferences

    folder = preferences.FOLDER = job.folder.parent / f"preferences{'_smoke' * job.smoke}"
    folder.mkdir(parents=True, exist_ok=True)
    if job.smoke:
        preferences.PASSES = preferences.HELD_OUT_PASSES = 1
        preferences.FLAGS |= dict(num_iterations=4, eval_episodes=4)
    pairs = 16 if job.smoke else 300
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / f"rm_{pairs}" / "agreement.json").exists():
            preferences.make_pairs(job.model_dir)
            preferences.make_reward_model(job.model_dir, pairs)
    run = preferences.ppo(job.model_dir, pairs, 0.05, job.seed)
    kl, true, learned = preferences.reward_curves(run).values()
    seen = preferences.look_at(folder / f"{pairs}_0.05_{job.seed}" / "model")
    before = preferences.look_at(Path(job.model_dir))
    return {
        "agreement": json.loads((folder / f"rm_{pairs}" / "agreement.json").read_text())["agreement"],
        "kl_end": kl[-1], "learned_first": learned[0], "learned_end": learned[-1], "true_first": true[0],
        "true_end": true[-1], "explained": preferences.explained_variance(run),
        "on_topic_before": before["on_topic"], "on_topic": seen["on_topic"],
    }  # fmt: skip


def other_family(job: Job) -> dict:
    """A tiny random model of another family on the default task."""
    with tempfile.TemporaryDirectory() as folder:
        return numbers_of(train(job, shlex.join([*flags_of_family(job, folder), *shlex.split(job.flags)])), job.row)


def flags_of_family(job: Job, folder: str) -> list[str]:
    """Writes the model into the folder, in a process of its own: two threads would share the random numbers."""
    command = [sys.executable, "benchmarks/other_models.py", "make", job.run.argument, folder, "--seed", str(job.seed)]
    subprocess.run(command, check=True, stdout=sys.stderr, cwd=ROOT)
    # The defaults of a run without --model.
    defaults = "--max-prompt-tokens 16 --max-new-tokens 8 --actor-lr 5e-4 --sft-steps 150"
    return [*shlex.split(defaults), "--model", folder]


def time_of_any_model(job: Job) -> dict:
    """CPU seconds of an iteration, and the peak memory, of a tiny Qwen3 of transformers and of the built-in one."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags_of_family(job, folder), "--sft-steps", "0"]
        scripts = {"built-in": ROOT / SCRIPTS[0], "patch": common.patched_script(job.run.patch)}
        sides = {name: (script, flags) for name, script in scripts.items()}
        built_in, patch = in_turn.compare(sides, 2 if job.smoke else 30).values()
    return {"ratio": patch["ratio"], "seconds_built_in": built_in["seconds"], "megabytes": patch["megabytes"],
            "megabytes_built_in": built_in["megabytes"]}  # fmt: skip


def time_of_critic(job: Job) -> dict:
    """CPU seconds of an iteration of the default task, with a critic and without."""
    flags = {"constant": ["--critic-epochs", "0"], "critic": []}
    sides = {name: (ROOT / SCRIPTS[0], [*mine, "--seed", str(job.seed)]) for name, mine in flags.items()}
    constant, critic = in_turn.compare(sides, 2 if job.smoke else 30).values()
    return {"ratio": critic["ratio"], "iteration_seconds": critic["seconds"], "seconds_without": constant["seconds"]}


def iteration_beside_trl(job: Job) -> dict:
    import ppo_update

    settings = ppo_update.REAL | (dict(samples=4, mean=4, longest=8) if job.smoke else {})
    runs = ppo_update.pair(ppo_update.real_settings(job.model_dir, **settings))
    ours, compiled, theirs = (runs[side] for side in ppo_update.SIDES)
    numbers = {f"{phase}_ratio": theirs[phase] / ours[phase] for phase in ppo_update.PHASES}
    numbers["compiled_ratio"] = theirs["whole iteration"] / compiled["whole iteration"]
    for name, side in ("ours", ours), ("trl", theirs):
        numbers |= {f"{phase}_{name}": side[phase] for phase in ppo_update.PHASES}
        numbers[f"gigabytes_{name}"] = side["bytes"] / 1e9
    return numbers


def decode_beside_generate(job: Job) -> dict:
    """Tokens per second without torch.compile, and of the fastest of three ways of `generate`."""
    import decode

    torch.set_num_threads(1)
    rows = job.run.argument
    sides = decode.Sides(job.model_dir, torch.float32, common.sums(rows), 4 if job.smoke else decode.REAL["new"])
    del sides.runs["ours, --compile on"]
    same = sides.same_tokens()  # compiles
    # With more rows a run is longer. Of single short runs the luckiest of the three peers would be the fastest.
    seconds, steps = sides.measure(pairs=1 if job.smoke or rows > 8 else 3)
    ours, medians = seconds.pop("ours"), {name: statistics.median(taken) for name, taken in seconds.items()}
    best = min(medians, key=medians.get)
    return {
        "ratio": statistics.median(a / b for a, b in zip(seconds[best], ours, strict=True)), "best": best,
        "tokens_per_second": rows * sides.new / statistics.median(ours),
        "generate_per_second": rows * sides.new / medians[best],
        "step_ms": 1000 * statistics.median(steps["ours"]), "same_tokens": min(same.values()),
    }  # fmt: skip


def batching(job: Job) -> dict:
    """A rollout of log-normal lengths in waves, by continuous batching, and by transformers' continuous batching."""
    import logging

    import rollout

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    settings = rollout.SMOKE if job.smoke else rollout.CPU
    bench, (slots, waves) = rollout.Bench(**settings), settings["runs"][0]
    lengths = common.forced_lengths("log-normal", slots * waves, settings["mean"], settings["longest"])
    warm = common.forced_lengths("uniform", slots, 4, 8)
    for attention in rollout.PAGED:
        bench.run_peer(attention, warm, slots)
    bench.run_both(warm, slots)
    runs = bench.run_both(lengths, slots)
    peer = bench.run_best_peer(rollout.PAGED, lengths, slots)
    mine = runs["continuous"]["seconds"]
    return {
        "over_waves": runs["waves"]["seconds"] / mine, "over_transformers": peer["seconds"] / mine,
        "tokens_per_second": sum(lengths) / mine, "steps": runs["continuous"]["steps"],
        "steps_of_waves": runs["waves"]["steps"],
    }  # fmt: skip


def ranks_beside_one(job: Job) -> dict:
    import ranks

    several = {f"{n} ranks": (n, "") for n in job.run.argument}
    made = list(ranks.distances({"1 process": (0, "")} | several, ranks.FLAGS))[1:]
    _, same, responses, metrics, _, weights, *_ = zip(*made)
    return {"metrics_differ_by": max(metrics), "weights_differ_by": max(weights),
            "other_responses": sum(responses) - sum(same)}  # fmt: skip


def resumed_beside_uninterrupted(job: Job) -> dict:
    """How many numbers differ after a signal stopped a run in iteration 8 of 12 and the run was resumed."""
    import ranks

    flags = "--num-iterations 12 --save-every 5 --eval-episodes 64"
    whole = train(job, flags, "whole")
    name, number = "resumed", job.run.argument
    command = [sys.executable, str(ROOT / SCRIPTS[0]), *shlex.split(flags), "--seed", str(job.seed), "--device", "cpu",
               "--log-dir", str(job.folder), "--run-name", name, "--resume", "auto"]  # fmt: skip
    child = subprocess.Popen(command, stdout=sys.stderr)
    metrics = job.folder / name / METRICS
    while child.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) >= 8):
        time.sleep(0.05)
    child.send_signal(number)
    assert child.wait() != 0, "the run ended before it was stopped"
    stopped = len(metrics.read_text().splitlines())
    assert stopped < 12, stopped
    subprocess.run(command, check=True, stdout=sys.stderr)
    one, other = (ranks.results(folder) for folder in (whole, job.folder / name))
    return {
        "stopped_after": stopped,
        "other_metrics": sum(one[0].get(name) != other[0].get(name) for name in one[0].keys() | other[0].keys()),
        "other_responses": sum(a != b for a, b in zip(one[1], other[1], strict=True)),
        "other_weights": sum(int((one[2][name] != other[2][name]).sum()) for name in one[2]),
    }


def made_again(job: Job) -> dict:
    """The runs of a page with this seed, made again: how many results differ from those in the page's data file."""
    page = importlib.import_module(job.run.argument)
    wanted = {key: key for key in page.results() if key[-1] == job.seed}
    if job.run.argument == "projects":
        wanted = {run.key(job.seed): (run, job.seed) for name in page.PROJECTS for run in page.runs(name)}
    make = page.measure if job.run.argument == "projects" else page.execute
    compared, others = 0, []
    for key, arguments in list(wanted.items())[: 1 if job.smoke else None]:
        old, new = (leaves(line) for line in (page.results()[key], json.loads(json.dumps(make(*arguments)))))
        names = [name for name in old | new if name[0] not in ("seconds", "project", "variant")]
        differ = [name for name in names if old.get(name) != new.get(name)]
        compared += len(names)
        others += differ
        print(*key, f"{len(differ)} of {len(names)} results differ", differ[:3], file=sys.stderr, flush=True)
    return {"runs": len(wanted), "compared": compared, "other_numbers": len(others)}


def leaves(value, name: tuple = ()) -> dict[tuple, object]:
    """Numbers and texts in nested lists and dictionaries, by their places."""
    if not isinstance(value, list | dict):
        return {name: str(value)}  # a nan is itself
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return {place: leaf for key, part in pairs for place, leaf in leaves(part, (*name, key)).items()}


def planted_faults(job: Job) -> dict:
    """A part of the faults, every PARTS-th."""
    sys.path.append(str(ROOT / "tests"))
    import plant_faults

    names = list(plant_faults.read_faults())[job.seed - 1 :: ROWS[job.row].seeds]
    command = [sys.executable, "tests/plant_faults.py", *(names[:2] if job.smoke else names)]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout.splitlines()
    killed, planted = map(int, re.match(r"(\d+) of (\d+) killed", lines[-1]).groups())
    return {"killed": killed, "planted": planted, "others": [line for line in lines[:-1] if line[:6] != "killed"]}


def time_of_tests(job: Job) -> dict:
    """Seconds of a command, and how many tests passed and failed in it."""
    start = time.perf_counter()
    command = ["-m", "pytest", "--co"] if job.smoke else job.run.argument
    command = [sys.executable, *command] if command[0] == "-m" else command
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, cwd=ROOT)
    print(run.stdout, file=sys.stderr)
    counts = {name: sum(map(int, re.findall(rf"(\d+) {name}", run.stdout))) for name in ("passed", "failed")}
    if run.returncode and not counts["failed"]:
        raise RuntimeError(f"{' '.join(command)} ended with code {run.returncode}, but no test failed")
    return {"seconds": time.perf_counter() - start, "exit_code": run.returncode} | counts


# --- Code, lines, and which of them count.


@functools.cache
def tree(text: str) -> str:
    """The syntax tree of Python code, without docstrings and the texts of errors. Comments are not in it either.

    It is the same in Python 3.11 to 3.14: later versions leave out empty lists, and have type parameters.
    """
    parsed = ast.parse(text)
    for node in ast.walk(parsed):
        if not getattr(node, "type_params", True):
            del node.type_params
        if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Error"):
            node.args = []
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:]
    return ast.dump(parsed, **({"show_empty": True} if sys.version_info >= (3, 13) else {}))


@functools.cache
def patched_text(script: str, patch: str) -> str:
    """The text of ppo_llm.py after a patch."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, SCRIPTS[0])
        path.write_text(script)
        common.git_apply("-", path.parent, patch)
        return path.read_text()


def code_of(run: Run, files: tuple[str, ...] = (), root: Path = ROOT) -> str:
    """A hash of all code that decides what a run gives."""
    files += ("benchmarks/tasks.py",) * ("benchmarks.tasks" in run.flags)
    paths = [*SCRIPTS, *(path.relative_to(root) for name in files for path in sorted(root.glob(name)))]
    texts = [(path, (root / path).read_text()) for path in map(str, paths)]
    if run.patch:
        patch = (root / "forks" / f"{run.patch}.patch").read_text()
        texts.append((f"{run.patch}.py", patched_text(texts[0][1], patch)))
    parts = [path + (tree(text) if path.endswith(".py") else text) for path, text in texts]
    sources = [inspect.getsource(globals()[run.make])]
    if "numbers_of(" in sources[0]:
        import critic_pays

        sources += [inspect.getsource(numbers_of), inspect.getsource(critic_pays.reached), repr(critic_pays.LEVELS)]
    parts += map(tree, sources)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]


def read_table() -> list[dict]:
    return common.read_lines(DATA) if DATA.exists() else []


def add_line(line: dict) -> None:
    """Add the line of a run to the data, and write the page anew."""
    common.add_line(DATA, line)
    PAGE.write_text(page())


def jobs_of(names: list[str], seeds: list[int] | None = None, **settings) -> list[Job]:
    """The runs of these rows in the order of seeds, so that an interrupted row has all of its variants."""
    return [Job(name, variant, seed, **settings) for name in names for seed in range(1, ROWS[name].seeds + 1)
            for variant in ROWS[name].variants if seeds is None or seed in seeds]  # fmt: skip


def finished(job: Job, lines: list[dict]) -> dict | None:
    """The line of a run that need not be made. Rows share the runs of the same command."""
    key = (job.command, job.seed, job.code)
    return next((line for line in lines if (line["command"], line["seed"], line["code"]) == key), None)


def outdated(job: Job, lines: list[dict]) -> bool:
    """Whether there is a line of this run, but of another code or command."""
    names = (job.row, job.variant, job.seed)
    return bool(last_line(job, lines)) or any((x["row"], x["variant"], x["seed"]) == names for x in lines)


def stale(names: list[str]) -> None:
    lines = read_table()
    for name in names:
        count, old, missing = 0, [], []
        for job in jobs_of([name]):
            if finished(job, lines):
                count += 1
            else:
                (old if outdated(job, lines) else missing).append(f"{job.variant} {job.seed}")
        print(f"{name}: {count} of {count + len(old) + len(missing)} runs count")
        for text, runs in ("of another code", old), ("missing", missing):
            if runs:
                print(f"  {text}: {', '.join(runs)}")


# --- Making runs.


def make_run(job: Job) -> dict:
    """Numbers of a run, made in this process and its children. What it writes stays in the folder of the job."""
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    numbers = globals()[job.run.make](job)
    for part in ("model", "critic", "checkpoints"):  # weights
        for path in job.folder.glob(f"*/{part}"):
            shutil.rmtree(path)
    return {name: float(f"{x:.5g}") if isinstance(x, float) else x for name, x in numbers.items()}


def make_line(job: Job) -> dict:
    """Make a run in a process of its own. Returns its line for the data file."""
    alone, code = ROWS[job.row].alone, job.code
    busy, start = busy_cores(0 if job.smoke else PATIENCE) if alone else None, time.perf_counter()
    command = [sys.executable, "-W", "ignore", __file__, "run", job.row, job.variant, str(job.seed)]
    command += ["--model-dir", job.model_dir, "--folder", str(job.folder), *["--smoke"] * job.smoke]
    log = job.folder.parent / f"{job.folder.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError("another process makes this run") from None
        with log.open("w") as errors:
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            run = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
    if run.returncode:
        tail = "\n".join(log.read_text().splitlines()[-15:])
        raise RuntimeError(f"exit code {run.returncode}, see {log}\n{tail}")
    if job.code != code:
        raise RuntimeError("the code changed while this run was made, so it does not count")
    line = {
        "row": job.row, "variant": job.variant, "seed": job.seed, "numbers": json.loads(run.stdout.splitlines()[-1]),
        "command": job.command, "code": code, "commit": common.commit(), "versions": versions(),
        "processor": common.hardware().split("; ")[0], "seconds": round(time.perf_counter() - start),
    }  # fmt: skip
    line |= {} if busy is None else {"busy_cores": busy}
    if (job.folder / "run" / METRICS).exists():
        line["fingerprints"] = fingerprints(job.folder / "run")[:COMPARED_ITERATIONS]
    if not job.smoke:
        (job.folder / "line.json").write_text(json.dumps(line))
    return line


def versions() -> str:
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers")]
    try:
        packages.append(f"trl {importlib.metadata.version('trl')}")
    except importlib.metadata.PackageNotFoundError:
        pass
    return ", ".join([*packages, f"Python {platform.python_version()}"])


def busy_cores(patience: float) -> float:
    """Waits until other processes leave the processor idle. Returns how many cores they use at last."""
    import psutil

    busy = lambda: round(psutil.cpu_percent(interval=3) / 100 * psutil.cpu_count(), 2)
    start, now = time.monotonic(), busy()
    while now > IDLE and time.monotonic() - start < patience:
        print(f"  {now} cores are busy; a run that measures time waits", flush=True)
        time.sleep(20)
        now = busy()
    return now


def make_all(jobs: list[Job], workers: int) -> bool:
    """Make the runs that are missing, those of rows that measure time one at a time. True if none failed."""
    lines, wanted = read_table(), {}
    for job in jobs:
        if job.smoke or not finished(job, lines):
            wanted.setdefault((job.command, job.seed), job)  # rows share runs
    beside, alone = ([job for job in wanted.values() if ROWS[job.row].alone == kind] for kind in (False, True))
    print(f"{len(jobs)} runs, {len(jobs) - len(wanted)} of them are there. {len(wanted)} are made, "
          f"{hours(beside, workers) + hours(alone):.1f} hours on quiet cores.", flush=True)  # fmt: skip
    done, failed = 0, []
    for part, at_a_time in (beside, workers), (alone, 1):
        with concurrent.futures.ThreadPoolExecutor(at_a_time) as pool:
            futures = {pool.submit(make_line, job): job for job in part}
            try:
                for future in concurrent.futures.as_completed(futures):
                    job, done = futures[future], done + 1
                    where = f"[{done}/{len(wanted)}] {job.row}, {job.variant}, {job.seed}"
                    if future.exception():
                        failed.append(job)
                        print(f"{where}: FAILED\n{future.exception()}", flush=True)
                        continue
                    line = future.result()
                    if not job.smoke:
                        add_line(line)
                    print(f"{where}: {line['seconds']} s; {json.dumps(line['numbers'])}", flush=True)
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)
                raise
    if failed:
        print(f"{len(failed)} runs failed: {', '.join(f'{job.row}, {job.variant}, {job.seed}' for job in failed)}")
    return not failed


def hours(jobs: list[Job], workers: int = 1) -> float:
    return sum(job.run.minutes for job in jobs) / 60 / workers


# --- Carrying lines over: are the first iterations the same, to the last bit?

COMPARED_ITERATIONS = 4  # or fewer, if the whole run takes more than ten minutes


def training(job: Job, folder: Path) -> tuple[str, list[str], int]:
    """(script, flags, ranks) of a training whose first iterations stand for the run."""
    flags = [job.model_dir if flag == "smollm2" else flag for flag in shlex.split(job.flags)]
    match job.run.make:
        case "script_numbers" | "guess_number":
            return SCRIPTS[0], flags, 0
        case "second_script":
            return SCRIPTS[1], flags, 0
        case "other_family":
            return SCRIPTS[0], [*flags_of_family(job, str(folder / "family")), *flags], 0
        case "resumed_beside_uninterrupted":
            return SCRIPTS[0], ["--num-iterations", "12", "--eval-episodes", "64"], 0
        case "ranks_beside_one":
            import ranks

            return SCRIPTS[0], ranks.FLAGS, 2
    raise ValueError(job.run.make)


def first_iterations(job: Job, root: Path, resumed: bool) -> list[str]:
    """Fingerprints of the first iterations, by the code of `root`. The run is stopped then.

    resumed: it is stopped once before, by a signal that lets it save a checkpoint, and resumed. Runs of several ranks
    and those of short_runs.py are not.
    """
    is_long = job.run.minutes > 10
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root / 'benchmarks'}:{root}"}
    kinds = {"sums_with_trl": "trl", "preferences": "preferences", "made_again": "page"}
    if job.run.make in kinds:
        what = job.run.argument or job.model_dir
        command = [sys.executable, "-W", "ignore", "-P", short_runs.__file__, kinds[job.run.make], what]
        count = 2 if is_long else COMPARED_ITERATIONS
        run = subprocess.run([*command, str(job.seed), str(count)], env=env, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"exit code {run.returncode}\n{run.stderr[-2000:]}")
        return json.loads(run.stdout.splitlines()[-1])
    with tempfile.TemporaryDirectory() as work:
        name, flags, ranks = training(job, Path(work))
        script = root / name
        if job.run.patch:
            script = Path(work, name)
            script.write_text(patched_text((root / name).read_text(),
                                           (root / "forks" / f"{job.run.patch}.patch").read_text()))  # fmt: skip
        start = [sys.executable, "-W", "ignore"]
        if ranks:
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*start, str(script), *flags, *short_runs.SHORTER, "--seed", str(job.seed), "--device", "cpu",
                   "--log-dir", work, "--run-name", "run", *["--resume", "auto"] * resumed]  # fmt: skip
        # The first signal comes when one iteration is written, and takes effect at the end of the next one.
        count = 3 if is_long else COMPARED_ITERATIONS
        stops = [(1, signal.SIGTERM)] * (resumed and not ranks) + [(count, signal.SIGKILL)]
        run_until(command, Path(work, "run"), stops, env=env)
        return fingerprints(Path(work, "run"))[:count]


@contextlib.contextmanager
def checkouts():
    """A function that gives the folder of a commit: a worktree that exists as long as the context."""
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as stack:

        def checkout(commit: str) -> Path:
            folder = Path(work, commit)
            git = lambda *arguments: subprocess.run(["git", "worktree", *arguments], cwd=ROOT, check=True,
                                                    capture_output=True)  # fmt: skip
            with lock:
                if not folder.exists():
                    git("add", "--detach", str(folder), commit)
                    stack.callback(git, "remove", "--force", str(folder))
            return folder

        yield checkout


def carry(names: list[str], workers: int, model_dir: str) -> bool:
    """Carry over the lines of all runs whose first iterations are what they were. True if all could be."""
    lines, wanted, complete = read_table(), {}, True
    for job in jobs_of(names, seeds=[1], model_dir=model_dir):
        old = last_line(job, lines)
        if ROWS[job.row].alone and job.row != "ranks":
            continue
        if old is None or old["code"] == job.code or old["commit"].endswith("+"):
            of_seeds = [dataclasses.replace(job, seed=seed) for seed in range(1, ROWS[job.row].seeds + 1)]
            if others := [each.seed for each in of_seeds if not finished(each, lines) and last_line(each, lines)]:
                print(f"{job.row}, {job.variant}: seed 1 has no line of an earlier commit to compare with, so "
                      f"these seeds must be made again: {others}")  # fmt: skip
                complete = False
            continue
        if job.run.make == "planted_faults":
            print(f"{job.row}, {job.variant}: has no first iterations to compare, so it must be made again")
            complete = False
            continue
        wanted.setdefault(job.command, (job, old))  # rows share runs
    print(f"The first iterations of {len(wanted)} runs are compared.", flush=True)

    def both(job: Job, old: dict) -> tuple[list[str], int, int | None]:
        """The fingerprints of the present code, how many were compared, and which is the first that differs."""
        before, now = old.get("fingerprints"), first_iterations(job, ROOT, resumed=True)
        if not before or first_difference(now, before) is not None:
            before = first_iterations(job, checkout(old["commit"]), resumed=False)
        return now, len(by_name(now).keys() & by_name(before)), first_difference(now, before)

    with checkouts() as checkout, concurrent.futures.ThreadPoolExecutor(workers) as pool:
        longest_first = sorted(wanted.values(), key=lambda pair: pair[0].run.minutes, reverse=True)
        futures = {pool.submit(both, *pair): pair for pair in longest_first}
        for future in concurrent.futures.as_completed(futures):
            job, old = futures[future]
            if future.exception():
                print(f"{job.row}, {job.variant}: FAILED\n{future.exception()}", flush=True)
                complete = False
                continue
            now, count, differ = future.result()
            if differ is not None:
                what = now[differ].split()[0] if " " in now[differ] else f"iteration {differ + 1}"
                print(f"{job.row}, {job.variant}: {what} differs from that of {old['commit']}, so its "
                      "runs must be made again", flush=True)  # fmt: skip
                complete = False
                continue
            print(f"{job.row}, {job.variant}: {count} iterations are those of {old['commit']}", flush=True)
            most = max(row.seeds for row in ROWS.values())
            of_seeds = [dataclasses.replace(job, seed=seed + 1) for seed in range(most)]
            for line in filter(None, (last_line(each, lines) for each in of_seeds)):
                if line["code"] == job.code:
                    continue
                if line["code"] == old["code"] and not line["commit"].endswith("+"):
                    more = {"code": job.code, "carried_from": old["code"], "carried_to": common.commit()}
                    add_line(line | more | ({"fingerprints": now} if line["seed"] == 1 else {}))
                else:
                    print(f"{job.row}, {job.variant}, {line['seed']}: its line is of other code than that of seed 1")
                    complete = False
    return complete


# --- The table.


def formatted(x: float, form: int | str) -> str:
    text = f"{x:,.{form}f}" if isinstance(form, int) else f"{x:{form}}"
    return text if re.search("[1-9]", text) else text.removeprefix("-")


def summarized(values: list[float], statistic: str, form: int | str) -> str:
    """What a cell says of these runs. ABOUT explains it."""
    if statistic == "sum":
        return formatted(sum(values), form)
    low, high = formatted(min(values), form), formatted(max(values), form)
    if statistic == "worst" or low == high:
        return high
    if statistic == "range":
        return f"{low} to {high}"
    if statistic == "median":
        return f"{formatted(statistics.median(values), form)} ({low} to {high})"
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{formatted(statistics.mean(values), form)} ± {formatted(error, form)} ({low} to {high})"


ABOUT = """# The reproducible runs

<!-- Written by benchmarks/table.py from data/table.jsonl. -->

This page has the results that one command makes on two CPU cores. The command also writes the page:

    python benchmarks/table.py --model-dir DIR

`DIR` is the folder that `python benchmarks/checkpoints.py smollm2 DIR` writes. The command can be interrupted and
repeated. Each run is a line of [data/table.jsonl](data/table.jsonl). `python benchmarks/table.py stale` lists the runs
that were made with code other than that of your checkout. [Every claim](README.md#every-claim) adds the results of
other commands.

A cell has the mean over the seeds, its standard error after "±", and the smallest and the largest number in
parentheses. A cell without "±" has the median of several runs in place of the mean. Two seeds have their range alone.
A number that is the same in all runs stands alone. The commands are those of seed 1. The runs of a row may come from
several commits. "Carried to" names the commit with whose code the first iterations of seed 1 were made again, and were
the same to the last bit. Runs of the script in one process were also stopped and resumed in between.
"""


def described(row: Row, number: str) -> tuple[str, float, int | str]:
    """What the row calls a number, its factor and its format."""
    text, factor, form = NUMBERS[number]
    return row.texts.get(number, text), factor, form


def compared(row: Row, variant: str, lines: dict[str, dict[int, dict]]) -> Iterator[tuple[str, str]]:
    """Pairs (name, cell): each comparison of this variant with another one, seed by seed."""
    for other, number, kind in row.against:
        text, factor, form = described(row, number)
        seeds = [seed for seed in lines[variant] if seed in lines.get(other, {})]
        pairs = [[lines[which][seed]["numbers"].get(number) for which in (variant, other)] for seed in seeds]
        values = [a / b if kind == "quotient" else factor * (a - b) for a, b in pairs if None not in (a, b)]
        if variant != other and values:
            name = f"{text}: {'divided by' if kind == 'quotient' else 'minus'} {other}, same seed"
            yield name, summarized(values, "mean", 2 if kind == "quotient" else form)


def section(name: str, lines: list[dict], find) -> str:
    """A row of the table as a section of the page; empty if `find` has no line for any of its runs."""
    row, of = ROWS[name], {}  # variant: seed: line
    for job in jobs_of([name]):
        if line := find(job, lines):
            of.setdefault(job.variant, {})[job.seed] = line
    table = {}  # what a number is called: variant: cell
    for variant, runs in of.items():
        for number in row.shown:
            text, factor, form = described(row, number)
            values = [x for line in runs.values() if (x := line["numbers"].get(number)) is not None]
            if values:
                cell = summarized([factor * x for x in values], row.statistic, form)
                missing = len(runs) - len(values)
                table.setdefault(text, {})[variant] = cell + f" (not reached: {missing})" * bool(missing)
        for text, cell in compared(row, variant, of):
            table.setdefault(text, {})[variant] = cell
    if not table:
        return ""
    unit = row.unit if row.seeds > 1 else row.unit.removesuffix("s")
    count = lambda n: f"{n} {unit}" if n == row.seeds else f"{n} of {row.seeds} {unit}"
    cells = [["", *table], *([f"{variant}, {count(len(runs))}", *(table[text].get(variant, "") for text in table)]
                             for variant, runs in of.items())]  # fmt: skip
    if len(of) <= 4:  # else a variant is a line of the table
        cells = list(zip(*cells))
    lines_of_table = [f"| {' | '.join(line)} |" for line in cells]
    lines_of_table.insert(1, "|---" * len(cells[0]) + "|")
    made = [line for runs in of.values() for line in runs.values()]
    loud = sum(line.get("busy_cores", 0) > IDLE for line in made)
    comment = {variant: f"  # {variant}" * (len(row.variants) > 1) for variant in of}
    commands = [f"    {row.variants[variant].command(name, variant, 1)}{comment[variant]}" for variant in of]
    names = sorted({line["commit"] for line in made})
    commits = f"Commit{'s' * (len(names) > 1)}: {', '.join(names)}."
    carried = sorted({line["carried_to"] for line in made if "carried_to" in line})
    commits += f" Carried to {', '.join(carried)}." * bool(carried)
    commits += f" The processor was not idle in {loud} of {len(made)} runs." * bool(loud)
    note = textwrap.fill(" ".join(NOTES.get(name, "").split()), 120, break_long_words=False, break_on_hyphens=False)
    about = [note, ""] if note else []
    return "\n".join([f"## {row.claim}", "", *about, *commands, "", *lines_of_table, "", commits, ""])


def last_line(job: Job, lines: list[dict]) -> dict | None:
    """The newest line of a run, of whatever code."""
    return next((line for line in reversed(lines) if (line["command"], line["seed"]) == (job.command, job.seed)), None)


def table_of(names, lines: list[dict], find) -> str:
    """All sections, and on what they were measured."""
    claims = {}  # {machine: of what at least one run was made on it}
    for job in jobs_of(names):
        if line := find(job, lines):
            claims.setdefault(f"{line['processor']}; {line['versions']}", {})[ROWS[job.row].claim] = None
    machines = []
    for machine, its in sorted(claims.items(), key=lambda pair: len(pair[1]), reverse=True):
        machines.append(f"\nRuns of these rows were measured on {machine}: {'; '.join(its)}." if machines else
                        f"Measured on {machine}.")  # fmt: skip
    sections = {name: section(name, lines, find) for name in names}
    missing = []
    for name, text in sections.items():
        without = dict.fromkeys(job.variant for job in jobs_of([name]) if not find(job, lines))
        if without:  # the variants that lack runs are named only if others have some
            missing.append(ROWS[name].claim + (f" ({', '.join(without)})" if text else ""))
    rest = [f"Not made yet: {'; '.join(missing)}.\n"] if missing else []
    return "\n".join([*filter(None, sections.values()), *rest, *machines])


def page() -> str:
    """The text of table.md. It depends on the data alone."""
    return f"{ABOUT}\n{table_of([*ROWS], read_table(), last_line)}\n"


def list_rows(names: list[str]) -> None:
    for name in names:
        row, jobs = ROWS[name], jobs_of([name])
        notes = ", one at a time" * row.alone + ", only if --only names it" * row.extra
        print(f"{name}: {row.claim}; {len(jobs)} runs, {60 * hours(jobs):.0f} minutes{notes}")
        for variant, run in row.variants.items():
            print(f"  {variant}, {row.seeds} {row.unit}, {run.minutes:g} minutes each: "
                  f"{run.command(name, variant, 'SEED')}")  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", nargs="?", default="make", choices=["make", "list", "stale", "show", "carry", "run"])
    parser.add_argument("which", nargs="*", metavar="ROW VARIANT SEED", help="of the verb run")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[*ROWS], help="rows")
    parser.add_argument("--seeds", nargs="+", type=int, help="seeds, pairs or parts; default: those of the row")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, unless they measure time")
    parser.add_argument("--model-dir", default=os.environ.get("MODEL_DIR", "smollm2"), help="folder of SmolLM2")
    parser.add_argument("--smoke", action="store_true", help="a few iterations of each run; no line is written")
    parser.add_argument("--folder", help="of the verb run: where its files stay; default: nowhere")
    args = parser.parse_args(arguments)
    if args.verb == "run":
        if len(args.which) != 3 or args.which[0] not in ROWS or args.which[1] not in ROWS[args.which[0]].variants:
            parser.error("run needs ROW VARIANT SEED; `table.py list` prints rows and variants")
    elif args.which:
        parser.error(f"{args.verb} has no argument {args.which[0]}")
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(1)  # as in every run
    if args.verb == "run":
        row, variant, seed = args.which
        with tempfile.TemporaryDirectory() as work:
            folder = args.folder or f"{work}/run"
            numbers = make_run(Job(row, variant, int(seed), os.path.abspath(args.model_dir), args.smoke, folder))
        return print(json.dumps(numbers))
    names = args.only or [name for name, row in ROWS.items() if args.verb != "make" or not row.extra]
    if args.verb == "make":
        jobs = jobs_of(names, args.seeds, model_dir=os.path.abspath(args.model_dir), smoke=args.smoke)
        sys.exit(not make_all(jobs, args.jobs))
    if args.verb == "carry":
        sys.exit(not carry(names, args.jobs, os.path.abspath(args.model_dir)))
    if args.verb == "show":
        return print(table_of(names, read_table(), finished))
    {"list": list_rows, "stale": stale}[args.verb](names)


if __name__ == "__main__":
    main()
