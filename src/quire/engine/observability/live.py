"""Frames of the live view, which the core's thread makes between two steps while a client watches.

Without a watching client, the core makes no frames and subscribes to no events. With one, it makes
at most one frame per FRAME_S, or fewer, so that frames take at most one part in ONE_IN of the time.
The pause is at most MAX_PAUSE_S, because a chance delay can make a frame look expensive. A
client that asks earlier gets the last frame again. Steps never wait for a reader.
"""

from collections import Counter, deque
from collections.abc import Iterator

import numpy as np

from quire.base.clock import Clock
from quire.base.events import Event, Planned, Preempted, Stepped
from quire.base.live import BlockEvent, LiveFrame, LiveState, StepRow
from quire.base.plan import MoveKind, Plan
from quire.engine.loop.core import EngineCore

FRAME_S = 0.2
ONE_IN = 200
MAX_PAUSE_S = 10.0
IDLE_S = 5.0  # time without a request after which watching ends
MAX_STEPS = 256  # steps in a frame
MAX_EVENTS = 512  # block events in a frame


class LiveTally:
    """Recent steps and block events, with counts since `begin`. `begin` restarts no numbers."""

    def __init__(self) -> None:
        self._event_number = 0
        self.begin()

    def begin(self) -> None:
        self.steps: deque[StepRow] = deque(maxlen=MAX_STEPS)
        self.events: deque[BlockEvent] = deque(maxlen=MAX_EVENTS)
        self.counts: Counter[str] = Counter()
        self._planned: dict[int, tuple[int, int]] = {}  # step -> prefill tokens, decode tokens

    def take(self, event: Event, block_size: int) -> None:
        if isinstance(event, Planned) and event.plan is not None:
            self._take_plan(event.plan, block_size)
        elif isinstance(event, Stepped):
            prefill, decode = self._planned.pop(event.step_id, (0, event.num_tokens))
            num_sampled = len(event.rows) + event.num_accepted
            self.steps.append(
                StepRow(event.step_id, event.at_s, prefill, decode, num_sampled, event.duration_s)
            )
        elif isinstance(event, Preempted):
            self.counts["preemption"] += 1

    def frame(self, number: int, now: float, state: LiveState) -> LiveFrame:
        counts = dict(self.counts) | {"eviction": state.num_evicted}
        return LiveFrame(number, now, state, [*self.steps], [*self.events], counts)

    def _take_plan(self, plan: Plan, block_size: int) -> None:
        own = plan.num_tokens - plan.num_drafts
        prefill = int(own[own > 1].sum())
        self._planned[plan.step_id] = prefill, plan.num_scheduled_tokens - prefill
        if len(self._planned) > MAX_STEPS:  # drop plans that were never run
            del self._planned[next(iter(self._planned))]
        loaded: set[tuple[int, int]] = set()
        for move in plan.moves:
            ends = move.source if move.kind is MoveKind.SWAP_OUT else move.destination
            blocks = ends.tolist()
            self._record(str(move.kind), move.group, blocks)
            if move.kind is MoveKind.LOAD:
                loaded |= {(move.group, block) for block in blocks}
        for start in plan.started:
            if start.num_computed_tokens:
                mine = _hits(plan, start.row, start.num_computed_tokens // block_size)
                for group, blocks in mine:
                    self._record("hit", group, [b for b in blocks if (group, b) not in loaded])

    def _record(self, kind: str, group: int, blocks: list[int]) -> None:
        self.counts[kind] += len(blocks)
        self._event_number += len(blocks)
        kept = blocks[-MAX_EVENTS:]  # of the blocks of a long prompt
        first = self._event_number - len(kept) + 1
        self.events += [BlockEvent(i, kind, group, block) for i, block in enumerate(kept, first)]


def _hits(plan: Plan, row: int, num_blocks: int) -> Iterator[tuple[int, list[int]]]:
    """Yield each cache group with the row's prefix hit: the first num_blocks blocks of the row."""
    writes = plan.block_writes
    mine = (writes.row == row) & (writes.index < num_blocks) & (writes.block_id >= 0)
    for group in np.unique(writes.group[mine]).tolist():
        yield group, writes.block_id[mine & (writes.group == group)].tolist()


class LiveFrames:
    """Maker of a core's frames; subscribes to events while a client watches."""

    def __init__(self, core: EngineCore, clock: Clock) -> None:
        self._core, self._clock = core, clock
        self._block_size = core.view().block_size
        self._tally = LiveTally()
        self._last: LiveFrame | None = None
        self._number = 0
        self._next_s = self._requested_s = 0.0
        self._is_listening = False

    def frame(self) -> LiveFrame:
        """Return a new frame, or the last frame if it is too early for another."""
        now = self._clock.now()
        self._requested_s = now
        if not self._is_listening:
            self._tally.begin()
            self._core.publish()  # flush events from before this client began to watch
            self._core.subscribe(self)
            self._is_listening = True
            self._last = None
        if self._last is not None and now < self._next_s:
            return self._last
        self._core.publish()
        self._number += 1
        self._last = self._tally.frame(self._number, now, self._core.scheduler.live_state())
        rest_s = max(FRAME_S, ONE_IN * (self._clock.now() - now))
        self._next_s = now + min(rest_s, MAX_PAUSE_S)
        return self._last

    def __call__(self, event: Event) -> None:
        if event.at_s - self._requested_s > IDLE_S:
            self._core.unsubscribe(self)
            self._is_listening = False
        else:
            self._tally.take(event, self._block_size)
