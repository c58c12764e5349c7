"""Is my run what it should be? A run beside reference runs with other seeds.

    python benchmarks/compare.py runs/mine             # a few seconds; beside the runs of the same task
    python benchmarks/compare.py runs/mine --task sums
    python benchmarks/compare.py same runs/a runs/b        # the metrics in which two runs differ
    python benchmarks/compare.py check default             # is each healthy run inside the bands of the others?
    python benchmarks/compare.py errors default            # how often is a healthy run outside?
    echo "COMMIT COMMAND" | python benchmarks/compare.py add sums runs/a ...    # adds runs to data/reference.jsonl

Prints what differs in the flags, a line for each metric, the first metric that leaves its band and where, and at last
`inside` or `outside`. Draws runs/mine/compare.png. A run may be unfinished. A point of a curve is the mean of a
fortieth of the run, of some metrics the geometric one.

The band around the mean of the reference runs has two parts. One is WIDTH standard deviations of a run, from one seed
to another. The other is SHARE times the range of the mean over the run, but at least LEVEL times its largest value,
because a few reference runs may be closer to each other than seeds usually are. Numbers below those of SMALLEST count
as equal to them: they all mean that the policy hardly moves, and late in a run they differ by large factors.

`same` prints a line for each metric that differs by more than RELATIVE of the larger number and by more than ABSOLUTE,
with the first iteration in which it does. Iterations count from 1, as in the terminal. Times and memory are left out. A
metric that only one run has is named, and does not count as a difference. It is meant for the checks of a fork.

The data also has healthy runs that are no references, of the task NAME "default, other seeds". `check` compares each
reference run with the others, and these runs with all references. `errors` draws references from all healthy runs at
random, compares one of the other runs with them, and counts how often it is outside.
"""

import collections
import itertools
import json
import math
import signal
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from exercise import read_run

RESULTS = Path(__file__).parent / "data" / "reference.jsonl"
METRICS = (
    "objective/reward", "objective/accuracy", "objective/kl", "objective/entropy", "objective/response_tokens",
    "actor/approx_kl", "actor/clipfrac", "actor/grad_norm", "critic/explained_variance",
    "critic/value_loss", "critic/value_mean")  # fmt: skip
LOGARITHMIC = ("actor/approx_kl", "actor/grad_norm", "critic/value_loss")
MAY_DIFFER = ("seed", "run_name", "log_dir", "resume", "save_every", "eval_every", "eval_episodes", "track",
              "wandb_project", "rollout_slots", "micro_batch_tokens", "compile", "device")  # fmt: skip
SMALLEST = {"actor/approx_kl": 0.003, "actor/clipfrac": 0.01}
RELATIVE, ABSOLUTE = 1e-3, 1e-5
OTHER_SEEDS = ", other seeds"  # in the name of the task
WIDTH, SHARE, LEVEL = 4.25, 0.1, 0.01  # Of 600 normal numbers one is 4.25 standard deviations off in 1 % of all runs.


def deciding(args: dict) -> dict:
    """Flags that decide what a run gives; of folders the names."""
    names = {name: Path(args[name]).name for name in ("model", "critic_model", "reward_model") if args.get(name)}
    return {name: value for name, value in (args | names).items() if name not in MAY_DIFFER}


