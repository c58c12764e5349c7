"""Triton for a GPU on a machine without one: `python deviceless.py REPORT script.py '["--device=cuda", ...]' ...`

Like simulated_cuda.py, on which it stands, but torch.compile writes Triton code, which Triton's interpreter executes in
the host's memory. With the environment variable ARCH, 80 or 90, Triton compiles it for that architecture instead, and
launches are recorded but not made. For the CPU build of PyTorch 2.13 and `pip install --no-deps triton==3.7.1`. Not
simulated: the choice among the configurations of a kernel (the interpreter takes the first, all are compiled), the
GPU's rounding, and matrix products and attention, which are the CPU's.

`python deviceless.py OUT FUNCTION ARGUMENTS` saves what a function of test_triton.py returns, and what was compiled."""

# ruff: noqa: E402, I001  # triton comes before simulated_cuda, which hides it otherwise, and that before torch
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

INTERPRET, ARCH = "ARCH" not in os.environ, int(os.environ.get("ARCH", 90))
os.environ["TRITON_INTERPRET"] = str(int(INTERPRET))

import triton
from triton.backends.compiler import GPUTarget
import simulated_cuda
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SHARED_MEMORY, PROCESSORS = {80: (166912, 108), 90: (232448, 132)}[ARCH]
PROPERTIES = types.SimpleNamespace(
    name=f"sm_{ARCH}", major=ARCH // 10, minor=0, multi_processor_count=PROCESSORS, total_memory=80 << 30,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    shared_memory_per_block=49152, shared_memory_per_block_optin=SHARED_MEMORY,
    shared_memory_per_multiprocessor=SHARED_MEMORY + 1024, L2_cache_size=40 << 20, gcnArchName="")  # fmt: skip
DRIVER = types.SimpleNamespace(
    is_active=lambda: True, binary_ext="cubin", get_current_target=lambda: GPUTarget("cuda", ARCH, 32),
    get_active_torch_device=lambda: torch.device("cuda", 0), get_current_device=lambda: 0,
    utils=types.SimpleNamespace(get_device_properties=lambda device: {
        "max_shared_mem": SHARED_MEMORY, "multiprocessor_count": PROCESSORS, "max_num_regs": 65536, "warpSize": 32}),
    get_device_interface=lambda: torch.cuda)  # fmt: skip
triton.runtime.driver.set_active(DRIVER)
torch.version.cuda = "13.0"
torch.cuda.get_device_properties = lambda device=None: PROPERTIES
torch.cuda.get_device_capability = lambda device=None: (PROPERTIES.major, 0)
torch.cuda.is_bf16_supported = lambda *args, **kwargs: True
torch.cuda._exchange_device, torch.cuda._maybe_exchange_device = lambda index: 0, lambda index: 0  # dynamo wants two
torch.cuda.get_rng_state = lambda *args: torch.zeros(16, dtype=torch.uint8)
torch._C._cuda_getCurrentRawStream = lambda index: 0

# What follows reads the above when it is imported.
import triton.language as tl
from torch._inductor import config
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.runtime import interpreter

triton_helpers.set_driver_to_gpu = lambda: None
config.compile_threads = 1  # other processes would not know the device
config.use_static_triton_launcher = config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
config.shape_padding = False  # it would be decided by benchmarks
torch._dynamo.config.recompile_limit = 64  # as the scripts do
torch.autograd.set_multithreading_enabled(False)  # a thread of the backward pass would have other configurations
launches = []  # (CachingAutotuner, that is a kernel in all its configurations, bytes that it moves) of each launch
aten, library = torch.ops.aten, simulated_cuda.libraries["aten"]


def moved(kernel, args):
    """Bytes that a kernel reads and writes. Every pass over a tensor counts, what it gathers does not."""
    tensors = {name: x for name, x in zip(kernel.fn.arg_names, args) if isinstance(x, torch.Tensor)}
    uses = re.findall(r"tl\.(?:load|store)\((\w+) \+ (.*?)(?:, |$)", kernel.fn.src, flags=re.M)
    return sum(tensors[name].nbytes for name, index in uses if name in tensors and "tmp" not in index)


