"""Several ranks give the numbers of one process."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import distributed_worker as worker
import pytest
import safetensors.torch
import torch
from test_train import SMALL, assert_same_metrics, lines

pytestmark = pytest.mark.shared

# Several turns, dense rewards, the KL in the loss, an odd number of episodes in evaluations.
RUN = SMALL | dict(
    num_iterations=3, ppo_epochs=1, actor_lr=1e-3, micro_batch_tokens=30, sft_steps=1, save_every=1, kl_coef=0.05,
    kl_loss="k3", entropy_coef=0.01, truncation_penalty=0.1, gae_lambda=0.95, critic_lambda=0.9,
    env_id="environments:DenseTurns-v0", eval_episodes=3, eval_every=1, max_new_tokens=12)  # fmt: skip
ONE = RUN | dict(num_iterations=1, sft_steps=0, save_every=0)
# All ranks but one have no sample: FSDP hangs if they do not run the models all the same.
FEW = ONE | dict(rollout_batch_size=3, train_batch_size=1, eval_episodes=1)
BOTH = ("run", RUN, None), ("few", FEW, None)


def flags_of(**flags):
    flags = SMALL | dict(log_dir=".", run_name="run") | flags
    return [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]


def start(command, folder):
    """A process in `folder` that finds the modules of the tests, and what it found before."""
    tests = Path(__file__).parent
    path = os.pathsep.join(filter(None, [str(tests), str(tests.parent), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen(
        command, cwd=folder, env=env, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip


def finish(process, timeout):
    """Exit code and output of a process of `start`; one that hangs fails the test."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"hangs after {timeout} s:\n{output[-5000:]}")
    return process.returncode, output


def torchrun(ranks, *command):
    ranks = f"--nproc-per-node={ranks}"
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, *map(str, command)]


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """launch(ppo, ranks, *plan): folder of the runs of a plan, made once; for a single rank in this process."""
    folders = {}

    def get(ppo, ranks, *plan):
        key = (ppo.__name__, ranks, str(plan))
        if key not in folders:
            folder = folders[key] = tmp_path_factory.mktemp("launch")
            if ranks > 1:
                worker.run_on_ranks(ppo, folder, ranks, *plan)
                return folder
            for name, flags, fault in plan:
                seen = worker.run(ppo, folder, name, flags, fault)
                (folder / f"{name}.0.json").write_text(json.dumps(seen))
        return folders[key]

    return get


@pytest.fixture
def alone(ppo, launch):
    return launch(ppo, 1, *BOTH)


@pytest.fixture
def two(ppo, launch, alone):
    resumed = RUN | dict(resume=str(alone / "run" / "checkpoints" / "iter_000002"))
    return launch(
        ppo, 2, *BOTH, ("half", ONE | dict(dtype="bfloat16"), None), ("nan", ONE, {"nan": 1}),
        ("resumed", resumed, None), ("stopped", RUN | dict(save_every=9), {"signal": 1}),
        ("continued", RUN | dict(run_name="stopped", resume="auto"), None))  # fmt: skip


def saw(folder, name, ranks=2):
    """What each rank has seen of a run."""
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]


def assert_same_tokens(folder, other, after=0):
    """From iteration `after` on, the rows of tokens.jsonl are the same but for rounding."""
    rows, others = ([row for row in lines(x, "tokens") if row["iteration"] >= after] for x in (folder, other))
    assert len(rows) == len(others) > 0
    for a, b in zip(rows, others, strict=True):
        assert a["tensors"].keys() == b["tensors"].keys()
        for name, numbers in a["tensors"].items():
            assert numbers == pytest.approx(b["tensors"][name], rel=1e-3, abs=2e-4), name
        assert a.get("reward") == pytest.approx(b.get("reward"), rel=1e-5)
        rounded = dict.fromkeys(("tensors", "reward"))
        assert a | rounded == b | rounded


def same_run(run, expected, after=0):
    """Of two run folders, from iteration `after` on: metrics, evaluations and weights but for rounding."""
    rows = lines(expected)[after:]
    assert_same_metrics(lines(run)[-len(rows) :], rows, 1e-5)
    assert_same_tokens(run, expected, after)
    a, b = (json.loads((folder / "summary.json").read_text())["eval_after"] for folder in (run, expected))
    assert a == pytest.approx(b, abs=1e-5)
    for name in "model", "critic":
        a, b = (safetensors.torch.load_file(folder / name / "model.safetensors") for folder in (run, expected))
        assert a.keys() == b.keys() and max(float((a[key] - b[key]).abs().max()) for key in a) < 1e-4


