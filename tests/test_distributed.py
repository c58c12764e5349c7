"""Several ranks give the numbers of one process. Ranks are processes of torchrun: see distributed_worker.py."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import distributed_worker
import pytest
import safetensors.torch
import torch
from test_train import SMALL, assert_same_metrics, lines

pytestmark = pytest.mark.shared

RUN = SMALL | dict(
    ppo_epochs=1, actor_lr=1e-3, micro_batch_tokens=30, sft_steps=1, save_every=1, kl_coef=0.05, ref_sync_every=1,
    ref_sync_alpha=0.5, entropy_coef=0.01, bootstrap_truncated=True, missing_eos_penalty=0.1, gae_lambda=0.95,
    critic_lambda=0.9)
ONE = RUN | dict(num_iterations=1, sft_steps=0, save_every=0)
FEW = ONE | dict(rollout_batch_size=3, train_batch_size=1)  # at each step a rank has no row


def flags_of(**flags):
    flags = SMALL | dict(log_dir=".", run_name="run") | flags
    return [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]


def start(command, folder):
    tests = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": f"{tests}:{tests.parent}", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen(
        command, cwd=folder, env=env, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip


def finish(process, timeout):
    """Exit code and output of a process of `start`; one that hangs fails the test."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its ranks
        output, _ = process.communicate(timeout=60)
        pytest.fail(f"hangs after {timeout} s:\n{output[-5000:]}")
    return process.returncode, output


def torchrun(ranks, *command, restarts=0):
    elastic = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    return [sys.executable, "-m", "torch.distributed.run", *elastic, *map(str, command)]


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """launch(ppo, ranks, *plan): folder of the runs of a plan, made once; without torchrun for a single rank."""
    folders = {}

    def get(ppo, ranks, *plan):
        key = (ppo.__name__, ranks, str(plan))
        if key not in folders:
            folder = folders[key] = tmp_path_factory.mktemp("launch")
            if ranks == 1:
                for name, flags, fault in plan:
                    distributed_worker.run(ppo, folder, name, flags, fault)
            else:
                (folder / "plan.json").write_text(json.dumps(plan))
                command = torchrun(ranks, distributed_worker.__file__, ppo.__file__, folder)
                code, output = finish(start(command, folder), timeout=240)
                assert code == 0, output
        return folders[key]

    return get


@pytest.fixture
def alone(ppo, launch):
    return launch(ppo, 1, ("run", RUN, None)) / "run"


@pytest.fixture
def two(ppo, launch):
    return launch(ppo, 2, ("run", RUN, None))


@pytest.fixture
def more(ppo, launch, alone):
    resumed = RUN | dict(resume=str(alone / "checkpoints" / "iter_000001"))
    continued = RUN | dict(num_iterations=3, run_name="stopped", resume="auto")
    return launch(
        ppo, 2, ("few", FEW, None), ("nan", ONE, {"nan": 1}),
        ("stopped", RUN | dict(num_iterations=3, save_every=9), {"signal": 1}), ("continued", continued, None),
        ("resumed", resumed, None), ("half", ONE | dict(dtype="bfloat16"), None))  # fmt: skip


def saw(folder, name):
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(2)]


def same_run(run, expected, after=0):
    """Of two run folders, from iteration `after` on."""
    texts = ("iteration", "prompt", "response", "stop", "n_tokens")
    a, b = ([[row[name] for name in texts] for row in lines(path, "completions") if row["iteration"] >= after]
            for path in (run, expected))  # fmt: skip
    assert a == b != []
    rows = lines(expected)[after:]
    assert_same_metrics(lines(run)[-len(rows) :], rows, 2e-5)
    a, b = (safetensors.torch.load_file(path / "model" / "model.safetensors") for path in (run, expected))
    assert a.keys() == b.keys() and max(float((a[name] - b[name]).abs().max()) for name in a) < 1e-4


def test_two_ranks_give_the_numbers_of_one_process(alone, two):
    same_run(two / "run", alone)
    first, second = rows = lines(alone)  # of a run in which everything moves
    assert abs(first["objective/kl"]) < 1e-5 < 1e-4 < abs(second["objective/kl"])
    assert any(step["clipfrac"] > 0 for row in rows for step in row["ratio/steps"])
    assert 0 < first["objective/truncated"] < 1


def test_a_checkpoint_of_two_ranks_is_resumed_by_one_process(ppo, alone, two, tmp_path):
    distributed_worker.run(ppo, tmp_path, "run", RUN | dict(resume=str(two / "run" / "checkpoints" / "iter_000001")))
    same_run(tmp_path / "run", alone, after=1)
    cut = shutil.copytree(two / "run" / "checkpoints" / "iter_000001", tmp_path / "cut")
    min((cut / "actor" / "weights").iterdir()).unlink()  # DCP would read zeros in its place
    with pytest.raises(ppo.UserError, match="No such file"):
        distributed_worker.run(ppo, tmp_path, "other", RUN | dict(resume=str(cut)))


@pytest.mark.slow
def test_a_checkpoint_of_one_process_is_resumed_by_two_ranks(alone, more):
    same_run(more / "resumed", alone, after=1)


@pytest.mark.slow
def test_ranks_without_rows_make_the_same_calls_and_do_not_count(ppo, launch, more):
    first, second = saw(more, "few")
    assert first["empty"] + second["empty"] > 5
    assert first["backwards"] == second["backwards"] > 0 and first["steps"] == second["steps"]
    same_run(more / "few", launch(ppo, 1, ("few", FEW, None)) / "few")


