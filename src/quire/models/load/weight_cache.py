"""Cache packed weights of the CPU core in files (cache_files.py) that the next start maps.

    index: {key, weights: [{names, offset, nbytes, shape, dtype | numbers}]}
    data: each weight at a multiple of 64

A file's name is a digest of all inputs: the checkpoint's files, the model's config, the formats,
their instruction sets and this code's version. A file holds all weights of a model, so the
checkpoint is not read. All processes that use the file share one copy. A damaged file is ignored
and written again. Errors of the cache are logged, and never prevent loading.
"""

import hashlib
import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quire.models.load.assembly import all_weights
from quire.models.load.cache_files import (
    UNUSABLE,
    WEIGHTS,
    Bytes,
    Contents,
    WeightCache,
    file_identity,
    in_use,
    read_contents,
    write_contents,
)
from quire.models.parts.layers import Layer
from quire.ops.host.native import INTERFACE_VERSION
from quire.ops.host.pages import ALIGNMENT, aligned
from quire.ops.weights.opaque import OpaqueWeight
from quire.ops.weights.pack import packed_view
from quire.ops.weights.packed import PackedParts, PackedWeight
from quire.ops.weights.packed_heads import PackedHeads, heads_view

logger = logging.getLogger("quire")

VERSION = 4  # raised when the layout of a file or of a packed weight changes


def entry_of(
    cache: WeightCache,
    model: nn.Module,
    num_bytes: int,
    files: list[Path],
    seed: int,
    made_with: object,
) -> "Entry | None":
    """Return the cache entry of this empty model's weights; None if they are not to be cached.

    num_bytes: size of all packed weights. files: the checkpoint's files; empty for random weights
    of this seed. made_with: other inputs of the weights, whose repr enters the key.
    """
    if num_bytes < cache.min_bytes or not (files or cache.caches_dummies):
        return None
    facts = [
        VERSION,
        INTERFACE_VERSION,
        repr(made_with),
        [[name, type(module).__name__] for name, module, _ in all_weights(model)],
        [repr(source) for source in _sources(model)],
    ]
    try:
        origin: list[Any] = [file_identity(file) for file in files] or ["by name", seed]
    except OSError as error:
        logger.warning("the weight cache is not used: %s", error)
        return None
    key = hashlib.sha256(json.dumps([*facts, origin]).encode()).hexdigest()[:40]
    return Entry(cache.directory, key)


def _sources(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yield the facts of each source that the key depends on, in order."""
    for prefix, layer in model.named_modules():
        for source in layer.sources() if isinstance(layer, Layer) else ():
            order = None if source.order is None else source.order.tolist()
            yield prefix, source.name, source.checkpoint_shape, source.transposed, source.repeated
            yield source.part, source.offset, source.is_logarithm, order
            yield source.rows, source.columns, source.is_elsewhere


@dataclass(frozen=True)
class Entry:
    """The cached weights of one model. key: digest of everything that they depend on."""

    directory: Path
    key: str

    @property
    def path(self) -> Path:
        return self.directory / f"{self.key}{WEIGHTS}"

    def restore(self, model: nn.Module) -> bool:
        """Give an empty model its weights, mapped read-only. Return False, with the model
        unchanged, if the file is missing or invalid."""
        try:
            with in_use(self.path) as file:
                weights = _read(read_contents(file, self.key), model)
        except FileNotFoundError:
            return False
        except UNUSABLE as error:
            logger.warning("%s is not used: %s; the weights are packed again", self.path, error)
            return False
        for (_, module, name), weight in zip(list(all_weights(model)), weights, strict=True):
            delattr(module, name)
            setattr(module, name, weight)
        logger.info("weights: mapped from %s", self.path)
        return True

    def store(self, model: nn.Module) -> bool:
        """Write a packed model's weights if there is room, and return whether the file exists."""
        index, pieces = indexed(model)
        placed_pieces = zip((each["offset"] for each in index), pieces, strict=True)
        contents = {"key": self.key, "weights": index}
        return write_contents(self.path, contents, list(placed_pieces), "weights")


def indexed(model: nn.Module) -> tuple[list[dict[str, Any]], list[Bytes]]:
    """Return the index and the bytes of each weight, as `store` writes them. A weight that several
    modules share appears once."""
    found: dict[int, dict[str, Any]] = {}
    pieces, offset = list[Bytes](), 0
    for full_name, module, name in all_weights(model):
        weight = getattr(module, name)
        if id(weight) in found:
            found[id(weight)]["names"].append(full_name)
            continue
        entry: dict[str, Any] = {"names": [full_name], "offset": offset}
        if isinstance(weight, PackedWeight | PackedParts):
            piece = weight.data
            entry |= {"numbers": [part.layout for part in weight.parts]}
        elif isinstance(weight, PackedHeads):
            piece = weight.data
            entry |= {"heads": weight.layout}
        else:
            piece = weight.detach().contiguous().view(-1).view(torch.uint8)
            entry |= {"dtype": str(weight.dtype).removeprefix("torch.")}
        entry |= {"shape": list(weight.shape), "nbytes": piece.nbytes}
        found[id(weight)] = entry
        pieces.append(piece.numpy())
        offset = aligned(offset + piece.nbytes)
    return list(found.values()), pieces


def _read(contents: Contents, model: nn.Module) -> list[nn.Parameter | OpaqueWeight]:
    """Return the weights in the order of all_weights. Raises one of UNUSABLE for a file that
    `store` did not write for this model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the read-only mapping
        data = torch.frombuffer(contents.mapped, dtype=torch.uint8)[contents.start :]
    by_name: dict[str, nn.Parameter | OpaqueWeight] = {}
    shapes = {name: getattr(module, own).shape for name, module, own in all_weights(model)}
    for entry in contents.index["weights"]:
        expected_shape = shapes[entry["names"][0]]
        if any(shapes[name] != expected_shape for name in entry["names"]):
            raise ValueError(f"{entry['names']} have several shapes")
        by_name |= dict.fromkeys(entry["names"], _weight(entry, expected_shape, data))
    if by_name.keys() != shapes.keys():
        raise ValueError("it holds the weights of another model")
    return [by_name[name] for name in shapes]


def _weight(
    entry: dict[str, Any], shape: torch.Size, data: torch.Tensor
) -> nn.Parameter | OpaqueWeight:
    begin, num_bytes = entry["offset"], entry["nbytes"]
    if not 0 <= begin <= begin + num_bytes <= len(data) or begin % ALIGNMENT:
        raise ValueError(f"{entry['names']} lie outside of it")
    piece = data[begin : begin + num_bytes]
    if "heads" in entry:
        heads = heads_view(piece, entry["heads"])
        if sorted(heads.shape) != sorted(shape):  # turned, or as in the checkpoint
            raise ValueError(f"{entry['names']} have another shape")
        return heads
    if "numbers" in entry:
        packed = packed_view(piece, entry["numbers"])
        if packed.shape != tuple(shape):
            raise ValueError(f"{entry['names']} have another shape")
        return packed
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype) or num_bytes != shape.numel() * dtype.itemsize:
        raise ValueError(f"{entry['names']} have another size")
    return nn.Parameter(piece.view(dtype).view(shape), requires_grad=False)
