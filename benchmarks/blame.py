"""Which token is to blame, and what does each digit's KL cost? Counted in the tokens.jsonl of a run that sorts digits.

    python ppo_llm.py --env-id benchmarks.tasks:Prefix-v0 --env-kwargs '{"digits": 8}' --num-iterations 60 \\
        --max-prompt-tokens 9 --max-new-tokens 10 --run-name prefix
    python benchmarks/blame.py runs/prefix 31       # from iteration 31 on

It counts the first four samples of each iteration, and leaves out the one that was chosen for its low reward. Standard
library only.
"""

import json
import math
import statistics
import sys
from pathlib import Path

import look


def td_errors(tensors: dict, args: dict) -> list[float]:
    """reward - penalty + gamma * next value - value, for each sampled token."""
    rewards = tensors["rewards"]
    if args["kl_coef"] and not args["kl_loss"]:
        kls = [a - b for a, b in zip(tensors["old_logprobs"], tensors["ref_logprobs"], strict=True)]
        rewards = [r - args["kl_coef"] * kl for r, kl in zip(rewards, kls, strict=True)]
    values = [*tensors["values"], 0.0]
    return [r + args["gamma"] * values[i + 1] - values[i] for i, r in enumerate(rewards)]


def advantages(deltas: list[float], args: dict, lam: float) -> list[float]:
    """The sums of GAE, not whitened."""
    result = [0.0]
    for delta in reversed(deltas):
        result.append(delta + args["gamma"] * lam * result[-1])
    return result[:0:-1]


def share(numbers: list[float]) -> str:
    return f"{sum(x < 0 for x in numbers) / len(numbers):.0%} of {len(numbers)}" if numbers else "none"


def main(folder: Path, first: int):
    args = look.read_json(folder / "config.json").get("args")
    if args is None:
        sys.exit(f"{folder} has no config.json with the flags of a run: is it the folder of a run?")
    samples = [row for row in look.read_lines(folder / "tokens.jsonl") if row["iteration"] >= first - 1]
    kinds = "right, not the last right one", "the last right one", "the first wrong one"
    quantities = "TD error", "advantage at lambda 0.5", "advantage at lambda 1"
    found = {(kind, quantity): [] for kind in kinds for quantity in quantities}
    kls = {}
    for sample in samples:
        if "chosen" in sample or not sample["tensors"]:
            continue
        start, tensors = sample["response_starts"][0], sample["tensors"]
        digits = sorted(x for x in sample["text"][:start] if x.isdigit())
        response = sample["text"][start:]
        right = next((i for i, x in enumerate(digits) if response[i : i + 1] != [x]), len(digits))
        if "ref_logprobs" in tensors:
            for place, text in enumerate(response):
                kl = tensors["old_logprobs"][place] - tensors["ref_logprobs"][place]
                kls.setdefault("end" if text == "<eos>" else place + 1, []).append(kl)
        if right == len(digits) or right == len(response):
            continue  # There is no wrong digit.
        deltas = td_errors(tensors, args)
        for quantity, lam in zip(quantities, (0.0, 0.5, 1.0), strict=True):
            numbers = advantages(deltas, args, lam)
            for i in range(right + 1):
                found[kinds[2 if i == right else 1 if i == right - 1 else 0], quantity].append(numbers[i])
    print(f"{folder}, from iteration {first} on: share of the digits with a negative number\n")
    print(f"| digit | {' | '.join(quantities)} |\n{'|---' * 4}|")
    for kind in kinds:
        print(f"| {kind} | {' | '.join(share(found[kind, quantity]) for quantity in quantities)} |")
    print("\n| place | mean KL | samples |\n|---|---|---|")
    for place in sorted(kls, key=lambda x: (x == "end", x)):
        print(f"| {place} | {statistics.mean(kls[place]):.2f} | {len(kls[place])} |")
    n = args["env_kwargs"] and json.loads(args["env_kwargs"]).get("digits", 5)
    print(f"\nThe logarithms of {n} to 1 are {', '.join(f'{math.log(k):.2f}' for k in range(n, 0, -1))}.")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
