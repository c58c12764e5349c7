"""The projects of docs/projects.md: their commands, patches, environments, tables and numbers."""

import importlib.util
import re
import shlex
import sys

import gymnasium as gym
import pytest
import torch
import tyro
from conftest import ROOT, slow_but
from test_forks import experiences, train

pytestmark = pytest.mark.shared
sys.path.append(str(ROOT / "benchmarks"))
import projects  # noqa: E402
import tasks  # noqa: E402

SEEDS = [1, 2, 3]
RUNS = [run for name in projects.PROJECTS for run in projects.runs(name)]
PATCHED = {run.patches[0]: run for run in RUNS if run.patches}


PAGE = projects.PAGE.read_text()


def anchor(heading):
    return heading.lower().replace(" ", "-")


def load(script):
    spec = importlib.util.spec_from_file_location("ppo_llm", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flags_of(run):
    return shlex.split(run.command)[2:]


@pytest.mark.parametrize("patch", slow_but([None], [None, *PATCHED]))
def test_the_commands_of_the_page_are_valid(patch, tmp_path, monkeypatch):
    """Flags are those of the script with its patch, environments are those of the page."""
    runs = [run for run in RUNS if run.patches == ((patch,) if patch else ())]
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(ROOT), *sys.path])
    for run in runs:
        projects.prepare(run, tmp_path)
    ppo = load(tmp_path / "ppo_llm.py") if patch else importlib.import_module("ppo_llm")
    for run in runs:
        args = ppo.fill_in_defaults(tyro.cli(ppo.Args, args=flags_of(run)))
        args.rollout_batch_size = args.n_samples_per_prompt = 1  # an environment, not 256
        with ppo.make_envs(args) as envs:
            pass
        prompt, info = envs[0].reset(seed=ppo.FIRST_TRAINING_SEED)
        assert prompt.endswith("=") and len(envs[0].step(info["demonstration"])) == 5
    assert runs


@pytest.mark.parametrize("name", projects.PROJECTS)
def test_a_project_is_small(name):
    """A patch changes at most 20 lines, and a module has at most 20."""
    for run in projects.runs(name):
        for file, text in run.files:
            changed = re.findall(r"^[+-](?![+-]{2} ).*", text, re.M) if file.endswith(".patch") else text.split("\n")
            assert 0 < len([line for line in changed if line.strip()]) <= 20, file
    rows = projects.results().values()
    minutes = [sum(projects.results()[run.key(seed)]["seconds"] for run in projects.runs(name)) / 60 for seed in SEEDS]
    assert rows and max(minutes) < 30


def test_every_run_of_the_data_is_one_of_the_page():
    made = {key for key in projects.results() if key[2] in SEEDS}  # A reader adds other seeds.
    assert made == {run.key(seed) for run in RUNS for seed in SEEDS}


NUMBER = r"(?<![\w.])-?\d+(?:[.,]\d+)*"


@pytest.mark.parametrize("name", projects.PROJECTS)
def test_the_answers_show_what_the_data_says(name):
    """The table is that of the data. Other numbers of the answer are in the table or in the task, or in quotations."""
    section = projects.sections()[name]
    [answer] = re.findall(r"^<details><summary>Answer</summary>\n(.*?)^</details>", section, re.M | re.S)
    table = projects.table(name, SEEDS)
    assert table in answer and all(cell.strip() for row in table.splitlines()[2:] for cell in row[1:-1].split("|"))
    known = set(re.findall(NUMBER, section.replace(answer, "") + table))
    prose = re.sub(r"\]\(.*?\)|^\|.*|`.*?`", "", answer, flags=re.M)
    assert set(re.findall(NUMBER, prose)) <= known
    assert f"project_{name}.png" in answer
    overview = re.search(rf"^\| \[.*\]\(#{anchor(projects.PROJECTS[name].heading)}\) \| .* \| (\d+) \|$", PAGE, re.M)
    assert int(overview[1]) == projects.minutes(name, SEEDS)


