"""Steps: from a plan and its rows to a result. No torch.

Every step is a `Step`: `begin` launches the work of its plan, `end` waits for it and returns the
result. On a GPU, which works alongside the host:

    host     begin N+1: pack, launch | end N: wait for its tokens ...
    stream   ...  step N ........... | changes N+1 | moves | step N+1 ...
    side                               tokens of N -> host

A CPU does each piece of work at once, so the result is ready when `begin` returns. A step's inputs
are gathered on the device from the rows' state. Its tokens stay there for the next step; only
`Device` copies them to the host. A step with token masks is launched in two halves. Between them
the host waits for the masks, while the device computes the first half. Counters change last in a
step, so a failed step can be launched again.

Features attach as described in `attachment.py`. A plain step has no parts.

Shape legend: T tokens of the step, S scheduled rows (and slots for sampling rows), N sampling rows,
D model dim, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quire.base.masks import MaskPromise
from quire.base.plan import Plan, StepResult
from quire.runner.attachment import (
    Attachment,
    ForwardPart,
    Head,
    SamplingPart,
    Step,
    Work,
    are_unused,
)
from quire.runner.device import Arrival, Device, Graph, Tensors
from quire.runner.rows import DeviceRows
from quire.runner.sampling.sampler import Sampler
from quire.runner.step_ops import (
    NO_UPDATE,
    Gathered,
    Needs,
    Sampling,
    SamplingRequests,
    StepShape,
    Update,
    unused,
)

if TYPE_CHECKING:  # a start without torch imports this file
    import torch

    from quire.ops.attention.base import AttentionBackend
    from quire.ops.rows.step_inputs import StepInputs
    from quire.ops.sampling.device_drafts import Runs

Int32 = npt.NDArray[np.int32]

NOT_FINITE = "The model's logits for this sequence are not finite (NaN or infinity)."
_NOTHING_LEFT = (
    "No token can be chosen: the model's logits are not finite, or allowed_token_ids, bad_words,"
    " min_tokens, logit_bias and logits_processors together leave no token."
)
_NOTHING_ALLOWED = (
    "No token can be chosen: the model's logits are not finite, or the grammar of"
    " structured_outputs leaves no token. Check also allowed_token_ids, bad_words, min_tokens,"
    " logit_bias and logits_processors."
)


class Moves:
    """Block moves of plans, in their order. A repeated step does not swap out again, because a load
    or the step itself may have written the blocks since."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend  # an `AttentionBackend`, or `WarmBlocks`
        self._step_id = -1
        self._num_swaps = 0  # swaps carried out; a part of a plan has all swaps or none

    def carry_out(self, plan: Plan) -> None:
        backend, num_seen = self._backend, 0
        if plan.step_id != self._step_id:
            self._step_id, self._num_swaps = plan.step_id, 0
        for move in plan.moves:
            blocks = (move.group, move.source, move.destination)
            if move.kind == "load":
                backend.load(*blocks)
            elif move.kind == "copy":
                backend.copy_blocks(*blocks)
            else:
                num_seen += 1
                if num_seen > self._num_swaps:
                    backend.swap_out(*blocks)
                    self._num_swaps = num_seen


@dataclass(frozen=True)
class Computed:
    """First half of a step. head: see `Head.compute`. found: tensors of the parts."""

    gathered: Gathered
    head_NK: "torch.Tensor | None"
    found: "list[torch.Tensor]"


class SampledTokens:
    """Head of a model that generates: logits, and tokens that are sampled from them."""

    samples = True

    def __init__(self, runner: "StepRunner") -> None:
        self._runner = runner

    def compute(
        self, gathered: Gathered, shape: StepShape, hidden_TD: "torch.Tensor", needs: Needs
    ) -> "torch.Tensor | None":
        """See Head."""
        if not shape.num_samples:
            return None
        return self._runner.logits(hidden_TD, gathered.samples.last, needs)

    def choose(
        self,
        gathered: Gathered,
        computed_NK: "torch.Tensor | None",
        needs: Needs,
        parts: Sequence[SamplingPart],
    ) -> "tuple[torch.Tensor, torch.Tensor, Tensors]":
        """See Head."""
        samples = gathered.samples
        ids_N, is_valid_N = samples.rows, samples.rows
        if computed_NK is not None:
            ids_N, is_valid_N = self._runner.sampler.sample(computed_NK, samples, needs, parts)
        return ids_N, is_valid_N, [tensor for part in parts for tensor in part.found()]


