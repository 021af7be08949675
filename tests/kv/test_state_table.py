"""Tables of states against a plain device: a block holds the state after its last token.

A state is the tuple of all tokens before it; a step makes the next one from the one it reads.
"""

import random

from quire.kv.pool import BlockPool
from quire.kv.state_table import StateTable
from quire.kv.table import NULL
from tests.kv.test_manager import digests_of

SIZE = 4
State = tuple[int, ...]


class Device:
    """blocks: the state that each block holds."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: dict[int, State] = {}

    def step(self, table: StateTable, tokens: State, num_new: int) -> None:
        """Compute the next tokens of a sequence, as a plan has it done."""
        start = table.num_tokens
        table.drop_before(max(0, start - 1))
        num_free, num_taken = self.pool.num_free, table.num_new_blocks(num_new)
        done = table.append(num_new)
        assert num_free - self.pool.num_free == num_taken
        for source, destination in done.copies:
            self.blocks[destination] = self.blocks[source]
        before = self.blocks[table.blocks[(start - 1) // SIZE]] if start else ()
        assert before == tokens[:start], "the state that is read is not the one before"
        for i in range(start // SIZE, (start + num_new - 1) // SIZE + 1):
            if table.blocks[i] != NULL:
                self.blocks[table.blocks[i]] = tokens[: min(start + num_new, (i + 1) * SIZE)]


def test_forks_and_chunks_of_any_length_find_their_own_states() -> None:
    draws = random.Random(0)
    for _ in range(200):
        pool = BlockPool(40)
        device, kept = Device(pool), set(draws.sample(range(10), draws.randrange(4)))
        first = StateTable(pool, SIZE)
        first.retained = kept
        lines: list[tuple[StateTable, State]] = [(first, ())]
        for _ in range(30):
            table, tokens = draws.choice(lines)
            num_new = draws.choice((1, 1, 2, 3, 5, 9))
            if len(lines) < 4 and draws.random() < 0.2:
                lines.append((table.fork(), tokens))
            elif len(tokens) + num_new <= 40:
                longer = (*tokens, *(draws.randrange(9) for _ in range(num_new)))
                lines[lines.index((table, tokens))] = table, longer
                device.step(table, longer, num_new)
                held = {i for i, block_id in enumerate(table.blocks) if block_id != NULL}
                passed = set(range(len(tokens) // SIZE, (len(longer) - 1) // SIZE))
                assert kept & passed <= held, "a kept state is missing"
                assert len(held) <= 2 + len(kept)
        pool.check_invariants(b for table, _ in lines for b in table.live_blocks)
        for table, _ in lines:
            table.free()
        assert pool.num_used == 0


def test_retained_states_and_the_last_other_state_keep_their_names() -> None:
    pool = BlockPool(10)
    device, digests = Device(pool), digests_of(40)
    table, tokens = StateTable(pool, SIZE), tuple(range(40))
    table.retained = {1, 4}
    num_named = 0
    for end in range(2, 41, 2):
        device.step(table, tokens[:end], 2)
        table.name(num_named, digests[num_named : end // SIZE])
        num_named = end // SIZE
        named = {i for i in range(10) if pool.lookup(digests[i]) is not None}
        last = max((i for i in range(num_named) if i not in (1, 4)), default=1)
        assert named == {i for i in (1, 4, last) if i < num_named}
        assert table.can_continue_at(end, end - 1)
    for i in (1, 4, 9):
        found = pool.lookup(digests[i])
        assert found is not None and device.blocks[found] == tokens[: (i + 1) * SIZE]


def test_a_sequence_cannot_continue_at_a_state_that_was_skipped() -> None:
    pool = BlockPool(10)
    table = StateTable(pool, SIZE)
    table.retained = {1}
    Device(pool).step(table, tuple(range(15)), 15)
    there = [n for n in range(16) if table.can_continue_at(n, max(0, n - 1))]
    assert there == [0, 8, 15]
    assert table.num_free_slots(0) == 1 and table.num_free_slots(2) > 1 << 60


def test_draft_tokens_have_a_state_in_each_block() -> None:
    table = StateTable(BlockPool(4), SIZE)
    table.append(3)
    table.append_drafts(7)
    assert table.num_tokens == 10
    assert len(table.live_blocks) == 3
