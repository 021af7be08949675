"""Pinned prefixes with everything that may undo them: blocks of the same tokens, errors in a
shorter prefix, resets and expiry. Hits report only the tenant's own requests."""

import msgspec
import pytest

from quire.base.errors import RequestError
from quire.base.messages import Abort, Append, ResetPrefixCache, Unpin
from quire.scheduler.reuse.pins import MAX_PINS
from tests.support.scheduler.fake_device import GARBAGE, make_request
from tests.support.scheduler.pinning_core import BLOCK, ENDING, PREFIX, Bench, num_unpinned


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_longer_index_hit_begins_with_the_pinned_blocks_themselves(mode: str) -> None:
    """The index names blocks of another request, which was a chunk ahead of the pin. A request on
    those blocks would not share the pin, and would never end if it fits only by sharing."""
    bench = Bench(long_prefill_token_threshold=8, preemption_mode=mode)
    prefix = list(range(40))
    bench.begin_pin("pin", prefix)
    bench.step()
    bench.add("ahead", prefix + ENDING, max_tokens=2)
    bench.finish()
    blocks, pool = bench.held(bench.pins["pin"]), bench.kv.pools[0]
    assert [pool.is_indexed(block) for block in blocks] == [True] * 4 + [False] * 6
    request = bench.add("large", prefix + ENDING, max_tokens=47)
    bench.step()
    assert bench.plans[-1].started[0].num_computed_tokens == 44
    assert bench.sequence("large").blocks.tables[0].blocks[:10] == blocks
    bench.finish()
    bench.assert_right(request)


def test_garbage_in_nested_pins_is_recomputed_after_an_error() -> None:
    bench = Bench(num_blocks=40)
    longer = [*PREFIX, 20, 21, 22]
    bench.pin("short")
    bench.pin("long", longer)
    for pin in bench.pins.values():
        for block in bench.held(pin):
            bench.device.slots[0].reshape(-1, BLOCK)[block] = GARBAGE
    bench.add("first", longer + ENDING)
    bench.finish()
    assert bench.reason["first"] == "error"
    requests = [bench.add("second", longer + ENDING), bench.add("third", PREFIX + ENDING)]
    bench.finish()
    bench.assert_right(*requests)


def test_recomputing_a_pin_does_not_extend_its_time_to_live() -> None:
    bench = Bench()
    bench.pin(pin_s=10.0)
    bench.clock.advance(6.0)
    bench.core.control(ResetPrefixCache("anew"))
    bench.finish()
    assert [prefix.expires_in_s for prefix in bench.core.prefixes()] == [4.0]
    bench.clock.advance(3.0)
    bench.core.control(ResetPrefixCache("once more"))
    bench.clock.advance(2.0)
    bench.finish()
    assert bench.core.rest_s() == 0.0 and not bench.core.prefixes()
    bench.core.advance()
    assert not bench.pins and bench.num_used == [0]


def test_a_pin_that_is_being_computed_at_a_reset_is_indexed_afterwards() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.begin_pin("pin", list(range(20)))
    bench.step()
    bench.core.control(ResetPrefixCache("anew"))
    bench.finish()
    request = bench.add("other", [*range(17), 44])
    bench.step()
    assert bench.plans[-1].started[0].num_computed_tokens == 16
    bench.finish()
    bench.assert_right(request)


def test_a_tenant_sees_only_the_pin_hits_of_its_own_requests() -> None:
    """Otherwise it could find out other tenants' prompts, by pinning one token more each time."""
    bench = Bench()
    bench.pin(tenant="key 1")
    bench.add("theirs", PREFIX + ENDING, tenant="key 2")
    bench.add("own", PREFIX + ENDING, tenant="key 1")
    bench.finish()
    assert [prefix.num_hits for prefix in bench.core.prefixes("key 1")] == [1]
    assert [prefix.num_hits for prefix in bench.core.prefixes()] == [2]
    assert bench.core.prefixes("key 2") == []


