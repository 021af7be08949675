"""A progress bar on standard error."""

import sys
from typing import Any


class Bar:
    """Shows the number of finished requests if standard error is a terminal."""

    def __init__(self, num: int, enabled: bool) -> None:
        self._progress: Any = None
        if enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(
                *columns, console=Console(stderr=True), refresh_per_second=2, transient=True
            )
            self._task = self._progress.add_task("", total=num)

    def __enter__(self) -> "Bar":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, num: int = 1) -> None:
        if self._progress is not None:
            self._progress.advance(self._task, num)
