"""Exercises for a course: bodies of ppo_llm.py to write yourself, and bugs to find. See docs/exercises.md.

    python tests/exercise.py list             # the exercises
    python tests/exercise.py blank gae        # writes exercise.py: the script without one body, which is yours to write
    python tests/exercise.py blank gae kl     # leaves out several bodies; `blank all` leaves out all of them
    python tests/exercise.py bug C            # writes exercise.py: the script with a bug, which is yours to find
    python tests/exercise.py check gae        # says which rules exercise.py keeps; also `check C`
    python tests/exercise.py solution gae     # shows what the script has there; also `solution C`
    python tests/exercise.py show objective/kl   # prints a metric of the newest run of exercise.py and of ppo_llm.py

`check NAME FILE` checks another file than exercise.py. `check C` says how many rules hold, and no more than that until
all of them do; `check C --explain`, for teachers, says which. `show METRIC RUN ...` is about these run folders.

For a class, see `handout --help`, `grade --help` and `race --help`.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import faulthandler
import functools
import importlib.util
import json
import linecache
import math
import multiprocessing.connection
import os
import re
import signal
import sys
import tempfile
import textwrap
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "ppo_llm.py"
FILE = Path("exercise.py")
# The folder of this file comes first, because the root folder may have an exercise.py of a student.
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]


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
    """`hidden` is a part of a docstring that gives the answer. An exercise does not have it."""

    title: str
    gaps: list[Gap]
    hidden: str = ""


BLANKS = {
    "schedule": Blank("the linear learning-rate schedule", [Gap("linear_schedule")]),
    "value": Blank("the loss of the critic", [Gap("value_loss", """
        Entries outside the mask may be NaN. Replace them before you compute.
        After it there must be `loss`.""", "values, old", "loss = 0.5")]),
    "kl": Blank("the estimators k1, k2 and k3 of the KL", [Gap("kl_estimate", """
        `kind` is "k1", "k2" or "k3":
        k1 is the log of pi / pi_ref. Its mean over samples of pi is the KL.
        k2 is half the square of k1.
        k3 is k1 plus a number whose mean over samples of pi is 0: the ratio r = pi_ref / pi minus 1. It is never
        negative.
        torch.expm1(x) is exp(x) - 1 without the loss of digits near 0.""")]),
    "whiten": Blank("whitening over a mask", [Gap("masked_whiten", """
        x may be NaN outside the mask.
        Divide the sum of squares by the number of sampled tokens minus 1, but at least by 1.
        Add 1e-8 to the variance before you take its root: a constant x becomes 0 and not NaN.""")]),
    "gae": Blank("generalized advantage estimation", [Gap("compute_gae", """
        Returns (advantages, returns), [N, T] each. The return of a token is its advantage plus its value.
        Both are 0 outside the mask, where rewards and values may be NaN.""")]),
    "surrogate": Blank("the clipped surrogate and its statistics", [Gap("policy_loss", """
        Clamp the log-ratio to [-20, 20], so that exp stays finite.
        Entries outside the mask may be NaN. Replace them before you compute.
        dual_clip is None or a number above 1. With a number, a token with a negative advantage A has a loss of at most
        dual_clip * |A|.
        Returns (loss, stats). `stats` has four entries, without gradients, each a sum over the mask divided by denom:
            "clipfrac":  1 where the clip changes the ratio r, whatever the advantage
            "approx_kl": r - 1 - log r, which is k3 of KL(old || new); logratio.expm1() is r - 1
            "ratio_dev": |r - 1|
            "token_share": 1""", "advantages = torch.where")]),
    "sampling": Blank("sampling a token, and its log-prob", [Gap("sample_token", """
        There are `logits` [B, V] of the next token, decoder.temperature, decoder.noise_scale (1, or 0 for greedy
        decoding), decoder.noise_keys [B] and decoder.length [B], the index that the new token will have.
        decoder.draws_noise is False where the script may leave the noise out. You need not use it.
        gumbel_noise(keys [B], index [B], V) gives Gumbel noise [B, V]: the argmax of logits plus Gumbel noise is a
        sample of their softmax.
        After it there must be `token` [B, 1] and `logprob` [B, 1], which is that of the token under the softmax of
        the logits at the temperature. Use no Python numbers of tensors, such as float(x): the host would wait.""",
        "logits /= decoder.temperature", "logprob = logits.gather")]),
    "shift": Blank("the shift by one", [Gap("Transformer.states_before_sampled", """
        self.hidden_states(x, position, packing=packing) gives the states [n, hidden] after each of the n packed
        tokens x [n]. `Packing`, above, says what packing.pack(), packing.position and packing.sampled are.""")]),
    "rewards": Blank("penalty and KL in the reward", [Gap("make_experience", """
        experience.rewards [N, T] already has the rewards of the environment, each at its token.
        There are `episodes`, with episode.stop, episode.score and episode.ids, and experience.old_logprobs and
        experience.ref_logprobs (NaN without a reference), [N, T] each.
        - episode.score, of a reward model (0.0 without one), is added at the last token of an episode, in
          experience.rewards.
        - An episode whose stop is "length" was cut. It loses args.truncation_penalty at its last token, for good: in
          experience.rewards, which is logged.
        - If there is args.kl_coef and no args.kl_loss, `rewards` are experience.rewards reduced at every token by
          kl_coef times the k1 of actor and reference. Else they are experience.rewards. kl_estimate computes k1.
        After it there must be `rewards` [N, T].""", "# FORK: reward shaping", "rewards = experience.rewards")]),
    "advantages": Blank("values, returns and whitened advantages", [Gap("make_experience", """
        There are `rewards` and `mask` [N, T], `experience`, `critic` (or None) and `first_epoch`.
        forward_all(critic.sampled_values, experience, first_epoch, args) gives the values [N, T].
        compute_gae returns (advantages, returns): use the advantages at args.gae_lambda and the returns at
        args.critic_lambda, with args.gamma.
        After it these fields of `experience` must be set: `values` (0 without a critic), `returns`, `advantage_std`
        (a float: the standard deviation over the sampled tokens before whitening, 0 if there is one token or none)
        and `advantages`, whitened. If advantage_std is below 1e-6, the advantages are all 0.
        (The script's threshold grows with the advantages.)""",
        "experience.values = torch.zeros_like", "experience.advantages = masked")]),
    "minibatches": Blank("minibatches, microbatches and their denominator", [
        Gap("minibatch_rows", """
            `generator` gives the order: torch.randperm(n, generator=generator). len(experience.tokens) is N.
            Returns a list of index tensors of args.train_batch_size samples. The last one may be smaller: it has the
            samples that are left. Leave out a minibatch without sampled tokens. Its gradients are 0, but Adam's
            momentum would move the weights. In a minibatch that has some, a sample without them stays, so that
            the number of steps is that of the plan.""", "order = torch.randperm"),
        Gap("minibatches", """
            minibatch_rows(...) gives the samples of each minibatch.
            experience.microbatches(rows, args) divides the samples `rows`, an index tensor, into Microbatch objects.
            It also picks this rank's part, so you need not think of ranks.
            Yield an int, `n_tokens`, and the Microbatch objects, as a list or a generator.""")]),
    "packing": Blank("packing samples without padding", [
        Gap("Packing.from_lengths", """
            Returns cls(shape, flat_index, position, sampled, starts), as in the example above. `lengths` [B] are those
            of the samples, `mask` is [B, T]. upload(x, device) puts a tensor on the device.""", "T = mask.shape"),
        Gap("Packing.pack", "x.flatten(0, 1) is [B * T, ...]."),
        Gap("Packing.unpack", """
            x.new_zeros(...) is a start, and math.prod(self.shape) is B * T. Gradients must reach x."""),
        Gap("Packing.unpack_sampled", """
            x has one number for each of the m sampled tokens. Return a tensor of its own (clone), not a view of
            another one: under FSDP a hook on it would be lost if a caller changed the view in place.""")]),
    "gradient": Blank("the gradient of the log-softmax and of the entropy", [Gap("chunk_gradients", """
        `hidden` is [rows, d], `weight` [V, d], `targets` [rows]. d_logprobs and d_entropies [rows] are the gradients
        of the loss with respect to the log-probs of the targets and to the entropies.
        The logits are float32_product(hidden, weight.T) / temperature. The result is the gradient of the loss with
        respect to float32_product(hidden, weight.T), in the dtype of the weight. Derive it on paper first. Logits may
        be as large as 200, and probabilities so small that they are rounded to 0.""")], hidden="""

    With z = logits / temperature, p = softmax(z) and the entropy H, the gradient of log p[i] with
    respect to z is onehot(i) - p, and that of H is -p * (log p + H).
    """),
}  # fmt: skip


