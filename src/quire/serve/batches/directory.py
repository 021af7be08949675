"""The directory of files and batches: names, room, owners, pages of lists, and atomic writes.

    file-ID.json   record of a file      batch_ID.json    record of a batch, with its progress
    file-ID.data   its contents          batch_ID.output  answers so far; a file in the end
    file-ID.part   an upload under way   batch_ID.failed  failed lines so far; a file in the end
    room.lock      lock to count bytes   batch_ID.cancel  the batch is requested to end
    runner.lock    lock to run batches

All API processes of a server share it. An id begins with its creation time, so sorted names are in
order of age. Lists come in pages, as in OpenAI's API: `after` is the last id of the page before.
The owner of a file is the digest of its key, so no file shows the key.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.types import Scope

from quire.base.errors import ConfigError, RequestError
from quire.base.files import replace_file
from quire.engine.wire.wire import NO_RESOURCES
from quire.serve.bodies.validation_errors import shown
from quire.serve.errors import bad_request
from quire.serve.http.auth import key_of

logger = logging.getLogger("quire")

T = TypeVar("T")

GB = 10**9
ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
TMP, PART = ".tmp", ".part"
ABANDONED_S = 60.0  # minimum age of an abandoned file; younger files may still be in the making
NO_ROOM = "no_room"


class FilesDirectory:
    """Access to the directory. limit_bytes: maximum size of all its files together."""

    def __init__(self, root: Path, limit_gb: float) -> None:
        """Create the directory for this user alone. Raise ConfigError if that is not possible."""
        self.root, self.limit_bytes, self._limit_gb = root, int(limit_gb * GB), limit_gb
        self._damaged: set[str] = set()  # names of damaged files that were logged
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path("room", ".lock").touch(0o600)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(
                f"files_dir={str(root)!r} cannot be used ({reason}); give a directory that the"
                " server may write."
            ) from error

    def path(self, name: str, suffix: str) -> Path:
        return self.root / (name + suffix)

    def names(self, prefix: str, suffix: str) -> list[str]:
        """Return the ids that have a file of this suffix, oldest first."""
        with os.scandir(self.root) as entries:
            found = (entry.name for entry in entries if entry.name.endswith(suffix))
            ids = (name.removesuffix(suffix) for name in found if name.startswith(prefix))
            return sorted(name for name in ids if ID.fullmatch(name))

    def read(self, path: Path, kind: type[T]) -> T | None:
        """Return the value that `write` stored; None if it is missing or damaged. A damaged file is
        logged once, and other files are unaffected. Raise OSError if the process lacks memory or
        descriptors."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in NO_RESOURCES:
                raise  # the fault is the process's, not the file's
            self._report_damage(path, error.strerror or str(error))
            return None
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            self._report_damage(path, str(error))
            return None

    def _report_damage(self, path: Path, reason: str) -> None:
        if path.name not in self._damaged:
            self._damaged.add(path.name)
            logger.error(
                "%s is damaged (%s) and was skipped; remove it, or restore it", path, reason
            )

    def write(self, path: Path, value: Any) -> None:
        """Replace a file with the value as JSON. Raise OSError if the disk does not take it; the
        old contents stay then."""
        replace_file(path, msgspec.json.encode(value), self.path(uuid.uuid4().hex, TMP))

    # ---- room --------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Return the bytes of all files, including what uploads have reserved."""
        used = 0
        with os.scandir(self.root) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    used += entry.stat(follow_symlinks=False).st_size
        return used

    @property
    def is_full(self) -> bool:
        """Whether batches have exceeded the limit; uploads never do."""
        return self.used_bytes() > self.limit_bytes

    def reserve(self, fd: int, min_bytes: int, max_bytes: int) -> int:
        """Extend a file to as many bytes as there is room for, from `min_bytes` to `max_bytes`.
        Return its size. Raise RequestError without room for `min_bytes`."""
        with self._counting():
            free = self.limit_bytes - self.used_bytes() + os.fstat(fd).st_size
            if free < min_bytes:
                raise self.no_room()
            size = min(max_bytes, free)
            os.ftruncate(fd, size)
            return size

    def no_room(self) -> RequestError:
        return RequestError(
            f"files and batches may use up to {self._limit_gb:g} GB together (files_gb). All of it"
            " is used: delete files, or ask the operator to raise files_gb.",
            "file",
            NO_ROOM,
        )

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Hold the lock for counting bytes, which all processes share, for a moment."""
        with self.path("room", ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def sweep(self) -> None:
        """Remove temporary files and uploads of processes that were killed."""
        with os.scandir(self.root) as entries:
            paths = [Path(e.path) for e in entries if e.name.endswith((TMP, PART))]
        for path in paths:
            with contextlib.suppress(OSError), path.open("rb") as file:
                if time.time() - path.stat().st_mtime > ABANDONED_S:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a live upload holds it
                    path.unlink()


def make_id(prefix: str) -> str:
    """Return an id that sorts after all ids made before."""
    return f"{prefix}{time.time_ns():016x}{uuid.uuid4().hex[:16]}"


def is_id(text: str, prefix: str) -> bool:
    """Return whether a text has the form of an id, and so may become part of a path."""
    return text.startswith(prefix) and ID.fullmatch(text) is not None


def page(
    items: list[dict[str, Any]], limit: int, after: str | None, order: str = "desc"
) -> dict[str, Any]:
    """Return one page of a list. items: oldest first. Raise ApiError if `after` is unknown."""
    ordered = items if order == "asc" else items[::-1]
    begin = 0
    if after is not None:
        positions = [number for number, item in enumerate(ordered, 1) if item["id"] == after]
        if not positions:
            raise bad_request(f"after must be an id of this list, got {shown(after)}.", "after")
        begin = positions[0]
    found = ordered[begin : begin + limit]
    return {
        "object": "list",
        "data": found,
        "first_id": found[0]["id"] if found else None,
        "last_id": found[-1]["id"] if found else None,
        "has_more": begin + limit < len(ordered),
    }


DIGEST_CHARS = 32


def owner_of(scope: Scope, keys: Sequence[str]) -> str:
    """Return the owner of objects that a request creates; empty on a server without keys."""
    key = key_of(scope, keys)
    return "" if key is None else _digest(key)


def visible_owner(scope: Scope, keys: Sequence[str]) -> str | None:
    """Return the owner whose files and batches a caller sees; None, without keys, sees all."""
    return owner_of(scope, keys) if keys else None


def key_of_owner(owner: str, keys: Iterable[str]) -> tuple[str | None, bool]:
    """Return the key of an owner, and whether the owner is valid. A server without keys has no key,
    and there every owner is valid."""
    given = list(keys)
    if not given:
        return None, True
    for key in given:
        if _digest(key) == owner:
            return key, True
    return None, False


def _digest(key: str) -> str:
    return hashlib.sha256(b"quire's files of key " + key.encode()).hexdigest()[:DIGEST_CHARS]
