"""Caching hints of clients: the engine retains the requests that they mark.

A hint sets `Request.keep_s`, as a body's own `keep_s` does, with two differences. A request beyond
the limits of retained requests, or beyond its key's share of them, is answered without being
retained. And a retained request replaces the last one of the same key, whose prompt is usually its
beginning. The engine evicts the blocks of retained requests only after all other cached blocks.
"""

import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from quire.base.errors import EngineBusy, EngineDead
from quire.base.messages import Request
from quire.base.requests.outputs import RequestOutput
from quire.engine.client.async_client import AsyncClient
from quire.serve.bodies.protocol import GenerationRequest

MAX_RETAINED = 256  # requests that the hints of one API process retain
# Retention -> seconds: OpenAI's words, and Anthropic's.
RETENTION_S = {"in_memory": 600.0, "in-memory": 600.0, "24h": 86400.0, "5m": 300.0, "1h": 3600.0}
DEFAULT_RETENTION = "in_memory"
ENDS = ("stop", "length", "repetition")  # finish reasons of retained requests

Outputs = AsyncGenerator[RequestOutput, None]
Name = tuple[str, ...]


@dataclass
class HintedRequests:
    """The requests that hints retain: the last one of each name, the oldest first."""

    _ids: OrderedDict[Name, tuple[AsyncClient, str]] = field(default_factory=OrderedDict)

    async def add(self, name: Name, client: AsyncClient, request_id: str) -> None:
        """Note a retained request. Release the last one of this name, and the oldest one beyond
        MAX_RETAINED."""
        last = self._ids.pop(name, None)
        self._ids[name] = client, request_id  # before any wait, so that no request is forgotten
        await _release(last)
        if len(self._ids) > MAX_RETAINED:
            await self.release(next(iter(self._ids)))

    async def release(self, name: Name) -> None:
        """Release the retained request of a name, if there is one. Its blocks stay cached like all
        others."""
        await _release(self._ids.pop(name, None))


async def _release(retained: tuple[AsyncClient, str] | None) -> None:
    if retained is None:
        return
    client, request_id = retained
    with contextlib.suppress(EngineDead):  # such as an unloaded model, which has no blocks
        await client.keep(request_id, 0.0)


@dataclass
class Retention:
    """Retention of one request. is_retained: the engine has accepted it, from the first output."""

    store: HintedRequests
    name: Name
    retention: str
    is_retained: bool = False

    async def outputs(
        self, client: AsyncClient, request: Request, generate: Callable[[Request], Outputs]
    ) -> Outputs:
        """Yield the outputs of a request that is retained if there is room, perhaps after the
        release of the last request of its name."""
        marked = msgspec.structs.replace(request, keep_s=RETENTION_S[self.retention])
        for attempt in (marked, marked, request):
            outputs = generate(attempt)
            try:
                async with aclosing(outputs):
                    async for output in outputs:
                        self.is_retained = attempt is marked
                        if output.finished and self.is_retained:
                            await self._note(client, output)
                        yield output
                return
            except EngineBusy as busy:
                if busy.field != "keep_s":
                    raise
            await self.store.release(self.name)

    async def _note(self, client: AsyncClient, output: RequestOutput) -> None:
        if any(each.finish_reason in ENDS for each in output.outputs):
            await self.store.add(self.name, client, output.request_id)


def retention_of(
    store: HintedRequests, body: GenerationRequest, model: str, tenant: str, request_id: str
) -> Retention | None:
    """Return the retention that a body's hints request. None without hints, with the body's own
    `keep_s`, and for outputs that cannot be retained. Without a key, the request replaces none."""
    key, given = body.prompt_cache_key, body.prompt_cache_retention
    if (key is None and given is None) or body.keep_s is not None:
        return None
    if body.use_beam_search or getattr(body, "best_of", None) or body.max_tokens == 0:
        return None
    name = (model, tenant, body.cache_salt or "", "id" if key is None else "key", key or request_id)
    return Retention(store, name, given or DEFAULT_RETENTION)
