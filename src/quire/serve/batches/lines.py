"""Lines of a batch in OpenAI's format: a request, and the result of a request.

    in   {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
    out  {"id": "batch_req_...", "custom_id": "a", "error": null,
          "response": {"status_code": 200, "request_id": "req-...", "body": {...}}}

The id of an output line is a digest of the input line, its line number and the model. So an output
file alone shows which lines of which input are finished.
"""

import functools
import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.serve.bodies.reading import read_json
from quire.serve.bodies.validation_errors import shown
from quire.serve.errors import ApiError

ID_PREFIX = "batch_req_"
ID_BYTES = 16
MAX_CUSTOM_ID_CHARS = 1024
MAX_BEGINNING_BYTES = 1 << 16  # bytes of a prompt that decide the order of lines


class LineError(Exception):
    """Error of an invalid line. code: for programs; param: the wrong field."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


class _Wire(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class Response(msgspec.Struct):
    """Response of the app. body: JSON."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Failure(msgspec.Struct):
    """Reason why a line has no response."""

    code: str
    message: str


class OutputLine(msgspec.Struct):
    """Result of a line: a response, or an error."""

    id: str
    custom_id: str | None
    response: Response | None
    error: Failure | None

    @property
    def is_failed(self) -> bool:
        return self.response is None or self.response.status_code >= 400

    def encode(self) -> bytes:
        """Return the line as JSON, with its line end."""
        return msgspec.json.encode(self) + b"\n"


@dataclass(frozen=True)
class Line:
    """One request. body: its JSON as received; fields: the decoded body."""

    custom_id: str
    url: str
    body: bytes
    fields: dict[str, Any]

    @property
    def num_sequences(self) -> int:
        """Number of sequences that the request runs at once; an upper bound if it is invalid."""
        prompt = self.fields.get("prompt")
        num_prompts = 1
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            num_prompts = len(prompt)
        counts = (self.fields.get(name) for name in ("n", "best_of", "beam_width"))
        num_each = max((count for count in counts if isinstance(count, int)), default=1)
        return max(1, num_prompts * num_each)

    def body_of(self, priority: int | None) -> bytes:
        """Return the body, with this priority appended unless it is None. In a JSON object with
        two fields of one name, the last one counts."""
        if priority is None:
            return self.body
        rest = self.body.rstrip()[:-1].rstrip()
        comma = b"" if rest.endswith(b"{") else b","
        return rest + comma + b'"priority":%d}' % priority


def id_of(data: bytes, number: int, model: str) -> bytes:
    """Return the id of a line, `ID_BYTES` long. data: the line; number: its number, from 1."""
    found = hashlib.blake2b(digest_size=ID_BYTES, key=_key_of(model))
    found.update(b"%d " % number)
    found.update(data.strip())
    return found.digest()


@functools.cache
def _key_of(model: str) -> bytes:
    return hashlib.blake2b(model.encode(), digest_size=32).digest()


def shown_id(digest: bytes) -> str:
    return ID_PREFIX + digest.hex()


def custom_id_of(data: bytes) -> str | None:
    """Return a line's custom_id; None if it has no valid one."""
    try:
        found = msgspec.json.decode(data, type=_Wire).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if _is_custom_id(found) else None


def _is_custom_id(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_CUSTOM_ID_CHARS


def parse_line(data: bytes, urls: Collection[str] | None = None) -> Line:
    """Parse a line. urls: the valid paths; None skips the check. Raises LineError."""
    try:
        wire = msgspec.json.decode(data, type=_Wire)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LineError("invalid_json_line", f"the line is not a JSON object: {error}.") from error
    except RecursionError as error:
        raise LineError("invalid_json_line", "the line is nested too deeply.") from error
    if not _is_custom_id(wire.custom_id):
        raise LineError(
            "missing_required_parameter" if wire.custom_id is None else "invalid_custom_id",
            f"custom_id must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters, got"
            f" {shown(wire.custom_id)}.",
            "custom_id",
        )
    if wire.method != "POST":
        message = f"method must be POST, got {shown(wire.method)}."
        raise LineError("invalid_method", message, "method")
    if not isinstance(wire.url, str) or (urls is not None and wire.url not in urls):
        known = f"one of {', '.join(sorted(urls))}" if urls is not None else "a text"
        raise LineError("invalid_url", f"url must be {known}, got {shown(wire.url)}.", "url")
    body = bytes(wire.body)
    return Line(wire.custom_id, wire.url, body, _fields(body))


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = read_json(body, "the body")
    except ApiError as error:
        raise LineError("invalid_body", error.message, "body") from error
    except (ValueError, RecursionError) as error:
        raise LineError("invalid_body", f"the body cannot be read: {error}.", "body") from error
    if not isinstance(fields, dict):
        message = f"body must be a JSON object, got {shown(fields)}."
        raise LineError("invalid_body", message, "body")
    if fields.get("stream"):
        message = "stream must be false in a batch: each line has one answer; remove stream."
        raise LineError("stream_not_supported", message, "stream")
    return fields


def beginning_of(line: Line) -> bytes:
    """Return the first bytes of the texts that make up a line's prompt, in prompt order. Lines with
    equal first bytes share a prefix that the engine computes once."""
    found = bytearray()
    for part in _parts(line):
        found += part.encode("utf-8", "backslashreplace")
        if len(found) >= MAX_BEGINNING_BYTES:
            break
    return bytes(found[:MAX_BEGINNING_BYTES])


def _parts(line: Line) -> Iterator[str]:
    fields = line.fields
    for name in ("cache_salt", "tools", "instructions", "system"):
        if fields.get(name):
            yield _text(fields[name])
    messages = fields.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict):
            return
        yield f"\n{message.get('role')}\n"
        yield _text(message.get("content"))
    for name in ("prompt", "input", "query"):
        if fields.get(name):
            yield _text(fields[name])


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
