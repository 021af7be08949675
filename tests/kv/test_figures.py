"""The paper's worked examples, block number for block number (P fig. 6, fig. 8).

Figure 8 on an engine is in tests/engine/loop/test_groups.py, figure 9 in
tests/engine/loop/test_figure_9.py.
"""

from quire.base.settings.config import SchedulerConfig
from quire.kv.manager import KVManager
from quire.kv.pool import BlockPool
from quire.kv.table import BlockTable
from quire.scheduler.core.memory import Memory
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from tests.support.scheduler.fake_device import FakeDevice, make_request

FULL = CacheGroup("full", (0,), 1, 8)


def test_figure_6_block_table_translation() -> None:
    """A prompt of 7 tokens, blocks of 4: blocks 7 and 1; the third decoding step takes block 3."""
    kv = KVManager((FULL,), (9,), 4, free_orders=[[7, 1, 3, 0, 2, 4, 5, 6, 8]])
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16)
    scheduler = Scheduler(Memory(kv, 16), config, max_model_len=20)
    device = FakeDevice((FULL,), (9,), 4)
    scheduler.add(make_request("fig6", [4, 8, 15, 16, 23, 42, 7], max_tokens=4), 0.0)
    sequence = scheduler.lifecycle.sequences["fig6"]

    def step() -> tuple[list[int], int, int]:
        """(physical blocks, filled slots of the last, blocks in use) while the step runs."""
        plan = scheduler.schedule(0.0).plan
        assert plan is not None
        table = sequence.blocks.tables[0]
        filled = (sequence.num_computed_tokens - 1) % 4 + 1
        state = (list(table.blocks), filled, kv.pools[0].num_used)
        scheduler.update(device.run(plan), 0.0)
        return state

    assert step() == ([7, 1], 3, 2)  # 1: the prompt fills block 7 and three slots of block 1
    assert step() == ([7, 1], 4, 2)  # 2: the first output token fills the remaining slot
    assert step() == ([7, 1, 3], 1, 3)  # 3: the second needs a new block
    assert step() == ([7, 1, 3], 2, 3)
    assert kv.pools[0].num_used == 0


def test_figure_8_two_samples_share_the_prompt() -> None:
    """Both samples hold blocks 7 and 1; the first write to block 1 copies it, counts 2 -> 1."""
    pool = BlockPool(9, [7, 1, 3, 0, 2, 4, 5, 6, 8])
    a1 = BlockTable(pool, 4)
    assert a1.append(7).writes == [(0, 7), (1, 1)]
    a2 = a1.fork()
    assert [pool.num_refs(7), pool.num_refs(1)] == [2, 2]

    assert a1.num_new_blocks(1) == 1
    done = a1.append(1)
    assert (done.copies, done.writes) == ([(1, 3)], [(1, 3)])
    assert [pool.num_refs(7), pool.num_refs(1), pool.num_refs(3)] == [2, 1, 1]

    done = a2.append(1)  # block 1 is not shared any more, so it is written in place
    assert (done.copies, done.writes) == ([], [])
    assert (a1.blocks, a2.blocks) == ([7, 3], [7, 1])
    a1.free()
    a2.free()
    pool.check_invariants([])
    assert pool.num_free == 9
