"""Types of the C++ core for type checkers; csrc/binding.cpp defines it, and
tests/ops/test_native.py compares the two. An address is that of a tensor's data, 0 for none.

This module does not import torch.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

BLOCK_LAYOUT = 6  # version of stored keys and values; raised when their bytes or rounding change


class CorePlan(Protocol):
    """Division of a step's attention between threads (csrc/attention.h)."""

    @property
    def num_items(self) -> int: ...
    @property
    def num_merges(self) -> int: ...
    def prepare(
        self, *, tables: int, table_stride: int, query_starts: int, context_lens: int,
        num_rows: int, block_size: int, window: int, num_later_seen: int, kv_heads: int, group: int,
        head_dim: int, ends: int, num_threads: int, split: bool, cascade: bool,
    ) -> None: ...  # fmt: skip


class CoreStatePlan(Protocol):
    """A step's rows and the blocks that store their states (csrc/states.h)."""

    def prepare(
        self, *, tables: int, table_stride: int, query_starts: int, context_lens: int,
        has_drafts: int, num_rows: int, block_size: int,
    ) -> None: ...  # fmt: skip


class CoreStates(Protocol):
    """Address and size of a layer's states."""


class CoreKV(Protocol):
    """Addresses and format of a layer's keys and values."""

    @property
    def heads(self) -> int: ...


class CoreRows(Protocol):
    """Rows [T, heads, H] of queries, keys, values or results."""


class CoreWeight(Protocol):
    """Packed weight (csrc/linear.h)."""


class CoreGroup(Protocol):
    """Group of ranks that are processes of one machine (csrc/shared_group.h). number: a dtype's."""

    @property
    def seconds(self) -> float: ...
    @property
    def num_exchanges(self) -> int: ...
    def all_reduce(self, x: int, count: int, number: int, num_threads: int, /) -> None: ...
    def all_gather(self, out: int, x: int, num_bytes: int, num_threads: int, /) -> None: ...
    def reduce_scatter(
        self, out: int, x: int, count: int, number: int, num_threads: int, /
    ) -> None: ...
    def all_to_all(self, out: int, x: int, num_bytes: int, num_threads: int, /) -> None: ...
    def abort(self) -> None: ...


class CoreAdapter(Protocol):
    """One adapter's layers (csrc/adapters.h). parts: address of down, address of up, rank, first
    output, number of outputs, scale."""

    def set(
        self, layer: int, element: int, inputs: int,
        parts: Sequence[tuple[int, int, int, int, int, float]], /,
    ) -> None: ...  # fmt: skip


class CoreAdapters(Protocol):
    """Adapters in the slots of a device. groups: slots and the rows that use them."""

    def put(self, slot: int, adapter: CoreAdapter | None, /) -> None: ...
    def begin_step(self, groups: Sequence[tuple[int, Sequence[int]]], /) -> None: ...


class CoreProgram(Protocol):
    """A model's forward pass (csrc/program.h)."""

    @property
    def expert_pairs(self) -> int: ...
    @property
    def phase_seconds(self) -> list[float]: ...
    def time_phases(self, on: bool, /) -> None: ...
    def add_layer(self, group: int, kv: CoreKV, /) -> None: ...
    def add_state_layer(self, group: int, states: CoreStates, /) -> None: ...
    def use_adapters(self, adapters: CoreAdapters, /) -> None: ...
    def add_experts(
        self, *, gate_up: Sequence[CoreWeight], down: Sequence[CoreWeight],
        gate_up_biases: Sequence[int], down_biases: Sequence[int], first: int, all: int,
        num_chosen: int, normalises: bool, alpha: float, limit: float, groups: tuple[int, int],
        is_sigmoid: bool, scale: float, route_bias: int, adapted: tuple[int, int],
    ) -> None: ...  # fmt: skip
    def add(
        self, *, begins_phase: bool, kind: int, views: Sequence[tuple[int, int]], heads: int,
        size: int, stride: int, layer: int, first: int, count: int, input: int, element: int,
        table: int, frequencies: int, weight: int, bias: int, scale: float, soft_cap: float,
        eps: float, delta: Sequence[int], packed: CoreWeight, group: CoreGroup | None,
    ) -> None: ...  # fmt: skip
    def run(
        self, rows: int, ids: int, positions: int, outside: Sequence[int],
        groups: Sequence[tuple[CorePlan | CoreStatePlan, int]], recorded: tuple[int, int, int, int],
        num_threads: int, /,
    ) -> None: ...  # fmt: skip


