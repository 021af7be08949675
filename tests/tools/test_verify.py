"""`quire verify` finds planted faults at their place, and none in equal models.

Covers `tools/verify/theirs.py` and `tools/verify/paged.py`.
"""

import dataclasses
import gc
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.base.errors import ModelError, OutOfMemory
from quire.base.settings.config import ModelConfig, config_from_flat
from quire.models.checkpoint.formats import IN_THE_DTYPE, weight_formats
from quire.models.load.loading import LoadOptions, load_model
from quire.ops.host.native import core
from quire.spec.model_spec import ModelSpec, load_spec
from quire.tools.verify import verify as verify_module
from quire.tools.verify.compare import differences, tokens_chosen
from quire.tools.verify.ours import AT_ONCE, WAYS
from quire.tools.verify.paged import CPU
from quire.tools.verify.report import DIFFERS, WITHIN, Report, Run, as_data, lines
from quire.tools.verify.verify import AS_STORED, Comparison
from quire.tools.verify.watch import LOGITS
from quire.tools.verify.weights import checkpoint_tensors, take_dequantised
from tests.support.cases import slow_but
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.gguf_writer import Q8_0, convert
from tests.support.models.quantised_writers import awq, float4, gptq
from tests.support.models.quantised_writers import write as write_quantised
from tests.support.models.quick import one_of_each_type
from tests.tools.test_port import foreign

Tensors = dict[str, torch.Tensor]
MORE_VARIANTS = (
    "llama",
    "opt_350m",
    "qwen2_windows",
    "phi3_long",
    "olmo2",
    "cohere2",
    "gpt_neox",
    "glm4",
)
MORE_VARIANTS += ("gpt2", "mixtral", "qwen2_moe", "gpt_oss")


