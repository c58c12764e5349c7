"""A first run on a GPU that one has for minutes: see README.md.

    python benchmarks/first_gpu/first_gpu.py 1 [--budget 420]     # correctness, and the speed of a 0.5B
    python benchmarks/first_gpu/first_gpu.py 2 [--budget 250]     # a real checkpoint, and TRL
    python benchmarks/first_gpu/first_gpu.py env default_task:compile=off+graphs:dtype=float32
    python benchmarks/first_gpu/first_gpu.py 1 --cpu              # a trial without a GPU, tiny shapes

Stages follow each other, the parts of a stage ("+") run at the same time, each with a limit. Results go at once to
$OUT/results.jsonl, output of the parts to $OUT/logs.txt, profiles to $OUT/profile.txt, metrics of all runs to
$OUT/metrics.jsonl; the end of stdout is a summary. No part begins after --budget seconds, and none outlasts it.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
START = time.monotonic()
TWIN = "script=ppo_llm_continuous_batching"
# name: (arguments of parts.py, limit in seconds); another name is such an argument itself
PARTS = {
    "env": (["env"], 40),
    "fp32": (["fp32"], 90),
    "fp32-cb": ([f"fp32:{TWIN}"], 90),
    "default_task-cb": ([f"default_task:{TWIN}"], 170),
    "graphs-cb": ([f"graphs:{TWIN}"], 170),
    "warm": (["decode:compile=on:blocks=1", "update:compile=on:tokens=4096"], 200),
    "speed": (["decode:compile=on", "update:compile=on", "iteration", "update:compile=off:tokens=4096",
               "decode:compile=off:rows=64"], 270),
    "learn": (["default_task:iterations=270"], 170),
    "two_ranks:compile=on": (["two_ranks:compile=on"], 200),
    "trl": (["trl:side=TRL"], 90),
    "ours": (["trl:side=ours"], 80),
}  # fmt: skip
LIMIT = 150
CALLS = {
    "1": ["env",
          "warm+write+default_task+default_task-cb+graphs+graphs-cb+fp32+fp32-cb+resume+two_ranks"
          "+two_ranks:compile=on+attention",
          "speed"],
    "2": ["unpack", "sums+sums:dtype=float32+learn", "ours", "trl"],
}  # fmt: skip


class Runner:
    def __init__(self, args):
        self.args, self.out = args, Path(os.environ.get("OUT", "/tmp/first_gpu"))
        self.out.mkdir(parents=True, exist_ok=True)
        self.work = Path(args.work)
        self.work.mkdir(parents=True, exist_ok=True)
        self.lock, self.states = threading.Lock(), {}
        self.env = os.environ | {
            "RESULTS": str(self.out / "results.jsonl"),
            "WORK": str(self.work),
            "DEVICE": "cpu" if args.cpu else "cuda",
            "OMP_NUM_THREADS": "1" if args.cpu else "2",
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "4",
            "TRITON_CACHE_DIR": str(self.work / "triton"),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def command(self, name: str) -> list[str]:
        if name == "unpack":
            folder = str(self.work / "SmolLM2")
            return [sys.executable, str(HERE / "pack_smollm2.py"), "unpack", self.args.packed, folder]
        return [sys.executable, str(HERE / "parts.py"), *PARTS.get(name, ([name], 0))[0]]

    def run(self, name: str):
        limit = PARTS.get(name, ([], LIMIT))[1]
        limit = min(limit, self.args.budget - (time.monotonic() - START))
        if limit < 8:
            return self.end(name, "not begun", 0.0, "")
        log, start = self.work / f"{name}.log", time.monotonic()
        with open(log, "w") as file:
            process = subprocess.Popen(self.command(name), stdout=file, stderr=subprocess.STDOUT, env=self.env,
                                       start_new_session=True)  # fmt: skip
            try:
                code = process.wait(timeout=limit)
                state = "ok" if code == 0 else f"code {code}"
            except subprocess.TimeoutExpired:
                state = f"cut after {limit:.0f} s"
            try:  # its session, of which it is the leader, with all that it has started
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        self.end(name, state, time.monotonic() - start, log.read_text(errors="replace"))

    def end(self, name: str, state: str, took: float, log: str):
        now = time.monotonic() - START
        row = {"part": name, "state": state, "part_s": round(took, 1), "at_s": round(now, 1)}
        with self.lock:
            self.states[name] = state
            with open(self.out / "logs.txt", "a") as file:
                file.write(f"\n===== {name}: {state}, {took:.1f} s\n{log[:20_000]}\n[...]\n{log[-60_000:]}\n")
            with open(self.out / "results.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"[{now:5.0f} s] {name}: {state}, {took:.1f} s", flush=True)
            if state != "ok" and log:
                print("    " + "\n    ".join(line[:300] for line in log.splitlines()[-12:]), flush=True)

    def stage(self, names: list[str]):
        threads = [threading.Thread(target=self.run, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def collect(self):
        """All metrics.jsonl in one file, each line with the name of its run."""
        with open(self.out / "metrics.jsonl", "w") as file:
            for path in sorted(self.work.glob("runs/*/metrics.jsonl")):
                for line in path.read_text().splitlines():
                    file.write(json.dumps({"run": path.parent.name, **json.loads(line)}) + "\n")

    def summary(self) -> bool:
        """Print failed checks, then all numbers. Returns whether all is well."""
        rows = [json.loads(line) for line in (self.out / "results.jsonl").read_text().splitlines()]
        checks = [row for row in rows if "check" in row]
        failed = [row for row in checks if not row["ok"]]
        bad = ", ".join(f"{name} ({state})" for name, state in self.states.items() if state != "ok")
        passed = len(checks) - len(failed)
        print(f"\n=== {time.monotonic() - START:.0f} s: {passed} checks passed, {len(failed)} failed")
        print(f"parts that did not end well: {bad or 'none'}")
        for row in failed:
            print("FAILED", json.dumps(row)[:600])
        for row in rows:
            if not {"check", "state", "done"} & row.keys():
                print(json.dumps({key: value for key, value in row.items() if key != "top"})[:420])
        return not failed and not bad


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("stages", nargs="+")
    parser.add_argument("--budget", type=float, default=420)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--packed", default="/tmp/packed", help="folder of what pack_smollm2.py has written")
    parser.add_argument("--work", default="/tmp/first_gpu_work")
    args = parser.parse_args()
    runner = Runner(args)
    for stage in [stage for name in args.stages for stage in CALLS.get(name, [name])]:
        runner.stage(stage.split("+"))
    runner.collect()
    kept = runner.work / "call1"  # once more with the files of the second call, if those of the first were lost
    if "1" in args.stages:
        shutil.copytree(runner.out, kept, dirs_exist_ok=True)
    elif kept.exists():
        shutil.make_archive(str(runner.out / "call1"), "gztar", kept)
    sys.exit(not runner.summary())


if __name__ == "__main__":
    main()
