"""The patches in tests/forks/: each applies to ppo_llm.py, runs two iterations, and does what it says."""

import importlib.util
import json
import subprocess

import pytest
import safetensors.torch
import torch
from conftest import ROOT
from test_distributed import finish, flags_of, start, torchrun
from test_train import assert_same_metrics, lines

FORKS = sorted((ROOT / "tests" / "forks").glob("*.patch"))
FLAGS = dict(num_iterations=2, rollout_batch_size=16, n_samples_per_prompt=2, train_batch_size=16, sft_steps=30,
             eval_episodes=8, save_every=1, run_name="run")  # fmt: skip


def patched_script(patch, folder):
    (folder / "ppo_llm.py").write_bytes((ROOT / "ppo_llm.py").read_bytes())
    subprocess.run(["git", "apply", ROOT / "tests" / "forks" / f"{patch}.patch"], cwd=folder, check=True)
    return folder / "ppo_llm.py"


def run(patch, folder, **flags):
    """(module, rows of metrics.jsonl, run folder) of the patched script."""
    spec = importlib.util.spec_from_file_location("ppo_llm", patched_script(patch, folder))
    ppo = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(__import__("sys").modules, "ppo_llm", ppo)
        spec.loader.exec_module(ppo)
        summary = ppo.train(ppo.Args(log_dir=str(folder), **FLAGS | flags))
    assert summary["status"] == "completed" and summary["iterations"] == (FLAGS | flags)["num_iterations"]
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return ppo, rows, folder / "run"


def test_all_forks_are_tested_and_say_what_they_do():
    assert [path.stem for path in FORKS] == (
        "annealed_entropy best_and_worst frozen_blocks group_normalised joint_loss length_penalty lora replay "
        "tensor_parallel_sampler").split()  # fmt: skip
    assert all(path.read_text().index("diff --git a/ppo_llm.py b/ppo_llm.py") > 40 for path in FORKS)


def test_length_penalty(tmp_path):
    _, rows, _ = run("length_penalty", tmp_path, env_id="environments:Constant-v0")
    for row in rows:
        expected = 1 - 0.02 * row["objective/response_tokens"]
        assert row["objective/reward"] == pytest.approx(expected, abs=1e-5)


def test_group_normalised(tmp_path):
    ppo, rows, folder = run("group_normalised", tmp_path)
    assert ppo.Args().n_samples_per_prompt == 4
    assert not (folder / "checkpoints" / "iter_000002" / "critic").exists()
    assert all("losses/value_loss" not in row for row in rows)
    assert any(row["ratio/adv_raw_std"] > 0 and row["grad/actor_norm"] > 0 for row in rows)


def test_best_and_worst(tmp_path):
    ppo, rows, folder = run("best_and_worst", tmp_path, n_samples_per_prompt=4, eval_episodes=64)
    assert [(row["charts/episodes"], row["charts/actor_steps"]) for row in rows] == [(32, 4), (64, 8)]
    texts, env = lines(folder, "completions"), ppo.SortDigits()  # worst, best, worst, best, in each iteration
    for row in texts:
        env.answer = "".join(sorted(row["prompt"][:-1]))
        assert env.step(row["response"])[1] == pytest.approx(row["reward"])
    for worst, best in zip(texts[::2], texts[1::2], strict=True):
        assert worst["prompt"] == best["prompt"] and worst["reward"] <= best["reward"]


def test_frozen_blocks_stay_and_are_saved_resumed_and_exported(tmp_path):
    flags = dict(sft_steps=0, missing_eos_penalty=1.0)
    _, rows, folder = run("frozen_blocks", tmp_path, **flags)
    first, second = (safetensors.torch.load_file(next((folder / f"checkpoints/iter_00000{i}/actor/weights").iterdir()))
                     for i in (1, 2))  # fmt: skip
    same = {name for name in first if torch.equal(first[name], second[name])}
    assert same == {name for name in first if "layers.0" in name or "embed" in name}
    assert safetensors.torch.load_file(folder / "model" / "model.safetensors").keys() == first.keys()
    resumed = run("frozen_blocks", tmp_path, num_iterations=3, resume="auto", **flags)[1]
    assert [row["iteration"] for row in resumed] == [0, 1, 2] and resumed[:2] == rows


def test_annealed_entropy(tmp_path):
    _, rows, _ = run("annealed_entropy", tmp_path, sft_steps=0)
    assert [row["losses/entropy_coef"] for row in rows] == pytest.approx([0.01, 0.005])


def test_replay(tmp_path):
    _, rows, _ = run("replay", tmp_path)
    assert [len(row["ratio/steps"]) for row in rows] == [4, 8]
    assert rows[0]["ratio/first_dev"] < 1e-5


def test_joint_loss(tmp_path):
    _, rows, folder = run("joint_loss", tmp_path)
    assert not (folder / "checkpoints" / "iter_000002" / "critic").exists()
    assert all(row["ratio/first_dev"] < 1e-5 and row["losses/value_loss"] > 0 for row in rows)


def test_lora_is_exported_merged_and_resumed(tmp_path):
    _, rows, folder = run("lora", tmp_path, missing_eos_penalty=1.0)
    first, second = (safetensors.torch.load_file(next((folder / f"checkpoints/iter_00000{i}/actor/weights").iterdir()))
                     for i in (1, 2))  # fmt: skip
    changed = {name for name in first if not torch.equal(first[name], second[name])}
    assert changed and all("lora" in name for name in changed)
    exported = safetensors.torch.load_file(folder / "model" / "model.safetensors")
    assert not any("lora" in name for name in exported)
    name = "model.layers.0.self_attn.q_proj."
    merged = second[f"{name}weight"] + second[f"{name}lora_B"] @ second[f"{name}lora_A"]
    torch.testing.assert_close(exported[f"{name}weight"], merged)
    assert not torch.equal(exported[f"{name}weight"], second[f"{name}weight"])

    resumed = run("lora", tmp_path, num_iterations=3, resume="auto", missing_eos_penalty=1.0)[1]
    assert [row["iteration"] for row in resumed] == [0, 1, 2] and resumed[:2] == rows


@pytest.mark.slow
def test_ranks_that_share_a_sampler_give_the_samples_and_numbers_of_whole_ones(tmp_path):
    script = patched_script("tensor_parallel_sampler", tmp_path)
    for ranks in "12":
        flags = flags_of(run_name=ranks, sampler_ranks=ranks, env_id="environments:TwoTurns-v0", kl_coef=0.1)
        code, output = finish(start(torchrun(2, script, *flags), tmp_path), timeout=120)
        assert code == 0, output
    texts = [[row["response"] for row in lines(tmp_path / ranks, "completions")] for ranks in "12"]
    assert texts[0] == texts[1] and len(set(texts[0])) > 2
    assert_same_metrics(lines(tmp_path / "1"), lines(tmp_path / "2"))
