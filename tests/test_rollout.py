"""The rollout: layout, log-probs, turns, independence of the batch, sampling noise, rewards, ends of a response."""

import json
import math
import types
from unittest import mock

import environments
import numpy as np
import pytest
import torch
from transformers import AutoConfig

ALPHABET = "abcdefwxy="


def make_envs(name, count, **kwargs):
    return [getattr(environments, name)(**kwargs) for _ in range(count)]


def make_model(ppo, vocab_size, model_type="llama", head="lm", **changes):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"vocab_size": vocab_size, "num_key_value_heads": 2, "rms_norm_eps": 1e-6} | changes
    return ppo.Transformer(ppo.check_config(AutoConfig.for_model(model_type, **shape)), head)


def random_model(ppo, tokenizer, **changes):
    """Random weights, sharp enough for the log-probs of the tokens to differ."""
    model = make_model(ppo, tokenizer.vocab_size, **changes)
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.25)
    return model


@torch.no_grad()
def bigram_model(ppo, logits):
    """A model with logits[i] [V, V] after token i: one-hot embeddings, residual branches of zeros."""
    one_head = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4}
    model = make_model(ppo, len(logits), hidden_size=len(logits), **one_head)
    for p in model.model.layers.parameters():
        p.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(len(logits)))
    model.lm_head.weight.copy_(logits.T / math.sqrt(len(logits)))  # RMSNorm makes 1 of a one-hot the root of V
    return model


def scripted_model(ppo, tokenizer, script):
    """Says script[token] after each token, else <eos>: {"a": "b"} says b after a."""
    token_id, logits = tokenizer.hf.convert_tokens_to_ids, torch.zeros(2 * [tokenizer.vocab_size])
    logits[:, token_id("<eos>")] = 100.0
    for token, following in script.items():
        logits[token_id(token)] = 0.0
        logits[token_id(token), token_id(following)] = 100.0
    return bigram_model(ppo, logits)


def run(ppo, actor, tokenizer, env="TextEnv", samples=6, ids=None, iteration=0, steps=1, **changes):
    """Episodes in `env`, a name or a list of environments, of seeds and sample ids 0, 1, ... or `ids` [(seed, id)]."""
    seeds, sample_ids = zip(*(ids or [(i, i) for i in range(samples)]), strict=True)
    args = ppo.Args(**({"max_prompt_tokens": 40, "max_new_tokens": 12, "rollout_slots": 16} | changes))
    per_row = getattr(ppo, "ENVS_PER_ROW", 1)  # only the second script has more environments than rows
    envs = make_envs(env, math.ceil(per_row * args.rollout_slots)) if isinstance(env, str) else env
    decoder = ppo.Decoder(actor, min(args.rollout_slots, len(envs)), tokenizer.stop_ids, args)
    decoder.steps_per_wait = steps  # between two looks at the tokens: 8 on a GPU
    return ppo.rollout_share(decoder, tokenizer, envs, seeds, sample_ids, iteration, args)


chat = lambda *turns: [{"role": role, "content": content} for role, content in turns]
# What an episode is, without the log-probs; and its text, without the prompt.
rows = lambda episodes: [(e.ids, e.mask, e.rewards, e.stop, e.success, e.conversation) for e in episodes]
text = lambda episode: "".join(message["content"] for message in episode.conversation[1:])


def assert_same(episodes, expected):
    assert rows(episodes) == rows(expected)
    for episode, other in zip(episodes, expected, strict=True):
        assert episode.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.fixture
def tokenizer(ppo):
    return ppo.HFTokenizer.from_texts([ALPHABET])


def noise_by_hand(seed, iteration, samples, t, vocab_size):
    """Gumbel noise [samples, V] of the token at index t: lowbias32 of unsigned integers, and float64."""

    def mixed(x, key=0):
        x = (x ^ x >> 16) * np.uint32(0x7FEB352D) ^ key
        x = (x ^ x >> 15) * np.uint32(0x846CA68B)
        return x ^ x >> 16

    number = lambda x: np.array([x]).astype(np.uint32)
    keys = mixed(mixed(mixed(number(seed)) ^ number(iteration)) ^ np.arange(samples).astype(np.uint32))
    token_keys = mixed(mixed(keys ^ np.uint32(0x5851F42D)) ^ number(t))
    x = mixed(np.arange(vocab_size).astype(np.uint32) ^ token_keys[:, None], mixed(token_keys ^ keys)[:, None])
    return torch.from_numpy(-np.log(-np.log1p(-((x & 0x7FFFFFFF) + 0.5) / 2**31)))


