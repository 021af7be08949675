"""Layers that remember a state: where a step finds and leaves it, and what they do, by plain torch.

Shape legend as in `base.py`, and: C channels of a convolution, W its width, K key heads, N value
heads (a multiple of K), D and E the sizes of their vectors.

A layer's state is `state_size` numbers of the type that sums are made in: the last W - 1 inputs of
its convolution, [C, W - 1], and behind them the memory of its delta rule, [N, D, E]. Logical block
i of a sequence stands for its tokens i P .. (i + 1) P - 1 and holds the state behind the last of
them that there is. A row whose tokens n .. m - 1 are computed starts with the state in the block of
token n - 1 (zeros if n is 0), and leaves in each block that it comes through the state behind it,
or behind token m - 1: the table's entry is -1 where nobody wants it. A row whose last tokens are
guesses leaves none, until it is known which of them are right (kept_inputs.py).
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.delta_chunks import remember_token, remember_tokens
from quire.ops.attention.kv_memory import MovesBlocks
from quire.ops.attention_inputs import AttentionStep, DeltaHeads
from quire.ops.precision import accumulation_dtype
from quire.ops.registry import op

NORM_EPS = 1e-6  # of queries and keys


class StateRow(NamedTuple):
    """A row's way through its blocks. start: block of the state that it starts with, -1 for zeros.
    pieces: (first token, end, block or -1), tokens of the step; only the last one has no block."""

    start: int
    pieces: tuple[tuple[int, int, int], ...]


def state_rows(step: AttentionStep, table_SL: torch.Tensor, block_size: int) -> Iterator[StateRow]:
    """Follow each row of a step. Waits for the device."""
    starts, tables = step.query_starts_S1.tolist(), table_SL.tolist()
    left_SL = left_table(step, table_SL).tolist()
    for row, context in enumerate(step.context_lens_S.tolist()):
        first, end = starts[row], starts[row + 1]
        if first == end:
            continue
        offset = context - end  # of a position from the token's place in the step
        begin = first + offset
        table, left = tables[row], left_SL[row]
        pieces: list[tuple[int, int, int]] = []
        for index in range(begin // block_size, (context - 1) // block_size + 1):
            piece_end = min((index + 1) * block_size, context) - offset
            if left[index] >= 0 or piece_end == end:
                pieces.append((pieces[-1][1] if pieces else first, piece_end, left[index]))
        yield StateRow(table[(begin - 1) // block_size] if begin else -1, tuple(pieces))


def left_table(step: AttentionStep, table_SL: torch.Tensor) -> torch.Tensor:
    """Return the blocks that take states, of a table of all."""
    if step.guessing_S is None:
        return table_SL
    return table_SL.masked_fill(step.guessing_S[:, None], -1)


class KeepsStates(AttentionBackend):
    """Does what layers with states do row by row, token by token."""

    _step: AttentionStep | None = None

    def prepare_states(self, step: AttentionStep) -> None:
        """See AttentionBackend."""
        self._step = step

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
        weight_WC = weight_CW.T.to(dtype).contiguous()
        for row in self.state_rows(layer):
            past_WC = (states[row.start] if row.start >= 0 else torch.zeros_like(states[0])).T
            for first, end, block in row.pieces:
                inputs_XC = torch.cat([past_WC, x_TC[first:end].to(dtype)])
                made_TC = inputs_XC[: end - first] * weight_WC[0]
                for w in range(1, width):
                    made_TC.addcmul_(inputs_XC[w : w + end - first], weight_WC[w])
                out_TC[first:end] = F.silu(made_TC).to(x_TC.dtype)
                past_WC = inputs_XC[end - first :]
                if block >= 0:
                    states[block] = past_WC.T
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
        beta_TN, log_decay_TN = delta_gates(gates_TG, rate_N, shift_N)
        decay_TN, states = log_decay_TN.exp().to(dtype), self._memories(layer, heads)
        out_TNE = torch.empty_like(v_TNE)
        for row in self.state_rows(layer):
            memory = states[row.start] if row.start >= 0 else torch.zeros_like(states[0])
            for first, end, block in row.pieces:
                for t in range(first, end):
                    tokens = q_TND[t], k_TND[t], v_TNE[t], decay_TN[t], beta_TN[t]
                    out_TNE[t], memory = remember_token(memory, *tokens)
                if block >= 0:
                    states[block] = memory
        return out_TNE.to(qkv_TC.dtype)

    def _memories(self, layer: int, heads: DeltaHeads) -> torch.Tensor:
        """Return the memories of a layer's delta rule in all blocks, [B, N, D, E]."""
        shape = (heads.values, heads.key_dim, heads.value_dim)
        memories: torch.Tensor = self.states(layer)[:, -heads.memory_size :].unflatten(1, shape)
        return memories


class StatesInBlocks(MovesBlocks, KeepsStates):
    """Does that with the states of a KVMemory, and the delta rule many tokens at once."""

    _layout: KVLayout
    _rows: tuple[AttentionStep, dict[int, list[StateRow]]] | None = None  # by group

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
        q_TND, k_TND, v_TNE = split_heads(qkv_TC.to(accumulation_dtype(qkv_TC.dtype)), heads)
        beta_TN, log_decay_TN = delta_gates(gates_TG, rate_N, shift_N)
        inputs = q_TND, k_TND, v_TNE, log_decay_TN, beta_TN
        states, out_TNE = self._memories(layer, heads), torch.empty_like(v_TNE)
        for row in self.state_rows(layer):
            memory = states[row.start] if row.start >= 0 else torch.zeros_like(states[0])
            for first, end, block in row.pieces:
                tokens = (x[first:end] for x in inputs)
                out_TNE[first:end], memory = remember_tokens(memory, *tokens)
                if block >= 0:
                    states[block] = memory
        return out_TNE.to(qkv_TC.dtype)

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
    """Return how much of each token is taken in, and, in float64, the logarithm of how much of the
    memory stays; [T, N] each."""
    strength_TN, time_TN = gates_TG.chunk(2, dim=1)
    dtype = accumulation_dtype(gates_TG.dtype)
    log_decay_TN = -rate_N * F.softplus(time_TN.to(dtype) + shift_N)
    return strength_TN.sigmoid().to(dtype), log_decay_TN.double()
