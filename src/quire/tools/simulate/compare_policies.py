"""Predict what another scheduling policy would have changed on recorded traffic.

Input: a recording from an engine's start. The step times are fitted to its steps. The recorded
requests are then served twice in virtual time by production's scheduler, with the recorded policy
and with the other one. So both runs have the same errors of the step times, and their difference is
the policy's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.base.clock import FakeClock
from quire.base.errors import ConfigError, EngineError
from quire.base.plugins import short_name
from quire.engine.recording.files import Segment
from quire.tools.replay import restored
from quire.tools.simulate.recorded import Recorded, RecordedWork
from quire.tools.simulate.replica import Replica
from quire.tools.simulate.run import ANY_VOCABULARY, Run, run_all
from quire.tools.simulate.served import Served
from quire.tools.step_fitting import Fitted

MS = 1e3
SAME_S = 1e-3  # smaller changes of the time to the first token do not count
NUM_SHOWN = 3  # requests with the largest gains, and with the largest losses
PERCENTILES = (50, 99)
Progress = Callable[[int], None]


@dataclass(frozen=True)
class PolicyRun:
    """The recorded requests, served with one policy. served: by number of the request."""

    policy: str
    served: dict[str, Served]
    num_preemptions: int
    num_lost_tokens: int
    duration_s: float

    def ttft_s(self, names: list[str]) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """Return the times to the first token of these requests."""
        return np.array([self.served[name].wait_s for name in names])


@dataclass(frozen=True)
class Change:
    """The change of one request. The first token comes `gain_s` earlier with the other policy."""

    request_id: str
    num_prompt: int
    before_s: float
    gain_s: float


@dataclass(frozen=True)
class Comparison:
    """Two policies on the same traffic. num_skipped: recorded requests that cannot be repeated."""

    before: PolicyRun
    after: PolicyRun
    changes: tuple[Change, ...]  # largest gain first
    num_moved: int  # requests whose place in the order of first tokens differs
    max_moved: int  # most places by which a request moved
    num_skipped: int
    fitted: Fitted

    def as_data(self) -> dict[str, Any]:
        """Return the figures as JSON data."""
        return {
            "requests": len(self.changes),
            "skipped": self.num_skipped,
            "policies": [
                {"policy": run.policy} | dict(_figures(run, self.names))
                for run in (self.before, self.after)
            ],
            "earlier": sum(each.gain_s > SAME_S for each in self.changes),
            "later": sum(each.gain_s < -SAME_S for each in self.changes),
            "moved": self.num_moved,
            "max_moved": self.max_moved,
        }

    @property
    def names(self) -> list[str]:
        """The requests that both policies served to their end."""
        return _served_by_both(self.before, self.after)


def compare_policies(
    recorded: Recorded,
    policy: str,
    max_requests: int | None = None,
    progress: Progress = lambda num_ended: None,
) -> Comparison:
    """Serve the recorded requests with the recorded policy and with another one.

    policy: a built-in name, a plug-in, or `FILE.py:CLASS`. progress: called with the number of
    requests that ended. Raises ConfigError if the policy cannot be used. Also raises it
    for a recording that begins after the engine's start, or has too few steps to fit their times.
    """
    first = recorded.first
    if first is None or first.header["new"] is None:
        raise ConfigError(
            "the recording does not begin with the engine's start, so another policy cannot serve"
            " its requests. Record again, with a larger --record-max-mb if the start was deleted."
        )
    fitted = recorded.fit()
    own = first.header["settings"].get("scheduling_policy", "fifo")
    works = [RecordedWork(recorded, ANY_VOCABULARY, max_requests=max_requests) for _ in range(2)]
    before, after = (
        _run(first, name, work, fitted, progress)
        for name, work in zip((own, policy), works, strict=True)
    )
    names = _served_by_both(before, after)
    if not names:
        raise ConfigError("no request of the recording can be repeated to its end.")
    gains = before.ttft_s(names) - after.ttft_s(names)
    changes = [
        Change(
            recorded.requests[int(name)].request.request_id,
            before.served[name].num_prompt,
            before.served[name].wait_s,
            float(gain),
        )
        for name, gain in zip(names, gains, strict=True)
    ]
    moved = np.abs(_places(before, names) - _places(after, names))
    return Comparison(
        before,
        after,
        tuple(sorted(changes, key=lambda each: -each.gain_s)),
        int((moved > 0).sum()),
        int(moved.max()),
        len(recorded.requests[:max_requests]) - len(names),
        fitted,
    )


def _served_by_both(before: PolicyRun, after: PolicyRun) -> list[str]:
    runs = (before.served, after.served)
    return [n for n in runs[0] if n in runs[1] and all(r[n].first_token_s >= 0 for r in runs)]


def _places(run: PolicyRun, names: list[str]) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return each request's place in the order of first tokens; the arrival breaks ties."""
    first_s = np.array([run.served[name].first_token_s for name in names])
    places = np.empty(len(names), np.int64)
    places[np.argsort(first_s, kind="stable")] = np.arange(len(names))
    return places


