"""Work for a client that may go away: it is cancelled when the connection closes."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from quire.serve.api.errors import ApiError

T = TypeVar("T")
CLIENT_CLOSED = 499


async def disconnected(receive: Receive) -> None:
    """Wait until the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result. Raises ApiError if the client goes first; the work is cancelled
    then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(CLIENT_CLOSED, "the client closed the connection.", code="client_closed")
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