@pytest.mark.parametrize("ranks, budget, bound", [(1, 4096, 1.0), (2, 1, 1.06), (3, 4096, 1.12), (8, 16384, 1.38)])
def test_ranks_get_as_many_microbatches_of_nearly_the_same_tokens(ppo, ranks, budget, bound):
    lengths = (torch.randn(512) + 5).exp().long().clamp(2, 4096)
    for n in (256, 7, 1):
        minibatch, shares = torch.randperm(512)[:n], []
        for rank in range(ranks):
            group = ppo.World(torch.device("cpu"), rank, ranks)
            shares.append(ppo.microbatches(minibatch, lengths, budget, group))
        parts = [part for share in shares for part in share]
        assert sorted(torch.cat(parts).tolist()) == sorted(minibatch.tolist())
        assert len({len(share) for share in shares}) == 1
        tokens = [[int(lengths[part].sum()) for part in share] for share in shares]
        slowest = sum(map(max, zip(*tokens, strict=True)))  # FSDP waits for it at each microbatch
        assert n < 256 or slowest <= bound * sum(map(sum, tokens)) / ranks
        assert all(int(lengths[part].sum()) <= budget for part in parts if len(part) > 1)
        assert all(int(lengths[part].max()) * len(part) <= 2 * budget for part in parts if len(part) > 1)


@pytest.mark.slow
def test_ranks_shard_the_models_they_train_beside_a_whole_sampler(two):
    sharded, whole = ["DTensor", "torch.float32"], ["Parameter", "torch.float32"]
    models = dict(actor=sharded, critic=sharded, reference=sharded, sampler=whole)
    assert [seen["models"] for seen in saw(two, "run")] == [models] * 2


@pytest.mark.slow
def test_bfloat16_stays_out_of_weights_gradients_and_reductions(more):
    sharded, sampler = ["DTensor", "torch.float32"], {"sampler": ["Parameter", "torch.bfloat16"]}
    for seen in saw(more, "half"):
        assert seen["models"] == dict.fromkeys(("actor", "critic", "reference"), sharded) | sampler
        assert seen["dtypes"] == ["gradient torch.float32", "reduced torch.float32"]
    assert lines(more / "half")[0]["debug/sampler_trainer_logprob_diff"] < 0.05


@pytest.mark.slow
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(more):
    [row] = lines(more / "nan")
    assert (row["grad/skipped_critic"], row["grad/skipped_actor"], row["charts/actor_steps"]) == (1, 0, 2)
    exported = safetensors.torch.load_file(more / "nan" / "model" / "model.safetensors")
    assert all(x.isfinite().all() for x in exported.values()) and math.isfinite(row["grad/critic_norm"])


@pytest.mark.slow
def test_a_signal_on_one_rank_ends_all_after_the_iteration_and_they_can_be_resumed(more):
    assert [seen["code"] for name in ("stopped", "continued") for seen in saw(more, name)] == [143, 143, 0, 0]
    assert saw(more, "stopped")[0]["steps"] == 1 + 2 * 4  # warm start, two iterations
    assert (more / "stopped" / "checkpoints" / "iter_000002" / "state.json").exists()
    assert [row["iteration"] for row in lines(more / "stopped")] == [0, 1, 2]


@pytest.mark.slow
def test_an_error_of_all_ranks_is_said_once_with_exit_code_two(ppo, tmp_path):
    code, output = finish(start(torchrun(2, ppo.__file__, *flags_of(gamma=2)), tmp_path), timeout=60)
    assert code != 0 and output.count("error: --gamma 2.0: must be at least 0 and at most 1") == 1, output
    assert re.search(r"rank +: 0 .*\n +exitcode +: 2 ", output), output


@pytest.mark.slow
def test_an_error_of_one_rank_ends_all(ppo, tmp_path):
    """The 15th prompt belongs to the second iteration of 8 prompts, and to the second rank."""
    seed = ppo.first_prompt(ppo.Args()) + 14
    faulty = dict(env_id="environments:Constant-v0", env_kwargs=json.dumps({"reward": "?", "first": seed}))
    code, output = finish(start(torchrun(2, ppo.__file__, *flags_of(**faulty)), tmp_path), timeout=60)
    assert code != 0 and output.count(f"error: environment Constant-v0, sample 6, seed {seed}") == 1, output
    assert len(lines(tmp_path / "run")) == 1


@pytest.mark.slow
def test_torchrun_restarts_a_job_whose_rank_was_killed(ppo, tmp_path):
    flags = flags_of(num_iterations=8, save_every=2, resume="auto")
    process, run = start(torchrun(2, ppo.__file__, *flags, restarts=1), tmp_path), tmp_path / "run"
    while not (run / "checkpoints" / "iter_000002").exists() or (run / "metrics.jsonl").read_text().count("\n") < 3:
        assert process.poll() is None, finish(process, 1)
        time.sleep(0.02)
    children = " ".join(file.read_text() for file in Path(f"/proc/{process.pid}/task").glob("*/children"))
    [killed] = [int(pid) for pid in children.split() if b"\0RANK=0\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(killed, signal.SIGKILL)
    code, output = finish(process, timeout=120)
    assert code == 0 and re.search(r"resuming from \S*iter_0000\d\d", output), output
    assert [row["iteration"] for row in lines(run)] == list(range(8))
    with mock.patch.object(ppo, "SummaryWriter"):
        ppo.train(ppo.Args(**SMALL | dict(num_iterations=8, log_dir=str(tmp_path), run_name="whole")))
    assert_same_metrics(lines(tmp_path / "whole"), lines(run), 1e-3)
