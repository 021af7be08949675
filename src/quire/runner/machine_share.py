"""What of a machine one of several ranks has, and what all of them decide together."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.runner.memory_plan import MemoryPlan

Least = Callable[[Sequence[int]], tuple[int, ...]]


@dataclass(frozen=True)
class MachineShare:
    """num_ranks: that share the machine's memory. free_bytes: of it, before any of them took some;
    None: as many as it finds. least: tells of numbers, one by one, the least that any of all
    ranks has; each calls it as often as the others.
    """

    num_ranks: int = 1
    free_bytes: int | None = None
    least: Least = tuple

    @property
    def is_whole(self) -> bool:
        return self.num_ranks == 1

    def cpu_bytes(self, found: int) -> int:
        """Return the part of the free host memory that is for this rank. found: what is free, as it
        looks to this rank before it loads."""
        return (found if self.free_bytes is None else self.free_bytes) // self.num_ranks

    def agree(self, plan: MemoryPlan, block_bytes: Sequence[int]) -> MemoryPlan:
        """Return the plan that all ranks can keep to: blocks have the same numbers everywhere."""
        *blocks, length, states = self.least(
            (*plan.num_blocks, plan.max_model_len, plan.num_states)
        )
        if tuple(blocks) == plan.num_blocks and length == plan.max_model_len:
            return plan
        return dataclasses.replace(
            plan,
            num_blocks=tuple(blocks),
            max_model_len=length,
            num_states=states,
            pool_bytes=sum(n * size for n, size in zip(blocks, block_bytes, strict=True)),
        )

    def agree_on_limits(
        self, limits: tuple[int, ...] | None, num_groups: int
    ) -> tuple[int, ...] | None:
        """Return how many blocks of host memory each rank can have; None if one has none."""
        found = self.least(limits or (0,) * num_groups)
        return found if all(found) else None


WHOLE_MACHINE = MachineShare()
