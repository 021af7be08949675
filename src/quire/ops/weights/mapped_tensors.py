"""Tensors that are mapped from files, and their positions in the files.

Mapping costs nothing, but the first access to each page costs a fault. Code that needs all of a
large tensor reads it from its file. Then a failed read is an error, not the process's end.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from typing import NamedTuple

import torch

from quire.base.errors import ModelError


class FilePosition(NamedTuple):
    """Position of values: `offset` bytes from the beginning of an open file."""

    file: FileIO
    offset: int

    @contextmanager
    def reading(self) -> Iterator[int]:
        """Yield the file's descriptor. Raises ModelError for an OSError within the context."""
        try:
            yield self.file.fileno()
        except OSError as error:
            name = str(self.file.name)
            raise ModelError(f"{name} cannot be read: {error}. Download it again.") from error


class MappedTensors:
    """Register of mapped tensors. It holds them, so no other tensor can get their addresses."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, FilePosition]] = {}

    def add(self, tensor: torch.Tensor, position: FilePosition) -> None:
        """Register a tensor [...] with its own storage. The file must stay open during look-ups."""
        if tensor.numel():  # an empty tensor may share the next one's address
            self._known[tensor.untyped_storage().data_ptr()] = tensor, position

    def position(self, values: torch.Tensor) -> FilePosition | None:
        """Return the file position of a tensor or contiguous part of one, values [...]; None if
        unknown."""
        known = self._known.get(values.untyped_storage().data_ptr())
        if known is None or not values.is_contiguous():
            return None
        tensor, (file, offset) = known
        return FilePosition(file, offset + values.data_ptr() - tensor.data_ptr())
