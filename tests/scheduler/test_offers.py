"""Blocks offered to stores as soon as they are computed: when they are copied, that none is copied
twice, and failed copies. On the other engine: requests that wait for the look-up."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from quire.base.kv_orders import Keep, Kept, LookedUp, LookUp
from quire.base.messages import ResetPrefixCache
from quire.base.plan import MoveKind, Plan
from quire.base.settings.kv_transfer import COMPUTED, EVICTED, NOTHING, KVTransfer
from quire.kv.manager import KVManager
from quire.scheduler.reuse import keeping
from quire.scheduler.reuse import offers as offers_file
from quire.scheduler.reuse.offers import Offers
from quire.scheduler.reuse.stores import WAIT_S
from tests.scheduler.test_stores import OTHER, PROMPT, Lab, all_names, expected, stores_of
from tests.support.scheduler.fake_device import CursedStep
from tests.support.scheduler.fake_stores import BLOCK
from tests.support.scheduler.pinning_core import FULL

NUM = len(PROMPT) // BLOCK
KEEPS, WAITS = KVTransfer(keeps=True), KVTransfer(waits=True)


def copied(plan: Plan | None) -> int:
    """Return the number of blocks that a plan copies to host memory."""
    moves: Sequence = () if plan is None else plan.moves
    return sum(len(move.source) for move in moves if move.kind is MoveKind.SWAP_OUT)


def steps(lab: Lab) -> list[tuple[int, int]]:
    """Run until there is no plan. Return the numbers of rows and copied blocks of each plan."""
    found = []
    while (plan := lab.core.plan()) is not None:
        found.append((len(plan.rows), copied(plan)))
        lab.core.take()
        lab.scheduler.check_invariants()
        lab.answer()
    return found


def test_blocks_are_copied_by_the_plan_after_the_one_that_computes_them() -> None:
    """Each step has eight tokens, or two blocks. A plan without rows copies the last block."""
    lab = Lab(gives=COMPUTED)
    lab.add(PROMPT, num=1)
    lab.answer()
    assert lab.scheduler.has_work
    assert steps(lab) == [(1, 0), (1, 2), (1, 2), (0, 1)]
    assert not lab.scheduler.has_work
    assert stores_of(lab).num_kept == NUM
    other = Lab(kept=lab.stores)
    assert other.generate(PROMPT[:-1] + [49, 48]) == expected(PROMPT[:-1] + [49, 48])
    assert stores_of(other).num_fetched == NUM - 1


def test_blocks_that_a_store_has_are_not_copied_again() -> None:
    lab = Lab(gives=COMPUTED)
    lab.generate(PROMPT)
    steps(lab)
    again = lab.add([*PROMPT, 41], num=1)
    lab.answer()
    assert sum(num for _, num in steps(lab)) == 0, again
    lab.core.control(ResetPrefixCache("another epoch"))
    lab.add(PROMPT, num=1)
    lab.answer()
    assert sum(num for _, num in steps(lab)) == NUM


@pytest.mark.parametrize(
    ("gives", "transfer", "num"),
    [(EVICTED, None, 0), (EVICTED, KEEPS, NUM), (EVICTED, WAITS, 0), (COMPUTED, None, NUM),
     (NOTHING, KEEPS, 0)],
)  # fmt: skip
def test_the_setting_and_the_request_determine_which_blocks_are_stored(
    gives: str, transfer: KVTransfer | None, num: int
) -> None:
    lab = Lab(gives=gives)
    lab.add(PROMPT, num=1, transfer=transfer)
    lab.answer()
    steps(lab)
    assert stores_of(lab).num_kept == num
    if gives == NOTHING:
        lab.evict()
        assert stores_of(lab).num_kept == 0


def test_a_request_that_keeps_its_blocks_also_stores_its_prefix_hit() -> None:
    """The hit is copied although this request computes nothing of it."""
    lab = Lab()
    lab.generate(PROMPT)
    lab.add([*PROMPT, 41], num=1, transfer=KEEPS)
    lab.answer()
    assert sum(num for _, num in steps(lab)) == NUM
    assert stores_of(lab).num_kept == NUM


def test_a_failed_copy_is_not_stored_and_fails_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(gives=COMPUTED)
    request = lab.add(PROMPT[:8], num=1)
    lab.answer()
    run, num_failed = lab.device.run, 0

    def fails(plan: Plan, masks: object = None) -> object:
        nonlocal num_failed
        if copied(plan):
            num_failed += 1
            raise CursedStep("no memory")
        return run(plan, masks)  # type: ignore[arg-type]

    monkeypatch.setattr(lab.device, "run", fails)
    assert lab.finish(request) == expected(PROMPT[:8], num=1)
    steps(lab)
    assert num_failed > 0 and not lab.scheduler.has_work
    monkeypatch.undo()
    lab.answer()
    assert stores_of(lab).num_kept == 0 and not lab.stores.kept[0]
    assert lab.generate(PROMPT) == expected(PROMPT), "the next request gets the right tokens"


def test_evicted_blocks_do_not_delay_offered_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks are in flight to a store and three wait, when another engine needs a prompt."""
    monkeypatch.setattr(keeping, "MAX_KEEP_BLOCKS", 2)
    lab = Lab()
    stores, tier = stores_of(lab), lab.kv.tier
    assert tier is not None
    evicted = [(0, bytes([i]) * 32) for i in range(5)]
    for g, digest in evicted:
        block = tier.allocate(g)
        assert block is not None
        tier.keep_fetched(g, block, digest)
    stores._keep(evicted)
    assert stores.room == 2
    lab.add(PROMPT, num=1, transfer=KEEPS)
    first, look_up = lab.orders()
    assert isinstance(first, Keep) and isinstance(look_up, LookUp)
    lab.core.control(found(look_up, 0))
    while lab.core.plan() is not None:
        lab.core.take()
        lab.scheduler.check_invariants()
    assert stores.room == 0 and not lab.orders()
    lab.core.control(Kept(0, first.ticket, [True, True], 0, 0.0))
    [second] = lab.orders()
    assert isinstance(second, Keep) and len(second.items) == 2
    assert all_names([second]).isdisjoint(digest for _, digest in evicted)


