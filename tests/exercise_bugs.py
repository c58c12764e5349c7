"""THIS FILE HAS THE ANSWERS. It maps the letters of the exercises to the planted faults of faults.txt.

`words` says what a healthy script does, without naming the place. `check(ppo)` raises Broken, with what was expected
and what was found, if the bug is there.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
from exercise_rules import RULES, Broken, arguments, episode, flat_weights, small_model, small_run

# Without checkpoints: that of B would fail, and the message would name the bug.
SHORT = "--num-iterations 6 --sft-steps 30 --eval-episodes 64 --save-every 0"
LONG = "--num-iterations 40 --eval-episodes 64 --save-every 0"


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


def expect(what: str, expected, got, holds: bool | None = None, **given):
    """Raise Broken unless `got` is `expected`, or unless `holds`."""
    if not (got == expected if holds is None else holds):
        raise Broken(given, expected, got, what)


def expect_metric(run, name: str, i: int, expected, holds: Callable | None = None):
    """A metric of iteration i, counted from 1."""
    got = run.rows[i - 1][name]
    expect(f"{name} in iteration {i}", expected, got, holds and holds(got))


def entropy_is_minus_the_mean_logprob(ppo):
    with small_run(ppo) as run:
        for i, e in enumerate(run.experiences, 1):
            expected = -float(e.old_logprobs[e.mask].mean())
            expect_metric(run, "objective/entropy", i, expected, lambda x: abs(x - expected) < 1e-4)


def steps_are_those_of_the_plan(ppo):
    with small_run(ppo) as run:
        for i in 1, 2:
            got = len(run.rows[i - 1]["ratio/steps"])
            expect(f"optimizer steps of the actor in iteration {i}", 4, got, ppo_epochs=2, minibatches=2)
        expect("update_steps in summary.json", 8, run.summary["update_steps"])


def kl_leaves_zero(ppo):
    """After a warm start, which is no part of PPO."""
    with small_run(ppo, num_iterations=3, sft_steps=2) as run:
        expect_metric(run, "objective/kl", 1, 0)
        for i in 2, 3:
            expect_metric(run, "objective/kl", i, "another number than 0", lambda x: x != 0)
        first, *others = [weights["reference"] for weights in run.weights]
        same = all(torch.equal(first, other) for other in others)
        expect("weights of the reference in iterations 2 and 3", "those of iteration 1", "others", same)


def statistics_are_means_per_token(ppo):
    """With a learning rate of 0 all minibatches have the entropies of one policy."""
    method, means = ppo.Transformer.sampled_logprobs, []

    def remembered(self, mb, temperature):
        logprobs, entropies = method(self, mb, temperature)
        if torch.is_grad_enabled():
            means.append(float(entropies.detach()[mb.mask].mean()))
        return logprobs, entropies

    with mock.patch.object(ppo.Transformer, "sampled_logprobs", remembered):
        with small_run(ppo, num_iterations=1, actor_lr=0.0) as run:
            means = means[-len(run.rows[0]["ratio/steps"]) :]  # The warm start has others.
            expected = sum(means) / len(means)
            expect_metric(run, "actor/entropy", 1, expected, lambda x: abs(x - expected) < 1e-3)
    keeps("minibatches", "without the prompts")(ppo)


def sampler_is_the_actor(ppo):
    """In every iteration and in the last evaluation. The actor itself moves."""
    name, evaluate, samplers = "debug/sampler_trainer_logprob_diff", ppo.evaluate, []

    def remembered(decoder, *rest):
        samplers.append(flat_weights(decoder.sampler))
        return evaluate(decoder, *rest)

    with mock.patch.object(ppo, "evaluate", remembered), small_run(ppo, num_iterations=3) as run:
        for i in 1, 2, 3:
            expect_metric(run, name, i, "less than 0.0001", lambda x: x < 1e-4)
            expect_metric(run, "ratio/relative_update", i, "more than 0", lambda x: x > 0)
        for i in 1, 2:
            same = torch.equal(run.weights[0]["actor"], run.weights[i]["actor"])
            expect(f"weights of the actor in iteration {i + 1}", "others than in iteration 1", "the same", not same)
        same = torch.equal(samplers[-1], flat_weights(run.actor))
        expect("weights that sample in the last evaluation", "the actor's", "others", same)


def greedy_has_no_noise(ppo):
    args = arguments(ppo, max_prompt_tokens=4, max_new_tokens=4)
    decoder = ppo.Decoder(small_model(ppo), 1, [1], args)
    for temperature, scale in (0.7, 1.0), (0.0, 0.0):
        args.temperature = temperature
        decoder.begin([0], [episode(ppo, [3, 4], [0, 0], stop="")], args)
        expect("factor of the noise", scale, float(decoder.noise_scale), temperature=temperature)


def values_move(ppo):
    with small_run(ppo) as run:
        expect_metric(run, "critic/value_mean", 1, 0)
        expect_metric(run, "critic/value_mean", 2, "another number than 0", lambda x: abs(x) > 1e-6)
        expect_metric(run, "ratio/relative_update", 1, "more than 0", lambda x: x > 0)
        expect_metric(run, "ratio/first_dev", 2, 0)
        expect("optimizer steps of the actor in iteration 2", 4, len(run.rows[1]["ratio/steps"]))


def run_begins_at_ratio_one(ppo):
    with small_run(ppo) as run:
        expect_metric(run, "ratio/first_dev", 1, 0)


def temperature_of_the_reference(ppo):
    with small_run(ppo, temperature=0.5, actor_lr=5e-3, num_iterations=1, kl_coef=0.1) as run:
        expect_metric(run, "objective/kl", 1, 0, lambda x: abs(x) < 1e-4)


def steps_have_their_own_gradients(ppo):
    """And a gradient that is NaN costs one step."""
    flags = dict(num_iterations=1, train_batch_size=8, ppo_epochs=3, actor_lr=0.0, critic_lr=0.0, max_grad_norm=9.0)
    with small_run(ppo, **flags) as run:
        norms = [step["grad_norm"] for step in run.rows[0]["ratio/steps"]]
        same = norms[0] > 0 and max(norms) < 1.01 * min(norms)
        expect("gradient norms of three steps on the same samples", "equal numbers", norms, same, actor_lr=0)
    optimizer_step, spoiled = ppo.optimizer_step, []

    def with_one_bad_gradient(model, *rest):
        if model.head == "lm" and not spoiled:
            next(model.parameters()).grad.fill_(math.nan)
            spoiled.append(True)
        return optimizer_step(model, *rest)

    with mock.patch.object(ppo, "optimizer_step", with_one_bad_gradient), small_run(ppo, num_iterations=1) as run:
        skipped = [bool(step["skipped"]) for step in run.rows[0]["ratio/steps"]]
        given = {"gradient_of_the_first_step": "NaN"}
        expect("steps that are skipped", [True, False, False, False], skipped, **given)


def targets_are_the_rewards(ppo):
    with small_run(ppo, env_id="environments:Constant-v0", kl_coef=0.0, critic_lr=0.0) as run:
        for i in 1, 2:
            expect_metric(run, "critic/value_loss", i, 0.5, lambda x: abs(x - 0.5) < 1e-4)


def every_sampled_token_counts(ppo):
    e = ppo.Episode(0)
    e.add([3, 1])
    e.add(list(range(9)), [-0.5] * 9)
    given = {"prompt": [3, 1], "response": list(range(9))}
    expect("mask", [False] * 2 + [True] * 9, e.mask, **given)
    expect("logprobs", [0.0] * 2 + [-0.5] * 9, e.logprobs, **given)


def microbatches_do_not_matter(ppo):
    found = []
    for budget in 4096, 30:
        flags = dict(num_iterations=1, micro_batch_tokens=budget, actor_lr=0.0, entropy_coef=0.01, kl_coef=0.0)
        with small_run(ppo, **flags) as run:
            first = run.rows[0]["ratio/steps"][0]
            found.append([first["grad_norm"], run.rows[0]["critic/value_loss"]])
    what = "gradient norm of the actor's first step, and critic/value_loss, with --micro-batch-tokens 30"
    expect(what, found[0], found[1], torch.allclose(*map(torch.tensor, found), rtol=1e-2))


def rate_zero_moves_nothing(ppo):
    with small_run(ppo, actor_lr=0.0, num_iterations=1) as run:
        expect_metric(run, "actor/lr", 1, 0)
        expect_metric(run, "ratio/relative_update", 1, 0)


def sorting_is_rewarded(ppo):
    env = ppo.SortDigits()
    env.answer = "12458"
    rewards = {"12458": 1.0, "12548": 0.6, "1245": 0.0, "124588": 0.0, "1": 0.0, "": 0.0}
    for answer, reward in rewards.items():
        expect("reward", reward, env.step(answer)[1], right_answer="12458", answer=repr(answer))


def given_text_is_no_action(ppo):
    """A first turn, and the environment's answer to it."""
    tokenizer = ppo.HFTokenizer.from_texts(["abcde"])
    env = types.SimpleNamespace(step=lambda response: ("cd", 0.5, False, False, {}))
    e = ppo.Episode(0, prompt_length=2)
    e.add(tokenizer.encode("ab"))
    e.add([*tokenizer.encode("e"), tokenizer.eos_id], [-0.5, -0.5])
    e.end_turn(env, 2, tokenizer, arguments(ppo, max_new_tokens=9))
    given = {"prompt": "ab", "response": "e<eos>", "answer_of_the_environment": "cd"}
    expect("ids of the answer", tokenizer.encode("cd"), e.ids[4:], **given)
    expect("mask", [False, False, True, True, False, False], e.mask, **given)
    expect("logprobs of the answer", [0, 0], e.logprobs[4:], **given)
    expect("rewards", [0, 0, 0, 0.5, 0, 0], e.rewards, **given)


