"""Several cores for a program without an event loop: their processes, and a thread that
communicates with them."""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from quire.base.clock import bounded_wait_s
from quire.base.messages import PinnedPrefix, Request, RetainedRequest
from quire.base.requests.outputs import RequestOutput
from quire.base.settings.config import EngineConfig
from quire.engine.client.fleet import CoreClient, client_of
from quire.engine.client.remote import limits_of
from quire.engine.client.request_maker import RequestMaker
from quire.engine.start.preflight import check_before_loading
from quire.engine.start.text import build_text_side
from quire.models.checkpoint.source import resolve_source
from quire.render.renderer import Renderer
from quire.render.tokens.tokenizer import Tokenizer
from quire.serve.processes.managed_core import ManagedCores
from quire.spec.model_spec import ModelSpec
from quire.spec.pooling_spec import with_pooling

T = TypeVar("T")
News = tuple[str, RequestOutput | BaseException]  # request id; its output or error


class CoreProcesses:
    """Client of several cores with the interface of `InProcessClient` that `LLM` uses. Requests
    are added, and each `step` waits until outputs are due. cores: loaded cores, which end with
    `close`."""

    def __init__(self, cores: ManagedCores, tokenizer: Tokenizer | None) -> None:
        self._cores = cores
        self._open: set[str] = set()  # requests that still need outputs
        self._news: SimpleQueue[News] = SimpleQueue()
        self._readers: dict[str, asyncio.Task[None]] = {}  # tasks of the thread, by request id
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="quire-cores", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, self._loop, thread, cores)
        self._client: CoreClient = self._call(_connect(cores, tokenizer))
        self._limits = limits_of(self._client.ready)

    @property
    def max_model_len(self) -> int:
        return self._limits.max_model_len

    def check(self, request: Request) -> None:
        """Raise RequestError if the engine can never serve this request."""
        self._limits.check(request)

    def add(self, request: Request, prompt_text: str | None = None) -> None:
        """Send a request that was checked."""
        self._open.add(request.request_id)
        self._do(lambda: self._begin(request, prompt_text))

    def step(self) -> list[RequestOutput]:
        """Wait for outputs and return them. Raise the error of a failed request. Raise EngineDead
        if a core has ended or makes no progress."""
        news = [self._next()]
        with contextlib.suppress(Empty):
            while True:
                news.append(self._news.get_nowait())
        outputs = []
        for name, item in news:
            if name not in self._open:
                continue
            if isinstance(item, BaseException):
                raise item
            outputs.append(item)
            if item.finished:
                self._open.remove(name)
        return outputs

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests now; they produce no more outputs."""
        names = [name for name in request_ids if name in self._open]
        self._open -= set(names)
        self._do(lambda: self._cancel(names))

    def steer(
        self, request_id: str, priority: int | None = None, pause_s: float | None = None
    ) -> None:
        """See `AsyncClient.steer`."""
        self._do(lambda: self._client.steer(request_id, priority, pause_s))

    def reset_prefix_cache(self) -> None:
        self._call(self._client.reset_prefix_cache())

    def update_weights(
        self, path: Path, version: str = "", *, is_partial: bool = False
    ) -> tuple[str, list[RequestOutput]]:
        """See `InProcessClient.update_weights`; outputs of open requests come with later steps."""
        made = self._call(self._client.update_weights(str(path), version, is_partial=is_partial))
        return made, []

    def set_sleep(
        self, level: int = 0, wakes: Sequence[str] = (), *, aborts: bool = True
    ) -> tuple[bool, list[RequestOutput]]:
        """See `InProcessClient.set_sleep`; outputs of open requests come with later steps."""
        return self._call(self._client.set_sleep(level, wakes, aborts=aborts)), []

    def prefixes(self) -> list[PinnedPrefix]:
        return self._call(self._client.prefixes())

    def unpin(self, prefix_id: str) -> bool:
        """Remove a pin; return False if the id is unknown."""
        return self._call(self._client.unpin(prefix_id))

    def held(self, request_id: str | None = None, index: int = 0) -> list[RetainedRequest]:
        """List retained requests; or one sequence, retained or still running, with its tokens."""
        return self._call(self._client.held(request_id, index))

    def keep(self, request_id: str, keep_s: float, core_id: int | None = None) -> None:
        """Retain a request for `keep_s` seconds from now on; 0.0 releases it."""
        self._call(self._client.keep(request_id, keep_s, None, core_id))

    def rewind(
        self, request_id: str, index: int, num_tokens: int, core_id: int | None = None
    ) -> None:
        """Cut a retained sequence back to its first num_tokens tokens."""
        self._call(self._client.rewind(request_id, index, num_tokens, None, core_id))

    def close(self) -> None:
        self._call(self._client.close())
        self._end()

    def _next(self) -> News:
        while True:
            try:
                return self._news.get(timeout=bounded_wait_s(1.0))
            except Empty:
                self._cores.check_progress()

    # ---- the thread --------------------------------------------------------------------------

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _do(self, function: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(function)

    def _begin(self, request: Request, prompt_text: str | None) -> None:
        outputs = self._client.generate(request, prompt_text)
        reading = _read(request.request_id, outputs, self._news)
        task = self._readers[request.request_id] = self._loop.create_task(reading)
        task.add_done_callback(lambda _: self._readers.pop(request.request_id, None))

    def _cancel(self, names: list[str]) -> None:
        for name in names:
            if name in self._readers:
                self._readers[name].cancel()


@dataclass(frozen=True)
class ProcessEngine:
    """An engine of several cores with its text side. `Engine` has its core in this process."""

    client: CoreProcesses
    renderer: Renderer
    requests: RequestMaker
    config: EngineConfig
    spec: ModelSpec


def start_engine(config: EngineConfig) -> ProcessEngine:
    """Start the cores and wait until they are loaded. Raises ModelError, ConfigError and
    OutOfMemory."""
    from quire.models.registry import (
        model_spec,  # imported late: engines in this process may not need torch
    )

    source = resolve_source(config.model)
    check_before_loading(config, source)
    model = config.model
    spec = model_spec(source.directory, model.model_impl, is_compiled=model.torch_compile)
    spec = with_pooling(spec, source.directory, model)
    cores = ManagedCores(config, "warning" if config.disable_log_stats else "info")
    try:
        cores.start()
        text = build_text_side(config.model, source)
        cores.wait_until_ready()
        client = CoreProcesses(cores, text.tokenizer)
    except BaseException:
        cores.stop()
        raise
    return ProcessEngine(client, text.renderer, text.requests, config, spec)


async def _connect(cores: ManagedCores, tokenizer: Tokenizer | None) -> CoreClient:
    client = client_of(cores.paths, tokenizer)
    client.start()
    await client.wait_until_ready()
    return client


async def _read(name: str, outputs: Any, news: SimpleQueue[News]) -> None:
    """Forward the outputs of a request, or the error that ended it."""
    reading = cast(AsyncGenerator[RequestOutput, None], outputs)
    try:
        async with contextlib.aclosing(reading):
            async for output in reading:
                news.put((name, output))
    except Exception as error:
        news.put((name, error))


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, cores: ManagedCores) -> None:
    cores.stop()
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join()
        loop.close()
