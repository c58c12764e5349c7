"""The patches in forks/ apply, alone and in pairs, and do what they say; for some see test_placements.py."""

import collections
import dataclasses
import importlib.util
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
import textwrap
import types

import pytest
import safetensors.torch
import torch
from conftest import ROOT
from distributed_worker import run_on_ranks
from test_transformers import hf_folder
from transformers import AutoModelForCausalLM

import ppo_llm

FOLDER = ROOT / "forks"
PATCHES = sorted(path.stem for path in FOLDER.glob("*.patch"))
GUIDE = (FOLDER / "README.md").read_text()
TABLE = re.findall(r"^\| \[(\w+)\]\(\1\.patch\) \| .+ \| \+(\d+) -(\d+) \| (yes|no) \|$", GUIDE, re.M)
ROWS = re.findall(r"^\| (\w+) \| (\w+(?:, \w+)*) \| .+ \|$", GUIDE, re.M)
APART = {frozenset((first, second)) for first, others in ROWS for second in others.split(", ")}
PAIRS = [pair for pair in itertools.combinations(PATCHES, 2) if frozenset(pair) not in APART]
FLAGS = dict(num_iterations=2, rollout_batch_size=8, n_samples_per_prompt=2, train_batch_size=16, max_new_tokens=5,
             sft_steps=0, eval_episodes=2, save_every=1, env_id="environments:Plain-v0", device="cpu", run_name="run",
             kl_coef=0.1)  # fmt: skip
# Their old log-probs are those of the sampler, or their minibatches are not those in which the samples were scored.
ROUNDED = {"sao", "bpco", "best_and_worst"}
RECORDED = ("build_actor", "build_critic", "rollout", "make_experience", "minibatches", "policy_loss")


def apply(patches, folder, script="ppo_llm"):
    """Whether all of the patches apply to a copy of the script in the folder."""
    shutil.copy(ROOT / f"{script}.py", folder)
    texts = [(FOLDER / f"{patch}.patch").read_text().replace("ppo_llm.py", f"{script}.py") for patch in patches]
    return all(subprocess.run(["git", "apply"], input=x, cwd=folder, text=True).returncode == 0 for x in texts)


def patched_script(patch, folder):
    """The path of a copy of ppo_llm.py in the folder with the patch, or several with commas between them."""
    assert apply(patch.split(","), folder)
    return folder / "ppo_llm.py"


def recorded(function, calls):
    """The function, which appends (arguments, result) to `calls`."""

    def call(*args, **kwargs):
        calls.append((args, function(*args, **kwargs)))
        return calls[-1][1]

    return call


def train(script, prepare=lambda ppo: None, **flags):
    """Train in the folder of a changed script. Returns it as a module; module.calls has those of RECORDED functions."""
    spec = importlib.util.spec_from_file_location("ppo_llm", script)
    ppo = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "ppo_llm", ppo)
        spec.loader.exec_module(ppo)
        prepare(ppo)
        ppo.calls = collections.defaultdict(list)
        for name in RECORDED:
            setattr(ppo, name, recorded(getattr(ppo, name), ppo.calls[name]))
        summary = ppo.train(ppo.Args(log_dir=str(script.parent), **FLAGS | flags))
    assert summary["status"] == "completed"
    return ppo


def run(patch, folder, prepare=lambda ppo: None, **flags):
    """(module of `train`, rows of metrics.jsonl, run folder) of a patched script."""
    ppo = train(patched_script(patch, folder), prepare, **flags)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    largest = 1e-5 if ROUNDED & set(patch.split(",")) else 0
    assert all(row["ratio/first_dev"] <= largest for row in rows)
    return ppo, rows, folder / "run"


def experiences(ppo):
    return [experience for _, experience in ppo.calls["make_experience"]]


def nonzero(x):
    """The numbers in an order that does not depend on that of the samples."""
    return x[x != 0].sort().values


def checkpoint(folder, iteration):
    file, = (folder / "checkpoints" / f"iter_{iteration:06d}").glob("*.safetensors")  # fmt: skip
    return safetensors.torch.load_file(file)


def test_the_guide_lists_the_patches_their_sizes_and_the_scripts_they_apply_to(tmp_path):
    assert [name for name, *_ in TABLE] == PATCHES
    for name, added, removed, both in TABLE:
        head, _, diff = (FOLDER / f"{name}.patch").read_text().partition("\n\ndiff --git a/ppo_llm.py b/ppo_llm.py\n")
        assert 40 < len(head) < 1500 and head.endswith(".")
        changes = [len(re.findall(rf"^[{sign}](?![+-]{{2}} )", diff, re.M)) for sign in "+-"]
        assert changes == [int(added), int(removed)], name
        assert apply([name], tmp_path)
        assert apply([name], tmp_path, "ppo_llm_continuous_batching") == (both == "yes"), name


def test_the_script_that_a_patch_was_made_from_is_in_the_history():
    """`git apply --3way` needs it, with which the guide merges two patches."""
    lacking = []
    for name in PATCHES:
        made_from, = re.findall(r"^index (\w+)\.\.", (FOLDER / f"{name}.patch").read_text(), re.M)  # fmt: skip
        command = ["git", "log", "-1", f"--find-object={made_from}", "--", "ppo_llm.py"]
        lacking += [] if subprocess.run(command, cwd=ROOT, capture_output=True).stdout else [name]
    if lacking == PATCHES:
        pytest.skip("needs a clone with the history of the script")
    assert not lacking


@pytest.mark.slow
def test_pairs_apply_and_compile_but_for_those_of_the_guide(tmp_path):
    for pair in itertools.permutations(PATCHES, 2):
        applies = apply(pair, tmp_path)
        assert applies == (frozenset(pair) not in APART), pair
        if applies:
            compile((tmp_path / "ppo_llm.py").read_text(), "+".join(pair), "exec")


