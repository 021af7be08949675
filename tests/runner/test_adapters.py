"""Adapters of a runner's rows: which tokens use which slot, and which adapters stay in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.base.errors import EngineError, ModelError
from quire.base.plan import Plan, RowFork, RowStart
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import config_from_flat
from quire.base.settings.lora import LoraConfig
from quire.models.checkpoint.adapter_files import adapter_digest
from quire.models.load.adapters import AdaptedModel
from quire.models.load.loading import load_model
from quire.runner.adapters import RowAdapters
from quire.runner.memory_plan import adapter_bytes
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.paged_forward import CPU
from tests.support.models.quick import first_of_each_type
from tests.support.runner.adapters import write_adapter

SHAPES = {"layer": (4, 4)}


class FakeSlots:
    def __init__(self) -> None:
        self.put_in: list[tuple[int, Any]] = []
        self.groups: Any = None

    def put(self, slot: int, parts: Any) -> None:
        self.put_in.append((slot, parts))

    def begin_step(self, groups: Any) -> None:
        self.groups = groups


class FakeModel:
    """A model that "loads" an adapter as the name of its directory."""

    def __init__(self) -> None:
        self.slots, self.loads = FakeSlots(), list[str]()

    def load(self, path: str, max_rank: int) -> str:
        self.loads.append(Path(path).name)
        return Path(path).name


class Bench:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.model = FakeModel()
        config = LoraConfig(enable_lora=True, **settings)
        self.adapters = RowAdapters(self.model, config)  # type: ignore[arg-type]
        self.folder = folder
        self.ids: dict[str, str] = {}
        for seed, name in enumerate("xyz"):
            self.ids[name] = adapter_digest(write_adapter(folder / name, SHAPES, seed=seed))

    def load(self, slot: int, name: str) -> None:
        self.adapters.load(slot, self.ids[name], str(self.folder / name))

    def start(self, row: int, name: str = "") -> RowStart:
        tokens, adapter_id = np.zeros(4, np.int32), self.ids[name] if name else ""
        return RowStart(row, tokens, 0, 4, SamplingParams(), 0, adapter_id=adapter_id)

    def groups(self, **plan: Any) -> dict[int, list[int]]:
        made = {
            key: np.array(each, np.int32) if key in ARRAYS else each for key, each in plan.items()
        }
        part = self.adapters.prepare(Plan(0, **made))
        part.before()
        assert part.can_be_recorded is not bool(part.groups)
        assert self.model.slots.groups == part.groups
        return {slot: list(rows) for slot, rows in part.groups}


ARRAYS = {"rows", "num_tokens", "released"}


def test_tokens_are_grouped_by_adapter(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_loras=2)
    bench.load(1, "x")
    bench.load(0, "y")
    started = [bench.start(5, "x"), bench.start(2), bench.start(7, "y"), bench.start(3, "x")]
    found = bench.groups(rows=[5, 2, 7, 3], num_tokens=[2, 3, 1, 2], started=started)
    assert found == {1: [0, 1, 6, 7], 0: [5]}
    assert bench.model.slots.put_in == [(1, "x"), (0, "y")]
    assert bench.groups(rows=[2, 7], num_tokens=[1, 1]) == {0: [1]}
    assert bench.groups(rows=[2], num_tokens=[1]) == {}


def test_forks_inherit_adapters_and_released_rows_lose_them(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.load(0, "x")
    assert bench.groups(rows=[1], num_tokens=[4], started=[bench.start(1, "x")])
    forked = [RowFork(1, 2, 1)]
    assert bench.groups(rows=[1, 2], num_tokens=[1, 1], forked=forked) == {0: [0, 1]}
    found = bench.groups(rows=[2], num_tokens=[1], released=[1])
    assert found == {0: [0]}
    # Another request takes the row; repeating the plan changes nothing.
    again = {"rows": [2, 1], "num_tokens": [1, 4], "started": [bench.start(2)], "released": [2]}
    for _ in range(2):
        assert bench.groups(**again) == {}


def test_adapter_is_unloaded_after_the_last_plan_that_uses_it(tmp_path: Path) -> None:
    """Its request ends while a plan with its row is in flight; another adapter takes the slot."""
    bench = Bench(tmp_path, max_loras=1)
    bench.load(0, "x")
    assert bench.groups(rows=[1], num_tokens=[4], started=[bench.start(1, "x")])
    bench.load(0, "y")
    bench.load(0, "z")  # the request for y has ended, too; a plan in flight starts it
    assert bench.groups(rows=[2], num_tokens=[4], started=[bench.start(2)]) == {}
    assert bench.groups(rows=[1], num_tokens=[1]) == {0: [0]}
    assert bench.model.slots.put_in == [(0, "x")]
    started = [bench.start(3, "y")]
    assert bench.groups(rows=[3], num_tokens=[2], started=started, released=[1]) == {0: [0, 1]}
    started = [bench.start(1, "z")]
    assert bench.groups(rows=[1], num_tokens=[2], started=started, released=[3]) == {0: [0, 1]}
    assert bench.model.slots.put_in == [(0, "x"), (0, "y"), (0, "z")]


def test_adapter_moves_to_another_slot_while_rows_use_it(tmp_path: Path) -> None:
    """Another adapter takes its first slot, and it is loaded into a second one."""
    bench = Bench(tmp_path, max_loras=2)
    bench.load(0, "x")
    assert bench.groups(rows=[1], num_tokens=[4], started=[bench.start(1, "x")])
    bench.load(0, "y")
    bench.load(1, "x")
    started = [bench.start(2, "x")]
    found = bench.groups(rows=[2], num_tokens=[1], started=started, released=[1])
    assert found == {0: [0]}
    started = [bench.start(3, "y")]
    assert bench.groups(rows=[2, 3], num_tokens=[1, 1], started=started) == {1: [0], 0: [1]}


def test_least_recently_used_adapters_are_unloaded(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_loras=1, max_cpu_loras=2)
    for name in "xyxzxy":
        bench.load(0, name)
    assert bench.model.loads == ["x", "y", "z", "y"]


def test_changed_files_are_refused_unless_already_in_memory(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.load(0, "x")
    for name in "xy":
        write_adapter(tmp_path / name, SHAPES, seed=9)
    bench.load(0, "x")
    with pytest.raises(ModelError, match="have changed"):
        bench.load(0, "y")


def test_row_whose_adapter_has_no_slot_raises(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with pytest.raises(EngineError, match="in no slot"):
        bench.groups(rows=[1], num_tokens=[4], started=[bench.start(1, "x")])


@pytest.mark.parametrize(
    "variant",
    ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(first_of_each_type()))],
)
def test_memory_plan_has_room_for_adapters(variant: str, tmp_path: Path) -> None:
    """Two adapters of rank 3 change all linear layers or those of one name; exact for llama."""
    made = write_checkpoint(tmp_path / "base", variant)
    model = load_model(made.directory, made.spec, torch.float32, CPU)
    places = AdaptedModel(model, made.spec, LoraConfig(max_loras=1), torch.float32).places
    settings: dict[str, Any] = {"max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": 3}
    settings |= {"model": str(made.directory), "dtype": "float32"}
    for target in ("", *sorted({name.rpartition(".")[2] for name in places})):
        config = config_from_flat(
            enable_lora=True, lora_target_modules=(target,) if target else (), **settings
        )
        changed = [place for name, place in places.items() if config.lora.may_change(name)]
        needed = sum(sum(place.shape) for place in changed) * 2 * 3 * 4
        planned = adapter_bytes(config, made.spec)
        assert needed <= planned, target
        assert variant != "llama" or needed == planned
    assert adapter_bytes(config_from_flat(**settings), made.spec) == 0


def test_memory_plan_omits_experts_that_adapters_may_not_change(
    tmp_path: Path,
) -> None:
    spec = write_checkpoint(tmp_path / "base", "qwen3_moe").spec
    settings: dict[str, Any] = {"enable_lora": True, "dtype": "float32"}
    names = (), ("router_logits",), ("q_proj", "experts"), ("q_proj",), ("experts",)
    everything, unknown, both, queries, of_experts = (
        adapter_bytes(config_from_flat(lora_target_modules=targets, **settings), spec)
        for targets in names
    )
    assert spec.experts is not None
    inner, numbers = spec.hidden_size + spec.experts.inner_size, spec.experts.num_experts * 3
    assert of_experts == 8 * 16 * spec.num_layers * numbers * inner * 4  # adapters, rank, bytes
    assert both == queries + of_experts
    assert everything == unknown + of_experts


def test_gpu_plan_has_slots_without_experts(tmp_path: Path) -> None:
    spec = write_checkpoint(tmp_path / "base", "qwen3_moe").spec
    settings: dict[str, Any] = {"enable_lora": True, "dtype": "float32", "max_cpu_loras": 12}
    dense = adapter_bytes(config_from_flat(lora_target_modules=("other",), **settings), spec)
    on_gpu = adapter_bytes(config_from_flat(device="cuda", **settings), spec)
    assert on_gpu == dense * 8 // 12
