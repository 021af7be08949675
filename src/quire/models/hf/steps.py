"""Forward pass as a list of quire's operations over buffers, the result of lower.py.

Shape legend: T tokens, W columns, N heads, H head dim, E = H / 2.

A buffer is the result of an operation, [T, W]. Operations read consecutive columns of buffers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire.ops.attention.base import AttentionBackend
from quire.ops.elementwise import (
    add,
    gelu,
    gelu_mul,
    gelu_tanh,
    gelu_tanh_mul,
    relu,
    scale,
    silu_mul,
)
from quire.ops.norms import add_rms_norm
from quire.ops.rotary import rotary, rotary_rows

ROW_WISE: dict[str, Callable[..., torch.Tensor]] = {
    "add": add,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "silu gate": silu_mul,
    "gelu gate": gelu_mul,
    "gelu_tanh gate": gelu_tanh_mul,
}
LAYER, EMBEDDING, ADD_NORM, ROTARY, SCALE, ATTEND, ROTARY_ATTEND = (
    "layer", "embedding", "add_norm", "rotary", "scale", "attend", "rotary_attend",
)  # fmt: skip


@dataclass(frozen=True)
class Read:
    """Columns of a buffer, read as [T, W], or as [T, heads, W / heads]."""

    buffer: int
    first: int
    width: int
    heads: int = 0

    def of(self, buffers: Sequence[Any]) -> torch.Tensor:
        whole: torch.Tensor = buffers[self.buffer]
        if whole.dim() > 2:
            whole = whole.flatten(1)
        if self.width != whole.shape[1]:
            whole = whole[:, self.first : self.first + self.width]
        return whole.unflatten(1, (self.heads, -1)) if self.heads else whole


@dataclass(frozen=True, eq=False)
class Step:
    """One operation. name: a key of ROW_WISE, or one of the names above. writes: buffers. layer:
    module with its parameters; for ATTEND, the layer number. options: its other arguments."""

    name: str
    reads: tuple[Read, ...]
    writes: tuple[int, ...]
    layer: Any = None
    options: tuple[Any, ...] = ()


class HeadNorms:
    """Norms of query heads and key heads, combined into one over both."""

    def __init__(self, query: Any, key: Any, num_heads: int, num_kv_heads: int) -> None:
        self._layers, self._counts = (query, key), (num_heads, num_kv_heads)
        self._weight: torch.Tensor | None = None
        self.eps: float = query.eps

    def weight(self) -> torch.Tensor:
        """Return the weight of each head, [N + K, H]. It is created on the first call, after
        loading."""
        if self._weight is None:
            pairs = zip(self._layers, self._counts, strict=True)
            self._weight = torch.cat([layer.weight.expand(count, -1) for layer, count in pairs])
        return self._weight


class Steps(nn.Module):
    """Model that runs the operations. last: the columns of the final result, [T, D]."""

    def __init__(self, steps: Sequence[Step], num_buffers: int, last: Read) -> None:
        super().__init__()
        self.steps, self._num_buffers, self._last = tuple(steps), num_buffers, last

    def forward(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionBackend,
        embeds_TD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [T, D]. embeds_TD: used instead of the embedded ids."""
        buffers = [None] * self._num_buffers
        run = Run(ids_T, positions_T, attention, buffers, embeds_TD)
        for step in self.steps:
            run.carry_out(step)
        return self._last.of(run.buffers)


@dataclass
class Run:
    """One forward pass. Each operation fills one buffer."""

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    attention: AttentionBackend
    buffers: list[Any]
    embeds_TD: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self._factors: dict[int, torch.Tensor] = {}

    def carry_out(self, step: Step) -> None:
        operands = [read.of(self.buffers) for read in step.reads]
        self.buffers[step.writes[0]] = self.result(step, operands)

    def result(self, step: Step, operands: list[torch.Tensor]) -> torch.Tensor:
        made: torch.Tensor
        if step.name == LAYER:
            made = step.layer(*operands)
            return made
        if step.name == ATTEND:
            return self._attend(step, operands)
        if step.name == ROTARY_ATTEND:
            return self._rotate_and_attend(step, operands[0])
        if step.name == ROTARY:
            frequencies_E, factor = step.options
            return rotary(operands[0], self._rotary_rows(frequencies_E, factor, operands[0].dtype))
        if step.name == SCALE:
            return scale(operands[0], *step.options)
        if step.name == ADD_NORM:
            x_TD, residual_TD = operands
            normed, total = add_rms_norm(x_TD, residual_TD, step.layer.weight, step.layer.eps)
            self.buffers[step.writes[1]] = total
            return normed
        if step.name == EMBEDDING:
            embeds_TD = self.embeds_TD
            made = step.layer(self.ids_T) if embeds_TD is None else embeds_TD
            return made
        return ROW_WISE[step.name](*operands)

    def _attend(self, step: Step, operands: list[torch.Tensor]) -> torch.Tensor:
        q_TNH, k_TKH, v_TKH = operands
        self.attention.write(step.layer, k_TKH, v_TKH)
        return self.attention.run(step.layer, q_TNH, *step.options)

    def _rotate_and_attend(self, step: Step, qkv_TMH: torch.Tensor) -> torch.Tensor:
        scores, frequencies_E, factor, norms, num_kv_heads = step.options
        rows = self._rotary_rows(frequencies_E, factor, qkv_TMH.dtype)
        weight_MH, eps = (None, 0.0) if norms is None else (norms.weight(), norms.eps)
        stored = num_kv_heads, rows, weight_MH, eps
        return self.attention.rotary_run(step.layer, qkv_TMH, *stored, scores)

    def _rotary_rows(
        self, frequencies_E: torch.Tensor, factor: float, dtype: torch.dtype
    ) -> torch.Tensor:
        key = id(frequencies_E)
        if key not in self._factors:
            self._factors[key] = rotary_rows(self.positions_T, frequencies_E, factor, dtype)
        return self._factors[key]
