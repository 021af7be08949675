"""Memory: needs, whether they fit, and a subclass that replaces it."""

import pytest

from quire.base.errors import RequestError
from quire.base.events import Preempted
from quire.base.settings.config import SchedulerConfig
from quire.kv.manager import KVBlocks, KVManager
from quire.kv.state_table import StateTable
from quire.kv.table import Appended
from quire.scheduler.core.memory import Memory, Needs
from quire.scheduler.core.sequence import Sequence
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from tests.support.scheduler.events import listen
from tests.support.scheduler.fake_device import make_request
from tests.support.scheduler.plain_scheduler import answer

FULL, WINDOW = CacheGroup("full", (0,), 1, 8), CacheGroup("window", (1,), 1, 8, window=6)
ALSO_FULL = CacheGroup("full", (1,), 1, 8)
SIZE, NUM_BLOCKS, LIMIT = 4, 24, 32  # tokens, blocks, tokens: three reservations


class ReservingMemory(Memory):
    """Reserves for each row all that it could ever need, as Orca's manager does (P 6.1)."""

    def __init__(self, kv: KVManager, chunk: int) -> None:
        super().__init__(kv, chunk, watermark=0.0)
        self.holders: set[Sequence] = set()

    def fits(self, needs: Needs, reserve: int = 0) -> bool:
        kept = sum(self.growth(s.blocks.capacity, s.limit - 1) for s in self.holders)
        return super().fits([need + kept for need in needs], reserve)

    def needs_to_start(self, sequence: Sequence, hit: KVBlocks, num_new: int) -> Needs:
        return self.kv.needs_with_hit(sequence.limit - 1, hit, num_new)

    def start(self, sequence: Sequence, num_new: int, hit: KVBlocks) -> tuple[Appended, ...] | None:
        appended = super().start(sequence, num_new, hit)
        if appended is not None:
            self.holders.add(sequence)
        return appended

    def free(self, sequence: Sequence) -> None:
        self.holders.discard(sequence)
        super().free(sequence)


@pytest.mark.parametrize("reserves", [False, True])
def test_a_reserving_memory_runs_fewer_sequences_and_preempts_none(reserves: bool) -> None:
    kv = KVManager((FULL,), (NUM_BLOCKS,), SIZE, enable_prefix_caching=False)
    memory = ReservingMemory(kv, 64) if reserves else Memory(kv, 64, watermark=0.0)
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64)
    scheduler = Scheduler(memory, config, LIMIT)
    events, most = listen(scheduler), 0
    for i in range(8):
        scheduler.add(make_request(str(i), [i] * 4, max_tokens=LIMIT), 0.0)
    while scheduler.has_work:
        plan = scheduler.schedule(0.0).plan
        assert plan is not None
        most = max(most, scheduler.num_running)
        scheduler.update(answer(plan), 0.0)
        scheduler.check_invariants()
    num_preempted = sum(isinstance(event, Preempted) for event in events)
    assert (most, num_preempted) == (3, 0) if reserves else most > 3 and num_preempted > 0
    assert kv.pools[0].num_used == 0


def test_fits_leaves_the_reserve_free_and_fits_at_all_leaves_room_for_pins() -> None:
    memory = Memory(KVManager((FULL, WINDOW), (10, 6), SIZE), 8)
    assert memory.fits([10, 6]) and memory.fits([8, 4], reserve=2)
    assert not memory.fits([9, 4], reserve=2) and not memory.fits([8, 5], reserve=2)
    memory.reserve([4, 1])
    assert memory.fits_at_all([6, 5]) and not memory.fits_at_all([7, 5])
    assert memory.fits([10, 6]), "blocks reserved for pins are still free"
    assert memory.fits_at_all([10, 6], reserved=[0, 0])


def test_excess_returns_the_first_group_over_its_share_of_the_pool() -> None:
    memory = Memory(KVManager((FULL, WINDOW), (300, 6), SIZE), 8)
    assert memory.excess([100, 2], 1 / 3) is None
    assert memory.excess([101, 3], 1 / 3) == (101, 100, 300)
    assert memory.excess([100, 3], 1 / 3) == (3, 2, 6)


