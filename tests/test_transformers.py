"""The same numbers as transformers, from their folders and from ours: small random models of every family."""

import json
import types

import pytest
import tokenizers
import torch
import transformers
from test_model import CHATML, LLAMA3_ROPE
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

pytestmark = pytest.mark.shared

CAUSAL, CLASSIFIER = transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification
SENTENCES = ["Natalia sold 48 clips in April, and half as many in May: #### 72", "Die Größe, naïve, 中文 costs $100."]
FAMILIES = {
    "llama3 rope": (transformers.LlamaConfig, dict(num_key_value_heads=4, rope_parameters=LLAMA3_ROPE)),
    "llama, one key head": (transformers.LlamaConfig, dict(num_key_value_heads=1)),
    "qwen2, tied": (transformers.Qwen2Config, dict(num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen3, several files": (transformers.Qwen3Config, dict(num_key_value_heads=2, head_dim=24)),
    "mistral": (transformers.MistralConfig, dict(num_key_value_heads=2, sliding_window=None)),
    "qwen3, tied, bfloat16": (transformers.Qwen3Config, dict(num_key_value_heads=4, tie_word_embeddings=True)),
    "llama, biases": (transformers.LlamaConfig, dict(num_key_value_heads=2, attention_bias=True, mlp_bias=True)),
    "qwen3, biases": (transformers.Qwen3Config, dict(num_key_value_heads=2, attention_bias=True)),
}
VOCABULARY = 330  # more than the tokenizer has: real checkpoints have padding rows
SIZES = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=256, bos_token_id=None, eos_token_id=2, pad_token_id=0, rms_norm_eps=0.1,
             rope_parameters=dict(rope_type="default", rope_theta=3000.0))  # fmt: skip
chat = lambda turns: [{"role": role, "content": text} for role, text in turns]


def hf_tokenizer():
    bpe, pre = tokenizers.Tokenizer(tokenizers.models.BPE()), tokenizers.pre_tokenizers
    split = pre.Split(tokenizers.Regex(PRETOKENIZE_REGEX), "isolated")  # what AutoTokenizer gives Qwen2 in any case
    bpe.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = tokenizers.decoders.ByteLevel()
    pad, _, eos = special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    settings = dict(vocab_size=320, special_tokens=special, initial_alphabet=pre.ByteLevel.alphabet())
    bpe.train_from_iterator(SENTENCES * 3, tokenizers.trainers.BpeTrainer(**settings))
    special = dict(eos_token=eos, pad_token=pad, additional_special_tokens=special[1:2])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=CHATML, **special)


def hf_folder(folder, family="qwen2, tied", auto=CAUSAL, **changes):
    """A folder as on the Hub. Every parameter is random, norms and biases too: one that is not loaded shows."""
    kind, settings = FAMILIES[family]
    model = auto.from_config(kind(**SIZES | settings | changes))
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=float(p.ndim == 1), std=0.2)
    model.generation_config = transformers.GenerationConfig(eos_token_id=[0, 2])
    model.to(torch.bfloat16 if "bfloat16" in family else torch.float32)
    model.save_pretrained(folder, max_shard_size="100KB" if "several files" in family else "1GB")
    assert (len(list(folder.glob("*.safetensors"))) > 1) == ("several files" in family)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")  # transformers 4 had other names
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": rope["rope_theta"], "rope_scaling": rope}))
    hf_tokenizer().save_pretrained(folder)
    return folder


