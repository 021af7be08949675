"""The servers of this user on this machine: a small file for each while it runs.

The supervisor writes `PID.json` once the server is ready and removes it at the end. `quire ps`,
`stop` and `run` read these files. Reading a file removes it if its process has ended. A process
is identified by its id and its start time, because ids are reused.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.base.files import replace_file, user_cache

logger = logging.getLogger("quire")

START_TIME = 19  # field of /proc/PID/stat after the name in brackets: clock ticks since the boot
MAX_BYTES = 1 << 20
CONNECT_S = 2.0
POLL_S = 0.05


@dataclass(frozen=True)
class RunningServer:
    """A server. url: root of its API; `unix:PATH` for a Unix socket. models: by each name in
    requests, the model as `model_key` writes it. started_s: time of day when it was ready."""

    pid: int
    start_ticks: int
    url: str
    models: dict[str, str]
    started_s: float

    @property
    def port(self) -> int | None:
        return None if self.url.startswith("unix:") else urlsplit(self.url).port

    @property
    def is_alive(self) -> bool:
        """Whether the process that wrote the file still runs."""
        return start_ticks(self.pid) == self.start_ticks

    def answers(self) -> bool:
        """Return whether something listens at its address."""
        parts = urlsplit(self.url)
        with contextlib.suppress(OSError):
            address = (parts.hostname or "", parts.port or 80)
            if self.port is not None:
                socket.create_connection(address, CONNECT_S).close()
                return True
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock:
                sock.settimeout(CONNECT_S)
                return sock.connect_ex(self.url.removeprefix("unix:")) == 0
        return False

    def name_of(self, model: str) -> str | None:
        """Return the name in requests of a model, given as for `quire serve` or by that name; None
        if the server does not have it."""
        key = model_key(model)
        found = [name for name, each in self.models.items() if each == key]
        return (
            model if model in self.models and not Path(model).exists() else next(iter(found), None)
        )


def model_key(model: str) -> str:
    """Return a model's name, or the whole path of a file or directory."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


@contextlib.contextmanager
def server_file(url: str, models: Mapping[str, str]) -> Iterator[None]:
    """Announce this process as a server for the duration of the context. models: as given to
    `quire serve`, by each name in requests."""
    pid = os.getpid()
    path = servers_folder() / f"{pid}.json"
    ticks = start_ticks(pid) or 0
    keys = {name: model_key(model) for name, model in models.items()}
    server = RunningServer(pid, ticks, url, keys, time.time())
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.with_suffix(".tmp").unlink(missing_ok=True)
        replace_file(path, json.dumps(asdict(server)).encode(), path.with_suffix(".tmp"))
    except OSError as error:  # a server must run without it
        logger.debug("quire ps will not list this server: %s", error)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def running_servers() -> list[RunningServer]:
    """List the servers, oldest first. Remove the files of servers that have ended."""
    found = []
    for path in servers_folder().glob("*.json"):
        server = _read(path)
        if server is not None and server.is_alive:
            found.append(server)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda server: server.started_s)


def stop_server(server: RunningServer, timeout_s: float) -> bool:
    """End a server as Ctrl-C does; return whether it has ended in time."""
    try:
        handle = os.pidfd_open(server.pid)
    except ProcessLookupError:
        return True
    try:
        # The handle fixes the process; only then the check says that it is the server.
        if not server.is_alive:
            return True
        signal.pidfd_send_signal(handle, signal.SIGTERM)
    except ProcessLookupError:
        return True
    finally:
        os.close(handle)
    end_s = time.monotonic() + timeout_s
    while server.is_alive and time.monotonic() < end_s:
        time.sleep(POLL_S)
    return not server.is_alive


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the boot; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[START_TIME])


def _read(path: Path) -> RunningServer | None:
    """Return a file's server; None if the file is invalid or of another user."""
    try:
        if path.stat().st_uid != os.getuid() or path.stat().st_size > MAX_BYTES:
            return None
        values = json.loads(path.read_bytes())
        server = RunningServer(**values)
        models = {str(name): str(model) for name, model in server.models.items()}
        is_valid = server.pid == int(path.stem) and isinstance(server.start_ticks, int)
        known: dict[str, Any] = {
            "url": str(server.url),
            "models": models,
            "started_s": float(server.started_s),
        }
        return replace(server, **known) if is_valid else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def servers_folder() -> Path:
    """Return the folder of the files, which may not exist. The user's runtime directory is better
    than the cache, because a restart of the machine empties it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "quire" if runtime and Path(runtime).is_dir() else user_cache("servers")
