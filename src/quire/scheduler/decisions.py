"""What a door of the scheduler gives, and what others may see of its state."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.base.errors import RequestError
from quire.base.events import Event
from quire.base.kv_orders import Order
from quire.base.messages import Request
from quire.base.plan import Plan
from quire.base.step_outputs import StepOutputs

NO_OUTPUTS = StepOutputs()


@dataclass(frozen=True, slots=True)
class Decisions:
    """All that a call through a door has decided.

    plan: of `schedule`, None if nothing can be planned before a result comes in; sampling: the
    sequences of its sample_rows, in their order. outputs: what clients are told. left_out: of
    `update`: rows of each plan that is still in flight, oldest first, whose results will be void.
    refusal: of `add`, why the request was not taken. orders: for stores. notes: what subscribers
    asked to hear of (`Scheduler.subscribe`). next_s: when something becomes due by itself, on the
    clock of `now`; None is never.
    """

    plan: Plan | None = None
    sampling: npt.NDArray[np.object_] | None = None
    outputs: StepOutputs = NO_OUTPUTS
    left_out: tuple[frozenset[int], ...] = ()
    refusal: RequestError | None = None
    events: list[Event] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    notes: list[Any] = field(default_factory=list)
    next_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request that has not ended. num_cached_tokens: -1 before its first admission. rows: that
    its sequences hold; filling: those of them whose sequences have no output yet. is_waiting: some
    of them wait in the queue."""

    request: Request
    num_prompt_tokens: int
    arrival_s: float
    num_cached_tokens: int
    rows: tuple[int, ...]
    filling: tuple[int, ...]
    is_waiting: bool


@dataclass(frozen=True, slots=True)
class StoresView:
    """Blocks that came from stores and went there, and their bytes. num_here: of the blocks that
    requests were looked up for, those that this engine had already, so that nothing was moved."""

    num_fetched: int
    num_kept: int
    num_fetched_bytes: int
    num_kept_bytes: int
    num_here: int


@dataclass(frozen=True, slots=True)
class TierView:
    """Blocks that were copied to host memory and came back as hits."""

    num_offloaded: int
    num_loaded: int


@dataclass(frozen=True, slots=True)
class PinsView:
    """num_blocks: of the fullest cache group, that pins hold."""

    num_pins: int
    num_blocks: int
    num_hits: int
    num_hit_tokens: int


@dataclass(frozen=True, slots=True)
class HeldView:
    """What is held: sequences of requests that have ended, and their tokens."""

    num_sequences: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The scheduler's state at one moment, for those who count, show and tell.

    num_blocks: of the largest cache group; num_free_blocks: of the group that has the fewest.
    usage: share of the blocks that sequences hold, in the fullest group. plans: that are
    in flight, oldest first.
    """

    num_rows: int
    num_running: int
    num_waiting: int
    block_size: int
    num_blocks: int
    num_free_blocks: int
    usage: float
    pins: PinsView
    held: HeldView
    tier: TierView | None
    stores: StoresView | None
    plans: tuple[Plan, ...]
