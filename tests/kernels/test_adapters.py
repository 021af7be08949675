"""Compare the GPU's adapter kernels with float64: mixed ranks, parts and rows in one step."""

import pytest
import torch

from quire.ops import gpu
from quire.ops.adapters import AdapterPart, AdapterParts, LayerSize
from quire.ops.kernels.launch import INTERPRETED
from quire.ops.kernels.products import adapters
from quire.runner.gpu.adapters import DeviceSlots

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
RANKS = 1, 8, 64, 256
INPUTS, OUTPUTS = 72, (40, 24, 8)  # of a layer that merges three modules
BASE = -1


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make operations take their GPU path, also in the interpreter."""
    if INTERPRETED:
        monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: True)


def part(first: int, num: int, rank: int, inputs: int, seed: int) -> AdapterPart:
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
    up = torch.randn(rank, num, generator=generator) * rank**-0.5
    return AdapterPart(first, down, up, 0.3 + 0.1 * seed)


def merged_layer(rank: int, seed: int) -> list[AdapterPart]:
    """Return an adapter's parts: for all modules, for some, or one part for two modules.

    The last part has a lower rank.
    """
    first, second, third = OUTPUTS
    kinds = {
        0: [(0, first), (first, second), (first + second, third)],
        1: [(first, second)],
        2: [(first, second + third)],
        3: [(0, first), (first + second, third)],
    }
    spans = kinds[seed % 4]
    ranks = [rank] * (len(spans) - 1) + [max(1, rank // 2)]
    return [
        part(*span, own, INPUTS, 10 * seed + i)
        for i, (span, own) in enumerate(zip(spans, ranks, strict=True))
    ]


def slots_of(
    loaded: list[AdapterParts],
    layers: list[LayerSize],
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_rank: int = 256,
    is_fixed: bool = False,
) -> DeviceSlots:
    """Return slots that hold these adapters from slot 1 on, after they held others."""
    slots = DeviceSlots(
        len(loaded) + 1, layers, max_rank, dtype, device, max_rows=16, is_fixed=is_fixed
    )
    others = [slots.prepare({}), *map(slots.prepare, reversed(loaded))]
    for slot, packed in [*enumerate(others), *enumerate(map(slots.prepare, loaded), 1)]:
        slots.put(slot, packed)
    return slots


def use(slots: DeviceSlots, rows: list[int], lens: list[int], padding: int = 0) -> torch.Tensor:
    """Group a step's tokens; return the slot of each, BASE for padding."""
    device = slots._rows_S.device
    slots.set_rows(torch.tensor(rows, dtype=torch.int32).numpy())
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    slots.group(starts.to(device), sum(lens) + padding)
    used = torch.tensor(rows).repeat_interleave(torch.tensor(lens))
    return torch.cat([used, torch.full((padding,), BASE)])


def exact(
    out_TO: torch.Tensor, x_TK: torch.Tensor, slots_T: torch.Tensor, loaded: list[AdapterParts],
    layer: int,
) -> torch.Tensor:  # fmt: skip
    wanted, x = out_TO.double().clone(), x_TK.double()
    for slot, parts in enumerate(loaded, 1):
        for each in parts.get(layer, ()):
            columns = slice(each.first, each.first + each.up_RN.shape[1])
            down, up = (matrix.to(out_TO.dtype).double() for matrix in (each.down_RK, each.up_RN))
            change = (x @ down.T) @ up * each.scale
            wanted[:, columns] += torch.where((slots_T == slot)[:, None], change, 0.0)
    return wanted


