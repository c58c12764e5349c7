"""benchmarks/table.py: which lines count, which runs are made, and what the table says of them."""

import contextlib
import dataclasses
import functools
import json
import shlex
import shutil
import subprocess
import sys
import types

import pytest
import tyro
from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import cases
import common
import critic_pays
import learning_real
import table
import torch

import ppo_llm

pytestmark = pytest.mark.shared
SCRIPT = '''"""A module."""
RATE = 0.5  # a comment


class A:
    """A class."""

    def f(self, x):
        """A function."""
        return RATE * x
'''
PATCH = """--- a/ppo_llm.py
+++ b/ppo_llm.py
@@ -10,1 +10,1 @@
-        return RATE * x
+        return 2 * RATE * x
"""
JOB = table.Job("sort", "constant", 2)


def write(folder, texts):
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_a_tree_has_no_comments_docstrings_and_texts_of_errors():
    changed = SCRIPT.replace("A function.", "Other words.").replace("# a comment", "").replace("* x", "*  x")
    assert changed != SCRIPT and table.tree(changed) == table.tree(SCRIPT)
    assert table.tree(SCRIPT.replace('        """A function."""\n', "")) == table.tree(SCRIPT)
    for old, new in ("0.5", "0.25"), ("RATE *", "RATE +"), ("def f", "def g"):
        assert table.tree(SCRIPT.replace(old, new)) != table.tree(SCRIPT)
    assert table.tree('x = 1\n"text"\n') != table.tree("x = 1\n")  # this is no docstring
    assert table.tree('raise UserError("no")') == table.tree('raise UserError(f"{x} is wrong")')
    assert table.tree('raise UserError("no")') != table.tree('raise ValueError("no")') != table.tree('f("no")')


def test_the_code_of_a_run(tmp_path):
    write(tmp_path, {name: SCRIPT for name in (*table.SCRIPTS, "benchmarks/tasks.py", "docs/page.md")})
    write(tmp_path, {"forks/lora.patch": PATCH})
    runs = {
        "plain": (table.Run(), ()),
        "patched": (table.Run(patch="lora"), ()),
        "task": (table.Run("--env-id benchmarks.tasks:A-v0"), ()),
        "file": (table.Run(), ("docs/*.md",)),
    }
    codes = lambda: {name: table.code_of(*run, tmp_path) for name, run in runs.items()}
    before = codes()
    assert len(set(before.values())) == len(runs)
    for name, text, old, new, whose in (
        (table.SCRIPTS[0], SCRIPT, "0.5", "0.25", set(runs)),
        (table.SCRIPTS[0], SCRIPT, "A module.", "Other words.", set()),
        (table.SCRIPTS[1], SCRIPT, "0.5", "0.25", set(runs)),
        ("benchmarks/tasks.py", SCRIPT, "0.5", "0.25", {"task"}),
        ("benchmarks/tasks.py", SCRIPT, "A module.", "Other words.", set()),
        ("forks/lora.patch", PATCH, "2 * RATE", "3 * RATE", {"patched"}),
        ("forks/lora.patch", PATCH, "+        return 2 *", "+        # a comment\n+        return 2 *", set()),
        ("docs/page.md", SCRIPT, "A module.", "Other words.", {"file"}),
    ):
        changed = text.replace(old, new).replace("+10,1", "+10,2" if "a comment" in new else "+10,1")
        write(tmp_path, {name: changed})
        assert changed != text and {run for run, code in codes().items() if code != before[run]} == whose, (name, new)
        write(tmp_path, {name: text})


def line_of(job: table.Job, numbers: dict, **changes) -> dict:
    return {
        "row": job.row, "variant": job.variant, "seed": job.seed, "numbers": numbers, "command": job.command,
        "code": job.code, "commit": "abc", "versions": "torch 2", "processor": "CPU", "seconds": 1,
    } | changes  # fmt: skip


