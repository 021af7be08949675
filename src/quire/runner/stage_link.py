"""Rows that go from a stage to the next, through a socket between two processes.

A message is the number of rows, -1 for a plan that failed, and their float32 or float64 as they
stand. It goes one way only, so a stage that is ahead waits while the socket is full, and nobody
waits in a circle.

Shape legend: T tokens, E numbers of a token that cross.
"""

import socket
import struct

import torch

from quire.base.errors import RankLost
from quire.ops.precision import accumulation_dtype

NUM_ROWS = struct.Struct("<i")
NONE = -1


class SocketLink:
    """One end. width: E. dtype: the model's; rows cross in the one that its sums are made in."""

    def __init__(self, sock: socket.socket, width: int, dtype: torch.dtype) -> None:
        self._socket, self._width = sock, width
        self._dtype = accumulation_dtype(dtype)

    def send(self, rows_TE: torch.Tensor | None) -> None:
        """See StageLink."""
        if rows_TE is None:
            self._send(memoryview(NUM_ROWS.pack(NONE)))
            return
        rows_TE = rows_TE.to("cpu", self._dtype).contiguous()
        assert rows_TE.shape[1] == self._width, "stages are of one model"
        self._send(memoryview(NUM_ROWS.pack(len(rows_TE))))
        self._send(rows_TE.view(torch.uint8).numpy().reshape(-1).data)

    def receive(self) -> torch.Tensor | None:
        """See StageLink."""
        head = bytearray(NUM_ROWS.size)
        self._fill(memoryview(head))
        (num_rows,) = NUM_ROWS.unpack(head)
        if num_rows == NONE:
            return None
        rows_TE = torch.empty(num_rows, self._width, dtype=self._dtype)
        self._fill(rows_TE.view(torch.uint8).numpy().reshape(-1).data)
        return rows_TE

    def _send(self, data: memoryview) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise RankLost(f"The next stage is gone ({error}).") from None

    def _fill(self, data: memoryview) -> None:
        while len(data):
            try:
                num = self._socket.recv_into(data)
            except OSError as error:
                raise RankLost(f"The stage before is gone ({error}).") from None
            if num == 0:
                raise RankLost("The stage before is gone.")
            data = data[num:]
