"""How a feature attaches to the scheduler: small interfaces, and the core names no feature.

    HitSource        where the beginning of a prompt may come from      asked by Memory
    CacheListener    hears which blocks get names, copies some out      called by Memory
    ChunkLimit       how many tokens of a sequence a plan computes      asked by the planner
    Extension        accompanies sequences from arrival to end          called by SchedulerCore
    StepExtension    acts at certain times and between steps            called by SchedulerCore

A feature implements those that it needs, and `SchedulerCore.attach` connects it. The order of
attaching is the order of calls. A question (`find`, `num_tokens`, `accept`) changes
nothing. A method that a feature does not bring does nothing: a source that remembers one prompt
needs `find` and `evict_one` (tests/scheduler/test_extension.py has one).
"""

from collections.abc import Callable, Collection, Mapping, Sized
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from quire.base.messages import Drafted, Request
from quire.base.plan import Plan, StepResult
from quire.kv.host_tier import Copies, Name
from quire.kv.manager import KVBlocks
from quire.scheduler.core.plans import InFlightStep, PlanBuilder
from quire.scheduler.core.sequence import Int32, Sequence, SequenceGroup
from quire.scheduler.decisions import OutputsBuilder

Handler = Callable[[Any, float], None]  # of a control message, at a time
Collector = Callable[[float], Any | None]  # at a time: what has changed, if anything
EndAtToken = Callable[[Sequence, int, OutputsBuilder, float], None]
Kind = TypeVar("Kind")


class HitSource:
    """A place in which the beginning of a prompt may be found.

    Tables that a source holds and `evict_one` frees are marked (`KVManager.set_evictable`): room
    that they would make is counted, whether or not it is made.
    entries: while it is empty, nothing can be found, and the source is not asked.
    """

    entries: Sized = ()

    def find(self, sequence: Sequence, best: KVBlocks | None) -> KVBlocks | None:
        """Return the blocks that a sequence may begin with: those of this source, or `best`, which
        the sources before found, if they are better."""
        return best

    def num_tokens(self, sequence: Sequence) -> int:
        """Return the number of tokens that `find` would find here, at little cost."""
        return 0

    def begin(self, sequence: Sequence, hit: KVBlocks, now: float) -> None:
        """Note that a sequence has got a row, and holds its hit and its next blocks."""

    def evict_one(self, spared: Sequence | None) -> bool:
        """Free the evictable tables that are worth the least; return whether there were any.
        spared: the sequence for which room is made, whose own go last."""
        return False

    def lasting_blocks(self, sequence: Sequence) -> Seq[int]:
        """Count the blocks, by cache group, that are reserved for this source (`Memory.reserve`)
        and that a sequence would share until it ends; nothing if none."""
        return ()


class CacheListener:
    """Hears what becomes of names and blocks in the plan that is being made."""

    def named(
        self, sequences: Seq[Sequence], firsts: Seq[int], counts: Seq[int], blocks: Seq[Any]
    ) -> None:
        """Note that sequences have entered blocks in the index. firsts, counts: from which logical
        block to which; blocks: those newly named, by sequence and cache group."""

    def loaded(self, sequence: Sequence, num_blocks: int) -> None:
        """Note that leading blocks of a sequence are loaded from host memory."""

    def copy_out(self, copies: list[Copies]) -> None:
        """Add to the copies to host memory, by cache group, that the plan makes."""

    def end_plan(self, now: float) -> None:
        """Note that the plan is made, or that nothing was to be planned."""

    def reset(self, now: float) -> None:
        """Forget all names: the index has just been emptied."""


class Extension:
    """Accompanies sequences. `leave` and `forget` are called only for sequences that have this
    extension among their `watchers`.

    fields: of requests that concern this extension; `accept` and `enter` are called only for
    requests that set one of them; () is all requests. names: ids of requests that concern it, too.
    """

    fields: Seq[str] = ()
    names: Any = ()  # Collection[str], always the same one

    def handlers(self) -> Mapping[type, Handler]:
        """Return what carries out control messages, by their type."""
        return {}

    def accept(self, request: Request) -> bool:
        """Raise RequestError if a request cannot be served, and EngineBusy if only not now. Return
        whether this extension has checked that there is room for it; else the core does."""
        return False

    def enter(self, sequence: Sequence, now: float) -> None:
        """Note a new sequence before it is queued. One that gets a name among its `blockers` waits
        outside the queue until the extension takes that away and calls `Lifecycle.unpark`."""

    def leave(self, sequence: Sequence, reason: str, now: float) -> None:
        """Note that a sequence ends, which still holds its blocks."""

    def forget(self, sequence: Sequence) -> None:
        """Note that a sequence has ended and holds nothing any more."""

    def fail(self, failed: Collection[Sequence], now: float) -> None:
        """Give up all that may be wrong because these have failed: the error may have come with any
        of their tokens."""


