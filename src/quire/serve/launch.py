"""Starting a core in a process of its own, for the supervisor and for front ends of one's own.

with CoreProcess(config_from_flat(model="demo")) as core:
    client = await RemoteClient.connect(core.path, tokenizer)
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

import msgspec

from quire.base.config import EngineConfig

END_S = 5.0


def start_child(
    module: str, arguments: list[str], config: object, fds: tuple[int, ...], log_level: str
) -> "subprocess.Popen[bytes]":
    """A Python module as a child that dies with us. config: sent as JSON on its standard input.

    It is in a process group of its own, so that Ctrl-C reaches only this process.
    """
    common = ["--parent", str(os.getpid()), "--log-level", log_level]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments, *common],
        stdin=subprocess.PIPE,
        pass_fds=fds,
        process_group=0,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config))
    process.stdin.close()
    return process


class CoreSocket:
    """The Unix socket of a core, in a private directory. It stays when the core is started anew:
    whoever connects meanwhile waits."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="quire-"))  # mode 0700
        self.path = self.home / "core.sock"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(64)

    @property
    def heartbeat(self) -> Path:
        return self.home / "heartbeat"

    def start_core(self, engine: EngineConfig, log_level: str) -> "subprocess.Popen[bytes]":
        """Start a core that serves this socket."""
        fd = self._listener.fileno()
        arguments = ["--listener", str(fd), "--home", str(self.home)]
        return start_child("quire.serve.core_main", arguments, engine, (fd,), log_level)

    def close(self) -> None:
        self._listener.close()
        shutil.rmtree(self.home, ignore_errors=True)


class CoreProcess:
    """A core that runs as long as the `with` block. path: what `RemoteClient.connect` takes."""

    def __init__(self, engine: EngineConfig, log_level: str = "warning") -> None:
        self._socket = CoreSocket()
        self.process = self._socket.start_core(engine, log_level)
        self.path = self._socket.path

    def __enter__(self) -> "CoreProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._socket.close()
