"""Layers that remember a state, in backends, beside loops over whole sequences in float64."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from quire.base.cache_group import STATE, CacheGroup
from quire.base.errors import ConfigError
from quire.ops.attention.base import AttentionBackend, AttentionStep, DeltaHeads, KVLayout
from quire.ops.attention.reference import ReferenceBackend
from quire.ops.attention.torch_cpu import TorchBackend
from quire.ops.attention.traced import TracedAttention

CPU = torch.device("cpu")
P = 4  # tokens of a block
HEADS = DeltaHeads(keys=2, values=4, key_dim=8, value_dim=6)
WIDTH = 4
NUM_BLOCKS = 64


def layout_of(dtype: torch.dtype, heads: DeltaHeads = HEADS, layers: int = 2) -> KVLayout:
    size = heads.channels * (WIDTH - 1) + heads.memory_size
    group = CacheGroup(STATE, tuple(range(layers)), state_size=size)
    return KVLayout((group,), (NUM_BLOCKS,), P, dtype, CPU)


def step_of(rows: Sequence[tuple[int, int, list[int]]]) -> AttentionStep:
    """rows: tokens before the step, tokens in it, and the row's table."""
    lens = np.array([count for _, count, _ in rows], np.int32)
    contexts = np.array([before + count for before, count, _ in rows], np.int32)
    longest = max(len(table) for *_, table in rows)
    tables = [table + [-1] * (longest - len(table)) for *_, table in rows]
    total = int(lens.sum())
    return AttentionStep(
        torch.zeros(total, dtype=torch.int64),
        torch.from_numpy(np.concatenate(([0], np.cumsum(lens))).astype(np.int32)),
        torch.from_numpy(contexts),
        (torch.full((total,), -1),),
        (torch.tensor(tables, dtype=torch.int32),),
        lens,
        contexts,
    )


class Inputs:
    """What a layer is given for one sequence, and what must come of it, by loops in float64."""

    def __init__(self, seed: int, length: int, heads: DeltaHeads, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(seed)
        shared = torch.Generator().manual_seed(7)
        self.heads = heads
        self.x = torch.randn(length, heads.channels, generator=draw).to(dtype)
        self.gates = torch.randn(length, 2 * heads.values, generator=draw).to(dtype)
        self.weight = torch.randn(heads.channels, WIDTH, generator=shared).to(dtype)
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        self.rate = torch.rand(heads.values, generator=shared).to(sums) + 0.1
        self.shift = torch.randn(heads.values, generator=shared).to(sums)

    def convolved(self) -> torch.Tensor:
        x, weight = self.x.double(), self.weight.double()
        padded = torch.cat([torch.zeros(WIDTH - 1, x.shape[1], dtype=x.dtype), x])
        made = sum(weight[:, w] * padded[w : w + len(x)] for w in range(WIDTH))
        return F.silu(torch.as_tensor(made))

    def remembered(self) -> torch.Tensor:
        """Of x itself as queries, keys and values."""
        heads, x, gates = self.heads, self.x.double(), self.gates.double()
        size, times = heads.keys * heads.key_dim, heads.values // heads.keys
        out = torch.zeros(len(x), heads.values, heads.value_dim, dtype=torch.float64)
        memory = torch.zeros(heads.values, heads.key_dim, heads.value_dim, dtype=torch.float64)
        for t, row in enumerate(x):
            for n in range(heads.values):
                at = n // times * heads.key_dim
                q, k = row[at : at + heads.key_dim], row[size + at : size + at + heads.key_dim]
                v = row[2 * size + n * heads.value_dim :][: heads.value_dim]
                q = q / (q.square().sum() + 1e-6).sqrt() / heads.key_dim**0.5
                k = k / (k.square().sum() + 1e-6).sqrt()
                time = gates[t, heads.values + n] + self.shift[n].double()
                memory[n] *= torch.exp(-self.rate[n].double() * F.softplus(time))
                memory[n] += torch.outer(k, gates[t, n].sigmoid() * (v - memory[n].T @ k))
                out[t, n] = memory[n].T @ q
        return out


def run(
    backend: AttentionBackend, inputs: Sequence[Inputs], layer: int, seed: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Compute sequences in steps of random lengths; each leaves random snapshots, and in some steps
    a sequence goes back to one of them and takes the rest again."""
    choose = random.Random(seed)
    free = list(range(NUM_BLOCKS))
    choose.shuffle(free)
    done = [0] * len(inputs)
    tables: list[list[int]] = [[] for _ in inputs]
    made: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in inputs]
    while any(count < len(each.x) for count, each in zip(done, inputs, strict=True)):
        rows, parts = [], []
        for i, each in enumerate(inputs):
            left = len(each.x) - done[i]
            count = choose.randint(0, min(left, 3 * P))
            if count == 0:
                continue
            table = tables[i]
            last = (done[i] + count - 1) // P
            for index in range(len(table), last + 1):
                wanted = index == last or choose.random() < 0.5
                table.append(free.pop() if wanted else -1)
            rows.append((done[i], count, list(table)))
            parts.append((i, done[i], done[i] + count))
        if not rows:
            continue
        backend.prepare(step_of(rows))
        x = torch.cat([inputs[i].x[first:end] for i, first, end in parts])
        gates = torch.cat([inputs[i].gates[first:end] for i, first, end in parts])
        one = inputs[0]
        convolved = backend.convolve(layer, x, one.weight)
        out = backend.delta_rule(layer, x, gates, one.rate, one.shift, one.heads)
        at = 0
        for i, first, end in parts:
            made[i] = made[i][:first]
            made[i] += zip(convolved[at:], out[at:], strict=True)
            made[i] = made[i][:end]
            at += end - first
            done[i] = end
            kept = [k for k, block in enumerate(tables[i]) if block >= 0 and (k + 1) * P <= end]
            if kept and choose.random() < 0.2:
                back = choose.choice(kept)
                free += [block for block in tables[i][back + 1 :] if block >= 0]
                del tables[i][back + 1 :]
                done[i] = (back + 1) * P
    return [(torch.stack([c for c, _ in each]), torch.stack([o for _, o in each])) for each in made]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("backend", [ReferenceBackend, TorchBackend])
def test_sequences_in_steps_of_any_length(
    backend: type[ReferenceBackend] | type[TorchBackend], seed: int
) -> None:
    dtype = torch.float64
    inputs = [Inputs(seed * 10 + i, 23 + 5 * i, HEADS, dtype) for i in range(3)]
    made = run(backend(layout_of(dtype)), inputs, seed % 2, seed)
    for each, (convolved, out) in zip(inputs, made, strict=True):
        torch.testing.assert_close(convolved, each.convolved(), rtol=0, atol=1e-12)
        torch.testing.assert_close(out, each.remembered(), rtol=0, atol=1e-12)


def test_a_backend_without_states_says_so() -> None:
    with pytest.raises(ConfigError, match="traced cannot run models whose layers remember"):
        AttentionBackend.convolve(TracedAttention(), 0, torch.zeros(1, 1), torch.zeros(1, 1))
