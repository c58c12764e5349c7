"""The patches critic_ranks and rollout_ranks: ranks that hold only the critic, and ranks that only sample.

What a run on such ranks computes is compared with one process that does the same, one thing after the other.
"""

import contextlib
import importlib.util
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import distributed_worker
import pytest
import torch
from test_checkpoints import assert_same, newest, on_call, train
from test_cuda import FLOAT, on_the_cpu, simulate, simulated
from test_diagnosis import HEALTHY
from test_distributed import RUN, finish, flags_of, launch, same_run, saw, start, torchrun  # noqa: F401
from test_forks import patched_script
from test_train import assert_same_metrics, lines, record, without_clock

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CRITIC = RUN | dict(critic_ranks=1, critic_epochs=2)
AHEAD = RUN | dict(rollout_ranks=1, num_iterations=3, keep_checkpoints=3, actor_lr=1e-2)
OLD = AHEAD | dict(recompute_old_logprobs=False, save_every=0)
FLAGS = ("critic_ranks", "rollout_ranks")


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    """patched(flag): the script with the patch of that name, as a module of that name."""

    def get(flag):
        if flag not in sys.modules:
            spec = importlib.util.spec_from_file_location(flag, patched_script(flag, tmp_path_factory.mktemp(flag)))
            sys.modules[flag] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[flag])
        return sys.modules[flag]

    return get


@pytest.fixture
def critic(patched):
    return patched("critic_ranks")


@pytest.fixture
def ahead(patched):
    return patched("rollout_ranks")


@contextlib.contextmanager
def in_turn(ppo):
    """With rollout_ranks=1, one process samples iteration i + 1 after update i, with the weights from before it.

    It is rank 0 of two, which trains, and plays what the second would.
    """
    connect = ppo.connect

    def connect_alone(args):
        with mock.patch.object(ppo, "WORLD_SIZE", 1):
            return connect(args)

    alone = dict(WORLD_SIZE=2, connect=connect_alone, split=lambda world, args: world)
    with mock.patch.multiple(ppo, **alone), mock.patch.object(ppo.dist, "broadcast"):
        yield


@pytest.fixture
def alone(critic, launch):  # noqa: F811
    return launch(critic, 1, ("run", CRITIC | dict(critic_ranks=0), None)) / "run"


@pytest.fixture
def one(ahead, launch):  # noqa: F811
    with in_turn(ahead):
        return launch(ahead, 1, ("run", AHEAD, None), ("old", OLD, None))


@pytest.mark.parametrize("flag", FLAGS)
def test_without_the_flag_nothing_changes_and_out_of_range_it_is_an_error(patched, flag, tmp_path):
    ppo, plain = patched(flag), importlib.import_module("ppo_llm")
    runs = [lines(train(script, tmp_path / script.__name__, kl_coef=0.1)) for script in (ppo, plain)]
    ours = [{name: x for name, x in row.items() if not name.endswith("_age")} for row in without_clock(runs[0])]
    assert ours == without_clock(runs[1])
    name = f"--{flag.replace('_', '-')}"
    for value, message in ((1, "must leave at least one of 1 ranks"), (-1, "must be at least 0")):
        with pytest.raises(ppo.UserError, match=f"{name} {value}: {message}"):
            ppo.validate(ppo.Args(**{flag: value}))


# === Critic ranks ===


def test_actor_and_critic_on_ranks_of_their_own_give_the_numbers_of_one_process(critic, alone, launch):  # noqa: F811
    folder = launch(critic, 2, ("apart", CRITIC, None))
    same_run(folder / "apart", alone)
    sharded, sampler = ["DTensor", "torch.float32"], {"sampler": ["Parameter", "torch.float32"]}
    actors, critics = {"actor": sharded, "reference": sharded} | sampler, {"critic": sharded} | sampler
    assert [seen["models"] for seen in saw(folder, "apart")] == [actors, critics]
    assert {path.name for path in newest(folder / "apart").glob("*/")} >= {"actor", "critic", "reference"}


@pytest.mark.slow
def test_two_critic_ranks_stop_at_a_signal_and_resume_on_any_ranks(critic, alone, launch, tmp_path):  # noqa: F811
    flags = CRITIC | dict(critic_ranks=2, activation_checkpointing=True)
    stopped = flags | dict(save_every=9, num_iterations=3)
    folder = launch(critic, 4, ("apart", flags, None), ("stopped", stopped, {"signal": 3}))
    same_run(folder / "apart", alone)
    middle = str(folder / "apart" / "checkpoints" / "iter_000001")
    distributed_worker.run(critic, tmp_path, "run", CRITIC | dict(critic_ranks=0, resume=middle))
    same_run(tmp_path / "run", alone, after=1)
    assert saw(folder, "stopped")[0]["code"] == 143 and len(lines(folder / "stopped")) == 2
    assert newest(folder / "stopped").name == "iter_000002"


