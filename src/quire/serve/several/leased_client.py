"""Client of one model of several: each request loads the model and keeps it loaded."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import cast

import msgspec

from quire.base.clock import Clock, MonotonicClock
from quire.base.errors import EngineDead, RequestError
from quire.base.live import LiveFrame
from quire.base.messages import CancelRequests, PinnedPrefix, Request, RetainedRequest
from quire.base.requests.outputs import RequestOutput
from quire.engine.client.async_client import ForwardingClient
from quire.engine.client.fleet import CoreClient
from quire.engine.client.output import ABORTED, OpenRequest
from quire.serve.several.link import ModelLink
from quire.serve.several.messages import DEAD, FAILED, LOADING, UNLOADED, UNLOADING

READY_S = 60.0  # time for a loaded core to answer this process, too


@dataclass
class _Waiting:
    """A request that waits for its model. scope: time limit that `end` uses to end the wait."""

    request: Request
    scope: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))

    @property
    def is_ended(self) -> bool:
        return self.scope.when() is not None

    def end(self) -> None:
        self.scope.reschedule(asyncio.get_running_loop().time())


class LeasedClient(ForwardingClient):
    """Client that holds a lease on its model during each request. Only `generate` and
    `wait_until_known` load the model. Queries about an unloaded model get empty results. model:
    its first name."""

    def __init__(
        self, client: CoreClient, link: ModelLink, model: str, clock: Clock | None = None
    ) -> None:
        super().__init__(client)
        self._core = client
        self._link = link
        self._model = model
        self._clock = clock or MonotonicClock()
        self._waiting: dict[str, _Waiting] = {}  # by request id

    @property
    def is_loaded(self) -> bool:
        return self._client.is_alive

    @property
    def is_alive(self) -> bool:
        """Whether the model answers, or a request can load it. A model whose process died or that
        failed to load is not alive until it is loaded again."""
        reported = self._link.states[self._model]
        can_come = reported.state in (UNLOADED, LOADING, UNLOADING) and not reported.why
        return self._client.is_alive or can_come

    async def wait_until_known(self) -> None:
        """Load the model if it was never loaded, so that its limits become known. Raise EngineDead
        or EngineBusy."""
        try:
            self.ready  # noqa: B018
        except EngineDead:
            async with self._link.lease(self._model):
                await self._wait_until_ready()

    async def generate(
        self, request: Request, prompt_text: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        self.check(request)
        if not request.received_s:
            request = msgspec.structs.replace(request, received_s=self._clock.now())
        name = request.request_id
        waiting = self._waiting[name] = _Waiting(request)
        async with contextlib.AsyncExitStack() as held:
            try:
                async with waiting.scope:
                    await held.enter_async_context(
                        self._link.lease(self._model, request.timeout_s or None)
                    )
                    await self._wait_until_ready()
            except TimeoutError:
                if not waiting.is_ended:
                    raise
            finally:
                del self._waiting[name]
            if waiting.is_ended:
                yield self._ended(waiting.request, prompt_text)
                return
            outputs = cast(
                AsyncGenerator[RequestOutput, None],
                self._client.generate(waiting.request, prompt_text),
            )
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output

    def _ended(self, request: Request, prompt_text: str | None) -> RequestOutput:
        """Return the output of a request that was ended before its model was loaded."""
        ended = OpenRequest(request, prompt_text, None, request.received_s)
        ended.finish(ABORTED, self._clock.now())
        return ended.output()

    async def _wait_until_ready(self) -> None:
        """Wait until the core answers this process, too. Raise EngineDead if it does not."""
        if self._client.is_alive:
            return
        waits = [
            asyncio.ensure_future(self._core.wait_until_ready()),
            asyncio.ensure_future(self._link.wait_for_state(self._model, (FAILED, DEAD))),
        ]
        try:
            await asyncio.wait(waits, timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if not self._client.is_alive:
            state = self._link.states[self._model]
            raise EngineDead(f"model {self._model} does not answer ({state.why or state.state}).")

    def append(self, request_id: str, token_ids: list[int], is_last: bool = False) -> None:
        waiting = self._waiting.get(request_id)
        if waiting is None:
            super().append(request_id, token_ids, is_last)
            return
        request = waiting.request
        if not request.is_open:
            raise RequestError("the prompt is complete and cannot be extended.")
        tokens = [*request.prompt_token_ids, *token_ids]
        longer = msgspec.structs.replace(request, prompt_token_ids=tokens, is_open=not is_last)
        self.check(longer)
        waiting.request = longer

    def steer(
        self, request_id: str, priority: int | None = None, pause_s: float | None = None
    ) -> None:
        if request_id not in self._waiting:  # a request that waits for its model does not run yet
            super().steer(request_id, priority, pause_s)

    # ---- queries, which do not load the model --------------------------------------------------

    async def metrics(self) -> str:
        return await super().metrics() if self.is_loaded else ""

    async def timeline(self, request_id: str, tenant: str | None = None) -> str:
        return await super().timeline(request_id, tenant) if self.is_loaded else ""

    async def live(self, core: int = 0) -> LiveFrame:
        if not self.is_loaded:
            raise EngineDead(f"model {self._model} is not loaded; the first request loads it.")
        return await super().live(core)

    async def prefixes(self, tenant: str | None = None) -> list[PinnedPrefix]:
        return await super().prefixes(tenant) if self.is_loaded else []

    async def unpin(self, prefix_id: str, tenant: str | None = None) -> bool:
        return self.is_loaded and await super().unpin(prefix_id, tenant)

    async def held(
        self, request_id: str | None = None, index: int = 0, tenant: str | None = None
    ) -> list[RetainedRequest]:
        return await super().held(request_id, index, tenant) if self.is_loaded else []

    async def reset_prefix_cache(self) -> None:
        if self.is_loaded:
            await super().reset_prefix_cache()

    async def cancel(self, request_ids: list[str] | None, tenant: str | None = None) -> list[str]:
        """Cancel requests, including requests that wait for the model in this process."""
        query = CancelRequests(0, request_ids, tenant)
        ended = [name for name, each in self._waiting.items() if query.matches(each.request)]
        for name in ended:
            self._waiting[name].end()
        there = await super().cancel(request_ids, tenant) if self.is_loaded else []
        return ended + there
