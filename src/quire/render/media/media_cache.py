"""The last prepared images, so that each turn of a chat does not decode its images again."""

import hashlib
import threading
from collections import OrderedDict

from quire.render.media.prepared import PreparedMedia

MAX_CACHE_BYTES = 256 << 20


class MediaCache:
    """Prepared images by the SHA-256 of their files; the least recently used leave first.

    max_bytes: of pixels and tables together. May be used from any thread.
    """

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, PreparedMedia] = OrderedDict()
        self._num_bytes = 0

    @staticmethod
    def key(data: bytes) -> bytes:
        """Return the name of a file in the cache."""
        return hashlib.sha256(data).digest()

    def get(self, key: bytes) -> PreparedMedia | None:
        """Return the image of a file, which becomes the most recently used one."""
        with self._lock:
            found = self._found.get(key)
            if found is not None:
                self._found.move_to_end(key)
            return found

    def put(self, key: bytes, media: PreparedMedia) -> None:
        """Add an image, unless it alone exceeds the limit."""
        if media.num_bytes > self._max_bytes:
            return
        with self._lock:
            if key in self._found:
                return
            self._found[key] = media
            self._num_bytes += media.num_bytes
            while self._num_bytes > self._max_bytes:
                _, left = self._found.popitem(last=False)
                self._num_bytes -= left.num_bytes
