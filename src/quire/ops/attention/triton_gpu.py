"""Attention on a GPU by Triton kernels: all rows of a step in one launch, directly on their blocks.

Shape legend: as in `base.py`, and G = N / K query heads of one KV head.

The device cuts a step's work once per cache group, when the group's first layer gives its number of
heads. It makes as many items as the device runs at once, so a query's bits depend on the rest of
its step. Unmerged results take at most PARTS_BYTES; if they would not fit, rows are cut into fewer
parts. The launches serve any rows with the same total of tokens, so mixed steps can be recorded
whole.

Layers with states have kernels of their own, which read all metadata on the device. Rows of up to
Chunks.few tokens go through the delta rule token by token, others in chunks.

A deterministic backend cuts keys at multiples of a chunk from the sequence's beginning. So a query
has the same bits if its sequence was cut into other steps or began with cached blocks. A token that
is split needs 4 N (H + 2) bytes for each chunk of its context, which is 1,024 keys. With 32 heads
of 128 numbers this is 17 KB, 0.4 % of the chunk's keys and values with 8 KV heads. Rows of up to
four tiles of 64 / G tokens are split. If that exceeds PARTS_BYTES, only rows of fewer tiles are
split, finally none: slower, with the same bits. States are computed token by token in every row.

Triton is imported when a backend is made, so other backends do not wait for it. Under Triton's
interpreter the backend also serves CPUs, slowly, for tests.
"""

import importlib.util
import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from quire.base.errors import ConfigError
from quire.ops import gpu
from quire.ops.attention.base import KVLayout, Part
from quire.ops.attention.kv_memory import KVMemory, MovesBlocks
from quire.ops.attention.states import stored_table
from quire.ops.attention_inputs import AttentionStep, DeltaHeads, Int32, Scores
from quire.ops.host.host_memory import to_device
from quire.ops.registry import op
from quire.spec.cache_group import LATENT, STATE

if TYPE_CHECKING:
    from quire.ops.kernels.attention.attention_plan import Cut, Work
    from quire.ops.kernels.attention.delta_chunks import Chunks
    from quire.ops.kernels.attention.rotary_attention import Rotation
    from quire.ops.kernels.attention.states import StateStep

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KV_FORMATS = ("auto", "int8", "fp8")
MAX_HEAD_DIM = 256
MAX_LATENT = 640  # elements of a latent vector
PARTS_BYTES = 256 << 20  # of a layer's unmerged results; above it work is cut into fewer parts


