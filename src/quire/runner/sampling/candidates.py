"""Log-probabilities that rows request: of the tokens that they choose, and of their prompts.

A step reports them as three tensors for each group of positions (`logprob_tensors`): token ids,
log-probabilities, ranks. The chosen token, or the prompt's, comes first, then its candidates. These
are the most probable tokens, or the tokens that the request names.

Shape legend: N sampling rows of the step (or slots for them), P positions, C candidates, T tokens
of the step, D model dim, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.base.plan import Candidates, Plan, RowStart, StepResult
from quire.ops.host.host_memory import to_device
from quire.ops.rows.row_state import RowTensors
from quire.ops.rows.step_inputs import SampleInputs
from quire.ops.sampling.logprobs import TokenLogprobs, named_logprobs, token_logprobs
from quire.runner.attachment import Attachment, ForwardPart, SamplingFeature, SamplingPart
from quire.runner.step_ops import ALL_LOGPROBS, NO_LOGPROBS, Needs, SamplingRequests

Int64 = npt.NDArray[np.int64]

SCORED_AT_ONCE = 64  # positions whose logits exist at the same time; a chunk's would not fit
NUM_TENSORS = 3  # of a group of positions


def logprob_tensors(found: TokenLogprobs) -> list[torch.Tensor]:
    """Return the tensors of log-probabilities that are sent to the host."""
    return [found.token_ids, found.logprobs, found.ranks]


def to_candidates(tensors: list[torch.Tensor], counts: Int64) -> list[Candidates]:
    """Return candidates of each row, from `logprob_tensors` on the host. counts: number of
    candidates that each row requested, besides its own token."""
    ids, logprobs, ranks = tensors[0].int().numpy(), tensors[1].numpy(), tensors[2].tolist()
    return [
        Candidates(ids[r, : count + 1], logprobs[r, : count + 1], ranks[r])
        for r, count in enumerate(counts.tolist())
    ]


def padded(lists: Sequence[Sequence[int]]) -> tuple[Int64, Int64]:
    """Return the lists' lengths, [lists], and the lists padded with 0, [lists, longest]."""
    counts = np.array([len(ids) for ids in lists], np.int64)
    ids = np.zeros((len(lists), int(counts.max())), np.int64)
    for first_index, each in enumerate(lists):
        ids[first_index, : len(each)] = each
    return counts, ids


# ---- of chosen tokens ----------------------------------------------------------------------------


@dataclass(frozen=True)
class LogprobGroup:
    """Log-probabilities that a group of sampling rows requests. counts: candidates of each row.
    indices: of the rows among the step's sampling rows. is_masked: only allowed tokens are
    candidates. token_ids: the candidates, [places, C], padded; None: the most probable tokens."""

    counts: Int64
    indices: Int64
    is_masked: bool = False
    token_ids: Int64 | None = None


