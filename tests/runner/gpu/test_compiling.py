"""The warm-up compiles its list of launches ahead: everything launched later is in the list."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from quire import LLM, LoRARequest
from quire.ops.kernels.launch import INTERPRETED, InterpretedKernel, _only_compiles
from quire.runner import memory_plan
from quire.runner.gpu import sizes
from quire.runner.gpu.compiling import compile_all
from tests.runner.gpu.test_kernel_ops import devices  # noqa: F401 (a fixture)
from tests.runner.gpu.test_verification import PARAMS, variant
from tests.support.models.reference_checkpoints import text_checkpoint
from tests.support.runner.adapters import adaptable_shapes, write_adapter
from tests.support.runner.late_device import LateDevice

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="the stand-in's memory is the CPU's"),
    pytest.mark.usefixtures("devices"),
]

# Launches of moves, forks and changes of rows, which belong to no kind of step.
OTHERS = ("attention.blocks", "row_deltas")


class Variants:
    """Note the variants that Triton would compile ahead, and the variants that it would run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead: list[tuple[Any, ...]] = []
        self.launched: set[tuple[Any, ...]] = set()
        ahead, launch = InterpretedKernel.run, InterpretedFunction.run

        def note_ahead(kernel: Any, *args: Any, **named: Any) -> Any:
            if _only_compiles.get():
                options = {name: named[name] for name in named if name not in ("grid", "warmup")}
                self.ahead.append(variant(kernel, args, options))
            return ahead(kernel, *args, **named)

        def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
            self.launched.add(variant(kernel, args, named))
            return launch(kernel, *args, grid=grid, warmup=warmup, **named)

        monkeypatch.setattr(InterpretedKernel, "run", note_ahead)
        monkeypatch.setattr(InterpretedFunction, "run", note)


@pytest.fixture
def zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with zeros. A GPU never reads it, since a recording runs no kernel."""
    empty = torch.empty

    def make(*args: Any, **named: Any) -> torch.Tensor:
        found = empty(*args, **named)
        return found if found.device.type == "meta" else found.zero_()

    monkeypatch.setattr(torch, "empty", make)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)


@pytest.mark.slow
@pytest.mark.usefixtures("zeros")
@pytest.mark.parametrize("max_rank", [0, 3, 40])
def test_list_holds_every_launch_of_steps(
    max_rank: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Adapters have up to this rank, and some steps use none. 0 disables adapters."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for place, name in (
        (sizes, "MIXED_TOKENS"), (sizes, "WARM_TOKENS"), (sizes, "WARM_TOKENS_OF_ALL"),
        (memory_plan, "MIXED_TOKENS"),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, (16,))
    variants = Variants(monkeypatch)
    caplog.set_level("DEBUG", "quire.runner.gpu.compiling")
    adapter, settings = None, dict[str, Any]()
    if max_rank:
        path = write_adapter(tmp_path / "adapter", adaptable_shapes(text_checkpoint()), 3)
        adapter = LoRARequest("adapter", 1, str(path))
        settings = {"enable_lora": True, "max_lora_rank": max_rank}
    with LLM(
        str(text_checkpoint()), dtype="float32", max_model_len=32, block_size=4, max_num_seqs=2,
        disable_log_stats=True, attention_backend="triton", kv_cache_memory_bytes=1 << 20,
        graph_warmup=True, speculative_config={"method": "none"}, **settings,
    ) as llm:  # fmt: skip
        params = [each.clone() for each in PARAMS[:2]]
        for each in params:
            each.max_tokens = 3
        adapters = [adapter, None]
        llm.generate(["one two one two", "a"], params, use_tqdm=False, lora_request=adapters)
        llm.generate(["two one"], params[:1], use_tqdm=False)
    assert "not compiled ahead" not in caplog.text and len(variants.ahead) > 40
    steps = {each for each in variants.launched if not str(each[0]).endswith(OTHERS)}
    assert sorted(map(str, steps - set(variants.ahead))) == []


def test_recordings_disable_garbage_collection() -> None:
    collects = list[bool]()
    device = LateDevice(torch.device("cpu"))
    compile_all(device, [lambda: collects.append(gc.isenabled())])
    assert collects == [False]


def test_failing_work_does_not_stop_compiling() -> None:
    device, done = LateDevice(torch.device("cpu")), []

    def fails() -> None:
        raise RuntimeError("no plan for this product")

    compile_all(device, [lambda: done.append(1), fails, lambda: done.append(2)])
    assert done == [1, 2] and gc.isenabled()
    assert len(device.graphs) == 3, "each recording ends"
    assert not _only_compiles.get()
