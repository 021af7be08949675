"""Threads of the C++ core, and the processors of each process.

By default the core computes with the cores that this process may use. QUIRE_NUM_THREADS or
OMP_NUM_THREADS set another number. `set_num_threads` sets it for this process, and `torch_threads`
for torch's own operations. `share_cores` divides a machine's processors among processes.
"""

import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from quire.base.errors import ConfigError

VARIABLES = ("QUIRE_NUM_THREADS", "OMP_NUM_THREADS")
CGROUP = Path("/sys/fs/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")

_chosen: int | None = None


def num_threads() -> int:
    """Return the number of threads of one call into the core."""
    global _chosen
    if _chosen is None:
        _chosen = configured_threads() or usable_cores()
    return _chosen


def set_num_threads(number: int | None) -> None:
    """Set the number of threads from now on; None restores the default. Raises ConfigError."""
    global _chosen
    if number is not None and number < 1:
        raise ConfigError(f"the number of threads must be at least 1, got {number}.")
    _chosen = number


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Set torch's number of threads within the context; None leaves it unchanged.

    Threads of torch and of the core wait for work without sleeping. If the two alternate within a
    step, torch's threads occupy the cores that the core's threads need (docs/inside/cpu.md).
    """
    import torch  # processes without torch import this file

    before = torch.get_num_threads()
    if number is None or number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def usable_cores() -> int:
    """Return the number of cores that this process's affinity and control group allow. Two threads
    of one core count once, because they share its vector units."""
    allowed = _affinity()
    cores = {siblings(cpu, TOPOLOGY) for cpu in allowed}
    quota = cpu_quota(CGROUP)
    return max(1, len(cores) if quota is None else min(len(cores), math.ceil(quota)))


def is_number_given() -> bool:
    """Return whether the environment sets the number of threads."""
    return configured_threads() is not None


def cpu_quota(cgroup: Path) -> float | None:
    """Return the CPU time, in cores, that a control group (version 1 or 2) allows, or None."""
    pair = (_read(cgroup / "cpu.max") or "").split()
    if len(pair) != 2:
        pair = [_read(cgroup / "cpu" / f"cpu.cfs_{part}_us") or "" for part in ("quota", "period")]
    try:
        quota, period = (int(number) for number in pair)
    except ValueError:  # no such group, or "max"
        return None
    return quota / period if quota > 0 and period > 0 else None


def configured_threads() -> int | None:
    """Return the number of threads that the environment sets, or None. Raises ConfigError."""
    for name in VARIABLES:
        text = os.environ.get(name, "").split(",")[0].strip()
        if text:
            if not text.isdigit() or int(text) == 0:
                raise ConfigError(f"{name} must be a number of threads, got {text!r}.")
            return int(text)
    return None


def _affinity() -> set[int]:
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def siblings(cpu: int, topology: Path) -> str:
    """Return a name for the core that this logical CPU is a thread of."""
    return _read(topology / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def share_cores(num: int, topology: Path = TOPOLOGY) -> list[frozenset[int]]:
    """Divide this process's processors among `num` processes: whole cores, neighbours in a socket
    together. With more processes than cores, some processes share a core."""
    core_of_cpu = {
        cpu: _socket_and_core(topology / f"cpu{cpu}" / "topology", cpu) for cpu in _allowed()
    }
    return divide_cores(core_of_cpu, num)


def divide_cores(core_of_cpu: Mapping[int, tuple[int, int]], num: int) -> list[frozenset[int]]:
    """Divide logical processors among `num` processes. core_of_cpu: (socket, core) of each
    processor."""
    cores = [
        frozenset(cpu for cpu, own_core in core_of_cpu.items() if own_core == core)
        for core in sorted(set(core_of_cpu.values()))
    ]
    if num >= len(cores):
        return [cores[rank % len(cores)] for rank in range(num)]
    bounds = [rank * len(cores) // num for rank in range(num + 1)]
    return [
        frozenset[int]().union(*cores[first:last])
        for first, last in zip(bounds, bounds[1:], strict=False)
    ]


def _allowed() -> set[int]:
    return os.sched_getaffinity(0)


def _socket_and_core(directory: Path, cpu: int) -> tuple[int, int]:
    """Return socket and core of a logical processor; if unknown, it counts as a core of its own."""
    try:
        socket = int((directory / "physical_package_id").read_text())
        return socket, int((directory / "core_id").read_text())
    except (OSError, ValueError):
        return 0, cpu
