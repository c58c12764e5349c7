"""Six case histories: runs of the default task that fall ill in ways one meets in practice, beside the healthy one.

    python benchmarks/cases.py                       # the cases, and the commands of their runs
    python benchmarks/cases.py run rate              # makes the runs of a case; adds to data/cases.json
    python benchmarks/cases.py run rate 2            # the same with seed 2
    python benchmarks/cases.py read runs/table/CODE/*/line.json    # adds runs that table.py has made
    python benchmarks/cases.py table                 # numbers of all runs
    python benchmarks/cases.py plot                  # pictures/case_NAME.png

A run is a command of ppo_llm.py that a reader can type, and takes about two minutes of one core.
"""

import dataclasses
import json
import statistics
import sys

import common
from common import MEAN_OF, mean_columns
from experiments import Run, execute

RESULTS = common.DATA / "cases.json"
METRICS = {  # metric: its name in the file and in the pictures
    "objective/reward": "reward", "objective/accuracy": "accuracy",
    "objective/kl": "KL, nats per response", "objective/truncated": "truncated",
    "actor/entropy": "entropy, nats per token", "actor/clipfrac": "clipfrac", "actor/approx_kl": "approx_kl",
    "actor/grad_norm": "grad norm of the actor", "critic/explained_variance": "explained variance",
    "critic/value_mean": "mean value", "critic/return_mean": "mean return", "ratio/advantage_std": "advantage std",
}  # fmt: skip
NAMES = list(METRICS.values())
REWARD, ACCURACY, KL, TRUNCATED, ENTROPY, CLIPFRAC, APPROX_KL, GRAD, EXPLAINED, VALUE, RETURN, STD = NAMES
LOG = (APPROX_KL,)


@dataclasses.dataclass
class Case:
    title: str
    finding: str  # the title of the picture
    runs: list[Run]  # the sick one, then another attempt
    curves: list  # four of METRICS over iterations, or, as a pair (y, x), one over another


HEALTHY = Run("healthy")
CASES = {
    "healthy": Case("healthy",
                    "A healthy run: the reward rises from the first iterations, and the entropy falls to 0.02",
                    [HEALTHY], [REWARD, ENTROPY, CLIPFRAC, EXPLAINED]),
    "rate": Case("a learning rate ten times too large",
                 "Ten times the learning rate throws the policy far away at once, and the entropy collapses",
                 [Run("rate x 10", "--actor-lr 5e-3")],
                 [REWARD, APPROX_KL, (ENTROPY, REWARD), KL]),
    "flat": Case("no answer is ever right",
                 "Rewards that hardly ever differ teach nothing, and the KL penalty pulls the policy back",
                 [Run("no warm start", "--env-id benchmarks.tasks:Exact-v0 --sft-steps 0 --num-iterations 60"),
                  Run("warm start", "--env-id benchmarks.tasks:Exact-v0")],
                 [REWARD, STD, KL, CLIPFRAC]),
    "collapse": Case("a late start",  # The name is that of its rows in table.md.
                     "Without a warm start and a KL penalty the reward rises late, and answers are cut off",
                     [Run("no warm start, no KL", "--sft-steps 0 --kl-coef 0"),
                      Run("entropy bonus 0.03", "--sft-steps 0 --kl-coef 0 --entropy-coef 0.03")],
                     [REWARD, ENTROPY, (ENTROPY, REWARD), TRUNCATED]),
    "critic": Case("a dead critic", "A dead critic shows in its own metrics, and hardly in the accuracy",
                   [Run("critic's rate 1e-6", "--critic-lr 1e-6")],
                   [ACCURACY, EXPLAINED, VALUE, STD]),
    "hacked": Case("a hacked reward", "The reward with a hole rises to 0.98 while hardly any answer is right",
                   [Run("KL 0.001", "--env-id benchmarks.tasks:Ascending-v0 --kl-coef 0.001"),
                    Run("KL 0.03", "--env-id benchmarks.tasks:Ascending-v0 --kl-coef 0.03")],
                   [REWARD, ACCURACY, ENTROPY, KL]),
}  # fmt: skip


def results() -> dict[str, dict]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def of(run: Run) -> list[dict]:
    """The results of a run, one for each seed."""
    command = run.command()
    return [result for key, result in results().items() if key.split(" ; ")[0] == command]


