"""`quire serve` as its user starts it, and a look at its processes."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.processes.forks import ForkedPopen

WAIT_S = 60.0
START_S = 240.0  # on a machine with other work


class Server:
    """A running server with the demo model. lines: what it wrote to standard error so far.

    before: Python for its first process to run before quire does, such as shorter waits.
    is_fork: whether its processes are forks of one that has imported everything, which start in a
    sixth of the processor time (tests/support/processes/forks.py).
    """

    def __init__(self, *arguments: str, before: str = "", is_fork: bool = True) -> None:
        program = f"{before}\nimport sys; from quire.cli.main import main; sys.exit(main())"
        command = [sys.executable, "-c", program, "serve", "--port", "0", *arguments]
        start = ForkedPopen if is_fork else subprocess.Popen
        self.process = start(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        ready = self.wait_for_line(r"ready: http://[^ ]*:(\d+)/v1", START_S)
        self.port = int(ready[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.children = children_of(self.process.pid)

    def wait_for_line(self, pattern: str, limit_s: float = WAIT_S) -> "re.Match[str]":
        """The first line, of the past or to come, in which the pattern is found."""
        end_s = time.monotonic() + limit_s
        seen = 0
        with self._news:
            while True:
                for line in self.lines[seen:]:
                    if found := re.search(pattern, line):
                        return found
                seen = len(self.lines)
                alive = self._reader.is_alive() and time.monotonic() < end_s
                assert alive, f"no line like {pattern!r} in:\n" + "".join(self.lines)
                self._news.wait(0.5)

    @property
    def core(self) -> int:
        [pid] = [p for p, command in self.children.items() if "core_main" in command]
        return pid

    @property
    def api(self) -> list[int]:
        return [p for p, command in self.children.items() if "quire.serve.server" in command]

    def get(self, path: str) -> int:
        """The status of a GET; 0 if nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        assert found, f"no {name} in {text}"
        return float(found[1])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal, wait, give the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()


class Stream:
    """A long streaming completion, read by hand."""

    def __init__(self, server: Server, max_tokens: int = 1900) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        body = {
            "model": "demo",
            "prompt": "Once upon a time",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        self.response = self.connection.getresponse()
        assert self.response.status == 200, self.response.read()

    def event(self) -> Any:
        """The next event; None at the end of the stream."""
        while line := self.response.readline():
            if line.startswith(b"data: [DONE]"):
                return None
            if line.startswith(b"data: "):
                return json.loads(line[6:])
        return None

    def rest(self) -> list[Any]:
        return list(iter(self.event, None))

    def close(self) -> None:
        self.response.close()
        self.connection.close()


def children_of(pid: int) -> dict[int, str]:
    """Process id -> command line of the direct children."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_text().rstrip("\0").replace("\0", " ")
        except OSError:
            continue
        if parent == pid:
            found[int(entry.name)] = command
    return found


def is_running(pid: int) -> bool:
    """Whether the process is there and is not only waiting to be buried."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(
    done: Callable[[], bool], what: str = "the condition holds", timeout_s: float = WAIT_S
) -> float:
    """Poll until it is so; returns how long that took, in seconds. Long waits poll more seldom: a
    request for a server's metrics takes as much processor time as a step."""
    began = time.monotonic()
    while not done():
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"still waiting until {what}"
        time.sleep(min(0.02, 0.005 + waited_s / 50))
    return time.monotonic() - began


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)
