"""The states that sequences leave behind: where they are left, and which are evicted first.

Each turn of a conversation begins with a state that the turn before left. It leaves two states: one
behind its prompt and one behind its answer. The next turn begins with the state behind the answer,
or behind the prompt if the template later leaves a part of the answer out. Which of the two it is
shows in the past, so two kinds of states are evicted before all others:

- the state that a sequence began with, once the sequence has left a later one, unless a second
  sequence began with it;
- a state of the kind that is hardly ever begun with.

States where prefixes part stay as long as other blocks do.
"""

from collections.abc import Collection, Sequence

from quire.kv.pool import BlockPool
from quire.kv.state_table import StateTable
from quire.kv.table import NULL, BlockTable
from quire.spec.cache_group import STATE, CacheGroup

AT_PROMPT, AT_ANSWER, WHERE_PARTED = range(3)
MOST_LEFT = 1 << 14  # names that are remembered
# A kind is of use once sequences began with it ENOUGH times, and FAR_MORE times the other kind.
ENOUGH, FAR_MORE = 4, 4


class StateWorth:
    """Counts how often sequences begin with states.

    left: by name, where a state was left and how many sequences began with it, evicted ones
    included. num_begun: sequences that began with a state, by where it was left.
    """

    def __init__(self) -> None:
        self.left: dict[bytes, tuple[int, int]] = {}
        self.num_begun = [0, 0, 0]

    def begin(self, table: StateTable, digest: bytes | None) -> None:
        """Note the state that a sequence begins with, if it has a name."""
        table.began = digest
        if digest is not None and digest in self.left:
            place, num = self.left[digest]
            self.left[digest] = place, num + 1
            self.num_begun[place] += 1

    def leave(self, table: StateTable, first: int, digests: Sequence[bytes]) -> None:
        """Note which states of a sequence got names, of the blocks from `first` on."""
        for i in table.kept:
            if first <= i < first + len(digests) and table.blocks[i] != NULL:
                digest = digests[i - first]
                if i == table.prompt_end:
                    table.prompt_name = digest
                self._remember(digest, AT_PROMPT if i == table.prompt_end else WHERE_PARTED)

    def was_left(self, digests: Sequence[bytes]) -> bool:
        """Return whether a sequence ended, or its prompt ended, at one of these."""
        return any(
            self.left.get(digest, (WHERE_PARTED, 0))[0] != WHERE_PARTED for digest in digests
        )

    def settle(self, table: StateTable, pool: BlockPool, has_ended: bool) -> None:
        """Let the states of a sequence that are of little use be evicted first."""
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


class States:
    """The tables of all `state` groups together.

    groups: numbers of these groups. unwritten: states that the plan being made will write, by cache
    group. No sequence may begin with them before the next plan.
    """

    def __init__(self, groups: Sequence[CacheGroup], pools: Sequence[BlockPool]) -> None:
        self.groups = [g for g, group in enumerate(groups) if group.kind == STATE]
        self.worth = StateWorth()
        self.unwritten: list[set[int]] = [set() for _ in groups]
        self._all_groups, self._pools = tuple(groups), pools
        # Tables of the plan being made, with their lengths: earlier states may go after it.
        self._grown: list[tuple[Sequence[BlockTable], int]] = []

    def keep_states(
        self, tables: Sequence[BlockTable], kept: Collection[int], prompt_end: int = -1
    ) -> None:
        """Set the logical blocks behind which a sequence leaves its state for others. prompt_end:
        the last block of its prompt, if it is among them."""
        for g in self.groups:
            table = _state_table(tables[g])
            table.kept, table.prompt_end = kept, prompt_end

    def begin(self, tables: Sequence[BlockTable]) -> None:
        """Note that a sequence begins with its last states."""
        for g in self.groups:
            digest = self._pools[g].digest_of(tables[g].blocks[-1])
            self.worth.begin(_state_table(tables[g]), digest)

    def grow(self, tables: Sequence[BlockTable], num_tokens: int) -> None:
        """Note the length of a sequence after the plan being made."""
        self._grown.append((tables, num_tokens))

    def name(
        self,
        tables: Sequence[BlockTable],
        named: Sequence[Sequence[int]],
        first: int,
        digests: Sequence[bytes],
    ) -> None:
        """Note that the plan being made writes these blocks, which have just got their names."""
        for g in self.groups:
            self.unwritten[g].update(named[g])
            self.worth.leave(_state_table(tables[g]), first, digests)

    def end_plan(self) -> None:
        """Note that the plan is made. It writes all keys and values before it reads any, but not
        its states: only the next plans may begin with them."""
        grown, self._grown = self._grown, []
        for g in self.groups:
            self.unwritten[g].clear()
            for tables, num_tokens in grown:
                known = min(num_tokens, tables[g].num_tokens)  # any draft may be rejected
                self._drop_before(g, tables[g], known)
            for tables, _ in grown:
                self._settle(g, tables[g], has_ended=False)

    def end_guesses(self, tables: Sequence[BlockTable]) -> None:
        """Release the states that accepted drafts have passed."""
        for g in self.groups:
            self._drop_before(g, tables[g], tables[g].num_tokens)
            self._settle(g, tables[g], has_ended=False)

    def free(self, tables: Sequence[BlockTable]) -> None:
        """Note that a sequence has freed its tables."""
        for g in self.groups:
            self._settle(g, tables[g], has_ended=True)

    def _drop_before(self, g: int, table: BlockTable, num_tokens: int) -> None:
        table.drop_before(self._all_groups[g].first_needed(num_tokens))

    def _settle(self, g: int, table: BlockTable, has_ended: bool) -> None:
        self.worth.settle(_state_table(table), self._pools[g], has_ended)


def _state_table(table: BlockTable) -> StateTable:
    assert isinstance(table, StateTable)
    return table