def test_the_number_of_pins_is_limited() -> None:
    bench = Bench(num_blocks=2 * MAX_PINS + 40)
    for i in range(MAX_PINS):
        bench.begin_pin(f"p{i}", [i % 50, i // 50])
    bench.finish()
    with pytest.raises(RequestError, match="256 prefixes are pinned already"):
        bench.begin_pin("more", [49])
    bench.core.control(Unpin("p7"))
    bench.pin("more", [49])


def test_an_open_prompt_that_lost_its_row_counts_as_one_hit() -> None:
    bench = Bench(max_num_seqs=1)
    pin = bench.pin()
    request = make_request("open", PREFIX + ENDING, max_tokens=2)
    bench._send(msgspec.structs.replace(request, is_open=True))
    bench.step()
    first = bench.sequence("open").report
    other = bench.add("other", [45] * 9)
    for _ in range(8):
        bench.step()
    assert bench.reason["other"] == "length" and bench.sequence("open").row < 0
    bench.core.control(Append("open", [7, 8], is_last=True))
    bench.step()
    assert bench.sequence("open").report == first and first is not None and first.pinned == 11
    bench.finish()
    assert pin.num_hits == 1
    bench.assert_right(other)


def test_a_later_pin_reduces_the_remaining_tokens_of_a_waiting_request() -> None:
    """A shorter pin counts before, and again after the longer one is removed."""
    bench = Bench(caching=False, max_num_seqs=1)
    bench.pin("short", PREFIX[:6])
    bench.begin_pin("pin", PREFIX)
    bench.add("more", PREFIX + ENDING)
    remaining, waiting = bench.scheduler.progress.remaining, bench.sequence("more")
    assert remaining(waiting) == len(PREFIX + ENDING) - 6
    bench.step()
    assert bench.pins["pin"].blocks is not None and remaining(waiting) == len(ENDING)
    bench.core.control(Unpin("pin"))
    assert remaining(waiting) == len(PREFIX + ENDING) - 6
    bench.finish()


def test_the_scheduler_refuses_to_pin_a_request_with_several_sequences() -> None:
    """The engine checks this first, but a recording replays calls of the doors."""
    bench = Bench()
    request = msgspec.structs.replace(make_request("pin", PREFIX, n=2), pin_s=0.0)
    assert "one whole prompt" in str(bench.scheduler.add(request, 0.0).refusal)
    assert not bench.pins


def test_a_pin_reduces_the_remaining_tokens_of_a_new_request() -> None:
    bench = Bench()
    bench.pin()
    bench.add("more", PREFIX + ENDING)
    waiting = bench.sequence("more")
    assert bench.scheduler.progress.remaining(waiting) == len(ENDING)
    bench.core.control(Abort("more"))
    bench.finish()


def test_a_pin_aborted_before_it_was_computed_takes_no_room() -> None:
    bench = Bench(max_num_batched_tokens=4)
    assert num_unpinned(bench) == 24
    bench.begin_pin("pin", PREFIX)
    bench.step()
    assert num_unpinned(bench) == 24 - 3
    bench.core.control(Abort("pin"))
    bench.finish()
    assert num_unpinned(bench) == 24


def test_an_expired_pin_takes_no_room_from_a_new_request() -> None:
    bench = Bench(num_blocks=6)
    bench.pin(pin_s=5.0)
    bench.clock.advance(6.0)
    bench.scheduler.add(make_request("all", list(range(15)), max_tokens=9), bench.clock.now())
    assert "pin" not in bench.pins and num_unpinned(bench) == 6


def test_full_blocks_of_a_pinned_prefix_are_shared() -> None:
    bench = Bench()
    bench.pin()
    request = make_request("r", [*PREFIX, 40, 41, 42])
    bench.core.add(request)
    sequence = bench.scheduler.lifecycle.sequences["r"]
    pinned = bench.scheduler.pinned
    assert pinned.lasting_blocks(sequence) == [len(PREFIX) // BLOCK]
    bench.core.add(make_request("other", [43, *PREFIX]))
    assert pinned.lasting_blocks(bench.scheduler.lifecycle.sequences["other"]) == [0]


def test_a_pin_leaves_room_for_all_but_the_last_token_of_open_requests() -> None:
    """The last token of an answer is never computed: nine of ten tokens need three blocks."""
    bench = Bench(num_blocks=24)
    bench.add("r", [40, 41, 42, 43], max_tokens=6)
    sequence, pins = bench.scheduler.lifecycle.sequences["r"], bench.scheduler.pins
    assert (sequence.limit, BLOCK) == (10, 4)
    assert pins._leaves_room_for(sequence, [24 - 3])
    assert not pins._leaves_room_for(sequence, [24 - 2])
