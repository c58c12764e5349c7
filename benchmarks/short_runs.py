"""Runs that are stopped after their first iterations, and the fingerprints of these. `table.py carry` compares them.

    python -P benchmarks/short_runs.py trl DIR SEED COUNT          # TRL, as in the row "sums" of table.py
    python -P benchmarks/short_runs.py preferences DIR SEED COUNT  # the row "preferences"
    python -P benchmarks/short_runs.py page NAME SEED COUNT        # all runs of course.py, exercises.py or projects.py

Each command prints a JSON list of fingerprints, those of a page as "run.iteration fingerprint". On stderr it says which
run of the page a name stands for. All modules and scripts are those of the checkout in PYTHONPATH, since with -P Python
does not look beside this file. DIR is the folder that `python benchmarks/checkpoints.py smollm2 DIR` writes.
"""

import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from unittest import mock

METRICS, COMPLETIONS = "metrics.jsonl", "completions.jsonl"
COMPARED = (
    "objective/reward", "objective/accuracy", "objective/kl", "objective/entropy", "objective/response_tokens",
    "objective/truncated", "actor/policy_loss", "actor/approx_kl", "actor/clipfrac", "actor/grad_norm",
    "critic/value_loss", "critic/explained_variance", "critic/grad_norm", "ratio/first_dev", "ratio/advantage_std",
    "ratio/relative_update", "debug/sampler_trainer_logprob_diff",
)  # fmt: skip


SHORTER = ["--eval-episodes", "8"]  # Evaluations do not change the training.


class Enough(Exception):
    """The first iterations have been made."""


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fingerprints(folder: Path) -> list[str]:
    """A hash of each iteration of a run: of its metrics, and of its logged responses.

    The sampled tokens are in it with all that is computed from them: entropy, losses and gradient norms are written to
    the last bit. A metric that a later version adds does not change it.
    """
    responses = {}
    for sample in read_lines(folder / COMPLETIONS):
        responses.setdefault(sample["iteration"], []).append([sample["prompt"], sample["response"]])
    return [
        hashlib.sha256(json.dumps([
            [row.get(name) for name in COMPARED], responses.get(row["iteration"], [])
        ]).encode()).hexdigest()[:10] for row in read_lines(folder / METRICS)
    ]  # fmt: skip


def written_iterations(folder: Path) -> int:
    """The number of iterations that are whole in both files. Four completions are logged of each."""
    lines = [path.read_bytes().count(b"\n") if (path := folder / name).exists() else 0
             for name in (METRICS, COMPLETIONS)]  # fmt: skip
    return min(lines[0], lines[1] // 4)


def run_until(command: list[str], folder: Path, stops: list[tuple[int, int]], **options) -> None:
    """Start the command once for each stop, and send it that signal when its run has that many iterations."""
    for iterations, number in stops:
        with tempfile.TemporaryFile("w+") as log:
            child = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **options)
            while child.poll() is None and written_iterations(folder) < iterations:
                time.sleep(0.05)
            if child.poll() is None:
                send = os.killpg if number == signal.SIGKILL else os.kill
                send(child.pid, number)
            child.wait()
            if written_iterations(folder) < iterations and child.returncode:  # A run may be shorter.
                log.seek(0)
                tail = "\n".join(log.read().splitlines()[-15:])
                raise RuntimeError(f"the run ended with code {child.returncode}\n{tail}")


# --- Runs that are more than a command of the script.


