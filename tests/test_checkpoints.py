"""Checkpoints: a run that was stopped and resumed is the run that was not, whatever is left of it on the disk."""

import errno
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from unittest import mock

import pytest
import safetensors.torch
import torch
from test_distributed import flags_of, start
from test_train import SMALL, lines, without_clock

pytestmark = [pytest.mark.shared, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def train(ppo, folder, **flags):
    """A small run; returns its folder, folder/run."""
    flags = SMALL | dict(num_iterations=3, save_every=1, log_dir=str(folder), run_name="run") | flags
    with mock.patch.object(ppo, "SummaryWriter"), mock.patch.object(ppo, "SFT_BATCH_SIZE", 16):
        ppo.train(ppo.Args(**flags))
    return folder / flags["run_name"]


def on_call(owner, name, number, action):
    """Do `action` before call `number`, from 1, of owner.<name>."""
    original, calls = getattr(owner, name), itertools.count(1)

    def wrapper(*args, **kwargs):
        if next(calls) == number:
            action()
        return original(*args, **kwargs)

    return mock.patch.object(owner, name, wrapper)


def iterations(run):
    return [int(path.name.removeprefix("iter_")) for path in sorted((run / "checkpoints").glob("iter_*"))]


def newest(run):
    return run / "checkpoints" / f"iter_{iterations(run)[-1]:06d}"


def assert_same(run, other):
    """To the last bit: newest checkpoint, export, logs and summary but for the clock."""
    records = []
    for folder in (run, other):
        record = {}
        for file in [*newest(folder).rglob("*.safetensors"), folder / "model" / "model.safetensors"]:
            tensors = safetensors.torch.load_file(file)
            record |= {f"{file.relative_to(folder)} {name}": x.numpy().tobytes() for name, x in tensors.items()}
        record |= {i: row for i, row in enumerate(without_clock(lines(folder)) + lines(folder, "completions"))}
        summary = json.loads((folder / "summary.json").read_text())
        records.append(record | {key: summary[key] for key in summary if key != "seconds"})
    a, b = records
    assert len(a) > 100 and [name for name in a | b if a.get(name) != b.get(name)] == []


RUNS = {}
KL = dict(kl_coef=0.1)
WARMUP = KL | dict(critic_warmup_iterations=2)  # only the last checkpoint has moments of the actor


@pytest.fixture
def whole(ppo, tmp_path_factory):
    """whole(**flags): folder of such a run that nothing interrupts, made once."""

    def get(**flags):
        key = (ppo.__name__, str(flags))
        if key not in RUNS:
            RUNS[key] = train(ppo, tmp_path_factory.mktemp("whole"), **flags)
        return RUNS[key]

    return get


@pytest.fixture
def copied(whole, tmp_path):
    return shutil.copytree(whole(**WARMUP), tmp_path / "run")


CASES = {
    "in the middle of updates": ("policy_loss", 10, KL),
    "between rollout and updates of critic warm-up": ("compute_gae", 2, WARMUP),
    "logged and not saved, a moving reference, evaluations on the way": (
        "save_checkpoint", 2, dict(kl_coef=0.1, kl_in="loss", ref_sync_every=2, ref_sync_alpha=0.5, eval_every=1)),
    "before the first checkpoint, several turns, warm start": (
        "save_checkpoint", 1, dict(save_every=2, env_id="environments:TwoTurns-v0", sft_steps=2)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_uninterrupted_one(ppo, whole, tmp_path, case):
    name, number, flags = CASES[case]
    power_cut = mock.Mock(side_effect=RuntimeError("power cut"))
    with on_call(ppo, name, number, power_cut), pytest.raises(RuntimeError, match="power cut"):
        train(ppo, tmp_path, resume="auto", **flags)
    logged, saved = len(lines(tmp_path / "run")), max(iterations(tmp_path / "run"), default=0)
    assert logged - saved == (name == "save_checkpoint") * flags.get("save_every", 1)  # will be written again
    assert_same(whole(**flags), train(ppo, tmp_path, resume="auto", **flags))


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_after_the_iteration_with_checkpoint_and_export(ppo, whole, tmp_path, signum, code):
    handler, flags, run = signal.getsignal(signum), KL | dict(save_every=50), tmp_path / "run"
    with on_call(ppo, "policy_loss", 6, lambda: os.kill(os.getpid(), signum)), pytest.raises(SystemExit) as end:
        train(ppo, tmp_path, **flags)
    assert end.value.code == code and signal.getsignal(signum) is handler
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["iterations"], len(lines(run)), iterations(run)) == ("interrupted", 2, 2, [2])
    saved, exported = (safetensors.torch.load_file(file) for file in (
        a_file_of(newest(run), "actor/weights"), run / "model" / "model.safetensors"))  # fmt: skip
    assert exported.keys() == saved.keys() and all(torch.equal(x, saved[name]) for name, x in exported.items())
    assert_same(whole(**KL), train(ppo, tmp_path, resume="auto", **flags))


def test_a_save_that_fails_leaves_the_checkpoints_before(ppo, whole, tmp_path):
    with mock.patch.object(ppo, "checkpoint_tensors", side_effect=KeyError), pytest.raises(KeyError):  # a bug
        train(ppo, tmp_path / "bug", **KL)
    disk_is_full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with on_call(ppo.dcp, "save", 12, disk_is_full):  # each checkpoint has nine folders of tensors
        # Nothing else can be written, either: the first error is the one to see.
        with pytest.raises(ppo.UserError, match=r"iter_000002 cannot be written.*OSError.*No space left"):
            with mock.patch.object(ppo.SummaryWriter, "close", side_effect=OSError(errno.ENOSPC, "No space left")):
                train(ppo, tmp_path, **KL)
    assert iterations(tmp_path / "run") == [1]
    assert not (tmp_path / "run" / "checkpoints" / "partial").exists()  # it may be what fills the disk
    assert_same(whole(**KL), train(ppo, tmp_path, resume="auto", **KL))
    assert iterations(tmp_path / "run") == [2, 3] and not (tmp_path / "run" / "checkpoints" / "partial").exists()


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(ppo, whole, tmp_path):
    with mock.patch.object(ppo.os, "rmdir", side_effect=OSError(errno.ENOTEMPTY, "Directory not empty")):  # as on NFS
        run = train(ppo, tmp_path, **KL)
    assert iterations(run) == [1, 2, 3]
    assert_same(whole(**KL), run)


def test_the_error_of_a_rank_is_named_and_not_its_wrapping(ppo):
    wrapped = ppo.dcp.api.CheckpointException("save", {1: (OSError(errno.ENOSPC, "No space left"), [])})
    with pytest.raises(ppo.UserError, match=r"^cannot save: OSError: \[Errno 28\] No space left$"), ppo.attempt("save"):
        raise wrapped


@pytest.mark.slow
def test_ctrl_c_ends_the_run_gracefully_also_if_it_ends_the_reader_of_the_output(ppo, tmp_path):
    """As in `python ppo_llm.py | tee log`, where the terminal sends it to both."""
    run = tmp_path / "run"
    process = start([sys.executable, ppo.__file__, *flags_of(num_iterations=10_000, **KL)], tmp_path)
    while len(lines(run)) < 2 if (run / "metrics.jsonl").exists() else True:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    assert iterations(run)[-1] == len(lines(run)) and (run / "model" / "config.json").exists()


def test_resume_takes_a_run_by_name_a_folder_or_a_single_checkpoint(ppo, copied, tmp_path):
    before = lines(copied)
    for i, resume in enumerate(("auto", str(copied))):
        train(ppo, tmp_path, resume=resume, **WARMUP | dict(num_iterations=4 + i))
        assert [row["iteration"] for row in lines(copied)] == list(range(4 + i)) and lines(copied)[:3] == before
    single = shutil.copytree(copied / "checkpoints" / "iter_000004", tmp_path / "single")
    flags = WARMUP | dict(resume=str(single), run_name="new", num_iterations=5)
    new = train(ppo, tmp_path, **flags)  # with logs of its own
    assert without_clock(lines(new)) == without_clock(lines(copied)[4:])
    assert {line["iteration"] for line in lines(new, "completions")} == {4}
    with pytest.raises(ppo.UserError, match=r"--run-name: \S*new exists"):
        train(ppo, tmp_path, **flags)
    with pytest.raises(ppo.UserError, match="--run-name: --resume with the folder of a run continues that run"):
        train(ppo, tmp_path, resume=str(copied), run_name="newer")
    with pytest.raises(ppo.UserError, match=r"--resume \S*nowhere: no checkpoint"):
        train(ppo, tmp_path, resume=str(tmp_path / "nowhere"), run_name="newer")


def test_a_run_that_starts_from_a_copied_checkpoint_logs_each_iteration_once(ppo, copied, tmp_path):
    """Also if it ends before its first checkpoint: what it had logged is shorter than the log of the run before."""
    run, flags = tmp_path / "b", WARMUP | dict(run_name="b", num_iterations=6, save_every=50)
    shutil.copytree(newest(copied), run / "checkpoints" / "iter_000003")
    power_cut = mock.Mock(side_effect=RuntimeError("power cut"))
    for _ in range(2):
        with on_call(ppo, "compute_gae", 2, power_cut), pytest.raises(RuntimeError, match="power cut"):
            train(ppo, tmp_path, resume="auto", **flags)
        assert [row["iteration"] for row in lines(run)] == [3]
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 4, "obj')  # as when the disk is full
    train(ppo, tmp_path, resume="auto", **flags)
    assert [row["iteration"] for row in lines(run)] == [3, 4, 5]
    assert {row["iteration"] for row in lines(run, "completions")} == {3, 4, 5}


def test_a_resume_under_other_flags_says_which_and_keeps_the_first_configuration(ppo, copied, tmp_path, capsys):
    first = (copied / "config.json").read_bytes()
    train(ppo, tmp_path, resume="auto", **WARMUP | dict(num_iterations=4, actor_lr=2e-5, target_kl=0.5))
    printed = re.findall(r"(?m)^  (--.*, in the checkpoint .*)$", capsys.readouterr().out)
    assert printed == ["--num-iterations 4, in the checkpoint 3", "--actor-lr 2e-05, in the checkpoint 0.0005",
                       "--target-kl 0.5, in the checkpoint None"]  # fmt: skip
    assert (copied / "config.json").read_bytes() == first
    assert json.loads((copied / "config_000003.json").read_text())["args"]["num_iterations"] == 4


def test_a_checkpoint_without_a_reference_says_so(ppo, tmp_path):
    run = train(ppo, tmp_path)  # with --kl-coef 0
    with pytest.raises(ppo.UserError, match=r"iter_000003 was saved without a reference: resume it with --kl-coef 0"):
        train(ppo, tmp_path, resume="auto", **KL)
    assert iterations(run) == [2, 3] and len(lines(run)) == 3


def test_a_checkpoint_of_a_fork_with_more_state_is_not_called_damaged(ppo, copied, tmp_path):
    content = json.loads((newest(copied) / "state.json").read_text())
    content["state"]["success_rates"] = [0.5]
    (newest(copied) / "state.json").write_text(json.dumps(content))
    with pytest.raises(ppo.UserError, match=r"iter_000003: another version .* TrainState has success_rates: resume"):
        train(ppo, tmp_path, resume="auto", **WARMUP)


def a_file_of(checkpoint, folder):
    return next((checkpoint / folder).glob("*.safetensors"))


DAMAGE = {
    "missing file": lambda path: a_file_of(path, "critic/weights").unlink(),
    "truncated file": lambda path: os.truncate(a_file_of(path, "actor/exp_avg"), 1000),
    "damaged file": lambda path: a_file_of(path, "reference/weights").open("r+b").write(bytes(100)),  # of the same size
    "cut state.json": lambda path: os.truncate(path / "state.json", 100),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_with_the_one_before(ppo, whole, copied, tmp_path, capsys, damage):
    DAMAGE[damage](newest(copied))
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    with pytest.raises(ppo.UserError, match=r"iter_000003 cannot be read.* the one before is \S*iter_000002"):
        train(ppo, tmp_path, resume="auto", **WARMUP)
    assert before == {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    shutil.rmtree(newest(copied))  # as the message says
    train(ppo, tmp_path, resume="auto", **WARMUP)
    assert re.findall(r"resuming from \S*/(iter_\d+)", capsys.readouterr().out) == ["iter_000002"]
    assert_same(whole(**WARMUP), copied)  # it has been written again


def test_parameters_that_only_one_side_has_are_an_error(ppo, copied, tmp_path):
    """As in a fork that adds some to the model, and resumes, copies or loads what was saved before."""
    config = ppo.ModelConfig.from_hf(json.loads((copied / "model" / "config.json").read_text()))
    plain, original = ppo.Transformer(config), ppo.Attention.__init__

    def init(self, *args):
        original(self, *args)
        self.adapter = torch.nn.Parameter(torch.zeros(3))

    with mock.patch.object(ppo.Attention, "__init__", init):
        adapted = ppo.Transformer(config)
        with pytest.raises(ppo.UserError, match=r"actor.*other names or shapes.*layers\.0\.self_attn\.adapter"):
            train(ppo, tmp_path, resume="auto", **WARMUP)
    for source, target in ((plain, adapted), (adapted, plain)):
        with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.adapter"):
            ppo.copy_weights(source, target)
    with pytest.raises(ppo.UserError, match=r"model: .*other names.*layers\.0\.self_attn\.adapter"):
        ppo.load_weights(adapted, copied / "model")
    with pytest.raises(ppo.UserError, match=r"iter_000003.*actor.*other names or shapes.*model\.embed_tokens\.weight"):
        train(ppo, tmp_path, resume="auto", env_id="SortDigits-v0", **WARMUP)  # an alphabet of another size


def test_parameters_without_gradient_several_groups_and_other_optimizers_are_resumed(ppo, tmp_path):
    """Parameters without a gradient have no moments. The embedding has a learning rate of 0, the critic SGD."""
    original, embedding = ppo.Attention.__init__, []

    def init(self, *args):
        original(self, *args)
        self.unused = torch.nn.Parameter(torch.zeros(3))

    def make_optimizer(model, args):
        first, *rest = model.parameters()
        embedding.append((first, first.clone()))
        groups = [{"params": [first], "lr_scale": 0.0}, {"params": rest}]
        return torch.optim.AdamW(groups) if model.head == "lm" else torch.optim.SGD(groups, momentum=0.9)

    groups = mock.patch.object(ppo, "make_optimizer", make_optimizer)
    with mock.patch.object(ppo.Attention, "__init__", init), groups:
        run = train(ppo, tmp_path / "whole", num_iterations=3, save_every=2)
        assert iterations(run) == [2, 3]  # the last iteration, too
        flags = dict(resume=str(run / "checkpoints" / "iter_000002"), num_iterations=3)
        resumed = train(ppo, tmp_path, **flags)
    assert without_clock(lines(resumed)) == without_clock(lines(run))[2:]
    assert all(torch.equal(weight, before) for weight, before in embedding)
    moments = safetensors.torch.load_file(a_file_of(newest(run), "actor/exp_avg"))
    assert len(moments) > 10 and "unused" not in " ".join(moments) and a_file_of(newest(run), "critic/momentum_buffer")


@pytest.mark.slow
def test_kill_9_while_saving_leaves_a_complete_checkpoint(ppo, tmp_path):
    """At random moments; what is resumed continues the same log."""
    flags = dict(save_every=1, rollout_batch_size=1, train_batch_size=1, ppo_epochs=1, max_new_tokens=2, lr_end=1)
    rng, run, done, within = random.Random(0), tmp_path / "run", 0, 0
    partial = run / "checkpoints" / "partial"
    for _ in range(4):
        argv = flags_of(num_iterations=10_000, resume="auto", **flags)
        process = start([sys.executable, ppo.__file__, *argv], tmp_path)
        while max(iterations(run), default=0) < done + 2 or not partial.exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.04))
        process.kill()
        process.communicate()
        within, done = within + partial.exists(), iterations(run)[-1]
        files = json.loads((newest(run) / "state.json").read_text())["files"]
        assert len(files) == 8 and all(safetensors.torch.load_file(newest(run) / name) for name in files)
    assert within > 0, "no kill fell within a save"
    resumed = train(ppo, tmp_path, resume="auto", **flags | dict(num_iterations=done + 2))
    assert [row["iteration"] for row in lines(resumed)] == list(range(done + 2))
