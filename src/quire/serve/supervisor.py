"""`quire serve`: one core process, some API processes, and this one, which starts and watches them.

It holds both sockets from the beginning: the TCP socket, bound before anything is loaded, so that a
port in use is an error at once, and the core's Unix socket, in a private directory, so that clients
of a core that is started anew only wait. It imports neither torch nor FastAPI, and sleeps.

    SIGTERM, -INT, -HUP  API processes drain, then the core keeps what is cached in its stores, if
                         it has any, and ends; exit status 0
    a second one         everything ends now; exit status 1
    a process dies       the others end; exit status 1 (3 if it could not start)
    the core is stuck    it is killed, which is the case above
    --restart-engine     a core that died is started anew
    kill -9 of this one  the kernel kills the children (serve/child.py)
"""

import contextlib
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import time
from dataclasses import dataclass

from quire.base.config import EngineConfig, ServerConfig
from quire.base.errors import ConfigError
from quire.engine.heartbeat import HeartbeatReader
from quire.models.source import resolve_model
from quire.serve.child import NO_START
from quire.serve.launch import (
    END_S,
    CoreSocket,
    core_end_s,
    remove_abandoned_sockets,
    start_child,
)

logger = logging.getLogger("quire")

WATCH_S = 1.0  # between two looks at the core's heartbeat
DUMP_S = 2.0  # for a stuck core to show where it is
MAX_OPEN_FILES = 1 << 16
MAX_RESTARTS, RESTART_WINDOW_S = 3, 120.0  # a core that dies more often is given up


def serve(engine: EngineConfig, server: ServerConfig, log_level: str = "info") -> int:
    """Serve until a signal or a death; returns the exit status."""
    raise_open_files_limit()
    remove_abandoned_sockets()
    with bind(server.host, server.port) as tcp, contextlib.closing(CoreSocket()) as unix:
        resolve_model(engine.model.model, engine.model.revision)  # downloads, and fails, only once
        return Supervisor(engine, server, log_level, tcp, unix).run()


