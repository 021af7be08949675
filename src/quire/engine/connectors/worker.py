"""The thread that moves blocks between host memory and one store.

    core's thread   submit(order) ... expire(now)                  answers, through a callable
    this thread     remove > look-up > fetch > keep, in pieces of some megabytes:
                      fetch: store -> private buffer -> checked -> host block, if still wanted
                      keep:  host block -> copy -> store

A store that raises or hangs causes misses. `expire`, on the core's thread, answers overdue orders
with misses. Late data from the store must not be written, since the host blocks may have another
owner by then. So each job has a lock. Under the lock this thread checks that the job is not over,
and copies one block, and `expire` ends the job. `expire` never waits for the lock: if it is held,
a block is being written, and the next call ends the job.

Blocks to be removed count as missing from then on, even if the store fails to remove them. Waiting
jobs no longer keep them. A removal is the only order that waits for a stuck store, and that is
carried out even after it was answered.

Reads of files and sockets release the interpreter's lock, and so do checksums. After a fork the
child has no such thread: its orders get misses.
"""

import logging
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from quire.base.clock import Clock, MonotonicClock
from quire.base.kv_orders import (
    Answer,
    BlockName,
    Fetch,
    Fetched,
    Item,
    Keep,
    Kept,
    LookedUp,
    LookUp,
    Order,
    Remove,
    Removed,
)
from quire.engine.connectors.store import BlockStore, Buffer, block_key, seal, unseal
from quire.engine.observability.log_throttle import ThrottledLog

logger = logging.getLogger("quire")

KINDS = (Remove, LookUp, Fetch, Keep)  # by priority
AT_THE_END = (Remove, Keep)  # still carried out when the worker closes
WAIT_S: dict[type[Order], float] = {  # then `expire` ends the job
    Remove: 120.0, LookUp: 2.0, Fetch: 30.0, Keep: 120.0,
}  # fmt: skip
STUCK_S = 2.0  # maximum of a store's call; until a longer one returns, all other orders get misses
FETCH_BYTES = 8 << 20  # in one request; look-ups are done in between
MAX_KEEP_BYTES = 256 << 20  # of waiting orders
MAX_WAITING = 4096  # look-ups, and fetches
POLL_S, PROBED = 0.01, 4  # interval of repeated look-ups; first and last names probed
MAX_FAILURES, QUIET_S = 3, 5.0  # failures in a row, then time without calls
MAX_REFUSED_KEYS = 4096


class HostMemory(Protocol):
    """Blocks of host memory, by cache group. Any thread may call it."""

    def block_bytes(self, group: int) -> int: ...

    def read(self, group: int, block: int) -> Buffer:
        """Return a copy of the block's bytes."""
        ...

    def write(self, group: int, block: int, data: memoryview) -> None:
        """Fill the block; `data` is only valid during the call."""
        ...


class StoreWorker:
    """Worker that carries out orders on a thread of its own. The thread ends with `close`, or when
    no reference to this object is left. Only the core's thread calls the methods.

    answer: gets each order's answer, from any thread.
    ring: called after it, to wake the core. If one referred to the core, that could never end.
    scrub: masks the secrets of the store's address in the texts of its errors."""

    def __init__(
        self,
        store: BlockStore,
        fingerprint: bytes,
        memory: HostMemory,
        answer: Callable[[Answer], None],
        ring: Callable[[], None],
        clock: Clock | None = None,
        scrub: Callable[[str], str] = str,
    ) -> None:
        clock = clock or MonotonicClock()
        mover = _Mover(store, fingerprint, memory, clock, scrub)
        self._work = _Work(mover, answer, ring, clock)
        self._clock = clock
        self._process_id = os.getpid()
        # A daemon, because a store's call cannot be ended.
        self._thread = threading.Thread(target=self._work.run, name="quire-store", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._work, self._process_id)

    def submit(self, order: Order) -> None:
        """Queue an order. An order is answered at once, before this returns, if the queue is full,
        the store is stuck, or the worker is closed."""
        now = self._clock.now()
        job = _Job(order, now)
        is_ours = os.getpid() == self._process_id
        waits = isinstance(order, Remove) or not self._work.mover.is_stuck(now)
        if is_ours and waits and self._work.add(job):
            return
        self._work.finish(job)

    def expire(self, now: float) -> None:
        """Answer overdue orders with misses."""
        if os.getpid() == self._process_id:
            self._work.expire(now)

    @property
    def next_s(self) -> float | None:
        """Time at which `expire` is due, if nothing happens before; None is never."""
        return self._work.next_s if os.getpid() == self._process_id else None

    def close(self, timeout_s: float) -> None:
        """Carry out the waiting removals and keeps, for up to `timeout_s`, and end the thread.
        Look-ups and fetches get misses. No host block is touched afterwards."""
        if self._end.detach() is None or os.getpid() != self._process_id:
            return
        self._work.stop(is_patient=True)
        self._thread.join(timeout_s)
        self._work.stop(is_patient=False)


