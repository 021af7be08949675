"""Admission: gives rows to waiting sequences while budget, rows and blocks last.

An admission leaves blocks free into which running rows grow (`memory.Headroom`). A sequence that
was preempted `MAX_PREEMPTIONS` times waits until it and all running sequences can grow to their
limits. If no other request runs, no blocks are left free.
"""

from collections import deque

import numpy as np

from quire.base.plan import MoveKind
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.memory import Memory, Needs
from quire.scheduler.core.plans import Blocks, PlanBuilder, SharedBlocks
from quire.scheduler.core.preemption import Preemption
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.sequence import Sequence
from quire.scheduler.sharing import competing_head, pass_over_heads

MAX_PREEMPTIONS = 3


class Admission:
    """Admission of waiting sequences. token_budget: maximum tokens of a step. max_prefill: maximum
    tokens of one sequence in a step; 0 for no limit."""

    def __init__(
        self,
        rows: Rows,
        memory: Memory,
        lifecycle: Lifecycle,
        preemption: Preemption,
        token_budget: int,
        max_prefill: int,
    ) -> None:
        self._rows, self._memory = rows, memory
        self._lifecycle, self._preemption = lifecycle, preemption
        self.token_budget, self._max_prefill = token_budget, max_prefill

    def admit(self, builder: PlanBuilder, budget: int, now: float) -> None:
        """Admit waiting sequences in the queue's order. No sequence passes one that must wait.
        Deferred prompts compete with the head of the queue by rank."""
        deferred, queue = deque(builder.deferred), self._lifecycle.queue
        can_prepare = self._memory.can_prepare
        while budget > 0:
            if deferred:
                pass_over_heads(queue, deferred[0])
            head = competing_head(queue, deferred[0]) if deferred else queue.peek()
            if can_prepare and head is not None and self._is_parked_for_fetch(head):
                continue
            used: int | None = None
            if head is not None and head not in self._lifecycle.suspects.until:
                used = self.bring_in(head, builder, budget, now)
            if used is None and head is not None and self._park_idle(head, builder, now):
                continue
            if used is None and not deferred:
                return
            if used is None:
                used = self._continue_deferred(deferred.popleft(), builder, budget)
            budget -= used

    def bring_in(
        self, sequence: Sequence, builder: PlanBuilder, budget: int, now: float
    ) -> int | None:
        """Admit a waiting sequence. Return the number of its tokens in this plan, or None if it
        must wait."""
        if not self._rows.num_free or sequence.num_pending_lost:
            return None
        bring = self._start if sequence.host_blocks is None else self._resume
        return bring(sequence, builder, budget, now)

    def _is_parked_for_fetch(self, head: Sequence) -> bool:
        """Let the sources fetch what the head lacks, if it could start now. Return whether they
        have parked it."""
        return self.fits_now(head) and not self._memory.prepare(head)

    def fits_now(self, sequence: Sequence) -> bool:
        """Return whether a new request could be admitted now with the token budget of a whole
        step."""
        if not self._rows.num_free or sequence.num_pending_lost or sequence.host_blocks is not None:
            return False
        memory, reserve, needs = self._memory, self.reserve(sequence), self._group_needs(sequence)
        if needs is None or (needs and not memory.could_fit(needs, reserve)):
            return False
        hit = memory.find_hit(sequence)
        num_new = min(self.token_budget, sequence.num_known_tokens - hit.num_tokens)
        return memory.could_fit(memory.needs_to_start(sequence, hit, num_new), reserve, hit.blocks)

    def reserve(self, sequence: Sequence) -> int:
        """Return the number of blocks that an admission of this sequence must leave free."""
        group, num_running = sequence.group, self._rows.num_running
        num_own = 0 if group is None else len(group.running)
        if num_running == num_own:
            return 0
        reserve = self._memory.headroom.blocks(num_running - num_own)
        if sequence.num_preemptions >= MAX_PREEMPTIONS:
            reserve = max(reserve, self._worst_growth(sequence))
        return reserve

    def name_full_blocks(
        self, rows: np.ndarray, num_ready: np.ndarray, builder: PlanBuilder
    ) -> None:
        """Name the full blocks of known tokens that are computed after this plan. rows: int64 [N].
        num_ready: number of these tokens of each row, int64 [N]."""
        size = self._memory.block_size
        counts = [num // size for num in num_ready.tolist()]
        named = self._memory.name_full_blocks(self._rows.sequences(rows), counts)
        pairs = zip(rows.tolist(), named, strict=True)
        builder.shared += [SharedBlocks(row, (), new) for row, new in pairs]
        self._rows.set_index_at(rows, np.array([(count + 1) * size for count in counts]))

    # ---- one sequence ------------------------------------------------------------------------

    def _start(
        self, sequence: Sequence, builder: PlanBuilder, budget: int, now: float
    ) -> int | None:
        """Admit a sequence with its prefix hit. Return as `bring_in` does."""
        memory, lifecycle, reserve = self._memory, self._lifecycle, self.reserve(sequence)
        needs = self._group_needs(sequence)
        if needs is None or (needs and not memory.make_room(needs, reserve, sequence)):
            return None
        num_known = sequence.num_known_tokens
        while True:
            hit = memory.find_hit(sequence)
            num_new = min(budget, num_known - sequence.is_open - hit.num_tokens)
            if num_new == 0:
                lifecycle.park(sequence)
                return 0
            num_new = min(num_new, self._max_prefill or num_new)
            num_new = memory.limit_chunk(sequence, hit.num_tokens, num_new, builder)
            if num_new == 0:
                return None
            if num_new < num_known and memory.needs_whole_prompt:
                return None  # its tokens attend to each other: wait for a step with room for all
            needs = memory.needs_to_start(sequence, hit, num_new)
            if memory.fits(needs, reserve):
                break
            if not memory.could_fit(needs, reserve, hit.blocks):
                return None
            if not memory.evict_one(sequence):  # the next hit may be shorter
                return None
        appended = memory.start(sequence, num_new, hit)
        if appended is None:
            return None
        builder.started.append(lifecycle.start(sequence, hit.num_tokens, now))
        found: Blocks = ()
        if hit.num_tokens:
            builder.add_table(sequence, memory.num_kept_blocks(hit, appended))
            held = [table.blocks for table in sequence.blocks.tables]
            found = [blocks[: len(mine)] for blocks, mine in zip(held, hit.blocks, strict=True)]
        builder.add_blocks(sequence.row, appended)
        self._grant(sequence, num_new, builder, found)
        memory.begin(sequence, hit, now)
        if hit.num_loads:
            self._load(sequence, builder)
        return num_new

    def _load(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Add the loads of a hit to the plan. If the row fails, the loaded blocks are
        distrusted."""
        loads = self._memory.kv.take_loads()
        builder.add_moves(MoveKind.LOAD, loads)
        loaded = [destination for _, destination in loads]
        builder.shared.append(SharedBlocks(sequence.row, [[] for _ in loaded], loaded))

    def _resume(
        self, sequence: Sequence, builder: PlanBuilder, budget: int, now: float
    ) -> int | None:
        """Resume all swapped members of a group. Return as `bring_in` does."""
        if not sequence.has_something_to_compute:
            self._lifecycle.park(sequence)
            return 0
        members = [m for m in sequence.members if m.host_blocks is not None]
        if any(m.num_pending_lost for m in members) or self._rows.num_free < len(members):
            return None
        counts = self._tokens_to_resume(members, budget, builder)
        if not any(counts):  # without a token the plan would not start them
            return None
        num_more = -(-max(counts) // self._memory.block_size) - 1
        needs = self._memory.needs_to_stand([member.swapped for member in members])
        if not self._memory.fits_at_all([need + num_more for need in needs]):
            for member in members:  # their needs exceed the pools
                self._lifecycle.forget_swapped(member)
            return self._start(sequence, builder, budget, now)
        if not self._preemption.resume(members, self.reserve(sequence) + num_more, builder, now):
            return None
        used = 0
        for member, num_new in zip(members, counts, strict=True):
            appended = self._memory.grow(member, num_new) if num_new > 0 else None
            if appended is not None:
                self._rows.set_capacity(member.row, member.blocks.capacity)
                builder.add_blocks(member.row, appended)
                self._grant(member, num_new, builder)
                used += num_new
        assert used, "each member has room for a block more"
        return used

    def _tokens_to_resume(
        self, members: list[Sequence], budget: int, builder: PlanBuilder
    ) -> list[int]:
        """Return the number of tokens that the plan may compute for each swapped member. They fill
        at most one block, except if a `ChunkLimit` only allows more tokens at once."""
        counts, size, limit = list[int](), self._memory.block_size, self._memory.limit_chunk
        for member in members:
            first = member.num_swapped_tokens
            max_new = min(budget - sum(counts), member.num_known_tokens - member.is_open - first)
            num_new = limit(member, first, min(max_new, size - first % size), builder)
            counts.append(num_new or limit(member, first, max_new, builder))
        return counts

    def _grant(
        self, sequence: Sequence, num_new: int, builder: PlanBuilder, hit: Blocks = ()
    ) -> None:
        """Add the next tokens of a row to the plan, and name the blocks that become full. Their
        blocks are allocated. hit: blocks by cache group that the row begins with."""
        memory, rows = self._memory, self._rows
        row, first = sequence.row, sequence.num_computed_tokens
        memory.grant_chunk(sequence, first, num_new, builder)
        rows.advance(row, first + num_new)
        builder.add_row(row, num_new)
        if memory.names.is_indexed(sequence):
            num_ready = min(first + num_new, sequence.num_known_tokens) // memory.block_size
            [named] = memory.name_full_blocks([sequence], [num_ready])
            builder.shared.append(SharedBlocks(row, hit, named))
            rows.set_index_at(row, (num_ready + 1) * memory.block_size)

    def _continue_deferred(self, sequence: Sequence, builder: PlanBuilder, budget: int) -> int:
        """Add the tokens of a deferred prompt to the plan, as far as budget and free blocks allow.
        Return their number."""
        memory = self._memory
        num_new, first = min(budget, self._rows.need_of(sequence)), sequence.num_computed_tokens
        num_new = memory.limit_chunk(sequence, first, num_new, builder)
        if num_new == 0:
            return 0
        appended = memory.grow(sequence, num_new)
        if appended is None:
            num_new = min(num_new, memory.kv.num_free_slots(sequence.blocks))
            num_new = memory.limit_chunk(sequence, first, num_new, builder)
            appended = memory.grow(sequence, num_new) if num_new > 0 else None
        if appended is None:
            return 0
        self._rows.set_capacity(sequence.row, sequence.blocks.capacity)
        builder.add_blocks(sequence.row, appended)
        self._grant(sequence, num_new, builder)
        return num_new

    def _park_idle(self, head: Sequence, builder: PlanBuilder, now: float) -> bool:
        """Park one idle open prompt whose priority is not higher than the head's. Return whether
        there was one. So idle clients never block others."""
        if head.num_pending_lost:
            return False
        rows = self._rows.idle()
        planned, _ = builder.all_rows()
        for sequence in self._rows.sequences(rows[~np.isin(rows, planned)]):
            if sequence.priority >= head.priority:
                self._lifecycle.park_running(sequence, head.request.request_id, now)
                return True
        return False

    # ---- does it fit -------------------------------------------------------------------------

    def _worst_growth(self, sequence: Sequence) -> int:
        """Return the number of blocks that this request and all running rows lack up to their
        limits."""
        idle, growth = set(self._rows.idle().tolist()), self._memory.growth
        members = [sequence] if sequence.group is None else sequence.group.unfinished
        lacking = sum(growth(s.num_known_tokens, s.limit) for s in members if s.row < 0)
        for other in self._rows.sequences():
            if other.row not in idle:
                num = 1 if other.group is None else 1 + len(other.group.reserved_rows)
                lacking += num * growth(other.num_computed_tokens, other.limit)
        return lacking

    def _group_needs(self, sequence: Sequence) -> Needs | None:
        """Return the need of a whole waiting group, checked when its first member is admitted; ()
        for later members and for single sequences. Return None if too few rows are free, or while
        another member computes the prompt of a preempted one."""
        group = sequence.group
        if group is None:
            return ()
        if running := group.running:
            shared = sequence.num_prompt_tokens // self._memory.block_size * self._memory.block_size
            return () if max(m.num_computed_tokens for m in running) >= shared else None
        waiting = group.unfinished
        num_to_come = group.num_members - len(group.members)
        if self._rows.num_free < len(waiting) + num_to_come:
            return None
        longest = max(member.num_known_tokens for member in waiting)
        return self._memory.needs_of_all(sequence, longest, len(waiting))
