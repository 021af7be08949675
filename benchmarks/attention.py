"""Time of one layer's attention on this CPU.

    python -m benchmarks.attention [--dtype bfloat16] [--backend torch] [--threads 2]

Prints for each case the time of one layer, the keys and values that it needs per second, and the
share of that in the bandwidth of a plain copy (bytes read and written). For chunks of a prompt also
GFLOP/s of the products, counting only what the causal mask leaves.
The shape is that of Qwen3-0.6B: 16 query heads, 8 KV heads, head dim 128, blocks of 16.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.timing import best_time, copy_bandwidth
from quire.base.model_spec import CacheGroup
from quire.ops.attention.base import AttentionBackend, AttentionStep, KVLayout
from quire.ops.attention.select import make_backend

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16
LAYERS = 4  # run in turn, so that one call does not find the last one's blocks in the cache


@dataclass(frozen=True)
class Case:
    """Rows given as (context after the step, new tokens)."""

    name: str
    rows: tuple[tuple[int, int], ...]

    @property
    def num_blocks(self) -> int:
        return sum(-(-context // BLOCK_SIZE) for context, _ in self.rows)

    @property
    def flops(self) -> int:
        """Of q k^T and weights times v, without what the causal mask hides."""
        pairs = sum(new * context - new * (new - 1) // 2 for context, new in self.rows)
        return 4 * pairs * HEADS * HEAD_DIM

    def kv_bytes(self, dtype: torch.dtype) -> int:
        tokens = sum(context for context, _ in self.rows)
        return 2 * tokens * KV_HEADS * HEAD_DIM * dtype.itemsize


CASES = (
    *(Case(f"decode, 16 rows of {n}", ((n, 1),) * 16) for n in (128, 192, 256, 1024, 2048)),
    Case("decode, 16 rows of 64 to 1024", tuple((64 * (i + 1), 1) for i in range(16))),
    Case("decode, 1 row of 2048", ((2048, 1),)),
    Case("prompts, 2 of 128", ((128, 128),) * 2),
    Case("prompt, 256", ((256, 256),)),
    Case("chunk, 256 after 1792", ((2048, 256),)),
    Case("mixed, 128 and 15 rows of 256", ((128, 128), *(((256, 1),) * 15))),
)


def scattered_step(case: Case) -> AttentionStep:
    """The case over blocks in random order."""
    order = iter(np.random.default_rng(0).permutation(case.num_blocks).tolist())
    width = max(-(-context // BLOCK_SIZE) for context, _ in case.rows)
    table = torch.full((len(case.rows), width), -1, dtype=torch.int32)
    positions, slots = [], []
    for row, (context, new) in enumerate(case.rows):
        blocks = torch.tensor([next(order) for _ in range(-(-context // BLOCK_SIZE))])
        table[row, : len(blocks)] = blocks
        positions.append(torch.arange(context - new, context))
        slots.append(blocks[positions[-1] // BLOCK_SIZE] * BLOCK_SIZE + positions[-1] % BLOCK_SIZE)
    contexts, lens = np.array(case.rows, np.int32).T.copy()
    starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    return AttentionStep(
        positions_T=torch.cat(positions),
        query_starts_S1=torch.from_numpy(starts),
        context_lens_S=torch.from_numpy(contexts),
        slots_T=(torch.cat(slots),),
        block_tables_SL=(table,),
        query_lens_host=lens,
        context_lens_host=contexts,
    )


def filled_backend(name: str, case: Case, dtype: torch.dtype) -> AttentionBackend:
    """A backend whose blocks hold numbers (untouched memory would be read from the cache)."""
    group = CacheGroup("full", tuple(range(LAYERS)), KV_HEADS, HEAD_DIM)
    layout = KVLayout((group,), (case.num_blocks,), BLOCK_SIZE, dtype, torch.device("cpu"))
    backend = make_backend(name, layout)
    whole = Case("", tuple((context, context) for context, _ in case.rows))
    backend.prepare(scattered_step(whole))
    tokens = sum(context for context, _ in case.rows)
    k, v = torch.randn(2, tokens, KV_HEADS, HEAD_DIM).to(dtype)
    for layer in range(LAYERS):
        backend.write(layer, k, v)
    return backend


def measure(name: str, case: Case, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of one layer's write and run, and of prepare."""
    backend, step = filled_backend(name, case, dtype), scattered_step(case)
    num_tokens = sum(new for _, new in case.rows)
    q = torch.randn(num_tokens, HEADS, HEAD_DIM).to(dtype)
    k, v = torch.randn(2, num_tokens, KV_HEADS, HEAD_DIM).to(dtype)

    def all_layers() -> None:
        for layer in range(LAYERS):
            backend.write(layer, k, v)
            backend.run(layer, q, HEAD_DIM**-0.5)

    prepare_s = best_time(lambda: backend.prepare(step), min_s=0.05)
    return best_time(all_layers) / LAYERS, prepare_s


def lines(backend: str, dtype: torch.dtype) -> Iterator[str]:
    limit = copy_bandwidth()
    yield f"{backend}, {dtype}, {torch.get_num_threads()} threads; copy {limit / 1e9:.1f} GB/s"
    heads = ("layer", 9), ("prepare", 9), ("KV", 10), ("of copy", 8), ("products", 12)
    yield f"{'case':32s}" + "".join(f" {text:>{width}s}" for text, width in heads)
    for case in CASES:
        layer_s, prepare_s = measure(backend, case, dtype)
        rate = case.kv_bytes(dtype) / layer_s
        yield (
            f"{case.name:32s} {layer_s * 1e6:6.0f} us {prepare_s * 1e6:6.0f} us"
            f" {rate / 1e9:5.1f} GB/s {rate / limit:8.0%} {case.flops / layer_s / 1e9:5.0f} GFLOP/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        for line in lines(options.backend, getattr(torch, options.dtype)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
