"""Sessions of agents in a simulation: the order of turns, their reuse, and blocks on a disk.

Covers `tools/simulate/agents.py` and `tools/simulate/disk.py`.
"""

from dataclasses import replace

import pytest

from quire.base.clock import FakeClock
from quire.base.kv_orders import Fetch, Fetched, Keep, Kept, LookedUp, LookUp, Remove
from quire.base.settings.config import SchedulerConfig
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import Memory
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from quire.tools.bench import agents as bench
from quire.tools.bench.agent_sessions import SHAPES, Session, Turn, draw_sessions
from quire.tools.simulate.agents import AgentWork
from quire.tools.simulate.disk import Contents, VirtualDisk
from quire.tools.simulate.replica import Replica
from quire.tools.simulate.run import Run, run_all
from quire.tools.step_times import Roofline

BLOCK, BYTES, STEP_S = 4, 100, 1.0


def turn(name: int, num: int, num_output: int = 3, pause_s: float = 0.0) -> Turn:
    return Turn(((name, num),), num_output, pause_s)


PARENT = Session((turn(1, 10), turn(2, 5, pause_s=2.0)))
FAMILY = [
    PARENT,
    Session((turn(3, 4), turn(4, 2)), parent=0, after=0),
    Session((turn(5, 7, num_output=6),), parent=0, after=0),
]


def serve(
    work: AgentWork,
    num_blocks: int = 200,
    num_host: int | None = None,
    partial: bool = True,
    block_size: int = BLOCK,
    length: int = 160,
) -> tuple[Run, VirtualDisk | None]:
    """Serve a workload with steps of one second. num_host: blocks of host memory before a disk.
    length: maximum tokens of a request."""
    clock, run = FakeClock(), Run()
    group = CacheGroup("full", (0,), num_kv_heads=1, head_dim=1)
    limits = None if num_host is None else (num_host,)
    kv = KVManager((group,), (num_blocks,), block_size, block_bytes=(BYTES,), host_limits=limits)
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=64, reuse_partial_blocks=partial
    )
    num_stores = 0 if limits is None else 1
    scheduler = Scheduler(Memory(kv, 64), config, length, num_stores=num_stores)
    replica = Replica(scheduler, Roofline(STEP_S, 0.0), clock, 0, run.by_id, 1000)
    disk = None
    if limits is not None:
        disk = VirtualDisk(Contents([BYTES], 1e9), 1e6, clock)
        replica.connect(disk)
    run_all([replica], work.arrivals(), clock, run, work.then, refused=work.refused)
    scheduler.check_invariants()
    return run, disk


def test_parent_waits_for_its_subagents_and_reads_their_answers() -> None:
    work = AgentWork("family", FAMILY, 1000)
    served = serve(work)[0].by_id
    assert list(served) == ["0-0", "1-0", "2-0", "1-1", "0-1"]
    assert served["1-0"].arrived_s == served["2-0"].arrived_s == served["0-0"].finished_s
    assert served["1-1"].arrived_s == served["1-0"].finished_s
    last_s = max(served["1-1"].finished_s, served["2-0"].finished_s)
    assert served["0-1"].arrived_s == last_s + 2.0
    lengths = {name: each.num_prompt for name, each in served.items()}
    assert lengths == {"0-0": 10, "1-0": 17, "2-0": 20, "1-1": 22, "0-1": 13 + 3 + 6 + 5}


LARGE = Session((turn(3, 100), turn(4, 2)), parent=0, after=0)


@pytest.mark.parametrize(
    ("other", "last", "num_answer"), [(FAMILY[2], "2-0", 6), (LARGE, "0-0", 0)]
)
def test_refused_turn_ends_its_session_with_an_empty_answer(
    other: Session, last: str, num_answer: int
) -> None:
    work = AgentWork("family", [PARENT, LARGE, other], 1000)
    run = serve(work, length=60)[0]
    served = run.by_id
    assert list(served) == ["0-0", "1-0", "2-0", "0-1"]
    assert "max_model_len" in served["1-0"].error and not served["0-1"].error
    assert served["0-1"].num_prompt == 13 + num_answer + 5
    assert served["0-1"].arrived_s == served[last].finished_s + 2.0
    found = bench.summary(work.outcome(run), bench.Run())
    num_failed = 2 if other is LARGE else 1
    assert (found["completed"], found["failed"]) == (4 - num_failed, num_failed)
    assert found["job_s"]["max"] == served["0-1"].finished_s
    assert found["turns_s"]["max"] == found["job_s"]["max"] - 2.0, "a refusal takes no time"


