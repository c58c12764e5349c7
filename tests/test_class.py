"""A class: what is handed out, and the table of what forty students hand in, twelve of them with bad intentions."""

import csv
import functools
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import exercise
import exercise_bugs
import exercise_class
import exercise_rules
import plant_faults
import pytest
import tyro
from conftest import ROOT

pytestmark = pytest.mark.shared
SCRIPT = exercise.SCRIPT.read_text()
FAULTS = plant_faults.read_faults()
HIDDEN = exercise_bugs.HIDDEN
RULES = len(exercise_rules.RULES["schedule"])


def call(*words):
    return exercise_class.main([str(word) for word in words])


def test_every_student_gets_a_folder_and_a_bug_that_the_secret_draws(tmp_path, capsys):
    names = [f"Student {i}" for i in range(60)]
    (tmp_path / "roster").write_text("\ufeff" + "\n\n".join(names) + "\n", "utf-8")
    folder = tmp_path / "class"
    assert call("handout", tmp_path / "roster", "--secret", "s", "--to", folder, "--bodies", "gae", "kl") == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    drawn = {name: exercise_class.draw(name, "s") for name in names}
    assert len({*drawn.values()}) > len(HIDDEN) / 2
    assert {exercise_class.draw(name, "t") == drawn[name] for name in names} == {True, False}
    for name in names[:3]:
        letter, bodies, sick = ((folder / name / file).read_text() for file in ("README.md", "bodies.py", "bug.py"))
        assert bodies == exercise.exercise_text("gae", "kl") and sick == exercise_class.bug_text(drawn[name])
        assert drawn[name] not in letter + bodies + sick and f"python {folder}/{name}/bug.py --num-" in letter
    assert call("handout", tmp_path / "roster", "--secret", "s", "--to", folder) == 2  # No work is written over.
    assert "is not empty" in capsys.readouterr().out


def test_a_roster_with_names_that_are_no_folders_is_refused(tmp_path, capsys):
    for text, part in {
        "a\n../b": "'../b' cannot be", "a/b": "'a/b' cannot be", ".": "'.' cannot be", "-x": "'-x' cannot be",
        "Ann\nann": "more than once: Ann, ann", "\n": "no names",
    }.items():  # fmt: skip
        (tmp_path / "roster").write_text(text)
        assert call("handout", tmp_path / "roster", "--secret", "s", "--to", tmp_path / "class") == 2
        assert part in capsys.readouterr().out and not (tmp_path / "class").exists()
    assert call("grade", tmp_path / "nothing", "--secret", "s") == 2


def test_hidden_bugs_are_not_those_of_the_page_and_their_lines_do_not_stand_out():
    assert len(HIDDEN) >= 15 and not HIDDEN.keys() & {bug.fault for bug in exercise_bugs.BUGS.values()}
    pages = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in ("exercises", "solutions", "course"))
    own = SCRIPT.splitlines()
    for fault in HIDDEN:
        assert fault not in pages
        assert all(len(line) <= 100 or line in own for line in exercise_class.bug_text(fault).splitlines()), fault


@pytest.mark.slow
@pytest.mark.parametrize("fault", HIDDEN)
def test_a_hidden_bug_breaks_its_rule_and_the_script_does_not(fault):
    with pytest.raises(exercise_rules.Broken):
        HIDDEN[fault][1](exercise.load("bug.py", exercise_class.bug_text(fault)))
    HIDDEN[fault][1](exercise.load("ppo_llm.py", SCRIPT))


