"""Blocks to files and back, against plain reads and writes of one large file.

    python benchmarks/kv_store.py --directory /var/tmp

Blocks of 57 KB (16 tokens of a model of 0.6 B parameters, in part of its layers) and of 1.75 MB (16
tokens of Qwen3-0.6B in bf16). `raw` is what dd does: one file, in pieces of a block; through the
page cache, or past it with O_DIRECT (pieces of 1 MiB). `store`: DiskStore alone, each block a file,
with the envelope's checksum made or checked. `worker`: from host memory into files, or back, by
orders of 32 blocks, with the copies on both sides; host memory is laid out as the C++ core's KV
memory is. `cached`: what is read is in the page cache. `disk`: it was put out of it before; what is
written is there when the clock stops. Each number is the best of some rounds; each round writes new
files (ext4 is several times slower for seconds after many files were deleted).
"""

import hashlib
import mmap
import os
import queue
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from quire.base.tiers import Answer, Fetch, Item, Keep
from quire.engine.connectors.disk import DiskStore
from quire.engine.connectors.store import block_key, seal, unseal
from quire.engine.connectors.worker import StoreWorker
from quire.ops.attention.host_blocks import HostBlocks
from quire.tools.report import benchmark_parser, print_head, write_report

# Keys and values, layers, KV heads, -, tokens, head dim.
SHAPES = {57_344: (2, 7, 2, -1, 16, 64), 1_835_008: (2, 28, 8, -1, 16, 128)}
ROUNDS = 3
PER_ORDER = 32
DIRECT_BYTES = 1 << 20
FINGERPRINT = bytes(32)


class Memory:
    """Host blocks of one cache group, in the layout of the C++ core."""

    def __init__(self, block_bytes: int, num_blocks: int) -> None:
        shape = tuple(num_blocks if n < 0 else n for n in SHAPES[block_bytes])
        self._host = HostBlocks([torch.zeros(shape, dtype=torch.bfloat16)], dim=3)
        assert self._host.block_bytes(0) == block_bytes
        generator = np.random.default_rng(0)
        for block in range(num_blocks):
            self.write(0, block, memoryview(generator.bytes(block_bytes)))

    def block_bytes(self, group: int) -> int:
        return self._host.block_bytes(group)

    def read(self, group: int, block: int) -> memoryview:
        return self._host.read(group, block)

    def write(self, group: int, block: int, data: memoryview) -> None:
        self._host.write(group, block, data)


class Raw:
    """One large file."""

    def __init__(self, folder: Path, piece_bytes: int, total: int) -> None:
        self._path = folder / "raw"
        self._num = total // piece_bytes
        self._piece = mmap.mmap(-1, piece_bytes)  # aligned, as O_DIRECT wants it
        self._piece.write(np.random.default_rng(0).bytes(piece_bytes))

    def write(self, flags: int = 0) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags)
        for _ in range(self._num):
            os.write(file, self._piece)
        if flags:
            os.fsync(file)
        os.close(file)

    def read(self, flags: int = 0) -> None:
        file = os.open(self._path, os.O_RDONLY | flags)
        while os.readv(file, [self._piece]):
            pass
        os.close(file)


def digests(num: int, round_: int) -> list[bytes]:
    return [hashlib.sha256(b"%d %d" % (i, round_)).digest() for i in range(num)]


def put_out_of_cache(folder: Path) -> None:
    os.sync()
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def best_gb_s(
    total: int, work: Callable[[], None], before: Callable[[], object] = lambda: None
) -> float:
    best_s = float("inf")
    for _ in range(ROUNDS):
        before()
        began = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - began)
    return total / best_s / 1e9


