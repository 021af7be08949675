"""Convert a GGUF file's metadata to the Hugging Face config of the same model.

Input: an opened file. Output: a dictionary for `parse_spec`. Values that only one architecture's
file reads keep names that the file defines.
"""

from typing import Any

from quire.base.errors import ModelError
from quire.spec.gguf.container import GGUFFile
from quire.spec.gguf.deepseek import deepseek2, minicpm3
from quire.spec.gguf.families import FAMILIES, decoder
from quire.spec.gguf.metadata import Metadata

TOKENS = "tokenizer.ggml"
NO_TOKEN = (-1, (1 << 32) - 1)  # llama.cpp's values for no token
# Metadata that change the computation in some architectures, and the value without effect. Other
# values are rejected unless the family supports the key.
WITHOUT_EFFECT: dict[str, float] = {
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """Return a config made from a file's metadata. Raises ModelError for unsupported models."""
    architecture = file.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.path} holds a model of the architecture {architecture!r}; supported"
            f" architectures are {', '.join(ARCHITECTURES)} (llama is Mistral and Mixtral as"
            " well)."
        )
    if EMBEDDING not in file.tensors:
        raise ModelError(f"{file.path} has no tensor {EMBEDDING}: it is not a language model.")
    meta, family = Metadata(file, architecture), FAMILIES.get(architecture)
    for key, neutral in WITHOUT_EFFECT.items():
        is_obeyed = family is not None and key in family.obeys
        if not is_obeyed and meta.number(key, neutral) != neutral:
            reason = f"{meta.number(key)}, which quire does not support"
            raise meta.error(key, f"{reason}; only {neutral:g} is supported")
    own: dict[str, Any] = {"tie_word_embeddings": HEAD not in file.tensors}
    own |= OTHERS[architecture](meta) if family is None else decoder(meta, family)
    for name in ("bos_token_id", "eos_token_id"):
        token_id = file.integer(f"{TOKENS}.{name}", -1)
        if token_id not in NO_TOKEN:
            own[name] = token_id
    return own | {
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "torch_dtype": _dtype(file),
    }


def _gpt2(meta: Metadata) -> dict[str, Any]:
    num_layers, hidden = meta.count("block_count"), meta.count("embedding_length")
    inner, length = meta.count("feed_forward_length"), meta.count("context_length")
    heads = meta.count("attention.head_count")
    if hidden % heads:
        raise ModelError(f"{meta.file.path} has {heads} heads, which do not divide {hidden}.")
    meta.check_shape("position_embd.weight", (length, hidden))
    meta.check_layers(
        range(num_layers), {"attn_qkv": (3 * hidden, hidden), "ffn_up": (inner, hidden)}
    )
    return {
        "model_type": "gpt2",
        "n_layer": num_layers,
        "n_embd": hidden,
        "n_head": heads,
        "n_inner": inner,
        "n_positions": length,
        "layer_norm_epsilon": meta.number("attention.layer_norm_epsilon", 1e-5),
    }


# Architectures that share little with the families.
OTHERS = {"gpt2": _gpt2, "deepseek2": deepseek2, "minicpm3": minicpm3}
ARCHITECTURES = (*FAMILIES, *OTHERS)


def _dtype(file: GGUFFile) -> str:
    """Return the matrices' dtype if all are floats; bfloat16 if any is quantized."""
    kinds = {place.kind.name for place in file.tensors.values() if len(place.shape) > 1}
    if kinds <= {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"
