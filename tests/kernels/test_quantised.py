"""Compare products with quantised weights with the reference dequantisation in float64.

Covers `ops/weights/gpu_weights.py`, `ops/weights/gpu_layout.py` and
`ops/kernels/quantised_rows.py`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from quire.base.errors import ConfigError
from quire.base.settings.config import ModelConfig
from quire.models.checkpoint.formats import weight_formats
from quire.models.load.loading import LoadOptions, load_model, model_bytes
from quire.models.load.packing import planned_bytes
from quire.models.parts.determinism import make_deterministic
from quire.models.parts.layers import Embedding, Linear, LMHead
from quire.models.registry import make_model
from quire.ops import gpu
from quire.ops.kernels import quantised as kernels
from quire.ops.kernels.launch import INTERPRETED
from quire.ops.linear import linear
from quire.ops.weights import pack
from quire.ops.weights.device_weights import pack_rows, pack_weight
from quire.ops.weights.formats import Packing, Quantization
from quire.ops.weights.gpu_layout import layout_of
from quire.ops.weights.gpu_weights import (
    BITS,
    GPUWeight,
    join_outputs,
    multiply,
    pack_for_gpu,
    quantise_for_gpu,
    stack_experts,
)
from quire.ops.weights.quantise import quantised
from quire.ops.weights.stored_rows import (
    FLOAT4_VALUES,
    Float4Rows,
    Float8Rows,
    IntegerRows,
    StoredRows,
)
from tests.kernels.test_deterministic import exact_dots  # noqa: F401 (a fixture)
from tests.support.cases import in_turn, slow_but
from tests.support.models.checkpoints import random_tokens, write_checkpoint
from tests.support.models.paged_forward import run_paged

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
OUTPUTS = 70


@pytest.fixture(autouse=True)
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(gpu, "is_gpu", lambda device: True)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(7))


def integers(inputs: int, bits: int, group: int, zeros: str = "none") -> IntegerRows:
    count = -(-inputs // group)
    values = whole(-(1 << bits - 1), 1 << bits - 1, OUTPUTS, inputs).to(torch.int8)
    scales = random(OUTPUTS, count, seed=1)
    if zeros == "none":
        return IntegerRows(values, bits, scales, group)
    if zeros == "whole":
        most = 8 if bits == 4 else 127
        return IntegerRows(values, bits, scales, group, whole(-most, most, OUTPUTS, count).float())
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(2))
    return IntegerRows(values, bits, scales, group, random(OUTPUTS, count, seed=3), order)


def float8(inputs: int, group: int) -> Float8Rows:
    values = random(OUTPUTS, inputs).to(torch.float8_e4m3fn)
    return Float8Rows(values, random(OUTPUTS, -(-inputs // group), seed=1), group)


def float4(inputs: int) -> Float4Rows:
    exponents = whole(110, 128, OUTPUTS, inputs // 32).to(torch.uint8)
    return Float4Rows(whole(0, 256, OUTPUTS, inputs // 2).to(torch.uint8), exponents)


# Groups that fill a chunk, a part or several; partial last groups; groups that cross chunks.
STORED: dict[str, StoredRows] = {
    "int4": integers(160, 4, 32),
    "int4, one group": integers(96, 4, 96),
    "int4, large groups": integers(600, 4, 256, "whole"),
    "int4, zeros": integers(300, 4, 128, "whole"),
    "int4, zeros not whole, sorted": integers(200, 4, 32, "any"),
    "int4, one group, zeros not whole": integers(130, 4, 130, "any"),
    "int4, small groups": integers(176, 4, 16),
    "int8": integers(300, 8, 128),
    "int8, an output's": integers(130, 8, 130),
    "int8, zeros": integers(256, 8, 64, "whole"),
    "int8, groups of 96": integers(200, 8, 96, "any"),
    "int8, small groups": integers(160, 8, 16),
    "fp8": float8(300, 300),
    "fp8, blocks": float8(300, 128),
    "mxfp4": float4(160),
}


def problem(
    rows: StoredRows, num_tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, scaled to the weight's norm, a bias, and the result in float64."""
    weight = rows.dequantised(torch.float64)
    x = (random(num_tokens, weight.shape[1], seed=4) * weight.norm(dim=1).mean() ** -1).to(dtype)
    bias = random(OUTPUTS, seed=5).to(dtype)
    return x, bias, torch.nn.functional.linear(x.double(), weight, bias.double())


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_product_equals_float64(
    num_tokens: int, name: str, dtype: torch.dtype, device: torch.device
) -> None:
    rows = STORED[name]
    weight = pack_rows(rows, dtype, device)
    assert isinstance(weight, GPUWeight) and weight.shape == rows.shape
    x, bias, wanted = problem(rows, num_tokens, dtype)
    got = linear(x.to(device), weight, bias.to(device))
    assert got.dtype == dtype and got.shape == (num_tokens, OUTPUTS)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double().cpu(), wanted, atol=tolerance, rtol=tolerance)


