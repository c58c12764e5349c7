"""A first run on a GPU that one has for minutes: see README.md.

    python benchmarks/first_gpu/first_gpu.py 1 [--budget 350]     # levers, correctness, parts of a 0.5B
    python benchmarks/first_gpu/first_gpu.py 2 [--budget 420]     # whole iterations
    python benchmarks/first_gpu/first_gpu.py env levers iteration:micro=8192+graphs:dtype=float32
    python benchmarks/first_gpu/first_gpu.py 1 --cpu              # a trial without a GPU, tiny shapes

Stages follow each other, the parts of a stage ("+") run at the same time, each with a limit. Results go at once to
$OUT/results.jsonl, output of the parts to $OUT/logs.txt, profiles to $OUT/profile.txt, metrics of all runs to
$OUT/metrics.jsonl; the end of stdout is a summary. No part begins after --budget seconds, and none outlasts it.
"""

import argparse
import importlib.util
import json
import os
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
    "levers": (["head", "sampling", "gemm", "decode_attention"], 120),
    "fp32-cb": ([f"fp32:{TWIN}"], 150),
    "graphs-cb": ([f"graphs:{TWIN}"], 170),
    "warm": (["decode:rows=64:blocks=1", "update:tokens=4096"], 200),
    "speed": (["update", "decode"], 150),
}
LIMIT = 150
ITERATIONS = [f"iteration:rows={rows}{twin}" for rows in (256, 512) for twin in ("", f":{TWIN}")]
PARTS |= {name: ([name], 240) for name in ITERATIONS}  # the first compiles for two minutes or more
VLLM = ["vllm"] if importlib.util.find_spec("vllm") else []  # only where it is installed
CALLS = {
    "1": ["env", "levers", "warm+write+fp32+fp32-cb+graphs+graphs-cb+two_ranks+attention", "speed"],
    "2": ["env", *VLLM, *ITERATIONS],
}


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

    def run(self, name: str):
        arguments, limit = PARTS.get(name, ([name], LIMIT))
        command = [sys.executable, str(HERE / "parts.py"), *arguments]
        left = self.args.budget - (time.monotonic() - START)
        limit = left if self.args.cpu else min(limit, left)  # a CPU may be busy
        if limit < 8:
            return self.end(name, "not begun", 0.0, "")
        log, start = self.work / f"{name.replace('/', '_')}.log", time.monotonic()  # as in decode:rows=16/64
        with open(log, "w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=self.env,
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
    parser.add_argument("--work", default="/tmp/first_gpu_work")
    args = parser.parse_args()
    runner = Runner(args)
    for stage in [stage for name in args.stages for stage in CALLS.get(name, [name])]:
        runner.stage(stage.split("+"))
    runner.collect()
    sys.exit(not runner.summary())


if __name__ == "__main__":
    main()
