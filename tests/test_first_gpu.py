"""The kit for a first run on a GPU, benchmarks/first_gpu, with tiny shapes: on the CPU, and on a simulated GPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from test_cuda import simulated

KIT = ROOT / "benchmarks" / "first_gpu"
IN_PROCESS = "env fp32 graphs attention decode update write iteration".split()
OF_SCRIPTS = "default_task resume two_ranks sums".split()  # parts that start the scripts
TRL = ["trl:side=ours", "trl:side=TRL"]
SIMULATE = "import simulated_cuda, runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
pytestmark = [pytest.mark.slow, pytest.mark.shared]


def start(folder, name, *command, **environment) -> subprocess.Popen:
    path = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    out = folder / name
    env = os.environ | environment | {
        "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OUT": str(out), "RESULTS": str(out / "results.jsonl"),
        "WORK": str(folder / f"{name}_work")}  # fmt: skip
    with open(folder / f"{name}.txt", "w") as file:
        return subprocess.Popen([sys.executable, *map(str, command)], env=env, cwd=ROOT, stdout=file, stderr=file)


def results(folder, name, code) -> list[dict]:
    assert code == 0, (folder / f"{name}.txt").read_text()[-6000:]
    rows = [json.loads(line) for line in (folder / name / "results.jsonl").read_text().splitlines()]
    assert all(row.get("ok", True) for row in rows)
    return rows


def test_the_calls_name_parts_that_are_tried():
    sys.path.insert(0, str(KIT))
    first_gpu = importlib.import_module("first_gpu")
    names = {name for call in first_gpu.CALLS.values() for stage in call for name in stage.split("+")} - {"unpack"}
    parts = [part for name in names for part in first_gpu.PARTS.get(name, ([name], 0))[0]]
    assert {part.split(":")[0] for part in parts} == {*IN_PROCESS, *OF_SCRIPTS, "trl"}


@simulated
def test_the_kit_runs(tmp_path):
    has_trl = importlib.util.find_spec("trl") and importlib.util.find_spec("trl.experimental.ppo")
    on_cpu = [*IN_PROCESS, *(TRL if has_trl else [])]
    on_gpu = ["fp32", "graphs", "decode", "update:compile=off", "iteration:compile=off"]
    work = ["--work", tmp_path / "scripts_work", "--budget", 280, "--cpu"]
    processes = {
        "cpu": start(tmp_path, "cpu", KIT / "parts.py", *on_cpu, DEVICE="cpu"),
        "gpu": start(tmp_path, "gpu", "-c", SIMULATE, KIT / "parts.py", *on_gpu, DEVICE="cuda", TINY="1"),
        "scripts": start(tmp_path, "scripts", KIT / "first_gpu.py", *OF_SCRIPTS, *work)}  # fmt: skip
    codes = {name: process.wait(timeout=300) for name, process in processes.items()}
    rows = {name: results(tmp_path, name, code) for name, code in codes.items()}
    done = {name: [row["done"] for row in found if "done" in row] for name, found in rows.items()}
    assert done["gpu"] == [part.split(":")[0] for part in on_gpu] and len(done["cpu"]) == len(on_cpu)
    assert done["scripts"] == OF_SCRIPTS and (tmp_path / "scripts" / "metrics.jsonl").stat().st_size
