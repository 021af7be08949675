"""Room for a row that grows, and who gives way for it: the latest arrival of the lowest priority,
all or nothing, with its whole group (P 4.5)."""

from typing import TYPE_CHECKING

from quire.base.events import Preempted
from quire.scheduler.flight import Draft
from quire.scheduler.groups import give_rows_back
from quire.scheduler.sequence import Sequence
from quire.scheduler.swap import num_kept_tokens, swap_is_cheaper, swap_out

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler


def grow(scheduler: "Scheduler", sequence: Sequence, target: int, draft: Draft, now: float) -> None:
    """Make room up to `target` tokens, preempting the last that run if that is needed."""
    num_computed = sequence.num_computed_tokens
    sequence.blocks.advance(num_computed)
    num_new = target - num_computed
    while (appended := scheduler.kv.allocate_slots(sequence.blocks, num_new)) is None:
        victim = scheduler.last_running
        draft.drop_rows(preempt(scheduler, victim, sequence.request.request_id, now, draft))
        draft.has_preempted = True
        if sequence.row < 0:
            return
    scheduler.table.capacity[sequence.row] = sequence.blocks.capacity
    draft.add_blocks(sequence.row, appended)


def preempt(
    scheduler: "Scheduler",
    victim: Sequence,
    for_request_id: str,
    now: float,
    draft: Draft | None = None,
) -> set[int]:
    """Take the rows and blocks of the victim and its group; returns the rows.

    What they have computed is swapped to host memory with the draft's plan, or it will be computed
    again; without a draft always the latter.
    """
    rows, lost = set(), 0
    members = [member for member in scheduler.members(victim) if member.row >= 0]
    swaps = draft is not None and _swap_out(scheduler, members, draft)
    for member in members:
        rows.add(member.row)
        if swaps:
            member.num_swapped_tokens = num_kept_tokens(member)
        else:
            lost += member.num_computed_tokens
        scheduler.leave_row(member)
        member.num_preemptions += 1
        scheduler.queue.requeue(member)
    give_rows_back(scheduler, victim)
    if draft is not None:
        scheduler.headroom.take_preemption(scheduler.num_running)
    if victim.group is not None:
        victim.group.candidates = {}
    request_id = victim.request.request_id
    scheduler.events.append(Preempted(now, request_id, for_request_id, lost, swaps))
    return rows


def _swap_out(scheduler: "Scheduler", members: list[Sequence], draft: Draft) -> bool:
    """Swap a group out, if that is cheaper and possible: not before it is forked, not while some of
    it waits, and not if it would need more room to come back than pinned prefixes leave. To pin a
    prefix, nothing is sampled after it, so it would not be missed where it is."""
    group = members[0].group
    if group is not None and (not group.is_forked or len(group.unfinished) > len(members)):
        return False
    if members[0].is_pin or not scheduler.pins.have_room([m.blocks for m in members]):
        return False
    return swap_is_cheaper(scheduler, members) and swap_out(scheduler, members, draft)
