"""Rollout in waves (ppo_llm.py) against continuous batching (ppo_llm_continuous_batching.py) and transformers' own.

    python benchmarks/rollout.py              # CPU, one thread, 28 minutes; also draws pictures/occupancy.png
    python benchmarks/rollout.py cpu constant # only lengths of these names
    python benchmarks/rollout.py picture      # pictures/occupancy.png alone, from one pair of runs, a minute
    python benchmarks/rollout.py smoke        # a few seconds: does it run

Prints tokens per second, decode steps, occupancy and ratios for five distributions of lengths; tokens per second and
ratios are medians. One process, the same random Qwen2-shaped weights, prompts and forced lengths on all sides (no EOS,
greedy). Waves and continuous batching decode in turn, a fifth of a second each, since a machine shared with others may
be a third slower from one minute to the next; then transformers does.
"""

import concurrent.futures
import contextlib
import logging
import statistics
import sys
import threading
import time

import common
import torch
import transformers
from common import PICTURES, ppo_llm, spread

import ppo_llm_continuous_batching

SIDES = {"waves": ppo_llm, "continuous": ppo_llm_continuous_batching}
CPU = dict(pairs=14, prompt=32, mean=64, longest=256, runs=[(32, 8)], shape=common.SMALL)
SMOKE = CPU | dict(pairs=1, prompt=4, mean=4, longest=16, runs=[(4, 2)], shape=common.TINY)
PAGED = ("paged|eager", "paged|sdpa")
LENGTHS = ("log-normal", "exponential", "uniform", "90 / 10", "constant")
COLUMNS = ("lengths", "samples / slots", "tokens/s: waves", "continuous", "transformers", "steps: waves", "continuous",
           "occupancy: waves", "continuous", "gain", "ideal gain", "gain / ideal", "continuous / transformers")


def continuous_steps(lengths: list[int], slots: int) -> int:
    """Decode steps of greedy list scheduling: a slot that is free takes the next response at once."""
    waiting, left, steps = list(lengths)[::-1], [0] * slots, 0
    while waiting or any(left):
        left = [n or (waiting.pop() if waiting else 0) for n in left]
        left = [max(0, n - 1) for n in left]
        steps += 1
    return steps


def static_steps(lengths: list[int], slots: int) -> int:
    """Decode steps of waves: the next `slots` responses begin when all of the last ones have ended."""
    return sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))


class Turns:
    """Lets one of several threads go on, the least advanced; `seconds` are those that each has had."""

    def __init__(self, sides):
        self.seconds, self.progress = dict.fromkeys(sides, 0.0), dict.fromkeys(sides, 0.0)
        self.turn, self.since, self.condition = next(iter(sides)), 0.0, threading.Condition()

    def wait(self, side: str):
        self.condition.wait_for(lambda: self.turn == side)
        self.since = time.perf_counter()

    def clock(self, side: str) -> float:
        return self.seconds[side] + time.perf_counter() - self.since

    def hand_over(self, side: str):
        self.seconds[side], self.turn = self.clock(side), min(self.progress, key=self.progress.get, default=None)
        self.condition.notify_all()

    def advance(self, side: str, share: float):
        """This share of its work `side` has done; others may go on."""
        self.progress[side] = share
        if time.perf_counter() - self.since > 0.2:
            with self.condition:
                self.hand_over(side)
                self.wait(side)

    @contextlib.contextmanager
    def of(self, side: str):
        with self.condition:
            self.wait(side)
        try:
            yield
        finally:
            with self.condition:
                del self.progress[side]
                self.hand_over(side)


