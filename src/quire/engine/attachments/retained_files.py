"""Files of retained requests, so that their ids are known after a restart. One file per sequence.

    DIRECTORY/quire-held-1/FINGERPRINT/N/lock           N: released when its process ends
    DIRECTORY/quire-held-1/FINGERPRINT/N/DIGEST.held    tokens, owner and time of expiry

The files are in the directory of a store, next to its blocks, and contain no blocks. Blocks are
found in the store by the digests of the tokens, or computed again. A request with images has no
file: its pixels would be needed to compute it again. A thread writes each change while steps run. A
process that is killed may lose the last change. Only the owner may read the files.

A key is known by its index among a server's keys. Another server may have given that index to
another key. So retained requests of keys are restored only while their server lives, when only its
core has ended.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from quire.base.clock import Clock
from quire.base.messages import PutBack, RetainedRequest
from quire.base.tenants import is_key
from quire.engine.attachments.order import Order
from quire.engine.executors.threaded import DeviceThread
from quire.engine.loop.attachment import Attachment, Given, Loop
from quire.engine.loop.core import EngineCore
from quire.engine.observability.log_throttle import ThrottledLog
from quire.scheduler.core.sequence import Int32
from quire.scheduler.decisions import Decisions
from quire.scheduler.reuse.held import MAX_RETAINED, MAX_RETAINED_TOKENS, RetainedChanges
from quire.scheduler.scheduler import Topic

logger = logging.getLogger("quire")

LAYOUT, VERSION = "quire-held-1", 1
SUFFIX, UNFINISHED = ".held", ".tmp"
MAX_ENGINES = 64  # engines with one cache identity, at the same time
MAX_FILE_BYTES = 4 * MAX_RETAINED_TOKENS + 65536  # of a file
CHECK_BYTES = 16
CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW

Name = tuple[str, int]  # request id, index of the sequence
Change = (
    tuple[RetainedRequest, Int32] | None
)  # new state, with its tokens; None: no longer retained


class RetainedContent(msgspec.Struct, frozen=True, array_like=True):
    """Content of a file. ends_unix_s: in wall-clock time, which continues across a restart."""

    version: int
    server: str
    request_id: str
    index: int
    tenant: str
    cache_salt: str
    num_prompt_tokens: int
    keep_s: float
    ends_unix_s: float
    tokens: bytes
    adapter_id: str = ""


class RetainedFiles(Attachment):
    """Files of one engine's retained requests. folder: locked for this engine. server: id of the
    server, because an index means another key on another server."""

    order = Order.RETAINED_FILES
    is_vital = False

    def __init__(self, folder: Path, lock: int, server: str, clock: Clock) -> None:
        self._folder, self._lock, self._server = folder, lock, server
        self._log = ThrottledLog(clock)
        self._thread = DeviceThread("held")
        self._guard = threading.Lock()  # of the two fields below
        self._changes: dict[Name, tuple[Change, float]] = {}  # with the wall-clock time of each
        self._is_scheduled = False  # the thread is about to write them
        self._is_closed = False

    @classmethod
    def open(
        cls, directory: Path, fingerprint: bytes, server: str, clock: Clock
    ) -> "RetainedFiles | None":
        """Lock the first free folder. None, with a warning, if there is none or it cannot be
        written."""
        top = directory.expanduser() / LAYOUT / fingerprint.hex()
        why = f"{MAX_ENGINES} engines have one already"
        for number in range(MAX_ENGINES):
            try:
                folder = top / str(number)
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = os.open(folder / "lock", CREATE, 0o600)
            except OSError as error:
                why = error.strerror or str(error)
                break
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
            else:
                return cls(folder, lock, server, clock)
        logger.warning(
            "retained requests will not survive a restart: no folder in %s: %s", top, why
        )
        return None

    def load(self) -> Iterator[PutBack]:
        """Return the requests that the previous engine retained, oldest first. Files that are
        expired, of another server's key or above the limits are deleted, and with a warning damaged
        ones."""
        found: list[tuple[RetainedContent, float]] = []
        num_damaged = num_tokens = 0
        for path in self._listed():
            try:
                content = _read(path)
            except (OSError, ValueError, msgspec.MsgspecError, RecursionError):
                num_damaged += 1
                content = None
            left_s = (
                0.0 if content is None else min(content.ends_unix_s - time.time(), content.keep_s)
            )
            is_others = (
                content is not None and is_key(content.tenant) and content.server != self._server
            )
            num_tokens += 0 if content is None else len(content.tokens) // 4
            is_too_much = len(found) == MAX_RETAINED or num_tokens > MAX_RETAINED_TOKENS
            if content is None or left_s <= 0 or is_others or is_too_much:
                _unlink(path)
            else:
                found.append((content, left_s))
        if num_damaged:
            logger.warning(
                "%d files of retained requests in %s are damaged and were skipped",
                num_damaged,
                self._folder,
            )
        found.sort(key=lambda pair: pair[0].ends_unix_s - pair[0].keep_s)
        return (_message(content, left_s) for content, left_s in found)

    def hear(self, given: Given, decisions: Decisions) -> None:
        for note in decisions.notes:
            if type(note) is RetainedChanges and not self._is_closed:
                self.submit(note.found)

    def submit(self, changes: Mapping[Name, Change]) -> None:
        """Queue changes to be written. Numeric ids are skipped: they count the requests of one
        process, so they mean nothing to the next one."""
        now, named = time.time(), {n: each for n, each in changes.items() if not n[0].isdecimal()}
        if not named:
            return
        with self._guard:
            self._changes |= {name: (change, now) for name, change in named.items()}
            is_scheduled, self._is_scheduled = self._is_scheduled, True
        if not is_scheduled:
            self._thread.do(self._write_changes)

    def close(self, loop: Loop | None = None) -> None:
        """Write the queued changes, and release the folder. Later changes are not written, so files
        remain of requests that end with the engine."""
        self._is_closed = True
        self._thread.close()
        os.close(self._lock)

    # ---- the thread --------------------------------------------------------------------------

    def _write_changes(self) -> None:
        with self._guard:
            changes, self._changes, self._is_scheduled = self._changes, {}, False
        for name, (change, at_unix_s) in changes.items():
            path = self._folder / f"{_digest(name)}{SUFFIX}"
            try:
                if change is None or change[0].media:  # pixels are not written
                    path.unlink(missing_ok=True)
                else:
                    self._write(path, self._content(*change, at_unix_s))
            except OSError as error:
                _unlink(path)  # no file is better than an old one
                why = error.strerror or error
                self._log.warn(
                    "held", f"a retained request will not survive a restart: {path}: {why}"
                )

    def _content(self, held: RetainedRequest, tokens: Int32, at_unix_s: float) -> RetainedContent:
        return RetainedContent(
            VERSION, self._server, held.id, held.index, held.tenant, held.cache_salt,
            held.num_prompt_tokens, held.keep_s, at_unix_s + (held.expires_in_s or 0.0),
            tokens.tobytes(), held.adapter_id,
        )  # fmt: skip

    def _write(self, path: Path, content: RetainedContent) -> None:
        data, temporary = msgspec.msgpack.encode(content), path.with_suffix(UNFINISHED)
        try:
            with os.fdopen(os.open(temporary, CREATE, 0o600), "wb") as file:
                file.write(_checksum(data))
                file.write(data)
            temporary.rename(path)
        except OSError:
            _unlink(temporary)
            raise

    # ------------------------------------------------------------------------------------------

    def _listed(self) -> Sequence[Path]:
        """Return the paths of the files, after deleting unfinished ones."""
        try:
            paths = list(self._folder.iterdir())
        except OSError:
            return []
        for path in paths:
            if path.suffix == UNFINISHED:
                _unlink(path)
        return [path for path in paths if path.suffix == SUFFIX]


def save_retained(core: EngineCore, files: RetainedFiles) -> None:
    """Restore the retained requests of these files, and write later changes to the files."""
    for message in files.load():
        core.control(message)
    core.scheduler.subscribe(Topic.HELD)
    core.attach(files)


def _read(path: Path) -> RetainedContent:
    """Return a file's content. Raises OSError, ValueError or MsgspecError if it is damaged."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
        data = file.read(MAX_FILE_BYTES)
    check, data = data[:CHECK_BYTES], data[CHECK_BYTES:]
    if check != _checksum(data):
        raise ValueError("its checksum is wrong")
    content = msgspec.msgpack.decode(data, type=RetainedContent)
    if content.version != VERSION or not content.tokens or len(content.tokens) % 4:
        raise ValueError("it has another version")
    return content


def _message(content: RetainedContent, left_s: float) -> PutBack:
    return PutBack(
        request_id=content.request_id,
        index=content.index,
        token_ids=np.frombuffer(content.tokens, np.int32).tolist(),
        num_prompt_tokens=content.num_prompt_tokens,
        keep_s=content.keep_s,
        left_s=left_s,
        tenant=content.tenant,
        cache_salt=content.cache_salt,
        adapter_id=content.adapter_id,
    )


def _digest(name: Name) -> str:
    request_id, index = name
    return hashlib.blake2b(f"{index} {request_id}".encode(), digest_size=16).hexdigest()


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECK_BYTES).digest()


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
