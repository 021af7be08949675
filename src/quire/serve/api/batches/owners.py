"""Whose files and batches are whose: the key's, by a digest, so that no file tells the key."""

import hashlib
from collections.abc import Iterable, Sequence

from starlette.types import Scope

from quire.serve.api.auth import key_of

DIGEST_CHARS = 32


def owner_of(scope: Scope, keys: Sequence[str]) -> str:
    """Return whose what a request makes is; empty on a server without keys."""
    key = key_of(scope, keys)
    return "" if key is None else _digest(key)


def seen_by(scope: Scope, keys: Sequence[str]) -> str | None:
    """Return whose files and batches a caller sees: a key its own; without keys, None is all."""
    return owner_of(scope, keys) if keys else None


def key_of_owner(owner: str, keys: Iterable[str]) -> tuple[str | None, bool]:
    """Return the key of an owner, if it has one, and whether the server still takes it."""
    given = list(keys)
    if not given:
        return None, True
    for key in given:
        if _digest(key) == owner:
            return key, True
    return None, False


def _digest(key: str) -> str:
    return hashlib.sha256(b"quire's files of key " + key.encode()).hexdigest()[:DIGEST_CHARS]
