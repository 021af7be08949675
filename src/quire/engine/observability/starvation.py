"""Measure how long a process waited for a CPU.

A deadline in wall time kills correct processes on a busy machine. This module reports the part of
the wall time that the process is not to blame for:

    waited    a thread was runnable, and the kernel ran something else (run queue, cgroup quota)
    stopped   the process was stopped and has run again since

Linux reports both per thread under /proc/PID/task: `schedstat` has the CPU time and the wait, and
`stat` has the state. The kernel adds a wait when it ends, so a thread that is runnable but has not
moved counts as waiting. Where the files are missing, no time is subtracted.
"""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

MOVED = 0.1  # minimum share of an interval; a runnable thread with less counts as waiting
NS = 1e-9
STOPPED = "Tt"


class ThreadTimes(NamedTuple):
    """Times of one thread since its start, as the kernel reports them."""

    cpu_s: float
    waited_s: float  # runnable, without a CPU; complete only once it runs again
    state: str  # as in proc(5): R runnable, S or D asleep, T stopped


ReadThreads = Callable[[], Mapping[int, ThreadTimes]]


def no_threads() -> Mapping[int, ThreadTimes]:
    """Report nothing, so that all wall time counts."""
    return {}


def read_threads(pid: int) -> dict[int, ThreadTimes]:
    """Return the threads of a process by id; empty if it has ended or the kernel has no data."""
    found: dict[int, ThreadTimes] = {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                cpu_ns, waited_ns, *_ = (task / "schedstat").read_text().split()
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                found[int(task.name)] = ThreadTimes(int(cpu_ns) * NS, int(waited_ns) * NS, state)
    return found


class Starvation:
    """Sum of the starved time of one process, over looks at most about a second apart.

    starved_s: wall time without a CPU so far. cpu_s: CPU time of its busiest thread so far.
    """

    def __init__(self, read: ReadThreads, now_s: float) -> None:
        self.starved_s = 0.0
        self._read = read
        self._first = self._last = read()
        self._last_s = now_s
        self._stopped_s = 0.0  # counts as starved only once the process has run again

    @property
    def cpu_s(self) -> float:
        return max(
            (now.cpu_s - _before(self._first, tid).cpu_s for tid, now in self._last.items()),
            default=0.0,
        )

    def look(self, now_s: float) -> None:
        """Add the interval since the last look."""
        passed_s, threads = now_s - self._last_s, self._read()
        if passed_s <= 0.0:
            return
        ran_s = waited_s = 0.0
        for tid, now in threads.items():
            before = _before(self._last, tid)
            ran, waited = now.cpu_s - before.cpu_s, now.waited_s - before.waited_s
            if now.state == "R" and ran + waited < MOVED * passed_s:
                waited = passed_s - ran
            ran_s, waited_s = max(ran_s, ran), waited_s + waited
        if ran_s > 0.0:
            self.starved_s, self._stopped_s = self.starved_s + self._stopped_s, 0.0
        if any(now.state in STOPPED for now in threads.values()):
            self._stopped_s += max(0.0, passed_s - ran_s)
        else:
            self.starved_s += min(waited_s, max(0.0, passed_s - ran_s))
        self._last, self._last_s = threads, now_s


def _before(threads: Mapping[int, ThreadTimes], tid: int) -> ThreadTimes:
    """Return a thread's earlier times; zero for a new thread."""
    return threads.get(tid, ThreadTimes(0.0, 0.0, "S"))
