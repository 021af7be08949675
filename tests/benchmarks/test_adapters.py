"""The benchmarks of adapters: written adapters, and counted costs."""

from pathlib import Path

import pytest
import torch

from benchmarks.cpu.adapters import PEER, engines, write_gguf_adapter, write_peft_adapter
from benchmarks.cpu.limits import Ceilings
from benchmarks.cpu.workloads import Shape
from benchmarks.kernels.operations import Cost
from benchmarks.models.adapter_load import STREAMS, Streams, rank_of, row_of, shapes_of, summary
from benchmarks.models.adapters import (
    ADAPT,
    EXPERTS,
    numbers_read,
    part_of,
    rows_of,
    write_adapters,
)
from benchmarks.models.adapters import shapes_of as adapted_shapes
from quire.base.settings.lora import LoraConfig
from quire.models.checkpoint.adapter_files import adapter_digest, read_adapter
from quire.models.checkpoint.source import resolve_model
from quire.models.load.adapters import AdaptedModel
from quire.models.registry import make_model
from quire.spec.model_spec import load_spec
from tests.support.models.checkpoints import write_checkpoint

SHAPES = {"a.q_proj": (6, 4), "a.o_proj": (4, 6)}
SMALL = Shape("small", "qwen3", 64, 2, 4, 2, 16, 128, 1500)


def test_adapters_of_one_file_differ_by_their_digests(tmp_path: Path) -> None:
    paths = write_adapters(tmp_path, SHAPES, 3, 4)
    assert len({adapter_digest(path) for path in paths}) == 4
    files = read_adapter(paths[2])
    assert {module.name: (module.outputs, module.inputs) for module in files.modules} == SHAPES
    assert {module.rank for module in files.modules} == {3}


def test_limit_of_adapters_is_reading_them() -> None:
    ceilings = Ceilings(100.0, 1e6, 1e6, 1e6)
    part = part_of({ADAPT: Cost(9.0), "rest": Cost(1.0)}, {"rest": Cost(0.5)}, 3, 50, ceilings)
    assert (part.step_s, part.num_bytes, part.limit_s) == (10.0, 300.0, 3.0)
    assert part.ratio == 3.0
    assert rows_of([part], [])[0]["step"] == "3 adapters"


def test_adapter_of_a_given_size_covers_all_modules() -> None:
    shapes = shapes_of(load_spec(resolve_model("shape:qwen3-0.6b").directory))
    assert len(shapes) == 7 * 28 and shapes["model.layers.27.mlp.down_proj"] == (1024, 3072)
    assert 2 * rank_of(shapes, 50e6) * sum(map(sum, shapes.values())) == pytest.approx(
        50e6, rel=0.02
    )


def test_rows_read_only_adapters_of_their_chosen_experts(tmp_path: Path) -> None:
    spec = write_checkpoint(tmp_path, "qwen3_moe").spec
    assert spec.experts is not None
    model = make_model(spec, torch.bfloat16, torch.device("meta"))
    AdaptedModel(model, spec, LoraConfig(enable_lora=True, max_loras=1), torch.bfloat16)
    shapes = adapted_shapes(model)
    assert shapes == shapes_of(spec)
    sums = [sum(map(sum, shapes.values())), sum(sum(shapes[n]) for n in shapes if "experts" in n)]
    chosen = sums[1] // spec.experts.num_experts * spec.experts.num_chosen
    assert 0 < chosen < sums[1]
    assert numbers_read(model, 3) == 3 * (sums[0] - sums[1] + chosen)


def test_adapter_cost_of_experts_is_their_additional_time() -> None:
    ceilings = Ceilings(100.0, 1e6, 1e6, 1e6)
    costs = {ADAPT: Cost(1.0), EXPERTS: Cost(7.0), "rest": Cost(1.0)}
    part = part_of(costs, {EXPERTS: Cost(5.0), "rest": Cost(1.0)}, 3, 50, ceilings)
    assert (part.step_s, part.adapters_s) == (9.0, 3.0)


def test_pauses_are_split_at_the_arrival() -> None:
    streams = Streams([[0.0, 1.0, 2.0, 5.0, 6.0, 9.0]] * STREAMS, arrival_s=2.5, first_token_s=5.5)
    before, during = streams.pauses_ms()
    assert before == [1000.0] * STREAMS  # without the first pause of each stream
    assert during == [3000.0, 1000.0] * STREAMS
    rows = [row_of(streams, 1, has_adapter=has_adapter) for has_adapter in (False, True)]
    rows[1]["longest_ms"] += 7.0
    assert summary(rows)["more_ms"] == 7.0


def test_all_engines_read_the_same_adapter(tmp_path: Path) -> None:
    *of_gguf, last = engines()
    assert last is PEER
    for ours, peer in zip(of_gguf[::2], of_gguf[1::2], strict=True):
        assert ours.is_ours and not peer.is_ours
        assert (ours.source, ours.format) == (peer.source, peer.format)
    files = read_adapter(write_gguf_adapter(SMALL, tmp_path))
    assert files.is_gguf and len(files.modules) == 7 * SMALL.num_layers and files.max_rank == 16
    of_peft = read_adapter(write_peft_adapter(SMALL, tmp_path))
    assert not of_peft.is_gguf and of_peft.max_rank == 16
    sizes = [sorted((m.outputs, m.inputs) for m in each.modules) for each in (of_peft, files)]
    assert sizes[0] == sizes[1]
