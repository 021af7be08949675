"""Time of one layer's attention on this CPU.

    python -m benchmarks.kernels.attention [--part cases,paged,split,cascade,formats]
        [--dtype bfloat16] [--backend cpu] [--threads 2] [--variant amx avx512_bf16]

Each part is a table of one layer's times and of the keys and values that it needs per second. It
also shows their share of the bandwidth of reading memory that fits in no cache:

    cases     decode rows, prompts and chunks; also GFLOP/s of the products that the mask leaves,
              and the share of that in what the instructions do on the same few cache lines
    paged     16 rows in scattered blocks of 16 tokens against the same rows in one block each
    split     one row, its context cut for all threads against one pass; also with one KV head, of
              which one pass is work for one thread
    cascade   16 rows that share their first tokens, read once for all against once for each
    formats   how keys and values are stored

`cases` runs with any backend, the others with `cpu`. --variant: instruction sets of `cpu`, each of
which runs the parts; the default is the one chosen here. Qwen3-0.6B's shape is used: 16 query
heads, 8 KV heads, head dim 128.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.result_files import Row, options_of, write
from benchmarks.timing import best_time
from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.cpu import CpuBackend, variants
from quire.ops.attention.select import make_backend
from quire.ops.attention_inputs import AttentionStep, Scores
from quire.ops.host.native import needed_core
from quire.ops.host.threads import num_threads, set_num_threads
from quire.ops.weights.formats import ATTENTION, NAMES, chosen_variant, variant_numbers
from quire.spec.cache_group import CacheGroup
from quire.tools.report import benchmark_parser

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16
LAYERS = 4  # run in turn, so that one call does not find the last one's blocks in the cache
ROWS = 16


@dataclass(frozen=True)
class Case:
    """Rows given as (context after the step, new tokens); the first `shared` tokens of all rows
    stand in the same blocks."""

    name: str
    rows: tuple[tuple[int, int], ...]
    block_size: int = BLOCK_SIZE
    shared: int = 0
    kv_format: str = "auto"
    kv_heads: int = KV_HEADS

    @property
    def num_blocks(self) -> int:
        """As many as tables without sharing name, which is never too few."""
        return sum(-(-context // self.block_size) for context, _ in self.rows)

    @property
    def flops(self) -> int:
        """Of q k^T and weights times v, without what the causal mask hides."""
        pairs = sum(new * context - new * (new - 1) // 2 for context, new in self.rows)
        return 4 * pairs * HEADS * HEAD_DIM

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that must be read, each row's once."""
        row = HEAD_DIM + 4 if self.kv_format == "int8" else HEAD_DIM * dtype.itemsize
        return 2 * sum(context for context, _ in self.rows) * self.kv_heads * row

    def layout(self, dtype: torch.dtype) -> KVLayout:
        group = CacheGroup("full", tuple(range(LAYERS)), self.kv_heads, HEAD_DIM)
        cpu = torch.device("cpu")
        return KVLayout((group,), (self.num_blocks,), self.block_size, dtype, cpu, self.kv_format)


CASES = (
    *(Case(f"decode, 16 rows of {n}", ((n, 1),) * ROWS) for n in (128, 192, 256, 1024, 2048)),
    Case("decode, 16 rows of 160 to 600", tuple((160 + 29 * i, 1) for i in range(ROWS))),
    Case("decode, 16 rows of 64 to 1024", tuple((64 * (i + 1), 1) for i in range(ROWS))),
    Case("decode, 1 row of 2048", ((2048, 1),)),
    Case("prompts, 2 of 128", ((128, 128),) * 2),
    Case("prompt, 256", ((256, 256),)),
    Case("chunk, 256 after 1792", ((2048, 256),)),
    Case("mixed, 128 and 15 rows of 256", ((128, 128), *(((256, 1),) * 15))),
)

MakeBackend = Callable[[KVLayout], AttentionBackend]
Line = tuple[str, Row | None]  # what is printed, and its row in the results


