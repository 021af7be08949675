"""Metrics of the engine's work, computed only from the core's events.

Each value is counted when its event happens. So the queue time is counted when a request gets its
first row. Values of a whole request are counted when it ends by itself
(`stop`, `length`, `repetition`). The times of an aborted request only say when its client left.

The work per step and token is array arithmetic on the time of each row's last token. A row passes
from request to request; values that outlast the row are in `RequestTimes` until the request ends.
Histograms are numpy arrays, so one operation counts a step's values for all rows. A bucket counts
the values up to and including its bound, as in Prometheus; the last bucket has no bound.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, zip_longest
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from quire.base.events import (
    Admitted,
    Appended,
    Event,
    Finished,
    Planned,
    Preempted,
    Queued,
    Stepped,
)
from quire.base.tenants import is_key

# Bounds for seconds between two tokens: fine where users and schedulers notice a difference.
TOKEN_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0),
)
# Bounds for seconds of a request and its phases.
REQUEST_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0),
    *(7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
STEP_TOKENS = tuple(float(1 << i) for i in range(15))
TIMES = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


def tokens_up_to(max_bound: int) -> tuple[float, ...]:
    """Return the bounds 1, 2, 5, 10, 20, 50 and so on up to `max_bound`."""
    return tuple(_one_two_five(max_bound))


def _one_two_five(max_bound: int) -> Iterator[float]:
    for power in count():
        for digit in (1, 2, 5):
            bound = digit * 10**power
            if bound > max_bound:
                return
            yield float(bound)


class Histogram:
    """Counts of values between ascending bounds, and the sum of the values."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        self.total = 0.0
        self._bounds = np.asarray(bounds)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: npt.NDArray[np.float64]) -> None:
        """Count several values: [num_values], float64."""
        if len(values) <= FEW_VALUES:
            for value in values.tolist():
                self.observe(value)
            return
        indices = self._bounds.searchsorted(values)
        self.counts += np.bincount(indices, minlength=len(self.counts))
        self.total += float(values.sum())

    def cumulative(self) -> list[int]:
        """Return the number of values up to each bound, then the number of all values."""
        return [int(number) for number in self.counts.cumsum()]


FEW_VALUES = 8  # as many values are counted faster one by one
FINISH_REASONS = ("stop", "length", "repetition", "abort", "error", "timeout", "pinned")
TOKENS: tuple[float, ...] = ()  # stands for 1, 2, 5, ... up to max_model_len
HISTOGRAMS: Mapping[str, tuple[tuple[float, ...], str]] = MappingProxyType(
    {
        "time_to_first_token_seconds": (REQUEST_S, "Time from arrival to the first token."),
        "inter_token_latency_seconds": (TOKEN_S, "Time between two tokens of a request."),
        "request_time_per_output_token_seconds": (
            TOKEN_S,
            "Mean time between the tokens of a request with at least two tokens.",
        ),
        "e2e_request_latency_seconds": (REQUEST_S, "Time from arrival to the end."),
        "request_queue_time_seconds": (REQUEST_S, "Time in the queue until the first admission."),
        "request_inference_time_seconds": (
            REQUEST_S,
            "Time from the first admission to the last token.",
        ),
        "request_prefill_time_seconds": (
            REQUEST_S,
            "Time from the first admission to the first token.",
        ),
        "request_decode_time_seconds": (REQUEST_S, "Time from the first token to the last token."),
        "request_prompt_tokens": (TOKENS, "Tokens of the prompt."),
        "request_generation_tokens": (TOKENS, "Tokens written."),
        "request_params_max_tokens": (TOKENS, "max_tokens of requests that set it."),
        "request_params_n": (TIMES, "Sequences of a request: its n, best_of or beams."),
        "request_num_preemptions": (TIMES, "Number of preemptions of a request."),
        "iteration_tokens_total": (STEP_TOKENS, "Tokens computed in a step."),
    }
)


