"""Recorded steps with many rows of similar length: attention splits no row, so none is merged."""

from typing import Any

import pytest

from quire.base.messages import Request
from quire.base.requests.sampling_params import SamplingParams
from quire.ops.kernels.attention import attention, attention_tiles
from quire.ops.kernels.attention.attention_plan import Work
from quire.ops.kernels.attention.attention_tiles import Machine
from quire.ops.kernels.launch import INTERPRETED
from quire.runner.gpu.graphs import Graphs, Size
from quire.runner.step_ops import Needs
from tests.runner.gpu.test_kernel_ops import devices  # noqa: F401 (a fixture)
from tests.runner.gpu.test_model_runner import build, drive
from tests.support.runner.late_device import LateDevice, on_the_host

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the stand-in's memory is the CPU's")

LIMITS = {"max_model_len": 90, "max_num_batched_tokens": 210, "kv_cache_memory_bytes": 1 << 19}


def requests() -> list[Request]:
    """Three requests have one prompt length; the last one generates more tokens than the others."""
    greedy = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (8, 8, 12)]
    prompts = [[(11 * i + 3 * j) % 97 for j in range(70)] for i in range(3)]
    pairs = enumerate(zip(prompts, greedy, strict=True))
    return [Request(f"r{i}", prompt, params, seed=i) for i, (prompt, params) in pairs]


@pytest.mark.parametrize("compilation", ["full", pytest.param("piecewise", marks=pytest.mark.slow)])
def test_steps_with_unsplit_rows_launch_no_merge(
    compilation: str,
    devices: list[LateDevice],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three rows fill the machine unsplit. The last remaining row is split."""
    kinds, launched = set[tuple[Size, Needs]](), set[tuple[bool, bool]]()
    attend, record = attention.attention, Graphs._record

    def note(queries: Any, kv: Any, work: Work, *more: Any) -> Any:
        launched.add((work.cut.max_splits == 1, work.bounds.merges > 0))
        return attend(queries, kv, work, *more)

    def note_kind(graphs: Graphs, size: Size, needs: Needs) -> Any:
        kinds.add((size, needs))
        return record(graphs, size, needs)

    monkeypatch.setattr(
        attention_tiles, "machine_of", lambda device: Machine(4)
    )  # for two KV heads
    monkeypatch.setattr(attention, "attention", note)
    monkeypatch.setattr(Graphs, "_record", note_kind)
    found = drive(build("triton", compilation=compilation, **LIMITS), devices[-1], make=requests)
    uncut = Size(3), Needs(is_uncut=True)
    assert (uncut in kinds) == (compilation == "full")
    assert (Size(1), Needs()) in kinds
    assert launched == {(False, True), *([(True, False)] * (uncut in kinds))}
    with on_the_host():
        assert found == drive(build("torch", **LIMITS), make=requests)