@pytest.mark.slow
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "vllm" not in pair], ids="+".join)  # see test_vllm.py
def test_pairs_train(pair, tmp_path):
    _, rows, _ = run(",".join(pair), tmp_path)
    assert len(rows) == 2 and rows[0]["actor/grad_norm"] > 0


@pytest.mark.parametrize("patch", ["adaptive_lambda", "sao", "bpco"])
def test_every_sample_has_the_advantages_of_its_own_lambda(patch, tmp_path):
    ppo, _, _ = run(patch, tmp_path, lambda_alpha=0.5, kl_coef=0.0)
    e = experiences(ppo)[1]
    lengths = e.mask.sum(1).tolist()
    assert e.values.any() and len(set(lengths)) > 2
    raw = torch.zeros_like(e.values)
    for i, n in enumerate(lengths):
        chain = nextvalue = 0.0
        for t in reversed(e.mask[i].nonzero()[:, 0].tolist()):  # gamma is 1
            chain = e.rewards[i, t] + nextvalue - e.values[i, t] + max(0.0, 1 - 1 / (0.5 * n)) * chain
            raw[i, t], nextvalue = chain, e.values[i, t]
    sampled = raw[e.mask]
    expected = raw if patch == "bpco" else (raw - sampled.mean()) / sampled.std() * e.mask
    torch.testing.assert_close(e.advantages, expected, rtol=1e-4, atol=1e-4)


RATIO = lambda new, old, _: ((new - old).exp() <= 0.9) | ((new - old).exp() >= 1.2)
CHANGE = lambda new, old, advantages: ((new.exp() - old.exp()).abs() > 0.03) & ((new > old) == (advantages > 0))


@pytest.mark.parametrize(("patch", "bound", "outside"), [("sao", dict(clip_low=0.1, clip_high=0.2), RATIO),
                                                         ("bpco", dict(tv_bound=0.03), CHANGE)])  # fmt: skip
def test_tokens_outside_of_a_bound_do_not_train_others_are_not_clipped(patch, bound, outside, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "randperm", lambda n, generator: torch.arange(n))
    ppo, _, _ = run(patch, tmp_path, ppo_epochs=2, actor_lr=1e-2, **bound)
    e = experiences(ppo)[0]
    assert torch.equal(e.old_logprobs, e.sampler_logprobs)  # the sampler's
    e = e.select(torch.tensor(sorted(range(16), key=e.lengths.tolist().__getitem__, reverse=True)))
    (new, old, advantages, mask), (loss, _) = ppo.calls["policy_loss"][1]
    stopped = outside(new, old, e.advantages) & mask
    assert 0 < stopped.sum() < mask.sum()
    torch.testing.assert_close(advantages, e.advantages * ~stopped)
    torch.testing.assert_close(loss, -(advantages * (new - old).exp()).sum() / mask.sum())


@pytest.mark.parametrize("patch", ["sao", "sao,lora"])
def test_sao_trains_the_critic_twice_as_often_and_not_its_attention(patch, tmp_path):
    ppo, _, folder = run(patch, tmp_path)
    assert len(ppo.calls["minibatches"]) == 2 * (2 + 1)
    first, second = checkpoint(folder, 1), checkpoint(folder, 2)
    trained = r"critic\..*(lora_.|score\.weight)" if "lora" in patch else r"critic\..*weight"
    weights = {name for name in first if re.fullmatch(trained, name)}
    still = {name for name in weights if torch.equal(first[name], second[name])}
    assert still == {name for name in weights if "self_attn" in name} < weights


def test_bpco_has_values_in_the_range_of_the_rewards(tmp_path):
    ppo, _, _ = run("bpco", tmp_path, reward_range=(-1.0, 0.5), critic_lr=0.1)
    first, second = (e.values[e.mask] for e in experiences(ppo))
    assert (first == -0.25).all() and -1 <= second.min() < second.max() <= 0.5


def test_bpco_bounds_only_tokens_of_the_mask(tmp_path):
    """In the first step nothing has changed yet, also where a fork trains on every second token alone."""

    def drop(ppo):
        minibatches = ppo.minibatches
        every_second = lambda e: dataclasses.replace(e, mask=e.mask & (torch.arange(e.mask.shape[1]) % 2 == 0))
        ppo.minibatches = lambda experience, *args: minibatches(every_second(experience), *args)

    ppo, rows, _ = run("bpco", tmp_path, drop)
    assert experiences(ppo)[1].advantages.amax() > 0
    assert [row["ratio/steps"][0]["clipfrac"] for row in rows] == [0.0] * len(rows)


def assert_no_critic(ppo, folder):
    assert not ppo.calls["build_critic"]
    assert {name.split(".")[0] for name in checkpoint(folder, 2)} == {"actor", "reference"}


@pytest.mark.parametrize("patch", ["group_normalised", "group_normalised,lora", "group_normalised,best_and_worst"])
def test_group_normalised(patch, tmp_path):
    ppo, _, folder = run(patch, tmp_path, n_samples_per_prompt=4)
    assert_no_critic(ppo, folder)
    for e in experiences(ppo):
        rewards = (e.rewards - 0.1 * (e.old_logprobs - e.ref_logprobs)).sum(1)
        for group in range(0, 8 * 4, 4):
            rows = slice(group, group + 4)
            expected = (rewards[rows] - rewards[rows].mean()) / (rewards[rows].std() + 1e-4)
            torch.testing.assert_close(e.advantages[rows], expected[:, None] * e.mask[rows], atol=1e-4, rtol=1e-4)


