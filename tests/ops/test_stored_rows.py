"""Rows as checkpoints store them: dequantised values, and stacked parts."""

from dataclasses import replace

import pytest
import torch

from quire.ops.weights.stored_rows import Float4Rows, Float8Rows, IntegerRows, stacked


def test_integers_are_dequantised_by_scales_zeros_and_order() -> None:
    integers = torch.tensor([[-8, 7, 3, 0, 5], [1, 2, 3, 4, 5]], dtype=torch.int8)
    scales = torch.tensor([[0.5, 2.0], [1.0, 0.25]])
    zeros = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    rows = IntegerRows(integers, 4, scales, group_size=4, zeros=zeros)
    wanted = torch.tensor([[-4.5, 3.0, 1.0, -0.5, 10.0], [1.0, 2.0, 3.0, 4.0, 0.5]])
    assert torch.equal(rows.dequantised(), wanted)
    order = torch.tensor([4, 2, 0, 1, 3])
    found = replace(rows, order=order).dequantised()
    assert torch.equal(found[:, order], wanted)


def test_float8_is_dequantised_by_scales_per_output_or_group() -> None:
    values = torch.tensor([[1.0, -448.0, 0.015625, 2.0]]).to(torch.float8_e4m3fn)
    assert Float8Rows(values, torch.tensor([[2.0]]), 4).dequantised().tolist() == [
        [2.0, -896.0, 0.03125, 4.0]
    ]
    found = Float8Rows(values, torch.tensor([[1.0, 0.5]]), 3).dequantised()
    assert found.tolist() == [[1.0, -448.0, 0.015625, 1.0]]


def test_float4_is_dequantised_by_its_table_and_exponents() -> None:
    codes = torch.arange(16).to(torch.uint8)[None]  # low halves count up, high halves are 0
    low = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    rows = Float4Rows(codes, torch.tensor([[128]], dtype=torch.uint8))
    found = rows.dequantised()[0]
    assert found[::2].tolist() == [2 * v for v in low] + [-2 * v for v in low]
    assert (found[1::2] == 0.0).all()


def test_parts_that_fit_are_stacked_and_others_rejected() -> None:
    one = IntegerRows(torch.ones(2, 8, dtype=torch.int8), 4, torch.ones(2, 2), group_size=4)
    other = replace(one, zeros=torch.full((2, 2), 3.0))
    both = stacked([one, other])
    assert torch.equal(both.dequantised(), torch.cat([one.dequantised(), other.dequantised()]))
    with pytest.raises(ValueError, match="order of inputs"):
        stacked([one, replace(one, order=torch.arange(8))])
    with pytest.raises(ValueError, match="kind, bits or group size"):
        stacked([one, replace(one, bits=8)])
