"""Models that run by transformers' own classes over paged memory, compared with transformers.

Covers `models/hf/attention.py`, `models/hf/build.py`, `models/hf/watch.py`, `models/hf/names.py`,
`models/hf/modules.py`, `models/hf/buffers.py`, `models/hf/configs.py`, `models/hf/spec.py`.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.base.errors import ConfigError, MissingDependency, ModelError
from quire.models.checkpoint.formats import IN_THE_DTYPE, WeightFormats
from quire.models.hf import configs
from quire.models.hf.modules import Product
from quire.models.load.loading import LoadOptions, load_model
from quire.models.model import Model
from quire.models.registry import model_spec
from quire.ops.weights.formats import Quantization
from quire.spec.model_spec import TRANSFORMERS, load_spec
from tests.models.test_quantised_checkpoints import FORMATS
from tests.support.cases import slow_but
from tests.support.models.checkpoints import LLAMA, VARIANTS, VOCAB, Checkpoint, random_tokens
from tests.support.models.paged_forward import CPU, run_paged
from tests.support.models.quantised_writers import write as write_quantised
from tests.support.models.transformers_checkpoints import (
    ALL_ATTEND,
    FAMILIES,
    SMALL,
    TRANSLATED,
    WINDOW,
    write_reference,
)

SEQUENCES = random_tokens(23, 5, 31, 1)
CHUNKS = [[7, 0, 9, 1, 1, 5], [0, 3, 1, 1], [13, 11, 1, 1, 1, 4], [0, 0, 1]]
OURS = ("llama", "mistral_window", "qwen2_windows", "qwen3_tied", "qwen3_moe_some", "opt_350m",
        "gpt2_scaled")  # fmt: skip


def load(reference: Checkpoint, dtype: torch.dtype, options: LoadOptions | None = None) -> Model:
    return load_model(reference.directory, reference.spec, dtype, CPU, options)


# test_transformers_translation.py compares the programs of translated models with transformers. It
# has gemma2 among its slow cases.
COMPARED = {*TRANSLATED, "llama", "qwen2_windows"} - {"gemma2"}
# Other quick cases have the layers of these models.
LARGER = {"mixtral", "qwen2_moe", "opt_350m", "gpt2_scaled"}


@pytest.mark.parametrize(
    "name", slow_but([*OURS, *FAMILIES], *{*OURS, *FAMILIES} - COMPARED - LARGER)
)
def test_logits_match_transformers(name: str, tmp_path: Path) -> None:
    reference = write_reference(tmp_path, *(VARIANTS | FAMILIES)[name])
    model, spec = load(reference, torch.float64), reference.spec
    run = {"backend": "reference", "dtype": torch.float64}
    got = run_paged(model, spec, SEQUENCES, CHUNKS, **run)
    for tokens, logits_TV in zip(SEQUENCES, got, strict=True):
        wanted_TV = reference.logits(tokens)
        assert wanted_TV.std() > 0.2, "logits vary too little to compare"
        # Routers and norms of some classes compute in float32 whatever the dtype.
        torch.testing.assert_close(logits_TV, wanted_TV, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", slow_but(["gemma3", "gpt_neox", "minicpm3"], "gemma3", "minicpm3"))
def test_core_logits_match_transformers_in_float32(name: str, tmp_path: Path) -> None:
    reference = write_reference(tmp_path, *FAMILIES[name])
    model = load(reference, torch.float32)
    got = run_paged(model, reference.spec, SEQUENCES, CHUNKS, backend="cpu")
    for tokens, logits_TV in zip(SEQUENCES, got, strict=True):
        wanted_TV = reference.logits(tokens).float()
        torch.testing.assert_close(logits_TV, wanted_TV, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_linear_layers_are_quantised(format: str, tmp_path: Path) -> None:
    """They match quire's own class with weights that are quantised alike."""
    config = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    reference = write_reference(tmp_path, "llama", config)
    made = Quantization(format, 32)
    options = LoadOptions(formats=WeightFormats(made, made))
    model = load(reference, torch.float32, options)
    assert not [p.shape for p in model.parameters() if p.dim() > 1 and p.shape[0] != VOCAB]
    ours = load_model(tmp_path, load_spec(tmp_path), torch.float32, CPU, options)
    got, wanted = (
        run_paged(each, reference.spec, SEQUENCES[:1], [[20, 3]], backend="torch")[0]
        for each in (model, ours)
    )
    torch.testing.assert_close(got, wanted, rtol=0.0, atol=0.02)


