"""Data tainted by a failed row: the blocks that it was to compute, and the rows that use them.

A full block of known tokens enters the index when the plan that computes it is made. So a later
sequence may share the block before it is computed. If the first row fails, the block and everything
computed from it are wrong. Blocks that earlier plans entered are complete and taint nothing.

The dependants follow from the blocks that plans in flight found in the index and entered there, in
the order of planning. Tables do not show them: a sequence may have lost its blocks since. A block
that has a new owner still counts for the former one, so a sequence may be preempted without need.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.base.plan import MoveKind, Plan
from quire.base.step_outputs import Finish
from quire.scheduler.core.plans import Blocks, InFlightStep, RowLease
from quire.scheduler.core.sequence import Sequence


@dataclass(slots=True)
class Tainted:
    """Tainted blocks and rows. blocks, host: by cache group, blocks of the device and of host
    memory that must not be used. failed: rows that failed, with their errors. dependants: rows with
    blocks that a failed row or another dependant was to compute."""

    blocks: list[set[int]]
    host: list[set[int]]
    failed: dict[RowLease, tuple[Sequence, Finish]] = field(default_factory=dict)
    dependants: dict[RowLease, Sequence] = field(default_factory=dict)

    def __contains__(self, lease: RowLease) -> bool:
        return lease in self.failed or lease in self.dependants

    def fails(self, sequence: Sequence) -> bool:
        """Return whether the request of this sequence fails."""
        return any(failed.request is sequence.request for failed, _ in self.failed.values())


def find_tainted(
    steps: Iterable[InFlightStep],
    errors: dict[int, Finish],
    num_groups: int,
    has_lost_swaps: bool = False,
    num_void: int = 0,
) -> Tainted:
    """Return the blocks and rows that the failed rows of the first plan taint in all these plans.

    has_lost_swaps: the swaps to host memory of the first plan, and of void ones, are lost.
    num_void: number of plans whose computed tokens are all lost. A failed row that is also a
    dependant counts as a dependant: its context was wrong.
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
            void = {lease: owners[lease] for lease in leases if lease[0] not in step.omitted}
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
        for fork in step.plan.new_forks:  # a fork fails with its parent
            if (fork.parent, epochs[fork.parent]) in tainted.dependants:
                child = fork.child, epochs[fork.child]
                tainted.dependants[child] = owners[child]
    return tainted


def _follow_moves(tainted: Tainted, plan: Plan, are_lost: bool) -> None:
    """Apply a plan's moves to host memory and back: a copy is tainted if its source is."""
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
