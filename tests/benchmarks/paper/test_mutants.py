"""Faults in the allocator, the scheduler and the baselines: each breaks the band of some figure."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.paper.baselines import buddy, orca
from benchmarks.paper.baselines.core import Job
from benchmarks.paper.figure import REDUCED, Finding, HereRuns
from benchmarks.paper.figures import fig_2_13, fig_14_15, fig_19, policies
from benchmarks.paper.settings import MAX_LEN, Method
from benchmarks.paper.systems import RESERVES
from quire.kv.table import BlockTable
from quire.scheduler.core.memory import Headroom
from quire.scheduler.core.sequence import Sequence
from quire.scheduler.policy.srtf import Srtf

Patch = pytest.MonkeyPatch


def memory() -> list[Finding]:
    """Return the findings of fig. 2 and 13."""
    return [f for figure in fig_2_13.figures(REDUCED, HereRuns()) for f in figure.findings]


def savings() -> list[Finding]:
    """Return the saved blocks of six samples."""
    methods = [Method("samples", 6)]
    return list(fig_14_15._savings(REDUCED, HereRuns(), methods).findings)


def waits() -> list[Finding]:
    """Return the findings of the policies, without the tenants."""
    num = policies.FEW
    found = [policies.waits(policy, num) for policy in policies.POLICIES]
    return list(policies._policies(found, num).findings)


def swaps() -> list[Finding]:
    return list(fig_19._overhead().findings)


def broken(findings: list[Finding]) -> list[str]:
    return [finding.what for finding in findings if not finding.holds]


def one_block_too_many(patch: Patch) -> None:
    """The first append of a sequence takes a block more than it needs."""
    real = BlockTable.num_blocks_from

    def more(self: BlockTable, first: int, num_tokens: int) -> int:
        return real(self, first, num_tokens) + (first == 0)

    patch.setattr(BlockTable, "num_blocks_from", more)


def forks_copy(patch: Patch) -> None:
    """A fork has blocks of its own."""

    def fork(self: BlockTable) -> BlockTable:
        child = BlockTable(self._pool, self.block_size)
        child.blocks = self._pool.allocate_all(len(self.live_blocks))
        child.num_tokens, child.num_dropped = self.num_tokens, self.num_dropped
        return child

    patch.setattr(BlockTable, "fork", fork)


def half_of_the_pool(patch: Patch) -> None:
    """Admission leaves half of the blocks free."""
    patch.setattr(Headroom, "blocks", lambda self, num_rows: self.num_blocks // 2)


def no_joining(patch: Patch) -> None:
    """No request is admitted while others run."""
    patch.setattr(Headroom, "blocks", lambda self, num_rows: self.num_blocks * bool(num_rows))


def longest_first(patch: Patch) -> None:
    """SRTF takes the longest prompt first."""

    def order(self: Srtf, sequence: Sequence) -> tuple[int, int]:
        return -self._progress.remaining(sequence), sequence.arrival

    patch.setattr(Srtf, "_order", order)


def chunks_never_merge(patch: Patch) -> None:
    """The buddy allocator splits chunks and never merges them."""

    def free(self: buddy.BuddyAllocator, offset: int) -> None:
        self._free.setdefault(self._taken.pop(offset), set()).add(offset)

    patch.setattr(buddy.BuddyAllocator, "free", free)


def max_knows_the_output(patch: Patch) -> None:
    """Orca (Max) reserves what Orca (Pow2) does."""
    patch.setitem(RESERVES, "Orca (Max)", orca.pow2)


def pow2_doubles(patch: Patch) -> None:
    """Orca (Pow2) reserves twice the power of two."""

    def twice(job: Job, max_model_len: int) -> int:
        return min(job.num_prompt + 2 * buddy.BuddyAllocator.rounded(job.num_output), MAX_LEN)

    patch.setitem(RESERVES, "Orca (Pow2)", twice)


def free_transfers(patch: Patch) -> None:
    """Submitting a transfer takes no time."""
    free = replace(fig_19.A100, transfer_s=0.0)
    patch.setattr(fig_19, "A100", free)


Mutant = Callable[[Patch], None]
MUTANTS: tuple[tuple[Mutant, Callable[[], list[Finding]]], ...] = (
    (one_block_too_many, memory),
    (forks_copy, savings),
    (half_of_the_pool, memory),
    (no_joining, memory),
    (longest_first, waits),
    (chunks_never_merge, memory),
    (max_knows_the_output, memory),
    (pow2_doubles, memory),
    (free_transfers, swaps),
)
QUICK = (free_transfers,)


def check(mutant: Mutant, figure: Callable[[], list[Finding]], patch: Patch) -> None:
    assert len({name.__name__ for name, _ in MUTANTS}) >= 9
    with patch.context() as changed:
        mutant(changed)
        assert broken(figure()), f"no band notices {mutant.__name__}"


@pytest.mark.parametrize(("mutant", "figure"), [m for m in MUTANTS if m[0] in QUICK])
def test_quick_figures_notice(
    mutant: Mutant, figure: Callable[[], list[Finding]], monkeypatch: Patch
) -> None:
    assert not broken(figure())
    check(mutant, figure, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "figure"), [m for m in MUTANTS if m[0] not in QUICK])
def test_a_band_notices(
    mutant: Mutant, figure: Callable[[], list[Finding]], monkeypatch: Patch
) -> None:
    check(mutant, figure, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("figure", (memory, savings, waits))
def test_no_band_is_broken_without_a_fault(figure: Callable[[], list[Finding]]) -> None:
    assert not broken(figure())
