"""Check the tensors of weight files against a model that has no memory yet.

Only headers are read, except for a tied head that is stored in addition to its embedding. A
checkpoint that contradicts itself or the config is rejected before any memory is allocated.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from quire.base.errors import ModelError
from quire.models.checkpoint.files import TensorHeader, TensorLocations, listed
from quire.models.checkpoint.sources import Source
from quire.models.load.packing import Stored
from quire.models.load.patches import hidden_names
from quire.models.model import Model
from quire.models.parts.layers import Embedding, Layer
from quire.models.quantised.layers import PLAIN, QuantisedLayer
from quire.ops.host.host_memory import forget_pages
from quire.spec.cuts import Cut

COMPARED_ROWS = 1024
INTEGERS = ("I64", "I32")
# Suffixes of tensor names that only quantised weights have.
QUANTISED_ENDS = (
    ".qweight", ".qzeros", ".weight_packed", ".weight_scale", ".weight_scale_inv", "_blocks",
    ".absmax", ".quant_map",
)  # fmt: skip


class Contents:
    """The tensors of a checkpoint, by their names in a model. headers: shape and dtype by the name
    of a source, or by the name that extends the module of a source (quantised tensors)."""

    def __init__(self, files: Iterable[Path], model: Model, patch: Path | None = None) -> None:
        """Read the headers of the files. patch: see LoadOptions. Raises ModelError for an
        unreadable file, and for a tensor that two files hold, or one file under two names."""
        hidden = hidden_names(patch)
        self._model = model
        self._expected = {source.name: source for source in _sources(model)}
        modules = {name.rpartition(".")[0] for name in self._expected}
        self._locations = TensorLocations()
        self.headers: dict[str, TensorHeader] = {}
        for file in files:
            for name, header in _headers(file):
                if file != patch and name in hidden:
                    continue
                names = model.names_of(name)
                known = [each for each in names if each.rpartition(".")[0] in modules]
                full = next((each for each in names if each in self._expected), (*known, *names)[0])
                self._locations.add(full, file, name)
                self.headers[full] = header

    def check(self, stored: Stored = MappingProxyType({})) -> None:
        """Raise ModelError for missing and unknown tensors, and for shapes or dtypes that the model
        does not have. Also raise it if a stored head differs from its tied embedding."""
        parts = [
            (name, part)
            for found in stored.values()
            if isinstance(found, QuantisedLayer)
            for name, part in found.parts.items()
        ]
        quantised = {name for name, _ in parts}
        missing = self._expected.keys() - self.headers.keys() - quantised
        known = {each for _, p in parts for each in (*p.tensors.values(), *p.unused, *p.zeros)}
        known |= self._expected.keys()
        unknown = [
            self._locations[name][1]
            for name in self.headers.keys() - known
            if not self._model.ignores(self._locations[name][1])
        ]
        for name, header in self.headers.items():
            if name in self._expected and name not in quantised:
                _check(self._locations[name][1], header, self._expected[name])
        check_complete(sorted(missing), sorted(unknown))
        tied, head = _tied_table(self._model), self._model.head_tensor
        if tied in self._locations and head in self._locations:
            _check_tied(self._locations[head], self._locations[tied], self._expected[tied].rows)


def tensor_names(files: Iterable[Path]) -> Iterator[str]:
    """Yield the names of all tensors of the files."""
    for file in files:
        yield from (name for name, _ in _headers(file))


def check_complete(missing: list[str], unknown: list[str]) -> None:
    """Raise ModelError if a tensor is missing or unknown."""
    problems = []
    if missing:
        problems.append(f"lack {listed(missing)}")
    if unknown:
        problems.append(f"hold unknown tensors ({listed(unknown)})")
    if not problems:
        return
    advice = (
        "check that both are of the same model and that its download is complete"
        if not any(name.endswith(QUANTISED_ENDS) for name in unknown)
        else "these weights are quantised, but quantization_config does not list them"
    )
    raise ModelError(
        f"the weight files {' and '.join(problems)}. They do not match the model's config:"
        f" {advice}."
    )


def _headers(file: Path) -> Iterator[tuple[str, TensorHeader]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                found = opened.get_slice(name)
                yield name, TensorHeader(tuple(found.get_shape()), found.get_dtype())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}. Download it again.") from error


def _sources(model: nn.Module) -> Iterator[Source]:
    for layer in model.modules():
        if isinstance(layer, Layer):
            yield from layer.sources()


def _check(name: str, header: TensorHeader, source: Source) -> None:
    if header.dtype not in (PLAIN if source.destination.is_floating_point() else INTEGERS):
        raise ModelError(
            f"the tensor {name} holds {header.dtype}, not floating-point numbers of 16 bits or"
            " more, and quantization_config does not describe it. Use the unquantised checkpoint,"
            " or a GGUF file."
        )
    if not source.fits(header.shape):
        raise ModelError(
            f"the tensor {name} has the shape {list(header.shape)}, but config.json requires"
            f" {list(source.checkpoint_shape)}: the config and the weights belong to different"
            " models."
        )


def _tied_table(model: Model) -> str:
    """Return the tensor name of the embedding that the head is tied to; empty without one."""
    head = model.head
    for layer in model.modules():
        if isinstance(layer, Embedding) and head is not None and layer.weight is head.weight:
            return layer.sources()[0].name
    return ""


def _check_tied(head: tuple[Path, str], table: tuple[Path, str], rows: Cut | None) -> None:
    """Raise ModelError if a stored head differs from its table. rows: rows to compare; None for
    all."""
    (head_file, head_name), (table_file, table_name) = head, table
    with safe_open(head_file, "pt") as one, safe_open(table_file, "pt") as other:
        ours, theirs = one.get_tensor(head_name), other.get_tensor(table_name)
    first = 0 if rows is None else rows.first
    own = slice(None) if rows is None else slice(first, first + rows.count)
    row = 0 if ours.shape != theirs.shape else _first_difference(ours[own], theirs[own])
    forget_pages(ours)
    forget_pages(theirs)
    if row is not None:
        raise ModelError(
            f"config.json ties the head to the embedding (tie_word_embeddings), but {head_name} is"
            f" stored and differs from {table_name}, first in row {first + row}. Set"
            " tie_word_embeddings to false to use the stored head, or remove the stored head."
        )


def _first_difference(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """Return the first row of [V, D] that differs in float32; None if all are equal."""
    for first in range(0, len(one), COMPARED_ROWS):
        rows = slice(first, first + COMPARED_ROWS)
        differs = (one[rows].float() != other[rows].float()).any(dim=1)
        if differs.any():
            return first + int(differs.nonzero()[0])
    return None
