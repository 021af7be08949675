"""Masks and biases of rows, as one table on the device; a row's lists are written at its start.

`ops/sampling/logit_edits.py` defines the table's format. Lists are appended. When the table is
full, they are packed, and the table grows if necessary. A grown table has a new generation: graphs
recorded with the old one would read memory that is no longer written.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.base.plan import RowStart
from quire.ops.host.host_memory import lazy_zeros, to_device
from quire.ops.sampling.logit_edits import LIST_COLUMNS, SPAN, EditTable, RowEdits, make_edit_table
from quire.runner.attachment import SamplingFeature
from quire.runner.device import Device
from quire.runner.step_ops import Int32, has_min_tokens, requests_edits

FIRST_CAPACITY = 1 << 16  # entries


@dataclass(frozen=True)
class _Lists:
    """Entries and values of a row, and its span relative to the first entry."""

    entries: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]
    span: npt.NDArray[np.int32]


class Edits(SamplingFeature):
    """Sampling feature for lists and biases of rows. generation: count of table reallocations."""

    def __init__(self, device: Device, max_num_rows: int) -> None:
        self._device = device
        self._max_num_rows = max_num_rows
        self._lists: dict[int, _Lists] = {}
        self._spans: dict[int, npt.NDArray[np.int32]] = {}
        self._used = 0
        self.generation = 0
        self.table = self._make(FIRST_CAPACITY)

    def start(self, start: RowStart) -> None:
        """Write the lists of a row, if it has any."""
        if not requests_edits(start):
            return
        made = make_edit_table([row_edits(start)], torch.device("cpu"))
        arrays = (tensor.numpy() for tensor in (made.entries, made.values, made.spans[0]))
        self._add(start.row, _Lists(*arrays))

    def copy(self, parent: int, child: int) -> None:
        """Copy the parent's lists to its fork."""
        if parent in self._lists:
            self._add(child, self._lists[parent])

    def release(self, row: int) -> None:
        """Remove a row's lists."""
        self._lists.pop(row, None)

    def spans(self, rows: Int32, positions: npt.NDArray[np.intp]) -> dict[int, Int32]:
        """See EditLists."""
        return {n: self._spans[int(rows[n])] for n in positions.tolist()}

    def _add(self, row: int, lists: _Lists) -> None:
        self._lists[row] = lists
        if self._used + len(lists.entries) > len(self.table.entries):
            self._pack()
        else:
            self._write([row])

    def _make(self, capacity: int) -> EditTable:
        device = self._device.device
        return EditTable(
            lazy_zeros((capacity,), torch.int32, device),
            lazy_zeros((capacity,), torch.float32, device),
            lazy_zeros((self._max_num_rows, SPAN), torch.int32, device),
        )

    def _pack(self) -> None:
        """Write the lists of all rows again, without the gaps between them."""
        needed = sum(len(lists.entries) for lists in self._lists.values())
        if 2 * needed > len(self.table.entries):
            # Steps in flight read the old table, whose memory will be reused.
            self._device.run(list).wait()
            self.table = self._make(2 * needed)
            self.generation += 1
        self._used = 0
        self._write(list(self._lists))

    def _write(self, rows: list[int]) -> None:
        """Append the lists of these rows to the used part of the table."""
        table, first = self.table, self._used
        spans = np.stack([self._lists[row].span for row in rows])
        for span, row in zip(spans, rows, strict=True):
            span[list(LIST_COLUMNS)] += self._used
            self._used += len(self._lists[row].entries)
            self._spans[row] = span
        entries = np.concatenate([self._lists[row].entries for row in rows])
        values = np.concatenate([self._lists[row].values for row in rows])
        last = self._used

        def work() -> list[torch.Tensor]:
            device = self._device.device
            table.entries[first:last].copy_(to_device(entries, device))
            table.values[first:last].copy_(to_device(values, device))
            index = to_device(np.array(rows, np.int64), device)
            table.spans.index_copy_(0, index, to_device(spans, device))
            return []

        self._device.run(work)


def row_edits(start: RowStart) -> RowEdits:
    """Return the masks and biases that a row requests."""
    params = start.params
    is_least = has_min_tokens(start)
    return RowEdits(
        allowed=params.allowed_token_ids or (),
        bad_words=start.bad_words_token_ids,
        min_tokens=params.min_tokens if is_least else 0,
        stop_token_ids=start.stop_token_ids if is_least else (),
        bias=params.logit_bias,
    )
