"""Partial results of attention over parts of a sequence, and ranks that share sequences."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.ops.attention.base import Part
from quire.ops.attention.context_shared import share_context
from quire.ops.attention.triton_gpu import TritonBackend
from quire.ops.attention_inputs import Scores
from quire.ops.collective import RankGroup
from quire.ops.collectives.thread_group import run_ranks
from quire.ops.kernels.attention.attention_plan import Cut
from quire.ops.kernels.launch import INTERPRETED
from tests.kernels.test_attention import COARSE, FINE, Case, make_contents, write_before
from tests.support.models.paged_forward import RowPart, make_step

CASES = {
    "cut": (Case(((160, 1), (33, 1), (3, 9))), False),
    "uncut": (Case(((160, 1), (33, 1)), cut=Cut()), False),
    "long": (Case(((40, 70),), group_size=4, cut=COARSE, soft_cap=3.0), False),
    "window": (Case(((100, 9), (30, 1)), window=20), False),
    "int8": (Case(((70, 1), (5, 7)), kv_format="int8"), False),
    "fixed": (Case(((160, 1), (33, 1)), cut=replace(FINE, is_fixed=True)), True),
}


@pytest.mark.parametrize(
    ("case", "is_fixed"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if name in ("long", "uncut") else [])
        for name, case in CASES.items()
    ],
)
def test_run_part_returns_the_result_and_its_log_sum(
    case: Case, is_fixed: bool, device: torch.device
) -> None:
    """A sink as large as the sum halves the result."""
    contents, tables = make_contents(case), case.tables()
    layout = case.layout(torch.float32, device)
    backend = TritonBackend(layout, cut=case.cut, deterministic=is_fixed)
    write_before(backend, case, contents, tables)
    parts = [RowPart(b, b + new, (t,)) for (b, new), t in zip(case.rows, tables, strict=True)]
    backend.prepare(make_step(parts, case.block_size, device))
    q, k, v = (
        torch.cat([x[b:] for x, (b, _) in zip(values, case.rows, strict=True)]).to(device)
        for values in (contents.q, contents.k, contents.v)
    )
    backend.write(1, k, v)
    wanted = backend.run(1, q, Scores(case.scale, case.soft_cap))
    part = backend.run_part(1, q, Scores(case.scale, case.soft_cap))
    assert torch.equal(part.out_TNH, wanted)
    for token in range(0, len(q), 5):
        sinks = part.log_sums_TN[token].contiguous()
        half = backend.run(1, q, Scores(case.scale, case.soft_cap, sinks))[token]
        torch.testing.assert_close(2 * half, wanted[token], rtol=1e-4, atol=1e-5)


class OneAtATime(TritonBackend):
    """Serialise calls, as all threads share the interpreter's state."""

    lock = threading.Lock()

    def write(self, *given: Any) -> None:
        with self.lock:
            super().write(*given)

    def run(self, *given: Any, **named: Any) -> torch.Tensor:
        with self.lock:
            return super().run(*given, **named)

    def run_part(self, *given: Any, **named: Any) -> Part:
        with self.lock:
            return super().run_part(*given, **named)


@pytest.mark.skipif(not INTERPRETED, reason="threads of one device share its streams")
@pytest.mark.parametrize("num", [2, 4])
def test_ranks_that_share_a_context_equal_one_rank(num: int, device: torch.device) -> None:
    case = Case(((0, 9), (30, 1), (5, 7)), group_size=4, block_size=8, sinks=True)
    contents, tables = make_contents(case), case.tables()
    layout = case.layout(torch.float32, device)

    def attend(backend: TritonBackend, heads: slice) -> torch.Tensor:
        for begins in (True, False):
            rows = [(0, b) if begins else (b, b + new) for b, new in case.rows]
            nonempty = [(row, *ends) for row, ends in enumerate(rows) if ends[0] < ends[1]]
            parts = [RowPart(begin, end, (tables[row],)) for row, begin, end in nonempty]
            backend.prepare(make_step(parts, case.block_size, device))
            q, k, v = (
                torch.cat([values[row][begin:end] for row, begin, end in nonempty]).to(device)
                for values in (contents.q, contents.k, contents.v)
            )
            backend.write(1, k, v)
        sinks = contents.sinks[heads].to(device)
        return backend.run(1, q[:, heads], Scores(case.scale, sinks_N=sinks))

    def work(group: RankGroup) -> torch.Tensor:
        backend = share_context(layout, OneAtATime, group)
        each = 4 // group.size
        return attend(backend, slice(group.rank * each, (group.rank + 1) * each))

    wanted = attend(TritonBackend(layout), slice(None))
    got = torch.cat(run_ranks(num, work), dim=1)
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)
