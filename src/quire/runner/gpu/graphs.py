"""Recorded steps: one launch, or some dozens, in place of hundreds (T 4.6, fig. 4.6).

Steps are recorded whole, at the sizes of `sizes.py`. If attention must know each row's length,
mixed steps are recorded in pieces, between the attention calls. A setting requests pieces for all
steps. Larger steps keep the device busy for longer than their launches take.

A kind of step is its size and the needs of its sampling. The first steps of a kind are launched
directly, and the next one is recorded, so that requests never wait for recordings at the start. The
largest size of the ladder is recorded first, and the others reuse its memory. In idle moments
(`record_next`), kinds that an earlier run used come first, then the ladder from the top, then other
kinds that occurred.

A step that would be launched directly uses the graph of a larger step, or of one with further
needs, if there is one (`_cover`). Before the engine is ready, `warm_up` records a few kinds that
together cover every step that can be recorded. It also compiles the kernels of all sizes.

Plain decoding steps are kept for ever. The number of all other graphs is limited, and the least
recently used graph is dropped. A dropped kind must occur often before it is recorded again. Steps
that use no feature have plain graphs of their own. Their other kinds use the graph with the
feature's work if there is one: two graphs of each kind would exceed the limit.

If the device's memory is full, recording fails. Then nothing more is recorded, and all other steps
are launched directly. Any other recording error concerns its own kind, which is launched directly
from then on. If the device or the step is at fault, the direct launch will report it.
"""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from quire.ops.attention.base import AttentionBackend
from quire.ops.moe import only_first_tokens
from quire.ops.rows.step_inputs import StepInputs
from quire.ops.sampling.device_drafts import Runs
from quire.runner.attachment import recorded_parts
from quire.runner.device import Device, Graph
from quire.runner.gpu.compiling import compile_all
from quire.runner.gpu.pieces import Pieces, record
from quire.runner.gpu.sizes import (
    Drafted,
    Size,
    Sizes,
    kind_of,
    largest_shape,
    size_and_needs,
)
from quire.runner.gpu.used_sizes import UsedSizes
from quire.runner.gpu.verification import verify, verify_ops
from quire.runner.memory_plan import MAX_OTHER_GRAPHS, MORE_POSITIONS, max_mixed_tokens
from quire.runner.step_ops import RECORDED_CANDIDATES, Gathered, Needs, StepShape, unused
from quire.runner.steps import StepRunner

logger = logging.getLogger("quire")

FIRST_TIMES = 1  # steps of a kind that are launched directly
FIRST_TIMES_MIXED = 3  # mixed steps have more kinds, and some never recur
DROPPED_TIMES = 32  # further steps of a kind whose graph was dropped
COVER_TOKENS = 512  # token slots of a graph that any step may use; others have twice its tokens


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
    parts = recorded_parts(runner.attachments, needs)
    computed = runner.compute(gathered, shape, needs, backend, parts)
    if needs.has_masks:
        between()
    return runner.finish(computed, needs, runner.sampler.parts(needs))


def launch_step(
    runner: StepRunner,
    size: Size,
    needs: Needs,
    backend: AttentionBackend,
    between: Callable[[], None] = lambda: None,
) -> tuple[StepInputs, list[torch.Tensor]]:
    """Launch all of a step of this size; return its inputs and outputs."""
    shape = largest_shape(size, runner.rows.max_model_len)
    if size.runs is not None:
        verify_ops(runner).draft(size)
    gathered = runner.rows.ops.gather(shape)
    with only_first_tokens(gathered.inputs.query_starts_S1[-1:]):
        if size.drafts:
            found = verify(runner, gathered, size, shape, needs, backend, between)
        else:
            found = carry_out(runner, gathered, shape, needs, backend, between)
    return gathered.inputs, found


