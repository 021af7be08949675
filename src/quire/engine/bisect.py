"""Finding the rows that make a step fail, by running it again in parts.

Row counters change last in a step, so a step that failed can be run again, and a part of it is a
plan of its own: some of the rows, with what they start with and their block-table entries. Parts
that fail are halved until single rows fail. Parts run in the order of the plan's rows: a row may
use blocks which rows before it compute in the same step.

What a plan does beside its rows (released, forked, truncated, host tokens, moves) goes with every
part until the first one succeeds, and with none after that. Until then nothing counts and it can be
done again. A row forked by the step in which its parent samples goes with its parent. (The source
of a copy may be written by the same plan, by the last one who shares the block; that is the slot
which the owner of the copy writes as well, so to copy it once more does no harm.)
"""

import dataclasses
from collections.abc import Set
from typing import TYPE_CHECKING

import numpy as np

from quire.base.plan import BlockWrites, Int32, Plan, StepResult

if TYPE_CHECKING:
    from quire.engine.executor import Executor

STEP_FAILED = "the step failed"  # how the error of a guilty row begins

Part = tuple[Plan, StepResult]


def bisect_step(executor: "Executor", plan: Plan) -> StepResult:
    """Repeat a plan that failed; the executor has answered all plans that it was given.

    Rows that fail alone are in the result's row_errors, also those that do not sample. Halves come
    first: a step that fails by chance, or only as a whole, does not fail again and costs nobody.
    """
    bisection = _Bisection(executor, plan)
    num_rows = len(plan.rows)
    if num_rows == 1:
        bisection.run(0, 1)
    else:
        bisection.halve(0, num_rows)
    return combine(plan, bisection.done, bisection.errors)


class _Bisection:
    """done: parts that succeeded, with their results. errors: of rows that failed alone."""

    def __init__(self, executor: "Executor", plan: Plan) -> None:
        self.executor = executor
        self.plan = plan
        self.done: list[Part] = []
        self.errors: dict[int, str] = {}

    def run(self, first: int, last: int) -> None:
        """The rows first..last-1 of the plan, in halves if they fail."""
        part = restrict(self.plan, self.plan.rows[first:last])
        if self.done:
            part = _rows_alone(part)
        self.executor.submit(part)
        result = self.executor.next_result()
        if result.error is None:
            self.done.append((part, result))
        elif last - first == 1:
            self.errors[int(part.rows[0])] = f"{STEP_FAILED}: {result.error}"
        else:
            self.halve(first, last)

    def halve(self, first: int, last: int) -> None:
        if last > first:
            middle = (first + last) // 2
            self.run(first, middle)
            self.run(middle, last)


def restrict(plan: Plan, rows: Int32, gone: Set[int] = frozenset()) -> Plan:
    """The plan with only these of its rows, and all that it does beside them: also for rows that
    start with it, but compute nothing yet. gone: rows whose sequences have ended or went back."""
    if len(rows) == len(plan.rows):
        return plan
    kept, samples = np.isin(plan.rows, rows), np.isin(plan.sample_sources, rows)
    row_set = set(rows.tolist()) | (idle_rows(plan) - gone)
    new = plan.new_forks
    forked = tuple(f for f in plan.forked if f not in new or f.parent in row_set)
    return dataclasses.replace(
        plan,
        rows=plan.rows[kept],
        num_tokens=plan.num_tokens[kept],
        computed_bound=plan.computed_bound[kept],
        sample_rows=plan.sample_rows[samples],
        num_candidates=plan.num_candidates[samples],
        sources=plan.sources[samples] if len(plan.sources) else plan.sources,
        forked=forked,
        started=tuple(start for start in plan.started if start.row in row_set),
        block_writes=_writes_of(plan.block_writes, row_set | {fork.child for fork in forked}),
    )


