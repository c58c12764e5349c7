"""Ten experiments on the default task, each of which answers a question about PPO by curves.

    python benchmarks/experiments.py                      # lists the experiments and the commands of their runs
    python benchmarks/experiments.py epochs 1 2 3         # runs one with these seeds; adds to data/experiments.jsonl
    python benchmarks/experiments.py table [NAME ...]     # prints the numbers of the runs
    python benchmarks/experiments.py draw                 # pictures/experiments.png and pictures/NAME.png

A run is a command of ppo_llm.py that a reader can type. It takes two minutes of one core, up to six with more epochs,
and ten in bfloat16. Some runs change the script first, by a patch of forks/, or in one place, as the table of edits
below says. Runs that several experiments share, such as the default one, are made once. The experiments.jsonl in the
repository is from commit 272afaa. Move it away before you make runs of another version.
"""

import dataclasses
import functools
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import common
from common import MEAN_OF, PICTURES, ROOT, mean_columns

RESULTS = common.DATA / "experiments.jsonl"
SAMPLES = 256  # of an iteration
COLUMNS = {  # metric: its name in a run's line
    "objective/accuracy": "accuracy", "objective/kl": "kl", "objective/entropy": "entropy",
    "actor/clipfrac": "clipfrac", "actor/approx_kl": "approx_kl", "actor/grad_norm": "grad_norm",
    "critic/explained_variance": "explained_variance", "ratio/first_dev": "first_dev", "ratio/last_dev": "last_dev",
    "debug/sampler_trainer_logprob_diff": "sampler_diff",
}  # fmt: skip
WATCHED = {"grad_norm": "norm of the actor's gradient", "explained_variance": "explained variance of the critic",
           "first_dev": "largest abs(ratio - 1) of the first minibatch",
           "entropy": "entropy, nats per token"}  # fmt: skip
EDITS = {  # what a run changes in the script: (old text, new text)
    "log-probs of the present policy as old": ("newlogprobs, mb.old_logprobs,", "newlogprobs, newlogprobs.detach(),"),
    "optimizer of another model": ("actor_optimizer = make_optimizer(actor)",
                                   "actor_optimizer = make_optimizer(copy.deepcopy(actor))"),
    "constant reward": ("    rewards = experience.rewards - kl_penalty\n",
                        "    rewards = torch.zeros_like(experience.rewards)\n"),
}  # fmt: skip


@dataclasses.dataclass
class Run:
    label: str
    flags: str = ""
    edit: str = ""  # a name of EDITS, or "critic after actor"
    patch: str = ""
    ranks: int = 1

    def command(self) -> str:
        start = "python" if self.ranks == 1 else f"torchrun --nproc-per-node {self.ranks}"
        return f"{start} ppo_llm.py {self.flags}".strip()

    def key(self, seed: int) -> str:
        return " ; ".join([self.command(), self.edit, self.patch, str(seed)])


@dataclasses.dataclass
class Experiment:
    question: str
    runs: list[Run]
    watch: str  # the column beside accuracy in the picture
    finding: str = ""  # the title of the picture; without it there is no picture
    seeds: int = 3


