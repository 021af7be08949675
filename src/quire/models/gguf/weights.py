"""Read the tensors of a GGUF file, with the names and the row order of quire's layers.

Input: an opened file. Output: a `GGUFTensor` for each tensor, or for each expert of a tensor. It
refers to blocks in the mapped file, and dequantises or copies a range of rows at a time. So a
matrix never exists twice in memory.
"""

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from quire.base.errors import ModelError
from quire.models.checkpoint.formats import StoredFormat
from quire.models.checkpoint.sources import Part, Source
from quire.models.gguf.dequantise import dequantise
from quire.models.gguf.latent_heads import KEYS, VALUES, joined_heads
from quire.models.gguf.names import is_prediction_layer, our_names
from quire.models.gguf.repacked import packed_kind, repacked
from quire.models.gguf.stored import kinds_by_name, stored_format
from quire.models.gguf.value_heads import column_order, row_order
from quire.models.parts.layers import Embedding, Linear, LMHead
from quire.models.quantised.sizes import check_inputs
from quire.spec.gguf.container import KINDS, GGUFFile, TensorKind
from quire.spec.gguf.metadata import OF_CONFIG
from quire.spec.linear_attention import HYBRID_TYPES
from quire.spec.model_spec import ModelSpec

PERMUTED = ("llama", "granite", "smollm3")
SHARED_GATE = "ffn_gate_inp_shexp.weight"  # a matrix of one row, which files hold as a vector
EXPERTS = "_exps."  # part of the names of tensors that hold all experts of a layer
VALUES_AT_ONCE = 1 << 18  # 1 MB of float32 fits the CPU's cache


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor as stored in the file, or one expert's part of it. A vector counts as rows of one
    value.

    name: name in quire's layers. stored: uint8 [rows, bytes of a row]. order, columns: index in the
    file of each row and column; None keeps the order. offset: added to every value.
    """

    name: str
    kind: TensorKind
    shape: tuple[int, ...]
    stored: npt.NDArray[np.uint8]
    order: npt.NDArray[np.int64] | None = None
    offset: float = 0.0
    columns: npt.NDArray[np.int64] | None = None

    @property
    def num_bytes(self) -> int:
        return self.stored.nbytes

    def blocks(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the blocks of rows `start` to `stop` - 1 in quire's order, uint8 [rows, bytes], as
        the core packs them.

        A row consists of whole blocks. A permutation of columns must move whole blocks as well.
        """
        rows = self._rows(start, stop)
        if self.columns is not None:
            size = self.kind.block_size
            rows = self._blocks(rows, self.columns[::size] // size)
        return repacked(self.kind, rows)

    def _blocks(
        self, rows: npt.NDArray[np.uint8], block_indices: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint8]:
        """Select blocks of each row. block_indices: indices of the blocks in a row."""
        blocks = rows.reshape(len(rows), -1, self.kind.block_bytes)
        return blocks[:, block_indices].reshape(len(rows), -1)

    def _rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        if self.order is None:
            return self.stored[start:stop]
        return self.stored[self.order[start:stop]]

    def fill(self, source: Source) -> None:
        """Fill the part of a parameter that the source describes. A parameter of bytes gets the
        blocks as stored; otherwise the values are dequantised and converted to its dtype. Raises
        ModelError if the shapes differ."""
        destination = source.destination
        if source.is_elsewhere:
            return source.fill(destination)
        as_blocks = destination.dtype == torch.uint8
        # GGUF files do not transpose the matrices of gpt2, although its checkpoints do.
        expected_shape = source.whole_shape
        if as_blocks:  # in a merged layer, only the longest rows of bytes fill theirs
            kind, columns = packed_kind(self.kind), source.columns
            num_values = self.stored.shape[1] * self.kind.block_size // self.kind.block_bytes
            num_bytes = num_values // kind.block_size * kind.block_bytes
            num_bytes = min(num_bytes, destination.shape[1])
            if columns is not None:
                num_bytes = columns.count // kind.block_size * kind.block_bytes
            else:
                num_values = num_bytes // kind.block_bytes * kind.block_size
                expected_shape = (expected_shape[0], num_values)
            destination = destination[:, :num_bytes]
        part = _rows_of(source)
        if part is not None:
            expected_shape = (part.whole[0], *expected_shape[1:])
        if self.shape != expected_shape:
            raise ModelError(
                f"the tensor for {self.name} has the shape {list(self.shape)}, but the metadata"
                f" requires {list(expected_shape)}: the file contradicts itself."
            )
        offset = source.offset + self.offset
        self._taken(source)._fill(destination, as_blocks)
        if offset:
            destination.add_(offset)
        if source.is_logarithm:  # files hold the negated exponential
            destination.neg_()

    def _taken(self, source: Source) -> "GGUFTensor":
        """Return a copy restricted to the rows and columns of a source, in the source's order."""
        found, part, cut = self, _rows_of(source), source.columns
        if part is not None or source.rows is not None or source.order is not None:
            order = np.arange(self.shape[0]) if self.order is None else self.order
            for each in (part, source.rows):
                if each is not None:
                    order = order[each.first : each.first + each.count]
            if source.order is not None:
                order = order[source.order.cpu().numpy()]
            found = replace(found, order=order)
        if cut is not None:
            columns = np.arange(cut.whole) if self.columns is None else self.columns
            found = replace(found, columns=columns[cut.first : cut.first + cut.count])
        return found

    def _fill(self, destination: torch.Tensor, as_blocks: bool) -> None:
        num_rows = len(self.stored) if self.order is None else len(self.order)
        if len(self.shape) == 1:
            destination.copy_(torch.from_numpy(self._values(0, num_rows)[:, 0]))
            return
        step = max(1, VALUES_AT_ONCE // self.shape[1])
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            rows = self.blocks(start, stop) if as_blocks else self._values(start, stop)
            destination[start:stop].copy_(_tensor(rows))

    def _values(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        rows, columns, size = self._rows(start, stop), self.columns, self.kind.block_size
        if columns is None:
            return dequantise(self.kind, rows)
        block_indices = np.unique(columns // size)
        own = np.searchsorted(block_indices, columns // size) * size + columns % size
        return dequantise(self.kind, self._blocks(rows, block_indices))[:, own]


def _rows_of(source: Source) -> Part | None:
    """Return the range of rows that a source reads; None for all. A part along another dimension
    has size 1, and GGUF files omit that dimension."""
    return source.part if source.part is not None and source.part.dimension == 0 else None


def _tensor(values: npt.NDArray[Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the read-only file
        return torch.from_numpy(values)


def stored_formats(
    file: GGUFFile, spec: ModelSpec, model: nn.Module
) -> dict[nn.Module, StoredFormat]:
    """Return the packed format of each layer whose weights are quantised in the file. Raises
    ConfigError if a rank's inputs are not whole blocks."""
    kinds = kinds_by_name(file, spec)
    tables = {id(m.weight): m for m in model.modules() if isinstance(m, Embedding)}
    found: dict[nn.Module, StoredFormat] = {}
    for module in model.modules():
        if not isinstance(module, Linear | LMHead):
            continue
        table = tables.get(id(module.weight))
        parts = (module if table is None else table).sources()
        matrices = [part for part in parts if part.destination.dim() == 2]
        format = stored_format({m.name: len(m.destination) for m in matrices}, kinds)
        if format is not None:
            found[module] = format
            for part in matrices:
                if part.columns is not None:
                    check_inputs(part.name, part.columns, kinds[part.name].block_size)
    return found


def gguf_tensors(file: GGUFFile, spec: ModelSpec) -> Iterator[GGUFTensor]:
    """Yield the tensors of the file in turn, and each expert separately. A tensor without a name in
    quire's layers keeps its own. Raises ModelError for a shape that no layer can have."""
    for place in file.tensors.values():
        if place.name in OF_CONFIG or is_prediction_layer(place.name, spec):
            continue
        if VALUES.fullmatch(place.name):  # joined with the keys' part
            continue
        names, shape = our_names(place, spec), place.shape
        if KEYS.fullmatch(place.name):
            joined = joined_heads(file, place)
            yield GGUFTensor(names[0], KINDS[0], joined.shape, joined.view(np.uint8))
            continue
        if len(shape) > 1 and names != [place.name] and EXPERTS in place.name:
            shape = shape[1:]
        elif place.name.endswith(SHARED_GATE) and len(shape) == 1:
            shape = (1, *shape)
        if len(shape) > 2 or (len(shape) == 1 and not place.kind.is_float):
            raise ModelError(
                f"{file.path}: the tensor {place.name} of type {place.kind.name} has the shape"
                f" {list(place.shape)}, which is not valid for a layer of {spec.model_type}."
            )
        stored = np.frombuffer(file.data(place), np.uint8).reshape(len(names), shape[0], -1)
        order = rows_in_file(place.name, file.text("general.architecture"), spec, shape[0])
        columns = column_order(place.name, spec)
        offset = -1.0 if _is_offset_norm(place.name, spec) else 0.0
        for name, each in zip(names, stored, strict=True):
            yield GGUFTensor(name, place.kind, shape, each, order, offset, columns)
        file.forget(place)


def _is_offset_norm(name: str, spec: ModelSpec) -> bool:
    """Return whether a file holds 1 + weight where checkpoints hold the weight."""
    is_such = spec.model_type.startswith("gemma") or spec.model_type in HYBRID_TYPES
    return is_such and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")


def rows_in_file(
    name: str, architecture: str, spec: ModelSpec, num_rows: int
) -> npt.NDArray[np.int64] | None:
    """Return the file's row for each row of a checkpoint's tensor, int64 [num_rows]; None if the
    orders are equal.

    For architectures in PERMUTED, llama.cpp rotates the pairs (0, 1), (2, 3), ... of a head. In
    checkpoints the pairs are (0, H/2), (1, H/2+1), .... So files hold the rows of each query and
    key head as 0, H/2, 1, H/2+1, .... For gpt_neox, checkpoints group queries, keys and values by
    head; files hold all queries, then all keys, then all values.
    """
    size, of_values = spec.head_dim, row_order(name, spec)
    if of_values is not None:
        return of_values if len(of_values) == num_rows else None
    if spec.model_type == "gpt_neox" and re.fullmatch(r"blk\.\d+\.attn_qkv\..+", name):
        if num_rows != 3 * spec.num_heads * size:
            return None  # a wrong number of rows is found when the parameter is filled
        return np.arange(num_rows).reshape(3, -1, size).swapaxes(0, 1).reshape(-1)
    is_permuted = architecture in PERMUTED and re.fullmatch(
        r"blk\.\d+\.attn_[qk]\.(weight|bias)", name
    )
    if not is_permuted or num_rows % size or size % 2:
        return None
    rows = np.arange(num_rows).reshape(-1, size // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)