def test_a_line_counts_for_its_command_seed_and_code():
    assert table.finished(JOB, [line_of(JOB, {})])
    for change in dict(code="0123"), dict(seed=3), dict(command="python ppo_llm.py"):
        assert not table.finished(JOB, [line_of(JOB, {}, **change)])
    assert table.outdated(JOB, [line_of(JOB, {}, code="0123")])
    assert not table.outdated(JOB, [line_of(JOB, {}, seed=3)])
    of_default = line_of(table.Job("default", "critic", 1), {})
    assert table.finished(table.Job("sort", "critic", 1), [of_default])  # the same command
    assert table.finished(table.Job("cases", "healthy", 1), [of_default])
    assert not table.finished(table.Job("sort", "group", 1), [of_default])  # the same flags, but a patch


def test_stale_names_what_is_missing_and_what_is_of_another_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(table, "DATA", tmp_path / "table.jsonl")
    monkeypatch.setattr(table, "PAGE", tmp_path / "table.md")
    common.add_line(table.DATA, line_of(JOB, {}, code="0123"))
    common.add_line(table.DATA, line_of(dataclasses.replace(JOB, seed=1), {}))
    table.stale(["sort"])
    counts, old, missing = capsys.readouterr().out.splitlines()
    assert counts == f"sort: 1 of {3 * table.ROWS['sort'].seeds} runs count"
    assert old == "  of another code: constant 2"
    assert "constant 3" in missing and "constant 1," not in missing and "constant 2," not in missing


def test_a_finished_run_is_not_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(table, "DATA", tmp_path / "table.jsonl")
    monkeypatch.setattr(table, "PAGE", tmp_path / "table.md")
    made = []

    def make_line(job):
        made.append(job)
        if job.seed == 3 and len(made) < 5:
            raise RuntimeError("out of memory")
        return line_of(job, {"after": 1.0})

    monkeypatch.setattr(table, "make_line", make_line)
    jobs = [*table.jobs_of(["default"]), *table.jobs_of(["sort"])]
    wanted = {(job.command, job.seed) for job in jobs}
    assert not table.make_all(jobs, 2)  # one failed
    assert "FAILED\nout of memory" in capsys.readouterr().out
    assert len(made) == len(wanted) == 3 * table.ROWS["sort"].seeds  # the critic's runs are made once
    first = len(table.read_table())
    made.extend(made)  # later runs succeed
    count = len(made)
    assert table.make_all(jobs, 2)
    assert len(made) - count == len(wanted) - first < 5
    count = len(made)
    assert table.make_all(jobs, 2) and len(made) == count
    assert table.PAGE.read_text() == table.page()
    smoke = [dataclasses.replace(job, smoke=True) for job in jobs[:2]]
    lines = table.DATA.read_text()
    assert table.make_all(smoke, 2) and len(made) == count + 2 and table.DATA.read_text() == lines


def test_runs_that_measure_time_come_last_and_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "DATA", tmp_path / "table.jsonl")
    monkeypatch.setattr(table, "PAGE", tmp_path / "table.md")
    running, most, order = set(), {}, []

    def make_line(job):
        running.add(job)
        order.append(job.row)
        table.time.sleep(0.02)
        most[job.row] = max(most.get(job.row, 0), len(running))
        running.remove(job)
        return line_of(job, {})

    monkeypatch.setattr(table, "make_line", make_line)
    assert table.make_all(table.jobs_of(["iteration", "default"]), 2)
    assert most == {"default": 2, "iteration": 1} and order == [
        *["default"] * table.ROWS["default"].seeds, *["iteration"] * 3
    ]