def test_layers_with_the_same_input_are_merged(tmp_path: Path) -> None:
    reference = write_reference(tmp_path, "stablelm", SMALL)
    model = load(reference, torch.float32)
    products = [module for module in model.modules() if isinstance(module, Product)]
    sizes = [module.layer.part_sizes for module in products]
    assert sizes == [[32, 16, 16], [40, 40]] * reference.spec.num_layers
    run_paged(model, reference.spec, SEQUENCES[:1], [[20, 3]], backend="torch")
    assert not [module for module in products if module._input is not None]


def test_the_spec_takes_its_sizes_from_the_layers(tmp_path: Path) -> None:
    spec = write_reference(tmp_path, *FAMILIES["minicpm3"]).spec
    assert (spec.head_dim, spec.num_kv_heads, spec.num_heads) == (12, 4, 4)
    assert spec.implementation == TRANSFORMERS
    assert spec.identity != model_spec_of(tmp_path, "gemma2", WINDOW).identity


def test_the_spec_takes_its_windows_from_the_masks(tmp_path: Path) -> None:
    spec = model_spec_of(tmp_path, "gemma2", WINDOW | {"num_hidden_layers": 4})
    assert spec.layer_windows == (6, None, 6, None)
    assert [group.window for group in spec.cache_groups] == [None, 6]


def model_spec_of(directory: Path, model_type: str, config: dict[str, Any]) -> Any:
    """Return the spec of a config without weights."""
    transformers.AutoConfig.for_model(model_type, **config).save_pretrained(directory)
    return model_spec(directory, "transformers")


@pytest.mark.parametrize("before", ["", "model."])
def test_the_text_part_of_a_model_that_reads_images_runs(
    before: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the text part's tensors have the names that newer checkpoints give them."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    vision |= {"num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
    text = {"model_type": "starcoder2", **SMALL, "initializer_range": 0.25}
    torch.manual_seed(0)
    whole = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config=text, vision_config={"model_type": "clip_vision_model", **vision}
        )
    )
    whole.save_pretrained(tmp_path)
    if before:
        path = tmp_path / "model.safetensors"
        names = ("language_model.model.", "model.language_model."), ("language_model.lm", "lm")
        tensors = {
            name.replace(*names[0]).replace(*names[1]): tensor
            for name, tensor in load_file(path).items()
        }
        save_file(tensors, path, {"format": "pt"})
    spec = model_spec(tmp_path)
    with caplog.at_level(logging.WARNING, "quire"):
        model = load_model(tmp_path, spec, torch.float64, CPU)
    assert "models of type llava also read images; only the text part is served" in caplog.text
    run = {"backend": "reference", "dtype": torch.float64}
    [got] = run_paged(model, spec, SEQUENCES[:1], [[20, 3]], **run)
    whole = transformers.LlavaForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="sdpa"
    ).eval()
    with torch.inference_mode():
        wanted = whole(torch.tensor(SEQUENCES[:1])).logits[0]
    assert wanted.std() > 0.2
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