def test_group_normalised_leaves_samples_without_a_reward_out_of_their_group(tmp_path):
    def forget(ppo):
        from_episodes = ppo.Experience.from_episodes

        def without_rewards(episodes):
            for episode in [*episodes[::5], *episodes[1:4]]:  # of the first group all four
                episode.mask = [False] * len(episode.mask)
                episode.rewards[-1] += 9.0  # of an earlier turn, or of a reward model
            return from_episodes(episodes)

        ppo.Experience.from_episodes = without_rewards

    ppo, _, _ = run("group_normalised", tmp_path, forget, n_samples_per_prompt=4)
    for e in experiences(ppo):
        rewards = torch.where(e.mask, e.rewards - 0.1 * (e.old_logprobs - e.ref_logprobs), 0.0).sum(1).view(8, 4)
        scored, advantages = e.mask.any(1).view(8, 4), e.advantages.amax(1) + e.advantages.amin(1)  # one of them is 0
        assert scored.sum(1).tolist() == [0, 3, 3, 3, 4, 3, 3, 3]
        for own, group, found in zip(scored[1:], rewards[1:], advantages.view(8, 4)[1:]):
            expected = (group[own] - group[own].mean()) / (group[own].std() + 1e-4)
            torch.testing.assert_close(found[own], expected, atol=1e-4, rtol=1e-4)
            assert not found[~own].any()
        assert not advantages[:4].any()


@pytest.mark.parametrize("reward", [0.6, 1000.1])
def test_group_normalised_learns_nothing_from_equal_rewards(tmp_path, reward):
    """The mean of eight equal rewards may differ from them by rounding: by 6e-8 for 0.6, by 6e-5 for 1000.1."""
    first = ppo_llm.first_training_seed(ppo_llm.Args(), ppo_llm.SortDigits())
    kwargs = json.dumps(dict(reward=reward, first=first + 4))  # the first four get 1
    flags = dict(env_id="environments:Constant-v0", env_kwargs=kwargs, kl_coef=0.0)
    ppo, _, _ = run("group_normalised", tmp_path, n_samples_per_prompt=8, **flags)
    assert not any(e.advantages.any() for e in experiences(ppo))


def test_best_and_worst(tmp_path):
    ppo, rows, _ = run("best_and_worst", tmp_path, n_samples_per_prompt=4)
    assert [len(row["ratio/steps"]) for row in rows] == [2, 2]
    for row, e, first in zip(rows, experiences(ppo), (0, 4)):
        (trained, *_), _ = ppo.calls["minibatches"][first]
        every, two = e.rewards.sum(1).view(8, 4), trained.rewards.sum(1).view(8, 2)
        assert torch.equal(two, torch.stack((every.amin(1), every.amax(1)), dim=1))
        samples = lambda x: {tuple(ids) for ids in x.tokens.tolist()}
        assert samples(trained) < samples(e) and row["objective/reward"] == pytest.approx(float(every.mean()))


@pytest.mark.parametrize("flags", [{}, dict(env_id="environments:Constant-v0", env_kwargs='{"reward": 0.6}')])
def test_best_and_worst_passes_over_samples_without_a_reward(tmp_path, flags):
    def forget(ppo):
        from_episodes = ppo.Experience.from_episodes

        def without_rewards(episodes):
            for episode in [*episodes[::5], *episodes[29:32]]:  # three of the four samples of the last prompt
                episode.mask = [False] * len(episode.mask)
                episode.rewards[-1] += 9.0  # of an earlier turn, or of a reward model
            return from_episodes(episodes)

        ppo.Experience.from_episodes = without_rewards

    ppo, _, _ = run("best_and_worst", tmp_path, forget, n_samples_per_prompt=4, **flags)
    (e, *_), ((trained, *_), _) = experiences(ppo), ppo.calls["minibatches"][0]
    rewards = torch.where(e.mask.any(1), e.rewards.sum(1), math.nan).view(8, 4)
    found = torch.where(trained.mask.any(1), trained.rewards.sum(1), math.nan).view(8, 2)
    assert e.mask.any(1).view(8, 4).sum(1).tolist() == [3, 3, 3, 3, 4, 3, 3, 1]
    for group, two in zip(rewards[:-1], found):
        assert two.tolist() == [min(group[~group.isnan()]), max(group[~group.isnan()])]
    assert found[-1, 0] == rewards[-1].nansum() and found[-1, 1].isnan()


def test_best_and_worst_needs_two_samples_per_prompt(tmp_path):
    with pytest.raises(Exception, match="--n-samples-per-prompt 1: must be above 1"):
        run("best_and_worst", tmp_path, n_samples_per_prompt=1)


def test_replay_trains_the_previous_rollout_with_its_own_old_logprobs(tmp_path):
    ppo, rows, _ = run("replay", tmp_path, ppo_epochs=1)
    first, second = experiences(ppo)
    trained = [experience for (experience, *_), _ in ppo.calls["minibatches"]]  # by critic, actor, critic, actor
    assert all(x is y for x, y in zip(trained, (first, first, second, first, second, first), strict=True))
    for ((_, old_logprobs, advantages, *_), _), e in zip(ppo.calls["policy_loss"], (first, second, first)):
        assert torch.equal(nonzero(old_logprobs), nonzero(e.old_logprobs))
        assert torch.equal(nonzero(advantages), nonzero(e.advantages))
    newest, oldest = rows[1]["ratio/steps"]
    assert newest["ratio_dev"] == 0 and oldest["ratio_dev"] > 1e-5
    assert ppo.plan_steps(ppo.Args(**FLAGS | dict(critic_epochs=1, ppo_epochs=1))).update_steps == 2