def noise_has_four_causes(ppo):
    """Any two samples have different keys: of another seed, another iteration or another position."""
    names = "seed", "iteration", "position of the sample in the rollout"
    first = int(ppo.sample_keys(1, 0, [0])[0])
    for name, other in zip(names, [(2, 0, [0]), (1, 1, [0]), (1, 0, [1])]):
        got = int(ppo.sample_keys(*other)[0])
        expect(f"key of the noise with another {name}", f"another number than {first}", got, got != first)
    causes = {}
    for seed in 1, 2, 3:
        for iteration in -2, -1, 0, 1, 2, 3:
            for i, key in enumerate(ppo.sample_keys(seed, iteration, range(1024)).tolist()):
                causes.setdefault(key, []).append((seed, iteration, i))
    found = next((three for three in causes.values() if len(three) > 1), [])
    expect("(seed, iteration, position) of samples with one key", [], found)


def export_is_the_actor(ppo):
    """To the last bit, although the sampler's weights are rounded."""
    with small_run(ppo, actor_lr=1e-2, dtype="bfloat16") as run:
        exported, _ = ppo.load_hf_checkpoint(run.folder / "model")
        difference = float((flat_weights(exported) - flat_weights(run.actor)).abs().max())
        moved = float((flat_weights(run.actor) - run.weights[0]["actor"]).abs().max())
    expect("largest change of a weight by PPO", "more than 0", moved, moved > 0)
    expect("largest difference between the weights in model/ and those of the actor", 0.0, difference)


