"""Checkpoints of other quantisers on a GPU: weights stay small, their numbers what they are."""

from pathlib import Path

import pytest
import torch

from quire.base.model_spec import load_spec
from quire.models.assembly import all_weights
from quire.models.loading import load_model
from quire.ops import gpu
from quire.ops.gpu_weights import GPUWeight
from quire.ops.kernels.launch import INTERPRETED
from tests.models import quantised_writers as writers
from tests.models.checkpoints import exact_logits, random_tokens
from tests.models.paged import CPU, run_paged
from tests.models.test_quantised_checkpoints import FORMATS

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="its steps are a CPU's")

SEQUENCES = random_tokens(7)
CHOSEN = [
    "gptq", "gptq 8 bits", "gptq ordered", "awq", "packed asymmetric", "packed rows", "integers",
    "float blocks", "float tensor", "float channel", "float groups", "mxfp4",
]  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_logits_are_those_of_the_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "is_gpu", lambda device: True)
    quantised, plain = writers.write(tmp_path, FORMATS[name])
    model = load_model(quantised, load_spec(quantised), torch.float32, CPU)
    weights = [getattr(owner, key) for _, owner, key in all_weights(model)]
    assert sum(isinstance(weight, GPUWeight) for weight in weights) >= 8
    got = run_paged(model, load_spec(quantised), SEQUENCES, [[7]], backend="reference")
    torch.testing.assert_close(
        got[0], exact_logits(plain, SEQUENCES)[0].float(), atol=1e-4, rtol=1e-4
    )