@dataclass(eq=False)
class _Job:
    """Order under way. lock: guards the fields after it, and is held while a block is copied."""

    order: Order
    since_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False  # it was answered
    ok: list[bool] = field(default_factory=list)  # by item or name
    position: int = 0  # items before it are done
    num_bytes: int = 0
    duration_s: float = 0.0
    unwanted: set[BlockName] = field(default_factory=set)  # not to be kept any more
    again_s: float = 0.0  # when to continue it, at the earliest

    def __post_init__(self) -> None:
        order = self.order
        self.ok = [False] * len(order.names if isinstance(order, LookUp | Remove) else order.items)

    def answer(self) -> Answer:
        order, ok = self.order, list(self.ok)
        if isinstance(order, LookUp):
            return LookedUp(order.store, order.request_id, ok, order.ticket)
        if isinstance(order, Remove):
            return Removed(order.store, order.ticket, ok)
        kind = Fetched if isinstance(order, Fetch) else Kept
        return kind(order.store, order.ticket, ok, self.num_bytes, self.duration_s)


class _Work:
    """Jobs, which both threads share. It does not refer to the worker, whose end stops the
    thread."""

    def __init__(
        self,
        mover: "_Mover",
        answer: Callable[[Answer], None],
        ring: Callable[[], None],
        clock: Clock,
    ) -> None:
        self.mover = mover
        self._answer = answer
        self._ring = ring
        self._clock = clock
        self._changed = threading.Condition()  # guards the fields below
        self._jobs: dict[type[Order], deque[_Job]] = {kind: deque() for kind in KINDS}
        self._keep_bytes = 0
        self._is_closing = self._is_abandoned = False

    # ---- the core's thread -------------------------------------------------------------------

    def add(self, job: _Job) -> bool:
        """Queue a job. Return False if the queue is full or the thread ends."""
        waiting = self._jobs[type(job.order)]
        num_bytes = self._bytes_to_keep(job)
        with self._changed:
            if self._is_closing or len(waiting) >= MAX_WAITING:
                return False
            if num_bytes and self._keep_bytes and self._keep_bytes + num_bytes > MAX_KEEP_BYTES:
                return False
            waiting.append(job)
            self._keep_bytes += num_bytes
            self._changed.notify()
        return True

    def expire(self, now: float) -> None:
        with self._changed:
            late = [
                job
                for kind, jobs in self._jobs.items()
                for job in jobs
                if now >= job.since_s + WAIT_S[kind]
            ]
        for job in late:
            if self.finish(job, waits=False) and not isinstance(job.order, Remove):
                self._forget(job)

    @property
    def next_s(self) -> float | None:
        with self._changed:
            times = [
                job.since_s + WAIT_S[kind]
                for kind, jobs in self._jobs.items()
                for job in islice((job for job in jobs if not job.is_over), 1)
            ]
        return min(times, default=None)

    def stop(self, is_patient: bool) -> None:
        """End the thread. is_patient: after all waiting removals and keeps, instead of after the
        current call."""
        if not is_patient:
            self.abandon()
        with self._changed:
            self._is_closing = True
            kinds = [kind for kind in KINDS if not (is_patient and kind in AT_THE_END)]
            jobs = [job for kind in kinds for job in self._jobs[kind]]
            self._changed.notify()
        for job in jobs:
            self.finish(job)
            self._forget(job)

    def abandon(self) -> None:
        """End the thread after its current call, without answers. It uses no job's lock: the
        garbage collector may call it on a thread that holds one."""
        with self._changed:
            self._is_closing = self._is_abandoned = True
            self._changed.notify()

    def finish(self, job: _Job, waits: bool = True) -> bool:
        """Answer a job, unless it was answered. Return False if its lock is held and `waits` is
        False."""
        if not job.lock.acquire(blocking=waits):
            return False
        try:
            if job.is_over:
                return True
            job.is_over = True
            answer = job.answer()
        finally:
            job.lock.release()
        try:
            self._answer(answer)
            self._ring()
        except Exception:
            logger.exception("the answer of a KV store was lost")
        return True

    def _forget(self, job: _Job) -> None:
        with self._changed:
            jobs = self._jobs[type(job.order)]
            if job in jobs:
                jobs.remove(job)
                self._keep_bytes -= self._bytes_to_keep(job)

    def _bytes_to_keep(self, job: _Job) -> int:
        if not isinstance(job.order, Keep):
            return 0
        return sum(self.mover.memory.block_bytes(group) for group, _, _ in job.order.items)

    # ---- the store's thread ------------------------------------------------------------------

    def run(self) -> None:
        while (job := self._next()) is not None:
            begin = self._clock.now()
            if isinstance(job.order, Remove):
                self._keep_without(job.order.names)
            is_done = self.mover.carry_on(job)
            with job.lock:
                job.duration_s += self._clock.now() - begin
            if is_done:
                self.finish(job)
                self._forget(job)
            del job  # hold no job while waiting
        self.mover.close()

    def _keep_without(self, names: tuple[BlockName, ...]) -> None:
        with self._changed:
            for job in self._jobs[Keep]:
                job.unwanted.update(names)

    def _next(self) -> _Job | None:
        """Return the job with the highest priority, without removing it; None at the end."""
        with self._changed:
            while not self._is_abandoned:
                now, next_s = self._clock.now(), math.inf
                for kind, jobs in self._jobs.items():
                    if not jobs:
                        continue
                    # Of the repeated look-ups, take the first that is due.
                    job = min(jobs, key=_again_s) if kind is LookUp else jobs[0]
                    due_s = max(job.again_s, self.mover.rests_until_s) if job.again_s else 0.0
                    if due_s <= now:
                        return job
                    next_s = min(next_s, due_s)
                if self._is_closing:
                    break
                self._changed.wait(None if next_s == math.inf else next_s - now)
        return None


