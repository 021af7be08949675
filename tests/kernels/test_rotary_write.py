"""Compare fused norm, rotation and write of keys and values with separate operations."""

from dataclasses import dataclass, replace

import pytest
import torch

from quire.ops.attention.base import KVLayout
from quire.ops.attention.cpu import CpuBackend
from quire.ops.attention_inputs import AttentionStep
from quire.ops.host.host_memory import lazy_zeros
from quire.ops.host.native import core
from quire.ops.kernels.attention import rotary_write as kernels
from quire.ops.kernels.attention.attention_write import layer_kv, write_kv
from quire.ops.norms import rms_norm
from quire.ops.rotary import rotary, rotary_rows
from quire.spec.cache_group import CacheGroup
from tests.support.kernels.cpp_blocks import row_by_row, scales_in_rows

TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EPS = 1e-6
BLOCK_SIZE, NUM_BLOCKS = 4, 5
SLOTS = [7, -1, 0, 19, 3]
POSITIONS = [0, 5, 100_000, 3, 17]


@dataclass
class Case:
    """Inputs of the kernel. weight: of the norm, absent for most models."""

    qkv: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    weight: torch.Tensor | None
    num_kv_heads: int

    @property
    def num_heads(self) -> int:
        return self.qkv.shape[1] - 2 * self.num_kv_heads

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values by separate operations."""
        kv_heads = self.num_kv_heads
        qk, v = self.qkv.split([self.num_heads + kv_heads, kv_heads], dim=1)
        if self.weight is not None:
            qk = rms_norm(qk, self.weight, EPS)
        q, k = rotary(qk, self.rows).split([self.num_heads, kv_heads], dim=1)
        return q, k, v

    def run(self, kv: torch.Tensor, **scales: float) -> torch.Tensor:
        return kernels.rotary_write(self.qkv, self.rows, self.slots, kv, self.weight, EPS, **scales)


def make_case(
    heads: int,
    kv_heads: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    has_norm: bool = False,
    num_tokens: int = len(SLOTS),
) -> Case:
    generator = torch.Generator().manual_seed(heads + size)
    # A slice of a wider tensor: there are gaps between the tokens.
    wide = torch.randn(num_tokens, heads + 2 * kv_heads + 1, size, generator=generator) * 2
    weight = torch.rand(heads + kv_heads, size, generator=generator) + 0.5
    frequencies = 10_000.0 ** -(torch.arange(size // 2, dtype=torch.float64) * 2 / size)
    rows = rotary_rows(torch.tensor(POSITIONS[:num_tokens]), frequencies, 1.5, dtype)
    return Case(
        wide.to(dtype).to(device)[:, :-1],
        rows.to(device),
        torch.tensor(SLOTS[:num_tokens]).to(device),
        weight.to(dtype).to(device) if has_norm else None,
        kv_heads,
    )


def make_kv(case: Case, dtype: torch.dtype, row: int) -> torch.Tensor:
    """Return three layers full of stale values."""
    shape = (2, 3, case.num_kv_heads, NUM_BLOCKS, BLOCK_SIZE, row)
    return torch.full(shape, 77, device=case.qkv.device).to(dtype)


def rows_of(kv: torch.Tensor, layer: int) -> torch.Tensor:
    """Return keys and values by slot: [2, slots, K, row]."""
    return kv[:, layer].flatten(2, 3).transpose(1, 2)


SHAPES = [(4, 2, 16), (1, 1, 2), (3, 3, 20), (14, 2, 64), (20, 1, 80), (9, 9, 24), (5, 1, 256)]


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_write_equals_separate_operations(
    shape: tuple[int, int, int], has_norm: bool, dtype: torch.dtype, device: torch.device
) -> None:
    case = make_case(*shape, dtype, device, has_norm)
    before = case.qkv.clone()
    q, k, v = case.wanted()
    kv = make_kv(case, dtype, shape[-1])
    wanted = kv.clone()
    used = case.slots >= 0
    rows_of(wanted, 1)[0, case.slots[used]] = k[used]
    rows_of(wanted, 1)[1, case.slots[used]] = v[used]
    found = case.run(kv[:, 1])
    tolerance = TOLERANCE[dtype]
    assert found.is_contiguous()
    torch.testing.assert_close(found[used], q[used], atol=tolerance, rtol=tolerance)
    if dtype is not torch.float32:  # both round at the same points: almost all bits are equal
        assert float((found[used] == q[used]).float().mean()) > 0.97
    # Compare all memory: nothing is written to other slots and layers.
    torch.testing.assert_close(kv, wanted, atol=tolerance, rtol=tolerance)
    assert torch.equal(rows_of(kv, 1)[1], rows_of(wanted, 1)[1]), "values are copied"
    assert torch.equal(case.qkv, before)


def test_norm_weight_may_have_more_precision_than_the_input(device: torch.device) -> None:
    case = make_case(3, 1, 16, torch.float16, device, has_norm=True)
    assert case.weight is not None
    case.weight = 1.0 + case.weight.float() / 3
    kv, (q, k, _) = make_kv(case, torch.float16, 16), case.wanted()
    found, used = case.run(kv[:, 1]), case.slots >= 0
    tolerance = TOLERANCE[torch.float16]
    torch.testing.assert_close(found[used], q[used], atol=tolerance, rtol=tolerance)
    stored = rows_of(kv, 1)[0, case.slots[used]]
    torch.testing.assert_close(stored, k[used], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_fused_write_of_few_tokens_equals_separate_operations(
    num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    case = make_case(4, 2, 16, dtype, device, num_tokens=num_tokens)
    kv = make_kv(case, dtype, 16)
    q, k, _ = case.wanted()
    found = case.run(kv[:, 0])
    torch.testing.assert_close(found, q, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    stored = rows_of(kv, 0)[0, SLOTS[:num_tokens]]
    torch.testing.assert_close(stored, k, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_token_has_the_same_bits_in_any_batch(dtype: torch.dtype, device: torch.device) -> None:
    case = make_case(4, 2, 16, dtype, device, has_norm=True)
    alone = replace(case, qkv=case.qkv[:1], rows=case.rows[:1], slots=case.slots[:1])
    kv, kv_alone = make_kv(case, dtype, 16), make_kv(case, dtype, 16)
    assert torch.equal(alone.run(kv_alone[:, 0]), case.run(kv[:, 0])[:1])
    assert torch.equal(rows_of(kv_alone, 0)[:, SLOTS[0]], rows_of(kv, 0)[:, SLOTS[0]])


def test_slot_offsets_may_exceed_32_bits(device: torch.device) -> None:
    case = make_case(2, 1, 16, torch.float16, device)
    case.slots[0] = 2**27 + 1
    _, k, v = case.wanted()
    kv = lazy_zeros((2, 1, 1, 2**26 + 2, 2, 16), torch.float16, device)
    case.run(kv[:, 0])
    stored = rows_of(kv, 0)[:, case.slots[0]]
    torch.testing.assert_close(stored[0], k[0], atol=4e-3, rtol=4e-3)
    assert torch.equal(stored[1], v[0])


def int8_values(rows: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers and quantisation steps of rows of size + 4 bytes."""
    rows = rows.contiguous()
    return rows[..., :size].view(torch.int8), rows[..., size:].contiguous().view(torch.float32)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("size", [16, 20, 128])
