"""Wall time during which a process is starved does not count towards its deadline."""

import os
import threading
from pathlib import Path

from quire.engine.observability.heartbeat import Heartbeat, HeartbeatReader, StuckWatch
from quire.engine.observability.starvation import Starvation, ThreadTimes, read_threads


class Kernel:
    """Reports threads of one process like the kernel: CPU time, time waited for a CPU, state."""

    def __init__(self, num_threads: int = 1) -> None:
        self.now_s = 0.0
        self.threads = {tid: ThreadTimes(0.0, 0.0, "S") for tid in range(num_threads)}

    def pass_s(
        self, seconds: float, cpu: float = 0.0, wait: float = 0.0, state: str = "S", tid: int = 0
    ) -> None:
        """Let time pass. cpu, wait: shares of it for one thread; the others sleep."""
        before = self.threads[tid]
        self.now_s += seconds
        cpu_s, waited_s = before.cpu_s + cpu * seconds, before.waited_s + wait * seconds
        self.threads[tid] = ThreadTimes(cpu_s, waited_s, state)

    def read(self) -> dict[int, ThreadTimes]:
        return dict(self.threads)


def seconds_until_stuck(
    path: Path, kernel: Kernel, max_s: int = 300, **each_second: object
) -> float | None:
    """Begin a step, repeat the same second, and return when the watch reports the core stuck."""
    beat = Heartbeat(path / "beat", 0.0)
    watch = StuckWatch(HeartbeatReader(path / "beat"), kernel.read)
    kernel.now_s = 100.0
    beat.begin(kernel.now_s)
    for _ in range(max_s):
        if watch.is_stuck(kernel.now_s):
            return kernel.now_s - 100.0
        kernel.pass_s(1.0, **each_second)  # type: ignore[arg-type]
    return None


def test_deadlock_endless_loop_and_stop_are_found_within_13_s(tmp_path: Path) -> None:
    for each_second in [{}, {"cpu": 1.0, "state": "R"}, {"state": "T"}, {"state": "D"}]:
        found = seconds_until_stuck(tmp_path, Kernel(), **each_second)
        assert found is not None and found <= 13.0, each_second


def test_starved_process_gets_its_limit_in_cpu_time(tmp_path: Path) -> None:
    """With a tenth of a core, ten seconds of computing take about 100 s of wall time."""
    found = seconds_until_stuck(tmp_path, Kernel(), cpu=0.1, wait=0.9, state="R")
    assert found is not None and 80.0 < found < 120.0


def test_runnable_process_that_never_runs_is_not_stuck(tmp_path: Path) -> None:
    """The kernel has not added any waiting time yet."""
    assert seconds_until_stuck(tmp_path, Kernel(), state="R") is None


def test_endless_loop_is_found_by_cpu_time_despite_starved_threads(tmp_path: Path) -> None:
    kernel = Kernel(num_threads=2)
    kernel.threads[1] = ThreadTimes(0.0, 0.0, "R")  # starved throughout
    found = seconds_until_stuck(tmp_path, kernel, cpu=1.0, state="R")
    assert found is not None and found <= 15.0


def test_repeatedly_stopped_process_is_not_stuck_early(tmp_path: Path) -> None:
    """A duty cycle of SIGSTOP: stopped time is excused once the process has run again."""
    found = seconds_until_stuck(tmp_path, Kernel(), cpu=0.1, state="T")
    assert found is not None and 80.0 < found < 120.0


def test_new_deadline_resets_the_account(tmp_path: Path) -> None:
    kernel, beat = Kernel(), Heartbeat(tmp_path / "beat", 0.0)
    watch = StuckWatch(HeartbeatReader(tmp_path / "beat"), kernel.read)
    kernel.now_s = 100.0
    beat.begin(kernel.now_s)
    for _ in range(60):
        assert not watch.is_stuck(kernel.now_s)
        kernel.pass_s(1.0, cpu=0.1, wait=0.9, state="R")
    beat.extend(kernel.now_s)
    found = None
    for second in range(20):
        found = second if found is None and watch.is_stuck(kernel.now_s) else found
        kernel.pass_s(1.0)
    assert found is not None and 10 < found <= 13


def test_simultaneous_waits_of_threads_count_once() -> None:
    kernel = Kernel(num_threads=3)
    starvation = Starvation(kernel.read, 0.0)
    for tid in range(3):
        kernel.threads[tid] = ThreadTimes(0.25, 1.5, "R")
    starvation.look(2.0)
    assert (starvation.starved_s, starvation.cpu_s) == (1.75, 0.25)


def test_read_threads_reports_this_process() -> None:
    threads = read_threads(os.getpid())
    assert threads[threading.get_native_id()].cpu_s > 0.0
    assert threads[threading.get_native_id()].state == "R"
    assert read_threads(1 << 30) == {}
