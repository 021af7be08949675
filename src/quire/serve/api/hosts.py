"""Which names a server answers to, so that no page of a browser reaches it by rebinding one.

A browser lets a page ask the host that it came from. Who owns that host's name can let it mean
127.0.0.1 a moment later (DNS rebinding), and so reach what listens on this machine; but the Host
header still says the name. A server that any page of this machine's browsers could reach, which is
one on the loopback interface and without keys, answers only to addresses, to `localhost` and the
names below it (`app.localhost`: nobody can own one, RFC 6761), and to what `--allowed-hosts` names.
A Host header that is not a name or an address with at most a port is refused, whatever it begins
with. A request without the header (HTTP/1.0) passes: no browser sends one.
"""

import ipaddress
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.base.config import ServerConfig
from quire.serve.api.error_shapes import error_answer
from quire.serve.api.errors import ApiError
from quire.serve.api.validation_errors import shown

LOCALHOST = "localhost"
EVERY_HOST = "*"
POLICY = 1008  # why a WebSocket is closed (RFC 6455, 7.4.1)
# [IPv6] or a name or IPv4, then perhaps a port, which may be empty (RFC 3986, 3.2)
HOST = re.compile(r"(?:\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<name>[^\[\]:@/?#\s]+))(?::[0-9]{0,5})?")


class HostCheck:
    """Plain ASGI: refuses requests, and handshakes of WebSockets, to other names. What does not
    come over TCP is of this server's own processes, or of a Unix socket, which no page reaches."""

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
            await error_answer(_refusal(wrong[0]), scope)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": POLICY})

    def _is_checked(self, scope: Scope) -> bool:
        """Return whether a request came over TCP, and to an interface whose names are checked: a
        server that listens on a name learns from its connections what the name means."""
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
    """Return whether a server checks the names of Host headers: if its settings list names, or if
    it has no keys and listens on the loopback interface, also by a name that means it."""
    if EVERY_HOST in config.allowed_hosts:
        return False
    may_be_loopback = not is_address(config.host) or ipaddress.ip_address(config.host).is_loopback
    return bool(config.allowed_hosts) or (not config.api_key and may_be_loopback)


def is_address(host: str) -> bool:
    """Return whether a host is an IP address, of IPv6 without brackets."""
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
    """Return a name as it is compared: in lower case, without the dot of the root."""
    return name.lower().removesuffix(".")


def _is_localhost(name: str) -> bool:
    """Return whether a name is `localhost` or below it."""
    *above, last = _normal(name).split(".")
    return last == LOCALHOST and all(above)


def _hosts(scope: Scope) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]


def _refusal(host: str) -> ApiError:
    text = (
        f"this server does not answer to the name {shown(host)}. It has no API key, and a web page"
        " could make this name point to it. Use its address or localhost, add the host to"
        " allowed_hosts, or give the server an API key."
    )
    return ApiError(403, text, "permission_error", code="host_not_allowed")
