"""The patches in tests/forks/: each applies to ppo_llm.py, runs two iterations, and does what it says."""

import collections
import functools
import importlib.util
import json
import re
import subprocess
import sys
import types

import pytest
import safetensors.torch
import torch
from conftest import ROOT
from test_bad_input import model_folder
from test_cuda import FLOAT, simulate, simulated
from test_distributed import finish, flags_of, start, torchrun
from test_train import assert_same_metrics, lines, without_clock

import ppo_llm

FORKS = sorted((ROOT / "tests" / "forks").glob("*.patch"))
FLAGS = dict(num_iterations=2, rollout_batch_size=16, n_samples_per_prompt=2, train_batch_size=16, sft_steps=30,
             eval_episodes=8, save_every=1, run_name="run")  # fmt: skip
RECORDED = ("build_models", "play", "make_experience", "minibatches")


def patched_script(patch, folder):
    (folder / "ppo_llm.py").write_bytes((ROOT / "ppo_llm.py").read_bytes())
    subprocess.run(["git", "apply", ROOT / "tests" / "forks" / f"{patch}.patch"], cwd=folder, check=True)
    return folder / "ppo_llm.py"


def recorded(function, calls):
    """The function, which appends (arguments, result) to `calls`."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        calls.append((args, function(*args, **kwargs)))
        return calls[-1][1]

    return call


def run(patch, folder, **flags):
    """(module, rows of metrics.jsonl, run folder) of the patched script; module.calls has those of some functions."""
    spec = importlib.util.spec_from_file_location("ppo_llm", patched_script(patch, folder))
    ppo = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "ppo_llm", ppo)
        spec.loader.exec_module(ppo)
        ppo.calls = collections.defaultdict(list)
        for owner, name in ((torch.Tensor, "backward"), *((ppo, name) for name in RECORDED)):
            patched.setattr(owner, name, recorded(getattr(owner, name), ppo.calls[name]))
        summary = ppo.train(ppo.Args(log_dir=str(folder), **FLAGS | flags))
    assert summary["status"] == "completed" and summary["iterations"] == (FLAGS | flags)["num_iterations"]
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return ppo, rows, folder / "run"


def test_all_forks_are_tested_and_say_what_they_do():
    assert [path.stem for path in FORKS] == (
        "adaptive_lambda annealed_entropy best_and_worst cpu_adam critic_ranks frozen_blocks group_normalised "
        "joint_loss length_penalty lora replay rollout_ranks tensor_parallel_sampler").split()  # fmt: skip
    for path in FORKS:
        head, _, _ = path.read_text().partition("\n\ndiff --git a/ppo_llm.py b/ppo_llm.py\n")
        assert 40 < len(head) < 1500 and head.endswith(".")


def losses(ppo):
    """Of all backward passes; the microbatches of these tests are minibatches."""
    return [float(loss.detach()) for (loss, *_), _ in ppo.calls["backward"]]


def weights(folder, iteration, model="actor", kind="weights"):
    return safetensors.torch.load_file(next((folder / f"checkpoints/iter_{iteration:06d}/{model}/{kind}").iterdir()))


def changed_names(folder, model="actor"):
    first, second = (weights(folder, iteration, model) for iteration in (1, 2))
    return {name for name in first if not torch.equal(first[name], second[name])}


def test_length_penalty(tmp_path):
    _, rows, _ = run("length_penalty", tmp_path, env_id="environments:Constant-v0")
    for row in rows:
        expected = 1 - 0.02 * row["objective/response_tokens"]
        assert row["objective/reward"] == pytest.approx(expected, abs=1e-5)


def test_adaptive_lambda(tmp_path):
    """Every sample has the advantages that a run with its lambda for all samples would give it."""
    ppo, rows, _ = run("adaptive_lambda", tmp_path, env_id="environments:Lengths-v0", lambda_alpha=0.5, kl_coef=0.0,
                       sft_steps=0, max_prompt_tokens=48, max_new_tokens=12)  # fmt: skip
    _, experience = ppo.calls["make_experience"][1]
    lengths = experience.cpu_mask.sum(1)
    assert experience.values.any() and len(set(lengths.tolist())) > 2
    rewards = torch.zeros_like(experience.values)
    rewards[torch.arange(len(experience)), experience.lengths - 1] = experience.sample_rewards
    raw = torch.zeros_like(rewards)
    for i, n in enumerate(lengths.tolist()):
        one = slice(i, i + 1)
        raw[one], _ = ppo.compute_gae(rewards[one], experience.values[one], experience.cpu_mask[one], 1.0,
                                      max(0.0, 1 - 1 / (0.5 * n)))  # fmt: skip
    assert torch.allclose(experience.advantages, ppo.masked_whiten(raw, experience.cpu_mask), atol=1e-5)
    mean = float(lengths.float().mean())
    assert rows[1]["critic/last_reward_weight"] == pytest.approx(max(0.0, 1 - 1 / (0.5 * mean)) ** (mean - 1), rel=1e-3)


def assert_no_critic(ppo, folder):
    (_, (_, models)), = ppo.calls["build_models"]  # fmt: skip
    assert models[1] is None
    assert not (folder / "checkpoints" / "iter_000002" / "critic").exists()
    assert ppo.validate(ppo.Args()).critic_steps_total == 0


def test_group_normalised(tmp_path):
    ppo, rows, folder = run("group_normalised", tmp_path)
    assert ppo.Args().n_samples_per_prompt == 4
    assert_no_critic(ppo, folder)
    assert all("losses/value_loss" not in row for row in rows)
    assert any(row["ratio/adv_raw_std"] > 0 and row["grad/actor_norm"] > 0 for row in rows)
    for _, experience in ppo.calls["make_experience"]:
        rewards = (experience.sample_rewards - 0.02 * experience.kls).view(16, 2)
        expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        torch.testing.assert_close(experience.advantages, expected.view(32, 1) * experience.mask, atol=1e-3, rtol=0)


def test_group_normalised_learns_nothing_from_equal_rewards(tmp_path):
    """The mean of equal numbers may differ from them by rounding."""
    kwargs = dict(env_id="environments:Constant-v0", env_kwargs='{"reward": 0.6}', kl_coef=0.0)
    ppo, _, _ = run("group_normalised", tmp_path, n_samples_per_prompt=8, **kwargs)
    assert not any(experience.advantages.any() for _, experience in ppo.calls["make_experience"])


def test_best_and_worst(tmp_path):
    ppo, rows, folder = run("best_and_worst", tmp_path, n_samples_per_prompt=4)
    assert [(row["charts/episodes"], row["charts/actor_steps"]) for row in rows] == [(32, 4), (64, 8)]
    texts, env = lines(folder, "completions"), ppo.SortDigits()  # worst, best, worst, best, in each iteration
    for row in texts:
        env.answer = "".join(sorted(row["prompt"][:-1]))
        assert env.step(row["response"])[1] == pytest.approx(row["reward"])
    for worst, best in zip(texts[::2], texts[1::2], strict=True):
        assert worst["prompt"] == best["prompt"] and worst["reward"] <= best["reward"]
    played = [batch.rewards.sum(1).view(16, 4) for _, batch in ppo.calls["play"] if len(batch.lengths) == 64]
    trained = [batch.rewards.sum(1).view(16, 2) for (batch, *_), _ in ppo.calls["make_experience"]]
    for every, two in zip(played, trained, strict=True):
        assert torch.equal(two, torch.stack((every.amin(1), every.amax(1)), dim=1))


def test_frozen_blocks_stay_and_are_saved_resumed_and_exported(tmp_path):
    flags = dict(sft_steps=0, missing_eos_penalty=1.0)
    _, rows, folder = run("frozen_blocks", tmp_path, **flags)
    names = weights(folder, 1).keys()
    assert names - changed_names(folder) == {name for name in names if "layers.0" in name or "embed" in name}
    assert safetensors.torch.load_file(folder / "model" / "model.safetensors").keys() == names
    resumed = run("frozen_blocks", tmp_path, num_iterations=3, resume="auto", **flags)[1]
    assert [row["iteration"] for row in resumed] == [0, 1, 2] and resumed[:2] == rows


def test_annealed_entropy(tmp_path):
    ppo, rows, _ = run("annealed_entropy", tmp_path, sft_steps=0)
    assert [row["losses/entropy_coef"] for row in rows] == pytest.approx([0.01, 0.005])
    expected = [step["policy_loss"] - coef * step["entropy"] for row, coef in zip(rows, (0.01, 0.005), strict=True)
                for step in row["ratio/steps"]]  # fmt: skip
    assert losses(ppo)[4:8] + losses(ppo)[12:] == pytest.approx(expected, abs=1e-5)  # others are of the critic


def test_replay(tmp_path):
    ppo, rows, _ = run("replay", tmp_path)
    assert [len(row["ratio/steps"]) for row in rows] == [4, 8]
    assert rows[0]["ratio/first_dev"] < 1e-5
    first, second = (experience for _, experience in ppo.calls["make_experience"])
    trained = [experience for (experience, *_), _ in ppo.calls["minibatches"]]  # by critic and actor
    assert [id(experience) for experience in trained] == [id(e) for e in (first, first, second, first, second, first)]
    assert rows[1]["ratio/first_dev"] < 1e-5 < max(step["dev_max"] for step in rows[1]["ratio/steps"][4:])
    lrs = [step["lr"] for row in rows for step in row["ratio/steps"]]
    assert lrs == pytest.approx([5e-4 * (1 - 0.95 * step / 16) for step in range(12)])


def test_joint_loss(tmp_path, monkeypatch):
    ppo, rows, folder = run("joint_loss", tmp_path)
    assert_no_critic(ppo, folder)
    assert all(row["ratio/first_dev"] < 1e-5 and row["losses/value_loss"] > 0 for row in rows)
    expected = [step["policy_loss"] + 0.5 * step["value_loss"] for row in rows for step in row["ratio/steps"]]
    assert losses(ppo)[-8:] == pytest.approx(expected, abs=1e-5)
    values = [experience.values.abs().max() for _, experience in ppo.calls["make_experience"]]
    assert values[0] == 0 and values[1] > 0 and "score.weight" in changed_names(folder)
    monkeypatch.setitem(sys.modules, "ppo_llm", ppo)
    plain = model_folder(ppo_llm, tmp_path / "plain")
    with pytest.raises(ppo.UserError, match=r"score\.weight is missing"):
        ppo.build_reward_model(ppo.Args(reward_model=str(plain)), ppo.World(torch.device("cpu")))
    with pytest.raises(ppo.UserError, match="bootstrap-truncated"):
        ppo.train(ppo.Args(bootstrap_truncated=True))


def test_lora_is_exported_merged_and_resumed(tmp_path):
    flags = dict(missing_eos_penalty=1.0, lora_rank=4, lora_alpha=12.0)
    ppo, rows, folder = run("lora", tmp_path, **flags)
    saved = weights(folder, 2)
    adapters = {name for name in saved if "lora" in name}
    assert len(adapters) == 2 * 7 * 2 and changed_names(folder) == weights(folder, 2, kind="exp_avg").keys() == adapters
    trained = {*adapters, "score.weight"}
    assert changed_names(folder, "critic") == weights(folder, 2, "critic", kind="exp_avg").keys() == trained
    exported = safetensors.torch.load_file(folder / "model" / "model.safetensors")
    assert exported.keys() == saved.keys() - adapters
    name = "model.layers.0.mlp.down_proj."
    merged = saved[f"{name}weight"] + 3 * saved[f"{name}lora_B"] @ saved[f"{name}lora_A"]
    torch.testing.assert_close(exported[f"{name}weight"], merged)
    assert not torch.equal(exported[f"{name}weight"], saved[f"{name}weight"])
    again, _ = ppo.load_hf_checkpoint(folder / "model")  # with new adapters
    new = dict(again.named_parameters())
    assert torch.equal(new[f"{name}weight"], exported[f"{name}weight"])
    assert new[f"{name}lora_A"].std().item() == pytest.approx(0.02, rel=0.2) and not new[f"{name}lora_B"].any()
    sampler = ppo.calls["build_models"][0][1][1][3]  # what was trained, in adapters
    tokens = ppo.calls["play"][-1][1].tokens
    with torch.no_grad():
        torch.testing.assert_close(again(tokens), sampler(tokens))

    resumed = run("lora", tmp_path, **flags | dict(num_iterations=3, resume="auto"))[1]
    assert [row["iteration"] for row in resumed] == [0, 1, 2] and resumed[:2] == rows


def test_cpu_adam_changes_no_number_on_the_cpu(tmp_path):
    flags = FLAGS | dict(sft_steps=1, kl_coef=0.1, ref_sync_every=1)
    _, _, folder = run("cpu_adam", tmp_path, **flags)
    ppo_llm.train(ppo_llm.Args(**flags | dict(run_name="unpatched", log_dir=str(tmp_path))))
    assert without_clock(lines(folder)) == without_clock(lines(tmp_path / "unpatched"))


@pytest.mark.slow
@simulated
@pytest.mark.parametrize("ranks", [None, 2])
def test_cpu_adam_updates_on_the_host_of_a_simulated_gpu(tmp_path, ranks):
    script = types.SimpleNamespace(__file__=patched_script("cpu_adam", tmp_path))
    whole = FLOAT | dict(num_iterations=1 if ranks else 2, save_every=1)
    resumed = whole | dict(run_name="resumed", resume="float/checkpoints/iter_000001")
    for _, calls in simulate(script, tmp_path, [whole] if ranks else [whole, resumed], ranks):
        assert calls["optimizer_step"] > 0 and "aten::_fused_adamw_" not in calls  # only calls on the GPU are counted
    ppo_llm.train(ppo_llm.Args(**whole | dict(device="cpu", log_dir=str(tmp_path), run_name="cpu")))
    assert_same_metrics(lines(tmp_path / "float"), lines(tmp_path / "cpu"), 1e-4)
    if not ranks:
        assert without_clock(lines(tmp_path / "float")[1:]) == without_clock(lines(tmp_path / "resumed"))
        for model, kind in (("actor", "weights"), ("critic", "exp_avg_sq"), ("reference", "weights")):
            first, second = (weights(tmp_path / name, 2, model, kind) for name in ("float", "resumed"))
            assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


WORKER = """
import os
import environments
import gymnasium
import ppo_llm

