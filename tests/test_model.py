"""Tokenizer, model, cache, checkpoint folders and copies of weights, without transformers."""

import itertools
import json
import math

import pytest
import safetensors.torch
import tokenizers
import torch

pytestmark = pytest.mark.shared

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<s>", "<unk>"]
CHATML = """{%- for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{%- endif %}
"""
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

EOT = {"content": "<|eot|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def character_tokenizer(bos=False):
    characters = sorted({chr(i) for i in range(32, 127)} | set("\näß中"))
    vocab = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    if bos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 4)])
    return tokenizer


def write_tokenizer(folder, template=None, bos=False, **files):
    """A tokenizer folder. `files`: objects to write as <name>.json; None leaves a file out."""
    contents = {"tokenizer_config": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}} | files
    if template is not None:
        contents["tokenizer_config"] = contents["tokenizer_config"] | {"chat_template": template}
    for name, content in contents.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = character_tokenizer(bos)
    tokenizer.enable_truncation(3)  # saved with the tokenizer, but not meant for prompts
    tokenizer.enable_padding(length=9, pad_token="<|endoftext|>")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def ids_of(text):
    """Ids of a text in which special tokens are written out."""
    return character_tokenizer().encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", ["", "52814=12458", "naïve Größe 中文 🙂\n\tend", "  two  spaces "])
def test_the_character_tokenizer_gives_back_the_text_and_skips_other_ids(ppo, text):
    tokenizer = ppo.HFTokenizer.from_texts([text, "other"])
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and max(ids, default=0) < tokenizer.vocab_size
    assert not {tokenizer.eos_id, tokenizer.pad_id} & set(ids) and tokenizer.eos_id != tokenizer.pad_id
    ids = [tokenizer.pad_id, *tokenizer.encode("X"), *ids, tokenizer.vocab_size, 10**6, tokenizer.eos_id]
    assert len(tokenizer.encode("X")) == 1 and tokenizer.decode(ids) == text


@pytest.mark.parametrize("files, stop_ids, eos_id, pad_id", [
    ({"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": [0, 3]}}, [0, 2, 3], 2, 0),
    ({"tokenizer_config": {"eos_token": EOT | {"__type": "AddedToken"}}}, [3], 3, 0),
    ({"tokenizer_config": {}, "special_tokens_map": {"eos_token": EOT}}, [3], 3, 0),
    ({"tokenizer_config": {}, "config": {"eos_token_id": [2, 0]}}, [0, 2], 0, 0),
    ({"tokenizer_config": None, "config": {"eos_token_id": None}, "generation_config": {"eos_token_id": 2}}, [2], 2, 0),
])  # fmt: skip
def test_stop_ids_are_those_of_config_generation_config_and_tokenizer(ppo, tmp_path, files, stop_ids, eos_id, pad_id):
    tokenizer = ppo.HFTokenizer(write_tokenizer(tmp_path, **files))
    assert (tokenizer.stop_ids, tokenizer.eos_id, tokenizer.pad_id) == (stop_ids, eos_id, pad_id)


def test_the_prompt_has_one_bos_with_or_without_template_and_feedback_none(ppo, tmp_path):
    tokenizer = ppo.HFTokenizer(write_tokenizer(tmp_path, bos=True))
    assert tokenizer.encode_prompt("hello") == [4, *ids_of("hello")]
    assert tokenizer.encode_feedback("hello") == ids_of("hello")
    config = {"eos_token": "<|im_end|>", "bos_token": "<s>"}
    write_tokenizer(tmp_path, "{{ bos_token }}{{ messages[0].content }}", bos=True, tokenizer_config=config)
    assert ppo.HFTokenizer(tmp_path).encode_prompt("hello") == [4, *ids_of("hello")]


