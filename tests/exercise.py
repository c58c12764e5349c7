"""Exercises for a course: bodies of ppo_llm.py to write yourself, and bugs to find. See docs/exercises.md.

    python tests/exercise.py list             # the exercises
    python tests/exercise.py blank gae        # writes exercise.py: the script without one body, which is yours to write
    python tests/exercise.py bug C            # writes exercise.py: the script with a bug, which is yours to find
    python tests/exercise.py check gae        # says which rules exercise.py keeps; also `check C`
    python tests/exercise.py solution gae     # shows what the script has there; also `solution C`
    python tests/exercise.py show objective/kl   # prints a metric of the runs in runs/

`check NAME FILE` checks another file than exercise.py. `show METRIC RUN ...` is about these run folders.
"""

from __future__ import annotations

import ast
import difflib
import json
import linecache
import os
import sys
import textwrap
import traceback
import types
import warnings
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "ppo_llm.py"
FILE = Path("exercise.py")
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


@dataclass
class Gap:
    """The lines of a function that are left out: from the one that starts with `first` to the one with `last`.

    Without them all lines after the docstring. `note` is what the student reads there.
    """

    function: str
    note: str = ""
    first: str = ""
    last: str = ""


@dataclass
class Blank:
    title: str
    gaps: list[Gap]


BLANKS = {
    "schedule": Blank("the linear learning-rate schedule", [Gap("linear_schedule")]),
    "value": Blank("the loss of the critic", [Gap(
        "value_loss", "Entries outside the mask may be NaN. Replace them before you compute.", "values, old")]),
    "kl": Blank("the estimators k1, k2 and k3 of the KL", [Gap("kl_estimate", """
        With log r = ref_logprobs - logprobs, which is the log of pi_ref / pi:
            k1 = -log r        k2 = (log r)^2 / 2        k3 = r - 1 - log r
        `kind` is "k1", "k2" or "k3". torch.expm1(x) is exp(x) - 1, exactly also near 0.""")]),
    "whiten": Blank("whitening over a mask", [Gap("masked_whiten", """
        Divide the sum of squares by the number of sampled tokens minus 1, but at least by 1.
        Add 1e-8 to the variance before you take its root: a constant x becomes 0 and not NaN.""")]),
    "gae": Blank("generalized advantage estimation", [Gap("compute_gae", """
        Returns (advantages, returns), [N, T] each. The return of a token is its advantage plus its value.
        Both are 0 outside the mask, where rewards and values may be NaN.""")]),
    "surrogate": Blank("the clipped surrogate and its statistics", [Gap("policy_loss", """
        Clamp the log-ratio to [-20, 20], so that exp stays finite. Entries outside the mask may be NaN.
        With dual_clip, a token with a negative advantage A has a loss of at most dual_clip * |A|.
        Returns (loss, stats). `stats` has three entries, without gradients, each a sum over the mask divided by denom:
            "clipfrac":  1 where the clip changes the ratio r, whatever the advantage
            "approx_kl": r - 1 - log r, which is k3 of KL(old || new); logratio.expm1() is r - 1
            "ratio_dev": |r - 1|""", "advantages = torch.where")]),
    "sampling": Blank("sampling a token, and its log-prob", [Gap("sample_token", """
        There are `logits` [B, V] of the next token, decoder.temperature, decoder.noise_scale (1, or 0 for greedy
        decoding), decoder.noise_keys [B] and decoder.length [B], the index that the new token will have.
        gumbel_noise(keys [B], index [B], V) gives Gumbel noise [B, V]: the argmax of logits plus Gumbel noise is a
        sample of their softmax.
        After it there must be `token` [B, 1] and `logprob` [B, 1], which is that of the token under the softmax of
        the logits at the temperature. Use no Python numbers of tensors, such as float(x): the host would wait.""",
        "logits /= decoder.temperature", "logprob = logits.gather")]),
    "shift": Blank("the shift by one", [Gap("Transformer.states_before_sampled", """
        self.hidden_states(x, position, packing=packing) gives the states [n, hidden] after each of the n packed
        tokens x [n]. `Packing`, above, says what packing.pack(), packing.position and packing.sampled are.""")]),
    "rewards": Blank("placement of rewards, penalty and KL", [Gap("make_experience", """
        There are `episodes`, with episode.stop and episode.ids, and `experience`, with `rewards` of the environment,
        `old_logprobs` and `ref_logprobs` (NaN without a reference), [N, T] each.
        - An episode whose stop is "length" was cut. It loses args.truncation_penalty at its last token, for good: in
          experience.rewards, which is logged.
        - If there is args.kl_coef and no args.kl_loss, `rewards` are experience.rewards reduced at every token by
          kl_coef times the k1 of actor and reference. Else they are experience.rewards. kl_estimate computes k1.
        After it there must be `rewards` [N, T].""", "for i, episode in enumerate", "rewards = experience.rewards")]),
    "advantages": Blank("values, returns and whitened advantages", [Gap("make_experience", """
        There are `rewards` and `mask` [N, T], `experience`, `critic` (or None) and `first_epoch`.
        forward_all(critic.sampled_values, experience, first_epoch, args) gives the values [N, T].
        compute_gae returns (advantages, returns): use the advantages at args.gae_lambda and the returns at
        args.critic_lambda, with args.gamma.
        After it these fields of `experience` must be set: `values` (0 without a critic), `returns`, `advantage_std`
        (a float: the standard deviation over the sampled tokens before whitening, 0 if there is one token or none)
        and `advantages`, whitened. If advantage_std is below 1e-6, the advantages are all 0.""",
        "experience.values = torch.zeros_like", "experience.advantages = masked")]),
    "minibatches": Blank("minibatches, microbatches and their denominator", [
        Gap("minibatch_rows", """
            `generator` gives the order: torch.randperm(n, generator=generator). len(experience.tokens) is N.
            Returns a list of index tensors of args.train_batch_size samples. Leave out a minibatch without sampled
            tokens. Its gradients are 0, but Adam's momentum would move the weights.""", "order = torch.randperm"),
        Gap("minibatches", """
            minibatch_rows(...) gives the samples of each minibatch. microbatches(rows, lengths, token_budget) divides
            such samples into microbatches of at most args.micro_batch_tokens tokens, as a list of index tensors.
            experience.microbatch(rows, args.device) makes a Microbatch of them. `n_tokens` is an int.""")]),
    "packing": Blank("packing samples without padding", [
        Gap("Packing.from_lengths", """
            Returns cls(shape, place, position, sampled, starts), as in the example above. `lengths` [B] are those of
            the samples, `mask` is [B, T]. upload(x, device) puts a tensor on the device.""", "T = mask.shape"),
        Gap("Packing.pack", "x.flatten(0, 1) is [B * T, ...]."),
        Gap("Packing.unpack", """
            x.new_zeros(...) is a start, and math.prod(self.shape) is B * T. Gradients must reach x."""),
        Gap("Packing.unpack_sampled", "x has one number for each of the m sampled tokens.")]),
    "gradient": Blank("the gradient of the log-softmax and of the entropy", [Gap("chunk_gradients", """
        `hidden` is [rows, d], `weight` [V, d], `targets` [rows]. d_logprobs and d_entropies [rows] are the gradients
        of the loss with respect to the log-probs of the targets and to the entropies.
        The logits are float32_product(hidden, weight.T) / temperature. The result is the gradient of the loss with
        respect to float32_product(hidden, weight.T), in the dtype of the weight.""")]),
}  # fmt: skip


