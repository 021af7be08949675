"""A GGUF file's metadata as the Hugging Face config that the same model has elsewhere.

In: an opened file. Out: a dictionary for `parse_spec`. Numbers that only an architecture's file
reads stand in it under the names that this file knows.
"""

import math
import struct
from typing import Any

from quire.base.errors import ModelError
from quire.base.gguf import GGUFFile

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")
TOKENS = "tokenizer.ggml"
NO_TOKEN = (-1, (1 << 32) - 1)  # as llama.cpp writes that there is none
# What changes the numbers of models of these architectures elsewhere, and has no effect if it has
# this value; models here do not know it.
WITHOUT_EFFECT: dict[str, float] = {
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
}
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """Make a config of a file's metadata."""
    architecture = file.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.path} holds a model of the architecture {architecture!r}; GGUF files are read"
            f" of {', '.join(ARCHITECTURES)} (llama is Mistral as well)."
        )
    if file.integer("split.count", 1) > 1:
        raise ModelError(
            f"{file.path} is one of {file.integer('split.count')} parts of a model; join them first"
            " (llama-gguf-split --merge FIRST_PART OUTPUT)."
        )
    if EMBEDDING not in file.tensors:
        raise ModelError(f"{file.path} has no tensor {EMBEDDING}: it holds no language model.")
    reader = _Reader(file, architecture)
    for key, neutral in WITHOUT_EFFECT.items():
        if reader.number(key, neutral) != neutral:
            raise ModelError(
                f"{file.path}: the metadata {architecture}.{key} is {reader.number(key)}, which"
                f" models here do not obey; only {neutral:g} is supported."
            )
    own = _gpt2(reader) if architecture == "gpt2" else _decoder(reader)
    for name in ("bos_token_id", "eos_token_id"):
        token_id = file.integer(f"{TOKENS}.{name}", -1)
        if token_id not in NO_TOKEN:
            own[name] = token_id
    return own | {
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "torch_dtype": _dtype(file),
        "tie_word_embeddings": HEAD not in file.tensors,
    }


