"""What torch.compile launches on a GPU, without one: `python benchmarks/launches.py`. See tests/deviceless.py.

Decode steps of 256 rows with 500 tokens, and a block on 16 samples of 256 tokens, in bfloat16."""

import functools
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("ARCH", "90")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import deviceless
import simulated_cuda
import test_triton

SIZES = {"0.5B": (24, [896, 4864, 14, 2, 151936]), "7B": (28, [3584, 18944, 28, 4, 152064])}
BLOCK = [[256] * 16]


def product(name, *args, out):
    """A matrix product, which is not computed, since no kernel has written its operands."""
    simulated_cuda.calls[f"aten::{name}"] += 1
    return out


def launched(function, *args):
    """(Triton kernels, other operations, megabytes that the former move), and the most that a kernel uses."""
    deviceless.launches.clear(), simulated_cuda.calls.clear()
    function("ppo_llm", "cuda", *args)
    others = sum(n for name, n in simulated_cuda.calls.items() if re.search("mm$|attention|scatter|_add$", name))
    megabytes = sum(kernel.inductor_meta["kernel_num_gb"] for kernel in deviceless.launches) * 1000
    worst = [max(column) for column in zip(*map(deviceless.usage, deviceless.launches))]
    return (len(deviceless.launches), others, megabytes), worst


def main():
    deviceless.config.benchmark_kernel = True  # Inductor then estimates how many bytes a kernel moves
    for name in "mm", "bmm", "addmm":
        deviceless.library.impl(f"{name}.out", functools.partial(product, name), "CUDA")
    print("| model | what | Triton kernels | other launches | MB of the former | registers, stack, shared memory |")
    print("|" + "---|" * 6)
    for model, (layers, size) in SIZES.items():
        decode = functools.partial(launched, test_triton.decode, "bfloat16")
        (one, _), (two, worst) = (decode(count, size, 256, 500, 1) for count in (1, 2))
        decoding = [f"{2 * a - b:.4g} + {b - a:.4g} x {layers}" for a, b in zip(one, two)]
        numbers, most = launched(test_triton.blocks, BLOCK, "bfloat16", 1, [*size[:4], 24])
        print("|", " | ".join([model, "a decode step", *decoding, str(worst)]), "|")
        in_block = [f"{x:.4g}" for x in numbers]
        print("|", " | ".join([model, "a block, both passes", *in_block, str(most)]), "|", flush=True)


if __name__ == "__main__":
    main()