@pytest.mark.parametrize(("flags", "weigh"), [
    (dict(rollout_is_cap=2.0), lambda logs: logs.exp().clamp(max=2.0)),
    (dict(rollout_is_band=(0.4, 3.0)), lambda logs: logs.exp() * (logs > 0)),
    (dict(rollout_is_cap=9.0, rollout_is_sequence=True), lambda logs: logs.sum(1, True).exp().clamp(max=9.0)),
])  # fmt: skip
def test_sampler_correction(flags, weigh, tmp_path):
    signs = torch.tensor([-1.0, 1.0]).repeat(8)[:, None]  # log-probs of the sampler are by 1 too low, too high, ...

    def make_logprobs_wrong(ppo):
        from_episodes = ppo.Experience.from_episodes
        changed = lambda e: dataclasses.replace(e, sampler_logprobs=e.sampler_logprobs + signs * e.mask)
        ppo.Experience.from_episodes = lambda episodes: changed(from_episodes(episodes))

    ppo, rows, _ = run("sampler_correction", tmp_path, make_logprobs_wrong, ppo_epochs=1, **flags)
    e = experiences(ppo)[0]
    weights = weigh(-signs * e.mask)
    (_, _, advantages, *_), _ = ppo.calls["policy_loss"][0]
    torch.testing.assert_close(nonzero(advantages), nonzero(e.advantages * weights), atol=1e-4, rtol=1e-4)
    assert rows[0]["actor/is_weight"] == pytest.approx(float((weights * e.mask).sum() / e.mask.sum()), rel=1e-4)


def test_joint_loss_has_the_gradient_of_both_losses(tmp_path):
    def check_gradients(ppo):
        step, calls = ppo.optimizer_step, []
        ppo.Transformer.sampled_logprobs = recorded(ppo.Transformer.sampled_logprobs, calls)

        def checked_step(actor, *args):
            (_, mb, _), _ = calls[-1]
            logprobs, _, values = actor.sampled_logprobs(mb, 1.0)
            policy = -(mb.advantages * (logprobs - mb.old_logprobs).exp()).sum() / mb.mask.sum()
            value = 0.5 * (values - mb.returns)[mb.mask].square().mean()
            expected = torch.autograd.grad(policy + 0.5 * value, list(actor.parameters()))
            torch.testing.assert_close([p.grad for p in actor.parameters()], list(expected), atol=1e-6, rtol=1e-4)
            return step(actor, *args)

        ppo.optimizer_step = checked_step

    ppo, rows, folder = run("joint_loss", tmp_path, check_gradients, ppo_epochs=1)
    assert_no_critic(ppo, folder)
    first, second = experiences(ppo)
    assert not first.values.any() and second.values.any() and rows[1]["actor/value_loss"] > 0
    exported = safetensors.torch.load_file(folder / "model" / "model.safetensors")
    assert torch.equal(exported["score.weight"], checkpoint(folder, 2)["actor.score.weight"])


def test_lora_trains_adapters_alone_and_exports_them_merged(tmp_path):
    flags = dict(lora_rank=4, lora_alpha=12.0)
    ppo, rows, folder = run("lora", tmp_path, **flags)
    first, second = checkpoint(folder, 1), checkpoint(folder, 2)
    trained = ("lora_A", "lora_B", "score.weight")
    assert all(name.removesuffix(".exp_avg").endswith(trained) for name in first if name.endswith("exp_avg"))
    weights = {name for name in first if name.startswith(("actor.", "critic.")) and first[name].ndim == 2}
    changed = {name for name in weights if not torch.equal(first[name], second[name])}
    assert changed == {name for name in weights if re.search("|".join(trained), name)}
    (_, (_, actor)), = ppo.calls["build_actor"]  # fmt: skip
    tokens = experiences(ppo)[0].tokens
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(folder / "model")(tokens).logits
        torch.testing.assert_close(actor(tokens), merged, atol=1e-5, rtol=1e-4)
    shutil.rmtree(folder / "checkpoints" / "iter_000002")
    _, resumed, _ = run("lora", tmp_path, resume="auto", **flags)
    without_clock = lambda row: {name: x for name, x in row.items() if not name.startswith("time/")}
    assert list(map(without_clock, resumed)) == list(map(without_clock, rows))


def test_joint_loss_does_not_make_up_an_output_head_that_a_checkpoint_lacks(tmp_path):
    """Its value head may be missing in the files."""
    model = hf_folder(tmp_path / "in", "mistral")
    weights = safetensors.torch.load_file(model / "model.safetensors")
    assert "score.weight" not in weights
    del weights["lm_head.weight"]
    safetensors.torch.save_file(weights, model / "model.safetensors")
    with pytest.raises(Exception, match=r"the files lack lm_head\.weight$"):
        train(patched_script("joint_loss", tmp_path), model=str(model), max_prompt_tokens=64)


def guide_code(title):
    """The code in an item of the guide's small edits: each line of a block, and what stands in the text."""
    item = re.search(rf"^- \*\*{title}.*?(?=^- )", GUIDE, re.M | re.S)[0]
    found = re.findall(r"```python\n(.*?)```|`([^`]+)`", item, re.S)
    return [" ".join(x.split()) for block, code in found for x in block.splitlines() or [code] if x.strip()]


