"""How weights are stored, and what that takes: formats, groups, the core's panels. No torch.

Shape legend: K inputs, N outputs. The layout is csrc/linear.h's; `packed_bytes` gives the number
that the core gives for it (tests/ops/test_formats.py compares them).
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

VARIANT = "QUIRE_CPU_VARIANT"  # the environment variable; one that this CPU runs

FORMATS = ("float32", "bfloat16", "float16", "int8", "int4")  # that are measured
CORE_DTYPES = FORMATS[:3]  # of activations that the core multiplies
ATTENTION = "float32"  # what the core's attention multiplies in, unless keys are bfloat16
GROUP_SIZES = (32, 64, 128)
MOST_INPUTS_OF_A_ROW = 65_536  # more products of 8 bits could overflow 32
ROUND_INPUTS = 8
MOST_OF_A_STORED_GROUP = 128  # inputs: activations become int8 in groups, so larger ones are parted
NESTED_INPUTS = 256  # of a block of GGUF's K formats
MULTIPLIED_INPUTS = 128  # of a group of int4_multiples


@dataclass(frozen=True)
class FormatSizes:
    """What the core's order of a format takes (csrc/linear_formats.h).

    bits: of an input of an output. factor_bytes: of scale and offset, for each output and group.
    block_bytes: what the groups of a block of NESTED_INPUTS share. group: inputs of one, where the
    format has no other; 0: any. is_measured_as: which of FORMATS has the same arithmetic.
    """

    bits: int
    is_measured_as: str
    factor_bytes: int = 0
    block_bytes: int = 0
    group: int = 0


def _integer_sizes() -> dict[str, FormatSizes]:
    """Integers with scales that are float16 or float32 instead of bfloat16, or with zero points."""
    found = {}
    for bits in (8, 4):
        for zeros in ("", "_zeros"):
            for kind, scale_bytes in (("", 2), ("_f16", 2), ("_f32", 4)):
                size = scale_bytes * (2 if zeros else 1)
                found[f"int{bits}{kind}{zeros}"] = FormatSizes(bits, f"int{bits}", size)
    return found


# By name. The order of the names is that of the core's numbers.
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
    """How weights are stored: one of NAMES, with a scale per `group_size` inputs of an output, or
    with 0 per output. The C++ core rounds activations to int8 in the groups of integers, as they
    come. is_stored: whether integers are a checkpoint's own, which stay what they are."""

    format: str
    group_size: int
    is_stored: bool = False

    def group_of(self, num_inputs: int) -> int:
        """Count the inputs that share a scale, filled up where the number of inputs asks for it."""
        if self.group_size:
            return self.group_size
        if num_inputs > MOST_INPUTS_OF_A_ROW and rounds_activations(self.format):
            raise ConfigError(
                f"a layer has {num_inputs:,} inputs, too many for int8 with one scale per output;"
                f" give quantization_group_size {GROUP_SIZES[-1]}."
            )
        return -(-num_inputs // ROUND_INPUTS) * ROUND_INPUTS


def packed_form(quantization: Quantization) -> Quantization:
    """Return how the core packs weights that quire rounds: of int4 in groups of 32 the scales are
    multiples of one scale for 128 inputs (ops/weights/quantise.py), so products are summed over
    those."""
    if quantization == Quantization("int4", 32):
        return Quantization("int4_multiples", MULTIPLIED_INPUTS)
    return quantization


@dataclass(frozen=True)
class Packing:
    """How a device stores the weights of linear layers.

    dtype: of the others. panel: outputs that the core's order puts side by side, 0 where it is not
    used; other_panels: of formats that another instruction set multiplies. is_reordered: whether a
    packed weight is another one than the plain, so that a tied table whose rows it cannot give is
    kept beside it. is_gpu: whether a GPU's order (gpu_layout.py) is that of quantised weights.
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
        """Count the bytes of one weight [N, K] when it is packed, or on a GPU of [E, N, K]."""
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
        """Count the bytes of a head [V, D] and the table that is tied to it: one weight for both,
        if its rows can be looked up. Those of 4 bits are too coarse, oneDNN's have none."""
        is_int4 = quantization is not None and quantization.format == "int4"
        has_rows = bool(self.panel) or self.is_gpu
        is_plain = quantization is None and not self.is_reordered
        is_shared = is_plain or (has_rows and not is_int4)
        table = shape[0] * shape[1] * self.dtype_bytes if is_tied and not is_shared else 0
        return self.weight_bytes(shape, quantization) + table


def packed_bytes(
    shape: tuple[int, ...], dtype: str, quantization: Quantization | None, panel: int
) -> int:
    """Count the bytes of a weight [N, K] in the core's order: whole panels of outputs, whole groups
    of inputs. dtype: its own, which counts if it is not quantised."""
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
    """Return the instruction sets that both the core and this CPU have, the default last, with the
    core's numbers; none without the core."""
    module = core()
    return {} if module is None else dict(module.linear_variants())


def variants() -> tuple[str, ...]:
    """List the names of `variant_numbers`."""
    return tuple(variant_numbers())


def chosen_variant(format: str) -> str:
    """Return the instruction set that multiplies weights of a format: the one that
    QUIRE_CPU_VARIANT names, else what was measured to be the fastest here. Raises ConfigError for
    one that does not run."""
    name = forced_variant()
    if name is not None:
        return name
    if len(variants()) == 1:
        return variants()[0]
    return choose_variant(measurement().speeds[SIZES[format].is_measured_as], variants())


def forced_variant() -> str | None:
    """Return what QUIRE_CPU_VARIANT names; None if it is not set. Raises ConfigError."""
    name = os.environ.get(VARIANT, "")
    if name and name not in variants():
        raise ConfigError(
            f"{VARIANT}={name} is not available here; available are {', '.join(variants())}."
        )
    return name or None


def chosen_variants(formats: Iterable[str]) -> dict[str, str]:
    """Return the instruction set of each format, by format; nothing without the core."""
    return {} if core() is None else {each: chosen_variant(each) for each in formats}


def measured_speed(format: str) -> Speed | None:
    """Return how fast one thread is with weights of a format; None if the core does not multiply
    them, or is not there."""
    if format not in SIZES or core() is None:
        return None
    return measurement().speeds[SIZES[format].is_measured_as][chosen_variant(format)]


@functools.cache
def measurement() -> Measurement:
    """Return how fast the core's instruction sets are on this machine. Measured once, about 0.1 s,
    and kept for later processes."""
    return measurement_file().load_or_measure(_measure)


def _measure() -> dict[str, dict[str, Speed]]:
    from quire.ops.weights.kernel_timing import (
        measure_kernels,  # it needs numpy, which fit does without
    )

    return measure_kernels(needed_core(), variant_numbers(), timed_formats())


def timed_formats() -> dict[str, tuple[int, int]]:
    """Return what is timed for each of FORMATS, as quire packs weights that it rounds itself: the
    core's number of a format, and inputs of its groups."""
    timed = {each: Quantization(each, 1) for each in FORMATS}
    timed |= {"int8": Quantization("int8", 128), "int4": packed_form(Quantization("int4", 32))}
    return {name: (NAMES.index(each.format), each.group_size) for name, each in timed.items()}


def measurement_file() -> KernelFile:
    """Return where the measurement of this machine is kept."""
    module = core()
    path = Path("" if module is None else module.__file__)
    return kernel_file(path, dict.fromkeys(FORMATS, variants()))


def panel_of(variant: str) -> int:
    """Count the outputs per panel of an instruction set, from the bytes of one weight."""
    core = needed_core()
    one_float32 = WeightLayout(NAMES.index("float32"), variant_numbers()[variant], 1, 1, 1)
    return core.linear_bytes(one_float32.at(0, core)) // DTYPE_BYTES["float32"]


def rounds_activations(format: str) -> bool:
    """Tell whether products with a format round activations to int8."""
    return format not in (*CORE_DTYPES, "fp8")


def core_packing(dtype: str) -> Packing | None:
    """Return the core's packing on this CPU; None if it does not multiply this dtype, or is not
    there."""
    if dtype not in CORE_DTYPES or core() is None:
        return None
    panel = panel_of(chosen_variant(dtype))
    panels = ((each, panel_of(chosen_variant(each))) for each in NAMES if each not in CORE_DTYPES)
    others = tuple((each, other) for each, other in panels if other != panel)
    return Packing(dtype, panel, is_reordered=True, other_panels=others)


def check_quantization(dtype: str, device: str) -> None:
    """Raise ConfigError, saying what to do, where quantised weights cannot be multiplied.
    device: its type."""
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
