"""Requests that must be done by a certain time; late ones are dropped and their blocks freed."""

import heapq
from typing import TYPE_CHECKING

from quire.base.errors import TIMED_OUT
from quire.base.step_outputs import Failure, Finish
from quire.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler


class TimeLimits:
    """The times at which requests with a limit are late."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []  # when, arrival, request id

    def add(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.timeout_s > 0:
            began = request.received_s or sequence.arrival_s
            entry = began + request.timeout_s, sequence.arrival, request.request_id
            heapq.heappush(self._heap, entry)

    @property
    def next_s(self) -> float | None:
        """When the next may be late; None if no request has a limit."""
        return self._heap[0][0] if self._heap else None

    def drop_late(self, scheduler: "Scheduler", now: float) -> None:
        """End requests whose time is over, with an error that tells where the time went."""
        while self._heap and self._heap[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._heap)
            sequence = scheduler.sequences.get(request_id)
            if sequence is None or sequence.arrival != arrival:
                continue
            members = scheduler.members(sequence)
            num_tokens = sum(member.num_output_tokens for member in members)
            began = sequence.request.received_s or sequence.arrival_s
            message = (
                f"the request took longer than its timeout_s={sequence.request.timeout_s:g}"
                f" ({now - began:.3f} s, {num_tokens} output tokens); raise timeout_s, lower"
                " max_tokens, or try again when the server is less busy."
            )
            finish = Finish("timeout", error=Failure(TIMED_OUT, message))
            for member in members:
                if member.finish_reason is None:
                    scheduler.late.append((member, finish))
                    scheduler.finish(member, "timeout", now)
