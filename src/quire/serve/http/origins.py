"""Checks that keep web pages of other sites from using a server, by Origin and by Host.

A browser lets every page send simple POSTs to every address without a prior check. It only hides
the response. On a server without keys such a request could abort requests, reset the prefix cache
or fill the space for files. So a request that may change something is refused when its headers name
another site: `Sec-Fetch-Site`, or else `Origin`. The browser sets both, and a page cannot. Clients
other than browsers send neither of them, and pass.

A browser also lets a page send requests to the host that it came from. The owner of that host's
name can point it to 127.0.0.1 later (DNS rebinding), and so reach servers on this machine. The Host
header still has the name. A server on the loopback interface without keys therefore answers only to
addresses, to `localhost` and names below it, and to `--allowed-hosts`. A name such as
`app.localhost` cannot have an owner (RFC 6761). A Host header that is not a name or an address with
an optional port is refused. A request without it (HTTP/1.0) passes, because browsers always send
it.
"""

import ipaddress
import re
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.base.settings.config import ServerConfig
from quire.serve.bodies.validation_errors import shown
from quire.serve.error_handlers import error_answer
from quire.serve.errors import ApiError

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # their routes change nothing
EVERY = "*"
DEFAULT_PORTS = {"http": 80, "https": 443}
LOCALHOST = "localhost"
POLICY = 1008  # close code of a WebSocket (RFC 6455, 7.4.1)
# [IPv6], a name or IPv4, then an optional port, which may be empty (RFC 3986, 3.2)
HOST = re.compile(r"(?:\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<name>[^\[\]:@/?#\s]+))(?::[0-9]{0,5})?")


class OriginCheck:
    """Middleware that refuses state-changing HTTP requests from pages of other sites. It covers
    every route, including future ones."""

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
    """Return the error for a refused WebSocket, or None. A browser may open one only from an
    allowed origin. That rule includes the server's own page."""
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
    if EVERY in config.allowed_origins:
        return None
    if sites == ["same-origin"]:  # also behind a proxy that changes the Host header
        return None
    if any(site != "none" for site in sites):
        return origin_not_allowed(origins[0] if origins else "another site")
    hosts = _values(scope, b"host")
    foreign = [each for each in origins if not _is_own(each, hosts)]
    return origin_not_allowed(foreign[0]) if foreign else None


def _is_allowed(origin: str, config: ServerConfig) -> bool:
    return EVERY in config.allowed_origins or origin in config.allowed_origins


def _is_own(origin: str, hosts: list[str]) -> bool:
    """Return whether an origin equals the host and port that the request was sent to."""
    try:
        parts = urlsplit(origin)
        port = DEFAULT_PORTS.get(parts.scheme)
        here = [urlsplit(f"//{host}") for host in hosts]
        return port is not None and [(parts.hostname, parts.port or port)] == [
            (each.hostname, each.port or port) for each in here
        ]
    except ValueError:  # invalid port, or invalid address in brackets
        return False


def _values(scope: Scope, header: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for name, value in scope["headers"] if name == header]


class HostCheck:
    """Middleware that refuses requests and WebSocket handshakes to unknown host names. It checks
    TCP connections only, because no page can reach a Unix socket."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._is_loopback_only = not config.allowed_hosts
        self._names = {_normal(name) for name in config.allowed_hosts}
        if not is_address(config.host):
            self._names.add(_normal(config.host))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not self._is_checked(scope):
            await self._app(scope, receive, send)
            return
        wrong = [host for host in _hosts(scope) if not self._is_ours(host)]
        if not wrong:
            await self._app(scope, receive, send)
        elif scope["type"] == "http" or "websocket.http.response" in scope.get("extensions", {}):
            await error_answer(_refusal_of_host(wrong[0]), scope)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": POLICY})

    def _is_checked(self, scope: Scope) -> bool:
        """Return whether a request came over TCP to an interface with a name check. The address of
        the connection decides, because `--host` may be a name."""
        server = scope.get("server")
        if server is None or server[1] is None or not is_address(server[0]):
            return False
        return not self._is_loopback_only or ipaddress.ip_address(server[0]).is_loopback

    def _is_ours(self, host: str) -> bool:
        parts = HOST.fullmatch(host)
        if parts is None:
            return False
        if parts["ipv6"] is not None:
            return _is_ipv6(parts["ipv6"])
        name = parts["name"]
        return is_address(name) or _is_localhost(name) or _normal(name) in self._names


def checks_hosts(config: ServerConfig) -> bool:
    """Return whether a server checks Host headers. It does if its settings list names, or if it has
    no keys and may listen on the loopback interface."""
    if EVERY in config.allowed_hosts:
        return False
    may_be_loopback = not is_address(config.host) or ipaddress.ip_address(config.host).is_loopback
    return bool(config.allowed_hosts) or (not config.api_key and may_be_loopback)


def is_address(host: str) -> bool:
    """Return whether a host is an IP address; IPv6 without brackets."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _normal(name: str) -> str:
    """Return the form of a name for comparisons: lower case, without the final dot."""
    return name.lower().removesuffix(".")


def _is_localhost(name: str) -> bool:
    """Return whether a name is `localhost` or a name below it."""
    *above, last = _normal(name).split(".")
    return last == LOCALHOST and all(above)


def _hosts(scope: Scope) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]


def _refusal_of_host(host: str) -> ApiError:
    text = (
        f"this server does not answer to the name {shown(host)}. It has no API key, and a web page"
        " could make this name point to it. Use its address or localhost, add the host to"
        " allowed_hosts, or give the server an API key."
    )
    return ApiError(403, text, "permission_error", code="host_not_allowed")
