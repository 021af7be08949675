"""hf_overrides: a changed config.json with the same weight files."""

import json
from pathlib import Path

import pytest

from quire import LLM
from quire.base.errors import ConfigError, ModelError
from quire.base.settings.config import ModelConfig
from quire.models.checkpoint.source import (
    MAX_DIRECTORIES,
    merged,
    overridden,
    resolve_model,
    resolve_source,
)
from quire.spec.model_spec import load_spec
from tests.support.models.reference_checkpoints import text_checkpoint


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quire" / "overrides"


def test_objects_are_merged_and_other_values_replaced() -> None:
    config = {"a": 1, "inner": {"b": 2, "deep": {"c": [1]}}, "rope_scaling": {"factor": 2}}
    changes = {"inner": {"deep": {"c": [2]}, "new": None}, "rope_scaling": None, "d": {"e": 5}}
    assert merged(config, changes) == {
        "a": 1,
        "inner": {"b": 2, "deep": {"c": [2]}, "new": None},
        "rope_scaling": None,
        "d": {"e": 5},
    }
    assert config["inner"] == {"b": 2, "deep": {"c": [1]}}


def test_overrides_resolve_to_a_directory_with_the_changed_config(cache: Path) -> None:
    plain = resolve_model("demo").directory
    model = ModelConfig(hf_overrides=json.dumps({"rope_theta": 12345.0}))
    changed = resolve_source(model)
    assert changed.name == "demo" and changed.directory.parent == cache
    assert {path.name for path in changed.directory.iterdir()} == {p.name for p in plain.iterdir()}
    mine, theirs = load_spec(changed.directory), load_spec(plain)
    assert (mine.hidden_size, mine.model_type) == (theirs.hidden_size, theirs.model_type)
    assert mine.identity != theirs.identity, "they would share cached blocks"
    assert resolve_source(model).directory == changed.directory
    assert resolve_source(ModelConfig()).directory == plain


def test_a_changed_model_gets_a_new_directory(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "weights").write_text("1")
    first = overridden(model, {"a": 1})
    assert overridden(model, {"a": 1}) == first
    assert overridden(model, {"a": 2}) != first
    (model / "more").write_text("2")
    second = overridden(model, {"a": 1})
    assert second != first and (second / "more").read_text() == "2"


def test_the_number_of_directories_is_bounded(tmp_path: Path, cache: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for number in range(MAX_DIRECTORIES + 3):
        assert overridden(model, {"a": number}).is_dir()
    assert len(list(cache.iterdir())) <= MAX_DIRECTORIES


def test_invalid_overrides_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no config.json"):
        overridden(tmp_path, {"a": 1})
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="GGUF"):
        overridden(file, {"a": 1})
    for wrong in ("[1]", "{", len):
        with pytest.raises(ConfigError, match="hf_overrides"):
            ModelConfig(hf_overrides=wrong)  # type: ignore[arg-type]


def test_unsupported_values_in_overrides_are_refused() -> None:
    with pytest.raises(ModelError, match="hidden_act"):
        LLM(str(text_checkpoint()), hf_overrides={"hidden_act": "swash"}, disable_log_stats=True)
