"""The output of a batch, which is its own journal: each line is either complete or absent.

Each line goes to the kernel in one write, so a killed process loses no line. `sync` writes to the
disk about once a second, so a power failure loses one second. If a process dies during a write, the
last line lacks its end and is cut off.
"""

import contextlib
import fcntl
import os
from array import array
from pathlib import Path

import msgspec

from quire.base.errors import ConfigError, RequestError
from quire.serve.batches.input_index import InputIndex
from quire.serve.batches.lines import ID_BYTES, ID_PREFIX, OutputLine
from quire.serve.batches.tally import Tally

LINE_BEGIN = b'{"id":"' + ID_PREFIX.encode()
READ_BYTES = 1 << 20


class Journal:
    """Output files. path: the output. failed_path: a separate output for failed lines."""

    def __init__(self, path: Path, failed_path: Path | None = None) -> None:
        """Open or create the files. Raise ConfigError if another process writes them."""
        self._files = [_File(path)]
        if failed_path is not None:
            try:
                self._files.append(_File(failed_path))
            except ConfigError:
                self.close()
                raise

    def resume(self, index: InputIndex, tally: Tally) -> set[int]:
        """Return the positions of the finished lines, and count them in `tally`. Raise RequestError
        if a file has other contents."""
        done: set[int] = set()
        for file in self._files:
            done |= set(file.resume(index, tally))
        return done

    def append(self, line: OutputLine) -> None:
        """Write a line. Raise OSError if that fails; the file is then unchanged."""
        self._files[-1 if line.is_failed else 0].append(line.encode())

    def sync(self) -> None:
        """Sync all lines to disk. Any thread may call it."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """Close all files, even if one cannot be synced. Raise OSError in that case."""
        with contextlib.ExitStack() as closing:
            for file in self._files:
                closing.callback(file.close)


class _File:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(
                f"{path} is being written by another process; wait for it, or end it."
            ) from error
        self._size = os.fstat(self._fd).st_size
        self._is_synced = True

    def resume(self, index: InputIndex, tally: Tally) -> list[int]:
        """Read the file and cut off a torn end; return the positions of the finished lines."""
        ids, end = array("Q"), 0
        with open(self._fd, "rb", buffering=READ_BYTES, closefd=False) as file:
            file.seek(0)
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n"):
                    if not (data.startswith(LINE_BEGIN) or LINE_BEGIN.startswith(data)):
                        raise self._foreign(number)
                    break
                line = self._decoded(number, data)
                ids.append(int.from_bytes(bytes.fromhex(line.id[len(ID_PREFIX) :])[:8], "big"))
                tally.add(line)
                end += len(data)
        positions: list[int] = index.positions_of(ids).tolist()
        if -1 in positions:
            raise self._of_another(positions.index(-1) + 1, index)
        if end < self._size:
            os.ftruncate(self._fd, end)
        self._size = end
        return positions

    def append(self, data: bytes) -> None:
        rest, at = memoryview(data), self._size
        try:
            while rest:
                written = os.pwrite(self._fd, rest, at)
                rest, at = rest[written:], at + written
        except OSError:
            with contextlib.suppress(OSError):  # the first error is the one to report
                os.ftruncate(self._fd, self._size)
            raise
        self._size, self._is_synced = at, False

    def sync(self) -> None:
        if not self._is_synced:
            self._is_synced = True  # before fsync: a line appended meanwhile resets it
            try:
                os.fsync(self._fd)
            except OSError:
                self._is_synced = False
                raise

    def close(self) -> None:
        try:
            self.sync()
        finally:
            os.close(self._fd)

    def _decoded(self, number: int, data: bytes) -> OutputLine:
        try:
            line = msgspec.json.decode(data, type=OutputLine)
            bytes.fromhex(line.id.removeprefix(ID_PREFIX))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._foreign(number) from error
        if not line.id.startswith(ID_PREFIX) or len(line.id) != len(ID_PREFIX) + 2 * ID_BYTES:
            raise self._foreign(number)
        return line

    def _foreign(self, number: int) -> RequestError:
        return RequestError(
            f"{self._path} is not a batch output file (line {number}); it was not changed. Give"
            " another file for the output."
        )

    def _of_another(self, number: int, index: InputIndex) -> RequestError:
        return RequestError(
            f"line {number} of {self._path} answers no line of {index.path}: it is of another"
            " input, of another model, or the input has changed. It stays as it is; give another"
            " file for the output, or the input and model that it is of."
        )
