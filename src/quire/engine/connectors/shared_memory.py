"""A store in the shared memory of this machine: the files of `disk.py` on a file system in memory.

    /dev/shm/quire-kv-USER-NAME/quire-kv-1/...

Engines of one user and one machine share it by its name. It outlives them, until the machine is
started anew or somebody removes the directory.
"""

import os
import re
import stat
from pathlib import Path

from quire.base.errors import ConfigError
from quire.engine.connectors.disk import DiskStore

ROOT = Path("/dev/shm")
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
MOST_SHARE = 4  # the part of that memory that blocks may take


def shared_memory_store(address: str, max_bytes: int) -> DiskStore:
    """Open the store of this name, of which a quarter of the shared memory is the most. Raises
    ConfigError where there is no such memory, and for a directory of somebody else."""
    if not NAME.fullmatch(address):
        raise ConfigError(
            f"shm:NAME takes a name of letters, digits, '-', '_' and '.', got {address!r}."
        )
    if not ROOT.is_dir():
        raise ConfigError(f"shm:{address} needs {ROOT}, which Linux has; take dir:PATH instead.")
    facts = os.statvfs(ROOT)
    most_bytes = min(max_bytes, facts.f_blocks * facts.f_frsize // MOST_SHARE)
    store = DiskStore(ROOT / f"quire-kv-{os.getuid()}-{address}", max(1, most_bytes))
    found = store.directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{store.directory} is not a directory of this user alone, and others could write what"
            " the model has read; take another name."
        )
    return store