class StepRunner:
    """Rows, model, attention backend and sampler of one device; runs plans.

    head: from hidden states to tokens. attachments: features of the forward pass. make_step,
    make_draft_step: constructors of steps without and with draft tokens; features set them.
    """

    def __init__(
        self, model: Any, backend: Any, rows: DeviceRows, sampler: Sampler, device: Device
    ) -> None:
        self.model, self.backend = model, backend
        self.rows, self.sampler, self.device = rows, sampler, device
        self.head: Head = SampledTokens(self)
        self.attachments: list[Attachment] = []
        self.make_step: MakeStep = PlainStep
        self.make_draft_step: MakeStep | None = None
        self.moves = Moves(backend)
        self.unread: dict[int, Arrival] = {}  # tokens in transit to the host, by result slot
        self.ones_R = np.ones(rows.max_num_rows, np.int32)  # never changed: results share it

    @property
    def is_async(self) -> bool:
        """Return whether `launch` returns before the step has ended."""
        return self.device.is_async

    def run(self, plan: Plan, masks: MaskPromise | None = None) -> StepResult:
        """Run a plan and wait for its result."""
        return self.launch(plan, masks).end()

    def launch(self, plan: Plan, masks: MaskPromise | None = None) -> Step:
        """Begin a plan's step, after all earlier steps. masks: promise of allowed tokens."""
        if plan.drafts or plan.is_guessing:
            assert self.make_draft_step is not None, "the runner has no steps with drafts"
            step = self.make_draft_step(self, plan, masks)
        else:
            step = self.make_step(self, plan, masks)
        step.begin()
        return step

    def follow(self, plan: Plan) -> list[ForwardPart]:
        """Note the rows that a plan starts, forks and releases, and their requests; return the
        attachments' parts in its step."""
        if len(plan.released):
            self.sampler.release_rows(plan.released)
        for start in plan.started:
            self.sampler.start_row(start)
        for fork in plan.forked:
            self.sampler.copy_row(fork.parent, fork.child)
        parts = (each.prepare(plan) for each in self.attachments)
        return [part for part in parts if part is not None]

    def note(self, plan: Plan) -> None:
        """Note the rows of a plan that another runner carries out on the same rows."""
        self.follow(plan)

    def find_recorded(self, plan: Plan, needs: Needs, runs: "Runs | None" = None) -> Work | None:
        """Return recorded work that has room for a plan's step; None: launch the step directly.
        runs: search of the drafter on the device, if there is one."""
        return None

    def hidden(
        self,
        inputs: "StepInputs",
        shape: StepShape,
        backend: "AttentionBackend",
        parts: Sequence[ForwardPart] = (),
    ) -> "torch.Tensor":
        """Compute the hidden states of a step after the last norm, [T, D]."""
        step = self.attention_step(inputs, shape)
        ids_T, positions_T = inputs.ids_T, inputs.positions_T
        for part in parts:
            step = part.attention(step)
            ids_T, positions_T = part.inputs(ids_T, positions_T)
        backend.prepare(step)
        hidden_TD: torch.Tensor = self.model(ids_T, positions_T, backend)
        return hidden_TD

    def attention_step(self, inputs: "StepInputs", shape: StepShape) -> Any:
        """Return the step's description for attention, from its gathered inputs."""
        raise NotImplementedError

    def logits(
        self, hidden_TD: "torch.Tensor", last_N: "torch.Tensor", needs: Needs
    ) -> "torch.Tensor":
        """Compute the logits after tokens last_N of hidden states [T, D]: [N, V], or a
        rank's part."""
        raise NotImplementedError

    def compute(
        self,
        gathered: Gathered,
        shape: StepShape,
        needs: Needs,
        backend: "AttentionBackend",
        parts: Sequence[ForwardPart] = (),
    ) -> Computed:
        """Run the first half of a step's work, up to the logits."""
        shape = replace(shape, is_uncut=needs.is_uncut)
        hidden_TD = self.hidden(gathered.inputs, shape, backend, parts)
        found = [tensor for part in parts for tensor in part.after(hidden_TD)]
        return Computed(gathered, self.head.compute(gathered, shape, hidden_TD, needs), found)

    def finish(
        self, computed: Computed, needs: Needs, parts: Sequence[SamplingPart]
    ) -> "list[torch.Tensor]":
        """Choose tokens and, last of all, move the counters; return the parts' tensors."""
        gathered = computed.gathered
        ids_N, is_valid_N, found = self.head.choose(gathered, computed.head_NK, needs, parts)
        self.rows.ops.advance(gathered, ids_N, is_valid_N)
        return [*found, *computed.found]


