"""Products of heads with their own packed weights, by the C++ core and in a program.

Covers `ops/latent.py`.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from quire.ops.attention.base import AttentionBackend
from quire.ops.attention.cpu import CpuBackend
from quire.ops.attention.traced import TracedAttention
from quire.ops.attention_inputs import Scores
from quire.ops.elementwise import concatenate
from quire.ops.embedding import embedding
from quire.ops.host.native import core
from quire.ops.host.threads import set_num_threads
from quire.ops.latent import latent_queries, latent_values
from quire.ops.registry import record_ops
from quire.ops.trace.program import SHARED, Instruction, Kind, ProgramDraft, Untraceable, View
from quire.ops.weights.formats import Quantization
from quire.ops.weights.pack import pack
from quire.ops.weights.packed import PackedWeight
from quire.runner.native_model import NativePass
from quire.runner.native_program import traced
from tests.support.kernels.latent_cases import LAYER, Latents
from tests.support.models.paged_forward import CPU, RowPart, make_step

pytestmark = pytest.mark.skipif(core() is None, reason="the C++ core was not built")

VARIANTS = [] if core() is None else [name for name, _ in core().linear_variants()]  # type: ignore[union-attr]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SHAPES = {
    "small": (3, 20, 7),
    "deepseek": (16, 128, 512),
    "back": (16, 512, 128),
    "one": (1, 8, 70),
}


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of threads after the test."""
    yield
    set_num_threads(None)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def packed_heads(
    weight_NOI: torch.Tensor, quantization: Quantization | None = None, variant: str | None = None
) -> list[PackedWeight]:
    return [pack(weight_OI, quantization, variant) for weight_OI in weight_NOI]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_each_head_is_multiplied_by_its_weight(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """A head's inputs are a slice of a wider tensor."""
    heads, inputs, outputs = shape
    weight_NOI = random(heads, outputs, inputs, dtype=dtype) * inputs**-0.5
    x_TNI = random(130, heads, inputs + 8, dtype=dtype, seed=1)[..., 8:]
    wanted = torch.einsum("tni,noi->tno", x_TNI.double(), weight_NOI.double())
    for variant in VARIANTS:
        got = latent_values(x_TNI, packed_heads(weight_NOI, variant=variant))
        assert got.dtype == dtype and got.is_contiguous()
        torch.testing.assert_close(got.double(), wanted, rtol=0.01, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_weights_may_be_quantised(format: str) -> None:
    """Activations have scales per group, which must not be overwritten by other heads."""
    weight_NOI = random(5, 48, 64) / 8
    weights = packed_heads(weight_NOI, Quantization(format, 32))
    x_TNI = random(70, 5, 64, seed=1)
    alone = [latent_values(x_TNI[:, n : n + 1], weights[n : n + 1]) for n in range(5)]
    assert torch.equal(latent_values(x_TNI, weights), torch.cat(alone, dim=1))
    wanted = torch.einsum("tni,noi->tno", x_TNI, weight_NOI)
    assert (torch.cat(alone, dim=1) - wanted).abs().mean() < 0.1


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_token_has_the_same_bits_in_any_batch(dtype: torch.dtype, threads: None) -> None:
    weights = packed_heads(random(6, 96, 64, dtype=dtype))
    x_TNI = random(150, 6, 64, dtype=dtype, seed=1)
    wanted = latent_values(x_TNI, weights)
    for count in (1, 2, 5):
        set_num_threads(count)
        assert torch.equal(latent_values(x_TNI, weights), wanted)
        pieces = [latent_values(part, weights) for part in x_TNI.split([1, 2, 64, 83])]
        assert torch.equal(torch.cat(pieces), wanted)


def test_no_tokens_give_no_values() -> None:
    assert latent_values(random(0, 2, 8), packed_heads(random(2, 4, 8))).shape == (0, 2, 4)


class LatentLayer:
    """The operations of latent attention, on embeddings."""

    def __init__(self, case: Latents) -> None:
        self.case, self.rotated = case, case.size - case.num_values
        plain, values, heads = 20, 12, case.num_heads
        self.tables = [random(50, n, seed=i) for i, n in enumerate(
            (heads * plain, heads * self.rotated, case.num_values, self.rotated)
        )]  # fmt: skip
        self.keys = packed_heads(random(heads, case.num_values, plain, seed=7) / 5)
        self.values = packed_heads(random(heads, values, case.num_values, seed=8) / 6)

    def __call__(self, ids_T: torch.Tensor, backend: AttentionBackend) -> torch.Tensor:
        q_TM, rotated_TO, own_TR, k_TE = (embedding(ids_T, table) for table in self.tables)
        heads = self.case.num_heads
        backend.write_latent(LAYER, concatenate(own_TR, k_TE))
        q_TNP, rotated_TNE = q_TM.unflatten(1, (heads, -1)), rotated_TO.unflatten(1, (heads, -1))
        q_TNL = latent_queries(q_TNP, rotated_TNE, self.keys)
        scores, num_values = Scores(self.case.scale), self.case.num_values
        read_TNR = backend.run_latent(LAYER, q_TNL, scores, num_values)
        return latent_values(read_TNR, self.values).flatten(1)


@pytest.mark.parametrize("kv_format", ["auto", "int8"])
@pytest.mark.parametrize("num_heads", [3, 40])
def test_program_has_the_bits_of_the_operations(num_heads: int, kv_format: str) -> None:
    case = Latents((70, 9), num_heads=num_heads, kv_format=kv_format)
    layer = LatentLayer(case)
    draft = traced(lambda ids, _: [layer(ids, TracedAttention())])
    ids_T = torch.arange(79) * 7 % 50
    found = []
    for is_program in (False, True):
        backend = CpuBackend(case.layout(torch.float32, CPU))
        run = NativePass(draft, backend)
        outs = []
        for first, second in ((60, 9), (10, 0)):
            done = 0 if second else 60
            tables = case.tables()
            parts = [RowPart(done, done + first, (tables[0],))]
            parts += [RowPart(0, second, (tables[1],))] if second else []
            step = make_step(parts, case.block_size)
            backend.prepare(step)
            ids = ids_T[done : done + first + second]
            out = torch.empty(len(ids), draft.widths[0])
            if is_program:
                run.run(ids, step.positions_T, [out])
            outs.append(out if is_program else layer(ids, backend))
        found.append(torch.cat(outs))
    assert torch.equal(*found)


def test_heads_of_a_product_share_one_phase() -> None:
    layer = LatentLayer(Latents(num_heads=3))
    draft = traced(lambda ids, _: [layer(ids, TracedAttention())])
    products = [
        phase
        for phase, each in zip(draft.phases, draft.instructions, strict=True)
        if each.kind == Kind.HEAD_PRODUCT
    ]
    assert len(products) == 6 and len(set(products)) == 2
    kinds = [each.kind for each in draft.instructions]
    for phase in set(products):
        of_phase = {kind for kind, own in zip(kinds, draft.phases, strict=True) if own == phase}
        assert of_phase == {Kind.HEAD_PRODUCT}


def test_consecutive_products_are_separate_phases() -> None:
    """Only heads with `joins` share the phase of the product before them."""
    one = Instruction(Kind.HEAD_PRODUCT, (View(1), View(0)))
    draft = ProgramDraft([8, 8], [one, replace(one, joins=True), one])
    assert Kind.HEAD_PRODUCT in SHARED
    assert draft.phases == [0, 0, 1]


def test_plain_weights_are_untraceable() -> None:
    def forward(ids_T: torch.Tensor, _: torch.Tensor) -> list[torch.Tensor]:
        x_TNI = embedding(ids_T, random(5, 24)).unflatten(1, (3, 8))
        return [latent_values(x_TNI, random(3, 4, 8))]

    with record_ops(), pytest.raises(Untraceable, match="weights of heads are not packed"):
        traced(forward)
