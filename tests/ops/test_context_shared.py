"""Compare attention by ranks that divide the tokens of sequences with a plain softmax."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from quire.base.errors import ConfigError
from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.context_shared import (
    ContextShared,
    TokenDivision,
    merge_parts,
    share_context,
)
from quire.ops.attention.select import make_backend
from quire.ops.attention.torch_cpu import TorchBackend
from quire.ops.attention_inputs import Scores
from quire.ops.collective import ALONE, RankGroup
from quire.ops.collectives.thread_group import run_ranks
from quire.ops.host.native import core
from quire.spec.cache_group import STATE, CacheGroup
from tests.support.cases import slow_but
from tests.support.kernels.attention_cases import (
    HEAD_DIM,
    Case,
    Contents,
    attend_contiguous,
    make_contents,
    softmax_of,
)
from tests.support.models.paged_forward import RowPart, make_step

MIXED = [(0, 9), (30, 1), (5, 7), (0, 1), (31, 1), (3, 90)]
DECODE = [(17, 1), (1, 1), (40, 1), (16, 1), (0, 1)]
# Block sizes as the scheduler counts them: a rank's size, times the number of ranks.
CASES = {
    "decode_1": (2, Case(DECODE, block_size=2)),
    "decode": (2, Case(DECODE, block_size=16)),
    "decode_of_4": (4, Case(DECODE, block_size=16, kv_heads=1)),
    "prompts": (2, Case([(0, 13), (0, 70), (0, 1)], block_size=8)),
    "mixed": (2, Case(MIXED, block_size=8)),
    "mixed_1": (4, Case(MIXED, block_size=4, kv_heads=1)),
    "mixed_3": (2, Case(MIXED, block_size=6)),
    "mixed_16": (2, Case(MIXED, block_size=32)),
    "mixed_16_of_4": (4, Case(MIXED, block_size=64, heads=8, kv_heads=2)),
    "of_3": (3, Case(MIXED, block_size=12, heads=6, kv_heads=1)),
    "cap": (2, Case(MIXED, block_size=8, soft_cap=0.7)),
    "sinks": (2, Case(MIXED, block_size=8, has_sinks=True)),
    "sinks_of_4": (4, Case(MIXED, block_size=16, kv_heads=1, has_sinks=True, soft_cap=2.0)),
    "long": (2, Case([(530, 1), (255, 3)], block_size=32)),
    "window": (2, Case(MIXED, block_size=8, window=5)),
    "spans": (2, Case(MIXED, block_size=8, spans=((0, 1, 8), (2, 6, 12), (5, 3, 40)))),
    "spans_of_3": (3, Case(MIXED, 12, heads=6, kv_heads=1, has_sinks=True, spans=((5, 7, 90),))),
    "spans_window": (2, Case(MIXED, block_size=8, window=5, spans=((0, 1, 8), (5, 3, 40)))),
    "window_sinks": (4, Case(MIXED, 16, kv_heads=1, window=20, has_sinks=True, soft_cap=2.0)),
}
NAMES = {"reference": torch.float64, "torch": torch.float64, "cpu": torch.float32}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and core() is None:
        pytest.skip("the C++ core was not built")
    return str(request.param)


def own_heads(x: torch.Tensor, kv_heads: int, group: RankGroup, dim: int) -> torch.Tensor:
    """Return a rank's query heads of each KV head."""
    parts = x.unflatten(dim, (kv_heads, group.size, -1)).select(dim + 1, group.rank)
    return parts.flatten(dim, dim + 1).contiguous()


def poison(backend: AttentionBackend) -> None:
    """Fill the memory with NaN, to expose reads of unwritten slots."""
    inner = [getattr(backend, each, None) for each in ("_divided", "_whole")]
    for each in [found for found in inner if found is not None] or [backend]:
        memory = list(each._kv.values()) if hasattr(each, "_host") else each._memory.kv
        for kv in memory:
            kv.fill_(torch.nan)


def shared(name: str, layout: KVLayout, group: RankGroup) -> AttentionBackend:
    backend = share_context(layout, lambda each: make_backend(name, each), group)
    poison(backend)
    return backend


Steps = Sequence[Sequence[tuple[int, int, int]]]  # of (row, begin, end)