def test_lines_are_carried_over_if_the_first_iterations_are_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(table, "DATA", tmp_path / "table.jsonl")
    monkeypatch.setattr(table, "PAGE", tmp_path / "table.md")
    made = []

    def first_iterations(job, root, resumed):
        made.append((job.variant, job.seed, root == ROOT, resumed))
        return ["a", "b", "d" if job.variant == "constant" and resumed else "c"]

    monkeypatch.setattr(table, "first_iterations", first_iterations)
    monkeypatch.setattr(table, "checkouts", lambda: contextlib.nullcontext(lambda commit: tmp_path / commit))
    jobs = [job for job in table.jobs_of(["sort"]) if job.variant in ("critic", "constant") and job.seed < 4]
    for job in jobs:
        code = "4567" if (job.variant, job.seed) == ("critic", 3) else "0123"
        common.add_line(table.DATA, line_of(job, {"after": 0.5, "iteration_seconds": job.seed}, code=code))
    assert not table.carry(["sort", "decode"], 2, "smollm2")
    assert sorted(made) == sorted((name, 1, new, new) for name in ("critic", "constant") for new in (True, False))
    lines = table.read_table()
    counted = [(job.variant, job.seed) for job in jobs if table.finished(job, lines)]
    assert counted == [("critic", 1), ("critic", 2)]
    carried = [line for line in lines if "carried_to" in line]
    assert [(line["seed"], line["carried_from"], line["numbers"]["iteration_seconds"]) for line in carried] == [
        (1, "0123", 1), (2, "0123", 2)]  # fmt: skip
    assert carried[0]["fingerprints"] == ["a", "b", "c"] and "fingerprints" not in carried[1]
    said = capsys.readouterr().out
    assert "sort, constant: iteration 3 differs from that of" in said
    assert "sort, critic, 3: its line is of other code than that of seed 1" in said
    made.clear()
    assert not table.carry(["sort"], 2, "smollm2") and {name for name, *_ in made} == {"constant"}


@pytest.mark.parametrize(("stored", "sides"), [("abc", {True}), ("xyz", {True, False})])
def test_fingerprints_of_another_processor_are_not_compared(stored, sides, tmp_path, monkeypatch):
    """Where the stored ones differ, this machine makes those of the old code, and these count."""
    monkeypatch.setattr(table, "DATA", tmp_path / "table.jsonl")
    monkeypatch.setattr(table, "PAGE", tmp_path / "table.md")
    made = []
    monkeypatch.setattr(table, "first_iterations", lambda job, root, resumed: made.append(root == ROOT) or list("abc"))
    monkeypatch.setattr(table, "checkouts", lambda: contextlib.nullcontext(lambda commit: tmp_path / commit))
    job = table.jobs_of(["default"], [1])[0]
    common.add_line(table.DATA, line_of(job, {}, code="0123") | {"fingerprints": list(stored)})
    assert table.carry(["default"], 1, "smollm2") and set(made) == sides
    assert table.read_table()[-1]["fingerprints"] == ["a", "b", "c"] and table.finished(job, table.read_table())


def test_carry_says_which_lines_it_leaves(tmp_path, monkeypatch, capsys):
    """The line of seed 1 counts already, or is of uncommitted code. A line of the present code is left alone."""
    monkeypatch.setattr(table, "DATA", tmp_path / "table.jsonl")
    monkeypatch.setattr(table, "PAGE", tmp_path / "table.md")
    monkeypatch.setattr(table, "first_iterations", lambda job, root, resumed: list("abc"))
    monkeypatch.setattr(table, "checkouts", lambda: contextlib.nullcontext(lambda commit: tmp_path / commit))
    one, two, three = table.jobs_of(["default"], [1, 2, 3])
    for lines, complete, said in (
        ([line_of(one, {}), line_of(two, {}, code="0123")], False, "these seeds must be made again: [2]"),
        ([line_of(one, {}, code="0123") | {"commit": "abc+"}], False, "these seeds must be made again: [1]"),
        ([line_of(three, {}, code="0123")], False, "these seeds must be made again: [3]"),
        ([line_of(one, {}, code="0123"), line_of(two, {})], True, "3 iterations are those of"),
    ):
        table.DATA.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert table.carry(["default"], 1, "smollm2") is complete and said in capsys.readouterr().out


