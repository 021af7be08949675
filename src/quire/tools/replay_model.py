"""Replay a recording with its model: the same plans, executed, must give the same tokens.

Stores are not used. Blocks that came from a store are not in the recording, so the model stops when
the first one arrives. A last plan that only writes blocks to stores is not recorded.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.base.clock import MonotonicClock
from quire.base.errors import ConfigError, EngineError
from quire.base.kv_orders import Fetched
from quire.base.masks import MaskPromise
from quire.base.messages import Request
from quire.base.plan import Plan, StepResult
from quire.base.requests.numerics import differing_parts, differs, fingerprint
from quire.base.settings.config import config_from_flat
from quire.engine.executors.executor import Executor
from quire.engine.grammars.grammars import Grammars
from quire.engine.loop.bell import Bell
from quire.engine.recording.calls import UPDATE
from quire.engine.recording.files import Segment
from quire.engine.start.build import STORE_SETTINGS, build_core, ended_if_raised, start_ranks
from quire.kv.manager import KVManager
from quire.models.checkpoint.source import resolve_source
from quire.scheduler.core.sequence import Sequence
from quire.scheduler.scheduler import Scheduler
from quire.tools.replay import Difference, Outcome, Step, in_words, replay_all, restored

COMPILE_WAIT_S = 1.0  # interval between two checks for a compiled grammar
NOT_RECORDED = ("record", "record_tokens", "record_max_mb", "disable_log_stats")


class _Stop(Exception):
    """Ends the replay with the model."""


@dataclass(frozen=True)
class _Flying:
    """A plan that the executor has, and whose result is missing."""

    plan: Plan
    sequences: dict[int, Sequence]  # by the row in which they sample
    masks: MaskPromise | None  # None if no row has a mask


class _Masks:
    """Computes the masks of plans from the grammars of their requests, as the core does.

    bell: rung by `grammars` when a grammar is compiled.
    """

    def __init__(self, grammars: Grammars, bell: Bell) -> None:
        self._grammars, self._bell = grammars, bell
        self._followed: dict[str, Request] = {}

    def fill(self, flying: _Flying) -> None:
        """Compute the masks of the oldest plan in flight. Raises EngineError if a grammar does not
        compile."""
        if flying.masks is None:
            return
        for row in flying.plan.masked_rows.tolist():
            request = flying.sequences[row].request
            # Each segment starts with a snapshot, whose requests are new objects.
            if self._followed.get(request.request_id) is not request:
                self._followed[request.request_id] = request
                self._compile(request)
        self._grammars.fill(flying.masks, flying.plan, flying.sequences)

    def hear(self, step: Step) -> None:
        """Drop the grammars of requests that have ended."""
        self._grammars.hear(step.events)

    def forgo(self, flying: Iterable[_Flying]) -> None:
        """Release an executor that may wait for the masks of these plans."""
        for each in flying:
            if each.masks is not None and not each.masks.is_there:
                self._grammars.forgo(each.masks, each.plan)

    def _compile(self, request: Request) -> None:
        self._grammars.begin(request)
        while True:
            self._bell.forget()
            for ready in self._grammars.take():
                if ready.error is not None:
                    raise EngineError(f"request {request.request_id}: {ready.error}")
            if not self._grammars.num_open:
                return
            self._bell.wait(COMPILE_WAIT_S)


class _Runs:
    """Executes the plans of a replay and compares the results."""

    def __init__(self, executor: Executor, masks: _Masks) -> None:
        self.executor = executor
        self.masks = masks
        self.flying: deque[_Flying] = deque()
        self.difference: Difference | None = None
        self.note: str | None = None
        self.num_tokens = 0

    def __call__(self, segment: Segment, step: Step, scheduler: Scheduler) -> None:
        if step.difference is not None:
            return
        self.masks.hear(step)
        if step.plan is not None:
            self._submit(step.plan, step.sampling)
        if isinstance(step.call.value, Fetched) and any(step.call.value.ok):
            self.note = (
                f"blocks came from a store {in_words(step.call).partition(' at ')[2]} after its"
                " clock began, and are not in the recording; the model stops there"
            )
            raise _Stop
        if step.call.kind != UPDATE:
            return
        recorded: StepResult = step.call.value
        if recorded.row_errors:
            self.note = (
                f"step {recorded.step_id} failed when it was recorded; the model stops there"
            )
            raise _Stop
        result, done = self.executor.next_result(), self.flying.popleft()
        if self.flying:
            self.masks.fill(self.flying[0])
        self._compare(done.plan, recorded, result, in_words(step.call))

    def close(self) -> None:
        """Release the executor, which may wait for masks that are no longer computed."""
        self.masks.forgo(self.flying)

    def _submit(self, plan: Plan, sampling: Iterable[Sequence]) -> None:
        if plan.encoder_inputs:
            self.note = (
                f"step {plan.step_id} encodes an image or a video, whose pixels are not in the"
                " recording; the model stops there"
            )
            raise _Stop
        sequences = dict(zip(plan.sample_rows.tolist(), sampling, strict=True))
        masks = MaskPromise() if len(plan.masked_rows) else None
        self.flying.append(_Flying(plan, sequences, masks))
        if len(self.flying) == 1:  # before the executor, which may execute the plan at once
            self.masks.fill(self.flying[0])
        self.executor.submit(plan, masks)

    def _compare(self, plan: Plan, recorded: StepResult, result: StepResult, during: str) -> None:
        if result.error is not None:
            item, texts = "the outcome", ("a result", result.error)
        else:
            pairs = list(zip(_tokens(recorded), _tokens(result), strict=True))
            self.num_tokens += int(result.num_accepted.sum())
            at = next((i for i, (before, now) in enumerate(pairs) if before != now), None)
            if at is None:
                return
            item = f"the token of row {plan.sample_rows[at]}"
            texts = str(pairs[at][0]), str(pairs[at][1])
        self.difference = Difference(
            plan.step_id, item, *texts, during, f"plan of step {plan.step_id}"
        )
        raise _Stop


def _tokens(result: StepResult) -> list[list[int]]:
    """Return each row's valid tokens: up to the first rejected draft token."""
    pairs = zip(result.token_ids, result.num_accepted.tolist(), strict=True)
    return [tokens[:num].tolist() for tokens, num in pairs]


