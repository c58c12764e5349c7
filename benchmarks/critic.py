"""What the critic of a real checkpoint learns: settings by tasks.

    python benchmarks/smollm2.py DIR
    python benchmarks/critic.py DIR TASK SETTINGS SEED   # one run, adds to critic.json
    python benchmarks/critic.py plot                     # draws critic.png, prints the tables

32 samples an iteration, otherwise the defaults of --model and the settings named. Explained variance is against Monte
Carlo returns, of values before the critic has seen the rollout; accuracy is that of the rollouts' samples, each of
another prompt, and of 100 held-out answers at four points.
"""

import json
import sys
import warnings
from pathlib import Path

import learning_real
import torch

RESULTS = Path(__file__).with_suffix(".json")
SUMS = learning_real.SUMS | dict(num_iterations=14, micro_batch_tokens=1024)
THINK = dict(env_kwargs='{"digits": 2, "partial": true, "think": true}', max_new_tokens=60, actor_lr=2e-5)
TASKS = {
    "sums": SUMS,
    "think": SUMS | THINK,
    "largest": SUMS | dict(env_id="Largest-v0", max_new_tokens=40),
}
SETTINGS = {
    "1e-5": dict(critic_lr=1e-5, critic_lambda=0.95),
    "1e-4": dict(critic_lr=1e-4, critic_lambda=0.95),
    "1e-4, returns 1": dict(critic_lr=1e-4, critic_lambda=1.0),
    "1e-4, both 1": dict(critic_lr=1e-4, critic_lambda=1.0, gae_lambda=1.0),
    "3e-4, returns 1": dict(critic_lr=3e-4, critic_lambda=1.0),
    "1e-4, returns 1, 6 epochs": dict(critic_lr=1e-4, critic_lambda=1.0, critic_epochs=6),
    "1e-4, returns 1, no value clip": dict(critic_lr=1e-4, critic_lambda=1.0, value_clip=None),
}


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if sys.argv[1] != "plot":
        folder, task, settings, seed = sys.argv[1:]
        result = learning_real.ours(folder, TASKS[task] | SETTINGS[settings], int(seed))
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[f"{task}; {settings}; {seed}"] = result
        RESULTS.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
