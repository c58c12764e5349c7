"""The patches that put models on other ranks, or on the host: what moves, and that the numbers stay the same."""
# ruff: noqa: F811

import dataclasses
import functools
import importlib.util
import json
import sys
import types

import pytest
import torch
from conftest import ROOT
from distributed_worker import run_on_ranks
from test_distributed import ONE, RUN, finish, flags_of, launch, same_run, saw, start  # noqa: F401
from test_forks import patched_script
from test_reward_model import classifier
from test_train import assert_same_metrics, lines

import ppo_llm

CRITIC = RUN | dict(kl_loss=None)  # the KL is in the rewards, which the ranks of the critic need, too
AHEAD = CRITIC | dict(eval_every=0, save_every=0, actor_lr=1e-2)
STILL = dict(num_iterations=1, save_every=0, actor_lr=1e-12)  # the ratio does not move


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """patched(patch): the script with the patch, as a module."""

    @functools.cache
    def get(patch):
        spec = importlib.util.spec_from_file_location(patch, patched_script(patch, tmp_path_factory.mktemp(patch)))
        sys.modules[patch] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[patch])
        return sys.modules[patch]

    return get


def placed(folder, name, ranks):
    """Names of the models on each rank."""
    of_ranks = [seen["models"].items() for seen in saw(folder, name, ranks)]
    return [" ".join(sorted(name for name, (kind, _) in models if kind != "NoneType")) for models in of_ranks]


def assert_diagnosed(folder):
    """Although some ranks have no actor, others no sampler, or a part of it."""
    [row] = lines(folder / "still")
    assert row["ratio/diagnosis"] == "lr_or_clip_too_small" and 0 < row["ratio/relative_update"] < 1e-10


def sample_late(monkeypatch):
    """In ppo_llm the sampler now gets weights one iteration late, and the loss is weighed for that."""
    copy_model, make_experience = ppo_llm.copy_model, ppo_llm.make_experience
    handed = []  # weights of the actor, from the first

    def make(model, args, sampler=False):
        if sampler:
            handed.append([p.detach().clone() for p in model.parameters()])
        return copy_model(model, args, sampler)

    def update_sampler(actor, sampler):
        handed.append([p.detach().clone() for p in actor.parameters()])
        for p, older in zip(sampler.parameters(), handed[-2]):
            p.data.copy_(older)
        before, after = (torch.cat([x.flatten() for x in weights]) for weights in handed[-2:])
        return float((after - before).norm() / after.norm())

    def weighed(*args):
        e = make_experience(*args)
        weights = (e.old_logprobs - e.sampler_logprobs).exp()
        assert len(handed) != 2 or weights.max() > 2  # the weights matter, and so does their limit
        return dataclasses.replace(e, advantages=e.advantages * weights.clamp(max=2))

    for name, changed in dict(copy_model=make, update_sampler=update_sampler, make_experience=weighed).items():
        monkeypatch.setattr(ppo_llm, name, changed)


@pytest.mark.parametrize("patch", ["cpu_adam", "critic_ranks", "rollout_ranks"])
def test_one_rank_of_a_cpu_has_the_numbers_of_the_script(patch, patched, launch):
    ours, plain = (launch(ppo, 1, ("run", CRITIC, None)) for ppo in (patched(patch), ppo_llm))
    same_run(ours / "run", plain / "run")