@dataclass(slots=True)
class KeyUsage:
    """Usage of one API key. num_requests: number of ended requests."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0


@dataclass(slots=True, eq=False)
class RequestTimes:
    """Counts and times of an open request. Times are in seconds; NaN means not yet.

    last_token_s: while the request owns `row`, the time is in `EngineMetrics._last_token_s[row]`.
    row: the request's current or last row; -1 before the first, or if another request took it.
    """

    num_prompt_tokens: int
    max_tokens: int | None
    received_s: float
    queued_s: float
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    admitted_s: float = math.nan
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    row: int = -1
    tenant: str = ""


class EngineMetrics:
    """Counters and histograms of a core's events; `Exposition` exports them to Prometheus.

    counts_hits: whether every admitted prompt is looked up in a prefix cache.
    num_computed_prompt_tokens: prompt tokens computed so far, including tokens recomputed after a
        preemption. Its rate shows progress even within one long prompt.
    num_drafts: steps of rows that verified draft tokens.
    num_draft_tokens: draft tokens that were verified.
    accepted_at: accepted draft tokens by position in the draft.
    idle_s: time without any open request, between the first and the last request.
    of_keys: usage by API key name; output tokens are added when a request ends.
    """

    def __init__(self, num_rows: int, max_model_len: int, counts_hits: bool) -> None:
        self._counts_hits = counts_hits
        self.num_prompt_tokens = 0
        self.num_prompt_tokens_cached = 0
        self.num_generation_tokens = 0
        self.num_computed_prompt_tokens = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_preemptions = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.accepted_at: list[int] = []
        self.num_finished = dict.fromkeys(FINISH_REASONS, 0)
        self.idle_s = 0.0
        self.of_keys: dict[str, KeyUsage] = {}
        tokens = tokens_up_to(max_model_len)
        self.histograms = {
            name: Histogram(bounds or tokens) for name, (bounds, _) in HISTOGRAMS.items()
        }
        self.open: dict[str, RequestTimes] = {}
        self._idle_since_s = math.nan
        self._owners: list[RequestTimes | None] = [None] * num_rows
        self._last_token_s = np.full(num_rows, math.nan)
        self._since_step = np.zeros(num_rows, np.int64)  # first plan with the row's owner in it
        self._next_step_id = 0

    @property
    def num_accepted(self) -> int:
        """Number of accepted draft tokens."""
        return sum(self.accepted_at)

    def __call__(self, event: Event) -> None:
        match event:
            case Planned():
                self._next_step_id = event.step_id + 1
            case Stepped():
                self._step(event)
            case Queued():
                self._queue(event)
            case Appended():
                self._append(event)
            case Admitted():
                self._admit(event)
            case Preempted():
                self._preempt(event)
            case Finished():
                self._finish(event)

    def _step(self, event: Stepped) -> None:
        """Count a step. A row without a last token gets its first token; for other rows, count the
        time since their last token."""
        rows, now = event.rows, event.at_s
        self.num_generation_tokens += len(rows) + event.num_accepted
        self.num_drafts += event.num_drafts
        self.num_draft_tokens += event.num_draft_tokens
        if event.accepted_at:
            counts = zip_longest(self.accepted_at, event.accepted_at, fillvalue=0)
            self.accepted_at = [before + more for before, more in counts]
        self.histograms["iteration_tokens_total"].observe(event.num_tokens)
        rows = rows[self._since_step[rows] <= event.step_id]  # skip tokens of former row owners
        last_token_s = self._last_token_s[rows]
        self._last_token_s[rows] = now
        is_first = np.isnan(last_token_s)
        if np.count_nonzero(is_first):
            for row in rows[is_first].tolist():
                self._take_first_token(row, now)
            last_token_s = last_token_s[~is_first]
        self.histograms["inter_token_latency_seconds"].observe_all(now - last_token_s)
        num_prompt = event.num_tokens - event.num_draft_tokens - len(last_token_s)
        self.num_computed_prompt_tokens += num_prompt

    def _take_first_token(self, row: int, now: float) -> None:
        times = self._owners[row]
        if times is None:
            return
        times.first_token_s = now
        self.num_prompt_tokens += times.num_prompt_tokens
        self.num_prompt_tokens_cached += times.num_cached_tokens
        if is_key(times.tenant):
            usage = self.of_keys.setdefault(times.tenant, KeyUsage())
            usage.num_prompt_tokens += times.num_prompt_tokens
            usage.num_cached_tokens += times.num_cached_tokens
        self._observe_s("time_to_first_token_seconds", times.received_s, now)
        self._observe_s("request_prefill_time_seconds", times.admitted_s, now)

    def _queue(self, event: Queued) -> None:
        if not self.open and not math.isnan(self._idle_since_s):
            self.idle_s += max(0.0, event.at_s - self._idle_since_s)
        self.open[event.request_id] = RequestTimes(
            num_prompt_tokens=event.num_prompt_tokens,
            max_tokens=event.max_tokens,
            received_s=event.received_s or event.at_s,
            queued_s=event.at_s,
            tenant=event.tenant,
        )

    def _append(self, event: Appended) -> None:
        times = self.open.get(event.request_id)
        if times is not None:
            times.num_prompt_tokens += event.num_tokens

    def _admit(self, event: Admitted) -> None:
        """Make a request the owner of a row, whose array entry then has its last token's time.

        The request's former row may still be its own, belong to another request, or be this row.
        """
        times, row = self.open.get(event.request_id), event.row
        if times is None:
            return
        if event.index > 0:  # only the first sequence determines the request's times
            self._give_up_row(self._owners[row])
            self._last_token_s[row] = math.nan
            self._since_step[row] = self._next_step_id
            return
        self._give_up_row(self._owners[row])
        self._give_up_row(times)
        self._owners[row], times.row = times, row
        self._last_token_s[row] = times.last_token_s
        self._since_step[row] = self._next_step_id
        if math.isnan(times.admitted_s):
            times.admitted_s = event.at_s
            times.num_cached_tokens = event.num_cached_tokens
            self._observe_s("request_queue_time_seconds", times.queued_s, event.at_s)
            if self._counts_hits:
                self.num_prefix_queries += times.num_prompt_tokens
                self.num_prefix_hits += event.num_cached_tokens

    def _give_up_row(self, times: RequestTimes | None) -> None:
        """Copy the row's last token time to the request, and free the row. Until here, plans in
        flight may add tokens for a request that was preempted long ago."""
        if times is not None and times.row >= 0:
            times.last_token_s = float(self._last_token_s[times.row])
            self._owners[times.row] = None
            times.row = -1

    def _preempt(self, event: Preempted) -> None:
        self.num_preemptions += 1
        if (times := self.open.get(event.request_id)) is not None:
            times.num_preemptions += 1

    def _finish(self, event: Finished) -> None:
        self.num_finished[event.reason] = self.num_finished.get(event.reason, 0) + 1
        times = self.open.pop(event.request_id, None)
        if times is None:
            return
        self._give_up_row(times)
        if is_key(times.tenant):
            usage = self.of_keys.setdefault(times.tenant, KeyUsage())
            usage.num_requests += 1
            usage.num_generation_tokens += event.num_output_tokens
        if not self.open:
            self._idle_since_s = event.at_s
        if event.reason in ("stop", "length", "repetition"):
            self._observe_request(times, event)

    def _observe_request(self, times: RequestTimes, event: Finished) -> None:
        """Count the values of a request that ended by itself."""
        first_s, last_s = times.first_token_s, times.last_token_s
        num_tokens, histograms = event.num_output_tokens, self.histograms
        histograms["request_prompt_tokens"].observe(times.num_prompt_tokens)
        histograms["request_generation_tokens"].observe(num_tokens)
        histograms["request_params_n"].observe(event.num_sequences)
        histograms["request_num_preemptions"].observe(times.num_preemptions)
        if times.max_tokens is not None:
            histograms["request_params_max_tokens"].observe(times.max_tokens)
        self._observe_s("e2e_request_latency_seconds", times.received_s, event.at_s)
        self._observe_s("request_inference_time_seconds", times.admitted_s, last_s)
        self._observe_s("request_decode_time_seconds", first_s, last_s)
        if num_tokens > 1:
            mean_s = (last_s - first_s) / max(1.0, num_tokens / event.num_sequences - 1)
            self._observe_s("request_time_per_output_token_seconds", 0.0, mean_s)

    def _observe_s(self, name: str, start_s: float, end_s: float) -> None:
        """Count a duration unless its start or end is NaN."""
        duration_s = end_s - start_s
        if not math.isnan(duration_s):
            self.histograms[name].observe(max(0.0, duration_s))
