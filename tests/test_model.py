"""Tokenizer, model and checkpoint folders, without transformers."""

import contextlib
import importlib.util
import itertools
import json
import math
import sys
from unittest import mock

import pytest
import safetensors.torch
import tokenizers
import torch

pytestmark = pytest.mark.shared

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<s>", "<unk>"]
CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{%- endif %}
""".replace("{% for message in messages %}\n", "{%- for message in messages %}")
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


# --- Tokenizer


def character_tokenizer():
    characters = sorted({chr(i) for i in range(32, 127)} | set("\näß中"))
    vocab = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def write_tokenizer(folder, template=None, where="tokenizer_config.json", **files):
    """A tokenizer folder. `files`: objects to write as <name>.json; None leaves a file out."""
    contents = {"tokenizer_config": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}} | files
    if template is not None and where == "tokenizer_config.json":
        contents["tokenizer_config"] = contents["tokenizer_config"] | {"chat_template": template}
    elif template is not None:
        (folder / where).write_text(template, encoding="utf-8")
    for name, content in contents.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    character_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def ids_of(text):
    """Ids of a text in which special tokens are written out."""
    return character_tokenizer().encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", ["", "52814=12458", "naïve Größe 中文 🙂\n\tend", "  two  spaces "])
def test_character_tokenizer_gives_back_the_text(ppo, text):
    tokenizer = ppo.HFTokenizer.from_texts([text, "other"])
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and max(ids, default=0) < tokenizer.vocab_size
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.eos_id, tokenizer.pad_id} & set(ids) and tokenizer.eos_id != tokenizer.pad_id


def test_unknown_characters_take_one_id_and_vanish_from_text(ppo):
    tokenizer = ppo.HFTokenizer.from_texts(["ab"])
    ids = tokenizer.encode("aXbYé")
    assert len(ids) == 5 and len(set(ids)) == 3
    assert tokenizer.decode(ids) == "ab"


def test_decoding_skips_special_tokens_and_ids_beyond_the_vocabulary(ppo):
    tokenizer = ppo.HFTokenizer.from_texts(["ab"])
    a, b = tokenizer.encode("ab")
    assert tokenizer.decode([tokenizer.pad_id, a, tokenizer.vocab_size, 10**6, b, tokenizer.eos_id]) == "ab"


def test_padding_and_truncation_saved_with_a_tokenizer_do_not_apply(ppo, tmp_path):
    write_tokenizer(tmp_path)
    saved = character_tokenizer()
    saved.enable_truncation(3)
    saved.enable_padding(length=9)
    saved.save(str(tmp_path / "tokenizer.json"))
    assert ppo.HFTokenizer(tmp_path).encode("hello") == ids_of("hello")


def test_stop_ids_are_those_of_config_generation_config_and_tokenizer(ppo, tmp_path):
    write_tokenizer(tmp_path, config={"eos_token_id": 3}, generation_config={"eos_token_id": [0, 3]})
    tokenizer = ppo.HFTokenizer(tmp_path)
    assert tokenizer.stop_ids == [0, 2, 3]
    assert (tokenizer.eos_id, tokenizer.pad_id) == (2, 0)


@pytest.mark.parametrize(
    "files, stop_ids",
    [
        ({"tokenizer_config": {"eos_token": {"content": "<|eot|>", "lstrip": False}}}, [3]),
        ({"tokenizer_config": {}, "special_tokens_map": {"eos_token": {"content": "<|eot|>"}}}, [3]),
        ({"tokenizer_config": {}, "config": {"eos_token_id": [2, 0]}}, [0, 2]),
        ({"tokenizer_config": {"eos_token": None}, "generation_config": {"eos_token_id": 2}}, [2]),
        ({"tokenizer_config": None, "config": {"eos_token_id": None}, "generation_config": {"eos_token_id": 2}}, [2]),
    ],
)
def test_one_place_that_names_an_eos_is_enough(ppo, tmp_path, files, stop_ids):
    tokenizer = ppo.HFTokenizer(write_tokenizer(tmp_path, **files))
    assert tokenizer.stop_ids == stop_ids
    assert tokenizer.eos_id in stop_ids and tokenizer.pad_id == tokenizer.eos_id  # no pad token is named


def test_no_eos_anywhere_is_an_error(ppo, tmp_path):
    write_tokenizer(tmp_path, tokenizer_config={"pad_token": "<s>"}, config={"eos_token_id": None})
    with pytest.raises(ppo.UserError, match=r"eos.*generation_config\.json"):
        ppo.HFTokenizer(tmp_path)


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer.json", None), ("tokenizer.json", b'{"model"'), ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"), ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"), ("generation_config.json", b"\xff\xfe"),
    ],
)  # fmt: skip
def test_damaged_tokenizer_files_are_named(ppo, tmp_path, name, content):
    write_tokenizer(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ppo.UserError) as error:
        ppo.HFTokenizer(tmp_path)
    assert name in str(error.value) and str(tmp_path) in str(error.value)


# --- Chat template


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_prompt_is_a_user_turn_of_the_template(ppo, tmp_path, where):
    tokenizer = ppo.HFTokenizer(write_tokenizer(tmp_path, CHATML, where))
    expected = ids_of("<|im_start|>user\n2 < 3?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode_prompt("2 < 3?") == expected
    assert expected[0] == 1  # one id for a special token


def test_the_template_file_wins_over_the_one_in_the_config(ppo, tmp_path):
    write_tokenizer(tmp_path, "wrong")
    (tmp_path / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    assert ppo.HFTokenizer(tmp_path).encode_prompt("x")[0] == 1


def test_of_several_templates_the_default_is_taken(ppo, tmp_path):
    named = [{"name": "tool_use", "template": "wrong"}, {"name": "default", "template": CHATML}]
    assert ppo.HFTokenizer(write_tokenizer(tmp_path, named)).encode_prompt("x")[0] == 1


def test_feedback_is_what_the_template_puts_between_two_assistant_turns(ppo, tmp_path):
    """Prompt, a sampled answer with its end of turn, and feedback together are the render of the whole conversation."""
    tokenizer = ppo.HFTokenizer(write_tokenizer(tmp_path, CHATML))
    turns = [("user", "Guess."), ("assistant", "7"), ("user", "Too low,\ntry ß.")]
    whole = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"
    ours = [*tokenizer.encode_prompt("Guess."), *ids_of("7<|im_end|>"), *tokenizer.encode_feedback("Too low,\ntry ß.")]
    assert ours == ids_of(whole)


def test_without_a_template_text_is_encoded_as_it_is(ppo, tmp_path):
    tokenizer = ppo.HFTokenizer(write_tokenizer(tmp_path))
    assert tokenizer.encode_prompt("hello") == ids_of("hello") == tokenizer.encode_feedback("hello")


def test_without_a_template_the_prompt_gets_the_tokenizers_bos_and_feedback_does_not(ppo, tmp_path):
    write_tokenizer(tmp_path)
    saved = character_tokenizer()
    saved.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 4)])
    saved.save(str(tmp_path / "tokenizer.json"))
    tokenizer = ppo.HFTokenizer(tmp_path)
    assert tokenizer.encode_prompt("hello") == [4, *ids_of("hello")]
    assert tokenizer.encode_feedback("hello") == ids_of("hello")


def test_the_bos_of_a_template_is_not_doubled(ppo, tmp_path):
    config = {"eos_token": "<|im_end|>", "bos_token": {"content": "<s>"}}
    write_tokenizer(tmp_path, "{{ bos_token }}{{ messages[0].content }}", tokenizer_config=config)
    saved = character_tokenizer()
    saved.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 4)])
    saved.save(str(tmp_path / "tokenizer.json"))
    assert ppo.HFTokenizer(tmp_path).encode_prompt("hi") == [4, *ids_of("hi")]


def test_what_templates_use_is_there(ppo, tmp_path):
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ undefined_name }}"
    )
    tokenizer = ppo.HFTokenizer(write_tokenizer(tmp_path, template))
    assert tokenizer.decode(tokenizer.encode_prompt("<ä>")) == '{"role": "user", "content": "<ä>"}4'


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('system turn missing') }}", "{{ messages[7].content }}", "{{ 1 / 0 }}", "{% for %}",
     "{{ messages.__class__.__mro__[1].__subclasses__() }}"],
)  # fmt: skip
def test_a_failing_template_is_an_error_that_names_the_folder(ppo, tmp_path, template):
    write_tokenizer(tmp_path, template)
    with pytest.raises(ppo.UserError, match="template") as error:
        ppo.HFTokenizer(tmp_path).encode_prompt("x")
    assert str(tmp_path) in str(error.value)
    if "raise_exception" in template:
        assert "system turn missing" in str(error.value)


# --- Configuration


def hf_config(kind="llama", **changes):
    return {
        "model_type": kind, "vocab_size": 41, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
        "rope_theta": 5000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
    } | changes  # fmt: skip


def random_model(ppo, head="lm", kind="llama", **changes):
    """Every parameter random, norms and biases too: a part that is left out then shows."""
    model = ppo.Transformer(ppo.ModelConfig.from_hf(hf_config(kind, **changes)), head)
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=float(p.ndim == 1), std=0.3)
    return model


@pytest.mark.parametrize("rope", [{}, LLAMA3_ROPE])
def test_both_config_layouts_read_alike(ppo, rope):
    old = hf_config(rope_theta=7000.0, rope_scaling=rope or None)
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new |= {"rope_parameters": {"rope_type": "default"} | rope | {"rope_theta": 7000.0}, "dtype": "float32"}
    a, b = ppo.ModelConfig.from_hf(old), ppo.ModelConfig.from_hf(new)
    assert a.rope_theta == b.rope_theta == 7000.0
    frequencies = [ppo.Transformer(config).rope for config in (a, b)]
    assert torch.equal(*frequencies)
    plain = 7000.0 ** -(torch.arange(0, 8, 2).float() / 8)
    assert torch.equal(frequencies[0], plain) == (not rope)
    for name in ("hidden_size", "head_dim", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(a, name) == getattr(b, name)
    assert (a.rms_norm_eps, a.head_dim) == (1e-5, 8)


def test_llama3_scaling_keeps_fast_rotations_and_divides_slow_ones(ppo):
    config = ppo.ModelConfig.from_hf(hf_config(head_dim=64, rope_theta=500000.0, rope_scaling=LLAMA3_ROPE))
    scaled = ppo.Transformer(config).rope
    plain = 500000.0 ** -(torch.arange(0, 64, 2).float() / 64)
    wavelength = 2 * math.pi / plain
    fast, slow = wavelength < 64 / 4.0, wavelength > 64 / 1.0
    assert fast.any() and slow.any() and (~fast & ~slow).any()
    torch.testing.assert_close(scaled[fast], plain[fast])
    torch.testing.assert_close(scaled[slow], plain[slow] / 8)
    between = ~fast & ~slow
    assert (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()


@pytest.mark.parametrize(
    "kind, changes, biases, norms",
    [
        ("llama", {}, "", False), ("llama", {"attention_bias": True}, "qkvo", False),
        ("llama", {"mlp_bias": True}, "gate up down", False), ("qwen2", {}, "qkv", False),
        ("qwen3", {"head_dim": 16}, "", True), ("qwen3", {"attention_bias": True}, "qkvo", True),
    ],
)  # fmt: skip
def test_families_have_their_biases_and_norms(ppo, kind, changes, biases, norms):
    state = ppo.Transformer(ppo.ModelConfig.from_hf(hf_config(kind, **changes))).state_dict()
    names = biases.split() if " " in biases else biases
    assert {n.split(".")[-2].removesuffix("_proj") for n in state if n.endswith("bias")} == set(names)
    assert any("q_norm" in n for n in state) == any("k_norm" in n for n in state) == norms
    assert state["model.layers.1.self_attn.q_proj.weight"].shape == (4 * changes.get("head_dim", 8), 32)
    assert state["model.layers.1.self_attn.k_proj.weight"].shape == (2 * changes.get("head_dim", 8), 32)


@pytest.mark.parametrize(
    "key, value, named",
    [
        ("model_type", "gpt2", "'gpt2'.*llama, qwen2, qwen3"), ("model_type", None, "model_type"),
        ("hidden_act", "gelu", "hidden_act 'gelu'"), ("use_sliding_window", True, "use_sliding_window"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "yarn"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "linear"),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4}, "dynamic"),
        ("hidden_size", None, "hidden_size"), ("vocab_size", "41", "vocab_size"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(ppo, tmp_path, key, value, named):
    (tmp_path / "config.json").write_text(json.dumps(hf_config(**{key: value})), encoding="utf-8")
    with pytest.raises(ppo.UserError, match=named) as error:
        ppo.load_hf_checkpoint(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


# --- Forward


def plain_logits(model, tokens):
    """The decoder written out in float64, head by head and position by position, from the checkpoint's tensors."""
    c, state = model.config, {name: p.double() for name, p in model.state_dict().items()}
    linear = lambda x, name: x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0)

    def norm(x, name):
        scaled = x / (x.square().mean(-1, keepdim=True) + c.rms_norm_eps).sqrt()
        return scaled * state[f"{name}.weight"]

    def rotate(x, position):
        out, half = x.clone(), c.head_dim // 2
        for i in range(half):
            angle = position * c.rope_theta ** (-2 * i / c.head_dim)
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    x = state["model.embed_tokens.weight"][tokens]  # [T, hidden]
    for layer in range(c.num_hidden_layers):
        at = f"model.layers.{layer}"
        h = norm(x, f"{at}.input_layernorm")
        q, k, v = (linear(h, f"{at}.self_attn.{n}_proj").unflatten(-1, (-1, c.head_dim)) for n in "qkv")  # [T, H, D]
        if c.qk_norm:
            q, k = norm(q, f"{at}.self_attn.q_norm"), norm(k, f"{at}.self_attn.k_norm")
        heads = torch.zeros_like(q)
        for head in range(c.num_attention_heads):
            kv = head * c.num_key_value_heads // c.num_attention_heads
            keys = torch.stack([rotate(k[t, kv], t) for t in range(len(tokens))])
            for t in range(len(tokens)):
                scores = keys[: t + 1] @ rotate(q[t, head], t) / math.sqrt(c.head_dim)
                heads[t, head] = scores.softmax(0) @ v[: t + 1, kv]
        x = x + linear(heads.flatten(1), f"{at}.self_attn.o_proj")
        h = norm(x, f"{at}.post_attention_layernorm")
        gate, up = linear(h, f"{at}.mlp.gate_proj"), linear(h, f"{at}.mlp.up_proj")
        x = x + linear(gate * gate.sigmoid() * up, f"{at}.mlp.down_proj")
    return linear(norm(x, "model.norm"), "lm_head")


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 12}), ("qwen3", {"num_key_value_heads": 1}), ("llama", {"num_key_value_heads": 4}),
    ],
)  # fmt: skip
@torch.no_grad()
def test_forward_is_the_decoder_written_out(ppo, kind, changes):
    model, tokens = random_model(ppo, kind=kind, **changes), torch.randint(41, (2, 7))
    expected = torch.stack([plain_logits(model, row) for row in tokens])
    assert expected.std() > 0.5
    torch.testing.assert_close(model(tokens).double(), expected, rtol=1e-4, atol=1e-4)


