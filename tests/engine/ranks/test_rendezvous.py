"""The core's store for ranks that rendezvous over a network, and torch's use of it.

Covers `engine/ranks/rendezvous.py`, `engine/ranks/core_store.py`.
"""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from quire.engine.ranks import rendezvous
from quire.engine.ranks.core_store import CoreStore
from quire.engine.ranks.messages import Stream
from quire.engine.ranks.rendezvous import RendezvousTable, StoreCall, core_store_codec
from quire.ops.collectives.torch_group import gloo_group


class Core:
    """Serves the stores of several ranks."""

    def __init__(self) -> None:
        self.table = RendezvousTable()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._sockets += [ours, theirs]
        threading.Thread(target=self._serve, args=(ours,), daemon=True).start()
        return theirs

    def _serve(self, sock: socket.socket) -> None:
        stream = Stream(sock, core_store_codec())
        while (calls := stream.receive()) is not None:
            for call in calls:
                with self._lock:
                    stream.send(self.table.answer(call))

    def close(self) -> None:
        for sock in self._sockets:
            sock.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def core() -> Iterator[Core]:
    core = Core()
    yield core
    core.close()


def test_values_are_visible_within_a_group_only(core: Core) -> None:
    one, two, other = (CoreStore(core.connect(), name) for name in ("a", "a", "b"))
    one.set("x", b"\0\1")
    assert two.get("x") == b"\0\1" and not other.check(["x"])
    assert two.check(["x"]) and not two.check(["x", "y"])
    assert (one.add("n", 2), two.add("n", 3), two.add("n", 0)) == (2, 5, 5)
    assert other.num_keys() == 2
    assert two.delete_key("x") and not two.delete_key("x") and not one.check(["x"])
    threading.Timer(0.05, lambda: two.set("late", "text")).start()
    assert one.get("late") == b"text"
    with pytest.raises(RuntimeError, match="no rank has set never"):
        one.wait(["never"], timedelta(seconds=0.05))


def test_lost_core_raises_an_error(core: Core) -> None:
    store = CoreStore(core.connect(), "a")
    core.close()
    with pytest.raises(RuntimeError, match="the connection to the core ended"):
        store.set("x", "y")


def test_invalid_calls_and_too_many_entries_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    table = RendezvousTable()
    for call in (StoreCall("run", ["x"]), StoreCall("get"), StoreCall("set", ["x", "y"])):
        with pytest.raises(ValueError):
            table.answer(call)
    monkeypatch.setattr(rendezvous, "MAX_ENTRIES", 1)
    table.answer(StoreCall("set", ["x"], b"1"))
    table.answer(StoreCall("set", ["x"], b"2"))
    with pytest.raises(ValueError, match="more than 1 entries"):
        table.answer(StoreCall("set", ["y"], b"1"))


def test_gloo_group_uses_the_store_as_rendezvous(core: Core) -> None:
    def run(rank: int) -> list[float]:
        group = gloo_group(CoreStore(core.connect(), "stage 0"), rank, 3, timeout_s=30)
        sums = [group.all_reduce(torch.full((2,), rank + 1.0)) for _ in range(3)]
        return [float(each[1]) for each in sums]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == [[6.0, 6.0, 6.0]] * 3