@torch.inference_mode()
def measured_bytes(runner: StepRunner, *, has_drafts: bool = False) -> int:
    """Measure the tensors of the largest recorded steps by running them; other steps share their
    memory."""
    device, rows = runner.device.device, runner.rows
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    num_rows, tokens = rows.max_num_rows, max_mixed_tokens(rows.max_num_rows)
    for size in (Size(num_rows), Size(num_rows, tokens, MORE_POSITIONS if has_drafts else 0)):

        def work(size: Size = size) -> list[torch.Tensor]:
            launch_step(runner, size, Needs(has_filters=True), runner.backend)
            return []

        rows.prepare_empty_step()
        runner.device.run(work).wait()
    return int(torch.cuda.max_memory_allocated(device) - before)


@dataclass
class Recorded:
    """`Work` of a step of one size, with its graphs once they are recorded. inputs: the step's
    inputs, for attention calls that are launched again. last_use: number of the last `find`."""

    runner: StepRunner
    size: Size
    in_pieces: bool
    inputs: StepInputs | None = None
    pieces: Pieces = field(default_factory=Pieces)
    last_use: int = 0

    @property
    def num_row_slots(self) -> int:
        """See Work."""
        return self.size.rows

    @property
    def graph(self) -> Graph | None:
        """See Work."""
        return self.pieces.whole

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


Key = tuple[Size, Needs]


