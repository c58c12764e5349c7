"""GSM8K text through checkpoints that transformers wrote: a random Qwen2, Qwen3 and Llama 3, a BPE trained on the text.

    python benchmarks/gsm8k.py train.jsonl test.jsonl [iterations]

For each family: largest difference of logits between transformers and ours, and after our export; equal greedy tokens;
then a short PPO run, its last metrics. The weights are random: this shows that all parts work on real text, not that a
model learns mathematics.
"""

import json
import sys
import tempfile
from pathlib import Path

import common
import tokenizers
import torch
import transformers
from common import ppo_llm

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A wide initialization gives logits of some size.
SHAPE = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
             max_position_embeddings=2048, initializer_range=0.1)  # fmt: skip
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=256)  # fmt: skip
FAMILIES = {
    "Qwen2, tied": transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "Qwen3, sharded": transformers.Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=False),
    "Llama 3, rope scaling": transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
}
FLAGS = dict(env_id="GSM8K-v0", eval_episodes=16, run_name="run", rollout_batch_size=8, n_samples_per_prompt=4,
             train_batch_size=16, max_new_tokens=64, kl_coef=0.05, actor_lr=1e-4, critic_lr=1e-4, sft_steps=4,
             missing_eos_penalty=0.1)  # fmt: skip
METRICS = ("objective/reward", "objective/kl", "ratio/first_dev", "ratio/last_dev", "actor/policy_loss",
           "critic/value_loss", "debug/sampler_trainer_logprob_diff")  # fmt: skip


def train_tokenizer(texts):
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=4096, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    ends = dict(eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)
    fast.chat_template = TEMPLATE
    return fast


def write_checkpoint(folder, config, fast):
    config.vocab_size, config.eos_token_id, config.pad_token_id = len(fast) + 5, fast.eos_token_id, fast.pad_token_id
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = [fast.eos_token_id, fast.pad_token_id]
    model.generation_config.pad_token_id = fast.pad_token_id
    model.save_pretrained(folder, max_shard_size="1MB" if config.model_type == "qwen3" else "5GB")
    fast.save_pretrained(folder)
    return model


def check_environment(path: str) -> ppo_llm.GSM8K:
    env = ppo_llm.GSM8K(path)
    scores, prompts = [], set()
    for seed in range(len(env.rows)):
        prompt, info = env.reset(seed=seed)
        scores.append(env.step(info["demonstration"])[1])
        prompts.add(prompt)
    score = sum(scores) / len(scores)
    print(f"{Path(path).name}: {len(env.rows)} problems, {len(prompts)} distinct, demonstrations score {score}")
    return env


def equal_greedy_tokens(model, actor, tokenizer, env, rows: int, new_tokens: int) -> str:
    """In how many rows our greedy continuation is that of transformers."""
    args = ppo_llm.Args(max_prompt_tokens=512, max_new_tokens=new_tokens, temperature=0.0)
    decoder = ppo_llm.Decoder(actor, 1, tokenizer.stop_ids, args)
    equal = 0
    for episode in ppo_llm.rollout(decoder, tokenizer, [env], range(rows), range(rows), 0, args):
        prompt = torch.tensor([episode.ids[: episode.prompt_length]])
        theirs = model.generate(prompt, max_new_tokens=new_tokens, do_sample=False,
                                attention_mask=torch.ones_like(prompt))  # fmt: skip
        equal += theirs[0].tolist() == episode.ids
    return f"{equal} of {rows}"


def check_family(config, fast, env, train: str, test: str, iterations: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(f"{folder}/model", config, fast)
        model = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32).eval()
        tokenizer = ppo_llm.HFTokenizer(f"{folder}/model")
        actor, _ = ppo_llm.load_hf_checkpoint(f"{folder}/model")
        prompts = [env.reset(seed=seed)[0] for seed in range(20)]
        ids = [tokenizer.encode_prompt(prompt) for prompt in prompts]
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        same_ids = ids == fast.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
        tokens = ppo_llm.padded(ids)
        with torch.no_grad():
            reference = model(tokens).logits
            loaded = float((actor(tokens) - reference).abs().max())
            ppo_llm.save_hf_checkpoint(actor, tokenizer, Path(folder, "export"))
            exported = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/export", dtype=torch.float32)
            export = float((exported(tokens).logits - reference).abs().max())
        equal = equal_greedy_tokens(model, actor, tokenizer, env, rows=8, new_tokens=48)
        args = ppo_llm.Args(model=f"{folder}/model", log_dir=folder, num_iterations=iterations,
                            env_kwargs=json.dumps({"path": train}), eval_env_kwargs=json.dumps({"path": test}),
                            **FLAGS)  # fmt: skip
        summary = ppo_llm.train(args)
        last = json.loads(Path(folder, "run", "metrics.jsonl").read_text().splitlines()[-1])
    metrics = [f"{last[name]:.3g}" for name in METRICS]
    return [f"{loaded:.1e}", f"{export:.1e}", str(same_ids), equal, summary["status"], *metrics]


def main():
    train, test, *rest = sys.argv[1:]
    iterations = int(rest[0]) if rest else 5
    env = check_environment(train)
    check_environment(test)
    fast = train_tokenizer(row["question"] + "\n" + row["answer"] for row in env.rows)
    print(common.hardware(transformers))
    rows = [[name, *check_family(config, fast, env, train, test, iterations)] for name, config in FAMILIES.items()]
    common.table(["family", "logits, loaded", "logits, exported", "same chat ids", "same greedy tokens", "PPO run",
                  *METRICS], rows)  # fmt: skip


if __name__ == "__main__":
    main()
