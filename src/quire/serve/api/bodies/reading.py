"""What a client sent, as JSON: bounded before anything is made of it.

A value of JSON may take two bytes, and the object that Python makes of it a hundred times as many.
So values, lists and objects are counted in the bytes first, and fields by their names before they
are validated. What is JSON is read the same at every size; what is not may only be small if it is
to be told exactly what is wrong with it.
"""

import asyncio
import json
from typing import Any

import fastapi
import msgspec
import numpy as np
import numpy.typing as npt
from fastapi.routing import APIRoute

from quire.serve.api.bodies.open_body import (
    ignored_fields,
    known_fields,
    naming_ignored,
    without_unknown,
)
from quire.serve.api.errors import ApiError, ApiHttpError, bad_request
from quire.serve.media.parts import image_chars

MODEL = "quire.model"  # of a scope: what a body that was read calls its model

MAX_VALUES = 3 << 18
MAX_CONTAINERS = 1 << 15
MAX_TEXTS = 1 << 17  # with names of fields
MAX_EXPONENTS = 1 << 16  # the slowest numbers to read; true and false look like one
# Of texts with a character beyond U+FFFF, which makes its text take 4 bytes for each.
MAX_WIDE_BYTES = 8 << 20
MAX_FIELDS = 256
MAX_NAME_CHARS = 256

# Up to here reading takes a millisecond.
ON_LOOP_BYTES = 1 << 16
# Up to here nothing needs to be counted, and json.loads may tell what is wrong with what is no
# JSON, or take it: NaN, halves of surrogate pairs.
SMALL_BYTES = 1 << 20
PIECE_BYTES = 1 << 18

QUOTE, COMMA, BRACE, EXPONENT = b'",{e'
LOWER = 0x20  # makes { of [, and e of E
BACKSLASH = ord("\\")
WIDE = 0xF0  # the first byte of such a character
WIDE_TEXTS = "bytes in texts with characters above U+FFFF such as emoji"

# msgspec's own reading of decimals is slow for some of them.
DECODER = msgspec.json.Decoder(float_hook=float)


class BoundedRequest(fastapi.Request):
    """A request whose body is read by `read_json`, beside the event loop if it is large.

    known: the fields of its body, where others may be left out; None: whoever checks the body finds
    them. whole: the body as it came, once it was read.
    """

    known: frozenset[str] | None = None
    whole: bytes | bytearray = b""

    async def body(self) -> bytearray:  # type: ignore[override]
        """Read all of it, which is empty before and cannot be asked for twice."""
        data = bytearray()  # grows in place; a list of pieces takes twice the memory
        async for piece in self.stream():
            data += piece
        self.whole = data
        return data

    async def json(self) -> Any:
        """Decode the body. Raises ApiHttpError if it is too large without its images, and the
        errors of `json` if it is not JSON."""
        value = await read_beside(self.whole, "the body")
        most = self.app.state.context.config.max_body_bytes
        if len(self.whole) > most:
            num_chars = await asyncio.to_thread(image_chars, value)
            if len(self.whole) - num_chars > most:
                raise ApiHttpError(too_large(most))
        if isinstance(value, dict):
            self.scope[MODEL] = value.get("model")
        if self.known is None or not isinstance(value, dict):
            return value
        return without_unknown(value, self.known, self.scope)


class BoundedRoute(APIRoute):
    """A route whose handler gets a BoundedRequest."""

    def get_route_handler(self) -> Any:
        handle, known = super().get_route_handler(), known_fields(self.endpoint)

        async def handle_bounded(request: fastapi.Request) -> fastapi.Response:
            bounded = BoundedRequest(request.scope, request.receive)
            if not request.app.state.context.config.strict_fields:
                bounded.known = known
            response: fastapi.Response = await handle(bounded)
            return naming_ignored(response, ignored_fields(request.scope))

        return handle_bounded


async def read_beside(data: bytes | bytearray, what: str) -> Any:
    """`read_json` in a thread if the data is large; ApiHttpError in place of ApiError."""
    try:
        if len(data) <= ON_LOOP_BYTES:
            return read_json(data, what)
        return await asyncio.to_thread(read_json, data, what)
    except ApiError as error:
        raise ApiHttpError(error) from error


def read_json(data: bytes | bytearray, what: str) -> Any:
    """Return the value that JSON in UTF-8 stands for. what: the data's name in errors.

    Raises ApiError for more values than any request has, and for large data that is no JSON. Small
    data that is none raises what json.loads raises, or gives what it gives.
    """
    if len(data) > SMALL_BYTES:
        check_counts(data, what)
    try:
        value = DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if len(data) > SMALL_BYTES:
            raise _no_json(error, what) from error
        value = json.loads(data)
    if isinstance(value, dict):
        _check_names(value, what)
    return value


