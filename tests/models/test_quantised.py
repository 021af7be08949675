"""Quantised models: near the unquantised ones, the same bits in any batch, and their bytes."""

from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError
from quire.base.settings.config import ModelConfig, config_from_flat
from quire.models.checkpoint.formats import AS_THEY_ARE, WeightFormats, weight_formats
from quire.models.checkpoint.source import resolve_model
from quire.models.load.loading import LoadOptions, load_model, model_bytes
from quire.models.load.packing import planned_bytes
from quire.models.parts.layers import Embedding
from quire.models.registry import make_model
from quire.ops.host.native import core
from quire.ops.weights.formats import Quantization
from quire.ops.weights.packed import PackedWeight
from quire.runner.setup.preview import preview_runner
from tests.support.cases import slow_but
from tests.support.models.checkpoints import random_tokens, write_checkpoint
from tests.support.models.paged_forward import CPU, run_paged
from tests.support.models.quick import variants_with

if core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)

META = torch.device("meta")
SEQUENCES = random_tokens(23, 5, 61)
WHOLE = [[23], [5], [61]]

FORMATS = {
    name: weight_formats(ModelConfig(quantization=q, quantization_group_size=g, quantized_head=h))
    for name, q, g, h in [
        ("int8", "int8", None, "auto"),
        ("int8 rows", "int8", 0, "auto"),
        ("int8 but head", "int8", 32, "none"),
        ("int4", "int4", None, "auto"),
        ("int4 with head", "int4", 64, "int4"),
        ("fp8", "fp8", None, "auto"),
    ]
}
# Relative to the logits' norm. Random weights have no redundancy, and the layers are few.
MAX_ERROR = {"int8": 0.08, "int8 rows": 0.08, "int8 but head": 0.08, "int4": 0.7}
MAX_ERROR |= {"int4 with head": 0.7, "fp8": 0.25}


@pytest.mark.parametrize(
    "variant",
    slow_but(("llama", "qwen3_tied", "gpt2", "opt_350m", "qwen2"), "llama", "qwen3_tied", "gpt2"),
)
def test_quantised_logits_are_near_the_unquantised(variant: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, variant)
    exact = load_model(tmp_path, checkpoint.spec, torch.float32, CPU)
    wanted = torch.cat(run_paged(exact, checkpoint.spec, SEQUENCES, WHOLE))
    for name, formats in FORMATS.items():
        options = LoadOptions(formats=formats)
        rounded = load_model(tmp_path, checkpoint.spec, torch.float32, CPU, options)
        got = torch.cat(run_paged(rounded, checkpoint.spec, SEQUENCES, WHOLE))
        error = ((got - wanted).norm() / wanted.norm()).item()
        assert 0 < error < MAX_ERROR[name], (name, error)