def test_a_run_that_fails_when_it_is_resumed_is_not_carried(tmp_path, monkeypatch):
    (tmp_path / "ppo_llm.py").write_text(FAILS_LATER)
    monkeypatch.setitem(table.ROWS, "small", table.Row("", {"": table.Run()}, ()))
    job = table.Job("small", "", 1)
    assert len(table.first_iterations(job, tmp_path, False)) == 4
    with pytest.raises(RuntimeError, match="ended with code 3"):
        table.first_iterations(job, tmp_path, True)


FAILS_LATER = """
import json, sys, time
from pathlib import Path
at = lambda name: sys.argv[sys.argv.index(name) + 1]
folder = Path(at("--log-dir"), "run")
if folder.exists():
    sys.exit(3)
folder.mkdir()
for i in range(5):
    for name, count in ("completions", 4), ("metrics", 1):
        with open(folder / f"{name}.jsonl", "a") as file:
            file.write((json.dumps({"iteration": i, "prompt": "a", "response": "b"}) + "\\n") * count)
    time.sleep(0.3)
"""


TRL = """
import numpy, torch
TASKS = {"sums, short": {"num_iterations": 4}}
between_points = lambda flags: 2
class Evaluation:
    def __init__(self, folder, flags, seed):
        self.points = []
    def add(self, samples, seconds, model):
        self.points += [] if samples else [0.5]
def trl(folder, flags, seed, held_out):
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    held_out.add(0, 0.0, model)
    for i in range(1, 1 + flags["num_iterations"]):
        order = torch.tensor(numpy.random.permutation(8), dtype=torch.float32)
        model.weight.data = 0.999 * model.weight + 1e-3 * order
        if i % between_points(flags) == 0:
            held_out.add(i, 0.0, model)
"""


@pytest.mark.slow
@pytest.mark.parametrize("change", [("", ""), ("1e-3 *", "1.000001e-3 *"), ("0.999", "0.9991"), ("[0.5]", "[0.6]")])
def test_runs_of_trl_are_carried_by_their_weights(change, tmp_path):
    """Of iterations 1 and 2, and by the evaluation before them. A decay of weights shows only in the second one."""
    made = []
    for name, text in ("old", TRL), ("new", TRL.replace(*change)):
        (tmp_path / name / "benchmarks").mkdir(parents=True)
        (tmp_path / name / "benchmarks" / "learning_real.py").write_text(text)
        made.append(table.first_iterations(table.Job("sums", "TRL", 1), tmp_path / name, False))
    assert [len(hashes) for hashes in made] == [2, 2]
    assert table.first_difference(*made) == {"": None, "0.999": 1}.get(change[0], 0)


PREFERENCES = """
import json
from pathlib import Path
FLAGS = {}
FOLDER = Path("elsewhere")
class ppo_llm:
    class Run:
        def log(self, run, row):
            for name, rows in ("completions", 4), ("metrics", 1):
                with open(run / f"{name}.jsonl", "a") as file:
                    file.write((json.dumps(row) + "\\n") * rows)
def make_pairs(folder):
    (FOLDER / "pairs").write_text("0.5 " * (PASSES + HELD_OUT_PASSES))
def make_reward_model(folder, count):
    (FOLDER / f"model_{count}").write_text((FOLDER / "pairs").read_text().split()[round(0.5)])
def ppo(folder, count, kl_coef, seed):
    reward, run = float((FOLDER / f"model_{count}").read_text()), FOLDER / f"{count}_{kl_coef}_{seed}"
    run.mkdir()
    for i in range(3):
        ppo_llm.Run().log(run, {"iteration": i, "prompt": "", "response": "", "objective/reward": reward})
"""