@triton.jit
def _numbers_kernel(
    words_ptr, bits_ptr, out_ptr, FORMAT: tl.constexpr, DOT: tl.constexpr, BITS: tl.constexpr
):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    words = tl.load(words_ptr + at).to(tl.uint32, bitcast=True)
    out = tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :]
    for plane in tl.static_range(16 // BITS):
        bits = kernels.floats(kernels.code_bits(words, plane * BITS, FORMAT, DOT), DOT)
        tl.store(bits_ptr + plane * 512 + out, bits)
        if not DOT.is_bf16():
            numbers = kernels.numbers(words, plane * BITS, FORMAT, DOT)
            tl.store(out_ptr + plane * 512 + out, numbers)


@pytest.mark.parametrize("dot", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", ["int4", "int8", "fp8", "mxfp4"])
def test_each_code_is_decoded_to_its_value(
    format: str, dot: torch.dtype, device: torch.device
) -> None:
    """The interpreter cannot compute in bfloat16, so there torch decodes the bits further."""
    layout = replace(layout_of(BITS[format], 0, 128), words=16)
    codes = torch.arange(16 * layout.chunk_inputs).view(16, -1) % (1 << layout.bits)
    stored = {"int4": codes - 8, "int8": codes - 128}.get(format, codes).to(torch.float32)
    if format == "fp8":
        stored = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    elif format == "mxfp4":
        stored = torch.tensor([*FLOAT4_VALUES, *(-each for each in FLOAT4_VALUES)])[codes]
    pairs = codes.view(16, layout.planes, 16, 2)
    shifts = torch.arange(layout.planes)[:, None, None] * layout.bits + torch.tensor([0, 16])
    words = (pairs << shifts).sum(dim=(1, 3)).to(torch.int32).to(device)
    bits = torch.empty(layout.planes, 16, 32, dtype=dot, device=device)
    out = torch.empty_like(bits)
    kinds = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    _numbers_kernel[(1,)](words, bits, out, FORMAT=format, DOT=kinds[dot], BITS=layout.bits)
    if dot is torch.bfloat16:
        out = bfloat16_numbers(format, bits, codes.view(16, -1, 32).transpose(0, 1))
    found = out.transpose(0, 1).flatten(1).float().cpu()
    is_number = ~stored.isnan()
    assert torch.equal(found[is_number], stored[is_number])


def bfloat16_numbers(format: str, bits: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Repeat the operations of `numbers` in bfloat16."""
    if format == "int4":
        return bits - 136.0
    if format == "int8":
        return (bits - 512.0) + ((codes & 1) + 128).bfloat16().to(bits.device)
    return bits * (2.0**120 if format == "fp8" else 2.0**126)


@pytest.mark.parametrize("format", ["int4", "int8", "fp8"])
def test_inputs_are_split_for_few_outputs(format: str, device: torch.device) -> None:
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    rows = quantised(random(OUTPUTS, 1700), Quantization(format, 0 if format == "fp8" else 64))
    weight = pack_for_gpu(rows, device)
    tile = kernels.tile_for(3, OUTPUTS, dtype, False)
    assert weight.codes.shape[0] > kernels.chunks_of_split(3, tile, weight)
    x, bias, wanted = problem(rows, 3, dtype)
    got = multiply(x.to(device), weight, bias.to(device)).double().cpu()
    torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["int4", "int4, zeros not whole, sorted", "fp8"])
def test_fixed_weight_gives_a_row_the_same_bits_in_any_batch(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Also with inputs that would otherwise be split."""
    rows = STORED[name]
    weight = pack_for_gpu(rows, device).fixed()
    x, bias, _ = problem(rows, 130, dtype)
    x, bias = x.to(device), bias.to(device)
    together = multiply(x, weight, bias)
    for first, last in [(0, 1), (64, 65), (129, 130), (5, 68), (66, 130)]:
        got = multiply(x[first:last], weight, bias)
        assert torch.equal(got, together[first:last]), (first, last)
    assert kernels.tile_for(1, 4096, dtype, True) == kernels.tile_for(999, 4096, dtype, True)


@pytest.mark.parametrize("tile", [kernels.MANY, kernels.FEW_OF_MANY_OUTPUTS], ids=str)
def test_product_takes_many_rows_and_outputs(
    tile: kernels.Tile, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more row tiles than a group has, and the last group is not full."""
    monkeypatch.setattr(kernels, "tile_for", lambda *_: tile)
    dtype = torch.float32 if INTERPRETED else torch.float16
    rows = quantised(random(131, 64), Quantization("int8", 32))
    num_tokens = 9 * tile.tokens + 5
    x = random(num_tokens, 64, seed=1).to(dtype).to(device)
    got = multiply(x, pack_for_gpu(rows, device)).float().cpu()
    wanted = x.float().cpu() @ rows.dequantised().T
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-3)


def test_memory_around_the_rows_is_not_read(device: torch.device) -> None:
    """The rows are a slice of a wider tensor, which is NaN elsewhere."""
    wide = random(6, 200).to(device)
    x = wide[1:4, 7:167]
    weight = pack_for_gpu(STORED["int4"], device)
    wanted = multiply(x.clone(), weight)
    saved = wide.clone()
    wide.fill_(torch.nan)
    wide[1:4, 7:167] = saved[1:4, 7:167]
    assert torch.equal(multiply(x, weight), wanted)


# ---- models ----------------------------------------------------------------------------------


@pytest.mark.skipif(not INTERPRETED, reason="its steps run on the CPU")
@pytest.mark.parametrize(
    ("format", "variant"), in_turn(["int4", "int8", "fp8"], ["llama", "qwen3_tied"])
)
def test_quantised_model_has_the_logits_of_rounded_weights(
    variant: str, format: str, tmp_path: Path, device: torch.device, monkeypatch: Any
) -> None:
    """A tied table of 8 bits is shared with the head, and the model is as large as planned."""
    monkeypatch.setattr(pack, "core", lambda: None)
    checkpoint = write_checkpoint(tmp_path, variant)
    formats = weight_formats(ModelConfig(quantization=format))
    options = LoadOptions(formats=formats)
    model = load_model(tmp_path, checkpoint.spec, torch.float32, device, options)
    exact = load_model(tmp_path, checkpoint.spec, torch.float64, device)
    tables = [module for module in exact.modules() if isinstance(module, Embedding)]
    for module in exact.modules():
        if isinstance(module, LMHead) and formats.head is not None:
            is_tied = module.weight is tables[0].weight
            module.weight = rounded(module.weight, formats.head)
            if is_tied:
                tables[0].weight = module.weight
        elif isinstance(module, Linear) and formats.layers is not None:
            module.weight = rounded(module.weight, formats.layers)
    sequences, chunks = random_tokens(9, 3), [[5, 4], [3]]
    wanted = torch.cat(
        run_paged(exact, checkpoint.spec, sequences, chunks, dtype=torch.float64)
    ).float()
    got = torch.cat(run_paged(model, checkpoint.spec, sequences, chunks))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    if variant == "qwen3_tied":
        assert isinstance(model.embedding.weight, GPUWeight)
        assert model.embedding.weight is model.head.weight
    empty = make_model(checkpoint.spec, torch.float32, torch.device("meta"))
    assert planned_bytes(empty, torch.float32, device, formats) == model_bytes(model)
    make_deterministic(model)
    weights = opaque_weights(model)
    assert weights and all(weight.is_fixed for weight in weights)
    got = torch.cat(run_paged(model, checkpoint.spec, sequences, chunks))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def rounded(weight: torch.Tensor, quantization: Quantization) -> torch.nn.Parameter:
    values = quantised(weight, quantization).dequantised(torch.float64)
    return torch.nn.Parameter(values, requires_grad=False)


def opaque_weights(model: torch.nn.Module) -> list[GPUWeight]:
    found = [vars(module).get("weight") for module in model.modules()]
    return [weight for weight in found if isinstance(weight, GPUWeight)]


# ---- packing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("shape", [(70, 96), (3, 4096), (129, 1000)], ids=str)
def test_quantising_in_parts_equals_quantising_at_once(
    shape: tuple[int, int], format: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weight is as large as planned."""
    monkeypatch.setattr("quire.ops.weights.gpu_weights.VALUES_AT_ONCE", 20 * shape[1])
    sizes = {"int8": (0, 32, 128), "int4": (32, 128), "fp8": (0,)}[format]
    values = random(*shape).to(device)
    for size in sizes:
        quantization = Quantization(format, size)
        weight = pack_weight(values, quantization)
        assert isinstance(weight, GPUWeight) and weight.format == format
        exact = quantised(values, quantization)
        whole_one = pack_for_gpu(exact, device)
        assert torch.equal(weight.codes, whole_one.codes)
        assert torch.equal(weight.scales, whole_one.scales)
        num_bytes = Packing("float32", is_gpu=True).weight_bytes(shape, quantization)
        assert weight.nbytes == num_bytes
        stacked = stack_experts([weight, weight])
        assert stacked.shape == (2, *shape) and stacked.nbytes == 2 * weight.nbytes
        assert stacked.nbytes == Packing("bfloat16", is_gpu=True).weight_bytes(
            (2, *shape), quantization
        )


@pytest.mark.parametrize(
    "quantization", [Quantization("int8", 32), Quantization("fp8", 0)], ids=str
)
def test_looked_up_rows_equal_the_quantised_values(
    quantization: Quantization, dtype: torch.dtype, device: torch.device
) -> None:
    values = random(OUTPUTS, 300)
    weight = quantise_for_gpu(values.to(device), quantization)
    assert weight.serves_look_up
    ids = torch.tensor([3, 69, 3, 0], device=device)
    wanted = quantised(values, quantization).dequantised().to(dtype)[ids.cpu()]
    assert torch.equal(weight.rows(ids, dtype).cpu(), wanted)
    assert torch.equal(weight.rows(ids.int(), dtype).cpu(), wanted)
    assert weight.rows(ids[:0], dtype).shape == (0, 300)
    assert not weight.rows(torch.tensor([-1, OUTPUTS], device=device), dtype).any()


@pytest.mark.parametrize("name", slow_but(STORED, *tuple(STORED)[::2]))
def test_looked_up_rows_equal_the_stored_values_in_every_format(
    name: str, device: torch.device
) -> None:
    rows = STORED[name]
    found = pack_for_gpu(rows, device).rows(torch.arange(OUTPUTS, device=device), torch.float32)
    torch.testing.assert_close(found.cpu(), rows.dequantised(), rtol=2e-7, atol=0)


def test_stacked_and_joined_weights_may_differ_in_zeros_and_scales(device: torch.device) -> None:
    """Some have zeros, or scales that need 32 bits."""
    parts = [integers(160, 4, 32), integers(160, 4, 32, "whole")]
    first = IntegerRows(parts[0].integers, 4, parts[0].scales.bfloat16().float(), 32)
    stacked = stack_experts(pack_for_gpu(each, device) for each in (first, parts[1]))
    assert stacked.zeros is not None and stacked.scales.dtype == torch.float32
    joined = join_outputs([pack_for_gpu(each, device) for each in (first, parts[1])])
    x = problem(first, 2, torch.float32)[0]
    got = multiply(x.to(device), joined).double().cpu()
    for rows, part in ((first, got[:, :OUTPUTS]), (parts[1], got[:, OUTPUTS:])):
        exact = x.double() @ rows.dequantised(torch.float64).T
        torch.testing.assert_close(part, exact, atol=1e-5, rtol=1e-5)


def test_weights_without_a_kernel_are_rejected(device: torch.device) -> None:
    with pytest.raises(ConfigError, match="weights of 4 bits with a scale for each 24 inputs"):
        pack_for_gpu(integers(96, 4, 24), device)
    rows = float8(64, 64)
    rows.values.view(torch.uint8)[3, 5] = 0x7F
    with pytest.raises(ConfigError, match="e4m3 contains NaN"):
        pack_for_gpu(rows, device)
    sorted_rows = pack_for_gpu(STORED["int4, zeros not whole, sorted"], device)
    with pytest.raises(ConfigError, match="desc_act"):
        stack_experts([sorted_rows, sorted_rows])
    if not INTERPRETED:
        with pytest.raises(ConfigError, match="no kernel for weights stored as Float8Rows on cuda"):
            pack_rows(float8(64, 64), torch.float64, device)
