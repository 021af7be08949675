"""The last program merges attention's parts with the bits of a separate launch, in any order."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.runtime.interpreter as interpreter

from quire.ops.attention.triton_gpu import TritonBackend
from quire.ops.attention_inputs import Scores
from quire.ops.kernels.attention import attention, attention_merge
from quire.ops.kernels.attention.attention_plan import Work
from quire.ops.kernels.launch import INTERPRETED, MERGE_LAST
from tests.kernels.test_attention import (
    FINE,
    Case,
    make_contents,
    on,
    poison,
    run_step,
    write_before,
)
from tests.support.models.paged_forward import RowPart, make_step

EMPTY = torch.empty
ROWS = ((17, 1), (0, 1), (160, 1))
CASES = {
    "decode": Case(ROWS, kv_heads=2),
    "drafts": Case(((50, 4), (90, 3), (20, 2)), group_size=4),
    "group_7": Case(ROWS, group_size=7),
    "group_20": Case(((70, 1),), group_size=20),
    "window": Case(((100, 3), (30, 1)), window=20, soft_cap=3.0, sinks=True),
    "head_80": Case(((90, 1),), head_dim=80),
    "head_256": Case(((90, 1),), head_dim=256),
    "int8": Case(((70, 1), (5, 1)), kv_format="int8"),
    "spans": Case(((40, 6), (20, 1)), spans=((0, 40, 46),)),
    "parts": Case(((600, 1),), cut=replace(FINE, max_splits=64, items=40)),
}


ORDERS = {"in_order": None, "reversed": 0, "seed_1": 1, "seed_2": 2}
QUICK = {("decode", "seed_1"), ("drafts", "reversed"), ("window", "seed_1"), ("int8", "reversed")}
RUNS = [
    pytest.param(CASES[case], ORDERS[order], id=f"{case}-{order}",
                 marks=() if (case, order) in QUICK else pytest.mark.slow)
    for case in CASES for order in ORDERS
]  # fmt: skip


@pytest.fixture
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run programs in this order; each has one item, so items arrive in any order."""
    seed = request.param
    if not INTERPRETED:
        if seed is not None:
            pytest.skip("a GPU chooses the order itself")
        return seed
    builder = interpreter.interpreter_builder
    set_index = builder.set_grid_idx

    def shuffled(x: int, y: int, z: int) -> None:
        num = builder.grid_dim[0]
        if seed == 0:
            x = num - 1 - x
        elif seed is not None:
            x = int(np.random.default_rng(seed).permutation(num)[x])
        set_index(x, y, z)

    monkeypatch.setattr(builder, "set_grid_idx", shuffled)
    return seed


def backend_of(case: Case, device: torch.device, *, merges_last: bool) -> TritonBackend:
    layout = case.layout(torch.float32, device)
    made = TritonBackend(layout, cut=case.cut, merges_last=merges_last)
    made._machine = replace(made._machine, num_programs=1000)
    poison(made, case)
    return made


def nan_filled(*shape: Any, **options: Any) -> torch.Tensor:
    """Return `torch.empty` filled with NaN, to hide results of earlier launches."""
    made = EMPTY(*shape, **options)
    return made.fill_(torch.nan) if made.is_floating_point() else made


def work_of(backend: TritonBackend) -> Work:
    [work] = backend._work
    assert work is not None
    return work


@pytest.mark.parametrize(("case", "order"), RUNS, indirect=["order"])
def test_last_program_merges_to_the_bits_of_a_separate_launch(
    case: Case, order: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents, tables, found = make_contents(case), case.tables(), []
    merged, merge_parts = list[int](), attention_merge.merge_parts
    for merges_last in (False, True):
        backend = backend_of(case, device, merges_last=merges_last)
        write_before(backend, case, contents, tables)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", nan_filled)
            if INTERPRETED and merges_last:
                patch.setattr(
                    attention_merge, "merge_parts", lambda *a: merged.append(0) or merge_parts(*a)
                )
            found.append(run_step(backend, case, contents, tables))
        work = work_of(backend)
        assert work.counts[1] > 0, "nothing is merged"
    assert torch.equal(*found)
    at_once = attention_merge.merged_heads(case.group_size, case.head_dim)
    each = case.kv_heads * -(-case.group_size // at_once)
    assert len(merged) == (int(work.counts[1]) * each if INTERPRETED else 0), "merges per token"
    assert work.arrivals is not None and not work.arrivals.any(), "arrivals are not reset"


def test_all_layers_of_a_step_share_the_counters(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for `run_part`. No separate launch merges, and a step that ended early is cleaned up."""
    case = CASES["decode"]
    contents, tables, scores = make_contents(case), case.tables(), Scores(case.scale)
    separate, last = (backend_of(case, device, merges_last=on) for on in (False, True))
    for backend in (separate, last):
        write_before(backend, case, contents, tables)
        run_step(backend, case, contents, tables)
    q = torch.cat([q[before:] for q, (before, _) in zip(contents.q, case.rows, strict=True)])
    q, parts = q.to(device), []
    wanted, part = separate.run(1, q, scores), separate.run_part(1, q, scores)
    monkeypatch.setattr(attention, "merge", None)
    for row, (before, new) in enumerate(case.rows):
        parts.append(RowPart(before, before + new, (tables[row],)))
    for _ in range(2):
        assert all(torch.equal(last.run(1, q, scores), wanted) for _ in range(2))
        assert all(map(torch.equal, last.run_part(1, q, scores), part))
        arrivals = work_of(last).arrivals
        assert arrivals is not None
        arrivals.fill_(1)
        last.prepare(on(device, make_step(parts, case.block_size)))


@pytest.mark.parametrize("is_on", [False, True])
def test_switch_enables_merging_by_the_last_program(
    is_on: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is off by default; prompts and fixed cuts always merge in a separate launch."""
    if is_on:
        monkeypatch.setenv(MERGE_LAST, "1")
    case, long = Case(((70, 1),)), Case(((70, 30),))
    for given, is_fixed in ((case, False), (long, False), (case, True)):
        layout = given.layout(torch.float32, device)
        cut = replace(FINE, is_fixed=is_fixed, fixed_chunk=32)
        backend = TritonBackend(layout, cut=cut, deterministic=is_fixed)
        contents, tables = make_contents(given), given.tables()
        write_before(backend, given, contents, tables)
        run_step(backend, given, contents, tables)
        has_arrivals = work_of(backend).arrivals is not None
        assert has_arrivals == (is_on and given is case and not is_fixed)


@pytest.mark.skipif(INTERPRETED, reason="only a GPU records graphs")
@pytest.mark.parametrize("name", ["decode", "parts"])
def test_replayed_launch_gives_the_same_bits(name: str, device: torch.device) -> None:
    """The launch runs 100,000 times; any program may be the last."""
    case = CASES[name]
    contents, tables, scores = make_contents(case), case.tables(), Scores(case.scale)
    backend = backend_of(case, device, merges_last=True)
    write_before(backend, case, contents, tables)
    wanted = run_step(backend, case, contents, tables)
    q = torch.cat([q[before:] for q, (before, _) in zip(contents.q, case.rows, strict=True)])
    q, graph = q.to(device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [backend.run(1, q, scores) for _ in range(100)]
    for _ in range(1000):
        for out in found:
            out.zero_()
        graph.replay()
        assert all(torch.equal(out, wanted) for out in found)
