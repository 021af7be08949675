"""What wakes the core."""

import threading
from collections.abc import Callable


class Bell:
    """Rung from any thread when something has come that the core waits for: a result, a store's
    answer, a grammar. It holds no part of the core: a core that nobody holds is gone, with its
    executor's thread."""

    def __init__(self) -> None:
        self.wake_up: Callable[[], None] = lambda: None
        self._is_rung = threading.Event()

    def ring(self) -> None:
        self._is_rung.set()
        self.wake_up()

    def forget(self) -> None:
        """Wait only for what comes from now on."""
        self._is_rung.clear()

    def wait(self, timeout_s: float) -> None:
        """Wait until it was rung."""
        self._is_rung.wait(timeout_s)
