"""Which orders stores get and what their answers change, tested only through the scheduler's doors.

Covers `scheduler/reuse/stores.py`.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from quire.base.events import PrefixFound
from quire.base.kv_orders import Fetch, Fetched, Keep, Kept, LookedUp, LookUp, Order, Remove
from quire.base.messages import MeasuredRates
from quire.base.plan import MoveKind, Plan, StepResult
from quire.base.prefix import PrefixReport
from quire.base.settings.config import SchedulerConfig
from quire.base.settings.kv_transfer import COMPUTED, EVICTED, NOTHING, HandedOver, KVTransfer
from quire.base.step_outputs import SequenceUpdate
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import PROMPT_TAIL, Memory
from quire.scheduler.reuse import keeping
from quire.scheduler.reuse import stores as stores_file
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.views import StoresView
from quire.spec.cache_group import CacheGroup
from tests.support.scheduler.fake_device import make_request

FULL = CacheGroup("full", (0,), 1, 8)
WINDOW = CacheGroup("window", (1,), 1, 8, window=6)
STATES = CacheGroup("state", (2,), state_size=8)
SIZE = 4
PROMPT = list(range(1, 22))  # five full blocks and a token
BLOCK_BYTES = 100
KEEPS, WAITS = KVTransfer(keeps=True), KVTransfer(waits=True)


class Doors:
    """A scheduler with stores; the test answers the orders and the plans. gives: which blocks the
    stores get."""

    def __init__(
        self,
        groups: Sequence[CacheGroup] = (FULL,),
        num_stores: int = 1,
        size: int = SIZE,
        gives: str = EVICTED,
        num_host_blocks: int = 12,
        depth: int = 1,
    ) -> None:
        num = len(groups)
        self.kv = KVManager(
            groups,
            (24,) * num,
            size,
            block_bytes=(BLOCK_BYTES,) * num,
            host_limits=(num_host_blocks,) * num,
        )
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, pipeline_depth=depth)
        self.scheduler = Scheduler(
            Memory(self.kv, 64), config, 64, num_stores=num_stores, kept=gives
        )
        self.plans: list[Plan] = []  # in flight

    def add(
        self, name: str, prompt: list[int], transfer: KVTransfer | None = None, num: int = 1
    ) -> list[Order]:
        request = make_request(name, prompt, max_tokens=num, transfer=transfer)
        decisions = self.scheduler.add(request, 0.0)
        assert decisions.refusal is None
        return decisions.orders

    def answer(self, order: Order, found: bool | list[bool]) -> list[Order]:
        """Answer a look-up. Return the orders that follow."""
        assert isinstance(order, LookUp)
        there = [found] * len(order.names) if isinstance(found, bool) else found
        answer = LookedUp(order.store, order.request_id, there, order.ticket)
        return self.scheduler.control(answer, 0.0).orders

    def fetched(
        self, order: Order, num_bytes: int = 0, duration_s: float = 0.0, ok: bool = True
    ) -> list[Order]:
        """Answer a fetch. Return the orders that follow."""
        assert isinstance(order, Fetch)
        there = [ok] * len(order.items)
        answer = Fetched(order.store, order.ticket, there, num_bytes, duration_s)
        orders = self.scheduler.control(answer, 0.0).orders
        self.scheduler.check_invariants()
        return orders

    def kept(self, order: Order) -> list[Order]:
        """Answer that a store has kept all blocks. Return the orders that follow."""
        assert isinstance(order, Keep)
        num = len(order.items)
        answer = Kept(order.store, order.ticket, [True] * num, num * BLOCK_BYTES, 0.1)
        return self.scheduler.control(answer, 0.0).orders

    def plan(self) -> int | None:
        """Make a plan. Return its number of blocks copied to host memory; None without a plan."""
        plan = self.scheduler.schedule(0.0).plan
        if plan is None:
            return None
        self.plans.append(plan)
        return sum(len(move.source) for move in plan.moves if move.kind is MoveKind.SWAP_OUT)

    def take(self) -> list[Order]:
        """Take the result of the oldest plan. Return the orders that follow."""
        plan = self.plans.pop(0)
        num = len(plan.sample_rows)
        result = StepResult(plan.step_id, np.full((num, 1), 7, np.int32), np.ones(num, np.int32))
        orders = self.scheduler.update(result, 0.0).orders
        self.scheduler.check_invariants()
        return orders

    def step(self, error: str = "") -> tuple[list[PrefixReport], list[SequenceUpdate], list[Order]]:
        """Run a step, whose rows fail if there is an error."""
        decisions = self.scheduler.schedule(0.0)
        plan = decisions.plan
        assert plan is not None
        reports = [each.report for each in decisions.events if isinstance(each, PrefixFound)]
        num = len(plan.sample_rows)
        errors = dict.fromkeys(plan.rows.tolist(), error) if error else {}
        tokens = np.full((num, 1), 7, np.int32)
        result = StepResult(plan.step_id, tokens, np.ones(num, np.int32), row_errors=errors)
        decisions = self.scheduler.update(result, 0.0)
        self.scheduler.check_invariants()
        return reports, decisions.outputs.details, decisions.orders

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting


# ---- look-ups and fetches ----------------------------------------------------------------------


def test_full_groups_are_looked_up_before_window_groups() -> None:
    doors = Doors((WINDOW, FULL))
    [look_up] = doors.add("r", PROMPT)
    assert isinstance(look_up, LookUp)
    assert [g for g, _ in look_up.names] == [1] * 5 + [0] * 5


@pytest.mark.parametrize(
    ("transfer", "stores"),
    [
        (KVTransfer(waits=True, stores=(1,)), [1]),
        (KVTransfer(waits=True), [0, 1, 2]),
        (KVTransfer(keeps=True, stores=(1,)), [0, 1, 2]),
        (None, [0, 1, 2]),
    ],
)
def test_a_handed_over_prompt_is_looked_up_only_in_the_stores_it_names(
    transfer: KVTransfer | None, stores: list[int]
) -> None:
    doors = Doors(num_stores=3)
    assert [order.store for order in doors.add("r", PROMPT, transfer)] == stores


def test_a_window_group_fetches_only_the_blocks_that_the_next_token_sees() -> None:
    doors = Doors((FULL, WINDOW))
    [look_up] = doors.add("r", PROMPT)
    [fetch] = doors.answer(look_up, True)
    assert isinstance(look_up, LookUp) and isinstance(fetch, Fetch)
    digests = [digest for g, digest in look_up.names if g == 0]
    assert len(look_up.names) == 2 * len(digests) == 10
    fetched = [{d for g, d, _ in fetch.items if g == group} for group in range(2)]
    # The last five tokens before the one at 20: those from 15 on.
    assert fetched == [set(digests), set(digests[3:])]


@pytest.mark.parametrize(("num_blocks", "is_waited_for"), [(5, True), (4, True), (6, False)])
def test_a_look_up_waits_for_handed_over_blocks_only_of_its_own_prompt(
    num_blocks: int, is_waited_for: bool
) -> None:
    doors = Doors()
    [look_up] = doors.add("asks", PROMPT)
    assert isinstance(look_up, LookUp) and len(look_up.names) == 5
    digest = [*look_up.names, (0, bytes(32))][num_blocks - 1][1]
    transfer = KVTransfer(waits=True, num_blocks=num_blocks, digest=digest)
    [look_up] = doors.add("waits", PROMPT, transfer)
    assert isinstance(look_up, LookUp)
    assert look_up.wait_s == (stores_file.WAIT_S if is_waited_for else 0.0)


@pytest.mark.parametrize(
    ("num_tokens", "num_handed_over", "num_expected"), [(21, 3, 3), (20, 5, 4)]
)
def test_a_look_up_is_repeated_until_all_handed_over_blocks_are_found(
    num_tokens: int, num_handed_over: int, num_expected: int
) -> None:
    """The block of the last token is not looked up."""
    doors = Doors()
    [look_up] = doors.add("asks", PROMPT)
    assert isinstance(look_up, LookUp)
    digest = look_up.names[num_handed_over - 1][1]
    transfer = KVTransfer(waits=True, num_blocks=num_handed_over, digest=digest)
    [look_up] = doors.add("waits", PROMPT[:num_tokens], transfer)
    assert isinstance(look_up, LookUp)
    num_names = len(look_up.names)
    first = [i < num_expected - 1 for i in range(num_names)]
    fetch, look_up = doors.answer(look_up, first)
    assert isinstance(fetch, Fetch) and len(fetch.items) == num_expected - 1
    assert isinstance(look_up, LookUp) and len(look_up.names) == num_names - len(fetch.items)
    [last] = doors.answer(look_up, [i == 0 for i in range(len(look_up.names))])
    assert isinstance(last, Fetch) and len(last.items) == 1


@pytest.mark.parametrize("transfer", [None, WAITS])
def test_blocks_slower_to_fetch_than_to_compute_are_fetched_only_if_handed_over(
    transfer: KVTransfer | None,
) -> None:
    """Fetching a block takes as long as computing seven tokens. The look-up for 21 tokens pays off;
    fetching two blocks to save eight tokens does not."""
    doors = Doors()
    [look_up] = doors.add("r", PROMPT[:13])
    [fetch] = doors.answer(look_up, True)
    doors.fetched(fetch, 3 * BLOCK_BYTES, 3 / 7)
    doors.scheduler.control(MeasuredRates(prefill_tokens_per_s=49), 0.0)
    [look_up] = doors.add("longer", PROMPT, transfer)
    assert isinstance(look_up, LookUp) and len(look_up.names) == 2
    fetches = [order for order in doors.answer(look_up, True) if isinstance(order, Fetch)]
    assert len(fetches) == (transfer is not None)


def test_a_prompt_too_short_for_a_stored_state_is_not_looked_up() -> None:
    """Blocks have one token, so the longest prompt has one block to look up."""
    for num_tokens in (PROMPT_TAIL, PROMPT_TAIL + 1, PROMPT_TAIL + 2):
        doors = Doors((FULL, STATES), size=1)
        orders = doors.add("r", PROMPT[:num_tokens], WAITS)
        assert len(orders) == (num_tokens > PROMPT_TAIL + 1), num_tokens


# ---- reports -----------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)])
def test_a_report_distinguishes_hits_of_stores_from_hits_of_host_memory(
    groups: tuple[CacheGroup, ...],
) -> None:
    """For the second request, the fetched blocks are hits in host memory."""
    doors = Doors(groups)
    [look_up] = doors.add("first", PROMPT)
    [fetch] = doors.answer(look_up, True)
    assert doors.fetched(fetch) == [] and doors.num_waiting == 1
    [report], _, _ = doors.step()
    assert report == PrefixReport(store=20)
    for pool in doors.kv.pools:
        pool.reset_index()  # as if the device had evicted all blocks
    assert doors.add("second", PROMPT) == []
    [report], _, _ = doors.step()
    assert report == PrefixReport(host=20)


def test_a_failed_request_hands_over_no_blocks_to_another_engine() -> None:
    for error, is_handed_over in (("", True), ("garbage", False)):
        doors = Doors()
        [look_up] = doors.add("r", PROMPT, KEEPS)
        doors.answer(look_up, False)
        _, [update], _ = doors.step(error)
        assert update.finish is not None
        assert update.finish.reason == ("error" if error else "length")
        assert (update.handed_over is not None) == is_handed_over


def test_only_blocks_of_the_prompt_are_handed_over() -> None:
    doors = Doors()
    [look_up] = doors.add("r", PROMPT, KEEPS, num=12)
    doors.answer(look_up, False)
    updates = [update for _ in range(12) for update in doors.step()[1]]
    assert isinstance(look_up, LookUp)
    handed_over = [update.handed_over for update in updates if update.finish is not None]
    assert handed_over == [HandedOver(5, look_up.names[4][1])]


@pytest.mark.parametrize("groups", [(FULL,), (FULL, STATES)])
def test_the_view_counts_fetched_blocks_and_blocks_that_were_cached(
    groups: tuple[CacheGroup, ...],
) -> None:
    """The state group counts only the last block of a hit."""
    doors, num = Doors(groups), len(groups)
    stores = doors.scheduler.stores
    assert stores is not None and stores.view() == StoresView(0, 0, 0, 0, 0)
    [look_up] = doors.add("r", PROMPT[:13])
    [fetch] = doors.answer(look_up, True)
    doors.fetched(fetch, 3 * BLOCK_BYTES, 0.1)
    num_fetched = 3 if num == 1 else 4
    assert stores.view() == StoresView(num_fetched, 0, 3 * BLOCK_BYTES, 0, 0)
    [look_up] = doors.add("longer", PROMPT)
    assert isinstance(look_up, LookUp) and len(look_up.names) == 5 * num - num_fetched
    assert stores.view().num_here == num_fetched


# ---- blocks for stores -------------------------------------------------------------------------


@pytest.mark.parametrize("num_stores", [1, 2])
def test_blocks_wait_until_all_stores_have_copied_the_only_host_block(
    num_stores: int,
) -> None:
    doors = Doors(num_stores=num_stores, gives=COMPUTED, num_host_blocks=1)
    for look_up in doors.add("r", PROMPT):
        doors.answer(look_up, False)
    doors.step()
    for _ in range(5):
        assert doors.plan() == 1
        orders = doors.take()
        assert [order.store for order in orders] == list(range(num_stores))
        for order in orders:
            assert doors.plan() is None, "its host block is in use"
            doors.kept(order)
    assert doors.plan() is None and not doors.scheduler.has_work
    assert doors.scheduler.stores is not None
    view, num_kept = doors.scheduler.stores.view(), 5 * num_stores
    assert (view.num_kept, view.num_kept_bytes) == (num_kept, num_kept * BLOCK_BYTES)


def test_blocks_for_stores_are_dropped_without_host_memory() -> None:
    doors = Doors(gives=COMPUTED, num_host_blocks=0)
    for look_up in doors.add("r", PROMPT):
        doors.answer(look_up, False)
    doors.step()
    assert doors.scheduler.has_work
    assert doors.plan() is None and not doors.scheduler.has_work


@pytest.mark.parametrize(("max_bytes", "room"), [(250, 2), (99, 1), (1 << 20, 256)])
def test_the_byte_limit_of_copies_always_allows_one_block(
    monkeypatch: pytest.MonkeyPatch, max_bytes: int, room: int
) -> None:
    monkeypatch.setattr(keeping, "MAX_KEEP_BYTES", max_bytes)
    stores = Doors(gives=COMPUTED).scheduler.stores
    assert stores is not None and stores.room == room


def test_blocks_being_copied_or_stored_count_against_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At most two blocks are in flight, while the request runs. After the plan that copies them, no
    plan copies any until the store has kept them."""
    monkeypatch.setattr(keeping, "MAX_KEEP_BYTES", 2 * BLOCK_BYTES)
    doors = Doors(gives=COMPUTED, depth=2)
    [look_up] = doors.add("r", PROMPT, num=9)
    doors.answer(look_up, False)
    assert [doors.plan(), doors.plan()] == [0, 2]
    assert doors.take() == [] and doors.plan() == 0
    [keep] = doors.take()
    assert isinstance(keep, Keep) and len(keep.items) == 2
    assert doors.plan() == 0
    doors.take()
    doors.kept(keep)
    assert doors.plan() == 2


