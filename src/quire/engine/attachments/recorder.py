"""The recorder: an attachment that wraps the scheduler's four doors and records each call.

    core ---> Recorder ---> Scheduler          on the core's thread: references go into a queue
                 | queue
              _Writer ---> segments on disk    a thread of its own: encodes and writes

Plans, results and requests never change after they are queued, so nothing is copied. The core never
waits. If the disk is too slow, the rest of the segment is dropped. The next segment begins with a
snapshot of the state. If nothing can be written, recording ends with a warning.
"""

import errno
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quire.base.errors import ConfigError, EngineError
from quire.base.events import PrefixFound
from quire.base.messages import Control, KeepCached, Request
from quire.base.plan import Int32, StepResult
from quire.base.settings.config import EngineConfig
from quire.base.settings.kv_transfer import EVICTED
from quire.base.version import QUIRE_VERSION
from quire.engine.attachments.order import Order
from quire.engine.loop.attachment import DoorWatcher, Loop
from quire.engine.recording.calls import (
    ADD,
    CONTINUES,
    CONTROL,
    DIGESTS,
    END,
    FOUND,
    ORDERS,
    PLAN,
    RAISED,
    REFUSED,
    SCHEDULE,
    UPDATE,
    CallEncoder,
)
from quire.engine.recording.files import RecordingFiles
from quire.engine.recording.frames import FORMAT
from quire.engine.recording.redact import BLANK, Context, Redaction
from quire.scheduler.core.names import NewNames
from quire.scheduler.decisions import Decisions
from quire.scheduler.policy.policies import EVICTION_POLICIES, POLICIES
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.snapshot import OMITTED, STATE_VERSION, Deferred, dump, encode

logger = logging.getLogger("quire")

SEGMENT = -1  # item that begins a segment, with header and snapshot
MAX_QUEUED_ITEMS = 1 << 14  # maximum items in the queue; above it recording pauses
PAUSE_S = 0.05  # between two looks of the writer at the queue
FRAME_ITEMS = 256
BREATH_ITEMS = 4  # items after which the writer lets the core's thread run
BREATH_S = 1e-6
END_S = 10.0


def check_recordable(config: EngineConfig) -> None:
    """Raise ConfigError if another package's class is in the scheduler's state, since a recording
    can restore only ours."""
    for name, value, ours in (
        ("scheduling policy", config.scheduler.scheduling_policy, POLICIES),
        ("eviction policy", config.cache.eviction_policy, EVICTION_POLICIES),
    ):
        if value not in ours:
            raise ConfigError(
                f"record={config.record!r} cannot record the {name} {value!r}, which another"
                f" package or a file provides; remove record, or use one of {', '.join(ours)}."
            )
    if config.scheduler.scheduler_extensions:
        raise ConfigError(
            f"record={config.record!r} cannot record scheduler_extensions, whose state is not"
            " quire's; remove one of them."
        )


