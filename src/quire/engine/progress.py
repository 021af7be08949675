"""Progress within a step, passed on to whoever watches the core."""

from collections.abc import Callable


class Progress:
    """What works for long within one step calls `tell` at each sign of progress, from any thread.

    listener: called each time; the owner of a heartbeat sets it.
    """

    def __init__(self) -> None:
        self.listener: Callable[[], None] = lambda: None

    def tell(self) -> None:
        """Report progress."""
        self.listener()