def test_every_cache_group_must_have_room() -> None:
    kv = KVManager((FULL, ALSO_FULL), (40, 5), 4)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    scheduler = Scheduler(Memory(kv, 64), config, 100)
    refusal = scheduler.add(make_request("large", list(range(20)), max_tokens=10), 0.0).refusal
    assert isinstance(refusal, RequestError)
    assert "more KV blocks than the pool has" in str(refusal)
    scheduler.add(make_request("small", list(range(16)), max_tokens=5), 0.0)


def test_the_reserve_of_a_state_group_is_scaled_to_its_pool() -> None:
    """A growing sequence needs ever more blocks of other groups, but only one or two states."""
    states = CacheGroup("state", (1,), state_size=8)
    memory = Memory(KVManager((FULL, states), (1000, 16), SIZE), 8)
    assert memory.headroom.num_blocks == 1000
    assert memory.fits([500, 14], reserve=500) and not memory.fits([500, 15], reserve=500)
    assert memory.fits([500, 15], reserve=1) and not memory.fits([501, 4], reserve=500)
    assert memory.needs_of_prefix(100) == [25, 1]


def test_the_headroom_is_computed_from_the_smallest_pool() -> None:
    memory = Memory(KVManager((FULL, ALSO_FULL), (1000, 50), SIZE), 8, watermark=0.1)
    assert (memory.headroom.num_blocks, memory.headroom.watermark_blocks) == (50, 5)


def test_samples_need_room_for_one_chunk_after_their_windows() -> None:
    """A step computes at most one chunk, for samples of any length."""
    kv = KVManager((FULL, WINDOW), (200, 60), SIZE)
    scheduler = Scheduler(
        Memory(kv, 8), SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8), 120
    )
    scheduler.add(make_request("r", list(range(40)), n=2, max_tokens=60), 0.0)
    sequence = scheduler.lifecycle.sequences["r"]
    for num_tokens in (100, 5):
        needs = scheduler.memory.needs_of_all(sequence, num_tokens, 2)
        assert needs == kv.group_blocks(num_tokens, 10, 2, min(8, num_tokens))
    full, window = scheduler.memory.needs_of_all(sequence, 100, 2)
    assert full == 10 + 2 * 15 and window <= 2 * 5


@pytest.mark.parametrize("num_prompt", range(9, 22))
def test_a_state_is_stored_eight_tokens_before_the_end_of_a_prompt(num_prompt: int) -> None:
    """It is after the last full block before them, as a template may begin answers with them."""
    kv = KVManager((FULL, CacheGroup("state", (1,), state_size=8)), (100, 16), SIZE)
    scheduler = Scheduler(
        Memory(kv, 64), SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64), 120
    )
    scheduler.add(make_request("r", list(range(num_prompt))), 0.0)
    assert scheduler.schedule(0.0).plan is not None
    table = scheduler.lifecycle.sequences["r"].blocks.tables[1]
    assert isinstance(table, StateTable)
    assert table.prompt_end == (num_prompt - 9) // SIZE - 1
    assert set(table.retained) == ({table.prompt_end} if num_prompt >= 9 + SIZE else set())


@pytest.mark.parametrize("num_first", [12, 13])
def test_no_state_is_stored_at_a_divergence_if_an_earlier_one_was_evicted(
    num_first: int,
) -> None:
    """A prompt of 13 tokens stores a state after its first block; a prompt of 12 stores none. The
    next prompt begins with three of its blocks, whose states were evicted."""
    kv = KVManager((FULL, CacheGroup("state", (1,), state_size=8)), (100, 16), SIZE)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    scheduler = Scheduler(Memory(kv, 64), config, 120)
    scheduler.add(make_request("first", list(range(num_first)), max_tokens=9), 0.0)
    plan = scheduler.schedule(0.0).plan
    assert plan is not None
    scheduler.update(answer(plan), 0.0)
    kv.pools[1].reset_index()
    scheduler.add(make_request("next", [*range(12), *range(50, 80)], max_tokens=1), 0.0)
    assert scheduler.schedule(0.0).plan is not None
    table = scheduler.lifecycle.sequences["next"].blocks.tables[1]
    assert isinstance(table, StateTable)
    assert set(table.retained) - {table.prompt_end} == ({2} if num_first == 12 else set())