def test_dapo_leaves_out_equal_groups_and_samples_that_were_cut_off(tmp_path):
    """The two edits of the guide, with group_normalised.patch."""
    choice = guide_code("Leave out prompts")[:6]
    mask, kept, *_, whitened, of_rows = guide_code("Overlong filter")
    mask = re.sub(r"\[e\.stop.*?\]", of_rows, mask)
    kept = kept.replace("advantages=masked_whiten(trained.advantages, mask)", "").replace(", )", ")")
    assert whitened == "advantages=..." and of_rows in mask and "whiten" not in kept
    script, spaces = patched_script("group_normalised", tmp_path), " " * 8
    changes = [
        ("trained = experience  # or experience.select(rows)", f"\n{spaces}".join(choice)),
        ("# --- Actor epochs. ", f"{mask}\n{spaces}{kept}\n{spaces}# --- Actor epochs. "),
        ("in range(epochs):\n            for n_tokens, minibatch in minibatches(trained",
         "in range(epochs):\n            for n_tokens, minibatch in minibatches(kept"),
        ("actor, trained, actor_step_stats", "actor, kept, actor_step_stats"),
    ]  # fmt: skip
    changed_script(tmp_path, changes, script)
    cut = torch.arange(32) % 3 == 0  # samples, four of each prompt
    cut[8:12] = False

    def some_cut_off_some_without_a_reward(ppo):
        play = ppo.rollout

        def played(*args):
            episodes = play(*args)
            for k, episode in enumerate(episodes):
                episode.stop = "length" if cut[k] else "terminated"
                episode.rewards[-1] = float(k >= 8 and k % 4 == 1)  # the same for the first two prompts
                episode.mask = [x and k != 9 for x in episode.mask]  # so that no reward is left in the third one
            return episodes

        ppo.rollout = played

    ppo = train(script, some_cut_off_some_without_a_reward, n_samples_per_prompt=4, kl_coef=0.0)
    e, (kept, *_) = experiences(ppo)[0], ppo.calls["minibatches"][0][0]
    rows = slice(12, 28)  # a full minibatch of the 20 that are left
    assert torch.equal(kept.tokens, e.tokens[rows]) and torch.equal(kept.advantages, e.advantages[rows])
    assert torch.equal(kept.mask, e.mask[rows] & ~cut[rows, None]) and kept.mask.any() and not kept.mask.all()
    assert all(e.advantages[rows].view(4, -1).any(1))


FIELD = "    advantages: Tensor | None = None\n"  # of Experience


def guide_diffs():
    """{title of a section of the guide: [(old text, new text), ...]} of each section with a diff of the script."""
    diffs = {}
    for section in GUIDE.split("\n## ")[1:]:
        for block in re.findall(r"^```diff\n(.*?)^```", section, re.M | re.S):
            for hunk in block.split("...\n"):
                sides = ["".join(x[1:] for x in hunk.splitlines(True) if x[0] != sign) for sign in "+-"]
                diffs.setdefault(section.splitlines()[0], []).append(tuple(sides))
    return diffs


def changed_script(folder, changes, script=ROOT / "ppo_llm.py"):
    """A copy of the script in the folder with changes, (old text, new text) each."""
    text = script.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    changed = folder / "ppo_llm.py"
    changed.write_text(text)
    return changed


def test_diffs_of_the_guide_apply(tmp_path):
    diffs = guide_diffs()
    assert len(diffs) == 7
    for title, changes in diffs.items():
        compile(changed_script(tmp_path, changes).read_text(), title, "exec")


def test_constraint_of_the_guide(tmp_path):
    """Its multiplier pushes the cost below the limit, is of samples with a reward alone, and survives a resume."""
    script = changed_script(tmp_path, guide_diffs()["A constraint with a multiplier"])

    def forget(ppo):
        from_episodes = ppo.Experience.from_episodes

        def without_rewards(episodes):
            for episode in episodes[::3]:
                episode.mask = [False] * len(episode.mask)
            return from_episodes(episodes)

        ppo.Experience.from_episodes = without_rewards

    flags = dict(cost_limit=2.0, multiplier_lr=0.5, kl_coef=0.0, num_iterations=3, critic_warmup_iterations=1)
    ppo = train(script, forget, **flags)
    read = lambda: [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows, multiplier = read(), 0.0
    for i, (row, e) in enumerate(zip(rows, experiences(ppo), strict=True)):
        lengths = [n for n in e.mask.sum(1).tolist() if n]
        cost = sum(lengths) / len(lengths)
        assert len(lengths) == 10 and row["constraint/cost"] == pytest.approx(cost)
        assert row["constraint/multiplier"] == pytest.approx(multiplier)
        assert row["objective/reward"] == pytest.approx(float(ppo.masked_mean(e.rewards.sum(1), e.mask.any(1))))
        paid = e.rewards.sum(1) - multiplier * e.mask.sum(1)
        first_tokens = e.returns[torch.arange(16), e.mask.int().argmax(1)]
        torch.testing.assert_close(first_tokens, torch.where(e.mask.any(1), paid, 0.0))
        if i:  # not in the critic's warm-up
            multiplier = max(0.0, multiplier + 0.5 * (cost - 2.0))
    assert rows[2]["constraint/multiplier"] > 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "iter_000003")
    train(script, forget, resume="auto", **flags)
    assert read()[2]["constraint/multiplier"] == rows[2]["constraint/multiplier"]