def raise_open_files_limit() -> None:
    """Every connection is an open file, and 1024 is the usual limit; children inherit ours."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if most == resource.RLIM_INFINITY else min(most, MAX_OPEN_FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket, not yet listening. Raises ConfigError if that is not possible."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror or error}); choose another"
            " with --port or --host."
        ) from error
    return sock


@dataclass
class Child:
    """A process that was started. pidfd: becomes readable when it has ended."""

    name: str
    process: "subprocess.Popen[bytes]"
    pidfd: int

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)


class Supervisor:
    """The processes of one server."""

    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig,
        log_level: str,
        tcp: socket.socket,
        unix: CoreSocket,
    ) -> None:
        self._engine = engine
        self._server = server
        self._log_level = log_level
        self._tcp = tcp
        self._unix = unix
        self._name = server.served_model_name[0] if server.served_model_name else None
        self._heartbeat = HeartbeatReader(unix.heartbeat)
        self._children: dict[int, Child] = {}  # by pidfd
        self._core: Child | None = None
        self._is_core_ending = False  # it was told to, and has a deadline instead of a heartbeat
        self._ready_in, self._ready_out = os.pipe()
        self._num_ready = 0
        self._num_signals = 0
        self._restarts_s: list[float] = []
        self._status: int | None = None  # of this process, once it is to end
        self._deadline_s = float("inf")  # for those that are still there
        self._signals_in, self._signals_out = socket.socketpair()

    def run(self) -> int:
        """Start, watch, end."""
        for sock in (self._signals_in, self._signals_out):
            sock.setblocking(False)
        signal.set_wakeup_fd(self._signals_out.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has SIGHUP
                signal.signal(number, lambda *_: None)
        try:
            self._start_core()
            for index in range(self._server.api_server_count):
                self._start_api(index)
            while self._children:
                self._watch()
        finally:
            for child in self._children.values():
                child.signal(signal.SIGKILL)
                child.process.wait()
        return self._status or 0

    # ---- starting ----------------------------------------------------------------------------

    def _start_core(self) -> None:
        process = self._unix.start_core(self._engine, self._log_level, self._name)
        self._core = self._adopt("the engine", process)

    def _start_api(self, index: int) -> None:
        arguments = ["--socket", str(self._tcp.fileno()), "--ready", str(self._ready_out)]
        arguments += ["--core", str(self._unix.path), "--index", str(index)]
        config = {"model": self._engine.model, "server": self._server}
        fds = (self._tcp.fileno(), self._ready_out)
        process = start_child("quire.serve.api.process", arguments, config, fds, self._log_level)
        self._adopt(f"API process {index}", process)

    def _adopt(self, name: str, process: "subprocess.Popen[bytes]") -> Child:
        child = Child(name, process, os.pidfd_open(process.pid))
        self._children[child.pidfd] = child
        return child

    # ---- watching ----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Wait for the next thing that happens, and see to it."""
        fds = [*self._children, self._ready_in, self._signals_in.fileno()]
        timeout_s = max(0.0, min(WATCH_S, self._deadline_s - time.monotonic()))
        readable, _, _ = select.select(fds, [], [], timeout_s)
        if self._signals_in.fileno() in readable:
            self._take_signals()
        if self._ready_in in readable:
            self._take_ready()
        for pidfd in readable:
            if pidfd in self._children:
                self._bury(self._children[pidfd])
        now = time.monotonic()
        if self._core is not None and not self._is_core_ending and self._heartbeat.is_stuck(now):
            self._kill_stuck(self._core)
        if now > self._deadline_s:
            self._deadline_s = float("inf")
            for child in self._others() or list(self._children.values()):  # the core follows them
                logger.error("%s does not end; it is killed", child.name)
                child.signal(signal.SIGKILL)

    def _take_signals(self) -> None:
        for _ in self._signals_in.recv(64):
            self._num_signals += 1
        if self._num_signals > 1:
            for child in self._children.values():
                child.signal(signal.SIGKILL)
            self._status = 1
        else:
            self._end(0, self._server.shutdown_timeout)

    def _take_ready(self) -> None:
        self._num_ready += len(os.read(self._ready_in, 64))
        if self._num_ready == self._server.api_server_count:
            scheme = "https" if self._server.ssl_certfile else "http"
            host, port = self._tcp.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            logger.info("ready: %s://%s:%d/v1 (Ctrl-C ends it)", scheme, shown, port)

    def _bury(self, child: Child) -> None:
        """A child has ended: as told, or the server ends with it, or the core starts anew."""
        status = child.process.wait()
        os.close(child.pidfd)
        del self._children[child.pidfd]
        was_core = child is self._core
        if was_core:
            self._core = None
        if self._status is not None:
            if not was_core and not self._others():
                self._end_core()  # nobody is left to serve
            return
        if status != NO_START:  # it has said itself why it could not start
            logger.error("%s ended by itself (%s)", child.name, _describe(status))
        was_ready = self._unix.heartbeat.exists()
        if was_core and was_ready and status != NO_START and self._may_restart():
            logger.error("it is started anew; requests that were open have failed")
            self._heartbeat.forget()
            self._start_core()
            return
        self._end(NO_START if status == NO_START else 1, 0.0)

    def _may_restart(self) -> bool:
        now = time.monotonic()
        recent = [at for at in self._restarts_s if now - at < RESTART_WINDOW_S]
        self._restarts_s = [*recent, now]
        return self._server.restart_engine and len(recent) < MAX_RESTARTS

    def _end(self, status: int, drain_s: float) -> None:
        """Ask the API processes to end; the core follows when they have."""
        self._status = status
        self._deadline_s = time.monotonic() + drain_s + END_S
        for child in self._others():
            child.signal(signal.SIGTERM)
        if not self._others():
            self._end_core()

    def _end_core(self) -> None:
        if self._core is not None:
            self._is_core_ending = True
            self._deadline_s = time.monotonic() + core_end_s(self._engine)
            self._core.signal(signal.SIGTERM)

    def _others(self) -> list[Child]:
        return [child for child in self._children.values() if child is not self._core]

    def _kill_stuck(self, core: Child) -> None:
        """Let it show where it is stuck (faulthandler), then kill it; `_bury` does the rest."""
        logger.error("the engine makes no progress; this is where it is stuck:")
        core.signal(signal.SIGABRT)
        try:
            core.process.wait(DUMP_S)
        except subprocess.TimeoutExpired:
            core.signal(signal.SIGKILL)
            core.process.wait()
        self._heartbeat.forget()


def _describe(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
