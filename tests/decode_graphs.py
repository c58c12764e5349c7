"""Decode steps as CUDA graphs, on the simulated device: `python decode_graphs.py SCRIPT` prints {fault: what found it}.

Without a fault rollouts by graphs must be those of the CPU, and the graphs must use no memory but that of weights,
cache, slots and their own. Each of the faults must raise, or change the samples, or use other memory.
"""

import contextlib
import importlib
import json
import sys
from unittest import mock

import simulated_cuda  # registers the device, before anything else imports torch
import torch
from test_rollout import ALPHABET, random_model, rows, run

ppo = importlib.import_module(sys.argv[1])
step, view, round_up, decoders = ppo.decode_step, ppo.KVCache.view, ppo.round_up, []
GRAPHS_OF_ALL = {}
# A graph for each 32 positions instead of 128, so that short texts need several.
ppo.round_up = lambda n, unit=16: round_up(n, min(unit, 32))


class Decoder(ppo.Decoder):
    """Remembers which memory it may use."""

    def __init__(self, actor, cache, slots, args, greedy):
        super().__init__(actor, cache, slots, args, greedy)
        keys_and_values = [x for layer in cache.layers for x in layer]
        self.memory = [*actor.parameters(), *actor.buffers(), *keys_and_values, cache.rows, *vars(slots).values()]
        decoders.append(self)

    def run(self, attend):
        if attend > 200:
            raise RuntimeError("a turn does not end")
        super().run(attend)


def waits(actor, cache, slots, *rest):
    step(actor, cache, slots, *rest)
    int(slots.alive.sum())


def makes_anew(actor, cache, slots, *rest):
    step(actor, cache, slots, *rest)
    slots.alive = slots.alive.clone()


def uploads(actor, cache, slots, *rest):
    slots.limit += torch.tensor([0]).to(slots.limit.device)
    step(actor, cache, slots, *rest)


def view_with_new_memory(cache, attend, rows=None):
    new = view(cache, attend, rows)
    new.rows = new.rows.clone()
    return new


class SharedGraphs(Decoder):
    """Graphs that outlive their rollout: that of the first temperature, and in its memory."""

    def __init__(self, *args):
        super().__init__(*args)
        self.graphs = GRAPHS_OF_ALL


FAULTS = {
    "none": {},
    "the host waits": {"compiled_decode_step": lambda: waits},
    "slots are made anew": {"compiled_decode_step": lambda: makes_anew},
    "the host uploads": {"compiled_decode_step": lambda: uploads},
    "memory that nobody keeps": {"KVCache.view": view_with_new_memory},
    "graphs of another rollout": {"Decoder": SharedGraphs},
}


def rollouts(device: str, compile: str):
    """By weights that change in between, sampled at two temperatures and greedily; of turns of 1 to 40 tokens."""
    torch.manual_seed(0)
    tokenizer = ppo.HFTokenizer.from_texts([ALPHABET])
    actor = random_model(ppo, tokenizer, num_hidden_layers=1).to(device)
    for iteration, (temperature, greedy) in enumerate([(1.0, False), (0.7, False), (0.7, True)]):
        settings = dict(max_prompt_tokens=8, max_new_tokens=40, temperature=temperature, compile=compile)
        yield run(ppo, actor, tokenizer, "Endless", 4, None, iteration, greedy, rollout_slots=3, **settings)
        with torch.no_grad():
            for p in actor.parameters():
                p.mul_(1.05)


def differences(expected: list) -> str | None:
    simulated_cuda.calls.clear()
    steps = 0
    for batch, other in zip(rollouts("cuda", "on"), expected, strict=True):
        if rows(batch) != rows(other):
            return "other samples"
        torch.testing.assert_close(batch.logprobs, other.logprobs, atol=1e-5, rtol=1e-5)
        ranges = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in decoders[-1].memory]
        for graph in decoders[-1].graphs.values():
            if any(not any(start <= x < end for start, end in ranges) for x in graph.outside):
                return "other memory"
        assert len(decoders[-1].graphs) == 2  # of 32 positions, and of all
        steps += batch.stats["rollout/decode_steps"]
    assert simulated_cuda.calls["replay"] == steps - 2 * len(expected) > 20  # all steps but the first of each graph


if __name__ == "__main__":
    expected, found = list(rollouts("cpu", "off")), {}
    for name, changes in FAULTS.items():
        decoders.clear()
        torch._dynamo.reset()
        with contextlib.ExitStack() as stack:
            for attribute, new in ({"Decoder": Decoder} | changes).items():
                owner = ppo.KVCache if "." in attribute else ppo
                stack.enter_context(mock.patch.object(owner, attribute.split(".")[-1], new))
            try:
                found[name] = differences(expected)
            except RuntimeError as error:
                found[name] = str(error)
    print(json.dumps(found))
