"""How long a step takes, as a function of its plan.

Whoever brings another device, another model of it, or another engine to the same workloads, brings
one of these (or another core: `replica.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quire.base.plan import MoveKind, Plan


class StepTimes(Protocol):
    """What a simulated device needs to be told. All times in seconds."""

    @property
    def copy_bytes_per_s(self) -> float:
        """How fast blocks are copied to host memory; 0.0 is not known."""
        ...

    def plans_s(self, step_id: int, free_s: float) -> float:
        """Return when the host has made a plan that it could begin at free_s."""
        ...

    def carry_out(self, plan: Plan, begins_s: float, idle_s: float) -> tuple[float, float]:
        """Return when the device is done with a plan that it begins then, and how long it says that
        this took; 0.0 is not known. idle_s: how long there had been nothing to do."""
        ...


@dataclass(frozen=True)
class StepLoad:
    """What of a plan takes time.

    num_context: tokens whose keys and values are read, all rows together; num_pairs: products of a
    query with a key; num_sampled: rows that sample; num_moved: blocks copied to or from host
    memory.
    """

    num_tokens: int
    num_context: int
    num_pairs: int = 0
    num_sampled: int = 0
    num_moved: int = 0

    @classmethod
    def of(cls, plan: Plan, window: int | None = None) -> "StepLoad":
        """Count a plan's work in layers that see a window of so many tokens; None is all."""
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
    """Layers that see the same window. context_s: to read what the cache has of one token;
    pair_s: arithmetic of one query with one key."""

    context_s: float
    pair_s: float = 0.0
    window: int | None = None


@dataclass(frozen=True)
class Roofline:
    """A step reads the weights once or computes all its tokens, whichever takes longer, and the
    same for keys and values of all contexts.

    weights_s: reading the weights; token_s: arithmetic of one token, and of what several devices
    exchange of it; copy_s: moving one block to the host's memory or back; sample_s: arithmetic of a
    row's logits; fixed_s: of a step without work; host_s: what the host needs between two steps,
    where no plan is in flight meanwhile. expert_s: reading all experts of a mixture, of which each
    token is sent to the share `chosen`.
    """

    weights_s: float
    token_s: float
    attention: tuple[Attention, ...] = ()
    copy_s: float = 0.0
    sample_s: float = 0.0
    fixed_s: float = 0.0
    host_s: float = 0.0
    expert_s: float = 0.0
    chosen: float = 1.0
    copy_bytes_per_s: float = 0.0

    def seconds(self, plan: Plan) -> float:
        """Compute how long the device works on a plan."""
        return self.seconds_of(lambda window: StepLoad.of(plan, window))

    def seconds_of(self, load_in: Callable[[int | None], StepLoad]) -> float:
        """Compute how long the device works on what a step is in layers of a window."""
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
