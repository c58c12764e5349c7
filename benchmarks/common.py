"""What the benchmarks share: folders, tables, the style of pictures, random models and prompts, and rollouts of given
lengths. No command.
"""

import contextlib
import copy
import functools
import io
import json
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest.mock
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import transformers

sys.path.append(str(Path(__file__).resolve().parent.parent))
import ppo_llm

ROOT = Path(__file__).resolve().parent.parent
PICTURES, DATA = ROOT / "benchmarks" / "pictures", ROOT / "benchmarks" / "data"

SMALL = dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
             num_key_value_heads=2, vocab_size=4096)  # fmt: skip
QWEN_05B = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                num_key_value_heads=2, vocab_size=151936)  # fmt: skip
QWEN_15B = dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
                num_key_value_heads=2, vocab_size=151936)  # fmt: skip
TINY = SMALL | dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=512)


def hardware(*packages) -> str:
    """Processor, threads and versions, also of these packages."""
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", info.read_text()) if info.is_file() else None
    threads = torch.get_num_threads()
    where = f"{cpu[1] if cpu else platform.machine()}, {threads} thread{'s' * (threads > 1)}"
    versions = [f"{package.__name__} {package.__version__}" for package in (torch, *packages)]
    return f"{where}; {', '.join(versions)}, Python {platform.python_version()}"


def spread(values: list[float], form: str = ".2f") -> str:
    """Median and range."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def read_lines(path: Path) -> list[dict]:
    """The lines of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def add_line(path: Path, row: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def table(columns, rows=()) -> None:
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for row in rows:
        line(row)


def line(cells) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


MEAN_OF = 5  # iterations: a point of a curve


def mean_columns(rows: list[dict], names: dict[str, str]) -> dict[str, list]:
    """Means of MEAN_OF iterations; None where a metric is missing."""
    columns = {}
    for name, short in names.items():
        parts = [rows[i : i + MEAN_OF] for i in range(0, len(rows), MEAN_OF)]
        parts = [[row[name] for row in part if row.get(name) is not None] for part in parts]
        columns[short] = [float(f"{statistics.mean(part):.4g}") if part else None for part in parts]
    return columns


# --- Pictures.
# A picture is PICTURE_WIDTH inches wide and has twice the 700 pixels that a page shows, so a text of 9 points is 12.5
# pixels high on the page. The title is a sentence that states the finding. A curve has its label at its end. People who
# are colour-blind can tell any two of these colours apart.
INK, GREY, BLUE, SKY, ORANGE, RED = "#222222", "#808080", "#00539c", "#3a93d6", "#d07c00", "#a82a0c"
PAPER, GRID, FAINT_RED, FAINT_GREEN = "#fafaf7", "#e3e3dc", "#f6dcd4", "#dcecdc"
PICTURE_WIDTH, DOTS_PER_INCH = 7.0, 200
TITLE_CHARACTERS = 74  # of a line
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK,
    "figure.facecolor": PAPER, "figure.titlesize": 11, "figure.titleweight": "bold",
    "axes.facecolor": PAPER, "axes.edgecolor": GREY, "axes.labelcolor": INK, "axes.labelsize": 9,
    "axes.titlesize": 9, "axes.titlelocation": "left", "axes.titlecolor": INK, "axes.titlepad": 7,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "xtick.color": GREY, "xtick.labelcolor": INK, "xtick.labelsize": 8.5,
    "ytick.color": GRID, "ytick.labelcolor": INK, "ytick.labelsize": 8.5, "ytick.major.size": 0,
    "lines.linewidth": 2, "lines.solid_capstyle": "round",
    "figure.constrained_layout.h_pad": 0.08, "figure.constrained_layout.w_pad": 0.08,
}  # fmt: skip


def new_picture(title: str, height: float, *grid, **options):
    """A figure of this height in inches, and its axes.

    The other arguments are those of plt.subplots, or of plt.subplot_mosaic if the first is a list of rows.
    """
    import matplotlib.pyplot as plt

    plt.rcParams.update(STYLE)
    make = plt.subplot_mosaic if grid and isinstance(grid[0], list) else plt.subplots
    figure, axes = make(*grid, figsize=(PICTURE_WIDTH, height), layout="constrained", **options)
    figure.suptitle(balanced(title, TITLE_CHARACTERS), x=0.012, ha="left")
    return figure, axes


def balanced(text: str, width: int) -> str:
    """The text in as few lines of at most this width as possible, all of about the same length."""
    wrap = functools.partial(textwrap.wrap, text, break_on_hyphens=False)
    lines = len(wrap(width))
    return "\n".join(wrap(next(narrow for narrow in range(1, width + 1) if len(wrap(narrow)) == lines)))


def draw_seeds(axis, x, curves, color: str, **line) -> float:
    """A thin line for each seed and a thick line for their median. Returns the last value of the median.

    A curve has None where a metric is missing.
    """
    curves = np.array(curves, dtype=float)  # [seeds, points]
    if len(curves) > 1:
        axis.plot(x, curves.T, color=color, linewidth=0.7, alpha=0.6)
    median = np.median(curves, axis=0)
    axis.plot(x, median, color=color, **line)
    return median[np.isfinite(median)][-1] if np.isfinite(median).any() else math.nan


