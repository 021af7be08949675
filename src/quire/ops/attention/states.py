"""Layers with states: where a step reads and stores a state, and these layers' operations in torch.

Shape legend: as in `base.py`, and C channels of a convolution (of a chunk: its tokens), W the
convolution's width, K key heads, N value heads (a multiple of K), D and E the sizes of their
vectors, G tokens of rows with drafts.

A layer's state is `state_size` numbers of the accumulation dtype. They are the last W - 1 inputs of
its convolution, [C, W - 1], and then the memory of its delta rule, [N, D, E]. Logical block i of a
sequence stands for its tokens i P .. (i + 1) P - 1. It holds the state after the last of them that
is computed. A row that computes the tokens n .. m - 1 starts with the state in the block of token n
- 1 (zeros if n is 0). In each block that it enters it stores the state after that block, or after
token m - 1. A table entry of -1 means that no state is stored there.

Drafts (T 4.4.4). A state cannot be rewound to the last accepted draft token. So the forward pass
reads the states of rows with drafts but stores none. It records the inputs of their layers: some
kilobytes per token, where a state has megabytes. After verification the layers process the accepted
tokens again and store the states after them, by the operations of a step without drafts.

Chunks. The gated delta rule processes many tokens at once by products of matrices. G[i] is the
product of the decays up to token i, L[i, j] is G[i] / G[j], and M is the memory before the chunk.
Token i changes the memory by k[i] times

    w[i] = beta[i] (v[i] - G[i] M^T k[i] - sum over j < i of L[i, j] (k[i] . k[j]) w[j])

This is one triangular system per chunk. Results and the memory after it are sums over w.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from quire.ops.attention.base import AttentionBackend, ForwardingBackend, KVLayout
from quire.ops.attention.kv_memory import MovesBlocks
from quire.ops.attention_inputs import AttentionStep, DeltaHeads, Int32
from quire.ops.embedding import select_rows
from quire.ops.host.host_memory import to_device
from quire.ops.precision import accumulation_dtype
from quire.ops.registry import op

CHUNK = 64


def remember_token(
    memory_NDE: torch.Tensor,
    q_ND: torch.Tensor,
    k_ND: torch.Tensor,
    v_NE: torch.Tensor,
    decay_N: torch.Tensor,
    beta_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one token's result, [N, E], and the memory after it, [N, D, E]."""
    memory_NDE = memory_NDE * decay_N[:, None, None]
    stored_NE = (k_ND[:, None] @ memory_NDE)[:, 0]
    change_NE = beta_N[:, None] * (v_NE - stored_NE)
    memory_NDE.baddbmm_(k_ND[:, :, None], change_NE[:, None])
    return (q_ND[:, None] @ memory_NDE)[:, 0], memory_NDE


