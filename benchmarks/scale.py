"""Does a model fit on W GPUs, how long does an iteration take at least, what breaks first? Answered without a GPU.

    python benchmarks/scale.py MODEL RANKS [--gpu h100|h200|a100|4090] [--json FILE] [flags of ppo_llm.py]
    torchrun --nproc-per-node 2 benchmarks/scale.py tiny real  # the same counts of real ranks (gloo, CPU), to compare

MODEL is tiny, 135M (the shape of SmolLM2), 0.5B, 1.5B, 3B, 7B, 14B, 32B (of Qwen2.5), 70B (of Llama 3) or a folder
with a config.json. Prints numbers for each phase of an iteration, its least time, and whether it fits. Needs g++ and
the CPU build of PyTorch.

`ppo_llm.train` runs unmodified as rank 0 of W, on tensors without data (FakeTensor) and PyTorch's "fake" process group;
tensors on the host are real, but for the weights, gradients and moments that a patched script keeps there. A rollout
prefills, decodes three tokens, counted for all, and makes up responses of 1/8 to 8/8 of --max-new-tokens. Left out:
evaluation, export, torch.compile, what other ranks hold. Not counted: fragmentation, workspaces of kernels, NCCL's
buffers, launches, time of the host and of PCIe. Seconds are lower bounds.
"""

import argparse
import dataclasses
import json
import math
import sys
import tempfile
import time
import types
import weakref
from collections import Counter, defaultdict
from pathlib import Path

parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
parser.add_argument("model")
parser.add_argument("ranks")
parser.add_argument("--gpu", choices=("h100", "h200", "a100", "4090"), default="h100")
parser.add_argument("--json")
OPTIONS, FLAGS = parser.parse_known_args()
REAL = OPTIONS.ranks == "real"
if not REAL:
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    import simulated_cuda  # registers the device, before `import torch` looks for it

import torch  # noqa: E402
import tyro  # noqa: E402
from common import QWEN_05B, QWEN_15B, SMALL, line, ppo_llm, table  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.distributed._tools.fake_collectives import CollectiveOp  # noqa: E402
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param, _fsdp_param_group  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

SHAPES = {"tiny": SMALL, "0.5B": QWEN_05B, "1.5B": QWEN_15B} | {
    name: dict(zip(SMALL, shape)) for name, *shape in [
        ("135M", 576, 1536, 30, 9, 3, 49152), ("3B", 2048, 11008, 36, 16, 2, 151936),
        ("7B", 3584, 18944, 28, 28, 4, 152064), ("14B", 5120, 13824, 48, 40, 8, 152064),
        ("32B", 5120, 27648, 64, 40, 8, 152064), ("70B", 8192, 28672, 80, 64, 8, 128256)]}  # fmt: skip
# Data sheets (SXM): memory, dense bfloat16 FLOP/s, bytes/s of memory, NVLink, network (a card per GPU), one way. Of
# consumer cards without NVLink: PCIe.
MEMORY, FLOPS, HBM, NVLINK, NETWORK = {
    "a100": (80e9, 312e12, 2.04e12, 300e9, 25e9), "h100": (80e9, 989e12, 3.35e12, 450e9, 50e9),
    "h200": (141e9, 989e12, 4.8e12, 450e9, 50e9),
    "4090": (24 * 2**30, 165e12, 1.01e12, 32e9, 32e9)}[OPTIONS.gpu]  # fmt: skip
KINDS = {  # of memory, by the function that allocates it
    "build_model": "parameters", "build_sampler": "sampler", "make_optimizer": "optimizer",
    "KVCache.__init__": "KV cache", "copy_weights": "weight copy", "foreach_all_gather": "gathered weights",
    "FSDPParam.all_gather_inputs": "gathered weights",
    "FSDPParam.init_all_gather_outputs": "gathered weights", "foreach_reduce": "unsharded gradients"}  # fmt: skip
COLLECTIVES = dict(_allgather_base_="all-gather", all_gather_into_tensor="all-gather", allreduce_="all-reduce",
                   all_reduce="all-reduce", _reduce_scatter_base_="reduce-scatter", broadcast_="broadcast")  # fmt: skip
