"""Several ranks: the same numbers as one process, however rows, models and failures are spread over them.

Ranks are processes of torchrun on the CPU. One launch serves many tests: see distributed_worker.py.
"""

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import distributed_worker
import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

RUN = dict(
    num_iterations=3, rollout_batch_size=64, train_batch_size=32, eval_episodes=32, sft_steps=5, sft_batch_size=64,
    kl_coef=0.05, kl_target=0.1, ref_sync_every=2, entropy_coef=0.01, n_samples_per_prompt=2, bootstrap_truncated=True,
    missing_eos_penalty=0.1, micro_batch_tokens=200, log_completions=128, save_every=2,
)  # fmt: skip
SHORT = RUN | dict(num_iterations=1, eval_episodes=2, sft_steps=1, sft_batch_size=16)
UPDATE = dict(rollout_batch_size=8, n_samples_per_prompt=2, train_batch_size=16, ppo_epochs=1, entropy_coef=0.1)
UNEQUAL = UPDATE | dict(long=2, unfair=True)  # all samples of rank 0 have one token, all of rank 1 have 24
FEW_ROWS = UPDATE | dict(rollout_batch_size=4, n_samples_per_prompt=1, train_batch_size=1, long=2)
HUGE_ROW = UPDATE | dict(rollout_batch_size=6, n_samples_per_prompt=1, train_batch_size=6, huge=2, micro_batch_tokens=1)
NAN = UPDATE | dict(long=2, train_batch_size=8)
BAD_COMMANDS = {
    "--critic-ranks 2: must leave a rank for the actor": ["--critic-ranks=2"],
    "--rollout-batch-size 1: must be at least 1 for each of 2 ranks": ["--rollout-batch-size=1"],
    "--fsdp-shard-size 3: must divide": ["--fsdp-shard-size=3"],
    "--learning-rate": ["--learning-rate=0.1"],
    "environment Raises-v0, sample 0": ["--env-id=environments:Raises-v0", "--sft-steps=0", "--eval-episodes=4"],
}


# --- Launching


def torchrun(ranks, *command):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *command]


