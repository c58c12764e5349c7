"""benchmarks/scale.py counts for simulated ranks what it counts for real ones."""

import json
import sys

import pytest
from conftest import ROOT
from test_cuda import simulated
from test_distributed import finish, start, torchrun

FLAGS = "--rollout-batch-size 4 --train-batch-size 4 --ppo-epochs 1 --max-prompt-tokens 32 --max-new-tokens 32"
KINDS = ["parameters", "gradients", "optimizer", "sampler", "KV cache", "gathered weights", "weight copy"]


@pytest.mark.slow
@simulated
def test_simulated_ranks_count_what_real_ones_do(tmp_path):
    script = ROOT / "benchmarks" / "scale.py"
    commands = {"fake": [sys.executable, script, "tiny", "2"], "real": torchrun(2, script, "tiny", "real")}
    flags = [*FLAGS.split(), "--micro-batch-tokens", "64", "--json"]
    processes = [start([*map(str, command), *flags, f"{name}.json"], tmp_path) for name, command in commands.items()]
    for process in processes:
        code, output = finish(process, timeout=300)
        assert code == 0, output
    fake, real = (json.loads((tmp_path / f"{name}.json").read_text()) for name in commands)
    of_collectives = lambda phase: {name: x for name, x in phase.items() if name.endswith((", calls", ", GB"))}
    of_kinds = lambda run, phase: [run["largest"][phase].get(kind, 0) for kind in KINDS]
    for phase, numbers in fake["phases"].items():
        assert of_collectives(numbers) == of_collectives(real["phases"][phase]), phase
        if phase == "rollout":  # environments and the exchange of episodes, which are the host's
            continue
        assert numbers["GB at the peak"] == pytest.approx(real["phases"][phase]["GB at the peak"], rel=0.1), phase
        if phase != "start":  # weights are filled in other ways
            # Real ones also have small tensors of the host, some hundred bytes.
            assert of_kinds(fake, phase) == pytest.approx(of_kinds(real, phase), rel=0, abs=512), phase
    assert all(name in fake["phases"]["actor"] for name in ("all-gather, GB", "reduce-scatter, GB", "all-reduce, GB"))
    assert fake["largest"]["actor"]["gradients"] > 0 < fake["largest"]["decode"]["KV cache"]