def test_feedback_begins_after_the_stop_token_of_the_response(ppo, tmp_path):
    """Llama 2's template puts a space before it."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}")  # fmt: skip
    tokenizer = ppo.HFTokenizer(write_tokenizer(tmp_path, template))
    assert tokenizer.encode_feedback("hello") == ids_of("[INST] hello [/INST]")
    only_the_first = ppo.HFTokenizer(write_tokenizer(tmp_path, "{{ messages[0].content }}"))
    with pytest.raises(ppo.UserError, match="leaves out earlier turns"):
        only_the_first.encode_feedback("hello")


def test_a_conversation_ends_with_its_response(ppo, tmp_path):
    tokenizer, turns = ppo.HFTokenizer(write_tokenizer(tmp_path, CHATML)), [("user", "hello"), ("assistant", "yes")]
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    assert tokenizer.encode_conversation(*turns) == ids_of(text)
    assert tokenizer.encode_conversation(*turns, *turns) == ids_of(text + text)
    plain = ppo.HFTokenizer(write_tokenizer(tmp_path, bos=True))
    assert plain.encode_conversation(*turns) == [4, *ids_of("helloyes<|im_end|>")]


@pytest.mark.parametrize(("flags", "threads"), [({}, 1), (dict(model="folder"), 2), (dict(OMP=True), 2)])
def test_the_default_model_takes_one_thread_unless_the_user_says_otherwise(ppo, monkeypatch, flags, threads):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if flags.pop("OMP", False):
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
    try:
        torch.set_num_threads(2)
        ppo.connect(ppo.Args(device="cpu", **flags))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_template_that_fails_is_an_error(ppo, tmp_path):
    for template in ("{{ raise_exception('no') }}", "{{ messages[7].x }}", "{% for %}", "{{ ''.__class__.mro() }}"):
        write_tokenizer(tmp_path, template)
        with pytest.raises(ppo.UserError, match=f"chat template of {tmp_path}: "):
            ppo.HFTokenizer(tmp_path).encode_prompt("x")


def hf_config(kind="llama", **changes):
    return {
        "model_type": kind, "vocab_size": 41, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
        "rope_theta": 5000.0, "tie_word_embeddings": False, "torch_dtype": "float32"} | changes  # fmt: skip


def random_model(ppo, head="lm", kind="llama", **changes):
    """Every parameter random, norms and biases too: a part that is left out then shows."""
    model = ppo.Transformer(ppo.ModelConfig.from_hf(hf_config(kind, **changes)), head)
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=float(p.ndim == 1), std=0.3)
    return model


@pytest.mark.parametrize("kind, heads", [("llama", 4), ("qwen2", 1), ("qwen3", 2)])
@torch.no_grad()
def test_forward_with_cache_equals_the_full_forward(ppo, kind, heads):
    """Ragged prefill, row 1 apart, decoding, ragged extension, decoding; over an earlier text, beside unread NaN."""
    model, size, B = random_model(ppo, kind=kind, num_key_value_heads=heads), 40, 3
    tokens, cache = torch.randint(41, (B, size)), ppo.KVCache(model.config, B, size)
    full, _ = model(tokens), model(torch.randint(41, (B, size)), torch.arange(size).expand(B, size), cache)
    done, checked = torch.zeros(B, dtype=torch.int64), 0
    turns = [([5, 0, 7], [2, 0]), ([0, 3, 0], [1]), *2 * [([1, 1, 1], None)], ([4, 1, 3], None), ([1, 1, 1], None),
             ([0, 6, 2], None), ([1, 1, 1], None)]  # fmt: skip
    for counts, rows in turns:
        counts, selected = torch.tensor(counts), rows or [0, 1, 2]
        positions = done[:, None] + torch.arange(int(counts.max()))  # [B, T]
        real, attend = positions < (done + counts)[:, None], int((done + counts).max())
        for buffer in itertools.chain(*cache.layers):
            buffer[:, :, -(-attend // 16) * 16 : size] = math.nan
        new, at = torch.where(real, tokens.gather(1, positions), 0), torch.where(real, positions, size)
        logits = model(new[selected], at[selected], cache.view(attend, torch.tensor(rows) if rows else None))
        for i, b in enumerate(selected):
            n = int(counts[b])
            torch.testing.assert_close(logits[i, :n], full[b, done[b] : done[b] + n], rtol=1e-5, atol=1e-5)
            checked += n
        done += counts
    assert checked == int(done.sum()) == 13 + 14 + 16


def export(ppo, folder, dtype=torch.float32, **kwargs):
    """A random model with its tokenizer's folder, exported to `folder`."""
    model = random_model(ppo, vocab_size=110, **kwargs).to(dtype)
    source = folder.parent / "tokenizer"
    source.mkdir(exist_ok=True)
    tokenizer = ppo.HFTokenizer(write_tokenizer(source, CHATML, generation_config={"eos_token_id": [0, 2]}))
    ppo.save_hf_checkpoint(model, tokenizer, folder)
    return model


