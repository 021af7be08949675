"""Convert a recording to a Chrome trace (JSON), for ui.perfetto.dev and chrome://tracing.

    process 1, "steps"      one track: each step from its plan to its result, with counters
    process 2, "rows"       one track per row: the request that held it, and its steps
    process 3, "waiting"    requests that waited for a row, with start and end (nested by request)

The recording is replayed. Times are on the core's clock, in microseconds.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from quire.base.errors import ConfigError
from quire.base.events import Admitted, Event, Finished, Preempted, Queued
from quire.base.plan import Plan
from quire.engine.recording.calls import UPDATE
from quire.engine.recording.files import Segment, read_recording
from quire.scheduler.core.names import Digester
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.views import RequestView, SchedulerView
from quire.tools.replay import Outcome, Step, replay_all, restored

STEPS, ROWS, WAITING = 1, 2, 3

TraceEvent = dict[str, Any]


class Trace:
    """Converts the steps of a replay to trace events, in `events`."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = [
            _name("process_name", pid, 0, name)
            for pid, name in ((STEPS, "steps"), (ROWS, "rows"), (WAITING, "waiting"))
        ]
        self._named: set[int] = set()
        self._holders: dict[int, tuple[str, float]] = {}  # row -> request, start time
        self._waits: dict[str, tuple[float, str]] = {}  # request -> start time, reason
        self._flights: deque[tuple[Plan, float]] = deque()
        self._busy_until_s = 0.0
        self._last_s = 0.0

    def begin(self, plans: Iterable[Plan], requests: Iterable[RequestView], now: float) -> None:
        """Start with the running and waiting requests, at the recording's start or after a gap."""
        self._holders.clear()
        self._waits.clear()
        self._flights = deque((plan, now) for plan in plans)
        for found in requests:
            holder = found.request.request_id, now
            self._holders.update(dict.fromkeys(found.rows, holder))
            if found.is_waiting:
                self._waits[found.request.request_id] = now, "waits"

    def take(self, step: Step, view: SchedulerView) -> None:
        now = self._last_s = step.call.now
        if step.call.kind == UPDATE and self._flights:  # before the ends that came with it
            plan, planned_s = self._flights.popleft()
            self._take_step(plan, planned_s, now, step.call.value.duration_s)
        for event in step.events:
            self._take_event(event, now)
        if step.plan is not None:
            self._flights.append((step.plan, now))
            self._count(view, now)

    def end(self) -> None:
        """Close open slices and waits at the recording's end."""
        for row in list(self._holders):
            self._leave(row, self._last_s, "recording ends")
        for request_id, (since, why) in self._waits.items():
            self._wait(request_id, since, self._last_s, why)

    def _take_event(self, event: Event, now: float) -> None:
        match event:
            case Queued():
                self._waits[event.request_id] = now, "waits"
            case Admitted():
                since = self._waits.pop(event.request_id, None)
                if since is not None:
                    self._wait(event.request_id, since[0], now, since[1])
                self._leave(event.row, now, "left")
                self._holders[event.row] = event.request_id, now
            case Preempted():
                way = "swapped" if event.swapped else "recomputed"
                self._leave_all(event.request_id, now, f"preempted, {way}")
                self._waits[event.request_id] = now, f"preempted, {way}"
            case Finished():
                self._leave_all(event.request_id, now, event.reason)
                since = self._waits.pop(event.request_id, None)
                if since is not None:
                    self._wait(event.request_id, since[0], now, since[1])

    def _leave_all(self, request_id: str, now: float, why: str) -> None:
        for row in [row for row, holder in self._holders.items() if holder[0] == request_id]:
            self._leave(row, now, why)

    def _leave(self, row: int, now: float, why: str) -> None:
        if row in self._holders:
            request_id, since = self._holders.pop(row)
            self._slice(ROWS, row, request_id, since, now, {"ends": why})
            if row not in self._named:
                self._named.add(row)
                self.events.append(_name("thread_name", ROWS, row, f"row {row}"))

    def _take_step(self, plan: Plan, planned_s: float, now: float, duration_s: float) -> None:
        """Add a step, which ran for duration_s before its result, and after the previous step."""
        start = max(planned_s, self._busy_until_s)
        if duration_s > 0:
            start = max(start, now - duration_s)
        start = min(start, now)
        self._busy_until_s = now
        number = {"step": plan.step_id, "rows": len(plan.rows), "tokens": plan.num_scheduled_tokens}
        self._slice(STEPS, 0, f"step {plan.step_id}", start, now, number)
        counts = plan.num_tokens.tolist(), plan.num_drafts.tolist()
        for row, num_tokens, num_draft_tokens in zip(plan.rows.tolist(), *counts, strict=True):
            holder = self._holders.get(row)
            if holder is None or holder[1] > planned_s:
                continue  # the plan's request has lost the row since
            kind = "decode" if num_tokens - num_draft_tokens == 1 else f"chunk of {num_tokens}"
            if num_draft_tokens:
                kind += f" with {num_draft_tokens} guesses"
            at = max(start, holder[1])
            self._slice(ROWS, row, kind, at, now, {"step": plan.step_id, "tokens": num_tokens})
        for move in plan.moves:
            self._instant(f"{move.kind} of {len(move.source)} blocks", start)

    def _count(self, view: SchedulerView, now: float) -> None:
        counts = {
            "running": view.num_running,
            "waiting": view.num_waiting,
            "free blocks": view.num_free_blocks,
        }
        for name, value in counts.items():
            event = {"ph": "C", "name": name, "pid": STEPS, "tid": 0, "ts": _us(now)}
            self.events.append(event | {"args": {name: value}})

    def _wait(self, request_id: str, since: float, now: float, why: str) -> None:
        head = {"cat": "wait", "name": request_id, "id": request_id, "pid": WAITING, "tid": 0}
        self.events.append(head | {"ph": "b", "ts": _us(since), "args": {"why": why}})
        self.events.append(head | {"ph": "e", "ts": _us(now)})

    def _slice(
        self, pid: int, tid: int, name: str, since: float, now: float, about: dict[str, Any]
    ) -> None:
        span = {"ph": "X", "ts": _us(since), "dur": _us(now) - _us(since)}
        self.events.append({"name": name, "pid": pid, "tid": tid, "args": about} | span)

    def _instant(self, name: str, now: float) -> None:
        event = {"ph": "i", "s": "t", "name": name, "pid": STEPS, "tid": 0, "ts": _us(now)}
        self.events.append(event)


