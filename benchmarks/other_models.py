"""What forks/any_model.patch costs, and how other models learn: docs/other_models.md has the results.

    python benchmarks/other_models.py make gemma3_text DIR --seed 1   # a tiny random model for the default task
    python benchmarks/table.py --only "any model time" families      # makes the runs, 40 minutes of one core
"""

import argparse
from pathlib import Path

import transformers
from common import ppo_llm

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
             head_dim=16, max_position_embeddings=24, bos_token_id=None, tie_word_embeddings=False)  # fmt: skip
KINDS = {
    "qwen3": {},
    "gemma3_text": dict(layer_types=["sliding_attention", "full_attention"], sliding_window=8,
                        query_pre_attn_scalar=16, tie_word_embeddings=True),
    "qwen3_moe": dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True),
}  # fmt: skip


def make(kind: str, folder: Path, seed: int):
    """A folder with a random model of the size of the built-in one, and the tokenizer of its task's characters."""
    resets = [ppo_llm.checked_reset(ppo_llm.SortDigits(), seed) for seed in range(256)]
    texts = [info["demonstration"] for _, info in resets]
    texts += [message["content"] for messages, _ in resets for message in messages]
    tokenizer = ppo_llm.HFTokenizer.from_texts(texts)
    ids = dict(vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id)
    ppo_llm.torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **SIZES | ids | KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, p in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:  # As in the built-in model, branches end with smaller weights.
            p.data /= 2
    model.save_pretrained(folder)
    tokenizer.hf.save_pretrained(folder)
    print(f"{kind}: {sum(p.numel() for p in model.parameters()):,} parameters in {folder}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make")
    maker.add_argument("kind", choices=KINDS)
    maker.add_argument("folder", type=Path)
    maker.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    make(args.kind, args.folder, args.seed)


if __name__ == "__main__":
    main()
