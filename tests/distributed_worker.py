"""What test_distributed.py runs on every rank: `torchrun distributed_worker.py SCRIPT FOLDER`.

FOLDER/plan.json lists [name, check, flags]; each rank leaves what check(ppo, folder, name, flags) returns in
<name>.<rank>.pt. The checks run in a single process too, without torchrun. All of one launch share a process group.
"""

import contextlib
import datetime
import functools
import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path
from unittest import mock

import gymnasium as gym
import torch
import torch.distributed as dist
from environments import TextEnv
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

RANK = int(os.environ.get("RANK", 0))


class RaisesAtSeed(TextEnv):
    """Breaks down at one seed, so that one rank alone sees it."""

    def __init__(self, bad=0):
        self.bad = bad

    def turn(self, response):
        if self.seed == self.bad:
            raise RuntimeError("the judge is out of order")
        return super().turn(response)


gym.register("RaisesAtSeed-v0", entry_point=RaisesAtSeed)


def full(x):
    """All of a tensor that may be sharded, as a copy."""
    return x.full_tensor().clone() if isinstance(x, DTensor) else x.detach().clone()


def state(model):
    return {name: full(p.detach()) for name, p in model.named_parameters()}


class Patches(contextlib.ExitStack):
    """p.wrap(owner, name, f): owner.name(*args) becomes f(original, *args) until the end of the block."""

    def wrap(self, owner, name, f):
        original = getattr(owner, name)
        self.enter_context(mock.patch.object(owner, name, functools.wraps(original)(functools.partial(f, original))))

    def wrap_method(self, cls, name, f):
        original = getattr(cls, name)
        self.enter_context(mock.patch.object(cls, name, lambda self, *args, **kw: f(original, self, *args, **kw)))


def train(ppo, folder, name, flags):
    with mock.patch.object(ppo, "SummaryWriter", lambda *args, **kwargs: mock.Mock()):
        return ppo.train(ppo.Args(log_dir=str(folder), run_name=name, **flags))


# --- A whole run: files in folder/name, and what can be seen of it from inside


def whole_run(ppo, folder, name, flags):
    """A run and what it did, in its loop, on this rank."""
    seen = {"heads": [], "seeds": [], "samplers": [], "own_kl": [], "steps": [], "dtypes": set(), "models": []}
    actors = []

    def shard(original, model, *rest):
        seen["heads"].append(model.head)
        model = original(model, *rest)
        if model.head == "lm" and not actors:
            actors.append(model)
        return model

    def rollout(original, actor, tokenizer, envs, seeds, sample_ids, args, iteration, greedy=False):
        seen["seeds"].append((iteration, greedy, list(seeds), list(sample_ids)))
        return original(actor, tokenizer, envs, seeds, sample_ids, args, iteration, greedy)

    def shared_rollout(original, world, signals, sampler, tokenizer, envs, seeds, args, iteration, greedy=False):
        batch = original(world, signals, sampler, tokenizer, envs, seeds, args, iteration, greedy)
        entry = {"iteration": iteration, "pointers": [p.data_ptr() for p in sampler.parameters()]}
        entry["dtypes"] = {p.dtype for p in sampler.parameters()}
        entry["rope"] = sampler.rope.dtype
        if actors:
            weights = state(actors[0])
            entry["equal"] = all(torch.equal(weights[k].to(p.dtype), p) for k, p in sampler.named_parameters())
            entry["norm"] = float(sum(w.double().square().sum() for w in weights.values()))
            if greedy and sampler is not actors[0]:
                plain = ppo.Transformer(sampler.config)
                plain.load_state_dict(weights)
                alone = ppo.rollout.__wrapped__(
                    plain, tokenizer, envs, list(seeds), range(len(seeds)), args, iteration, True
                )
                entry["greedy_equal"] = alone.texts == batch.texts
                del plain
        gc.collect()
        held = [x for x in gc.get_objects() if issubclass(type(x), ppo.Transformer) and x is not sampler]
        held = [x for x in held if not any(p.is_meta for p in x.parameters())]
        seen["models"] = sorted({(x.head, isinstance(x, FSDPModule)) for x in held})
        seen["samplers"].append(entry)
        return batch

    def total(original, ranks, parts):
        result = original(ranks, parts)
        if "approx_kl" in parts[0]:
            seen["own_kl"].append((sum(float(part["approx_kl"]) for part in parts), result["approx_kl"]))
        return result

    def step(original, learner, *rest):
        seen["dtypes"] |= {("gradient", p.grad.dtype) for p in learner.model.parameters()}
        result = original(learner, *rest)
        seen["steps"].append((learner.model.head, time.time()))
        seen["dtypes"] |= {("weight", p.dtype) for p in learner.model.parameters()}
        states = learner.optimizer.state.values()
        seen["dtypes"] |= {("moment", x.dtype) for entry in states for key, x in entry.items() if key != "step"}
        return result

    def forward(original, model, *rest, **kwargs):
        if model.head == "lm":
            return original(model, *rest, **kwargs)
        look = lambda score, inputs, out: seen["dtypes"].update(
            ("value head", x.dtype) for x in (inputs[0], score.weight, out)
        )
        hook = model.score.register_forward_hook(look)
        out = original(model, *rest, **kwargs)
        hook.remove()
        return out

    def collective(original, *args, **kwargs):
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        seen["dtypes"] |= {("reduced", x.dtype) for x in tensors}
        return original(*args, **kwargs)

    with Patches() as p:
        p.wrap(ppo, "shard", shard)
        p.wrap(ppo, "rollout", rollout)
        p.wrap(ppo, "shared_rollout", shared_rollout)
        p.wrap_method(ppo.Ranks, "total", total)
        p.wrap_method(ppo.Learner, "step", step)
        p.wrap_method(ppo.Transformer, "forward", forward)
        for name_in_version in {"reduce_scatter_tensor", "reduce_scatter_single"} & {*dir(dist)}:
            p.wrap(dist, name_in_version, collective)
        # With AdamW's 1e-8, a gradient that is zero but for rounding becomes a first step of up to the learning rate.
        p.enter_context(mock.patch.object(torch.optim, "AdamW", functools.partial(torch.optim.AdamW, eps=1e-6)))
        train(ppo, folder, name, flags)
    return seen


