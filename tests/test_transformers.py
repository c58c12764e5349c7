"""Parity with transformers: logits, log-probs, tokens, chat templates, exports; small random checkpoints."""

import json
import shutil

import pytest
import tokenizers
import torch
from test_model import CHATML, LLAMA3_ROPE

pytestmark = pytest.mark.shared

transformers = pytest.importorskip("transformers")

SENTENCES = [
    "Natalia sold 48 clips in April, and half as many in May. How many did she sell altogether?",
    "Weng earns $12 an hour for babysitting; yesterday she did 50 minutes of it. #### 10",
    "Betty saves for a wallet that costs $100. Die Größe ist naïve, 中文 is here too.",
]
# AutoTokenizer gives Qwen2 checkpoints this pattern, whatever their tokenizer.json says.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FAMILIES = {
    "qwen2-tied": (transformers.Qwen2Config, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3-sharded": (transformers.Qwen3Config, {"num_key_value_heads": 2, "head_dim": 24}),
    "qwen3-tied": (transformers.Qwen3Config, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama3-rope": (transformers.LlamaConfig, {"num_key_value_heads": 4, "rope_parameters": LLAMA3_ROPE}),
    "llama-biased": (transformers.LlamaConfig, {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
}
VOCABULARY = 330  # more than the tokenizer has: real checkpoints have padding rows


def hf_tokenizer():
    bpe, pre = tokenizers.Tokenizer(tokenizers.models.BPE()), tokenizers.pre_tokenizers
    split = pre.Split(tokenizers.Regex(QWEN2_WORDS), "isolated")
    bpe.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.normalizer = tokenizers.normalizers.NFC()
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False)  # fmt: skip
    bpe.train_from_iterator(SENTENCES * 3, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML)


def hf_config(family, **changes):
    kind, settings = FAMILIES[family]
    return kind(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=2, pad_token_id=0, **settings | changes)


def randomize(model):
    """Every parameter random, norms and biases too: one that is not loaded then shows."""
    generator = torch.Generator().manual_seed(3)
    for p in {p.data_ptr(): p for p in model.parameters()}.values():
        p.data = float(p.ndim == 1) + 0.2 * torch.randn(p.shape, generator=generator)
    return model.eval()


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    """(folder, model of transformers, tokenizer of transformers)"""
    folder = tmp_path_factory.mktemp(request.param)
    model = transformers.AutoModelForCausalLM.from_config(hf_config(request.param))
    model.tie_weights()
    model.generation_config.eos_token_id = [0, 2]
    sharded = "sharded" in request.param
    randomize(model).save_pretrained(folder, **{"max_shard_size": "200KB"} if sharded else {})
    assert sharded == (folder / "model.safetensors.index.json").exists()
    hf_tokenizer().save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return folder, model, transformers.AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def assert_same_logits(ours, theirs):
    """Over a length at which rotary scaling and the order of heads matter; the logits must not be near zero."""
    tokens = torch.randint(VOCABULARY, (2, 100), generator=torch.Generator().manual_seed(4))
    expected = theirs(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-4)


def chat_ids(tokenizer, *turns):
    messages = [{"role": role, "content": text} for role, text in turns]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@torch.no_grad()
def test_logprobs_and_entropy_are_those_of_transformers(ppo, checkpoint):
    folder, theirs, _ = checkpoint
    ours, tokens = ppo.load_hf_checkpoint(folder)[0], torch.randint(VOCABULARY, (2, 9))
    sampled = (torch.arange(9) > 0).expand(2, 9)
    packing = ppo.Packing.of(torch.tensor([9, 9]), sampled, tokens.device)
    logprobs, entropy = ours(tokens, packing=packing, temperature=0.7)
    expected = torch.distributions.Categorical(logits=theirs(tokens).logits[:, :-1] / 0.7)
    torch.testing.assert_close(logprobs[:, 1:], expected.log_prob(tokens[:, 1:]), rtol=0, atol=1e-4)
    torch.testing.assert_close(entropy[:, 1:], expected.entropy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_training_forward_is_that_of_padded_rows_in_transformers(ppo, checkpoint, side):
    """Log-probs and gradients of rows of unequal length, together and one row at a time."""
    ours, theirs = ppo.load_hf_checkpoint(checkpoint[0])[0], checkpoint[1]
    lengths, tokens, weight = torch.tensor([9, 2, 30, 17]), torch.randint(1, VOCABULARY, (4, 30)), torch.randn(4, 30)
    real = torch.arange(30) < lengths[:, None]
    mask, zeros = real & (torch.arange(30) > 0), torch.zeros(4, 30)
    batch = ppo.Rollout(tokens, mask, zeros, zeros, lengths, ["eos"] * 4, [], {}, [], [], [])
    experience = ppo.Experience.from_rollout(batch, torch.device("cpu"))

    shift = (30 - lengths if side == "left" else 0 * lengths)[:, None]
    places = (torch.arange(30) - shift) % 30  # index in our row of each token of a padded row
    inputs, attend = tokens.gather(1, places), real.gather(1, places).long()
    logits = theirs(inputs, attention_mask=attend, position_ids=places * attend).logits / 0.7
    predicted = logits.log_softmax(-1).roll(1, 1).gather(2, inputs[..., None])[..., 0]
    expected = torch.zeros(4, 30).scatter(1, places, predicted) * mask
    gradients = torch.autograd.grad((expected * weight).sum(), list(theirs.parameters()))
    for parts in ([[2, 0, 1, 3]], [[0], [1], [2], [3]]):
        ours.zero_grad()
        for rows in parts:
            logprobs = ppo.sampled_logprobs(ours, experience[torch.tensor(rows)], 0.7)[0]  # [B, T]
            T = logprobs.shape[1]
            torch.testing.assert_close(logprobs, expected[rows, :T], rtol=5e-6, atol=2e-6)
            (logprobs * weight[rows, :T]).sum().backward()
        for p, gradient in zip(ours.parameters(), gradients, strict=True):
            assert (p.grad - gradient).norm() <= 5e-6 * gradient.norm()


def assert_same_tokenizer(ours, theirs):
    for text in [*SENTENCES, "", " x\n\n y", "🙂 é"]:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text) == ids and ours.decode(ids) == text
        assert ours.encode_prompt(text) == chat_ids(theirs, ("user", text))
    assert (ours.eos_id, ours.pad_id, ours.stop_ids) == (theirs.eos_token_id, theirs.pad_token_id, [0, 2])
    ids = [*ours.encode_prompt("Guess."), *ours.encode("seven"), ours.eos_id, *ours.encode_feedback("Too low.")]
    assert ids == chat_ids(theirs, ("user", "Guess."), ("assistant", "seven"), ("user", "Too low."))


@pytest.mark.parametrize("layout", [4, 5])
def test_an_export_loads_in_transformers_and_back(ppo, checkpoint, tmp_path, layout):
    """Of a folder whose config.json is of transformers 4 or 5."""
    folder, theirs, tokenizer = checkpoint
    shutil.copytree(folder, tmp_path / "in")
    if layout == 4:
        raw = json.loads((folder / "config.json").read_text())
        rope = raw.pop("rope_parameters")
        raw |= {"torch_dtype": raw.pop("dtype"), "rope_theta": rope.pop("rope_theta")}
        raw["rope_scaling"] = rope if rope["rope_type"] != "default" else None
        (tmp_path / "in" / "config.json").write_text(json.dumps(raw))
    ours, config = ppo.load_hf_checkpoint(tmp_path / "in")
    assert_same_logits(ours, theirs)
    assert_same_tokenizer(ppo.HFTokenizer(tmp_path / "in"), tokenizer)
    with torch.no_grad():  # as after training: not the folder's weights any more
        for p in ours.parameters():
            p.mul_(1.01)
    ppo.save_hf_checkpoint(ours, ppo.HFTokenizer(tmp_path / "in"), tmp_path / "out")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model) is type(theirs) and model.dtype == torch.float32
    assert_same_logits(ours, model.eval())
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert_same_tokenizer(ppo.HFTokenizer(tmp_path / "out"), exported)
    assert model.generation_config.eos_token_id == [0, 2]
    # The name that transformers 5 writes, TokenizersBackend, cannot be loaded by 4.
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_the_embedded_model_and_its_tokenizer_load_in_transformers(ppo, tmp_path):
    args = ppo.Args()
    ppo.validate(args)
    tokenizer, ours = ppo.embedded_model(args, ppo.SortDigits())
    ppo.save_hf_checkpoint(randomize(ours), tokenizer, tmp_path / "out")
    theirs, ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), tokenizer.encode("52814=12458?")
    assert theirs("52814=12458?").input_ids == ids and theirs.eos_token_id == tokenizer.eos_id
    assert theirs.decode([*ids, tokenizer.eos_id], skip_special_tokens=True) == tokenizer.decode(ids) == "52814=12458"
    model, tokens = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), torch.arange(10)[None]
    torch.testing.assert_close(ours(tokens), model(tokens).logits, rtol=0, atol=1e-4)
