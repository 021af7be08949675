"""Pack loaded linear layers in the layout that the device multiplies fastest, quantised if
requested. Also count the bytes of a model's weights, and predict the count after packing.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import nn

from quire.models.checkpoint.formats import AS_THEY_ARE, StoredFormat, WeightFormats
from quire.models.parts.experts import StackedExperts
from quire.models.parts.head_linear import HeadLinear
from quire.models.parts.layers import Embedding, Linear, LMHead, set_weight
from quire.models.quantised.layers import QuantisedLayer
from quire.ops.host.host_memory import HugeMemory
from quire.ops.weights.device_weights import packing
from quire.ops.weights.formats import Quantization
from quire.ops.weights.opaque import OpaqueWeight
from quire.ops.weights.pack import pack_blocks

# Layers whose weights a GGUF file or another checkpoint holds quantised.
Stored = Mapping[nn.Module, StoredFormat | QuantisedLayer]


def pack_modules(
    modules: Iterable[nn.Module],
    formats: WeightFormats,
    memory: HugeMemory | None = None,
    stored: Stored = MappingProxyType({}),
) -> None:
    """Pack the linear layers, heads and stacked experts among the modules. A tied embedding then
    reads the head's packed weight, if that supports look-ups.

    memory: memory for packed weights. Pass modules that share a parameter together.
    """
    modules = list(modules)
    for head, tables in _tied(modules):
        _pack(head, formats.head, memory, stored)
        for table in tables:
            table.share(head.weight)
    for module in modules:
        if isinstance(module, Linear):
            _pack(module, format_of(module, formats), memory, stored)
        elif isinstance(module, StackedExperts):
            module.pack(formats.layers)
        elif isinstance(module, HeadLinear):
            module.pack()


def _pack(
    layer: Linear | LMHead, format: Quantization | None, memory: HugeMemory | None, stored: Stored
) -> None:
    found = stored.get(layer)
    if isinstance(found, StoredFormat) and found.as_blocks:
        set_weight(layer, pack_blocks(layer.weight, found.stretches, memory))
    else:
        layer.pack(_stretches(layer, format, stored)[0][1], memory)


def _stretches(
    layer: Linear | LMHead, format: Quantization | None, stored: Stored, *, is_gpu: bool = False
) -> tuple[tuple[int, Quantization | None], ...]:
    """Return (number of outputs, packed format) for each range of a layer's outputs, in order."""
    found = stored.get(layer)
    if isinstance(found, StoredFormat):
        return found.stretches
    if found is not None and found.stays_quantised:
        return found.stretches(is_gpu=is_gpu)
    return ((layer.weight.shape[0], format),)


def format_of(layer: Linear | LMHead, formats: WeightFormats) -> Quantization | None:
    """Return the packed format that the settings request for a layer's plain weight."""
    if isinstance(layer, LMHead):
        return formats.head
    return None if layer.keeps_dtype else formats.layers


def _tied(modules: Iterable[nn.Module]) -> list[tuple[LMHead, list[Embedding]]]:
    """Return each head with the embeddings whose table it shares."""
    modules = list(modules)
    tables = [module for module in modules if isinstance(module, Embedding)]
    heads = [module for module in modules if isinstance(module, LMHead)]
    return [(head, [t for t in tables if t.weight is head.weight]) for head in heads]


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of all weights in their current form; a shared weight counts once."""
    return sum({id(weight): _bytes(weight) for weight in _weights(model)}.values())


def _weights(model: nn.Module) -> Iterator[torch.Tensor | OpaqueWeight]:
    yield from model.parameters()
    for module in model.modules():
        yield from (each for each in vars(module).values() if isinstance(each, OpaqueWeight))


def planned_bytes(
    model: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    formats: WeightFormats = AS_THEY_ARE,
    stored: Stored = MappingProxyType({}),
) -> int:
    """Predict model_bytes of this model after packing. The model may still be without memory."""
    device_packing = packing(dtype, device)
    packed = [m for m in model.modules() if isinstance(m, Linear | LMHead)]
    heads = [module for module in model.modules() if isinstance(module, HeadLinear)]
    experts = _stacked_experts(model) if device_packing.is_gpu else []
    owned = {id(weight) for weight in (*(each.weight for each in (*packed, *heads)), *experts)}
    plain = {id(w): _bytes(w) for w in _weights(model) if id(w) not in owned}
    total = sum(plain.values())
    total += sum(
        device_packing.weight_bytes(tuple(weight.shape), formats.layers) for weight in experts
    )
    total += sum(
        each.shape[0] * device_packing.weight_bytes(each.shape[1:], None) for each in heads
    )
    for module in packed:
        if isinstance(module, Linear):
            format = format_of(module, formats)
            for outputs, each in _stretches(module, format, stored, is_gpu=device_packing.is_gpu):
                total += device_packing.weight_bytes((outputs, module.weight.shape[1]), each)
    for head, tables in _tied(model.modules()):
        ((_, format),) = _stretches(head, formats.head, stored, is_gpu=device_packing.is_gpu)
        total += device_packing.head_bytes(tuple(head.weight.shape), format, is_tied=bool(tables))
    return total


def _stacked_experts(model: nn.Module) -> list[torch.Tensor]:
    """Return all joint weights of experts, [E, N, K] each."""
    stacks = (module for module in model.modules() if isinstance(module, StackedExperts))
    return [weight for stack in stacks for weight in (stack.gate_up, stack.down)]


def _bytes(weight: torch.Tensor | OpaqueWeight) -> int:
    """Count the bytes of a weight. oneDNN's tensors do not report theirs."""
    if isinstance(weight, OpaqueWeight):
        return weight.nbytes
    return weight.numel() * weight.itemsize
