"""Checkpoints and resume: a run that is stopped goes on as if nothing had been, whatever is left of it on the disk."""

import contextlib
import errno
import functools
import hashlib
import io
import itertools
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from unittest import mock

import environments
import gymnasium as gym
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from test_bad_input import checkpoint as hf_folder
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

# One process loads without torch.distributed.
pytestmark = [pytest.mark.shared, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

SMALL = dict(
    num_iterations=4,
    rollout_batch_size=8,
    n_samples_per_prompt=2,
    train_batch_size=8,
    sft_steps=0,
    eval_episodes=2,
    log_completions=100,
    save_every=1,
    device="cpu",
    env_id="environments:Plain-v0",
)
STEPS = 8  # optimizer steps in an iteration of these: 2 epochs x 2 minibatches, of the critic and of the actor
CLOCK = ("time/", "perf/", "charts/SPS")


class Waits(environments.TextEnv):
    """From seed `first` on a step waits until there is a file `gate`."""

    def __init__(self, first, gate):
        self.first, self.gate = first, gate

    def turn(self, response):
        while self.seed >= self.first and not Path(self.gate).exists():
            time.sleep(0.01)
        return super().turn(response)


gym.register("Waits-v0", entry_point=Waits)


@pytest.fixture(autouse=True)
def one_thread():
    """As in the processes that tests start: the order of a sum depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- Runs, in this process and in others ---


def train(ppo, folder, **flags):
    """A small run in folder/run; returns its summary. TensorBoard's files would cost more than the run."""
    with mock.patch.object(ppo, "SummaryWriter"):
        return ppo.train(ppo.Args(**(SMALL | dict(log_dir=str(folder), run_name="run") | flags)))


def launch(ppo, folder, ranks=0, restarts=0, **flags):
    """The same from the command line, with torchrun if there are `ranks`."""
    flags = SMALL | dict(log_dir=folder, run_name="run") | flags
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    return subprocess.Popen(
        [*command, ppo.__file__, *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items())],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell ignores it for what runs behind `&`
    )


def finish(process, code=0):
    """What the process printed; it must have ended with `code`."""
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    assert "Traceback" not in output or code == -signal.SIGKILL, output
    return output


def descendants(pid):
    for task in Path(f"/proc/{pid}/task").glob("*"):
        for child in map(int, (task / "children").read_text().split()):
            yield from descendants(child)
            yield child


