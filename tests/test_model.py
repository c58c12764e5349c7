"""Tokenizer, forward with a cache, sampling noise, checkpoint folders and copies of weights."""

import json
import math

import pytest
import safetensors.torch
import tokenizers
import torch
from test_rollout import make_model
from transformers import PreTrainedTokenizerFast

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
    "original_max_position_embeddings": 32}  # fmt: skip


def character_tokenizer(bos=False):
    characters = sorted({chr(i) for i in range(32, 127)} | set("\näß中▁"))
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


def ids_of(text):  # in which special tokens are written out
    return character_tokenizer().encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", ["", "52814=12458", "naïve Größe 中文 🙂\n\tend", "  two  spaces "])
def test_the_character_tokenizer_gives_back_the_text_and_skips_other_ids(ppo, text):
    tokenizer = ppo.HFTokenizer.from_texts([text, "other"])
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and not {tokenizer.eos_id, tokenizer.pad_id} & set(ids)
    ids = [tokenizer.pad_id, *tokenizer.encode("X"), *ids, tokenizer.vocab_size, 10**6, tokenizer.eos_id]
    assert len(tokenizer.encode("X")) == 1 and tokenizer.decode(ids) == text


@pytest.mark.parametrize("files, stop_ids, eos_id", [
    ({"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": [0, 3]}}, [0, 2, 3], 2),
    ({"tokenizer_config": {"eos_token": {"content": "<|eot|>", "__type": "AddedToken"}}}, [3], 3),
    ({"tokenizer_config": {}, "config": {"eos_token_id": [2, 0, -1]}}, [0, 2], 0),  # -1 stands for none
    ({"tokenizer_config": None, "config": {"eos_token_id": None}, "generation_config": {"eos_token_id": 2}}, [2], 2),
])  # fmt: skip
def test_stop_ids_are_those_of_config_generation_config_and_tokenizer(ppo, tmp_path, files, stop_ids, eos_id):
    tokenizer = ppo.HFTokenizer(write_tokenizer(tmp_path, **files))
    assert (tokenizer.stop_ids, tokenizer.eos_id, tokenizer.pad_id) == (stop_ids, eos_id, 0)


def test_bos_is_once_before_the_prompt_and_feedback_begins_after_the_stop_token(ppo, tmp_path):
    """Llama 2's template puts a space before it."""
    tokenizer = ppo.HFTokenizer(write_tokenizer(tmp_path, bos=True))
    assert tokenizer.encode_prompt("hello") == [4, *ids_of("hello")]
    assert tokenizer.encode_feedback("hello", tokenizer.eos_id) == ids_of("hello")
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
        "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}")  # fmt: skip
    tokenizer = ppo.HFTokenizer(write_tokenizer(tmp_path, template, bos=True))
    for ids in tokenizer.encode_prompt("hello"), tokenizer.encode_feedback("hello", tokenizer.eos_id):
        assert ids == ids_of("<s>[INST] hello [/INST]")
    only_the_first = ppo.HFTokenizer(write_tokenizer(tmp_path, "{{ messages[0].content }}"))
    with pytest.raises(ppo.UserError, match="leaves out earlier turns"):
        only_the_first.encode_feedback("hello", tokenizer.eos_id)


@pytest.mark.parametrize("template", [CHATML, None])
def test_a_response_that_another_stop_token_ends_is_followed_by_the_end_of_its_turn(ppo, tmp_path, template):
    tokenizer = ppo.HFTokenizer(write_tokenizer(tmp_path, template))
    whole = "<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    for stop_id in [*ids_of("<|eot|>"), 900]:  # which the vocabulary lacks
        assert tokenizer.encode_feedback("hello", stop_id) == ids_of(whole if template else "hello")


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_texts_have_the_ids_that_they_have_in_the_whole_conversation(ppo, tmp_path, scheme):
    """SentencePiece's tokenizers begin a text with a space. The template has plain text after the stop token."""
    turn = "{% for m in messages %}{{ ('Q: ' if m.role == 'user' else 'A: ') + m.content + '<|im_end|>' }}{% endfor %}"
    for template in turn + "{% if add_generation_prompt %}A:{% endif %}", None:
        write_tokenizer(tmp_path, template)
        file = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        file.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme)
        file.save(str(tmp_path / "tokenizer.json"))
        tokenizer = ppo.HFTokenizer(tmp_path)
        prompt = tokenizer.encode_prompt("hello")
        answer = tokenizer.encode("yes or no", tokenizer.render(ppo.as_messages("hello")))
        feedback = tokenizer.encode_feedback("Too low.", 2)
        whole = "Q: hello<|im_end|>A:yes or no<|im_end|>Q: Too low.<|im_end|>A:" if template else (
            "helloyes or no<|im_end|>Too low.")  # fmt: skip
        assert [*prompt, *answer, 2, *feedback] == tokenizer.encode(whole)