def find(function: str) -> ast.FunctionDef:
    """A function of the script, or Class.method."""
    node = ast.parse(SCRIPT.read_text())
    for name in function.split("."):
        [node] = [child for child in node.body if getattr(child, "name", "") == name]
    return node


def lines_of(gap: Gap) -> range:
    """Indices of the lines of the script that are left out."""
    node, lines = find(gap.function), SCRIPT.read_text().splitlines()
    has_docstring = ast.get_docstring(node) is not None
    inside = range(node.body[has_docstring].lineno - 1, node.end_lineno)
    first = last = None
    for i in inside:
        if first is None and lines[i].strip().startswith(gap.first):
            first = i
        if gap.last and lines[i].strip().startswith(gap.last):
            last = i
    assert first is not None and (last is not None or not gap.last), gap
    return range(first, (inside[-1] if last is None else last) + 1)


def blank_text(name: str) -> str:
    lines = SCRIPT.read_text().splitlines()
    for gap in sorted(BLANKS[name].gaps, key=lambda gap: lines_of(gap).start, reverse=True):
        left_out = lines_of(gap)
        indent = lines[left_out.start][: -len(lines[left_out.start].lstrip())]
        note = textwrap.dedent(gap.note).strip().splitlines()
        part = ["# >>> Your part begins here.", *(f"# {line}".rstrip() for line in note)]
        part += [f'raise NotImplementedError("your part of {gap.function}")', "# <<< Your part ends here."]
        lines[left_out.start : left_out.stop] = [indent + line for line in part]
    return "\n".join(lines) + "\n"


