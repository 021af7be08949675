"""Starting a core in a process of its own, for the supervisor and for front ends of one's own.

with CoreProcess(config_from_flat(model="demo")) as core:
    client = await RemoteClient.connect(core.path, tokenizer)
"""

import contextlib
import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from pathlib import Path

import msgspec

from quire.base.kv_orders import KEEP_AT_END_S
from quire.base.settings.config import EngineConfig
from quire.engine.wire.spawn import spin_settings, start_child
from quire.serve.processes.cores import ALONE, CorePlace

END_S = 10.0  # for a process to end by itself; on a machine with too much to do it takes seconds
PREFIX, SOCKET, FAILURE = "quire-", "core.sock", "failure"
ABANDONED_S = 60.0  # a directory younger than this may belong to a server that is just starting


def core_end_s(engine: EngineConfig) -> float:
    """Return how long a core may take to end: after its present step it keeps in stores what is
    cached."""
    return END_S + (KEEP_AT_END_S if engine.cache.stores else 0.0)


class StartFailure(msgspec.Struct, frozen=True):
    """What a core leaves behind that could not start. kind: an error of `base/errors.py`."""

    kind: str
    message: str


class CoreSocket:
    """The Unix socket of a core, in a private directory. It stays when the core is started anew:
    whoever connects meanwhile waits."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix=PREFIX))  # mode 0700
        self.path = self.home / SOCKET
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(64)

    @property
    def heartbeat(self) -> Path:
        return self.home / "heartbeat"

    def start_core(
        self,
        engine: EngineConfig,
        log_level: str,
        name: str | None = None,
        place: CorePlace = ALONE,
        metrics_prefix: str = "quire",
    ) -> "subprocess.Popen[bytes]":
        """Start a core that serves this socket. name: what its metrics call the model; place: which
        of several it is; metrics_prefix: how their names begin."""
        fd = self._listener.fileno()
        arguments = ["--listener", str(fd), "--home", str(self.home)]
        arguments += ["--core", str(place.number), "--num-cores", str(place.num_cores)]
        arguments += ["--metrics-prefix", metrics_prefix]
        arguments += [] if name is None else ["--name", name]
        arguments += ["--is-one-model-of-several"] if place.model else []
        environment = {**os.environ, **place.environment}
        environment |= spin_settings(environment)
        config, module = place.config(engine), "quire.serve.processes.core_main"
        process = start_child(module, arguments, config, (fd,), log_level, environment)
        place.bind(process.pid)
        return process

    def close(self) -> None:
        self._listener.close()
        shutil.rmtree(self.home, ignore_errors=True)


def remove_abandoned_sockets() -> None:
    """Remove private directories of servers that were killed (kill -9): nobody listens there."""
    for home in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        path = home / SOCKET
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            state = home.lstat()
            age_s = time.time() - path.lstat().st_mtime
            if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
                continue
            client.setblocking(False)
            if age_s > ABANDONED_S and client.connect_ex(str(path)) == errno.ECONNREFUSED:
                shutil.rmtree(home)


class CoreProcess:
    """A core that runs as long as the `with` block, or until `close`. path: what
    `RemoteClient.connect` takes. failure: the file in which it says why it could not start."""

    def __init__(
        self, engine: EngineConfig, log_level: str = "warning", place: CorePlace = ALONE
    ) -> None:
        self._end_s = core_end_s(engine)
        self._socket = CoreSocket()
        self.process = self._socket.start_core(engine, log_level, place=place)
        self.path = self._socket.path
        self.heartbeat = self._socket.heartbeat
        self.failure = self._socket.home / FAILURE

    def __enter__(self) -> "CoreProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask_to_end(self) -> None:
        """Ask the core to end after its present step."""
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End the core after its present step, or at the latest after `core_end_s`."""
        self.ask_to_end()
        try:
            self.process.wait(self._end_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a device driver may hold it
                self.process.wait(END_S)
        self._socket.close()
