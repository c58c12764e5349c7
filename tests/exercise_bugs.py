"""THIS FILE HAS THE ANSWERS. It maps the letters of the exercises to the planted faults of faults.txt.

`words` says what a healthy script does, without naming the place. `check(ppo)` raises an error if the bug is there.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from exercise_rules import RULES, arguments, episode, small_model, small_run

SHORT = "--num-iterations 6 --sft-steps 30 --eval-episodes 64"
LONG = "--num-iterations 40 --eval-episodes 64"


@dataclass
class Bug:
    fault: str
    words: str
    check: Callable
    metrics: tuple[str, ...]  # in which a run shows the symptom
    flags: str = SHORT

    def command(self, script: str) -> str:
        return f"python {script} {self.flags}"


def keeps(exercise: str, part: str) -> Callable:
    """The check of one rule of "Write it yourself"."""
    [function] = [function for words, function in RULES[exercise] if part in words]
    return function


def require(condition, what: str = ""):
    if not condition:
        raise ValueError(what)


def entropy_is_positive(ppo):
    with small_run(ppo) as run:
        require(all(row["objective/entropy"] > 0 for row in run.rows))


def steps_are_those_of_the_plan(ppo):
    with small_run(ppo) as run:
        require([len(row["ratio/steps"]) for row in run.rows] == [4, 4] and run.summary["update_steps"] == 8)


def kl_leaves_zero(ppo):
    with small_run(ppo) as run:
        require(run.rows[0]["objective/kl"] == 0 and run.rows[1]["objective/kl"] != 0)


def sampler_is_the_actor(ppo):
    with small_run(ppo, num_iterations=3) as run:
        require(all(row["debug/sampler_trainer_logprob_diff"] < 1e-4 for row in run.rows))


def greedy_has_no_noise(ppo):
    args = arguments(ppo, max_prompt_tokens=4, max_new_tokens=4)
    decoder = ppo.Decoder(small_model(ppo), 1, [1], args)
    for temperature, scale in (0.7, 1.0), (0.0, 0.0):
        args.temperature = temperature
        decoder.begin([0], [episode(ppo, [3, 4], [0, 0], stop="")], args)
        require(float(decoder.noise_scale) == scale)


def values_move(ppo):
    with small_run(ppo) as run:
        require(run.rows[0]["critic/value_mean"] == 0 and abs(run.rows[1]["critic/value_mean"]) > 1e-6)
        require(len(run.rows[1]["ratio/steps"]) == 4)


def run_begins_at_ratio_one(ppo):
    with small_run(ppo) as run:
        require(run.rows[0]["ratio/first_dev"] == 0)


def temperature_of_the_reference(ppo):
    with small_run(ppo, temperature=0.5, actor_lr=5e-3, num_iterations=1, kl_coef=0.1) as run:
        require(abs(run.rows[0]["objective/kl"]) < 1e-4)


def steps_have_their_own_gradients(ppo):
    flags = dict(num_iterations=1, train_batch_size=8, ppo_epochs=3, actor_lr=0.0, critic_lr=0.0, max_grad_norm=9.0)
    with small_run(ppo, **flags) as run:
        norms = [step["grad_norm"] for step in run.rows[0]["ratio/steps"]]
        require(norms[0] > 0 and max(norms) < 1.01 * min(norms))


def targets_are_the_rewards(ppo):
    with small_run(ppo, env_id="environments:Constant-v0", kl_coef=0.0, critic_lr=0.0) as run:
        require(all(abs(row["critic/value_loss"] - 0.5) < 1e-4 for row in run.rows))


def every_sampled_token_counts(ppo):
    e = ppo.Episode(0)
    e.add([3, 1])
    e.add(list(range(9)), [-0.5] * 9)
    require(e.mask == [False] * 2 + [True] * 9 and e.logprobs == [0.0] * 2 + [-0.5] * 9)


def microbatches_do_not_matter(ppo):
    norms = []
    for budget in 4096, 30:
        flags = dict(num_iterations=1, micro_batch_tokens=budget, actor_lr=0.0, entropy_coef=0.01, kl_coef=0.0)
        with small_run(ppo, **flags) as run:
            first = run.rows[0]["ratio/steps"][0]
            norms.append((first["grad_norm"], run.rows[0]["critic/value_loss"]))
    require(torch.allclose(*map(torch.tensor, norms), rtol=1e-2))


def rewards_lie_at_the_end(ppo):
    tokenizer = ppo.HFTokenizer.from_texts(["abcde"])
    ids = tokenizer.encode("abcde")
    e = ppo.Episode(0)
    e.add(ids[:2])
    e.add(ids[2:], [0.0] * 3)
    ppo.add_rewards(e, 1.0, {}, 2, tokenizer)
    require(e.rewards == [0, 0, 0, 0, 1.0])


def rate_zero_moves_nothing(ppo):
    with small_run(ppo, actor_lr=0.0, num_iterations=1) as run:
        require(run.rows[0]["ratio/relative_update"] == 0 and run.rows[0]["actor/lr"] == 0)


def sorting_is_rewarded(ppo):
    env = ppo.SortDigits()
    env.answer = "12458"
    found = [env.step(answer)[1] for answer in ("12458", "12548", "1245", "124588", "1", "")]
    require(found == [1.0, 0.6, 0.0, 0.0, 0.0, 0.0])


def demonstrations_are_random(ppo):
    env = ppo.SortDigits()
    shown = [(env.reset(seed=seed)[1]["demonstration"], env.answer) for seed in range(50)]
    require(all(sorted(text) == sorted(answer) for text, answer in shown))
    require(sum(text == answer for text, answer in shown) < 10)


def every_iteration_has_prompts_of_its_own(ppo):
    with small_run(ppo, env_id="SortDigits-v0") as run:
        prompts = [line for line in (run.folder / "completions.jsonl").read_text().splitlines()]
    first, second = prompts[:4], prompts[4:]
    of = lambda lines: {ppo.json.loads(line)["prompt"] for line in lines}
    require(len(first) == len(second) == 4 and not of(first) & of(second))


def given_text_is_no_action(ppo):
    """A first turn, and the environment's answer to it."""
    tokenizer = ppo.HFTokenizer.from_texts(["abcde"])
    env = types.SimpleNamespace(step=lambda response: ("cd", 0.5, False, False, {}))
    e = ppo.Episode(0, prompt_length=2)
    e.add(tokenizer.encode("ab"))
    e.add([*tokenizer.encode("e"), tokenizer.eos_id], [-0.5, -0.5])
    e.end_turn(env, 2, tokenizer, arguments(ppo, max_new_tokens=9))
    require(e.ids[4:] == tokenizer.encode("cd") and e.mask == [False, False, True, True, False, False])
    require(e.logprobs[4:] == [0, 0] and e.rewards == [0, 0, 0, 0.5, 0, 0])


