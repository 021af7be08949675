"""The rate that a full system serves, by formula: no queue, no arrivals, only memory and steps.

A system holds B sequences. Each step gives each of them a token, and a request of o tokens leaves
after o steps. So the rate is B / (n * o * t(B)), with n sequences in a request. B is the memory
divided by the part that one sequence occupies on average (long answers stay longer):

    quire           the blocks of its prompt and of the part of its answer that exists
    Orca            the chunk of a buddy allocator for all that it may become

and t(B) is a step's time with B tokens and the prompts that arrive in it. The formula takes a
millisecond, so it shows what one changed assumption does (`figures/assumptions.py`), and which
assumption a published ratio needs (`needed_step_s`). Simulations check it.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from benchmarks.paper.baselines.buddy import BuddyAllocator
from benchmarks.paper.settings import (
    BLOCK_SIZE,
    DEFAULT,
    MAX_LEN,
    MAX_SEQS,
    Assumptions,
    Method,
    Setting,
)
from benchmarks.paper.systems import ORCA_MAX, ORCA_ORACLE, QUIRE, REPLACED
from quire.tools.step_times import StepLoad
from quire.tools.workloads import Workload

NUM_DRAWN, SEED = 4000, 0
HEADROOM = 0.01  # of the blocks, at admission (P 4.5)
ONE = Method()


@dataclass(frozen=True)
class Capacity:
    """A full system. saved: share of the blocks that its sequences share (P fig. 15)."""

    system: str
    setting: Setting
    workload: Workload
    method: Method = ONE
    assumed: Assumptions = DEFAULT
    saved: float = 0.0
    block_size: int = BLOCK_SIZE
    prefix: int = 0

    @cached_property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        inputs, outputs = self.workload.sample(NUM_DRAWN, SEED)
        return inputs + self.prefix, np.minimum(outputs, MAX_LEN - self.prefix - inputs)

    def over_time(self, values: np.ndarray) -> float:
        """Return the mean of a value over the sequences of a step. values: of each request, [N]."""
        return float(np.average(values, weights=self.lengths[1]))

    @cached_property
    def context(self) -> float:
        """Tokens whose keys and values one sequence reads in a step."""
        inputs, outputs = self.lengths
        return self.over_time(inputs + outputs / 2)

    @cached_property
    def num_sequences(self) -> float:
        """B."""
        slots, (inputs, outputs) = self.setting.num_slots, self.lengths
        if self.system == QUIRE:
            empty = (self.block_size - 1) / 2
            occupied = (self.context + empty) * (1 - self.saved)
            return min(MAX_SEQS, (1 - HEADROOM) * slots / occupied)
        if self.system == ORCA_MAX:
            return float(slots // MAX_LEN)
        assert self.system == ORCA_ORACLE
        chunks = np.array([BuddyAllocator.rounded(int(n)) for n in inputs + outputs])
        return min(MAX_SEQS, slots / self.over_time(chunks))

    def step_s(self, num: float) -> float:
        """Return t(num)."""
        is_paged, rows = self.system == QUIRE, self.method.num
        times = self.setting.times(is_paged, rows, self.assumed)
        inputs, outputs = self.lengths
        arriving = num / rows / float(outputs.mean())  # prompts in a step
        prompt = float(inputs.mean())

        def seconds(num_prompts: float) -> float:
            tokens, read = num + num_prompts * prompt, num * self.context + num_prompts * prompt
            load = StepLoad(tokens, read, 0, num)  # type: ignore[arg-type]
            return times.seconds_of(lambda window: load)

        if arriving >= 1:
            total = seconds(arriving)
        else:
            total = (1 - arriving) * seconds(0) + arriving * seconds(1)
        if self.method.is_beams and not is_paged:
            share = REPLACED[rows] if self.assumed.replaced is None else self.assumed.replaced
            copied_s = 2 * sum(each.context_s for each in times.attention) * self.context
            launched_s = self.setting.num_copies * self.assumed.launch_s
            total += share * num * (launched_s + copied_s)
        return total

    @property
    def rate(self) -> float:
        """Requests per second."""
        num = self.num_sequences
        return num / self.method.num / float(self.lengths[1].mean()) / self.step_s(num)


def gain(ours: Capacity, other: str, **of_other: object) -> float:
    """Return the rate over that of another system."""
    theirs = replace(ours, system=other, saved=0.0, block_size=BLOCK_SIZE)
    return ours.rate / replace(theirs, **of_other).rate  # type: ignore[arg-type]


def needed_step_s(ours: Capacity, other: str, target: float) -> float | None:
    """Return the host's time in a step, the same for both, at which the gain is the target one.
    None if no time is enough: the gain is always below the ratio of the batches."""
    low, high = 0.0, 1.0

    def at(step_s: float) -> float:
        return gain(replace(ours, assumed=replace(ours.assumed, step_s=step_s)), other)

    if at(low) >= target:
        return 0.0
    if at(high) < target:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) < target else (low, middle)
    return high
