"""Attention on a CPU by the C++ core (csrc/attention.h), for all rows, directly on their blocks.

Shape legend: as in `base.py`, and G = N / K query heads of one KV head.

A step's work is cut once per cache group, for all of its layers. A query's result has the same bits
in any batch, with any chunks of its sequence, and on any number of threads.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from quire.base.errors import ConfigError
from quire.ops.attention.base import KVLayout, Part
from quire.ops.attention.core_calls import StepAddresses, cut_step, kv_layer
from quire.ops.attention.core_states import StatesInCore
from quire.ops.attention.kv_memory import KVMemory, MovesBlocks
from quire.ops.attention_inputs import AttentionStep, DeltaHeads, Int32, Scores
from quire.ops.host.native import address, core, needed_core
from quire.ops.host.native_types import CoreKV, CorePlan, CoreRows
from quire.ops.host.threads import num_threads
from quire.ops.registry import op
from quire.ops.weights import formats
from quire.ops.weights.formats import ATTENTION, chosen_variant
from quire.ops.weights.packed import ELEMENTS
from quire.spec.cache_group import LATENT

KV_FORMATS = ("auto", "int8", "fp8")


def why_not(layout: KVLayout) -> str | None:
    """Return the reason why this backend cannot serve the layout; None if it can."""
    if layout.device.type != "cpu":
        return f"it is for CPUs, not {layout.device.type}"
    if layout.dtype not in ELEMENTS:
        return f"it has float32, bfloat16 and float16, not {layout.dtype}"
    if layout.kv_format not in KV_FORMATS:
        return f"it stores keys and values as auto, int8 or fp8, not {layout.kv_format!r}"
    bytes_of_number = layout.dtype.itemsize if layout.kv_format == "auto" else 1
    sizes = [group.head_dim for group in layout.groups if group.kind == LATENT]
    if any(size * bytes_of_number % 4 for size in sizes):
        return f"latent vectors must have a multiple of 4 bytes, got {sizes} numbers"
    if layout.kv_format == "fp8" and any(0 < group.head_dim < 4 for group in layout.groups):
        return "fp8 needs heads of at least 4 numbers"
    return "the C++ core was not built" if core() is None else None


@dataclass(frozen=True)
class LayerKV:
    """A layer's cache group, and its keys and values as the core's type."""

    group: int
    kv: CoreKV


class CpuBackend(MovesBlocks):
    """Backend of the C++ core. Raises ConfigError for a layout that it cannot serve.

    states: layers with states. variant: instruction set, a name from `variants`.
    split, cascade: whether work may be cut along contexts, and whether rows that share blocks may
    read them together. Neither changes any bit of the results. scales: of a layer's fp8 keys and
    values, 1 if absent.
    """

    name = "cpu"

    def __init__(
        self,
        layout: KVLayout,
        *,
        variant: str | None = None,
        split: bool = True,
        cascade: bool = True,
        scales: Mapping[int, tuple[float, float]] | None = None,
    ) -> None:
        reason = why_not(layout)
        if reason is not None:
            raise ConfigError(f"attention_backend cpu cannot be used here: {reason}; take torch.")
        self._core = needed_core()
        self._layout = layout
        self._step: AttentionStep | None = None
        self._memory = KVMemory(layout)
        self.variant = variant_number(variant or chosen_variant(multiplied_as(layout)))
        self._scales = dict(scales or {})
        self.states = StatesInCore(self._memory, layout, self.variant)
        self._layers = {
            layer: self._layer_kv(layer)
            for layer in self._memory.location
            if layer not in self.states
        }
        self._options = (split, cascade)
        self._tables: list[torch.Tensor] = []
        self._plans = [self._core.AttentionPlan() for _ in layout.groups]
        self._planned = [0] * len(layout.groups)  # G of each group's plan of this step, 0 for none

    def prepare(self, step: AttentionStep) -> None:
        """Accept a step. Its work is cut when a group's first layer gives its number of heads."""
        self._step = step
        self._tables = _contiguous_rows(step)
        self._planned = [0] * len(self._plans)
        for group in self.states.groups:
            self.states.prepare(group, step, self._tables[group])

    def prepare_states(self, step: AttentionStep) -> None:
        """See AttentionBackend."""
        tables = _contiguous_rows(step)
        for group in self.states.groups:
            self.states.prepare(group, step, tables[group])

    @property
    def layers(self) -> list[int]:
        """All layers, including layers with states."""
        return sorted(self._memory.location)

    def location(self, layer: int) -> tuple[int, int]:
        """Return a layer's cache group, and its index in the group."""
        return self._memory.location[layer]

    def layer_kv(self, layer: int) -> LayerKV:
        """Return a layer's keys and values; their addresses never change."""
        return self._layers[layer]

    def slots(self, group: int) -> torch.Tensor:
        """Return the prepared step's slots in a group, int64 [T]."""
        assert self._step is not None, "prepare comes first"
        return self._step.slots_T[group]

    def plan(self, group: int, queries_per_kv_head: int) -> CorePlan:
        """Return the plan of the prepared step's work in a group; valid until the next step."""
        plan = self._plans[group]
        if self._planned[group] != queries_per_kv_head:
            self._make_plan(plan, group, queries_per_kv_head)
            self._planned[group] = queries_per_kv_head
        return plan

    @op("kv_write")
    def write(self, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        """Store this step's keys and values, [T, K, H] each, in their slots."""
        self._store(layer, k_TKH, v_TKH)

    def _store(self, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        kv = self._layers[layer]
        slots_T = self.slots(kv.group)
        assert len(slots_T) == len(k_TKH) == len(v_TKH), "one key and one value per slot"
        self._core.store_kv(
            kv.kv,
            self._head_rows(k_TKH),
            self._head_rows(v_TKH),
            address(slots_T, torch.int64),
            len(slots_T),
            num_threads(),
        )

    @op("attention")
    def run(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, out_TNH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend for all rows, [T, N, H]."""
        if out_TNH is None:
            out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
        sinks = 0 if scores.sinks_N is None else address(scores.sinks_N, torch.float32)
        self._attend(self._layers[layer], q_TNH, out_TNH, scores, (sinks, 0))
        return out_TNH

    def run_part(self, layer: int, q_TNH: torch.Tensor, scores: Scores) -> Part:
        """See AttentionBackend."""
        out_TNH = torch.empty(q_TNH.shape, dtype=torch.float32)
        sums_TN2 = torch.empty(*q_TNH.shape[:2], 2)
        sums = address(sums_TN2, torch.float32)
        self._attend(self._layers[layer], q_TNH, out_TNH, scores, (0, sums))
        largest_TN, sum_TN = sums_TN2.unbind(-1)
        return Part(out_TNH, largest_TN + sum_TN.log())

    @op("latent_write")
    def write_latent(self, layer: int, latent_TL: torch.Tensor) -> None:
        """See AttentionBackend."""
        self._store(layer, latent_TL[:, None], latent_TL[:, None])

    @op("latent_attention")
    def run_latent(
        self, layer: int, q_TNL: torch.Tensor, scores: Scores, num_values: int
    ) -> torch.Tensor:
        """See AttentionBackend."""
        out_TNV = torch.empty(*q_TNL.shape[:2], num_values, dtype=q_TNL.dtype)
        kv = self._layer_kv(layer, num_values)
        sinks = 0 if scores.sinks_N is None else address(scores.sinks_N, torch.float32)
        self._attend(kv, q_TNL, out_TNV, scores, (sinks, 0))
        return out_TNV

    def _attend(
        self,
        kv: LayerKV,
        q_TNH: torch.Tensor,
        out_TNH: torch.Tensor,
        scores: Scores,
        addresses: tuple[int, int],
    ) -> None:
        """Attend into `out`. addresses: of the sinks and of the memory for sums, 0 for none."""
        self._core.paged_attention(
            self.plan(kv.group, q_TNH.shape[1] // kv.kv.heads),
            kv.kv,
            self._head_rows(q_TNH),
            self._head_rows(out_TNH),
            scores.scale,
            scores.soft_cap or 0.0,
            *addresses,
            num_threads(),
            self.variant,
        )

    @op("convolve")
    def convolve(self, layer: int, x_TC: torch.Tensor, weight_CW: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        return self.states.convolve(layer, x_TC, weight_CW)

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
        return self.states.delta_rule(layer, qkv_TC, gates_TG, rate_N, shift_N, heads)

    def _make_plan(self, plan: CorePlan, group: int, queries_per_kv_head: int) -> None:
        step, table_SL = self._step, self._tables[group]
        assert step is not None, "prepare comes first"
        assert table_SL.dtype == torch.int32, f"needs int32 tables, got {table_SL.dtype}"
        split, cascade = self._options
        addresses = StepAddresses(
            table_SL.data_ptr(),
            table_SL.stride(0),
            address(step.query_starts_S1, torch.int32),
            address(step.context_lens_S, torch.int32),
            len(step.context_lens_S),
            0 if step.ends_T is None else _ends_address(step.ends_T, len(step.positions_T)),
        )
        cut_step(
            plan,
            addresses,
            self._layout.groups[group],
            queries_per_kv_head,
            self._layout.block_size,
            split=split,
            cascade=cascade,
        )

    def _layer_kv(self, layer: int, num_values: int | None = None) -> LayerKV:
        """Return a layer's keys and values. num_values: elements of a latent vector that are its
        value, all of them by default."""
        group, index = self.location(layer)
        layout, kv = self._layout, self._memory.kv[group]
        is_latent, size = layout.groups[group].kind == LATENT, layout.groups[group].head_dim
        dtype = str(layout.dtype).removeprefix("torch.")
        k_scale, v_scale = self._scales.get(layer, (1.0, 1.0))
        found = kv_layer(
            layout.groups[group],
            layout.num_blocks[group],
            layout.block_size,
            dtype if layout.kv_format == "auto" else layout.kv_format,
            (kv[0, index].data_ptr(), kv[-1, index].data_ptr()),
            (num_values or size) if is_latent else 0,
            (k_scale, k_scale if is_latent else v_scale),  # a latent vector is stored once
        )
        return LayerKV(group, found)

    def _head_rows(self, x: torch.Tensor) -> CoreRows:
        """Return rows [T, heads, H] as the core's type."""
        stride, of_head, of_number = x.stride()
        is_contiguous = of_number == 1 and (of_head == x.shape[2] or x.shape[1] == 1)
        assert is_contiguous, f"the heads of a token must be contiguous: {x.stride()}"
        return self._core.HeadRows(data=x.data_ptr(), element=ELEMENTS[x.dtype], stride=stride)


def _ends_address(ends_T: Int32, num_tokens: int) -> int:
    """Return the address of the ends of a step's tokens."""
    assert ends_T.shape == (num_tokens,), f"needs an end per token, got {ends_T.shape}"
    assert ends_T.dtype == np.int32 and ends_T.flags.c_contiguous, "needs int32, contiguous"
    return int(ends_T.ctypes.data)


def _contiguous_rows(step: AttentionStep) -> list[torch.Tensor]:
    """Return a step's tables, by cache group, each with contiguous rows."""
    tables = step.block_tables_SL
    return [each if each.stride(1) == 1 else each.contiguous() for each in tables]


def multiplied_as(layout: KVLayout) -> str:
    """Return the weight format whose instruction set attention uses: bfloat16 if keys and values
    are bfloat16, else ATTENTION."""
    is_bfloat16 = layout.dtype == torch.bfloat16 and layout.kv_format == "auto"
    return "bfloat16" if is_bfloat16 else ATTENTION


def variants() -> dict[str, int]:
    """Return the instruction sets that attention supports here, with the core's numbers, the best
    last; empty without the core."""
    module = core()
    return {} if module is None else dict(module.attention_variants())


def variant_number(name: str) -> int:
    """Return a variant's number in attention. An instruction set for which attention has no code
    gets the number of the best one below it."""
    own = formats.variant_numbers()[name]
    return max(number for number in variants().values() if number <= own)
