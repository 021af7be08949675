"""Choice of a core for a request: the core that has the prompt's prefix, unless it is overloaded.

A core's load is counted in tokens of its open requests. The cost of a request on a core is

    load + weight - tokens of the prompt's prefix that were sent there before

The candidate is the core that was sent the longest prefix, with the lowest cost among equals. If
its cost is more than MUCH_MORE times the lowest cost of any core, that core gets the request.
So unrelated prompts spread evenly, a conversation stays on its core, and common prefixes get cached
on all cores. Cores with equal costs take turns, so that all of them fill their caches. The module
is pure: it knows only the loads and requests that callers pass to it.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from quire.base.errors import RequestError
from quire.base.messages import Request
from quire.engine.observability.heartbeat import LoadReport
from quire.kv.digest import marks_between, root_digest

ROW_TOKENS = 256  # prompt tokens that weigh as much as one decoding sequence
MUCH_MORE = 1.5
MAX_MARKS = 1 << 16  # marks of all prompts that are remembered; each takes about 200 bytes
EVERY_BLOCK = 64  # first blocks with a mark each; the spacing doubles with each doubling after them

Mark = tuple[int, bytes]  # length of a prefix, digest of its tokens, salt, adapter and media


def weight(request: Request) -> int:
    """Return what a request adds to the load of its core, in tokens."""
    return len(request.prompt_token_ids) + ROW_TOKENS * request.params.num_samples


def check_core(core_id: int | None, num_cores: int) -> None:
    """Raise RequestError for a core number that does not exist. None means any core."""
    if core_id is not None and not 0 <= core_id < num_cores:
        there_are = (
            f"are {num_cores} cores, 0 to {num_cores - 1}" if num_cores > 1 else "is one engine, 0"
        )
        raise RequestError(
            f"data_parallel_rank={core_id}: there {there_are}; choose one of these, or remove it.",
            "data_parallel_rank",
        )


class OpenLoad:
    """Total load of open requests, in tokens."""

    def __init__(self) -> None:
        self.total = 0
        self._weights: dict[str, int] = {}

    def add(self, request: Request) -> None:
        self.remove(request.request_id)
        self._weights[request.request_id] = weight(request)
        self.total += weight(request)

    def remove(self, request_id: str) -> None:
        """Forget a request; ignore an unknown one."""
        self.total -= self._weights.pop(request_id, 0)


class SeenLoad:
    """A core's load as one client sees it: the core's last report, plus the change of the client's
    own open work since then."""

    def __init__(self) -> None:
        self._report, self._own_then = LoadReport(), 0

    def tokens(self, report: LoadReport, own: int) -> int:
        """Return the core's load in tokens, at least `own`: this client's open tokens there."""
        if report != self._report:
            self._report, self._own_then = report, own
        return max(own, report.tokens + own - self._own_then)


class CoreChoice:
    """Chooser of cores, with a memory of the prefixes sent to each. block_size: tokens of a block;
    0 without prefix caching. max_marks: maximum number of marks."""

    def __init__(self, num_cores: int, block_size: int, max_marks: int = MAX_MARKS) -> None:
        self.num_cores = num_cores
        self._block_size = block_size
        self._max_marks = max_marks
        self._known: OrderedDict[bytes, int] = OrderedDict()  # digest -> bit set of cores
        self._turns = list(range(num_cores))  # least recently chosen core first

    def __len__(self) -> int:
        """Return the number of remembered marks."""
        return len(self._known)

    def choose(self, request: Request, loads: Mapping[int, int]) -> int:
        """Choose one of the cores in `loads` (at least one), and remember that it gets the
        request."""
        marks = list(self._marks(request))
        known = self._known_tokens(marks)
        costs = {core: load + weight(request) - known[core] for core, load in loads.items()}
        in_turn = [core for core in self._turns if core in costs]
        cheapest = min(in_turn, key=lambda core: costs[core])
        best = min(in_turn, key=lambda core: (-known[core], costs[core]))
        core = cheapest if costs[best] > MUCH_MORE * costs[cheapest] else best
        self._turns.remove(core)
        self._turns.append(core)
        self._remember(marks, 1 << core)
        return core

    def sent(self, request: Request, cores: Collection[int]) -> None:
        """Remember that a request was sent to these cores without a choice."""
        self._remember(list(self._marks(request)), sum(1 << core for core in cores))

    def forget(self, core: int) -> None:
        """Forget all prefixes sent to a core, which has lost its cache."""
        for digest, cores in self._known.items():
            self._known[digest] = cores & ~(1 << core)

    def forget_all(self) -> None:
        self._known.clear()

    def _marks(self, request: Request) -> Iterator[Mark]:
        """Yield marks of the prompt's prefixes of whole blocks. A digest covers the same properties
        as block names (`scheduler/core/names.py`), but not the tenant."""
        size = self._block_size
        if not size:
            return
        token_ids = np.array(request.prompt_token_ids, "<i4")
        digest = root_digest(b"", request.cache_salt, request.adapter_id)
        start, marks = 0, request.marks
        for num_blocks in _marked_blocks(len(token_ids) // size):
            end = num_blocks * size
            data = token_ids[start:end].tobytes() + marks_between(marks, start, end)
            digest = hashlib.sha256(digest + data).digest()
            yield end, digest
            start = end

    def _known_tokens(self, marks: list[Mark]) -> list[int]:
        """Return for each core the number of prompt tokens in the longest prefix it was sent."""
        known = [0] * self.num_cores
        for num_tokens, digest in marks:
            cores = self._known.get(digest, 0)
            for core in range(self.num_cores):
                if cores >> core & 1:
                    known[core] = num_tokens
        return known

    def _remember(self, marks: list[Mark], cores: int) -> None:
        """Remember a prompt's marks for a bit set of cores; forget its first, shared marks last."""
        for _, digest in reversed(marks):
            self._known[digest] = self._known.get(digest, 0) | cores
            self._known.move_to_end(digest)
        while len(self._known) > self._max_marks:
            self._known.popitem(last=False)


def _marked_blocks(num_blocks: int) -> Iterator[int]:
    """Yield the lengths, in blocks, of the prefixes that get marks: each of the first EVERY_BLOCK
    lengths, then coarser. A prompt of 8,192 blocks has 288 marks. All prompts have the same lengths
    up to their end."""
    at, step = 1, 1
    while at <= num_blocks:
        yield at
        step *= 2 if at == EVERY_BLOCK * step else 1
        at += step
