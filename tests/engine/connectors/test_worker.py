"""The store worker: order of its work, faults of a store, and host blocks that must not change."""

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import pytest

import quire.engine.connectors.worker as module
from quire.base.clock import FakeClock
from quire.base.kv_orders import Answer, Fetched, Item, Keep, Kept, LookedUp, LookUp, Order, Removed
from quire.engine.connectors.store import Buffer, StoreError
from quire.engine.connectors.worker import MAX_FAILURES, QUIET_S, STUCK_S, WAIT_S, StoreWorker
from tests.support.engine.stores import (
    BLOCK_BYTES,
    FINGERPRINT,
    PATIENCE_S,
    Answers,
    DictStore,
    Memory,
    contents,
    digest,
    fetch,
    items,
    keep,
    key,
    look_up,
    remove,
    sealed,
)

FETCH_S = WAIT_S[module.Fetch]


class Bench:
    """A worker over a store in a dict. host blocks 0..9 hold the contents of digests 0..9."""

    def __init__(self) -> None:
        self.store, self.memory, self.answers = DictStore(), Memory(), Answers()
        self.clock = FakeClock()
        self.memory.blocks = {(0, i): contents(i) for i in range(10)}
        self.worker = StoreWorker(
            self.store, FINGERPRINT, self.memory, self.answers.give, self.answers.ring, self.clock
        )

    def do(self, order: Order) -> Answer:
        self.worker.submit(order)
        return self.answers.take()

    def fill(self, *numbers: int) -> None:
        self.store.values |= {key(i): sealed(i) for i in numbers}

    def pass_s(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.worker.expire(self.clock.now())

    def hold(self, order: Order) -> None:
        """Block the store's thread at the gate with this order."""
        self.store.gate.shut()
        self.worker.submit(order)
        assert self.store.gate.came.wait(PATIENCE_S)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.store.gate.open()
    made.memory.gate.open()
    made.worker.close(PATIENCE_S)


def test_kept_blocks_are_found_and_fetched(bench: Bench) -> None:
    bench.memory.blocks[1, 4] = contents(4, group=1)
    both = items(1, 2) + items(4, group=1)
    assert bench.do(Keep(5, 7, both)) == Kept(5, 7, [True] * 3, 2 * 1000 + 64, 0.0)
    assert bench.do(look_up(1, 9, 2)) == LookedUp(0, "r", [True, False, True])
    bench.memory.blocks.clear()
    moved = tuple((group, name, block + 20) for group, name, block in both)
    answer = bench.do(module.Fetch(5, 8, (*moved, *items(9))))
    assert answer == Fetched(5, 8, [True, True, True, False], 2064, 0.0)
    expected = {(0, 21): contents(1), (0, 22): contents(2), (1, 24): contents(4, group=1)}
    assert bench.memory.blocks == expected
    assert bench.answers.num_rings == 3


def test_blocks_in_the_store_are_not_written_again(bench: Bench) -> None:
    bench.fill(1)
    assert bench.do(keep(1, 2)) == Kept(0, 1, [True, True], 1000, 0.0)
    assert bench.store.calls == ["find", "put"]


def test_empty_orders_are_answered(bench: Bench) -> None:
    assert bench.do(look_up()) == LookedUp(0, "r", [])
    assert bench.do(fetch()) == Fetched(0, 1, [], 0, 0.0)
    assert bench.do(keep()) == Kept(0, 1, [], 0, 0.0)


def test_look_ups_and_fetches_run_before_a_keep_and_within_it(bench: Bench) -> None:
    bench.fill(1)
    bench.hold(keep(5, 6, 7))
    for order in (keep(8), fetch(1, ticket=2), look_up(1)):
        bench.worker.submit(order)
    bench.store.gate.open()
    kinds = [type(bench.answers.take()) for _ in range(4)]
    assert kinds == [LookedUp, Fetched, Kept, Kept]
    # The running keep had called find and put one block.
    assert bench.store.calls == ["find", "put", "find", "get", *["put"] * 2, "find", "put"]


def test_look_up_with_wait_s_waits_for_its_blocks(bench: Bench) -> None:
    """Until the store has one of them or the time is over. Other orders run meanwhile."""
    waits = LookUp(0, "late", tuple((0, digest(i)) for i in (1, 2, 3)), 7, wait_s=1.0)
    bench.worker.submit(waits)
    assert bench.do(look_up(1)) == LookedUp(0, "r", [False])
    assert bench.answers.is_empty
    bench.fill(1)
    bench.clock.advance(0.5)
    assert bench.answers.take() == LookedUp(0, "late", [True, False, False], 7)
    bench.worker.submit(msgspec.structs.replace(waits, names=((0, digest(9)),)))
    bench.do(look_up(1))
    bench.clock.advance(1.0)
    assert bench.answers.take() == LookedUp(0, "late", [False], 7)


def test_waiting_look_ups_let_other_orders_through(bench: Bench) -> None:
    """Though a look-up takes longer than the pause between two. Every waiting one is retried."""
    looked: list[bytes] = []
    find = bench.store.find

    def slow_find(keys: Sequence[bytes]) -> list[bool]:
        bench.clock.advance(0.05)
        looked.append(keys[0])
        return find(keys)

    bench.store.find = slow_find  # type: ignore[method-assign]
    bench.fill(9)
    bench.hold(keep(8))
    for i in range(4):
        bench.worker.submit(LookUp(0, f"late {i}", ((0, digest(i)),), i, wait_s=1.5))
    bench.worker.submit(fetch(9))
    bench.store.gate.open()
    kinds = [type(bench.answers.take()) for _ in range(2)]
    assert set(kinds) == {Fetched, Kept}, "waiting look-ups are not answered early"
    assert {key(i) for i in range(4)} <= set(looked)
    bench.fill(*range(4))
    bench.clock.advance(0.2)
    for i in range(4):
        assert bench.answers.take() == LookedUp(0, f"late {i}", [True], i)


def test_long_fetch_lets_look_ups_through(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FETCH_BYTES", 2 * BLOCK_BYTES[0])
    bench.fill(*range(6))
    bench.hold(fetch(*range(6)))
    bench.worker.submit(look_up(1))
    bench.store.gate.open()
    assert bench.answers.take() == LookedUp(0, "r", [True])
    assert bench.answers.take() == Fetched(0, 1, [True] * 6, 6000, 0.0)
    assert bench.store.calls == ["get", "get", "find", *["get"] * 4]


def test_keeps_beyond_the_limit_fail_without_waiting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_KEEP_BYTES", 3 * BLOCK_BYTES[0])
    bench.hold(keep(1, 2, ticket=1))
    bench.worker.submit(keep(3, ticket=2))
    assert bench.answers.is_empty
    assert bench.do(keep(4, ticket=3)) == Kept(0, 3, [False], 0, 0.0)
    bench.store.gate.open()
    assert {bench.answers.take().ticket for _ in range(2)} == {1, 2}
    assert bench.do(keep(4, 5, 6, ticket=4)).ok == [True] * 3
    # A keep larger than the limit runs if nothing else waits.
    assert bench.do(keep(0, 1, 2, 3, 4, 5, 6, 7, ticket=5)).ok == [True] * 8


# ---- a store that hangs ------------------------------------------------------------------------


def test_hanging_store_gives_misses_until_its_call_returns(bench: Bench) -> None:
    bench.fill(1)
    assert bench.worker.next_s is None
    bench.hold(look_up(1))
    assert bench.worker.next_s == 2.0
    bench.pass_s(1.9)
    assert bench.answers.is_empty
    bench.pass_s(0.2)
    assert bench.answers.take() == LookedUp(0, "r", [False])
    assert bench.worker.next_s is None
    bench.pass_s(STUCK_S)
    assert bench.do(look_up(1)) == LookedUp(0, "r", [False])
    assert bench.do(fetch(1)) == Fetched(0, 1, [False], 0, 0.0)
    assert bench.do(keep(1)) == Kept(0, 1, [False], 0, 0.0)
    assert bench.store.calls == ["find"]
    bench.store.gate.open()
    for _ in range(100_000):  # until the call has returned
        if bench.do(look_up(1)).found == [True]:
            break
    else:
        pytest.fail("the store is never called again")
    assert bench.answers.is_empty  # nothing was answered twice


def test_late_fetch_writes_no_more_blocks(bench: Bench) -> None:
    """The first block was written in time. The other host blocks may have new owners by then."""
    bench.fill(1, 2, 3)
    bench.memory.blocks = {(0, i): b"mine" for i in range(4)}
    came_second = threading.Event()
    calls = iter([None, bench.store.gate.shut])

    def second() -> None:  # as the worker reads the second value
        shut = next(calls, None)
        if shut is not None:
            shut()
            came_second.set()
            bench.store.gate.go_through()

    bench.store.raises = second
    bench.worker.submit(fetch(1, 2, 3))
    assert came_second.wait(PATIENCE_S)
    bench.pass_s(FETCH_S - 1)
    assert bench.answers.is_empty
    bench.pass_s(1)
    assert bench.answers.take() == Fetched(0, 1, [True, False, False], 1000, 0.0)
    bench.store.gate.open()
    bench.worker.close(PATIENCE_S)
    assert bench.memory.writes == [(0, 1)]
    assert bench.memory.blocks[0, 2] == bench.memory.blocks[0, 3] == b"mine"
    assert bench.answers.is_empty


def test_expire_neither_waits_for_nor_interrupts_a_block_write(bench: Bench) -> None:
    bench.fill(1)
    bench.memory.gate.shut()
    bench.worker.submit(fetch(1))
    assert bench.memory.gate.came.wait(PATIENCE_S)
    bench.pass_s(FETCH_S + 1)  # returns, though the block is being written
    assert bench.answers.is_empty
    bench.memory.gate.open()
    assert bench.answers.take().ok == [True]
    bench.worker.expire(bench.clock.now())
    assert bench.answers.is_empty


def test_orders_queued_behind_a_hanging_call_expire_too(bench: Bench) -> None:
    bench.fill(1)
    bench.hold(fetch(1, ticket=1))
    bench.worker.submit(fetch(1, ticket=2))
    bench.worker.submit(keep(2, ticket=3))
    bench.pass_s(FETCH_S)
    assert [bench.answers.take() for _ in range(2)] == [
        Fetched(0, 1, [False], 0, 0.0),
        Fetched(0, 2, [False], 0, 0.0),
    ]
    bench.pass_s(WAIT_S[Keep])
    assert bench.answers.take() == Kept(0, 3, [False], 0, 0.0)
    bench.store.gate.open()
    bench.worker.close(PATIENCE_S)
    assert bench.store.calls == ["get"]


# ---- a store that fails ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [OSError(5, "no"), StoreError("no"), KeyError("no"), SystemExit()]
)
def test_exceptions_of_a_store_are_misses_with_one_warning(
    bench: Bench, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    bench.fill(1, 2)
    bench.store.raises = fail
    orders = [look_up(1), fetch(1, 2), keep(3)]
    with caplog.at_level(logging.WARNING):
        for order in orders:
            answer = bench.do(order)
            flags = answer.found if isinstance(answer, LookedUp) else answer.ok
            assert flags and not any(flags)
    [record] = caplog.records
    assert "DictStore failed" in record.message and type(error).__name__ in record.message
    # After three failures the store is not called for a while.
    calls = list(bench.store.calls)
    bench.store.raises = lambda: None
    assert bench.do(look_up(1)).found == [False]
    assert bench.store.calls == calls
    bench.clock.advance(QUIET_S)
    assert bench.do(look_up(1)).found == [True]


def test_failure_during_a_fetch_keeps_the_first_blocks(bench: Bench) -> None:
    bench.fill(1, 2, 3)
    steps = iter([None, OSError("gone")])

    def fail_second() -> None:
        error = next(steps)
        if error is not None:
            raise error

    bench.store.raises = fail_second
    assert bench.do(fetch(1, 2, 3)) == Fetched(0, 1, [True, False, False], 1000, 0.0)


def broken(**methods: Callable[..., object]) -> DictStore:
    store = DictStore()
    for name, method in methods.items():
        setattr(store, name, method)
    return store


@pytest.mark.parametrize(
    "store",
    [
        broken(find=lambda keys: [True], get=lambda keys: iter([])),
        broken(find=lambda keys: None, get=lambda keys: None),
        broken(find=lambda keys: [], get=lambda keys: [7] * 9),
        broken(find=lambda keys: [True] * 9, get=lambda keys: ["text"] * 9),
        broken(find=lambda keys: [], get=lambda keys: [b""] * 9, put=lambda key, parts: None),
    ],
)
def test_invalid_results_of_a_store_are_misses(store: DictStore) -> None:
    memory, answers = Memory(), Answers()
    worker = StoreWorker(store, FINGERPRINT, memory, answers.give, answers.ring)
    for order in (look_up(1, 2), fetch(1, 2), keep(1, 2)):
        worker.submit(order)
        answer = answers.take()
        flags = answer.found if isinstance(answer, LookedUp) else answer.ok
        assert flags == [False, False]
    worker.close(PATIENCE_S)
    assert not memory.writes


def test_damaged_value_is_a_miss_until_it_is_written_again(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.fill(1, 2)
    bench.store.values[key(1)] = sealed(2)
    bench.memory.blocks[0, 1] = b"mine"
    with caplog.at_level(logging.WARNING):
        assert bench.do(look_up(1, 2)).found == [True, True]
        assert bench.do(fetch(1, 2)).ok == [False, True]
        assert bench.do(fetch(1)).ok == [False]
    assert bench.memory.blocks[0, 1] == b"mine"
    [record] = caplog.records
    assert "a block of the KV store DictStore is not used: the block belongs to" in record.message
    assert bench.do(look_up(1, 2)).found == [False, True]
    bench.memory.blocks[0, 1] = contents(1)
    assert bench.do(keep(1, 2)) == Kept(0, 1, [True, True], 1000, 0.0)
    assert bench.do(look_up(1, 2)).found == [True, True]
    assert bench.store.values[key(1)] == sealed(1)


def test_unreadable_value_is_a_miss_until_it_is_written_again(bench: Bench) -> None:
    """For example, a file of another user."""
    bench.fill(1)
    bench.store.get = lambda keys: iter([None])  # type: ignore[method-assign]
    assert bench.do(look_up(1)).found == [True]
    assert bench.do(fetch(1)).ok == [False]
    assert bench.do(look_up(1)).found == [False]
    assert bench.do(keep(1)) == Kept(0, 1, [True], 1000, 0.0)
    assert bench.do(look_up(1)).found == [True]


# ---- removing ----------------------------------------------------------------------------------


def test_remove_overtakes_queued_orders_and_cancels_their_keeps(bench: Bench) -> None:
    bench.fill(1, 2)
    bench.hold(keep(3, 4, 5, ticket=1))  # at find, before the first block
    for order in (
        keep(1, 6, ticket=2),
        fetch(1, 2, ticket=3),
        look_up(1, 2),
        remove(1, 4, ticket=4),
    ):
        bench.worker.submit(order)
    bench.store.gate.open()
    answers = [bench.answers.take() for _ in range(5)]
    assert answers[0] == Removed(0, 4, [True, True])
    assert answers[1] == LookedUp(0, "r", [False, True])
    assert [answer.ok for answer in answers[2:]] == [
        [False, True],
        [True, False, True],
        [False, True],
    ]
    assert sorted(bench.store.values) == sorted(key(i) for i in (2, 3, 5, 6))
    # Recomputed blocks are kept as usual.
    assert bench.do(keep(1, 4, ticket=5)).ok == [True, True]
    assert bench.do(look_up(1, 4)).found == [True, True]


def test_failed_removal_hides_the_block_until_it_is_put_again(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError("read-only")

    bench.fill(1, 2)
    bench.store.raises = fail
    with caplog.at_level(logging.WARNING):
        assert bench.do(remove(1)) == Removed(0, 1, [False])
    assert "read-only" in caplog.text
    bench.store.raises = lambda: None
    assert bench.do(look_up(1, 2)).found == [False, True]
    assert bench.do(keep(1)).ok == [True]  # overwrites the old value
    assert bench.do(look_up(1, 2)).found == [True, True]
    # Also in the quiet time, when the store is not called at all.
    bench.store.raises = fail
    for _ in range(MAX_FAILURES):
        bench.do(look_up(5))
    num_calls = len(bench.store.calls)
    assert bench.do(remove(2)) == Removed(0, 1, [False])
    assert len(bench.store.calls) == num_calls
    bench.store.raises = lambda: None
    bench.clock.advance(QUIET_S)
    assert bench.do(look_up(1, 2)).found == [True, False]


def test_removal_is_done_after_a_stuck_store_recovers(bench: Bench) -> None:
    bench.fill(1)
    bench.hold(look_up(2))
    bench.clock.advance(STUCK_S + 0.1)
    bench.worker.submit(look_up(1))
    assert bench.answers.take().found == [False]
    bench.worker.submit(remove(1))
    assert bench.answers.is_empty
    bench.pass_s(WAIT_S[module.Remove])  # the removal fails, and is done later all the same
    assert [bench.answers.take() for _ in range(2)] == [
        Removed(0, 1, [False]),
        LookedUp(0, "r", [False]),
    ]
    assert bench.worker.next_s is None
    bench.store.gate.open()
    bench.worker.close(PATIENCE_S)
    assert key(1) not in bench.store.values


# ---- the end -----------------------------------------------------------------------------------


def test_close_carries_out_queued_keeps_and_removals(bench: Bench) -> None:
    bench.fill(8, 9)
    bench.hold(keep(1, ticket=1))
    for order in (keep(2, 3, ticket=2), fetch(9, ticket=3), look_up(9), remove(8, ticket=4)):
        bench.worker.submit(order)
    closer = threading.Thread(target=bench.worker.close, args=(PATIENCE_S,))
    closer.start()
    missing = [bench.answers.take() for _ in range(2)]
    bench.store.gate.open()  # after the misses, so that these cannot be carried out
    closer.join(PATIENCE_S)
    first, removed, second = (bench.answers.take() for _ in range(3))
    assert removed == Removed(0, 4, [True]) and key(8) not in bench.store.values
    assert {type(a): a for a in missing} == {
        LookedUp: LookedUp(0, "r", [False]),
        Fetched: Fetched(0, 3, [False], 0, 0.0),
    }
    assert [first.ok, second.ok] == [[True], [True, True]]
    assert bench.store.is_closed.is_set()
    assert bench.do(look_up(9)).found == [False]  # orders after the close are answered, too
    bench.worker.close(PATIENCE_S)


def test_close_does_not_wait_for_a_hanging_store(bench: Bench) -> None:
    bench.hold(keep(1, 2))
    bench.worker.submit(keep(3, ticket=2))
    bench.worker.close(0.0)
    answers = [bench.answers.take() for _ in range(2)]
    assert [answer.ok for answer in answers] == [[False, False], [False]]
    bench.store.gate.open()
    assert bench.store.is_closed.wait(PATIENCE_S)
    assert bench.store.calls == ["find"]


def test_unreferenced_worker_ends() -> None:
    bench = Bench()
    store = bench.store
    del bench
    gc.collect()
    assert store.is_closed.wait(PATIENCE_S)


def test_worker_may_be_collected_on_its_own_thread_during_a_write() -> None:
    """The garbage collector may run while the thread holds a job's lock."""
    bench = Bench()
    store, memory, held = bench.store, bench.memory, [bench.worker]
    del bench.worker

    def write(group: int, block: int, data: memoryview) -> None:
        held.clear()
        gc.collect()

    memory.write = write  # type: ignore[method-assign]
    bench.fill(1)
    held[0].submit(fetch(1))
    assert store.is_closed.wait(PATIENCE_S)
    assert not held


def test_forked_child_gets_misses_and_does_not_affect_the_parent(bench: Bench) -> None:
    bench.fill(1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            found = bench.do(look_up(1)).found
            bench.worker.expire(99.0)
            bench.worker.close(PATIENCE_S)
            status = 0 if found == [False] and bench.worker.next_s is None else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bench.do(look_up(1)).found == [True]


# ---- random orders -----------------------------------------------------------------------------


class Moody(DictStore):
    """A store that fails, damages values and drops them at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = np.random.default_rng(seed)

    def get(self, keys: Sequence[bytes]) -> Iterator[Buffer | None]:
        for value in super().get(keys):
            mood = self._random.integers(10)
            if mood == 0:
                raise OSError("a bad moment")
            damaged = None if value is None else bytes([value[0] ^ 1]) + bytes(value[1:])
            yield damaged if mood == 1 else value

    def put(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        return bool(self._random.integers(4)) and super().put(key, parts)


@pytest.mark.parametrize("seed", range(4))
def test_each_order_gets_one_answer_and_ok_means_exact_bytes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next fetch reuses the host blocks as soon as the last one is answered. The clock jumps
    at random, so that fetches expire during their reads."""
    monkeypatch.setattr(module, "MAX_FAILURES", 10**9)
    monkeypatch.setattr(module, "STUCK_S", 10.0**9)
    random, clock, memory, answers = np.random.default_rng(seed), FakeClock(), Memory(), Answers()
    store = Moody(seed)
    worker = StoreWorker(store, FINGERPRINT, memory, answers.give, answers.ring, clock)
    waiting: dict[int, tuple[Item, ...]] = {}
    num_ok = num_bad = 0
    for ticket in range(600):
        numbers = random.integers(0, 30, 4).tolist()
        if random.integers(3) == 0:
            memory.blocks |= {(0, 100 + i): contents(i) for i in range(30)}
            kept = tuple((0, digest(i), 100 + i) for i in numbers)
            waiting[ticket] = kept
            worker.submit(Keep(0, ticket, kept))
        else:
            fetched = tuple((0, digest(i), 4 * (ticket % 2) + j) for j, i in enumerate(numbers))
            waiting[ticket] = fetched
            worker.submit(module.Fetch(0, ticket, fetched))
        clock.advance(float(random.choice([0.0, 20.0])))
        worker.expire(clock.now())
        while len(waiting) > 1 or (waiting and ticket == 599):
            answer = answers.take()
            assert isinstance(answer, (Fetched, Kept))
            for ok, (group, name, block) in zip(answer.ok, waiting.pop(answer.ticket), strict=True):
                if isinstance(answer, Fetched) and ok:
                    [number] = [i for i in range(30) if digest(i) == name]
                    assert memory.blocks[group, block] == contents(number)
                num_ok, num_bad = num_ok + ok, num_bad + (not ok)
    worker.close(PATIENCE_S)
    assert answers.is_empty
    assert num_ok > 100 and num_bad > 100
