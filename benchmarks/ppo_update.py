"""One PPO iteration of `ppo_llm.py` against TRL's `PPOTrainer`, the last there was (trl 1.12.0, trl.experimental.ppo).

    python benchmarks/ppo_update.py                        # a random model; CPU, one thread, float32, fifteen minutes
    python benchmarks/ppo_update.py smoke                  # a minute: does it run
    python benchmarks/ppo_update.py real FOLDER [pairs [samples]]    # a Hugging Face checkpoint, 3 pairs of 16 samples

Prints seconds of each phase, ratios of pairs, and the peak of resident memory above what a process took before it
loaded a model.

The same model for actor, critic and reference (a random Qwen2 or the checkpoint), the same prompts, response lengths
(log-normal, forced), epochs, minibatches, optimizer steps and learning rate; the reward is a function, which TRL is
given disguised as a reward model. Each run is a process of its own, sides in turn; its last iteration counts, the
second or, where the first ones compile, the third. TRL runs without its defaults of bfloat16 and gradient
checkpointing, which cost time here, samples and scores the whole batch at once, and computes a minibatch in one piece,
since more gradient accumulation would mean fewer steps there. Ours cuts minibatches at 1024 tokens: of its flags that
change no numbers this was chosen for a CPU. Ours clips gradients, TRL's PPOTrainer does not.
"""

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import types
import unittest.mock
import warnings
from pathlib import Path

import common
import datasets
import psutil
import torch
import transformers
import trl
from common import ppo_llm
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

