"""Patches: a file with tensors that replace some of a checkpoint's tensors.

    checkpoint   a b c d       files that stay as they are
    patch          b   d       one file, all tensors that updates have changed since
    update             d   e   tensors or deltas; e is refused, as the checkpoint lacks it

A delta changes single elements of a tensor. A file holds it as two tensors, NAME.delta_indices
(positions in the flattened tensor) and NAME.delta_values. Its metadata has, as NAME, the SHA-256 of
the result's bytes. So a delta of other weights than the present ones is recognised.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from quire.base.errors import ModelError
from quire.models.checkpoint.files import listed

INDICES, VALUES = ".delta_indices", ".delta_values"


class SparseDelta(NamedTuple):
    """Changed elements of a tensor. indices: positions in the flattened tensor, int32 or int64 [N].
    values: new elements [N], in the tensor's dtype. sha256: hexadecimal digest of the result."""

    indices: torch.Tensor
    values: torch.Tensor
    sha256: str

    @classmethod
    def between(cls, old: torch.Tensor, new: torch.Tensor) -> "SparseDelta":
        """Return what turns one tensor [...] into another of its shape and dtype, to the bit.
        Raises ModelError if these differ."""
        if old.shape != new.shape or old.dtype != new.dtype:
            raise ModelError(
                f"a delta needs two tensors of one shape and dtype, got {list(old.shape)} of"
                f" {old.dtype} and {list(new.shape)} of {new.dtype}; cast the new one first."
            )
        before, after = _bits(old), _bits(new)
        indices = (before != after).any(dim=1).nonzero()[:, 0]
        return cls(indices, new.detach().cpu().reshape(-1)[indices], digest_of(new))


def digest_of(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of the bytes of a tensor [...] in C order."""
    return hashlib.sha256(_bits(tensor).numpy().data).hexdigest()


def write_update(tensors: "Mapping[str, torch.Tensor | SparseDelta]", path: Path) -> None:
    """Write tensors and deltas by their names in the checkpoint. Raises OSError."""
    found: dict[str, torch.Tensor] = {}
    digests: dict[str, str] = {}
    for name, each in tensors.items():
        if isinstance(each, SparseDelta):
            found[name + INDICES] = each.indices.cpu().clone()  # deltas may share memory
            found[name + VALUES] = each.values.cpu().clone()
            digests[name] = each.sha256
        else:
            found[name] = each
    save_file({name: each.contiguous() for name, each in found.items()}, path, digests or None)


def hidden_names(patch: Path | None) -> frozenset[str]:
    """Return the names of a patch's tensors, which hide the checkpoint's."""
    if patch is None:
        return frozenset()
    with _opened([patch]) as [file]:
        return frozenset(file.keys())


def write_patch(
    checkpoint: Sequence[Path], patch: Path | None, update: Sequence[Path], target: Path
) -> None:
    """Write the patch that an update makes of an earlier patch. Raises ModelError for a name that
    the checkpoint lacks, a file that cannot be read, and a delta that does not fit the weights."""
    given = [] if patch is None else [patch]
    with _opened(checkpoint) as files, _opened(given) as patches, _opened(update) as updates:
        present = {name: file for file in [*files, *patches] for name in [*file.keys()]}
        tensors = {name: file.get_tensor(name) for file in patches for name in [*file.keys()]}
        changed: set[str] = set()
        for file in updates:
            for name, tensor in _changes(file, present):
                if name in changed:
                    raise ModelError(f"the update holds {name} twice; send it once.")
                changed.add(name)
                tensors[name] = tensor
        save_file(tensors, target)


def _changes(file: Any, present: Mapping[str, Any]) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the new tensors of a file of an update. present: the file of each present tensor."""
    digests, names = file.metadata() or {}, set(file.keys())
    deltas = {name.removesuffix(INDICES) for name in names if name.endswith(INDICES)}
    deltas |= {name.removesuffix(VALUES) for name in names if name.endswith(VALUES)}
    whole = names - {name + end for name in deltas for end in (INDICES, VALUES)}
    if unknown := sorted((whole | deltas) - present.keys()):
        raise ModelError(f"the model's files do not hold {listed(unknown)}; use their names.")
    for name in sorted(whole):
        yield name, file.get_tensor(name)
    for name in sorted(deltas):
        if name + INDICES not in names or name + VALUES not in names or name not in digests:
            raise ModelError(
                f"the delta of {name} needs {name}{INDICES} and {name}{VALUES} in one file, and"
                f" the digest of the result in its metadata as {name}."
            )
        parts = file.get_tensor(name + INDICES), file.get_tensor(name + VALUES)
        old = present[name].get_tensor(name)
        yield name, _applied(name, old, SparseDelta(*parts, digests[name]))


def _applied(name: str, old: torch.Tensor, delta: SparseDelta) -> torch.Tensor:
    indices, values, sha256 = delta
    if indices.dtype not in (torch.int32, torch.int64) or values.dtype != old.dtype:
        raise ModelError(
            f"the delta of {name} has {values.dtype} at {indices.dtype}; use {old.dtype} at"
            " torch.int64."
        )
    if indices.ndim != 1 or indices.shape != values.shape:
        raise ModelError(f"the delta of {name} needs one value for each index, [N] both.")
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < old.numel():
        raise ModelError(f"the delta of {name} has indices outside its {old.numel():,} elements.")
    new = old.clone()
    new.view(-1)[indices.long()] = values
    if digest_of(new) != sha256:
        raise ModelError(
            f"the delta of {name} gives other values than its digest says: it is of other weights"
            " than the present ones. Send the whole tensor."
        )
    return new


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes [elements, bytes of an element], which compare exactly."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).view(len(flat), tensor.element_size())


class _opened:
    """Context of opened safetensors files. Raises ModelError for a file that cannot be read."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths, self._stack = paths, ExitStack()

    def __enter__(self) -> list[Any]:
        found = []
        for path in self._paths:
            try:
                found.append(self._stack.enter_context(safe_open(path, framework="pt")))
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise ModelError(f"{path} cannot be read: {error}.") from error
        return found

    def __exit__(self, *_: object) -> None:
        self._stack.close()
