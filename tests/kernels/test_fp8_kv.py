"""fp8 keys and values with a checkpoint's scales. A model's logits are compared with the reference
backend, whose keys and values torch converts to float8_e4m3fn and back."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError
from quire.models.checkpoint.kv_scales import kv_scales
from quire.models.load.loading import load_model
from quire.ops.attention import triton_gpu
from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.reference import ReferenceBackend
from quire.ops.attention.select import make_backend
from quire.ops.kernels.launch import INTERPRETED
from tests.support.cases import in_turn
from tests.support.kernels.latent_cases import as_fp8
from tests.support.models.checkpoints import Checkpoint, random_tokens, write_checkpoint
from tests.support.models.paged_forward import RowPart, make_step, run_step
from tests.support.models.reference_checkpoints import checkpoint as tiny

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the steps of these tests are on the CPU")

CPU = torch.device("cpu")
SCALES = {0: (0.005, 0.003), 1: (0.011, 0.02), 2: (0.1, 0.007)}  # some values saturate


class Fp8Reference(ReferenceBackend):
    """Store keys and values after a conversion to fp8 and back."""

    def __init__(self, layout: KVLayout, scales: dict[int, tuple[float, float]]) -> None:
        super().__init__(layout)
        self._scales = scales

    def write(self, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        k_scale, v_scale = self._scales[layer]
        super().write(layer, as_fp8(k_TKH, k_scale), as_fp8(v_TKH, v_scale))


@pytest.fixture(autouse=True)
def right_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the interpreter's rounding to fp8, which does not carry into the exponent."""
    convert = interpreter._convert_float

    def to_fp8(values: np.ndarray, before: tl.dtype, after: tl.dtype, mode: object) -> np.ndarray:
        if (before, after) == (tl.float32, tl.float8e4nv):
            rounded = torch.from_numpy(values.copy()).to(torch.float8_e4m3fn)
            return rounded.view(torch.uint8).numpy()
        return convert(values, before, after, mode)

    monkeypatch.setattr(interpreter, "_convert_float", to_fp8)


MODELS = ["llama", "qwen3", "qwen2_windows"]


@pytest.fixture(params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    checkpoint = write_checkpoint(tmp_path, request.param)
    file = tmp_path / "model.safetensors"
    scales = {
        f"model.layers.{layer}.self_attn.{name}_scale": torch.tensor(scale)
        for layer, pair in SCALES.items()
        for name, scale in zip("kv", pair, strict=True)
    }
    save_file(load_file(file) | scales, file, metadata={"format": "pt"})
    return checkpoint


def layout_of(checkpoint: Checkpoint, kv_format: str) -> KVLayout:
    groups = checkpoint.spec.cache_groups
    return KVLayout(groups, (5,) * len(groups), 4, torch.float32, CPU, kv_format)


def logits_of(checkpoint: Checkpoint, model: torch.nn.Module, backend: AttentionBackend):
    """Return the logits of a prompt in two chunks, and of single tokens."""
    (tokens,) = random_tokens(14)
    groups, found = len(checkpoint.spec.cache_groups), []
    for start, end in ((0, 7), (7, 12), (12, 13), (13, 14)):
        step = make_step([RowPart(start, end, ((3, 0, 4, 2),) * groups)], block_size=4)
        found.append(run_step(model, backend, tokens[start:end], step))
    return torch.cat(found)


@pytest.mark.parametrize(
    ("checkpoint", "name"), in_turn(MODELS, ["triton", "cpu"]), indirect=["checkpoint"]
)
def test_logits_equal_the_reference_with_fp8_values(checkpoint: Checkpoint, name: str) -> None:
    directory, spec = checkpoint.directory, checkpoint.spec
    scales = kv_scales(directory, spec)
    wanted_scales = {layer: tuple(np.float32(pair).tolist()) for layer, pair in SCALES.items()}
    assert scales == wanted_scales
    model = load_model(directory, spec, torch.float32, CPU)
    fp8 = layout_of(checkpoint, "fp8")
    got = logits_of(checkpoint, model, make_backend(name, fp8, scales))
    reference = Fp8Reference(layout_of(checkpoint, "auto"), scales)
    wanted = logits_of(checkpoint, model, reference)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    unscaled = logits_of(checkpoint, model, make_backend(name, fp8))
    assert (unscaled - wanted).abs().mean() > 20 * (got - wanted).abs().mean() + 0.01


def test_engine_accepts_vllms_name_of_fp8() -> None:
    """The cache has four times as many blocks as with float32."""
    settings = {"attention_backend": "triton", "dtype": "float32", "device": "cpu"}
    settings |= {"kv_cache_memory_bytes": 1 << 18, "disable_log_stats": True}
    blocks = {}
    for kv_format in ("auto", "fp8_e4m3"):
        with LLM(str(tiny("llama")), kv_cache_dtype=kv_format, **settings) as llm:
            prompt = {"prompt_token_ids": [5, 9, 2]}
            params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 2
            blocks[llm.engine.config.cache.kv_cache_dtype] = llm.engine.memory.num_blocks[0]
    assert blocks["fp8"] == 4 * blocks["auto"]


def test_unsupported_fp8_error_suggests_an_alternative(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_of(checkpoint, "fp8")
    for name in ("torch", "reference"):
        with pytest.raises(
            ConfigError, match=r"fp8 is not supported by attention_backend .*use cpu"
        ):
            make_backend(name, layout)
    with pytest.raises(ConfigError, match=r"fp8 needs attention_backend cpu, .* not torch.float64"):
        make_backend("auto", replace(layout, dtype=torch.float64))
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "0")
    with pytest.raises(
        ConfigError,
        match=r"fp8 needs attention_backend triton, which cannot be used here: it is for GPUs,"
        r" not cpu; use kv_cache_dtype int8 or auto",
    ):
        make_backend("triton", layout)
    old = "fp8 needs a GPU of compute capability 8.9, this one has 8.6"
    monkeypatch.setattr(triton_gpu, "why_not", lambda layout: old)
    with pytest.raises(ConfigError, match=r"this one has 8\.6; use kv_cache_dtype int8"):
        make_backend("triton", layout)