EXPERIMENTS = {
    "epochs": Experiment(
        "What do more ppo_epochs do?",
        [Run("1 epoch", "--ppo-epochs 1"), Run("2 epochs, default"), Run("4 epochs", "--ppo-epochs 4"),
         Run("8 epochs", "--ppo-epochs 8")],
        "clipfrac", "More epochs learn faster at first, but four and eight reach 90 % no sooner than two"),
    "minibatches": Experiment(
        "How many optimizer steps does one rollout make, and what do more of them buy?",
        [Run("16 samples, 32 steps", "--train-batch-size 16"), Run("64 samples, 8 steps, default"),
         Run("128 samples, 4 steps", "--train-batch-size 128"), Run("256 samples, 2 steps", "--train-batch-size 256")],
        "grad_norm", "More optimizer steps per rollout need fewer samples on the default task"),
    "ratio": Experiment(
        "Why is my ratio 1?",
        [Run("default", "--num-iterations 5"), Run("critic_warmup", "--num-iterations 5 --critic-warmup-iterations 5"),
         Run("one_update_by_design", "--num-iterations 5 --ppo-epochs 1 --train-batch-size 256"),
         Run("lr_or_clip_too_small", "--num-iterations 5 --actor-lr 1e-10"),
         Run("advantage_zero", "--num-iterations 5 --kl-coef 0 --critic-epochs 0", "constant reward"),
         Run("old_logprob_recomputed", "--num-iterations 5", "log-probs of the present policy as old"),
         Run("optimizer_noop", "--num-iterations 5", "optimizer of another model")], "last_dev", seeds=1),
    "order": Experiment(
        "Is the critic updated before, after or beside the actor?",
        [Run("critic first, default"), Run("actor first", "", "critic after actor"),
         Run("beside it", "--critic-ranks 1", "", "critic_ranks", 2)], "explained_variance", seeds=1),
    "warmup": Experiment(
        "What does a warm-up of the critic do?",
        [Run("no warm-up, default"), Run("10 iterations", "--critic-warmup-iterations 10"),
         Run("30 iterations", "--critic-warmup-iterations 30")],
        "explained_variance", "A warm-up of the critic costs the samples that it uses"),
    "old": Experiment(
        "Which policy is the old one: log-probs of the trainer, or of the sampler?",
        [Run("recomputed, default"), Run("sampler's", "--no-recompute-old-logprobs"),
         Run("recomputed, bfloat16", "--dtype bfloat16"),
         Run("sampler's, bfloat16", "--dtype bfloat16 --no-recompute-old-logprobs")], "first_dev",
        "The sampler's log-probs serve as the old ones as well as recomputed log-probs do here"),
    "reference": Experiment(
        "What does the reference do?",
        [Run("no reference", "--kl-coef 0"), Run("KL 0.005", "--kl-coef 0.005"), Run("KL 0.02, default"),
         Run("KL 0.08", "--kl-coef 0.08"), Run("KL 0.3", "--kl-coef 0.3")], "entropy",
        "A KL weight of up to 0.02 costs nothing, 0.08 costs half of the right answers, and 0.3 costs all"),
    "clip": Experiment(
        "What does clipping do?",
        [Run("0.2, default"), Run("0.05", "--clip-low 0.05 --clip-high 0.05"),
         Run("0.2, upwards 0.4", "--clip-high 0.4"), Run("none", "--clip-low 1 --clip-high 1e9"),
         Run("dual clip 3", "--dual-clip 3")], "approx_kl",
        "Without a clip range the policy moves further per iteration and learns later"),
    "lambda": Experiment(
        "What do lambda and the critic do?",
        [Run("0", "--gae-lambda 0 --critic-lambda 0"), Run("0.5", "--gae-lambda 0.5 --critic-lambda 0.5"),
         Run("0.95", "--gae-lambda 0.95 --critic-lambda 0.95"), Run("1, default"),
         Run("constant baseline", "--critic-epochs 0")], "explained_variance",
        "Lambdas of 0.95 and 1 learn alike; smaller lambdas and a constant baseline learn later"),
    "lr": Experiment(
        "Which learning rate, and what breaks first?",
        [Run("x 0.1", "--actor-lr 5e-5 --critic-lr 1e-4"), Run("x 0.3", "--actor-lr 1.5e-4 --critic-lr 3e-4"),
         Run("x 1, default"), Run("x 3", "--actor-lr 1.5e-3 --critic-lr 3e-3"),
         Run("x 10", "--actor-lr 5e-3 --critic-lr 1e-2")], "clipfrac",
        "With three times the default rates the result depends on the seed, and ten times the rates fail"),
}  # fmt: skip


