"""The scheduler's orders to stores, and the results that it accepts: after a reset, after an error,
and when a request's id is used again."""

import numpy as np
import pytest

from quire.base.clock import FakeClock
from quire.base.kv_orders import Fetch, Fetched, Keep, LookedUp, LookUp, Order, Remove
from quire.base.messages import Abort, KeepCached, Request, ResetPrefixCache
from quire.base.plan import Plan
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import SchedulerConfig
from quire.base.settings.kv_transfer import COMPUTED, EVICTED, NOTHING, KVTransfer
from quire.base.step_outputs import SequenceUpdate
from quire.engine.attachments.stores import StoresAttachment
from quire.engine.client.output import StepReader
from quire.engine.loop.core import EngineCore
from quire.kv.digest import extend_digests
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import Memory
from quire.scheduler.reuse.stores import OLD_RATE_WEIGHT, Stores
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from tests.scheduler.test_scheduler_machine import FULL, MAX_LEN
from tests.support.engine.updates import error_of, read
from tests.support.scheduler.fake_device import (
    GARBAGE,
    CursedStep,
    FakeDevice,
    FakeExecutor,
    expected_tokens,
    make_request,
)
from tests.support.scheduler.fake_stores import BLOCK, FakeStores

PROMPT = list(range(1, 21))  # five blocks
OTHER = list(range(21, 41))


class Lab:
    """A core with a device of 12 blocks, one row, and stores that answer on `answer`.
    kept: the stores of an earlier engine; gives: which blocks this engine's stores get."""

    def __init__(
        self,
        num_stores: int = 1,
        budget: int = 8,
        kept: FakeStores | None = None,
        gives: str = EVICTED,
        reuses_partial: bool = False,
        groups: tuple[CacheGroup, ...] = (FULL,),
        num_blocks: int = 12,
    ) -> None:
        sizes = (num_blocks,) * len(groups)
        self.kv = KVManager(groups, sizes, BLOCK, host_limits=sizes)
        config = SchedulerConfig(
            max_num_seqs=1, max_num_batched_tokens=budget, reuse_partial_blocks=reuses_partial
        )
        self.scheduler = Scheduler(
            Memory(self.kv, budget), config, MAX_LEN, num_stores=num_stores, kept=gives
        )
        self.stores = FakeStores(num_stores, self.scheduler)
        self.stores.kept = self.stores.kept if kept is None else kept.kept
        self.device = FakeDevice(groups, sizes, BLOCK, sizes)
        self.stores.host = [slots.reshape(-1, BLOCK) for slots in self.device.host_slots]
        executor = FakeExecutor(self.device, is_lazy=False)
        limits, clock = RequestLimits(50, MAX_LEN, 0, 1 << 20), FakeClock()
        self.core = EngineCore(self.scheduler, executor, clock, limits)  # type: ignore[arg-type]
        self.core.attach(StoresAttachment(self.stores, clock))  # type: ignore[arg-type]
        self.reader = StepReader()
        self.num_requests = 0

    def orders(self) -> list[Order]:
        """Take the pending orders away from the stores."""
        assert self.scheduler.stores is not None
        orders = self.scheduler.orders
        self.stores.submit(orders.copy())
        orders.clear()
        found, self.stores.pending = self.stores.pending, []
        return found

    def add(
        self,
        prompt: list[int],
        name: str = "",
        num: int = 2,
        transfer: KVTransfer | None = None,
    ) -> Request:
        self.num_requests += 1
        name, seed = name or f"r{self.num_requests}", self.num_requests
        request = make_request(name, prompt, max_tokens=num, seed=seed, transfer=transfer)
        self.core.add(request)
        return request

    def answer(self) -> None:
        """Let the stores carry out all pending orders."""
        while (answer := self.stores.answer(0, fails=False)) is not None:
            self.core.control(answer)

    def step(self) -> list[SequenceUpdate]:
        planned = self.core.plan() is not None
        found = read(self.reader, self.core.take()) if planned else []
        self.scheduler.check_invariants()
        return found

    def finish(self, request: Request) -> list[int] | str:
        """Run a request to its end. Return its tokens, or its error."""
        tokens: list[int] = []
        for _ in range(30):
            self.answer()
            for update in self.step():
                tokens += update.token_ids
                if update.finish is not None:
                    return error_of(update) or tokens
        raise AssertionError(f"{request.request_id} starves")

    def generate(self, prompt: list[int], num: int = 2) -> list[int] | str:
        return self.finish(self.add(prompt, num=num))

    def evict(self) -> None:
        """Fill the device's memory with other prompts. The stores keep the evicted blocks."""
        for i in range(3):
            self.generate([30 + i, *OTHER])
        self.answer()