def read(folder: Path, n: int | None = None) -> dict:
    """{"args": flags, "points": {metric: [a number or None]}, in logarithms if it is logarithmic} of a run folder."""
    config, rows = read_run(folder)
    args = deciding(config["args"])
    n = n or iterations_of_a_point(args)
    points = {}
    for name in METRICS:
        curve = np.array([row.get(name, np.nan) for row in rows[: len(rows) // n * n]], dtype=float)
        if name in LOGARITHMIC:
            curve = np.log(np.maximum(curve, 1e-12))
        means = curve.reshape(-1, n).mean(axis=1)
        points[name] = [None if np.isnan(x) else float(f"{x:.4g}") for x in means]
    return {"args": args, "points": points}


def iterations_of_a_point(args: dict) -> int:
    return max(1, args["num_iterations"] // 40)


def differences(args: dict, reference: dict) -> list[str]:
    return [f"--{name.replace('_', '-')} {args.get(name)}, in the reference {value}"
            for name, value in reference.items() if args.get(name) != value]  # fmt: skip


def band(curves: np.ndarray, level: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Mean and half the width of the band, [points], of the curves [runs, points].

    `level` is a share of the largest mean, by which the band is wider at least.
    """
    mean = curves.mean(axis=0)
    # The deviation at a point is estimated from five points, as a few runs say little about it.
    variance = curves.var(axis=0, ddof=1)
    around = np.pad(variance, 2, mode="edge")
    variance = np.mean([around[i : i + len(variance)] for i in range(5)], axis=0)
    N = len(curves)
    variance *= (1 + 1 / N) * (N + 1) / (N - 1)  # The mean and the deviation of a few runs are uncertain.
    present = mean[~np.isnan(mean)]
    least = max(SHARE * np.ptp(present), level * np.abs(present).max()) if len(present) else 0.0
    return mean, WIDTH * np.sqrt(variance) + least + 1e-4


def at_least_smallest(name: str, points) -> np.ndarray:
    """The points, None as NaN, and what is too small to say anything as SMALLEST."""
    smallest = SMALLEST.get(name, -np.inf)
    smallest = np.log(smallest) if name in LOGARITHMIC and name in SMALLEST else smallest
    return np.maximum(np.array(points, dtype=float), smallest)


def compare(mine: dict, references: list[dict], names=METRICS) -> dict:
    """{metric: (my points, mean, half width, first point outside or None)}"""
    found = {}
    for name in names:
        curves = at_least_smallest(name, [run["points"][name] for run in references])
        curve = at_least_smallest(name, mine["points"][name])[: curves.shape[1]]
        mean, width = band(curves, 0.0 if name in LOGARITHMIC else LEVEL)
        distance = np.abs(curve - mean[: len(curve)])
        outside = ~(distance <= width[: len(curve)]) & ~np.isnan(mean[: len(curve)])
        first = int(outside.argmax()) if outside.any() else None
        found[name] = curve, mean, width, first
    return found


def first_outside(found: dict) -> tuple[str, int] | None:
    """The metric that leaves its band first, and the point where it does."""
    left = {name: first for name, (*_, first) in found.items() if first is not None}
    return min(left.items(), key=lambda item: item[1]) if left else None


def healthy_runs(task: str) -> tuple[list[dict], list[dict]]:
    """The reference runs of a task, and the healthy runs with other seeds."""
    runs = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    tasks = {run["task"] for run in runs if OTHER_SEEDS not in run["task"]}
    if task not in tasks:
        sys.exit(f"no reference runs of the task {task!r}: must be one of {', '.join(sorted(tasks))}")
    return tuple([run for run in runs if run["task"] == name] for name in (task, task + OTHER_SEEDS))


def check(task: str) -> None:
    """Prints which of the reference runs leave the band of the others, and which further runs that of all of them."""
    runs, others = healthy_runs(task)
    n = iterations_of_a_point(runs[0]["args"])
    tried = [(f"reference run {i + 1}", run, runs[:i] + runs[i + 1 :]) for i, run in enumerate(runs)]
    tried += [(f"run {i + 1} with another seed", run, runs) for i, run in enumerate(others)]
    for name, mine, references in tried:
        left = first_outside(compare(mine, references))
        where = f"outside, first {left[0]} at iteration {n * left[1] + 1}" if left else "inside"
        print(f"{name}, beside {len(references)} runs: {where}")


def errors(runs: list[dict], references: int, draws: int = 2000) -> dict[str, int]:
    """{metric: in how many of the draws a healthy run left its band in this metric first}"""
    generator, count = np.random.default_rng(0), collections.Counter()
    for _ in range(draws):
        mine, *others = generator.choice(len(runs), references + 1, replace=False)
        if left := first_outside(compare(runs[mine], [runs[i] for i in others])):
            count[left[0]] += 1
    return dict(count.most_common())


def print_errors(task: str, draws: int = 2000) -> None:
    runs = [run for group in healthy_runs(task) for run in group]
    for references in 5, 3, 2:
        count = errors(runs, references, draws)
        share = sum(count.values()) / draws
        drawn = f"{references} of {len(runs)} healthy runs"
        print(f"beside {drawn}, another one is outside in {share:.1%} of {draws} draws: {count}")


def draw(found: dict, n: int, path: Path):
    import common  # later than at the top, because the import takes seconds

    left = {name: first for name, (*_, first) in found.items() if first is not None}
    title = "All metrics are inside their bands"
    if left:
        name = min(left, key=left.get)
        title = f"{name} is the first metric to leave its band, at iteration {n * left[name] + 1}"
    try:
        figure, axes = common.new_picture(title, 7.6, 4, 3)
    except ImportError:
        return print("\nno picture without matplotlib (pip install matplotlib)")
    for axis, (name, (curve, mean, width, first)) in zip(axes.flat, found.items(), strict=False):
        x = n * (np.arange(len(mean)) + 0.5)
        axis.fill_between(x, mean - width, mean + width, color=common.GREY, alpha=0.3, linewidth=0)
        axis.plot(x, mean, color=common.GREY, linewidth=1)
        axis.plot(x[: len(curve)], curve, color=common.BLUE if first is None else common.RED, linewidth=1.5)
        axis.set_title(f"log {name}" if name in LOGARITHMIC else name)
    key = axes.flat[-1]
    key.set_axis_off()
    for i, (text, color) in enumerate({
        "grey: the band and the mean": common.GREY, "of the reference runs": common.GREY,
        "blue: this run, inside": common.BLUE, "red: this run, outside": common.RED,
    }.items()):  # fmt: skip
        key.text(0, 0.85 - 0.2 * i, text, color=color)
    common.save_picture(figure, path)


def main(folder: str, task: str | None = None) -> bool:
    runs = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    try:
        args = deciding(read_run(Path(folder))[0]["args"])
    except ValueError as error:
        sys.exit(str(error))
    same = lambda reference: all(reference[name] == args.get(name) for name in ("env_id", "env_kwargs"))
    tasks = {run["task"]: run for run in runs if (task or same(run["args"])) and OTHER_SEEDS not in run["task"]}
    if not tasks:
        sys.exit(f"no reference runs with --env-id {args.get('env_id')} --env-kwargs {args.get('env_kwargs')}; "
                 "--task NAME compares with those of another")  # fmt: skip
    if task is None:  # the task from whose flags mine differ least
        task = min(tasks, key=lambda name: len(differences(args, tasks[name]["args"])))
    references, _ = healthy_runs(task)
    iterations, n = references[0]["args"]["num_iterations"], iterations_of_a_point(references[0]["args"])
    print(f"beside {len(references)} runs of {task!r} at {references[0]['commit']}: {references[0]['command']}")
    for line in differences(args, references[0]["args"]):
        print(f"  {line}")
    mine = read(Path(folder), n)
    done = n * len(mine["points"][METRICS[0]])
    if not done:
        sys.exit(f"{folder} has fewer than {n} iterations")
    found = compare(mine, references)
    print(f"{done} of {iterations} iterations\n")
    print("| metric | at iteration | mine | band | inside |\n|---|---|---|---|---|")
    for name, (curve, mean, width, first) in found.items():
        at = len(curve) - 1 if first is None else first  # the last point, or the first outside
        numbers = [curve[at], mean[at] - width[at], mean[at] + width[at]]
        value, low, high = np.exp(numbers) if name in LOGARITHMIC else numbers
        inside = "yes" if first is None else "NO"
        print(f"| {name} | {n * at + 1} | {value:.4g} | {low:.4g} to {high:.4g} | {inside} |")
    draw(found, n, Path(folder) / "compare.png")
    if left := first_outside(found):
        print(f"\nthe first to leave its band: {left[0]}, at iteration {n * left[1] + 1}")
    print("outside" if left else "inside")
    return left is None


def numbers_of(row: dict) -> dict[str, list]:
    """{metric: its number, or one for each step of the actor} of an iteration, without times and memory."""
    left_out = "iteration", "time/", "perf/", "ratio/steps"
    numbers = {name: [x] for name, x in row.items() if not name.startswith(left_out)}
    for step in row.get("ratio/steps", []):
        for name, x in step.items():
            numbers.setdefault(f"each step: {name}", []).append(x)
    return numbers


def differ(x: float | str | None, y: float | str | None) -> bool:
    """None stands for NaN."""
    if not isinstance(x, int | float) or not isinstance(y, int | float):
        return x != y
    return not math.isclose(x, y, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def print_differences(*folders: str) -> bool:
    """Prints which metrics of two runs differ. True if one does, if one run has more iterations, or if there
    are none to compare."""
    try:
        mine, other = ([numbers_of(row) for row in read_run(Path(folder))[1]] for folder in folders)
    except ValueError as error:
        sys.exit(str(error))
    names_of_mine, names_of_other = ({name for row in rows for name in row} for rows in (mine, other))
    for folder, names in (folders[0], names_of_mine - names_of_other), (folders[1], names_of_other - names_of_mine):
        for name in sorted(names):
            print(f"only {folder} has {name}")
    first = {}  # {metric: (iteration, mine, other)}
    for iteration, (a, b) in enumerate(zip(mine, other), 1):
        for name in (a | b).keys() & names_of_mine & names_of_other:
            values = a.get(name, [None]), b.get(name, [None])  # A NaN is not in the file.
            if pairs := [pair for pair in itertools.zip_longest(*values) if differ(*pair)]:
                first.setdefault(name, (iteration, *pairs[0]))
    if first:
        print("| metric | first at iteration | {} | {} |\n|---|---|---|---|".format(*folders))
    for name, (iteration, x, y) in first.items():
        print(f"| {name} | {iteration} | {x} | {y} |")
    count = len(names_of_mine | names_of_other)
    if len(mine) != len(other):
        print(f"{folders[0]} has {len(mine)} iterations, {folders[1]} has {len(other)}")
    print(f"{len(first)} of {count} metrics differ in {min(len(mine), len(other))} iterations")
    return bool(first) or len(mine) != len(other) or not mine


def add(task: str, *folders: str) -> None:
    commit, command = sys.stdin.read().strip().split(" ", 1)  # "COMMIT COMMAND"
    lines = [{"task": task, "commit": commit, "command": command} | read(Path(folder)) for folder in folders]
    with RESULTS.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this process without a traceback.
    match sys.argv[1:]:
        case ["same", mine, other]:
            sys.exit(print_differences(mine, other))
        case ["check", task]:
            check(task)
        case ["errors", task]:
            print_errors(task)
        case ["add", task, *folders] if folders:
            add(task, *folders)
        case [folder] if not folder.startswith("-"):
            sys.exit(not main(folder))
        case [folder, "--task", task] | ["--task", task, folder]:
            sys.exit(not main(folder, task))
        case _:
            sys.exit(__doc__)
