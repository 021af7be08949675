"""Sizes of recorded steps: how many rows, tokens and draft tokens a step has room for.

    decoding   each row has one token, rows are separate       Size(rows)
    drafted    each row has one token and up to k drafts       Size(rows, drafts=rows * k)
    mixed      rows may have any number of tokens              Size(rows, tokens)
    both       any number of tokens, and draft tokens          Size(rows, tokens, drafts)

A step uses the smallest size that has room for it. A few draft tokens among many rows
fit a mixed size better than a drafted one, which has room for k drafts of every row.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from quire.base.settings.speculation import MAX_DRAFT_TOKENS
from quire.ops.sampling.device_drafts import Runs
from quire.runner.memory_plan import (
    MIXED_ROWS,
    MIXED_TOKENS,
    MORE_POSITIONS,
    ladder,
    max_positions,
)
from quire.runner.step_ops import Needs, StepShape

DRAFTS = (1, 2, 4, 8, 16, MAX_DRAFT_TOKENS)  # draft tokens of a row in drafted steps
MIN_DRAFTS = 8  # minimum number of draft slots of a mixed step
# Sizes that an engine may record before it is ready: rows, tokens of few rows and of all rows.
WARM_ROWS = (1, 4, 16, 64, 256)
WARM_TOKENS = (16, 64, 256, 512, 1024, 2048)
WARM_TOKENS_OF_ALL = (512, 1024, 2048)
WARM_DRAFTS = 4  # draft tokens of a row


class Drafted(NamedTuple):
    """Draft tokens of a step. total: of all rows. longest: of one row. has_prompts: whether a row
    computes more than one known token. runs: search of the device's drafter; None if the host
    drafts."""

    total: int
    longest: int
    has_prompts: bool = False
    runs: Runs | None = None


@dataclass(frozen=True)
class Size:
    """Numbers of row slots, token slots and draft slots. tokens: 0 unless mixed. drafts: 0 without
    draft tokens. runs: search of the device's drafter, which writes the draft tokens."""

    rows: int
    tokens: int = 0
    drafts: int = 0
    runs: Runs | None = None

    @property
    def is_mixed(self) -> bool:
        return self.tokens > 0

    @property
    def num_tokens(self) -> int:
        """Return the number of token slots."""
        return self.tokens or self.num_positions

    def holds(self, num_rows: int, num_tokens: int, drafted: Drafted | None) -> bool:
        """Return whether it has room for a step; see `Sizes.find`."""
        if num_rows > self.rows or (self.is_mixed and num_tokens > self.tokens):
            return False
        if drafted is None:
            return self.drafts == 0 and (self.is_mixed or num_tokens == 0)
        if self.runs != drafted.runs or drafted.longest > self.longest_draft:
            return False
        return self.drafts >= drafted.total and (self.is_mixed or not drafted.has_prompts)

    @property
    def longest_draft(self) -> int:
        """Return the maximum number of draft tokens of a row."""
        return min(self.drafts, MAX_DRAFT_TOKENS) if self.is_mixed else self.drafts // self.rows

    @property
    def num_positions(self) -> int:
        """Return the number of positions that are sampled: of all row slots, then of all drafts."""
        return self.rows + self.drafts


# Row slots, token slots, draft slots, drafter's search, has filters, has penalties, has edits,
# number of candidates, has masks, is uncut, is unused.
Kind = tuple[int, int, int, tuple[int, ...], bool, bool, bool, int, bool, bool, bool]


def kind_of(size: Size, needs: Needs) -> Kind:
    """Return the form in which a kind of step is remembered. Edits lack their table."""
    return (
        size.rows, size.tokens, size.drafts, tuple(size.runs or ()), needs.has_filters,
        needs.has_penalties, needs.edits is not None, needs.num_candidates, needs.has_masks,
        needs.is_uncut, needs.is_unused,
    )  # fmt: skip


def kind_from(values: Any) -> Kind:
    """Return a kind from JSON. Lists of earlier versions lack its last value. Raises ValueError,
    TypeError or KeyError for other values."""
    rows, tokens, drafts, runs, filters, penalties, edits, num, masks, uncut, *rest = values
    [unused] = rest or [False]
    return (
        int(rows), int(tokens), int(drafts), tuple(map(int, runs)), bool(filters),
        bool(penalties), bool(edits), int(num), bool(masks), bool(uncut), bool(unused),
    )  # fmt: skip


def size_and_needs(kind: Kind) -> tuple[Size, Needs] | None:
    """Return the size and needs of a remembered kind; None if it needs an unknown edit table."""
    rows, tokens, drafts, runs, filters, penalties, edits, num, masks, uncut, unused = kind
    if edits or len(runs) not in (0, len(Runs._fields)):
        return None
    size = Size(rows, tokens, drafts, Runs(*runs) if runs else None)
    needs = Needs(filters, penalties, None, num, masks, is_uncut=uncut, is_unused=unused)
    return size, needs