# --- Cache


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("heads", [1, 2, 4])
@torch.no_grad()
def test_forward_with_cache_equals_the_full_forward(ppo, kind, heads):
    """Ragged prefill, decoding, ragged extension by several tokens, decoding; in slots that an earlier text used."""
    model = random_model(ppo, kind=kind, num_key_value_heads=heads)
    size, B = 24, 3
    tokens = torch.randint(41, (B, size))
    full = model(tokens)
    cache = ppo.KVCache(model.config, B, size)
    stale = torch.arange(size).expand(B, size)
    model(torch.randint(41, (B, size)), stale, cache)
    done, checked = torch.zeros(B, dtype=torch.int64), 0
    for counts in ([5, 3, 7], [1, 1, 1], [1, 1, 1], [4, 1, 3], [1, 1, 1], [0, 6, 2], [1, 1, 1]):
        counts = torch.tensor(counts)
        positions = done[:, None] + torch.arange(int(counts.max()))  # [B, T]
        real = positions < (done + counts)[:, None]
        new = torch.where(real, tokens.gather(1, positions.clamp(max=size - 1)), 0)
        cache.look_at(int((done + counts).max()))
        logits = model(new, torch.where(real, positions, size), cache)
        for b, t in real.nonzero().tolist():
            torch.testing.assert_close(logits[b, t], full[b, positions[b, t]], rtol=1e-5, atol=1e-5)
            checked += 1
        done += counts
    assert checked == int(done.sum()) == 13 + 14 + 16


