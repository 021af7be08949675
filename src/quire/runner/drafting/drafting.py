"""Passes of a draft model between two steps, over the rows of the last step.

The first pass computes all tokens of a row that the drafter has not seen, up to the last known
token. Each further pass computes one draft token of each row. A draft token is sampled with the
row's own parameters and with the noise of its position. So where both models agree on the
probabilities, they agree on the token. Penalties, biases and masks are skipped: they affect the
acceptance rate but never the output.

    position      0 ... first ........ known - 1 | known .......... known + k - 2
    computed by   earlier calls  first pass      | further passes, one draft token each
    stands in     the row's own blocks .. capacity | spare blocks of the row

Tokens beyond a row's own blocks are written into spare blocks after the pool's, which the
scheduler does not know. Nothing there is needed later: an accepted token is computed once more
when its row has a block for it.

Shape legend: T tokens of the pass, S rows of an order, N rows that draft, k maximum number of draft
tokens of a row, F numbers of the target's hidden states that the drafter reads of each token, R
rows of the engine, E width of a pass's output, D drafter's model dim, V target's vocabulary.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.base.plan import DraftAnswer, DraftOrder
from quire.base.settings.config import EngineConfig
from quire.models.draft_head import DraftHead
from quire.models.model import Model
from quire.ops.attention.base import AttentionBackend
from quire.ops.attention.cpu import CpuBackend
from quire.ops.attention.traced import TracedAttention
from quire.ops.embedding import select_rows
from quire.ops.host.host_memory import to_device
from quire.ops.rows.row_state import RowTensors, write_deltas
from quire.ops.rows.step_inputs import SampleInputs, gather_step
from quire.ops.trace.program import Untraceable
from quire.runner.media.media import StepMedia
from quire.runner.memory_plan import (
    MAX_DRAFT_GRAPHS,
    max_read_tokens,
    num_speculative_tokens,
    spare_blocks,
)
from quire.runner.model_runner import DecoderModel, ModelRunner
from quire.runner.native_model import (
    NativeModel,
    NativePass,
    OperationModel,
    native_or_same,
)
from quire.runner.native_program import TRACED_TOKENS, traced
from quire.runner.step_ops import Needs, Sampling, SamplingRequests, StepShape
from quire.runner.torch_ops import TorchOps
from quire.spec.model_spec import ModelSpec

if TYPE_CHECKING:
    from quire.runner.drafting.draft_kernels import DraftKernels

logger = logging.getLogger(__name__)

Int32 = npt.NDArray[np.int32]


class Drafter(Protocol):
    """Draft model. Its layer numbers follow the target's, and its cache groups are its own.

    num_read: F. With 0 the drafter reads token ids alone. Else it reads the target's hidden state
    at position p together with the id at p + 1, and predicts the token at p + 2. Its keys and
    values of the pair stand at p.
    """

    num_read: int

    def first(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        read_TF: torch.Tensor | None,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Compute hidden states of the step's known tokens, [T, D]. read: None if num_read is 0."""
        ...

    def further(
        self,
        ids_R: torch.Tensor,
        positions_R: torch.Tensor,
        out_RD: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Compute the last draft token of each row, [R, D]. out: the previous pass's output at the
        rows' last tokens, [R, D]."""
        ...

    def logits(self, out_RD: torch.Tensor) -> torch.Tensor:
        """Compute logits of the next token, [R, V]; -inf for tokens unknown to the drafter."""
        ...


@dataclass(frozen=True)
class Spare:
    """Spare blocks after the pools of the drafter's cache groups, num for each row. first: the
    first spare block of each group."""

    num: int
    groups: range
    first: tuple[int, ...]


class DraftPasses:
    """Drafter over the rows of a runner; it does not move the runner's counters. target: model
    whose hidden states the drafter reads. Its `recorded_inputs` returns them, [T, F], after each
    forward pass. None if the drafter reads none. make_kernels: constructor of the passes by kernels
    over these rows; None without kernels."""

    def __init__(
        self,
        drafter: Drafter,
        target: Any,
        runner: ModelRunner,
        spare: Spare,
        make_kernels: "Callable[[RowTensors], DraftKernels] | None" = None,
    ) -> None:
        self._drafter, self._target, self._runner, self._spare = drafter, target, runner, spare
        state = runner.rows.state
        self._state = replace(state, computed_R=torch.zeros_like(state.computed_R))
        self._ops = TorchOps(runner.device, self._state)
        self.reads_target = drafter.num_read > 0
        self._kernels = None if make_kernels is None else make_kernels(self._state)

    @torch.inference_mode()
    def run(self, order: DraftOrder) -> DraftAnswer:
        """Run an order's passes and wait for the draft tokens."""
        if self._kernels is None:
            arrival = self._runner.device.run(lambda: [self._carry_out(order)])
        else:
            arrival = self._kernels.run(order, self._lent_blocks(order))
        found_Sk = arrival.wait()[0].numpy()[: len(order.rows)]
        return DraftAnswer(found_Sk, arrival.duration_s())

    def warm_up(self, num_drafts: int) -> None:
        """Record graphs for orders of up to this many draft tokens, if passes are recorded."""
        if self._kernels is not None:
            self._kernels.warm_up(num_drafts)

    def _carry_out(self, order: DraftOrder) -> torch.Tensor:
        """Return the draft tokens, int32 [S, k]; -1 where there is none."""
        max_drafts = int(order.num_draft_tokens.max(initial=0))
        found_Sk = torch.full(
            (len(order.rows), max_drafts), -1, dtype=torch.int32, device=self._device
        )
        if len(deltas := self._lent_blocks(order)):
            write_deltas(self._state, deltas)
        out_TD = self._first_pass(order)
        drafting_rows = np.flatnonzero(order.num_draft_tokens)
        out_ND = select_rows(out_TD, self._index(np.cumsum(order.num_tokens)[drafting_rows] - 1))
        for num in range(max_drafts):
            if num > 0:
                stay = np.flatnonzero(order.num_draft_tokens[drafting_rows] > num)
                drafting_rows = drafting_rows[stay]
                out_ND = self._further_pass(order, drafting_rows, num, self._rows_of(out_ND, stay))
            rows, lengths = order.rows[drafting_rows], order.num_known[drafting_rows] + num
            found_Sk[self._index(drafting_rows), num] = self._choose(out_ND, rows, lengths)
        return found_Sk

    def _first_pass(self, order: DraftOrder) -> torch.Tensor:
        read_TF = None
        ids_T, positions_T = self._prepare(order.rows, order.first, order.num_tokens)
        if self._target is not None:
            begins = np.cumsum(order.num_tokens) - order.num_tokens
            starts = np.repeat(order.read_from - begins, order.num_tokens)
            indices = starts + np.arange(len(starts))
            left_TF = self._target.recorded_inputs(int(indices.max()) + 1)
            read_TF = select_rows(left_TF, self._index(indices))
        return self._drafter.first(ids_T, positions_T, read_TF, self._runner.backend)

    def _further_pass(
        self, order: DraftOrder, drafting_rows: npt.NDArray[np.intp], num: int, out_ND: torch.Tensor
    ) -> torch.Tensor:
        first = order.num_known[drafting_rows] - 1 - self.reads_target + num
        ids_N, positions_N = self._prepare(order.rows[drafting_rows], first, np.ones_like(first))
        return self._drafter.further(ids_N, positions_N, out_ND, self._runner.backend)

    def _prepare(
        self, rows: Int32, first: Int32, num_tokens: Int32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepare a pass over tokens of each row from `first` on; return ids and positions, [T]
        each."""
        state, shape = self._state, StepShape(num_tokens, first + num_tokens, 0)
        state.computed_R[self._index(rows)] = self._index(first)
        longest = -(-int(shape.context_lens.max()) // state.block_size)
        inputs = gather_step(state, rows, num_tokens, longest)
        step = replace(self._runner.attention_step(inputs, shape), groups=self._spare.groups)
        self._runner.backend.prepare(step)
        if not self.reads_target:
            return inputs.ids_T, inputs.positions_T
        rows_T = self._index(np.repeat(rows, num_tokens))
        return state.tokens_RM[rows_T, inputs.positions_T + 1].long(), inputs.positions_T

    def _choose(self, out_ND: torch.Tensor, rows: Int32, lengths: Int32) -> torch.Tensor:
        """Choose the next token of rows of these lengths and append it to them. Return it, int32
        [N], -1 where no token could be chosen."""
        rows_N, lengths_N = self._index(rows), self._index(lengths)
        requested = SamplingRequests(rows, self._runner.sampler.flags.at(rows))
        no_prompts = np.zeros(0, np.int64)
        self._ops.serve(Sampling(requested, lengths, no_prompts))
        needs = Needs(has_filters=bool(requested.flags.has_filter.any()))
        vocabulary = self._runner.sampler.vocabulary
        logits_NV = vocabulary.needed(self._drafter.logits(out_ND), needs).float().contiguous()
        samples = SampleInputs(rows_N, rows_N, lengths_N, rows_N)
        ids_N, is_valid_N = vocabulary.choose(self._ops, logits_NV, samples, needs)
        self._state.tokens_RM[rows_N, lengths_N] = ids_N.int()
        return torch.where(is_valid_N, ids_N, -1).int()

    def _lent_blocks(self, order: DraftOrder) -> Int32:
        """Return the changes [D, 4] that append spare blocks to the block tables of rows whose
        draft tokens need more room."""
        size, spare = self._state.block_size, self._spare
        ends = order.num_known + order.num_draft_tokens - 1
        deltas = [
            (group, row, capacity // size + i, first + row * spare.num + i)
            for row, capacity, end in zip(
                order.rows.tolist(), order.capacity.tolist(), ends.tolist(), strict=True
            )
            for group, first in zip(spare.groups, spare.first, strict=True)
            for i in range(-(-(end - capacity) // size))
        ]
        return np.array(deltas, np.int32).reshape(-1, 4)

    @property
    def _device(self) -> torch.device:
        return self._runner.device.device

    def _index(self, values: npt.NDArray[np.integer]) -> torch.Tensor:
        return to_device(values.astype(np.int64), self._device)

    def _rows_of(self, out_ND: torch.Tensor, indices: npt.NDArray[np.intp]) -> torch.Tensor:
        return out_ND if len(indices) == len(out_ND) else select_rows(out_ND, self._index(indices))


class NativeHead:
    """Draft head run by the C++ core, with float32 activations. Raises Untraceable if the core
    cannot run it. The head must be attached to its target first."""

    def __init__(self, head: DraftHead, backend: CpuBackend) -> None:
        self.num_read, self._head, self._backend = head.num_read, head, backend
        self._first = _native(head.first, head.num_read, head, backend)
        self._further = _native(head.further, head.num_out, head, backend)

    def first(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        read_TF: torch.Tensor | None,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """See DraftHead; float32."""
        assert read_TF is not None
        return self._run(self._first, ids_T, positions_T, read_TF)

    def further(
        self,
        ids_R: torch.Tensor,
        positions_R: torch.Tensor,
        out_RE: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """See DraftHead; float32."""
        return self._run(self._further, ids_R, positions_R, out_RE)

    def logits(self, out_RE: torch.Tensor) -> torch.Tensor:
        """See DraftHead."""
        return self._head.logits(out_RE)

    def _run(
        self, made: NativePass, ids: torch.Tensor, positions: torch.Tensor, given: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty(len(ids), self._head.num_out)
        made.run(ids, positions, [out, given.float().contiguous()])
        return out


def _native(compute: Any, width: int, head: DraftHead, backend: CpuBackend) -> NativePass:
    """Trace one of the head's passes. width: of its third input, after ids and positions."""

    def run(ids_T: torch.Tensor, positions_T: torch.Tensor) -> list[torch.Tensor]:
        given = torch.zeros(TRACED_TOKENS, width, dtype=head.dtype)
        return [compute(ids_T, positions_T, given, TracedAttention()), given]

    return NativePass(traced(run), backend)


def native_head(head: DraftHead, backend: AttentionBackend) -> DraftHead | NativeHead:
    """Return the native form of the head if the core can run it, else the head itself."""
    if not isinstance(backend, CpuBackend):
        return head
    try:
        return NativeHead(head, backend)
    except Untraceable as reason:
        logger.warning("The %s runs operation by operation: %s.", head.title, reason)
        return head


class PlainDrafter:
    """Separate draft model, which sees all tokens as text. position_axes: 3 with M-RoPE, else 1."""

    num_read = 0

    def __init__(self, model: DecoderModel, position_axes: int) -> None:
        self._model, self._text = model, StepMedia(num_axes=position_axes)

    def first(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        read_TF: torch.Tensor | None,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """See Drafter."""
        return self._model(ids_T, self._text.positions(positions_T), attention)

    def further(
        self,
        ids_R: torch.Tensor,
        positions_R: torch.Tensor,
        out_RD: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """See Drafter."""
        return self._model(ids_R, self._text.positions(positions_R), attention)

    def logits(self, out_RD: torch.Tensor) -> torch.Tensor:
        """See Drafter."""
        return self._model.logits(out_RD)


def with_spare_blocks(
    config: EngineConfig, spec: ModelSpec, num_blocks: tuple[int, ...]
) -> tuple[int, ...]:
    """Add spare blocks for draft tokens to the pools of the drafter's groups, if any."""
    if spec.drafter is None:
        return num_blocks
    assert config.scheduler.max_num_seqs
    spare, own = config.scheduler.max_num_seqs * spare_blocks(config), len(spec.own_groups)
    return (*num_blocks[:own], *(num + spare for num in num_blocks[own:]))


def make_draft_passes(
    config: EngineConfig,
    spec: ModelSpec,
    drafter: Model | None,
    runner: ModelRunner,
    num_blocks: tuple[int, ...],
) -> DraftPasses | None:
    """Return draft passes over a runner's rows, or None. num_blocks: pools without spare blocks."""
    if drafter is None:
        return None
    own = len(spec.own_groups)
    groups = range(own, len(num_blocks))
    spare = Spare(spare_blocks(config), groups, num_blocks[own:])
    if isinstance(drafter, DraftHead):
        target = runner.model
        assert isinstance(target, Model | NativeModel | OperationModel)
        head = native_head(drafter, runner.backend)
        kernels = _kernels(config, runner, head, target, groups)
        return DraftPasses(head, target, runner, spare, kernels)
    plain = PlainDrafter(native_or_same(drafter, runner.backend), drafter.position_axes)
    return DraftPasses(plain, None, runner, spare, _kernels(config, runner, plain, None, groups))


def warm_draft_passes(
    config: EngineConfig,
    spec: ModelSpec,
    drafter: Model | None,
    runner: ModelRunner,
    num_blocks: tuple[int, ...],
) -> DraftPasses | None:
    """Return the same as `make_draft_passes`, with graphs if the config requests a warm-up."""
    draft = make_draft_passes(config, spec, drafter, runner, num_blocks)
    if draft is not None and config.graph_warmup:
        draft.warm_up(num_speculative_tokens(config))
    return draft


def _kernels(
    config: EngineConfig, runner: ModelRunner, drafter: Drafter, target: Any, groups: range
) -> "Callable[[RowTensors], DraftKernels] | None":
    """Return the constructor of a drafter's passes by kernels; None on a device without kernels."""
    if not runner.rows.ops.can_be_recorded:
        return None
    from quire.runner.drafting.draft_kernels import DraftKernels  # imports Triton

    is_whole = config.compilation != "piecewise" and runner.backend.takes_any_lengths
    is_recorded = is_whole and runner.can_record and not config.enforce_eager
    max_graphs = MAX_DRAFT_GRAPHS if is_recorded else 0
    max_read = max_read_tokens(config)
    return lambda state: DraftKernels(drafter, target, runner, state, groups, max_graphs, max_read)
