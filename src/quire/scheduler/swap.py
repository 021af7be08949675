"""Preemption by swapping to host memory, and the choice between that and recomputation (P 4.5).

A group goes and comes back as a whole. Its blocks are copied before the step's forward pass, so
that they can be given away in the same plan; shared blocks are copied once and stay shared. Copies
that bring blocks back are part of the plan in which the rows run again.

    swapping        2 x bytes of the blocks / bandwidth of a copy
    recomputation   computed tokens / tokens per second of a prefill

Both rates are measured and come through `control`. Where one is not known, it is recomputation.
"""

from typing import TYPE_CHECKING

from quire.scheduler.beam_rows import is_beam
from quire.scheduler.flight import Draft
from quire.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler


def swap_is_cheaper(scheduler: "Scheduler", members: list[Sequence]) -> bool:
    """Whether these running members should be swapped out rather than computed again."""
    mode, rates = scheduler.preemption_mode, scheduler.rates
    if mode != "auto":
        return mode == "swap"
    if not (rates.prefill_tokens_per_s and rates.copy_bytes_per_s and scheduler.kv.block_bytes):
        return False
    counts = scheduler.kv.num_distinct([member.blocks for member in members])
    num_bytes = sum(n * size for n, size in zip(counts, scheduler.kv.block_bytes, strict=True))
    num_tokens = sum(member.num_computed_tokens for member in members)
    shared = members[0].num_prompt_tokens * (len(members) - 1)  # is computed once
    recompute_s = max(1, num_tokens - shared) / rates.prefill_tokens_per_s
    return 2 * num_bytes / rates.copy_bytes_per_s < recompute_s


def swap_out(scheduler: "Scheduler", members: list[Sequence], draft: Draft) -> bool:
    """Copy what the members have computed to host memory; False if that has no room. They still
    hold their rows."""
    for member in members:
        _undo(scheduler, member, draft)
    done = scheduler.kv.swap_out([member.blocks for member in members])
    if done is None:
        return False
    host_blocks, copies = done
    for member, blocks in zip(members, host_blocks, strict=True):
        member.host_blocks = blocks
    draft.add_moves("swap_out", copies)
    return True


def _undo(scheduler: "Scheduler", member: Sequence, draft: Draft) -> None:
    """Take back what this plan has done to the member's tables: a copy on write has not been
    carried out, and its source is still held by those who share it."""
    for group, row, source, destination in reversed(draft.copies):
        if row == member.row:
            pool, table = scheduler.kv.pools[group], member.blocks.tables[group]
            table.blocks[table.blocks.index(destination)] = source
            pool.acquire(source)
            pool.release(destination)
    num_tokens = num_kept_tokens(member)
    if member.blocks.num_tokens > num_tokens:
        scheduler.kv.truncate(member.blocks, num_tokens)
    member.blocks.advance(num_tokens)


def num_kept_tokens(member: Sequence) -> int:
    """Computed tokens that a running member keeps when it is swapped out. A beam whose candidates
    are on their way will not get them, and must compute its last token again."""
    if is_beam(member):
        return min(member.num_computed_tokens, member.num_known_tokens - 1)
    return member.num_computed_tokens


def can_swap_in(scheduler: "Scheduler", members: list[Sequence], reserve: int) -> bool:
    """Whether rows and blocks are there for all members, and one more block for each."""
    if scheduler.num_free_rows < len(members):
        return False
    counts = scheduler.kv.num_distinct([member.swapped for member in members])
    beside = len(members) + reserve
    return all(
        min(n + beside, scheduler.pins.room(g)) <= pool.num_free
        for g, (n, pool) in enumerate(zip(counts, scheduler.kv.pools, strict=True))
    )


def swap_in(scheduler: "Scheduler", members: list[Sequence], draft: Draft) -> None:
    """Bring the members' blocks back; their rows are the caller's."""
    blocks, copies = scheduler.kv.swap_in([member.swapped for member in members])
    for member, mine in zip(members, blocks, strict=True):
        member.blocks, member.host_blocks = mine, None
    draft.add_moves("load", copies)


def forget(scheduler: "Scheduler", sequence: Sequence) -> None:
    """Give up what is in host memory: the sequence has ended, or it cannot be relied on."""
    if sequence.host_blocks is not None:
        scheduler.kv.free(sequence.host_blocks)
        sequence.host_blocks = None
