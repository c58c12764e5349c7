"""A Hugging Face checkpoint in `ppo_llm.py` and in transformers: the same ids, logits, texts, exports and scores?

    python benchmarks/parity.py check DIR           # float32; a 0.5B takes three minutes and 8 GB
    python benchmarks/parity.py ratio DIR           # the first ratio, in float32 and bfloat16
    python benchmarks/parity.py gradient DIR        # of a minibatch: writes DIR-1.pt ...
    torchrun --nproc-per-node 2 benchmarks/parity.py gradient DIR   # ... with which two ranks are compared
    python benchmarks/parity.py cut DIR OUT LAYERS  # the same model with its first LAYERS only, which needs less memory

Prints numbers and judges none. None of it has an optimizer, whose memory a whole 0.5B on a CPU seldom has.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import common
import safetensors.torch
import torch
import transformers
from common import ppo_llm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

QUESTIONS = [*common.sums(4), "Why is the sky blue?", "Hi!", "Add:\n\n48\n\n24", "Die Größe, naïve, 中文 costs $100."]
CHAT = [("user", "What is 8 + 9?"), ("assistant", "17"), ("user", "And 17 + 25?")]


def generate(model, ids: list[int], new: int) -> list[int]:
    tokens = torch.tensor([ids])
    output = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=new)
    return output[0, len(ids) :].tolist()


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> str:
    return f"{float((a - b).abs().max()):.1e}, the largest is {float(b.abs().max()):.3g}"


@torch.no_grad()
def check(folder: str) -> None:
    print(common.hardware(transformers))
    tokenizer, theirs = ppo_llm.HFTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.encode_prompt(text) for text in QUESTIONS]
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    template = lambda chats, **more: theirs.apply_chat_template(chats, return_dict=False, **more)
    same = sum(a == b for a, b in zip(ids, template(chats, add_generation_prompt=True)))
    conversation = [{"role": role, "content": text} for role, text in CHAT]
    chat = template(conversation)
    print(f"ids of prompts: {same} of {len(ids)} the same; of a chat of {len(CHAT)} turns: ", end="")
    print(tokenizer.encode_conversation(conversation) == chat)

    actor, config = ppo_llm.load_hf_checkpoint(folder)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = [generate(peer, prompt, 48) for prompt in ids]
    whole = [prompt + answer for prompt, answer in zip(ids, answers)]
    ours = torch.cat([actor(torch.tensor([row]))[0] for row in whole])
    logits = torch.cat([peer(torch.tensor([row])).logits[0] for row in whole])
    print(f"logits of {len(logits)} tokens differ by at most {largest_difference(ours, logits)}")

    args = ppo_llm.Args(max_prompt_tokens=96, max_new_tokens=48, temperature=0.0)
    decoder = ppo_llm.Decoder(actor, len(ids), tokenizer.stop_ids, args)
    rows = range(len(ids))
    envs = [common.Prompts(QUESTIONS) for _ in rows]
    episodes = ppo_llm.rollout_share(decoder, tokenizer, envs, rows, rows, 0, args)
    same = sum(e.ids[len(a) :] == b for e, a, b in zip(episodes, ids, answers))
    print(f"greedy answers, up to 48 tokens, a batch beside single ones: {same} of {len(ids)} the same")

    del peer
    with tempfile.TemporaryDirectory() as work:
        out = Path(work, "actor")
        ppo_llm.save_hf_checkpoint(actor, tokenizer, out)
        names = ("config.json", "generation_config.json")
        kept = {name: json.loads((out / name).read_text()).get("eos_token_id") for name in names}
        original, exported = (safetensors.torch.load_file(f"{place}/model.safetensors") for place in (folder, out))
        equal = original.keys() == exported.keys() and all(torch.equal(exported[k], x) for k, x in original.items())
        del original, exported
        again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        print(f"export: weights equal {equal}, logits of transformers equal ", end="")
        print(torch.equal(again(torch.tensor([whole[0]])).logits[0], logits[: len(whole[0])]), end="")
        print(f", ids equal {ppo_llm.HFTokenizer(out).encode_prompt(QUESTIONS[-1]) == ids[-1]}, eos {kept}")
        del again
        shutil.rmtree(out)

        critic = ppo_llm.Transformer(config, "scalar")
        ppo_llm.copy_weights(actor, critic)
        torch.manual_seed(0)
        torch.nn.init.normal_(critic.score.weight, std=0.1)
        del actor, decoder
        ppo_llm.save_hf_checkpoint(critic, tokenizer, out)
        ours = torch.stack([critic(torch.tensor([row]))[0, -1] for row in whole])
        del critic
        scorer = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32)
        scores = torch.cat([scorer(torch.tensor([row])).logits[0] for row in whole])
        print(f"scores of a critic differ by at most {largest_difference(ours, scores)}")


def sampled(folder: str, dtype: str, new: int):
    """Args, the sharded actor, and an Experience of sampled answers."""
    args = ppo_llm.Args(
        model=folder, device="cpu", dtype=dtype, max_prompt_tokens=96, max_new_tokens=new, rollout_slots=8,
        train_batch_size=4, micro_batch_tokens=160)  # fmt: skip
    ppo_llm.connect(args)
    config, tokenizer = ppo_llm.load_config(folder), ppo_llm.HFTokenizer(folder)
    actor = ppo_llm.build_model(config, "lm", args)
    ppo_llm.load_weights(actor, folder)
    sampler = ppo_llm.build_model(config, "lm", args, sampler=True)
    ppo_llm.load_weights(sampler, folder)
    rows = len(QUESTIONS) // ppo_llm.WORLD_SIZE
    decoder = ppo_llm.Decoder(sampler, rows, tokenizer.stop_ids, args)
    envs = [common.Prompts(QUESTIONS) for _ in range(rows)]
    episodes = ppo_llm.rollout(decoder, tokenizer, envs, range(len(QUESTIONS)), 0, args)
    return args, actor, ppo_llm.Experience.from_episodes(episodes)


def ratio(folder: str) -> None:
    common.table(["dtype", "tokens", "mean, largest first abs(ratio - 1)", "the sampler's mean abs of log-ratio"])
    for dtype in ("float32", "bfloat16"):
        args, actor, experience = sampled(folder, dtype, 24)
        mask = experience.mask
        minibatches = ppo_llm.minibatch_rows(experience, 0, ppo_llm.TrainState(), args)
        old = ppo_llm.logprobs_of_all(actor, experience, minibatches, args)
        new = torch.zeros_like(old)
        for part in minibatches:
            for mb in experience.microbatches(part, args):
                logprobs, _ = actor.sampled_logprobs(mb, 1.0)  # with gradients
                new[mb.rows, : logprobs.shape[1]] = logprobs.detach()
        deviation = ((new - old).exp() - 1).abs()[mask]
        gap = (old - experience.sampler_logprobs).abs()[mask].mean()
        common.line([dtype, len(deviation), f"{deviation.mean():.1e}, {deviation.max():.1e}", f"{gap:.1e}"])
        del actor


def gradient(folder: str) -> None:
    """Of a policy loss with made-up advantages, on the first minibatch."""
    args, actor, experience = sampled(folder, "float32", 16)
    rows, n_tokens = torch.arange(len(experience.mask)), int(experience.mask.sum())
    old = ppo_llm.logprobs_of_all(actor, experience, [rows], args)
    advantages = torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
    experience.old_logprobs, experience.advantages = old, advantages * experience.mask
    for mb in experience.microbatches(rows, args):
        logprobs, _ = actor.sampled_logprobs(mb, 1.0)
        loss, _ = ppo_llm.policy_loss(logprobs, mb.old_logprobs, mb.advantages, mb.mask, 0.2, 0.2, None, n_tokens)
        loss.backward()
    file = Path(f"{folder.rstrip('/')}-1.pt")
    names = [name for name, _ in actor.named_parameters()]
    if ppo_llm.WORLD_SIZE == 1:
        gradients = {name: p.grad for name, p in actor.named_parameters()}
        torch.save({"tokens": experience.tokens, "logprobs": old, "gradients": gradients}, file)
        return print(f"wrote {file}")
    first = torch.load(file, mmap=True)
    worst = scale = squares = 0.0
    for name, p in zip(names, actor.parameters()):
        whole, other = ppo_llm.full_tensor(p.grad), first["gradients"][name]
        worst, scale = max(worst, float((whole - other).abs().max())), max(scale, float(other.abs().max()))
        squares += float(other.square().sum())
    if ppo_llm.RANK == 0:
        print(f"{ppo_llm.WORLD_SIZE} ranks: same samples {torch.equal(first['tokens'], experience.tokens)}; log-probs "
              f"differ by at most {largest_difference(old, first['logprobs'])}; the gradient by at most {worst:.1e}, "
              f"its largest is {scale:.2g}, its norm {squares**0.5:.3g}")  # fmt: skip


def cut(folder: str, out: str, layers: str) -> None:
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors", "data"))
    with safetensors.safe_open(f"{folder}/model.safetensors", "pt") as file:
        is_kept = lambda name: ".layers." not in name or int(name.split(".")[2]) < int(layers)
        weights = {name: file.get_tensor(name) for name in file.keys() if is_kept(name)}
    safetensors.torch.save_file(weights, f"{out}/model.safetensors", metadata={"format": "pt"})
    config = json.loads(Path(out, "config.json").read_text())
    config["layer_types"] = config["layer_types"][: int(layers)] if "layer_types" in config else None
    Path(out, "config.json").write_text(json.dumps(config | {"num_hidden_layers": int(layers)}))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    what, *rest = sys.argv[1:]
    {"check": check, "ratio": ratio, "gradient": gradient, "cut": cut}[what](*rest)
