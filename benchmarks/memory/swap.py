"""Measure swapping a sequence out and back, against recomputing it, over block sizes (P fig. 19).

    python benchmarks/memory/swap.py [--plot swap.svg]

Measured on this machine: the runner's copies of a sequence's blocks to host memory and back, from
random blocks of a pool to random others. Also a prefill of the same sequence by the engine, in
chunks of its token budget. The model has Qwen3-0.6B's shape in bf16. Pool and mirror were written
before. Each time is the shortest of some rounds, after one that does not count: other load only
adds to it. The limit of a swap reads and writes each byte once, each way, at the measured speed of
a long read. `of limit` is the achieved share. `ratio`: recomputation over swapping. `auto`: the
engine's choice for this sequence, by the rates that it has measured itself
(scheduler/core/preemption.py).

By formula (virtual/swap_costs.py): OPT-13B in fp16, as in the paper: 40 layers of 40 heads of 128,
26 GB of weights. An A100 reaches half of its 312 TFLOP/s in a prefill. PCIe 4 x16 gives 25 GB/s and
PCIe 5 x16 55 GB/s; submitting a transfer takes 10 us. An A100 has no PCIe 5: there the link alone
is changed; the H100 reaches half of 989 TFLOP/s. The paper's engine makes a transfer for each
block, layer, and K or V. Ours makes one transfer for all. It gathers blocks at 1.3 TB/s (H100: 2.7)
and scatters them over the host's memory at 100 GB/s, each reading and writing. `auto`: our
scheduler's choice with the rates that it would measure there. These numbers are assumptions;
nothing here was measured on a GPU.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.result_files import options_of, write
from benchmarks.virtual.dry_run import dry_request
from benchmarks.virtual.swap_costs import (
    Device,
    Victim,
    batched_s,
    chooses_swap,
    crossing_block_size,
    engine_rates,
    link_for_ratio,
    per_block_s,
    recompute_s,
)
from quire.base.clock import MonotonicClock
from quire.base.errors import ConfigError
from quire.base.messages import Abort
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import config_from_flat
from quire.engine.executors.executor import InProcessExecutor
from quire.engine.loop.core import EngineCore
from quire.engine.start.build import make_scheduler
from quire.models.checkpoint.source import resolve_model
from quire.runner.build import build_runner
from quire.runner.setup.built import BuiltRunner
from quire.spec.cache_group import CacheGroup
from quire.tools.limits import Limits, StepCost, measure_limits, step_cost
from quire.tools.report import benchmark_parser, print_head

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
OPT_13B = Victim(CacheGroup("full", tuple(range(40)), 40, 128), 13e9, 1024, 16)
A100 = Device("A100, PCIe 4", 25e9, 10e-6, 1.3e12, 100e9, 0.5 * 312e12)
DEVICES = (
    A100,
    replace(A100, name="A100, PCIe 5", link=55e9),
    Device("H100, PCIe 5", 55e9, 10e-6, 2.7e12, 100e9, 0.5 * 989e12),
)
WAYS = {"per_block": per_block_s, "batched": batched_s}
PAPER_RATIO = 1.2  # P: recomputation never takes longer than this many times a swap
POOL_SEQUENCES = 4  # of the longest fill the pool
WARMUP_PARTS = 16
GB = 1e9
MS = 1e3
RED, BLUE, GREEN = "#b2182b", "#2166ac", "#1b7837"
STYLES = (("-", "o"), ("--", "s"))


@dataclass(frozen=True)
class Measured:
    """One line: a sequence of num_tokens in blocks of block_size, each time the shortest."""

    num_tokens: int
    block_size: int
    num_bytes: int
    out_s: float
    in_s: float
    recompute_s: float
    auto_swaps: bool
    engine_copy_bytes_per_s: float
    engine_prefill_tokens_per_s: float

    @property
    def swap_s(self) -> float:
        return self.out_s + self.in_s

    @property
    def is_right(self) -> bool:
        """Whether `auto` takes the cheaper way."""
        return self.auto_swaps == (self.swap_s < self.recompute_s)

    def floor_s(self, limits: Limits) -> float:
        """Read and written once each way."""
        return 4 * self.num_bytes / limits.bytes_per_s


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Bench:
    """An engine with one block size."""

    def __init__(self, block_size: int, options: Any) -> None:
        longest = max(options.tokens) + 2
        self.built = self._build(block_size, longest, options)
        config, spec = self.built.config, self.built.spec
        limits = RequestLimits(spec.vocab_size, longest, 0, POOL_SEQUENCES)
        executor = InProcessExecutor(self.built)
        self.core = EngineCore(
            make_scheduler(self.built, resolve_model(options.model)),
            executor,
            MonotonicClock(),
            limits,
        )
        self.block_size = block_size
        self.chunk = config.scheduler.max_num_batched_tokens or 0
        self.num_blocks = self.built.memory.num_blocks[0]
        self.block_bytes = spec.cache_groups[0].block_bytes(block_size, self.built.dtype.itemsize)
        self._rng = np.random.default_rng(0)
        self._num_requests = 0

    @staticmethod
    def _build(block_size: int, longest: int, options: Any) -> BuiltRunner:
        config = config_from_flat(
            model=options.model,
            dtype=options.dtype,
            device="cpu",
            load_format="dummy",
            block_size=block_size,
            max_model_len=longest,
            max_num_seqs=POOL_SEQUENCES,
            max_num_batched_tokens=options.chunk,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        return build_runner(config, resolve_model(options.model))

    @torch.inference_mode()
    def touch(self) -> None:
        """Write every page of the pool and of its mirror, in parts."""
        for part in np.array_split(np.arange(self.num_blocks, dtype=np.int32), WARMUP_PARTS):
            if len(part):
                self.built.runner.backend.swap_out(0, part, part)
                self.built.runner.backend.load(0, part, part)

    @torch.inference_mode()
    def swap(self, num_tokens: int) -> tuple[float, float]:
        """Return the seconds of a swap out and of its swap in, with random blocks at all three
        places."""
        num = -(-num_tokens // self.block_size)
        here, host, back = (
            self._rng.permutation(self.num_blocks)[:num].astype(np.int32) for _ in range(3)
        )
        backend = self.built.runner.backend
        out_s = timed(lambda: backend.swap_out(0, here, host))
        return out_s, timed(lambda: backend.load(0, host, back))

    def recompute(self, num_tokens: int) -> tuple[float, bool]:
        """Return the seconds of a prefill, and whether the engine would now swap the sequence."""
        core, name = self.core, str(self._num_requests)
        self._num_requests += 1
        tokens = self._rng.integers(0, self.built.spec.vocab_size, num_tokens).tolist()
        core.add(dry_request(name, tokens, 2))
        began = time.perf_counter()
        for _ in range(-(-num_tokens // self.chunk)):
            core.step()
        spent = time.perf_counter() - began
        running = core.scheduler.rows.sequences()
        assert [s.num_computed_tokens for s in running] == [num_tokens], "not what was measured"
        swaps = core.scheduler.preemption.swapping_is_cheaper(running)
        core.control(Abort(name))
        core.publish()
        return spent, swaps

    def measure(self, num_tokens: int, rounds: int) -> Measured:
        """Return the shortest of the rounds, after one more; the engine's choice is the last
        one."""
        swaps, prefills = [], []
        for _ in range(rounds + 1):
            swaps.append(self.swap(num_tokens))
            prefills.append(self.recompute(num_tokens))
        rates = self.core.scheduler.memory.rates
        return Measured(
            num_tokens,
            self.block_size,
            -(-num_tokens // self.block_size) * self.block_bytes,
            min(out_s for out_s, _ in swaps[1:]),
            min(in_s for _, in_s in swaps[1:]),
            min(spent for spent, _ in prefills[1:]),
            prefills[-1][1],
            rates.copy_bytes_per_s,
            rates.prefill_tokens_per_s,
        )


def measure_block_size(block_size: int, options: Any) -> tuple[list[Measured], StepCost, int]:
    """Measure all lengths; return also a step's minimum cost, and the tokens of a chunk."""
    bench = Bench(block_size, options)
    try:
        bench.touch()
        results = [bench.measure(num, options.rounds) for num in options.tokens]
        return results, step_cost(bench.built.spec, bench.built.dtype), bench.chunk
    finally:
        bench.core.close()
        gc.collect()


