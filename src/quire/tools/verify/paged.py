"""Run a model over paged KV memory step by step, with any division of sequences into chunks.

Shape legend: T tokens of a step, V vocabulary.

No scheduler is involved: the caller passes the steps, to test each way to compute a sequence.
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
Chunks = Sequence[Sequence[int]]  # [sequence][step]: tokens of the sequence in the step, or 0
SPARE_BLOCKS = 3  # unused blocks in the pool


@dataclass(frozen=True)
class RowPart:
    """The part of a step for one row: tokens from `start` to before `end`, and block tables."""

    start: int
    end: int
    tables: tuple[Sequence[int], ...]  # one per cache group


@dataclass(frozen=True)
class Paging:
    """The paged memory, and the way to compute attention over it."""

    block_size: int = 4
    backend: str = "torch"
    dtype: torch.dtype = torch.float32  # the model's dtype
    device: torch.device = CPU
    kv_format: str = "auto"
    native: bool = False  # whether the C++ core runs the whole model in one call
    seed: int = 0  # determines the blocks' places in the pool
    context: RankGroup = ALONE  # ranks that divide each sequence's tokens


def make_step(
    parts: Sequence[RowPart], block_size: int, device: torch.device = CPU
) -> AttentionStep:
    """Return the step that consists of these parts, in order."""
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
    """Return a layout with `num_blocks` blocks for each of the model's cache groups."""
    groups, sizes = spec.cache_groups, (num_blocks,) * len(spec.cache_groups)
    return KVLayout(groups, sizes, paging.block_size, paging.dtype, paging.device, paging.kv_format)


class PagedRun:
    """Runs sequences through a model. Their blocks are scattered over the pool.

    Raises ConfigError for an unsuitable backend.
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
        """Compute `lens[i]` more tokens of each sequence i in one step; return their logits [T, V].

        ends_T: see `AttentionStep`."""
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
        """Return the block table of a sequence; for states only with the blocks that hold the
        states at `begin` and at `end`."""
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
    """Return the logits [tokens, V] of each sequence. Its chunks must add up to its length.

    on_step: called before each step with the step's tokens of each sequence.
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