def noise_has_four_causes(ppo):
    key = lambda *case: int(ppo.sample_keys(*case)[0])
    keys = [key(1, 0, [0]), key(2, 0, [0]), key(1, 1, [0]), key(1, 0, [1])]
    require(len(set(keys)) == 4)


def export_is_the_actor(ppo):
    with small_run(ppo, actor_lr=1e-2) as run:
        exported, _ = ppo.load_hf_checkpoint(run.folder / "model")
        saved = torch.cat([p.detach().flatten() for p in exported.parameters()])
    with small_run(ppo, num_iterations=1, actor_lr=0.0) as run:
        start, _ = ppo.load_hf_checkpoint(run.folder / "model")
        first = torch.cat([p.detach().flatten() for p in start.parameters()])
    require(float((saved - first).norm() / first.norm()) > 0.01)


SHIFT = "comes from the output one token earlier"
KL, RATIO = "objective/kl", "ratio/first_dev"

BUGS = {
    # --- A number that cannot be
    "A": Bug("entropy_estimate_with_the_wrong_sign", "`objective/entropy` is positive.", entropy_is_positive,
             ("objective/entropy", "actor/entropy")),
    "B": Bug("reference_is_the_actor", "The KL is 0 in the first iteration, and is not 0 in the second.",
             kl_leaves_zero, (KL,)),
    "C": Bug("last_minibatch_dropped", "An iteration makes the optimizer steps that the plan announces.",
             steps_are_those_of_the_plan, ("ratio/steps",)),
    "D": Bug("denominator_is_samples", "`actor/clipfrac` is a share of the tokens.",
             keeps("minibatches", "without the prompts"), ("actor/clipfrac", "actor/grad_norm", "actor/entropy")),
    "E": Bug("kl_is_part_of_the_logged_reward", "The logged rewards are numbers that the environment can give.",
             keeps("rewards", "which is logged"), ("objective/reward", KL), f"{SHORT} --kl-coef 0.1"),
    "F": Bug("greedy_with_noise", "A greedy evaluation does not depend on the noise.", greedy_has_no_noise, (), LONG),
    "G": Bug("critics_optimizer_holds_the_actor", "The values are 0 in the first iteration, and move in the second.",
             values_move, ("critic/value_mean", "critic/grad_norm")),
    # --- A check of the script speaks
    "H": Bug("dropout_in_training", "The first ratio of a run is exactly 1.", run_begins_at_ratio_one, (RATIO,)),
    "I": Bug("sampler_never_gets_new_weights", "Sampler and actor agree about the log-probs in every iteration.",
             sampler_is_the_actor, ("debug/sampler_trainer_logprob_diff", KL)),
    "J": Bug("no_shift_by_one", "Sampler and actor agree about the log-probs in the first iteration.",
             keeps("shift", SHIFT), ("debug/sampler_trainer_logprob_diff", RATIO)),
    # --- A number that is too large or too small
    "K": Bug("truncation_penalty_of_every_token", "The penalty lowers the mean reward by the share of cut samples.",
             keeps("rewards", "loses truncation_penalty once"), ("objective/reward", "objective/truncated"),
             f"{SHORT} --truncation-penalty 0.5"),
    "L": Bug("kl_reward_with_the_wrong_sign", "A larger --kl-coef keeps the policy nearer to the reference.",
             keeps("rewards", "reduced by kl_coef"), (KL,), f"{SHORT} --kl-coef 0.1"),
    "M": Bug("reference_at_temperature_one", "The KL of the first iteration is 0 at every temperature.",
             temperature_of_the_reference, (KL,), f"{SHORT} --temperature 0.7"),
    "N": Bug("gradients_never_cleared", "With learning rates of 0, all steps on the same samples have one gradient.",
             steps_have_their_own_gradients, ("actor/grad_norm", "critic/grad_norm")),
    "O": Bug("critic_learns_advantages", "With a reward of 1 and values of 0, the value loss is 0.5.",
             targets_are_the_rewards, ("critic/grad_norm", "critic/explained_variance", "critic/value_mean")),
    "P": Bug("answers_of_another_length_are_rewarded", "An answer of another length earns nothing.",
             sorting_is_rewarded, ("objective/reward", "objective/accuracy", "objective/response_tokens")),
    "Q": Bug("policy_denominator_of_the_microbatch", "--micro-batch-tokens does not change a gradient.",
             microbatches_do_not_matter, ("actor/grad_norm", "actor/clipfrac"), f"{SHORT} --micro-batch-tokens 256"),
    "R": Bug("learning_rate_never_set", "With a learning rate of 0 the weights stay as they are.",
             rate_zero_moves_nothing, ("actor/lr", "ratio/relative_update")),
    # --- A run that does not learn what it should
    "S": Bug("stop_token_outside_the_mask", "Every sampled token is trained on.", every_sampled_token_counts,
             ("objective/truncated", "objective/response_tokens")),
    "T": Bug("advantages_whitened_per_sample", "Samples with a higher reward have higher advantages.",
             keeps("advantages", "all samples together"), ("actor/grad_norm", "objective/reward")),
    "U": Bug("returns_without_values", "The targets of the critic do not depend on its values, if lambda is 1.",
             keeps("gae", "plus the value"), ("critic/return_mean", "critic/value_mean", "objective/reward"),
             LONG),
    "V": Bug("values_after_the_token", "A value does not depend on the token that is sampled there.",
             keeps("shift", "has not seen it"), ("critic/explained_variance", "objective/reward"), LONG),
    "W": Bug("advantages_of_another_order_of_rows", "A sample is trained on its own advantages.",
             keeps("advantages", "all samples together"), ("objective/reward",),
             LONG),
    # --- No metric shows it
    "X": Bug("feedback_in_the_mask", "Only tokens that the policy sampled are trained on.",
             given_text_is_no_action, ()),
    "Y": Bug("noise_without_iteration", "Two iterations draw different noise for the same prompt.",
             noise_has_four_causes, ()),
    "Z": Bug("export_is_the_reference", "The folder model/ has the weights that the last evaluation used.",
             export_is_the_actor, ()),
}  # fmt: skip
INVISIBLE = "XYZ"