def test_an_answer_names_the_blocks_that_go_to_the_stores() -> None:
    lab = Lab()
    lab.add([*PROMPT, 41], num=1, transfer=KEEPS)
    lab.answer()
    answers = []
    for _ in range(4):
        lab.core.plan()
        answers += [each.handed_over for each in lab.core.take().details if each.finish is not None]
    [handed_over] = answers
    assert handed_over is not None and handed_over.num_blocks == NUM
    assert (0, handed_over.digest) in lab.stores.kept[0] or lab.stores.pending


# ---- the other engine --------------------------------------------------------------------------


def found(order: LookUp, num: int) -> LookedUp:
    """Answer that the store has the first `num` blocks."""
    there = [i < num for i in range(len(order.names))]
    return LookedUp(order.store, order.request_id, there, order.ticket)


def test_a_look_up_is_repeated_as_long_as_it_finds_blocks() -> None:
    before = Lab()
    before.generate([*PROMPT, 41, 42])
    before.evict()
    lab = Lab(kept=before.stores)
    request = lab.add([*PROMPT, 41], transfer=WAITS)
    names: list[int] = []
    for num in (2, 0, 1):  # of the blocks that are looked up
        lookups = [order for order in lab.orders() if isinstance(order, LookUp)]
        if not lookups:
            break
        [order] = lookups
        assert order.wait_s == WAIT_S
        names.append(len(order.names))
        lab.core.control(found(order, num))
        lab.scheduler.check_invariants()
    assert names == [NUM, NUM - 2], "the second look-up is for the rest, and is the last one"
    assert request.request_id in stores_of(lab).waiting, "the first two are being fetched"


