"""Continuous batching: the same samples as in waves, in as few steps as list scheduling, whatever environments do."""

import concurrent.futures
import itertools
import json
import random
import sys
import threading
import time
from typing import ClassVar

import gymnasium as gym
import pytest
import torch
from conftest import ROOT
from test_rollout import ALPHABET, make_envs, random_model, rows, run, scripted_model

import ppo_llm
import ppo_llm_continuous_batching as continuous

sys.path.insert(0, str(ROOT / "benchmarks"))
import simulate


@pytest.fixture
def tokenizer():
    return continuous.HFTokenizer.from_texts([ALPHABET])


@pytest.fixture
def force(monkeypatch):
    """force(ppo, lengths): samples have these many tokens. force(ppo, K=8): so many between two host reads."""

    def patch(ppo, lengths=None, K=1):
        original = ppo.Engine.__init__

        def init(engine, *rest):
            original(engine, *rest)
            engine.K = K
            if lengths:
                engine.new_tokens = list(lengths)

        monkeypatch.setattr(ppo.Engine, "__init__", init)

    return patch


# --- The same samples ---


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("env", ["Lengths", "TwoTurns", "Endless"])
def test_samples_are_those_of_the_waves(tokenizer, env, greedy):
    actor, ids = random_model(ppo_llm, tokenizer), [(i // 2, i) for i in range(22)]
    expected = run(ppo_llm, actor, tokenizer, make_envs(env, 22), ids=ids, greedy=greedy, max_new_tokens=20)
    for slots, count in [(1, 1), (1, 8), (3, 4), (5, 5), (7, 30), (22, 22), (64, 64)]:
        changes = dict(ids=ids, greedy=greedy, rollout_slots=slots, max_new_tokens=20)
        batch = run(continuous, actor, tokenizer, make_envs(env, count), **changes)
        assert rows(batch) == rows(expected)
        torch.testing.assert_close(batch.logprobs, expected.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("env", ["Plain", "TwoTurns", "Endless"])
def test_order_in_which_environments_answer_changes_nothing(tokenizer, env, monkeypatch):
    actor, order, seen = random_model(continuous, tokenizer), random.Random(0), set()
    expected = run(ppo_llm, actor, tokenizer, env, 20, max_new_tokens=20, rollout_slots=20)
    for share in (0.02, 0.1, 0.3, 0.6, 0.9) * 3:

        def answered(engine, share=share):
            rows = [row for row in sorted(engine.pending) if order.random() < share]
            concurrent.futures.wait([engine.pending[row] for row in rows])
            return rows

        monkeypatch.setattr(continuous.Engine, "answered", answered)
        batch = run(continuous, actor, tokenizer, make_envs(env, 6), 20, max_new_tokens=20, rollout_slots=4)
        assert rows(batch) == rows(expected)
        torch.testing.assert_close(batch.logprobs, expected.logprobs, atol=1e-5, rtol=0)
        seen.add(str(batch.stats))
    assert len(seen) > 5, "one order alone was tried"


def test_runs_are_those_of_the_waves(tmp_path):
    """Everything that is logged, but for the clock and the rollout's own numbers."""
    logs, clock = [], ("time/", "perf/", "charts/SPS", "rollout/", "debug/")
    for ppo in (ppo_llm, continuous):
        sizes = dict(rollout_batch_size=32, n_samples_per_prompt=2, train_batch_size=32, eval_episodes=32, sft_steps=5)
        ppo.train(ppo.Args(log_dir=str(tmp_path), run_name=ppo.__name__, num_iterations=3, rollout_slots=8, **sizes))
        lines = [json.loads(line) for line in (tmp_path / ppo.__name__ / "metrics.jsonl").read_text().splitlines()]
        logs.append([{name: x for name, x in line.items() if not name.startswith(clock)} for line in lines])
    assert logs[0] == logs[1] and len(logs[0]) == 3 and lines[0]["rollout/gain_over_static"] > 1


def test_long_rows_gather_in_the_second_half(tokenizer, force, monkeypatch):
    """There attention reads far, in the first half it need not."""
    lengths = [90 if i % 24 == 0 else random.Random(i).randint(1, 15) for i in range(192)]
    seen, block = [], continuous.Engine.decode_block

    def watch(engine):
        ended = block(engine)
        seen.append([live for _, _, live in engine.cache.parts])
        return ended

    monkeypatch.setattr(continuous.Engine, "decode_block", watch)
    force(continuous, lengths)
    actor = scripted_model(continuous, tokenizer, {}, default="a")
    sizes = dict(max_new_tokens=90, rollout_slots=16)
    batch = run(continuous, actor, tokenizer, make_envs("Plain", 20), 192, greedy=True, **sizes)
    assert batch.mask.sum(1).tolist() == lengths
    first, second = (sum(column) for column in zip(*seen, strict=True))
    assert first < 0.4 * second


# --- In as few steps as can be ---

CASES = {
    "unequal": [9, 1, 1, 5, 12, 2, 2, 7, 3, 1, 1, 4, 12, 6, 1, 8, 2],
    "equal": [4] * 17,
    "the first token ends all": [1] * 17,
    "one long": [12, *[1] * 16],
    "all fill the context": [12] * 17,
    "a long one in a spare row": [*[11] * 7, 1, 12, *[1] * 8],
}


@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("slots", [1, 2, 4, 8, 17, 64])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_list_scheduling(tokenizer, force, case, slots, K):
    """A slot that is freed is filled again in the same step: any pause would show."""
    actor, lengths, stats = scripted_model(continuous, tokenizer, {}, default="a"), CASES[case], {}
    for ppo in (ppo_llm, continuous):
        force(ppo, lengths, K)
        batch = run(ppo, actor, tokenizer, make_envs("Plain", 64), 17, rollout_slots=slots)
        assert batch.mask.sum(1).tolist() == lengths
        stats[ppo] = batch.stats
    blocks, slots = [-(-n // K) for n in lengths], min(slots, 17)
    static, ideal = K * simulate.static_steps(blocks, slots), K * simulate.continuous_steps(blocks, slots)
    assert stats[ppo_llm]["rollout/decode_steps"] == static
    assert stats[continuous]["rollout/decode_steps"] == ideal
    assert stats[continuous]["rollout/slot_occupancy"] == sum(lengths) / (ideal * slots)
    assert stats[continuous]["rollout/gain_over_static"] == stats[continuous]["rollout/ideal_gain"] == static / ideal


@pytest.mark.parametrize("slots", [1, 2, 4, 8])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_list_scheduling_without_spare_rows(tokenizer, force, case, slots):
    force(continuous, CASES[case])
    actor = scripted_model(continuous, tokenizer, {}, default="a")
    batch = run(continuous, actor, tokenizer, make_envs("Plain", slots), 17, rollout_slots=64)
    assert batch.stats["rollout/decode_steps"] == simulate.continuous_steps(CASES[case], slots)


def test_gain_over_static_counts_the_steps_that_waves_take_for_several_turns(tokenizer, force):
    actor = random_model(continuous, tokenizer)
    for env, K in (("TwoTurns", 1), ("Endless", 1), ("Endless", 4)):
        for ppo in (ppo_llm, continuous):
            force(ppo, K=K)
        waves, batch = (run(ppo, actor, tokenizer, env, 16, rollout_slots=3) for ppo in (ppo_llm, continuous))
        steps = batch.stats["rollout/decode_steps"]
        assert batch.stats["rollout/gain_over_static"] == waves.stats["rollout/decode_steps"] / steps > 1
        assert batch.stats["rollout/ideal_gain"] == batch.stats["rollout/gain_over_static"]
        assert K > 1 or steps == simulate.continuous_steps(batch.mask.sum(1).tolist(), 3)


class Stubborn(gym.Env):
    """The judge of sample 0 gives no answer before all others have been judged."""

    judged, all_others = 0, threading.Event()

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        return "ab=", {}

    def step(self, response):
        if self.seed == 0:
            assert Stubborn.all_others.wait(timeout=20)
        Stubborn.judged += 1
        if Stubborn.judged == 11:
            Stubborn.all_others.set()
        return "", 1.0, True, False, {}


def test_other_samples_go_on_while_an_environment_thinks(tokenizer):
    Stubborn.judged = 0
    Stubborn.all_others.clear()
    batch = run(continuous, random_model(continuous, tokenizer), tokenizer, [Stubborn() for _ in range(3)], 12,
                rollout_slots=2)  # fmt: skip
    assert batch.rewards.sum() == 12 and batch.stats["rollout/slot_occupancy"] < 1


class Watched(gym.Wrapper):
    """Calls take `seconds`; notes when resets begin."""

    resets: ClassVar[list[float]] = []  # times

    def __init__(self, env, reset=0.0, step=0.0):
        super().__init__(env)
        self.seconds = {"reset": reset, "step": step}

    def reset(self, *, seed=None, options=None):
        Watched.resets.append(time.monotonic())
        time.sleep(self.seconds["reset"])
        return self.env.reset(seed=seed, options=options)

    def step(self, response):
        time.sleep(self.seconds["step"])
        return self.env.step(response)


def test_environments_that_take_a_while_are_not_waited_for(tokenizer, monkeypatch):
    """Each call is quick enough to be waited for once or twice."""
    beside, decode_block = [], continuous.Engine.decode_block
    monkeypatch.setattr(
        continuous.Engine, "decode_block", lambda engine: [beside.append(len(engine.pending)), decode_block(engine)][1])
    envs = [Watched(env, step=0.2) for env in make_envs("Plain", 5)]
    run(continuous, random_model(continuous, tokenizer), tokenizer, envs, 12, rollout_slots=4, max_new_tokens=40)
    assert max(beside[-30:]) > 0


def test_resets_that_take_long_run_beside_each_other(tokenizer, force):
    """Five rows for 24 samples: five rounds of resets at best, 24 one by one."""
    Watched.resets.clear()
    force(continuous, [2] * 24)
    envs = [Watched(env, reset=0.6) for env in make_envs("Plain", 5)]
    actor = scripted_model(continuous, tokenizer, {}, default="a")
    run(continuous, actor, tokenizer, envs, 24, rollout_slots=4)
    starts = sorted(Watched.resets)
    assert 1 + sum(after - before > 0.3 for before, after in itertools.pairwise(starts)) <= 6


def test_waiting_for_environments_costs_no_processor_time(tokenizer):
    envs = [Watched(env, step=2.0) for env in make_envs("Plain", 1)]
    actor = scripted_model(continuous, tokenizer, {})
    before = time.process_time()
    run(continuous, actor, tokenizer, envs, 1)
    assert time.process_time() - before < 1.0


class FailsAt(gym.Wrapper):
    """The judge of one seed raises, or gives no answer."""

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        return self.env.reset(seed=seed, options=options)

    def step(self, response):
        if self.seed == 9:
            time.sleep(3600)
        if self.seed == 10:
            raise RuntimeError("out of order")
        return self.env.step(response)


@pytest.mark.parametrize(("seed", "text"), [(9, "--env-timeout 0.3"), (10, "out of order")])
def test_failure_names_its_sample_wherever_its_row_has_moved(tokenizer, seed, text):
    ids = [(i, 100 + i) for i in range(20) if i in (seed, *range(8), *range(11, 20))]
    envs = [FailsAt(env) for env in make_envs("Endless", 5)]
    with pytest.raises(continuous.UserError, match=f"sample {100 + seed} with seed {seed}, .*{text}"):
        run(continuous, random_model(continuous, tokenizer), tokenizer, envs, ids=ids, rollout_slots=4, env_timeout=0.3)


# --- Prefill ---


@pytest.mark.parametrize(("slots", "count"), [(1, 1), (1, 16), (3, 16), (12, 16)])
def test_samples_of_a_prompt_share_one_prefill_in_any_number_of_slots(tokenizer, slots, count):
    """Prompts of 40, 3 and 25 tokens, whose last token is fed when decoding; with one environment there is one row."""
    actor, ids = random_model(continuous, tokenizer), [(seed, 4 * seed + i) for seed in (2, 3, 4) for i in range(4)]
    batch = run(continuous, actor, tokenizer, make_envs("Lengths", count), ids=ids, rollout_slots=slots)
    assert batch.stats["rollout/prefill_tokens"] == 39 + 2 + 24
    assert rows(batch) == rows(run(ppo_llm, actor, tokenizer, "Lengths", ids=ids))


def test_a_prompt_is_not_computed_again_after_samples_of_several_turns(tokenizer):
    actor, ids = random_model(continuous, tokenizer), [(seed, 4 * seed + i) for seed in (1, 5) for i in range(4)]
    batches = [run(continuous, actor, tokenizer, make_envs("Endless", n), ids=ids, rollout_slots=n) for n in (1, 8)]
    assert batches[0].stats["rollout/prefill_tokens"] == batches[1].stats["rollout/prefill_tokens"]


@pytest.mark.parametrize("R", [2, 256])
@pytest.mark.parametrize("budget", [1, 8, 16, 24, 1000])
@pytest.mark.parametrize("env", ["Lengths", "Endless"])
def test_prefill_keeps_to_its_budget_and_lets_others_decode(tokenizer, monkeypatch, env, budget, R):
    """Prompts of up to 40 tokens and feedback of 12, in chunks of 8: with a small budget one takes several steps."""
    actor, spent, waited = random_model(continuous, tokenizer), [0], []
    prefill, decode_block = continuous.Engine.prefill, continuous.Engine.decode_block

    def counted_prefill(engine, chunks):
        decoding, before = bool(engine.decoding), engine.counts["prefill_tokens"]
        left = prefill(engine, chunks)
        tokens = engine.counts["prefill_tokens"] - before
        spent[-1:] = [spent[-1] + tokens] if decoding else [spent[-1], tokens]
        return left

    def counted_block(engine):
        spent.append(0)
        waited.append(len(engine.waiting))
        return decode_block(engine)

    original = continuous.Engine.__init__

    def init(engine, *rest):
        original(engine, *rest)
        engine.R = R

    monkeypatch.setattr(continuous.Engine, "__init__", init)
    monkeypatch.setattr(continuous.Engine, "prefill", counted_prefill)
    monkeypatch.setattr(continuous.Engine, "decode_block", counted_block)
    ids = [(seed, i) for i, seed in enumerate((2, 2, 2, 2, 0, 1, 2, 3, 4, 4, 5, 2))]  # some wait for half a prompt
    kwargs = {"feedback": "fadefadefade"} if env == "Endless" else {}
    expected, batch = (
        run(ppo, actor, tokenizer, make_envs(env, 6, **kwargs), ids=ids, rollout_slots=4, max_new_tokens=40, **changes)
        for ppo, changes in ((ppo_llm, {}), (continuous, {"prefill_tokens": budget})))  # fmt: skip
    assert rows(batch) == rows(expected)
    assert max(spent) <= max(8, budget) and sum(spent) == batch.stats["rollout/prefill_tokens"]
    assert env != "Lengths" or any(waited) or budget == 1000


@pytest.mark.parametrize("value", [0, -1])
def test_budget_is_at_least_a_token(value):
    with pytest.raises(continuous.UserError, match=f"--prefill-tokens {value}: must be at least 1"):
        continuous.validate(continuous.Args(prefill_tokens=value))


def test_prompts_in_spare_rows_are_prefilled_together(tokenizer, monkeypatch):
    calls, prefill = [], continuous.Engine.prefill

    def counted(engine, chunks):
        calls.append(len(engine.waiting))
        return prefill(engine, chunks)

    monkeypatch.setattr(continuous.Engine, "prefill", counted)
    ids = [(i, i) for i in range(48)]
    run(continuous, random_model(continuous, tokenizer), tokenizer, make_envs("Lengths", 20), ids=ids, rollout_slots=16)
    assert calls[0] == 20 and sum(calls) == 48 and len(calls) <= 12, calls
