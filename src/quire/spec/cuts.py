"""Divide a model: a dimension among the ranks that share its layers, and its layers among the
stages of a pipeline. No torch."""

from dataclasses import dataclass

from quire.base.errors import ConfigError


@dataclass(frozen=True)
class Cut:
    """A range of a dimension of size `whole`: `count` indices from `first` on."""

    whole: int
    first: int
    count: int

    @property
    def is_whole(self) -> bool:
        return self.count == self.whole

    def times(self, size: int) -> "Cut":
        """Return this range in a dimension with `size` elements for each index."""
        return Cut(self.whole * size, self.first * size, self.count * size)


def all_of(whole: int) -> Cut:
    """Return the range that covers the whole dimension."""
    return Cut(whole, 0, whole)


def cut_evenly(whole: int, rank: int, num_ranks: int, field: str) -> Cut:
    """Return a rank's equal share. Raises ConfigError if there is a remainder.

    field: the config field with the dimension's size, for the error."""
    if whole % num_ranks:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} does not divide {field}, which is {whole} in this"
            " model; choose one that does."
        )
    count = whole // num_ranks
    return Cut(whole, rank * count, count)


def cut_or_repeat(whole: int, rank: int, num_ranks: int, field: str) -> Cut:
    """Return a rank's equal share; if ranks outnumber indices, several ranks share an index.

    Raises ConfigError unless one number divides the other."""
    if num_ranks <= whole:
        return cut_evenly(whole, rank, num_ranks, field)
    if num_ranks % whole:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} is not a multiple of {field}, which is {whole} in"
            " this model, and does not divide it; choose a multiple or a divisor."
        )
    return Cut(whole, rank * whole // num_ranks, 1)


def cut_vocabulary(size: int, rank: int, num_ranks: int) -> Cut:
    """Return a rank's share, rounded up; the last ranks get fewer tokens.

    Raises ConfigError if a rank gets none."""
    each = -(-size // num_ranks)
    count = min(each, size - rank * each)
    if count < 1:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} is too much for a vocabulary of {size} tokens: with"
            f" {each} for each, no token is left for rank {rank}; lower it."
        )
    return Cut(size, rank * each, count)


def cut_block(block_size: int, num_ranks: int) -> int:
    """Return the tokens of a block that each rank holds under decode context parallelism.

    Raises ConfigError if there is a remainder."""
    if block_size % num_ranks:
        raise ConfigError(
            f"decode_context_parallel_size={num_ranks} does not divide block_size={block_size}:"
            " each rank holds an equal share of a block's tokens. Choose a block_size that is a"
            " multiple of it."
        )
    return block_size // num_ranks


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """Return the layers of a stage. Raises ConfigError if there are more stages than layers.

    Shares are equal, plus one layer in the first stages, since the last stage also has the head."""
    if num_stages > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} is more than the model's {num_layers} layers;"
            " take fewer stages."
        )
    each, more = divmod(num_layers, num_stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))
