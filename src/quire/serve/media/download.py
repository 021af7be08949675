"""Download of a file over HTTPS from a host that the operator allows.

The connection goes to an address that was checked (`addresses.py`). Redirects are followed to the
same host only. The response's size and the total time are bounded, whatever the headers claim.
"""

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from quire.base.errors import RequestError
from quire.base.version import QUIRE_VERSION
from quire.serve.media.addresses import Lookups, public_address

READ_BYTES = 1 << 16
MAX_REDIRECTS = 3
MIN_CONNECT_S = 0.001  # a socket with a timeout of 0 would not block at all
SAFE = "%/?:@!$&'()*+,;=-._~[]"  # characters of a path and a query that stay unquoted
MAX_HOST_CHARS = 253  # length of a DNS name
HTTPS_PORT = 443
REDIRECTS = (301, 302, 303, 307, 308)
# Content types of servers that do not know the content; they are accepted like image types.
UNKNOWN_TYPES = ("", "application/octet-stream", "binary/octet-stream")


@dataclass(frozen=True)
class Downloads:
    """Allowed downloads. domains: hosts; `.example.org` also allows all hosts below it."""

    domains: tuple[str, ...] = ()
    max_bytes: int = 32 << 20
    timeout_s: float = 10.0  # for the whole download
    lookups: Lookups = field(default_factory=Lookups, repr=False)
    context: Callable[[], ssl.SSLContext] = field(default=ssl.create_default_context, repr=False)

    def get(self, url: str) -> bytes:
        """Return the file at an https: URL.

        Raises RequestError if the host is not allowed, or if the download fails or is too large.
        """
        deadline = time.monotonic() + self.timeout_s
        parts = self.checked(url)
        for _ in range(MAX_REDIRECTS + 1):
            answer = self._fetch(parts, deadline)
            if isinstance(answer, bytes):
                return answer
            target = self.checked(answer, base=parts.geturl())
            if (target.hostname, target.port) != (parts.hostname, parts.port):
                raise RequestError(
                    f"{parts.hostname} redirects to another host, {target.hostname!r}; give that"
                    " URL, or send the file as a data: URL."
                )
            parts = target
        raise RequestError(
            f"{parts.hostname} redirects more than {MAX_REDIRECTS} times; give the URL of the file."
        )

    def checked(self, url: str, base: str = "") -> SplitResult:
        """Return the parts of a URL. base: the URL that redirected to it. Raises RequestError if it
        may not be downloaded."""
        try:
            parts = urlsplit(urljoin(base, url))
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError as error:
            raise RequestError(f"the URL {url[:80]!r} is malformed: {error}; correct it.") from None
        if len(host) > MAX_HOST_CHARS:
            raise RequestError(
                f"the host in the URL {url[:40]!r}... has {len(host)} characters, more than the"
                f" limit of {MAX_HOST_CHARS}; correct it."
            )
        if parts.scheme != "https":
            raise RequestError(
                f"the URL begins with {parts.scheme!r}; give an https: or a data: URL."
            )
        if parts.username is not None or port not in (None, HTTPS_PORT):
            raise RequestError(
                "a media URL may have no user name, and no port other than 443; remove it."
            )
        if not any(self._allows(host, domain) for domain in self.domains):
            allowed = ", ".join(self.domains) or "none"
            raise RequestError(
                f"media of the host {host!r} may not be fetched (allowed: {allowed}); send the"
                " file as a data: URL, or ask the operator for --allowed-media-domains."
            )
        return parts

    @staticmethod
    def _allows(host: str, domain: str) -> bool:
        domain = domain.lower()
        return host == domain or (domain.startswith(".") and host.endswith(domain))

    def _fetch(self, parts: SplitResult, deadline: float) -> bytes | str:
        """Return the file, or the location of a redirect."""
        host = str(parts.hostname).rstrip(".")
        left_s = max(0.0, deadline - time.monotonic())
        address = public_address(host, HTTPS_PORT, left_s, self.lookups)
        left_s = max(MIN_CONNECT_S, deadline - time.monotonic())
        connection = _Pinned(host, address, self.context(), left_s)
        path = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), SAFE)
        alarm = threading.Timer(left_s, connection.abort)
        alarm.start()
        try:
            connection.request("GET", path, headers={"User-Agent": f"quire/{QUIRE_VERSION}"})
            answer = connection.getresponse()
            if answer.status in REDIRECTS and answer.getheader("Location"):
                return str(answer.getheader("Location"))
            if answer.status != http.client.OK:
                raise RequestError(
                    f"{host} answers with status {answer.status} to GET {path[:80]!r}; correct the"
                    " URL, or send the file as a data: URL."
                )
            check_type(answer.getheader("Content-Type", "").partition(";")[0])
            data = self._read(answer)
            if time.monotonic() >= deadline:  # the alarm may have truncated the data
                raise TimeoutError(f"it takes longer than {self.timeout_s:g} s")
            return data
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(
                f"the download from {host} fails: {error or 'timeout'}; send the file as a data:"
                " URL."
            ) from None
        finally:
            alarm.cancel()
            connection.close()

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        data = bytearray()
        while piece := answer.read1(READ_BYTES):
            data += piece
            if len(data) > self.max_bytes:
                raise RequestError(
                    f"the file has more than {self.max_bytes:,} bytes, the limit for media; send a"
                    " smaller file."
                )
        if answer.length:
            raise http.client.IncompleteRead(bytes(data), answer.length)
        return bytes(data)


def check_type(content_type: str) -> None:
    """Raise RequestError if a content type is known and not an image's. The content itself is
    checked when it is decoded."""
    name = content_type.strip().lower()
    if name in UNKNOWN_TYPES or (name.startswith("image/") and not name.startswith("image/svg")):
        return
    raise RequestError(
        f"the content has the type {name[:60]!r}; send an image in PNG, JPEG, WebP, GIF, BMP or"
        " TIFF format."
    )


class _Pinned(http.client.HTTPSConnection):
    """TLS connection to a given address, which checks the certificate of the host."""

    def __init__(self, host: str, address: str, context: ssl.SSLContext, timeout_s: float) -> None:
        super().__init__(host, HTTPS_PORT, timeout=timeout_s, context=context)
        self._address, self._tls = address, context
        self._stream: ssl.SSLSocket | None = None  # kept after http.client drops its reference

    def connect(self) -> None:
        plain = socket.create_connection((self._address, self.port), self.timeout)
        self.sock = self._stream = self._tls.wrap_socket(
            plain, server_hostname=self.host, do_handshake_on_connect=False
        )
        self._stream.do_handshake()  # explicit, so that `abort` can interrupt it

    def abort(self) -> None:
        """Shut the connection down from another thread, so that its reads end."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.shutdown(socket.SHUT_RDWR)
