"""Checkpoints: a run that was stopped and resumed is the run that was not, whatever is left of it on the disk."""

import dataclasses
import json
import os
import shutil
import signal
from unittest import mock

import distributed_worker
import pytest
import safetensors.torch
import torch
from distributed_worker import on_call
from test_train import SMALL, lines, without_clock
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing import ProcessExitedException

import ppo_llm

pytestmark = pytest.mark.shared

# Two turns, an evaluation on the way, a reference that moves, a warm start.
RUN = SMALL | dict(num_iterations=3, save_every=1, kl_coef=0.1, kl_loss="k3", eval_every=2,
                   env_id="environments:TwoTurns-v0", sft_steps=2)  # fmt: skip


def train(ppo, folder, **flags):
    """A small run; returns its folder, folder/run."""
    flags = RUN | dict(log_dir=str(folder), run_name="run") | flags
    with mock.patch.multiple(ppo, SummaryWriter=mock.DEFAULT, SFT_BATCH_SIZE=16):
        ppo.train(ppo.Args(**flags))
    return folder / flags["run_name"]


def iterations(run):
    return [int(path.name.removeprefix("iter_")) for path in sorted(run.glob("checkpoints/iter_*"))]


def newest(run):
    return max(run.glob("checkpoints/iter_*"))


def tensors_of(folder):
    return {name: x for file in folder.glob("*.safetensors") for name, x in safetensors.torch.load_file(file).items()}


