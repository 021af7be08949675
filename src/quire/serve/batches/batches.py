"""The batches of a server. One of its API processes runs them, a few at a time; all show them.

The process that holds the lock of the directory runs batches. When it ends for any reason, another
API process gets the lock, or a process of the next server does.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from pathlib import Path

from fastapi import FastAPI

from quire.base.errors import EngineDead
from quire.base.settings.config import ServerConfig
from quire.serve.batches.batch_job import BatchJob, BatchResources
from quire.serve.batches.batch_store import BatchRecord, BatchStore
from quire.serve.batches.directory import FilesDirectory
from quire.serve.batches.file_store import FileStore
from quire.serve.batches.line_runner import Slots
from quire.serve.context import ApiContext

logger = logging.getLogger("quire")

POLL_S = 1.0  # interval of looking for batches that other processes created
AGAIN_S = 30.0  # pause after a batch whose end could not be written
MAX_RUNNING = 4  # batches at the same time, which share the slots in turn


class Batches:
    """Files and batches of one directory, and the task that runs the batches."""

    def __init__(self, directory: FilesDirectory) -> None:
        self.files, self.records = FileStore(directory), BatchStore(directory)
        self._lock: int | None = None  # the directory's lock, if this process has it
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._news = asyncio.Event()
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}

    def start(self, app: FastAPI) -> None:
        """Start the task that runs batches while this process holds the lock. Idempotent."""
        if self._task is None and not self._is_stopped:
            self._task = asyncio.create_task(self._run(app))

    def wake(self) -> None:
        """Make the task look for batches at once."""
        self._news.set()

    async def stop(self) -> None:
        """Stop for good, and leave unfinished batches to the next process."""
        self._is_stopped = True
        tasks = [task for task in (self._task, *self._jobs.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _run(self, app: FastAPI) -> None:
        api: ApiContext = app.state.context
        slots = Slots(num_slots(api))
        resources = BatchResources(app, self.files, self.records, slots, lambda: self._is_stopped)
        is_swept = False
        while True:
            try:
                if not is_swept:
                    await asyncio.to_thread(self.records.directory.sweep)
                    is_swept = True
                if self._lock is not None or self._take_lock():
                    await self._begin_due(resources)
            except OSError as error:
                logger.error("batches cannot be read (%s); the server tries again", error)
            except Exception:
                logger.exception("batches cannot be run; the server tries again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):  # wait_for may lose a cancellation
                    await self._news.wait()
            self._news.clear()

    def _take_lock(self) -> bool:
        path = self.records.directory.path("runner", ".lock")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self._lock = fd
        return True

    async def _begin_due(self, resources: BatchResources) -> None:
        """Start batches in order of arrival. Batches with a cancellation request start at once."""
        for record in await asyncio.to_thread(self.records.unfinished):
            if record.id in self._jobs or self._not_before.get(record.id, 0.0) > time.monotonic():
                continue
            is_due = len(self._jobs) < MAX_RUNNING
            if is_due or self.records.cancelled_at(record.id) is not None:
                self._jobs[record.id] = asyncio.create_task(self._run_one(record, resources))

    async def _run_one(self, record: BatchRecord, resources: BatchResources) -> None:
        try:
            await BatchJob(record, resources).run()
            self._not_before.pop(record.id, None)
        except OSError as error:
            logger.error("batch %s: its final state cannot be written (%s)", record.id, error)
            self._not_before[record.id] = time.monotonic() + AGAIN_S
        except Exception:
            logger.exception("batch %s cannot be ended; the server tries again", record.id)
            self._not_before[record.id] = time.monotonic() + AGAIN_S
        finally:
            self._jobs.pop(record.id, None)
            self.wake()


def num_slots(api: ApiContext) -> int:
    """Return how many sequences of batches may run at once: half of the rows, so that live requests
    find free rows."""
    num_rows = 1
    for each in api.models or (api,):
        with contextlib.suppress(EngineDead):  # one of several models that was never loaded
            ready = each.client.ready
            num_cores = int(ready.settings.get("data_parallel_size") or 1)
            num_rows = max(num_rows, ready.max_num_seqs * num_cores)
    return max(1, num_rows // 2)


def open_batches(config: ServerConfig) -> Batches | None:
    """Return the batches of a server with a files directory, else None. Raises ConfigError."""
    if config.files_dir is None:
        return None
    return Batches(FilesDirectory(Path(config.files_dir), config.files_gb))
