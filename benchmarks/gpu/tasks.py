"""Commands that may fail, hang, crash or print without end, some of them at once; a log for each.

Only the standard library is used, so that this works whatever else is broken.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAX_LOG_BYTES = 32 << 20  # what prints more than this is stopped
END_S = 8.0  # for a process to end after SIGINT, before it is killed
CUT_OFF_S = 3.0  # the same where all of this is cut off
POLL_S = 0.1


@dataclass(frozen=True)
class Task:
    """name: of its log, and in what is printed. about: what it checks, in words."""

    name: str
    about: str
    command: tuple[str, ...]
    limit_s: float = float("inf")


@dataclass(frozen=True)
class Outcome:
    """status: the exit status, below 0 for a signal; None if it was never begun. stopped: why it
    was ended from here."""

    task: Task
    status: int | None
    seconds: float
    log: Path
    stopped: str = ""


@dataclass
class _Running:
    task: Task
    process: subprocess.Popen[bytes]
    log: Path
    began: float
    stopped: str = ""
    kill_at: float = float("inf")

    def request_end(self, why: str) -> None:
        """Interrupt the task: pytest and the benchmarks then write their results so far."""
        self.stopped, self.kill_at = why, time.monotonic() + END_S
        self.signal(signal.SIGINT)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)  # its own group: what it started ends with it


@dataclass
class Runner:
    """Runs tasks.

    end: time.monotonic() at which all must have ended.
    jobs: maximum number at once.
    on_end: called with each outcome.
    on_wait: called while a task runs; it may raise to end all.
    """

    folder: Path
    end: float
    environment: dict[str, str]
    on_end: Callable[[Outcome], None] = lambda outcome: None
    on_wait: Callable[[], None] = lambda: None
    _running: list[_Running] = field(default_factory=list)

    def run(self, tasks: Iterable[Task], jobs: int = 1) -> None:
        """Run all tasks, in this order; tasks without enough time are not begun."""
        waiting = list(tasks)
        while waiting or self._running:
            late = time.monotonic() >= self.end - 2 * END_S
            while waiting and (late or len(self._running) < max(1, jobs)):
                task = waiting.pop(0)
                if late:
                    self._not_begun(task)
                else:
                    self._begin(task)
            for outcome in self._ended():
                self.on_end(outcome)
            self.on_wait()
            if self._running:
                time.sleep(POLL_S)

    def kill(self) -> None:
        """End all running tasks soon, and report each as stopped."""
        kill_at = time.monotonic() + CUT_OFF_S
        for each in self._running:
            each.signal(signal.SIGINT)  # so that they end what they started themselves
        while self._running:
            each = self._running.pop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(max(0.0, kill_at - time.monotonic()))
            each.signal(signal.SIGKILL)
            took = time.monotonic() - each.began
            stopped = f"cut off after {took:.0f} s"
            self.on_end(Outcome(each.task, each.process.wait(), took, each.log, stopped))

    def _not_begun(self, task: Task) -> None:
        self.on_end(Outcome(task, None, 0.0, self._log(task), "not begun: the time was used up"))

    def _log(self, task: Task) -> Path:
        return self.folder / f"{task.name}.txt"

    def _begin(self, task: Task) -> None:
        log = self._log(task)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            output.write(f"{task.about}\n$ {' '.join(task.command)}\n".encode())
            output.flush()
            try:
                process = subprocess.Popen(
                    task.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=self.environment,
                )
            except OSError as error:
                output.write(f"E   could not be started: {error}\n".encode())
                process = subprocess.Popen(["false"])
        self._running.append(_Running(task, process, log, time.monotonic()))

    def _ended(self) -> Iterator[Outcome]:
        for each in list(self._running):
            status, now = each.process.poll(), time.monotonic()
            if status is None:
                self._check_bounds(each, now)
                continue
            each.signal(signal.SIGKILL)  # what it left behind
            self._running.remove(each)
            if each.stopped:
                with each.log.open("ab") as log:
                    log.write(f"\nE   {each.stopped}\n".encode())
            yield Outcome(each.task, status, now - each.began, each.log, each.stopped)

    def _check_bounds(self, each: _Running, now: float) -> None:
        if each.stopped:
            if now >= each.kill_at:
                each.signal(signal.SIGKILL)
            return
        took = now - each.began
        if now >= self.end - END_S:
            each.request_end(f"stopped after {took:.0f} s: the time was used up")
        elif took >= each.task.limit_s:
            each.request_end(f"stopped after {took:.0f} s, its limit")
        elif each.log.stat().st_size > MAX_LOG_BYTES:
            each.stopped, each.kill_at = f"stopped: it printed over {MAX_LOG_BYTES >> 20} MiB", now


def tail(path: Path, num_bytes: int = 1 << 16) -> str:
    """Return the end of a file; nothing if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def head_and_tail(path: Path, num_bytes: int) -> bytes:
    """Return a file's beginning and its end, num_bytes of each, or the whole if it is shorter."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= 2 * num_bytes:
            return file.read(2 * num_bytes)
        begin = file.read(num_bytes)
        file.seek(size - num_bytes)
        omission = f"\n... {size - 2 * num_bytes:,} bytes left out ...\n".encode()
        return begin + omission + file.read(num_bytes)