class Recorder(DoorWatcher):
    """Doors of a scheduler that record each call.

    directory: for the segments. max_bytes: limit of all segments.
    settings: flat settings of this new scheduler; a replay makes its own from them, even with a
    later version.
    Raises ConfigError if the directory cannot be written."""

    order = Order.RECORDER

    def __init__(
        self,
        scheduler: Scheduler,
        directory: Path,
        max_bytes: int,
        keeps_tokens: bool = False,
        settings: Mapping[str, Any] | None = None,
        now: float = 0.0,
        numerics: str | None = None,
    ) -> None:
        """Begin to record. numerics: fingerprint of the engine's numerics at its start."""
        self._scheduler = scheduler
        self._redaction = None if keeps_tokens else Redaction()
        self._writer = _open(directory, max_bytes, self._redaction)
        self._put = self._writer.queue.append
        self._header = {
            "format": FORMAT,
            "state": STATE_VERSION,
            "quire": QUIRE_VERSION,
            "has_tokens": keeps_tokens,
            "settings": dict(settings or {}),
            "numerics": numerics,
        }
        self._is_on = False
        self._names: list[NewNames] = []  # given by the scheduler in this call
        if self._redaction is not None:  # with tokens, a replay computes the names
            scheduler.note_names(self._names)
        self._in_flight: deque[tuple[Int32, npt.NDArray[np.object_] | None]] = deque(
            (step.plan.sample_rows, step.sequences) for step in scheduler.planner.in_flight
        )
        parts = _parts_of(scheduler, keeps_tokens)
        self._header["new"] = encode(parts) if settings is not None else None
        self._put(self._segment(now))
        self._header["new"] = None
        self._is_on = True
        self._end = weakref.finalize(self, _Writer.stop, self._writer)

    # ---- the doors ---------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> Decisions:
        return self._pass(lambda: self._scheduler.add(request, now), now, (ADD, now, request))

    def control(self, message: Control, now: float) -> Decisions:
        if type(message) is KeepCached:  # the engine ends: later plans belong to no request
            self.close()
        call = CONTROL, now, message
        return self._pass(lambda: self._scheduler.control(message, now), now, call)

    def schedule(self, now: float) -> Decisions:
        decisions = self._pass(lambda: self._scheduler.schedule(now), now, (SCHEDULE, now))
        if decisions.plan is not None:
            self._in_flight.append((decisions.plan.sample_rows, decisions.sampling))
        return decisions

    def update(self, result: StepResult, now: float) -> Decisions:
        rows, sampling = self._in_flight.popleft()
        call = UPDATE, now, result, sampling, rows
        return self._pass(lambda: self._scheduler.update(result, now), now, call)

    # ------------------------------------------------------------------------------------------

    @property
    def is_recording(self) -> bool:
        return self._is_on

    def close(self, loop: Loop | None = None) -> None:
        """Write the rest of the queue. The scheduler continues without a recording."""
        if self._is_on:
            self._put((END, "closed"))
        self._is_on = False
        self._end()
        self._writer.needs_segment = False  # the writer may have requested one meanwhile

    def _pass(self, door: Callable[[], Decisions], now: float, call: tuple[Any, ...]) -> Decisions:
        """Pass a call through its door, and record its decisions."""
        if not self._is_ready(now):
            self._names.clear()
            return door()
        self._put(call)
        try:
            decisions = door()
        except BaseException as error:
            self._put_names()
            self._put((RAISED, type(error).__name__))
            raise
        if decisions.refusal is not None:
            self._put((REFUSED,))
        self._put_names()
        if found := [event for event in decisions.events if type(event) is PrefixFound]:
            self._put((FOUND, found))
        if decisions.plan is not None:
            self._put((PLAN, decisions.plan))
        if decisions.orders:
            self._put((ORDERS, decisions.orders))
        return decisions

    def _put_names(self) -> None:
        if self._names:
            self._put((DIGESTS, self._names.copy()))
            self._names.clear()

    def _is_ready(self, now: float) -> bool:
        """Return whether this call is recorded, after beginning or ending a segment if
        necessary."""
        writer = self._writer
        if writer.needs_segment:
            self._begin(now)
        elif self._is_on and len(writer.queue) > MAX_QUEUED_ITEMS:
            self._put((END, "the disk was too slow"))
            self._is_on = False
            writer.has_lost = True
            logger.warning("recording pauses: %s cannot be written fast enough.", writer.directory)
        elif self._is_on and writer.has_failed:
            self._is_on = False
        return self._is_on

    def _begin(self, now: float) -> None:
        """Begin a segment, or end recording if the state cannot be saved."""
        self._writer.needs_segment = False
        try:
            item = self._segment(now)
        except EngineError as error:
            logger.warning("recording ends: %s", error)
            item = (END, "the state could not be saved")
        if self._is_on:
            self._put((END, CONTINUES))
        self._put(item)
        self._is_on = item[0] == SEGMENT

    def _segment(self, now: float) -> tuple[Any, ...]:
        """Return a segment's first item, with the state before the next call. Raises
        EngineError."""
        scheduler, is_redacted = self._scheduler, self._redaction is not None
        context = Context.of(scheduler) if is_redacted else None
        snapshot = dump(scheduler, OMITTED, BLANK if is_redacted else ())
        header = self._header | {"unix_s": time.time(), "now_s": now, "follows": self._is_on}
        return SEGMENT, header, snapshot, context


