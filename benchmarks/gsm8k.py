"""GSM8K text through checkpoints that transformers wrote: a random Qwen2, Qwen3 and Llama 3, a BPE trained on the text.

    python benchmarks/gsm8k.py train.jsonl test.jsonl [iterations]

For each family: largest difference of logits between transformers and ours, and after our export; equal greedy tokens;
then a short PPO run, its last metrics. The weights are random: this shows that all parts work on real text, not that a
model learns mathematics.
"""

import json
import platform
import sys
import tempfile
from pathlib import Path

import tokenizers
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
import ppo_llm as ppo

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE = dict(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    initializer_range=0.1,
)  # logits of some size
FAMILIES = {
    "Qwen2, tied": transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "Qwen3, sharded": transformers.Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=False),
    "Llama 3, rope scaling": transformers.LlamaConfig(
        **SHAPE,
        tie_word_embeddings=False,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=500000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=256,
        ),
    ),
}

KEYS = (
    "objective/reward",
    "objective/kl",
    "ratio/first_dev",
    "ratio/last_dev",
    "losses/policy_loss",
    "losses/value_loss",
    "debug/sampler_trainer_logprob_diff",
)


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


def check_environment(path):
    env = ppo.GSM8K(path)
    scores, prompts = [], set()
    for seed in range(len(env.rows)):
        prompt, info = env.reset(seed=seed)
        scores.append(env.step(info["demonstration"])[1])
        prompts.add(prompt)
    score = sum(scores) / len(scores)
    print(f"{Path(path).name}: {len(env.rows)} problems, {len(prompts)} distinct, demonstrations score {score}")
    return env


def greedy_tokens(model, tokenizer, env, rows, new_tokens):
    """Per row, ours and transformers' greedy continuation."""
    args = ppo.Args(max_prompt_tokens=512, max_new_tokens=new_tokens, rollout_slots=4)
    actor, _ = ppo.load_hf_checkpoint(model.name_or_path)
    batch = ppo.rollout(actor, tokenizer, [env] * 1, range(rows), range(rows), 0, args, greedy=True)
    for i in range(rows):
        n, prompt = int(batch.lengths[i]), int(batch.mask[i].float().argmax())
        ids, seen = batch.tokens[i, :n], torch.ones(1, prompt)
        theirs = model.generate(ids[None, :prompt], max_new_tokens=new_tokens, do_sample=False, attention_mask=seen)
        yield ids[prompt:].tolist(), theirs[0, prompt:].tolist()


def main():
    train, test = sys.argv[1:3]
    iterations = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    env = check_environment(train)
    check_environment(test)
    fast = train_tokenizer(row["question"] + "\n" + row["answer"] for row in env.rows)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} threads\n"
    )
    rows = []
    for name, config in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(f"{folder}/model", config, fast)
            model = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32).eval()
            tokenizer = ppo.HFTokenizer(f"{folder}/model")
            actor, _ = ppo.load_hf_checkpoint(f"{folder}/model")
            prompts = [env.reset(seed=seed)[0] for seed in range(20)]
            same_ids = all(
                tokenizer.encode_prompt(p)
                == fast.apply_chat_template(
                    [{"role": "user", "content": p}], add_generation_prompt=True, return_dict=False
                )
                for p in prompts
            )
            ids = [torch.tensor(tokenizer.encode_prompt(p)) for p in prompts]
            ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
            with torch.no_grad():
                reference = model(ids).logits
                loaded = float((actor(ids) - reference).abs().max())
                ppo.save_hf_checkpoint(actor, tokenizer, f"{folder}/export")
                exported = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/export", dtype=torch.float32)
                export = float((exported(ids).logits - reference).abs().max())
            greedy = list(greedy_tokens(model, tokenizer, env, 8, 48))
            summary = ppo.train(
                ppo.Args(
                    model=f"{folder}/model",
                    env_id="GSM8K-v0",
                    env_kwargs=json.dumps({"path": train}),
                    log_dir=folder,
                    eval_env_kwargs=json.dumps({"path": test}),
                    eval_episodes=16,
                    num_iterations=iterations,
                    run_name="run",
                    rollout_batch_size=8,
                    n_samples_per_prompt=4,
                    train_batch_size=16,
                    max_new_tokens=64,
                    kl_coef=0.05,
                    actor_lr=1e-4,
                    critic_lr=1e-4,
                    sft_steps=4,
                    sft_lr=1e-3,
                    missing_eos_penalty=0.1,
                )
            )
            last = json.loads(Path(f"{folder}/run/metrics.jsonl").read_text().splitlines()[-1])
            equal = f"{sum(a == b for a, b in greedy)} of {len(greedy)}"
            rows.append(
                [
                    name,
                    f"{loaded:.1e}",
                    f"{export:.1e}",
                    str(same_ids),
                    equal,
                    summary["status"],
                    *(f"{last[key]:.3g}" for key in KEYS),
                ]
            )
    names = ["family", "logits, loaded", "logits, exported", "same chat ids", "same greedy tokens", "PPO run", *KEYS]
    print("\n| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


main()
