"""Start quire's processes as forks of a process that has imported torch. Imports take most of the
time of a server or a core in a test.

    with forked_children():             # start_child of this process forks, as AsyncLLM's
        ...
    process = ForkedPopen([sys.executable, "-c", "...", "serve"])   # so do its own children
    done = run_forked([sys.executable, "-m", "quire.cli.main", "serve", "--port", "1"])

To a test, the fork looks like a new process. It is a child of the process that started it, with its
own descriptors, signal handlers and exit status. /proc shows the command line and the environment
as soon as the child has an id, because tests find ranks by their command line. But modules are
imported already, and the interpreter does not shut down at the end. Tests of these two things use
`subprocess`.

The template process has no threads, so its forks are safe. It forks twice, and the first fork ends
at once. So the second becomes a child of the test process, which is a "subreaper" for that moment.
A forked server forks its own children, as long as it has one thread; so does a forked core.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

PR_SET_CHILD_SUBREAPER = 36
TITLE_BYTES = 8192  # room for a fork's command line
ENVIRONMENT_BYTES = 4096  # room for what its environment has more than the template's
PYTHONPATH = os.environ.get("PYTHONPATH", "")
PADDING = "QUIRE_TEST_PADDING"
MAX_ORDER_BYTES = 1 << 18
MAX_FDS = 100
FIRST_SPARE_FD = 400  # descriptors wait there for their final numbers
IMPORTS = (  # what the processes of a server run, and what they import late
    "quire.cli.commands.serve",
    "quire.serve.supervisor",
    "quire.serve.processes.core_main",
    "quire.serve.server",
    "quire.engine.ranks.rank_main",
    "tokenizers",
    "anyio._backends._asyncio",
    "yaml",
)


class ForkedPopen(subprocess.Popen[Any]):
    """A `Popen` whose process is a fork if it runs this Python with `-c`, `-m` or a script; other
    commands start as usual.

    A child with a `sitecustomize.py` in its PYTHONPATH starts as usual too, because that file may
    have to run before torch is imported.
    """

    runs_site = False

    def _execute_child(self, args: Any, *rest: Any) -> None:  # type: ignore[override]
        names = subprocess.Popen._execute_child.__code__.co_varnames  # type: ignore[attr-defined]
        given = dict(zip(names[2:], rest, strict=False))
        environment = dict(os.environ if given["env"] is None else given["env"])
        fork = _fork_for(args, environment, self.runs_site)
        if fork is None:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        standard = [
            number if given[name] == -1 else given[name]
            for number, name in enumerate(("p2cread", "c2pwrite", "errwrite"))
        ]
        order = {
            "command": list(map(str, args)),
            "environment": environment,
            "folder": os.getcwd() if given["cwd"] is None else str(given["cwd"]),
            "group": given["process_group"],
            "runs_site": self.runs_site,
            "fds": [0, 1, 2, *given["pass_fds"]],
        }
        self.pid = fork(order, [*standard, *given["pass_fds"]])
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in ends))  # type: ignore[attr-defined]


class SiteForkedPopen(ForkedPopen):
    """A `ForkedPopen` whose forks run the `sitecustomize.py` of their PYTHONPATH."""

    runs_site = True


@contextlib.contextmanager
def forked_children(popen: type[ForkedPopen] = ForkedPopen) -> Iterator[None]:
    """Have this process's `start_child` fork."""
    from quire.engine.wire import spawn

    before = spawn.subprocess
    spawn.subprocess = types.SimpleNamespace(  # type: ignore[assignment]
        **{**vars(subprocess), "Popen": popen}
    )
    try:
        yield
    finally:
        spawn.subprocess = before


