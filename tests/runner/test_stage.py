"""Rows that a stage sends to the next one through a socket."""

import socket
import threading

import pytest
import torch

from quire.base.errors import RankLost
from quire.runner.stage import SocketLink


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_receiver_gets_rows_and_failures_in_order(dtype: torch.dtype) -> None:
    """The rows exceed the socket's buffer; None stands for a failed plan."""
    one, other = socket.socketpair()
    sender, receiver = SocketLink(one), SocketLink(other)
    rows = [torch.randn(num, 192, dtype=torch.float64).to(dtype)[:, ::2] for num in (5000, 1, 7)]
    thread = threading.Thread(target=lambda: [sender.send(each) for each in (*rows, None)])
    thread.start()
    for each in rows:
        found = receiver.receive()
        assert found is not None and torch.equal(found.to(dtype), each)
    assert receiver.receive() is None
    thread.join()


def test_ended_stage_raises_rank_lost() -> None:
    one, other = socket.socketpair()
    other_link = SocketLink(other)
    one.close()
    with pytest.raises(RankLost, match="previous stage has ended"):
        other_link.receive()
    with pytest.raises(RankLost, match="next stage has ended"):
        other_link.send(torch.zeros(2, 8))
