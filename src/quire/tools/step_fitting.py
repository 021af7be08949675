"""Fit step times to measured steps: a regression of durations on features of the plans.

    duration = fixed + tokens, with a steeper slope beyond some numbers + context
               + prompt x context + rows that start + rows that sample + blocks moved

After an idle time a step takes longer by a constant factor, because caches, clocks and threads are
cold.

All coefficients are non-negative, so that no kind of step gets a negative time. The fit minimizes
relative errors. Large errors, caused by other processes on the machine, count less.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.base.errors import ConfigError
from quire.base.plan import Plan
from quire.tools.report import write_report
from quire.tools.step_times import StepLoad

Float64 = npt.NDArray[np.float64]
BENDS = (16, 64, 256, 1024)  # numbers of tokens beyond which the slope may increase
FEATURES = (
    "fixed", "tokens", *(f"tokens beyond {bend}" for bend in BENDS), "context", "prompt x context",
    "rows that begin", "rows that sample", "blocks moved",
)  # fmt: skip
MIN_STEPS = 20
MIN_COLD_STEPS = 8
IDLE_S = 3e-3  # longer gaps between steps are idle time, not the host's work
ROUNDS = 5
SMALL = 0.02  # relative errors below this have equal weights
DISTURBED = 3.0  # steps that take longer than this times the fit do not count
KIND = "quire step times"
NUMBERS = {
    "host_s": 0.0, "host_row_s": 0.0, "host_begin_s": 0.0, "cold": 1.0, "copy_bytes_per_s": 0.0
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """A step and its duration."""

    plan: Plan
    duration_s: float
    host_s: float | None = None  # time to the next plan without the step's duration, if known
    idle_s: float = 0.0  # idle time before the step

    @property
    def is_cold(self) -> bool:
        return is_cold(self.plan, self.idle_s)


@dataclass(frozen=True)
class Residuals:
    """The fit's relative errors. `total` is the error of the sum of all durations."""

    num_steps: int
    median: float
    p90: float
    total: float


@dataclass(frozen=True)
class Fitted:
    """Fitted step times."""

    step: dict[str, float]  # coefficients in seconds, by FEATURES
    host_s: float = 0.0  # the host's time between two steps
    host_row_s: float = 0.0  # the host's additional time per row
    host_begin_s: float = 0.0  # the host's additional time per row that starts
    cold: float = 1.0  # factor on the duration after an idle time
    copy_bytes_per_s: float = 0.0
    model: str = ""  # measured model, for information
    device: str = ""  # measured device, for information
    residuals: Residuals | None = field(default=None, compare=False)

    def seconds(self, plan: Plan) -> float:
        """Return the device's time for a plan."""
        values = features(plan)
        return sum(self.step.get(name, 0.0) * x for name, x in zip(FEATURES, values, strict=True))

    def plans_s(self, step_id: int, free_s: float) -> float:
        return free_s + self.host_s

    def carry_out(self, plan: Plan, begins_s: float, idle_s: float) -> tuple[float, float]:
        factor = self.cold if is_cold(plan, idle_s) else 1.0
        duration_s = factor * self.seconds(plan)
        rows_s = self.host_row_s * len(plan.rows) + self.host_begin_s * len(plan.started)
        return begins_s + duration_s + factor * rows_s, duration_s


def is_cold(plan: Plan, idle_s: float) -> bool:
    """Return whether a step followed an idle time, rather than a wait for the host."""
    return idle_s >= IDLE_S and len(plan.started) == len(plan.rows)


def features(plan: Plan) -> tuple[float, ...]:
    """Return the features of a plan, in the order of FEATURES."""
    load = StepLoad.of(plan)
    beyond = (max(0, load.num_tokens - bend) for bend in BENDS)
    prompts = load.num_pairs - load.num_context
    return (
        1, load.num_tokens, *beyond, load.num_context, max(0, prompts), len(plan.started),
        load.num_sampled, load.num_moved,
    )  # fmt: skip


def fit_steps(
    steps: Sequence[Measured], copy_bytes_per_s: float = 0.0, model: str = "", device: str = ""
) -> Fitted:
    """Fit the coefficients. Raises ConfigError for too few steps."""
    known = [each for each in steps if each.duration_s > 0]
    warm = [each for each in known if not each.is_cold]
    if len(warm) < MIN_STEPS:
        raise ConfigError(
            f"{len(warm)} steps with known durations are too few to fit step times; at least"
            f" {MIN_STEPS} are needed."
        )
    inputs, durations = _inputs(warm), np.array([each.duration_s for each in warm])
    coefficients = _robust(inputs, durations)
    errors = np.abs(inputs @ coefficients - durations) / durations
    total = float((inputs @ coefficients).sum() / durations.sum() - 1)
    quantiles = np.quantile(errors, [0.5, 0.9]).tolist()
    return Fitted(
        dict(zip(FEATURES, coefficients.tolist(), strict=True)),
        *_host(warm),
        _cold([each for each in known if each.is_cold], coefficients),
        copy_bytes_per_s,
        model,
        device,
        Residuals(len(warm), quantiles[0], quantiles[1], total),
    )


