"""Blocks of towers as programs of the C++ core: results, ranges, memory, and the fallback.

Covers `models/vision/program.py`.
"""

import json
import logging
from typing import Any

import pytest
import torch

from quire.models.vision.attention import RangeAttention, axial_rotary_rows
from quire.models.vision.program import BlockProgram, trace_blocks
from quire.models.vision.tower import VisionTower
from quire.ops.host.native import core
from quire.ops.registry import op
from tests.models.vision.test_tower import FAMILIES, images_of, wide_checkpoint
from tests.support.cases import slow_but
from tests.support.models.vision_checkpoints import checkpoint

pytestmark = pytest.mark.skipif(core() is None, reason="the C++ core is not built")

NUM_PATCHES = 150
CUTS = ([0, 97, 150], [0, 20, 53, 54, 97, 107, 150])  # the second divides the ranges of the first


def inputs_of(tower: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return random embedded patches, and rotation factors if the family has any."""
    sizes = getattr(tower.spec, "tower", tower.spec)
    random = torch.Generator().manual_seed(11)
    x_TD = torch.randn(NUM_PATCHES, sizes.width, generator=random).to(tower.dtype)
    if not hasattr(sizes, "theta"):
        return x_TD, None
    positions = torch.randint(0, 12, (NUM_PATCHES, 2), generator=random).numpy()
    return x_TD, axial_rotary_rows(positions, sizes.head_dim, 100.0, tower.dtype, tower.device)


def program_of(tower: VisionTower) -> BlockProgram:
    """Return the program of a tower, which must have one."""
    program = trace_blocks(tower.states, len(CUTS), *inputs_of(tower))
    assert program is not None
    return program


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_core_results_match_the_operations(
    family: str, dtype: torch.dtype, tolerance: float
) -> None:
    found, exact = checkpoint(family).tower(dtype), checkpoint(family).tower()
    x_TD, rows = inputs_of(found)
    with torch.inference_mode():
        got = program_of(found).run(x_TD, CUTS, rows)
        exact_rows = None if rows is None else rows.double()
        wanted = exact.states(x_TD.double(), RangeAttention(CUTS), exact_rows)
    assert len(got) == len(wanted) > 0
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.dtype == dtype
        assert (ours - theirs).norm() < tolerance * theirs.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_of_a_range_do_not_depend_on_other_ranges(family: str) -> None:
    tower = checkpoint(family).tower(torch.float32)
    program, (x_TD, rows), end = program_of(tower), inputs_of(tower), CUTS[0][1]
    whole = program.run(x_TD, CUTS, rows)
    changed_TD = x_TD.clone()
    changed_TD[end:] *= 2
    changed = program.run(changed_TD, CUTS, rows)
    cuts = [[bound for bound in cut if bound <= end] for cut in CUTS]
    alone = program.run(x_TD[:end], cuts, None if rows is None else rows[:end])
    for one, other, third in zip(whole, changed, alone, strict=True):
        assert torch.equal(one[:end], other[:end])
        assert torch.equal(one[:end], third)
    assert not torch.equal(whole[0][end:], changed[0][end:])


@pytest.mark.parametrize("head_dim", [8, 72, 80])
def test_all_sizes_of_heads_match_the_operations(head_dim: int) -> None:
    changes = {"hidden_size": 2 * head_dim, "num_heads": 2}
    found = checkpoint("qwen3_vl", json.dumps({"vision_config": changes}))
    tower, exact = found.tower(torch.float32), found.tower()
    x_TD, rows = inputs_of(tower)
    assert rows is not None
    (got, *_) = program_of(tower).run(x_TD, CUTS, rows)
    (wanted, *_) = exact.states(x_TD.double(), RangeAttention(CUTS), rows.double())
    assert (got - wanted).norm() < 1e-6 * wanted.norm()


@pytest.mark.parametrize("layers", [[0, -1], [-2, -2]])
def test_the_input_and_repeated_states_may_be_read(layers: list[int]) -> None:
    found = checkpoint("llava", json.dumps({"vision_feature_layer": layers}))
    tower, exact = found.tower(torch.float32), found.tower()
    x_TD, _ = inputs_of(tower)
    got = program_of(tower).run(x_TD, CUTS)
    wanted = exact.states(x_TD.double(), RangeAttention(CUTS), None)
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_blocks_are_traced_only_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tower, images = checkpoint(family).tower(torch.float32), images_of(family)
    first = tower.encode(images[0])
    monkeypatch.setattr(tower, "states", None)  # calling the blocks again fails
    assert torch.equal(tower.encode(images[0]), first)
    assert torch.isfinite(tower.encode(images[1])).all()


def test_untraceable_blocks_run_operation_by_operation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @op("strange_activation")
    def strange(x_TF: torch.Tensor) -> torch.Tensor:
        return x_TF.tanh()

    towers = [checkpoint("qwen3_vl").tower(dtype) for dtype in (torch.float32, torch.float64)]
    for tower in towers:
        tower.blocks[0].mlp._activation = strange
    image = images_of("qwen3_vl")[1]
    with caplog.at_level(logging.WARNING):
        found = [tower.encode(image) for tower in towers]
    torch.testing.assert_close(found[0].double(), found[1], rtol=1e-4, atol=1e-4)
    (record,) = caplog.records
    assert "strange_activation" in record.getMessage()


@pytest.mark.parametrize("family", slow_but(FAMILIES, *tuple(FAMILIES)[::2]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_programs_memory_stays_within_the_towers_bound(family: str, dtype: torch.dtype) -> None:
    tower = wide_checkpoint(family).tower(dtype)
    image, num_cuts = images_of(family)[0], 2 if family == "qwen2_5_vl" else 1
    patches_per_token = num_patches(tower, image) / len(tower.encode(image))
    taken = program_of(tower).num_bytes(num_cuts) * patches_per_token
    bound = 4 * tower.numbers_per_token  # memory_plan.py counts 4 bytes at least on a CPU
    assert taken <= bound < 5 * taken  # a core without bfloat16 instructions takes a little less


def num_patches(tower: Any, image: Any) -> int:
    """Return how many patches of an image the blocks see."""
    squares = getattr(tower.spec, "tower", None)
    return len(image.pixels) * (1 if squares is None else squares.side**2)
