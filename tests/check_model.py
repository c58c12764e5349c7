"""Compare ppo_llm.py with forks/any_model.patch to transformers, for a model of yours.

    python tests/check_model.py FOLDER

FOLDER has a checkpoint, or a config.json alone, which gets random weights. `--tokens 2000` makes the texts longer than
a sliding window. It prints the largest differences, and ends with code 1 if one of them is more than rounding explains.
With --patches any_model,vllm, families are tried that run on padded rows.
"""

import argparse
import copy
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

ROOT = Path(__file__).parent.parent


def patched_module(folder: Path, script="ppo_llm", patches=("any_model",)):
    """The script with patches, as a module, from a copy in the folder. The script may have a patch already."""
    path = folder / f"{script}.py"
    shutil.copy(ROOT / path.name, path)
    for patch in patches:
        text = (ROOT / "forks" / f"{patch}.patch").read_text().replace("ppo_llm.py", path.name)
        apply, env = ["git", "apply"], os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
        settings = dict(input=text, cwd=folder, text=True, env=env)  # see git_apply in benchmarks/common.py
        if subprocess.run([*apply, "-R", "--check"], **settings, capture_output=True).returncode:
            subprocess.run(apply, **settings, check=True)
    spec = importlib.util.spec_from_file_location(f"{script}_with_{'_'.join(patches)}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def randomised(model):
    """The model, in which all that is saved is random, norms, biases and buffers as well, so that everything counts."""
    with torch.no_grad():
        for x in model.state_dict().values():
            x += torch.randn(x.shape) * (0.1 if x.ndim > 1 else 0.05)
    return model.eval()


def alone(theirs, ids):
    """The logits [T, V] and the last hidden states [T, hidden] of one text, by transformers."""
    out = theirs(torch.tensor([ids]), output_hidden_states=True)
    return out.logits[0].float(), out.hidden_states[-1][0].float()


def distance(ours, theirs) -> float:
    return float((ours - theirs).detach().abs().max())


def gradient_distance(ours, theirs) -> float:
    """The largest distance of the gradients of a weight, relative to the norm of all gradients."""
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    found = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None and name != "score.weight"}
    assert found.keys() == gradients.keys()
    return float(max((found[name] - g).norm() for name, g in gradients.items()) / norm)


def differences_in_training(ppo, ours, theirs, texts) -> dict:
    """Of the log-probs, values and gradients of packed samples, where transformers gets each text alone."""
    episodes = []
    for seed, (prompt, response) in enumerate(texts):
        episode = ppo.Episode(seed)
        episode.add(prompt)
        episode.add(response, [0.0] * len(response))
        episodes.append(episode)
    experience = ppo.Experience.from_episodes(episodes)
    mb = experience.microbatch(torch.arange(len(texts)), "cpu")
    critic = ppo.Transformer(ours.config, "scalar")
    ppo.copy_weights(ours, critic)
    torch.nn.init.normal_(critic.score.weight, std=0.1)
    weights, result = torch.randn(mb.mask.shape) * mb.mask, {}
    logprobs, entropies, values = (torch.zeros(mb.mask.shape) for _ in range(3))
    for row, episode in enumerate(episodes):
        logits, hidden = alone(theirs, episode.ids)
        p = torch.distributions.Categorical(logits=logits[:-1] / 0.7)
        logprobs[row, 1 : len(episode.ids)] = p.log_prob(torch.tensor(episode.ids[1:]))
        entropies[row, 1 : len(episode.ids)] = p.entropy()
        values[row, 1 : len(episode.ids)] = critic.score(hidden[:-1])[:, 0]
    for model, outputs, expected in ((ours, ours.sampled_logprobs(mb, 0.7), (logprobs, entropies)),
                                     (critic, [critic.sampled_values(mb)], [values])):  # fmt: skip
        names = ["log-probs", "entropies"] if model is ours else ["values"]
        for name, x, y in zip(names, outputs, expected):
            result[name] = distance(x, y * mb.mask)
        theirs.zero_grad()
        (outputs[0] * weights).sum().backward()
        (expected[0] * weights).sum().backward(retain_graph=True)
        result[f"gradient of {names[0]}"] = gradient_distance(model, theirs)
    return result


