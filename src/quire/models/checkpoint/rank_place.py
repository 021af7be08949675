"""Compute the part of a model that a rank holds: its layers, heads, experts and vocabulary."""

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
    """The position of a rank in tensor, pipeline, expert and context parallelism."""

    tensor: RankGroup = ALONE  # ranks that share each layer
    stage: int = 0  # index of the pipeline stage
    num_stages: int = 1  # number of pipeline stages
    has_whole_experts: bool = False  # expert parallelism: whole experts instead of a part of each
    # Context parallelism: number of neighbours in `tensor` that hold the same KV heads and divide
    # the tokens of each sequence.
    sharing: int = 1

    @property
    def context(self) -> RankGroup:
        """Return the neighbours that divide the tokens of each sequence."""
        return neighbours(self.tensor, self.sharing)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return numbers that identify the rank's part of the weights, for cache keys."""
        tensor, whole = self.tensor, self.has_whole_experts
        return tensor.rank, tensor.size, self.stage, self.num_stages, int(whole)

    @property
    def is_first(self) -> bool:
        """Return whether this is the first stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Return whether this is the last stage."""
        return self.stage == self.num_stages - 1

    def layers(self, num_layers: int) -> range:
        """Return the indices of the layers of this stage."""
        return layers_of_stage(num_layers, self.stage, self.num_stages)

    def has_table(self, *, is_tied: bool) -> bool:
        """Return whether this rank holds the embedding. is_tied: whether the head shares it."""
        return self.is_first or (self.is_last and is_tied)

    def cut(self, whole: int, setting: str) -> Cut:
        """Return this rank's part of a dimension. setting: setting that gives the dimension's size,
        named by the error. Raises ConfigError if the ranks do not divide the size evenly."""
        return cut_evenly(whole, self.tensor.rank, self.tensor.size, setting)

    def cut_or_repeat(self, whole: int, setting: str) -> Cut:
        """Return this rank's part of a dimension, such as KV heads, whose elements several ranks
        may hold in common. Raises ConfigError as `cut` does."""
        return cut_or_repeat(whole, self.tensor.rank, self.tensor.size, setting)

    def experts(self, num_experts: int) -> Cut:
        """Return the experts of this rank. Raises ConfigError if whole experts do not divide evenly
        among the ranks."""
        return self.cut(num_experts, NUM_EXPERTS) if self.has_whole_experts else all_of(num_experts)

    def inner_size(self, whole: int) -> Cut:
        """Return this rank's part of the feed-forward dimension of each expert."""
        return all_of(whole) if self.has_whole_experts else self.cut(whole, INNER_SIZE)

    def vocabulary(self, size: int) -> Cut:
        """Return this rank's part of the vocabulary. Logits are padded to the length of rank 0's;
        the padding is meaningless."""
        return cut_vocabulary(size, self.tensor.rank, self.tensor.size)


WHOLE = RankPlace()
