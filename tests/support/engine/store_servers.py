"""Local servers for stores: a real Redis if one is installed, else a few commands of its protocol;
and moto's server, with S3's interface."""

import contextlib
import shutil
import signal
import socket
import socketserver
import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import redis

from tests.support.engine.stores import PATIENCE_S, Gate

Command = list[bytes]


class StoreServer(Protocol):
    """A server, as its tests see it. url: of a store in it. end: at once, and with all connections.
    names, read, write: what it keeps, behind the back of the stores."""

    url: str

    def end(self) -> None: ...
    def names(self) -> list[Any]: ...
    def read(self, name: Any) -> bytes: ...
    def write(self, name: Any, value: bytes) -> None: ...


class Handler(socketserver.StreamRequestHandler):
    """One connection of `SmallRedis`."""

    server: "SmallRedis"

    def handle(self) -> None:
        self.server.connections.append(self.connection)
        with contextlib.suppress(OSError):
            while (command := self._command()) is not None:
                self.server.gate.go_through()
                self.wfile.write(self.server.answer(command))

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()

    def _command(self) -> Command | None:
        head = self.rfile.readline()
        if not head.startswith(b"*"):
            return None
        words = []
        for _ in range(int(head[1:])):
            length = int(self.rfile.readline()[1:])
            words.append(self.rfile.read(length + 2)[:length])
        return words


class SmallRedis(socketserver.ThreadingTCPServer):
    """Enough of Redis for EXISTS, SET, GET, MGET, DEL and KEYS *, in both versions of the protocol.
    All databases are one. gate: before each answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.values: dict[bytes, bytes] = {}
        self.connections: list[socket.socket] = []
        self.gate = Gate()
        self._null = b"$-1\r\n"

    def answer(self, command: Command) -> bytes:
        name, *words = command
        match name.upper():
            case b"HELLO":
                self._null = b"_\r\n"
                return b"%1\r\n$5\r\nproto\r\n:3\r\n"
            case b"SELECT" | b"CLIENT":
                return b"+OK\r\n"
            case b"SET":
                self.values[words[0]] = words[1]
                return b"+OK\r\n"
            case b"EXISTS":
                return b":%d\r\n" % sum(word in self.values for word in words)
            case b"DEL":
                return b":%d\r\n" % sum(self.values.pop(word, None) is not None for word in words)
            case b"GET":
                return self._value(words[0])
            case b"MGET":
                return _array([self._value(word) for word in words])
            case b"KEYS":
                return _array([_string(name) for name in self.values])
            case _:
                return b"-ERR unknown command\r\n"

    def _value(self, name: bytes) -> bytes:
        value = self.values.get(name)
        return self._null if value is None else _string(value)


def _string(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def _array(items: list[bytes]) -> bytes:
    return b"*%d\r\n" % len(items) + b"".join(items)


class RedisServer:
    """What both kinds of Redis have in common. address: HOST:PORT."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.url = f"redis://{address}/1"
        self._client: Any = redis.Redis.from_url(self.url)

    def names(self) -> list[Any]:
        return list(self._client.keys("*"))

    def read(self, name: Any) -> bytes:
        return bytes(self._client.get(name))

    def write(self, name: Any, value: bytes) -> None:
        self._client.set(name, value)

    def end(self) -> None:
        self._client.close()


class SmallRedisServer(RedisServer):
    def __init__(self) -> None:
        self.server = SmallRedis()
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()
        super().__init__(f"127.0.0.1:{self.server.server_address[1]}")

    def hang(self) -> None:
        self.server.gate.shut()

    def end(self) -> None:
        super().end()
        self.server.gate.open()
        self.server.shutdown()  # a second time it has nothing to do
        self._thread.join()
        self.server.server_close()
        for each in self.server.connections:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class RealRedisServer(RedisServer):
    def __init__(self, program: str, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self._process = subprocess.Popen([program, *flags], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "Ready to accept connections" in line:
                break
        super().__init__(f"127.0.0.1:{port}")

    def hang(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        super().end()
        self._process.kill()
        self._process.communicate(timeout=PATIENCE_S)


def open_redis(folder: Path) -> SmallRedisServer | RealRedisServer:
    program = shutil.which("redis-server")
    return SmallRedisServer() if program is None else RealRedisServer(program, folder)


class S3Server:
    """A bucket in a server of moto's, which the environment names from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        boto3 = pytest.importorskip("boto3")
        self._server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0)
        self._server.start()
        self._is_running = True
        host, port = self._server.get_host_and_port()
        for name, value in (
            ("AWS_ACCESS_KEY_ID", "testing"), ("AWS_SECRET_ACCESS_KEY", "testing"),
            ("AWS_DEFAULT_REGION", "us-east-1"), ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        ):  # fmt: skip
            monkeypatch.setenv(name, value)
        self.bucket = f"blocks-{uuid.uuid4().hex}"  # all servers in a process have the same buckets
        self.url = f"s3://{self.bucket}/of/engines"
        self.client: Any = boto3.client("s3")
        self.client.create_bucket(Bucket=self.bucket)

    def names(self) -> list[Any]:
        listed = self.client.list_objects_v2(Bucket=self.bucket)
        return [each["Key"] for each in listed.get("Contents", [])]

    def read(self, name: Any) -> bytes:
        return bytes(self.client.get_object(Bucket=self.bucket, Key=name)["Body"].read())

    def write(self, name: Any, value: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=name, Body=value)

    def end(self) -> None:
        if self._is_running:
            self._is_running = False
            self._server.stop()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[SmallRedisServer | RealRedisServer]:
    server = open_redis(tmp_path)
    yield server
    server.end()


@pytest.fixture
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    server = S3Server(monkeypatch)
    yield server
    server.end()
