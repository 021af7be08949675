"""What the settings and a GGUF file say about how weights are stored. No torch."""

from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.base.settings.config import ModelConfig
from quire.ops.weights.formats import GROUP_SIZES, Quantization, check_quantization

# Scales of int4 are few enough at 32; those of int8 cost less than 2 % at 128.
DEFAULT_GROUP = {"int8": 128, "int4": 32, "fp8": 0}
SIZES = {"int8": (0, *GROUP_SIZES), "int4": GROUP_SIZES, "fp8": (0,)}


@dataclass(frozen=True)
class WeightFormats:
    """How the layers' weights are stored, and the head's; None is the model's dtype, or with
    as_stored what a GGUF file holds, where the core multiplies that."""

    layers: Quantization | None = None
    head: Quantization | None = None
    as_stored: bool = True

    @property
    def is_quantised(self) -> bool:
        return self.layers is not None or self.head is not None

    def check(self, dtype: str, device: str) -> None:
        """Raise ConfigError, saying what to do, where they cannot be used. device: its type."""
        if self.is_quantised:
            check_quantization(dtype, device)


AS_THEY_ARE = WeightFormats()
IN_THE_DTYPE = WeightFormats(as_stored=False)


@dataclass(frozen=True)
class StoredFormat:
    """What a layer of a quantised file is packed as: how many of its outputs in which format, in
    their order. as_blocks: its weight comes as ggml's blocks (`packed.pack_blocks`), which hold the
    same numbers; otherwise it comes as numbers."""

    stretches: tuple[tuple[int, Quantization], ...]
    as_blocks: bool

    @property
    def formats(self) -> tuple[Quantization, ...]:
        return tuple(format for _, format in self.stretches)


def weight_formats(config: ModelConfig) -> WeightFormats:
    """Read what the settings ask for. Raises ConfigError for a group size that there is not."""
    if config.quantization is None:
        return AS_THEY_ARE
    if config.quantization == "none":
        return IN_THE_DTYPE
    layers = _quantization(config.quantization, config.quantization_group_size)
    if config.quantized_head == "none":
        return WeightFormats(layers, None)
    in_eight_bits = "int8" if config.quantization == "int4" else config.quantization
    head = in_eight_bits if config.quantized_head == "auto" else config.quantized_head
    if head == config.quantization:
        return WeightFormats(layers, layers)
    return WeightFormats(layers, _quantization(head, None))


def _quantization(name: str, group_size: int | None) -> Quantization:
    size = DEFAULT_GROUP[name] if group_size is None else group_size
    if size not in SIZES[name]:
        known = ", ".join(map(str, SIZES[name]))
        raise ConfigError(f"quantization_group_size must be one of {known} for {name}, got {size}.")
    return Quantization(name, size)
