"""Read the metadata of one architecture in a GGUF file, and check shapes of tensors against them.

Rotary embeddings are returned in the form of a config.
"""

import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from quire.base.errors import ModelError
from quire.spec.gguf.container import ArrayEntry, GGUFFile


class Metadata:
    """The metadata of one architecture; its name is the prefix of all keys."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture

    def has(self, key: str) -> bool:
        return self.name(key) in self.file.metadata

    def is_array(self, key: str) -> bool:
        return isinstance(self.file.metadata.get(self.name(key)), ArrayEntry)

    def count(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """Return a whole number from `minimum` on. Raises ModelError for any other value."""
        value = self.file.integer(self.name(key), default)
        if not minimum <= value < 1 << 31:
            raise self.error(key, str(value))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.file.number(self.name(key), default)
        if not math.isfinite(value):
            raise self.error(key, str(value))
        return value

    def text(self, key: str, default: str) -> str:
        return self.file.text(self.name(key), default)

    def flag(self, key: str, default: bool) -> bool:
        return self.file.boolean(self.name(key), default)

    def flags(self, key: str) -> list[bool]:
        return [bool(value) for value in self.file.numbers(self.name(key))]

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def error(self, key: str, problem: str) -> ModelError:
        """Return an error about a value. problem: completes the sentence `the metadata KEY is `."""
        return ModelError(f"{self.file.path}: the metadata {self.name(key)} is {problem}.")

    def vector(self, name: str, length: int) -> list[float]:
        """Return a float32 tensor of positive numbers as a list; empty if the file lacks it."""
        place = self.file.tensors.get(name)
        if place is None:
            return []
        if place.kind.name != "F32" or place.shape != (length,):
            raise ModelError(f"{self.file.path}: {name} has the shape {list(place.shape)}.")
        found = list(struct.unpack(f"<{length}f", self.file.data(place)))
        if not all(math.isfinite(each) and each > 0 for each in found):
            raise ModelError(f"{self.file.path}: {name} holds numbers that are not above 0.")
        return found

    def check_layers(self, layers: Iterable[int], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check the shapes of matrices that fix all sizes, before any memory is allocated."""
        for layer in layers:
            for part, shape in shapes.items():
                self.check_shape(f"blk.{layer}.{part}.weight", shape)

    def check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        place = self.file.tensors.get(name)
        if place is None or place.shape != expected:
            found = "is missing" if place is None else f"has the shape {list(place.shape)}"
            raise ModelError(
                f"{self.file.path}: the tensor {name} {found}, but the metadata asks for"
                f" {list(expected)}: the file contradicts itself."
            )


UNRUN_LAYERS = "nextn_predict_layers"


def layer_count(meta: Metadata) -> int:
    """Return the number of layers, without the layers at the end that propose draft tokens."""
    num_blocks, others = meta.count("block_count"), meta.count(UNRUN_LAYERS, 0, minimum=0)
    if others >= num_blocks:
        raise meta.error(UNRUN_LAYERS, f"{others} of {num_blocks} layers (block_count)")
    return num_blocks - others


FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ATTENTION_FACTOR = "rope.scaling.attn_factor"
OF_CONFIG = (FACTORS, LONG_FACTORS, SHORT_FACTORS)  # tensors that belong to no layer


def rope(meta: Metadata, rotated: int) -> dict[str, Any]:
    """Return `rope_parameters`, including divisors of the frequencies if the file has them.

    rotated: number of rotated dimensions per head."""
    theta = meta.number("rope.freq_base", 10000.0)
    kind = meta.text("rope.scaling.type", "none")
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0))
    if not meta.has("rope.scaling.type") and meta.has("rope.scale_linear"):
        kind = "linear"
    if kind not in ("none", "linear", "yarn") or factor <= 0 or theta <= 0:
        raise ModelError(
            f"{meta.file.path}: the rotary embedding {kind!r} with the base {theta} and the"
            f" factor {factor} is not supported; supported are none, linear and yarn."
        )
    if kind != "yarn" and meta.number(ATTENTION_FACTOR, 1.0) != 1.0:
        problem = (
            f"{meta.number(ATTENTION_FACTOR)}; it is supported only with yarn and Phi's divisors"
        )
        raise meta.error(ATTENTION_FACTOR, problem)
    divisors = meta.vector(FACTORS, rotated // 2)
    if kind == "yarn":
        if divisors:
            raise ModelError(f"{meta.file.path} has both yarn and {FACTORS}.")
        return {"rope_theta": theta} | _yarn(meta, factor)
    if divisors:
        scale = factor if kind == "linear" else 1.0
        divided = [scale * divisor for divisor in divisors]
        return {"rope_theta": theta, "rope_type": "divisors", "divisors": divided}
    if kind == "linear" and factor != 1.0:
        return {"rope_theta": theta, "rope_type": "linear", "factor": factor}
    return {"rope_theta": theta, "rope_type": "default"}


def longrope(meta: Metadata, rotated: int) -> dict[str, Any]:
    """Return `rope_parameters` for Phi 3, whose files may hold two sets of divisors."""
    long, short = (meta.vector(name, rotated // 2) for name in (LONG_FACTORS, SHORT_FACTORS))
    if not long and not short:
        return rope(meta, rotated)
    if not (long and short):
        raise ModelError(f"{meta.file.path} has one of {LONG_FACTORS} and {SHORT_FACTORS} only.")
    found: dict[str, Any] = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    if meta.has(ATTENTION_FACTOR):
        found["attention_factor"] = meta.number(ATTENTION_FACTOR)
    return found | {"rope_theta": meta.number("rope.freq_base", 10000.0)}


def turned_part(rotated: int, head_dim: int) -> float:
    """Return the rotated share of each head, such that `int(head_dim * share) == rotated`."""
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else math.nextafter(share, 2.0)


def _yarn(meta: Metadata, factor: float) -> dict[str, Any]:
    """Return yarn's parameters. As in llama.cpp, `attn_factor` multiplies yarn's own factor."""
    sharpness = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    config = {
        "rope_type": "yarn",
        "factor": factor,
        "attention_factor": meta.number(ATTENTION_FACTOR, 1.0) * sharpness,
        "beta_fast": meta.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": meta.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if meta.has("rope.scaling.original_context_length"):
        length = meta.count("rope.scaling.original_context_length")
        config["original_max_position_embeddings"] = length
    return config