def _parts_of(scheduler: Scheduler, keeps_tokens: bool) -> dict[str, Any]:
    """Return the parts of a new scheduler that are not settings. The fingerprint is used only to
    compute digests of tokens, so it is recorded only with tokens."""
    memory, stores = scheduler.memory, scheduler.stores
    kv = memory.kv
    return {
        "groups": kv.groups,
        "num_blocks": [pool.num_blocks for pool in kv.pools],
        "block_bytes": kv.block_bytes,
        "host_limits": None if kv.tier is None else kv.tier.limits,
        "rates": memory.rates,
        "num_stores": 0 if stores is None else stores.num_stores,
        "kept": EVICTED if stores is None else stores.kept,
        "takes_media": scheduler.media is not None,
        "fingerprint": memory.names.fingerprint if keeps_tokens else b"",
    }


def make_directory(directory: Path) -> None:
    """Create the directory of a recording. Raises ConfigError if it cannot be written."""
    with _writing_to(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _open(directory: Path, max_bytes: int, redaction: Redaction | None) -> "_Writer":
    with _writing_to(directory):
        files = RecordingFiles(directory, max_bytes)
        files.begin()
    return _Writer(files, redaction)


@contextmanager
def _writing_to(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"record={str(directory)!r} cannot be written ({error.strerror or error}); give a"
            " directory that can be created or written to."
        ) from error


class _Writer:
    """Thread that encodes and writes. The core's thread appends to `queue`, reads `needs_segment`
    and `has_failed`, and sets `has_lost`: a new segment must follow, as items were dropped."""

    def __init__(self, files: RecordingFiles, redaction: Redaction | None) -> None:
        self.queue: deque[tuple[Any, ...]] = deque()
        self.directory = files.directory
        self.needs_segment = False
        self.has_failed = False
        self.has_lost = False
        self.cpu_s = 0.0  # CPU time of this thread
        self._files = files
        self._redaction = redaction
        self._calls = CallEncoder(redaction)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._finish)
        self._batch: list[Any] = []
        self._is_first = True
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-record", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write the rest of the queue, and end the thread."""
        self._stopping.set()
        self._thread.join(END_S)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(PAUSE_S)
            try:
                self._write_queue(breathes=not stopping)
                if stopping:
                    self._files.end()
            except Exception as error:
                self._fail(error)
                return
            self.cpu_s = time.thread_time()

    def _write_queue(self, breathes: bool) -> None:
        queue, num = self.queue, 0
        while queue:
            self._take(queue.popleft())
            num += 1
            if len(self._batch) >= FRAME_ITEMS:
                self._flush()
            if breathes and num % BREATH_ITEMS == 0:
                time.sleep(BREATH_S)
        self._flush()
        if self.has_lost or self._files.is_full:
            self.has_lost = False
            self.needs_segment = not self._stopping.is_set()

    def _take(self, item: tuple[Any, ...]) -> None:
        if item[0] != SEGMENT:
            self._batch.append(self._calls.encode(item))
            return
        self._flush()
        if not self._is_first:
            self._files.begin()
        self._is_first = False
        if self._redaction is not None:
            self._redaction.begin(item[3])
        self._calls = CallEncoder(self._redaction)
        header = item[1] | {"previous": self._files.last_crc}
        self._files.append(self._encoder.encode(header))
        self._files.append(self._encoder.encode(item[2]))

    def _flush(self) -> None:
        if self._batch:
            self._files.append(self._encoder.encode(self._batch))
            self._batch = []

    def _finish(self, value: Any) -> Any:
        """Encode a part that the snapshot deferred."""
        assert isinstance(value, Deferred), f"{type(value).__name__} in a recording"
        if self._redaction is None:
            return encode(value.value)
        return encode(self._redaction.value(value.value, value.name))

    def _fail(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        logger.warning("recording to %s ends: %s", self.directory, reason)
        self.has_failed = True
        self.queue.clear()
        self._files.close()
