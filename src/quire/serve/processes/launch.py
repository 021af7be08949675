"""Start of a core in a process of its own, for the supervisor and for custom front ends.

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
from quire.serve.processes.cores import ALONE, CoreShare

END_S = 10.0  # for a process to end by itself; takes seconds on a busy machine
PREFIX, SOCKET, FAILURE = "quire-", "core.sock", "failure"
ABANDONED_S = 60.0  # a younger directory may belong to a server that is starting


def core_end_s(engine: EngineConfig) -> float:
    """Return how long a core may take to end. After its present step it writes cached blocks to
    stores."""
    return END_S + (KEEP_AT_END_S if engine.cache.stores else 0.0)


class StartFailure(msgspec.Struct, frozen=True):
    """Report of a core that could not start. kind: name of an error class in `base/errors.py`."""

    kind: str
    message: str


class CoreSocket:
    """The Unix socket of a core, in a private directory. It survives restarts of the core, and
    clients that connect meanwhile wait."""

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
        share: CoreShare = ALONE,
        metrics_prefix: str = "quire",
    ) -> "subprocess.Popen[bytes]":
        """Start a core that serves this socket. name: the model's name in metrics. share: the
        core's share of the machine. metrics_prefix: prefix of the metrics' names."""
        fd = self._listener.fileno()
        arguments = ["--listener", str(fd), "--home", str(self.home)]
        arguments += ["--core", str(share.number), "--num-cores", str(share.num_cores)]
        arguments += ["--metrics-prefix", metrics_prefix]
        arguments += [] if name is None else ["--name", name]
        arguments += ["--is-one-model-of-several"] if share.model else []
        environment = {**os.environ, **share.environment}
        environment |= spin_settings(environment)
        config, module = share.config(engine), "quire.serve.processes.core_main"
        process = start_child(module, arguments, config, (fd,), log_level, environment)
        share.bind(process.pid)
        return process

    def close(self) -> None:
        self._listener.close()
        shutil.rmtree(self.home, ignore_errors=True)


def remove_abandoned_sockets() -> None:
    """Remove private directories of killed servers (kill -9): their sockets refuse connections."""
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
    """A core that runs until the end of the `with` block, or until `close`. path: socket for
    `RemoteClient.connect`. failure: file with the reason if the core cannot start."""

    def __init__(
        self, engine: EngineConfig, log_level: str = "warning", share: CoreShare = ALONE
    ) -> None:
        self._end_s = core_end_s(engine)
        self._socket = CoreSocket()
        self.process = self._socket.start_core(engine, log_level, share=share)
        self.path = self._socket.path
        self.heartbeat = self._socket.heartbeat
        self.failure = self._socket.home / FAILURE

    def __enter__(self) -> "CoreProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request_end(self) -> None:
        """Request the core's end after its present step."""
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End the core after its present step, and kill it if it still runs after `core_end_s`."""
        self.request_end()
        try:
            self.process.wait(self._end_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a device driver may hold it
                self.process.wait(END_S)
        self._socket.close()
