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
CRITICS = {  # a name: (flags, layers or None for all, factor of the head's learning rate)
    "1e-4": (dict(critic_lr=1e-4), None, 1),
    "1e-5, head 1e-3": (dict(critic_lr=1e-5), None, 100),
    "8 layers, 1e-4": (dict(critic_lr=1e-4), 8, 1),
}


class Head(torch.nn.Linear):
    """A head of zeros whose output is multiplied, which to Adam is a learning rate times this factor."""

    factor = 1.0

    def forward(self, x):
        return super().forward(x) * self.factor


def run(folder: str, name: str, task: str, flags: dict, layers: int | None, factor: float) -> list[dict]:
    """Explained variance and means of each rollout before it is learned from, and seconds of scoring and learning."""
    experiences = [ppo_llm.Experience(**fields) for fields in torch.load(critic.SAMPLES / f"{name}.pt")]
    args = ppo_llm.Args(model=folder, device="cpu", **critic.TASKS[task] | flags)
    ppo_llm.validate(args)
    ppo_llm.connect(args)
    language_model, config = ppo_llm.load_hf_checkpoint(folder)
    model = ppo_llm.Transformer(config, "scalar")
    model.score = Head(config.hidden_size, 1, bias=False)
    model.score.factor = factor
    torch.nn.init.zeros_(model.score.weight)
    ppo_llm.copy_weights(language_model, model)
    if layers:
        del model.model.layers[layers:]
    optimizer, state = ppo_llm.make_optimizer(model), ppo_llm.TrainState()
    steps = len(experiences) * args.critic_epochs * (args.rollout_batch_size // args.train_batch_size)
    rows = []
    for experience in experiences:
        start = time.perf_counter()
        values = ppo_llm.forward_all(lambda mb: ppo_llm.sampled_values(model, mb), experience, args)
        returns, mask = experience.mc_returns, experience.mask
        first = mask & (mask.cumsum(1) == 1)  # of each sample
        row = {
            "explained_variance": ppo_llm.explained_variance(values[mask], returns[mask]),
            "explained_variance_first": ppo_llm.explained_variance(values[first], returns[first]),
            "value_mean": float(values[mask].mean()), "return_mean": float(returns[mask].mean()),
        }  # fmt: skip
        experience = dataclasses.replace(experience, values=values, returns=returns)
        for epoch in range(args.critic_epochs):
            for n_tokens, minibatch in ppo_llm.minibatches(experience, epoch, state, args):
                for mb in minibatch:
                    newvalues = ppo_llm.sampled_values(model, mb)
                    ppo_llm.value_loss(newvalues, mb.values, mb.returns, mb.mask, args.value_clip, n_tokens).backward()
                lr = ppo_llm.linear_schedule(args.critic_lr, args.lr_end, state.critic_steps / steps)
                ppo_llm.optimizer_step(model, optimizer, lr, args)
                state.critic_steps += 1
        state.iteration += 1
        rows.append(row | {"seconds": time.perf_counter() - start})
        print({k: round(v, 2) for k, v in rows[-1].items()}, file=sys.stderr, flush=True)
    return rows


def table() -> None:
    common.table(["samples of", "critic", "explained variance, mean of the middle half (range)", "at the first token",
                  "value / return in iteration 4, 7, 14", "seconds an iteration"])  # fmt: skip
    for line in RESULTS.read_text().splitlines():
        run = json.loads(line)
        rows = run["rows"]
        middle = rows[len(rows) // 4 : len(rows) - len(rows) // 4]
        column = [row["explained_variance"] for row in middle]
        explained = f"{statistics.mean(column):.2f} ({min(column):.2f} to {max(column):.2f})"
        first = statistics.mean(row["explained_variance_first"] for row in middle)
        values = [f"{rows[i]['value_mean']:.2f} / {rows[i]['return_mean']:.2f}" for i in (3, 6, -1)]
        seconds = statistics.median(row["seconds"] for row in rows)
        common.line([run["samples"], run["critic"], explained, f"{first:.2f}", ", ".join(values), f"{seconds:.1f}"])


def main():
    torch.set_num_threads(1)
    if sys.argv[1] == "table":
        return table()
    folder, task, settings, seed, *names = sys.argv[1:]
    samples = f"{task}, {settings}, {seed}"
    for name in names:
        rows = run(folder, samples, task, *CRITICS[name])
        with open(RESULTS, "a") as file:
            file.write(json.dumps({"samples": samples, "critic": name, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
