"""Rotary embedding of a model: its frequencies, read from the config.

Shape legend: T tokens, H head dim, E = H / 2.

A config names the variant either in `rope_parameters` (which also holds `rope_theta`) or, in older
files, in `rope_scaling` beside a `rope_theta` of its own. Frequencies are radians per token.
The variant `divisors` comes from GGUF files, which hold a number for each frequency instead of the
rule that gives them.
"""

import math
from typing import Any

import torch

from quire.base.errors import ModelError
from quire.base.model_spec import ModelSpec
from quire.models.layers import Place
from quire.ops.rotary import rotary_rows

SUPPORTED = ("default", "linear", "llama3", "yarn", "divisors")


class Rotary:
    """The model's rotary embedding. Called once per step; all layers share what it returns."""

    def __init__(self, spec: ModelSpec, place: Place) -> None:
        parameters = rope_parameters(spec)
        frequencies_E, self._scale = rope_frequencies(spec, parameters)
        self._frequencies_E = frequencies_E.to(place.device)
        self._dtype = place.dtype

    def __call__(self, positions_T: torch.Tensor) -> torch.Tensor:
        """The factors of these positions, as ops.rotary takes them."""
        return rotary_rows(positions_T, self._frequencies_E, self._scale, self._dtype)


def rope_parameters(spec: ModelSpec) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and the variant's numbers, in one dictionary.

    Raises ModelError for a variant that is not supported.
    """
    raw = spec.raw
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    parameters.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in SUPPORTED:
        raise ModelError(
            f"the rotary embedding {kind!r} is not supported; supported are {', '.join(SUPPORTED)}."
        )
    if parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("rotary embedding of a part of each head is not supported.")
    return parameters | {"rope_type": kind}


def rope_frequencies(spec: ModelSpec, parameters: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """The frequencies [E] in float64, and the factor on sines and cosines."""
    half = spec.head_dim // 2
    exponents_E = torch.arange(half, dtype=torch.float64) / half
    frequencies_E = float(parameters["rope_theta"]) ** -exponents_E
    kind = parameters["rope_type"]
    if kind == "linear":
        return frequencies_E / parameters["factor"], 1.0
    if kind == "divisors":
        return frequencies_E / torch.tensor(parameters["divisors"], dtype=torch.float64), 1.0
    if kind == "llama3":
        return _llama3(frequencies_E, parameters), 1.0
    if kind == "yarn":
        return _yarn(frequencies_E, parameters, spec)
    return frequencies_E, 1.0


def _llama3(frequencies_E: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    """Slow turns are slowed by `factor`, fast ones kept, those between are blended."""
    turns_E = parameters["original_max_position_embeddings"] * frequencies_E / (2 * math.pi)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    keep_E = ((turns_E - low) / (high - low)).clamp(0.0, 1.0)
    return keep_E * frequencies_E + (1 - keep_E) * frequencies_E / parameters["factor"]


def _yarn(
    frequencies_E: torch.Tensor, parameters: dict[str, Any], spec: ModelSpec
) -> tuple[torch.Tensor, float]:
    """As llama3, but blended along the index of the frequency instead of its value."""
    factor = parameters["factor"]
    trained = parameters.get("original_max_position_embeddings") or spec.max_position
    theta = float(parameters["rope_theta"])

    def index_of(turns: float) -> float:
        """Where in the list stands the frequency that makes so many turns in `trained` tokens."""
        return len(frequencies_E) * math.log(trained / (turns * 2 * math.pi)) / math.log(theta)

    first = index_of(parameters.get("beta_fast") or 32.0)
    last = index_of(parameters.get("beta_slow") or 1.0)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(frequencies_E) - 1)
    index_E = torch.arange(len(frequencies_E), dtype=torch.float64)
    keep_E = 1 - ((index_E - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    blended_E = keep_E * frequencies_E + (1 - keep_E) * frequencies_E / factor
    return blended_E, _yarn_scale(factor, parameters)


def _yarn_scale(factor: float, parameters: dict[str, Any]) -> float:
    """The factor on sines and cosines: attention grows sharper with the length."""
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])

    def sharpness(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and all_dims:
        return sharpness(mscale) / sharpness(all_dims)
    return sharpness(1.0)
