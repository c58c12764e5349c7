"""Exercises that are graded: a folder for each student of a class, and a table of what they hand in.

Students' files are programs. Each runs in a process of its own, which `enclose` closes off as far as it may.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import fcntl
import hashlib
import hmac
import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import exercise
from exercise import BLANKS, ENDED, ERROR, HOLDS, NOT_YET

BODIES, BUG = "bodies.py", "bug.py"  # the files of a student

# === Handout ===

# A short run in which temperature and KL differ from the defaults, so that more bugs show.
FLAGS = ("--num-iterations 6 --sft-steps 10 --eval-episodes 16 --save-every 0 --rollout-batch-size 64 "
         "--train-batch-size 16 --kl-coef 0.1 --temperature 0.7")  # fmt: skip

LETTER = """# {name}

**bodies.py** is ppo_llm.py without {bodies}. Write what is missing between the lines with `>>>` and `<<<`, and leave
the rest as it is. `python tests/exercise.py check NAME {folder}/bodies.py` tries the rules of a body.

**bug.py** is ppo_llm.py with a bug. It shows in the metrics of a short run. (Two checks of check_iteration are turned
off as well, by `if False:`. They are not the bug: they would end some runs with an error that names it.) Compare these
two:

    python {folder}/bug.py {flags} --run-name sick
    python ppo_llm.py {flags} --run-name healthy
    python tests/exercise.py show METRIC runs/sick runs/healthy

Correct the bug in bug.py. A comparison of the two files would show it, and would teach you nothing: what counts is the
paragraph.

