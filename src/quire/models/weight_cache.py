"""Packed weights of the CPU core, kept in files that the next start maps.

    "QUIREWTS" | start of data u64 | bytes of data u64 | bytes of index u64 | SHA-256 of index
    index: JSON {key, weights: [{names, offset, nbytes, shape, dtype | numbers}]}
    data, from a multiple of 4 KiB on; each weight at a multiple of 64

A file's name is a digest of all that its contents depend on: the checkpoint's files, the model's
config, the formats, their instruction sets and the versions of this code. A file holds all of a
model's weights, so that the checkpoint's are not read; all processes that use it share one copy. It
appears under its name when it is complete; one that is damaged is ignored and written again. What
goes wrong with the cache itself is logged, and never keeps a model from being loaded.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quire.base.user_cache import user_cache
from quire.models.assembly import all_weights
from quire.models.file_identity import file_identity
from quire.models.layers import Layer
from quire.ops.host_memory import ALIGNMENT, aligned, free_disk_bytes, mapped_file
from quire.ops.native import INTERFACE_VERSION
from quire.ops.packed import Packed, PackedParts, PackedWeight, packed_view

logger = logging.getLogger("quire")

VERSION = 3  # raised whenever what is written, or what packing makes of a weight, changes
MAGIC = b"QUIREWTS"
HEADER = struct.Struct("<8sQQQ32s")
PAGE = 4096
MAX_INDEX_BYTES = 1 << 26
SUFFIX, UNFINISHED = ".weights", ".tmp"
WRITTEN_AT_ONCE = 64 << 20  # large writes give the page cache large pages

MOST_BYTES = 50_000_000_000
SHARE_OF_DISK = 0.2  # of what would be free without the cache
LEAST_BYTES = 64_000_000  # in the default directory; less is packed in no time
UNUSABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)  # what a bad file raises


@dataclass(frozen=True)
class WeightCache:
    """least_bytes: smaller models are not kept. keeps_dummies: random weights are kept, too."""

    directory: Path
    least_bytes: int = 0
    keeps_dummies: bool = True

    def entry(
        self, model: nn.Module, num_bytes: int, files: list[Path], seed: int, made_with: object
    ) -> "Entry | None":
        """Find where the weights of this empty model belong; None if they are not to be kept.

        num_bytes: of all packed weights. files: the checkpoint's; none for random weights, of this
        seed. made_with: what else the weights depend on; its repr counts.
        """
        if num_bytes < self.least_bytes or not (files or self.keeps_dummies):
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
        return Entry(self.directory, key)


def weight_cache(setting: str) -> WeightCache | None:
    """Open what the setting names: `off`, `auto` (the user's cache directory), or a directory."""
    if setting == "off":
        return None
    if setting == "auto":
        return WeightCache(user_cache("weights"), LEAST_BYTES, keeps_dummies=False)
    return WeightCache(Path(setting).expanduser())


def _sources(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """List which tensors of a checkpoint fill which layers, in order."""
    for prefix, layer in model.named_modules():
        for source in layer.sources() if isinstance(layer, Layer) else ():
            order = None if source.order is None else source.order.tolist()
            yield prefix, source.name, source.checkpoint_shape, source.transposed, source.repeated
            yield source.part, source.offset, source.is_logarithm, order
            yield source.rows, source.columns, source.is_elsewhere


@dataclass(frozen=True)
class Entry:
    """One model's weights in the cache. key: a digest."""

    directory: Path
    key: str

    @property
    def path(self) -> Path:
        return self.directory / f"{self.key}{SUFFIX}"

    def restore(self, model: nn.Module) -> bool:
        """Give an empty model its weights, mapped and not to be written to; False if they are not
        there or not what they should be. Then the model is unchanged."""
        try:
            with self.path.open("rb") as file:
                # Held as long as the mapping: who makes room leaves the file alone.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                weights = _read(file.fileno(), self.key, model)
                with contextlib.suppress(OSError):  # not ours; it only says what was used last
                    os.utime(file.fileno())
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

    def store(self, model: nn.Module) -> None:
        """Keep a packed model's weights, if there is room."""
        index, pieces = _indexed(model)
        head, data_start = _head({"key": self.key, "weights": index})
        total = data_start + _end(index)
        temporary = None
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not make_room(self.directory, total, self.path):
                logger.info("weights: not kept, %.1f GB are too much for the cache", total / 1e9)
                return
            file, name = tempfile.mkstemp(UNFINISHED, f"{self.key}-", self.directory)
            temporary = Path(name)
            with os.fdopen(file, "wb", buffering=0) as opened:
                fcntl.flock(opened, fcntl.LOCK_EX)
                writer = _Writer(file, total)
                writer.put(0, head)
                for entry, piece in zip(index, pieces, strict=True):
                    writer.put(data_start + entry["offset"], piece)
                writer.flush()
                os.fsync(file)
                temporary.rename(self.path)
        except OSError as error:
            logger.warning("the weights are not kept for the next start: %s", error)
            if temporary is not None:
                with contextlib.suppress(OSError):
                    temporary.unlink()


def make_room(directory: Path, needed: int, replaced: Path) -> bool:
    """Remove what was used longest ago until so many bytes fit; what is in use stays. Whether they
    do. replaced: a file that does not count, because it is written again. Raises OSError."""
    for unfinished in directory.glob(f"*{UNFINISHED}"):
        _remove_unused(unfinished)
    files = []
    for path in directory.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            if path != replaced:
                files.append((path.stat().st_mtime_ns, path.stat().st_size, path))
    used = sum(size for _, size, _ in files)
    limit = min(MOST_BYTES, SHARE_OF_DISK * (free_disk_bytes(directory) + used))
    if needed > limit:
        return False
    for _, size, path in sorted(files):
        if used + needed > limit and _remove_unused(path):
            used -= size
    return used + needed <= limit


def _remove_unused(path: Path) -> bool:
    """Remove a file unless another process, which maps or writes it, locks it; tell if it is
    gone."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


# ---- the file --------------------------------------------------------------------------------


def _indexed(model: nn.Module) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """The index, and each weight's bytes; a weight that several modules share comes once."""
    found: dict[int, dict[str, Any]] = {}
    pieces, offset = [], 0
    for full_name, module, name in all_weights(model):
        weight = getattr(module, name)
        if id(weight) in found:
            found[id(weight)]["names"].append(full_name)
            continue
        entry: dict[str, Any] = {"names": [full_name], "offset": offset}
        if isinstance(weight, PackedWeight | PackedParts):
            piece = weight.data
            entry |= {"numbers": [part.layout for part in weight.parts]}
        else:
            piece = weight.detach().contiguous().view(-1).view(torch.uint8)
            entry |= {"dtype": str(weight.dtype).removeprefix("torch.")}
        entry |= {"shape": list(weight.shape), "nbytes": piece.nbytes}
        found[id(weight)] = entry
        pieces.append(piece)
        offset = aligned(offset + piece.nbytes)
    return list(found.values()), pieces


def _head(index: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Header and index, and where the data begins."""
    text = json.dumps(index).encode()
    start = aligned(HEADER.size + len(text), PAGE)
    digest = hashlib.sha256(text).digest()
    header = HEADER.pack(MAGIC, start, _end(index["weights"]), len(text), digest)
    return torch.frombuffer(bytearray(header + text), dtype=torch.uint8), start


def _end(index: Iterable[dict[str, Any]]) -> int:
    return max((entry["offset"] + entry["nbytes"] for entry in index), default=0)


def _read(file: int, key: str, model: nn.Module) -> list[nn.Parameter | Packed]:
    """The weights in the order of all_weights. Raises one of UNUSABLE for a file that is not
    what `store` writes for this model."""
    magic, start, num_bytes, index_bytes, digest = HEADER.unpack(_read_bytes(file, 0, HEADER.size))
    if magic != MAGIC or index_bytes > MAX_INDEX_BYTES or start % PAGE:
        raise ValueError("it is damaged (its header)")
    text = _read_bytes(file, HEADER.size, index_bytes)
    if hashlib.sha256(text).digest() != digest:
        raise ValueError("it is damaged (its index)")
    index = json.loads(text)
    if index["key"] != key:
        raise ValueError("it is another model's")
    if os.fstat(file).st_size != start + num_bytes or start < HEADER.size + index_bytes:
        raise ValueError("it is damaged (its size)")
    data = mapped_file(file, start + num_bytes)[start:]
    by_name: dict[str, nn.Parameter | Packed] = {}
    shapes = {name: getattr(module, own).shape for name, module, own in all_weights(model)}
    for entry in index["weights"]:
        wanted = shapes[entry["names"][0]]
        if any(shapes[name] != wanted for name in entry["names"]):
            raise ValueError(f"{entry['names']} have several shapes")
        by_name |= dict.fromkeys(entry["names"], _weight(entry, wanted, data))
    if by_name.keys() != shapes.keys():
        raise ValueError("it holds the weights of another model")
    return [by_name[name] for name in shapes]


def _weight(entry: dict[str, Any], shape: torch.Size, data: torch.Tensor) -> nn.Parameter | Packed:
    begin, num_bytes = entry["offset"], entry["nbytes"]
    if not 0 <= begin <= begin + num_bytes <= len(data) or begin % ALIGNMENT:
        raise ValueError(f"{entry['names']} lie outside of it")
    piece = data[begin : begin + num_bytes]
    if "numbers" in entry:
        packed = packed_view(piece, entry["numbers"])
        if packed.shape != tuple(shape):
            raise ValueError(f"{entry['names']} have another shape")
        return packed
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype) or num_bytes != shape.numel() * dtype.itemsize:
        raise ValueError(f"{entry['names']} have another size")
    return nn.Parameter(piece.view(dtype).view(shape), requires_grad=False)


def _read_bytes(file: int, offset: int, num_bytes: int) -> bytes:
    found = os.pread(file, num_bytes, offset)
    if len(found) < num_bytes:
        raise ValueError("it is damaged (it ends too early)")
    return found


class _Writer:
    """Writes pieces in the order of their places, in large parts; what lies between is zero."""

    def __init__(self, file: int, total: int) -> None:
        self._file = file
        self._part = torch.zeros(min(total, WRITTEN_AT_ONCE), dtype=torch.uint8)
        self._start = self._used = 0

    def put(self, offset: int, piece: torch.Tensor) -> None:
        self._used = offset - self._start
        while len(piece):
            room = len(self._part) - self._used
            if room <= 0:
                self._write(len(self._part))
                continue
            now, piece = piece[:room], piece[room:]
            self._part[self._used : self._used + len(now)] = now
            self._used += len(now)

    def flush(self) -> None:
        self._write(self._used)

    def _write(self, num_bytes: int) -> None:
        view = memoryview(self._part.numpy().data)[:num_bytes]
        while len(view):
            view = view[os.write(self._file, view) :]
        self._part.zero_()
        self._start, self._used = self._start + num_bytes, self._used - num_bytes
