"""What is left of a run after kill -9 and after damage to its files: counts, not claims. A few minutes on two cores.

    python benchmarks/survival.py [seed]

1. A fork that saves tiny models again and again is killed 50 times: each time the checkpoint to go on from is read.
2. A run of the embedded task is killed 20 times and resumed each time, then compared with one that was left alone.
3. The newest of three checkpoints is damaged in every way the tests know: which one is gone on from?
"""

import contextlib
import functools
import io
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import test_checkpoints as tests

import ppo_llm as ppo

TASK = dict(env_id="SortDigits-v0", rollout_batch_size=32, train_batch_size=32, sft_steps=5, sft_batch_size=32)
TASK |= dict(num_iterations=150, eval_episodes=16, kl_coef=0.02, kl_target=0.5, kl_horizon=2000, eval_every=10)
TASK |= dict(critic_warmup_iterations=5, ref_sync_every=20, ref_sync_alpha=0.5, save_every=2)


def table(names, rows):
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
    print()


@contextlib.contextmanager
def quiet():
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()):
        yield output


def saving(folder, rng, tries=50):
    """Killed within a save, checkpoint found, of these complete; saves that were known to be done and are not there."""
    tiny, within, survivors, lost = tests.Tiny(ppo, folder), 0, 0, 0
    with quiet():
        tiny.set(1)
        tiny.save()
    for _ in range(tries):
        with quiet(), contextlib.suppress(AssertionError, ppo.UserError):  # raised where numbers are not one save's
            known, found = tests.kill_while_saving(ppo, folder, rng.uniform(0.001, 0.06))
            survivors, lost = survivors + (found > 0), lost + (not known <= found <= known + 1)
        within += (folder / "checkpoints" / "partial").exists()
    return tries, within, survivors, tries - survivors, lost


def run_of_the_task(folder, **flags):
    return tests.launch(ppo, folder, **(TASK | flags))


def kills(folder, rng, tries=20):
    """Kills, resumes, those from a checkpoint; lines, weights and other entries that differ at the end."""
    tests.finish(run_of_the_task(folder / "whole"))
    run, resumed = folder / "run", 0
    for _ in range(tries):
        process, started = run_of_the_task(folder, resume="auto"), time.time()
        opened = lambda: (run / "config.json").exists() and (run / "config.json").stat().st_mtime > started
        tests.until(opened, process)
        time.sleep(rng.uniform(0, 2))
        if process.poll() is not None:
            raise SystemExit("the run ended before all kills: TASK needs more iterations")
        tests.kill(process)
        resumed += bool(tests.iterations(run))
    tests.finish(run_of_the_task(folder, resume="auto"))
    whole, parts = tests.record(folder / "whole" / "run"), tests.record(run)
    different = tests.differences(whole, parts)
    lines = [name for name in different if name.startswith(("metrics", "completions"))]
    weights = [name for name in different if isinstance(whole.get(name, parts.get(name)), torch.Tensor)]
    total = sum(isinstance(x, torch.Tensor) for x in whole.values())
    return (tries, resumed, f"{len(lines)} of {sum(n.startswith(('metrics', 'completions')) for n in whole)}",
            f"{len(weights)} of {total}", len(different) - len(lines) - len(weights))  # fmt: skip


def place(bomb, sealed, pickled, path):
    bomb(path, pickled)
    if sealed:
        tests.seal(path)


def damage(folder):
    """Case by case, what a run whose newest checkpoint is damaged goes on from."""
    with quiet():
        tests.train(ppo, folder / "sound", kl_coef=0.1, keep_checkpoints=3, num_iterations=3)
    cases = dict(tests.DAMAGE)
    for name in tests.FILES:
        cases[f"one bit of {name}"] = tests.damaged(name, lambda data: tests.flip(data, 4 * len(data)))
    for bomb in tests.BOMBS:
        for sealed in (False, True):
            name = f"pickle: {bomb.__name__.replace('_', ' ')}{', manifest made to fit' if sealed else ''}"
            cases[name] = functools.partial(place, bomb, sealed, tests.Bomb(folder / "executed"))
    for name, action in cases.items():
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.rmtree(folder / "elsewhere", ignore_errors=True)
        shutil.copytree(folder / "sound" / "run", folder / "run")
        action(tests.newest(folder / "run"))
        with quiet() as output:
            try:
                tests.train(ppo, folder, kl_coef=0.1, resume="auto")
                used = output.getvalue().partition("going on from ")[2].partition(",")[0].rpartition("/")[2]
            except ppo.UserError as error:
                used = "nothing, refused: " + str(error).replace(str(folder), "")[:80]
        executed = (folder / "executed").exists()
        (folder / "executed").unlink(missing_ok=True)
        yield name, used, "EXECUTED" if executed else "no"


def main():
    torch.set_num_threads(1)
    rng, started = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("saving", "kills", "damage")]
        for path in paths:
            path.mkdir()
        names = ("kills", "within a save", "complete checkpoint found", "none or a mixed one", "finished saves lost")
        print("Saving again and again\n")
        table(names, [saving(paths[0], rng)])
        names = ("kills", "left a checkpoint", "differing lines", "differing tensors", "other differences")
        print("A run of the embedded task\n")
        table(names, [kills(paths[1], rng)])
        table(("damage to iter_000003", "gone on from", "code executed"), damage(paths[2]))
    cpu = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    print(f"{cpu[0] if cpu else platform.processor()}, {os.cpu_count()} cores, one thread a process, Python "
          f"{platform.python_version()}, torch {torch.__version__}, {time.monotonic() - started:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
