"""Two runs that take turns, an iteration each, so that a machine that is slower at times is slower for both.

`table.py` uses it for the rows "any model time" and "critic time".
"""

import contextlib
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

UNTIMED = ["--eval-episodes", "0", "--save-every", "0"]  # what belongs to no iteration


def compare(sides: dict[str, tuple[Path, list[str]]], iterations: int) -> dict[str, dict]:
    """Run these scripts with these flags, and leave out the first iteration of each, which compiles and loads code.

    Returns of each side: the median of its CPU seconds per iteration, the median of the quotients of these seconds and
    those of the first side in the same turn, and the peak of the memory in MB. If a run fails, the others end,
    and CalledProcessError is raised.
    """
    runs, reports = {}, {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as ends:
        for name, (script, flags) in sides.items():
            runs[name] = begin(script, [*flags, *UNTIMED, "--num-iterations", str(iterations + 1), "--log-dir", work])
            ends.callback(runs[name].wait)
            ends.callback(runs[name].kill)  # if another one fails; one that has ended is left alone
            first = next_report(runs[name])  # None starts while another one computes.
            assert Path(first["script"]) == script, first
        for _, (name, run) in itertools.product(range(iterations), runs.items()):
            run.stdin.write("\n")
            run.stdin.flush()
            reports[name].append(next_report(run))
        for run in runs.values():
            run.communicate()  # closes its stdin, so that it ends
            if run.returncode:
                raise subprocess.CalledProcessError(run.returncode, run.args)
    seconds = {name: [report["seconds"] for report in mine] for name, mine in reports.items()}
    first = seconds[next(iter(sides))]
    return {
        name: {"seconds": statistics.median(mine), "megabytes": reports[name][-1]["megabytes"],
               "ratio": statistics.median(a / b for a, b in zip(mine, first, strict=True))}
        for name, mine in seconds.items()
    }  # fmt: skip


def begin(script: Path, flags: list[str]) -> subprocess.Popen:
    paths = [str(script.parent), str(Path(__file__).parent)]
    code = f"import sys; sys.path[:0] = {paths}; import in_turn; in_turn.wait_for_turns()"
    command = [sys.executable, "-W", "ignore", "-c", code, *flags]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def next_report(run: subprocess.Popen) -> dict:
    """What a run says at the end of an iteration."""
    for line in run.stdout:
        if line.startswith('{"seconds"'):
            return json.loads(line)
    raise subprocess.CalledProcessError(run.wait(), run.args)


def wait_for_turns():
    """Run the script that is first on the path. After each iteration it prints a report and waits for a line."""
    import ppo_llm

    ppo_llm.torch.set_num_threads(1)
    log, begun = ppo_llm.Run.log, 0.0

    def log_and_wait(*args):
        nonlocal begun
        log(*args)
        megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        report = {"seconds": time.process_time() - begun, "megabytes": megabytes, "script": ppo_llm.__file__}
        print(json.dumps(report), flush=True)
        sys.stdin.readline()
        begun = time.process_time()

    ppo_llm.Run.log = log_and_wait
    ppo_llm.train(ppo_llm.tyro.cli(ppo_llm.Args))
