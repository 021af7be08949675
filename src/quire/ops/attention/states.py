"""Layers that remember a state: where a step finds and leaves it, and what they do, by plain torch.

Shape legend as in `base.py`, and: C channels of a convolution, W its width, K key heads, N value
heads (a multiple of K), D and E the sizes of their vectors.

A layer's state is `state_size` numbers of the type that sums are made in: the last W - 1 inputs of
its convolution, [C, W - 1], and behind them the memory of its delta rule, [N, D, E]. Logical block
i of a sequence stands for its tokens i P .. (i + 1) P - 1 and holds the state behind the last of
them that there is. A row whose tokens n .. m - 1 are computed starts with the state in the block of
token n - 1 (zeros if n is 0), and leaves in each block that it comes through the state behind it,
or behind token m - 1: the table's entry is -1 where nobody wants it.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.ops.attention.base import AttentionBackend, AttentionStep, DeltaHeads, KVLayout
from quire.ops.attention.kv_memory import MovesBlocks
from quire.ops.precision import accumulation_dtype
from quire.ops.registry import op

NORM_EPS = 1e-6  # of queries and keys


class StateRow(NamedTuple):
    """A row's way through its blocks. start: block of the state that it starts with, -1 for zeros.
    pieces: (first token, end, block or -1), tokens of the step."""

    start: int
    pieces: tuple[tuple[int, int, int], ...]


def state_rows(step: AttentionStep, table_SL: torch.Tensor, block_size: int) -> Iterator[StateRow]:
    """Follow each row of a step. Waits for the device."""
    starts, tables = step.query_starts_S1.tolist(), table_SL.tolist()
    for row, context in enumerate(step.context_lens_S.tolist()):
        first, end = starts[row], starts[row + 1]
        if first == end:
            continue
        offset = context - end  # of a position from the token's place in the step
        begin = first + offset
        table = tables[row]
        pieces = []
        for index in range(begin // block_size, (context - 1) // block_size + 1):
            piece_end = min((index + 1) * block_size, context) - offset
            pieces.append((max(first, index * block_size - offset), piece_end, table[index]))
        yield StateRow(table[(begin - 1) // block_size] if begin else -1, tuple(pieces))


class KeepsStates(AttentionBackend):
    """Does what layers with states do row by row, token by token."""

    @abstractmethod
    def states(self, layer: int) -> torch.Tensor:
        """Return the layer's states in all blocks, [B, state_size], to be written to."""

    @abstractmethod
    def state_rows(self, layer: int) -> list[StateRow]:
        """Return the ways of the prepared step's rows."""

    @op("convolve")
    def convolve(self, layer: int, x_TC: torch.Tensor, weight_CW: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        dtype = accumulation_dtype(x_TC.dtype)
        channels, width = weight_CW.shape
        states = self.states(layer)[:, : channels * (width - 1)].unflatten(1, (channels, width - 1))
        out_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
        for row in self.state_rows(layer):
            past = states[row.start] if row.start >= 0 else torch.zeros_like(states[0])
            for first, end, block in row.pieces:
                inputs_CT = torch.cat([past, x_TC[first:end].T.to(dtype)], dim=1)
                kernel = weight_CW.to(dtype)[:, None]
                made_CT = F.conv1d(inputs_CT[None], kernel, groups=channels)[0]
                out_TC[first:end] = F.silu(made_CT).T.to(x_TC.dtype)
                past = inputs_CT[:, inputs_CT.shape[1] - (width - 1) :]
                if block >= 0:
                    states[block] = past
        return out_TC

    @op("delta_rule")
    def delta_rule(
        self,
        layer: int,
        qkv_TC: torch.Tensor,
        gates_TG: torch.Tensor,
        rate_N: torch.Tensor,
        shift_N: torch.Tensor,
        heads: DeltaHeads,
    ) -> torch.Tensor:
        """See AttentionBackend."""
        dtype = accumulation_dtype(qkv_TC.dtype)
        q_TND, k_TND, v_TNE = split_heads(qkv_TC.to(dtype), heads)
        beta_TN, decay_TN = delta_gates(gates_TG, rate_N, shift_N)
        shape = (heads.values, heads.key_dim, heads.value_dim)
        states = self.states(layer)[:, -heads.memory_size :].unflatten(1, shape)
        out_TNE = torch.empty_like(v_TNE)
        for row in self.state_rows(layer):
            memory = states[row.start] if row.start >= 0 else torch.zeros_like(states[0])
            for first, end, block in row.pieces:
                for t in range(first, end):
                    memory = memory * decay_TN[t, :, None, None]
                    k_ND1, q_ND1 = k_TND[t, :, :, None], q_TND[t, :, :, None]
                    wrong_NE = v_TNE[t] - (memory * k_ND1).sum(1)
                    memory = memory + k_ND1 * (beta_TN[t, :, None] * wrong_NE)[:, None]
                    out_TNE[t] = (memory * q_ND1).sum(1)
                if block >= 0:
                    states[block] = memory
        return out_TNE.to(qkv_TC.dtype)


class StatesInBlocks(MovesBlocks, KeepsStates):
    """Does that with the states of a KVMemory."""

    _layout: KVLayout
    _step: AttentionStep | None = None
    _rows: tuple[AttentionStep, dict[int, list[StateRow]]] | None = None  # by group

    def states(self, layer: int) -> torch.Tensor:
        """See KeepsStates."""
        group, index = self._memory.place[layer]
        return self._memory.kv[group][0, index, 0, :, 0]

    def state_rows(self, layer: int) -> list[StateRow]:
        """See KeepsStates; found once for all layers of a group."""
        step, group = self._step, self._memory.place[layer][0]
        assert step is not None, "prepare comes first"
        if self._rows is None or self._rows[0] is not step:
            self._rows = step, {}
        found = self._rows[1]
        if group not in found:
            table_SL = step.block_tables_SL[group]
            found[group] = list(state_rows(step, table_SL, self._layout.block_size))
        return found[group]


def split_heads(
    qkv_TC: torch.Tensor, heads: DeltaHeads
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries and keys [T, N, D], of length 1 / sqrt(D) and 1, and values [T, N, E]."""
    size = heads.keys * heads.key_dim
    q, k, v = qkv_TC.split([size, size, heads.values * heads.value_dim], dim=1)
    q_TKD, k_TKD = (
        each * (each.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
        for each in (q.unflatten(1, (heads.keys, -1)), k.unflatten(1, (heads.keys, -1)))
    )
    times = heads.values // heads.keys
    q_TND = (q_TKD * heads.key_dim**-0.5).repeat_interleave(times, 1)
    return q_TND, k_TKD.repeat_interleave(times, 1), v.unflatten(1, (heads.values, -1))


def delta_gates(
    gates_TG: torch.Tensor, rate_N: torch.Tensor, shift_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how much of each token is taken in and how much of the memory stays, [T, N] each."""
    strength_TN, time_TN = gates_TG.chunk(2, dim=1)
    dtype = accumulation_dtype(gates_TG.dtype)
    decay_TN = torch.exp(-rate_N * F.softplus(time_TN.to(dtype) + shift_N))
    return strength_TN.sigmoid().to(dtype), decay_TN
