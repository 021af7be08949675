"""`Grammars`: checks a request's grammar before the request reaches the engine.

A malicious grammar can take seconds and gigabytes to compile. So worker processes with limits on
processor time and memory compile it (`job_worker.py`). Results of valid grammars are cached.
"""

import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire.base.errors import EngineBusy, RequestError
from quire.base.requests.structured_outputs import FIELD
from quire.render.grammars.lark import MAX_CHARS
from quire.render.jobs.job_pool import JobKind, JobPool

HEAVY_BYTES = 1 << 14
MAX_KEPT = 512
MAX_KEPT_CHARS = 1 << 24
CHECKS = JobKind(
    module="quire.render.grammars.grammar_worker",
    cpu_s=1.2,
    memory_bytes=512 << 20,
    answer_s=30.0,
    subject="the grammar",
    work="",
    advice="use a smaller grammar with fewer and shorter repetitions",
    waiting="grammars are waiting to be checked",
    wait_s=10.0,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checked:
    """The result of a successful check."""

    text: str  # the grammar in the core's notation
    warnings: tuple[str, ...] = ()  # one for each part of the grammar that is not enforced


class Grammars:
    """Checks grammars and caches the results. All methods are thread-safe."""

    def __init__(self, kind: JobKind = CHECKS) -> None:
        self._jobs = JobPool(kind)
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Checked] = OrderedDict()
        self._num_kept_chars = 0

    def prepare(self) -> None:
        """Start a worker process in advance. Call this at most once."""
        self._jobs.prepare()

    def check(self, grammar: str, field: str = FIELD) -> Checked:
        """Return the checked grammar, in the core's notation.

        Raises RequestError with `field` if the grammar is invalid or takes too much. Raises
        EngineBusy if too many jobs wait, or if the machine has too little processor time."""
        key = _key(grammar, field)
        if (found := self._known(key)) is not None:
            return found
        with _naming(field):
            return self._keep(key, self._jobs.run(*_job(grammar)))

    async def check_async(self, grammar: str, field: str = FIELD) -> Checked:
        """Do the same as `check` without blocking the event loop."""
        key = _key(grammar, field)
        if (found := self._known(key)) is not None:
            return found
        with _naming(field):
            return self._keep(key, await self._jobs.run_async(*_job(grammar)))

    def _known(self, key: bytes) -> Checked | None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def _keep(self, key: bytes, answer: str) -> Checked:
        text, warnings = json.loads(answer)
        found = Checked(text, tuple(warnings))
        for warning in warnings:
            logger.warning("a grammar is not fully enforced: %s", warning)
        with self._lock:
            if key not in self._kept:
                self._num_kept_chars += len(text)
            self._kept[key] = found
            while len(self._kept) > MAX_KEPT or self._num_kept_chars > MAX_KEPT_CHARS:
                _, left = self._kept.popitem(last=False)
                self._num_kept_chars -= len(left.text)
        return found


def _key(grammar: str, field: str) -> bytes:
    """Return the cache key of a grammar. Raises RequestError if the grammar is too long."""
    if len(grammar) > MAX_CHARS:
        raise RequestError(
            f"{field} gives a grammar of {len(grammar)} characters; at most {MAX_CHARS} are"
            " possible.",
            field,
        )
    return hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()


def _job(grammar: str) -> tuple[bytes, bool]:
    """Return a worker's input, and whether the job is heavy."""
    data = json.dumps(grammar).encode()
    return data, len(data) > HEAVY_BYTES


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Add the field's name to a RequestError."""
    try:
        yield
    except EngineBusy:
        raise
    except RequestError as error:
        raise RequestError(f"{field}: {str(error).removesuffix('.')}.", field) from None
