"""The CUDA branch of both scripts on a simulated device; simulated_cuda.py says what that can show and what not."""

import collections
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from conftest import ROOT
from test_distributed import finish, flags_of, start, torchrun
from test_rollout import make_model
from test_train import SMALL, assert_same_metrics, lines

SIMULATED = Path(__file__).with_name("simulated_cuda.py")
RUN = SMALL | dict(
    device="cuda", compile="off", env_id="environments:TwoTurns-v0", rollout_batch_size=4, train_batch_size=2,
    ppo_epochs=1, max_new_tokens=10, micro_batch_tokens=40, eval_episodes=1, kl_coef=0.1, ref_sync_every=1,
    bootstrap_truncated=True, missing_eos_penalty=0.1, entropy_coef=0.01)
FLOAT = RUN | dict(dtype="float32", num_iterations=1, run_name="float")
ALONE = [
    RUN | dict(run_name="half", num_iterations=1, save_every=1, activation_checkpointing=True, sft_steps=1,
               micro_batch_tokens=2000), RUN | dict(run_name="half", resume="auto", micro_batch_tokens=20),
    FLOAT, FLOAT | dict(run_name="compiled", compile="on")]  # fmt: skip
WITHOUT_WAITS = tuple(
    "decode_step sampling_noise hash32 Transformer. Attention. KVCache. apply_rope ChunkedLogprobs. Packing. "
    "Experience.__getitem__ Experience.mask sampled_ policy_loss value_loss kl_estimate optimizer_step "
    "forward_all".split())
pytestmark = pytest.mark.slow
simulated = pytest.mark.skipif(
    torch.backends.cuda.is_built() or not torch.__version__.startswith("2.13") or not shutil.which("g++"),
    reason="is for the CPU build of PyTorch 2.13, and needs g++")


def simulate(ppo, folder, runs, ranks=None, machinery=SIMULATED):
    """Run on the simulated device; returns per run {function: waits} and {function: calls} of the first rank."""
    flags = [[flag.removesuffix("=True") for flag in flags_of(**run)] for run in runs]
    command = [machinery, folder / "report", ppo.__file__, *map(json.dumps, flags)]
    process = [sys.executable, *map(str, command)] if ranks is None else torchrun(ranks, *command)
    code, output = finish(start(process, folder), timeout=600)
    assert code == 0, output
    reports = []
    for report in json.loads((folder / "report.0.json").read_text()):
        waits = collections.Counter()
        for place, count in report["waits"].items():
            waits[place.split(":")[0]] += count
        reports.append((waits, report["calls"]))
    return reports


def on_the_cpu(ppo, folder):
    """The same run by one process on the CPU, in folder/cpu."""
    ppo.train(ppo.Args(**FLOAT | dict(device="cpu", log_dir=str(folder), run_name="cpu")))


@simulated
def test_one_process(ppo, tmp_path):
    runs = ALONE if ppo.__name__ == "ppo_llm" else [ALONE[0] | dict(sft_steps=0), FLOAT]
    reports = simulate(ppo, tmp_path, runs)
    for waits, calls in reports:
        assert not {place: n for place, n in waits.items() if place.startswith(WITHOUT_WAITS)}
        assert 0 < waits["StepStats.read"] == calls["optimizer_step"]
        if "decode_step" in calls:  # not compiled
            assert waits["rollout"] == calls["decode_step"] / 8  # one a block of decode steps
    assert len(lines(tmp_path / "half")) == max(run["num_iterations"] for run in runs)
    on_the_cpu(ppo, tmp_path)
    assert_same_metrics(lines(tmp_path / "float"), lines(tmp_path / "cpu"), 1e-4)
    assert_same_metrics(lines(tmp_path / runs[-1]["run_name"]), lines(tmp_path / "cpu"), 1e-4)  # compiled


