"""Progress within a step, reported to the watcher of the core."""

from collections.abc import Callable


class StepProgress:
    """What works for long within one step calls `tell` at each sign of progress, from any thread.

    listener: called with the seconds that may pass from then on without another sign; 0.0 is what a
    step may take. The owner of a heartbeat sets it.
    """

    def __init__(self) -> None:
        self.listener: Callable[[float], None] = lambda limit_s: None

    def tell(self, limit_s: float = 0.0) -> None:
        """Report progress. limit_s: of the phase that begins, if it takes longer than a step."""
        self.listener(limit_s)
