"""Ranks on a Ray cluster, as the core sees them: a process of its own talks to Ray.

    core    RayOrder (standard input)          Go
    driver                            Host            Trouble (end of the stream: it has ended)

The driver (engine/ranks/ray/driver.py) holds the placement group and an actor for each rank. When
it ends, however it ends, Ray ends all of these; and the kernel ends it with the core. So nothing of
Ray is in the core, nor in a step.
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
from quire.engine.ranks.dial_in import Address
from quire.engine.ranks.rank_set import END_S
from quire.engine.wire.spawn import end_child, start_child
from quire.engine.wire.wire import Codec, Stream
from quire.ops.host.threads import wanted_threads

MOST_BYTES = 1 << 20
START_S = 60.0  # for actors to start and connect, once there is room for them
VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class RayOrder(msgspec.Struct, frozen=True):
    """What is asked of Ray. address: of the cluster; None: as Ray finds it. device: auto, cpu or
    cuda. num_cores: engines that the cluster is for. num_threads: of a rank on a CPU; None: an even
    part of the cluster. wait_s: how long to wait for room."""

    address: str | None
    num_ranks: int
    in_stage: int
    num_cores: int
    device: str
    num_threads: int | None
    wait_s: float


class Host(msgspec.Struct, frozen=True, tag=True):
    """Driver to core: the address of this machine in the cluster."""

    host: str


class Go(msgspec.Struct, frozen=True, tag=True):
    """Core to driver: let actors keep ranks, which connect there."""

    host: str
    port: int
    secret: bytes


class Trouble(msgspec.Struct, frozen=True, tag=True):
    """Driver to core: last words. kind: an error of base/errors.py."""

    kind: str
    message: str


FromDriver = Host | Trouble


def driver_side() -> Codec[Go]:
    """Return the codec of the driver."""
    return Codec(Go, most_bytes=MOST_BYTES)


def _core_side() -> Codec[FromDriver]:
    return Codec(FromDriver, most_bytes=MOST_BYTES)


class RayStarter:
    """A RankStarter. Raises MissingDependency where Ray is not installed."""

    keeper = "Ray actor"
    secret: bytes | None = None  # made for this start
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
            wanted_threads(),
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
        with contextlib.suppress(OSError):  # its end tells
            self._stream.send(Go(core.host, core.port, secret))

    def fileno(self) -> int:
        """See RankStarter."""
        return self._stream.socket.fileno()

    def take_news(self) -> None:
        """See RankStarter."""
        self._read()

    def close(self) -> None:
        """See RankStarter: the driver ends when its stream does."""
        self._stream.socket.close()
        self._theirs.close()
        if self._process is not None:
            end_child(self._process, END_S)

    def _read(self) -> list[Host]:
        """Wait for what the driver says. Raises its trouble, and EngineError at its end."""
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
