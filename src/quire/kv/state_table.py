"""Block tables of `state` groups, whose blocks hold the layers' state after a token.

    logical block    0     1     2     3           the sequence has 14 tokens, blocks of 4
    physical block   -     7     -     2           state after token 7 (kept), and 13 (live)

A forward pass over tokens n to m reads the state after token n - 1, from that token's block. It
writes to each block that the table has for these tokens. The new state of a block is the one after
the last of these tokens in it. So once the sequence has passed a block, the block holds the state
at its end. It can then be named, like a full block of another group. The last block is overwritten
in place until it is full.
"""

from collections.abc import Collection, Sequence
from typing import Self

from quire.kv.pool import BlockPool
from quire.kv.table import NULL, Appended, BlockTable

NO_BOUND = 1 << 62


class StateTable(BlockTable):
    """Block table whose blocks hold states.

    retained: logical blocks whose state is written when the sequence passes them; of other blocks,
    only the block where a step ends is written. passing: the last named block that is not in
    `retained`, and its name. prompt_end, prompt_name: the kept block at the prompt's end, and its
    name. began: name of the state that the sequence began with."""

    __slots__ = ("began", "retained", "passing", "prompt_end", "prompt_name")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        super().__init__(pool, block_size)
        self.retained: Collection[int] = ()
        self.passing: tuple[int, bytes] | None = None
        self.prompt_end = -1
        self.prompt_name: bytes | None = None
        self.began: bytes | None = None

    def num_free_slots(self, num_blocks: int) -> int:
        """Return how many tokens fit with num_blocks more; no limit if these exceed the `retained`
        blocks."""
        room = self.capacity - self.num_tokens
        return NO_BOUND if num_blocks > len(self.retained) else room

    @property
    def live_blocks(self) -> list[int]:
        return [block_id for block_id in self.blocks[self.num_dropped :] if block_id != NULL]

    def adopt(self, blocks: list[int], num_tokens: int) -> None:
        """Begin with the last of these states and take a reference."""
        super().adopt([NULL] * (len(blocks) - 1) + blocks[-1:], num_tokens)

    def fork(self) -> Self:
        """Return a second table over the same states. The first that writes copies the live one."""
        child = super().fork()
        child.retained, child.prompt_end = self.retained, self.prompt_end
        return child

    def moved_to(self, pool: BlockPool, state_blocks: dict[int, int]) -> Self:
        """Return the same table over blocks of another pool."""
        table = super().moved_to(pool, state_blocks)
        table.retained, table.prompt_end = self.retained, self.prompt_end
        return table

    def can_continue_at(self, num_tokens: int, first_needed: int) -> bool:
        """Return whether another sequence could begin with the first num_tokens tokens."""
        if num_tokens in (0, self.num_tokens):
            return True
        index, rest = divmod(num_tokens, self.block_size)
        return rest == 0 and num_tokens < self.num_tokens and self.blocks[index - 1] != NULL

    def num_blocks_from(self, first: int, num_tokens: int) -> int:
        """Return the number of blocks from logical block `first` on for num_tokens tokens."""
        return len(self._state_blocks(first, num_tokens))

    def _state_blocks(self, first: int, num_tokens: int) -> list[int]:
        """Return the logical blocks from `first` on that get a state, for num_tokens tokens."""
        last = (num_tokens - 1) // self.block_size
        return (
            [*(i for i in sorted(self.retained) if first <= i < last), last]
            if last >= first
            else []
        )

    def append(self, num_tokens: int) -> Appended:
        """Make room to write the states after the next `num_tokens` tokens."""
        done = Appended()
        if num_tokens == 0:
            return done
        state_blocks = self._state_blocks(len(self.blocks), self.num_tokens + num_tokens)
        partial = self._partial_index()
        if partial is not None:
            self._make_writable(partial, done)
        self.num_tokens += num_tokens
        for i in range(len(self.blocks), state_blocks[-1] + 1 if state_blocks else 0):
            block_id = self._pool.allocate() if i in state_blocks else NULL
            done.writes.append((i, block_id))
            self.blocks.append(block_id)
        return done

    def append_drafts(self, num_tokens: int) -> Appended:
        """Make room for a state at the end of each block that these tokens pass. Any of the tokens
        may be the last accepted one."""
        done, end = Appended(), self.num_tokens + num_tokens
        while self.num_tokens < end:
            block_end = self.num_tokens + self.block_size - self.num_tokens % self.block_size
            part = self.append(min(end, block_end) - self.num_tokens)
            done.writes += part.writes
            done.copies += part.copies
        return done

    def name(self, first: int, digests: Sequence[bytes]) -> list[int]:
        """Name the states of the blocks from `first` on, and return the named blocks. Only the last
        block outside of `retained` has a name, because more names would evict useful states."""
        named = []
        for i, digest in enumerate(digests, first):
            block_id = self.blocks[i]
            if block_id == NULL:
                continue
            self._pool.index(block_id, digest)
            named.append(block_id)
            if i not in self.retained and self._pool.digest_of(block_id) == digest:
                self._forget_passing()
                self.passing = block_id, digest
        return named

    def _forget_passing(self) -> None:
        if self.passing is not None and self._pool.digest_of(self.passing[0]) == self.passing[1]:
            self._pool.unindex(self.passing[0])