def kl_is_that_of_a_sample(ppo):
    with small_run(ppo) as run:
        e = run.experiences[1]
        expected = float((e.old_logprobs - e.ref_logprobs)[e.mask].sum()) / len(e.mask)
        expect_metric(run, "objective/kl", 2, expected, lambda x: abs(x - expected) < 1e-4 * abs(expected))


def means_are_those_of_the_experience(ppo):
    with small_run(ppo) as run:
        for i, e in enumerate(run.experiences, 1):
            for metric, x in ("critic/return_mean", e.returns), ("critic/value_mean", e.values):
                expected = float(x[e.mask].mean())
                expect_metric(run, metric, i, expected, lambda x: abs(x - expected) < 1e-5)


def norms_are_those_before_clipping(ppo):
    with small_run(ppo, num_iterations=1, max_grad_norm=1e-3) as run:
        norm = run.rows[0]["ratio/steps"][0]["grad_norm"]
        expect("norm of the actor's first gradient", "more than 0.001", norm, norm > 1e-3, max_grad_norm=1e-3)


SHIFT = "comes from the output one token earlier"
KL, RATIO = "objective/kl", "ratio/first_dev"

BUGS = {
    # --- A number that cannot be
    "A": Bug("entropy_estimate_with_the_wrong_sign",
             "`objective/entropy` is minus the mean log-prob of the sampled tokens.", entropy_is_minus_the_mean_logprob,
             ("objective/entropy", "actor/entropy")),
    "B": Bug("reference_is_the_actor", "The KL is 0 in the first iteration, and is not 0 in the second.",
             kl_leaves_zero, (KL,)),
    "C": Bug("last_minibatch_dropped", "An iteration makes the optimizer steps that the plan announces.",
             steps_are_those_of_the_plan, ("ratio/steps",)),
    "D": Bug("denominator_is_samples", "`actor/clipfrac` and `actor/entropy` are means per sampled token.",
             statistics_are_means_per_token, ("actor/clipfrac", "actor/grad_norm", "actor/entropy")),
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
    "K": Bug("truncation_penalty_of_every_token", "A cut sample loses --truncation-penalty once, at its last token.",
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
    "P": Bug("answers_of_another_length_are_rewarded",
             "The reward is the share of digits in place, and 0 for an answer of another length.", sorting_is_rewarded,
             ("objective/reward", "objective/accuracy", "objective/response_tokens")),
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
             keeps("gae", "whatever lambda is"), ("critic/return_mean", "critic/value_mean", "objective/reward"),
             LONG),
    "V": Bug("values_after_the_token", "A value does not depend on the token that is sampled there.",
             keeps("shift", "has not seen it"), ("critic/explained_variance", "objective/reward"), LONG),
    "W": Bug("advantages_of_another_order_of_rows", "A sample is trained on its own advantages.",
             keeps("advantages", "all samples together"), ("objective/reward",),
             LONG),
    # --- No metric shows it
    "X": Bug("feedback_in_the_mask", "Only tokens that the policy sampled are trained on.",
             given_text_is_no_action, ()),
    "Y": Bug("noise_without_iteration", "Two samples of any iterations and positions have different keys of noise.",
             noise_has_four_causes, ()),
    "Z": Bug("export_is_the_reference", "The folder model/ has the weights that the last evaluation used.",
             export_is_the_actor, ()),
}  # fmt: skip
INVISIBLE = "XYZ"

