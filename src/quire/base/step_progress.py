"""Progress within a step, reported to the owner of the core's heartbeat."""

from collections.abc import Callable


class StepProgress:
    """Receiver of progress reports from long operations within a step, from any thread.

    listener: receives the seconds that may pass until the next report; 0.0 means the limit of a
        step. The owner of the heartbeat sets it.
    """

    def __init__(self) -> None:
        self.listener: Callable[[float], None] = lambda limit_s: None

    def report(self, limit_s: float = 0.0) -> None:
        """Report progress. limit_s: limit of the next phase, if longer than a step's limit."""
        self.listener(limit_s)