def assert_same(run, other):
    """To the last bit: newest checkpoint, exports, logs and summary but for the clock."""
    assert without_clock(lines(run)) == without_clock(lines(other)) != []
    assert all(lines(run, name) == lines(other, name) for name in ("completions", "tokens"))
    a, b = (json.loads((folder / "summary.json").read_text()) | {"seconds": 0} for folder in (run, other))
    assert a == b and newest(run).name == newest(other).name
    for part in (newest, lambda folder: folder / "model", lambda folder: folder / "critic"):
        a, b = tensors_of(part(run)), tensors_of(part(other))
        assert a.keys() == b.keys() != set() and all(torch.equal(x, b[name]) for name, x in a.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of such a run that nothing interrupts."""
    return train(ppo_llm, tmp_path_factory.mktemp("whole"))


@pytest.fixture
def copied(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


@pytest.mark.parametrize(("function", "number", "left"), [
    ("save_checkpoint", 1, (1, [])),  # lines of the log, checkpoints
    ("policy_loss", 10, (2, [1, 2])),
    ("save_checkpoint", 3, (3, [1, 2])),
])  # fmt: skip
def test_a_resumed_run_is_the_uninterrupted_one(ppo, whole, tmp_path, capsys, function, number, left):
    """Damaged lines of its logs are left out."""
    power_cut = mock.Mock(side_effect=RuntimeError("power cut"))
    with on_call(ppo, function, number, power_cut), pytest.raises(RuntimeError, match="power cut"):
        train(ppo, tmp_path, resume="auto")
    run = tmp_path / "run"
    assert (len(lines(run)), iterations(run)) == left
    for name in "metrics", "completions", "tokens":
        path = run / f"{name}.jsonl"
        damaged = b'\xff\n[0]\n{"kl": 1}\n{"iteration": "0"}\n', b'{"iteration": 2, "obj'  # was being written
        path.write_bytes(path.read_bytes().join(damaged))
    assert_same(whole, train(ppo, tmp_path, resume="auto"))
    assert iterations(run) == [2, 3]  # older ones are removed
    assert capsys.readouterr().out.count("left out a damaged line of ") == 3 * 5


BEFORE = SMALL | dict(num_iterations=4, save_every=2, actor_lr=1e-3, critic_lr=1e-3, lr_end=0.2)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """(folder, seeds of the episodes) of a run that was stopped after two of its four iterations."""
    folder = tmp_path_factory.mktemp("half")
    with on_call(ppo_llm, "policy_loss", 8, lambda *_: os.kill(os.getpid(), signal.SIGTERM)):
        seen = distributed_worker.run(ppo_llm, folder, "run", BEFORE)
    return folder / "run", [seed for seed, *_ in seen["episodes"]]


@pytest.mark.parametrize("sizes", [
    dict(), dict(train_batch_size=8), dict(train_batch_size=2), dict(ppo_epochs=1), dict(critic_epochs=3),
    dict(rollout_batch_size=4), dict(rollout_batch_size=16), dict(num_iterations=6), dict(critic_warmup_iterations=1),
])  # fmt: skip
def test_a_run_resumed_with_other_sizes_goes_on_with_its_prompts_and_schedules(ppo, half, tmp_path, sizes):
    folder, seeds = half
    shutil.copytree(folder, tmp_path / "run")
    flags = BEFORE | dict(resume="auto", run_name="run") | sizes
    resumed = distributed_worker.run(ppo, tmp_path, "run", flags)["episodes"]
    seeds = [seed for seed in (*seeds, *(seed for seed, *_ in resumed)) if seed >= ppo.FIRST_TRAINING_SEED]
    N, warmup, first = flags["num_iterations"], sizes.get("critic_warmup_iterations", 0), seeds[0]
    assert seeds == list(range(first, first + 2 * 8 + (N - 2) * flags["rollout_batch_size"]))
    minibatches, epochs = flags["rollout_batch_size"] // flags["train_batch_size"], sizes.get("ppo_epochs", 2)
    actor_steps, critic_steps = minibatches * epochs, minibatches * sizes.get("critic_epochs", epochs)
    rate = lambda progress: pytest.approx(1e-3 * (1 - 0.8 * progress))
    for i, row in list(enumerate(lines(tmp_path / "run")))[2:]:
        rates = [rate((i - warmup + step / actor_steps) / (N - warmup)) for step in range(actor_steps)]
        assert [step["lr"] for step in row["ratio/steps"]] == rates
        assert row["critic/lr"] == rate((i + (critic_steps - 1) / critic_steps / 2) / N)  # the mean


def test_a_rollout_without_a_reward_leaves_weights_and_moments_alone(ppo, tmp_path):
    plays, rollout, step = [], ppo.rollout, ppo.checked_step

    def step_without_reward(env, response):
        messages, reward, *rest = step(env, response)
        return messages, reward if len(plays) == 1 else None, *rest

    counted = lambda *rest: plays.append(0) or rollout(*rest)
    with mock.patch.multiple(ppo, checked_step=step_without_reward, rollout=counted):
        run = train(ppo, tmp_path, eval_episodes=0)
    assert iterations(run) == [2, 3] and [row["objective/unscored"] for row in lines(run)] == [0, 1, 1]
    assert [len(row["ratio/steps"]) for row in lines(run)] == [4, 0, 0]
    before, after = (tensors_of(run / "checkpoints" / f"iter_00000{i}") for i in (2, 3))
    assert all(torch.equal(x, after[name]) for name, x in before.items())


def test_runs_of_the_same_second_have_different_names(ppo, tmp_path):
    args = ppo.Args(**SMALL | dict(log_dir=str(tmp_path), num_iterations=0))
    with mock.patch.object(ppo.time, "strftime", return_value="now-"), mock.patch.object(ppo, "SummaryWriter"):
        for _ in range(2):
            ppo.train(args)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("function", "number", "saved"), [
    ("value_loss", 9, [1, 2]),  # in the third iteration
    ("checkpoint_tensors", 2, [1]),
    ("write_json", 3, [1]),  # all tensors are written, but the checkpoint is not complete
])  # fmt: skip
def test_kill_9(ppo, tmp_path, function, number, saved):
    """At any time, also while saving, it leaves the checkpoint before."""
    plan = "run", RUN, {"kill": [function, number]}
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        distributed_worker.run_on_ranks(ppo, tmp_path, 1, plan)
    assert iterations(tmp_path / "run") == saved
    assert (tmp_path / "run" / "checkpoints" / "partial").exists() == (function == "write_json")
    distributed_worker.run(ppo, tmp_path, "run", RUN | dict(resume="auto"))
    distributed_worker.run(ppo, tmp_path, "whole", RUN)
    assert_same(tmp_path / "whole", tmp_path / "run")


def test_moments_are_resumed(ppo, whole, tmp_path):
    """All of them, as they are in the checkpoint."""
    path, resume = whole / "checkpoints" / "iter_000002", ppo.load_checkpoint
    saved, expected = tensors_of(path), tensors_of(whole / "model")

    def resume_and_look(path, checkpointed, args):
        state = resume(path, checkpointed, args)
        for key in ("actor", "critic"):
            model, optimizer = checkpointed[key]
            for name, p in model.named_parameters():
                moments = optimizer.state[p]
                assert moments["step"] == 8 and moments["exp_avg"].any() and moments["exp_avg_sq"].any()
                assert all(torch.equal(x, saved[f"{key}.{name}.{kind}"]) for kind, x in moments.items())
        return state

    no_warm_start = mock.patch.object(ppo, "warm_start", side_effect=AssertionError)  # a second one
    with no_warm_start, mock.patch.object(ppo, "load_checkpoint", resume_and_look):
        resumed = tensors_of(train(ppo, tmp_path, resume=str(path)) / "model")
    assert all(torch.equal(x, expected[name]) for name, x in resumed.items())


def test_a_checkpoint_holds_tensors_and_json_without_pickle(whole):
    for file in filter(os.path.isfile, newest(whole).rglob("*")):
        safetensors.torch.load_file(file) if file.suffix == ".safetensors" else json.loads(file.read_text())
    assert {name.split(".")[0] for name in tensors_of(newest(whole))} == {"actor", "critic", "reference"}


def test_an_old_checkpoint_begins_a_new_run(ppo, copied, tmp_path, capsys):
    """With logs of its own. The run it comes from stays as it is. Flags that are others than before are named."""
    content = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    checkpoint = str(copied / "checkpoints" / "iter_000002")
    new = train(ppo, tmp_path, resume=checkpoint, run_name="new", target_kl=100.0, save_every=2)
    out = capsys.readouterr().out
    printed = [line for line in out.splitlines() if "in the checkpoint" in line]
    assert printed == ["  --target-kl 100.0, in the checkpoint None", "  --save-every 2, in the checkpoint 1"]
    assert without_clock(lines(new)) == without_clock(lines(copied))[2:]
    assert {line["iteration"] for line in lines(new, "completions")} == {2} and iterations(new) == [3]  # the last
    assert content == {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    with pytest.raises(ppo.UserError, match=r"--run-name: \S*new exists"):
        train(ppo, tmp_path, resume=checkpoint, run_name="new")
    with pytest.raises(ppo.UserError, match=r"cannot resume from \S*nowhere: .*files are missing"):
        train(ppo, tmp_path, resume=str(tmp_path / "nowhere"), run_name="newer")


def test_a_flag_that_is_a_tuple_is_not_taken_for_a_change(ppo, tmp_path, capsys):
    """JSON has lists alone."""

    @dataclasses.dataclass
    class Args(ppo.Args):
        band: tuple[float, float] = (0.5, 2.0)

    with mock.patch.object(ppo, "Args", Args):
        run = train(ppo, tmp_path, num_iterations=1, eval_every=0)
        for band in (0.5, 2.0), (0.5, 3.0):
            train(ppo, tmp_path, num_iterations=1, eval_every=0, resume=str(newest(run)), run_name=str(band), band=band)
    printed = [line for line in capsys.readouterr().out.splitlines() if "in the checkpoint" in line]
    assert printed == ["  --band [0.5, 3.0], in the checkpoint [0.5, 2.0]"]


def rewrite(path, change):
    """Change the content of a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_checkpoint_may_come_from_a_version_with_other_flags_and_less_state(ppo, whole, copied, tmp_path, capsys):
    """A flag that the checkpoint lacks was None; a field of TrainState has its default."""
    shutil.rmtree(newest(copied))

    def change(content):
        del content["args"]["target_kl"], content["state"]["critic_steps"]
        content["args"]["flag_of_before"] = 1

    rewrite(newest(copied) / "state.json", change)
    assert_same(whole, train(ppo, tmp_path, resume="auto"))
    assert "in the checkpoint" not in capsys.readouterr().out
    shutil.rmtree(newest(copied))
    rewrite(newest(copied) / "state.json", lambda content: content["state"].update(baseline=0.5))
    with pytest.raises(ppo.UserError, match=r"cannot resume from \S*iter_000002: TypeError: .*'baseline'"):
        train(ppo, tmp_path, resume="auto")


@pytest.mark.parametrize(("flags", "said"), [
    (dict(critic_epochs=0), " of its tensors are not used, for example critic."),
    (dict(kl_coef=0.0, kl_loss=None), " of its tensors are not used, for example reference."),
])  # fmt: skip
def test_models_that_a_resumed_run_does_not_need_are_left_out(ppo, copied, tmp_path, capsys, flags, said):
    shutil.rmtree(newest(copied))
    run = train(ppo, tmp_path, resume="auto", **flags)
    assert said in capsys.readouterr().out and [row["iteration"] for row in lines(run)] == [0, 1, 2]
    lacking = {name.split(".")[0] for name in tensors_of(newest(run))}
    assert lacking == {"actor", "critic", "reference"} - {said.split()[-1].strip(".")}
    shutil.rmtree(run / "checkpoints" / "iter_000002")
    with pytest.raises(ppo.UserError, match=r"cannot resume from \S*iter_000003: .*Missing key") as error:
        train(ppo, tmp_path, resume="auto")
    assert "\n" not in str(error.value)


def test_a_run_resumed_with_fewer_iterations_than_it_has_exports_what_it_has(ppo, whole, copied, tmp_path):
    shutil.rmtree(copied / "model")
    run = train(ppo, tmp_path, resume="auto", num_iterations=1)
    assert without_clock(lines(run)) == without_clock(lines(whole)) and iterations(run) == [2, 3]
    exported, expected = tensors_of(run / "model"), tensors_of(whole / "model")
    assert exported and all(torch.equal(x, expected[name]) for name, x in exported.items())
    assert json.loads((run / "summary.json").read_text())["iterations"] == 3


def test_a_save_that_fails_is_one_line_and_leaves_the_checkpoint_before(ppo, whole, tmp_path):
    disk_is_full = mock.Mock(side_effect=OSError("No space left"))
    error = r"cannot write \S*iter_000002; earlier ones are intact: .*No space left"
    with on_call(ppo.dcp, "save", 2, disk_is_full), pytest.raises(ppo.UserError, match=error):
        train(ppo, tmp_path)
    assert iterations(tmp_path / "run") == [1]
    assert_same(whole, train(ppo, tmp_path, resume="auto"))


def test_a_checkpoint_is_written_in_files_of_limited_size(ppo, whole, tmp_path):
    """The writer holds each in memory, twice. They are resumed as one is."""
    limit = 20_000
    with mock.patch.object(ppo, "FILE_ELEMENTS", limit):
        run = train(ppo, tmp_path)
    files = [safetensors.torch.load_file(file) for file in newest(run).glob("*.safetensors")]
    sizes = [[x.numel() for x in file.values()] for file in files]
    assert len(sizes) > 10 and all(sum(size) < limit + max(size) for size in sizes)
    shutil.rmtree(newest(run))
    assert_same(whole, train(ppo, tmp_path, resume="auto"))


DAMAGE = {
    "missing file": lambda path: next(path.glob("*.safetensors")).unlink(),
    "cut file": lambda path: os.truncate(next(path.glob("*.safetensors")), 100_000),
    "damaged file": lambda path: next(path.glob("*.safetensors")).open("r+b").write(bytes(100)),  # of the same size
    "no state.json": lambda path: (path / "state.json").unlink(),
    "cut state.json": lambda path: os.truncate(path / "state.json", 100),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_one_line_and_auto_takes_the_one_before(ppo, copied, tmp_path, capsys, damage):
    """As after a power failure. Nothing is changed in it."""
    newest_one = newest(copied)
    DAMAGE[damage](newest_one)
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    with pytest.raises(ppo.UserError, match=r"cannot resume from \S*iter_000003: \w+: ") as error:
        ppo.load_checkpoint(newest_one, {}, ppo.Args())
    assert "\n" not in str(error.value)
    args = ppo.Args(log_dir=str(tmp_path), run_name="run", resume="auto")
    assert ppo.find_checkpoint(args).name == "iter_000002"
    assert f"passed over {newest_one}: files are missing or damaged" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("before", "meanwhile", "error"), [
    ([], "checkpoints/iter_000003", "another process has written a checkpoint in"),
    (["checkpoints/iter_000002"], "checkpoints/iter_000003", "another process has written a checkpoint in"),
    ([], "model", "has results, but no complete checkpoint"),
])  # fmt: skip
def test_auto_does_not_go_back_behind_what_is_saved_while_models_are_loaded(
        ppo, whole, tmp_path, before, meanwhile, error):  # fmt: skip
    """By the process before, which was still ending: facebookresearch/fairseq#3334, ostris/ai-toolkit#1058."""
    run = tmp_path / "run"
    for name in before:
        shutil.copytree(whole / name, run / name)
    content = lambda: {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    seen = []

    def save(*_):
        shutil.copytree(whole / meanwhile, run / meanwhile)
        for name in "metrics", "completions", "tokens":
            shutil.copy(whole / f"{name}.jsonl", run)
        seen.append(content())

    with on_call(ppo, "build_critic", 1, save), pytest.raises(ppo.UserError, match=error):
        train(ppo, tmp_path, resume="auto")
    assert seen == [content()]
    if meanwhile != "model":
        assert_same(whole, train(ppo, tmp_path, resume="auto"))


def test_a_checkpoint_that_cannot_be_read_is_not_passed_over(ppo, copied, tmp_path):
    """It may be complete: an older one would overwrite what came after it."""
    args = ppo.Args(log_dir=str(tmp_path), run_name="run", resume="auto")
    error, not_now = r"cannot read the checkpoints of \S*run: .*not now", mock.Mock(side_effect=OSError("not now"))
    for owner, name in (ppo, "read_json"), (ppo.safetensors, "safe_open"), (ppo.os, "listdir"):
        with mock.patch.object(owner, name, not_now), pytest.raises(ppo.UserError, match=error):
            ppo.find_checkpoint(args)


def test_an_export_takes_the_place_of_the_one_before_when_it_is_complete(ppo, copied):
    model, tokenizer = ppo.load_hf_checkpoint(copied / "model")[0], ppo.HFTokenizer(copied / "model")
    before, disk_is_full = tensors_of(copied / "model"), mock.Mock(side_effect=OSError("No space left"))
    model.model.norm.weight.data += 1
    with mock.patch.object(ppo, "write_json", disk_is_full), pytest.raises(ppo.UserError, match="No space left"):
        ppo.save_hf_checkpoint(model, tokenizer, copied / "model")
    left = tensors_of(copied / "model")
    assert left.keys() == before.keys() and all(torch.equal(x, before[name]) for name, x in left.items())
    ppo.save_hf_checkpoint(model, tokenizer, copied / "model")
    assert torch.equal(tensors_of(copied / "model")["model.norm.weight"], model.model.norm.weight)
    assert not [*copied.glob("model.*")]


def test_a_checkpoint_of_a_model_of_another_size_is_one_line(ppo, whole, tmp_path):
    """Here one with another alphabet."""
    with pytest.raises(ppo.UserError, match=r"cannot resume from \S*iter_000003: \w+: ") as error:
        train(ppo, tmp_path, resume=str(newest(whole)), env_id="SortDigits-v0")
    assert "\n" not in str(error.value)


def test_folders_of_other_names_are_the_users(ppo, copied, tmp_path):
    """They are neither resumed nor deleted. An incomplete checkpoint is neither, until one takes its place."""
    checkpoints = copied / "checkpoints"
    for name in ("iter_000001_best", "iter_000009_bad", "iter_9"):
        shutil.copytree(newest(copied), checkpoints / name)
    (checkpoints / "iter_000009.sha256").write_text("")
    (checkpoints / "iter_000008").write_text("")
    (checkpoints / "iter_000004" / "of somebody").mkdir(parents=True)
    args = ppo.Args(log_dir=str(tmp_path), run_name="run", resume="auto")
    assert ppo.find_checkpoint(args).name == "iter_000003"
    train(ppo, tmp_path, resume="auto", num_iterations=5)
    names = "iter_000001_best iter_000004 iter_000005 iter_000008 iter_000009.sha256 iter_000009_bad iter_9"
    assert sorted(path.name for path in checkpoints.iterdir()) == names.split()


def test_the_handler_of_signals_does_no_operation_of_torch(ppo):
    """It may interrupt any, also where tensors have no data."""
    stop = ppo.StopSignals()
    with stop.restore, FakeTensorMode():
        stop.catch()
        signal.raise_signal(signal.SIGTERM)
    stop.agree()
    assert stop.number == signal.SIGTERM and isinstance(stop.received, int)


def test_a_signal_that_comes_while_the_ranks_agree_counts_the_next_time(ppo):
    stop = ppo.StopSignals()
    with stop.restore, on_call(ppo.dist, "all_gather_object", 1, lambda *_: signal.raise_signal(signal.SIGTERM)):
        stop.catch()
        stop.agree()
    assert (stop.number, stop.received) == (0, signal.SIGTERM)
    stop.agree()
    assert stop.number == signal.SIGTERM


def test_a_second_ctrl_c_stops_at_once(ppo):
    """But not SIGTERM after one, which torchrun sends."""
    stop = ppo.StopSignals()
    with stop.restore:
        stop.catch()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_finished_run_without_checkpoints_is_not_begun_anew(ppo, tmp_path):
    train(ppo, tmp_path, save_every=0)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(ppo.UserError, match="run has results, but no complete checkpoint"):
        train(ppo, tmp_path, save_every=0, resume="auto")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_after_the_iteration_with_checkpoint_and_export(ppo, whole, tmp_path, signum, code):
    with on_call(ppo, "policy_loss", 2, lambda *_: os.kill(os.getpid(), signum)), pytest.raises(SystemExit) as end:
        train(ppo, tmp_path, save_every=50)
    run, summary = tmp_path / "run", json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (end.value.code, summary["status"], len(lines(run)), iterations(run)) == (code, "interrupted", 1, [1])
    saved = tensors_of(newest(run))
    assert all(torch.equal(x, saved[f"actor.{name}"]) for name, x in tensors_of(run / "model").items())
    assert_same(whole, train(ppo, tmp_path, resume="auto"))


def test_a_signal_ends_the_last_evaluation_when_all_is_saved(ppo, whole, tmp_path):
    last = on_call(ppo, "evaluate", 3, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with last, pytest.raises(SystemExit) as end:
        train(ppo, tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (end.value.code, summary["status"], "eval_after" in summary) == (143, "interrupted", False)
    assert_same(whole, train(ppo, tmp_path, resume="auto"))
