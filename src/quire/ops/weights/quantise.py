"""Quantisation of weights to 8 or 4 bits at load: `--quantization int8|int4|fp8`.

Shape legend: N outputs, K inputs, G groups of inputs that share a scale, S inputs of a group, P
groups of 32 inputs that share a base scale.

Integers equal the C++ core's (csrc/linear_pack.cpp, linear_multiples.h), so a model has the same
weights on a GPU as on a CPU. They are rounded to nearest, with scales that are exact in bfloat16.
They are symmetric, except int4 in groups of 32. There the scales of four groups are small multiples
of one scale, and a group's largest weight becomes -8, by the sign of its scale. Float8 has a
float32 scale per output, by which the largest weight becomes 448.
"""

import torch

from quire.base.errors import ConfigError
from quire.ops.weights.formats import MULTIPLIED_INPUTS, Quantization, packed_form
from quire.ops.weights.stored_rows import Float8Rows, IntegerRows, StoredRows

LEVELS = {"int8": 127, "int4": 7}
LARGEST_FLOAT8 = 448.0
NUM_SCALES = 12
SCALE_STEP = 0.035
NUM_BASE_SCALES = 8  # candidates for the base scale of four groups of int4
SMALLEST_MULTIPLIED = 1e-35  # groups of smaller weights become 0
SIGNIFICANT_STEP = 1 << 19  # in the bits of a float32: leaves five significant bits
LANES = 16  # partial sums of an error, as in the core


def quantised(weight_NK: torch.Tensor, quantization: Quantization) -> StoredRows:
    """Quantise a weight [N, K] on its device. Temporaries take 4 bytes per number: pass parts of a
    large weight.

    Raises ConfigError for weights that are not finite, because they have no scale.
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
    if packed_form(quantization).format == "int4_multiples":
        return _multiplied(values_NK)
    bits, levels = (8, LEVELS["int8"]) if quantization.format == "int8" else (4, LEVELS["int4"])
    padded_NK = torch.nn.functional.pad(values_NK, (0, -num_inputs % size))
    grouped_NGS = padded_NK.unflatten(1, (-1, size))
    scales_NG = _scales(grouped_NGS, num_inputs, levels, searches=quantization.format == "int4")
    integers_NGS = _rounded(grouped_NGS, scales_NG, levels)
    integers_NK = integers_NGS.flatten(1)[:, :num_inputs].to(torch.int8)
    return IntegerRows(integers_NK, bits, scales_NG, min(size, num_inputs))


def _multiplied(values_NK: torch.Tensor) -> IntegerRows:
    """Quantise to int4 with a base scale per 128 inputs. Each 32 of them (P) get a multiple of 1 to
    8, and integers from -8 to 7 or from -7 to 8. The least squared error decides."""
    num_inputs = values_NK.shape[1]
    padded_NK = torch.nn.functional.pad(values_NK, (0, -num_inputs % MULTIPLIED_INPUTS))
    parts_NGPS = padded_NK.unflatten(1, (-1, MULTIPLIED_INPUTS // 32, 32))
    max_NGP, min_NGP = parts_NGPS.amax(dim=-1), parts_NGPS.amin(dim=-1)
    largest_NGP, is_above_NGP = max_NGP.maximum(-min_NGP), max_NGP >= -min_NGP
    largest_NG = largest_NGP.amax(dim=-1)
    bits_NG = _divided(largest_NG, 48.0).view(torch.int32)
    first_NG = (bits_NG + SIGNIFICANT_STEP - 1) & -SIGNIFICANT_STEP
    chosen_NGP, min_error_NG = torch.zeros_like(largest_NGP), torch.full_like(largest_NG, torch.inf)
    for i in range(NUM_BASE_SCALES):
        scale_NG = (first_NG - i * SIGNIFICANT_STEP).view(torch.float32)
        scales_NGP, errors_NGP = _multiples(parts_NGPS, scale_NG, largest_NGP, is_above_NGP)
        error_NG = errors_NGP[..., 0]
        for p in range(1, errors_NGP.shape[-1]):
            error_NG = error_NG + errors_NGP[..., p]
        is_better = error_NG < min_error_NG if i else torch.ones_like(largest_NG, dtype=torch.bool)
        min_error_NG = torch.where(is_better, error_NG, min_error_NG)
        chosen_NGP = torch.where(is_better[..., None], scales_NGP, chosen_NGP)
    is_zero = (largest_NG < SMALLEST_MULTIPLIED)[..., None]
    chosen_NGP = chosen_NGP.masked_fill(is_zero, 0.0)
    integers_NGPS = _asymmetric(parts_NGPS, chosen_NGP, is_above_NGP)
    # Negate integers from -7 to 8 and their scales, so that all integers are from -8 to 7.
    integers_NGPS = torch.where(is_above_NGP[..., None], -integers_NGPS, integers_NGPS)
    scales_NG = torch.where(is_above_NGP, -chosen_NGP, chosen_NGP).flatten(1)
    integers_NK = integers_NGPS.flatten(1)[:, :num_inputs].to(torch.int8)
    count, size = -(-num_inputs // 32), min(32, num_inputs)
    return IntegerRows(integers_NK, 4, scales_NG[:, :count].contiguous(), size)


def _multiples(
    parts_NGPS: torch.Tensor,
    scale_NG: torch.Tensor,
    largest_NGP: torch.Tensor,
    is_above_NGP: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best scale of each part, a multiple of the given scale, and its error. Candidates
    are the least multiple without clipping and the multiple below it."""
    multiple_NGP = torch.ones_like(largest_NGP)
    for multiple in range(1, 8):
        multiple_NGP += 8 * multiple * scale_NG[..., None] < largest_NGP
    multiple_NGP = torch.where(is_above_NGP, multiple_NGP.clamp(max=7), multiple_NGP)
    one_NGP = multiple_NGP * scale_NG[..., None]
    below_NGP = (multiple_NGP - 1).clamp(min=1) * scale_NG[..., None]
    errors = []
    for scales_NGP in (one_NGP, below_NGP):
        rounded_NGPS = _asymmetric(parts_NGPS, scales_NGP, is_above_NGP)
        errors.append(_sums_of_squares(parts_NGPS - rounded_NGPS * scales_NGP[..., None]))
    is_smaller = errors[1] < errors[0]
    return torch.where(is_smaller, below_NGP, one_NGP), torch.where(
        is_smaller, errors[1], errors[0]
    )


