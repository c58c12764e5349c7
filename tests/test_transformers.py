"""Parity with transformers: logits, scores, templates, exports and greedy text, on small random checkpoints."""

import json

import gymnasium as gym
import pytest
import tokenizers
import torch

pytestmark = pytest.mark.shared

transformers = pytest.importorskip("transformers")

SENTENCES = [
    "Natalia sold 48 clips in April, and half as many in May. How many did she sell altogether?",
    "Weng earns $12 an hour for babysitting; yesterday she did 50 minutes of it. #### 10",
    "Betty saves for a wallet that costs $100. Die Größe ist naïve, 中文 is here too.",
]
CHATML = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# AutoTokenizer gives Qwen2 checkpoints this pattern, whatever their tokenizer.json says.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
FAMILIES = {
    "qwen2": (transformers.Qwen2Config, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"num_key_value_heads": 2, "head_dim": 24, "tie_word_embeddings": False}),
    "llama": (transformers.LlamaConfig, {"num_key_value_heads": 4, "rope_parameters": LLAMA3_ROPE}),
    "llama-biased": (transformers.LlamaConfig, {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
}
VOCABULARY = 330  # more than the tokenizer has: real checkpoints have padding rows


def hf_tokenizer():
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    pre = tokenizers.pre_tokenizers
    split = pre.Split(tokenizers.Regex(QWEN2_WORDS), "isolated")
    bpe.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.normalizer = tokenizers.normalizers.NFC()
    bpe.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre.ByteLevel.alphabet()
    bpe.train_from_iterator(
        SENTENCES * 3,
        tokenizers.trainers.BpeTrainer(
            vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )


def hf_config(family, **changes):
    kind, settings = FAMILIES[family]
    return kind(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=2, pad_token_id=0, **settings | changes,
    )  # fmt: skip


def randomize(model):
    """Every parameter random, norms and biases too: one that is not loaded then shows. Fixed by the seed."""
    generator = torch.Generator().manual_seed(3)
    for p in {p.data_ptr(): p for p in model.parameters()}.values():
        p.data = float(p.ndim == 1) + 0.2 * torch.randn(p.shape, generator=generator)
    return model.eval()


def write_checkpoint(folder, family, **save):
    model = transformers.AutoModelForCausalLM.from_config(hf_config(family))
    model.tie_weights()
    randomize(model).save_pretrained(folder, **save)
    hf_tokenizer().save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    """(folder, the model of transformers): one folder a family, that of Qwen3 sharded."""
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(folder, request.param, **{"max_shard_size": "200KB"} if request.param == "qwen3" else {})
    assert (request.param == "qwen3") == (folder / "model.safetensors.index.json").exists()
    return folder, transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def assert_same_logits(ours, theirs, tolerance=1e-4):
    """Over a length at which rotary scaling and the order of heads matter; the logits must not be near zero."""
    tokens = torch.randint(VOCABULARY, (2, 100), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert expected.std() > 0.5
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=tolerance)


def test_logits_are_those_of_transformers(ppo, checkpoint):
    folder, theirs = checkpoint
    ours, _ = ppo.load_hf_checkpoint(folder)
    assert_same_logits(ours, theirs)


def test_text_and_ids_are_those_of_transformers(ppo, checkpoint):
    folder, _ = checkpoint
    ours, theirs = ppo.HFTokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in [*SENTENCES, "", " x\n\n y", "🙂 é"]:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text) == ids and ours.decode(ids) == text
    assert (ours.eos_id, ours.pad_id, ours.stop_ids) == (theirs.eos_token_id, theirs.pad_token_id, [2])


def chat_ids(tokenizer, *turns):
    messages = [{"role": role, "content": text} for role, text in turns]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_prompts_are_rendered_as_apply_chat_template_does(ppo, checkpoint):
    folder, _ = checkpoint
    ours, theirs = ppo.HFTokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in [*SENTENCES, " spaces \n"]:
        assert ours.encode_prompt(text) == chat_ids(theirs, ("user", text))


def test_feedback_continues_the_conversation_as_apply_chat_template_does(ppo, checkpoint):
    folder, _ = checkpoint
    ours, theirs = ppo.HFTokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    ids = [*ours.encode_prompt("Guess."), *ours.encode("seven"), ours.eos_id, *ours.encode_feedback("Too low.")]
    assert ids == chat_ids(theirs, ("user", "Guess."), ("assistant", "seven"), ("user", "Too low."))


class Ask(gym.Env):
    """One turn; the seed picks the prompt."""

    def reset(self, *, seed=None, options=None):
        return SENTENCES[seed], {}

    def step(self, response):
        return "", 0.0, True, False, {}


def greedy_rollout(ppo, folder, new_tokens):
    """Response ids of each sentence, and the rollout they are from."""
    args = ppo.Args(max_prompt_tokens=150, max_new_tokens=new_tokens, rollout_slots=2)
    ppo.validate(args)
    actor, tokenizer = ppo.load_hf_checkpoint(folder)[0], ppo.HFTokenizer(folder)
    seeds = range(len(SENTENCES))
    batch = ppo.rollout(actor, tokenizer, [Ask(), Ask()], seeds, seeds, args, 0, greedy=True)
    return [batch.tokens[i][batch.mask[i]].tolist() for i in seeds], batch


def generate(model, tokenizer, prompt, new_tokens, stop_ids):
    ids = torch.tensor([chat_ids(tokenizer, ("user", prompt))])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, eos_token_id=stop_ids,
        pad_token_id=0,
    )  # fmt: skip
    return out[0, ids.shape[1] :].tolist()