def why_not(layout: KVLayout) -> str | None:
    """Return the reason why this backend cannot serve the layout; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not gpu.is_gpu(layout.device) and not interpreted:
        return f"it is for GPUs, not {layout.device.type}"
    if layout.dtype not in DTYPES:
        return f"it has float32, bfloat16 and float16, not {layout.dtype}"
    if interpreted and layout.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly"
    if layout.kv_format not in KV_FORMATS:
        return f"it stores keys and values as {', '.join(KV_FORMATS)}, not {layout.kv_format!r}"
    needs_fp8 = layout.kv_format == "fp8" and not interpreted
    if needs_fp8 and (found := gpu.gpu_of(layout.device)) and found.capability < (8, 9):
        major, minor = found.capability
        return f"fp8 needs a GPU of compute capability 8.9, this one has {major}.{minor}"
    sizes = [group.head_dim for group in layout.groups]
    for group in layout.groups:
        is_latent = group.kind == LATENT
        limit, vectors = (MAX_LATENT, "latent vectors") if is_latent else (MAX_HEAD_DIM, "heads")
        if group.head_dim > limit:
            return f"it has {vectors} of up to {limit} numbers, not {group.head_dim}"
    if layout.kv_format == "int8" and any(size % 4 for size in sizes):
        return f"int8 needs heads of a multiple of 4 numbers, got {sizes}"
    return None


class TritonBackend(MovesBlocks):
    """Backend of Triton kernels. Raises ConfigError for a layout that it cannot serve.

    deterministic: see above; supports any G and all formats.
    cut, chunks: how attention's and the delta rule's work is cut, None for the usual way. The
    group's heads and window replace the values in `cut`.
    scales: by layer with fp8 keys and values, the factors that stored keys and values are
    multiplied by.
    has_small_tiles: prompts in tiles of 64 rows instead of 128, for heads of up to 128 numbers.
    merges_last: whether a decoding step merges parts without a launch of its own (`Work.arrivals`);
    None for the environment variable.
    rotates_within: whether decoding rows that are separate take one launch for rotation and
    attention (`rotary_attention.py`); None for the environment variable.
    """

    name = "triton"
    can_be_recorded = True

    def __init__(
        self,
        layout: KVLayout,
        *,
        deterministic: bool = False,
        cut: "Cut | None" = None,
        chunks: "Chunks | None" = None,
        scales: dict[int, tuple[float, float]] | None = None,
        has_small_tiles: bool = False,
        merges_last: bool | None = None,
        rotates_within: bool | None = None,
    ) -> None:
        reason = why_not(layout)
        if reason is not None:
            raise ConfigError(f"attention_backend triton cannot be used here: {reason}; take auto.")
        from quire.ops.kernels import launch
        from quire.ops.kernels.attention import (
            attention,
            attention_plan,
            attention_tiles,
            attention_write,
            delta_chunks,
            delta_rule,
            latent,
            rotary_attention,
            rotary_write,
            states,
        )

        self._merges_last = launch.merges_last() if merges_last is None else merges_last
        is_on = launch.rotates_within() if rotates_within is None else rotates_within
        self._rotates_within = is_on and not deterministic and layout.kv_format == "auto"
        self._rotary, self._latent, self._tiles = rotary_write, latent, attention_tiles
        self._rotary_attention = rotary_attention
        self._states, self._delta_rule, self._delta_chunks = states, delta_rule, delta_chunks
        self._chunks = chunks or delta_chunks.Chunks()
        self._attention, self._plan, self._write = attention, attention_plan, attention_write
        machine = attention_tiles.machine_of(layout.device)
        self._machine = machine.with_small_tiles if has_small_tiles else machine
        usual = attention_plan.Cut(long_rows=self._machine.long_rows)
        self._cut = replace(cut or usual, is_fixed=deterministic)
        self.takes_any_lengths = not deterministic
        self._layout = layout
        self._memory = KVMemory(layout)
        self._location = self._memory.location
        self._layers = {
            layer: attention_write.layer_kv(
                self._memory.kv[g][:, index],
                layout.kv_format,
                *(scales or {}).get(layer, (1.0, 1.0)),
            )
            for layer, (g, index) in self._location.items()
            if layout.groups[g].kind != STATE
        }
        self._programs = 0 if cut else self._machine.num_programs
        self._work: list[Work | None] = [None] * len(layout.groups)
        self._planned = [0] * len(layout.groups)  # query heads of a KV head that work was cut for
        self._cuts: dict[int, Cut] = {}  # of the groups that have run
        self._step: AttentionStep | None = None
        self._ends_T: torch.Tensor | None = None
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # for states: read, stored

    @property
    def has_states(self) -> bool:
        """See AttentionBackend."""
        return any(group.kind == STATE for group in self._layout.groups)

    def prepare(self, step: AttentionStep) -> None:
        """Accept a step. Its work is cut when a group's first layer runs."""
        self.prepare_states(step)
        self._work = [None] * len(self._work)

    def prepare_states(self, step: AttentionStep) -> None:
        """See AttentionBackend."""
        self._step, self._tables = step, {}
        self._ends_T = None if step.ends_T is None else to_device(step.ends_T, self._layout.device)

    def prefers_uncut(self, context_lens: Int32) -> bool:
        """See AttentionBackend: no group's cut of recorded decoding steps splits these rows."""
        return bool(self._cuts) and all(
            cut.leaves_uncut(context_lens) for cut in self._cuts.values()
        )

    @op("kv_write")
    def write(self, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        """Store this step's keys and values, [T, K, H], in their slots; slot -1 writes nothing."""
        assert self._step is not None, "prepare comes first"
        slots_T = self._step.slots_T[self._location[layer][0]]
        self._write.write_kv(self._layers[layer], k_TKH, v_TKH, slots_T)

    @op("rotary_write")
    def rotary_write(
        self,
        layer: int,
        qkv_TMH: torch.Tensor,
        num_kv_heads: int,
        rotary_rows: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Return normalised, rotated queries, [T, N, H]; store keys and values as `write` does."""
        assert self._step is not None, "prepare comes first"
        g, index = self._location[layer]
        kv, scales = self._memory.kv[g][:, index], self._layers[layer]
        if self._layout.kv_format == "fp8":
            kv = kv.view(torch.float8_e4m3fn)
        return self._rotary.rotary_write(
            qkv_TMH,
            rotary_rows,
            self._step.slots_T[g],
            kv,
            weight,
            eps,
            scales.k_scale,
            scales.v_scale,
        )

    @op("attention")
    def run(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, out_TNH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend for all rows, [T, N, H]."""
        if len(q_TNH) == 0:
            return torch.empty_like(q_TNH)
        kv, work = self._layers[layer], self._work_for(layer, q_TNH)
        return self._attention.attention(q_TNH, kv, work, scores, self._machine, out_TNH)

    @property
    def needs_separate(self) -> bool:
        """See AttentionBackend. The query heads of a KV head are known only once a layer runs, so
        any number of them is taken to be served."""
        groups = (group for group in self._layout.groups if group.kind != STATE)
        return any(self._rotates(group.layers[0], 1) for group in groups)

    def rotary_run(
        self,
        layer: int,
        qkv_TMH: torch.Tensor,
        num_kv_heads: int,
        rotary_rows: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        scores: Scores,
    ) -> torch.Tensor:
        """See AttentionBackend."""
        assert self._step is not None, "prepare comes first"
        group_size = qkv_TMH.shape[1] // num_kv_heads - 2
        if len(qkv_TMH) and self._step.is_separate and self._rotates(layer, group_size):
            slots_T = self._step.slots_T[self._location[layer][0]]
            turned = self._rotary_attention.Rotation(rotary_rows, weight, eps, slots_T)
            return self._run_rotating(layer, qkv_TMH, turned, scores)
        given = num_kv_heads, rotary_rows, weight, eps
        return super().rotary_run(layer, qkv_TMH, *given, scores)

    @op("rotary_attention")
    def _run_rotating(
        self, layer: int, qkv_TMH: torch.Tensor, turned: "Rotation", scores: Scores
    ) -> torch.Tensor:
        """Rotate, store and attend for all rows, [T, N, H]."""
        kv, size = self._layers[layer], qkv_TMH.shape[2]
        num_heads = qkv_TMH.shape[1] - 2 * kv.num_heads
        group = self._location[layer][0]
        work = self._work_of(group, num_heads, num_heads // kv.num_heads, size)
        machine = self._machine.for_decoding(size, num_heads // kv.num_heads)
        return self._rotary_attention.rotary_attention(qkv_TMH, kv, turned, work, scores, machine)

    def _rotates(self, layer: int, group_size: int) -> bool:
        """Return whether recorded decoding steps rotate the layer's heads within attention."""
        kv, group = self._layers[layer], self._layout.groups[self._location[layer][0]]
        is_served = self._rotary_attention.serves(kv, group_size, group.head_dim)
        return self._rotates_within and is_served and group.kind != LATENT

    def run_part(self, layer: int, q_TNH: torch.Tensor, scores: Scores) -> Part:
        """See AttentionBackend."""
        out_TNH = torch.empty(q_TNH.shape, dtype=torch.float32, device=q_TNH.device)
        sums_TN2 = out_TNH.new_zeros(*q_TNH.shape[:2], 2)
        if len(q_TNH):
            kv, work = self._layers[layer], self._work_for(layer, q_TNH)
            self._attention.attention(q_TNH, kv, work, scores, self._machine, out_TNH, sums_TN2)
        largest_TN, sums_TN = sums_TN2.unbind(-1)
        return Part(out_TNH, (largest_TN + sums_TN.log2()) * math.log(2))

    @op("latent_write")
    def write_latent(self, layer: int, latent_TL: torch.Tensor) -> None:
        """See AttentionBackend. Slot -1 writes nothing."""
        assert self._step is not None, "prepare comes first"
        slots_T = self._step.slots_T[self._location[layer][0]]
        self._write.write_latents(self._layers[layer], latent_TL, slots_T)

    @op("latent_attention")
    def run_latent(
        self, layer: int, q_TNL: torch.Tensor, scores: Scores, num_values: int
    ) -> torch.Tensor:
        """See AttentionBackend."""
        if len(q_TNL) == 0:
            return q_TNL.new_empty(0, q_TNL.shape[1], num_values)
        kv, work = self._layers[layer], self._work_for(layer, q_TNL)
        return self._latent.latent_attention(q_TNL, kv, work, scores, self._machine, num_values)

    @op("convolve")
    def convolve(self, layer: int, x_TC: torch.Tensor, weight_CW: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        states_BZ, step = self._states_of(layer)
        return self._states.convolve(x_TC, weight_CW, states_BZ, step)

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
        """See AttentionBackend. The numbers of tokens and of rows alone decide which kernels are
        launched, and each choice serves rows of any length."""
        states_BZ, step = self._states_of(layer)
        out_TNE = qkv_TC.new_empty(len(qkv_TC), heads.values, heads.value_dim)
        given = (qkv_TC, gates_TG, rate_N, shift_N, heads, states_BZ, step, out_TNE)
        few, is_fixed = self._chunks.few, self._cut.is_fixed
        if is_fixed or qkv_TC.dtype == torch.float32 or len(qkv_TC) <= step.num_rows + few:
            self._delta_rule.delta_rule(*given, is_fixed=is_fixed)
        else:
            self._delta_rule.delta_rule(*given, max_tokens=few)
            self._delta_chunks.delta_chunks(*given, self._chunks)
        return out_TNE

    def _states_of(self, layer: int) -> tuple[torch.Tensor, "StateStep"]:
        """Return the layer's states in all blocks, [B, state_size], and metadata of the step."""
        step, (g, index) = self._step, self._location[layer]
        assert step is not None, "prepare comes first"
        starts, contexts = step.query_starts_S1, step.context_lens_S
        states_BZ = self._memory.kv[g][0, index, 0, :, 0]
        if g not in self._tables:
            tables = step.block_tables_SL[g]
            if step.has_drafts_S is not None:
                tables = tables.contiguous()  # both have one stride
            self._tables[g] = tables, stored_table(step, tables)
        size = self._layout.block_size
        return states_BZ, self._states.StateStep(starts, contexts, *self._tables[g], size)

    def _work_for(self, layer: int, q_TNH: torch.Tensor) -> "Work":
        num_heads, size = q_TNH.shape[1:]
        group_size = num_heads // self._layers[layer].num_heads
        return self._work_of(self._location[layer][0], num_heads, group_size, size)

    def _cut_of(self, group: int, group_size: int, size: int) -> "Cut":
        """Return the rules by which a group's work is cut."""
        if self._layout.groups[group].kind == LATENT:
            layout = self._layout
            rows = self._tiles.latent_rows(self._machine, layout.dtype, layout.kv_format)
            return self._cut.of_latents(group_size, rows)
        window = self._layout.groups[group].kernel_window
        return self._cut.of_group(group_size, window, size, self._layout.dtype.itemsize)

    def _work_of(self, group: int, num_heads: int, group_size: int, size: int) -> "Work":
        """Return the prepared step's work for the layers of a group. It is cut once per step."""
        work = self._work[group]
        if work is None or self._planned[group] != group_size:
            self._planned[group], step = group_size, self._step
            assert step is not None, "prepare comes first"
            cut = self._cut_of(group, group_size, size)
            cut, self._cuts[group] = self._shared_cuts(cut, group, num_heads, size)
            if step.is_uncut and not cut.is_fixed:
                cut = replace(cut, max_splits=1)
            slot_bytes = 4 * num_heads * (size + 2)
            while cut.fewer is not None and slot_bytes * _slots(cut, step) > PARTS_BYTES:
                cut = cut.fewer
            is_latent = self._layout.groups[group].kind == LATENT
            heads = num_heads // group_size if self._merges_last and not is_latent else 0
            table_SL = step.block_tables_SL[group]
            work = self._plan.plan_work(cut, step, table_SL, self._ends_T, heads)
            self._work[group] = work
        return work

    def _shared_cuts(
        self, cut: "Cut", group: int, num_heads: int, size: int
    ) -> tuple["Cut", "Cut"]:
        """Return a cut with an item for each program of the prepared step, and of a recorded
        decoding step."""
        step, machine = self._step, self._machine
        assert step is not None, "prepare comes first"
        if not self._programs:
            return cut, cut
        if self._rotates(self._layout.groups[group].layers[0], cut.group_size):
            machine = machine.for_decoding(size, cut.group_size)
        num = [self._programs, machine.num_programs]
        usual, decoding = (replace(cut, items=max(1, n * cut.group_size // num_heads)) for n in num)
        return decoding if step.is_separate else usual, decoding


def _slots(cut: "Cut", step: AttentionStep) -> int:
    return cut.bounds(step.query_lens_host, step.context_lens_host, step.ends_T is not None).slots
