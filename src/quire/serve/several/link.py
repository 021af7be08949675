"""Connection of an API process to the supervisor: leases on models, and the states of all models
(`serve/several/messages.py`)."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from quire.base.errors import EngineBusy, EngineDead, EngineError
from quire.engine.wire.wire import LENGTH, body_length
from quire.serve.several.messages import (
    LOADED,
    LOADING,
    MAX_WIRE_BYTES,
    UNLOADED,
    Deny,
    FromManager,
    GiveBack,
    ModelState,
    RequestLease,
    States,
    UnloadModel,
    link_codec,
)

logger = logging.getLogger("quire")

MAX_WAITING = 1024  # maximum number of requests per model that wait for it, in one API process

_NO_SUPERVISOR = "the process that loads models does not answer; the server is ending."


@dataclass(eq=False)
class Lease:
    """A granted lease on a model."""

    number: int
    num_open: int = 0  # number of requests that use it
    is_open: bool = True  # whether more requests may use it


@dataclass
class _LeaseRequest:
    """A requested lease, and the requests that wait for it."""

    number: int
    waiting: set["asyncio.Future[Lease]"] = field(default_factory=set)


class ModelLink:
    """Leases on models by their first names. wait_s: maximum wait for a lease, in seconds."""

    def __init__(self, path: Path, wait_s: float) -> None:
        self._path = path
        self._wait_s = wait_s
        self._codec = link_codec()
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._leases: dict[str, Lease] = {}  # leases that new requests may use, if open
        self._requested: dict[str, _LeaseRequest] = {}
        self._num_leases = 0
        self._changed = asyncio.Event()
        self.states: dict[str, ModelState] = {}

    async def start(self) -> None:
        """Connect and receive the states of all models. Raise EngineDead without an answer."""
        try:
            reader, self._writer = await asyncio.open_unix_connection(str(self._path))
        except OSError as error:
            raise EngineDead(_NO_SUPERVISOR) from error
        self._task = asyncio.create_task(self._follow(reader))
        await self._wait_for_states(lambda: bool(self.states))

    async def wait_until_settled(self) -> None:
        """Wait until no model is being loaded."""
        await self._wait_for_states(
            lambda: all(each.state != LOADING for each in self.states.values())
        )

    async def wait_for_state(self, model: str, states: Collection[str]) -> None:
        """Wait until a model is in one of these states."""
        await self._wait_for_states(lambda: self.states[model].state in states)

    @contextlib.asynccontextmanager
    async def lease(self, model: str, wait_s: float | None = None) -> AsyncIterator[None]:
        """Load a model, if necessary, and keep it loaded while the block runs. wait_s: the
        caller's own limit, if shorter. Raise EngineDead if loading fails, EngineBusy if it takes
        too long."""
        granted_lease = self._leases.get(model)
        if granted_lease is not None and granted_lease.is_open:
            granted_lease.num_open += 1
        else:
            granted_lease = await self._wait(model, wait_s)
        try:
            yield
        finally:
            self._leave(model, granted_lease)

    def deny_all(self, why: str) -> None:
        """Fail all waiting requests."""
        for requested in self._requested.values():
            _deny(requested, why)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()

    # ---- leases ------------------------------------------------------------------------------

    async def _wait(self, model: str, wait_s: float | None) -> Lease:
        """Wait for a lease. A granted lease already counts its waiters."""
        requested = self._request_lease(model)
        granted: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        requested.waiting.add(granted)
        seconds = self._wait_s if wait_s is None else min(wait_s, self._wait_s)
        try:
            async with asyncio.timeout(seconds):
                return await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._leave(model, granted.result())
            if isinstance(error, TimeoutError):
                raise EngineBusy(
                    f"model {model} was not loaded within {seconds:g} s ({self._why_not(model)});"
                    " try again later."
                ) from None
            raise
        finally:
            requested.waiting.discard(granted)
            if not requested.waiting and self._requested.get(model) is requested:
                del self._requested[model]
                self._send(GiveBack(model, requested.number))

    def _request_lease(self, model: str) -> _LeaseRequest:
        """Return the requested lease on a model; request one if there is none. Raise EngineDead if
        the supervisor does not answer, EngineBusy if too many requests wait."""
        if self._task is None or self._task.done():
            raise EngineDead(_NO_SUPERVISOR)
        requested = self._requested.get(model)
        if requested is None:
            self._num_leases += 1
            requested = self._requested[model] = _LeaseRequest(self._num_leases)
            self._send(RequestLease(model, requested.number))
        if len(requested.waiting) >= MAX_WAITING:
            raise EngineBusy(
                f"{MAX_WAITING} requests are waiting for model {model} already; try again later."
            )
        return requested

    def _leave(self, model: str, granted_lease: Lease) -> None:
        """End one use of a lease; return the lease after its last use."""
        granted_lease.num_open -= 1
        if granted_lease.num_open:
            return
        if self._leases.get(model) is granted_lease:
            del self._leases[model]
        self._send(GiveBack(model, granted_lease.number))

    def _why_not(self, model: str) -> str:
        """Return why a model is not loaded, for an error message."""
        state = self.states[model].state
        others = [each.name for each in self.states.values() if each.state == LOADED]
        if state == UNLOADED and others:
            return f"its memory is used by {', '.join(others)}"
        return f"it is {state}"

    # ---- the wire ----------------------------------------------------------------------------

    async def _wait_for_states(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            if self._task is None or self._task.done():
                raise EngineDead(_NO_SUPERVISOR)
            self._changed.clear()
            await self._changed.wait()

    def _send(self, message: msgspec.Struct) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(self._codec.encode(message))

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        """Handle messages until the connection ends; then deny all waiting and new leases."""
        try:
            while True:
                head = await reader.readexactly(LENGTH.size)
                body = await reader.readexactly(body_length(head, MAX_WIRE_BYTES))
                self._take(self._codec.decode(body))
        except (asyncio.IncompleteReadError, OSError):
            pass
        except EngineError as error:
            logger.error("the connection to the process that loads models failed: %s", error)
        finally:
            self.deny_all(_NO_SUPERVISOR)
            self._changed.set()

    def _take(self, message: FromManager) -> None:
        if isinstance(message, States):
            self.states = {each.name: each for each in message.models}
            self._changed.set()
        elif isinstance(message, UnloadModel):
            granted_lease = self._leases.get(message.model)
            if granted_lease is not None:
                granted_lease.is_open = False
        else:
            requested = self._requested.get(message.model)
            if requested is None or requested.number != message.lease:
                return  # all waiting requests have ended, and the lease was returned
            del self._requested[message.model]
            if isinstance(message, Deny):
                why = f"model {message.model} is not available: {message.why}"
                _deny(requested, why)
            else:
                self._grant(message.model, requested)

    def _grant(self, model: str, requested: _LeaseRequest) -> None:
        granted_lease = Lease(requested.number)
        for granted in requested.waiting:
            if not granted.done():
                granted_lease.num_open += 1
                granted.set_result(granted_lease)
        if granted_lease.num_open:
            self._leases[model] = granted_lease
        else:
            self._send(GiveBack(model, granted_lease.number))


def _deny(requested: _LeaseRequest, why: str) -> None:
    for granted in requested.waiting:
        if not granted.done():
            granted.set_exception(EngineDead(why))
