"""Slots of adapters: which requests wait, which adapter is unloaded, and what errors do."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from quire.base.errors import EngineError, ModelError, RequestError
from quire.base.events import Event, Finished
from quire.base.messages import AdapterReady, Request
from quire.base.requests.sampling_params import SamplingParams
from quire.engine.attachments.adapters import AdapterAttachment, NoAdapters
from quire.engine.executors.threaded import DeviceThread
from quire.scheduler.decisions import Decisions


class Bench:
    """An attachment whose loads end when a test says so. errors: by adapter, of its load."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_slots: int) -> None:
        self.loads: list[tuple[int, str]] = []  # slot, adapter
        self.errors: dict[str, Exception] = {}
        self._jobs: list[Any] = []
        monkeypatch.setattr(DeviceThread, "__init__", lambda *_, **__: None)
        monkeypatch.setattr(DeviceThread, "do", lambda _, job: self._jobs.append(job))
        self.attachment = AdapterAttachment(self._load, num_slots, lambda: None)

    def _load(self, slot: int, adapter_id: str, path: str) -> None:
        assert path == f"/{adapter_id}"
        self.loads.append((slot, adapter_id))
        if adapter_id in self.errors:
            raise self.errors[adapter_id]

    def ask(self, request_id: str, adapter_id: str) -> None:
        request = Request(
            request_id, [1], SamplingParams(), 0, adapter_id=adapter_id,
            adapter_path=f"/{adapter_id}",
        )  # fmt: skip
        self.hear(self.attachment.accept(request))

    def hear(self, given: Request | None, *events: Event) -> None:
        self.attachment.hear(given, Decisions(events=list(events)))

    def end(self, *request_ids: str) -> None:
        self.hear(None, *(Finished(0.0, name, "stop", 1) for name in request_ids))

    def load_all(self) -> list[str]:
        """End all loads. Return the ids of requests that may run or failed, with the errors."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job()
        return self.ready()

    def ready(self) -> list[str]:
        return [_shown(each) for each in self.attachment.answers(0.0)]


def _shown(message: AdapterReady) -> str:
    return message.request_id + ("" if message.error is None else f": {message.error}")


def test_a_request_without_an_adapter_is_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    attachment = Bench(monkeypatch, 1).attachment
    plain = Request("a", [1], SamplingParams(), 0)
    assert attachment.accept(plain) is plain
    assert not attachment.pending.num_open and not attachment.pending.has_answers


def test_a_request_runs_once_its_adapter_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, 2)
    bench.ask("a", "x")
    bench.ask("b", "x")
    assert bench.ready() == [] and bench.attachment.pending.num_open == 1
    assert bench.load_all() == ["a", "b"]
    assert len(bench.loads) == 1
    bench.ask("c", "x")
    assert bench.attachment.pending.has_answers
    assert bench.ready() == ["c"]


def test_least_recently_used_adapter_is_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, 2)
    for name in ("x", "y"):
        bench.ask(name, name)
    assert bench.load_all() == ["x", "y"]
    bench.end("x", "y")
    bench.ask("x2", "x")  # x is used more recently than y
    assert bench.ready() == ["x2"]
    bench.end("x2")
    bench.ask("z", "z")
    assert bench.load_all() == ["z"]
    assert bench.loads[-1] == (bench.loads[1][0], "z")


def test_adapter_in_use_is_never_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, 1)
    bench.ask("a", "x")
    assert bench.load_all() == ["a"]
    bench.ask("b", "y")
    assert bench.load_all() == [] and bench.attachment.pending.num_open == 0
    bench.ask("c", "x")  # queues behind b, which would starve otherwise
    assert bench.ready() == []
    bench.end("a")
    assert bench.load_all() == ["b"]
    bench.end("b")
    assert bench.load_all() == ["c"]
    assert [adapter for _, adapter in bench.loads] == ["x", "y", "x"]


def test_loads_continue_after_waiting_requests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, 1)
    bench.ask("a", "x")
    bench.ask("b", "y")
    bench.ask("c", "z")
    bench.end("a", "b")
    assert bench.load_all() == []  # ends the load of x, whose request is gone
    assert bench.load_all() == ["c"]


@pytest.mark.parametrize("error", [ModelError("bad files"), ValueError("surprise")])
def test_load_error_fails_the_request_and_frees_the_slot(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    bench = Bench(monkeypatch, 1)
    bench.errors["x"] = error
    bench.ask("a", "x")
    bench.ask("b", "y")
    [found] = bench.load_all()
    assert found.startswith("a: ") and str(error) in found
    bench.end("a")
    assert bench.load_all() == ["b"]


def test_random_requests_run_or_fail_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some loads fail. A request that runs has its adapter in a slot."""
    rng = random.Random(7)
    bench = Bench(monkeypatch, 3)
    running: dict[str, str] = {}
    adapters: dict[str, str] = {}
    in_slot: dict[int, str] = {}
    answered = 0

    def take(found: Sequence[str]) -> None:
        nonlocal answered
        for text in found:
            name, _, error = text.partition(": ")
            answered += 1
            if error:
                bench.end(name)
            else:
                running[name] = adapters[name]
                assert adapters[name] in in_slot.values()

    for number in range(600):
        choice = rng.random()
        if choice < 0.4:
            name, adapter = f"{number}", f"adapter-{rng.randrange(8)}"
            adapters[name] = adapter
            bench.errors.clear()
            if rng.random() < 0.2:
                bench.errors[adapter] = EngineError("it fails now")
            bench.ask(name, adapter)
        elif choice < 0.7 and running:
            name = rng.choice(sorted(running))
            del running[name]
            bench.end(name)
        seen = len(bench.loads)
        found = bench.load_all()
        for slot, adapter in bench.loads[seen:]:
            assert in_slot.get(slot) not in running.values(), "an adapter in use was unloaded"
            in_slot[slot] = adapter
        take(found)
    while running:
        bench.end(*running)
        running.clear()
        for _ in range(3):
            seen = len(bench.loads)
            found = bench.load_all()
            in_slot |= dict(bench.loads[seen:])
            take(found)
    assert answered == len(adapters)


def test_an_engine_without_adapters_refuses_requests_with_one() -> None:
    plain = Request("a", [1], SamplingParams(), 0)
    assert NoAdapters().accept(plain) is plain
    with pytest.raises(RequestError, match="has no adapters"):
        NoAdapters().accept(Request("a", [1], SamplingParams(), 0, adapter_id="x"))
