"""A step that was given to the device, and what the host makes of its answer."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from quire.base.plan import Candidates, Plan, StepResult
from quire.runner.device import Arrival
from quire.runner.plan_parts import Scored
from quire.runner.sampler import WantedLogprobs
from quire.runner.step_ops import Asked

_NOT_FINITE = "The model's logits for this sequence are not finite (NaN or infinity)."
_NOTHING_LEFT = (
    "No token can be chosen: the model's logits are not finite, or allowed_token_ids, bad_words,"
    " min_tokens, logit_bias and logits_processors together leave no token."
)
_NOTHING_ALLOWED = (
    "No token can be chosen: the model's logits are not finite, or the grammar of"
    " structured_outputs (with allowed_token_ids, bad_words, min_tokens, logit_bias and"
    " logits_processors, if they are set) leaves no token."
)


@dataclass(frozen=True)
class Launched:
    """A step on its way. tokens come first of what arrives, then candidates, then scores.

    wanted: which rows asked for candidates; these came for all rows if the step was recorded.
    forward: of a step in two halves, the first. errors: what the host found wrong with rows
    between them. pools: instead of these the numbers that prompts came to arrive.
    """

    plan: Plan
    arrival: Arrival
    asked: Asked
    wanted: list[WantedLogprobs]
    scores: list[Scored]
    is_recorded: bool
    forward: Arrival | None = None
    errors: dict[int, str] = field(default_factory=dict)
    pools: bool = False

    def is_done(self) -> bool:
        return self.arrival.is_done()

    def result(self) -> StepResult:
        """Wait for it. Raises what the device has met with meanwhile; then it cannot go on."""
        tokens_N, *rest = self.arrival.wait()
        rows = self.plan.sample_rows
        tokens = tokens_N.numpy()[: len(rows)].reshape(-1, 1).copy()
        reasons = reasons_of(rows, tokens[:, 0], self.asked, self.errors)
        num_scores = 3 * len(self.scores)
        found, scores = rest[: len(rest) - num_scores], rest[len(rest) - num_scores :]
        candidates = read_candidates(found, self.wanted, is_of_all=self.is_recorded)
        pooled = rest[0].numpy() if self.pools and rest else ()
        return StepResult(
            step_id=self.plan.step_id,
            pooled={int(row): each.copy() for row, each in zip(rows, pooled, strict=False)},
            token_ids=np.maximum(tokens, 0),
            num_accepted=np.ones(len(tokens), np.int32),
            candidates={
                int(rows[n]): item for n, item in candidates.items() if rows[n] not in reasons
            },
            prompt_candidates=read_scores(scores, self.scores),
            row_errors=reasons,
            unservable_rows=unservable(reasons),
            duration_s=self.arrival.duration_s()
            + (0.0 if self.forward is None else self.forward.duration_s()),
        )


def reasons_of(
    rows_N: npt.NDArray[np.int32],
    tokens_N: npt.NDArray[np.int32],
    asked: Asked,
    told: dict[int, str],
) -> dict[int, str]:
    """Say of rows without a token (-1) why there is none. asked: by these rows, at its first
    places; told: what is known to be wrong with rows."""
    failed = rows_N[tokens_N < 0].tolist() + [row for row in rows_N.tolist() if row in told]
    if not failed:
        return {}
    processed = [] if asked.extras is None else asked.extras.processed
    reasons = {int(asked.rows[n]): _NOTHING_LEFT for n in [*asked.spans, *processed]}
    reasons |= {int(asked.rows[n]): _NOTHING_ALLOWED for n in asked.masked}
    return {row: told.get(row) or reasons.get(row, _NOT_FINITE) for row in failed}


def unservable(reasons: dict[int, str]) -> tuple[int, ...]:
    """List the rows that have no token through no fault of the step."""
    return tuple(row for row, why in reasons.items() if why != _NOT_FINITE)


def read_candidates(
    arrived: list[torch.Tensor], wanted: list[WantedLogprobs], *, is_of_all: bool = False
) -> dict[int, Candidates]:
    """Read candidates, by place among those that sampled. is_of_all: they came for all of these,
    not part by part for those that wanted any."""
    found: dict[int, Candidates] = {}
    for i, part in enumerate(wanted):
        tensors = arrived[3 * i : 3 * i + 3]
        if is_of_all:
            index = torch.from_numpy(part.places)
            tensors = [tensor[index] for tensor in arrived]
        items = to_candidates(tensors, part.counts)
        found.update(zip(part.places.tolist(), items, strict=True))
    return found


def read_scores(arrived: list[torch.Tensor], scores: list[Scored]) -> dict[int, list[Candidates]]:
    """Read log-probabilities of prompts, by row."""
    found: dict[int, list[Candidates]] = {}
    for i, part in enumerate(scores):
        items = to_candidates(arrived[3 * i : 3 * i + 3], part.counts)
        found.setdefault(part.row, []).extend(items)
    return found


@dataclass(frozen=True)
class Settled:
    """A step that is over."""

    found: StepResult

    def is_done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.found


def to_candidates(tensors: list[torch.Tensor], counts: npt.NDArray[np.int64]) -> list[Candidates]:
    """Return candidates of each row, from `logprob_tensors` on the host. counts: how many
    candidates each row asked for, beside its own token."""
    ids, logprobs, ranks = tensors[0].int().numpy(), tensors[1].numpy(), tensors[2].tolist()
    return [
        Candidates(ids[r, : count + 1], logprobs[r, : count + 1], ranks[r])
        for r, count in enumerate(counts.tolist())
    ]