def scattered_step(case: Case) -> AttentionStep:
    """Return the case over blocks in random order."""
    order = iter(np.random.default_rng(0).permutation(case.num_blocks).tolist())
    size = case.block_size
    width = max(-(-context // size) for context, _ in case.rows)
    table = torch.full((len(case.rows), width), -1, dtype=torch.int32)
    positions, slots = [], []
    for row, (context, new) in enumerate(case.rows):
        blocks = torch.tensor([next(order) for _ in range(-(-context // size))])
        same = case.shared // size if row else 0
        table[row, : len(blocks)] = blocks
        table[row, :same] = table[0, :same]
        positions.append(torch.arange(context - new, context))
        slots.append(table[row, positions[-1] // size].long() * size + positions[-1] % size)
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


def fill(backend: AttentionBackend, case: Case, dtype: torch.dtype) -> None:
    """Write numbers to all blocks (untouched memory would be read from the cache)."""
    tokens = case.num_blocks * case.block_size
    backend.prepare(scattered_step(Case("", ((tokens, tokens),), case.block_size)))
    k, v = torch.randn(2, tokens, case.kv_heads, HEAD_DIM).to(dtype)
    for layer in range(LAYERS):
        backend.write(layer, k, v)


def measure(make: MakeBackend, case: Case, dtype: torch.dtype) -> tuple[float, float]:
    """Return the seconds of one layer's write and run, and of prepare."""
    backend, step = make(case.layout(dtype)), scattered_step(case)
    fill(backend, case, dtype)
    num_tokens = sum(new for _, new in case.rows)
    q = torch.randn(num_tokens, HEADS, HEAD_DIM).to(dtype)
    k, v = torch.randn(2, num_tokens, case.kv_heads, HEAD_DIM).to(dtype)

    def prepare() -> None:
        backend.prepare(step)
        if isinstance(backend, CpuBackend):
            backend.plan(0, HEADS // case.kv_heads)

    def all_layers() -> None:
        for layer in range(LAYERS):
            backend.write(layer, k, v)
            backend.run(layer, q, Scores(HEAD_DIM**-0.5))

    prepare_s = best_time(prepare, min_s=0.05)
    return best_time(all_layers, min_s=0.3) / LAYERS, prepare_s


def read_bandwidth(size_bytes: int = 256 << 20) -> float:
    """Return the bytes per second of adding up memory that fits in no cache."""
    numbers = torch.ones(size_bytes // 4, dtype=torch.float32)
    return size_bytes / best_time(lambda: numbers.sum())


@dataclass(frozen=True)
class Bench:
    """The shared settings of the parts.

    limit: bytes read per second.
    variant: the instruction set of `cpu`, or None for its own choice.
    """

    dtype: torch.dtype
    backend: str
    limit: float
    variant: str | None = None

    def cpu(self, layout: KVLayout, **options: bool) -> CpuBackend:
        return CpuBackend(layout, variant=self.variant, **options)

    def any(self, layout: KVLayout) -> AttentionBackend:
        return self.cpu(layout) if self.backend == "cpu" else make_backend(self.backend, layout)

    def peak_flops(self) -> float:
        """Return the operations per second of the products for keys of this type, as the products
        of weights measure it."""
        format = "bfloat16" if self.dtype == torch.bfloat16 else ATTENTION
        name = self.variant or chosen_variant(format)
        index, number = NAMES.index(format), variant_numbers()[name]
        return max(needed_core().linear_peak(index, number, num_threads()) for _ in range(7))

    def cases(self) -> Iterator[Line]:
        heads = ("layer", 9), ("prepare", 9), ("KV", 10), ("of reading", 10), ("products", 12)
        peak = self.peak_flops() if self.backend == "cpu" else 0.0
        head = "".join(f" {text:>{width}s}" for text, width in heads)
        yield f"{'case':32s}{head}" + (f" of {peak / 1e9:,.0f}" if peak else ""), None
        for case in CASES:
            layer_s, prepare_s = measure(self.any, case, self.dtype)
            rate = case.kv_bytes(self.dtype) / layer_s
            flops = case.flops / layer_s
            line = (
                f"{case.name:32s} {layer_s * 1e6:6.0f} us {prepare_s * 1e6:6.0f} us"
                f" {rate / 1e9:5.1f} GB/s {rate / self.limit:10.0%} {flops / 1e9:5.0f} GFLOP/s"
            )
            row = {"case": case.name, "layer_us": layer_s * 1e6, "prepare_us": prepare_s * 1e6,
                   **self._shares(rate), "gflop_per_s": flops / 1e9}  # fmt: skip
            if peak:
                row |= {"of_products": flops / peak}
                line += f" {flops / peak:5.0%}"
            yield line, row

    def paged(self) -> Iterator[Line]:
        for tokens in (128, 256, 512, 1024, 2048, 4096):
            rows = ((tokens, 1),) * ROWS
            yield self._pair(
                f"16 rows of {tokens:,}",
                ("blocks of 16", Case("", rows), self.cpu),
                ("one block", Case("", rows, block_size=tokens), self.cpu),
            )

    def split(self) -> Iterator[Line]:
        lengths = (512, 2048, 8192, 32_768, 131_072)
        for kv_heads, tokens in [(h, n) for h in (KV_HEADS, 1) for n in lengths]:
            case = Case("", ((tokens, 1),), kv_heads=kv_heads)
            yield self._pair(
                f"1 row of {tokens:,}, {kv_heads} KV heads",
                ("split", case, self.cpu),
                ("one pass", case, lambda x: self.cpu(x, split=False)),
            )

    def cascade(self) -> Iterator[Line]:
        for shared in (256, 512, 1024, 4096):
            case = Case("", ((shared + 64, 1),) * ROWS, shared=shared)
            yield self._pair(
                f"16 rows share {shared:,}, own 64",
                ("cascade", case, self.cpu),
                ("each alone", case, lambda x: self.cpu(x, cascade=False)),
            )

    def formats(self) -> Iterator[Line]:
        for name in ("float32", "bfloat16", "float16", "int8"):
            dtype = torch.bfloat16 if name == "int8" else getattr(torch, name)
            kv_format = "int8" if name == "int8" else "auto"
            for rows in ((1024, 1),) * ROWS, ((2048, 256),):
                case = Case("", rows, kv_format=kv_format)
                layer_s, _ = measure(self.cpu, case, dtype)
                rate = case.kv_bytes(dtype) / layer_s
                title = "chunk, 256 after 1792" if len(rows) == 1 else "decode, 16 rows of 1024"
                flops = case.flops / layer_s
                line = (
                    f"{name:9s} {title:24s} {layer_s * 1e6:8.0f} us {rate / 1e9:5.1f} GB/s"
                    f" {rate / self.limit:6.0%} of reading {flops / 1e9:5.0f} GFLOP/s"
                )
                row = {"case": title, "format": name, "layer_us": layer_s * 1e6}
                yield line, row | self._shares(rate) | {"gflop_per_s": flops / 1e9}

    def _pair(self, title: str, *sides: tuple[str, Case, MakeBackend]) -> Line:
        """Return one line: the first side's time against the second's."""
        times = [measure(make, case, self.dtype)[0] for _, case, make in sides]
        rate = sides[0][1].kv_bytes(self.dtype) / times[0]
        named = ", ".join(f"{s[0]} {t * 1e6:8.0f} us" for s, t in zip(sides, times, strict=True))
        line = (
            f"{title:28s} {named}, {times[1] / times[0]:5.2f} x;"
            f" {rate / 1e9:6.1f} GB/s, {rate / self.limit:5.0%} of reading"
        )
        row = {"case": title, "way": sides[0][0], "layer_us": times[0] * 1e6, "other": sides[1][0],
               "other_us": times[1] * 1e6, "ratio": times[1] / times[0]}  # fmt: skip
        return line, row | self._shares(rate)

    def _shares(self, rate: float) -> Row:
        return {"kv_gb_per_s": rate / 1e9, "of_reading": rate / self.limit}


PARTS = ("cases", "paged", "split", "cascade", "formats")


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--part", default=",".join(PARTS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--threads", type=int, default=num_threads())
    parser.add_argument("--variant", nargs="+", choices=variants(), default=[None])
    options, rows = parser.parse_args(), list[Row]()
    torch.set_num_threads(options.threads)
    set_num_threads(options.threads)
    with torch.inference_mode():
        dtype, limit = getattr(torch, options.dtype), read_bandwidth()
        print(
            f"{options.backend}, {dtype}, {options.threads} threads; reading {limit / 1e9:.1f} GB/s"
        )
        for part in options.part.split(","):
            for variant in options.variant:
                print(f"--- {part}" + (f", {variant}" if variant else ""))
                bench = Bench(dtype, options.backend, limit, variant)
                labels = {"part": part, "variant": variant, "threads": options.threads}
                for line, row in getattr(bench, part)():
                    print(line, flush=True)
                    rows += [labels | row] if row else []
    settings = options_of(options) | {"read_bytes_per_s": limit}
    write(options.output_json, "kernels.attention", rows, settings)


if __name__ == "__main__":
    main()
