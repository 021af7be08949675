"""Sequences of which one may have made a step fail: each is alone in its plans until it has passed.

A step that fails is run again in parts, which finds the guilty row (engine/bisect.py). Where layers
remember a state, that is impossible: it is written in place, so a second run would not begin with
the one that the first began with. So all rows of the step go back to the last states that the index
has of them, and are suspects. Whoever fails alone is guilty; who gets as far as in the step that
failed is not, and is planned with others again.
"""

from quire.scheduler.in_flight import InFlightStep
from quire.scheduler.sequence import Sequence, State


class Suspects:
    """until: by sequence, longest suspected first, how many tokens it has to compute to be none."""

    def __init__(self) -> None:
        self.until: dict[Sequence, int] = {}

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence, which has ended."""
        self.until.pop(sequence, None)

    def suspect(self, step: InFlightStep) -> None:
        """Suspect all rows of a step that failed, also those that only begin with it."""
        lengths = _lengths(step)
        for lease, sequence in zip(step.leases, step.row_sequences, strict=True):
            if lease[0] not in step.left_out and sequence.state is not State.ENDED:
                self.until[sequence] = lengths.get(sequence, 1)

    def are_guilty(self, step: InFlightStep) -> bool:
        """Tell whether only rows of one request were in a step that failed, which was suspected."""
        found = list(_lengths(step))
        is_one = len({sequence.request.request_id for sequence in found}) == 1
        return is_one and all(sequence in self.until for sequence in found)

    def acquit(self, step: InFlightStep) -> None:
        """Take note of a step that did not fail."""
        for sequence, length in _lengths(step).items():
            if length >= self.until.get(sequence, length + 1):
                del self.until[sequence]


def _lengths(step: InFlightStep) -> dict[Sequence, int]:
    """Return who computed something in a step, and how many tokens they had computed then."""
    plan = step.plan.without_drafts
    ends = (plan.computed_bound + plan.num_tokens).tolist()
    rows = zip(plan.rows.tolist(), step.row_sequences, ends, strict=False)
    return {sequence: end for row, sequence, end in rows if row not in step.left_out}