@functools.cache
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


def blank_text(*names: str) -> str:
    """The script without the parts of these exercises."""
    lines = SCRIPT.read_text().splitlines()
    gaps = [(lines_of(gap), name, gap) for name in names for gap in BLANKS[name].gaps]
    for left_out, name, gap in sorted(gaps, key=lambda x: x[0].start, reverse=True):
        indent = lines[left_out.start][: -len(lines[left_out.start].lstrip())]
        note = textwrap.dedent(gap.note).strip().splitlines()
        part = [f"# >>> Your part of `{name}` begins here.", *(f"# {line}".rstrip() for line in note)]
        part += [f'raise NotImplementedError("{unwritten(name, gap)}")', "# <<< Your part ends here."]
        lines[left_out.start : left_out.stop] = [indent + line for line in part]
    text = "\n".join(lines) + "\n"
    for name in names:
        if hidden := BLANKS[name].hidden:
            assert text.count(hidden) == 1, name
            text = text.replace(hidden, "")
    return text


def unwritten(name: str, gap: Gap) -> str:
    return f"{name}: your part of {gap.function}"


def bug_text(letter: str) -> str:
    from exercise_bugs import BUGS
    from plant_faults import plant, read_faults

    _, old, new = read_faults()[BUGS[letter].fault]
    return without_checks(plant(old, new)["ppo_llm.py"])


