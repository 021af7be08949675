"""Interfaces by which a feature attaches to the scheduler. The core names no feature.

    HitSource        finds the cached beginning of a prompt             called by Memory
    CacheListener    notes newly named blocks, adds copies to the host  called by Memory
    ChunkLimit       limits a sequence's tokens in a plan               called by the planner
    Extension        follows sequences from arrival to end              called by SchedulerCore
    StepExtension    acts at due times and between steps                called by SchedulerCore

A feature implements the interfaces that it needs, and `SchedulerCore.attach` connects it. Features
are called in the order of attaching. A question (`find`, `num_tokens`, `accept`) changes no state.
Default methods do nothing, so a source that remembers one prompt implements only `find` and
`evict_one` (example in tests/scheduler/test_extension.py).
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
from quire.scheduler.core.sequence import Int64, Sequence, SequenceGroup
from quire.scheduler.decisions import OutputsBuilder

Handler = Callable[[Any, float], None]  # takes a control message and the time
Collector = Callable[[float], Any | None]  # takes the time; returns a note for subscribers, or None
EndAtToken = Callable[[Sequence, int, OutputsBuilder, float], None]
Kind = TypeVar("Kind")


class HitSource:
    """Source of prefix hits.

    Tables that a source holds and `evict_one` can free are marked (`KVManager.set_evictable`), so
    that the free blocks an eviction would give are counted in advance.
    entries: contents of the source; while it is empty, `find` and `num_tokens` are not called.
    """

    entries: Sized = ()

    def find(self, sequence: Sequence, best: KVBlocks | None) -> KVBlocks | None:
        """Return the better hit for a sequence: this source's blocks, or `best` of earlier
        sources."""
        return best

    def num_tokens(self, sequence: Sequence) -> int:
        """Return the number of tokens that `find` would find in this source, at little cost."""
        return 0

    def prepare(self, sequence: Sequence) -> bool:
        """Fetch what the head of the queue lacks, if that was there when it arrived. Return whether
        the sequence may start now; otherwise it is parked until the fetch has ended."""
        return True

    def begin(self, sequence: Sequence, hit: KVBlocks, now: float) -> None:
        """Note that a sequence was given a row, together with the blocks of its hit and its next
        tokens."""

    def evict_one(self, spared: Sequence | None) -> bool:
        """Free the evictable tables of least value. Return whether there were any. spared: the
        sequence that needs the blocks; its own tables go last."""
        return False

    def lasting_blocks(self, sequence: Sequence) -> Seq[int]:
        """Count the reserved blocks (`Memory.reserve`) that a sequence would share until its end.
        Return the counts by cache group, or () for none."""
        return ()


class CacheListener:
    """Observer of names and blocks in the plan being made."""

    def named(
        self, sequences: Seq[Sequence], firsts: Seq[int], counts: Seq[int], blocks: Seq[Any]
    ) -> None:
        """Note blocks that entered the index. Of sequence i, the logical blocks firsts[i] to
        counts[i] were named; blocks[i] lists the newly named blocks by cache group."""

    def loaded(self, sequence: Sequence, num_blocks: int) -> None:
        """Note that the plan loads leading blocks of a sequence from host memory."""

    def copy_out(self, copies: list[Copies]) -> None:
        """Add to the plan's copies to host memory, listed by cache group."""

    def end_plan(self, now: float) -> None:
        """Note the end of planning: the plan is complete, or nothing was planned."""

    def reset(self, now: float) -> None:
        """Forget all names, because the index was emptied."""


class Extension:
    """Follower of sequences from arrival to end. `leave` and `forget` are called only for sequences
    with this extension among their `watchers`.

    fields: request fields of this extension; `accept` and `enter` are called only for requests that
    set one of them, or for all requests if (). names: ids of further requests for these calls.
    reads_digests: whether `enter` needs the digests of the sequence's full blocks.
    """

    fields: Seq[str] = ()
    reads_digests: bool = False
    names: Any = ()  # Collection[str]; always the same object

    def handlers(self) -> Mapping[type, Handler]:
        """Return the handlers of control messages, by message type."""
        return {}

    def accept(self, request: Request) -> bool:
        """Check a new request. Raise RequestError if it can never be served, and EngineBusy if it
        cannot be served now. Return True if this extension checked for free blocks; otherwise the
        core does."""
        return False

    def enter(self, sequence: Sequence, now: float) -> None:
        """Note a new sequence before it is queued. An extension can add one of its `blockers` to
        it. The sequence then waits outside the queue until the extension removes the blocker and
        calls `Lifecycle.unpark`."""

    def leave(self, sequence: Sequence, reason: str, now: float) -> None:
        """Note that a sequence ends. It still has its blocks."""

    def forget(self, sequence: Sequence) -> None:
        """Note that a sequence has ended and has no blocks any more."""

    def fail(self, failed: Collection[Sequence], now: float) -> None:
        """Drop all data that may be wrong after these sequences failed: any of their tokens may
        have caused the error."""


