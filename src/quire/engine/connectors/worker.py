"""The thread that moves blocks between host memory and one store.

    core's thread   submit(order) ... expire(now)                  answers, through a callable
    this thread     remove > look-up > fetch > keep, in pieces of some megabytes:
                      fetch: store -> private buffer -> checked -> host block, if still wanted
                      keep:  host block -> copy -> store

A store that raises or hangs makes misses. What waits too long is answered with misses by `expire`,
on the core's thread, and what the store brings afterwards must not be written: the host blocks may
be somebody else's by then. So a job has a lock: under it this thread looks whether the job still
lives and copies one block, and `expire` ends the job. It never waits for that lock: who holds it is
just writing a block, and the job ends with the next call.

What is to be removed is missing from then on, whether or not the store can do it, and is left out
of what waits to be kept. It is the one order that waits for a store that is stuck, and that is also
done when it was answered.

Files and sockets are read without the interpreter's lock; so are checksums. After a fork the child
has no such thread: what it asks for is missing.
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

KINDS = (Remove, LookUp, Fetch, Keep)  # by importance
AT_THE_END = (Remove, Keep)  # what is still done when the worker is closed
WAIT_S: dict[type[Order], float] = {  # then `expire` ends it
    Remove: 120.0, LookUp: 2.0, Fetch: 30.0, Keep: 120.0,
}  # fmt: skip
STUCK_S = 2.0  # a call of the store that takes longer: until it returns, all else is a miss
FETCH_BYTES = 8 << 20  # asked for at once; look-ups go between
MOST_KEEP_BYTES = 256 << 20  # that wait
MOST_WAITING = 4096  # look-ups, and fetches
POLL_S, PROBED = 0.01, 4  # how often, at how many of the first and last, to look for what comes
MOST_FAILURES, QUIET_S = 3, 5.0  # after so many failures in a row the store is left alone so long
MOST_REFUSED = 4096


class HostMemory(Protocol):
    """Blocks of host memory, by cache group. Called from any thread."""

    def block_bytes(self, group: int) -> int: ...

    def read(self, group: int, block: int) -> Buffer:
        """Return a copy of the block's bytes."""
        ...

    def write(self, group: int, block: int, data: memoryview) -> None:
        """Fill the block; data is only valid during the call."""
        ...


class StoreWorker:
    """Carries out orders on a thread of its own, which ends with `close`, or when nobody holds this
    object any more. All methods are for one thread, the core's.

    answer: gets each order's answer, from any thread; ring: is called after it, and wakes the core.
    Neither should hold the core, which could never end then. scrub: masks the secrets of the
    store's address in the texts of its errors.
    """

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
        # A daemon, because nothing could end a store's call.
        self._thread = threading.Thread(target=self._work.run, name="quire-store", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._work, self._process_id)

    def submit(self, order: Order) -> None:
        """Have an order carried out. What cannot be is answered at once, before this returns: too
        much waits, the store is stuck, or the worker is closed."""
        now = self._clock.now()
        job = _Job(order, now)
        is_ours = os.getpid() == self._process_id
        waits = isinstance(order, Remove) or not self._work.mover.is_stuck(now)
        if is_ours and waits and self._work.add(job):
            return
        self._work.finish(job)

    def expire(self, now: float) -> None:
        """Answer with misses what has waited too long."""
        if os.getpid() == self._process_id:
            self._work.expire(now)

    @property
    def next_s(self) -> float | None:
        """When `expire` has something to do, if nothing happens before; None is never."""
        return self._work.next_s if os.getpid() == self._process_id else None

    def close(self, timeout_s: float) -> None:
        """Remove and keep what waits for it, for so many seconds at most; the rest is not. What is
        to be looked up or fetched is missing. No host block is touched afterwards."""
        if self._end.detach() is None or os.getpid() != self._process_id:
            return
        self._work.stop(is_patient=True)
        self._thread.join(timeout_s)
        self._work.stop(is_patient=False)