MakeStep = Callable[[StepRunner, Plan, MaskPromise | None], Step]


class PlainStep:
    """Step that chooses one token per sampling row; launched directly, or as recorded work."""

    num_row_slots = 0
    graph: Graph | None = None

    def __init__(self, runner: StepRunner, plan: Plan, masks: MaskPromise | None) -> None:
        self._runner, self._plan, self._masks = runner, plan, masks
        self._errors: dict[int, str] = {}  # error messages by row

    def begin(self) -> None:
        """See Step."""
        runner, plan, rows = self._runner, self._plan, self._runner.rows
        needs = self._follow(plan.sample_rows)
        # It may be recorded now, before the inbox holds this plan's lists.
        recorded = None
        if len(plan.rows) and all(part.can_be_recorded for part in self._forward):
            recorded = runner.find_recorded(plan, needs)
        self._is_recorded = recorded is not None
        work: Work = recorded or self
        update, lists = rows.apply(plan, runner.sampler.flags.has_edits, self._requested)
        slot, unread = lists.result_slot, runner.unread
        if (before := unread.pop(slot, None)) is not None:
            before.wait()

        def first() -> Tensors:
            runner.moves.carry_out(plan)
            for part in self._forward:
                part.before()
            return work.first(shape_of(plan, work.num_row_slots)) if len(plan.rows) else []

        def second() -> Tensors:
            tokens_N = rows.ops.results_QR[slot, : len(plan.sample_rows)]
            return [tokens_N, *(work.second() if len(plan.rows) else [])]

        is_whole = not plan.moves and all(part.is_at_rest for part in self._forward)
        graph = work.graph if is_whole else None
        self._give(update, first, second, lists.sampling, graph=graph)
        if runner.is_async:
            unread[slot] = self._arrivals[-1]

    def first(self, shape: StepShape) -> Tensors:
        """See Work."""
        runner = self._runner
        computed = runner.compute(
            runner.rows.ops.gather(shape), shape, self._needs, runner.backend, self._forward
        )
        self._computed = [computed]
        return self._seen(computed.head_NK, int(shape.context_lens.max()))

    def second(self) -> Tensors:
        """See Work."""
        return self._runner.finish(self._computed.pop(), self._needs, self._sampling)

    def is_done(self) -> bool:
        """See Step."""
        return self._arrivals[-1].is_done()

    def end(self) -> StepResult:
        """See Step."""
        tokens_N, *rest = self._arrivals[-1].wait()
        num_samples = len(self._plan.sample_rows)
        tokens = np.asarray(tokens_N)[:num_samples].reshape(-1, 1)
        return self._result(tokens, self._runner.ones_R[:num_samples], rest)

    def _follow(self, rows: Int32) -> Needs:
        """Note the plan's started and released rows, and the requests of its sampling rows."""
        sampler = self._runner.sampler
        self._forward = self._runner.follow(self._plan)
        self._requested = sampler.requested(rows, self._plan.masked_rows)
        self._needs = sampler.needs(self._requested)
        if are_unused(self._forward):
            self._needs = unused(self._needs)
        self._sampling = sampler.parts(self._needs, self._requested)
        return self._needs

    def _seen(self, logits_NV: "torch.Tensor | None", longest: int) -> Tensors:
        """Return the tensors that the host inspects between the halves, from logits [N, V].
        longest: length of the longest row in tokens."""
        if logits_NV is None:
            return []
        return [each for part in self._sampling for each in part.seen(logits_NV, longest)]

    def _give(
        self,
        update: Update,
        first: Callable[[], Tensors],
        second: Callable[[], Tensors],
        sampling: Sampling,
        depths: npt.NDArray[np.int64] | None = None,
        graph: Graph | None = None,
    ) -> None:
        """Submit the step to the device, in two halves if the host has work between them. depths:
        number of the draft token before each position; None: all follow known tokens. graph:
        recording of both halves, if there is one."""
        rows, then = self._runner.rows, NO_UPDATE
        hosts = [part for part in self._sampling if part.hosted]
        if not hosts and not self._needs.has_masks:
            self._arrivals = [rows.run_with(update, lambda: [*first(), *second()], graph)]
            return
        self._arrivals = [rows.run_with(update, first)]
        for part in hosts:
            part.take(self._arrivals[0].wait(), sampling)
            self._errors |= part.errors
        if self._needs.has_masks:
            then = self._prepared_masks(depths)
        self._arrivals.append(rows.run_with(then, second))

    def _prepared_masks(self, depths: npt.NDArray[np.int64] | None) -> Update:
        """Wait for the step's masks and prepare them for its rows."""
        assert self._masks is not None, "a plan with masked rows comes with a promise"
        masks, requested, which = self._masks.wait(), self._requested, self._requested.masked
        depths_M = np.zeros(len(which), np.int64) if depths is None else depths[which]
        words = masks.of(requested.rows[which])[np.arange(len(which)), depths_M]
        self._errors |= masks.errors
        ops, positions = self._runner.rows.ops, self._slots_of(which).astype(np.int32)
        return ops.prepare_masks(positions, np.ascontiguousarray(words))

    def _slots_of(self, which: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        """Return the indices in the work's logits of these positions."""
        return which

    def _result(
        self, tokens_NK: Int32, counts_N: Int32, arrived: "list[torch.Tensor]"
    ) -> StepResult:
        """Return the result of a step, which holds no view of the tokens [N, K], -1 for none.
        counts: valid tokens of each row, [N]. arrived: tensors of the parts, sampling first."""
        rows = self._plan.sample_rows
        processed = [n for part in self._sampling for n in part.processed]
        reasons = reasons_of(rows, tokens_NK[:, 0], self._requested, self._errors, processed)
        result = StepResult(
            step_id=self._plan.step_id,
            token_ids=np.maximum(tokens_NK, 0),
            num_accepted=counts_N,
            row_errors=reasons,
            unservable_rows=unservable(reasons),
            duration_s=sum(arrival.duration_s() for arrival in self._arrivals),
        )
        at = len(arrived) - sum(part.num_tensors for part in self._forward)
        result = self._read(result, arrived[:at])
        for part in self._forward:
            result = part.read(result, arrived[at : at + part.num_tensors])
            at += part.num_tensors
        return result

    def _read(self, result: StepResult, arrived: "list[torch.Tensor]") -> StepResult:
        """Add further results of the step, such as pooled vectors or candidates."""
        for part in self._sampling:
            result = part.read(result, arrived, is_recorded=self._is_recorded)
        return result


def shape_of(plan: Plan, num_row_slots: int = 0) -> StepShape:
    """Return the shape of a plan's step. num_row_slots: number of row slots; 0: one for each
    row."""
    num_rows = len(plan.rows)
    query_lens, context_lens = np.zeros((2, num_row_slots or num_rows), np.int32)
    query_lens[:num_rows] = plan.num_tokens
    context_lens[:num_rows] = plan.computed_bound + plan.num_tokens
    return StepShape(query_lens, context_lens, len(plan.sample_rows))


def reasons_of(
    rows_N: Int32,
    tokens_N: Int32,
    requested: SamplingRequests,
    known_errors: dict[int, str],
    processed: Sequence[int] = (),
) -> dict[int, str]:
    """Return the reasons why rows have no token (-1 in tokens [N]), by row. requested: requests,
    whose first entries are of these rows. `known_errors`: known errors by row. processed: see
    SamplingPart."""
    failed = rows_N[tokens_N < 0].tolist()
    if known_errors:
        failed += [row for row in rows_N.tolist() if row in known_errors]
    if not failed:
        return {}
    reasons = {int(requested.rows[n]): _NOTHING_LEFT for n in [*requested.spans, *processed]}
    reasons |= {int(requested.rows[n]): _NOTHING_ALLOWED for n in requested.masked}
    return {row: known_errors.get(row) or reasons.get(row, NOT_FINITE) for row in failed}


def unservable(reasons: dict[int, str]) -> tuple[int, ...]:
    """Return the rows that have no token although the step itself succeeded."""
    return tuple(row for row, why in reasons.items() if why != NOT_FINITE)
