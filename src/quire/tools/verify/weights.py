"""The tensors of a checkpoint, made of a loaded model again: what transformers' class is given
where it cannot read the files itself."""

from collections.abc import Iterator

import torch
from torch import nn

from quire.models.layers import Layer, Source, set_weight
from quire.ops.opaque import OpaqueWeight


def checkpoint_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that would fill a model whose weights are plain, by name."""
    found: dict[str, torch.Tensor] = {}
    for source in _sources(model):
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
    """Undo `Source.fill`."""
    values = source.destination.detach().cpu() - source.offset
    if source.repeated:
        values = values[0]
    if source.order is not None:
        values = torch.empty_like(values).index_copy_(0, source.order.cpu(), values)
    if source.transposed:
        values = values.transpose(-2, -1)
    return values.reshape(source.stored_shape).contiguous()


def take_dequantised(plain: nn.Module, packed: nn.Module) -> None:
    """Give a model of float32 the numbers that another one of the same config has packed."""
    others = dict(packed.named_modules())
    for name, module in plain.named_modules():
        weight = vars(others[name]).get("weight")
        if isinstance(module, Layer) and isinstance(weight, OpaqueWeight):
            set_weight(module, weight.rows(torch.arange(weight.shape[0]), torch.float32))
