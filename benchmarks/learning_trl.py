"""Learning to sort digits beside TRL's `PPOTrainer` (trl.experimental.ppo): held-out accuracy over samples.

    python benchmarks/learning_trl.py             # three seeds of each side, about 40 minutes; draws learning_trl.png
    python benchmarks/learning_trl.py 1 trl       # some seeds, some sides (trl, matched, defaults); adds to the results
    python benchmarks/learning_trl.py plot        # draws what is there again

All sides start from the same warm-started checkpoint of a seed and get the same prompts and reward, batch size, epochs,
generation length and temperature. `matched` is ours as near to TRL as flags go: its minibatches of 128, learning rate,
for actor and critic alike, decaying to 0, KL, clip ranges, GAE. `defaults` has ours. No flag removes: TRL's loss is a
sum of both losses, of which no gradient is clipped; it averages over the tokens of a microbatch, which is a minibatch
here, over all response positions for the critic; and it places the reward one position behind EOS. Every 2,560
samples the policy answers the same 512 held-out prompts, sampled at temperature 1, by the same code for all sides.
TRL's PPOTrainer is that of the version in requirements.txt; later ones have none.
"""

import contextlib
import io
import json
import sys
import tempfile
import types
import warnings
from pathlib import Path

import common
import torch
from common import ppo_llm

SIDES, SAMPLES, ITERATIONS, LEARNING_RATE = ("trl", "matched", "defaults"), 512, 120, 3e-4
EVERY = 5 * SAMPLES  # between two evaluations
RESULTS = Path("runs/learning_trl.json")
TASK = dict(max_prompt_tokens=16, max_new_tokens=8, ppo_epochs=2, device="cpu", save_every=0)
MATCHED = dict(rollout_batch_size=SAMPLES, train_batch_size=128, actor_lr=LEARNING_RATE, critic_lr=LEARNING_RATE,
               lr_end=0.0, kl_coef=0.01, gae_lambda=0.95, critic_lambda=0.95, value_clip=0.2)  # fmt: skip
DEFAULTS = dict(rollout_batch_size=256, train_batch_size=64, actor_lr=5e-4, critic_lr=1e-3)


def train(folder: str, run_name: str, **flags) -> Path:
    with contextlib.redirect_stdout(io.StringIO()):
        ppo_llm.train(ppo_llm.Args(log_dir=folder, run_name=run_name, **TASK | flags))
    return Path(folder, run_name)