class RequestCompletion(Extension):
    """Extension that completes a request before any other feature sees it."""

    def complete(self, request: Request) -> Request:
        """Return the request with the data that it inherits from other requests. Raise RequestError
        if it cannot inherit them."""
        return request


class ChunkLimit:
    """Limit on chunks: the number of a sequence's next tokens that a plan may compute.

    limited: sequences with rows that may be limited; `limit` is called for these rows only.
    min_tokens: minimum token budget of every step.
    """

    limited: Collection[Sequence] = ()
    min_tokens: int = 0

    def limit(self, sequence: Sequence, first: int, num: int, builder: PlanBuilder) -> int:
        """Return how many of `num` tokens, beginning at index `first`, a plan may compute; 0 if the
        sequence must wait. Claim the resources other than blocks for these tokens. The sequence may
        have no row yet."""
        return num

    def grant(self, sequence: Sequence, first: int, num: int, builder: PlanBuilder) -> None:
        """Add to the plan what the next tokens of a row need, as claimed by `limit`."""


class Forking(Protocol):
    """Fork of a request's rows, for several answers and for beams."""

    def group_of(self, leader: Sequence, num_members: int) -> SequenceGroup:
        """Return the group of a new request, with the leader as its only sequence so far."""
        ...

    def fork_leaders(self, samples: Int64, builder: PlanBuilder, now: float) -> tuple[Int64, Int64]:
        """Fork the leaders among the sampling rows. Return the new rows and, for each sampling row,
        the row whose logits it uses."""
        ...

    def take_candidates(
        self, step: InFlightStep, result: StepResult, outputs: OutputsBuilder, now: float
    ) -> npt.NDArray[np.bool_]:
        """Take the candidates of beam rows. Return a mask over the sampling rows: True for
        non-beams."""
        ...


class DraftTokens(Protocol):
    """Draft tokens that plans may verify. drafted: the drafts that wait for a plan."""

    @property
    def drafted(self) -> Sized: ...

    def take(self, message: Drafted) -> None:
        """Store draft tokens for the next plan."""
        ...

    def spread(self, builder: PlanBuilder, rows: Int64, num_tokens: Int64, budget: int) -> None:
        """Add drafts to the rows of a plan, within the budget. Their number is added to
        num_tokens."""
        ...

    def accepted(
        self, step: InFlightStep, result: StepResult, outputs: OutputsBuilder
    ) -> dict[int, list[int]]:
        """Report the drafts of a step. Return the accepted tokens by row; rows without any are
        omitted."""
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
        """Append accepted tokens to these sequences ([num_sampled], object) and take back rejected
        drafts. Return the number of appended tokens for each draft. end: ends a sequence at its
        last token."""
        ...


@dataclass(frozen=True, slots=True)
class StepEnd:
    """State after a step's result has been taken.

    in_flight: plans after this one. settled: names of blocks that this step copied to host memory.
    """

    result: StepResult
    is_flush: bool  # whether the plan only copied blocks
    in_flight: Collection[InFlightStep]
    outputs: OutputsBuilder
    settled: list[Name] = field(default_factory=list)


class StepExtension:
    """Feature that acts at due times, after results, and when there is nothing to plan.

    next_s: time of the next `expire`; None for never. follows_steps: whether to call `end_step`.
    """

    next_s: float | None = None
    follows_steps = False

    def expire(self, now: float) -> None:
        """Drop the items whose time is over."""

    def end_step(self, end: StepEnd, now: float) -> None:
        """Note a result that was taken."""

    @property
    def has_work(self) -> bool:
        """Whether `idle_plan` may return a plan."""
        return False

    def idle_plan(self, now: float) -> Plan | None:
        """Return a plan that only moves blocks, or None. Called when nothing else can be planned
        and no plan is in flight."""
        return None


def overriding(features: Seq[object], kind: type, method: str) -> list[Any]:
    """Return the features that override a method, each paired with its bound method."""
    default = getattr(kind, method)
    found = [each for each in features if isinstance(each, kind)]
    own = [each for each in found if getattr(type(each), method) is not default]
    return [(each, getattr(each, method)) for each in own]


def of_kind(features: Collection[object], kind: type[Kind]) -> list[Kind]:
    """Return the features that implement an interface, in order."""
    return [feature for feature in features if isinstance(feature, kind)]
