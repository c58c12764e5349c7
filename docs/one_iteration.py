"""One iteration by hand: three short samples through KL, rewards, GAE, whitening, ratio and losses.

    python docs/one_iteration.py    # half a minute of one core

First the built-in model learns to sort three digits for six iterations, so that neither the KL nor
the values are 0. Then three samples go through one iteration, as a single minibatch, for two
epochs. The script prints the tensors of that iteration, each [3, T]. It computes every tensor that
follows from earlier ones by itself, and asserts that `ppo_llm.py` has used the same numbers. In
between stands a made-up response that shows what lambda does to the blame for a bad token.
"""

import contextlib
import io
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo_llm

FLAGS = dict(
    env_kwargs='{"digits": 3}', max_prompt_tokens=4, max_new_tokens=5, eval_episodes=0, device="cpu"
)


def recorded(function, calls: list):
    """A function that does the same, and appends (arguments, result) to `calls`."""

    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        calls.append((args, result))
        return result

    return call


def train() -> tuple[list, list, list]:
    """The calls of make_experience, policy_loss and value_loss in the iteration of the page."""
    calls = {"make_experience": [], "policy_loss": [], "value_loss": []}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        ppo_llm.train(ppo_llm.Args(
            log_dir=folder, run_name="first", num_iterations=6, save_every=6, **FLAGS,
        ))  # fmt: skip
        for name, found in calls.items():
            wrapped = recorded(getattr(ppo_llm, name), found)
            stack.enter_context(patch.object(ppo_llm, name, wrapped))
        # With lr_end=1 the learning rates are those of the start.
        ppo_llm.train(ppo_llm.Args(
            log_dir=folder, run_name="second", resume=f"{folder}/first/checkpoints/iter_000006",
            num_iterations=7, save_every=0, lr_end=1.0, rollout_batch_size=3, train_batch_size=3,
            **FLAGS,
        ))  # fmt: skip
    return tuple(calls.values())


def number(x: float, digits: int) -> str:
    """The number in decimal notation. A zero has no sign."""
    return f"{round(x, digits) + 0.0:.{digits}f}"


def show(title: str, x: torch.Tensor, mask: torch.Tensor):
    """Print [3, T], with a dot where the mask is False."""
    print(f"\n{title}")
    for row, sampled in zip(x.tolist(), mask.tolist(), strict=True):
        cells = [number(n, 3) if s else "." for n, s in zip(row, sampled, strict=True)]
        print("".join(f"{cell:>8}" for cell in cells))


def check(mine: torch.Tensor, its: torch.Tensor):
    torch.testing.assert_close(mine, its.detach(), rtol=1e-4, atol=1e-5)


def show_blame():
    """Advantages of a response that earns 0 because of its third token, for several lambdas."""
    values, mask = torch.tensor([[0.7, 0.7, 0.7, 0.1]]), torch.ones(1, 4).bool()
    rewards = torch.zeros(1, 4)
    show("values of a response that earns 0, and whose third token is the bad one", values, mask)
    deltas = rewards + F.pad(values[:, 1:], (0, 1)) - values
    for gae_lambda in (1.0, 0.5, 0.0):
        mine = torch.stack([  # delta[t] + lambda * delta[t + 1] + lambda^2 * delta[t + 2] + ...
            sum(gae_lambda ** (later - t) * deltas[:, later] for later in range(t, 4))
            for t in range(4)
        ], 1)  # fmt: skip
        check(mine, ppo_llm.compute_gae(rewards, values, mask, 1.0, gae_lambda)[0])
        show(f"advantages, lambda {gae_lambda}", mine, mask)


def main():
    [(call_args, experience)], policy_calls, value_calls = train()
    args, e, mask = ppo_llm.Args(), experience, experience.mask
    n_tokens = int(mask.sum())

    print("tokens")
    for episode in call_args[0]:
        text = "".join(message["content"] for message in episode.conversation)
        print("".join(f"{token:>8}" for token in [*text, "<eos>"]))
    print("\nmask")
    for row in mask.tolist():
        print("".join(f"{int(sampled):>8}" for sampled in row))

    show("old log-probs", e.old_logprobs, mask)
    show("reference's log-probs", e.ref_logprobs, mask)
    kl = e.old_logprobs - e.ref_logprobs
    show("KL (k1) = old - reference", kl, mask)

    show("rewards", e.rewards, mask)
    rewards = e.rewards - args.kl_coef * kl
    show(f"rewards - {args.kl_coef} * KL", rewards, mask)

    show("values", e.values, mask)
    returns = torch.where(mask, rewards, 0.0).flip(1).cumsum(1).flip(1)
    check(returns[mask], e.returns[mask])
    show("returns = sum of the rewards from here on (gamma and lambda are 1)", returns, mask)

    advantages = returns - e.values
    show("advantages = returns - values", advantages, mask)
    mean, std = advantages[mask].mean(), advantages[mask].std()
    print(f"mean {mean:.3f}, standard deviation {std:.3f} over {n_tokens} tokens")
    whitened = (advantages - mean) / std
    check(whitened[mask], e.advantages[mask])
    show("whitened advantages", whitened, mask)
    show_blame()

    for epoch, ((new, old, *_), (loss, _)) in enumerate(policy_calls, start=1):
        # A minibatch has the samples in another order.
        order = torch.cdist(e.old_logprobs, old).argmin(1)
        ratio = (new.detach()[order] - e.old_logprobs).exp()
        show(f"actor, epoch {epoch}: ratio = exp(new - old)", ratio, mask)
        clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
        losses = -torch.minimum(ratio * whitened, clipped * whitened)
        show("losses = -min(ratio * advantage, clipped ratio * advantage)", losses, mask)
        mine = losses[mask].sum() / n_tokens
        check(mine, loss)
        print(f"sum / {n_tokens} tokens = {number(float(mine), 4)}")

    for epoch, ((new, old, *_), (loss, _)) in enumerate(value_calls, start=1):
        order = torch.cdist(e.values, old).argmin(1)
        values = new.detach()[order]
        show(f"critic, epoch {epoch}: values", values, mask)
        mine = 0.5 * (values - returns)[mask].square().sum() / n_tokens
        check(mine, loss)
        print(f"sum of 0.5 * (value - return)^2 / {n_tokens} tokens = {number(float(mine), 4)}")


if __name__ == "__main__":
    main()
