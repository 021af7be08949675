"""Recordings of engines with stores replay to the same plans and orders.

They replay from the start and from the middle, and contain no names of stores. A replay detects a
scheduler with different look-ups."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis.stateful import invariant

from quire import LLM
from quire.engine.attachments.recorder import Recorder
from quire.engine.recording.calls import CONTROL, calls_of
from quire.engine.recording.files import read_recording, segment_paths
from quire.ops.host.native import core
from quire.scheduler.reuse.stores import Stores
from quire.tools.replay import replay_all
from quire.tools.replay_model import replay_with_model
from tests.engine.attachments.test_recorder import Recorded, bodies
from tests.scheduler.test_scheduler_machine import MixedStoresMachine, StoresMachine
from tests.serve.test_host_tier import PARAMS
from tests.serve.test_same_bits import open_llm
from tests.support.cases import slow_but
from tests.support.engine.attachments import attached
from tests.support.engine.recorded_runs import begin_segment, replayed
from tests.support.models.checkpoints import random_tokens
from tests.support.models.reference_checkpoints import checkpoint, pool_bytes
from tests.support.scheduler.state_machines import run_machine

if core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)


PROMPTS = [{"prompt_token_ids": tokens} for tokens in random_tokens(*[40] * 6, seed=3)]


def recorder_of(llm: LLM) -> Recorder:
    recorder = attached(llm.engine.client.core, Recorder)
    assert recorder is not None
    return recorder


def record(folder: Path, name: str, segments: bool = False, **settings: Any) -> Path:
    """Record a run whose pool is too small for its prompts. Runs in `folder` share a store."""
    pool = pool_bytes(checkpoint("qwen3"), 30, 4, 4)
    few: dict[str, Any] = {"kv_cache_memory_bytes": pool, "max_num_seqs": 2, "dtype": "float32"}
    few |= {"kv_disk_dir": str(folder / "a secret place"), "record": str(folder / name)}
    with open_llm("qwen3", **(few | settings)) as llm:
        for i, prompt in enumerate(PROMPTS * 2):
            if segments and i % 3 == 1:
                begin_segment(recorder_of(llm))
            if i == 8:
                llm.reset_prefix_cache()
            llm.generate([prompt, PROMPTS[0]], PARAMS, use_tqdm=False)
    return folder / name


@pytest.mark.parametrize(
    ("keeps_tokens", "depth", "eager"),
    [
        (False, 2, True),
        pytest.param(True, 1, False, marks=pytest.mark.slow),
        pytest.param(False, 1, False, marks=pytest.mark.slow),
        pytest.param(True, 2, True, marks=pytest.mark.slow),
    ],
)
def test_run_with_a_store_replays_exactly(
    tmp_path: Path, keeps_tokens: bool, depth: int, eager: bool
) -> None:
    settings: dict[str, Any] = {"record_tokens": keeps_tokens, "pipeline_depth": depth}
    settings["kv_eager"] = eager
    kinds: list[set[str]] = []
    for name in ("first", "second"):  # the second run finds the blocks of the first
        path = record(tmp_path, name, segments=name == "second", **settings)
        assert replayed(path).num_requests == 24
        calls = [call for s in read_recording(path) for call in calls_of(s.items)]
        kinds.append({type(call.value).__name__ for call in calls if call.kind == CONTROL})
        orders = [order for call in calls for order in call.orders]
        tickets = [order["ticket"] for order in orders]
        assert tickets == sorted(set(tickets)), "an order is recorded twice"
        assert {order["order"] for order in orders} >= {"LookUp", "Keep"}
    assert {"LookedUp", "Kept", "ResetPrefixCache"} <= kinds[0] and "Fetched" in kinds[1]
    assert len(segment_paths(tmp_path / "second")) == 5
    for path in segment_paths(tmp_path / "second"):  # each segment alone, from its snapshot
        replayed(path)


class RecordedAtOnce(Recorded):
    """Recorded from the first call on, with pending orders and with blocks of other engines."""

    @invariant()
    def is_recorded(self) -> None:
        if self.recorder is None and "scheduler" in vars(self):
            self.stores.has_others = True
            self.record(keeps_tokens=len(list(self.folder.iterdir())) % 2 == 0)


@pytest.mark.parametrize("max_examples", [5, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", slow_but((StoresMachine, MixedStoresMachine), MixedStoresMachine))
def test_random_programs_replay_with_every_kind_of_order(
    tmp_path: Path, kind: type, max_examples: int
) -> None:
    machine = type("RecordedMachine", (RecordedAtOnce, kind), {"folder": tmp_path})
    run_machine(machine, max_examples)
    orders = Counter(
        order["order"]
        for path in tmp_path.iterdir()
        for segment in read_recording(path)
        for call in calls_of(segment.items)
        for order in call.orders
    )
    assert {"LookUp", "Fetch", "Keep", "Remove"} <= orders.keys(), orders


def test_recording_omits_the_path_of_the_store(tmp_path: Path) -> None:
    path = record(tmp_path, "run", segments=True, record_tokens=True)
    found = [body for path in segment_paths(path) for body in bodies(path)]
    assert len(found) > 5 and not any(b"secret place" in body for body in found)


def difference_of(path: Path) -> Any:
    found = replay_all(read_recording(path)).difference
    assert found is not None
    return found


def test_replay_detects_different_orders_to_stores(tmp_path: Path, monkeypatch) -> None:
    """Unordered results and orders without a result both end in a difference."""
    path = record(tmp_path, "first")
    path = record(tmp_path, "second")
    with monkeypatch.context() as patch:
        patch.setattr(Stores, "look_up", lambda self, s, *_: not self._memory.names.readable(s))
        found = difference_of(path)
        assert found.subject == "an order to a store, LookUp," and found.replayed == "none"
        assert found.during.startswith("add request ")
    with monkeypatch.context() as patch:
        allocate, given = Stores._order, []

        def one_block_less(self, wait, store, names):
            given.append(names)
            allocate(self, wait, store, names[:-1])

        patch.setattr(Stores, "_order", one_block_less)
        found = difference_of(path)
        assert given and found.subject == "an order to a store, Fetch.host_blocks,"
        assert "entries" in found.recorded != found.replayed
    with monkeypatch.context() as patch:
        patch.setattr(Stores, "_take_looked_up", lambda self, answer: None)  # requests wait forever
        assert difference_of(path).subject == "whether there is a plan"
    replayed(path)


def test_replay_with_the_model_stops_at_blocks_from_a_store(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"record_tokens": True, "pipeline_depth": 1}
    first = record(tmp_path, "first", kv_host_gb=0.01, **settings)
    second = record(tmp_path, "second", **settings)
    before = sorted(path for path in (tmp_path / "a secret place").rglob("*"))
    outcome = replay_with_model(read_recording(first), {})
    assert outcome.difference is None and "sampled tokens are identical" in outcome.notes[-1]
    outcome = replay_with_model(read_recording(second), {})
    assert outcome.difference is None and "came from a store" in outcome.notes[0]
    assert sorted(path for path in (tmp_path / "a secret place").rglob("*")) == before
