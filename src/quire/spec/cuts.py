"""How a model is divided: a dimension among the ranks that share its layers, and its layers among
the stages of a pipeline. No torch."""

from dataclasses import dataclass

from quire.base.errors import ConfigError


@dataclass(frozen=True)
class Cut:
    """Places of a dimension: `count` from `first` on, of `whole`."""

    whole: int
    first: int
    count: int

    @property
    def is_whole(self) -> bool:
        return self.count == self.whole

    def times(self, size: int) -> "Cut":
        """Return the cut of a dimension that has so many places for each of these."""
        return Cut(self.whole * size, self.first * size, self.count * size)


def all_of(whole: int) -> Cut:
    """Cut nothing off."""
    return Cut(whole, 0, whole)


def cut_evenly(whole: int, rank: int, num_ranks: int, what: str) -> Cut:
    """Give each rank as many. what: the setting that says how many there are. Raises ConfigError
    where that cannot be."""
    if whole % num_ranks:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} does not divide {what}, which is {whole} in this"
            " model; choose one that does."
        )
    count = whole // num_ranks
    return Cut(whole, rank * count, count)


def cut_or_repeat(whole: int, rank: int, num_ranks: int, what: str) -> Cut:
    """Do that, or where ranks are more, give one to several ranks each."""
    if num_ranks <= whole:
        return cut_evenly(whole, rank, num_ranks, what)
    if num_ranks % whole:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} is not a multiple of {what}, which is {whole} in"
            " this model, and does not divide it; choose a multiple or a divisor."
        )
    return Cut(whole, rank * whole // num_ranks, 1)


def cut_vocabulary(size: int, rank: int, num_ranks: int) -> Cut:
    """Give each rank as many tokens, rounded up; the last ones have what is left. Raises
    ConfigError where nothing is left for one."""
    each = -(-size // num_ranks)
    count = min(each, size - rank * each)
    if count < 1:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} is too much for a vocabulary of {size} tokens: with"
            f" {each} for each, no token is left for rank {rank}; lower it."
        )
    return Cut(size, rank * each, count)


def cut_block(block_size: int, num_ranks: int) -> int:
    """Return how many tokens of a block each of the ranks has that deal out sequences. Raises
    ConfigError where they cannot have as many."""
    if block_size % num_ranks:
        raise ConfigError(
            f"decode_context_parallel_size={num_ranks} does not divide block_size={block_size}:"
            " each rank holds an equal share of a block's tokens. Choose a block_size that is a"
            " multiple of it."
        )
    return block_size // num_ranks


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """Return the layers of a stage. Parts are even, and larger by one at the front, since the last
    stage has the head besides. Raises ConfigError for more stages than layers."""
    if num_stages > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} is more than the model's {num_layers} layers;"
            " take fewer stages."
        )
    each, more = divmod(num_layers, num_stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))
