"""Compare look-ups of embeddings and of encoder outputs with torch's."""

import pytest
import torch

from quire.ops import embedding as reference
from quire.ops.host.host_memory import lazy_zeros
from quire.ops.kernels import embedding as kernels


@pytest.mark.parametrize("columns", [1, 64, 1024, 1030])
@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
def test_embedding_equals_the_reference(
    columns: int, id_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    weight = torch.randn(9, columns, generator=torch.Generator().manual_seed(1))
    weight = weight.to(dtype).to(device)
    ids = torch.tensor([8, 0, 3, 3, 1], dtype=id_dtype, device=device)
    assert torch.equal(kernels.embedding(ids, weight), reference.embedding(ids, weight))


def test_embedding_takes_a_slice_of_a_table(device: torch.device) -> None:
    """OPT never looks up the first rows of its position table. The ids are strided."""
    weight = torch.arange(60.0, device=device).view(6, 10)
    ids = torch.tensor([0, 9, 3, 9], device=device)[::2]
    assert torch.equal(kernels.embedding(ids, weight[2:, :7]), weight[2:, :7][[0, 3]])


def test_row_offsets_may_exceed_32_bits(device: torch.device) -> None:
    weight = lazy_zeros((2**20 + 1, 2**11), torch.float16, device)
    weight[-1] = 3.0
    ids = torch.tensor([2**20, 0], device=device)
    assert kernels.embedding(ids, weight).amax(dim=1).tolist() == [3.0, 0.0]


def test_no_ids_give_no_rows(device: torch.device) -> None:
    ids = torch.empty(0, dtype=torch.int64, device=device)
    assert kernels.embedding(ids, torch.ones(2, 8, device=device)).shape == (0, 8)


def test_invalid_id_reads_no_memory_outside_the_table(device: torch.device) -> None:
    table = torch.full((4, 8), 7.0, device=device)
    ids = torch.tensor([-1, 2, 1], device=device)
    assert kernels.embedding(ids, table[1:3]).tolist() == [[0.0] * 8, [0.0] * 8, [7.0] * 8]


@pytest.mark.parametrize("columns", [1, 64, 1030])
@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
def test_encoder_outputs_are_placed_and_added(
    columns: int, id_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    """The rows are a view of wider ones; text tokens keep their bits."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, columns + 3, generator=generator).to(device, dtype)[:, :columns]
    memory = torch.randn(4, 2 * columns, generator=generator).to(device)
    ids = torch.tensor([-4, 7, -1, 0, -3], dtype=id_dtype, device=device)
    placed = kernels.place(x, ids, memory)
    assert torch.equal(placed, reference.place(x, ids, memory))
    assert torch.equal(placed[0], memory[3, :columns].to(dtype))
    added = kernels.add_features(x, ids, memory, columns)
    assert torch.equal(added, reference.add_features(x, ids, memory, columns))
    assert torch.equal(added[4], x[4] + memory[2, columns:].to(dtype))
    for found in (placed, added):
        assert torch.equal(found[[1, 3]], x[[1, 3]])


def test_invalid_slot_reads_no_memory_outside_the_slots(device: torch.device) -> None:
    memory = torch.full((4, 8), 7.0, device=device)
    ids = torch.tensor([-3, -2], device=device)
    placed = kernels.place(torch.ones(2, 8, device=device), ids, memory[:2])
    assert placed.tolist() == [[0.0] * 8, [7.0] * 8]
