"""Products of one to four rows: accuracy, independence of rows, and where `linear` uses them."""

import json
from pathlib import Path

import pytest
import torch

from quire import LLM, CompletionOutput, SamplingParams
from quire.ops import gpu
from quire.ops.kernels import few_rows as kernels
from quire.ops.kernels.launch import INTERPRETED
from quire.ops.linear import linear
from quire.ops.precision import FixedOrderWeight
from tests.kernels.test_model import SETTINGS, used  # noqa: F401 (a fixture)
from tests.kernels.test_step_bytes import CONFIG, Launches, Traffic

EPSILON = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
# Outputs, inputs: one step; a partial step; several, the last partial; wide steps.
SIZES = [(13, 256), (7, 768), (9, 1024), (5, 3072), (5, 5120), (3, 8176), (3, 14336), (2, 16400)]


def numbers(*shape: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def weight_of(
    outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, seed: int = 1
) -> torch.Tensor:
    return numbers(outputs, inputs, seed=seed, dtype=dtype, device=device) * inputs**-0.5


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_few_rows_equals_a_float64_product(
    size: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Results are rounded once: off by half a unit in the last place, plus float32's error."""
    outputs, inputs = size
    weight = weight_of(outputs, inputs, dtype, device)
    bias = numbers(outputs, seed=3, dtype=dtype, device=device)
    rows = numbers(4, inputs, seed=2, dtype=dtype, device=device)
    for num_rows, b in ((1, None), (1, bias), (2, bias), (3, None), (4, bias)):
        x = rows[:num_rows]
        wanted = torch.nn.functional.linear(
            x.double(), weight.double(), b if b is None else b.double()
        )
        got = kernels.few_rows(x, weight, b)
        assert got.dtype == dtype and got.shape == (num_rows, outputs)
        torch.testing.assert_close(got.double(), wanted, atol=2e-6, rtol=EPSILON[dtype])


def test_row_has_the_same_bits_alongside_any_other(device: torch.device) -> None:
    weight = weight_of(9, 1024, torch.float16, device)
    x = numbers(4, 1024, seed=2, dtype=torch.float16, device=device)
    alone = torch.cat([kernels.few_rows(row[None], weight) for row in x])
    assert torch.equal(kernels.few_rows(x, weight), alone)
    pair = x[:2].clone()
    pair[0] = torch.nan
    got = kernels.few_rows(pair, weight)
    assert bool(got[0].isnan().all()) and torch.equal(got[1], alone[1])


@pytest.mark.parametrize("inputs", [272, 2048, 3056])
def test_memory_around_the_operands_is_not_read(inputs: int, device: torch.device) -> None:
    """The rows are a slice of a wider tensor; memory around them and the weight is NaN."""
    wide = numbers(4, inputs + 48, seed=1, dtype=torch.float16, device=device)
    around = weight_of(7, inputs, torch.float16, device, seed=2)
    x, weight = wide[1:3, 16 : 16 + inputs], around[1:6]
    wanted = kernels.few_rows(x.clone(), weight.clone())
    saved_x, saved_weight = x.clone(), weight.clone()
    wide.fill_(torch.nan)
    around.fill_(torch.nan)
    x.copy_(saved_x)
    weight.copy_(saved_weight)
    assert torch.equal(kernels.few_rows(x, weight), wanted)


@pytest.mark.skipif(not INTERPRETED, reason="it looks into Triton's interpreter")
def test_launch_reads_only_the_weight_and_the_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    weight = weight_of(5, 3056, torch.float16, cpu)
    x = numbers(2, 3056, seed=2, dtype=torch.float16, device=cpu)
    traffic = Traffic()
    with Launches(traffic).counted(monkeypatch):
        out = kernels.few_rows(x, weight)
    assert traffic.launches == [("_few_rows_kernel", weight.nbytes + x.nbytes + out.nbytes)]


def test_tile_of_a_step_depends_on_rows_and_inputs() -> None:
    inputs = (256, 768, 1024, 2048, 3072, 5120, 11008, 14336)
    one, two = ([kernels.step_tile(rows, each) for each in inputs] for rows in (1, 2))
    assert [each for _, each in one] == [256, 1024, 1024, 2048, 1024, 1024, 2048, 2048]
    assert [each for _, each in two] == [256, 1024, 1024, 1024, 1024, 1024, 2048, 2048]
    assert {a * b for a, b in one} == {2048} and {a * b for a, b in two[:6]} == {4096}


@pytest.mark.skipif(INTERPRETED, reason="only a GPU records graphs")
def test_replayed_launch_reads_current_inputs(device: torch.device) -> None:
    weight = weight_of(1024, 2048, torch.bfloat16, device)
    x = numbers(2, 2048, seed=2, dtype=torch.bfloat16, device=device)
    kernels.few_rows(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.few_rows(x, weight)
    x.copy_(numbers(2, 2048, seed=3, dtype=torch.bfloat16, device=device))
    graph.replay()
    assert torch.equal(out, kernels.few_rows(x, weight))


# ---- where it is used ------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of rows of each of the kernel's products; operations take a GPU's path."""
    found: list[int] = []
    product = kernels.few_rows
    monkeypatch.setattr(kernels, "few_rows", lambda x, *a: found.append(len(x)) or product(x, *a))
    if INTERPRETED:
        monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: True)
    return found


@pytest.mark.parametrize(
    ("num_rows", "outputs", "inputs", "is_used"),
    [
        (1, 9, 256, True),
        (2, 2051, 256, True),
        (3, 2051, 256, False),  # many outputs
        (4, 2048, 256, True),
        (5, 9, 256, False),
        (0, 9, 256, False),
        (1, 9, 240, False),  # less than a step
        (1, 9, 264, False),  # rows that are not aligned to loads
        (1, 1, 32768, True),
        (1, 1, 32768 + 16, False),  # more steps than are unrolled
        (1, 0, 256, False),
    ],
)
def test_linear_uses_few_rows_for_suitable_sizes(
    num_rows: int, outputs: int, inputs: int, is_used: bool, calls: list[int], device: torch.device
) -> None:
    weight = weight_of(outputs, inputs, torch.float16, device)
    bias = numbers(outputs, seed=3, dtype=torch.float16, device=device)
    x = numbers(num_rows, inputs, seed=2, dtype=torch.float16, device=device)
    got = linear(x, weight, bias)
    assert calls == [num_rows] * is_used
    wanted = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(got.double(), wanted, atol=4e-3, rtol=4e-3)


def test_linear_leaves_other_operands_to_torch(calls: list[int], device: torch.device) -> None:
    """Other dtypes, other dimensions, weights that are not plain rows."""
    for dtype in (torch.float32, torch.float64):
        x, weight = torch.ones(1, 256, dtype=dtype), torch.ones(9, 256, dtype=dtype)
        linear(x.to(device), weight.to(device))
    x = torch.ones(1, 256, dtype=torch.float16, device=device)
    weight = torch.ones(9, 256, dtype=torch.float16, device=device)
    linear(x[None], weight)
    linear(x[0], weight)
    linear(x, torch.ones(256, 9, dtype=torch.float16, device=device).T)
    assert not calls
    linear(x, FixedOrderWeight(weight))
    assert not calls
    linear(x, weight)
    assert calls == [1]


def test_weights_above_the_limit_are_not_served(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(1, 256, dtype=torch.float16)
    monkeypatch.setattr(kernels, "MAX_WEIGHT_BYTES", (9 * 256 * 2, 5 * 256 * 2))
    for rows, most in ((1, 9), (2, 5)):
        rows_of_x = x.expand(rows, -1)
        assert kernels.serves(rows_of_x, torch.ones(most, 256, dtype=torch.float16))
        assert not kernels.serves(rows_of_x, torch.ones(most + 1, 256, dtype=torch.float16))


def test_linear_on_a_cpu_does_not_call_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "few_rows", None)
    x = torch.ones(1, 256, dtype=torch.float16)
    assert linear(x, torch.ones(9, 256, dtype=torch.float16)).tolist() == [[256.0] * 9]


def test_few_rows_does_not_change_a_models_tokens(
    used: set[str],  # noqa: F811
    calls: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rows decode, then one. torch's products give the same tokens and close logprobs."""
    sizes = {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 1, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | sizes), encoding="utf-8")
    settings = SETTINGS | {"dtype": "float16", "load_format": "dummy", "max_model_len": 32}
    settings |= {"device": "cpu" if INTERPRETED else "cuda"}
    prompts = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10][: 6 - i]} for i in range(2)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, logprobs=1) for n in (2, 3)
    ]
    found = []
    for limit in (kernels.MAX_WEIGHT_BYTES[0], 0):
        monkeypatch.setattr(kernels, "MAX_WEIGHT_BYTES", 4 * (limit,))
        with LLM(str(tmp_path), **settings) as llm:
            outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
        assert set(calls) >= {1, 2} if limit else not calls
        calls.clear()
        found.append(outputs)
    for got, wanted in zip(*found, strict=True):
        assert got.token_ids == wanted.token_ids
        torch.testing.assert_close(logprobs_of(got), logprobs_of(wanted), atol=5e-3, rtol=0)


def logprobs_of(output: CompletionOutput) -> torch.Tensor:
    each = zip(output.logprobs, output.token_ids, strict=True)
    return torch.tensor([position[token].logprob for position, token in each])
