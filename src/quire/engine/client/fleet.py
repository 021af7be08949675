"""A client of several cores that serve the same model: one `RemoteClient` each, and a choice.

A request, with all its sequences, is on one core from its first to its last message. Calls about
no single request (pins, resets, metrics) go to all cores. Cores come and go by themselves: while
one is away its requests have failed, and new ones go to the others.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from quire.base.clock import Clock
from quire.base.errors import ConfigError, EngineDead, RequestError
from quire.base.live import LiveFrame
from quire.base.messages import PinnedPrefix, Ready, Request, ResetPrefixCache, RetainedRequest
from quire.base.requests.outputs import RequestOutput
from quire.engine.client.async_client import AsyncClient
from quire.engine.client.remote import RemoteClient, limits_of
from quire.engine.observability.heartbeat import HeartbeatReader
from quire.engine.observability.merged_metrics import merged
from quire.engine.wire.core_choice import CoreChoice, OpenLoad, SeenLoad, check_core
from quire.render.tokens.tokenizer import Tokenizer

logger = logging.getLogger("quire")

OWN_SETTINGS = ("record", "max_model_len")  # may differ between cores; the shortest length counts
T = TypeVar("T")


class FleetClient(AsyncClient):
    """A client of all cores. paths: the cores' sockets, in the order of their numbers; each
    heartbeat file is in the same directory as its socket."""

    def __init__(
        self, paths: Sequence[Path], tokenizer: Tokenizer | None, clock: Clock | None = None
    ) -> None:
        self._clients = [RemoteClient(path, tokenizer, clock) for path in paths]
        pairs = zip(self._clients, paths, strict=True)
        self._cores = [_Core(client, path) for client, path in pairs]
        self._where: dict[str, int] = {}  # request id -> core
        self._choice: CoreChoice | None = None  # once a core has reported its block size
        self._ready: Ready | None = None

    def start(self) -> None:
        """Begin to connect, in the running event loop."""
        for client in self._clients:
            client.start()

    async def wait_until_ready(self) -> None:
        """Wait for all cores. Raise EngineDead if one can never come, ConfigError if the cores
        differ."""
        await asyncio.gather(*(client.wait_until_ready() for client in self._clients))
        self._look()
        for number, core in enumerate(self._cores):
            if core.difference:
                raise ConfigError(_unlike(number, core.difference))

    @property
    def ready(self) -> Ready:
        """Limits and settings that all known cores have in common."""
        self._look()
        if self._ready is None:
            raise EngineDead("the engine is not ready yet; try again in a moment.")
        return self._ready

    @property
    def is_alive(self) -> bool:
        self._look()
        return any(core.is_usable for core in self._cores)

    @property
    def num_unfinished(self) -> int:
        return sum(client.num_unfinished for client in self._clients)

    def check(self, request: Request) -> None:
        check_core(request.core_id, len(self._cores))
        limits_of(self.ready).check(request)

    # ---- requests ----------------------------------------------------------------------------

    async def generate(
        self, request: Request, prompt_text: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        self.check(request)
        name = request.request_id
        if name in self._where:
            raise RequestError(f"a request {name!r} is open already; give it another id.")
        if request.pin_s is not None:
            yield await self._pin(request)
            return
        number = self._choose(request)
        core = self._cores[number]
        self._where[name] = number
        core.own.add(request)
        # A core does not know that there are several.
        own = msgspec.structs.replace(request, core_id=None)
        outputs = cast(AsyncGenerator[RequestOutput, None], core.client.generate(own, prompt_text))
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output
        finally:
            del self._where[name]
            core.own.remove(name)

    def _choose(self, request: Request) -> int:
        """Choose a core: the requested core, if the request names one. Raise EngineDead
        if that core is away, or if all are."""
        usable = self._usable()
        if request.core_id is not None:
            if request.core_id not in usable:
                raise EngineDead(
                    f"core {request.core_id} of {len(self._cores)} is not available; try again"
                    " later, or let the server choose."
                )
            usable = [request.core_id]
        assert self._choice is not None
        return self._choice.choose(request, {core: self._cores[core].load() for core in usable})

    def abort(self, request_id: str) -> None:
        if request_id in self._where:
            self._clients[self._where[request_id]].abort(request_id)

    def fail(self, request_id: str, error: BaseException) -> None:
        if request_id in self._where:
            self._clients[self._where[request_id]].fail(request_id, error)

    def append(self, request_id: str, token_ids: list[int], is_last: bool = False) -> None:
        # Any core raises the right error for a request that is not open.
        self._clients[self._where.get(request_id, 0)].append(request_id, token_ids, is_last)

    def steer(
        self, request_id: str, priority: int | None = None, pause_s: float | None = None
    ) -> None:
        self._clients[self._where.get(request_id, 0)].steer(request_id, priority, pause_s)

    def fail_all(self, error: Exception) -> None:
        for client in self._clients:
            client.fail_all(error)

    # ---- all cores ---------------------------------------------------------------------------

    async def metrics(self) -> str:
        return merged(await self._query(lambda client: client.metrics()))

    async def timeline(self, request_id: str, tenant: str | None = None) -> str:
        texts = await self._query(lambda client: client.timeline(request_id, tenant))
        return next(filter(None, texts.values()), "")

    async def live(self, core: int = 0) -> LiveFrame:
        check_core(core, len(self._cores))
        if core not in self._usable():
            raise EngineDead(
                f"core {core} of {len(self._cores)} is not available; try again later."
            )
        return await self._clients[core].live()

    async def prefixes(self, tenant: str | None = None) -> list[PinnedPrefix]:
        """Return the pinned prefixes, each once, with the blocks and hits of all cores."""
        found: dict[str, list[PinnedPrefix]] = {}
        for prefixes in (await self._query(lambda client: client.prefixes(tenant))).values():
            for prefix in prefixes:
                found.setdefault(prefix.id, []).append(prefix)
        return sorted(map(_joined, found.values()), key=lambda prefix: -prefix.age_s)

    async def unpin(self, prefix_id: str, tenant: str | None = None) -> bool:
        return any((await self._query(lambda client: client.unpin(prefix_id, tenant))).values())

    async def held(
        self, request_id: str | None = None, index: int = 0, tenant: str | None = None
    ) -> list[RetainedRequest]:
        found = await self._query(lambda client: client.held(request_id, index, tenant))
        pairs = ((core, held) for core, mine in found.items() for held in mine)
        return [msgspec.structs.replace(held, core_id=core) for core, held in pairs]

    async def keep(
        self, request_id: str, keep_s: float, tenant: str | None = None, core_id: int | None = None
    ) -> None:
        for core in self._usable() if core_id is None else [core_id]:
            await self._clients[core].keep(request_id, keep_s, tenant)

    async def rewind(
        self,
        request_id: str,
        index: int,
        num_tokens: int,
        tenant: str | None = None,
        core_id: int | None = None,
    ) -> None:
        for core in self._usable() if core_id is None else [core_id]:
            await self._clients[core].rewind(request_id, index, num_tokens, tenant)

    async def reset_prefix_cache(self) -> None:
        same = ResetPrefixCache()  # so that cores continue to share their stored blocks
        for core in self._usable():
            await self._clients[core].reset_prefix_cache(same)
        assert self._choice is not None
        self._choice.forget_all()

    async def update_weights(
        self, path: str, version: str = "", *, is_partial: bool = False
    ) -> str:
        if len(self._clients) > 1:
            raise RequestError(
                f"the weights of {len(self._clients)} cores cannot be replaced together yet; use"
                " one core (data_parallel_size=1)."
            )
        return await self._clients[0].update_weights(path, version, is_partial=is_partial)

    async def pause(self, is_paused: bool | None, drains: bool = False) -> bool:
        clients = (self._clients[core] for core in self._usable())
        return any(await asyncio.gather(*(each.pause(is_paused, drains) for each in clients)))

    async def set_sleep(
        self, level: int = 0, wakes: Sequence[str] = (), *, aborts: bool = True
    ) -> bool:
        clients = (self._clients[core] for core in self._usable())
        orders = (each.set_sleep(level, wakes, aborts=aborts) for each in clients)
        return any(await asyncio.gather(*orders))

    async def cancel(self, request_ids: list[str] | None, tenant: str | None = None) -> list[str]:
        found = await self._query(lambda client: client.cancel(request_ids, tenant))
        return [name for names in found.values() for name in names]

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))

    async def _pin(self, request: Request) -> RequestOutput:
        """Pin a prefix on every core, since a request that begins with it may run
        on any core. If one core cannot, no core keeps it. Return that core's output."""
        cores = self._usable()
        assert self._choice is not None
        self._choice.sent(request, cores)
        pins = (_last(self._clients[core], request) for core in cores)
        outputs = await asyncio.gather(*pins, return_exceptions=True)
        errors = [each for each in outputs if isinstance(each, BaseException)]
        done = [each for each in outputs if isinstance(each, RequestOutput)]
        failed = [each for each in done if each.outputs[0].finish_reason != "pinned"]
        if errors or failed:
            with contextlib.suppress(EngineDead):
                await self.unpin(request.request_id)
        if errors:
            raise errors[0]
        return (failed or done)[0]

    async def _query(self, question: Callable[[RemoteClient], Awaitable[T]]) -> dict[int, T]:
        """Ask all cores, and return the answers that arrived, by core number. Raise EngineDead
        without an answer."""
        cores = self._usable()
        queried = (question(self._clients[core]) for core in cores)
        answers = await asyncio.gather(*queried, return_exceptions=True)
        found: dict[int, T] = {}
        for core, answer in zip(cores, answers, strict=True):
            if not isinstance(answer, BaseException):
                found[core] = answer
            elif not isinstance(answer, EngineDead):
                raise answer
        if not found:
            raise EngineDead("no core of the engine answers; try again in a moment.")
        return found

    # ---- connected cores ----------------------------------------------------------------------

    def _usable(self) -> list[int]:
        """Return the cores that take requests. Raise EngineDead if there is none."""
        self._look()
        found = [number for number, core in enumerate(self._cores) if core.is_usable]
        if not found:
            raise EngineDead(
                f"none of the engine's {len(self._cores)} processes is available; try again when"
                " /health answers 200."
            )
        return found

    def _look(self) -> None:
        """Record cores that have connected, for the first time or again."""
        for number, core in enumerate(self._cores):
            if not core.has_come():
                continue
            if self._ready is None:
                self._ready = core.ready
                caches = core.ready.settings.get("enable_prefix_caching", True)
                size = core.ready.settings.get("block_size", 0) if caches else 0
                self._choice = CoreChoice(len(self._cores), size)
            assert self._choice is not None
            self._choice.forget(number)
            core.difference = difference(self._ready, core.ready)
            if core.difference:
                logger.error("%s", _unlike(number, core.difference))
            else:
                length = min(self._ready.max_model_len, core.ready.max_model_len)
                self._ready = msgspec.structs.replace(self._ready, max_model_len=length)


