"""The S3 store, against a local moto server; skipped without boto3 and moto."""

import threading
from collections.abc import Iterator

import pytest

from quire.base.kv_orders import Fetched, Kept, LookedUp
from quire.engine.connectors.make import make_store
from quire.engine.connectors.store import BlockStore, StoreError
from quire.engine.connectors.worker import StoreWorker
from tests.support.engine.store_servers import S3Server, s3_server
from tests.support.engine.stores import (
    FINGERPRINT,
    Answers,
    Memory,
    contents,
    fetch,
    keep,
    key,
    look_up,
    sealed,
)

__all__ = ["s3_server"]  # a fixture


@pytest.fixture
def store(s3_server: S3Server) -> Iterator[BlockStore]:
    made = make_store(s3_server.url, 1)
    yield made
    made.close()


def test_stored_blocks_are_found_read_and_removed(store: BlockStore, s3_server: S3Server) -> None:
    assert store.find([key(1)]) == [False]
    for i in (1, 2):
        assert store.put(key(i), (sealed(i)[:50], sealed(i)[50:]))
    assert store.find([key(2), key(3), key(1)]) == [True, False, True]
    assert list(store.get([key(2), key(3), key(1)])) == [sealed(2), None, sealed(1)]
    assert all(name.startswith("of/engines/quire-kv-1/") for name in s3_server.names())
    store.remove([key(1), key(7)])
    assert store.find([key(1), key(2)]) == [False, True]


def test_store_worker_keeps_finds_and_fetches_blocks(
    store: BlockStore, s3_server: S3Server
) -> None:
    memory, answers = Memory(), Answers()
    memory.blocks = {(0, i): contents(i) for i in range(3)}
    worker = StoreWorker(store, FINGERPRINT, memory, answers.give, answers.ring)
    worker.submit(keep(0, 1, 2))
    kept = answers.take()
    assert isinstance(kept, Kept) and kept.ok == [True] * 3
    [name] = [name for name in s3_server.names() if key(1)[-32:].hex() in name]
    s3_server.write(name, sealed(2))  # the content of another block
    worker.submit(look_up(0, 1, 5))
    looked = answers.take()
    assert isinstance(looked, LookedUp) and looked.found == [True, True, False]
    memory.blocks = {}
    worker.submit(fetch(0, 1, 5))
    fetched = answers.take()
    assert isinstance(fetched, Fetched) and fetched.ok == [True, False, False]
    assert memory.blocks == {(0, 0): contents(0)}
    worker.close(5.0)


def test_missing_bucket_raises_a_store_error(s3_server: S3Server) -> None:
    store = make_store("s3://nowhere", 1)
    with pytest.raises(StoreError, match="S3 bucket nowhere"):
        store.put(key(1), (sealed(1),))
    assert threading.active_count() < 100
    store.close()
