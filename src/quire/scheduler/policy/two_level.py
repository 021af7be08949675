"""Two-level scheduling (T 4.5.3): a FIFO queue in front of a short staging queue served by SRTF.

Requests move into the staging queue in batches, in the order of arrival, and only when it is empty,
so that only a batch is looked up in the index. Two rules go beyond the thesis:

- If all that are staged are passed over for a prompt under way, which has fewer tokens left, they
  are held aside and the next batch moves in. Otherwise one long prompt that waits for another one
  would hold up all short ones that come after it.
- Patience. On arrival a request is told how many tokens are before it, its own included; in the
  order of arrival it would sample once these are computed. When `PATIENCE` times as many have been,
  its turn has come, whatever it lacks. So short requests cannot starve a long one.
"""

import heapq
from collections import OrderedDict

from quire.scheduler.core.queue import PATIENCE, Progress
from quire.scheduler.core.sequence import Sequence

STAGING = 8  # requests (T 4.5.3)
OVERDUE = -(1 << 60)


class TwoLevel:
    """Ordered by batches of arrivals, and in a batch by remaining tokens."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._queue: OrderedDict[int, Sequence] = OrderedDict()  # all by arrival
        self._staging: dict[int, Sequence] = {}
        self._held: dict[int, Sequence] = {}
        self._shortest: list[tuple[int, int]] = []  # heap of what was held: tokens, arrival
        self._sizes: dict[int, int] = {}  # tokens of each when it came
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
        return min((*self._staging.values(), *self._next_held()), key=self._order, default=None)

    def pass_over(self, sequence: Sequence) -> None:
        for arrival, staged in self._staging.items():  # none of them comes before the head
            self._held[arrival] = staged
            heapq.heappush(self._shortest, (self._progress.remaining(staged), arrival))
        self._staging.clear()

    def remove(self, sequence: Sequence) -> None:
        self._num_tokens -= self._sizes.pop(sequence.arrival)  # it may have got pieces since
        for place in (self._queue, self._staging, self._held):
            if place.pop(sequence.arrival, None) is not None:
                return

    def rank(self, sequence: Sequence) -> int:
        remaining = self._progress.remaining(sequence)
        if self._progress.num_planned_tokens + remaining >= sequence.due_at:
            return OVERDUE + sequence.arrival
        return remaining

    def waiting(self) -> list[Sequence]:
        """List all, those in the batch in the order that they would have if nothing of them were
        cached and nobody were overdue."""
        staged = [*self._held.values(), *self._staging.values()]
        staged.sort(key=lambda s: (s.num_known_tokens, s.arrival))
        return staged + list(self._queue.values())

    def __len__(self) -> int:
        return len(self._queue) + len(self._staging) + len(self._held)

    def _next_held(self) -> list[Sequence]:
        """List, of those held aside, the one that came first and the one that lacked least."""
        while self._shortest and self._shortest[0][1] not in self._held:
            heapq.heappop(self._shortest)
        if not self._held:
            return []
        return [next(iter(self._held.values())), self._held[self._shortest[0][1]]]

    def _order(self, sequence: Sequence) -> tuple[int, int]:
        return self.rank(sequence), sequence.arrival
