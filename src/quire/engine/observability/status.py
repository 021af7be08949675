"""Log one status line every ten seconds while the engine has work."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.observability.metrics import EngineMetrics
from quire.scheduler.views import SchedulerView


@dataclass(frozen=True)
class Reading:
    """Counters and the scheduler's state at one time. usage: used share of the KV pool."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    queries: int
    hits: int
    preemptions: int
    finished: int
    num_running: int
    num_waiting: int
    usage: float

    @classmethod
    def take(cls, metrics: EngineMetrics, view: SchedulerView, at_s: float) -> "Reading":
        return cls(
            at_s=at_s,
            prompt_tokens=metrics.num_computed_prompt_tokens,
            output_tokens=metrics.num_generation_tokens,
            queries=metrics.num_prefix_queries,
            hits=metrics.num_prefix_hits,
            preemptions=metrics.num_preemptions,
            finished=sum(metrics.num_finished.values()),
            num_running=view.num_running,
            num_waiting=view.num_waiting,
            usage=view.usage,
        )

    def shows_work_since(self, last: "Reading") -> bool:
        """Return whether a counter changed since a reading, or requests run or wait now."""
        moved = (last.prompt_tokens, last.output_tokens, last.finished) != (
            self.prompt_tokens,
            self.output_tokens,
            self.finished,
        )
        return moved or self.num_running > 0 or self.num_waiting > 0


class StatusLine:
    """Maker of status lines, with rates since the last line. Prompt tokens exclude prefix hits."""

    def __init__(
        self,
        metrics: EngineMetrics,
        view: Callable[[], SchedulerView],
        interval_s: float = 10.0,
    ) -> None:
        self._metrics = metrics
        self._view = view
        self._interval_s = interval_s
        self._last: Reading | None = None
        self._since_s = 0.0
        self._idle_s = metrics.idle_s

    def line(self, now_s: float) -> str | None:
        """Return a line if one is due and there was or is work; the core calls it after each step.

        An idle core does not call it. So an idle pause longer than the interval is not counted;
        otherwise the first line after a night would average over the night.
        """
        metrics, last = self._metrics, self._last
        pause_s, self._idle_s = metrics.idle_s - self._idle_s, metrics.idle_s
        if pause_s >= self._interval_s:
            self._since_s = min(self._since_s + pause_s, now_s)
        if last is not None and now_s - self._since_s < self._interval_s:
            return None
        new = self._last = Reading.take(metrics, self._view(), now_s)
        since_s, self._since_s = self._since_s, now_s
        if last is None or not new.shows_work_since(last):
            return None
        return _describe(last, new, now_s - since_s)


def _describe(last: Reading, new: Reading, duration_s: float) -> str:
    prompt_rate = (new.prompt_tokens - last.prompt_tokens) / duration_s
    output_rate = (new.output_tokens - last.output_tokens) / duration_s
    parts = [
        f"{prompt_rate:.1f} prompt and {output_rate:.1f} output tokens/s",
        f"{new.num_running} running, {new.num_waiting} waiting",
        f"KV pool {new.usage:.0%} used".replace("%", " %"),
    ]
    if queries := new.queries - last.queries:
        parts.append(f"prefix hits {(new.hits - last.hits) / queries:.0%}".replace("%", " %"))
    if preemptions := new.preemptions - last.preemptions:
        parts.append(f"{preemptions} preempted")
    return "; ".join(parts)