@pytest.mark.slow
def test_runs_on_a_reward_model_are_carried_with_what_they_make_first(tmp_path):
    """The pairs and the reward model are those of the same code, in a folder of its own."""
    (tmp_path / "benchmarks").mkdir()
    made = []
    for reward in "0.5", "0.5", "0.6":
        (tmp_path / "benchmarks" / "preferences.py").write_text(PREFERENCES.replace("0.5 ", f"{reward} "))
        made.append(table.first_iterations(table.Job("preferences", "KL weight 0.05", 1), tmp_path, False))
    assert made[0] == made[1] != made[2] and len(made[0]) == 2
    (tmp_path / "benchmarks" / "preferences.py").write_text("raise SystemExit('no pairs')")
    with pytest.raises(RuntimeError, match="code 1\nno pairs"):
        table.first_iterations(table.Job("preferences", "KL weight 0.05", 1), tmp_path, False)


PAGE = """
import subprocess, sys, tempfile
from pathlib import Path
results = lambda: dict.fromkeys(RUNS)
RUNS = {("a", 1): 0.5, ("b", 1): 0.7, ("a", 2): 0.9}
def execute(letter, seed):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, Path(__file__).parent / "run.py", RUNS[letter, seed], letter, "--run-name", "run"]
        subprocess.run(list(map(str, command)), cwd=folder)
    raise AssertionError("later iterations were made")
"""
RUN = """
import json, sys
from pathlib import Path
Path("runs/run").mkdir(parents=True)
for i in range(3 if sys.argv[2] == "b" else 9):
    for name, rows in ("completions", 4), ("metrics", 1):
        with open(f"runs/run/{name}.jsonl", "a") as file:
            row = {"iteration": i, "prompt": "", "response": "", "objective/reward": i * float(sys.argv[1])}
            file.write((json.dumps(row) + "\\n") * rows)
sys.exit(sys.argv[2] == "b")
"""


