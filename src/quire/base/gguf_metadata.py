"""Reads the metadata of a GGUF file's architecture, and checks its tensors' shapes against them."""

import math
import struct
from collections.abc import Iterable, Mapping

from quire.base.errors import ModelError
from quire.base.gguf import ArrayPlace, GGUFFile


class Metadata:
    """The metadata of one architecture, whose name is in front of all its keys."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture

    def has(self, key: str) -> bool:
        return self.name(key) in self.file.metadata

    def is_array(self, key: str) -> bool:
        return isinstance(self.file.metadata.get(self.name(key)), ArrayPlace)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return a number of things, of which there are at least so many."""
        value = self.file.integer(self.name(key), default)
        if not least <= value < 1 << 31:
            raise self.error(key, str(value))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.file.number(self.name(key), default)
        if not math.isfinite(value):
            raise self.error(key, str(value))
        return value

    def text(self, key: str, default: str) -> str:
        return self.file.text(self.name(key), default)

    def flag(self, key: str, default: bool) -> bool:
        return self.file.boolean(self.name(key), default)

    def flags(self, key: str) -> list[bool]:
        return [bool(value) for value in self.file.numbers(self.name(key))]

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def error(self, key: str, what: str) -> ModelError:
        """Return the error to raise about a value. what: continues `the metadata KEY is `."""
        return ModelError(f"{self.file.path}: the metadata {self.name(key)} is {what}.")

    def vector(self, name: str, length: int) -> list[float]:
        """Return the numbers of a tensor that belongs to the config, all above 0; empty if the file
        has none of this name."""
        place = self.file.tensors.get(name)
        if place is None:
            return []
        if place.kind.name != "F32" or place.shape != (length,):
            raise ModelError(f"{self.file.path}: {name} has the shape {list(place.shape)}.")
        found = list(struct.unpack(f"<{length}f", self.file.data(place)))
        if not all(math.isfinite(each) and each > 0 for each in found):
            raise ModelError(f"{self.file.path}: {name} holds numbers that are not above 0.")
        return found

    def check_layers(self, layers: Iterable[int], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check the matrices that fix all other sizes, before memory is taken for what the metadata
        says."""
        for layer in layers:
            for part, shape in shapes.items():
                self.check_shape(f"blk.{layer}.{part}.weight", shape)

    def check_shape(self, name: str, wanted: tuple[int, ...]) -> None:
        place = self.file.tensors.get(name)
        if place is None or place.shape != wanted:
            found = "is missing" if place is None else f"has the shape {list(place.shape)}"
            raise ModelError(
                f"{self.file.path}: the tensor {name} {found}, but the metadata asks for"
                f" {list(wanted)}: the file contradicts itself."
            )