class CoreLauncher(Protocol):
    """Launcher of a GPU's recorded steps (csrc/step_launcher.h). Arrays are contiguous."""

    def launch(
        self, slot: int, mail_slot: int, rows: Int32, num_tokens: Int32, sample_rows: Int32,
        sample_indices: "npt.NDArray[np.int64]", deltas: Int32, num_runs: int, graph: int, /,
    ) -> int: ...  # fmt: skip
    def is_done(self, mail_slot: int, ticket: int, num_flags: int, /) -> bool: ...
    def wait(self, mail_slot: int, ticket: int, num_flags: int, timeout_s: float, /) -> None: ...


class Core(Protocol):
    """Module `quire._core`."""

    __file__: str

    def version(self) -> int: ...

    # --- classes ---
    def AttentionPlan(self) -> CorePlan: ...
    def KvLayer(
        self, *, format: int, heads: int, num_blocks: int, block_size: int, head_dim: int,
        keys: int, values: int, num_values: int, key_scale: float, value_scale: float,
    ) -> CoreKV: ...  # fmt: skip
    def HeadRows(self, *, data: int, element: int, stride: int) -> CoreRows: ...
    def StatePlan(self) -> CoreStatePlan: ...
    def StateLayer(self, *, data: int, size: int) -> CoreStates: ...
    def PackedWeight(
        self, *, format: int, variant: int, outputs: int, inputs: int, group: int,
        is_ordered: int, data: int,
    ) -> CoreWeight: ...  # fmt: skip
    def SharedGroup(
        self, path: str, rank: int, size: int, slot_bytes: int, timeout_s: float, /
    ) -> CoreGroup: ...
    def Adapter(self, num_layers: int, /) -> CoreAdapter: ...
    def Adapters(self, num_slots: int, /) -> CoreAdapters: ...
    def Program(
        self, widths: Sequence[int], indices: Sequence[int], arena: int, variant: int, /
    ) -> CoreProgram: ...

    def StepLauncher(
        self, *, driver: str, stream: int, function: int, num_threads: int, shared_bytes: int,
        max_programs: int, block: int, arguments: Sequence[int], varying: Sequence[int],
        plan: Sequence[int], mail: int, mail_layout: Sequence[int],
    ) -> CoreLauncher: ...  # fmt: skip

    # --- attention ---
    def attention_variants(self) -> list[tuple[str, int]]: ...
    def paged_attention(
        self, plan: CorePlan, kv: CoreKV, q: CoreRows, out: CoreRows, scale: float,
        soft_cap: float, sinks: int, sums: int, num_threads: int, variant: int, /,
    ) -> None: ...  # fmt: skip
    def store_kv(
        self, kv: CoreKV, k: CoreRows, v: CoreRows, slots: int, count: int, num_threads: int, /
    ) -> None: ...

    # --- states ---
    def convolve(
        self, plan: CoreStatePlan, layer: CoreStates, out: CoreRows, x: CoreRows, weight: int,
        channels: int, width: int, num_threads: int, /,
    ) -> None: ...  # fmt: skip
    def delta_rule(
        self, plan: CoreStatePlan, layer: CoreStates, heads: Sequence[int], out: CoreRows,
        qkv: CoreRows, gates: CoreRows, rate: int, shift: int, num_threads: int, variant: int, /,
    ) -> None: ...  # fmt: skip

    # --- sampling ---
    def philox_words(self, counter: Sequence[int], key: Sequence[int], /) -> list[int]: ...
    def philox_uniform(
        self, out: int, rows: int, vocab: int, seeds: int, index: int, at: int, num_threads: int, /
    ) -> None: ...
    def philox_uniform_at(
        self, out: int, ids: int, rows: int, k: int, seeds: int, index: int, at: int, /
    ) -> None: ...
    def arg_max(
        self, ids: int, values: int, logits: int, rows: int, vocab: int, num_threads: int, /
    ) -> None: ...
    def top_k(
        self, values: int, ids: int, logits: int, rows: int, vocab: int, k: int, threads: int, /
    ) -> None: ...
    def log_sum_exp(
        self, out: int, logits: int, temperatures: int, rows: int, vocab: int, num_threads: int, /
    ) -> None: ...
    def token_rank(
        self, ranks: int, logits: int, ids: int, rows: int, vocab: int, num_threads: int, /
    ) -> None: ...
    def choose(
        self, ids: int, logits: int, temperatures: int, top_k: int, top_p: int, min_p: int,
        rows: int, vocab: int, first: int, seeds: int, index: int, at: int, num_threads: int, /,
    ) -> None: ...  # fmt: skip
    def apply_masks(
        self, logits: int, indices: int, words: int, count: int, vocab: int, num_words: int,
        num_threads: int, /,
    ) -> None: ...  # fmt: skip

    # --- blocks of tokens ---
    def chain_digests(
        self, parent: bytes, blocks: bytes, block_bytes: int, is_portable: bool = False, /
    ) -> list[bytes]: ...

    # --- rows of tokens ---
    def find_runs(
        self, tokens: int, token_stride: int, rows: int, lengths: int, count: int, min_length: int,
        max_length: int, searched: int, indices: int, /,
    ) -> None: ...  # fmt: skip

    # --- rows of a step ---
    def gather_step(
        self, *, wide: int, narrow: int, tokens: int, token_stride: int, computed: int, rows: int,
        num_tokens: int, num_rows: int, tables: Sequence[tuple[int, int]], block_size: int,
        total: int, longest: int,
    ) -> None: ...  # fmt: skip

    # --- linear layers ---
    def linear_variants(self) -> list[tuple[str, int]]: ...
    def linear_bytes(self, weight: CoreWeight, /) -> int: ...
    def linear_operand_bytes(self, weight: CoreWeight, /) -> int: ...
    def linear_peak(self, format: int, variant: int, num_threads: int, /) -> float: ...
    def seconds_between_threads(self) -> float: ...
    def linear_pack(
        self, data: int, packed: CoreWeight, weight: int, element: int, search: bool,
        num_threads: int, /,
    ) -> int: ...  # fmt: skip
    def linear_pack_file(
        self, data: int, packed: CoreWeight, file: int, offset: int, element: int, search: bool,
        num_threads: int, /,
    ) -> int: ...  # fmt: skip
    def linear_pack_blocks(
        self, data: int, packed: CoreWeight, blocks: int, row_bytes: int, num_threads: int, /
    ) -> None: ...
    def linear_pack_stored(
        self, data: int, packed: CoreWeight, values: int, scales: int, zeros: int, order: int,
        num_threads: int, /,
    ) -> None: ...  # fmt: skip
    def linear_unpack_rows(
        self, out: int, element: int, ids: int, count: int, weight: CoreWeight, /
    ) -> None: ...
    def linear(
        self, out: int, x: int, bias: int, element: int, rows: int, x_stride: int,
        out_stride: int, weight: CoreWeight, num_threads: int, /,
    ) -> None: ...  # fmt: skip
    def head_products(
        self, out: int, x: int, element: int, rows: int, strides: tuple[int, int],
        weights: Sequence[CoreWeight], num_threads: int, /,
    ) -> None: ...  # fmt: skip


class WeightLayout(NamedTuple):
    """Description of a packed weight without its data. format, variant: the core's numbers. group:
    inputs that share a scale, 1 without scales. is_ordered: 1 if inputs were sorted, else 0."""

    format: int
    variant: int
    outputs: int
    inputs: int
    group: int
    is_ordered: int = 0

    def at(self, address: int, core: Core) -> CoreWeight:
        """Return the weight whose data begins at `address`, as the core's type."""
        return core.PackedWeight(**self._asdict(), data=address)
