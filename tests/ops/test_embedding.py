"""Negative ids read the encoder memory, and give zeros from the table; rotation with axes.

Covers `ops/embedding.py`, `ops/rotary.py`, and their kinds in the C++ core.
"""

import pytest
import torch

from quire.ops.embedding import add_features, embedding, part_of_embedding, place
from quire.ops.registry import record_ops
from quire.ops.rotary import rotary_rows
from quire.ops.trace.program import here
from quire.ops.trace.tracer import Tracer
from quire.ops.weights.device_weights import pack_weight
from quire.ops.weights.formats import Quantization

SIZE, SLOTS = 32, 6
IDS = torch.tensor([3, -6, 0, -1, 7, -2, -6])
IS_TEXT = IDS >= 0


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def expected(x_TD: torch.Tensor, memory_SW: torch.Tensor, offset: int, adds: bool) -> torch.Tensor:
    """Compute the result token by token."""
    found = x_TD.clone()
    for token, id_ in enumerate(IDS.tolist()):
        if id_ < 0:
            row = memory_SW[-1 - id_, offset : offset + x_TD.shape[1]].to(x_TD.dtype)
            found[token] = found[token] + row if adds else row
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_of_the_encoder_memory_are_placed_and_added(dtype: torch.dtype) -> None:
    x = values(len(IDS), SIZE, dtype=dtype)
    memory = values(SLOTS, 3 * SIZE, seed=1, dtype=torch.promote_types(dtype, torch.float32))
    for ids in (IDS, IDS.int()):
        assert torch.equal(place(x, ids, memory), expected(x, memory, 0, False))
        found = add_features(x, ids, memory, 2 * SIZE)
        assert torch.equal(found, expected(x, memory, 2 * SIZE, True))


@pytest.mark.parametrize("packing", [None, "plain", "int8"])
def test_table_gives_zeros_for_negative_ids(packing: str | None) -> None:
    """Also a rank's part of a table, and a table that a head packed."""
    table = values(8, SIZE)
    weight = table
    if packing is not None:
        rounding = None if packing == "plain" else Quantization("int8", SIZE)
        weight = pack_weight(table.clone(), rounding)
    found = embedding(IDS, weight, torch.float32)
    wanted = embedding(IDS.clamp(min=0), weight, torch.float32)
    assert torch.equal(found[IS_TEXT], wanted[IS_TEXT])
    assert not found[~IS_TEXT].any()
    part = part_of_embedding(IDS, weight, 2, torch.float32)
    assert not part[~IS_TEXT].any() and part[0].any()


def run_core(forward: object, ids_T: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Trace a function of ids and positions [T], and run its program on these."""
    traced = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    with record_ops(keeps_values=True) as record:
        result = forward(*traced)  # type: ignore[operator]
    draft = Tracer(record, *traced).trace(result)
    program = draft.parts({}, here).assemble(0, lambda _: None, int)
    out = torch.empty(len(ids_T), draft.widths[0])
    positions, nothing = positions.contiguous(), (0, 0, 0, 0)
    addresses = (each.data_ptr() for each in (ids_T, positions))
    program.run(len(ids_T), *addresses, [out.data_ptr()], [], nothing, 1)
    return out


def test_core_reads_the_encoder_memory() -> None:
    table, memory = values(8, SIZE), values(SLOTS, 2 * SIZE, seed=1)
    packed = pack_weight(table.clone())
    for weight in (table, packed):

        def forward(
            ids_T: torch.Tensor, _: torch.Tensor, weight: torch.Tensor = weight
        ) -> torch.Tensor:
            x_TD = place(embedding(ids_T, weight, torch.float32), ids_T, memory)
            return add_features(x_TD, ids_T, memory, SIZE)

        assert torch.equal(run_core(forward, IDS, IDS), forward(IDS, IDS))

    def looked_up(ids_T: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return embedding(ids_T, packed, torch.float32)

    assert not run_core(looked_up, IDS, IDS)[~IS_TEXT].any()


def test_each_frequency_uses_the_position_on_its_axis() -> None:
    """Equal positions on all axes give the bits of a rotation without axes, also in the core."""
    frequencies = 100.0 ** -(torch.arange(16, dtype=torch.float64) / 16)
    frequencies[-3:] = 0.0
    axes = torch.arange(16) % 3
    by_axis = torch.where(torch.arange(3)[:, None] == axes, frequencies, 0.0)
    positions = torch.tensor([[0, 1, 70, 4, 9, 2, 3], [5, 5, 6, 0, 1, 2, 9], [9, 1, 4, 3, 2, 5, 6]])

    def of(given: torch.Tensor) -> object:
        return lambda _, positions_T: rotary_rows(positions_T, given, 1.25, torch.float32)

    for run in (
        lambda given, places: rotary_rows(places, given, 1.25, torch.float32),
        lambda given, places: run_core(of(given), IDS, places),
    ):
        found = run(by_axis, positions).view(-1, 4, 16)
        for axis, alone in enumerate(positions):
            wanted = run(frequencies, alone).view(-1, 4, 16)
            assert torch.equal(found[..., axes == axis], wanted[..., axes == axis])
        same = run(by_axis, positions[:1].expand(3, -1).contiguous())
        assert torch.equal(same.flatten(1), run(frequencies, positions[0]).flatten(1))
