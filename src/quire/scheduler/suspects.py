"""Suspects: sequences of a failed step that could not be repeated.

Usually a failed step is repeated in parts, which finds the guilty row (`engine/loop/recovery.py`).
A model with states cannot repeat a step: layers overwrite the state in place, so a second run would
begin with another state. All rows of such a step return to their last states in the index and
become suspects.

Each suspect is planned alone. A suspect that fails alone is guilty. A suspect that reaches its
length in the failed step is cleared, and planned with the others again.
"""

from quire.scheduler.core.plans import InFlightStep
from quire.scheduler.core.sequence import Sequence, State


class Suspects:
    """Suspected sequences. until: the computed length at which each is cleared, in order of
    suspicion."""

    def __init__(self) -> None:
        self.until: dict[Sequence, int] = {}

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self.until.pop(sequence, None)

    def suspect(self, step: InFlightStep) -> None:
        """Suspect all rows of a failed step, including rows that only start with it."""
        lengths = _lengths(step)
        for lease, sequence in zip(step.leases, step.row_sequences, strict=True):
            if lease[0] not in step.omitted and sequence.state is not State.ENDED:
                self.until[sequence] = lengths.get(sequence, 1)

    def are_guilty(self, step: InFlightStep) -> bool:
        """Return whether a failed step held suspects of one request and no other row."""
        found = list(_lengths(step))
        is_one = len({sequence.request.request_id for sequence in found}) == 1
        return is_one and all(sequence in self.until for sequence in found)

    def acquit(self, step: InFlightStep) -> None:
        """Clear the suspects that a successful step has computed far enough."""
        for sequence, length in _lengths(step).items():
            if length >= self.until.get(sequence, length + 1):
                del self.until[sequence]


def _lengths(step: InFlightStep) -> dict[Sequence, int]:
    """Return the sequences that a step computed, with their computed lengths after it."""
    plan = step.plan.without_drafts
    ends = (plan.computed_bound + plan.num_tokens).tolist()
    rows = zip(plan.rows.tolist(), step.row_sequences, ends, strict=False)
    return {sequence: end for row, sequence, end in rows if row not in step.omitted}
