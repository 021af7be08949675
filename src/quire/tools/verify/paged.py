"""Runs a model over paged KV memory step by step, with any cut of the sequences into chunks.

Shape legend: T tokens of a step, V vocabulary.

No engine: what the scheduler would plan is given, so that each way to compute a sequence can be
tried by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.context_shared import share_context
from quire.ops.attention.cpu import CpuBackend
from quire.ops.attention.select import make_backend
from quire.ops.attention_inputs import AttentionStep, Int32
from quire.ops.collective import ALONE, RankGroup
from quire.runner.native_model import NativeModel
from quire.spec.cache_group import STATE, CacheGroup
from quire.spec.model_spec import ModelSpec

CPU = torch.device("cpu")
Chunks = Sequence[Sequence[int]]  # of each sequence, its tokens in step 0, 1, ...; 0 is none
SPARE_BLOCKS = 3  # so that not all of the pool is in use


@dataclass(frozen=True)
class RowPart:
    """What a step holds of one row: tokens from `start` to before `end`, and its block tables."""

    start: int
    end: int
    tables: tuple[Sequence[int], ...]  # one per cache group


@dataclass(frozen=True)
class Paging:
    """The memory that sequences run over, and what computes attention over it.

    dtype: the model's. native: by the core's program of the model, in one call. seed: of where in
    the pool the blocks stand. context: ranks that deal out a sequence's tokens among each other.
    """

    block_size: int = 4
    backend: str = "torch"
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    kv_format: str = "auto"
    native: bool = False
    seed: int = 0
    context: RankGroup = ALONE


def make_step(
    parts: Sequence[RowPart], block_size: int, device: torch.device = CPU
) -> AttentionStep:
    """Make the step that holds these parts one after the other."""
    query_lens = np.array([part.end - part.start for part in parts], np.int32)
    context_lens = np.array([part.end for part in parts], np.int32)
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    positions = [torch.arange(part.start, part.end) for part in parts]
    slots, tables = [], []
    for group in range(len(parts[0].tables)):
        width = max(len(part.tables[group]) for part in parts)
        table = torch.full((len(parts), width), -1, dtype=torch.int32)
        for row, part in enumerate(parts):
            table[row, : len(part.tables[group])] = torch.tensor(part.tables[group])
        tables.append(table.to(device))
        slots.append(
            torch.cat(
                [
                    table[row, p // block_size].long() * block_size + p % block_size
                    for row, p in enumerate(positions)
                ]
            ).to(device)
        )
    return AttentionStep(
        positions_T=torch.cat(positions).to(device),
        query_starts_S1=torch.from_numpy(starts).to(device),
        context_lens_S=torch.from_numpy(context_lens).to(device),
        slots_T=tuple(slots),
        block_tables_SL=tuple(tables),
        query_lens_host=query_lens,
        context_lens_host=context_lens,
    )


def make_layout(spec: ModelSpec, num_blocks: int, paging: Paging) -> KVLayout:
    """Lay out as many blocks for each of the model's cache groups."""
    groups, sizes = spec.cache_groups, (num_blocks,) * len(spec.cache_groups)
    return KVLayout(groups, sizes, paging.block_size, paging.dtype, paging.device, paging.kv_format)


class PagedRun:
    """Sequences on their way through a model. Blocks are scattered over the pool.

    Raises ConfigError for a backend that cannot serve the model here.
    """

    def __init__(
        self, model: Any, spec: ModelSpec, sequences: Sequence[Sequence[int]], paging: Paging
    ) -> None:
        size = paging.block_size
        counts = [-(-len(tokens) // size) for tokens in sequences]
        num_blocks = sum(counts) + SPARE_BLOCKS
        layout, make = make_layout(spec, num_blocks, paging), partial(make_backend, paging.backend)
        self._attention = share_context(layout, make, paging.context)
        self._model, self._paging, self._sequences = model, paging, sequences
        if paging.native:
            assert isinstance(self._attention, CpuBackend)
            self._model = NativeModel(model, self._attention)
        order = np.random.default_rng(paging.seed).permutation(num_blocks).tolist()
        self._tables = [[order.pop() for _ in range(count)] for count in counts]
        self._groups = spec.cache_groups
        self._done = [0] * len(sequences)

    def step(self, lens: Sequence[int], ends_T: Int32 | None = None) -> torch.Tensor:
        """Compute so many more tokens of each sequence, in one step; returns their logits [T, V],
        one sequence after the other. ends: see AttentionStep."""
        rows = [row for row, length in enumerate(lens) if length]
        parts: list[RowPart] = []
        ids: list[int] = []
        for row in rows:
            begin, end = self._done[row], self._done[row] + lens[row]
            tables = tuple(self._table(group, row, begin, end) for group in self._groups)
            parts.append(RowPart(begin, end, tables))
            ids += self._sequences[row][begin:end]
            self._done[row] = end
        step = make_step(parts, self._paging.block_size, self._paging.device)
        return run_step(self._model, self._attention, ids, replace(step, ends_T=ends_T))

    def _table(self, group: CacheGroup, row: int, begin: int, end: int) -> list[int]:
        """Return the blocks of a sequence; of states only those behind the tokens before `begin`
        and before `end`."""
        table = self._tables[row]
        if group.kind != STATE:
            return table
        kept = {(token - 1) // self._paging.block_size for token in (begin, end)}
        return [block if i in kept else -1 for i, block in enumerate(table)]


def run_paged(
    model: Any,
    spec: ModelSpec,
    sequences: Sequence[Sequence[int]],
    chunks: Chunks,
    paging: Paging,
    on_step: Callable[[Sequence[int]], None] | None = None,
) -> list[torch.Tensor]:
    """Return the logits [tokens, V] of each sequence. The chunks of one must add up to its length.

    on_step: is told before each step how many tokens of each sequence it holds.
    """
    run = PagedRun(model, spec, sequences, paging)
    pieces: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step_idx in range(max(len(lens) for lens in chunks)):
        lens = [row[step_idx] if step_idx < len(row) else 0 for row in chunks]
        if on_step is not None:
            on_step(lens)
        logits_TV = run.step(lens)
        rows = [row for row, length in enumerate(lens) if length]
        for row, piece in zip(rows, logits_TV.split([lens[r] for r in rows]), strict=True):
            pieces[row].append(piece)
    return [torch.cat(row) for row in pieces]


@torch.inference_mode()
def run_step(
    model: Any, attention: AttentionBackend, ids: Sequence[int], step: AttentionStep
) -> torch.Tensor:
    """Return the logits [T, V] of one step's tokens."""
    attention.prepare(step)
    ids_T = torch.tensor(ids, device=step.positions_T.device)
    logits_TV: torch.Tensor = model.logits(model(ids_T, step.positions_T, attention))
    return logits_TV
