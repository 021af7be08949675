"""Find the rows that make a step fail, by repeating it in parts.

Row counters change last in a step, so a failed step can be repeated. A part is a plan of its own:
some of the rows, with their starts and block-table entries. Failing parts are halved down to single
rows. Parts run in the order of the plan's rows: a row may use blocks that earlier rows compute.

The rest of the plan is released, forked, truncated, host tokens and swaps to host memory. It is in
each part until one succeeds, and in no later one. A row that is forked while its parent samples is
in its parent's part. Loads and copies are in the parts of the rows that use their blocks. Encoder
inputs are in the parts of the rows that read their outputs. (A block may be copied again after the
plan has written it: both owners write the same slot.)

If rows cannot be computed again, only the rest of the plan is repeated (`give_rows_up`). The
scheduler then finds the guilty rows (scheduler/suspects.py).

No row is to blame for a failing swap. Before the first row is blamed, the rest of the plan is
carried out alone. If that fails too, it is carried out without its swaps (`lost_swaps`).
"""

import dataclasses
import logging
from collections.abc import Iterable, Set
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.base.masks import MaskPromise
from quire.base.plan import BlockWrites, Int32, Move, Plan, StepResult

if TYPE_CHECKING:
    from quire.engine.executors.executor import Executor

logger = logging.getLogger("quire")

Part = tuple[Plan, StepResult]
FilledBlock = tuple[str, int, int]  # kind of a move, cache group, block
FILLING = ("load", "copy")
SCORES = "candidates", "more_candidates", "prompt_candidates"
BY_ROW = (*SCORES, "row_errors", "pooled", "token_values")


def repeat_step(
    executor: "Executor",
    plan: Plan,
    later: list[Plan],
    masks: MaskPromise | None,
    error: str,
    is_repeatable: bool,
    has_stages: bool,
) -> StepResult:
    """Repeat or give up a failed plan; return its result.

    later: the later plans in flight, whose results the caller has taken.
    masks: of the plan.
    is_repeatable, has_stages: values of `Scheduler.may_repeat_steps` and `Scheduler.has_stages`."""
    if has_stages:
        logger.warning("step %d failed; all steps in flight are restarted: %s", plan.step_id, error)
        return give_all_up(plan, later, error)
    if is_repeatable:
        logger.warning("step %d failed and is repeated in parts: %s", plan.step_id, error)
        return bisect_step(executor, plan, masks)
    logger.warning("step %d failed; its rows are restarted one by one: %s", plan.step_id, error)
    return give_rows_up(executor, plan, error)


def bisect_step(executor: "Executor", plan: Plan, masks: MaskPromise | None = None) -> StepResult:
    """Repeat a failed plan in parts, without its drafts, after the results of all plans are taken.

    Rows that fail alone are in the result's row_errors, even if they do not sample. Halves come
    first: a step that failed by chance, or only as a whole, then succeeds."""
    bisection = _Bisection(executor, plan.without_drafts, masks)
    bisection.begin()
    result = combine(plan, bisection.done, bisection.errors)
    return result.replace(lost_swaps=bisection.has_lost_swaps)


def give_rows_up(executor: "Executor", plan: Plan, error: str) -> StepResult:
    """Carry out the rest of a failed plan whose rows cannot be repeated. The result has the
    error."""
    bisection = _Bisection(executor, plan, None)
    bisection.do_rest_alone()
    result = combine(plan, bisection.done)
    return result.replace(error=error, lost_swaps=bisection.has_lost_swaps)


def give_all_up(plan: Plan, later: Iterable[Plan], error: str) -> StepResult:
    """Return the result of a failed plan of a model with stages. Some stages may have carried out
    parts of it and of later plans, so nothing of them counts."""
    has_swaps = any(move.kind == "swap_out" for each in (plan, *later) for move in each.moves)
    return combine(plan, []).replace(error=error, lost_swaps=has_swaps)


