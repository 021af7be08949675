"""What tells a checkpoint's file from others without reading all of it. No torch.

    small files   a digest of everything
    large ones    a digest of the beginning (a safetensors file's whole header), of PAGES pages
                  spread over the file, and of one page within each tensor, up to MAX_TENSORS

beside name, size and time of change. Somebody who changes a large file in place, sets its time back
and hits none of these pages is not found out.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quire.base.errors import ModelError
from quire.base.gguf import GGUFFile, is_gguf
from quire.models.checkpoint import tensor_ranges

PAGE_BYTES = 4096
WHOLE_BYTES = 64 << 20
START_BYTES = 1 << 24
PAGES, MAX_TENSORS = 1024, 4096


def file_identity(path: Path) -> list[Any]:
    """Name, size, time of change in ns, and a digest of contents, as the module says. Raises
    OSError."""
    with path.open("rb") as file:
        facts, digest = os.fstat(file.fileno()), hashlib.sha256()
        if facts.st_size <= WHOLE_BYTES:
            while piece := file.read(1 << 20):
                digest.update(piece)
        else:
            digest.update(file.read(START_BYTES))
            for start in _places(path, facts.st_size):
                digest.update(os.pread(file.fileno(), PAGE_BYTES, start))
    return [path.name, facts.st_size, facts.st_mtime_ns, digest.hexdigest()]


def _places(path: Path, size: int) -> Iterable[int]:
    """List where a large file is looked at, in order."""
    last = size - PAGE_BYTES
    spread = {last * i // (PAGES - 1) for i in range(PAGES)}
    middles = {(start + end) // 2 for start, end in _ranges(path)[:MAX_TENSORS]}
    return sorted(spread | {min(max(0, middle), last) for middle in middles})


def _ranges(path: Path) -> list[tuple[int, int]]:
    """List where each tensor begins and ends; nothing of a file that is neither format."""
    try:
        if is_gguf(path):
            places = GGUFFile(path).tensors.values()
            return [(place.start, place.start + place.num_bytes) for place in places]
        return sorted(tensor_ranges(path).values())
    except ModelError:
        return []