@pytest.mark.parametrize(("partial", "num_cached"), [(True, 12), (False, 12)])
def test_outcome_counts_reuse_like_the_benchmark(partial: bool, num_cached: int) -> None:
    work = AgentWork("alone", [PARENT], 1000)
    run = serve(work, partial=partial)[0]
    found = bench.summary(work.outcome(run), bench.Run())
    assert found["reusable_tokens"] == 12, "the last token of an answer has no KV"
    assert found["reused_tokens"] == num_cached
    assert found["job_s"]["max"] == run.by_id["0-1"].finished_s


def test_disk_keeps_blocks_that_host_memory_evicts() -> None:
    sessions = [
        Session(tuple(turn(100 * i + j, 30, pause_s=50.0) for j in range(4)), at_s=7.0 * i)
        for i in range(6)
    ]
    work = AgentWork("many", sessions, 1000)
    run, disk = serve(work, num_blocks=45, num_host=70)
    assert disk is not None and disk.num_bytes > 70 * BYTES
    found = bench.summary(work.outcome(run), bench.Run())
    assert (found["completed"], found["failed"], found["reuse"]) == (24, 0, 1.0)


@pytest.mark.parametrize(("partial", "low", "high"), [(True, 0.99, 1.0), (False, 0.95, 0.97)])
def test_disk_lets_many_sessions_reuse_nearly_all_tokens(
    partial: bool, low: float, high: float
) -> None:
    size, length = 16, 512
    shape = replace(SHAPES["agentx"], num_turns=10)
    sessions = draw_sessions(shape, 20, length / 200_000, 0.0, seed=4)
    work = AgentWork("day", sessions, 1000)
    num = length // size
    run, disk = serve(work, 2 * num, 6 * num, partial, size, length)
    assert disk is not None and disk.num_bytes > 8 * num * BYTES
    found = bench.summary(work.outcome(run), bench.Run())
    assert found["completed"] == work.num and found["failed"] == 0
    assert low <= found["reuse"] <= high


A, B, C = (bytes([i]) * 32 for i in range(3))


def look_up(disk: VirtualDisk, clock: FakeClock, *digests: bytes) -> list[bool]:
    disk.submit([LookUp(0, "r", tuple((0, each) for each in digests), 9)])
    found = [each for each in disk.take(clock.now()) if isinstance(each, LookedUp)]
    return found[0].found


def test_transfers_are_serial_and_old_blocks_are_deleted() -> None:
    clock = FakeClock()
    contents = Contents([BYTES], 2 * BYTES)
    disk = VirtualDisk(contents, BYTES, clock)  # one block per second
    disk.submit([Keep(0, 1, ((0, A, 0), (0, B, 1)))])
    disk.submit([Fetch(0, 3, ((0, A, 4), (0, C, 5)))])
    assert look_up(disk, clock, A, B, C) == [False, False, False]
    clock.advance(1.0)
    assert look_up(disk, clock, A, B, C) == [True, False, False]
    clock.advance(1.0)
    [kept] = disk.take(clock.now())
    assert isinstance(kept, Kept) and (kept.ok, kept.num_bytes) == ([True, True], 2 * BYTES)
    assert disk.next_answer_s == 3.0
    clock.advance(1.0)
    [fetched] = disk.take(clock.now())
    assert isinstance(fetched, Fetched) and (fetched.ok, fetched.num_bytes) == ([True, False], 100)
    disk.submit([Fetch(0, 4, ((0, A, 4),)), Keep(0, 5, ((0, C, 6),))])
    clock.advance(2.0)
    assert look_up(disk, clock, A, B, C) == [True, False, True], "B was the least recently used"
    disk.submit([Remove(0, 6, ((0, A),))])
    assert list(contents.names) == [(0, C)]


def test_replicas_share_rate_and_blocks_of_a_disk() -> None:
    clock = FakeClock()
    contents = Contents([BYTES], 9 * BYTES)
    one, other = (VirtualDisk(contents, BYTES, clock) for _ in range(2))
    one.submit([Keep(0, 1, ((0, A, 0), (0, B, 1)))])
    other.submit([Keep(0, 1, ((0, B, 0), (0, C, 1)))])
    assert (one.next_answer_s, other.next_answer_s) == (2.0, 3.0)
    assert (one.num_bytes, other.num_bytes) == (2 * BYTES, BYTES), "B is written once"
    clock.advance(2.0)
    assert look_up(other, clock, A, B, C) == [True, True, False]