def launch(self, *args, run=CachingAutotuner.run, **kwargs):
    launches.append((self, 0 if INTERPRET else moved(self, args)))
    args = [simulated_cuda.moved(x, 1) if isinstance(x, torch.Tensor) and x.is_cuda else x for x in args]
    if graph := simulated_cuda.Graph.capturing:
        graph.launches.append((functools.partial(run, self), args, kwargs, None))
    elif INTERPRET:
        run(self, *args, **kwargs)


def by_numpy(function, x):
    """A function of libdevice, which the interpreter lacks."""
    data = function(x.handle.data).astype(x.handle.data.dtype)
    return tl.tensor(interpreter.TensorHandle(data, x.handle.dtype), x.type)


CachingAutotuner.run = launch
if INTERPRET:
    for name, function in {"exp": np.exp, "rsqrt": lambda x: 1 / np.sqrt(x), "log1p": np.log1p}.items():
        setattr(triton_helpers.libdevice, name, functools.partial(by_numpy, function))
    # Patch triton.language once, instead of for each call within a kernel, which would take most of the time.
    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: types.SimpleNamespace(restore=lambda: None)
else:
    CachingAutotuner._make_launchers = CachingAutotuner._dynamic_scale_rblock = lambda self: None


def attention(q, k, v, mask=None, dropout=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """The kernels that CUDA chooses in bfloat16."""
    if mask is None:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout, is_causal, scale=scale)[0]
    mask = simulated_cuda.added(mask, q).expand(*q.shape[:3], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, False, dropout, is_causal, scale=scale)[0]


def efficient(q, k, v, mask, with_lse, dropout=0.0, is_causal=False, *, scale=None):
    out, _ = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, is_causal, attn_mask=mask, scale=scale)
    seed = q.new_empty((), dtype=torch.int64)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, q.new_empty((*q.shape[:2], 0)).float(), seed, seed.clone()


def flash(q, k, v, dropout=0.0, is_causal=False, debug=False, *, scale=None):
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, is_causal, scale=scale)
    seed = torch.empty(2, dtype=torch.uint64, device="cuda")
    return out, lse.contiguous(), None, None, q.shape[2], k.shape[2], seed, seed[0], q.new_empty(0)


def flash_backward(grad, q, k, v, out, lse, _q, _k, max_q, max_k, dropout, is_causal, seed, offset, *, scale=None):
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients = backward(grad, q, k, v, out, lse, dropout, is_causal, scale=scale)
    return tuple(torch.empty_like(x).copy_(g) for x, g in zip((q, k, v), gradients, strict=True))  # the layouts of CUDA


# Zeros, so that indices that a kernel would write, and has not, are in range.
torch._C._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
    size, stride, dtype=dtype, device="cuda").zero_()  # fmt: skip
for key in "CUDA", "AutogradCUDA":
    library.impl("scaled_dot_product_attention", attention, key, allow_override=True)
library.impl("_scaled_dot_product_efficient_attention", efficient, "CUDA")
library.impl("_scaled_dot_product_flash_attention", flash, "CUDA")
library.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CUDA")


@functools.cache
def stack(kernel):
    """The most bytes of stack that a configuration of a kernel takes."""
    sizes = []
    for result in kernel.compile_results:
        with tempfile.NamedTemporaryFile() as file:
            Path(file.name).write_bytes(result.kernel.asm["cubin"])
            text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True).stdout
        sizes.append(int(re.search(r"STACK:(\d+)", text)[1]))
    return max(sizes)


def main():
    if sys.argv[2].endswith(".py"):
        return simulated_cuda.main()
    out, function, arguments = sys.argv[1:]
    result = getattr(__import__("test_triton"), function)(*json.loads(arguments))
    counters = torch._dynamo.utils.counters
    seen = {"graphs": counters["stats"]["unique_graphs"], "breaks": list(counters["graph_break"])}
    seen |= {"launches": len(launches), "bytes": sum(size for _, size in launches)}
    seen["stack"] = 0 if INTERPRET else max(stack(kernel) for kernel, _ in launches)
    torch.save((result, seen), out)


if __name__ == "__main__":
    main()
