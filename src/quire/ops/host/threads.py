"""Threads of the C++ core, and the processors of each process.

The core computes with the cores that this process may use. QUIRE_NUM_THREADS or OMP_NUM_THREADS set
another number; `set_num_threads` sets one for this process, `torch_threads` one for torch's own
operations. `share_cores` divides the processors of a machine among several processes.
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
    """Threads of one call into the core."""
    global _chosen
    if _chosen is None:
        _chosen = wanted_threads() or usable_cores()
    return _chosen


def set_num_threads(number: int | None) -> None:
    """Compute with so many threads from now on; None: with as many as the start chose."""
    global _chosen
    if number is not None and number < 1:
        raise ConfigError(f"the number of threads must be at least 1, got {number}.")
    _chosen = number


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Let torch compute with so many threads; None: with as many as it has.

    Its threads and the core's wait for work without sleeping. Where the two take turns within a
    step, torch's keep the cores that the core's need (docs/inside/cpu.md).
    """
    import torch  # a start without torch imports this file

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
    """Cores that this process's affinity and control group leave it. Two threads of one core count
    once, because they would share its vector units."""
    allowed = _affinity()
    cores = {_siblings(cpu) for cpu in allowed}
    quota = cpu_quota(CGROUP)
    return max(1, len(cores) if quota is None else min(len(cores), math.ceil(quota)))


def is_number_given() -> bool:
    """Tell whether the environment says how many threads to compute with."""
    return wanted_threads() is not None


def cpu_quota(cgroup: Path) -> float | None:
    """Cores' worth of time under a version 2 or version 1 control group; None is no limit."""
    pair = (_read(cgroup / "cpu.max") or "").split()
    if len(pair) != 2:
        pair = [_read(cgroup / "cpu" / f"cpu.cfs_{part}_us") or "" for part in ("quota", "period")]
    try:
        quota, period = (int(number) for number in pair)
    except ValueError:  # no such group, or "max"
        return None
    return quota / period if quota > 0 and period > 0 else None


def wanted_threads() -> int | None:
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


def _siblings(cpu: int) -> str:
    """A name for the core that this logical CPU is a thread of."""
    return _read(TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def share_cores(num: int, topology: Path = TOPOLOGY) -> list[frozenset[int]]:
    """Deal this process's processors out to so many: whole cores, and neighbours in a socket to
    one of them. With more processes than cores, some have the same one."""
    places = {cpu: _place(topology / f"cpu{cpu}" / "topology", cpu) for cpu in _allowed()}
    return deal(places, num)


def deal(places: Mapping[int, tuple[int, int]], num: int) -> list[frozenset[int]]:
    """Do it for logical processors that stand in (socket, core) places."""
    cores = [
        frozenset(cpu for cpu, place in places.items() if place == core)
        for core in sorted(set(places.values()))
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


def _place(directory: Path, cpu: int) -> tuple[int, int]:
    """Return socket and core of a logical processor; each is its own core where nobody knows."""
    try:
        socket = int((directory / "physical_package_id").read_text())
        return socket, int((directory / "core_id").read_text())
    except (OSError, ValueError):
        return 0, cpu
