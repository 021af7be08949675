"""Uploaded files and outputs of batches. Each file belongs to the key that created it."""

import contextlib
import fcntl
import os
import time

import msgspec

from quire.serve.batches.directory import PART, FilesDirectory, is_id, make_id

FILE = "file-"
INFO, DATA = ".json", ".data"
MAX_FILES = 10_000
STEP_BYTES = 4 << 20  # bytes that an upload reserves ahead of its data


class FileRecord(msgspec.Struct):
    """Record of a file. owner: digest of its key, empty on a server without keys. expires_at: unix
    time after which the file is removed."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    owner: str = ""
    expires_at: int | None = None


class Upload:
    """A file that is being uploaded. It reserves room as it grows. Methods block."""

    def __init__(self, directory: FilesDirectory) -> None:
        self._directory = directory
        self.id = make_id(FILE)
        self.num_bytes = self._reserved = 0
        self._path = directory.path(self.id, PART)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def write(self, data: bytes | bytearray) -> None:
        """Append data. Raise RequestError at the directory's limit, OSError on a full disk."""
        end = self.num_bytes + len(data)
        if end > self._reserved:
            self._reserved = self._directory.reserve(self._fd, end, end + STEP_BYTES)
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self._fd, rest, self.num_bytes)
            rest, self.num_bytes = rest[written:], self.num_bytes + written

    def finish(self, record: FileRecord) -> None:
        """Turn the upload into a file of the store."""
        os.ftruncate(self._fd, self.num_bytes)
        os.fsync(self._fd)
        self._directory.write(self._directory.path(self.id, INFO), record)
        self._path.rename(self._directory.path(self.id, DATA))

    def close(self) -> None:
        """Close the upload, and remove it unless it was finished."""
        os.close(self._fd)
        self._path.unlink(missing_ok=True)


class FileStore:
    """Store of files. Methods with `owner` see only its files; None sees all."""

    def __init__(self, directory: FilesDirectory) -> None:
        self.directory = directory

    def get(self, file_id: str, owner: str | None) -> FileRecord | None:
        """Return a file; None if the id is unknown, expired, or belongs to another owner."""
        if not is_id(file_id, FILE):
            return None
        record = self.directory.read(self.directory.path(file_id, INFO), FileRecord)
        if record is None:
            return None
        if record.expires_at is not None and record.expires_at <= time.time():
            self._remove(file_id)
            return None
        if not self.directory.path(file_id, DATA).exists():
            return None  # the upload died before its last step
        return record if owner is None or record.owner == owner else None

    def seen(self, owner: str | None, purpose: str | None = None) -> list[FileRecord]:
        """Return the owner's files, oldest first. Expired files are removed."""
        found = (self.get(name, owner) for name in self.directory.names(FILE, INFO))
        return [f for f in found if f is not None and purpose in (None, f.purpose)]

    @property
    def is_full(self) -> bool:
        """Whether the maximum number of files is reached."""
        return len(self.directory.names(FILE, INFO)) >= MAX_FILES

    def adopt(self, path_suffix: str, batch_id: str, record: FileRecord) -> None:
        """Turn a batch's output into a file. Safe to repeat after an interruption."""
        written = self.directory.path(batch_id, path_suffix)
        self.directory.write(self.directory.path(record.id, INFO), record)
        with contextlib.suppress(FileNotFoundError):
            written.rename(self.directory.path(record.id, DATA))

    def delete(self, file_id: str, owner: str | None) -> bool:
        """Delete a file; return False if there is none."""
        if self.get(file_id, owner) is None:
            return False
        self._remove(file_id)
        return True

    def _remove(self, file_id: str) -> None:
        for suffix in (INFO, DATA):  # without its record it is not a file any more
            with contextlib.suppress(FileNotFoundError):
                self.directory.path(file_id, suffix).unlink()