class Bench:
    """One model and its prompts; `run` times a rollout of forced lengths, on any side."""

    def __init__(self, prompt, mean, longest, pairs, runs, shape):
        self.longest = longest
        folder, self.tokenizer = common.random_checkpoint(prompt + longest, shape)
        self.prompts = common.random_prompts(self.tokenizer, max(slots * waves for slots, waves in runs), prompt)
        self.args = ppo_llm_continuous_batching.Args(
            max_prompt_tokens=prompt, max_new_tokens=longest, temperature=0.0, compile="off"
        )
        self.actors = {name: common.load_sampler(module, folder, torch.float32) for name, module in SIDES.items()}
        self.decoders = {}  # {(side, slots): (decoder, environments that it needs)}
        self.peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def run(self, name: str, lengths: list[int], slots: int, turns: Turns | None = None) -> dict:
        """Seconds, tokens, decode steps, and the rows that decode over time of a rollout by `ppo_llm*.py`."""
        ppo, seeds, turns, trace = SIDES[name], range(len(lengths)), turns or Turns([name]), []
        if (name, slots) not in self.decoders:
            made = common.make_decoder(ppo, self.actors[name], self.tokenizer, slots, self.args)
            self.decoders[name, slots] = made
        decoder, count = self.decoders[name, slots]
        K = decoder.steps_per_wait
        simulated = static_steps if name == "waves" else continuous_steps
        predicted = K * simulated([-(-n // K) for n in lengths], slots)

        def after():
            trace.append((turns.clock(name), int(blocks[-1][2])))
            turns.advance(name, len(blocks) * K / predicted)

        with common.forced(ppo, lengths, after) as blocks, turns.of(name):
            envs = [common.Prompts(self.prompts) for _ in range(count)]
            episodes = ppo.rollout_share(decoder, self.tokenizer, envs, seeds, seeds, 0, self.args)
        assert [sum(episode.mask) for episode in episodes] == lengths
        steps = len(blocks) * K
        assert steps == predicted or name == "continuous", (steps, predicted)  # where threads may be late
        tokens = [episode.ids[episode.prompt_length :] for episode in episodes]
        occupied = sum(lengths) / (steps * slots)
        return {"seconds": turns.seconds[name], "tokens": tokens, "trace": trace, "steps": steps, "occupancy": occupied}

    def run_both(self, lengths: list[int], slots: int) -> dict[str, dict]:
        turns = Turns(SIDES)
        with concurrent.futures.ThreadPoolExecutor(len(SIDES)) as pool:
            runs = {side: pool.submit(self.run, side, lengths, slots, turns) for side in SIDES}
        return {side: run.result() for side, run in runs.items()}

    def run_peer(self, attention: str, lengths: list[int], slots: int) -> dict:
        """Seconds and tokens of transformers' continuous batching, as many requests at a time, log-probs as here."""
        blocks = slots * -(-(len(self.prompts[0]) + self.longest) // 32)
        config = transformers.generation.ContinuousBatchingConfig(
            block_size=32, num_blocks=blocks, max_batch_tokens=max(512, 2 * slots), max_requests_per_batch=slots,
            allow_block_sharing=False, return_logprobs=True)  # fmt: skip
        generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self.peer.set_attn_implementation(attention)
        ids = [self.tokenizer.encode_prompt(prompt) for prompt in self.prompts[: len(lengths)]]
        results = {}
        manager = self.peer.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, block=True, timeout=5)  # fmt: skip
        with manager as manager:
            start = time.perf_counter()
            for i, n in enumerate(lengths):
                manager.add_request(ids[i], request_id=str(i), max_new_tokens=n)
            while len(results) < len(lengths):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    results[int(result.request_id)] = result.generated_tokens
                elif result is None and not manager.is_running():
                    raise RuntimeError("transformers' continuous batching has stopped")
            seconds = time.perf_counter() - start
        tokens = [results[i] for i in range(len(lengths))]
        return {"seconds": seconds, "tokens": tokens, "attention": attention}

    def run_best_peer(self, attentions, lengths: list[int], slots: int) -> dict:
        return min((self.run_peer(attention, lengths, slots) for attention in attentions), key=lambda x: x["seconds"])


def plot(runs: dict, slots: int) -> None:
    busy = {name: f"{100 * run['occupancy']:.0f} %" for name, run in runs.items()}
    title = f"Continuous batching keeps {busy['continuous']} of the rows busy, and waves keep {busy['waves']}"
    figure, axes = common.new_picture(title, 3.8, 2, 1, sharex=True, sharey=True)
    names = {"waves": ("waves", common.ORANGE), "continuous": ("continuous batching", common.BLUE)}
    for axis, (side, run) in zip(axes, runs.items()):
        (name, color), (seconds, rows) = names[side], zip(*run["trace"], strict=True)
        axis.fill_between(seconds, rows, step="pre", color=color, linewidth=0)
        axis.set_title(f"{name}: rows that decode, of {slots}; {run['steps']:,} steps", color=color)
        axis.set(ylim=(0, slots), yticks=range(0, slots + 1, slots // 4), xlim=(0, None))
    axes[-1].set_xlabel("seconds")
    common.save_picture(figure, PICTURES / "occupancy.png")


def main():
    mode = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    settings = {"cpu": CPU, "picture": CPU, "smoke": SMOKE}[mode]
    chosen = sys.argv[2:] or LENGTHS
    if unknown := set(chosen) - set(LENGTHS):
        sys.exit(f"unknown lengths {', '.join(unknown)}; there are {', '.join(LENGTHS)}")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    bench = Bench(**settings)
    if mode == "picture":
        [(slots, waves)] = settings["runs"]
        lengths = common.forced_lengths("log-normal", slots * waves, settings["mean"], settings["longest"])
        return plot(bench.run_both(lengths, slots), slots)
    pairs, sizes = settings["pairs"], ", ".join(f"{key} {value}" for key, value in settings["shape"].items())
    print(f"{sizes}; float32, prompts of {settings['prompt']} tokens, responses of at most "
          f"{settings['longest']}; {common.hardware(transformers)}; {pairs} pairs of runs for "
          f"log-normal lengths, {2 * pairs} for constant ones, where little is to be told apart, "
          f"{4 * pairs} for N = B, else {min(3, pairs)}\n")  # fmt: skip
    common.table(COLUMNS)
    for slots, waves in settings["runs"]:
        warm = common.forced_lengths("uniform", slots, 4, 8)
        plain, others = (bench.run(name, warm, slots)["tokens"] for name in SIDES)
        assert plain == others
        for attention in PAGED:
            same = bench.run_peer(attention, warm, slots)["tokens"]
            agree = sum(a == b for a, b in zip(plain, same, strict=True))
            print(f"{attention}: {agree} of {slots} responses the same", file=sys.stderr, flush=True)
        cases = [*((name, waves) for name in LENGTHS), ("constant", 1)]
        for name, times in [case for case in cases if case[0] in chosen]:
            lengths = common.forced_lengths(name, slots * times, settings["mean"], settings["longest"])
            runs, best, few = {side: [] for side in (*SIDES, "peer")}, PAGED, min(3, settings["pairs"])
            pairs = {"log-normal": settings["pairs"], "constant": 2 * settings["pairs"]}.get(name, few)
            pairs *= 2 if times == 1 else 1  # of a second each
            for i in range(pairs):
                for side, run in bench.run_both(lengths, slots).items():
                    runs[side].append(run)
                if i < few or name == "log-normal":
                    run = bench.run_best_peer(best, lengths, slots)
                    best = [run["attention"]]  # of the first pair
                    runs["peer"].append(run)
            ratio = lambda a, b: [x["seconds"] / y["seconds"] for x, y in zip(runs[a], runs[b], strict=False)]
            speed = {side: sum(lengths) / statistics.median(run["seconds"] for run in runs[side]) for side in runs}
            last = {side: runs[side][-1] for side in SIDES}
            steps = {side: run["steps"] for side, run in last.items()}
            ideal = static_steps(lengths, slots) / continuous_steps(lengths, slots)
            gain = ratio("waves", "continuous")
            cells = [name, f"{slots * times} / {slots}", f"{speed['waves']:,.0f}", f"{speed['continuous']:,.0f}",
                     f"{speed['peer']:,.0f} ({best[0]})", f"{steps['waves']:,}", f"{steps['continuous']:,}",
                     *(f"{run['occupancy']:.0%}" for run in last.values()), spread(gain), f"{ideal:.2f}",
                     f"{statistics.median(gain) / ideal:.3f}", spread(ratio("peer", "continuous"))]  # fmt: skip
            common.line(cells)
            if name == "log-normal" and mode == "cpu":
                plot(last, slots)


if __name__ == "__main__":
    main()