def measure_all(options: Any) -> tuple[list[Measured], Limits, StepCost, int]:
    """Measure all block sizes, and the best of the limits before and after each."""
    dtype, device = getattr(torch, options.dtype), torch.device("cpu")
    limits = measure_limits(dtype, device)
    results: list[Measured] = []
    for block_size in options.block_sizes:
        found, cost, chunk = measure_block_size(block_size, options)
        results += found
        limits = limits.better(measure_limits(dtype, device))
    results.sort(key=lambda got: (got.num_tokens, got.block_size))
    return results, limits, cost, chunk


def choice(swaps: bool, is_right: bool) -> str:
    """Return the choice of `auto`, for a column."""
    return f"{'swap' if swaps else 'recompute'}{'' if is_right else ' (wrong)'}"


def print_measured(results: list[Measured], limits: Limits, cost: StepCost, chunk: int) -> None:
    """Print a table for each length."""
    for num_tokens in sorted({got.num_tokens for got in results}):
        rows = [got for got in results if got.num_tokens == num_tokens]
        min_s = sum(
            cost.min_s(min(chunk, num_tokens - at), 1, limits) for at in range(0, num_tokens, chunk)
        )
        floor = rows[0].floor_s(limits)
        print(
            f"{num_tokens:,} tokens, measured; ms. Limits: swap {floor * MS:.1f} at"
            f" {limits.bytes_per_s / GB:.0f} GB/s, recomputation {min_s * MS:.0f} in chunks of"
            f" {chunk} at {limits.flops_per_s / GB:,.0f} GFLOP/s"
        )
        print("block     out      in    both  of limit  recompute  of limit   ratio  auto")
        for got in rows:
            print(
                f"{got.block_size:5} {got.out_s * MS:7.1f} {got.in_s * MS:7.1f}"
                f" {got.swap_s * MS:7.1f} {got.floor_s(limits) / got.swap_s:9.0%}"
                f" {got.recompute_s * MS:10.0f} {min_s / got.recompute_s:9.0%}"
                f" {got.recompute_s / got.swap_s:7.1f}  {choice(got.auto_swaps, got.is_right)}"
            )