def expected(prompt: list[int], num: int = 2) -> list[int]:
    return expected_tokens(make_request("", prompt, max_tokens=num), MAX_LEN)


def all_names(orders: list[Order]) -> set[bytes]:
    return {
        name[1]
        for order in orders
        for name in (order.names if isinstance(order, LookUp | Remove) else order.items)
    }


# ---- answers -----------------------------------------------------------------------------------


def test_an_answer_for_an_ended_request_does_not_reach_a_new_one_with_its_id() -> None:
    lab = Lab()
    lab.add(PROMPT, "again")
    [first] = lab.orders()
    lab.core.control(Abort("again"))
    lab.add([*OTHER, 1, 2, 3, 4, 5], "again")
    [second] = lab.orders()
    assert isinstance(first, LookUp) and isinstance(second, LookUp)
    assert len(first.names) < len(second.names)
    lab.core.control(LookedUp(0, "again", [True] * len(first.names), first.ticket))
    assert lab.scheduler.num_waiting == 0 and not lab.orders()  # it waits for its own answer
    lab.core.control(LookedUp(0, "again", [False] * len(second.names), second.ticket))
    assert lab.scheduler.num_waiting == 1


# ---- a reset -----------------------------------------------------------------------------------


def test_a_reset_resumes_requests_that_wait_for_stores() -> None:
    lab = Lab(num_stores=2)
    looked_up, fetched = lab.add(PROMPT), lab.add([*PROMPT[:8], 40, 41, 42])
    first, second, *others = lab.orders()
    assert isinstance(first, LookUp) and len(others) == 2
    for order in others:
        assert isinstance(order, LookUp)
        lab.core.control(LookedUp(order.store, order.request_id, [True] * 2, order.ticket))
    [fetch] = lab.orders()
    assert isinstance(fetch, Fetch)
    lab.core.control(ResetPrefixCache("new"))
    assert lab.scheduler.num_waiting == 2 and not lab.orders()
    # Answers that arrive now are ignored.
    lab.core.control(LookedUp(0, looked_up.request_id, [True] * len(first.names), first.ticket))
    lab.core.control(Fetched(fetch.store, fetch.ticket, [True] * len(fetch.items), 10, 0.1))
    assert not lab.orders()
    assert lab.kv.host_pools[0].num_indexed == lab.kv.host_pools[0].num_used == 0
    assert lab.finish(looked_up) == expected(PROMPT)
    assert lab.finish(fetched) == expected(fetched.prompt_token_ids)


@pytest.mark.parametrize("epochs", [["a"], ["a", "b"]])
def test_no_block_from_before_a_reset_is_found_and_stores_stay_in_use(epochs: list[str]) -> None:
    lab = Lab()
    assert lab.generate(PROMPT) == expected(PROMPT)
    lab.evict()
    old = set(lab.stores.kept[0])
    assert len(old) >= 5
    for epoch in epochs:
        lab.core.control(ResetPrefixCache(epoch))
        request = lab.add(PROMPT)
        [order] = lab.orders()
        lab.stores.submit([order])
        assert isinstance(order, LookUp) and old.isdisjoint(order.names)
        lab.finish(request)
        assert not lab.scheduler.stores.num_fetched  # type: ignore[union-attr]
        lab.evict()
        old |= set(lab.stores.kept[0])
    # Within the epoch, memory and stores are used as before.
    lab.kv.reset_prefix_cache()
    assert lab.generate(PROMPT) == expected(PROMPT)
    assert lab.scheduler.stores.num_fetched >= 4  # type: ignore[union-attr]
    # Other engines still find the old epoch's blocks.
    other = Lab(kept=lab.stores)
    assert other.generate(PROMPT) == expected(PROMPT)
    assert other.scheduler.stores.num_fetched >= 4  # type: ignore[union-attr]