def script(run: Run) -> str:
    """The text of ppo_llm.py as the run wants it."""
    text = common.patched_script(run.patch).read_text()
    if run.edit == "critic after actor":
        first, second, rest = (text.index(f"        # --- {name}") for name in ("Critic", "Actor", "The sampler"))
        return text[:first] + text[second:rest] + text[first:second] + text[rest:]
    if run.edit:
        old, new = EDITS[run.edit]
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def execute(run: Run, seed: int) -> tuple[str, list[dict], list[dict]]:
    """Output, metrics and completions of a run."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "ppo_llm.py").write_text(script(run))
        start = [sys.executable] if run.ranks == 1 else ["torchrun", "--nproc-per-node", str(run.ranks)]
        command = [*start, "ppo_llm.py", *shlex.split(run.flags), "--seed", str(seed), "--run-name", "run",
                   "--log-dir", folder, "--save-every", "0", "--eval-episodes", "1"]  # fmt: skip
        paths = {"PYTHONPATH": str(ROOT)}  # environments of benchmarks/tasks.py
        output = subprocess.run(
            command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | paths
        ).stdout
        return output, *(common.read_lines(Path(folder, "run", f"{x}.jsonl")) for x in ("metrics", "completions"))


def measure(run: Run, seed: int) -> dict:
    output, rows, _ = execute(run, seed)
    accuracy = [row["objective/accuracy"] for row in rows]
    means = [statistics.mean(accuracy[i : i + 5]) for i in range(len(accuracy) - 4)]
    first = next((i for i, mean in enumerate(means) if mean >= 0.9), None)
    return {
        "key": run.key(seed), "samples": SAMPLES, "columns": mean_columns(rows, COLUMNS),
        "samples_to_90": None if first is None else SAMPLES * (first + 5),
        "final": statistics.mean(accuracy[-10:]), "seconds": round(sum(row["time/iteration"] for row in rows)),
        "actor_steps": statistics.mean(len(row["ratio/steps"]) for row in rows),
        "diagnoses": sorted({line.strip() for line in output.splitlines() if re.match(" *ratio: ", line)}),
    }  # fmt: skip


@functools.cache
def results() -> dict[str, dict]:
    return {run["key"]: run for run in common.read_lines(RESULTS)} if RESULTS.exists() else {}


def of(run: Run, seeds: int) -> list[dict]:
    """The results of a run's first seeds."""
    return [results()[run.key(seed)] for seed in range(1, seeds + 1) if run.key(seed) in results()]


def list_all() -> None:
    for name, experiment in EXPERIMENTS.items():
        print(f"{name}: {experiment.question}")
        for run in experiment.runs:
            print(f"  {run.label:24} {run.command()}{f'  # {run.edit or run.patch}' if run.edit or run.patch else ''}")


def median_at(done: list[dict], column: str, place: int) -> str:
    """Over seeds; a dash for what a run does not have, such as the KL without a reference."""
    values = [each["columns"][column][place] for each in done]
    return "-" if None in values else f"{statistics.median(values):.3g}"


def table(names: list[str]) -> None:
    for name in names or EXPERIMENTS:
        experiment = EXPERIMENTS[name]
        print(f"\n**{name}**\n")
        common.table(["", "samples to 90 %", "right at the end, %", "KL at the end", f"{experiment.watch}, early, last",
                      "actor steps an iteration", "seconds", "diagnoses"])  # fmt: skip
        for run in experiment.runs:
            done = of(run, experiment.seeds)
            if not done:
                continue
            tenth = len(done[0]["columns"]["kl"]) // 10
            samples = [f"{each['samples_to_90']:,}" if each["samples_to_90"] else "-" for each in done]
            watched = f"{median_at(done, experiment.watch, tenth)}, {median_at(done, experiment.watch, -1)}"
            final = " ".join(f"{100 * each['final']:.1f}" for each in done)
            seconds = statistics.median(each["seconds"] for each in done)
            causes = sorted({line.split()[1].rstrip(":,") for each in done for line in each["diagnoses"]})
            common.line([run.label, " ".join(samples), final, median_at(done, "kl", -1), watched,
                         f"{done[0]['actor_steps']:.3g}", seconds, ", ".join(causes)])  # fmt: skip


def colors(runs: list[Run]) -> list[str]:
    """Ink for the default, blues for the runs before it, warm colours for those after it."""
    [place] = [i for i, run in enumerate(runs) if "default" in run.label]
    after = common.ORANGE, common.RED, common.BLUE, common.SKY
    return [*(common.BLUE, common.SKY, common.GREY)[:place], common.INK, *after[: len(runs) - place - 1]]


def draw() -> None:
    drawn = {name: each for name, each in EXPERIMENTS.items() if each.finding}
    for name, experiment in drawn.items():
        figure, axes = common.new_picture(experiment.finding, 2.9, 1, 2)
        ends = [draw_runs(axis, experiment, column) for axis, column in zip(axes, ("accuracy", experiment.watch))]
        common.percent(axes[0])
        axes[0].set_title("right answers in the rollouts")
        if experiment.watch == "first_dev":  # which is exactly 0 for some runs
            axes[1].set_yscale("symlog", linthresh=1e-7)
            axes[1].set(ylim=(-2e-8, 0.1), yticks=[0, 1e-6, 1e-4, 1e-2])
        if experiment.watch == "grad_norm":
            axes[1].set_yscale("log")
            axes[1].set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"], minor=False)
            axes[1].tick_params(which="minor", labelleft=False)
        common.label_ends(axes[1], ends[1])
        common.save_picture(figure, PICTURES / f"{name}.png")
    draw_all()


