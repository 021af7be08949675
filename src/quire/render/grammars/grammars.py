"""`Grammars`: whether a grammar makes sense, said before the request goes to the engine.

It is compiled in a process of its own, since one that explodes takes seconds and gigabytes: the
kernel ends it by its processor time and memory. `prepare` starts the process, or else the first
check does. What has passed is remembered for a while.
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
from quire.render.jobs.job_pool import JobPool
from quire.render.jobs.job_process import JobKind

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
    """text: as the core takes it. warnings: what it asks for and is not kept to."""

    text: str
    warnings: tuple[str, ...] = ()


class Grammars:
    """May be used from any thread and any event loop."""

    def __init__(self, kind: JobKind = CHECKS) -> None:
        self._jobs = JobPool(kind)
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Checked] = OrderedDict()
        self._num_kept_chars = 0

    def prepare(self) -> None:
        """Start the process that the first check would have to wait for; once."""
        self._jobs.prepare()

    def check(self, grammar: str, field: str = FIELD) -> Checked:
        """Return a grammar as the core takes it. Raises RequestError, which names the field, for
        one that is wrong or takes too much, and EngineBusy where too many wait or the machine has
        too little processor time for the check."""
        key = _key(grammar, field)
        if (found := self._known(key)) is not None:
            return found
        with _naming(field):
            return self._keep(key, self._jobs.run(*_job(grammar)))

    async def check_async(self, grammar: str, field: str = FIELD) -> Checked:
        """Do the same without holding up an event loop."""
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
    """Return the name of a grammar in memory. Raise RequestError for one that is too long."""
    if len(grammar) > MAX_CHARS:
        raise RequestError(
            f"{field} gives a grammar of {len(grammar)} characters; at most {MAX_CHARS} are"
            " possible.",
            field,
        )
    return hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()


def _job(grammar: str) -> tuple[bytes, bool]:
    """Return what the process gets, and whether it is heavy."""
    data = json.dumps(grammar).encode()
    return data, len(data) > HEAVY_BYTES


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Name the field in a RequestError."""
    try:
        yield
    except EngineBusy:
        raise
    except RequestError as error:
        raise RequestError(f"{field}: {str(error).removesuffix('.')}.", field) from None
