"""Triton's interpreter on a CPU; on a machine with a GPU these tests run the compiled kernels."""

import os

import pytest

pytest.importorskip("triton")

import torch  # noqa: E402

from benchmarks.gpu.interpreter import repair_interpreter  # noqa: E402

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if IS_INTERPRETED:
    repair_interpreter()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if IS_INTERPRETED else "cuda")


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """bfloat16 on a GPU only: the interpreter computes it wrongly."""
    if request.param is torch.bfloat16 and IS_INTERPRETED:
        pytest.skip("the interpreter has no bfloat16 arithmetic")
    return request.param
