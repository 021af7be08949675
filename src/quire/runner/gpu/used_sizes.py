"""Kinds of steps that earlier runs of an engine recorded, in a file of the user's cache."""

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from quire.runner.gpu.sizes import Kind, kind_from

logger = logging.getLogger("quire")


class UsedSizes:
    """Kinds of graphs that an engine used, in a small file of the user's cache directory, for its
    next start. File errors are logged and never stop the engine. Triton caches compiled kernels
    itself.

    directory: folder of the file. facts: texts that must be equal for the file to be valid.
    """

    def __init__(self, directory: Path, facts: Iterable[str]) -> None:
        digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]
        self.path = directory / f"{digest}.json"

    def read(self) -> list[Kind]:
        """Return the kinds in the file; an empty list if the file cannot be read."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return [kind_from(values) for values in found["graphs"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("the list of used graphs cannot be read: %s: %s", self.path, error)
            return []

    def write(self, kinds: Iterable[Kind]) -> None:
        """Replace the file atomically."""
        passing = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            passing.write_text(json.dumps({"graphs": sorted(kinds)}), encoding="utf-8")
            passing.replace(self.path)
        except OSError as error:
            logger.warning("the list of used graphs cannot be saved: %s", error)


def default_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "quire" / "graphs"