@pytest.mark.parametrize("formats", [*FORMATS, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_bits_do_not_depend_on_the_batch(
    formats: str | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path, "qwen3_tied")
    chosen = AS_THEY_ARE if formats is None else FORMATS[formats]
    model = load_model(tmp_path, checkpoint.spec, dtype, CPU, LoadOptions(formats=chosen))
    layers = [m for m in model.modules() if isinstance(getattr(m, "weight", None), PackedWeight)]
    assert layers
    x = torch.randn(19, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    for layer in layers:
        if isinstance(layer, Embedding) or layer.weight.shape[1] != 32:
            continue
        whole = layer(x)
        assert torch.equal(torch.cat([layer(row[None]) for row in x]), whole)
        assert torch.equal(torch.cat([layer(x[:3]), layer(x[3:])]), whole)


@pytest.mark.parametrize(("variant", "formats"), variants_with([None, *FORMATS]))
def test_planned_bytes_equal_the_models_bytes(
    variant: str, formats: str | None, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path, variant)
    chosen = AS_THEY_ARE if formats is None else FORMATS[formats]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        if dtype == torch.float64 and formats is not None:
            continue
        model = load_model(tmp_path, checkpoint.spec, dtype, CPU, LoadOptions(formats=chosen))
        empty = make_model(checkpoint.spec, dtype, META)
        assert planned_bytes(empty, dtype, CPU, chosen) == model_bytes(model)


@pytest.mark.parametrize(
    ("formats", "shares"), [(None, True), ("int8", True), ("int4", True), ("int4 with head", False)]
)
def test_a_tied_table_is_shared_unless_the_head_is_too_coarse(
    formats: str | None, shares: bool, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path, "qwen3_tied")
    chosen = AS_THEY_ARE if formats is None else FORMATS[formats]
    model = load_model(tmp_path, checkpoint.spec, torch.bfloat16, CPU, LoadOptions(formats=chosen))
    assert (model.embedding.weight is model.head.weight) == shares
    ids = torch.tensor([0, 96, 5], dtype=torch.int32)
    plain = load_model(tmp_path, checkpoint.spec, torch.float64, CPU).embedding(ids)
    bound = 0.004 if formats is None or not shares else 0.015
    assert (model.embedding(ids).double() - plain).norm() < bound * plain.norm()


def test_the_preview_has_the_bytes_of_the_weights() -> None:
    source = resolve_model("shape:qwen3-0.6b")
    sizes = {}
    for name in (None, "int8", "int4"):
        config = config_from_flat(
            model="shape:qwen3-0.6b", dtype="bfloat16", quantization=name, max_model_len=1024
        )
        sizes[name] = preview_runner(config, source).weights_bytes / 1e6
    assert sizes[None] == pytest.approx(1192, rel=0.01)
    assert sizes["int8"] == pytest.approx(596 * (1 + 2 / 128), rel=0.01)
    assert sizes["int4"] == pytest.approx(440.4 * 68 / 128 + 155.6 * (1 + 2 / 128), rel=0.01)


def test_quantised_demo_models_mostly_choose_the_same_tokens() -> None:
    """Compares the next token at each position of the unquantised model's answers."""
    prompts = ["Once upon a time", "The little fox", "What is 17 + 25?", "The sea"]
    params = SamplingParams(temperature=0.0, max_tokens=48)
    with LLM("demo", disable_log_stats=True) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        spec = llm.engine.spec
    sequences = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    chunks = [[len(sequence)] for sequence in sequences]
    directory = resolve_model("demo").directory
    choices = {}
    for name, formats in ((None, AS_THEY_ARE), *FORMATS.items()):
        model = load_model(directory, spec, torch.float32, CPU, LoadOptions(formats=formats))
        choices[name] = torch.cat(run_paged(model, spec, sequences, chunks)).argmax(-1)
    agreement = {n: (c == choices[None]).float().mean().item() for n, c in choices.items()}
    assert min(agreement[name] for name in FORMATS if "int8" in name) >= 0.95, agreement
    assert min(agreement.values()) >= 0.6, agreement


def test_the_head_is_at_least_as_precise_as_the_layers() -> None:
    for name, head in (("int8", "int8"), ("int4", "int8"), ("fp8", "fp8")):
        found = weight_formats(ModelConfig(quantization=name)).head
        assert found is not None and found.format == head


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="quantization must be one of none, fp8, int8, int4, got 'fp4'"
    ):
        config_from_flat(quantization="fp4")
    for name, size in (("int8", 48), ("int4", 0), ("int4", 256), ("fp8", 32)):
        config = ModelConfig(quantization=name, quantization_group_size=size)
        with pytest.raises(ConfigError, match=f"quantization_group_size .* for {name}, got {size}"):
            weight_formats(config)
    int8 = WeightFormats(Quantization("int8", 128))
    with pytest.raises(ConfigError, match="needs dtype float32, bfloat16, float16, not float64"):
        int8.check("float64", "cuda")
    with pytest.raises(ConfigError, match="needs dtype float32, bfloat16, float16, not float64"):
        LLM("demo", dtype="float64", quantization="int8")