def test_a_look_up_ends_when_all_handed_over_blocks_are_found() -> None:
    before = Lab(gives=COMPUTED)
    before.generate(PROMPT)
    steps(before)
    lab = Lab(kept=before.stores)
    digests = [name for _, name in before.stores.kept[0]]
    lab.add([*PROMPT, *OTHER[:8]], transfer=WAITS)
    [order] = lab.orders()
    last = [name for name in (each[1] for each in order.names) if name in digests][-1]
    lab = Lab(kept=before.stores)
    transfer = KVTransfer(waits=True, num_blocks=NUM, digest=last)
    lab.add([*PROMPT, *OTHER[:8]], transfer=transfer)
    [order] = lab.orders()
    lab.core.control(found(order, NUM))
    later = lab.orders()
    assert not any(isinstance(order, LookUp) for order in later)
    assert len(all_names(later)) == NUM


def test_a_request_does_not_wait_for_other_stores_if_one_has_all_blocks() -> None:
    """The stores are an engine's peers, one of which has computed the prompt."""
    before = Lab(gives=COMPUTED)
    before.generate(PROMPT)
    steps(before)
    lab = Lab(num_stores=3)
    lab.stores.kept[1] = before.stores.kept[0]
    request = lab.add([*PROMPT, 41], transfer=WAITS)
    orders = lab.orders()
    assert [order.store for order in orders] == [0, 1, 2]
    lab.core.control(found(orders[1], NUM))
    [fetch] = lab.orders()
    assert fetch.store == 1 and len(all_names([fetch])) == NUM
    lab.stores.submit([fetch])
    lab.answer()
    assert request.request_id not in stores_of(lab).waiting
    lab.core.control(found(orders[0], 0))  # too late to matter
    assert lab.finish(request) == expected([*PROMPT, 41])


def test_a_look_up_does_not_wait_for_blocks_of_another_prompt() -> None:
    lab = Lab()
    lab.add(PROMPT, transfer=KVTransfer(waits=True, num_blocks=2, digest=bytes(32)))
    [order] = lab.orders()
    assert isinstance(order, LookUp) and order.wait_s == 0.0
    assert not isinstance(order, Keep)


def test_known_names_are_bounded_and_the_oldest_are_dropped_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offers_file, "MAX_KNOWN", 2)
    offers = Offers(KVManager((FULL,), (4,), 4), SimpleNamespace(), True, SimpleNamespace(room=4))  # type: ignore[arg-type]
    names = [(0, b"a"), (0, b"b"), (0, b"c")]
    offers.take_kept(names[:2], is_lasting=True)
    assert [offers._is_known(*name) for name in names] == [True, True, False]
    offers.take_kept(names[2:], is_lasting=True)
    assert [offers._is_known(*name) for name in names] == [False, True, True]


def test_waiting_names_are_bounded_and_the_oldest_are_dropped_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offers_file, "MAX_WAITING", 2)
    offers = Offers(KVManager((FULL,), (4,), 4), SimpleNamespace(), True, SimpleNamespace(room=4))  # type: ignore[arg-type]
    request = SimpleNamespace(kv_transfer=None)
    sequence = SimpleNamespace(request=request, digests=[b"a", b"b", b"c"], num_offered=0)
    for count in (2, 3):
        offers.named([sequence], [0], [count], [])  # type: ignore[list-item]
        assert offers.num_waiting == 2
    for name, num_left in ((b"a", 2), (b"b", 1), (b"c", 0)):
        offers.forget([(0, name)])
        assert offers.num_waiting == num_left


def test_a_reset_clears_known_names_and_offers() -> None:
    lab = Lab(gives=COMPUTED)
    lab.generate(PROMPT)
    steps(lab)
    lab.add([*PROMPT[1:], 41], num=1)
    lab.answer()
    assert lab.core.plan() is not None
    stores = lab.scheduler.stores
    offers = None if stores is None else stores.offers
    assert offers is not None and offers._known and offers.num_waiting > 0
    lab.scheduler.memory.reset(b"another epoch", 0.0)
    assert not offers._known and offers.num_waiting == 0