def equal_states(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def write_sharded(folder):
    """The weights in two files with an index, in place of the single file."""
    state = safetensors.torch.load_file(folder / "model.safetensors")
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(state)}
    for file in set(files.values()):
        safetensors.torch.save_file({name: x for name, x in state.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("kind, tied", [("llama", False), ("qwen2", True), ("qwen3", False), ("qwen3", True)])
def test_an_export_overwrites_an_earlier_one_and_loads_back(ppo, tmp_path, kind, tied):
    export(ppo, tmp_path / "out")
    changes = {"tie_word_embeddings": tied, "architectures": ["X"], "something_of_ours": [1]}
    model = export(ppo, tmp_path / "out", torch.bfloat16, kind=kind, **changes)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw == hf_config(kind, vocab_size=110, **changes) | {"torch_dtype": "bfloat16", "dtype": "bfloat16"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tokenizer"]
    stored = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in stored) != tied
    write_sharded(tmp_path / "out")
    loaded, config = ppo.load_hf_checkpoint(tmp_path / "out")
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert equal_states(loaded, model.float()) and config == loaded.config
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    tokenizer = ppo.HFTokenizer(tmp_path / "out")
    assert tokenizer.stop_ids == [0, 2] and tokenizer.encode_prompt("x")[0] == 1


@pytest.mark.parametrize("tied", [True, False])
def test_a_scalar_head_must_be_in_the_files_and_have_one_label(ppo, tmp_path, tied):
    """Otherwise a language model, or a classifier, would be a reward model that means nothing."""
    model = export(ppo, tmp_path / "out", tie_word_embeddings=tied)
    with pytest.raises(ppo.UserError, match=r"score\.weight is missing in the files, \[1, 32\] in the model"):
        ppo.load_hf_checkpoint(tmp_path / "out", head="scalar")
    edit(tmp_path / "out", "score.weight", torch.randn(2, 32))
    with pytest.raises(ppo.UserError, match=r"score\.weight is \[2, 32\] in the files, \[1, 32\] in the model"):
        ppo.load_hf_checkpoint(tmp_path / "out", head="scalar")
    score = torch.randn(1, 32)
    edit(tmp_path / "out", "score.weight", score)
    critic, _ = ppo.load_hf_checkpoint(tmp_path / "out", head="scalar")
    assert equal_states(critic.model, model.model) and torch.equal(critic.score.weight, score)
    half, _ = ppo.load_hf_checkpoint(tmp_path / "out", torch.bfloat16, head="scalar")  # its head stays in float32
    tokens = torch.randint(110, (2, 5))
    assert half.model.norm.weight.dtype == torch.bfloat16 and half(tokens).dtype == torch.float32
    torch.testing.assert_close(half(tokens), critic(tokens), rtol=0.1, atol=0.3)


def edit(folder, name, tensor):
    state = safetensors.torch.load_file(folder / WEIGHTS) | {name: tensor}
    safetensors.torch.save_file({k: v for k, v in state.items() if v is not None}, folder / WEIGHTS)


remove = lambda name: lambda folder: (folder / name).unlink()
cut = lambda name, size: lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])
tensor = lambda *change: lambda folder: edit(folder, *change)
NORM, WEIGHTS = "model.layers.1.input_layernorm.weight", "model.safetensors"


@pytest.mark.parametrize("named, damage", [
    ("config.json", [remove("config.json")]), ("config.json", [cut("config.json", 9)]), ("norm", [remove(WEIGHTS)]),
    ("safetensors", [cut(WEIGHTS, -9)]), ("safetensors", [cut(WEIGHTS, 20)]), ("safetensors", [cut(WEIGHTS, 0)]),
    ("layers.0", [write_sharded, remove("model-00002-of-00002.safetensors")]),
    (NORM, [tensor(NORM, torch.zeros(7))]), (NORM, [tensor(NORM, None)]), ("lora", [tensor("lora", torch.zeros(2))]),
    ("lm_head.weight", [tensor("lm_head.weight", None)]),
    ("tokenizer.json", [remove("tokenizer.json")]), ("tokenizer.json", [cut("tokenizer.json", 99)]),
    ("tokenizer_config", [cut("tokenizer_config.json", 9)]),
    ("eos", [remove("generation_config.json"), lambda folder: (folder / "tokenizer_config.json").write_text("{}")]),
])  # fmt: skip
def test_damaged_folders_are_one_line_that_names_file_or_tensor(ppo, tmp_path, named, damage):
    export(ppo, tmp_path / "out")
    for step in damage:
        step(tmp_path / "out")
    with pytest.raises(ppo.UserError) as error:
        ppo.load_hf_checkpoint(tmp_path / "out")
        ppo.HFTokenizer(tmp_path / "out")
    assert named in str(error.value) and str(tmp_path / "out") in str(error.value) and "\n" not in str(error.value)


def test_weights_are_copied_by_name_and_in_place(ppo):
    actor, sampler = random_model(ppo), random_model(ppo)
    addresses = [p.data_ptr() for p in sampler.parameters()]
    ppo.copy_weights(actor, sampler)
    assert equal_states(actor, sampler) and addresses == [p.data_ptr() for p in sampler.parameters()]


@pytest.mark.parametrize("tied", [True, False])
def test_bfloat16_forwards_train_float32_weights_and_the_sampler_agrees(ppo, tied):
    try:
        args = ppo.Args(device="cpu", dtype="bfloat16", compile="off")
        world, dtype = ppo.connect(args), torch.bfloat16
        actor, tokens = random_model(ppo, tie_word_embeddings=tied, rope_scaling=LLAMA3_ROPE), torch.arange(9)[None]
        exact = actor(tokens).detach()
        sampler = ppo.materialize(ppo.on_meta(actor.config).to(dtype), world.device)
        ppo.shard(actor, args, world)
        ppo.copy_weights(actor, sampler)
        assert {p.dtype for p in sampler.parameters()} == {torch.bfloat16} and torch.equal(sampler.rope, actor.rope)
        assert (sampler.lm_head.weight is sampler.model.embed_tokens.weight) == tied
        trained = actor(tokens)
        for logits in (trained, sampler(tokens)):
            assert logits.dtype == torch.bfloat16 and (logits - exact).abs().mean() < 0.03 * exact.std()
        trained.sum().backward()
        assert {x.dtype for p in actor.parameters() for x in (p, p.grad)} == {torch.float32}
    finally:
        torch.distributed.destroy_process_group()
