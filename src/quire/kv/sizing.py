"""How many blocks fit into how many bytes (text H, memory budget; P 4.2).

pool = memory - weights - workspace - reserve. All groups get the same number of token slots, except
that a window group never gets more than its sequences can hold at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.base.cache_group import CacheGroup
from quire.base.errors import OutOfMemory

MIB = 1 << 20
NO_BOUND = 1 << 62


@dataclass(frozen=True)
class MemoryPlan:
    """Where the memory goes, in bytes, and what the pool holds."""

    total_bytes: int
    weights_bytes: int
    workspace_bytes: int
    pool_bytes: int
    num_blocks: tuple[int, ...]
    block_size: int
    max_model_len: int
    graph_bytes: int = 0  # of recorded steps, on a GPU

    @property
    def num_slots(self) -> int:
        """Tokens that the largest group can hold."""
        return max(self.num_blocks) * self.block_size

    def describe(self) -> str:
        """Return one line for the log."""
        fits = self.num_slots / self.max_model_len
        graphs = f"graphs {self.graph_bytes / MIB:,.0f} MiB, " if self.graph_bytes else ""
        return (
            f"memory: weights {self.weights_bytes / MIB:,.0f} MiB, workspace "
            f"{self.workspace_bytes / MIB:,.0f} MiB, {graphs}KV pool "
            f"{self.pool_bytes / MIB:,.0f} MiB = {self.num_slots:,} tokens in"
            f" {max(self.num_blocks):,} blocks of {self.block_size}"
            f" ({fits:.1f} sequences of {self.max_model_len:,})"
        )


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
    caps = [_most_of_all(group, block_size, max_num_seqs, chunk) for group in groups]
    per_sequence = blocks_per_sequence(max_model_len, block_size)
    most = _most_blocks(caps, block_bytes, budget_bytes, per_sequence * max_num_seqs)
    if most < per_sequence:
        raise OutOfMemory(
            f"the KV pool of {budget_bytes / MIB:,.0f} MiB holds {most * block_size:,} tokens, less"
            f" than one sequence of max_model_len={max_model_len:,} needs"
            f" ({_cost(caps, block_bytes, per_sequence) / MIB:,.0f} MiB). Lower max_model_len"
            " (max_model_len=auto takes the longest that fits), or give the pool more memory"
            " (kv_cache_memory_bytes, gpu_memory_utilization)."
        )
    return tuple(min(most, cap) for cap in caps)


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
    limit, or the largest multiple of the block size that fits.

    Raises OutOfMemory if not even a prompt of one token and its answer fit.
    """
    caps = [_most_of_all(group, block_size, max_num_seqs, chunk) for group in groups]
    most = _most_blocks(caps, block_bytes, budget_bytes, blocks_per_sequence(limit, block_size))
    length = min(limit, (most - 1) * block_size)
    if length < 2:
        raise OutOfMemory(
            f"the KV pool of {budget_bytes / MIB:,.1f} MiB holds {most} blocks of {block_size}"
            " tokens, too few for any sequence. Give it more memory (kv_cache_memory_bytes,"
            " gpu_memory_utilization), or take a smaller model."
        )
    return length


def host_tier_blocks(block_bytes: Sequence[int], num_bytes: int) -> tuple[int, ...]:
    """Return how many blocks of each group so many bytes of host memory hold; as many of each."""
    return (num_bytes // sum(block_bytes),) * len(block_bytes)


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


def least_pool_bytes(
    groups: Sequence[CacheGroup],
    block_bytes: Sequence[int],
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    chunk: int,
) -> int:
    """Find the smallest budget with which `size_pools` finds room for one sequence."""
    caps = [_most_of_all(group, block_size, max_num_seqs, chunk) for group in groups]
    return _cost(caps, block_bytes, blocks_per_sequence(max_model_len, block_size))


def _most_blocks(caps: list[int], block_bytes: Sequence[int], budget: int, limit: int) -> int:
    """Find the most blocks per group, up to `limit` and its cap, that the budget has room for."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if _cost(caps, block_bytes, middle) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def _cost(caps: list[int], block_bytes: Sequence[int], num_blocks: int) -> int:
    """Return the bytes of pools of so many blocks each, none above its cap."""
    return sum(min(num_blocks, cap) * b for cap, b in zip(caps, block_bytes, strict=True))


def _most_of_all(group: CacheGroup, block_size: int, max_num_seqs: int, chunk: int) -> int:
    """Return the most blocks that all sequences together hold in a group; no bound for one that
    keeps all tokens."""
    if group.keeps_all:
        return NO_BOUND
    held = group.most_blocks(NO_BOUND, block_size)
    return max_num_seqs * held + -(-chunk // block_size) + max_num_seqs