class _Bisection:
    """Repetition of a failed plan in halves. done: parts that succeeded, with their results.
    errors: of rows that failed alone."""

    def __init__(self, executor: "Executor", plan: Plan, masks: MaskPromise | None) -> None:
        self.executor = executor
        self.plan = plan
        self.masks = masks
        self.done: list[Part] = []
        self.errors: dict[int, str] = {}
        self._moved: set[FilledBlock] = set()  # filled by loads and copies
        self._has_swaps = any(move.kind == "swap_out" for move in plan.moves)
        self._has_repeated_rest = False
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
        """Carry out rows `first` to `last` - 1 of the plan, in halves if they fail."""
        error = self._try(self._part(self.plan.rows[first:last]))
        if error is None:
            return
        if last - first > 1:
            self.halve(first, last)
        elif self.do_rest_alone():
            self.run(first, last)  # the rest of the plan may have failed
        else:
            self.errors[int(self.plan.rows[first])] = f"the step failed: {error}"

    def halve(self, first: int, last: int) -> None:
        if last > first:
            middle = (first + last) // 2
            self.run(first, middle)
            self.run(middle, last)

    def _try(self, part: Plan) -> str | None:
        """Carry out a part; return its error, if any."""
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
        needed = set(zip(writes.group.tolist(), writes.block_id.tolist(), strict=True))
        moves = [_filling(move, needed, self._moved) for move in self.plan.moves]
        swaps = () if self.done or self._is_without_swaps else ("swap_out",)
        selected = [move for move in moves if len(move.source) and move.kind in (*swaps, *FILLING)]
        return part.replace(moves=tuple(selected))

    def do_rest_alone(self) -> bool:
        """Carry out the rest of the plan, if it has swaps and was not repeated yet. Return whether
        it succeeded now."""
        if self.done or self._has_repeated_rest or not self._has_swaps:
            return False
        self._has_repeated_rest = True
        no_rows = self.plan.rows[:0]
        if self._try(self._part(no_rows)) is None:
            return True
        self._is_without_swaps = True
        if self._try(self._part(no_rows)) is None:
            return True
        self._is_without_swaps = False  # the swaps were not to blame
        return False


def _filled(move: Move) -> set[FilledBlock]:
    """Return the blocks that a load or a copy fills."""
    if move.kind not in FILLING:
        return set()
    return {(move.kind, move.group, block) for block in move.destination.tolist()}


def _filling(move: Move, needed: Set[tuple[int, int]], moved: Set[FilledBlock]) -> Move:
    """Return the part of a load or copy that fills a (group, block) in `needed` and is not done
    yet. Return a swap unchanged."""
    if move.kind not in FILLING:
        return move
    selected = [
        (move.group, block) in needed and (move.kind, move.group, block) not in moved
        for block in move.destination.tolist()
    ]
    if all(selected):
        return move
    return dataclasses.replace(
        move, source=move.source[selected], destination=move.destination[selected]
    )


def restrict(plan: Plan, rows: Int32, ended: Set[int] = frozenset()) -> Plan:
    """Return a plan with only these rows [N], and with the rest of the plan. That includes rows
    that start with it but compute nothing. ended: rows whose sequences have ended or were
    preempted."""
    if len(rows) == len(plan.rows):
        return plan
    selected, samples = np.isin(plan.rows, rows), np.isin(plan.sample_sources, rows)
    row_set = set(rows.tolist()) | (set(plan.idle_rows) - ended)
    new = plan.new_forks
    forked = tuple(f for f in plan.forked if f not in new or f.parent in row_set)
    return plan.replace(
        rows=plan.rows[selected],
        num_tokens=plan.num_tokens[selected],
        computed_bound=plan.computed_bound[selected],
        last_ids=plan.last_ids[selected] if len(plan.last_ids) else plan.last_ids,
        sample_rows=plan.sample_rows[samples],
        num_candidates=plan.num_candidates[samples],
        sources=plan.sources[samples] if len(plan.sources) else plan.sources,
        masked_rows=plan.masked_rows[np.isin(plan.masked_rows, plan.sample_rows[samples])],
        drafts=tuple(draft for draft in plan.drafts if draft.row in row_set),
        **_encoding_of(plan, row_set),
        forked=forked,
        started=tuple(start for start in plan.started if start.row in row_set),
        block_writes=_writes_of(plan.block_writes, row_set | {fork.child for fork in forked}),
    )


