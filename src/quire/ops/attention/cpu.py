"""Attention on a CPU: rows with few new tokens by the C++ core, chunks of prompts by torch.

The core (csrc/attention.cpp) reads keys and values where they stand, each once, while torch must
gather them first; for chunks the products of torch's matrix kernels outweigh that. Shape legend as
in `torch_cpu.py`.
"""

import numpy as np
import torch

from quire.base.errors import ConfigError
from quire.ops.attention.base import AttentionStep, KVLayout
from quire.ops.attention.batches import SHORT_QUERY
from quire.ops.attention.torch_cpu import TorchBackend
from quire.ops.native import address, core, num_threads
from quire.ops.registry import op

LANES = 32  # a chunk of the core's vectors: head sizes must be multiples


def why_not(layout: KVLayout) -> str | None:
    """Why this backend cannot serve the layout; None if it can."""
    if layout.device.type != "cpu":
        return f"it is for CPUs, not {layout.device.type}"
    if layout.dtype not in (torch.float32, torch.bfloat16):
        return f"it has float32 and bfloat16, not {layout.dtype}"
    if any(group.head_dim % LANES for group in layout.groups):
        return f"it needs head sizes that are multiples of {LANES}"
    return "the C++ core was not built" if core() is None else None


class CpuBackend(TorchBackend):
    """Raises ConfigError for a layout that it cannot serve."""

    name = "cpu"
    longest_left_out = SHORT_QUERY

    def __init__(self, layout: KVLayout) -> None:
        reason = why_not(layout)
        if reason is not None:
            raise ConfigError(f"attention_backend cpu cannot be used here: {reason}; take torch.")
        super().__init__(layout)
        self._step: AttentionStep | None = None
        self._short_rows = torch.empty(0, dtype=torch.int32)
        self._tables: list[torch.Tensor] = []

    def prepare(self, step: AttentionStep) -> None:
        """As the torch backend does for its rows; and which rows are the core's."""
        super().prepare(step)
        self._step = step
        (short,) = np.nonzero(step.query_lens_host <= SHORT_QUERY)
        self._short_rows = torch.from_numpy(short.astype(np.int32))
        self._tables = [table_SL.contiguous() for table_SL in step.block_tables_SL]

    @op("attention")
    def run(self, layer: int, q_TNH: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of all rows, [T, N, H]."""
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
        if len(self._short_rows):
            self._run_short(layer, q_TNH, scale, out_TNH)
        self._run_batches(layer, q_TNH, scale, out_TNH)
        return out_TNH

    def _run_short(
        self, layer: int, q_TNH: torch.Tensor, scale: float, out_TNH: torch.Tensor
    ) -> None:
        step, module = self._step, core()
        assert step is not None and module is not None, "prepare comes first"
        g, index = self._place_of_layer[layer]
        group, table_SL, kv = self._layout.groups[g], self._tables[g], self._kv[g]
        heads, size = group.num_kv_heads, group.head_dim
        assert q_TNH.stride()[1:] == (size, 1), "the heads of a token must be contiguous"
        dtype = self._layout.dtype
        addresses = [
            address(out_TNH, dtype),
            q_TNH.data_ptr(),
            address(kv[0, index], dtype),
            address(kv[1, index], dtype),
            address(table_SL, torch.int32),
            address(step.query_starts_S1, torch.int32),
            address(step.context_lens_S, torch.int32),
            address(self._short_rows, torch.int32),
        ]
        numbers = [
            len(self._short_rows),
            heads,
            q_TNH.shape[1] // heads,
            size,
            self._layout.block_size,
            kv.shape[3],
            table_SL.stride(0),
            q_TNH.stride(0),
            group.window or 0,
        ]
        module.paged_attention(addresses, numbers, scale, dtype.itemsize, num_threads())
