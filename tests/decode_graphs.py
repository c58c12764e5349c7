"""Decode steps as CUDA graphs, on the simulated device: `python decode_graphs.py SCRIPT`.

Rollouts by graphs must be those of the CPU, with attention by a mask and by lengths, as in bfloat16. The graphs must
use no memory but that of weights, cache, rows and their own: what lies elsewhere is not the same in the next replay.
"""

import importlib
import math
import sys

import simulated_cuda  # registers the device, before anything else imports torch
import torch
from test_rollout import ALPHABET, assert_same, make_envs, random_model

ppo = importlib.import_module(sys.argv[1])
round_up = ppo.round_up
# A graph for each 32 positions instead of 128, so that short texts need several.
ppo.round_up = lambda n, unit: round_up(n, min(unit, 32))
ppo.Decoder.step = simulated_cuda.counted(ppo.Decoder.step)


def addresses(decoder):
    """(first, end) of the memory that graphs may use."""
    own = [x for x in (*vars(decoder.cache).values(), *vars(decoder).values()) if isinstance(x, torch.Tensor)]
    layers = [x for layer in decoder.cache.layers for x in layer]
    memory = [*decoder.sampler.parameters(), *decoder.sampler.buffers(), *layers, *own]
    return [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in memory]


@torch.no_grad()
def rollouts(device, compile):
    """By one decoder, sampled and greedily, of turns of 1 to 40 tokens; the weights change in between.

    Returns the episodes of each, the graphs and the memory that they may use.
    """
    torch.manual_seed(0)
    tokenizer = ppo.HFTokenizer.from_texts([ALPHABET])
    sampler = random_model(ppo, tokenizer, num_hidden_layers=1).to(device)
    args = ppo.Args(max_prompt_tokens=8, max_new_tokens=40, rollout_slots=3, device=device, compile=compile)
    decoder = ppo.Decoder(sampler, 3, tokenizer.stop_ids, args)
    memory, played = addresses(decoder), []
    for iteration, args.temperature in enumerate((1.0, 0.7, 0.0, 1.0)):
        envs = make_envs("Endless", math.ceil(3 * getattr(ppo, "ENVS_PER_ROW", 1)))
        played.append(ppo.rollout_share(decoder, tokenizer, envs, range(4), range(4), iteration, args))
        for p in sampler.parameters():
            p.mul_(1.05)
    return played, decoder.graphs, memory


expected, *_ = rollouts("cpu", "off")
for by_lengths in (False, True):
    ppo.has_varlen = lambda kernel, x, head_dim, by_lengths=by_lengths: by_lengths and x.is_cuda
    simulated_cuda.calls.clear()
    played, graphs, memory = rollouts("cuda", "on")
    for episodes, others in zip(played, expected, strict=True):
        assert_same(episodes, others)
    for graph in graphs.values():
        for address in graph.outside:
            assert any(start <= address < end for start, end in memory), "memory that nobody keeps"
    # Of 32 positions and of all, for every temperature; all steps but the first of each are replays.
    assert len(graphs) == 2
    assert simulated_cuda.calls["replay"] == simulated_cuda.calls["Decoder.step"] - 2 > 100
    assert (simulated_cuda.calls["aten::_flash_attention_forward"] > 0) == by_lengths
