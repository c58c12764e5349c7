"""The exercises: blanks fail, solutions pass, typical mistakes are named, and the checks of bugs see them."""

import contextlib
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import time
import types

import exercise
import exercise_bodies
import exercise_bugs
import exercise_class
import exercise_rules
import plant_faults
import pytest
import torch
import tyro
from conftest import ROOT, slow_but
from safetensors.torch import load_file

pytestmark = pytest.mark.shared
SCRIPT = exercise.SCRIPT.read_text()
PAGE, SOLUTIONS = ((ROOT / "docs" / f"{page}.md").read_text() for page in ("exercises", "solutions"))
FAULTS = plant_faults.read_faults()


def broken_rules(name, text):
    """The words of the rules that a script of this text breaks, and what `check` says."""
    said = []
    module = healthy() if text == SCRIPT else exercise.load("exercise.py", text)
    return exercise.check_blank(name, exercise.try_rules(name, module, "exercise.py"), said.append), "\n".join(said)


@functools.cache
def healthy():
    return exercise.load("ppo_llm.py", SCRIPT)


def test_the_script_keeps_all_rules():
    assert exercise.BLANKS.keys() == exercise_rules.RULES.keys() and len(exercise.BLANKS) >= 12
    for name in exercise.BLANKS:
        broken, said = broken_rules(name, SCRIPT)
        assert not broken, said
        assert f"All {len(exercise_rules.RULES[name])} rules hold" in said


@pytest.mark.parametrize("name", slow_but(["kl", "gae", "surrogate", "packing"], exercise.BLANKS))
def test_a_blank_is_named_as_not_written_and_its_solution_passes(name):
    text = exercise.blank_text(name)
    broken, said = broken_rules(name, text)
    assert broken[-1] == exercise.NOT_YET and "your part of" in said
    left_out = SCRIPT.splitlines()
    if hidden := exercise.BLANKS[name].hidden:  # the end of the docstring
        end = '"""\n    # >>> Your part'
        assert hidden not in text and text.count(end) == 1
        text = text.replace(end, hidden + end)
    lines = text.splitlines()
    begins = [i for i, line in enumerate(lines) if f">>> Your part of `{name}` begins here" in line]
    ends = [i for i, line in enumerate(lines) if "<<< Your part ends here" in line]
    gaps = exercise.BLANKS[name].gaps
    assert len(begins) == len(ends) == len(gaps)
    for begin, end, gap in sorted(zip(begins, ends, gaps), reverse=True):
        lines[begin : end + 1] = [left_out[i] for i in exercise.lines_of(gap)]
    assert "\n".join(lines) + "\n" == SCRIPT


