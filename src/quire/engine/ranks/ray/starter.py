"""Ranks on a Ray cluster, from the core's side: a separate driver process talks to Ray.

    core    RayOrder (standard input)          Go
    driver                            Host            Trouble (end of the stream: it has ended)

The driver (engine/ranks/ray/driver.py) holds the placement group and an actor for each rank. When
it ends for whatever reason, Ray ends these, and the kernel ends the driver with the core. So the
core does not import Ray, and no step uses it.
"""

import contextlib
import importlib.util
import os
import socket
import subprocess

import msgspec

from quire.base import errors
from quire.base.errors import EngineError, MissingDependency, QuireError
from quire.base.settings.config import EngineConfig
from quire.engine.ranks.connections import Address
from quire.engine.ranks.messages import Stream
from quire.engine.ranks.rank_set import END_S
from quire.engine.wire.spawn import end_child, start_child
from quire.engine.wire.wire import Codec
from quire.ops.host.threads import configured_threads

MAX_BYTES = 1 << 20  # maximum size of a message
START_S = 60.0  # time for actors to start and connect once resources are reserved
VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class RayOrder(msgspec.Struct, frozen=True):
    """Resources that the driver reserves. address: address of the cluster; None: Ray finds it.
    in_stage: ranks of a stage. num_cores: cores that share the cluster. device: auto, cpu or cuda.
    num_threads: threads of a rank on a CPU; None: an even share of the cluster. wait_s: timeout."""

    address: str | None
    num_ranks: int
    in_stage: int
    num_cores: int
    device: str
    num_threads: int | None
    wait_s: float


class Host(msgspec.Struct, frozen=True, tag=True):
    """Driver to core: address of this machine in the cluster."""

    host: str


class Go(msgspec.Struct, frozen=True, tag=True):
    """Core to driver: start actors with ranks. host, port: address to which they connect."""

    host: str
    port: int
    secret: bytes


class Trouble(msgspec.Struct, frozen=True, tag=True):
    """Driver to core: the error that ends the driver. kind: name of a class in base/errors.py."""

    kind: str
    message: str


FromDriver = Host | Trouble


def driver_side() -> Codec[Go]:
    """Return the driver's codec for messages of the core."""
    return Codec(Go, max_bytes=MAX_BYTES)


def _core_side() -> Codec[FromDriver]:
    return Codec(FromDriver, max_bytes=MAX_BYTES)


class RayStarter:
    """Starter of ranks in Ray actors. Raises MissingDependency if Ray is not installed."""

    agent_name = "Ray actor"
    secret: bytes | None = None  # the core generates one for each start
    port = 0

    def __init__(self, config: EngineConfig, log_level: str) -> None:
        if importlib.util.find_spec("ray") is None:
            raise MissingDependency(
                "distributed_executor_backend=ray needs Ray, on every machine of the cluster:"
                ' pip install "quire[ray]"'
            )
        parallel = config.parallel
        self._order = RayOrder(
            parallel.ray_address,
            parallel.num_ranks,
            parallel.tensor_parallel_size,
            parallel.data_parallel_size,
            config.device,
            configured_threads(),
            parallel.node_wait_s,
        )
        self.wait_s = parallel.node_wait_s + START_S
        self._log_level = log_level
        ours, self._theirs = socket.socketpair()
        self._stream = Stream(ours, _core_side())
        self._process: subprocess.Popen[bytes] | None = None

    def host(self) -> str:
        """See RankStarter."""
        with self._theirs as theirs:
            self._process = start_child(
                "quire.engine.ranks.ray.driver",
                ["--socket", str(theirs.fileno())],
                self._order,
                (theirs.fileno(),),
                self._log_level,
                {**VARIABLES, **os.environ},
            )
        while True:
            for message in self._read():
                return message.host

    def start(self, core: Address, secret: bytes) -> None:
        """See RankStarter."""
        with contextlib.suppress(OSError):  # the next read detects a closed connection
            self._stream.send(Go(core.host, core.port, secret))

    def fileno(self) -> int:
        """See RankStarter."""
        return self._stream.socket.fileno()

    def take_news(self) -> None:
        """See RankStarter."""
        self._read()

    def close(self) -> None:
        """See RankStarter: the driver ends when its connection closes."""
        self._stream.socket.close()
        self._theirs.close()
        if self._process is not None:
            end_child(self._process, END_S)

    def _read(self) -> list[Host]:
        """Wait for the driver's messages. Raises the error that it reports, and EngineError if it
        has ended."""
        messages = self._stream.receive()
        if messages is None:
            raise EngineError(f"the process that connects to Ray has ended{self._status()}.")
        for message in messages:
            if isinstance(message, Trouble):
                raise _error_of(message)
        return [message for message in messages if isinstance(message, Host)]

    def _status(self) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(1.0)
            return f" (signal {-status})" if status < 0 else f" (exit status {status})"
        return ""


def _error_of(trouble: Trouble) -> QuireError:
    kind = getattr(errors, trouble.kind, EngineError)
    known = isinstance(kind, type) and issubclass(kind, QuireError)
    return (kind if known else EngineError)(trouble.message)
