"""Batch records on disk. All API processes read them; the process that runs batches writes them."""

import contextlib
import time

import msgspec

from quire.serve.batches.directory import FilesDirectory, is_id, make_id
from quire.serve.batches.tally import Tally

BATCH = "batch_"
STATE, CANCEL, OUTPUT, FAILED = ".json", ".cancel", ".output", ".failed"
MAX_BATCHES = 1000
FINAL = frozenset({"completed", "failed", "expired", "cancelled"})


class LineFault(msgspec.Struct):
    """Error of a batch, or of one of its lines."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch, as in OpenAI's API. owner: digest of its key. times: unix times by state. ends_as:
    final state once its files exist. output_ttl_s: lifetime of its output files."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    owner: str = ""
    status: str = "validating"
    ends_as: str = "completed"
    times: dict[str, int] = {}
    total: int = 0
    tally: Tally = msgspec.field(default_factory=Tally)
    faults: list[LineFault] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    output_ttl_s: int | None = None
    metadata: dict[str, str] | None = None
    model: str | None = None

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    def enter(self, status: str) -> None:
        """Change the state and record the time."""
        self.status = status
        self.times[status] = int(time.time())


class BatchStore:
    """Store of batch records. Methods with `owner` see only its batches; None sees all."""

    def __init__(self, directory: FilesDirectory) -> None:
        self.directory = directory
        self._final: set[str] = set()  # ids of batches in a final state

    def create(self, record: BatchRecord) -> bool:
        """Add a batch, and remove the oldest finished one if the store is full. Return False if
        there are too many unfinished batches."""
        names, done = self.directory.names(BATCH, STATE), None
        if len(names) >= MAX_BATCHES:
            done = next((name for name in names if self._is_final(name)), None)
            if done is None:
                return False
        self.save(record)
        if done is not None:  # after saving: on a full disk both would be lost
            self._remove(done)
        return True

    def save(self, record: BatchRecord) -> None:
        """Write the state. Only the process that runs batches may write it after its creation."""
        self.directory.write(self.directory.path(record.id, STATE), record)

    def get(self, batch_id: str, owner: str | None) -> BatchRecord | None:
        """Return a batch; None if the id is unknown or belongs to another owner."""
        if not is_id(batch_id, BATCH):
            return None
        record = self.directory.read(self.directory.path(batch_id, STATE), BatchRecord)
        if record is None or owner not in (None, record.owner):
            return None
        return record

    def seen(self, owner: str | None) -> list[BatchRecord]:
        """Return the owner's batches, oldest first."""
        found = (self.get(name, owner) for name in self.directory.names(BATCH, STATE))
        return [record for record in found if record is not None]

    def unfinished(self) -> list[BatchRecord]:
        """Return the batches that are not in a final state, oldest first."""
        names = set(self.directory.names(BATCH, STATE))
        self._final &= names
        found = [self.get(name, None) for name in sorted(names - self._final)]
        records = [record for record in found if record is not None]
        self._final |= {record.id for record in records if record.is_final}
        return [record for record in records if not record.is_final]

    def cancel(self, batch_id: str) -> None:
        """Request the end of a batch from the process that runs it."""
        self.directory.path(batch_id, CANCEL).touch(0o600)

    def cancelled_at(self, batch_id: str) -> int | None:
        """Return the unix time when cancellation was requested; None if it was not."""
        try:
            return int(self.directory.path(batch_id, CANCEL).stat().st_mtime)
        except FileNotFoundError:
            return None

    def _is_final(self, batch_id: str) -> bool:
        record = self.get(batch_id, None)
        return record is not None and record.is_final

    def _remove(self, batch_id: str) -> None:
        for suffix in (STATE, CANCEL, OUTPUT, FAILED):
            with contextlib.suppress(FileNotFoundError):
                self.directory.path(batch_id, suffix).unlink()


def new_batch_id() -> str:
    return make_id(BATCH)
