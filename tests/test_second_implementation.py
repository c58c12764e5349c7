"""PPO a second time: sample by sample, in plain loops, with a model of transformers and none of the script's functions.

`ppo_by_hand` is given the models of the start and the episodes of the script's rollouts. After three iterations its
weights must be those of the script. A mask, a shift by one, a denominator or a sign that is wrong in the script would
have to be wrong here in the same way to go unnoticed.
"""

import copy
from unittest import mock

import environments  # noqa: F401
import pytest
import torch
import transformers

pytestmark = pytest.mark.shared


def logprobs_of(actor, ids: list[int], temperature: float):
    """log pi(ids[t] | ids[:t]) of t = 1, 2, ..., and the entropies of these distributions."""
    logprobs = (actor(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)
    return logprobs[torch.arange(len(ids) - 1), ids[1:]], -(logprobs.exp() * logprobs).sum(-1)


def values_of(critic, ids: list[int]):
    """Values of the states in which ids[t] was sampled, of t = 1, 2, ..."""
    return critic.score(critic.model(torch.tensor([ids])).last_hidden_state)[0, :-1, 0]


def gae(rewards: list[float], values: list[float], gamma: float, gae_lambda: float) -> list[float]:
    """Equation 16 of the paper, as the double sum that it is."""
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, [*values[1:], 0.0])]
    steps = range(len(deltas))
    return [sum((gamma * gae_lambda) ** (k - t) * deltas[k] for k in steps[t:]) for t in steps]


class Sample:
    """What is computed once, before any update: a number for each sampled token."""

    def __init__(self, episode, actor, critic, reference, args):
        self.ids = episode.ids
        tokens = [t for t, sampled in enumerate(episode.mask) if sampled]
        self.places = [t - 1 for t in tokens]  # in what logprobs_of and values_of return
        with torch.no_grad():
            self.old = logprobs_of(actor, self.ids, args.temperature)[0][self.places]
            self.reference = logprobs_of(reference, self.ids, args.temperature)[0][self.places]
            self.old_values = values_of(critic, self.ids)[self.places]
        recorded = torch.tensor([episode.logprobs[t] for t in tokens])
        assert torch.allclose(self.old, recorded, rtol=0, atol=1e-4)  # The sampler is the actor.
        rewards = [episode.rewards[t] for t in tokens]
        rewards[-1] -= args.truncation_penalty * (episode.stop == "length")
        if not args.kl_loss:
            rewards = [r - args.kl_coef * float(kl) for r, kl in zip(rewards, self.old - self.reference)]
        values = self.old_values.tolist()
        self.advantages = torch.tensor(gae(rewards, values, args.gamma, args.gae_lambda))
        returns = [a + v for a, v in zip(gae(rewards, values, args.gamma, args.critic_lambda), values)]
        self.returns = torch.tensor(returns)

    def actor_loss(self, actor, args):
        """A sum over the sampled tokens."""
        new, entropies = (x[self.places] for x in logprobs_of(actor, self.ids, args.temperature))
        ratio = (new - self.old).exp()
        clipped = ratio.clip(1 - args.clip_low, 1 + args.clip_high)
        losses = -torch.minimum(ratio * self.advantages, clipped * self.advantages)
        if args.dual_clip is not None:
            limited = torch.minimum(losses, -args.dual_clip * self.advantages)
            losses = torch.where(self.advantages < 0, limited, losses)
        if args.kl_loss == "k3":
            away = self.reference - new
            losses = losses + args.kl_coef * ratio.detach() * (away.exp() - 1 - away)
        return (losses - args.entropy_coef * entropies).sum()

    def critic_loss(self, critic, args):
        """A sum over the sampled tokens."""
        new = values_of(critic, self.ids)[self.places]
        errors = (new - self.returns) ** 2
        if args.value_clip is not None:
            near = self.old_values + (new - self.old_values).clip(-args.value_clip, args.value_clip)
            errors = torch.maximum(errors, (near - self.returns) ** 2)
        return errors.sum() / 2


