"""Measure the time to allocate and free one block, against the size of the pool: it must not grow.

    python -m benchmarks.memory.block_pool

Half of the pool is in use throughout. `plain`: allocate a block and free it. `indexed`: allocate
one, name it as prefix caching does, and free it. The other half of the pool waits in the LRU queue,
so every allocation evicts. `random`: free a random block in use, and allocate another one.

The number of operations never depends on the size. `indexed` and `random` grow only by the time of
memory accesses, once the book-keeping is larger than the processor's caches. For comparison, `list`
is the time of two random reads and writes of a plain list as long as the pool.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.result_files import options_of, write
from quire.kv.pool import BlockPool
from quire.tools.report import benchmark_parser, print_head

SIZES = (1_000, 10_000, 100_000, 1_000_000)
ROUNDS = 3


def plain_ns(num_blocks: int, num_operations: int) -> float:
    """Take one, give it back."""
    pool = BlockPool(num_blocks)
    for _ in range(num_blocks // 2):
        pool.allocate()

    def work() -> None:
        for _ in range(num_operations):
            pool.release(pool.allocate())

    return _best_ns(work, num_operations)


def indexed_ns(num_blocks: int, num_operations: int) -> float:
    """Take one, name it, give it back. The free half is named as well."""
    pool = BlockPool(num_blocks)
    allocated = [pool.allocate() for _ in range(num_blocks)]
    for block_id in allocated:
        pool.index(block_id, block_id.to_bytes(32, "big"))
    for block_id in allocated[num_blocks // 2 :]:
        pool.release(block_id)
    numbers = range(num_blocks, num_blocks + (ROUNDS + 1) * num_operations)
    digests = [number.to_bytes(32, "big") for number in reversed(numbers)]

    def work() -> None:
        for _ in range(num_operations):
            block_id = pool.allocate()
            pool.index(block_id, digests.pop())
            pool.release(block_id)

    return _best_ns(work, num_operations)


def random_ns(num_blocks: int, num_operations: int) -> float:
    """Give back any one, take another one."""
    pool = BlockPool(num_blocks)
    allocated = [pool.allocate() for _ in range(num_blocks // 2)]
    places = _places(len(allocated), num_operations)

    def work() -> None:
        for place in places:
            pool.release(allocated[place])
            allocated[place] = pool.allocate()

    return _best_ns(work, num_operations)


def list_ns(num_blocks: int, num_operations: int) -> float:
    """Return the nanoseconds of two random reads and writes of a list as long as the pool."""
    values = list(range(num_blocks))
    places = _places(num_blocks // 2, num_operations)
    half = num_blocks // 2

    def work() -> None:
        for place in places:
            values[place], values[place + half] = values[place + half], values[place]

    return _best_ns(work, num_operations)


def _places(num: int, num_operations: int) -> list[int]:
    places: list[int] = np.random.default_rng(0).integers(0, num, num_operations).tolist()
    return places


def _best_ns(work: Callable[[], None], num_operations: int) -> float:
    """Return nanoseconds per operation, the best of some rounds after one that does not count."""
    best = float("inf")
    for round_ in range(ROUNDS + 1):
        began = time.perf_counter_ns()
        work()
        if round_ > 0:
            best = min(best, (time.perf_counter_ns() - began) / num_operations)
    return best


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--operations", type=int, default=100_000)
    options = parser.parse_args()
    print_head("block pool: nanoseconds to allocate and free one block")
    print(f"{'blocks':>10} {'plain':>8} {'indexed':>8} {'random':>8} {'list':>8}")
    results: list[dict[str, Any]] = []
    for num_blocks in SIZES:
        row = {
            "plain": plain_ns(num_blocks, options.operations),
            "indexed": indexed_ns(num_blocks, options.operations),
            "random": random_ns(num_blocks, options.operations),
            "list": list_ns(num_blocks, options.operations),
        }
        results.append({"blocks": num_blocks, "ns": row})
        print(f"{num_blocks:10,} " + " ".join(f"{ns:8.0f}" for ns in row.values()), flush=True)
    for name in ("plain", "indexed"):
        growth = results[-1]["ns"][name] / results[0]["ns"][name]
        print(f"{name}: {growth:.2f} x from {SIZES[0]:,} to {SIZES[-1]:,} blocks (flat is 1)")
    write(options.output_json, "memory.block_pool", results, options_of(options))


if __name__ == "__main__":
    main()
