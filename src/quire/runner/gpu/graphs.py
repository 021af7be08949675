"""Recorded steps: one launch, or some dozens, in place of hundreds (T 4.6, fig. 4.6).

Steps are recorded whole, at a ladder of sizes: a step takes the next size that has room for its
rows, and for its tokens, if it is a mixed one of up to 2,048 tokens. Where attention must know each
row's lengths, mixed steps are recorded in pieces, between its calls; so are all if that is asked
for. Larger steps keep the device busy for longer than their launches take.

The first steps of a kind (sizes, and what the sampling needs) are launched as they are, the next is
recorded, so nobody waits at the start. The largest one of the ladder is recorded first, and others
find room in its memory. In idle moments (`record_next`) what an earlier run used comes first, then
the ladder from the top, then mixed steps of a kind that came. Recording fails if the device's
memory is full; then nothing more is recorded, and steps that are not run as they are. So it is with
whatever else a recording meets: what is wrong with a device, or a step, the step as it is will
tell.
"""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.ops.attention.base import AttentionBackend
from quire.ops.rows.step_inputs import StepInputs
from quire.runner.device import Device
from quire.runner.gpu.pieces import Pieces, record
from quire.runner.memory_plan import (
    MIXED_ROWS,
    MIXED_TOKENS,
    MOST_MIXED,
    all_graphs_bytes,
    ladder,
    most_mixed_tokens,
)
from quire.runner.step_ops import Gathered, Needs, StepShape
from quire.runner.steps import StepRunner

logger = logging.getLogger("quire")

FIRST_TIMES = 1  # steps of a kind that are launched as they are
FIRST_TIMES_MIXED = 3  # of which there are more kinds, and some never come again


# Places for rows and for tokens, whether there are filters, penalties, edits; candidates; masks.
Kind = tuple[int, int, bool, bool, bool, int, bool]


@dataclass(frozen=True)
class Size:
    """Places for rows and for tokens; no tokens: one for each row, and none has more."""

    rows: int
    tokens: int = 0

    @property
    def is_mixed(self) -> bool:
        return self.tokens > 0


def largest_shape(size: Size, max_model_len: int) -> StepShape:
    """Return the shape of the largest step that fits a size. In a mixed one the first row has all
    tokens."""
    query_lens = np.ones(size.rows, np.int32)
    if size.is_mixed:
        query_lens[:] = size.tokens, *[0] * (size.rows - 1)
    context_lens = np.full(size.rows, max_model_len, np.int32)
    return StepShape(query_lens, context_lens, size.rows)


def carry_out(
    runner: StepRunner,
    gathered: Gathered,
    shape: StepShape,
    needs: Needs,
    backend: AttentionBackend,
    between: Callable[[], None] = lambda: None,
) -> list[torch.Tensor]:
    """Do the work of a step, from gathered inputs to counters; returns what the sampling parts
    found. between: called where masks come in."""
    parts = [each.at_rest for each in runner.attachments]
    computed = runner.compute(gathered, shape, needs, backend, parts)
    if needs.has_masks:
        between()
    return runner.finish(computed, needs, runner.sampler.parts(needs))


@torch.inference_mode()
def measured_bytes(runner: StepRunner) -> int:
    """Measure the largest recorded steps' tensors, which the others share, by running them; and
    add what each graph has of its own."""
    device, rows = runner.device.device, runner.rows
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    num_rows = rows.max_num_rows
    for size in (Size(num_rows), Size(num_rows, most_mixed_tokens(num_rows))):
        shape = largest_shape(size, rows.max_model_len)

        def work(shape: StepShape = shape) -> list[torch.Tensor]:
            gathered = rows.ops.gather(shape)
            carry_out(runner, gathered, shape, Needs(has_filters=True), runner.backend)
            return []

        rows.expect_nothing()
        runner.device.run(work).wait()
    tensors = int(torch.cuda.max_memory_allocated(device) - before)
    return all_graphs_bytes(num_rows, tensors)


