"""Checkpoints of other quantisers on a GPU: weights stay packed and keep their values."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.models.load.assembly import all_weights
from quire.models.load.loading import load_model
from quire.models.parts import experts
from quire.ops import gpu
from quire.ops.kernels.launch import INTERPRETED
from quire.ops.weights.gpu_weights import GPUWeight
from quire.spec.model_spec import load_spec
from tests.models.test_quantised_checkpoints import FORMATS
from tests.support.cases import slow_but
from tests.support.models import quantised_writers as writers
from tests.support.models.checkpoints import (
    OSS,
    VARIANTS,
    exact_logits,
    random_tokens,
    write_checkpoint,
)
from tests.support.models.paged_forward import CPU, run_paged

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="its steps run on the CPU")

SEQUENCES = random_tokens(7)
CHOSEN = [
    "gptq", "gptq 8 bits", "gptq ordered", "awq", "packed asymmetric", "packed rows", "integers",
    "float blocks", "float tensor", "float channel", "float groups", "mxfp4",
]  # fmt: skip


@pytest.mark.parametrize("name", slow_but(CHOSEN, *CHOSEN[2::3], "packed rows", "mxfp4"))
def test_logits_equal_those_of_the_dequantised_weights(
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


def mxfp4_experts(plain: Path, to: Path) -> None:
    """Replace a float32 checkpoint's experts by values of MXFP4, and write them to another folder
    in gpt-oss's format."""
    tensors = load_file(plain / "model.safetensors")
    stored, generator = {}, torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.dim() != 3:
            stored[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [*left_out, "model.embed_tokens"],
    }
    to.mkdir()
    (to / "config.json").write_text(json.dumps(config))
    save_file(stored, to / "model.safetensors", metadata={"format": "pt"})


def test_gpt_oss_experts_stay_packed_in_mxfp4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates are moved before ups, and experts have biases."""
    monkeypatch.setitem(VARIANTS, "wide", ("gpt_oss", OSS | {"intermediate_size": 64}))
    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    write_checkpoint(plain, "wide")
    mxfp4_experts(plain, quantised)
    spec = load_spec(plain)
    exact = load_model(plain, spec, torch.float64, CPU)
    wanted = run_paged(exact, spec, SEQUENCES, [[7]], backend="reference", dtype=torch.float64)
    monkeypatch.setattr(gpu, "is_gpu", lambda device: True)
    monkeypatch.setattr(experts, "experts_class", lambda device: experts.StackedExperts)
    spec = load_spec(quantised)
    model = load_model(quantised, spec, torch.float32, CPU)
    stacks = [each for each in model.modules() if isinstance(each, experts.StackedExperts)]
    assert len(stacks) == spec.num_layers
    for stack in stacks:
        assert isinstance(stack.gate_up, GPUWeight) and stack.gate_up.format == "mxfp4"
    got = run_paged(model, spec, SEQUENCES, [[7]], backend="reference")
    torch.testing.assert_close(got[0], wanted[0].float(), atol=1e-4, rtol=1e-4)
