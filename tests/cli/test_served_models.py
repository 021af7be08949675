"""The models given to `quire serve`: `cli/served_models.py`."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.base.settings.config import ServerConfig
from quire.cli.config_file import resolve
from quire.cli.main import _parse
from quire.cli.served_models import ModelEntry, entry_of, served_models
from quire.cli.settings import given_for_all, given_server_settings, given_settings
from quire.serve.several.served import ServedModel, check_together, named, own_record
from tests.support.models.reference_checkpoints import checkpoint


def parse(*line: str) -> argparse.Namespace:
    arguments = _parse(["serve", *line])
    resolve(arguments)
    return arguments


def models_of(*line: str) -> list[ServedModel]:
    arguments = parse(*line)
    server = ServerConfig(**given_server_settings(arguments))
    return served_models(arguments.settings.get("models"), given_for_all(arguments), server)


def names_of(*line: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(each.engine.model.model, each.names) for each in models_of(*line)]


def file_of(folder: Path, text: str) -> str:
    path = folder / "quire.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ([], [("demo", ())]),
        (["x"], [("x", ())]),
        (["x", "--served-model-name", "a", "b"], [("x", ("a", "b"))]),
        (["a=x"], [("x", ("a",))]),
        (["a=x", "--served-model-name", "b"], [("x", ("b",))]),
        (["x", "y"], [("x", ()), ("y", ())]),
        (["a=x", "own/y", "c=own/z"], [("x", ("a",)), ("own/y", ()), ("own/z", ("c",))]),
        (["--port", "1", "x", "b=y"], [("x", ()), ("y", ("b",))]),
        (["x", "--model", "x"], [("x", ())]),
    ],
)
def test_words_become_models_and_names(
    line: list[str], expected: list[tuple[str, tuple[str, ...]]]
) -> None:
    assert names_of(*line) == expected


def test_settings_apply_to_all_models() -> None:
    models = models_of("x", "y", "--max-model-len", "4k")
    assert [each.engine.model.max_model_len for each in models] == [4000, 4000]


def test_existing_path_is_not_split_at_the_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a=b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert entry_of("a=b") == ModelEntry("a=b")
    assert entry_of("a=c") == ModelEntry("c", ("a",))
    assert entry_of("some/a=b") == ModelEntry("some/a=b")


@pytest.mark.parametrize("word", ["=x", "a="])
def test_incomplete_names_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="NAME=MODEL"):
        entry_of(word)


def test_words_and_model_flag_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="'x y' and --model 'z'; give all models without"):
        parse("x", "y", "--model", "z")


def test_file_lists_models_with_their_own_settings(tmp_path: Path) -> None:
    config = file_of(
        tmp_path,
        """
        max-model-len: 4k
        models:
          - x
          - c=y
          - {model: z, name: [d, e], max-model-len: 2k, kv_cache_memory_bytes: 1M}
        """,
    )
    models = models_of("--config", config)
    assert [each.names for each in models] == [(), ("c",), ("d", "e")]
    assert [each.engine.model.max_model_len for each in models] == [4000, 4000, 2000]
    assert [each.own_pool_bytes for each in models] == [None, None, 1 << 20]
    # Words override the file; a setting of one model overrides a flag for all.
    assert names_of("w", "--config", config) == [("w", ())]
    assert names_of("v", "w", "--config", config) == [("v", ()), ("w", ())]
    lengths = models_of("--config", config, "--max-model-len", "1k")
    assert [each.engine.model.max_model_len for each in lengths] == [1000, 1000, 2000]


def test_commands_for_one_model_need_a_choice_among_several(tmp_path: Path) -> None:
    config = file_of(tmp_path, "models: [x, y]")
    for line, has_choice in ((["--config", config], False), (["z", "--config", config], True)):
        arguments = _parse(["doctor", *line])
        resolve(arguments)
        if has_choice:
            assert given_settings(arguments)["model"] == "z"
            continue
        with pytest.raises(ConfigError, match="several models.*name one of them with --model"):
            given_settings(arguments)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("models: x", "must be a list"),
        ("models: []", "must be a list"),
        ("models: [1]", "must be a string or settings, got 1"),
        ("models: [{name: a}]", "lacks `model`"),
        ("models: [{model: x, port: 1}]", "no setting 'port'"),
        ("models: [{model: x, max-model-len: long}]", "max-model-len of an entry of models must"),
        ("models: [{model: x, name: 3}]", "names of an entry of models must be strings"),
        ("model: y\nmodels: [x]", "both model and models"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse("--config", file_of(tmp_path, text))


def test_invalid_setting_is_reported_with_its_model(tmp_path: Path) -> None:
    config = file_of(tmp_path, "models: [x, {model: y, block-size: -1}]")
    with pytest.raises(ConfigError, match="model y: block_size"):
        models_of("--config", config)


# ---- several models ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--served-model-name", "a", "b"], "served_model_name=a b is for one model.*NAME=MODEL"),
        (["--data-parallel-size", "2"], "data_parallel_size=2"),
        (["--nnodes", "2", "-tp", "2"], "nnodes=2"),
        (["--kv-events-config", '{"enable_kv_cache_events": true}'], "cannot publish at tcp"),
    ],
)
def test_settings_of_one_model_are_refused_for_several(flags: list[str], error: str) -> None:
    server = ServerConfig(**given_server_settings(parse("x", "y", *flags)))
    with pytest.raises(ConfigError, match=error):
        check_together(models_of("x", "y", *flags), server)


def test_names_come_from_sources_and_must_differ() -> None:
    path = str(checkpoint("llama"))
    found = named(models_of("demo", f"b={path}"))
    assert [each.names for each in found] == [("demo",), ("b",)]
    with pytest.raises(ConfigError, match=f"called 'demo' .demo and {path}.*OTHER={path}"):
        named(models_of("demo", f"demo={path}"))


def test_each_model_has_its_own_recording(tmp_path: Path) -> None:
    [model] = models_of("x=demo", "--record", str(tmp_path))
    assert own_record(model).engine.record == str(tmp_path / "x")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_loaded_models", 0), ("idle_unload_s", -1.0), ("model_wait_s", float("nan"))],
)
def test_invalid_limits_are_refused(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=setting):
        ServerConfig(**{setting: value})