FULL = "full_attention"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "state": ("mamba", {"hidden_size": 32, "num_hidden_layers": 1}, "are 'linear_attention'"),
    "alibi": ("bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 4}, "no layer attends"),
    "looks_ahead": ("bert", SMALL, "neither causal nor causal within a window"),
    "chunked": ("llama4_text", SMALL | {"num_local_experts": 2}, "are 'chunked_attention'"),
    "conv": ("lfm2", SMALL | {"layer_types": ["conv", FULL, "conv"]}, "[0, 2] are 'conv'"),
    "jamba": ("jamba", SMALL | {"attn_layer_offset": 1}, "[0, 2] are 'linear_attention'"),
    "minimax": ("minimax", SMALL, "[1] are 'linear_attention' (layer_types) and keep a state"),
    "kimi_linear": ("kimi_linear", SMALL, "[0, 1, 2] are 'linear_attention'"),
    "own_attention": ("jetmoe", SMALL, "computes by the values of its inputs"),
    "some_layers": ("recurrent_gemma", SMALL | {"head_dim": 8}, "[0, 1] are 'linear"),
    "twice": ("diffllama", SMALL, "attends more than once"),
    "own_mask": ("doge", SMALL, "a mask that its own code makes"),
    "window_unmasked": ("olmoe", SMALL | {"sliding_window": 6}, "asks for a window of 6"),
    "cap_of_0": ("gemma2", SMALL | {"head_dim": 8, "attn_logit_softcapping": 0.0}, "scores at 0"),
    "rope": (
        "llama",
        SMALL | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type is 'dynamic'",
    ),
    "encoder": ("t5", {}, "no text-generation class"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_be_exact_are_refused(case: str, tmp_path: Path) -> None:
    model_type, config, reason = REFUSED[case]
    with pytest.raises(ModelError) as refused:
        model_spec_of(tmp_path, model_type, config)
    assert reason in str(refused.value)


@pytest.mark.parametrize("name", ["Infinity", "-Infinity", "NaN"])
def test_non_finite_numbers_may_be_objects(name: str, tmp_path: Path) -> None:
    """transformers writes them as `{"__float__": "NaN"}`."""
    config = SMALL | ALL_ATTEND | {"model_type": "granitemoehybrid"}
    config["time_step_limit"] = [0, {"__float__": name}]
    (tmp_path / "config.json").write_text(json.dumps(config))
    limit = model_spec(tmp_path).raw["time_step_limit"]
    assert str(limit) == str([0.0, float(name)])


def test_other_objects_are_not_read_as_numbers(tmp_path: Path) -> None:
    config = SMALL | ALL_ATTEND | {"model_type": "granitemoehybrid"}
    for odd in ({"__float__": "1.5"}, {"__float__": "NaN", "more": 1}, {"__float__": [1]}):
        config["time_step_limit"] = [0.0, odd]
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match="refuses config.json: .*'time_step_limit'"):
            model_spec(tmp_path)


def test_head_dims_that_differ_by_layer_are_refused(tmp_path: Path) -> None:
    config = WINDOW | {"model_type": "gemma4_text", "global_head_dim": 16, "num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"its layers differ in head_dim: \[8, 16\]"):
        model_spec(tmp_path)


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    config = SMALL | {"model_type": "homemade", "auto_map": {"AutoConfig": "made.HomeConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "made.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ModelError, match="does not support models of type 'homemade'.*never run"):
        model_spec(tmp_path, "transformers")


def test_unsupported_quantisation_is_refused(tmp_path: Path) -> None:
    config = SMALL | {"model_type": "stablelm", "quantization_config": {"quant_method": "aqlm"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="aqlm"):
        model_spec(tmp_path)


def test_auto_prefers_quires_class(tmp_path: Path) -> None:
    transformers.AutoConfig.for_model("llama", **SMALL).save_pretrained(tmp_path)
    assert model_spec(tmp_path).implementation == "quire"
    assert model_spec(tmp_path, "transformers").implementation == TRANSFORMERS
    transformers.AutoConfig.for_model("stablelm", **SMALL).save_pretrained(tmp_path)
    assert model_spec(tmp_path).implementation == TRANSFORMERS


def test_a_missing_transformers_package_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = write_reference(tmp_path, "stablelm", SMALL)
    monkeypatch.setattr(configs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r'pip install "quire\[transformers\]"'):
        model_spec(tmp_path, "transformers")
    spec = model_spec(tmp_path)
    with pytest.raises(ModelError, match=r"'stablelm' is not supported.*quire\[transformers\]"):
        load_model(reference.directory, spec, torch.float32, CPU)


def test_gguf_files_are_refused_for_transformers_classes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="GGUF files need one of quire's classes"):
        model_spec(path, "transformers")


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        pytest.param("stablelm", "float blocks", marks=pytest.mark.slow),
        ("cohere", "gptq ordered"),
        pytest.param("stablelm", "gptq ordered", marks=pytest.mark.slow),
        pytest.param("cohere", "float blocks", marks=pytest.mark.slow),
    ],
)
def test_quantised_checkpoints_match_plain_ones(model_type: str, name: str, tmp_path: Path) -> None:
    """In float32, cohere loads its rows in another order."""
    quantised, plain = write_quantised(tmp_path, FORMATS[name], model_type)
    sequences, chunks = SEQUENCES[1:2], [[4, 1]]
    for dtype, backend in ((torch.float64, "reference"), (torch.float32, "torch")):
        options = LoadOptions(formats=IN_THE_DTYPE)
        got, wanted = (
            run_paged(
                load_model(path, model_spec(path, "transformers"), dtype, CPU, options),
                model_spec(path, "transformers"),
                sequences,
                chunks,
                backend=backend,
                dtype=dtype,
            )
            for path in (quantised, plain)
        )
        torch.testing.assert_close(got, wanted)
