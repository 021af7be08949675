"""Requests with adapters on a GPU: tokens as on a CPU by torch, by steps that stay recorded.

The device is a stand-in that works late, and Triton's interpreter runs the kernels.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from quire import LLM, LoRARequest, SamplingParams
from quire.base.errors import ConfigError, EngineError, ModelError, OutOfMemory
from quire.base.plan import Plan, RowStart
from quire.base.settings.config import config_from_flat
from quire.base.settings.lora import LoraConfig
from quire.engine.drafting.draft_pace import StepTimes
from quire.models.checkpoint.adapter_files import adapter_digest
from quire.models.load.adapters import AdaptedModel
from quire.models.load.loading import load_model
from quire.models.parts import layers
from quire.ops import gpu
from quire.ops.elementwise import silu_mul
from quire.ops.kernels.launch import INTERPRETED
from quire.runner.gpu import adapters as gpu_adapters
from quire.runner.gpu import graphs
from quire.runner.gpu.adapters import DeviceRowAdapters, DeviceSlots, DeviceStepAdapters
from quire.runner.steps import PlainStep
from quire.spec.model_spec import load_spec
from tests.runner.gpu.test_kernel_ops import devices  # noqa: F401 (a fixture)
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.paged_forward import CPU
from tests.support.models.reference_checkpoints import checkpoint, shallow
from tests.support.runner.adapters import adaptable_shapes, write_adapter
from tests.support.runner.late_device import on_the_host

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the stand-in's memory is the CPU's")

RANKS = 1, 8, 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPTS: list[Any] = [
    {"prompt_token_ids": [(7 * i + j) % 97 for j in range(3 + 4 * i)]} for i in range(3)
]
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "max_model_len": 48, "block_size": 4, "max_num_seqs": 3,
    "max_num_batched_tokens": 24, "kv_cache_memory_bytes": 1 << 20, "disable_log_stats": True,
    "enable_lora": True, "max_lora_rank": 64,
}  # fmt: skip


def one_layer() -> Path:
    """Return a model of one layer, which takes the interpreter half the time."""
    return shallow(str(checkpoint("llama")), 1)


@dataclass(frozen=True)
class Files:
    """A checkpoint, and a folder of its adapters by rank."""

    folder: Path

    @property
    def base(self) -> str:
        return str(one_layer())

    def adapter(self, rank: int) -> LoRARequest | None:
        return LoRARequest(f"rank-{rank}", rank, str(self.folder / f"{rank}")) if rank else None

    @cache  # noqa: B019 (lives as long as the module)
    def expected(self, ranks: Sequence[int]) -> list[list[int]]:
        """Return torch's tokens on the host, prompt by prompt; 0 stands for the base model."""
        with on_the_host(), LLM(self.base, attention_backend="torch", **SETTINGS) as llm:
            return [
                tokens_of(llm.generate([prompt], GREEDY, False, lora_request=self.adapter(rank)))[0]
                for prompt, rank in zip(PROMPTS, ranks, strict=True)
            ]


