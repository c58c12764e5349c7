"""Critics that learn from the samples of a run of benchmarks/critic.py, without its actor: many settings, same samples.

    python benchmarks/critic.py DIR TASK "1e-4" 1              # the run whose samples are kept in runs/critic
    python benchmarks/critic_alone.py DIR TASK "1e-4" 1 CRITIC ...  # adds a line for each to critic_alone.jsonl
    python benchmarks/critic_alone.py table

The critic does not influence the samples here, so that two critics differ by nothing but themselves. Each predicts the
Monte Carlo returns of a rollout first, the KL penalty included, and then learns from them.
"""

import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

import common
import critic
import torch
from common import ppo_llm

RESULTS = Path(__file__).with_suffix(".jsonl")
CRITICS = {
    "1e-5": dict(critic_lr=1e-5),
    "3e-5": dict(critic_lr=3e-5),
    "1e-4": dict(critic_lr=1e-4),
    "3e-4": dict(critic_lr=3e-4),
    "1e-4, 1 epoch": dict(critic_epochs=1),
    "1e-4, 4 epochs": dict(critic_epochs=4),
    "1e-4, no value clip": dict(value_clip=None),
    "1e-5, head 1e-4": dict(critic_lr=1e-5, head=10),
    "1e-5, head 1e-3": dict(critic_lr=1e-5, head=100),
    "3e-5, head 3e-4": dict(critic_lr=3e-5, head=10),
    "head alone, 1e-3": dict(critic_lr=1e-3, frozen=True),
    "8 layers, 1e-4": dict(layers=8),
    "8 layers, 3e-4": dict(layers=8, critic_lr=3e-4),
}


class Head(torch.nn.Linear):
    """A head of zeros whose output is multiplied, which to Adam is a learning rate times this factor."""

    factor = 1.0

    def forward(self, x):
        return super().forward(x) * self.factor


def run(folder: str, name: str, task: str, head=1.0, layers=None, frozen=False, **flags) -> list[dict]:
    """What describe_values says of each rollout before it is learned from, and seconds of scoring and learning."""
    kept = torch.load(critic.SAMPLES / f"{name}.pt", weights_only=False)
    experiences = [ppo_llm.Experience(**fields) for fields in kept]
    flags = critic.TASKS[task] | dict(critic_lr=1e-4) | flags
    args = ppo_llm.Args(model=folder, device="cpu", compile="off", **flags)
    ppo_llm.validate(args)
    world = ppo_llm.connect(args)
    language_model, _ = ppo_llm.load_hf_checkpoint(folder)
    config = language_model.config
    model = ppo_llm.Transformer(config, "scalar")
    model.score = Head(config.hidden_size, 1, bias=False)
    model.score.factor = head
    torch.nn.init.zeros_(model.score.weight)
    ppo_llm.copy_weights(language_model, model, skip=("lm_head.weight", "score.weight"))
    if layers:
        del model.model.layers[layers:]
    if frozen:
        model.model.requires_grad_(False)
    optimizer = ppo_llm.make_optimizer(model, args)
    steps = len(experiences) * args.critic_epochs * (args.rollout_batch_size // args.train_batch_size)
    rows, step = [], 0
    for experience in experiences:
        start = time.perf_counter()
        values = ppo_llm.forward_all(lambda mb: ppo_llm.sampled_values(model, mb), experience, args, world)
        row = ppo_llm.describe_values(values, experience.mc_returns, experience.mask)
        experience = dataclasses.replace(experience, values=values, returns=experience.mc_returns)
        for n_tokens, minibatch in ppo_llm.minibatches(experience, args.critic_epochs, args, world):
            for mb in minibatch:
                newvalues = ppo_llm.sampled_values(model, mb)
                ppo_llm.value_loss(newvalues, mb.values, mb.returns, mb.mask, args.value_clip, n_tokens).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            lr = ppo_llm.linear_schedule(args.critic_lr, args.lr_end, step, steps)
            ppo_llm.optimizer_step(optimizer, lr, float(norm))
            step += 1
        rows.append(row | {"seconds": time.perf_counter() - start})
        print({k: round(v, 2) for k, v in rows[-1].items()}, file=sys.stderr, flush=True)
    return rows


def table() -> None:
    common.table(["samples of", "critic", "explained variance, mean of the middle half (range)",
                  "at the first, last token", "gain", "value / return in iteration 4, 7, 14",
                  "seconds an iteration"])  # fmt: skip
    for line in RESULTS.read_text().splitlines():
        run = json.loads(line)
        rows = run["rows"]
        middle = rows[len(rows) // 4 : len(rows) - len(rows) // 4]
        mean = lambda name: statistics.mean(row[name] for row in middle)
        column = [row["explained_variance"] for row in middle]
        values = [f"{rows[i]['value_mean']:.2f} / {rows[i]['return_mean']:.2f}" for i in (3, 6, -1)]
        explained = f"{mean('explained_variance'):.2f} ({min(column):.2f} to {max(column):.2f})"
        ends = f"{mean('explained_variance_first'):.2f}, {mean('explained_variance_last'):.2f}"
        seconds = statistics.median(row["seconds"] for row in rows)
        common.line([run["samples"], run["critic"], explained, ends, f"{mean('gain'):.2f}", ", ".join(values),
                     f"{seconds:.1f}"])  # fmt: skip


def main():
    torch.set_num_threads(1)
    if sys.argv[1] == "table":
        return table()
    folder, task, settings, seed, *names = sys.argv[1:]
    samples = f"{task}, {settings}, {seed}"
    for name in names:
        rows = run(folder, samples, task, **CRITICS[name])
        with open(RESULTS, "a") as file:
            file.write(json.dumps({"samples": samples, "critic": name, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
