"""Processed over real tokens: rows sorted by length and cut, against cuts by the budget alone, and against none.

    python benchmarks/padding.py              # a second
"""

import common
import torch
from common import ppo_llm

SAMPLES, PROMPT, MEAN, LONGEST = 4096, 128, 256, 2048


def main():
    print(f"{SAMPLES} rows, prompts of {PROMPT} tokens, responses of mean {MEAN} and at most {LONGEST}; log-normal "
          "with sigma 1\n")  # fmt: skip
    common.table(["lengths", "minibatch", "--micro-batch-tokens", "ranks", "processed / real tokens",
                  "cut by the budget alone", "all padded"])  # fmt: skip
    for name in ("log-normal", "exponential", "uniform"):
        lengths = PROMPT + torch.tensor(common.forced_lengths(name, SAMPLES, MEAN, LONGEST))
        for minibatch, budget, ranks in [(256, 16384, 1), (256, 65536, 1), (64, 16384, 1), (256, 16384, 8)]:
            processed = padded = uncut = 0
            for rows in torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0)).split(minibatch):
                for rank in range(ranks):
                    team = ppo_llm.Ranks(range(ranks), torch.device("cpu"))
                    team.rank = rank
                    parts = team.microbatches(rows, lengths, budget)
                    processed += sum(len(part) * int(lengths[part].max()) for part in parts if len(part))
                    order = sorted((int(lengths[row]) for part in parts for row in part), reverse=True)
                    while order:
                        fit = max(1, budget // order[0])
                        uncut += order[0] * len(order[:fit])
                        order = order[fit:]
                padded += minibatch * int(lengths[rows].max())
            real = int(lengths.sum())
            ratios = [f"{x / real:.2f}" for x in (processed, uncut, padded)]
            common.line([name, minibatch, f"{budget:,}", ranks, *ratios])


if __name__ == "__main__":
    main()
