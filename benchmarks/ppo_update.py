"""One PPO iteration of `ppo_llm.py` against TRL's `PPOTrainer`, the last there was (trl 1.12.0, trl.experimental.ppo).

    python benchmarks/ppo_update.py           # CPU, one thread, float32, about ten minutes
    python benchmarks/ppo_update.py smoke     # seconds: does it run

The same random Qwen2 for actor, critic and reference, the same prompts, response lengths (log-normal, forced), epochs,
minibatches and optimizer steps; the reward is a function, which TRL is given disguised as a reward model. Runs of two
iterations each, in turn in one process, of which the second counts. TRL runs without its defaults of bfloat16 and
gradient checkpointing, which cost time here, samples and scores the whole batch at once, and computes a minibatch in
one piece, since more gradient accumulation would mean fewer steps there. Ours cuts minibatches at 2048 tokens: of its
flags that change no numbers this was chosen for a small model on a CPU.
"""

import contextlib
import io
import json
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path

import common
import datasets
import torch
import transformers
import trl
from common import ppo_llm
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

CPU = dict(shape=common.SMALL, samples=32, minibatches=2, epochs=2, prompt=32, mean=64, longest=256, pairs=5)
SMOKE = dict(shape=common.TINY, samples=8, minibatches=2, epochs=2, prompt=4, mean=4, longest=8, pairs=1)
PHASES = ("rollout", "scoring", "updates", "whole iteration")


class FunctionReward(torch.nn.Module):
    """What TRL takes for a reward model: the share of even ids so far."""

    base_model_prefix = "backbone"

    def backbone(self, input_ids, **kwargs):
        return types.SimpleNamespace(hidden_states=[(input_ids % 2 == 0).float()[..., None]])

    def score(self, hidden):
        return hidden.cumsum(1) / hidden.shape[1]


class ForcedLengths(transformers.LogitsProcessor):
    """The n-th token of a row that is to have n is EOS, none before it."""

    def __init__(self, lengths, eos, pad):
        self.lengths, self.banned, self.eos, self.made = torch.tensor(lengths), [eos, pad], eos, 0

    def __call__(self, input_ids, scores):
        self.made += 1
        scores[:, self.banned] = -torch.inf
        ends = self.made >= self.lengths
        scores[ends] = -torch.inf
        scores[ends, self.eos] = 0.0
        return scores