def trace_of(segments: Iterator[Segment], outcome: Outcome | None = None) -> list[TraceEvent]:
    """Return all trace events of a recording. outcome: filled with the replay's outcome."""
    trace = Trace()
    state: dict[str, Any] = {"path": None}

    def show(segment: Segment, step: Step, scheduler: Scheduler) -> None:
        if state["path"] != segment.path:
            if state["path"] is None or not segment.follows:
                begun, now = restored(segment, Digester()), segment.header["now_s"]
                trace.begin(begun.view().plans, begun.requests(), now)
            state["path"] = segment.path
        trace.take(step, scheduler.view())

    replay_all(segments, show, outcome).note_difference()
    trace.end()
    return trace.events


def write_trace(recording: Path, output: Path, outcome: Outcome | None = None) -> int:
    """Write the file and return the number of events. outcome: filled with the replay's outcome.

    Raises ConfigError."""
    events = trace_of(read_recording(recording), outcome)
    try:
        with output.open("w", encoding="utf-8") as file:
            _write(events, file)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}.") from error
    return len(events)


def _write(events: list[TraceEvent], file: TextIO) -> None:
    """Write one event per line, so that line-based tools can read the file."""
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    for i, event in enumerate(events):
        file.write(json.dumps(event) + (",\n" if i + 1 < len(events) else "\n"))
    file.write("]}\n")


def _name(kind: str, pid: int, tid: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
