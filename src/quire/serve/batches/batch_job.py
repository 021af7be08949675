"""One batch of the server, from its input file to its outputs. A restarted batch resumes."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from quire.base.errors import QuireError
from quire.serve.batches.app_caller import AppCaller
from quire.serve.batches.batch_store import (
    FAILED,
    OUTPUT,
    BatchRecord,
    BatchStore,
    LineFault,
)
from quire.serve.batches.directory import NO_ROOM, key_of_owner, make_id
from quire.serve.batches.file_store import DATA, FILE, FileRecord, FileStore
from quire.serve.batches.input_index import InputIndex, ReadingStopped
from quire.serve.batches.journal import Journal
from quire.serve.batches.line_runner import LineOptions, LineRunner, Slots
from quire.serve.context import ApiContext

logger = logging.getLogger("quire")

LOW_PRIORITY = 1 << 20  # after all live requests
MAX_LINES = 1 << 18
TICK_S = 1.0  # interval of saving the state and checking whether the batch must end

NOT_RUN = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line was run."),
    "expired": ("batch_expired", "the completion window passed before this line was run."),
}


class BatchFailed(Exception):
    """Error that ends a batch as failed. faults: the reasons, for its client."""

    def __init__(self, faults: list[LineFault]) -> None:
        super().__init__(faults[0].message)
        self.faults = faults


@dataclass(frozen=True)
class BatchResources:
    """Objects that all batches of a process share. is_stopped: whether the process is stopping, so
    that another process must resume its batches."""

    app: FastAPI
    files: FileStore
    records: BatchStore
    slots: Slots
    is_stopped: Callable[[], bool] = lambda: False

    @property
    def api(self) -> ApiContext:
        found: ApiContext = self.app.state.context
        return found


class BatchJob:
    """One batch at work."""

    def __init__(self, record: BatchRecord, resources: BatchResources) -> None:
        self._record, self._resources = record, resources
        self._ends_as: str | None = None  # final state, once no new lines may start

    async def run(self) -> None:
        """Run the batch to its end, unless the process stops before. Raise OSError if even the
        final state cannot be written."""
        record = self._record
        try:
            if record.status != "finalizing":
                await self._answer_all()
        except ReadingStopped:
            return
        except BatchFailed as error:
            record.faults, record.ends_as = error.faults, "failed"
        except (QuireError, OSError) as error:
            record.faults, record.ends_as = [LineFault("batch_failed", str(error))], "failed"
        except Exception:
            logger.exception("batch %s failed unexpectedly", record.id)
            fault = LineFault("internal_error", "an error inside the server; its log has details.")
            record.faults, record.ends_as = [fault], "failed"
        await _in_thread(self._finish)
        logger.info(
            "batch %s %s: %d answers, %d failed of %d lines",
            record.id, record.status, record.tally.num_completed, record.tally.num_failed,
            record.total,
        )  # fmt: skip

    async def _answer_all(self) -> None:
        record, api = self._record, self._resources.api
        key, is_known = key_of_owner(record.owner, api.config.api_key)
        if not is_known:
            message = "the API key that created this batch is no longer one of the server's keys."
            raise BatchFailed([LineFault("key_removed", message)])
        caller = AppCaller(self._resources.app, key)
        index = await _in_thread(self._read)
        with contextlib.closing(index):
            if record.status == "validating":
                self._validate(index)
                record.total, record.model = len(index), api.model_names[0]
                record.enter("in_progress")
                await _in_thread(self._resources.records.save, record)
            directory = self._resources.records.directory
            output, failed = (directory.path(record.id, each) for each in (OUTPUT, FAILED))
            with contextlib.closing(Journal(output, failed)) as journal:
                options = LineOptions(priority=LOW_PRIORITY)
                runner = await _in_thread(LineRunner, index, journal, options)
                record.tally = runner.tally
                try:
                    await self._answer_lines(runner, journal, caller)
                finally:
                    record.tally = runner.tally

    def _read(self) -> InputIndex:
        record, api = self._record, self._resources.api
        path = self._resources.files.directory.path(record.input_file_id, DATA)
        max_bytes = api.config.max_bytes_with_images
        try:
            return InputIndex(
                path,
                api.model_names[0],
                max_bytes,
                {record.endpoint},
                MAX_LINES,
                self._resources.is_stopped,
            )
        except FileNotFoundError as error:
            message = f"the input file {record.input_file_id} is no longer there."
            raise BatchFailed([LineFault("file_not_found", message)]) from error

    def _validate(self, index: InputIndex) -> None:
        """Raise BatchFailed if any line is invalid or there is none, so that no line is sent."""
        faults = [
            LineFault(p.error.code, p.error.message, p.number, p.error.param)
            for p in index.problems
        ]
        if faults:
            raise BatchFailed(faults)
        if not len(index):
            raise BatchFailed([LineFault("empty_file", "the input file has no lines.")])

    # ---- lines -------------------------------------------------------------------------------

    async def _answer_lines(self, runner: LineRunner, journal: Journal, caller: AppCaller) -> None:
        """Run lines until all are done or the batch has to end."""
        self._check_end()
        work = asyncio.create_task(
            runner.run(caller, self._resources.slots, lambda: self._ends_as is not None)
        )
        try:
            while not work.done():
                await asyncio.wait((work,), timeout=TICK_S)
                await _in_thread(self._save_progress, journal)
            await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        self._record.ends_as = self._ends_as or "completed"
        if self._ends_as == "failed":
            error = self._resources.files.directory.no_room()
            raise BatchFailed([LineFault(NO_ROOM, str(error))])
        if self._ends_as is not None:
            await runner.fail_rest(*NOT_RUN[self._ends_as])

    def _save_progress(self, journal: Journal) -> None:
        """Sync the output to disk and save the progress."""
        journal.sync()
        self._resources.records.save(self._record)
        self._check_end()

    def _check_end(self) -> None:
        """Set `_ends_as` if the batch was cancelled, has expired, or has no room."""
        if self._ends_as is not None:
            return
        if self._resources.records.cancelled_at(self._record.id) is not None:
            self._ends_as = "cancelled"
        elif time.time() >= self._record.expires_at:
            self._ends_as = "expired"
        elif self._resources.files.directory.is_full:
            self._ends_as = "failed"

    # ---- the end -----------------------------------------------------------------------------

    def _finish(self) -> None:
        """Turn the outputs into files and save the final state. An interrupted end is repeated and
        makes the same files."""
        record, records = self._record, self._resources.records
        if record.status != "finalizing":
            record.enter("finalizing")
            record.output_file_id = self._id_for(OUTPUT)
            record.error_file_id = self._id_for(FAILED)
            records.save(record)
        for file_id, suffix in ((record.output_file_id, OUTPUT), (record.error_file_id, FAILED)):
            if file_id is not None:
                self._adopt(file_id, suffix)
        if record.ends_as == "cancelled":
            cancelled_at = records.cancelled_at(record.id)
            record.times["cancelling"] = cancelled_at or int(time.time())
        record.enter(record.ends_as)
        records.save(record)

    def _id_for(self, suffix: str) -> str | None:
        """Return a file id for this output if it has content; else remove the output."""
        path = self._resources.records.directory.path(self._record.id, suffix)
        if path.exists() and path.stat().st_size:
            return make_id(FILE)
        path.unlink(missing_ok=True)
        return None

    def _adopt(self, file_id: str, suffix: str) -> None:
        record, directory = self._record, self._resources.records.directory
        for path in (directory.path(record.id, suffix), directory.path(file_id, DATA)):
            if path.exists():
                size, created_at = path.stat().st_size, int(time.time())
                ttl_s = record.output_ttl_s
                found = FileRecord(
                    id=file_id,
                    bytes=size,
                    created_at=created_at,
                    filename=f"{record.id}{suffix}.jsonl",
                    purpose="batch_output",
                    owner=record.owner,
                    expires_at=None if ttl_s is None else created_at + ttl_s,
                )
                self._resources.files.adopt(suffix, record.id, found)
                return


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a thread. If the caller is cancelled, wait for the function first, because
    the caller closes its objects. Its result or error is then dropped."""
    call = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.gather(call, return_exceptions=True)
        raise