def spread_out(wanted: list[float], gap: float) -> list[float]:
    """The positions closest to the wanted ones, in the same order, that are at least `gap` apart.

    >>> spread_out([1.0, 1.5, 5.0], gap=1.0)
    [0.75, 1.75, 5.0]
    """
    order = np.argsort(wanted, kind="stable")
    groups = []  # of neighbours that touch: [sum of the wanted starts of the group, members]
    for place, i in enumerate(order):
        groups.append([wanted[i] - place * gap, 1])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            total, members = groups.pop()
            groups[-1][0] += total
            groups[-1][1] += members
    starts = [total / members for total, members in groups for _ in range(members)]
    positions = [0.0] * len(wanted)
    for place, i in enumerate(order):
        positions[i] = starts[place] + place * gap
    return positions


def label_ends(axis, ends: list[tuple[float, str, str]], x: float | None = None) -> None:
    """Labels to the right of the axes, each beside the end (y, text, color) of its curve, at x or the right edge.

    Labels that would overlap are moved apart, and a thin line leads from the end of the curve to its label.
    """
    axis.figure.draw_without_rendering()  # The heights of the axes are known after the layout.
    to_pixels, pixels = axis.transData, axis.figure.dpi / 72
    x = axis.get_xlim()[1] if x is None else x
    lines = [text.count("\n") + 1 for _, text, _ in ends]
    gap = 12 * pixels * max(lines)
    heights = spread_out([to_pixels.transform((x, y))[1] for y, *_ in ends], gap)
    for (y, text, color), height in zip(ends, heights):
        axis.annotate(
            text, xy=(x, y), xytext=(1.035, axis.transAxes.inverted().transform((0, height))[1]),
            textcoords="axes fraction", color=color, va="center", annotation_clip=False, linespacing=1.1,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 0,
                        "relpos": (0, 0.5)},
        )  # fmt: skip


def thousands(axis) -> None:
    """The numbers of the x axis as 20,000."""
    axis.locator_params(axis="x", nbins=4)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")


def percent(axis) -> None:
    """The numbers of the y axis, which are shares, as 20%."""
    axis.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")


def save_picture(figure, path: Path) -> None:
    """With 256 colours, which halves the file."""
    import PIL.Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DOTS_PER_INCH)
    PIL.Image.open(drawn).convert("RGB").quantize(256, dither=PIL.Image.Dither.NONE).save(path, optimize=True)


# --- Measuring.
def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run) -> float:
    """That run() takes, on a GPU until it has done its work."""
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def character_tokenizer(vocab_size: int) -> ppo_llm.HFTokenizer:
    """A character a token, but for pad, eos and unk; beyond 20,000 characters ids go unused."""
    return ppo_llm.HFTokenizer.from_texts(["".join(chr(0x4E00 + i) for i in range(min(vocab_size - 3, 20_000)))])


def random_prompts(tokenizer: ppo_llm.HFTokenizer, samples: int, length: int) -> list[str]:
    torch.manual_seed(0)
    symbols = len(tokenizer.hf) - 3
    return ["".join(chr(0x4E00 + i) for i in row) for row in torch.randint(symbols, (samples, length)).tolist()]


def sums(samples: int) -> list[str]:
    """Questions of the same number of tokens, where a digit is a token."""
    numbers = random.Random(0)
    return [f"What is {numbers.randint(10, 99)} + {numbers.randint(10, 99)}?" for _ in range(samples)]


