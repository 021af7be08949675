"""Two-level scheduling (T 4.5.3): a FIFO queue that feeds a short staging queue served by SRTF.

Requests move into the staging queue in batches, in order of arrival, and only when it is empty. So
only one batch is looked up in the index. Two rules go beyond the thesis:

- If a running prompt has fewer tokens left than all staged requests, these are set aside and the
  next batch is staged. Otherwise a long request that waits for that prompt would delay all short
  requests that arrive after it.
- Patience. On arrival, a request counts its own tokens and all tokens before it. In order of
  arrival, it would sample once these are computed. It is overdue when `PATIENCE` times as many
  tokens have been planned, and then goes first, whatever its length. So short requests cannot
  starve a long one.
"""

import heapq
from collections import OrderedDict

from quire.scheduler.core.queue import PATIENCE, Progress
from quire.scheduler.core.sequence import Sequence

STAGING = 8  # requests in a batch (T 4.5.3)
OVERDUE = -(1 << 60)


class TwoLevel:
    """Policy in order of arrival batches, and in a batch by remaining tokens."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._queue: OrderedDict[int, Sequence] = OrderedDict()  # not staged yet, by arrival
        self._staging: dict[int, Sequence] = {}
        self._held: dict[int, Sequence] = {}
        self._shortest: list[tuple[int, int]] = []  # heap of (remaining tokens, arrival) of `_held`
        self._sizes: dict[int, int] = {}  # tokens of each request at its arrival
        self._num_tokens = 0

    def push(self, sequence: Sequence) -> None:
        self._sizes[sequence.arrival] = sequence.num_known_tokens
        self._num_tokens += sequence.num_known_tokens
        before = self._num_tokens + self._progress.num_tokens_under_way()
        sequence.due_at = self._progress.num_planned_tokens + int(PATIENCE * before)
        self._queue[sequence.arrival] = sequence

    def peek(self) -> Sequence | None:
        if not self._staging:
            for _ in range(min(STAGING, len(self._queue))):
                arrival, sequence = self._queue.popitem(last=False)
                self._staging[arrival] = sequence
        return min(
            (*self._staging.values(), *self._next_set_aside()), key=self._order, default=None
        )

    def pass_over(self, sequence: Sequence) -> None:
        for arrival, staged in self._staging.items():  # all rank after the running prompt
            self._held[arrival] = staged
            heapq.heappush(self._shortest, (self._progress.remaining(staged), arrival))
        self._staging.clear()

    def remove(self, sequence: Sequence) -> None:
        self._num_tokens -= self._sizes.pop(sequence.arrival)  # more pieces may have arrived since
        for place in (self._queue, self._staging, self._held):
            if place.pop(sequence.arrival, None) is not None:
                return

    def rank(self, sequence: Sequence) -> int:
        remaining = self._progress.remaining(sequence)
        if self._progress.num_planned_tokens + remaining >= sequence.due_at:
            return OVERDUE + sequence.arrival
        return remaining

    def waiting(self) -> list[Sequence]:
        """Return all sequences. Staged ones are in order of admission if none of their tokens were
        cached and no sequence were overdue."""
        staged = [*self._held.values(), *self._staging.values()]
        staged.sort(key=lambda s: (s.num_known_tokens, s.arrival))
        return staged + list(self._queue.values())

    def __len__(self) -> int:
        return len(self._queue) + len(self._staging) + len(self._held)

    def _next_set_aside(self) -> list[Sequence]:
        """Return two of the sequences set aside: the earliest arrival and the shortest."""
        while self._shortest and self._shortest[0][1] not in self._held:
            heapq.heappop(self._shortest)
        if not self._held:
            return []
        return [next(iter(self._held.values())), self._held[self._shortest[0][1]]]

    def _order(self, sequence: Sequence) -> tuple[int, int]:
        return self.rank(sequence), sequence.arrival
