"""The minimum reads and arithmetic of a step's operations, counted as documented."""

import pytest
import torch

from benchmarks.cpu.limits import Ceilings
from benchmarks.kernels.operations import Cost, Step, experts, operation_name, product
from quire.ops.host.native import core
from quire.ops.trace.program import Experts, Instruction, Kind, Route, View
from quire.ops.weights.formats import Quantization
from quire.ops.weights.pack import pack

CEILINGS = Ceilings(bytes_per_s=10.0, float_per_s=4.0, float32_per_s=2.0, int8_per_s=8.0)


def test_limit_is_the_longer_of_reading_and_arithmetic() -> None:
    assert Cost(1.0, num_bytes=30.0, floats=4.0, int8=8.0).lower_bound_s(CEILINGS) == 3.0
    assert Cost(1.0, num_bytes=10.0, floats=4.0, int8=8.0).lower_bound_s(CEILINGS) == 2.0
    assert Cost(1.0, 1.0, 2.0, 3.0) + Cost(1.0, 1.0, 1.0, 1.0) == Cost(2.0, 2.0, 3.0, 4.0)


def test_steps_are_parsed_and_prompts_are_chunked() -> None:
    assert Step.parsed("16x128", 256).parts == [(126, 1), (127, 1)]
    assert Step.parsed("2x1", 256).parts == [(0, 1)]
    assert Step.parsed("16x128", 256).num_rows == 16
    assert Step.parsed("prompt:600", 256).parts == [(0, 256), (256, 256), (512, 88)]


@pytest.mark.parametrize("text", ["16x", "x128", "0x128", "16x0", "prompt:", "prompt:-1", "1x2x3"])
def test_invalid_steps_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is none; take ROWSxTOKENS"):
        Step.parsed(text, 256)


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_product_reads_its_weight_once() -> None:
    weight = pack(torch.ones(64, 128, dtype=torch.bfloat16), None)
    assert product(weight, 3, 0.5) == Cost(0.5, weight.nbytes, floats=2.0 * 3 * 64 * 128)
    coarse = pack(torch.ones(64, 128), Quantization("int8", 32))
    assert product(coarse, 3, 0.5) == Cost(0.5, coarse.nbytes, int8=2.0 * 3 * 64 * 128)
    assert product(weight, 0, 0.0) == Cost()


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_products_of_all_heads_are_one_operation() -> None:
    weight, views = pack(torch.ones(64, 128, dtype=torch.bfloat16), None), (View(0), View(1))
    heads = [Instruction(Kind.HEAD_PRODUCT, views, packed=weight, joins=n > 0) for n in range(3)]
    assert operation_name(heads) == "3 products 64 x 128"


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_experts_without_tokens_are_not_read() -> None:
    coarse = Quantization("int8", 32)
    gate_up, down = pack(torch.ones(128, 64), coarse), pack(torch.ones(64, 64), coarse)
    route = Route(torch.empty(0, 8), 2, False)
    layer = Experts([gate_up] * 4, [down] * 4, ([], []), 0, 8, route, None)
    num_bytes, operations = gate_up.nbytes + down.nbytes, 2.0 * (128 * 64 + 64 * 64)
    assert experts(layer, 1, 0.5) == Cost(
        0.5, num_bytes, int8=operations
    )  # 2 of 8 experts, half of them on this rank
    many = experts(layer, 100, 0.5)
    assert many.num_bytes == pytest.approx(4 * num_bytes) and many.int8 == 100 * operations
