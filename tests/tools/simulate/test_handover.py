"""Prefill on one replica and decoding on another: computed tokens, and moved blocks."""

import numpy as np
import pytest

from quire.base.clock import FakeClock
from quire.base.kv_orders import Remove
from quire.base.settings.config import SchedulerConfig
from quire.kv.digest import extend_digests, root_digest
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import Memory
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from quire.tools.simulate.arrivals import Arrival, simulated_request
from quire.tools.simulate.handover import DECODES, HandedOver, Link, Offered, Roles, join_legs
from quire.tools.simulate.replica import Replica
from quire.tools.simulate.run import Incoming, Routing, Run, run_all
from quire.tools.step_times import Roofline
from quire.tools.workloads import token_ids_of

BLOCK, BYTES = 4, 100
STEP_S = 1.0


class Listed:
    """A workload of the given arrivals."""

    name, rate_per_s = "listed", 1.0

    def __init__(self, arrivals: list[Arrival]) -> None:
        self._arrivals, self.num = arrivals, len(arrivals)

    def arrivals(self) -> "list[Incoming]":
        return list(self._arrivals)

    def then(self, request_id: str, now: float) -> Arrival | None:
        assert not request_id.endswith(DECODES), "workloads never see the decode legs"
        return None


class World:
    """One replica of each role. A step takes one second, and only steps and the link take time."""

    def __init__(self, arrivals: list[Arrival], bytes_per_s: float) -> None:
        self.clock, self.run = FakeClock(), Run()
        self.offered = Offered(1, BLOCK)
        self.link = Link(self.offered, [BYTES], bytes_per_s, self.clock)
        self.cores = [self._replica(0, None), self._replica(1, self.link)]
        self.work = HandedOver(Listed(arrivals), self.offered)  # type: ignore[arg-type]

    def _replica(self, number: int, link: Link | None) -> Replica:
        group = CacheGroup("full", (0,), num_kv_heads=1, head_dim=1)
        kv = KVManager((group,), (200,), BLOCK, block_bytes=(BYTES,), host_limits=(200,))
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
        scheduler = Scheduler(Memory(kv, 64), config, 200, num_stores=0 if link is None else 1)
        times = Roofline(STEP_S, 0.0)
        replica = Replica(scheduler, times, self.clock, number, self.run.by_id, 1000)
        if link is not None:
            replica.connect(link)
        return replica

    def serve(self) -> Run:
        roles = Roles(1, 1, 1.0)
        run_all(
            self.cores, self.work.arrivals(), self.clock, self.run, self.work.then,
            routing=Routing(BLOCK, roles.cores_of),
        )  # fmt: skip
        for core in self.cores:
            core.close()
        join_legs(self.run)
        return self.run

    def num_computed(self, number: int) -> int:
        return sum(self.cores[number].listener.series.num_tokens)


def arrival(name: str, num_prompt: int, num_output: int, at_s: float = 0.0) -> Arrival:
    """A prompt that begins with 12 tokens shared by all requests."""
    prompt = token_ids_of([(1, 12), (ord(name) + 2, num_prompt - 12)], 1000)
    return Arrival(at_s, simulated_request(name, prompt, None), num_output)


def test_decode_replica_starts_after_the_transferred_prompt() -> None:
    """Prefill and the transfer of ten blocks precede one decode step per token."""
    world = World([arrival("a", 40, 5)], bytes_per_s=500.0)
    served = world.serve().by_id["a"]
    assert world.num_computed(0) == 40 and world.num_computed(1) == 4
    assert served.first_token_s == pytest.approx(1.0)
    transfer_s = 10 * BYTES / 500.0
    assert served.finished_s == pytest.approx(1.0 + transfer_s + 4 * STEP_S)
    assert (served.num_output, served.num_prompt) == (5, 40)
    assert world.run.gaps_s.tolist() == pytest.approx([1.0, 1.0, 1.0, transfer_s + 1.0])
    assert world.link.num_bytes == 10 * BYTES
    assert list(world.run.by_id) == ["a"], "both legs count as one request"


def test_decode_replica_computes_the_partial_last_block() -> None:
    world = World([arrival("a", 42, 3)], bytes_per_s=1e9)
    world.serve()
    assert world.num_computed(1) == 2 + 2 and world.link.num_bytes == 10 * BYTES


def test_cached_blocks_are_not_transferred() -> None:
    """The second request shares three blocks of twelve tokens with the first."""
    world = World([arrival("a", 40, 3), arrival("b", 40, 3, at_s=50.0)], bytes_per_s=1e9)
    run = world.serve()
    assert world.link.num_bytes == (10 + 7) * BYTES
    assert run.by_id["b"].num_cached_tokens == 12, "the prefill replica hits them as well"
    assert run.num_output == 6


def test_transfers_on_the_link_are_serial() -> None:
    names = ["a", "b", "c"]
    world = World([arrival(name, 20, 2) for name in names], bytes_per_s=100.0)
    run = world.serve()
    ends = sorted(run.by_id[name].finished_s for name in names)
    assert world.link.num_bytes == (5 + 2 + 2) * BYTES
    assert ends[-1] >= 1.0 + 9.0 and ends[0] < ends[-1]


def test_missing_blocks_are_recomputed() -> None:
    """A removed block in the middle makes the blocks from there on a miss."""
    world = World([arrival("a", 40, 3)], bytes_per_s=1e9)
    offer = world.offered.offer

    def offer_less(prompt: list[int]) -> None:
        offer(prompt)
        digests: list[bytes] = []
        extend_digests(digests, root_digest(b""), np.asarray(prompt, np.int32), BLOCK, 10)
        world.link.submit([Remove(0, 99, ((0, digests[6]),))])

    world.offered.offer = offer_less  # type: ignore[method-assign]
    run = world.serve()
    assert run.by_id["a"].num_output == 3 and not run.by_id["a"].error
    assert world.num_computed(1) == (40 - 6 * BLOCK) + 2


def test_answer_of_one_token_needs_no_decode_leg() -> None:
    world = World([arrival("a", 40, 1)], bytes_per_s=1e9)
    served = world.serve().by_id["a"]
    assert served.finished_s == served.first_token_s == 1.0 and world.num_computed(1) == 0
