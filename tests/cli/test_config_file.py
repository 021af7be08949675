"""`--config FILE`, where settings come from, and vLLM's flags that have no counterpart here."""

import argparse
import logging
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.cli.config_file import describe, read_config_file, resolve
from quire.cli.main import _parse
from quire.cli.settings import (
    Given,
    all_options,
    given_server_settings,
    given_settings,
    human_integer,
)
from quire.serve.vllm_compat import VLLM_SETTINGS
from tests.support.commands import run

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> str:
    path = folder / "quire.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def parse(*line: str) -> argparse.Namespace:
    arguments = _parse(line)
    resolve(arguments)
    return arguments


# ---- the file --------------------------------------------------------------------------------


def test_file_may_hold_every_kind_of_setting(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        model: demo                 # comments are fine
        max-model-len: auto
        max_num_seqs: 4k
        gpu-memory-utilization: 1
        shutdown-timeout: 2.5
        enable-prefix-caching: false
        served-model-name: [a, b]
        api-key: "12345"
        dtype: float32
        tokenizer: null
        log-level: warning
        """,
    )
    arguments = parse("serve", "--config", path)
    assert given_settings(arguments) == {
        "model": "demo",
        "max_model_len": -1,
        "max_num_seqs": 4000,
        "gpu_memory_utilization": 1.0,
        "enable_prefix_caching": False,
        "dtype": "float32",
        "tokenizer": None,
    }
    assert given_server_settings(arguments) == {
        "shutdown_timeout": 2.5,
        "served_model_name": ("a", "b"),
        "api_key": ("12345",),
    }
    assert arguments.log_level == "warning"


def test_flags_override_the_file_and_origins_are_described(tmp_path: Path) -> None:
    path = write(tmp_path, "block-size: 8\nseed: 3\nport: 1234\napi-key: hidden\n")
    arguments = parse("serve", "--config", path, "--seed", "5", "--max-num-seqs", "2")
    assert given_settings(arguments) == {"block_size": 8, "seed": 5, "max_num_seqs": 2}
    assert describe(arguments.settings) == [
        f"api_key = 1 given ({path})",
        f"block_size = 8 ({path})",
        "max_num_seqs = 2 (flag)",
        f"port = 1234 ({path})",
        "seed = 5 (flag)",
    ]


def test_debug_log_shows_the_origin_of_settings(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    from quire.serve import supervisor

    monkeypatch.setattr(supervisor, "serve", lambda *_: 0)
    path = write(tmp_path, "block-size: 8\nlog-level: debug\n")
    caplog.set_level(logging.DEBUG, "quire")
    assert run(capsys, "serve", "--config", path, "--port", "0")[0] == 0
    assert f"block_size = 8 ({path})" in caplog.messages
    assert "port = 0 (flag)" in caplog.messages


def test_commands_ignore_settings_of_other_commands(tmp_path: Path) -> None:
    path = write(tmp_path, "port: 1234\nblock-size: 8\n")
    for command in ("generate", "chat", "doctor"):
        assert given_settings(parse(command, "--config", path)) == {"block_size": 8}


def test_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert read_config_file(Path(write(tmp_path, "# nothing\n"))) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-modle-len: 5", "no setting 'max-modle-len'. Did you mean max-model-len?"),
        ("xyzzy: 5", "no setting 'xyzzy'. `quire serve --help all`"),
        ("block-size: lots", "block-size must be a whole number such as 4096 or 4k, got 'lots'"),
        ("block-size: 1.5", "block-size must be a whole number such as 4096 or 4k, got 1.5"),
        ("block-size: true", "got True"),
        ("block-size: [1]", "got [1]"),
        ("block-size:", "got None"),
        ("max-model-len: long", "4k or auto, got 'long'"),
        ("watermark: .nan", "watermark must be a number such as 0.9, got nan"),
        ("max-num-seqs: .inf", "got inf"),
        ("enable-prefix-caching: 1", "enable-prefix-caching must be true or false, got 1"),
        ("revision: 123", "must be a string (in quotes if it looks like a number), got 123"),
        (
            "dtype: int3",
            "dtype must be one of auto, float32, bfloat16, float16, float64, got 'int3'",
        ),
        ("served-model-name: [a, 5]", "served-model-name must be a string"),
        ("block-size: 8\nblock_size: 9", "block_size is set twice, the second time as"),
        ("device-memory-utilization: 1\ngpu-memory-utilization: 1", "is set twice"),
        ("- a\n- b", "must hold lines such as"),
        ("a: [", "is not valid YAML"),
        ("grpc: true", "grpc=True is not supported: the server speaks HTTP"),
    ],
)
def test_errors_show_file_key_and_value(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    status, out, err = run(capsys, "generate", "x", "--config", write(tmp_path, text))
    assert (status, out) == (1, "")
    assert message in err
    assert "grpc" in text or "quire.yaml" in err


def test_invalid_api_key_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config_file(Path(write(tmp_path, "api-key: 918273")))
    assert "918273" not in str(caught.value) and "api-key must be a string" in str(caught.value)


def test_missing_file_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "generate", "x", "--config", "/no/file")
    assert (status, err) == (1, "quire: /no/file cannot be read: No such file or directory.\n")


# ---- flags -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("-1", -1), ("4k", 4000), ("4K", 4096), ("2.5M", 5 << 19), ("1e4", 10_000)],
)
def test_integers_accept_suffixes(text: str, value: int) -> None:
    assert human_integer(text) == value


@pytest.mark.parametrize("text", ["", "k", "4kk", "x", "1.5", "0.0001k", "inf", "nan", "1e999"])
def test_invalid_integers_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="number"):
        human_integer(text)


def test_command_without_flags_sets_nothing() -> None:
    arguments = parse("serve")
    assert (arguments.settings, arguments.log_level) == ({}, "info")


def test_each_setting_is_an_option_and_not_a_vllm_flag() -> None:
    options = all_options()
    assert {"model", "block_size", "max_num_seqs", "device", "api_key", "log_level"} <= set(options)
    assert not set(options) & set(VLLM_SETTINGS)
    assert all(option.help for option in options.values())


# ---- flags of vLLM ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--cudagraph-capture-sizes 1", "is ignored: graphs are recorded for the sizes in use."),
        ("--no-trust-remote-code", "trust_remote_code (flag) is ignored"),
        ("--trust-remote-code", "trust_remote_code (flag) is ignored: quire runs only its own"),
        ("--max-parallel-loading-workers 1", "max_parallel_loading_workers (flag) is ignored"),
        ("--compilation-config {}", "compilation_config (flag) is ignored"),
        ("--swap_space=4", "swap_space (flag) is ignored"),
        ("--uvicorn-log-level error", "--log-level applies to all loggers"),
    ],
)
def test_flags_without_effect_are_ignored_with_a_note(flags: str, note: str) -> None:
    arguments = _parse(["serve", *flags.split()])
    (note_line,) = resolve(arguments)
    assert note in note_line
    assert arguments.settings == {}


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--grpc", "grpc=True is not supported"),
        ("--no-enable-chunked-prefill", "prompts are always computed in chunks"),
        ("--speculative-config {", "speculative_config must be JSON"),
        ('--speculative-config {"method":"medusa"}', "method must be one of ngram, suffix, "),
    ],
)
def test_flags_of_unsupported_features_are_refused(
    capsys: pytest.CaptureFixture[str], flags: str, error: str
) -> None:
    status, out, err = run(capsys, "serve", *flags.split())
    assert (status, out) == (1, "")
    assert error in err


def test_note_on_an_ignored_flag_is_logged(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run(capsys, "generate", "", "--max-seq-len-to-capture", "9")
    note = "max_seq_len_to_capture (flag) is ignored: graphs work for every length."
    assert note in caplog.messages


def test_file_settings_remember_their_origin(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 3")
    expected: dict[str, Any] = {"seed": Given(3, path)}
    assert read_config_file(Path(path)) == expected