def test_a_single_waiting_block_counts_as_work() -> None:
    doors = Doors(gives=COMPUTED)
    doors.add("r", PROMPT[:4])
    doors.step()
    assert doors.scheduler.has_work and doors.plan() == 1
    [keep] = doors.take()
    doors.kept(keep)
    assert not doors.scheduler.has_work


# ---- speed of a store --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "duration_s", "ok"), [(0, 1.0, False), (0, 0.0, False), (500, 0.0, True)]
)
def test_a_fetch_without_bytes_or_time_does_not_change_a_store_s_speed(
    num_bytes: int, duration_s: float, ok: bool
) -> None:
    """Five blocks take 1/60 s to fetch, and 1/50 s to compute. At half that speed, no look-up would
    be made."""
    doors = Doors()
    doors.scheduler.control(MeasuredRates(prefill_tokens_per_s=21 * 50), 0.0)
    for i, measured in enumerate([(500, 1 / 60, True), (num_bytes, duration_s, ok)]):
        [look_up] = doors.add(f"r{i}", [i, *PROMPT[1:]])
        [fetch] = doors.answer(look_up, True)
        assert isinstance(fetch, Fetch) and len(fetch.items) == 5
        doors.fetched(fetch, *measured)
    assert len(doors.add("next", [9, *PROMPT[1:]])) == 1


