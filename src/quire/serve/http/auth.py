"""API keys: who may call what.

The decision hangs on the route that was matched, as a dependency of its router, never on the text
of the path: what a client writes into URL or Host header cannot move a request past it. Only the
routers that `create_app` includes as public do without. The WebSocket's route calls `has_key`.
"""

import hashlib
import hmac
from collections.abc import Iterable, Sequence

import fastapi
from starlette.types import Scope

from quire.base.settings.config import ServerConfig
from quire.base.tenants import key_name
from quire.serve.bodies.protocol import ServedBody
from quire.serve.context import Api
from quire.serve.errors import ApiError

SCHEME = b"bearer "
KEY_HEADER = b"x-api-key"  # where Anthropic's clients put it


async def authorised(request: fastapi.Request, api: Api) -> None:
    """Dependency of the protected routers. Raises ApiError 401."""
    if not has_key(request.scope, api.config.api_key):
        raise wrong_key()


def has_key(scope: Scope, keys: Iterable[str]) -> bool:
    """Return whether a request brings one of the keys in its one Authorization header, or without
    such a header in its one x-api-key, or none is needed.

    Takes as long for a wrong key as for a right one: digests are compared, with all of the keys.
    """
    digests, digest = _digests(keys), _given(scope)
    if not digests:
        return True
    found = False
    for known in digests:
        found |= hmac.compare_digest(digest, known)
    return found


def _digests(keys: Iterable[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def _given(scope: Scope) -> bytes:
    """Return the digest of the key that a request brings; empty if it brings none."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    given = [value for name, value in headers if name == b"authorization"]
    keys = [value[len(SCHEME) :] for value in given if value[: len(SCHEME)].lower() == SCHEME]
    if not given:
        given = keys = [value for name, value in headers if name == KEY_HEADER]
    if len(given) != 1 or len(keys) != 1:
        return b""
    return hashlib.sha256(keys[0].strip()).digest()


def key_of(scope: Scope, keys: Sequence[str]) -> str | None:
    """Return which of the keys a request brings; None on a server without keys."""
    given = _given(scope)
    pairs = zip(keys, _digests(keys), strict=True)
    return next((key for key, digest in pairs if hmac.compare_digest(given, digest)), None)


def tenant_of(scope: Scope, keys: Sequence[str], user: str | None) -> str:
    """Return whom a request is for: tenants share the engine evenly.

    On a server with keys that is the key, by its place among them, and `user` means nothing: a
    client could invent as many users as it likes. Neither a key nor a user's name goes further
    than here.
    """
    if keys:
        return key_name(_digests(keys).index(_given(scope)))
    if not user:
        return ""
    return "user " + hashlib.sha256(user.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def tenant_asking(scope: Scope, config: ServerConfig, body: ServedBody) -> str:
    """Return whom a body is for. Raises ApiError 403 if it asks to be served before others, and its
    key may not."""
    priority = body.priority or 0
    may_hurry = not config.api_key or (
        bool(config.urgent_api_key) and has_key(scope, config.urgent_api_key)
    )
    if priority < 0 and not may_hurry:
        raise ApiError(
            403,
            f"priority must be 0 or more with this key, got {priority}: a value below 0 would"
            " overtake all other requests. Remove priority, or ask the operator to name the key in"
            " urgent_api_key.",
            "permission_error",
            "priority",
            "priority_not_allowed",
        )
    return tenant_of(scope, config.api_key, body.user)


def reader_of(scope: Scope, keys: Sequence[str]) -> str | None:
    """Return whose requests and prefixes a caller may see: a key its own; without keys, None is
    all."""
    return tenant_of(scope, keys, None) if keys else None


def wrong_key() -> ApiError:
    """Refuse a missing or a wrong key with the same text, which never shows what was sent."""
    return ApiError(
        401,
        "this server needs an API key; send one of its keys as Authorization: Bearer <key>, or as"
        " x-api-key: <key>.",
        "authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
