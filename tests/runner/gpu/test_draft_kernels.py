"""Passes of draft models and of EAGLE-3 heads by kernels, as graphs.

Draft tokens equal the results of torch on a CPU, and no order is launched directly.
"""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.messages import Drafted
from quire.engine.drafting.draft_pace import StepTimes
from quire.ops.kernels.launch import INTERPRETED
from quire.runner.drafting import draft_kernels
from quire.runner.drafting.draft_kernels import DraftKernels, OrderSize
from quire.runner.gpu import graphs, sizes
from tests.runner.gpu.test_kernel_ops import devices  # noqa: F401 (a fixture)
from tests.support.cases import slow_but
from tests.support.models.draft_heads import HeadShape, write_head, write_mtp
from tests.support.models.reference_checkpoints import checkpoint
from tests.support.runner.late_device import on_the_host

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="the stand-in's memory is the CPU's"),
    pytest.mark.usefixtures("devices"),
]

PROMPTS = [[5, 9, 13, 2, 40], [7] * 9, [3]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=5, top_k=9, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=6, max_tokens=6, ignore_eos=True),
]
KINDS = ("draft_model", "eagle3", "mtp")


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the orders launched directly and as graphs. A size is recorded at its first order."""
    counted: Counter[str] = Counter()
    find = DraftKernels._find

    def counting(kernels: DraftKernels, size: OrderSize) -> Any:
        found = find(kernels, size)
        counted["direct" if found is None else "replayed"] += 1
        return found

    monkeypatch.setattr(DraftKernels, "_find", counting)
    monkeypatch.setattr(draft_kernels, "FIRST_TIMES", 0)
    monkeypatch.setattr(graphs, "FIRST_TIMES", 0)
    monkeypatch.setattr(graphs, "FIRST_TIMES_MIXED", 0)
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)
    return counted


def drafter(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the target, and the settings of its drafter."""
    if kind == "draft_model":
        return checkpoint("llama"), {"model": str(checkpoint("gemma2"))}
    if kind == "mtp":
        write_mtp(folder / "target", "qwen3_5")
        return folder / "target", {}
    write_head(folder / "head", HeadShape(reads=(0, 1, 2)))
    return checkpoint("llama"), {"model": str(folder / "head")}


def drafts(kind: str, folder: Path, backend: str, **settings: Any) -> tuple[list[Any], list[Any]]:
    """Return the draft tokens of all orders, and the tokens of the answers."""
    target, own = drafter(kind, folder)
    method = {"method": kind, "num_speculative_tokens": 3} | own
    found: list[Any] = []
    with LLM(
        str(target), speculative_config=method, attention_backend=backend,
        dtype="float32", max_model_len=32, block_size=4, max_num_seqs=3, max_num_batched_tokens=12,
        kv_cache_memory_bytes=1 << 20, disable_log_stats=True, pipeline_depth=1, device="cpu",
        **settings,
    ) as llm:  # fmt: skip
        core = llm.engine.client.core
        control = core.control

        def spy(message: Any) -> Any:
            if isinstance(message, Drafted):
                found.extend((each.num_known, list(each.token_ids)) for each in message.drafts)
            return control(message)

        core.control = spy
        prompts = [{"prompt_token_ids": each} for each in PROMPTS]
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    return found, [list(each.outputs[0].token_ids) for each in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_order_is_replayed_and_drafts_equal_torch(
    kind: str, orders: Counter[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = drafts(kind, tmp_path, "triton")
    assert orders["direct"] == 0 and orders["replayed"] > 4
    assert "failed" not in caplog.text and "recorded" not in caplog.text
    with on_the_host():
        assert found == drafts(kind, tmp_path, "torch")
    assert len(found[0]) > 6


@pytest.mark.parametrize("kind", slow_but(KINDS[:2]))
def test_warm_up_records_all_sizes(
    kind: str, orders: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (draft_kernels, graphs):
        monkeypatch.setattr(place, "FIRST_TIMES", 1 << 20)
    monkeypatch.setattr(draft_kernels, "MIXED_TOKENS", (16,))
    for name in ("MIXED_TOKENS", "WARM_TOKENS", "WARM_TOKENS_OF_ALL"):
        monkeypatch.setattr(sizes, name, (16,))
    found = drafts(kind, tmp_path, "triton", graph_warmup=True)
    assert orders["direct"] == 0 and orders["replayed"] > 4
    eager = drafts(kind, tmp_path, "triton", enforce_eager=True)
    assert orders["direct"] > 4 and found == eager


class Sized:
    """DraftKernels of 8 rows that note the sizes to record instead of recording them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_graphs: int) -> None:
        self.recorded: list[OrderSize] = []
        self.kernels = kernels = object.__new__(DraftKernels)
        kernels._rows_ladder, kernels._max_tokens, kernels._max_graphs = [8], 64, max_graphs
        kernels._reads, kernels._num_orders = 0, 0
        kernels._recorded, kernels._times = {}, {}
        kernels._ops = SimpleNamespace(prepare=lambda *_: None)  # type: ignore[assignment]
        nothing = SimpleNamespace(wait=lambda: None)
        kernels._runner = SimpleNamespace(  # type: ignore[assignment]
            device=SimpleNamespace(run=lambda _: nothing),
            rows=SimpleNamespace(run_with=lambda *_: nothing),
        )
        record = DraftKernels._record

        def noting(kernels: DraftKernels, size: OrderSize) -> None:
            self.recorded.append(size)
            record(kernels, size)

        monkeypatch.setattr(DraftKernels, "_record", noting)
        monkeypatch.setattr(DraftKernels, "_lists", lambda *_: None)


def test_alternating_sizes_are_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sized = Sized(monkeypatch, max_graphs=2)
    sizes = [OrderSize(8, 16, 1), OrderSize(8, 32, 3), OrderSize(8, 64, 7)]
    for _ in range(8):
        for size in reversed(sizes):
            sized.kernels._find(size)
    assert len(sized.recorded) == 3


@pytest.mark.parametrize(("max_graphs", "tokens"), [(0, 64), (2, 65)])
def test_unrecordable_sizes_are_neither_counted_nor_compiled(
    max_graphs: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sized, compiled = Sized(monkeypatch, max_graphs), list[Any]()
    for _ in range(3):
        assert sized.kernels._find(OrderSize(8, tokens, 1)) is None
    assert sized.recorded == [] and sized.kernels._times == {}
    monkeypatch.setattr(draft_kernels, "compile_all", lambda _, works: compiled.extend(works))
    monkeypatch.setattr(draft_kernels, "MIXED_TOKENS", (tokens,))
    sized.kernels.warm_up(8)
    assert len(compiled) == len(sized.recorded) and bool(compiled) == bool(max_graphs)
    assert all(size.tokens <= 64 for size in sized.recorded)


def test_size_serves_orders_of_at_least_half_its_tokens() -> None:
    size = OrderSize(8, 256, 4, True)
    assert size.serves(OrderSize(8, 128, 4)) and not size.serves(OrderSize(8, 100, 4))
    assert size.serves(OrderSize(8, 200, 3))
    assert not size.serves(OrderSize(8, 200, 5)) and not size.serves(OrderSize(16, 200, 4))
    assert not OrderSize(8, 32, 4).serves(OrderSize(8, 32, 4, True))
