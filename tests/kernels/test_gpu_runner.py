"""A GPU's runner, told everything long before the device does it; against the CPU's runner.

Plans are launched as far ahead as the scheduler allows, and nothing is done before a result is
asked for: pinned slots, rows and results are reused while all of that is still to come.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quire.base.config import config_from_flat
from quire.base.messages import Request
from quire.base.plan import BlockWrites, HostTokens, Plan, RowFork, RowStart
from quire.base.sampling_params import SamplingParams
from quire.base.step_outputs import StepReader
from quire.engine.bisect import combine
from quire.engine.build import make_scheduler
from quire.models.source import resolve_model
from quire.ops.kernels.launch import INTERPRETED
from quire.runner.build import BuiltRunner, build_runner
from quire.runner.gpu import slots
from quire.runner.gpu.columns import PROMPT_COLUMN
from quire.runner.gpu.rows import GpuRows
from quire.runner.gpu.runner import GpuRunner
from quire.runner.gpu.slots import Changes, SlotRing
from tests.kernels.late_device import LateDevice
from tests.kernels.test_gpu_engine import devices  # noqa: F401 (a fixture)
from tests.serve.checkpoints import checkpoint
from tests.updates import read

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the stand-in's memory is the CPU's")

SETTINGS = {
    "dtype": "float32",
    "device": "cpu",
    "max_num_seqs": 3,
    "max_num_batched_tokens": 20,
    "block_size": 4,
    "pipeline_depth": 6,
    "kv_cache_memory_bytes": 40 * 2 * 2 * 2 * 4 * 8 * 8,
    "max_model_len": 40,
}


def build(backend: str, **settings: Any) -> BuiltRunner:
    path = str(checkpoint("llama"))
    config = config_from_flat(model=path, attention_backend=backend, **SETTINGS | settings)
    return build_runner(config, resolve_model(path, None))


def requests() -> list[Request]:
    found = []
    for i in range(6):
        params = SamplingParams(
            temperature=0.0 if i % 2 else 0.9,
            presence_penalty=0.5 * (i % 3),
            max_tokens=4 + i,
            n=2 if i == 4 else 1,
            ignore_eos=True,
        )
        prompt = [(11 * i + 3 * j) % 97 for j in range(5 + 4 * (i % 4))]
        found.append(Request(f"r{i}", prompt, params, seed=i))
    return found


def drive(built: BuiltRunner, device: LateDevice | None = None) -> dict[tuple[str, int], list[int]]:
    """The tokens of all sequences. Plans are launched as far ahead as possible."""
    scheduler = make_scheduler(built, resolve_model(str(checkpoint("llama")), None))
    for request in requests():
        scheduler.add(request, 0.0)
    in_flight: deque[Any] = deque()
    tokens: dict[tuple[str, int], list[int]] = {}
    reader = StepReader()
    while scheduler.has_work:
        while (plan := scheduler.schedule(0.0)) is not None:
            in_flight.append((plan, built.runner.launch(plan)))
        if device is not None and len(in_flight) > 1:
            assert not in_flight[-1][1].is_done(), "nothing is done before it must be"
        plan, pending = in_flight.popleft()
        result = pending.result() if len(plan.rows) else combine(plan, [])
        outputs = scheduler.update(result, 0.0)
        assert not result.row_errors
        for update in read(reader, outputs):
            tokens.setdefault((update.request_id, update.index), []).extend(update.token_ids)
    return tokens


@pytest.mark.parametrize("room", ["large", "small"])
def test_everything_is_told_long_before_it_is_done(
    room: str,
    devices: list[LateDevice],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With small slots the changes of a plan need several, and the ring is often full."""
    if room == "small":
        monkeypatch.setattr(slots, "MOST_TOKENS", 7)
        monkeypatch.setattr(slots, "MOST_DELTAS", 9)
        monkeypatch.setattr(slots, "MOST_RUNS", 2)
        monkeypatch.setattr(slots, "NUM_SLOTS", 3)
        monkeypatch.setattr(slots, "LONGEST_RUN", 5)
    built = build("triton")
    found = drive(built, devices[-1] if room == "large" else None)
    assert devices[-1].most_waiting >= (5 if room == "large" else 2)
    assert found == drive(build("torch"))
    assert sum(len(tokens) for tokens in found.values()) == sum(4 + i for i in range(6)) + 8


READS: list[Callable[[torch.Tensor], Any]] = [
    bool, int, range, lambda x: x.item(), lambda x: x.cpu(), lambda x: x.tolist()
]  # fmt: skip


