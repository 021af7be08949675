"""Every row of T table 4.1 is an update of two counters, checked step by step.

Written `computed/total`. A token counts as soon as a plan will sample it. So after the plan that
completes a prompt of L tokens its total is L + 1.
"""

import msgspec
import numpy as np
import pytest

from quire.base.events import Preempted
from quire.base.messages import Append, Draft, Drafted, MeasuredRates
from quire.base.plan import StepResult
from quire.base.settings.kv_transfer import KVTransfer
from quire.scheduler.core.queue import Fifo
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.test_stores import Lab
from tests.support.scheduler.events import listen
from tests.support.scheduler.fake_device import make_request
from tests.support.scheduler.fake_stores import BLOCK
from tests.support.scheduler.plain_scheduler import add, answer, scheduler_of, step


def counters(scheduler: Scheduler, name: str) -> str:
    sequence = scheduler.lifecycle.sequences[name]
    total = len(sequence.saved_tokens) + sequence.num_pending_lost
    if sequence.row >= 0:
        total = int(sequence.table.total[sequence.row])
    return f"{sequence.num_computed_tokens}/{total}"


def open_prompt(scheduler: Scheduler, name: str, prompt: list[int]) -> None:
    request = make_request(name, prompt, temperature=0.0, max_tokens=9)
    scheduler.add(msgspec.structs.replace(request, is_open=True), 0.0)


def test_prefill_and_decode() -> None:
    scheduler = scheduler_of(Fifo)
    add(scheduler, "a", 10)
    assert counters(scheduler, "a") == "0/10"
    step(scheduler)
    assert counters(scheduler, "a") == "10/11"
    step(scheduler)
    assert counters(scheduler, "a") == "11/12"


def test_chunked_prefill() -> None:
    scheduler = scheduler_of(Fifo, budget=4)
    add(scheduler, "a", 10)
    seen = []
    for _ in range(4):
        step(scheduler)
        seen.append(counters(scheduler, "a"))
    assert seen == ["4/10", "8/10", "10/11", "11/12"]


def test_preemption_by_recomputation() -> None:
    """computed becomes 0, total stays; then all known tokens are one prefill."""
    scheduler = scheduler_of(Fifo)
    add(scheduler, "a", 10)
    step(scheduler)
    step(scheduler)
    scheduler.lifecycle.preempt(scheduler.lifecycle.sequences["a"], "test", 0.0)
    assert counters(scheduler, "a") == "0/12"
    scheduler.memory.kv.reset_prefix_cache()
    assert step(scheduler) == {"a": 12}
    assert counters(scheduler, "a") == "12/13"


def test_preemption_by_swapping() -> None:
    """The computed tokens still count as computed when the row resumes."""
    scheduler = scheduler_of(Fifo, budget=8, blocks=16, preemption_mode="swap")
    scheduler.control(MeasuredRates(1.0, 1e9), 0.0)
    add(scheduler, "a", 8)
    add(scheduler, "b", 8)
    events = listen(scheduler)
    while not any(isinstance(event, Preempted) for event in events):
        step(scheduler)
    swapped = scheduler.lifecycle.sequences["b"].num_swapped_tokens
    known = scheduler.lifecycle.sequences["b"].num_known_tokens
    assert counters(scheduler, "b") == f"0/{known}" and swapped == known - 1
    while scheduler.lifecycle.sequences["b"].row < 0:
        got = step(scheduler)
    assert got["b"] == 1 and counters(scheduler, "b") == f"{swapped + 1}/{known + 1}"


def test_prefix_caching() -> None:
    scheduler = scheduler_of(Fifo)
    add(scheduler, "a", 10)
    step(scheduler)
    add(scheduler, "b", 14, like="a")
    assert step(scheduler) == {"a": 1, "b": 6}
    assert counters(scheduler, "b") == "14/15"


