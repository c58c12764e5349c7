"""The rollout: layout, log-probs, turns, independence of the batch, sampling noise, odd inputs, failures."""

import functools
import json
import math
import shutil

import environments
import gymnasium as gym
import pytest
import torch

ALPHABET = "abcdefwxy="


def make_envs(name, count, **kwargs):
    return [gym.make(f"{name}-v0", disable_env_checker=True, **kwargs) for _ in range(count)]


def make_model(ppo, vocab_size, **changes):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    raw = {"model_type": "llama", "vocab_size": vocab_size, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, **shape}
    return ppo.Transformer(ppo.ModelConfig.from_hf(raw | changes))


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
    model = make_model(ppo, len(logits), hidden_size=len(logits), head_dim=4, num_hidden_layers=1)
    for p in model.model.layers.parameters():
        p.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(len(logits)))
    model.lm_head.weight.copy_(logits.T / math.sqrt(len(logits)))  # RMSNorm makes 1 of a one-hot the root of V
    return model


def scripted_model(ppo, tokenizer, script, default="<eos>", vocab_size=None):
    """Says script[token] after each token: {"a": "b"} says b after a."""
    token_id = tokenizer.hf.convert_tokens_to_ids
    logits = torch.zeros(2 * [vocab_size or tokenizer.vocab_size])
    logits[:, default if isinstance(default, int) else token_id(default)] = 100.0
    for token, following in script.items():
        logits[token_id(token)] = 0.0
        logits[token_id(token), token_id(following)] = 100.0
    return bigram_model(ppo, logits)


def run(ppo, actor, tokenizer, env="Plain", samples=6, ids=None, iteration=0, greedy=False, **changes):
    """Rollout in `env`, a name or a list of environments, of seeds and sample ids 0, 1, ... or `ids` [(seed, id)]."""
    seeds, sample_ids = zip(*(ids or [(i, i) for i in range(samples)]), strict=True)
    args = ppo.Args(**({"max_prompt_tokens": 40, "max_new_tokens": 12, "rollout_slots": 16} | changes))
    envs = make_envs(env, 16) if isinstance(env, str) else env
    return ppo.rollout(actor, tokenizer, envs, seeds, sample_ids, iteration, args, greedy)


def rows(batch):
    """What each sample is, without its padding."""
    tensors = (batch.tokens, batch.mask, batch.rewards)
    return [(*(x[i, :n].tolist() for x in tensors), batch.stop[i], batch.texts[i]) for i, n in enumerate(batch.lengths)]


@pytest.fixture
def tokenizer(ppo):
    return ppo.HFTokenizer.from_texts([ALPHABET])


@pytest.mark.parametrize("greedy", [False, True])
def test_all_fields_are_aligned_at_the_tokens_own_index(ppo, tokenizer, greedy):
    batch = run(ppo, random_model(ppo, tokenizer), tokenizer, "Lengths", 12, greedy=greedy, rollout_slots=5)
    T = int(batch.lengths.max())
    assert batch.tokens.shape == batch.mask.shape == batch.logprobs.shape == batch.rewards.shape == (12, T)
    assert (batch.tokens.dtype, batch.mask.dtype, batch.logprobs.dtype) == (torch.int64, torch.bool, torch.float32)
    assert set(batch.stop) == {"eos", "length"} or greedy
    for i, n in enumerate(batch.lengths.tolist()):
        prompt = tokenizer.encode_prompt(environments.Lengths.prompts[i % 6])
        response = batch.tokens[i, len(prompt) : n].tolist()
        assert tokenizer.encode_prompt(batch.prompts[i]) == batch.tokens[i, : len(prompt)].tolist() == prompt
        assert not batch.tokens[i, n:].any() and not batch.logprobs[i][~batch.mask[i]].any()
        assert batch.mask[i].nonzero()[:, 0].tolist() == list(range(len(prompt), n))
        assert (batch.logprobs[i][batch.mask[i]] < 0).all()
        assert batch.texts[i] == tokenizer.decode(response) and batch.success[i] == bool(batch.texts[i])
        assert batch.rewards[i].nonzero()[:, 0].tolist() == ([n - 1] if batch.texts[i] else [])
        assert batch.rewards[i, n - 1] == pytest.approx(len(batch.texts[i]) / 10)
        assert tokenizer.eos_id not in response[:-1] and (batch.stop[i] == "eos" or len(response) == 12)
        assert batch.stop[i] == ("eos" if response[-1] == tokenizer.eos_id else "length")