def check(
    slots: DeviceSlots, loaded: list[AdapterParts], layer: int, slots_T: torch.Tensor,
    sizes: tuple[int, int], dtype: torch.dtype, device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """Add the adapters' changes to random outputs and compare; x is a slice of a wider tensor."""
    generator, num = torch.Generator().manual_seed(5), len(slots_T)
    x = torch.randn(num, sizes[0] + 8, generator=generator).to(dtype)[:, : sizes[0]]
    out = torch.randn(num, sizes[1], generator=generator).to(dtype)
    result = out.clone().to(device)
    slots.add(result, x.to(device), layer)
    wanted = exact(out, x, slots_T, loaded, layer)
    assert torch.equal(result.cpu()[slots_T == BASE], out[slots_T == BASE]), "rows of no adapter"
    error = (result.cpu().double() - wanted).abs().max()
    assert error <= TOLERANCE[dtype] * wanted.abs().max(), f"{error:.2e}"
    return result.cpu()


LAYERS = [LayerSize(16, (16,), True), LayerSize(INPUTS, OUTPUTS, False)]
ROWS = [BASE, 2, 1, BASE, 4, 3, 2, 1, BASE]


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_step_mixes_ranks_and_rows_without_an_adapter(
    dtype: torch.dtype, is_fixed: bool, device: torch.device
) -> None:
    """The step has prompts, single tokens, an empty row and padding."""
    loaded = [{1: merged_layer(rank, seed)} for seed, rank in enumerate(RANKS)]
    slots = slots_of(loaded, LAYERS, dtype, device, is_fixed=is_fixed)
    lens = [3, 1, 18, 0, 2, 20, 1, 1, 1]
    slots_T = use(slots, ROWS, lens, padding=4)
    sizes = INPUTS, sum(OUTPUTS)
    check(slots, loaded, 1, slots_T, sizes, dtype, device)
    other = torch.zeros(len(slots_T), 16, dtype=dtype, device=device)
    slots.add(other, torch.ones_like(other), 0)
    assert not other.any(), "a layer without adapters changed"


def test_decoding_rows_use_the_current_adapters_of_their_slots(
    dtype: torch.dtype, device: torch.device
) -> None:
    loaded = [{1: merged_layer(rank, seed)} for seed, rank in enumerate(RANKS)]
    slots = slots_of(loaded, LAYERS, dtype, device)
    sizes = INPUTS, sum(OUTPUTS)
    for rows in (ROWS, [4], [BASE, BASE], [3, 3, 1]):
        slots_T = use(slots, rows, [1] * len(rows))
        check(slots, loaded, 1, slots_T, sizes, dtype, device)
    loaded[2] = {1: merged_layer(5, 1)}
    slots.put(3, slots.prepare(loaded[2]))
    check(slots, loaded, 1, slots_T, sizes, dtype, device)
    slots.put(3, slots.prepare({}))
    check(slots, [loaded[0], {}, {}, {}], 1, slots_T, sizes, dtype, device)


@pytest.mark.parametrize("num_tokens", [7, pytest.param(300, marks=pytest.mark.slow)])
def test_inputs_split_among_programs_give_the_same_sums(
    num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Four programs split 2,048 inputs of few tokens; one program takes all of many tokens."""
    layers = [LayerSize(2048, (48, 16), True)]
    loaded: list[AdapterParts] = [
        {0: [part(0, 48, 16, 2048, 1), part(48, 16, 3, 2048, 2)]},
        {0: [part(48, 16, 9, 2048, 3)]},
    ]
    slots = slots_of(loaded, layers, dtype, device, max_rank=16)
    slots_T = use(slots, [1, BASE, 2], [num_tokens - 4, 1, 3])
    check(slots, loaded, 0, slots_T, (2048, 64), dtype, device)


def test_fixed_order_gives_a_token_the_same_bits_in_any_step(
    dtype: torch.dtype, device: torch.device
) -> None:
    loaded = [{1: merged_layer(rank, seed)} for seed, rank in enumerate(RANKS)]
    slots = slots_of(loaded, LAYERS, dtype, device, is_fixed=True)
    x = torch.randn(9, INPUTS, generator=torch.Generator().manual_seed(3)).to(dtype).to(device)
    together = torch.zeros(9, sum(OUTPUTS), dtype=dtype, device=device)
    use(slots, ROWS, [1] * 9)
    slots.add(together, x, 1)
    for i, row in enumerate(ROWS):
        alone = torch.zeros_like(together[:1])
        use(slots, [row], [1])
        slots.add(alone, x[i : i + 1], 1)
        assert torch.equal(alone[0], together[i])


def test_memory_has_room_for_the_maximum_rank_of_all_modules(device: torch.device) -> None:
    dtype, layers = torch.float32, [LayerSize(20, (30, 5), False), LayerSize(16, (16,), True)]
    slots = DeviceSlots(3, layers, 4, dtype, device, max_rows=2)
    numbers = 4 * ((32 + 32) + (32 + 16) + (16 + 16))
    table = 3 * 2 * 2 * adapters.FIELDS * 8
    assert slots.nbytes == 3 * numbers * 4 + table + 2 * 4
    largest = {
        0: [part(0, 30, 4, 20, 1), part(30, 5, 4, 20, 2)],
        1: [part(0, 16, 4, 16, 3)],
    }
    assert len(slots.prepare(largest).values) == numbers
    with pytest.raises(AssertionError):
        slots.prepare({0: [part(0, 30, 5, 20, 1)]})


def test_add_rejects_tokens_that_were_not_grouped(device: torch.device) -> None:
    slots = slots_of([{}], LAYERS, torch.float32, device)
    x = torch.zeros(3, 16, device=device)
    with pytest.raises(AssertionError, match="grouped first"):
        slots.add(x, x, 0)
    use(slots, [1], [2])
    with pytest.raises(AssertionError, match="not the tokens"):
        slots.add(x, x, 0)