@pytest.mark.parametrize("read", READS)
def test_a_value_that_is_read_on_the_way_is_noticed(read: Callable[[torch.Tensor], Any]) -> None:
    device = LateDevice(torch.device("cpu"))
    value = torch.ones(1, dtype=torch.int64)
    arrival = device.run(lambda: [read(value)][1:])
    with pytest.raises(AssertionError, match="the host waits"):
        arrival.wait()
    assert read(value) is not None


class TestSlots:
    def test_a_slot_waits_until_it_was_read(self) -> None:
        device = LateDevice(torch.device("cpu"))
        ring = SlotRing(device, 4, num_slots=2)
        seen: list[int] = []
        for number in range(5):
            slot = ring.take()
            slot.array[0] = number
            slot.used = device.run(lambda slot=slot: [seen.append(int(slot.array[0]))][1:])
        device.run(list).wait()
        assert seen == [0, 1, 2, 3, 4]

    def test_of_several_deltas_for_one_place_the_last_counts(self) -> None:
        first = np.array([(0, 3, 1, 10), (1, 3, 1, 20), (0, 3, 1, 30)], np.int32)
        changes = Changes([first, np.array([(1, 3, 1, 40), (-1, 3, 1, 50)], np.int32)])
        wanted = {(0, 3, 1, 30), (1, 3, 1, 40), (-1, 3, 1, 50)}
        assert set(map(tuple, changes.merged_deltas().tolist())) == wanted

    def test_runs_that_overlap_are_not_written_at_once(self) -> None:
        ring = SlotRing(LateDevice(torch.device("cpu")), 4)
        texts = [np.arange(n, dtype=np.int32) for n in (5, 2, 3)]
        changes = Changes(runs=[(1, 0, texts[0]), (1, 3, texts[1]), (2, 3, texts[2])])
        parts = [[run[:2] for run in part.runs] for part in ring.pack(changes)]
        assert parts == [[(1, 0)], [(1, 3), (2, 3)]]


def test_a_plan_changes_the_rows_in_its_order() -> None:
    """A row starts, is forked twice, a fork is forked; then tokens and tables are written."""
    device = LateDevice(torch.device("cpu"))
    rows = GpuRows(device, 5, 16, 1, 4)
    params = SamplingParams(temperature=0.0)
    start = RowStart(2, np.arange(7, dtype=np.int32), 3, 7, params, seed=9)
    column = np.array([1], np.int32)
    plan = Plan(
        1,
        started=(start,),
        forked=(RowFork(2, 0, 5), RowFork(0, 4, 6), RowFork(2, 1, 7)),
        truncated=((0, 2),),
        host_tokens=(HostTokens(4, 7, np.array([70, 71], np.int32), is_prompt=True),),
        block_writes=BlockWrites(0 * column, column, column, 33 * column),
    )
    rows.run_with(rows.apply(plan, lambda row: False), list)
    device.run(list).wait()
    tokens = rows.state.tokens_RM[:, :9].tolist()
    assert tokens[0] == tokens[1] == tokens[2] == [*range(7), 0, 0]
    assert tokens[4] == [*range(7), 70, 71]
    assert rows.state.computed_R.tolist() == [2, 3, 3, 0, 3]
    assert rows.state.wide_CR[1:].T.tolist() == [
        [9, 5, 7], [9, 7, 7], [9, 0, 7], [0, 0, 0], [9, 6, 9]
    ]  # fmt: skip
    assert rows.state.wide_CR[PROMPT_COLUMN].tolist() == rows.prompt_lens.tolist()
    assert rows.state.tables_GRL[0, 1, 1] == 33 and rows.state.tables_GRL.sum() == 33


def test_a_launch_that_fails_can_be_repeated(devices: list[LateDevice]) -> None:  # noqa: F811
    """At its last launch: the counters have not moved, and the next try gives the same token."""
    found = []
    for fails in (False, True):
        built = build("triton")
        runner = built.runner
        assert isinstance(runner, GpuRunner)
        scheduler = make_scheduler(built, resolve_model(str(checkpoint("llama")), None))
        scheduler.add(requests()[1], 0.0)
        plan = scheduler.schedule(0.0)
        assert plan is not None
        if fails:
            model, runner.model = runner.model, None  # type: ignore[assignment]
            with pytest.raises(TypeError):
                runner.launch(plan).result()
            runner.model = model
        found.append(runner.launch(plan).result().token_ids.tolist())
    assert found[0] == found[1]
