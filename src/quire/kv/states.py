"""States that sequences leave for later ones: positions, and the order of eviction.

Each turn of a conversation begins with a state that the turn before left. A turn leaves two states:
one at the end of its prompt and one at the end of its answer. The next turn begins with the state
after the answer. If the template later omits a part of the answer, the next turn begins with the
state after the prompt. Past hits show which of the two is used. So two kinds of states are evicted
before all other blocks:

- the state that a sequence began with, once the sequence has left a later one, unless a second
  sequence began with it;
- a state of the kind, prompt or answer, that sequences hardly ever begin with.

States where prompts diverge stay as long as other blocks do.
"""

from collections.abc import Collection, Sequence

from quire.kv.pool import BlockPool
from quire.kv.state_table import StateTable
from quire.kv.table import NULL, BlockTable
from quire.spec.cache_group import STATE, CacheGroup

AT_PROMPT, AT_ANSWER, AT_DIVERGENCE = range(3)
MAX_NAMES = 1 << 14  # maximum number of names in `StateStatistics.positions`
# A kind is useful after ENOUGH hits, if these are FAR_MORE times the other kind's hits
ENOUGH, FAR_MORE = 4, 4


class StateStatistics:
    """Statistics of how often sequences begin with states.

    positions: by name, the kind of state (such as AT_PROMPT) and the number of sequences that began
    with it; includes evicted states. num_begun: sequences that began with a state, by kind.
    """

    def __init__(self) -> None:
        self.positions: dict[bytes, tuple[int, int]] = {}
        self.num_begun = [0, 0, 0]

    def begin(self, table: StateTable, digest: bytes | None) -> None:
        """Count the state that a sequence begins with, if it has a name."""
        table.began = digest
        if digest is not None and digest in self.positions:
            position, num = self.positions[digest]
            self.positions[digest] = position, num + 1
            self.num_begun[position] += 1

    def leave(self, table: StateTable, first: int, digests: Sequence[bytes]) -> None:
        """Record the states of a sequence that got names, among the blocks from `first` on."""
        for i in table.retained:
            if first <= i < first + len(digests) and table.blocks[i] != NULL:
                digest = digests[i - first]
                if i == table.prompt_end:
                    table.prompt_name = digest
                self._remember(digest, AT_PROMPT if i == table.prompt_end else AT_DIVERGENCE)

    def ends_sequence(self, digests: Sequence[bytes]) -> bool:
        """Return whether a sequence, or its prompt, ended at one of these blocks."""
        return any(
            self.positions.get(digest, (AT_DIVERGENCE, 0))[0] != AT_DIVERGENCE for digest in digests
        )

    def settle(self, table: StateTable, pool: BlockPool, has_ended: bool) -> None:
        """Make states of a sequence that are of little use the next to evict."""
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
        position, num = self.positions.get(digest, (AT_ANSWER, 0))
        if position != AT_DIVERGENCE and num < 2:
            pool.evict_soon(digest)

    def _remember(self, digest: bytes, position: int) -> None:
        if digest not in self.positions:
            self.positions[digest] = position, 0
            if len(self.positions) > MAX_NAMES:
                del self.positions[next(iter(self.positions))]


class States:
    """The states of all `state` groups together.

    groups: indices of these groups. unwritten: by cache group, states that the plan being made will
    write. Sequences may begin with them only from the next plan on.
    """

    def __init__(self, groups: Sequence[CacheGroup], pools: Sequence[BlockPool]) -> None:
        self.groups = [g for g, group in enumerate(groups) if group.kind == STATE]
        self.statistics = StateStatistics()
        self.unwritten: list[set[int]] = [set() for _ in groups]
        self._all_groups, self._pools = tuple(groups), pools
        # Tables with lengths after the plan being made, which may then drop earlier states
        self._grown: list[tuple[Sequence[BlockTable], int]] = []

    def keep_states(
        self, tables: Sequence[BlockTable], retained: Collection[int], prompt_end: int = -1
    ) -> None:
        """Set the logical blocks at whose end a sequence leaves its state for later sequences.
        prompt_end: the last block of its prompt, if it is in `retained`."""
        for g in self.groups:
            table = _state_table(tables[g])
            table.retained, table.prompt_end = retained, prompt_end

    def begin(self, tables: Sequence[BlockTable]) -> None:
        """Record that a sequence begins with its last states."""
        for g in self.groups:
            digest = self._pools[g].digest_of(tables[g].blocks[-1])
            self.statistics.begin(_state_table(tables[g]), digest)

    def grow(self, tables: Sequence[BlockTable], num_tokens: int) -> None:
        """Record the length of a sequence after the plan being made."""
        self._grown.append((tables, num_tokens))

    def name(
        self,
        tables: Sequence[BlockTable],
        named: Sequence[Sequence[int]],
        first: int,
        digests: Sequence[bytes],
    ) -> None:
        """Record that the plan being made writes these newly named blocks."""
        for g in self.groups:
            self.unwritten[g].update(named[g])
            self.statistics.leave(_state_table(tables[g]), first, digests)

    def end_plan(self) -> None:
        """Record that the plan is complete. Its states become available to the next plans. A plan
        writes all keys and values before it reads any, but not its states."""
        grown, self._grown = self._grown, []
        for g in self.groups:
            self.unwritten[g].clear()
            for tables, num_tokens in grown:
                known = min(num_tokens, tables[g].num_tokens)  # any draft token may be rejected
                self._drop_before(g, tables[g], known)
            for tables, _ in grown:
                self._settle(g, tables[g], has_ended=False)

    def end_drafts(self, tables: Sequence[BlockTable]) -> None:
        """Release the states that accepted draft tokens have passed."""
        for g in self.groups:
            self._drop_before(g, tables[g], tables[g].num_tokens)
            self._settle(g, tables[g], has_ended=False)

    def free(self, tables: Sequence[BlockTable]) -> None:
        """Record that a sequence has freed its tables."""
        for g in self.groups:
            self._settle(g, tables[g], has_ended=True)

    def _drop_before(self, g: int, table: BlockTable, num_tokens: int) -> None:
        table.drop_before(self._all_groups[g].first_needed(num_tokens))

    def _settle(self, g: int, table: BlockTable, has_ended: bool) -> None:
        self.statistics.settle(_state_table(table), self._pools[g], has_ended)


def _state_table(table: BlockTable) -> StateTable:
    assert isinstance(table, StateTable)
    return table
