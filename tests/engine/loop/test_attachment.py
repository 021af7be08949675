"""Attachments: when the loop calls them, in which order, and what happens if they fail.

Covers `engine/loop/attachment.py` and `engine/loop/front.py`.
"""

import inspect
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.virtual.dry_run import dry_request, dry_run
from quire.base.clock import FakeClock
from quire.base.errors import EngineError, RequestError
from quire.base.messages import Abort, Drafted, Request
from quire.base.plan import StepResult
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import SchedulerConfig, config_from_flat
from quire.engine.attachments.order import Order
from quire.engine.attachments.recorder import Recorder
from quire.engine.client.output import StepReader
from quire.engine.loop.attachment import Attachment, DoorWatcher, Given, Pending
from quire.engine.loop.core import EngineCore
from quire.engine.start.build import build_core
from quire.kv.manager import KVManager
from quire.models.checkpoint.source import resolve_model
from quire.scheduler.core.memory import Memory
from quire.scheduler.decisions import Decisions
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from tests.support.engine.attachments import attached
from tests.support.engine.fake_attachment import FakeAttachment
from tests.support.engine.token_limit import TokenLimit
from tests.support.engine.updates import read, reason_of, run_to_end
from tests.support.models.reference_checkpoints import checkpoint
from tests.support.scheduler.fake_device import (
    Curse,
    FakeDevice,
    FakeExecutor,
    expected_tokens,
    make_request,
)

BLOCK, LENGTH = 4, 64
GROUP = CacheGroup("full", (0,), num_kv_heads=1, head_dim=1)
METHODS = {"accept", "hear", "answers", "before_plan", "on_step", "close"}
LIMITS = RequestLimits(50_000, LENGTH, 0, 8)


