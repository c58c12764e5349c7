"""What torch.compile launches on a GPU, counted without one (see tests/deviceless.py).

    python benchmarks/launches.py                    # all parts: decode update head compile
    python benchmarks/launches.py decode             # some of them

Prints a line for each part of a 0.5B and of a 7B. decode: a step of 256 rows with 500 tokens, counted with one and two
layers. update: 16 samples of 256 tokens, forward and backward, with one layer and none. head: a chunk of
token_logprobs, forward, once more, and backward. compile: seconds that a decode step takes to compile. All in bfloat16.
Megabytes are what Triton kernels read and write, each pass over a tensor counted, as if there were no caches.
"""

import functools
import os
import re
import sys
import time
from pathlib import Path

os.environ.setdefault("ARCH", "90")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import deviceless
import simulated_cuda
import test_triton
import torch

SIZES = {"0.5B": (24, [896, 4864, 14, 2, 151936]), "7B": (28, [3584, 18944, 28, 4, 152064])}
PARTS = "decode update head compile".split()


def product(name, *args, out):
    """A matrix product, which is not computed, since no kernel has written its operands."""
    simulated_cuda.calls[f"aten::{name}"] += 1
    return out


def launched(function, *args):
    """(Triton kernels, other operations, megabytes that the former move), and the most stack that a kernel takes."""
    deviceless.launches.clear(), simulated_cuda.calls.clear()
    function("ppo_llm", "cuda", *args)
    others = sum(n for name, n in simulated_cuda.calls.items() if re.search("mm$|attention|scatter|_add$", name))
    kernels, sizes = zip(*deviceless.launches, strict=True)
    return (len(kernels), others, sum(sizes) / 1e6), max(map(deviceless.stack, kernels))


def line(*cells):
    print("|", " | ".join(f"{x:.4g}" if isinstance(x, float | int) else str(x) for x in cells), "|", flush=True)


def main():
    parts = sys.argv[1:] or PARTS
    for name in "mm", "bmm", "addmm":
        deviceless.library.impl(f"{name}.out", functools.partial(product, name), "CUDA")
    line("model", "what", "Triton kernels", "other launches", "MB of the former", "bytes of stack")
    print("|" + "---|" * 6)
    for model, (layers, size) in SIZES.items():
        decode = functools.partial(launched, test_triton.decode, "bfloat16")
        if "decode" in parts:
            (one, _), (two, worst) = (decode(count, size, 256, 500, 1) for count in (1, 2))
            counted = [f"{2 * a - b:.4g} + {b - a:.4g} x {layers}" for a, b in zip(one, two, strict=True)]
            line(model, "a decode step", *counted, worst)
        update = functools.partial(launched, test_triton.update)
        if "update" in parts:
            (none, _), (one, worst) = (update([[256] * 16], "bfloat16", count, [*size[:4], 24]) for count in (0, 1))
            line(model, "a block, both passes", *(b - a for a, b in zip(none, one, strict=True)), worst)
        if "head" in parts:
            rows = 2**26 // size[4]  # as token_logprobs cuts them
            numbers, worst = update([[rows + 1]], "bfloat16", 0, size)
            line(model, f"a chunk of the head, {rows} rows, three passes", *numbers, worst)
        for count in (2, 8, 24) if "compile" in parts else ():
            torch.compiler.reset()
            start = time.process_time()
            decode(count, [*size[:4], 8192], 64, 100, 1)
            line(model, f"a decode step of {count} layers: {time.process_time() - start:.1f} s of a CPU to compile")


if __name__ == "__main__":
    main()