def _inputs(steps: Sequence[Measured]) -> Float64:
    return np.array([features(each.plan) for each in steps], float)


def _cold(steps: Sequence[Measured], coefficients: Float64) -> float:
    """Return the factor by which these steps took longer than the fit."""
    if len(steps) < MIN_COLD_STEPS:
        return 1.0
    durations = np.array([each.duration_s for each in steps])
    return max(1.0, float(np.median(durations / (_inputs(steps) @ coefficients))))


def _host(steps: Sequence[Measured]) -> tuple[float, float, float]:
    """Return the host's time between steps, per row, and per row that starts."""
    known = [
        (len(each.plan.rows), len(each.plan.started), each.host_s)
        for each in steps
        if each.host_s is not None
    ]
    if len(known) < MIN_STEPS:
        return 0.0, 0.0, 0.0
    rows, started, host_s = np.array(known, float).T
    inputs = np.stack([np.ones(len(rows)), rows, started], 1)
    fixed, per_row, per_begin = _robust(inputs, np.maximum(host_s, 1e-6)).tolist()
    return fixed, per_row, per_begin


def _robust(inputs: Float64, targets: Float64) -> Float64:
    """Fit by relative errors, and reduce the weight of large ones from round to round.

    Then scale the result to the right total, without steps beyond DISTURBED times their fit."""
    weights = np.ones(len(targets))
    found = np.zeros(inputs.shape[1])
    for _ in range(ROUNDS):
        share = np.sqrt(weights) / targets
        found = non_negative(inputs * share[:, None], targets * share)
        weights = 1 / np.maximum(np.abs(inputs @ found - targets) / targets, SMALL)
    expected = inputs @ found
    usual = targets <= DISTURBED * expected
    scale = targets[usual].sum() / expected[usual].sum() if usual.any() else 1.0
    return found * scale


def non_negative(inputs: Float64, targets: Float64) -> Float64:
    """Return x >= 0 that minimizes |inputs x - targets| (Lawson and Hanson's method)."""
    sizes = np.linalg.norm(inputs, axis=0)
    matrix = inputs / np.where(sizes > 0, sizes, 1)
    x = np.zeros(matrix.shape[1])
    active = np.zeros(len(x), bool)
    for _ in range(10 * len(x)):
        gradient = np.where(active, -np.inf, matrix.T @ (targets - matrix @ x))
        if active.all() or gradient.max() <= 1e-10 * np.linalg.norm(targets):
            break
        active[gradient.argmax()] = True
        while True:
            trial = np.zeros(len(x))
            trial[active] = np.linalg.lstsq(matrix[:, active], targets, rcond=None)[0]
            low = active & (trial <= 0)
            if not low.any():
                break
            steps = x[low] / (x[low] - trial[low])
            x += steps.min() * (trial - x)
            active &= x > 1e-15
        x = trial
    found: Float64 = x / np.where(sizes > 0, sizes, 1)
    return found


# ---- files and output ------------------------------------------------------------------------


def lines_of(fitted: Fitted) -> list[str]:
    """Return lines with coefficients and residuals."""
    lines = [f"  {name:<24} {value * 1e6:12.4f} us" for name, value in fitted.step.items() if value]
    lines.append(f"  {'host, between steps':<24} {fitted.host_s * 1e6:12.4f} us")
    lines.append(f"  {'host, per row':<24} {fitted.host_row_s * 1e6:12.4f} us")
    lines.append(f"  {'host, per row that begins':<24} {fitted.host_begin_s * 1e6:11.4f} us")
    lines.append(f"  {'after nothing to do':<24} {fitted.cold:12.2f} times as long")
    if (found := fitted.residuals) is not None:
        lines.append(
            f"  residuals of {found.num_steps:,} steps: median {found.median:.1%}, 90th percentile"
            f" {found.p90:.1%}; of the total time {found.total:+.1%}"
        )
    return lines


def write_fitted(path: Path | None, fitted: Fitted) -> None:
    """Write the fit and the machine's facts as JSON if a path is given. Raises ConfigError."""
    write_report(path, {"kind": KIND, **asdict(fitted)})


def read_fitted(path: Path) -> Fitted:
    """Read a file of `write_fitted`. Raises ConfigError."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"the step times {path} cannot be read ({error}).") from error
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise ConfigError(
            f"{path} holds no step times; give the output of `quire bench calibrate"
            " --output-json`, or a recording (`quire serve --record DIR`)."
        )
    numbers = {name: data.get(name, default) for name, default in NUMBERS.items()}
    step = data.get("step")
    step = step if isinstance(step, dict) else {"": 0}
    values = [*numbers.values(), *step.values()]
    if not step.keys() <= set(FEATURES) or not all(
        isinstance(v, int | float) and v >= 0 for v in values
    ):
        raise ConfigError(f"{path}: `step` must hold numbers from 0 by {', '.join(FEATURES)}.")
    model, device = str(data.get("model", "")), str(data.get("device", ""))
    return Fitted(step, **numbers, model=model, device=device)