@pytest.mark.parametrize("duration_s", [1 / 49, 1 / 50])
def test_a_store_that_is_no_faster_than_computing_gets_no_look_up(duration_s: float) -> None:
    doors = Doors()
    doors.scheduler.control(MeasuredRates(prefill_tokens_per_s=21 * 50), 0.0)
    [look_up] = doors.add("r", PROMPT)
    [fetch] = doors.answer(look_up, True)
    doors.fetched(fetch, 500, duration_s)
    assert doors.add("next", [9, *PROMPT[1:]]) == [] and doors.num_waiting == 2


def test_requests_wait_for_blocks_in_flight_and_do_not_fetch_them_twice() -> None:
    """A longer prompt fetches only the block that the first fetch does not bring."""
    doors = Doors()
    longer = [*PROMPT[:20], 30, 31, 32, 33, 34]
    look_ups = [order for name in ("a", "b") for order in doors.add(name, PROMPT)]
    [fetch] = doors.answer(look_ups[0], True)
    assert doors.answer(look_ups[1], True) == [] and doors.num_waiting == 0
    [look_up] = doors.add("longer", longer)
    [more] = doors.answer(look_up, True)
    assert isinstance(more, Fetch) and len(more.items) == 1
    doors.fetched(more)
    assert doors.num_waiting == 0
    doors.fetched(fetch)
    assert doors.num_waiting == 3


