"""The scheduler's doors and nothing but messages: which orders stores get, and what their answers
change.

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
    """A scheduler with stores; the test answers the orders and the plans. gives: what the stores
    get."""

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
        """Answer a look-up; what is ordered then."""
        assert isinstance(order, LookUp)
        there = [found] * len(order.names) if isinstance(found, bool) else found
        answer = LookedUp(order.store, order.request_id, there, order.ticket)
        return self.scheduler.control(answer, 0.0).orders

    def fetched(
        self, order: Order, num_bytes: int = 0, duration_s: float = 0.0, ok: bool = True
    ) -> list[Order]:
        """Answer a fetch; what is ordered then."""
        assert isinstance(order, Fetch)
        there = [ok] * len(order.items)
        answer = Fetched(order.store, order.ticket, there, num_bytes, duration_s)
        orders = self.scheduler.control(answer, 0.0).orders
        self.scheduler.check_invariants()
        return orders

    def kept(self, order: Order) -> list[Order]:
        """Answer that a store has kept all; what is ordered then."""
        assert isinstance(order, Keep)
        num = len(order.items)
        answer = Kept(order.store, order.ticket, [True] * num, num * BLOCK_BYTES, 0.1)
        return self.scheduler.control(answer, 0.0).orders

    def plan(self) -> int | None:
        """Make a plan; how many blocks it copies to host memory. None if there is none to make."""
        plan = self.scheduler.schedule(0.0).plan
        if plan is None:
            return None
        self.plans.append(plan)
        return sum(len(move.source) for move in plan.moves if move.kind is MoveKind.SWAP_OUT)

    def take(self) -> list[Order]:
        """Take the result of the oldest plan; what is ordered then."""
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


# ---- what is looked up and fetched -------------------------------------------------------------


def test_groups_that_keep_all_blocks_are_looked_up_first() -> None:
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
def test_a_prompt_that_is_handed_over_is_looked_up_in_the_stores_of_its_engine(
    transfer: KVTransfer | None, stores: list[int]
) -> None:
    doors = Doors(num_stores=3)
    assert [order.store for order in doors.add("r", PROMPT, transfer)] == stores


def test_of_a_window_only_the_blocks_are_fetched_that_the_next_token_sees() -> None:
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
def test_blocks_that_were_handed_over_are_waited_for_if_the_last_is_of_this_prompt(
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


@pytest.mark.parametrize(("num_tokens", "num_told", "num_to_come"), [(21, 3, 3), (20, 5, 4)])
def test_a_look_up_goes_on_until_all_blocks_that_may_come_are_found(
    num_tokens: int, num_told: int, num_to_come: int
) -> None:
    """As many as were handed over, but for the block of the last token."""
    doors = Doors()
    [look_up] = doors.add("asks", PROMPT)
    assert isinstance(look_up, LookUp)
    digest = look_up.names[num_told - 1][1]
    transfer = KVTransfer(waits=True, num_blocks=num_told, digest=digest)
    [look_up] = doors.add("waits", PROMPT[:num_tokens], transfer)
    assert isinstance(look_up, LookUp)
    num_names = len(look_up.names)
    first = [i < num_to_come - 1 for i in range(num_names)]
    fetch, look_up = doors.answer(look_up, first)
    assert isinstance(fetch, Fetch) and len(fetch.items) == num_to_come - 1
    assert isinstance(look_up, LookUp) and len(look_up.names) == num_names - len(fetch.items)
    [last] = doors.answer(look_up, [i == 0 for i in range(len(look_up.names))])
    assert isinstance(last, Fetch) and len(last.items) == 1


@pytest.mark.parametrize("transfer", [None, WAITS])
def test_what_takes_longer_to_fetch_than_to_compute_is_fetched_only_if_it_was_handed_over(
    transfer: KVTransfer | None,
) -> None:
    """A block takes as long to fetch as seven tokens to compute. To look up two blocks of 21 tokens
    is worth it, and to fetch them in the place of eight tokens is not."""
    doors = Doors()
    [look_up] = doors.add("r", PROMPT[:13])
    [fetch] = doors.answer(look_up, True)
    doors.fetched(fetch, 3 * BLOCK_BYTES, 3 / 7)
    doors.scheduler.control(MeasuredRates(prefill_tokens_per_s=49), 0.0)
    [look_up] = doors.add("longer", PROMPT, transfer)
    assert isinstance(look_up, LookUp) and len(look_up.names) == 2
    fetches = [order for order in doors.answer(look_up, True) if isinstance(order, Fetch)]
    assert len(fetches) == (transfer is not None)


def test_a_prompt_that_is_shorter_than_its_last_state_is_not_waited_for() -> None:
    """Blocks of one token: with one token more there is one to wait for."""
    for num_tokens in (PROMPT_TAIL, PROMPT_TAIL + 1, PROMPT_TAIL + 2):
        doors = Doors((FULL, STATES), size=1)
        orders = doors.add("r", PROMPT[:num_tokens], WAITS)
        assert len(orders) == (num_tokens > PROMPT_TAIL + 1), num_tokens


# ---- what is told of it ------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)])
def test_a_report_tells_what_a_store_brought_from_what_host_memory_had(
    groups: tuple[CacheGroup, ...],
) -> None:
    """The second request waits for nothing: to it, the same blocks were in host memory."""
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


def test_an_answer_names_blocks_for_another_engine_only_if_the_request_came_to_its_end() -> None:
    for error, is_told in (("", True), ("garbage", False)):
        doors = Doors()
        [look_up] = doors.add("r", PROMPT, KEEPS)
        doors.answer(look_up, False)
        _, [update], _ = doors.step(error)
        assert update.finish is not None
        assert update.finish.reason == ("error" if error else "length")
        assert (update.handed_over is not None) == is_told


def test_an_answer_names_the_blocks_of_the_prompt_and_none_of_the_output() -> None:
    doors = Doors()
    [look_up] = doors.add("r", PROMPT, KEEPS, num=12)
    doors.answer(look_up, False)
    updates = [update for _ in range(12) for update in doors.step()[1]]
    assert isinstance(look_up, LookUp)
    handed_over = [update.handed_over for update in updates if update.finish is not None]
    assert handed_over == [HandedOver(5, look_up.names[4][1])]


@pytest.mark.parametrize("groups", [(FULL,), (FULL, STATES)])
def test_what_stores_brought_and_what_was_here_is_counted(groups: tuple[CacheGroup, ...]) -> None:
    """Of the state of a hit, the last block."""
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


# ---- what is given -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_stores", [1, 2])
def test_blocks_wait_for_the_one_host_block_until_all_stores_have_copied_it(
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


def test_blocks_that_no_host_block_will_ever_take_are_given_up() -> None:
    doors = Doors(gives=COMPUTED, num_host_blocks=0)
    for look_up in doors.add("r", PROMPT):
        doors.answer(look_up, False)
    doors.step()
    assert doors.scheduler.has_work
    assert doors.plan() is None and not doors.scheduler.has_work


@pytest.mark.parametrize(("most_bytes", "room"), [(250, 2), (99, 1), (1 << 20, 256)])
def test_as_many_blocks_are_copied_at_once_as_their_bytes_allow_and_one_always(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int, room: int
) -> None:
    monkeypatch.setattr(keeping, "MAX_KEEP_BYTES", most_bytes)
    stores = Doors(gives=COMPUTED).scheduler.stores
    assert stores is not None and stores.room == room


def test_blocks_that_are_being_copied_or_kept_take_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks at once, while the request goes on: the plan behind the one that copies them has
    no room, nor has any until the store has kept them."""
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