@pytest.fixture(scope="module", autouse=True)
def young_objects() -> None:
    """Freeze objects of other tests, since a verification collects garbage."""
    gc.freeze()


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten prompts, since one of the ways takes a step for each prompt token."""
    monkeypatch.setattr(verify_module, "RANDOM_TOKENS", 12)


def verify(model: Path, *, spec: ModelSpec | None = None, against: Path | None = None,
           **settings: Any) -> Report:  # fmt: skip
    """Verify with the reference backend in float64 only, unless settings add others."""
    quick = {"quantization": "none", "attention_backend": "reference"}
    config = config_from_flat(model=str(model), **(quick | settings))
    where = None if against is None else str(against)
    return verify_module.verify(Comparison(config, num_tokens=4, against=where, spec=spec))


def first(report: Report) -> tuple[str, int | None]:
    """Return the point and the token of the first difference."""
    assert report.verdict == DIFFERS
    assert report.failed is not None and report.failed.first is not None
    return report.failed.first.point, report.failed.first.position


@pytest.mark.parametrize(
    "variant",
    [
        *("gemma2", "qwen3_moe"),
        *(pytest.param(name, marks=[pytest.mark.slow]) for name in MORE_VARIANTS),
    ],
)
def test_equal_models_are_within_rounding(variant: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, variant)
    report = verify(tmp_path)
    assert report.verdict == WITHIN, "\n".join(lines(report))
    exact = [run for run in report.runs if run.dtype == "float64"]
    assert [run.computed for run in exact] == list(WAYS)
    num_layers = load_spec(tmp_path).num_layers
    for run in exact:
        points = [each.point for each in run.differences]
        assert len(points) == 2 * num_layers + 3, "each layer twice; embedding, hidden, logits"
        assert run.tokens is not None and run.tokens.same == run.tokens.count == 4
    assert report.runs[-1].computed == "by the engine" and report.runs[-1].tokens is not None


def test_quick_comparison_announces_its_number_of_runs(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    seen: list[tuple[str, int]] = []
    settings = {"model": str(tmp_path), "quantization": "none", "attention_backend": "reference"}
    config = config_from_flat(**settings)
    for is_quick in (True, False):
        comparison = Comparison(config, num_tokens=4, is_quick=is_quick)
        seen.clear()
        report = verify_module.verify(comparison, lambda run, num: seen.append((run.computed, num)))
        assert report.verdict == WITHIN, "\n".join(lines(report))
        assert {num for _, num in seen} == {len(seen)}, "the announced number of runs"
        if is_quick:
            assert [computed for computed, _ in seen] == [AT_ONCE, "by the engine"]


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_backends_and_formats_of_this_machine_are_within_rounding(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_tied")
    report = verify(tmp_path, quantization=None, attention_backend="auto", kv_cache_dtype="auto")
    assert report.verdict == WITHIN, "\n".join(lines(report))
    ran = [run for run in report.runs if run.refusal is None]
    assert {"reference", "torch", "cpu", "cpu, one call", "auto"} == {r.attention for r in ran}
    assert {"plain", "int8", "int4"} <= {run.weights for run in ran}
    assert {"auto", "int8"} == {run.kv for run in ran}
    rounded = {r.weights: r.weights_rounding for r in ran if r.weights_rounding is not None}
    assert 0.001 < rounded["int8"] < rounded["int4"] < 1


# ---- planted faults --------------------------------------------------------------------------


def with_fields(spec: ModelSpec, fields: Mapping[str, Any]) -> ModelSpec:
    return dataclasses.replace(spec, raw={**spec.raw, **fields})


def wrong_theta(spec: ModelSpec) -> ModelSpec:
    return with_fields(spec, {"rope_parameters": {"rope_type": "default", "rope_theta": 9999.0}})


def wrong_eps(spec: ModelSpec) -> ModelSpec:
    return with_fields(spec, {"rms_norm_eps": 2e-6})


def wrong_activation(spec: ModelSpec) -> ModelSpec:
    return with_fields(spec, {"hidden_act": "gelu"})


def wrong_window(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, layer_windows=(None, 5, 6))


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        (wrong_theta, ("layers.0.attention", 1)),  # position 0 is not rotated
        pytest.param(wrong_eps, ("layers.0.attention", 0), marks=pytest.mark.slow),
        (wrong_activation, ("layers.0", 0)),
        (wrong_window, ("layers.1.attention", 5)),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_wrong_option_is_found_at_its_place(
    fault: Callable[[ModelSpec], ModelSpec], place: tuple[str, int], tmp_path: Path
) -> None:
    spec = write_checkpoint(tmp_path, "qwen2_windows").spec
    assert first(verify(tmp_path, spec=fault(spec))) == place


def swapped_queries_and_keys(tensors: Tensors) -> None:
    name = "model.layers.1.self_attn.{}_proj.weight"
    tensors[name.format("q")][:16], tensors[name.format("k")] = (
        tensors[name.format("k")].clone(),
        tensors[name.format("q")][:16].clone(),
    )


def one_number_of_a_projection(tensors: Tensors) -> None:
    tensors["model.layers.2.mlp.down_proj.weight"][3, 5] += 1e-4


def one_number_of_the_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"][7, 3] += 1e-3


def last_norm(tensors: Tensors) -> None:
    tensors["model.norm.weight"] *= 1.0001


def embedding(tensors: Tensors) -> None:
    tensors["model.embed_tokens.weight"] *= 1.0001


@pytest.mark.parametrize(
    ("fault", "point"),
    [
        (swapped_queries_and_keys, "layers.1.attention"),
        (one_number_of_a_projection, "layers.2"),
        (one_number_of_the_head, LOGITS),
        pytest.param(last_norm, "hidden", marks=pytest.mark.slow),
        pytest.param(embedding, "embedding", marks=pytest.mark.slow),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_wrong_weight_is_found_at_its_place(
    fault: Callable[[Tensors], None], point: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "right", "llama")
    write_checkpoint(tmp_path / "wrong", "llama")
    path = tmp_path / "wrong" / "model.safetensors"
    tensors = load_file(path)
    fault(tensors)
    save_file(tensors, path)
    report = verify(tmp_path / "wrong", against=tmp_path / "right")
    assert first(report)[0] == point
    text = "\n".join(lines(report))
    assert text.startswith(f"{DIFFERS} from transformers, first at ")
    assert "point by point" in text


def test_near_tie_is_not_an_error() -> None:
    expected = {LOGITS: torch.tensor([[0.0, 1.0, 0.999], [3.0, 1.0, 0.0], [0.0, 0.0, 1.0]])}
    actual = {LOGITS: torch.tensor([[0.0, 0.998, 1.0], [3.0, 1.0, 0.0], [0.0, 0.0, 1.0]])}
    found = tokens_chosen(actual, expected, [5, 1, 0, 2], prompt=1)
    assert (found.count, found.same, found.position, found.is_tie) == (3, 2, 0, True)
    assert not dataclasses.replace(found, error=1e-4).is_tie
    run = Run("plain", "float32", "cpu", "auto", "at once", "transformers", 1.0, tokens=found)
    assert run.is_within
    assert not dataclasses.replace(run, tokens=dataclasses.replace(found, error=1e-4)).is_within


def test_nan_is_a_difference() -> None:
    expected = {LOGITS: torch.ones(2, 3)}
    (found,) = differences({LOGITS: torch.full((2, 3), torch.nan)}, expected, torch.float32, 0.5)
    assert found.position == 0
    run = Run("plain", "float32", "cpu", "auto", "at once", "us", 0.5, differences=(found,))
    assert not run.is_within
    assert not dataclasses.replace(run, reroutes=True).is_within


def test_rerouted_token_is_within_rounding_if_most_are_equal() -> None:
    """Large rounding errors may change a token's expert; this is not a fault."""
    expected, actual = torch.ones(5, 3), torch.ones(5, 3)
    actual[3] = -7.0
    (found,) = differences({LOGITS: actual}, {LOGITS: expected}, torch.bfloat16, 0.1)
    assert found.relative > 1 and (found.median, found.position) == (0.0, 3)
    run = Run("plain", "bfloat16", "cpu", "auto", "at once", "us", 0.1, differences=(found,))
    assert not run.is_within and not run.is_rerouted
    run = dataclasses.replace(run, reroutes=True)
    assert run.is_within and run.is_rerouted
    report = Report({}, [], [], 0.0, (run,))
    assert any("sends the other tokens to other experts" in line for line in lines(report))


