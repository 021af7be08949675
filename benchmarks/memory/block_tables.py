"""Measure the operations of decoding methods on block tables: fork, append, truncate, free (P 5.2).

    python -m benchmarks.memory.block_tables

The unit is nanoseconds per block, for tables of 16 to 4,096 blocks: it must not grow with the
table. `append`: one more block at a time. `fork`: a second table over the same blocks. `release`:
free the second table; the blocks stay with the first. `truncate`: shorten the first table to
nothing. `free`: free the whole table.

`copy`: the first write into a forked table's last block, which is half full, per write. A new block
replaces the old one, whatever the table's length. It is slower after a longer fork only because the
pool's book-keeping has left the processor's caches.

The pool has 65,536 blocks, half of them in other use. The best of some rounds counts, without
Python's garbage collector.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

from benchmarks.result_files import options_of, write
from quire.kv.pool import BlockPool
from quire.kv.table import BlockTable
from quire.tools.report import benchmark_parser, print_head

SIZES = (16, 64, 256, 1024, 4096)
BLOCK_SIZE = 16
POOL_BLOCKS = 65_536
PARTS = ("append", "fork", "release", "truncate", "free", "copy")
MIN_COPIES = 200
MAX_GROWTH = 1.5  # from the smallest table to the largest, per block


def timed(work: Callable[[], object]) -> int:
    began = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - began


def one_round(num_blocks: int, num_tables: int) -> dict[str, float]:
    """Return nanoseconds per block of each part; of `copy`, per write."""
    pool = BlockPool(POOL_BLOCKS)
    for _ in range(POOL_BLOCKS // 2):
        pool.allocate()
    spent = dict.fromkeys(PARTS, 0.0)
    num_copies = -(-MIN_COPIES // num_tables)

    def append(table: BlockTable) -> None:
        for _ in range(num_blocks):
            table.append(BLOCK_SIZE)

    for _ in range(num_tables):
        first, other = BlockTable(pool, BLOCK_SIZE), BlockTable(pool, BLOCK_SIZE)
        spent["append"] += timed(lambda first=first: append(first))
        children: list[BlockTable] = []
        spent["fork"] += timed(lambda first=first, to=children: to.append(first.fork()))
        spent["release"] += timed(children[0].free)
        first.truncate(num_blocks * BLOCK_SIZE - BLOCK_SIZE // 2)
        for _ in range(num_copies):
            child = first.fork()
            spent["copy"] += timed(lambda child=child: child.append(1)) * num_blocks / num_copies
            child.free()
        spent["truncate"] += timed(lambda first=first: first.truncate(0))
        other.append(num_blocks * BLOCK_SIZE)
        spent["free"] += timed(other.free)
    assert pool.num_used == POOL_BLOCKS // 2, "blocks leak"
    return {part: total / num_blocks / num_tables for part, total in spent.items()}


def measure(num_blocks: int, num_operations: int, num_rounds: int) -> dict[str, float]:
    """Return the best of the rounds, part by part."""
    num_tables = max(1, num_operations // num_blocks)
    gc.collect()
    gc.disable()
    try:
        rounds = [one_round(num_blocks, num_tables) for _ in range(num_rounds)]
    finally:
        gc.enable()
    return {part: min(spent[part] for spent in rounds) for part in PARTS}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--operations", type=int, default=40_000, help="blocks in a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print_head(f"block tables: nanoseconds per block of {BLOCK_SIZE} (copy: per write)")
    print(f"{'blocks':>8} " + " ".join(f"{part:>9}" for part in PARTS))
    results: list[dict[str, Any]] = []
    for num_blocks in SIZES:
        spent = measure(num_blocks, options.operations, options.rounds)
        results.append({"blocks": num_blocks, "ns": spent})
        print(f"{num_blocks:8,} " + " ".join(f"{spent[p]:9.0f}" for p in PARTS), flush=True)
    growth = {part: results[-1]["ns"][part] / results[0]["ns"][part] for part in PARTS}
    for part, times in growth.items():
        print(f"{part}: {times:.2f} x from {SIZES[0]} to {SIZES[-1]:,} blocks (flat is 1)")
    largest = max(times for part, times in growth.items() if part != "copy")
    print(f"most, per block: {largest:.2f} x (aim at most {MAX_GROWTH:g})")
    write(
        options.output_json,
        "memory.block_tables",
        results,
        options_of(options) | {"growth": growth},
    )


if __name__ == "__main__":
    main()
