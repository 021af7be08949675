"""Run kernels in Triton's interpreter on a CPU, and compiled on a machine with a GPU."""

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


# The interpreter computes bfloat16 wrongly, and float16 takes as long as float32.
DTYPES = [
    torch.float32,
    pytest.param(torch.float16, marks=[pytest.mark.slow] if IS_INTERPRETED else []),
    *([] if IS_INTERPRETED else [torch.bfloat16]),
]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
