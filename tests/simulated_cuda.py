"""Run a script on a simulated CUDA device: `python simulated_cuda.py REPORT script.py '["--device=cuda", ...]' ...`

Its `main` runs once for each list of flags; REPORT.<rank>.json then holds waits and calls of each. For the CPU build of
PyTorch. Tensors are on `cuda:0`, whose memory is the host's, and `x.is_cuda`, FSDP2, DTensor, autograd and optimizers
take their CUDA branches. Each operation is the CPU's kernel after a check: mixing devices raises, waits of the host are
counted by line. Not simulated: CUDA's own kernels (which dtypes they know, rounding, speed), streams, NCCL (gloo stands
in), Triton (torch.compile only traces; see deviceless.py)."""

import collections
import contextlib
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from functools import partial, partialmethod, wraps
from pathlib import Path
from unittest.mock import MagicMock

# c10 and autograd ask for a device's guard and hooks. They must be registered before `import torch` looks for them.
DEVICE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <mutex>
#include <set>
using namespace c10;
struct PinnedAllocator : Allocator {  // knows its memory again: FSDP2 pins weights once more that are not pinned
  static inline std::mutex mutex;
  static inline std::set<const void*> pinned;
  static void free(void* p) { { std::lock_guard<std::mutex> lock(mutex); pinned.erase(p); } free_cpu(p); }
  DataPtr allocate(size_t n) override {
    void* p = alloc_cpu(n);
    if (p) { std::lock_guard<std::mutex> lock(mutex); pinned.insert(p); }
    return {p, p, &free, Device(DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
struct Guard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream exchangeStream(Stream) const noexcept override { return getStream(getDevice()); }
};
struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {} void init() const override {}
  bool hasCUDA() const override { return true; } bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; } DeviceIndex getCurrentDevice() const override { return 0; }
  Allocator* getPinnedMemoryAllocator() const override { static PinnedAllocator allocator; return &allocator; }
  bool isPinnedPtr(const void* p) const override {
    std::lock_guard<std::mutex> lock(PinnedAllocator::mutex); return PinnedAllocator::pinned.count(p);
  }
};
static impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, new Guard());
namespace at { C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, ::Hooks) }
"""
with tempfile.TemporaryDirectory() as folder:
    library, root = Path(folder, "device.so"), Path(importlib.util.find_spec("torch").origin).parent
    flags = "-std=c++20 -w -shared -fPIC -include c10/core/impl/DeviceGuardImplInterface.h -x c++ -".split()
    flags += [f"-I{root}/include", f"-L{root}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root}/lib"]
    subprocess.run(["g++", *flags, "-o", library], input=DEVICE, text=True, check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp._fully_shard import _fsdp_param  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

os.environ["LOCAL_RANK"] = "0"  # all ranks share the device
sys.modules.setdefault("triton", None)  # as if it were not installed, unless it has been imported: see deviceless.py
waits, calls, pointer = collections.Counter(), collections.Counter(), ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
INDEXING = "aten::index", "aten::_index_put_impl_", "aten::index_put_"
READS = "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal", "aten::_local_scalar_dense"


def moved(x, kind):
    """x on the CPU (1) or on the CUDA device (2), in the same memory: DLPack's capsule with another device's number."""
    capsule = torch._C._to_dlpack(x.detach())
    ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = kind
    return torch._C._from_dlpack(capsule)


class Graph:
    """A CUDA graph: what is called while it captures does not run, but is recorded; `replay` runs it there.

    What it changes outside of the memory that is allocated in the capture, its pool, must be changed in place.
    """

    capturing = None  # the one that records

    def __init__(self):
        self.launches, self.undo = [], []
        self.pool, self.outside = [], set()  # (first address, end) of allocations; other addresses that are used

    def allocate(self, x):
        self.pool.append((x.data_ptr(), x.data_ptr() + x.nbytes))
        return x

    def record(self, op, args, kwargs, outputs):
        self.launches.append((op, args, kwargs, outputs))
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and x.is_cuda and x.nbytes:
                if not any(start <= x.data_ptr() < end for start, end in self.pool):
                    self.outside.add(x.data_ptr())
        if not any(value.alias_info for value in op._schema.returns):
            tree_map_only(torch.Tensor, self.allocate, outputs)

    def save(self, op, args, kwargs):
        """Keep a copy of what the operation will change."""
        given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
        for argument in op._schema.arguments:
            x = given.get(argument.name)
            if isinstance(x, torch.Tensor) and argument.alias_info and argument.alias_info.is_write:
                self.undo.append((moved(x, 1), moved(x, 1).clone()))

    def replay(self):
        calls["replay"] += 1
        for op, args, kwargs, outputs in self.launches:
            results = op(*args, **kwargs)
            for old, new in zip(tree_leaves(outputs), tree_leaves(results), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    moved(old, 1).copy_(moved(new, 1))

    @contextlib.contextmanager
    def capture(self):
        Graph.capturing = self
        try:
            yield
        finally:
            Graph.capturing = None
        for x, before in reversed(self.undo):
            x.copy_(before)
        self.undo.clear()


def wait(what):
    if Graph.capturing:
        raise RuntimeError(f"{what}: operation not permitted when stream is capturing")
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename != sys.argv[0]:
        frame = frame.f_back
    waits[f"{frame.f_code.co_qualname}:{frame.f_lineno} {what}"] += 1


def kernel(op, *args, **kwargs):
    """Any operation with a CUDA tensor: what CUDA would refuse raises, the rest is the CPU's in the same memory."""
    args = [torch.tensor(x) if isinstance(x, bool | int | float) and "Tensor" in str(argument.type) else x
            for x, argument in zip(args, op._schema.arguments, strict=False)]  # fmt: skip
    name, given = op._schema.name, [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    calls[name] += 1
    on_cuda = [x.is_cuda for x in given if x.dim() or "_fused" in name]  # numbers may be the CPU's, but Adam's step
    indices = tree_leaves(args[1]) if name in INDEXING else []
    if indices:  # these, and nothing else, may lie on the CPU
        on_cuda = [args[0].is_cuda, True, *(x.is_cuda for x in args[2:3] if x.dim())]
    if name != "aten::copy_" and len(set(on_cuda)) > 1:
        raise RuntimeError(f"{op} of " + ", ".join(f"{x.device} {[*x.shape]}" for x in given))
    if any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values())):
        raise RuntimeError(f"{op}: a CPU generator for a CUDA tensor")
    if name == "aten::copy_" and args[0].is_cuda != args[1].is_cuda:
        if args[1].is_cuda or not any(args[2:]):  # a copy to the device from pinned memory need not wait
            wait(f"copy to {'host' if args[1].is_cuda else 'device'}")
    elif name in READS or any(x is not None and x.dtype == torch.bool for x in indices):
        wait(name)
    originals, grown, given = {}, [], (args, kwargs)
    if Graph.capturing:
        Graph.capturing.save(op, args, kwargs)
    def to_host(x):
        alias = moved(x, 1) if x.is_cuda else x
        if x.is_cuda and x.shape == (0,):  # perhaps an output that is to be resized
            grown.append((x, alias := torch.empty_like(alias)))
        originals[id(alias)] = x, alias
        return alias

    args, kwargs = tree_map_only(torch.Tensor, to_host, (args, kwargs))
    out = op(*args, **kwargs | ({"device": torch.device("cpu")} if "device" in kwargs else {}))
    for x, alias in grown:
        if alias.shape != (0,):
            x.data = moved(alias, 2)
            if Graph.capturing:
                Graph.capturing.allocate(x)
    out = tree_map_only(torch.Tensor, lambda x: originals[id(x)][0] if id(x) in originals else moved(x, 2), out)
    if Graph.capturing:
        Graph.capturing.record(op, *given, out)
    return out


