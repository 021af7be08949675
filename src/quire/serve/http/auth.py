"""API keys: which callers may use which routes.

Each router checks the key as a dependency of the matched route, never by the text of the path. So
no URL or Host header can bypass the check. Only the routers that `create_app` includes as public
need no key. The WebSocket's route calls `has_key` itself.
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
KEY_HEADER = b"x-api-key"  # header that Anthropic's clients use for the key


async def authorised(request: fastapi.Request, api: Api) -> None:
    """Check the API key; dependency of the protected routers. Raises ApiError 401."""
    if not has_key(request.scope, api.config.api_key):
        raise wrong_key()


def has_key(scope: Scope, keys: Iterable[str]) -> bool:
    """Return whether a request has a valid key, or whether the server needs none. The key is in the
    single Authorization header or, without such a header, in the single x-api-key.

    A wrong key takes as long as a right one, because its digest is compared with all keys.
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
    """Return the digest of the request's key; empty without a key."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    given = [value for name, value in headers if name == b"authorization"]
    keys = [value[len(SCHEME) :] for value in given if value[: len(SCHEME)].lower() == SCHEME]
    if not given:
        given = keys = [value for name, value in headers if name == KEY_HEADER]
    if len(given) != 1 or len(keys) != 1:
        return b""
    return hashlib.sha256(keys[0].strip()).digest()


def key_of(scope: Scope, keys: Sequence[str]) -> str | None:
    """Return the server's key that a request uses; None on a server without keys."""
    given = _given(scope)
    pairs = zip(keys, _digests(keys), strict=True)
    return next((key for key, digest in pairs if hmac.compare_digest(given, digest)), None)


def tenant_of(scope: Scope, keys: Sequence[str], user: str | None) -> str:
    """Return the tenant of a request; tenants share the engine evenly.

    On a server with keys, the tenant is the index of the key. `user` is then ignored, because a
    client could invent any number of users. Keys and user names never leave this function in clear
    text.
    """
    if keys:
        return key_name(_digests(keys).index(_given(scope)))
    if not user:
        return ""
    return "user " + hashlib.sha256(user.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def tenant_of_body(scope: Scope, config: ServerConfig, body: ServedBody) -> str:
    """Return the tenant of a body. Raises ApiError 403 if the body has a priority below 0 and its
    key does not allow that."""
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
    """Return the tenant whose requests and prefixes a caller may see: its key's tenant. Without
    keys it is None, which means all."""
    return tenant_of(scope, keys, None) if keys else None


def wrong_key() -> ApiError:
    """Return the error for a missing or a wrong key: the same text, which never shows the key."""
    return ApiError(
        401,
        "this server needs an API key; send one of its keys as Authorization: Bearer <key>, or as"
        " x-api-key: <key>.",
        "authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
