"""`python tests/plant_faults.py [NAME ...]` plants the faults of faults.txt, one at a time, in both scripts of a copy
of the checkout, and runs the tests that should fail; where it lives, the fast suite, without tests of the text.

exercise.py plants some of them for students.
"""

import datetime
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS
from transformers.utils import chat_template_utils

SUITE = "-k 'not can_be_planted' --ignore tests/test_forks.py --ignore tests/test_placements.py"


def read_faults() -> dict[str, tuple[str, str, str]]:
    """{name: (tests, old text, new text)}"""
    faults = {}
    for block in (ROOT / "tests" / "faults.txt").read_text().split("\n\n"):
        head, *lines = block.strip("\n").split("\n")
        if not head.startswith("#"):
            name, _, tests = head.partition(": ")
            old, new = ("\n".join(line[2:] for line in lines if line[:2] == sign) for sign in ("- ", "+ "))
            assert name not in faults and old and new, name
            faults[name] = tests, old, new
    return faults


def plant(old: str, new: str) -> dict[str, str]:
    """{script: its text with the fault}. The old text must occur once, but one of the scripts may lack it."""
    texts = {f"{name}.py": (ROOT / f"{name}.py").read_text() for name in SCRIPTS}
    assert sorted(text.count(old) for text in texts.values()) in ([0, 1], [1, 1]), old
    return {script: text.replace(old, new) for script, text in texts.items()}


def result_of(tests: str, old: str, new: str) -> str:
    """The tests run in a fork of this process, which has imported the libraries already."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(ROOT, f"{folder}/copy", ignore=shutil.ignore_patterns(".git", "runs", "__pycache__"))
        for script, text in plant(old, new).items():
            compile(text, script, "exec")  # a fault is no syntax error
            Path(copy, script).write_text(text)
        if not (child := os.fork()):
            os.chdir(copy)
            output = os.open(os.devnull, os.O_WRONLY)
            os.dup2(output, 1), os.dup2(output, 2)
            os._exit(pytest.main(["-x", "-q", "-n", "0", *shlex.split(tests)]))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {0: "lives", 1: "killed"}.get(code, f"no test ran, exit code {code}")


if __name__ == "__main__":
    import ppo_llm  # noqa: F401

    for name in ("ppo_llm", "conftest"):  # those of the copy are others
        del sys.modules[name]
    chat_template_utils.datetime = datetime.datetime  # which ppo_llm has replaced
    sys.path.remove(str(ROOT))
    faults, results = read_faults(), []
    for name in sys.argv[1:] or faults:
        tests, *texts = faults[name]
        results.append(result_of(SUITE if tests.startswith("lives") else tests, *texts))
        print(f"{results[-1]:7} {name}", flush=True)
    print(f"{results.count('killed')} of {len(results)} killed")
