"""Rollout in waves (ppo_llm.py) against continuous batching (ppo_llm_continuous_batching.py) and transformers' own.

    python benchmarks/rollout.py              # CPU, one thread, a few minutes; also draws benchmarks/occupancy.png
    python benchmarks/rollout.py cuda         # a 0.5B shape in bfloat16, 64 and 256 slots
    python benchmarks/rollout.py smoke        # a few seconds: does it run

One process, the same random Qwen2-shaped weights, prompts and forced lengths on all sides (no EOS, greedy), which
decode in turn. Steps are counted, and predicted by `simulate.py`; tokens per second and ratios are medians.
"""

import logging
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
import simulate

import ppo_llm
import ppo_llm_continuous_batching

SIDES = {"waves": ppo_llm, "continuous": ppo_llm_continuous_batching}
CPU = dict(device="cpu", dtype=torch.float32, pairs=5, prompt=32, mean=64, longest=256, runs=[(32, 8)])
CPU |= dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, vocab_size=4096)
CPU |= dict(num_attention_heads=8, num_key_value_heads=2)
CUDA = CPU | dict(device="cuda", dtype=torch.bfloat16, pairs=3, prompt=128, mean=256, longest=2048)
CUDA |= dict(runs=[(64, 8), (256, 4)], hidden_size=896, intermediate_size=4864, num_hidden_layers=24)
CUDA |= dict(vocab_size=151936, num_attention_heads=14, num_key_value_heads=2)
SMOKE = CPU | dict(pairs=1, prompt=4, mean=4, longest=16, runs=[(4, 2)], hidden_size=64, num_hidden_layers=1)
PAGED = ("paged|eager", "paged|sdpa")
COLUMNS = ("lengths", "samples / slots", "tokens/s: waves", "continuous", "transformers", "steps: waves", "continuous",
           "occupancy: waves", "continuous", "gain", "ideal gain", "gain / ideal", "continuous / transformers")


def forced_lengths(name: str, samples: int, mean: int, longest: int) -> list[int]:
    """Response lengths of the given mean, at most `longest`, from a fixed seed."""
    torch.manual_seed(0)
    u = torch.rand(samples)
    lengths = {
        "constant": torch.full((samples,), float(mean)),
        "uniform": 1 + u * (2 * mean - 1),
        "exponential": -mean * u.log(),
        "log-normal": mean * (torch.randn(samples) - 0.5).exp(),  # sigma 1
        "90 / 10": torch.where(u < 0.9, mean / 3, 7.0 * mean),
    }[name]
    return lengths.round().clamp(1, longest).int().tolist()


class Prompts(gym.Env):
    """Prompt `seed` of a list; every response ends its episode."""

    def __init__(self, prompts):
        self.prompts = prompts

    def reset(self, *, seed=None, options=None):
        return self.prompts[seed], {}

    def step(self, response):
        return "", 0.0, True, False, {}


class Bench:
    """One model and its prompts; `run` times a rollout of forced lengths, on any side."""

    def __init__(self, device, dtype, prompt, mean, longest, pairs, runs, **shape):
        self.device, self.dtype, self.longest = device, dtype, longest
        V, samples = shape["vocab_size"], max(slots * waves for slots, waves in runs)
        symbols = [chr(0x4E00 + i) for i in range(min(V - 3, 20_000))]
        self.tokenizer = ppo_llm.HFTokenizer.from_texts(["".join(symbols)])
        self.tokenizer.stop_ids = [V]  # never sampled
        torch.manual_seed(0)
        ids = torch.randint(len(symbols), (samples, prompt)).tolist()
        self.prompts = ["".join(symbols[i] for i in row) for row in ids]
        raw = dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True, **shape,
                   max_position_embeddings=prompt + longest, eos_token_id=None, rms_norm_eps=1e-6)  # fmt: skip
        self.args = ppo_llm_continuous_batching.Args(max_prompt_tokens=prompt, max_new_tokens=longest)
        config = ppo_llm.ModelConfig.from_hf(raw)
        actor = ppo_llm.Transformer(config)
        for p in actor.parameters():
            if p.ndim == 2:
                torch.nn.init.normal_(p, std=0.05)
        with tempfile.TemporaryDirectory() as folder:
            ppo_llm.save_hf_checkpoint(actor, config, self.tokenizer, folder)
            self.actors = {name: module.load_hf_checkpoint(folder, dtype, device)[0] for name, module in SIDES.items()}
            self.peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def run(self, name: str, lengths: list[int], slots: int) -> dict:
        """Seconds, tokens [N, T], stats, and the rows that decode over time of a rollout by `ppo_llm*.py`."""
        ppo, trace = SIDES[name], []

        class Engine(ppo.Engine):
            def __init__(self, *rest):
                super().__init__(*rest)
                self.new_tokens = list(lengths)

            def decode_block(self):
                trace.append((time.perf_counter(), len(self.decoding)))
                return super().decode_block()

        self.args.rollout_slots, original = slots, ppo.Engine
        self.synchronize()
        start = time.perf_counter()
        try:
            ppo.Engine = Engine
            count = ppo.episodes_at_once(self.args, len(lengths))
            envs = [ppo.EnvThread(Prompts(self.prompts), 60) for _ in range(count)]
            seeds = range(len(lengths))
            batch = ppo.rollout(self.actors[name], self.tokenizer, envs, seeds, seeds, self.args, 0, greedy=True)
        finally:
            ppo.Engine = original
        self.synchronize()
        end = time.perf_counter()
        assert batch.mask.sum(1).tolist() == lengths
        trace = [(t - start, rows) for t, rows in [*trace, (end, 0)]]
        return {"seconds": end - start, "batch": batch, "trace": trace, **batch.stats}

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
            self.synchronize()
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
        return {"seconds": seconds, "tokens": [results[i] for i in range(len(lengths))]}


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


