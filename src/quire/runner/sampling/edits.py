"""Masks and biases of rows, as one table on the device: lists are written when a row starts.

`ops/sampling/logit_edits.py` says what stands in it. Lists are put one behind the other; when the
room is used up they are packed anew, and the table grows if it must. Then it has a new generation:
graphs that were recorded with the old one read memory that nobody writes any more.
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
from quire.runner.step_ops import Int32, asks_for_edits, has_least_length

FIRST_CAPACITY = 1 << 16  # entries


@dataclass(frozen=True)
class _Lists:
    """A row's entries and values, and its span as if they stood at the table's beginning."""

    entries: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]
    span: npt.NDArray[np.int32]


class Edits(SamplingFeature):
    """The sampling feature, and the table of a runner's rows. generation: how often it has got
    other memory."""

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
        if not asks_for_edits(start):
            return
        made = make_edit_table([row_edits(start)], torch.device("cpu"))
        arrays = (tensor.numpy() for tensor in (made.entries, made.values, made.spans[0]))
        self._add(start.row, _Lists(*arrays))

    def copy(self, parent: int, child: int) -> None:
        """Give a fork its parent's lists."""
        if parent in self._lists:
            self._add(child, self._lists[parent])

    def release(self, row: int) -> None:
        """Forget a row's lists."""
        self._lists.pop(row, None)

    def spans(self, rows: Int32, places: npt.NDArray[np.intp]) -> dict[int, Int32]:
        """See EditLists."""
        return {n: self._spans[int(rows[n])] for n in places.tolist()}

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
        """Write the lists of all rows anew, without the holes between them."""
        needed = sum(len(lists.entries) for lists in self._lists.values())
        if 2 * needed > len(self.table.entries):
            # Steps that are under way read the old one, whose memory somebody else will get.
            self._device.run(list).wait()
            self.table = self._make(2 * needed)
            self.generation += 1
        self._used = 0
        self._write(list(self._lists))

    def _write(self, rows: list[int]) -> None:
        """Put these rows' lists behind what is used."""
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
    """Return what a row asks for."""
    params = start.params
    is_least = has_least_length(start)
    return RowEdits(
        allowed=params.allowed_token_ids or (),
        bad_words=start.bad_words_token_ids,
        min_tokens=params.min_tokens if is_least else 0,
        stop_token_ids=start.stop_token_ids if is_least else (),
        bias=params.logit_bias,
    )
