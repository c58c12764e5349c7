"""forks/any_model.patch: models of transformers in place of the script's, family by family, and with all else."""

import json
import re
import shutil

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import transformers
from check_model import differences, patched_module, randomised
from conftest import ROOT, slow_but
from distributed_worker import run_on_ranks
from test_forks import run
from test_vllm import patched as patched_with_a_mistake

import ppo_llm

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=8, vocab_size=99, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
             moe_intermediate_size=16, num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2,
             moe_num_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, sliding_window=7)  # fmt: skip
MIXED = dict(layer_types=["sliding_attention", "full_attention"])
LATENT = dict(num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
              v_head_dim=8)  # fmt: skip
LONGROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.1] * 4, long_factor=[9.0] * 4)
FAMILIES = {  # name: (model_type, changes of SIZES). Those of QUICK run in every run of the tests, the others if slow.
    "llama": ("llama", {}),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", dict(sliding_window=None)),
    "mistral, window": ("mistral", {}),
    "ministral": ("ministral", {}),
    "ministral 3": ("ministral3", {}),
    "gemma": ("gemma", dict(tie_word_embeddings=True)),
    "gemma 2, two soft caps": ("gemma2", dict(final_logit_softcapping=1.0, attn_logit_softcapping=2.0)),
    "vaultgemma": ("vaultgemma", dict(final_logit_softcapping=1.0, attn_logit_softcapping=2.0)),
    "gemma 3": ("gemma3_text", MIXED | dict(query_pre_attn_scalar=24, tie_word_embeddings=True)),
    "gemma 4, keys shared by layers": ("gemma4_text", dict(
        layer_types=MIXED["layer_types"] * 2, num_hidden_layers=4, num_kv_shared_layers=2, global_head_dim=16,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=99, final_logit_softcapping=1.0)),
    "nanochat": ("nanochat", dict(final_logit_softcapping=1.0)),
    "olmo": ("olmo", {}),
    "olmo 2": ("olmo2", {}),
    "olmo 3": ("olmo3", MIXED),
    "smollm 3": ("smollm3", dict(no_rope_layers=[1, 0])),
    "phi 3": ("phi3", {}),
    "phi 4 mini": ("phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=128, sliding_window=None)),
    "granite": ("granite", dict(logits_scaling=3.0, attention_multiplier=0.2, embedding_multiplier=5.0,
                                residual_multiplier=0.7)),
    "granite, window and sinks": ("granite_swa", MIXED),
    "cohere": ("cohere", dict(logit_scale=0.5)),
    "cohere 2": ("cohere2", MIXED | dict(logit_scale=0.5)),
    "glm 4": ("glm4", {}),
    "exaone 4": ("exaone4", MIXED),
    "starcoder 2": ("starcoder2", {}),
    "helium": ("helium", {}),
    "ernie 4.5": ("ernie4_5", {}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "seed-oss": ("seed_oss", {}),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "gpt 2": ("gpt2", {}),
    "gpt-neox": ("gpt_neox", {}),
    "opt": ("opt", {}),
    "opt 350m, narrow embedding": ("opt", dict(word_embed_proj_dim=16, do_layer_norm_before=False)),
    "minicpm 3, latent attention": ("minicpm3", LATENT | dict(scale_emb=2, dim_model_base=16)),
    "qwen3 mixture": ("qwen3_moe", {}),
    "qwen2 mixture": ("qwen2_moe", {}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "granite mixture": ("granitemoe", dict(logits_scaling=3.0)),
    "phi 3.5 mixture": ("phimoe", {}),
    "gpt-oss, sinks": ("gpt_oss", MIXED),
    "glm 4.5 mixture": ("glm4_moe", {}),
    "deepseek v2": ("deepseek_v2", LATENT),
    "deepseek v3": ("deepseek_v3", LATENT),
    "mimo, heads that differ by layer": ("mimo_v2_flash", MIXED | dict(
        swa_num_key_value_heads=4, v_head_dim=8, swa_head_dim=8, swa_v_head_dim=8)),
}  # fmt: skip
QUICK = ["mistral, window", "gemma 2, two soft caps", "gemma 3", "granite", "gemma 4, keys shared by layers",
         "qwen3 mixture", "gpt-oss, sinks", "opt 350m, narrow embedding"]  # fmt: skip
NO_CAUSAL = "not causal attention in every layer"
NO_HEAD = "its head has a bias or an unknown form"
REFUSED = {
    "phi": ("PhiForCausalLM: " + NO_HEAD, {}),
    "qwen3_next": ("Qwen3NextForCausalLM: " + NO_CAUSAL, {}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM: " + NO_CAUSAL, {}),
    "lfm2": ("Lfm2ForCausalLM: " + NO_CAUSAL, dict(layer_types=["conv", "full_attention"])),
    "falcon_h1": ("FalconH1ForCausalLM: " + NO_CAUSAL, {}),
    "mamba": ("MambaForCausalLM: " + NO_CAUSAL, {}),
    "llama4_text": ("Llama4ForCausalLM: " + NO_CAUSAL, {}),  # in chunks
    "diffllama": ("DiffLlamaForCausalLM: " + NO_CAUSAL, {}),  # attention that runs twice
    "stablelm": ("StableLmForCausalLM: " + NO_CAUSAL, {}),
    "nemotron": ("NemotronForCausalLM: " + NO_CAUSAL, {}),
    "gptj": ("cannot make a gptj with the attention of the script: ", {}),
    "deepseek_v32": ("DeepseekV32ForCausalLM: " + NO_CAUSAL, LATENT),  # a choice of tokens
    "bloom": ("BloomForCausalLM: " + NO_CAUSAL, {}),
    "bert": ("BertLMHeadModel: " + NO_CAUSAL, {}),
    "t5": ("Unrecognized configuration class", {}),
    "gemma3": ("Gemma3ForConditionalGeneration: " + NO_CAUSAL, {}),  # which sees images
}


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return patched_module(tmp_path_factory.mktemp("any_model"))


def config_of(kind, **settings):
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    return transformers.AutoConfig.for_model(kind, **settings)


def family_config(name):
    kind, changes = FAMILIES[name]
    return config_of(kind, **SIZES | changes)


def checkpoint_of(config, folder, auto=transformers.AutoModelForCausalLM, **saving):
    """A folder of transformers, in which no weight has a special value."""
    randomised(auto.from_config(config)).save_pretrained(folder, **saving)
    return folder


@pytest.mark.parametrize("name", slow_but(QUICK, FAMILIES))
def test_a_family_is_that_of_transformers(patched, tmp_path, name):
    """Log-probs, entropies, values and gradients of packed samples, decoding in waves and turns, and the export."""
    found = differences(patched, checkpoint_of(family_config(name), tmp_path / "in"), tmp_path)
    assert found["spread of the logits"] > 0.1 and len(found) == 8
    assert not beyond_rounding(found), found


def beyond_rounding(found):
    """What differs by more. Rounding differs, as it does between two kinds of attention in transformers."""
    spread = max(1.0, found.pop("spread of the logits"))
    allowed = lambda what: 1e-5 if what in ("log-probs", "entropies", "log-probs in decoding") else 1e-4
    return [what for what, x in found.items() if not x <= allowed(what) * spread]


LOGITS = "soft_capped(float32_product(hidden, weight.T), cap)"
LATE = "soft_capped(float32_product(hidden, weight.T) / temperature, cap)"
CAP_MISTAKES = {  # (text of the patched script, what is planted in its place, what then differs from transformers)
    "no derivative": ("d_logits *= 1 - (capped / cap) ** 2", "pass", ["gradient of log-probs"]),
    "after the temperature": (f"logits = {LOGITS} / temperature", f"logits = {LATE}", ["log-probs", "entropies"]),
    "after the temperature, in gradients": (
        f"capped = {LOGITS}", f"capped = temperature * {LATE}", ["gradient of log-probs"]),
    "not in decoding": (
        "soft_capped(float32_product(x * self.scale, self.lm_head.weight.T), self.cap)",
        "float32_product(x * self.scale, self.lm_head.weight.T)", ["log-probs in decoding"]),
    "not in all logits": (
        "return soft_capped(self.lm_head(x * self.scale), self.cap)", "return self.lm_head(x * self.scale)",
        ["logits of the export"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CAP_MISTAKES)
def test_a_mistake_in_the_soft_cap_of_logits_is_found(tmp_path, name):
    *mistake, expected = CAP_MISTAKES[name]
    folder = checkpoint_of(family_config("gemma 2, two soft caps"), tmp_path / "in")
    with patched_with_a_mistake(tmp_path, "any_model", *mistake) as ppo:
        assert beyond_rounding(differences(ppo, folder, tmp_path)) == expected


def test_a_head_with_a_soft_cap_is_that_of_autograd_in_float64_and_so_are_two_derivatives(patched):
    """Of the whole logits, written out. The head computes them in three chunks."""
    states, weight, targets = torch.randn(9, 8), torch.randn(50, 8), torch.randint(50, (9,))

    def by_hand(states, weight):
        p = (2.0 * torch.tanh(states @ weight.T / 2.0) / 0.7).softmax(-1)
        return p[torch.arange(9), targets].log(), -(p * p.log()).sum(-1)

    def in_chunks(states, weight):
        return patched.ChunkedLogprobs.apply(states, weight, targets, 0.7, 4, "off", 2.0)

    def derivatives(function, *inputs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        logprobs, entropies = function(*inputs)
        loss = (logprobs * targets.cos() + entropies * targets.sin()).sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        second = torch.autograd.grad(sum((x**2).sum() for x in first), inputs)
        return logprobs, entropies, *first, *second

    expected = derivatives(by_hand, states.double(), weight.double())
    assert (states @ weight.T).abs().max() > 2 * 2.0  # The cap bends.
    for x, y in zip(derivatives(in_chunks, states, weight), expected, strict=True):
        assert (x - y).norm() <= 1e-6 * y.norm()


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_computed_is_refused_by_name_before_weights_are_loaded(patched, tmp_path, kind):
    message, changes = REFUSED[kind]
    sizes = SIZES if kind != "gemma3" else {}
    config_of(kind, **sizes | changes).save_pretrained(tmp_path)  # no weights
    shutil.copy(tokenizer_folder(patched, tmp_path / "tokenizer") / "tokenizer.json", tmp_path)
    shutil.copy(tmp_path / "tokenizer" / "tokenizer_config.json", tmp_path)
    args = patched.Args(max_prompt_tokens=9, max_new_tokens=9, device="cpu", dtype="float32", compile="off")
    # Versions of transformers differ in whether a family takes any attention at all.
    older = f"cannot make a {kind} with the attention of the script: KeyError"
    newer = "GPTJForCausalLM: not causal attention in every layer"
    with pytest.raises(patched.UserError, match=f"{re.escape(message)}|{older}|{newer}"):
        patched.load_model(str(tmp_path), "lm", args)


def test_a_version_of_transformers_that_requirements_txt_excludes_is_named(patched, tmp_path, monkeypatch):
    lowest = re.search(r"^transformers>=([\d.]+),", (ROOT / "requirements.txt").read_text(), re.M)[1]
    family_config("qwen3").save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.utils, "__version__", lowest)
    patched.load_config(str(tmp_path))
    monkeypatch.setattr(transformers.utils, "__version__", "5.3.0")
    with pytest.raises(patched.UserError, match=f"a minimum version of {lowest}, but the version found is 5.3"):
        patched.load_config(str(tmp_path))


@pytest.mark.parametrize("kind, auto", [("t5", "AutoModelForCausalLM"), ("granite", "AutoModelForSequenceClassification")])  # noqa: E501
def test_a_model_that_only_code_of_its_own_makes_is_refused_at_once(patched, tmp_path, monkeypatch, kind, auto):
    """The configuration is one of transformers. Of Granite it has no classifier."""
    config = family_config("granite") if kind == "granite" else transformers.AutoConfig.for_model(kind)
    config.auto_map = {auto: "modeling_new.NewModel"}
    config.save_pretrained(tmp_path)
    safetensors.torch.save_file({}, tmp_path / "model.safetensors")
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("It asks."))
    with pytest.raises(patched.UserError, match="contains custom code which must be executed"):
        patched.load_hf_checkpoint(tmp_path, "scalar")


def tokenizer_folder(ppo, folder):
    ppo.HFTokenizer.from_texts(["0123456789=abcdefwx"]).hf.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["gemma 3", "qwen3 mixture", "deepseek v3"])
@torch.no_grad()
def test_a_checkpoint_in_several_files(patched, tmp_path, name):
    folder = checkpoint_of(family_config(name), tmp_path / "in", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    ids = torch.randint(99, (2, 20))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    torch.testing.assert_close(patched.load_hf_checkpoint(folder)[0](ids), theirs(ids).logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_buffers_and_weights_are_right_in_every_model_of_a_run(patched, tmp_path):
    """They are made without storage: actor, its copies, critic; the sampler in bfloat16 has its buffers in float32."""
    config = family_config("gemma 3")
    folder = tokenizer_folder(patched, checkpoint_of(config, tmp_path / "in"))
    lengths = dict(max_prompt_tokens=9, max_new_tokens=9)
    args = patched.Args(model=str(folder), device="cpu", dtype="bfloat16", compile="off", **lengths)
    tokenizer, actor = patched.load_model(str(folder), "lm", args)
    critic = patched.build_critic(actor, tokenizer, args)
    models = [actor, patched.copy_model(actor, args), critic, patched.copy_model(actor, args, sampler=True)]
    theirs = dict(transformers.AutoModelForCausalLM.from_pretrained(folder).named_buffers())
    assert {"model.embed_tokens.embed_scale", "model.rotary_emb.sliding_attention_inv_freq"} <= theirs.keys()
    for model in models:
        ours = dict(model.named_buffers())
        assert all(torch.equal(ours[name], x) and ours[name].dtype == x.dtype for name, x in theirs.items())
        assert not any(patched.full_tensor(p).isnan().any() for p in model.parameters())
    assert not patched.full_tensor(critic.score.weight).any()
    assert all(p.dtype == torch.bfloat16 for p in models[-1].parameters())
    ids = torch.randint(99, (2, 20))
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(ids).logits.float()
    assert (models[-1](ids).float() - expected).abs().mean() < 0.03 * expected.std()


@pytest.mark.parametrize("name", ["gpt 2", "opt", "gemma 3"])
@torch.no_grad()
def test_all_learned_positions_can_be_used(patched, tmp_path, name):
    """One row ends at the last position, while a finished one waits. One position more is refused.

    openai/gpt-2-simple#72 has the error, as have huggingface/trl#1867 and EleutherAI/gpt-neo#273.
    """
    config = family_config(name)
    config.max_position_embeddings = 32
    folder = tokenizer_folder(patched, checkpoint_of(config, tmp_path))
    args = patched.Args(max_prompt_tokens=8, max_new_tokens=24, device="cpu", dtype="float32", compile="off")
    _, model = patched.load_model(str(folder), "lm", args)
    decoder = patched.Decoder(model, 3, [99], args)  # an id that is never sampled
    episodes = [patched.Episode(seed, noise_key=seed) for seed in range(3)]
    for episode, n, stop in zip(episodes, (8, 3, 5), ("", "", "terminated")):
        episode.add(torch.randint(3, 98, (n,)).tolist())
        episode.prompt_length, episode.stop = n, stop
    patched.generate_turn(decoder, episodes, 0, args)
    assert [len(episode.ids) for episode in episodes] == [32, 27, 5]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for episode in episodes:
        ids = torch.tensor(episode.ids)
        logprobs = theirs(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        expected = torch.where(torch.tensor(episode.mask)[1:], logprobs, 0.0)
        torch.testing.assert_close(torch.tensor(episode.logprobs)[1:], expected, rtol=0, atol=1e-4)
    args.max_new_tokens += 1
    with pytest.raises(patched.UserError, match=r"33 tokens in total, but .* takes at most 32"):
        patched.load_model(str(folder), "lm", args)


def test_longrope_is_limited_to_the_length_at_which_its_frequencies_change(patched, tmp_path):
    folder = tokenizer_folder(patched, checkpoint_of(family_config("phi 4 mini"), tmp_path))
    args = patched.Args(max_prompt_tokens=64, max_new_tokens=64, device="cpu", dtype="float32", compile="off")
    _, model = patched.load_model(str(folder), "lm", args)
    ids = torch.randint(99, (1, 128))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=0, atol=1e-4)
    args.max_new_tokens += 1
    with pytest.raises(patched.UserError, match=r"129 tokens in total, but .* takes at most 128"):
        patched.load_model(str(folder), "lm", args)


@torch.no_grad()
def test_critics_and_reward_models_are_classifiers_of_the_family(patched, tmp_path):
    config = family_config("gemma 3")
    config.num_labels, ids = 1, torch.randint(1, 99, (1, 20))
    auto = transformers.AutoModelForSequenceClassification
    checkpoint_of(config, tmp_path / "classifier", auto)
    checkpoint_of(config, tmp_path / "lm")
    values = {}
    for name, needs_head in (("classifier", True), ("classifier", False), ("lm", False)):
        model = patched.Transformer(patched.load_config(tmp_path / name), "scalar")
        torch.nn.init.zeros_(model.score.weight)
        patched.load_weights(model, tmp_path / name, needs_head)
        values[name, needs_head] = model(ids)
        if name == "classifier":
            theirs = auto.from_pretrained(tmp_path / name)(ids).logits[:, 0]
            torch.testing.assert_close(values[name, needs_head][:, -1], theirs, rtol=0, atol=1e-5)
            tokenizer = patched.HFTokenizer.from_texts(["abc"])
            patched.save_hf_checkpoint(model, tokenizer, tmp_path / f"export {needs_head}")
            exported = auto.from_pretrained(tmp_path / f"export {needs_head}")
            assert exported.config.num_labels == 1
            torch.testing.assert_close(exported(ids).logits[:, 0], theirs, rtol=0, atol=1e-5)
    assert values["classifier", True].std() > 0.1 and not values["lm", False].any()
    with pytest.raises(patched.UserError, match="the files lack score"):
        patched.load_weights(model, tmp_path / "lm")


def test_checkpoints_that_do_not_fit_are_refused(patched, tmp_path):
    folder = checkpoint_of(family_config("olmo 2"), tmp_path)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())

    def error(match, changes=(), **config_changes):
        safetensors.torch.save_file(weights | dict(changes), folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | config_changes))
        with pytest.raises(patched.UserError, match=match):
            patched.load_hf_checkpoint(folder)

    error("the model has no model.layers.0.self_attn.q_proj.bias",
          {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})  # fmt: skip
    error("lm_head.weight is not the embedding, to which config.json ties it", tie_word_embeddings=True)
    del weights["model.norm.weight"]
    error("the files lack model.norm.weight")


@pytest.mark.parametrize("asks", [
    dict(output_router_logits=True, output_attentions=True, output_hidden_states=True),
    dict(return_dict=False, use_cache=False), dict(attn_implementation="flash_attention_2"),
])  # fmt: skip
@torch.no_grad()
def test_what_config_json_asks_of_a_forward_pass_is_set_aside_but_exported(patched, tmp_path, asks):
    """huggingface/transformers#44242, huggingface/transformers#45120"""
    folder, ids = checkpoint_of(family_config("qwen3 mixture"), tmp_path / "in"), torch.randint(99, (2, 20))
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    content = json.loads((folder / "config.json").read_text()) | asks
    (folder / "config.json").write_text(json.dumps(content))
    ours, _ = patched.load_hf_checkpoint(folder)
    ours.model.register_forward_hook(lambda model, inputs, out: seen.extend(out))
    seen = []
    torch.testing.assert_close(ours(ids), expected, rtol=0, atol=1e-5)
    assert seen == ["last_hidden_state"]
    patched.save_hf_checkpoint(ours, patched.HFTokenizer.from_texts(["abc"]), tmp_path / "out")
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert all(exported.get(name) == (None if "flash" in str(x) else x) for name, x in asks.items())


def fp8_folder(folder):
    """A checkpoint in FP8, and the model that it stands for."""
    pytest.importorskip("transformers.integrations.finegrained_fp8")  # Older versions import triton there.
    config = transformers.AutoConfig.for_model("qwen3", **SIZES | dict(hidden_size=128, num_attention_heads=16))
    model = randomised(transformers.AutoModelForCausalLM.from_config(config))
    model.save_pretrained(folder)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    for name, x in dict(weights).items():
        if "proj" in name:
            scale = x.abs().max() / 448
            weights[name] = (x / scale).to(torch.float8_e4m3fn)
            weights[name + "_scale_inv"] = scale.reshape(1, 1)
            model.get_parameter(name).data = weights[name].float() * scale
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    method = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128])
    content = json.loads((folder / "config.json").read_text()) | {"quantization_config": method}
    (folder / "config.json").write_text(json.dumps(content))
    return model


def mxfp4_folder(folder):
    """A checkpoint in the format of gpt-oss, and the model that it stands for."""
    unpack = transformers.integrations.mxfp4.convert_moe_packed_tensors
    config = transformers.AutoConfig.for_model("gpt_oss", **SIZES | dict(intermediate_size=64))
    model = randomised(transformers.AutoModelForCausalLM.from_config(config))
    model.save_pretrained(folder)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj")]:
        experts, inner, outer = weights.pop(name).shape
        blocks = torch.randint(256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 122, blocks.shape[:3], dtype=torch.uint8)
        weights |= {name + "_blocks": blocks, name + "_scales": scales}
        model.get_parameter(name).data = unpack(blocks, scales, dtype=torch.float32)
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    content = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(content))
    return model


@pytest.mark.parametrize("quantized", [fp8_folder, mxfp4_folder])
@torch.no_grad()
def test_quantized_weights_are_multiplied_by_their_scales(patched, tmp_path, monkeypatch, quantized):
    """Without a GPU transformers does so in any case, so the check of the device is left out: a simulation.

    unslothai/unsloth#6200, unslothai/unsloth#6978, leejet/stable-diffusion.cpp#1898
    """
    model, quantizers = quantized(tmp_path / "in"), transformers.quantizers
    kind = (quantizers.quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer if quantized is fp8_folder else
            quantizers.quantizer_mxfp4.Mxfp4HfQuantizer)  # fmt: skip
    monkeypatch.setattr(kind, "validate_environment", lambda self, *args, **kwargs: None)
    ids = torch.randint(99, (2, 20))
    ours, _ = patched.load_hf_checkpoint(tmp_path / "in")
    torch.testing.assert_close(ours(ids), model(ids).logits, rtol=0, atol=1e-4)
    patched.save_hf_checkpoint(ours, patched.HFTokenizer.from_texts(["abc"]), tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_weights_that_stay_quantized_are_refused(patched, tmp_path, monkeypatch):
    """As by methods that cannot undo their quantization."""
    ignore = lambda self, *args, **kwargs: setattr(self.quantization_config, "dequantize", False)
    kind = transformers.quantizers.quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer
    monkeypatch.setattr(kind, "validate_environment", ignore)
    fp8_folder(tmp_path / "in")
    with pytest.raises(patched.UserError, match=r"quantization_config .*: weights must be dequantized"):
        patched.load_hf_checkpoint(tmp_path / "in")


def training_folder(folder, name):
    """A tiny random model with the tokenizer of the characters that the tests' environments use."""
    tokenizer_folder(ppo_llm, folder)
    config = family_config(name)
    config.vocab_size = 40
    config.eos_token_id, config.pad_token_id = 1, 0
    return str(checkpoint_of(config, folder))


@pytest.fixture
def flags(tmp_path):
    return lambda name, **more: dict(model=training_folder(tmp_path / "in", name), sft_steps=0, max_prompt_tokens=16,
                                     actor_lr=5e-4, critic_lr=1e-3, **more)  # fmt: skip


def without_clock(rows):
    return [{name: x for name, x in row.items() if not name.startswith("time/")} for row in rows]


@pytest.mark.parametrize("patches", ["any_model,group_normalised,sampler_correction", "any_model,lora"])
def test_training_with_another_patch(tmp_path, flags, patches):
    name = "gemma 3" if "lora" in patches else "qwen3 mixture"
    _, rows, folder = run(patches, tmp_path, **flags(name, n_samples_per_prompt=2))
    assert len(rows) == 2 and all(row["debug/sampler_trainer_logprob_diff"] < 1e-5 for row in rows)
    assert rows[0]["actor/grad_norm"] > 0 and rows[1]["ratio/last_dev"] > 0
    transformers.AutoModelForCausalLM.from_pretrained(folder / "model")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma 3", "qwen3 mixture"])
def test_a_resumed_run_is_bit_identical(tmp_path, flags, name):
    settings = flags(name, env_id="environments:TwoTurns-v0", max_new_tokens=12)
    _, rows, folder = run("any_model", tmp_path, **settings)
    exported = (folder / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "checkpoints" / "iter_000002")
    _, resumed, _ = run("any_model", tmp_path, resume="auto", **settings)
    assert without_clock(resumed) == without_clock(rows)
    assert (folder / "model" / "model.safetensors").read_bytes() == exported


@pytest.mark.slow
@pytest.mark.parametrize("changes", [dict(activation_checkpointing=True), dict(micro_batch_tokens=48)], ids=str)
@pytest.mark.parametrize("name", ["gemma 3", "qwen3 mixture"])
def test_checkpointing_of_activations_and_other_microbatches_change_nothing(tmp_path, flags, name, changes):
    settings = flags(name)
    _, rows, folder = run("any_model", tmp_path, **settings)
    shutil.rmtree(folder)
    _, others, _ = run("any_model", tmp_path, **settings, **changes)
    for row, other in zip(rows, others, strict=True):
        for key in ("actor/grad_norm", "critic/grad_norm", "objective/reward", "ratio/last_dev"):
            assert other[key] == pytest.approx(row[key], rel=1e-3, abs=1e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma 3", "qwen3 mixture", "gpt-oss, sinks"])
def test_training_in_bfloat16(tmp_path, flags, name):
    """The first ratio is exactly 1; `run` asserts it."""
    _, rows, _ = run("any_model", tmp_path, **flags(name, dtype="bfloat16"))
    gaps = [row["debug/sampler_trainer_logprob_diff"] for row in rows]
    assert max(gaps) < 0.1, gaps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma 3", "qwen3 mixture"])
def test_two_ranks_compute_the_same_as_one(tmp_path, name):
    settings = dict(model=training_folder(tmp_path / "in", name), sft_steps=0, max_prompt_tokens=16, max_new_tokens=5,
                    actor_lr=5e-4, critic_lr=1e-3, num_iterations=2, rollout_batch_size=16, train_batch_size=8,
                    eval_episodes=4, save_every=0, env_id="environments:Plain-v0", device="cpu")  # fmt: skip
    logs = []
    for ranks in (1, 2):
        (tmp_path / f"{ranks}").mkdir()
        ppo = patched_module(tmp_path / f"{ranks}")
        run_on_ranks(ppo, tmp_path / f"{ranks}", ranks, ["run", settings, None])
        text = (tmp_path / f"{ranks}" / "run" / "metrics.jsonl").read_text()
        logs.append([json.loads(line) for line in text.splitlines()])
    for one, two in zip(*logs, strict=True):
        for key in ("actor/grad_norm", "critic/grad_norm", "objective/reward", "ratio/last_dev"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key
    seen = json.loads((tmp_path / "2" / "run.0.json").read_text())
    assert seen["models"]["actor"] == ["DTensor", "torch.float32"]
    exports = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / x / "run" / "model") for x in "12"]
    for one, two in zip(*(model.parameters() for model in exports), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma 3", "qwen3 mixture"])
def test_compiled_layers_have_no_graph_breaks(patched, tmp_path, name, monkeypatch):
    """And the numbers of layers that are not compiled. What is compiled runs as PyTorch's operators here."""
    model, _ = patched.load_hf_checkpoint(checkpoint_of(family_config(name), tmp_path))
    episodes = [patched.Episode(seed) for seed in range(3)]
    for episode, n in zip(episodes, (4, 11, 20)):
        episode.add([5] * 3)
        episode.add(torch.randint(6, 99, (n,)).tolist(), [0.0] * n)
    mb = patched.Experience.from_episodes(episodes).microbatch(torch.arange(3), "cpu")
    expected, _ = model.sampled_logprobs(mb, 1.0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in model.model.layers:
        block.compile(dynamic=True, backend="aot_eager")
    torch.testing.assert_close(model.sampled_logprobs(mb, 1.0)[0], expected, rtol=0, atol=1e-5)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] > 0 and not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma 3", "gpt-oss, sinks"])
def test_continuous_batching_samples_the_same(tmp_path, flags, name):
    """Both scripts sample the same texts with log-probs that are equal up to rounding, over several turns."""
    episodes = []
    for script in ("ppo_llm", "ppo_llm_continuous_batching"):
        folder = tmp_path / script
        folder.mkdir()
        ppo = patched_module(folder, script)
        args = dict(model=training_folder(folder / "in", name), sft_steps=0, max_prompt_tokens=16, max_new_tokens=12)
        torch.manual_seed(0)
        args = ppo.Args(env_id="environments:Endless-v0", device="cpu", dtype="float32", compile="off", **args)
        tokenizer, actor = ppo.load_model(args.model, "lm", args)
        envs = [ppo.gym.make(args.env_id, disable_env_checker=True) for _ in range(4)]
        decoder = ppo.Decoder(ppo.copy_model(actor, args, sampler=True), 4, tokenizer.stop_ids, args)
        episodes.append(ppo.rollout_share(decoder, tokenizer, envs, range(10), range(10), 0, args))
    for one, two in zip(*episodes, strict=True):
        assert one.ids == two.ids and one.logprobs == pytest.approx(two.logprobs, abs=1e-5)
    assert any(len(e.response_starts) > 1 for e in episodes[0])


GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<start>{{ 'model' if m.role == 'assistant' else m.role }}:{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>model:{% endif %}"
)


def test_a_chat_template_like_that_of_gemma(tmp_path):
    """It writes <bos>, ends turns by another token than eos, calls the assistant model and has no system turn."""
    hf = ppo_llm.HFTokenizer.from_texts(["moduelsr:abc\n"]).hf
    hf.add_special_tokens(dict(bos_token="<bos>", additional_special_tokens=["<start>", "<end>"]))
    hf.chat_template = GEMMA
    hf.save_pretrained(tmp_path)
    tokenizer = ppo_llm.HFTokenizer(tmp_path)
    decode = lambda ids: tokenizer.hf.decode(ids).replace(" ", "")
    assert decode(tokenizer.encode_prompt("ab")) == "<bos><start>user:ab<end>\n<start>model:"
    assert tokenizer.hf.convert_ids_to_tokens(tokenizer.stop_ids) == ["<eos>", "<end>"]
    assert decode(tokenizer.encode_feedback("c", tokenizer.end_of_turn_id)) == "\n<start>user:c<end>\n<start>model:"
    with pytest.raises(ppo_llm.UserError, match="no system role"):
        tokenizer.encode_prompt([dict(role="system", content="a"), dict(role="user", content="b")])


def test_the_page_lists_the_families_that_are_tested():
    page = (ROOT / "docs" / "other_models.md").read_text()
    rows = re.findall(r"^\| .+ \| `(\w+)` \| .* \|$", page, re.M)
    assert sorted({*rows}) == sorted({kind for kind, _ in FAMILIES.values()})