def test_blocks_computed_after_a_reset_from_older_blocks_get_unique_names() -> None:
    """They depend on blocks of the old epoch. With other weights, they would be valid in neither
    epoch."""
    lab = Lab(budget=40)
    running = lab.add(PROMPT, num=14)
    lab.answer()
    lab.step()
    old_root = lab.scheduler.lifecycle.sequences[running.request_id].root
    lab.core.control(ResetPrefixCache("new"))
    assert lab.finish(running) == expected(PROMPT, 14)[1:]
    during = {lab.kv.pools[0].digest_of(b) for b in range(12)} - {None}
    assert len(during) == 3
    tokens = [*PROMPT, *expected(PROMPT, 14)]
    lab.add([*tokens, 1], "the same")
    new_root = lab.scheduler.lifecycle.sequences["the same"].root
    for root in (old_root, new_root):
        digests: list[bytes] = []
        extend_digests(digests, root, np.array(tokens, np.int32), BLOCK, len(tokens) // BLOCK)
        assert during.isdisjoint(digests)
        if root == old_root:
            old = set(digests)
    lab.core.control(Abort("the same"))
    lab.evict()
    kept = {name for _, name in lab.stores.kept[0]}
    assert during & kept and kept.isdisjoint(old)


def test_keep_cached_copies_blocks_only_if_the_cache_was_not_reset() -> None:
    for is_reset in (False, True):
        lab = Lab()
        if is_reset:
            lab.core.control(ResetPrefixCache("new"))
        lab.generate(PROMPT)
        lab.core.control(KeepCached())
        assert (lab.scheduler.schedule(0.0).plan is None) == is_reset


# ---- errors ------------------------------------------------------------------------------------


def poisoned(lab: Lab) -> None:
    """Put garbage into a block of PROMPT. No step notices it, since no token is sampled from it."""
    request = lab.add(PROMPT)
    lab.answer()
    lab.step()
    digests = lab.scheduler.lifecycle.sequences[request.request_id].digests
    block = lab.kv.pools[0].lookup(digests[1])
    assert block is not None
    lab.device.slots[0].reshape(-1, BLOCK)[block] = GARBAGE
    lab.core.control(Abort(request.request_id))


def has_garbage(stores: FakeStores) -> bool:
    return any((block == GARBAGE).any() for kept in stores.kept for block in kept.values())


def test_blocks_that_a_failed_request_may_have_used_are_removed_from_stores() -> None:
    lab = Lab(num_stores=2)
    poisoned(lab)
    lab.evict()
    assert has_garbage(lab.stores)
    assert lab.generate(PROMPT) == "garbage"
    lab.answer()
    assert not has_garbage(lab.stores)
    assert lab.generate(PROMPT) == expected(PROMPT)
    for _ in range(2):  # after a restart, from the remaining blocks and then from newer ones
        other = Lab(num_stores=2, kept=lab.stores)
        assert other.generate(PROMPT) == expected(PROMPT)
        lab.evict()


def test_blocks_in_transfer_when_a_request_fails_are_not_cached() -> None:
    """This holds for blocks on their way to a store, and for those fetched for another request."""
    lab = Lab()
    poisoned(lab)
    failing = lab.add(PROMPT)  # it begins with the garbage in the device's memory
    lab.answer()
    waiting = lab.add([*PROMPT, 45, 46])
    for order in lab.orders():
        assert isinstance(order, LookUp)
        lab.core.control(LookedUp(0, order.request_id, [True] * len(order.names), order.ticket))
    [fetch] = lab.orders()
    assert isinstance(fetch, Fetch)
    updates = [update for _ in range(4) for update in lab.step()]
    assert any("garbage" in error_of(update) for update in updates)
    failed = [order for order in lab.orders() if isinstance(order, Remove)]
    assert len(failed) == 1 and len(failed[0].names) == 5
    lab.core.control(Fetched(0, fetch.ticket, [True] * len(fetch.items), 1, 0.1))
    names = {name for _, name in failed[0].names}
    for _, digest, _ in fetch.items:
        assert (lab.kv.host_pools[0].lookup(digest) is not None) == (digest not in names)
    assert failing.request_id not in lab.scheduler.lifecycle.sequences
    assert lab.finish(waiting) == expected(waiting.prompt_token_ids)


class EarlyCurse(FakeDevice):
    """Raises before it has carried out anything of a plan."""

    def run(self, plan: Plan, masks=None):  # type: ignore[no-untyped-def]
        seeds = {**self.seeds, **{start.row: start.seed for start in plan.started}}
        if any(seeds[row] in self.curses for row in plan.rows.tolist()):
            raise CursedStep("at once")
        return super().run(plan, masks)


def test_swap_outs_of_a_step_that_failed_as_a_whole_are_not_used() -> None:
    """Blocks that its plan was to copy are no hits in host memory, and no store keeps them."""
    lab = Lab(budget=40)
    lab.device.__class__ = EarlyCurse
    lab.generate(PROMPT)
    lab.generate(OTHER)
    lab.orders()
    lab.device.curses[3] = None  # type: ignore[assignment]
    assert "at once" in lab.generate([9, 9, *PROMPT, 7, 7, 7, 7, 7, 7, 7])
    assert not any(isinstance(order, Keep) for order in lab.orders())
    for prompt in (PROMPT, OTHER):
        assert lab.generate(prompt) == expected(prompt)
    assert np.isin(-1, lab.device.host_slots[0]), "nothing was written there"


def stores_of(lab: Lab) -> Stores:
    assert lab.scheduler.stores is not None
    return lab.scheduler.stores


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(16, 3), (17, 4), (20, 4)])
def test_all_blocks_but_the_one_of_the_last_token_are_looked_up(
    num_tokens: int, num_blocks: int
) -> None:
    lab = Lab()
    lab.add(PROMPT[:num_tokens])
    [order] = lab.orders()
    assert isinstance(order, LookUp) and len(order.names) == num_blocks