def test_streaming_prefill() -> None:
    """total grows by each piece; the last token waits until the prompt is complete."""
    scheduler = scheduler_of(Fifo)
    open_prompt(scheduler, "a", list(range(6)))
    assert step(scheduler) == {"a": 5}
    assert counters(scheduler, "a") == "5/6"
    assert step(scheduler) == {}
    scheduler.control(Append("a", [6, 7, 8]), 0.0)
    assert counters(scheduler, "a") == "5/9"
    assert step(scheduler) == {"a": 3}
    scheduler.control(Append("a", [9], is_last=True), 0.0)
    assert step(scheduler) == {"a": 2}
    assert counters(scheduler, "a") == "10/11"
    assert scheduler.lifecycle.sequences["a"].limit == 10 + 9


def test_a_prefilled_request_is_handed_over() -> None:
    """A decode worker begins after the blocks that a prefill worker has stored."""
    prompt = list(range(1, 11))
    first = Lab()
    first.add(prompt, num=1, transfer=KVTransfer(keeps=True))
    first.answer()
    while first.core.plan() is not None:
        first.core.take()
    first.answer()
    second = Lab(kept=first.stores)
    second.add(prompt, "a", transfer=KVTransfer(waits=True))
    second.answer()
    assert counters(second.scheduler, "a") == "0/10"
    plan = second.core.plan()
    assert plan is not None and plan.num_tokens.tolist() == [10 - 2 * BLOCK]
    assert counters(second.scheduler, "a") == "10/11"


@pytest.mark.parametrize("num_rejected", [0, 1, 3])
def test_a_draft_is_verified(num_rejected: int) -> None:
    """Three draft tokens follow 20 known tokens, of which 19 are computed. If all are rejected, the
    step equals one plain step; if none is, it equals four."""
    scheduler = scheduler_of(Fifo, budget=32)
    add(scheduler, "a", 19)
    step(scheduler)
    assert counters(scheduler, "a") == "19/20"
    scheduler.control(Drafted([Draft("a", 0, 20, [3, 5, 7])]), 0.0)
    plan = scheduler.schedule(0.0).plan
    assert plan is not None and plan.num_tokens.tolist() == [4]
    assert counters(scheduler, "a") == "23/24"
    assert scheduler.schedule(0.0).plan is None, "the row's next position is not known"
    given = [[3, 5, 7, 9][: 4 - num_rejected]]
    accepted = np.array([4 - num_rejected], np.int32)
    scheduler.update(StepResult(plan.step_id, np.array(given, np.int32), accepted), 0.0)
    assert counters(scheduler, "a") == f"{23 - num_rejected}/{24 - num_rejected}"
    step(scheduler)
    assert counters(scheduler, "a") == f"{24 - num_rejected}/{25 - num_rejected}"


def test_all_rows_of_a_step_advance_by_the_same_rule() -> None:
    """Prefill, a chunk, decode, a hit and a piece in one plan."""
    scheduler = scheduler_of(Fifo, budget=18)
    add(scheduler, "decodes", 8)
    open_prompt(scheduler, "streams", [1, 2, 3])
    step(scheduler)
    scheduler.control(Append("streams", [4, 5]), 0.0)
    add(scheduler, "hits", 10, like="decodes")
    add(scheduler, "chunk", 40)
    plan = scheduler.schedule(0.0).plan
    assert plan is not None
    table, rows = scheduler.rows.table, plan.rows
    names = [s.request.request_id for s in table.sequences[rows]]
    assert dict(zip(names, plan.num_tokens.tolist(), strict=True)) == {
        "decodes": 1, "streams": 2, "hits": 2, "chunk": 13,
    }  # fmt: skip
    assert np.array_equal(table.computed[rows] - plan.num_tokens, plan.computed_bound)
    scheduler.update(answer(plan), 0.0)
    seen = [counters(scheduler, name) for name in ("decodes", "streams", "hits", "chunk")]
    assert seen == ["9/10", "4/5", "10/11", "13/40"]