def idle_rows(plan: Plan) -> set[int]:
    """Rows that start with a plan and compute nothing in it."""
    return {start.row for start in plan.started} - set(plan.rows.tolist())


def _writes_of(writes: BlockWrites, rows: Set[int]) -> BlockWrites:
    kept = np.isin(writes.row, list(rows))
    return BlockWrites(
        writes.group[kept], writes.row[kept], writes.index[kept], writes.block_id[kept]
    )


def _leftover(plan: Plan, released: Set[int]) -> Plan:
    """What a plan without rows does: for the next one. released: rows that changed hands since.

    Copies are left out: they were for rows that the plan has lost.
    """
    started = tuple(start for start in plan.started if start.row not in released)
    forked = tuple(f for f in plan.forked if not {f.parent, f.child} & released)
    return dataclasses.replace(
        plan,
        started=started,
        forked=forked,
        host_tokens=tuple(host for host in plan.host_tokens if host.row not in released),
        block_writes=_writes_of(
            plan.block_writes, {item.row for item in started} | {fork.child for fork in forked}
        ),
        moves=tuple(move for move in plan.moves if move.kind != "copy"),
    )


def with_leftover(plan: Plan, left: Plan) -> Plan:
    """A plan that also does, before, what one without rows was to do."""
    left = _leftover(left, set(plan.released.tolist()))
    first, then = left.block_writes, plan.block_writes
    return dataclasses.replace(
        plan,
        released=np.concatenate([left.released, plan.released]),
        started=left.started + plan.started,
        forked=left.forked + plan.forked,
        host_tokens=left.host_tokens + plan.host_tokens,
        moves=left.moves + plan.moves,
        block_writes=BlockWrites(
            np.concatenate([first.group, then.group]),
            np.concatenate([first.row, then.row]),
            np.concatenate([first.index, then.index]),
            np.concatenate([first.block_id, then.block_id]),
        ),
    )


def leave_out(plan: Plan, rows: set[int]) -> Plan:
    """The plan without these rows."""
    if not rows:
        return plan
    return restrict(plan, plan.rows[~np.isin(plan.rows, list(rows))], rows)


def combine(plan: Plan, parts: list[Part], errors: dict[int, str] | None = None) -> StepResult:
    """The parts' results as one of the whole plan. Rows that no part sampled get token 0."""
    width = max((result.token_ids.shape[1] for _, result in parts), default=1)
    token_ids = np.zeros((len(plan.sample_rows), width), np.int32)
    num_accepted = np.ones(len(plan.sample_rows), np.int32)
    whole = StepResult(plan.step_id, token_ids, num_accepted)
    place = {row: i for i, row in enumerate(plan.sample_rows.tolist())}
    moves: tuple[int, ...] = ()
    unservable: tuple[int, ...] = ()
    for part, result in parts:
        at = [place[row] for row in part.sample_rows.tolist()]
        token_ids[at, : result.token_ids.shape[1]] = result.token_ids
        num_accepted[at] = result.num_accepted
        whole.candidates.update(result.candidates)
        whole.prompt_candidates.update(result.prompt_candidates)
        whole.row_errors.update(result.row_errors)
        unservable += result.unservable_rows
        moves += result.completed_moves
    whole.row_errors.update(errors or {})
    duration_s = sum(result.duration_s for _, result in parts)
    return dataclasses.replace(
        whole, completed_moves=moves, unservable_rows=unservable, duration_s=duration_s
    )


def _rows_alone(plan: Plan) -> Plan:
    """The plan without what it does beside its rows."""
    nothing, idle = np.empty(0, np.int32), idle_rows(plan)
    written = set(plan.block_writes.row.tolist()) - idle
    return dataclasses.replace(
        plan,
        released=nothing,
        started=tuple(start for start in plan.started if start.row not in idle),
        block_writes=_writes_of(plan.block_writes, written),
        forked=plan.new_forks,
        truncated=(),
        host_tokens=(),
        moves=(),
    )
