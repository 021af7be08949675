"""From a request to its one reader, who may be slower than the engine."""

import asyncio

from quire.base.outputs import RequestOutput
from quire.engine.client.output import OpenRequest


class Mailbox:
    """Tells the reader that there is something; a late one gets several steps in one output.

    failed: whether it ends with an error.
    """

    __slots__ = ("_error", "_is_due", "_request", "_waiter")

    def __init__(self, request: OpenRequest) -> None:
        self._request = request
        self._is_due = False
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def failed(self) -> bool:
        return self._error is not None

    def notify(self) -> None:
        """Tell the reader that the request has something to show."""
        self._is_due = True
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Let the reader have what is there, then the error."""
        self._error = error
        self._wake()

    async def take(self) -> RequestOutput:
        """Return what is to be shown since the last time; wait if that is nothing."""
        while not self._is_due:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_due = False
        return self._request.output()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
