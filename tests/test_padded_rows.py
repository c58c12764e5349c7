"""forks/any_model.patch with forks/vllm.patch: families that the script's cache cannot serve run on padded rows."""

import re
import shutil

import pytest
import torch
import torch.distributed as dist
import transformers
from check_model import differences, patched_module
from conftest import ROOT, slow_but
from test_any_model import (
    NO_CAUSAL,
    NO_HEAD,
    SIZES,
    beyond_rounding,
    checkpoint_of,
    config_of,
    tokenizer_folder,
)
from test_forks import run
from test_vllm import flags_of, start_engine
from test_vllm import patched as patched_with_a_mistake

import ppo_llm

HYBRID = dict(layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
              linear_key_head_dim=8, linear_value_head_dim=8, shared_expert_intermediate_size=16)  # fmt: skip
CONV = dict(layer_types=["conv", "full_attention"])
STATES = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=16)
OLDER = dict(n_embd=32, n_head=4, n_layer=2)  # names of older configurations
FAMILIES = {  # {model_type: changes of SIZES}
    "qwen3_next": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID,
    "olmo_hybrid": HYBRID,
    "lfm2": CONV,
    "lfm2_moe": CONV,
    "falcon_h1": STATES | dict(mamba_d_ssm=32, mamba_n_heads=4),
    "granitemoehybrid": STATES | dict(layer_types=["mamba", "attention"], shared_intermediate_size=16),
    "bamba": STATES | dict(attn_layer_indices=[1]),
    "nemotron_h": dict(layers_block_type=["mamba", "attention"], mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8,
                       n_groups=1, chunk_size=16),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
                  mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False),
    "mamba": dict(state_size=8),
    "mamba2": dict(state_size=8, num_heads=8, n_groups=1, chunk_size=16),
    "stablelm": {},
    "nemotron": {},
    "diffllama": {},
    "doge": {},
    "bloom": OLDER,
    "mpt": dict(d_model=32, n_heads=4, n_layers=2),
}  # fmt: skip
QUICK = ["qwen3_5_text", "stablelm"]


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return patched_module(tmp_path_factory.mktemp("padded_rows"), patches=("any_model", "vllm"))


def folder_of(kind, folder):
    return checkpoint_of(config_of(kind, **SIZES | FAMILIES[kind]), folder)


@pytest.mark.parametrize("kind", slow_but(QUICK, FAMILIES))
def test_a_family_is_that_of_transformers(padded, tmp_path, kind):
    """Log-probs, entropies, values and gradients of a microbatch of rows of four lengths, and the export.

    Transformers gets each text alone, without padding.
    """
    folder = folder_of(kind, tmp_path / "in")
    assert padded.load_hf_checkpoint(folder)[0].padded
    found = differences(padded, folder, tmp_path)
    assert found["spread of the logits"] > 0.1 and len(found) == 7  # no decoding
    assert not beyond_rounding(found), found


def test_padding_on_the_left_would_be_found(tmp_path):
    folder = folder_of("qwen3_5_text", tmp_path / "in")
    mistake = "x = self.model(rows, use_cache=False)", "x = self.model(rows.roll(1, 1), use_cache=False)"
    with patched_with_a_mistake(tmp_path, "any_model,vllm", *mistake) as ppo:
        assert "log-probs" in beyond_rounding(differences(ppo, folder, tmp_path))


def test_what_the_cache_can_serve_stays_packed(padded, tmp_path):
    for kind, settings in (("qwen3", {}), ("gemma2", dict(final_logit_softcapping=1.0))):
        with torch.device("meta"):
            assert not padded.Transformer(config_of(kind, **SIZES | settings)).padded


REFUSED = {  # what is refused with vLLM as well
    "phi": NO_HEAD,  # a bias
    "bert": NO_HEAD,
    "llama4_text": NO_HEAD,  # transformers does not say which part is the decoder
    "deepseek_v32": NO_CAUSAL,
    "gemma3": NO_CAUSAL,
    "t5": "Unrecognized configuration class",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_before_weights_are_loaded(padded, tmp_path, kind):
    config_of(kind, **SIZES if kind != "gemma3" else {}).save_pretrained(tmp_path)
    with pytest.raises(padded.UserError, match=REFUSED[kind]):
        padded.load_config(tmp_path)


def test_a_model_whose_tokens_see_later_ones_is_refused(padded, tmp_path):
    """MiniMax saves the decay of its attention, 0 for later tokens. Here it gets noise, as all that is saved."""
    settings = dict(layer_types=["linear_attention", "full_attention"], block_size=16)
    folder = checkpoint_of(config_of("minimax", **SIZES | settings), tmp_path)
    with pytest.raises(padded.UserError, match="MiniMaxForCausalLM: its tokens see later ones"):
        padded.load_hf_checkpoint(folder)


@pytest.mark.parametrize("kind", slow_but(QUICK, ["qwen3_next", "lfm2", "mamba", "glm4_moe", *QUICK]))
def test_training_with_a_stand_in_for_vllm(tmp_path, kind):
    """In every iteration the first ratio is exactly 1, which `run` asserts, and the sampler has the actor's weights."""
    tokenizer = tokenizer_folder(ppo_llm, tmp_path / "in")
    config = config_of(kind, **SIZES | FAMILIES.get(kind, {}) | dict(vocab_size=40, eos_token_id=1))
    flags = flags_of(str(checkpoint_of(config, tokenizer)), max_prompt_tokens=16, actor_lr=5e-3, critic_lr=1e-3)
    _, rows, folder = run("any_model,vllm", tmp_path, **flags | dict(micro_batch_tokens=40))
    assert len(rows) == 2 and all(row["debug/sampler_trainer_logprob_diff"] < 1e-5 for row in rows)
    assert all(row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0 for row in rows)
    assert rows[1]["ratio/last_dev"] > 0
    transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    shutil.rmtree(folder)
    _, whole, _ = run("any_model,vllm", tmp_path, **flags)  # in one microbatch
    for name in ("actor/grad_norm", "critic/grad_norm", "objective/reward"):
        assert whole[0][name] == pytest.approx(rows[0][name], rel=1e-4), name


def test_buffers_are_handed_over(tmp_path):
    """Of the router of GLM-4.5, whose weights fit the cache. The stand-in, as vLLM, has no weights of its own."""
    folder = checkpoint_of(config_of("glm4_moe", **SIZES), tokenizer_folder(ppo_llm, tmp_path / "in"))
    flags = flags_of(str(folder), dtype="float32", compile="off")
    with patched_with_a_mistake(tmp_path, "any_model,vllm") as ppo:
        _, engine, _, actor = start_engine(ppo, **flags)
        name = "model.layers.1.mlp.gate.e_score_correction_bias"
        assert torch.equal(engine.llm.model.transformer.get_buffer(name), actor.get_buffer(name))
    mistake = "(*actor.named_parameters(), *buffers)", "actor.named_parameters()"
    with patched_with_a_mistake(tmp_path, "any_model,vllm", *mistake) as ppo:
        with pytest.raises(AssertionError, match=f"not loaded: .*{name}"):
            start_engine(ppo, **flags)


def test_the_page_lists_the_families_that_are_tested():
    page = (ROOT / "docs" / "other_models.md").read_text()
    assert sorted(re.findall(r"^\| [^|]+ \| `(\w+)` \|$", page, re.M)) == sorted(FAMILIES)