# --- Updates on made-up samples


def made_up(ppo, long, original, actor, tokenizer, envs, seeds, sample_ids, args, iteration, greedy=False):
    """A rollout of random tokens: `long`(sample) gets max_new_tokens, the others one token."""
    size, prompt = args.max_new_tokens, 4
    counts = [size if long(i) else 1 for i in sample_ids]
    T = prompt + max(counts)
    shape = (len(counts), T)
    tokens, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    rewards = torch.zeros(shape)
    for row, (i, count) in enumerate(zip(sample_ids, counts, strict=True)):
        generator = torch.Generator().manual_seed(1000 + i)
        end = prompt + count
        tokens[row, :end] = torch.randint(actor.config.vocab_size, (end,), generator=generator)
        mask[row, prompt:end] = True
        rewards[row, end - 1] = torch.randn((), generator=generator)
    lengths, n = torch.tensor([prompt + count for count in counts]), len(counts)
    return ppo.Rollout(tokens, mask, -1.0 * mask, rewards, lengths, ["eos"] * n, ["x"] * n, {}, ["p="] * n, [True] * n)


def unfair(ppo, original, ranks, rows, lengths, token_budget):
    """Instead of Ranks.microbatches: the shortest rows to rank 0, the longest to the last."""
    order = rows[lengths[rows].argsort(stable=True)]
    shares = [order[len(order) * i // ranks.size : len(order) * (i + 1) // ranks.size] for i in range(ranks.size)]
    groups = [ppo.microbatches(share, lengths, token_budget) for share in shares]
    mine = groups[ranks.ranks.index(ranks.rank)]
    return mine + [rows[:0]] * (max(map(len, groups)) - len(mine))


def updates(ppo, folder, name, flags):
    """The gradients of every optimizer step, as they are before it: [(head, loss, tokens, {name: gradient})].

    `long`: every so manieth sample is long; `huge`: only that one is; `unfair`: how rows are dealt out.
    """
    flags = dict(num_iterations=1, sft_steps=0, eval_episodes=2, save_every=0, max_new_tokens=24) | flags
    every, huge, dealt, noise = (flags.pop(key, None) for key in ("long", "huge", "unfair", "nan"))
    seen = {"steps": [], "calls": [], "empty": 0, "skipped": []}

    def step(original, learner, stats, *rest):
        head, model = learner.model.head, learner.model
        count = sum(entry[0] == head for entry in seen["steps"])
        if noise and noise["head"] == head and noise["step"] == count and RANK == noise["rank"]:
            gradient = ppo.local(model.model.layers[1].mlp.up_proj.weight.grad)
            gradient.view(-1)[0] = torch.nan
        seen["steps"].append((head, stats, rest, {k: full(p.grad) for k, p in model.named_parameters()}))
        before = [ppo.local(p.detach()).clone() for p in model.parameters()]
        result = original(learner, stats, *rest)
        moved = any(not torch.equal(a, ppo.local(p.detach())) for a, p in zip(before, model.parameters(), strict=True))
        seen["skipped"].append((head, not moved, learner.skipped, learner.bad_tensor))
        return result

    def forward(original, model, *rest, **kwargs):
        seen["calls"].append((model.head, torch.is_grad_enabled()))
        return original(model, *rest, **kwargs)

    def backward(original, tensor, *rest, **kwargs):
        seen["calls"].append("backward")
        return original(tensor, *rest, **kwargs)

    def critic_from(original, actor):  # its value head of zeros would give the body no gradient
        critic = original(actor)
        generator = torch.Generator().manual_seed(5)
        critic.score.weight.data = torch.randn(critic.score.weight.shape, generator=generator) / 4
        return critic

    def crop(original, rows, *rest):
        seen["empty"] += len(rows) == 0
        return original(rows, *rest)

    with Patches() as p:
        long = (lambda i: i == huge) if huge is not None else (lambda i: i % every == 0)
        p.wrap(ppo, "rollout", functools.partial(made_up, ppo, long))
        p.wrap(ppo, "critic_from", critic_from)
        p.wrap(ppo, "crop", crop)
        p.wrap_method(ppo.Learner, "step", step)
        p.wrap_method(ppo.Transformer, "forward", forward)
        p.wrap_method(torch.Tensor, "backward", backward)
        if dealt:
            p.wrap_method(ppo.Ranks, "microbatches", functools.partial(unfair, ppo))
        train(ppo, folder, name, flags)
    return seen


def blank(ppo, folder, name, flags):
    """Gradients of a microbatch without rows, on all ranks: {name: whether it is there and exactly zero}."""
    args = ppo.Args(**flags)
    ppo.validate(args, int(os.environ.get("WORLD_SIZE", 1)))
    result = {}
    with contextlib.ExitStack() as stack:
        _, dtype, _, actors, critics = ppo.connect(args, stack)
        torch.manual_seed(0)
        _, actor, _ = ppo.embedded_model(args, ppo.make_envs(args, 1)[0])
        critic = ppo.critic_from(actor)
        torch.nn.init.normal_(critic.score.weight)
        actor, critic = ppo.shard(actor, actors, args, dtype), ppo.shard(critic, critics, args, dtype)
        tokens, mask = torch.randint(5, (4, 9)), torch.ones(4, 9, dtype=torch.bool)
        advantages = torch.randn(4, 9)
        rows, lengths = torch.arange(0), torch.full((4,), 9)
        mb_tokens, mb_mask, mb_advantages = ppo.crop(rows, lengths, tokens, mask, advantages)
        logprobs, entropy = ppo.at_sampled(actor, mb_tokens, mb_mask)
        loss, _ = ppo.policy_loss(logprobs, logprobs.detach(), mb_advantages, mb_mask, 0.2, 0.2, None, 7)
        (loss - 0.5 * entropy.sum() / 7).backward()
        values, _ = ppo.at_sampled(critic, mb_tokens, mb_mask)
        ppo.value_loss(values, mb_advantages, mb_advantages, mb_mask, 0.2, 7).backward()
        for model in (actor, critic):
            for key, p in model.named_parameters():
                result[f"{model.head} {key}"] = p.grad is not None and not full(p.grad).any()
    return result


def errors(ppo, folder, name, flags):
    """main() with each of the command lines: exit codes, and the seconds they took."""
    codes = []
    for argv in flags["commands"]:
        started = time.monotonic()
        arguments = [*argv, f"--log-dir={folder}", f"--run-name=errors{len(codes)}"]
        no_wait = mock.patch.object(ppo.time, "sleep", lambda seconds: None)  # here no rank ends another
        with mock.patch.object(sys, "argv", [ppo.__file__, *arguments]), no_wait:
            try:
                ppo.main()
                code = 0
            except SystemExit as stopped:
                code = stopped.code
        codes.append((code, time.monotonic() - started))
    return codes


def main():
    script, folder = Path(sys.argv[1]), Path(sys.argv[2])
    ppo = importlib.import_module(script.stem)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    keep = dict(init_process_group=lambda *args, **kwargs: None, destroy_process_group=lambda: None)
    for name, check, flags in json.loads((folder / "plan.json").read_text()):
        started = time.monotonic()
        with mock.patch.multiple(dist, **keep):
            result = globals()[check](ppo, folder, name, flags)
        torch.save(result, folder / f"{name}.{RANK}.pt")
        print(f"[rank {RANK}] {name}: {time.monotonic() - started:.1f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