@simulated
@pytest.mark.shared
def test_two_ranks(ppo, tmp_path):
    simulate(ppo, tmp_path, [FLOAT | dict(save_every=1)], ranks=2)
    on_the_cpu(ppo, tmp_path)
    assert_same_metrics(lines(tmp_path / "float"), lines(tmp_path / "cpu"), 1e-4)


@simulated
def test_cuda_graphs_give_the_same_samples_and_faults_are_found(ppo):
    command = [sys.executable, "-W", "ignore", SIMULATED.with_name("decode_graphs.py"), ppo.__name__]
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    found = json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    assert found.pop("none") is None
    assert len(found) == 5 and all(found.values()), found


@pytest.mark.shared
def test_the_compiler_is_not_imported_before_it_is_needed(ppo):
    """To import it takes as long as to import torch."""
    code = f"import sys, {ppo.__name__}; sys.exit('torch._inductor.compile_fx' in sys.modules)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True)


def test_compiled_code_has_no_graph_breaks_and_few_graphs(ppo, tmp_path):
    """Of sharded blocks and of the decode step, over iterations whose texts differ in length; on the CPU."""
    counters, compiled = torch._dynamo.utils.counters, torch.compile(ppo.decode_step, dynamic=True, backend="eager")
    module_compile = functools.partialmethod(torch.nn.Module.compile, backend="eager")
    torch._dynamo.reset()
    counters.clear()
    flags = RUN | dict(device="cpu", dtype="bfloat16", compile="on", num_iterations=4, env_id="environments:Lengths-v0",
                       max_prompt_tokens=40, log_dir=str(tmp_path))  # fmt: skip
    try:
        with mock.patch.object(ppo, "compiled_decode_step", lambda: compiled), \
             mock.patch.object(torch.nn.Module, "compile", module_compile):  # fmt: skip
            ppo.train(ppo.Args(**flags))
    finally:
        dist.destroy_process_group()
    assert not counters["graph_break"]
    assert 0 < counters["stats"]["unique_graphs"] <= 12


@pytest.mark.shared
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_first_ratio_is_exactly_one_in_bfloat16_and_compiled(ppo, tmp_path):
    """On the CPU, by Inductor's C++: scoring and training run the same graph, in which everything rounds alike."""
    flags = SMALL | dict(dtype="bfloat16", compile="on", num_iterations=1, rollout_batch_size=32, train_batch_size=16,
                         kl_coef=0.1, log_dir=str(tmp_path), run_name="run")  # fmt: skip
    torch._dynamo.reset()
    try:
        with mock.patch.object(ppo, "compiled_decode_step", lambda: ppo.decode_step):  # is not what is tested here
            ppo.train(ppo.Args(**flags))
    finally:
        dist.destroy_process_group()
    [row] = lines(tmp_path / "run")
    assert row["ratio/first_dev"] == 0 and row["objective/kl"] == 0 and row["ratio/last_dev"] > 0.01


def test_training_forwards_of_many_shapes_share_few_graphs(ppo):
    """Microbatches of 0 to 38 samples of equal or unequal length; a rank without samples computes one token."""
    counters, tokens = torch._dynamo.utils.counters, torch.zeros(40, 30, dtype=torch.int64)
    torch._dynamo.reset()
    counters.clear()
    actor = make_model(ppo, 19, model_type="qwen2")
    for block in actor.model.layers:
        block.compile(dynamic=True, backend="eager")
    for rows in [1, 0, *range(2, 40, 2), 1]:
        lengths = torch.randint(2, 30, (40,)) if rows % 3 else torch.full((40,), 9)
        mask = (torch.arange(30) > 0) & (torch.arange(30) < lengths[:, None])
        batch = ppo.Rollout(tokens, mask, tokens.float(), tokens.float(), lengths, ["eos"] * 40, [], {}, [], [], [])
        mb = ppo.Experience.from_rollout(batch, torch.device("cpu"))[torch.arange(rows)]
        ppo.sampled_logprobs(actor, mb, 1.0)[0].sum().backward()
    assert not counters["graph_break"] and 0 < counters["stats"]["unique_graphs"] <= 6
