"""Storage formats of weights, as requested by the settings or found in a GGUF file. No torch."""

from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.base.settings.config import ModelConfig
from quire.ops.weights.formats import GROUP_SIZES, Quantization, check_quantization

# Groups of 32 are enough for int4. The scales of int8 cost less than 2 % in groups of 128.
DEFAULT_GROUP = {"int8": 128, "int4": 32, "fp8": 0}
SIZES = {"int8": (0, *GROUP_SIZES), "int4": GROUP_SIZES, "fp8": (0,)}


@dataclass(frozen=True)
class WeightFormats:
    """The storage formats that the settings request. None stands for the model's dtype."""

    layers: Quantization | None = None  # format of the layers' weights
    head: Quantization | None = None  # format of the head's weight
    as_stored: bool = True  # whether None keeps a GGUF file's format, if the core multiplies it

    @property
    def is_quantised(self) -> bool:
        return self.layers is not None or self.head is not None

    def check(self, dtype: str, device: str) -> None:
        """Raise ConfigError if the device cannot use the formats. device: type of the device."""
        if self.is_quantised:
            check_quantization(dtype, device)


AS_THEY_ARE = WeightFormats()
IN_THE_DTYPE = WeightFormats(as_stored=False)


@dataclass(frozen=True)
class StoredFormat:
    """The packed format of a layer from a quantised file."""

    stretches: tuple[tuple[int, Quantization], ...]  # (number of outputs, format), in output order
    as_blocks: bool  # whether the weight is packed from ggml's blocks (`packed.pack_blocks`)

    @property
    def formats(self) -> tuple[Quantization, ...]:
        return tuple(format for _, format in self.stretches)


def weight_formats(config: ModelConfig) -> WeightFormats:
    """Return the formats that the settings request. Raises ConfigError for an unknown group
    size."""
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