class _Mover:
    """Mover of blocks, which carries out jobs piece by piece, on the store's thread."""

    def __init__(
        self,
        store: BlockStore,
        fingerprint: bytes,
        memory: HostMemory,
        clock: Clock,
        scrub: Callable[[str], str],
    ) -> None:
        self.memory = memory
        self._store = store
        self._fingerprint = fingerprint
        self._clock = clock
        self._log, self._scrub = ThrottledLog(clock), scrub
        self._calls = {
            Remove: self._remove, LookUp: self._look_up, Fetch: self._fetch, Keep: self._keep,
        }  # fmt: skip
        self.rests_until_s = 0.0  # repeated look-ups use half of the time
        self._call_since_s: float | None = None  # of the current call of the store
        self._num_failures = 0  # in a row
        self._quiet_until_s = -1.0
        # Keys of values that were rejected or could not be read. They count as missing for all
        # requests until they are put again.
        self._refused: dict[bytes, None] = {}

    def is_stuck(self, now: float) -> bool:
        since_s = self._call_since_s
        return since_s is not None and now > since_s + STUCK_S

    def carry_on(self, job: _Job) -> bool:
        """Carry out a piece of a job, and return whether the job is done. An error is a miss."""
        if isinstance(job.order, Remove):
            self._refuse(self._key(*name) for name in job.order.names)
        elif job.is_over:
            return True
        if self._clock.now() < self._quiet_until_s:
            return True
        try:
            is_done = self._calls[type(job.order)](job)
        except BaseException as error:  # a store of any package
            self._fail(error)
            return True
        self._num_failures = 0
        return is_done

    def close(self) -> None:
        try:
            with self._calling():
                self._store.close()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            self._quiet_until_s = self._clock.now() + QUIET_S
        name = type(self._store).__name__
        self._log.warn(
            "failed",
            f"the KV store {name} failed, and the requested blocks count as missing:"
            f" {type(error).__name__}: {self._scrub(str(error))}",
        )

    @contextmanager
    def _calling(self) -> Iterator[None]:
        self._call_since_s = self._clock.now()
        try:
            yield
        finally:
            self._call_since_s = None

    def _key(self, group: int, digest: bytes) -> bytes:
        return block_key(self._fingerprint, group, digest)

    def _find(self, keys: list[bytes]) -> list[bool]:
        with self._calling():
            found = self._store.find(keys)
        pairs = zip(keys, found, strict=True)
        return [bool(is_found) and key not in self._refused for key, is_found in pairs]

    def _look_up(self, job: _Job) -> bool:
        """Look blocks up, again until the first arrive or `wait_s` ends. Expected blocks arrive in
        order, so the first ones show whether any do. In a group that keeps few blocks, the last
        ones do."""
        order = job.order
        assert isinstance(order, LookUp)
        keys, now = [self._key(*name) for name in order.names], self._clock.now()
        probes = keys[:PROBED] + keys[-PROBED:]
        if now < job.since_s + order.wait_s and not any(self._find(probes)):
            end_s = self._clock.now()
            job.again_s, self.rests_until_s = end_s + POLL_S, end_s + (end_s - now)
            return False
        found = self._find(keys)
        with job.lock:
            job.ok[:] = found
        return True

    def _fetch(self, job: _Job) -> bool:
        assert isinstance(job.order, Fetch)
        items, first = job.order.items, job.position
        num_bytes = last = 0
        for last in range(first, len(items)):
            num_bytes += self.memory.block_bytes(items[last][0])
            if num_bytes >= FETCH_BYTES:
                break
        job.position = min(last + 1, len(items))
        self._fetch_some(job, items[first : job.position], first)
        return job.position == len(items)

    def _fetch_some(self, job: _Job, items: tuple[Item, ...], first: int) -> None:
        keys = [self._key(group, digest) for group, digest, _ in items]
        with self._calling():
            values = iter(self._store.get(keys))
        for i, (key, item) in enumerate(zip(keys, items, strict=True), first):
            with self._calling():
                value = next(values, None)
            data = self._unsealed(key, item, value)
            with job.lock:
                if job.is_over:
                    break
                if data is not None:
                    self.memory.write(item[0], item[2], data)
                    job.ok[i] = True
                    job.num_bytes += len(data)

    def _unsealed(self, key: bytes, item: Item, value: Buffer | None) -> memoryview | None:
        """Return the block's bytes, if the value is valid."""
        if value is not None:
            group, digest, _ = item
            num_bytes = self.memory.block_bytes(group)
            data, reason = unseal(value, self._fingerprint, group, digest, num_bytes)
            if data is not None:
                return data
            name = type(self._store).__name__
            self._log.warn("refused", f"a block of the KV store {name} is not used: {reason}")
        self._refuse([key])
        return None

    def _refuse(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._refused[key] = None
        while len(self._refused) > MAX_REFUSED_KEYS:
            del self._refused[next(iter(self._refused))]

    def _remove(self, job: _Job) -> bool:
        assert isinstance(job.order, Remove)
        keys = [self._key(*name) for name in job.order.names]
        with self._calling():
            self._store.remove(keys)
        for key in keys:
            self._refused.pop(key, None)
        with job.lock:
            job.ok[:] = [True] * len(keys)
        return True

    def _keep(self, job: _Job) -> bool:
        """Keep one block. Before the first, look up which of them the store has."""
        assert isinstance(job.order, Keep)
        items = job.order.items
        if job.position == 0:
            found = self._find([self._key(group, digest) for group, digest, _ in items])
            with job.lock:
                job.ok[:] = found
        while job.position < len(items) and (
            job.ok[job.position] or items[job.position][:2] in job.unwanted
        ):
            job.position += 1
        if job.position < len(items):
            self._put(job, items[job.position])
            job.position += 1
        return job.position >= len(items)

    def _put(self, job: _Job, item: Item) -> None:
        group, digest, block = item
        with job.lock:
            if job.is_over:
                return
            data = self.memory.read(group, block)
        key, header = self._key(group, digest), seal(self._fingerprint, group, digest, data)
        with self._calling():
            is_stored = self._store.put(key, (header, data))
        if is_stored:
            self._refused.pop(key, None)
            with job.lock:
                job.ok[job.position] = True
                job.num_bytes += memoryview(data).nbytes


def _again_s(job: _Job) -> float:
    return job.again_s


def _end(work: _Work, process_id: int) -> None:
    if os.getpid() == process_id:
        work.abandon()