def remember_tokens(
    memory_NDE: torch.Tensor,
    q_TND: torch.Tensor,
    k_TND: torch.Tensor,
    v_TNE: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of consecutive tokens, [T, N, E], and the memory after the last. log_decay
    is float64, because large values are subtracted from each other."""
    if len(q_TND) == 1:
        token = q_TND[0], k_TND[0], v_TNE[0], log_decay_TN[0].exp().to(v_TNE.dtype), beta_TN[0]
        out_NE, memory_NDE = remember_token(memory_NDE, *token)
        return out_NE[None], memory_NDE
    parts = []
    for chunk in zip(
        *(x.split(CHUNK) for x in (q_TND, k_TND, v_TNE, log_decay_TN, beta_TN)), strict=True
    ):
        out_NCE, memory_NDE = _remember_chunk(memory_NDE, *(x.transpose(0, 1) for x in chunk))
        parts.append(out_NCE.transpose(0, 1))
    return torch.cat(parts), memory_NDE


def _remember_chunk(
    memory_NDE: torch.Tensor,
    q_NCD: torch.Tensor,
    k_NCD: torch.Tensor,
    v_NCE: torch.Tensor,
    log_decay_NC: torch.Tensor,
    beta_NC: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Process the C tokens of one chunk by the triangular system; results are [N, C, E]."""
    dtype = v_NCE.dtype
    total_NC = log_decay_NC.cumsum(1)
    between_NCC = (total_NC[:, :, None] - total_NC[:, None]).tril().to(dtype).exp().tril()
    since_NC1, until_NC1 = (
        x.to(dtype).exp()[:, :, None] for x in (total_NC, total_NC[:, -1:] - total_NC)
    )
    kT_NDC = k_NCD.transpose(1, 2)
    system_NCC = beta_NC[:, :, None] * between_NCC * (k_NCD @ kT_NDC)
    target_NCE = beta_NC[:, :, None] * (v_NCE - since_NC1 * (k_NCD @ memory_NDE))
    w_NCE = torch.linalg.solve_triangular(system_NCC, target_NCE, upper=False, unitriangular=True)
    out_NCE = since_NC1 * (q_NCD @ memory_NDE) + (between_NCC * (q_NCD @ kT_NDC)) @ w_NCE
    return out_NCE, since_NC1[:, -1:] * memory_NDE + kT_NDC @ (until_NC1 * w_NCE)


class DeltaInputs(NamedTuple):
    """Inputs of a delta rule other than queries, keys and values."""

    gates_GG: torch.Tensor
    rate_N: torch.Tensor
    shift_N: torch.Tensor
    heads: DeltaHeads


class RecordedInputs(ForwardingBackend):
    """Backend for one step with draft tokens, which are the last tokens of some rows. It records
    the layers' inputs of these rows for `settle`. `has_drafts`: [S], which rows have draft tokens.
    """

    name = "kept"

    def __init__(self, inner: AttentionBackend, has_drafts: npt.NDArray[np.bool_]) -> None:
        super().__init__(inner)
        self._has_drafts = has_drafts
        self._step: AttentionStep | None = None
        self.indices_G = torch.empty(0, dtype=torch.int64)  # tokens of rows with drafts
        self._convolutions: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer
        self._rules: dict[int, DeltaInputs] = {}

    @property
    def has_any(self) -> bool:
        """Whether the model has layers with states."""
        return len(self._rules) > 0

    def prepare(self, step: AttentionStep) -> None:
        """See AttentionBackend."""
        self._step, device = step, step.positions_T.device
        indices = np.flatnonzero(np.repeat(self._has_drafts, step.query_lens_host))
        self.indices_G = to_device(indices, device)
        self.inner.prepare(replace(step, has_drafts_S=to_device(self._has_drafts, device)))

    def convolve(self, layer: int, x_TC: torch.Tensor, weight_CW: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        self.record_convolution(layer, self._own(x_TC), weight_CW)
        return self.inner.convolve(layer, x_TC, weight_CW)

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
        self.record_rule(layer, DeltaInputs(self._own(gates_TG), rate_N, shift_N, heads))
        return self.inner.delta_rule(layer, qkv_TC, gates_TG, rate_N, shift_N, heads)

    def record_convolution(self, layer: int, x_GC: torch.Tensor, weight_CW: torch.Tensor) -> None:
        """Record a convolution's inputs, [G, C], and its weights."""
        self._convolutions[layer] = x_GC, weight_CW

    def record_rule(self, layer: int, inputs: DeltaInputs) -> None:
        """Record a delta rule's inputs."""
        self._rules[layer] = inputs

    def _own(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Return the tokens of rows with drafts, [G, C]."""
        return select_rows(x_TC, self.indices_G)

    def settle(self, num_tokens: Int32) -> None:
        """Store the states after the first `num_tokens` tokens of each row with drafts."""
        step, rows = self._step, np.flatnonzero(self._has_drafts)
        assert step is not None, "prepare comes first"
        lens = step.query_lens_host[rows]
        firsts = np.cumsum(lens) - lens
        taken = np.concatenate(
            [first + np.arange(num) for first, num in zip(firsts, num_tokens, strict=True)]
        )
        device = self.indices_G.device
        contexts = step.context_lens_host[rows] - lens + num_tokens
        starts = np.concatenate([[0], np.cumsum(num_tokens)]).astype(np.int32)
        rows_S = to_device(rows, device)
        part = replace(  # positions and slots are not needed
            step,
            query_starts_S1=to_device(starts, device),
            context_lens_S=to_device(contexts.astype(np.int32), device),
            block_tables_SL=tuple(table_SL[rows_S] for table_SL in step.block_tables_SL),
            query_lens_host=num_tokens,
            context_lens_host=contexts,
        )
        self._run_layers(part, None if len(taken) == lens.sum() else to_device(taken, device))

    def _run_layers(self, part: AttentionStep, index: torch.Tensor | None) -> None:
        """Run the layers with states on recorded tokens. index: of these tokens; None: all."""
        self.inner.prepare_states(part)
        for layer, (x_GC, weight_CW) in self._convolutions.items():
            rule = self._rules[layer]
            gates_GG = rule.gates_GG
            if index is not None:
                x_GC, gates_GG = select_rows(x_GC, index), select_rows(gates_GG, index)
            qkv_TC = self.inner.convolve(layer, x_GC, weight_CW)
            numbers = rule.rate_N, rule.shift_N
            self.inner.delta_rule(layer, qkv_TC, gates_GG, *numbers, rule.heads)


class RecordedOnDevice(RecordedInputs):
    """RecordedInputs for a graph: only the device knows which rows have draft tokens, and how many
    were accepted. has_drafts: bool [S], on the device. num_tokens: G, at least the tokens of all
    rows with drafts; tokens after these are any of the step."""

    def __init__(
        self, inner: AttentionBackend, has_drafts_S: torch.Tensor, num_tokens: int
    ) -> None:
        super().__init__(inner, np.zeros(0, bool))
        self._has_drafts_S, self._num_tokens = has_drafts_S, num_tokens

    def prepare(self, step: AttentionStep) -> None:
        """See AttentionBackend."""
        lens_S = step.query_starts_S1.diff() * self._has_drafts_S
        self._step, self._ends_S = step, lens_S.cumsum(0)
        self.indices_G = self._tokens(step.query_starts_S1[:-1], lens_S)
        self.indices_G.clamp_(max=len(step.positions_T) - 1)
        self.inner.prepare(replace(step, has_drafts_S=self._has_drafts_S))

    def settle_up_to(self, contexts_S: torch.Tensor) -> None:
        """Store the states after the first tokens of each row with drafts, up to these numbers of
        tokens of its sequence, [S] on the device."""
        step = self._step
        assert step is not None, "prepare comes first"
        lens_S = step.query_starts_S1.diff()
        taken_S = (contexts_S - (step.context_lens_S - lens_S)) * self._has_drafts_S
        starts_S1 = torch.nn.functional.pad(taken_S.cumsum(0), (1, 0))
        part = replace(
            step,
            query_starts_S1=starts_S1.int(),
            context_lens_S=contexts_S.int(),
            has_drafts_S=None,
        )
        index_G = self._tokens(self._ends_S - lens_S * self._has_drafts_S, taken_S)
        self._run_layers(part, index_G.clamp_(max=self._num_tokens - 1))

    def _tokens(self, starts_S: torch.Tensor, lens_S: torch.Tensor) -> torch.Tensor:
        """Return the indices of the first lens [S] tokens after each of starts [S], row after row,
        [G] int64."""
        ends_S = lens_S.cumsum(0)
        at_G = torch.arange(self._num_tokens, device=ends_S.device)
        row_G = torch.searchsorted(ends_S, at_G, right=True).clamp_(max=len(ends_S) - 1)
        return at_G + (starts_S - ends_S + lens_S)[row_G]


NORM_EPS = 1e-6  # of queries and keys


class StateRow(NamedTuple):
    """Path of a row through its blocks. start: block of the initial state, -1 for zeros. pieces:
    (first token, end, block or -1) among the step's tokens; only the last may lack a block."""

    start: int
    pieces: tuple[tuple[int, int, int], ...]


def state_rows(step: AttentionStep, table_SL: torch.Tensor, block_size: int) -> Iterator[StateRow]:
    """Yield the path of each row that has tokens; table: [S, L]. Waits for the device."""
    starts, tables = step.query_starts_S1.tolist(), table_SL.tolist()
    stored_SL = stored_table(step, table_SL).tolist()
    for row, context in enumerate(step.context_lens_S.tolist()):
        first, end = starts[row], starts[row + 1]
        if first == end:
            continue
        offset = context - end  # of a position relative to the token's index in the step
        begin = first + offset
        table, stored = tables[row], stored_SL[row]
        pieces: list[tuple[int, int, int]] = []
        for index in range(begin // block_size, (context - 1) // block_size + 1):
            piece_end = min((index + 1) * block_size, context) - offset
            if stored[index] >= 0 or piece_end == end:
                pieces.append((pieces[-1][1] if pieces else first, piece_end, stored[index]))
        yield StateRow(table[(begin - 1) // block_size] if begin else -1, tuple(pieces))


def stored_table(step: AttentionStep, table_SL: torch.Tensor) -> torch.Tensor:
    """Return the block table [S, L] for storing states: -1 in the rows with draft tokens."""
    if step.has_drafts_S is None:
        return table_SL
    return table_SL.masked_fill(step.has_drafts_S[:, None], -1)


class StateLayers(AttentionBackend):
    """Base of backends with states; computes their layers row by row and token by token."""

    _step: AttentionStep | None = None

    def prepare_states(self, step: AttentionStep) -> None:
        """See AttentionBackend."""
        self._step = step

    @abstractmethod
    def states(self, layer: int) -> torch.Tensor:
        """Return the layer's states in all blocks, [B, state_size], as writable memory."""

    @abstractmethod
    def state_rows(self, layer: int) -> list[StateRow]:
        """Return the paths of the prepared step's rows."""

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


class StatesInBlocks(MovesBlocks, StateLayers):
    """Base of backends with states in a KVMemory; its delta rule processes many tokens at once."""

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
        """See StateLayers."""
        group, index = self._memory.location[layer]
        return self._memory.kv[group][0, index, 0, :, 0]

    def state_rows(self, layer: int) -> list[StateRow]:
        """See StateLayers; computed once for all layers of a group."""
        step, group = self._step, self._memory.location[layer][0]
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
    """Split [T, C] into queries and keys [T, N, D], of length 1 / sqrt(D) and 1, and values."""
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
    """Return the tokens' strengths and the float64 logarithms of the memory's decay, [T, N]."""
    strength_TN, time_TN = gates_TG.chunk(2, dim=1)
    dtype = accumulation_dtype(gates_TG.dtype)
    log_decay_TN = -rate_N * F.softplus(time_TN.to(dtype) + shift_N)
    return strength_TN.sigmoid().to(dtype), log_decay_TN.double()
