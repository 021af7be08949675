"""Expert layers: lists and stacked tensors, the layers that have them, and invalid sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.errors import ModelError
from quire.base.settings.config import config_from_flat
from quire.models.checkpoint.formats import WeightFormats
from quire.models.checkpoint.source import resolve_model
from quire.models.load.loading import LoadOptions, load_model
from quire.models.load.packing import model_bytes, planned_bytes
from quire.models.outline import outline
from quire.models.parts import experts
from quire.models.parts.experts import ExpertLinear, ExpertList, SparseMLP, StackedExperts
from quire.models.registry import make_model
from quire.ops.host.native import core
from quire.ops.weights.formats import Quantization
from quire.ops.weights.packed import PackedWeight
from quire.runner.setup.preview import preview_runner
from quire.runner.setup.step_size import linear_parameters
from quire.spec.model_options import EXPERTS as EXPERTS_OF
from quire.spec.model_spec import ModelSpec, load_spec, parse_spec
from quire.tools.limits import step_cost
from tests.support.models.checkpoints import (
    EXPERTS,
    VARIANTS,
    exact_logits,
    random_tokens,
    write_checkpoint,
)
from tests.support.models.paged_forward import CPU, run_paged
from tests.support.models.quantised_writers import write_gpt_oss

needs_core = pytest.mark.skipif(core() is None, reason="the C++ core is not built")
META = torch.device("meta")
TOKENS = random_tokens(31)


def spec_with(**changes: Any) -> ModelSpec:
    return parse_spec({"model_type": "qwen3_moe"} | EXPERTS | changes)


def logits(model: torch.nn.Module, spec: ModelSpec, dtype: torch.dtype) -> torch.Tensor:
    return run_paged(model, spec, TOKENS, [[20, 1, 10]], dtype=dtype)[0]


# ---- lists and stacked tensors ---------------------------------------------------------------


@pytest.mark.parametrize("variant", ["qwen3_moe", "qwen3_moe_some"])
def test_stacked_experts_match_transformers_and_the_planned_size(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They load from the same checkpoint as lists of experts."""
    checkpoint = write_checkpoint(tmp_path, variant, max_shard_size="20KB")
    monkeypatch.setattr(experts, "ExpertList", StackedExperts)
    model = load_model(tmp_path, checkpoint.spec, torch.float64, CPU)
    stacked = [module for module in model.modules() if isinstance(module, StackedExperts)]
    assert [tuple(each.gate_up.shape) for each in stacked] == [(6, 48, 32)] * len(stacked) != []
    got = logits(model, checkpoint.spec, torch.float64).float()
    torch.testing.assert_close(got, checkpoint.logits(TOKENS[0]), rtol=1e-4, atol=1e-4)
    sizes = [part.shape for part in outline(checkpoint.spec).parts]
    assert model_bytes(model) == 8 * sum(torch.Size(shape).numel() for shape in sizes)
    empty = make_model(checkpoint.spec, torch.float64, META)
    assert planned_bytes(empty, torch.float64, CPU) == model_bytes(model)


DENSE = ("llama4_plain",)  # a variant without experts
MIXTURES = sorted(n for n, (kind, _) in VARIANTS.items() if kind in EXPERTS_OF and n not in DENSE)


