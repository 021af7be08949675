"""Prompts that arrive in pieces: they are computed while more of them comes (T 4.4.4).

    total += length of the piece

While a prompt is open its last token stays uncomputed, since computing it would sample; the last
piece closes it. An open prompt without anything to compute waits aside, in nobody's way.
"""

from typing import TYPE_CHECKING

import numpy as np

from quire.base.errors import REQUEST_FAILED
from quire.base.events import Appended
from quire.base.messages import Append
from quire.base.plan import HostTokens
from quire.base.step_outputs import Failure, Finish
from quire.scheduler.flight import Draft
from quire.scheduler.preemption import preempt
from quire.scheduler.sequence import Sequence
from quire.scheduler.two_level import PATIENCE

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler


def has_something_to_compute(sequence: Sequence) -> bool:
    """Whether there is more than what an open prompt keeps back."""
    has_slots = sequence.num_swapped_tokens if sequence.host_blocks is not None else 0
    return sequence.num_known_tokens - sequence.is_open > has_slots


def append(scheduler: "Scheduler", message: Append, now: float) -> None:
    """Take a piece. One that makes the prompt too long ends the request with an error."""
    sequence = scheduler.sequences.get(message.request_id)
    if sequence is None or not sequence.is_open:
        return  # it has ended
    num_prompt = sequence.num_prompt_tokens + len(message.token_ids)
    limit, needs = scheduler.max_model_len, num_prompt + 1
    if message.is_last:
        limit = needs = scheduler.limit_of(num_prompt, sequence.request.params.max_tokens)
    if num_prompt >= scheduler.max_model_len or not scheduler.pins.fits_alone(sequence, needs, 1):
        error = (
            f"the prompt has grown to {num_prompt} tokens, which with its output is more than this"
            " engine can hold beside what is pinned (max_model_len"
            f" {scheduler.max_model_len}); send less, lower max_tokens, or enlarge"
            " kv_cache_memory_bytes."
        )
        finish = Finish("error", error=Failure(REQUEST_FAILED, error))
        scheduler.late.append((sequence, finish))
        scheduler.finish(sequence, "error", now)
        return
    sequence.num_prompt_tokens, sequence.limit = num_prompt, limit
    sequence.is_open = not message.is_last
    sequence.due_at += int(PATIENCE * len(message.token_ids))
    _add_tokens(scheduler, sequence, np.asarray(message.token_ids, np.int32))
    scheduler.events.append(Appended(now, message.request_id, len(message.token_ids)))
    if sequence.is_aside and has_something_to_compute(sequence):
        sequence.is_aside = False
        if sequence.num_preemptions:
            scheduler.queue.requeue(sequence)
        else:
            scheduler.queue.push(sequence)


def set_aside(scheduler: "Scheduler", sequence: Sequence) -> None:
    """Take a waiting sequence out of the queue until the next piece of its prompt comes."""
    scheduler.queue.remove(sequence)
    sequence.is_aside = True


def park_idle(scheduler: "Scheduler", head: Sequence, draft: Draft, now: float) -> bool:
    """Take the row of an open prompt that only waits for its next piece, for the head of the queue,
    which is not of a lower class; whether there was one. Without this, clients that say nothing
    would hold up all others."""
    rows = scheduler.rows_that_wait()
    planned = np.concatenate([*draft.rows, rows[:0]])
    for sequence in scheduler.running_at(rows[~np.isin(rows, planned)]):
        if sequence.priority >= head.priority:
            preempt(scheduler, sequence, head.request.request_id, now)
            sequence.num_preemptions -= 1  # it lost nothing by it that it was waiting for
            set_aside(scheduler, sequence)
            return True
    return False


def _add_tokens(scheduler: "Scheduler", sequence: Sequence, token_ids: np.ndarray) -> None:
    row, table = sequence.row, scheduler.table
    if row < 0:
        sequence.saved_tokens = np.concatenate([sequence.saved_tokens, token_ids])
        return
    known = int(table.known[row])
    if len(token_ids):
        table.tokens[row, known : known + len(token_ids)] = token_ids
        scheduler.host_tokens.append(HostTokens(row, known, token_ids, is_prompt=True))
    table.known[row] = table.total[row] = known + len(token_ids)
    table.limit[row] = sequence.limit
    table.num_open[row] = sequence.is_open
    table.min_known[row] = sequence.num_prompt_tokens + sequence.params.min_tokens