def make_core(*attachments: Attachment, depth: int = 1) -> EngineCore:
    """Return a core whose executor answers immediately with random tokens."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, pipeline_depth=depth)
    scheduler, executor = dry_run(64, BLOCK, config, LENGTH, enable_prefix_caching=True)
    core = EngineCore(scheduler, executor, FakeClock(), LIMITS)
    for attachment in attachments:
        core.attach(attachment)
    return core


def make_device_core(depth: int = 2) -> tuple[EngineCore, FakeDevice]:
    """Return a core over a device with rows that can be cursed. It computes a plan only when the
    result is requested."""
    kv = KVManager((GROUP,), (64,), BLOCK, True)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, pipeline_depth=depth)
    scheduler = Scheduler(Memory(kv, 32, watermark=0.0), config, LENGTH)
    device = FakeDevice((GROUP,), (64,), BLOCK, ())
    executor: Any = FakeExecutor(device, is_lazy=True)
    return EngineCore(scheduler, executor, FakeClock(), LIMITS), device


def ask(core: EngineCore, name: str = "a", num_tokens: int = 3, **changed: Any) -> Request:
    request = msgspec.structs.replace(dry_request(name, [1, 2, 3], num_tokens), **changed)
    core.add(request)
    return request


def run(core: EngineCore, reader: StepReader | None = None) -> list[Any]:
    """Take steps to the end; return all updates."""
    reader, found = reader or StepReader(), []
    run_to_end(core, lambda: found.extend(read(reader, core.step())))
    return found


# ---- when attachments are called ----------------------------------------------------------------


def test_interface_has_six_methods() -> None:
    found = {name for name, _ in inspect.getmembers(Attachment, inspect.isfunction)}
    assert found == METHODS


def test_calls_of_one_request_come_in_order() -> None:
    seen = FakeAttachment()
    core = make_core(seen)
    ask(core, num_tokens=2)
    core.step()
    core.step()
    core.control(Abort("nobody"))
    core.close()
    assert [call.removeprefix("fake: ") for call in seen.calls] == [
        "accept a",
        "hear Request",
        "answers",
        "before_plan 0",
        "hear plan",
        "on_step next 0",
        "on_step done 0",
        "hear StepResult",
        "answers",
        "before_plan 0",
        "hear plan",
        "on_step next 1",
        "on_step done 1",
        "hear StepResult",
        "hear Abort",
        "close",
    ]


def test_on_step_reports_next_once_all_earlier_results_are_in() -> None:
    core, _ = make_device_core(depth=2)
    seen = FakeAttachment()
    core.attach(seen)
    ask(core, num_tokens=4)
    core.plan()
    core.plan()
    assert [call for call in seen.calls if "on_step" in call] == ["fake: on_step next 0"]
    core.take()
    assert [call for call in seen.calls if "on_step" in call][1:] == [
        "fake: on_step done 0",
        "fake: on_step next 1",
    ]
    core.plan()
    core.close()
    assert seen.calls[-2:] == ["fake: close", "fake: on_step void 2"]


def test_steps_after_a_failed_one_are_void_and_submitted_again() -> None:
    core, device = make_device_core(depth=2)
    seen = FakeAttachment()
    core.attach(seen)
    core.add(make_request("bad", [5, 6, 7], max_tokens=8, temperature=0.0, seed=0))
    good = make_request("good", [8, 9], max_tokens=8, temperature=0.0, seed=1)
    core.add(good)
    device.curses[0] = Curse(4, raises=True)
    found = run(core)
    assert {each.request_id: reason_of(each) for each in found if each.finish} == {
        "bad": "error",
        "good": "length",
    }
    steps = [call.removeprefix("fake: on_step ") for call in seen.calls if "on_step" in call]
    void = [call.split()[1] for call in steps if call.startswith("void")]
    assert void, "no step was in flight after the failed one"
    for number in void:
        assert steps.index(f"void {number}") < steps.index(f"next {number}")
        assert f"done {number}" in steps
    tokens = [token for each in found if each.request_id == "good" for token in each.token_ids]
    assert tokens == expected_tokens(good, LENGTH)


def test_resting_attachment_is_called_again_after_its_rest() -> None:
    seen = FakeAttachment()
    core = make_core(seen)
    ask(core, num_tokens=4)
    seen.rests = 3
    core.step()
    core.step()
    assert (seen.calls[2:], seen.rests) == ([], 1)
    core.step()
    assert seen.calls[2:5] == ["fake: before_plan 0", "fake: hear plan", "fake: on_step next 2"]


def test_methods_that_an_attachment_does_not_override_are_not_called() -> None:
    core = make_core(Attachment())
    found = core.attachments
    lists = found._accept, found._answers, found._before_plan, found._on_step, found._pending
    assert not any(lists) and not found._hear


def test_accept_rejects_or_changes_a_request_before_the_scheduler() -> None:
    class Chooses(Attachment):
        def accept(self, request: Request) -> Request:
            if request.tenant == "bad":
                raise RequestError("not for you")
            return msgspec.structs.replace(request, priority=7)

    core = make_core(Chooses())
    with pytest.raises(RequestError, match="not for you"):
        ask(core, "refused", tenant="bad")
    assert not core.has_work
    ask(core, "taken")
    assert [each.request.priority for each in core.requests()] == [7]


def test_hear_gets_a_rejected_request_with_its_refusal() -> None:
    heard: list[tuple[Given, bool]] = []

    class Hears(Attachment):
        def hear(self, given: Given, decisions: Decisions) -> None:
            if isinstance(given, Request):
                heard.append((given.request_id, decisions.refusal is not None))

    core = make_core(Hears())
    ask(core, "a")
    with pytest.raises(RequestError, match="in use"):
        ask(core, "a")
    assert heard == [("a", False), ("a", True)]


# ---- what attachments return --------------------------------------------------------------------


def test_answers_wake_the_loop_and_reach_the_scheduler() -> None:
    seen = FakeAttachment()
    core = make_core(seen)
    assert core.rest_s() is None
    ask(core)
    seen.next_answers = [Abort("a")]
    seen.is_pending = Pending(has_answers=True)
    assert core.rest_s() == 0.0
    seen.is_pending = Pending()
    core.advance()
    assert not core.has_work and "fake: hear Abort" in seen.calls


def test_messages_of_before_plan_precede_the_plan() -> None:
    seen = FakeAttachment()
    core = make_core(seen)
    ask(core)
    seen.next_messages = [Drafted([])]
    core.plan()
    assert seen.calls[-4:] == [
        "fake: before_plan 0",
        "fake: hear Drafted",
        "fake: hear plan",
        "fake: on_step next 0",
    ]


def test_loop_wakes_at_the_time_an_attachment_requests() -> None:
    """A request that is held back leaves the loop without work."""
    seen = FakeAttachment()
    core = make_core(seen)
    ask(core, is_held_back=True)
    core.advance()
    assert core.rest_s() is None
    seen.is_pending = Pending(next_s=3.0)
    assert core.rest_s() == 3.0
    core._clock.advance(3.0)  # type: ignore[attr-defined]
    assert core.rest_s() == 0.0


def test_step_waits_for_open_answers() -> None:
    seen = FakeAttachment()
    core = make_core(seen)
    ask(core, is_held_back=True)
    seen.is_pending = Pending(num_open=1)
    waits: list[float] = []

    def wait(timeout_s: float) -> None:
        waits.append(timeout_s)
        seen.next_answers, seen.is_pending = [Abort("a")], Pending()

    core.bell.wait = wait  # type: ignore[method-assign]
    core.step()
    assert len(waits) == 1 and not core.has_work


def test_attachment_can_hold_plans_while_one_is_in_flight() -> None:
    seen = FakeAttachment()
    core, _ = make_device_core(depth=3)
    core.attach(seen)
    ask(core, num_tokens=9)
    in_flight = []
    for holds in (False, True, True):
        seen.is_pending = Pending(holds_plans=holds)
        core.step()
        in_flight.append(core.num_in_flight)
    assert in_flight == [2, 1, 0]
    core.step()
    assert core.num_in_flight == 0


# ---- the order of calls -------------------------------------------------------------------------


def test_lowest_order_is_called_first_whenever_attached() -> None:
    calls: list[str] = []
    orders = {"late": 60, "first": 10, "second": 50, "third": 50}
    core = make_core(*[FakeAttachment(name, order, calls) for name, order in orders.items()])
    ask(core)
    core.step()
    core.close()
    names = ["first", "second", "third", "late"]
    assert calls == [
        f"{name}: {what}"
        for what in (
            "accept a", "hear Request", "answers", "before_plan 0", "hear plan", "on_step next 0",
            "on_step done 0", "hear StepResult", "close",
        )
        for name in names
    ]  # fmt: skip


def test_built_in_attachments_are_in_order(tmp_path: Path) -> None:
    """Retained files come before other attachments that close, drafting after grammars, the
    recorder last."""
    settings = {
        "max_num_queued_reqs": 9,
        "kv_disk_dir": str(tmp_path / "blocks"),
        "kv_host_gb": 0.001,
        "record": str(tmp_path / "record"),
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
        "max_model_len": LENGTH,
        "kv_cache_memory_bytes": 1 << 20,
    }
    config = config_from_flat(model=str(checkpoint("qwen3")), **settings)
    core = build_core(config, resolve_model(config.model.model), FakeClock()).core
    found = [each.order for each in core.attachments.all if each.order != Order.OTHERS]
    core.close()
    assert found == [
        Order.QUEUE_LIMIT,
        Order.RETAINED_FILES,
        Order.STORES,
        Order.GRAMMARS,
        Order.LOADING,
        Order.PAUSING,
        Order.PAUSING,
        Order.PAUSING,
        Order.DRAFTING,
        Order.RECORDER,
    ]
    assert list(Order) == sorted(Order), "Order does not list its members in the order of calls"
    assert Attachment.order == Order.OTHERS


class Watcher(DoorWatcher):
    """Logs each call and forwards it."""

    order = Order.RECORDER

    def __init__(self, scheduler: Scheduler, calls: list[str]) -> None:
        self._scheduler, self._calls = scheduler, calls

    def add(self, request: Request, now: float) -> Decisions:
        self._calls.append(f"door: add {request.priority}")
        return self._scheduler.add(request, now)

    def control(self, message: Any, now: float) -> Decisions:
        self._calls.append("door: control")
        return self._scheduler.control(message, now)

    def schedule(self, now: float) -> Decisions:
        self._calls.append("door: schedule")
        return self._scheduler.schedule(now)

    def update(self, result: StepResult, now: float) -> Decisions:
        self._calls.append("door: update")
        return self._scheduler.update(result, now)


def test_door_watcher_sees_each_call_as_the_scheduler_gets_it() -> None:
    calls: list[str] = []

    class Raises(Attachment):
        def accept(self, request: Request) -> Request:
            return msgspec.structs.replace(request, priority=5)

    core = make_core(FakeAttachment(calls=calls))
    watcher = Watcher(core.scheduler, calls)
    core.attach(watcher)
    core.attach(Raises())
    ask(core)
    core.step()
    shown = [call for call in calls if "accept" in call or "hear" in call or "door" in call]
    assert shown == [
        "fake: accept a", "door: add 5", "fake: hear Request",
        "door: schedule", "fake: hear plan", "door: update", "fake: hear StepResult",
    ]  # fmt: skip
    with pytest.raises(AssertionError, match="at most one"):
        core.attach(Watcher(core.scheduler, calls))
    core.detach(watcher)
    assert core.doors is core.scheduler


def test_recorder_watches_the_doors(tmp_path: Path) -> None:
    core = make_core()
    recorder = Recorder(core.scheduler, tmp_path, 1 << 20)
    core.attach(recorder)
    assert core.doors is attached(core, Recorder) is recorder
    core.close()
    assert not recorder.is_recording


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["hear", "answers", "before_plan", "on_step"])
def test_engine_stops_when_a_vital_attachment_fails(method: str) -> None:
    core = make_core()
    ask(core)
    core.attach(FakeAttachment(raises_in=method))
    with pytest.raises(EngineError, match="cannot continue: ValueError: fake was made to fail"):
        core.step()
    assert core.has_failed
    with pytest.raises(EngineError, match="has stopped: .*fake was made to fail"):
        core.step()


def test_engine_stops_when_a_vital_attachment_fails_in_add() -> None:
    core = make_core(FakeAttachment(raises_in="hear"))
    with pytest.raises(EngineError, match="cannot continue: ValueError"):
        ask(core)
    with pytest.raises(EngineError, match="has stopped"):
        core.step()


@pytest.mark.parametrize("method", sorted(METHODS - {"close"}))
def test_failing_optional_attachment_is_detached_without_effect(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    plain = make_core()
    ask(plain, num_tokens=5)
    expected = [each.token_ids for each in run(plain)]
    core = make_core(
        FakeAttachment("bad", 10, calls, is_vital=False, raises_in=method),
        FakeAttachment("good", 20, calls),
    )
    ask(core, num_tokens=5)
    assert [each.token_ids for each in run(core)] == expected
    bad = [call for call in calls if call.startswith("bad")]
    assert sum(method in call for call in bad) == 1, "it was called again after it failed"
    good = [call for call in calls if call.startswith("good")]
    assert sum("on_step done" in call for call in good) == 5
    assert "FakeAttachment is detached: it raised ValueError: bad was made to fail" in caplog.text


def test_other_attachments_close_when_one_fails_to(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    core = make_core(
        FakeAttachment("bad", 10, calls, raises_in="close"), FakeAttachment("good", 20, calls)
    )
    closed: list[bool] = []
    core.executor.close = lambda: closed.append(True)  # type: ignore[method-assign]
    core.close()
    assert calls == ["bad: close", "good: close"] and closed == [True]
    assert "FakeAttachment did not close" in caplog.text


def test_outputs_are_delivered_before_events() -> None:
    core, received = make_core(), list[str]()
    core.subscribe(lambda event: received.append("event"))
    ask(core)
    outputs = core.advance(lambda outputs: received.append("outputs"))
    assert len(outputs.rows) == 1
    assert received[0] == "outputs" and set(received[1:]) == {"event"}


def test_subscriber_error_reaches_the_caller_and_the_engine_continues() -> None:
    core = make_core()

    def fail(event: Any) -> None:
        raise ValueError("a subscriber")

    core.subscribe(fail)
    ask(core)
    with pytest.raises(ValueError, match="a subscriber"):
        core.step()
    core.unsubscribe(fail)
    while core.has_work:  # its first outputs are lost
        core.step()


# ---- a plug-in ----------------------------------------------------------------------------------


def test_token_limit_plug_in_cancels_requests_over_the_limit() -> None:
    """The plug-in has less than sixty lines and no other effect."""
    source = Path(inspect.getfile(TokenLimit)).read_text("utf-8")
    assert len(source.splitlines()) < 60
    limit = TokenLimit(max_tokens=10)
    core = make_core(limit, depth=2)
    ask(core, "mine", 40, tenant="ours")
    ask(core, "others", 20, tenant="theirs")
    ask(core, "few", 4, tenant="few")
    found = run(core)
    ends = {each.request_id: reason_of(each) for each in found if each.finish is not None}
    assert ends == {"mine": "abort", "others": "abort", "few": "length"}
    num = {name: sum(len(e.token_ids) for e in found if e.request_id == name) for name in ends}
    assert num["few"] == 4
    assert all(10 < num[name] <= 13 for name in ("mine", "others")), num
    assert limit.num_tokens == {"ours": num["mine"], "theirs": num["others"], "few": 4}
    assert np.all([pool.num_used == 0 for pool in core.scheduler.memory.kv.pools])
