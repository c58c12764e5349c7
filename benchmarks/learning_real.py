"""A real checkpoint learns: sums of one and of two digits, and the largest of four numbers.

    python benchmarks/checkpoints.py smollm2 DIR
    python benchmarks/learning_real.py DIR sums 1      # a task of TASKS, a seed: adds to data/learning_real.json
    python benchmarks/learning_real.py DIR largest 1 critic_lr=1e-5    # with other flags
    python benchmarks/learning_real.py DIR "sums, pairs" 1 trl         # in TRL's PPOTrainer (trl.experimental.ppo)
    python benchmarks/learning_real.py table          # prints a table
    python benchmarks/learning_real.py plot           # draws pictures/critic.png from data/critic.jsonl

A run of sums takes 40 to 75 minutes of one core, one beside TRL 10 to 14. Four times a run, outside of the time that is
counted, and after the last iteration, the sampler answers held-out prompts, sampled at temperature 1 and greedy, each
prompt once. TRL gets the same checkpoint, prompts in the same order, reward, batch size, epochs, minibatches, response
length, KL, gamma, lambda, clipping of ratios and values, AdamW, learning rates of both models with their schedule, and
clipping of gradients. PPOConfig has no flags for the schedule, the clipping of gradients and the critic's learning
rate. They are set in an optimizer that TRL's constructor accepts. TRL differs in its noise, in the order of samples
within an epoch, and in updating both models in each step.
"""

import contextlib
import dataclasses
import io
import json
import sys
import tempfile
import time
import types
import unittest.mock
import warnings

import common
import tasks  # noqa: F401, registers the environments
import torch
from common import ppo_llm

RESULTS = common.DATA / "learning_real.json"
SUMS = dict(env_id="Sums-v0", rollout_batch_size=32, train_batch_size=16, max_prompt_tokens=64, max_new_tokens=12)
FAST = SUMS | dict(num_iterations=8, actor_lr=2e-5, critic_lr=2e-5, gae_lambda=0.95, critic_lambda=0.95,
                   value_clip=0.2)  # as TRL
TASKS = {
    "sums": SUMS | dict(num_iterations=28),
    "sums, fast": FAST,
    "sums, as TRL": FAST | dict(max_grad_norm=1e9, lr_end=0.125),  # no clipping, the same mean learning rate
    "sums, short": SUMS | dict(num_iterations=10, actor_lr=2e-5, eval_env_kwargs='{"split": "test"}',
                               eval_episodes=100),  # the example of README.md
    "sums, pairs": FAST | dict(num_iterations=4, max_grad_norm=1e9, lr_end=0.25),  # as TRL, shorter
    "two digits, partial": SUMS | dict(env_kwargs='{"digits": 2, "partial": true}', num_iterations=24, actor_lr=2e-5,
                                       critic_lr=2e-5),
    "think": SUMS | dict(env_kwargs='{"digits": 2, "partial": true, "think": true}', num_iterations=14, actor_lr=2e-5,
                         max_new_tokens=60, micro_batch_tokens=1024),
    "largest": SUMS | dict(env_id="Largest-v0", num_iterations=14, max_new_tokens=40, micro_batch_tokens=1024),
}
HELD_OUT = {"Sums-v0": 100, "Largest-v0": 100}  # sampled answers


