"""What goes wrong in the field: empty variables, lost terminals, disks, tokenizers, folders, and the code of others."""

import contextlib
import dataclasses
import errno
import gc
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from unittest import mock

import pytest
import safetensors.torch
import tokenizers
import torch
from environments import TextEnv, gym
from test_bad_input import refuse
from test_checkpoints import iterations, newest
from test_distributed import finish, flags_of, start
from test_model import CHATML, WEIGHTS, character_tokenizer, edit, random_model, write_tokenizer
from test_rollout import make_model
from test_train import SMALL, assert_same_metrics, on_call, record, without_clock
from test_transformers import VOCABULARY, hf_folder, load_theirs
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import ppo_llm_continuous_batching as continuous

pytestmark = pytest.mark.shared


# --- Signals, flags, plan


OTHER_SIGNALS = pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU],
                                         ids=lambda number: number.name)  # fmt: skip


@contextlib.contextmanager
def handled_by(number, handler):
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@OTHER_SIGNALS
def test_a_lost_terminal_or_a_scheduler_ends_the_run_after_the_iteration(ppo, tmp_path, capfd, number):
    """USR1: slurm's --signal, pytorch-lightning#1455; USR2: submitit#1701; XCPU: a limit of CPU time, every second."""

    def send(*_):
        assert signal.getsignal(number) != signal.SIG_DFL  # which would end this process
        for _ in range(3):
            os.kill(os.getpid(), number)

    with handled_by(number, signal.SIG_DFL), on_call(ppo, "policy_loss", 2, send):
        seen = record(ppo, tmp_path)
        assert signal.getsignal(number) == signal.SIG_DFL
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"
    assert (seen.code, len(seen.rows), iterations(tmp_path / "run")) == (128 + number, 1, [1])
    assert capfd.readouterr().err.count("stopping after this iteration") == 1


def fork_has(handlers):
    """Whether signals have these handlers in a process that is forked, and reach both processes."""
    blocked = lambda: handlers.keys() & signal.pthread_sigmask(signal.SIG_BLOCK, [])
    if not (child := os.fork()):
        os._exit(bool(blocked()) or any(signal.getsignal(number) != handler for number, handler in handlers.items()))
    return os.waitpid(child, 0)[1] == 0 and not blocked()


@OTHER_SIGNALS
@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None], ids=["ignored", "handled"])
def test_signals_that_nohup_or_user_code_has_set_are_left_alone(ppo, number, handler):
    """In processes that are forked as well."""
    stop = ppo.StopSignals()
    with handled_by(number, handler), stop.restore:
        stop.catch()
        assert signal.getsignal(number) == handler and signal.getsignal(signal.SIGTERM) == stop.receive
        assert fork_has({number: handler, signal.SIGTERM: signal.SIG_DFL})
    with handled_by(signal.SIGTERM, handler):
        assert fork_has({signal.SIGTERM: handler})  # The run has ended.


def test_a_flag_whose_variable_is_unset_is_refused(ppo, tmp_path):
    names = [field.name for field in dataclasses.fields(ppo.Args) if field.type in ("str", "str | None")]
    assert {"model", "critic_model", "reward_model", "resume", "run_name", "log_dir", "env_kwargs"} < set(names)
    for name in names:
        refuse(ppo, tmp_path, f"--{name.replace('_', '-')} is empty: is a variable", **{name: ""})


@pytest.mark.parametrize(("flags", "shown"), [
    (dict(), "actor built-in, with random weights, critic a copy of the actor\n  rewards    SortDigits-v0 {}\n"),
    (dict(model="A", critic_model="C", reward_model="R", env_kwargs='{"digits": 4}'),
     'models     actor A, critic C\n  rewards    SortDigits-v0 {"digits": 4} and R\n'),
    (dict(model="A", critic_epochs=0), "models     actor A\n"),
])  # fmt: skip
def test_the_plan_names_the_models_and_where_rewards_come_from(ppo, capsys, flags, shown):
    numbers = dict(critic_epochs=1, actor_lr=0.1, critic_lr=0.1)
    args = ppo.Args(**numbers | flags)
    ppo.print_plan(args, ppo.plan_steps(args), [], [])
    assert shown in capsys.readouterr().out