def assert_numbers_of_one(folder, alone, ranks):
    """Metrics, weights, and the samples of all rollouts and evaluations on all ranks."""
    for name in "run", "few":
        same_run(folder / name, alone / name)
        episodes = saw(alone, name, 1)[0]["episodes"]
        assert len(episodes) > 6 and [seen["episodes"] for seen in saw(folder, name, ranks)] == [episodes] * ranks


def test_two_ranks_give_the_numbers_of_one_process(alone, two):
    assert_numbers_of_one(two, alone, 2)
    first, second, _ = rows = lines(alone / "run")  # of a run in which everything moves
    assert abs(first["objective/kl"]) < 1e-5 < 1e-4 < abs(second["objective/kl"])
    steps = [step for row in rows for step in row["ratio/steps"]]
    assert max(step["clipfrac"] for step in steps) > 0 and max(step["kl_loss"] for step in steps) > 1e-5
    assert {stop for *_, stop in saw(alone, "run", 1)[0]["episodes"]} == {"terminated", "truncated", "length"}


@pytest.mark.slow
@pytest.mark.both
def test_four_ranks_give_the_numbers_of_one_process(ppo, launch, alone):
    assert_numbers_of_one(launch(ppo, 4, *BOTH), alone, 4)


@pytest.mark.parametrize(("ranks", "budget", "bound"), [(2, 1, 1.06), (3, 4096, 1.12), (8, 16384, 1.4)])
def test_ranks_get_as_many_microbatches_of_nearly_the_same_tokens(ppo, ranks, budget, bound):
    lengths = (torch.randn(512) + 5).exp().long().clamp(2, 4096)
    shares = []
    for rank in range(ranks):
        with mock.patch.multiple(ppo, RANK=rank, WORLD_SIZE=ranks):
            shares.append(ppo.microbatch_rows(torch.arange(512), lengths, budget))  # [[sample, ...], ...]
    parts = [part for share in shares for part in share]
    assert sorted(torch.cat(parts).tolist()) == list(range(512))
    tokens = [[int(lengths[part].sum()) for part in share] for share in shares]  # FSDP waits for the slowest
    assert sum(map(max, zip(*tokens, strict=True))) <= bound * int(lengths.sum()) / ranks
    assert all(int(lengths[part].sum()) <= budget for part in parts if len(part) > 1)
    assert all(int(lengths[part].max()) * len(part) <= 2 * budget for part in parts if len(part) > 1)


def test_ranks_that_differ_in_what_each_computes_are_an_error(ppo):
    """Of two ranks that are alike; the other one is then made to differ in one part."""
    x = torch.ones(2, 3)
    samples = ppo.Experience(lengths=x[:, 0], tokens=x, mask=x > 0, sampler_logprobs=x, rewards=x)
    check = lambda: ppo.check_ranks_agree([1, 2], samples, ppo.TrainState())
    check()
    for part in "the seeds of the prompts", "the samples that are trained on", "TrainState":
        two_ranks = lambda mine, part=part: [mine, mine | {part: 0}]
        with mock.patch.object(ppo, "of_all_ranks", two_ranks), pytest.raises(ppo.UserError, match=f"in {part}:"):
            check()


def test_checkpoints_are_resumed_on_another_number_of_ranks(ppo, alone, two, tmp_path):
    same_run(two / "resumed", alone / "run", after=2)
    checkpoint = two / "run" / "checkpoints" / "iter_000002"
    worker.run(ppo, tmp_path, "run", RUN | dict(resume=str(checkpoint)))
    same_run(tmp_path / "run", alone / "run", after=2)
    cut = shutil.copytree(checkpoint, tmp_path / "cut")
    next(cut.glob("shard-00002-*.safetensors")).unlink()  # the reader of DCP would skip what is in it
    with pytest.raises(ppo.UserError, match=r"cannot resume from \S*cut: .*files are missing"):
        worker.run(ppo, tmp_path, "other", RUN | dict(resume=str(cut)))


