"""Rows of a weight as a quantised checkpoint stores them: loaders make them, and devices pack them.

Shape legend: N outputs, K inputs, G groups of inputs that share a scale (K / G inputs each, or one
group), B blocks of 32 inputs.

The method `dequantised` of each type defines its numbers, exactly as the format does.
"""

from dataclasses import dataclass, replace

import torch

FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1; the highest bit is the sign
FLOAT4_BLOCK = 32
EXPONENT_BIAS = 127  # of e8m0


@dataclass(frozen=True, eq=False)
class IntegerRows:
    """Weight [N, K] whose element (n, k) is scale[n, g] * (integer[n, k] - zero[n, g]).

    integers: int8 [N, K], from -2^(bits-1) to 2^(bits-1) - 1. bits: 4 or 8. scales: float32 [N, G].
    group_size: inputs that share a scale; the last group may have fewer; K for one scale per
    output. zeros: float32 [N, G], whole or not; None if all are zero. order: int64 [K] if inputs
    were sorted by group; column k of the integers belongs to input order[k]. None: not sorted.
    """

    integers: torch.Tensor
    bits: int
    scales: torch.Tensor
    group_size: int
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.integers.shape
        return outputs, inputs

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the numbers [N, K] in the original order of inputs, computed in `dtype`."""
        values_NK = self.integers.to(dtype)
        if self.zeros is not None:
            values_NK -= _of_inputs(self.zeros.to(dtype), values_NK.shape[1], self.group_size)
        values_NK *= _of_inputs(self.scales.to(dtype), values_NK.shape[1], self.group_size)
        if self.order is None:
            return values_NK
        return torch.empty_like(values_NK).index_copy_(1, self.order, values_NK)


@dataclass(frozen=True, eq=False)
class Float8Rows:
    """Weight [N, K] of e4m3 numbers times scales: scale[n, g] * value[n, k].

    values: float8_e4m3fn [N, K]. scales: float32 [N, G]; a scale that outputs share is repeated for
    each of them. group_size: as in IntegerRows.
    """

    values: torch.Tensor
    scales: torch.Tensor
    group_size: int

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.values.shape
        return outputs, inputs

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the numbers [N, K], computed in `dtype`."""
        values_NK = self.values.to(dtype)
        values_NK *= _of_inputs(self.scales.to(dtype), values_NK.shape[1], self.group_size)
        return values_NK


@dataclass(frozen=True, eq=False)
class Float4Rows:
    """Weight [N, K] of e2m1 numbers in blocks of 32 inputs, with a power of two per block (MXFP4).

    codes: uint8 [N, K / 2], input 2 i in the low half of byte i. exponents: uint8 [N, B], e8m0: the
    factor is 2^(exponent - 127).
    """

    codes: torch.Tensor
    exponents: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        outputs, half = self.codes.shape
        return outputs, 2 * half

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the numbers [N, K], computed in `dtype`."""
        signed = [*FLOAT4_VALUES, *(-value for value in FLOAT4_VALUES)]
        table = torch.tensor(signed, dtype=dtype, device=self.codes.device)
        codes_NK = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(1)
        factors_NB = torch.exp2(self.exponents.to(dtype) - EXPONENT_BIAS)
        return table[codes_NK.long()] * _of_inputs(factors_NB, codes_NK.shape[1], FLOAT4_BLOCK)


StoredRows = IntegerRows | Float8Rows | Float4Rows


def stacked(parts: list[StoredRows]) -> StoredRows:
    """Concatenate the outputs of a merged weight's parts. They must agree in kind, bits, group size
    and order of inputs; raises ValueError with the difference."""
    first = parts[0]
    if isinstance(first, IntegerRows):
        return _stacked_integers(first, parts)
    if isinstance(first, Float8Rows):
        float8 = [part for part in parts if isinstance(part, Float8Rows)]
        if len(float8) < len(parts) or len({part.group_size for part in float8}) > 1:
            raise ValueError("kind or group size")
        values = torch.cat([part.values.view(torch.uint8) for part in float8])
        scales = torch.cat([part.scales for part in float8])
        return replace(first, values=values.view(torch.float8_e4m3fn), scales=scales)
    float4 = [part for part in parts if isinstance(part, Float4Rows)]
    if len(float4) < len(parts):
        raise ValueError("kind")
    codes = torch.cat([part.codes for part in float4])
    return Float4Rows(codes, torch.cat([part.exponents for part in float4]))


def selected(rows: StoredRows, outputs: torch.Tensor | slice) -> StoredRows:
    """Return the rows of some outputs. outputs: a slice, or int64 indices [...]."""
    if isinstance(rows, Float4Rows):
        return Float4Rows(rows.codes[outputs], rows.exponents[outputs])
    if isinstance(rows, Float8Rows):
        values = rows.values.view(torch.uint8)[outputs].view(torch.float8_e4m3fn)
        return replace(rows, values=values, scales=rows.scales[outputs])
    zeros = None if rows.zeros is None else rows.zeros[outputs]
    scales, integers = rows.scales[outputs], rows.integers[outputs]
    return replace(rows, integers=integers, scales=scales, zeros=zeros)


def _stacked_integers(first: IntegerRows, parts: list[StoredRows]) -> IntegerRows:
    rows = [part for part in parts if isinstance(part, IntegerRows)]
    if len(rows) < len(parts) or len({(part.bits, part.group_size) for part in rows}) > 1:
        raise ValueError("kind, bits or group size")
    for part in rows[1:]:
        if not _same_order(first.order, part.order):
            raise ValueError("order of inputs")
    zeros = None
    if any(part.zeros is not None for part in rows):
        own = (torch.zeros_like(p.scales) if p.zeros is None else p.zeros for p in rows)
        zeros = torch.cat(list(own))
    return replace(
        first,
        integers=torch.cat([part.integers for part in rows]),
        scales=torch.cat([part.scales for part in rows]),
        zeros=zeros,
    )


def _same_order(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _of_inputs(values_NG: torch.Tensor, num_inputs: int, group_size: int) -> torch.Tensor:
    """Repeat values [N, G] for the inputs of each group, [N, K]; one group for all stays [N, 1]."""
    if values_NG.shape[1] == 1:
        return values_NG
    return values_NG.repeat_interleave(group_size, dim=1)[:, :num_inputs]
