"""Products of each head with its own weights, which one module of the checkpoint holds.

Shape legend: T tokens, N heads of this rank, I inputs and O outputs of a head, R inputs of the
module.
"""

import torch

from quire.models.checkpoint.sources import Source, Stretches
from quire.models.parts.layers import Layer, ParamFactory, set_weight
from quire.ops.latent import HeadWeights
from quire.ops.weights.pack import can_pack_natively
from quire.ops.weights.packed_heads import PackedHeads, pack_heads
from quire.spec.cuts import Cut


class HeadLinear(Layer):
    """The weights of products of each head with some of the module's rows of that head, or with
    their transpose.

    They have the model's dtype, even if the checkpoint or the settings quantise linear layers: the
    transposed product has other inputs than the module.

    heads: heads of this rank. rows: range of the rows, of all rows that the module has per head.
    width: R. is_turned: whether the product is with the transpose, so that I = rows and O = R.
    """

    def __init__(
        self,
        name: str,
        heads: Cut,
        rows: Cut,
        width: int,
        factory: ParamFactory,
        *,
        is_turned: bool,
    ) -> None:
        super().__init__()
        self._name, self._heads, self._rows, self._is_turned = name, heads, rows, is_turned
        self.weight = factory.parameter(heads.count, rows.count, width)

    @property
    def weights(self) -> HeadWeights:
        """The weights [N, O, I], stacked in one tensor, or a packed one per head."""
        weight: torch.Tensor | PackedHeads = self.weight
        if isinstance(weight, PackedHeads):
            return weight.parts
        return weight.transpose(1, 2) if self._is_turned else weight

    @property
    def shape(self) -> tuple[int, ...]:
        """Heads, outputs and inputs of the weights, packed or not."""
        own: tuple[int, ...] = tuple(self.weight.shape)
        if self._is_turned and isinstance(self.weight, torch.Tensor):
            return own[0], own[2], own[1]
        return own

    def sources(self) -> list[Source]:
        heads, rows = self._heads, self._rows
        first_N1 = (heads.first + torch.arange(heads.count))[:, None] * rows.whole + rows.first
        order, whole = (first_N1 + torch.arange(rows.count)).flatten(), heads.whole * rows.whole
        own = self.weight.flatten(0, 1)
        return [Source(f"{self._name}.weight", own, rows=Cut(whole, 0, whole), order=order)]

    def stretches(self, name: str) -> Stretches:
        """See Layer."""
        return Stretches((self._heads.times(self._rows.count),))

    def pack(self) -> None:
        """Pack the loaded weights for the C++ core, if it multiplies their dtype."""
        if can_pack_natively(self.weight.dtype, self.weight.device):
            weights = self.weights
            assert isinstance(weights, torch.Tensor), "packed once"
            set_weight(self, pack_heads(weights.contiguous()))
