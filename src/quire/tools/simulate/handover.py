"""Prefill disaggregation (T 4.4.4): some replicas compute prompts, others the answers.

    request -> a prefill replica computes the prompt and samples the first token
            -> other replicas can find its blocks by their names
            -> a decode replica gets prompt and first token, looks the names up, fetches the blocks
               over its link into host memory, loads them, and starts with `handed_over()`

The scheduler's own stores (`scheduler/reuse/stores.py`) look blocks up, fetch and load them, and
handle missing blocks; time is virtual. A fetch takes its bytes over the link's rate, one fetch
after the other per decode replica. Blocks are offered when the prompt is computed, at no cost.
"""

import hashlib
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from quire.base.clock import Clock
from quire.base.kv_orders import (
    Answer,
    BlockName,
    Fetch,
    Fetched,
    Keep,
    Kept,
    LookedUp,
    LookUp,
    Order,
    Removed,
)
from quire.kv.digest import BlockHash, extend_digests, root_digest
from quire.tools.simulate.arrivals import OTHER, Arrival
from quire.tools.simulate.run import Caused, Incoming, Run, as_list
from quire.tools.simulate.workload import Work

DECODES = " decodes"  # end of the second leg's id


@dataclass(frozen=True)
class Roles:
    """Prefill replicas come first, then decode replicas. The link's rate is per decode replica."""

    num_prefill: int
    num_decode: int
    link_bytes_per_s: float

    @property
    def num_replicas(self) -> int:
        return self.num_prefill + self.num_decode

    def cores_of(self, request_id: str) -> range:
        """Return the replicas that may get a request."""
        if request_id.endswith(DECODES):
            return range(self.num_prefill, self.num_replicas)
        return range(self.num_prefill)


@dataclass
class Offered:
    """The blocks that prefill replicas have computed and others may fetch, by name."""

    num_groups: int
    block_size: int
    block_hash: BlockHash = hashlib.sha256
    names: set[BlockName] = field(default_factory=set)

    def offer(self, prompt_token_ids: Sequence[int]) -> None:
        """Offer the full blocks of a prompt."""
        digests: list[bytes] = []
        num = len(prompt_token_ids) // self.block_size
        tokens = np.asarray(prompt_token_ids, np.int32)
        extend_digests(digests, root_digest(b""), tokens, self.block_size, num, self.block_hash)
        self.names.update((g, digest) for digest in digests for g in range(self.num_groups))


class Link:
    """A decode replica's store: fetches offered blocks at a fixed rate. It replaces `Connections`
    in virtual time. `block_bytes` is by cache group."""

    num_open = 0  # nothing waits in real time
    next_s = None  # no answer has a deadline

    def __init__(
        self, offered: Offered, block_bytes: Sequence[int], bytes_per_s: float, clock: Clock
    ) -> None:
        self._offered, self._block_bytes = offered, block_bytes
        self._bytes_per_s, self._clock = bytes_per_s, clock
        self._answers: list[tuple[float, int, Answer]] = []
        self._num_answers = 0
        self._free_s = -math.inf  # time at which the link becomes idle
        self.num_bytes = 0

    @property
    def next_answer_s(self) -> float | None:
        return self._answers[0][0] if self._answers else None

    @property
    def has_answers(self) -> bool:
        return bool(self._answers) and self._answers[0][0] <= self._clock.now()

    def submit(self, orders: Sequence[Order]) -> None:
        for order in orders:
            at_s, answer = self._answer(order)
            heapq.heappush(self._answers, (at_s, self._num_answers, answer))
            self._num_answers += 1

    def take(self, now: float) -> list[Answer]:
        found = []
        while self._answers and self._answers[0][0] <= now:
            found.append(heapq.heappop(self._answers)[2])
        return found

    def close(self, until_s: float, clock: Clock) -> None:
        """Close the store, which has nothing to save."""

    def _answer(self, order: Order) -> tuple[float, Answer]:
        """Return the time of an answer, and the answer."""
        now, names = self._clock.now(), self._offered.names
        if isinstance(order, LookUp):
            found = [name in names for name in order.names]
            return now, LookedUp(order.store, order.request_id, found, order.ticket)
        if isinstance(order, Fetch):
            num_bytes = sum(self._block_bytes[group] for group, _, _ in order.items)
            duration_s = num_bytes / self._bytes_per_s
            self._free_s = max(now, self._free_s) + duration_s
            self.num_bytes += num_bytes
            ok = [(group, digest) in names for group, digest, _ in order.items]
            return self._free_s, Fetched(order.store, order.ticket, ok, num_bytes, duration_s)
        if isinstance(order, Keep):  # evicted blocks, which no replica looks up
            return now, Kept(order.store, order.ticket, [True] * len(order.items), 0, 0.0)
        self._offered.names.difference_update(order.names)
        return now, Removed(order.store, order.ticket, [True] * len(order.names))


class HandedOver:
    """A workload whose requests have two legs, made from another workload."""

    def __init__(self, work: Work, offered: Offered) -> None:
        self.name, self.num, self.rate_per_s = work.name, work.num, work.rate_per_s
        self._work, self._offered = work, offered
        self._open: dict[str, Arrival] = {}  # requests in their first leg

    def arrivals(self) -> Iterator[Incoming]:
        for coming in self._work.arrivals():
            yield self._first(coming) if isinstance(coming, Arrival) else coming

    def then(self, request_id: str, now: float) -> Caused:
        """Return the second leg of a request, or the arrivals that its end causes."""
        whole = self._open.pop(request_id, None)
        if whole is not None:
            request, num_left = whole.request, whole.num_output - 1
            self._offered.offer(request.prompt_token_ids)
            if num_left > 0:
                tokens = [*request.prompt_token_ids, OTHER]
                leg = msgspec.structs.replace(
                    request, request_id=request_id + DECODES, prompt_token_ids=tokens
                )
                return Arrival(now, leg, num_left)
        more = self._work.then(request_id.removesuffix(DECODES), now)
        return [self._first(each) for each in as_list(more)]

    def refused(self, request_id: str, now: float) -> Caused:
        """Return the arrivals that the refusal of a leg causes. There is no second leg then."""
        self._open.pop(request_id, None)
        more = self._work.refused(request_id.removesuffix(DECODES), now)
        return [self._first(each) for each in as_list(more)]

    def _first(self, arrival: Arrival) -> Arrival:
        self._open[arrival.request.request_id] = arrival
        return Arrival(arrival.at_s, arrival.request, 1)


def join_legs(run: Run) -> None:
    """Merge the two legs of each request. The time between the legs is a gap between tokens."""
    for leg_id in [name for name in run.by_id if name.endswith(DECODES)]:
        second, first = run.by_id.pop(leg_id), run.by_id[leg_id.removesuffix(DECODES)]
        gap_s = second.first_token_s - first.first_token_s
        run.listeners[second.replica].gaps.append(np.array([gap_s]))
        first.finished_s, first.reason = second.finished_s, second.reason
        first.num_output += second.num_output
        first.num_preemptions += second.num_preemptions
        first.away_s += second.away_s
        first.error = first.error or second.error
