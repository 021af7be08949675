"""The AsyncClient of the API, over an engine in this process: no sockets, the same answers.

Steps are taken on the event loop that serves the requests. Tests stop and start them with `hold`
and `release`, end the engine with `kill`, and let a request fail with `fail`. Any thread may call
these.
"""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable

from quire.base.clock import MonotonicClock
from quire.base.errors import REQUEST_FAILED, TIMED_OUT, EngineDead
from quire.base.events import Event
from quire.base.live import LiveFrame
from quire.base.messages import (
    Cancel,
    Hold,
    Live,
    PinnedPrefix,
    Ready,
    Request,
    RetainedRequest,
    Rewind,
    Unpin,
)
from quire.base.requests.numerics import PARTS
from quire.base.requests.outputs import RequestOutput
from quire.base.step_outputs import Failure, Finish
from quire.engine.client.remote import Mailbox, limits_of
from quire.engine.loop.core import EngineCore
from quire.engine.observability.live import LiveFrames
from quire.engine.observability.timeline import Timelines
from quire.engine.start.build import Engine
from quire.engine.wire.core_choice import check_core
from quire.engine.wire.wire import LENGTH, client_codec, core_codec


class FakeClient:
    """boxes: of the open requests, whose readers take from them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        config = engine.config
        self.ready = Ready(
            client_id=0,
            vocab_size=engine.spec.vocab_size,
            max_model_len=config.model.max_model_len or 0,
            max_logprobs=config.max_logprobs,
            max_num_seqs=config.scheduler.max_num_seqs or 0,
            settings={
                "model": config.model.model,
                "logits_processors": config.logits_processors,
                "enable_lora": config.lora.enable_lora,
                "max_lora_rank": config.lora.max_lora_rank,
            },
            memory=engine.memory.describe(),
            pooling=engine.spec.pooling,
            architecture=engine.spec.model_type,
            weights_bytes=engine.memory.weights_bytes,
            numerics={**dict.fromkeys(PARTS, "as in the test"), "formats": "bfloat16, plain"},
        )
        self.requests: list[Request] = []  # as they were queued
        self.num_aborted = 0  # of those, whose reader left early
        core = engine.client.core
        self.timelines = Timelines.of(core.view(), core.requests())
        listen(core, self.timelines)
        self.frames = LiveFrames(core, MonotonicClock())
        self._alive = True
        self._steps_left: int | None = None  # None: no end
        self._boxes: dict[str, Mailbox] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._go = asyncio.Event()  # replaced by one per loop
        self._task: asyncio.Task[None] | None = None

    @property
    def num_unfinished(self) -> int:
        return self.engine.client.num_unfinished

    @property
    def num_generated(self) -> int:
        return len(self.requests)

    @property
    def is_alive(self) -> bool:
        return self._alive

    def check(self, request: Request) -> None:
        check_core(request.core_id, 1)
        limits_of(self.ready).check(request)

    async def generate(
        self, request: Request, prompt_text: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Queues at the first __anext__."""
        if not self._alive:
            raise EngineDead("the core's process has ended.")
        self.check(request)
        box = Mailbox(self.engine.client.add(over_the_wire(request), prompt_text))
        self.requests.append(request)
        name, finished = request.request_id, False
        self._boxes[name] = box
        self._run()
        try:
            while not finished:
                output = await box.take()
                finished = output.finished
                yield output
        finally:
            del self._boxes[name]
            if not finished:
                self.num_aborted += not box.failed
                self.engine.client.abort([name])

    def append(self, request_id: str, token_ids: list[int], is_last: bool = False) -> None:
        if not self._alive:
            raise EngineDead("the core's process has ended.")
        self.engine.client.append(request_id, token_ids, is_last)

    def steer(
        self, request_id: str, priority: int | None = None, pause_s: float | None = None
    ) -> None:
        self.engine.client.steer(request_id, priority, pause_s)

    async def metrics(self) -> str:
        if not self._alive:
            raise EngineDead("the core's process has ended.")
        return "# TYPE quire:num_requests_running gauge\nquire:num_requests_running 0.0\n"

    async def timeline(self, request_id: str, tenant: str | None = None) -> str:
        self.engine.client.core.publish()
        return self.timelines.text(request_id, tenant)

    async def live(self, core: int = 0) -> LiveFrame:
        check_core(core, 1)
        if not self._alive:
            raise EngineDead("the core's process has ended.")
        return live_over_the_wire(self.frames.frame())

    async def prefixes(self, tenant: str | None = None) -> list[PinnedPrefix]:
        return self.engine.client.core.prefixes(tenant)

    async def unpin(self, prefix_id: str, tenant: str | None = None) -> bool:
        core = self.engine.client.core
        is_known = any(prefix.id == prefix_id for prefix in core.prefixes(tenant))
        core.control(Unpin(prefix_id, tenant))
        return is_known

    async def held(
        self, request_id: str | None = None, index: int = 0, tenant: str | None = None
    ) -> list[RetainedRequest]:
        return self.engine.client.core.held(request_id, index, tenant)

    async def keep(
        self, request_id: str, keep_s: float, tenant: str | None = None, core_id: int | None = None
    ) -> None:
        self.engine.client.core.control(Hold(request_id, keep_s, tenant))

    async def rewind(
        self,
        request_id: str,
        index: int,
        num_tokens: int,
        tenant: str | None = None,
        core_id: int | None = None,
    ) -> None:
        self.engine.client.core.control(Rewind(request_id, index, num_tokens, tenant))

    async def reset_prefix_cache(self) -> None:
        self.engine.client.reset_prefix_cache()

    async def cancel(self, request_ids: list[str] | None, tenant: str | None = None) -> list[str]:
        """As the core does it, of its own requests."""
        core = self.engine.client.core
        mine = {each.request.request_id: each.request.tenant for each in core.requests()}
        named = [name for name in mine if request_ids is None or name in request_ids]
        found = [name for name in named if tenant in (None, mine[name])]
        for name in found:
            core.control(Cancel(name))
        return found

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def hold(self, after_steps: int = 0) -> None:
        """No step is taken from now on, or after so many more."""
        self._steps_left = after_steps
        if after_steps:
            self._call(lambda: self._go.set())

    @property
    def is_held(self) -> bool:
        """Whether no step follows, but for one that may be under way."""
        return self._steps_left == 0

    def release(self) -> None:
        """Steps go on."""
        self._steps_left = None
        self._call(lambda: self._go.set())

    def let_go(self) -> None:
        """Nothing is held any more; no step may be under way."""
        core = self.engine.client.core
        for held in core.held():
            core.control(Hold(held.id, 0.0))

    def kill(self) -> None:
        """The engine is gone: open requests end with EngineDead, new ones are refused."""
        self._alive = False
        self._call(lambda: self._end_all(EngineDead("the core's process has ended.")))

    def revive(self) -> None:
        """The opposite of `kill`, for the next test."""
        self._alive = True

    def fail(self, message: str, reason: str = "error", code: str | None = None) -> None:
        """All open requests end with this finish_reason, `error` or `timeout`."""
        self._call(lambda: self._fail_all(message, reason, code))

    def _call(self, change: Callable[[], object]) -> None:
        if self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(change)

    def _run(self) -> None:
        """Begin to take steps on the running loop, if no task does so already."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._task = loop, None
            self._go = asyncio.Event()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._step_until_idle())

    async def _step_until_idle(self) -> None:
        while self.engine.client.num_unfinished:
            while self._steps_left == 0:
                self._go.clear()
                await self._go.wait()
            if self._steps_left is not None:
                self._steps_left -= 1
            try:
                due = self.engine.client.advance()
            except Exception as error:  # a test shall fail then, not wait
                self._end_all(error)
                raise
            for request in due:
                self._boxes[request.request_id].notify()
            await asyncio.sleep(0)  # lets the readers in

    def _end_all(self, error: Exception) -> None:
        for box in self._boxes.values():
            box.fail(error)

    def _fail_all(self, message: str, reason: str, code: str | None) -> None:
        why = TIMED_OUT if reason == "timeout" else REQUEST_FAILED
        finish = Finish(reason, error=Failure(code or why, message))
        for request in self.engine.client.abort(list(self._boxes), finish):
            self._boxes[request.request_id].notify()


def listen(core: EngineCore, subscriber: Timelines) -> None:
    """Let it hear of events as long as somebody has it: hundreds of clients share an engine."""
    known = weakref.ref(subscriber)

    def hear(event: Event) -> None:
        found = known()
        if found is None:
            core.unsubscribe(hear)
        else:
            found(event)

    core.subscribe(hear)


def over_the_wire(request: Request) -> Request:
    """The request as the core gets it; what cannot be sent fails here as it would there."""
    received = core_codec().decode(client_codec().encode(request)[LENGTH.size :])
    assert isinstance(received, Request)
    return received


def live_over_the_wire(frame: LiveFrame) -> LiveFrame:
    """The frame as a client gets it."""
    received = client_codec().decode(core_codec().encode(Live(0, frame))[LENGTH.size :])
    assert isinstance(received, Live)
    return received.frame