def _asymmetric(
    parts_NGPS: torch.Tensor, scales_NGP: torch.Tensor, is_above_NGP: torch.Tensor
) -> torch.Tensor:
    """Return weights / scales, rounded, from -7 to 8 if is_above, else from -8 to 7."""
    inverse_NGP = torch.where(scales_NGP > 0, 1.0 / scales_NGP, 0.0)
    rounded_NGPS = (parts_NGPS * inverse_NGP[..., None]).round_()
    lowest = torch.where(is_above_NGP, -7.0, -8.0)[..., None]
    return rounded_NGPS.maximum(lowest).minimum(lowest + 15)


def _rounded(grouped_NGS: torch.Tensor, scales_NG: torch.Tensor, levels: int) -> torch.Tensor:
    inverse_NG = torch.where(scales_NG > 0, 1.0 / scales_NG, 0.0)
    return (grouped_NGS * inverse_NG[..., None]).round_().clamp_(-levels, levels)


def _scales(
    grouped_NGS: torch.Tensor, num_inputs: int, levels: int, searches: bool
) -> torch.Tensor:
    """Return the scale of each group, [N, G]. An int4 search may clip the largest weights: with 15
    levels, finer steps for all other weights often gain more. The least squared error decides."""
    largest_NG = grouped_NGS.abs().amax(dim=-1)
    best_NG = _bfloat16_up(_divided(largest_NG, levels))
    if not searches:
        return best_NG
    # The core's error excludes inputs that do not fill its lanes, which only a last group has.
    last = num_inputs - (grouped_NGS.shape[1] - 1) * grouped_NGS.shape[2]
    counted = torch.ones_like(grouped_NGS[0], dtype=torch.bool)
    counted[-1, last // LANES * LANES :] = False
    min_error_NG = _squared_error(grouped_NGS, best_NG, levels, counted)
    for i in range(1, NUM_SCALES + 1):
        share = _float32(1.0 - _float32(_float32(SCALE_STEP) * i))
        scales_NG = _divided(largest_NG * share, levels).bfloat16().float()
        error_NG = _squared_error(grouped_NGS, scales_NG, levels, counted)
        is_better = (error_NG < min_error_NG) & (scales_NG > 0)
        min_error_NG = torch.where(is_better, error_NG, min_error_NG)
        best_NG = torch.where(is_better, scales_NG, best_NG)
    return best_NG


def _divided(values: torch.Tensor, number: float) -> torch.Tensor:
    """Divide as a CPU does. A GPU multiplies by the inverse of a host number, which rounds
    differently."""
    return values / torch.full((), number, dtype=values.dtype, device=values.device)


def _bfloat16_up(values: torch.Tensor) -> torch.Tensor:
    """Round up to bfloat16; the result is float32."""
    near = values.bfloat16()
    bits = near.view(torch.int16)
    above = torch.where(near.float() < values, bits + 1, bits)
    return above.view(torch.bfloat16).float()


def _squared_error(
    grouped_NGS: torch.Tensor, scales_NG: torch.Tensor, levels: int, counted_GS: torch.Tensor
) -> torch.Tensor:
    errors_NGS = grouped_NGS - _rounded(grouped_NGS, scales_NG, levels) * scales_NG[..., None]
    return _sums_of_squares(errors_NGS.where(counted_GS, 0.0))


def _sums_of_squares(errors: torch.Tensor) -> torch.Tensor:
    """Sum the squares of the last axis in the core's order: in each lane, then over lanes."""
    squares = (errors * errors).unflatten(-1, (-1, LANES))
    lanes = squares[..., 0, :]
    for i in range(1, squares.shape[-2]):
        lanes = lanes + squares[..., i, :]
    total: torch.Tensor = lanes[..., 0]
    for i in range(1, LANES):
        total = total + lanes[..., i]
    return total


def _float32(value: float) -> float:
    """Round to float32, as the core computes."""
    return torch.tensor(value, dtype=torch.float32).item()