def test_one_block_that_waits_is_work() -> None:
    doors = Doors(gives=COMPUTED)
    doors.add("r", PROMPT[:4])
    doors.step()
    assert doors.scheduler.has_work and doors.plan() == 1
    [keep] = doors.take()
    doors.kept(keep)
    assert not doors.scheduler.has_work


# ---- how fast a store is -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "duration_s", "ok"), [(0, 1.0, False), (0, 0.0, False), (500, 0.0, True)]
)
def test_a_fetch_without_bytes_or_time_says_nothing_of_a_store_s_speed(
    num_bytes: int, duration_s: float, ok: bool
) -> None:
    """Five blocks take 1/60 s to fetch, and 1/50 s to compute: at half the speed nobody would look
    them up."""
    doors = Doors()
    doors.scheduler.control(MeasuredRates(prefill_tokens_per_s=21 * 50), 0.0)
    for i, measured in enumerate([(500, 1 / 60, True), (num_bytes, duration_s, ok)]):
        [look_up] = doors.add(f"r{i}", [i, *PROMPT[1:]])
        [fetch] = doors.answer(look_up, True)
        assert isinstance(fetch, Fetch) and len(fetch.items) == 5
        doors.fetched(fetch, *measured)
    assert len(doors.add("next", [9, *PROMPT[1:]])) == 1


@pytest.mark.parametrize("duration_s", [1 / 49, 1 / 50])
def test_a_store_that_takes_as_long_as_computing_does_is_not_asked(duration_s: float) -> None:
    doors = Doors()
    doors.scheduler.control(MeasuredRates(prefill_tokens_per_s=21 * 50), 0.0)
    [look_up] = doors.add("r", PROMPT)
    [fetch] = doors.answer(look_up, True)
    doors.fetched(fetch, 500, duration_s)
    assert doors.add("next", [9, *PROMPT[1:]]) == [] and doors.num_waiting == 2


def test_blocks_that_are_on_their_way_are_waited_for_and_not_fetched_twice() -> None:
    """The second request comes in with the first one, and fetches only what it lacks besides."""
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


# ---- what is removed ---------------------------------------------------------------------------


@pytest.mark.parametrize("gives", [NOTHING, EVICTED, COMPUTED])
def test_blocks_of_a_request_that_fails_do_not_wait_to_be_given(gives: str) -> None:
    doors = Doors(gives=gives)
    [look_up] = doors.add("r", PROMPT)
    doors.answer(look_up, False)
    _, _, orders = doors.step("garbage")
    assert [type(order) for order in orders] == [Remove]
    stores = doors.scheduler.stores
    assert stores is not None and (stores.offers is None) == (gives == NOTHING)
    assert stores.offers is None or stores.offers.num_waiting == 0


def test_what_one_store_has_found_is_not_fetched_once_it_is_removed() -> None:
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


def test_nothing_is_removed_for_a_request_without_a_full_block() -> None:
    doors = Doors()
    assert doors.add("r", PROMPT[:3]) == []
    _, [update], orders = doors.step("garbage")
    assert update.finish is not None and update.finish.reason == "error"
    assert orders == []
