"""The IQ and TQ formats of GGUF keep their numbers when the core packs them."""

import numpy as np
import pytest
import torch

from quire.models.gguf.codebooks import DECODERS, LAYOUTS
from quire.models.gguf.dequantise import dequantise
from quire.models.gguf.grids import GRIDS
from quire.models.gguf.repacked import packed_kind, repacked
from quire.models.gguf.stored import format_of
from quire.ops.linear import linear
from quire.ops.weights.formats import variants
from quire.ops.weights.pack import pack_blocks
from quire.spec.gguf.container import KINDS, TensorKind
from tests.models.test_gguf_model import needs_core, rows
from tests.ops.test_linear import quantised_activations
from tests.ops.test_linear import random as random_numbers

CODED = [kind for kind in KINDS.values() if kind.name in DECODERS]
EACH = pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)


def random_blocks(kind: TensorKind, num_rows: int, num_inputs: int) -> np.ndarray:
    """Return blocks of random bits with moderate scales of either sign."""
    numbers = np.random.default_rng(3)
    shape = (num_rows * num_inputs // kind.block_size, kind.block_bytes)
    blocks = numbers.integers(0, 256, shape, np.uint8)
    records = blocks.reshape(-1).view(LAYOUTS[kind.name])
    d = numbers.normal(scale=0.1, size=len(records)).astype("<f2")
    if kind.name == "IQ1_M":  # its scale is spread over the top bits of four words
        nibbles = d.view("<u2")[:, None] >> np.arange(0, 16, 4, dtype=np.uint16) & 15
        records["scales"] = records["scales"] & 0x0FFF | nibbles << 12
    else:
        records["d"] = d
    return blocks.reshape(num_rows, -1)


def test_each_coded_format_has_a_decoder_and_a_layout() -> None:
    assert {kind.name for kind in CODED} == set(DECODERS) == set(LAYOUTS)
    sizes = {name: grid.vectors.shape for name, grid in GRIDS.items()}
    assert sizes == {
        "IQ2_XXS": (256, 8),
        "IQ2_XS": (512, 8),
        "IQ2_S": (1024, 8),
        "IQ3_XXS": (256, 4),
        "IQ3_S": (512, 4),
        "IQ1_S": (2048, 8),
    }


@EACH
def test_repacked_blocks_have_the_size_of_their_kind(kind: TensorKind) -> None:
    made = repacked(kind, random_blocks(kind, 6, 512))
    packed = packed_kind(kind)
    assert made.shape == (6, 512 // packed.block_size * packed.block_bytes)
    assert made.dtype == np.uint8


@needs_core
@pytest.mark.parametrize("variant", variants())
@EACH
def test_packing_keeps_every_number(
    kind: TensorKind, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products equal those of the dequantised numbers with activations rounded to int8."""
    monkeypatch.setenv("QUIRE_CPU_VARIANT", variant)
    raw, format = random_blocks(kind, 70, 1280), format_of(kind)
    packed = pack_blocks(torch.from_numpy(repacked(kind, raw)), [(70, format)])
    wanted = torch.from_numpy(dequantise(kind, raw))
    assert torch.equal(rows(packed), wanted)
    x = random_numbers(5, 1280)
    rounded = quantised_activations(x, format.group_size, rounds_scales=format.format == "int4")
    exact = rounded @ wanted.double().T
    got = linear(x, packed)
    assert (got.double() - exact).abs().max() < 1e-6 * wanted.abs().double().sum(1).max()


@needs_core
def test_rows_of_several_formats_are_packed_together() -> None:
    """Rows with smaller blocks leave the end of their bytes unused."""
    kinds = [kind for kind in CODED if kind.name in ("IQ4_XS", "IQ2_S", "TQ1_0")]
    raw = [random_blocks(kind, 8, 512) for kind in kinds]
    made = [repacked(kind, each) for kind, each in zip(kinds, raw, strict=True)]
    together = np.zeros((24, max(each.shape[1] for each in made)), np.uint8)
    for index, each in enumerate(made):
        together[8 * index : 8 * index + 8, : each.shape[1]] = each
    stretches = [(8, format_of(kind)) for kind in kinds]
    packed = pack_blocks(torch.from_numpy(together), stretches)
    wanted = [dequantise(kind, each) for kind, each in zip(kinds, raw, strict=True)]
    assert torch.equal(rows(packed), torch.from_numpy(np.concatenate(wanted)))