@pytest.mark.parametrize(("env", "temperature"), [("Lengths", 0.7), ("TwoTurns", 1), ("Endless", 1.3), ("Endless", 0)])
@torch.no_grad()
def test_tokens_and_logprobs_are_those_of_the_training_forward(ppo, tokenizer, env, temperature):
    """Tokens are the argmax of logits plus noise; without noise at temperature 0, whose log-probs are those of 1."""
    actor, args = random_model(ppo, tokenizer), ppo.Args(device="cpu", compile="off")
    for iteration in range(2):
        changes = dict(temperature=temperature, rollout_slots=7)
        e = ppo.Experience.from_episodes(run(ppo, actor, tokenizer, env, 20, None, iteration, **changes))
        args.temperature = temperature or 1.0
        score = lambda e=e: ppo.logprobs_of_all(actor, e, [torch.arange(20)], args)
        torch.testing.assert_close(e.sampler_logprobs, score(), atol=1e-5, rtol=0)
        logits = actor(e.tokens)[:, :-1] / args.temperature  # of tokens[:, 1:]
        for t in range(1, e.tokens.shape[1]):
            noise = noise_by_hand(1, iteration, 20, t, logits.shape[2])
            best = (logits[:, t - 1] + bool(temperature) * noise).argmax(-1)
            assert torch.equal(best[e.mask[:, t]], e.tokens[:, t][e.mask[:, t]])
        args.temperature *= 0.8  # in one place only
        assert (e.sampler_logprobs - score()).abs().max() > 0.1
        for p in actor.parameters():  # as after an update
            p.add_(torch.randn_like(p), alpha=0.1)


def test_two_turns_by_hand(ppo, tokenizer):
    """Row 0 is a b <eos> c d <eos>, with c from the environment; row 1 is e f <eos> x y <eos>, whose y is wrong."""
    actor, envs = scripted_model(ppo, tokenizer, {"a": "b", "c": "d", "e": "f", "x": "y"}), make_envs("TwoTurns", 2)
    episodes = run(ppo, actor, tokenizer, envs, samples=2)
    for episode, (first, answer, feedback, second), last_reward in zip(episodes, ["abcd", "efxy"], [1.0, 0.0]):
        a, b, c, d = tokenizer.encode(first + answer + feedback + second)
        assert episode.ids == [a, b, tokenizer.eos_id, c, d, tokenizer.eos_id]
        assert episode.mask == [False, True, True, False, True, True] and episode.stop == "terminated"
        assert episode.rewards == [0, 0, 0.25, 0, 0, last_reward]
        assert episode.conversation[1:] == chat(("assistant", answer), ("user", feedback), ("assistant", second))
        assert [answer, second] in [env.seen for env in envs]


@pytest.mark.shared
def test_a_turn_adds_to_the_cache_what_is_missing(ppo, tokenizer, monkeypatch):
    actor, starts = random_model(ppo, tokenizer), []
    prefill = actor.prefill

    def watch(tokens, positions, *rest):
        starts.append(int(positions.min()))  # the first position that is written
        return prefill(tokens, positions, *rest)

    monkeypatch.setattr(actor, "prefill", watch)
    logits = lambda *args: actor.lm_head(prefill(*args))[:, 0]
    monkeypatch.setattr(actor, "next_logits", logits)  # is not watched
    run(ppo, actor, tokenizer, make_envs("Endless", 9, feedback="fade"), 9, max_new_tokens=30)
    assert len(starts) > 2 and starts[0] == 0 and sorted(set(starts)) == starts


def test_success_is_that_of_the_last_step_or_of_the_sum_of_rewards(ppo, tokenizer):
    for rewards, infos, success in [
        ((1, 1), ({"success": True}, {"success": False}), False), ((1, -2), ({}, {}), False), ((2, -1), ({}, {}), True),
    ]:  # fmt: skip
        episode = ppo.Episode(0, prompt_length=1)
        for reward, info, last in zip(rewards, infos, (False, True), strict=True):
            episode.add([4, tokenizer.eos_id], [0.0, 0.0])
            env = types.SimpleNamespace(step=mock.Mock(return_value=("c", reward, last, False, info)))
            episode.end_turn(env, len(episode.ids) - 2, tokenizer, ppo.Args(max_new_tokens=9))
        assert episode.success == success


@pytest.mark.parametrize("steps", [1, 8])  # between two looks at the tokens
def test_logprobs_beyond_128_positions(ppo, tokenizer, steps):
    """Attention reads the cache in blocks of 128 positions. Nothing ends a response here."""
    tokenizer.stop_ids, actor = [tokenizer.vocab_size], random_model(ppo, tokenizer)
    e = ppo.Experience.from_episodes(run(ppo, actor, tokenizer, samples=2, steps=steps, max_new_tokens=140))
    expected = ppo.logprobs_of_all(actor, e, [torch.arange(2)], ppo.Args(device="cpu", compile="off"))
    torch.testing.assert_close(e.sampler_logprobs, expected, atol=1e-4, rtol=0)


