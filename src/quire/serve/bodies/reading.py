"""Bodies of requests: JSON whose size is bounded before it is decoded and validated.

A JSON value may take two bytes, and its Python object a hundred times as many. So the values of a
large body are counted in its bytes first (`counts.py`), and its field names are counted before
validation. Valid JSON is read the same way at every size. Only small bodies get an exact message
about invalid JSON.
"""

import asyncio
import json
from typing import Any

import fastapi
import msgspec
from fastapi.routing import APIRoute

from quire.serve.bodies.counts import check_counts
from quire.serve.bodies.open_body import (
    MAX_NAME_CHARS,
    ignored_fields,
    known_fields,
    naming_ignored,
    without_unknown,
)
from quire.serve.errors import ApiError, ApiHttpError, bad_request
from quire.serve.media.parts import image_chars

MODEL = "quire.model"  # key in an ASGI scope: the model that the body names

MAX_FIELDS = 256

# Bodies up to this size are decoded on the event loop, in a millisecond at most.
ON_LOOP_BYTES = 1 << 16
# Bodies up to this size are not counted. For invalid JSON, json.loads finds the exact fault. It
# also accepts NaN and halves of surrogate pairs.
SMALL_BYTES = 1 << 20
# float() parses decimals, because msgspec's own parser is slow for some of them.
DECODER = msgspec.json.Decoder(float_hook=float)


class BoundedRequest(fastapi.Request):
    """A request whose body is read by `read_json`, in a thread if it is large."""

    known: frozenset[str] | None = None  # the declared fields; None: keep unknown fields
    whole: bytes | bytearray = b""  # the body as it arrived

    async def body(self) -> bytearray:  # type: ignore[override]
        """Read the whole body. A second call returns nothing."""
        data = bytearray()  # grows in place; a list of pieces takes twice the memory
        async for piece in self.stream():
            data += piece
        self.whole = data
        return data

    async def json(self) -> Any:
        """Decode the body. Raises ApiHttpError if it is too large, not counting images. Raises the
        errors of `json` if it is not JSON."""
        value = await read_in_thread(self.whole, "the body")
        max_bytes = self.app.state.context.config.max_body_bytes
        if len(self.whole) > max_bytes:
            num_chars = await asyncio.to_thread(image_chars, value)
            if len(self.whole) - num_chars > max_bytes:
                raise ApiHttpError(too_large(max_bytes))
        if isinstance(value, dict):
            self.scope[MODEL] = value.get("model")
        if self.known is None or not isinstance(value, dict):
            return value
        return without_unknown(value, self.known, self.scope)


class BoundedRoute(APIRoute):
    """A route whose handler receives a BoundedRequest."""

    def get_route_handler(self) -> Any:
        handle, known = super().get_route_handler(), known_fields(self.endpoint)

        async def handle_bounded(request: fastapi.Request) -> fastapi.Response:
            bounded = BoundedRequest(request.scope, request.receive)
            if not request.app.state.context.config.strict_fields:
                bounded.known = known
            response: fastapi.Response = await handle(bounded)
            return naming_ignored(response, ignored_fields(request.scope))

        return handle_bounded


async def read_in_thread(data: bytes | bytearray, name: str) -> Any:
    """Run `read_json`, in a thread if the data is large. Raises ApiHttpError in place of
    ApiError."""
    try:
        if len(data) <= ON_LOOP_BYTES:
            return read_json(data, name)
        return await asyncio.to_thread(read_json, data, name)
    except ApiError as error:
        raise ApiHttpError(error) from error


def read_json(data: bytes | bytearray, name: str) -> Any:
    """Decode JSON in UTF-8. name: the data's name in errors.

    Raises ApiError if the data has too many values, or if large data is not valid JSON. Small
    invalid data raises the errors of json.loads.
    """
    if len(data) > SMALL_BYTES:
        check_counts(data, name)
    try:
        value = DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if len(data) > SMALL_BYTES:
            raise _no_json(error, data, name) from error
        value = json.loads(data)
    if isinstance(value, dict):
        _check_names(value, name)
    return value


def too_large(max_bytes: int) -> ApiError:
    text = (
        f"the body is larger than {max_bytes} bytes; send less, or start with a larger"
        " max_body_bytes."
    )
    return ApiError(413, text, code="body_too_large")


def _check_names(fields: dict[str, Any], name: str) -> None:
    if len(fields) > MAX_FIELDS:
        raise bad_request(
            f"{name} has {len(fields)} fields; the limit is {MAX_FIELDS}. Remove the unknown"
            " fields.",
            code="too_many_fields",
        )
    longest = max(map(len, fields), default=0)
    if longest > MAX_NAME_CHARS:
        raise bad_request(
            f"{name} has a field whose name has {longest} characters; the limit is"
            f" {MAX_NAME_CHARS}. Remove it.",
            code="name_too_long",
        )


def _no_json(error: Exception, data: bytes | bytearray, name: str) -> ApiError:
    try:
        data.decode()  # versions of msgspec differ in their errors for bytes that are not UTF-8
    except UnicodeDecodeError as invalid:
        return bad_request(f"{name} is not UTF-8: byte {invalid.start} cannot be decoded.")
    if isinstance(error, RecursionError):
        return bad_request(f"{name} is not usable: its JSON is nested too deeply.")
    return bad_request(f"{name} is not valid JSON: {error}.")
