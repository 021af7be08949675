"""Which web pages may change what a server holds.

A browser lets every page send simple POSTs to every address, without asking the server first. It
only hides the answer. On a server without keys such a request could abort requests, reset the
prefix cache or fill the space for files. So each request that may change something is refused when
its headers name another site: `Sec-Fetch-Site`, or else `Origin` (both set by the browser, neither
by a page). Clients that are no browsers send none of the two, and pass.
"""

from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.base.config import ServerConfig
from quire.serve.api.error_shapes import error_answer
from quire.serve.api.errors import ApiError
from quire.serve.api.validation_errors import shown

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # their routes change nothing
EVERY_ORIGIN = "*"
DEFAULT_PORTS = {"http": 80, "https": 443}


class OriginCheck:
    """Plain ASGI middleware: refuses state-changing HTTP requests from pages of other sites. It
    covers every route, also ones that do not exist yet."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app, self._config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None
        if scope["type"] == "http" and scope["method"] not in SAFE_METHODS:
            refusal = _refusal_of_request(scope, self._config)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await error_answer(refusal, scope)(scope, receive, send)


def refusal_of_handshake(scope: Scope, config: ServerConfig) -> ApiError | None:
    """Return why a WebSocket is refused; None if it is allowed. Only allowed origins may open one
    from a browser, the server's own page included."""
    foreign = [each for each in _values(scope, b"origin") if not _is_allowed(each, config)]
    return origin_not_allowed(foreign[0]) if foreign else None


def origin_not_allowed(origin: str) -> ApiError:
    """Return the error for a page of another site."""
    text = (
        f"web pages from {shown(origin)} may not use this server. To allow them, start the server"
        " with --allowed-origins and the page's origin, such as https://app.example."
    )
    return ApiError(403, text, "permission_error", code="origin_not_allowed")


def _refusal_of_request(scope: Scope, config: ServerConfig) -> ApiError | None:
    origins, sites = _values(scope, b"origin"), _values(scope, b"sec-fetch-site")
    if origins and all(_is_allowed(origin, config) for origin in origins):
        return None
    if EVERY_ORIGIN in config.allowed_origins:
        return None
    if sites == ["same-origin"]:  # also behind a proxy that changes the Host header
        return None
    if any(site != "none" for site in sites):
        return origin_not_allowed(origins[0] if origins else "another site")
    hosts = _values(scope, b"host")
    foreign = [each for each in origins if not _is_own(each, hosts)]
    return origin_not_allowed(foreign[0]) if foreign else None


def _is_allowed(origin: str, config: ServerConfig) -> bool:
    return EVERY_ORIGIN in config.allowed_origins or origin in config.allowed_origins


def _is_own(origin: str, hosts: list[str]) -> bool:
    """Return whether an origin names the host and port that the request was sent to."""
    try:
        parts = urlsplit(origin)
        port = DEFAULT_PORTS.get(parts.scheme)
        here = [urlsplit(f"//{host}") for host in hosts]
        return port is not None and [(parts.hostname, parts.port or port)] == [
            (each.hostname, each.port or port) for each in here
        ]
    except ValueError:  # no port, or no address in brackets
        return False


def _values(scope: Scope, header: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for name, value in scope["headers"] if name == header]
