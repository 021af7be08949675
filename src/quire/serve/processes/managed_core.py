"""Core processes that are owned by an object of this program and end with it.

The kernel kills a child when the thread that started it ends (`engine/wire/child.py`). An engine
may be created in a pool's thread, which can end early. So a dedicated thread starts the core and
stays.
"""

import contextlib
import os
import selectors
import socket
import subprocess
import threading
from pathlib import Path

import msgspec

from quire.base import errors
from quire.base.clock import MonotonicClock
from quire.base.errors import EngineDead, EngineError, QuireError
from quire.base.messages import Ready
from quire.base.settings.config import EngineConfig
from quire.engine.observability.heartbeat import HeartbeatReader, StuckWatch
from quire.engine.observability.starvation import read_threads
from quire.engine.wire.wire import Frames, client_codec
from quire.serve.processes.cores import ALONE, CoreShare, core_shares
from quire.serve.processes.launch import END_S, CoreProcess, StartFailure, remove_abandoned_sockets

READ_BYTES = 1 << 16


class ManagedCore:
    """A core process. `start` and `stop` may be called from any thread."""

    def __init__(self, config: EngineConfig, log_level: str, share: CoreShare = ALONE) -> None:
        self._config = config
        self._log_level = log_level
        self._share = share
        self._name = "the engine's process" if share is ALONE else f"{share.name} of the engine"
        self._lock = threading.Lock()
        self._is_stopped = False
        self._end = threading.Event()
        self._started = threading.Event()
        self._process: CoreProcess | None = None
        self._error: BaseException | None = None
        self._watch: StuckWatch | None = None
        self._watching = threading.Lock()  # checks come from any thread
        self._owner_pid = os.getpid()  # a fork of this program must not affect the core

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    @property
    def is_alive(self) -> bool:
        """Whether the process was started and still runs."""
        return self._process is not None and self._process.process.poll() is None

    @property
    def path(self) -> Path:
        """The socket for clients. Raises EngineDead if there is none."""
        process = self._process
        if process is None:
            raise self.dead()
        return process.path

    def start(self) -> None:
        """Start the process, which then loads its model. Raises EngineDead after a `stop`."""
        with self._lock:
            if self._is_stopped:
                raise self.dead()
            threading.Thread(target=self._keep, name="quire-core", daemon=True).start()
            self._started.wait()
            if self._process is None:
                assert self._error is not None
                raise self._error
            pid = self._process.process.pid
            reader = HeartbeatReader(self._process.heartbeat)
            self._watch = StuckWatch(reader, lambda: read_threads(pid))

    def wait_until_ready(self) -> Ready:
        """Wait without a time limit until the model is loaded; return the engine's description.
        Raise the error of a failed start, EngineDead if the process ended otherwise."""
        core = self._process
        if core is None:
            raise self.dead()
        codec, frames = client_codec(), Frames()
        pidfd = os.pidfd_open(core.process.pid)
        try:
            with socket.socket(socket.AF_UNIX) as sock, selectors.DefaultSelector() as selector:
                sock.connect(str(core.path))
                selector.register(sock, selectors.EVENT_READ)
                selector.register(pidfd, selectors.EVENT_READ)
                while True:
                    ready = {key.fileobj for key, _ in selector.select()}
                    data = sock.recv(READ_BYTES) if sock in ready else b""
                    if not data:
                        raise self._no_start(core)
                    for body in frames.feed(data):
                        message = codec.decode(body)
                        assert isinstance(message, Ready)
                        return message
        finally:
            os.close(pidfd)

    def request_stop(self) -> None:
        """Request the end of the process without waiting for it; `stop` must follow."""
        if os.getpid() == self._owner_pid and self._process is not None:
            self._process.request_end()

    def stop(self) -> None:
        """End the process and wait for its end. A second call does nothing."""
        if os.getpid() != self._owner_pid:
            return
        self._is_stopped = True
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                process.close()
            self._end.set()

    def check(self) -> None:
        """Raise EngineDead if the process has ended or makes no progress."""
        if self._is_stopped or not self.is_alive:
            raise self.dead()
        self.check_progress()

    def check_progress(self) -> None:
        """Raise EngineDead if the process runs, but made no progress during the last second."""
        if not self.is_alive or self._watch is None:
            return
        with self._watching:
            is_stuck = self._watch.is_stuck(MonotonicClock().now())
        if is_stuck:
            raise EngineDead(f"{self._name} makes no progress; shut it down.")

    def dead(self) -> EngineDead:
        """Return the error for callers that wait for an ended or stopped process."""
        if self._is_stopped:
            return EngineDead("this engine was shut down; create a new one.")
        status = None if self._process is None else self._process.process.poll()
        status_text = ""
        if status is not None:
            status_text = f" (signal {-status})" if status < 0 else f" (exit status {status})"
        return EngineDead(f"{self._name} has ended{status_text}; create a new one.")

    def _keep(self) -> None:
        """Start the process in this thread, and keep the thread alive until `stop`."""
        try:
            remove_abandoned_sockets()
            self._process = CoreProcess(self._config, self._log_level, self._share)
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()
        self._end.wait()

    def _no_start(self, core: CoreProcess) -> QuireError:
        """Return the error of a core that ended before it was ready."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            core.process.wait(END_S)
        if self._is_stopped:
            return self.dead()
        try:
            failure = msgspec.json.decode(core.failure.read_bytes(), type=StartFailure)
        except (OSError, msgspec.MsgspecError):
            return self.dead()
        kind = getattr(errors, failure.kind, EngineError)
        known = isinstance(kind, type) and issubclass(kind, QuireError)
        return kind(failure.message) if known else EngineError(failure.message)


class ManagedCores:
    """The cores of one engine, `data_parallel_size` in number. Each call applies to all of them.
    Raises ConfigError if there are too few GPUs."""

    def __init__(self, config: EngineConfig, log_level: str) -> None:
        self._cores = [ManagedCore(config, log_level, share) for share in core_shares(config)]

    @property
    def is_stopped(self) -> bool:
        return self._cores[0].is_stopped

    @property
    def is_alive(self) -> bool:
        """Whether at least one process was started and still runs."""
        return any(core.is_alive for core in self._cores)

    @property
    def paths(self) -> list[Path]:
        """The sockets for clients. Raises EngineDead if a core has none."""
        return [core.path for core in self._cores]

    def start(self) -> None:
        """Start the processes, which then load the model. Raises EngineDead after a `stop`."""
        for core in self._cores:
            core.start()

    def wait_until_ready(self) -> None:
        """Wait until all cores are loaded. Raise the error of a core that failed to start."""
        for core in self._cores:
            core.wait_until_ready()

    def stop(self) -> None:
        """End the processes and wait for their end. A second call does nothing."""
        for core in self._cores:
            core.request_stop()
        for core in self._cores:
            core.stop()

    def check(self) -> None:
        """Raise EngineDead if a process has ended or makes no progress."""
        for core in self._cores:
            core.check()

    def check_progress(self) -> None:
        """Raise EngineDead if a process runs, but makes no progress, or if all have ended."""
        for core in self._cores:
            core.check_progress()
        if not self.is_alive:
            raise self.dead()

    def check_some(self) -> None:
        """Raise EngineDead if all processes have ended or make no progress."""
        for core in self._cores:
            with contextlib.suppress(EngineDead):
                return core.check()
        raise self.dead()

    def dead(self) -> EngineDead:
        """Return the error of the first core that has ended."""
        ended = (core for core in self._cores if not core.is_alive)
        return next(ended, self._cores[0]).dead()
