"""The rollout: layout, log-probs, turns, independence of the batch, sampling noise, odd inputs, failures."""

import functools
import json
import math
import shutil
from pathlib import Path

import environments
import gymnasium as gym
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ALPHABET = "abcdefwxy="
RUNS = [(1, 1), (3, 3), (7, 7), (64, 4), (4, 64)]  # (rollout_slots, environments)


def make_envs(name, count, **kwargs):
    return [gym.make(f"{name}-v0", disable_env_checker=True, **kwargs) for _ in range(count)]


def make_args(ppo, **changes):
    return ppo.Args(**({"max_prompt_tokens": 40, "max_new_tokens": 12, "rollout_slots": 16} | changes))


def make_model(ppo, vocab_size, **changes):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    raw = {"model_type": "llama", "vocab_size": vocab_size, "num_key_value_heads": 2, **shape} | changes
    return ppo.Transformer(ppo.ModelConfig.from_hf(raw))


def random_model(ppo, tokenizer, qkv_bias=False):
    """Random weights, sharp enough for the log-probs of the tokens to differ."""
    model = make_model(ppo, tokenizer.vocab_size, attention_bias=qkv_bias)
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.25)
    return model


@torch.no_grad()
def bigram_model(ppo, logits):
    """A model with logits[i] [V, V] after token i: one-hot embeddings, residual branches of zeros."""
    model = make_model(ppo, len(logits), hidden_size=len(logits), head_dim=4, num_hidden_layers=1)
    for p in model.model.layers.parameters():
        p.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(len(logits)))
    model.lm_head.weight.copy_(logits.T / math.sqrt(len(logits)))  # RMSNorm makes 1 of a one-hot the root of V
    return model


def scripted_model(ppo, tokenizer, script, default="<eos>", vocab_size=None):
    """Says script[token] after each token: {"a": "b"} says b after a."""
    token_id = tokenizer.tokenizer.token_to_id
    logits = torch.zeros(2 * [vocab_size or tokenizer.vocab_size])
    logits[:, default if isinstance(default, int) else token_id(default)] = 100.0
    for token, following in script.items():
        logits[token_id(token)] = 0.0
        logits[token_id(token), token_id(following)] = 100.0
    return bigram_model(ppo, logits)


def run(ppo, actor, tokenizer, env="Plain", samples=6, ids=None, iteration=0, greedy=False, **changes):
    """Rollout in `env`, a name or a list of environments, of seeds and sample ids 0, 1, ... or `ids` [(seed, id)]."""
    seeds, sample_ids = zip(*(ids or [(i, i) for i in range(samples)]), strict=True)
    envs, args = make_envs(env, 16) if isinstance(env, str) else env, make_args(ppo, **changes)
    return ppo.rollout(actor, tokenizer, envs, seeds, sample_ids, args, iteration, greedy)


def rows(batch):
    """What each sample is, without its padding."""
    tensors = (batch.tokens, batch.mask, batch.rewards)
    return [(*(x[i, :n].tolist() for x in tensors), batch.stop[i], batch.texts[i]) for i, n in enumerate(batch.lengths)]


@pytest.fixture
def tokenizer(ppo):
    return ppo.HFTokenizer.from_texts([ALPHABET])


# --- Layout ---


