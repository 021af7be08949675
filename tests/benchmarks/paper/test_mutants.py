"""Faults in the allocator, the pool and the link: each breaks the band of some figure."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.paper.figure import REDUCED, Finding, HereRuns
from benchmarks.paper.figures import fig_2_13, fig_14_15, fig_19, policies
from benchmarks.paper.settings import Method
from quire.kv.table import BlockTable
from quire.scheduler.core.memory import Headroom

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


def free_transfers(patch: Patch) -> None:
    """Submitting a transfer takes no time."""
    free = replace(fig_19.A100, transfer_s=0.0)
    patch.setattr(fig_19, "A100", free)


Mutant = Callable[[Patch], None]
MUTANTS: tuple[tuple[Mutant, Callable[[], list[Finding]]], ...] = (
    (forks_copy, savings),
    (half_of_the_pool, memory),
    (free_transfers, swaps),
)
QUICK = (free_transfers,)


def check(mutant: Mutant, figure: Callable[[], list[Finding]], patch: Patch) -> None:
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
