"""Peers that requests name: `remote_host` and `remote_port` of `kv_transfer_params`.

A request chooses among the peers of the operator's settings (`--kv-store peer://HOST:PORT`), by the
same text. It never makes an engine connect to another address. If a request names an unknown peer,
a warning is logged, and its prompt is looked up without a named peer. Missing blocks are computed.
"""

from collections.abc import Sequence

import msgspec

from quire.base.clock import MonotonicClock
from quire.base.messages import Request
from quire.base.settings.cache_config import SERVE
from quire.engine.connectors.make import VIA
from quire.engine.observability.log_throttle import ThrottledLog

PEER = "peer:"
ANYWHERE = ("0.0.0.0", "::", "[::]", "*", "")  # addresses to listen on that cannot be connected to


class NamedPeers:
    """Choice of a request's stores by the peer that it names. stores: from the settings, as
    NAME:ADDRESS."""

    def __init__(self, stores: Sequence[str]) -> None:
        host_ports = {i: _host_port(s, PEER) for i, s in enumerate(stores) if s.startswith(PEER)}
        self._others = tuple(i for i in range(len(stores)) if i not in host_ports)
        self._numbers = {host_port: i for i, host_port in host_ports.items()}
        served = [_host_port(s, SERVE) for s in stores if s.startswith(SERVE)]
        host, _, port = (served or [""])[0].rpartition(":")
        # Address of this engine's blocks, if its settings have one
        self.address = "" if host in ANYWHERE or port == "0" else f"{host}:{port}"
        self._log = ThrottledLog(MonotonicClock())

    def choose(self, request: Request) -> Request:
        """Return the request with the stores to search, and the address that its response may
        report."""
        transfer = request.kv_transfer
        if transfer is None:
            return request
        number = self._numbers.get(transfer.peer.lower())
        if transfer.peer and number is None and self._numbers:
            self._log.warn(
                "stranger",
                f"a request names the peer {transfer.peer!r}, which is not in kv_store. Only the"
                " peers in kv_store are searched; add it there if you trust it",
            )
        stores = () if number is None else tuple(sorted((*self._others, number)))
        address = self.address if transfer.keeps else ""
        chosen = msgspec.structs.replace(transfer, stores=stores, address=address)
        return msgspec.structs.replace(request, kv_transfer=chosen)


def _host_port(setting: str, kind: str) -> str:
    """Return HOST:PORT of a setting."""
    return setting.removeprefix(kind).removeprefix("//").partition(VIA)[0].lower()