@pytest.mark.parametrize(
    ("variant", "together", "stacks"),
    [
        pytest.param(
            name,
            together,
            stacks,
            marks=[] if number % 4 == 2 * together + stacks else pytest.mark.slow,
        )
        for number, name in enumerate(MIXTURES)
        for together in (False, True)
        for stacks in (False, True)
    ],
)
def test_experts_load_from_separate_and_joint_tensors(
    variant: str, together: bool, stacks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Separate as on the hub, or joint in the own format of transformers 5."""
    checkpoint = write_checkpoint(tmp_path, variant)
    if together:
        (tmp_path / "model.safetensors").unlink()
        checkpoint.model.save_pretrained(tmp_path, save_original_format=False)
    if stacks:
        monkeypatch.setattr(experts, "experts_class", lambda device: StackedExperts)
    names = load_file(tmp_path / "model.safetensors").keys()
    is_together = any(name.endswith(".experts.gate_up_proj") for name in names)
    assert is_together == (together or variant.startswith(("gpt_oss", "llama4")))
    model = load_model(tmp_path, checkpoint.spec, torch.float64, CPU)
    got = logits(model, checkpoint.spec, torch.float64)
    (wanted,) = exact_logits(tmp_path, TOKENS)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", MIXTURES)
def test_finish_stacks_lists_of_experts_for_a_gpu(variant: str, tmp_path: Path) -> None:
    """Weights that were stored quantised load as lists. The stacked experts replace the lists, give
    the same logits, and take as much memory."""
    checkpoint = write_checkpoint(tmp_path, variant)
    model = load_model(tmp_path, checkpoint.spec, torch.float64, CPU)
    wanted, num_bytes = logits(model, checkpoint.spec, torch.float64), model_bytes(model)
    for layer in model.modules():
        if isinstance(layer, SparseMLP):
            layer.finish(torch.device("cuda"))
            assert isinstance(layer.experts, StackedExperts)
    torch.testing.assert_close(logits(model, checkpoint.spec, torch.float64), wanted)
    assert model_bytes(model) == num_bytes


def test_experts_are_stacked_on_a_gpu_only() -> None:
    for device, kind in (("cuda", StackedExperts), ("cpu", ExpertList), ("meta", ExpertList)):
        assert experts.experts_class(torch.device(device)) is kind


@pytest.mark.parametrize("stacks", [False, True])
def test_a_missing_expert_is_named(
    stacks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path, "qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    tensors["model.layers.1.mlp.experts.6.up_proj.weight"] = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors")
    if stacks:
        monkeypatch.setattr(experts, "ExpertList", StackedExperts)
    with pytest.raises(ModelError, match=r"lack \S+\.5\.up_proj.* hold unknown .*\.6\.up_proj"):
        load_model(tmp_path, checkpoint.spec, torch.float32, CPU)


@pytest.mark.parametrize("stacks", [False, True])
def test_dummy_weights_depend_on_the_seed(stacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if stacks:
        monkeypatch.setattr(experts, "ExpertList", StackedExperts)
    spec = spec_with()
    first, second, other = (
        logits(load_model(Path(), spec, torch.float64, CPU, options), spec, torch.float64)
        for options in (LoadOptions("dummy", seed) for seed in (1, 1, 2))
    )
    assert torch.equal(first, second) and not torch.allclose(first, other)
    assert first.isfinite().all() and first.std() > 0


@needs_core
def test_experts_are_quantised_and_routers_are_not(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "qwen3_moe")
    formats = WeightFormats(Quantization("int8", 32), None)
    model = load_model(tmp_path, checkpoint.spec, torch.bfloat16, CPU, LoadOptions(formats=formats))
    for layer in model.layers:
        assert isinstance(layer.mlp, SparseMLP)
        weights = [layer.mlp.router.weight, layer.mlp.experts.gate_up[3].weight]
        assert all(isinstance(weight, PackedWeight) for weight in weights)
        assert [weight.format for weight in weights] == ["bfloat16", "int8"]


# ---- which layers, and how many parameters ---------------------------------------------------


def test_the_config_chooses_the_layers_with_experts() -> None:
    for changes, wanted in (
        ({}, [True] * 6),
        ({"decoder_sparse_step": 2}, [False, True] * 3),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, [False] * 5 + [True]),
        ({"mlp_only_layers": [0, 5]}, [False, True, True, True, True, False]),
        ({"num_experts": 0}, [False] * 6),
    ):
        spec = spec_with(num_hidden_layers=6, **changes)
        layers = make_model(spec, torch.float32, META).layers
        assert [isinstance(layer.mlp, SparseMLP) for layer in layers] == wanted


def test_num_local_experts_is_an_alias_of_num_experts() -> None:
    plain = {name: value for name, value in EXPERTS.items() if name != "num_experts"}
    spec = parse_spec({"model_type": "qwen3_moe", "num_local_experts": 6} | plain)
    assert spec.experts == spec_with().experts
    assert parse_spec({"model_type": "qwen3"} | EXPERTS).experts is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 7}, "to 7 of 6 experts"),
        ({"num_experts_per_tok": 0}, "from 1 to num_experts"),
        ({"decoder_sparse_step": 0}, "below 1: 0 and 24"),
        ({"moe_intermediate_size": 0}, "below 1: 1 and 0"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make_model(spec_with(**changes), torch.float32, META)


def test_windows_apply_only_with_use_sliding_window() -> None:
    """As in transformers: all layers have the window with use_sliding_window, none without."""
    assert spec_with(sliding_window=6).layer_windows == (None,) * 3
    hub = {"sliding_window": 6, "max_window_layers": 2, "use_sliding_window": True}
    assert spec_with(**hub).layer_windows == (6,) * 3


@pytest.mark.slow
def test_qwen3_30b_a3b_has_the_published_sizes() -> None:
    """30.5 billion parameters, of which 3.0 billion are active per token."""
    spec = load_spec(resolve_model("shape:qwen3-30b-a3b").directory)
    shapes = [shape for part in outline(spec).parts for shape in part.tensors.values()]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    assert sum(sizes) == 30_532_122_624
    cost = step_cost(spec, torch.bfloat16)
    assert cost.layers == linear_parameters(spec)
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    unused = 48 * 120 * 3 * 2048 * 768
    assert cost.layers + cost.head == sum(sizes) - unused - norms - 151936 * 2048
    assert cost.weight_bytes == 2 * (cost.layers + cost.head)


@pytest.mark.parametrize("variant", [*MIXTURES, "qwen3_next", "qwen3_next_some", "qwen3_5_wide"])
def test_linear_parameters_equal_the_step_cost(variant: str) -> None:
    spec = parse_spec({"model_type": VARIANTS[variant][0]} | VARIANTS[variant][1])
    assert linear_parameters(spec) == step_cost(spec, torch.float32).layers


# ---- gpt-oss as on the hub -------------------------------------------------------------------


@pytest.fixture(scope="module")
def oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a gpt-oss with MXFP4 experts, and the same one with dequantised experts."""
    return write_gpt_oss(tmp_path_factory.mktemp("oss"))


def test_mxfp4_experts_match_the_dequantised_checkpoint(oss: tuple[Path, Path]) -> None:
    quantised, plain = oss
    model, spec = load(quantised, torch.float64)
    got = logits(model, spec, torch.float64)
    (wanted,) = exact_logits(plain, TOKENS)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@needs_core
def test_mxfp4_experts_stay_packed(oss: tuple[Path, Path]) -> None:
    """They have the planned size. Logits differ by the rounding of activations to 8 bits."""
    quantised, plain = oss
    model, spec = load(quantised, torch.float32)
    expert_layers = [layer for layer in model.modules() if isinstance(layer, ExpertLinear)]
    assert len(expert_layers) == 2 * 2 * 5
    for layer in expert_layers:
        assert isinstance(layer.weight, PackedWeight) and layer.weight.format == "mxfp4"
    got = logits(model, spec, torch.float32)
    (wanted,) = exact_logits(plain, TOKENS)
    assert (got.double() - wanted).norm() < 0.03 * wanted.norm()
    config = config_from_flat(model=str(quantised), dtype="float32", max_model_len=64)
    preview = preview_runner(config, resolve_model(str(quantised)))
    assert preview.weights_bytes == model_bytes(model)


def load(folder: Path, dtype: torch.dtype) -> tuple[torch.nn.Module, ModelSpec]:
    spec = load_spec(folder)
    return load_model(folder, spec, dtype, CPU), spec
