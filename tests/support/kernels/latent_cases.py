"""Steps over latent vectors in random blocks, for any backend, and one softmax per row to compare.

Shape legend: T tokens, N heads, L elements of a latent vector, V of them values, C tokens of a
sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention_inputs import AttentionStep, Scores
from quire.spec.cache_group import CacheGroup
from tests.support.models.paged_forward import RowPart, make_step

LAYER = 1


@dataclass(frozen=True)
class Latents:
    """Sequences of these lengths. shared: tokens at the beginning of all sequences that are the
    first sequence's, in its blocks."""

    lengths: tuple[int, ...] = (9, 31, 12, 1, 73)
    num_heads: int = 4
    size: int = 40
    num_values: int = 32
    block_size: int = 16
    kv_format: str = "auto"
    shared: int = 0

    @property
    def scale(self) -> float:
        return 2.0 * self.size**-0.5

    def layout(self, dtype: torch.dtype, device: torch.device) -> KVLayout:
        group = CacheGroup("latent", (0, LAYER), 1, self.size)
        num_blocks = sum(-(-length // self.block_size) for length in self.lengths) + 2
        return KVLayout((group,), (num_blocks,), self.block_size, dtype, device, self.kv_format)

    def tables(self, seed: int = 0) -> list[list[int]]:
        """Scattered blocks, none of them in two rows, but those that rows share."""
        counts = [-(-length // self.block_size) for length in self.lengths]
        order = np.random.default_rng(seed).permutation(sum(counts) + 2).tolist()
        tables = [[order.pop() for _ in range(count)] for count in counts]
        same = self.shared // self.block_size
        return [tables[0][:same] + table[same:] for table in tables]


@dataclass(frozen=True)
class Contents:
    """Queries [C, N, L] and latent vectors [C, L] of each sequence."""

    q: list[torch.Tensor]
    latents: list[torch.Tensor]


def make_contents(case: Latents, dtype: torch.dtype = torch.float32, seed: int = 0) -> Contents:
    """Random numbers that the dtype has, as the dtype."""
    generator = torch.Generator().manual_seed(seed)

    def rows(*shape: int) -> list[torch.Tensor]:
        found = [torch.randn(n, *shape, generator=generator).to(dtype) for n in case.lengths]
        for each in found[1:]:
            each[: case.shared] = found[0][: case.shared]
        return found

    return Contents(rows(case.num_heads, case.size), rows(case.size))


def softmax_rows(case: Latents, contents: Contents) -> list[torch.Tensor]:
    """Attention of all tokens of each sequence in float64, [C, N, V]."""
    found = []
    for q, latents in zip(contents.q, contents.latents, strict=True):
        scores = torch.einsum("qnl,cl->nqc", q.double(), latents.double()) * case.scale
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        values = latents[:, : case.num_values].double()
        found.append(torch.einsum("nqc,cv->qnv", weights, values))
    return found


def as_int8(x: torch.Tensor) -> torch.Tensor:
    """Vectors [C, L] as they are after they were stored."""
    largest = x.float().abs().amax(-1, keepdim=True)
    factor = torch.where(largest == 0, 0.0, torch.tensor(127.0) / largest)
    return (x.float() * factor).round() * (largest / 127.0)


def as_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Numbers as they are after they were stored in fp8, in float32. scale: their divisor."""
    scaled = (x.float() * torch.tensor(1 / scale)).clamp(-448.0, 448.0)
    return scaled.to(torch.float8_e4m3fn).float() * scale


def in_steps(
    backend: AttentionBackend,
    case: Latents,
    contents: Contents,
    steps: Sequence[Sequence[int]],
    device: torch.device,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Results [C, N, V] of each sequence, by steps of so many tokens of each. A sequence that
    shares blocks begins after them."""
    tables, done = case.tables(seed), [0] + [case.shared] * (len(case.lengths) - 1)
    found: list[list[torch.Tensor]] = [[] for _ in case.lengths]
    for lens in steps:
        rows = [r for r, n in enumerate(lens) if n]
        parts = [RowPart(done[r], done[r] + lens[r], (tables[r],)) for r in rows]
        q, latents = (
            torch.cat([x[r][done[r] : done[r] + lens[r]] for r in rows]).to(device)
            for x in (contents.q, contents.latents)
        )
        backend.prepare(_on(device, make_step(parts, case.block_size)))
        backend.write_latent(LAYER, latents)
        out = backend.run_latent(LAYER, q, Scores(case.scale), case.num_values)
        for r, piece in zip(rows, out.cpu().split([lens[r] for r in rows]), strict=True):
            found[r].append(piece)
            done[r] += lens[r]
    return [torch.cat(pieces) for pieces in found]


def _on(device: torch.device, step: AttentionStep) -> AttentionStep:
    if device.type == "cpu":
        return step
    from tests.kernels.test_attention import on

    return on(device, step)
