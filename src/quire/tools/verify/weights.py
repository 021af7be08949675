"""Rebuild a checkpoint's tensors from a loaded model, for transformers' class if it cannot read the
files itself."""

from collections.abc import Iterator

import torch
from torch import nn

from quire.base.errors import ConfigError
from quire.models.checkpoint.sources import Source
from quire.models.parts.experts import ExpertLinear
from quire.models.parts.layers import Layer, set_weight
from quire.ops.linear import linear
from quire.ops.weights.gpu_weights import GPUWeight
from quire.ops.weights.opaque import OpaqueWeight
from quire.ops.weights.packed import PackedParts, PackedWeight
from quire.ops.weights.packed_heads import PackedHeads

AT_ONCE = 1024  # inputs per product
LARGEST_INT8 = 127.0


def checkpoint_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a plain checkpoint for the model, by its family's names."""
    found: dict[str, torch.Tensor] = {}
    for layer in model.modules():
        if isinstance(layer, ExpertLinear):
            layer.is_part = layer.is_usually_part
    for source in _sources(model):
        if source.order is not None and len(source.order) < source.stored_shape[0]:
            whole = found.setdefault(source.name, torch.zeros(source.stored_shape))
            values = source.destination.detach().cpu()
            found[source.name] = whole.to(values.dtype).index_copy_(0, source.order.cpu(), values)
            continue
        values = _as_stored(source)
        if source.part is None:
            found[source.name] = values
            continue
        part = source.part
        if source.name not in found:
            found[source.name] = torch.zeros(part.whole, dtype=values.dtype)
        place = found[source.name].narrow(part.dimension, part.first, part.count)
        place.copy_(values.reshape(place.shape))
    return found


def _sources(model: nn.Module) -> Iterator[Source]:
    for layer in model.modules():
        if isinstance(layer, Layer):
            yield from layer.sources()


def _as_stored(source: Source) -> torch.Tensor:
    """Return the tensor in its stored form: the inverse of `Source.fill`."""
    values = source.destination.detach().cpu()
    values = values.log() if source.is_logarithm else values - source.offset
    if source.repeated:
        values = values[0]
    if source.order is not None:
        values = torch.empty_like(values).index_copy_(0, source.order.cpu(), values)
    if source.transposed:
        values = values.transpose(-2, -1)
    return values.reshape(source.stored_shape).contiguous()


def take_dequantised(plain: nn.Module, packed: nn.Module) -> None:
    """Copy dequantized weights of a packed model, or its own, into a float32 model.

    Raises ConfigError for experts that are packed for a GPU."""
    others, device = dict(packed.named_modules()), next(plain.parameters()).device
    for name, module in plain.named_modules():
        for field, weight in list(vars(others[name]).items()):
            if not isinstance(weight, OpaqueWeight) or isinstance(weight, PackedHeads):
                continue  # weights of heads are never quantized
            if field != "weight" or not isinstance(module, Layer):
                raise ConfigError(
                    "expert weights packed for a GPU cannot be compared yet; use device=cpu."
                )
            set_weight(module, _dequantised(weight, device))


def _dequantised(weight: OpaqueWeight, device: torch.device) -> torch.Tensor:
    """Return a packed weight [N, K] in float32: its products with scaled unit vectors.

    The scale is the largest int8, so that activations' scales are 1 and nothing is rounded."""
    assert isinstance(weight, PackedWeight | PackedParts | GPUWeight)
    units_KK = torch.eye(weight.shape[1], device=device) * LARGEST_INT8
    products = [linear(units, weight).T for units in units_KK.split(AT_ONCE)]
    return torch.cat(products, 1) / LARGEST_INT8