class _Reader:
    """The metadata of one architecture, whose name is in front of all its keys."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.file.metadata

    def count(self, key: str, default: int | None = None) -> int:
        """Return a number of things, of which there is at least one."""
        name = f"{self.architecture}.{key}"
        value = self.file.integer(name, default)
        if not 0 < value < 1 << 31:
            raise ModelError(f"{self.file.path}: the metadata {name} is {value}.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        name = f"{self.architecture}.{key}"
        value = self.file.number(name, default)
        if not math.isfinite(value):
            raise ModelError(f"{self.file.path}: the metadata {name} is {value}.")
        return value

    def text(self, key: str, default: str) -> str:
        return self.file.text(f"{self.architecture}.{key}", default)


def _gpt2(reader: _Reader) -> dict[str, Any]:
    num_layers, hidden = reader.count("block_count"), reader.count("embedding_length")
    inner, length = reader.count("feed_forward_length"), reader.count("context_length")
    heads = _heads(reader)
    if hidden % heads:
        raise ModelError(f"{reader.file.path} has {heads} heads, which do not divide {hidden}.")
    _check_shape(reader.file, "position_embd.weight", (length, hidden))
    _check_layers(reader.file, num_layers, attn_qkv=(3 * hidden, hidden), ffn_up=(inner, hidden))
    return {
        "model_type": "gpt2",
        "n_layer": num_layers,
        "n_embd": hidden,
        "n_head": heads,
        "n_inner": inner,
        "n_positions": length,
        "layer_norm_epsilon": reader.number("attention.layer_norm_epsilon", 1e-5),
    }


def _decoder(reader: _Reader) -> dict[str, Any]:
    if reader.file.integer(f"{reader.architecture}.expert_count", 0) > 0:
        raise ModelError(f"{reader.file.path} holds a mixture of experts, which is not supported.")
    heads, hidden = _heads(reader), reader.count("embedding_length")
    kv_heads = reader.count("attention.head_count_kv", heads)
    num_layers, inner = reader.count("block_count"), reader.count("feed_forward_length")
    head_dim = reader.count("attention.key_length", max(1, hidden // heads))
    config = {
        "model_type": reader.architecture,
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": reader.count("context_length"),
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in reader.file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in reader.file.tensors,
        "rope_parameters": _rope(reader, head_dim),
    }
    for key in ("attention.value_length", "rope.dimension_count"):
        if reader.count(key, head_dim) != head_dim:
            raise ModelError(
                f"{reader.file.path}: {reader.architecture}.{key} is {reader.count(key)}, but heads"
                f" have {head_dim} dimensions; models where these differ are not supported."
            )
    if heads % kv_heads or head_dim % 2:
        raise ModelError(
            f"{reader.file.path} has {heads} query heads of {head_dim} dimensions, and {kv_heads}"
            " KV heads: query heads must be a multiple of KV heads, and dimensions even."
        )
    queries = (heads * head_dim, hidden)
    _check_layers(reader.file, num_layers, attn_q=queries, ffn_up=(inner, hidden))
    if reader.architecture == "llama" and reader.has("attention.sliding_window"):
        window = reader.count("attention.sliding_window")
        config |= {"model_type": "mistral", "sliding_window": window}
    return config


def _check_layers(file: GGUFFile, num_layers: int, **shapes: tuple[int, ...]) -> None:
    """Check the matrices that fix all other sizes, before memory is taken for what the metadata
    says."""
    for layer in range(num_layers):
        for part, shape in shapes.items():
            _check_shape(file, f"blk.{layer}.{part}.weight", shape)


def _check_shape(file: GGUFFile, name: str, wanted: tuple[int, ...]) -> None:
    place = file.tensors.get(name)
    if place is None or place.shape != wanted:
        found = "is missing" if place is None else f"has the shape {list(place.shape)}"
        raise ModelError(
            f"{file.path}: the tensor {name} {found}, but the metadata asks for {list(wanted)}: the"
            " file contradicts itself."
        )


def _heads(reader: _Reader) -> int:
    """Read a number of heads. Files whose layers differ in it hold an array here: an error."""
    return reader.count("attention.head_count")


def _rope(reader: _Reader, head_dim: int) -> dict[str, Any]:
    """Return the rotary embedding as configs write it, with the frequencies' divisors if there are
    any."""
    theta = reader.number("rope.freq_base", 10000.0)
    kind = reader.text("rope.scaling.type", "none")
    factor = reader.number("rope.scaling.factor", reader.number("rope.scale_linear", 1.0))
    if not reader.has("rope.scaling.type") and reader.has("rope.scale_linear"):
        kind = "linear"
    if kind not in ("none", "linear", "yarn") or factor <= 0 or theta <= 0:
        raise ModelError(
            f"{reader.file.path}: the rotary embedding {kind!r} with the base {theta} and the"
            f" factor {factor} is not supported; supported are none, linear and yarn."
        )
    divisors = _divisors(reader.file, head_dim)
    if kind == "yarn":
        if divisors:
            raise ModelError(f"{reader.file.path} has both yarn and {ROPE_FACTORS}.")
        return {"rope_theta": theta} | _yarn(reader, factor)
    if divisors:
        scale = factor if kind == "linear" else 1.0
        divided = [scale * divisor for divisor in divisors]
        return {"rope_theta": theta, "rope_type": "divisors", "divisors": divided}
    if kind == "linear" and factor != 1.0:
        return {"rope_theta": theta, "rope_type": "linear", "factor": factor}
    return {"rope_theta": theta, "rope_type": "default"}


def _yarn(reader: _Reader, factor: float) -> dict[str, Any]:
    """Read yarn's fields. llama.cpp multiplies yarn's own factor on attention by `attn_factor`."""
    sharpness = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    config = {
        "rope_type": "yarn",
        "factor": factor,
        "attention_factor": reader.number("rope.scaling.attn_factor", 1.0) * sharpness,
        "beta_fast": reader.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": reader.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if reader.has("rope.scaling.original_context_length"):
        length = reader.count("rope.scaling.original_context_length")
        config["original_max_position_embeddings"] = length
    return config


def _divisors(file: GGUFFile, head_dim: int) -> list[float]:
    """Return what each frequency is divided by (Llama 3.1 and later); empty for most models."""
    place = file.tensors.get(ROPE_FACTORS)
    if place is None:
        return []
    if place.kind.name != "F32" or place.shape != (head_dim // 2,):
        raise ModelError(f"{file.path}: {ROPE_FACTORS} has the shape {list(place.shape)}.")
    divisors = list(struct.unpack(f"<{head_dim // 2}f", file.data(place)))
    if not all(math.isfinite(divisor) and divisor > 0 for divisor in divisors):
        raise ModelError(f"{file.path}: {ROPE_FACTORS} holds numbers that are not above 0.")
    return divisors


def _dtype(file: GGUFFile) -> str:
    """Return the matrices' dtype if all are floats; quantised ones are computed with in
    bfloat16."""
    kinds = {place.kind.name for place in file.tensors.values() if len(place.shape) > 1}
    if kinds <= {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"