SHOWN = """lambda, right at the end: at the end, lambda 0 < at the end, lambda 1 ~ dense, lambda 1 < dense, lambda 0.5
lambda, right at the end: dense, lambda 0.5 ~ dense, lambda 0
lambda, reward at the end: at the end, lambda 1 ~ dense, lambda 1 < dense, lambda 0
critic, reward after 40 iterations: groups of four < constant baseline < critic
critic, reward at the end: groups of four < constant baseline < critic
kl, KL at the end: in the loss, k2, 0.4 < in the reward, 0.08 < in the loss, k3, 0.08
kl, KL at the end: in the reward, 0.08 < in the loss, k2, 0.08
kl, reward at the end: in the loss, k2, 0.08 ~ in the loss, k3, 0.08
kl, right at the end: in the loss, k2, 0.08 ~ in the loss, k3, 0.08
epochs, reward at the end: 8 epochs, not clipped < 2 epochs, not clipped < 2 epochs, clipped < 8 epochs, clipped
epochs, approx_kl: 8 epochs, clipped ~ 2 epochs, not clipped < 8 epochs, not clipped
length, reward at the end: 0.1 per token < 0.1, right answers only < 0.03 per token ~ 0.01 per token ~ no penalty
length, right at the end: 0.03 per token ~ no penalty
length, right at the end: 0.01 per token ~ no penalty
length, tokens, iterations 6: 0.1 per token < 0.03 per token < no penalty
hack, right at the end: hole, KL x 0.001 < hole, KL x 0.03 ~ hole, KL x 0.1 < repaired, KL x 0.001
hack, right, greedy: hole, KL x 0.001 < hole, KL x 0.03 < hole, KL x 0.1
hack, KL at the end: hole, KL x 0.03 < repaired, KL x 0.001 < hole, KL x 0.001
sampler, reward at the end: 4 bits, of the sampler < 4 bits, recomputed ~ bfloat16, recomputed
sampler, reward at the end: bfloat16, of the sampler ~ bfloat16, recomputed
sampler, right at the end: bfloat16, of the sampler ~ bfloat16, recomputed ~ 4 bits, recomputed
curriculum, after 60: five digits only < curriculum < mixture of two to five
curriculum, after 80: five digits only < mixture of two to five < curriculum
curriculum, after 100 iterations: five digits only < mixture of two to five < curriculum""".splitlines()


@pytest.mark.parametrize("claim", SHOWN)
def test_a_difference_is_shown_where_the_answer_says_so(claim):
    """a < b: all seeds of a are below all seeds of b. a ~ b: they overlap, and no difference is shown."""
    subject, order = claim.split(": ")
    name, title = subject.split(", ", 1)
    [column] = [column for column in projects.PROJECTS[name].columns if column.title.startswith(title)]
    variants = {run.variant: [column.number(row) for row in projects.of(run, SEEDS)] for run in projects.runs(name)}
    first, *rest = re.split(" ([<~]) ", order)
    for sign, second in zip(rest[::2], rest[1::2]):
        low, high = variants[first], variants[second]
        below, above = max(low) < min(high), min(low) > max(high)
        assert below if sign == "<" else not below and not above, (first, low, second, high)
        first = second


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Makes an environment of the page."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(ROOT), *sys.path])
    importlib.import_module("ppo_llm")
    for name in ("lambda", "hack", "curriculum"):
        projects.prepare(projects.runs(name)[0], tmp_path)
    return lambda name, **kwargs: gym.make(name, disable_env_checker=True, **kwargs)


def test_dense_rewards_stand_at_the_right_digits_and_sum_to_the_reward_of_the_default_task(environment):
    dense, default = environment("dense_sort:DenseSort-v0"), environment("SortDigits-v0")
    for env in (dense, default):
        env.reset(seed=3)
    answer = default.unwrapped.answer
    wrong = answer[:2] + chr(ord(answer[2]) ^ 1) + answer[3:]
    assert [end for end, _ in dense.step(wrong)[-1]["rewards"]] == [1, 2, 4, 5]
    for response in (answer, wrong, answer[:4], answer + "1", ""):
        _, reward, _, _, info = dense.step(response)
        expected = default.step(response)
        assert reward + sum(x for _, x in info["rewards"]) == pytest.approx(expected[1])
        assert info["success"] == expected[-1]["success"]


def test_the_repaired_reward_asks_for_the_digits_of_the_prompt(environment):
    hole, repaired = environment("benchmarks.tasks:Ascending-v0"), environment("repaired:Repaired-v0")
    for env in (hole, repaired):
        env.reset(seed=3)
    answer = hole.unwrapped.answer
    rewards = lambda response: (hole.step(response)[1], repaired.step(response)[1])
    assert rewards(answer) == (1, 1)
    lowest = answer[0]
    assert rewards(5 * lowest) == (1, answer.count(lowest) / 5)
    backwards = rewards(answer[::-1])
    assert backwards[0] == backwards[1] < 1


