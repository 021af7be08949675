"""Rounds weights to 8 or 4 bits where no checkpoint did: `--quantization int8|int4|fp8`.

Shape legend: N outputs, K inputs, G groups of inputs that share a scale, S inputs of a group.

Integers are the C++ core's (csrc/linear_pack.cpp), number by number, so a model has the same
weights on a GPU as on a CPU: symmetric, to the nearest, with scales that are exactly bfloat16.
Float8 has a float32 scale for each output, of which the largest weight is 448.
"""

import torch

from quire.base.errors import ConfigError
from quire.ops.formats import Quantization
from quire.ops.stored_rows import Float8Rows, IntegerRows, StoredRows

LEVELS = {"int8": 127, "int4": 7}
LARGEST_FLOAT8 = 448.0
TRIED_SCALES = 12
SCALE_STEP = 0.035
LANES = 16  # sums in which an error is added up


def quantised(weight_NK: torch.Tensor, quantization: Quantization) -> StoredRows:
    """Round a weight, on the device where it is. Makes temporaries of 4 bytes for each number: give
    parts of a large one.

    Raises ConfigError for weights that are not finite: they have no scale.
    """
    values_NK = weight_NK.detach().float()
    if not bool(values_NK.isfinite().all()):
        raise ConfigError(
            f"a weight of shape {list(weight_NK.shape)} holds values that are not finite, so it"
            f" cannot be quantised to {quantization.format}."
        )
    if quantization.format == "fp8":
        return _float8(values_NK)
    return _integers(values_NK, quantization)


def _float8(values_NK: torch.Tensor) -> Float8Rows:
    largest_N1 = values_NK.abs().amax(dim=1, keepdim=True)
    scales_N1 = _divided(largest_N1, LARGEST_FLOAT8)
    rounded_NK = values_NK / torch.where(scales_N1 > 0, scales_N1, 1.0)
    rounded_NK = rounded_NK.clamp_(-LARGEST_FLOAT8, LARGEST_FLOAT8)
    return Float8Rows(rounded_NK.to(torch.float8_e4m3fn), scales_N1, values_NK.shape[1])


def _integers(values_NK: torch.Tensor, quantization: Quantization) -> IntegerRows:
    num_inputs, size = values_NK.shape[1], quantization.group_of(values_NK.shape[1])
    bits, levels = (8, LEVELS["int8"]) if quantization.format == "int8" else (4, LEVELS["int4"])
    padded_NK = torch.nn.functional.pad(values_NK, (0, -num_inputs % size))
    grouped_NGS = padded_NK.unflatten(1, (-1, size))
    scales_NG = _scales(grouped_NGS, num_inputs, levels, searches=quantization.format == "int4")
    integers_NGS = _rounded(grouped_NGS, scales_NG, levels)
    integers_NK = integers_NGS.flatten(1)[:, :num_inputs].to(torch.int8)
    return IntegerRows(integers_NK, bits, scales_NG, min(size, num_inputs))


def _rounded(grouped_NGS: torch.Tensor, scales_NG: torch.Tensor, levels: int) -> torch.Tensor:
    inverse_NG = torch.where(scales_NG > 0, 1.0 / scales_NG, 0.0)
    return (grouped_NGS * inverse_NG[..., None]).round_().clamp_(-levels, levels)


def _scales(
    grouped_NGS: torch.Tensor, num_inputs: int, levels: int, searches: bool
) -> torch.Tensor:
    """Of int4 the largest weights may be clipped: with 15 levels that often costs less than what
    all others gain by finer steps. The least squared error decides."""
    largest_NG = grouped_NGS.abs().amax(dim=-1)
    best_NG = _bfloat16_up(_divided(largest_NG, levels))
    if not searches:
        return best_NG
    # The core leaves out of an error what does not fill its lanes; only a last group may not.
    last = num_inputs - (grouped_NGS.shape[1] - 1) * grouped_NGS.shape[2]
    kept = torch.ones_like(grouped_NGS[0], dtype=torch.bool)
    kept[-1, last // LANES * LANES :] = False
    least_NG = _squared_error(grouped_NGS, best_NG, levels, kept)
    for i in range(1, TRIED_SCALES + 1):
        share = _float32(1.0 - _float32(_float32(SCALE_STEP) * i))
        scales_NG = _divided(largest_NG * share, levels).bfloat16().float()
        error_NG = _squared_error(grouped_NGS, scales_NG, levels, kept)
        is_better = (error_NG < least_NG) & (scales_NG > 0)
        least_NG = torch.where(is_better, error_NG, least_NG)
        best_NG = torch.where(is_better, scales_NG, best_NG)
    return best_NG


def _divided(values: torch.Tensor, number: float) -> torch.Tensor:
    """Divide as a CPU does. By a number that is not on it a GPU multiplies with its inverse, which
    rounds otherwise."""
    return values / torch.full((), number, dtype=values.dtype, device=values.device)


def _bfloat16_up(values: torch.Tensor) -> torch.Tensor:
    """The nearest bfloat16, or the next larger one where that is below, as float32."""
    near = values.bfloat16()
    bits = near.view(torch.int16)
    above = torch.where(near.float() < values, bits + 1, bits)
    return above.view(torch.bfloat16).float()


def _squared_error(
    grouped_NGS: torch.Tensor, scales_NG: torch.Tensor, levels: int, kept_GS: torch.Tensor
) -> torch.Tensor:
    """Sums of a group, in the core's order: of each lane, then of the lanes."""
    errors_NGS = grouped_NGS - _rounded(grouped_NGS, scales_NG, levels) * scales_NG[..., None]
    squares = (errors_NGS * errors_NGS).where(kept_GS, 0.0).unflatten(-1, (-1, LANES))
    lanes = squares[..., 0, :]
    for i in range(1, squares.shape[-2]):
        lanes = lanes + squares[..., i, :]
    total_NG: torch.Tensor = lanes[..., 0]
    for i in range(1, LANES):
        total_NG = total_NG + lanes[..., i]
    return total_NG


def _float32(value: float) -> float:
    """Round to float32, in which the core computes."""
    return torch.tensor(value, dtype=torch.float32).item()