class _Core:
    """One core as this process sees it. own: load that this process has open there. difference: how
    it differs from the other cores, in which case it gets no requests."""

    def __init__(self, client: RemoteClient, path: Path) -> None:
        self.client = client
        self.own = OpenLoad()
        self.difference = ""
        self._beat_path = path.with_name("heartbeat")
        self._seen: Ready | None = None
        self._beat = HeartbeatReader(self._beat_path)
        self._load = SeenLoad()

    @property
    def is_usable(self) -> bool:
        return self.client.is_alive and not self.difference

    @property
    def ready(self) -> Ready:
        return self.client.ready

    def has_come(self) -> bool:
        """Return whether another core has connected since the last call."""
        if not self.client.is_alive or self.client.ready is self._seen:
            return False
        self._seen = self.client.ready
        self._beat = HeartbeatReader(self._beat_path)  # the file is a new one
        self._load = SeenLoad()
        return True

    def load(self) -> int:
        """Return the core's load in tokens, of this client and of the others."""
        return self._load.tokens(self._beat.load(), self.own.total)


CoreClient = RemoteClient | FleetClient


def client_of(
    paths: Sequence[Path], tokenizer: Tokenizer | None, clock: Clock | None = None
) -> CoreClient:
    """Return a client of one core or several, by their sockets; it is not started yet."""
    if len(paths) == 1:
        return RemoteClient(paths[0], tokenizer, clock)
    return FleetClient(paths, tokenizer, clock)


