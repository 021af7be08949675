"""Record the progress of a simulation's requests, from the cores' events.

Each step only takes array arithmetic, as in `engine/observability/metrics.py`. But this module
keeps every gap between tokens, and the pool's and queue's state after every plan.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.base.events import Admitted, Event, Finished, Planned, Preempted, Queued, Stepped
from quire.scheduler.scheduler import Scheduler

Float64 = npt.NDArray[np.float64]
STEP, ROW, MEMORY, BUDGET = "a step under way", "a row", "memory", "the step's tokens"
REASONS = (STEP, ROW, MEMORY, BUDGET)


@dataclass(slots=True)
class Served:
    """The progress of a request. Times are relative to the run's start."""

    arrived_s: float
    num_prompt: int = 0
    num_output: int = 0
    admitted_s: float = -1.0
    first_token_s: float = -1.0
    finished_s: float = -1.0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    away_s: float = 0.0  # time without a row, after preemptions
    reason: str = ""
    replica: int = 0
    error: str = ""

    @property
    def wait_s(self) -> float:
        """Time from arrival to the first token."""
        return self.first_token_s - self.arrived_s

    @property
    def latency_s(self) -> float:
        return self.finished_s - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first."""
        return (self.finished_s - self.first_token_s) / max(1, self.num_output - 1)


@dataclass(slots=True)
class Series:
    """A replica's state after each of its plans. `used` is the share of the pool in use."""

    at_s: list[float] = field(default_factory=list)
    num_rows: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_waiting: list[int] = field(default_factory=list)
    used: list[float] = field(default_factory=list)


class Ledger:
    """The record of one core's requests, for any kind of engine.

    by_id: all requests of the run, shared by its cores. open: this core's unfinished requests."""

    def __init__(self, replica: int, by_id: dict[str, Served]) -> None:
        self.series = Series()
        self.gaps: list[Float64] = []  # times between two tokens of a sequence
        self.tokens: list[tuple[float, int]] = []  # time and number of new tokens
        self.waits = dict.fromkeys(REASONS, 0.0)  # waiting time in requests x seconds
        self.open: dict[str, Served] = {}
        self.ended: list[str] = []  # requests since the last call of take_ended
        self.num_lost_tokens = 0
        self.most_used = 0
        self._replica, self._by_id = replica, by_id

    @property
    def num_loaded_blocks(self) -> int:
        """Blocks that were loaded from host memory."""
        return 0

    def begin(self, request_id: str, served: Served) -> None:
        """Register a request that is about to be added."""
        served.replica = self._replica
        self._by_id[request_id] = self.open[request_id] = served

    def take_ended(self) -> list[str]:
        """Return the requests that ended since the last call."""
        found, self.ended = self.ended, []
        return found


class Listener(Ledger):
    """Subscribes to the events of a core of quire."""

    def __init__(self, scheduler: Scheduler, replica: int, by_id: dict[str, Served]) -> None:
        super().__init__(replica, by_id)
        num_rows = scheduler.rows.table.num_rows
        self._scheduler = scheduler
        self._owner: list[Served | None] = [None] * num_rows
        self._last_s = np.full(num_rows, np.nan)  # [rows] time of the row's last token
        self._left_s: dict[str, tuple[float, float]] = {}  # preemption's and last token's time
        # Time of the last change, requests that the last plan left, their reason, later arrivals.
        self._wait = (0.0, 0, ROW, 0)

    def __call__(self, event: Event) -> None:
        match event:
            case Stepped():
                self._step(event)
            case Planned():
                self._plan(event)
            case Admitted():
                self._admit(event)
            case Queued():
                _, num_left, reason, num_new = self._count_waits(event.at_s)
                self._wait = (event.at_s, num_left, reason, num_new + 1)
            case Preempted():
                self._preempt(event)
            case Finished():
                self._finish(event)

    def _step(self, event: Stepped) -> None:
        rows, now = event.rows, event.at_s
        last_s = self._last_s[rows]
        gaps = now - last_s
        is_new = np.isnan(gaps)
        if is_new.any():
            for row in rows[is_new].tolist():
                served = self._owner[row]
                if served is not None and served.first_token_s < 0:
                    served.first_token_s = now
            gaps = gaps[~is_new]
        self.gaps.append(gaps)
        self.tokens.append((now, len(rows)))
        self._last_s[rows] = now

    def _plan(self, event: Planned) -> None:
        scheduler, series = self._scheduler, self.series
        pool = scheduler.memory.kv.pools[0]
        num_used, num_waiting = pool.num_used, scheduler.num_waiting
        self.most_used = max(self.most_used, num_used)
        series.at_s.append(event.at_s)
        series.num_rows.append(event.num_rows)
        series.num_tokens.append(event.num_tokens)
        series.num_waiting.append(num_waiting)
        series.used.append(num_used / pool.num_blocks)
        self._count_waits(event.at_s)
        reason = self._reason(event.num_tokens) if num_waiting else ROW
        self._wait = (event.at_s, num_waiting, reason, 0)

    def _reason(self, num_tokens: int) -> str:
        """Return the reason why requests wait after a plan of `num_tokens` tokens."""
        if not self._scheduler.num_free_rows:
            return ROW
        rates = self._scheduler.memory.rates.step_tokens
        budget = self._scheduler.token_budget
        return BUDGET if num_tokens >= min(budget, rates or budget) else MEMORY

    def _count_waits(self, now: float) -> tuple[float, int, str, int]:
        """Add the waiting time up to now, and return the state that caused it."""
        since_s, num_left, reason, num_new = self._wait
        self.waits[reason] += num_left * (now - since_s)
        self.waits[STEP] += num_new * (now - since_s)
        return self._wait

    def _admit(self, event: Admitted) -> None:
        served = self.open.get(event.request_id)
        self._owner[event.row], self._last_s[event.row] = served, np.nan
        if served is None:
            return
        if served.admitted_s < 0:
            served.admitted_s, served.num_cached_tokens = event.at_s, event.num_cached_tokens
        elif event.request_id in self._left_s:
            left_s, last_s = self._left_s[event.request_id]
            if left_s >= 0:
                served.away_s += event.at_s - left_s
                self._left_s[event.request_id] = (-1.0, last_s)
            self._last_s[event.row] = last_s

    def _preempt(self, event: Preempted) -> None:
        self.num_lost_tokens += event.num_lost_tokens
        served = self.open.get(event.request_id)
        if served is None:
            return
        served.num_preemptions += 1
        rows = [row for row, owner in enumerate(self._owner) if owner is served]
        last_s = self._last_s[rows]
        known = last_s[~np.isnan(last_s)]
        self._left_s[event.request_id] = (event.at_s, known.max() if len(known) else np.nan)
        for row in rows:
            self._owner[row] = None

    def _finish(self, event: Finished) -> None:
        served = self.open.pop(event.request_id, None)
        self._left_s.pop(event.request_id, None)
        if served is not None:
            served.finished_s, served.reason = event.at_s, event.reason
            served.num_output = event.num_output_tokens
        self.ended.append(event.request_id)

    @property
    def num_loaded_blocks(self) -> int:
        tier = self._scheduler.view().tier
        return 0 if tier is None else tier.num_loaded