def test_a_text_that_shares_a_token_with_the_one_before_is_encoded_alone(ppo):
    bpe = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "<eos>": 3}, [("a", "b")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(bpe), eos_token="<eos>")
    tokenizer = ppo.HFTokenizer("none", fast)
    assert (tokenizer.encode("bab", "a"), tokenizer.encode("ab", "a")) == ([1, 2], [2])


def test_a_conversation_ends_with_its_response(ppo, tmp_path):
    """The tokenizer would put BOS first. With a template it must not: the template alone does."""
    tokenizer, turns = ppo.HFTokenizer(write_tokenizer(tmp_path, CHATML, bos=True)), ppo.as_messages("hello")
    turns.append({"role": "assistant", "content": "yes"})
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    assert tokenizer.encode_conversation(2 * turns) == ids_of(2 * text)
    plain = ppo.HFTokenizer(write_tokenizer(tmp_path, bos=True))
    assert plain.encode_conversation(turns) == [4, *ids_of("helloyes<|im_end|>")]


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for %}", "{{ ''.__class__.mro() }}"])
def test_a_template_that_fails_is_an_error(ppo, tmp_path, template):
    with pytest.raises(ppo.UserError, match=f"chat template of {tmp_path}: "):
        ppo.HFTokenizer(write_tokenizer(tmp_path, template)).encode_prompt("x")


def random_model(ppo, head="lm", kind="llama", **changes):
    """Every parameter random, norms and biases too: a part that is left out then shows."""
    model = make_model(ppo, 110, kind, head, **dict(tie_word_embeddings=False) | changes)
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=float(p.ndim == 1), std=0.3)
    return model


@pytest.mark.parametrize("kind, heads", [("llama", 4), ("qwen2", 1), ("qwen3", 2)])
@torch.no_grad()
def test_forward_with_cache_equals_the_full_forward(ppo, kind, heads):
    """Ragged prefill, decoding, ragged extension, decoding; over an earlier text, beside NaN that must not be read."""
    model, size, B = random_model(ppo, kind=kind, num_key_value_heads=heads), 40, 3
    tokens, cache = torch.randint(110, (B, size)), ppo.KVCache(model.config, B, size + 1)
    full, everywhere = model(tokens), torch.arange(size).expand(B, size)
    model.prefill(torch.randint(110, (B, size)), everywhere, cache, cache.size)  # an earlier text
    done = torch.zeros(B, dtype=torch.int64)
    for counts in ([5, 0, 7], [0, 3, 0], [1, 1, 1], [1, 1, 1], [4, 1, 3], [1, 1, 1], [0, 6, 2], [1, 1, 1]):
        counts = torch.tensor(counts)
        positions = done[:, None] + torch.arange(int(counts.max()))  # [B, T]
        real, attend = positions < (done + counts)[:, None], ppo.round_up(int((done + counts).max()), 16)
        for keys, values in cache.layers:
            keys[:, :, attend:size] = values[:, :, attend:size] = math.nan
        new, at = torch.where(real, tokens.gather(1, positions), 0), torch.where(real, positions, size)
        logits = model.lm_head(model.prefill(new, at, cache, attend))
        for b, n in enumerate(counts.tolist()):
            torch.testing.assert_close(logits[b, :n], full[b, done[b] : done[b] + n], rtol=1e-5, atol=1e-5)
        done += counts
    assert done.tolist() == [13, 14, 16]


