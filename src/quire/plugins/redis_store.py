"""Store KV blocks in a Redis server, or one that speaks its protocol. Engines on several machines
may share it: `redis://HOST:PORT/DATABASE`, or `rediss://` over TLS."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from quire.base.errors import MissingDependency
from quire.engine.connectors.store import Buffer, StoreError

try:
    import redis
except ImportError as error:
    raise MissingDependency(
        "blocks in Redis need its client; pip install 'quire[redis]'."
    ) from error

PREFIX = b"quire-kv-1:"


class RedisStore:
    """A store at `//[USER:PASSWORD@]HOST[:PORT][/DATABASE]`. The server limits its memory: run it
    with `--maxmemory ... --maxmemory-policy allkeys-lru`."""

    scheme = "redis"

    def __init__(self, address: str, max_bytes: int) -> None:
        url = f"{self.scheme}:{address}"
        # The text before the @ and in the query may be secret.
        self._place = address.rpartition("@")[2].removeprefix("//").partition("?")[0]
        self._client = redis.Redis.from_url(url, socket_connect_timeout=0.5, socket_timeout=1.5)

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        with self._errors():
            pipeline = self._client.pipeline(transaction=False)  # one round trip
            for key in keys:
                pipeline.exists(PREFIX + key)
            return [bool(number) for number in pipeline.execute()]

    def get(self, keys: Sequence[bytes]) -> Iterator[Buffer | None]:
        with self._errors():
            found: Any = self._client.mget([PREFIX + key for key in keys]) if keys else []
        yield from found

    def put(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        with self._errors():
            return bool(self._client.set(PREFIX + key, b"".join(parts)))

    def remove(self, keys: Sequence[bytes]) -> None:
        with self._errors():
            if keys:
                self._client.delete(*(PREFIX + key for key in keys))

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except redis.RedisError as error:
            raise StoreError(f"Redis at {self._place}: {error}") from error


class TlsRedisStore(RedisStore):
    scheme = "rediss"
