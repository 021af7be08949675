"""Finding the rows that make a step fail, by running it again in parts.

Row counters change last in a step, so a step that failed can be run again, and a part of it is a
plan of its own: some of the rows, with what they start with and their block-table entries. Parts
that fail are halved until single rows fail. Parts run in the order of the plan's rows: a row may
use blocks which rows before it compute in the same step.

What a plan does besides its rows (released, forked, truncated, host tokens, swaps to host memory)
goes with every part until the first one succeeds, and with none after that. Until then nothing
counts and it can be done again. A row forked by the step in which its parent samples goes with its
parent; loads and copies go with the rows that have their blocks. (The source of a copy may be
written by the same plan, by the last one who shares the block; that is the slot which the owner of
the copy writes as well, so to copy it once more does no harm.)

Where rows cannot be computed again, only what the plan does besides is carried out once more
(`give_rows_up`), and the scheduler finds who is guilty (scheduler/suspects.py).

A swap that fails is no row's fault: before the first row is blamed for anything, what the plan does
besides its rows is carried out alone, and if that fails as well, without its swaps (`lost_swaps`).
"""

import dataclasses
import logging
from collections.abc import Iterable, Set
from typing import TYPE_CHECKING

import numpy as np

from quire.base.masks import MaskPromise
from quire.base.plan import BlockWrites, Int32, Move, Plan, StepResult

if TYPE_CHECKING:
    from quire.engine.executors.executor import Executor

logger = logging.getLogger("quire")

Part = tuple[Plan, StepResult]
Place = tuple[str, int, int]  # the kind of a move, cache group, block
FILLING = ("load", "copy")


def repeat_step(
    executor: "Executor",
    plan: Plan,
    later: list[Plan],
    masks: MaskPromise | None,
    error: str,
    is_repeatable: bool,
    has_stages: bool,
) -> StepResult:
    """Do what can be done about a plan that failed; return its result.

    later: the plans that were in flight after it, which the executor has answered. masks: of the
    plan. is_repeatable, has_stages: as `Scheduler.may_repeat_steps` and `has_stages` say.
    """
    if has_stages:
        logger.warning("step %d failed; all steps in flight are restarted: %s", plan.step_id, error)
        return give_all_up(plan, later, error)
    if is_repeatable:
        logger.warning("step %d failed and is repeated in parts: %s", plan.step_id, error)
        return bisect_step(executor, plan, masks)
    logger.warning("step %d failed; its rows are restarted one by one: %s", plan.step_id, error)
    return give_rows_up(executor, plan, error)


def bisect_step(executor: "Executor", plan: Plan, masks: MaskPromise | None = None) -> StepResult:
    """Repeat a plan that failed; the executor has answered all plans that it was given. masks: of
    the plan. Nothing is guessed any more: no guess is to cost a request.

    Rows that fail alone are in the result's row_errors, also those that do not sample. Halves come
    first: a step that fails by chance, or only as a whole, does not fail again and costs nobody.
    """
    bisection = _Bisection(executor, plan.without_drafts, masks)
    bisection.begin()
    result = combine(plan, bisection.done, bisection.errors)
    return dataclasses.replace(result, lost_swaps=bisection.has_lost_swaps)


def give_rows_up(executor: "Executor", plan: Plan, error: str) -> StepResult:
    """Carry out what a plan that failed does besides its rows, which cannot be computed again from
    where they were. The result has the error."""
    bisection = _Bisection(executor, plan, None)
    bisection.do_rest_alone()
    result = combine(plan, bisection.done)
    return dataclasses.replace(result, error=error, lost_swaps=bisection.has_lost_swaps)


def give_all_up(plan: Plan, later: Iterable[Plan], error: str) -> StepResult:
    """Make the result of a plan that failed where parts of it, and of the plans behind it, may have
    been carried out, some on one stage and some on another: nothing of them counts."""
    has_swaps = any(move.kind == "swap_out" for each in (plan, *later) for move in each.moves)
    return dataclasses.replace(combine(plan, []), error=error, lost_swaps=has_swaps)


