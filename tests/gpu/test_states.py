"""Layers with states at the size of a real layer: compiled kernels against torch's operations.

`make gpu-check PART=models` runs these; elsewhere they are not collected.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.torch_cpu import TorchBackend
from quire.ops.attention.triton_gpu import TritonBackend
from quire.ops.attention_inputs import AttentionStep, DeltaHeads
from quire.ops.kernels.attention.delta_chunks import Chunks
from quire.spec.cache_group import STATE, CacheGroup

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
NEXT_80B, SMALL = DeltaHeads(16, 32, 128, 128), DeltaHeads(16, 16, 128, 128)
WIDTH, P = 4, 16
MAX_TOKENS = 2**11  # of one row
NEAR = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-16}
# Tokens before the step and in it: prompts, a turn resumed within a block, drafts, decoding.
ROWS = ((0, MAX_TOKENS), (0, 100), (50, 77), (33, 5), (48, 1), (7, 1), (160, 640), (0, 1))


class Layer:
    """The weights of a layer, and its inputs as a merged projection returns them."""

    def __init__(self, heads: DeltaHeads, tokens: int, dtype: torch.dtype, seed: int = 0) -> None:
        draw = torch.Generator(DEVICE).manual_seed(seed)

        def made(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=kind, device=DEVICE).normal_(generator=draw)

        self.heads, values = heads, heads.values
        self.weight = made(heads.channels, WIDTH) / 2
        self.rate = made(values, kind=torch.float32).abs()
        self.shift = made(values, kind=torch.float32) - 2.0
        wide = made(tokens, heads.channels + 2 * values + 64)
        self.x, self.gates, _ = wide.split([heads.channels, 2 * values, 64], dim=1)

    def layout(self, dtype: torch.dtype, num_blocks: int) -> KVLayout:
        size = self.heads.channels * (WIDTH - 1) + self.heads.memory_size
        group = CacheGroup(STATE, (0, 1), state_size=size)
        return KVLayout((group,), (num_blocks,), P, dtype, DEVICE)

    def outputs(self, backend: AttentionBackend, tokens: slice) -> torch.Tensor:
        x = backend.convolve(1, self.x[tokens], self.weight)
        given = self.gates[tokens], self.rate, self.shift, self.heads
        return backend.delta_rule(1, x, *given).flatten(1)


def tables_of(rows: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, int]:
    """Return block tables and their number of blocks. A row has blocks for its first and last
    state, and for every seventh state between."""
    longest = max(-(-sum(row) // P) for row in rows)
    tables, used = np.full((len(rows), longest), -1, np.int32), 0
    for table, (before, count) in zip(tables, rows, strict=True):
        wanted = {max(before - 1, 0) // P, (before + count - 1) // P}
        wanted |= set(range(before // P, (before + count) // P, 7))
        for index in sorted(wanted):
            table[index] = used
            used += 1
    return torch.from_numpy(tables).to(DEVICE), used


def step_of(rows: Sequence[tuple[int, int]], tables: torch.Tensor) -> AttentionStep:
    lens = np.array([count for _, count in rows], np.int32)
    contexts = np.array([sum(row) for row in rows], np.int32)
    starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    total = int(starts[-1])
    return AttentionStep(
        torch.zeros(total, dtype=torch.int64, device=DEVICE),
        torch.from_numpy(starts).to(DEVICE),
        torch.from_numpy(contexts).to(DEVICE),
        (torch.full((total,), -1, device=DEVICE),),
        (tables,),
        lens,
        contexts,
    )


def results(
    backend: AttentionBackend, layer: Layer, rows: Sequence[tuple[int, int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of the step over the rows, and the states after it. An earlier step
    computes the tokens before it from the layer's first inputs."""
    tables, _ = tables_of(rows)
    untyped: Any = backend
    untyped._memory.kv[0].fill_(torch.nan)
    past = [(0, before) for before, _ in rows]
    backend.prepare(step_of(past, tables))
    layer.outputs(backend, slice(0, sum(before for before, _ in rows)))
    backend.prepare(step_of(rows, tables))
    out = layer.outputs(backend, slice(0, sum(count for _, count in rows)))
    return out.float(), untyped._memory.kv[0][0, 1, 0, :, 0]