def check_counts(data: bytes | bytearray, what: str) -> None:
    """Raise ApiError for more of anything in the data than its limit."""
    num_values, num_containers, num_quotes, num_exponents = 1, 0, 0, 0
    rest, is_text, wide = b"", False, _WideTexts()
    for start in range(0, len(data), PIECE_BYTES):
        piece = (rest + data[start : start + PIECE_BYTES]).replace(rb"\\", b"  ")
        rest = b"\\" if piece.endswith(b"\\") else b""  # what it escapes is in the next piece
        chars = np.frombuffer(piece.replace(rb"\"", b"  "), np.uint8)
        quotes = chars == QUOTE
        in_text = np.logical_xor.accumulate(quotes) ^ is_text
        is_text = bool(in_text[-1])
        num_quotes += int(np.count_nonzero(quotes))
        structure = np.where(in_text, 0, chars | LOWER)
        num_here = int(np.count_nonzero(structure == BRACE))
        num_containers += num_here
        num_values += num_here + int(np.count_nonzero(structure == COMMA))
        num_exponents += int(np.count_nonzero(structure == EXPONENT))
        wide.take(chars, quotes)
        for number, most, kind in (
            (num_values, MAX_VALUES, "values"),
            (num_containers, MAX_CONTAINERS, "lists and objects"),
            (num_quotes // 2, MAX_TEXTS, "texts and names"),
            (num_exponents, MAX_EXPONENTS, "booleans and numbers with exponents"),
            (wide.num_bytes, MAX_WIDE_BYTES, WIDE_TEXTS),
        ):
            if number > most:
                raise _too_many(what, most, kind)


class _WideTexts:
    """Counts the bytes of texts with characters above U+FFFF. Others, such as images in base64,
    take one byte for each character."""

    def __init__(self) -> None:
        self._ended = 0  # bytes of texts that have ended
        self._open, self._is_open_wide = 0, False  # bytes since the last quote

    @property
    def num_bytes(self) -> int:
        return self._ended + (self._open if self._is_open_wide else 0)

    def take(self, chars: npt.NDArray[np.uint8], quotes: npt.NDArray[np.bool_]) -> None:
        """Go on with a piece, and with where its quotes are."""
        is_wide = chars >= WIDE
        escapes = (chars[:-2] == BACKSLASH) & (chars[1:-1] == ord("u"))
        is_wide[:-2] |= escapes & (chars[2:] | LOWER == ord("d"))  # half of a surrogate pair
        edges = np.flatnonzero(quotes)
        sizes = np.diff(edges, prepend=-1, append=len(chars) - 1)
        parts = np.unique(np.searchsorted(edges, np.flatnonzero(is_wide)))
        wide = np.zeros(len(sizes), bool)
        wide[parts] = True
        sizes[0] += self._open
        wide[0] |= self._is_open_wide
        self._ended += int(sizes[:-1][wide[:-1]].sum())
        self._open, self._is_open_wide = int(sizes[-1]), bool(wide[-1])


def too_large(most: int) -> ApiError:
    text = (
        f"the body is larger than {most} bytes; send less, or start with a larger max_body_bytes."
    )
    return ApiError(413, text, code="body_too_large")


def _check_names(fields: dict[str, Any], what: str) -> None:
    if len(fields) > MAX_FIELDS:
        raise bad_request(
            f"{what} has {len(fields)} fields; the limit is {MAX_FIELDS}. Remove the unknown"
            " fields.",
            code="too_many_fields",
        )
    longest = max(map(len, fields), default=0)
    if longest > MAX_NAME_CHARS:
        raise bad_request(
            f"{what} has a field whose name has {longest} characters; the limit is"
            f" {MAX_NAME_CHARS}. Remove it.",
            code="name_too_long",
        )


def _too_many(what: str, most: int, kind: str) -> ApiError:
    text = f"{what} has more than {most} {kind}; send less, or several requests."
    return ApiError(413, text, code="too_many_values")


def _no_json(error: Exception, what: str) -> ApiError:
    if isinstance(error, UnicodeDecodeError):
        return bad_request(f"{what} is not UTF-8: byte {error.start} of a text cannot be decoded.")
    if isinstance(error, RecursionError):
        return bad_request(f"{what} is not usable: its JSON is nested too deeply.")
    return bad_request(f"{what} is not valid JSON: {error}.")
