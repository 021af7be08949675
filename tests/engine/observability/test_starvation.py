"""Which wall time a late process is not to blame for, and when the watch calls a core stuck."""

import os
import threading
from pathlib import Path

from quire.engine.observability.heartbeat import Heartbeat, HeartbeatReader, StuckWatch
from quire.engine.observability.starvation import Starvation, ThreadTimes, read_threads


class Kernel:
    """What the kernel reports of one process; each thread is a list [CPU, wait, state]."""

    def __init__(self, num_threads: int = 1) -> None:
        self.now_s = 0.0
        self.threads = {tid: ThreadTimes(0.0, 0.0, "S") for tid in range(num_threads)}

    def pass_s(
        self, seconds: float, cpu: float = 0.0, wait: float = 0.0, state: str = "S", tid: int = 0
    ) -> None:
        """Let time pass. cpu, wait: shares of it, of one thread; the others sleep."""
        before = self.threads[tid]
        self.now_s += seconds
        cpu_s, waited_s = before.cpu_s + cpu * seconds, before.waited_s + wait * seconds
        self.threads[tid] = ThreadTimes(cpu_s, waited_s, state)

    def read(self) -> dict[int, ThreadTimes]:
        return dict(self.threads)


def seconds_until_stuck(
    path: Path, kernel: Kernel, most_s: int = 300, **each_second: object
) -> float | None:
    """Begin a step, let seconds pass alike, and return when the watch calls the core stuck."""
    beat = Heartbeat(path / "beat", 0.0)
    watch = StuckWatch(HeartbeatReader(path / "beat"), kernel.read)
    kernel.now_s = 100.0
    beat.begin(kernel.now_s)
    for _ in range(most_s):
        if watch.is_stuck(kernel.now_s):
            return kernel.now_s - 100.0
        kernel.pass_s(1.0, **each_second)  # type: ignore[arg-type]
    return None


def test_a_deadlock_an_endless_loop_and_a_stop_are_found_in_todays_time(tmp_path: Path) -> None:
    for each_second in [{}, {"cpu": 1.0, "state": "R"}, {"state": "T"}, {"state": "D"}]:
        found = seconds_until_stuck(tmp_path, Kernel(), **each_second)
        assert found is not None and found <= 13.0, each_second


def test_a_starved_process_is_given_its_limit_in_cpu_time(tmp_path: Path) -> None:
    """A tenth of a core for ten seconds of computing: the limit is about 100 s of wall time."""
    found = seconds_until_stuck(tmp_path, Kernel(), cpu=0.1, wait=0.9, state="R")
    assert found is not None and 80.0 < found < 120.0


def test_a_process_that_is_never_run_is_not_stuck(tmp_path: Path) -> None:
    """The kernel has added no wait yet: the thread is runnable and does not move."""
    assert seconds_until_stuck(tmp_path, Kernel(), state="R") is None


def test_an_endless_loop_beside_threads_that_wait_is_found_by_its_cpu_time(tmp_path: Path) -> None:
    kernel = Kernel(num_threads=2)
    kernel.threads[1] = ThreadTimes(0.0, 0.0, "R")  # starved throughout
    found = seconds_until_stuck(tmp_path, kernel, cpu=1.0, state="R")
    assert found is not None and found <= 15.0


def test_a_process_that_is_stopped_again_and_again_is_slow(tmp_path: Path) -> None:
    """A duty cycle of SIGSTOP: what was stopped is forgiven once the process has run again."""
    found = seconds_until_stuck(tmp_path, Kernel(), cpu=0.1, state="T")
    assert found is not None and 80.0 < found < 120.0


def test_a_new_deadline_begins_a_new_account(tmp_path: Path) -> None:
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


def test_waits_of_several_threads_count_once() -> None:
    kernel = Kernel(num_threads=3)
    starvation = Starvation(kernel.read, 0.0)
    for tid in range(3):
        kernel.threads[tid] = ThreadTimes(0.25, 1.5, "R")
    starvation.look(2.0)
    assert (starvation.starved_s, starvation.cpu_s) == (1.75, 0.25)


def test_the_kernel_reports_the_threads_of_this_process() -> None:
    threads = read_threads(os.getpid())
    assert threads[threading.get_native_id()].cpu_s > 0.0
    assert threads[threading.get_native_id()].state == "R"
    assert read_threads(1 << 30) == {}