def empty(new, *sizes, dtype=None, **more):
    x = moved(new(*sizes, dtype=dtype), 2)
    if Graph.capturing:
        Graph.capturing.allocate(x)
    return x


def collective(op, *args):
    out = kernel(op, *args)
    (out[-1] if isinstance(out, tuple) else out).wait()  # now: PyTorch finds it by its storage, not that of a view
    return out


def added(mask, q):
    """A mask as what is added to the scores; PyTorch does this before it calls a kernel."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=q.dtype, device=q.device))


def of_each(starts_q, starts_k, used=None):
    """Slices of the queries and of the keys of each sample."""
    ends = starts_k[1:] if used is None else starts_k[:-1] + used
    rows = zip(starts_q.tolist(), starts_q[1:].tolist(), starts_k.tolist(), ends.tolist(), strict=False)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in rows]


def batched(x, part):
    return x[part].transpose(0, 1)[None]  # [1, H, T, D]


def flash(q, k, v, starts_q, starts_k, max_q, max_k, dropout, is_causal, debug, *, scale=None, seqused_k=None, **more):
    """Flash attention of samples of different lengths; causal ones have as many queries as keys."""
    if q.dtype not in (torch.float32, torch.bfloat16) or {starts_q.dtype, starts_k.dtype} != {torch.int32}:
        raise RuntimeError(f"flash attention of {q.dtype}, {starts_q.dtype}, {starts_k.dtype}")
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = torch.zeros_like(q), q.new_zeros((q.shape[1], len(q)), dtype=torch.float32)
    for a, b in of_each(starts_q, starts_k, seqused_k):
        if b.start == b.stop:  # where no kernel has written the lengths
            continue
        some, of_some = forward(batched(q, a), batched(k, b), batched(v, b), dropout, is_causal, scale=scale)
        out[a], lse[:, a] = some[0].transpose(0, 1), of_some[0].reshape(q.shape[1], -1)
    seed = torch.empty(2, dtype=torch.uint64)
    return out, lse, seed, seed[0].clone(), q.new_empty(0)


def flash_backward(grad, q, k, v, out, lse, starts_q, starts_k, max_q, max_k, dropout, causal, *_, scale=None, **more):
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    for a, b in of_each(starts_q, starts_k):
        some = [batched(x, p) for x, p in ((grad, a), (q, a), (k, b), (v, b), (out, a))]
        found = backward(*some, lse[None, :, a].contiguous(), dropout, causal, scale=scale)
        for gradient, p, x in zip(gradients, (a, b, b), found, strict=True):
            gradient[p] = x[0].transpose(0, 1)
    return tuple(gradients)


def attention(q, k, v, mask=None, dropout=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    if not q.dtype == k.dtype == v.dtype or (mask is not None and mask.dtype not in (torch.bool, q.dtype)):
        raise RuntimeError(f"attention of {q.dtype}, {k.dtype}, {v.dtype}, mask {mask if mask is None else mask.dtype}")
    if enable_gqa and (mask is not None or q.dtype == torch.float32):
        raise RuntimeError("attention with shared key heads would hold all scores [B, H, T, T]")
    math = partial(torch.ops.aten._scaled_dot_product_attention_math, scale=scale, enable_gqa=enable_gqa)
    return math(q, k, v, added(mask, q), dropout, is_causal, None)[0]


def product(a, b, dtype):
    """A product of matrices in another precision than theirs, which CPUs lack."""
    if a.dtype != b.dtype or a.dtype == dtype or dtype != torch.float32:
        raise RuntimeError(f"product of {a.dtype} and {b.dtype} in {dtype}")
    return a.to(dtype) @ b.to(dtype)


nothing = "_lazy_init set_device synchronize manual_seed_all get_rng_state set_rng_state reset_peak_memory_stats"
for name in nothing.split():
    setattr(torch.cuda, name, lambda *args, **kwargs: None)  # each a function of its own: dynamo insists
for name in "Stream Event stream current_stream device".split():
    mocked = type(name, (MagicMock,), {"__init__": lambda self, *args, **kwargs: MagicMock.__init__(self)})
    setattr(torch.cuda, name, mocked)
torch.cuda.current_device = torch.cuda.max_memory_allocated = lambda *args: 0
torch.cuda.get_device_capability, torch.cuda.get_device_name = lambda *args: (9, 0), lambda *args: "simulated"
torch.cuda.CUDAGraph, torch.cuda.graph_pool_handle = Graph, lambda: None
torch.cuda.graph = lambda graph, pool, capture_error_mode: graph.capture()
torch.cuda.device_count = torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
init, compiled = dist.init_process_group, torch.compile
dist.init_process_group = lambda backend, **more: dist.is_initialized() or init(backend.replace("nccl", "gloo"), **more)
if not sys.modules["triton"]:
    torch.compile = lambda function, dynamic=None, **more: compiled(function, dynamic=dynamic, backend="eager")
    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend="eager")
_fsdp_param.alloc_storage = _fsdp_param.free_storage = lambda *args: None  # this memory is not PyTorch's to resize
libraries = {name: torch.library.Library(name, "IMPL") for name in ("aten", "_", "c10d")}
libraries["_"].fallback(kernel, "CUDA")
libraries["aten"].impl("copy_", partial(kernel, torch.ops.aten.copy_.default), "CUDA")
for name, new in ("empty.memory_format", torch.empty), ("empty_strided", torch.empty_strided):
    libraries["aten"].impl(name, partial(empty, new), "CUDA")
for key in "CUDA", "AutogradCUDA":
    libraries["aten"].impl("scaled_dot_product_attention", attention, key)
libraries["aten"].impl("mm.dtype", product, "CPU")
libraries["aten"].impl("mm.dtype_out", lambda a, b, dtype, *, out: out.copy_(product(a, b, dtype)), "CPU")
libraries["aten"].impl("_flash_attention_forward", flash, "CPU")
libraries["aten"].impl("_flash_attention_backward", flash_backward, "CPU")
for name in ("allreduce_ broadcast_ allgather_ _allgather_base_ _reduce_scatter_base_ allreduce_coalesced_ "
             "allgather_into_tensor_coalesced_ reduce_scatter_tensor_coalesced_").split():  # fmt: skip
    libraries["c10d"].impl(name, partial(collective, getattr(torch.ops.c10d, name).default), "CUDA")


def counted(function):
    @wraps(function)
    def counting(*args, **kwargs):
        calls[function.__qualname__] += 1
        return function(*args, **kwargs)

    return counting


def main():
    report, path, *runs = sys.argv[1:]
    sys.path.insert(0, str(Path(path).resolve().parent))
    sys.argv = [path, *json.loads(runs[0])]  # a benchmark may read it when imported
    script, reports = importlib.import_module(Path(path).stem), []
    if "RANK" in os.environ:  # several ranks would not find each other again in the next run
        dist.destroy_process_group = lambda: None
    for owner, name in ("Decoder", "step"), (None, "optimizer_step"), (None, "forward_all"):
        owner = getattr(script, owner, None) if owner else script
        if hasattr(owner, name):
            setattr(owner, name, counted(getattr(owner, name)))
    for flags in runs:
        sys.argv = [script.__file__, *json.loads(flags)]
        script.main()
        reports.append({"waits": dict(waits), "calls": dict(calls)})
        waits.clear(), calls.clear()
    Path(f"{report}.{os.environ.get('RANK', 0)}.json").write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
