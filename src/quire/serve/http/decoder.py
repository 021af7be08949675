"""Compressed bodies: Content-Encoding gzip or deflate (RFC 9110, 8.4), decoded in pieces."""

import zlib

from starlette.types import Scope

from quire.serve.errors import ApiError, bad_request

# zlib's window sizes, which select the format.
WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


def decoder_of(scope: Scope) -> "Decoder | None":
    """Return the decoder for a request's body; None if it is not compressed. Raises ApiError
    415."""
    listed = [value for name, value in scope["headers"] if name == b"content-encoding"]
    names = [name.strip().lower() for name in b",".join(listed).decode("latin-1").split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if not names:
        return None
    if len(names) > 1 or names[0] not in WINDOWS:
        raise ApiError(
            415,
            f"the body comes with Content-Encoding {', '.join(names)[:60]!r}; send it"
            " uncompressed, or use gzip or deflate.",
            code="unsupported_encoding",
            headers={"Accept-Encoding": "gzip, deflate"},
        )
    return Decoder(names[0])


class Decoder:
    """Decoder of one compressed body, which arrives in pieces."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._zlib = zlib.decompressobj(WINDOWS[name])

    def take(self, data: bytes, max_bytes: int, is_last: bool) -> bytes:
        """Return the decoded bytes of a piece, cut off just above `max_bytes` bytes. Raises
        ApiError if the data is invalid."""
        try:
            found = self._zlib.decompress(data, max_bytes + 1)
        except zlib.error:
            raise self._wrong("it is not valid in that encoding") from None
        if self._zlib.unused_data:
            raise self._wrong("it has data after its end")
        if is_last and not self._zlib.eof and len(found) <= max_bytes:
            raise self._wrong("it ends too early")
        return found

    def _wrong(self, fault: str) -> ApiError:
        return bad_request(f"the body has Content-Encoding {self._name!r}, but {fault}.")
