"""Which part of a model a rank has."""

from dataclasses import dataclass

from quire.ops.collective import ALONE, RankGroup


@dataclass(frozen=True)
class RankPlace:
    """tensor: the ranks that share each layer. stage: which of num_stages, each some of the layers,
    from 0. has_whole_experts: whether each rank has some of a mixture's experts, whole, instead of
    a part of each.
    """

    tensor: RankGroup = ALONE
    stage: int = 0
    num_stages: int = 1
    has_whole_experts: bool = False

    @property
    def is_first(self) -> bool:
        """Tell whether the model's layers begin here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Tell whether the model's layers end here."""
        return self.stage == self.num_stages - 1


WHOLE = RankPlace()
