"""Quantised weights on a GPU: all modes give the same tokens, near the unquantised results.

`make gpu-check PART=models` runs these; elsewhere they are not collected. Each step fails
if it makes the host wait (`debug_transfers`).
"""

from typing import Any

import pytest
import torch

from quire import SamplingParams
from quire.ops.weights.formats import Quantization
from quire.ops.weights.gpu_weights import multiply, quantise_for_gpu
from quire.ops.weights.quantise import quantised
from tests.gpu.test_runner import GREEDY, PROMPTS, open_llm, rounds

pytestmark = pytest.mark.gpu

FORMATS = ["int8", "int4", "fp8"]
MODES: dict[str, dict[str, Any]] = {
    "full": {"compilation": "full"},
    "piecewise": {"compilation": "piecewise"},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("format", FORMATS)
def test_compiled_and_deterministic_modes_match_eager_tokens(
    format: str, architecture: str
) -> None:
    settings = {"quantization": format}
    with open_llm(architecture, "triton", enforce_eager=True, **settings) as llm:
        wanted = rounds(llm, GREEDY, 1)
    for mode in MODES.values():
        with open_llm(architecture, "triton", max_num_seqs=5, **settings, **mode) as llm:
            assert rounds(llm, GREEDY) == 3 * wanted


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("format", FORMATS)
def test_logprobs_are_near_the_unquantised_model(format: str, dtype: str) -> None:
    """Compares the log-probabilities of prompt tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    found = []
    for quantization in (None, format):
        with open_llm("llama", "triton", dtype=dtype, quantization=quantization) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        found.append(
            torch.tensor(
                [
                    position[token].logprob
                    for output in outputs
                    for token, position in zip(
                        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
                    )
                ]
            )
        )
    # Mean errors. With random weights, int8 on a CPU is off by 0.07, and int4 by 0.62.
    near = {"int8": 0.1, "fp8": 0.4, "int4": 1.0}[format]
    assert float((found[0] - found[1]).abs().mean()) < near


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 30, 100, 700])
def test_products_match_float64_at_the_size_of_a_real_layer(
    num_tokens: int, format: str, dtype: torch.dtype
) -> None:
    """With fp8 and more than 128 rows, activations are rounded to e4m3, too."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    weight = torch.randn(6144, 4096, device="cuda", generator=generator) / 64
    x = torch.randn(num_tokens, 4096, device="cuda", generator=generator).to(dtype)
    quantization = Quantization(format, {"int8": 128, "int4": 32, "fp8": 0}[format])
    exact = quantised(weight, quantization).dequantised(torch.float64)
    wanted = x.double() @ exact.T
    found = multiply(x, quantise_for_gpu(weight, quantization)).double()
    bound = 0.05 if format == "fp8" and num_tokens > 128 else 4e-3
    assert (found - wanted).norm() / wanted.norm() < bound