@pytest.mark.slow
@pytest.mark.parametrize("patch", ["sao", "bpco", "sampler_correction"])
def test_two_ranks_have_the_numbers_of_one_and_bfloat16_trains(patch, patched, launch):
    run, half = ({name: x for name, x in flags.items() if name != "gae_lambda"} for flags in (RUN, ONE))
    plan = ("run", run, None), ("half", half | dict(dtype="bfloat16"), None)
    alone, two = (launch(patched(patch), ranks, *plan) for ranks in (1, 2))
    same_run(two / "run", alone / "run")
    assert lines(two / "half")[0]["actor/grad_norm"] > 0 and "ratio/diagnosis" not in lines(two / "half")[0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_actor_and_critic_apart_have_the_numbers_of_one_process(ranks, patched, launch):
    alone = launch(ppo_llm, 1, ("run", CRITIC, None)) / "run"
    run = CRITIC | dict(critic_ranks=ranks // 2)
    resumed = run | dict(resume="run/checkpoints/iter_000002")
    plan = ("run", run, None), ("resumed", resumed, None), ("still", run | STILL, None)
    folder = launch(patched("critic_ranks"), ranks, *plan)
    same_run(folder / "run", alone)
    same_run(folder / "resumed", alone, after=2)
    assert_diagnosed(folder)
    assert placed(folder, "run", ranks)[:: ranks - 1] == ["actor reference sampler", "critic sampler"]


@pytest.mark.slow
def test_samplers_without_an_actor_get_the_buffers_of_other_families(patched, launch):
    """any_model.patch has rotary frequencies in buffers, which no checkpoint contains."""
    alone = launch(patched("any_model"), 1, ("run", CRITIC, None)) / "run"
    folder = launch(patched("any_model,critic_ranks"), 2, ("run", CRITIC | dict(critic_ranks=1), None))
    same_run(folder / "run", alone)  # with the critic, which another rank than 0 exports


ROUNDED = """
def set_scores(episodes, reward_model, args, original=set_scores, forward=forward_all):
    global forward_all
    forward_all = lambda *args: forward(*args) + 1e-3 * RANK
    original(episodes, reward_model, args)
    forward_all = forward
"""


@pytest.mark.slow
def test_ranks_of_actor_and_critic_have_the_same_scores_of_a_reward_model(tmp_path):
    """Teams of different sizes round differently. Here their scores differ by more than rounding."""
    script = patched_script("critic_ranks", tmp_path)
    script.write_text(script.read_text() + ROUNDED)
    flags = CRITIC | dict(critic_ranks=1, num_iterations=1, reward_model=classifier(tmp_path / "classifier"))
    run_on_ranks(types.SimpleNamespace(__file__=script), tmp_path, 2, ("run", flags, None))  # raises if they differ


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "players"), [(2, 1), (3, 1), (3, 2)])
def test_rollout_ranks_sample_one_iteration_ahead(ranks, players, patched, launch, monkeypatch):
    flags = AHEAD | dict(rollout_ranks=players)
    saved = flags | dict(num_iterations=4, save_every=2, eval_every=1)
    folder = launch(
        patched("rollout_ranks"), ranks, ("run", flags, None), ("saved", saved, None), ("still", flags | STILL, None),
        ("resumed", saved | dict(resume="saved/checkpoints/iter_000002"), None),
        ("stopped", saved | dict(save_every=9), {"signal": 0}))  # fmt: skip
    sample_late(monkeypatch)
    assert_same_metrics(lines(folder / "run"), lines(launch(ppo_llm, 1, ("late", AHEAD, None)) / "late"))
    same_run(folder / "resumed", folder / "saved", after=2)
    evaluated = [row["eval/reward"] for row in lines(folder / "saved") if "eval/reward" in row]
    assert len(evaluated) == 4
    assert_diagnosed(folder)
    row = {"ratio/diagnosis": None} | lines(folder / "run")[1]  # The sampler is late by design: no warning.
    assert row["debug/sampler_trainer_logprob_diff"] > 1e-2
    module, experience = patched("rollout_ranks"), types.SimpleNamespace(values=torch.zeros(1))
    assert not [*module.find_mistakes(row, experience, True, module.Args(**flags))]
    assert [seen["code"] for seen in saw(folder, "stopped", ranks)] == [143] * ranks
    assert [path.name for path in (folder / "stopped" / "checkpoints").iterdir()] == ["iter_000003"]
    assert placed(folder, "run", ranks)[-2:] == ["actor critic reference" if players == 1 else "sampler", "sampler"]


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="is for the CPU build of PyTorch, and needs g++")
def test_cpu_adam_updates_on_the_host_of_a_simulated_gpu(patched, tmp_path):
    for ppo, on_device in ((ppo_llm, True), (patched("cpu_adam"), False)):
        flags = flags_of(**ONE | dict(device="cuda", dtype="float32", compile="off", run_name=ppo.__name__))
        command = [sys.executable, "-W", "ignore", ROOT / "tests/simulated_cuda.py", "report", ppo.__file__]
        code, output = finish(start([*map(str, command), json.dumps(flags)], tmp_path), timeout=240)
        assert code == 0, output
        [report] = json.loads((tmp_path / "report.0.json").read_text())  # of calls on the device
        assert ("aten::_fused_adamw_" in report["calls"]) == on_device
    same_run(tmp_path / "cpu_adam", tmp_path / "ppo_llm")