class Sizes:
    """Sizes at which an engine of max_rows rows records steps. decoding: of plain steps."""

    def __init__(self, max_rows: int) -> None:
        self.decoding = [Size(rows) for rows in ladder(max_rows)]
        self._mixed_rows = [rows for rows in MIXED_ROWS if rows < max_rows] + [max_rows]
        self._max_positions = max_positions(max_rows)

    def find(self, num_rows: int, num_tokens: int, drafted: Drafted | None = None) -> Size | None:
        """Return the size of a step with num_rows row slots and num_tokens tokens; 0 tokens: one
        for each row. None: steps of this size are not recorded."""
        if num_rows > self.decoding[-1].rows or num_tokens > MIXED_TOKENS[-1]:
            return None
        if drafted is not None:
            is_short = drafted.longest <= MAX_DRAFT_TOKENS
            return self._drafted(num_rows, num_tokens, drafted) if is_short else None
        if num_tokens == 0:
            return next(size for size in self.decoding if size.rows >= num_rows)
        return self._mixed(num_rows, num_tokens)

    def plain(self) -> list[Size]:
        """Return all sizes without draft tokens."""
        rows_tokens = ((rows, each) for rows in self._mixed_rows for each in MIXED_TOKENS)
        mixed = dict.fromkeys(self._mixed(*each) for each in rows_tokens)
        return [*self.decoding, *mixed]

    def warm(self, *drafters: Runs | None) -> list[Size]:
        """Return a few sizes that together have room for every step, largest first. drafters:
        searches of drafters, None for the host's."""
        max_rows = self.decoding[-1].rows
        rows = sorted({*(min(each, max_rows) for each in WARM_ROWS), max_rows})
        pairs = [(min(4, max_rows), tokens) for tokens in WARM_TOKENS]
        pairs += [(max_rows, tokens) for tokens in WARM_TOKENS_OF_ALL if tokens >= max_rows]
        mixed = list(dict.fromkeys(self._mixed(*pair) for pair in pairs))
        found = [*map(Size, rows), *mixed]
        for runs in drafters:
            found += [Size(each, 0, each * WARM_DRAFTS, runs) for each in rows]
            found += [
                Size(each.rows, each.tokens, MORE_POSITIONS, runs)
                for each in mixed
                if each.tokens in WARM_TOKENS_OF_ALL
            ]
        small = [size for size in found if size.num_positions <= self._max_positions]
        return sorted(small, key=lambda size: -size.num_tokens)

    def has(self, size: Size) -> bool:
        """Return whether this is one of the sizes, for instance of another engine's list."""
        if not 0 < size.rows <= self.decoding[-1].rows or size.num_positions > self._max_positions:
            return False
        if size.is_mixed:
            return self._mixed(size.rows, size.tokens) == Size(size.rows, size.tokens)
        return Size(size.rows) in self.decoding and size.drafts % size.rows == 0

    def _mixed(self, num_rows: int, num_tokens: int) -> Size:
        rows = next(rows for rows in self._mixed_rows if rows >= num_rows)
        tokens = max(num_tokens, rows)  # each row slot needs a token slot
        return Size(rows, next((each for each in MIXED_TOKENS if each >= tokens), tokens))

    def _drafted(self, num_rows: int, num_tokens: int, drafted: Drafted) -> Size | None:
        """Return the smaller of the drafted and the mixed size that have room, if one is small
        enough."""
        mixed = self._mixed(num_rows, num_tokens)
        slots = max(MIN_DRAFTS, 1 << (drafted.total - 1).bit_length())
        found = [(mixed.tokens, Size(mixed.rows, mixed.tokens, slots, drafted.runs))]
        if not drafted.has_prompts:
            rows = next(size.rows for size in self.decoding if size.rows >= num_rows)
            of_row = next(num for num in DRAFTS if num >= drafted.longest)
            found.append((rows * (1 + of_row), Size(rows, 0, rows * of_row, drafted.runs)))
        small = [each for each in found if each[1].num_positions <= self._max_positions]
        return min(small, key=lambda each: each[0])[1] if small else None


def largest_shape(size: Size, max_model_len: int) -> StepShape:
    """Return the shape of the largest step of a size. If mixed, its first row has all tokens. The
    rows of plain decoding steps are separate."""
    query_lens = np.full(size.rows, 1 + size.drafts // size.rows, np.int32)
    if size.is_mixed:
        query_lens[:] = size.tokens, *[0] * (size.rows - 1)
    context_lens = np.full(size.rows, max_model_len, np.int32)
    is_separate = not (size.is_mixed or size.drafts)
    return StepShape(query_lens, context_lens, size.rows, is_separate=is_separate)
