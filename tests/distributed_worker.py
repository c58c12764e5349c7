"""What the tests start as processes of their own: `[torchrun] distributed_worker.py SCRIPT FOLDER`.

FOLDER/plan.json lists [name, flags, fault]: runs in one process group, one after the other. Each rank leaves what it
has seen in <name>.<rank>.json. `run` can also be called, for a run in the process of the tests.
"""

import functools
import importlib
import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter


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
    make_experience, play, reduce = ppo.make_experience, ppo.play, DefaultReduceScatter.__call__

    def models_seen(**models):
        for key, model in models.items():
            p = model.model.norm.weight if model else None
            seen["models"][key] = [type(p).__name__, str(getattr(p, "dtype", None))]

    def experience_seen(episodes, actor, critic, reference, *rest):
        models_seen(actor=actor, critic=critic, reference=reference)
        return make_experience(episodes, actor, critic, reference, *rest)

    def episodes_seen(decoder, *args):
        models_seen(sampler=decoder and decoder.sampler)
        episodes = play(decoder, *args)
        seen["episodes"] += [[e.seed, e.ids, e.mask, e.stop] for e in episodes]
        return episodes

    def reduction_seen(*args, **kwargs):
        seen["reduced"] = sorted({*seen["reduced"], str(kwargs["input_tensor"].dtype)})
        return reduce(*args, **kwargs)

    patches = [
        mock.patch.multiple(ppo, SummaryWriter=mock.DEFAULT, SFT_BATCH_SIZE=16),
        mock.patch.multiple(ppo, make_experience=experience_seen, play=episodes_seen),
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


if __name__ == "__main__":
    script, folder = Path(sys.argv[1]), Path(sys.argv[2])
    sys.path.insert(0, str(script.parent))
    ppo = importlib.import_module(script.stem)
    for name, flags, fault in json.loads((folder / "plan.json").read_text()):
        (folder / f"{name}.{ppo.RANK}.json").write_text(json.dumps(run(ppo, folder, name, flags, fault)))
    dist.destroy_process_group()