@torch.no_grad()
def difference_in_decoding(ppo, ours, theirs, texts) -> float:
    """Of the log-probs of sampled tokens: two waves of rows of different lengths, with two turns each."""
    longest = max(len(prompt) + len(response) for prompt, response in texts)
    args = ppo.Args(max_prompt_tokens=longest, max_new_tokens=longest + 12, compile="off", micro_batch_tokens=64)
    decoder, result = ppo.Decoder(ours, len(texts), [3, 4, 5], args), 0.0
    for wave in range(2):
        episodes = [ppo.Episode(seed, noise_key=100 * wave + seed) for seed in range(len(texts))]
        for episode, (prompt, _) in zip(episodes, texts[wave:] + texts[:wave]):
            episode.add(prompt)
            episode.prompt_length = len(prompt)
        cached = 0
        for turn in range(2):
            ppo.generate_turn(decoder, episodes, cached, args_of_turn(args, turn))
            playing = [episode for episode in episodes if not episode.stop]
            cached = min(len(episode.ids) for episode in playing) - 1
            playing[0].stop = "terminated" if turn == 0 else ""  # One row is idle in the second turn.
            for episode, (_, response) in zip(playing[1:], texts):
                episode.add(response if turn == 0 else [])
        for episode in episodes:
            logits, _ = alone(theirs, episode.ids)
            for t, sampled in enumerate(episode.mask):
                if sampled:
                    logprob = logits[t - 1].log_softmax(-1)[episode.ids[t]]
                    result = max(result, abs(float(logprob) - episode.logprobs[t]))
    return result


def args_of_turn(args, turn):
    args = copy.copy(args)
    args.max_new_tokens = 8 if turn == 0 else args.max_new_tokens
    return args


@torch.no_grad()
def difference_of_export(ppo, ours, folder, ids) -> float:
    """Of the logits that from_pretrained has of the exported weights, after all of these have changed."""
    for p in ours.parameters():
        p += 0.01 * torch.randn(p.shape)
    tokenizer = ppo.HFTokenizer.from_texts(["abc"])
    ppo.save_hf_checkpoint(ours, tokenizer, folder / "export")
    load = transformers.AutoModelForCausalLM.from_pretrained
    exported, info = load(folder / "export", output_loading_info=True, attn_implementation="eager")
    assert not any(info.values()), info
    assert exported.dtype == torch.float32
    return distance(ours(torch.tensor([ids]))[0], alone(exported.eval(), ids)[0])


def differences(ppo, checkpoint: Path, folder: Path, tokens=24) -> dict[str, float]:
    """The largest differences between the patched script and transformers, by what was compared."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    ours, config = ppo.load_hf_checkpoint(checkpoint)
    lengths = [(5, tokens // 2), (3, tokens), (tokens // 2, 4), (9, tokens // 3)]
    random_ids = lambda n: torch.randint(6, config.vocab_size, (n,)).tolist()
    texts = [(random_ids(prompt), random_ids(response)) for prompt, response in lengths]
    spread = float(alone(theirs, texts[1][0] + texts[1][1])[0].detach().std())
    result = differences_in_training(ppo, ours, theirs, texts)
    if not ours.padded:  # Padded rows have no cache.
        result["log-probs in decoding"] = difference_in_decoding(ppo, ours, theirs, texts)
    result["logits of the export"] = difference_of_export(ppo, ours, folder, texts[1][0] + texts[1][1])
    return {"spread of the logits": spread} | result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=24, help="length of the longest response")
    parser.add_argument("--patches", default="any_model", help="any_model, or any_model,vllm")
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as work:
        ppo = patched_module(Path(work), patches=args.patches.split(","))
        checkpoint = args.folder
        try:
            with torch.device("meta"):
                ppo.Transformer(ppo.load_config(checkpoint))
            if not list(checkpoint.glob("*.safetensors")):
                checkpoint = Path(work, "random")
                config = transformers.AutoConfig.from_pretrained(args.folder)
                randomised(transformers.AutoModelForCausalLM.from_config(config)).save_pretrained(checkpoint)
            found = differences(ppo, checkpoint, Path(work), args.tokens)
        except ppo.UserError as error:
            sys.exit(f"refused: {error}")
    for name, x in found.items():
        print(f"{name:24} {x:.1e}")
    wrong = [name for name, x in found.items() if name != "spread of the logits" and not x < 1e-3]
    sys.exit(f"more than rounding explains: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