def _encoding_of(plan: Plan, rows: Set[int]) -> dict[str, Any]:
    """Return the encoder reads of these rows, and the encoder inputs that they read."""
    reads = tuple(read for read in plan.encoder_reads if read.row in rows)
    read_slots = {slot for read in reads for slot in read.slots.tolist()}
    inputs = [
        each for each in plan.encoder_inputs if not read_slots.isdisjoint(each.slots.tolist())
    ]
    return {"encoder_inputs": tuple(inputs), "encoder_reads": reads}


def _writes_of(writes: BlockWrites, rows: Set[int]) -> BlockWrites:
    selected = np.isin(writes.row, list(rows))
    return BlockWrites(
        writes.group[selected],
        writes.row[selected],
        writes.index[selected],
        writes.block_id[selected],
    )


def _leftover(plan: Plan, released: Set[int]) -> Plan:
    """Return the rest of a plan that the next plan must include. released: rows released since."""
    started = tuple(start for start in plan.started if start.row not in released)
    forked = tuple(f for f in plan.forked if not {f.parent, f.child} & released)
    return plan.replace(
        started=started,
        forked=forked,
        host_tokens=tuple(host for host in plan.host_tokens if host.row not in released),
        block_writes=_writes_of(
            plan.block_writes, {item.row for item in started} | {fork.child for fork in forked}
        ),
    )


def with_leftover(plan: Plan, left: Plan) -> Plan:
    """Return a plan that also does, first, the rest of a plan without rows."""
    left = _leftover(left, set(plan.released.tolist()))
    first, then = left.block_writes, plan.block_writes
    return plan.replace(
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


def reduce_plan(plan: Plan, omitted: Set[int], left: Plan | None) -> Plan:
    """Return a plan without these rows that first does the rest of `left`.

    A plan that loses all of its rows loses its copies, too: they were for these rows. It keeps its
    other moves, since its result settles its blocks of host memory."""
    reduced = omit_rows(plan, omitted)
    if len(plan.rows) and not len(reduced.rows):
        moves = tuple(move for move in reduced.moves if move.kind != "copy")
        reduced = reduced.replace(moves=moves)
    return reduced if left is None else with_leftover(reduced, left)


def omit_rows(plan: Plan, rows: Set[int]) -> Plan:
    """Return a plan without these rows."""
    if not rows:
        return plan
    return restrict(plan, plan.rows[~np.isin(plan.rows, list(rows))], rows)


def combine(plan: Plan, parts: list[Part], errors: dict[int, str] | None = None) -> StepResult:
    """Combine the results of parts into one of the plan. Rows that no part sampled get token 0."""
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
        for name in BY_ROW:
            getattr(whole, name).update(getattr(result, name))
        unservable += result.unservable_rows
    whole.row_errors.update(errors or {})
    return whole.replace(
        unservable_rows=unservable,
        duration_s=sum(result.duration_s for _, result in parts),
        lost_swaps=any(result.lost_swaps for _, result in parts),
        error=next((result.error for _, result in parts if result.error is not None), None),
    )


def _rows_alone(plan: Plan) -> Plan:
    """Return a plan with only its rows and what these need."""
    nothing, idle = np.empty(0, np.int32), set(plan.idle_rows)
    written = set(plan.block_writes.row.tolist()) - idle
    return plan.replace(
        released=nothing,
        started=tuple(start for start in plan.started if start.row not in idle),
        block_writes=_writes_of(plan.block_writes, written),
        forked=plan.new_forks,
        truncated=(),
        host_tokens=(),
        moves=(),
    )
