"""`quire serve`: the supervisor, which starts and watches the core processes and API processes.

It imports neither torch nor FastAPI, and mostly sleeps. It holds all sockets from the beginning. It
binds the TCP socket before it loads anything, so a port in use is an error at once. Each core has a
Unix socket in a private directory. When a core is restarted, its clients wait on that socket.

    SIGTERM, -INT, -HUP  API processes drain; then cores save cached blocks in their stores, if
                         they have any, and end; exit status 0, or 1 if a process failed to end
    a second signal      everything ends now; exit status 1
    an API process dies  it is restarted, and the others continue
    a core dies          the others end, exit status 1; with --restart-engine it is restarted, and
                         other cores continue
    a core is stuck      it is killed, and handled as a core that dies
    dies too often       (serve/processes/children.py) the others end; exit status 1
    could not start      the others end; exit status 3
    kill -9 of this one  the kernel kills the children (engine/wire/child.py)

With several models (serve/several/), the death or failed start of one core does not end the others.
The server ends when no model is left.

`--otlp-traces-endpoint` needs optional packages, which this module checks for at the start.
"""

import contextlib
import errno
import importlib.util
import logging
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.base.clock import bounded_wait_s
from quire.base.errors import ConfigError
from quire.base.settings.config import EngineConfig, ServerConfig
from quire.engine.start.preflight import check_adapters, check_before_loading
from quire.engine.wire.child import NO_START
from quire.engine.wire.spawn import start_child
from quire.models.checkpoint.source import resolve_source
from quire.serve.observers.rate_limits import make_memory
from quire.serve.observers.usage_log import check_usage_log
from quire.serve.processes.children import NEVER, READY, Child, CoreChild, Process
from quire.serve.processes.cores import CoreShare, core_shares
from quire.serve.processes.launch import (
    END_S,
    CoreSocket,
    core_end_s,
    remove_abandoned_sockets,
)
from quire.serve.processes.server_files import server_file
from quire.serve.several.served import (
    ApiModel,
    FirstRequest,
    ServedModel,
    base_url,
    first_request,
    named,
    own_record,
    start_lines,
)

if TYPE_CHECKING:
    from quire.serve.several.manager import ModelManager


PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def check_tracing(endpoint: str | None) -> None:
    """Raise ConfigError if the endpoint is not a URL or a package for tracing is missing."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_traces_endpoint must be a URL of OTLP over HTTP, such as"
            f" http://localhost:4318/v1/traces, got {endpoint!r}."
        )
    for name in PACKAGES:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # its parent package is missing
            found = None
        if found is None:
            raise ConfigError(
                f"otlp_traces_endpoint needs the package {name}; install quire with it:"
                " pip install 'quire[otel]'."
            )


logger = logging.getLogger("quire")

MAX_OPEN_FILES = 1 << 16
MANAGER_SOCKET = "manager.sock"


@dataclass(frozen=True)
class ServedCore:
    """One core of a model: the model, the devices of the core, and its socket."""

    model: ServedModel
    placement: CoreShare
    socket: CoreSocket


def serve(engine: EngineConfig, server: ServerConfig, log_level: str = "info") -> int:
    """Serve one model until a signal or the death of a core; return the exit status."""
    placements = core_shares(engine)
    model = ServedModel(engine, server.served_model_name)
    with _prepared(server) as (listening, stack):
        sockets = [stack.enter_context(contextlib.closing(CoreSocket())) for _ in placements]
        source = resolve_source(engine.model)  # downloads once, for all processes
        check_before_loading(engine, source)
        check_adapters(engine, server)
        pairs = zip(placements, sockets, strict=True)
        cores = [ServedCore(model, placement, unix) for placement, unix in pairs]
        first = first_request(model, source)
        return Supervisor(server, log_level, listening, cores, first).run()


def serve_several(
    models: Sequence[ServedModel], server: ServerConfig, log_level: str = "info"
) -> int:
    """Serve several models, which are loaded and unloaded as requests need them. Return the exit
    status, after a signal or when no model is left."""
    from quire.serve.several.manager import ModelManager
    from quire.serve.several.residency import Residency
    from quire.serve.several.shares import with_pools

    with _prepared(server) as (listening, stack):
        models = [own_record(each) for each in named(models)] if len(models) > 1 else named(models)
        models = with_pools(models, server.max_loaded_models, log_level)
        cores = []
        for model in models:
            unix = stack.enter_context(contextlib.closing(CoreSocket()))
            cores.append(ServedCore(model, CoreShare(model=model.name), unix))
        listener = stack.enter_context(bind_unix(cores[0].socket.home / MANAGER_SOCKET))
        listener.listen(64)
        limit, idle_s = server.max_loaded_models, server.idle_unload_s
        end_s = max(core_end_s(model.engine) for model in models)
        names = [model.name for model in models]

        def make_manager(children: Sequence[CoreChild]) -> ModelManager:
            residency = Residency(names, limit, idle_s, time.monotonic())
            pairs = zip(names, children, strict=True)
            return ModelManager(residency, dict(pairs), listener, end_s)

        first = first_request(models[0], resolve_source(models[0].engine.model))
        return Supervisor(server, log_level, listening, cores, first, make_manager).run()


@contextlib.contextmanager
def _prepared(server: ServerConfig) -> Iterator[tuple[socket.socket, contextlib.ExitStack]]:
    """Check the settings that can be checked now, and yield the bound socket."""
    raise_open_files_limit()
    remove_abandoned_sockets()
    check_usage_log(server.usage_log)
    check_tracing(server.otlp_traces_endpoint)
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(_listening(server)), stack


def raise_open_files_limit() -> None:
    """Raise the limit of open files; children inherit it. Each connection is an open file, and the
    usual limit is 1024."""
    now, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_OPEN_FILES if limit == resource.RLIM_INFINITY else min(limit, MAX_OPEN_FILES)
    if now != resource.RLIM_INFINITY and now < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, limit))


@contextlib.contextmanager
def _listening(server: ServerConfig) -> Iterator[socket.socket]:
    """Bind the configured TCP or Unix socket. Remove the file of a Unix socket at the end."""
    if server.uds is None:
        with bind(server.host, server.port) as tcp:
            yield tcp
        return
    with bind_unix(Path(server.uds)) as unix:
        yield unix
        Path(server.uds).unlink(missing_ok=True)


def bind_unix(path: Path) -> socket.socket:
    """Bind a Unix socket; replace a socket file that no process listens on. Raises ConfigError if
    another server listens on it, or if it cannot be bound."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise OSError(errno.EADDRINUSE, "another server is listening there")
            path.unlink()
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        reason = error.strerror or error
        raise ConfigError(f"cannot listen on {path} ({reason}); choose another --uds.") from error
    return sock


def bind(host: str, port: int) -> socket.socket:
    """Bind a TCP socket without listening. Raises ConfigError if that is not possible."""
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


