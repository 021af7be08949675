"""The idle time of a device during steady steps, from a profile of its work.

The profile is the JSON that torch.profiler exports (Chrome's trace events, times in microseconds).
Kernels, copies and fills count as work. With CUDA graphs each kernel of a replay is an event too.
"""

import json
import tempfile
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
CALLS = {"cuda_runtime", "cuda_driver"}  # of the host


@dataclass(frozen=True, order=True)
class Interval:
    """Seconds."""

    begin: float
    end: float
    name: str = ""


@dataclass(frozen=True)
class Gap:
    """Nothing ran between the end of `before` and the begin of `after`."""

    seconds: float
    before: str
    after: str


@dataclass(frozen=True)
class Idle:
    """span_s: from the first work's begin to the last one's end; busy_s: of it, with work."""

    span_s: float
    busy_s: float
    gaps: tuple[Gap, ...] = ()
    num_kernels: int = 0

    @property
    def share(self) -> float:
        """Of the span without work."""
        return 1.0 - self.busy_s / self.span_s if self.span_s > 0 else 0.0


def idle_of(intervals: Iterable[Interval], num_gaps: int = 5) -> Idle:
    """Compare the union of the intervals with their span, and find the largest gaps."""
    ordered = sorted(intervals)
    if not ordered:
        raise ValueError("no work of the device was seen")
    busy, gaps = 0.0, []
    last = ordered[0]
    begin, end = last.begin, last.end
    for interval in ordered[1:]:
        if interval.begin > end:
            gaps.append(Gap(interval.begin - end, last.name, interval.name))
            busy += end - begin
            begin = interval.begin
        if interval.end > end or interval.begin >= end:
            end, last = max(end, interval.end), interval
    busy += end - begin
    gaps.sort(key=lambda gap: -gap.seconds)
    span = end - ordered[0].begin
    return Idle(span, busy, tuple(gaps[:num_gaps]), len(ordered))


def intervals_of(trace: dict[str, Any], kinds: Set[str] = WORK) -> list[Interval]:
    """Return the intervals of some kinds, of a trace as torch.profiler exports it."""
    found = []
    for event in trace.get("traceEvents", []):
        if event.get("ph") == "X" and event.get("cat") in kinds:
            begin = float(event["ts"]) / 1e6
            found.append(Interval(begin, begin + float(event["dur"]) / 1e6, event["name"]))
    return found


def largest_kernels(intervals: Iterable[Interval], num: int = 8) -> list[tuple[str, float]]:
    """Return the names with the most time together, in seconds."""
    totals: dict[str, float] = {}
    for interval in intervals:
        totals[interval.name] = totals.get(interval.name, 0.0) + interval.end - interval.begin
    return sorted(totals.items(), key=lambda item: -item[1])[:num]


@dataclass
class DeviceProfile:
    """Start and stop torch's profiler between two steps, from a listener of steps."""

    _profiler: Any = field(default=None, repr=False)
    intervals: list[Interval] = field(default_factory=list)
    calls: list[Interval] = field(default_factory=list)

    def start(self) -> None:
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.__enter__()

    def stop(self) -> None:
        """Keep what was seen."""
        torch.cuda.synchronize()
        self._profiler.__exit__(None, None, None)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8"))
        self.intervals, self.calls = intervals_of(trace), intervals_of(trace, CALLS)
        self._profiler = None

    def close(self) -> None:
        """End the profiler after any outcome, because torch has one profiler at a time."""
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self._profiler = None
