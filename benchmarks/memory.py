"""Bytes per parameter that each model takes on a rank, formula and measurement, for 1, 2 and 4 ranks on the CPU.

    python benchmarks/memory.py

A random Llama of 67 million parameters is built as the script builds it; after each stage freed memory is given back to
the system and the resident memory of rank 0 is read. Gradients are alive when it is read, activations are not.
"""

import contextlib
import ctypes
import gc
import itertools
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import ppo_llm as ppo

RAW = {"model_type": "llama", "vocab_size": 2048, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 9,
       "num_attention_heads": 12, "max_position_embeddings": 64}  # fmt: skip


def resident() -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def backward(model) -> None:
    """Leave gradients behind, as of one microbatch of two short rows."""
    tokens = torch.arange(16).view(2, 8)
    out, _ = ppo.at_sampled(model, tokens, torch.ones(2, 8, dtype=torch.bool) & (torch.arange(8) > 0))
    out.sum().backward()


def worker(dtype: str) -> None:
    with contextlib.ExitStack() as stack:
        args = ppo.Args(dtype=dtype, device="cpu")
        device, precision, world, ranks, _ = ppo.connect(args, stack)
        config = ppo.ModelConfig.from_hf(RAW)
        torch.manual_seed(0)
        small = ppo.ModelConfig.from_hf(RAW | {"hidden_size": 96, "intermediate_size": 256})
        keep = [ppo.shard(ppo.Transformer(small), ranks, args, precision)]
        backward(keep[0])  # what torch takes at its first use is not the models'
        readings, sampler = [resident()], None
        for name, head in (("actor", "lm"), ("critic", "scalar"), ("reference", "lm")):
            model = ppo.Transformer(config, head)
            if name == "actor" and ranks.mesh is not None:
                sampler = ppo.unsharded(config, device, precision)
                ppo.copy_weights(model, sampler, ranks)
                copy = sum(p.numel() * p.element_size() for p in sampler.parameters())
            model = ppo.shard(model.requires_grad_(name != "reference"), ranks, args, precision)
            if name != "reference":
                learner = ppo.Learner(model, 1e-4, 1.0, 1, args)
                backward(model)
                learner.step({}, 0)
                backward(model)
                keep.append(learner)
            keep.append(model)
            readings.append(resident())
        if world.rank == 0:
            count = sum(p.numel() for p in ppo.Transformer(config).parameters())
            W, per = world.size, [(b - a) / count for a, b in itertools.pairwise(readings)]
            gathered = copy / count if sampler is not None else 0
            formulas = (16 / W + gathered, 16 / W, 4 / W)
            names = ("actor and rollout copy" if gathered else "actor, samples itself", "critic", "reference")
            for name, formula, measured in zip(names, formulas, per, strict=True):
                print(f"| {W} | {dtype} | {name} | {formula:.1f} | {measured:.1f} |", flush=True)
            print(f"| {W} | {dtype} | all | {sum(formulas):.1f} | {sum(per):.1f} |", flush=True)


def main() -> None:
    cpu = next(line for line in open("/proc/cpuinfo") if line.startswith("model name")).split(":")[1].strip()
    print(f"Rank 0 of W, {cpu}, torch {torch.__version__}, Python {platform.python_version()}\n")
    print("| W | forward passes in | model | formula, bytes per parameter | measured |", flush=True)
    print("|---|---|---|---|---|", flush=True)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    for dtype in ("float32", "bfloat16"):
        for count in (1, 2, 4):
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
            command = [sys.executable, *(launch if count > 1 else []), __file__, "--worker", dtype]
            subprocess.run(command, check=True, env=env)


if __name__ == "__main__":
    worker(sys.argv[2]) if "--worker" in sys.argv else main()
