"""Layers with states on a CPU by the C++ core (csrc/states.h), directly on their blocks.

Shape legend: as in `states.py`. A sequence's results have the same bits in any batch, with any
division of the sequence into steps, and on any number of threads.
"""

from typing import NamedTuple

import torch

from quire.ops.attention.base import KVLayout
from quire.ops.attention.kv_memory import KVMemory
from quire.ops.attention_inputs import AttentionStep, DeltaHeads
from quire.ops.host.native import address, needed_core
from quire.ops.host.native_types import CoreRows, CoreStatePlan, CoreStates
from quire.ops.host.threads import num_threads
from quire.ops.weights.packed import ELEMENTS
from quire.spec.cache_group import STATE

MAX_WIDTH = 16  # maximum width of a convolution, as in csrc/states.h


class LayerStates(NamedTuple):
    """A layer's cache group, and its states as the core's type."""

    group: int
    states: CoreStates


class StatesInCore:
    """Operations of the layers with states. groups: cache groups of states, none for most models.
    variant: attention's instruction set, by number."""

    def __init__(self, memory: KVMemory, layout: KVLayout, variant: int) -> None:
        self._core, self._variant = needed_core(), variant
        self._block_size = layout.block_size
        self.groups = [g for g, group in enumerate(layout.groups) if group.kind == STATE]
        self._plans = {group: self._core.StatePlan() for group in self.groups}
        self._layers = {
            layer: LayerStates(group, self._states(memory.kv[group][0, index]))
            for layer, (group, index) in memory.location.items()
            if group in self._plans
        }

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    def prepare(self, group: int, step: AttentionStep, table_SL: torch.Tensor) -> None:
        """Compute the rows' paths through a group's table [S, L], whose rows must be contiguous."""
        assert table_SL.dtype == torch.int32, f"needs int32 tables, got {table_SL.dtype}"
        self._plans[group].prepare(
            tables=table_SL.data_ptr(),
            table_stride=table_SL.stride(0),
            query_starts=address(step.query_starts_S1, torch.int32),
            context_lens=address(step.context_lens_S, torch.int32),
            has_drafts=0 if step.has_drafts_S is None else address(step.has_drafts_S, torch.bool),
            num_rows=len(step.context_lens_S),
            block_size=self._block_size,
        )

    def plan(self, group: int) -> CoreStatePlan:
        """Return the plan of the prepared step's rows in a group; valid until the next step."""
        return self._plans[group]

    def layer(self, layer: int) -> LayerStates:
        """Return a layer's states; the addresses never change."""
        return self._layers[layer]

    def convolve(self, layer: int, x_TC: torch.Tensor, weight_CW: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        group, states = self._layers[layer]
        channels, width = weight_CW.shape
        assert x_TC.shape[1] == channels, "weights of each channel"
        assert 1 < width <= MAX_WIDTH, f"a convolution of {width}"
        out_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype)
        weight_WC = weight_CW.T.float().contiguous()
        self._core.convolve(
            self._plans[group],
            states,
            self._rows(out_TC),
            self._rows(x_TC),
            address(weight_WC, torch.float32),
            channels,
            width,
            num_threads(),
        )
        return out_TC

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
        group, states = self._layers[layer]
        assert qkv_TC.shape[1] == heads.channels, "queries, keys and values"
        assert gates_TG.shape[1] == 2 * heads.values, "strengths and times"
        out_TNE = torch.empty(len(qkv_TC), heads.values, heads.value_dim, dtype=qkv_TC.dtype)
        self._core.delta_rule(
            self._plans[group],
            states,
            heads,
            self._rows(out_TNE.flatten(1)),
            self._rows(qkv_TC),
            self._rows(gates_TG),
            address(rate_N, torch.float32),
            address(shift_N, torch.float32),
            num_threads(),
            self._variant,
        )
        return out_TNE

    def _states(self, states_1B1S: torch.Tensor) -> CoreStates:
        """Return a layer's part [1, B, 1, state_size] of a KVMemory as the core's type."""
        data, size = address(states_1B1S, torch.float32), states_1B1S.shape[-1]
        return self._core.StateLayer(data=data, size=size)

    def _rows(self, x_TC: torch.Tensor) -> CoreRows:
        """Return rows [T, C] as the core's type."""
        stride, of_number = x_TC.stride()
        assert of_number == 1 or x_TC.shape[1] == 1, f"a token must be contiguous: {x_TC.stride()}"
        return self._core.HeadRows(
            data=x_TC.data_ptr(), element=ELEMENTS[x_TC.dtype], stride=stride
        )
