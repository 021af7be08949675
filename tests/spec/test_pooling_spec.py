"""Whether and how a model pools, according to its files and the settings."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError, ModelError
from quire.base.requests.pooling import PoolingSpec
from quire.base.settings.config import ModelConfig
from quire.spec.pooling_spec import pooling_of


def spec_of(folder: Path, config: dict[str, Any], **settings: Any) -> PoolingSpec | None:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"} | config))
    given = settings.pop("pooler_config", None)
    pooler_text = None if given is None else json.dumps(given)
    return pooling_of(folder, ModelConfig(str(folder), pooler_config=pooler_text, **settings))


def modules(folder: Path, *kinds: str, **pooling: Any) -> None:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    found = [{"type": f"st.models.{kind}", "path": "1_Pooling"} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("name", "settings", "task"),
    [
        ("Qwen3ForCausalLM", {}, None),
        ("Qwen3ForCausalLM", {"runner": "pooling"}, "embed"),
        ("Qwen3ForCausalLM", {"convert": "embed"}, "embed"),
        ("GPT2LMHeadModel", {}, None),
        ("Qwen3Model", {}, "embed"),
        ("Qwen3Model", {"runner": "generate"}, None),
        ("Qwen3ForSequenceClassification", {}, "classify"),
        ("Qwen3ForSequenceClassification", {"convert": "embed"}, "embed"),
    ],
)
def test_architecture_selects_the_task_unless_settings_do(
    tmp_path: Path, name: str, settings: dict[str, str], task: str | None
) -> None:
    found = spec_of(tmp_path, {"architectures": [name]}, **settings)
    assert (found and found.task) == task


def test_sentence_transformers_files_set_the_pooling(tmp_path: Path) -> None:
    modules(tmp_path, "Transformer", "Pooling", pooling_mode_mean_tokens=True, word_dim=3)
    found = spec_of(tmp_path, {"architectures": ["Qwen3ForCausalLM"]})
    assert found == PoolingSpec("embed", "mean")
    assert found.needs_all
    changed = spec_of(tmp_path, {}, pooler_config={"pooling_type": "CLS", "use_activation": True})
    assert changed == PoolingSpec("embed", "cls", normalize=True)


@pytest.mark.parametrize(
    ("kinds", "pooling", "words"),
    [
        (["Pooling"], {"pooling_mode_max_tokens": True}, "max_tokens"),
        (["Pooling"], {"pooling_mode_cls_token": True, "pooling_mode_lasttoken": True}, " and "),
        (["Pooling", "CNN"], {"pooling_mode": "lasttoken"}, "'CNN'"),
    ],
)
def test_unsupported_modules_are_rejected(
    tmp_path: Path, kinds: list[str], pooling: dict[str, Any], words: str
) -> None:
    modules(tmp_path, *kinds, **pooling)
    with pytest.raises(ModelError, match=words):
        spec_of(tmp_path, {})


def test_module_path_outside_the_model_is_rejected(tmp_path: Path) -> None:
    entry = {"type": "Pooling", "path": "../1_Pooling"}
    (tmp_path / "modules.json").write_text(json.dumps([entry]))
    with pytest.raises(ModelError, match="not a directory of the model"):
        spec_of(tmp_path, {})


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"num_labels": 3}, "softmax"),
        ({"num_labels": 1}, "sigmoid"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression", "num_labels": 1}, "none"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}}, "sigmoid"),
    ],
)
def test_config_sets_the_activation_of_a_classifier(
    tmp_path: Path, config: dict[str, Any], activation: str
) -> None:
    found = spec_of(tmp_path, {"architectures": ["Qwen3ForSequenceClassification"]} | config)
    assert found is not None
    assert found.activation == activation
    assert found.is_scorer == (config.get("num_labels") == 1)


def test_labels_are_read_from_id2label(tmp_path: Path) -> None:
    named = {"id2label": {"1": "bad", "0": "good"}, "architectures": ["XForSequenceClassification"]}
    found = spec_of(tmp_path, named)
    assert found is not None and found.labels == ("good", "bad")
    with pytest.raises(ModelError, match="id2label"):
        spec_of(tmp_path, named | {"id2label": {"1": "bad", "2": "worse"}})


def test_matryoshka_dimensions_are_read(tmp_path: Path) -> None:
    for config, dimensions in (
        ({}, None),
        ({"is_matryoshka": False}, ()),
        ({"matryoshka_dimensions": [32, 64]}, (32, 64)),
    ):
        found = spec_of(tmp_path, config | {"architectures": ["Qwen3Model"]})
        assert found is not None and found.dimensions == dimensions


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"runner": "generate", "convert": "embed"}, "convert='embed' is for models that pool"),
        ({"pooler_config": {"pooling_type": "MEAN"}}, "pooler_config is for models that pool"),
        ({"runner": "pooling", "pooler_config": {"pool": 1}}, "has no 'pool'"),
        ({"runner": "pooling", "pooler_config": {"pooling_type": "MAX"}}, "LAST, MEAN or CLS"),
        ({"runner": "pooling", "pooler_config": {"normalize": 1}}, "must be a boolean"),
    ],
)
def test_conflicting_settings_are_rejected(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        spec_of(tmp_path, {"architectures": ["Qwen3ForCausalLM"]}, **settings)
