"""Eviction policies: each against a plain model of a pool's cached blocks, and its use case."""

from collections import OrderedDict
from random import Random
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.kv.manager import KVBlocks, KVManager
from quire.kv.pool import BlockPool
from quire.scheduler.policy import lfu, policies
from quire.scheduler.policy.lfu import Lfu
from quire.scheduler.policy.policies import EVICTION_POLICIES, make_eviction
from tests.kv.test_manager import FULL
from tests.support.calls import Calls, counted_calls

NUM_BLOCKS = 12


class PlainModel:
    """The cached blocks that no table holds, each with its rank, in no order. The next one to
    be evicted has the lowest rank, and among equal ranks the earliest release."""

    def __init__(self, counts_hits: bool) -> None:
        self.ranks: dict[int, tuple[int, int]] = {}
        self._counts_hits, self._age, self._num = counts_hits, 0, 0

    def add(self, block_id: int, num_hits: int) -> None:
        self._num += 1
        self.ranks[block_id] = (self._age + num_hits if self._counts_hits else 0, self._num)

    def remove(self, block_id: int) -> None:
        lowest = min(rank for rank, _ in self.ranks.values())
        rank, _ = self.ranks.pop(block_id)
        if rank == lowest:
            self._age = max(self._age, rank)

    def put_first(self, block_id: int) -> None:
        self.remove(block_id)
        self._num += 1
        self.ranks[block_id] = (-1, -self._num)

    def order(self) -> list[int]:
        return sorted(self.ranks, key=lambda block_id: self.ranks[block_id])


class Machine:
    """Applies the same operations to a pool and to the model."""

    def __init__(self, policy: str, seed: int) -> None:
        self.random = Random(seed)
        self.pool = BlockPool(NUM_BLOCKS, make_eviction=make_eviction(policy))
        self.pool.evicted = []
        self.model = PlainModel(policy == "lfu")
        self.held: list[int] = []  # with repetition
        self.num_hits = [0] * NUM_BLOCKS
        self.num_named = 0

    def allocate(self) -> None:
        if not self.pool.num_free:
            return
        evicted = self.model.order()[:1] if self.pool.num_free == len(self.model.ranks) else []
        block_id = self.pool.allocate()
        for each in evicted:
            self.model.remove(each)
            self.num_hits[each] = 0
            assert each == block_id
        assert self.pool.evicted is not None
        assert [each for each, _ in self.pool.evicted] == evicted
        self.pool.evicted = []
        self.held.append(block_id)

    def name(self) -> None:
        if self.held:
            self.num_named += 1
            self.pool.index(self.random.choice(self.held), b"%d" % self.num_named)

    def hit(self) -> None:
        """A sequence begins with a cached block, whether another one holds it or not."""
        blocks = self.pool.indexed_blocks()
        if not blocks:
            return
        block_id = self.random.choice(blocks)
        if block_id in self.model.ranks:
            self.model.remove(block_id)
        self.pool.acquire(block_id)
        self.pool.note_hits([-1, block_id])
        self.num_hits[block_id] += 1
        self.held.append(block_id)

    def release(self) -> None:
        if not self.held:
            return
        block_id = self.held.pop(self.random.randrange(len(self.held)))
        self.pool.release(block_id)
        if block_id not in self.held and self.pool.is_indexed(block_id):
            self.model.add(block_id, self.num_hits[block_id])

    def unname(self) -> None:
        block_id = self.random.randrange(NUM_BLOCKS)
        self.pool.unindex(block_id)
        self.num_hits[block_id] = 0
        if block_id in self.model.ranks:
            self.model.remove(block_id)

    def evict_soon(self) -> None:
        block_id = self.random.randrange(NUM_BLOCKS)
        digest = self.pool.digest_of(block_id)
        self.pool.evict_soon(digest or b"nobody's")
        if block_id in self.model.ranks:
            self.model.put_first(block_id)

    def run(self, num: int) -> None:
        rules = [self.allocate, self.name, self.hit, self.release, self.unname, self.evict_soon]
        weights = [30, 20, 25, 40, 2, 4]
        for rule in self.random.choices(rules, weights, k=num):
            rule()
            assert list(self.pool._unused) == self.model.order(), rule.__name__
            assert self.pool.num_cached == len(self.model.ranks)
        self.pool.check_invariants(self.held)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_policy_evicts_in_the_order_of_its_plain_model(policy: str, seed: int) -> None:
    machine = Machine(policy, seed)
    machine.run(1500)
    assert len(machine.pool.lost) > 20, "too little was evicted"


