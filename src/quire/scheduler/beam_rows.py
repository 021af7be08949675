"""Beams on rows: who goes on in place, who becomes a fork of whom, and what the device is told.

A beam's row samples candidates, not a token, so its counters do not count a pending one and it is
not planned until the whole group has its candidates (`BeamSearch.advance`). Then a beam with
children keeps its row for the first of them; the others are forked into the rows of beams without
children, whose blocks are freed, or into reserved rows (P fig. 9). The next plan carries the forks
and the tokens.
"""

from typing import TYPE_CHECKING

import numpy as np

from quire.base.plan import HostTokens, RowFork, StepResult
from quire.scheduler.beams import Beam
from quire.scheduler.flight import Flight
from quire.scheduler.groups import Group, add_member
from quire.scheduler.sequence import Sequence

if TYPE_CHECKING:
    import numpy.typing as npt

    from quire.scheduler.outputs import OutputsBuilder
    from quire.scheduler.scheduler import Scheduler


def is_beam(sequence: Sequence) -> bool:
    return sequence.group is not None and sequence.group.search is not None


def take_beams(
    scheduler: "Scheduler",
    flight: Flight,
    result: StepResult,
    outputs: "OutputsBuilder",
    now: float,
) -> "npt.NDArray[np.bool_]":
    """Take the candidates of rows that are beams; which of the sampling rows are not."""
    others = np.ones(len(flight.sequences), bool)
    groups: dict[int, Group] = {}
    rows, epochs = flight.plan.sample_rows.tolist(), flight.epochs.tolist()
    for i, (row, epoch, sequence) in enumerate(zip(rows, epochs, flight.sequences, strict=True)):
        if not is_beam(sequence):
            continue
        others[i] = False
        candidates = result.candidates.pop(row, None)
        if candidates is not None and scheduler.table.epoch[row] == epoch:
            group = sequence.group
            group.candidates[sequence.index] = candidates
            groups[id(group)] = group
    for group in groups.values():
        if all(member.index in group.candidates for member in group.order):
            _advance(scheduler, group, outputs, now)
    return others


def _advance(scheduler: "Scheduler", group: Group, outputs: "OutputsBuilder", now: float) -> None:
    """All beams have their candidates: choose, and put the next beams on rows; or end."""
    search, order = group.search, group.order
    assert search is not None
    candidates = [group.candidates[member.index] for member in order]
    group.candidates = {}
    start = order[0].num_prompt_tokens
    alive = search.advance(candidates, [m.known_tokens[start:].tolist() for m in order])
    if alive:
        _place(scheduler, group, alive, now)
        return
    told = group.results
    outputs.finish_search(order[0], told)
    for member in group.unfinished:
        scheduler.finish(member, told[0].finish_reason, now)


def _place(scheduler: "Scheduler", group: Group, alive: list[Beam], now: float) -> None:
    order, table = group.order, scheduler.table
    for member in order:
        member.blocks.advance(member.num_computed_tokens)
    stays = {beam.parent for beam in reversed(alive)}
    spare = [member for i, member in enumerate(order) if i not in stays]
    for member in spare:
        scheduler.kv.free(member.blocks)
    placed: list[Sequence] = []
    taken: set[int] = set()
    for beam in alive:
        parent = order[beam.parent]
        if beam.parent not in taken:
            taken.add(beam.parent)
            placed.append(parent)
            continue
        child = spare.pop(0) if spare else _new_member(scheduler, group, now)
        table.copy_row(parent.row, child.row)
        child.blocks = scheduler.kv.fork(parent.blocks)
        child.digests = parent.digests.copy()
        scheduler.forked.append(RowFork(parent.row, child.row, child.index))
        placed.append(child)
    for member, beam in zip(placed, alive, strict=True):
        row, known = member.row, int(table.known[member.row])
        table.tokens[row, known] = beam.token_id
        table.known[row] = table.total[row] = known + 1
        table.capacity[row] = table.computed[row]  # the next write must look who shares
        token = np.array([beam.token_id], np.int32)
        scheduler.host_tokens.append(HostTokens(row, known, token))
    group.order = placed


def _new_member(scheduler: "Scheduler", group: Group, now: float) -> Sequence:
    row = group.reserved_rows.pop(0)
    if not group.reserved_rows:
        scheduler.num_unforked -= 1
    child = add_member(scheduler, group.members[0], row, now)
    scheduler.insert_rows([row])
    return child
