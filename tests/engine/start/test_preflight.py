"""Errors in settings and in the model's config are reported before weights are read.

Covers `engine/start/preflight.py`.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.base.clock import MonotonicClock
from quire.base.errors import ConfigError, ModelError
from quire.base.settings.config import config_from_flat
from quire.engine.start.build import build_core, build_engine
from quire.engine.start.preflight import check_before_loading
from quire.models.checkpoint.source import resolve_model, resolve_source
from tests.support.commands import run

CONFIG = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 40,
    "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
# Contents of config.json, and the error; None means no file.
CONFIGS: dict[str, tuple[str | None, str]] = {
    "absent": (None, "has no config.json, so it is not a model"),
    "broken": ('{"a":', "is not valid JSON"),
    "no object": ("[]", "must hold a JSON object, not list"),
    "no type": ("{}", "has no model_type"),
    "unknown type": ('{"model_type": "nothing"}', "'nothing'"),
    "no sizes": ('{"model_type": "llama"}', "none of the fields num_hidden_layers"),
    "fine": (json.dumps(CONFIG), r"has no \*.safetensors files"),
}


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if weights are loaded."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("quire.runner.build.load_model", refuse)
    monkeypatch.setattr("quire.engine.start.build.start_warm", refuse)


@pytest.mark.parametrize("name", CONFIGS)
def test_invalid_model_directory_error_gives_the_reason(name: str, tmp_path: Path) -> None:
    text, reason = CONFIGS[name]
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    config = config_from_flat(model=str(tmp_path))
    source = resolve_source(config.model)
    with pytest.raises(ModelError, match=reason):
        build_core(config, source, MonotonicClock())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_model_len": 4096}, "max_model_len=4096 is more than the model supports"),
        ({"chat_template": "/nowhere.jinja"}, "'/nowhere.jinja' is neither a file nor"),
        ({"chat_template": "x" * 5000}, "is neither a file nor the text of a template"),
        ({"chat_template": "/bin/true"}, "'/bin/true' cannot be read"),
        ({"tool_call_parser": "mine"}, "'mine'"),
        ({"pin_prefix": "/nowhere.txt"}, "pin_prefix='/nowhere.txt' cannot be read"),
        ({"record": "/dev/null/here"}, "record='/dev/null/here' cannot be written"),
    ],
)
@pytest.mark.usefixtures("unreadable")
def test_invalid_settings_are_reported_before_loading(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_engine(config_from_flat(**{"model": "demo", **settings}))


@pytest.mark.usefixtures("unreadable")
@pytest.mark.parametrize("name", ["absent", "fine"])
def test_invalid_draft_model_is_reported_before_loading(name: str, tmp_path: Path) -> None:
    text, reason = CONFIGS[name]
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    speculation = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    with pytest.raises(ModelError, match=reason):
        build_engine(config_from_flat(model="demo", speculative_config=speculation))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"hello", "it does not begin with GGUF"),
        (b"GGUF\x03\0\0\0", "it ends after 8 bytes"),
        (b"", "cannot be read"),
    ],
)
@pytest.mark.usefixtures("unreadable")
def test_invalid_gguf_file_is_reported_before_loading(
    data: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "fake.gguf"
    path.write_bytes(data)
    config = config_from_flat(model=str(path))
    with pytest.raises(ModelError, match=reason):
        check_before_loading(config, resolve_source(config.model))


@pytest.mark.parametrize("model", ["demo", "shape:qwen3-0.6b"])
def test_valid_models_pass(model: str) -> None:
    config = config_from_flat(model=model, max_model_len=1024)
    check_before_loading(config, resolve_source(config.model))


def test_max_model_len_of_minus_one_passes() -> None:
    config = config_from_flat(model="demo", max_model_len=-1)
    check_before_loading(config, resolve_source(config.model))


@pytest.mark.usefixtures("unreadable")
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_chat_without_a_template_fails_before_loading(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(resolve_model("demo").directory, tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    fields.pop("chat_template", None)
    path.write_text(json.dumps(fields))
    words = ["hello"] if command == "generate" else []
    status, out, err = run(capsys, command, *words, "--model", str(folder))
    assert (status, out) == (1, "")
    assert "this model has no chat template" in err


@pytest.mark.usefixtures("unreadable")
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_sampling_options_are_checked_before_loading(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["hello"] if command == "generate" else []
    status, out, err = run(capsys, command, *words, "--temperature", "-1")
    assert (status, out) == (1, "")
    assert "temperature must be from 0 to 2" in err


@pytest.mark.parametrize("arguments", [("--max-model-len", "1M"), ("--chat-template", "/no")])
def test_server_reports_errors_before_it_starts_a_process(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a process is started")

    monkeypatch.setattr("quire.serve.processes.launch.start_child", refuse)
    monkeypatch.setattr("quire.serve.supervisor.start_child", refuse)
    for models in (["demo"], ["a=demo", "b=demo"]):
        status, _, err = run(capsys, "serve", *models, "--port", "0", *arguments)
        assert status == 1
        assert arguments[0].removeprefix("--").replace("-", "_") in err


def test_preflight_does_not_import_torch() -> None:
    code = (
        "import quire.engine.start.preflight, sys;"
        " print({'torch', 'numpy', 'jinja2'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
