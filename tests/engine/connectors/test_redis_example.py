"""The Valkey example of docs/extend/kv-stores.md, over a socket.

The server is a real one if installed, else one that knows a few commands of the protocol."""

import logging
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from quire.base.errors import ConfigError
from quire.base.kv_orders import Fetched, Kept, LookedUp
from quire.base.plugins import CONNECTORS
from quire.engine.connectors.make import make_store
from quire.engine.connectors.store import BlockStore, StoreError
from quire.engine.connectors.worker import StoreWorker
from tests.support.engine.store_servers import open_redis
from tests.support.engine.stores import (
    BLOCK_BYTES,
    FINGERPRINT,
    PATIENCE_S,
    Answers,
    Memory,
    contents,
    fetch,
    keep,
    key,
    look_up,
    sealed,
)
from tests.support.plugin_site import Site


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    server = open_redis(tmp_path)
    yield server.address
    server.end()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    made = Site(folder)
    made.install_example("quire_valkey")
    yield made
    sys.modules.pop("quire_valkey", None)


@pytest.fixture
def store(site: Site, address: str) -> Iterator[BlockStore]:
    made = make_store(f"valkey:{address}/1", max_bytes=1 << 30)
    assert type(made).__module__ == "quire_valkey"
    yield made
    made.close()


def test_values_are_returned_whole_and_in_order(store: BlockStore) -> None:
    keys = [key(i) for i in range(5)]
    assert store.find(keys) == [False] * 5
    assert list(store.get(keys)) == [None] * 5
    assert list(store.get([])) == [] and store.find([]) == []
    large = bytes(range(256)) * 8192 + b"\r\n"
    assert store.put(keys[3], (b"head\r\n", memoryview(large)))
    assert store.put(keys[1], (b"", b""))
    assert store.find(keys) == [False, True, False, True, False]
    assert list(store.get(keys)) == [None, b"", None, b"head\r\n" + large, None]
    assert store.put(keys[3], (b"new",))
    assert list(store.get([keys[3], keys[3]])) == [b"new", b"new"]
    store.remove([keys[3], keys[4]])
    store.remove([])
    assert store.find(keys) == [False, True, False, False, False]


def test_worker_keeps_and_fetches_blocks_and_damage_is_a_miss(
    store: BlockStore, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    memory, answers = Memory(), Answers()
    memory.blocks = {(0, i): contents(i) for i in range(50)}
    worker = StoreWorker(store, FINGERPRINT, memory, answers.give, answers.ring)
    client = redis.Redis.from_url(f"redis://{address}/1")

    def done(order: object) -> LookedUp | Fetched | Kept:
        worker.submit(order)  # type: ignore[arg-type]
        return answers.take()

    assert done(keep(*range(40))).ok == [True] * 40
    assert client.get(key(7)) == sealed(7)
    client.set(key(8), sealed(9))
    client.set(key(9), sealed(9)[:-1])
    memory.blocks.clear()
    with caplog.at_level(logging.WARNING):
        assert done(look_up(7, 45)).found == [True, False]
        fetched = done(fetch(*range(45)))
    ok = [i < 40 and i not in (8, 9) for i in range(45)]
    assert fetched.ok == ok and fetched.num_bytes == sum(ok) * BLOCK_BYTES[0]
    assert memory.blocks == {(0, i): contents(i) for i in range(45) if ok[i]}
    assert done(look_up(8, 9, 10)).found == [False, False, True]
    assert len(caplog.records) == 1
    worker.close(PATIENCE_S)
    client.close()


def refused_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_missing_server_gives_misses_and_one_warning(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(f"valkey:{refused_address()}", max_bytes=1)  # does not connect yet
    calls: list[Callable[[], object]] = [
        lambda: store.find([key(1)]),
        lambda: list(store.get([key(1)])),
        lambda: store.put(key(1), (b"x",)),
        lambda: store.remove([key(1)]),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="Valkey at 127.0.0.1:"):
            call()
    memory, answers = Memory(), Answers()
    worker = StoreWorker(store, FINGERPRINT, memory, answers.give, answers.ring)
    with caplog.at_level(logging.WARNING):
        for order in (look_up(1), fetch(1), keep(1), look_up(1)):
            worker.submit(order)
            answer = answers.take()
            assert (answer.found if isinstance(answer, LookedUp) else answer.ok) == [False]
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "the KV store ValkeyStore failed"
    ]
    worker.close(PATIENCE_S)


def test_invalid_address_is_an_error_at_the_start(site: Site) -> None:
    with pytest.raises(ConfigError, match=r"'valkey:\*\*\*' cannot be created: ValueError"):
        make_store("valkey:host:port", max_bytes=1)


def test_store_without_all_methods_is_rejected(site: Site) -> None:
    source = "class Store:\n    def find(self): ...\n    def get(self): ...\n"
    site.install("half", CONNECTORS, "half", "half_a_store:Store", source)
    with pytest.raises(
        ConfigError, match=r"half 1.0.*cannot be used: it has no put, remove, close"
    ):
        make_store("half:x", max_bytes=1)
