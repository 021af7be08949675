"""A client of one core in another process, for asyncio: tokens in, `RequestOutput`s out (seeds C4).

Text is made here, on the client's side, so that the core's thread never does.
"""

import asyncio
import contextlib
import errno
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from quire.base.clock import Clock, MonotonicClock
from quire.base.errors import (
    TIMED_OUT,
    EngineBusy,
    EngineDead,
    EngineError,
    RequestError,
)
from quire.base.messages import (
    Abort,
    Append,
    FromCore,
    Ready,
    Refused,
    Request,
    Steer,
    ToCore,
    WeightsChanged,
)
from quire.base.plugins import short_name
from quire.base.requests.outputs import RequestOutput
from quire.base.requests.validation import RequestLimits
from quire.base.step_outputs import Failure, Finish, StepOutputs
from quire.engine.client.core_questions import QuestionClient
from quire.engine.client.output import ABORTED, OpenRequest, OutputProcessor
from quire.engine.wire.core_choice import check_core
from quire.engine.wire.wire import LENGTH, body_length, client_codec
from quire.render.tokens.tokenizer import Tokenizer

logger = logging.getLogger("quire")

# The core ends a late request itself, with a better reason. This side ends it that much later: the
# core may be in a long step, or stuck.
LATE_S = 1.0
AGAIN_S = 1.0  # pause before connecting again
NO_SOCKET = (errno.ENOENT, errno.ECONNREFUSED)  # the socket's process has ended for good
MAX_UNSENT_BYTES = 256 << 20  # messages that the core has not read yet
MAX_OPEN_MEDIA_BYTES = 2 << 30  # of the pixels of all open requests, here and in the core
MAX_MEDIA_BYTES = 960 << 20  # of the pixels of one request: a message may have 1 GiB

_ENDED = "the engine's process has ended; try again when /health answers 200."


def limits_of(ready: Ready) -> RequestLimits:
    """Return what an engine in another process takes."""
    return RequestLimits(
        ready.vocab_size,
        ready.max_model_len,
        ready.max_logprobs,
        ready.max_num_seqs,
        tuple(map(short_name, ready.settings.get("logits_processors", ()))),
        takes_functions=False,
        pools=ready.pooling is not None,
        has_text_pairs=ready.pooling is not None and ready.pooling.has_text_pairs,
        takes_grammars=True,
    )


class Mailbox:
    """Wakes the reader of a request when there is output; a late reader gets several steps in
    one output.

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
        """Notify the reader that the request has something to show."""
        self._is_due = True
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Pass the output so far to the reader, then raise the error there."""
        self._error = error
        self._wake()

    async def take(self) -> RequestOutput:
        """Return the output since the last call; wait until there is some."""
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