def ours(folder: str, seed: int, checkpoint: Path, flags: dict) -> list:
    batch_size = flags["rollout_batch_size"]
    run = train(folder, f"{batch_size}", model=str(checkpoint), seed=seed, eval_every=EVERY // batch_size,
                num_iterations=SAMPLES * ITERATIONS // batch_size, **flags)  # fmt: skip
    summary = json.loads((run / "summary.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [(row["iteration"] * batch_size, row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
    before, after = (summary[when]["accuracy"] for when in ("eval_before", "eval_after"))
    return [(0, before), *curve, (SAMPLES * ITERATIONS, after)]


class HeldOut:
    """Accuracy of a model on the prompts of an evaluation."""

    def __init__(self, folder: Path):
        self.tokenizer, self.curve = ppo_llm.HFTokenizer(folder), []
        self.args = ppo_llm.Args(max_prompt_tokens=16, max_new_tokens=8)
        self.envs = [ppo_llm.SortDigits() for _ in range(512)]

    def add(self, samples: int, model: ppo_llm.Transformer) -> None:
        decoder = ppo_llm.Decoder(model, 512, self.tokenizer.stop_ids, self.args)
        noise = -1 - samples // SAMPLES
        episodes = ppo_llm.rollout(decoder, self.tokenizer, self.envs, range(512), range(512), noise, self.args)
        self.curve.append((samples, sum(episode.success for episode in episodes) / 512))


class SortedReward(torch.nn.Module):
    """What TRL takes for a reward model: the reward of SortDigits at all positions of a row."""

    base_model_prefix = "backbone"

    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer = tokenizer

    def backbone(self, input_ids, **kwargs):
        rewards, env = [], ppo_llm.SortDigits()
        for ids in input_ids.tolist():
            prompt, _, response = self.tokenizer.decode(ids).partition("=")
            env.answer = "".join(sorted(prompt))
            rewards.append(env.step(response)[1])
        return types.SimpleNamespace(hidden_states=[torch.tensor(rewards)[:, None, None].expand(*input_ids.shape, 1)])

    def score(self, hidden):
        return hidden


def trl(folder: str, seed: int, checkpoint: Path) -> list:
    import datasets
    import transformers
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    held_out = HeldOut(checkpoint)
    model, _ = ppo_llm.load_hf_checkpoint(checkpoint)
    train_env = ppo_llm.SortDigits()
    first = ppo_llm.first_prompt(ppo_llm.Args(seed=seed))
    seeds = range(first, first + SAMPLES * ITERATIONS)  # those of our training prompts
    prompts = [held_out.tokenizer.encode(train_env.reset(seed=i)[0]) for i in seeds]
    load = lambda kind, **kwargs: kind.from_pretrained(checkpoint, dtype=torch.float32, **kwargs)
    policy, reference = (load(transformers.AutoModelForCausalLM) for _ in range(2))
    value = load(transformers.AutoModelForSequenceClassification, num_labels=1)
    torch.nn.init.zeros_(value.score.weight)  # as ours
    settings = PPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", seed=seed,
        save_strategy="no", disable_tqdm=True, num_sample_generations=0, total_episodes=SAMPLES * ITERATIONS,
        per_device_train_batch_size=SAMPLES, gradient_accumulation_steps=1, num_mini_batches=4, num_ppo_epochs=2,
        local_rollout_forward_batch_size=SAMPLES, response_length=8, stop_token="eos", temperature=1.0,
        learning_rate=LEARNING_RATE, lr_scheduler_type="linear", kl_coef=0.01)  # fmt: skip
    trainer = PPOTrainer(
        settings, transformers.AutoTokenizer.from_pretrained(checkpoint, padding_side="left"), policy, reference,
        SortedReward(held_out.tokenizer), datasets.Dataset.from_dict({"input_ids": prompts}), value,
        eval_dataset=datasets.Dataset.from_dict({"input_ids": prompts[:8]}))  # fmt: skip
    updates = iter(range(1, ITERATIONS + 1))

    def log(metrics, *rest):  # once, after the updates of an iteration
        iteration = next(updates)
        if iteration * SAMPLES % EVERY == 0:
            model.load_state_dict(policy.state_dict(), strict=False)
            held_out.add(iteration * SAMPLES, model)

    held_out.add(0, model)
    trainer.log = log
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return held_out.curve


def report() -> None:
    import matplotlib.pyplot as plt

    results = json.loads(RESULTS.read_text())
    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    common.table(["seed", *(f"samples to 90 %, {side}" for side in SIDES), *(f"in the end, {side}" for side in SIDES)])
    for seed in sorted({key.split()[1] for key in results}):
        curves = [results.get(f"{side} {seed}", []) for side in SIDES]
        first = [next((n for n, accuracy in curve if accuracy >= 0.9), None) for curve in curves]
        common.line([seed, *(f"{n:,}" if n else "-" for n in first),
                     *(f"{curve[-1][1]:.1%}" if curve else "-" for curve in curves)])  # fmt: skip
        for i, (side, curve) in enumerate(zip(SIDES, curves)):
            if curve:
                x, y = zip(*curve)
                label = {"trl": "TRL", "matched": "ours, as TRL", "defaults": "ours"}[side] if seed == "1" else None
                axes.plot(x, [100 * accuracy for accuracy in y], color=f"C{i}", linewidth=1, label=label)
    axes.set(xlabel="samples", ylabel="held-out prompts right, %", ylim=(0, 100))
    axes.legend(loc="lower right")
    figure.savefig(Path(__file__).with_name("learning_trl.png"), dpi=110)


def main():
    chosen = sys.argv[1:]
    seeds = [int(x) for x in chosen if x.isdigit()] or [1, 2, 3]
    sides = [x for x in chosen if x in SIDES] or SIDES
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    RESULTS.parent.mkdir(exist_ok=True)
    for seed in seeds if "plot" not in chosen else ():
        with tempfile.TemporaryDirectory() as folder:
            alone = dict(num_iterations=1, critic_warmup_iterations=1, eval_episodes=1)  # a warm start alone
            checkpoint = train(folder, "start", seed=seed, **alone) / "model"
            for side in sides:
                curve = trl(folder, seed, checkpoint) if side == "trl" else ours(
                    folder, seed, checkpoint, MATCHED if side == "matched" else DEFAULTS)  # fmt: skip
                results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
                RESULTS.write_text(json.dumps(results | {f"{side} {seed}": curve}))
    report()


if __name__ == "__main__":
    main()