def steps_of(case: Case) -> Steps:
    """Return a step of the earlier tokens, and the step itself."""
    before = [(row, 0, lens[0]) for row, lens in enumerate(case.rows) if lens[0]]
    step = [(row, lens[0], sum(lens)) for row, lens in enumerate(case.rows)]
    return [each for each in (before, step) if each]


def in_steps(
    name: str, dtype: torch.dtype, case: Case, contents: Contents, steps: Steps, group: RankGroup
) -> torch.Tensor:
    """Return a rank's results for all tokens, sequence after sequence."""
    backend, tables = shared(name, case.layout(dtype), group), case.tables()
    shape = case.heads // group.size, HEAD_DIM
    outs = [torch.empty(len(q), *shape, dtype=dtype) for q in contents.q]
    sinks = case.sinks_N
    own_sinks = None if sinks is None else own_heads(sinks, case.kv_heads, group, 0)
    for step in steps:
        parts = [RowPart(begin, end, (tables[row],)) for row, begin, end in step]
        made = make_step(parts, case.block_size)
        backend.prepare(replace(made, ends_T=case.ends_of(step)))
        q, k, v = (
            torch.cat([values[row][begin:end] for row, begin, end in step]).to(dtype)
            for values in (contents.q, contents.k, contents.v)
        )
        backend.write(1, k, v)
        own_q, scale = own_heads(q, case.kv_heads, group, 1), HEAD_DIM**-0.5
        out = backend.run(1, own_q, Scores(scale, case.soft_cap, own_sinks))
        parted = out.split([end - begin for _, begin, end in step])
        for (row, begin, end), part in zip(step, parted, strict=True):
            outs[row][begin:end] = part
    return torch.cat(outs)


def check_shared(
    name: str, num: int, case: Case, steps: Steps, dtype: torch.dtype, seed: int = 0
) -> None:
    """Compare all tokens of all sequences with a softmax."""
    contents = make_contents(case, seed)
    got = run_ranks(num, partial(in_steps, name, dtype, case, contents, steps))
    assert {each.dtype for each in got} == {dtype}
    whole = replace(case, rows=[(0, sum(row)) for row in case.rows])
    check(got, softmax_of(whole, seed), case.kv_heads, TOLERANCE[dtype])


def check(got: Sequence[torch.Tensor], wanted: torch.Tensor, kv_heads: int, atol: float) -> None:
    parts = [each.double().unflatten(1, (kv_heads, -1)) for each in got]
    together = torch.cat(parts, dim=2).flatten(1, 2)
    torch.testing.assert_close(together, wanted, rtol=0, atol=atol)


# The reference goes token by token, so few of its cases are quick.
QUICK = {  # all cases of the core are quick
    "reference": ("decode_of_4", "of_3", "sinks_of_4", "window", "spans"), "torch": [*CASES][::2],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "num", "case"),
    [
        pytest.param(
            name, *CASES[case], id=f"{name}-{case}",
            marks=[] if case in QUICK.get(name, CASES) else pytest.mark.slow,
        )
        for name in NAMES for case in CASES
    ],
    indirect=["name"],
)  # fmt: skip
def test_attention_of_divided_tokens_equals_softmax(name: str, num: int, case: Case) -> None:
    check_shared(name, num, case, steps_of(case), NAMES[name])


@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_16_bit_parts_are_merged_in_float32(name: str) -> None:
    if name == "cpu" and core() is None:
        pytest.skip("the C++ core was not built")
    num, case = CASES["sinks_of_4"]
    check_shared(name, num, case, steps_of(case), torch.bfloat16)


@pytest.mark.parametrize("block_size", slow_but((2, 4, 8, 32), 2, 32))
def test_chunks_and_lengths_may_be_any(name: str, block_size: int) -> None:
    """Each sequence is computed in chunks of its own."""
    random = np.random.default_rng(block_size)
    lens = random.integers(1, 75, 4).tolist()
    case = Case([(0, length) for length in lens], block_size)
    check_shared(name, 2, case, chunks_of(lens, random), NAMES[name], seed=block_size)


def chunks_of(lens: Sequence[int], random: np.random.Generator) -> Steps:
    """Cut sequences into chunks, some of them in each step."""
    done, steps = [0] * len(lens), []
    while any(now < length for now, length in zip(done, lens, strict=True)):
        step = []
        for row, length in enumerate(lens):
            size = min(length - done[row], int(random.choice([0, 1, 1, 1, 3, 20])))
            if size:
                step.append((row, done[row], done[row] + size))
                done[row] += size
        if step:
            steps.append(step)
    return steps


