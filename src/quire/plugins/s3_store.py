"""Store KV blocks in a bucket of S3, or of a server with its interface: `s3://BUCKET/PREFIX`.

    PREFIX/quire-kv-1/FINGERPRINT/GROUP/DI/DIGEST.kv      as in a directory (disk.py)

boto3 finds keys, region and another server's address (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ~/.aws,
a role). A rule of the bucket should delete old objects; this store deletes none. Reading an object
takes tens of milliseconds, whatever its size, so several are read at once.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from quire.base.errors import ConfigError, MissingDependency
from quire.engine.connectors.disk import LAYOUT, SUFFIX
from quire.engine.connectors.store import Buffer, StoreError, split_key

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
except ImportError as error:
    raise MissingDependency("blocks in S3 need boto3; pip install 'quire[s3]'.") from error

NUM_AT_ONCE = 16
MAX_DELETED = 1000  # by one call, as the interface says
ABSENT = ("404", "NoSuchKey", "NotFound")


class S3Store:
    """A store at //BUCKET, or //BUCKET/PREFIX."""

    def __init__(self, address: str, max_bytes: int) -> None:
        bucket, _, prefix = address.removeprefix("//").partition("/")
        if not bucket:
            raise ConfigError(f"s3:// takes BUCKET/PREFIX, got {address!r}.")
        self._bucket = bucket
        self._prefix = "/".join(part for part in (prefix.strip("/"), LAYOUT) if part)
        config = Config(
            connect_timeout=0.5,
            read_timeout=1.5,
            retries={"total_max_attempts": 1},
            max_pool_connections=NUM_AT_ONCE,
        )
        self._client: Any = boto3.client("s3", config=config)
        self._threads = ThreadPoolExecutor(NUM_AT_ONCE, "quire-s3")

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        with self._errors():
            return list(self._threads.map(self._has, keys))

    def get(self, keys: Sequence[bytes]) -> Iterator[Buffer | None]:
        reads = [self._threads.submit(self._read, key) for key in keys]
        try:
            for each in reads:
                with self._errors():
                    value = each.result()
                yield value
        finally:
            for each in reads:
                each.cancel()

    def put(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        with self._errors():
            self._client.put_object(Bucket=self._bucket, Key=self._name(key), Body=b"".join(parts))
        return True

    def remove(self, keys: Sequence[bytes]) -> None:
        names = [{"Key": self._name(key)} for key in keys]
        for first in range(0, len(names), MAX_DELETED):
            part = {"Objects": names[first : first + MAX_DELETED], "Quiet": True}
            with self._errors():
                reply = self._client.delete_objects(Bucket=self._bucket, Delete=part)
            if reply.get("Errors"):
                raise StoreError(f"S3 bucket {self._bucket}: not deleted: {reply['Errors'][0]}.")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _name(self, key: bytes) -> str:
        fingerprint, group, digest = split_key(key)
        name = digest.hex()
        return f"{self._prefix}/{fingerprint.hex()}/{group}/{name[:2]}/{name}{SUFFIX}"

    def _has(self, key: bytes) -> bool:
        try:
            self._client.head_object(Bucket=self._bucket, Key=self._name(key))
        except ClientError as error:
            if _code(error) in ABSENT:
                return False
            raise
        return True

    def _read(self, key: bytes) -> bytes | None:
        try:
            found = self._client.get_object(Bucket=self._bucket, Key=self._name(key))
            value: bytes = found["Body"].read()
        except ClientError as error:
            if _code(error) in ABSENT:
                return None
            raise
        return value

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (BotoCoreError, ClientError) as error:
            raise StoreError(f"S3 bucket {self._bucket}: {error}") from error


def _code(error: "ClientError") -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
