"""Which graphs an engine used, remembered for its next start: recorded first, in its idle moments.

A small file in the user's cache directory, one for each device, version and configuration. What
goes wrong with it is logged and never stops anything. (Compiled kernels are kept by Triton itself.)
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger("quire")

# Places for rows and for tokens, whether there are filters, penalties, edits; candidates; masks.
Kind = tuple[int, int, bool, bool, bool, int, bool]


class UsedSizes:
    """directory: where the file lies. facts: what must be the same for it to be of use."""

    def __init__(self, directory: Path, facts: Iterable[str]) -> None:
        digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]
        self.path = directory / f"{digest}.json"

    def read(self) -> list[Kind]:
        """Read what was written last; nothing if that cannot be read."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return [
                (int(rows), int(tokens), bool(a), bool(b), bool(c), int(num), bool(masks))
                for rows, tokens, a, b, c, num, masks in found["graphs"]
            ]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("the list of used graphs cannot be read: %s: %s", self.path, error)
            return []

    def write(self, kinds: Iterable[Kind]) -> None:
        """Replace the file, at once for those who read it."""
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
