"""Writes GGUF files: any metadata and tensors, or a Hugging Face checkpoint as llama.cpp's
converter would write it. That includes its names, its order of Llama's rows and its scaling of
frequencies."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

from quire.models.checkpoint.files import weight_files
from tests.support.models.gguf_facts import (
    ARCHITECTURES,
    arranged,
    metadata,
    rope_tensors,
    tensor_name,
    with_split_heads,
    with_split_inputs,
    with_stacked_experts,
)

F32, F16, Q4_0, Q8_0, BF16, MXFP4 = 0, 1, 2, 8, 30, 39
BLOCK = {F32: 1, F16: 1, BF16: 1, Q4_0: 32, Q8_0: 32, MXFP4: 32}
Array = npt.NDArray[Any]

# The metadata of a small Llama.
META: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 8,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


@dataclass(frozen=True)
class Tensor:
    """A tensor to write; shape is in numpy's order."""

    kind: int
    shape: tuple[int, ...]
    data: bytes


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """Write a file; metadata values are int (u32), float (f32), bool, str or lists of them."""
    tensors = tensors or {}
    infos = {name: (each.kind, each.shape, len(each.data)) for name, each in tensors.items()}
    with path.open("wb") as file:
        file.write(header_of(metadata, infos, version, alignment))
        for tensor in tensors.values():
            file.write(bytes(-file.tell() % alignment))
            file.write(tensor.data)
    return path


def header_of(
    metadata: Mapping[str, Any],
    infos: Mapping[str, tuple[int, tuple[int, ...], int]],
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """Return all bytes before the data; infos hold kind, shape and size of each tensor."""
    header, offset = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(metadata)), 0
    for key, value in metadata.items():
        header += _text(key) + _value(value)
    for name, (kind, shape, num_bytes) in infos.items():
        offset += -offset % alignment
        header += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        header += struct.pack("<IQ", kind, offset)
        offset += num_bytes
    return header + bytes(-len(header) % alignment)


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        kind, _ = _typed(value[0]) if value else (4, b"")
        items = b"".join(_typed(item)[1] for item in value)
        return struct.pack("<IIQ", 9, kind, len(value)) + items
    kind, raw = _typed(value)
    return struct.pack("<I", kind) + raw


def _typed(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if value >= 0 else (5, struct.pack("<i", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    return 8, _text(value)


# ---- tensors ---------------------------------------------------------------------------------


def stored(values: Array, kind: int) -> Tensor:
    """Convert values; vectors, and rows that are not whole blocks, stay float32."""
    values = np.ascontiguousarray(values, np.float32)
    if values.ndim == 1 or values.shape[-1] % BLOCK[kind]:
        kind = F32
    if kind == F32:
        data = values.tobytes()
    elif kind == F16:
        data = values.astype(np.float16).tobytes()
    elif kind == BF16:
        bits = values.view(np.uint32)
        data = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes()
    else:
        written = {Q8_0: _q8_0, Q4_0: _q4_0, MXFP4: _mxfp4}[kind]
        data = written(values.reshape(-1, 32)).tobytes()
    return Tensor(kind, values.shape, data)


def _q8_0(blocks: Array) -> Array:
    scale = np.abs(blocks).max(axis=1, keepdims=True) / 127
    q = np.rint(blocks / np.maximum(scale, 1e-30)).astype(np.int8)
    return np.concatenate((scale.astype(np.float16).view(np.uint8), q.view(np.uint8)), axis=1)


def _q4_0(blocks: Array) -> Array:
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale = largest / -8
    q = np.clip(blocks / np.where(scale == 0, 1, scale) + 8.5, 0, 15).astype(np.uint8)
    packed = q[:, :16] | q[:, 16:] << 4
    return np.concatenate((scale.astype(np.float16).view(np.uint8), packed), axis=1)


def _mxfp4(blocks: Array) -> Array:
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    power = np.floor(np.log2(np.maximum(largest, 1e-30))) - 2  # the largest number is 6
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    sizes = np.abs(blocks / np.exp2(power))
    q = np.abs(sizes[:, :, None] - numbers).argmin(axis=2).astype(np.uint8)
    q |= (blocks < 0).astype(np.uint8) << 3
    packed = q[:, :16] | q[:, 16:] << 4
    return np.concatenate(((power + 127).astype(np.uint8), packed), axis=1)


# ---- checkpoints -----------------------------------------------------------------------------


def convert(
    folder: Path,
    path: Path,
    kind: int = F32,
    extra: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write the checkpoint of a directory as one GGUF file.

    extra: added metadata. metadata: replaces the metadata of the config."""
    config = json.loads((folder / "config.json").read_text())
    held: dict[str, Array] = {}
    for file in weight_files(folder):
        held |= {name: tensor.float().numpy() for name, tensor in load_file(file).items()}
    tensors = {}
    held = with_split_heads(with_split_inputs(held, config), config)
    for name, values in with_stacked_experts(held).items():
        theirs = tensor_name(name, config["model_type"])
        is_matrix = theirs.endswith(".weight") and "ssm_conv1d" not in theirs
        own_kind = kind if is_matrix else F32  # biases of experts are also matrices
        tensors[theirs] = stored(arranged(name, values, config), own_kind)
    if "output.weight" in tensors and config.get("tie_word_embeddings"):
        del tensors["output.weight"]
    tensors |= {name: stored(values, F32) for name, values in rope_tensors(config).items()}
    own = model_metadata(config) if metadata is None else dict(metadata)
    return write_gguf(path, own | dict(extra or {}), tensors)


def model_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = config["model_type"]
    architecture = ARCHITECTURES.get(kind, kind)
    own = {f"{architecture}.{key}": value for key, value in metadata(config).items()}
    return {"general.architecture": architecture, "general.name": "tiny"} | own


# ---- tokenizers ------------------------------------------------------------------------------


def byte_level_metadata(folder: Path, pre: str = "gpt-2", **extra: Any) -> dict[str, Any]:
    """Return the metadata of a directory's byte-level tokenizer.json and chat template."""
    state = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    texts = {token_id: text for text, token_id in state["model"]["vocab"].items()}
    kinds = dict.fromkeys(texts, 1)
    for token in state["added_tokens"]:
        texts[token["id"]] = token["content"]
        kinds[token["id"]] = 3 if token["special"] else 4
    size = max(texts) + 1
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["model"]["merges"]]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [texts.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": [kinds.get(i, 5) for i in range(size)],
        "tokenizer.ggml.merges": merges,
    }
    ids = {text: token_id for token_id, text in texts.items()}
    for name in ("bos_token", "eos_token"):
        if config.get(name):
            found[f"tokenizer.ggml.{name}_id"] = ids[config[name]]
    if config.get("chat_template"):
        found["tokenizer.chat_template"] = config["chat_template"]
    return found | extra