@pytest.mark.parametrize(("env", "temperature"), [("Lengths", 0.7), ("TwoTurns", 1.0), ("Endless", 1.3)])
@torch.no_grad()
def test_recorded_logprobs_are_those_of_the_training_forward(ppo, tokenizer, env, temperature):
    """Also of weights that changed after an earlier rollout; and greedy tokens are the argmax."""
    actor = random_model(ppo, tokenizer)
    for greedy in (False, True):
        batch = run(ppo, actor, tokenizer, env, 20, None, 0, greedy, temperature=temperature, rollout_slots=7)
        experience = ppo.Experience.from_rollout(batch, torch.device("cpu"))
        logprobs_of, one = lambda *x: ppo.sampled_logprobs(*x, temperature)[0], ppo.World(torch.device("cpu"))
        logprobs = ppo.forward_all(lambda mb: logprobs_of(actor, mb), experience, ppo.Args(), one)
        torch.testing.assert_close(batch.logprobs, logprobs, atol=1e-5, rtol=0)
        policy = torch.distributions.Categorical(logits=actor(batch.tokens)[:, :-1] / temperature)
        plain = policy.log_prob(batch.tokens[:, 1:]) * batch.mask[:, 1:]
        torch.testing.assert_close(batch.logprobs[:, 1:], plain, atol=1e-5, rtol=0)
        best = policy.logits.argmax(-1)[batch.mask[:, 1:]]
        assert torch.equal(best, batch.tokens[batch.mask]) == greedy
        for p in actor.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)


def test_two_turns_by_hand(ppo, tokenizer):
    """Row 0 is a b <eos> c d <eos>, with c from the environment; row 1 is e f <eos> x y <eos>, whose y is wrong."""
    actor = scripted_model(ppo, tokenizer, {"a": "b", "c": "d", "e": "f", "x": "y"})
    envs = make_envs("TwoTurns", 2)
    batch = run(ppo, actor, tokenizer, envs, samples=2)
    envs.sort(key=lambda env: env.unwrapped.seed)
    eos = tokenizer.eos_id
    for i, (first, answer, feedback, second) in enumerate(["abcd", "efxy"]):
        a, b, c, d = tokenizer.encode(first + answer + feedback + second)
        assert batch.tokens[i].tolist() == [a, b, eos, c, d, eos]
        assert envs[i].unwrapped.seen == [answer, second]
        assert batch.texts[i] == answer + feedback + second
        turns = [("user", first), ("assistant", answer), ("user", feedback), ("assistant", second)]
        assert batch.conversations[i] == turns
    assert batch.mask.int().tolist() == 2 * [[0, 1, 1, 0, 1, 1]]
    assert batch.rewards.tolist() == [[0, 0, 0.25, 0, 0, 1], [0, 0, 0.25, 0, 0, 0]]
    assert batch.lengths.tolist() == [6, 6] and batch.stop == ["eos", "eos"]


def test_dense_rewards_lie_on_their_characters_in_each_turn(ppo, tokenizer):
    batch = run(ppo, random_model(ppo, tokenizer), tokenizer, make_envs("Dense", 16), samples=16)
    for tokens, mask, rewards, *_ in rows(batch):
        characters, expected = 0, []
        for token, sampled, more in zip(tokens, mask, [*mask[1:], False], strict=True):
            characters = characters + (token > 2) if sampled else 0  # of the turn, so far; ids 0 to 2 are special
            expected.append(sampled * (token > 2) * characters + 0.5 * (sampled and not more))
        assert rewards == expected


