"""Plant the faults of faults.txt, one at a time, in both scripts of a copy of the checkout, and run their tests.

python tests/plant_faults.py [NAME ...] prints "killed" if a test fails, else "lives", for each and in all. Without the
names of tests, or with --all, the whole fast suite runs.
"""

import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("ppo_llm.py", "ppo_llm_continuous_batching.py")


def read_faults() -> dict[str, tuple[str, str, str]]:
    """{name: (tests, old text, new text)}"""
    faults = {}
    for block in (ROOT / "tests" / "faults.txt").read_text().split("\n\n"):
        head, *lines = block.strip("\n").split("\n")
        if not head.startswith("#"):
            name, _, tests = head.partition(":")
            old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
            assert name not in faults and old and all(line[:2] in ("- ", "+ ") for line in lines), name
            faults[name] = tests.strip(), old, new
    return faults


def plant(name: str, old: str, new: str) -> dict[str, str]:
    """{script: its text with the fault}. What one script lacks may be in the other."""
    texts = {script: (ROOT / script).read_text() for script in SCRIPTS}
    counts = [text.count(old) for text in texts.values()]
    if max(counts) != 1:
        raise ValueError(f"{name}: its text occurs {counts} times")
    return {script: text.replace(old, new) for script, text in texts.items()}


def lives(name: str, tests: str, old: str, new: str) -> bool:
    """Whether all tests pass, in a forked process, which has imported the libraries already."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(ROOT, Path(folder, "copy"), ignore=shutil.ignore_patterns(".git", "runs", "__pycache__"))
        for script, text in plant(name, old, new).items():
            compile(text, script, "exec")  # a fault is no syntax error
            (copy / script).write_text(text)
        child = os.fork()
        if child == 0:
            os.chdir(copy)
            for fd in (1, 2):
                os.dup2(os.open(f"{folder}/output", os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
            os._exit(pytest.main(["-x", "-n", "0", "--tb=line", "-p", "no:cacheprovider", *shlex.split(tests)]))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output = Path(folder, "output").read_text(errors="replace")
    if code not in (0, 1):  # no test ran
        raise RuntimeError(f"{name}:\n{output}")
    [*_, reason] = ["", *(line for line in output.splitlines() if line.startswith(("E ", "/")))]
    print(f"{'killed' if code else 'lives '}  {name}  {reason[-150:]}", flush=True)
    return code == 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    import ppo_llm  # noqa: F401

    del sys.path[0], sys.modules["ppo_llm"]
    faults, names = read_faults(), [name for name in sys.argv[1:] if name != "--all"]
    alive = []
    for name in names or faults:
        tests, *texts = faults[name]
        if lives(name, "" if tests.startswith("lives") or "--all" in sys.argv else tests, *texts):
            alive.append(name)
    print(f"{len(names or faults) - len(alive)} of {len(names or faults)} killed; alive: {', '.join(alive) or 'none'}")
