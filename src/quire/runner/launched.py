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
    between them.
    """

    plan: Plan
    arrival: Arrival
    asked: Asked
    wanted: list[WantedLogprobs]
    scores: list[Scored]
    is_recorded: bool
    forward: Arrival | None = None
    errors: dict[int, str] = field(default_factory=dict)

    def is_done(self) -> bool:
        return self.arrival.is_done()

    def result(self) -> StepResult:
        """Wait for it. Raises what the device has met with meanwhile; then it cannot go on."""
        tokens_N, *rest = self.arrival.wait()
        tokens = tokens_N.numpy()[: len(self.plan.sample_rows)].reshape(-1, 1).copy()
        reasons = self._reasons(tokens[:, 0])
        num_scores = 3 * len(self.scores)
        candidates, scores = rest[: len(rest) - num_scores], rest[len(rest) - num_scores :]
        return StepResult(
            step_id=self.plan.step_id,
            token_ids=np.maximum(tokens, 0),
            num_accepted=np.ones(len(tokens), np.int32),
            candidates={
                row: item
                for row, item in self._candidates(candidates).items()
                if row not in reasons
            },
            prompt_candidates=self._prompt_candidates(scores),
            row_errors=reasons,
            unservable_rows=tuple(row for row, why in reasons.items() if why != _NOT_FINITE),
            duration_s=self.arrival.duration_s()
            + (0.0 if self.forward is None else self.forward.duration_s()),
        )

    def _reasons(self, tokens_N: npt.NDArray[np.int32]) -> dict[int, str]:
        """Say of rows without a token why there is none."""
        rows, asked, told = self.plan.sample_rows, self.asked, self.errors
        failed = rows[tokens_N < 0].tolist() + [row for row in rows.tolist() if row in told]
        if not failed:
            return {}
        processed = [] if asked.extras is None else asked.extras.processed
        reasons = {int(rows[n]): _NOTHING_LEFT for n in [*asked.spans, *processed]}
        reasons |= {int(rows[n]): _NOTHING_ALLOWED for n in asked.masked}
        return {row: told.get(row) or reasons.get(row, _NOT_FINITE) for row in failed}

    def _candidates(self, arrived: list[torch.Tensor]) -> dict[int, Candidates]:
        found: dict[int, Candidates] = {}
        for i, part in enumerate(self.wanted):
            tensors = arrived[3 * i : 3 * i + 3]
            if self.is_recorded:
                index = torch.from_numpy(part.places)
                tensors = [tensor[index] for tensor in arrived]
            items = to_candidates(tensors, part.counts)
            found.update(zip(part.rows.tolist(), items, strict=True))
        return found

    def _prompt_candidates(self, arrived: list[torch.Tensor]) -> dict[int, list[Candidates]]:
        found: dict[int, list[Candidates]] = {}
        for i, part in enumerate(self.scores):
            items = to_candidates(arrived[3 * i : 3 * i + 3], np.full(part.count, part.num))
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
