"""Chunks of new weights that a trainer sends, until the engine loads them."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import fastapi

from quire.models.load.weight_files import folder_for
from quire.serve.errors import ApiError, bad_request

MAX_CHUNKS = 10_000


class Uploads:
    """Chunks of new weights in a temporary folder, which is deleted at the latest with this
    process. At most one set at a time."""

    def __init__(self) -> None:
        self._folder: TemporaryDirectory[str] | None = None
        self._num_chunks = 0

    def begin(self) -> None:
        """Begin an empty set; delete an unfinished one."""
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = TemporaryDirectory(prefix="quire-weights-", dir=folder_for(0))
        self._num_chunks = 0

    async def add(self, request: fastapi.Request) -> int:
        """Write a request's body as one chunk; return the number of chunks. Raises ApiError if no
        set was begun, if its set ends meanwhile, or if there is no room; then the chunk is
        dropped."""
        folder = self._open()
        if self._num_chunks == MAX_CHUNKS:
            raise bad_request(f"an update has at most {MAX_CHUNKS} chunks; send larger ones.")
        self._num_chunks += 1
        path = Path(folder.name) / f"chunk-{self._num_chunks:05}.safetensors"
        try:
            with path.open("xb") as file:
                async for piece in request.stream():
                    await asyncio.to_thread(file.write, piece)
        except BaseException as error:
            path.unlink(missing_ok=True)
            if not isinstance(error, OSError):
                raise
            text = f"the chunk cannot be stored: {error.strerror or error}; free space for it."
            raise ApiError(507, text, "server_error", code="no_room") from error
        if folder is not self._folder:
            raise bad_request("the update ended before this chunk had arrived; begin another one.")
        return self._num_chunks

    def take(self) -> TemporaryDirectory[str]:
        """Return the folder of all chunks, which the caller deletes. Raises ApiError without
        chunks."""
        folder = self._open()
        if not self._num_chunks:
            raise bad_request("no chunk has arrived; send them to /update_weights/chunk.")
        self._folder = None
        return folder

    def _open(self) -> TemporaryDirectory[str]:
        if self._folder is None:
            raise bad_request("no update has begun; call /start_weight_update first.")
        return self._folder
