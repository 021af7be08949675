"""Choice of the instruction set that the C++ core multiplies with, per weight format, by
measurement.

The default is the last in the core's list, which has the most features. Another is chosen if it is
clearly faster (CLEARLY), so that noise does not change the choice. Measurements are saved in a file
of the user's cache, one per machine and build, so they cost time only once. The choice is derived
from them at each use. An unreadable or foreign file is replaced by a new measurement. If the file
cannot be written, each start measures. No torch is needed.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire.base.files import user_cache
from quire.base.version import QUIRE_VERSION

logger = logging.getLogger("quire")

VERSION = 2  # raised whenever the measurement changes
CLEARLY = 1.1
MAX_FILE_BYTES = 1 << 16  # maximum size of a file
MAX_FILES = 32  # files in the directory, with those from other machines and earlier builds
MAX_FIGURE = 1e18  # maximum of any measured value
UNUSABLE = (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError)
CPUINFO = Path("/proc/cpuinfo")
CPU_FACTS = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags",
             "CPU implementer", "CPU part", "CPU variant", "CPU revision", "Features")  # fmt: skip


@dataclass(frozen=True)
class Speed:
    """Measured speed of one thread. row_bytes_per_s: bytes of the packed weight per second, with
    one row of activations. tile_flops: operations per second, with a tile of rows."""

    row_bytes_per_s: float
    tile_flops: float


Measure = Callable[[], dict[str, dict[str, Speed]]]


@dataclass(frozen=True)
class Measurement:
    """Measured speeds of a machine. machine: digest of all facts that speeds depend on. cpu: name
    to show. measured_s: time of the measurement, in seconds since 1970. took_s: its duration.
    speeds: by format and variant."""

    machine: str
    cpu: str
    measured_s: float
    took_s: float
    speeds: dict[str, dict[str, Speed]]

    @classmethod
    def parse(cls, text: bytes) -> "Measurement":
        """Parse the output of `encode`. Raises one of UNUSABLE for any other text."""
        data: Any = json.loads(text)
        speeds = {
            name: {variant: Speed(**figures) for variant, figures in each.items()}
            for name, each in data.pop("speeds").items()
        }
        found = cls(speeds=speeds, **data)
        numbers = [found.measured_s, found.took_s]
        for each in speeds.values():
            for speed in each.values():
                numbers += speed.row_bytes_per_s, speed.tile_flops
        if not all(0 <= number < MAX_FIGURE for number in numbers):
            raise ValueError("its figures are invalid")
        return found

    def encode(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()


def choose_variant(speeds: Mapping[str, Speed], names: Sequence[str]) -> str:
    """Return the fastest variant if it is clearly faster than the last of `names`, else the
    last."""
    default = names[-1]
    gains = {name: gain_over(speeds, name, default) for name in names}
    best = max(reversed(names), key=lambda name: gains[name])
    return best if gains[best] >= CLEARLY else default


def gain_over(speeds: Mapping[str, Speed], name: str, other: str) -> float:
    """Return the ratio of two variants' speeds. It is the geometric mean over both shapes, since
    answers need both; 1 if a variant was not measured."""
    ours, theirs = speeds.get(name), speeds.get(other)
    if ours is None or theirs is None:
        return 1.0
    row = ours.row_bytes_per_s / theirs.row_bytes_per_s
    return math.sqrt(row * ours.tile_flops / theirs.tile_flops)


def machine_facts(build: Path) -> dict[str, str]:
    """Return the facts that speeds depend on: the CPU, its microcode and features, quire's version
    and the core's build. build: the core's file."""
    facts = {"version": str(VERSION), "quire": QUIRE_VERSION}
    with contextlib.suppress(OSError):
        found = build.stat()
        facts["build"] = f"{found.st_size} {found.st_mtime_ns}"
    with contextlib.suppress(OSError):
        for line in CPUINFO.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in CPU_FACTS:  # facts of the first CPU; all CPUs are of one kind
                facts.setdefault(name.strip(), value.strip())
    return facts


class KernelFile:
    """File of this machine's measurement. `expected`: formats and variants that it must contain."""

    def __init__(
        self, directory: Path, facts: Mapping[str, str], expected: Mapping[str, Sequence[str]]
    ) -> None:
        self.directory = directory
        self.facts = facts
        self.expected = expected
        text = json.dumps([sorted(facts.items()), {f: list(v) for f, v in expected.items()}])
        self.machine = hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def path(self) -> Path:
        return self.directory / f"{self.machine}.json"

    def load_or_measure(self, measure: Measure) -> Measurement:
        """Return the measurement in the file. If there is no usable file, measure and save. If
        several processes do so at once, all return the measurement that was saved first."""
        found = self.load()
        if found is not None:
            return found
        began = time.perf_counter()
        speeds = measure()
        took = time.perf_counter() - began
        cpu = self.facts.get("model name", "this CPU")
        made = Measurement(self.machine, cpu, time.time(), took, speeds)
        logger.debug("kernels: measured in %.0f ms", 1e3 * took)
        return self._save(made)

    def load(self) -> Measurement | None:
        """Return the measurement in the file; None if there is none, or not from this machine."""
        try:
            with self.path.open("rb") as file:
                text = file.read(MAX_FILE_BYTES + 1)
            if len(text) > MAX_FILE_BYTES:
                raise ValueError(f"it has more than {MAX_FILE_BYTES:,} bytes")
            found = Measurement.parse(text)
            if not self._is_ours(found):
                raise ValueError("it was measured on another machine")
        except FileNotFoundError:
            return None
        except UNUSABLE as error:
            logger.warning("%s is not used, kernels are measured again: %s", self.path, error)
            return None
        return found

    def _is_ours(self, found: Measurement) -> bool:
        """Return whether the file is from this machine, and all speeds are present and positive."""
        if found.machine != self.machine or found.speeds.keys() != self.expected.keys():
            return False
        return all(
            found.speeds[name].keys() == set(variants)
            and all(s.row_bytes_per_s > 0 < s.tile_flops for s in found.speeds[name].values())
            for name, variants in self.expected.items()
        )

    def _save(self, made: Measurement) -> Measurement:
        """Save the measurement, unless another process saved one first; return the saved one."""
        temporary = None
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            file, name = tempfile.mkstemp(".tmp", f"{self.machine}-", self.directory)
            temporary = Path(name)
            with os.fdopen(file, "wb") as opened:
                opened.write(made.encode())
            if not _link(temporary, self.path):
                first = self.load()
                if first is not None:
                    return first
                temporary.replace(self.path)  # the existing file is unusable
        except OSError as error:
            logger.info("the measurements of kernels cannot be saved for the next start: %s", error)
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
            self._remove_old()
        return made

    def _remove_old(self) -> None:
        """Delete all but the newest `MAX_FILES` files."""
        with contextlib.suppress(OSError):
            paths = sorted(self.directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
            for path in paths[:-MAX_FILES]:
                path.unlink(missing_ok=True)


def _link(source: Path, path: Path) -> bool:
    """Give a complete file its final name, if that is free; return whether it succeeded."""
    try:
        os.link(source, path)
    except OSError:  # also if the file system lacks links
        return False
    return True


def kernel_file(build: Path, expected: Mapping[str, Sequence[str]]) -> KernelFile:
    """Return this machine's file in the user's cache."""
    return KernelFile(user_cache("kernels"), machine_facts(build), expected)
