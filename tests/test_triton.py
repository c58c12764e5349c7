"""The Triton kernels of compiled code, without a GPU; deviceless.py says how, and what that can show and what not."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from test_cuda import simulate
from test_distributed import finish, start
from test_rollout import ALPHABET, make_model
from test_train import SMALL, assert_same_metrics, lines
from torch.utils.checkpoint import checkpoint

DEVICELESS = Path(__file__).with_name("deviceless.py")
SIZE = 64, 96, 4, 2, 24  # hidden, intermediate, heads, key heads, vocabulary
SHAPES = [[9, 7, 3], [8, 8, 5], [12, 5], [6], [1], [16, 16], [5, 4, 4], [24, 3], [2, 2], [7]]  # lengths of samples
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not importlib.util.find_spec("triton") or torch.backends.cuda.is_built()
        or not torch.__version__.startswith("2.13") or not shutil.which("g++"),
        reason="is for the CPU build of PyTorch 2.13, and needs triton and g++")]  # fmt: skip


def random_model(ppo, device, dtype, layers, size):
    hidden, inner, heads, kv_heads, vocab = size
    config = ppo.ModelConfig(vocab, hidden, inner, layers, heads, kv_heads, hidden // heads, qkv_bias=True)
    model = ppo.materialize(ppo.on_meta(config, dtype=getattr(torch, dtype)), device)
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


@torch.no_grad()
def decode(script, device, dtype="float32", layers=1, size=SIZE, rows=3, prompt=1, steps=6):
    """Tokens and log-probs of some decode steps, which are compiled on the GPU."""
    ppo = importlib.import_module(script)
    model, S = random_model(ppo, device, dtype, layers, size), prompt + 23
    cache, slots = ppo.KVCache(model.config, rows, S, getattr(torch, dtype), device), ppo.Slots(rows, S, [1, 2], device)
    slots.tokens[:, 0] = torch.arange(rows, device=device) % 20
    slots.noise_keys[:] = ppo.sample_keys(1, 0, range(rows))
    slots.alive.fill_(True)
    slots.length.fill_(prompt)
    slots.limit.fill_(S)
    step = ppo.decode_step if device == "cpu" else ppo.compiled_decode_step()
    for i in range(steps):
        step(model, cache.view(prompt + i), slots, 0.7, False)
    return slots.tokens.cpu(), slots.logprobs.cpu()


def blocks(script, device, microbatches, dtype="float32", layers=1, size=SIZE, checkpointing=False):
    """Outputs and gradients of blocks, which are compiled on the GPU, for microbatches of samples of these lengths."""
    ppo = importlib.import_module(script)
    model, results = random_model(ppo, device, dtype, layers, size), []
    for block in model.model.layers if device == "cuda" else ():
        block.compile(dynamic=True)
    for lengths in map(torch.tensor, microbatches):
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        angle = torch.randn(int(lengths.sum()), 1, model.config.head_dim, device=device)
        context = angle.cos(), angle.sin(), ppo.Packing.of(lengths, mask, torch.device(device))
        out = x = torch.randn(len(angle), size[0], device=device, dtype=getattr(torch, dtype), requires_grad=True)
        for block in model.model.layers:
            out = checkpoint(block, out, *context, use_reentrant=False) if checkpointing else block(out, *context)
        out.backward(torch.ones_like(out))
        results += [y.detach().cpu() for y in (out, x.grad, *(p.grad for p in model.model.layers.parameters()))]
        model.zero_grad()
    return results


def deviceless(folder, function, *args):
    """`function` of this module with Triton; in a process of its own, since deviceless.py changes PyTorch."""
    command = [sys.executable, DEVICELESS, "result.pt", function, json.dumps(args)]
    code, output = finish(start(command, folder), timeout=600)
    assert code == 0, output
    return torch.load(folder / "result.pt")


@pytest.mark.shared
def test_blocks_forward_and_backward(ppo, tmp_path):
    ours, seen = deviceless(tmp_path, "blocks", ppo.__name__, "cuda", SHAPES[:3])
    assert seen["launches"] > 0
    for x, expected in zip(ours, blocks(ppo.__name__, "cpu", SHAPES[:3]), strict=True):
        assert (x - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.shared
def test_decode_steps(ppo, tmp_path):
    (tokens, logprobs), seen = deviceless(tmp_path, "decode", ppo.__name__, "cuda")
    same_tokens, same_logprobs = decode(ppo.__name__, "cpu")
    assert seen["launches"] > 0 and torch.equal(tokens, same_tokens)
    assert logprobs.min() < 0 and (logprobs - same_logprobs).abs().max() < 1e-5


@pytest.fixture
def iteration(ppo, tmp_path):
    """Flags of a run of one iteration, of a model of one layer."""
    tokenizer = ppo.HFTokenizer.from_texts([ALPHABET])
    model = make_model(ppo, tokenizer.vocab_size, num_hidden_layers=1)
    ppo.save_hf_checkpoint(model, tokenizer, tmp_path / "model")
    return SMALL | dict(
        num_iterations=1, rollout_batch_size=4, train_batch_size=2, ppo_epochs=1, eval_episodes=1, entropy_coef=0.01,
        actor_lr=1e-3, critic_lr=1e-3, model=str(tmp_path / "model"))  # fmt: skip


GPU = dict(device="cuda", compile="on", run_name="gpu")


@pytest.mark.shared
def test_an_iteration_of_a_sharded_rank_is_that_of_the_cpu(ppo, iteration, tmp_path):
    """In float32. The first decode step of a rollout makes a graph, by which the others are made."""
    flags = iteration | dict(dtype="float32", kl_coef=0.1)
    ppo.train(ppo.Args(**flags | dict(log_dir=str(tmp_path), run_name="cpu")))
    simulate(ppo, tmp_path, [flags | GPU], ranks=1, machinery=DEVICELESS)
    assert_same_metrics(lines(tmp_path / "gpu"), lines(tmp_path / "cpu"), 1e-4)


@pytest.mark.shared
def test_the_first_ratio_is_exactly_one_in_bfloat16(ppo, iteration, tmp_path):
    simulate(ppo, tmp_path, [iteration | GPU | dict(dtype="bfloat16")], ranks=1, machinery=DEVICELESS)
    [row] = lines(tmp_path / "gpu")
    assert row["ratio/first_dev"] == 0 and row["ratio/last_dev"] > 0.001


@pytest.mark.shared
@pytest.mark.parametrize(("arch", "shapes", "graphs", "stack"), [(90, SHAPES, 4, 32), (80, SHAPES[:1], 1, 40)])
def test_kernels_compile(ppo, tmp_path, monkeypatch, arch, shapes, graphs, stack):
    """All configurations, in one piece and without spilling: only sines and cosines take that much stack."""
    monkeypatch.setenv("ARCH", str(arch))
    _, of_blocks = deviceless(tmp_path, "blocks", ppo.__name__, "cuda", shapes, "bfloat16", 2, SIZE, True)
    _, of_decode = deviceless(tmp_path, "decode", ppo.__name__, "cuda", "bfloat16")
    assert of_blocks["graphs"] <= graphs and of_decode["graphs"] == 1
    for seen in of_blocks, of_decode:
        assert not seen["breaks"] and seen["usage"]
        assert max(bytes_of_stack for _, bytes_of_stack, _ in seen["usage"]) <= stack
