"""Faults in the allocator, the scheduler and the baselines: each breaks the band of some figure."""

from collections.abc import Callable
from functools import cache
from inspect import isfunction, signature

import pytest

from benchmarks.paper.baselines import orca
from benchmarks.paper.baselines.buddy import BuddyAllocator
from benchmarks.paper.baselines.core import Job
from benchmarks.paper.figure import REDUCED, Finding, HereRuns
from benchmarks.paper.figures import block_tables, fig_2_13, fig_14_15, fig_19, policies
from benchmarks.paper.settings import MAX_LEN, OPT_13B, Load, Method
from benchmarks.paper.systems import (
    ORCA_MAX,
    ORCA_ORACLE,
    ORCA_POW2,
    QUIRE,
    RESERVES,
    Served,
    serve,
)
from quire.kv.table import BlockTable
from quire.scheduler.core.memory import Headroom
from quire.scheduler.core.planning import Planner
from quire.scheduler.core.plans import PlanBuilder
from quire.scheduler.core.preemption import Preemption
from quire.scheduler.core.sequence import Int64, Sequence
from quire.scheduler.policy.srtf import Srtf
from quire.scheduler.policy.two_level import TwoLevel
from quire.tools.workloads import SHAREGPT

Patch = pytest.MonkeyPatch
Findings = Callable[[], list[Finding]]
SRTF, TWO_LEVEL = 1, 2  # in `policies.POLICIES`


def served(system: str) -> Served:
    """Serve more than any system sustains, as fig. 2 does."""
    return serve(system, OPT_13B, Load(SHAREGPT, fig_2_13.FULL_RATE, fig_2_13.FULL_S))


memory_without_fault = cache(served)  # without a fault


def memory(system: str) -> Findings:
    """Return the findings of fig. 2, where only this system is simulated again."""

    def findings() -> list[Finding]:
        found = {each: memory_without_fault(each) for each in fig_2_13.SYSTEMS if each != system}
        return list(fig_2_13._memory(found | {system: served(system)}).findings)

    return findings


def savings() -> list[Finding]:
    """Return the saved blocks of six samples."""
    methods = [Method("samples", 6)]
    return list(fig_14_15._savings(REDUCED, HereRuns(), methods).findings)


waits_without_fault = cache(policies.waits)


def waits(policy: int) -> Findings:
    """Return the findings of the policies, where only this one is simulated again."""

    def findings() -> list[Finding]:
        found = [waits_without_fault(each, policies.FEW) for each in policies.POLICIES]
        found[policy] = policies.waits(policies.POLICIES[policy], policies.FEW)
        return list(policies._policies(found, policies.FEW).findings)

    return findings


longest_without_fault = cache(policies.longest_wait)


def stream() -> list[Finding]:
    """Return the findings of the streams, where only two-level scheduling is simulated again."""
    longest = []
    for seconds in policies.STREAMS_S:
        longest += [longest_without_fault(each, seconds) for each in policies.POLICIES[:TWO_LEVEL]]
        longest.append(policies.longest_wait(policies.POLICIES[TWO_LEVEL], seconds))
    return list(policies._stream(longest).findings)


def swaps() -> list[Finding]:
    """Return the findings of recomputing and swapping, end to end."""
    return list(fig_19._end_to_end(REDUCED, HereRuns()).findings)


def traffic() -> list[Finding]:
    """Return the findings of the block ids that a step sends."""
    return [f for figure in block_tables.figures(REDUCED, HereRuns()) for f in figure.findings]


def broken(findings: list[Finding]) -> list[str]:
    return [finding.what for finding in findings if not finding.holds]


# ---- the allocator of blocks ---------------------------------------------------------------------


def forks_copy(patch: Patch) -> None:
    """A fork has blocks of its own."""

    def fork(self: BlockTable) -> BlockTable:
        child = BlockTable(self._pool, self.block_size)
        child.blocks = self._pool.allocate_all(len(self.live_blocks))
        child.num_tokens, child.num_dropped = self.num_tokens, self.num_dropped
        return child

    patch.setattr(BlockTable, "fork", fork)


def prompts_take_twice(patch: Patch) -> None:
    """A prompt takes blocks for twice its tokens."""
    real = BlockTable.num_blocks_from

    def more(self: BlockTable, first: int, num_tokens: int) -> int:
        return real(self, first, num_tokens if first else 2 * num_tokens)

    patch.setattr(BlockTable, "num_blocks_from", more)


def whole_table_again(patch: Patch) -> None:
    """A row that gets a block sends its whole table to the device again."""
    real = Planner._append_blocks

    def append(self: Planner, rows: Int64, target: Int64, builder: PlanBuilder) -> bool:
        done = real(self, rows, target, builder)
        for row in rows.tolist():
            blocks = self._rows.table.sequences[row].blocks.tables[0].blocks
            builder.writes += [(0, row, index, block) for index, block in enumerate(blocks)]
        return done

    patch.setattr(Planner, "_append_blocks", append)