def test_a_look_up_without_hits_checks_only_the_first_missing_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab()
    lab.generate(PROMPT)
    lab.add([*PROMPT, *range(22, 30)])
    [order] = lab.orders()
    assert isinstance(order, LookUp)
    looked_at: list[bytes] = []
    is_cached = lab.kv.is_cached
    monkeypatch.setattr(
        lab.kv, "is_cached", lambda g, name: looked_at.append(name) or is_cached(g, name)
    )
    found = [False] * len(order.names)
    lab.core.control(LookedUp(0, order.request_id, found, order.ticket))
    assert len(set(looked_at)) == 1  # the first missing block


def test_cached_blocks_are_not_looked_up_in_stores() -> None:
    lab = Lab()
    lab.generate(PROMPT)
    lab.answer()
    lab.orders()
    lab.add(PROMPT)
    assert not lab.orders() and not stores_of(lab).waiting
    lab.add([*PROMPT, *range(22, 30)], name="longer")
    [order] = lab.orders()
    assert len(all_names([order])) == 1


@pytest.mark.parametrize("is_stored", [True, False])
def test_blocks_lost_while_a_request_waits_are_fetched_when_its_turn_comes(is_stored: bool) -> None:
    """On arrival all blocks were cached, so there was no look-up. Other requests run meanwhile."""
    lab = Lab(gives=COMPUTED if is_stored else NOTHING)
    lab.generate(PROMPT)
    lab.generate([49])  # so that a plan copies what the first request computed
    lab.answer()
    first = lab.add(OTHER, num=4)
    for _ in range(3):
        lab.answer()
        lab.step()
    second, third = lab.add(PROMPT), lab.add([48])
    assert not stores_of(lab).waiting and lab.scheduler.num_running == 1
    waiting = lab.scheduler.lifecycle.sequences
    sequence = waiting[second.request_id]
    lab.kv.forget(sequence.digests)
    while first.request_id in waiting:
        lab.step()
    while third.request_id in waiting:
        lab.step()  # without answers of stores
    assert sequence.row < 0, "the look-up comes first"
    assert lab.finish(second) == expected(PROMPT)
    assert sequence.num_cached_tokens == (4 * BLOCK if is_stored else 0)
    assert not stores_of(lab).waiting


def test_a_waiting_request_is_not_looked_up_again_after_a_reset() -> None:
    """All names are new, so no store has its blocks."""
    lab = Lab(gives=COMPUTED)
    lab.generate(PROMPT)
    lab.generate([49])  # so that a plan copies what the first request computed
    lab.answer()
    first = lab.add(OTHER, num=4)
    for _ in range(3):
        lab.answer()
        lab.step()
    second = lab.add(PROMPT)
    lab.core.control(ResetPrefixCache())
    sequences = lab.scheduler.lifecycle.sequences
    while first.request_id in sequences:
        lab.step()
    assert not stores_of(lab).waiting
    assert lab.finish(second) == expected(PROMPT)
    assert not [order for order in lab.stores.pending if isinstance(order, LookUp)]


