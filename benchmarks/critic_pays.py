"""Does the critic pay? The built-in model with a critic, with a constant baseline, and with advantages of groups.

    python benchmarks/critic_pays.py TASK METHOD SEED [SEED ...]   # adds a line for each seed to data/critic_pays.jsonl
    python benchmarks/critic_pays.py table                         # prints samples and seconds to a level

TASK is sort, "sort 10" or prefix. METHOD is critic, constant, group or another key of METHODS. A seed takes two
minutes. Every method has 256 samples per iteration and otherwise the defaults. Groups are four samples of one prompt,
with forks/group_normalised.patch.

The level is reached where the mean over five iterations is above it. It is 90 % of right answers for sort, and a
reward of 0.8 for "sort 10", where the reward is the share of digits in place. It is a reward of 0.5 for prefix, where
digits count up to the first wrong one. Answers and rewards are those of the rollouts, whose prompts were not asked
before. Seconds are those of iterations.
"""

import contextlib
import functools
import importlib.util
import io
import statistics
import sys
import tempfile
from pathlib import Path

import common
import tasks  # noqa: F401, registers the environments
import torch

RESULTS = common.DATA / "critic_pays.jsonl"
TASKS = {
    "sort": dict(num_iterations=270),  # the default task
    "sort 10": dict(env_kwargs='{"digits": 10}', num_iterations=270, max_new_tokens=12),
    "prefix": dict(env_id="Prefix-v0", env_kwargs='{"digits": 10}', num_iterations=120, max_prompt_tokens=11,
                   max_new_tokens=12),
}  # fmt: skip
# What is measured, and the level that is to be reached.
LEVELS = {"sort": ("objective/accuracy", 0.9), "sort 10": ("objective/reward", 0.8),
          "prefix": ("objective/reward", 0.5)}
SAMPLES = 256  # of an iteration
METHODS = {
    "critic": {},
    "critic, lambda 0.95": dict(gae_lambda=0.95),
    "critic, lambdas 0.95": dict(critic_lambda=0.95, gae_lambda=0.95),
    "constant": dict(critic_epochs=0),  # all values are 0, and advantages are whitened
    "constant, gamma 0.8": dict(critic_epochs=0, gamma=0.8),
    "group": dict(rollout_batch_size=64, n_samples_per_prompt=4),
    "sao": {},
    "bpco": dict(kl_coef=0.0, critic_warmup_iterations=5),
}
PATCHES = {"group": "group_normalised", "sao": "sao", "bpco": "bpco"}


@functools.cache
def script(method: str):
    """ppo_llm.py, patched for some of the methods."""
    if method not in PATCHES:
        return common.ppo_llm
    spec = importlib.util.spec_from_file_location("ppo_llm", common.patched_script(PATCHES[method]))
    sys.modules["ppo_llm"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(task: str, method: str, seed: int) -> dict:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        ppo = script(method)
        ppo.train(ppo.Args(seed=seed, device="cpu", log_dir=folder, run_name="run", save_every=0, eval_episodes=1,
                           **TASKS[task] | METHODS[method]))  # fmt: skip
        rows = common.read_lines(Path(folder, "run", "metrics.jsonl"))
    names = "objective/accuracy", "objective/reward", "time/iteration", "critic/explained_variance"
    columns = {name: [row.get(name) for row in rows] for name in names}
    return {"task": task, "method": method, "seed": seed, "samples": SAMPLES} | columns


def reached(result: dict) -> int | None:
    """The number of iterations until the task's level is reached."""
    name, level = LEVELS[result["task"]]
    for i in range(5, len(result[name]) + 1):
        if statistics.mean(result[name][i - 5 : i]) >= level:
            return i
    return None


def table() -> None:
    results = common.read_lines(RESULTS)
    constant = {(run["task"], run["seed"]): reached(run) for run in results if run["method"] == "constant"}
    common.table(["task", "method", "seeds", "samples to the level, median (range)",
                  "against a constant, mean +- error", "not reached", "seconds", "at the end"])  # fmt: skip
    for task in TASKS:
        for method in METHODS:
            runs = [each for each in results if (each["task"], each["method"]) == (task, method)]
            if runs:
                whole = [(each, reached(each)) for each in runs]
                done = [(each, n) for each, n in whole if n]
                samples = [n * each["samples"] for each, n in done]
                seconds = [sum(each["time/iteration"][:n]) for each, n in done]
                last = [statistics.mean(each[LEVELS[task][0]][-10:]) for each in runs]
                pairs = [(n, constant.get((task, each["seed"]))) for each, n in done]
                ratios = [n / other for n, other in pairs if other]
                error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
                ratio = f"{statistics.mean(ratios):.2f} +- {error:.2f} ({len(ratios)})" if ratios else ""
                needed = [common.spread(numbers, ",.0f") if done else "" for numbers in (samples, seconds)]
                common.line([task, method, len(runs), needed[0], ratio, len(runs) - len(done), needed[1],
                             f"{statistics.median(last):.1%}"])  # fmt: skip


def main():
    torch.set_num_threads(1)
    if sys.argv[1:] == ["table"]:
        return table()
    if len(sys.argv) < 4 or sys.argv[1] not in TASKS or sys.argv[2] not in METHODS:
        sys.exit(f"{__doc__}\nTasks: {', '.join(TASKS)}. Methods: {', '.join(METHODS)}.")
    task, method, *seeds = sys.argv[1:]
    for seed in map(int, seeds):
        common.add_line(RESULTS, run(task, method, seed))


if __name__ == "__main__":
    main()
