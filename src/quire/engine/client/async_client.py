"""The interface of an engine for asyncio, and the base class of clients that wrap another client.

    front end -> ObservedClient -> LeasedClient -> FleetClient or RemoteClient -> core

`AsyncClient` says what each method means; its implementations do not repeat it.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Protocol, cast

from quire.base.errors import STEP_FAILED, RequestError, StepFailed
from quire.base.live import LiveFrame
from quire.base.messages import SLEEPING_PARTS, PinnedPrefix, Ready, Request, RetainedRequest
from quire.base.requests.outputs import RequestOutput

PAUSE_MODES = ("abort", "wait", "keep")
SLEEP_MODES = ("abort", "wait")


class AsyncClient(Protocol):
    """Engine as a front end sees it.

    tenant: whose requests, prefixes or answers are meant; None means every tenant's.
    core_id: the core that has the request, where there are several; None means any.
    Every method but `is_alive` and `close` raises EngineDead if no core answers.
    """

    @property
    def ready(self) -> Ready:
        """Return the engine's limits and settings. Raise EngineDead before a core first
        reported them."""
        ...

    @property
    def is_alive(self) -> bool:
        """Return whether the engine accepts requests."""
        ...

    def check(self, request: Request) -> None:
        """Raise RequestError if the engine can never serve this request."""
        ...

    def generate(
        self, request: Request, prompt_text: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yield what is due by the request's output_kind, until its output is finished.

        A slow reader gets several steps in one output. Leaving early ends the request. Raise
        RequestError if the core refuses the request, or EngineBusy if it has no room now.
        """
        ...

    def append(self, request_id: str, token_ids: list[int], is_last: bool = False) -> None:
        """Extend the prompt of a request with is_open whose output is awaited. Raise RequestError
        if the prompt cannot take the tokens, or if the request has ended."""
        ...

    def steer(
        self, request_id: str, priority: int | None = None, pause_s: float | None = None
    ) -> None:
        """Change the priority of a request whose output is awaited, or pause it for at most pause_s
        seconds; 0.0 resumes it. A request that has ended is ignored."""
        ...

    async def metrics(self) -> str:
        """Return the metrics in Prometheus' text format."""
        ...

    async def timeline(self, request_id: str, tenant: str | None = None) -> str:
        """Return what happened to a request, as JSON; empty if the request is unknown."""
        ...

    async def live(self, core: int = 0) -> LiveFrame:
        """Return what one core computes now. Raise RequestError if there is no such core."""
        ...

    async def prefixes(self, tenant: str | None = None) -> list[PinnedPrefix]:
        """Return the pinned prefixes, oldest first."""
        ...

    async def unpin(self, prefix_id: str, tenant: str | None = None) -> bool:
        """Stop pinning a prefix. Return False if there is none of that id."""
        ...

    async def held(
        self, request_id: str | None = None, index: int = 0, tenant: str | None = None
    ) -> list[RetainedRequest]:
        """Return the held requests, oldest first. With request_id, return only that request's
        sequence `index`, held or unfinished, with its tokens."""
        ...

    async def keep(
        self, request_id: str, keep_s: float, tenant: str | None = None, core_id: int | None = None
    ) -> None:
        """Hold a request for so many seconds from now on; 0.0 drops it."""
        ...

    async def rewind(
        self,
        request_id: str,
        index: int,
        num_tokens: int,
        tenant: str | None = None,
        core_id: int | None = None,
    ) -> None:
        """Truncate a held sequence to its first num_tokens tokens."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Stop using all blocks that were cached before."""
        ...

    async def update_weights(
        self, path: str, version: str = "", *, is_partial: bool = False
    ) -> str:
        """Load other weights from a path that the core's process can read. Return
        their version once later tokens are made by them: the given one, or a number. is_partial:
        the path has some of the tensors, or deltas of them, and the rest stays. Raise
        RequestError if they cannot be used; the old ones stay then."""
        ...

    async def pause(self, is_paused: bool | None, drains: bool = False) -> bool:
        """Stop all requests between two steps, or continue them. Requests that arrive meanwhile
        wait. drains: let the present requests finish first, unless the engine is paused already.
        None: change nothing. Return whether the engine is paused, once no step runs or it
        continues."""
        ...

    async def set_sleep(
        self, level: int = 0, wakes: Sequence[str] = (), *, aborts: bool = True
    ) -> bool:
        """Begin to sleep on level 1 or 2, or wake parts of a sleeping engine (SLEEPING_PARTS), or
        change nothing. Requests that arrive meanwhile wait. aborts: end the present requests
        with what they have, instead of letting them finish. Return whether the engine sleeps, once
        that has happened. Raise RequestError if it is impossible."""
        ...

    async def cancel(self, request_ids: list[str] | None, tenant: str | None = None) -> list[str]:
        """End requests of any client, or all of them. Their readers get what there is, with
        finish_reason `abort`. Return the ids of the requests that were open."""
        ...

    async def close(self) -> None:
        """End the connections to the engine."""
        ...


