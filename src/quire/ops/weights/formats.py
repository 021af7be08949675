"""Storage formats of weights and their sizes: bits, groups, the core's panels. No torch is needed.

Shape legend: K inputs, N outputs. The layout is defined in csrc/linear.h. `packed_bytes` returns
the same number as the core (tests/ops/test_formats.py compares them).
"""

import functools
import importlib.util
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quire.base.errors import ConfigError
from quire.ops.host.native import core, needed_core
from quire.ops.host.native_types import WeightLayout
from quire.ops.weights.gpu_layout import gpu_weight_bytes
from quire.ops.weights.kernel_choice import (
    KernelFile,
    Measurement,
    Speed,
    choose_variant,
    kernel_file,
)
from quire.spec.model_spec import DTYPE_BYTES

VARIANT = "QUIRE_CPU_VARIANT"  # environment variable: an instruction set of this CPU

FORMATS = ("float32", "bfloat16", "float16", "int8", "int4")  # formats whose speed is measured
CORE_DTYPES = FORMATS[:3]  # dtypes of activations that the core multiplies
ATTENTION = "float32"  # format of the core's attention, unless keys are bfloat16
GROUP_SIZES = (32, 64, 128)
MAX_ROW_INPUTS = 65_536  # sums of more 8-bit products could overflow 32 bits
ROUND_INPUTS = 8
MAX_STORED_GROUP = 128  # inputs; activations are int8 per group, so larger groups are cut
NESTED_INPUTS = 256  # inputs of a block of GGUF's K formats
MULTIPLIED_INPUTS = 128  # inputs of a group of int4_multiples


@dataclass(frozen=True)
class FormatSizes:
    """Sizes of a format in the core's order (csrc/linear_formats.h).

    bits: bits per weight. factor_bytes: of scale and offset, per output and group. block_bytes:
    shared by the groups of a block of NESTED_INPUTS. group: inputs of a group if the format fixes
    them; 0: any. is_measured_as: the format of FORMATS with the same arithmetic.
    """

    bits: int
    is_measured_as: str
    factor_bytes: int = 0
    block_bytes: int = 0
    group: int = 0


def _integer_sizes() -> dict[str, FormatSizes]:
    """Return sizes of integers with zero points, or with scales other than bfloat16."""
    found = {}
    for bits in (8, 4):
        for zeros in ("", "_zeros"):
            for kind, scale_bytes in (("", 2), ("_f16", 2), ("_f32", 4)):
                size = scale_bytes * (2 if zeros else 1)
                found[f"int{bits}{kind}{zeros}"] = FormatSizes(bits, f"int{bits}", size)
    return found


# By name, in the order of the core's numbers.
SIZES = {
    "float32": FormatSizes(32, "float32"),
    "bfloat16": FormatSizes(16, "bfloat16"),
    "float16": FormatSizes(16, "float16"),
    "int8": FormatSizes(8, "int8", 2),
    "int4": FormatSizes(4, "int4", 2),
    "int4_multiples": FormatSizes(4, "int4", 4, group=MULTIPLIED_INPUTS),
    "fp8": FormatSizes(8, "float16", 4),
    "mxfp4": FormatSizes(4, "int4", 1, group=32),
    **{name: sizes for name, sizes in _integer_sizes().items() if name not in FORMATS},
    "q4_1": FormatSizes(4, "int4", 4, group=32),
    "q5_0": FormatSizes(5, "int4", 2, group=32),
    "q5_1": FormatSizes(5, "int4", 4, group=32),
    "q2_k": FormatSizes(4, "int4", 2, 4, group=16),
    "q3_k": FormatSizes(4, "int4", 1, 2, group=16),
    "q4_k": FormatSizes(4, "int4", 2, 4, group=32),
    "q5_k": FormatSizes(5, "int4", 2, 4, group=32),
    "q6_k": FormatSizes(6, "int4", 1, 2, group=16),
}
NAMES = tuple(SIZES)


