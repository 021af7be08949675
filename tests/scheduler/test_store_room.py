"""Fetches from stores that wait for room in host memory (`scheduler/reuse/stores.py`)."""

import pytest

from quire.base.kv_orders import Fetch, Keep, LookedUp
from quire.base.messages import Abort, Request, ResetPrefixCache
from quire.base.settings.kv_transfer import COMPUTED
from quire.scheduler.reuse.keeping import Keeping
from quire.spec.cache_group import CacheGroup
from tests.scheduler.test_scheduler_machine import FULL
from tests.scheduler.test_stores import (
    OTHER,
    PROMPT,
    Lab,
    expected,
    look_up,
    stored_prompt,
)
from tests.support.scheduler.fake_stores import BLOCK


def deferred_fetch(lab: Lab) -> tuple[Request, Request, Fetch]:
    """Add two requests whose prompts only the store has. Return them, and the first one's fetch.
    Host memory has 12 blocks, so fetches may take 6, and each prompt needs 4."""
    digests = stored_prompt(lab) + stored_prompt(lab, OTHER)
    lab.kv.forget(digests)
    requests = lab.add(PROMPT), lab.add(OTHER)
    lab.stores.submit(lab.orders())
    for _ in requests:
        answer = lab.stores.answer(0, fails=False)
        assert isinstance(answer, LookedUp)
        lab.core.control(answer)
    [fetch] = lab.orders()
    assert isinstance(fetch, Fetch) and len(fetch.items) == 4
    return *requests, fetch


@pytest.mark.parametrize("fails", [True, False])
def test_a_fetch_waits_until_host_memory_has_room(fails: bool) -> None:
    lab = Lab(gives=COMPUTED)
    first, second, fetch = deferred_fetch(lab)
    sequence = lab.scheduler.lifecycle.sequences[second.request_id]
    lab.stores.submit([fetch])
    answer = lab.stores.answer(0, fails)
    assert answer is not None
    lab.core.control(answer)
    [fetch] = lab.orders()
    assert isinstance(fetch, Fetch) and len(fetch.items) == 4
    lab.stores.submit([fetch])
    assert lab.finish(first) == expected(PROMPT)
    assert lab.finish(second) == expected(OTHER)
    assert sequence.num_cached_tokens == 4 * BLOCK


def test_a_small_fetch_does_not_overtake_a_waiting_one() -> None:
    lab, small = Lab(gives=COMPUTED), list(range(41, 50))
    names = stored_prompt(lab, small)
    _, _, fetch = deferred_fetch(lab)
    lab.kv.forget(names)
    third = lab.add(small)
    assert len(look_up(lab, third)) == 2 and not lab.orders()
    lab.stores.submit([fetch])
    answer = lab.stores.answer(0, fails=False)
    assert answer is not None
    lab.core.control(answer)
    sizes = [len(order.items) for order in lab.orders() if isinstance(order, Fetch)]
    assert sizes == [4, 2]


@pytest.mark.parametrize("is_reset", [True, False])
def test_a_waiting_fetch_is_dropped_on_a_reset_or_an_abort(is_reset: bool) -> None:
    lab = Lab(gives=COMPUTED)
    first, second, fetch = deferred_fetch(lab)
    lab.core.control(ResetPrefixCache() if is_reset else Abort(second.request_id))
    lab.stores.submit([fetch])
    assert lab.finish(first) == expected(PROMPT)
    assert not [order for order in lab.orders() if isinstance(order, Fetch)]
    if is_reset:
        assert lab.finish(second) == expected(OTHER)


def test_a_fetch_larger_than_host_memory_takes_the_room_that_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prompts need four blocks, host memory has room for three, and writes never end."""
    lab = Lab(gives=COMPUTED)
    digests = stored_prompt(lab) + stored_prompt(lab, OTHER)
    lab.kv.forget(digests)
    lab.add([40, 41, 42, 43])
    lab.add([45])  # its plan copies what the first request computed
    for _ in range(8):
        lab.step()
    [write] = lab.orders()
    assert isinstance(write, Keep)
    tier = lab.kv.tier
    assert tier is not None
    taken = [tier.allocate(0) for _ in range(tier.room(0) - 2)]
    first = lab.add(OTHER)
    look_up(lab, first)
    assert not lab.orders(), "the first waits for the write"
    monkeypatch.setattr(Keeping, "backlog", 1)
    lab.stores.submit([write])
    answer = lab.stores.answer(0, fails=False)
    assert answer is not None
    lab.core.control(answer)
    [fetch] = lab.orders()
    assert isinstance(fetch, Fetch) and len(fetch.items) == 3, "as many as have room"
    second = lab.add(PROMPT)
    look_up(lab, second)
    assert not lab.orders(), "the second waits for the first"
    lab.stores.submit([fetch])
    answer = lab.stores.answer(0, fails=False)
    assert answer is not None
    lab.core.control(answer)
    [fetch] = lab.orders()
    assert isinstance(fetch, Fetch) and len(fetch.items) == 3
    for block in taken:
        assert block is not None
        tier.release(0, block)
    lab.stores.submit([fetch])
    answers = [lab.finish(first), lab.finish(second)]  # in the order of their ends
    assert expected(OTHER) in answers and expected(PROMPT) in answers


@pytest.mark.parametrize("is_stored", [True, False])
def test_old_blocks_of_a_window_are_not_looked_up_again(is_stored: bool) -> None:
    groups = FULL, CacheGroup("window", (1,), 1, 8, window=6)
    lab, prompt = Lab(gives=COMPUTED, groups=groups, num_blocks=40), list(range(1, 33))
    digests = stored_prompt(lab, prompt)
    lab.kv.forget(digests[6:7])
    if not is_stored:
        for g in (0, 1):
            lab.stores.kept[0].pop((g, digests[6]))
    request = lab.add(prompt)
    for pool in (lab.kv.pools[1], lab.kv.host_pools[1]):
        pool.forget(digests[0])
    assert set(look_up(lab, request)) == {digests[6]}
    assert all(isinstance(order, Fetch) for order in lab.orders())
