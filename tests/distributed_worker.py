"""What test_distributed.py starts on every rank: `torchrun distributed_worker.py SCRIPT FOLDER`.

FOLDER/plan.json lists [name, flags, fault]: runs in one process group, one after the other. Each rank leaves what it
has seen in <name>.<rank>.json. `run` works in a single process, too, without torchrun.
"""

import contextlib
import functools
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

RANK = int(os.environ.get("RANK", 0))


def run(ppo, folder, name, flags, fault=None):
    """Train in folder/name. `fault`: {"nan": rank}: a gradient of its; {"signal": rank}: SIGTERM in its 2nd rollout."""
    seen = {"models": {}, "steps": 0, "backwards": 0, "empty": 0, "rollouts": 0, "code": 0, "dtypes": set()}
    fault = fault or {}

    def build_models(original, *args, **kwargs):
        tokenizer, models = original(*args, **kwargs)
        for key, model in zip(("actor", "critic", "reference", "sampler"), models, strict=True):
            if model:
                p = model.model.norm.weight
                seen["models"][key] = [type(p).__name__, str(p.dtype)]
        return tokenizer, models

    def clip_grad_norm(original, parameters, *args, **kwargs):
        parameters = list(parameters)
        seen["steps"] += 1
        seen["dtypes"].update(f"gradient {p.grad.dtype}" for p in parameters)
        if fault.get("nan") == RANK and seen["steps"] == 2:
            gradient = parameters[5].grad
            getattr(gradient, "to_local", lambda: gradient)().view(-1)[0] = torch.nan
        return original(parameters, *args, **kwargs)

    def rollout(original, actor, tokenizer, envs, seeds, sample_ids, iteration, args, greedy=False):
        seen["rollouts"] += iteration >= 0  # not those of evaluations
        if fault.get("signal") == RANK and iteration == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(actor, tokenizer, envs, seeds, sample_ids, iteration, args, greedy)

    def backward(original, *args, **kwargs):
        seen["backwards"] += 1
        return original(*args, **kwargs)

    def microbatches(original, *args):
        parts = original(*args)
        seen["empty"] += sum(len(part) == 0 for part in parts)
        return parts

    def reduce_scatter(original, *args, **kwargs):
        seen["dtypes"].update(f"reduced {x.dtype}" for x in kwargs.values() if isinstance(x, torch.Tensor))
        return original(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for owner, attribute, wrapper in [
            (ppo, "build_models", build_models), (ppo, "rollout", rollout), (ppo, "microbatches", microbatches),
            (torch.Tensor, "backward", backward), (torch.nn.utils, "clip_grad_norm_", clip_grad_norm),
            (DefaultReduceScatter, "__call__", reduce_scatter),
        ]:  # fmt: skip
            original = getattr(owner, attribute)
            wrapped = lambda *args, original=original, wrapper=wrapper, **kwargs: wrapper(original, *args, **kwargs)
            stack.enter_context(mock.patch.object(owner, attribute, functools.wraps(original)(wrapped)))
        stack.enter_context(mock.patch.multiple(ppo, SummaryWriter=mock.DEFAULT, SFT_BATCH_SIZE=16))
        # With AdamW's 1e-8, a gradient that is zero but for rounding becomes a first step of up to the learning rate.
        stack.enter_context(mock.patch.object(torch.optim, "AdamW", functools.partial(torch.optim.AdamW, eps=1e-6)))
        try:
            ppo.train(ppo.Args(**(dict(log_dir=str(folder), run_name=name) | flags)))
        except SystemExit as end:
            seen["code"] = end.code
    return seen | {"dtypes": sorted(seen["dtypes"])}


def main():
    script, folder = Path(sys.argv[1]), Path(sys.argv[2])
    sys.path.insert(0, str(script.parent))
    ppo = importlib.import_module(script.stem)
    for name, flags, fault in json.loads((folder / "plan.json").read_text()):
        (folder / f"{name}.{RANK}.json").write_text(json.dumps(run(ppo, folder, name, flags, fault)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
