"""Products of one or two rows, fused with a norm before them, and a gate or an addition after.

They are close to float64. A layer that uses them takes six launches.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.models.parts.layers import GATES
from quire.ops import gpu
from quire.ops.elementwise import add, gelu_mul, gelu_tanh_mul, silu_mul
from quire.ops.fused_linear import ACTIVATIONS, fuses, linear_add, normed_gate, normed_linear
from quire.ops.kernels import few_rows as kernels
from quire.ops.kernels.attention import attention_tiles
from quire.ops.kernels.attention.attention_tiles import Machine
from quire.ops.kernels.launch import INTERPRETED, MERGE_LAST, ROTATE_WITHIN
from quire.ops.linear import linear
from quire.ops.norms import rms_norm
from quire.ops.precision import FixedOrderWeight
from quire.ops.registry import record_ops
from quire.runner.model_runner import ModelRunner
from tests.kernels.test_few_rows import EPSILON, logprobs_of, numbers, weight_of
from tests.kernels.test_model import SETTINGS, used  # noqa: F401 (a fixture)
from tests.kernels.test_step_bytes import (
    CONFIG,
    CONTEXT,
    STEP_LAUNCHES,
    WIDTH,
    as_on_gpu,  # noqa: F401 (a fixture)
    find_graph,
    step_of,
)

# Outputs, inputs: a partial step; one step; several, the last partial; many.
SIZES = [(13, 256), (5, 1024), (5, 2048), (7, 2896), (3, 8192)]
EPS = 1e-5


def close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, roundings: int = 1) -> None:
    """Compare within half a unit in the last place per rounding, plus float32's error."""
    assert got.dtype == dtype and got.shape == wanted.shape
    bound = roundings * EPSILON[dtype]
    torch.testing.assert_close(
        got.double(), wanted, atol=2e-6 + (roundings - 1) * bound, rtol=bound
    )


