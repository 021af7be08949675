"""The states that a model shows of its forward pass, for a head that guesses by them (eagle3.py).

Shape legend: T tokens, D model dim, F all that is shown of a token.
"""

from collections.abc import Sequence

import torch

from quire.ops.elementwise import add_into


class Reads:
    """What enters some layers, side by side in memory that every forward pass writes again.

    layers: numbers of layers, each of which stands for what enters it, as transformers'
    `hidden_states` do; the number behind the last layer's stands for what that returns, before the
    last norm. most_tokens: of a step, where the memory may not move later (graphs were recorded).
    """

    def __init__(self, layers: Sequence[int], most_tokens: int = 0) -> None:
        self.layers = tuple(layers)
        self._most_tokens, self._memory = most_tokens, torch.empty(0, 0)

    def keep(self, layer: int, x_TD: torch.Tensor, residual_TD: torch.Tensor | None) -> None:
        """Write the sum of both, if the layer that they enter is one of these."""
        for place, each in enumerate(self.layers):
            if each == layer:
                num_tokens, size = x_TD.shape
                into_TF = self._room(x_TD)[:num_tokens]
                add_into(into_TF[:, place * size : (place + 1) * size], x_TD, residual_TD)

    def last(self, num_tokens: int) -> torch.Tensor:
        """Return what the last forward pass has left, [T, F], valid until the next."""
        return self._memory[:num_tokens]

    def _room(self, x_TD: torch.Tensor) -> torch.Tensor:
        num_tokens, size = x_TD.shape
        memory = self._memory
        if len(memory) < num_tokens or memory.dtype != x_TD.dtype or memory.device != x_TD.device:
            num_tokens = max(num_tokens, self._most_tokens)
            self._memory = x_TD.new_empty(num_tokens, len(self.layers) * size)
        return self._memory
