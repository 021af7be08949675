"""Random requests with adapters that load, leave and fail: from the attachment to the rows' slots.

The attachment (`engine/attachments/adapters.py`) assigns slots; the runner's part
(`runner/adapters.py`) fills them between plans in flight. A plain model of the state checks each
plan: every row computes with its own adapter, and rows without one are in no group.
"""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire.base.errors import ModelError
from quire.base.events import Finished
from quire.base.messages import Request
from quire.base.plan import Plan, RowFork, RowStart
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.lora import LoraConfig
from quire.engine.attachments.adapters import AdapterAttachment
from quire.engine.executors.threaded import DeviceThread
from quire.ops.adapters import AdapterSlots, LoadedAdapter
from quire.runner import adapters
from quire.runner.adapters import RowAdapters
from quire.scheduler.decisions import Decisions

NUM_ADAPTERS, NUM_ROWS, NUM_EVENTS = 9, 12, 800
PARAMS = SamplingParams()


class NamedSlots(AdapterSlots):
    """Slots that remember the names of their adapters."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, 1)
        self.names = [""] * num_slots

    def put(self, slot: int, adapter: LoadedAdapter) -> None:
        self.names[slot] = str(adapter.parts)


class NamedModel:
    """A model that "loads" an adapter as its path. failing: paths whose loads fail."""

    def __init__(self, num_slots: int) -> None:
        self.slots, self.failing = NamedSlots(num_slots), set[str]()

    def load(self, path: str, max_rank: int) -> LoadedAdapter:
        if path in self.failing:
            raise ModelError("damaged")
        return LoadedAdapter(path)  # type: ignore[arg-type]


class Machine:
    """Requests that arrive, run, fork, end and fail. rows: the adapter of each running row."""

    def __init__(self, seed: int, num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng, self.model = random.Random(seed), NamedModel(num_slots)
        config = LoraConfig(enable_lora=True, max_loras=num_slots, max_cpu_loras=num_slots + 1)
        self.runner = RowAdapters(self.model, config)  # type: ignore[arg-type]
        self._jobs: list[Any] = []
        monkeypatch.setattr(DeviceThread, "__init__", lambda *_, **__: None)
        monkeypatch.setattr(DeviceThread, "do", lambda _, job: self._jobs.append(job))
        monkeypatch.setattr(adapters, "digest_of", lambda path: path)
        self.attachment = AdapterAttachment(self.runner.load, num_slots, lambda: None)
        self.waiting: dict[str, str] = {}  # adapter by waiting request
        self.rows: dict[int, tuple[str, str]] = {}  # request and adapter by row
        self.started, self.released = list[RowStart](), list[int]()
        self.forked = list[RowFork]()
        self.num_run = self.num_failed = self.step = 0

    def arrive(self, number: int) -> None:
        name, adapter = f"r{number}", f"/a{self.rng.randrange(NUM_ADAPTERS)}"
        if self.rng.random() < 0.2:
            adapter = ""
        request = Request(name, [1], PARAMS, 0, adapter_id=adapter, adapter_path=adapter)
        marked = self.attachment.accept(request)
        assert marked.awaits_adapter is bool(adapter)
        self.attachment.hear(marked, Decisions())
        self.waiting[name] = adapter
        if not adapter:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a request in a free row; without a free row, end it immediately."""
        adapter, free = self.waiting.pop(name), [r for r in range(NUM_ROWS) if r not in self.rows]
        self.num_run += 1
        if not free:
            self.end(name)
            return
        row = self.rng.choice(free)
        self.rows[row] = name, adapter
        tokens = np.zeros(1, np.int32)
        self.started.append(RowStart(row, tokens, 0, 1, PARAMS, 0, adapter_id=adapter))

    def fork(self) -> None:
        """Fork a row of an earlier plan into a free row."""
        new = {start.row for start in self.started}
        parents = [row for row in self.rows if row not in new]
        free = [row for row in range(NUM_ROWS) if row not in self.rows]
        if parents and free:
            parent, child = self.rng.choice(parents), self.rng.choice(free)
            self.rows[child] = self.rows[parent]
            self.forked.append(RowFork(parent, child, 0))

    def leave(self) -> None:
        """End a random request, running or waiting."""
        names = sorted({name for name, _ in self.rows.values()} | self.waiting.keys())
        new = {start.row for start in self.started} | {fork.child for fork in self.forked}
        name = self.rng.choice(names) if names else ""
        own = [row for row, (request, _) in self.rows.items() if request == name]
        if not name or new & set(own) or any(fork.parent in own for fork in self.forked):
            return
        self.waiting.pop(name, None)
        for row in own:
            del self.rows[row]
            self.released.append(row)
        self.end(name)

    def end(self, name: str) -> None:
        self.attachment.hear(None, Decisions(events=[Finished(0.0, name, "stop", 1)]))

    def load(self) -> None:
        """End the oldest load, which may fail."""
        every = (f"/a{number}" for number in range(NUM_ADAPTERS))
        self.model.failing = {path for path in every if self.rng.random() < 0.4}
        if self._jobs:
            self._jobs.pop(0)()

    def answer(self) -> None:
        for message in self.attachment.answers(0.0):
            if message.request_id not in self.waiting:
                continue
            if message.error is None:
                self.start(message.request_id)
            else:
                assert message.error == "damaged"
                self.num_failed += 1
                del self.waiting[message.request_id]
                self.end(message.request_id)

    def plan(self) -> None:
        """Run a plan of some rows, and compare its groups with the model of the state."""
        new = {start.row for start in self.started} | {fork.child for fork in self.forked}
        others = [row for row in self.rows if row not in new and self.rng.random() < 0.7]
        rows = [*new, *others]
        lens = [self.rng.randint(1, 3) for _ in rows]
        made = Plan(
            self.step, np.array(rows, np.int32), np.array(lens, np.int32),
            released=np.array(self.released, np.int32), started=tuple(self.started),
            forked=tuple(self.forked),
        )  # fmt: skip
        self.step += 1
        self.started, self.released, self.forked = [], [], []
        part = self.runner.prepare(made)
        found = {token: self.model.slots.names[slot] for slot, own in part.groups for token in own}
        wanted = [self.rows[row][1] for row, n in zip(rows, lens, strict=True) for _ in range(n)]
        assert [found.get(token, "") for token in range(len(wanted))] == wanted

    def events(self) -> Iterator[None]:
        for number in range(NUM_EVENTS):
            choice = self.rng.random()
            if choice < 0.2:
                self.arrive(number)
            elif choice < 0.45:
                self.leave()
            elif choice < 0.55:
                self.fork()
            elif choice < 0.8:
                self.load()
            self.answer()
            self.plan()
            yield


@pytest.mark.parametrize(("seed", "num_slots"), [(1, 1), (2, 2), (3, 3), (4, 5)])
def test_every_row_computes_with_its_own_adapter(
    seed: int, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(seed, num_slots, monkeypatch)
    for _ in machine.events():
        pass
    for _ in range(40 * NUM_ADAPTERS):  # every request ends
        machine.leave()
        machine.load()
        machine.answer()
        machine.plan()
    assert not machine.waiting and not machine.attachment.pending.num_open
    assert machine.num_run > 50 and machine.num_failed > 5