def draw_all() -> None:
    """The samples to 90 % of every run, beside those of the default."""
    default = of(EXPERIMENTS["epochs"].runs[1], 3)
    usual = [each["samples_to_90"] for each in default]
    limit = SAMPLES * MEAN_OF * len(default[0]["columns"]["accuracy"])
    rows = []  # (experiment, run, the samples of each seed)
    for name, experiment in EXPERIMENTS.items():
        if name != "ratio":
            changes = [run for run in experiment.runs if "default" not in run.label]
            rows += [(name, run, [each["samples_to_90"] for each in of(run, experiment.seeds)]) for run in changes]
    faster = [run.label for _, run, samples in rows if None not in samples and statistics.median(samples) < min(usual)]
    assert faster == ["16 samples, 32 steps"], f"the title names other runs than {faster}"
    title = f"Of {len(rows)} changes to the default, only minibatches of 16 samples learn faster"
    figure, axis = common.new_picture(title, 0.19 * len(rows) + 1.2)
    figure.get_layout_engine().set(rect=(0.15, 0, 0.85, 1))  # The names of the experiments are on the left.
    axis.axvspan(min(usual), max(usual), color=common.GREY, alpha=0.3, linewidth=0)
    for y, (name, _, samples) in enumerate(rows):
        if y == 0 or rows[y - 1][0] != name:
            axis.axhline(y - 0.5, color=common.GREY, linewidth=0.8)
            axis.annotate(name, (0.012, y), xycoords=("figure fraction", "data"), va="center", weight="bold",
                          annotation_clip=False, in_layout=False)  # fmt: skip
        if None in samples:
            axis.text(limit, y, "not reached", color=common.RED, va="center", ha="right")
            continue
        median = statistics.median(samples)
        color = common.BLUE if median < min(usual) else common.ORANGE if median > max(usual) else common.INK
        axis.plot(samples, [y] * len(samples), "o", color=color, markersize=4, alpha=0.6, markeredgewidth=0)
        axis.plot(median, y, "|", color=color, markersize=11, markeredgewidth=2)
    axis.set(ylim=(len(rows) - 0.5, -0.5), xlim=(25_000, limit), yticks=range(len(rows)),
             yticklabels=[run.label for _, run, _ in rows],
             title="samples until 90 % of the answers are right: seeds (dots), their\n"
                   "median (bar), and the range of the default's three seeds (grey)")  # fmt: skip
    axis.grid(visible=False)
    common.thousands(axis)
    axis.set_xticks(range(30_000, 70_000, 10_000))
    common.save_picture(figure, PICTURES / "experiments.png")


def draw_runs(axis, experiment: Experiment, column: str) -> list[tuple[float, str, str]]:
    """Returns the ends of the curves for label_ends."""
    ends = []
    for run, color in zip(experiment.runs, colors(experiment.runs)):
        if done := of(run, experiment.seeds):
            curves = [each["columns"][column] for each in done]
            x = [(k + 1) * MEAN_OF * done[0]["samples"] for k in range(len(curves[0]))]
            ends.append((common.draw_seeds(axis, x, curves, color), run.label, color))
    axis.set(xlabel="samples", title=WATCHED.get(column, column), xlim=(0, x[-1]))
    common.thousands(axis)
    return ends


def main():
    if len(sys.argv) == 1:
        return list_all()
    name, *rest = sys.argv[1:]
    if name in ("table", "draw"):
        return table(rest) if name == "table" else draw()
    experiment = EXPERIMENTS[name]
    for seed in map(int, rest or range(1, experiment.seeds + 1)):
        for run in experiment.runs:
            if run.key(seed) not in results():
                common.add_line(RESULTS, measure(run, seed))
                results.cache_clear()
            print(f"{run.label}:", *results()[run.key(seed)]["diagnoses"], sep="\n  ")


if __name__ == "__main__":
    main()
