"""Compare experts with quantised weights with sums over dequantised ones in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.base.settings.config import ModelConfig
from quire.models.checkpoint.formats import weight_formats
from quire.models.load.loading import LoadOptions, load_model
from quire.models.load.packing import model_bytes, planned_bytes
from quire.models.parts import experts as models
from quire.models.parts.determinism import make_deterministic
from quire.models.parts.layers import Linear
from quire.models.registry import make_model
from quire.ops import gpu
from quire.ops.elementwise import silu_mul
from quire.ops.kernels import quantised_moe as kernels
from quire.ops.kernels.launch import INTERPRETED
from quire.ops.moe import moe_experts
from quire.ops.weights import device_weights, pack
from quire.ops.weights.formats import Quantization
from quire.ops.weights.gpu_weights import GPUWeight, pack_for_gpu, stack_experts
from quire.ops.weights.quantise import quantised
from quire.ops.weights.stored_rows import Float4Rows, StoredRows
from quire.spec.model_spec import load_spec
from tests.kernels.test_deterministic import exact_dots  # noqa: F401 (a fixture)
from tests.kernels.test_moe import some_ids
from tests.support.cases import in_turn
from tests.support.models.checkpoints import exact_logits, random_tokens, write_checkpoint
from tests.support.models.paged_forward import run_paged
from tests.support.models.quantised_writers import write_gpt_oss

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
E, C, D, F = 6, 3, 96, 160


@pytest.fixture(autouse=True)
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(gpu, "is_gpu", lambda device: True)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(outputs: int, inputs: int, format: str, seed: int) -> StoredRows:
    values = random(outputs, inputs, seed=seed) * inputs**-0.5
    if format != "mxfp4":
        return quantised(values, Quantization(format, 0 if format == "fp8" else 32))
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (outputs, inputs // 2), generator=generator).to(torch.uint8)
    exponents = torch.randint(118, 124, (outputs, inputs // 32), generator=generator)
    return Float4Rows(codes, exponents.to(torch.uint8))


def experts(format: str, device: torch.device) -> tuple[list[GPUWeight], list[torch.Tensor]]:
    """Return packed weights, of gate and up joined and of down, and their values in float64."""
    rows = [
        [stored(outputs, inputs, format, 10 * i + expert) for expert in range(E)]
        for i, (outputs, inputs) in enumerate(((2 * F, D), (D, F)))
    ]
    weights = [stack_experts(pack_for_gpu(each, device) for each in part) for part in rows]
    exact = [torch.stack([each.dequantised(torch.float64) for each in part]) for part in rows]
    return weights, exact


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """Apply the gate of gpt-oss: gate and up interleaved and clamped."""
    gate, up = gate_up[..., ::2].clamp(max=1.0), gate_up[..., 1::2].clamp(-1.0, 1.0)
    return (up + 1) * gate * torch.sigmoid(1.7 * gate)


def silu_gated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def by_hand(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, exact: list[torch.Tensor],
    biases: tuple[torch.Tensor, torch.Tensor] | None, gate: Any,
) -> torch.Tensor:  # fmt: skip
    out = torch.zeros(len(x), D, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            inner = exact[0][expert] @ x[token].double()
            inner = inner if biases is None else inner + biases[0][expert].double()
            found = exact[1][expert] @ gate(inner)
            found = found if biases is None else found + biases[1][expert].double()
            out[token] += weight * found
    return out


FORMATS = ["int4", "int8", "fp8", "mxfp4"]


@pytest.mark.parametrize(
    ("num_tokens", "format", "dtype"),
    [
        *in_turn([0, 1, 23], FORMATS, [torch.float32, torch.float16]),
        *(
            pytest.param(num, format, torch.bfloat16, marks=pytest.mark.slow)
            for num in (0, 1, 23)
            for format in FORMATS
        ),
    ],
    indirect=["dtype"],
    ids=str,
)
def test_experts_equal_sums_in_float64(
    num_tokens: int, format: str, dtype: torch.dtype, device: torch.device
) -> None:
    weights, exact = experts(format, device)
    x, ids = random(num_tokens, D, seed=1).to(dtype), some_ids(num_tokens, E, C)
    shares = random(num_tokens, C, seed=2).abs()
    tolerance = TOLERANCE[dtype]
    wanted = by_hand(x, ids, shares, exact, None, silu_gated)
    got = moe_experts(x.to(device), ids.to(device), shares.to(device), *weights)
    assert got.dtype == dtype and got.shape == x.shape
    torch.testing.assert_close(got.double().cpu(), wanted, atol=tolerance, rtol=tolerance)
    biases = random(E, 2 * F, seed=3).to(dtype), random(E, D, seed=4).to(dtype)
    wanted = by_hand(x, ids, shares, exact, biases, gated)
    on_device = [each.to(device) for each in (x, ids, shares, *biases)]
    found = kernels.moe_experts(
        *on_device[:3], *weights, lambda each: gated(each).contiguous(), tuple(on_device[3:])
    )
    torch.testing.assert_close(found.double().cpu(), wanted, atol=5 * tolerance, rtol=5 * tolerance)


def test_fixed_weights_give_a_token_the_same_bits_in_any_batch(
    dtype: torch.dtype, device: torch.device
) -> None:
    weights = [weight.fixed() for weight in experts("int4", device)[0]]
    x, ids = random(40, D, seed=1).to(dtype).to(device), some_ids(40, E, C).to(device)
    shares = random(40, C, seed=2).abs().to(device)
    together = moe_experts(x, ids, shares, *weights)
    for first, last in [(0, 1), (39, 40), (3, 30)]:
        part = slice(first, last)
        got = moe_experts(x[part], ids[part], shares[part], *weights)
        assert torch.equal(got, together[part])
    found = {kernels.tile_for(pairs, E, dtype, True) for pairs in (1, 100, 10_000)}
    assert len(found) == 1


@pytest.mark.skipif(not INTERPRETED, reason="its steps run on the CPU")
@pytest.mark.parametrize("num_tokens", [1, 23])
def test_experts_on_other_ranks_add_nothing(num_tokens: int, device: torch.device) -> None:
    weights, exact = experts("int8", device)
    x, ids = random(num_tokens, D, seed=1), some_ids(num_tokens, E, C)
    shares = random(num_tokens, C, seed=2).abs()
    # The last experts are on other ranks: their ids have no weight, and nothing else may be read.
    ids = torch.where(ids < 2, ids, E)
    here = torch.where(ids < E, shares, 0.0)
    wanted = by_hand(x, ids.clamp(max=E - 1), here, exact, None, silu_gated)
    found = kernels.moe_experts(
        x.to(device), ids.to(device), shares.to(device), *weights, silu_mul, has_others=True
    )
    torch.testing.assert_close(found.double().cpu(), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss_plain"])
def test_quantised_model_has_the_logits_of_rounded_experts(
    variant: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is as large as planned, and its routers are not rounded."""
    monkeypatch.setattr(pack, "core", lambda: None)
    monkeypatch.setattr(device_weights, "can_pack", lambda *_: False)
    monkeypatch.setattr(models, "experts_class", lambda device: models.StackedExperts)
    checkpoint = write_checkpoint(tmp_path, variant)
    formats = weight_formats(ModelConfig(quantization="int8", quantized_head="none"))
    assert formats.layers is not None
    options = LoadOptions(formats=formats)
    model = load_model(tmp_path, checkpoint.spec, torch.float32, device, options)
    exact = load_model(tmp_path, checkpoint.spec, torch.float64, device)
    for layer in exact.modules():
        if isinstance(layer, models.StackedExperts):
            for weight in (*layer.gate_up, *layer.down):
                weight.copy_(quantised(weight, formats.layers).dequantised())
        elif isinstance(layer, Linear) and not layer.keeps_dtype:
            layer.weight.copy_(quantised(layer.weight, formats.layers).dequantised())
    sequences, chunks = random_tokens(5), [[3, 2]]
    wanted = torch.cat(
        run_paged(exact, checkpoint.spec, sequences, chunks, dtype=torch.float64, device=device)
    ).float()
    got = torch.cat(run_paged(model, checkpoint.spec, sequences, chunks, device=device))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    empty = make_model(checkpoint.spec, torch.float32, torch.device("meta"))
    assert planned_bytes(empty, torch.float32, device, formats) == model_bytes(model)
    make_deterministic(model)
    assert all(
        getattr(layer, name).is_fixed
        for layer in model.modules()
        if isinstance(layer, models.StackedExperts)
        for name in ("gate_up", "down")
    )
    got = torch.cat(run_paged(model, checkpoint.spec, sequences, chunks, device=device))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_gpt_oss_in_mxfp4_has_the_exact_logits(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are loaded one by one and stacked in their stored form."""
    pytest.importorskip("transformers", "5.23", reason="older ones read the model otherwise")
    monkeypatch.setattr(device_weights, "can_pack_natively", lambda *_: False)
    monkeypatch.setattr(device_weights, "can_pack", lambda *_: False)
    monkeypatch.setattr(models, "experts_class", lambda device: models.StackedExperts)
    folder, plain = write_gpt_oss(tmp_path)
    spec = load_spec(folder)
    model = load_model(folder, spec, torch.float32, device)
    for layer in model.layers:
        assert isinstance(layer.mlp.experts, models.StackedExperts)
        weights = layer.mlp.experts.gate_up, layer.mlp.experts.down
        assert [weight.format for weight in weights] == ["mxfp4", "mxfp4"]
    sequences, chunks = random_tokens(7), [[3, 4]]
    got = torch.cat(run_paged(model, spec, sequences, chunks, device=device)).double().cpu()
    wanted = torch.cat(exact_logits(plain, sequences))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    make_deterministic(model)
    assert all(layer.mlp.experts.down.is_fixed for layer in model.layers)


def test_scales_of_unused_experts_are_not_read(device: torch.device) -> None:
    weights, _ = experts("int8", device)
    x, shares = random(4, D, seed=1).to(device), torch.ones(4, C, device=device) / C
    ids = torch.tensor([[4, 1, 2]] * 4, dtype=torch.int32, device=device)
    wanted = moe_experts(x, ids, shares, *weights)
    for unused in (0, 3, 5):
        for weight in weights:
            weight.scales[unused] = torch.nan
    assert torch.equal(moe_experts(x, ids, shares, *weights), wanted)
