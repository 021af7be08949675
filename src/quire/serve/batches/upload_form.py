"""Parser of an upload's form (multipart/form-data), which streams the file to disk."""

import asyncio
from typing import TYPE_CHECKING

import fastapi
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from quire.serve.batches.file_store import Upload
from quire.serve.errors import ApiError, bad_request

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_FIELDS = 16
MAX_FIELD_BYTES = 1024
PIECE_BYTES = 1 << 20  # minimum size of a write to disk
FORM = b"multipart/form-data"


class UploadForm:
    """Form of an upload. fields: values without the file, by name; filename: None if not begun."""

    def __init__(self, upload: Upload) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._upload = upload
        self._piece = bytearray()  # unwritten bytes of the file
        self._value = bytearray()  # bytes of another field
        self._header, self._disposition = bytearray(), bytearray()
        self._name = ""
        self._is_file = self._is_ended = False

    async def read(self, request: fastapi.Request) -> None:
        """Read the whole body. Raise ApiError for an invalid form, RequestError if there is no room
        for the file."""
        kind, options = parse_options_header(request.headers.get("content-type"))
        boundary = options.get(b"boundary")
        if kind != FORM or not boundary:
            message = "a file must be uploaded as multipart/form-data, with purpose and file."
            raise ApiError(415, message, code="unsupported_media_type")
        try:
            parser = MultipartParser(boundary, self._callbacks())
            async for data in request.stream():
                parser.write(data)
                if len(self._piece) >= PIECE_BYTES:
                    await self._flush()
            parser.finalize()
        except FormParserError as error:
            raise bad_request(f"the form cannot be read: {error}.", "file") from error
        if not self._is_ended:
            raise bad_request("the form is cut off: its last boundary is missing.", "file")
        await self._flush()

    async def _flush(self) -> None:
        piece, self._piece = self._piece, bytearray()
        await asyncio.to_thread(self._upload.write, piece)

    # ---- parser callbacks --------------------------------------------------------------------

    def _callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._take_header,
            "on_header_value": self._take_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._take,
            "on_part_end": self._end,
            "on_end": self._end_all,
        }

    def _begin(self) -> None:
        self._disposition.clear()
        self._header.clear()
        self._value.clear()

    def _take_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _take_header_value(self, data: bytes, start: int, end: int) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition += data[start:end]

    def _end_header(self) -> None:
        self._header.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(bytes(self._disposition))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self.filename is not None:
                raise bad_request("the form has more than one file; send one.", "file")
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = name.replace("\\", "/").rpartition("/")[2][:255] or "file.jsonl"
        elif self._name in self.fields or len(self.fields) == MAX_FIELDS:
            message = f"the form has {self._name[:60]!r} twice, or more than {MAX_FIELDS} fields."
            raise bad_request(message)

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._piece += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            message = f"{self._name[:60]} is longer than {MAX_FIELD_BYTES} bytes; shorten it."
            raise bad_request(message, self._name[:60])

    def _end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end_all(self) -> None:
        self._is_ended = True