@dataclass(eq=False)
class _Job:
    """An order under way. lock: guards what follows it, and is held while a block is copied.
    unwanted: not to be kept any more."""

    order: Order
    since_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False  # it was answered
    ok: list[bool] = field(default_factory=list)  # by item or name
    position: int = 0  # items before it are done
    num_bytes: int = 0
    duration_s: float = 0.0
    unwanted: set[BlockName] = field(default_factory=set)
    again_s: float = 0.0  # it is not to be carried on before

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
    """What both threads share: the jobs. It holds no worker, whose end is the thread's."""

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
        self._changed = threading.Condition()  # guards what follows
        self._jobs: dict[type[Order], deque[_Job]] = {kind: deque() for kind in KINDS}
        self._keep_bytes = 0
        self._is_closing = self._is_abandoned = False

    # ---- the core's thread -------------------------------------------------------------------

    def add(self, job: _Job) -> bool:
        """Queue a job; False if there is no room, or no thread any more."""
        waiting = self._jobs[type(job.order)]
        num_bytes = self._bytes_to_keep(job)
        with self._changed:
            if self._is_closing or len(waiting) >= MOST_WAITING:
                return False
            if num_bytes and self._keep_bytes and self._keep_bytes + num_bytes > MOST_KEEP_BYTES:
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
        """End the thread: when all is kept, or after what it is doing now."""
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
        """End the thread after what it is doing now, and answer nobody. It takes no job's lock: the
        garbage collector may come here while this very thread holds one."""
        with self._changed:
            self._is_closing = self._is_abandoned = True
            self._changed.notify()

    def finish(self, job: _Job, waits: bool = True) -> bool:
        """Answer a job, unless it was answered. False if its lock is held, and it should not wait
        for that."""
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
            del job  # while it waits it holds nothing
        self.mover.close()

    def _keep_without(self, names: tuple[BlockName, ...]) -> None:
        with self._changed:
            for job in self._jobs[Keep]:
                job.unwanted.update(names)

    def _next(self) -> _Job | None:
        """Return the most important job, which stays where it is; None at the end."""
        with self._changed:
            while not self._is_abandoned:
                now, next_s = self._clock.now(), math.inf
                for kind, jobs in self._jobs.items():
                    if not jobs:
                        continue
                    # Of those that look again and again the one whose turn has come first.
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
    """Carries jobs on, piece by piece; all of it on the store's thread, but for `is_stuck`."""

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
        self.rests_until_s = 0.0  # from looking again, which leaves half of the time to others
        self._call_since_s: float | None = None  # of the store's call under way
        self._num_failures = 0  # in a row
        self._quiet_until_s = -1.0
        # Keys of values that were refused, or could not be read: not there, for all who ask, until
        # they are put again.
        self._refused: dict[bytes, None] = {}

    def is_stuck(self, now: float) -> bool:
        since_s = self._call_since_s
        return since_s is not None and now > since_s + STUCK_S

    def carry_on(self, job: _Job) -> bool:
        """Do a piece of a job; whether it is done. What goes wrong is a miss."""
        if isinstance(job.order, Remove):
            self._refuse(self._key(*name) for name in job.order.names)
        elif job.is_over:
            return True
        if self._clock.now() < self._quiet_until_s:
            return True
        try:
            is_done = self._calls[type(job.order)](job)
        except BaseException as error:  # of a store, which may be anybody's
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
        if self._num_failures >= MOST_FAILURES:
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
        """Look blocks up. Those that are to come do so in their order, so the first ones tell
        whether there are any; or the last, of a group that keeps few."""
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
        """Return the block's bytes, if the value is what was put there."""
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
        while len(self._refused) > MOST_REFUSED:
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
        """Keep one block; before the first, look which of them the store has."""
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
            is_kept = self._store.put(key, (header, data))
        if is_kept:
            self._refused.pop(key, None)
            with job.lock:
                job.ok[job.position] = True
                job.num_bytes += memoryview(data).nbytes


def _again_s(job: _Job) -> float:
    return job.again_s


def _end(work: _Work, process_id: int) -> None:
    if os.getpid() == process_id:
        work.abandon()
