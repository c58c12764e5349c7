"""Parts of first_gpu.py, one after the other: `python benchmarks/first_gpu/parts.py NAME[:key=value...] ...`

A part appends what it found to the file that RESULTS names, one JSON object a line, as soon as it knows it. With
DEVICE=cpu, and with TINY=1 on a simulated device, shapes are tiny.
"""

# ruff: noqa: E402

import contextlib
import dataclasses
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import common
import torch
import torch.nn.functional as F
import transformers
from common import seconds, synchronize
from torch.distributed.tensor import DTensor
from torch.nn.attention import varlen

DEVICE = os.environ.get("DEVICE", "cuda")
TINY = DEVICE == "cpu" or "TINY" in os.environ
GPU = DEVICE == "cuda" and not TINY  # a real one
COMPILED = "on" if DEVICE == "cuda" else "off"
RESULTS = Path(os.environ.get("RESULTS", "/tmp/first_gpu/results.jsonl"))
PROFILE = RESULTS.with_name("profile.txt")
WORK = Path(os.environ.get("WORK", "/tmp/first_gpu_work"))
RUNS = WORK / "runs"
SHAPE = common.TINY | dict(vocab_size=512) if TINY else common.QWEN_05B
CONTEXT = 8 if TINY else 1024  # of decode steps that are timed, at their beginning
ROWS = [4] if TINY else [16, 64, 256]
NAMES = "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"
LAYERS, HIDDEN, INNER, H, HKV = (SHAPE[name] for name in NAMES)
D, VOCAB = HIDDEN // H, SHAPE["vocab_size"]
NAME, OPTIONS = "", {}  # of the part that runs


def short(x: float) -> float:
    """Four digits, of small numbers, too: a busy machine has rates that are nearly 0."""
    return float(f"{x:.4g}")


def median(run) -> float:
    """Seconds of run(), after a first time."""
    return statistics.median([seconds(run) for _ in range(4 if TINY else 11)][1:])


def report(**values):
    line = json.dumps({"part": NAME, **OPTIONS, **values}, default=str)
    print("RESULT", line, flush=True)
    with RESULTS.open("a") as file:
        file.write(line + "\n")


def check(what: str, ok: bool, **values) -> bool:
    report(check=what, ok=bool(ok), **values)
    return bool(ok)


def script():
    """The chosen script, with device, attention kernels and process group as its runs have them."""
    ppo = importlib.import_module(OPTIONS.get("script", "ppo_llm"))
    if not ppo.HAS_VARLEN:  # torch 2.11, which lacks enable_gqa and seqused_k
        ppo.HAS_VARLEN = True
        plain, flash = varlen.varlen_attn, torch.ops.aten._flash_attention_forward

        def grouped(q, k, v, *starts, enable_gqa=False, seqused_k=None, **more):
            if seqused_k is not None:
                return flash(q, k, v, *starts, 0.0, False, False, seqused_k=seqused_k)[0]
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            return plain(q, k, v, *starts, **more)

        ppo.KERNELS.update({"packed attention": True, "attention by lengths": True})
        ppo.varlen_attn = grouped
    ppo.connect(ppo.Args(device=DEVICE))
    return ppo


def metrics(run: str) -> list[dict]:
    path = RUNS / run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def largest_difference(rows: list[dict], others: list[dict]) -> dict:
    """The largest relative difference of a metric that is no time, and its name."""
    worst, where = 0.0, ""
    for row, other in zip(rows, others, strict=True):
        for key, a in row.items():
            if key.startswith(("actor/", "critic/", "objective/")):
                b = other[key]
                difference = abs(a - b) / max(1e-3, abs(a), abs(b))
                if difference > worst:
                    worst, where = difference, f"{key} in iteration {row['iteration']}"
    return {"worst": worst, "where": where}