def run_forked(
    command: Sequence[str],
    timeout_s: float = 60.0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `subprocess.run(capture_output=True, text=True)` does."""
    pipe = subprocess.PIPE
    with ForkedPopen(command, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=env) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def _fork_for(command: Sequence[Any], environment: Mapping[str, str], runs_site: bool) -> Any:
    """Return the function that forks a process for a command; None if it must be started."""
    if command[0] != sys.executable or _place_of_program(command) is None:
        return None
    if _site_files(environment) and not runs_site:
        return None
    if not _template.is_this:
        return _template.fork
    # Other threads might hold locks; but a main thread that waits for one that starts ranks.
    is_main = threading.current_thread() is threading.main_thread()
    return _fork_here if threading.active_count() == (1 if is_main else 2) else None


def _own_path(environment: Mapping[str, str]) -> list[Path]:
    """Return the folders of PYTHONPATH that the template does not have."""
    known = PYTHONPATH.split(os.pathsep)
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    return [Path(folder) for folder in given if folder and folder not in known]


def _site_files(environment: Mapping[str, str]) -> list[Path]:
    """Return the files that the interpreter of a new process would run first."""
    files = [folder / "sitecustomize.py" for folder in _own_path(environment)]
    return [file for file in files if file.exists()]


def _place_of_program(command: Sequence[str]) -> int | None:
    """Return where -c, -m or a script stands; None if the command has other options."""
    place = 2 if command[1] == "-P" else 1
    is_program = command[place] in ("-c", "-m") or not command[place].startswith("-")
    return place if is_program else None


class _Template:
    """The template process of this process, which is started when it is first needed."""

    def __init__(self) -> None:
        self.is_this = False  # whether this process is a fork of the template
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self, order: dict[str, Any], fds: list[int]) -> int:
        """Return the id of a new child of this process that does what is ordered."""
        with self._lock:
            control = self._control or self._start()
            prctl = ctypes.CDLL(None).prctl
            prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(control, [json.dumps(order).encode()], fds)
                return int(control.recv(64))
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _start(self) -> socket.socket:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = f"from {__name__} import template_main; template_main({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, " " * TITLE_BYTES],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=os.environ | {PADDING: " " * ENVIRONMENT_BYTES},
            cwd=Path(__file__).parents[3],
        )
        theirs.close()
        atexit.register(self._end)
        return self._control

    def _end(self) -> None:
        assert self._control is not None and self._process is not None
        self._control.close()
        self._process.wait()


_template = _Template()


def template_main(control_fd: int) -> None:
    """Import what quire's processes need, then fork for each order until the socket is closed."""
    for name in IMPORTS:
        importlib.import_module(name)
    warnings.filterwarnings("ignore", "'quire.* found in sys.modules", RuntimeWarning, "runpy")
    gc.collect()
    gc.freeze()
    _template.is_this = True
    control = socket.socket(fileno=control_fd)
    while True:
        data, fds, *_ = socket.recv_fds(control, MAX_ORDER_BYTES, MAX_FDS)
        if not data:
            return
        control.send(str(_forked_twice(json.loads(data), fds)).encode())
        for fd in fds:
            os.close(fd)


def _forked_twice(order: dict[str, Any], fds: list[int]) -> int:
    """Fork a process that this process is no parent of; return its id."""
    waiting, adopted = os.pipe()
    answer, answering = os.pipe()
    middle = os.fork()
    if middle == 0:
        if os.fork():
            os._exit(0)
        os.close(adopted)
        _identify(order)
        os.write(answering, str(os.getpid()).encode())
        os.read(waiting, 1)  # until it has its new parent
        _forget_parent()
        _become(order, fds)
    os.waitpid(middle, 0)
    pid = int(os.read(answer, 64))
    for fd in (waiting, adopted, answer, answering):
        os.close(fd)
    return pid


def _fork_here(order: dict[str, Any], fds: list[int]) -> int:
    """Fork this process; return the id of the child. Signals wait until the
    child no longer has the handlers of this process, which would swallow them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    identified, identifying = os.pipe()
    pid = os.fork()
    if pid == 0:
        _identify(order)
        os.close(identifying)
        _forget_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _become(order, fds)
    os.close(identifying)
    os.read(identified, 1)  # until the child has closed its end
    os.close(identified)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _identify(order: Mapping[str, Any]) -> None:
    """Give this fork the environment of its order, and show it and the command line in /proc."""
    os.environ.clear()
    os.environ.update(order["environment"])
    _show_in_proc(order["command"], order["environment"])


def _become(order: Mapping[str, Any], fds: Sequence[int]) -> NoReturn:
    """Make this fork the process of a command, and run it to its end. Never return: objects of the
    callers would close descriptors that are no longer theirs."""
    status = 1
    try:
        command: list[str] = order["command"]
        os.chdir(order["folder"])
        sys.path[:0] = map(str, _own_path(order["environment"]))
        importlib.invalidate_caches()
        if order["group"] not in (None, -1):
            os.setpgid(0, order["group"])
        _place_descriptors(dict(zip(order["fds"], fds, strict=True)))
        sys.orig_argv = command
        for file in _site_files(order["environment"]) if order["runs_site"] else ():
            runpy.run_path(str(file))
        status = _run(command)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        if status == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(status & 0xFF)


def _place_descriptors(places: Mapping[int, int]) -> None:
    """Give descriptors their numbers, and close all others. places: number -> descriptor."""
    spare = {
        number: fcntl.fcntl(fd, fcntl.F_DUPFD, FIRST_SPARE_FD) for number, fd in places.items()
    }
    os.closerange(0, FIRST_SPARE_FD)
    for number, fd in spare.items():
        os.dup2(fd, number)
    os.closerange(max(FIRST_SPARE_FD, *(number + 1 for number in places)), 4096)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115


def _forget_parent() -> None:
    """Undo what an exec would have undone: signal handlers, exit handlers, log handlers, and what
    was once read from the environment."""
    tempfile.tempdir = None
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    logging.root.handlers.clear()


def _show_in_proc(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Write the command line and the environment where /proc/PID shows them: over the template's.
    No pointer goes there, because `os.environ` was written anew."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    pairs = [f"{name}={value}" for name, value in environment.items()]
    for words, place in (command, 45), (pairs, 47):
        first, end = int(fields[place]), int(fields[place + 1])
        text = "\0".join(words).encode()[: end - first - 1]
        ctypes.memset(first, 0, end - first)
        ctypes.memmove(first, text, len(text))


def _run(command: list[str]) -> int:
    """Run a command's program as Python would; return the exit status."""
    place = _place_of_program(command)
    assert place is not None
    kind, rest = command[place], command[place + 1 :]
    sys.argv = [kind, *(rest[1:] if kind in ("-c", "-m") else rest)]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        with forked_children():
            if kind == "-m":
                runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
            elif kind == "-c":
                exec(compile(rest[0], "<string>", "exec"), main.__dict__)
            else:
                runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