# Mistakes of students: {exercise: [(a fault of faults.txt or (old, new), a part of the rule that is named)]}.
WRONG = {
    "schedule": [
        ("learning_rate_decays_to_zero", "At progress 1"),
        (("min(1.0, progress)", "progress"), "Beyond progress 1"),
        (("(1 - (1 - end_fraction) * min", "(1 + (1 - end_fraction) * min"), "Half way"),
    ],
    "value": [
        ("value_loss_without_half", "half the square"),
        ("value_clip_by_min", "The larger of"),
        ("values_clipped_around_returns", "moved further than"),
        ("values_that_fall_are_not_clipped", "up or down"),
        ((".clamp(-clip, clip)", ".clamp(min=-clip)"), "up or down"),
        (("if clip is not None:", "if clip:"), "A clip of 0"),
        (("loss = 0.5 * losses.sum() / denom", "loss = 0.5 * losses.sum() / mask.sum()"), "divided by `denom`"),
        (("values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))",
          "values, returns = values * mask, returns * mask"), "even if they are NaN"),
        (("values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))\n", "\n"),
         "even if their return or old value is NaN"),
    ],
    "kl": [
        ("kl_the_other_way_round", "It is negative where"),
        (("return logratio.square() / 2", "return logratio.square()"), "half the square"),
        (("return torch.expm1(-logratio) + logratio", "return torch.exp(-logratio) - 1 + logratio"), "use expm1"),
        (("return torch.expm1(-logratio) + logratio", "return torch.expm1(logratio) - logratio"), "r - 1 - log r"),
    ],
    "whiten": [
        ("whitening_by_the_biased_deviation", "minus 1"),
        ("whitening_does_not_centre", "have mean 0"),
        ("whitening_with_a_large_epsilon", "but for the 1e-8"),
        (("centered * torch.rsqrt(variance + 1e-8)", "centered / variance.sqrt()"), "and not NaN"),
        (("centered = torch.where(mask, x - masked_mean(x, mask), 0.0)", "centered = x - masked_mean(x, mask)"),
         "become 0"),
    ],
    "gae": [
        ("gae_chain_through_given_tokens", "passes the advantage through unchanged"),
        ("gae_next_value_of_a_given_token", "not of a token of the environment"),
        ("gae_without_gamma_in_the_chain", "factor gamma * lambda"),
        ("gae_without_gamma_in_delta", "With lambda 0"),
        ("returns_without_values", "plus the value"),
        (("nextvalues = lastgaelam = values.new_zeros(len(values))",
          "nextvalues, lastgaelam = values[:, -1], values.new_zeros(len(values))"), "after the last sampled token"),
    ],
    "surrogate": [
        ("clip_bounds_swapped", "earns no more than (1 + clip_high)"),
        ("clip_min_for_max", "The clip never hides"),
        ("dual_clip_of_positive_advantages", "dual_clip"),
        ("ratio_without_gradient", "The gradient of a log-prob"),
        ("clipfrac_of_one_side", "clipfrac"),
        ("approx_kl_is_k1", "approx_kl is the sum"),
        ("ratio_dev_is_signed", "ratio_dev"),
        ("loss_divided_by_the_microbatch", "divided by `denom`"),
        (("pg_loss1 = -advantages * ratio", "pg_loss1 = advantages * ratio"), "minus its advantage"),
        ((".clamp(-20, 20)", ""), "500"),
    ],
    "sampling": [
        ("logprob_of_the_previous_token", "The log-prob is that"),
        ("noise_of_the_row", "not on its place"),
        (("logits /= decoder.temperature", "pass"), "as often as softmax"),
        (("token = noisy_logits.argmax(",
          "token = noisy_logits.masked_fill(logits < logits.amax(-1, True) - 4.6, -math.inf).argmax("),
         "none are filtered out"),
        (("logits + decoder.noise_scale * noise", "logits + noise"), "At noise_scale 0"),
        (("logits + decoder.noise_scale * noise", "logits + float(decoder.noise_scale) * noise"), "does not wait"),
        (("gumbel_noise(decoder.noise_keys, decoder.length, logits", "gumbel_noise(decoder.noise_keys, 0 * decoder.length, logits"),  # noqa: E501
         "of the index that its new token"),
        (("token = noisy_logits.argmax(-1, keepdim=True)",
          "token = torch.multinomial(logits.softmax(-1), 1)"), "not on its place"),
    ],
    "shift": [
        ("no_shift_by_one", "one token earlier"),
        ("first_sampled_token_from_another_sample", "one token earlier"),
        (("return x[packing.sampled - 1]", "return x[packing.flat_index[packing.sampled] - 1]"), "one token earlier"),
        (("return x[packing.sampled - 1]", "return packing.unpack(x, packing.flat_index)"),
         "The result is [m, hidden]"),
        (("x = self.hidden_states(packing.pack(tokens), packing.position, packing=packing)",
          "x = self.hidden_states(packing.pack(tokens)[None], packing.position[None])[0]"),
         "see nothing of the sample before it"),
    ],
    "rewards": [
        ("kl_reward_with_the_wrong_sign", "reduced by kl_coef"),
        ("truncation_penalty_on_the_padding", "at its last token"),
        ("truncation_penalty_of_every_token", "once"),
        ("truncation_penalty_for_the_environments_end", "the environment ended"),
        ("kl_is_part_of_the_logged_reward", "which is logged"),
        ("kl_in_reward_and_loss", "term of the loss"),
        ("kl_penalty_of_the_sampler", "that the sampler recorded"),
    ],
    "advantages": [
        ("advantages_not_whitened", "all samples together"),
        ("advantages_whitened_per_sample", "all samples together"),
        ("gae_lambda_for_the_returns", "Returns are made with"),
        ("critic_lambda_for_the_advantages", "Advantages are made with"),
        ("returns_without_gamma", "Both use --gamma"),
        ("whitening_of_rounding", "by rounding only"),
        ("logged_deviation_over_padding", "advantage_std"),
    ],
    "minibatches": [
        ("denominator_is_samples", "whole minibatch, without"),
        ("denominator_counts_the_prompt", "whole minibatch, without"),
        ("same_order_in_every_epoch", "another one in another epoch"),
        ("last_minibatch_dropped", "visits every sample once"),
        ("step_without_tokens", "left out"),
        (("yield int(experience.mask[rows].sum()), parts", "yield experience.mask[rows].sum(), parts"), "is an int"),
        (("parts = list(experience.microbatches(rows, args))",
          "parts = [experience.microbatch(rows, args.device)]"), "at most micro_batch_tokens"),
        (("yield int(experience.mask[rows].sum()), parts", "yield int(experience.mask[rows].sum()), parts[:1]"),
         "add up to that of the minibatch"),
        (("yield int(experience.mask[rows].sum()), parts",
          "yield from ((int(part.mask.sum()), [part]) for part in parts)"), "A minibatch has train_batch_size"),
        (("in order.split(args.train_batch_size) if", "in order.split(args.train_batch_size)[: len(order) // args.train_batch_size] if"),  # noqa: E501
         "those that are left"),
        (("yield int(experience.mask[rows].sum()), parts", "yield int(parts[0].mask.sum()), parts"),
         "add up to that of the minibatch"),
        (("torch.randperm(len(experience.tokens), generator=generator)", "torch.randperm(len(experience.tokens))"),
         "depends on nothing else"),
    ],
    "packing": [
        ("positions_run_on_over_samples", "starts again at 0"),
        ("flat_index_of_the_mask_alone", "without padding"),
        (("sampled = mask.flatten()[flat_index].nonzero()[:, 0]", "sampled = mask.flatten().nonzero()[:, 0]"),
         "among the n packed"),
        (("starts = F.pad(lengths.cumsum(0), (1, 0)).int()", "starts = F.pad(lengths.cumsum(0), (1, 0))"), "as int32"),
        (("self.unpack(x, self.flat_index[self.sampled]).clone()", "self.unpack(x, self.sampled).clone()"),
         "one number for each sampled token"),
    ],
    "gradient": [
        ("head_gradient_without_temperature", "divided by the temperature"),
        ("head_gradient_of_the_entropy", "gradient of the entropies"),
        (("d_logits = d_logprobs[:, None] * (one_hot - probs)", "d_logits = d_logprobs[:, None] * (probs - one_hot)"),
         "gradient of the log-probs is right"),
        (("logits = float32_product(hidden, weight.T) / temperature\n    logprobs",
          "logits = float32_product(hidden, weight.T)\n    logprobs"), "softmax of logits / temperature"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(["kl", "gae", "value"], exercise.BLANKS))
def test_typical_mistakes_are_named(name):
    assert len(WRONG[name]) >= 2
    for mistake, part in WRONG[name]:
        old, new = FAULTS[mistake][1:] if isinstance(mistake, str) else mistake
        assert SCRIPT.count(old) == 1, old
        broken, said = broken_rules(name, SCRIPT.replace(old, new))
        assert any(part in words for words in broken), (mistake, said)
        assert f"{len(exercise_rules.RULES[name]) - len(broken)} of" in said


def test_a_mask_at_the_end_is_too_late():
    """The loss is finite then, and its gradient is NaN."""
    late = SCRIPT.replace("    advantages = torch.where(mask, advantages, 0.0)\n    logratio", "    logratio")
    late = late.replace("torch.where(mask, logprobs - old_logprobs, 0.0)", "(logprobs - old_logprobs)")
    late = late.replace("return losses.sum() / denom,", "return torch.where(mask, losses, 0.0).sum() / denom,")
    late = late.replace('"clipfrac": (ratio != clipped)', '"clipfrac": (mask & (ratio != clipped))')
    late = late.replace("(logratio.expm1() - logratio).sum()", "(logratio.expm1() - logratio)[mask].sum()")
    late = late.replace("(ratio - 1).abs().sum()", "(ratio - 1).abs()[mask].sum()")
    broken, said = broken_rules("surrogate", late)
    assert len(broken) == 2 and "gradient 0, even if their advantage or old log-prob" in broken[0], said
    assert broken[1] == exercise_rules.RANDOM


def test_what_check_says_of_mistakes_of_other_kinds():
    """An input that is changed in place, a shape, a type, and an error in the student's own lines."""
    mean = "return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)"
    whiten = "centered = torch.where(mask, x - masked_mean(x, mask), 0.0)"
    for exercise_name, old, new, expected in [
        ("whiten", whiten, "x -= 1\n    " + whiten, "x after the call: got"),
        ("whiten", "return centered * torch.rsqrt(variance + 1e-8)", "return centered[mask]", "shape of result: exp"),
        ("gae", "return advantages, advantages + values", "return advantages", "a tuple (advantages, returns)"),
        ("gae", "return advantages, advantages + values", "print(advantage)", "an error in 14 of 14 rules"),
        ("gae", "return advantages, advantages + values", "print(advantage)", "NameError: name 'advantage'"),
        ("whiten", mean, "return x.nothing()", "in masked_mean:  return x.nothing()"),
        ("kl", "return torch.expm1(-logratio) + logratio", "pass", "type of result: expected  a tensor"),
    ]:  # fmt: skip
        assert SCRIPT.count(old) == 1
        broken, said = broken_rules(exercise_name, SCRIPT.replace(old, new))
        assert broken and expected in said and "exercise_rules.py" not in said, said
        assert said.count("NameError") <= 1


@pytest.mark.parametrize("letter", slow_but("AEGX", exercise_bugs.BUGS))
def test_the_check_of_a_bug_sees_it_and_nothing_else(letter):
    bug, said = exercise_bugs.BUGS[letter], []
    sick = exercise.load("exercise.py", exercise.bug_text(letter))
    results = exercise.try_rules(letter, sick, "exercise.py")
    assert exercise.explain_bug(letter, results, said.append) and "still there" in said[-1]
    assert bug.fault not in (text := "\n".join(said)) and "exercise_of_the_student" not in text
    assert (": expected " in text and ": got " in text) or letter == "H", text
    bug.check(healthy())


@pytest.mark.parametrize("letter", ["A", pytest.param("T", marks=pytest.mark.slow)])
def test_the_check_of_a_bug_says_nothing_but_a_number(letter):
    """Whoever has not read the code yet does not learn from it where to look."""
    sick, said = exercise.load("exercise.py", exercise.bug_text(letter)), []
    broken = exercise.check_bug(letter, exercise.try_rules(letter, sick, "exercise.py"), said.append)
    count = 1 + sum(map(len, exercise_rules.RULES.values()))
    assert broken and said == [f"{count - len(broken)} of {count} rules hold."]


def test_the_lines_of_a_bug_are_no_longer_than_others():
    own = SCRIPT.splitlines()
    for letter in exercise_bugs.BUGS:
        assert all(len(line) <= 100 or line in own for line in exercise.bug_text(letter).splitlines()), letter


# Corrections that leave something wrong, as changes of the healthy script: {letter: [(old, new, old, new, ...)]}.
MENDS = {
    "B": [
        # before the warm start
        ("    if not checkpoint_path:\n        warm_start(actor, tokenizer, envs[0], args)\n",
         "    reference = copy_model(actor, args) if args.kl_coef else None\n"
         "    if not checkpoint_path:\n        warm_start(actor, tokenizer, envs[0], args)\n",
         "    reference = copy_model(actor, args) if args.kl_coef else None\n    # FORK: another frozen",
         "    # FORK: another frozen"),
        # It follows the actor.
        ("        relative_update = update_sampler(actor, sampler)\n",
         "        relative_update = update_sampler(actor, sampler)\n"
         "        if reference and state.iteration % 2:\n            copy_weights(actor, reference)\n"),
    ],
    "G": [  # Each model is moved by the optimizer of the other one, in the other one's epochs.
        ("    actor_optimizer = make_optimizer(actor)\n", "    actor_optimizer = make_optimizer(critic)\n",
         "critic_optimizer = make_optimizer(critic) if", "critic_optimizer = make_optimizer(actor) if"),
    ],
    "I": [
        ("    copy_weights(actor, sampler)\n    after", "    copy_weights(sampler, actor)\n    after"),
        ("    copy_weights(actor, sampler)\n    after = some_weights(sampler)\n",
         "    after = some_weights(sampler)\n    copy_weights(actor, sampler)\n"),
        # before the rollout, but not before the last evaluation
        ("    copy_weights(actor, sampler)\n    after", "    after",
         "        clock = Clock()\n", "        clock = Clock()\n        copy_weights(actor, sampler)\n"),
    ],
    "N": [
        ("        optimizer.step()\n    optimizer.zero", "        optimizer.step()\n        optimizer.zero"),
        ("    optimizer.zero_grad()\n    return", "    [p.grad.mul_(0) for p in model.parameters()]\n    return"),
    ],
    "W": [
        ("experience.advantages = masked_whiten(advantages, mask)",
         f"experience.advantages = masked_whiten(advantages, mask){end}")
        for end in (".roll(-1, 0) * mask", ".flip(0) * mask", ".roll(2, 0) * mask")
    ],
    "Y": [
        ("hash32(hash32(hash32(seed) ^ iteration) ^ sample_ids)", new)
        for new in ("hash32(seed ^ (iteration + sample_ids))", "hash32(hash32(seed) ^ (iteration + sample_ids))",
                    "hash32(hash32(seed + iteration) ^ sample_ids)", "hash32(hash32(seed) ^ iteration ^ sample_ids)",
                    "hash32(hash32(seed) ^ (iteration * 256 + sample_ids))")
    ],
    "Z": [
        ('save_hf_checkpoint(actor, tokenizer, run', 'save_hf_checkpoint(sampler, tokenizer, run'),
    ],
}  # fmt: skip


# Corrections in another way than the script's.
OTHER_MENDS = {
    "B": [("reference = copy_model(actor, args) if", "reference = copy.deepcopy(actor).requires_grad_(False) if")],
    "I": [("    copy_weights(actor, sampler)\n    after",
           "    sampler.load_state_dict(actor.state_dict())\n    after")],
    "N": [("    optimizer.zero_grad()\n    return",
           "    for p in model.parameters():\n        p.grad = None\n    return")],
    "W": [("experience.advantages = masked_whiten(advantages, mask)",
           "experience.advantages = masked_whiten(advantages.roll(1, 0), mask.roll(1, 0)).roll(-1, 0)")],
    "Y": [("hash32(hash32(hash32(seed) ^ iteration) ^ sample_ids)",
           "hash32(hash32(hash32(iteration) ^ seed) ^ sample_ids)")],
}  # fmt: skip


def mended(*texts):
    text = SCRIPT
    for old, new in zip(texts[::2], texts[1::2]):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return exercise.load("exercise.py", exercise.without_checks(text))


@pytest.mark.parametrize("letter", slow_but("WY", MENDS))
def test_corrections_that_leave_something_wrong_fail(letter):
    for texts in MENDS[letter]:
        module = mended(*texts)
        with pytest.raises((exercise_rules.Broken, module.UserError)):
            exercise_bugs.BUGS[letter].check(module)


@pytest.mark.parametrize("letter", slow_but("WY", OTHER_MENDS))
def test_corrections_in_another_way_pass(letter):
    for texts in OTHER_MENDS[letter]:
        exercise_bugs.BUGS[letter].check(mended(*texts))


WRONG_BODIES, RIGHT_BODIES = (exercise_bodies.read_bodies(f"exercise_{kind}.txt") for kind in ("wrong", "right"))


@pytest.mark.parametrize("name", slow_but(["schedule", "shift", "value"], exercise.BLANKS))
def test_wrong_bodies_break_a_rule_and_right_ones_in_unusual_forms_none(name):
    wrong, right = ([x for x in bodies if x.exercise == name] for bodies in (WRONG_BODIES, RIGHT_BODIES))
    assert len(wrong) >= 15 and right and len({x.text for x in (*wrong, *right)}) == len(wrong) + len(right)
    for body in wrong:
        assert exercise_bodies.broken_rules(healthy(), body), body.words
    for body in right:
        assert not exercise_bodies.broken_rules(healthy(), body), body.words


def test_a_corrected_file_passes_with_all_other_rules():
    said, count = [], sum(map(len, exercise_rules.RULES.values()))
    assert not exercise.check_bug("U", exercise.try_rules("U", healthy(), "ppo_llm.py"), said.append)
    assert said[0].startswith("holds  The targets") and f"all {count} rules of part 1" in said[-1]


def test_letters_are_in_order_and_name_different_faults():
    assert list(exercise_bugs.BUGS) == [chr(ord("A") + i) for i in range(len(exercise_bugs.BUGS))]
    assert len({bug.fault for bug in exercise_bugs.BUGS.values()}) == len(exercise_bugs.BUGS) >= 23
    assert exercise_bugs.INVISIBLE == "".join(exercise_bugs.BUGS)[-3:]


def test_a_corrected_file_with_another_mistake_is_told_apart():
    old, new = FAULTS["returns_without_values"][1:]
    module, said = exercise.load("exercise.py", SCRIPT.replace(old, new)), []
    assert exercise.explain_bug("A", exercise.try_rules("A", module, "exercise.py"), said.append)
    assert "something else is wrong now" in said[-1] and "FAILS  A return is the advantage" in "\n".join(said)


def test_several_blanks_are_checked_one_by_one():
    """What is not yet written of the other parts is that of the script. Line numbers are those of the file."""
    text = exercise.blank_text(*exercise.BLANKS)
    solved = text
    for gap in exercise.BLANKS["rewards"].gaps:
        lines = [SCRIPT.splitlines()[i] for i in exercise.lines_of(gap)]
        begin = solved.index("    # >>> Your part of `rewards`")
        end = solved.index("# <<<", begin)
        solved = solved[:begin] + "\n".join(lines) + "\n    " + solved[end:]
    for written, expected in (text, "not yet written: rewards: your part of make_experience"), (solved, "All 9 rules"):
        said, module = [], exercise.load("exercise.py", written, "rewards")
        exercise.check_blank("rewards", exercise.try_rules("rewards", module, "exercise.py"), said.append)
        assert expected in said[-1], said
    line = text.splitlines().index('    raise NotImplementedError("rewards: your part of make_experience")') + 1
    said = []
    module = exercise.load("exercise.py", text, "rewards")
    exercise.check_blank("rewards", exercise.try_rules("rewards", module, "exercise.py"), said.append)
    assert f"(exercise.py, line {line})" in said[-1]


def test_an_error_of_a_dtype_is_not_called_unwritten():
    """What PyTorch does not have for masks, which are bool, raises NotImplementedError: pytorch/pytorch#192348."""
    old = "return centered * torch.rsqrt(variance + 1e-8)"
    for line in "return x / (mask @ mask.T)", "raise NotImplementedError", 'raise NotImplementedError("not for Bool")':
        broken, said = broken_rules("whiten", SCRIPT.replace(old, line))
        assert len(broken) == 10 and f"in masked_whiten:  {line}" in said and exercise.NOT_YET not in said, said
        assert "NotImplementedError" in said


def test_a_recursion_is_shown_in_a_few_lines():
    broken, said = broken_rules(
        "kl",
        SCRIPT.replace(
            "logratio = logprobs - ref_logprobs\n    if kind",
            "return kl_estimate(logprobs, ref_logprobs, kind)\n    if kind",
        ),
    )
    assert len(broken) == 9 and "RecursionError: maximum recursion depth" in said and "more calls" in said
    assert len(said.splitlines()) < 60


@pytest.fixture
def tool(tmp_path, monkeypatch, capsys):
    """The command in an empty folder: tool(word, ...) returns its exit code and what it prints."""
    monkeypatch.chdir(tmp_path)

    def tool(*words):
        monkeypatch.setattr(sys, "argv", ["exercise.py", *words])
        code = exercise.main()
        return code, capsys.readouterr().out

    return tool


def test_the_tool_does_not_take_its_own_place(tmp_path, tool, monkeypatch):
    """In the folder of the tool, exercise.py is the tool."""
    monkeypatch.setattr(exercise, "__file__", str(tmp_path / "exercise.py"))
    (tmp_path / "exercise.py").write_text("the tool")
    for words in ("blank", "gae"), ("bug", "A"), ("check", "gae"):
        code, said = tool(*words)
        assert code == 2 and "root folder" in said
    assert [path.name for path in tmp_path.iterdir()] == ["exercise.py"]


def test_the_commands(tmp_path, tool):
    """They keep earlier work, and reveal no fault."""
    code, listed = tool("list")
    assert code == 0 and not any(bug.fault in listed for bug in exercise_bugs.BUGS.values())
    assert tool("check", "gae")[0] == 2
    assert "exercise.py, line" in tool("blank", "gae")[1]
    code, said = tool("check", "gae")
    assert code == 1 and "not yet written: gae: your part of compute_gae (exercise.py, line" in said
    file = tmp_path / "exercise.py"
    file.write_text("my work")
    code, said = tool("check", "gae")
    assert code == 1 and "is no Python program" in said and "my work" in said
    assert "now exercise_earlier.py" in tool("bug", "b")[1]
    assert (tmp_path / "exercise_earlier.py").read_text() == "my work"
    assert file.read_text() == exercise.exercise_text("B")
    assert "not kept" in tool("bug", "B")[1] and "not kept" in tool("blank", "gae")[1]
    for kept in "exercise_gae.py", "exercise_gae_2.py":
        file.write_text(exercise.exercise_text("gae") + "# my work")
        assert f"now {kept}." in tool("blank", "gae")[1] and (tmp_path / kept).read_text().endswith("my work")
    code, said = tool("bug", "gae")
    assert code == 2 and "must be one of A, B" in said
    assert tool("blank", "gae", "K")[0] == 2
    assert "(whiten)" in tool("blank", "whiten", "gae")[1]
    said = tool("blank", "all")[1]
    assert "not kept" in said and f"without the bodies of {len(exercise.BLANKS)} exercises." in said
    assert all(f"part of `{name}`" in file.read_text() for name in exercise.BLANKS)
    assert "def compute_gae" not in (shown := tool("solution", "gae")[1]) and "lastgaelam" in shown
    assert tool("solution", "B")[1].count("\n+    ") == 1
    assert tool("--help")[0] == 0 and tool()[0] == tool("check")[0] == tool("list", "gae")[0] == 2


@pytest.mark.slow
def test_a_teacher_may_ask_which_rule_of_a_bug_fails(tmp_path, tool):
    tool("bug", "A")
    code, said = tool("check", "A")
    assert code == 1 and re.fullmatch(r"\d+ of \d+ rules hold\.\n", said)
    for words in ("check", "A", "--explain"), ("check", "--explain", "A"):
        code, said = tool(*words)
        assert code == 1 and "FAILS  `objective/entropy` is minus the mean log-prob" in said and ": expected" in said
    assert tool("check", "--explain")[0] == tool("bug", "A", "--explain")[0] == 2


def test_check_knows_which_exercise_a_file_is(tmp_path, tool):
    tool("bug", "A")
    code, said = tool("check", "D")
    assert code == 2 and "exercise.py is exercise A, not D. Did you mean: python" in said and "check A?" in said
    assert "check A exercise.py" not in said
    (tmp_path / "hers.py").write_text(exercise.exercise_text("whiten", "gae"))
    code, said = tool("check", "A", "hers.py")
    assert code == 2 and "hers.py is exercise whiten gae, not A." in said and "check whiten hers.py?" in said
    assert "not yet written" in tool("check", "gae", "hers.py")[1]
    (tmp_path / "hers.py").write_text(SCRIPT)
    code, said = tool("check", "schedule", "hers.py")
    assert code == 0 and "All 6 rules" in said


def test_show_compares_the_newest_run_with_a_healthy_one(tmp_path, tool):
    assert tool("show", "x") == (2, "runs/ has no run of exercise.py.\n")
    assert tool("show", "--help")[0] == 0 and tool("show")[0] == 2
    runs = [("a", "exercise.py", 1, 0.5), ("b", "ppo_llm.py", 1, 0.1), ("c", "ppo_llm.py", 2, 0.2),
            ("d", "exercise.py", 2, 0.25), ("e", "ppo_llm.py", 3, 0.3)]  # fmt: skip
    for i, (name, script, seed, x) in enumerate(runs):
        (folder := tmp_path / "runs" / name).mkdir(parents=True)
        config = {"args": {"seed": seed, "save_every": i}, "argv": [f"../{script}", "--seed", str(seed)]}
        (folder / "config.json").write_text(json.dumps(config))
        os.utime(folder / "config.json", (i, i))
        (folder / "metrics.jsonl").write_text(json.dumps({"objective/x": x, "ratio/steps": [1, 2]}))
    shown = "exercise --seed 2\n    0.25\nppo_llm --seed 2\n    0.2\n"
    assert tool("show", "objective/x") == (0, shown)
    assert tool("show", "ratio/steps", "runs/a") == (0, "exercise --seed 1   (runs/a)\n    2 steps\n")
    assert tool("show", "x") == (2, "There is no metric x. Similar names: objective/x.\n")
    code, said = tool("show", "x", "runs/f")
    assert code == 2 and said.startswith("Left out: ") and said.count("\n") == 1
    assert tool("show", "ratio/steps", "runs/f", "runs/a") == (0, f"{said}exercise --seed 1   (runs/a)\n    2 steps\n")
    (tmp_path / "exercise.py").write_text("newer")
    assert tool("show", "objective/x") == (0, "exercise.py has changed since its newest run.\n" + shown)
    (tmp_path / "runs" / "c" / "metrics.jsonl").unlink()
    assert "no run of the healthy script with the same flags: python" in tool("show", "objective/x")[1]


SCHEDULE = "def linear_schedule(first, end_fraction, progress):\n    {}\n"
RIGHT = SCHEDULE.format("return first * (1 - (1 - end_fraction) * min(1.0, progress))")


@pytest.mark.parametrize(("text", "seconds", "parts"), [
    ("while first:\n        progress += 1", 5, [
        "mine.py has no result after 5 seconds. Is this a loop without an end?", ", in linear_schedule:  "]),
    ("os._exit(0)", 60, ["mine.py ends the process that checks it, with exit code 0."]),
    ("os.fork() or time.sleep(999)\n    os._exit(3)", 60, ["ends the process that checks it, with exit code 3."]),
    ("ctypes.string_at(0)", 60, ["by SIGSEGV.", "  line 2, in linear_schedule:  ctypes.string_at(0)"]),
])  # fmt: skip
def test_a_file_that_does_not_end_or_ends_its_process_is_told_apart(tmp_path, monkeypatch, text, seconds, parts):
    """The rule is named, and those after it are not tried: ucbds-infra/otter-grader#469."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SCHEDULE.format(text) + "import ctypes, os, time\n")
    said = []
    broken = exercise.check_blank("schedule", exercise.try_in_process("schedule", "mine.py", seconds), said.append)
    assert broken == ["At progress 0 the value is `first`."]
    assert all(part in said[0] for part in parts) and len(said[0].splitlines()) < 6, said
    assert said[1] == "\n0 of 6 rules hold. 5 were not tried."


@pytest.mark.parametrize("enclose", [int, exercise_class.enclose])
def test_all_rules_together_have_a_limit_too_and_what_was_forked_ends(enclose, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SCHEDULE.format("""if not os.fork():
        while True:
            open("alive", "a").write("x")
            time.sleep(0.05)
    time.sleep(99)""") + "import os, time\n")
    start = time.monotonic()
    [result] = exercise.try_in_process("schedule", "mine.py", seconds=3, enclose=enclose)
    assert result.kind == exercise.ENDED and "has no result after 3 seconds" in result.lines[0]
    assert time.monotonic() - start < 60  # with the start of the process that forks
    time.sleep(0.5)  # The end of a process ends those of its namespace a little later.
    alive = (tmp_path / "alive").stat().st_size
    time.sleep(0.3)
    assert alive == (tmp_path / "alive").stat().st_size > 0


def test_a_file_that_cannot_be_loaded_has_no_rules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text, part in {
        "import os; os._exit(0)": "ends the process that checks it, with exit code 0.", "nothing": "NameError",
        "raise SystemExit": "line 1, in <module>:  raise SystemExit", "def f(:": "is no Python program:\n",
    }.items():  # fmt: skip
        (tmp_path / "mine.py").write_text(text)
        with pytest.raises(exercise.Unloadable, match=re.escape(part)):
            next(exercise.try_in_process("schedule", "mine.py"))


def test_ctrl_c_names_the_rule_that_was_tried(tmp_path, tool, monkeypatch):
    (tmp_path / "exercise.py").write_text(SCHEDULE.format("time.sleep(999)") + "import time\n")
    wait, waits = exercise.multiprocessing.connection.wait, []

    def interrupted(objects, *rest):
        waits.append(len(objects))
        if waits[-1] == 2 and waits.count(2) == 3:  # of a message or the end; two messages come
            raise KeyboardInterrupt
        return wait(objects, *rest)

    monkeypatch.setattr(exercise.multiprocessing.connection, "wait", interrupted)
    code, said = tool("check", "schedule")
    assert code == 130 and said == "\nStopped. This was tried: At progress 0 the value is `first`.\n"


def test_a_file_may_have_any_encoding_that_python_runs(tmp_path, tool):
    """PEP 263, and the byte-order mark of some editors: mkdocstrings/griffe#386."""
    file = tmp_path / "exercise.py"
    for start, encoding, code in [
        ("", "utf-8-sig", 0), ("# -*- coding: latin-1 -*-\n", "latin-1", 0), ("# coding: cp1252\r\n", "cp1252", 0),
        ("", "latin-1", 1), ("", "utf-16", 1), ("# coding: klingon\n", "utf-8", 1), ("\0", "utf-8", 1),
    ]:  # fmt: skip
        file.write_bytes((start + "# caf\u00e9\n" + RIGHT).encode(encoding))
        got, said = tool("check", "schedule")
        assert got == code and ("exercise.py is no Python program:" if code else "All 6 rules hold") in said, said
    file.write_bytes(b"\xff")
    assert "now exercise_earlier.py" in tool("blank", "schedule")[1]
    assert (tmp_path / "exercise_earlier.py").read_bytes() == b"\xff"


def write_run(folder, metrics, **config):
    folder.mkdir(parents=True, exist_ok=True)
    config = {"args": {"seed": 1}, "argv": ["exercise.py"]} | config
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text(metrics)


def test_show_reads_a_run_that_is_being_written(tmp_path, tool):
    """A torn tail costs its line, not the report."""
    for torn in "", '{"x": 7', '{"x": 7, "y": "', "\0\0", '{"x": 7}':
        write_run(tmp_path / "runs" / "a", '{"x": 1}\n{"x": null, "y": 2}\n{"x": [1, 2]}\n' + torn)
        shown = "    1 - 2 steps" + (" 7" if torn.endswith("}") else "") + "\n"
        assert tool("show", "x")[1].endswith(f"exercise\n{shown}")
        assert tool("show", "x", "runs/a") == (0, f"exercise   (runs/a)\n{shown}")


def test_show_names_what_is_no_run_and_leaves_it_out_of_the_newest(tmp_path, tool):
    runs = tmp_path / "runs"
    write_run(runs / "good", '{"x": 1}')
    write_run(runs / "middle", '{"x": 1}\n{"x": \n{"x": 2}\n')
    write_run(runs / "flags", '{"x": 1}', args=None)
    write_run(runs / "torn", '{"x": 1}')
    (runs / "torn" / "config.json").write_text('{"args": {')
    write_run(runs / "none", '{"x": 1}')
    (runs / "none" / "config.json").unlink()
    for name, part in {
        "middle": "runs/middle/metrics.jsonl, line 2 is damaged: b'{\"x\": '.", "none": "config.json: No such file",
        "flags": "runs/flags/config.json is damaged", "torn": "runs/torn/config.json is damaged",
        "missing": "runs/missing is no run folder: config.json: No such file or directory.",
    }.items():  # fmt: skip
        code, said = tool("show", "x", f"runs/{name}")
        assert code == 2 and part in said and said.count("\n") == 1, said
    code, said = tool("show", "x")
    assert code == 0 and "exercise\n    1\n" in said and said.count("Left out: runs/") == 4, said


def test_show_may_be_cut_by_head(tmp_path):
    write_run(tmp_path / "run", '{"x": 1}\n' * 100_000)
    command = [sys.executable, ROOT / "tests" / "exercise.py", "show", "x", "run"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


@pytest.mark.slow
def test_a_check_in_a_process_of_its_own(tmp_path):
    """It prints nothing but its rules, and ends with a code."""
    for text, code, expected in (SCRIPT, 0, "All 14 rules hold"), (exercise.blank_text("gae"), 1, "not yet written"):
        (tmp_path / "mine.py").write_text(text)
        command = [sys.executable, ROOT / "tests" / "exercise.py", "check", "gae", "mine.py"]
        seen = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert seen.returncode == code and expected in seen.stdout and not seen.stderr


# === The page ===


def test_the_page_has_every_exercise_and_its_numbers():
    for name, blank in exercise.BLANKS.items():
        rules = len(exercise_rules.RULES[name])
        [row] = re.findall(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
        assert f"| {rules} |" in row and all(f"`{gap.function}`" in row for gap in blank.gaps)
    parts = re.split(r"(?m)^### ([A-Z])\.", PAGE)
    assert parts[1::2] == list(exercise_bugs.BUGS)
    for letter, part in zip(parts[1::2], parts[2::2]):
        assert f"`{exercise_bugs.BUGS[letter].command('exercise.py')}`" in part.replace("\n", " "), letter
        assert part.count("<details>\n<summary>Hint</summary>") == part.count("</details>") == 1
        fault = exercise_bugs.BUGS[letter].fault
        assert fault not in part
        new = "".join(FAULTS[fault][2].split())
        assert new not in "".join(part.split())  # The solution is on another page.


def test_every_body_has_two_questions_with_answers():
    for text in PAGE.split("### Rubric")[1], SOLUTIONS.split("## Two questions")[1].split("## The bugs")[0]:
        found = re.findall(r"(?m)^- `(\w+)`: \(1\) .*(?:\n  .*)*", text)
        assert found == [*exercise.BLANKS] and text.count("(2)") == len(found)


def test_the_solutions_of_the_page_are_the_bugs():
    parts = re.split(r"(?m)^### ([A-Z])\.", SOLUTIONS)
    assert parts[1::2] == list(exercise_bugs.BUGS)
    titles = [re.findall(r"(?m)^### .*", page) for page in (PAGE.split("## A class")[0], SOLUTIONS)]
    assert titles[0] == titles[1]
    lines_of = lambda text: [" ".join(line.split()) for line in text.splitlines()]
    has = lambda lines, text: any(line.startswith(" ".join(text.split())) for line in lines)  # or with a comment
    for letter, part in zip(parts[1::2], parts[2::2]):
        [diff] = re.findall(r"```diff\n(.*?)```", part, re.DOTALL)
        sick = lines_of(exercise.bug_text(letter))
        for line in diff.splitlines():
            signs = {"-": [sick], "+": [lines_of(SCRIPT)], " ": [sick, lines_of(SCRIPT)]}
            assert all(has(lines, line[1:]) for lines in signs[line[0]]), (letter, line)


@pytest.mark.parametrize("letter", ["X", "Y", pytest.param("Z", marks=pytest.mark.slow)])
def test_the_tests_of_the_solutions_fail_because_of_their_bugs(letter, tmp_path):
    text = re.search(rf"(?ms)^### {letter}\..*?^```python\n(.*?)^```", SOLUTIONS)[1]
    for sick in True, False:
        name = "sick" if sick else "well"
        ppo = exercise.load(f"{name}.py", exercise.bug_text(letter) if sick else SCRIPT)
        names = dict(ppo=ppo, types=types, torch=torch, load_file=load_file)
        exec(text, names)
        [test] = [x for key, x in names.items() if key.startswith("test_")]
        arguments = [tmp_path / name] if "tmp_path" in text else []
        with pytest.raises(AssertionError) if sick else contextlib.nullcontext():
            test(*arguments)


def test_the_tables_of_the_page_are_those_of_the_runs():
    sys.path.append(str(ROOT / "benchmarks"))
    import exercises

    parts = re.split(r"(?m)^### ([A-Z])\.", PAGE)
    tables = {letter: exercises.table(letter) for letter, bug in exercise_bugs.BUGS.items() if bug.metrics}
    shown = [letter for letter, part in zip(parts[1::2], parts[2::2]) if tables.get(letter, "none") in part]
    assert len(shown) >= 21
    for letter, part in zip(parts[1::2], parts[2::2]):
        assert letter in shown or "| healthy |" not in part, letter
    for name, panels in exercises.SHEETS.items():
        assert f"pictures/{name}.png" in PAGE and panels.keys() <= tables.keys()


def test_the_commands_of_the_page_are_valid(ppo):
    commands = re.findall(r"python tests/exercise\.py ([a-z]+)(?: ([\w-]+))?", PAGE)
    for verb, name in commands:
        takes_no_name = "list", "show", "handout", "grade", "race"
        assert verb in (*takes_no_name, "blank", "bug", "check", "solution")
        assert verb in takes_no_name or not name or name in ("all", *exercise.BLANKS, *exercise_bugs.BUGS)
    for flags in re.findall(r"\bexercise\.py (--[^`|\n]*)", PAGE):
        tyro.cli(ppo.Args, args=shlex.split(flags))
    for bug in exercise_bugs.BUGS.values():
        tyro.cli(ppo.Args, args=shlex.split(bug.flags))
    assert len(commands) > 5
