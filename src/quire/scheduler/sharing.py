"""Division of a step's tokens when the running rows need more than the budget.

Each decoding row gets one token first. Prompts share the rest by class, tenant and policy. Prompts
that rank after the head of the queue are deferred until the head is admitted.
"""

from collections.abc import Callable

import numpy as np

from quire.scheduler.core.queue import WaitingQueue
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.sequence import Int64, Sequence


def share_budget(
    running: Rows,
    queue: WaitingQueue,
    rows: Int64,
    need: Int64,
    budget: int,
    fits: Callable[[Sequence], bool],
) -> tuple[Int64, list[Sequence]]:
    """Divide the budget among running rows. Return the tokens of each row and the deferred prompts.

    rows, need and the returned tokens: int64 [N]. budget: tokens of the step. fits: whether a new
    request could be admitted now. Deferred prompts are ordered by rank.
    """
    if len(rows) == 1 and not len(queue):
        return np.minimum(need, budget), []
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
    pass_over_heads(queue, prompts[0])
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
    """Return the head of the queue if it ranks before this running prompt, else None."""
    head = queue.peek()
    return head if head is not None and is_before(queue, head, prompt) else None


def pass_over_heads(queue: WaitingQueue, prompt: Sequence) -> None:
    """Pass over new sequences at the head while a running prompt ranks before them. A policy may
    then bring other sequences to the head."""
    head = queue.peek()
    while head is not None and not is_before(queue, head, prompt):
        if head.priority > prompt.priority or queue.is_preempted(head):
            return
        queue.pass_over(head)
        passed, head = head, queue.peek()
        if head is passed:
            return


def is_before(queue: WaitingQueue, head: Sequence, sequence: Sequence) -> bool:
    """Return whether the head of the queue ranks before a running prompt. Within its class, a
    preempted head does not, since it would soon be preempted again."""
    if head.priority != sequence.priority:
        return head.priority < sequence.priority
    if queue.is_preempted(head):
        return False
    return queue.rank(head) < queue.rank(sequence)
