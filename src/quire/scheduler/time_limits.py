"""Deadlines of requests, and the errors for requests that miss them."""

import heapq
from collections.abc import Mapping

from quire.base.errors import TIMED_OUT
from quire.base.step_outputs import Failure, Finish
from quire.scheduler.core.sequence import Sequence


class TimeLimits:
    """Deadlines of the requests with a time limit."""

    def __init__(self) -> None:
        self.deadlines: list[tuple[float, int, str]] = []  # heap of (time, arrival, request id)

    def add(self, sequence: Sequence) -> None:
        """Add the deadline of a new request, if it has one."""
        request = sequence.request
        if request.timeout_s > 0:
            began = request.received_s or sequence.arrival_s
            entry = began + request.timeout_s, sequence.arrival, request.request_id
            heapq.heappush(self.deadlines, entry)

    def next_s(self, sequences: Mapping[str, Sequence]) -> float | None:
        """Return the next deadline, or None."""
        while self.deadlines and self._alive(sequences, *self.deadlines[0][1:]) is None:
            heapq.heappop(self.deadlines)
        return self.deadlines[0][0] if self.deadlines else None

    def take_late(
        self, sequences: Mapping[str, Sequence], now: float
    ) -> list[tuple[Sequence, Finish]]:
        """Return the requests that missed their deadline, with the errors for their clients. Remove
        their deadlines."""
        late = []
        while self.deadlines and self.deadlines[0][0] <= now:
            sequence = self._alive(sequences, *heapq.heappop(self.deadlines)[1:])
            if sequence is not None:
                late.append((sequence, Finish("timeout", error=_failure(sequence, now))))
        return late

    @staticmethod
    def _alive(sequences: Mapping[str, Sequence], arrival: int, request_id: str) -> Sequence | None:
        """Return the sequence of a deadline, or None if it has ended. A new request may have its
        id."""
        sequence = sequences.get(request_id)
        return sequence if sequence is not None and sequence.arrival == arrival else None


def _failure(sequence: Sequence, now: float) -> Failure:
    num_tokens = sum(member.num_output_tokens for member in sequence.members)
    began = sequence.request.received_s or sequence.arrival_s
    return Failure(
        TIMED_OUT,
        f"the request took longer than its timeout_s={sequence.request.timeout_s:g}"
        f" ({now - began:.3f} s, {num_tokens} output tokens); raise timeout_s, lower"
        " max_tokens, or try again when the server is less busy.",
    )