def store(run: Run, seed: int, output: str, rows: list[dict], samples: list[dict]) -> None:
    """Keep the means of MEAN_OF iterations, the last answers and what the output said of the ratio."""
    lines = {line.strip() for line in output.splitlines() if line.strip().startswith("ratio: ")}
    answers = [[sample["prompt"], sample["response"]] for sample in samples[-3:]]
    first = {short: rows[0].get(name) for name, short in METRICS.items()}
    done = results() | {
        f"{run.command()} ; {seed}": {
            "columns": mean_columns(rows, METRICS),
            "first": first,
            "answers": answers,
            "diagnoses": sorted(lines),
        }
    }
    text = ",\n".join(f"{json.dumps(key)}: {json.dumps(done[key])}" for key in sorted(done))
    RESULTS.write_text(f"{{\n{text}\n}}\n")


def read(lines: list[str]) -> None:
    """Store those of table.py's runs whose flags are a case's."""
    runs = {run.flags: run for case in CASES.values() for run in case.runs}
    runs["--eval-every 20"] = runs.pop("")  # which does not change the training
    for run, seed, folder, output in common.runs_of_table(lines, runs):
        store(run, seed, output, *(common.read_lines(folder / f"{x}.jsonl") for x in ("metrics", "completions")))
        print(f"{run.command()}, seed {seed}: {folder}")


def median(curves: list[list], k: int) -> float:
    values = [curve[k] for curve in curves if curve[k] is not None]
    return statistics.median(values) if values else float("nan")


def table() -> None:
    """The medians over seeds after some iterations, and the last answers of the first seed."""
    places = (0, 1, 3, 9, 19, -1)
    for name, case in CASES.items():
        for run in case.runs:
            if not (done := of(run)):
                continue
            print(f"\n**{name}**: `{run.command()}`, {len(done)} seeds; {done[0]['diagnoses']}; {done[0]['answers']}\n")
            ends = [5, 10, 20, 50, 100, MEAN_OF * len(done[0]["columns"][REWARD])]
            common.table(["mean of five, up to iteration", *map(str, ends)])
            for metric in NAMES:
                curves = [each["columns"][metric] for each in done]
                inside = [k for k in places if k < len(curves[0])]
                common.line([metric, *(f"{median(curves, k):.3g}" for k in inside)])
            finals = [f"{each['columns'][ACCURACY][-1]:.3f}" for each in done]
            common.line(["accuracy at the end, by seeds", *finals])


def plot() -> None:
    for name, case in CASES.items():
        figure, axes = common.new_picture(case.finding, 4.6, 2, 2)
        runs = [HEALTHY, *case.runs] if name != "healthy" else [HEALTHY]
        colors = [common.GREY, common.RED, common.BLUE] if name != "healthy" else [common.INK]
        for axis, metric in zip(axes.flat, case.curves):
            y, x = metric if isinstance(metric, tuple) else (metric, None)
            axis.set(title=f"{y}, over the {x}" if x else y, xlabel=x or "iteration")
            if metric in LOG:
                axis.set_yscale("log")
            ends = [(draw(axis, run, y, x, color), run.label, color) for run, color in zip(runs, colors)]
            if metric in (REWARD, ACCURACY, TRUNCATED):
                axis.set_ylim(-0.04, 1.04)
            if axis in axes[:, 1] and name != "healthy":
                common.label_ends(axis, [(height, label, color) for (_, height), label, color in ends])
        common.save_picture(figure, common.PICTURES / f"case_{name}.png")


def draw(axis, run: Run, y: str, x: str | None, color: str) -> tuple[float, float]:
    """The curves y of a run over x, or over iterations. Returns the end of their median."""
    done = of(run)
    curves, points = ([each["columns"][metric] for each in done] for metric in (y, x or y))
    length = range(len(curves[0]))
    places = [median(points, k) for k in length] if x else [MEAN_OF * (k + 0.5) for k in length]
    return places[-1], common.draw_seeds(axis, places, curves, color)


def main():
    verb, *rest = sys.argv[1:] or [""]
    if verb == "run":
        name, *seeds = rest
        for seed in map(int, seeds or ["1"]):
            for run in CASES[name].runs:
                store(run, seed, *execute(run, seed))
    elif verb == "read":
        read(rest)
    elif verb == "table":
        table()
    elif verb == "plot":
        plot()
    else:
        for name, case in CASES.items():
            print(f"{name}: {case.title}", *(f"    {run.command()}" for run in case.runs), sep="\n")


if __name__ == "__main__":
    main()
