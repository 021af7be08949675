"""Progress with the time left, on standard error. A bar needs a terminal; rich is imported for the
first one. Without a terminal, long work logs a line every LOG_S seconds."""

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
        from rich.progress import (
            BarColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (TextColumn("{task.description}"), BarColumn(width), TextColumn(unit))
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        console = Console(stderr=True)
        self._shown = Progress(*columns, *times, console=console, transient=True)
        self._task = self._shown.add_task(text, total=total, speed="")
        self._shown.start()


def time_left(done: int, total: int, seconds: float) -> str:
    """Return the time that the rest takes at the mean rate so far, as `0:02:05 left`."""
    if done <= 0:
        return "-"
    left = round((total - done) * seconds / done)
    return f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"


class CountBar(_Bar):
    """Progress of counted work. text: name of the work."""

    def __init__(self, total: int, text: str = "", enabled: bool = True) -> None:
        super().__init__(enabled)
        if self._enabled:
            self._open(text, total, "{task.completed}/{task.total}")

    def advance(self, num: int = 1) -> None:
        if self._shown is not None:
            self._shown.advance(self._task, num)

    def describe(self, text: str) -> None:
        """Change the name of the work."""
        if self._shown is not None:
            self._shown.update(self._task, description=text)


class LoadBar(_Bar):
    """Progress of loading weights, in bytes. Weights are quantized while they load."""

    def __init__(self, enabled: bool) -> None:
        super().__init__(enabled)
        self._logs = enabled and not self._enabled
        self._began: tuple[float, int] | None = None  # time and bytes of the first update
        self._logged = 0.0

    def update(self, done: int, total: int) -> None:
        if self._logs:
            self._log(done, total)
        if not self._enabled:
            return
        if self._shown is None:
            self._open("Loading weights", total, "{task.percentage:.0f} %")
        assert self._shown is not None
        self._shown.update(self._task, completed=done, total=total)
        if done >= total:  # later log lines must not run into the bar
            self._shown.stop()
            self._shown, self._enabled = None, False

    def _log(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if self._began is None:
            self._began, self._logged = (now, done), now
        if done < total and now - self._logged >= LOG_S:
            self._logged, (began, first) = now, self._began
            left = time_left(done - first, total - first, now - began)
            logger.info("loading weights: %.0f %%, %s", 100 * done / total, left)


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
        num_new = tally.num_done - self._num_before
        until = time_left(num_new, self._total - self._num_before, elapsed)
        cached = tally.num_cached_tokens / max(1, tally.num_prompt_tokens)
        failed = f", {tally.num_failed} failed" if tally.num_failed else ""
        return f"{rate:.1f}/s, {new:,.0f} tok/s, {cached:.0%} cached{failed}, {until}"
