"""A recording once more, with its model: the same plans, carried out, must give the same tokens."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from quire.base.clock import MonotonicClock
from quire.base.config import config_from_flat
from quire.base.errors import ConfigError
from quire.base.plan import Plan, StepResult
from quire.engine.build import build_core
from quire.engine.calls import UPDATE
from quire.engine.executor import Executor
from quire.engine.recording import Segment
from quire.models.source import resolve_model
from quire.scheduler.scheduler import Scheduler
from quire.tools.replay import Difference, Outcome, Step, in_words, replay_all, restored

NOT_RECORDED = ("record", "record_tokens", "record_max_mb", "disable_log_stats")


class _Stop(Exception):
    """The replay with the model ends here."""


class _Runs:
    """Carries out the plans of a replay and compares what they give."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.plans: list[Plan] = []
        self.difference: Difference | None = None
        self.note: str | None = None
        self.num_tokens = 0

    def __call__(self, segment: Segment, step: Step, scheduler: Scheduler) -> None:
        if step.difference is not None:
            return
        if step.plan is not None:
            self.plans.append(step.plan)
            self.executor.submit(step.plan)
        if step.call.kind != UPDATE:
            return
        recorded: StepResult = step.call.value
        if recorded.row_errors:
            self.note = (
                f"step {recorded.step_id} failed when it was recorded; the model stops there"
            )
            raise _Stop
        plan, result = self.plans.pop(0), self.executor.next_result()
        self._compare(plan, recorded, result, in_words(step.call))

    def _compare(self, plan: Plan, recorded: StepResult, result: StepResult, during: str) -> None:
        if result.error is not None:
            what, told = "the outcome", ("a result", result.error)
        else:
            wrong = np.flatnonzero((recorded.token_ids != result.token_ids).any(1))
            self.num_tokens += len(result.token_ids)
            if not len(wrong):
                return
            at = int(wrong[0])
            what = f"the token of row {plan.sample_rows[at]}"
            told = str(recorded.token_ids[at].tolist()), str(result.token_ids[at].tolist())
        self.difference = Difference(
            plan.step_id, what, *told, during, f"plan of step {plan.step_id}"
        )
        raise _Stop


def replay_with_model(segments: Iterable[Segment], overrides: Mapping[str, Any]) -> Outcome:
    """overrides: settings that replace the recorded ones. Raises ConfigError if the recording has
    no tokens, or does not begin with the engine's start."""
    listed = list(segments)
    scheduler = restored(listed[0])
    _check(listed, scheduler)
    recorded = listed[0].header["settings"]
    settings = {n: v for n, v in recorded.items() if n not in NOT_RECORDED} | dict(overrides)
    config = config_from_flat(disable_log_stats=True, **settings)
    source = resolve_model(config.model.model, config.model.revision)
    built = build_core(config, source, MonotonicClock())
    sizes = tuple(pool.num_blocks for pool in scheduler.kv.pools)
    if any(n > m for n, m in zip(sizes, built.memory.num_blocks, strict=True)):
        raise ConfigError(
            f"the recorded engine had {sizes} blocks, this one has {built.memory.num_blocks}; give"
            " a larger kv_cache_memory_bytes."
        )
    runs = _Runs(built.core.executor)
    outcome = Outcome()
    try:
        replay_all(listed, runs, outcome)
    except _Stop:
        pass
    finally:
        built.core.close()
    outcome.difference = outcome.difference or runs.difference
    if runs.note is not None:
        outcome.notes.append(runs.note)
    if outcome.difference is None:
        outcome.notes.append(f"{runs.num_tokens:,} sampled tokens are identical")
    return outcome


def _check(segments: list[Segment], scheduler: Scheduler) -> None:
    header = segments[0].header
    if not header["has_tokens"]:
        raise ConfigError("this recording holds no tokens; the model needs --record-tokens.")
    is_fresh = not scheduler.sequences and not any(p.num_indexed for p in scheduler.kv.pools)
    if not is_fresh:
        raise ConfigError(
            "this recording does not begin with the engine's start (older segments were removed),"
            " so the model's memory is not known; replay it without the model."
        )