def ppo_by_hand(actor, critic, reference, rollouts, args):
    """Train both models on the episodes of each rollout."""
    adam = {model: torch.optim.AdamW(model.parameters(), betas=(0.9, 0.999), weight_decay=0.0)
            for model in (actor, critic)}  # fmt: skip

    def epochs(model, loss_of, number, samples, first_rate, done, last):
        """`done` iterations with steps of this model are over, of `last`."""
        steps = number * len(samples) // args.train_batch_size
        for epoch in range(number):
            order = torch.Generator().manual_seed(((args.seed * 1_000_003 + i) * 1_000_003 + epoch) % 2**63)
            rows = torch.randperm(len(samples), generator=order).split(args.train_batch_size)
            for k, minibatch in enumerate(rows):
                progress = (done + (epoch * len(rows) + k) / steps) / last
                adam[model].param_groups[0]["lr"] = first_rate * (1 - (1 - args.lr_end) * progress)
                tokens = sum(len(samples[row].places) for row in minibatch)
                adam[model].zero_grad()
                (sum(loss_of(samples[row], model, args) for row in minibatch) / tokens).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                adam[model].step()

    for i, episodes in enumerate(rollouts):
        samples = [Sample(episode, actor, critic, reference, args) for episode in episodes]
        whole = torch.cat([sample.advantages for sample in samples])
        for sample in samples:
            sample.advantages = (sample.advantages - whole.mean()) / (whole.var() + 1e-8).sqrt()
        epochs(critic, Sample.critic_loss, args.critic_epochs, samples, args.critic_lr, i, args.num_iterations)
        if (done := i - args.critic_warmup_iterations) >= 0:
            last = args.num_iterations - args.critic_warmup_iterations
            epochs(actor, Sample.actor_loss, args.ppo_epochs, samples, args.actor_lr, done, last)


def of_transformers(model, kind):
    """The same weights in a model of transformers."""
    config = copy.deepcopy(model.config)
    config.num_labels, config.pad_token_id = 1, None  # transformers would not train the embedding of a padding token
    theirs = kind(config).eval()
    missing, _ = theirs.load_state_dict(model.state_dict(), strict=False)
    assert missing == []
    return theirs


SMALL = dict(num_iterations=3, rollout_batch_size=12, train_batch_size=4, sft_steps=0, eval_episodes=0, save_every=0,
             micro_batch_tokens=40, device="cpu")  # fmt: skip


@pytest.mark.parametrize("flags", [
    dict(env_id="environments:Plain-v0", max_new_tokens=6, kl_coef=0.3),
    dict(env_id="environments:DenseTurns-v0", gamma=0.9, gae_lambda=0.8, critic_lambda=0.95, kl_loss="k3",
         kl_coef=0.3, entropy_coef=0.2, value_clip=0.05, truncation_penalty=0.5, temperature=0.7, ppo_epochs=3,
         critic_epochs=1, critic_warmup_iterations=1, clip_low=0.05, clip_high=0.1, dual_clip=1.2, max_grad_norm=0.5,
         actor_lr=2e-3, max_new_tokens=12),
], ids=["nearly all defaults", "other flags"])  # fmt: skip
def test_weights_are_those_of_ppo_by_hand(ppo, tmp_path, flags):
    start, rollouts, make_experience = [], [], ppo.make_experience

    def watched(episodes, actor, critic, reference, state, args):
        if not start:
            kinds = transformers.LlamaForCausalLM, transformers.LlamaForSequenceClassification
            mine = of_transformers(actor, kinds[0]), of_transformers(critic, kinds[1])
            start.extend([*mine, of_transformers(reference, kinds[0]), actor, critic, args])
        rollouts.append(copy.deepcopy(episodes))
        return make_experience(episodes, actor, critic, reference, state, args)

    with mock.patch.object(ppo, "make_experience", watched):
        ppo.train(ppo.Args(**(SMALL | dict(log_dir=str(tmp_path), run_name="run") | flags)))
    actor, critic, reference, *theirs, args = start
    before = [copy.deepcopy(model) for model in (actor, critic)]
    ppo_by_hand(actor, critic, reference, rollouts, args)
    for first, mine, script in zip(before, (actor, critic), theirs):
        weights = dict(script.named_parameters())
        for name, p in mine.named_parameters():
            # Adam turns rounding into steps where a gradient is nearly 0, so single weights may differ.
            moved, apart = (p - first.get_parameter(name)).norm(), (p - weights[name]).norm()
            assert moved > 1e-3 and apart < 0.01 * moved, (name, float(moved), float(apart))