PROBABILITIES = [0.3, 0.2, 0.15, 0.1, 0.08, 0.06, 0.05, 0.03, 0.0185, 0.009, 0.0015, 0.001]


def draws(ppo, seed=1, iteration=0, first=0, padding=0):
    """[256, 200] draws of 256 samples from PROBABILITIES, as the rollout makes them."""
    keys = ppo.sample_keys(seed, iteration, range(first, first + 256)).repeat_interleave(200)
    noise = ppo.gumbel_noise(keys, torch.arange(200).repeat(256), 12 + padding)[:, :12]
    return (torch.tensor(PROBABILITIES).log() + noise).argmax(-1).view(256, 200)


def assert_chi_square(symbols, probabilities):
    expected, degrees = len(symbols) * probabilities, len(probabilities) - 1
    chi_square = ((symbols.bincount(minlength=degrees + 1) - expected).square() / expected).sum()
    assert abs(float(chi_square) - degrees) < 4 * math.sqrt(2 * degrees)


def test_draws_follow_the_distribution(ppo):
    assert_chi_square(draws(ppo).flatten(), torch.tensor(PROBABILITIES))


def test_noise_depends_on_sample_iteration_and_seed_but_not_on_the_size_of_the_vocabulary(ppo):
    """Of other noise a share of draws agrees by chance. Shifted: sample + iteration must not be all that counts."""
    x, by_chance = draws(ppo), torch.tensor(PROBABILITIES).square().sum().item()
    assert torch.equal(x, draws(ppo, padding=37)) and torch.equal(x[1:], draws(ppo, first=1)[:-1])
    for y in (draws(ppo, first=1000), draws(ppo, iteration=1), draws(ppo, iteration=-1), draws(ppo, seed=2)):
        for a, b in ((x, y), (x[1:], y[:-1]), (x[:, 1:], y[:, :-1])):
            assert (a == b).float().mean().item() == pytest.approx(by_chance, abs=0.01)


def test_tails_of_the_noise_are_those_of_a_gumbel_variable(ppo):
    """Over 2**24 values. A uniform of 24 bits gives few distinct small values, and rare tokens are drawn too often."""
    small, large = [], 0
    for i in range(16):
        noise = ppo.gumbel_noise(ppo.sample_keys(1, 0, [i]), torch.tensor([i]), 2**20)
        exponential = torch.exp(-noise.double())
        small += exponential[exponential < 2**-14].tolist()
        large += (exponential > 14 * math.log(2)).sum().item()
        assert noise.isfinite().all()
    assert max(abs(len(small) - 2**10), abs(large - 2**10)) < 4 * 2**5 and len(set(small)) > 0.98 * len(small)


def test_noise_is_uncorrelated_over_samples_tokens_and_ids(ppo):
    """Chi-square over 16 x 16 cells of uniforms (samples, tokens, ids) apart; near keys do not permute it."""
    keys = ppo.sample_keys(1, 0, range(32)).repeat_interleave(32)
    noise = ppo.gumbel_noise(keys, torch.arange(32).repeat(32), 1024).view(32, 32, 1024)
    cells = (torch.exp(-torch.exp(-noise)) * 16).long().clamp(max=15)
    for i, j, k in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1), (0, 2, 0), (0, 0, 16)):
        pairs = cells[i:, j:, k:] * 16 + cells[: 32 - i, : 32 - j, : 1024 - k]
        assert_chi_square(pairs.flatten(), torch.full((256,), 1 / 256))
    key, index = ppo.sample_keys(1, 0, [0]), torch.arange(2**16)
    token_keys, order = ppo.hash32(ppo.hash32(key ^ 0x5851F42D) ^ index.int()).sort()
    near = int((token_keys[1:] ^ token_keys[:-1]).abs().argmin())  # far less than 1024 apart
    x, y = (ppo.gumbel_noise(key, order[near + i, None], 1024).sort().values for i in (0, 1))
    assert (token_keys[near] ^ token_keys[near + 1]).abs() < 64 and (x == y).sum() < 10