def write_checkpoint(folder: str, tokenizer: ppo_llm.HFTokenizer, context: int, shape: dict) -> None:
    """A random Qwen2, whose logits are spread wide enough for greedy tokens to vary."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True, max_position_embeddings=context,
        eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id, **shape)  # fmt: skip
    actor = ppo_llm.Transformer(ppo_llm.check_config(config))
    for p in actor.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.05)
    ppo_llm.save_hf_checkpoint(actor, tokenizer, Path(folder))


@functools.cache
def temporary_folder():
    return tempfile.TemporaryDirectory()  # as long as the process


def random_checkpoint(context: int, shape: dict) -> tuple[str, ppo_llm.HFTokenizer]:
    """The folder of a random Qwen2 of this shape, as long as the process, and its tokenizer."""
    folder, tokenizer = temporary_folder().name, character_tokenizer(shape["vocab_size"])
    write_checkpoint(folder, tokenizer, context, shape)
    return folder, tokenizer


@functools.cache
def patched_script(patch: str) -> Path:
    """The path of ppo_llm.py, or, if `patch` is not empty, of a copy with forks/<patch>.patch applied."""
    if not patch:
        return ROOT / "ppo_llm.py"
    copied = Path(temporary_folder().name, patch, "ppo_llm.py")
    copied.parent.mkdir()
    copied.write_bytes((ROOT / "ppo_llm.py").read_bytes())
    git_apply(ROOT / "forks" / f"{patch}.patch", copied.parent)
    return copied


def git_apply(patch: Path | str, folder: Path, text: str | None = None) -> None:
    """Apply a patch, or the text of one if `patch` is "-", in a folder that is not in the index of a repository.

    Without the ceiling, git changes nothing and says nothing if the folder lies inside of a repository.
    """
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    subprocess.run(["git", "apply", patch], cwd=folder, input=text, text=True, check=True, env=env)


def run_script(script: Path, flags: list[str], log_dir: Path, name: str = "run") -> Path:
    """Run the script on one thread, without checkpoints. Returns the folder of its run."""
    command = [sys.executable, script, "--save-every", "0", *flags, "--log-dir", log_dir, "--run-name", name]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # benchmarks.tasks, also for a patched copy
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT, stdout=sys.stderr, env=env)
    return log_dir / name


def commit() -> str:
    """The commit, with a plus if a file of the project differs from it."""
    git = lambda *arguments: subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/data",
                  ":!benchmarks/table.md").strip()  # fmt: skip
    return git("rev-parse", "--short", "HEAD").strip() + "+" * bool(changed)


def runs_of_table(lines: list[str], flags: dict[str, object]):
    """Of runs that table.py has made, given by their line.json: (what `flags` has for it, seed, folder, output)."""
    for path in map(Path, lines):
        line = json.loads(path.read_text())
        for words, found in flags.items():
            if line["command"] == f"python ppo_llm.py {words} --seed {line['seed']}".replace("  ", " "):
                yield found, line["seed"], path.parent / "run", path.parent.with_suffix(".txt").read_text()


def forced_lengths(name: str, samples: int, mean: int, longest: int) -> list[int]:
    """Response lengths of the given mean, then cut to `longest`, from a fixed seed."""
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


@contextlib.contextmanager
def forced(ppo, lengths: list[int], after=lambda: None):
    """Within, sample i of a rollout gets lengths[i] tokens. Gives (start, end, rows that decode) of every K steps.

    K is `steps_per_wait` of Decoder, on the CPU 1. `after` is called after them. On an accelerator start and end tell
    when they were launched.
    """
    blocks, limits, made, share, begin, step = [], {}, 0, ppo.rollout_share, ppo.Decoder.begin, ppo.Decoder.step

    def forced_begin(decoder, rows, episodes, args):
        begin(decoder, rows, episodes, args)
        decoder.stop_ids.fill_(decoder.sampler.config.vocab_size)  # never sampled
        limit = [e.prompt_length + limits[e.noise_key] for e in episodes]
        decoder.limit[list(rows)] = torch.tensor(limit).to(decoder.limit)

    def forced_rollout(decoder, tokenizer, envs, seeds, sample_ids, iteration, args):
        keys = ppo.sample_keys(args.seed, iteration, sample_ids).tolist()
        limits.update((key, lengths[i]) for key, i in zip(keys, sample_ids, strict=True))
        tokenizer = copy.copy(tokenizer)
        tokenizer.stop_ids = [decoder.sampler.config.vocab_size]
        return share(decoder, tokenizer, envs, seeds, sample_ids, iteration, args)

    def watched_step(decoder, attend):
        nonlocal made
        if made % decoder.steps_per_wait == 0:
            blocks.append((time.perf_counter(), decoder.alive.sum()))
        step(decoder, attend)
        made += 1
        if made % decoder.steps_per_wait == 0:
            start, rows = blocks[-1]
            blocks[-1] = start, time.perf_counter(), rows
            after()

    with contextlib.ExitStack() as stack:
        patch = lambda *change: stack.enter_context(unittest.mock.patch.object(*change))
        patch(ppo, "rollout_share", forced_rollout)
        patch(ppo.Decoder, "begin", forced_begin)
        patch(ppo.Decoder, "step", watched_step)
        yield blocks


def make_decoder(ppo, sampler, tokenizer, rows: int, args):
    """A decoder, and the number of environments that it needs."""
    return ppo.Decoder(sampler, rows, tokenizer.stop_ids, args), math.ceil(rows * getattr(ppo, "ENVS_PER_ROW", 1))


def load_sampler(ppo, config, dtype, device="cpu"):
    """A model that decodes, with undefined weights, or those of a folder."""
    dtype = str(dtype).removeprefix("torch.")
    args = ppo.Args(dtype=dtype, device=str(device), compile="off")
    if not isinstance(config, str):
        return ppo.build_model(config, "lm", args, sampler=True)
    model = ppo.build_model(ppo.load_config(config), "lm", args, sampler=True)
    ppo.load_weights(model, config)
    return model


class Prompts(gym.Env):
    """Prompt `seed` of a list; every response ends its episode."""

    def __init__(self, prompts):
        self.prompts = prompts

    def reset(self, *, seed=None, options=None):
        return self.prompts[seed % len(self.prompts)], {}

    def step(self, response):
        return "", 0.0, True, False, {}
