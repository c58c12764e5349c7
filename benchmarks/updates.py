"""What each technique gives to the updates of `ppo_llm.py`: a ladder, and the operators that take the time.

    python benchmarks/updates.py              # CPU, one thread, float32, some minutes
    python benchmarks/updates.py smoke        # seconds: does it run

An epoch of critic and actor over one rollout, by the script's own functions: a random Qwen2, prompts of one length,
log-normal responses. A rung has all that those above it have. In turn in one process, each rung tried once before.
"""

import contextlib
import functools
import statistics
import sys
import time
from unittest import mock

import common
import torch
import torch.nn.functional as F
from common import ppo_llm

CPU = dict(shape=common.SMALL, samples=32, minibatches=2, prompt=32, mean=64, longest=256, budget=2048, repeats=5)
SMOKE = dict(shape=common.TINY, samples=8, minibatches=2, prompt=4, mean=4, longest=8, budget=32, repeats=1)


def everywhere(model, tokens, mask, temperature=1.0):
    """`at_sampled` with the head at all positions."""
    out = model(tokens)[:, :-1]  # [B, T - 1, V] or [B, T - 1]
    if model.head == "scalar":
        return F.pad(out, (1, 0)) * mask, None
    logprobs = F.log_softmax(out.float() / temperature, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logprobs.gather(2, tokens[:, 1:, None])[..., 0]
    return F.pad(chosen, (1, 0)) * mask, F.pad(entropy, (1, 0)) * mask


def at_once(hidden, weight, targets, temperature=1.0):
    """`token_logprobs` without chunks."""
    logprobs = F.log_softmax((hidden @ weight.T).float() / temperature, dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def by_budget(indices, lengths, token_budget):
    """`microbatches` without a limit of padding."""
    order, cuts, first = indices[lengths[indices].argsort(descending=True, stable=True)], [], 0
    for i in range(1, len(order)):
        if (i + 1 - first) * int(lengths[order[first]]) > token_budget:
            cuts, first = [*cuts, i], i
    return list(order.tensor_split(cuts))


def to_the_longest(rows, lengths, *tensors):
    """`crop` that does not."""
    return [x[rows] for x in tensors]


unfused = functools.partial(torch.optim.AdamW, weight_decay=0.0, fused=False)
# What a rung adds to the one above, and what stands in for it above: (module, name, substitute).
LADDER = [
    ("padded to the longest row, logits of all positions", None),
    ("logits where a token was sampled", (ppo_llm, "at_sampled", everywhere)),
    ("log-probs in chunks, computed again", (ppo_llm, "token_logprobs", at_once)),
    ("padded to the longest row of the minibatch", (ppo_llm, "crop", to_the_longest)),
    ("rows of like length, cut by the budget", (ppo_llm, "microbatches", lambda indices, *rest: [indices])),
    ("cut where padding exceeds a sixteenth", (ppo_llm, "microbatches", by_budget)),
    ("fused AdamW", (torch.optim, "AdamW", lambda parameters, lr, **_: unfused(parameters, lr=lr))),
    ("compiled blocks (`--compile on`)", ()),
]


class Rung:
    """Models and a rollout of their own."""

    def __init__(self, number, shape, samples, minibatches, prompt, mean, longest, budget, repeats):
        self.patches = [entry for _, entry in LADDER[number + 1 :] if entry]
        raw = dict(model_type="qwen2", tie_word_embeddings=True, max_position_embeddings=prompt + longest, **shape)
        last = number == len(LADDER) - 1
        self.args = ppo_llm.Args(train_batch_size=samples // minibatches, micro_batch_tokens=budget,
                                 compile="on" if last else "off")  # fmt: skip
        torch.manual_seed(0)
        actor = ppo_llm.Transformer(ppo_llm.ModelConfig.from_hf(raw))
        ranks = ppo_llm.Ranks([0], torch.device("cpu"))
        self.lengths = prompt + torch.tensor(common.forced_lengths("log-normal", samples, mean, longest))
        self.tokens = torch.randint(shape["vocab_size"], (samples, prompt + longest))
        columns = torch.arange(prompt + longest)
        self.mask = (columns >= prompt) & (columns < self.lengths[:, None])
        self.targets = torch.randn(self.mask.shape) * self.mask
        models, self.samples = [ppo_llm.critic_from(actor), actor], samples
        models = [ppo_llm.shard(model, ranks, self.args, torch.float32) for model in models]
        with self.patched():
            self.learners = [ppo_llm.Learner(model, 1e-5, 1.0, 1000, self.args) for model in models]

    def patched(self):
        stack = contextlib.ExitStack()
        for module, name, substitute in reversed(self.patches):  # of two for one name the first holds
            stack.enter_context(mock.patch.object(module, name, substitute))
        return stack

    def epoch(self) -> list[float]:
        """The losses of critic and actor, summed over microbatches and minibatches."""
        losses, (critic, actor) = [0.0, 0.0], (learner.model for learner in self.learners)
        with self.patched():
            for i, (model, learner) in enumerate(zip((critic, actor), self.learners, strict=True)):
                for minibatch in ppo_llm.shuffled_minibatches(self.args, self.samples, 0, 0):
                    denom = int(self.mask[minibatch].sum())
                    for rows in model.ranks.microbatches(minibatch, self.lengths, self.args.micro_batch_tokens):
                        tokens, mask, targets = ppo_llm.crop(rows, self.lengths, self.tokens, self.mask, self.targets)
                        out, _ = ppo_llm.at_sampled(model, tokens, mask)
                        if i == 0:
                            loss = ppo_llm.value_loss(out, out.detach(), targets, mask, 0.2, denom)
                        else:
                            loss, _ = ppo_llm.policy_loss(out, out.detach(), targets, mask, 0.2, 0.2, denom=denom)
                        loss.backward()
                        losses[i] += float(loss)
                    learner.step({}, denom)
        return losses


def main():
    settings = SMOKE if "smoke" in sys.argv else CPU
    torch.set_num_threads(1)
    rungs = {name: Rung(i, **settings) for i, (name, _) in enumerate(LADDER)}
    sizes = ", ".join(f"{key} {value}" for key, value in (settings["shape"] | settings).items() if key != "shape")
    print(f"{sizes}; {common.hardware()}\n", flush=True)
    first, *others = [rung.epoch() for rung in rungs.values()]  # also compiles
    for losses in others:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(first), rtol=1e-3, atol=1e-4)
    next(reversed(rungs.values())).epoch()  # may compile for shapes that vary
    seconds = {name: [] for name in rungs}
    for _ in range(settings["repeats"]):
        for name, rung in rungs.items():
            start = time.perf_counter()
            rung.epoch()
            seconds[name].append(time.perf_counter() - start)
    common.table(["each with all above", "seconds, median (range)", "of the first", "of the one above"])
    above = first = next(iter(seconds.values()))
    for name, mine in seconds.items():
        gains = [statistics.median(a / b for a, b in zip(other, mine, strict=True)) for other in (first, above)]
        common.line([name, common.spread(mine), *(f"{gain:.2f} x" for gain in gains)])
        above = mine
    names = [*rungs]
    for name in (names[0], names[-2], names[-1]):
        print(f"\n{name}: {common.operators(rungs[name].epoch)}")


if __name__ == "__main__":
    main()
