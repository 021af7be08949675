"""Taking the result of a step: pending tokens become known, and some sequences end.

The common case, every sampling row still belongs to the sequence that it was planned for, is array
arithmetic. A sequence preempted or ended meanwhile is told apart by its row's epoch.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.base.errors import REQUEST_FAILED, STEP_FAILED
from quire.base.events import Stepped
from quire.base.plan import StepResult
from quire.base.step_outputs import Failure, Finish
from quire.scheduler.beam_rows import is_beam, take_beams
from quire.scheduler.failures import Broken, find_broken
from quire.scheduler.flight import Flight
from quire.scheduler.outputs import OutputsBuilder
from quire.scheduler.preemption import preempt
from quire.scheduler.sequence import NUM_STOP_IDS, Int32, Sequence
from quire.scheduler.swap import forget

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler


def take_result(
    scheduler: "Scheduler", flight: Flight, result: StepResult, now: float
) -> OutputsBuilder:
    """Apply a result to the scheduler's state; returns what to tell the clients."""
    assert result.step_id == flight.plan.step_id, "results must come in the order of plans"
    table, rows = scheduler.table, flight.plan.sample_rows
    outputs = OutputsBuilder()
    _name_rows(flight, outputs)
    first_event = len(scheduler.events)
    if result.row_errors or result.lost_swaps:
        _take_errors(scheduler, flight, result, outputs, now)
    _take_prompt_candidates(scheduler, flight, result, outputs)
    token_ids, epochs, sequences = result.token_ids[:, 0], flight.epochs, flight.sequences
    beams = rows[:0]
    if scheduler.num_beam_searches:
        kept = take_beams(scheduler, flight, result, outputs, now)
        beams, rows, token_ids = rows[~kept], rows[kept], token_ids[kept]
        epochs, sequences = epochs[kept], sequences[kept]
    live = table.epoch[rows] == epochs
    got_token = rows
    if not live.all():
        is_taken = np.ones(len(rows), bool)
        is_taken[~live] = [
            _take_late(scheduler, s, int(t), r in flight.left_out, outputs, now)
            for s, t, r in zip(sequences[~live], token_ids[~live], rows[~live], strict=True)
        ]
        got_token = rows[is_taken]
        rows, token_ids, sequences = rows[live], token_ids[live], sequences[live]
    outputs.set_tokens(rows, table.arrival[rows], token_ids)
    if len(beams):
        got_token = np.concatenate([got_token, beams])
    known = table.known[rows]
    table.tokens[rows, known] = token_ids
    known = known + 1
    table.known[rows] = known
    stops = (table.stop_ids[rows] == token_ids[:, None]).any(1) & (known >= table.min_known[rows])
    ends = np.flatnonzero(stops | (known >= table.limit[rows]))
    for i in ends:
        _end(scheduler, sequences[i], int(token_ids[i]), outputs, now)
    _check_long_stop_lists(scheduler, sequences, token_ids, outputs, now)
    num_tokens = flight.plan.num_scheduled_tokens
    stepped = Stepped(now, result.step_id, got_token, num_tokens, result.duration_s)
    scheduler.events.insert(first_event, stepped)  # before the endings that came with it
    if result.candidates:
        sampled = dict(zip(flight.plan.sample_rows.tolist(), flight.sequences, strict=True))
        for row, candidates in result.candidates.items():
            if row not in flight.left_out:
                outputs.set_candidates(sampled[row], candidates)
    return outputs


def _name_rows(flight: Flight, outputs: OutputsBuilder) -> None:
    """Tell who is in the rows that were taken with this plan, before the first token there."""
    plan = flight.plan
    if not plan.started and not plan.forked:
        return
    holders = {row: s for (row, _), s in zip(flight.lines, flight.row_sequences, strict=True)}
    taken = [start.row for start in plan.started] + [fork.child for fork in plan.forked]
    for row in taken:
        if row in holders and not is_beam(holders[row]):
            outputs.name_row(row, holders[row])


def _end(
    scheduler: "Scheduler", sequence: Sequence, token_id: int, outputs: OutputsBuilder, now: float
) -> None:
    """The sequence's last known token ends it: as a stop token, or by length."""
    if sequence.stops_at(token_id):
        is_eos = token_id in sequence.request.eos_token_ids
        finish = Finish("stop", None if is_eos else token_id)
    else:
        finish = Finish("length")
    outputs.finish(sequence, finish)
    scheduler.finish(sequence, finish.reason, now)


def _take_late(
    scheduler: "Scheduler",
    sequence: Sequence,
    token_id: int,
    is_void: bool,
    outputs: OutputsBuilder,
    now: float,
) -> bool:
    """A token for a sequence that lost its row: kept if it was preempted, dropped if it ended or
    if the token is void. Until it came, the sequence was not to get a row again."""
    if sequence.finish_reason is not None or sequence.num_pending_lost == 0:
        return False
    sequence.num_pending_lost -= 1
    if is_void:
        forget(scheduler, sequence)
        return False
    sequence.saved_tokens = np.append(sequence.saved_tokens, np.int32(token_id))
    outputs.update_of(sequence).token_ids.append(token_id)
    if sequence.stops_at(token_id) or sequence.num_known_tokens >= sequence.limit:
        _end(scheduler, sequence, token_id, outputs, now)
    return True


