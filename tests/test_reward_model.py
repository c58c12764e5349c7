"""--reward-model: its scores are those of transformers, and they are in every reward that is trained on or reported."""

import json
from unittest import mock

import pytest
import torch
from test_bad_input import model_folder, refuse
from test_checkpoints import assert_same, newest, on_call, train
from test_distributed import FEW, launch, same_run  # noqa: F401
from test_train import changed, lines, record, weights

pytestmark = [pytest.mark.shared, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
TEMPLATE = "{% for message in messages %}{{ message.role[0] }}={{ message.content }}{% endfor %}"
CONVERSATIONS = [
    [("user", "Natalia sold 48 clips"), ("assistant", "How many?")], [("user", "?"), ("assistant", "")],
    [("user", "Betty saves"), ("assistant", "for what"), ("user", "a wallet"), ("assistant", "that costs $100. " * 5)],
    [("user", "Weng earns $12 an hour for babysitting."), ("assistant", "Die Größe, 中文")],
]  # fmt: skip


@pytest.fixture
def folder(ppo, tmp_path):
    """A small random classifier with a template, whose tokenizer gives other ids than that of the embedded actor."""
    tokenizer = dict(letters="ABC=abcdefuwxyz", template=TEMPLATE)
    return str(model_folder(ppo, tmp_path / "classifier", head="scalar", vocab_size=18, **tokenizer))


def scores_of(ppo, folder, conversations):
    """By one forward pass for each, without padding."""
    model, _ = ppo.load_hf_checkpoint(folder, head="scalar")
    tokenizer = ppo.HFTokenizer(folder)
    texts = ["".join(f"{role[0]}={text}" for role, text in turns) for turns in conversations]
    return torch.stack([model(torch.tensor([tokenizer.encode(text)]))[0, -1].detach() for text in texts])


def test_a_reward_model_is_frozen(ppo, folder):
    """Compiled models score with gradients enabled: parameters that require some would keep activations."""
    args = ppo.Args(reward_model=folder, compile="on")
    parameters = [*ppo.build_reward_model(args, ppo.World(torch.device("cpu"))).model.parameters()]
    assert len(parameters) > 5 and not any(p.requires_grad for p in parameters)


@pytest.mark.parametrize("family", ["llama3-rope", "qwen2-tied", "qwen3-sharded", "qwen2-tied, ends with padding"])
@torch.no_grad()
def test_scores_are_those_of_transformers(ppo, tmp_path, family):
    """Which get one conversation at a time; ours are padded. The token that a conversation ends with may be padding."""
    transformers = pytest.importorskip("transformers")
    from test_transformers import hf_config, hf_tokenizer, randomize

    model = transformers.AutoModelForSequenceClassification.from_config(hf_config(family.split(",")[0], num_labels=1))
    randomize(model).save_pretrained(tmp_path, **{"max_shard_size": "200KB"} if "sharded" in family else {})
    hf_tokenizer().save_pretrained(tmp_path)
    if "padding" in family:
        config, last = tmp_path / "config.json", ppo.HFTokenizer(tmp_path).encode_conversation(*CONVERSATIONS[0])[-1]
        config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": last}))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = []
    for turns in CONVERSATIONS:
        messages = [{"role": role, "content": text} for role, text in turns]
        ids = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")
        expected.append(theirs(**ids).logits[0, 0])
    args = ppo.Args(reward_model=str(tmp_path))
    reward_model = ppo.build_reward_model(args, ppo.World(torch.device("cpu")))
    scores = reward_model.score(CONVERSATIONS, args, ppo.World(torch.device("cpu")))  # in one microbatch
    assert torch.stack(expected).std() > 0.1
    torch.testing.assert_close(scores, torch.stack(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("env", ["Plain", "TwoTurns"])
def test_the_score_is_in_all_rewards(ppo, folder, tmp_path, env):
    """On the last token; the metric is its mean, and accuracy is the environment's."""
    flags = dict(env_id=f"environments:{env}-v0", kl_coef=0.1, kl_in="loss", missing_eos_penalty=0.5, ppo_epochs=1)
    run = record(ppo, tmp_path, reward_model=folder, **flags)
    logged, gae = lines(run.folder, "completions"), run.calls["compute_gae"]
    for i, (row, batch) in enumerate(zip(run.rows, run.batches, strict=True)):  # as `rollout` returned it
        scores, last = scores_of(ppo, folder, batch.conversations), (torch.arange(8), batch.lengths - 1)
        assert scores.std() > 0.05 and row["objective/reward_model"] == pytest.approx(float(scores.mean()), abs=1e-5)
        rewards = batch.rewards.clone()
        rewards[last] += scores - 0.5 * (batch.tokens[last] != run.tokenizer.eos_id)
        torch.testing.assert_close(gae[i]["rewards"], rewards, rtol=0, atol=1e-5)
        torch.testing.assert_close(run.experiences[i].sample_rewards, rewards.sum(1), rtol=0, atol=1e-5)
        assert row["objective/reward"] == pytest.approx(float(rewards.sum(1).mean()), abs=1e-5)
        assert row["objective/accuracy"] == float((batch.rewards.sum(1) > 0).float().mean())
        of_lines = [line["reward"] for line in logged if line["iteration"] == i]
        assert of_lines == pytest.approx(rewards.sum(1)[:4].tolist(), abs=1e-5)
    assert [greedy for *_, greedy in run.evaluations] == [False, True, False, True]
    for when, (batch, *_) in zip(("before", "after"), run.evaluations[::2], strict=True):
        reward = batch.rewards.sum(1).mean() + scores_of(ppo, folder, batch.conversations).mean()
        assert run.summary[f"eval_{when}"]["reward"] == pytest.approx(float(reward), abs=1e-5)


def test_without_a_reward_model_there_is_no_metric(ppo, tmp_path):
    assert "objective/reward_model" not in record(ppo, tmp_path).rows[0]


def test_it_never_changes_is_in_no_checkpoint_and_a_resumed_run_is_the_uninterrupted_one(ppo, folder, tmp_path):
    flags, built = dict(num_iterations=4, save_every=2, kl_coef=0.1, reward_model=folder), []
    build = changed(ppo.build_reward_model, lambda reward_model: built.append(reward_model) or reward_model)
    with mock.patch.object(ppo, "build_reward_model", build):
        whole = train(ppo, tmp_path / "whole", **flags)
    assert {path.name for path in newest(whole).glob("*/")} == {"actor", "critic", "reference"}
    model = ppo.load_hf_checkpoint(folder, head="scalar")[0]
    assert torch.equal(weights(built[0].model), weights(model))
    power_cut = mock.Mock(side_effect=RuntimeError("power cut"))  # in the third iteration, after an evaluation
    with on_call(ppo, "add_scores", 4, power_cut), pytest.raises(RuntimeError, match="power cut"):
        train(ppo, tmp_path, **flags)
    assert newest(tmp_path / "run").name == "iter_000002"
    assert_same(whole, train(ppo, tmp_path, resume="auto", **flags))
    assert [row["iteration"] for row in lines(tmp_path / "run")] == [0, 1, 2, 3]


def test_two_ranks_give_the_numbers_of_one_process(ppo, folder, launch):  # noqa: F811
    """Of three samples, so that in scoring, too, a rank has fewer than the other; the model is sharded."""
    flags = FEW | dict(reward_model=folder, env_id="environments:TwoTurns-v0")
    one, two = (launch(ppo, ranks, ("scored", flags, None)) / "scored" for ranks in (1, 2))
    same_run(two, one)
    results = [json.loads((run / "summary.json").read_text())["eval_after"]["reward"] for run in (one, two)]
    assert results[0] == pytest.approx(results[1], abs=1e-4) and abs(lines(one)[0]["objective/reward_model"]) > 1e-3


BROKEN = "{{ raise_exception('only system messages') }}"
TWO_LABELS = {"score.weight": torch.ones(2, 16)}


@pytest.mark.parametrize(("parts", "changes"), [
    (["score.weight is missing in the files, [1, 16] in the model"], dict(head="lm")),
    (["score.weight is [2, 16] in the files, [1, 16] in the model"], dict(tensors=TWO_LABELS)),
    (["a vocabulary of 11, the tokenizer needs 12"], dict(vocab_size=11)),
    (["cannot render the chat template of", "only system messages"], dict(template=BROKEN)),
    (["gpt2", "qwen2"], dict(edit={"model_type": "gpt2"})),
])  # fmt: skip
def test_a_folder_that_is_no_reward_model_is_refused_before_the_run(ppo, tmp_path, parts, changes):
    path = model_folder(ppo, tmp_path / "classifier", **dict(head="scalar") | changes)
    refuse(ppo, tmp_path, path, *parts, reward_model=str(path))


def test_a_folder_that_is_not_there_and_a_conversation_that_is_too_long(ppo, tmp_path):
    refuse(ppo, tmp_path, "cannot read", "nowhere/config.json", "No such file", reward_model=str(tmp_path / "nowhere"))
    path = model_folder(ppo, tmp_path / "short", head="scalar", max_position_embeddings=3)
    refuse(ppo, tmp_path, f"{path}: 3 positions, a conversation has ", begun=True, reward_model=str(path))
