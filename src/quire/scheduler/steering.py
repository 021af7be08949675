"""Steering: clients change the priority of their requests, and pause and resume them.

A paused request keeps its known tokens and loses its rows and blocks. Its computed blocks stay in
the prefix cache while there is room. It resumes as a preempted request does. Every pause ends, by a
`Steer` message or when its time is over.
"""

from collections.abc import Mapping

from quire.base.messages import Steer
from quire.scheduler.core.extension import Extension, Handler, StepExtension
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.sequence import Blocker, Sequence, State


class Steering(Extension, StepExtension):
    """Handler of `Steer` messages."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._paused: dict[str, float] = {}  # end of each pause, by request id

    def handlers(self) -> Mapping[type, Handler]:
        """See Extension."""
        return {Steer: self._steer}

    def expire(self, now: float) -> None:
        """Resume the requests whose pause is over."""
        for request_id, end_s in list(self._paused.items()):
            if end_s <= now:
                self._resume(request_id)

    def _steer(self, message: Steer, now: float) -> None:
        request_id = message.request_id
        sequence = self._lifecycle.sequences.get(request_id)
        if sequence is None:
            return  # the request has ended
        if message.priority is not None:
            self._lifecycle.set_priority(sequence, message.priority)
        if message.pause_s is not None and message.pause_s > 0:
            self._pause(sequence, now)
            self._paused[request_id] = now + message.pause_s
            self._note_next()
        elif message.pause_s is not None:
            self._resume(request_id)

    def _pause(self, sequence: Sequence, now: float) -> None:
        """Park all unfinished sequences of a request, and preempt those with a row."""
        if any(member.row >= 0 for member in sequence.members):
            self._lifecycle.preempt(sequence, sequence.request.request_id, now)
        for member in sequence.members:
            if member.state is State.ENDED:
                continue
            if member.state is not State.PARKED:
                self._lifecycle.park(member)
            member.blockers |= {Blocker.PAUSED}

    def _resume(self, request_id: str) -> None:
        """Queue the sequences of a paused request, unless something else blocks them."""
        self._paused.pop(request_id, None)
        self._note_next()
        sequence = self._lifecycle.sequences.get(request_id)
        for member in () if sequence is None else sequence.members:
            if Blocker.PAUSED not in member.blockers:
                continue
            member.blockers -= {Blocker.PAUSED}
            if member.state is State.PARKED and member.has_something_to_compute:
                self._lifecycle.unpark(member)

    def _note_next(self) -> None:
        """Set `next_s` to the end of the next pause."""
        self.next_s = min(self._paused.values(), default=None)