def tokens_of(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("adapters")
    modules = adaptable_shapes(one_layer())
    for rank in RANKS:
        write_adapter(folder / f"{rank}", modules, rank, seed=rank)
    return Files(folder)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the steps that were replayed, and the steps launched kernel by kernel. A kind is
    recorded at its first step."""
    counted: Counter[str] = Counter()

    def count(kind: type, name: str) -> None:
        first = kind.first

        def counting(step: Any, shape: Any) -> Any:
            counted[name] += 1
            return first(step, shape)

        monkeypatch.setattr(kind, "first", counting)

    count(graphs.Recorded, "recorded")
    count(PlainStep, "alone")
    monkeypatch.setattr(graphs, "FIRST_TIMES", 0)
    monkeypatch.setattr(graphs, "FIRST_TIMES_MIXED", 0)
    return counted


def run(files: Files, rounds: Sequence[Sequence[int]], **settings: Any) -> list[list[list[int]]]:
    """Tokens of PROMPTS with adapters of these ranks, all prompts of a round together."""
    found = []
    with LLM(files.base, attention_backend="triton", **(SETTINGS | settings)) as llm:
        for ranks in rounds:
            adapters = list(map(files.adapter, ranks))
            found.append(tokens_of(llm.generate(PROMPTS, GREEDY, False, lora_request=adapters)))
    return found


MIXED, OTHER, BASE = (8, 0, 64), (1, 1, 8), (0, 0, 0)
CASES: dict[str, dict[str, Any]] = {
    "whole": {"compilation": "full", "pipeline_depth": 3},
    "pieces": {"compilation": "piecewise"},
    "one slot": {"compilation": "full", "max_loras": 1, "max_cpu_loras": 2},
    "drafts": {
        "speculative_config": {
            "method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2,
        },
        "pipeline_depth": 2,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("devices")
def test_recorded_steps_serve_any_mix_of_adapters(
    case: str, files: Files, steps: Counter[str]
) -> None:
    """The same graphs serve steps with other adapters in other rows, and steps without adapters."""
    rounds = [MIXED, BASE] if case == "whole" else [MIXED, OTHER]
    expected = [files.expected(ranks) for ranks in rounds]
    steps.clear()
    assert run(files, rounds, **CASES[case]) == expected
    assert steps["recorded"] > 5 and steps["alone"] == 0
    assert expected[0] != expected[1], "adapters change tokens"


@pytest.mark.slow
@pytest.mark.usefixtures("devices")
def test_eager_steps_give_the_tokens_of_torch(files: Files, steps: Counter[str]) -> None:
    assert run(files, [MIXED], enforce_eager=True) == [files.expected(MIXED)]
    assert steps["recorded"] == 0


@pytest.mark.usefixtures("devices")
def test_only_steps_with_adapters_launch_adapter_kernels(
    files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each layer that adapters may change takes two more launches, and the groups take two. A step
    without adapters takes none of them."""
    launched, few_modules = noted_launches(monkeypatch), ("q_proj", "down_proj")
    shapes = adaptable_shapes(Path(files.base))
    path = write_adapter(
        tmp_path / "few", {n: s for n, s in shapes.items() if n.endswith(few_modules)}, 8
    )
    adapter, found = LoRARequest("few", 1, str(path)), {}
    for name, settings in {
        "off": {"enable_lora": False},
        "all": {},
        "some": {"lora_target_modules": few_modules},
    }.items():
        launched.clear()
        with LLM(
            files.base, attention_backend="triton", enforce_eager=True, **(SETTINGS | settings)
        ) as llm:
            llm.generate(PROMPTS[:1], GREEDY, False)
            found[name] = +launched
            if name == "off":
                continue
            assert found[name] == found["off"], "the same number as without adapters"
            launched.clear()
            llm.generate(PROMPTS[:1], GREEDY, False, lora_request=adapter)
            found[name] = +launched
    num_steps = found["off"]["_gather_kernel"]
    expected = {"_slots_kernel": num_steps, "_sort_kernel": num_steps}
    num_layers = load_spec(Path(files.base)).num_layers
    for name, num in {"all": 4 * num_layers, "some": 2 * num_layers}.items():
        more = expected | dict.fromkeys(("_shrink_kernel", "_expand_kernel"), num_steps * num)
        assert found[name] - found["off"] == Counter(more)


ADDED = {"_slots_kernel", "_sort_kernel", "_shrink_kernel", "_expand_kernel"}


@pytest.mark.usefixtures("devices")
def test_steps_without_adapters_replay_their_own_graph(
    files: Files, steps: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without adapters replay their own graph, whether steps with adapters ran before or not.
    The recording of that graph launches nothing for adapters."""
    expected = {ranks: files.expected(ranks) for ranks in (MIXED, BASE)}
    steps.clear()
    launched, served, find = (
        noted_launches(monkeypatch),
        set[tuple[bool, bool]](),
        graphs.Graphs.find,
    )

    def noted(self: Any, *given: Any) -> Any:
        recorded = find(self, *given)
        own = self._recorded.get((recorded.size, given[2]))
        served.add((given[2].is_unused, recorded is own))
        return recorded

    monkeypatch.setattr(graphs.Graphs, "find", noted)
    monkeypatch.setattr(graphs.Graphs, "record_next", lambda self: False)
    with LLM(files.base, attention_backend="triton", compilation="full", **SETTINGS) as llm:
        for number, ranks in enumerate((MIXED, BASE, MIXED, BASE)):
            launched.clear()
            served.clear()
            adapters = list(map(files.adapter, ranks))
            found = tokens_of(llm.generate(PROMPTS, GREEDY, False, lora_request=adapters))
            assert found == expected[ranks]
            assert served == {(True, True)} if ranks is BASE else (False, True) in served
            assert ADDED & launched.keys() == (ADDED if number == 0 else set())
    assert steps["recorded"] > 10 and steps["alone"] == 0


@pytest.mark.usefixtures("devices", "steps")
def test_drafted_steps_without_adapters_launch_no_adapter_kernels(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recording of a step with adapters launches their kernels."""
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)
    launched, drafted, record = noted_launches(monkeypatch), list[Any](), graphs.Graphs._record

    def noted(self: Any, size: Any, needs: Any) -> Any:
        self._device.run(list).wait()
        before = +launched
        recorded = record(self, size, needs)
        self._device.run(list).wait()
        if size.drafts:
            drafted.append((needs.is_unused, ADDED & (launched - before).keys()))
        return recorded

    monkeypatch.setattr(graphs.Graphs, "_record", noted)
    monkeypatch.setattr(graphs.Graphs, "record_next", lambda self: False)
    settings = SETTINGS | CASES["drafts"] | {"max_num_seqs": 1}
    prompt: Any = {"prompt_token_ids": [5, 6] * 4}
    with LLM(files.base, attention_backend="triton", **settings) as llm:
        for rank in (0, 8):
            llm.generate(prompt, GREEDY, False, lora_request=files.adapter(rank))
    assert [each for each in drafted if each not in ((True, set()), (False, ADDED))] == []
    assert {is_unused for is_unused, _ in drafted} == {True, False}


def noted_launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the numbers of later launches by kernel."""
    launched: Counter[str] = Counter()
    launch = InterpretedFunction.run

    def note(kernel: Any, *args: Any, **named: Any) -> Any:
        launched[kernel.fn.__name__] += 1
        return launch(kernel, *args, **named)

    monkeypatch.setattr(InterpretedFunction, "run", note)
    return launched


@pytest.mark.slow
@pytest.mark.usefixtures("devices")
def test_expert_adapters_fail_their_request_alone(files: Files, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.1.gate_proj"
    write_adapter(tmp_path / "experts", {name: (24, 32)}, 2)
    adapters = [LoRARequest("experts", 7, str(tmp_path / "experts")), files.adapter(MIXED[1])]
    with LLM(files.base, attention_backend="triton", **SETTINGS) as llm:
        bad, good = llm.generate(PROMPTS[:2], GREEDY, False, lora_request=adapters)
    error = bad.outputs[0].error
    assert error is not None
    assert "the experts of a mixture, which adapters cannot change on a GPU" in error.message
    assert tokens_of([good]) == files.expected(MIXED)[1:2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_loras": 256}, "max_loras must be at most 255 on a GPU, got 256"),
        ({"lora_target_modules": ("experts",)}, "cannot change 'experts' of a mixture on a GPU"),
        ({"lora_target_modules": ("x_proj",)}, "no module 'x_proj'"),
    ],
)
@pytest.mark.usefixtures("devices")
def test_settings_that_gpus_do_not_support_are_refused(
    settings: dict[str, Any], message: str, files: Files
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(files.base, attention_backend="triton", **(SETTINGS | settings))


def test_dtype_without_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match="got float64. Install triton, change dtype"):
        gpu_adapters._check(LoraConfig(), torch.float64, CPU)


def test_slots_that_exceed_the_memory_are_reported(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gpu_adapters, "DeviceSlots", fail)
    monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: True)
    spec = load_spec(Path(files.base))
    model = load_model(Path(files.base), spec, torch.float32, CPU)
    config = config_from_flat(enable_lora=True, max_num_seqs=2)
    with pytest.raises(OutOfMemory, match="8 adapters of rank 16 does not fit"):
        gpu_adapters.adapters_on_gpu(config, spec, model, torch.float32, CPU)


# ---- changes of a plan --------------------------------------------------------------------------


class FakeSlots:
    """Slots that note the device's calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, slot: int, adapter: Any) -> None:
        self.calls.append((slot, adapter))

    def set_rows(self, slots: Any) -> None:
        self.calls.append(slots.tolist())

    def group(self, starts: Any, num_tokens: int) -> None:
        self.calls.append((len(starts), num_tokens))

    def skip(self) -> None:
        self.calls.append("nothing")


class Bench:
    """Adapters that are "loaded" as the names of their directories, with plans of single tokens."""

    def __init__(self, folder: Path, max_loras: int = 2) -> None:
        self.slots = FakeSlots()
        model: Any = SimpleNamespace(slots=self.slots, load=lambda path, max_rank: Path(path).name)
        slots: Any = self.slots
        config = LoraConfig(enable_lora=True, max_loras=max_loras)
        self.adapters = DeviceRowAdapters(model, config, slots, 4)
        self.folder, self.ids, self.step = folder, dict[str, str](), 0
        for seed, name in enumerate("xyz"):
            path = write_adapter(folder / name, {"layer": (4, 4)}, seed=seed)
            self.ids[name] = adapter_digest(path)

    def load(self, slot: int, name: str) -> None:
        self.adapters.load(slot, self.ids[name], str(self.folder / name))

    def plan(self, rows: list[int], started: dict[int, str] | None = None, **plan: Any) -> Any:
        """Return the part of a new step. started: names of adapters by row."""
        starts = tuple(
            RowStart(row, np.zeros(1, np.int32), 0, 1, SamplingParams(), 0,
                     adapter_id=self.ids[name] if name else "")
            for row, name in (started or {}).items()
        )  # fmt: skip
        self.step += 1
        arrays = {key: np.array(each, np.int32) for key, each in plan.items()}
        num = np.ones(len(rows), np.int32)
        return self.adapters.prepare(
            Plan(self.step, np.array(rows, np.int32), num, started=starts, **arrays)
        )

    def calls(self, part: DeviceStepAdapters) -> list[Any]:
        """Return the calls that a part makes on the device."""
        self.slots.calls.clear()
        part.before()
        return list(self.slots.calls)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    yield Bench(tmp_path)


def test_host_sends_only_changes(bench: Bench) -> None:
    part = bench.plan([2, 0], {2: "", 0: ""})
    assert part is bench.adapters.unused and part.is_at_rest and not bench.calls(part)
    step: Any = SimpleNamespace(query_starts_S1=range(3), positions_T=np.zeros(2))
    assert part.attention(step) is step and bench.slots.calls == ["nothing"]
    bench.load(1, "x")
    part = bench.plan([2, 0, 3], {3: "x"})
    assert not part.is_at_rest and part.can_be_recorded
    assert bench.calls(part) == [(1, "x"), [-1, -1, 1]]
    assert part.attention(step) is step and bench.slots.calls[-1] == (3, 2)
    assert bench.plan([2, 0, 3]) is bench.adapters.at_rest
    assert bench.plan([2]) is bench.adapters.unused
    assert bench.calls(bench.plan([3, 2], released=[0])) == [[1, -1]]
    assert bench.plan([3, 2]) is bench.adapters.at_rest
    assert bench.plan([2, 0]).is_used is False, "the device also gets the rows without adapters"


def test_failed_changes_are_sent_again(bench: Bench) -> None:
    bench.load(0, "x")
    bench.plan([1], {1: "x"})  # its step could not be launched
    part = bench.plan([1])
    assert bench.calls(part) == [(0, "x"), [0]]
    assert bench.plan([1]) is bench.adapters.at_rest


def test_rows_of_a_failed_step_are_sent_again(bench: Bench) -> None:
    """A step that fails before its rows are sent is repeated as two shorter halves."""
    bench.load(0, "x")
    bench.plan([0, 1, 2, 3], dict.fromkeys(range(4), "x"))
    assert bench.calls(bench.plan([0, 1]))[-1] == [0, 0]
    bench.plan([2, 3])
    assert bench.calls(bench.plan([0, 1, 2, 3]))[-1] == [0, 0, 0, 0]
    assert bench.plan([3, 2, 1, 0]) is bench.adapters.at_rest


def test_changes_reach_a_late_device_in_order(bench: Bench) -> None:
    """Three steps are planned before the first one runs."""
    bench.load(0, "x")
    first = bench.plan([1], {1: "x"})
    second = bench.plan([2], {2: ""}, released=[1])
    bench.load(0, "y")
    third = bench.plan([3], {3: "y"})
    assert bench.calls(first)[-2:] == [(0, "x"), [0]]
    assert bench.calls(second)[-1] == [-1]
    assert bench.calls(third)[-2:] == [(0, "y"), [0]]
    assert bench.plan([3]) is bench.adapters.at_rest


def test_row_whose_adapter_has_no_slot_raises(bench: Bench) -> None:
    with pytest.raises(EngineError, match="in no slot"):
        bench.plan([1], {1: "x"})


def test_layers_with_adapters_are_not_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fused launches would skip the adapters."""
    monkeypatch.setattr(layers, "fuses", lambda *_, **__: True)
    monkeypatch.setattr(layers, "gates", lambda *_: True)
    x = torch.ones(1, 4)
    layer = layers.Linear(["a"], 4, [8], layers.ParamFactory(torch.float32, CPU))
    layer.weight.zero_()
    assert layer.fuses(x) and layer.fuses(x, has_norm=True)
    slots: Any = SimpleNamespace(add=lambda out, x, number: out.fill_(number))
    slots.is_idle = False
    layer.adapted = slots, 3
    assert not layer.fuses(x) and not layer.fuses(x, has_norm=True)
    assert torch.equal(layer.forward_gated(x, silu_mul), silu_mul(torch.full((1, 8), 3.0)))
    slots.is_idle = True
    assert layer.fuses(x) and layer.fuses(x, has_norm=True)
    assert not layer(x).any(), "no row of the step has an adapter"


def test_expert_layers_get_no_adapters(tmp_path: Path, monkeypatch: Any) -> None:
    """The error for such an adapter says what to do."""
    made = write_checkpoint(tmp_path / "base", "qwen3_moe")
    model = load_model(made.directory, made.spec, torch.float32, CPU)
    monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: True)
    adapted = AdaptedModel(
        model, made.spec, LoraConfig(max_loras=1), torch.float32,
        lambda layers: DeviceSlots(1, layers, 4, torch.float32, CPU, 1),
    )  # fmt: skip
    assert not any("experts" in name for name in adapted.places)
    name = "model.layers.0.mlp.experts.1.gate_proj"
    path = write_adapter(tmp_path / "experts", {name: (24, 32)}, 2)
    with pytest.raises(ModelError, match="Set device to cpu, or train the adapter without it"):
        adapted.load(str(path), 4)
