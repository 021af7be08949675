"""Step times: the duration of a step as a function of its plan.

To simulate another device, another model of a device, or another engine, implement `StepTimes` (or
another core: `replica.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quire.base.plan import MoveKind, Plan


class StepTimes(Protocol):
    """The times of a simulated device, in seconds."""

    @property
    def copy_bytes_per_s(self) -> float:
        """The rate of copies of blocks to host memory; 0.0 if unknown."""
        ...

    def plans_s(self, step_id: int, free_s: float) -> float:
        """Return when the host has made a plan that it could start at free_s."""
        ...

    def carry_out(self, plan: Plan, begins_s: float, idle_s: float) -> tuple[float, float]:
        """Return the end time of a plan that starts at `begins_s`, and its reported duration.

        A duration of 0.0 is unknown. idle_s: idle time before the plan."""
        ...


@dataclass(frozen=True)
class StepLoad:
    """The amounts of a plan's work."""

    num_tokens: int
    num_context: int  # tokens whose keys and values are read, over all rows
    num_pairs: int = 0  # products of a query and a key
    num_sampled: int = 0  # rows that sample
    num_moved: int = 0  # blocks copied to or from host memory

    @classmethod
    def of(cls, plan: Plan, window: int | None = None) -> "StepLoad":
        """Return a plan's work in layers with this window; None for full attention."""
        num = plan.num_tokens
        ends = plan.computed_bound + num
        if window is not None:
            ends = np.minimum(ends, window + num)
        num_tokens, num_context = int(num.sum()), int(ends.sum())
        pairs = num_context
        if num_tokens > len(num):
            wide, ends = num.astype(np.int64), ends.astype(np.int64)
            pairs = int((wide * ends - wide * (wide - 1) // 2).sum())
        moved = 0
        if plan.moves:
            moved = sum(len(m.source) for m in plan.moves if m.kind is not MoveKind.COPY)
        return cls(num_tokens, num_context, pairs, len(plan.sample_rows), moved)


@dataclass(frozen=True)
class Attention:
    """The cost of attention in layers with the same window."""

    context_s: float  # time to read one token's keys and values
    pair_s: float = 0.0  # arithmetic of one query with one key
    window: int | None = None


@dataclass(frozen=True)
class Roofline:
    """Step times from a roofline.

    A step reads the weights once and computes all its tokens; the slower of the two counts. The
    same holds for the keys and values of all contexts.
    """

    weights_s: float  # reading the weights
    token_s: float  # arithmetic of one token, and its exchange among devices
    attention: tuple[Attention, ...] = ()
    copy_s: float = 0.0  # moving one block to or from host memory
    sample_s: float = 0.0  # arithmetic of one row's logits
    fixed_s: float = 0.0  # a step without work
    host_s: float = 0.0  # the host's time between two steps if no plan is in flight
    expert_s: float = 0.0  # reading all experts of a mixture
    chosen: float = 1.0  # share of the experts that one token uses
    copy_bytes_per_s: float = 0.0

    def seconds(self, plan: Plan) -> float:
        """Return the device's time for a plan."""
        return self.seconds_of(lambda window: StepLoad.of(plan, window))

    def seconds_of(self, load_in: Callable[[int | None], StepLoad]) -> float:
        """Return the device's time for a step, given its load in layers of each window."""
        load = load_in(None)
        read_s = self.weights_s
        if self.expert_s:
            read_s += self.expert_s * (1 - (1 - self.chosen) ** load.num_tokens)
        work_s = self.token_s * load.num_tokens + self.sample_s * load.num_sampled
        total = self.fixed_s + max(read_s, work_s)
        for each in self.attention:
            seen = load if each.window is None else load_in(each.window)
            total += max(each.context_s * seen.num_context, each.pair_s * seen.num_pairs)
        return total + self.copy_s * load.num_moved

    def plans_s(self, step_id: int, free_s: float) -> float:
        return free_s + self.host_s

    def carry_out(self, plan: Plan, begins_s: float, idle_s: float) -> tuple[float, float]:
        duration_s = self.seconds(plan)
        return begins_s + duration_s, duration_s
