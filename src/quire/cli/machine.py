"""Facts of this machine, read from /proc, /sys and nvidia-smi. No torch."""

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from quire.ops.host.threads import cpu_quota

CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
# CPU features that decide which code runs: vectors, and bfloat16 products (x86, then Arm).
FEATURES = ("avx2", "avx_vnni", "avx512f", "avx512_bf16", "amx_bf16", "sve", "bf16")
GPU_FIELDS = ("name", "memory.total", "driver_version", "compute_cap")
NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Cpu:
    """The CPU of this machine."""

    name: str
    num_cores: int
    num_usable: int  # cores that this process may use
    quota: float | None  # limit of its control group in cores; None for no limit
    features: tuple[str, ...]


def cpu() -> Cpu:
    text = _read(CPUINFO) or ""
    names = re.findall(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.findall(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags[0].split()) if flags else set()
    return Cpu(
        name=names[0].strip() if names else platform.machine(),
        num_cores=os.cpu_count() or 1,
        num_usable=len(os.sched_getaffinity(0)),
        quota=cpu_quota(CGROUP),
        features=tuple(name for name in FEATURES if name in present),
    )


def memory_bytes(cgroup: Path = CGROUP) -> int:
    """Return the machine's memory, or its control group's limit if that is lower."""
    found = re.search(r"^MemTotal:\s+(\d+)", _read(MEMINFO) or "", re.MULTILINE)
    sizes = [int(found[1]) * 1024] if found else []
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = (_read(cgroup / name) or "").strip()
        sizes += [int(text)] if text.isdigit() else []
    return min(sizes, default=0)


def gpus() -> list[dict[str, str]]:
    """Return name, memory, driver and compute capability of each GPU, from nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    return [dict(zip(GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(GPU_FIELDS)]


def dependencies() -> dict[str, str | None]:
    """Return the version of each required package; None for a package that is not installed."""
    try:
        requirements = metadata.requires("quire") or []
    except metadata.PackageNotFoundError:  # quire runs from its sources
        requirements = []
    found = [NAME.match(line) for line in requirements if "extra ==" not in line]
    return {match[0]: _version(match[0]) for match in found if match}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
