"""Step times from a model's shape and a device's data sheet, against numbers computed by hand."""

import numpy as np
import pytest

from quire.base.plan import Move, MoveKind, Plan
from quire.base.settings.config import config_from_flat
from quire.models.checkpoint.source import resolve_model
from quire.tools.devices import SPEEDS, find_gpu
from quire.tools.simulate import roofline
from quire.tools.simulate.roofline import roofline_of
from quire.tools.sizing.fit import Fit, fit
from quire.tools.step_times import Attention, Roofline, StepLoad


def plan_of(num_tokens: list[int], computed: list[int], num_moved: int = 0) -> Plan:
    rows = np.arange(len(num_tokens), dtype=np.int32)
    blocks = np.arange(num_moved, dtype=np.int32)
    moves = tuple(Move(kind, 0, blocks, blocks) for kind in (MoveKind.COPY, MoveKind.LOAD))
    return Plan(
        0, rows, np.array(num_tokens, np.int32), np.array(computed, np.int32),
        sample_rows=rows[:2], moves=moves,
    )  # fmt: skip


def fit_of(name: str, device: str, **settings: object) -> Fit:
    model = f"shape:{name}"
    config = config_from_flat(model=model, **settings)
    return fit(config, resolve_model(model), find_gpu(device))


def test_step_time_sums_the_load_of_a_plan() -> None:
    plan = plan_of([1, 4], [99, 10], num_moved=3)
    assert StepLoad.of(plan) == StepLoad(5, 114, 100 + 11 + 12 + 13 + 14, 2, 3)
    assert StepLoad.of(plan, window=5).num_context == 6 + 9
    times = Roofline(1.0, 0.1, (Attention(0.01), Attention(0.1, window=5)), 0.5, 0.125, 2.0)
    assert times.seconds(plan) == pytest.approx(2 + 1 + 1.14 + 1.5 + 1.5)
    busy = Roofline(0.1, 0.1, (Attention(0.0, 1.0),), sample_s=0.125)
    assert busy.seconds(plan) == pytest.approx(0.5 + 0.25 + 150)


def test_each_chosen_expert_is_read_once() -> None:
    times = Roofline(1.0, 0.0, expert_s=8.0, chosen=0.5)
    assert times.seconds(plan_of([1], [0])) == 1 + 4
    assert times.seconds(plan_of([2], [0])) == 1 + 6


def test_dense_model_follows_the_data_sheet() -> None:
    found = fit_of("llama-3.1-8b", "H200")
    times, speed = roofline_of(found), SPEEDS["H200"]
    in_layers, in_head = 32 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336), 4096 * 128_256
    read = 2 * (in_layers + in_head) / (roofline.MEMORY_SHARE * speed.memory)
    assert times.weights_s == pytest.approx(read)
    assert times.token_s == pytest.approx(2 * in_layers / (roofline.FLOPS_SHARE * speed.flops_16))
    assert times.attention[0].context_s == pytest.approx(
        131_072 / (roofline.MEMORY_SHARE * speed.memory)
    )


def test_four_devices_share_all_work_but_the_exchange() -> None:
    one, four = (
        roofline_of(fit_of("llama-3.1-8b", "H100", tensor_parallel_size=n)) for n in (1, 4)
    )
    assert four.weights_s == pytest.approx(one.weights_s / 4)
    assert four.attention[0].context_s == pytest.approx(one.attention[0].context_s / 4)
    exchanged = 64 * 2 * 3 / 4 * 4096 * 2 / (roofline.COPY_SHARE * SPEEDS["H100"].peers)
    assert four.token_s == pytest.approx(one.token_s / 4 + exchanged)
    assert four.fixed_s > one.fixed_s


@pytest.mark.parametrize(
    ("shape", "chosen", "num_bytes"),
    [
        ("mixtral-8x7b", 2 / 8, 93e9),
        pytest.param("qwen3-30b-a3b", 8 / 128, 60e9, marks=pytest.mark.slow),
    ],
)
def test_mixture_reads_only_the_chosen_experts(shape: str, chosen: float, num_bytes: float) -> None:
    times = roofline_of(fit_of(shape, "H200"))
    assert times.chosen == chosen
    whole = times.weights_s + times.expert_s
    memory = roofline.MEMORY_SHARE * SPEEDS["H200"].memory
    assert whole * memory == pytest.approx(num_bytes, rel=0.03)