def stored_prompt(lab: Lab, prompt: list[int] = PROMPT) -> list[bytes]:
    """Compute a prompt, so that the store and memory have its blocks. Return their names."""
    lab.generate(prompt)
    lab.generate([49])  # so that a plan copies what the first request computed
    lab.answer()
    digests: list[bytes] = []
    root = lab.scheduler.memory.names.root(make_request("", prompt), 1, 0)
    extend_digests(digests, root, np.array(prompt, np.int32), BLOCK, len(prompt) // BLOCK)
    return digests


def look_up(lab: Lab, request: Request) -> list[bytes]:
    """Answer the one look-up of a request. Return its names."""
    [order] = lab.orders()
    assert isinstance(order, LookUp)
    found = [name in lab.stores.kept[0] for name in order.names]
    lab.core.control(LookedUp(0, request.request_id, found, order.ticket))
    return [digest for _, digest in order.names]


@pytest.mark.parametrize("is_stored", [True, False])
def test_blocks_lost_during_a_look_up_are_looked_up_once(is_stored: bool) -> None:
    lab = Lab(gives=COMPUTED)
    digests = stored_prompt(lab)
    lab.kv.forget(digests[3:])
    request = lab.add(PROMPT)
    sequence = lab.scheduler.lifecycle.sequences[request.request_id]
    lab.kv.forget(digests[1:])
    if not is_stored:
        lab.stores.kept[0].pop((0, digests[2]))
    assert look_up(lab, request) == digests[3:4]
    assert len(stores_of(lab).held_blocks(0)) == 1, "the block that is left"
    assert look_up(lab, request) == digests[1:3]
    [fetch] = lab.orders()
    fetched = digests[1:4] if is_stored else digests[1:2]
    assert isinstance(fetch, Fetch) and [digest for _, digest, _ in fetch.items] == fetched
    lab.stores.submit([fetch])
    assert lab.finish(request) == expected(PROMPT)
    assert sequence.num_cached_tokens == BLOCK * (1 + len(fetched))


def test_blocks_lost_during_a_fetch_are_looked_up() -> None:
    """The request holds its remaining blocks, so the second fetch does not evict them."""
    lab = Lab(gives=COMPUTED)
    digests = stored_prompt(lab)
    lab.kv.forget(digests[2:])
    request = lab.add(PROMPT)
    sequence = lab.scheduler.lifecycle.sequences[request.request_id]
    assert look_up(lab, request) == digests[2:4]
    [fetch] = lab.orders()
    lab.kv.forget(digests[:1])
    lab.stores.submit([fetch])
    answer = lab.stores.answer(0, fails=False)
    assert answer is not None
    lab.core.control(answer)
    assert look_up(lab, request) == digests[:1]
    assert stores_of(lab).held_blocks(0), "the cached blocks are held"
    assert lab.finish(request) == expected(PROMPT)
    assert sequence.num_cached_tokens == 4 * BLOCK


def test_fetched_blocks_do_not_evict_the_blocks_before_them() -> None:
    """Host memory is full, and the beginning of the prompt is least recently used."""
    lab = Lab(gives=COMPUTED)
    digests = stored_prompt(lab)
    lab.kv.forget(digests[2:])
    for first, num in ((30, 21), (31, 21), (32, 21)):
        if lab.kv.host_pools[0].num_indexed < 12:
            lab.generate([first, *OTHER][:num])
            lab.generate([49])
            lab.answer()
    host = lab.kv.host_pools[0]
    for digest in digests:
        lab.kv.pools[0].forget(digest)
    assert host.num_indexed == 12 and [host.lookup(d) is not None for d in digests[:3]] == [
        True, True, False,
    ]  # fmt: skip
    request = lab.add(PROMPT)
    sequence = lab.scheduler.lifecycle.sequences[request.request_id]
    assert lab.finish(request) == expected(PROMPT)
    assert sequence.num_cached_tokens == 4 * BLOCK


def test_a_store_s_speed_is_an_exponential_moving_average() -> None:
    stores = stores_of(Lab())
    stores._measure(0, 100.0)
    assert stores._bytes_per_s[0] == pytest.approx(100.0)
    stores._measure(0, 200.0)
    assert stores._bytes_per_s[0] == pytest.approx(
        OLD_RATE_WEIGHT * 100 + (1 - OLD_RATE_WEIGHT) * 200
    )
    for _ in range(100):
        stores._measure(0, 200.0)
    assert stores._bytes_per_s[0] == pytest.approx(200.0, rel=1e-3)
