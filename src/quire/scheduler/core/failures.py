"""Failed rows: their sequences end, and dependants of these (tainted.py) are recomputed."""

from collections.abc import Sequence as Seq

from quire.base.errors import STEP_FAILED
from quire.base.plan import StepResult
from quire.base.step_outputs import Failure, Finish
from quire.scheduler.core.extension import Extension
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.plans import InFlightStep
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.sequence import Sequence, State
from quire.scheduler.decisions import OutputsBuilder
from quire.scheduler.tainted import Tainted, find_tainted


class Failures:
    """Handler of failed rows: ends their sequences and distrusts all blocks that may be wrong."""

    def __init__(
        self, rows: Rows, memory: Memory, lifecycle: Lifecycle, extensions: Seq[Extension]
    ) -> None:
        self._rows, self._memory, self._lifecycle = rows, memory, lifecycle
        self._extensions = extensions

    def take(
        self, steps: list[InFlightStep], result: StepResult, outputs: OutputsBuilder, now: float
    ) -> None:
        """End the sequences whose rows failed, even if they have lost the row since. Preempt their
        dependants."""
        is_void, found = result.error is not None, result.row_errors
        if is_void and self._blames_rows(steps[0], result):
            found = dict.fromkeys(steps[0].plan.rows.tolist(), f"the step failed: {result.error}")
        errors = {
            row: Finish("error", error=_failure(row, result, message))
            for row, message in found.items()
            if row not in steps[0].omitted
        }
        if not errors and not result.lost_swaps and not is_void:
            return
        num_groups = len(self._memory.kv.groups)
        num_void = (len(steps) if self._rows.num_stages > 1 else 1) if is_void else 0
        tainted = find_tainted(steps, errors, num_groups, result.lost_swaps, num_void)
        self._memory.distrust(tainted.blocks)
        epoch = self._rows.table.epoch
        for sequence, finish in list(tainted.failed.values()):  # with their whole requests
            for member in sequence.members:
                if member.row >= 0:
                    lease = member.row, int(epoch[member.row])
                    tainted.failed.setdefault(lease, (member, finish))
        for step in steps:
            step.omit_rows(tainted.failed.keys() | tainted.dependants.keys())
        for sequence, finish in list(tainted.failed.values()):
            for member in sequence.members:
                self._fail(member, finish, outputs, now)
        failed = [sequence for sequence, _ in tainted.failed.values()]
        self._forget_swapped(tainted)
        self._send_back(tainted, failed, now)
        for extension in self._extensions:
            extension.fail(failed, now)

    def _blames_rows(self, step: InFlightStep, result: StepResult) -> bool:
        """Return whether the rows of a failed step are guilty. Otherwise make them suspects. If
        swaps are lost, no row is guilty, since the swaps may have failed."""
        suspects = self._lifecycle.suspects
        if suspects.are_guilty(step) and not result.lost_swaps:
            return True
        suspects.suspect(step)
        return False

    def _send_back(self, tainted: Tainted, failed: list[Sequence], now: float) -> None:
        """Preempt the dependants, which recompute their tokens."""
        for (row, epoch), sequence in tainted.dependants.items():
            for member in sequence.members:
                self._lifecycle.forget_swapped(member)
            if sequence.row == row and self._rows.table.epoch[row] == epoch:
                cause = failed[0] if failed else sequence
                self._lifecycle.preempt(sequence, cause.request.request_id, now)

    def _forget_swapped(self, tainted: Tainted) -> None:
        """Drop the host blocks of requests that were swapped out into tainted blocks."""
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
        """End a sequence with an error, and remove the names of all its blocks. An error visible in
        a sampled token may come from any of them, even from blocks computed by an earlier step."""
        if sequence.state is State.ENDED:
            return
        outputs.finish(sequence, finish)
        self._memory.forget(sequence)
        self._lifecycle.end(sequence, "error", now)


def _failure(row: int, result: StepResult, message: str) -> Failure:
    """Return the failure of a row, caused by its request or by the step."""
    is_own = row in result.unservable_rows
    return Failure.of_request(message) if is_own else Failure(STEP_FAILED, message)
