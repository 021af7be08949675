"""Log lines as text and JSON, with time, level and request; secrets are masked."""

import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.base.settings.secrets import Secret, SecretUrl
from quire.engine.wire.logs import (
    FORMAT_VARIABLE,
    JSON,
    TEXT,
    choose_format,
    current_request,
    log_format,
    make_formatter,
    print_error,
)
from tests.support.processes.forks import run_forked

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
STORE = SecretUrl("redis://user:hunter2@cache:6379/0")


class Lines:
    """Captures the output of a logger."""

    def __init__(self, kind: str, process: str = "", is_terminal: bool = False) -> None:
        self._stream = io.StringIO()
        handler = logging.StreamHandler(self._stream)
        handler.setFormatter(make_formatter(kind, process, is_terminal=is_terminal))
        self.logger = logging.Logger("quire")
        self.logger.addHandler(handler)

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def request_id() -> Iterator[str]:
    token = current_request.set("req-7")
    yield "req-7"
    current_request.reset(token)


def test_text_lines_have_time_level_process_and_request() -> None:
    lines = Lines(TEXT)
    lines.logger.warning("no room for %d", 3)
    assert re.fullmatch(rf"{TIME} WARNING quire: no room for 3\n", lines.text)
    named = Lines(TEXT, "core 1")
    named.logger.error("stopped", extra={"request_id": "a"})
    named.logger.error("request b failed", extra={"request_id": "b"})
    first, second = named.text.splitlines()
    assert re.fullmatch(rf"{TIME} ERROR core 1 \[a\]: stopped", first)
    assert re.fullmatch(rf"{TIME} ERROR core 1: request b failed", second), "the id is repeated"


def test_terminal_lines_have_only_the_message() -> None:
    for process, expected in (("", "ready\n"), ("core 1", "core 1: ready\n")):
        lines = Lines(TEXT, process, is_terminal=True)
        lines.logger.info("ready")
        assert lines.text == expected


def test_json_lines_have_all_fields() -> None:
    lines = Lines(JSON, "core 1", is_terminal=True)
    lines.logger.info('a "quote"\nand a line', extra={"num_tokens": 3, "sizes": (1, 2)})
    [line] = lines.objects
    assert re.fullmatch(TIME, line["time"])
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    assert line == {
        "level": "info", "logger": "quire", "message": 'a "quote"\nand a line', "request_id": None,
        "process": "core 1", "num_tokens": 3, "sizes": [1, 2],
    }  # fmt: skip


def test_json_line_contains_the_traceback() -> None:
    lines = Lines(JSON)
    try:
        raise ValueError("made to fail")
    except ValueError:
        lines.logger.exception("it failed")
    [line] = lines.objects
    assert line["level"] == "error" and "ValueError: made to fail" in line["error"]


@pytest.mark.parametrize("kind", [TEXT, JSON])
def test_lines_name_the_current_request(kind: str, request_id: str) -> None:
    lines = Lines(kind)
    lines.logger.info("slow")
    lines.logger.info("slow", extra={"request_id": "other"})
    first, second = lines.text.splitlines()
    assert request_id in first and "other" in second and request_id not in second


@pytest.mark.parametrize("kind", [TEXT, JSON])
def test_secrets_are_masked(kind: str) -> None:
    lines = Lines(kind)
    key = Secret("sesame")
    lines.logger.info("store %s, keys %s", STORE, (key, key))
    lines.logger.info(key)
    lines.logger.info("fields", extra={"store": STORE, "keys": [key], "of": {"a": {"b": key}}})
    assert "sesame" not in lines.text and "hunter2" not in lines.text
    assert "redis://user:***@cache:6379/0" in lines.text


def test_environment_variable_sets_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORMAT_VARIABLE, raising=False)
    choose_format(None)
    assert log_format() == TEXT
    monkeypatch.setenv(FORMAT_VARIABLE, TEXT)  # so that it is restored afterwards
    choose_format(JSON)
    assert log_format() == JSON, "child processes do not inherit the format"
    monkeypatch.setenv(FORMAT_VARIABLE, "xml")
    with pytest.raises(ConfigError, match="QUIRE_LOG_FORMAT must be text or json, got 'xml'"):
        choose_format(None)


def test_fatal_errors_are_printed_in_the_chosen_format(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORMAT_VARIABLE, TEXT)
    print_error(ConfigError("port must be lower"))
    assert capsys.readouterr().err == "quire: port must be lower\n"
    monkeypatch.setenv(FORMAT_VARIABLE, JSON)
    print_error(ConfigError("port must be lower"))
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["message"]) == ("error", "port must be lower")


@pytest.mark.parametrize("kind", [TEXT, JSON])
def test_command_logs_its_settings_without_secrets(kind: str) -> None:
    line = f"serve --api-key sesame --log-level debug --log-format {kind} --port 99999 --kv-store"
    command = [sys.executable, "-m", "quire.cli.main", *line.split(), STORE.reveal()]
    done = run_forked(command)
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and "sesame" not in done.stderr and "hunter2" not in done.stderr
    if kind == JSON:
        found = [json.loads(line) for line in lines]
        assert found[-1]["message"] == "port must be from 0 to 65535, got 99999."
        assert {line["level"] for line in found} == {"debug", "warning", "error"}
        return
    assert all(re.match(rf"{TIME} (DEBUG|WARNING) quire: ", line) for line in lines[:-1])
    assert lines[-1] == "quire: port must be from 0 to 65535, got 99999."


@pytest.mark.parametrize(("level", "is_shown"), [("info", False), ("debug", True)])
def test_download_requests_are_logged_only_at_debug_level(level: str, is_shown: bool) -> None:
    code = (
        "import logging; from quire.engine.wire.logs import begin_logging\n"
        f"begin_logging({level!r})\n"
        "logging.getLogger('httpx').info('GET'); logging.getLogger('quire').info('quire')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("GET" in done.stderr, "quire" in done.stderr) == (is_shown, True)