def test_bfloat16_stays_out_of_weights_and_reductions(two):
    """The models that are trained are sharded, the sampler is whole."""
    sharded, sampler = ["DTensor", "torch.float32"], {"sampler": ["Parameter", "torch.bfloat16"]}
    for seen in saw(two, "half"):
        assert seen["models"] == dict.fromkeys(("actor", "critic", "reference"), sharded) | sampler
        assert seen["reduced"] == ["torch.float32"]
    assert lines(two / "half")[0]["debug/sampler_trainer_logprob_diff"] < 0.05


def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(two):
    [row] = lines(two / "nan")
    assert (row["critic/skipped"], row["actor/skipped"], len(row["ratio/steps"])) == (0.5, 0, 2)


def test_a_signal_on_one_rank_ends_all_after_the_iteration_and_they_can_be_resumed(alone, two):
    assert [seen["code"] for name in ("stopped", "continued") for seen in saw(two, name)] == [143, 143, 0, 0]
    same_run(two / "stopped", alone / "run")


@pytest.mark.slow
def test_an_error_of_one_rank_ends_all(ppo, tmp_path):
    """The 15th prompt belongs to the second iteration of 8 prompts, and to the second rank."""
    seed = ppo.first_training_seed(ppo.Args(), ppo.SortDigits()) + 14
    faulty = dict(env_id="environments:Constant-v0", env_kwargs=json.dumps({"reward": "?", "first": seed}))
    code, output = finish(start(torchrun(2, ppo.__file__, *flags_of(**faulty)), tmp_path), timeout=60)
    assert output.count(f"error: cannot play the episode with seed {seed}: ") == 1, output
    assert code != 0 and re.search(r"exitcode +: 2 ", output) and len(lines(tmp_path / "run")) == 1


SLURM = {  # its commands, and torchrun of this Python
    "srun": 'echo $$ > task; exec "$@"',
    "scontrol": 'case "$1" in show) echo localhost;; requeue) touch requeued;; esac',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


@pytest.mark.slow
def test_the_batch_script_of_slurm_stops_and_resumes_a_run(ppo, tmp_path):
    """The signal comes, a job begins while the first still ends, and one more after that."""
    (tmp_path / "bin").mkdir()
    for name, text in SLURM.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    page = (Path(__file__).parent.parent / "docs" / "slurm.md").read_text()
    [script] = re.findall(r"(?m)^    (#!/bin/bash\n(?:(?:    .*)?\n)+)", page)
    flags = SMALL | dict(num_iterations=12, env_id="environments:Held-v0")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    script = script.replace("--nproc-per-node 8", "--nproc-per-node 2").replace("ppo_llm.py", ppo.__file__)
    script = script.replace(" ...\n", f" {shlex.join(flags)}\n")
    run = tmp_path / "runs" / "a"
    status = lambda: json.loads((run / "summary.json").read_text())["status"]

    def job(number):
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        variables = dict(JOB_ID=number, JOB_NODELIST="localhost", NNODES=1, NTASKS=1, PROCID=0)
        variables = [f"SLURM_{name}={value}" for name, value in variables.items()]
        path = f"PATH={tmp_path / 'bin'}:{os.environ['PATH']}"
        return start(["env", path, *variables, "bash", "-c", script.replace("29500", str(port))], tmp_path)

    def wait_until(condition, seconds=600):
        end = time.monotonic() + seconds
        while not condition():
            assert first.poll() is None and time.monotonic() < end, "hangs"
            time.sleep(0.05)

    first = job(1)
    wait_until(lambda: (run / "metrics.jsonl").exists() and len(lines(run)) >= 2)
    (tmp_path / "hold").touch()  # The iteration lasts until the second job has ended.
    wait_until((tmp_path / "held").exists)  # A signal between two iterations would end the run at once.
    os.kill(int((tmp_path / "task").read_text()), signal.SIGTERM)
    _, output = finish(job(2), timeout=600)
    assert f"another process runs in {run}" in output and not (tmp_path / "requeued").exists(), output
    (tmp_path / "hold").unlink()
    _, output = finish(first, timeout=600)
    done = len(lines(run))
    assert status() == "interrupted" and (tmp_path / "requeued").exists() and 2 <= done < 12, output
    (tmp_path / "requeued").unlink()
    _, output = finish(job(1), timeout=600)
    assert f"resuming from {run}/checkpoints/iter_{done:06d}" in output, output
    assert [row["iteration"] for row in lines(run)] == list(range(12))
    assert status() == "completed" and not (tmp_path / "requeued").exists()