def test_int8_write_rounds_to_the_step_of_each_head(
    size: int, has_norm: bool, dtype: torch.dtype, device: torch.device
) -> None:
    case = make_case(4, 2, size, dtype, device, has_norm)
    case.qkv[0] = 0  # a head of zeros has no step
    q, k, v = case.wanted()
    kv = make_kv(case, torch.uint8, size + 4)
    before = kv.clone()
    used = case.slots >= 0
    found = case.run(kv[:, 2])
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found[used], q[used], atol=tolerance, rtol=tolerance)
    kv, before = scales_in_rows(kv), scales_in_rows(before)
    integers, steps = int8_values(rows_of(kv, 2)[:, case.slots[used]], size)
    wanted = torch.stack((k, v))[:, used].float()
    largest = wanted.abs().amax(dim=-1, keepdim=True)
    torch.testing.assert_close(steps, largest / 127, atol=1e-7, rtol=tolerance)
    error = (integers * steps - wanted).abs()
    assert bool((error <= steps * 0.501 + tolerance * largest).all())
    assert int(integers.abs().amax()) == 127
    untouched = torch.ones(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    untouched[case.slots[used].cpu()] = False
    assert torch.equal(rows_of(kv, 2)[:, untouched], rows_of(before, 2)[:, untouched])
    assert torch.equal(kv[:, :2], before[:, :2])


@pytest.mark.skipif(core() is None, reason="the C++ core was not built")
@pytest.mark.parametrize("kv_format", ["auto", "int8"])
def test_cpp_core_writes_the_same_values(
    kv_format: str, dtype: torch.dtype, device: torch.device
) -> None:
    """The core's keys are transposed back and its scales moved. Values are equal byte for byte,
    keys up to rounding."""
    case = make_case(4, 2, 16, dtype, device)
    case.slots[1] = 11  # the core has no padding
    group = CacheGroup("full", layers=(0,), num_kv_heads=2, head_dim=16, window=None)
    layout = KVLayout(
        (group,), (NUM_BLOCKS,), BLOCK_SIZE, dtype, torch.device("cpu"), kv_format=kv_format
    )
    backend = CpuBackend(layout)
    nothing = torch.zeros(1, dtype=torch.int32)
    step = AttentionStep(
        nothing, nothing, nothing, (case.slots.cpu(),), (), nothing.numpy(), nothing.numpy()
    )
    backend._step = step
    _, k, v = case.wanted()
    backend.write(0, k.cpu(), v.cpu())
    wanted = row_by_row(backend._memory.kv[0], kv_format)
    kv = torch.zeros_like(wanted, device=device)
    case.run(kv[:, 0])
    kv = scales_in_rows(kv) if kv_format == "int8" else kv
    mine, theirs = (rows_of(x.cpu(), 0) for x in (kv, wanted))
    assert torch.equal(mine[1], theirs[1]), "values"
    if kv_format == "int8":
        (mine, my_steps), (theirs, steps) = int8_values(mine[0], 16), int8_values(theirs[0], 16)
        torch.testing.assert_close(my_steps, steps, atol=0, rtol=TOLERANCE[dtype])
        assert int((mine.int() - theirs.int()).abs().amax()) <= 1
        return
    torch.testing.assert_close(mine[0], theirs[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def fp8_numbers(*shape: int) -> torch.Tensor:
    """Return numbers that are exact in e4m3, since the interpreter rounds others wrongly."""
    generator = torch.Generator().manual_seed(5)
    leading = torch.randint(8, 16, shape, generator=generator) / 8.0
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return sign * leading * 2.0 ** torch.randint(-5, 8, shape, generator=generator)


def test_fp8_write_applies_scales_and_saturates(dtype: torch.dtype, device: torch.device) -> None:
    case = make_case(4, 2, 16, dtype, device)
    numbers = fp8_numbers(*case.qkv.shape).to(device)
    case.rows[..., :16], case.rows[..., 16:] = 1.0, 0.0  # keys are not rotated
    case.qkv[:] = (
        numbers * torch.tensor([1.0] * 4 + [0.5] * 2 + [2.0] * 2)[:, None].to(device)
    ).to(dtype)
    case.qkv[0, -1, :2] = torch.tensor([3000.0, -3000.0])  # beyond the largest, 448 * 2
    numbers[0, -1, :2] = torch.tensor([448.0, -448.0])
    kv = make_kv(case, torch.float8_e4m3fn, 16)
    wanted = kv.float()
    used = case.slots >= 0
    rows_of(wanted, 1)[0, case.slots[used]] = numbers[used, 4:6]
    rows_of(wanted, 1)[1, case.slots[used]] = numbers[used, 6:]
    case.run(kv[:, 1], k_scale=0.5, v_scale=2.0)
    assert torch.equal(kv.float(), wanted)


@pytest.mark.parametrize("kv_format", ["auto", "int8", "fp8"])
def test_write_without_rotation_stores_the_same_bytes(
    kv_format: str, dtype: torch.dtype, device: torch.device
) -> None:
    case = make_case(4, 2, 20, dtype, device)
    case.rows[..., :20], case.rows[..., 20:] = 1.0, 0.0  # keys are not rotated
    if kv_format == "int8":
        case.qkv[2, 4:, 5] = torch.nan  # must remain visible, also alongside larger numbers
    kv_dtype = dtype if kv_format == "auto" else torch.uint8
    together = make_kv(case, kv_dtype, 24 if kv_format == "int8" else 20)
    alone = together.clone()
    _, k, v = case.qkv.split([4, 2, 2], dim=1)
    write_kv(layer_kv(alone[:, 1], kv_format, 0.5, 2.0), k, v, case.slots)
    kv = together[:, 1]
    case.run(kv.view(torch.float8_e4m3fn) if kv_format == "fp8" else kv, k_scale=0.5, v_scale=2.0)
    assert torch.equal(alone, together) and not torch.equal(alone[:, 1], alone[:, 0])
    if kv_format == "int8":
        rows = rows_of(scales_in_rows(alone), 1)[:, SLOTS[2]]
        assert rows[..., 20:].contiguous().view(torch.float32).isnan().all()


def test_unsupported_kv_memory_is_rejected(device: torch.device) -> None:
    case = make_case(4, 2, 16, torch.float32, device)
    with pytest.raises(AssertionError, match="no KV format"):
        case.run(make_kv(case, torch.float16, 16)[:, 0])
    with pytest.raises(AssertionError, match="needs rows of 20"):
        case.run(make_kv(case, torch.uint8, 16)[:, 0])
    with pytest.raises(AssertionError, match="blocks must be contiguous"):
        case.run(make_kv(case, torch.float32, 17)[:, 0, ..., :16])