def kill(process):
    """kill -9 of a process and all that it started."""
    for pid in (process.pid, *descendants(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def until(condition, process, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def lines(run, name="metrics"):
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


def row_count(run):
    return (run / "metrics.jsonl").read_bytes().count(b"\n") if (run / "metrics.jsonl").exists() else 0


def iterations(run):
    """Those of the checkpoints that are there, oldest first."""
    return sorted(int(path.name.removeprefix("iter_")) for path in (run / "checkpoints").glob("iter_" + "[0-9]" * 6))


def newest(run):
    return run / "checkpoints" / f"iter_{iterations(run)[-1]:06d}"


def tensors(checkpoint):
    """Every tensor of a checkpoint, read by DCP alone."""
    found = {}
    for folder in sorted(path.parent for path in checkpoint.glob("*/.metadata")):
        reader = dcp.FileSystemReader(folder)
        kinds = reader.read_metadata().state_dict_metadata.items()
        empty = {name: torch.empty(kind.size, dtype=kind.properties.dtype) for name, kind in kinds}
        dcp.load(empty, storage_reader=reader, no_dist=True)
        found |= {f"{folder.name}.{name}": x for name, x in empty.items()}
    return found


def without_clock(row):
    return {name: x for name, x in row.items() if not name.startswith(CLOCK)}


def record(run, after=0):
    """All that two equal runs share, by name: log lines but for their clocks, newest checkpoint, summary, export."""
    found = {}
    for row in lines(run):
        if row["iteration"] >= after:
            found[f"metrics {row['iteration']}"] = without_clock(row)
    for i, line in enumerate(line for line in lines(run, "completions") if line["step"] >= after):
        found[f"completions {i}"] = line
    state = json.loads((newest(run) / "state.json").read_text())
    found |= {f"state {name}": x for name, x in state.items() if name not in ("seconds", "bytes", "args")}
    summary = json.loads((run / "summary.json").read_text())
    found |= {f"summary {name}": x for name, x in summary.items() if name not in ("seconds", "peak_memory_bytes")}
    exported = safetensors.torch.load_file(run / "model" / "model.safetensors")
    return found | tensors(newest(run)) | {f"export.{name}": x for name, x in exported.items()}


def differences(a, b):
    """Names of what is not the same in two records, to the last bit."""
    same = lambda x, y: torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y
    return [name for name in a | b if name not in a or name not in b or not same(a[name], b[name])]


def close(a, b):
    """Of rows or tensors: the same up to what the order of sums does to float32."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, torch.Tensor):
        return torch.allclose(a, b, rtol=0, atol=1e-4)
    return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-4) if isinstance(a, float) else a == b


def hashes(folder):
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def on_call(target, name, number, action):
    """Before call `number`, from 1, of target.<name> do `action`. Yields the list of calls, an item each."""
    calls, original = [], getattr(target, name)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        calls.append(len(calls) + 1)
        if calls[-1] == number:
            action()
        return original(*args, **kwargs)

    with mock.patch.object(target, name, wrapper):
        yield calls


def throw(error):
    raise error


def stop(ppo, folder, name, number, error=None, **flags):
    """A run that breaks off at call `number` of ppo.<name>, by default without a chance to save."""
    error = error or RuntimeError("power cut")
    with on_call(ppo, name, number, lambda: throw(error)), pytest.raises(type(error)):
        train(ppo, folder, **flags)


# --- A stopped run goes on as if it had not been stopped ---

CASES = {
    "plain": dict(),
    "adaptive KL": dict(kl_coef=0.1, kl_target=1e-3, kl_horizon=100),
    "critic warm-up": dict(critic_warmup_iterations=3, kl_coef=0.1, kl_in="loss"),
    "reference that moves": dict(kl_coef=0.1, ref_sync_every=2, ref_sync_alpha=0.5, save_every=2),
    "evaluations": dict(eval_every=2, save_every=2),
    "two turns, warm start": dict(env_id="environments:TwoTurns-v0", sft_steps=2, sft_batch_size=8),
}


def places(ppo):
    """Where a run may stop: the functions that it goes through, from the first to the last."""
    names = "at_sampled rollout evaluate compute_gae over_rollout shuffled_minibatches diagnose_ratio".split()
    return {
        **{name: (ppo, name) for name in names},
        "step": (ppo.Learner, "step"),
        "log": (ppo.RunFolder, "log"),
        "write": (ppo.RunFolder, "write"),
        "save": (ppo.Checkpoints, "save"),
    }


@pytest.mark.both
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_breaks_off_anywhere_and_is_resumed_is_the_same_run(ppo, tmp_path, capsys, case):
    rng, flags, counts = random.Random(case), CASES[case], {}
    with contextlib.ExitStack() as stack:
        for name, place in places(ppo).items():
            counts[name] = stack.enter_context(on_call(*place, None, None))
        train(ppo, tmp_path / "whole", **flags)
    output = ""
    for leg, error in enumerate(rng.sample([RuntimeError, KeyboardInterrupt, ppo.UserError, MemoryError], 3)):
        name, place = rng.choice([*places(ppo).items()])
        calls = len(counts[name])
        number = rng.randint(1, max(1, calls // 2)) if leg else rng.randint(calls // 2, calls * 3 // 4)
        with on_call(*place, number, lambda: throw(error("stopped here"))), contextlib.suppress(error):
            train(ppo, tmp_path / "parts", resume="auto", **flags)
        output += capsys.readouterr().out
    train(ppo, tmp_path / "parts", resume="auto", **flags)
    resumed = re.findall(r"going on from .*iter_\d+, after (\d+)", output + capsys.readouterr().out)
    assert any(0 < int(n) < 4 for n in resumed), "no stop fell between two checkpoints"
    assert differences(record(tmp_path / "whole" / "run"), record(tmp_path / "parts" / "run")) == []


def test_a_stop_within_critic_warmup_or_at_its_end_changes_nothing(ppo, tmp_path, capsys):
    flags = dict(critic_warmup_iterations=2, kl_coef=0.1, kl_target=1e-3, kl_horizon=100)
    train(ppo, tmp_path / "whole", **flags)
    for iteration in (1, 2, 3):
        parts = tmp_path / str(iteration)
        stop(ppo, parts, "compute_gae", iteration + 1, **flags)
        train(ppo, parts, resume="auto", **flags)
        assert f"after {iteration} iterations" in capsys.readouterr().out
        assert differences(record(tmp_path / "whole" / "run"), record(parts / "run")) == []


def test_what_was_logged_after_the_checkpoint_is_logged_again_and_nothing_is_evaluated_twice(ppo, tmp_path, finished):
    flags = dict(kl_coef=0.1, save_every=2)
    stop(ppo, tmp_path, "compute_gae", 4, **flags)
    assert row_count(tmp_path / "run") == 3 and iterations(tmp_path / "run") == [2]
    with on_call(ppo, "evaluate", None, None) as evaluations:
        train(ppo, tmp_path, resume="auto", **flags)
    assert len(evaluations) == 1
    assert differences(record(finished(ppo, tmp_path / "whole")), record(tmp_path / "run")) == []


@contextlib.contextmanager
def learners(ppo):
    found, original = [], ppo.Learner.__init__
    with mock.patch.object(ppo.Learner, "__init__", lambda self, *rest: found.append(self) or original(self, *rest)):
        yield found


@pytest.mark.parametrize("flags", [dict(), dict(critic_warmup_iterations=2)])
def test_saving_changes_neither_weights_nor_moments_nor_metrics(ppo, tmp_path, flags):
    ends = []
    for save_every in (0, 1):
        with learners(ppo) as found:
            train(ppo, tmp_path / str(save_every), save_every=save_every, num_iterations=3, **flags)
        end = [{name: p for name, p in learner.model.named_parameters()} for learner in found]
        end += [state for learner in found for state in learner.optimizer.state.values()]
        run = tmp_path / str(save_every) / "run"
        ends.append((end, [without_clock(row) for row in lines(run)], lines(run, "completions")))
    (unsaved, *logs), (saved, *logs_of_saved) = ends
    assert logs == logs_of_saved and len(unsaved) == len(saved)
    assert not any(differences(a, b) for a, b in zip(unsaved, saved, strict=True))
    assert not (tmp_path / "0" / "run" / "checkpoints").exists()


def test_moments_are_saved_from_a_models_first_step_on(ppo, tmp_path):
    train(ppo, tmp_path, critic_warmup_iterations=2, keep_checkpoints=4)
    for iteration, of_actor in zip(range(1, 5), (False, False, True, True), strict=True):
        names = tensors(tmp_path / "run" / "checkpoints" / f"iter_{iteration:06d}")
        assert any(name.startswith("critic.moments.") for name in names)
        assert any(name.startswith("actor.moments.") for name in names) == of_actor


def test_only_the_newest_checkpoints_are_kept(ppo, tmp_path):
    for iterations, keep in ((2, 3), (5, 3), (6, 2)):
        train(ppo, tmp_path, num_iterations=iterations, keep_checkpoints=keep, resume="auto")
        names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
        assert names == {f"iter_{i:06d}" for i in range(max(1, iterations + 1 - keep), iterations + 1)}


def test_less_than_two_checkpoints_are_not_allowed(ppo, tmp_path):
    with pytest.raises(ppo.UserError, match="--keep-checkpoints 1"):
        train(ppo, tmp_path, keep_checkpoints=1)


def test_the_last_iteration_is_saved_whatever_save_every(ppo, tmp_path):
    train(ppo, tmp_path, num_iterations=3, save_every=2)
    assert iterations(tmp_path / "run") == [2, 3]


# --- Damage ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """finished(ppo, folder) copies a run of four iterations with three checkpoints to folder/run."""
    runs = {}

    def copy(ppo, folder):
        if ppo.__name__ not in runs:
            runs[ppo.__name__] = tmp_path_factory.mktemp("finished")
            train(ppo, runs[ppo.__name__], kl_coef=0.1, keep_checkpoints=3)
        shutil.copytree(runs[ppo.__name__] / "run", folder / "run")
        return folder / "run"

    return copy


def find(ppo, run, config=None):
    """What --resume auto would take."""
    config = config or ppo.ModelConfig.from_hf(json.loads((newest(run) / "state.json").read_text())["config"])
    args = ppo.Args(**SMALL, kl_coef=0.0, resume="auto", log_dir=str(run.parent), run_name=run.name)
    return ppo.find_resume(args, config, ppo.Ranks([0], torch.device("cpu")))


def warned(output):
    """Names of the checkpoints that were passed over."""
    return re.findall(r"^WARNING: \S*/(iter_\d{6})\b", output, re.MULTILINE)


def damaged(name, content):
    return lambda path: (path / name).write_bytes(content((path / name).read_bytes()))


def flip(data, bit):
    data = bytearray(data)
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


FILES = ["state.json", "manifest.json", *(f"{model}/{file}" for model in ("actor", "critic", "reference")
                                           for file in (".metadata", "__0_0.distcp"))]  # fmt: skip


def test_every_file_of_a_checkpoint_is_known_here(ppo, tmp_path, finished):
    path = newest(finished(ppo, tmp_path))
    assert sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_rules_the_checkpoint_out(ppo, tmp_path, finished, capsys, name):
    run, rng = finished(ppo, tmp_path), random.Random(name)
    config = ppo.ModelConfig.from_hf(json.loads((newest(run) / "state.json").read_text())["config"])
    path, content = newest(run) / name, (newest(run) / name).read_bytes()
    bits = [flip(content, rng.randrange(8 * len(content))) for _ in range(12)]
    for changed in [b"", content[:-1], content[: len(content) // 2], content + b"\0", *bits, None]:
        path.unlink() if changed is None else path.write_bytes(changed)
        assert find(ppo, run, config).checkpoint.name == "iter_000003"
        assert warned(capsys.readouterr().out) == [newest(run).name]
    path.write_bytes(content)
    assert find(ppo, run, config).checkpoint.name == "iter_000004"


DAMAGE = {
    "empty file": damaged("actor/__0_0.distcp", lambda data: b""),
    "truncated file": damaged("critic/__0_0.distcp", lambda data: data[:-100]),
    "flipped bit": damaged("reference/__0_0.distcp", lambda data: flip(data, 4 * len(data))),
    "empty metadata": damaged("actor/.metadata", lambda data: b""),
    "missing tensors": lambda path: (path / "actor/__0_0.distcp").unlink(),
    "missing folder": lambda path: shutil.rmtree(path / "critic"),
    "missing manifest": lambda path: (path / "manifest.json").unlink(),
    "empty manifest": lambda path: (path / "manifest.json").write_text("{}"),
    "manifest that is a list": lambda path: (path / "manifest.json").write_text("[]"),
    "manifest of odd entries": lambda path: (path / "manifest.json").write_text('{"state.json": 3, "../..": null}'),
    "missing state": lambda path: (path / "state.json").unlink(),
    "empty folder": lambda path: shutil.rmtree(path) or path.mkdir(),
}


def test_any_damage_rules_the_checkpoint_out(ppo, tmp_path, finished, capsys):
    for i, damage in enumerate(DAMAGE.values()):
        run = finished(ppo, tmp_path / str(i))
        config = ppo.ModelConfig.from_hf(json.loads((newest(run) / "state.json").read_text())["config"])
        damage(newest(run))
        assert find(ppo, run, config).checkpoint == newest(run).with_name("iter_000003")
        assert warned(capsys.readouterr().out) == ["iter_000004"]


@pytest.mark.parametrize("case", ["flipped bit", "missing manifest", "empty folder"])
def test_the_checkpoint_before_a_damaged_one_is_used(ppo, tmp_path, finished, capsys, case):
    run = finished(ppo, tmp_path)
    whole, path = record(run), newest(run)
    DAMAGE[case](path)
    train(ppo, tmp_path, resume="auto", kl_coef=0.1, keep_checkpoints=3)
    output = capsys.readouterr().out
    assert warned(output) == ["iter_000004"] and f"going on from {path.with_name('iter_000003')}" in output
    assert differences(whole, record(run)) == []  # the damaged folder has been written anew
    assert iterations(run) == [2, 3, 4] and find(ppo, run).checkpoint == path


def test_what_is_no_checkpoint_is_passed_over(ppo, tmp_path, finished):
    run = finished(ppo, tmp_path)
    folder = run / "checkpoints"
    (folder / "latest").symlink_to("iter_000099")
    (folder / "notes.txt").write_text("mine")
    (folder / "iter_99").mkdir()
    (folder / "iter_000009.bak").mkdir()
    (folder / "partial").mkdir()
    (folder / "partial" / "state.json").write_text("{")
    assert find(ppo, run).checkpoint == folder / "iter_000004"
    train(ppo, tmp_path, resume="auto", kl_coef=0.1, num_iterations=5)
    names = {path.name for path in folder.iterdir()}
    assert names == {"iter_000004", "iter_000005", "latest", "notes.txt", "iter_99", "iter_000009.bak"}


@pytest.mark.parametrize("resume", ["auto", "folder", "checkpoint"])
def test_if_all_are_damaged_nothing_is_started_from_scratch(ppo, tmp_path, finished, capsys, resume):
    run = finished(ppo, tmp_path)
    paths = [run / "checkpoints" / f"iter_{i:06d}" for i in (2, 3, 4)]
    for i, path in enumerate(paths):
        [*DAMAGE.values()][i](path)
    before = hashes(run)
    value = {"auto": "auto", "folder": str(run), "checkpoint": str(paths[-1])}[resume]
    with pytest.raises(ppo.UserError, match=f"--resume {re.escape(value)}"):
        train(ppo, tmp_path, resume=value, kl_coef=0.1, run_name="new" if resume == "checkpoint" else "run")
    assert warned(capsys.readouterr().out) == [path.name for path in paths[::-1]][: 1 if resume == "checkpoint" else 3]
    assert hashes(run) == before and [path.name for path in tmp_path.iterdir()] == ["run"]


def test_resume_auto_without_a_checkpoint_starts_afresh_and_says_so(ppo, tmp_path, capsys):
    stop(ppo, tmp_path, "compute_gae", 2, save_every=0)
    assert row_count(tmp_path / "run") == 1
    for folder in (tmp_path, tmp_path / "nowhere"):
        train(ppo, folder, resume="auto")
        assert "no checkpoint" in capsys.readouterr().out
        assert [row["iteration"] for row in lines(folder / "run")] == [0, 1, 2, 3]


def test_tensorboard_forgets_what_a_fresh_start_will_write_again(ppo, tmp_path):
    stop(ppo, tmp_path, "compute_gae", 2, save_every=0)
    with mock.patch.object(ppo, "SummaryWriter") as writer:
        ppo.train(ppo.Args(**SMALL, log_dir=str(tmp_path), run_name="run", resume="auto"))
    assert [call.kwargs["purge_step"] for call in writer.call_args_list] == [0, 0]


@pytest.mark.parametrize("name", ["metrics.jsonl", "completions.jsonl"])
def test_a_log_that_is_shorter_than_it_was_is_not_filled_up(ppo, tmp_path, finished, name):
    """A power cut takes what the system had not written yet: checkpoints are synced, logs are not."""
    run = finished(ppo, tmp_path)
    (run / name).write_text("".join((run / name).read_text().splitlines(keepends=True)[:2]))
    train(ppo, tmp_path, resume="auto", kl_coef=0.1, num_iterations=5)
    assert lines(run)[-1]["iteration"] == 4 and lines(run, "completions")[-1]["step"] == 4


@pytest.mark.parametrize("text", ["", '{"status": "comp', "{}"])
def test_a_summary_that_was_cut_short_does_not_matter(ppo, tmp_path, finished, text):
    run = finished(ppo, tmp_path)
    whole = record(run)
    (run / "summary.json").write_text(text)
    train(ppo, tmp_path, resume="auto", kl_coef=0.1)
    assert differences(whole, record(run)) == []


def test_a_damaged_checkpoint_that_the_run_passes_by_is_not_one_of_those_kept(ppo, tmp_path, finished):
    """As where a signal has left one in between: the run does not save there again."""
    run, flags = finished(ppo, tmp_path), dict(resume="auto", kl_coef=0.1, num_iterations=6, save_every=5)
    DAMAGE["missing manifest"](newest(run))
    stop(ppo, tmp_path, "compute_gae", 3, **flags)  # from 3 on, past 4, saved at 5
    intact = [i for i in iterations(run) if (run / f"checkpoints/iter_{i:06d}/manifest.json").exists()]
    assert intact == [3, 5]
    DAMAGE["missing manifest"](newest(run))
    train(ppo, tmp_path, **flags)


# --- Pickles that call something ---


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def seal(path):
    """Write the manifest that fits the files."""
    (path / "manifest.json").unlink()
    files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for folder in (p for p in path.iterdir() if p.is_symlink()):
        files |= {f"{folder.name}/{file.name}": file.read_bytes() for file in folder.iterdir()}
    entries = {name: {"bytes": len(x), "sha256": hashlib.sha256(x).hexdigest()} for name, x in files.items()}
    (path / "manifest.json").write_text(json.dumps(entries))


def metadata_is_a_bomb(path, bomb):
    (path / "actor/.metadata").write_bytes(pickle.dumps(bomb))


def metadata_holds_a_bomb(path, bomb):
    metadata = pickle.loads((path / "actor/.metadata").read_bytes())
    metadata.planner_data = [bomb]
    (path / "actor/.metadata").write_bytes(pickle.dumps(metadata))


def metadata_of_a_rank_is_a_bomb(path, bomb):
    """DCP reads it where the common one is missing."""
    (path / "actor/.metadata").unlink()
    (path / "actor/__0.metadata").write_bytes(pickle.dumps(bomb))


def folder_with_a_bomb_lies_elsewhere(path, bomb):
    """Path.rglob does not follow the link."""
    elsewhere = path.parent.parent / "elsewhere"
    (path / "actor").rename(elsewhere)
    (path / "actor").symlink_to(elsewhere)
    (elsewhere / ".metadata").write_bytes(pickle.dumps(bomb))


def tensors_are_a_bomb(path, bomb):
    torch.save(bomb, path / "actor/__0_0.distcp")


def tensor_is_a_bomb(path, bomb, edit=lambda metadata: None):
    """At a place where the metadata says that a tensor is."""
    torch.save(bomb, path / "actor/bomb.distcp")
    metadata = pickle.loads((path / "actor/.metadata").read_bytes())
    for index, place in metadata.storage_data.items():
        if index.fqn == "weights.lm_head.weight":
            place.relative_path, place.offset = "bomb.distcp", 0
            place.length = (path / "actor/bomb.distcp").stat().st_size
    edit(metadata)
    (path / "actor/.metadata").write_bytes(pickle.dumps(metadata))


def bytes_instead_of_a_tensor_are_a_bomb(path, bomb):
    """DCP reads what its metadata calls bytes with weights_only=False."""

    def edit(metadata):
        metadata.state_dict_metadata["weights.lm_head.weight"] = BytesStorageMetadata()
        index = next(index for index in metadata.storage_data if index.fqn == "weights.lm_head.weight")
        metadata.storage_data[type(index)(index.fqn)] = metadata.storage_data.pop(index)

    tensor_is_a_bomb(path, bomb, edit)


BOMBS = [
    metadata_is_a_bomb,
    metadata_holds_a_bomb,
    metadata_of_a_rank_is_a_bomb,
    folder_with_a_bomb_lies_elsewhere,
    tensors_are_a_bomb,
    tensor_is_a_bomb,
    bytes_instead_of_a_tensor_are_a_bomb,
]


@pytest.mark.parametrize(("place", "sealed"), [(BOMBS[0], False), *((place, True) for place in BOMBS)])
def test_nothing_in_a_checkpoint_is_executed(ppo, tmp_path, finished, capsys, place, sealed):
    """Refused and named, whether the manifest is as it was or made to fit."""
    run, error = finished(ppo, tmp_path), ""
    path = newest(run)
    place(path, Bomb(tmp_path / "executed"))
    if sealed:
        seal(path)
    try:
        train(ppo, tmp_path, resume="auto", kl_coef=0.1, num_iterations=5)
    except ppo.UserError as refused:
        error = str(refused)
    assert not (tmp_path / "executed").exists()
    assert warned(capsys.readouterr().out) == ["iter_000004"] or f"{path}: does not fit this run" in error


def test_the_bombs_above_would_go_off(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


class Attribute:
    """Pickled as getattr(*args)."""

    def __init__(self, *args):
        self.args = args

    def __reduce__(self):
        return getattr, self.args


def test_an_enum_as_older_pythons_pickle_it_is_read_and_no_other_attribute(ppo):
    formats = dcp.metadata._MEM_FORMAT_ENCODING
    load = lambda *args: ppo.MetadataUnpickler(io.BytesIO(pickle.dumps(Attribute(*args)))).load()
    assert load(formats, "TORCH_CONTIGUOUS_FORMAT") is formats.TORCH_CONTIGUOUS_FORMAT
    for args in ((torch.Size, "__class__"), (formats, "__class__"), (formats, "__members__")):
        with pytest.raises((pickle.UnpicklingError, KeyError)):
            load(*args)


def test_a_file_that_is_none_of_ours_is_not_read(ppo, tmp_path, finished):
    run = finished(ppo, tmp_path)
    for name in ("bomb.pkl", "actor/bomb.pkl", "actor/__1_0.distcp"):
        (newest(run) / name).write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    train(ppo, tmp_path, resume="auto", kl_coef=0.1, num_iterations=5)
    assert not (tmp_path / "executed").exists() and iterations(run) == [4, 5]


# --- What may be changed on resume ---


def test_another_shape_is_refused_by_name(ppo, tmp_path):
    models = {}
    for name, changes in {"model": {}, "wider": {"hidden_size": 32}, "deeper": {"num_hidden_layers": 2},
                          "rotated": {"rope_theta": 500.0}}.items():  # fmt: skip
        models[name] = hf_folder(ppo, tmp_path / name, **changes)
    flags = dict(max_prompt_tokens=8, max_new_tokens=8, actor_lr=1e-4, critic_lr=1e-4)
    train(ppo, tmp_path, num_iterations=2, model=models["model"], **flags)
    before = hashes(tmp_path / "run")
    for name, difference in (
        ("wider", r"hidden_size 16, this run's 32"),
        ("deeper", r"num_hidden_layers 1, this run's 2"),
        ("rotated", r"rope_theta 10000.0, this run's 500.0"),
    ):
        with pytest.raises(ppo.UserError, match=f"--resume .*iter_000002.*{difference}"):
            train(ppo, tmp_path, resume="auto", model=models[name], **flags)
    with pytest.raises(ppo.UserError, match=r"--resume .*iter_000002.*vocab_size"):
        train(ppo, tmp_path, resume="auto", **flags)  # the embedded model
    assert hashes(tmp_path / "run") == before
    train(ppo, tmp_path, resume="auto", model=models["model"], **flags)


def test_changed_flags_are_told_and_take_effect(ppo, tmp_path, capsys):
    train(ppo, tmp_path, num_iterations=2, run_name="old", actor_lr=1e-3)
    capsys.readouterr()
    changes = dict(actor_lr=0.002, ppo_epochs=1, train_batch_size=16, num_iterations=3, critic_epochs=2)
    train(ppo, tmp_path, run_name="new", resume=str(tmp_path / "old" / "checkpoints" / "iter_000002"), **changes)
    output = capsys.readouterr().out
    for change in ("actor-lr was 0.001, is now 0.002", "ppo-epochs was 2, is now 1", "num-iterations was 2, is now 3",
                   "train-batch-size was 8, is now 16"):  # fmt: skip
        assert f"--{change}" in output
    assert output.count(", is now ") == 4
    assert [row["charts/actor_steps"] for row in lines(tmp_path / "new")] == [9]
    # The schedule has more steps behind it than these flags plan.
    assert 0.05 * 0.002 <= lines(tmp_path / "new")[0]["charts/actor_lr"] <= 0.002


def test_a_reference_cannot_be_added_later(ppo, tmp_path):
    train(ppo, tmp_path, num_iterations=2)
    before = hashes(tmp_path / "run")
    with pytest.raises(ppo.UserError, match=r"--kl-coef 0.1: .*iter_000002 has no reference"):
        train(ppo, tmp_path, resume="auto", kl_coef=0.1)
    assert hashes(tmp_path / "run") == before


def test_a_reference_can_be_left_out_later(ppo, tmp_path, finished):
    run = finished(ppo, tmp_path)
    train(ppo, tmp_path, resume="auto", kl_coef=0.0, num_iterations=5)
    assert "objective/kl_coef" in lines(run)[3] and "objective/kl_coef" not in lines(run)[4]
    assert not (newest(run) / "reference").exists()


def test_an_adapted_kl_coefficient_goes_on_unless_the_flag_is_changed(ppo, tmp_path):
    flags = dict(kl_coef=0.1, kl_target=1e-3, kl_horizon=100)
    train(ppo, tmp_path, **flags)
    whole = [row["objective/kl_coef"] for row in lines(tmp_path / "run")]
    assert len(set(whole)) == 4
    two = str(tmp_path / "run" / "checkpoints" / "iter_000003")
    train(ppo, tmp_path, run_name="same", resume=two, **flags)
    train(ppo, tmp_path, run_name="other", resume=two, **flags | dict(kl_coef=0.7))
    assert [row["objective/kl_coef"] for row in lines(tmp_path / "same")] == whole[3:]
    assert lines(tmp_path / "other")[0]["objective/kl_coef"] == 0.7


def test_prompts_run_on_with_another_batch_size(ppo, tmp_path, monkeypatch):
    seeds, rollout = [], ppo.rollout
    monkeypatch.setattr(ppo, "rollout", lambda *args, **kwargs: seeds.append(list(args[3])) or rollout(*args, **kwargs))
    train(ppo, tmp_path, num_iterations=2)
    train(ppo, tmp_path, resume="auto", rollout_batch_size=4)
    trained = [part for part in seeds if len(part) > 2]  # evaluations have 2
    assert trained == [[i // 2 for i in range(a, b)] for a, b in ((0, 16), (16, 32), (32, 40), (40, 48))]


# --- Where a run goes on ---


def main(ppo, folder, **flags):
    """Exit code of the command line, in this process."""
    flags = SMALL | dict(log_dir=folder, run_name="run") | flags
    command = ["ppo", *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items())]
    with mock.patch.object(sys, "argv", command), mock.patch.object(ppo, "SummaryWriter"):
        try:
            ppo.main()
        except SystemExit as end:
            return end.code
    return 0


def test_a_finished_run_is_left_as_it_is_until_there_are_more_iterations(ppo, tmp_path, finished, capsys):
    run = finished(ppo, tmp_path)
    before, summary = hashes(run), json.loads((run / "summary.json").read_text())
    with on_call(ppo, "rollout", None, None) as rollouts:
        for resume in ("auto", str(run)):
            assert train(ppo, tmp_path, resume=resume, kl_coef=0.1) == summary
            assert "finished" in capsys.readouterr().out
        assert main(ppo, tmp_path, resume="auto", kl_coef=0.1) == 0
    assert not rollouts and hashes(run) == before
    assert main(ppo, tmp_path, resume="auto", kl_coef=0.1, num_iterations=6) == 0
    assert [row["iteration"] for row in lines(run)] == [0, 1, 2, 3, 4, 5]


def test_a_single_checkpoint_begins_a_new_run(ppo, tmp_path, finished):
    run = finished(ppo, tmp_path)
    before = hashes(run)
    path = run / "checkpoints" / "iter_000003"
    train(ppo, tmp_path, resume=str(path), run_name="new", kl_coef=0.1)
    assert hashes(run) == before and iterations(tmp_path / "new")[-1] == 4
    assert [row["iteration"] for row in lines(tmp_path / "new")] == [3]
    assert {line["step"] for line in lines(tmp_path / "new", "completions")} == {3}
    assert differences(record(run, after=3), record(tmp_path / "new")) == []
    with pytest.raises(ppo.UserError, match=r"--run-name.*new exists"):
        train(ppo, tmp_path, resume=str(path), run_name="new", kl_coef=0.1)
    damaged("actor/__0_0.distcp", lambda data: data[:-1])(path)
    with pytest.raises(ppo.UserError, match=r"--resume .*iter_000003: only damaged"):
        train(ppo, tmp_path, resume=str(path), run_name="newer", kl_coef=0.1)
    assert not (tmp_path / "newer").exists()


def test_resume_where_there_is_nothing_to_go_on_with(ppo, tmp_path, finished):
    finished(ppo, tmp_path)
    with pytest.raises(ppo.UserError, match=r"--run-name.*run exists.*--resume auto"):
        train(ppo, tmp_path, kl_coef=0.1)
    with pytest.raises(ppo.UserError, match="--resume auto: needs --run-name"):
        train(ppo, tmp_path, resume="auto", run_name=None)
    for missing in (tmp_path / "nowhere", tmp_path, tmp_path / "run" / "checkpoints" / "iter_000009"):
        with pytest.raises(ppo.UserError, match=f"--resume {re.escape(str(missing))}"):
            train(ppo, tmp_path, resume=str(missing), run_name="new")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_may_be_called_like_a_checkpoint(ppo, tmp_path):
    flags = dict(run_name="iter_all", resume="auto", num_iterations=2)
    stop(ppo, tmp_path, "compute_gae", 2, **flags)
    train(ppo, tmp_path, **flags)
    assert [row["iteration"] for row in lines(tmp_path / "iter_all")] == [0, 1]


# --- Signals ---


def send(signum):
    os.kill(os.getpid(), signum)


def check_stopped(run, iteration):
    """One checkpoint, after `iteration` iterations, and all else that an interrupted run leaves."""
    assert iterations(run) == [iteration] and row_count(run) == iteration
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "interrupted" and summary["iterations"] == iteration
    exported, saved = safetensors.torch.load_file(run / "model" / "model.safetensors"), tensors(newest(run))
    assert exported and all(torch.equal(x, saved[f"actor.weights.{name}"]) for name, x in exported.items())


SIGNALS = signal.SIGTERM, signal.SIGINT


@pytest.mark.both
@pytest.mark.parametrize(("turn", "signum"), [*zip([1, 4, 5, 30, 68, 70], SIGNALS * 3, strict=True)])
def test_a_signal_during_a_rollout_ends_the_run_at_once(ppo, tmp_path, monkeypatch, finished, turn, signum):
    """Also one of an evaluation. The environment does not come back: nobody waits for it."""
    flags, handlers = dict(save_every=50, kl_coef=0.1), [signal.getsignal(signum) for signum in SIGNALS]
    turns, original, timer = itertools.count(1), environments.TextEnv.turn, threading.Timer(0.2, lambda: send(signum))
    hang = lambda self, response: (timer.start(), time.sleep(100)) if next(turns) == turn else original(self, response)
    with monkeypatch.context() as patch:
        patch.setattr(environments.TextEnv, "turn", hang)
        started = time.monotonic()
        assert main(ppo, tmp_path, **flags) == {signal.SIGTERM: 143, signal.SIGINT: 130}[signum]
    assert time.monotonic() - started < 10
    assert handlers == [signal.getsignal(signum) for signum in SIGNALS]
    check_stopped(tmp_path / "run", max(0, turn - 5) // 16)  # 2 x 2 turns of an evaluation come first
    train(ppo, tmp_path, resume="auto", **flags)
    assert differences(record(finished(ppo, tmp_path / "whole")), record(tmp_path / "run")) == []


@pytest.mark.parametrize(("step", "signum"), [*zip([1, 7, 16, 32], SIGNALS * 2, strict=True)])
def test_a_signal_during_an_update_ends_the_run_after_the_iteration(ppo, tmp_path, capfd, finished, step, signum):
    flags = dict(save_every=50, kl_coef=0.1)
    with on_call(ppo.Learner, "step", step, lambda: (send(signum), send(signum))), pytest.raises(ppo.Interrupted):
        train(ppo, tmp_path, **flags)
    assert "stopping after this iteration" in capfd.readouterr().err
    check_stopped(tmp_path / "run", -(-step // STEPS))
    train(ppo, tmp_path, resume="auto", **flags)
    assert differences(record(finished(ppo, tmp_path / "whole")), record(tmp_path / "run")) == []


@pytest.mark.both
@pytest.mark.slow
def test_command_line_that_gets_a_signal_during_a_rollout(ppo, tmp_path):
    """The environment hangs in the third rollout; its seeds go on at 16, those of evaluations are 0 and 1."""
    flags = dict(env_id="test_checkpoints:Waits-v0", save_every=50, kl_coef=0.1)
    flags |= dict(env_kwargs=json.dumps({"first": 16, "gate": str(tmp_path / "gate")}))
    processes = [launch(ppo, tmp_path / str(signum), **flags) for signum in SIGNALS]
    for signum, process in zip(SIGNALS, processes, strict=True):
        until(lambda: row_count(tmp_path / str(signum) / "run") == 2, process)
        time.sleep(0.2)
        process.send_signal(signum)
        started = time.monotonic()
        output = finish(process, 128 + signum)
        assert time.monotonic() - started < 10 and f"--resume {tmp_path / str(signum) / 'run'}" in output
    (tmp_path / "gate").touch()
    train(ppo, tmp_path / "whole", **flags)
    for signum in SIGNALS:
        check_stopped(tmp_path / str(signum) / "run", 2)
        train(ppo, tmp_path / str(signum), resume="auto", **flags)
        assert differences(record(tmp_path / "whole" / "run"), record(tmp_path / str(signum) / "run")) == []


@pytest.mark.both
def test_an_error_of_the_environment_leaves_a_checkpoint(ppo, tmp_path, finished, capsys):
    flags = dict(save_every=50, kl_coef=0.1)
    stop(ppo, tmp_path, "rollout", 5, ppo.UserError("the judge is out of order"), **flags)  # 2 rollouts are evaluations
    assert iterations(tmp_path / "run") == [2] and f"--resume {tmp_path / 'run'}" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    train(ppo, tmp_path, resume="auto", **flags)
    assert differences(record(finished(ppo, tmp_path / "whole")), record(tmp_path / "run")) == []


# --- Saving that fails ---


class Tiny:
    """The Checkpoints of a run of three tiny models: after `set(i)` every number in them is i, then `save()`."""

    def __init__(self, ppo, folder):
        self.ppo, self.path, self.started, self.sizes = ppo, folder, 0.0, lambda: {"metrics": 0, "completions": 0}
        raw = dict(model_type="llama", vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
        self.config = ppo.ModelConfig.from_hf(raw | dict(num_attention_heads=2, max_position_embeddings=24))
        self.args, ranks = ppo.Args(**SMALL, kl_coef=0.1, resume=str(folder)), ppo.Ranks([0], torch.device("cpu"))
        ppo.validate(self.args)
        self.models = {}
        for name, head in dict(actor="lm", critic="scalar", reference="lm").items():
            model = ppo.Transformer(self.config, head)
            learner = ppo.Learner(model, 1e-3, 1.0, 10, self.args) if name != "reference" else None
            if learner:
                learner.restore({"steps": 1, "streak": 0, "has_moments": True})
            self.models[name] = (model, learner, ranks)
        counters = {name: {"steps": 1, "streak": 0, "has_moments": True} for name in ("actor", "critic")}
        self.now = types.SimpleNamespace(iteration=0, prompts=0, episodes=0, kl_coef=0.1, last_cause=None,
                                         eval_before=None, learners=counters)  # fmt: skip
        self.checkpoints = ppo.Checkpoints(self, ranks, self.args, self.config, self.now, self.models, lambda: None)

    def set(self, i):
        self.now.iteration = self.now.prompts = self.now.episodes = i
        for model, learner, _ in self.models.values():
            states = learner.optimizer.state.values() if learner else ()
            for x in (*(p.data for p in model.parameters()), *(x for state in states for x in state.values())):
                x.fill_(i)

    def save(self):
        self.checkpoints.save()

    def found(self):
        """Iteration of the checkpoint to go on from, all of whose numbers must be this one; 0 if there is none."""
        if not any((self.path / "checkpoints").glob("iter_*")):
            return 0
        resume = self.ppo.find_resume(self.args, self.config, self.ppo.Ranks([0], torch.device("cpu")))
        i = resume.state["iteration"]
        assert resume.checkpoint == newest(self.path) and resume.state["prompts"] == i
        numbers = tensors(resume.checkpoint)
        assert len(numbers) == 12 * 9 and all((x == i).all() for x in numbers.values())
        return i


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_save_that_fails_anywhere_leaves_the_earlier_checkpoint(ppo, tmp_path):
    tiny, ranks = Tiny(ppo, tmp_path), ppo.Ranks([0], torch.device("cpu"))
    for i in (1, 2):
        tiny.set(i)
        tiny.save()
    places = [(os, "fsync"), (ppo.dcp, "save"), (ppo, "write_synced"), (ppo, "digest"), (Path, "rename")]
    with contextlib.ExitStack() as stack:
        counts = [stack.enter_context(on_call(*place, None, None)) for place in places]
        tiny.set(3)
        tiny.save()  # and prune
    assert len(counts[0]) >= 9  # 3 x 2 files of DCP, 2 of ours, the folder
    for place, calls in zip(places, counts, strict=True):
        for number in calls:
            before = tiny.found()
            tiny.set(before + 1)
            with on_call(*place, number, full), pytest.raises(ppo.UserError) as error:
                tiny.save()
            message = str(error.value)
            assert f"iter_{before + 1:06d} cannot be written" in message and "No space left" in message
            assert "make room" in message and "--resume" in message
            ppo.verify_checkpoint(tmp_path / "checkpoints" / f"iter_{before:06d}", ranks)
            assert tiny.found() in (before, before + 1)  # what fails after the rename leaves the new one too
    tiny.set(last := tiny.found() + 1)
    tiny.save()
    assert iterations(tmp_path) == [last - 1, last] and not (tmp_path / "checkpoints" / "partial").exists()


def test_a_folder_that_cannot_be_written_ends_the_run(ppo, tmp_path, finished, capsys):
    folder, flags = tmp_path / "run" / "checkpoints", dict(kl_coef=0.1)
    block = lambda: (folder.rename(tmp_path / "moved"), folder.write_text("in the way"))
    with on_call(ppo, "compute_gae", 3, block):
        assert main(ppo, tmp_path, **flags) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {folder / 'iter_000003'} cannot be written: make room")
    folder.unlink()
    (tmp_path / "moved").rename(folder)
    assert iterations(tmp_path / "run") == [1, 2] and find(ppo, tmp_path / "run").checkpoint.name == "iter_000002"
    assert main(ppo, tmp_path, resume="auto", **flags) == 0
    assert differences(record(finished(ppo, tmp_path / "whole")), record(tmp_path / "run")) == []


@contextlib.contextmanager
def file_size_limit(size):
    """Longer writes fail, as on a full disk: Python ignores the signal that comes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_writes_that_fail_from_some_size_on_end_the_run(ppo, tmp_path, capsys):
    """The actor passes the limit when it gets its moments, after the critic's warm-up: its head is larger."""
    flags, run, sizes = dict(critic_warmup_iterations=2), tmp_path / "run", {}
    train(ppo, tmp_path / "whole", **flags)
    for model in ("actor", "critic"):
        sizes[model] = (newest(tmp_path / "whole" / "run") / model / "__0_0.distcp").stat().st_size
    assert sizes["actor"] > sizes["critic"]
    with file_size_limit(sizes["actor"] - 1):
        assert main(ppo, tmp_path, **flags) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"{run}/checkpoints/iter_000003 cannot be written: make room" in errors[0]
    assert iterations(run) == [1, 2] and find(ppo, run).checkpoint.name == "iter_000002"
    assert main(ppo, tmp_path, resume="auto", **flags) == 0
    assert differences(record(tmp_path / "whole" / "run"), record(run)) == []


def test_a_full_disk_is_told_although_the_summary_cannot_be_written_either(ppo, tmp_path, capsys, monkeypatch):
    write_text = Path.write_text
    refuse = lambda path, *rest, **kwargs: (full if path.name == "summary.json" else write_text)(path, *rest, **kwargs)
    with on_call(ppo.dcp, "save", 5, full), monkeypatch.context() as patch:  # of the third checkpoint
        patch.setattr(Path, "write_text", refuse)
        assert main(ppo, tmp_path) == 2
    assert "iter_000003 cannot be written: make room" in capsys.readouterr().err.splitlines()[-1]
    assert main(ppo, tmp_path, resume="auto") == 0


def kill_while_saving(ppo, folder, seconds):
    """kill -9 of a fork that saves again and again. Returns the checkpoint it knew of, and the one that is found."""
    tiny = Tiny(ppo, folder)
    start = tiny.found()
    read, write = os.pipe()  # a byte for each save that begins
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException), open(os.devnull, "w") as sys.stdout:
            for i in itertools.count(start + 1):
                os.write(write, b".")
                tiny.set(i)
                tiny.save()
        os._exit(1)
    os.close(write)
    os.read(read, 1)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    known = start + len(os.read(read, 2**16))
    os.close(read)
    return known, tiny.found()


def test_kill_while_saving_leaves_a_checkpoint(ppo, tmp_path):
    first, rng = Tiny(ppo, tmp_path), random.Random(0)
    first.set(1)
    first.save()
    found, within = 1, 0
    for _ in range(10):
        before, (known, found) = found, kill_while_saving(ppo, tmp_path, rng.uniform(0.001, 0.06))
        within += (tmp_path / "checkpoints" / "partial").exists()
        assert before <= known <= found <= known + 1
    assert within > 0, "no kill fell within a save"


# --- kill -9, torchrun ---


def stop_after(ppo, folder, rows, delay, **flags):
    """A run that is killed `delay` s after the log has `rows` rows."""
    process = launch(ppo, folder, **flags)
    until(lambda: row_count(folder / "run") >= rows, process)
    time.sleep(delay)
    assert process.poll() is None, "it has ended before it could be killed"
    kill(process)


@pytest.mark.both
@pytest.mark.slow
def test_kill_9_at_random_times_and_resume_are_the_same_run(ppo, tmp_path):
    flags = dict(num_iterations=12, kl_coef=0.1, kl_target=1e-3, kl_horizon=100, critic_warmup_iterations=2)
    rng = random.Random(0)
    train(ppo, tmp_path / "whole", **flags)
    for rows in (2, 4, 6):
        stop_after(ppo, tmp_path, rows, rng.uniform(0, 0.3), resume="auto", **flags)
    finish(launch(ppo, tmp_path, resume="auto", **flags))
    assert differences(record(tmp_path / "whole" / "run"), record(tmp_path / "run")) == []


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """two_ranks(ppo): a run of eight iterations on two ranks, its folder and flags."""
    runs = {}

    def get(ppo):
        flags = dict(num_iterations=8, kl_coef=0.1, kl_target=1e-3, kl_horizon=100, critic_warmup_iterations=1)
        flags |= dict(keep_checkpoints=8)
        if ppo.__name__ not in runs:
            runs[ppo.__name__] = tmp_path_factory.mktemp("two_ranks")
            finish(launch(ppo, runs[ppo.__name__], ranks=2, **flags))
        return runs[ppo.__name__] / "run", flags

    return get


@pytest.mark.both
@pytest.mark.slow
def test_two_ranks_killed_and_resumed_are_the_same_run(ppo, tmp_path, two_ranks):
    whole, flags = two_ranks(ppo)
    stop_after(ppo, tmp_path, 4, random.Random(0).uniform(0, 0.2), ranks=2, resume="auto", **flags)
    finish(launch(ppo, tmp_path, ranks=2, resume="auto", **flags))
    assert differences(record(whole), record(tmp_path / "run")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "changes"), [(0, {}), (2, {"critic_ranks": 1})], ids=["one process", "apart"])
def test_a_run_of_two_ranks_goes_on_with_another_placement(ppo, tmp_path, two_ranks, ranks, changes):
    whole, flags = two_ranks(ppo)
    flags = flags | dict(resume=str(whole / "checkpoints" / "iter_000003")) | changes
    finish(launch(ppo, tmp_path, ranks=ranks, **flags)) if ranks else train(ppo, tmp_path, **flags)
    check_close(whole, tmp_path / "run", after=3)


def check_close(whole, run, after=0):
    a, b = ({name: {k: v for k, v in x.items() if not k.startswith("rollout/")} if name.startswith("metrics") else x
             for name, x in record(folder, after).items()} for folder in (whole, run))  # fmt: skip
    assert a.keys() == b.keys()
    assert [name for name in a if not close(a[name], b[name])] == []


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_with_two_ranks(ppo, tmp_path, finished):
    whole = finished(ppo, tmp_path / "whole")
    stop(ppo, tmp_path, "compute_gae", 3, kl_coef=0.1)
    finish(launch(ppo, tmp_path, ranks=2, resume="auto", kl_coef=0.1))
    check_close(whole, tmp_path / "run")


@pytest.mark.slow
def test_sigterm_to_torchrun_leaves_a_checkpoint(ppo, tmp_path, two_ranks):
    """During a rollout that hangs, from which only a signal that ends it at once helps."""
    whole, flags = two_ranks(ppo)
    gate, run = tmp_path / "gate", tmp_path / "run"
    flags |= dict(env_id="test_checkpoints:Waits-v0", save_every=50)
    flags |= dict(env_kwargs=json.dumps({"first": 24, "gate": str(gate)}))
    process = launch(ppo, tmp_path, ranks=2, **flags)
    until(lambda: row_count(run) == 3, process)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode != 0
    check_stopped(run, 3)
    gate.touch()
    finish(launch(ppo, tmp_path, ranks=2, resume="auto", **flags))
    assert differences(record(whole), record(run)) == []


@pytest.mark.slow
def test_torchrun_restarts_a_job_whose_worker_was_killed(ppo, tmp_path, two_ranks):
    whole, flags = two_ranks(ppo)
    flags |= dict(save_every=2)  # the third iteration is logged, lost, and logged again
    run, process = tmp_path / "run", launch(ppo, tmp_path, ranks=2, restarts=1, resume="auto", **flags)
    until(lambda: iterations(run) and (run / "metrics.jsonl").read_bytes().count(b"\n") >= 3, process)
    command = lambda pid: Path(f"/proc/{pid}/cmdline").read_bytes()
    os.kill([pid for pid in descendants(process.pid) if b"--run-name=run" in command(pid)][-1], signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "going on from" in output, output
    assert [row["iteration"] for row in lines(run)] == list(range(8))
    assert differences(record(whole), record(run)) == []


def test_a_finished_run_without_checkpoints_is_not_begun_again(ppo, tmp_path):
    train(ppo, tmp_path, save_every=0)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    train(ppo, tmp_path, save_every=0, resume="auto")
    assert before and (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_may_be_kept_elsewhere(ppo, tmp_path):
    train(ppo, tmp_path, save_every=2, num_iterations=3)
    (tmp_path / "run/checkpoints/iter_000002").rename(tmp_path / "iter_000002")
    train(ppo, tmp_path, resume=str(tmp_path / "iter_000002"), run_name="other", num_iterations=4)
    assert [row["iteration"] for row in lines(tmp_path / "other")] == [2, 3]
