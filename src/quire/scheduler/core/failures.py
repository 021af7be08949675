"""Sequences that a failed row takes along: those that share blocks which it was to compute.

A full block of known tokens enters the index when the plan that computes it is made, so later
requests, also of the same plan, may hold it before it is computed. If its row fails, what it holds
cannot be relied on, nor can what others computed on top of it. Blocks that were indexed by plans
before the failed one are complete; to share them makes nobody a dependant.

All is told from what plans in flight found in the index and entered there, in the order of
planning; tables are of no use, because a sequence may have lost its blocks since then. A block that
has got another owner meanwhile counts for the former one: somebody may go back without need.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from quire.base.errors import STEP_FAILED
from quire.base.plan import MoveKind, Plan, StepResult
from quire.base.step_outputs import Failure, Finish
from quire.scheduler.core.extension import Extension
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.plans import Blocks, InFlightStep, RowLease
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.sequence import Sequence, State
from quire.scheduler.decisions import OutputsBuilder


@dataclass(slots=True)
class Tainted:
    """failed: rows that failed by themselves, with the error; dependants: rows that hold what a
    failed row, or another dependant, was to compute. blocks: by cache group, which must not be
    used; host: the same in host memory."""

    blocks: list[set[int]]
    host: list[set[int]]
    failed: dict[RowLease, tuple[Sequence, Finish]] = field(default_factory=dict)
    dependants: dict[RowLease, Sequence] = field(default_factory=dict)

    def __contains__(self, lease: RowLease) -> bool:
        return lease in self.failed or lease in self.dependants

    def fails(self, sequence: Sequence) -> bool:
        """Tell whether its request fails, whatever row it has in a later plan."""
        return any(failed.request is sequence.request for failed, _ in self.failed.values())


def find_tainted(
    steps: Iterable[InFlightStep],
    errors: dict[int, Finish],
    num_groups: int,
    has_lost_swaps: bool = False,
    num_void: int = 0,
) -> Tainted:
    """Find what errors of rows of the first plan break in all of these plans. has_lost_swaps: the
    first plan's swaps to host memory are lost, too, and those of void ones. num_void: of how many
    plans all is lost that their rows computed.

    A row with an error that is also a dependant counts as a dependant: its context was wrong, so
    nothing is known of the row itself.
    """
    tainted = Tainted([set() for _ in range(num_groups)], [set() for _ in range(num_groups)])
    for i, step in enumerate(steps):
        leases = step.leases
        owners = dict(zip(leases, step.row_sequences, strict=True))
        if i == 0:
            for lease in leases:
                if lease[0] in errors:
                    tainted.failed[lease] = owners[lease], errors[lease[0]]
        if i < num_void:
            void = {lease: owners[lease] for lease in leases if lease[0] not in step.left_out}
            tainted.dependants |= {each: void[each] for each in void if each not in tainted.failed}
        _follow_moves(tainted, step.plan, has_lost_swaps and i < max(1, num_void))
        epochs = dict(leases)
        for shared in step.shared:
            lease = shared.row, epochs[shared.row]
            if _holds_any(shared.found, tainted.blocks):
                tainted.dependants[lease] = owners[lease]
                tainted.failed.pop(lease, None)
            if lease in tainted or tainted.fails(owners[lease]):
                for mine, bad in zip(shared.named, tainted.blocks, strict=True):
                    bad.update(mine)
        for fork in step.plan.new_forks:  # which does not come about without its parent
            if (fork.parent, epochs[fork.parent]) in tainted.dependants:
                child = fork.child, epochs[fork.child]
                tainted.dependants[child] = owners[child]
    return tainted


def _follow_moves(tainted: Tainted, plan: Plan, are_lost: bool) -> None:
    """Follow what a plan brings to host memory and back: a copy is as good as its source."""
    for move in plan.moves:
        away, here = tainted.host[move.group], tainted.blocks[move.group]
        for source, destination in zip(
            move.source.tolist(), move.destination.tolist(), strict=True
        ):
            if move.kind is MoveKind.SWAP_OUT and (are_lost or source in here):
                away.add(destination)
            elif move.kind is MoveKind.SWAP_OUT:
                away.discard(destination)
            elif source in (away if move.kind is MoveKind.LOAD else here):
                here.add(destination)


def _holds_any(found: Blocks, blocks: list[set[int]]) -> bool:
    return any(not bad.isdisjoint(mine) for mine, bad in zip(found, blocks, strict=False))


class Failures:
    """Ends the sequences whose rows have failed, and gives up all that may be wrong with them."""

    def __init__(
        self, rows: Rows, memory: Memory, lifecycle: Lifecycle, extensions: Seq[Extension]
    ) -> None:
        self._rows, self._memory, self._lifecycle = rows, memory, lifecycle
        self._extensions = extensions

    def take(
        self, steps: list[InFlightStep], result: StepResult, outputs: OutputsBuilder, now: float
    ) -> None:
        """End sequences whose rows failed, also if they lost the row meanwhile; those that share
        what such a row was to compute go back to the queue."""
        is_void, found = result.error is not None, result.row_errors
        if is_void and self._blames_rows(steps[0], result):
            found = dict.fromkeys(steps[0].plan.rows.tolist(), f"the step failed: {result.error}")
        errors = {
            row: Finish("error", error=_failure(row, result, message))
            for row, message in found.items()
            if row not in steps[0].left_out
        }
        if not errors and not result.lost_swaps and not is_void:
            return
        num_groups = len(self._memory.kv.groups)
        num_void = (len(steps) if self._rows.num_stages > 1 else 1) if is_void else 0
        tainted = find_tainted(steps, errors, num_groups, result.lost_swaps, num_void)
        self._memory.distrust(tainted.blocks)
        epoch = self._rows.table.epoch
        for sequence, finish in list(tainted.failed.values()):  # a request fails as a whole
            for member in sequence.members:
                if member.row >= 0:
                    lease = member.row, int(epoch[member.row])
                    tainted.failed.setdefault(lease, (member, finish))
        for step in steps:
            step.leave_out(tainted.failed.keys() | tainted.dependants.keys())
        for sequence, finish in list(tainted.failed.values()):
            for member in sequence.members:
                self._fail(member, finish, outputs, now)
        failed = [sequence for sequence, _ in tainted.failed.values()]
        self._forget_swapped(tainted)
        self._send_back(tainted, failed, now)
        for extension in self._extensions:
            extension.fail(failed, now)

    def _blames_rows(self, step: InFlightStep, result: StepResult) -> bool:
        """Tell whether the rows of a step that failed are guilty; otherwise they are suspects now.
        It may have been the swaps."""
        suspects = self._lifecycle.suspects
        if suspects.are_guilty(step) and not result.lost_swaps:
            return True
        suspects.suspect(step)
        return False

    def _send_back(self, tainted: Tainted, failed: list[Sequence], now: float) -> None:
        """Let those compute again that hold what a failed row was to compute."""
        for (row, epoch), sequence in tainted.dependants.items():
            for member in sequence.members:
                self._lifecycle.forget_swapped(member)  # it cannot be relied on
            if sequence.row == row and self._rows.table.epoch[row] == epoch:
                cause = failed[0] if failed else sequence
                self._lifecycle.preempt(sequence, cause.request.request_id, now)

    def _forget_swapped(self, tainted: Tainted) -> None:
        """Let those compute again that were swapped out into blocks that cannot be relied on."""
        if not any(tainted.host):
            return
        for sequence in list(self._lifecycle.sequences.values()):
            away = [m.host_blocks.tables for m in sequence.members if m.host_blocks is not None]
            if any(
                not bad.isdisjoint(table.live_blocks)
                for tables in away
                for table, bad in zip(tables, tainted.host, strict=True)
            ):
                for member in sequence.members:
                    self._lifecycle.forget_swapped(member)

    def _fail(
        self, sequence: Sequence, finish: Finish, outputs: OutputsBuilder, now: float
    ) -> None:
        """End with an error. All that the index has of the sequence's tokens goes, and all that
        stores have of them: an error that shows in a sampled token may have come with any of them.
        It may have been kept long before it shows, if the sequence was preempted since, or if it
        shares what another one computed that was never sampled."""
        if sequence.state is State.ENDED:
            return
        outputs.finish(sequence, finish)
        self._memory.forget(sequence)
        self._lifecycle.end(sequence, "error", now)


def _failure(row: int, result: StepResult, message: str) -> Failure:
    """Return whose fault a row's error is: its request's, or the step's."""
    is_own = row in result.unservable_rows
    return Failure.of_request(message) if is_own else Failure(STEP_FAILED, message)
