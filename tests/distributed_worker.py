"""Runs that the tests watch: `run` in their process, `run_on_ranks` in processes of their own, as torchrun has them."""

import functools
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.multiprocessing import start_processes

# Ranks are forks of a process that has imported the libraries already.
multiprocessing.set_forkserver_preload(["ppo_llm", "distributed_worker"])


def on_call(owner, name, number, action):
    """Do `action(*arguments)` before call `number`, from 1, of owner.<name>."""
    original, calls = getattr(owner, name), []

    def wrapper(*args, **kwargs):
        calls.append(name)
        if len(calls) == number:
            action(*args)
        return original(*args, **kwargs)

    return mock.patch.object(owner, name, functools.wraps(original)(wrapper))


def spoil(model, *_):
    model.model.norm.weight.grad.to_local()[0] = torch.nan


def run(ppo, folder, name, flags, fault=None):
    """Train in folder/name. `fault`: {"nan": rank} spoils a gradient; {"signal": rank} comes in the second iteration;
    {"kill": [function, number]} is kill -9 before this call of the function."""
    seen, fault = {"models": {}, "reduced": [], "episodes": [], "code": 0}, fault or {}
    send = lambda signum: lambda *_: os.kill(os.getpid(), signum)
    make_experience, rollout, reduce = ppo.make_experience, ppo.rollout, DefaultReduceScatter.__call__

    def models_seen(**models):
        for key, model in models.items():
            p = model.model.norm.weight if model else None
            seen["models"][key] = [type(p).__name__, str(getattr(p, "dtype", None))]

    def experience_seen(episodes, actor, critic, reference, *rest):
        models_seen(actor=actor, critic=critic, reference=reference)
        return make_experience(episodes, actor, critic, reference, *rest)

    def episodes_seen(decoder, *args):
        models_seen(sampler=decoder and decoder.sampler)
        episodes = rollout(decoder, *args)
        seen["episodes"] += [[e.env_seed, e.ids, e.mask, e.stop] for e in episodes]
        return episodes

    def reduction_seen(*args, **kwargs):
        seen["reduced"] = sorted({*seen["reduced"], str(kwargs["input_tensor"].dtype)})
        return reduce(*args, **kwargs)

    patches = [
        mock.patch.multiple(ppo, SummaryWriter=mock.DEFAULT, SFT_BATCH_SIZE=16),
        mock.patch.multiple(ppo, make_experience=experience_seen, rollout=episodes_seen),
        mock.patch.object(DefaultReduceScatter, "__call__", reduction_seen),
        # With AdamW's 1e-8, a gradient that is zero but for rounding becomes a first step of up to the learning rate.
        mock.patch.object(torch.optim, "AdamW", functools.partial(torch.optim.AdamW, eps=1e-6)),
    ]
    if fault.get("nan") == ppo.RANK:
        patches.append(on_call(ppo, "optimizer_step", 1, spoil))
    if fault.get("signal") == ppo.RANK:
        patches.append(on_call(ppo, "make_experience", 2, send(signal.SIGTERM)))
    if "kill" in fault:
        patches.append(on_call(ppo, *fault["kill"], send(signal.SIGKILL)))
    with ExitStack() as stack:
        [stack.enter_context(patch) for patch in patches]
        try:
            ppo.train(ppo.Args(**(dict(log_dir=str(folder), run_name=name) | flags)))
        except SystemExit as end:
            seen["code"] = end.code
    return seen


def on_rank(rank, ranks, port, script, folder, plan):
    """The runs of a plan, in one process group. Leaves what this rank has seen of a run in <name>.<rank>.json."""
    ranks_of_torchrun = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, MASTER_ADDR="localhost", MASTER_PORT=port)
    os.environ |= {name: str(x) for name, x in ranks_of_torchrun.items()}
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.path.insert(0, str(script.parent))
    sys.modules.pop("ppo_llm", None)  # it was imported before there was a rank
    ppo = importlib.import_module(script.stem)
    for name, flags, fault in plan:
        (folder / f"{name}.{rank}.json").write_text(json.dumps(run(ppo, folder, name, flags, fault)))
    dist.destroy_process_group()


def run_on_ranks(ppo, folder, ranks, *plan):
    """Do [name, flags, fault] one after the other. An error of a rank is raised here, and the others are ended."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]  # a free one
    args = ranks, port, Path(ppo.__file__), folder, plan
    processes = start_processes(on_rank, args, ranks, join=False, start_method="forkserver")
    if not any(processes.join(timeout=60) for _ in range(ranks)):  # each call waits for one more to end
        for process in processes.processes:
            process.kill()
        pytest.fail("hangs")