# === Rollout ranks ===


def test_samples_are_one_iteration_old_and_weights_correct_for_it(ahead, tmp_path):
    with in_turn(ahead):
        run = record(ahead, tmp_path, num_iterations=4, rollout_ranks=1, actor_lr=0.05)
    actor, sampler = ([weights[name] for weights in run.weights] for name in ("actor", "sampler"))
    assert torch.equal(sampler[0], actor[0])
    for i in (1, 2, 3):  # recorded when rollout i is sampled: here after update i - 1
        assert torch.equal(sampler[i], actor[i - 1]) and not torch.equal(sampler[i], actor[i])
    rows = lines(run.folder)
    assert [(row["ratio/sampler_age"], row["ratio/old_age"]) for row in rows] == [(0, 0), (1, 0), (1, 0), (1, 0)]
    assert max(row["ratio/first_dev"] for row in rows) < 1e-5  # the old policy is the one that is updated
    largest = []
    for row, experience in list(zip(rows, run.experiences, strict=True))[1:]:
        weights = (experience.old_logprobs - experience.logprobs)[experience.mask].exp()
        seen = [row[f"rollout/is_{name}"] for name in ("weight_mean", "weight_max", "capped")]
        expected = [float(weights.mean()), float(weights.max()), float((weights > 2).float().mean())]
        assert seen == pytest.approx(expected, rel=1e-5)
        assert row.get("ratio/diagnosis") not in ("sampler_mismatch", "forward_mismatch")
        largest.append(expected[1])
    assert min(largest[:2]) > 2  # weights are truncated; no longer in the last iteration, if the task is solved by then


def test_only_without_an_age_it_is_a_mismatch(ahead):
    healthy = HEALTHY | dict(sampler_age=0, old_age=0, last_dev=0.9, post_dev=0.9)
    for off, age, cause in (({"sampler_diff": 0.5}, "sampler_age", "sampler_mismatch"),
                            ({"first_dev": 0.1}, "old_age", "forward_mismatch")):  # fmt: skip
        assert [ahead.diagnose_ratio(healthy | off | {age: n})[0] for n in (0, 1)] == [cause, None]


def test_experience_collected_ahead_belongs_to_the_checkpoint(ahead, tmp_path):
    flags = dict(num_iterations=4, rollout_ranks=1, kl_coef=0.1)
    power_cut = mock.Mock(side_effect=RuntimeError("power cut"))
    with in_turn(ahead):
        with on_call(ahead, "compute_gae", 3, power_cut), pytest.raises(RuntimeError, match="power cut"):
            train(ahead, tmp_path, **flags)
        assert (newest(tmp_path / "run") / "ahead.pt").exists()
        run = train(ahead, tmp_path, resume="auto", **flags)
        assert_same(train(ahead, tmp_path / "whole", **flags), run)
    assert not (newest(run) / "ahead.pt").exists()  # used up
    middle = dict(resume=str(run / "checkpoints" / "iter_000003"), kl_coef=0.1, num_iterations=4)
    [row] = lines(train(ahead, tmp_path / "other", **middle))  # samples again, with the weights that train
    assert row["ratio/sampler_age"] == 0 and row["debug/sampler_trainer_logprob_diff"] < 1e-5
    with in_turn(ahead):  # of as many samples as an iteration has now
        [row] = lines(train(ahead, tmp_path / "more", rollout_ranks=1, n_samples_per_prompt=2, **middle))
    assert row["ratio/sampler_age"] == 0 and row["charts/episodes"] == 4 * 16


def test_a_rollout_rank_gives_the_numbers_of_one_process(ahead, one, launch):  # noqa: F811
    folder = launch(ahead, 2, ("run", AHEAD, None))
    same_run(folder / "run", one / "run")
    assert [row["rollout/is_weight_max"] > 1.001 for row in lines(folder / "run")] == [False, True, True]  # older
    trainer, player = saw(folder, "run")
    assert len(trainer["models"]) == 4 and player["models"] == {"sampler": ["Parameter", "torch.float32"]}
    assert (trainer["rollouts"], player["rollouts"], player["backwards"]) == (0, 3, 0) and trainer["backwards"] > 0


