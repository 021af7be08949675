"""Progress bars on standard error, only on a terminal. rich is imported for the first bar."""

import logging
import sys
import time
from typing import TYPE_CHECKING, Self

from quire.base.requests.outputs import RequestOutput

if TYPE_CHECKING:
    from rich.progress import Progress

    from quire.serve.batches.tally import Tally

logger = logging.getLogger("quire")

LOG_S = 10.0  # interval of log lines without a terminal


class _Bar:
    """A bar for the time of its `with` block, if `enabled` and standard error is a terminal."""

    def __init__(self, enabled: bool) -> None:
        self._shown: Progress | None = None
        self._enabled = enabled and sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown is not None:
            self._shown.stop()
            self._shown = None

    def _open(self, text: str, total: int, unit: str, width: int = 40) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(width), TextColumn(unit))
        console = Console(stderr=True)
        self._shown = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._task = self._shown.add_task(text, total=total, speed="")
        self._shown.start()


class LoadBar(_Bar):
    """Progress of loading weights, in bytes."""

    def update(self, done: int, total: int) -> None:
        if not self._enabled:
            return
        if self._shown is None:
            self._open("Loading weights", total, "{task.percentage:.0f} %")
        assert self._shown is not None
        self._shown.update(self._task, completed=done, total=total)
        if done >= total:  # later log lines must not run into the bar
            self._shown.stop()
            self._shown, self._enabled = None, False


class RequestBar(_Bar):
    """Finished continuations, and tokens per second including what best_of dropped."""

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


class BatchBar(_Bar):
    """Finished lines of a batch, their rate and the remaining time. Without a terminal, logs a line
    every LOG_S seconds. tally: counts of earlier runs. tok/s counts output tokens; `cached` is the
    share of cached prompt tokens."""

    def __init__(self, total: int, tally: "Tally") -> None:
        super().__init__(enabled=True)
        self._total, self._began, self._logged = total, time.perf_counter(), time.perf_counter()
        self._num_before = tally.num_done
        self._tokens_before = tally.num_output_tokens
        if self._enabled:
            unit = "{task.completed}/{task.total} {task.fields[speed]}"
            self._open("Lines", total, unit, width=8)  # the rest needs the width

    def update(self, tally: "Tally") -> None:
        text = self._describe(tally)
        if self._shown is not None:
            self._shown.update(self._task, completed=tally.num_done, speed=text)
        elif time.perf_counter() - self._logged >= LOG_S:
            self._logged = time.perf_counter()
            logger.info("%d/%d lines, %s", tally.num_done, self._total, text)

    def _describe(self, tally: "Tally") -> str:
        elapsed = max(1e-3, time.perf_counter() - self._began)
        rate = (tally.num_done - self._num_before) / elapsed
        new = (tally.num_output_tokens - self._tokens_before) / elapsed
        left = (self._total - tally.num_done) / rate if rate else 0.0
        until = (
            f"{left // 3600:.0f}:{left // 60 % 60:02.0f}:{left % 60:02.0f} left" if rate else "-"
        )
        cached = tally.num_cached_tokens / max(1, tally.num_prompt_tokens)
        failed = f", {tally.num_failed} failed" if tally.num_failed else ""
        return f"{rate:.1f}/s, {new:,.0f} tok/s, {cached:.0%} cached{failed}, {until}"
