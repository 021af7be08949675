"""Preemption when a row lacks blocks to grow, and the resumption of swapped rows (P 4.5).

The victim is the latest arrival of the lowest priority, all or nothing, with its whole group. It is
swapped to host memory or recomputed, whichever is cheaper. A plan copies swapped blocks before its
forward pass, so other rows can get them in the same plan. Shared blocks are copied once and stay
shared. The plan in which the rows resume loads them.

    swapping        2 x bytes of the blocks / bandwidth of a copy
    recomputation   computed tokens / tokens per second of a prefill

Both rates are measured and come through `control`. If one is unknown, the victim is recomputed.
"""

from quire.base.plan import MoveKind
from quire.kv.swapping import swap_in, swap_out, undo_copies
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.plans import PlanBuilder, SharedBlocks
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.sequence import Sequence


class Preemption:
    """Preemption and resumption of rows. mode: `swap`, `recompute`, or `auto` for the cheaper
    one."""

    def __init__(self, rows: Rows, memory: Memory, lifecycle: Lifecycle, mode: str) -> None:
        self._rows, self._memory, self._lifecycle, self._mode = rows, memory, lifecycle, mode

    def ensure_capacity(
        self, sequence: Sequence, target: int, builder: PlanBuilder, now: float
    ) -> bool:
        """Allocate blocks up to `target` tokens, and preempt rows if blocks are lacking. Return
        whether the sequence has these blocks now. A sequence with drafts in flight preempts no row,
        since it needs fewer blocks if they are rejected."""
        num_new = target - sequence.num_computed_tokens
        while (appended := self._memory.grow(sequence, num_new)) is None:
            if self._rows.has_drafts_in_flight(sequence):
                return False
            self.preempt(self._victim(), sequence.request.request_id, builder, now)
            if sequence.row < 0:
                return False
        self._rows.set_capacity(sequence.row, sequence.blocks.capacity)
        builder.add_blocks(sequence.row, appended)
        return True

    def _victim(self) -> Sequence:
        """Return the next victim. A different preemption rule goes here."""
        return self._rows.last_running

    def preempt(
        self, victim: Sequence, for_request_id: str, builder: PlanBuilder, now: float
    ) -> None:
        """Preempt the victim and its group: release their rows and blocks, swapped out if
        possible."""
        members = [member for member in victim.members if member.row >= 0]
        is_swapped = self._may_be_swapped(members) and self._swap_out(members, builder)
        rows = self._lifecycle.preempt(victim, for_request_id, now, is_swapped)
        self._memory.headroom.take_preemption(self._rows.num_running)
        builder.drop_rows(rows)
        builder.has_preempted = True

    def _may_be_swapped(self, members: list[Sequence]) -> bool:
        """Return whether these members should be swapped out. Do not swap a group before it is
        forked, while some members wait, or if it could never resume with the reserved blocks. Do
        not swap a prompt that never samples, or states of rows with drafts in flight."""
        first, blocks = members[0], [member.blocks for member in members]
        group, memory = first.group, self._memory
        if group is not None and (not group.is_forked or len(group.unfinished) > len(members)):
            return False
        if not first.samples:
            return False
        if memory.kv.has_states and any(self._rows.has_drafts_in_flight(m) for m in members):
            return False  # their states include drafts that may be rejected
        if not memory.fits_at_all(memory.needs_to_stand(blocks)):
            return False
        return self.swapping_is_cheaper(members)

    def swapping_is_cheaper(self, members: list[Sequence]) -> bool:
        """Return whether swapping these running members costs less than recomputing them."""
        kv, rates = self._memory.kv, self._memory.rates
        if self._mode != "auto":
            return self._mode == "swap"
        if not (rates.prefill_tokens_per_s and rates.copy_bytes_per_s and kv.block_bytes):
            return False
        counts = kv.num_distinct([member.blocks for member in members])
        num_bytes = sum(n * size for n, size in zip(counts, kv.block_bytes, strict=True))
        num_tokens = sum(member.num_computed_tokens for member in members)
        shared = members[0].num_prompt_tokens * (len(members) - 1)  # computed once for all
        recompute_s = max(1, num_tokens - shared) / rates.prefill_tokens_per_s
        return 2 * num_bytes / rates.copy_bytes_per_s < recompute_s

    def _swap_out(self, members: list[Sequence], builder: PlanBuilder) -> bool:
        """Copy the computed tokens of members to host memory. Return False if it has no room. The
        members still have their rows."""
        kv = self._memory.kv
        for member in members:
            copies = [(g, s, d) for g, row, s, d in reversed(builder.copies) if row == member.row]
            undo_copies(kv, member.blocks, copies, member.num_kept_tokens)
        done = swap_out(kv, [member.blocks for member in members])
        if done is None:
            return False
        for member, blocks in zip(members, done[0], strict=True):
            member.host_blocks = blocks
        builder.add_moves(MoveKind.SWAP_OUT, done[1])
        return True

    def resume(
        self, members: list[Sequence], reserve: int, builder: PlanBuilder, now: float
    ) -> bool:
        """Load swapped members back to the device, and give each a row. Return False if the device
        has too few blocks."""
        if not self._memory.make_room(self._memory.needs_to_return(members, reserve)):
            return False
        found, copies = swap_in(self._memory.kv, [member.swapped for member in members])
        builder.add_moves(MoveKind.LOAD, copies)
        for member, blocks in zip(members, found, strict=True):
            member.blocks, member.host_blocks = blocks, None
        for member in members:
            started = self._lifecycle.start(member, member.num_swapped_tokens, now)
            builder.started.append(started)
            builder.add_table(member)
            held = [table.live_blocks for table in member.blocks.tables]
            builder.shared.append(SharedBlocks(member.row, held, [[] for _ in held]))
            self._rows.share(member.row)
        return True