@pytest.mark.parametrize("greedy", [False, True])
def test_all_fields_are_aligned_at_the_tokens_own_index(ppo, tokenizer, greedy):
    batch = run(ppo, random_model(ppo, tokenizer), tokenizer, "Lengths", 12, greedy=greedy)
    N, T = batch.tokens.shape
    assert N == 12 and T == batch.lengths.max()
    assert batch.mask.dtype == torch.bool and batch.logprobs.dtype == torch.float32
    assert batch.mask.shape == batch.logprobs.shape == batch.rewards.shape == (N, T)
    assert set(batch.stop) == {"eos", "length"} or greedy
    for i, n in enumerate(batch.lengths.tolist()):
        prompt = tokenizer.encode_prompt(environments.Lengths.prompts[i % 6])
        response = batch.tokens[i, len(prompt) : n].tolist()
        assert batch.tokens[i, : len(prompt)].tolist() == prompt
        assert batch.mask[i].nonzero()[:, 0].tolist() == list(range(len(prompt), n))
        assert (batch.logprobs[i][batch.mask[i]] < 0).all() and not batch.logprobs[i][~batch.mask[i]].any()
        assert batch.texts[i] == tokenizer.decode(response)
        assert batch.rewards[i].nonzero()[:, 0].tolist() == ([n - 1] if batch.texts[i] else [])
        assert batch.rewards[i, n - 1] == pytest.approx(len(batch.texts[i]) / 10)
        assert not set(response[:-1]) & set(tokenizer.stop_ids)
        assert batch.stop[i] == ("eos" if response[-1] in tokenizer.stop_ids else "length")
        assert batch.stop[i] == "eos" or len(response) == 12


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(("env", "kwargs"), [("Lengths", {}), ("TwoTurns", {}), ("Endless", {"feedback": "fade"})])
def test_recorded_logprobs_are_those_of_the_training_forward(ppo, tokenizer, env, kwargs, temperature):
    actor = random_model(ppo, tokenizer)
    envs = make_envs(env, 7, **kwargs)
    batch = run(ppo, actor, tokenizer, envs, 20, temperature=temperature, max_new_tokens=30)
    logprobs, _ = ppo.at_sampled(actor, batch.tokens, batch.mask, temperature)
    torch.testing.assert_close(batch.logprobs, logprobs, atol=1e-5, rtol=0)
    plain = (actor(batch.tokens)[:, :-1] / temperature).log_softmax(-1).gather(2, batch.tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(batch.logprobs[:, 1:], plain * batch.mask[:, 1:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("env", ["Lengths", "TwoTurns", "Endless"])
def test_greedy_is_the_argmax_of_the_forward_without_cache(ppo, tokenizer, env):
    actor = random_model(ppo, tokenizer)
    batch = run(ppo, actor, tokenizer, env, 12, greedy=True, max_new_tokens=30, rollout_slots=5)
    best = actor(batch.tokens).argmax(-1)
    assert torch.equal(best[:, :-1][batch.mask[:, 1:]], batch.tokens[batch.mask])


def test_changed_weights_are_used_by_the_next_rollout(ppo, tokenizer):
    actor = random_model(ppo, tokenizer)
    before = run(ppo, actor, tokenizer, samples=8)
    with torch.no_grad():
        for p in actor.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    after = run(ppo, actor, tokenizer, samples=8)
    torch.testing.assert_close(after.logprobs, ppo.at_sampled(actor, after.tokens, after.mask)[0], atol=1e-5, rtol=0)
    assert before.texts != after.texts


# --- Several turns ---


def test_two_turns_by_hand(ppo, tokenizer):
    """Row 0 is a b <eos> c d <eos>, with c from the environment; row 1 is e f <eos> x y <eos>, whose y is wrong."""
    actor = scripted_model(ppo, tokenizer, {"a": "b", "c": "d", "e": "f", "x": "y"})
    envs = make_envs("TwoTurns", 2)
    batch = run(ppo, actor, tokenizer, envs, samples=2)
    eos = tokenizer.eos_id
    for i, (first, answer, feedback, second) in enumerate(["abcd", "efxy"]):
        a, b, c, d = tokenizer.encode(first + answer + feedback + second)
        assert batch.tokens[i].tolist() == [a, b, eos, c, d, eos]
        assert envs[i].unwrapped.seen == [answer, second]
        assert batch.texts[i] == answer + feedback + second
    assert batch.mask.tolist() == 2 * [[False, True, True, False, True, True]]
    assert batch.rewards.tolist() == [[0, 0, 0.25, 0, 0, 1], [0, 0, 0.25, 0, 0, 0]]
    assert batch.lengths.tolist() == [6, 6] and batch.stop == ["eos", "eos"]

    nan = math.nan
    values = torch.tensor([[nan, 0.5, 0.6, nan, 0.7, 0.8]])
    advantages, returns = ppo.compute_gae(batch.rewards[:1], values, batch.mask[:1], 0.9, 0.5)
    # deltas .9*.6-.5, .25+.9*.7-.6, .9*.8-.7, 1-.8; each advantage adds .9*.5 of the next one
    expected = torch.tensor([[0, 0.188275, 0.3295, 0, 0.11, 0.2]])
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + values.nan_to_num())


@pytest.mark.parametrize("feedback", ["c", "fade", ""])
def test_endless_environment_gives_truncated_rows(ppo, tokenizer, feedback):
    envs = make_envs("Endless", 16, feedback=feedback)
    batch = run(ppo, random_model(ppo, tokenizer), tokenizer, envs, samples=16, max_new_tokens=30)
    assert set(batch.stop) == {"length"}
    for i, env in enumerate(envs):
        assert batch.rewards[i].unique().tolist() == [0, 0.5]
        assert batch.rewards[i].count_nonzero() == len(env.unwrapped.seen)
        assert batch.mask[i][batch.rewards[i] > 0].all()
        assert batch.texts[i] == feedback.join(env.unwrapped.seen)
        assert batch.lengths[i] <= len(environments.Endless.prompts[i % 6]) + 30
    assert max(len(env.unwrapped.seen) for env in envs) > 2


@pytest.mark.parametrize(("new_tokens", "fits"), [(6, False), (7, True)])
def test_environment_text_that_does_not_fit_ends_the_row_before_it(ppo, tokenizer, new_tokens, fits):
    """Two sampled tokens and four of feedback: with a budget of seven, one more can be sampled."""
    actor = scripted_model(ppo, tokenizer, {"=": "a", "e": "b"})
    batch = run(ppo, actor, tokenizer, make_envs("Endless", 1, feedback="fade"), 1, max_new_tokens=new_tokens)
    assert batch.texts == ["afadeb" if fits else "a"] and batch.stop == ["length"]
    assert batch.lengths.tolist() == [3 + 7 if fits else 3 + 2] and batch.rewards.sum() == (1.0 if fits else 0.5)


def test_truncation_by_the_environment_is_its_own_stop_reason(ppo, tokenizer):
    batch = run(ppo, scripted_model(ppo, tokenizer, {}), tokenizer, "Truncates", 2)
    assert batch.stop == ["env", "env"]


# --- A sample does not depend on the others ---


@pytest.mark.parametrize("env", ["Lengths", "TwoTurns", "Endless"])
def test_sample_is_the_same_alone_in_any_batch_and_in_any_order(ppo, tokenizer, env):
    actor = random_model(ppo, tokenizer)
    ids = [(i // 2, i) for i in range(14)]
    roll = functools.partial(run, ppo, actor, tokenizer, max_new_tokens=20)
    expected = roll(make_envs(env, 14), ids=ids)
    for slots, count in RUNS:
        batch = roll(make_envs(env, count), ids=ids, rollout_slots=slots)
        assert rows(batch) == rows(expected)
        torch.testing.assert_close(batch.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    for order in ([13 - i for i in range(14)], [9], [3, 12, 5]):
        batch = roll(make_envs(env, 5), ids=[ids[i] for i in order])
        assert rows(batch) == [rows(expected)[i] for i in order]
    assert len({json.dumps(row) for row in rows(expected)}) > 10


@pytest.mark.parametrize("env", ["Plain", "TwoTurns", "Endless"])
def test_tokens_decoded_between_two_host_reads_do_not_change_samples(ppo, tokenizer, monkeypatch, env):
    """K is 1 on the CPU and 8 on a GPU, where most rows end within a block."""
    actor, original = random_model(ppo, tokenizer), ppo.Engine.__init__
    one = run(ppo, actor, tokenizer, env, samples=14, rollout_slots=5)

    def init(engine, *rest):
        original(engine, *rest)
        engine.K = 8

    monkeypatch.setattr(ppo.Engine, "__init__", init)
    eight = run(ppo, actor, tokenizer, env, samples=14, rollout_slots=5)
    assert rows(eight) == rows(one) and eight.stats["rollout/decode_steps"] % 8 == 0
    torch.testing.assert_close(eight.logprobs, one.logprobs, atol=1e-5, rtol=0)


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for a GPU: reads of values, and shapes that depend on them."""

    waits = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique", "repeat_interleave")
    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        indices = args[1] if op.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_) else ()
        by_mask = any(x is not None and x.dtype == torch.bool for x in indices)
        self.count += by_mask or op.overloadpacket._qualified_op_name.split("::")[1] in self.waits
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("K", [1, 8])
def test_decoding_waits_for_the_device_once_a_block(ppo, tokenizer, monkeypatch, K):
    reads, blocks, block, tolist = HostReads(), [], ppo.Engine.decode_block, torch.Tensor.tolist

    def counted_tolist(x):
        reads.count += 1
        return tolist(x)

    def counted_block(engine):
        engine.K, before = K, reads.count
        with reads, monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", counted_tolist)
            ended = block(engine)
        blocks.append(reads.count - before)
        return ended

    monkeypatch.setattr(ppo.Engine, "decode_block", counted_block)
    batch = run(ppo, random_model(ppo, tokenizer), tokenizer, "Endless", 12, max_new_tokens=24, rollout_slots=5)
    assert set(blocks) == {1} and len(blocks) == batch.stats["rollout/decode_steps"] / K
    with reads:
        batch.tokens[batch.mask], batch.mask.any().item()
    assert reads.count == len(blocks) + 2, "reads are not seen"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_are_those_of_the_moment_and_change_nothing(ppo, tokenizer, monkeypatch, dtype):
    """What --compile on adds to a rollout beside torch.compile."""
    monkeypatch.setattr(ppo, "compiled_step", ppo.Engine.decode_step)
    calls, packed_linear = [], ppo.packed_linear
    monkeypatch.setattr(ppo, "packed_linear", lambda *args: calls.append(args) or packed_linear(*args))
    actor = random_model(ppo, tokenizer, qkv_bias=True).to(dtype)
    for _ in range(2):
        plain, packed = (run(ppo, actor, tokenizer, "TwoTurns", 8, rollout_slots=4, compile=c) for c in ("off", "on"))
        if dtype == torch.float32:
            assert rows(plain) == rows(packed)
        same = (plain.tokens == packed.tokens).cumprod(1).bool() & plain.mask  # until two tokens are nearly tied
        assert same.sum() > 0.5 * plain.mask.sum()
        close = functools.partial(torch.testing.assert_close, atol=1e-5 if dtype == torch.float32 else 0.3, rtol=0)
        close(plain.logprobs[same], packed.logprobs[same])
        assert len(calls) >= 15 * packed.stats["rollout/decode_steps"]  # 2 layers of 7 and the head
        assert all(module.packed is None for module in actor.modules() if isinstance(module, ppo.Linear))
        calls.clear()
        with torch.no_grad():
            for p in actor.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)


def test_no_weights_stay_packed_after_a_rollout_that_failed(ppo, tokenizer, monkeypatch):
    """They would be those of then in each forward that follows."""
    monkeypatch.setattr(ppo, "compiled_step", ppo.Engine.decode_step)
    actor, seen = random_model(ppo, tokenizer), []
    linears = [module for module in actor.modules() if isinstance(module, ppo.Linear)]
    result = ppo.EnvThread.result
    watch = lambda *args: seen.append(all(linear.packed is not None for linear in linears)) or result(*args)
    monkeypatch.setattr(ppo.EnvThread, "result", watch)
    with pytest.raises(ppo.UserError, match="out of order"):
        run(ppo, actor, tokenizer, "Raises", compile="on")
    assert seen and all(seen) and all(linear.packed is None for linear in linears)


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on the CPU")
def test_compiled_decoding_gives_the_same_samples(ppo, tokenizer):
    actor, graphs = random_model(ppo, tokenizer), torch._dynamo.utils.counters["stats"]
    for env, samples, slots in (("TwoTurns", 9, 4), ("Lengths", 12, 5), ("Endless", 12, 5)):
        changes = dict(rollout_slots=slots, max_new_tokens=20)
        plain, compiled = (run(ppo, actor, tokenizer, env, samples, compile=c, **changes) for c in ("off", "on"))
        assert rows(plain) == rows(compiled)
        torch.testing.assert_close(plain.logprobs, compiled.logprobs, atol=1e-5, rtol=0)
        before, graphs["last"] = graphs.pop("last", 0), graphs["unique_graphs"]
    assert graphs.pop("last") == before > 0, "a graph serves all rollouts"


def test_samples_of_a_prompt_share_its_prefill(ppo, tokenizer):
    actor = random_model(ppo, tokenizer)
    ids = [(seed, 4 * seed + i) for seed in (2, 3, 4) for i in range(4)]  # prompts of 40, 3 and 25 tokens
    shared = run(ppo, actor, tokenizer, "Lengths", ids=ids)
    unshared = run(ppo, actor, tokenizer, "Lengths", ids=ids, rollout_slots=1)
    assert shared.stats["rollout/prefill_tokens"] == 39 + 2 + 24
    if ppo.__name__ == "ppo_llm":  # the other finds the prompt of the sample before in the slot
        assert unshared.stats["rollout/prefill_tokens"] == 4 * (39 + 2 + 24)
    assert rows(shared) == rows(unshared) and len(set(shared.texts[:4])) > 1
    torch.testing.assert_close(shared.logprobs, unshared.logprobs, atol=1e-5, rtol=0)


def test_prompts_of_one_length_do_not_share_a_prefill(ppo, tokenizer):
    """Prompts 3 and 4 are "bad=" and "day="."""
    batch = run(ppo, random_model(ppo, tokenizer), tokenizer, "Plain", ids=[(3, 0), (4, 1)])
    assert batch.stats["rollout/prefill_tokens"] == 3 + 3


# --- Noise ---

PROBABILITIES = [0.3, 0.2, 0.15, 0.1, 0.08, 0.06, 0.05, 0.03, 0.0185, 0.009, 0.0015, 0.001]


@functools.cache
def draws(ppo, samples=512, tokens=400, probabilities=tuple(PROBABILITIES), first=0, iteration=0, padding=0, seed=1):
    """[samples, tokens] draws through `rollout` from known probabilities, as symbol numbers; padding never comes."""
    tokenizer = ppo.HFTokenizer.from_texts(["".join(chr(ord("a") + i) for i in range(len(probabilities)))])
    logits = torch.full([tokenizer.vocab_size + padding], -1e4)
    logits[3 : tokenizer.vocab_size] = torch.tensor(probabilities).log()
    ids = [(0, first + i) for i in range(samples)]
    envs = make_envs("OneToken", min(samples, 512))
    actor = bigram_model(ppo, logits.expand(len(logits), -1))
    sizes = {"rollout_slots": 512, "max_prompt_tokens": 1, "max_new_tokens": tokens}
    batch = run(ppo, actor, tokenizer, envs, ids=ids, iteration=iteration, seed=seed, **sizes)
    return batch.tokens[:, 1:] - 3


def chi_square(counts, expected):
    """In standard deviations from its mean."""
    degrees = counts.numel() - 1
    return float(((counts - expected).square() / expected).sum() - degrees) / math.sqrt(2 * degrees)


def test_draws_follow_the_distribution(ppo):
    x = draws(ppo)
    assert x.numel() >= 200_000
    counts = torch.bincount(x.flatten(), minlength=len(PROBABILITIES)).float()
    assert abs(chi_square(counts, x.numel() * torch.tensor(PROBABILITIES))) < 4


def test_rare_tokens_come_as_often_as_they_should(ppo):
    """One token of .999 and one of .001; and a thousand rare ones beside a token of .9."""
    rare = (draws(ppo, probabilities=(0.999, 0.001)) == 1).sum().item()
    expected = 0.001 * 512 * 400
    assert abs(rare - expected) < 4 * math.sqrt(expected)
    many = draws(ppo, tokens=50, probabilities=(0.9, *[1e-4] * 1000))
    assert abs((many > 0).float().mean().item() - 0.1) < 4 * math.sqrt(0.1 * 0.9 / many.numel())


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (1, 1), (1, -1), (2, 0), (0, 2)])
def test_draws_of_neighbouring_samples_and_tokens_are_independent(ppo, shift):
    """Pairs of draws `shift` (samples, token indices) apart, against the product of their distributions."""
    x = draws(ppo).clamp(max=8)  # the four rarest together
    p = torch.tensor([*PROBABILITIES[:8], sum(PROBABILITIES[8:])])
    rolled = x.roll([-shift[0], -shift[1]], [0, 1])
    first, second = (y[: -shift[0] or None, max(0, -shift[1]) : -max(0, shift[1]) or None] for y in (x, rolled))
    counts = torch.bincount((first * 9 + second).flatten(), minlength=81).float()
    assert abs(chi_square(counts, first.numel() * (p[:, None] * p).flatten())) < 4


def test_noise_depends_on_sample_iteration_and_seed_but_not_on_vocabulary_padding(ppo):
    """Of other noise a share of draws agrees by chance. Shifted: sample + iteration must not be all that counts."""
    small = functools.partial(draws, ppo, 64, 60)
    x, by_chance = small(), torch.tensor(PROBABILITIES).square().sum().item()
    assert torch.equal(x, small(padding=37)) and torch.equal(x[1:], small(first=1)[:-1])
    for y in (small(first=1000), small(iteration=1), small(iteration=-1), small(seed=2)):
        for a, b in ((x, y), (x[1:], y[:-1]), (x[:, 1:], y[:, :-1])):
            assert (a == b).float().mean().item() == pytest.approx(by_chance, abs=0.04)


def test_tails_of_the_noise_are_exponential(ppo):
    """Over 2**24 values and more: a uniform of too few bits rounds to 0 or 1, and its noise to 0 or infinity."""
    below, above, vocab_size, chunks = 0, 0, 2**20, 48
    for i in range(chunks):
        noise = ppo.exponential_noise(ppo.sample_keys(1, 0, [i]), torch.tensor([i]), vocab_size)
        assert noise.isfinite().all() and (noise > 0).all()
        below, above = below + (noise < 2**-14).sum().item(), above + (noise > 14 * math.log(2)).sum().item()
    expected = chunks * vocab_size * 2**-14
    assert abs(below - expected) < 4 * math.sqrt(expected) and abs(above - expected) < 4 * math.sqrt(expected)


# --- Odd but valid input ---


def test_eos_as_the_first_sampled_token(ppo, tokenizer):
    envs = make_envs("Plain", 3)
    batch = run(ppo, scripted_model(ppo, tokenizer, {}), tokenizer, envs, samples=3)
    assert batch.texts == ["", "", ""] and batch.stop == ["eos"] * 3 and batch.mask.sum(1).tolist() == [1, 1, 1]
    assert batch.lengths.tolist() == [len(prompt) + 1 for prompt in environments.TextEnv.prompts[:3]]
    assert [env.unwrapped.seen for env in envs] == [[""]] * 3


def test_never_eos_is_cut_by_length(ppo, tokenizer):
    batch = run(ppo, scripted_model(ppo, tokenizer, {}, default="a"), tokenizer, samples=4, rollout_slots=3)
    assert batch.texts == ["a" * 12] * 4 and batch.stop == ["length"] * 4 and batch.mask.sum(1).tolist() == [12] * 4
    assert batch.rewards.sum(1).tolist() == pytest.approx([1.2] * 4)


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 4])
def test_response_that_fills_the_budget(ppo, tokenizer, new_tokens):
    """b c d <eos> takes four tokens: with exactly four it has ended by itself."""
    stop, text = "eos" if new_tokens == 4 else "length", "bcd"[:new_tokens]
    actor = scripted_model(ppo, tokenizer, {"a": "b", "b": "c", "c": "d"})
    batch = run(ppo, actor, tokenizer, "OneToken", 2, max_new_tokens=new_tokens, max_prompt_tokens=1)
    assert batch.stop == [stop] * 2 and batch.texts == [text] * 2 and batch.lengths.tolist() == [1 + new_tokens] * 2


def test_pad_may_be_eos(ppo, tokenizer):
    actor = random_model(ppo, tokenizer)
    settings = {"tokenizer.json": tokenizer.files["tokenizer.json"], "tokenizer_config.json": '{"eos_token": "<eos>"}'}
    no_pad = ppo.HFTokenizer("no pad", settings)
    assert no_pad.pad_id == no_pad.eos_id != tokenizer.pad_id
    plain, same = (run(ppo, actor, t, "Lengths", 12) for t in (tokenizer, no_pad))
    assert rows(plain) == rows(same) and torch.equal(plain.mask, same.mask)
    assert all(same.tokens[i, n - 1] == no_pad.pad_id and same.mask[i, n - 1] for i, n in enumerate(same.lengths)
               if same.stop[i] == "eos")


def test_eos_in_the_prompt_ends_nothing(ppo, tokenizer, monkeypatch):
    monkeypatch.setattr(environments.TextEnv, "prompts", ("a<eos>b<eos>", "<pad>b="))
    batch = run(ppo, scripted_model(ppo, tokenizer, {"<eos>": "c", "=": "c"}), tokenizer, samples=2)
    assert (batch.tokens[0] == tokenizer.eos_id).sum() == 3
    assert batch.texts == ["c", "c"] and batch.stop == ["eos", "eos"]
    assert batch.mask.int().tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0]]


def test_non_ascii_text_passes_through(ppo):
    tokenizer = ppo.HFTokenizer.from_texts(["né漢🙂=ßλ"])
    envs = make_envs("NonAscii", 2)
    actor = scripted_model(ppo, tokenizer, {"=": "🙂", "🙂": "漢", "漢": "é"})
    batch = run(ppo, actor, tokenizer, envs, samples=2)
    assert batch.prompts == list(environments.NonAscii.prompts) and batch.texts == ["🙂漢é"] * 2
    assert [env.unwrapped.seen for env in envs] == [["🙂漢é"]] * 2 and batch.lengths.tolist() == [9, 7]


def test_token_that_the_tokenizer_does_not_know_is_sampled_and_skipped_in_text(ppo, tokenizer):
    size = tokenizer.vocab_size
    actor = scripted_model(ppo, tokenizer, {"=": "b"}, default=size + 1, vocab_size=size + 2)
    batch = run(ppo, actor, tokenizer, samples=1)
    assert batch.tokens[0, 4:].tolist() == [size + 1] * 11 and batch.texts == ["b"]


def test_several_stop_ids(ppo, tokenizer):
    ids = {"eos_token_id": [tokenizer.eos_id, *tokenizer.encode("y")]}
    two = ppo.HFTokenizer("two", tokenizer.files | {"generation_config.json": json.dumps(ids)})
    batch = run(ppo, scripted_model(ppo, tokenizer, {"=": "a", "a": "y"}), two, samples=1)
    assert batch.stop == ["eos"] and batch.tokens[0].tolist() == tokenizer.encode("ab=ay")


# --- Failures of environments ---


@pytest.mark.parametrize(("env", "reason"), [
    ("RewardNaN", "('', nan, "), ("RewardInf", "('', inf, "), ("RewardNone", "('', None, "),
    ("RewardString", "('', '1.0', "), ("Raises", "RuntimeError: the judge is out of order"),
    ("Hangs", "--env-timeout 0.2"), ("FourValues", "('', 1.0, True, {})"),
])
def test_failure_names_environment_sample_seed_and_prompt(ppo, tokenizer, env, reason):
    with pytest.raises(ppo.UserError) as error:
        run(ppo, random_model(ppo, tokenizer), tokenizer, env, ids=[(4, 9)], env_timeout=0.2)
    for part in (f"{env}-v0", "sample 9", "seed 4", "'day='", "step()", reason):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_memory_for_the_cache_is_looked_up_when_the_weights_are_packed(ppo, tokenizer, monkeypatch):
    """Packed weights take as much again; looked up before, a cache could be called fitting that does not."""
    monkeypatch.setattr(ppo, "compiled_step", ppo.Engine.decode_step)
    actor, seen = random_model(ppo, tokenizer), []
    linears, free_memory = [module for module in actor.modules() if isinstance(module, ppo.Linear)], ppo.free_memory
    watch = lambda device: seen.append(all(linear.packed is not None for linear in linears)) or free_memory(device)
    monkeypatch.setattr(ppo, "free_memory", watch)
    run(ppo, actor, tokenizer, "Plain", compile="on")
    assert seen == [True]


def test_state_of_the_rows_is_in_tensors_of_its_own(ppo, tokenizer, monkeypatch):
    """Views of one tensor would be told apart by their offsets, for which torch.compile compiles again and again."""
    engines, block = [], ppo.Engine.decode_block
    monkeypatch.setattr(ppo.Engine, "decode_block", lambda engine: engines.append(engine) or block(engine))
    run(ppo, random_model(ppo, tokenizer), tokenizer, "Plain")
    engine = engines[0]
    state = (engine.sample, engine.length, engine.limit, engine.alive, engine.tokens, engine.mask, engine.logprobs)
    assert len({x.untyped_storage().data_ptr() for x in state}) == len(state)


def test_failure_names_its_own_sample_among_others(ppo, tokenizer):
    envs = make_envs("Constant", 4, reward=math.nan, first=5)
    with pytest.raises(ppo.UserError, match=r"sample 5 with seed 5, prompt 'face='"):
        run(ppo, random_model(ppo, tokenizer), tokenizer, envs, samples=8)


def test_prompt_that_is_too_long_names_flag_and_prompt(ppo, tokenizer):
    with pytest.raises(ppo.UserError, match=r"--max-prompt-tokens 39: 40 tokens in prompt 'abcdef"):
        run(ppo, random_model(ppo, tokenizer), tokenizer, "Lengths", max_prompt_tokens=39)


def test_cache_that_does_not_fit_is_an_error_with_the_arithmetic(ppo, tokenizer, monkeypatch):
    """Of 2 layers with 2 key-value heads of 8 numbers a row of 53 positions takes 2 x 2 x 2 x 53 x 8 x 4 bytes."""
    monkeypatch.setattr(ppo, "free_memory", lambda device: 61_000)
    actor = random_model(ppo, tokenizer)
    run(ppo, actor, tokenizer, make_envs("Plain", 4), samples=8, rollout_slots=4)
    sizes = r"2 x 2 layers x 5 rows x 2 heads x 53 tokens x 8 x 4 bytes takes 0\.0 GB; 0\.0 GB are free, enough for 89%"
    with pytest.raises(ppo.UserError, match=f"--rollout-slots: a KV cache of {sizes} of these rows"):
        run(ppo, actor, tokenizer, make_envs("Plain", 5), samples=5, rollout_slots=5)


def test_free_memory_is_that_of_the_machine(ppo):
    total = 1024 * int(Path("/proc/meminfo").read_text().split()[1])
    assert total / 100 < ppo.free_memory(torch.device("cpu")) < total
