"""benchmarks/in_turn.py: two runs take turns, and what is said of them is theirs."""

import concurrent.futures
import shlex
import statistics
import subprocess
import sys
import time

import pytest
import tyro
from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import in_turn
import table

import ppo_llm

# The parts of a script that in_turn.py uses. The journal lists the iterations of all runs as they begin.
SCRIPT = '''
import pathlib, sys, time, types

torch = types.SimpleNamespace(set_num_threads=lambda count: None)
tyro = types.SimpleNamespace(cli=lambda flags: flags)
Args = sys.argv[1:]
journal = pathlib.Path(__file__).parent.with_name("journal.txt")


class Run:
    def log(self, metrics):
        pass


def train(flags):
    name, seconds, last = flags[0], float(flags[1]), int(flags[flags.index("--num-iterations") + 1])
    for i in range(last):
        with journal.open("a") as f:
            f.write(f"{name}{i} ")
        end = time.process_time() + seconds
        while time.process_time() < end:
            if name == "broken" and i == 1:
                raise SystemExit("as the test wants it")
        Run().log({})
'''


def sides(folder, **seconds):
    """For `compare`: runs with these names, whose iterations take so many CPU seconds."""
    for name in seconds:
        (folder / name).mkdir()
        (folder / name / "ppo_llm.py").write_text(SCRIPT)
    return {name: (folder / name / "ppo_llm.py", [name, str(count)]) for name, count in seconds.items()}


def test_each_makes_an_iteration_while_the_other_one_waits(tmp_path):
    first, second = in_turn.compare(sides(tmp_path, a=0.1, b=0.2), 5).values()
    # Iteration 0 of each is not timed. That of a ends before b starts.
    assert (tmp_path / "journal.txt").read_text().split() == [f"{name}{i}" for i in range(6) for name in "ab"]
    assert first["ratio"] == 1 and first["seconds"] == pytest.approx(0.1, rel=0.3)
    assert second["ratio"] == pytest.approx(2, rel=0.3) and second["seconds"] == pytest.approx(0.2, rel=0.3)
    assert second["megabytes"] > 1


def test_the_quotient_is_the_median_of_those_of_the_turns(tmp_path, monkeypatch):
    seconds = {"a": [9, 1, 2, 4], "b": [9, 3, 4, 2]}  # the first is left out
    made = {name: iter(of) for name, of in seconds.items()}

    def next_report(run):
        name = run.args[5]  # the first flag
        return {"seconds": next(made[name]), "megabytes": 1, "script": str(tmp_path / name / "ppo_llm.py")}

    monkeypatch.setattr(in_turn, "next_report", next_report)
    two = in_turn.compare(sides(tmp_path, a=0, b=0), 3)
    assert two["b"]["ratio"] == statistics.median([3, 2, 0.5]) and two["b"]["seconds"] == 3


def test_a_run_that_fails_ends_the_other(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        in_turn.compare(sides(tmp_path, a=0.01, broken=0.01), 9)
    before = (tmp_path / "journal.txt").read_text()
    assert before.split() == ["a0", "broken0", "a1", "broken1"]
    time.sleep(0.5)  # enough for all that a would still make
    assert (tmp_path / "journal.txt").read_text() == before


def test_a_run_of_another_script_does_not_count(tmp_path):
    two = sides(tmp_path, a=0, b=0)
    (tmp_path / "b" / "ppo_llm.py").write_text(SCRIPT + '\n__file__ = "another/ppo_llm.py"\n')
    with pytest.raises(AssertionError, match="another"):
        in_turn.compare(two, 1)


@pytest.mark.slow
def test_runs_of_the_script_take_turns():
    flags = "--rollout-batch-size 4 --train-batch-size 4 --sft-steps 0 --ppo-epochs 1"
    both = {name: (ROOT / table.SCRIPTS[0], shlex.split(f"{flags} {own}"))
            for name, own in {"constant": "--critic-epochs 0", "critic": "--critic-epochs 1"}.items()}  # fmt: skip
    constant, critic = in_turn.compare(both, 2).values()
    assert constant["ratio"] == 1 and 0 < critic["ratio"] < 10
    assert constant["seconds"] > 0 and critic["megabytes"] > 100


@pytest.mark.slow
def test_the_flags_of_a_family_are_those_of_a_model_that_depends_on_the_seed_alone(tmp_path):
    jobs = [table.Job("families", "Gemma 3", seed) for seed in (1, 1, 2)]
    folders = [tmp_path / str(i) for i in range(len(jobs))]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        flags = list(pool.map(table.flags_of_family, jobs, map(str, folders)))
    args = tyro.cli(ppo_llm.Args, args=flags[0])
    assert args.model == str(folders[0]) and args.max_prompt_tokens == 16 and args.sft_steps == 150
    first, again, other = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == again != other
