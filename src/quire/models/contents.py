"""What weight files hold, held against a model that has no memory yet.

Only headers are read, but for a tied head that is stored beside its embedding. A checkpoint that
contradicts itself or the config is refused before anything is allocated or filled.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from quire.base.errors import ModelError
from quire.models.checkpoint import TensorPlaces
from quire.models.layers import Embedding, Layer, Source
from quire.models.model import HEAD, Model
from quire.ops.host_memory import forget_pages

COMPARED_ROWS = 1024


def check_contents(files: Iterable[Path], model: Model) -> None:
    """Raise ModelError for a tensor that stands in two files, or under two names in one, for one of
    another shape or kind than the model's, and for a head that is not what it is tied to."""
    wanted = {source.name: source for source in _sources(model)}
    places = TensorPlaces()
    for file in files:
        for name, shape, dtype in _headers(file):
            names = model.names_of(name)
            full = next((each for each in names if each in wanted), names[0])
            places.add(full, file, name)
            if full in wanted:
                _check(name, shape, dtype, wanted[full])
    tied = _tied_table(model)
    if tied in places and HEAD in places:
        _check_tied(places[HEAD], places[tied])


def tensor_names(files: Iterable[Path]) -> Iterator[str]:
    """Yield the names of all tensors of the files."""
    for file in files:
        yield from (name for name, _, _ in _headers(file))


def _headers(file: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, dtype as the file has it) of each tensor."""
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                found = opened.get_slice(name)
                yield name, tuple(found.get_shape()), found.get_dtype()
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}. Download it again.") from error


def _sources(model: nn.Module) -> Iterator[Source]:
    for layer in model.modules():
        if isinstance(layer, Layer):
            yield from layer.sources()


def _check(name: str, shape: tuple[int, ...], dtype: str, source: Source) -> None:
    if shape != source.checkpoint_shape:
        raise ModelError(
            f"the tensor {name} has the shape {list(shape)}, but config.json asks for"
            f" {list(source.checkpoint_shape)}: the config and the weights are not of one model."
        )
    if not dtype.startswith(("F", "BF")):
        raise ModelError(
            f"the tensor {name} holds {dtype}, not floating-point numbers: quantised weights are"
            " not supported; take the checkpoint that was not quantised, or a GGUF file."
        )


def _tied_table(model: Model) -> str:
    """The name of the embedding's table where the head is tied to it, or nothing."""
    for layer in model.modules():
        if isinstance(layer, Embedding) and layer.weight is model.head.weight:
            return layer.sources()[0].name
    return ""


def _check_tied(head: tuple[Path, str], table: tuple[Path, str]) -> None:
    (head_file, head_name), (table_file, table_name) = head, table
    with safe_open(head_file, "pt") as one, safe_open(table_file, "pt") as other:
        ours, theirs = one.get_tensor(head_name), other.get_tensor(table_name)
    row = _first_difference(ours, theirs)
    forget_pages(ours)
    forget_pages(theirs)
    if row is not None:
        raise ModelError(
            f"config.json ties the head to the embedding (tie_word_embeddings), but {head_name} is"
            f" stored and differs from {table_name}, first in row {row}: set tie_word_embeddings to"
            " false if the stored head counts, or remove it."
        )


def _first_difference(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """The first row that differs, in float32; None if all are the same."""
    if one.shape != other.shape:
        return 0
    for first in range(0, len(one), COMPARED_ROWS):
        rows = slice(first, first + COMPARED_ROWS)
        differs = (one[rows].float() != other[rows].float()).any(dim=1)
        if differs.any():
            return first + int(differs.nonzero()[0])
    return None
