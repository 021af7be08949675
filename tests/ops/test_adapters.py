"""The reference of adapters adds float64 products, only to the rows of its groups."""

import torch

from quire.ops.adapters import AdapterPart, AdapterSlots, ExpertAdapters


def slots_with_one(layer: int) -> tuple[AdapterSlots, torch.Tensor]:
    """Return slots whose second one adapts outputs 1 to 3 of a layer, and the change [5, 4]."""
    torch.manual_seed(0)
    part = AdapterPart(1, torch.randn(2, 4).double(), torch.randn(2, 3).double(), 0.5)
    slots = AdapterSlots(2, layer + 1)
    slots.put(1, slots.prepare({layer: [part]}))
    whole = torch.zeros(5, 4).double()
    whole[1:4] = 0.5 * part.up_RN.T @ part.down_RK
    return slots, whole


def test_rows_of_a_group_get_the_change_of_its_adapter() -> None:
    slots, change = slots_with_one(2)
    slots.begin_step([(0, [0]), (1, [1, 3])])
    x, out = torch.randn(4, 4).double(), torch.zeros(4, 5).double()
    slots.add(out, x, 2)
    torch.testing.assert_close(out[[1, 3]], x[[1, 3]] @ change.T)
    assert not out[[0, 2]].any()
    slots.add(out.zero_(), x, 0)
    assert not out.any()


def test_rows_of_an_expert_are_grouped_by_their_tokens() -> None:
    slots, change = slots_with_one(3)
    slots.begin_step([(1, [1, 3])])
    x, out = torch.randn(3, 4).double(), torch.zeros(3, 5).double()
    experts = ExpertAdapters(slots, (2, 0))
    experts.add(0, 1, out, x, torch.tensor([3, 0, 1]))
    torch.testing.assert_close(out[[0, 2]], x[[0, 2]] @ change.T)
    assert not out[1].any()
