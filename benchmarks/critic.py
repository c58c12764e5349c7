"""What the critic of a real checkpoint learns: settings by tasks.

    python benchmarks/smollm2.py DIR
    python benchmarks/critic.py DIR TASK SETTINGS SEED   # one run, adds a line to critic.jsonl
    python benchmarks/critic.py table                    # prints what is there; plot draws critic.png

32 samples an iteration, 14 iterations, otherwise the defaults of --model and the settings named. Explained variance is
against Monte Carlo returns, of values from before the critic has seen the rollout. A run of `sums` takes 13 minutes of
one core, of `largest` 28, and 7 GB of memory.
"""

import json
import os
import statistics
import subprocess
import sys
import unittest.mock
import warnings
from pathlib import Path

import common
import learning_real
import torch
from common import ppo_llm

SAMPLES = Path("runs/critic")  # of the runs made here, for critic_alone.py
RESULTS = Path(__file__).with_suffix(".jsonl")
SUMS = learning_real.SUMS | dict(num_iterations=14, micro_batch_tokens=1024)
TASKS = {
    "sums": SUMS,
    "think": SUMS | dict(env_kwargs='{"digits": 2, "partial": true, "think": true}', max_new_tokens=60, actor_lr=2e-5),
    "largest": SUMS | dict(env_id="Largest-v0", max_new_tokens=40),
}
OLD = dict(gae_lambda=0.95, critic_lambda=0.95)  # the defaults up to 3448c94, with a rate of 1e-5
SETTINGS = {
    "1e-5, 0.95": dict(critic_lr=1e-5) | OLD,
    "1e-4, advantages 0.95": dict(critic_lr=1e-4, gae_lambda=0.95),
    "1e-4": dict(critic_lr=1e-4),
    "3e-4, advantages 0.95": dict(critic_lr=3e-4, gae_lambda=0.95),
    "1e-4, advantages 0.95, 6 epochs": dict(critic_lr=1e-4, gae_lambda=0.95, critic_epochs=6),
    "constant": dict(critic_epochs=0),  # all values are 0, and advantages are whitened
    "groups of 4": dict(rollout_batch_size=8, n_samples_per_prompt=4),  # by group_normalised.patch
}
WITHOUT = "constant", "groups of 4"  # settings without a critic


def table() -> None:
    common.table(["task", "settings", "seed", "explained variance, median of the middle half (range)",
                  "value / return in iteration 4, 7, 14", "held-out answers right, sampled, %"])  # fmt: skip
    runs = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    for run in sorted(runs, key=lambda run: [run[name] for name in ("task", "settings", "seed")]):
        rows = run["rows"]
        right = [f"{100 * point['sampled']['success']:.0f}" for point in run["points"]]
        explained, values = "", []
        if run["settings"] not in WITHOUT:
            column = [row.get("critic/explained_variance") or 0.0 for row in rows]
            middle = column[len(rows) // 4 : len(rows) - len(rows) // 4]
            explained = f"{statistics.median(middle):.2f} ({min(middle):.2f} to {max(middle):.2f})"
            values = [f"{rows[i]['critic/value_mean']:.2f} / {rows[i]['critic/return_mean']:.2f}" for i in (3, 6, -1)]
        common.line([run["task"], run["settings"], run["seed"], explained, ", ".join(values), " ".join(right)])


def plot() -> None:
    """Explained variance and held-out accuracy over samples, of the settings that were compared by seeds."""
    import matplotlib.pyplot as plt

    runs = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    figure, axes = plt.subplots(1, 4, figsize=(13, 2.8), layout="constrained")
    for k, task in enumerate(("sums", "largest")):
        for settings, color in (("1e-5, 0.95", "C1"), ("1e-4", "C0")):
            label = f"--critic-lr {settings.split(',')[0]}"
            for run in [run for run in runs if (run["task"], run["settings"]) == (task, settings)]:
                explained = [row.get("critic/explained_variance") or 0.0 for row in run["rows"]]
                samples = [32 * (i + 1) for i in range(len(explained))]
                axes[2 * k].plot(samples, explained, color=color, linewidth=1, label=label)
                points = [(point["samples"], 100 * point["sampled"]["success"]) for point in run["points"]]
                axes[2 * k + 1].plot(*zip(*points), "o-", color=color, markersize=3, linewidth=1)
                label = None
        axes[2 * k].set(title=task, xlabel="samples", ylabel="explained variance", ylim=(-0.2, 0.7))
        axes[2 * k + 1].set(title=task, xlabel="samples", ylabel="held-out answers right, %", ylim=(0, 100))
    axes[0].legend(fontsize=8)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=100)


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if sys.argv[1] in ("table", "plot"):
        return table() if sys.argv[1] == "table" else plot()
    folder, task, settings, seed = sys.argv[1:]
    if settings == "groups of 4" and Path(ppo_llm.__file__).parent == common.ROOT:
        patched = common.patched_script("group_normalised")  # which comes first on the path
        environment = os.environ | {"PYTHONPATH": str(patched.parent)}
        return subprocess.run([sys.executable, *sys.argv], env=environment, check=True)
    kept, make_experience = [], ppo_llm.make_experience

    def keep(*args):
        kept.append(make_experience(*args))
        return kept[-1]

    flags = TASKS[task] | SETTINGS[settings]
    with unittest.mock.patch.object(ppo_llm, "make_experience", keep):
        result = learning_real.ours(folder, flags, int(seed))
    SAMPLES.mkdir(parents=True, exist_ok=True)
    torch.save([vars(experience) for experience in kept], SAMPLES / f"{task}, {settings}, {seed}.pt")
    with open(RESULTS, "a") as file:
        file.write(json.dumps({"task": task, "settings": settings, "seed": int(seed)} | result) + "\n")


if __name__ == "__main__":
    main()