# ---- the scheduler -------------------------------------------------------------------------------


def half_of_the_pool(patch: Patch) -> None:
    """Admission leaves half of the blocks free."""
    patch.setattr(Headroom, "blocks", lambda self, num_rows: self.num_blocks // 2)


def longest_first(patch: Patch) -> None:
    """SRTF takes the longest prompt first."""

    def order(self: Srtf, sequence: Sequence) -> tuple[int, int]:
        return -self._progress.remaining(sequence), sequence.arrival

    patch.setattr(Srtf, "_order", order)


def staging_by_arrival(patch: Patch) -> None:
    """Two-level scheduling ranks requests by arrival, not by remaining tokens."""
    patch.setattr(TwoLevel, "rank", lambda self, sequence: sequence.arrival)
    patch.setattr(TwoLevel, "pass_over", lambda self, sequence: None)


def swapping_is_ignored(patch: Patch) -> None:
    """Preemption recomputes all sequences, also where it should swap them."""
    patch.setattr(Preemption, "swapping_is_cheaper", lambda self, members: False)


def two_level_is_srtf(patch: Patch) -> None:
    """Two-level scheduling has neither batches nor patience: it is SRTF."""
    methods = ("__init__", "__len__", "push", "peek", "pass_over", "remove", "rank", "waiting")
    for name in (*methods, "_order"):
        patch.setattr(TwoLevel, name, getattr(Srtf, name))


# ---- the baselines -------------------------------------------------------------------------------


def powers_are_doubled(patch: Patch) -> None:
    """A chunk is larger than its request, also where that is a power of two."""
    patch.setattr(BuddyAllocator, "rounded", staticmethod(lambda num: 1 << num.bit_length()))


def max_knows_the_output(patch: Patch) -> None:
    """Orca (Max) reserves what Orca (Pow2) does."""
    patch.setitem(RESERVES, ORCA_MAX, orca.pow2)


def pow2_doubles(patch: Patch) -> None:
    """Orca (Pow2) reserves twice the power of two."""

    def twice(job: Job, max_model_len: int) -> int:
        return min(job.num_prompt + 2 * BuddyAllocator.rounded(job.num_output), MAX_LEN)

    patch.setitem(RESERVES, ORCA_POW2, twice)


def requests_join_no_batch(patch: Patch) -> None:
    """Orca admits requests only when its batch is empty."""
    real = orca.OrcaCore._take_in

    def take_in(self: orca.OrcaCore, now: float) -> tuple[int, int]:
        return (0, 0) if self._num_seqs else real(self, now)

    patch.setattr(orca.OrcaCore, "_take_in", take_in)


Mutant = Callable[[Patch], None]
QUICK: tuple[tuple[Mutant, Findings], ...] = ((whole_table_again, traffic),)
SLOW: tuple[tuple[Mutant, Findings], ...] = (
    (forks_copy, savings),
    (prompts_take_twice, memory(QUIRE)),
    (half_of_the_pool, memory(QUIRE)),
    (longest_first, waits(SRTF)),
    (staging_by_arrival, waits(TWO_LEVEL)),
    (two_level_is_srtf, stream),
    (swapping_is_ignored, swaps),
    (powers_are_doubled, memory(ORCA_MAX)),
    (max_knows_the_output, memory(ORCA_MAX)),
    (pow2_doubles, memory(ORCA_POW2)),
    (requests_join_no_batch, memory(ORCA_ORACLE)),
)


def check(mutant: Mutant, findings: Findings, patch: Patch) -> None:
    assert not broken(findings()), "a band fails without a fault"
    with patch.context() as changed:
        mutant(changed)
        assert broken(findings()), f"no band detects {mutant.__name__}"


@pytest.mark.parametrize(("mutant", "findings"), QUICK)
def test_band_detects_the_fault(mutant: Mutant, findings: Findings, monkeypatch: Patch) -> None:
    check(mutant, findings, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "findings"), SLOW)
def test_band_of_longer_runs_detects_the_fault(
    mutant: Mutant, findings: Findings, monkeypatch: Patch
) -> None:
    check(mutant, findings, monkeypatch)


def test_at_least_ten_faults_exist_and_each_is_tested() -> None:
    """The two tests above assert that a band detects each fault."""
    tested = {mutant for mutant, _ in (*QUICK, *SLOW)}
    faults = {each for each in globals().values() if is_fault(each)}
    assert tested == faults and len(faults) >= 10


def is_fault(value: object) -> bool:
    """Return whether this is a function of this module that changes the code."""
    return (
        isfunction(value)
        and value.__module__ == __name__
        and list(signature(value).parameters) == ["patch"]
    )
