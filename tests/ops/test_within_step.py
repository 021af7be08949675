"""Compare attention within a step, by torch and by the C++ core, with plain loops."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from quire.base.errors import ConfigError
from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.select import make_backend
from quire.ops.attention.within_step import PIECE, CoreWithinStep, WithinStep
from quire.ops.attention_inputs import AttentionStep, Scores
from quire.ops.host.native import core
from quire.spec.cache_group import STEP, CacheGroup

HEADS = 3
SCALE = 0.3
needs_core = pytest.mark.skipif(core() is None, reason="the C++ core was not built")


def layout(dtype: torch.dtype, window: int | None, size: int = 16) -> KVLayout:
    """Return a layout of two layers, of which the second attends."""
    group = CacheGroup(STEP, (0, 1), HEADS, size, window)
    return KVLayout((group,), (400,), 16, dtype, torch.device("cpu"))


def step_of(lengths: Sequence[int]) -> AttentionStep:
    """Return a step with rows of these lengths. Its tables and slots have no meaning."""
    lens = np.array(lengths, np.int32)
    num_tokens = int(lens.sum())
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    positions = np.concatenate([np.arange(each) for each in lengths])
    return AttentionStep(
        torch.from_numpy(positions),
        torch.from_numpy(starts),
        torch.from_numpy(lens),
        (torch.zeros(num_tokens, dtype=torch.int64),),
        (torch.zeros(len(lens), 1, dtype=torch.int32),),
        lens,
        lens,
    )


def qkv(lengths: Sequence[int], size: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(lengths))
    return torch.randn(3, sum(lengths), HEADS, size, generator=generator, dtype=torch.float64)


def attended(
    backend: AttentionBackend, lengths: Sequence[int], qkv_3TNH: torch.Tensor
) -> torch.Tensor:
    backend.prepare(step_of(lengths))
    backend.write(0, *(qkv_3TNH[1:] * 2))  # left over from another layer
    q, k, v = qkv_3TNH
    backend.write(1, k, v)
    return backend.run(1, q.contiguous(), Scores(SCALE))


def by_loops(lengths: Sequence[int], qkv_3TNH: torch.Tensor, window: int | None) -> torch.Tensor:
    rows = []
    for q, k, v in (part.unbind(0) for part in qkv_3TNH.split(list(lengths), dim=1)):
        for i in range(len(q)):
            seen = [j for j in range(len(q)) if window is None or abs(i - j) < window]
            weights = torch.softmax(SCALE * torch.einsum("nh,cnh->nc", q[i], k[seen]), dim=1)
            rows.append(torch.einsum("nc,cnh->nh", weights, v[seen]))
    return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 1, 6, 70])
def test_each_token_attends_to_its_row_on_both_sides(window: int | None) -> None:
    lengths = (1, 40, 7, 130, 2)
    numbers = qkv(lengths)
    found = attended(WithinStep(layout(torch.float64, window)), lengths, numbers)
    torch.testing.assert_close(found, by_loops(lengths, numbers, window), rtol=1e-12, atol=1e-12)


def test_long_rows_are_computed_in_pieces() -> None:
    """The window crosses the edge of a piece, and the row is not a multiple of it."""
    lengths = (PIECE + 300, 5)
    numbers = qkv(lengths)
    found = attended(WithinStep(layout(torch.float64, 400)), lengths, numbers)
    q, k, v = (x.transpose(0, 1) for x in numbers[:, : lengths[0]])
    at = torch.arange(lengths[0])
    scores = SCALE * (q @ k.transpose(1, 2))
    far = (at[:, None] - at).abs() >= 400
    wanted = (scores.masked_fill(far, -torch.inf).softmax(-1) @ v).transpose(0, 1)
    torch.testing.assert_close(found[: lengths[0]], wanted, rtol=1e-11, atol=1e-11)


@needs_core
@pytest.mark.parametrize("size", [16, 20, 64])
@pytest.mark.parametrize("window", [None, 1, 6, 65, 300])
def test_core_equals_torch_over_many_spans(window: int | None, size: int) -> None:
    lengths = (600, 1, 33, 257, 256, 90)
    numbers = qkv(lengths, size).float()
    wanted = attended(WithinStep(layout(torch.float64, window, size)), lengths, numbers.double())
    found = attended(CoreWithinStep(layout(torch.float32, window, size)), lengths, numbers)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 65])
def test_core_gives_a_row_the_same_bits_in_any_batch(
    window: int | None, dtype: torch.dtype
) -> None:
    backend, lengths = CoreWithinStep(layout(dtype, window)), (300, 5, 600, 17)
    numbers = qkv(lengths).to(dtype)
    together = attended(backend, lengths, numbers).split(list(lengths))
    parts = numbers.split(list(lengths), dim=1)
    for length, part, found in zip(lengths, parts, together, strict=True):
        assert torch.equal(attended(backend, [length], part), found)


def test_make_backend_selects_backends_for_encoders() -> None:
    fastest = "torch" if core() is None else "cpu"
    assert make_backend("auto", layout(torch.float32, None)).name == fastest
    assert make_backend("auto", layout(torch.float64, None)).name == "torch"
    with pytest.raises(ConfigError, match="attention_backend triton needs a KV cache"):
        make_backend("triton", layout(torch.float32, None))