def without_checks(text: str) -> str:
    """The script without two checks that end a run in its first iteration, with an error that names the bug."""
    from plant_faults import read_faults

    for check in "denominator_of_a_microbatch_is_not_seen", "first_kl_is_not_checked":
        _, seen, unseen = read_faults()[check]
        text = text.replace(seen, unseen)
    return text


# The first line of exercise.py says which exercise it is.
RECORD = "# Exercise {} of docs/exercises.md. `python tests/exercise.py check` reads this line.\n"


def recorded(text: str) -> list[str]:
    """The names in the first line of an exercise. None are known of another file."""
    found = re.match(re.escape(RECORD).replace(r"\{\}", "([a-zA-Z ]+)"), text)
    return found[1].split() if found else []


def exercise_text(*names: str) -> str:
    """What exercise.py has before the student changes it."""
    body = blank_text(*names) if names[0] in BLANKS else bug_text(names[0])
    return RECORD.format(" ".join(names)) + body


class Fill(ast.NodeTransformer):
    """Put the script's lines in place of the parts that are not yet written, except for those of one exercise.

    The new nodes have the line number of the old one, so that tracebacks fit the student's file.
    """

    def __init__(self, name: str):
        self.parts = {unwritten(other, gap): gap for other in BLANKS if other != name for gap in BLANKS[other].gaps}

    def visit_Raise(self, node):
        words = [x.value for x in ast.walk(node) if isinstance(x, ast.Constant)]
        if len(words) != 1 or words[0] not in self.parts:
            return node
        lines = SCRIPT.read_text().splitlines()
        solution = "\n".join(lines[i] for i in lines_of(self.parts[words[0]]))
        statements = ast.parse(textwrap.dedent(solution)).body
        for statement in statements:
            for x in ast.walk(statement):
                if hasattr(x, "lineno"):
                    x.lineno, x.end_lineno = node.lineno, node.end_lineno
                    x.col_offset = x.end_col_offset = 0
        return statements


# === Check ===


def read_source(path: Path | str) -> str:
    """The text of a Python file, in any encoding in which Python runs it (PEP 263)."""
    return importlib.util.decode_source(Path(path).read_bytes())