CPU = dict(shape=common.SMALL, samples=32, minibatches=2, epochs=2, prompt=32, mean=64, longest=256, pairs=5)
SMOKE = dict(shape=common.TINY, samples=8, minibatches=2, epochs=2, prompt=4, mean=4, longest=8, pairs=1)
REAL = dict(samples=16, minibatches=2, epochs=2, mean=24, longest=64, pairs=3)
LEARNING_RATE = 1e-6
OPEN_QUESTIONS = [
    "Write a short story about a robot that learns to paint.", "Why is the sky blue?",
    "Explain to a child how a bicycle stays upright.", "Give me three ideas for a birthday present.",
    "What should I see if I have one day in Paris, and in which order?", "Write a poem about the sea.",
    "Is it better to read a book or to watch the film first? Give reasons.", "How do I boil an egg?",
]  # fmt: skip
PHASES = ("rollout", "scoring", "updates", "whole iteration")
SIDES = ("ours", "--compile on", "TRL")


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
    def __init__(self, folder, prompts, minibatches, epochs, mean, longest, dtype="float32"):
        self.folder, self.prompts, self.samples, self.dtype = folder, prompts, len(prompts), dtype
        self.minibatches, self.epochs, self.longest = minibatches, epochs, longest
        self.lengths = common.forced_lengths("log-normal", self.samples, mean, longest)
        self.tokenizer = ppo_llm.HFTokenizer(folder)
        self.ids = [self.tokenizer.encode_prompt(text) for text in prompts]

    def ours(self, compiled: str, iterations: int) -> list[float]:
        """Seconds of PHASES in the last iteration."""
        silence = contextlib.redirect_stdout(io.StringIO())
        no_export = unittest.mock.patch.object(ppo_llm, "save_hf_checkpoint")  # at the end of a run
        first = unittest.mock.patch.object(ppo_llm, "first_training_seed", return_value=0)  # prompt i gets lengths[i]
        forced = common.forced(ppo_llm, self.lengths)
        with tempfile.TemporaryDirectory() as folder, silence, no_export, first, forced:
            ppo_llm.train(ppo_llm.Args(
                model=self.folder, env_id="Even-v0", env_kwargs=json.dumps({"prompts": self.prompts}),
                log_dir=folder, run_name="run", num_iterations=iterations, rollout_batch_size=self.samples,
                rollout_slots=self.samples, train_batch_size=self.samples // self.minibatches,
                ppo_epochs=self.epochs, kl_coef=0.05, max_prompt_tokens=max(map(len, self.ids)),
                max_new_tokens=self.longest, eval_episodes=1, save_every=0, compile=compiled,
                actor_lr=LEARNING_RATE, critic_lr=LEARNING_RATE, micro_batch_tokens=1024, device="cpu",
                dtype=self.dtype))  # fmt: skip
            row = common.read_lines(Path(folder, "run", "metrics.jsonl"))[-1]
        assert round(row["objective/response_tokens"] * self.samples) == sum(self.lengths), row
        phases = ("rollout", "score", "critic", "actor", "hand_over")
        seconds = {name: row[f"time/{name}"] for name in phases}
        updates, all_phases = seconds["critic"] + seconds["actor"], sum(seconds.values())
        return [seconds["rollout"], seconds["score"], updates, all_phases]

    def trl_tokenizer(self):
        """With a pad token that occurs nowhere else: TRL masks it, EOS and turns of a chat included."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder, padding_side="left")
        used = {None, tokenizer.eos_token_id}.union(*self.ids)  # None: the tokenizer may have no pad token
        free = [i for i in (tokenizer.pad_token_id, *tokenizer.all_special_ids) if i not in used]
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(free[0])
        return tokenizer

    def trl(self) -> list[float]:
        """The same of the second iteration."""
        load = lambda kind, **kwargs: kind.from_pretrained(self.folder, dtype=torch.float32, **kwargs)
        tokenizer = self.trl_tokenizer()
        data = datasets.Dataset.from_dict({"input_ids": self.ids})
        clock, generate, eos, pad = [], ppo_trainer.batch_generation, tokenizer.eos_token_id, tokenizer.pad_token_id

        def batch_generation(model, queries, *rest):
            clock.append(time.perf_counter())
            sample = model.generate
            forced = transformers.LogitsProcessorList([ForcedLengths(self.lengths, eos, pad)])
            model.generate = lambda **kwargs: sample(logits_processor=forced, **kwargs)
            try:
                tokens, logits = generate(model, queries, *rest)
            finally:
                model.generate = sample
                clock.append(time.perf_counter())
            assert (tokens[:, queries.shape[1] :] != pad).sum() == sum(self.lengths)
            return tokens, logits

        if self.dtype == "bfloat16":  # the trainer makes an Accelerator of its own, which reads this
            os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            config = PPOConfig(
                output_dir=folder, use_cpu=True, bf16=self.dtype == "bfloat16", gradient_checkpointing=False,
                report_to="none",
                save_strategy="no", disable_tqdm=True, num_sample_generations=0, total_episodes=2 * self.samples,
                per_device_train_batch_size=self.samples, gradient_accumulation_steps=1, kl_coef=0.05, temperature=1.0,
                num_mini_batches=self.minibatches, num_ppo_epochs=self.epochs, response_length=self.longest,
                local_rollout_forward_batch_size=self.samples, learning_rate=LEARNING_RATE,
                stop_token="eos")  # fmt: skip
            policy, reference = (load(transformers.AutoModelForCausalLM) for _ in range(2))
            policy.generation_config.pad_token_id = pad
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
            trainer.train()
        start, sampled, scored, end = clock[-4:]
        return [sampled - start, scored - sampled, end - scored, end - start]


class Even(common.Prompts):
    def step(self, response):
        return "", sum(ord(c) % 2 for c in response) / max(1, len(response)), True, False, {}


def one_run(settings: dict, side: str) -> dict:
    """Seconds of PHASES and bytes of memory, in this process."""
    bench, steps, step = Bench(**settings), [0], torch.optim.AdamW.step
    torch.optim.AdamW.step = lambda *args, **kwargs: (steps.__setitem__(0, steps[0] + 1), step(*args, **kwargs))[1]
    before = psutil.Process().memory_info().rss
    if side == "TRL":
        numbers, iterations, optimizers = bench.trl(), 2, 1  # actor and critic share it
    else:
        iterations, optimizers = 3 if side == "--compile on" else 2, 2
        numbers = bench.ours("on" if side == "--compile on" else "off", iterations)
    assert steps[0] == iterations * optimizers * bench.epochs * bench.minibatches, steps
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
    return dict(zip(PHASES, numbers, strict=True)) | {"bytes": peak - before}


def in_a_process(settings: dict, side: str) -> dict:
    command = [sys.executable, "-W", "ignore", __file__, "run", json.dumps(settings), side]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    print(side, out.splitlines()[-1], file=sys.stderr, flush=True)
    return json.loads(out.splitlines()[-1])


def pair(settings: dict, sides=SIDES) -> dict[str, dict]:
    """{side: seconds of PHASES, and bytes}, each side in a process of its own, one after the other."""
    return {side: in_a_process(settings, side) for side in sides}


def compare(settings: dict, pairs: int):
    """Prints the tables."""
    bench = Bench(**settings)
    sampled = sum(bench.lengths)
    tokens = sum(map(len, bench.ids)) + sampled
    print(f"{pairs} pairs, {bench.samples} samples, {tokens} tokens, {sampled} of them sampled; "
          f"{common.hardware(transformers, trl)}\n", flush=True)  # fmt: skip
    made = [pair(settings) for _ in range(pairs)]
    runs = {side: [run[side] for run in made] for side in SIDES}
    common.table(["seconds, median (range)", *runs, "TRL / ours", "TRL / --compile on"])
    for phase in PHASES:
        *ours, theirs = ([run[phase] for run in side] for side in runs.values())
        ratios = [[b / a for a, b in zip(side, theirs, strict=True)] for side in ours]
        common.line([phase, *map(common.spread, [*ours, theirs, *ratios])])
    memory = [common.spread([run["bytes"] / 1e9 for run in side]) for side in runs.values()]
    common.line(["peak memory, GB", *memory, "", ""])


def random_model(shape, samples, prompt, pairs, **sizes):
    folder, tokenizer = common.random_checkpoint(prompt + sizes["longest"], shape)
    print(", ".join(f"{key} {value}" for key, value in shape.items()))
    compare(dict(folder=folder, prompts=common.random_prompts(tokenizer, samples, prompt), **sizes), pairs)


def real_settings(folder: str, samples: int, pairs: int, **sizes) -> dict:
    prompts = [*common.sums(samples // 2), *OPEN_QUESTIONS[: samples // 2]]
    return dict(folder=folder, prompts=prompts, **sizes)


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    common.gym.register("Even-v0", entry_point=Even)
    what, *rest = [*sys.argv[1:], "random"]
    if what == "run":
        print(json.dumps(one_run(json.loads(rest[0]), rest[1])))
    elif what == "real":
        folder, *numbers = sys.argv[2:]
        sizes = REAL | dict(zip(("pairs", "samples"), map(int, numbers)))
        compare(real_settings(folder, **sizes), sizes["pairs"])
    else:
        random_model(**(SMOKE if what == "smoke" else CPU))


if __name__ == "__main__":
    main()