Hand in this folder with both files and **bug.md**, a paragraph of at most 150 words: which number was wrong, how you
came from it to the line, why the line gives that number, and which invariant would have shown it at once.
"""


def read_roster(path: Path) -> list[str]:
    """The names, one a line. They become names of folders."""
    names = [line.strip() for line in path.read_text("utf-8-sig").splitlines() if line.strip()]
    for name in names:
        if not re.fullmatch(r"\w[\w .,'@+-]*", name) or len(name.encode()) > 200:
            raise ValueError(f"{path}: {name!r:.80} cannot be the name of a folder")
    folded = [name.casefold() for name in names]
    if twice := {name for name in names if folded.count(name.casefold()) > 1}:
        raise ValueError(f"{path}: more than once: {', '.join(sorted(twice))}")
    if not names:
        raise ValueError(f"{path}: there are no names")
    return names


def draw(name: str, secret: str) -> str:
    """The bug of a student. If the list of bugs grows, few students get another one."""
    from exercise_bugs import HIDDEN

    key = lambda bug: hmac.new(secret.encode(), f"{name}\0{bug}".encode(), hashlib.sha256).digest()
    return max(HIDDEN, key=key)


def bug_text(fault: str) -> str:
    from plant_faults import plant, read_faults

    _, old, new = read_faults()[fault]
    return exercise.without_checks(plant(old, new)["ppo_llm.py"])


def handout(roster: Path, secret: str, folder: Path, bodies: list[str]):
    names = read_roster(roster)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: name another one with --to")
    for name in names:
        (own := folder / name).mkdir(parents=True)
        (own / BODIES).write_text(exercise.exercise_text(*bodies))
        (own / BUG).write_text(bug_text(draw(name, secret)))
        titles = ", ".join(BLANKS[body].title for body in bodies)
        letter = LETTER.format(name=name, bodies=titles, folder=f"{folder}/{name}", flags=FLAGS)
        (own / "README.md").write_text(letter)
    print(f"{folder} has {len(names)} folders. Keep the secret: `grade` needs it, and it tells who has which bug.")


# === A process that is closed off ===

MEMORY = 3 * 2**30  # bytes beyond what PyTorch and the script take
FILE_SIZE = 64 * 2**20
PROCESSES = 2000  # of this user; does not hold for root
USER, PID, NETWORK = 0x10000000, 0x20000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET
LIBC = ctypes.CDLL(None, use_errno=True)


def enter_namespaces() -> bool:
    """Whether the system permits it. A process that is forked after it sees no network and no other processes."""
    return LIBC.unshare(USER | PID | NETWORK) == 0 or LIBC.unshare(PID | NETWORK) == 0


def namespaces_are_permitted() -> bool:
    if not (child := os.fork()):
        os._exit(not enter_namespaces())
    return os.waitpid(child, 0)[1] == 0


def enclose():
    """Limit memory, the size of files and the number of processes. Close off network and other processes, if permitted.

    This process forks, and goes on as the first of its namespace: with it end all that it has started.
    """
    if enter_namespaces():
        if child := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code < 0:
                signal.signal(-code, signal.SIG_DFL)
                os.kill(os.getpid(), -code)
            os._exit(max(0, code))
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent.
        os.setsid()
        with socket.socket() as any_socket:  # The loopback device is up: torch.distributed looks for one.
            request = struct.pack("16sh", b"lo", 1)  # IFF_UP
            fcntl.ioctl(any_socket, 0x8914, request.ljust(40, b"\0"))  # SIOCSIFFLAGS
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = {"AS": size + MEMORY, "FSIZE": FILE_SIZE, "NPROC": PROCESSES, "CORE": 0}
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in 0, 1, 2:
        os.dup2(nothing, stream)


# === Grade ===

FILE_SECONDS = 600.0  # for all rules of a file


def word_for(kind: str, lines: list[str]) -> str:
    """An error in a word."""
    text = "\n".join(lines)
    if kind == NOT_YET:
        return "unwritten"
    if "MemoryError" in text or "allocate memory" in text:
        return "memory"
    if " has no result after " in text:
        return "time"
    if " ends the process that checks it" in text or "SystemExit" in text:
        return "exit" if "exit code" in text or "SystemExit" in text else "crash"
    if "is no Python program" in text:
        return "syntax"
    found = re.findall(r"^\s*(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Warning))\b", text, re.MULTILINE)
    return found[-1] if found else "error"


def try_file(name: str, text: bytes | None, limit: float) -> tuple[int, str, list[bool]]:
    """(how many rules of an exercise hold, an error in a word or "", whether each rule that was tried holds)"""
    if text is None:
        return 0, "missing", []
    results, error = [], ""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("handed_in.py").write_bytes(text)
        tried = exercise.try_in_process(name, "handed_in.py", limit, FILE_SECONDS, enclose)
        try:
            for result in tried:
                results.append(result.kind == HOLDS)
                if result.kind in (ERROR, ENDED, NOT_YET):
                    error = error or word_for(result.kind, result.lines)
        except exercise.Unloadable as unloadable:
            error = word_for("", str(unloadable).splitlines())
    return sum(results), error, results


def grade(folder: Path, secret: str, table: Path, bodies: list[str], limit: float):
    """Write a line for each student into `table`. All files are read before the first one runs.

    A rule may take `limit` seconds.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not names:
        raise ValueError(f"{folder} has no folders")
    handed_in = {(name, file): read_handed_in(folder / name / file) for name in names for file in (BODIES, BUG)}
    if not namespaces_are_permitted():
        print("This system permits no namespaces. Students' files can reach the network and other processes.")
    # What the many processes need is imported once, before a file of a student runs. Python 3.11 finds it by this only.
    os.environ["PYTHONPATH"] = os.pathsep.join(str(path) for path in (Path(__file__).parent, exercise.ROOT))
    exercise.PRELOADED += ["ppo_llm", "exercise", "exercise_bugs", "plant_faults"]
    rules = {body: len(exercise.rules_of(body)) for body in bodies}
    of_bug = len(exercise.rules_of(draw("", secret)))
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", *bodies, "rules", "of", "error", "bug", "bug_rules", "bug_of", "bug_error", "seconds"])
        for name in names:
            start = time.monotonic()
            tried = {body: try_file(body, handed_in[name, BODIES], limit) for body in bodies}
            held, bug_error, results = try_file(draw(name, secret), handed_in[name, BUG], limit)
            is_gone = results[:1] == [True]
            bug = "found" if held == of_bug else "something else is wrong" if is_gone else "there" if results else ""
            writer.writerow([
                name, *(count for count, *_ in tried.values()), sum(count for count, *_ in tried.values()),
                sum(rules.values()), next((error for _, error, _ in tried.values() if error), ""), bug, held, of_bug,
                bug_error, f"{time.monotonic() - start:.0f}",
            ])  # fmt: skip
            file.flush()
    print(f"{table} has {len(names)} students.")


