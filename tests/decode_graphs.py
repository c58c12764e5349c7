"""Decode steps as CUDA graphs, on the simulated device: `python decode_graphs.py SCRIPT` prints {fault: what found it}.

Without a fault rollouts by graphs must be those of the CPU, and the graphs must use no memory but that of weights,
cache, rows and their own. Each of the faults must raise, or change the samples, or use other memory.
"""

import contextlib
import importlib
import json
import math
import sys
from unittest import mock

import simulated_cuda  # registers the device, before anything else imports torch
import torch
from test_rollout import ALPHABET, assert_same, make_envs, random_model

ppo = importlib.import_module(sys.argv[1])
decode_step, round_up, decoders = ppo.decode_step, ppo.round_up, []
# A graph for each 32 positions instead of 128, so that short texts need several.
ppo.round_up = lambda n, unit: round_up(n, min(unit, 32))


class Decoder(ppo.Decoder):
    """Remembers which memory it may use, and counts its steps."""

    def __init__(self, sampler, B, stop_ids, args):
        super().__init__(sampler, B, stop_ids, args)
        own = [x for x in (self.cache.rows, *vars(self).values()) if isinstance(x, torch.Tensor)]
        layers = [x for layer in self.cache.layers for x in layer]
        self.memory = [*sampler.parameters(), *sampler.buffers(), *layers, *own]
        self.made = 0
        decoders.append(self)

    def step(self, attend):
        self.made += 1
        if self.made > 2000:
            raise RuntimeError("a turn does not end")
        super().step(attend)


def waits(rows, attend):
    decode_step(rows, attend)
    int(rows.alive.sum())


def makes_anew(rows, attend):
    decode_step(rows, attend)
    rows.alive = rows.alive.clone()


class NewMemory(Decoder):
    def step(self, attend):
        self.cache.rows = self.cache.rows.clone()
        super().step(attend)


class NewTemperature(Decoder):
    def begin(self, *args):
        self.temperature = self.temperature.clone()
        super().begin(*args)


def replace(p):
    p.data = p * 1.05


FAULTS = {
    "none": {},
    "the host waits": {"compiled": lambda function: waits},
    "rows are made anew": {"compiled": lambda function: makes_anew},
    "memory that nobody keeps": {"Decoder": NewMemory},
    "another temperature has other memory": {"Decoder": NewTemperature},
    "weights are replaced": {"change": replace},
}


@torch.no_grad()
def rollouts(device, compile, change=lambda p: p.mul_(1.05)):
    """By one decoder, sampled and greedily, of turns of 1 to 40 tokens; the weights change in between."""
    torch.manual_seed(0)
    tokenizer = ppo.HFTokenizer.from_texts([ALPHABET])
    sampler = random_model(ppo, tokenizer, num_hidden_layers=1).to(device)
    args = ppo.Args(max_prompt_tokens=8, max_new_tokens=40, rollout_slots=3, device=device, compile=compile)
    decoder = ppo.Decoder(sampler, 3, tokenizer.stop_ids, args)
    for iteration, args.temperature in enumerate((1.0, 0.7, 0.0, 1.0)):
        envs = make_envs("Endless", math.ceil(3 * getattr(ppo, "ENVS_PER_ROW", 1)))
        yield ppo.rollout(decoder, tokenizer, envs, range(4), range(4), iteration, args)
        for p in sampler.parameters():
            change(p)


def differences(expected: list, change) -> str | None:
    simulated_cuda.calls.clear()
    for episodes, other in zip(rollouts("cuda", "on", change), expected, strict=True):
        try:
            assert_same(episodes, other)
        except AssertionError:
            return "other samples"
    [decoder] = decoders
    ranges = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in decoder.memory]
    for graph in decoder.graphs.values():
        if any(not any(start <= x < end for start, end in ranges) for x in graph.outside):
            return "other memory"
    # Of 32 positions and of all, for every temperature; all steps but the first of each are replays.
    assert len(decoder.graphs) == 2 and simulated_cuda.calls["replay"] == decoder.made - 2 > 100


if __name__ == "__main__":
    expected, found = list(rollouts("cpu", "off")), {}
    for name, changes in FAULTS.items():
        changes = {"Decoder": Decoder, "change": lambda p: p.mul_(1.05)} | changes
        change = changes.pop("change")
        decoders.clear()
        torch._dynamo.reset()
        ppo.compiled.cache_clear()
        with contextlib.ExitStack() as stack:
            for attribute, new in changes.items():
                stack.enter_context(mock.patch.object(ppo, attribute, new))
            try:
                found[name] = differences(expected, change)
            except RuntimeError as error:
                found[name] = str(error)
    print(json.dumps(found))
