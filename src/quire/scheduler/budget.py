"""Who gets the tokens of a step when its budget is less than what all could use.

Rows that lack one token (decoding) come first, in their order. What is left goes to prompts, by
priority, by the tenants' counters and by the policy's rank. A new request at the head of the queue
takes part in this: prompts under way that rank behind it are deferred until it was admitted, and
then get what is left (`admission.admit`), without preempting anybody. If the head has to wait for
memory, prompts under way go on as if it were not there; so there is always somebody who goes on.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from quire.scheduler.flight import Draft
from quire.scheduler.sequence import Int64, Sequence

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler


def share_budget(
    scheduler: "Scheduler",
    rows: Int64,
    need: Int64,
    budget: int,
    fits: Callable[[Sequence], bool],
) -> tuple[Int64, list[Sequence]]:
    """Tokens that each running row gets ([N], like rows and need), and the deferred prompts, by
    rank. budget: tokens of the step. fits: whether a new request could be admitted now."""
    is_prompt = need > 1
    granted = np.where(is_prompt, 0, need)
    through = np.cumsum(granted)
    granted = np.clip(budget - (through - granted), 0, granted)
    left = budget - int(granted.sum())
    if left <= 0:
        return granted, []
    places = np.flatnonzero(is_prompt)
    running = scheduler.running_at(rows[places])
    ranked = [(scheduler.queue.rank(s), i) for s, i in zip(running, places, strict=True)]
    order = [i for _, i in sorted(ranked)]
    prompts = scheduler.running_at(rows[order])
    head = contender(scheduler, prompts[0])
    if head is not None and not fits(head):
        head = None
    deferred = []
    for i, prompt in zip(order, prompts, strict=True):
        if head is not None and is_before(scheduler, head, prompt):
            deferred.append(prompt)
            continue
        granted[i] = min(left, need[i])
        left -= int(granted[i])
    return granted, deferred


def contender(scheduler: "Scheduler", prompt: Sequence) -> Sequence | None:
    """The head of the queue, if it comes before this prompt under way. New ones that do not are
    passed over, which may bring others to the head."""
    queue = scheduler.queue
    head = queue.peek()
    while head is not None and not is_before(scheduler, head, prompt):
        if head.priority > prompt.priority or queue.is_preempted(head):
            return None
        queue.pass_over(head)
        passed, head = head, queue.peek()
        if head is passed:
            return None
    return head


def is_before(scheduler: "Scheduler", head: Sequence, sequence: Sequence) -> bool:
    """Whether the head of the queue comes before a prompt under way. One that was preempted does
    not, in its class: it would soon be preempted again."""
    if head.priority != sequence.priority:
        return head.priority < sequence.priority
    if scheduler.queue.is_preempted(head):
        return False
    return scheduler.queue.rank(head) < scheduler.queue.rank(sequence)


def go_on(scheduler: "Scheduler", sequence: Sequence, draft: Draft, budget: int) -> int:
    """Give a deferred prompt the tokens that budget and free blocks allow; returns how many."""
    kv, row = scheduler.kv, sequence.row
    num_computed = sequence.num_computed_tokens
    num_new = min(budget, scheduler.need_of(sequence))
    sequence.blocks.advance(num_computed)
    appended = kv.allocate_slots(sequence.blocks, num_new)
    if appended is None:
        num_new = min(num_new, kv.num_free_slots(sequence.blocks))
        appended = kv.allocate_slots(sequence.blocks, num_new) if num_new > 0 else None
    if appended is None:
        return 0
    scheduler.table.capacity[row] = sequence.blocks.capacity
    draft.add_blocks(row, appended)
    scheduler.grant(sequence, num_new, draft)
    return num_new