def between_points(flags: dict) -> int:
    """Iterations between two looks at the held-out prompts."""
    return max(2, flags["num_iterations"] // 4)


class HeldOut:
    """Reward, success and first responses of a model on held-out prompts."""

    def __init__(self, folder: str, flags: dict):
        self.tokenizer, self.points = ppo_llm.HFTokenizer(folder), []
        self.N = HELD_OUT[flags["env_id"]]
        kwargs = json.loads(flags.get("env_kwargs", "{}")) | {"split": "test"}
        self.envs = [ppo_llm.gym.make(flags["env_id"], disable_env_checker=True, **kwargs) for _ in range(self.N)]
        sizes = {name: flags[name] for name in ("max_prompt_tokens", "max_new_tokens")}
        self.args = ppo_llm.Args(**sizes)

    def add(self, samples: int, seconds: float, model: ppo_llm.Transformer) -> None:
        point = {"samples": samples, "seconds": seconds}
        decoder = ppo_llm.Decoder(model, self.N, self.tokenizer.stop_ids, self.args)
        greedily = dataclasses.replace(self.args, temperature=0.0)
        once = min(self.N, len(self.envs[0].unwrapped.rows))
        for kind, N, args in ("sampled", self.N, self.args), ("greedy", once, greedily):
            episodes = ppo_llm.rollout_share(decoder, self.tokenizer, self.envs, range(N), range(N), -1 - samples, args)
            texts = [[message["content"] for message in episode.conversation] for episode in episodes[:10]]
            point[kind] = {
                "success": sum(episode.success for episode in episodes) / N,
                "reward": sum(sum(episode.rewards) for episode in episodes) / N,
                "prompts": [prompt for prompt, _ in texts], "responses": [response for _, response in texts],
            }  # fmt: skip
        self.points.append(point)
        numbers = [f"{kind} {point[kind]['success']:.0%} {point[kind]['reward']:.2f}" for kind in ("sampled", "greedy")]
        print(samples, f"{seconds:.0f} s", *numbers, point["sampled"]["responses"][:2], file=sys.stderr, flush=True)


class Evaluation:
    """The evaluations of ppo_llm.py, before and after training."""

    def __init__(self, folder: str, flags: dict, seed: int):
        self.args = ppo_llm.fill_in_defaults(ppo_llm.Args(model=folder, seed=seed, device="cpu", **flags))
        self.tokenizer, self.points = ppo_llm.HFTokenizer(folder), []
        self.total = self.args.rollout_batch_size * self.args.n_samples_per_prompt * self.args.num_iterations

    def add(self, samples: int, seconds: float, model: ppo_llm.Transformer) -> None:
        if samples not in (0, self.total):
            return
        ppo_llm.connect(self.args)
        iteration = samples and self.args.num_iterations
        decoder = ppo_llm.Decoder(model, ppo_llm.decoder_rows(self.args), self.tokenizer.stop_ids, self.args)
        with ppo_llm.make_envs(self.args, evaluation=True) as envs, contextlib.redirect_stdout(sys.stderr):
            self.points.append(ppo_llm.evaluate(decoder, self.tokenizer, None, envs, iteration, self.args))


def ours(folder: str, flags: dict, seed: int) -> dict:
    held_out, samplers, rows = HeldOut(folder, flags), [], []
    copy_model, append = ppo_llm.copy_model, ppo_llm.Run.append
    per_iteration = flags["rollout_batch_size"] * flags.get("n_samples_per_prompt", 1)

    def watched_copy(model, args, sampler=False):
        copied = copy_model(model, args, sampler)
        if sampler:
            samplers.append(copied)
        return copied

    def append_and_evaluate(run, name, row):  # after the clock of an iteration has stopped
        append(run, name, row)
        if name != "metrics":
            return
        rows.append({name: row[name] for name in ("time/iteration", "objective/reward", "objective/kl",
                                                  "objective/response_tokens", "objective/entropy")}
                    | {"diagnosis": row["ratio/diagnosis"], "accuracy": row["objective/accuracy"]}
                    | {name: row[name] for name in row if name.startswith("critic/")})  # fmt: skip
        if len(rows) % between_points(flags) == 0 or len(rows) == flags["num_iterations"]:
            seconds = sum(each["time/iteration"] for each in rows)
            held_out.add(len(rows) * per_iteration, seconds, samplers[0])

    held_out.add(0, 0.0, ppo_llm.load_hf_checkpoint(folder)[0])
    with (
        tempfile.TemporaryDirectory() as runs,
        unittest.mock.patch.object(ppo_llm, "copy_model", watched_copy),
        unittest.mock.patch.object(ppo_llm.Run, "append", append_and_evaluate),
        unittest.mock.patch.object(ppo_llm, "save_hf_checkpoint"),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        ppo_llm.train(ppo_llm.Args(model=folder, seed=seed, device="cpu", log_dir=runs, save_every=0,
                                   eval_episodes=1, **flags))  # fmt: skip
    return {"points": held_out.points, "rows": rows}


class EnvReward(torch.nn.Module):
    """What TRL takes for a reward model: the environment's reward of the last response, at all positions of a row."""

    base_model_prefix = "backbone"

    def __init__(self, flags: dict, tokenizer, seeds: dict[str, int]):
        super().__init__()
        kwargs = json.loads(flags.get("env_kwargs", "{}"))
        self.env = ppo_llm.gym.make(flags["env_id"], disable_env_checker=True, **kwargs).unwrapped
        self.seeds, self.tokenizer = seeds, tokenizer  # of prompts

    def backbone(self, input_ids, **kwargs):
        rewards = []
        for ids in input_ids.tolist():
            question, _, response = self.tokenizer.decode(ids).rpartition("\nassistant\n")
            self.env.reset(seed=self.seeds[question.rpartition("\nuser\n")[2].strip()])
            rewards.append(self.env.step(response)[1])
        return types.SimpleNamespace(hidden_states=[torch.tensor(rewards)[:, None, None].expand(*input_ids.shape, 1)])

    def score(self, hidden):
        return hidden


def optimizer_of_both(policy, value, args) -> torch.optim.AdamW:
    """AdamW for TRL: each model has the learning rate, the schedule and the clipping that it has in ppo_llm.py."""
    models = [(list(policy.parameters()), args.actor_lr), (list(value.parameters()), args.critic_lr)]
    optimizer = torch.optim.AdamW([{"params": params, "lr": lr} for params, lr in models],
                                  betas=(0.9, 0.999), weight_decay=0.0, fused=True)  # fmt: skip
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    total, done = args.num_iterations * args.ppo_epochs * samples // args.train_batch_size, [0]

    def before_step(optimizer, *rest):
        for group, (params, lr) in zip(optimizer.param_groups, models):
            group["lr"] = ppo_llm.linear_schedule(lr, args.lr_end, done[0] / total)
            torch.nn.utils.clip_grad_norm_(params, args.max_grad_norm)
        done[0] += 1

    optimizer.register_step_pre_hook(before_step)
    return optimizer


def trl_trainer(folder: str, flags: dict, seed: int, runs: str):
    """TRL's PPOTrainer with the settings of `flags`."""
    import datasets
    import transformers
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    defaults = ppo_llm.fill_in_defaults(ppo_llm.Args(model=folder, seed=seed, **flags))
    torch.distributed.destroy_process_group()  # TRL makes its own, if any
    env = ppo_llm.gym.make(flags["env_id"], disable_env_checker=True, **json.loads(defaults.env_kwargs))
    N = defaults.rollout_batch_size
    total = N * defaults.num_iterations
    first = ppo_llm.first_training_seed(defaults, env)
    seeds = range(first, first + total)  # those of our training prompts
    prompts = [env.reset(seed=i)[0] for i in seeds]
    chat = ppo_llm.HFTokenizer(folder)
    ids = [chat.encode_prompt(prompt) for prompt in prompts]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = "<|endoftext|>"  # TRL masks the pad token, which is to occur nowhere else
    load = lambda kind, **kwargs: kind.from_pretrained(folder, dtype=torch.float32, **kwargs)
    policy, reference = (load(transformers.AutoModelForCausalLM) for _ in range(2))
    policy.generation_config.pad_token_id = tokenizer.pad_token_id
    value = load(transformers.AutoModelForSequenceClassification, num_labels=1)
    torch.nn.init.zeros_(value.score.weight)  # as ours
    optimizer = optimizer_of_both(policy, value, defaults)
    settings = PPOConfig(
        output_dir=runs, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", seed=seed,
        save_strategy="no", disable_tqdm=True, num_sample_generations=0, total_episodes=total,
        per_device_train_batch_size=N, gradient_accumulation_steps=1,
        num_mini_batches=N // defaults.train_batch_size, num_ppo_epochs=defaults.ppo_epochs,
        local_rollout_forward_batch_size=N, stop_token="eos",
        response_length=defaults.max_new_tokens, temperature=1.0, learning_rate=defaults.actor_lr,
        kl_coef=defaults.kl_coef, gamma=defaults.gamma, lam=defaults.gae_lambda, cliprange=defaults.clip_low,
        cliprange_value=1e9 if defaults.value_clip is None else defaults.value_clip, vf_coef=1.0)  # fmt: skip
    trainer = PPOTrainer(
        settings, tokenizer, policy, reference, EnvReward(flags, chat, dict(zip(prompts, seeds))),
        datasets.Dataset.from_dict({"input_ids": ids}), value,
        eval_dataset=datasets.Dataset.from_dict({"input_ids": ids[:8]}),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda iteration: 1.0)))  # fmt: skip
    trainer.dataloader = torch.utils.data.DataLoader(  # TRL's shuffles: here the prompts come in the order of ours
        trainer.train_dataset, batch_size=N, collate_fn=trainer.data_collator)  # fmt: skip
    return trainer