class RemoteClient(QuestionClient):
    """One connection to the core behind a Unix socket; a new one when the core was started
    again."""

    def __init__(self, path: Path, tokenizer: Tokenizer | None, clock: Clock | None = None) -> None:
        super().__init__()
        self._path = path
        self._tokenizer = tokenizer
        self._clock = clock or MonotonicClock()
        self._codec = client_codec()
        self._outputs = OutputProcessor()
        self._boxes: dict[str, Mailbox] = {}
        self._num_media_bytes = 0  # of open requests
        self._writer: asyncio.StreamWriter | None = None
        self._ready: Ready | None = None
        self._is_alive = False
        self._changed = asyncio.Event()  # set when the core has come or gone
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls, path: Path, tokenizer: Tokenizer | None, clock: Clock | None = None
    ) -> "RemoteClient":
        """Connect, and wait until the core is ready, however long it loads."""
        client = cls(path, tokenizer, clock)
        client.start()
        await client.wait_until_ready()
        return client

    def start(self) -> None:
        """Begin to connect, in the running event loop."""
        self._task = asyncio.create_task(self._run())

    async def wait_until_ready(self) -> None:
        """Wait for the core. Raise EngineDead if the connection can never come."""
        while not self._is_alive:
            if self._task is None or self._task.done():
                raise EngineDead(_ENDED)
            self._changed.clear()
            await self._changed.wait()

    @property
    def ready(self) -> Ready:
        if self._ready is None:
            raise EngineDead("the engine is not ready yet; try again in a moment.")
        return self._ready

    @property
    def is_alive(self) -> bool:
        return self._is_alive

    @property
    def num_unfinished(self) -> int:
        return len(self._boxes)

    def check(self, request: Request) -> None:
        if request.core_id is not None:
            check_core(request.core_id, 1)
        self._limits().check(request)

    def _limits(self) -> RequestLimits:
        return limits_of(self.ready)

    async def generate(
        self, request: Request, prompt_text: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        self.check(request)
        num_bytes = sum(len(item.pixels) for item in request.media)
        self._check_room(num_bytes)
        now, request_id = self._clock.now(), request.request_id
        if not request.received_s:
            request = msgspec.structs.replace(request, received_s=now)
        followed = self._outputs.add(request, prompt_text, self._tokenizer, now)
        box = self._boxes[request_id] = Mailbox(followed)
        finished = False
        limit = self._limit(request)
        self._num_media_bytes += num_bytes
        try:
            self._send(request)
            while not finished:
                output = await box.take()
                finished = output.finished
                yield output
        finally:
            if limit is not None:
                limit.cancel()
            self._num_media_bytes -= num_bytes
            del self._boxes[request_id]
            self._outputs.drop(request_id)
            if not finished and not box.failed and self._is_alive:
                self._send(Abort(request_id))

    def abort(self, request_id: str) -> None:
        """End a request: its reader gets what there is, with finish_reason `abort`. An id that is
        not open is ignored."""
        self._finish(request_id, ABORTED)

    def _finish(self, request_id: str, finish: Finish) -> None:
        """End a request, here and in the core."""
        if self._outputs.abort([request_id], self._clock.now(), finish):
            self._boxes[request_id].notify()
            if self._is_alive:
                self._send(Abort(request_id))

    def _limit(self, request: Request) -> asyncio.TimerHandle | None:
        """End a request with a time limit a moment after it, if the core has not done so."""
        if request.timeout_s == 0:
            return None
        left_s = request.received_s + request.timeout_s + LATE_S - self._clock.now()
        loop = asyncio.get_running_loop()
        return loop.call_later(max(0.0, left_s), self._is_late, request)

    def _is_late(self, request: Request) -> None:
        taken_s = self._clock.now() - request.received_s
        why = (
            f"the request took longer than its timeout_s={request.timeout_s:g} ({taken_s:.3f} s)."
            " The engine is busy or stuck and has not dropped it yet. Raise timeout_s, or try"
            " again when the server is less busy."
        )
        self._finish(request.request_id, Finish("timeout", error=Failure(TIMED_OUT, why)))

    def _check_room(self, num_media_bytes: int) -> None:
        """Raise EngineBusy if the core is far behind in reading, or if open requests hold too
        many pixels. Raise RequestError for a request that alone
        has too many."""
        if num_media_bytes > MAX_MEDIA_BYTES:
            raise RequestError(
                f"the images of the request have {num_media_bytes:,} bytes after preprocessing,"
                f" more than the limit of {MAX_MEDIA_BYTES:,}; send fewer or smaller images."
            )
        if num_media_bytes and self._num_media_bytes + num_media_bytes > MAX_OPEN_MEDIA_BYTES:
            raise EngineBusy(
                f"the images of open requests have {self._num_media_bytes:,} bytes, and"
                f" {num_media_bytes:,} more would exceed the limit of {MAX_OPEN_MEDIA_BYTES:,}; try"
                " again later."
            )
        if self._writer is None:
            return
        num_bytes = self._writer.transport.get_write_buffer_size()
        if num_bytes > MAX_UNSENT_BYTES:
            raise EngineBusy(
                f"the engine has not yet accepted {num_bytes} bytes of other requests; try again"
                " in a moment."
            )

    def fail(self, request_id: str, error: BaseException) -> None:
        """End a request, here and in the core: its reader gets what there is, then the error. An id
        that is not open is ignored."""
        if request_id not in self._outputs:
            return
        self._outputs.drop(request_id)
        box = self._boxes[request_id]
        if self._is_alive and not box.failed:
            self._send(Abort(request_id))
        box.fail(error)

    def append(self, request_id: str, token_ids: list[int], is_last: bool = False) -> None:
        self._outputs.append(request_id, token_ids, is_last, self._limits())
        self._send(Append(request_id, token_ids, is_last))

    def steer(
        self, request_id: str, priority: int | None = None, pause_s: float | None = None
    ) -> None:
        if request_id in self._outputs:
            self._send(Steer(request_id, priority, pause_s))

    def fail_all(self, error: Exception) -> None:
        """End all requests on this side with an error, and in the core."""
        for request_id, box in self._boxes.items():
            if self._is_alive and not box.failed:
                self._send(Abort(request_id))
            box.fail(error)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def _send(self, message: ToCore) -> None:
        if self._writer is None or not self._is_alive:
            raise EngineDead(_ENDED)
        self._writer.write(self._codec.encode(message))

    # ---- the connection ----------------------------------------------------------------------

    async def _run(self) -> None:
        """Follow one core after the other, until there is no socket to connect to."""
        try:
            while True:
                try:
                    reader, writer = await asyncio.open_unix_connection(str(self._path))
                except OSError as error:
                    if error.errno in NO_SOCKET:
                        return
                    logger.error("no connection to the engine (%s); trying again", error)
                    await asyncio.sleep(AGAIN_S)
                    continue
                self._writer = writer
                try:
                    await self._follow(reader)
                except EngineError as error:
                    logger.error("the connection to the core failed: %s", error)
                except Exception:
                    logger.exception("a message from the core could not be handled; reconnecting")
                finally:
                    writer.close()
                    self._lose()
        finally:
            self._changed.set()

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        """Take messages until the stream ends."""
        try:
            while True:
                head = await reader.readexactly(LENGTH.size)
                body = await reader.readexactly(body_length(head))
                self._take(self._codec.decode(body))
        except (asyncio.IncompleteReadError, OSError):
            return

    def _lose(self) -> None:
        """Fail all requests and questions of a core that has disconnected."""
        self._is_alive = False
        self._writer = None
        for box in self._boxes.values():
            box.fail(EngineDead(_ENDED))
        self._fail_questions(EngineDead(_ENDED))
        self._changed.set()

    def _take(self, message: FromCore) -> None:
        if isinstance(message, StepOutputs):
            self._take_step(message)
        elif isinstance(message, Refused):
            box = self._boxes.get(message.request_id)
            if box is not None:
                kind = EngineBusy if message.is_busy else RequestError
                box.fail(kind(message.message, message.field, message.code))
        elif isinstance(message, WeightsChanged):
            self._outputs.change_weights(message.version)
            self._change_weights(message)
        elif not isinstance(message, Ready):
            self._take_answer(message)
        else:
            self._ready = message
            self._outputs.change_weights(message.weights_version)
            self._is_alive = True
            self._changed.set()

    def _change_weights(self, changed: WeightsChanged) -> None:
        assert self._ready is not None, "the first message of a core is Ready"
        numerics = self._ready.numerics
        if numerics:
            numerics = numerics | {"weights": changed.digest}
        self._ready = msgspec.structs.replace(
            self._ready, weights_version=changed.version, numerics=numerics
        )

    def _take_step(self, outputs: StepOutputs) -> None:
        due, aborts = self._outputs.process(outputs, self._clock.now())
        for request in due:
            self._boxes[request.request_id].notify()
        for abort in aborts:
            self._send(abort)
