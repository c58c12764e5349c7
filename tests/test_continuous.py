"""Continuous batching: the episodes of the waves, in nearly as few decode steps as list scheduling takes."""

import heapq
import math
import random
import threading
import time

import pytest
from environments import TextEnv
from test_rollout import ALPHABET, assert_same, make_envs, random_model, run, scripted_model

import ppo_llm
import ppo_llm_continuous_batching as continuous


@pytest.fixture
def tokenizer():
    tokenizer = ppo_llm.HFTokenizer.from_texts([ALPHABET])
    tokenizer.stop_ids.append(tokenizer.hf.convert_tokens_to_ids("f"))  # a second stop token, which is text
    return tokenizer


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("env", ["Lengths", "DenseTurns", "Endless"])
def test_episodes_are_those_of_the_waves(tokenizer, env, temperature):
    """Several turns, dense rewards, truncation; whatever an earlier episode has left in a row changes nothing."""
    model, changes = random_model(ppo_llm, tokenizer), dict(iteration=3, temperature=temperature)
    expected = run(ppo_llm, model, tokenizer, env, 20, **changes)
    assert len({len(episode.ids) for episode in expected}) > 3
    if env == "DenseTurns" and temperature > 0:
        assert {episode.stop for episode in expected} == {"terminated", "truncated", "length"}
    for slots, count, more in (1, 1, {}), (3, 5, {}), (64, 80, {}), (4, 5, dict(micro_batch_tokens=5, steps=8)):
        envs, more = make_envs(env, count), more | dict(rollout_slots=slots)
        assert_same(run(continuous, model, tokenizer, envs, 20, **changes, **more), expected)


def test_decode_steps_are_nearly_those_of_list_scheduling(monkeypatch):
    """Responses of log-normal lengths: after the n-th character the model counts down to <eos>, in n tokens."""
    rng, slots, step, steps = random.Random(0), 32, continuous.Decoder.step, []
    lengths = [min(100, math.ceil(rng.lognormvariate(math.log(16), 0.8))) for _ in range(256)]
    characters = [chr(0x4E00 + n) for n in range(101)]
    tokenizer = continuous.HFTokenizer.from_texts(characters)
    model = scripted_model(continuous, tokenizer, dict(zip(characters[2:], characters[1:], strict=False)))

    class Countdown(TextEnv):
        prompts = tuple(characters[n] for n in lengths)

    def counted(decoder, attend):
        time.sleep(0.002)  # as a larger model would, so that threads have time to answer
        steps.append(attend)
        step(decoder, attend)

    monkeypatch.setattr(continuous.Decoder, "step", counted)
    envs = [Countdown() for _ in range(math.ceil(continuous.ENVS_PER_ROW * slots))]
    episodes = run(continuous, model, tokenizer, envs, 256, rollout_slots=slots, max_new_tokens=100)
    assert [sum(episode.mask) for episode in episodes] == lengths
    ends = [0] * slots
    for length in lengths:  # each sample begins in the row that is free first
        heapq.heapreplace(ends, ends[0] + length)
    waves = sum(max(lengths[i : i + slots]) for i in range(0, 256, slots))
    assert waves / len(steps) >= 0.95 * waves / max(ends) > 1.5


class Waits(TextEnv):
    """In `method`, "reset" or "step", sample 0 waits until all others have been judged."""

    method, judged = "", ()

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
def test_rows_go_on_while_an_environment_is_slow(tokenizer, monkeypatch, method):
    model = random_model(ppo_llm, tokenizer)
    expected = run(ppo_llm, model, tokenizer, "TextEnv", 12)
    monkeypatch.setattr(Waits, "method", method)
    monkeypatch.setattr(Waits, "judged", [])
    envs = [Waits() for _ in range(4)]
    assert_same(run(continuous, model, tokenizer, envs, 12, rollout_slots=3), expected)
    assert Waits.judged[-1] == 0 and len(Waits.judged) == 12


@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_environment_that_hangs_is_one_line(ppo, tokenizer, monkeypatch, method):
    """While others play."""
    forever = threading.Event()

    class Faulty(TextEnv):
        def reset(self, *, seed=None, options=None):
            return forever.wait(20) if seed == 5 and method == "reset" else super().reset(seed=seed)

        def turn(self, response):
            return forever.wait(20) if self.seed == 5 and method == "step" else super().turn(response)

    monkeypatch.setattr(ppo, "ENV_TIMEOUT", 0.5)
    with pytest.raises(ppo.UserError, match=r"in 0\.5 seconds"):
        run(ppo, random_model(ppo, tokenizer), tokenizer, [Faulty() for _ in range(4)], 9, rollout_slots=4)
    forever.set()


def test_spare_environments_are_made_like_the_others(ppo):
    args = ppo.Args(env_kwargs='{"digits": 3}', rollout_batch_size=4, max_prompt_tokens=4, max_new_tokens=6)
    tokenizer = ppo.HFTokenizer.from_texts(["0123456789="])
    decoder = ppo.Decoder(random_model(ppo, tokenizer), ppo.decoder_rows(args), tokenizer.stop_ids, args)
    with ppo.make_envs(args) as envs:
        episodes = ppo.rollout(decoder, tokenizer, envs, range(9), 0, args)
    assert [episode.prompt_length for episode in episodes] == [4] * 9
    assert len(envs) == (5 if ppo is continuous else 4)
    assert {(env.unwrapped.digits, env.spec.disable_env_checker) for env in envs} == {(3, True)}