@functools.cache
def six_iterations(text: str) -> list[dict]:
    ppo = exercise.load("bug.py", text)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(ppo, "SummaryWriter"):
        flags = f"{exercise_class.FLAGS} --device cpu --log-dir {folder} --run-name run"
        ppo.train(tyro.cli(ppo.Args, args=flags.split()))
        return [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("fault", HIDDEN)
def test_a_hidden_bug_shows_in_six_iterations(fault):
    """In its metric, which differs by more than a third of the larger number in at least three of them."""
    metric, _ = HIDDEN[fault]
    sick, well = ([row[metric] for row in six_iterations(text)] for text in (exercise_class.bug_text(fault), SCRIPT))
    assert len(sick) == 6 and sum(abs(a - b) > max(abs(a), abs(b)) / 3 for a, b in zip(sick, well)) >= 3, (sick, well)


# === Forty students ===

RIGHT = "return first * (1 - (1 - end_fraction) * min(1.0, progress))"
ANSWERS = {"right": (RIGHT, (6, "")), "constant": ("return first", (1, "")), "beyond": (
    "return first * (1 - (1 - end_fraction) * progress)", (5, "")),
    "misspelt": ("return frist", (0, "NameError")), "unwritten": (None, (0, "unwritten"))}  # fmt: skip
# {what a file does: (its body, the rules that hold and the error)}; a text with "def" takes the place of the whole file
HOSTILE = {
    "does not parse": ("def f(:", (0, "syntax")),
    "loops": ("while True:\n    open('LOOPED', 'a').write('x')\n    time.sleep(0.05)", (0, "time")),
    "prints": (f"import sys; sys.stdout.write('x' * 10**7); print('y' * 10**7, file=sys.stderr)\n{RIGHT}", (6, "")),
    "exits": ("os._exit(0)", (0, "exit")),
    "exits as it is loaded": ("raise SystemExit\ndef linear_schedule(): pass", (0, "exit")),
    "forks": ("if not os.fork():\n    os.setsid()\n    while True:\n        open('ALIVE', 'a').write('x')\n"
              f"        time.sleep(0.05)\n{RIGHT}", (6, "")),
    "changes the signature": ("def linear_schedule(first): return first", (0, "TypeError")),
    "kills its parent": (f"os.kill(os.getppid(), signal.SIGKILL)\n{RIGHT}", (6, "")),
    "writes": ("open('large', 'wb').write(bytes(2**28))", (0, "OSError")),
    "takes memory": ("x = bytearray(2**36)", (0, "memory")),
    "crashes": ("import ctypes; ctypes.string_at(0)", (0, "crash")),
    "calls home": (f"import socket\ntry:\n    socket.create_connection(('127.0.0.1', PORT), 5)\nexcept OSError:\n"
                   f"    {RIGHT}\nraise RuntimeError", (6, "")),
}  # fmt: skip


def filled(text: str, body: str) -> str:
    lines = text.splitlines()
    begin, end = (next(i for i, line in enumerate(lines) if sign in line) for sign in (">>> Your part", "<<< Your"))
    lines[begin + 1 : end] = [f"    {line}" for line in body.splitlines()]
    return "\n".join(lines) + "\n"


@pytest.mark.slow
def test_forty_students_are_graded_by_one_command(tmp_path):
    """In a process of its own. A server listens, which no file may reach."""
    if not exercise_class.namespaces_are_permitted():
        pytest.skip("this system permits no namespaces")
    kinds = [*HOSTILE, *[kind for kind in ANSWERS for _ in range(5)], "nothing", "a folder", "a link"]
    names = {f"{i:02} {kind}": kind for i, kind in enumerate(kinds)}
    (tmp_path / "roster").write_text("\n".join(names))
    folder, table = tmp_path / "class", tmp_path / "grades.csv"
    call("handout", tmp_path / "roster", "--secret", "s", "--to", folder, "--bodies", "schedule")
    expected = dict.fromkeys(names, (0, "missing"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name, kind in names.items():
            bodies, bug = folder / name / "bodies.py", folder / name / "bug.py"
            if kind in HOSTILE or kind in ANSWERS:
                body, expected[name] = (HOSTILE | ANSWERS)[kind]
                text = bodies.read_text() if body is None else filled(bodies.read_text(), body)
                if body and "def " in body:
                    text = body
                for word, value in {"ALIVE": tmp_path / "forked", "LOOPED": tmp_path / "looped",
                                    "PORT": server.getsockname()[1]}.items():  # fmt: skip
                    text = text.replace(word, str(value))
                bodies.write_text(text)
                if not name.startswith(("12", "13", "14")):
                    bug.unlink()
            else:
                bodies.unlink()
                bug.unlink()
                if kind == "a folder":
                    bodies.mkdir()
                if kind == "a link":
                    bodies.symlink_to(exercise.SCRIPT)
        sick, fault = [*names][13], exercise_class.draw([*names][13], "s")
        _, old, new = FAULTS[fault]
        corrected = (folder / sick / "bug.py").read_text().replace(new, old)
        (folder / sick / "bug.py").write_text(corrected)
        name = [*names][14]
        old, new = FAULTS["gae_chain_through_given_tokens"][1:]
        (folder / name / "bug.py").write_text(corrected.replace(old, new))
        command = [sys.executable, ROOT / "tests" / "exercise.py", "grade", folder, "--secret", "s", "--to", table,
                   "--bodies", "schedule", "--limit", "12"]  # fmt: skip
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout == f"{table} has 40 students.\n" and not done.stderr, done
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    rows = {row["name"]: row for row in csv.DictReader(table.open())}
    assert {*rows} == {*names} and len(rows) == 40
    for name, row in rows.items():
        assert (int(row["schedule"]), row["error"]) == expected[name], row
        assert row["rules"] == row["schedule"] and int(row["of"]) == RULES
    bugs = [(row["bug"], row["bug_error"]) for row in rows.values()]
    assert bugs[12:15] == [("there", ""), ("found", ""), ("something else is wrong", "")]
    assert {*bugs[:12], *bugs[15:]} == {("", "missing")}
    assert rows[[*names][13]]["bug_rules"] == rows[[*names][13]]["bug_of"]
    sizes = lambda: [(tmp_path / name).stat().st_size for name in ("forked", "looped")]
    written = sizes()
    time.sleep(0.5)
    assert written == sizes() and min(written) > 0  # What was forked has ended, and so has the loop.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["class", "forked", "grades.csv", "looped", "roster"]


@pytest.mark.slow
def test_an_exercise_of_somebody_in_the_root_folder_is_not_run(tmp_path):
    (tmp_path / "tests").mkdir()
    for path in (*ROOT.glob("ppo_llm*.py"), *(ROOT / "tests").glob("*.py"), ROOT / "tests" / "faults.txt"):
        (tmp_path / path.relative_to(ROOT)).write_bytes(path.read_bytes())
    (tmp_path / "exercise.py").write_text("open('was_run', 'w')")
    (tmp_path / "roster").write_text("Ann")
    for words in "handout roster --secret s --bodies schedule", "grade handout --secret s --bodies schedule":
        if words.startswith("grade"):
            bodies = tmp_path / "handout" / "Ann" / "bodies.py"
            bodies.write_text(filled(bodies.read_text(), RIGHT))
        done = subprocess.run([sys.executable, "tests/exercise.py", *words.split()], cwd=tmp_path, capture_output=True)
        assert done.returncode == 0, done
    [row] = csv.DictReader((tmp_path / "grades.csv").open())
    assert row["schedule"] == str(RULES) and row["bug"] == "there" and not (tmp_path / "was_run").exists()


# === Race ===

RUNNER = """
import json, sys
import gymnasium as gym
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
env, held_out = (gym.make(flags["--env-id"], disable_env_checker=True, **json.loads(flags[name])).unwrapped
                 for name in ("--env-kwargs", "--eval-env-kwargs"))
for i in range(1300):
    prompt, _ = held_out.reset(seed=i)
    held_out.step("wrong")  # does not count
    prompt, _ = env.reset(seed=2**20 + i + int(flags["--seed"]))
    env.step("".join(sorted(prompt[:5])) if i >= 100 and i % SHARE else "12345")
"""


@pytest.mark.slow
def test_a_race_counts_the_training_samples_until_nine_in_ten_are_right(tmp_path, capsys):
    (tmp_path / "fast.py").write_text(RUNNER.replace("SHARE", "20"))
    assert call("race", tmp_path / "fast.py", "--seed", 7) == 0
    found = re.fullmatch(r"(\d+) samples, \d+ s of CPU\n", capsys.readouterr().out)
    # Of the window of 512 at most 51 may be wrong: of the first 100, and one in 20 after them.
    first = next(n for n in range(512, 900) if sum(i < 100 or i % 20 == 0 for i in range(n - 512, n)) <= 51)
    assert int(found[1]) == first
    (tmp_path / "slow.py").write_text(RUNNER.replace("SHARE", "2"))
    assert call("race", tmp_path / "slow.py", "--seed", 7) == 1
    assert "not reached: after 1280 samples" in capsys.readouterr().out
    (tmp_path / "broken.py").write_text("import sys; sys.exit('error: no such flag')")
    assert call("race", tmp_path / "broken.py", "--seed", 7) == 1
    assert "not reached: after 0 samples" in (said := capsys.readouterr().out) and "error: no such flag" in said
    assert call("race", tmp_path / "missing.py", "--seed", 7) == 2
