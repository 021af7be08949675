"""Which names a server answers to, so that no page of a browser reaches it by rebinding one.

A browser lets a page ask the host that it came from. Who owns that host's name can let it mean
127.0.0.1 a moment later (DNS rebinding), and so reach what listens on this machine; but the Host
header still says the name. A server that any page of this machine's browsers could reach, which is
one on the loopback interface and without keys, answers to addresses and to `localhost` alone, and
to what `--allowed-hosts` names.
"""

import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.base.config import ServerConfig
from quire.serve.api.error_shapes import error_answer
from quire.serve.api.errors import ApiError
from quire.serve.api.validation_errors import shown

LOCALHOST = "localhost"
EVERY_HOST = "*"
POLICY = 1008  # why a WebSocket is closed (RFC 6455, 7.4.1)


class HostCheck:
    """Plain ASGI: refuses requests, and handshakes of WebSockets, to other names. What does not
    come over TCP is of this server's own processes, or of a Unix socket, which no page reaches."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._names = {name.lower().rstrip(".") for name in config.allowed_hosts}
        if not is_address(config.host):
            self._names.add(config.host.lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not _is_tcp(scope):
            await self._app(scope, receive, send)
            return
        wrong = [host for host in _hosts(scope) if not self._is_ours(host)]
        if not wrong:
            await self._app(scope, receive, send)
        elif scope["type"] == "http" or "websocket.http.response" in scope.get("extensions", {}):
            await error_answer(_refusal(wrong[0]), scope)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": POLICY})

    def _is_ours(self, host: str) -> bool:
        name = _without_port(host).lower().rstrip(".")
        is_local = name == LOCALHOST or name.endswith(f".{LOCALHOST}")
        return is_local or name in self._names or is_address(name)


def checks_hosts(config: ServerConfig) -> bool:
    """Return whether a server looks at the names: if it is told which, or listens on the loopback
    interface and is open to all there."""
    if EVERY_HOST in config.allowed_hosts:
        return False
    return bool(config.allowed_hosts) or (not config.api_key and _is_loopback(config.host))


def is_address(host: str) -> bool:
    """Return whether a host is an IP address, of IPv6 with or without brackets."""
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    if host.lower().rstrip(".") == LOCALHOST:
        return True
    return is_address(host) and ipaddress.ip_address(host).is_loopback


def _is_tcp(scope: Scope) -> bool:
    server = scope.get("server")
    return server is not None and server[1] is not None and is_address(server[0])


def _hosts(scope: Scope) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]


def _without_port(host: str) -> str:
    """Return the name or address of a Host header: `name:80`, `[::1]:80`."""
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.partition(":")[0]


def _refusal(host: str) -> ApiError:
    text = (
        f"this server does not answer to the name {shown(host)}: it is open to all on this machine,"
        " and a page in a browser could make a name mean it. Use its address or localhost, name the"
        " host in allowed_hosts, or give the server an API key."
    )
    return ApiError(403, text, "permission_error", code="host_not_allowed")
