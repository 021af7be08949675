"""Index of an input file: the offset and the id of each line, in about 100 bytes a line.

It orders lines so that lines with a common beginning follow each other. Then the engine computes
the common part once, while it is cached. For each prompt, the first 64, 128, 256, ... 64 K bytes
are each reduced to a number. Lines whose first numbers are equal form a group. The groups stand in
the order of their first lines, and so do the lines in a group.
"""

import hashlib
import zlib
from array import array
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from quire.base.errors import RequestError
from quire.serve.batches.lines import (
    MAX_BEGINNING_BYTES,
    Line,
    LineError,
    beginning_of,
    id_of,
    parse_line,
)

FIRST_CUT = 64
CUTS = [FIRST_CUT << i for i in range((MAX_BEGINNING_BYTES // FIRST_CUT).bit_length())]
MAX_LINES = 1 << 26
MAX_PROBLEMS = 100  # invalid lines that are reported
PIECE_BYTES = 1 << 20


class ReadingStopped(Exception):
    """Signal that the caller has stopped the reading of a file before its end."""


@dataclass(frozen=True)
class Problem:
    """Error of a line. number: its line number, from 1."""

    number: int
    error: LineError


class InputIndex:
    """The lines of a file, at positions ("places") from 0. Blank lines are skipped.

    order: the positions in the order to run them, int64 `[num_lines]`. problems: errors of the
    first invalid lines; num_problems: number of all errors.
    """

    def __init__(
        self,
        path: Path,
        model: str,
        max_line_bytes: int,
        urls: Collection[str] | None = None,
        max_lines: int = MAX_LINES,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Read the whole file. model: part of the lines' ids. urls: allowed paths, None to skip the
        check. is_stopped: called before each line. Raise RequestError for too many lines,
        ReadingStopped, OSError."""
        self.path, self.problems, self.num_problems = path, list[Problem](), 0
        self._model, self._max_bytes, self._max_lines = model, max_line_bytes, max_lines
        self._file: IO[bytes] = path.open("rb")
        self._offsets, self._sizes, self._numbers = array("q"), array("q"), array("q")
        self._ids = array("Q")  # the first half of each id
        custom_ids = array("Q")  # a digest of each custom_id, 0 for an invalid line
        beginnings = [array("I") for _ in CUTS]
        try:
            for number, offset, data in _lines(self._file, max_line_bytes):
                if is_stopped():
                    raise ReadingStopped
                self._add_position(number, offset, data)
                line = self._look(number, data, urls)
                custom_ids.append(0 if line is None else _digest(line.custom_id))
                for numbers, mark in zip(beginnings, _marks(line), strict=True):
                    numbers.append(mark)
        except BaseException:
            self.close()
            raise
        self._repeated = self._find_repeated(custom_ids)
        self.order = _grouped(beginnings)

    def __len__(self) -> int:
        return len(self._offsets)

    def close(self) -> None:
        self._file.close()

    def data(self, position: int) -> tuple[bytes, bytes]:
        """Return a line and its id. Raise RequestError if the file has changed there."""
        self._file.seek(self._offsets[position])
        data = self._file.read(self._sizes[position])
        number = self._numbers[position]
        found = id_of(data, number, self._model)
        if _first_half(found) != self._ids[position]:
            raise RequestError(f"line {number} of {self.path} has changed since it was first read.")
        return data, found

    def size(self, position: int) -> int:
        """Return the number of bytes that `data` reads."""
        return self._sizes[position]

    def parse(self, position: int, data: bytes, urls: Collection[str]) -> Line:
        """Parse a line. Raise LineError if it is invalid or repeats a custom_id."""
        if position in self._repeated:
            raise _repeated()
        return self._parsed(data, urls)

    def positions_of(self, ids: "array[int]") -> np.ndarray:
        """Return the positions `[num_ids]` of the lines with these first halves of ids, or -1."""
        known = np.frombuffer(self._ids, np.uint64) if len(self) else np.zeros(0, np.uint64)
        queried = np.frombuffer(ids, np.uint64) if len(ids) else np.zeros(0, np.uint64)
        order = np.argsort(known, kind="stable")
        found = np.searchsorted(known[order], queried)
        positions = order[np.minimum(found, len(known) - 1)] if len(known) else found
        is_known = known[positions] == queried if len(known) else np.zeros(len(queried), bool)
        result: np.ndarray = np.where(is_known, positions, -1)
        return result

    def _parsed(self, data: bytes, urls: Collection[str] | None) -> Line:
        if len(data) > self._max_bytes:
            message = f"the line is longer than {self._max_bytes} bytes; send less, or start with a"
            raise LineError("line_too_long", f"{message} larger max_body_bytes.")
        return parse_line(data, urls)

    def _add_position(self, number: int, offset: int, data: bytes) -> None:
        """Record the position of a line. Raise RequestError if there are too many lines."""
        if len(self._offsets) == self._max_lines:
            raise RequestError(
                f"{self.path.name} has more than {self._max_lines} lines; split it into several"
                " files."
            )
        self._offsets.append(offset)
        self._sizes.append(len(data))
        self._numbers.append(number)
        self._ids.append(_first_half(id_of(data, number, self._model)))

    def _look(self, number: int, data: bytes, urls: Collection[str] | None) -> Line | None:
        try:
            return self._parsed(data, urls)
        except LineError as error:
            self._add(Problem(number, error))
            return None

    def _add(self, problem: Problem) -> None:
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

    def _find_repeated(self, custom_ids: "array[int]") -> set[int]:
        """Return the positions of the lines that repeat an earlier line's custom_id."""
        digests = np.frombuffer(custom_ids, np.uint64) if custom_ids else np.zeros(0, np.uint64)
        _, firsts = np.unique(digests, return_index=True)
        others = np.setdiff1d(np.arange(len(digests)), firsts)
        repeated = others[digests[others] != 0].tolist()
        for position in repeated:
            self._add(Problem(self._numbers[position], _repeated()))
        return set(repeated)


def _lines(file: IO[bytes], max_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, offset and bytes of each line that is not blank. A line longer than
    `max_bytes` is cut to `max_bytes` + 1 bytes."""
    number = offset = 0
    while data := file.readline(max_bytes + 1):
        number += 1
        begin, size = offset, len(data)
        piece = data
        while not piece.endswith(b"\n") and (piece := file.readline(PIECE_BYTES)):
            size += len(piece)
        offset += size
        if data.strip():
            yield number, begin, data


def _repeated() -> LineError:
    message = "an earlier line has the same custom_id; give each line its own."
    return LineError("duplicate_custom_id", message, "custom_id")


def _first_half(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def _digest(text: str) -> int:
    data = text.encode("utf-8", "backslashreplace")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") or 1


def _marks(line: Line | None) -> Iterator[int]:
    """Yield a number for each cut, a checksum of the url and of all bytes before the cut."""
    text = b"" if line is None else beginning_of(line)
    mark = 0 if line is None else zlib.crc32(line.url.encode())
    begin = 0
    for cut in CUTS:
        mark = zlib.crc32(text[begin:cut], mark)
        yield mark
        begin = cut


def _grouped(beginnings: list["array[int]"]) -> np.ndarray:
    """Return the order of lines. beginnings: for each cut, the numbers of all lines."""
    keys = []
    for numbers in beginnings:
        marks = np.frombuffer(numbers, np.uint32) if numbers else np.zeros(0, np.uint32)
        _, firsts, groups = np.unique(marks, return_index=True, return_inverse=True)
        keys.append(firsts[groups].astype(np.uint32))
    order: np.ndarray = np.lexsort(keys[::-1])
    return order
