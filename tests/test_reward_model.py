"""--reward-model: its scores are those of transformers, and they are in every reward that is trained on or reported."""

import json
from unittest import mock

import pytest
import torch
from distributed_worker import on_call
from test_checkpoints import newest, tensors_of, train
from test_train import lines
from test_transformers import CAUSAL, CLASSIFIER, chat, hf_folder, load_theirs

pytestmark = pytest.mark.shared

TEMPLATE = "{% for message in messages %}{{ message.role[0] }}={{ message.content }}{% endfor %}"
CONVERSATIONS = list(map(chat, [
    [("user", "Natalia sold 48 clips"), ("assistant", "How many?")], [("user", "?"), ("assistant", "")],
    [("user", "Betty saves"), ("assistant", "for what"), ("user", "a wallet"), ("assistant", "that costs $100. " * 5)],
    [("user", "Weng earns $12 an hour for babysitting."), ("assistant", "Die Größe, 中文")],
]))  # fmt: skip


def classifier(folder, family="qwen2, tied", template=TEMPLATE, auto=CLASSIFIER, **changes):
    """A random one, with a template of its own, whose tokenizer gives other ids than that of the embedded actor."""
    hf_folder(folder, family, auto, **dict(num_labels=1) | changes)
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


@torch.no_grad()
def scores_of_transformers(folder, conversations):
    """Of a batch, padded."""
    model, tokenizer = load_theirs(folder, CLASSIFIER)
    tokenizer.pad_token_id = model.config.pad_token_id
    batch = tokenizer.apply_chat_template(conversations, padding=True, return_tensors="pt")
    return model(**batch).logits[:, 0]


@pytest.mark.parametrize("family", ["llama3 rope", "qwen2, tied", "qwen3, several files", "qwen2, ends with padding"])
def test_scores_are_those_of_transformers(ppo, tmp_path, family):
    """Also if the last token of a conversation is the one that pads."""
    folder = classifier(tmp_path, family.replace("ends with padding", "tied"))
    if "padding" in family:
        config, last = tmp_path / "config.json", ppo.HFTokenizer(folder).encode_conversation(CONVERSATIONS[0])[-1]
        config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": last}))
    args = ppo.fill_in_defaults(ppo.Args(reward_model=folder, device="cpu"))
    episodes = [ppo.Episode(env_seed=0, rewards=[0.25, 0.5], conversation=turns) for turns in CONVERSATIONS]
    ppo.set_scores(episodes, ppo.frozen_model(folder, "scalar", args), args)
    expected = scores_of_transformers(folder, CONVERSATIONS)
    assert expected.std() > 0.1
    torch.testing.assert_close(torch.tensor([e.score for e in episodes]), expected, rtol=0, atol=1e-5)
    assert all(e.rewards == [0.25, 0.5] for e in episodes)  # make_experience adds the score


def test_the_score_is_in_all_rewards(ppo, tmp_path):
    """On the last token, in training and evaluations; accuracy is the environment's."""
    folder, means, set_scores = classifier(tmp_path / "classifier"), [], ppo.set_scores

    def scores_seen(episodes, *rest):
        expected = scores_of_transformers(folder, [e.conversation for e in episodes])
        rewards = torch.tensor([sum(e.rewards) for e in episodes]) + expected
        means.append([float(rewards.mean()), float(expected.mean()), sum(e.success for e in episodes) / len(episodes)])
        set_scores(episodes, *rest)

    compute_gae = mock.Mock(wraps=ppo.compute_gae)
    with mock.patch.multiple(ppo, set_scores=scores_seen, compute_gae=compute_gae):
        flags = dict(env_id="environments:Constant-v0", env_kwargs='{"reward": 0.5}')  # on each last token
        run = train(ppo, tmp_path, reward_model=folder, eval_every=0, num_iterations=1, **flags)
    (before, *_), rollout, (after, *_) = means
    [row], summary = lines(run), json.loads((run / "summary.json").read_text())
    names = ("objective/reward", "objective/reward_model", "objective/accuracy")
    assert [row[name] for name in names] == pytest.approx(rollout, abs=1e-5) and abs(rollout[1]) > 0.001
    assert float(compute_gae.call_args_list[0].args[0].sum(1).mean()) == pytest.approx(rollout[0], abs=1e-5)
    assert summary["eval_before"]["reward"] == pytest.approx(before, abs=1e-5)
    assert summary["eval_after"]["reward"] == pytest.approx(after, abs=1e-5)


def test_it_never_changes_and_is_in_no_checkpoint(ppo, tmp_path):
    folder, seen = classifier(tmp_path / "classifier"), []
    with on_call(ppo, "set_scores", 4, lambda _, reward_model, args: seen.append(reward_model[0])):
        run = train(ppo, tmp_path, reward_model=folder)
    assert not any(p.requires_grad for p in seen[0].parameters())  # else compiled scoring would keep activations
    fresh = ppo.load_hf_checkpoint(folder, "scalar")[0].state_dict()
    assert all(torch.equal(x, fresh[name]) for name, x in seen[0].state_dict().items())
    assert {name.split(".")[0] for name in tensors_of(newest(run))} == {"actor", "critic", "reference"}


@pytest.mark.parametrize(("error", "changes"), [
    ("the files lack score.weight", dict(auto=CAUSAL)),
    (r"Size mismatch .*\[2, 64\].*\[1, 64\]\) for score.weight", dict(num_labels=2)),
    ("cannot render with {} the chat template of .*no users", dict(template="{{ raise_exception('no users') }}")),
    ("--max-new-tokens: .* takes at most 3", dict(max_position_embeddings=3)),
])  # fmt: skip
def test_a_folder_that_is_no_reward_model_is_refused(ppo, tmp_path, error, changes):
    with pytest.raises(ppo.UserError, match=error):
        train(ppo, tmp_path, reward_model=classifier(tmp_path / "classifier", **changes))