def load(path: Path | str, text: str | None = None, name: str | None = None):
    """A script as a module. With `name`, the unwritten parts of other exercises are those of the script.

    Errors of syntax and of import are the caller's to show.
    """
    import torch.distributed as dist

    if not dist.is_initialized():  # as `connect` of the script does
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = types.ModuleType(f"exercise_of_the_student_{len(sys.modules)}")  # a name of its own, for pickle
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look there
    text = read_source(path) if text is None else text
    linecache.cache[str(path)] = len(text), None, text.splitlines(keepends=True), str(path)
    with warnings.catch_warnings(action="ignore"):  # The environments are registered again.
        tree = ast.parse(text, str(path))
        exec(compile(Fill(name).visit(tree) if name else tree, str(path), "exec"), vars(module))
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
    return f"{x + 0.0:.4g}" if isinstance(x, float) else str(x)  # -0.0 becomes 0.0


def own_frames(error: BaseException, path: str) -> list[traceback.FrameSummary]:
    """The frames of the traceback that are in the student's file."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]


def error_text(error: BaseException) -> str:
    text = "".join(traceback.format_exception_only(error)).strip()
    return re.sub(r"exercise_of_the_student_\d+\.", "", text)


SHOWN_CALLS = 5  # at both ends of a traceback


def shown_calls(calls: list[tuple[int, str, str]]) -> list[str]:
    """A line of text for each (line number, function, code). A recursion has many: the middle is left out."""
    lines = [f"  line {number}, in {function}:  {code}" for number, function, code in calls]
    if (left_out := len(lines) - 2 * SHOWN_CALLS) > 0:
        lines[SHOWN_CALLS:-SHOWN_CALLS] = [f"  ... {left_out} more calls"]
    return lines


def failure(error: BaseException, path: str) -> list[str]:
    """What went wrong, in lines."""
    from exercise_rules import Broken

    if isinstance(error, Broken):
        names = [*error.given, f"{error.what}: expected", f"{error.what}: got"]
        values = [*error.given.values(), error.expected, error.got]
        width = max(map(len, names))
        return [f"{name:{width}}  {shown(value)}" for name, value in zip(names, values)]
    frames = own_frames(error, path)
    if not frames:
        return ["the result cannot be used here:", *error_text(error).splitlines()]
    calls = shown_calls([(frame.lineno, frame.name, frame.line) for frame in frames])
    return [f"{path} stops with an error:", *calls, *(f"  {line}" for line in error_text(error).splitlines()[:6])]


HOLDS, BROKEN, ERROR, NOT_YET, ENDED = "holds", "broken", "error", "not yet written", "ended"


class Result(NamedTuple):
    """What came of a rule: HOLDS, BROKEN, an ERROR of Python, NOT_YET, or the process has ENDED. `of` so many rules."""

    words: str
    lines: list[str]
    kind: str
    of: int


def rules_of(name: str) -> list[tuple[str, Callable]]:
    """The rules of an exercise. Of a bug, a letter or a name of faults.txt: first its own, then those of all blanks."""
    from exercise_rules import RULES

    if name in BLANKS:
        return RULES[name]
    from exercise_bugs import BUGS, HIDDEN

    own = (BUGS[name].words, BUGS[name].check) if name in BUGS else ("The bug is gone.", HIDDEN[name][1])
    return [own, *(pair for rules in RULES.values() for pair in rules)]


def try_rules(name: str, module, path: str, begins=lambda words, of: None) -> Iterator[Result]:
    """Try the rules one after another, until one finds a part that is not yet written."""
    from exercise_rules import Broken

    rules = rules_of(name)
    for words, function in rules:
        begins(words, len(rules))
        lines, kind = [], HOLDS
        try:
            function(module)
        except (Exception, SystemExit) as error:
            lines, kind = failure(error, path), BROKEN if isinstance(error, Broken) else ERROR
            # PyTorch raises NotImplementedError as well, for dtypes that an operation does not have.
            if isinstance(error, NotImplementedError) and str(error) in EVERY_UNWRITTEN:
                lines, kind = [f"{error} ({path}, line {own_frames(error, path)[-1].lineno})"], NOT_YET
        yield Result(words, lines, kind, len(rules))
        if kind == NOT_YET:
            return


EVERY_UNWRITTEN = {unwritten(name, gap) for name, blank in BLANKS.items() for gap in blank.gaps}


# === Check in a process of its own. A file may loop for ever, crash, or end its process.

TIME_LIMIT = 60.0  # seconds for loading a file, and for each rule
PRELOADED = ["torch.distributed.checkpoint", "torch.utils.tensorboard", "transformers", "gymnasium", "tyro"]


class Unloadable(Exception):
    """The file has no rules to try. Its text says why."""


def serve(sender, dump: str, name: str, path: str, limit: float, enclose: Callable):
    """In the process: load the file, try its rules, and send what comes of it, in JSON."""
    os.setsid()  # The group of this process ends with it.
    # tqdm makes a lock. This kind has no name, which would be reported as leaked when the process is killed.
    multiprocessing.set_start_method("fork", force=True)
    enclose()
    sys.stdout.reconfigure(line_buffering=True)
    send = lambda *message: sender.send_bytes(json.dumps(message).encode())
    with open(dump, "w") as file:
        faulthandler.enable(file)  # It writes the lines of a crash.

        def begins(words="", of=0):
            # A thread without Python's lock writes the lines of a loop, and ends the process.
            faulthandler.dump_traceback_later(limit, exit=True, file=file)
            send("begins", words, of)

        begins()
        try:
            ast.parse(text := read_source(path))
        except (SyntaxError, ValueError) as error:  # or a UnicodeDecodeError, or a null byte
            return send("unloadable", f"{path} is no Python program:\n{error_text(error)}")
        try:
            module = load(path, text, name)
        except (Exception, SystemExit) as error:
            return send("unloadable", "\n".join(failure(error, path)))
        for result in try_rules(name, module, path, begins):
            send("result", *result)
        send("all")


def how_it_ended(code: int, dump: str, path: str, source: list[str], limit: float) -> list[str]:
    """Why a process has ended before all its rules, in lines. `code` is None if it had to be ended."""
    lines = [f"{path} ends the process that checks it, with exit code {code}."]
    if "Timeout" in dump or code is None:
        lines = [f"{path} has no result after {limit:g} seconds. Is this a loop without an end?"]
    elif code < 0:
        lines = [f"{path} ends the process that checks it, by {signal.Signals(-code).name}."]
    file = path.encode("ascii", "backslashreplace").decode()  # as in the dump
    frames = reversed(re.findall(rf'File "{re.escape(file)}", line (\d+) in (.+)', dump))
    return lines + shown_calls([(int(n), name, "".join(source[int(n) - 1 : int(n)]).strip()) for n, name in frames])


def try_in_process(
    name: str, path: str, limit: float | None = None, seconds: float = math.inf, enclose: Callable = int
) -> Iterator[Result]:
    """`try_rules` of a file, in a process of its own with a limit of time for each rule, and one for all of them.

    `enclose` is called there first. Raises Unloadable. Where the process ends, the rule that it tried is ENDED, and
    those after it are not tried.
    """
    limit, source = limit or TIME_LIMIT, []
    with contextlib.suppress(SyntaxError, UnicodeDecodeError):  # The process says so.
        source = read_source(path).splitlines()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # A second process starts quickly.
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r") as dump:
        process = context.Process(target=serve, args=(sender, dump.name, name, path, limit, enclose))
        process.start()  # This waits for the server, which imports the libraries.
        deadline = time.monotonic() + seconds
        sender.close()
        words, of = "", 0
        try:
            while True:
                left = None if seconds == math.inf else max(0.0, deadline - time.monotonic())
                if not multiprocessing.connection.wait([receiver, process.sentinel], left):
                    raise TimeoutError
                # It may have ended, while its children still hold the pipe.
                kind, *rest = json.loads(receiver.recv_bytes()) if receiver.poll() else ["end"]
                if kind == "begins":
                    words, of = rest
                elif kind == "result":
                    yield Result(*rest)
                elif kind == "unloadable":
                    raise Unloadable(*rest)
                elif kind == "all":
                    return
                else:
                    raise EOFError
        except (EOFError, TimeoutError) as error:
            code = None
            if isinstance(error, EOFError):
                process.join()
                code = process.exitcode
            lines = how_it_ended(code, dump.read(), path, source, limit if code is not None else seconds)
            if not words:
                raise Unloadable("\n".join(lines)) from None
            yield Result(words, lines, ENDED, of)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(words or f"{path} was loaded") from None
        finally:
            for kill in os.killpg, os.kill:  # its group, if it has one already
                with contextlib.suppress(ProcessLookupError):
                    kill(process.pid, signal.SIGKILL)
            process.join()


def report(results: list[Result], say=print) -> list[str]:
    """Say of each rule whether it holds. Returns the words of those that do not, or that something is not written.

    An error that stops several rules is shown once, at the end.
    """
    errors = [tuple(result.lines) for result in results if result.kind == ERROR]
    broken, earlier = [], None
    for words, lines, kind, _ in results:
        if kind == NOT_YET:
            say(f"{NOT_YET}: {lines[0]}")
            broken.append(NOT_YET)
        elif kind == HOLDS:
            say(f"holds  {words}")
        else:
            broken.append(words)
            if errors.count(tuple(lines)) < 2:
                details = ["the same"] if lines == earlier else lines
                say("\n".join([f"FAILS  {words}", *(f"         {line}" for line in details)]))
            earlier = lines
    for lines in dict.fromkeys(errors):
        if (count := errors.count(lines)) > 1:
            head = "Your code stops with an error" if " stops with" in lines[0] else "The result cannot be used"
            say("\n".join([f"\n{head} in {count} of {results[0].of} rules:", *(f"  {line}" for line in lines[1:])]))
    return broken


def check_blank(name: str, results: Iterator[Result], say=print) -> list[str]:
    results = list(results)
    broken, count = report(results, say), results[0].of
    if not broken:
        say(f"\nAll {count} rules hold. Compare it with the script: python tests/exercise.py solution {name}")
    elif NOT_YET not in broken:
        untried = f" {count - len(results)} were not tried." if len(results) < count else ""
        say(f"\n{len(results) - len(broken)} of {count} rules hold.{untried}")
    return broken


def check_bug(letter: str, results: Iterator[Result], say=print) -> list[str]:
    """Say how many rules hold. Which do not is left to the student, since their words are half of the answer."""
    results = list(results)
    broken = [words for words, _, kind, _ in results if kind != HOLDS]
    if not broken:
        say(f"holds  {results[0].words}\nholds  all {len(results) - 1} rules of part 1\n\nThe bug is gone. "
            f"Compare it with the script: python {tool()} solution {letter}")
        return broken
    for result in results:
        if result.kind == ENDED:
            say("\n".join(result.lines))
    say(f"{len(results) - len(broken)} of {results[0].of} rules hold.")
    return broken


def explain_bug(letter: str, results: Iterator[Result], say=print) -> list[str]:
    """The same for a teacher: which rule does not hold, with what was expected and found."""
    own = next(results)
    broken = report([own], say)
    if broken:
        say("\nThe bug is still there.")
        return broken
    other, results = [], list(results)
    broken = report(results, other.append)
    if broken:
        say("\n".join(line for line in other if not line.startswith("holds")))
        say("\nThe bug is gone, but something else is wrong now.")
    else:
        say(f"holds  all {len(results)} rules of part 1\n\nThe bug is gone.")
    return broken


def check(name: str, file: Path, explain: bool = False) -> int:
    """The exit code: 0 if all rules hold."""
    if not file.is_file():
        print(f"There is no {file} in this folder. `blank NAME` or `bug LETTER` writes it.")
        return 2
    path, names = str(file), []
    with contextlib.suppress(SyntaxError, UnicodeDecodeError):  # The process says so.
        names = recorded(read_source(path))
    if names and name not in names:
        command = " ".join([f"python {tool()} check {names[0]}", *([path] if file != FILE else [])])
        print(f"{path} is exercise {' '.join(names)}, not {name}. Did you mean: {command}?")
        return 2
    try:
        judge = check_blank if name in BLANKS else explain_bug if explain else check_bug
        broken = judge(name, try_in_process(name, path))
    except Unloadable as error:
        print(error)
        return 1
    except KeyboardInterrupt as error:
        print(f"\nStopped. This was tried: {error}")
        return 130
    return int(bool(broken))


# === Commands ===


def keep_earlier(text: str):
    """What stands in exercise.py is renamed, so that no work is lost."""
    if not FILE.exists():
        return
    earlier = ""
    with contextlib.suppress(SyntaxError, UnicodeDecodeError):  # It is kept.
        earlier = read_source(FILE)
    names = recorded(earlier)
    if earlier in (text, SCRIPT.read_text()) or (names and earlier == exercise_text(*names)):
        print(f"The earlier {FILE} is not kept, because it has no changes.")
        return
    stem = "all" if names == [*BLANKS] else "_".join(names) or "earlier"
    kept, i = Path(f"exercise_{stem}.py"), 1
    while kept.exists():
        i += 1
        kept = Path(f"exercise_{stem}_{i}.py")
    FILE.rename(kept)
    print(f"The earlier {FILE} is now {kept}.")


def write(*names: str):
    text = exercise_text(*names)
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
    sick, healthy = bug_text(name).splitlines(), without_checks(SCRIPT.read_text()).splitlines()
    print("\n".join([*difflib.unified_diff(sick, healthy, "with the bug", "ppo_llm.py", n=2, lineterm="")]))


def read_run(folder: Path) -> tuple[dict, list[dict]]:
    """config.json and the rows of metrics.jsonl of a run folder. Raises ValueError with a message.

    A last line that is torn is left out: a run that goes on may be writing it.
    """
    try:
        path = folder / "config.json"
        config = json.loads(path.read_bytes())
        if not config["args"] or not config["argv"]:
            raise ValueError
        path = folder / "metrics.jsonl"
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{folder} is no run folder: {path.name}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is damaged: it must have the args and the argv of a run, as JSON") from None
    rows = []
    for i, line in enumerate(lines, 1):
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            if i < len(lines):
                raise ValueError(f"{path}, line {i} is damaged: {line!r:.80}") from None
    return config, rows


NOT_FLAGS = "run_name", "log_dir", "resume", "save_every", "track", "wandb_project"  # which change no metric


@dataclass
class Run:
    folder: Path

    def __post_init__(self):
        config, self.rows = read_run(self.folder)
        self.script = Path(config["argv"][0]).stem
        self.flags = " ".join(config["argv"][1:])
        self.args = {name: x for name, x in config["args"].items() if name not in NOT_FLAGS}
        self.time = (self.folder / "config.json").stat().st_mtime

    def numbers(self, metric: str) -> str:
        def text(x) -> str:
            if isinstance(x, list):  # the steps of an iteration
                return f"{len(x)} steps"
            return "-" if x is None else f"{x:.3g}" if isinstance(x, int | float) else str(x)

        return " ".join(text(row.get(metric)) for row in self.rows) or "(no iteration has ended)"


def readable_runs(folders: Iterable[Path]) -> list[Run]:
    """The runs of these folders. A folder that cannot be read is named and left out."""
    runs = []
    for folder in folders:
        try:
            runs.append(Run(folder))
        except ValueError as error:
            print(f"Left out: {error}.")
    return runs


def newest_runs() -> list[Run]:
    """The newest run of exercise.py, and the newest one of the script with the same flags."""
    runs = readable_runs(path.parent for path in Path("runs").glob("*/metrics.jsonl"))
    runs.sort(key=lambda run: run.time, reverse=True)
    sick = next((run for run in runs if run.script == FILE.stem), None)
    if not sick:
        print(f"runs/ has no run of {FILE}.")
        return []
    if FILE.exists() and sick.time < FILE.stat().st_mtime:
        print(f"{FILE} has changed since its newest run.")
    healthy = next((run for run in runs if run.script == SCRIPT.stem and run.args == sick.args), None)
    if not healthy:
        command = f"python {os.path.relpath(SCRIPT)} {sick.flags}".rstrip()
        print(f"runs/ has no run of the healthy script with the same flags: {command}")
    return [sick, healthy] if healthy else [sick]


def show(metric: str, folders: list[Path]) -> int:
    """Print a metric of each iteration."""
    runs = readable_runs(folders) if folders else newest_runs()
    names = sorted({name for run in runs for row in run.rows for name in row})
    if names and metric not in names:
        similar = [name for name in names if metric in name] or difflib.get_close_matches(metric, names, cutoff=0.3)
        print(f"There is no metric {metric}. Similar names: {', '.join(similar[:6]) or 'none'}.")
        return 2
    for run in runs:
        place = f"   ({run.folder})" if folders else ""
        print(f"{run.script} {run.flags}".rstrip() + f"{place}\n    {run.numbers(metric)}")
    return 0 if runs else 2


SHOW_HELP = """python tests/exercise.py show METRIC [RUN ...]

