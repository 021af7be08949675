"""Fork children from a process that has imported their module, instead of importing it in each.

Importing torch costs a child two seconds of processor time. Here one process, the zygote, imports
the module once, and each child is a fork of the zygote. Such a child has the parent, the standard
streams, descriptors, environment and process group that `subprocess.Popen` would give it.

    this process -> launcher -> zygote -> a fork that ends at once -> the child

The launcher keeps the zygote out of the children of this process. This process is a "child
subreaper" while the short-lived fork ends, so the kernel makes it the parent of the child.
"""

import ctypes
import gc
import importlib
import itertools
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PR_SET_CHILD_SUBREAPER = 36
MAX_REQUEST_BYTES = 1 << 18
MAX_FDS = 100
LAUNCH = "import json, subprocess, sys; subprocess.run(json.load(sys.stdin), close_fds=False)"


class Zygote:
    """A process that has imported `module`, for children that run it (engine/wire/spawn.py)."""

    PIPE = subprocess.PIPE  # so that this object stands in for the module `subprocess`

    def __init__(self, module: str) -> None:
        self._module = module
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        command = [
            sys.executable,
            "-m",
            "tests.support.processes.forked",
            str(theirs.fileno()),
            module,
        ]
        with theirs:
            self._launcher = subprocess.Popen(
                [sys.executable, "-c", LAUNCH],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
            )
        assert self._launcher.stdin is not None
        with self._launcher.stdin as stdin:  # on its command line tests would find the module
            stdin.write(json.dumps(command).encode())

    def Popen(self, args: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Fork the zygote for a child that runs its module; execute any other child."""
        if args[1:4] != ["-P", "-m", "quire.engine.wire.child"] or args[5] != self._module:
            return subprocess.Popen(args, **options)
        return _Forked(self, args, **options)

    def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        """Return the process id of a fork with these descriptors."""
        with self._lock:
            self._prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
                answer = self._socket.recv(100)
            finally:
                self._prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert answer, "the zygote has ended"
        return int(answer)

    def close(self) -> None:
        self._socket.close()
        self._launcher.wait(60)


class _Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A child that was not executed. `subprocess.Popen` makes its pipes, and waits for it."""

    def __init__(self, zygote: Zygote, args: list[str], **options: Any) -> None:
        self._zygote, self._options = zygote, options
        super().__init__(args, **options)

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        pipes = rest[9:15]
        stdin, _, _, stdout, _, stderr = pipes
        streams = [stdin, stdout, stderr]
        given = [i if fd < 0 else fd for i, fd in enumerate(streams)]
        passed = list(self._options["pass_fds"])
        env = self._options["env"]
        request = {
            "arguments": args[3:],
            "environment": dict(os.environ if env is None else env),
            "directory": os.getcwd(),
            "parent": os.getpid(),
            "fds": [0, 1, 2, *passed],
        }
        self.pid = self._zygote.fork(request, [*given, *passed])
        self._child_created = True
        self._close_pipe_fds(*pipes)


def serve(sock: socket.socket) -> None:
    """Fork for each request, until nobody can send any more."""
    while True:
        data, fds, _, _ = socket.recv_fds(sock, MAX_REQUEST_BYTES, MAX_FDS)
        if not data:
            return
        reads, writes = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                _run(json.loads(data), fds)
            os.write(writes, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        sock.send(os.read(reads, 100))
        for fd in (reads, writes, *fds):
            os.close(fd)


def _run(request: dict[str, Any], fds: list[int]) -> None:
    """Run quire.engine.wire.child as the child of the process that asked for it; never return."""
    status = 1
    try:
        os.setpgid(0, 0)
        _place(fds, request["fds"])
        while os.getppid() != request["parent"]:
            time.sleep(0.001)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        sys.argv = request["arguments"]
        _start_site()
        runpy.run_module("quire.engine.wire.child", run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _place(fds: list[int], wanted: list[int]) -> None:
    """Give descriptors the numbers that are wanted, and close all others."""
    above = max(*wanted, *fds) + 1
    moved = [os.dup2(fd, above + i) for i, fd in enumerate(fds)]
    for fd, number in zip(moved, wanted, strict=True):
        os.dup2(fd, number)
    edges = [-1, *sorted(wanted), os.sysconf("SC_OPEN_MAX")]
    for before, after in itertools.pairwise(edges):
        if after > before + 1:  # closerange(0, 0) would close all
            os.closerange(before + 1, after)


def _start_site() -> None:
    """Run the `sitecustomize.py` of PYTHONPATH, as the interpreter does when it starts."""
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(":")):
        if (found := Path(folder, "sitecustomize.py")).exists():
            runpy.run_path(str(found))


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    importlib.import_module(sys.argv[2])
    del sys.modules[sys.argv[2]]  # each child runs it as its main module
    sys.path.remove(str(ROOT))
    gc.collect()
    gc.freeze()
    serve(sock)


if __name__ == "__main__":
    main()
