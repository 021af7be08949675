"""Who gets the tokens of a step when its budget is less than what all could use.

Rows that lack one token (decoding) come first, in their order. What is left goes to prompts, by
priority, by the tenants' counters and by the policy's rank. A new request at the head of the queue
takes part in this: prompts under way that rank behind it are deferred until it was admitted, and
then get what is left (`admission.admit`), without preempting anybody. If the head has to wait for
memory, prompts under way go on as if it were not there; so there is always somebody who goes on.
"""

from collections.abc import Callable

import numpy as np

from quire.scheduler.queue import WaitingQueue
from quire.scheduler.rows import Rows
from quire.scheduler.sequence import Int64, Sequence


def share_budget(
    running: Rows,
    queue: WaitingQueue,
    rows: Int64,
    need: Int64,
    budget: int,
    fits: Callable[[Sequence], bool],
) -> tuple[Int64, list[Sequence]]:
    """Share the tokens of a step: those that each running row gets ([N], like rows and need), and
    the deferred prompts, by rank. budget: tokens of the step. fits: whether a new request could be
    admitted now."""
    is_prompt = need > 1
    granted = np.where(is_prompt, 0, need)
    through = np.cumsum(granted)
    granted = np.clip(budget - (through - granted), 0, granted)
    left = budget - int(granted.sum())
    if left <= 0:
        return granted, []
    places = np.flatnonzero(is_prompt)
    ranked = [
        (queue.rank(s), i) for s, i in zip(running.sequences(rows[places]), places, strict=True)
    ]
    order = [i for _, i in sorted(ranked)]
    prompts = running.sequences(rows[order])
    head = competing_head(queue, prompts[0])
    if head is not None and not fits(head):
        head = None
    deferred = []
    for i, prompt in zip(order, prompts, strict=True):
        if head is not None and is_before(queue, head, prompt):
            deferred.append(prompt)
            continue
        granted[i] = min(left, need[i])
        left -= int(granted[i])
    return granted, deferred


def competing_head(queue: WaitingQueue, prompt: Sequence) -> Sequence | None:
    """Find the head of the queue, if it comes before this prompt under way. New ones that do not
    are passed over, which may bring others to the head."""
    head = queue.peek()
    while head is not None and not is_before(queue, head, prompt):
        if head.priority > prompt.priority or queue.is_preempted(head):
            return None
        queue.pass_over(head)
        passed, head = head, queue.peek()
        if head is passed:
            return None
    return head


def is_before(queue: WaitingQueue, head: Sequence, sequence: Sequence) -> bool:
    """Tell whether the head of the queue comes before a prompt under way. One that was preempted
    does not, in its class: it would soon be preempted again."""
    if head.priority != sequence.priority:
        return head.priority < sequence.priority
    if queue.is_preempted(head):
        return False
    return queue.rank(head) < queue.rank(sequence)
