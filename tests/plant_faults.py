"""Plant the faults of faults.txt, one at a time, in both scripts of a copy of the checkout, and run their tests.

python tests/plant_faults.py [NAME ...] prints "killed" if a test fails, else "lives", for each and in all. Without the
names of tests, or with --all, the whole fast suite runs.
"""

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

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
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(ROOT, Path(folder, "copy"), ignore=shutil.ignore_patterns(".git", "runs", "__pycache__"))
        for script, text in plant(name, old, new).items():
            compile(text, script, "exec")  # a fault is no syntax error
            (copy / script).write_text(text)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--tb=line", *shlex.split(tests)]
        done = subprocess.run(command, cwd=copy, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode not in (0, 1):  # no test ran
        raise RuntimeError(f"{name}:\n{done.stdout}")
    reason = [line for line in done.stdout.splitlines() if line.startswith(("E ", "/", "FAILED"))]
    print(f"{'killed' if done.returncode else 'lives '}  {name}  {' '.join(reason[-1:])[:150]}", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    faults, names = read_faults(), [name for name in sys.argv[1:] if name != "--all"]
    alive = []
    for name in names or faults:
        tests, *texts = faults[name]
        if lives(name, "" if tests.startswith("lives") or "--all" in sys.argv else tests, *texts):
            alive.append(name)
    print(f"{len(names or faults) - len(alive)} of {len(names or faults)} killed; alive: {', '.join(alive) or 'none'}")