def test_average_of_the_guide(tmp_path):
    """Where it keeps nothing it is the actor, where it keeps all it is the reference. It survives a resume."""
    script = changed_script(tmp_path, guide_diffs()["A model that follows the actor"])
    read = lambda: [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    kls = {}
    for decay in 0.0, 0.5, 1.0:
        flags = dict(average_coef=0.1, average_decay=decay, num_iterations=3, save_every=1)
        train(script, **flags)
        rows = read()
        kls[decay] = [row["average/kl"] for row in rows]
        if decay == 0.5:
            shutil.rmtree(tmp_path / "run" / "checkpoints" / "iter_000003")
            train(script, resume="auto", **flags)
            assert [row["average/kl"] for row in read()] == kls[decay]
        if decay == 1.0:
            assert kls[decay] == pytest.approx([row["objective/kl"] for row in rows], abs=1e-6)
        shutil.rmtree(tmp_path / "run")
    assert kls[0.0] == pytest.approx([0.0] * 3, abs=1e-6)
    assert all(x[0] == pytest.approx(0.0, abs=1e-6) for x in kls.values())
    assert abs(kls[1.0][2]) > abs(kls[0.5][2]) > 1e-6


def test_critic_of_the_guide_that_reads_more(tmp_path):
    """Without a hint it is the critic of the script. A mask that is one token off is noticed."""
    changes = dict(guide_diffs()["A critic that reads more than the actor"])
    hint, runs = 'tokenizer.encode(info["answer"])', {}
    for name, ids in {"script": "", "nothing": "[]", "hints": "[3 + self.env_seed % 7] * (self.env_seed % 3)"}.items():
        texts = [(old, new.replace(hint, ids)) for old, new in changes.items()] if ids else []
        ppo = train(changed_script(tmp_path, texts), micro_batch_tokens=60, critic_lr=1e-2, num_iterations=3)
        runs[name] = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        shutil.rmtree(tmp_path / "run")
    times = {name for name in runs["script"][0] if name.startswith("time/")}
    without = lambda rows: [{name: x for name, x in row.items() if name not in times} for row in rows]
    assert without(runs["script"]) == without(runs["nothing"]) != without(runs["hints"])
    assert all(row["critic/first_dev"] < 1e-6 for row in runs["hints"]) and runs["hints"][2]["critic/value_mean"]
    e, seen = experiences(ppo)[2]
    hints = seen.lengths - e.lengths
    assert sorted(set(hints.tolist())) == [0, 1, 2] and torch.equal(seen.values[seen.mask], e.values[e.mask])
    assert torch.equal(seen.returns[seen.mask], e.returns[e.mask]) and not seen.returns[~seen.mask].any()
    for row, n in enumerate(hints.tolist()):
        assert torch.equal(seen.tokens[row, n : seen.lengths[row]], e.tokens[row, : e.lengths[row]])
    mask = "mask=[False] * len(zeros) + episode.mask"
    for other in "mask=[False, False] + episode.mask[:-1]", "mask=episode.mask + [False]":
        texts = [(old, new.replace(hint, "[3]").replace(mask, other)) for old, new in changes.items()]
        with pytest.raises(AssertionError):
            train(changed_script(tmp_path, texts), run_name=f"run {len(other)}")


CLIP = "A clip range for each token"


def test_clip_range_of_the_guide(tmp_path):
    """A token's bound is that of its entropy and has no gradient. With a coefficient of 0 it is that of the script."""
    seen = []  # (bound, entropies) of the microbatches

    def record_bounds(ppo):
        loss, sampled_logprobs = ppo.policy_loss, ppo.Transformer.sampled_logprobs

        def recorded_logprobs(*args):
            ppo.newest = sampled_logprobs(*args)
            return ppo.newest

        def recorded_loss(*args, **kwargs):
            seen.append((kwargs["clip_high"], ppo.newest[1]))
            return loss(*args, **kwargs)

        ppo.Transformer.sampled_logprobs, ppo.policy_loss = recorded_logprobs, recorded_loss

    rows = {}
    for name, coef in {"script": None, "no width": 0.0, "width": 2.0}.items():
        seen.clear()
        (tmp_path / name).mkdir()
        script = changed_script(tmp_path / name, [] if coef is None else guide_diffs()[CLIP])
        ppo = train(script, record_bounds, actor_lr=1e-2, **({} if coef is None else {"clip_entropy": coef}))
        lines = (tmp_path / name / "run" / "metrics.jsonl").read_text().splitlines()
        rows[name] = [{x: y for x, y in json.loads(line).items() if not x.startswith("time/")} for line in lines]
    assert rows["script"] == rows["no width"] != rows["width"] and rows["width"][0]["actor/clipfrac"] > 0
    for bound, entropies in seen:
        assert not bound.requires_grad and entropies.requires_grad
        assert torch.equal(bound, 0.2 * (1 + 2 * entropies)) and bound.max() > bound.min() + 0.1
    (test,) = re.findall(r"```python\n(.*?)```", GUIDE.partition(f"\n## {CLIP}\n")[2].partition("\n## ")[0], re.S)
    exec(textwrap.dedent(test), vars(ppo).copy())
    wrong = changed_script(tmp_path, [(" * entropies.detach())", " * entropies)")], script)
    with pytest.raises(AssertionError):
        exec(textwrap.dedent(test), vars(train(wrong)).copy())


TOKENS = "Tokens that do not train the actor"


def trained_on_top_tokens(ppo, folder):
    """The tokens of tokens.jsonl that are trained on are those of `top`. Returns the rows of metrics.jsonl."""
    read = lambda name: [json.loads(line) for line in (folder / "run" / f"{name}.jsonl").read_text().splitlines()]
    logged = read("tokens")
    for iteration, e in enumerate(experiences(ppo)):
        assert 0.15 < e.top.sum() / e.mask.sum() < 0.25 and not (e.top & ~e.mask).any()
        for sample in (x for x in logged if x["iteration"] == iteration):
            assert e.top[sample["sample"]].nonzero()[:, 0].tolist() == [i for i, x in enumerate(sample["trained"]) if x]
    return read("metrics")


def test_tokens_of_the_guide_that_do_not_train_the_actor(tmp_path):
    """All numbers of the actor are means over the others, which are chosen over the whole rollout."""
    script = changed_script(tmp_path, guide_diffs()[TOKENS])
    ppo = train(script, micro_batch_tokens=30, actor_lr=1e-2)
    for row in trained_on_top_tokens(ppo, tmp_path):
        assert row["ratio/first_dev"] < 1e-6 < row["actor/clipfrac"] and row["actor/token_share"] == pytest.approx(1)
    counted = sum(float(mask.sum()) for (_, _, _, mask), _ in ppo.calls["policy_loss"])
    assert counted == sum(2 * int(e.top.sum()) for e in experiences(ppo))

    def no_rewards(ppo):
        from_episodes = ppo.Experience.from_episodes
        ppo.Experience.from_episodes = lambda episodes: from_episodes([
            dataclasses.replace(episode, mask=[False] * len(episode.mask)) for episode in episodes
        ])  # fmt: skip

    shutil.rmtree(tmp_path / "run")
    train(script, no_rewards)  # does not raise


def test_tokens_of_the_guide_with_a_denominator_of_their_own(tmp_path):
    """The entropy is that of all sampled tokens, the policy loss a mean over those of `top`."""
    loop = "            for n_tokens, minibatch in minibatches(trained, epoch, state, args):\n"
    _, block = GUIDE.partition(f"\n## {TOKENS}\n")[2].partition("\n## ")[0].split("```python\n")
    own = textwrap.indent(textwrap.dedent(block.split("```")[0]), " " * 12)
    actors = f"        for epoch in range(epochs):\n{loop}"
    by_place = {old: new for old, new in guide_diffs()[TOKENS] if "minibatches(" not in old and "same_micro" not in old}
    changes = [*by_place.items(), (actors, actors.replace(loop, own)), (
        "newlogprobs, mb.old_logprobs, mb.advantages, mb.mask,\n                        clip_low=args.clip_low, "
        "clip_high=args.clip_high,\n                        dual_clip=args.dual_clip, denom=n_tokens,",
        "newlogprobs, mb.old_logprobs, mb.advantages, mb.top,\n                        clip_low=args.clip_low, "
        "clip_high=args.clip_high,\n                        dual_clip=args.dual_clip, denom=n_top,")]  # fmt: skip
    flags = dict(micro_batch_tokens=30, actor_lr=0.0, kl_loss="k2", train_batch_size=8)
    (tmp_path / "plain").mkdir()
    train(changed_script(tmp_path / "plain", []), **flags)
    plain = (tmp_path / "plain" / "run" / "metrics.jsonl").read_text().splitlines()
    ppo = train(changed_script(tmp_path, changes), **flags)
    for row, whole in zip(trained_on_top_tokens(ppo, tmp_path), map(json.loads, plain), strict=True):
        assert row["ratio/first_dev"] == 0 and row["actor/token_share"] == pytest.approx(1)
        for name in "actor/entropy", "actor/kl_loss":
            assert row[name] == pytest.approx(whole[name])


@pytest.mark.parametrize("shared", [False, True])
def test_critics_of_the_guide(shared, tmp_path):
    """They differ, and begin with their own values. On the same samples they would stay equal."""
    section = GUIDE.partition("\n## Several critics\n")[2].partition("\n## ")[0]
    its = re.search(r"```python\n(.*?)   ```", section, re.S)[1]
    code = [" ".join(x.split()) for x in re.findall(r"`([^`]+)`", section.replace("```", ""))]
    each, = (x for x in code if x.startswith("each = "))  # fmt: skip
    log, = (x for x in code if x.startswith("experience.metrics"))  # fmt: skip
    mean, path = "each.mean(-1)", 'run.path / f"critic{k}"'
    assert {mean, path} < set(code)
    if shared:
        its = its.replace("< 0.8", "< 2")
    indent = lambda text, n: "".join(" " * n + line.strip() + "\n" for line in text.splitlines())
    values = "forward_all(critic.sampled_values, experience, first_epoch, args)"
    loop = "        for epoch in range(args.critic_epochs):\n            for n_tokens, minibatch in minibatches("
    changes = [
        (FIELD, f"{FIELD}    each: Tensor | None = None\n"),
        ("    critic = build_critic(actor, tokenizer, args) if args.critic_epochs else None\n",
         "    critics = [build_critic(actor, tokenizer, args) for _ in range(2)]\n"),
        ("    critic_optimizer = make_optimizer(critic) if critic else None\n",
         "    critic_optimizers = [make_optimizer(critic) for critic in critics]\n"),
        ('        "critic": (critic, critic_optimizer),\n',
         '        **{f"critic{k}": (critics[k], critic_optimizers[k]) for k in range(2)},\n'),
        ("make_experience(episodes, actor, critic, reference, state, args)\n",
         "make_experience(episodes, actor, critics, reference, state, args)\n"),
        ("make_experience(episodes, actor, critic, reference, state, args) ->",
         "make_experience(episodes, actor, critics, reference, state, args) ->"),
        (f"    if critic:\n        experience.values = {values}\n",
         f"    {each}\n    experience.each, experience.values = each, {mean}\n    {log}\n"),
        (f"{loop}trained", "        for k, epoch in [(k, n) for k in range(2) for n in range(args.critic_epochs)]:\n"
         f"{indent(its, 12)}            critic, critic_optimizer = critics[k], critic_optimizers[k]\n"
         "            for n_tokens, minibatch in minibatches(its"),
        ("len(critic_step_stats) / plan.critic_steps\n", "(len(critic_step_stats) - k * plan.critic_steps // 2) / "
         "(plan.critic_steps // 2)\n"),
        ("critic_steps=per_epoch * args.critic_epochs", "critic_steps=2 * per_epoch * args.critic_epochs"),
        ('    if critic:\n        save_hf_checkpoint(critic, tokenizer, run.path / "critic")\n',
         f"    for k in range(2):\n        save_hf_checkpoint(critics[k], tokenizer, {path})\n"),
    ]  # fmt: skip
    ppo = train(changed_script(tmp_path, changes), rollout_batch_size=16, value_clip=0.1)
    first, second = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert first["ensemble/std"] == 0 and (second["ensemble/std"] == 0) == shared
    assert first["critic/first_dev"] == 0 and second["critic/first_dev"] < 1e-6
    one, two = (safetensors.torch.load_file(tmp_path / "run" / f"critic{k}" / "model.safetensors") for k in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one) == shared
    stats = ppo.Args(**FLAGS | dict(rollout_batch_size=16, critic_epochs=2))
    assert ppo.plan_steps(stats).critic_steps == 8


@pytest.mark.parametrize("flags, factor", [
    (dict(lr_kl=1e-9, target_kl=1e-9), 1 / 1.5),  # ends the epochs at the second minibatch
    (dict(lr_kl=1e3), 1.5),
    (dict(lr_kl=1e3, train_batch_size=16, ppo_epochs=1), 1.0),  # one step, whose KL is 0
])  # fmt: skip
def test_rate_of_the_guide_that_follows_the_kl(flags, factor, tmp_path):
    """It does not change in an iteration without steps of the actor either."""
    block = re.search(r"^- \*\*A learning rate that follows the KL.*?```python\n(.*?)  ```", GUIDE, re.M | re.S)[1]
    rule = textwrap.indent(textwrap.dedent(block), " " * 8)
    changes = [
        ("    actor_lr: float | None = None\n", "    actor_lr: float | None = None\n    lr_kl: float = 0.01\n"),
        ("    actor_steps: int = 0\n", "    actor_steps: int = 0\n    lr_factor: float = 1.0\n"),
        ("lr = linear_schedule(args.actor_lr, args.lr_end, progress)",
         "lr = state.lr_factor * linear_schedule(args.actor_lr, args.lr_end, progress)"),
        ("        # FORK: other numbers to log.", f"{rule}        # FORK: other numbers to log."),
    ]  # fmt: skip
    train(changed_script(tmp_path, changes), num_iterations=4, critic_warmup_iterations=1, actor_lr=0.01, lr_end=1.0,
          **dict(train_batch_size=8) | flags)  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["mine/lr_factor"] for row in rows] == pytest.approx([1, 1, factor, factor**2])
    assert [row["actor/lr"] for row in rows[1:]] == pytest.approx([0.01, 0.01 * factor, 0.01 * factor**2])
    if "target_kl" in flags:
        assert all(row["actor/approx_kl"] == 0 for row in rows[1:])


