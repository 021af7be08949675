"""Which part of a model a rank has."""

from dataclasses import dataclass

from quire.ops.collective import ALONE, RankGroup
from quire.ops.collectives.neighbours import neighbours
from quire.spec.cuts import (
    Cut,
    all_of,
    cut_evenly,
    cut_or_repeat,
    cut_vocabulary,
    layers_of_stage,
)
from quire.spec.model_options import INNER_SIZE, NUM_EXPERTS


@dataclass(frozen=True)
class RankPlace:
    """tensor: the ranks that share each layer. stage: which of num_stages, each some of the layers,
    from 0. has_whole_experts: whether each rank has some of a mixture's experts, whole, instead of
    a part of each. sharing: how many neighbours of `tensor`, with the same heads of keys and
    values, deal out the tokens of a sequence among each other.
    """

    tensor: RankGroup = ALONE
    stage: int = 0
    num_stages: int = 1
    has_whole_experts: bool = False
    sharing: int = 1

    @property
    def context(self) -> RankGroup:
        """Return those neighbours."""
        return neighbours(self.tensor, self.sharing)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return what tells this place from others."""
        tensor, whole = self.tensor, self.has_whole_experts
        return tensor.rank, tensor.size, self.stage, self.num_stages, int(whole)

    @property
    def is_first(self) -> bool:
        """Tell whether the model's layers begin here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Tell whether the model's layers end here."""
        return self.stage == self.num_stages - 1

    def layers(self, num_layers: int) -> range:
        """Return the numbers of those of a model's layers that are here."""
        return layers_of_stage(num_layers, self.stage, self.num_stages)

    def has_table(self, *, is_tied: bool) -> bool:
        """Tell whether the embedding's table is here. is_tied: whether the head shares it."""
        return self.is_first or (self.is_last and is_tied)

    def cut(self, whole: int, what: str) -> Cut:
        """Return the part of a dimension that this rank has. what: the setting that says how many
        there are. Raises ConfigError where ranks cannot have as many each."""
        return cut_evenly(whole, self.tensor.rank, self.tensor.size, what)

    def cut_or_repeat(self, whole: int, what: str) -> Cut:
        """Do that with what several ranks may have one of, such as heads of keys and values."""
        return cut_or_repeat(whole, self.tensor.rank, self.tensor.size, what)

    def experts(self, num_experts: int) -> Cut:
        """Return the experts of a mixture that are here. Raises ConfigError where ranks cannot have
        as many whole ones each."""
        return self.cut(num_experts, NUM_EXPERTS) if self.has_whole_experts else all_of(num_experts)

    def inner_size(self, whole: int) -> Cut:
        """Return the part of each of them that is here."""
        return all_of(whole) if self.has_whole_experts else self.cut(whole, INNER_SIZE)

    def vocabulary(self, size: int) -> Cut:
        """Return the tokens that this rank has. Its logits are filled up to as many as rank 0's;
        what stands there means nothing."""
        return cut_vocabulary(size, self.tensor.rank, self.tensor.size)


WHOLE = RankPlace()
