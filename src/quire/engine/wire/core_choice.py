"""Which of several cores a request goes to: the one that knows its first blocks, unless that one
has much more to do than another.

A core's load is counted in tokens of its open requests. With a request there it is

    load + weight - tokens of the prompt that were sent there before

and of the cores that were sent most of the prompt, the least loaded gets it, unless this is more
than MUCH_MORE times the least; then the least loaded of all. So unrelated prompts spread evenly, a
conversation stays where it began, and what everybody begins with becomes known everywhere. Cores
with as much to do have their turns, so that all of them fill their caches. Pure: it knows what it
has been told.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from quire.base.errors import RequestError
from quire.base.messages import Request
from quire.engine.observability.heartbeat import LoadReport
from quire.kv.digest import marks_between, root_digest

ROW_TOKENS = 256  # a sequence that is decoded counts as much as so many tokens of a prompt
MUCH_MORE = 1.5
MOST_MARKS = 1 << 16  # that are remembered of all prompts; each takes about 200 bytes
EVERY_BLOCK = 64  # of the first so many; twice as coarse from each doubling on

Mark = tuple[int, bytes]  # tokens of a prompt, digest of these and of what else names its blocks


def weight(request: Request) -> int:
    """Return what a request adds to the load of its core, in tokens."""
    return len(request.prompt_token_ids) + ROW_TOKENS * request.params.num_samples


def check_core(core_id: int | None, num_cores: int) -> None:
    """Raise RequestError for a core that there is none of. None is any."""
    if core_id is not None and not 0 <= core_id < num_cores:
        there_are = (
            f"are {num_cores} cores, 0 to {num_cores - 1}" if num_cores > 1 else "is one engine, 0"
        )
        raise RequestError(
            f"data_parallel_rank={core_id}: there {there_are}; choose one of these, or remove it.",
            "data_parallel_rank",
        )


class OpenLoad:
    """The load of open requests, by id."""

    def __init__(self) -> None:
        self.total = 0
        self._weights: dict[str, int] = {}

    def add(self, request: Request) -> None:
        self.remove(request.request_id)
        self._weights[request.request_id] = weight(request)
        self.total += weight(request)

    def remove(self, request_id: str) -> None:
        """Forget a request; one that is unknown is ignored."""
        self.total -= self._weights.pop(request_id, 0)


class SeenLoad:
    """A core's load as one of its clients sees it: the core's last report, corrected by how much
    the client's own open work has changed since then."""

    def __init__(self) -> None:
        self._report, self._own_then = LoadReport(), 0

    def tokens(self, report: LoadReport, own: int) -> int:
        """Return the core's load, at least own: the tokens that this client has open there."""
        if report != self._report:
            self._report, self._own_then = report, own
        return max(own, report.tokens + own - self._own_then)


class CoreChoice:
    """Chooses, and remembers what it sent where. block_size: 0 if cores keep no prefixes."""

    def __init__(self, num_cores: int, block_size: int, most_marks: int = MOST_MARKS) -> None:
        self.num_cores = num_cores
        self._block_size = block_size
        self._most_marks = most_marks
        self._known: OrderedDict[bytes, int] = OrderedDict()  # digest -> cores, a bit for each
        self._turns = list(range(num_cores))  # first, who was chosen longest ago

    def __len__(self) -> int:
        """Return how many marks are remembered."""
        return len(self._known)

    def choose(self, request: Request, loads: Mapping[int, int]) -> int:
        """Choose one of the cores whose loads are given, at least one, and remember that the
        request is sent there."""
        marks = list(self._marks(request))
        known = self._known_tokens(marks)
        costs = {core: load + weight(request) - known[core] for core, load in loads.items()}
        in_turn = [core for core in self._turns if core in costs]
        least = min(in_turn, key=lambda core: costs[core])
        best = min(in_turn, key=lambda core: (-known[core], costs[core]))
        core = least if costs[best] > MUCH_MORE * costs[least] else best
        self._turns.remove(core)
        self._turns.append(core)
        self._remember(marks, 1 << core)
        return core

    def sent(self, request: Request, cores: Collection[int]) -> None:
        """Remember a request that was sent to these cores without a choice."""
        self._remember(list(self._marks(request)), sum(1 << core for core in cores))

    def forget(self, core: int) -> None:
        """Forget what was sent to a core: it has lost it."""
        for digest, cores in self._known.items():
            self._known[digest] = cores & ~(1 << core)

    def forget_all(self) -> None:
        self._known.clear()

    def _marks(self, request: Request) -> Iterator[Mark]:
        """Yield digests of the prompt's beginnings, each of whole blocks. Names of blocks differ by
        the same things (`scheduler/core/names.py`), tenants not among them."""
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
        """Return how many of a prompt's first tokens each core was sent."""
        known = [0] * self.num_cores
        for num_tokens, digest in marks:
            cores = self._known.get(digest, 0)
            for core in range(self.num_cores):
                if cores >> core & 1:
                    known[core] = num_tokens
        return known

    def _remember(self, marks: list[Mark], cores: int) -> None:
        """Remember marks; the first of a prompt, which others share, are forgotten last."""
        for _, digest in reversed(marks):
            self._known[digest] = self._known.get(digest, 0) | cores
            self._known.move_to_end(digest)
        while len(self._known) > self._most_marks:
            self._known.popitem(last=False)


def _marked_blocks(num_blocks: int) -> Iterator[int]:
    """Yield the ends, in blocks, of the beginnings that are compared: each of the first blocks,
    then coarser, so that a prompt of 8,192 blocks has 288. The prompt's length does not move
    them."""
    at, step = 1, 1
    while at <= num_blocks:
        yield at
        step *= 2 if at == EVERY_BLOCK * step else 1
        at += step
