"""A weighted set of adapters, which is an adapter of its own. No torch.

    W + sum of scale_i * s_i B_i A_i        s_i: the scale of adapter i's own files

Its path is a JSON list of its members' paths and scales, and its id a digest of their digests and
scales. So the engine loads it, gives it a slot, and separates its cached blocks like any adapter's.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from quire.base.errors import ModelError
from quire.models.checkpoint.adapter_files import adapter_digest

MAX_MEMBERS = 64
BEGIN = "["  # of a set's path; other paths are absolute


class Member(NamedTuple):
    """An adapter of a set. id: digest of its files; empty if unknown. path: its directory or GGUF
    file."""

    id: str
    path: str
    scale: float


def set_of(members: Iterable[Member]) -> tuple[str, str] | None:
    """Return the id and path of a set; None for a set that changes nothing. An adapter with the
    scale 1 alone is itself."""
    scales: dict[str, Member] = {}
    for member in members:
        before = scales.get(member.id)
        scale = member.scale + (0.0 if before is None else before.scale)
        scales[member.id] = member._replace(scale=scale)
    found = [scales[each] for each in sorted(scales) if scales[each].scale]
    if not found:
        return None
    if len(found) == 1 and found[0].scale == 1.0:
        return found[0].id, found[0].path
    return _set_digest(found), json.dumps([[each.path, each.scale] for each in found])


def members_of(path: str) -> list[Member]:
    """Return the members of a set, or the adapter in a path. Raises ModelError for the path of an
    invalid set."""
    if not path.startswith(BEGIN):
        return [Member("", path, 1.0)]
    try:
        found = [Member("", str(path), float(scale)) for path, scale in json.loads(path)]
    except (ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"{path[:200]} is no set of adapters.") from error
    if not 1 <= len(found) <= MAX_MEMBERS:
        raise ModelError(f"a set may have {MAX_MEMBERS} adapters, got {len(found)}.")
    return found


def digest_of(path: str) -> str:
    """Return the id of the adapter or set in a path, from its files. Raises ModelError if they are
    missing or unreadable."""
    if not path.startswith(BEGIN):
        return adapter_digest(Path(path))
    members = members_of(path)
    return _set_digest([each._replace(id=adapter_digest(Path(each.path))) for each in members])


def _set_digest(members: Sequence[Member]) -> str:
    texts = [f"{each.id} {each.scale.hex()}" for each in members]
    return hashlib.sha256("\n".join(("set", *texts)).encode()).hexdigest()