@dataclass
class Recorded:
    """The `Work` of a step of a size; what the device has made of it is there once it was recorded.
    inputs: the step's, for attention that is launched again."""

    runner: StepRunner
    size: Size
    in_pieces: bool
    inputs: StepInputs | None = None
    pieces: Pieces = field(default_factory=Pieces)

    @property
    def num_places(self) -> int:
        """See Work."""
        return self.size.rows

    def first(self, shape: StepShape) -> list[torch.Tensor]:
        """Carry it out for a step of this shape, which has as many places, up to where it needs
        masks. The host looks at nothing before the other half."""
        if self.in_pieces:
            assert self.inputs is not None, "it is recorded first"
            self.runner.backend.prepare(self.runner.attention_step(self.inputs, shape))
        self.pieces.begin()
        return []

    def second(self) -> list[torch.Tensor]:
        """Carry out the rest; returns copies of what rows wanted: the next replay writes over
        it."""
        self.pieces.end()
        return [tensor.clone() for tensor in self.pieces.outputs]


class UsedSizes:
    """Which graphs an engine used, remembered for its next start in a small file of the user's
    cache directory. Its errors are logged and never stop anything. Triton keeps compiled kernels
    itself.

    directory: where the file lies. facts: what must be the same for it to be of use."""

    def __init__(self, directory: Path, facts: Iterable[str]) -> None:
        digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]
        self.path = directory / f"{digest}.json"

    def read(self) -> list[Kind]:
        """Read what was written last; nothing if that cannot be read."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return [
                (int(rows), int(tokens), bool(a), bool(b), bool(c), int(num), bool(masks))
                for rows, tokens, a, b, c, num, masks in found["graphs"]
            ]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("the list of used graphs cannot be read: %s: %s", self.path, error)
            return []

    def write(self, kinds: Iterable[Kind]) -> None:
        """Replace the file, at once for those who read it."""
        passing = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            passing.write_text(json.dumps({"graphs": sorted(kinds)}), encoding="utf-8")
            passing.replace(self.path)
        except OSError as error:
            logger.warning("the list of used graphs cannot be saved: %s", error)


def default_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "quire" / "graphs"


Key = tuple[Size, Needs]


class Graphs:
    """in_pieces: attention is left out of all graphs. used: what to remember for the next start."""

    def __init__(
        self,
        device: Device,
        runner: StepRunner,
        max_rows: int,
        *,
        in_pieces: bool = False,
        used: UsedSizes | None = None,
    ) -> None:
        self.sizes = [Size(rows) for rows in ladder(max_rows)]
        self._mixed_rows = [rows for rows in MIXED_ROWS if rows < max_rows] + [max_rows]
        self._device, self._runner, self._in_pieces = device, runner, in_pieces
        self._used = used
        self._recorded: dict[Key, Recorded] = {}
        self._times: dict[Key, int] = {}
        self._is_full = False
        self._expected = sorted(set() if used is None else set(used.read()), reverse=True)

    def find(self, num_rows: int, num_tokens: int, needs: Needs) -> Recorded | None:
        """Find the graph for a step with so many places for rows and so many tokens (0: one for
        each row), perhaps recorded now; None if it is to be launched as it is. The inbox is not
        this step's yet."""
        size = self._size(num_rows, num_tokens)
        if size is None or not needs.can_be_recorded:
            return None
        key = size, needs
        if key in self._recorded:
            return self._recorded[key]
        self._times[key] = self._times.get(key, 0) + 1
        if self._times[key] <= (FIRST_TIMES_MIXED if size.is_mixed else FIRST_TIMES):
            return None
        if not self._recorded:
            self._try(self.sizes[-1], Needs())
        return self._try(size, needs)

    def _size(self, num_rows: int, num_tokens: int) -> Size | None:
        if num_rows > self.sizes[-1].rows or num_tokens > MIXED_TOKENS[-1]:
            return None
        if num_tokens == 0:
            return next(size for size in self.sizes if size.rows >= num_rows)
        rows = next(rows for rows in self._mixed_rows if rows >= num_rows)
        tokens = max(num_tokens, rows)  # no place for a row without one for its token
        return Size(rows, next((each for each in MIXED_TOKENS if each >= tokens), tokens))

    def record_next(self) -> bool:
        """Record one more, if there was an answer and one is left; whether it did."""
        if not self._times:
            return False
        while self._expected and not self._is_full:
            rows, tokens, filters, penalties, edits, num, masks = self._expected.pop(0)
            if edits:  # which table they will be in is not known yet
                continue
            size, needs = Size(rows, tokens), Needs(filters, penalties, None, num, masks)
            if self._size(rows, tokens) == size and (size, needs) not in self._recorded:
                return self._try(size, needs) is not None
        came = [key for key in self._times if key[0].is_mixed and key[1].edits is None]
        for size, needs in (*((size, Needs()) for size in reversed(self.sizes)), *came):
            if (size, needs) not in self._recorded:
                return self._try(size, needs) is not None
        return False

    def _try(self, size: Size, needs: Needs) -> Recorded | None:
        if self._is_full or (size, needs) in self._recorded:
            return self._recorded.get((size, needs))
        if size.is_mixed and sum(each.is_mixed for each, _ in self._recorded) >= MOST_MIXED:
            return None
        try:
            recorded = self._record(size, needs)
        except torch.OutOfMemoryError:
            self._is_full = True
            logger.warning(
                "no memory for a graph of %d rows: steps without one run slower; lower"
                " gpu_memory_utilization or max_num_seqs, or set enforce_eager.", size.rows,
            )  # fmt: skip
            return None
        except Exception:
            self._is_full = True
            logger.warning(
                "a graph of %d rows could not be recorded: steps without one run slower.",
                size.rows, exc_info=True,
            )  # fmt: skip
            return None
        if needs.edits is not None:
            self._drop_edits_before(needs.edits)
        self._recorded[size, needs] = recorded
        if self._used is not None:
            self._used.write(_kind(*key) for key in self._recorded)
        return recorded

    def _drop_edits_before(self, generation: int) -> None:
        """Drop graphs that read a table of edits which has moved."""
        for size, needs in list(self._recorded):
            if needs.edits is not None and needs.edits < generation:
                del self._recorded[size, needs]

    def _record(self, size: Size, needs: Needs) -> Recorded:
        """Carry it out once, for a step without rows, so that all is compiled; then record it. The
        recorded one's inputs are in the memory of graphs, which all sizes share."""
        runner = self._runner
        in_pieces = self._in_pieces or (size.is_mixed and not runner.backend.takes_any_lengths)
        shape = largest_shape(size, runner.rows.max_model_len)
        recorded = Recorded(runner, size, in_pieces)
        runner.rows.expect_nothing()

        def work() -> list[torch.Tensor]:
            made: list[StepInputs] = []

            def step(backend: AttentionBackend, between: Callable[[], None]) -> list[torch.Tensor]:
                gathered = runner.rows.ops.gather(shape)
                made.append(gathered.inputs)
                return carry_out(runner, gathered, shape, needs, backend, between)

            step(runner.backend, lambda: None)
            made.clear()
            recorded.pieces = record(self._device, runner.backend, step, in_pieces=in_pieces)
            if in_pieces:
                recorded.inputs = _borrowed(self._device, made[0])
            return []

        self._device.run(work)
        return recorded


def _borrowed(device: Device, inputs: StepInputs) -> StepInputs:
    def borrow(values: torch.Tensor | tuple[torch.Tensor, ...]) -> Any:
        if isinstance(values, torch.Tensor):
            return device.borrow(values)
        return tuple(map(device.borrow, values))

    names = [each.name for each in dataclasses.fields(inputs)]
    return StepInputs(**{name: borrow(getattr(inputs, name)) for name in names})


def _kind(size: Size, needs: Needs) -> Kind:
    edits = needs.edits is not None
    filters, penalties = needs.has_filters, needs.has_penalties
    return (
        size.rows, size.tokens, filters, penalties, edits, needs.num_candidates, needs.has_masks
    )  # fmt: skip
