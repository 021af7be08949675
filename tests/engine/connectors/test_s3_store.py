"""Blocks in a bucket, of a server on this machine (moto's). Without it there is nothing to ask."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from quire.base.kv_orders import Fetched, Kept, LookedUp
from quire.engine.connectors.make import make_store
from quire.engine.connectors.store import BlockStore, StoreError
from quire.engine.connectors.worker import StoreWorker
from tests.engine.connectors.stores import (
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

boto3 = pytest.importorskip("boto3")
moto_server = pytest.importorskip("moto.server")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def client(url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "testing"), ("AWS_SECRET_ACCESS_KEY", "testing"),
        ("AWS_DEFAULT_REGION", "us-east-1"), ("AWS_ENDPOINT_URL", url),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    made = boto3.client("s3")
    made.create_bucket(Bucket="blocks")
    return made


@pytest.fixture
def store(client: Any) -> Iterator[BlockStore]:
    made = make_store("s3://blocks/of/engines", 1)
    yield made
    made.remove([key(i) for i in range(10)])
    made.close()


def test_what_was_put_is_found_and_read(store: BlockStore, client: Any) -> None:
    assert store.find([key(1)]) == [False]
    for i in (1, 2):
        assert store.put(key(i), (sealed(i)[:50], sealed(i)[50:]))
    assert store.find([key(2), key(3), key(1)]) == [True, False, True]
    assert list(store.get([key(2), key(3), key(1)])) == [sealed(2), None, sealed(1)]
    names = [each["Key"] for each in client.list_objects_v2(Bucket="blocks")["Contents"]]
    assert all(name.startswith("of/engines/quire-kv-1/") for name in names)
    store.remove([key(1), key(7)])
    assert store.find([key(1), key(2)]) == [False, True]


def test_a_workers_orders(store: BlockStore, client: Any) -> None:
    memory, answers = Memory(), Answers()
    memory.blocks = {(0, i): contents(i) for i in range(3)}
    worker = StoreWorker(store, FINGERPRINT, memory, answers.give, answers.ring)
    worker.submit(keep(0, 1, 2))
    kept = answers.take()
    assert isinstance(kept, Kept) and kept.ok == [True] * 3
    [name] = [
        each["Key"]
        for each in client.list_objects_v2(Bucket="blocks")["Contents"]
        if key(1)[-32:].hex() in each["Key"]
    ]
    client.put_object(Bucket="blocks", Key=name, Body=sealed(2))  # another block's
    worker.submit(look_up(0, 1, 5))
    looked = answers.take()
    assert isinstance(looked, LookedUp) and looked.found == [True, True, False]
    memory.blocks = {}
    worker.submit(fetch(0, 1, 5))
    fetched = answers.take()
    assert isinstance(fetched, Fetched) and fetched.ok == [True, False, False]
    assert memory.blocks == {(0, 0): contents(0)}
    worker.close(5.0)


def test_a_bucket_that_is_not_there_is_an_error(client: Any) -> None:
    store = make_store("s3://nowhere", 1)
    with pytest.raises(StoreError, match="S3 bucket nowhere"):
        store.put(key(1), (sealed(1),))
    assert threading.active_count() < 100
    store.close()
