"""HTTP/1.1 for clients that take their time: uvicorn's protocol, with an end to waiting.

uvicorn times out a connection between two requests, but not one that never finishes the head of
its request: a few thousand of those would use up all open files.
"""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 60.0


class TimedProtocol(H11Protocol):
    """Closes a connection whose next request has not begun `HEAD_S` after its first byte, or after
    the connection was made."""

    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _watch(self) -> None:
        """Let the time run while there is no request."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._closing is None:
            self._closing = self.loop.call_later(HEAD_S, self.transport.close)

    def _forget(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
