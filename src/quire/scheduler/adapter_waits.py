"""Requests that wait until their adapter is on the device.

The engine marks such requests (`Request.awaits_adapter`) when they arrive. They are parked, so
that no plan needs an adapter that is missing, and other requests continue. `AdapterReady` lets a
request into the queue.
"""

from collections.abc import Mapping
from enum import StrEnum

from quire.base.messages import AdapterReady
from quire.base.step_outputs import Failure, Finish
from quire.scheduler.core.extension import Extension, Handler
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.sequence import Sequence, State


class AdapterBlocker(StrEnum):
    """Reason why a parked sequence waits."""

    LOADING = "adapter"


class AdapterWaits(Extension):
    """Handler of `AdapterReady` messages."""

    fields = ("awaits_adapter",)

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def handlers(self) -> Mapping[type, Handler]:
        """See Extension."""
        return {AdapterReady: self._take}

    def enter(self, sequence: Sequence, now: float) -> None:
        """Park a sequence until its adapter is ready."""
        sequence.blockers |= {AdapterBlocker.LOADING}

    def _take(self, message: AdapterReady, now: float) -> None:
        sequence = self._lifecycle.sequences.get(message.request_id)
        if sequence is None or AdapterBlocker.LOADING not in sequence.blockers:
            return  # the request has ended
        if message.error is not None:
            failure = Failure.of_request(message.error)
            self._lifecycle.drop(sequence, Finish("error", error=failure), now)
            return
        sequence.blockers -= {AdapterBlocker.LOADING}
        if sequence.state is State.PARKED and sequence.has_something_to_compute:
            self._lifecycle.unpark(sequence)
