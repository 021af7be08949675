"""A step that was given to the device, and what the host makes of its answer."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from quire.base.plan import Candidates, Plan, StepResult
from quire.runner.device import Arrival
from quire.runner.plan_parts import Scored
from quire.runner.row_errors import reasons_of, unservable
from quire.runner.sampler import WantedLogprobs
from quire.runner.step_ops import Asked


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