class _Bisection:
    """done: parts that succeeded, with their results. errors: of rows that failed alone."""

    def __init__(self, executor: "Executor", plan: Plan, masks: MaskPromise | None) -> None:
        self.executor = executor
        self.plan = plan
        self.masks = masks
        self.done: list[Part] = []
        self.errors: dict[int, str] = {}
        self._moved: set[Place] = set()  # what loads and copies have filled
        self._has_swaps = any(move.kind == "swap_out" for move in plan.moves)
        self._has_tried_rest = False
        self._is_without_swaps = False

    @property
    def has_lost_swaps(self) -> bool:
        return self._has_swaps and (self._is_without_swaps or not self.done)

    def begin(self) -> None:
        num_rows = len(self.plan.rows)
        if num_rows == 0:
            self.do_rest_alone()
        elif num_rows == 1:
            self.run(0, 1)
        else:
            self.halve(0, num_rows)

    def run(self, first: int, last: int) -> None:
        """Carry out the rows first..last-1 of the plan, in halves if they fail."""
        error = self._try(self._part(self.plan.rows[first:last]))
        if error is None:
            return
        if last - first > 1:
            self.halve(first, last)
        elif self.do_rest_alone():
            self.run(first, last)  # it may have been that
        else:
            self.errors[int(self.plan.rows[first])] = f"the step failed: {error}"

    def halve(self, first: int, last: int) -> None:
        if last > first:
            middle = (first + last) // 2
            self.run(first, middle)
            self.run(middle, last)

    def _try(self, part: Plan) -> str | None:
        """Carry out a part; what went wrong."""
        self.executor.submit(part, self.masks if len(part.masked_rows) else None)
        result = self.executor.next_result()
        if result.error is None:
            self.done.append((part, result))
            self._moved |= {place for move in part.moves for place in _filled(move)}
        return result.error

    def _part(self, rows: Int32) -> Plan:
        part = restrict(self.plan, rows)
        if self.done:
            part = _rows_alone(part)
        if not self.plan.moves:
            return part
        writes = part.block_writes
        wanted = set(zip(writes.group.tolist(), writes.block_id.tolist(), strict=True))
        moves = [_filling(move, wanted, self._moved) for move in self.plan.moves]
        swaps = () if self.done or self._is_without_swaps else ("swap_out",)
        kept = [move for move in moves if len(move.source) and move.kind in (*swaps, *FILLING)]
        return dataclasses.replace(part, moves=tuple(kept))

    def do_rest_alone(self) -> bool:
        """Carry out what the plan does besides its rows, if this has swaps and was neither done nor
        tried yet; returns whether it is done now."""
        if self.done or self._has_tried_rest or not self._has_swaps:
            return False
        self._has_tried_rest = True
        nobody = self.plan.rows[:0]
        if self._try(self._part(nobody)) is None:
            return True
        self._is_without_swaps = True
        if self._try(self._part(nobody)) is None:
            return True
        self._is_without_swaps = False  # it was something else
        return False


def _filled(move: Move) -> set[Place]:
    """List the places that a load or a copy fills."""
    if move.kind not in FILLING:
        return set()
    return {(move.kind, move.group, block) for block in move.destination.tolist()}


def _filling(move: Move, wanted: Set[tuple[int, int]], moved: Set[Place]) -> Move:
    """Keep of a load or copy what fills wanted blocks and was not done yet; of a swap all. wanted:
    cache group and block."""
    if move.kind not in FILLING:
        return move
    kept = [
        (move.group, block) in wanted and (move.kind, move.group, block) not in moved
        for block in move.destination.tolist()
    ]
    if all(kept):
        return move
    return dataclasses.replace(move, source=move.source[kept], destination=move.destination[kept])


def restrict(plan: Plan, rows: Int32, gone: Set[int] = frozenset()) -> Plan:
    """Keep only these rows of a plan, and all that it does besides, also for rows that start with
    it but compute nothing yet. gone: rows whose sequences have ended or went back."""
    if len(rows) == len(plan.rows):
        return plan
    kept, samples = np.isin(plan.rows, rows), np.isin(plan.sample_sources, rows)
    row_set = set(rows.tolist()) | (set(plan.idle_rows) - gone)
    new = plan.new_forks
    forked = tuple(f for f in plan.forked if f not in new or f.parent in row_set)
    return dataclasses.replace(
        plan,
        rows=plan.rows[kept],
        num_tokens=plan.num_tokens[kept],
        computed_bound=plan.computed_bound[kept],
        last_ids=plan.last_ids[kept] if len(plan.last_ids) else plan.last_ids,
        sample_rows=plan.sample_rows[samples],
        num_candidates=plan.num_candidates[samples],
        sources=plan.sources[samples] if len(plan.sources) else plan.sources,
        masked_rows=plan.masked_rows[np.isin(plan.masked_rows, plan.sample_rows[samples])],
        drafts=tuple(draft for draft in plan.drafts if draft.row in row_set),
        forked=forked,
        started=tuple(start for start in plan.started if start.row in row_set),
        block_writes=_writes_of(plan.block_writes, row_set | {fork.child for fork in forked}),
    )


