"""Read the scales of an fp8 KV cache from a checkpoint. Torch is imported with the first scale.

A stored number times its scale is the key or value. Layer N has scales in tensors of one number.
Their names begin with `model.layers.N.self_attn.`, with or without `model.`:

    k_scale, v_scale                            llm-compressor, AutoFP8
    attn.k_scale, attn.v_scale                  vLLM's own names
    k_proj.k_scale, v_proj.v_scale              ModelOpt; also qkv_proj.k_scale, qkv_proj.v_scale
    k_proj.output_scale, v_proj.output_scale    Quark, compressed-tensors
    kv_scale                                    one scale for both, in older checkpoints

Scales of queries and probabilities are ignored, because attention computes these in the model's
dtype.
"""

import logging
import math
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from quire.base.errors import ModelError
from quire.models.checkpoint.files import weight_files
from quire.spec.gguf.container import is_gguf
from quire.spec.model_spec import ModelSpec

logger = logging.getLogger("quire")

Scales = dict[int, tuple[float, float]]

KEYS = ("k_scale", "attn.k_scale", "k_proj.k_scale", "qkv_proj.k_scale", "k_proj.output_scale")
VALUES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "qkv_proj.v_scale", "v_proj.output_scale")
BOTH = ("kv_scale", "attn.kv_scale")
UNUSED = (
    "q_scale", "attn.q_scale", "q_proj.q_scale", "qkv_proj.q_scale", "q_proj.output_scale",
    "prob_scale", "attn.prob_scale", "prob_output_scale",
)  # fmt: skip
# Suffixes of the names of tensors that checkpoints may hold and no layer loads.
NAME_ENDS = tuple(f".self_attn.{name}" for name in (*KEYS, *VALUES, *BOTH, *UNUSED))

_NAME = re.compile(r"(?:(?:model|decoder|language_model)\.)*layers\.(\d+)\.self_attn\.(.+)")


def kv_scales(directory: Path, spec: ModelSpec) -> Scales:
    """Return (scale of keys, scale of values) for each layer.

    A missing scale is 1, and one warning reports all missing scales. Raises ModelError for an
    unreadable file, for a scale that is not one positive number, and for two that differ.
    """
    found = {} if is_gguf(directory) else _found(directory)
    absent = [
        layer
        for layer in range(spec.num_layers)
        if not ((layer, "k") in found and (layer, "v") in found)
    ]
    if absent:
        logger.warning(
            "%s lacks scales of keys and values in fp8 for %d of %d layers, so 1 is used. If"
            " answers get worse, use a checkpoint with k_scale and v_scale, or another"
            " kv_cache_dtype",
            directory, len(absent), spec.num_layers,
        )  # fmt: skip
    return {
        layer: (found.get((layer, "k"), 1.0), found.get((layer, "v"), 1.0))
        for layer in range(spec.num_layers)
    }


def _found(directory: Path) -> dict[tuple[int, str], float]:
    """Read all stored scales, by (layer, `k` or `v`)."""
    found: dict[tuple[int, str], float] = {}
    for file in weight_files(directory):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                    for key in _scaled_kinds(name):
                        count = math.prod(opened.get_slice(name).get_shape())
                        value = float(opened.get_tensor(name)) if count == 1 else math.nan
                        _add(found, key, value, name, count)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}. Download it again.") from error
    return found


def _scaled_kinds(name: str) -> list[tuple[int, str]]:
    """Return the (layer, `k` or `v`) pairs that a tensor scales; empty for other tensors."""
    match = _NAME.fullmatch(name)
    if match is None:
        return []
    layer, end = int(match[1]), match[2]
    kinds = [kind for kind, ends in (("k", KEYS + BOTH), ("v", VALUES + BOTH)) if end in ends]
    return [(layer, kind) for kind in kinds]


def _add(
    found: dict[tuple[int, str], float], key: tuple[int, str], scale: float, name: str, count: int
) -> None:
    subject = f"the tensor {name}, a scale of keys and values in fp8,"
    if count != 1:
        raise ModelError(
            f"{subject} has {count} numbers; only one for each layer is supported. Use another"
            " kv_cache_dtype, or a checkpoint that was calibrated per tensor."
        )
    if not (math.isfinite(scale) and scale > 0):
        raise ModelError(f"{subject} is {scale:g}, not a positive number. Download it again.")
    if found.setdefault(key, scale) != scale:
        raise ModelError(
            f"{subject} is {scale:g}, and another one of its layer is {found[key]:g}: the files"
            " belong to different models."
        )