GAP = "debug/sampler_trainer_logprob_diff"

# The bugs of a class, by their names in faults.txt: the metric that shows each of them in the six iterations of
# exercise_class.py, and its check. They have no letters, and no page tells their solutions.
HIDDEN = {
    "whitening_does_not_centre": ("actor/policy_loss", keeps("whiten", "mean 0")),
    "mean_over_padding": ("objective/entropy", keeps("whiten", "do not count, even if they are NaN")),
    "clip_min_for_max": ("objective/kl", keeps("surrogate", "The clip never hides")),
    "approx_kl_is_k1": ("actor/approx_kl", keeps("surrogate", "approx_kl is the sum")),
    "clipfrac_of_one_side": ("actor/clipfrac", keeps("surrogate", "clipfrac counts")),
    "ratio_dev_is_signed": ("actor/ratio_dev", keeps("surrogate", "ratio_dev is the sum")),
    "value_loss_without_half": ("critic/value_loss", keeps("value", "half the square")),
    "kl_the_other_way_round": ("objective/kl", keeps("kl", "It is negative where")),
    "denominator_counts_the_prompt": ("actor/entropy", keeps("minibatches", "without the prompts")),
    "kl_per_token": ("objective/kl", kl_is_that_of_a_sample),
    "return_mean_of_the_values": ("critic/return_mean", means_are_those_of_the_experience),
    "value_mean_over_padding": ("critic/value_mean", means_are_those_of_the_experience),
    "reward_on_the_first_token_of_a_turn": ("critic/return_mean", given_text_is_no_action),
    "advantages_not_whitened": ("actor/grad_norm", keeps("advantages", "all samples together")),
    "critic_head_random": ("critic/value_mean", values_move),
    "critic_stepped_by_the_actors_optimizer": ("critic/value_mean", values_move),
    "rollout_without_temperature": (GAP, keeps("sampling", "as often as softmax")),
    "logprob_of_the_previous_token": (GAP, keeps("sampling", "The log-prob is that")),
    "returns_without_the_kl": ("critic/return_mean", keeps("advantages", "They are made of `rewards`")),
    "gradient_norm_after_clipping": ("actor/grad_norm", norms_are_those_before_clipping),
}