class CandidatesOfRows(SamplingFeature):
    """Sampling feature for log-probabilities of chosen tokens, and for tokens that requests name as
    candidates (`logprob_token_ids`)."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._named: dict[int, list[int]] = {}

    def start(self, start: RowStart) -> None:
        """See SamplingFeature."""
        if start.params.logprob_token_ids:
            self._named[start.row] = start.params.logprob_token_ids

    def release(self, row: int) -> None:
        """See SamplingFeature."""
        self._named.pop(row, None)

    def copy(self, parent: int, child: int) -> None:
        """See SamplingFeature."""
        if parent in self._named:
            self._named[child] = self._named[parent]

    def part_of(self, needs: Needs, requested: SamplingRequests | None) -> "CandidatesPart | None":
        """See SamplingFeature."""
        if needs.num_candidates == NO_LOGPROBS:
            return None
        return CandidatesPart(needs, requested, [] if requested is None else self.groups(requested))

    def groups(self, requested: SamplingRequests) -> list[LogprobGroup]:
        """Group the rows that request log-probabilities. Few candidates, the whole vocabulary,
        masked beams and named tokens are separate groups."""
        nums, found = requested.flags.num_logprobs, list[LogprobGroup]()
        masked = requested.masked_beams
        named = np.isin(requested.rows, list(self._named))
        is_few = (nums >= 0) & ~named
        for is_in_part in is_few & ~masked, nums == ALL_LOGPROBS, is_few & masked:
            indices = np.flatnonzero(is_in_part)
            if len(indices):
                counts = np.where(nums == ALL_LOGPROBS, self._vocab_size, nums)[indices]
                is_masked = bool(masked[indices[0]])
                found.append(LogprobGroup(counts, indices, is_masked))
        if named.any():
            counts, ids = padded([self._named[row] for row in requested.rows[named].tolist()])
            found.append(LogprobGroup(counts, np.flatnonzero(named), token_ids=ids))
        return found


class CandidatesPart(SamplingPart):
    """Log-probabilities of a step's rows by group, or without `requested` of all rows, if
    recorded."""

    def __init__(
        self, needs: Needs, requested: SamplingRequests | None, groups: list[LogprobGroup]
    ) -> None:
        self._needs, self._requested, self._groups = needs, requested, groups
        self._raw: list[torch.Tensor] = []
        self._tensors: list[torch.Tensor] = []

    def before(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Save the rows' raw logits [N, V], as a copy if masks will overwrite them."""
        if self._requested is None:
            is_changed = self._needs.has_masks and not self._needs.makes_copy
            self._raw = [logits_NV.clone() if is_changed else logits_NV]
        else:
            indices = (to_device(part.indices, logits_NV.device) for part in self._groups)
            self._raw = [logits_NV.index_select(0, index) for index in indices]
        return logits_NV

    def chosen(
        self, logits_NV: torch.Tensor, ids_N: torch.Tensor, samples: SampleInputs
    ) -> torch.Tensor:
        """Compute log-probabilities of chosen tokens [N] and candidates, from logits [N, V]."""
        raw, self._raw, self._tensors = self._raw, [], []
        if self._requested is None:
            found = token_logprobs(raw[0], ids_N, self._needs.num_candidates)
            self._tensors = logprob_tensors(found)
            return ids_N
        for part, raw_NV in zip(self._groups, raw, strict=True):
            index = to_device(part.indices, ids_N.device)
            count, ids = int(part.counts.max()), ids_N.index_select(0, index)
            if part.token_ids is not None:
                found = named_logprobs(raw_NV, ids, to_device(part.token_ids, ids_N.device))
            elif part.is_masked:
                found = token_logprobs(logits_NV.index_select(0, index), ids, count, raw_NV)
            else:
                found = token_logprobs(raw_NV, ids, count)
            self._tensors += logprob_tensors(found)
        return ids_N

    def found(self) -> list[torch.Tensor]:
        """See SamplingPart."""
        return self._tensors

    def read(
        self, result: StepResult, arrived: list[torch.Tensor], *, is_recorded: bool
    ) -> StepResult:
        """Add candidates of the rows that have a token."""
        found = self.by_position(arrived, is_of_all=is_recorded)
        assert self._requested is not None
        by_row = {int(self._requested.rows[n]): each for n, each in found.items()}
        by_row = {row: each for row, each in by_row.items() if row not in result.row_errors}
        return result.replace(candidates=by_row)

    def by_position(
        self, arrived: list[torch.Tensor], *, is_of_all: bool = False
    ) -> dict[int, Candidates]:
        """Return candidates by position among the sampling rows. is_of_all: whether the tensors
        cover all rows instead of each group."""
        found: dict[int, Candidates] = {}
        for i, part in enumerate(self._groups):
            tensors = arrived[NUM_TENSORS * i : NUM_TENSORS * (i + 1)]
            if is_of_all:
                index = torch.from_numpy(part.indices)
                tensors = [tensor[index] for tensor in arrived]
            items = to_candidates(tensors, part.counts)
            found.update(zip(part.indices.tolist(), items, strict=True))
        return found


# ---- of prompts ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scored:
    """Positions first..last-1 of a row whose next tokens are known and get log-probabilities.
    first_index: index of `first` among the step's known tokens. counts: candidates of each
    position. ids: named candidates, [P, C], padded; None: the most probable tokens."""

    row: int
    first: int
    last: int
    first_index: int
    counts: Int64
    ids: Int64 | None


