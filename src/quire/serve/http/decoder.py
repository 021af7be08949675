"""Compressed bodies: Content-Encoding gzip or deflate (RFC 9110, 8.4), decoded piece by piece."""

import zlib

from starlette.types import Scope

from quire.serve.errors import ApiError, bad_request

# zlib's window sizes, by which it knows the formats.
WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


def decoder_of(scope: Scope) -> "Decoder | None":
    """Return what a request's body is to be read with; None if it comes as it is. Raises ApiError
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
    """One compressed body, piece by piece."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._zlib = zlib.decompressobj(WINDOWS[name])

    def take(self, data: bytes, most: int, is_last: bool) -> bytes:
        """Return what a piece stands for, but not much more than `most` bytes of it. Raises
        ApiError."""
        try:
            found = self._zlib.decompress(data, most + 1)
        except zlib.error:
            raise self._wrong("it is not valid in that encoding") from None
        if self._zlib.unused_data:
            raise self._wrong("it has data after its end")
        if is_last and not self._zlib.eof and len(found) <= most:
            raise self._wrong("it ends too early")
        return found

    def _wrong(self, what: str) -> ApiError:
        return bad_request(f"the body has Content-Encoding {self._name!r}, but {what}.")