@pytest.mark.slow
def test_rollout_ranks_resume_stop_at_a_signal_and_may_be_fewer_than_trainers(ahead, one, launch):  # noqa: F811
    middle, stopped = str(one / "run" / "checkpoints" / "iter_000001"), dict(run_name="stopped", save_every=9)
    two = launch(
        ahead, 2, ("old", OLD, None), ("resumed", AHEAD | dict(resume=middle), None),
        ("stopped", AHEAD | stopped, {"signal": 1}), ("continued", AHEAD | stopped | dict(resume="auto"), None))
    three = launch(ahead, 3, ("two and one", AHEAD, None), ("one and two", AHEAD | dict(rollout_ranks=2), None))
    for run in (three / "two and one", three / "one and two", two / "stopped"):
        same_run(run, one / "run")
    same_run(two / "resumed", one / "run", after=1)
    same_run(two / "old", one / "old")
    assert [row["ratio/old_age"] for row in lines(two / "old")] == [0, 1, 1]
    assert max(row["ratio/first_dev"] for row in lines(two / "old")) > 1e-3  # on purpose
    assert {row.get("ratio/diagnosis") for row in lines(two / "old")} <= {None, "too_tight_clip"}
    assert [seen["code"] for name in ("stopped", "continued") for seen in saw(two, name)] == [143, 143, 0, 0]


@pytest.mark.slow
def test_an_error_of_a_rollout_rank_ends_all(ahead, tmp_path):
    """The 15th prompt belongs to the second iteration, which is sampled while the first makes its updates."""
    seed = ahead.first_prompt(ahead.Args()) + 14
    faulty = dict(env_id="environments:Constant-v0", env_kwargs=json.dumps({"reward": "?", "first": seed}))
    flags = flags_of(rollout_ranks=1, **faulty)
    code, output = finish(start(torchrun(2, ahead.__file__, *flags), tmp_path), timeout=60)
    assert code != 0 and output.count(f"error: environment Constant-v0, sample 6, seed {seed}") == 1, output
    assert lines(tmp_path / "run") == []


# === Both ===


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "rank"), [("critic_ranks", 1), ("rollout_ranks", 0), ("rollout_ranks", 1)])
def test_torchrun_restarts_a_job_whose_rank_was_killed(patched, flag, rank, tmp_path):
    """The metrics are, to the last bit, those of a job that nobody kills."""
    script, flags = patched(flag).__file__, {flag: 1, "num_iterations": 8, "save_every": 2, "kl_coef": 0.1}
    code, output = finish(start(torchrun(2, script, *flags_of(**flags, run_name="whole")), tmp_path), timeout=120)
    assert code == 0, output
    command = torchrun(2, script, *flags_of(**flags, resume="auto"), restarts=1)
    process, run = start(command, tmp_path), tmp_path / "run"
    while not (run / "checkpoints" / "iter_000002").exists() or (run / "metrics.jsonl").read_text().count("\n") < 3:
        assert process.poll() is None, finish(process, 1)
        time.sleep(0.02)
    children = " ".join(file.read_text() for file in Path(f"/proc/{process.pid}/task").glob("*/children"))
    me = f"\0RANK={rank}\0".encode()
    [killed] = [int(pid) for pid in children.split() if me in Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(killed, signal.SIGKILL)
    code, output = finish(process, timeout=120)
    assert code == 0 and re.search(r"resuming from \S*iter_0000\d\d", output), output
    assert without_clock(lines(run)) == without_clock(lines(tmp_path / "whole")) and len(lines(run)) == 8


@pytest.mark.slow
@pytest.mark.parametrize("flag", FLAGS)
def test_in_bfloat16_two_ranks_give_the_numbers_of_one(patched, flag, tmp_path):
    script, flags = patched(flag).__file__, dict(dtype="bfloat16", num_iterations=1, kl_coef=0.1, rollout_is_cap=2)
    alone = [sys.executable, script, *flags_of(**flags, run_name="one")]
    for command in (alone, torchrun(2, script, *flags_of(**flags | {flag: 1}))):
        code, output = finish(start(command, tmp_path), timeout=120)
        assert code == 0, output
    assert_same_metrics(lines(tmp_path / "run"), lines(tmp_path / "one"))


@simulated
@pytest.mark.slow
@pytest.mark.parametrize("flag", FLAGS)
def test_two_ranks_on_a_simulated_device(patched, flag, tmp_path):
    run = FLOAT | {flag: 1, "rollout_is_cap": 1e9}  # the samples of the first iteration are not old
    simulate(patched(flag), tmp_path, [run | dict(save_every=1), run | dict(run_name="two", num_iterations=2)], ranks=2)
    on_the_cpu(patched(flag), tmp_path)
    assert_same_metrics(lines(tmp_path / "float"), lines(tmp_path / "cpu"), 1e-4)
    ages = [row.get("ratio/sampler_age") for row in lines(tmp_path / "two")]
    assert ages == ([0, 1] if flag == "rollout_ranks" else [None, None])
