"""What each row samples with, as columns on the device indexed by row: written when a row starts.

Shape legend: R rows of the engine, N sampling rows of a step, W bad words, L longest of them.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.base.plan import RowStart
from quire.ops.penalties import Penalties
from quire.ops.sampling import Filters, Streams
from quire.runner.sampling_facts import SamplingFacts, has_least_length, sampling_numbers

Rows = npt.NDArray[np.int32]

# Column -> value of a row that asks for nothing.
_FLOATS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence": 0.0,
    "frequency": 0.0,
    "repetition": 1.0,
}
_INTS = {"top_k": 0, "seed": 0, "sample_index": 0, "num_prompt_tokens": 0}


@dataclass(frozen=True)
class BadWords:
    """A row's bad words: `last` [W] is forbidden after `prefix` [W, L - 1], padded on the left."""

    prefix: torch.Tensor
    prefix_lens: torch.Tensor
    last: torch.Tensor


@dataclass(frozen=True)
class LogitEdits:
    """What changes a row's logits, beside penalties. None where the request does not ask for it."""

    allowed: torch.Tensor | None = None
    bad_words: BadWords | None = None
    min_tokens: int = 0
    stop_token_ids: torch.Tensor | None = None
    bias_ids: torch.Tensor | None = None
    bias: torch.Tensor | None = None


class SamplingRows:
    """The columns. A row's entries are only meaningful between `start` and `release`."""

    def __init__(self, max_num_rows: int, device: torch.device) -> None:
        self.device = device
        self.facts = SamplingFacts(max_num_rows)
        self.edits: dict[int, LogitEdits] = {}
        self._floats = {
            name: torch.full((max_num_rows,), value, dtype=torch.float32, device=device)
            for name, value in _FLOATS.items()
        }
        self._ints = {
            name: torch.full((max_num_rows,), value, dtype=torch.int64, device=device)
            for name, value in _INTS.items()
        }

    def start(self, start: RowStart) -> None:
        """Write what the row needs; nothing else is written until it is released."""
        row = start.row
        self.facts.start(start)
        self.edits.pop(row, None)
        if self.facts.has_edits[row]:
            self.edits[row] = _edits_of(start, self.device)
        self._write_columns(start)

    def release(self, rows: Rows) -> None:
        """Forget rows; what they held on the device stays until they start again."""
        self.facts.release(rows)
        for row in rows.tolist():
            self.edits.pop(row, None)

    def copy(self, parent: int, child: int, sample_index: int | None) -> None:
        """A fork: the child samples as its parent, from noise of its own if it has an index."""
        self.facts.copy(parent, child)
        for column in (*self._floats.values(), *self._ints.values()):
            column[child] = column[parent]
        if sample_index is not None:
            self._ints["sample_index"][child] = sample_index
        self.edits.pop(child, None)
        if parent in self.edits:
            self.edits[child] = self.edits[parent]

    def floats(self, name: str, rows_N: torch.Tensor) -> torch.Tensor:
        """A float32 column at these rows."""
        return self._floats[name][rows_N]

    def ints(self, name: str, rows_N: torch.Tensor) -> torch.Tensor:
        """An int64 column at these rows."""
        return self._ints[name][rows_N]

    def filters(self, rows_N: torch.Tensor) -> Filters:
        return Filters(
            self.ints("top_k", rows_N), self.floats("top_p", rows_N), self.floats("min_p", rows_N)
        )

    def penalties(self, rows_N: torch.Tensor) -> Penalties:
        names = ("presence", "frequency", "repetition")
        return Penalties(*(self.floats(name, rows_N) for name in names))

    def streams(self, rows_N: torch.Tensor, positions_N: torch.Tensor) -> Streams:
        return Streams(self.ints("seed", rows_N), self.ints("sample_index", rows_N), positions_N)

    def _write_columns(self, start: RowStart) -> None:
        floats, ints = sampling_numbers(start, greedy_temperature=1.0)
        for column, value in zip(self._floats.values(), floats, strict=True):
            column[start.row] = value
        for column, integer in zip(self._ints.values(), ints, strict=True):
            column[start.row] = integer


def _edits_of(start: RowStart, device: torch.device) -> LogitEdits:
    params = start.params
    has_min_tokens = has_least_length(start)
    bias = params.logit_bias

    def ids(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    words = start.bad_words_token_ids
    return LogitEdits(
        allowed=ids(params.allowed_token_ids) if params.allowed_token_ids else None,
        bad_words=_bad_words(words, device) if words else None,
        min_tokens=params.min_tokens if has_min_tokens else 0,
        stop_token_ids=ids(start.stop_token_ids) if has_min_tokens else None,
        bias_ids=ids(list(bias)) if bias else None,
        bias=torch.tensor(list(bias.values()), device=device) if bias else None,
    )


def _bad_words(words: tuple[tuple[int, ...], ...], device: torch.device) -> BadWords:
    longest = max(len(word) for word in words)
    prefix = np.zeros((len(words), longest - 1), np.int64)
    for w, word in enumerate(words):
        prefix[w, longest - len(word) :] = word[:-1]
    return BadWords(
        torch.from_numpy(prefix).to(device),
        torch.tensor([len(word) - 1 for word in words], device=device),
        torch.tensor([word[-1] for word in words], device=device),
    )
