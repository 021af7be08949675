"""How many blocks fit into how many bytes (text H, memory budget; P 4.2).

pool = memory - weights - workspace - reserve. All groups get the same number of token slots, except
that a window group never gets more than its sequences can hold at once, and that a state is worth
as much memory as hundreds of tokens. Of states there are

    two for each row     the one that is written, and one that it came from or has left behind
    and one for each     SNAPSHOT_TOKENS of those slots: what conversations go on from

in half of the memory at most (STATE_SHARE), never so many that the other groups lack the slots of
one sequence of max_model_len tokens, and never fewer than LEAST_STATES. Where there are fewer than
two for each row, fewer rows run at once.
"""

from collections.abc import Sequence
from typing import NamedTuple

from quire.base.errors import OutOfMemory
from quire.spec.cache_group import STATE, CacheGroup

MIB = 1 << 20
NO_BOUND = 1 << 62
STATE_SHARE = 0.5
SNAPSHOT_TOKENS = 512
LEAST_STATES = 6  # one sequence at work on its prompt, and two that are pinned


def size_pools(
    groups: Sequence[CacheGroup],
    block_bytes: Sequence[int],
    budget_bytes: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    chunk: int,
) -> tuple[int, ...]:
    """Size pools: as many blocks per group as fit, at most what max_num_seqs x max_model_len needs.

    Raises OutOfMemory if not even one sequence of max_model_len tokens fits.
    """
    per_sequence = blocks_per_sequence(max_model_len, block_size)
    others = _caps(groups, block_size, max_num_seqs, chunk, 0)
    left = budget_bytes - _cost(others, block_bytes, per_sequence)
    states = _states_in(groups, block_bytes, min(left, int(STATE_SHARE * budget_bytes)))
    caps = _caps(groups, block_size, max_num_seqs, chunk, states)
    most = _most_blocks(caps, block_bytes, budget_bytes, per_sequence * max_num_seqs)
    if most < per_sequence:
        raise OutOfMemory(
            f"the KV pool of {budget_bytes / MIB:,.0f} MiB holds {most * block_size:,} tokens,"
            f" less than one sequence of max_model_len={max_model_len:,} needs"
            f" ({_cost(caps, block_bytes, per_sequence) / MIB:,.0f}"
            f" MiB{_of_states(groups, block_bytes)}). Lower max_model_len (max_model_len=auto uses"
            " the longest that fits), or give the pool more memory (kv_cache_memory_bytes,"
            " gpu_memory_utilization)."
        )
    return tuple(cap.blocks(most) for cap in caps)


def longest_sequence(
    groups: Sequence[CacheGroup],
    block_bytes: Sequence[int],
    budget_bytes: int,
    block_size: int,
    limit: int,
    max_num_seqs: int,
    chunk: int,
) -> int:
    """Find the max_model_len up to `limit` with which `size_pools` finds room for one sequence: the
    limit, or the largest multiple of the block size that fits beside the states' share.

    Raises OutOfMemory if not even a prompt of one token and its answer fit.
    """
    states = _states_in(groups, block_bytes, int(STATE_SHARE * budget_bytes))
    caps = _caps(groups, block_size, max_num_seqs, chunk, states)
    most = _most_blocks(caps, block_bytes, budget_bytes, blocks_per_sequence(limit, block_size))
    length = min(limit, (most - 1) * block_size)
    if length < 2:
        raise OutOfMemory(
            f"the KV pool of {budget_bytes / MIB:,.1f} MiB holds {most} blocks of {block_size}"
            f" tokens{_of_states(groups, block_bytes)}, too few for any sequence. Give it more"
            " memory (kv_cache_memory_bytes, gpu_memory_utilization), or use a smaller model."
        )
    return length