def read_handed_in(path: Path) -> bytes | None:
    """None of what is no file, or is too large to be a script."""
    if not path.is_file() or path.is_symlink() or path.stat().st_size > 2**20:
        return None
    return path.read_bytes()


# === Race ===

SHARE, WINDOW = 0.9, 512  # of so many training samples in a row
CPU_SECONDS = 300


def race(file: Path, seed: int) -> int:
    """Run a student's file on the default task, and say how many samples it took until nine in ten are right.

    `race_environment` plays the task and counts, so that neither the file's metrics nor its task are believed.
    """
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    with tempfile.TemporaryDirectory() as folder:
        count = Path(folder, "count.json")
        kwargs = {"path": str(count), "share": SHARE, "window": WINDOW}
        command = [sys.executable, str(file.resolve()), "--seed", str(seed), "--env-id", "race_environment:Race-v0",
                   "--env-kwargs", json.dumps(kwargs), "--eval-env-kwargs", '{"path": ""}', "--eval-episodes", "0",
                   "--save-every", "0", "--device", "cpu", "--run-name", "race"]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
        limit = lambda: resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        with subprocess.Popen(command, cwd=folder, env=environment, preexec_fn=limit, start_new_session=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE) as process:  # fmt: skip
            errors = process.stderr.read().decode(errors="replace")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime
        found = json.loads(count.read_text()) if count.exists() else {"samples": 0, "right": 0.0}
    if found["right"] >= SHARE:
        print(f"{found['samples']} samples, {seconds:.0f} s of CPU")
        return 0
    last = [line for line in errors.splitlines() if line.startswith("error:")][-1:]
    print(f"not reached: after {found['samples']} samples and {seconds:.0f} s of CPU {found['right']:.0%} of the last "
          f"{WINDOW} are right", *last)  # fmt: skip
    return 1


# === Commands ===


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"python {exercise.tool()}", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    bodies = dict(nargs="+", choices=[*BLANKS], metavar="NAME", default=["gae", "surrogate", "shift"],
                  help="the bodies to write, by default gae surrogate shift")  # fmt: skip
    secret = dict(required=True, help="a text that only the teacher knows; with the name it draws a student's bug")
    one = verbs.add_parser("handout", help="write a folder for each student")
    one.add_argument("roster", type=Path, help="a file with a name in each line")
    one.add_argument("--secret", **secret)
    one.add_argument("--to", type=Path, default=Path("handout"), help="the folder to write to, by default handout")
    one.add_argument("--bodies", **bodies)
    one = verbs.add_parser("grade", help="write a table of what was handed in")
    one.add_argument("folder", type=Path, help="has a folder for each student, as `handout` wrote it")
    one.add_argument("--secret", **secret)
    one.add_argument("--to", type=Path, default=Path("grades.csv"), help="the table, by default grades.csv")
    one.add_argument("--bodies", **bodies)
    one.add_argument("--limit", type=float, default=exercise.TIME_LIMIT, help="seconds for each rule, by default 60")
    one = verbs.add_parser("race", help="count the samples that a file needs until nine in ten answers are right")
    one.add_argument("file", type=Path, help="a changed ppo_llm.py")
    one.add_argument("--seed", type=int, required=True, help="the seed of the run")
    args = parser.parse_args(words)
    try:
        if args.verb == "handout":
            handout(args.roster, args.secret, args.to, args.bodies)
        elif args.verb == "grade":
            grade(args.folder, args.secret, args.to, args.bodies, args.limit)
        else:
            return race(args.file, args.seed)
    except (ValueError, OSError) as error:
        print(error)
        return 2
    return 0