# ---- removals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("gives", [NOTHING, EVICTED, COMPUTED])
def test_blocks_of_a_failed_request_do_not_wait_for_stores(gives: str) -> None:
    doors = Doors(gives=gives)
    [look_up] = doors.add("r", PROMPT)
    doors.answer(look_up, False)
    _, _, orders = doors.step("garbage")
    assert [type(order) for order in orders] == [Remove]
    stores = doors.scheduler.stores
    assert stores is not None and (stores.offers is None) == (gives == NOTHING)
    assert stores.offers is None or stores.offers.num_waiting == 0


def test_blocks_found_in_a_store_are_not_fetched_after_their_removal() -> None:
    """The request waits for the other store's answer while another one fails on the same blocks."""
    doors = Doors(num_stores=2)
    failing = doors.add("fails", PROMPT)
    waiting = doors.add("waits", [*PROMPT[:20], 30, 31, 32, 33, 34])
    for order in failing:
        assert doors.answer(order, False) == []
    assert doors.answer(waiting[0], True) == []
    _, _, removals = doors.step("garbage")
    assert [order.store for order in removals if isinstance(order, Remove)] == [0, 1]
    assert all(len(order.names) == 5 for order in removals if isinstance(order, Remove))
    assert doors.answer(waiting[1], False) == []
    assert doors.num_waiting == 1


def test_a_failed_request_without_a_full_block_removes_nothing() -> None:
    doors = Doors()
    assert doors.add("r", PROMPT[:3]) == []
    _, [update], orders = doors.step("garbage")
    assert update.finish is not None and update.finish.reason == "error"
    assert orders == []