def test_each_rank_moves_its_tokens_of_a_block(name: str) -> None:
    """Blocks are swapped out, loaded into other blocks, and copied."""
    case = Case([(0, 21)], block_size=8)
    contents, dtype = make_contents(case), NAMES[name]
    wanted = attend_contiguous(case, contents)[-1:]

    def work(group: RankGroup) -> torch.Tensor:
        layout = replace(case.layout(dtype), num_blocks=(8,))
        backend = shared(name, layout, group)
        backend.prepare(make_step([RowPart(0, 21, ([0, 1, 2],))], 8))
        backend.write(1, contents.k[0].to(dtype), contents.v[0].to(dtype))
        first, second, third = (
            np.array(each, np.int32) for each in ([0, 1, 2], [5, 6, 7], [4, 3, 0])
        )
        backend.swap_out(0, first, first)
        backend.load(0, first, second)
        backend.copy_blocks(0, second, third)
        backend.prepare(make_step([RowPart(20, 21, ([4, 3, 0],))], 8))
        backend.write(1, contents.k[0][20:].to(dtype), contents.v[0][20:].to(dtype))
        q = own_heads(contents.q[0][20:], case.kv_heads, group, 1).to(dtype)
        return backend.run(1, q, Scores(HEAD_DIM**-0.5))

    check(run_ranks(2, work), wanted, case.kv_heads, TOLERANCE[dtype])


def test_rank_has_its_share_of_full_attentions_memory() -> None:
    """One of four ranks has a quarter. Windows and states are not divided."""
    groups = (
        CacheGroup("full", (0, 3), 1, HEAD_DIM),
        CacheGroup("window", (1,), 1, HEAD_DIM, 10),
        CacheGroup(STATE, (2,), state_size=24),
    )
    case = Case([(0, 1)])
    layout = replace(case.layout(torch.float64), groups=groups, num_blocks=(5, 4, 3), block_size=16)

    def work(group: RankGroup) -> None:
        backend = share_context(layout, TorchBackend, group)
        assert isinstance(backend, ContextShared)
        parts = [backend._divided, backend._whole]
        sizes = [
            [kv.numel() for kv in each._memory.kv]
            for each in parts
            if isinstance(each, TorchBackend)
        ]
        token = 2 * HEAD_DIM
        assert sizes == [[2 * 5 * 4 * token, 0, 0], [0, 4 * 16 * token, 3 * 24]]

    run_ranks(4, work)


def test_every_token_is_on_one_rank() -> None:
    divisions = [TokenDivision(rank, 3, 4) for rank in range(3)]
    positions = torch.arange(50)
    counts = torch.stack([each.before(positions) for each in divisions])
    assert torch.equal(counts.sum(0), positions)
    given = torch.cat([positions, torch.tensor([-1])])
    slots = torch.stack([each.slots(given) for each in divisions])
    assert (slots[:, :-1] >= 0).sum(0).tolist() == [1] * 50 and slots[:, -1].tolist() == [-1] * 3
    assert slots.amax(0)[:14].tolist() == [*range(4), *range(4), *range(4), 4, 5]


def test_single_rank_uses_the_plain_backend() -> None:
    case = Case(DECODE)
    layout = case.layout(torch.float64)
    assert isinstance(share_context(layout, TorchBackend, ALONE), TorchBackend)


def test_block_size_must_be_divisible_by_the_ranks() -> None:
    layout = replace(Case(DECODE).layout(torch.float64), block_size=16)

    def work(group: RankGroup) -> None:
        with pytest.raises(ConfigError, match=r"size=3 does not divide block_size=16"):
            share_context(layout, TorchBackend, group)

    run_ranks(3, work)


def test_part_without_keys_adds_nothing() -> None:
    out = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    log_sums = torch.randn(2, 3, 4, dtype=torch.float64)
    out[1, 0], log_sums[1, 0] = 0.0, -torch.inf
    merged = merge_parts(out, log_sums, None)
    assert torch.equal(merged[0], out[0, 0])
    weights = log_sums.softmax(0)[..., None]
    torch.testing.assert_close(merged, (out * weights).sum(0), rtol=0, atol=1e-14)