def test_levels(environment):
    env = environment("levels:Levels-v0")
    for seed in range(8):
        prompt, _ = env.reset(seed=seed)
        assert len(prompt) == 2 + seed % 4 + 1
        answer = "".join(sorted(prompt[:-1]))
        assert (env.step(answer)[1], env.step(answer[:-1] + "x")[1]) == (1, 0)
        assert len(environment("levels:Levels-v0", easiest=5).reset(seed=seed)[0]) == 6


def trained(patch, folder, prepare=lambda ppo: None, **flags):
    projects.prepare(PATCHED[patch], folder)
    return train(folder / "ppo_llm.py", prepare, **flags)


def test_the_curriculum_has_a_level_for_each_fifth_of_the_run_and_two_for_the_last(environment, tmp_path):
    ppo = trained("curriculum.patch", tmp_path, num_iterations=5, env_id="levels:Levels-v0")
    rollouts = [episodes for (*_, iteration, _), episodes in ppo.calls["rollout"] if iteration >= 0]
    assert [{e.prompt_length for e in episodes} for episodes in rollouts] == [{3}, {4}, {5}, {6}, {6}]


@pytest.mark.parametrize("success_only", [False, True])
def test_the_length_penalty_is_in_the_returns_and_not_in_the_logged_reward(success_only, tmp_path):
    def every_other_succeeds(ppo):
        end_turn = ppo.Episode.end_turn

        def changed(episode, *args):
            end_turn(episode, *args)
            episode.success = episode.env_seed % 2 == 0

        ppo.Episode.end_turn = changed

    flags = dict(length_penalty=0.2, penalise_success_only=success_only, critic_epochs=0, kl_coef=0.0)
    ppo = trained("length.patch", tmp_path, every_other_succeeds, **flags)
    for (episodes, *_), e in ppo.calls["make_experience"]:
        penalised = torch.tensor([each.success or not success_only for each in episodes])
        assert penalised.any() and penalised.all() != success_only
        torch.testing.assert_close(e.rewards.sum(1), torch.tensor([sum(each.rewards) for each in episodes]))
        for row, returns in enumerate(e.returns):
            expected = e.rewards[row].sum() - 0.2 * e.mask[row].sum() * penalised[row]
            torch.testing.assert_close(returns[e.mask[row]][0], expected)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_sampler_has_another_precision_than_the_actor(recompute, tmp_path):
    ppo = trained("sampler.patch", tmp_path, sampler_dtype="bfloat16", recompute_old_logprobs=recompute)
    (decoder, *_), _ = ppo.calls["rollout"][-1]
    (_, (_, actor)), = ppo.calls["build_actor"]  # fmt: skip
    assert {p.dtype for p in decoder.sampler.parameters()} == {torch.bfloat16} != {p.dtype for p in actor.parameters()}
    for e in experiences(ppo):
        assert torch.equal(e.old_logprobs, e.sampler_logprobs) != recompute


def test_the_weights_of_the_sampler_are_rounded_to_few_bits(tmp_path):
    ppo = trained("sampler.patch", tmp_path, sampler_bits=3)
    (decoder, *_), _ = ppo.calls["rollout"][-1]
    (_, (_, actor)), = ppo.calls["build_actor"]  # fmt: skip
    for rounded, p in zip(decoder.sampler.parameters(), actor.parameters(), strict=True):
        assert len(rounded.unique()) <= 2**3 - 1
        assert (rounded - p).abs().max() <= 1.01 * p.abs().max() / 3 / 2


def test_a_sum_and_its_swapped_sum_are_on_one_side_of_the_split():
    for digits, held_out in (1, 20), (2, 1994):
        train, test = (tasks.Sums(split=split, digits=digits).rows for split in ("train", "test"))
        assert len(train) == 100**digits - held_out and len(test) == held_out
        assert len({*train, *test}) == 100**digits
        assert not {(b, a) for a, b in test} & set(train)
    assert tasks.Sums(order=1).rows != tasks.Sums(order=2).rows


@pytest.mark.slow
@pytest.mark.parametrize("name", projects.PROJECTS)
def test_a_project_is_drawn(name, tmp_path):
    """The runs of its first length, with their names."""
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    projects.draw(name, SEEDS, tmp_path)
    lengths = {run.variant: len(projects.of(run, SEEDS)[0]["columns"]["reward"]) for run in projects.runs(name)}
    drawn = [variant for variant, length in lengths.items() if length == next(iter(lengths.values()))]
    assert [text.get_text() for text in plt.gcf().axes[0].get_legend().get_texts()] == drawn
    assert (tmp_path / f"project_{name}.png").stat().st_size > 1000
