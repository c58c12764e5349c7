"""The CUDA branch of both scripts on a simulated device; simulated_cuda.py says what that can show and what not."""

import collections
import functools
import json
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch._dynamo
from test_distributed import finish, flags_of, start, torchrun
from test_train import SMALL, assert_same_metrics, lines
from test_transformers import hf_folder

SIMULATED = Path(__file__).with_name("simulated_cuda.py")
RUN = SMALL | dict(
    device="cuda", compile="off", env_id="environments:TwoTurns-v0", rollout_batch_size=4, train_batch_size=2,
    ppo_epochs=1, max_new_tokens=10, micro_batch_tokens=40, eval_episodes=1, kl_coef=0.1,
    truncation_penalty=0.1, entropy_coef=0.01)
FLOAT = RUN | dict(dtype="float32", num_iterations=1, run_name="float")
ALONE = [
    RUN | dict(run_name="half", num_iterations=1, save_every=1, activation_checkpointing=True, sft_steps=1,
               micro_batch_tokens=2000), RUN | dict(run_name="half", resume="auto", micro_batch_tokens=20),
    FLOAT, FLOAT | dict(run_name="compiled", compile="on")]  # fmt: skip
WITHOUT_WAITS = tuple(
    "sample_token Decoder.step gumbel_noise hash32 Transformer. Attention. KVCache. apply_rope chunk_ token_ Packing. "
    "Experience.microbatch upload sampled_ policy_loss value_loss kl_estimate".split())
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


def assert_as_on_the_cpu(ppo, folder, *names):
    """These runs have the numbers of the same run on the CPU."""
    ppo.train(ppo.Args(**FLOAT | dict(device="cpu", log_dir=str(folder), run_name="cpu")))
    for name in names:
        assert_same_metrics(lines(folder / name), lines(folder / "cpu"), 1e-4)


@simulated
def test_one_process(ppo, tmp_path):
    """None waits in a decode step or in a microbatch, an optimizer step for two numbers, a block of eight for one."""
    runs = ALONE if ppo.__name__ == "ppo_llm" else [ALONE[0] | dict(sft_steps=0), FLOAT]
    # Key heads that are shared, which attention in float32 does not support on a GPU.
    shared = dict(model=str(hf_folder(tmp_path / "shared")), max_prompt_tokens=64, run_name="grouped")
    runs = [FLOAT | shared, *runs]
    for waits, calls in simulate(ppo, tmp_path, runs):
        assert not {place: n for place, n in waits.items() if place.startswith(WITHOUT_WAITS)}
        assert waits["forward_all"] == calls["forward_all"] > 0
        assert waits["optimizer_step"] == calls["optimizer_step"] == waits["sum_over_ranks"] > 0
        if ppo.__name__ == "ppo_llm":  # one before a block, and what a turn of at most two blocks has sampled
            turns, blocks = waits["Decoder.begin"] / 3, calls["Decoder.step"] / 8
            assert waits["generate_turn"] <= blocks + 4 * turns
    assert len(lines(tmp_path / "half")) == max(run["num_iterations"] for run in runs)
    for row in (row for run in runs for row in lines(tmp_path / run["run_name"])):
        assert row["ratio/first_dev"] == row["critic/first_dev"] == 0
        assert row["debug/sampler_trainer_logprob_diff"] < (0.03 if row in lines(tmp_path / "half") else 1e-5)
    assert_as_on_the_cpu(ppo, tmp_path, "float", runs[-1]["run_name"])  # the last is compiled


@simulated
@pytest.mark.shared
def test_two_ranks(ppo, tmp_path):
    simulate(ppo, tmp_path, [FLOAT | dict(save_every=1)], ranks=2)
    assert_as_on_the_cpu(ppo, tmp_path, "float")


@simulated
def test_cuda_graphs_give_the_same_samples_and_use_no_memory_of_others(ppo, tmp_path):
    command = [sys.executable, "-W", "ignore", str(SIMULATED.with_name("decode_graphs.py")), ppo.__name__]
    code, output = finish(start(command, tmp_path), timeout=240)
    assert code == 0, output


@simulated
@pytest.mark.shared
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_without_a_kernel_that_fails(ppo, tmp_path, ranks):
    script = [SIMULATED.with_name("failing_kernels.py"), ppo.__name__, hf_folder(tmp_path / "model")]
    command = [sys.executable, *map(str, script)] if ranks == 1 else torchrun(ranks, *script)
    code, output = finish(start(command, tmp_path), timeout=600)
    assert code == 0, output


def test_compiled_code_has_no_graph_breaks_and_few_graphs(ppo, tmp_path):
    """On the CPU, of texts that differ in length. Sampling and greedy decoding, at any temperature, share a graph."""
    graphs, counters = collections.Counter(), torch._dynamo.utils.counters

    def backend(name):
        return lambda graph, inputs: graphs.update([name]) or graph.forward

    compiled = lambda function, compile: torch.compile(function, dynamic=True, backend=backend(function.__name__))
    block_compile = functools.partialmethod(torch.nn.Module.compile, backend=backend("block"))
    torch._dynamo.reset()
    counters.clear()
    flags = RUN | dict(device="cpu", dtype="bfloat16", compile="on", num_iterations=3, env_id="environments:Lengths-v0",
                       max_prompt_tokens=40, eval_every=1, temperature=0.7, log_dir=str(tmp_path))  # fmt: skip
    with mock.patch.object(ppo, "maybe_compiled", functools.cache(compiled)), \
         mock.patch.object(torch.nn.Module, "compile", block_compile):  # fmt: skip
        ppo.train(ppo.Args(**flags))
    assert not counters["graph_break"] and graphs["sample_token"] == 1
    assert 0 < graphs["chunk_logprobs"] <= 3 and 0 < graphs["chunk_gradients"] <= 3, graphs  # 0, 1 or more rows
    assert 0 < graphs["block"] <= 4


@pytest.mark.shared
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_first_ratio_is_exactly_one_in_bfloat16_and_compiled(ppo, tmp_path):
    """On the CPU, by Inductor's C++: scoring and training run the same graph, in which everything rounds alike."""
    flags = SMALL | dict(dtype="bfloat16", compile="on", num_iterations=1, rollout_batch_size=32, train_batch_size=16,
                         kl_coef=0.1, log_dir=str(tmp_path), run_name="run")  # fmt: skip
    torch._dynamo.reset()
    ppo.train(ppo.Args(**flags))
    [row] = lines(tmp_path / "run")
    assert row["ratio/first_dev"] == row["critic/first_dev"] == row["objective/kl"] == 0
    assert row["ratio/last_dev"] > 0.01
