"""Tensors that are mapped from files, and where they stand there.

Mapping takes nothing, but each page that is touched costs a fault. Who needs all of a large tensor
reads it from its file instead; then what goes wrong there is an error, not the end of the process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from typing import NamedTuple

import torch

from quire.base.errors import ModelError


class FilePlace(NamedTuple):
    """Where values stand: `offset` bytes from the beginning of an opened file."""

    file: FileIO
    offset: int

    @contextmanager
    def reading(self) -> Iterator[int]:
        """Give the file's descriptor. Raises ModelError for an OSError in what is done with it."""
        try:
            yield self.file.fileno()
        except OSError as error:
            name = str(self.file.name)
            raise ModelError(f"{name} cannot be read: {error}. Download it again.") from error


class MappedTensors:
    """Knows the places of tensors. It keeps them mapped, so that nothing else can have their
    addresses."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, FilePlace]] = {}

    def add(self, tensor: torch.Tensor, place: FilePlace) -> None:
        """Note a tensor that has a storage of its own. The file must stay open as long as tensors
        are looked up."""
        if tensor.numel():  # an empty one may have the address of the next
            self._known[tensor.untyped_storage().data_ptr()] = tensor, place

    def place(self, values: torch.Tensor) -> FilePlace | None:
        """Find where a tensor's values, or a part of them, stand one after the other in a file."""
        known = self._known.get(values.untyped_storage().data_ptr())
        if known is None or not values.is_contiguous():
            return None
        tensor, (file, offset) = known
        return FilePlace(file, offset + values.data_ptr() - tensor.data_ptr())
