"""The benchmark that compares engines on a CPU: its limits, valid runs and checkpoints. A run with
a fake engine covers the way from the driver's lines to the table."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.cpu.checkpoints import write_checkpoint, write_gguf_file
from benchmarks.cpu.compressed import write_compressed
from benchmarks.cpu.drivers.common import Prompter, Prompts, run_workload
from benchmarks.cpu.engines import FLOAT16, INT8, LLAMA, Engine
from benchmarks.cpu.latent import config_of, tensor_shapes
from benchmarks.cpu.limits import Ceilings, Format, min_times
from benchmarks.cpu.processes import Output, Run, runs_of
from benchmarks.cpu.report import ratios, summary, table
from benchmarks.cpu.workloads import LITE, METRICS, Shape, chosen_workload
from quire.models.load.loading import load_model
from quire.spec.gguf.container import GGUFFile
from quire.spec.model_spec import load_spec
from quire.tools.limits import step_cost

# 38.5 GB/s, 200 * 10^9 operations per second in floats, 405 in 8 bits.
CEILINGS = Ceilings(38.5e9, 200e9, 200e9, 405e9)
Q8, Q4 = Format(1.0625, 1.0625, "int8"), Format(0.5625, 0.5625, "int8")
SMALL = Shape("small", "qwen3", 64, 2, 4, 2, 16, 128, 1500)
OURS = Engine("ours", "8-bit", "", INT8)
PEERS = [Engine(name, "8-bit", "", INT8, LLAMA) for name in ("a", "b")]


def test_limits_equal_values_computed_by_hand() -> None:
    for name, metric, form, expected in (
        ("single", "decode_rate", FLOAT16, 31.8),
        ("single", "decode_rate", Q4, 108.9),
        ("prefill", "prefill_rate", Q8, 362),
        ("long", "deep_rate", FLOAT16, 18),
        ("shared", "warm_rate", Q8, 160),
    ):
        found = min_times(chosen_workload(name, False), form, CEILINGS)[metric]
        assert found == pytest.approx(expected, rel=0.03), (name, metric, form)


def test_ratios_compare_with_the_best_peer() -> None:
    """Disturbed runs do not count. A ratio above 1 means that our engine is better."""
    values = [("ours", 0.2, 30.0, 0.0), ("a", 0.5, 20.0, 0.0), ("b", 0.4, 60.0, 0.0)]
    values += [("a", 0.1, 90.0, 0.5)]  # disturbed
    runs = [
        Run(name, "single", 0, {"ttft_s": ttft, "decode_rate": rate}, others)
        for name, ttft, rate, others in values
    ]
    engines = [OURS, *PEERS]
    found = ratios(summary(runs, engines, CEILINGS, is_small=False), engines)["ours"]
    assert found["ttft_s"] == {"ratio": pytest.approx(2.0), "peer": "b"}
    assert found["decode_rate"] == {"ratio": pytest.approx(0.5), "peer": "b"}


class FakeModel:
    """A model that remembers the prefixes and endings of its prompts."""

    kv_bytes = None

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []
        self.endings: Prompts = []

    def times_s(self, prompt: list[int], count: int) -> list[float]:
        return [0.1 * i for i in range(count)]

    def batch(self, prompts: Prompts, count: int) -> int:
        return len(prompts) * count

    def shared(self, prefix: list[int], own: Prompts, count: int) -> int:
        self.prefixes.append(prefix)
        self.endings += own
        return len(own) * count


def test_driver_lines_become_runs_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The warm case repeats the prefix with new endings."""
    model, runs = FakeModel(), list[Run]()
    for name in ("single", "batch", "shared", "prefill", "rows", "long", "tiny"):
        workload = chosen_workload(name, True)
        run_workload(model, workload, Prompter(workload, seed=1))
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        found = {metric for line in lines for metric in line["metrics"]}
        assert found == {m.name for m in METRICS if m.workload == name} - {"above_mib"}
        runs += runs_of(Output(lines), OURS, workload, 0)
    assert model.prefixes[0] == model.prefixes[1]
    assert len({tuple(ending) for ending in model.endings}) == len(model.endings) > 2
    summaries = summary(runs, [OURS], CEILINGS, is_small=True)
    assert summaries["ours"]["tiny_ms"]["best"] == pytest.approx(100.0)
    assert any(line.strip().startswith("ours") for line in table(summaries, [OURS], "best"))


def test_checkpoints_of_all_formats_hold_the_same_weights(tmp_path: Path) -> None:
    plain, device = write_checkpoint(SMALL, tmp_path / "small"), torch.device("cpu")
    spec = load_spec(plain)
    cost = step_cost(spec, torch.bfloat16)
    assert (cost.layers, cost.head) == (SMALL.layer_weights, SMALL.head_weights)
    reference = dict(load_model(plain, spec, torch.float64, device).named_parameters())
    for bits, steps in ((8, 127), (4, 7)):
        folder = write_compressed(plain, bits, tmp_path / f"compressed{bits}")
        made = load_model(folder, load_spec(folder), torch.float64, device)
        actual, num_rounded = dict(made.named_parameters()), 0
        assert actual.keys() == reference.keys()
        for name, weight in reference.items():
            furthest = (actual[name] - weight).abs().max() / weight.abs().max()
            assert furthest <= 0.8 / steps, name  # half a step, and the rounding of its scale
            num_rounded += bool(furthest > 0.2 / steps)
        assert num_rounded >= 4 * SMALL.num_layers
    file = write_gguf_file(plain, "q8_0", tmp_path / "small.gguf")
    assert "blk.1.ffn_down.weight" in GGUFFile(file).tensors


def test_latent_model_has_the_published_number_of_weights() -> None:
    sizes = tensor_shapes(config_of(LITE))
    total = sum(math.prod(size) for size in sizes.values())
    assert round(total / 1e6) == 15706
    routed = sum(math.prod(size) for name, size in sizes.items() if "_exps" in name)
    used = total - routed * (64 - 6) // 64
    norms = sum(size[0] for size in sizes.values() if len(size) == 1)
    assert used - norms == LITE.layer_weights + 2 * LITE.head_weights  # head and embedding