def memory() -> dict:
    if not GPU:
        return {}
    return {"peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
            "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2)}  # fmt: skip


def measured(name: str, default: float) -> float:
    """A ceiling that `env` has measured, if it ran."""
    for line in RESULTS.read_text().splitlines() if RESULTS.exists() else ():
        default = json.loads(line).get(name, default)
    return default


def kernels(run) -> list[tuple[str, float, int]]:
    """(name, microseconds, launches) of the kernels of run(), the longest first."""
    if DEVICE == "cuda" and not GPU:
        return []  # a simulated device cannot be profiled
    kinds = torch.profiler.ProfilerActivity
    run()
    with torch.profiler.profile(activities=[kinds.CUDA if GPU else kinds.CPU]) as profile:
        run()
        synchronize()
    attribute = "self_device_time_total" if GPU else "self_cpu_time_total"
    rows = [(event.key, getattr(event, attribute), event.count) for event in profile.key_averages()]
    return sorted((row for row in rows if row[1]), key=lambda row: -row[1])


def profile(title: str, run):
    """Report the longest kernels of run(); forty of them go into PROFILE."""
    found = kernels(run)
    total, launches = sum(row[1] for row in found), sum(row[2] for row in found)
    table = [f"{time / total:6.1%} {time:10.0f} us {count:6d} x {name[:150]}" for name, time, count in found]
    with open(PROFILE, "a") as file:
        print(f"\n## {title}: {total / 1e3:.2f} ms in {launches} kernels", *table[:40], sep="\n", file=file)
    report(profile=title, device_ms=round(total / 1e3, 3), kernels=launches, top=[line[:110] for line in table[:15]])


def host_waits(run) -> dict:
    """Where the host waits for the device in run(), as PyTorch's debug mode sees it."""
    if not GPU:
        return {}
    run()
    synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    torch.cuda.set_sync_debug_mode("default")
    places = [f"{Path(w.filename).name}:{w.lineno}" for w in found if "synchroniz" in str(w.message)]
    return {"host_waits": len(places), "places": sorted(set(places))}


# --- What the card and the machine are


def env():
    if DEVICE == "cuda":
        query = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit,temperature.gpu"
        smi = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv"], capture_output=True, text=True)
        report(nvidia_smi=smi.stdout.strip(), capability=torch.cuda.get_device_capability(),
               cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version(), nccl=torch.cuda.nccl.version(),
               free_gb=round(torch.cuda.mem_get_info()[0] / 1e9, 1))  # fmt: skip
    versions = {"cpus": os.cpu_count(), "python": sys.version.split()[0]}
    for name in ("torch", "triton", "transformers", "tyro", "gymnasium"):
        try:
            versions[name] = importlib.import_module(name).__version__
        except Exception as error:
            versions[name] = repr(error)[:200]
    report(**versions)
    floats, n = (2**16, 256) if TINY else (2**28, 8192)
    a = torch.rand(floats, device=DEVICE)
    b = torch.empty_like(a)
    x = torch.rand(n, n, device=DEVICE)
    y = x.to(torch.bfloat16)
    report(copy_gb_per_s=short(2 * a.nbytes / median(lambda: b.copy_(a)) / 1e9),
           bf16_tflops=short(2 * n**3 / median(lambda: y @ y) / 1e12),
           fp32_tflops=short(2 * n**3 / median(lambda: x @ x) / 1e12))  # fmt: skip


# --- Levers: would another way be faster?


def rand(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def of_a_layer(run) -> float:
    """Microseconds of run(layer), called in a CUDA graph for each layer of the model."""

    def all_layers():
        for layer in range(LAYERS):
            run(layer)

    all_layers()
    replay = all_layers
    if GPU:
        synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_layers()
        replay = graph.replay
    return short(1e6 * median(replay) / LAYERS)


def head():
    """Forward and backward of the product with the vocabulary, in chunks of different sizes."""
    ppo, tokens = script(), 64 if TINY else 16384
    weight, hidden = rand(VOCAB, HIDDEN).requires_grad_(), rand(tokens, HIDDEN).requires_grad_()
    targets = torch.randint(VOCAB, (tokens,), device=DEVICE)
    for logits in (2**12, 2**13) if TINY else (2**25, 2**26, 2**27, 2**28, 2**29):
        rows = logits // VOCAB

        def both():
            logprobs, _ = ppo.ChunkedLogprobs.apply(hidden, weight, targets, 1.0, rows, COMPILED)
            logprobs.sum().backward()
            weight.grad = hidden.grad = None

        both()
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        report(tokens=tokens, rows=rows, ms=short(1e3 * median(both)), **memory())


@torch.no_grad()
def sampling():
    """Sampling as in sample_token, and without noise."""
    ppo = script()

    def sample(logits, keys, index):
        token = (logits + ppo.gumbel_noise(keys, index, VOCAB)).argmax(-1, keepdim=True)
        return token, logits.gather(1, token) - logits.logsumexp(-1, keepdim=True)

    def greedy(logits, keys, index):
        token = logits.argmax(-1, keepdim=True)
        return token, logits.gather(1, token) - logits.logsumexp(-1, keepdim=True)

    for rows in ROWS:
        logits, index = rand(rows, VOCAB).float(), torch.arange(rows, device=DEVICE)
        keys = index.int()
        for function in sample, greedy:
            run = ppo.maybe_compiled(function, COMPILED)
            report(rows=rows, how=function.__name__, us=of_a_layer(lambda i: run(logits, keys, index)))


@torch.no_grad()
def gemm():
    """Matrix products of a decode step: query, key and value apart or joined, gate and up apart or joined."""
    weights = [[rand(n, HIDDEN) for n in (H * D, HKV * D, HKV * D, INNER, INNER)] for _ in range(LAYERS)]
    joined = [(torch.cat(layer[:3]), torch.cat(layer[3:])) for layer in weights]
    for rows in ROWS:
        x = rand(rows, HIDDEN)
        report(rows=rows, qkv_us=of_a_layer(lambda i: [F.linear(x, w) for w in weights[i][:3]]),
               qkv_joined_us=of_a_layer(lambda i: F.linear(x, joined[i][0])),
               gate_up_us=of_a_layer(lambda i: [F.linear(x, w) for w in weights[i][3:]]),
               gate_up_joined_us=of_a_layer(lambda i: F.linear(x, joined[i][1])))  # fmt: skip


@torch.no_grad()
def decode_attention():
    """Attention of a decode step by a mask, as in float32, and by flash attention with each row's own length."""
    G, attend = H // HKV, CONTEXT + 128
    size = attend + 16
    for rows in ROWS:
        caches = [(rand(rows, HKV, size, D), rand(rows, HKV, size, D)) for _ in range(LAYERS)]
        packed = [[x.transpose(1, 2).flatten(0, 1).contiguous() for x in layer] for layer in caches]
        q = rand(rows, HKV, G, D)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
        for finished in 0, rows * 7 // 8:
            used = torch.full((rows,), attend, dtype=torch.int32, device=DEVICE)
            used[rows - finished :] = 1
            hidden = torch.arange(attend, device=DEVICE) >= used[:, None]  # [rows, attend]
            bias = torch.zeros(hidden.shape, device=DEVICE, dtype=q.dtype).masked_fill(hidden, -torch.inf)
            bias = bias.repeat_interleave(HKV, 0)[:, None, None].repeat(1, 1, G, 1)  # [rows * HKV, 1, G, attend]

            def masked(layer):
                k, v = (x[:, :, :attend].flatten(0, 1)[:, None] for x in caches[layer])
                return F.scaled_dot_product_attention(q.flatten(0, 1)[:, None], k, v, attn_mask=bias)

            def flash(layer):
                queries = q.transpose(1, 2).flatten(0, 1)  # [rows * G, HKV, D]
                return torch.ops.aten._flash_attention_forward(
                    queries, *packed[layer], starts * G, starts * size, G, attend, 0.0, False, False, seqused_k=used)[0]

            expected = masked(0).view(rows, HKV, G, D)[: rows - finished]
            report(rows=rows, finished=finished, how="masked", us=of_a_layer(masked))
            if GPU:
                out = flash(0).view(rows, G, HKV, D).transpose(1, 2)[: rows - finished]
                report(rows=rows, finished=finished, how="flash", us=of_a_layer(flash),
                       difference=short(float((out - expected).abs().max())))  # fmt: skip


# --- Correctness


def start_script(run: str, *flags, **environment) -> subprocess.Popen:
    """The script as a user starts it."""
    name = OPTIONS.get("script", "ppo_llm")
    command = [sys.executable, f"{name}.py", "--device", DEVICE, "--run-name", run, "--log-dir", RUNS, *flags]
    return subprocess.Popen([str(x) for x in command], cwd=ROOT, env=os.environ | environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def ends_well(what: str, *processes: subprocess.Popen, **values) -> bool:
    """Wait for processes, print the end of their output, and check that they end with 0."""
    outputs = [process.communicate()[0] for process in processes]
    codes = [process.returncode for process in processes]
    print(*(output[-6000:] for output in outputs), sep="\n----\n", flush=True)
    end = [output[-1000:] for output in outputs] if any(codes) else []
    return check(f"{what}: ends with 0", not any(codes), codes=codes, end=end, **values)


def seen(rows: list[dict]) -> dict:
    """What is looked at first in the metrics of a run."""
    devs = [row["ratio/first_dev"] for row in rows]
    return dict(
        first_dev=devs[0], worst_first_dev=max(devs), first_kl=rows[0]["ratio/steps"][0]["approx_kl"],
        worst_sampler_diff=max(row["debug/sampler_trainer_logprob_diff"] for row in rows),
        diagnoses=sorted({row["ratio/diagnosis"] for row in rows if "ratio/diagnosis" in row}),
        rewards=[round(row["objective/reward"], 3) for row in rows[:: max(1, len(rows) // 10)]],
        s_first=round(rows[0]["time/iteration"], 2),
        s_median=round(statistics.median(row["time/iteration"] for row in rows), 3),
        **{key: round(value, 4) for key, value in rows[-1].items() if key.startswith("time/")},
        peak_gb=round(max(row["perf/peak_memory_bytes"] for row in rows) / 1e9, 2))  # fmt: skip


def fp32():
    """Float32, uncompiled, on the device and on the CPU, from the same weights."""
    ppo, rows, answers = script(), {}, {}
    flags = dict(dtype="float32", compile="off", log_dir=str(RUNS), save_every=0, eval_episodes=8 if TINY else 64)
    if TINY:
        flags |= dict(rollout_batch_size=8, train_batch_size=4)
    name = f"fp32-{ppo.__name__}"
    ppo.train(ppo.Args(**flags, device="cpu", num_iterations=1, sft_steps=2 if TINY else 150, run_name=name))
    folder, sizes = RUNS / name / "model", dict(max_prompt_tokens=16, max_new_tokens=8)
    flags |= sizes | dict(model=str(folder), num_iterations=3, actor_lr=5e-4, critic_lr=1e-3)
    for device in dict.fromkeys((DEVICE, "cpu")):
        ppo.train(ppo.Args(**flags, device=device, run_name=f"{name}-{device}"))
        rows[device] = metrics(f"{name}-{device}")
        report(device=device, **seen(rows[device]))
        actor, _ = ppo.load_hf_checkpoint(folder)
        tokenizer, args = ppo.HFTokenizer(folder), ppo.Args(temperature=0.0, compile="off", **sizes)
        decoder, count = common.make_decoder(ppo, actor.to(device), tokenizer, 16, args)
        envs = [ppo.SortDigits() for _ in range(count)]
        episodes = ppo.rollout_share(decoder, tokenizer, envs, range(16), range(16), -1, args)
        answers[device] = [episode.ids for episode in episodes]
    ours, cpu = rows[DEVICE], rows["cpu"]
    for i in range(3):
        report(what=f"largest relative difference in iteration {i}", **largest_difference([ours[i]], [cpu[i]]))
    differences = [abs(row["objective/reward"] - other["objective/reward"]) for row, other in zip(ours, cpu)]
    check("reward of iteration 0 within 0.004 of the CPU's, that is a few samples", differences[0] < 0.004)
    check("first ratio within 1e-6 of 1", ours[0]["ratio/first_dev"] < 1e-6)
    check("sampler and trainer within 1e-4", ours[0]["debug/sampler_trainer_logprob_diff"] < 1e-4)
    check("16 greedy answers are those of the CPU", answers[DEVICE] == answers["cpu"])


def graphs():
    """The same rollouts by compiled steps and by CUDA graphs, sampled and greedy, before and after new weights."""
    ppo = script()
    shape = SHAPE if TINY else SHAPE | dict(intermediate_size=1024, num_hidden_layers=2, vocab_size=1024)
    rows, new = (4, 16) if TINY else (48, 360)
    sampler = random_sampler(ppo, shape, OPTIONS.get("dtype", "float32" if TINY else "bfloat16"), 0.05)
    tokenizer = common.character_tokenizer(shape["vocab_size"])
    prompts = common.random_prompts(tokenizer, rows, 24)
    lengths = common.forced_lengths("log-normal", rows, new // 3, new)
    args = ppo.Args(compile=COMPILED, max_prompt_tokens=24, max_new_tokens=new)
    plain, count = common.make_decoder(ppo, sampler, tokenizer, rows // 2, args)
    recorded, _ = common.make_decoder(ppo, sampler, tokenizer, rows // 2, args)
    plain.use_graphs = False

    def play(decoder, temperature):
        envs = [common.Prompts(prompts) for _ in range(count)]
        settings = dataclasses.replace(args, temperature=temperature)
        with common.forced(ppo, lengths):
            episodes = ppo.rollout_share(decoder, tokenizer, envs, range(rows), range(rows), 0, settings)
        return [(episode.ids, episode.logprobs) for episode in episodes]

    for changes in range(2):
        for temperature in (1.0, 0.0):
            same = play(plain, temperature) == play(recorded, temperature)
            check("graphs give the samples of compiled steps", same, changes=changes, temperature=temperature,
                  graphs=len(recorded.graphs))  # fmt: skip
        with torch.no_grad():
            for p in sampler.parameters():
                p.mul_(1.05)
    check("graphs were recorded", recorded.graphs or DEVICE == "cpu")


def attention():
    """Which attention kernels run, by their names: in training, forward and backward, and in decode steps.

    First it compares the kernels with float32, as a run does.
    """
    ppo, shape = script(), SHAPE | dict(num_hidden_layers=1)
    failures = ppo.kernel_failures(config_of(ppo, shape), DEVICE)
    check("the kernels that a run tries first agree with float32", not failures, failures=failures)
    for dtype in ("bfloat16", "float32"):
        actor, _ = random_actor(ppo, shape, dtype, "off")
        experience = some_samples(200 if TINY else 4096)[0]
        mb = experience.microbatch(torch.arange(len(experience.tokens)), DEVICE)
        training = kernels(lambda: actor.sampled_logprobs(mb, 1.0)[0].sum().backward())
        decoder = full_decoder(ppo, random_sampler(ppo, shape, dtype, 0.02), 4 if TINY else 64, "off")
        decoding = kernels(lambda: decoder.step(128))
        names = {}
        for what, found in (("training", training), ("decode", decoding)):
            names[what] = " ".join(name for name, *_ in found if re.search("flash|fmha|softmax", name.lower()))
            report(what=what, dtype=dtype, kernels=names[what][:600])
        if GPU and dtype == "bfloat16":
            both = all(name in names["training"] for name in ("flash_fwd", "flash_bwd"))
            check("training uses flash attention", both)
            check("decode steps use flash attention", "flash_fwd" in names["decode"])


def two_ranks():
    """Two ranks on one GPU, which NCCL allows if it takes them for two hosts: its collectives, over sockets."""
    sizes = (2, 8) if TINY else (10, 64)
    flags = ["--num-iterations", 2, "--sft-steps", sizes[0], "--rollout-batch-size", sizes[1], "--train-batch-size",
             sizes[1] // 2, "--eval-episodes", sizes[1], "--save-every", 2, "--compile", COMPILED, "--dtype",
             "float32"]  # fmt: skip
    network = dict(
        WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29517",
        NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo", NCCL_NET="Socket",
        NCCL_DEBUG="WARN")  # fmt: skip
    alone = start_script("alone", *flags)
    ranks = [start_script("two", *flags, RANK=str(i), NCCL_HOSTID=f"host{i}", **network) for i in range(2)]
    if ends_well("two ranks", *ranks) and ends_well("one rank", alone):
        rows = metrics("two")
        worst = largest_difference(rows[:1], metrics("alone")[:1])
        check("two ranks have the metrics of one, within 1e-3", worst["worst"] < 1e-3, **worst)
        report(**seen(rows))


# --- Speed


def config_of(ppo, shape: dict):
    config = transformers.Qwen2Config(tie_word_embeddings=True, max_position_embeddings=4096, **shape)
    return ppo.check_config(config)


@torch.no_grad()
def random_weights(model, std: float):
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        local = p.to_local() if isinstance(p, DTensor) else p
        if p.ndim == 2:
            local.normal_(std=std)
        else:
            local.fill_(float("norm" in name))


def random_sampler(ppo, shape: dict, dtype: str, std: float):
    sampler = common.load_sampler(ppo, config_of(ppo, shape), dtype, DEVICE)
    random_weights(sampler, std)
    return sampler


def random_actor(ppo, shape: dict, dtype: str, compiled: str):
    """A model that trains, sharded on one rank, and its flags."""
    args = ppo.Args(device=DEVICE, dtype=dtype, compile=compiled, actor_lr=1e-6)
    args = ppo.fill_in_defaults(args)
    actor = ppo.build_model(config_of(ppo, shape), "lm", args)
    random_weights(actor, 0.02)
    return actor, args


@torch.no_grad()
def full_decoder(ppo, sampler, rows: int, compiled: str):
    """A decoder whose rows all decode, after CONTEXT tokens with random keys and values."""
    prompt, new = CONTEXT, 152 if TINY else 128
    decoder = ppo.Decoder(sampler, rows, [sampler.config.vocab_size], ppo.Args(
        compile=compiled, max_prompt_tokens=prompt, max_new_tokens=new))  # fmt: skip
    for layer in decoder.cache.layers:
        for x in layer:
            x.normal_(std=0.3)
    decoder.tokens.random_(0, sampler.config.vocab_size)
    decoder.noise_keys.copy_(ppo.sample_keys(1, 0, range(rows)))
    decoder.alive.fill_(True)
    decoder.length.fill_(prompt)
    decoder.limit.fill_(prompt + new)
    decoder.temperature.fill_(1.0)
    decoder.noise_scale.fill_(1.0)
    return decoder


@torch.no_grad()
def decode():
    """Decode steps, compiled as CUDA graphs and eager, beside the time to read weights and cache once."""
    ppo, dtype = script(), "float32" if TINY else "bfloat16"
    sampler = random_sampler(ppo, SHAPE, dtype, 0.02)
    weights = sum(p.nbytes for p in sampler.parameters())
    bandwidth = 1e9 * measured("copy_gb_per_s", 3000)
    for compiled in OPTIONS.get("compile", COMPILED).split("/"):
        for rows in map(int, OPTIONS["rows"].split("/")) if "rows" in OPTIONS else ROWS:
            decoder = full_decoder(ppo, sampler, rows, compiled)
            used = int(decoder.length[0])
            least = (weights + sum(x[:, :, :used].nbytes for layer in decoder.cache.layers for x in layer)) / bandwidth

            def block():
                nonlocal used
                used += decoder.steps_per_wait
                attend = min(ppo.round_up(used, 128), decoder.cache.size)
                for _ in range(decoder.steps_per_wait):
                    decoder.step(attend)

            first = seconds(block)
            blocks = int(OPTIONS.get("blocks", 2 if TINY or compiled == "off" else 8))
            times = [1e3 * seconds(block) / decoder.steps_per_wait for _ in range(blocks)]
            took = statistics.median(times)
            report(rows=rows, compile=compiled, context=used, ms_a_step=short(took), ms_least_seen=short(min(times)),
                   floor_ms=short(1e3 * least), of_floor=short(1e3 * least / took), first_s=round(first, 1),
                   graphs=len(decoder.graphs), **host_waits(block), **memory())  # fmt: skip
            profile(f"{decoder.steps_per_wait} decode steps, {rows} rows, compile {compiled}", block)


def some_samples(tokens: int):
    """An Experience of samples with log-normal lengths, about `tokens` in all; its tokens, and those sampled."""
    ppo, (prompt, mean, longest) = script(), (8, 16, 64) if TINY else (128, 256, 1024)
    lengths = []
    for length in common.forced_lengths("log-normal", 4096, mean, longest):
        if sum(lengths) + prompt + length > tokens:
            break
        lengths.append(prompt + length)
    lengths = torch.tensor(lengths)
    place = torch.arange(int(lengths.max())).expand(len(lengths), -1)  # [N, T]
    mask = (place >= prompt) & (place < lengths[:, None])
    torch.manual_seed(0)
    ids, zeros = torch.randint(3, VOCAB, mask.shape), torch.zeros(mask.shape)
    samples = ppo.Experience(tokens=ids, mask=mask, sampler_logprobs=zeros, rewards=zeros, lengths=lengths)
    return samples, int(lengths.sum()), int(mask.sum())


def step_flops(config, tokens: int, sampled: int) -> tuple[float, float]:
    """FLOPs of the matrix products of forward and backward: of blocks, and of a head that computes its logits twice."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    block = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner
    return 6.0 * tokens * block * config.num_hidden_layers, 8.0 * sampled * hidden * config.vocab_size


def update():
    """A minibatch, forward and backward, in microbatches as the script cuts them, and an optimizer step."""
    ppo, peak = script(), 1e12 * measured("bf16_tflops", 700)
    compiled = OPTIONS.get("compile", COMPILED)
    actor, args = random_actor(ppo, SHAPE, "bfloat16", compiled)
    optimizer = ppo.make_optimizer(actor)
    experience, tokens, sampled = some_samples(600 if TINY else 65536)
    everything = torch.arange(len(experience.tokens))
    for budget in map(int, OPTIONS.get("tokens", "200" if TINY else "4096/16384/32768").split("/")):
        if GPU:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        parts = ppo.microbatch_rows(everything, experience.lengths, budget)
        minibatch = [experience.microbatch(part, DEVICE) for part in parts]

        def both():
            """As the actor's epochs do it."""
            for mb in minibatch:
                logprobs, entropies = actor.sampled_logprobs(mb, 1.0)
                old, mask = logprobs.detach(), mb.mask
                loss, _ = ppo.policy_loss(logprobs, old, mask.float(), mask, 0.2, 0.2, None, sampled)
                (loss - 0.0 * entropies.sum()).backward()

        first = seconds(both)
        took, flops = median(both), sum(step_flops(actor.config, tokens, sampled))
        report(compile=compiled, tokens=tokens, sampled=sampled, budget=budget, microbatches=len(parts),
               ms=short(1e3 * took), first_s=round(first, 1), tflops=short(flops / took / 1e12),
               of_peak=short(flops / took / peak), **host_waits(both), **memory())  # fmt: skip
    profile(f"update, {tokens} tokens in {len(parts)} microbatches, compile {compiled}", both)
    steps = []
    for _ in range(3):
        both()
        steps.append(seconds(lambda: ppo.optimizer_step(actor, optimizer, 1e-6, args)))
    report(compile=compiled, optimizer_step_ms=short(1e3 * min(steps)), **memory())


def write() -> str:
    """The folder of a random checkpoint; written by the first that needs it."""
    folder = WORK / "model"
    if not folder.exists():
        partial = folder.with_name(f"model-{os.getpid()}")
        partial.parent.mkdir(parents=True, exist_ok=True)
        common.write_checkpoint(str(partial), common.character_tokenizer(SHAPE["vocab_size"]), 4096, SHAPE)
        with contextlib.suppress(OSError):  # another part was faster
            partial.rename(folder)
    return str(folder)


NO_EVALUATION = dict(accuracy=0.0, greedy_accuracy=0.0, reward=0.0)


def iteration():
    """Whole iterations of 1024 samples in 256 or more rows: seconds by phase, share of the card's rate, memory."""
    ppo = script()
    samples, mean, prompt = (8, 4, 8) if TINY else (1024, 128, 128)
    slots = int(OPTIONS.get("rows", 256))
    lengths = common.forced_lengths("log-normal", samples, mean, 8 * mean)
    common.gym.register("Bench-v0", entry_point=common.Prompts)
    prompts = common.random_prompts(common.character_tokenizer(SHAPE["vocab_size"]), samples // 4, prompt)
    model, name, start = write(), f"iteration-{DEVICE}-{ppo.__name__}-{slots}", time.perf_counter()
    with common.forced(ppo, lengths), mock.patch.object(ppo, "evaluate", lambda *rest: NO_EVALUATION), \
         mock.patch.object(ppo, "save_hf_checkpoint"):  # fmt: skip
        ppo.train(ppo.Args(
            model=model, env_id="Bench-v0", env_kwargs=json.dumps({"prompts": prompts}), log_dir=str(RUNS),
            run_name=name, save_every=0, num_iterations=2, rollout_batch_size=samples // 4,
            n_samples_per_prompt=4, rollout_slots=slots, train_batch_size=samples // 4, ppo_epochs=1,
            micro_batch_tokens=int(OPTIONS.get("micro", 32768)), max_prompt_tokens=prompt, max_new_tokens=8 * mean,
            eval_episodes=1, device=DEVICE, compile=OPTIONS.get("compile", COMPILED), dtype="bfloat16"))  # fmt: skip
    rows = metrics(name)
    last, peak = rows[-1], 1e12 * measured("bf16_tflops", 700)
    tokens, sampled = samples * prompt + sum(lengths), sum(lengths)
    blocks, head = step_flops(config_of(ppo, SHAPE), tokens, sampled)
    updates = last["time/actor"] + last["time/critic"]
    check("the first ratio is exactly 1", rows[0]["ratio/first_dev"] == 0)
    report(**seen(rows), iterations=[round(row["time/iteration"], 2) for row in rows], samples=samples, tokens=tokens,
           sampled=sampled, updates_of_peak=short((2 * blocks + head) / updates / peak),
           scoring_of_peak=short((blocks + head / 2) / last["time/score"] / peak),
           rollout_tokens_per_s=short(sampled / last["time/rollout"]),
           process_s=round(time.perf_counter() - start, 1))  # fmt: skip


def vllm():
    """A real engine by forks/vllm.patch: log-probs, noise, ends, turns, weights, prefix cache (tests/check_vllm.py)."""
    sys.path.insert(0, str(ROOT / "tests"))
    import check_vllm

    shape = SHAPE | dict(num_attention_heads=2, num_key_value_heads=1) if TINY else SHAPE  # large heads
    folder = WORK / "vllm_model"
    common.write_checkpoint(str(folder), common.character_tokenizer(shape["vocab_size"]), 4096, shape)
    flags = dict(device=DEVICE, dtype=OPTIONS.get("dtype", "bfloat16"), compile=COMPILED, vllm_cache_gb=1.0)
    (WORK / "vllm_patched").mkdir(exist_ok=True)
    for what, found, least, most in check_vllm.check(folder, WORK / "vllm_patched", **flags):
        check(what, least <= found <= most, found=short(found))
    report(**memory())


def main():
    global NAME, OPTIONS
    warnings.simplefilter("ignore")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    failed = False
    for part in sys.argv[1:]:
        NAME, *options = part.split(":")
        OPTIONS = dict(option.split("=", 1) for option in options)
        start = time.perf_counter()
        try:
            globals()[NAME]()
        except Exception as error:
            traceback.print_exc()
            failed = True
            check(f"{NAME} runs", False, error=repr(error)[:600])
        report(done=NAME, seconds=round(time.perf_counter() - start, 1))
        if GPU:
            torch.cuda.empty_cache()
    sys.exit(failed)


if __name__ == "__main__":
    main()
