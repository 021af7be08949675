"""Steps over random blocks for the attention tests, and attention without blocks as the measure."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.select import make_backend
from quire.ops.attention_inputs import AttentionStep, Int32, Scores
from quire.spec.cache_group import CacheGroup
from tests.support.models.paged_forward import CPU, RowPart, make_step

HEAD_DIM = 32
NUM_VALUES = 24  # elements of a latent vector that are also its value


@dataclass(frozen=True)
class Case:
    """Rows given as (tokens before the step, tokens of the step).

    spans: (row, first, end) of positions whose tokens see each other, if the window lets them.
    is_latent: whether one latent vector per token stands for keys and values; `kv_heads` is then 1.
    """

    rows: Sequence[tuple[int, int]]
    block_size: int = 4
    heads: int = 4
    kv_heads: int = 2
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    spans: tuple[tuple[int, int, int], ...] = ()
    is_latent: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(self.rows))  # so that a case has a hash

    @property
    def ends_T(self) -> Int32 | None:
        """What the step has of the spans."""
        return self.ends_of(
            [(row, before, before + n) for row, (before, n) in enumerate(self.rows)]
        )

    def ends_of(self, parts: Sequence[tuple[int, int, int]]) -> Int32 | None:
        """What a step of these parts (row, begin, end) of the rows has of them."""
        if not self.spans:
            return None
        ends = [np.zeros(sum(row), np.int32) for row in self.rows]
        for row, first, end in self.spans:
            ends[row][first:end] = end
        return np.concatenate([ends[row][begin:end] for row, begin, end in parts])

    @property
    def sinks_N(self) -> torch.Tensor | None:
        """One sink outweighs most keys, one is nothing."""
        if not self.has_sinks:
            return None
        return torch.tensor([0.5, 5.0, -torch.inf, -1.0, 2.0, 0.0][: self.heads])

    @property
    def num_blocks(self) -> int:
        return sum(self.blocks_of(row) for row in range(len(self.rows))) + 2

    def blocks_of(self, row: int) -> int:
        return -(-sum(self.rows[row]) // self.block_size)

    def layout(self, dtype: torch.dtype) -> KVLayout:
        kind = "chunked" if self.chunk else "full" if self.window is None else "window"
        kind = "latent" if self.is_latent else kind
        span = self.chunk or self.window
        group = CacheGroup(kind, (0, 1), self.kv_heads, HEAD_DIM, span)
        return KVLayout((group,), (self.num_blocks,), self.block_size, dtype, CPU)

    def tables(self, seed: int = 0) -> list[list[int]]:
        """Scattered blocks, none of them in two rows."""
        order = np.random.default_rng(seed).permutation(self.num_blocks).tolist()
        return [[order.pop() for _ in range(self.blocks_of(r))] for r in range(len(self.rows))]


@dataclass
class Contents:
    """The whole sequences of all rows, and queries for all of their tokens (float64). The values of
    a latent case are the latent vectors, too."""

    q: list[torch.Tensor] = field(default_factory=list)
    k: list[torch.Tensor] = field(default_factory=list)
    v: list[torch.Tensor] = field(default_factory=list)


def make_contents(case: Case, seed: int = 0) -> Contents:
    generator = torch.Generator().manual_seed(seed)
    contents = Contents()
    for before, new in case.rows:
        for values, heads in (
            (contents.q, case.heads),
            (contents.k, case.kv_heads),
            (contents.v, case.kv_heads),
        ):
            shape = (before + new, heads, HEAD_DIM)
            values.append(torch.randn(shape, generator=generator, dtype=torch.float64))
    return replace(contents, v=contents.k) if case.is_latent else contents


def steps_of(
    case: Case, tables: Sequence[Sequence[int]]
) -> tuple[AttentionStep | None, AttentionStep]:
    """The step that fills what stands before (None if nothing does), and the step itself."""
    rows = range(len(case.rows))
    earlier = [RowPart(0, case.rows[r][0], (tables[r],)) for r in rows if case.rows[r][0]]
    parts = [RowPart(case.rows[r][0], sum(case.rows[r]), (tables[r],)) for r in rows]
    before = make_step(earlier, case.block_size) if earlier else None
    return before, replace(make_step(parts, case.block_size), ends_T=case.ends_T)


def run_backend(
    backend: AttentionBackend,
    case: Case,
    contents: Contents,
    tables: Sequence[Sequence[int]],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Write what stands before the step, then run the step: [T, N, H]."""
    before, step = steps_of(case, tables)
    if before is not None:
        backend.prepare(before)
        k, v = (
            torch.cat([x[: row[0]] for x, row in zip(values, case.rows, strict=True)]).to(dtype)
            for values in (contents.k, contents.v)
        )
        _write(backend, case, k, v)
    return run_step(backend, case, contents, step, dtype)


def run_step(
    backend: AttentionBackend,
    case: Case,
    contents: Contents,
    step: AttentionStep,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Prepare, write and run the step alone: [T, N, H], [T, N, NUM_VALUES] of a latent case."""
    backend.prepare(step)
    q, k, v = (
        torch.cat([x[row[0] :] for x, row in zip(values, case.rows, strict=True)]).to(dtype)
        for values in (contents.q, contents.k, contents.v)
    )
    _write(backend, case, k, v)
    scores = Scores(HEAD_DIM**-0.5, case.soft_cap, case.sinks_N)
    if case.is_latent:
        return backend.run_latent(1, q, scores, NUM_VALUES)
    return backend.run(1, q, scores)


def _write(backend: AttentionBackend, case: Case, k: torch.Tensor, v: torch.Tensor) -> None:
    if case.is_latent:
        backend.write_latent(1, k[:, 0])
    else:
        backend.write(1, k, v)


def run_named(name: str, case: Case, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A new backend on random contents and scattered blocks."""
    backend = make_backend(name, case.layout(dtype))
    return run_backend(backend, case, make_contents(case, seed), case.tables(seed), dtype)


def attend_contiguous(case: Case, contents: Contents) -> torch.Tensor:
    """Attention of the step's tokens by one softmax per row, without blocks: [T, N, H], or
    [T, N, NUM_VALUES] of a latent case."""
    outs = []
    sequences = zip(case.rows, contents.q, contents.k, contents.v, strict=True)
    for row, ((before, _), q, k, v) in enumerate(sequences):
        query, key = torch.arange(before, len(q))[:, None], torch.arange(len(q))
        q = q[before:]
        k, v = (x.repeat_interleave(case.heads // case.kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("qnh,cnh->nqc", q, k) * HEAD_DIM**-0.5
        if case.soft_cap is not None:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        hidden = key > query
        for of_row, first, end in case.spans:
            if of_row == row:
                hidden &= ~((query >= first) & (query < end) & (key < end))
        if case.window is not None:
            hidden |= key <= query - case.window
        if case.chunk is not None:
            hidden |= key // case.chunk < query // case.chunk
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        if case.sinks_N is not None:
            total += case.sinks_N.double().exp()[:, None, None]
        weights /= total
        outs.append(torch.einsum("nqc,cnh->qnh", weights, v))
    return torch.cat(outs)[..., : NUM_VALUES if case.is_latent else HEAD_DIM]


@functools.cache
def softmax_of(case: Case, seed: int = 0) -> torch.Tensor:
    """Return attention of a case's contents, computed once for all backends."""
    return attend_contiguous(case, make_contents(case, seed))
