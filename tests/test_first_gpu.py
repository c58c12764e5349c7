"""The kit for a first run on a GPU, benchmarks/first_gpu, with tiny shapes: on the CPU, and on a simulated GPU."""

import importlib
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from test_cuda import simulated

KIT = ROOT / "benchmarks" / "first_gpu"
PARTS = "env head sampling gemm decode_attention fp32 graphs attention decode update write iteration".split()
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
    names = {name for call in first_gpu.CALLS.values() for stage in call for name in stage.split("+")}
    names -= {"vllm"}  # There where vLLM can be imported, which the stand-in of tests/test_vllm.py can be, too.
    parts = [part for name in names for part in first_gpu.PARTS.get(name, ([name], 0))[0]]
    assert {part.split(":")[0] for part in parts} == {*PARTS, "two_ranks"}


@simulated
def test_the_kit_runs(tmp_path):
    on_gpu = ["fp32", "graphs", "attention", "decode", "update:compile=off", "iteration:compile=off"]
    work = ["--work", tmp_path / "ranks_work", "--budget", 280, "--cpu"]
    processes = {
        "cpu": start(tmp_path, "cpu", KIT / "parts.py", *PARTS, DEVICE="cpu"),
        "gpu": start(tmp_path, "gpu", "-c", SIMULATE, KIT / "parts.py", *on_gpu, DEVICE="cuda", TINY="1"),
        "ranks": start(tmp_path, "ranks", KIT / "first_gpu.py", "two_ranks", *work)}  # fmt: skip
    codes = {name: process.wait(timeout=300) for name, process in processes.items()}
    rows = {name: results(tmp_path, name, code) for name, code in codes.items()}
    done = {name: [row["done"] for row in found if "done" in row] for name, found in rows.items()}
    assert done["gpu"] == [part.split(":")[0] for part in on_gpu] and done["cpu"] == PARTS
    assert done["ranks"] == ["two_ranks"] and (tmp_path / "ranks" / "metrics.jsonl").stat().st_size
