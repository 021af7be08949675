"""Block tables: logical to physical blocks of one sequence in one cache group (P 4.2-4.4).

    logical block    0     1     2                 tokens fill blocks from left to right;
    physical block   7     1     3                 only the last one may be partly filled
    filled           P     P     num_tokens % P

Every decoding method uses `fork`, `append` and `free` (P 5.2). Rewinding and rejected drafts also
use `truncate`. The writing rule: a table may write a block only if no other table holds the block
and the index does not name it. So `append` first copies a shared last block, or removes it from the
index. A window group's table drops blocks that left the window: their entries become NULL.
"""

from collections.abc import Sequence
from typing import Self

from quire.base.plan import Record
from quire.kv.pool import BlockPool

NULL = -1


class Appended(Record):
    """Changes of a table by an append."""

    writes: list[tuple[int, int]] = []  # (logical index, block id)
    copies: list[tuple[int, int]] = []  # (source, destination)


class BlockTable:
    """The blocks of one sequence. num_tokens: slots in use from the left."""

    __slots__ = ("_pool", "block_size", "blocks", "num_tokens", "num_dropped")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self.block_size = block_size
        self.blocks: list[int] = []
        self.num_tokens = 0
        self.num_dropped = 0

    @property
    def capacity(self) -> int:
        """The number of tokens that the blocks can hold, including dropped blocks."""
        return len(self.blocks) * self.block_size

    def num_free_slots(self, num_blocks: int) -> int:
        """Return the number of tokens that fit into the table with num_blocks more blocks."""
        return self.capacity - self.num_tokens + num_blocks * self.block_size

    @property
    def live_blocks(self) -> list[int]:
        return self.blocks[self.num_dropped :]

    def adopt(self, blocks: list[int], num_tokens: int) -> None:
        """Begin with the blocks of a prefix hit, and take references."""
        assert not self.blocks, "a prefix hit is for an empty table"
        self.blocks = list(blocks)
        self.num_tokens = num_tokens
        self.num_dropped = blocks.count(NULL)
        self._pool.acquire_all(blocks if not self.num_dropped else blocks[self.num_dropped :])

    def num_new_blocks(self, num_tokens: int) -> int:
        """Return the number of free blocks that `append(num_tokens)` takes."""
        if num_tokens == 0:
            return 0
        num_appended = self.num_blocks_from(len(self.blocks), self.num_tokens + num_tokens)
        return num_appended + (self._must_copy() if self.num_tokens else 0)

    def num_blocks_from(self, first: int, num_tokens: int) -> int:
        """Return the number of logical blocks from `first` on that num_tokens tokens occupy."""
        return max(0, -(-num_tokens // self.block_size) - first)

    def append(self, num_tokens: int) -> Appended:
        """Make room to write the next `num_tokens` tokens. The pool must have enough blocks."""
        done = Appended()
        if num_tokens == 0:
            return done
        first, partial = len(self.blocks), self._partial_index()
        if partial is not None:
            self._make_writable(partial, done)
        self.num_tokens += num_tokens
        found = self._pool.allocate_all(self.num_blocks_from(first, self.num_tokens))
        self.blocks += found
        done.writes += enumerate(found, first)
        return done

    def num_draft_blocks(self, num_tokens: int) -> int:
        """Return the number of free blocks that `append_drafts(num_tokens)` takes."""
        blocks = -(-(self.num_tokens + num_tokens) // self.block_size)
        return max(0, blocks - len(self.blocks)) + self._must_copy()

    def append_drafts(self, num_tokens: int) -> Appended:
        """Make room to write draft tokens, the last of which may be rejected."""
        return self.append(num_tokens)

    def name(self, first: int, digests: Sequence[bytes]) -> list[int]:
        """Index the full blocks from logical block `first` on. Return the blocks that the table
        still holds."""
        blocks = self.blocks[first : first + len(digests)]
        if self.num_dropped > first:
            held = [pair for pair in zip(blocks, digests, strict=True) if pair[0] != NULL]
            blocks, digests = [block for block, _ in held], [digest for _, digest in held]
        self._pool.index_all(blocks, digests)
        return blocks

    def can_continue_at(self, num_tokens: int, first_needed: int) -> bool:
        """Return whether another sequence could begin with the first num_tokens tokens.
        first_needed: the first token that the token after them needs."""
        return self.num_dropped <= first_needed // self.block_size

    def fork(self) -> Self:
        """Return a second table over the same blocks, shared until one of the two writes."""
        child = type(self)(self._pool, self.block_size)
        self._pool.acquire_all(self.live_blocks)
        child.blocks = list(self.blocks)
        child.num_tokens = self.num_tokens
        child.num_dropped = self.num_dropped
        return child

    def moved_to(self, pool: BlockPool, moved_blocks: dict[int, int]) -> Self:
        """Return the same table over blocks of another pool. moved_blocks: maps blocks of this
        pool to blocks of the other. All tables that move together share and extend it."""
        table = type(self)(pool, self.block_size)
        table.blocks = [NULL] * self.num_dropped
        for block_id in self.blocks[self.num_dropped :]:
            if block_id == NULL:
                pass
            elif block_id in moved_blocks:
                pool.acquire(moved_blocks[block_id])
            else:
                moved_blocks[block_id] = pool.allocate()
            table.blocks.append(moved_blocks.get(block_id, NULL))
        table.num_tokens, table.num_dropped = self.num_tokens, self.num_dropped
        return table

    def truncate(self, num_tokens: int) -> None:
        """Drop all tokens after the first `num_tokens`."""
        assert num_tokens <= self.num_tokens, "truncate cannot lengthen"
        keep = -(-num_tokens // self.block_size)
        assert keep >= self.num_dropped, "the window has left these tokens behind"
        while len(self.blocks) > keep:
            self._release(self.blocks.pop())
        self.num_tokens = num_tokens

    def drop_before(self, position: int) -> None:
        """Release the blocks that hold only tokens before `position`."""
        for i in range(self.num_dropped, min(position // self.block_size, len(self.blocks))):
            self._release(self.blocks[i])
            self.blocks[i] = NULL
            self.num_dropped = i + 1

    def free(self) -> None:
        """Release all blocks, the last first, so that the prompt's beginning is evicted last."""
        self._pool.release_all(reversed(self.live_blocks))
        self.blocks = []
        self.num_tokens = 0
        self.num_dropped = 0

    def _release(self, block_id: int) -> None:
        if block_id != NULL:
            self._pool.release(block_id)

    def _partial_index(self) -> int | None:
        """Return the logical index of the block for the next token, if the table has it."""
        index = self.num_tokens // self.block_size
        return index if index < len(self.blocks) else None

    def _must_copy(self) -> int:
        index = self._partial_index()
        return int(index is not None and self._pool.num_refs(self.blocks[index]) > 1)

    def _make_writable(self, index: int, done: Appended) -> None:
        block_id = self.blocks[index]
        if self._pool.num_refs(block_id) > 1:
            fresh = self._pool.allocate()
            self._pool.release(block_id)
            self.blocks[index] = fresh
            done.writes.append((index, fresh))
            done.copies.append((block_id, fresh))
        else:
            self._pool.unindex(block_id)