class Graphs:
    """Recorded steps of a runner. in_pieces: attention calls are not part of any graph. used: file
    of used kinds for the next start. max_others: maximum number of graphs in addition to plain
    decoding steps."""

    def __init__(
        self,
        device: Device,
        runner: StepRunner,
        max_rows: int,
        *,
        in_pieces: bool = False,
        used: UsedSizes | None = None,
        max_others: int = MAX_OTHER_GRAPHS,
    ) -> None:
        self.sizes = Sizes(max_rows)
        self._device, self._runner, self._in_pieces = device, runner, in_pieces
        self._used, self._max_others = used, max_others
        self._recorded: dict[Key, Recorded] = {}
        self._num_found = 0  # calls of `find`, a clock for `last_use`
        self._latest: tuple[int, int, Needs, Recorded] | None = None  # the last step, and its graph
        self._times: dict[Key, int] = {}
        self._failed: set[Key] = set()
        self._is_full = False
        self._expected = sorted(set() if used is None else set(used.read()), reverse=True)

    def find(
        self, num_rows: int, num_tokens: int, needs: Needs, drafted: Drafted | None = None
    ) -> Recorded | None:
        """Return the graph for a step with num_rows row slots and num_tokens tokens; 0 tokens: one
        for each row. It may be recorded now, when the inbox does not hold this step yet. None:
        launch the step directly."""
        if drafted is None and (same := self._found_again(num_rows, num_tokens, needs)) is not None:
            return same
        size = self.sizes.find(num_rows, num_tokens, drafted)
        if size is None or not needs.can_be_recorded:
            return None
        key = size, needs
        self._num_found += 1
        if (recorded := self._recorded.get(key) or self._with_features(*key)) is not None:
            recorded.last_use = self._num_found
            self._latest = None if drafted else (num_rows, num_tokens, needs, recorded)
            return recorded
        self._times[key] = self._times.get(key, 0) + 1
        if self._times[key] <= (FIRST_TIMES_MIXED if size.is_mixed else FIRST_TIMES):
            return self._cover(num_rows, num_tokens, needs, drafted)
        if not self._recorded:
            self._try(self.sizes.decoding[-1], Needs())
        return self._try(size, needs) or self._cover(num_rows, num_tokens, needs, drafted)

    def _found_again(self, num_rows: int, num_tokens: int, needs: Needs) -> Recorded | None:
        """Return the last step's graph if this step is of its kind, without hashing the kind."""
        if self._latest is None:
            return None
        rows, tokens, last_needs, recorded = self._latest
        if rows != num_rows or tokens != num_tokens or last_needs is not needs:
            return None
        self._num_found += 1
        recorded.last_use = self._num_found
        return recorded

    def _with_features(self, size: Size, needs: Needs) -> Recorded | None:
        """Return the graph of this kind that also does the work of unused features; None for plain
        kinds, which have two graphs."""
        if not needs.is_unused or _is_plain((size, needs)):
            return None
        return self._recorded.get((size, replace(needs, is_unused=False)))

    def _cover(
        self, num_rows: int, num_tokens: int, needs: Needs, drafted: Drafted | None
    ) -> Recorded | None:
        """Return the smallest graph with room for a step that also serves its needs; None if it
        would compute far too many tokens."""
        bound = max(COVER_TOKENS, 2 * num_tokens)
        found = [
            recorded
            for (size, served), recorded in self._recorded.items()
            if size.num_tokens <= bound
            and _serves(served, needs)
            and size.holds(num_rows, num_tokens, drafted)
        ]
        if not found:
            return None
        smallest = min(found, key=lambda each: each.size.num_tokens)
        smallest.last_use = self._num_found
        return smallest

    def warm_up(self, *drafters: Runs | None) -> None:
        """Record kinds that cover every step, and compile what all kinds launch. drafters: see
        `Sizes.warm`."""
        kinds, recorded = self._warm_kinds(*drafters)
        runner, backend = self._runner, self._runner.backend
        largest_first = sorted(kinds, key=lambda kind: -kind[0].num_tokens)  # the rest reuse memory
        compile_all(
            self._device, [partial(launch_step, runner, *kind, backend) for kind in largest_first]
        )
        self._try(self.sizes.decoding[-1], Needs())
        for kind in kinds:
            self._run(*kind)
            if kind in recorded and self._may_record(*kind):
                self._try(*kind)

    def _warm_kinds(self, *drafters: Runs | None) -> tuple[list[Key], set[Key]]:
        """Return the kinds that together launch every kernel, and the kinds to record."""
        needs = self._covering_needs() if self._runner.head.samples else [Needs()]
        single = self._single_needs() if self._runner.head.samples else []
        recorded = [(size, each) for each in needs for size in self.sizes.warm(*drafters)]
        kinds = [(size, needs[0]) for size in self.sizes.plain()]
        if self._may_be_unused:
            kinds += [(size, unused(needs[0])) for size in self.sizes.plain()]
        kinds += [(self.sizes.decoding[-1], each) for each in single]
        unmasked = {kind for kind in recorded if not (kind[1].has_masks and kind[0].runs)}
        return list(dict.fromkeys([*kinds, *recorded])), unmasked

    @property
    def _max_candidates(self) -> int:
        return min(RECORDED_CANDIDATES[-1], self._runner.sampler.vocab_size)

    def _covering_needs(self) -> list[Needs]:
        """Return the needs of which one serves each step that samples."""
        further = Needs(True, True, None, self._max_candidates)
        return [further, replace(further, has_masks=True)]

    def _single_needs(self) -> list[Needs]:
        counts = [num for num in RECORDED_CANDIDATES if num <= self._max_candidates]
        candidates = [Needs(num_candidates=num) for num in counts]
        single = [Needs(True), Needs(False, True), Needs(has_masks=True), Needs(is_uncut=True)]
        return [*single, *candidates]

    def _run(self, size: Size, needs: Needs) -> None:
        """Run a step of this kind without rows, as far as it can run."""

        def work() -> list[torch.Tensor]:
            launch_step(self._runner, size, needs, self._runner.backend)
            return []

        self._runner.rows.prepare_empty_step()
        try:
            self._device.run(work)
        except Exception:
            logger.warning("steps of %s, %s cannot run.", size, needs, exc_info=True)

    def record_next(self) -> bool:
        """Try to record one more step if any step has run and a kind is left that has room; return
        whether there may be another."""
        if not self._times or self._is_full:
            return False
        while self._expected:
            kind = size_and_needs(self._expected.pop(0))
            if kind is not None and self.sizes.has(kind[0]) and self._may_record(*kind):
                self._try(*kind)
                return not self._is_full
        for size, needs in (*self._plain(), *self._others_that_occurred()):
            if self._may_record(size, needs):
                self._try(size, needs)
                return not self._is_full
        return False

    @property
    def _may_be_unused(self) -> bool:
        """Return whether steps may skip a feature's work if their rows do not use it."""
        return any(each.at_rest.is_used is not None for each in self._runner.attachments)

    def _plain(self) -> list[Key]:
        """Return the kinds of plain decoding steps, largest first. Kinds that skip unused features
        come before all others."""
        needs = [unused(Needs()), Needs()] if self._may_be_unused else [Needs()]
        return [(size, each) for each in needs for size in reversed(self.sizes.decoding)]

    def _others_that_occurred(self) -> list[Key]:
        return [
            (size, needs)
            for size, needs in self._times
            if (size.is_mixed or size.drafts) and needs.edits is None
        ]

    def _may_record(self, size: Size, needs: Needs) -> bool:
        """Return whether a kind can be recorded without dropping another."""
        key = size, needs
        if key in self._recorded or key in self._failed or self._times.get(key, 0) < 0:
            return False
        if needs.is_unused and not self._may_be_unused:
            return False  # of an earlier run with other settings
        if self._with_features(size, needs) is not None:
            return False
        return _is_plain(key) or len(self._others()) < self._max_others

    def _others(self) -> list[Key]:
        return [key for key in self._recorded if not _is_plain(key)]

    def _try(self, size: Size, needs: Needs) -> Recorded | None:
        key = size, needs
        if self._is_full or key in self._recorded or key in self._failed:
            return self._recorded.get(key)
        if not _is_plain(key) and len(others := self._others()) >= self._max_others:
            self._drop(min(others, key=lambda each: self._recorded[each].last_use))
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
            self._failed.add(key)
            logger.warning(
                "a graph of %s, %s could not be recorded: such steps run slower.",
                size, needs, exc_info=True,
            )  # fmt: skip
            return None
        if needs.edits is not None:
            self._drop_edits_before(needs.edits)
        recorded.last_use = self._num_found
        self._recorded[key] = recorded
        if self._used is not None:
            self._used.write(kind_of(*each) for each in self._recorded)
        return recorded

    def _drop_edits_before(self, generation: int) -> None:
        """Drop graphs that read an edit table which was since reallocated."""
        for key in list(self._recorded):
            if key[1].edits is not None and key[1].edits < generation:
                self._drop(key)

    def _drop(self, key: Key) -> None:
        """Drop a graph once the device has run it for the last time."""
        self._device.run(list).wait()
        self._latest = None
        del self._recorded[key]
        self._times[key] = -DROPPED_TIMES

    def _record(self, size: Size, needs: Needs) -> Recorded:
        """Run a step without rows once, so that all kernels are compiled; then record it. The
        recorded inputs lie in the memory of graphs, which all sizes share."""
        runner = self._runner
        in_pieces = self._in_pieces or (size.is_mixed and not runner.backend.takes_any_lengths)
        recorded = Recorded(runner, size, in_pieces)
        runner.rows.prepare_empty_step()

        def work() -> list[torch.Tensor]:
            made: list[StepInputs] = []

            def step(backend: AttentionBackend, between: Callable[[], None]) -> list[torch.Tensor]:
                inputs, found = launch_step(runner, size, needs, backend, between)
                made.append(inputs)
                return found

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


def _serves(served: Needs, needs: Needs) -> bool:
    """Return whether a graph for the needs `served` gives the results of a step with `needs`. A
    graph with masks does not serve a step without: it would apply the masks of an earlier step. A
    graph with a feature's work also serves steps whose rows do not use the feature."""
    return (
        served.edits == needs.edits
        and served.has_masks == needs.has_masks
        and served.is_uncut <= needs.is_uncut
        and served.is_unused <= needs.is_unused
        and served.has_filters >= needs.has_filters
        and served.has_penalties >= needs.has_penalties
        and served.num_candidates >= needs.num_candidates
    )


def _is_plain(key: Key) -> bool:
    """Return whether it is a decoding step without further needs, whose memory is planned."""
    size, needs = key
    is_plain = needs in (Needs(), unused(Needs()))
    return is_plain and not (size.is_mixed or size.drafts)