Prints METRIC, such as objective/kl, of each iteration. Without RUN it is about two runs in runs/: the newest one of
exercise.py, and the newest one of ppo_llm.py with the same flags. RUN is a run folder, such as runs/NAME."""


def main() -> int:
    verb, *rest = sys.argv[1:] or [""]
    if verb == "show":
        if not rest or rest[0] in ("-h", "--help"):
            print(SHOW_HELP)
            return 0 if rest else 2
        return show(rest[0], [*map(Path, rest[1:])])
    if verb in ("handout", "grade", "race"):
        import exercise_class

        return exercise_class.main([verb, *rest])
    if verb in ("-h", "--help"):
        print(__doc__)
        return 0
    if verb == "list" and not rest:
        print_list()
        return 0
    if FILE.resolve() == Path(__file__).resolve():  # An exercise would take the place of this file.
        print("Type the commands in the root folder of the repository: python tests/exercise.py ...")
        return 2
    explain = verb == "check" and "--explain" in rest
    if explain:
        rest.remove("--explain")
    most = {"blank": len(BLANKS), "bug": 1, "check": 2, "solution": 1}
    if not 1 <= len(rest) <= most.get(verb, 0):
        print(__doc__)
        return 2
    if verb == "blank" and (rest == ["all"] or set(rest) <= BLANKS.keys()):  # quickly: the other imports take seconds
        names = [name for name in BLANKS if name in rest or rest == ["all"]]
        write(*names)
        titles = [BLANKS[name].title for name in names]
        parts = ", ".join(titles) if len(titles) < 4 else f"the bodies of {len(titles)} exercises"
        print(f"{FILE} is ppo_llm.py without {parts}.")
        print("Write what is missing there:")
        for i, line in enumerate(FILE.read_text().splitlines(), 1):
            if found := re.match(r" *# >>> Your part of `(\w+)` begins here", line):
                print(f"  {FILE}, line {i}" + (f" ({found[1]})" if len(names) > 1 else ""))
        print(f"Then: python {tool()} check {names[0] if len(names) == 1 else 'NAME'}")
        return 0
    if verb == "check" and rest[0] in BLANKS:
        return check(rest[0], Path(*rest[1:] or [FILE]))
    from exercise_bugs import BUGS, INVISIBLE

    known = {"blank": [*BLANKS, "all"], "bug": BUGS}.get(verb, {**BLANKS, **BUGS})
    for name in rest if verb == "blank" else rest[:1]:
        if name not in known and name.upper() not in known:
            print(f"{name}: must be one of {', '.join(known)}")
            return 2
    if verb == "blank":
        print("`all` stands alone.")
        return 2
    name = rest[0] if rest[0] in BLANKS else rest[0].upper()
    if verb == "check":
        return check(name, Path(*rest[1:] or [FILE]), explain)
    if verb == "solution":
        print_solution(name)
        return 0
    write(name)
    if name in INVISIBLE:
        print(f"{FILE} is ppo_llm.py with a bug that no metric shows. Read the code.")
    else:
        print(f"{FILE} is ppo_llm.py with a bug. Compare these two runs:")
        print(f"  {BUGS[name].command(FILE)}\n  {BUGS[name].command(os.path.relpath(SCRIPT))}")
    print(f"Then: python {tool()} check {name}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this process without a traceback.
    sys.exit(main())
