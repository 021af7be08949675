"""Who gets a row: waiting sequences, while budget, rows and blocks last.

An admission leaves blocks free for those that run to grow into, or they would soon preempt each
other, and what comes back would be preempted again (text H calls this a cascade). How many:

- the watermark, a fixed share of the pool (P's engine has 1 %);
- headroom per running row: a block more for every preemption, 5 % less for every sequence that
  ends. So admission slows down while preemption is frequent, and it settles where a few in a
  hundred sequences are preempted, whatever the lengths are.
- A sequence that was preempted `MOST_PREEMPTIONS` times waits until all that run, and itself, could
  grow to their limits. Nobody of its priority or a lower one comes in before it, so it is not
  preempted again for one of them.

Nothing is kept free from a sequence beside which no other request runs.
"""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.kv.manager import KVBlocks
from quire.scheduler.budget import contender, go_on
from quire.scheduler.flight import Draft
from quire.scheduler.groups import Group, must_wait_for_prompt
from quire.scheduler.hits import find_hit
from quire.scheduler.preemption import grow
from quire.scheduler.sequence import Sequence
from quire.scheduler.streaming import has_something_to_compute, park_idle, set_aside
from quire.scheduler.swap import can_swap_in, swap_in
from quire.scheduler.tiers import load

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler

MOST_PREEMPTIONS = 3
STEP_UP = 1.0  # blocks per running row
STEP_DOWN = 0.95


@dataclass(slots=True)
class Headroom:
    """blocks_per_row: how much every running row is expected to grow before something ends."""

    num_blocks: int
    watermark_blocks: int
    blocks_per_row: float = 0.0

    def take_preemption(self, num_rows: int) -> None:
        """num_rows still run. The headroom never exceeds half the pool."""
        most = self.num_blocks / 2 / max(1, num_rows)
        self.blocks_per_row = min(self.blocks_per_row + STEP_UP, most)

    def take_end(self) -> None:
        self.blocks_per_row *= STEP_DOWN

    def blocks(self, num_rows: int) -> int:
        return self.watermark_blocks + int(self.blocks_per_row * num_rows)


def reserved_blocks(scheduler: "Scheduler", sequence: Sequence) -> int:
    """Blocks that must stay free if this waiting sequence is admitted."""
    group = sequence.group
    num_own = 0 if group is None else len(group.running)
    if scheduler.num_running == num_own:
        return 0
    reserve = scheduler.headroom.blocks(scheduler.num_running - num_own)
    if sequence.num_preemptions >= MOST_PREEMPTIONS:
        reserve = max(reserve, _worst_growth(scheduler, sequence))
    return reserve