@pytest.mark.slow
@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_only_coarse_formats_may_reroute_tokens(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral_window")
    report = verify(tmp_path, quantization=None, attention_backend="cpu")
    assert report.verdict == WITHIN, "\n".join(lines(report))
    assert {run.reroutes for run in report.runs if run.weights == "int8"} == {True}
    assert {run.reroutes for run in report.runs if run.bound <= 2e-4} == {False}


# ---- models that transformers cannot read ----------------------------------------------------


@pytest.mark.parametrize("variant", one_of_each_type())
def test_checkpoint_tensors_equal_the_file(variant: str, tmp_path: Path) -> None:
    """Transformers then gets the values of the file, regardless of our packing."""
    spec = write_checkpoint(tmp_path, variant).spec
    options = LoadOptions(formats=IN_THE_DTYPE)
    model = load_model(tmp_path, spec, torch.float64, CPU, options)
    found, expected = checkpoint_tensors(model), load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values.double(), rtol=0, atol=1e-15, msg=name)


@pytest.mark.parametrize(
    "variant",
    slow_but(["llama", "llama3_rope", "qwen3", "gpt2", "phi3", "gpt_oss"], "phi3"),
)
def test_gguf_file_equals_its_dequantised_weights(variant: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, variant)
    path = convert(tmp_path, tmp_path / "model.gguf", Q8_0)
    settings = {"attention_backend": "cpu" if core() is not None else "torch"}
    report = verify(path, quantization=None, **settings)
    assert report.verdict == WITHIN, "\n".join(lines(report))
    stored = [run for run in report.runs if run.weights == AS_STORED and run.refusal is None]
    assert len(stored) == (core() is not None)


FORMS = {
    "gptq": gptq(4, 32, desc_act=True, symmetric=False),
    "awq": awq(32),
    "mxfp4": float4(),
}


@pytest.mark.parametrize("form", slow_but(FORMS, "gptq"))
def test_quantised_checkpoint_equals_its_dequantised_weights(form: str, tmp_path: Path) -> None:
    """It also equals the plain checkpoint that it was made from."""
    quantised, plain = write_quantised(tmp_path, FORMS[form])
    settings = {"attention_backend": "cpu" if core() is not None else "torch"}
    report = verify(quantised, quantization=None, **settings)
    assert report.verdict == WITHIN, "\n".join(lines(report))
    stored = [run for run in report.runs if run.weights == AS_STORED and run.refusal is None]
    assert len(stored) == (core() is not None)
    assert verify(quantised, against=plain).verdict == WITHIN


