"""Sizes of the pools for a memory budget (text H, memory budget; P 4.2).

pool = memory - weights - workspace - reserve. All groups get the same number of token slots, with
two exceptions. A window group never gets more than its sequences can hold at once. And a state
costs as much memory as hundreds of tokens, so the number of states is

    two for each row     the state being written, and one that the row read or left
    and one for each     SNAPSHOT_TOKENS of those slots, for conversations to continue from

States get at most the share STATE_SHARE of the memory, and at least MIN_STATES states. They
always leave slots for one sequence of max_model_len tokens. If there are fewer than two states for
each row, fewer rows run at once.
"""

from collections.abc import Sequence
from typing import NamedTuple

from quire.base.errors import OutOfMemory
from quire.spec.cache_group import STATE, CacheGroup

MIB = 1 << 20
NO_BOUND = 1 << 62
STATE_SHARE = 0.5
SNAPSHOT_TOKENS = 512
MIN_STATES = 6  # one sequence that computes its prompt, and two pinned ones


def size_pools(
    groups: Sequence[CacheGroup],
    block_bytes: Sequence[int],
    budget_bytes: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    chunk: int,
) -> tuple[int, ...]:
    """Return as many blocks per group as fit, up to the need of max_num_seqs x max_model_len.
    Raises OutOfMemory if not even one sequence of max_model_len tokens fits."""
    per_sequence = blocks_per_sequence(max_model_len, block_size)
    others = _caps(groups, block_size, max_num_seqs, chunk, 0)
    left = budget_bytes - _cost(others, block_bytes, per_sequence)
    states = _states_in(groups, block_bytes, min(left, int(STATE_SHARE * budget_bytes)))
    caps = _caps(groups, block_size, max_num_seqs, chunk, states)
    max_blocks = _max_blocks(caps, block_bytes, budget_bytes, per_sequence * max_num_seqs)
    if max_blocks < per_sequence:
        raise OutOfMemory(
            f"the KV pool of {budget_bytes / MIB:,.0f} MiB holds {max_blocks * block_size:,}"
            " tokens,"
            f" less than one sequence of max_model_len={max_model_len:,} needs"
            f" ({_cost(caps, block_bytes, per_sequence) / MIB:,.0f}"
            f" MiB{_of_states(groups, block_bytes)}). Lower max_model_len (max_model_len=auto uses"
            " the longest that fits), or give the pool more memory (kv_cache_memory_bytes,"
            " gpu_memory_utilization)."
        )
    return tuple(cap.blocks(max_blocks) for cap in caps)


