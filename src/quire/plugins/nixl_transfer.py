"""Transfer KV blocks between engines with NIXL (`?via=nixl`): over RDMA if its UCX finds it, else
over shared memory or TCP."""

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from quire.base.errors import MissingDependency
from quire.engine.connectors.direct import Piece, Region
from quire.engine.connectors.store import StoreError

try:
    from nixl._api import nixl_agent, nixl_agent_config
except ImportError as error:
    raise MissingDependency("?via=nixl needs NIXL; pip install 'quire[nixl]'.") from error

BACKEND, KIND = "UCX", "DRAM"
POLL_S = 0.0002


class NixlTransfer:
    """A NIXL agent with a unique name, created on first use. From then on a thread of NIXL polls
    for work without a pause, and occupies a core."""

    def __init__(self) -> None:
        self._registered: list[Any] = []

    @cached_property
    def _agent(self) -> Any:
        config = nixl_agent_config(backends=[BACKEND])
        return nixl_agent(f"quire-{secrets.token_hex(16)}", config)

    def register(self, regions: Sequence[Region]) -> None:
        listed = [(address, num_bytes, 0, "") for address, num_bytes in regions]
        with _errors():
            self._registered.append(self._agent.register_memory(listed, KIND))

    def describe(self) -> bytes:
        with _errors():
            return bytes(self._agent.get_agent_metadata())

    def connect(self, description: bytes) -> str:
        with _errors():
            name = self._agent.add_remote_agent(description)
        return name.decode() if isinstance(name, bytes) else str(name)

    def read(self, peer: str, pieces: Sequence[Piece], timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        with _errors():
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs([(p.target, p.num_bytes, 0) for p in pieces], KIND),
                self._agent.get_xfer_descs([(p.source, p.num_bytes, 0) for p in pieces], KIND),
                peer,
            )
            try:
                state = self._agent.transfer(handle)
                while state == "PROC" and time.monotonic() < until_s:
                    time.sleep(POLL_S)
                    state = self._agent.check_xfer_state(handle)
            finally:
                with contextlib.suppress(Exception):  # it may not have ended
                    self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise StoreError(f"NIXL has not read within {timeout_s} s: its state is {state}.")

    def disconnect(self, peer: str) -> None:
        with contextlib.suppress(Exception):  # it may be gone
            self._agent.remove_remote_agent(peer)

    def close(self) -> None:
        for each in self._registered:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(each)
        self._registered = []


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except Exception as error:  # NIXL's bindings have no common error class
        raise StoreError(f"NIXL: {type(error).__name__}: {error}") from error
