"""Random programs of fork, append, truncate, index, free and swap, against plain token lists.

The model stores each table's tokens as a list, and what was written to each slot. After every
operation each table must still read back its own tokens, and the pool's book-keeping must close.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.kv.pool import BlockPool
from quire.kv.table import BlockTable
from tests.support.scheduler.state_machines import FEW_OR_MANY, run_machine


class TableMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 5), num_blocks=st.integers(1, 14))
    def start(self, size: int, num_blocks: int) -> None:
        self.size, self.pool = size, BlockPool(num_blocks)
        self.slots = [[-1] * size for _ in range(num_blocks)]
        self.tables: list[tuple[BlockTable, list[int]]] = []
        self.host = BlockPool(num_blocks)
        self.host_slots = [[-1] * size for _ in range(num_blocks)]
        self.away: list[list[tuple[BlockTable, list[int]]]] = []  # groups that are swapped out
        self.next_token = 0

    @rule()
    def new(self) -> None:
        if len(self.tables) < 4:
            self.tables.append((BlockTable(self.pool, self.size), []))

    @rule(pick=st.integers(0, 3), count=st.integers(0, 9))
    def append(self, pick: int, count: int) -> None:
        if pick >= len(self.tables):
            return
        table, tokens = self.tables[pick]
        if table.num_new_blocks(count) > self.pool.num_free:
            return
        free = self.pool.num_free
        needed = table.num_new_blocks(count)
        if count:
            assert table.num_draft_blocks(count) == needed
        done = table.append(count)
        assert self.pool.num_free == free - needed, "num_new_blocks returned another number"
        for source, destination in done.copies:
            self.slots[destination] = list(self.slots[source])
        for _ in range(count):
            block_id = table.blocks[len(tokens) // self.size]
            assert self.pool.num_refs(block_id) == 1, "a shared block is written"
            assert not self.pool.is_indexed(block_id), "an indexed block is written"
            self.slots[block_id][len(tokens) % self.size] = self.next_token
            tokens.append(self.next_token)
            self.next_token += 1

    @rule(pick=st.integers(0, 3))
    def fork(self, pick: int) -> None:
        if pick < len(self.tables) < 4:
            table, tokens = self.tables[pick]
            self.tables.append((table.fork(), list(tokens)))

    @rule(pick=st.integers(0, 3), keep=st.integers(0, 40))
    def truncate(self, pick: int, keep: int) -> None:
        if pick < len(self.tables):
            table, tokens = self.tables[pick]
            keep = min(keep, len(tokens))
            table.truncate(keep)
            del tokens[keep:]

    @rule(pick=st.integers(0, 3))
    def index(self, pick: int) -> None:
        """Name all full blocks, by the tokens of their prefix."""
        if pick < len(self.tables):
            table, tokens = self.tables[pick]
            for i in range(len(tokens) // self.size):
                self.pool.index(table.blocks[i], repr(tokens[: (i + 1) * self.size]).encode())

    @rule(pick=st.integers(0, 3))
    def free(self, pick: int) -> None:
        if pick < len(self.tables):
            self.tables.pop(pick)[0].free()

    @rule(picks=st.sets(st.integers(0, 3), min_size=1))
    def swap_out(self, picks: set[int]) -> None:
        """Swap out several tables together; shared blocks stay shared."""
        group = [table for i, table in enumerate(self.tables) if i in picks]
        blocks = {block_id for table, _ in group for block_id in table.blocks}
        if not group or len(blocks) > self.host.num_free:
            return
        self.tables = [table for i, table in enumerate(self.tables) if i not in picks]
        used = self.host.num_used
        self.away.append(self._move(group, self.host, self.slots, self.host_slots))
        assert self.host.num_used == used + len(blocks), "a shared block was copied twice"

    @rule()
    def swap_in(self) -> None:
        if not self.away:
            return
        group = self.away[0]
        blocks = {block_id for table, _ in group for block_id in table.blocks}
        if len(blocks) <= self.pool.num_free and len(self.tables) + len(group) <= 4:
            self.tables += self._move(self.away.pop(0), self.pool, self.host_slots, self.slots)

    def _move(
        self,
        group: list[tuple[BlockTable, list[int]]],
        pool: BlockPool,
        source: list[list[int]],
        destination: list[list[int]],
    ) -> list[tuple[BlockTable, list[int]]]:
        places: dict[int, int] = {}
        moved = [(table.moved_to(pool, places), tokens) for table, tokens in group]
        for block_id, place in places.items():
            destination[place] = list(source[block_id])
        for table, _ in group:
            table.free()
        return moved

    @rule(pick=st.integers(0, 3))
    def hit(self, pick: int) -> None:
        """Begin a new table with the blocks of another table's prefix that are still indexed."""
        if not pick < len(self.tables) < 4:
            return
        _, tokens = self.tables[pick]
        found: list[int] = []
        for i in range(len(tokens) // self.size):
            block_id = self.pool.lookup(repr(tokens[: (i + 1) * self.size]).encode())
            if block_id is None:
                break
            found.append(block_id)
        table = BlockTable(self.pool, self.size)
        table.adopt(found, len(found) * table.block_size)
        self.tables.append((table, tokens[: len(found) * self.size]))

    @invariant()
    def reads_back(self) -> None:
        if "pool" not in vars(self):
            return
        for table, tokens in self.tables:
            assert table.num_tokens == len(tokens)
            assert 0 <= table.capacity - table.num_tokens < self.size
            read = [t for block_id in table.blocks for t in self.slots[block_id]]
            assert read[: len(tokens)] == tokens
        self.pool.check_invariants(b for table, _ in self.tables for b in table.blocks)
        away = [pair for group in self.away for pair in group]
        for table, tokens in away:
            read = [t for block_id in table.blocks for t in self.host_slots[block_id]]
            assert read[: len(tokens)] == tokens
        self.host.check_invariants(b for table, _ in away for b in table.blocks)


@FEW_OR_MANY
def test_random_programs_keep_every_tables_tokens(max_examples: int) -> None:
    run_machine(TableMachine, max_examples)