class Bench:
    def __init__(self, shape, samples, minibatches, epochs, prompt, mean, longest, pairs):
        self.samples, self.minibatches, self.epochs, self.longest = samples, minibatches, epochs, longest
        self.folder, self.tokenizer = common.temporary_folder().name, common.character_tokenizer(shape["vocab_size"])
        common.write_checkpoint(self.folder, self.tokenizer, prompt + longest, shape)
        self.prompts = common.random_prompts(self.tokenizer, samples, prompt)
        self.lengths = common.forced_lengths("log-normal", samples, mean, longest)

    def ours(self, compiled: str) -> list[float]:
        silence = contextlib.redirect_stdout(io.StringIO())
        with tempfile.TemporaryDirectory() as folder, silence, common.forced(ppo_llm, self.lengths):
            ppo_llm.train(ppo_llm.Args(
                model=self.folder, env_id="Even-v0", env_kwargs=json.dumps({"prompts": self.prompts}),
                log_dir=folder, run_name="run", num_iterations=2, rollout_batch_size=self.samples,
                rollout_slots=self.samples, train_batch_size=self.samples // self.minibatches,
                ppo_epochs=self.epochs, kl_coef=0.05, max_prompt_tokens=len(self.prompts[0]),
                max_new_tokens=self.longest, eval_episodes=1, save_every=0, compile=compiled,
                micro_batch_tokens=2048, device="cpu"))  # fmt: skip
            row = json.loads(Path(folder, "run", "metrics.jsonl").read_text().splitlines()[-1])
        phases = ("rollout", "score", "critic", "actor", "hand_over", "diagnose")
        seconds = {name: row[f"time/{name}"] for name in phases}
        return [seconds["rollout"], seconds["score"], seconds["critic"] + seconds["actor"], sum(seconds.values())]

    def trl(self) -> list[float]:
        load = lambda kind, **kwargs: kind.from_pretrained(self.folder, dtype=torch.float32, **kwargs)
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder, padding_side="left")
        ids = [self.tokenizer.encode_prompt(text) for text in self.prompts]
        data = datasets.Dataset.from_dict({"input_ids": ids})
        clock, generate, eos, pad = [], ppo_trainer.batch_generation, self.tokenizer.eos_id, self.tokenizer.pad_id

        def batch_generation(model, *rest):
            clock.append(time.perf_counter())
            sample = model.generate
            forced = transformers.LogitsProcessorList([ForcedLengths(self.lengths, eos, pad)])
            model.generate = lambda **kwargs: sample(logits_processor=forced, **kwargs)
            try:
                return generate(model, *rest)
            finally:
                model.generate = sample
                clock.append(time.perf_counter())

        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            config = PPOConfig(
                output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
                save_strategy="no", disable_tqdm=True, num_sample_generations=0, total_episodes=2 * self.samples,
                per_device_train_batch_size=self.samples, gradient_accumulation_steps=1, kl_coef=0.05, temperature=1.0,
                num_mini_batches=self.minibatches, num_ppo_epochs=self.epochs, response_length=self.longest,
                local_rollout_forward_batch_size=self.samples, stop_token="eos")  # fmt: skip
            policy, reference = (load(transformers.AutoModelForCausalLM) for _ in range(2))
            value = load(transformers.AutoModelForSequenceClassification, num_labels=1)
            trainer = PPOTrainer(config, tokenizer, policy, reference, FunctionReward(), data, value, eval_dataset=data)
            accumulate = trainer.accelerator.accumulate

            def first_update(model):
                if len(clock) % 4 == 2:
                    clock.append(time.perf_counter())
                return accumulate(model)

            trainer.accelerator.accumulate = first_update
            trainer.log = lambda metrics: clock.append(time.perf_counter())
            ppo_trainer.batch_generation = batch_generation
            try:
                trainer.train()
            finally:
                ppo_trainer.batch_generation = generate
        start, sampled, scored, end = clock[-4:]
        return [sampled - start, scored - sampled, end - scored, end - start]


class Even(common.Prompts):
    def step(self, response):
        return "", sum(ord(c) % 2 for c in response) / max(1, len(response)), True, False, {}


def main():
    settings = SMOKE if "smoke" in sys.argv else CPU
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    common.gym.register("Even-v0", entry_point=Even)
    bench = Bench(**settings)
    sizes = ", ".join(f"{key} {value}" for key, value in settings.items() if key != "shape")
    shape = ", ".join(f"{key} {value}" for key, value in settings["shape"].items())
    print(f"{shape}; {sizes}; {sum(bench.lengths)} response tokens; {common.hardware(transformers, trl)}\n")
    runs, steps, step = {"ours": [], "--compile on": [], "TRL": []}, [0], torch.optim.AdamW.step
    torch.optim.AdamW.step = lambda *args, **kwargs: (steps.__setitem__(0, steps[0] + 1), step(*args, **kwargs))[1]
    sides = [("ours", lambda: bench.ours("off"), 2), ("--compile on", lambda: bench.ours("on"), 2),
             ("TRL", bench.trl, 1)]  # one optimizer for both  # fmt: skip
    bench.ours("on")  # compiles
    for _ in range(settings["pairs"]):
        for name, run, models in sides:
            steps[0] = 0
            runs[name].append(run())
            assert steps[0] == 2 * models * settings["epochs"] * settings["minibatches"], steps
    common.table(["seconds, median (range)", *runs, "TRL / ours", "TRL / --compile on"])
    for i, phase in enumerate(PHASES):
        *ours, theirs = ([run[i] for run in runs[side]] for side in runs)
        ratios = [[b / a for a, b in zip(side, theirs, strict=True)] for side in ours]
        common.line([phase, *map(common.spread, [*ours, theirs, *ratios])])


if __name__ == "__main__":
    main()
