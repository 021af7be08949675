"""Log of quire's processes on standard error, as text or JSON.

On a terminal a line is only the message, after the process's name if it has one. Elsewhere it
begins with time, level, process name and the id of the request that it concerns:

    2026-11-28T14:25:56.123Z ERROR core 0 [req-12]: hook filter.on_prompt failed

With `--log-format json` a line is one object with time, level, logger, message and request_id. If
present, the process, the error's traceback and the fields of `extra` are included.
"""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from quire.base.errors import ConfigError
from quire.base.settings.secrets import Secret

FORMAT_VARIABLE = "QUIRE_LOG_FORMAT"  # child processes inherit it
HTTP_LIBRARIES = ("httpx", "httpx2")  # of huggingface_hub
FORMATS = TEXT, JSON = "text", "json"
# Attributes of every record, which are not given as `extra`.
STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id"}

current_request: ContextVar[str | None] = ContextVar("current_request", default=None)


def begin_logging(level: str, process: str = "") -> None:
    """Start the log of this process on standard error. process: name of the process in lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(make_formatter(log_format(), process, is_terminal=sys.stderr.isatty()))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level != "debug":  # their log has a line for each request of a download
        for library in HTTP_LIBRARIES:
            logging.getLogger(library).setLevel(logging.WARNING)


def choose_format(given: str | None) -> None:
    """Set the log format of this process and its children; None: as the environment says.

    Raises ConfigError if the environment names an unknown format.
    """
    if given is not None and given != log_format():
        os.environ[FORMAT_VARIABLE] = given
    if log_format() not in FORMATS:
        raise ConfigError(
            f"the environment variable {FORMAT_VARIABLE} must be {' or '.join(FORMATS)}, got"
            f" {log_format()!r}; correct it or unset it."
        )


def log_format() -> str:
    """Return the log format in the environment, or text."""
    return os.environ.get(FORMAT_VARIABLE) or TEXT


def make_formatter(kind: str, process: str = "", *, is_terminal: bool) -> logging.Formatter:
    """Return the formatter for a format, a process name and a kind of stream."""
    if kind == JSON:
        return JsonFormatter(process)
    if is_terminal:
        return logging.Formatter(f"{process}: %(message)s" if process else "%(message)s")
    return TextFormatter(process)


def print_error(error: object) -> None:
    """Print the error that ends a command or process, in the log's format."""
    if log_format() != JSON:
        print(f"quire: {error}", file=sys.stderr)
        return
    record = logging.LogRecord("quire", logging.ERROR, "", 0, "%s", (error,), None)
    print(JsonFormatter("").format(record), file=sys.stderr)


class TextFormatter(logging.Formatter):
    """Formatter of text lines for files and log collectors."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without a traceback."""
        request_id = request_of(record)
        where = self._process or record.name
        if request_id and request_id not in record.message:
            where += f" [{request_id}]"
        return f"{time_of(record)} {record.levelname} {where}: {record.message}"


class JsonFormatter(logging.Formatter):
    """Formatter of one JSON object per line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. Secrets in fields are masked, as in messages."""
        line: dict[str, Any] = {
            "time": time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": request_of(record),
        }
        if self._process:
            line["process"] = self._process
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        given = {name: value for name, value in vars(record).items() if name not in STANDARD}
        return json.dumps(line | {name: _plain(value) for name, value in given.items()})


def time_of(record: logging.LogRecord) -> str:
    """Return the time of a record in RFC 3339 format, in UTC."""
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def request_of(record: logging.LogRecord) -> str | None:
    """Return the id of the request that a record concerns: its own, or the current request's."""
    named: str | None = getattr(record, "request_id", None)
    return named or current_request.get()


def _plain(value: Any) -> Any:
    """Return a field as JSON data, with secrets masked."""
    if isinstance(value, Secret):
        return value.masked
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    with contextlib.suppress(TypeError, ValueError):
        json.dumps(value)
        return value
    return str(value)
