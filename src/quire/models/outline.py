"""List a model's parameters, and the tensors that fill them, without allocating weights.

The outline is read from the model's real layers, built with parameters on the meta device. `quire
fit` plans memory with it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from quire.models.checkpoint.formats import StoredFormat, WeightFormats
from quire.models.checkpoint.rank_place import WHOLE, RankPlace
from quire.models.checkpoint.sources import Source
from quire.models.load.assembly import empty_model
from quire.models.model import Model
from quire.models.parts.head_linear import HeadLinear
from quire.models.parts.layers import Embedding, Layer, Linear, LMHead
from quire.models.vision.encoder_size import encoder_size
from quire.ops.weights.formats import SIZES, Packing, Quantization
from quire.spec.cuts import Cut
from quire.spec.media_families import EncoderSize
from quire.spec.model_spec import ModelSpec

PLAIN, LINEAR, ROUTER, HEAD, HEADS = "plain", "linear", "router", "head", "heads"
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One parameter of a model. LINEAR, ROUTER and HEAD parameters have shape [outputs, inputs] and
    are packed; routers are never quantised. HEADS are packed weights of attention heads, [heads,
    outputs, inputs], never quantised. PLAIN parameters keep their dtype and layout."""

    kind: str
    shape: Shape
    tensors: Mapping[str, Shape] = field(hash=False)  # checkpoint tensors that fill it, with shapes
    num_bytes: int  # size before packing
    is_tied: bool = False  # whether the embedding shares this parameter and its tensor
    outputs: Mapping[str, int] = field(default_factory=dict, hash=False)  # outputs by tensor name
    columns: Cut | None = None  # inputs that this rank holds; None for all


@dataclass(frozen=True)
class FormatBytes:
    """The total size of all parts in one format. name: such as `int4 in groups of 32`."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Outline:
    """All parameters of a model. A shared parameter appears once; each expert has its own parts.

    names_of, ignores: methods of models.model.Model. encoder: size of the vision tower, if any.
    """

    parts: tuple[Part, ...]
    names_of: Callable[[str], tuple[str, ...]]
    ignores: Callable[[str], bool]
    encoder: EncoderSize | None = None


Stored = Mapping[int, StoredFormat]


def outline(
    spec: ModelSpec,
    dtype: str = "bfloat16",
    stored_names: Collection[str] = (),
    place: RankPlace = WHOLE,
) -> Outline:
    """Return the outline of a model, or of one rank's part of it.

    dtype: dtype of the weights. stored_names: names of the tensors in the weight files, if known.
    Raises ModelError for an unknown model_type, and ConfigError if ranks cannot share the layers.
    """
    model = empty_model(spec, getattr(torch, dtype), torch.device("cpu"), place)
    if stored_names:
        model.adopt(stored_names)
    encoder = encoder_size(model, spec, place)
    return Outline(tuple(_parts(model)), model.names_of, model.ignores, encoder)


def _parts(model: Model) -> Iterator[Part]:
    tables = {id(m.weight) for m in model.modules() if isinstance(m, Embedding)}
    head = None if model.head is None else model.head.weight
    is_tied = id(head) in tables
    for layer in model.modules():
        if not isinstance(layer, Layer):
            continue
        sources = layer.sources()
        if is_tied and isinstance(layer, Embedding) and layer.weight is head:
            yield _part(HEAD, layer.weight, sources, is_tied=True)
            continue
        for name, parameter in layer.named_parameters(recurse=False):
            if is_tied and layer is model.head:
                continue
            own = [source for source in sources if _fills(source.destination, parameter)]
            part = _part(_kind(layer, name), parameter, own)
            yield replace(part, shape=layer.shape) if isinstance(layer, HeadLinear) else part


def _fills(destination: torch.Tensor, parameter: nn.Parameter) -> bool:
    """Return whether a destination is the parameter or a view of it."""
    return destination is parameter or destination._base is parameter


def _kind(layer: Layer, name: str) -> str:
    if isinstance(layer, HeadLinear):
        return HEADS
    if name != "weight" or not isinstance(layer, Linear | LMHead):
        return PLAIN
    if isinstance(layer, LMHead):
        return HEAD
    return ROUTER if layer.keeps_dtype else LINEAR


def _part(
    kind: str, parameter: torch.Tensor, sources: Sequence[Source], is_tied: bool = False
) -> Part:
    tensors = {source.name: source.checkpoint_shape for source in sources}
    outputs = {source.name: len(source.destination) for source in sources}
    columns = next((source.columns for source in sources), None)
    shape, num_bytes = tuple(parameter.shape), parameter.nbytes
    return Part(kind, shape, tensors, num_bytes, is_tied, outputs, columns)


def planned_weights(
    parts: Sequence[Part], packing: Packing, formats: WeightFormats, stored: Stored
) -> list[FormatBytes]:
    """Return the packed size of all parts by format, largest first. stored: storage formats of the
    parts that are quantised in a GGUF file, by index."""
    sizes: dict[str, int] = {}
    for index, part in enumerate(parts):
        if part.kind == PLAIN:
            sizes[packing.dtype] = sizes.get(packing.dtype, 0) + part.num_bytes
            continue
        if part.kind == HEADS:
            each = packing.weight_bytes(part.shape[1:], None)
            sizes[packing.dtype] = sizes.get(packing.dtype, 0) + part.shape[0] * each
            continue
        format = {LINEAR: formats.layers, HEAD: formats.head}.get(part.kind)
        whole = ((part.shape[0], format),)
        for outputs, own in stored[index].stretches if index in stored else whole:
            name, stretch = format_name(own, packing.dtype), (outputs, *part.shape[1:])
            num_bytes = part_bytes(replace(part, shape=stretch), packing, own)
            sizes[name] = sizes.get(name, 0) + num_bytes
    found = [FormatBytes(name, num_bytes) for name, num_bytes in sizes.items()]
    return sorted(found, key=lambda each: -each.num_bytes)


def part_bytes(part: Part, packing: Packing, format: Quantization | None) -> int:
    """Return the packed size of a part in bytes."""
    if part.kind == HEAD:
        return packing.head_bytes(part.shape, format, part.is_tied)
    return packing.weight_bytes(part.shape, format)


def format_name(format: Quantization | None, dtype: str) -> str:
    """Return a display name of a format, without the dtype of its scales."""
    if format is None:
        return dtype
    name = format.format.replace("_f16", "").replace("_f32", "").replace("_zeros", " with zeros")
    if SIZES[format.format].group:
        return name
    if not format.group_size:
        return f"{name} with a scale per output"
    return f"{name} in groups of {format.group_size}"