class ForwardingClient(AsyncClient):
    """Forward every call to another client. A subclass overrides what it changes."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    @property
    def ready(self) -> Ready:
        return self._client.ready

    @property
    def is_alive(self) -> bool:
        return self._client.is_alive

    def check(self, request: Request) -> None:
        self._client.check(request)

    def generate(
        self, request: Request, prompt_text: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        return self._client.generate(request, prompt_text)

    def append(self, request_id: str, token_ids: list[int], is_last: bool = False) -> None:
        self._client.append(request_id, token_ids, is_last)

    def steer(
        self, request_id: str, priority: int | None = None, pause_s: float | None = None
    ) -> None:
        self._client.steer(request_id, priority, pause_s)

    async def metrics(self) -> str:
        return await self._client.metrics()

    async def timeline(self, request_id: str, tenant: str | None = None) -> str:
        return await self._client.timeline(request_id, tenant)

    async def live(self, core: int = 0) -> LiveFrame:
        return await self._client.live(core)

    async def prefixes(self, tenant: str | None = None) -> list[PinnedPrefix]:
        return await self._client.prefixes(tenant)

    async def unpin(self, prefix_id: str, tenant: str | None = None) -> bool:
        return await self._client.unpin(prefix_id, tenant)

    async def held(
        self, request_id: str | None = None, index: int = 0, tenant: str | None = None
    ) -> list[RetainedRequest]:
        return await self._client.held(request_id, index, tenant)

    async def keep(
        self, request_id: str, keep_s: float, tenant: str | None = None, core_id: int | None = None
    ) -> None:
        await self._client.keep(request_id, keep_s, tenant, core_id)

    async def rewind(
        self,
        request_id: str,
        index: int,
        num_tokens: int,
        tenant: str | None = None,
        core_id: int | None = None,
    ) -> None:
        await self._client.rewind(request_id, index, num_tokens, tenant, core_id)

    async def reset_prefix_cache(self) -> None:
        await self._client.reset_prefix_cache()

    async def update_weights(
        self, path: str, version: str = "", *, is_partial: bool = False
    ) -> str:
        return await self._client.update_weights(path, version, is_partial=is_partial)

    async def pause(self, is_paused: bool | None, drains: bool = False) -> bool:
        return await self._client.pause(is_paused, drains)

    async def set_sleep(
        self, level: int = 0, wakes: Sequence[str] = (), *, aborts: bool = True
    ) -> bool:
        return await self._client.set_sleep(level, wakes, aborts=aborts)

    async def cancel(self, request_ids: list[str] | None, tenant: str | None = None) -> list[str]:
        return await self._client.cancel(request_ids, tenant)

    async def close(self) -> None:
        await self._client.close()


async def pin(client: AsyncClient, request: Request) -> PinnedPrefix:
    """Send a request to pin, and wait until it is computed. Raises RequestError as `generate`
    does, and if the prefix was not pinned; StepFailed if a step failed on it."""
    outputs = cast(AsyncGenerator[RequestOutput, None], client.generate(request))
    reason, error = None, None
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            [done] = output.outputs
            reason, error = done.finish_reason, done.error
    if error is not None and error.code == STEP_FAILED:
        raise StepFailed(f"{request.request_id}: {error.message}")
    mine = await client.prefixes(request.tenant)
    found = [prefix for prefix in mine if prefix.id == request.request_id]
    if reason == "abort":
        raise RequestError("the prefix was not pinned: it was removed while it was computed.")
    if reason != "pinned":
        why = reason if error is None else error.message
        raise RequestError(f"the prefix was not pinned: {why}")
    if not found:
        raise RequestError("the prefix was pinned, but its ttl_s has passed already; raise ttl_s.")
    return found[0]


async def pause(client: AsyncClient, mode: str, *, clear_cache: bool) -> None:
    """Pause an engine as vLLM's `/pause` does. mode: `abort` ends running requests with their
    output so far, `wait` lets them finish first, `keep` freezes them. clear_cache: whether to stop
    using the blocks cached so far. Raises RequestError for another mode."""
    if mode not in PAUSE_MODES:
        raise RequestError(f"mode={mode!r} is unknown; use {', '.join(PAUSE_MODES)}.", "mode")
    if mode == "abort":  # the ends are reported by plans, so the pause waits for them
        await asyncio.gather(client.pause(True, drains=True), client.cancel(None))
    else:
        await client.pause(True, drains=mode == "wait")
    if clear_cache:
        await client.reset_prefix_cache()


async def sleep(client: AsyncClient, level: int, mode: str) -> None:
    """Let an engine sleep as vLLM's `/sleep` does. mode: see `is_aborting`. Raises RequestError
    as `AsyncClient.set_sleep` does."""
    await client.set_sleep(checked_level(level), aborts=is_aborting(mode))


async def wake_up(client: AsyncClient, tags: Sequence[str] | None) -> None:
    """Wake the tagged parts of an engine, or all. Raises as `AsyncClient.set_sleep` does."""
    await client.set_sleep(wakes=SLEEPING_PARTS if tags is None else tags)


def is_aborting(mode: str) -> bool:
    """Return whether a sleep's mode ends the present requests: `abort` does so with their output so
    far, `wait` lets them finish. Raises RequestError for `keep`, and another mode."""
    if mode not in SLEEP_MODES:
        lost = " (a sleep loses the blocks that keep would need)" if mode == "keep" else ""
        use = " or ".join(SLEEP_MODES)
        raise RequestError(f"mode={mode!r} is no mode of a sleep{lost}; use {use}.", "mode")
    return mode == "abort"


def checked_level(level: int) -> int:
    """Return the level of a sleep. Raises RequestError if it is not 1 or 2."""
    if level not in (1, 2):
        raise RequestError(f"level={level} is unknown; use 1 or 2.", "level")
    return level