def difference(one: Ready, other: Ready) -> str:
    """Return how two cores that should be equal differ; empty if they are equal."""
    mine, others = _compared(one), _compared(other)
    names = [name for name in mine | others if mine.get(name) != others.get(name)]
    return ", ".join(f"{name}: {mine.get(name)!r} and {others.get(name)!r}" for name in names)


def _compared(ready: Ready) -> dict[str, object]:
    settings = {name: value for name, value in ready.settings.items() if name not in OWN_SETTINGS}
    own = {name: getattr(ready, name) for name in ("vocab_size", "max_logprobs", "max_num_seqs")}
    return settings | own


def _unlike(number: int, difference: str) -> str:
    return (
        f"core {number} differs from the others and gets no requests ({difference}). All cores"
        " must have the same model and settings; restart the server."
    )


def _joined(pins: list[PinnedPrefix]) -> PinnedPrefix:
    """Merge the reports of several cores on one pinned prefix."""
    ends = [pin.expires_in_s for pin in pins if pin.expires_in_s is not None]
    return PinnedPrefix(
        pins[0].id,
        pins[0].num_tokens,
        sum(pin.num_blocks for pin in pins),
        all(pin.is_ready for pin in pins),
        max(pin.age_s for pin in pins),
        min(ends, default=None),
        sum(pin.num_hits for pin in pins),
    )


async def _last(client: RemoteClient, request: Request) -> RequestOutput:
    """Return the last output of a request."""
    outputs = cast(AsyncGenerator[RequestOutput, None], client.generate(request))
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            if output.finished:
                return output
    raise EngineDead("the engine has not answered.")
