"""h11, without what it lets pass: heads of any size that come at once, and requests whose end two
servers may see in two places.

A proxy in front of this server that takes another view of where a request ends lets a client send
requests past its rules ("request smuggling", RFC 9112, 11.2). What may be read in two ways is
refused, and the connection closed. So are bodies in chunks so small that finding their ends would
take longer than everything else.
"""

import re
from typing import Any

import h11

MAX_HEAD_BYTES = 1 << 16
MAX_CHUNKS = 1 << 14  # of one body
STATUS_OF_LARGE_HEADS = 431

HEAD_END = re.compile(rb"\n\r?\n")
ODD_LINE_END = re.compile(rb"(?<!\r)\n|\r(?!\n)|\n[ \t]|\0")
LENGTH = re.compile(rb"\ncontent-length[ \t]*:([^\r\n]*)", re.IGNORECASE)
CODING = re.compile(rb"\ntransfer-encoding[ \t]*:", re.IGNORECASE)


class StrictConnection(h11.Connection):
    """A server's side. refusal: what was wrong with what the client sent, after an error."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.refusal: h11.RemoteProtocolError | None = None
        self._num_chunks = 0

    def next_event(self) -> Any:
        """Raise h11.RemoteProtocolError for what is no HTTP, or not beyond doubt."""
        try:
            if self.their_state is h11.IDLE:
                self._num_chunks = 0
                check_head(self.trailing_data[0])
            event = super().next_event()
            if isinstance(event, h11.Data) and event.chunk_start:
                self._num_chunks += 1
                if self._num_chunks > MAX_CHUNKS:
                    raise _refused(f"the body comes in more than {MAX_CHUNKS} chunks")
            return event
        except h11.RemoteProtocolError as error:
            self.refusal = error
            raise


def check_head(data: bytes) -> None:
    """Raise for the head of a request that data begins with, as soon as all of it is there."""
    end = HEAD_END.search(data, 0, MAX_HEAD_BYTES + 2)
    if end is None or end.end() > MAX_HEAD_BYTES:
        if len(data) > MAX_HEAD_BYTES:
            text = f"its head has more than {MAX_HEAD_BYTES} bytes"
            raise _refused(text, STATUS_OF_LARGE_HEADS)
        return
    head = data[: end.end()]
    if ODD_LINE_END.search(head):
        raise _refused("a line of its head ends otherwise than with CR LF, or is folded")
    lengths = LENGTH.findall(head)
    if len(lengths) > 1 or any(b"," in length for length in lengths):
        raise _refused("it has more than one Content-Length")
    if CODING.search(head):
        if lengths:
            raise _refused("it has both Content-Length and Transfer-Encoding")
        if not head.partition(b"\r\n")[0].endswith(b"HTTP/1.1"):
            raise _refused("only HTTP/1.1 has Transfer-Encoding")


def _refused(text: str, status: int = 400) -> h11.RemoteProtocolError:
    return h11.RemoteProtocolError(text, error_status_hint=status)
