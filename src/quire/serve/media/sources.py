"""The bytes of a media item: from a data: URL, a file, or a download, as the operator allows."""

import base64
import binascii
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from quire.base.errors import RequestError
from quire.serve.media.download import Downloads, check_type


@dataclass(frozen=True)
class MediaSources:
    """Sources that media URLs may name.

    folder: files below it may be read by file: URLs; None allows no files. downloads: hosts that
    https: URLs may name. Both are off by default.
    """

    folder: Path | None = None
    downloads: Downloads = field(default_factory=Downloads)
    max_bytes: int = 32 << 20

    def read(self, url: str) -> bytes:
        """Return the bytes that a URL refers to.

        Blocks during a download. Raises RequestError for a URL that is malformed or not allowed, or
        whose data has more than `max_bytes`.
        """
        url = url.lstrip()
        scheme = url[:16].partition(":")[0].lower()
        if scheme == "data":
            return self._inline(url)
        if scheme == "file":
            return self._file(url)
        if scheme in ("http", "https"):
            return self.downloads.get(url)
        raise RequestError(
            f"media must be a data: or an https: URL, got one that begins with {url[:20]!r}."
        )

    def _inline(self, url: str) -> bytes:
        head, comma, body = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise RequestError("a data: URL must be data:image/TYPE;base64,CONTENT.")
        check_type(head.partition(":")[2].partition(";")[0])
        if len(body) > self.max_bytes // 3 * 4 + 4:
            raise self._too_large()
        try:
            return base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError) as error:
            raise RequestError(
                f"the content is no valid base64, without line breaks: {error}."
            ) from None

    def _file(self, url: str) -> bytes:
        if self.folder is None:
            raise RequestError(
                "file: URLs are not allowed; send the file as a data: URL, or ask the operator for"
                " --allowed-local-media-path."
            )
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise RequestError(f"a file: URL names no host, got {parts.netloc[:80]!r}; remove it.")
        path = unquote(parts.path)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            raise self._unreadable(path) from None
        try:
            # Check the opened file, not the path: a link may change between the two.
            real = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if not is_file or not real.is_relative_to(self.folder.resolve()):
                raise self._unreadable(path)
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(self.max_bytes + 1)
        finally:
            os.close(descriptor)
        if len(data) > self.max_bytes:
            raise self._too_large()
        return data

    def _unreadable(self, path: str) -> RequestError:
        """Return one error for all reasons, so that a client learns nothing about other files."""
        return RequestError(f"{path[:200]!r} is no readable file below the folder that is allowed.")

    def _too_large(self) -> RequestError:
        return RequestError(
            f"the media item has more than {self.max_bytes:,} bytes, the limit; send a smaller one."
        )
