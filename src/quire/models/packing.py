"""Puts loaded linear layers in the order that the device multiplies fastest with, quantised if that
is asked for; and says what all of a model takes, before and after.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from quire.base.config import ModelConfig
from quire.base.errors import ConfigError
from quire.models.layers import Embedding, Linear, LMHead, set_weight
from quire.ops.linear import can_pack, check_quantization, packed_weight_bytes
from quire.ops.memory import HugeMemory
from quire.ops.packed import (
    GROUP_SIZES,
    PackedWeight,
    Quantization,
    can_pack_natively,
    pack_blocks,
)

# Scales of int4 are few enough at 32; those of int8 cost less than 2 % at 128.
DEFAULT_GROUP = {"int8": 128, "int4": 32}


@dataclass(frozen=True)
class WeightFormats:
    """How the layers' weights are stored, and the head's; None is the model's dtype, or with
    as_stored what a GGUF file holds, where the core multiplies that."""

    layers: Quantization | None = None
    head: Quantization | None = None
    as_stored: bool = True

    def check(self, dtype: torch.dtype, device: torch.device) -> None:
        """Raise ConfigError, saying what to do, where they cannot be used."""
        if self.layers is not None or self.head is not None:
            check_quantization(dtype, device)


AS_THEY_ARE = WeightFormats()
IN_THE_DTYPE = WeightFormats(as_stored=False)


@dataclass(frozen=True)
class StoredFormat:
    """What a layer of a quantised file is packed as. as_blocks: its weight comes as ggml's blocks
    (`packed.pack_blocks`), which hold the same integers; otherwise it comes as numbers."""

    quantization: Quantization
    as_blocks: bool


Stored = Mapping[nn.Module, StoredFormat]


def weight_formats(config: ModelConfig) -> WeightFormats:
    """What the settings ask for. Raises ConfigError for a group size that there is not."""
    if config.quantization is None:
        return AS_THEY_ARE
    if config.quantization == "none":
        return IN_THE_DTYPE
    layers = _quantization(config.quantization, config.quantization_group_size)
    if config.quantized_head == "none":
        return WeightFormats(layers, None)
    head = "int8" if config.quantized_head == "auto" else config.quantized_head
    if head == config.quantization:
        return WeightFormats(layers, layers)
    return WeightFormats(layers, _quantization(head, None))


def _quantization(name: str, group_size: int | None) -> Quantization:
    size = DEFAULT_GROUP[name] if group_size is None else group_size
    sizes = (0, *GROUP_SIZES) if name == "int8" else GROUP_SIZES
    if size not in sizes:
        known = ", ".join(map(str, sizes))
        raise ConfigError(f"quantization_group_size must be one of {known} for {name}, got {size}.")
    return Quantization(name, size)


def pack_modules(
    modules: Iterable[nn.Module],
    formats: WeightFormats,
    memory: HugeMemory | None = None,
    stored: Stored = MappingProxyType({}),
) -> None:
    """Pack the linear layers and heads among them; the table of an embedding that is tied to a head
    is then looked up in the head's, if it can be. memory: where packed weights are put.

    Layers that share a parameter must come together.
    """
    modules = list(modules)
    for head, tables in _tied(modules):
        _pack(head, formats.head, memory, stored)
        for table in tables:
            table.share(head.weight)
    for module in modules:
        if isinstance(module, Linear):
            _pack(module, formats.layers, memory, stored)


def _pack(
    layer: Linear | LMHead, format: Quantization | None, memory: HugeMemory | None, stored: Stored
) -> None:
    found = stored.get(layer)
    if found is not None and found.as_blocks:
        set_weight(layer, pack_blocks(layer.weight, found.quantization, memory))
    else:
        layer.pack(_format_of(layer, format, stored), memory)


def _format_of(
    layer: nn.Module, format: Quantization | None, stored: Stored
) -> Quantization | None:
    return stored[layer].quantization if layer in stored else format


def _tied(modules: Iterable[nn.Module]) -> list[tuple[LMHead, list[Embedding]]]:
    """Each head with the embeddings whose table it shares."""
    modules = list(modules)
    tables = [module for module in modules if isinstance(module, Embedding)]
    heads = [module for module in modules if isinstance(module, LMHead)]
    return [(head, [t for t in tables if t.weight is head.weight]) for head in heads]


def model_bytes(model: nn.Module) -> int:
    """Bytes of all weights as they are; a shared one counts once."""
    return sum({id(weight): _bytes(weight) for weight in _weights(model)}.values())


def _weights(model: nn.Module) -> Iterator[torch.Tensor | PackedWeight]:
    yield from model.parameters()
    for module in model.modules():
        weight = vars(module).get("weight")
        if isinstance(weight, PackedWeight):
            yield weight


def planned_bytes(
    model: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    formats: WeightFormats = AS_THEY_ARE,
    stored: Stored = MappingProxyType({}),
) -> int:
    """What model_bytes will be once this model, which may be without memory, is packed."""
    total = model_bytes(model)
    for module in model.modules():
        if isinstance(module, Linear):
            format = _format_of(module, formats.layers, stored)
            total += _growth(module.weight, dtype, device, format)
    for head, tables in _tied(model.modules()):
        format = _format_of(head, formats.head, stored)
        total += _growth(head.weight, dtype, device, format)
        can_share = can_pack_natively(dtype, device) and not _is_int4(format)
        if tables and can_pack(dtype, device) and not can_share:
            total += _bytes(head.weight)
    return total


def _growth(
    weight: torch.Tensor, dtype: torch.dtype, device: torch.device, format: Quantization | None
) -> int:
    """What packing adds to a weight's bytes."""
    return packed_weight_bytes(tuple(weight.shape), dtype, device, format) - _bytes(weight)


def _is_int4(quantization: Quantization | None) -> bool:
    return quantization is not None and quantization.format == "int4"


def _bytes(weight: torch.Tensor | PackedWeight) -> int:
    """Also of oneDNN's tensors, which do not tell."""
    if isinstance(weight, PackedWeight):
        return weight.nbytes
    return weight.numel() * weight.itemsize
