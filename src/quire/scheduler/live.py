"""Live view of the scheduler: owner of each block, running rows, and waiting sequences with
reasons.

It is computed on demand from arrays and block tables. It stores and changes no state, so a watched
run is identical to an unwatched one.
"""

import itertools

import numpy as np

from quire.base.live import (
    CACHED,
    HELD,
    NO_OWNER,
    PINNED,
    USED,
    BlockMap,
    HostMemory,
    LiveState,
    PinnedRow,
    RetainedRow,
    RunningRow,
    WaitingRow,
)
from quire.kv.inspection import host_occupancy, num_unindexed, occupancy
from quire.kv.manager import KVBlocks, SequenceBlocks
from quire.kv.table import NULL
from quire.scheduler.adapter_waits import AdapterBlocker
from quire.scheduler.core.admission import Admission
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.scheduler_core import SchedulerCore
from quire.scheduler.core.sequence import Blocker, Int64, Sequence, State
from quire.scheduler.reuse.held import Held, Holds
from quire.scheduler.reuse.pinned import PinnedPrefixes

MAX_LISTED = 100  # maximum number of rows listed per kind


def live_state(core: SchedulerCore, retained: Holds, pinned: PinnedPrefixes) -> LiveState:
    """Return the current state of blocks, rows and queue."""
    rows, memory, lifecycle, admission = core.rows, core.memory, core.lifecycle, core.admission
    running = rows.sequences()
    oldest_last = sorted(running, key=lambda sequence: -sequence.arrival)
    queue, parked = lifecycle.queue.waiting(), _parked(lifecycle)
    listed = list(itertools.islice((*queue, *parked), MAX_LISTED))
    held = retained.all()
    other_tables = [(blocks, HELD) for blocks in retained.tables()]
    other_tables += [(blocks, PINNED) for blocks in pinned.tables()]
    return LiveState(
        groups=[
            _block_map(memory, g, oldest_last, other_tables) for g in range(len(memory.kv.groups))
        ],
        running=[_running(sequence) for sequence in running],
        waiting=[
            _waiting(sequence, _reason(sequence, i == 0, rows, memory, lifecycle, admission))
            for i, sequence in enumerate(listed)
        ],
        num_waiting=len(queue) + len(parked),
        pinned=_pinned(pinned),
        held=[_retained_row(each) for each in held[:MAX_LISTED]],
        num_held=len(held),
        host=HostMemory(*host_occupancy(memory.kv)),
        num_rows=rows.table.num_rows,
        block_size=memory.block_size,
        token_budget=admission.token_budget,
        num_evicted=num_unindexed(memory.kv),
    )


def number_of(sequence: Sequence) -> int:
    """Return the number that identifies the request of a sequence: its first member's arrival."""
    return sequence.members[0].arrival


def _parked(lifecycle: Lifecycle) -> list[Sequence]:
    members = (m for s in lifecycle.sequences.values() for m in s.members)
    return [member for member in members if member.state is State.PARKED]


def _block_map(
    memory: Memory,
    g: int,
    oldest_last: list[Sequence],
    other_tables: list[tuple[SequenceBlocks, int]],
) -> BlockMap:
    refs, indexed = occupancy(memory.kv, g)
    sharers = np.array(refs, np.int32)
    states = np.zeros_like(sharers)
    states[indexed] = CACHED
    states[sharers > 0] = USED
    owners = np.full_like(sharers, NO_OWNER)
    for sequence in oldest_last:
        owners[_there(sequence.blocks.tables[g].live_blocks)] = number_of(sequence)
    for blocks, state in other_tables:
        states[_there(blocks.tables[g].live_blocks)] = state
    return BlockMap(memory.kv.groups[g].kind, owners, sharers, states)


def _there(blocks: list[int]) -> Int64:
    return np.array([block for block in blocks if block != NULL], np.int64)


def _pinned(pinned: PinnedPrefixes) -> list[PinnedRow]:
    return [
        PinnedRow(
            pin.request.request_id,
            pin.num_tokens,
            _num_blocks(pin.blocks),
            pin.num_hits,
            pin.request.tenant,
        )
        for pin in pinned.ready
        if pin.blocks is not None
    ]


def _retained_row(held: Held) -> RetainedRow:
    return RetainedRow(
        held.request.request_id,
        held.index,
        len(held.tokens),
        0 if held.blocks is None else _num_blocks(held.blocks),
        held.ends_s,
        held.request.tenant,
    )


def _num_blocks(blocks: SequenceBlocks) -> int:
    return max(len(table.live_blocks) for table in blocks.tables)


def _running(sequence: Sequence) -> RunningRow:
    return RunningRow(
        sequence.request.request_id,
        number_of(sequence),
        sequence.index,
        sequence.num_prompt_tokens,
        sequence.num_computed_tokens,
        sequence.num_known_tokens,
        sequence.limit,
        max(0, sequence.num_cached_tokens),
        sequence.num_preemptions,
        _num_blocks(sequence.blocks),
        sequence.request.tenant,
    )


def _waiting(sequence: Sequence, reason: str) -> WaitingRow:
    return WaitingRow(
        sequence.request.request_id,
        number_of(sequence),
        sequence.index,
        sequence.num_known_tokens,
        sequence.num_preemptions,
        sequence.host_blocks is not None,
        sequence.arrival_s,
        reason,
        sequence.request.tenant,
    )


def _reason(
    sequence: Sequence,
    is_first: bool,
    rows: Rows,
    memory: Memory,
    lifecycle: Lifecycle,
    admission: Admission,
) -> str:
    """Return the reason why a sequence waits, a key of REASONS. A queued sequence is judged as if
    none of its tokens were cached."""
    if sequence.state is State.PARKED:
        if Blocker.READY in sequence.blockers:
            return "grammar" if sequence.request.grammar else "loading"
        if sequence.request.awaits_adapter and AdapterBlocker.LOADING in sequence.blockers:
            return "loading"
        return "prompt" if sequence.is_open else "store"
    if sequence.num_pending_lost:
        return "result"
    if sequence in lifecycle.suspects.until:
        return "suspect"
    if not rows.num_free:
        return "rows"
    if not is_first:
        return "behind"
    return "turn" if _fits(sequence, memory, admission) else "blocks"


def _fits(sequence: Sequence, memory: Memory, admission: Admission) -> bool:
    """Return whether the maximum need of a sequence fits now. Prefix hits are not looked up, since
    that would name blocks early."""
    reserve = admission.reserve(sequence)
    if sequence.host_blocks is not None:
        away = [m for m in sequence.members if m.host_blocks is not None]
        return memory.fits(memory.needs_to_return(away, reserve))
    nothing = KVBlocks(0, tuple([] for _ in memory.kv.groups))
    num_new = min(admission.token_budget, sequence.num_known_tokens)
    return memory.fits(memory.needs_to_start(sequence, nothing, num_new), reserve)