def _writes_of(writes: BlockWrites, rows: Set[int]) -> BlockWrites:
    kept = np.isin(writes.row, list(rows))
    return BlockWrites(
        writes.group[kept], writes.row[kept], writes.index[kept], writes.block_id[kept]
    )


def _leftover(plan: Plan, released: Set[int]) -> Plan:
    """Return what a plan without rows and moves does, for the next one to do. released: rows that
    changed hands since."""
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
    )


def with_leftover(plan: Plan, left: Plan) -> Plan:
    """Return a plan that first does what one without rows was to do."""
    left = _leftover(left, set(plan.released.tolist()))
    first, then = left.block_writes, plan.block_writes
    return dataclasses.replace(
        plan,
        released=np.concatenate([left.released, plan.released]),
        started=left.started + plan.started,
        forked=left.forked + plan.forked,
        host_tokens=left.host_tokens + plan.host_tokens,
        block_writes=BlockWrites(
            np.concatenate([first.group, then.group]),
            np.concatenate([first.row, then.row]),
            np.concatenate([first.index, then.index]),
            np.concatenate([first.block_id, then.block_id]),
        ),
    )


def reduce_plan(plan: Plan, left_out: Set[int], left: Plan | None) -> Plan:
    """Return a plan without the rows that are left out, which first does what `left` was to do. If
    that leaves it no rows of its own, it loses its copies too."""
    reduced = leave_out(plan, left_out)
    if len(plan.rows) and not len(reduced.rows):
        reduced = without_copies(reduced)
    return reduced if left is None else with_leftover(reduced, left)


def without_copies(plan: Plan) -> Plan:
    """Leave a plan that has lost its rows without the copies, which were for these. The other moves
    are done in their turn: once a plan's result is there, its blocks of host memory go to stores,
    or to whoever wants some."""
    return dataclasses.replace(plan, moves=tuple(m for m in plan.moves if m.kind != "copy"))


def leave_out(plan: Plan, rows: Set[int]) -> Plan:
    """Leave these rows out of a plan."""
    if not rows:
        return plan
    return restrict(plan, plan.rows[~np.isin(plan.rows, list(rows))], rows)


def combine(plan: Plan, parts: list[Part], errors: dict[int, str] | None = None) -> StepResult:
    """Combine the parts' results to one of the whole plan. Rows that no part sampled get token
    0."""
    width = max((result.token_ids.shape[1] for _, result in parts), default=1)
    token_ids = np.zeros((len(plan.sample_rows), width), np.int32)
    num_accepted = np.ones(len(plan.sample_rows), np.int32)
    whole = StepResult(plan.step_id, token_ids, num_accepted)
    place = {row: i for i, row in enumerate(plan.sample_rows.tolist())}
    unservable: tuple[int, ...] = ()
    for part, result in parts:
        at = [place[row] for row in part.sample_rows.tolist()]
        token_ids[at, : result.token_ids.shape[1]] = result.token_ids
        num_accepted[at] = result.num_accepted
        whole.candidates.update(result.candidates)
        whole.more_candidates.update(result.more_candidates)
        whole.prompt_candidates.update(result.prompt_candidates)
        whole.row_errors.update(result.row_errors)
        unservable += result.unservable_rows
    whole.row_errors.update(errors or {})
    return dataclasses.replace(
        whole,
        unservable_rows=unservable,
        duration_s=sum(result.duration_s for _, result in parts),
        lost_swaps=any(result.lost_swaps for _, result in parts),
        error=next((result.error for _, result in parts if result.error is not None), None),
    )


def _rows_alone(plan: Plan) -> Plan:
    """Keep of a plan only what it does for its rows."""
    nothing, idle = np.empty(0, np.int32), set(plan.idle_rows)
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
