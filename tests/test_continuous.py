"""Continuous batching: the samples of the waves, in as few decode steps as list scheduling takes."""

import heapq
import random
import threading
import time

import pytest
import torch
from environments import Endless, Hangs, Lengths, TextEnv, TwoTurns

import ppo_llm
import ppo_llm_continuous_batching as continuous

ALPHABET = "abcdefwxy="


@pytest.fixture(scope="module")
def model():
    """Random weights, sharp enough for stop tokens to come early, late and not at all."""
    torch.manual_seed(0)
    vocab_size = ppo_llm.HFTokenizer.from_texts([ALPHABET]).vocab_size
    model = ppo_llm.Transformer(ppo_llm.ModelConfig(vocab_size, 16, 16, 2, 2, 1, 8))
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.25)
    return model


@pytest.fixture
def play(model, monkeypatch):
    """play(ppo, env, N, slots) makes a rollout; with `lengths` sample i gets so many tokens, and no stop token."""
    # Threads of instant environments may be slow to run on a busy machine; the scheduler then waits for them.
    monkeypatch.setattr(continuous, "PATIENCE", 60.0)

    def play(ppo, env, N, slots, lengths=None, greedy=False, envs=None, **changes):
        sizes = {"max_prompt_tokens": 40, "max_new_tokens": 12, "rollout_slots": slots}
        args = ppo.Args(**(sizes | changes))
        tokenizer = ppo.HFTokenizer.from_texts([ALPHABET])
        tokenizer.stop_ids.append(tokenizer.hf.convert_tokens_to_ids("f"))  # a second stop token, which is text
        begin = ppo.Episode.begin

        def forced_begin(episode, *rest):
            begin(episode, *rest)
            if lengths:
                episode.limit = episode.prompt_length + lengths[int(episode.where.split()[1].strip(","))]

        if lengths:
            tokenizer.stop_ids = [model.config.vocab_size]
        count = envs or ppo.envs_needed(args, N)
        with monkeypatch.context() as patch:
            patch.setattr(ppo.Episode, "begin", forced_begin)
            return ppo.rollout(model, tokenizer, [env() for _ in range(count)], range(N), range(N), 3, args, greedy)

    return play


def assert_same(batch, expected):
    for name in ("tokens", "mask", "rewards", "lengths"):
        assert torch.equal(getattr(batch, name), getattr(expected, name))
    for name in ("texts", "stop", "success", "prompts", "conversations"):
        assert getattr(batch, name) == getattr(expected, name)
    torch.testing.assert_close(batch.logprobs, expected.logprobs, atol=1e-5, rtol=0)


# --- The same samples ---


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("env", [Lengths, TwoTurns, Endless])
def test_samples_are_those_of_the_waves(play, env, greedy):
    """Prompts of 1 to 40 tokens and several turns: whatever an earlier sample has left in a slot changes nothing."""
    expected = play(ppo_llm, env, 13, 13, greedy=greedy)
    assert len(set(expected.lengths.tolist())) > 3 or greedy
    for slots, envs in [(1, 1), (3, 5), (64, None)]:
        assert_same(play(continuous, env, 13, slots, greedy=greedy, envs=envs), expected)


@pytest.mark.parametrize("env", [Lengths, Endless])
def test_small_prefills_and_blocks_of_decode_steps_give_the_same_samples(play, env, monkeypatch):
    expected = play(ppo_llm, env, 13, 13)
    assert_same(play(continuous, env, 13, 4, micro_batch_tokens=5), expected)
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True)  # 8 steps between two reads of the host
    assert_same(play(continuous, env, 13, 4), expected)


@pytest.mark.parametrize("env", [TextEnv, Endless])
def test_the_order_in_which_environments_answer_changes_nothing(play, env, monkeypatch):
    expected = play(ppo_llm, env, 13, 13)
    monkeypatch.setattr(continuous, "PATIENCE", 0.0)
    seen = set()
    for seed in range(3):
        rng, order = random.Random(seed), []

        class Delayed(env):
            def reset(self, *, rng=rng, **kwargs):
                time.sleep(rng.choice([0, 0.002, 0.01]))
                return super().reset(**kwargs)

            def step(self, response, rng=rng):
                time.sleep(rng.choice([0, 0.002, 0.01]))
                order.append(self.seed)
                return super().step(response)

        assert_same(play(continuous, Delayed, 13, 4), expected)
        seen.add(tuple(order))
    assert len(seen) > 1, "only one order was tried"


# --- As few decode steps as list scheduling ---


