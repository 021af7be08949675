"""Recorded steps: one launch, or some dozens, in place of hundreds (T 4.6, fig. 4.6).

Steps are recorded whole, at a ladder of sizes: a step uses the next size with room for its rows. A
mixed step of up to 2,048 tokens also needs room for its tokens. If attention must know each row's
length, mixed steps are recorded in pieces, between the attention calls. A setting requests pieces
for all steps. Larger steps keep the device busy for longer than their launches take.

A kind of step is its sizes and the needs of its sampling. The first steps of a kind are launched
directly, and the next one is recorded, so that requests never wait for recordings at the start. The
largest size of the ladder is recorded first, and the others reuse its memory. In idle moments
(`record_next`), kinds that an earlier run used come first, then the ladder from the top, then mixed
steps of kinds that occurred. If the device's memory is full, recording fails. Then nothing more is
recorded, and all other steps are launched directly. Any other recording error is handled in the
same way: if the device or the step is at fault, the direct launch will report it.
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
    MAX_MIXED,
    MIXED_ROWS,
    MIXED_TOKENS,
    all_graphs_bytes,
    ladder,
    max_mixed_tokens,
)
from quire.runner.step_ops import Gathered, Needs, StepShape
from quire.runner.steps import StepRunner

logger = logging.getLogger("quire")

FIRST_TIMES = 1  # steps of a kind that are launched directly
FIRST_TIMES_MIXED = 3  # mixed steps have more kinds, and some never recur


# Row slots, token slots, has filters, has penalties, has edits, number of candidates, has masks.
Kind = tuple[int, int, bool, bool, bool, int, bool]


@dataclass(frozen=True)
class Size:
    """Numbers of row slots and token slots. tokens is 0 where each row has exactly one token."""

    rows: int
    tokens: int = 0

    @property
    def is_mixed(self) -> bool:
        return self.tokens > 0


def largest_shape(size: Size, max_model_len: int) -> StepShape:
    """Return the shape of the largest step of a size. If mixed, its first row has all tokens."""
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
    """Run a step's work from gathered inputs to counters; return its sampling parts' tensors.
    between: called where the masks are applied."""
    parts = [each.at_rest for each in runner.attachments]
    computed = runner.compute(gathered, shape, needs, backend, parts)
    if needs.has_masks:
        between()
    return runner.finish(computed, needs, runner.sampler.parts(needs))


@torch.inference_mode()
def measured_bytes(runner: StepRunner) -> int:
    """Measure the tensors of the largest recorded steps by running them; other steps share their
    memory. Add each graph's own bytes."""
    device, rows = runner.device.device, runner.rows
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    num_rows = rows.max_num_rows
    for size in (Size(num_rows), Size(num_rows, max_mixed_tokens(num_rows))):
        shape = largest_shape(size, rows.max_model_len)

        def work(shape: StepShape = shape) -> list[torch.Tensor]:
            gathered = rows.ops.gather(shape)
            carry_out(runner, gathered, shape, Needs(has_filters=True), runner.backend)
            return []

        rows.prepare_empty_step()
        runner.device.run(work).wait()
    tensors = int(torch.cuda.max_memory_allocated(device) - before)
    return all_graphs_bytes(num_rows, tensors)


@dataclass
class Recorded:
    """`Work` of a step of one size, with its graphs once they are recorded. inputs: the step's
    inputs, for attention calls that are launched again."""

    runner: StepRunner
    size: Size
    in_pieces: bool
    inputs: StepInputs | None = None
    pieces: Pieces = field(default_factory=Pieces)

    @property
    def num_row_slots(self) -> int:
        """See Work."""
        return self.size.rows

    def first(self, shape: StepShape) -> list[torch.Tensor]:
        """Run the first half, up to the masks, for a step of this shape with equally many row
        slots. The host inspects nothing before the second half."""
        if self.in_pieces:
            assert self.inputs is not None, "it is recorded first"
            self.runner.backend.prepare(self.runner.attention_step(self.inputs, shape))
        self.pieces.begin()
        return []

    def second(self) -> list[torch.Tensor]:
        """Run the second half. Return copies of the outputs, which the next replay overwrites."""
        self.pieces.end()
        return [tensor.clone() for tensor in self.pieces.outputs]


class UsedSizes:
    """Kinds of graphs that an engine used, in a small file of the user's cache directory, for its
    next start. File errors are logged and never stop the engine. Triton caches compiled kernels
    itself.

    directory: folder of the file. facts: texts that must be equal for the file to be valid.
    """

    def __init__(self, directory: Path, facts: Iterable[str]) -> None:
        digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]
        self.path = directory / f"{digest}.json"

    def read(self) -> list[Kind]:
        """Return the kinds in the file; an empty list if the file cannot be read."""
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
        """Replace the file atomically."""
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
    """Recorded steps of a runner. in_pieces: attention calls are not part of any graph. used: file
    of used kinds for the next start."""

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
        """Return the graph for a step with num_rows row slots and num_tokens tokens; 0 tokens: one
        for each row. It may be recorded now, when the inbox does not hold this step yet. None:
        launch the step directly."""
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
        tokens = max(num_tokens, rows)  # each row slot needs a token slot
        return Size(rows, next((each for each in MIXED_TOKENS if each >= tokens), tokens))

    def record_next(self) -> bool:
        """Record one more step if any step has run and a kind is left; return whether it did."""
        if not self._times:
            return False
        while self._expected and not self._is_full:
            rows, tokens, filters, penalties, edits, num, masks = self._expected.pop(0)
            if edits:  # their table is not known yet
                continue
            size, needs = Size(rows, tokens), Needs(filters, penalties, None, num, masks)
            if self._size(rows, tokens) == size and (size, needs) not in self._recorded:
                return self._try(size, needs) is not None
        mixed_kinds = [key for key in self._times if key[0].is_mixed and key[1].edits is None]
        for size, needs in (*((size, Needs()) for size in reversed(self.sizes)), *mixed_kinds):
            if (size, needs) not in self._recorded:
                return self._try(size, needs) is not None
        return False

    def _try(self, size: Size, needs: Needs) -> Recorded | None:
        if self._is_full or (size, needs) in self._recorded:
            return self._recorded.get((size, needs))
        if size.is_mixed and sum(each.is_mixed for each, _ in self._recorded) >= MAX_MIXED:
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
        """Drop graphs that read an edit table which was since reallocated."""
        for size, needs in list(self._recorded):
            if needs.edits is not None and needs.edits < generation:
                del self._recorded[size, needs]

    def _record(self, size: Size, needs: Needs) -> Recorded:
        """Run a step without rows once, so that all kernels are compiled; then record it. The
        recorded inputs lie in the memory of graphs, which all sizes share."""
        runner = self._runner
        in_pieces = self._in_pieces or (size.is_mixed and not runner.backend.takes_any_lengths)
        shape = largest_shape(size, runner.rows.max_model_len)
        recorded = Recorded(runner, size, in_pieces)
        runner.rows.prepare_empty_step()

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
