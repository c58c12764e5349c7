"""Kernels that fail, on the simulated device: `python failing_kernels.py SCRIPT MODEL`.

A run must have, bit by bit, the numbers of one that never uses the kernel, and say in one line what is turned off. Of
several ranks only the last has the failure.
"""

import importlib
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import simulated_cuda  # registers the device, before anything else imports torch
import torch
from test_train import FAILURES, SMALL, lines, raises, without_clock

ppo = importlib.import_module(sys.argv[1])
FLAGS = SMALL | dict(device="cuda", dtype="bfloat16", compile="off", num_iterations=1, ppo_epochs=1, log_dir=".",
                     model=sys.argv[2], max_prompt_tokens=64, eval_episodes=0, rollout_batch_size=4)  # fmt: skip
CALLS = {  # (owner and name of a function, an argument that its calls of the kernel have, and no others)
    "packed attention": (ppo, "varlen_attn", "window_size"),
    "attention by lengths": (ppo, "varlen_attn", "seqused_k"),
    "float32 product": (torch, "mm", "out_dtype"),
}


def failing(kernel, failure):
    owner, name, argument = CALLS[kernel]
    call = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args, **more: (
        failure(call, *args, **more) if argument in more else call(*args, **more)))  # fmt: skip


def train(name, failures=None, off=(), **flags):
    """Numbers of a run, its warnings, and the kernels that were in use at its end."""
    printed, events = [], []
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(ppo.KERNELS, dict.fromkeys(off, False)))
        stack.enter_context(mock.patch.object(ppo, "print0", printed.append))
        for event in "try_kernels", "kernel_failures", "warm_start", "rollout":
            function = getattr(ppo, event)
            stack.enter_context(mock.patch.object(ppo, event, lambda *args, event=event, function=function: (
                events.append(event), function(*args))[1]))  # fmt: skip
        for kernel, failure in (failures or {}).items() if ppo.RANK == ppo.WORLD_SIZE - 1 else ():
            stack.enter_context(failing(kernel, failure))
        ppo.train(ppo.Args(**FLAGS | dict(run_name=name) | flags))
        in_use = {kernel for kernel, used in ppo.KERNELS.items() if used}
    assert events[:4] == ["try_kernels", "kernel_failures", "warm_start", "rollout"]
    assert events.count("try_kernels") == events.count("kernel_failures") == 1
    return without_clock(lines(Path(name))) if ppo.RANK == 0 else None, [x for x in printed if "warning" in x], in_use


def check(name, failures, expected, **flags):
    numbers, warnings, in_use = train(name, failures, **flags)
    assert numbers == expected, name
    assert in_use == CALLS.keys() - failures, name
    for kernel, line in zip(failures, warnings, strict=True):
        parts = f"{kernel} is turned off, because on simulated with torch", f"{PLAIN[kernel]} is used instead"
        assert all(part in line for part in parts), line


PLAIN = dict(zip(CALLS, ("Padded attention", "Masked attention", "A product of float32 copies"), strict=True))
everything = dict.fromkeys(CALLS, raises)
if ppo.WORLD_SIZE > 1:
    check("ranks", everything, train("plain", off=CALLS)[0])
    sys.exit()
numbers, warnings, in_use = train("healthy")
assert not warnings and in_use == CALLS.keys()
assert simulated_cuda.calls["aten::_flash_attention_backward"] > 0
for kernel, failures in FAILURES.items():
    plain, warnings, _ = train(kernel, off=[kernel])
    assert not warnings and (plain != numbers or kernel == "float32 product")  # The simulated one is the plain one.
    for failure in failures[:2]:  # It raises an error, or its numbers are wrong.
        check(f"{kernel} {failure.__name__}", {kernel: failure}, plain)
# Compiled code asks which kernels are used, and graphs are captured, without a break.
plain, _, _ = train("compiled plain", off=CALLS, compile="on")
check("compiled", everything, plain, compile="on")
assert not torch._dynamo.utils.counters["graph_break"]
