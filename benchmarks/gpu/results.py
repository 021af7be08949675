"""The results of a check on a GPU: one archive, and a summary that fits a screen.

Only the standard library is used, so that this works whatever else is broken.
"""

import io
import os
import re
import tarfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.tasks import Outcome, head_and_tail

MAX_LINES, MAX_CHARS, MAX_WIDTH = 60, 10_000, 160
MAX_FILE_BYTES = 2 << 20  # of a file in the archive: its beginning and its end, half of it each
ARCHIVE_S = 15.0  # at most between two writes, while something runs
IMPORTANCE = ("FAILED", "MISSED", "reached", "skipped", "found")
NO_TEST = 5  # pytest's status where no test was chosen
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_COUNTS = re.compile(r"\b\d+ (?:failed|passed|errors?|skipped)\b.* in [\d.]+s")


@dataclass
class Archive:
    """All files of a folder in one tar.gz, written again as results come, never half. path: the
    archive, outside of the folder."""

    folder: Path
    path: Path
    _at: float = field(default=-float("inf"))

    def refresh(self) -> None:
        """Write it if the last time is a while ago."""
        if time.monotonic() - self._at >= ARCHIVE_S:
            self.write()

    def write(self) -> int:
        """Write it now. Returns how many files are in it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished, count = self.path.with_name(self.path.name + ".tmp"), 0
        with tarfile.open(unfinished, "w:gz", compresslevel=4) as archive:
            for file in sorted(self.folder.rglob("*")):
                if file.is_file() and file.suffix != ".tmp":
                    count += self._add(archive, file)
        os.replace(unfinished, self.path)
        self._at = time.monotonic()
        return count

    def _add(self, archive: tarfile.TarFile, file: Path) -> bool:
        try:
            data, written = head_and_tail(file, MAX_FILE_BYTES // 2), file.stat().st_mtime
        except OSError:  # a process removed it meanwhile
            return False
        entry = tarfile.TarInfo(f"{self.folder.name}/{file.relative_to(self.folder)}")
        entry.size, entry.mtime = len(data), int(written)
        archive.addfile(entry, io.BytesIO(data))
        return True


def is_good(outcome: Outcome) -> bool:
    return outcome.status in (0, NO_TEST) and not outcome.stopped


def line_of(outcome: Outcome) -> str:
    """Return one line: the check and its outcome, with the first error of a failure."""
    took = f"{outcome.seconds:.0f} s"
    if is_good(outcome):
        return f"right    {outcome.task.name} ({took}): {outcome.task.about}"
    text = (
        _COLOURS.sub("", head_and_tail(outcome.log, 1 << 20).decode(errors="replace"))
        if outcome.log.exists()
        else ""
    )
    counts = [found.group() for found in _COUNTS.finditer(text)]
    counted = counts[-1] if counts else took
    return f"FAILED   {outcome.task.name} ({counted}): {first_error(text, outcome)}"


def first_error(text: str, outcome: Outcome) -> str:
    """Return the first error in one line. text: the log, whose first two lines are a heading."""
    lines = [line.strip() for line in text.splitlines()[2:] if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E  ")]
    if outcome.stopped:
        raised = [error for error in errors if not outcome.stopped.startswith(error)]
        return outcome.stopped + (f"; before that {raised[0]}" if raised else "")
    if errors:
        return errors[0]
    raised = [line for line in lines if re.match(r"\w*(?:\.\w+)*(?:Error|Exception)\b", line)]
    end = raised[-1] if raised else (lines[-1] if lines else "it printed nothing")
    status = outcome.status or 0
    return f"ended by signal {-status}; {end}" if status < 0 else end


def fitted(
    head: Sequence[str], body: Sequence[str], foot: Sequence[str], more: str = "in the archive"
) -> list[str]:
    """Cut lines to the screen: head and foot whole, and as much of the body as fits."""
    ends = [_cut(line) for line in (*head, *foot)]
    room = MAX_CHARS - sum(len(line) + 1 for line in ends) - MAX_WIDTH
    shown: list[str] = []
    for line in map(_cut, body):
        room -= len(line) + 1
        if room < 0 or len(shown) + len(ends) >= MAX_LINES - 1:
            break
        shown.append(line)
    num_omitted = len(body) - len(shown)
    if num_omitted:
        shown.append(f"... and {num_omitted} lines more, {more}")
    return [*ends[: len(head)], *shown, *ends[len(head) :]]


def _cut(line: str) -> str:
    line = " ".join(line.split("\n"))
    return line if len(line) <= MAX_WIDTH else line[: MAX_WIDTH - 3] + "..."


def by_importance(lines: Iterable[str]) -> list[str]:
    """Sort lines: failures first, right results and times last; otherwise in their order."""

    def rank(line: str) -> int:
        word = line.split(" ", 1)[0]
        return IMPORTANCE.index(word) if word in IMPORTANCE else len(IMPORTANCE)

    return sorted(lines, key=rank)
