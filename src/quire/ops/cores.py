"""Which processors each of several processes of one machine computes on."""

import os
from collections.abc import Mapping
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


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
