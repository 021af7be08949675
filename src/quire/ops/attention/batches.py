"""Batches of a step's rows for the torch backend.

Shape legend: as in `base.py`, and R rows of a batch, Q new tokens per row, I blocks per row, C = I
* P context tokens per row. A row's context begins at the first block that its queries can see.

All sizes come from the host's upper bounds and all values from the device's tensors, so nothing
waits for the device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.attention.base import KVLayout, first_seen
from quire.ops.attention_inputs import AttentionStep
from quire.ops.host.host_memory import to_device
from quire.spec.cache_group import CacheGroup

Ints = npt.NDArray[np.signedinteger[Any]]

# Size limits of a batch's gathered keys and values; on a CPU they should stay in its cache.
CPU_BATCH_BYTES = 6 << 20
GPU_BATCH_BYTES = 256 << 20
# Maximum number of new tokens of a row that is batched; a longer chunk is a batch of its own.
SHORT_QUERY = 8
# Maximum ratio of a batch's longest context to its shortest; bounds the padding.
LENGTH_RATIO = 1.5
# Rows with 2 to this many new tokens may have draft tokens among them.
MAX_VERIFIED_TOKENS = 1 + 32
# Query tokens of a chunk that are multiplied at once. This bounds the memory of scores, and
# context tokens after the span are not multiplied at all.
SPAN = 64


@dataclass(frozen=True)
class Span:
    """Range of a batch's queries: from `first` to before `end` of each row's Q.

    context: number of leading context tokens, of C, that these queries may see.
    bias: [R, 1, end - first, context] in the KV dtype, added to the scores. It is 0 where a query
    sees a token, and -inf elsewhere.
    """

    first: int
    end: int
    context: int
    bias: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """Batch of R rows with Q new tokens each. tokens: slice or int64 index of their tokens in the
    step, row after row. blocks: int64 [R * I], the blocks that hold their contexts."""

    num_rows: int
    num_queries: int
    tokens: slice | torch.Tensor
    blocks: torch.Tensor
    spans: tuple[Span, ...]


class BatchBuilder:
    """Builder of the batches of one cache group."""

    def __init__(self, group: CacheGroup, layout: KVLayout) -> None:
        self._group = group
        self._block_size = layout.block_size
        self._device, self._dtype = layout.device, layout.dtype
        budget = CPU_BATCH_BYTES if layout.device.type == "cpu" else GPU_BATCH_BYTES
        layer_block_bytes = group.block_bytes(1, layout.dtype.itemsize) // len(group.layers)
        self._batch_blocks = max(1, budget // (layer_block_bytes * layout.block_size))

    def build(self, step: AttentionStep, table_SL: torch.Tensor) -> list[Batch]:
        """Return the batches of a step; each row is in exactly one. table: block tables [S, L]."""
        lens = step.query_lens_host
        num_blocks_S = self._num_blocks(step.context_lens_host, lens, lens)
        starts = np.concatenate(([0], np.cumsum(step.query_lens_host)))
        return [
            self._batch(step, table_SL, rows, starts, int(num_blocks_S[rows].max()))
            for rows in self._sort_rows(step.query_lens_host, num_blocks_S)
        ]

    def begun_blocks(self, step: AttentionStep, table_SL: torch.Tensor) -> torch.Tensor | None:
        """Return int64 ids [...] of the blocks that this step begins but does not fill; None if
        there are none. table: block tables [S, L].

        Only a row's last block can be one. A row with draft tokens may be shorter than the host
        assumes. So any block that it seems to begin may be its last one, now or later.
        """
        lens, queries, size = step.context_lens_host, step.query_lens_host, self._block_size
        last, starts = (lens - 1) // size, lens - queries
        may_have_drafts = (queries > 1) & (queries <= MAX_VERIFIED_TOKENS)
        first = np.where(may_have_drafts, -(-starts // size), last)
        (rows,) = np.nonzero((first * size >= starts) & (may_have_drafts | (lens % size != 0)))
        counts = (last - first)[rows] + 1
        if counts.sum() == 0:
            return None
        within = np.arange(counts.sum()) - (np.cumsum(counts) - counts).repeat(counts)
        rows = rows.repeat(counts)
        columns = self._index(first[rows] + within)
        return table_SL[self._index(rows), columns].to(torch.int64)

    def _num_blocks(self, context_lens: Ints, query_lens: Ints, ends: Ints) -> Ints:
        """Count the blocks, from the first visible one on, that queries before `ends` can see."""
        visible = context_lens - query_lens + ends
        if self._group.window is not None:
            # The first block may hold up to P - 1 tokens that the first query does not see.
            visible = np.minimum(visible, self._group.window + ends + self._block_size - 2)
        return -(-visible // self._block_size)

    def _sort_rows(self, query_lens: Ints, num_blocks_S: Ints) -> Iterator[Ints]:
        """Yield the row indices of each batch. Rows stay in the step's order where possible."""
        for length in np.unique(query_lens):
            (rows,) = np.nonzero(query_lens == length)
            if length > SHORT_QUERY:
                yield from np.split(rows, rows.size)
                continue
            sizes = num_blocks_S[rows]
            if sizes.max() > LENGTH_RATIO * sizes.min():
                order = np.argsort(sizes, kind="stable")
                rows, sizes = rows[order], sizes[order]
            yield from self._cut(rows, sizes)

    def _cut(self, rows: Ints, sizes: Ints) -> Iterator[Ints]:
        """Cut a list of rows where the next row would make the batch too large or too uneven."""
        first, longest, shortest = 0, 0, 0
        for i, size in enumerate(sizes.tolist()):
            longest, shortest = max(longest, size), min(shortest or size, size)
            too_large = (i - first + 1) * longest > self._batch_blocks
            if i > first and (too_large or longest > LENGTH_RATIO * shortest):
                yield rows[first:i]
                first, longest, shortest = i, size, size
        yield rows[first:]

    def _batch(
        self,
        step: AttentionStep,
        table_SL: torch.Tensor,
        rows: Ints,
        starts: Ints,
        num_blocks: int,
    ) -> Batch:
        num_queries = int(step.query_lens_host[rows[0]])
        tokens = self._tokens(rows, starts, num_queries)
        context_lens_R = step.context_lens_S[self._index(rows)].to(torch.int64)
        first_block_R = self._first_block(context_lens_R, num_queries)
        columns_RI = first_block_R[:, None] + torch.arange(num_blocks, device=self._device)
        # Beyond its context a row reads its own last block again, which is always valid.
        last_block_R1 = ((context_lens_R - 1) // self._block_size)[:, None]
        table_RL = table_SL[self._index(rows)]
        blocks_RI = table_RL.gather(1, torch.minimum(columns_RI, last_block_R1))
        positions_RQ = step.positions_T[tokens].view(rows.size, num_queries)
        longest = int(step.context_lens_host[rows].max())
        last_RQ = None
        if step.ends_T is not None:
            ends_T = to_device(step.ends_T, self._device)
            last_RQ = torch.maximum(positions_RQ, ends_T[tokens].view_as(positions_RQ) - 1)
        return Batch(
            num_rows=rows.size,
            num_queries=num_queries,
            tokens=tokens,
            blocks=blocks_RI.flatten().to(torch.int64),
            spans=tuple(self._spans(positions_RQ, first_block_R, longest, last_RQ)),
        )

    def _tokens(self, rows: Ints, starts: Ints, num_queries: int) -> slice | torch.Tensor:
        if rows[-1] - rows[0] + 1 == rows.size and np.all(np.diff(rows) == 1):
            return slice(int(starts[rows[0]]), int(starts[rows[-1] + 1]))
        return self._index((starts[rows][:, None] + np.arange(num_queries)).ravel())

    def _first_block(self, context_lens_R: torch.Tensor, num_queries: int) -> torch.Tensor:
        first_R = first_seen(self._group, context_lens_R - num_queries)
        if first_R is None:
            return torch.zeros_like(context_lens_R)
        return first_R.clamp_(min=0) // self._block_size

    def _spans(
        self,
        positions_RQ: torch.Tensor,
        first_block_R: torch.Tensor,
        longest: int,
        last_RQ: torch.Tensor | None,
    ) -> Iterator[Span]:
        """Yield the spans of a batch. last: last position that each query sees; None: its own."""
        num_queries = positions_RQ.shape[1]
        first_key_R1 = (first_block_R * self._block_size)[:, None, None]
        for first in range(0, num_queries, SPAN):
            end = min(first + SPAN, num_queries)
            seen_end = end if last_RQ is None else num_queries
            lens = (np.array(n) for n in (longest, num_queries, seen_end))
            context = int(self._num_blocks(*lens)) * self._block_size
            keys_R1C = first_key_R1 + torch.arange(context, device=self._device)
            queries_RQ1 = positions_RQ[:, first:end, None]
            last_RQ1 = queries_RQ1 if last_RQ is None else last_RQ[:, first:end, None]
            hidden_RQC = keys_R1C > last_RQ1
            if (first_RQ1 := first_seen(self._group, queries_RQ1)) is not None:
                hidden_RQC |= keys_R1C < first_RQ1
            bias_RQC = torch.zeros(hidden_RQC.shape, dtype=self._dtype, device=self._device)
            bias_RQC.masked_fill_(hidden_RQC, -torch.inf)
            yield Span(first, end, context, bias_RQC[:, None])

    def _index(self, values: Ints) -> torch.Tensor:
        return to_device(values.astype(np.int64), self._device)
