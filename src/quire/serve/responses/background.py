"""Responses that run in the background: clients can read, follow and cancel them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from quire.serve.errors import as_api_error
from quire.serve.http.sse import encode

Json = dict[str, Any]
Pieces = AsyncGenerator[list[Json], None]
Stop = Callable[[str, Json | None], list[Json]]  # from a status and an error to the last events


def event(error_fields: Json) -> bytes:
    """Return the bytes of a server-sent event."""
    return (
        b"event: "
        + str(error_fields["type"]).encode()
        + b"\ndata: "
        + encode(error_fields)
        + b"\n\n"
    )


def error_json(error: BaseException, request_id: str) -> Json:
    """Return the error of a failed response, with a code of this API."""
    error_fields = as_api_error(error, request_id)
    code = "invalid_prompt" if error_fields.status == 400 else "server_error"
    return {"code": code, "message": error_fields.message}


def error_event(error: BaseException, request_id: str = "") -> bytes:
    """Return the error event of a stream that failed before its response began."""
    error_fields = as_api_error(error, request_id)
    fields = {
        "message": error_fields.message,
        "code": str(error_fields.code),
        "param": error_fields.param,
    }
    return event({"type": "error", "sequence_number": 0, **fields})


class RunningResponse:
    """A response that runs in the background. response: returns its present state. stop: returns
    the last events of an early end. keep: called with all events at the end."""

    def __init__(
        self,
        response_id: str,
        response: Callable[[], Json],
        stop: Stop,
        keep: Callable[[Sequence[bytes]], None],
    ) -> None:
        self.id = response_id
        self.response = response
        self._stop = stop
        self._keep = keep
        self._events: list[bytes] = []
        self._is_over = False
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, pieces: Pieces) -> None:
        """Begin to generate the response, in a task of its own."""
        self._task = asyncio.create_task(self._make(pieces))

    async def cancel(self) -> None:
        """Cancel the response, and wait for its end. Has no effect on a response that has ended."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait((self._task,))
        if not self._is_over:
            self._add(self._stop("cancelled", None))
            self._end()

    async def follow(self, first: int) -> AsyncGenerator[bytes, None]:
        """Yield the events from number `first` on, until the last one."""
        number = first
        while True:
            while number < len(self._events):
                yield self._events[number]
                number += 1
            if self._is_over:
                return
            await self._news.wait()

    async def _make(self, pieces: Pieces) -> None:
        try:
            async with aclosing(pieces):
                async for events in pieces:
                    self._add(events)
        except Exception as error:
            self._add(self._stop("failed", error_json(error, self.id)))
        self._end()

    def _add(self, events: list[Json]) -> None:
        self._events += map(event, events)
        self._wake_followers()

    def _end(self) -> None:
        self._is_over = True
        self._keep(self._events)
        self._wake_followers()

    def _wake_followers(self) -> None:
        """Wake all followers."""
        self._news.set()
        self._news = asyncio.Event()