def replay_with_model(segments: Iterable[Segment], overrides: Mapping[str, Any]) -> Outcome:
    """Replay plans and model. overrides: settings that replace the recorded ones.

    Raises ConfigError if the recording has no tokens or does not begin with the engine's start."""
    listed = list(segments)
    if not listed[0].is_readable:
        return replay_all(listed[:1])
    scheduler = restored(listed[0])
    _check(listed, scheduler)
    recorded = listed[0].header["settings"]
    settings = {n: v for n, v in recorded.items() if n not in NOT_RECORDED} | dict(overrides)
    if scheduler.memory.kv.tier is not None and settings.get("kv_host_gb") is None:
        settings["kv_host_gb"] = _host_gb(scheduler)  # it may have been derived, even from stores
    settings |= STORE_SETTINGS
    config = config_from_flat(disable_log_stats=True, **settings)
    ranks = start_ranks(config)
    with ended_if_raised(ranks):
        source = resolve_source(config.model)
        built = build_core(config, source, MonotonicClock(), ranks=ranks)
    runs = _Runs(built.core.executor, _Masks(built.grammars, built.core.bell))
    outcome = Outcome()
    try:
        _check_sizes(scheduler.memory.kv, built.core.scheduler.memory.kv)
        replay_all(listed, runs, outcome)
    except _Stop:
        pass
    finally:
        runs.close()
        built.core.close()
    for segment in listed[outcome.num_segments :]:
        outcome.see(segment)
    outcome.difference = outcome.difference or runs.difference
    outcome.notes += _numerics_notes(listed[0].header.get("numerics"), built.numerics())
    if runs.note is not None:
        outcome.notes.append(runs.note)
    if outcome.difference is None:
        outcome.notes.append(f"{runs.num_tokens:,} sampled tokens are identical")
    return outcome


def _numerics_notes(recorded: str | None, ours: dict[str, str]) -> list[str]:
    """Return a note for each part of the numerics that differs from the recorded engine's, or for a
    fingerprint of another version."""
    mine = fingerprint(ours)
    if recorded is None or mine is None:
        return []
    try:
        names = differing_parts(recorded, mine)
    except ValueError as error:
        return [f"the numerics are not compared: {error}"]
    return [differs(name, f"from the recorded engine's; here: {ours[name]}") for name in names]


def _host_gb(scheduler: Scheduler) -> float:
    """Return the recorded tier's host memory, plus half a block for rounding."""
    assert scheduler.memory.kv.tier is not None
    return (max(scheduler.memory.kv.tier.limits) + 0.5) * sum(scheduler.memory.kv.block_bytes) / 1e9


def _check_sizes(recorded: KVManager, ours: KVManager) -> None:
    """Raise ConfigError if the recorded engine had more blocks than this one."""
    for place, setting, theirs, mine in (
        ("", "kv_cache_memory_bytes", recorded.pools, ours.pools),
        (" host", "kv_host_gb", recorded.host_pools, ours.host_pools),
    ):
        needed, has = (tuple(pool.num_blocks for pool in pools) for pools in (theirs, mine))
        if any(n > m for n, m in zip(needed, has, strict=True)):
            raise ConfigError(
                f"the recorded engine had {needed}{place} blocks, this one has {has}; give a"
                f" larger {setting}."
            )


def _check(segments: list[Segment], scheduler: Scheduler) -> None:
    header = segments[0].header
    if not header["has_tokens"]:
        raise ConfigError(
            "this recording holds no tokens; record with --record-tokens to replay the model."
        )
    is_fresh = not scheduler.lifecycle.sequences and not any(
        p.num_indexed for p in scheduler.memory.kv.pools
    )
    if not is_fresh:
        raise ConfigError(
            "this recording does not begin with the engine's start (older segments were removed),"
            " so the model's memory is not known; replay it without the model."
        )
