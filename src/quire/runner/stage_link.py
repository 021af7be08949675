"""Rows that go from a stage to the next, through a socket between two processes.

A message is the number of rows, -1 for a plan that failed, how many numbers each has, their bytes,
4 or 8, and the rows as they stand. It goes one way only, so a stage that is ahead waits while the
socket is full, and nobody waits in a circle.

Shape legend: T tokens, E numbers of a token that cross.
"""

import socket
import struct

import torch

from quire.base.errors import RankLost
from quire.ops.precision import accumulation_dtype

HEAD = struct.Struct("<iii")
NONE = HEAD.pack(-1, 0, 0)
DTYPES = {4: torch.float32, 8: torch.float64}


class SocketLink:
    """One end. Rows cross in the dtype that their sums are made in."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, rows_TE: torch.Tensor | None) -> None:
        """See StageLink."""
        if rows_TE is None:
            self._send(memoryview(NONE))
            return
        rows_TE = rows_TE.to("cpu", accumulation_dtype(rows_TE.dtype)).contiguous()
        self._send(memoryview(HEAD.pack(*rows_TE.shape, rows_TE.itemsize)))
        self._send(rows_TE.view(torch.uint8).numpy().reshape(-1).data)

    def receive(self) -> torch.Tensor | None:
        """See StageLink."""
        head = bytearray(HEAD.size)
        self._fill(memoryview(head))
        if head == NONE:
            return None
        num_rows, width, itemsize = HEAD.unpack(head)
        rows_TE = torch.empty(num_rows, width, dtype=DTYPES[itemsize])
        self._fill(rows_TE.view(torch.uint8).numpy().reshape(-1).data)
        return rows_TE

    def _send(self, data: memoryview) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise RankLost(f"The next stage has ended ({error}).") from None

    def _fill(self, data: memoryview) -> None:
        while len(data):
            try:
                num = self._socket.recv_into(data)
            except OSError as error:
                raise RankLost(f"The previous stage has ended ({error}).") from None
            if num == 0:
                raise RankLost("The previous stage has ended.")
            data = data[num:]