@dataclass(frozen=True)
class Quantization:
    """Storage of weights: a format of NAMES, with a scale per `group_size` inputs of an output, or
    per output if 0. With integers, the C++ core rounds activations to int8 in the same groups.
    is_stored: whether integers are a checkpoint's own, which do not change."""

    format: str
    group_size: int
    is_stored: bool = False

    def group_of(self, num_inputs: int) -> int:
        """Return the number of inputs that share a scale, padded if one scale serves a whole
        output. Raises ConfigError if that is too many."""
        if self.group_size:
            return self.group_size
        if num_inputs > MAX_ROW_INPUTS and rounds_activations(self.format):
            raise ConfigError(
                f"a layer has {num_inputs:,} inputs, too many for int8 with one scale per output;"
                f" give quantization_group_size {GROUP_SIZES[-1]}."
            )
        return -(-num_inputs // ROUND_INPUTS) * ROUND_INPUTS


def packed_form(quantization: Quantization) -> Quantization:
    """Return the format in which the core packs weights that quire quantises. For int4 in groups of
    32, scales are multiples of one scale per 128 inputs (ops/weights/quantise.py)."""
    if quantization == Quantization("int4", 32):
        return Quantization("int4_multiples", MULTIPLIED_INPUTS)
    return quantization


@dataclass(frozen=True)
class Packing:
    """Storage of linear layers' weights on a device.

    dtype: dtype of plain weights. panel: outputs per panel of the core's order, 0 without that
    order. other_panels: (format, panel) of formats with another instruction set. is_reordered:
    whether a packed weight differs from the plain one; a tied embedding then needs a table, unless
    its rows can be looked up. is_gpu: whether quantised weights have a GPU's order (gpu_layout.py).
    """

    dtype: str
    panel: int = 0
    is_reordered: bool = False
    other_panels: tuple[tuple[str, int], ...] = ()
    is_gpu: bool = False

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def weight_bytes(self, shape: tuple[int, ...], quantization: Quantization | None) -> int:
        """Return the bytes of a weight [N, K] once packed, or on a GPU of [E, N, K]."""
        if self.is_gpu and quantization is not None:
            sizes = SIZES[quantization.format]
            group = quantization.group_size or sizes.group
            return gpu_weight_bytes(shape, sizes.bits, group, sizes.factor_bytes)
        if self.panel:
            name = self.dtype if quantization is None else packed_form(quantization).format
            panel = dict(self.other_panels).get(name, self.panel)
            return packed_bytes(shape, self.dtype, quantization, panel)
        return math.prod(shape) * self.dtype_bytes

    def head_bytes(
        self, shape: tuple[int, ...], quantization: Quantization | None, is_tied: bool
    ) -> int:
        """Return the bytes of a head [V, D] and the embedding tied to it. They share one weight if
        rows can be looked up: 4-bit weights are too coarse for that, and oneDNN's order has no
        look-up."""
        is_int4 = quantization is not None and quantization.format == "int4"
        has_rows = bool(self.panel) or self.is_gpu
        is_plain = quantization is None and not self.is_reordered
        is_shared = is_plain or (has_rows and not is_int4)
        table = shape[0] * shape[1] * self.dtype_bytes if is_tied and not is_shared else 0
        return self.weight_bytes(shape, quantization) + table


def packed_bytes(
    shape: tuple[int, ...], dtype: str, quantization: Quantization | None, panel: int
) -> int:
    """Return the bytes of a weight [N, K] in the core's order: whole panels of outputs, whole
    groups of inputs. dtype: the weight's own, which counts if it is not quantised."""
    outputs, inputs = shape
    rows = -(-outputs // panel) * panel
    if quantization is None:
        return rows * 4 * -(-inputs * SIZES[dtype].bits // 32)
    quantization = packed_form(quantization)
    sizes, group = SIZES[quantization.format], quantization.group_of(inputs)
    groups = -(-inputs // group)
    blocks = inputs // NESTED_INPUTS if sizes.block_bytes else 0
    row_bytes = groups * (group * sizes.bits // 8 + sizes.factor_bytes) + blocks * sizes.block_bytes
    return rows * row_bytes


@functools.cache
def variant_numbers() -> dict[str, int]:
    """Return the instruction sets that both the core and this CPU have, with the core's numbers,
    the default last. Empty without the core."""
    module = core()
    return {} if module is None else dict(module.linear_variants())


def variants() -> tuple[str, ...]:
    """List the names of `variant_numbers`."""
    return tuple(variant_numbers())


def chosen_variant(format: str) -> str:
    """Return the instruction set that multiplies weights of a format: QUIRE_CPU_VARIANT if set,
    else the fastest by measurement. Raises ConfigError if QUIRE_CPU_VARIANT is unavailable."""
    name = forced_variant()
    if name is not None:
        return name
    if len(variants()) == 1:
        return variants()[0]
    return choose_variant(measurement().speeds[SIZES[format].is_measured_as], variants())


def forced_variant() -> str | None:
    """Return QUIRE_CPU_VARIANT's value; None if unset. Raises ConfigError if unavailable."""
    name = os.environ.get(VARIANT, "")
    if name and name not in variants():
        raise ConfigError(
            f"{VARIANT}={name} is not available here; available are {', '.join(variants())}."
        )
    return name or None


def chosen_variants(formats: Iterable[str]) -> dict[str, str]:
    """Return the instruction set of each format; empty without the core."""
    return {} if core() is None else {each: chosen_variant(each) for each in formats}


def measured_speed(format: str) -> Speed | None:
    """Return the speed of one thread with weights of a format; None if the core cannot multiply
    them."""
    if format not in SIZES or core() is None:
        return None
    return measurement().speeds[SIZES[format].is_measured_as][chosen_variant(format)]


@functools.cache
def measurement() -> Measurement:
    """Return the measured speed of the core's instruction sets on this machine. It takes about 0.1
    s once, and is saved."""
    return measurement_file().load_or_measure(_measure)


def _measure() -> dict[str, dict[str, Speed]]:
    from quire.ops.weights.kernel_timing import (
        measure_kernels,  # it imports numpy, which `fit` avoids
    )

    return measure_kernels(needed_core(), variant_numbers(), timed_formats())


def timed_formats() -> dict[str, tuple[int, int]]:
    """Return the core's number and the group size that are timed for each of FORMATS, as for
    weights that quire quantises itself."""
    timed = {each: Quantization(each, 1) for each in FORMATS}
    timed |= {"int8": Quantization("int8", 128), "int4": packed_form(Quantization("int4", 32))}
    return {name: (NAMES.index(each.format), each.group_size) for name, each in timed.items()}


def measurement_file() -> KernelFile:
    """Return the file of this machine's measurement."""
    module = core()
    path = Path("" if module is None else module.__file__)
    return kernel_file(path, dict.fromkeys(FORMATS, variants()))


def panel_of(variant: str) -> int:
    """Return the outputs per panel of an instruction set, derived from the bytes of one weight."""
    core = needed_core()
    one_float32 = WeightLayout(NAMES.index("float32"), variant_numbers()[variant], 1, 1, 1)
    return core.linear_bytes(one_float32.at(0, core)) // DTYPE_BYTES["float32"]


def rounds_activations(format: str) -> bool:
    """Return whether products with a format round activations to int8."""
    return format not in (*CORE_DTYPES, "fp8")


def core_packing(dtype: str) -> Packing | None:
    """Return the core's packing on this CPU; None if it cannot multiply this dtype."""
    if dtype not in CORE_DTYPES or core() is None:
        return None
    panel = panel_of(chosen_variant(dtype))
    panels = ((each, panel_of(chosen_variant(each))) for each in NAMES if each not in CORE_DTYPES)
    others = tuple((each, other) for each, other in panels if other != panel)
    return Packing(dtype, panel, is_reordered=True, other_panels=others)


def check_quantization(dtype: str, device: str) -> None:
    """Raise ConfigError, with advice, if quantised weights cannot run on this type of device."""
    if dtype not in CORE_DTYPES:
        raise ConfigError(f"quantization needs dtype {', '.join(CORE_DTYPES)}, not {dtype}.")
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"quantization works on CPUs and NVIDIA GPUs, not on {device}; remove it, or use"
            " --device cpu."
        )
    if device == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise ConfigError(
                "quantization on a GPU needs triton, which is not installed; install it (it comes"
                " with CUDA builds of torch), or remove quantization."
            )
        return
    if core() is None:
        raise ConfigError(
            "quantization needs the C++ core, which was not built here; install a C++17 compiler"
            " and then quire again, or remove quantization."
        )
