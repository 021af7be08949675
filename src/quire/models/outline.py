"""Which parameters a model has and which tensors fill them, without any memory for them.

Made of the layers themselves, with parameters that have no memory. `quire fit` plans by it.
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
from quire.models.parts.layers import Embedding, Layer, Linear, LMHead
from quire.models.vision.place import encoder_size
from quire.ops.weights.formats import SIZES, Packing, Quantization
from quire.spec.cuts import Cut
from quire.spec.media_families import EncoderSize
from quire.spec.model_spec import ModelSpec

PLAIN, LINEAR, ROUTER, HEAD = "plain", "linear", "router", "head"
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A parameter.

    kind: LINEAR, ROUTER and HEAD are packed, with shape [outputs, inputs], routers never quantised;
    PLAIN stays as it is. tensors: those of a checkpoint that fill it, with their shapes there.
    num_bytes: as it is, not packed. is_tied: the embedding's table is the same parameter, and its
    tensor fills it. outputs: how many each of the tensors fills here. columns: the inputs that a
    rank has, if not all.
    """

    kind: str
    shape: Shape
    tensors: Mapping[str, Shape] = field(hash=False)
    num_bytes: int
    is_tied: bool = False
    outputs: Mapping[str, int] = field(default_factory=dict, hash=False)
    columns: Cut | None = None


@dataclass(frozen=True)
class FormatBytes:
    """What parts that are stored alike take together. name: such as `int4 in groups of 32`."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Outline:
    """All parameters of a model, shared ones once, each expert's its own. names_of, ignores: as
    models.model.Model has them. encoder: of its vision tower; None without one."""

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
    """Make a model's outline, or that of a rank's part. dtype: its weights'. stored_names: tensors
    of the weight files, if they are known. Raises ModelError for an unknown model_type, and
    ConfigError for what ranks cannot share."""
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
            yield _part(_kind(layer, name), parameter, own)


def _fills(destination: torch.Tensor, parameter: nn.Parameter) -> bool:
    """Tell whether a destination is a part of the parameter (which has no memory to compare)."""
    return destination is parameter or destination._base is parameter


def _kind(layer: Layer, name: str) -> str:
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
    """Count the bytes of the packed parts, by format, the largest first. stored: of parts,
    by index, whose weights are quantised in a GGUF file."""
    sizes: dict[str, int] = {}
    for index, part in enumerate(parts):
        if part.kind == PLAIN:
            sizes[packing.dtype] = sizes.get(packing.dtype, 0) + part.num_bytes
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
    """Count the bytes of a part that is packed."""
    if part.kind == HEAD:
        return packing.head_bytes(part.shape, format, part.is_tied)
    return packing.weight_bytes(part.shape, format)


def format_name(format: Quantization | None, dtype: str) -> str:
    """Name a format for people, who need not know which float type its scales are."""
    if format is None:
        return dtype
    name = format.format.replace("_f16", "").replace("_f32", "").replace("_zeros", " with zeros")
    if SIZES[format.format].group:
        return name
    if not format.group_size:
        return f"{name} with a scale per output"
    return f"{name} in groups of {format.group_size}"