def test_greedy_text_is_that_of_generate(ppo, checkpoint, tmp_path):
    """With a second stop id in the generation config, chosen so that one response ends by it and one by length."""
    folder, model = checkpoint
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    free = [generate(model, tokenizer, prompt, 12, [2]) for prompt in SENTENCES]
    stop = next(t for ids in free for t in ids[1:] if any(t not in other for other in free))
    ours, config = ppo.load_hf_checkpoint(folder)
    ppo.save_hf_checkpoint(ours, config, ppo.HFTokenizer(folder), tmp_path / "out")
    (tmp_path / "out" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, stop]}))
    expected = [generate(model, tokenizer, prompt, 12, [2, stop]) for prompt in SENTENCES]
    responses, batch = greedy_rollout(ppo, tmp_path / "out", 12)
    assert responses == expected
    assert batch.texts == [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
    assert set(batch.stop) == {"eos", "length"}
    assert [stop == "eos" for stop in batch.stop] == [ids[-1] in (2, stop) for ids in expected]


def test_an_export_loads_in_transformers_and_back(ppo, checkpoint, tmp_path):
    folder, theirs = checkpoint
    ours, config = ppo.load_hf_checkpoint(folder)
    with torch.no_grad():  # as after training: not the folder's weights any more
        for p in ours.parameters():
            p.mul_(1.01)
    ppo.save_hf_checkpoint(ours, config, ppo.HFTokenizer(folder), tmp_path / "out")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model) is type(theirs) and model.config.to_dict().items() >= {"vocab_size": VOCABULARY}.items()
    assert_same_logits(ours, model.eval())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    original = transformers.AutoTokenizer.from_pretrained(folder)
    for text in SENTENCES:
        assert tokenizer(text).input_ids == original(text).input_ids
        assert chat_ids(tokenizer, ("user", text)) == chat_ids(original, ("user", text))
    responses, _ = greedy_rollout(ppo, tmp_path / "out", 8)
    assert responses == [generate(model, tokenizer, prompt, 8, [2]) for prompt in SENTENCES]
    again, _ = ppo.load_hf_checkpoint(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))


def test_bfloat16_checkpoints_load_in_float32(ppo, tmp_path):
    model = write_checkpoint(tmp_path, "qwen2")
    model.bfloat16().save_pretrained(tmp_path)
    ours, config = ppo.load_hf_checkpoint(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert_same_logits(ours, transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval())
    ppo.save_hf_checkpoint(ours, config, ppo.HFTokenizer(tmp_path), tmp_path / "out")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.dtype == torch.float32
    assert_same_logits(ours, exported.eval())


def in_transformers_4_layout(raw):
    """The config.json that transformers 4 would have written."""
    rope = raw.pop("rope_parameters")
    raw["torch_dtype"] = raw.pop("dtype")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    return raw


def test_configs_of_transformers_4_read_alike(ppo, checkpoint, tmp_path):
    folder, theirs = checkpoint
    ours, config = ppo.load_hf_checkpoint(folder)
    ppo.save_hf_checkpoint(ours, config, ppo.HFTokenizer(folder), tmp_path / "old")
    raw = in_transformers_4_layout(json.loads((folder / "config.json").read_text()))
    (tmp_path / "old" / "config.json").write_text(json.dumps(raw))
    old, old_config = ppo.load_hf_checkpoint(tmp_path / "old")
    assert_same_logits(old, theirs)
    ppo.save_hf_checkpoint(old, old_config, ppo.HFTokenizer(tmp_path / "old"), tmp_path / "out")
    assert_same_logits(old, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reward_model_scores_the_last_token_as_transformers_does(ppo, tmp_path, family):
    model = transformers.AutoModelForSequenceClassification.from_config(hf_config(family, num_labels=1))
    randomize(model).save_pretrained(tmp_path)
    ours, _ = ppo.load_hf_checkpoint(tmp_path, head="scalar")
    lengths = torch.tensor([9, 17, 5])
    tokens = torch.randint(3, VOCABULARY, (3, 17))
    real = torch.arange(17) < lengths[:, None]
    tokens = torch.where(real, tokens, 0)
    with torch.no_grad():
        expected = model(tokens, attention_mask=real.long()).logits[:, 0]
        scores = ours(tokens, select=torch.arange(3) * 17 + lengths - 1)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.1


def test_a_critic_starts_from_an_lm_checkpoint_with_a_head_of_zeros(ppo, checkpoint):
    folder, theirs = checkpoint
    critic, _ = ppo.load_hf_checkpoint(folder, head="scalar")
    assert (critic.score.weight == 0).all() and (critic(torch.arange(9)[None]) == 0).all()
    state = theirs.model.state_dict()
    assert {name.removeprefix("model.") for name in critic.state_dict()} == {*state, "score.weight"}
    assert all(torch.equal(critic.state_dict()[f"model.{name}"], value) for name, value in state.items())


def test_the_embedded_model_and_its_tokenizer_load_in_transformers(ppo, tmp_path):
    tokenizer = ppo.HFTokenizer.from_texts(["0123456789=", "größe 中"])
    raw = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": tokenizer.vocab_size,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": None,
        "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id,
    }  # fmt: skip
    config = ppo.ModelConfig.from_hf(raw)
    ours = randomize(ppo.Transformer(config))
    ppo.save_hf_checkpoint(ours, config, tokenizer, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text, known in [("52814=12458", "52814=12458"), ("=größe 中", "=größe 中"), ("7?", "7")]:
        ids = tokenizer.encode(text)
        assert theirs(text).input_ids == ids
        assert theirs.decode([*ids, tokenizer.eos_id], skip_special_tokens=True) == tokenizer.decode(ids) == known
    assert (theirs.eos_token_id, theirs.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(tokenizer.vocab_size, (2, 50))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), model(tokens).logits, rtol=0, atol=1e-4)