def by_formula(num_tokens: int, block_sizes: list[int]) -> list[dict[str, Any]]:
    """Compute each device, block size and way of copying."""
    rows = []
    for device in DEVICES:
        for block_size in block_sizes:
            victim = replace(OPT_13B, num_tokens=num_tokens, block_size=block_size)
            again_s = recompute_s(victim, device)
            row = {"device": device.name, "num_tokens": num_tokens, "block_size": block_size}
            row |= {"num_transfers": 2 * victim.num_transfers, "recompute_s": again_s}
            for name, way in WAYS.items():
                swap_s = way(victim, device)
                swaps = chooses_swap(victim, engine_rates(victim, device, way))
                is_right = swaps == (swap_s < again_s)
                row[name] = {"swap_s": swap_s, "auto_swaps": swaps, "is_right": is_right}
            rows.append(row)
    return rows


def print_formula(rows: list[dict[str, Any]]) -> None:
    """Print a table for each device, and the crossing of the ways."""
    for device in DEVICES:
        mine = [row for row in rows if row["device"] == device.name]
        victim = replace(OPT_13B, num_tokens=mine[0]["num_tokens"])
        print(
            f"{victim.num_tokens:,} tokens of OPT-13B, {device.name}, by formula; ms."
            f" Recomputation {mine[0]['recompute_s'] * MS:.0f}"
        )
        print("block  transfers  per block   ratio  auto               batched   ratio  auto")
        for row in mine:
            cells = [
                f"{row[way]['swap_s'] * MS:9.1f} {row['recompute_s'] / row[way]['swap_s']:7.2f}"
                f"  {choice(row[way]['auto_swaps'], row[way]['is_right']):17}"
                for way in WAYS
            ]
            print(f"{row['block_size']:5} {row['num_transfers']:10,}  {' '.join(cells)}".rstrip())
        crossing = crossing_block_size(victim, device)
        print(
            "  one transfer per block: swapping is cheaper"
            + (" nowhere" if crossing is None else f" from blocks of {crossing:.1f} tokens on")
        )


def print_paper(num_tokens: int, block_size: int) -> float:
    """Print and return the link, in bytes per second, with which P's limit on recomputation holds
    up to these blocks."""
    victim = replace(OPT_13B, num_tokens=num_tokens, block_size=block_size)
    link = link_for_ratio(victim, A100, PAPER_RATIO)
    crossing = crossing_block_size(victim, replace(A100, link=link))
    print(
        f"P: recomputation takes at most {PAPER_RATIO:g} x as long as swapping. So it would be"
        f" up to\nblocks of {block_size} over a link of {link / GB:.1f} GB/s; the two would then"
        f" cross at blocks of {crossing:.0f} tokens."
    )
    return link


