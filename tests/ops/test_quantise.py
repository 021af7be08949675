"""Weights rounded by torch equal the C++ core's, value by value."""

import pytest
import torch

from quire.base.errors import ConfigError
from quire.ops.host.native import core
from quire.ops.weights.formats import Quantization
from quire.ops.weights.pack import pack
from quire.ops.weights.quantise import quantised
from quire.ops.weights.stored_rows import Float8Rows, IntegerRows

SIZES = [("int8", size) for size in (0, 32, 64, 128)] + [("int4", size) for size in (32, 64, 128)]


def weights(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return weights with rows of zeros, outliers, and values whose scales are subnormal."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    weight[:, ::32] *= 5
    weight[0], weight[1] = 0.0, 1e-40
    weight[2] *= 1e30
    return weight.to(dtype)


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
@pytest.mark.parametrize(("format", "size"), SIZES)
@pytest.mark.parametrize("inputs", [32, 36, 300, 1027])
def test_rounded_integers_equal_the_cores(inputs: int, format: str, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight, quantization = weights(70, inputs, dtype), Quantization(format, size)
        rows = quantised(weight, quantization)
        assert isinstance(rows, IntegerRows) and rows.bits == int(format[-1])
        wanted = pack(weight, quantization).rows(torch.arange(70), torch.float32)
        assert torch.equal(rows.dequantised(), wanted)


def test_float8_has_a_scale_for_each_output() -> None:
    weight = weights(20, 300)
    rows = quantised(weight, Quantization("fp8", 0))
    assert isinstance(rows, Float8Rows) and rows.scales.shape == (20, 1)
    largest = weight.abs().amax(dim=1, keepdim=True)
    torch.testing.assert_close(rows.dequantised().abs().amax(dim=1, keepdim=True), largest)
    error = (rows.dequantised() - weight).abs()
    # Half of a step, which is an eighth of the power of two, or the step of subnormals.
    assert (error <= (weight.abs() / 16).maximum(rows.scales * 2.0**-10) * 1.0001).all()


def test_nonfinite_weights_cannot_be_quantised() -> None:
    weight = weights(8, 64)
    weight[3, 5] = torch.inf
    with pytest.raises(ConfigError, match=r"\[8, 64\] holds values that are not finite.*int8"):
        quantised(weight, Quantization("int8", 32))