def bug_text(letter: str) -> str:
    from exercise_bugs import BUGS
    from plant_faults import plant, read_faults

    _, old, new = read_faults()[BUGS[letter].fault]
    return plant(old, new)["ppo_llm.py"]


# === Check ===


def load(path: Path | str, text: str | None = None):
    """A script as a module. Errors of syntax and of import are the caller's to show."""
    import torch.distributed as dist

    if not dist.is_initialized():  # as `connect` of the script does
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = types.ModuleType(f"exercise_of_the_student_{len(sys.modules)}")  # a name of its own, for pickle
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look there
    text = Path(path).read_text() if text is None else text
    linecache.cache[str(path)] = len(text), None, text.splitlines(keepends=True), str(path)
    with warnings.catch_warnings(action="ignore"):  # The environments are registered again.
        exec(compile(text, str(path), "exec"), vars(module))
    return module


def shown(x) -> str:
    """A short text of an input or a result."""
    import torch

    if isinstance(x, torch.Tensor):
        return shown(x.detach().cpu().tolist())
    if isinstance(x, list | tuple):
        return f"[{', '.join(map(shown, x))}]"
    if isinstance(x, bool):
        return str(int(x))
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def own_frames(error: BaseException, path: str) -> list[traceback.FrameSummary]:
    """The frames of the traceback that are in the student's file."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]


def failure(error: BaseException, path: str) -> list[str]:
    """What went wrong, in lines."""
    from exercise_rules import Broken

    if isinstance(error, Broken):
        names = [*error.given, f"{error.what}: expected", f"{error.what}: got"]
        values = [*error.given.values(), error.expected, error.got]
        width = max(map(len, names))
        return [f"{name:{width}}  {shown(value)}" for name, value in zip(names, values)]
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = own_frames(error, path)
    if not frames:
        return ["the result cannot be used here:", *text.splitlines()]
    found = [f"{FILE} stops with an error:" if path == str(FILE) else f"{path} stops with an error:"]
    for frame in frames:
        found += [f"  line {frame.lineno}, in {frame.name}:  {frame.line}"]
    return found + [f"  {line}" for line in text.splitlines()[:6]]


NOT_YET = "not yet written"


def test(rules, module, path: str, say=print) -> list[str]:
    """Say of each rule whether it holds. Returns the words of those that do not, or that something is not written."""
    broken, earlier = [], None
    for words, function in rules:
        try:
            function(module)
        except NotImplementedError as error:
            if not (frames := own_frames(error, path)):
                raise
            say(f"{NOT_YET}: {error} ({path}, line {frames[-1].lineno})")
            return [*broken, NOT_YET]
        except (Exception, SystemExit) as error:
            broken.append(words)
            lines = failure(error, path)
            lines, earlier = ["the same"] if lines == earlier else lines, lines
            say("\n".join([f"FAILS  {words}", *(f"         {line}" for line in lines)]))
        else:
            say(f"holds  {words}")
    return broken


def check_blank(name: str, module, path: str, say=print) -> list[str]:
    from exercise_rules import RULES

    broken = test(RULES[name], module, path, say)
    count = len(RULES[name])
    if not broken:
        say(f"\nAll {count} rules hold. Compare it with the script: python tests/exercise.py solution {name}")
    elif NOT_YET not in broken:
        say(f"\n{count - len(broken)} of {count} rules hold.")
    return broken


def check_bug(letter: str, module, path: str, say=print) -> list[str]:
    from exercise_bugs import BUGS
    from exercise_rules import RULES

    bug = BUGS[letter]
    try:
        bug.check(module)
    except (Exception, SystemExit) as error:
        say(f"FAILS  {bug.words}")
        if frames := own_frames(error, path):
            last = traceback.format_exception_only(error)[-1].strip()
            say(f"         a small run stops in line {frames[-1].lineno}: {last:.300}")
        say("\nThe bug is still there.")
        return [bug.words]
    say(f"holds  {bug.words}")
    everything = [pair for rules in RULES.values() for pair in rules]
    other = []
    broken = test(everything, module, path, other.append)
    if broken:
        say("\n".join(line for line in other if not line.startswith("holds")))
        say("\nThe bug is gone, but something else is wrong now.")
    else:
        say(f"holds  {len(everything)} rules of the rest of the file\n\nThe bug is gone.")
    return broken


def check(name: str, file: Path) -> int:
    """The exit code: 0 if all rules hold."""
    if not file.is_file():
        print(f"There is no {file} in this folder. `blank NAME` or `bug LETTER` writes it.")
        return 2
    path = str(file)
    try:
        module = load(path)
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError):
            print(f"{path} is no Python program:")
            print("".join(traceback.format_exception_only(error)).rstrip())
        else:
            print("\n".join(failure(error, path)))
        return 1
    broken = (check_blank if name in BLANKS else check_bug)(name, module, path)
    return int(bool(broken))


# === Commands ===


def keep_earlier(text: str):
    """What stands in exercise.py is renamed, so that no work is lost."""
    if not FILE.exists() or FILE.read_text() in (text, SCRIPT.read_text()):
        return
    i = 1
    while (kept := Path(f"exercise_{i}.py")).exists():
        i += 1
    FILE.rename(kept)
    print(f"The earlier {FILE} is now {kept}.")


def write(text: str):
    keep_earlier(text)
    FILE.write_text(text)


def tool() -> str:
    """This file, as the student can type it."""
    return os.path.relpath(__file__)


def print_list():
    from exercise_bugs import BUGS, INVISIBLE
    from exercise_rules import RULES

    print("Write it yourself (`blank NAME`, then `check NAME`):")
    for name, blank in BLANKS.items():
        functions = ", ".join(gap.function for gap in blank.gaps)
        print(f"  {name:12} {blank.title} ({functions}; {len(RULES[name])} rules)")
    print("\nFind the bug (`bug LETTER`, then `check LETTER`), the easier ones first:")
    for letter, bug in BUGS.items():
        note = "  # no metric shows it" if letter in INVISIBLE else ""
        print(f"  {letter}  {bug.command('exercise.py')}{note}")


def print_solution(name: str):
    if name in BLANKS:
        lines = SCRIPT.read_text().splitlines()
        for gap in BLANKS[name].gaps:
            left_out = lines_of(gap)
            print(f"# ppo_llm.py, lines {left_out.start + 1} to {left_out.stop}, in {gap.function}")
            print("\n".join(lines[i] for i in left_out), end="\n\n")
        return
    sick, healthy = bug_text(name).splitlines(), SCRIPT.read_text().splitlines()
    print("\n".join([*difflib.unified_diff(sick, healthy, "with the bug", "ppo_llm.py", n=2, lineterm="")]))


def show(metric: str, folders: list[Path]) -> int:
    """Print a metric of each iteration of these runs, the oldest first."""
    names = set()
    for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        names |= {name for row in rows for name in row}
        numbers = [row.get(metric) for row in rows]
        if isinstance(numbers[0] if numbers else None, list):  # the steps of an iteration
            numbers = [f"{len(steps)} steps" for steps in numbers]
        texts = [x if isinstance(x, str) else "-" if x is None else f"{x:.3g}" for x in numbers]
        print(f"{folder}: {' '.join(texts)}")
    if metric not in names:
        print(f"{metric}: must be one of {', '.join(sorted(names)) or 'the metrics of a run, but there is none'}")
    return int(metric not in names)


def main() -> int:
    verb, *rest = sys.argv[1:] or [""]
    if verb == "show" and rest:
        folders = [Path(name) for name in rest[1:]] or [path.parent for path in Path("runs").glob("*/metrics.jsonl")]
        return show(rest[0], folders)
    if verb == "list" and not rest:
        print_list()
        return 0
    if verb not in ("blank", "bug", "check", "solution") or not 1 <= len(rest) <= 1 + (verb == "check"):
        print(__doc__)
        return 2
    if verb == "blank" and rest[0] in BLANKS:  # quickly: the other imports take seconds
        write(blank_text(rest[0]))
        print(f"{FILE} is ppo_llm.py without {BLANKS[rest[0]].title}. Write what is missing there:")
        for i, line in enumerate(FILE.read_text().splitlines(), 1):
            if ">>> Your part begins here" in line:
                print(f"  {FILE}, line {i}")
        print(f"Then: python {tool()} check {rest[0]}")
        return 0
    from exercise_bugs import BUGS

    name = rest[0] if rest[0] in BLANKS else rest[0].upper()
    known = {"blank": BLANKS, "bug": BUGS}.get(verb, {**BLANKS, **BUGS})
    if name not in known:
        print(f"{rest[0]}: must be one of {', '.join(known)}")
        return 2
    if verb == "check":
        return check(name, Path(*rest[1:] or [FILE]))
    if verb == "solution":
        print_solution(name)
        return 0
    write(bug_text(name))
    print(f"{FILE} is ppo_llm.py with a bug. Compare these two runs:")
    print(f"  {BUGS[name].command(FILE)}\n  {BUGS[name].command(os.path.relpath(SCRIPT))}")
    print(f"Then: python {tool()} check {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
