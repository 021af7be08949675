"""What layers that remember a state do in a step with guesses (T 4.4.4).

A state cannot go back to the last right guess. So the forward pass reads the states of rows that
guess and leaves none; what each layer was given of these rows' tokens is kept, some kilobytes a
token where a state has megabytes. When it is known which guesses were right, the layers take in
those tokens again and leave the states behind them, as a step without guesses would have done: the
same operations on the same numbers. A layer's delta rule is given what its convolution returned.

Shape legend as in `states.py`, and: G tokens of the rows that guess.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.attention.base import AttentionBackend, ForwardingBackend
from quire.ops.attention_inputs import AttentionStep, DeltaHeads, Int32
from quire.ops.elementwise import select_rows
from quire.ops.host_memory import to_device


class DeltaInputs(NamedTuple):
    """What a delta rule was given beside queries, keys and values."""

    gates_GG: torch.Tensor
    rate_N: torch.Tensor
    shift_N: torch.Tensor
    heads: DeltaHeads


class KeptInputs(ForwardingBackend):
    """A backend for one step with guesses, which are the last tokens of some rows; then for
    `settle`. guesses: [S] which rows have any."""

    name = "kept"

    def __init__(self, inner: AttentionBackend, guesses: npt.NDArray[np.bool_]) -> None:
        super().__init__(inner)
        self._guesses = guesses
        self._step: AttentionStep | None = None
        self.places_G = torch.empty(0, dtype=torch.int64)  # their places among the step's tokens
        self._convolutions: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer
        self._rules: dict[int, DeltaInputs] = {}

    @property
    def has_any(self) -> bool:
        """Whether there are layers with states."""
        return len(self._rules) > 0

    def prepare(self, step: AttentionStep) -> None:
        """See AttentionBackend."""
        self._step, device = step, step.positions_T.device
        places = np.flatnonzero(np.repeat(self._guesses, step.query_lens_host))
        self.places_G = to_device(places, device)
        self.inner.prepare(replace(step, guessing_S=to_device(self._guesses, device)))

    def convolve(self, layer: int, x_TC: torch.Tensor, weight_CW: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        self.keep_convolution(layer, select_rows(x_TC, self.places_G), weight_CW)
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
        kept = DeltaInputs(select_rows(gates_TG, self.places_G), rate_N, shift_N, heads)
        self.keep_rule(layer, kept)
        return self.inner.delta_rule(layer, qkv_TC, gates_TG, rate_N, shift_N, heads)

    def keep_convolution(self, layer: int, x_GC: torch.Tensor, weight_CW: torch.Tensor) -> None:
        """Keep what a convolution was given."""
        self._convolutions[layer] = x_GC, weight_CW

    def keep_rule(self, layer: int, inputs: DeltaInputs) -> None:
        """Keep what a delta rule was given."""
        self._rules[layer] = inputs

    def settle(self, num_tokens: Int32) -> None:
        """Leave the states behind the first so many tokens of each row that guesses."""
        step, rows = self._step, np.flatnonzero(self._guesses)
        assert step is not None, "prepare comes first"
        lens = step.query_lens_host[rows]
        firsts = np.cumsum(lens) - lens
        taken = np.concatenate(
            [first + np.arange(num) for first, num in zip(firsts, num_tokens, strict=True)]
        )
        device = self.places_G.device
        contexts = step.context_lens_host[rows] - lens + num_tokens
        starts = np.concatenate([[0], np.cumsum(num_tokens)]).astype(np.int32)
        rows_S = to_device(rows, device)
        part = replace(  # places in blocks of keys and values are not asked for
            step,
            query_starts_S1=to_device(starts, device),
            context_lens_S=to_device(contexts.astype(np.int32), device),
            block_tables_SL=tuple(table_SL[rows_S] for table_SL in step.block_tables_SL),
            query_lens_host=num_tokens,
            context_lens_host=contexts,
        )
        self.inner.prepare_states(part)
        index = None if len(taken) == lens.sum() else to_device(taken, device)
        for layer, (x_GC, weight_CW) in self._convolutions.items():
            rule = self._rules[layer]
            gates_GG = rule.gates_GG
            if index is not None:
                x_GC, gates_GG = select_rows(x_GC, index), select_rows(gates_GG, index)
            qkv_TC = self.inner.convolve(layer, x_GC, weight_CW)
            numbers = rule.rate_N, rule.shift_N
            self.inner.delta_rule(layer, qkv_TC, gates_GG, *numbers, rule.heads)