def raw_rates(folder: Path, block_bytes: int, total: int) -> dict[str, float]:
    raw, direct = Raw(folder, block_bytes, total), Raw(folder, DIRECT_BYTES, total)
    rates = {
        "write, cached": best_gb_s(total, raw.write),
        "read, cached": best_gb_s(total, raw.read),
    }
    try:
        rates["write, disk"] = best_gb_s(total, lambda: direct.write(os.O_DIRECT))
        rates["read, disk"] = best_gb_s(total, lambda: direct.read(os.O_DIRECT))
    except OSError:
        print("# no O_DIRECT here")
    (folder / "raw").unlink()
    return rates


def store_rates(folder: Path, block_bytes: int, total: int) -> dict[str, float]:
    store, num = DiskStore(folder / "store", 1 << 40), total // block_bytes
    data = np.random.default_rng(0).bytes(block_bytes)

    def write(round_: int) -> None:
        for name in digests(num, round_):
            header = seal(FINGERPRINT, 0, name, data)
            assert store.put(block_key(FINGERPRINT, 0, name), (header, data)), "it was not kept"

    def read(round_: int) -> None:
        names = digests(num, round_)
        keys = [block_key(FINGERPRINT, 0, name) for name in names]
        for value, name in zip(store.get(keys), names, strict=True):
            assert value is not None
            assert unseal(value, FINGERPRINT, 0, name, block_bytes)[0] is not None

    return _rates(folder, total, write, read)


def worker_rates(folder: Path, block_bytes: int, total: int) -> dict[str, float]:
    num, answers = total // block_bytes, queue.SimpleQueue[Answer]()
    memory, store = Memory(block_bytes, num), DiskStore(folder / "worker", 1 << 40)
    worker = StoreWorker(store, FINGERPRINT, memory, answers.put, lambda: None)

    def carry_out(kind: Callable[[int, int, tuple[Item, ...]], Keep | Fetch], round_: int) -> None:
        items = [(0, name, i) for i, name in enumerate(digests(num, round_))]
        orders = [tuple(items[i : i + PER_ORDER]) for i in range(0, num, PER_ORDER)]
        for order in orders:  # one after the other, so that none is refused
            worker.submit(kind(0, 0, order))
            assert all(answers.get().ok), "it was not kept or not found"

    rates = _rates(folder, total, lambda i: carry_out(Keep, i), lambda i: carry_out(Fetch, i))
    worker.close(10.0)
    return rates


def _rates(
    folder: Path, total: int, write: Callable[[int], None], read: Callable[[int], None]
) -> dict[str, float]:
    rounds = iter(range(2 * ROUNDS))

    def write_through() -> None:
        write(next(rounds))
        os.sync()

    return {
        "write, cached": best_gb_s(total, lambda: write(next(rounds))),
        "read, cached": best_gb_s(total, lambda: read(0)),
        "write, disk": best_gb_s(total, write_through, os.sync),
        "read, disk": best_gb_s(total, lambda: read(1), lambda: put_out_of_cache(folder)),
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--megabytes", type=int, default=256)
    options = parser.parse_args()
    print_head("KV blocks in files: GB/s, and the share of raw")
    results = []
    for block_bytes in SHAPES:
        total = (options.megabytes << 20) // block_bytes * block_bytes
        with tempfile.TemporaryDirectory(dir=options.directory) as name:
            rates = {
                "raw": raw_rates(Path(name), block_bytes, total),
                "store": store_rates(Path(name), block_bytes, total),
                "worker": worker_rates(Path(name), block_bytes, total),
            }
        results.append({"block_bytes": block_bytes, "gb_per_s": rates})
        print(f"\nblocks of {block_bytes:,} bytes\n{'':15} {'raw':>7} {'store':>15} {'worker':>15}")
        for what, raw in rates["raw"].items():
            others = [rates[who][what] for who in ("store", "worker")]
            shares = " ".join(f"{gb_s:8.2f} ({gb_s / raw:4.0%})" for gb_s in others)
            print(f"{what:15} {raw:7.2f} {shares}", flush=True)
    write_report(options.output_json, {"results": results})


if __name__ == "__main__":
    main()