def load_theirs(folder, auto=CAUSAL):
    model, info = auto.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()) and model.config.architectures == [type(model).__name__]
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def same_in_transformers(folder, ours, tokenizer, tokens):
    """Logits, which must not be near 0, ids of texts and conversations, and stop ids."""
    model, theirs = load_theirs(folder)
    assert model(tokens).logits.std() > 0.5
    torch.testing.assert_close(ours(tokens), model(tokens).logits, rtol=0, atol=1e-4)
    for text in [*SENTENCES, "", " x\n\n y", "🙂 é"]:
        assert tokenizer.encode(text) == theirs(text, add_special_tokens=False).input_ids
    answer = [*tokenizer.encode("seven"), tokenizer.eos_id, *tokenizer.encode_feedback("Too low.", tokenizer.eos_id)]
    turns = chat([("user", "Guess."), ("assistant", "seven"), ("user", "Too low.")])
    expected = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert [*tokenizer.encode_prompt("Guess."), *answer] == expected
    assert (tokenizer.eos_id, tokenizer.pad_id) == (theirs.eos_token_id, theirs.pad_token_id)
    assert tokenizer.stop_ids == model.generation_config.eos_token_id == [0, 2]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_folders_of_transformers_load_here_and_exports_load_there(ppo, tmp_path, family):
    """The same logits and values, the same ids with the chat template. The tokens are many enough for scaled rope."""
    folder, tokens = hf_folder(tmp_path / "in", family), torch.randint(3, VOCABULARY, (2, 100))
    (ours, config), tokenizer = ppo.load_hf_checkpoint(folder), ppo.HFTokenizer(folder)
    same_in_transformers(folder, ours, tokenizer, tokens)
    config.quantization_config = {"quant_method": "fp8"}
    critic = ppo.Transformer(config, "scalar")
    for p in (*ours.parameters(), *critic.parameters()):  # as after training: not the folder's weights any more
        p.add_(0.1 * torch.randn(p.shape))
    ppo.save_hf_checkpoint(ours, tokenizer, tmp_path / "model")
    ppo.save_hf_checkpoint(critic, tokenizer, tmp_path / "critic")
    same_in_transformers(tmp_path / "model", ours, ppo.HFTokenizer(tmp_path / "model"), tokens)
    assert torch.equal(ppo.load_hf_checkpoint(tmp_path / "model")[0](tokens), ours(tokens))
    for export in (tmp_path / "model", tmp_path / "critic"):  # names of transformers 4
        written = json.loads((export / "config.json").read_text())
        rope = written["rope_parameters"]
        assert written["dtype"] == "float32"
        assert written["rope_theta"] == rope["rope_theta"] and "quantization_config" not in written
        assert written["rope_scaling"] == (rope if rope["rope_type"] == "llama3" else None)
    values, (classifier, _) = critic(tokens), load_theirs(tmp_path / "critic", CLASSIFIER)
    assert values.std() > 0.1 and classifier.config.num_labels == 1
    assert torch.equal(ppo.load_hf_checkpoint(tmp_path / "critic", "scalar")[0](tokens), values)
    tokens[1, 12:] = tokenizer.pad_id  # transformers finds the last token by it
    torch.testing.assert_close(values[[0, 1], [-1, 11]], classifier(tokens).logits[:, 0], rtol=0, atol=1e-4)