# What takes time even if all else is fused: matrix products, attention, and these of AdamW, clipping and FSDP.
UNFUSED = "_fused_adamw_ _foreach_norm _foreach_mul_ _foreach_copy_ chunk_cat split_with_sizes_copy".split()
aten, original = torch.ops.aten, types.SimpleNamespace(**vars(ppo_llm))


def tensors_in(*trees) -> list[torch.Tensor]:
    return [x for x in tree_leaves(trees) if isinstance(x, torch.Tensor)]


def kind_of_caller() -> str:
    frame, kind = sys._getframe(1), "activations, other"
    while frame:
        kind = KINDS.get(frame.f_code.co_qualname, kind)  # the outermost wins
        frame = frame.f_back
    return kind


class Device(TorchDispatchMode):
    """Counts operations on the device and the bytes that it holds. `resize` and below stand in for other functions."""

    def __init__(self):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.phases = iter("rollout score critic actor hand_over end".split())
        self.phase, self.times = "start", 1  # of the next operations
        # By phase: numbers; `held` when it was most; the most bytes of each kind.
        self.counts, self.at_peak, self.largest = (defaultdict(Counter) for _ in range(3))
        self.storages = {}  # address: (bytes, kind, one of the following two)
        self.held = Counter()  # kind: bytes
        self.on_host = Counter()  # the same of the host's tensors without data

    def __torch_dispatch__(self, op, tensor_types, args=(), kwargs=None):
        if any(map(is_traceable_wrapper_subclass_type, tensor_types)):
            return NotImplemented  # a DTensor: comes again as operations on local tensors
        kwargs = kwargs or {}
        given = tensors_in(args, kwargs)
        target = torch.device(kwargs.get("device") or "meta").type
        offloaded = not REAL and self.is_offloaded(target, given)
        ours = REAL or offloaded or target == "cuda" or any(x.is_cuda for x in given)
        if torch._guards.active_fake_mode() or not ours:
            return op(*args, **kwargs)  # DTensor is computing shapes, or it is the host's
        if target == "cpu" and not REAL and not offloaded:  # the host reads: any numbers
            return torch.ones(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
        out = op(*args, **kwargs) if REAL else self.pretend(op, given, args, kwargs)
        if REAL and op._schema.name.endswith("wait_tensor"):
            time.sleep(0.01)  # gloo's thread lets go of its tensors a moment after the collective has ended
        for x in tensors_in(out):
            self.hold(x)
        self.count(op, args, kwargs, out)
        return out

    def is_offloaded(self, target, given) -> bool:
        """Whether an operation is of the host with what has no data there: sharded weights and what comes from them."""
        if target == "cpu":
            return kind_of_caller() in ("parameters", "unsharded gradients")
        return target == "meta" and any(isinstance(x, FakeTensor) and not x.is_cuda for x in given)

    def pretend(self, op, given, args, kwargs):
        """The output without data."""
        if op is aten._local_scalar_dense.default:  # of integers only the rows that still decode are read
            return {torch.bool: True, torch.int64: 0}.get(given[0].dtype, 0.5)
        if op is aten.index.Tensor and any(x is not None and x.dtype == torch.bool for x in args[1]):
            return args[0].new_empty(args[1][0].numel())  # as if all were true
        with self.fake:
            return op(*args, **kwargs)

    def count(self, op, args, kwargs, out):
        name, packet, count = op._schema.name.split("::")[1], op._overloadpacket, self.counts[self.phase]
        if name in COLLECTIVES and "c10d" in op.namespace:
            kind, size = COLLECTIVES[name], max(x.nbytes for x in tensors_in(args, out))
            group = CollectiveOp.get_process_group(op, args)
            W, nodes = group.size(), len({rank // 8 for rank in torch.distributed.get_process_group_ranks(group)})
            # A GPU receives what it lacks; a byte enters a node of 8 GPUs once, through the card of one of them.
            seconds = max(size * (W - 1) / W / NVLINK * (W > nodes), size * (nodes - 1) / W / NETWORK)
            count["seconds of network"] += seconds * (2 if kind == "all-reduce" else 1)  # reduce-scatter, all-gather
            count[f"{kind}, calls"] += 1
            count[f"{kind}, GB"] += size / 1e9
            if kind == "reduce-scatter":
                self.hold(args[0], "gradients")
        elif not REAL and len({x.device.type for x in tensors_in(args, kwargs, out)}) == 2 and "copy" in name:
            count["GB over PCIe"] += max(x.nbytes for x in tensors_in(args, out)) / 1e9
        elif not REAL and not any(x.is_cuda for x in tensors_in(args)):
            pass  # the host's arithmetic
        elif packet in flop_registry or name in UNFUSED:
            flops = flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0
            flops *= self.times * (0.5 if "flash" in name else 1)  # causal attention needs half of it
            moved = self.times * sum(x.nbytes for x in tensors_in(args, kwargs, out))
            count["FLOPs"] += flops
            limit = "arithmetic" if flops / FLOPS > moved / HBM else "memory"
            count[f"seconds of {limit}"] += max(flops / FLOPS, moved / HBM)

    def hold(self, x, kind=None):
        """Count the storage of x, whose kind or size may be new, until it is freed."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self.storages:
            self.storages[key] = 0, kind_of_caller(), self.held
            weakref.finalize(storage, self.free, key)
        kind = kind or self.storages[key][1]
        self.free(key)
        held = self.held if REAL or x.is_cuda else self.on_host
        self.storages[key] = storage.nbytes(), kind, held
        held[kind] += storage.nbytes()
        self.largest[self.phase] |= self.held
        count = self.counts[self.phase]
        count["GB on the host"] = max(count["GB on the host"], self.on_host.total() / 1e9)
        if self.held.total() > self.at_peak[self.phase].total():
            self.at_peak[self.phase] = self.held.copy()

    def free(self, key):
        size, kind, held = self.storages.pop(key)
        held[kind] -= size

    def resize(self, x, size):
        x.untyped_storage().resize_(size)
        self.hold(x)

    def generate_turn(self, decoder, episodes, cached, args):
        """Prefills, makes decode steps at the start, in the middle and at the end of a wave, and makes up responses."""
        self.phase = "prefill"
        original.generate_turn(decoder, episodes, cached, dataclasses.replace(args, max_new_tokens=0))
        self.phase, self.times = "decode", args.max_new_tokens / 3  # the three are counted for all
        for new in (1, args.max_new_tokens // 2, args.max_new_tokens):
            decoder.step(min(original.round_up(args.max_prompt_tokens + new, 128), decoder.cache.size))
        self.phase, self.times = "rollout", 1
        for i, episode in enumerate(episodes, start=1):
            n = args.max_new_tokens * math.ceil(8 * i / len(episodes)) // 8  # few lengths: few shapes for FakeTensor
            episode.add([1] * n, [-1.0] * n)  # 1 is <eos>
            self.counts["rollout"]["tokens"] += len(episode.ids)


def build_sampler(*args):
    return original.build_model(*args, sampler=True)


def load_weights(model, folder, needs_head=True):
    for p in model.parameters():
        torch.nn.init.normal_(p.to_local() if isinstance(p, DTensor) else p)


def gather(out, value):
    """all_gather_object of ranks that all hold what this one does."""
    out[:] = [value] * len(out)


class Clock(original.Clock):
    """Tells the device when a phase of the iteration begins."""

    def __init__(self, device: Device):
        super().__init__()
        self.device, device.phase = device, next(device.phases)

    def end(self, phase):
        super().end(phase)
        self.device.phase = next(self.device.phases)


def attention(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
    if is_causal:
        return aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
    return aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, False)[0]


def main() -> None:
    folder, device = OPTIONS.model, Device()
    if folder in SHAPES:
        tied = folder in ("135M", "0.5B", "1.5B", "3B")
        shape = dict(model_type="qwen2", max_position_embeddings=2**20, tie_word_embeddings=tied)
        folder = tempfile.mkdtemp()
        Path(folder, "config.json").write_text(json.dumps(shape | SHAPES[OPTIONS.model]))
    args = tyro.cli(ppo_llm.Args, args=FLAGS, default=ppo_llm.Args(
        model=folder, max_prompt_tokens=512, max_new_tokens=1024, num_iterations=1, save_every=0, dtype="bfloat16",
        device="cpu" if REAL else "cuda", compile="off", log_dir=tempfile.mkdtemp()))  # fmt: skip
    args.env_kwargs = json.dumps({"digits": args.max_prompt_tokens - 1})  # and "=": a character is a token
    vars(ppo_llm).update(
        HFTokenizer=lambda folder: original.HFTokenizer.from_texts(["0123456789="]), load_weights=load_weights,
        build_model=lambda config, head, args, sampler=False: (
            build_sampler if sampler else original.build_model)(config, head, args),
        evaluate=lambda *args: {"accuracy": 0.0, "greedy_accuracy": 0.0, "reward": 0.0},
        diagnose_ratio=lambda *args: {"ratio/diagnosis": None},  # the numbers are made up
        check_iteration=lambda *args: None, find_mistakes=lambda *args: (), generate_turn=device.generate_turn,
        check_ranks_agree=lambda **parts: None,  # the host's
        try_kernels=lambda *args: None,  # whose small numbers do not count
        save_hf_checkpoint=lambda *args: None, Clock=lambda: Clock(device))  # fmt: skip
    _fsdp_param.free_storage = lambda x: device.resize(x, 0)
    _fsdp_param.alloc_storage = _fsdp_param_group.alloc_storage = lambda x: device.resize(x, x.nbytes)
    if not REAL:  # what a CUDA build would have, and ranks that all hold what this one does
        torch.nn.functional.scaled_dot_product_attention = attention
        FakeTensor.is_pinned, FakeTensor.pin_memory = lambda x: True, lambda x: x
        for name in "_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward":  # else they would be composed
            simulated_cuda.libraries["aten"].impl(name, lambda *args: None, "CUDA")
        FakeTensor.__format__ = lambda x, spec: format(x.item(), spec)
        _fsdp_init._move_states_to_device = lambda *args: None  # `build_model` does it
        torch.distributed.init_process_group("fake", rank=0, world_size=int(OPTIONS.ranks))
        ppo_llm.WORLD_SIZE = int(OPTIONS.ranks)
        torch.distributed.all_gather_object = gather
    args = ppo_llm.fill_in_defaults(args)
    with device:
        ppo_llm.train(args)
    if ppo_llm.RANK == 0:
        report(device, args, ppo_llm.load_config(folder))


def report(device, args, config) -> None:
    with torch.device("meta"):
        N = sum(p.numel() for p in ppo_llm.Transformer(config).parameters())
    W = ppo_llm.WORLD_SIZE
    tokens = device.counts["rollout"]["tokens"]  # of this rank's samples
    passes = {"critic": 3 * args.critic_epochs, "actor": 3 * args.ppo_epochs}  # a backward pass costs two forward ones
    limits = [f"seconds of {limit}" for limit in ("arithmetic", "memory", "network")]
    for phase, count in device.counts.items():
        count |= {f"GB of {kind}": size / 1e9 for kind, size in device.at_peak[phase].items()}
        count["GB at the peak"] = device.at_peak[phase].total() / 1e9
        count["FLOPs / (2 N tokens passes)"] = count["FLOPs"] / (2 * N * tokens * passes.get(phase, 1))
        count["seconds at least"] = max(count[limits[0]] + count[limits[1]], count[limits[2]])  # FSDP overlaps them
    phases = {phase: count for phase, count in device.counts.items() if count["seconds at least"]}
    rows = sorted({name for count in phases.values() for name in count})
    print(f"\n{OPTIONS.model}: N = {N / 1e9:.3g} G, {W * tokens:,} tokens, {W} ranks of {OPTIONS.gpu}\n")
    table(["", *phases], ([row, *(f"{count[row]:.4g}" for count in phases.values())] for row in rows))
    line(["bound by", *(max(limits, key=count.__getitem__).split()[-1] for count in phases.values())])
    seconds = sum(count["seconds at least"] for phase, count in phases.items() if phase != "start")
    peak = max(count["GB at the peak"] for count in phases.values())
    fits = "fits" if peak * 1e9 <= MEMORY else "does not fit"
    print(f"\nAn iteration takes at least {seconds:.3g} s. The peak, {peak:.3g} GB, {fits} in {MEMORY / 1e9:g} GB.")
    if OPTIONS.json:
        row = vars(OPTIONS) | {"flags": FLAGS, "seconds": seconds, "phases": device.counts, "largest": device.largest}
        Path(OPTIONS.json).open("a").write(json.dumps(row) + "\n")


main()
