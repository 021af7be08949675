"""Compare rotation, KV write and attention in one launch with separate launches and float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.ops.attention.triton_gpu import TritonBackend
from quire.ops.attention_inputs import Scores
from quire.ops.kernels.attention import rotary_attention as kernels
from quire.ops.kernels.launch import INTERPRETED, ROTATE_WITHIN
from quire.ops.norms import rms_norm
from quire.ops.registry import record_ops
from quire.ops.rotary import rotary, rotary_rows
from tests.kernels.test_attention import (
    FINE,
    TOLERANCE,
    Case,
    Contents,
    make_contents,
    on,
    poison,
    softmax_rows,
    write_before,
)
from tests.kernels.test_attention_merge import order  # noqa: F401 (a fixture)
from tests.support.cases import in_turn
from tests.support.models.paged_forward import RowPart, make_step

EPS = 1e-6
ROWS = ((17, 1), (0, 1), (160, 1), (15, 1))
CASES = {
    "decode": Case(ROWS, kv_heads=2),
    "one_item_each": Case(ROWS, kv_heads=2, cut=replace(FINE, items=1)),
    "group_7": Case(ROWS, group_size=7),
    "group_16": Case(((70, 1),), group_size=16),
    "window": Case(((100, 1), (30, 1), (3, 1)), window=20, soft_cap=3.0, sinks=True),
    "window_1": Case(((40, 1),), window=1),
    "chunk": Case(((139, 1), (140, 1)), chunk=14),
    "head_80": Case(((90, 1), (4, 1)), head_dim=80),
    "head_128": Case(((90, 1),), group_size=4, head_dim=128),
    "parts": Case(((600, 1),), cut=replace(FINE, max_splits=64, items=40)),
}


def step_of(
    case: Case, dtype: torch.dtype, device: torch.device, *, has_norm: bool, seed: int = 0
) -> tuple[Contents, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Return contents whose last tokens are rotated, and the rotation's inputs: the step's heads
    [T, M, H], factors, and weights of norms."""
    contents = make_contents(case, seed)
    for name in ("q", "k", "v"):
        setattr_frozen(contents, name, [x.to(dtype) for x in getattr(contents, name)])
    given = torch.cat(
        [torch.cat([x[r][-1:] for r in range(len(case.rows))]) for x in (contents.q, contents.k)], 1
    )
    values = torch.cat([x[-1:] for x in contents.v])
    positions = torch.tensor([before for before, _ in case.rows])
    frequencies = 1e4 ** -(torch.arange(case.head_dim // 2) * 2 / case.head_dim)
    factors = rotary_rows(positions, frequencies, 1.0, torch.float32)
    generator = torch.Generator().manual_seed(9)
    num_turned = given.shape[1]
    weight = 1 + torch.randn(num_turned, case.head_dim, generator=generator).to(dtype) / 4
    turned = rms_norm(given, weight, EPS) if has_norm else given
    turned = rotary(turned, factors)
    num_heads = num_turned - case.kv_heads
    for row in range(len(case.rows)):
        contents.q[row][-1], contents.k[row][-1] = turned[row].split([num_heads, case.kv_heads])
    qkv = torch.cat((given, values), 1).to(device)
    return contents, (qkv, factors.to(device), weight.to(device) if has_norm else None)


def setattr_frozen(contents: Contents, name: str, value: Any) -> None:
    getattr(contents, name)[:] = value


def backend_of(case: Case, dtype: torch.dtype, device: torch.device, **given: Any) -> TritonBackend:
    made = TritonBackend(case.layout(dtype, device), cut=case.cut, **given)
    poison(made, case)
    return made


def run(
    backend: TritonBackend, case: Case, contents: Contents, turned: Any, *, is_separate: bool = True
) -> torch.Tensor:
    """Run one step with one token of each row."""
    tables, layout = case.tables(), backend._layout
    write_before(backend, case, contents, tables)
    parts = [RowPart(n, n + 1, (table,)) for (n, _), table in zip(case.rows, tables, strict=True)]
    step = replace(make_step(parts, case.block_size), is_separate=is_separate)
    backend.prepare(on(layout.device, step))
    qkv, factors, weight = turned
    sinks = contents.sinks.to(layout.device) if case.sinks else None
    scores = Scores(case.scale, case.soft_cap, sinks)
    return backend.rotary_run(1, qkv, case.kv_heads, factors, weight, EPS, scores)


QUICK = {"window", "head_80"}


@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
def test_fused_launch_equals_softmax_of_rotated_heads(
    case: Case, has_norm: bool, device: torch.device
) -> None:
    """Without a norm, the blocks have the bits that separate launches store."""
    dtype = torch.float32
    contents, turned = step_of(case, dtype, device, has_norm=has_norm)
    separate, fused = (
        backend_of(case, dtype, device, rotates_within=is_on) for is_on in (False, True)
    )
    with record_ops() as record:
        wanted, found = (run(each, case, contents, turned) for each in (separate, fused))
    own_ops = [name for name in record.names if name != "kv_write"]
    assert own_ops == ["rotary_write", "attention", "rotary_attention"]
    exact = softmax_rows(case, contents)
    torch.testing.assert_close(found.cpu().double(), exact, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[dtype])
    memories = [each._memory.kv[0][:, 1] for each in (separate, fused)]
    if has_norm:
        torch.testing.assert_close(*memories, rtol=0, atol=4e-6, equal_nan=True)
    else:
        assert torch.equal(*(memory.view(torch.int32) for memory in memories))


def test_fused_launch_equals_softmax_in_every_dtype(
    dtype: torch.dtype, device: torch.device
) -> None:
    case = CASES["decode"]
    contents, turned = step_of(case, dtype, device, has_norm=True)
    found = run(backend_of(case, dtype, device, rotates_within=True), case, contents, turned)
    assert found.dtype == dtype
    exact = softmax_rows(case, contents)
    torch.testing.assert_close(found.cpu().double(), exact, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("order", "merges_last"),
    in_turn([0, 1], [False, True]),
    indirect=["order"],
)
def test_order_of_programs_does_not_change_bits(
    merges_last: bool,
    order: Any,  # noqa: F811
    device: torch.device,
) -> None:
    """No program reads data that another one stores."""
    case, dtype = CASES["decode"], torch.float32
    contents, turned = step_of(case, dtype, device, has_norm=False)
    found = []
    for num_programs in (1, 1000):
        backend = backend_of(case, dtype, device, rotates_within=True, merges_last=merges_last)
        backend._machine = replace(backend._machine, num_programs=num_programs, num_stages=2)
        found.append(run(backend, case, contents, turned))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["group_16", pytest.param("group_7", marks=pytest.mark.slow)])
def test_gpu_with_fewer_stages_merges_fewer_heads_at_once(name: str, device: torch.device) -> None:
    case, dtype = CASES[name], torch.float32
    contents, turned = step_of(case, dtype, device, has_norm=True)
    backend = backend_of(case, dtype, device, rotates_within=True, merges_last=True)
    cut = backend._cut.of_group(case.group_size, None, case.head_dim)
    merged = []
    for num_stages, is_hopper in ((3, False), (2, False), (3, True)):
        backend._machine = replace(
            backend._machine,
            num_programs=1000,
            num_stages=num_stages,
            has_warp_groups=is_hopper,
        )
        found = kernels._last_constants(cut, case.head_dim, True, backend._machine)
        merged.append(found["LAST_HEADS"])
        exact = softmax_rows(case, contents)
        out = run(backend, case, contents, turned).cpu().double()
        torch.testing.assert_close(out, exact, rtol=0, atol=TOLERANCE[dtype])
    assert merged[0] > merged[1] == kernels.MAX_MERGED_HEADS
    assert merged[2] == merged[1 if case.group_size > 8 else 0], "large groups on Hopper"


def test_rows_without_tokens_and_padding_store_nothing(device: torch.device) -> None:
    """In recorded steps they have slot -1."""
    case, dtype = Case(((17, 1), (5, 1))), torch.float32
    contents, turned = step_of(case, dtype, device, has_norm=False)
    backend = backend_of(case, dtype, device, rotates_within=True)
    run(backend, case, contents, turned)
    before = backend._memory.kv[0].clone()
    qkv, factors, weight = turned
    step = backend._step
    assert step is not None
    backend.prepare(replace(step, slots_T=tuple(torch.full_like(s, -1) for s in step.slots_T)))
    backend.rotary_run(1, qkv + 1, case.kv_heads, factors, weight, EPS, Scores(case.scale))
    assert torch.equal(before.view(torch.int32), backend._memory.kv[0].view(torch.int32))


@pytest.mark.parametrize("is_on", [False, True])
def test_switch_enables_the_fused_launch(
    is_on: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is off by default. Other steps and formats take two launches."""
    if is_on:
        monkeypatch.setenv(ROTATE_WITHIN, "1")
    case, dtype = Case(((20, 1),)), torch.float32
    contents, turned = step_of(case, dtype, device, has_norm=False)
    int8, wide = replace(case, kv_format="int8"), Case(((20, 1),), head_dim=256)
    wide_contents, wide_turned = step_of(wide, dtype, device, has_norm=False)
    for given, values, heads, is_separate, deterministic in (
        (case, contents, turned, True, False),
        (case, contents, turned, False, False),
        (case, contents, turned, True, True),
        (int8, contents, turned, True, False),
        (wide, wide_contents, wide_turned, True, False),
    ):
        backend = backend_of(given, dtype, device, deterministic=deterministic)
        with record_ops() as record:
            run(backend, given, values, heads, is_separate=is_separate)
        is_fused = is_on and given is case and is_separate and not deterministic
        assert ("rotary_attention" in record.names) == is_fused
        assert backend.needs_separate == (is_on and given is case and not deterministic)


def test_serves_accepts_only_supported_heads(device: torch.device) -> None:
    for size, group_size, is_served in ((128, 16, True), (130, 4, False), (64, 17, False)):
        backend = backend_of(Case(head_dim=size), torch.float32, device)
        assert kernels.serves(backend._layers[1], group_size, size) == is_served


def test_hopper_runs_three_programs_per_multiprocessor(device: torch.device) -> None:
    """Heads must fill their tiles. Decoding steps are cut into as many items."""
    from quire.ops.kernels.attention.attention_tiles import HOPPER, machine_with

    assert HOPPER.for_decoding(128, 4).num_programs == 396
    assert HOPPER.for_decoding(64, 8).num_programs == 396
    for others in ((80, 4), (128, 5), (128, 16), (64, 9)):
        assert HOPPER.for_decoding(*others) == HOPPER
    ampere = machine_with(108, has_warp_groups=False, has_space=True)
    assert ampere.for_decoding(128, 4) == ampere
    case = Case(((400, 1),), kv_heads=2, head_dim=64)
    contents, turned = step_of(case, torch.float32, device, has_norm=False)
    for is_on, num_items in ((True, 6), (False, 4)):
        layout = case.layout(torch.float32, device)
        backend = TritonBackend(layout, rotates_within=is_on)
        backend._machine = replace(HOPPER, num_programs=8)
        backend._programs = 8
        poison(backend, case)
        run(backend, case, contents, turned)
        [work] = backend._work
        assert work is not None and work.cut.items == num_items
        assert backend._cuts[0].items == num_items
        assert INTERPRETED or int(work.counts[0]) > 1