def test_dense_rewards_of_tokens_that_are_not_characters(ppo):
    """Tokens: ab, c, two bytes that are é, <eos> in the middle, d, <eos>."""
    vocab = ["<eos>", *sorted(ppo.tokenizers.pre_tokenizers.ByteLevel.alphabet()), "ab"]
    bpe = ppo.tokenizers.ByteLevelBPETokenizer({token: i for i, token in enumerate(vocab)}, [("a", "b")])
    hf = ppo.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<eos>")
    tokenizer, episode = ppo.HFTokenizer("bytes", hf), ppo.Episode(None, "sample 7")
    answer = lambda pairs: ("", 0.0, True, False, {"rewards": pairs})
    episode.add_response([*tokenizer.encode("abcé"), 0, *tokenizer.encode("d"), 0], 7 * [0.0])
    episode.take_answer(answer([(1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (5, 16.0), (5, 32.0)]), tokenizer)
    assert episode.rewards == [3.0, 4.0, 0.0, 8.0, 0.0, 48.0, 0.0]
    for wrong in [(0, 1.0)], [(6, 1.0)], [(1, math.nan)], [("1", 1.0)], [(1, "1.0")], [1], 1:
        with pytest.raises(ppo.UserError, match=r"info.*of sample 7: "):
            episode.take_answer(answer(wrong), tokenizer)


@pytest.mark.parametrize("feedback", ["fade", ""])
def test_an_endless_environment_gives_truncated_rows(ppo, tokenizer, feedback):
    envs = make_envs("Endless", 16, feedback=feedback)
    batch = run(ppo, random_model(ppo, tokenizer), tokenizer, envs, samples=16, max_new_tokens=30)
    envs.sort(key=lambda env: env.unwrapped.seed)
    assert set(batch.stop) == {"length"} and max(len(env.unwrapped.seen) for env in envs) > 2
    for i, env in enumerate(envs):
        assert batch.rewards[i].unique().tolist() == [0, 0.5] and batch.mask[i][batch.rewards[i] > 0].all()
        assert batch.rewards[i].count_nonzero() == len(env.unwrapped.seen)
        assert batch.texts[i] == feedback.join(env.unwrapped.seen)
        assert batch.lengths[i] <= len(environments.Endless.prompts[i % 6]) + 30


@pytest.mark.parametrize(("new_tokens", "fits"), [(6, False), (7, True)])
def test_environment_text_that_does_not_fit_ends_the_row_before_it(ppo, tokenizer, new_tokens, fits):
    """Two sampled tokens and four of feedback: with a budget of seven, one more can be sampled."""
    actor = scripted_model(ppo, tokenizer, {"=": "a", "e": "b"})
    batch = run(ppo, actor, tokenizer, make_envs("Endless", 1, feedback="fade"), 1, max_new_tokens=new_tokens)
    assert batch.texts == ["afadeb" if fits else "a"] and batch.stop == ["length"]
    turns = [("user", "ab="), ("assistant", "a"), ("user", "fade"), ("assistant", "b")]
    assert batch.conversations == [turns if fits else turns[:2]]
    assert batch.lengths.tolist() == [3 + 7 if fits else 3 + 2] and batch.rewards.sum() == (1.0 if fits else 0.5)


@pytest.mark.parametrize("env", ["Lengths", "TwoTurns", "Endless"])
def test_a_sample_is_the_same_alone_in_any_batch_and_in_any_order(ppo, tokenizer, env, monkeypatch):
    actor = random_model(ppo, tokenizer)
    ids = [(i // 2, i) for i in range(14)]
    roll = functools.partial(run, ppo, actor, tokenizer, max_new_tokens=16)
    expected = roll(make_envs(env, 14), ids=ids)
    for slots, count in [(3, 3), (64, 4)]:
        batch = roll(make_envs(env, count), ids=ids, rollout_slots=slots)
        assert rows(batch) == rows(expected)
        torch.testing.assert_close(batch.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    for order in ([13 - i for i in range(14)], [9], [3, 12, 5]):
        batch = roll(make_envs(env, 5), ids=[ids[i] for i in order])
        assert rows(batch) == [rows(expected)[i] for i in order]
    assert len({json.dumps(row) for row in rows(expected)}) > 10
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True)  # 8 steps between two reads of the host
    batch = roll(make_envs(env, 5), ids=ids, micro_batch_tokens=5)
    assert rows(batch) == rows(expected) and batch.stats["rollout/decode_steps"] % 8 == 0


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on the CPU")
def test_compiled_decoding_gives_the_same_samples_by_one_graph(ppo, tokenizer):
    actor, graphs = random_model(ppo, tokenizer), torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()
    for env, samples, slots in (("TwoTurns", 9, 4), ("Lengths", 12, 5), ("Endless", 12, 5)):
        changes = dict(rollout_slots=slots, max_new_tokens=20)
        plain, compiled = (run(ppo, actor, tokenizer, env, samples, compile=c, **changes) for c in ("off", "on"))
        assert rows(plain) == rows(compiled)
        torch.testing.assert_close(plain.logprobs, compiled.logprobs, atol=1e-5, rtol=0)
        before, graphs["last"] = graphs.pop("last", 0), graphs["unique_graphs"]
    assert graphs.pop("last") == before > 0, "a graph serves all rollouts"


PROBABILITIES = [0.3, 0.2, 0.15, 0.1, 0.08, 0.06, 0.05, 0.03, 0.0185, 0.009, 0.0015, 0.001]


@functools.cache
def draws(ppo, samples=64, tokens=30, first=0, iteration=0, padding=0, seed=1):
    """[samples, tokens] draws through `rollout` from PROBABILITIES, as symbol numbers; padding never comes."""
    tokenizer = ppo.HFTokenizer.from_texts(["abcdefghijkl"])
    logits = torch.full([tokenizer.vocab_size + padding], -1e4)
    logits[3 : tokenizer.vocab_size] = torch.tensor(PROBABILITIES).log()
    actor, ids = bigram_model(ppo, logits.expand(len(logits), -1)), [(0, first + i) for i in range(samples)]
    sizes = {"rollout_slots": 512, "max_prompt_tokens": 1, "max_new_tokens": tokens}
    batch = run(ppo, actor, tokenizer, make_envs("OneToken", samples), 0, ids, iteration, seed=seed, **sizes)
    return batch.tokens[:, 1:] - 3


@pytest.mark.shared
def test_draws_follow_the_distribution_and_are_independent_of_neighbours(ppo):
    """Pairs of draws `shift` (samples, token indices) apart, against the product of their distributions."""
    x, p = draws(ppo, 256, 200), torch.tensor(PROBABILITIES)
    pairs = [(x.flatten(), p)]
    x, p = x.clamp(max=8), torch.tensor([*PROBABILITIES[:8], sum(PROBABILITIES[8:])])  # the four rarest together
    for i, j in ((0, 1), (1, 0), (1, 1), (1, -1), (2, 0), (0, 2)):
        first, second = x[: 256 - i, max(0, -j) : 200 - max(0, j)], x[i:, max(0, j) : 200 - max(0, -j)]
        pairs.append(((first * 9 + second).flatten(), (p[:, None] * p).flatten()))
    for symbols, probabilities in pairs:
        expected, degrees = len(symbols) * probabilities, len(probabilities) - 1
        chi_square = ((symbols.bincount(minlength=degrees + 1) - expected).square() / expected).sum()
        assert abs(float(chi_square) - degrees) < 4 * math.sqrt(2 * degrees)


def test_noise_depends_on_sample_iteration_and_seed_but_not_on_vocabulary_padding(ppo):
    """Of other noise a share of draws agrees by chance. Shifted: sample + iteration must not be all that counts."""
    x, by_chance = draws(ppo), torch.tensor(PROBABILITIES).square().sum().item()
    assert torch.equal(x, draws(ppo, padding=37)) and torch.equal(x[1:], draws(ppo, first=1)[:-1])
    for y in (draws(ppo, first=1000), draws(ppo, iteration=1), draws(ppo, iteration=-1), draws(ppo, seed=2)):
        for a, b in ((x, y), (x[1:], y[:-1]), (x[:, 1:], y[:, :-1])):
            assert (a == b).float().mean().item() == pytest.approx(by_chance, abs=0.04)


@pytest.mark.shared
def test_tails_of_the_noise_are_exponential(ppo):
    """Over 2**24 values. A uniform of 24 bits gives few distinct small values, and rare tokens are drawn too often."""
    small, large = [], 0
    for i in range(16):
        noise = ppo.sampling_noise(ppo.sample_keys(1, 0, [i]), torch.tensor([i]), 2**20)
        assert noise.isfinite().all() and (noise > 0).all()
        small += noise[noise < 2**-14].tolist()
        large += (noise > 14 * math.log(2)).sum().item()
    assert max(abs(len(small) - 2**10), abs(large - 2**10)) < 4 * 2**5 and len(set(small)) > 0.98 * len(small)


def test_eos_as_the_first_sampled_token_and_truncation_by_the_environment(ppo, tokenizer):
    for env, stop in (("Plain", "eos"), ("Truncates", "env")):
        envs = make_envs(env, 3)
        batch = run(ppo, scripted_model(ppo, tokenizer, {}), tokenizer, envs, samples=3)
        assert batch.texts == ["", "", ""] and batch.stop == [stop] * 3 and batch.mask.sum(1).tolist() == [1, 1, 1]
        assert batch.lengths.tolist() == [len(prompt) + 1 for prompt in environments.TextEnv.prompts[:3]]
        assert [env.unwrapped.seen for env in envs] == [[""]] * 3


@pytest.mark.parametrize("new_tokens", [1, 3, 4, 9])
def test_a_response_that_fills_the_budget_is_cut_unless_its_last_token_stops_it(ppo, tokenizer, new_tokens):
    """b c d <eos> takes four tokens: with exactly four it has ended by itself. Nothing is appended to a cut one."""
    actor = scripted_model(ppo, tokenizer, {"a": "b", "b": "c", "c": "d"})
    batch = run(ppo, actor, tokenizer, "OneToken", 2, max_new_tokens=new_tokens, max_prompt_tokens=1)
    assert batch.stop == ["eos" if new_tokens >= 4 else "length"] * 2 and batch.texts == ["bcd"[:new_tokens]] * 2
    assert batch.lengths.tolist() == [1 + min(4, new_tokens)] * 2


def test_stop_ids_end_a_turn_where_they_are_sampled_and_nowhere_else(ppo, tokenizer, monkeypatch, tmp_path):
    """They may be several, be the pad id and stand in a prompt."""
    tokenizer.hf.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.encode("y")}))
    two = ppo.HFTokenizer(tmp_path)
    eos, y = two.stop_ids
    assert two.eos_id == eos and [y] == tokenizer.encode("y")
    monkeypatch.setattr(environments.TextEnv, "prompts", ("a<eos>b<eos>", "y=b"))
    batch = run(ppo, scripted_model(ppo, two, {"<eos>": "c", "b": "y"}), two, samples=2)
    a, b, c, equals = two.encode("abc=")
    assert batch.tokens.tolist() == [[a, eos, b, eos, c, eos], [y, equals, b, y, 0, 0]]
    assert batch.mask.int().tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 0, 0]]
    assert batch.lengths.tolist() == [6, 4] and batch.stop == ["eos", "eos"]
    assert batch.texts == ["c", ""]  # without a stop token, even if it is not special
