"""Weights of linear layers in the order in which the C++ core multiplies: opaque, made once.

Shape legend: K inputs, N outputs, U looked up rows. The layout is csrc/linear.h's; it depends on
the variant, the instruction set that the core chose or QUIRE_CPU_VARIANT names.
"""

import functools
import os
from dataclasses import dataclass

import torch

from quire.base.errors import ConfigError
from quire.ops.native import address, core
from quire.ops.threads import num_threads

VARIANT = "QUIRE_CPU_VARIANT"  # the environment variable; one that this CPU runs

FORMATS = ("float32", "bfloat16", "float16", "int8", "int4")
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
GROUP_SIZES = (32, 64, 128)
MOST_INPUTS_OF_A_ROW = 65_536  # more products of 8 bits could overflow 32
ROUND_INPUTS = 8


@dataclass(frozen=True)
class Quantization:
    """How weights are stored: `int8` or `int4`, with a scale per `group_size` inputs of an output,
    or for int8 with 0 per output. Activations become int8 in the same groups, as they come."""

    format: str
    group_size: int

    def group_of(self, num_inputs: int) -> int:
        """Inputs that share a scale, filled up where the number of inputs asks for it."""
        if self.group_size:
            return self.group_size
        if num_inputs > MOST_INPUTS_OF_A_ROW:
            raise ConfigError(
                f"a layer has {num_inputs:,} inputs, too many for int8 with one scale per output;"
                f" give quantization_group_size {GROUP_SIZES[-1]}."
            )
        return -(-num_inputs // ROUND_INPUTS) * ROUND_INPUTS


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """[N, K] in a format, in the core's order. data: bytes; numbers: as the core's functions take
    them (format, variant, N, K, group)."""

    data: torch.Tensor
    format: str
    numbers: tuple[int, int, int, int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers[2], self.numbers[3]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def variant(self) -> str:
        return variants()[self.numbers[1]]

    def rows(self, ids_U: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows [U, K] of these outputs, int64, as they were stored."""
        out_UK = torch.empty(len(ids_U), self.shape[1], dtype=dtype)
        _core().linear_unpack_rows(
            address(out_UK, dtype),
            ELEMENTS[dtype],
            address(ids_U, torch.int64),
            len(ids_U),
            self.numbers,
            address(self.data, torch.uint8),
        )
        return out_UK


def _core() -> "object":
    module = core()
    assert module is not None, "a packed weight needs the core that packed it"
    return module


@functools.cache
def variants() -> tuple[str, ...]:
    """The instruction sets that both the core and this CPU have, the best last; none without it."""
    module = core()
    return () if module is None else tuple(module.linear_variants())


def chosen_variant() -> str:
    """The best, or the one that QUIRE_CPU_VARIANT names. Raises ConfigError for another."""
    name = os.environ.get(VARIANT, "")
    if not name:
        return variants()[-1]
    if name not in variants():
        raise ConfigError(f"{VARIANT}={name} does not run here; there are {', '.join(variants())}.")
    return name


def can_pack_natively(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the core multiplies activations of this dtype."""
    return device.type == "cpu" and dtype in ELEMENTS and core() is not None


def packed_bytes(
    shape: tuple[int, int], dtype: torch.dtype, quantization: Quantization | None
) -> int:
    """What a weight will take when it is packed."""
    return int(_core().linear_bytes(_numbers(shape, dtype, quantization, None)))


def pack(
    weight_NK: torch.Tensor, quantization: Quantization | None, variant: str | None = None
) -> PackedWeight:
    """The weight in the core's order, quantised if that is asked for.

    Raises ConfigError for weights that are not finite: they have no scale.
    """
    weight_NK = weight_NK.detach().contiguous()
    numbers = _numbers(tuple(weight_NK.shape), weight_NK.dtype, quantization, variant)
    if quantization is not None and not weight_NK.isfinite().all():
        raise ConfigError(
            f"a weight of shape {list(weight_NK.shape)} holds values that are not finite, so it"
            f" cannot be quantised to {quantization.format}."
        )
    data = torch.empty(_core().linear_bytes(numbers), dtype=torch.uint8)
    _core().linear_pack(
        address(data, torch.uint8),
        numbers,
        address(weight_NK, weight_NK.dtype),
        ELEMENTS[weight_NK.dtype],
        quantization is not None and quantization.format == "int4",
        num_threads(),
    )
    return PackedWeight(data, FORMATS[numbers[0]], numbers)


def _numbers(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    quantization: Quantization | None,
    variant: str | None,
) -> tuple[int, int, int, int, int]:
    outputs, inputs = shape
    name = str(dtype).removeprefix("torch.") if quantization is None else quantization.format
    group = 1 if quantization is None else quantization.group_of(inputs)
    index = variants().index(variant or chosen_variant())
    return FORMATS.index(name), index, outputs, inputs, group
