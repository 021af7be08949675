"""Performance cores of machines whose cores differ in speed, found by measurement.

All threads of a phase end together, so slow cores may delay fast ones. Linux's figures (capacity on
ARM, maximum frequency on x86) only show whether the cores may differ. If they may, one thread
computes on each core in turn. An engine's process then stays on the fast cores, unless slow cores
have most of the machine's speed together.

QUIRE_ALL_CORES=1 turns this off. A number of threads in the environment does, too.
"""

import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.ops.host.native import core
from quire.ops.host.threads import TOPOLOGY, is_number_given, siblings

ALL_CORES = "QUIRE_ALL_CORES"
FIGURES = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")
MAY_DIFFER = 1.2  # ratio of Linux's figures; a favoured core of equal ones has less
MIN_FAST = 0.75  # speed of a fast core, relative to the fastest core
MIN_SHARE = 0.5  # of the machine's speed, which the fast cores must have together
MAX_CORES = 64  # that are measured; machines with more have equal ones
NUM_RUNS = 3  # of some milliseconds for each core, of which the fastest counts
FLOAT32 = 0  # format of the measured products


@dataclass(frozen=True)
class CoreSpeeds:
    """speeds: operations per second by the first logical processor of each core; empty if nothing
    was measured. cpus: logical processors to use; empty for all."""

    reason: str
    speeds: Mapping[int, float] = field(default_factory=dict)
    cpus: frozenset[int] = frozenset()


def stay_on_fast_cores() -> CoreSpeeds:
    """Keep this thread, and all that it starts, on the fast cores. Call it before other threads
    exist."""
    found = core_speeds()
    if found.cpus:
        os.sched_setaffinity(0, found.cpus)
    return found


def core_speeds(
    topology: Path = TOPOLOGY, measure: Callable[[int], float] | None = None
) -> CoreSpeeds:
    """Measure the cores that this process may use, if they may differ.

    measure: returns the operations per second of a logical processor."""
    if os.environ.get(ALL_CORES) == "1":
        return CoreSpeeds(f"all cores, as {ALL_CORES} says")
    if is_number_given():
        return CoreSpeeds("all cores: the environment sets the number of threads")
    if sys.platform != "linux":
        return CoreSpeeds("all cores: only Linux says whether they differ")
    cpus = os.sched_getaffinity(0)
    figures = linux_figures(cpus, topology)
    if len(figures) < 2 or max(figures.values()) < MAY_DIFFER * min(figures.values()):
        return CoreSpeeds("all cores: Linux's figures show no difference")
    cores: dict[str, set[int]] = {}
    for cpu in sorted(cpus):
        cores.setdefault(siblings(cpu, topology), set()).add(cpu)
    if len(cores) > MAX_CORES or (measure is None and core() is None):
        return CoreSpeeds("all cores: not measured")
    firsts = {min(core_cpus): core_cpus for core_cpus in cores.values()}
    speeds = {cpu: (measure or measured_speed)(cpu) for cpu in firsts}
    fast, reason = chosen_cores(speeds)
    return CoreSpeeds(reason, speeds, frozenset[int]().union(*(firsts[cpu] for cpu in fast)))


def linux_figures(cpus: Collection[int], topology: Path) -> dict[int, int]:
    """Return a figure for the speed of each logical processor; empty where Linux has none."""
    for name in FIGURES:
        found = {}
        for cpu in cpus:
            try:
                found[cpu] = int((topology / f"cpu{cpu}" / name).read_text())
            except (OSError, ValueError):
                break
        if len(found) == len(cpus) and min(found.values(), default=0) > 0:
            return found
    return {}


def chosen_cores(speeds: Mapping[int, float]) -> tuple[frozenset[int], str]:
    """Return the cores to stay on, and the reason; no cores for all. speeds: by core."""
    if min(speeds.values()) <= 0:
        return frozenset(), "all cores: one could not be measured"
    fastest, total = max(speeds.values()), sum(speeds.values())
    fast = {cpu for cpu, speed in speeds.items() if speed >= MIN_FAST * fastest}
    share = sum(speeds[cpu] for cpu in fast) / total
    if len(fast) == len(speeds):
        return frozenset(), "all cores: they are about equally fast"
    if share < MIN_SHARE:
        return frozenset(), f"all cores: the {len(fast)} fast ones have {share:.0%} of the speed"
    return frozenset(fast), f"{len(fast)} of {len(speeds)} cores, with {share:.0%} of the speed"


def measured_speed(cpu: int) -> float:
    """Return the operations per second of a logical processor; 0 if it may not be used. Another
    thread measures, so the caller's affinity stays."""
    module, found = core(), [0.0]
    assert module is not None
    variant = module.linear_variants()[0][1]

    def measure() -> None:
        try:
            os.sched_setaffinity(0, {cpu})
        except OSError:
            return
        found.extend(module.linear_peak(FLOAT32, variant, 1) for _ in range(NUM_RUNS))

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    return max(found)
