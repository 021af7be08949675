"""A store in shared memory for one test."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from quire.engine.connectors import disk


@contextmanager
def shared_store() -> Iterator[str]:
    """Give a setting of a store that nobody else has; what is kept there goes with it."""
    name = f"test-{uuid.uuid4().hex}"
    yield f"shm:{name}"
    directory = disk.SHARED_MEMORY / f"quire-kv-{os.getuid()}-{name}"
    shutil.rmtree(directory, ignore_errors=True)