def load_matplotlib() -> Any:
    """Return matplotlib's pyplot, without a window. Raises ConfigError if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install 'quire[bench]', or"
            " pip install matplotlib; or leave --plot out."
        ) from error
    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "quire", "font.size": 10})
    from matplotlib import pyplot

    return pyplot


def draw(path: Path, results: list[Measured], rows: list[dict[str, Any]], model: str) -> None:
    """Draw two log-log plots next to each other: the measurements, and the formulas on an A100."""
    pyplot = load_matplotlib()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    draw_measured(left, results)
    left.set_title(f"Measured: {model.removeprefix('shape:')}, on a CPU", fontsize=10)
    draw_formula(right, rows)
    title = f"Formula: OPT-13B on an A100, {rows[0]['num_tokens']:,} tokens"
    right.set_title(title, fontsize=10)
    for axes in (left, right):
        finish_axes(axes, [row["block_size"] for row in rows if row["device"] == A100.name])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_measured(axes: Any, results: list[Measured]) -> None:
    """Draw two lines for each length."""
    for num, style in zip(sorted({got.num_tokens for got in results}), STYLES, strict=False):
        mine = [got for got in results if got.num_tokens == num]
        sizes = [got.block_size for got in mine]
        line(
            axes, sizes, [got.recompute_s for got in mine], RED, style, f"recompute {num:,} tokens"
        )
        line(axes, sizes, [got.swap_s for got in mine], BLUE, style, f"swap {num:,} out and in")


def draw_formula(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw recomputation on an A100, and both ways of copying over both links."""
    for device, style in zip(DEVICES[:2], STYLES, strict=True):
        mine = [row for row in rows if row["device"] == device.name]
        sizes, link = [row["block_size"] for row in mine], device.name.split(", ")[1]
        if device is A100:
            line(axes, sizes, [row["recompute_s"] for row in mine], RED, style, "recompute")
        for way, colour, label in (
            ("per_block", BLUE, "a transfer per block (P)"),
            ("batched", GREEN, "one transfer (ours)"),
        ):
            times = [row[way]["swap_s"] for row in mine]
            line(axes, sizes, times, colour, style, f"swap, {link}, {label}")


def line(
    axes: Any, sizes: list[int], times: list[float], colour: str, style: Any, label: str
) -> None:
    dash, marker = style
    axes.plot(
        sizes, [t * MS for t in times], color=colour, linestyle=dash, marker=marker,
        markersize=4, linewidth=1.5, label=label,
    )  # fmt: skip


def finish_axes(axes: Any, sizes: list[int]) -> None:
    """Set logarithmic scales, each block size a tick, room for the legend."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("tokens per block")
    axes.set_ylabel("ms")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(True, which="major", color="#cccccc", linewidth=0.6)
    axes.grid(True, which="minor", axis="y", color="#eeeeee", linewidth=0.5)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="shape:qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--block-sizes", type=int, nargs="+", default=list(BLOCK_SIZES))
    parser.add_argument("--chunk", type=int, help="tokens of a step; the engine's own if absent")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .svg, .png, ...")
    options = parser.parse_args()
    if options.plot is not None:
        load_matplotlib()  # before it is measured
    print_head(f"swapping against recomputation; {options.model} in {options.dtype}, and OPT-13B")
    results, limits, cost, chunk = measure_all(options)
    print_measured(results, limits, cost, chunk)
    rows = by_formula(max(options.tokens), options.block_sizes)
    print_formula(rows)
    link = print_paper(max(options.tokens), max(options.block_sizes))
    measured = [
        asdict(got) | {"floor_s": got.floor_s(limits), "is_right": got.is_right} for got in results
    ]
    settings = options_of(options) | {
        "chunk": chunk,
        "limits": asdict(limits),
        "link_of_paper_bytes_per_s": link,
        "devices": {device.name: asdict(device) for device in DEVICES},
    }
    parts = ("measured", measured), ("formula", rows)
    written = [{"part": part, **row} for part, found in parts for row in found]
    write(options.output_json, "memory.swap", written, settings)
    if options.plot is not None:
        draw(options.plot, results, rows, options.model)


if __name__ == "__main__":
    main()