def _run(
    first: Segment, policy: str, work: RecordedWork, fitted: Fitted, progress: Progress
) -> PolicyRun:
    clock, run = FakeClock(), Run()
    replica = Replica(restored(first, policy=policy), fitted, clock, 0, run.by_id, ANY_VOCABULARY)
    try:
        run_all([replica], work.arrivals(), clock, run, progress=progress)
    except EngineError as error:
        raise ConfigError(
            f"the policy {short_name(policy)!r} failed: {error.__cause__ or error} Compare it with"
            " the rules of docs/extend/policies.md."
        ) from error
    finally:
        replica.close()
    return PolicyRun(
        short_name(policy), run.by_id, run.num_preemptions, run.num_lost_tokens, run.duration_s
    )


# ---- output ----------------------------------------------------------------------------------


def lines_of(found: Comparison) -> Iterator[str]:
    """Yield the report: times, preemptions, order, and the requests that change most."""
    before, after = found.before, found.after
    skipped = f"; {found.num_skipped:,} more cannot be repeated" if found.num_skipped else ""
    yield f"{len(found.changes):,} requests of the recording{skipped}"
    yield f"{'':28}{before.policy:>14}{after.policy:>16}"
    figures = zip(_figures(before, found.names), _figures(after, found.names), strict=True)
    for (name, old), (_, new) in figures:
        share = f"{(new - old) / old:+9.1%}" if old else ""
        yield f"{name:<28}{_shown(old):>14}{_shown(new):>16}{share}"
    earlier = [each for each in found.changes if each.gain_s > SAME_S]
    later = [each for each in reversed(found.changes) if each.gain_s < -SAME_S]
    same = len(found.changes) - len(earlier) - len(later)
    yield f"first token: earlier for {len(earlier):,}, later for {len(later):,}, same for {same:,}"
    yield f"order of first tokens: {found.num_moved:,} moved, by up to {found.max_moved:,} places"
    for title, changes in (("earliest", earlier), ("latest", later)):
        for each in changes[:NUM_SHOWN]:
            times = f"{each.before_s * MS:,.0f} -> {(each.before_s - each.gain_s) * MS:,.0f} ms"
            yield f"  {title}: {each.request_id}, {each.num_prompt:,} prompt tokens: {times}"
    if (residuals := found.fitted.residuals) is not None:
        yield f"both columns are simulated; a step's time is off by {residuals.median:.0%} (median)"


def _figures(run: PolicyRun, names: list[str]) -> list[tuple[str, float]]:
    ttft_ms = run.ttft_s(names) * MS
    latency_ms = np.array([run.served[name].latency_s for name in names]) * MS
    return [
        ("TTFT mean (ms)", float(ttft_ms.mean())),
        *((f"TTFT p{each} (ms)", float(np.percentile(ttft_ms, each))) for each in PERCENTILES),
        ("latency mean (ms)", float(latency_ms.mean())),
        ("preemptions", run.num_preemptions),
        ("tokens computed again", run.num_lost_tokens),
        ("duration (s)", run.duration_s),
    ]


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