@dataclass
class _Prompt:
    """Prompt that gets log-probabilities: its number of tokens so far, its number of candidates,
    and its named candidates with their counts."""

    length: int
    num: int
    named: tuple[Int64, Int64] | None


class PromptScores(SamplingFeature):
    """Sampling feature for log-probabilities of prompts; an attachment while a row requests them.

    attachments: of the runner. state: of the rows. logits: computes [P, V] of hidden states [P, D].
    """

    def __init__(
        self,
        attachments: list[Attachment],
        vocab_size: int,
        state: RowTensors,
        logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.at_rest = ForwardPart()
        self._attachments, self._vocab_size = attachments, vocab_size
        self._state, self._logits = state, logits
        self._prompts: dict[int, _Prompt] = {}  # by row

    def start(self, start: RowStart) -> None:
        """See SamplingFeature."""
        params = start.params
        if params.prompt_logprobs is None:
            return
        num, rows = params.prompt_logprobs, params.named_in_prompt
        self._prompts[start.row] = _Prompt(
            start.num_prompt_tokens,
            self._vocab_size if num == ALL_LOGPROBS else num,
            padded(rows) if rows else None,
        )
        if self not in self._attachments:
            self._attachments.append(self)

    def release(self, row: int) -> None:
        """See SamplingFeature."""
        if self._prompts.pop(row, None) is not None and not self._prompts:
            self._attachments.remove(self)

    def prepare(self, plan: Plan) -> "ScoresPart | None":
        """See Attachment."""
        for host in plan.host_tokens:
            if host.is_prompt and host.row in self._prompts:
                self._prompts[host.row].length = host.position + len(host.token_ids)
        scores = self._of(plan.without_drafts)
        return ScoresPart(scores, self._state, self._logits) if scores else None

    def _of(self, plan: Plan) -> list[Scored]:
        """Return the parts of a plan's step that get log-probabilities, by row and position."""
        found: list[Scored] = []
        ends = np.cumsum(plan.num_tokens)
        for i, row in enumerate(plan.rows.tolist()):
            prompt = self._prompts.get(row)
            if prompt is None:
                continue
            first, num_tokens = int(plan.computed_bound[i]), int(plan.num_tokens[i])
            last, first_index = (
                min(first + num_tokens, prompt.length - 1),
                int(ends[i]) - num_tokens,
            )
            for at in range(first, last, SCORED_AT_ONCE):
                end = min(last, at + SCORED_AT_ONCE)
                counts, ids = np.full(end - at, prompt.num), None
                if prompt.named is not None:
                    counts, ids = (each[at:end] for each in prompt.named)
                found.append(Scored(row, at, end, first_index + at - first, counts, ids))
        return found


class ScoresPart(ForwardPart):
    """Log-probabilities of the prompt tokens after some positions of a step."""

    def __init__(
        self,
        scores: list[Scored],
        state: RowTensors,
        logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._scores, self._state, self._logits = scores, state, logits
        self.num_tensors = NUM_TENSORS * len(scores)

    def after(self, hidden_TD: torch.Tensor) -> list[torch.Tensor]:
        """See ForwardPart."""
        return [tensor for part in self._scores for tensor in self._score(hidden_TD, part)]

    def _score(self, hidden_TD: torch.Tensor, part: Scored) -> list[torch.Tensor]:
        logits_PV = self._logits(hidden_TD[part.first_index : part.first_index + len(part.counts)])
        targets_P = self._state.tokens_RM[part.row, part.first + 1 : part.last + 1].long()
        if part.ids is None:
            return logprob_tensors(token_logprobs(logits_PV, targets_P, int(part.counts[0])))
        named = to_device(part.ids, logits_PV.device)
        return logprob_tensors(named_logprobs(logits_PV, targets_P, named))

    def read(self, result: StepResult, arrived: list[torch.Tensor]) -> StepResult:
        """Add log-probabilities of prompts, by row."""
        found: dict[int, list[Candidates]] = {}
        for i, part in enumerate(self._scores):
            tensors = arrived[NUM_TENSORS * i : NUM_TENSORS * (i + 1)]
            found.setdefault(part.row, []).extend(to_candidates(tensors, part.counts))
        return result.replace(prompt_candidates=found)