def test_group_of_an_optimizer_may_have_a_factor_of_the_guide(tmp_path):
    (_, line), = [guide_code("Another learning rate")]  # fmt: skip
    ppo = train(changed_script(tmp_path, [('group["lr"] = lr\n', f"{line}\n")]), num_iterations=1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([dict(params=[model.weight], factor=10.0), dict(params=[model.bias])], lr=0.0)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone(), model.bias.detach().clone()
    ppo.optimizer_step(model, optimizer, 0.1, ppo.Args(max_grad_norm=1e9))
    torch.testing.assert_close(before[0] - model.weight, torch.full((1, 2), 1.0))
    torch.testing.assert_close(before[1] - model.bias, torch.full((1,), 0.1))


def test_flags_of_patches_stand_beside_another_flag():
    """Not below a title or above the first one, where others would put theirs as well."""
    for name in PATCHES:
        text = (FOLDER / f"{name}.patch").read_text()
        for hunk in re.findall(r"^@@ .* class Args:\n(.*?)(?=^@@|\Z)", text, re.M | re.S):
            assert re.match(r"     (\w+: \w|# [^-])", hunk), (name, hunk)


NAIVE = {  # changes that look right: (text of the script, what replaces it, the error that they end with)
    "a critic at the first token of each response, whose loss is divided by the tokens of a microbatch": [
        "newvalues, mb.values, mb.returns, mb.mask, args.value_clip, denom=n_tokens",
        "newvalues, mb.values, mb.returns, starts := mb.mask & ~mb.mask.roll(1, 1), None, denom=starts.sum()",
        "denom must be the number of tokens of the whole minibatch",
    ],
    "success rates by prompt, which JSON would give names of text": [
        "    eval_before: dict | None = None\n",
        "    eval_before: dict | None = None\n    rates: dict = field(default_factory=lambda: {1048576: 0.5})\n",
        "cannot save TrainState.rates, {1048576: 0.5}, as JSON: ValueError: a resumed run would read {'1048576': 0.5}",
    ],
}


@pytest.mark.parametrize("name", NAIVE)
def test_naive_change_ends_in_the_first_iteration(name, tmp_path):
    *change, error = NAIVE[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(error)):
        train(changed_script(tmp_path, [change]))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


def test_prompts_that_differ_on_two_ranks_are_named(tmp_path):
    prompts = "range(first, first + args.rollout_batch_size)"
    script = changed_script(tmp_path, [(prompts, f"random.choices({prompts}, k=args.rollout_batch_size)")])
    flags = FLAGS | dict(eval_episodes=0, save_every=0)
    error = "UserError: the ranks differ in the seeds of the prompts: compute it identically on every rank"
    with pytest.raises(Exception, match=error):
        run_on_ranks(types.SimpleNamespace(__file__=script), tmp_path, 2, ("run", flags, None))