class Counted(environments.TwoTurns):
    def turn(self, response):
        os.write(1, f"rank {os.environ['RANK']} asked\\n".encode())
        return super().turn(response)

def build(*args):
    tokenizer, models = build_models(*args)
    elements = sum(ppo_llm.local_tensor(p).numel() for p in models[3].model.layers.parameters() if p.ndim == 2)
    os.write(1, f"sampler of {elements} elements\\n".encode())
    return tokenizer, models

gymnasium.register("Counted-v0", entry_point=Counted)
build_models, ppo_llm.build_models = ppo_llm.build_models, build
ppo_llm.main()
"""


@pytest.mark.slow
def test_ranks_that_share_a_sampler_give_the_samples_and_numbers_of_whole_ones(tmp_path):
    patched_script("tensor_parallel_sampler", tmp_path)
    (tmp_path / "worker.py").write_text(WORKER)
    asked, sizes = {}, {}
    for ranks in "12":
        flags = flags_of(run_name=ranks, sampler_ranks=ranks, env_id="Counted-v0", kl_coef=0.1)
        code, output = finish(start(torchrun(2, tmp_path / "worker.py", *flags), tmp_path), timeout=120)
        assert code == 0, output
        asked[ranks] = re.findall(r"rank (\d) asked", output)
        sizes[ranks] = {int(n) for n in re.findall(r"sampler of (\d+) elements", output)}
    texts = [[row["response"] for row in lines(tmp_path / ranks, "completions")] for ranks in "12"]
    assert texts[0] == texts[1] and len(set(texts[0])) > 2
    assert_same_metrics(lines(tmp_path / "1"), lines(tmp_path / "2"))
    assert set(asked["1"]) == {"0", "1"} and set(asked["2"]) == {"0"} and len(asked["1"]) == len(asked["2"])
    assert len(sizes["1"]) == 1 and sizes["1"] == {2 * n for n in sizes["2"]}