def of_trl(folder: str, seed: int, count: int) -> list[str]:
    """A hash for each iteration with TRL's loop: of all weights after it, and of the evaluation before training.

    Here the shuffling has a seed.
    """
    import learning_real
    import numpy
    import torch

    made = []

    class FirstIterations(learning_real.Evaluation):
        def add(self, samples, seconds, model):
            super().add(samples, seconds, model)  # which evaluates before training and after its end only
            if samples:
                weights = (weight.numpy().tobytes() for weight in model.state_dict().values())
                parts = [repr(self.points).encode(), *weights]
                made.append(hashlib.sha256(b"".join(parts)).hexdigest()[:10])
            if len(made) == count:
                raise Enough

    torch.set_num_threads(1)
    numpy.random.seed(seed)
    flags = learning_real.TASKS["sums, short"] | dict(eval_episodes=8)
    with mock.patch.object(learning_real, "between_points", lambda flags: 1):
        try:
            learning_real.trl(folder, flags, seed, FirstIterations(folder, flags, seed))
        except Enough:
            return made


def of_preferences(folder: str, seed: int, count: int) -> list[str]:
    """Fingerprints of a shorter run: the reward model sees 64 pairs, once, from one pass over the prompts."""
    import preferences
    import torch

    log, made = preferences.ppo_llm.Run.log, []

    def log_and_count(*arguments):
        made.append(log(*arguments))
        if len(made) == count:
            raise Enough

    torch.set_num_threads(1)
    preferences.PASSES = preferences.HELD_OUT_PASSES = 1
    preferences.round = lambda epochs: 1  # of the reward model
    preferences.FLAGS = preferences.FLAGS | dict(eval_episodes=8)
    with tempfile.TemporaryDirectory() as work, mock.patch.object(preferences, "FOLDER", Path(work)):
        preferences.make_pairs(folder)
        preferences.make_reward_model(folder, 64)
        with mock.patch.object(preferences.ppo_llm.Run, "log", log_and_count):
            try:
                preferences.ppo(folder, 64, 0.05, seed)
            except Enough:
                return fingerprints(Path(work, f"64_0.05_{seed}"))


def of_page(name: str, seed: int, count: int) -> list[str]:
    """Fingerprints of all runs of the page with this seed. The page of another commit may lack some of the runs."""
    page = importlib.import_module(name)
    make, wanted = page.execute, {key: key for key in page.results() if key[-1] == seed}
    if name == "projects":
        make = page.measure
        wanted = {(run.command, run.patches): (run, seed) for part in page.PROJECTS for run in page.runs(part)}
    run, made = subprocess.run, []

    def first_iterations(command, *, cwd=".", env=None, **options):
        command = list(map(str, command))
        if "--run-name" not in command:
            return run(command, cwd=cwd, env=env, **options)
        value = lambda flag: command[command.index(flag) + 1]
        folder = Path(cwd, value("--log-dir") if "--log-dir" in command else "runs", value("--run-name"))
        end = []
        try:
            run_until([*command, *SHORTER], folder, [(count, signal.SIGKILL)], cwd=cwd, env=env)
        except RuntimeError:
            end = ["error"]  # as some of the bugs make it
        raise Enough([*(fingerprints(folder)[:count] if written_iterations(folder) else []), *end])

    with mock.patch.object(subprocess, "run", first_iterations):
        for key, arguments in wanted.items():
            label = f"{zlib.crc32(repr(key).encode()):08x}"
            print(f"{label}: {key}", file=sys.stderr)
            try:
                make(*arguments)
            except Enough as enough:
                made += [f"{label}.{i} {fingerprint}" for i, fingerprint in enumerate(*enough.args)]
    return made


def by_name(made: list[str]) -> dict[str | int, str]:
    return dict(one.split(" ") if " " in one else (i, one) for i, one in enumerate(made))


def first_difference(one: list[str], other: list[str]) -> int | None:
    """The place in `one` of the first fingerprint that differs: None if none does, 0 if nothing can be compared."""
    a, b = by_name(one), by_name(other)
    if not a.keys() & b.keys():
        return 0
    return next((i for i, name in enumerate(a) if name in b and a[name] != b[name]), None)


def main() -> None:
    kind, what, seed, count = sys.argv[1:]
    made = {"trl": of_trl, "preferences": of_preferences, "page": of_page}[kind](what, int(seed), int(count))
    print(json.dumps(made))


if __name__ == "__main__":
    main()