def longest_sequence(
    groups: Sequence[CacheGroup],
    block_bytes: Sequence[int],
    budget_bytes: int,
    block_size: int,
    limit: int,
    max_num_seqs: int,
    chunk: int,
) -> int:
    """Return the largest max_model_len, up to `limit`, for which `size_pools` can fit one sequence.

    Unless it is the limit, the result is a multiple of the block size. It leaves room for the
    states' share. Raises OutOfMemory if not even a prompt of one token and its answer fit.
    """
    states = _states_in(groups, block_bytes, int(STATE_SHARE * budget_bytes))
    caps = _caps(groups, block_size, max_num_seqs, chunk, states)
    max_blocks = _max_blocks(
        caps, block_bytes, budget_bytes, blocks_per_sequence(limit, block_size)
    )
    length = min(limit, (max_blocks - 1) * block_size)
    if length < 2:
        raise OutOfMemory(
            f"the KV pool of {budget_bytes / MIB:,.1f} MiB holds {max_blocks} blocks of"
            f" {block_size}"
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
    """Return the number of blocks per group that num_bytes of host memory hold. All groups get the
    same number, but states in proportion to num_blocks, the pools on the device."""
    largest = max(num_blocks)
    pairs = list(zip(groups, num_blocks, strict=True))
    parts = [num if group.kind == STATE else largest for group, num in pairs]
    whole = sum(part * size for part, size in zip(parts, block_bytes, strict=True))
    return tuple(part * num_bytes // whole for part in parts)


def blocks_per_sequence(max_model_len: int, block_size: int) -> int:
    """Return the number of blocks of the longest sequence, plus one block to write into."""
    return -(-max_model_len // block_size) + 1


def sequences_that_fit(
    groups: Sequence[CacheGroup], num_blocks: Sequence[int], block_size: int, length: int
) -> int:
    """Return how many sequences of `length` tokens fit into the pools at once, without sharing."""
    needs = [group.max_blocks(length, block_size) for group in groups]
    return min(have // need for have, need in zip(num_blocks, needs, strict=True))


def num_states(groups: Sequence[CacheGroup], num_blocks: Sequence[int]) -> int:
    """Return the number of states in the smallest state pool; 0 for models without states."""
    pairs = zip(groups, num_blocks, strict=True)
    return min((num for group, num in pairs if group.kind == STATE), default=0)


def min_pool_bytes(
    groups: Sequence[CacheGroup],
    block_bytes: Sequence[int],
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    chunk: int,
) -> int:
    """Return the smallest budget for which `size_pools` can fit one sequence."""
    caps = _caps(groups, block_size, max_num_seqs, chunk, MIN_STATES)
    return _cost(caps, block_bytes, blocks_per_sequence(max_model_len, block_size))


class _Cap(NamedTuple):
    """Bound on a group's blocks: min(n, most, base + n // per) if groups with all tokens get n."""

    max_blocks: int = NO_BOUND  # bound for any n
    base: int = NO_BOUND  # bound for n = 0, to which each `per` blocks add one
    per: int = 1

    def blocks(self, num: int) -> int:
        """Return the group's number of blocks if groups that keep all tokens get `num`."""
        return min(num, self.max_blocks, self.base + num // self.per)


def _caps(
    groups: Sequence[CacheGroup], block_size: int, max_num_seqs: int, chunk: int, max_states: int
) -> list[_Cap]:
    """Return the bound of each group."""
    per = max(1, SNAPSHOT_TOKENS // block_size)
    states = _Cap(max_states, max(MIN_STATES, 2 * max_num_seqs), per)
    return [
        states
        if group.kind == STATE
        else _Cap(_max_of_all_sequences(group, block_size, max_num_seqs, chunk))
        for group in groups
    ]


def _states_in(groups: Sequence[CacheGroup], block_bytes: Sequence[int], num_bytes: int) -> int:
    """Return the number of states per state group that fit num_bytes, but at least MIN_STATES."""
    each = sum(size for group, size in zip(groups, block_bytes, strict=True) if group.kind == STATE)
    return max(MIN_STATES, num_bytes // max(1, each))


def _of_states(groups: Sequence[CacheGroup], block_bytes: Sequence[int]) -> str:
    """Return an error's part on the size of states; empty for models without states."""
    each = sum(size for group, size in zip(groups, block_bytes, strict=True) if group.kind == STATE)
    return f" with {MIN_STATES} states of {each / MIB:,.1f} MiB each" if each else ""


def _max_blocks(caps: list[_Cap], block_bytes: Sequence[int], budget: int, limit: int) -> int:
    """Return the largest number of blocks per group, up to `limit`, that fits the budget."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if _cost(caps, block_bytes, middle) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def _cost(caps: list[_Cap], block_bytes: Sequence[int], num_blocks: int) -> int:
    """Return the bytes of the pools if groups that keep all tokens get `num_blocks`."""
    return sum(cap.blocks(num_blocks) * b for cap, b in zip(caps, block_bytes, strict=True))


def _max_of_all_sequences(group: CacheGroup, block_size: int, max_num_seqs: int, chunk: int) -> int:
    """Return a group's maximum over all sequences; NO_BOUND for a group that keeps all tokens."""
    if group.keeps_all:
        return NO_BOUND
    max_held = group.max_blocks(NO_BOUND, block_size)
    return max_num_seqs * max_held + -(-chunk // block_size) + max_num_seqs