@pytest.fixture
def byte_tokenizer(ppo):
    """Its tokens are bytes, and "ab"."""
    vocab = ["<eos>", *sorted(ppo.tokenizers.pre_tokenizers.ByteLevel.alphabet()), "ab"]
    bpe = ppo.tokenizers.ByteLevelBPETokenizer({token: i for i, token in enumerate(vocab)}, [("a", "b")])
    return ppo.HFTokenizer("bytes", ppo.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<eos>"))


def test_sampled_ids_are_never_encoded_again(ppo, byte_tokenizer):
    a, b, ab, x, equals = (byte_tokenizer.encode(text)[0] for text in ("a", "b", "ab", "x", "="))
    actor = scripted_model(ppo, byte_tokenizer, {"=": "a", "a": "b", "x": "a"})
    [episode] = run(ppo, actor, byte_tokenizer, make_envs("Endless", 1, feedback="abx"), ids=[(2, 0)], max_new_tokens=8)
    assert episode.ids == [x, equals, a, b, 0, ab, x, a, b, 0] and text(episode) == "ababxab"


def test_dense_rewards_lie_on_the_tokens_that_complete_their_characters(ppo, byte_tokenizer):
    """Tokens of the second turn: ab, c, two bytes that are é, <eos> in the middle, d, <eos>."""
    def play(pairs):
        env = types.SimpleNamespace(step=lambda _: ("", 0.0, True, False, {"rewards": pairs}))
        episode = ppo.Episode(7)
        episode.add(byte_tokenizer.encode("xyz"))
        episode.add([*byte_tokenizer.encode("abcé"), 0, *byte_tokenizer.encode("d"), 0], 7 * [0.0])
        episode.end_turn(env, 3, byte_tokenizer, ppo.Args(max_new_tokens=9))
        return episode.rewards

    assert play([(1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (5, 16.0), (5, 32.0)]) == [0, 0, 0, 3, 4, 0, 8, 0, 48, 0]
    for wrong, part in ([(0, 1.0)], "not within"), ([(6, 1.0)], "not within"), ([(1, math.nan)], "a finite number"):
        with pytest.raises(ValueError, match=part):
            play(wrong)


@pytest.mark.parametrize("env", ["Lengths", "TwoTurns", "Endless"])
def test_a_sample_is_the_same_alone_in_any_batch_and_in_any_order(ppo, tokenizer, env):
    ids, actor = [(i // 2, i) for i in range(14)], random_model(ppo, tokenizer)
    roll = lambda **changes: run(ppo, actor, tokenizer, env, max_new_tokens=16, **changes)
    expected = roll(ids=ids)
    assert len({text(episode) for episode in expected}) > 10
    for order, changes in [
        (range(14), {"rollout_slots": 3}), (range(13, -1, -1), {"rollout_slots": 5}), ([9], {}), ([3, 12, 5], {}),
        (range(14), {"rollout_slots": 5, "steps": 8, "micro_batch_tokens": 5}),
    ]:  # fmt: skip
        assert_same(roll(ids=[ids[i] for i in order], **changes), [expected[i] for i in order])


@pytest.mark.parametrize(("env", "new_tokens", "stop", "response"), [
    ("TextEnv", 1, "length", "b"), ("TextEnv", 3, "length", "bcd"), ("TextEnv", 4, "terminated", "bcd"),
    ("Endless", 7, "length", "bcd"), ("Endless", 8, "length", "bcdfeab"), ("Endless", 9, "length", "bcdfeabc"),
])  # fmt: skip
def test_a_response_is_cut_by_the_token_limit_of_all_turns(ppo, tokenizer, env, new_tokens, stop, response):
    """b c d <eos> takes four tokens. The environment's text of three is added if another token can follow it."""
    actor = scripted_model(ppo, tokenizer, {"=": "b", "b": "c", "c": "d", "a": "b"})
    envs = make_envs(env, 2, **({"feedback": "fea"} if env == "Endless" else {}))
    for episode in run(ppo, actor, tokenizer, envs, 2, max_new_tokens=new_tokens):
        assert (episode.stop, text(episode)) == (stop, response)


def test_stop_ids_end_a_turn_where_they_are_sampled_and_nowhere_else(ppo, tokenizer, monkeypatch, tmp_path):
    """They may be several, be the first token of a response, be no special token and stand in a prompt."""
    tokenizer.hf.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.encode("y")}))
    two = ppo.HFTokenizer(tmp_path)
    monkeypatch.setattr(environments.TextEnv, "prompts", ("a<eos>b<eos>", "y=b"))
    first, second = run(ppo, scripted_model(ppo, two, {"<eos>": "c", "b": "y"}), two, samples=2)
    (eos, _), (a, b, c, y, equals) = two.stop_ids, two.encode("abcy=")
    assert (first.ids, first.mask) == ([a, eos, b, eos, c, eos], [False] * 4 + [True] * 2)
    assert (second.ids, second.mask) == ([y, equals, b, y], [False] * 3 + [True])
    assert (first.stop, text(first), second.stop, text(second)) == ("terminated", "c", "terminated", "")