def plot(runs: dict, slots: int, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    for name, run in runs.items():
        seconds, rows = zip(*run["trace"], strict=True)
        label = f"{name}: {run['rollout/slot_occupancy']:.0%} occupied"
        axes.step(seconds, rows, where="post", label=label, linewidth=1)
    axes.set(xlabel="seconds", ylabel=f"rows that decode, of {slots}", ylim=(0, slots * 1.05))
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=110)


def main():
    mode = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    settings = {"cpu": CPU, "cuda": CUDA, "smoke": SMOKE}[mode]
    if mode == "cpu":
        torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    bench = Bench(**settings)
    where = torch.cuda.get_device_name() if mode == "cuda" else f"CPU, {torch.get_num_threads()} thread"
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    print(
        f"{', '.join(f'{key} {settings[key]}' for key in keys)}; {settings['dtype']}, prompts of {settings['prompt']} "
        f"tokens, responses of at most {settings['longest']}; {where}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {platform.python_version()}; {settings['pairs']} pairs of runs, 3 where "
        "lengths are neither log-normal nor N = B\n"
    )
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    for slots, waves in settings["runs"]:
        warm = forced_lengths("uniform", slots, 4, 8)
        tokens = {name: bench.run(name, warm, slots)["batch"].tokens for name in SIDES}
        assert torch.equal(*tokens.values())
        plain = [tokens["waves"][i, settings["prompt"] :][:n].tolist() for i, n in enumerate(warm)]
        for attention in PAGED:
            same = bench.run_peer(attention, warm, slots)["tokens"]
            agree = sum(a == b for a, b in zip(plain, same, strict=True))
            print(f"{attention}: {agree} of {slots} responses the same", file=sys.stderr, flush=True)
        cases = [(name, waves) for name in ("log-normal", "exponential", "uniform", "90 / 10", "constant")]
        for name, times in [*cases, ("constant", 1)]:
            lengths = forced_lengths(name, slots * times, settings["mean"], settings["longest"])
            runs, best = {side: [] for side in (*SIDES, "peer")}, None
            for _ in range(settings["pairs"] if name == "log-normal" or times == 1 else min(3, settings["pairs"])):
                for side in SIDES:
                    runs[side].append(bench.run(side, lengths, slots))
                if best is None:
                    tried = {attention: bench.run_peer(attention, lengths, slots) for attention in PAGED}
                    best = min(PAGED, key=lambda attention: tried[attention]["seconds"])
                    runs["peer"].append(tried[best])
                else:
                    runs["peer"].append(bench.run_peer(best, lengths, slots))
            ratio = lambda a, b: [x["seconds"] / y["seconds"] for x, y in zip(runs[a], runs[b], strict=True)]
            speed = {side: sum(lengths) / statistics.median(run["seconds"] for run in runs[side]) for side in runs}
            last = {side: runs[side][-1] for side in SIDES}
            steps = {side: int(run["rollout/decode_steps"]) for side, run in last.items()}
            K = 8 if mode == "cuda" else 1
            rounded = [-(-n // K) for n in lengths]
            assert steps["waves"] == K * simulate.static_steps(rounded, slots), steps
            assert steps["continuous"] == K * simulate.continuous_steps(rounded, slots), steps
            gain, ideal = ratio("waves", "continuous"), last["continuous"]["rollout/ideal_gain"]
            cells = [name, f"{slots * times} / {slots}", f"{speed['waves']:,.0f}", f"{speed['continuous']:,.0f}",
                     f"{speed['peer']:,.0f} ({best})", f"{steps['waves']:,}", f"{steps['continuous']:,}",
                     *(f"{run['rollout/slot_occupancy']:.0%}" for run in last.values()), spread(gain), f"{ideal:.2f}",
                     f"{statistics.median(gain) / ideal:.2f}", spread(ratio("peer", "continuous"))]  # fmt: skip
            print("| " + " | ".join(cells) + " |", flush=True)
            if name == "log-normal" and mode == "cpu":
                plot(last, slots, Path(__file__).parent / "occupancy.png")


main()