def host_tier_blocks(
    groups: Sequence[CacheGroup],
    block_bytes: Sequence[int],
    num_blocks: Sequence[int],
    num_bytes: int,
) -> tuple[int, ...]:
    """Return how many blocks of each group so many bytes of host memory hold: as many of each, but
    of states in proportion to those in the pools, which have num_blocks."""
    largest = max(num_blocks)
    pairs = list(zip(groups, num_blocks, strict=True))
    parts = [num if group.kind == STATE else largest for group, num in pairs]
    whole = sum(part * size for part, size in zip(parts, block_bytes, strict=True))
    return tuple(part * num_bytes // whole for part in parts)


def blocks_per_sequence(max_model_len: int, block_size: int) -> int:
    """Count the blocks that the longest sequence holds, with one to write into."""
    return -(-max_model_len // block_size) + 1


def sequences_that_fit(
    groups: Sequence[CacheGroup], num_blocks: Sequence[int], block_size: int, length: int
) -> int:
    """Return how many sequences of so many tokens have room in the pools at once, sharing
    nothing."""
    needs = [group.most_blocks(length, block_size) for group in groups]
    return min(have // need for have, need in zip(num_blocks, needs, strict=True))


def num_states(groups: Sequence[CacheGroup], num_blocks: Sequence[int]) -> int:
    """Count the states that layers can keep; 0 if none of them remembers one."""
    pairs = zip(groups, num_blocks, strict=True)
    return min((num for group, num in pairs if group.kind == STATE), default=0)


def least_pool_bytes(
    groups: Sequence[CacheGroup],
    block_bytes: Sequence[int],
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    chunk: int,
) -> int:
    """Find the smallest budget with which `size_pools` finds room for one sequence."""
    caps = _caps(groups, block_size, max_num_seqs, chunk, LEAST_STATES)
    return _cost(caps, block_bytes, blocks_per_sequence(max_model_len, block_size))


class _Cap(NamedTuple):
    """A bound for a group's blocks. most: in any case; base: and one more for each `per` blocks of
    the groups that keep all tokens, if that is less."""

    most: int = NO_BOUND
    base: int = NO_BOUND
    per: int = 1

    def blocks(self, num: int) -> int:
        """Return how many the group gets where those that keep all tokens get so many."""
        return min(num, self.most, self.base + num // self.per)


def _caps(
    groups: Sequence[CacheGroup], block_size: int, max_num_seqs: int, chunk: int, most_states: int
) -> list[_Cap]:
    """Return the bounds of all groups."""
    per = max(1, SNAPSHOT_TOKENS // block_size)
    states = _Cap(most_states, max(LEAST_STATES, 2 * max_num_seqs), per)
    return [
        states
        if group.kind == STATE
        else _Cap(_most_of_all(group, block_size, max_num_seqs, chunk))
        for group in groups
    ]


def _states_in(groups: Sequence[CacheGroup], block_bytes: Sequence[int], num_bytes: int) -> int:
    """Count the states that so many bytes hold, of each group that has them; LEAST_STATES at
    least."""
    each = sum(size for group, size in zip(groups, block_bytes, strict=True) if group.kind == STATE)
    return max(LEAST_STATES, num_bytes // max(1, each))


def _of_states(groups: Sequence[CacheGroup], block_bytes: Sequence[int]) -> str:
    """Say how much a state takes, if there are any."""
    each = sum(size for group, size in zip(groups, block_bytes, strict=True) if group.kind == STATE)
    return f" with {LEAST_STATES} states of {each / MIB:,.1f} MiB each" if each else ""


def _most_blocks(caps: list[_Cap], block_bytes: Sequence[int], budget: int, limit: int) -> int:
    """Find the most blocks per group, up to `limit` and its cap, that the budget has room for."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if _cost(caps, block_bytes, middle) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def _cost(caps: list[_Cap], block_bytes: Sequence[int], num_blocks: int) -> int:
    """Return the bytes of pools of so many blocks each, none above its cap."""
    return sum(cap.blocks(num_blocks) * b for cap, b in zip(caps, block_bytes, strict=True))


def _most_of_all(group: CacheGroup, block_size: int, max_num_seqs: int, chunk: int) -> int:
    """Return the most blocks that all sequences together hold in a group; no bound for one that
    keeps all tokens."""
    if group.keeps_all:
        return NO_BOUND
    held = group.most_blocks(NO_BOUND, block_size)
    return max_num_seqs * held + -(-chunk // block_size) + max_num_seqs