def test_flags_that_would_do_nothing_or_the_wrong_thing_are_refused(ppo, tmp_path):
    refuse(ppo, tmp_path, "--chat-template-kwargs: the actor has no chat template", chat_template_kwargs='{"a": 1}')
    folder = hf_folder(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    flags = dict(max_prompt_tokens=9, max_new_tokens=9, chat_template_kwargs="{bad")
    refuse(ppo, tmp_path, "--chat-template-kwargs: the actor has no chat template", model=str(folder), **flags)


def test_a_tilde_is_the_home_of_the_user(ppo, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert ppo.locate_model("~/model") == str(tmp_path / "model")
    assert ppo.fill_in_defaults(ppo.Args(log_dir="~/runs")).log_dir == str(tmp_path / "runs")
    assert ppo.fill_in_defaults(ppo.Args(resume="~/iter_000001")).resume == str(tmp_path / "iter_000001")


def test_a_checkpoint_is_found_although_user_code_changes_the_working_directory(ppo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ppo.fill_in_defaults(ppo.Args(resume="iter_000001"))
    monkeypatch.chdir("/")
    assert ppo.find_checkpoint(args) == tmp_path / "iter_000001"
    assert ppo.fill_in_defaults(ppo.Args(resume="auto", run_name="run")).resume == "auto"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_rank_without_a_world_is_refused(ppo, tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "0")
    refuse(ppo, tmp_path, "only one of the variables RANK and WORLD_SIZE is set: use torchrun")


def test_tasks_of_slurm_that_torchrun_has_not_started_are_refused(ppo, tmp_path, monkeypatch):
    """Each would be a run of its own."""
    monkeypatch.setenv("SLURM_PROCID", "3")
    for tasks in "", "1":
        monkeypatch.setenv("SLURM_NTASKS", tasks)
        ppo.connect(ppo.Args(device="cpu"))
    monkeypatch.setenv("SLURM_NTASKS", "8")
    refuse(ppo, tmp_path, "SLURM_NTASKS is 8, but RANK is not set: ", "Let srun start torchrun", "docs/slurm.md")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    ppo.connect(ppo.Args(device="cpu"))
    monkeypatch.undo()
    monkeypatch.setenv("SLURM_NTASKS", "8")  # in a shell of salloc, in which one process is started
    ppo.connect(ppo.Args(device="cpu"))


def test_ranks_that_cannot_meet_are_one_line_that_says_what_to_do(ppo, tmp_path):
    """As without MASTER_ADDR, or where another run has the port (lm-sys/FastChat#2713)."""
    in_use = mock.Mock(side_effect=ppo.dist.DistNetworkError("EADDRINUSE"))
    apart = mock.patch.multiple(ppo.dist, is_initialized=lambda: False, init_process_group=in_use)
    error = r"^cannot join the ranks \(use torchrun, with --standalone .* unset RANK and WORLD_SIZE\): .*EADDRINUSE$"
    with apart, pytest.raises(ppo.UserError, match=error):
        ppo.connect(ppo.Args(device="cpu"))


@pytest.mark.slow
def test_ranks_that_cannot_meet_end_the_process_with_one_line(ppo, tmp_path):
    alone = [f"{name}={number}" for name, number in (("RANK", 0), ("WORLD_SIZE", 1))]
    with socket.create_server(("localhost", 0)) as server:
        at_port = ["MASTER_ADDR=localhost", f"MASTER_PORT={server.getsockname()[1]}"]
        for variables, part in ([], "MASTER_ADDR expected"), (at_port, "EADDRINUSE"):
            command = ["env", *alone, *variables, sys.executable, ppo.__file__, *flags_of()]
            code, output = finish(start(command, tmp_path), timeout=120)
            last = output.splitlines()[-1]
            assert code == 2 and last.startswith("error: cannot join the ranks") and part in last, output
            assert "Traceback" not in output


@pytest.mark.parametrize(("device", "variable", "names"), [("cpu", "CXX", "g++"), ("cuda", "CC", "gcc or clang")])
def test_compilation_without_a_compiler_is_refused_before_models_are_loaded(ppo, monkeypatch, device, variable, names):
    compiles = lambda: ppo.configure_torch(ppo.Args(device=device, compile="on", model="A"))
    monkeypatch.setattr(torch, "_dynamo", mock.Mock(), raising=False)
    monkeypatch.setattr(torch, "_inductor", mock.Mock(), raising=False)
    monkeypatch.delenv(variable, raising=False)
    compiles()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ppo.UserError, match=f"--compile on: .* needs the compiler {re.escape(names)}, which"):
        compiles()
    monkeypatch.setenv(variable, sys.executable)
    compiles()
    monkeypatch.setenv(variable, "/nowhere/cc")
    with pytest.raises(ppo.UserError, match=r"compiler /nowhere/cc, which is not installed: .* or use --compile off"):
        compiles()


# --- The process of the user


def test_a_run_on_another_thread_leaves_the_handlers_of_signals_alone(ppo, tmp_path):
    handlers = lambda: [signal.getsignal(number) for number in ppo.SIGNALS]
    before, seen = handlers(), []
    with on_call(ppo, "rollout", 1, lambda *_: seen.append(handlers())), ThreadPoolExecutor(1) as threads:
        run = threads.submit(record, ppo, tmp_path).result()
    assert run.summary["status"] == "completed" and seen == [before]


class Doubles(TextEnv):
    """Makes float64 the default in `where` it is called, as an import or a computation may do."""

    def __init__(self, where="constructor"):
        self.where = where
        self.called("constructor")

    def called(self, where):
        if where == self.where:
            torch.set_default_dtype(torch.float64)

    def reset(self, **kwargs):
        self.called("reset")
        return super().reset(**kwargs)

    def turn(self, response):
        self.called("step")
        return super().turn(response)


gym.register("Doubles-v0", entry_point=Doubles)


def test_another_default_dtype_changes_nothing(ppo, tmp_path):
    model = record(ppo, tmp_path / "model", num_iterations=1).folder / "model"
    flags = dict(model=str(model), max_prompt_tokens=16, actor_lr=1e-3, sft_steps=1)
    runs = [record(ppo, tmp_path / "plain", env_id="environments:Plain-v0", **flags)]
    for where in "constructor", "reset", "step":
        kwargs = json.dumps({"where": where})
        runs.append(record(ppo, tmp_path / where, env_id="test_field:Doubles-v0", env_kwargs=kwargs, **flags))
    torch.set_default_dtype(torch.float64)
    try:
        runs.append(record(ppo, tmp_path / "of the caller", **flags))
    finally:
        torch.set_default_dtype(torch.float32)
    first, *others = (without_clock(run.rows) for run in runs)
    assert others == 4 * [first]


def test_another_default_dtype_while_rows_decode_changes_nothing(tmp_path):
    """In the second script rewards are computed at the same time."""
    runs = []
    for name, dtype in ("single", torch.float32), ("double", torch.float64):
        decode, prefill = continuous.Slots.decode, continuous.Slots.prefill
        before = lambda method, dtype=dtype: lambda *args: torch.set_default_dtype(dtype) or method(*args)
        with mock.patch.multiple(continuous.Slots, decode=before(decode), prefill=before(prefill)):
            runs.append(record(continuous, tmp_path / name, recompute_old_logprobs=False))
    assert_same_metrics(runs[0].rows, runs[1].rows)


# --- Environments


class Closes:
    """Takes 0.3 seconds to close, and may fail then."""

    def __init__(self, closed, error=None):
        self.closed, self.error = closed, error

    def close(self):
        time.sleep(0.3)
        self.closed.append(self)
        if self.error:
            raise self.error


def closed_at_the_end(ppo, end, failing=(), count=8):
    """How many of the environments are closed. `end` ends the run."""
    closed = []
    envs = [Closes(closed, OSError(f"number {i}") if i in failing else None) for i in range(count)]
    with mock.patch.object(ppo.gym, "make", side_effect=envs):
        try:
            with ppo.make_envs(ppo.Args(rollout_batch_size=count)):
                end()
        finally:
            closed_at_the_end.count = len(set(closed))


def test_all_environments_are_closed_side_by_side_and_the_first_error_is_shown(ppo):
    began = time.monotonic()
    with pytest.raises(ppo.CodeError, match="cannot close the environments: OSError: number 3"):
        closed_at_the_end(ppo, lambda: None, failing=[3])
    assert closed_at_the_end.count == 8 and time.monotonic() - began < 1


def test_an_error_in_closing_does_not_hide_that_of_the_run(ppo):
    with pytest.raises(KeyError, match="of the run"):
        closed_at_the_end(ppo, mock.Mock(side_effect=KeyError("of the run")), failing=range(8))
    assert closed_at_the_end.count == 8


def test_environments_are_closed_although_all_their_turns_hang(ppo):
    judge, began = threading.Event(), time.monotonic()
    ppo.env_threads(3).map_async(lambda _: judge.wait(5), range(3), chunksize=1)
    closed_at_the_end(ppo, lambda: None, count=3)
    assert time.monotonic() - began < 2
    judge.set()


def test_the_threads_that_close_environments_end_and_so_do_their_pipes(ppo):
    """A process may train many times. A pool that is forgotten, not closed, warns of it."""
    open_now = lambda: (threading.active_count(), len(os.listdir("/dev/fd")))
    before, began = open_now(), time.monotonic()
    more = lambda: any(now > then for now, then in zip(open_now(), before))
    with warnings.catch_warnings(action="error"), mock.patch.object(sys, "unraisablehook") as forgotten:
        ppo.close_envs([Closes([]) for _ in range(8)])
        while more() and time.monotonic() - began < 10:
            gc.collect()
            time.sleep(0.02)
    assert not more() and not forgotten.called


class Judged(TextEnv):
    """Each turn waits for a judge, which the test sets."""

    judge = asked = None

    def turn(self, response):
        self.asked.append(self.seed)
        return self.judge(super().turn(response))


gym.register("Judged-v0", entry_point=Judged)


@pytest.mark.both
def test_a_run_after_one_whose_turns_hang_has_threads_of_its_own(ppo, tmp_path, monkeypatch):
    """And turns that wait for a thread when a run fails are not played later."""
    flags, forever = dict(env_id="test_field:Judged-v0", num_iterations=1, eval_episodes=0), threading.Event()
    monkeypatch.setattr(ppo, "ENV_TIMEOUT", 0.5)
    monkeypatch.setattr(Judged, "asked", [])
    monkeypatch.setattr(Judged, "judge", lambda _, answer: forever.wait(20) and answer)
    two_threads = mock.patch.object(ppo, "ThreadPool", lambda count, *setup: ThreadPool(2, *setup))
    with two_threads:
        refuse(ppo, tmp_path, "in 0.5 seconds", begun=True, **flags)
    asked = len(Judged.asked)
    forever.set()
    time.sleep(0.2)
    assert asked == len(Judged.asked) == 2
    monkeypatch.setattr(Judged, "judge", lambda _, answer: answer)
    forever.clear()
    assert record(ppo, tmp_path, **flags, run_name="next").summary["status"] == "completed"


@pytest.mark.slow
def test_a_process_that_plays_turns_without_train_ends_in_silence(ppo):
    """Python, when it has torn down its modules, cannot end threads any more, and prints an ignored error."""
    code = f"import {ppo.__name__} as ppo; ppo.env_threads(2)"
    folder = os.path.dirname(ppo.__file__)
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


BARRIER = threading.Barrier(12)


class Together(TextEnv):
    def turn(self, response):
        BARRIER.wait(20)
        return super().turn(response)


gym.register("Together-v0", entry_point=Together)


@pytest.mark.both
def test_all_environments_answer_at_the_same_time(ppo, tmp_path):
    flags = dict(env_id="test_field:Together-v0", rollout_batch_size=12, num_iterations=1, eval_episodes=0)
    assert record(ppo, tmp_path, **flags).summary["status"] == "completed"


@pytest.mark.parametrize(("count", "threads"), [(1, 1), (40, 40), (999, 256)])
def test_there_are_as_many_threads_as_environments_up_to_256(ppo, count, threads):
    with mock.patch.object(ppo, "ThreadPool") as pool:
        ppo.env_threads.__wrapped__(count)
    assert pool.call_args.args[0] == threads


def test_a_limit_of_threads_is_an_error_that_says_what_to_do(ppo):
    """ThreadPool hides the RuntimeError of the fourth thread."""
    starts = [mock.DEFAULT] * 3 + [RuntimeError("can't start new thread")] * 99
    limit = mock.patch.object(threading.Thread, "start", side_effect=starts)
    error = "cannot start 8 threads for environments: see ulimit -u, or --rollout-slots: "
    with limit, pytest.raises(ppo.UserError, match=error):
        ppo.env_threads.__wrapped__(8)


@pytest.mark.parametrize("error", [errno.ENOENT, errno.EACCES, errno.EROFS, errno.ENOSYS, errno.ENOSPC])
def test_a_container_without_shared_memory_is_an_error_that_names_it(ppo, error):
    """ThreadPool has semaphores (actionless/pikaur#567)."""
    no_semaphores = mock.patch("_multiprocessing.SemLock", side_effect=OSError(error, os.strerror(error)))
    message = f"^cannot make the semaphores of a ThreadPool, which are files in /dev/shm: .*{os.strerror(error)}$"
    with no_semaphores, pytest.raises(ppo.UserError, match=message):
        ppo.env_threads.__wrapped__(8)


def test_the_making_of_environments_shows_its_progress(ppo):
    bar = mock.Mock(side_effect=lambda rows, name: rows)
    with mock.patch.object(ppo, "progress_bar", bar), ppo.make_envs(ppo.Args(rollout_batch_size=5)):
        assert bar.call_args_list == [mock.call(range(5), "environments")]


@pytest.mark.parametrize("result", [{"prompt": "ab="}, "ab", ("ab=", {}, 1), None], ids=str)
def test_a_reset_that_returns_no_pair_is_an_error_that_names_the_tuple(ppo, tmp_path, result):
    with mock.patch("environments.TextEnv.reset", lambda self, *, seed=None, options=None: result):
        refuse(ppo, tmp_path, f"reset must return a tuple (prompt, info), not {result!r}")


@pytest.mark.parametrize(("terminated", "truncated", "success"), [
    ("False", False, True), (None, False, True), (True, math.nan, True), (True, False, "False"), (True, False, 0.5),
])  # fmt: skip
def test_what_is_no_bool_is_refused(ppo, terminated, truncated, success):
    env = types.SimpleNamespace(step=lambda _: ("", 1.0, terminated, truncated, {"success": success}))
    flags = re.escape(repr((terminated, truncated, success)))
    with pytest.raises(ValueError, match=f"terminated, truncated and success must be True or False, not {flags}"):
        ppo.checked_step(env, "a")


def test_numbers_are_found_in_the_latex_of_models(ppo):
    numbers = {r"\boxed{8{,}000}": 8000, r"\boxed{8,\!000}": 8000, r"\boxed{8\,000\,000}": 8e6, r"\boxed{\text{5}}": 5,
               r"\boxed{\mathrm{ 7}}": 7, r"\boxed{\textbf{6}}": 6, r"\boxed{12\text{ km}}": 12, r"\boxed{9~m^2}": 9,
               r"\boxed{40\%}": 40, r"\boxed{3\ \mathrm{h}}": 3, r"\boxed{\$8,000.50}": 8000.5, "#### 8 apples": 8,
               r"\boxed{-8{,}000}": -8000, r"\boxed{\text{-5}}": -5, r"\boxed{-\$5}": -5, r"\boxed{5/6}": None,
               r"\boxed{5\,/\,6}": None, r"\boxed{\frac{5}{6}}": None, r"\boxed{\text{none}}": None}  # fmt: skip
    assert {text: ppo.parse_number(text) for text in numbers} == numbers


# --- Disks


def save(ppo, folder, seen_by_the_other):
    """A checkpoint of two ranks. The other one sees one after another of these lists, or with True what this one sees.

    Returns how often they looked again."""
    others = iter(seen_by_the_other)

    def gather(of_ranks, mine):
        other = next(others)
        of_ranks[:] = [mine, mine if other is True else other]

    with mock.patch.object(ppo.dist, "all_gather_object", gather), mock.patch.object(ppo.time, "sleep") as sleep:
        ppo.save_checkpoint(folder, {"actor": (make_model(ppo, 9), None)}, ppo.TrainState(), ppo.Args())
    return sleep.call_count


def test_disks_that_ranks_do_not_share_are_an_error_and_leave_no_checkpoint(ppo, tmp_path):
    """As where each node has a disk of its own."""
    for other in [], ["shard-00002-model-00001-of-00001.safetensors"]:
        with pytest.raises(ppo.UserError, match=r"the ranks see different files in .*: do all nodes share"):
            save(ppo, tmp_path, 30 * [other])
        assert iterations(tmp_path) == []


def test_a_listing_that_lags_behind_is_waited_for(ppo, tmp_path):
    assert save(ppo, tmp_path, [[], [], True]) == 2
    assert iterations(tmp_path) == [0] and ppo.is_complete(newest(tmp_path))


LOCK = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB); print(1)"


def lock_in_another_process(path, wait="sys.stdin.read()"):
    command = [sys.executable, "-c", f"{LOCK}; sys.stdout.flush(); {wait}", str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def test_a_folder_in_which_another_process_runs_is_refused_until_that_is_gone(ppo, tmp_path):
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    with lock_in_another_process(run / "lock") as other:
        assert other.stdout.readline() == b"1\n"
        refuse(ppo, tmp_path, f"another process runs in {run}: choose another --run-name", begun=True, resume="auto")
        assert [path.name for path in run.iterdir()] == ["lock"]
        other.kill()
    assert record(ppo, tmp_path / "runs", resume="auto").summary["status"] == "completed"


@pytest.fixture
def locked(ppo, tmp_path):
    """The end of a run that has locked tmp_path/run, and whether another process may lock it now."""
    end = contextlib.ExitStack()
    with end, mock.patch.object(ppo, "SummaryWriter"):
        ppo.Run(ppo.Args(log_dir=str(tmp_path), run_name="run"), ppo.TrainState(), None, end)
        yield end, lambda: lock_in_another_process(tmp_path / "run" / "lock", wait="pass").communicate()[0] == b"1\n"


def test_a_run_locks_its_folder_and_what_a_reward_function_forks_does_not_keep_the_lock(locked):
    end, may_lock = locked
    forked, wrote = os.pipe()
    if not (child := os.fork()):
        os.write(wrote, b"1")
        time.sleep(100)
        os._exit(0)
    assert os.read(forked, 1) == b"1"  # What a child does after a fork is done.
    assert not may_lock()
    end.close()
    assert may_lock()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_run_whose_folder_its_own_process_copies_keeps_the_lock(locked, tmp_path):
    """As a reward function may do (r-lib/fslock#6, haskell/unix#44)."""
    shutil.copytree(tmp_path / "run", tmp_path / "backup")
    assert not locked[1]()


def test_a_disk_without_locks_will_do(ppo, tmp_path):
    with mock.patch.object(ppo.fcntl, "flock", side_effect=OSError(errno.ENOLCK, "No locks available")):
        assert record(ppo, tmp_path).summary["status"] == "completed"


def test_tensors_of_a_checkpoint_that_nothing_asks_for_are_mentioned(ppo, tmp_path, capsys):
    """As moments that an optimizer of a fork does not have at the beginning."""
    models = {"actor": (make_model(ppo, 9), None), "critic": (make_model(ppo, 9, head="scalar"), None)}
    ppo.save_checkpoint(tmp_path, models, ppo.TrainState(), ppo.Args())
    count = len(ppo.checkpoint_tensors({"critic": models.pop("critic")}))
    ppo.load_checkpoint(newest(tmp_path), models, ppo.Args())
    unused = f"  {count} of its tensors are not used, for example critic.model.embed_tokens.weight\n"
    assert unused in capsys.readouterr().out


# --- Tokenizers


def turns_end_with(end):
    before, _, after = CHATML.partition("'<|im_end|>' + '\n'")
    return before + end + after


TURNS_END_WITH_EOT = turns_end_with("'<|eot|>' + '\n'")


@pytest.mark.parametrize(("template", "stop_ids"), [
    (TURNS_END_WITH_EOT, [2, 3]), (turns_end_with("'<|im_end|>'"), [2]),
    (turns_end_with("''"), [2]), (turns_end_with("'\n'"), [2]), (turns_end_with("' <|eot|>'"), [2, 3]),
    (turns_end_with("'</turn>'"), [2]),  # a token, but not a special one
    ("<|eot|>{{ messages[0].content }}", [2]), ("{{ raise_exception('no') }}", [2]), (None, [2]),
])  # fmt: skip
def test_the_special_token_that_ends_a_turn_is_a_stop_token_here_and_in_exports(ppo, tmp_path, template, stop_ids):
    """As where a base model has the template of a chat model."""
    file = character_tokenizer()
    file.add_tokens(["</turn>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=file, eos_token="<|im_end|>", chat_template=template)
    tokenizer = ppo.HFTokenizer("none", fast)
    assert tokenizer.stop_ids == stop_ids and tokenizer.eos_id == 2
    assert tokenizer.end_of_turn_id == stop_ids[-1]
    ppo.save_hf_checkpoint(random_model(ppo), tokenizer, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["eos_token_id"] == stop_ids
    if template == TURNS_END_WITH_EOT:
        feedback = "\n<|im_start|>user\na<|eot|>\n<|im_start|>assistant\n"
        assert tokenizer.hf.decode(tokenizer.encode_feedback("a", 3)) == feedback
        assert tokenizer.hf.decode(tokenizer.encode_feedback("a", 2)) == "<|eot|>" + feedback


WORDS = "hello you two, who said hello to you: the thing is so so good\nis it 1 or 22".split(" ")


def trained_tokenizer(ppo, kind):
    """Of bytes with trimmed offsets, as Llama 3 has them, or of SentencePiece with a scheme of spaces."""
    bpe, pre = tokenizers.Tokenizer(tokenizers.models.BPE()), tokenizers.pre_tokenizers
    if kind == "bytes":
        bpe.pre_tokenizer, alphabet = pre.ByteLevel(add_prefix_space=False), pre.ByteLevel.alphabet()
        bpe.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
        bpe.decoder = tokenizers.decoders.ByteLevel()
    else:
        bpe.pre_tokenizer, alphabet = pre.Metaspace(prepend_scheme=kind), sorted({*"".join(WORDS), "▁"})
        bpe.decoder = tokenizers.decoders.Metaspace(prepend_scheme=kind)
    settings = dict(vocab_size=320, special_tokens=["<eos>"], initial_alphabet=alphabet)
    bpe.train_from_iterator([" ".join(WORDS)] * 3, tokenizers.trainers.BpeTrainer(**settings))
    return ppo.HFTokenizer("none", PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>"))


@pytest.mark.parametrize("kind", ["bytes", "first", "always", "never"])
def test_a_prompt_that_ends_in_a_space_gets_no_second_one(ppo, kind):
    tokenizer = trained_tokenizer(ppo, kind)
    prompt = tokenizer.encode("who said hello ")
    answer = tokenizer.encode("you two", context="who said hello ")
    assert tokenizer.decode([*prompt, *answer]) == "who said hello you two" and tokenizer.decode(answer) == "you two"


@pytest.mark.parametrize("kind", ["bytes", "first", "always", "never"])
def test_without_a_token_that_spans_both_texts_the_ids_are_those_of_the_whole(ppo, kind):
    tokenizer, draw, whole_words = trained_tokenizer(ppo, kind), random.Random(0), 0
    for _ in range(200):
        text = " ".join(draw.choices(WORDS, k=6))
        cut = draw.randrange(1, len(text))
        encoding = tokenizer.backend.encode(text, add_special_tokens=False)
        offsets = list(zip(encoding.ids, encoding.offsets))
        starts = [a - (kind == "bytes" and text[a - 1 : a] == " ") for _, (a, _) in offsets]  # with the space
        if cut in starts:
            whole_words += 1
            assert tokenizer.encode(text[cut:], text[:cut]) == [i for (i, _), a in zip(offsets, starts) if a >= cut]
    assert whole_words > 40


def test_exports_have_the_special_tokens_of_the_tokenizer_also_where_they_are_exported_again(ppo, tmp_path):
    """Transformers 4 can read neither a list of extra_special_tokens nor the class TokenizersBackend."""
    folder, kinds = hf_folder(tmp_path / "in"), (AutoTokenizer, PreTrainedTokenizerFast)
    expected = [kind.from_pretrained(folder).all_special_tokens for kind in kinds]
    for i in range(2):
        ppo.save_hf_checkpoint(ppo.load_hf_checkpoint(folder)[0], ppo.HFTokenizer(folder), tmp_path / f"{i}")
        folder = tmp_path / f"{i}"
        content = json.loads((folder / "tokenizer_config.json").read_text())
        assert content["additional_special_tokens"] == ["<|im_start|>"] and "extra_special_tokens" not in content
        assert content["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert [kind.from_pretrained(folder).all_special_tokens for kind in kinds] == expected


# --- Folders of models

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"


@pytest.mark.parametrize(("name", "content", "error"), [
    *[(name, POINTER, f"{name} is a pointer of Git LFS, not the file: run `git lfs pull`")
      for name in ("tokenizer.json", "config.json", WEIGHTS, "tokenizer_config.json")],
    *[(name, "", f"{name} is empty: download it again, or remove it") for name in ("generation_config.json", WEIGHTS)],
    (WEIGHTS, None, r"there are none. If the weights are in \*.bin files, load them with AutoModel"),
])  # fmt: skip
def test_what_stands_in_place_of_a_file_is_named_with_what_to_do(ppo, tmp_path, name, content, error):
    folder = hf_folder(tmp_path / "model")
    (folder / "consolidated.safetensors").write_text(POINTER)  # Nothing reads it.
    if content is None:
        (folder / "consolidated.safetensors").unlink()
        (folder / name).rename(folder / "pytorch_model.bin")
    else:
        (folder / name).write_text(content)
    flags = SMALL | dict(model=str(folder), max_prompt_tokens=9, max_new_tokens=9, log_dir=str(tmp_path / "runs"))
    with pytest.raises(ppo.UserError, match=error):
        ppo.train(ppo.Args(**flags))


def test_a_head_that_is_not_the_tied_embedding_is_refused(ppo, tmp_path):
    model, tokens = random_model(ppo, tie_word_embeddings=True), torch.arange(9)[None]
    ppo.save_hf_checkpoint(model, ppo.HFTokenizer(write_tokenizer(tmp_path)), tmp_path)
    edit(tmp_path, "lm_head.weight", model.model.embed_tokens.weight.detach().clone())
    assert torch.equal(ppo.load_hf_checkpoint(tmp_path)[0](tokens), model(tokens))
    edit(tmp_path, "lm_head.weight", torch.randn_like(model.lm_head.weight))
    with pytest.raises(ppo.UserError, match=r"lm_head\.weight differs from the embedding, .*: set tie_word_embeddings"):
        ppo.load_hf_checkpoint(tmp_path)
    ppo.load_weights(random_model(ppo, "scalar"), str(tmp_path), needs_head=False)  # a critic has another head


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_weights_are_read_from_the_files_that_transformers_reads(ppo, tmp_path, head):
    """model.safetensors or, without it, those that the index names."""
    model, tokens = random_model(ppo, head), torch.arange(9)[None]
    ppo.save_hf_checkpoint(model, ppo.HFTokenizer(write_tokenizer(tmp_path)), tmp_path)
    state = safetensors.torch.load_file(tmp_path / WEIGHTS)
    zeros = {name: torch.zeros_like(x) for name, x in state.items()}
    for name in ("a", "consolidated", "model.fp16", "model-00001-of-00001"):
        safetensors.torch.save_file(zeros, tmp_path / f"{name}.safetensors")
    safetensors.torch.save_file({"lora_A": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    index = {"weight_map": dict.fromkeys(state, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(ppo.load_hf_checkpoint(tmp_path, head)[0](tokens), model(tokens))
    (tmp_path / WEIGHTS).unlink()
    assert ppo.load_hf_checkpoint(tmp_path, head)[0](tokens).abs().max() == 0
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ppo.UserError, match=r"model-00001-of-00001\.safetensors"):
        ppo.load_hf_checkpoint(tmp_path, head)


@torch.no_grad()
def test_a_configuration_may_name_biases_that_its_models_do_not_have(ppo, tmp_path):
    """Transformers gives Qwen2 the same biases in any case."""
    folder = hf_folder(tmp_path, "qwen2, tied", attention_bias=True, mlp_bias=True)
    tokens = torch.randint(3, VOCABULARY, (2, 30))
    ours, theirs = ppo.load_hf_checkpoint(folder)[0], load_theirs(folder)[0]
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