def serve(kv: KVManager, names: list[bytes]) -> int:
    """Serve a prompt whose blocks have these names. Return the number of blocks hit."""
    sequence, num_tokens = kv.new_sequence(), len(names) * kv.block_size + 1
    hit = kv.get_computed_blocks(names, num_tokens)
    assert kv.allocate_slots(sequence, num_tokens - hit.num_tokens, hit) is not None
    kv.index_blocks(sequence, names, len(names))
    kv.free(sequence)
    return hit.num_tokens // kv.block_size


@pytest.mark.parametrize(("policy", "num_hit"), [("lru", 0), ("lfu", 4)])
def test_prompts_used_once_evict_popular_ones_unless_the_policy_is_lfu(
    policy: str, num_hit: int
) -> None:
    kv = KVManager((FULL,), (10,), 4, make_eviction=make_eviction(policy))
    popular = [b"popular %d" % i for i in range(4)]
    for _ in range(3):
        serve(kv, popular)
    for i in range(5):
        assert serve(kv, [b"once %d, %d" % (i, j) for j in range(4)]) == 0
    assert serve(kv, popular) == num_hit


def test_lfu_evicts_blocks_that_are_no_longer_popular() -> None:
    kv = KVManager((FULL,), (6,), 4, make_eviction=Lfu)
    for _ in range(5):
        serve(kv, [b"popular"])
    for i in range(40):
        for _ in range(2):
            serve(kv, [b"%d" % i])
    assert serve(kv, [b"popular"]) == 0


def test_lfu_evicts_leaves_before_roots() -> None:
    kv = KVManager((FULL,), (8,), 4, make_eviction=Lfu)
    chain = [b"%d" % i for i in range(5)]
    for num in (5, 3, 2):
        serve(kv, chain[:num])
    order = list(kv.pools[0]._unused)
    assert [kv.pools[0].digest_of(block_id) for block_id in order] == chain[::-1]


def test_a_hit_in_host_memory_counts_for_its_host_block() -> None:
    kv = KVManager((FULL,), (2,), 4, host_limits=[4], make_eviction=Lfu)
    for name in (b"a", b"b", b"a"):
        hit = serve(kv, [name])
        assert kv.tier is not None
        kv.tier.take_evicted()
        kv.tier.end_plan(0)
        kv.tier.settle(0)
        kv.take_loads()
    assert hit == 1, "loaded from host memory"
    assert list(kv.host_pools[0]._unused)[-1] == kv.host_pools[0].lookup(b"a")


def calls_of(policy: str, num_blocks: int) -> Calls:
    """Count the Python calls, by file and function, while sequences grow in a pool that is full of
    cached blocks, and end."""
    kv = KVManager((FULL,), (num_blocks,), 1, make_eviction=make_eviction(policy))
    for first in (0, num_blocks - 1):
        serve(kv, [b"%d, %d" % (first, i) for i in range(num_blocks - 1)])
    sequence = kv.new_sequence()
    with counted_calls() as found:
        kv.allocate_slots(sequence, num_blocks - 1, KVBlocks(0, ([],)))
        kv.free(sequence)
    return found


def test_the_default_policy_makes_no_python_call_per_block() -> None:
    default, other = calls_of("lru", 65), calls_of("lfu", 65)
    assert lfu.__file__ in {path for path, _ in other}
    per_block = {name: num for (_, name), num in default.items() if num > 60}
    assert per_block == {"release": 64}, "blocks are evicted and allocated in one call"


class Backwards(OrderedDict[int, int]):
    """Evicts the most recently used block first, and does not know what goes first."""

    def __iter__(self) -> Any:
        return reversed(self)


def test_a_plug_in_policy_is_checked_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "load_plugin", lambda *_: Backwards)
    with pytest.raises(ConfigError, match=r"'back' does not work as a dict.* got \[\[\], \[5, 8\]"):
        make_eviction("back")
    monkeypatch.setattr(policies, "load_plugin", lambda *_: lambda: 5)
    with pytest.raises(ConfigError, match="'back' cannot be created: TypeError"):
        make_eviction("back")
