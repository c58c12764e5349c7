"""--critic-model: what a critic may start from, and that its export can be the next start."""

import dataclasses
from unittest import mock

import pytest
import torch
from distributed_worker import on_call
from test_checkpoints import tensors_of, train
from test_distributed import FEW, launch, same_run  # noqa: F401
from test_train import changed, lines, without_clock
from test_transformers import CLASSIFIER, VOCABULARY, hf_folder

pytestmark = pytest.mark.shared

SMALLER = dict(auto=CLASSIFIER, num_labels=1, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)


@pytest.fixture
def flags(tmp_path):
    """Of a run with a random actor of 330 ids, of which its tokenizer uses 320; it samples them all."""
    sizes = dict(max_prompt_tokens=32, max_new_tokens=40, num_iterations=1, lr_end=1.0, sft_steps=0)
    return sizes | dict(model=str(hf_folder(tmp_path / "actor", hidden_size=32)))


def test_a_language_model_gets_the_head_of_zeros_that_a_copy_of_the_actor_has(ppo, flags, tmp_path):
    copy = train(ppo, tmp_path, **flags)
    loaded = train(ppo, tmp_path, **flags | dict(run_name="loaded", critic_model=flags["model"]))
    assert without_clock(lines(copy)) == without_clock(lines(loaded)) != []
    assert lines(copy)[0]["critic/value_mean"] == 0 and tensors_of(copy / "critic")["score.weight"].any()


def test_it_starts_from_a_classifier_of_another_size_and_its_export_can_be_the_next_start(ppo, flags, tmp_path):
    """Here one with fewer ids, of which the tokenizer uses all."""
    folder = hf_folder(tmp_path / "classifier", vocab_size=VOCABULARY - 5, **SMALLER)
    classifier, seen = ppo.load_hf_checkpoint(folder, "scalar")[0], []
    with on_call(ppo, "minibatches", 1, lambda experience, *_: seen.append(experience)):
        run = train(ppo, tmp_path, **flags, critic_model=str(folder))
    [experience] = seen
    assert experience.tokens.max() >= classifier.config.vocab_size
    values = classifier(experience.tokens.clamp(max=classifier.config.vocab_size - 1)).detach()  # after each token
    expected = values.roll(1, 1) * experience.mask  # the first token was not sampled
    assert values.std() > 0.01 and lines(run)[0]["critic/lr"] == 0.064 / 16
    torch.testing.assert_close(experience.values, expected, rtol=0, atol=1e-5)

    exported = tensors_of(run / "critic")
    assert not torch.equal(exported["score.weight"], classifier.score.weight)  # it has learned
    args = ppo.fill_in_defaults(ppo.Args(**flags, critic_model=str(run / "critic"), device="cpu"))
    critic = ppo.build_critic(*reversed(ppo.build_actor(args, ppo.SortDigits())), args)
    assert all(torch.equal(x, exported[name]) for name, x in critic.named_parameters())


def test_first_values_that_are_not_those_of_the_experience_end_the_run(ppo, flags, tmp_path):
    folder = hf_folder(tmp_path / "classifier", **SMALLER)
    half = changed(ppo.make_experience, lambda e: dataclasses.replace(e, values=e.values / 2))
    error = pytest.raises(ppo.UserError, match="first values of the critic are not those of the experience")
    with mock.patch.object(ppo, "make_experience", half), error:
        train(ppo, tmp_path, **flags, critic_model=str(folder))


def test_another_vocabulary_is_refused(ppo, flags, tmp_path):
    tokenizer, model = ppo.embedded_model(ppo.Args(max_prompt_tokens=32, max_new_tokens=40), ppo.SortDigits())
    ppo.save_hf_checkpoint(model, tokenizer, tmp_path / "digits")
    with pytest.raises(ppo.UserError, match=r"^\S*digits: its vocabulary is not that of the actor"):
        train(ppo, tmp_path, **flags, critic_model=str(tmp_path / "digits"))


@pytest.mark.slow
def test_two_ranks_give_the_numbers_of_one_process(ppo, flags, launch, tmp_path):  # noqa: F811
    """With a critic and a reward model from folders, and so few samples that a rank has none."""
    folders = {name: str(hf_folder(tmp_path / name, **SMALLER)) for name in ("critic_model", "reward_model")}
    plan = "run", FEW | flags | folders, None
    one, two = (launch(ppo, ranks, plan) / "run" for ranks in (1, 2))
    same_run(two, one)
    assert abs(lines(one)[0]["objective/reward_model"]) > 1e-3