@pytest.mark.slow
def test_the_runs_of_a_page_are_carried_by_their_names(tmp_path):
    """One of them ends by itself. The page of another commit may lack a run, or have others."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "run.py").write_text(RUN)
    made = []
    for change in ("", ""), ("0.5", "0.6"), ("0.7", "0.8"), ('("b", 1)', '("b", 2)'), ('("a", 1)', '("c", 1)'):
        (tmp_path / "benchmarks" / "course.py").write_text(PAGE.replace(*change))
        made.append(table.first_iterations(table.Job("pages", "course", 1), tmp_path, False))
    assert [len(each) for each in made] == [8, 8, 8, 4, 8]
    assert [table.first_difference(each, made[0]) for each in made] == [None, 1, 5, None, None]
    assert table.first_difference([], made[0]) == table.first_difference(["name.0 a"], made[0]) == 0


def test_a_patch_is_applied_inside_of_a_repository_too(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "ppo_llm.py").write_text((ROOT / "ppo_llm.py").read_text())
    common.git_apply(ROOT / "forks" / "lora.patch", tmp_path / "in")
    assert (tmp_path / "in" / "ppo_llm.py").read_text() != (ROOT / "ppo_llm.py").read_text()


def test_tests_that_did_not_run_have_no_line(monkeypatch):
    job = table.jobs_of(["tests"], [1])[0]
    run = types.SimpleNamespace(stdout="5 passed, 1 error", returncode=1)
    monkeypatch.setattr(table.subprocess, "run", lambda *args, **kwargs: run)
    with pytest.raises(RuntimeError, match="ended with code 1, but no test failed"):
        table.time_of_tests(job)
    run.stdout = "5 passed, 1 failed"
    assert table.time_of_tests(job)["failed"] == 1


def test_rows_without_first_iterations_are_not_carried(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(table, "DATA", tmp_path / "table.jsonl")
    for job in table.jobs_of(["faults", "decode"], [1]):
        common.add_line(table.DATA, line_of(job, {}, code="0123"))
    assert not table.carry(["faults", "decode"], 2, "smollm2")
    said = capsys.readouterr().out
    assert "faults, the list: has no first iterations" in said and "decode" not in said


SMALL = "--num-iterations 9 --rollout-batch-size 16 --train-batch-size 8 --sft-steps 3 --eval-episodes 2"
CHANGES = {  # of the scripts: the first iteration that may differ, (old, new)
    "a learning rate": ({1}, ("args.actor_lr, args.lr_end,", "args.actor_lr * (1 + 1e-6), args.lr_end,")),
    "the noise": ({0}, ("keys ^ 0x5851F42D", "keys ^ 0x5851F42E")),
    "a stop id": ({0}, ("self.stop_ids = torch.tensor(stop_ids,", "self.stop_ids = torch.tensor([*stop_ids, 5],")),
    "what a checkpoint brings back": (range(2, 8), ('TrainState(**content["state"])',
                                                    'TrainState(**content["state"] | {"prompts": 0})')),
    "nothing": ({None}, ("", "")),
}


@functools.cache
def unchanged_iterations(job):
    return table.first_iterations(job, ROOT, False)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_code_shows_in_the_first_iterations(name, tmp_path, monkeypatch):
    """The run of the new code is stopped and resumed, which changes nothing.

    The signal comes after the first iteration. Of eight, there are some left then on a busy machine too.
    """
    differs, (old, new) = CHANGES[name]
    monkeypatch.setattr(table, "COMPARED_ITERATIONS", 8)
    text = (ROOT / "ppo_llm.py").read_text()
    assert not old or text.count(old) == 1
    (tmp_path / "ppo_llm.py").write_text(text.replace(old, new) if old else text)
    row = table.Row("", {"": table.Run(SMALL)}, ())
    monkeypatch.setitem(table.ROWS, "small", row)
    job = table.Job("small", "", 1)
    one, other = unchanged_iterations(job), table.first_iterations(job, tmp_path, True)
    assert len(one) == len(other) == 8
    assert next((i for i in range(8) if one[i] != other[i]), None) in differs


def test_the_numbers_of_the_table_are_those_of_the_lines():
    numbers = {1: (0.9, 20_000), 2: (0.95, 30_000), 3: (0.94, None)}
    lines = [line_of(table.Job("sort", "critic", seed), {"after": after, "samples_to_level": samples})
             for seed, (after, samples) in numbers.items()]  # fmt: skip
    lines += [line_of(table.Job("sort", "constant", seed), {"after": 0.5, "samples_to_level": samples})
              for seed, samples in ((1, 40_000), (2, 40_000))]  # fmt: skip
    lines.append(line_of(table.Job("sort", "critic", 4), {"after": 0.0}, code="0123"))
    text = table.section("sort", lines, table.finished)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]
    cells = {name: rest for name, *rest in rows}
    seeds = table.ROWS["sort"].seeds
    assert cells[""] == [f"critic, 3 of {seeds} seeds", f"constant, 2 of {seeds} seeds"]
    # 93 %, deviations -3, 2 and 1, variance 14 / 2, standard error sqrt(7 / 3) = 1.53
    assert cells["right after training, sampled, %"] == ["93.0 ± 1.5 (90.0 to 95.0)", "50.0"]
    # 25,000, deviations of 5,000, variance 2 * 5,000 ** 2, standard error 5,000
    assert cells["samples to the level"] == ["25,000 ± 5,000 (20,000 to 30,000) (not reached: 1)", "40,000"]
    # 0.5 and 0.75: deviations of 0.125, standard error 0.125
    compared = next(rest for name, rest in cells.items() if "divided by constant" in name)
    assert compared == ["0.62 ± 0.12 (0.50 to 0.75)", ""]
    commands = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    constant = "python ppo_llm.py --eval-every 20 --critic-epochs 0 --seed 1  # constant"
    assert commands == ["python ppo_llm.py --eval-every 20 --seed 1  # critic", constant]
    assert "Commit: abc.\n" in text and "idle" not in text
    loud = [line_of(table.Job("sort", "group", 1), {"after": 1.0}, busy_cores=1.5)]
    assert "Commit: abc. The processor was not idle in 1 of 1 runs." in table.section("sort", loud, table.finished)
    claim = table.ROWS["sort"].claim
    of_critics = [line_of(table.Job("sort", "critic", seed), {"after": 1.0}) for seed in range(1, seeds + 1)]
    for found, missing in ([], ""), (lines, " (group, constant, critic)"), (lines + of_critics, " (group, constant)"):
        assert f"Not made yet: {claim}{missing}.\n" in table.table_of(["sort"], found, table.finished)
    xeon = line_of(table.Job("sort", "group", 1), {"after": 1.0}, processor="Xeon")
    text = table.table_of(["sort"], [*lines, xeon], table.last_line)
    also = f"Runs of these rows were measured on Xeon; torch 2: {claim}."
    assert text.endswith(f"\nMeasured on CPU; torch 2.\n\n{also}")
    assert table.section("sort", lines[-1:], table.finished) == ""  # of another code
    assert "right after training, sampled, % | 0.0 |" in table.section("sort", lines[-1:], table.last_line)
    assert table.summarized([3.0, 1.0, 2.5], "median", 2) == "2.50 (1.00 to 3.00)"
    assert table.summarized([0.5, 0.25], "range", 2) == "0.25 to 0.50"
    assert table.summarized([1e-7, 3e-7], "worst", ".1e") == "3.0e-07"
    assert table.summarized([60, 63], "sum", 0) == "123"
    assert table.formatted(-0.001, 2) == "0.00" and table.formatted(-0.01, 2) == "-0.01"


def test_the_page_is_that_of_the_data():
    assert table.PAGE.read_text() == table.page()


def test_a_result_of_a_page_is_compared_number_by_number():
    old = {"curve": [1.0, float("nan"), 3], "after": {"accuracy": 0.5}, "told": []}
    assert table.leaves(old) == {("curve", 0): "1.0", ("curve", 1): "nan", ("curve", 2): "3",
                                 ("after", "accuracy"): "0.5"}  # fmt: skip


def test_the_commands_are_commands_of_the_scripts():
    for name, row in table.ROWS.items():
        for job in table.jobs_of([name], [1]):
            patch, _, command = job.command.rpartition(" && ")
            assert not patch or (ROOT / patch.removeprefix("git apply ")).is_file()
            words = shlex.split(command)
            if words[:2] == ["python", "ppo_llm.py"]:
                args = tyro.cli(ppo_llm.Args, args=words[2:])
                assert args.seed == job.seed
                samples = args.rollout_batch_size * args.n_samples_per_prompt
                if name != "cases" and not patch:
                    assert samples == (32 if name == "sums" else ppo_llm.Args().rollout_batch_size)
            elif words[1:3] == ["benchmarks/table.py", "run"]:
                assert table.parse(words[2:]).which == [name, job.variant, str(job.seed)]
            elif words[:2] != ["python", "-m"]:
                assert (ROOT / words[words[0] in ("python", "bash")]).is_file()
            assert callable(getattr(table, job.run.make))
            assert set(row.shown) <= set(table.NUMBERS)
            assert all(variant in row.variants and number in table.NUMBERS for variant, number, _ in row.against)


def test_the_rows_are_the_runs_of_the_other_benchmarks():
    prefix = tyro.cli(ppo_llm.Args, args=shlex.split(table.PREFIX))
    theirs = ppo_llm.Args(**critic_pays.TASKS["prefix"])
    assert dataclasses.replace(prefix, env_id=theirs.env_id) == theirs
    runs = [run.command() for case in cases.CASES.values() for run in case.runs]
    mine = [table.Run(run.flags).command("", "", 1) for run in table.ROWS["cases"].variants.values()]
    assert [command.replace(" --eval-every 20", "").removesuffix(" --seed 1") for command in mine] == runs


def test_trl_gets_the_flags_of_the_command():
    mine = tyro.cli(ppo_llm.Args, args=shlex.split(table.SUMS + " 32"))
    theirs = ppo_llm.Args(**learning_real.TASKS["sums, short"])
    assert dataclasses.replace(mine, env_id=theirs.env_id, model=None) == theirs


def test_trl_gets_the_learning_rates_and_the_clipping_of_both_models():
    args = ppo_llm.Args(num_iterations=2, rollout_batch_size=8, train_batch_size=4, ppo_epochs=1, actor_lr=0.1,
                        critic_lr=0.4, lr_end=0.2, max_grad_norm=1.0)  # fmt: skip
    models = policy, value = torch.nn.Linear(3, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
    optimizer = learning_real.optimizer_of_both(policy, value, args)
    mine = [torch.nn.Parameter(m.weight.detach().clone()) for m in models]
    own = [torch.optim.AdamW([p], betas=(0.9, 0.999), weight_decay=0.0) for p in mine]
    for step in range(4):  # of 2 * 8 / 4
        for model, weight in zip(models, mine):
            model.weight.grad = torch.randn_like(weight) * 10 ** (step - 1)  # only the first ones are below the norm
            weight.grad = model.weight.grad * min(1.0, 1.0 / float(model.weight.grad.norm()))
        optimizer.step()
        for rate, one in zip((0.1, 0.4), own):
            one.param_groups[0]["lr"] = rate * (1 - 0.8 * step / 4)
            one.step()
        for model, weight in zip(models, mine):
            torch.testing.assert_close(model.weight.detach(), weight.detach(), rtol=1e-4, atol=1e-6)


def test_other_benchmarks_find_their_runs_by_the_command(tmp_path):
    runs = ("sort", "group"), ("sort", "critic"), ("cases", "critic: critic's rate 1e-6")
    for i, (row, variant) in enumerate(runs):
        (tmp_path / str(i)).mkdir()
        (tmp_path / f"{i}.txt").write_text(f"output {i}")
        (tmp_path / str(i) / "line.json").write_text(json.dumps(line_of(table.Job(row, variant, 2), {})))
    lines = sorted(map(str, tmp_path.glob("*/line.json")))
    found = list(common.runs_of_table(lines, {"--eval-every 20": "default", "--critic-lr 1e-6": "critic"}))
    assert found == [(name, 2, tmp_path / str(i) / "run", f"output {i}") for name, i in (("default", 1), ("critic", 2))]


@pytest.mark.slow
def test_numbers_of_a_run(tmp_path, monkeypatch):
    """A real run of a few samples, made as the command makes it."""
    sizes = "--rollout-batch-size 8 --train-batch-size 8 --sft-steps 1 --num-iterations 12 --eval-episodes 16"
    small = table.Run(f"--eval-every 6 {sizes}")
    row = dataclasses.replace(table.ROWS["default"], variants={"critic": small})
    monkeypatch.setattr(table, "ROWS", {"default": row})
    monkeypatch.setattr(table, "ROOT", tmp_path)  # where runs are kept
    for name in table.SCRIPTS:
        shutil.copy(ROOT / name, tmp_path)
    job = table.Job("default", "critic", 3)
    numbers = table.make_run(job)
    assert numbers["samples"] == 12 * 8 and numbers["samples_to_90"] is None and 0 <= numbers["after"] < 0.9
    rows = common.read_lines(job.folder / "run" / table.METRICS)
    last = [row["objective/reward"] for row in rows[-5:]]
    assert numbers["reward_end"] == pytest.approx(sum(last) / 5, rel=1e-4)
    assert not (job.folder / "run" / "model").exists() and (job.folder / "run" / "config.json").exists()
