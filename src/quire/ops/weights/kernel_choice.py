"""Which instruction set the C++ core multiplies with, for each weight format: the fastest measured.

The default is the last of the core's list, which has the most features. Another is taken if it is
clearly faster (CLEARLY), so that noise does not change what is chosen. Results are kept in a file
of the user's cache, one for each machine and build, so that this costs time only once; the choice
is derived from the figures whenever it is asked for. A file that cannot be read or is not ours is
measured again and replaced; one that cannot be written is measured at each start. No torch.
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

VERSION = 2  # raised whenever what is measured changes
CLEARLY = 1.1
MOST_BYTES = 1 << 16  # of a file
MOST_FILES = 32  # of other machines that share the directory, and of earlier builds
MOST = 1e18  # of any figure
UNUSABLE = (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError)
CPUINFO = Path("/proc/cpuinfo")
CPU_FACTS = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags",
             "CPU implementer", "CPU part", "CPU variant", "CPU revision", "Features")  # fmt: skip


@dataclass(frozen=True)
class Speed:
    """What one thread does. row_bytes_per_s: of the packed weight, with one row of activations;
    tile_flops: operations per second, with a tile of rows."""

    row_bytes_per_s: float
    tile_flops: float


Measure = Callable[[], dict[str, dict[str, Speed]]]


@dataclass(frozen=True)
class Measurement:
    """machine: a digest of all that the figures depend on; cpu: its name, to be shown. measured_s:
    when, in seconds since 1970; took_s: how long that took. speeds: by format and variant."""

    machine: str
    cpu: str
    measured_s: float
    took_s: float
    speeds: dict[str, dict[str, Speed]]

    @classmethod
    def parse(cls, text: bytes) -> "Measurement":
        """Read what `encode` wrote. Raises one of UNUSABLE for anything else."""
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
        if not all(0 <= number < MOST for number in numbers):
            raise ValueError("its figures are invalid")
        return found

    def encode(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()


def choose_variant(speeds: Mapping[str, Speed], names: Sequence[str]) -> str:
    """Return the fastest if it is clearly faster than the default, the last of the names; else
    that."""
    default = names[-1]
    gains = {name: gain_over(speeds, name, default) for name in names}
    best = max(reversed(names), key=lambda name: gains[name])
    return best if gains[best] >= CLEARLY else default


def gain_over(speeds: Mapping[str, Speed], name: str, other: str) -> float:
    """Return how many times as fast one is as the other: the geometric mean of both shapes, since
    answers are made of both. 1 where one of them was not measured."""
    ours, theirs = speeds.get(name), speeds.get(other)
    if ours is None or theirs is None:
        return 1.0
    row = ours.row_bytes_per_s / theirs.row_bytes_per_s
    return math.sqrt(row * ours.tile_flops / theirs.tile_flops)


def machine_facts(build: Path) -> dict[str, str]:
    """Return what figures depend on: the CPU, its microcode and features, quire's version and the
    build of the core. build: the core's file."""
    facts = {"version": str(VERSION), "quire": QUIRE_VERSION}
    with contextlib.suppress(OSError):
        found = build.stat()
        facts["build"] = f"{found.st_size} {found.st_mtime_ns}"
    with contextlib.suppress(OSError):
        for line in CPUINFO.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in CPU_FACTS:  # of the first CPU; a machine has one kind
                facts.setdefault(name.strip(), value.strip())
    return facts


class KernelFile:
    """The file of this machine in a directory. wanted: formats and variants that must be in it."""

    def __init__(
        self, directory: Path, facts: Mapping[str, str], wanted: Mapping[str, Sequence[str]]
    ) -> None:
        self.directory = directory
        self.facts = facts
        self.wanted = wanted
        text = json.dumps([sorted(facts.items()), {f: list(v) for f, v in wanted.items()}])
        self.machine = hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def path(self) -> Path:
        return self.directory / f"{self.machine}.json"

    def load_or_measure(self, measure: Measure) -> Measurement:
        """Return what the file holds. If there is none that can be used, measure and keep that; of
        several processes that do so at once, all return what the first has kept."""
        found = self.load()
        if found is not None:
            return found
        began = time.perf_counter()
        speeds = measure()
        took = time.perf_counter() - began
        cpu = self.facts.get("model name", "this CPU")
        made = Measurement(self.machine, cpu, time.time(), took, speeds)
        logger.debug("kernels: measured in %.0f ms", 1e3 * took)
        return self._keep(made)

    def load(self) -> Measurement | None:
        """Return what the file holds; None if there is none, or not ours."""
        try:
            with self.path.open("rb") as file:
                text = file.read(MOST_BYTES + 1)
            if len(text) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
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
        """Tell whether all figures are there, and can be divided by."""
        if found.machine != self.machine or found.speeds.keys() != self.wanted.keys():
            return False
        return all(
            found.speeds[name].keys() == set(variants)
            and all(s.row_bytes_per_s > 0 < s.tile_flops for s in found.speeds[name].values())
            for name, variants in self.wanted.items()
        )

    def _keep(self, made: Measurement) -> Measurement:
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
                temporary.replace(self.path)  # what is there cannot be used
        except OSError as error:
            logger.info("the measurements of kernels cannot be saved for the next start: %s", error)
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
            self._remove_old()
        return made

    def _remove_old(self) -> None:
        with contextlib.suppress(OSError):
            paths = sorted(self.directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
            for path in paths[:-MOST_FILES]:
                path.unlink(missing_ok=True)


def _link(source: Path, path: Path) -> bool:
    """Give a whole file its name, if nobody was first; whether that was possible."""
    try:
        os.link(source, path)
    except OSError:  # also where the file system has no links
        return False
    return True


def kernel_file(build: Path, wanted: Mapping[str, Sequence[str]]) -> KernelFile:
    """Return this machine's file in the user's cache."""
    return KernelFile(user_cache("kernels"), machine_facts(build), wanted)