def _check_long_stop_lists(
    scheduler: "Scheduler",
    sequences: npt.NDArray[np.object_],
    token_ids: Int32,
    outputs: OutputsBuilder,
    now: float,
) -> None:
    """Sequences with more stop ids than the row holds are checked one by one."""
    if not scheduler.num_long_stop_lists:
        return
    for sequence, token_id in zip(sequences, token_ids, strict=True):
        long = len(sequence.request.stop_token_ids) > NUM_STOP_IDS
        if long and sequence.finish_reason is None and sequence.stops_at(int(token_id)):
            _end(scheduler, sequence, int(token_id), outputs, now)


def _take_errors(
    scheduler: "Scheduler", flight: Flight, result: StepResult, outputs: OutputsBuilder, now: float
) -> None:
    """Sequences whose rows failed end with an error, also if they lost the row meanwhile; those
    that share what such a row was to compute go back to the queue."""
    errors = {
        row: Finish("error", error=Failure(_code_of(row, result), message))
        for row, message in result.row_errors.items()
        if row not in flight.left_out
    }
    if not errors and not result.lost_swaps:
        return
    flights = [flight, *scheduler.flights]
    broken = find_broken(flights, errors, len(scheduler.kv.pools), result.lost_swaps)
    scheduler.kv.unindex_blocks(broken.blocks)
    if scheduler.kv.tier is not None:
        scheduler.kv.tier.forget_unsettled()
    for sequence, finish in list(broken.failed.values()):  # a request fails as a whole
        for member in scheduler.members(sequence):
            line = member.row, int(scheduler.table.epoch[member.row])
            if member.row >= 0:
                broken.failed.setdefault(line, (member, finish))
    for later in flights:
        later.leave_out(broken.failed.keys() | broken.dependants.keys())
    for sequence, finish in list(broken.failed.values()):
        for member in scheduler.members(sequence):
            _fail(scheduler, member, finish, outputs, now)
    if scheduler.stores is not None:
        scheduler.stores.remove(_digests_of(scheduler, broken))
    failed = [sequence for sequence, _ in broken.failed.values()]
    _forget_swapped(scheduler, broken)
    for (row, epoch), sequence in broken.dependants.items():
        for member in scheduler.members(sequence):
            forget(scheduler, member)  # what was swapped out cannot be relied on
        if sequence.row == row and scheduler.table.epoch[row] == epoch:
            cause = failed[0] if failed else sequence
            preempt(scheduler, sequence, cause.request.request_id, now)
    scheduler.pins.compute_again(failed, now)


def _forget_swapped(scheduler: "Scheduler", broken: Broken) -> None:
    """Who was swapped out into blocks that cannot be relied on computes again."""
    if not any(broken.host):
        return
    for sequence in list(scheduler.sequences.values()):
        members = scheduler.members(sequence)
        away = [m.host_blocks.tables for m in members if m.host_blocks is not None]
        if any(
            not bad.isdisjoint(table.live_blocks)
            for tables in away
            for table, bad in zip(tables, broken.host, strict=True)
        ):
            for member in members:
                forget(scheduler, member)


def _digests_of(scheduler: "Scheduler", broken: Broken) -> list[bytes]:
    """Of all blocks of the requests that failed."""
    failed = [m for s, _ in broken.failed.values() for m in scheduler.members(s)]
    return list(dict.fromkeys(digest for member in failed for digest in member.digests))


def _code_of(row: int, result: StepResult) -> str:
    """Why a row has an error."""
    return REQUEST_FAILED if row in result.unservable_rows else STEP_FAILED


def _fail(
    scheduler: "Scheduler", sequence: Sequence, finish: Finish, outputs: OutputsBuilder, now: float
) -> None:
    """End with an error. All that the index has of the sequence's tokens goes, and all that stores
    have of them: an error that shows in a sampled token may have come with any of them. It may have
    been kept long before it shows, if the sequence was preempted since, or if it shares what
    another one computed that was never sampled."""
    if sequence.finish_reason is not None:
        return
    outputs.finish(sequence, finish)
    scheduler.kv.forget(sequence.digests)
    scheduler.finish(sequence, "error", now)


def _take_prompt_candidates(
    scheduler: "Scheduler", flight: Flight, result: StepResult, outputs: OutputsBuilder
) -> None:
    """Hand out each prompt position's logprobs once, also if it was computed again, and also to a
    sequence that has lost its row meanwhile: it goes on behind what it has computed."""
    if not result.prompt_candidates:
        return
    for i, row in enumerate(flight.plan.rows.tolist()):
        candidates = result.prompt_candidates.get(row)
        sequence = flight.row_sequences[i]
        if candidates is None or row in flight.left_out or sequence.finish_reason is not None:
            continue
        start = int(flight.plan.computed_bound[i])
        fresh = candidates[max(0, sequence.num_prompt_logprobs - start) :]
        sequence.num_prompt_logprobs += len(fresh)
        sequence.found_at = sequence.pinned_at = -1  # it may find more now
        outputs.update_of(sequence).prompt_candidates = fresh
