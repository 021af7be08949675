"""The blocks that a sequence needs, by kind of cache group, against the tokens that attention
reads."""

import random

import pytest

from quire.kv.manager import KVManager
from quire.kv.table import NULL
from quire.spec.cache_group import CHUNKED, FULL, KINDS, LATENT, STATE, WINDOW, CacheGroup
from tests.kv.test_manager import digests_of

SIZE = 4


def group_of(kind: str, span: int) -> CacheGroup:
    return CacheGroup(kind, (0,), 1, 8, span if kind in (WINDOW, CHUNKED) else None, 64)


def tokens_read(kind: str, span: int, position: int) -> set[int]:
    """The earlier tokens that the token at a position reads, said without arithmetic of blocks."""
    earlier = range(position)
    if kind == WINDOW:
        return {j for j in earlier if position - j < span}
    if kind == CHUNKED:
        return {j for j in earlier if j // span == position // span}
    return {position - 1} & set(earlier) if kind == STATE else set(earlier)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_that_is_needed_is_the_first_that_is_read(kind: str) -> None:
    for span in (2, 3, 4, 6, 8, 13):
        for position in range(40):
            read = tokens_read(kind, span, position)
            assert group_of(kind, span).first_needed(position) == min(read, default=position)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_is_the_longest_whose_next_token_finds_all_that_it_reads(kind: str) -> None:
    """Whatever the index has lost of a sequence, alone and beside a group that keeps all."""
    draws = random.Random(0)
    for _ in range(200):
        span = draws.choice((2, 4, 6, 8, 13))
        groups = (group_of(FULL, 0), group_of(kind, span))
        kv = KVManager(groups, (12, 12), SIZE)
        sequence, digests = kv.new_sequence(), digests_of(40)
        kv.states.keep_states(sequence.tables, range(10))
        assert kv.allocate_slots(sequence, 40) is not None
        kv.index_blocks(sequence, digests, 10)
        written = [list(table.blocks) for table in sequence.tables]
        kv.states.end_plan()
        lost = [{i for i in range(10) if draws.random() < share} for share in (0.1, 0.4)]
        for pool, blocks, places in zip(kv.pools, written, lost, strict=True):
            for i in places:
                pool.unindex(blocks[i])

        def is_a_hit(length: int, span: int = span, lost: list[set[int]] = lost) -> bool:
            reads = tokens_read(FULL, 0, length * SIZE), tokens_read(kind, span, length * SIZE)
            return not any(
                {token // SIZE for token in read} & places
                for read, places in zip(reads, lost, strict=True)
            )

        wanted = max(n for n in range(11) if is_a_hit(n))
        hit = kv.get_computed_blocks(digests, 41)
        assert hit.num_tokens == wanted * SIZE
        first = min(tokens_read(kind, span, wanted * SIZE), default=wanted * SIZE) // SIZE
        assert hit.blocks[1] == [NULL] * first + written[1][first:wanted]


def test_bytes_of_a_block() -> None:
    layers = (0, 2, 5)
    assert CacheGroup(FULL, layers, 2, 8).block_bytes(16, 2) == 3 * 2 * 2 * 8 * 16 * 2
    assert CacheGroup(LATENT, layers, 1, 8).block_bytes(16, 2) == 3 * 8 * 16 * 2
    state = CacheGroup(STATE, layers, state_size=100)
    assert state.block_bytes(16, 2) == state.block_bytes(32, 4) == 3 * 100 * 4
    assert state.block_bytes(16, 8) == 3 * 100 * 8
    assert state.stored_block_bytes(16, 2, "int8") == state.block_bytes(16, 2)


@pytest.mark.parametrize(
    ("kind", "span", "blocks"), [(FULL, 0, 25), (WINDOW, 8, 3), (CHUNKED, 8, 3), (STATE, 0, 2)]
)
def test_what_a_long_sequence_holds(kind: str, span: int, blocks: int) -> None:
    assert group_of(kind, span).max_blocks(100, SIZE) == blocks
    assert group_of(kind, span).max_blocks(3, SIZE) == 1