def trl(folder: str, flags: dict, seed: int, held_out: HeldOut | Evaluation | None = None) -> dict:
    held_out, rows = held_out or HeldOut(folder, flags), []
    model, _ = ppo_llm.load_hf_checkpoint(folder)
    with tempfile.TemporaryDirectory() as runs:
        trainer = trl_trainer(folder, flags, seed, runs)
        clock = [0.0, time.perf_counter()]  # seconds that count, start of the iteration

        def log(metrics, *rest):  # once, after the updates of an iteration
            clock[0] += time.perf_counter() - clock[1]
            rows.append({"time/iteration": time.perf_counter() - clock[1], "objective/kl": metrics["objective/kl"],
                         "objective/reward": metrics["objective/scores"]})  # fmt: skip
            if len(rows) % between_points(flags) == 0 or len(rows) == flags["num_iterations"]:
                model.load_state_dict(trainer.policy_model.state_dict(), strict=False)
                held_out.add(len(rows) * flags["rollout_batch_size"], clock[0], model)
            clock[1] = time.perf_counter()

        held_out.add(0, 0.0, model)
        trainer.log = log
        clock[1] = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    return {"points": held_out.points, "rows": rows}


def report() -> None:
    results = json.loads(RESULTS.read_text())
    common.table(["task", "seed", "side", *(f"{kind}, {when}" for kind in ("sampled", "greedy")
                                           for when in ("before", "after")),
                  "KL at the end", "s an iteration", "diagnoses"])  # fmt: skip
    for name, run in sorted(results.items()):
        first, last = run["points"][0], run["points"][-1]
        kl = [row["objective/kl"] for row in run["rows"][-5:]]
        seconds = sorted(row["time/iteration"] for row in run["rows"])[len(run["rows"]) // 2]
        causes = sorted({row.get("diagnosis") for row in run["rows"]} - {None})
        cells = [f"{point[kind]['success']:.2f}" for kind in ("sampled", "greedy") for point in (first, last)]
        kl = "" if None in kl else f"{sum(kl) / len(kl):.1f}"
        common.line([*name.split("/"), *cells, kl, f"{seconds:.0f}", ", ".join(causes) or "none"])


def plot() -> None:
    """What the critic learns at two learning rates, and the answers, in the runs of data/critic.jsonl."""
    title = "A rate of 1e-5 is too low for the critic, but with 1e-4 the answers are hardly any better"
    figure, axes = common.new_picture(title, 4.6, 2, 2, sharex=True)
    runs = common.read_lines(common.DATA / "critic.jsonl")
    for (explained, right), task in zip(axes, ("sums", "largest")):
        ends = []
        for rate, color in (1e-5, common.ORANGE), (1e-4, common.BLUE):
            done = [run for run in runs if (run["task"], run["critic_lr"]) == (task, rate)]
            curves = [run["explained_variance"] for run in done]
            samples = [done[0]["samples_per_iteration"] * (i + 1) for i in range(len(curves[0]))]
            common.draw_seeds(explained, samples, curves, color)
            curves = [list(run["right"].values()) for run in done]
            samples = [int(x) for x in done[0]["right"]]
            ends.append((common.draw_seeds(right, samples, curves, color), f"--critic-lr {rate:.0e}", color))
        explained.set(title=f"{task}: explained variance", ylim=(-0.2, 0.7))
        right.set(title=f"{task}: right answers, held-out prompts", ylim=(0, 1))
        common.percent(right)
        common.label_ends(right, [(y, text.replace("e-0", "e-"), color) for y, text, color in ends], samples[-1])
    axes[1][0].set_xlabel("samples"), axes[1][1].set_xlabel("samples")
    common.save_picture(figure, common.PICTURES / "critic.png")


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if sys.argv[1:] in (["table"], ["plot"]):
        return report() if sys.argv[1] == "table" else plot()
    if len(sys.argv) < 4 or sys.argv[2] not in TASKS:
        sys.exit(f"{__doc__}\nTasks: {', '.join(TASKS)}.")
    folder, task, seed, *rest = sys.argv[1:]
    side = "trl" if "trl" in rest else "ours"
    changes = {name: json.loads(value) for name, value in (pair.split("=") for pair in rest if "=" in pair)}
    flags = TASKS[task] | changes
    if task == "sums, pairs":
        flags["env_kwargs"] = json.dumps({"order": int(seed)})
    run = {"ours": ours, "trl": trl}[side](folder, flags, int(seed))
    changed = [f"{name}={value}" for name, value in changes.items()]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(results | {f"{task}/{seed}/{' '.join([side, *changed])}": run}))


if __name__ == "__main__":
    main()
