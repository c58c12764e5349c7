"""--critic-model: what a critic may start from, that it is exported so that it can be a start, and what is refused."""

import json

import pytest
import torch
from test_bad_input import model_folder, refuse
from test_checkpoints import assert_same, newest, on_call, train
from test_distributed import FEW, launch, same_run  # noqa: F401
from test_train import lines, record, weights, without_clock

pytestmark = [pytest.mark.shared, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
TOKENIZER = dict(vocab_size=19, letters="ABC=abcdefuwxyz")
FITS = dict(max_prompt_tokens=16, max_new_tokens=8, critic_lr=1e-3)
SMALLER = dict(hidden_size=8, intermediate_size=8, num_attention_heads=1)  # the actor is 16 wide


@pytest.fixture
def actor(ppo, tmp_path):
    return str(model_folder(ppo, tmp_path / "actor", num_hidden_layers=2, **TOKENIZER))


def start(ppo, path, **settings):
    """A folder to start a critic from. A random head gives values that are not near 0."""
    return str(model_folder(ppo, path, **TOKENIZER | dict(head="scalar") | settings))


def test_a_language_model_gets_the_head_of_zeros_that_a_copy_of_the_actor_has(ppo, actor, tmp_path):
    flags = FITS | dict(model=actor, kl_coef=0.1)
    default = record(ppo, tmp_path, run_name="default", **flags)
    explicit = record(ppo, tmp_path, run_name="explicit", critic_model=actor, **flags)
    assert without_clock(default.rows) == without_clock(explicit.rows)
    assert not explicit.experiences[0].values.any() and explicit.experiences[1].values.any()


def test_values_rise_equally_fast_for_all_widths_with_the_default_learning_rate(ppo, tmp_path):
    rises = []
    for width in (64, 256, 512):
        folder = str(model_folder(ppo, tmp_path / f"actor{width}", hidden_size=width, **TOKENIZER))
        flags = FITS | dict(model=folder, critic_lr=None, value_clip=None, run_name=f"run{width}")
        run = record(ppo, tmp_path, env_id="environments:Constant-v0", **flags)
        assert max(lr for model, lr, _ in run.steps if model == "critic") == 0.064 / width
        experience = run.experiences[1]
        rises.append(float(experience.values[experience.mask].mean()))
    assert min(rises) > 0.01 and max(rises) < 1.5 * min(rises), rises


def test_the_critic_may_lack_ids_that_its_tokenizer_does_not_use(ppo, tmp_path):
    """The actor samples them all the same: of its random weights each id is equally likely."""
    actor = str(model_folder(ppo, tmp_path / "padded", **TOKENIZER | dict(vocab_size=30)))
    critic = start(ppo, tmp_path / "critic", vocab_size=20)
    for flags in (dict(run_name="a"), dict(run_name="b", bootstrap_truncated=True)):
        run = record(ppo, tmp_path, model=actor, critic_model=critic, **FITS | flags)
        assert max(int(experience.tokens.max()) for experience in run.experiences) >= 20


@pytest.mark.parametrize("settings", [dict(num_hidden_layers=2), SMALLER])
def test_it_starts_with_the_values_of_the_classifier_and_its_export_can_be_the_next_start(
    ppo, actor, tmp_path, settings
):
    folder = start(ppo, tmp_path / "classifier", **settings)
    run = record(ppo, tmp_path, model=actor, critic_model=folder, **FITS)
    classifier, experience = ppo.load_hf_checkpoint(folder, head="scalar")[0], run.experiences[0]
    values = classifier(experience.tokens).detach()  # after each token
    expected = torch.zeros_like(values)
    expected[:, 1:] = values[:, :-1] * experience.mask[:, 1:]
    assert values.std() > 0.01
    torch.testing.assert_close(experience.values, expected, rtol=0, atol=1e-6)
    assert not torch.equal(weights(run.models["critic"]), weights(classifier))  # it has learned

    export = run.folder / "critic"
    again = record(ppo, tmp_path, model=actor, critic_model=str(export), run_name="again", **FITS)
    assert torch.equal(again.weights[0]["critic"], weights(run.models["critic"]))
    reward_model = ppo.build_reward_model(ppo.Args(reward_model=str(export)), ppo.World(torch.device("cpu")))
    assert torch.equal(weights(reward_model.model), weights(run.models["critic"]))


@pytest.mark.parametrize("family", ["llama3-rope", "llama-biased", "qwen2-tied", "qwen3-tied"])
@torch.no_grad()
def test_transformers_loads_the_exported_critic_with_the_same_values(ppo, tmp_path, family):
    transformers = pytest.importorskip("transformers")
    from test_transformers import VOCABULARY, hf_config, hf_tokenizer, randomize

    language_model = transformers.AutoModelForCausalLM.from_config(hf_config(family))
    randomize(language_model).save_pretrained(tmp_path / "model")
    hf_tokenizer().save_pretrained(tmp_path / "model")
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    raw.pop("pad_token_id")  # many checkpoints have none; transformers cannot pad a batch for such a classifier
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
    args, world = ppo.Args(critic_model=str(tmp_path / "model")), ppo.World(torch.device("cpu"))
    config, tokenizer = ppo.load_config_and_tokenizer(args.critic_model)
    critic = ppo.build_model(config, "scalar", args, world)
    ppo.load_weights(critic, args.critic_model, needs_head=False)
    torch.nn.init.normal_(critic.score.weight)
    ppo.save_hf_checkpoint(critic, tokenizer, tmp_path / "critic")

    automatic = transformers.AutoModelForSequenceClassification
    theirs, loading = automatic.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not any(loading.values()) and theirs.config.num_labels == 1
    assert type(theirs).__name__ == theirs.config.architectures[0]
    tokens = torch.randint(3, VOCABULARY, (4, 30))
    values = critic(tokens)  # [B, T]
    assert values.std() > 0.5
    torch.testing.assert_close(values[:, -1], theirs.eval()(tokens).logits[:, 0], rtol=1e-4, atol=1e-4)
    tokens[1, 12:] = theirs.config.pad_token_id  # they find the last real token by it
    torch.testing.assert_close(values[1, 11], theirs(tokens).logits[1, 0], rtol=1e-4, atol=1e-4)


def test_a_resumed_run_is_the_uninterrupted_one(ppo, actor, tmp_path):
    folder = start(ppo, tmp_path / "start", **SMALLER)
    flags = FITS | dict(model=actor, critic_model=folder, num_iterations=4, save_every=2)
    whole = train(ppo, tmp_path / "whole", **flags)
    with on_call(ppo, "make_experience", 4, lambda: 1 / 0), pytest.raises(ZeroDivisionError):
        train(ppo, tmp_path, **flags)
    assert newest(tmp_path / "run").name == "iter_000002"
    assert_same(whole, train(ppo, tmp_path, resume="auto", **flags))
    files = (path / "critic" / "model.safetensors" for path in (whole, tmp_path / "run"))
    assert len({file.read_bytes() for file in files}) == 1


def test_two_ranks_give_the_numbers_of_one_process(ppo, actor, tmp_path, launch):  # noqa: F811
    folder = start(ppo, tmp_path / "start", **SMALLER)
    flags = FEW | FITS | dict(model=actor, critic_model=folder, env_id="environments:Plain-v0")
    one, two = (launch(ppo, ranks, ("critic", flags, None)) / "critic" for ranks in (1, 2))
    same_run(two, one)
    assert abs(lines(one)[0]["losses/value_loss"]) > 1e-4
    exports = [ppo.load_hf_checkpoint(run / "critic", head="scalar")[0] for run in (one, two)]
    torch.testing.assert_close(*map(weights, exports), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("parts", "changes"), [
    (["a critic reads the actor's tokens", "another vocabulary"], dict(letters="ABC=abcdefuwxyZ")),
    (["a vocabulary of 18, the tokenizer needs 19"], dict(vocab_size=18, letters="ABC=abcdefuwxyz!")),
    (["score.weight is [2, 16] in the files, [1, 16] in the model"], dict(tensors={"score.weight": torch.ones(2, 16)})),
    (["model.norm.weight is [8] in the files, [16] in"], dict(tensors={"model.norm.weight": torch.ones(8)})),
    ([": 12 positions, --max-prompt-tokens + --max-new-tokens need 13"], dict(max_position_embeddings=12)),
    (["gpt2", "qwen2"], dict(edit={"model_type": "gpt2"})),
])  # fmt: skip
def test_a_folder_that_does_not_fit_the_actor_is_refused_before_the_run(ppo, actor, tmp_path, parts, changes):
    path = start(ppo, tmp_path / "critic", **changes)
    refuse(ppo, tmp_path, path, *parts, model=actor, critic_model=path, max_prompt_tokens=8, max_new_tokens=5)


def test_a_folder_that_is_not_there_is_refused(ppo, actor, tmp_path):
    parts = "cannot read", "nowhere/config.json", "No such file"
    refuse(ppo, tmp_path, *parts, model=actor, critic_model=str(tmp_path / "nowhere"))
