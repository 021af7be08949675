"""The bell that wakes the core."""

import threading
from collections.abc import Callable


class Bell:
    """Bell that any thread rings when a result or an answer has arrived. It holds no reference to
    the core, so an unused core is collected with its executor's thread."""

    def __init__(self) -> None:
        self.wake_up: Callable[[], None] = lambda: None
        self._is_rung = threading.Event()

    def ring(self) -> None:
        self._is_rung.set()
        self.wake_up()

    def forget(self) -> None:
        """Forget earlier rings."""
        self._is_rung.clear()

    def wait(self, timeout_s: float) -> None:
        """Wait until it is rung, or until the timeout."""
        self._is_rung.wait(timeout_s)