def normed(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_normed_product_equals_float64(
    size: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """The result is rounded once."""
    outputs, inputs = size
    weight = weight_of(outputs, inputs, dtype, device)
    bias = numbers(outputs, seed=3, dtype=dtype, device=device)
    x = 3 * numbers(2, inputs, seed=2, dtype=dtype, device=device)
    for norm_dtype, b in ((dtype, None), (torch.float32, bias)):
        norm = 1 + numbers(inputs, seed=4, dtype=norm_dtype, device=device) / 4
        wanted = normed(x, norm) @ weight.double().T + (0 if b is None else b.double())
        both = kernels.normed(x, norm, EPS, weight, b)
        close(both, wanted, dtype)
        alone = torch.cat([kernels.normed(row[None], norm, EPS, weight, b) for row in x])
        assert torch.equal(both, alone), "a row depends on another"


@pytest.mark.parametrize("gate", [silu_mul, gelu_mul, gelu_tanh_mul])
@pytest.mark.parametrize("size", [(5, 512), (3, 2896)], ids=str)
def test_gated_product_equals_float64(
    size: tuple[int, int], gate: Any, dtype: torch.dtype, device: torch.device
) -> None:
    outputs, inputs = size
    weight = weight_of(2 * outputs, inputs, dtype, device)
    bias = numbers(2 * outputs, seed=3, dtype=dtype, device=device)
    norm = 1 + numbers(inputs, seed=4, dtype=dtype, device=device) / 4
    x = numbers(2, inputs, seed=2, dtype=dtype, device=device)
    for b in (None, bias):
        product = normed(x, norm) @ weight.double().T + (0 if b is None else b.double())
        got = kernels.normed(x, norm, EPS, weight, b, ACTIVATIONS[gate])
        close(got, gate(product), dtype, roundings=6)


@pytest.mark.parametrize("size", [(13, 256), (5, 3072), (3, 14336)], ids=str)
def test_fused_addition_has_the_bits_of_two_operations(
    size: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """The product is rounded before it is added."""
    outputs, inputs = size
    weight = weight_of(outputs, inputs, dtype, device)
    bias = numbers(outputs, seed=3, dtype=dtype, device=device)
    x = numbers(2, inputs, seed=2, dtype=dtype, device=device)
    residual = numbers(2, outputs, seed=5, dtype=dtype, device=device)
    for rows, b in ((1, None), (2, bias)):
        got = kernels.added(x[:rows], weight, b, residual[:rows])
        assert torch.equal(got, add(kernels.few_rows(x[:rows], weight, b), residual[:rows]))


@pytest.mark.skipif(not INTERPRETED, reason="overlapping launches are simulated")
def test_loading_weights_ahead_does_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program waits once."""
    cpu, waits = torch.device("cpu"), list[int]()
    x, weight = numbers(2, 2896, seed=2, dtype=torch.float16, device=cpu), None
    weight = weight_of(6, 2896, torch.float16, cpu)
    norm, residual = torch.ones(2896), numbers(2, 6, seed=5, dtype=torch.float16, device=cpu)

    def each() -> list[torch.Tensor]:
        return [
            kernels.normed(x, norm, EPS, weight),
            kernels.normed(x, norm, EPS, weight, None, "silu"),
            kernels.added(x, weight, None, residual),
        ]

    wanted = each()
    monkeypatch.setattr(kernels, "overlaps", lambda device: True)
    monkeypatch.setattr(kernels, "pdl_option", lambda is_on: {})
    monkeypatch.setattr(kernels, "gdc_wait", lambda: waits.append(0))
    monkeypatch.setattr(kernels, "gdc_launch_dependents", lambda: None)
    assert all(map(torch.equal, each(), wanted))
    assert len(waits) == 3 + 3 + 2, "programs of two, one and four outputs"


@pytest.mark.skipif(INTERPRETED, reason="only a GPU lets launches overlap")
def test_overlapping_launches_give_the_bits_of_sequential_ones(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run in a chain, which is recorded and replayed 1,000 times."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("the device has no programmatic launch")
    size, inner, dtype = 1024, 3072, torch.bfloat16
    norm = torch.ones(size, dtype=dtype, device=device)
    up = [weight_of(2 * inner, size, dtype, device, seed=i) for i in range(8)]
    down = [weight_of(size, inner, dtype, device, seed=8 + i) for i in range(8)]
    x = numbers(2, size, seed=2, dtype=dtype, device=device)

    def chain() -> torch.Tensor:
        stream = x
        for first, second in zip(up, down, strict=True):
            inner_TF = kernels.normed(stream, norm, EPS, first, None, "silu")
            stream = kernels.added(inner_TF, second, None, stream)
        return stream

    wanted = chain()
    monkeypatch.setattr(kernels, "overlaps", lambda device: True)
    assert torch.equal(chain(), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(1000):
        found.zero_()
        graph.replay()
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("num_rows", "outputs", "inputs", "has_norm", "is_fused"),
    [
        (1, 9, 256, True, True),
        (2, 9, 256, False, True),
        (3, 9, 256, True, False),
        (0, 9, 256, True, False),
        (1, 9, 240, True, False),  # less than a step
        (1, 9, 264, True, False),  # rows that are not aligned to loads
        (1, 2, 8192, True, True),
        (1, 2, 8192 + 16, True, False),  # more would spill registers
        (1, 2, 16384, False, True),
        (1, 2, 16384 + 16, False, False),
    ],
)
def test_products_are_fused_for_suitable_sizes(
    num_rows: int,
    outputs: int,
    inputs: int,
    has_norm: bool,
    is_fused: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(num_rows, inputs, dtype=torch.float16, device=device)
    weight = torch.ones(outputs, inputs, dtype=torch.float16, device=device)
    if INTERPRETED:
        assert not fuses(x, weight, has_norm=has_norm), "a CPU fuses nothing"
        monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: True)
    assert fuses(x, weight, has_norm=has_norm) == is_fused
    assert not fuses(x, FixedOrderWeight(weight), has_norm=has_norm)
    assert not fuses(x.float(), weight.float(), has_norm=has_norm)
    monkeypatch.setattr(kernels, "MAX_FUSED_BYTES", weight.nbytes - 1)
    assert not fuses(x, weight, has_norm=has_norm)


def test_cpu_runs_separate_operations_with_the_same_bits() -> None:
    x, norm, residual = torch.randn(3, 256), torch.rand(256), torch.randn(3, 10)
    weight, bias = torch.randn(10, 256), torch.randn(10)
    product = linear(rms_norm(x, norm, EPS), weight, bias)
    assert torch.equal(normed_linear(x, norm, EPS, weight, bias), product)
    assert torch.equal(normed_gate(x, norm, EPS, weight, bias, silu_mul), silu_mul(product))
    wanted = linear(x, weight, bias) + residual
    assert torch.equal(linear_add(x, weight, bias, residual), wanted)


def test_all_gates_of_models_are_fused() -> None:
    assert set(GATES.values()) == set(ACTIVATIONS)


# ---- in a model ------------------------------------------------------------------------------

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 99}


@pytest.mark.parametrize(
    ("rows", "launches"),
    [pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 6), (2, 6), (3, 9))],
)
def test_layer_takes_six_launches_for_one_or_two_rows(
    rows: int,
    launches: int,
    as_on_gpu: None,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Norms, gate and additions need no extra launch, and move only the stream's bytes."""
    if not INTERPRETED:
        pytest.skip("it looks into Triton's interpreter")
    short = step_of(1, tmp_path / "short", monkeypatch, rows, WIDE)
    long = step_of(2, tmp_path / "long", monkeypatch, rows, WIDE)
    assert len(long.launches) - len(short.launches) == launches, long.launches
    if launches == 6:
        size, inner, heads, kv_heads = 256, 256, 4 * 64, 2 * 64
        qkv = heads + 2 * kv_heads
        weights = size * (qkv + heads + 3 * inner + 2)
        # The stream is read by both norms and both additions, and written by the additions.
        token = 6 * size + 2 * qkv + 2 * heads + heads + 2 * inner
        wanted = WIDTH * (weights + rows * (token + CONTEXT * 2 * kv_heads))
        found = long.total - short.total
        assert 0.98 * wanted < found < 1.03 * wanted, f"{found:.0f} bytes, {wanted} expected"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rotates_within", "merges_last", "launches"),
    [
        (False, False, 7),
        (False, True, 6),
        (True, False, 6),
        (True, True, 5),
    ],
)
def test_switches_remove_launches_of_a_layer_with_split_keys(
    rotates_within: bool,
    merges_last: bool,
    launches: int,
    as_on_gpu: None,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The merge takes one launch, or none if the last program of a row and KV head merges. The
    rotation takes one, or none if attention rotates the heads."""
    if not INTERPRETED:
        pytest.skip("it looks into Triton's interpreter")
    monkeypatch.setenv(MERGE_LAST, str(int(merges_last)))
    monkeypatch.setenv(ROTATE_WITHIN, str(int(rotates_within)))
    monkeypatch.setattr(attention_tiles, "machine_of", lambda device: Machine(12))
    monkeypatch.setattr(ModelRunner, "find_recorded", find_graph)
    layers = [
        step_of(n, tmp_path / str(n), monkeypatch, 1, WIDE, context=100).launches for n in (1, 2)
    ]
    names = [[name for name, _ in each] for each in layers]
    assert [each.count("_merge_kernel") for each in names] == ([0, 0] if merges_last else [1, 2])
    assert len(layers[1]) - len(layers[0]) == launches, layers
    assert [len(each) - launches * n for n, each in enumerate(names, 1)] == [STEP_LAUNCHES] * 2


def test_fusion_does_not_change_a_models_tokens(
    used: set[str],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rows decode, then one. Separate operations give the same tokens and close logprobs."""
    config = CONFIG | WIDE | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    settings = SETTINGS | {"dtype": "float16", "load_format": "dummy", "max_model_len": 32}
    settings |= {"device": "cpu" if INTERPRETED else "cuda"}
    prompts = [{"prompt_token_ids": [5, 6, 7, 8][: 4 - i]} for i in range(2)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, logprobs=1) for n in (2, 3)
    ]
    found = []
    for max_rows in (2, 0):
        monkeypatch.setattr(kernels, "MAX_FUSED_ROWS", max_rows)
        with LLM(str(tmp_path), **settings) as llm, record_ops() as record:
            outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
        fused = {"normed_linear", "normed_gate", "linear_add"}
        assert fused & set(record.names) == (fused if max_rows else set())
        found.append(outputs)
    for got, wanted in zip(*found, strict=True):
        assert got.token_ids == wanted.token_ids
        torch.testing.assert_close(logprobs_of(got), logprobs_of(wanted), atol=5e-3, rtol=0)
