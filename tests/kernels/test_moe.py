"""Compare routing, sorting and the experts' products with the torch reference.

Covers `ops/kernels/moe_sort.py`.
"""

from typing import Any

import pytest
import torch

from quire.ops import moe as reference
from quire.ops.elementwise import ClampedGate
from quire.ops.kernels import moe, moe_sort
from quire.ops.kernels.moe import Tile
from tests.kernels.test_deterministic import exact_dots  # noqa: F401 (a fixture)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SMALL = Tile(16, 16, 32, 16, num_warps=4, num_stages=2)
Problem = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def numbers(*shape: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def some_ids(num_tokens: int, num_experts: int, num_chosen: int, seed: int = 0) -> torch.Tensor:
    """Return different experts for each token; some experts are more frequent."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    scores *= torch.linspace(1.0, 3.0, num_experts)
    return scores.topk(num_chosen).indices.int()


def problem(
    num_tokens: int,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Problem:
    """Return arguments of moe_experts. sizes: experts, experts per token, model and inner dim."""
    num_experts, num_chosen, size, inner = sizes
    return (
        numbers(num_tokens, size, seed=1, dtype=dtype, device=device),
        some_ids(num_tokens, num_experts, num_chosen).to(device),
        torch.rand(num_tokens, num_chosen, generator=torch.Generator().manual_seed(2)).to(device),
        numbers(num_experts, 2 * inner, size, seed=3, dtype=dtype, device=device) * size**-0.5,
        numbers(num_experts, size, inner, seed=4, dtype=dtype, device=device) * inner**-0.5,
    )


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


# ---- routing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize(
    "shape", [(0, 6, 2), (1, 6, 2), (7, 128, 8), (5, 60, 4), (4, 3, 3), (2, 1, 1)]
)
def test_route_equals_the_reference(
    shape: tuple[int, int, int], normalises: bool, dtype: torch.dtype, device: torch.device
) -> None:
    num_tokens, num_experts, num_chosen = shape
    logits = numbers(num_tokens, num_experts, seed=5, dtype=dtype, device=device) * 2
    wanted_ids, wanted = reference.moe_route(logits, num_chosen, normalises)
    ids, weights = moe.moe_route(logits, num_chosen, normalises)
    assert torch.equal(ids, wanted_ids) and ids.dtype == torch.int32
    torch.testing.assert_close(weights, wanted, atol=1e-6, rtol=1e-5)


def test_route_breaks_ties_by_the_lowest_expert_id(device: torch.device) -> None:
    """Also among logits of minus infinity, and in a slice of a wider tensor."""
    low = -torch.inf
    rows = [[1.0, 3, 1, 3, 1, 1, 0, 3], [low, low, low, 2, low, low, low, low], [0.0] * 8]
    logits = torch.tensor(rows, device=device)
    ids, weights = moe.moe_route(torch.cat((logits, logits), 1)[:, :8], 5, True)
    assert ids.tolist() == [[1, 3, 7, 0, 2], [3, 0, 1, 2, 4], [0, 1, 2, 3, 4]]
    assert weights[1].tolist() == [1, 0, 0, 0, 0]
    assert torch.equal(ids, reference.moe_route(logits, 5, True)[0])


@pytest.mark.parametrize("normalises", [True, False])
def test_nan_logits_affect_only_their_row_and_give_valid_expert_ids(
    normalises: bool, device: torch.device
) -> None:
    logits = torch.zeros(3, 6, device=device)
    logits[1, 4], logits[2] = torch.nan, torch.nan
    ids, weights = moe.moe_route(logits, 2, normalises)
    assert ids.min() >= 0 and ids.max() < 6
    assert weights.isnan().tolist() == [[False] * 2, [True] * 2, [True] * 2]


@pytest.mark.parametrize("num_tokens", [3, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_fixed", [False, True])
def test_padding_rows_of_nan_or_infinity_do_not_change_real_rows(
    num_tokens: int, is_fixed: bool, device: torch.device
) -> None:
    """A captured step leaves such rows. They get valid experts and are sorted like others."""
    x, _, _, gate_up, down = problem(num_tokens, (6, 2, 16, 16), torch.float32, device)
    router = numbers(6, 16, seed=6, dtype=torch.float32, device=device)
    found = []
    for bad in (0.0, torch.nan, torch.inf, -torch.inf):
        x[1:] = bad
        logits = x @ router.T
        logits[2:] = bad
        ids, weights = moe.moe_route(logits, 2, True)
        assert ids.min() >= 0 and ids.max() < 6
        check_sorted(ids, 6, 16)
        found.append(moe.moe_experts(x, ids, weights, gate_up, down, is_fixed))
        assert found[-1][1:].isfinite().all() == (bad == 0.0)
    assert found[0][0].isfinite().all()
    assert all(torch.equal(out[0], found[0][0]) for out in found)


# ---- sorting ---------------------------------------------------------------------------------


def check_sorted(ids_TC: torch.Tensor, num_experts: int, tile_pairs: int) -> None:
    """Check that pairs are sorted stably by expert, and that tiles cover each pair once."""
    order, tiles = moe_sort.sort_by_expert(ids_TC, num_experts, tile_pairs)
    flat = ids_TC.flatten()
    assert torch.equal(order.long(), flat.argsort(stable=True))
    covered = []
    for expert, begin, end in tiles.t().tolist():
        assert begin == end == 0 or 0 < end - begin <= tile_pairs
        assert (flat[order[begin:end].long()] == expert).all()
        covered += range(begin, end)
    assert covered == list(range(len(flat)))


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen"), [(1, 4, 2), (5, 6, 2), (16, 128, 8), (43, 60, 3)]
)
def test_one_launch_sorts_pairs_by_expert(
    num_tokens: int, num_experts: int, num_chosen: int, device: torch.device
) -> None:
    """The pairs fit a small or a large chunk."""
    ids = some_ids(num_tokens, num_experts, num_chosen).to(device)
    for tile_pairs in (16, 4):
        check_sorted(ids, num_experts, tile_pairs)


@pytest.mark.parametrize("num_tokens", [513, pytest.param(1030, marks=pytest.mark.slow)])
def test_several_programs_sort_many_pairs(num_tokens: int, device: torch.device) -> None:
    check_sorted(some_ids(num_tokens, 12, 2).to(device), 12, 16)


def test_many_chunks_are_counted_in_several_passes(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(moe_sort, "CHUNK", 16)
    monkeypatch.setattr(moe_sort, "SMALL_CHUNK", 16)
    check_sorted(some_ids(150, 5, 2).to(device), 5, 16)


def test_max_num_tiles_bounds_every_routing() -> None:
    """Tiles are counted in Python, for pairs spread over one to all experts."""
    for num_pairs in range(1, 40):
        for num_experts in (1, 3, 8):
            for hit in range(1, min(num_experts, num_pairs) + 1):
                counts = [1] * (hit - 1) + [num_pairs - hit + 1]
                tiles = sum(-(-count // 4) for count in counts)
                assert tiles <= moe_sort.max_num_tiles(num_pairs, num_experts, 4)
    assert moe_sort.max_num_tiles(40, 8, 4) == 8 + 8


@pytest.mark.parametrize("num_tokens", [5, 513])
def test_pairs_of_experts_on_other_ranks_are_in_no_tile(
    num_tokens: int, device: torch.device
) -> None:
    """Six of eight experts are on this rank, or four, a power of two."""
    for num_experts in (6, 4):
        ids = some_ids(num_tokens, 8, 2).clamp(max=num_experts).to(device)
        order, tiles = moe_sort.sort_by_expert(ids, num_experts, 16, has_others=True)
        flat = ids.flatten()
        assert torch.equal(order.long(), flat.argsort(stable=True))
        covered = [place for _, begin, end in tiles.t().tolist() for place in range(begin, end)]
        assert covered == list(range(int((flat < num_experts).sum())))


# ---- products --------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(6, 2, 40, 36), (4, 3, 64, 32), (3, 1, 33, 17)])
@pytest.mark.parametrize("num_tokens", [1, 3, 9])
def test_experts_equal_the_reference(
    num_tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Cases use the path for few tokens and that for many."""
    arguments = problem(num_tokens, sizes, dtype, device)
    check(moe.moe_experts(*arguments), reference.moe_experts(*arguments))


@pytest.mark.parametrize("clamped", [None, ClampedGate(1.7, 0.6)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, 9])
def test_experts_on_other_ranks_add_nothing(
    num_tokens: int, clamped: Any, device: torch.device
) -> None:
    x, ids, weights, gate_up, down = problem(num_tokens, (6, 3, 40, 36), torch.float32, device)
    wide = gate_up.shape[1], down.shape[1]
    biases = [numbers(6, n, seed=5, dtype=torch.float32, device=device) for n in wide]
    for first, end in ((0, 2), (2, 6)):
        own = gate_up[first:end].contiguous(), down[first:end].contiguous()
        of_own = biases[0][first:end].contiguous(), biases[1][first:end].contiguous()
        wanted = reference.moe_experts(x, ids, weights, *own, of_own, clamped, first)
        renamed = reference.own_ids(ids, first, end - first)
        found = moe.moe_experts(
            x, renamed, weights, *own, biases=of_own, clamped=clamped, has_others=True
        )
        check(found, wanted)


@pytest.mark.parametrize("way", ["kernels", "fixed", "torch"])
@pytest.mark.parametrize(("num_tokens", "num_real"), [(3, 2), (9, 5), (9, 0), (70, 66)])
def test_padded_tokens_reach_no_expert(
    num_tokens: int, num_real: int, way: str, device: torch.device
) -> None:
    """Their ids may be of no expert at all. Real tokens get the results that they get alone."""
    x, ids, weights, *experts = problem(num_tokens, (6, 2, 40, 36), torch.float32, device)
    alone = (x[:num_real], ids[:num_real], weights[:num_real], *experts)
    ids[num_real:], x[num_real:], weights[num_real:] = 1 << 28, float("nan"), float("nan")
    padded, real = (x, ids, weights, *experts), torch.tensor([num_real], dtype=torch.int32)
    if way == "torch":
        with reference.only_first_tokens(real.to(device)):
            found = reference.moe_experts(*padded)
    else:
        found = moe.moe_experts(*padded, is_fixed=way == "fixed", num_real=real.to(device))
    check(found[:num_real], reference.moe_experts(*alone))


def test_pairs_of_padded_tokens_are_in_no_tile(device: torch.device) -> None:
    """One program sorts the first case, several the second."""
    for num_tokens, num_real in ((16, 9), (513, 400)):
        ids = some_ids(num_tokens, 6, 2).to(device)
        real = torch.tensor([num_real], dtype=torch.int32, device=device)
        order, tiles = moe_sort.sort_by_expert(ids, 6, 16, num_real=real)
        flat = ids[:num_real].flatten()
        assert torch.equal(order[: 2 * num_real].long(), flat.argsort(stable=True))
        covered = [place for _, begin, end in tiles.t().tolist() for place in range(begin, end)]
        assert covered == list(range(2 * num_real))


@pytest.mark.parametrize("tile", [*moe.TILES.values(), moe.LARGEST_TILE, SMALL], ids=str)
@pytest.mark.parametrize("num_tokens", [2, 47])
def test_every_tile_equals_the_reference(
    num_tokens: int, tile: Tile, dtype: torch.dtype, device: torch.device
) -> None:
    """Experts have several tiles or none. Sizes are multiples of the smallest tile only."""
    if device.type == "cuda" and dtype == torch.float32 and tile.needs_wgmma:
        pytest.skip("float32 has a tile of its own")
    arguments = problem(num_tokens, (5, 2, 48, 32), dtype, device)
    check(moe.grouped_experts(*arguments, tile), reference.moe_experts(*arguments))


@pytest.mark.parametrize("clamped", [None, ClampedGate(1.7, 0.6)], ids=str)
@pytest.mark.parametrize(("num_tokens", "is_fixed"), [(3, False), (9, False), (3, True)])
def test_biases_and_clamped_gate_equal_the_reference(
    num_tokens: int, is_fixed: bool, clamped: Any, dtype: torch.dtype, device: torch.device
) -> None:
    """Cases use the path for few tokens, that for many, and a fixed order."""
    arguments = problem(num_tokens, (6, 2, 40, 36), dtype, device)
    biases = tuple(numbers(6, size, seed=size, dtype=dtype, device=device) for size in (2 * 36, 40))
    wanted = reference.moe_experts(*arguments, biases, clamped)
    check(moe.moe_experts(*arguments, is_fixed, biases, clamped), wanted)
    assert not torch.allclose(reference.moe_experts(*arguments), wanted, atol=0.1)


@pytest.mark.parametrize("num_tokens", [4, 40])
def test_all_tokens_may_choose_the_same_experts(num_tokens: int, device: torch.device) -> None:
    arguments = list(problem(num_tokens, (4, 2, 16, 16), torch.float32, device))
    arguments[1] = torch.tensor([[3, 1]], dtype=torch.int32, device=device).repeat(num_tokens, 1)
    check(moe.moe_experts(*arguments), reference.moe_experts(*arguments))


@pytest.mark.parametrize("num_tokens", [0, 2, 6])
def test_tokens_may_be_a_slice_of_a_wider_tensor(num_tokens: int, device: torch.device) -> None:
    """The rest of the tensor is NaN and is not read. There may be no tokens."""
    sizes = (4, 2, 20, 12)
    x, *rest = problem(8, sizes, torch.float32, device)
    wide = torch.full((num_tokens, 50), torch.nan, device=device)
    wide[:, 10:30] = x[:num_tokens]
    ids, weights = rest[0][:num_tokens], rest[1][:num_tokens]
    found = moe.moe_experts(wide[:, 10:30], ids, weights, *rest[2:])
    assert found.shape == (num_tokens, 20)
    if num_tokens:
        check(found, reference.moe_experts(x[:num_tokens], ids, weights, *rest[2:]))


@pytest.mark.parametrize("num_tokens", [3, 8])
def test_weights_of_unused_experts_are_not_read(num_tokens: int, device: torch.device) -> None:
    x, ids, weights, gate_up, down = problem(num_tokens, (5, 2, 16, 16), torch.float32, device)
    ids = ids % 3
    wanted = reference.moe_experts(x, ids, weights, gate_up, down)
    gate_up[3:], down[3:] = torch.nan, torch.nan
    check(moe.moe_experts(x, ids, weights, gate_up, down), wanted)


@pytest.mark.parametrize("num_tokens", [2, 12])
def test_nan_token_does_not_change_other_tokens(num_tokens: int, device: torch.device) -> None:
    """Their bits stay the same."""
    arguments = problem(num_tokens, (4, 2, 16, 16), torch.float32, device)
    before = moe.moe_experts(*arguments)
    arguments[0][1] = torch.nan
    after = moe.moe_experts(*arguments)
    others = torch.arange(num_tokens, device=device) != 1
    assert torch.equal(after[others], before[others]) and after[1].isnan().all()


def test_fixed_order_gives_a_token_the_same_bits_in_any_batch(
    dtype: torch.dtype, device: torch.device
) -> None:
    x, ids, weights, *experts = problem(100, (3, 2, 72, 40), dtype, device)
    together = moe.moe_experts(x, ids, weights, *experts, is_fixed=True)
    check(together, reference.moe_experts(x, ids, weights, *experts))
    differs = False
    for first, last in [(0, 1), (99, 100), (50, 53), (1, 6), (20, 100)]:
        part = x[first:last], ids[first:last], weights[first:last]
        found = moe.moe_experts(*part, *experts, is_fixed=True)
        assert torch.equal(found, together[first:last]), (first, last)
        differs |= not torch.equal(moe.moe_experts(*part, *experts), together[first:last])
    assert differs, "the default order gives the same bits, too"


def test_tiles_grow_with_the_batch() -> None:
    """With 8 of 128 experts per token, 32 tokens are two per expert, and 2,048 are 128."""
    pairs = [moe.tile_for(n * 8, 128, torch.bfloat16).pairs for n in (5, 32, 256, 512, 2048, 8192)]
    assert pairs == [16, 16, 32, 64, 128, 128]
    assert moe.tile_for(8192 * 8, 128, torch.float32).pairs == 16
    assert moe.tile_for(8192 * 8, 128, torch.bfloat16, takes_largest=False).pairs == 64
