"""Memory and time of the chunked log-probabilities against full logits, forward and backward.

    python benchmarks/token_logprobs.py [positions] [vocabulary] [width]
    python benchmarks/token_logprobs.py real FOLDER [positions]    # weight: the head of a Hugging Face checkpoint

Each side's memory is measured in a process of its own (peak resident memory above what the inputs took, or the GPU's
allocator), which depends on shapes alone and is therefore always that of a random weight; time in one process, both
sides in turn, median of the pairs' ratios.
"""

import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
from ppo_llm import load_config, load_hf_checkpoint, token_logprobs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def peak_memory() -> int:
    """Bytes; ru_maxrss counts KiB on Linux."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def full_logits(hidden, weight, targets, temperature):
    logprobs = F.log_softmax((hidden @ weight.T).float() / temperature, dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def step(function, hidden, weight, targets):
    hidden.grad = weight.grad = None
    logprobs, entropy = function(hidden, weight, targets, 0.9)
    (logprobs.sum() + 0.01 * entropy.sum()).backward()
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def inputs(n, vocabulary, width, weight=None):
    torch.manual_seed(0)
    hidden = torch.randn(n, width, device=DEVICE, requires_grad=True)
    if weight is None:
        weight = torch.randn(vocabulary, width, device=DEVICE) / width**0.5
    return hidden, weight.requires_grad_(), torch.randint(vocabulary, (n,), device=DEVICE)


def main():
    real = sys.argv[1:2] == ["real"]
    if real:
        config = load_config(sys.argv[2])
        sizes = [int(sys.argv[3]) if len(sys.argv) > 3 else 4096, config.vocab_size, config.hidden_size]
    else:
        sizes = [int(x) for x in sys.argv[1:4]] or [4096, 32000, 512]
    sides = {"full": full_logits, "chunked": token_logprobs}
    if not real and len(sys.argv) > 4:  # the child process: print the peak of one side
        data = inputs(*sizes)
        step(sides[sys.argv[4]], *inputs(16, 64, 16))  # load what a first backward loads
        before = peak_memory()
        step(sides[sys.argv[4]], *data)
        print(peak_memory() - before)
        return
    memory = {}
    for side in sides:  # before this process grows: on Linux the peak of a child begins at that of its parent
        command = [sys.executable, __file__, *map(str, sizes), side]
        memory[side] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1e6
    weight = None  # random
    if real:
        actor, _ = load_hf_checkpoint(sys.argv[2])
        weight = actor.lm_head.weight.detach().to(DEVICE)
    data, times = inputs(*sizes, weight), {side: [] for side in sides}
    gradients = {}
    for repeat in range(6):
        for side, function in sides.items():
            start = time.perf_counter()
            step(function, *data)
            if repeat:  # the first is a warm-up
                times[side].append(time.perf_counter() - start)
            gradients[side] = [x.grad.clone() for x in data[:2]]
    error = max(float((a - b).abs().max()) for a, b in zip(*gradients.values(), strict=True))
    ratios = [c / f for c, f in zip(times["chunked"], times["full"], strict=True)]
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{sizes[0]} positions, vocabulary {sizes[1]}, width {sizes[2]}, float32; {device}, "
        f"torch {torch.__version__}, Python {platform.python_version()}\n"
    )
    print("| | peak memory, MB | time, s (median) |\n|---|---|---|")
    for side in sides:
        print(f"| {side} | {memory[side]:.0f} | {statistics.median(times[side]):.3f} |")
    print(
        f"\nmemory full / chunked {memory['full'] / max(memory['chunked'], 1e-3):.1f} x, time chunked / full "
        f"{statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f}), "
        f"largest difference of gradients {error:.1e}"
    )


main()
