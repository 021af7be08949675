"""Which items a step encodes, where chunks end, and which requests are refused."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.base.errors import RequestError
from quire.base.messages import Abort, Request
from quire.base.plan import Plan
from quire.base.requests.media_items import MediaItem
from quire.base.settings.config import SchedulerConfig
from quire.engine.loop.recovery import restrict
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.plans import PlanBuilder
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from tests.support.scheduler.fake_device import make_request
from tests.support.scheduler.plain_scheduler import answer

A, B, C = (bytes([i]) * 32 for i in range(3))
CONFIG = SchedulerConfig(
    max_num_seqs=4, max_num_batched_tokens=16, encoder_cache_tokens=12, pipeline_depth=1
)


def scheduler_of(takes_media: bool = True, **settings: Any) -> Scheduler:
    kv = KVManager((CacheGroup("full", (0,), 1, 8),), (64,), 4)
    memory = Memory(kv, 16, watermark=0.0)
    config = replace(CONFIG, **settings)
    return Scheduler(memory, config, 64, takes_media=takes_media)


def item(start: int, num_tokens: int, digest: bytes = A, is_whole: bool = False) -> MediaItem:
    return MediaItem(start, num_tokens, digest, pixels=b"x", is_whole=is_whole)


def request(name: str, num_tokens: int, *media: MediaItem, **more: Any) -> Request:
    first = ord(name) * 1000
    made = make_request(name, list(range(first, first + num_tokens)), max_tokens=4)
    return msgspec.structs.replace(made, media=media, **more)


def planned(scheduler: Scheduler, *requests: Request) -> Plan:
    for each in requests:
        decisions = scheduler.add(each, 0.0)
        assert decisions.refusal is None
    plan = scheduler.schedule(0.0).plan
    assert plan is not None
    scheduler.check_invariants()
    return plan


def encoded(plan: Plan) -> list[bytes]:
    return [each.item.digest for each in plan.encoder_inputs]


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ([item(4, 3), item(6, 2)], "the image at token 6 starts before token 7"),
        ([item(6, 2), item(1, 2)], "the image at token 1 starts before token 8"),
        ([item(8, 3)], "ends at token 11, and the prompt has 10 tokens"),
        ([item(0, 0)], "has no tokens"),
        ([item(0, 13)], "13 tokens, more than the encoder cache holds"),
        ([item(0, 9, is_whole=True)], "9 tokens, which one step must compute together"),
    ],
)
def test_items_that_cannot_be_computed_are_refused(media: list[MediaItem], message: str) -> None:
    scheduler = scheduler_of(long_prefill_token_threshold=8)
    refusal = scheduler.add(request("a", 10, *media), 0.0).refusal
    assert refusal is not None and message in str(refusal) and refusal.field == "media"


def test_media_is_refused_by_text_models_and_for_open_prompts() -> None:
    for scheduler, more in ((scheduler_of(False), {}), (scheduler_of(), {"is_open": True})):
        refusal = scheduler.add(request("a", 10, item(0, 3), **more), 0.0).refusal
        assert isinstance(refusal, RequestError) and refusal.field == "media"


def test_an_item_is_encoded_once_and_read_in_each_chunk() -> None:
    scheduler = scheduler_of(long_prefill_token_threshold=4)
    plans = [planned(scheduler, request("a", 9, item(2, 5)))]
    for _ in range(2):
        scheduler.update(answer(plans[-1]), 0.0)
        plans.append(planned(scheduler))
    assert [len(plan.encoder_inputs) for plan in plans] == [1, 0, 0]
    slots = plans[0].encoder_inputs[0].slots.tolist()
    reads = [(r.row, r.position, r.slots.tolist()) for plan in plans for r in plan.encoder_reads]
    assert reads == [(0, 2, slots[:2]), (0, 4, slots[2:])]
    [start] = plans[0].started
    assert start.media == (item(2, 5).without_pixels,)


def test_rows_of_one_step_share_an_item_and_later_rows_find_it_cached() -> None:
    scheduler = scheduler_of()
    plan = planned(scheduler, request("a", 6, item(1, 4)), request("b", 7, item(3, 4)))
    assert encoded(plan) == [A]
    assert {read.row for read in plan.encoder_reads} == {0, 1}
    scheduler.update(answer(plan), 0.0)
    assert encoded(planned(scheduler, request("c", 8, item(2, 4)))) == []
    assert scheduler.media is not None
    view = scheduler.media.view()
    assert (view.num_encoded_tokens, view.num_hits, view.num_used_slots) == (4, 2, 4)


def test_a_chunk_ends_before_an_item_beyond_the_budget_and_text_rows_continue() -> None:
    scheduler = scheduler_of(max_encoder_tokens=5)
    requests = request("a", 13, item(1, 6, A), item(8, 4, B)), request("b", 3)
    plan = planned(scheduler, *requests)
    assert encoded(plan) == [A], "the first of a step may exceed the budget"
    assert plan.num_tokens.tolist() == [8, 3]
    scheduler.update(answer(plan), 0.0)
    plan = planned(scheduler)
    assert encoded(plan) == [B] and sorted(plan.num_tokens.tolist()) == [1, 5]


def test_a_whole_item_is_never_cut() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=8)
    plan = planned(scheduler, request("a", 14, item(3, 7, is_whole=True)))
    assert plan.num_tokens.tolist() == [3] and not plan.encoder_inputs
    scheduler.update(answer(plan), 0.0)
    plan = planned(scheduler)
    assert plan.num_tokens.tolist() == [8] and encoded(plan) == [A]


def test_a_swapped_row_resumes_with_a_whole_item() -> None:
    """The item needs more than the one new block that a resumed row gets otherwise."""
    scheduler = scheduler_of(preemption_mode="swap", max_num_batched_tokens=12)
    plan = planned(scheduler, request("a", 14, item(6, 8, is_whole=True)))
    assert plan.num_tokens.tolist() == [6]
    scheduler.update(answer(plan), 0.0)
    sequence = scheduler.lifecycle.sequences["a"]
    scheduler.preemption.preempt(sequence, "other", PlanBuilder(99), 0.0)
    assert sequence.host_blocks is not None
    plan = planned(scheduler)
    [start] = plan.started
    assert start.num_computed_tokens == 6 and plan.num_tokens.tolist() == [8]


def test_a_row_waits_while_another_one_holds_the_slots() -> None:
    scheduler = scheduler_of(long_prefill_token_threshold=6)
    plan = planned(scheduler, request("a", 12, item(1, 10, A)), request("b", 9, item(2, 6, B)))
    assert encoded(plan) == [A] and plan.num_tokens.tolist() == [6, 2]
    scheduler.update(answer(plan), 0.0)
    plan = planned(scheduler)
    assert not plan.encoder_inputs and plan.num_tokens.tolist() == [6]
    scheduler.update(answer(plan), 0.0)
    assert encoded(planned(scheduler)) == [B], "the first one has read all of its item"


def test_tokens_of_a_prefix_hit_need_no_encoding() -> None:
    scheduler = scheduler_of()
    first = request("a", 12, item(1, 5, A))
    plan = planned(scheduler, first)
    scheduler.update(answer(plan), 0.0)
    scheduler.control(Abort("a"), 0.0)
    again = msgspec.structs.replace(first, request_id="again")
    other = msgspec.structs.replace(again, request_id="other", media=(item(1, 5, B),))
    plan = planned(scheduler, again, other)
    computed = {start.row: start.num_computed_tokens for start in plan.started}
    assert sorted(computed.values()) == [0, 8], "another picture is no hit"
    assert encoded(plan) == [B]


@pytest.mark.parametrize("fails", [False, True])
def test_an_encoded_item_is_shared_once_the_result_of_its_step_is_taken(fails: bool) -> None:
    scheduler = scheduler_of(pipeline_depth=2)
    first = planned(scheduler, request("a", 6, item(1, 4)))
    second = planned(scheduler, request("b", 7, item(3, 4)))
    [row] = second.started
    assert not second.encoder_reads and second.num_tokens[second.rows == row.row] == [3]
    result = answer(first)
    if fails:
        result = result.replace(row_errors={int(first.rows[0]): "the step failed"})
    scheduler.update(result, 0.0)
    scheduler.check_invariants()
    third = planned(scheduler)
    assert encoded(third) == ([A] if fails else [])
    assert [read.position for read in third.encoder_reads] == [3]


def test_parts_of_a_plan_encode_what_their_rows_read() -> None:
    scheduler = scheduler_of()
    requests = request("a", 6, item(1, 4, A)), request("b", 5, item(0, 4, B)), request("c", 4)
    plan = planned(scheduler, *requests)
    for row, expected in ((0, [A]), (1, [B]), (2, [])):
        part = restrict(plan, np.array([row], np.int32))
        assert encoded(part) == expected
        assert [read.row for read in part.encoder_reads] == [row] * len(expected)


def test_small_steps_have_room_for_a_whole_item() -> None:
    scheduler = scheduler_of()
    scheduler.memory.rates = msgspec.structs.replace(scheduler.memory.rates, step_tokens=1)
    planned(scheduler, request("a", 14, item(0, 12, is_whole=True)))
    assert scheduler.memory.chunk_limit.min_tokens == 12
    scheduler.control(Abort("a"), 0.0)
    assert scheduler.memory.chunk_limit.min_tokens == 0


def test_small_steps_have_room_for_an_item_until_its_request_ends() -> None:
    """A preempted sequence of the request computes the item again."""
    scheduler = scheduler_of()
    pair = msgspec.structs.replace(
        make_request("a", list(range(14)), max_tokens=4, n=2),
        media=(item(0, 12, is_whole=True),),
    )
    scheduler.update(answer(planned(scheduler, pair)), 0.0)
    for index, left in ((0, 12), (1, 0)):
        scheduler.control(Abort("a", index=index), 0.0)
        assert scheduler.memory.chunk_limit.min_tokens == left
