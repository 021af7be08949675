"""Return values of the scheduler's doors."""

from typing import Any

import numpy as np
import numpy.typing as npt

from quire.base.errors import RequestError
from quire.base.events import Event
from quire.base.kv_orders import Order
from quire.base.messages import Request
from quire.base.plan import Candidates, FrozenRecord, Plan
from quire.base.step_outputs import BeamOutput, Finish, RowName, SequenceUpdate, StepOutputs
from quire.scheduler.beams import Hypothesis
from quire.scheduler.core.sequence import Int32, Int64, Sequence

NO_OUTPUTS = StepOutputs()
NOTHING: Int64 = np.empty(0, np.int64)


class Decisions(FrozenRecord, frozen=True):
    """All decisions of one call of a door.

    plan: from `schedule`; None if nothing can be planned before another result. sampling: sequences
    of its sample_rows, object [num_sampled]. outputs: for clients. omitted: from `update`; for
    each plan still in flight, oldest first, the rows whose results will be void. refusal: from
    `add`. orders: for stores. notes: for subscribers (`Scheduler.subscribe`). next_s: time when
    something becomes due, on the clock of `now`; None for never.
    """

    plan: Plan | None = None
    sampling: npt.NDArray[np.object_] | None = None
    outputs: StepOutputs = NO_OUTPUTS
    omitted: tuple[frozenset[int], ...] = ()
    refusal: RequestError | None = None
    events: list[Event] = []
    orders: list[Order] = []
    notes: list[Any] = []
    next_s: float | None = None


class OutputsBuilder:
    """Builder of outputs: tokens in columns, and an update for each sequence with more than one
    token to report. ended: sequences that have ended, with their updates."""

    def __init__(self) -> None:
        self._rows = self._arrivals = NOTHING
        self._token_ids: Int32 = NO_OUTPUTS.token_ids
        self._names: list[RowName] = []
        self.ended: list[tuple[Sequence, SequenceUpdate]] = []
        self._updates: dict[int, SequenceUpdate] = {}  # by arrival
        self._holders: list[tuple[int, int]] = []  # row and arrival of sequences with an update
        self._candidates: dict[int, tuple[Sequence, list[Candidates]]] = {}  # by arrival

    def update_of(self, sequence: Sequence) -> SequenceUpdate:
        """Return the update of a sequence, for reports other than one token."""
        found = self._updates.get(sequence.arrival)
        if found is None:
            found = self._updates[sequence.arrival] = SequenceUpdate(
                sequence.request.request_id,
                sequence.index,
                num_cached_tokens=max(0, sequence.num_cached_tokens),
                num_preemptions=sequence.num_preemptions,
            )
            if sequence.row >= 0:  # otherwise it has no token in the columns
                self._holders.append((sequence.row, sequence.arrival))
        return found

    def set_tokens(self, rows: Int64, arrivals: Int64, token_ids: Int32) -> None:
        """Set one sampled token for the sequence of each row. All arguments: [N]."""
        self._rows, self._arrivals, self._token_ids = rows, arrivals, token_ids

    def name_row(self, row: int, sequence: Sequence) -> None:
        """Report the sequence that was given a row with this step."""
        num_cached = max(0, sequence.num_cached_tokens)
        self._names.append(RowName(row, sequence.request.request_id, sequence.index, num_cached))

    def set_candidates(self, sequence: Sequence, candidates: list[Candidates]) -> None:
        """Add the log-probabilities of the tokens that a sequence gets in this step."""
        self._candidates[sequence.arrival] = sequence, candidates

    def finish(self, sequence: Sequence, finish: Finish) -> None:
        """Report that a sequence has ended."""
        update = self.update_of(sequence)
        update.finish = finish
        self.ended.append((sequence, update))

    def finish_search(self, leader: Sequence, hypotheses: list[Hypothesis]) -> None:
        """End a request with all results of its beam search."""
        update = self.update_of(leader)
        update.beams = [_beam(leader.request, hypothesis) for hypothesis in hypotheses]
        update.finish = update.beams[0].finish
        update.prefix = leader.report

    def build(self) -> StepOutputs:
        rows, token_ids = self._rows.astype(np.int32), self._token_ids
        arrivals = self._arrivals
        if self._candidates:
            with_token = {arrival for arrival, notice in self._updates.items() if notice.token_ids}
            in_columns = set(arrivals.tolist())
            with_token |= in_columns
            for arrival, (sequence, candidates) in self._candidates.items():
                if arrival in with_token:
                    num = len(self.update_of(sequence).token_ids) + (arrival in in_columns)
                    self.update_of(sequence).candidates = candidates[:num]
        if self._holders and len(rows):
            stays = self._move_to_updates()
            rows, token_ids = rows[stays], token_ids[stays]
        return StepOutputs(rows, token_ids, self._names, list(self._updates.values()))

    def _move_to_updates(self) -> npt.NDArray[np.bool_]:
        """Move the tokens of sequences with an update from the columns to it. Return which entries
        of the columns stay, [N]."""
        stays, place_of_row = np.ones(len(self._rows), bool), np.full(self._rows.max() + 1, -1)
        place_of_row[self._rows] = np.arange(len(self._rows))
        for row, arrival in self._holders:
            place = place_of_row.item(row) if row < len(place_of_row) else -1
            if place >= 0 and self._arrivals.item(place) == arrival:
                token_ids = self._updates[arrival].token_ids
                token_ids.insert(0, self._token_ids.item(place))  # before accepted drafts
                stays[place] = False
        return stays


def _beam(request: Request, hypothesis: Hypothesis) -> BeamOutput:
    last = hypothesis.token_ids[-1]
    is_named = hypothesis.is_stop and last not in request.eos_token_ids
    return BeamOutput(
        list(hypothesis.token_ids),
        hypothesis.score,
        hypothesis.cumulative_logprob,
        Finish(hypothesis.finish_reason, last if is_named else None),
    )
