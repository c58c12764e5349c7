"""Compare vLLM, as forks/vllm.patch runs it, to the actor, for a model of yours.

    python tests/check_vllm.py FOLDER

It needs an environment with vLLM (docs/vllm.md). It samples, changes the actor, hands its weights over, samples again,
and prints what it has found. It ends with code 1 if something is not as it should be. On a GPU it compiles, unless you
give --compile off. --patches any_model,lora applies further patches first. A model without a tokenizer of its own does
not do.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path

import torch
from check_model import patched_module

PROMPTS = [f"what is {a} + {b}?" for a in (7, 23, 81) for b in (5, 66)] + [
    "tell me a story about a dog.", "name three rivers.", "why is the sky blue?", "write a poem about snow.",
    "what is a verb?", "sing."]  # fmt: skip


def play(ppo, engine, tokenizer, prompts, args, keys=None, reset=True):
    """An episode for each prompt, with one response."""
    episodes = []
    for i, prompt in enumerate(prompts):
        episodes.append(ppo.Episode(i, keys[i] if keys else 1000 + i))
        episodes[-1].add(tokenizer.encode_prompt(prompt))
        episodes[-1].prompt_length = len(episodes[-1].ids)
    if reset:
        assert engine.llm.reset_prefix_cache()
    respond(engine, tokenizer, episodes, args)
    return episodes


def respond(engine, tokenizer, episodes, args):
    """Add the next response to each of the episodes."""
    requests = [engine.request(i, episode, tokenizer.stop_ids, args) for i, episode in enumerate(episodes)]
    left = len(requests)
    while left:
        for i, ids, logprobs in engine.step(requests):
            episodes[i].add(ids, logprobs)
            left -= 1
        requests = []


def gap(ppo, episodes, actor, args):
    """Mean distance of vLLM's log-probs from the actor's."""
    e = ppo.Experience.from_episodes(episodes)
    logprobs = ppo.logprobs_of_all(actor, e, [torch.arange(len(episodes))], args)
    return float((e.sampler_logprobs - logprobs)[e.mask].abs().mean())


def responses(episodes):
    return [tuple(e.ids[e.prompt_length :]) for e in episodes]


def same(a, b):
    """Share of the responses that are the same."""
    return sum(x == y for x, y in zip(responses(a), responses(b))) / len(a)


@torch.no_grad()
def change(actor, size):
    """Noise on all weights, in proportion to their spread. An adapter that is 0 gets some as well."""
    for p in actor.parameters():
        p += torch.randn_like(p) * (p.detach().float().std(correction=0) + 0.01) * size


def check(folder, work, patches=(), **flags):
    """[(what was found, a number, the least that it may be, the most)]"""
    ppo = patched_module(work, patches=(*patches, "vllm"))
    sys.modules["ppo_llm"] = ppo
    args = ppo.fill_in_defaults(ppo.Args(model=str(folder), max_prompt_tokens=220, max_new_tokens=32, **flags))
    args.rollout_batch_size = 256
    rounding = 1e-4 if args.dtype == "float32" else 0.1
    started = time.monotonic()
    engine = ppo.Engine(args)
    print(f"vLLM starts in {time.monotonic() - started:.0f} s")
    tokenizer, actor = ppo.build_actor(args, None)
    engine.load(actor)
    cached, step = [], engine.llm.llm_engine.step

    def watched_step():
        outputs = step()
        cached.extend(output.num_cached_tokens for output in outputs)
        return outputs

    engine.llm.llm_engine.step = watched_step
    sample = lambda *rest, **more: play(ppo, engine, tokenizer, *rest, **more)
    distance = lambda episodes, args=args: gap(ppo, episodes, actor, args)
    cool = dataclasses.replace(args, temperature=0.6)

    # Log-probs, and what the wrong temperature would look like.
    first = sample(PROMPTS, args)
    least = 3 * distance(first)  # of what must not pass for rounding
    yield "distance of the log-probs", distance(first), 0, rounding
    colder = sample(PROMPTS, cool)
    yield "at temperature 0.6", distance(colder, cool), 0, rounding
    yield "at temperature 0.6, compared with 1", distance(colder), least, 9

    # Noise.
    keys = list(range(1000, 1012))
    yield "the same samples again", same(first, sample(PROMPTS, args)), 0.9, 1
    yield "in reverse order", same(first, sample(PROMPTS[::-1], args, keys[::-1])[::-1]), 0.9, 1
    yield "five of them alone", same(first[:5], sample(PROMPTS[:5], args)), 0.8, 1
    yield "with other keys", same(first, sample(PROMPTS, args, [key + 7 for key in keys])), 0, 0.5
    # These are more tokens than vLLM takes in a step, on a CPU.
    many = sample(["say a number between one and ten."] * 256, dataclasses.replace(args, max_new_tokens=1))
    with torch.no_grad():
        prompt = torch.tensor([many[0].ids[:-1]], device=args.device)
        p = actor(prompt)[0, -1].float().softmax(-1).cpu()
    tokens = torch.tensor([e.ids[-1] for e in many])
    top = p.topk(5)
    seen = torch.stack([(tokens == i).float().mean() for i in top.indices])
    z = (seen - top.values) / (top.values * (1 - top.values) / 256).sqrt()
    yield "frequencies of first tokens, largest |z| of 5", float(z.abs().max()), 0, 4

    # Ends of responses.
    inside = sum(i in tokenizer.stop_ids for e in first for i in responses([e])[0][:-1])
    yield "stop ids within a response", inside, 0, 0
    wrong = sum(e.ids[-1] not in tokenizer.stop_ids and len(e.ids) - e.prompt_length < 32 for e in first)
    yield "ends that are neither a stop id nor the limit", wrong, 0, 0
    stop_ids, tokenizer.stop_ids = tokenizer.stop_ids, []
    yield "shortest without stop ids", min(map(len, responses(sample(PROMPTS, args)))), 32, 32
    tokenizer.stop_ids = stop_ids

    # Two turns. A block of the prefix cache has 16 tokens on a GPU, 128 on a CPU.
    words = "this is a test of long prompts. "
    count = next(n for n in range(1, 99) if len(tokenizer.encode_prompt(words * n)) > 130)
    long = [words * count + prompt for prompt in PROMPTS[:6]]
    turns, copies = (sample(long, dataclasses.replace(args, max_new_tokens=16)) for _ in range(2))
    for e in turns + copies:
        e.add(tokenizer.encode_feedback("and now?", tokenizer.stop_ids[0])[:8])
    cached.clear()
    respond(engine, tokenizer, turns, args)
    yield "tokens of the first turn that the cache has", min(cached), 16, 220
    yield "distance in a second turn", distance(turns), 0, rounding
    engine.llm.reset_prefix_cache()
    respond(engine, tokenizer, copies, args)
    yield "the same second turns without the cache", same(turns, copies), 0.8, 1

    # Weights, and a prefix cache that holds the long prompts.
    change(actor, 0.1)
    yield "distance after an update without a hand-over", distance(sample(PROMPTS, args)), least, 99
    for i in range(2):
        started = time.monotonic()
        moved = ppo.update_sampler(actor, engine)
        print(f"hand-over in {time.monotonic() - started:.2f} s")
        yield "relative change" if i == 0 else "relative change if nothing has changed", moved, *[(0.01, 1), (0, 0)][i]
        yield "distance after the hand-over", distance(sample(PROMPTS, args)), 0, rounding
    sample(long, args)
    change(actor, 0.3)
    engine.load(actor)
    yield "distance with a stale prefix cache", distance(sample(long, args, reset=False)), least, 99
    yield "after its reset", distance(sample(long, args)), 0, rounding


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--patches", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--vllm-cache-gb", type=float, default=1.0)
    flags = vars(parser.parse_args())
    folder, patches = flags.pop("folder").resolve(), filter(None, flags.pop("patches").split(","))
    torch.manual_seed(0)
    wrong = []
    with tempfile.TemporaryDirectory() as work:
        try:
            for name, x, least, most in check(folder, Path(work), tuple(patches), **flags):
                print(f"{name:45} {x:.2g}", flush=True)
                wrong += [name] if not least <= x <= most else []
        except ValueError as error:
            sys.exit(f"error: {error}")
    sys.exit(f"not as it should be: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
