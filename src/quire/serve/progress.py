"""Progress bars on standard error, shown only on a terminal. rich is imported when one is."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from quire.base.outputs import RequestOutput

if TYPE_CHECKING:
    from rich.progress import Progress


class _Bar:
    """A bar that is there between `with` and its end, if `enabled` and somebody can see it."""

    def __init__(self, enabled: bool) -> None:
        self._shown: Progress | None = None
        self._enabled = enabled and sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown is not None:
            self._shown.stop()
            self._shown = None

    def _open(self, text: str, total: int, unit: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn(unit))
        console = Console(stderr=True)
        self._shown = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._task = self._shown.add_task(text, total=total, speed="")
        self._shown.start()


class LoadBar(_Bar):
    """Bytes of weights loaded."""

    def update(self, done: int, total: int) -> None:
        if not self._enabled:
            return
        if self._shown is None:
            self._open("Loading weights", total, "{task.percentage:.0f} %")
        assert self._shown is not None
        self._shown.update(self._task, completed=done, total=total)
        if done >= total:  # lines that are logged from here on must not run into it
            self._shown.stop()
            self._shown, self._enabled = None, False


class RequestBar(_Bar):
    """Continuations finished, and tokens per second so far; those that best_of dropped as well."""

    def __init__(self, num_outputs: int, enabled: bool) -> None:
        super().__init__(enabled)
        self._began = time.perf_counter()
        self._num_tokens = [0, 0]  # prompt, output
        if self._enabled:
            unit = "{task.completed}/{task.total} {task.fields[speed]}"
            self._open("Processed prompts", num_outputs, unit)

    def finished(self, output: RequestOutput) -> None:
        if self._shown is None:
            return
        self._num_tokens[0] += len(output.prompt_token_ids or ())
        self._num_tokens[1] += sum(len(o.token_ids) for o in output.outputs)
        if output.metrics is not None:
            self._num_tokens[1] += output.metrics.num_dropped_tokens
        elapsed = time.perf_counter() - self._began
        prompt, new = (n / elapsed for n in self._num_tokens)
        speed = f"input {prompt:,.1f} tok/s, output {new:,.1f} tok/s"
        self._shown.update(self._task, advance=len(output.outputs), speed=speed)
