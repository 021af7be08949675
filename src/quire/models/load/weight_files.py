"""New weights of a trainer as files that the engine's process can read.

Tensors in memory are written to one safetensors file in shared memory, which the engine maps. The
file is deleted once the engine has packed its own copy. No pickle is read or written.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from quire.base.errors import RequestError

if TYPE_CHECKING:
    import torch

    from quire.models.load.patches import SparseDelta

SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def weight_files(
    weights: "str | Path | Mapping[str, torch.Tensor | SparseDelta]",
) -> Iterator[Path]:
    """Yield the path of weights: the given one, or a temporary folder with the given tensors, by
    their names in the checkpoint. Raises RequestError if the tensors cannot be written."""
    if isinstance(weights, str | Path):
        yield Path(weights).expanduser().absolute()
        return
    from quire.models.load.patches import write_update  # imports torch

    tensors = _separate(weights)
    num_bytes = sum(_num_bytes(each) for each in tensors.values())
    with tempfile.TemporaryDirectory(prefix="quire-weights-", dir=folder_for(num_bytes)) as name:
        try:
            write_update(tensors, Path(name) / "model.safetensors")
        except OSError as error:
            raise RequestError(
                f"{num_bytes:,} bytes of new weights cannot be written to {name}:"
                f" {error.strerror or error}; free space there, or give the path of a checkpoint."
            ) from error
        yield Path(name)


def _num_bytes(given: "torch.Tensor | SparseDelta") -> int:
    parts = given[:2] if isinstance(given, tuple) else [given]
    return sum(each.nbytes for each in parts)


def _separate(
    weights: "Mapping[str, torch.Tensor | SparseDelta]",
) -> "dict[str, torch.Tensor | SparseDelta]":
    """Return the tensors contiguous, on the CPU, and without shared memory: a tied head is stored
    twice, which the engine checks."""
    found: dict[str, torch.Tensor | SparseDelta] = {}
    places: set[int] = set()
    for name, tensor in weights.items():
        if isinstance(tensor, tuple):
            found[name] = tensor
            continue
        own = tensor.detach().cpu().contiguous()
        place = own.untyped_storage().data_ptr()
        found[name] = own.clone() if place in places else own
        places.add(place)
    return found


def folder_for(num_bytes: int) -> str | None:
    """Return shared memory if it has room for so many bytes; else None, which stands for the folder
    of temporary files."""
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > num_bytes * 1.1:
        return str(SHARED_MEMORY)
    return None