class RequestCompletion(Extension):
    """Completes requests that concern it before anything else looks at them."""

    def complete(self, request: Request) -> Request:
        """Return a request with what it takes over from others. Raises RequestError if it
        cannot take that over."""
        return request


class ChunkLimit:
    """Limits chunks: how many of a sequence's next tokens a plan may compute now.

    limited: sequences with rows of which the next tokens may be limited; rows of others are not
    asked for. min_tokens: for which a step has time in any case.
    """

    limited: Collection[Sequence] = ()
    min_tokens: int = 0

    def limit(self, sequence: Sequence, first: int, num: int, builder: PlanBuilder) -> int:
        """Return how many of `num` tokens, from the index `first` on, a plan may compute; 0 if the
        sequence must wait. What these need besides blocks is claimed for the plan. The sequence may
        have no row yet."""
        return num

    def grant(self, sequence: Sequence, first: int, num: int, builder: PlanBuilder) -> None:
        """Plan what the next tokens of a row need, as `limit` has claimed it."""


class Forking(Protocol):
    """Forks rows of one request, for several answers and for beams."""

    def group_of(self, leader: Sequence, num_members: int) -> SequenceGroup:
        """Return the group of a new request that has one sequence so far."""
        ...

    def fork_leaders(self, samples: Int32, builder: PlanBuilder, now: float) -> tuple[Int32, Int32]:
        """Fork the leaders among rows that sample. Return the new rows, and the rows whose logits
        all of them use."""
        ...

    def take_candidates(
        self, step: InFlightStep, result: StepResult, outputs: OutputsBuilder, now: float
    ) -> npt.NDArray[np.bool_]:
        """Take the candidates of rows that are beams. Return which of the sampling rows are not."""
        ...


class DraftTokens(Protocol):
    """Draft tokens that plans may verify. drafted: what waits for a plan."""

    @property
    def drafted(self) -> Sized: ...

    def take(self, message: Drafted) -> None:
        """Keep draft tokens."""
        ...

    def spread(self, builder: PlanBuilder, rows: Int32, num_tokens: Int32, budget: int) -> None:
        """Let rows of a plan verify drafts, within a budget; these are added to num_tokens."""
        ...

    def accepted(
        self, step: InFlightStep, result: StepResult, outputs: OutputsBuilder
    ) -> dict[int, list[int]]:
        """Report the drafts of a step. Return the accepted tokens by row, without those of rows
        that accepted none."""
        ...

    def settle(
        self,
        step: InFlightStep,
        sequences: npt.NDArray[np.object_],
        accepted: dict[int, list[int]],
        outputs: OutputsBuilder,
        end: EndAtToken,
        now: float,
    ) -> list[int]:
        """Append accepted tokens to these sequences, and take back rejected ones. Return the number
        of tokens for each draft. end: ends a sequence by its last token."""
        ...


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What is known when a step's result has been taken.

    in_flight: the plans behind it. settled: names of blocks that are in host memory since.
    """

    result: StepResult
    is_flush: bool  # the plan only copied
    in_flight: Collection[InFlightStep]
    outputs: OutputsBuilder
    settled: list[Name] = field(default_factory=list)


class StepExtension:
    """Acts at certain times, after results, and when there is nothing to plan.

    next_s: when `expire` has something to do; None is never. follows_steps: whether `end_step` has.
    """

    next_s: float | None = None
    follows_steps = False

    def expire(self, now: float) -> None:
        """Drop what has been kept for its time."""

    def end_step(self, end: StepEnd, now: float) -> None:
        """Follow a result that was taken."""

    @property
    def has_work(self) -> bool:
        """Whether `idle_plan` may have something to do."""
        return False

    def idle_plan(self, now: float) -> Plan | None:
        """Make a plan that only moves blocks, when nothing else can be planned and no plan is in
        flight."""
        return None


def overriding(features: Seq[object], kind: type, method: str) -> list[Any]:
    """Return the features that bring a method of their own, each with that method."""
    default = getattr(kind, method)
    found = [each for each in features if isinstance(each, kind)]
    own = [each for each in found if getattr(type(each), method) is not default]
    return [(each, getattr(each, method)) for each in own]


def of_kind(features: Collection[object], kind: type[Kind]) -> list[Kind]:
    """Return the features that implement an interface."""
    return [feature for feature in features if isinstance(feature, kind)]
