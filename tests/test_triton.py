"""The Triton kernels of compiled code, without a GPU; deviceless.py says how, and what that can show and what not."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from test_cuda import simulate, simulated
from test_distributed import finish, start
from test_rollout import ALPHABET, make_model
from test_train import SMALL, assert_same_metrics, lines
from transformers import Qwen2Config

DEVICELESS = Path(__file__).with_name("deviceless.py")
SIZE = 64, 96, 4, 2, 24  # hidden, intermediate, heads, key heads, vocabulary
SHAPES = [[9, 7, 3], [8, 8, 5], [12, 5], [6], [1], [16, 16], [5, 4, 4], [24, 3], [2, 2], [7]]  # lengths of samples
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")
pytestmark = [pytest.mark.slow, pytest.mark.shared, simulated, needs_triton]


def random_model(ppo, device, dtype, layers, size):
    names = "hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size".split()
    config = Qwen2Config(num_hidden_layers=layers, tie_word_embeddings=True, **dict(zip(names, size, strict=True)))
    args = ppo.Args(device=device, dtype=dtype, compile="off")
    model = ppo.build_model(ppo.check_config(config), "lm", args, sampler=True)
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


@torch.no_grad()
def decode(script, device, dtype="float32", layers=1, size=SIZE, rows=3, prompt=1, steps=6):
    """Tokens and log-probs of decode steps, three sampled and then greedy ones, which are compiled on the GPU."""
    ppo = importlib.import_module(script)
    args = types.SimpleNamespace(max_prompt_tokens=prompt, max_new_tokens=23, compile="off")
    decoder = ppo.Decoder(random_model(ppo, device, dtype, layers, size), rows, [1, 2], args)
    decoder.tokens[:, 0] = torch.arange(rows, device=device) % 20
    decoder.noise_keys[:] = ppo.sample_keys(1, 0, range(rows))
    decoder.alive.fill_(True)
    decoder.length.fill_(prompt)
    decoder.limit.fill_(prompt + 23)
    step = ppo.sample_token if device == "cpu" else ppo.maybe_compiled(ppo.sample_token, "on")
    for i in range(steps):
        decoder.temperature.fill_(0.7 if i < 3 else 1.0)
        decoder.noise_scale.fill_(i < 3)
        step(decoder, ppo.round_up(prompt + i, 16))
    return decoder.tokens.cpu(), decoder.logprobs.cpu()


def update(script, device, microbatches, dtype="float32", layers=1, size=SIZE, checkpointing=False):
    """Log-probs, entropies and gradients of microbatches of samples of these lengths, which are compiled on the GPU."""
    ppo = importlib.import_module(script)
    model, results = random_model(ppo, device, dtype, layers, size), []
    model.checkpointing = checkpointing
    if device == "cuda":
        model.compile_head = "on"
        for block in model.model.layers:
            block.compile(dynamic=True)
    for lengths in map(torch.tensor, microbatches):
        places = torch.arange(int(lengths.max())).expand(len(lengths), -1)
        mask = (places > 0) & (places < lengths[:, None])
        everything = ppo.Experience(
            tokens=places * 7 % size[4], mask=mask, sampler_logprobs=mask, rewards=mask, lengths=lengths)
        mb = everything.microbatch(torch.arange(len(lengths)), device)
        logprobs, entropies = model.sampled_logprobs(mb, 0.7)
        (logprobs.sum() + 0.1 * entropies.sum()).backward()
        results += [x.detach().cpu() for x in (logprobs, entropies, *(p.grad for p in model.parameters()))]
        model.zero_grad()
    return results


def deviceless(folder, function, *args):
    """`function` of this module with Triton; in a process of its own, since deviceless.py changes PyTorch."""
    command = [sys.executable, DEVICELESS, "result.pt", function, json.dumps(args)]
    code, output = finish(start(command, folder), timeout=600)
    assert code == 0, output
    return torch.load(folder / "result.pt")


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_updates(ppo, tmp_path, dtype, rounding):
    """In bfloat16 attention is packed, on the CPU padded."""
    ours, seen = deviceless(tmp_path, "update", ppo.__name__, "cuda", SHAPES[:3], dtype)
    assert seen["launches"]
    for x, expected in zip(ours, update(ppo.__name__, "cpu", SHAPES[:3], dtype), strict=True):
        assert (x - expected).abs().max() < rounding * expected.abs().max()


def test_decode_steps(ppo, tmp_path):
    (tokens, logprobs), seen = deviceless(tmp_path, "decode", ppo.__name__, "cuda")
    same_tokens, same_logprobs = decode(ppo.__name__, "cpu")
    assert seen["launches"] > 0 and torch.equal(tokens, same_tokens)
    assert logprobs.min() < 0 and (logprobs - same_logprobs).abs().max() < 1e-5


def test_an_iteration_of_a_sharded_rank(ppo, tmp_path):
    """In float32 it is that of the CPU; in bfloat16 the first ratio is exactly 1."""
    tokenizer = ppo.HFTokenizer.from_texts([ALPHABET])
    model = make_model(ppo, tokenizer.vocab_size, num_hidden_layers=1)
    ppo.save_hf_checkpoint(model, tokenizer, tmp_path / "model")
    flags = SMALL | dict(
        num_iterations=1, rollout_batch_size=4, train_batch_size=2, ppo_epochs=1, eval_episodes=1, entropy_coef=0.01,
        kl_coef=0.1, actor_lr=1e-3, critic_lr=1e-3, model=str(tmp_path / "model"), dtype="float32")  # fmt: skip
    ppo.train(ppo.Args(**flags | dict(log_dir=str(tmp_path), run_name="cpu")))
    gpu = flags | dict(device="cuda", compile="on")
    runs = [gpu | dict(run_name="float"), gpu | dict(dtype="bfloat16", run_name="half")]
    simulate(ppo, tmp_path, runs, ranks=1, machinery=DEVICELESS)
    assert_same_metrics(lines(tmp_path / "float"), lines(tmp_path / "cpu"), 1e-4)
    [row] = lines(tmp_path / "half")
    assert row["ratio/first_dev"] == row["critic/first_dev"] == 0 and row["ratio/last_dev"] > 0.001


@pytest.mark.parametrize(("arch", "shapes", "graphs", "stack"), [(90, SHAPES, 7, 32), (80, SHAPES[:1], 3, 40)])
def test_kernels_compile(ppo, tmp_path, monkeypatch, arch, shapes, graphs, stack):
    """All configurations, in one piece and without spilling: only sines and cosines take that much stack."""
    monkeypatch.setenv("ARCH", str(arch))
    _, of_update = deviceless(tmp_path, "update", ppo.__name__, "cuda", shapes, "bfloat16", 2, SIZE, True)
    _, of_decode = deviceless(tmp_path, "decode", ppo.__name__, "cuda", "bfloat16")
    assert of_update["graphs"] <= graphs and of_decode["graphs"] == 1
    for seen in of_update, of_decode:
        assert not seen["breaks"] and seen["stack"] <= stack


def test_the_head_keeps_no_logits_in_float32(ppo, tmp_path, monkeypatch):
    """Three reads in the forward pass, four and a write in the backward pass, all in two bytes a logit."""
    monkeypatch.setenv("ARCH", "90")
    _, seen = deviceless(tmp_path, "update", ppo.__name__, "cuda", [[301]], "bfloat16", 0, (64, 96, 4, 2, 5000))
    assert seen["bytes"] < (16 + 1) * 300 * 5000
