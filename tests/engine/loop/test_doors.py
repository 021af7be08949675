"""Only the four doors change the scheduler's state.

The state is compared between all calls of an engine with stores, grammars, drafting, retained files
and KV events.

Covers `engine/attachments/stores.py`.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.base.errors import EngineError
from quire.base.messages import MeasuredRates, Request
from quire.base.plan import StepResult
from quire.base.requests.sampling_params import SamplingParams, StructuredOutputsParams
from quire.base.settings.config import config_from_flat
from quire.engine.attachments.drafting import DraftingAttachment
from quire.engine.attachments.grammars import GrammarAttachment
from quire.engine.attachments.order import Order
from quire.engine.attachments.retained_files import RetainedFiles
from quire.engine.attachments.stores import StoresAttachment
from quire.engine.client.admission import checked_grammar
from quire.engine.loop.attachment import DoorWatcher, Loop
from quire.engine.observability.live import LiveFrames
from quire.engine.start.build import build_engine
from quire.ops.host.native import core as native_core
from quire.scheduler.decisions import Decisions
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.snapshot import OMITTED, Deferred, dump, encode
from tests.engine.loop.test_attachment import ask as submit_to
from tests.engine.loop.test_attachment import make_core
from tests.support.engine.attachments import attached

if native_core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)


def state_of(scheduler: Scheduler) -> bytes:
    """Return all state of a scheduler except for the subscriptions of attachments."""

    def finish(value: Any) -> Any:
        assert isinstance(value, Deferred)
        return encode(value.value)

    return msgspec.msgpack.encode(dump(scheduler, OMITTED), enc_hook=finish)


class StateWatcher(DoorWatcher):
    """Compares the state before each call with the state after the previous call."""

    order = Order.RECORDER

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._state = state_of(scheduler)
        self._last = "the start"
        self.calls: set[str] = set()

    def _check(self, call: str) -> None:
        assert state_of(self._scheduler) == self._state, f"between {self._last} and {call}"

    def _pass(self, decisions: Decisions, call: str) -> Decisions:
        self._state, self._last = state_of(self._scheduler), call
        self.calls.add(call)
        return decisions

    def add(self, request: Request, now: float) -> Decisions:
        self._check("add")
        return self._pass(self._scheduler.add(request, now), "add")

    def control(self, message: Any, now: float) -> Decisions:
        self._check(type(message).__name__)
        return self._pass(self._scheduler.control(message, now), type(message).__name__)

    def schedule(self, now: float) -> Decisions:
        self._check("schedule")
        return self._pass(self._scheduler.schedule(now), "schedule")

    def update(self, result: StepResult, now: float) -> Decisions:
        self._check("update")
        return self._pass(self._scheduler.update(result, now), "update")

    def close(self, loop: Loop) -> None:
        self._check("close")


def test_state_does_not_change_between_two_calls(tmp_path: Path) -> None:
    config = config_from_flat(
        model="demo", max_num_seqs=4, max_model_len=256, kv_cache_memory_bytes=8 << 20,
        kv_disk_dir=str(tmp_path), kv_host_gb=0.01, disable_log_stats=True,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
        kv_events_config={"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:0"},
    )  # fmt: skip
    engine = build_engine(config)
    core = engine.client.core
    for kind in (StoresAttachment, GrammarAttachment, RetainedFiles, DraftingAttachment):
        assert attached(core, kind) is not None, kind
    watcher = StateWatcher(core.scheduler)
    core.attach(watcher)
    frames = LiveFrames(core, engine.client._clock)

    def ask(name: str, text: str, keep_s: float = 0.0, **params: Any) -> None:
        made = SamplingParams(**({"max_tokens": 12, "temperature": 0.0} | params))
        prompt = engine.renderer.render(text)
        grammar = checked_grammar(engine.renderer, made, prompt)
        request = engine.requests.make(prompt, made, name, grammar=grammar)
        core.add(msgspec.structs.replace(request, keep_s=keep_s))

    ask("plain", "Once upon a time there was a small house near the sea. " * 4)
    ask("again", "a b c d a b c d a b c d a b c d a b", max_tokens=20)
    choice = StructuredOutputsParams(choice=["yes", "no, never"])
    ask("grammar", "Is it so?", structured_outputs=choice)
    ask("held", "Hold this", keep_s=60.0)
    while core.has_work:
        core.step()
        core.view(), core.requests(), core.prefixes(), core.held(), frames.frame()
    assert len(core.held()) == 1
    ask("later", "Once upon a time there was")
    engine.client.close()
    expected = {"add", "schedule", "update", "GrammarReady", "Drafted", "LookedUp", "Kept"}
    expected |= {"MeasuredRates", "Abort", "Hold", "KeepCached"}
    assert watcher.calls >= expected, expected - watcher.calls


def test_watcher_detects_a_change_between_two_calls() -> None:
    core = make_core()
    watcher = StateWatcher(core.scheduler)
    core.attach(watcher)
    submit_to(core)
    core.step()
    core.scheduler.memory.rates = MeasuredRates(prefill_tokens_per_s=5.0)
    with pytest.raises(EngineError, match="between update and schedule"):
        core.step()