WEIGHTS, NORM = "model.safetensors", "model.layers.1.input_layernorm.weight"


def edit(folder, name, tensor):
    state = safetensors.torch.load_file(folder / WEIGHTS) | {name: tensor}
    safetensors.torch.save_file({k: v for k, v in state.items() if v is not None}, folder / WEIGHTS)


remove = lambda name: lambda folder: (folder / name).unlink()
cut = lambda name, size: lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])
tensor = lambda *change: lambda folder: edit(folder, *change)


@pytest.mark.parametrize("named, damage", [
    ("config.json", remove("config.json")), ("config.json", cut("config.json", 9)), ("there are none", remove(WEIGHTS)),
    ("safetensors", cut(WEIGHTS, -9)), ("safetensors", cut(WEIGHTS, 0)), ("lora", tensor("lora", torch.zeros(2))),
    (NORM, tensor(NORM, torch.zeros(7))), (NORM, tensor(NORM, None)), ("lm_head", tensor("lm_head.weight", None)),
    ("tokenizer.json", remove("tokenizer.json")), ("tokenizer.json", cut("tokenizer.json", 99)),
    ("tokenizer_config", cut("tokenizer_config.json", 9)),
])  # fmt: skip
def test_damaged_folders_are_an_error_that_names_file_or_tensor(ppo, tmp_path, named, damage):
    model, tokenizer = random_model(ppo, eos_token_id=None), ppo.HFTokenizer(write_tokenizer(tmp_path))
    ppo.save_hf_checkpoint(model, tokenizer, tmp_path)
    damage(tmp_path)
    with pytest.raises(ppo.UserError) as error:
        ppo.load_hf_checkpoint(tmp_path)
        ppo.HFTokenizer(tmp_path)
    assert named in str(error.value) and str(tmp_path) in str(error.value)


def test_a_folder_with_other_weights_than_the_models_is_refused(ppo, tmp_path):
    """Without an index all files count. DCP would take one of two tensors of the same name."""
    model = random_model(ppo)
    ppo.save_hf_checkpoint(model, ppo.HFTokenizer(write_tokenizer(tmp_path)), tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "a.safetensors")
    for name, error in (NORM, f"{NORM} is in more than one file"), ("lora_A", "the model has no lora_A"):
        safetensors.torch.save_file({name: torch.zeros(64)}, tmp_path / "z.safetensors")
        with pytest.raises(ppo.UserError, match=error):
            ppo.load_hf_checkpoint(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_bfloat16_forwards_train_float32_weights_and_the_sampler_agrees(ppo, tied):
    args = ppo.Args(device="cpu", dtype="bfloat16", compile="off")
    actor, tokens = random_model(ppo, tie_word_embeddings=tied, rope_parameters=LLAMA3_ROPE), torch.arange(9)[None]
    exact = actor(tokens).detach()
    sampler = ppo.build_model(actor.config, "lm", args, sampler=True)
    addresses = [p.data_ptr() for p in sampler.parameters()]
    ppo.shard(actor, args)
    ppo.copy_weights(actor, sampler)
    assert addresses == [p.data_ptr() for p in sampler.parameters()]  # CUDA graphs read them there
    assert {p.dtype for p in sampler.parameters()} == {torch.bfloat16} and torch.equal(sampler.rope, actor.rope)
    assert (sampler.lm_head.weight is sampler.model.embed_tokens.weight) == tied
    trained = actor(tokens)
    for logits in (trained, sampler(tokens)):
        assert logits.dtype == torch.bfloat16 and (logits - exact).abs().mean() < 0.03 * exact.std()
    first = tokens[:, :1], torch.zeros(1, 1, dtype=torch.int64), ppo.KVCache(actor.config, 1, 9, torch.bfloat16), 16
    with torch.no_grad():
        expected = sampler.prefill(*first)[:, 0].float() @ sampler.lm_head.weight.float().T
        torch.testing.assert_close(sampler.next_logits(*first), expected, rtol=1e-5, atol=1e-5)  # without rounding
    trained.sum().backward()
    assert {x.dtype for p in actor.parameters() for x in (p, p.grad)} == {torch.float32}