@torch.no_grad()
def test_norms_have_the_epsilon_of_the_configuration(ppo, tmp_path):
    """Those of queries and keys as well. An epsilon as small as all families have would not show."""
    folder = hf_folder(tmp_path, "qwen3, several files", rms_norm_eps=0.1)
    tokens = torch.randint(3, VOCABULARY, (2, 20))
    ours, theirs = ppo.load_hf_checkpoint(folder)[0], load_theirs(folder)[0]
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rope", [
    dict(rope_type="linear", factor=4.0), dict(rope_type="dynamic", factor=4.0),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=32, beta_fast=16.0, attention_factor=0.7),
])  # fmt: skip
@torch.no_grad()
def test_scaled_rope(ppo, tmp_path, rope):
    """In the folders of both versions of transformers; up to max_position_embeddings, beyond which no run goes."""
    tokens = torch.randint(3, VOCABULARY, (1, SIZES["max_position_embeddings"]))
    folder = hf_folder(tmp_path / "in", "qwen2, tied", rope_parameters=rope | {"rope_theta": 5000.0})
    ours, theirs = ppo.load_hf_checkpoint(folder)[0], load_theirs(folder)[0]
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
    ppo.save_hf_checkpoint(ours, ppo.HFTokenizer(folder), tmp_path / "out")
    torch.testing.assert_close(load_theirs(tmp_path / "out")[0](tokens).logits, ours(tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_training_forward_has_log_probs_entropies_and_gradients_of_transformers(ppo, tmp_path, family):
    """Of rows of unequal length together, where transformers gets each row alone."""
    hf_folder(tmp_path, family)
    ours, theirs = ppo.load_hf_checkpoint(tmp_path)[0], load_theirs(tmp_path)[0]
    lengths, tokens, weight = torch.tensor([9, 2, 30, 17]), torch.randint(VOCABULARY, (4, 30)), torch.randn(4, 30)
    mask = (torch.arange(30) < lengths[:, None]) & (torch.arange(30) > 0)
    mb = types.SimpleNamespace(tokens=tokens, packing=ppo.Packing.from_lengths(lengths, mask, "cpu"))
    logprobs, entropies = ours.sampled_logprobs(mb, 0.7)
    expected = torch.zeros(2, 4, 30)
    for row, (length, ids) in enumerate(zip(lengths, tokens)):
        predicted = torch.distributions.Categorical(logits=theirs(ids[None, :length]).logits[0, :-1] / 0.7)
        expected[:, row, 1:length] = torch.stack([predicted.log_prob(ids[1:length]), predicted.entropy()])
    torch.testing.assert_close(torch.stack([logprobs, entropies]), expected, rtol=1e-5, atol=1e-5)
    (logprobs * weight).sum().backward()
    (expected[0] * weight).sum().backward()
    for name, p in theirs.named_parameters():
        gradient = ours.get_parameter(name).grad
        assert (gradient - p.grad).norm() <= 1e-5 * p.grad.norm()


@pytest.mark.parametrize("start", ["", "\n", "  ", "  {# why #}\n", "{#- why -#}\n ", "\n{%- set x = 1 %}\n", " {% if x %}{% endif %}"])  # noqa: E501
def test_prompts_are_the_text_of_transformers_however_a_template_begins(ppo, start):
    """marin-community/marin#971, huggingface/swift-transformers#322, pallets/jinja#1372"""
    tokenizer = ppo.HFTokenizer("a", hf_tokenizer())
    tokenizer.hf.chat_template = start + "{{ 'Chat: ' }}" + CHATML
    theirs = tokenizer.hf.apply_chat_template(chat([("user", "a")]), tokenize=False, add_generation_prompt=True)
    assert tokenizer.render(ppo.as_messages("a")) == theirs and theirs.endswith("assistant\n")


def test_a_template_that_writes_the_date_gets_one_that_stays_in_the_format_that_it_asks_for(ppo):
    tokenizer = ppo.HFTokenizer("a", hf_tokenizer())
    for call, date in ("'%d %b %Y'", "26 Jul 2024"), ("'%Y'", "2024"), ("format='%F %H:%M'", "2024-07-26 00:00"):
        template = "{% if strftime_now is defined %}{{ strftime_now(" + call + ") }}: {{ messages[0].content }}{% endif %}"  # noqa: E501
        tokenizer.hf.chat_template = template
        assert tokenizer.render(ppo.as_messages("ab")) == f"{date}: ab" and tokenizer.hf.chat_template == template


def test_a_template_for_tools_is_used_where_the_arguments_have_tools(ppo):
    """As in transformers. A tokenizer may have several templates, by name."""
    tokenizer = ppo.HFTokenizer("a", hf_tokenizer())
    tokenizer.hf.chat_template = dict(default="plain", tool_use="{{ tools[0].name }}")
    texts = []
    for tokenizer.template_kwargs in "{}", '{"tools": [{"name": "search"}]}':
        texts.append(tokenizer.render(ppo.as_messages("a")))
    assert texts == ["plain", "search"]


def test_the_embedded_model_and_its_tokenizer_load_in_transformers(ppo, tmp_path):
    tokenizer, ours = ppo.embedded_model(ppo.Args(max_prompt_tokens=16, max_new_tokens=8), ppo.SortDigits())
    ppo.save_hf_checkpoint(ours, tokenizer, tmp_path)
    (model, theirs), tokens = load_theirs(tmp_path), torch.arange(10)[None]
    assert theirs("528=258").input_ids == tokenizer.encode("528=258") and theirs.eos_token_id == tokenizer.eos_id
    torch.testing.assert_close(ours(tokens), model(tokens).logits, rtol=0, atol=1e-5)