@torch.no_grad()
def test_halves_of_the_rows_attend_each_up_to_its_own_longest(ppo):
    model, tokens, lengths = random_model(ppo), torch.randint(41, (5, 45)), torch.tensor([10, 15, 3, 39, 44])
    cache = ppo.KVCache(model.config, 5, 60)
    positions = torch.arange(45).expand(5, -1)
    cache.look_at(45)
    model(tokens, torch.where(positions < lengths[:, None], positions, 60), cache)
    for buffer in itertools.chain(*cache.layers):
        buffer[:2, :, 16:] = buffer[:, :, 48:] = torch.nan  # which nothing may read
    cache.look_at(16, 45)
    last = tokens.gather(1, lengths[:, None])
    logits, full = model(last, lengths[:, None], cache), model(tokens)
    torch.testing.assert_close(logits[:, 0], full[torch.arange(5), lengths], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_rows_of_a_cache_can_be_filled_apart(ppo):
    model, tokens = random_model(ppo), torch.randint(41, (3, 9))
    full = model(tokens)
    cache = ppo.KVCache(model.config, 3, 12)
    for rows, width in (([2, 0], 8), ([1], 8)):
        cache.look_at(width, rows=torch.tensor(rows))
        logits = model(tokens[rows, :width], torch.arange(width).expand(len(rows), -1), cache)
        torch.testing.assert_close(logits, full[rows, :width], rtol=1e-5, atol=1e-5)
    cache.look_at(9)
    logits = model(tokens[:, 8:], torch.full((3, 1), 8), cache)
    torch.testing.assert_close(logits[:, 0], full[:, 8], rtol=1e-5, atol=1e-5)


def test_select_limits_the_head_to_positions(ppo):
    for head in ("lm", "scalar"):
        model, tokens, select = random_model(ppo, head), torch.randint(41, (3, 7)), torch.tensor([20, 0, 9])
        torch.testing.assert_close(model(tokens, select=select), model(tokens).flatten(0, 1)[select])


def test_padding_on_the_right_changes_nothing(ppo):
    model, tokens = random_model(ppo), torch.randint(41, (2, 9))
    padded = torch.cat([tokens, torch.randint(41, (2, 5))], dim=1)
    torch.testing.assert_close(model(padded)[:, :9], model(tokens), rtol=1e-5, atol=1e-5)


# --- Checkpoint folders


def export(ppo, folder, **kwargs):
    """A random model with its tokenizer's folder, exported to `folder`."""
    model = random_model(ppo, vocab_size=110, **kwargs)
    source = folder.parent / f"{folder.name}_tokenizer"
    source.mkdir()
    tokenizer = ppo.HFTokenizer(write_tokenizer(source, CHATML, generation_config={"eos_token_id": [0, 2]}))
    ppo.save_hf_checkpoint(model, model.config, tokenizer, folder)
    return model


def equal_states(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_export_loads_back(ppo, tmp_path, kind, tied):
    model = export(ppo, tmp_path / "out", kind=kind, tie_word_embeddings=tied)
    loaded, config = ppo.load_hf_checkpoint(tmp_path / "out")
    assert equal_states(loaded.state_dict(), model.state_dict())
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    tokens = torch.randint(110, (2, 9))
    assert torch.equal(loaded(tokens), model(tokens)) and config == loaded.config
    tokenizer = ppo.HFTokenizer(tmp_path / "out")
    assert tokenizer.stop_ids == [0, 2] and tokenizer.encode_prompt("x")[0] == 1
    stored = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in stored) != tied


def test_an_export_keeps_the_original_config_but_for_the_dtype(ppo, tmp_path):
    export(ppo, tmp_path / "out", torch_dtype="bfloat16", architectures=["LlamaForCausalLM"], something_of_ours=[1])
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw == hf_config(vocab_size=110, architectures=["LlamaForCausalLM"], something_of_ours=[1])


def test_an_export_replaces_an_earlier_one(ppo, tmp_path):
    export(ppo, tmp_path / "out")
    (tmp_path / "out" / "stale.safetensors").write_bytes(b"")
    second = random_model(ppo, vocab_size=110)
    ppo.save_hf_checkpoint(second, second.config, ppo.HFTokenizer(tmp_path / "out"), tmp_path / "out")
    assert equal_states(ppo.load_hf_checkpoint(tmp_path / "out")[0].state_dict(), second.state_dict())
    assert not (tmp_path / "out" / "stale.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out_tokenizer"]


def write_sharded(folder, state):
    """The weights in two files with an index, in place of the single file."""
    names = sorted(state)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        safetensors.torch.save_file({name: state[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("tied", [True, False])
def test_sharded_weights_load(ppo, tmp_path, tied):
    model = export(ppo, tmp_path / "out", tie_word_embeddings=tied)
    write_sharded(tmp_path / "out", safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"))
    assert equal_states(ppo.load_hf_checkpoint(tmp_path / "out")[0].state_dict(), model.state_dict())


def test_weights_load_in_the_dtype_asked_for_and_rotary_stays_float32(ppo, tmp_path):
    model = export(ppo, tmp_path / "out")
    loaded, _ = ppo.load_hf_checkpoint(tmp_path / "out", dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.rope, model.rope)


@pytest.mark.parametrize("tied", [True, False])
def test_a_scalar_head_from_an_lm_checkpoint_starts_at_zero(ppo, tmp_path, tied):
    model = export(ppo, tmp_path / "out", tie_word_embeddings=tied)
    critic, _ = ppo.load_hf_checkpoint(tmp_path / "out", head="scalar")
    values = critic(torch.randint(110, (2, 5)))
    assert values.shape == (2, 5) and (values == 0).all() and (critic.score.weight == 0).all()
    body = lambda m: {k: v for k, v in m.state_dict().items() if k.startswith("model.")}
    assert equal_states(body(critic), body(model))


def test_a_scalar_head_in_the_files_is_read(ppo, tmp_path):
    export(ppo, tmp_path / "out")
    file, score = tmp_path / "out" / "model.safetensors", torch.randn(1, 32)
    safetensors.torch.save_file(safetensors.torch.load_file(file) | {"score.weight": score}, file)
    critic, _ = ppo.load_hf_checkpoint(tmp_path / "out", head="scalar")
    assert torch.equal(critic.score.weight, score)


def edit_weights(folder, edit):
    file = folder / "model.safetensors"
    state = safetensors.torch.load_file(file)
    edit(state)
    safetensors.torch.save_file(state, file)


def break_index(folder):
    write_sharded(folder, safetensors.torch.load_file(folder / "model.safetensors"))
    (folder / "model-00002-of-00002.safetensors").unlink()


def shorten(file, count):
    content = file.read_bytes()
    file.write_bytes(content[: max(20, len(content) - count)])


def only_pickle(folder):
    torch.save(safetensors.torch.load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


NORM = "model.layers.1.input_layernorm.weight"
DAMAGE = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "config is no object": (lambda f: (f / "config.json").write_text("[1]"), "config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
    "only a pickle": (only_pickle, "model.safetensors"),
    "truncated": (lambda f: shorten(f / "model.safetensors", 9), "model.safetensors"),
    "truncated in the header": (lambda f: shorten(f / "model.safetensors", 999_999), "model.safetensors"),
    "empty file": (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors"),
    "garbage": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 99), "model.safetensors"),
    "shard missing": (break_index, "model-00002-of-00002.safetensors"),
    "wrong shape": (lambda f: edit_weights(f, lambda s: s.update({NORM: torch.zeros(7)})), NORM),
    "transposed": (
        lambda f: edit_weights(f, lambda s: s.update({"lm_head.weight": torch.zeros(32, 110)})),
        "lm_head.weight",
    ),
    "missing tensor": (lambda f: edit_weights(f, lambda s: s.pop(NORM)), NORM),
    "no lm head": (lambda f: edit_weights(f, lambda s: s.pop("lm_head.weight")), "lm_head.weight"),
    "extra tensor": (lambda f: edit_weights(f, lambda s: s.update({"adapter.w": torch.zeros(2)})), "adapter.w"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoints_are_one_line_that_names_file_or_tensor(ppo, tmp_path, name):
    export(ppo, tmp_path / "out")
    damage, named = DAMAGE[name]
    damage(tmp_path / "out")
    with pytest.raises(ppo.UserError) as error:
        ppo.load_hf_checkpoint(tmp_path / "out")
    assert named in str(error.value) and str(tmp_path / "out") in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_there_is_an_error(ppo, tmp_path):
    for load in (ppo.load_hf_checkpoint, ppo.HFTokenizer):
        with pytest.raises(ppo.UserError, match="nowhere"):
            load(tmp_path / "nowhere")


# --- The sampling copy


@pytest.fixture
def alone(ppo):
    """Device, dtype and ranks of an actor that one process trains with forward passes in bfloat16."""
    with contextlib.ExitStack() as stack:
        device, dtype, _, actors, _ = ppo.connect(ppo.Args(device="cpu", dtype="bfloat16"), stack)
        yield device, dtype, actors
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("tied", [True, False])
def test_a_bfloat16_copy_keeps_rotary_frequencies_and_is_refreshed_in_place(ppo, alone, tied):
    (device, dtype, ranks), actor = alone, random_model(ppo, tie_word_embeddings=tied, rope_scaling=LLAMA3_ROPE)
    sampler = ppo.unsharded(actor.config, device, dtype)
    ppo.shard(actor, ranks, ppo.Args(), dtype)
    assert {p.dtype for p in sampler.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in actor.parameters()} == {torch.float32}
    assert sampler.rope.dtype == torch.float32 and torch.equal(sampler.rope, actor.rope)
    assert not torch.equal(sampler.rope, sampler.rope.bfloat16().float())  # they would not survive the cast
    assert (sampler.lm_head.weight is sampler.model.embed_tokens.weight) == tied
    addresses = [p.data_ptr() for p in sampler.parameters()]
    with torch.no_grad():
        for p in map(ppo.local, actor.parameters()):
            p.add_(torch.randn_like(p))
    stale = {name: p.clone() for name, p in sampler.named_parameters()}
    ppo.copy_weights(actor, sampler, ranks)
    assert [p.data_ptr() for p in sampler.parameters()] == addresses
    for (name, new), old in zip(sampler.named_parameters(), actor.parameters(), strict=True):
        assert torch.equal(new, ppo.local(old).bfloat16()) and not torch.equal(new, stale[name])


def test_the_bfloat16_copy_predicts_what_the_actor_does(ppo, alone):
    (device, dtype, ranks), actor, tokens = alone, random_model(ppo), torch.randint(41, (2, 9))
    logprobs = lambda model: model(tokens, select=torch.arange(18)).float().log_softmax(-1)
    exact, sampler = logprobs(actor), ppo.unsharded(actor.config, device, dtype)
    ppo.shard(actor, ranks, ppo.Args(), dtype)
    ppo.copy_weights(actor, sampler, ranks)
    trained, sampled = logprobs(actor), logprobs(sampler)
    scale = exact.std()
    assert 1e-4 * scale < (trained - exact).abs().mean() < 0.02 * scale
    assert (sampled - exact).abs().mean() < 0.02 * scale


def test_gradients_of_a_bfloat16_forward_are_float32_and_near_the_exact_ones(ppo, alone):
    (_, dtype, ranks), actor, tokens = alone, random_model(ppo), torch.randint(41, (2, 9))
    loss = lambda: actor(tokens, select=torch.arange(18)).float().log_softmax(-1)[:, 3].sum()
    loss().backward()
    exact = [p.grad for p in actor.parameters()]
    actor.zero_grad()
    ppo.shard(actor, ranks, ppo.Args(), dtype)
    loss().backward()
    for p, gradient in zip(actor.parameters(), exact, strict=True):
        assert p.grad.dtype == torch.float32
        assert 0 < (ppo.local(p.grad) - gradient).norm() < 0.15 * gradient.norm()


# --- The script as a module


def test_a_script_can_be_a_module_of_any_name(ppo):
    name = "forks.ppo-llm.v2"
    spec = importlib.util.spec_from_file_location(name, ppo.__file__)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {name: module}):  # dataclasses look there
        spec.loader.exec_module(module)
    linear = module.Linear(3, 4)
    linear.pack(2)
    assert torch.allclose(linear(torch.ones(2, 3)), linear.weight.sum(1) + linear.bias, atol=1e-6)