@pytest.mark.parametrize("heads", [NEXT_80B, SMALL], ids=["80b", "small"])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_rows_of_any_length_match_torch(dtype: torch.dtype, heads: DeltaHeads) -> None:
    layer = Layer(heads, sum(count for _, count in ROWS), dtype)
    layout = layer.layout(dtype, tables_of(ROWS)[1])
    wanted, states = results(TorchBackend(layout), layer, ROWS)
    usual = {"chunks": Chunks()}
    settings: list[dict[str, Any]] = [usual, {"chunks": Chunks(tokens=64)}, {"deterministic": True}]
    for setting in settings:
        found, left = results(TritonBackend(layout, **setting), layer, ROWS)
        error = ((found - wanted).norm() / wanted.norm()).item()
        assert error < NEAR[dtype], f"{setting}: outputs are off by {error}"
        is_written = states.isfinite().all(1)
        assert torch.equal(is_written, left.isfinite().all(1)), (
            f"{setting}: wrong blocks are written"
        )
        error = ((left - states)[is_written].norm() / states[is_written].norm()).item()
        assert error < NEAR[dtype], f"{setting}: states are off by {error}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_deterministic_bits_do_not_depend_on_the_chunks(dtype: torch.dtype) -> None:
    layer, length = Layer(NEXT_80B, 300, dtype), 300
    table = torch.arange(-(-length // P), dtype=torch.int32, device=DEVICE)[None]
    found = []
    for lens in ([300], [123, 1, 1, 30, 145], [290] + [1] * 10):
        backend = TritonBackend(layer.layout(dtype, table.shape[1]), deterministic=True)
        done, parts = 0, []
        for count in lens:
            backend.prepare(step_of([(done, count)], table))
            parts.append(layer.outputs(backend, slice(done, done + count)))
            done += count
        found.append((torch.cat(parts), backend._memory.kv[0][0, 1].clone()))
    for out, states in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(states, found[0][1])


@pytest.mark.parametrize("rows", [((20, 1),) * 5, ((20, 1), (0, 60), (40, 3))])
def test_a_recorded_step_reads_inputs_from_the_device(rows: tuple[tuple[int, int], ...]) -> None:
    """The replayed step has other row lengths, other blocks, and fewer rows than were recorded."""
    layer = Layer(SMALL, 64, torch.bfloat16)
    tables, num_blocks = tables_of(rows)
    layout = layer.layout(torch.bfloat16, num_blocks)
    wanted = TritonBackend(layout)
    found = TritonBackend(layout)
    for backend in (wanted, found):
        backend._memory.kv[0].normal_(generator=torch.Generator(DEVICE).manual_seed(1))
    total = sum(count for _, count in rows)
    wanted.prepare(step_of(rows, tables))
    out = layer.outputs(wanted, slice(0, total))

    num_rows = len(rows) if total == len(rows) else 8
    step = step_of(
        [(0, 1)] * num_rows, torch.full((num_rows, tables.shape[1]), -1, device=DEVICE).int()
    )
    size = slice(0, num_rows if total == len(rows) else 64)
    found.prepare(step)
    graph = torch.cuda.CUDAGraph()
    before = found._memory.kv[0].clone()
    layer.outputs(found, size)
    with torch.cuda.graph(graph):
        replayed = layer.outputs(found, size)
    found._memory.kv[0].copy_(before)
    actual = step_of(rows, tables)
    step.query_starts_S1.fill_(total)[: len(rows)] = actual.query_starts_S1[:-1]
    step.context_lens_S.zero_()[: len(rows)] = actual.context_lens_S
    step.block_tables_SL[0][: len(rows)] = tables
    graph.replay()
    assert torch.equal(replayed[:total], out)
    assert torch.equal(found._memory.kv[0], wanted._memory.kv[0])