def environment():
    """For torchrun and its ranks: where tests and scripts are, one thread each."""
    tests = Path(__file__).parent
    return os.environ | {"PYTHONPATH": f"{tests}:{tests.parent}", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def descendants(pid):
    """{pid: its parent's} of the processes below `pid`."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, last = {}, {pid}
    while last := {child for child, parent in parents.items() if parent in last}:
        found |= {child: parents[child] for child in last}
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def finish(process, timeout):
    """Exit code and output of a process started by `start`; one that hangs is ended with its ranks, and fails."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        for pid in [*descendants(process.pid), process.pid]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"hangs after {timeout} s:\n{output[-3000:]}")
    return process.returncode, output


def start(command, folder, **extra):
    return subprocess.Popen(
        command, cwd=folder, env=environment() | extra, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


class Launch:
    """A plan of distributed_worker.py, run by torchrun: launch[name] is what the ranks saw, launch.output all text."""

    def __init__(self, ppo, folder, ranks, plan, timeout):
        self.folder, self.ranks = folder, ranks
        (folder / "plan.json").write_text(json.dumps(plan))
        command = torchrun(ranks, distributed_worker.__file__, ppo.__file__, str(folder))
        code, self.output = finish(start(command, folder), timeout)
        assert code == 0, self.output  # all of it: the first rank to fail says why somewhere before the end

    def __getitem__(self, name):
        return [torch.load(self.folder / f"{name}.{rank}.pt", weights_only=False) for rank in range(self.ranks)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """cache(key, make) is make(folder), once a module; a failure is kept too."""
    results = {}

    def get(key, make):
        if key not in results:
            try:
                results[key] = make(tmp_path_factory.mktemp("distributed")), None
            except (Exception, pytest.fail.Exception) as error:
                results[key] = None, error
        result, error = results[key]
        if error:
            raise error
        return result

    return get


@pytest.fixture
def alone(ppo, cache):
    """alone(name, check, flags): a check of distributed_worker.py in this one process; alone.folder has its files."""

    def get(name, check, flags):
        make = lambda folder: (folder, getattr(distributed_worker, check)(ppo, folder, name, flags))
        get.folder, result = cache((ppo.__name__, name), make)
        return result

    return get


@pytest.fixture
def one(alone):
    """The whole run in one process: (folder, what was seen)."""
    seen = alone("run", "whole_run", RUN)
    return alone.folder / "run", seen


@pytest.fixture
def target(alone):
    """A --target-kl that ends SHORT's actor steps midway, and how many are made then."""
    alone("short", "whole_run", SHORT)
    seen = [step["approx_kl"] for step in read(alone.folder / "short", "metrics")[0]["ratio/steps"]]
    for k in range(len(seen) // 2, len(seen)):
        if seen[k] > 1.2 * max(seen[:k]):
            return (seen[k] + max(seen[:k])) / 2, k
    raise AssertionError(f"no step stands out: {seen}")


@pytest.fixture
def two(ppo, cache, target):
    plan = [
        ("unequal_1", "updates", UNEQUAL | dict(micro_batch_tokens=1)),
        ("unequal_70", "updates", UNEQUAL | dict(micro_batch_tokens=70)),
        ("unequal_all", "updates", UNEQUAL | dict(micro_batch_tokens=16384)),
        ("dealt", "updates", UPDATE | dict(long=2, micro_batch_tokens=70)),
        ("recomputed", "updates", UNEQUAL | dict(micro_batch_tokens=70, activation_checkpointing=True)),
        ("few_rows", "updates", FEW_ROWS),
        ("huge_row", "updates", HUGE_ROW),
        ("blank", "blank", {}),
        ("nan_actor", "updates", NAN | dict(nan=dict(head="lm", step=1, rank=1))),
        ("nan_critic", "updates", NAN | dict(nan=dict(head="scalar", step=1, rank=0))),
        ("target", "whole_run", SHORT | dict(target_kl=target[0])),
        ("half", "whole_run", SHORT | dict(num_iterations=2, rollout_batch_size=16, dtype="bfloat16")),
        ("half_parallel", "whole_run", SHORT | dict(rollout_batch_size=16, dtype="bfloat16", critic_ranks=1)),
        ("run", "whole_run", RUN),
        ("parallel", "whole_run", RUN | dict(critic_ranks=1)),
        ("errors", "errors", {"commands": list(BAD_COMMANDS.values())}),
    ]  # fmt: skip
    return cache((ppo.__name__, "two"), lambda folder: Launch(ppo, folder, 2, plan, timeout=240))


@pytest.fixture
def four(ppo, cache):
    plan = [
        ("four", "whole_run", RUN),
        ("mesh", "whole_run", RUN | dict(fsdp_shard_size=2)),
        ("parallel_four", "whole_run", RUN | dict(critic_ranks=2, activation_checkpointing=True)),
    ]
    return cache((ppo.__name__, "four"), lambda folder: Launch(ppo, folder, 4, plan, timeout=400))


def read(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def flat(value, name=""):
    """{name: number or text} of nested lists and dictionaries."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, part in items for k, v in flat(part, f"{name} {key}").items()}
    return {name.strip(): value}


def metrics(folder):
    clocks = ("time/", "perf/", "rollout/", "charts/SPS")
    rows = [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in read(folder, "metrics")]
    return flat(rows)


def farthest(a, b, noise):
    """(largest relative difference of two dictionaries of numbers, its name); below `noise` they are equal."""
    assert a.keys() == b.keys()
    worst = (0.0, "")
    for name, x in a.items():
        if isinstance(x, str):
            assert x == b[name], name
        elif abs(x - b[name]) > noise:
            worst = max(worst, (abs(x - b[name]) / max(abs(x), abs(b[name])), name))
    return worst


def apart(a, b):
    """Largest absolute difference of two dictionaries of tensors, with the tensor's name."""
    assert a.keys() == b.keys()
    return max((float((a[name] - b[name]).abs().max()), name) for name in a)


def checkpoint(folder, iteration, tmp_path):
    """{model: {"weights": ..., "moments": ...}} of a checkpoint, put together from all ranks' files."""
    result = {}
    for part in sorted((folder / "checkpoints" / f"iter_{iteration:06d}").iterdir()):
        if part.is_dir():
            dcp_to_torch_save(part, tmp_path / "whole.pt")
            result[part.name] = torch.load(tmp_path / "whole.pt")
    return result


# --- A run gives the same numbers on any number of ranks


def same_run(folder, expected, tmp_path):
    a, b = read(expected, "completions"), read(folder, "completions")
    assert len(a) == 3 * 128
    for name in ("step", "prompt", "response", "stop", "n_tokens"):
        assert [row[name] for row in a] == [row[name] for row in b], name
    assert [row["reward"] for row in a] == pytest.approx([row["reward"] for row in b], abs=1e-6)
    worst, name = farthest(metrics(expected), metrics(folder), noise=2e-6)
    assert worst < 1e-4, f"{name} differs by {worst:.1e} (relative)"
    load = lambda run: safetensors.torch.load_file(run / "model" / "model.safetensors")
    weights, tensor = apart(load(expected), load(folder))
    assert weights < 1e-4, f"weights differ by {weights:.1e} in {tensor}"
    results = {"metrics": worst, "in": name, "weights": weights}
    before, after = checkpoint(expected, 2, tmp_path), checkpoint(folder, 2, tmp_path)
    assert before.keys() == after.keys() == {"actor", "critic", "reference"}
    for model in before:
        for kind in before[model]:
            ours, theirs = ({k: v for k, v in flat(x[model][kind]).items()} for x in (before, after))
            results[f"{model} {kind}"], tensor = apart(ours, theirs)
            assert results[f"{model} {kind}"] < 1e-5, f"{model}'s {tensor} differs by {results[f'{model} {kind}']:.1e}"
    print({name: value if isinstance(value, str) else float(f"{value:.2g}") for name, value in results.items()})


@pytest.mark.parametrize("name", ["run", "parallel"])
def test_two_ranks_give_the_numbers_of_one_process(one, two, name, tmp_path):
    same_run(two.folder / name, one[0], tmp_path)


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize("name", ["four", "mesh", "parallel_four"])
def test_four_ranks_give_the_numbers_of_one_process(one, four, name, tmp_path):
    same_run(four.folder / name, one[0], tmp_path)


def test_the_run_that_is_compared_moves_everything(one, tmp_path):
    """Else it would be no wonder that all agree."""
    folder, _ = one
    rows, models = read(folder, "metrics"), checkpoint(folder, 2, tmp_path)
    assert len({row["objective/kl_coef"] for row in rows}) == 3 and rows[1]["objective/kl"] > 1e-4
    assert abs(rows[2]["objective/kl"]) < 1e-5  # after the reference has moved
    assert any(step["clipfrac"] > 0 for row in rows for step in row["ratio/steps"])
    assert 0 < rows[0]["objective/truncated"] < 1
    assert float(models["critic"]["weights"]["score.weight"].abs().max()) > 1e-3


# --- One update


@pytest.mark.shared
@pytest.mark.parametrize("part", ["model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.", "score."])
@pytest.mark.parametrize("name", ["unequal_1", "unequal_70", "unequal_all", "dealt", "recomputed"])
def test_gradients_are_those_of_one_process(alone, two, name, part):
    expected = alone("update", "updates", UNEQUAL)["steps"]
    assert [entry[0] for entry in expected] == ["scalar", "lm"]
    assert all(x.abs().max() > 1e-5 for entry in expected for x in entry[3].values())
    for seen in two[name]:
        compare_updates(seen["steps"], expected, part)


def compare_updates(steps, expected, part="", tolerance=1e-5):
    assert [entry[0] for entry in steps] == [entry[0] for entry in expected]
    for (head, stats, rest, gradients), (_, stats_alone, rest_alone, gradients_alone) in zip(
        steps, expected, strict=True
    ):
        assert stats == pytest.approx(stats_alone, rel=tolerance, abs=1e-6) and rest == rest_alone
        assert gradients.keys() == gradients_alone.keys()
        for name, gradient in gradients_alone.items():
            if name.startswith(part):
                off = float((gradients[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-6))
                assert off < tolerance, f"{head} {name} is off by {off:.1e} of its largest entry"


def test_responses_of_the_ranks_are_as_unequal_as_meant(ppo):
    """Rank 0's rows are all of the shortest, rank 1's all of the longest."""
    lengths = torch.tensor([28, 5] * 8)
    for rank, length in ((0, 5), (1, 28)):
        ranks = ppo.Ranks([0, 1], torch.device("cpu"))
        ranks.rank = rank
        groups = distributed_worker.unfair(ppo, None, ranks, torch.arange(16), lengths, 60)
        assert {int(lengths[row]) for group in groups for row in group} == {length}


@pytest.mark.shared
def test_ranks_without_rows_do_not_hang_and_do_not_count(alone, two):
    for name, flags in (("few_rows", FEW_ROWS), ("huge_row", HUGE_ROW)):
        expected, seen = alone(name, "updates", flags), two[name]
        assert expected["empty"] == 0 and sum(rank["empty"] for rank in seen) > 0
        assert seen[0]["calls"] == seen[1]["calls"]  # forwards and backwards, in one order
        assert seen[0]["calls"].count("backward") >= expected["calls"].count("backward") // 2
        for rank in seen:
            compare_updates(rank["steps"], expected["steps"], tolerance=1e-4 if name == "few_rows" else 1e-5)


@pytest.mark.shared
def test_a_blank_microbatch_gives_gradients_of_exactly_zero(alone, two):
    for seen in [alone("blank", "blank", {}), *two["blank"]]:
        assert len(seen) > 30 and all(seen.values()), [name for name, zero in seen.items() if not zero]


@pytest.mark.shared
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(two):
    for name, head in (("nan_actor", "lm"), ("nan_critic", "scalar")):
        for seen in two[name]:
            outcome = [entry[1:] for entry in seen["skipped"] if entry[0] == head]
            assert outcome == [(False, 0, ""), (True, 1, "model.layers.1.mlp.up_proj.weight")]
            assert not any(entry[1] for entry in seen["skipped"] if entry[0] != head)
        row = read(two.folder / name, "metrics")[0]
        skipped = {"lm": row["grad/skipped_actor"], "scalar": row["grad/skipped_critic"]}
        assert skipped.pop(head) == 1 and set(skipped.values()) == {0}
        assert row["charts/actor_steps"] == 2


# --- How rows are dealt out


@pytest.mark.shared
@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("rows", [256, 512])
@pytest.mark.parametrize("budget", [1, 4096, 16384])
def test_ranks_get_equally_many_tokens_and_microbatches(ppo, ranks, rows, budget):
    generator = torch.Generator().manual_seed(ranks * rows)
    lengths = (torch.randn(2 * rows, generator=generator) * 1.0 + 5).exp().long().clamp(2, 4096)
    minibatch = torch.randperm(2 * rows, generator=generator)[:rows]
    shares = []
    for rank in range(ranks):
        team = ppo.Ranks(range(ranks), torch.device("cpu"))
        team.rank = rank
        shares.append(team.microbatches(minibatch, lengths, budget))
    dealt = [row for share in shares for group in share for row in group.tolist()]
    assert sorted(dealt) == sorted(minibatch.tolist())
    assert len({len(share) for share in shares}) == 1
    tokens = [sum(int(lengths[group].sum()) for group in share) for share in shares]
    assert max(tokens) - min(tokens) <= 0.05 * max(tokens)
    for group in (group for share in shares for group in share):
        assert len(group) <= 1 or len(group) * int(lengths[group].max()) <= budget


@pytest.mark.shared
def test_a_team_deals_rows_by_its_own_numbers(ppo):
    """The critic's ranks are the last ones: they do not begin with 0."""
    lengths, dealt = torch.tensor([5, 9, 2, 7]), []
    for rank in (2, 3):
        team = ppo.Ranks([2, 3], torch.device("cpu"))
        team.rank = rank
        dealt += torch.cat(team.microbatches(torch.arange(4), lengths, 100)).tolist()
    assert sorted(dealt) == [0, 1, 2, 3]


# --- Rollout


@pytest.mark.parametrize("name", ["run", "parallel", "half", "half_parallel"])
def test_sampler_holds_the_weights_of_the_sharded_actor_in_place(two, name):
    for rank, seen in enumerate(two[name]):
        samplers = seen["samplers"]
        assert len({tuple(entry["pointers"]) for entry in samplers}) == 1
        assert {dtype for entry in samplers for dtype in entry["dtypes"]} == {
            torch.bfloat16 if "half" in name else torch.float32
        }
        assert {entry["rope"] for entry in samplers} == {torch.float32}
        if rank == 0 or "parallel" not in name:  # who holds the actor can compare
            assert all(entry["equal"] for entry in samplers)
            # Two evaluations and a rollout before the first update, then one for each update, then two evaluations.
            norms = [entry["norm"] for entry in samplers]
            assert len(set(norms[:3])) == 1 and len(set(norms[2:-1])) == len(norms) - 3 and norms[-2] == norms[-1]


@pytest.mark.parametrize("name", ["run", "parallel"])
def test_greedy_samples_are_those_of_an_unsharded_model(two, name):
    seen = two[name][0]["samplers"]
    assert [entry["greedy_equal"] for entry in seen if "greedy_equal" in entry] == [True, True]


@pytest.mark.parametrize("name", ["run", "parallel"])
def test_all_ranks_sample_each_its_own_part(one, two, name):
    whole = one[1]["seeds"]
    parts = [seen["seeds"] for seen in two[name]]
    assert len(whole) == len(parts[0]) == len(parts[1]) == 7
    for (iteration, greedy, seeds, ids), first, second in zip(whole, *parts, strict=True):
        assert first[:2] == second[:2] == (iteration, greedy)
        assert first[2] + second[2] == seeds and first[3] + second[3] == ids
        assert len(first[2]) == len(second[2]) == len(seeds) // 2


# --- Placement


@pytest.mark.shared
def test_critic_and_actor_update_at_the_same_time(ppo, tmp_path):
    flags = RUN | dict(critic_ranks=1, ppo_epochs=6)  # many steps: the critic's very first is 0.1 s late
    launch = Launch(ppo, tmp_path, 2, [("parallel", "whole_run", flags)], timeout=120)
    steps = [[time for _, time in seen["steps"]][-72:] for seen in launch["parallel"]]  # without the warm start
    for i in (0, 24, 48):
        (first, *_, last), (first2, *_, last2) = (times[i : i + 24] for times in steps)
        assert min(last, last2) - max(first, first2) > 0.3 * min(last - first, last2 - first2)
    spent = torch.zeros(2, 5)  # [rank, phase]: rollout, scores, critic, actor, diagnosis
    for row in read(tmp_path / "parallel", "metrics"):
        clocks = torch.tensor(row["time/ranks"])  # [rank, 6]
        assert clocks.shape == (2, 6) and clocks[0, 0] == 0 and (clocks.diff() >= 0).all()
        spent += clocks.diff()
        (_, _, _, begun, done, _), (_, _, begun2, done2, _, _) = clocks.tolist()  # actor's updates, critic's
        assert min(done, done2) - max(begun, begun2) > 0.3 * min(done - begun, done2 - begun2)
    assert spent[0, 2] < 0.2 * spent[0, 3] and spent[1, 3] < 0.2 * spent[1, 2]


@pytest.mark.shared
def test_ranks_shard_the_models_they_update_and_no_others(two):
    assert [seen["heads"] for seen in two["run"]] == [["lm", "scalar", "lm"]] * 2  # actor, critic, reference
    assert [seen["heads"] for seen in two["parallel"]] == [["lm", "lm"], ["scalar"]]


@pytest.mark.shared
def test_ranks_keep_no_whole_model_beside_the_sampler(two):
    assert [seen["models"] for seen in two["run"]] == [[("lm", True), ("scalar", True)]] * 2
    assert [seen["models"] for seen in two["parallel"]] == [[("lm", True)], [("scalar", True)]]


# --- Early stop, half precision


@pytest.mark.shared
def test_target_kl_stops_all_ranks_where_it_stops_one_process(target, two):
    target, step = target
    row = read(two.folder / "target", "metrics")[0]
    assert row["ratio/early_stop"] == 1 and len(row["ratio/steps"]) == row["charts/actor_steps"] == step > 0
    seen = [rank["own_kl"] for rank in two["target"]]
    assert len(seen[0]) == len(seen[1]) == step + 1
    assert any(rank[-1][0] < target < rank[-1][1] for rank in seen)  # by its own tokens, one would have gone on
    assert seen[0][-1][1] == seen[1][-1][1] and all(total < target for _, total in seen[0][:-1])


@pytest.mark.shared
@pytest.mark.parametrize("name", ["half", "half_parallel"])
def test_bfloat16_stays_out_of_weights_moments_reduction_and_values(two, name):
    seen = set().union(*(rank["dtypes"] for rank in two[name]))
    kinds = ["weight", "moment", "gradient", "value head"]
    for kind in kinds if "parallel" in name else [*kinds, "reduced"]:  # teams of one reduce nothing
        assert {dtype for what, dtype in seen if what == kind} == {torch.float32}, kind


# --- Failures


@pytest.mark.shared
@pytest.mark.parametrize("message", BAD_COMMANDS)
def test_a_message_is_printed_once_and_all_ranks_exit(two, message):
    number = list(BAD_COMMANDS).index(message)
    assert [rank[number][0] for rank in two["errors"]] == [2, 2]
    assert two.output.count(message) == 1, [line for line in two.output.splitlines() if message in line]


# Python imports this file at start, if it finds it.
LATE = "import os, time\nif os.environ.get('RANK') == '0':\n    time.sleep(2)\n"


@pytest.mark.shared
def test_message_of_a_first_rank_that_is_late_is_printed(ppo, tmp_path):
    """torchrun ends all ranks at the first that fails."""
    (tmp_path / "sitecustomize.py").write_text(LATE)
    path = {"PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}"}
    code, output = finish(start(torchrun(2, ppo.__file__, "--critic-ranks=2"), tmp_path, **path), timeout=60)
    assert code != 0 and output.count("error: --critic-ranks 2: must") == 1, output


def test_an_environment_that_raises_on_one_rank_ends_all(ppo, tmp_path):
    """Seed 14 is one of the second iteration of 8 prompts, and of the second rank."""
    flags = ["--env-id=distributed_worker:RaisesAtSeed-v0", '--env-kwargs={"bad": 14}', "--run-name=mine"]
    flags += [f"--{name}" for name in ("rollout-batch-size=8", "train-batch-size=8", "sft-steps=0", "eval-episodes=4")]
    code, output = finish(start(torchrun(2, ppo.__file__, *flags), tmp_path), timeout=60)
    message = "with seed 14, prompt 'x=': step() raised RuntimeError: the judge is out of order"
    assert code != 0 and output.count(message) == 1, output
    assert len(read(tmp_path / "runs" / "mine", "metrics")) == 1


@pytest.mark.slow
def test_torchrun_of_the_script_itself(ppo, alone, tmp_path):
    """All else here runs the script's functions in a process group that the tests have made."""
    alone("short", "whole_run", SHORT)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SHORT.items() if value is not True]
    flags += ["--bootstrap-truncated", "--critic-ranks=1", "--run-name=mine", "--resume=auto"]
    for again in (False, True):
        code, output = finish(start(torchrun(2, ppo.__file__, *flags), tmp_path), timeout=90)
        assert code == 0 and "Traceback" not in output, output
        assert output.count("runs/mine: finished; ") == again
        assert output.count("accuracy after PPO") == output.count("cpu, torch.float32, 2 ranks") == (not again)
        runs = alone.folder / "short", tmp_path / "runs" / "mine"
        texts = [[row["response"] for row in read(run, "completions")] for run in runs]
        assert texts[0] == texts[1] and len(texts[0]) == 128


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("when", ["rollout", "updates"])
def test_a_killed_rank_ends_the_job(ppo, tmp_path, victim, when):
    flags = {"sft-steps": 0, "eval-episodes": 2, "rollout-batch-size": 4, "train-batch-size": 4, "ppo-epochs": 40,
             "run-name": "mine", "num-iterations": 100000, "compile": "off"}  # fmt: skip
    flags |= {"env-id": "environments:Hangs-v0", "env-timeout": 600} if when == "rollout" else {}
    process = start(torchrun(2, ppo.__file__, *(f"--{name}={value}" for name, value in flags.items())), tmp_path)
    metrics = tmp_path / "runs" / "mine" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and (when == "rollout" or metrics.read_text())):
        assert process.poll() is None and time.monotonic() < deadline, finish(process, 0)
        time.sleep(0.05)
    time.sleep(2.0 if when == "rollout" else 0.5)  # an iteration here is a moment of rollout and seconds of updates
    family, rank = descendants(process.pid), f"\0RANK={victim}\0"
    ranks = [pid for pid, parent in family.items() if parent == process.pid]
    [killed] = [pid for pid in ranks if rank in Path(f"/proc/{pid}/environ").read_bytes().decode()]
    os.kill(killed, signal.SIGKILL)
    code, output = finish(process, timeout=60)
    assert code != 0 and "SIGKILL" in output, output
    assert not [pid for pid in family if alive(pid)]


@pytest.mark.shared
@pytest.mark.parametrize("late", [0, 1, 2])
def test_restarted_processes_meet_each_other_and_none_of_those_before(ppo, monkeypatch, late):
    """torchrun gives them the same store again; whoever comes last, all of a round get a part of it that is empty."""
    shared, mine = torch.distributed.HashStore(), threading.local()
    monkeypatch.setattr(ppo.dist, "rendezvous", lambda url: iter([(shared, mine.rank, 3)]))

    def process(rank):
        mine.rank = rank
        time.sleep(0.2 * (rank == late))
        store, *place = ppo.fresh_store()
        assert place == [rank, 3] and not store.check([f"from {rank}"])
        store.set(f"from {rank}", str(rank))
        return [store.get(f"from {other}") for other in range(3)]  # waits for all of this round

    with concurrent.futures.ThreadPoolExecutor() as pool:
        for _ in range(3):
            assert list(pool.map(process, range(3))) == 3 * [[b"0", b"1", b"2"]]
