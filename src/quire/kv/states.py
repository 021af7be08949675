"""Which of the states that sequences leave behind others will go on from: what is evicted first.

Of a conversation, each turn begins with a state that the one before left, and leaves two: behind
its prompt and behind its answer. Next turns go on from one of these, always the same kind: behind
the answer, or, where a template leaves a part of it out afterwards, behind the prompt. Which it is
shows in what was begun with so far. So these wait in front of all others to be evicted: the state
that a sequence began with, once it has left a later one, unless a second one has begun with it; and
that of the kind which is hardly ever of use. Where prefixes part states stay as long as others do.
"""

from collections.abc import Sequence

from quire.kv.pool import BlockPool
from quire.kv.state_table import StateTable
from quire.kv.table import NULL

AT_PROMPT, AT_ANSWER, WHERE_PARTED = range(3)
MOST_LEFT = 1 << 14  # that are remembered
ENOUGH, FAR_MORE = 4, 4  # to tell which kind is of use: begun with so often, times the other


class StateWorth:
    """left: by name, where a state was left and how many have begun with it, also of those that
    were evicted since. num_begun: by where it was left."""

    def __init__(self) -> None:
        self.left: dict[bytes, tuple[int, int]] = {}
        self.num_begun = [0, 0, 0]

    def begin(self, table: StateTable, digest: bytes | None) -> None:
        """Note with which state a sequence begins, if it has a name."""
        table.began = digest
        if digest is not None and digest in self.left:
            place, num = self.left[digest]
            self.left[digest] = place, num + 1
            self.num_begun[place] += 1

    def leave(self, table: StateTable, first: int, digests: Sequence[bytes]) -> None:
        """Note which of a sequence's states, of the blocks from `first` on, got names."""
        for i in table.kept:
            if first <= i < first + len(digests) and table.blocks[i] != NULL:
                digest = digests[i - first]
                if i == table.prompt_end:
                    table.prompt_name = digest
                self._remember(digest, AT_PROMPT if i == table.prompt_end else WHERE_PARTED)

    def was_left(self, digests: Sequence[bytes]) -> bool:
        """Tell whether one of these was a sequence's last state, or one behind its prompt."""
        return any(
            self.left.get(digest, (WHERE_PARTED, 0))[0] != WHERE_PARTED for digest in digests
        )

    def settle(self, table: StateTable, pool: BlockPool, has_ended: bool) -> None:
        """Let those states of a sequence go first that are of little use."""
        passing = None if table.passing is None else table.passing[1]
        if has_ended and passing is not None:
            self._remember(passing, AT_ANSWER)
        newest = passing or table.prompt_name
        if newest is not None and table.began not in (None, newest):
            self._let_go(pool, table.began)
        if passing is not None and table.prompt_name is not None:
            at_prompt, at_answer, _ = self.num_begun
            if at_answer >= max(ENOUGH, FAR_MORE * at_prompt):
                self._let_go(pool, table.prompt_name)
            elif has_ended and at_prompt >= max(ENOUGH, FAR_MORE * at_answer):
                self._let_go(pool, passing)

    def _let_go(self, pool: BlockPool, digest: bytes) -> None:
        place, num = self.left.get(digest, (AT_ANSWER, 0))
        if place != WHERE_PARTED and num < 2:
            pool.evict_soon(digest)

    def _remember(self, digest: bytes, place: int) -> None:
        if digest not in self.left:
            self.left[digest] = place, 0
            if len(self.left) > MOST_LEFT:
                del self.left[next(iter(self.left))]