def _worst_growth(scheduler: "Scheduler", sequence: Sequence) -> int:
    """Blocks that all that run, and the request of this sequence, lack up to their limits."""
    size, idle = scheduler.kv.block_size, set(scheduler.rows_that_wait().tolist())
    running = [other for other in scheduler.running() if other.row not in idle]
    members = [sequence] if sequence.group is None else sequence.group.unfinished
    heads = [(s.limit, s.num_known_tokens, 1) for s in members if s.row < 0]
    for other in running:
        held = 0 if other.group is None else len(other.group.reserved_rows)
        heads.append((other.limit, other.num_computed_tokens, 1 + held))
    limit, held_tokens, num = np.array(heads).T
    return int(((-(-limit // size) - held_tokens // size) * num).sum())


def admit(scheduler: "Scheduler", draft: Draft, budget: int, now: float) -> None:
    """Give rows to waiting sequences, in the queue's order; nobody passes one that must wait.
    Prompts under way that were deferred take their turn."""
    deferred = deque(draft.deferred)
    while budget > 0:
        head = contender(scheduler, deferred[0]) if deferred else scheduler.queue.peek()
        used = None if head is None else _bring_in(scheduler, head, draft, budget, now)
        if used is None and head is not None and _makes_room(scheduler, head, draft, now):
            continue
        if used is None and not deferred:
            return
        budget -= go_on(scheduler, deferred.popleft(), draft, budget) if used is None else used


def _makes_room(scheduler: "Scheduler", head: Sequence, draft: Draft, now: float) -> bool:
    return not head.num_pending_lost and park_idle(scheduler, head, draft, now)


def _bring_in(
    scheduler: "Scheduler", head: Sequence, draft: Draft, budget: int, now: float
) -> int | None:
    """Admit the head of the queue; the tokens that it gets, None if it must wait."""
    if not scheduler.num_free_rows or head.num_pending_lost:
        return None
    bring = _start if head.host_blocks is None else _resume
    return bring(scheduler, head, draft, budget, now)


def _start(
    scheduler: "Scheduler", sequence: Sequence, draft: Draft, budget: int, now: float
) -> int | None:
    """Admit a sequence that has computed nothing but what it finds in the index; the tokens that
    it gets, None if it must wait."""
    if must_wait_for_prompt(scheduler, sequence) or not fits_beside(scheduler, sequence):
        return None
    kv, hit = scheduler.kv, find_hit(scheduler, sequence)
    num_new = min(budget, sequence.num_known_tokens - sequence.is_open - hit.num_tokens)
    if num_new == 0:
        set_aside(scheduler, sequence)
        return 0
    num_new = min(num_new, scheduler.long_prefill_threshold or num_new)
    if not _has_blocks(scheduler, sequence, hit, num_new):
        return None
    appended = kv.allocate_slots(sequence.blocks, num_new, hit)
    if appended is None:
        return None
    scheduler.queue.remove(sequence)
    scheduler.take_row(sequence, hit.num_tokens, draft, now)
    draft.add_adopted(sequence, hit.num_tokens // kv.block_size)
    draft.add_blocks(sequence.row, appended)
    found = [blocks[: len(mine)] for blocks, mine in zip(_held(sequence), hit.blocks, strict=True)]
    scheduler.grant(sequence, num_new, draft, found)
    if not sequence.num_preemptions and sequence.report is None:  # also no open prompt that is back
        scheduler.pins.count_hit(sequence)
        scheduler.remember(sequence, hit, now)
    if hit.num_loads:
        load(scheduler, sequence, draft)
    return num_new


def _held(sequence: Sequence) -> list[list[int]]:
    return [table.blocks for table in sequence.blocks.tables]


def _has_blocks(scheduler: "Scheduler", sequence: Sequence, hit: KVBlocks, num_new: int) -> bool:
    reserve = reserved_blocks(scheduler, sequence)
    return scheduler.kv.can_admit(sequence.num_known_tokens, hit, reserve, num_new)


def fits_now(scheduler: "Scheduler", sequence: Sequence) -> bool:
    """Whether a new request at the head of the queue could be admitted with a budget of its own."""
    if not scheduler.num_free_rows or sequence.num_pending_lost or sequence.host_blocks is not None:
        return False
    if must_wait_for_prompt(scheduler, sequence) or not fits_beside(scheduler, sequence):
        return False
    hit = find_hit(scheduler, sequence)
    num_new = min(scheduler.token_budget, sequence.num_known_tokens - hit.num_tokens)
    return _has_blocks(scheduler, sequence, hit, num_new)


def _resume(
    scheduler: "Scheduler", sequence: Sequence, draft: Draft, budget: int, now: float
) -> int | None:
    """Bring a group back that was swapped out, with rows for all; the tokens that its members get,
    None if it must wait."""
    if not has_something_to_compute(sequence):
        set_aside(scheduler, sequence)
        return 0
    members = [m for m in scheduler.members(sequence) if m.host_blocks is not None]
    reserve = reserved_blocks(scheduler, sequence)
    if any(m.num_pending_lost for m in members) or not can_swap_in(scheduler, members, reserve):
        return None
    swap_in(scheduler, members, draft)
    for member in members:
        scheduler.queue.remove(member)
        scheduler.take_row(member, member.num_swapped_tokens, draft, now)
        draft.add_table(member)
        held = [table.live_blocks for table in member.blocks.tables]
        draft.shared.append((member.row, held, [[] for _ in held]))
        scheduler.table.capacity[member.row] = member.num_swapped_tokens  # look who shares
    used = 0
    for member in members:
        computed = member.num_swapped_tokens
        room = scheduler.kv.block_size - computed % scheduler.kv.block_size  # one new block at most
        num_new = min(budget - used, member.num_known_tokens - member.is_open - computed, room)
        if num_new > 0:
            grow(scheduler, member, computed + num_new, draft, now)
            scheduler.grant(member, num_new, draft)
            used += num_new
    return used


def fits_beside(scheduler: "Scheduler", sequence: Sequence) -> bool:
    """Whether the whole group of a sequence that waits can come in now. Only its first member asks
    this; it holds for all that follow."""
    group = sequence.group
    if group is None or group.running:
        return True
    waiting = group.unfinished
    if scheduler.num_free_rows < len(waiting) + _num_to_come(group):
        return False
    longest = max(member.num_known_tokens for member in waiting)
    shared = sequence.num_prompt_tokens // scheduler.kv.block_size
    chunk = min(scheduler.token_budget, longest)
    needs = scheduler.kv.group_blocks(longest, shared, len(waiting), chunk)
    pinned, reserve = scheduler.pins.shared_blocks(sequence), reserved_blocks(scheduler, sequence)
    return all(
        need - mine + reserve <= pool.num_free
        for need, mine, pool in zip(needs, pinned, scheduler.kv.pools, strict=True)
    )


def _num_to_come(group: Group) -> int:
    return group.num_members - len(group.members)