@pytest.mark.parametrize("seed", range(48))
def test_decode_steps_are_those_of_list_scheduling(play, seed, monkeypatch):
    """With K = 8 in blocks of 8."""
    rng, K = random.Random(seed), 8 if seed % 4 == 0 else 1
    N, slots = rng.randint(3, 20), rng.randint(1, 8)
    lengths = [rng.choice([1, rng.randint(1, 9), 9]) for _ in range(N)]
    if K == 8:
        monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True)
    batch = play(continuous, TextEnv, N, slots, lengths, envs=rng.choice([None, N, min(slots, N)]))
    blocks = [-(-length // K) for length in lengths]
    slots = min(slots, N)
    ends = [0] * slots
    for length in blocks:  # each sample begins in the slot that is free first
        heapq.heapreplace(ends, ends[0] + length)
    ideal = K * max(ends)
    waves = K * sum(max(blocks[i : i + slots]) for i in range(0, N, slots))
    assert batch.mask.sum(1).tolist() == lengths
    assert batch.stats["rollout/decode_steps"] == ideal
    assert batch.stats["rollout/slot_occupancy"] == pytest.approx(sum(lengths) / (ideal * slots))
    assert batch.stats["rollout/gain_over_static"] == batch.stats["rollout/ideal_gain"] == pytest.approx(waves / ideal)


def test_prompts_are_prefilled_together_and_no_token_twice(play, monkeypatch):
    """32 samples in 8 slots: prompts in rounds of 2 in place of one by one, then the environment's text alone."""
    calls, prefill = [], continuous.prefill

    def counted(actor, cache, episodes, args):
        new = [len(episode.ids) - 1 - episode.cached for episode in episodes.values()]
        calls.append((len(new), sum(new)))
        prefill(actor, cache, episodes, args)

    monkeypatch.setattr(continuous, "prefill", counted)
    batch = play(continuous, TextEnv, 32, 8, lengths=[1 + i % 7 for i in range(32)])
    prompts = [calls[i] for i in range(len(calls)) if calls[i][1] > 0]
    assert len(prompts) == 16 and {rows for rows, _ in prompts} == {2}
    calls.clear()
    batch = play(continuous, Endless, 12, 4)
    given = batch.lengths - batch.mask.sum(1)  # the newest token of each turn is left to the first decode step
    assert (batch.rewards > 0).sum(1).max() > 2 and sum(tokens for _, tokens in calls) == (given - 1).sum()


# --- Slow environments ---


class Waits(TextEnv):
    """In `method` the environment of sample 0 waits until all of the others have been judged."""

    method = "step"
    judged = ()

    def wait(self, method, seed):
        deadline = time.monotonic() + 20
        while seed == 0 and method == self.method and len(self.judged) < 11 and time.monotonic() < deadline:
            time.sleep(0.001)

    def reset(self, *, seed=None, options=None):
        self.wait("reset", seed)
        return super().reset(seed=seed)

    def turn(self, response):
        self.wait("step", self.seed)
        self.judged.append(self.seed)
        return super().turn(response)


@pytest.mark.parametrize("method", ["reset", "step"])
def test_slots_go_on_while_an_environment_is_slow(play, monkeypatch, method):
    monkeypatch.setattr(continuous, "PATIENCE", 0.0)
    monkeypatch.setattr(Waits, "method", method)
    monkeypatch.setattr(Waits, "judged", [])
    batch = play(continuous, Waits, 12, 3, lengths=[1] + [5] * 11)
    assert Waits.judged[-1] == 0 and len(Waits.judged) == 12 and batch.stop == ["length"] * 12
    # Sample 0 takes a slot before or after all others: 11 samples in the other two, or in three.
    assert batch.stats["rollout/decode_steps"] >= (5 * 4 + 1 if method == "reset" else 5 * 6)


def test_waiting_costs_no_patience_while_nothing_can_decode(play, monkeypatch):
    class SlowReset(TextEnv):
        def reset(self, *, seed=None, options=None):
            time.sleep(0.2)
            return super().reset(seed=seed)

    left, wait = [], continuous.wait
    monkeypatch.setattr(continuous, "PATIENCE", 0.1)
    monkeypatch.setattr(continuous, "wait", lambda episodes, seconds: left.append(seconds) or wait(episodes, seconds))
    play(continuous, SlowReset, 2, 2)
    assert left[0] == 0.1


def test_rows_that_could_decode_wait_no_longer_than_patience_says(play, monkeypatch):
    """Also if none of them is decoding: all responses are equally long, and one of four environments is slow."""
    class Slow(TextEnv):
        def turn(self, response):
            time.sleep(0.2 * (self.seed % 4 == 0))
            return super().turn(response)

    waited, wait = [], continuous.wait

    def timed(*args):
        start = time.monotonic()
        left = wait(*args)
        waited.append(time.monotonic() - start)
        return left

    monkeypatch.setattr(continuous, "PATIENCE", 0.1)
    monkeypatch.setattr(continuous, "wait", timed)
    play(continuous, Slow, 24, 4, lengths=[5] * 24)
    assert 0.1 < sum(waited) < 0.3


@pytest.mark.parametrize("method", ["reset", "step"])
def test_a_hung_environment_is_named_while_others_play(play, method, monkeypatch):
    class HangsAt(TextEnv):
        def reset(self, *, seed=None, options=None):
            threading.Event().wait(20 * (seed == 5 and method == "reset"))
            return super().reset(seed=seed)

        def turn(self, response):
            threading.Event().wait(20 * (self.seed == 5))
            return super().turn(response)

    monkeypatch.setattr(continuous, "PATIENCE", 0.1)
    start = time.monotonic()
    prompt = "prompt 'face='.*" if method == "step" else ""
    with pytest.raises(continuous.UserError, match=rf"HangsAt, sample 5, .*{prompt}{method}\(\).*--env-timeout 1 s"):
        play(continuous, HangsAt, 9, 2, env_timeout=1.0)
    with pytest.raises(continuous.UserError, match=r"Hangs, sample \d.*step\(\).*--env-timeout 1 s"):
        play(continuous, Hangs, 3, 2, env_timeout=1.0)  # nothing else to do
    assert time.monotonic() - start < 15
