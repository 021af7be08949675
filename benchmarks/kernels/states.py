"""Time of one layer's convolution and delta rule on this CPU.

    python -m benchmarks.kernels.states [--dtype float32] [--backend cpu] [--threads 2]

The table shows one layer's times. For the delta rule it also shows GFLOP/s of its recurrence (7 for
each number of the memory and token). For a decode step it shows the states read and written per
second, compared with copying memory that fits in no cache. 19 MB of one row's states may stay in a
cache, so look at 16 rows. Then follow steps with draft tokens, relative to a step of one token per
row: the forward pass, and storing the states after the accepted tokens. The shape is a hybrid of
0.6B: 16 heads of 128 x 128 and a convolution of 4 over 6,144 channels.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.result_files import Row, options_of, write
from benchmarks.timing import best_time, copy_bandwidth
from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.select import make_backend
from quire.ops.attention.states import RecordedInputs
from quire.ops.attention_inputs import AttentionStep, DeltaHeads
from quire.ops.host.threads import num_threads, set_num_threads
from quire.spec.cache_group import STATE, CacheGroup
from quire.tools.report import benchmark_parser

HEADS, WIDTH, BLOCK_SIZE = DeltaHeads(16, 16, 128, 128), 4, 16
LAYERS = 18  # run in turn, so that one call does not find the last one's states in the cache
MAX_ROWS = 16
DRAFTS = 4

# Rows given as (tokens before the step, new tokens).
CASES = {
    "decode, 1 row": ((100, 1),),
    "decode, 4 rows": ((100, 1),) * 4,
    "decode, 16 rows": ((100, 1),) * MAX_ROWS,
    "prompt, 64": ((0, 64),),
    "prompt, 512": ((0, 512),),
    "prompts, 4 of 64": ((0, 64),) * 4,
    "mixed, 128 and 15 rows": ((0, 128), *((100, 1),) * 15),
}


def step_of(rows: Sequence[tuple[int, int]]) -> AttentionStep:
    """Return a step whose rows have a block each."""
    lens = np.array([count for _, count in rows], np.int32)
    contexts = np.array([before + count for before, count in rows], np.int32)
    tables = torch.full((len(rows), int(contexts.max()) // BLOCK_SIZE + 1), -1, dtype=torch.int32)
    for row, context in enumerate(contexts):
        tables[row, (context - 1) // BLOCK_SIZE] = row
        tables[row, max(0, rows[row][0] - 1) // BLOCK_SIZE] = row
    total = int(lens.sum())
    return AttentionStep(
        positions_T=torch.zeros(total, dtype=torch.int64),
        query_starts_S1=torch.from_numpy(np.concatenate(([0], np.cumsum(lens))).astype(np.int32)),
        context_lens_S=torch.from_numpy(contexts),
        slots_T=(torch.full((total,), -1),),
        block_tables_SL=(tables,),
        query_lens_host=lens,
        context_lens_host=contexts,
    )


def per_layer(run: Callable[[int], object]) -> float:
    """Return the seconds of one layer."""

    def all_layers() -> None:
        for layer in range(LAYERS):
            run(layer)

    return best_time(all_layers, min_s=0.3) / LAYERS


def measure(
    backend: AttentionBackend, rows: Sequence[tuple[int, int]], dtype: torch.dtype
) -> tuple[float, float]:
    """Return the seconds of one layer's convolution and delta rule."""
    total, channels = sum(count for _, count in rows), HEADS.channels
    # As in a layer: columns of one product's result.
    row = torch.randn(total, channels + HEADS.values * HEADS.value_dim + 2 * HEADS.values)
    x, gates = row.to(dtype)[:, :channels], row.to(dtype)[:, -2 * HEADS.values :]
    weight = torch.randn(channels, WIDTH).to(dtype)
    rate, shift = torch.rand(2, HEADS.values)
    backend.prepare(step_of(rows))
    convolution_s = per_layer(lambda layer: backend.convolve(layer, x, weight))
    delta_s = per_layer(lambda layer: backend.delta_rule(layer, x, gates, rate, shift, HEADS))
    return convolution_s, delta_s


def measure_drafts(
    backend: AttentionBackend, num_rows: int, num_right: int, dtype: torch.dtype
) -> float:
    """Return the seconds of one layer in a step of rows with draft tokens, num_right of which are
    accepted."""
    total, channels = num_rows * (1 + DRAFTS), HEADS.channels
    row = torch.randn(total, channels + 2 * HEADS.values).to(dtype)
    x, gates = row[:, :channels], row[:, channels:]
    weight = torch.randn(channels, WIDTH).to(dtype)
    rate, shift = torch.rand(2, HEADS.values)
    step = step_of(((100, 1 + DRAFTS),) * num_rows)
    right = np.full(num_rows, 1 + num_right, np.int32)

    def run() -> None:
        kept = RecordedInputs(backend, np.ones(num_rows, bool))
        kept.prepare(step)
        for layer in range(LAYERS):
            qkv = kept.convolve(layer, x, weight)
            kept.delta_rule(layer, qkv, gates, rate, shift, HEADS)
        kept.settle(right)

    return best_time(run, min_s=0.3) / LAYERS


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--threads", type=int, default=num_threads())
    options, written = parser.parse_args(), list[Row]()
    torch.set_num_threads(options.threads)
    set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    size = HEADS.channels * (WIDTH - 1) + HEADS.memory_size
    group = CacheGroup(STATE, tuple(range(LAYERS)), state_size=size)
    layout = KVLayout((group,), (MAX_ROWS,), BLOCK_SIZE, dtype, torch.device("cpu"))
    with torch.inference_mode():
        backend, limit = make_backend(options.backend, layout), copy_bandwidth()
        print(
            f"{options.backend}, {dtype}, {options.threads} threads; copying {limit / 1e9:.1f} GB/s"
        )
        for name, rows in CASES.items():
            convolution_s, delta_s = measure(backend, rows, dtype)
            tokens = sum(count for _, count in rows)
            rate = 2 * len(rows) * HEADS.memory_size * 4 / delta_s
            work = 7 * tokens * HEADS.memory_size / delta_s
            print(
                f"{name:24s} convolution {convolution_s * 1e6:7.0f} us,"
                f" delta rule {delta_s * 1e6:7.0f} us {work / 1e9:5.0f} GFLOP/s,"
                f" states {rate / 1e9:5.1f} GB/s {rate / limit:5.0%} of copying",
                flush=True,
            )
            written.append(
                {"case": name, "convolution_us": convolution_s * 1e6,
                 "delta_rule_us": delta_s * 1e6, "gflop_per_s": work / 1e9,
                 "gb_per_s": rate / 1e9, "of_copying": rate / limit}
            )  # fmt: skip
        for num_rows in (1, 4, MAX_ROWS):
            plain_s = sum(measure(backend, ((100, 1),) * num_rows, dtype))
            times = [
                measure_drafts(backend, num_rows, right, dtype) / plain_s
                for right in range(DRAFTS + 1)
            ]
            shown = ", ".join(f"{each:.2f}" for each in times)
            print(f"{num_rows} rows with {DRAFTS} guesses, 0 .. {DRAFTS} right: {shown} of a token")
            case = f"{num_rows} rows with {DRAFTS} guesses"
            written.append({"case": case, "of_a_token_by_right_guesses": times})
    settings = options_of(options) | {"copy_bytes_per_s": limit}
    write(options.output_json, "kernels.states", written, settings)


if __name__ == "__main__":
    main()
