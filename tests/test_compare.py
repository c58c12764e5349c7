"""benchmarks/compare.py: healthy runs are inside of the band, sick ones are not."""

import json
import math
import random
import sys

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import compare

pytestmark = pytest.mark.shared
LINES = [json.loads(line) for line in compare.RESULTS.read_text().splitlines()]
RUNS = [run for run in LINES if run["task"] == "default"]


def left(mine: dict, runs: list[dict] = RUNS) -> dict[str, int]:
    """The metrics that leave their bands, and the points where they do."""
    return {name: found[3] for name, found in compare.compare(mine, runs).items() if found[3] is not None}


def test_a_metric_that_leaves_its_band_is_named():
    for mine in RUNS:
        assert len(RUNS) >= 3 and left(mine) == {}
        tenth = {name: points[:5] for name, points in mine["points"].items()}  # unfinished
        assert left({"points": tenth}) == {}
        assert left({"points": tenth | {"critic/value_mean": [0.0] * 5}}).keys() == {"critic/value_mean"}
        far = [x + 1.5 for x in tenth["actor/approx_kl"]]  # 4.5 times as much
        assert left({"points": tenth | {"actor/approx_kl": far}}) == {"actor/approx_kl": 0}


def test_a_healthy_run_is_inside_of_the_band_of_other_runs():
    for i, mine in enumerate(RUNS):
        assert left(mine, RUNS[:i] + RUNS[i + 1 :]) == {}


def test_a_healthy_run_with_another_seed_is_inside(capsys):
    references, others = compare.healthy_runs("default")
    assert references == RUNS and len(others) >= 5
    compare.check("default")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(references) + len(others) and all(line.endswith(": inside") for line in lines)


def test_errors_counts_draws_in_which_a_run_is_outside_of_the_band_of_others():
    points = RUNS[0]["points"]
    other = {"points": points | {"critic/value_mean": [x + 5 for x in points["critic/value_mean"]]}}
    count = compare.errors([*RUNS, other], 5, draws=120)  # All other runs are references.
    assert count.keys() == {"critic/value_mean"} and 10 < count["critic/value_mean"] < 30  # a sixth of the draws
    assert compare.errors(RUNS, 4, draws=20) == {}


def test_a_run_that_is_being_written_is_compared(tmp_path, monkeypatch, capsys):
    """The last line of metrics.jsonl may be torn."""
    monkeypatch.setattr(compare, "draw", lambda *_: None)
    args = RUNS[0]["args"] | {"model": None, "critic_model": None, "reward_model": None}
    (tmp_path / "config.json").write_text(json.dumps({"args": args, "argv": ["ppo_llm.py"]}))
    row = json.dumps({"objective/reward": 0.1})
    (tmp_path / "metrics.jsonl").write_text(20 * (row + "\n") + row[:-5])
    assert not compare.main(str(tmp_path))
    said = capsys.readouterr().out
    assert f"20 of {args['num_iterations']} iterations" in said and said.endswith("outside\n")
    compare.main(str(tmp_path), "default")
    capsys.readouterr()
    tasks = ", ".join(sorted({run["task"] for run in LINES if "other seeds" not in run["task"]}))
    for command in lambda task: compare.main(str(tmp_path), task), compare.check, compare.print_errors:
        with pytest.raises(SystemExit, match=f"no reference runs of the task 'defualt': must be one of {tasks}"):
            command("defualt")
    (tmp_path / "config.json").unlink()
    with pytest.raises(SystemExit, match="is no run folder"):
        compare.main(str(tmp_path))


def test_metrics_of_which_two_runs_differ(tmp_path, capsys):
    def write(name, *rows):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"args": {"seed": 1}, "argv": ["ppo_llm.py"]}))
        lines = [json.dumps({"iteration": i, "time/iteration": random.random()} | row) for i, row in enumerate(rows)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return str(tmp_path / name)

    row = {"x": 1.0, "y": 1.0, "text": "a", "small": 1e-6, "nan": None, "ratio/steps": [{"kl": 0.5, "skipped": False}]}
    a = write("a", row, row)
    rounded = row | {"y": 1.0009, "small": 1e-5, "new": 3.0, "ratio/steps": [{"kl": 0.5004, "skipped": False}]}
    b = write("b", row | {"new": 3.0}, rounded)
    assert not compare.print_differences(a, b)
    assert capsys.readouterr().out == f"only {b} has new\n0 of 8 metrics differ in 2 iterations\n"
    c = write("c", row, {name: x for name, x in row.items() if name != "x"})  # A NaN is not in the file.
    assert compare.print_differences(a, c) and "| x | 2 | 1.0 | None |" in capsys.readouterr().out
    steps = {"ratio/steps": [{"kl": 0.6, "skipped": False}]}
    for name, change in {
        "x": {"x": math.inf}, "y": {"y": 1.0011}, "text": {"text": "b"}, "small": {"small": 1.2e-5},
        "nan": {"nan": 0.0}, "each step: kl": steps,
    }.items():  # fmt: skip
        assert compare.print_differences(a, write(name, row, row | change))
        said = capsys.readouterr().out
        assert f"\n| {name} | 2 | " in said and said.count("\n| ") == 1 and "\n1 of 7 metrics differ" in said
    assert compare.print_differences(a, write("short", row))
    assert f"{a} has 2 iterations" in capsys.readouterr().out
    assert compare.print_differences(write("empty"), write("empty too"))  # There is nothing to compare.
    with pytest.raises(SystemExit, match="is no run folder"):
        compare.print_differences(a, str(tmp_path))


def test_small_numbers_late_in_a_run_say_nothing():
    points, late = RUNS[0]["points"], 33
    still = {"actor/approx_kl": math.log(1e-7), "actor/clipfrac": 0.0}  # the policy does not move
    for name, smallest in still.items():
        settled = points | {name: points[name][:late] + [smallest] * (len(points[name]) - late)}
        assert left({"points": settled}) == {}
        early = points | {name: [smallest] * len(points[name])}
        assert left({"points": early}) == {name: 0}


def test_a_run_that_forgets_is_outside():
    points, late = RUNS[0]["points"], 33
    for name, change in {
        "objective/reward": -0.2, "objective/accuracy": -0.25, "objective/entropy": 0.4, "actor/clipfrac": 0.06,
        "actor/approx_kl": 4.0, "objective/kl": 4.0, "objective/response_tokens": 0.5,
    }.items():  # fmt: skip
        changed = points[name][:late] + [x + change for x in points[name][late:]]
        assert left({"points": points | {name: changed}}) == {name: late}, name


def test_case_histories_are_outside_within_fifteen_iterations():
    """The curves of data/cases.json are means of five iterations, as the points are, but never geometric ones."""
    import cases

    columns = {name: column for name, column in cases.METRICS.items()
               if name in compare.METRICS and name not in compare.LOGARITHMIC}  # fmt: skip
    assert compare.iterations_of_a_point(RUNS[0]["args"]) == cases.MEAN_OF
    references = [{"points": {name: run["points"][name] for name in columns}} for run in RUNS]
    sick = 0
    for key, run in json.loads(cases.RESULTS.read_text()).items():
        mine = {"points": {name: run["columns"][column] for name, column in columns.items()}}
        found = compare.compare(mine, references, columns)
        first = compare.first_outside(found)
        if key.startswith("python ppo_llm.py ;"):
            assert first is None, (key, first)
        else:
            sick += 1
            assert first and first[1] < 3, (key, first)
    assert sick >= 10
