"""The built-in Redis store, against a small server that implements a few Redis commands."""

from collections.abc import Iterator

import pytest

from quire.engine.connectors.make import make_store
from quire.engine.connectors.store import StoreError
from tests.support.engine.store_servers import SmallRedisServer
from tests.support.engine.stores import key, sealed


@pytest.fixture
def address() -> Iterator[str]:
    server = SmallRedisServer()
    yield server.address
    server.end()


def test_stored_blocks_are_found_read_and_removed(address: str) -> None:
    store = make_store(f"redis://{address}/1", 1)
    for i in (1, 2):
        assert store.put(key(i), (sealed(i)[:50], sealed(i)[50:]))
    assert store.find([key(2), key(3), key(1)]) == [True, False, True]
    assert list(store.get([key(2), key(3), key(1)])) == [sealed(2), None, sealed(1)]
    store.remove([key(1), key(7)])
    store.remove([])
    assert store.find([key(1), key(2)]) == [False, True]
    store.close()


def test_errors_do_not_show_the_password() -> None:
    store = make_store("redis://me:a-secret@127.0.0.1:1/0", 1)
    with pytest.raises(StoreError, match=r"Redis at 127.0.0.1:1/0") as raised:
        store.find([key(1)])
    assert "a-secret" not in str(raised.value)
