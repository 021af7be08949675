"""Find the files of a checkpoint and read names and shapes of tensors from headers. No torch.

A safetensors file begins with the length of its header (u64, little-endian) and the header, JSON:

    {"__metadata__": {...}, name: {"dtype": "BF16", "shape": [...], "data_offsets": [...]}, ...}

A file may be hostile, so its length is checked before the header is read. No values are read.
"""

import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quire.base.errors import ModelError
from quire.spec.gguf.container import gguf_parts, is_gguf

INDEX = "model.safetensors.index.json"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth")
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
LENGTH = struct.Struct("<Q")

Shape = tuple[int, ...]
Header = dict[str, dict[str, Any]]
T = TypeVar("T")


def checkpoint_files(path: Path) -> list[Path]:
    """List the files that hold the weights. Raises ModelError if there are none."""
    return gguf_parts(path) if is_gguf(path) else weight_files(path)


def has_weights(directory: Path) -> bool:
    """Return whether a directory has weight files or an index of them, in any known format."""
    return any(any(directory.glob(each)) for each in WEIGHTS)


def weight_files(directory: Path) -> list[Path]:
    """List the *.safetensors files of a model, in transformers' order of preference:
    model.safetensors, else the files in the index, else all. Raises ModelError if none exist."""
    index, single = directory / INDEX, directory / "model.safetensors"
    if single.exists():
        files = [single]
    elif index.exists():
        files = _indexed_files(index)
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(_no_weights(directory))
    return files


def _indexed_files(index: Path) -> list[Path]:
    """List the files in an index. Raises ModelError if one is missing from its directory."""
    try:
        with index.open("rb") as file:
            text = file.read(MAX_HEADER_BYTES)
        names = sorted(set(json.loads(text)["weight_map"].values()))
        files = [index.parent / name for name in names if Path(name).name == name]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise ModelError(f"{index} is not a valid index of weight files: {error!r}.") from error
    if len(files) < len(names):
        raise ModelError(
            f"{index} is an index of files that are not in its directory: {listed(names)}."
        )
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ModelError(
            f"{index.parent} lacks {listed(missing)}, which its index names. Download it again."
        )
    return files


@dataclass(frozen=True)
class TensorHeader:
    """Shape and dtype of a tensor in a file. dtype: safetensors' name for it, such as `BF16`."""

    shape: Shape
    dtype: str


def safetensors_headers(files: Iterable[Path]) -> dict[str, TensorHeader]:
    """Read the shape and dtype of each tensor from the headers of the files.

    Raises ModelError for an unreadable file, an invalid header, and a tensor that two files hold.
    """
    headers: dict[str, TensorHeader] = {}
    locations = TensorLocations()
    for file in files:
        for name, header in _headers_of(file).items():
            locations.add(name, file, name)
            headers[name] = header
    return headers


def safetensors_shapes(files: Iterable[Path]) -> dict[str, Shape]:
    """Read the shape of each tensor. Raises ModelError as safetensors_headers does."""
    return {name: header.shape for name, header in safetensors_headers(files).items()}


class TensorLocations(dict[str, tuple[Path, str]]):
    """The file that holds each tensor and its name in that file, by its name in the model."""

    def add(self, name: str, file: Path, stored_name: str) -> None:
        """Record where a tensor is stored. Raises ModelError if it is already recorded."""
        if name in self:
            first, other = self[name]
            names = f"{other} and {stored_name}"
            raise ModelError(
                f"{file} holds one tensor under two names, {names}: remove one of them."
                if first == file
                else f"{first.name} and {file.name} in {file.parent} both hold {stored_name}:"
                " remove the file that is not part of the model."
            )
        self[name] = file, stored_name


def tensor_ranges(path: Path) -> dict[str, tuple[int, int]]:
    """Return the first byte of each tensor in a safetensors file, and the byte after its last.
    Raises ModelError as safetensors_headers does."""

    def read(header: Header, data_start: int) -> dict[str, tuple[int, int]]:
        spans = {name: entry["data_offsets"] for name, entry in header.items()}
        return {
            name: (data_start + int(begin), data_start + int(end))
            for name, (begin, end) in spans.items()
        }

    return _parsed(path, read)


def _headers_of(path: Path) -> dict[str, TensorHeader]:
    def read(header: Header, _: int) -> dict[str, TensorHeader]:
        return {name: TensorHeader(_shape(e), str(e["dtype"])) for name, e in header.items()}

    return _parsed(path, read)


def _parsed(path: Path, read: Callable[[Header, int], T]) -> T:
    """Return `read(header, data_start)` of a file. data_start: offset of the tensor data, bytes."""
    try:
        text = _header(path)
        header = json.loads(text)
        header.pop("__metadata__", None)
        return read(header, LENGTH.size + len(text))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{path} is not a valid safetensors file: {error!r}. Download it again."
        ) from error


def _header(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(LENGTH.size)
        if len(start) < LENGTH.size:
            raise ValueError("it is too short")
        (length,) = LENGTH.unpack(start)
        if length > min(size - LENGTH.size, MAX_HEADER_BYTES):
            raise ValueError(f"its header has {length:,} bytes, the file {size:,}")
        return file.read(length)


def _shape(entry: dict[str, Any]) -> Shape:
    shape = tuple(entry["shape"])
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"a tensor in it has the shape {entry['shape']!r}")
    return shape


def _no_weights(directory: Path) -> str:
    others = [f.name for f in sorted(directory.glob("*")) if f.suffix in (".bin", ".pt", ".pth")]
    if others:
        return (
            f"{directory} has its weights only as {listed(others)}. Only safetensors files are"
            " read: convert them, for example with transformers' save_pretrained()."
        )
    return (
        f"{directory} has no *.safetensors files, so there are no weights to load. Download them,"
        " or use load_format='dummy' for random weights."
    )


def listed(names: list[str], limit: int = 5) -> str:
    """Join the first `limit` names, and state the number of omitted names."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