@pytest.mark.slow
@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_tokens_may_differ_by_rounded_activations(tmp_path: Path) -> None:
    """An engine with a quantised checkpoint rounds activations, so this is not an error."""
    quantised, _ = write_quantised(tmp_path, gptq(4, 32))
    config = config_from_flat(model=str(quantised), attention_backend="cpu")
    report = verify_module.verify(Comparison(config, num_tokens=40))
    assert report.verdict == WITHIN, "\n".join(lines(report))
    assert report.runs[-1].tokens is not None and report.runs[-1].tokens.count == 40


def test_nonfinite_weights_are_reported(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match="logits are not finite"):
        verify(tmp_path)


def test_model_that_transformers_cannot_run_is_reported(tmp_path: Path) -> None:
    """Transformers ignores num_key_value_heads of this model's latent attention."""
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "vocab_size": 97}
    sizes |= {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
    sizes |= {"v_head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.AutoConfig.for_model("youtu", **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="transformers does not run this model: "):
        verify(tmp_path)


def test_files_are_checked_before_transformers_loads(tmp_path: Path) -> None:
    """The error of transformers would be less specific."""
    write_checkpoint(tmp_path, "llama", max_shard_size="30KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"lacks {shard.name}, which its index names"):
        verify(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["stablelm", "starcoder2"])
def test_models_with_transformers_classes_are_verified(model_type: str, tmp_path: Path) -> None:
    folder = foreign(tmp_path, model_type)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for tensor in tensors.values():  # large enough that a rounded frequency would show
        tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)) / 4)
    save_file(tensors, file, {"format": "pt"})
    report = verify(folder)
    assert report.verdict == WITHIN, "\n".join(lines(report))
    assert report.facts["model"]["class of"] == "transformers"


def test_dummy_weights_are_verified(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mistral")
    (tmp_path / "model.safetensors").unlink()
    assert verify(tmp_path, load_format="dummy").verdict == WITHIN


def test_memory_limits_the_compared_dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, "llama")
    monkeypatch.setattr(verify_module, "available_cpu_bytes", lambda: 300 << 10)
    assert {run.dtype for run in verify(tmp_path).runs} >= {"float64", "float32"}
    monkeypatch.setattr(verify_module, "available_cpu_bytes", lambda: 200 << 10)
    assert {run.dtype for run in verify(tmp_path).runs} == {"float32"}
    monkeypatch.setattr(verify_module, "available_cpu_bytes", lambda: 10 << 10)
    with pytest.raises(OutOfMemory, match="comparing takes .* MiB .* are free. Use a smaller"):
        verify(tmp_path)


@pytest.mark.parametrize("variant", slow_but(["llama_tied", "qwen3_moe"], "qwen3_moe"))
def test_packed_weights_are_given_to_transformers_in_float32(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our weights are packed in another order."""
    write_checkpoint(tmp_path, variant)
    monkeypatch.setattr(verify_module, "_exact_dtype", lambda spec, given: torch.float32)
    assert verify(tmp_path, load_format="dummy").verdict == WITHIN


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_dequantised_weights_equal_the_multiplied_values(name: str, tmp_path: Path) -> None:
    spec = write_checkpoint(tmp_path, "llama").spec
    formats = weight_formats(ModelConfig(quantization=name))
    packed = load_model(tmp_path, spec, torch.float32, CPU, LoadOptions(formats=formats))
    plain = load_model(tmp_path, spec, torch.float32, CPU)
    take_dequantised(plain, packed)
    weight = packed.layers[0].mlp.down.weight
    expected = weight.rows(torch.arange(weight.shape[0]), torch.float32)
    torch.testing.assert_close(plain.layers[0].mlp.down.weight, expected, rtol=1e-6, atol=0)


def test_unloadable_reference_is_reported(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "right", "llama")
    (tmp_path / "other").mkdir()
    with pytest.raises(ModelError, match="transformers does not load this model"):
        verify(tmp_path / "right", against=tmp_path / "other")


def test_report_is_available_as_data(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    data = json.loads(json.dumps(as_data(verify(tmp_path))))
    assert data["verdict"] == WITHIN and len(data["tokens"]) == 4
    assert data["versions"]["transformers"] and data["model"]["type"] == "llama"
    assert data["settings"]["attention_backend"] == "reference"
    assert data["runs"][0]["differences"][0]["point"] == "embedding"
    assert data["runs"][0]["is_within"] is True and data["runs"][0]["first"] is None
