"""Load of other processes, CPU steal of the host and use of AVX-512 during a run. Standard library
only."""

import os
import time
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
TASKS = Path("/proc/self/task")
AVX512_THREADS = "avx512_threads"  # among the memory figures of a process
MAX_OTHERS = 0.15  # cores; runs in which others took more do not count


def busy_s() -> float:
    """Time that all processors of the machine were not idle; what the host took counts as busy."""
    user, nice, system, _, _, interrupts, soft_interrupts, stolen = _seconds_by_state()
    return user + nice + system + interrupts + soft_interrupts + stolen


def stolen_s() -> float:
    """Time for which the host gave this machine's processors to others, though they had work."""
    return _seconds_by_state()[-1]


def _seconds_by_state() -> list[float]:
    line = Path("/proc/stat").read_text().split("\n")[0]
    return [int(field) / TICKS_PER_S for field in line.split()[1:9]]


def _stat_fields(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if the process has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def tree_s(root: int) -> float:
    """Return the CPU seconds of a process, its descendants, and their awaited children."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat_fields(int(entry))):
            parents.setdefault(int(fields[1]), []).append(int(entry))
    found, ticks = [root], 0
    for process in found:  # grows
        found += parents.get(process, [])
        ticks += sum(int(field) for field in _stat_fields(process)[11:15])
    return ticks / TICKS_PER_S


def avx512_threads(seconds: float, tasks: Path = TASKS) -> int:
    """Return how many threads of this process held AVX-512 registers in the last `seconds`. Linux
    notes the time whenever such a thread loses its core; without these notes, 0."""
    found = 0
    for task in tasks.iterdir():
        try:
            text = (task / "arch_status").read_text()
        except OSError:  # the thread has ended, or this is another architecture
            continue
        passed_ms = int(text.split()[1]) if text.startswith("AVX512_elapsed_ms") else -1
        found += 0 <= passed_ms < 1e3 * seconds
    return found


class Noise:
    """From its making until it is asked."""

    def __init__(self, root: int | None = None) -> None:
        """Start measuring. root: the process whose tree is not noise; this process if absent."""
        self._root = os.getpid() if root is None else root
        self._own_s, self._busy_s, self._began = tree_s(self._root), busy_s(), time.monotonic()
        self._stolen_s = stolen_s()

    def others(self) -> float:
        """Return the average number of cores that other processes kept busy."""
        busy = busy_s() - self._busy_s
        return max(0.0, busy - (tree_s(self._root) - self._own_s)) / self._elapsed_s()

    def stolen(self) -> float:
        """Return the average number of cores that the host stole; `others` includes them."""
        return (stolen_s() - self._stolen_s) / self._elapsed_s()

    def _elapsed_s(self) -> float:
        return max(time.monotonic() - self._began, 1e-9)