class Supervisor:
    """Starter and watcher of one server's processes. first: the example request that the start log
    shows. make_manager: makes the `ModelManager` that loads and unloads several models."""

    def __init__(
        self,
        server: ServerConfig,
        log_level: str,
        tcp: socket.socket,
        cores: Sequence[ServedCore],
        first: FirstRequest,
        make_manager: "Callable[[Sequence[CoreChild]], ModelManager] | None" = None,
    ) -> None:
        self._server, self._first = server, first
        self._served = cores
        self._began_s = time.monotonic()
        self._log_level = log_level
        self._tcp = tcp
        self._rates = make_memory(len(server.api_key)) if server.rate_limits else None
        self._cores = [self._core(core) for core in cores]
        self._manager = None if make_manager is None else make_manager(self._cores)
        self._apis = [self._api(index) for index in range(server.api_server_count)]
        self._ready_in, self._ready_out = os.pipe()
        self._never_ready = set(range(server.api_server_count))  # API processes, by index
        self._num_signals = 0
        self._status: int | None = None  # exit status of the server, once it is ending
        self._deadline_s = NEVER  # when the processes that must end are killed
        self._signals_in, self._signals_out = socket.socketpair()
        self._announced = contextlib.ExitStack()  # the file of this server, once it is ready

    def run(self) -> int:
        """Start all processes and watch them until all have ended; return the exit status."""
        for sock in (self._signals_in, self._signals_out):
            sock.setblocking(False)
        signal.set_wakeup_fd(self._signals_out.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, lambda *_: None)
        try:
            if self._manager is not None:
                self._manager.begin()
            self._start_due()
            while any(child.is_running or child.due_s is not None for child in self._children):
                self._watch()
        finally:
            self._announced.close()
            for child in self._children:
                child.kill()
            for child in self._children:
                child.wait(END_S)
        return self._status or 0

    @property
    def _children(self) -> list[Child]:
        return [*(core.child for core in self._cores), *self._apis]

    # ---- starting ----------------------------------------------------------------------------

    def _core(self, served: ServedCore) -> CoreChild:
        model, placement, unix = served.model, served.placement, served.socket

        def start() -> Process:
            name, prefix = model.name if model.names else None, self._server.metrics_prefix
            return unix.start_core(model.engine, self._log_level, name, placement, prefix)

        child = Child(placement.name, start, self._server.restart_engine)
        return CoreChild(child, unix.path, unix.heartbeat)

    def _core_end_s(self) -> float:
        return max(core_end_s(served.model.engine) for served in self._served)

    def _api_models(self) -> list[ApiModel]:
        found: dict[int, ApiModel] = {}
        for served in self._served:
            model = served.model
            known = found.get(id(model))
            paths = () if known is None else known.cores
            paths = (*paths, str(served.socket.path))
            found[id(model)] = ApiModel(model.engine.model, model.names, paths)
        return list(found.values())

    def _api(self, index: int) -> Child:
        def start() -> Process:
            arguments = ["--socket", str(self._tcp.fileno()), "--ready", str(self._ready_out)]
            arguments += ["--index", str(index)]
            if self._manager is not None:
                arguments += ["--manager", str(self._served[0].socket.home / MANAGER_SOCKET)]
            config = {"models": self._api_models(), "server": self._server}
            fds: tuple[int, ...] = (self._tcp.fileno(), self._ready_out)
            if self._rates is not None:
                arguments += ["--rates", str(self._rates)]
                fds = (*fds, self._rates)
            return start_child("quire.serve.server", arguments, config, fds, self._log_level)

        return Child(f"API process {index}", start, may_restart=True)

    def _start_due(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if child.due_s is None or child.due_s > now:
                continue
            try:
                child.start()
            except OSError as error:
                logger.error("%s cannot be started: %s", child.name, error)
                if self._manager is None or child in self._apis:
                    self._start_again(child)
                else:
                    self._manager.start_failed(child, error)

    # ---- watching ----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Wait for the next event or deadline, and handle it."""
        running = [child for child in self._children if child.is_running]
        fds = [*(child.pidfd for child in running), self._ready_in, self._signals_in.fileno()]
        fds += [] if self._manager is None else self._manager.fds()
        readable, _, _ = select.select(fds, [], [], self._wait_s())
        if self._signals_in.fileno() in readable:
            self._take_signals()
        if self._ready_in in readable:
            self._take_ready()
        for child in running:
            if child.pidfd in readable:
                self._handle_end(child)
        now = time.monotonic()
        for core in self._cores:
            core.look(now, is_ending=self._status is not None)
            if core.is_lost and self._status is None:
                self._end(1, 0.0)
        if self._manager is not None:
            self._manage_models(self._manager, readable)
        if now > self._deadline_s:
            self._kill_stragglers(now)
        self._start_due()

    def _manage_models(self, model_manager: "ModelManager", readable: Sequence[int]) -> None:
        """Load and unload models, even while the server drains."""
        if model_manager.is_open:
            model_manager.look(readable)
        if self._status is None and (status := model_manager.end_status) is not None:
            logger.error("no model is left to serve")
            self._end(status, 0.0)

    def _wait_s(self) -> float:
        """Return the seconds until the next deadline or start. The wait is bounded, because the
        supervisor must look at the heartbeats."""
        dues = (child.due_s for child in self._children if child.due_s is not None)
        untils = [core.until_s for core in self._cores]
        untils += [] if self._manager is None else [self._manager.due_s()]
        next_s = min(self._deadline_s, *untils, *dues)
        return bounded_wait_s(next_s - time.monotonic())

    def _take_signals(self) -> None:
        self._num_signals += len(self._signals_in.recv(64))
        if self._num_signals > 1:
            self._status = 1
            self._deadline_s = time.monotonic() + END_S
            self._start_no_cores()
            for child in self._children:
                child.kill()
        else:
            self._end(0, self._server.shutdown_timeout)

    def _take_ready(self) -> None:
        was_complete = not self._never_ready
        for (index,) in READY.iter_unpack(os.read(self._ready_in, 64 * READY.size)):
            self._never_ready.discard(index)
        if not was_complete and not self._never_ready:
            address = self._tcp.getsockname()
            seconds = time.monotonic() - self._began_s
            for line in start_lines(self._server, address, self._first, seconds):
                logger.info("%s", line)
            self._announce(address)

    def _announce(self, address: Any) -> None:
        """Write the file by which `quire ps` and `quire stop` find this server."""
        uds, only = self._server.uds, str(self._first.body["model"])
        url = base_url(self._server, *address[:2]) if uds is None else f"unix:{Path(uds).resolve()}"
        models = {
            name: served.model.engine.model.model
            for served in self._served
            for name in served.model.names or (only,)
        }
        self._announced.enter_context(server_file(url, models))

    def _handle_end(self, child: Child) -> None:
        """Handle the end of a child: an expected end, a restart, or the end of the server."""
        status = child.bury()
        for core in self._cores:
            if core.child is child:
                core.forget()
        if self._is_managed(child):
            assert self._manager is not None
            self._manager.bury(child, status)
            return
        if self._status is not None:
            if not child.is_stopping or status not in (0, -signal.SIGTERM):
                logger.error("%s stopped with an error (%s)", child.name, _describe(status))
                self._status = self._status or 1
            if child in self._apis and not self._running_apis():
                self._end_cores()  # no API process is left to use them
            return
        if status == NO_START:  # the child has logged the reason
            self._end(NO_START, 0.0)
            return
        logger.error("%s ended unexpectedly (%s)", child.name, _describe(status))
        self._start_again(child)

    def _is_managed(self, child: Child) -> bool:
        """Return whether the model manager owns this child: a core of one of several models."""
        model_manager = self._manager
        return model_manager is not None and model_manager.is_open and child not in self._apis

    def _start_again(self, child: Child) -> None:
        pause_s = child.plan_restart(time.monotonic())
        if pause_s is None:
            self._end(1, 0.0)
            return
        when = f" in {pause_s:g} s" if pause_s else ""
        logger.error("restarting it%s; its open requests have failed", when)

    # ---- ending ------------------------------------------------------------------------------

    def _end(self, status: int, drain_s: float) -> None:
        """Ask the API processes to end; the cores end after them."""
        self._status = status
        self._deadline_s = time.monotonic() + drain_s + END_S
        if self._manager is None or drain_s == 0:
            self._start_no_cores()
        for child in self._apis:
            child.end()
        if not self._running_apis():
            self._end_cores()

    def _end_cores(self) -> None:
        self._start_no_cores()
        for core in self._running_cores():
            if not core.is_stopping:
                self._deadline_s = time.monotonic() + self._core_end_s()
                core.end()

    def _start_no_cores(self) -> None:
        if self._manager is not None:
            self._manager.close()
        for core in self._cores:
            core.child.due_s = None

    def _running_cores(self) -> list[Child]:
        return [core.child for core in self._cores if core.child.is_running]

    def _running_apis(self) -> list[Child]:
        return [child for child in self._apis if child.is_running]

    def _kill_stragglers(self, now: float) -> None:
        """Kill the processes that missed the deadline; abandon a process that survives its kill."""
        self._deadline_s = now + END_S
        self._status = self._status or 1
        for child in self._running_apis() or self._running_cores():  # cores end after API processes
            if child.was_killed:
                logger.error("%s cannot be killed and is abandoned", child.name)
                child.leave()
            else:
                logger.error("%s does not stop; killing it", child.name)
                child.kill()
        if not self._running_apis():
            self._end_cores()


def _describe(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
