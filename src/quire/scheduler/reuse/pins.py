"""Pinned prefixes: prompts that are computed, never sampled, and stay in memory (P 4.4, shared
prefix).

A request to pin is queued like others. It ends with the result of the step that computes its last
token. Then its block tables belong to the pin, which has no row (pinned.py describes the requests
that begin with it). Pinned blocks are not available to other requests. So a request is accepted
only if it fits into the unpinned blocks, and a pin only if all open requests still fit afterwards.
A tenant may pin a share of the limit, given in its pin requests (`pin_share`), so that no tenant
uses all of it.
"""

import math
from collections.abc import Collection, Iterable, Mapping

from quire.base.errors import EngineBusy, RequestError
from quire.base.messages import Request, ResetPrefixCache, Unpin
from quire.base.requests.retention import check_pin
from quire.base.step_outputs import Finish
from quire.scheduler.core.arrivals import Arrivals
from quire.scheduler.core.extension import CacheListener, Extension, Handler, StepEnd, StepExtension
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.memory import EPSILON, Memory
from quire.scheduler.core.plans import InFlightStep
from quire.scheduler.core.sequence import Sequence, State
from quire.scheduler.reuse.pinned import Pin, PinnedPrefixes

MAX_PINNED_SHARE = 0.5  # maximum share of each pool
MAX_PINS = 256  # each new request is compared with all of them


class Pins(Extension, StepExtension, CacheListener):
    """Lifecycle of every pin, from its request to its removal."""

    fields = ("pin_s",)

    def __init__(
        self, memory: Memory, lifecycle: Lifecycle, arrivals: Arrivals, pinned: PinnedPrefixes
    ) -> None:
        self._memory, self._lifecycle, self._arrivals = memory, lifecycle, arrivals
        self._pinned = pinned

    def handlers(self) -> Mapping[type, Handler]:
        """See Extension."""
        return {Unpin: self._unpin, ResetPrefixCache: self._start_over}

    @property
    def names(self) -> Collection[str]:
        """See Extension."""
        return self._pinned.by_id

    def accept(self, request: Request) -> bool:
        """See Extension."""
        if request.request_id in self._pinned.by_id:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another.")
        if request.pin_s is None:
            return False
        check_pin(request)
        self.check(request)
        return True

    def check(self, request: Request) -> None:
        """Raise RequestError if this prefix cannot be pinned, and EngineBusy if it cannot be pinned
        now."""
        if len(self._pinned.by_id) >= MAX_PINS:
            raise RequestError(
                f"{MAX_PINS} prefixes are pinned already, which is the limit; remove prefixes"
                " that you no longer need."
            )
        needs, num_tokens = self._max_blocks(request), len(request.prompt_token_ids)
        self._check_share(request, needs)
        after = [need + held for need, held in zip(needs, self._pinned.reserved, strict=True)]
        if excess := self._memory.excess(after, MAX_PINNED_SHARE):
            raise RequestError(
                f"a prefix of {num_tokens} tokens would raise the pinned blocks to"
                f" {excess.num_needed} of {excess.num_blocks} KV blocks, and the limit is half of"
                " them. Remove pinned prefixes that you no longer need, or enlarge"
                " kv_cache_memory_bytes."
            )
        for sequence in self._lifecycle.sequences.values():
            if not self._leaves_room_for(sequence, after):
                raise EngineBusy(
                    f"a prefix of {num_tokens} tokens cannot be pinned now, because an open"
                    " request needs the memory; try again in a moment."
                )

    def _check_share(self, request: Request, needs: list[int]) -> None:
        """Raise RequestError if its tenant would pin more than its share of prefixes or blocks."""
        pins = self._pinned.by_id.values()
        mine = [pin for pin in pins if pin.request.tenant == request.tenant]
        share, max_pins = request.pin_share, max(1, int(request.pin_share * MAX_PINS + EPSILON))
        if len(mine) >= max_pins:
            raise RequestError(
                f"{len(mine)} prefixes are pinned by your key already, and its share is"
                f" {max_pins} of {MAX_PINS}. Remove prefixes that you no longer need, or ask the"
                " operator for a larger pin_share."
            )
        held = [sum(each) for each in zip(needs, *(pin.max_blocks for pin in mine), strict=True)]
        excess = self._memory.excess(held, share * MAX_PINNED_SHARE)
        if share < 1.0 and excess:
            raise RequestError(
                f"a prefix of {len(request.prompt_token_ids)} tokens would raise your key's pinned"
                f" KV blocks to {excess.num_needed}, but its share is {excess.num_allowed} of"
                f" {excess.num_blocks}. Remove pinned prefixes that you no longer need, or ask the"
                " operator for a larger pin_share."
            )

    def enter(self, sequence: Sequence, now: float) -> None:
        """Reserve the blocks of a new pin. A pin that is recomputed has reserved them already."""
        request = sequence.request
        if request.pin_s is None:
            return
        sequence.watch(self)
        self.follows_steps = True
        if request.request_id in self._pinned.by_id:
            return
        pin = Pin(request, sequence, self._max_blocks(request), now)
        self._pinned.name(pin, sequence)
        self._pinned.add(pin)

    def end_step(self, end: StepEnd, now: float) -> None:
        """Take over the blocks of sequences whose last token is computed, and end these
        sequences."""
        for sequence in self._settle(end.in_flight, now):
            end.outputs.finish(sequence, Finish("pinned"))
            self._lifecycle.end(sequence, "pinned", now)
        self.follows_steps = bool(self._pinned.computing)

    def _settle(self, in_flight: Iterable[InFlightStep], now: float) -> list[Sequence]:
        """Take over the blocks of sequences whose last token is computed. Return these sequences.
        in_flight: plans without their results."""
        done = [pin for pin in self._pinned.computing if _is_computed(pin, in_flight)]
        sequences = [pin.sequence for pin in done if pin.sequence is not None]
        for pin in done:
            if pin.ends_s == math.inf:  # finite if it is being recomputed
                pin.ends_s = now + (pin.request.pin_s or math.inf)
        self._pinned.take_over(done)
        self._find_next()
        return sequences

    def forget(self, sequence: Sequence) -> None:
        """Remove a pin whose sequence has ended before it was computed."""
        pin = self._pinned.by_id.get(sequence.request.request_id)
        if pin is not None and pin.sequence is sequence:
            self._pinned.remove(pin)

    def remove(self, request_id: str, tenant: str | None) -> Sequence | None:
        """Remove a pin. Return the sequence that still computes it, for the caller to end. tenant:
        required owner; None for any."""
        pin = self._pinned.by_id.get(request_id)
        if pin is None or tenant not in (None, pin.request.tenant):
            return None
        if pin.sequence is None:
            self._pinned.give_up(pin)
            self._pinned.remove(pin)
            self._find_next()
        return pin.sequence

    def expire(self, now: float) -> None:
        """Remove the pins whose time is over."""
        for pin in [pin for pin in self._pinned.ready if pin.ends_s <= now]:
            self.remove(pin.request.request_id, None)

    def _unpin(self, message: Unpin, now: float) -> None:
        computing = self.remove(message.request_id, message.tenant)
        if computing is not None:  # a client waits for it
            self._lifecycle.drop(computing, Finish("abort"), now)

    def _find_next(self) -> None:
        self.next_s = min({pin.ends_s for pin in self._pinned.ready} - {math.inf}, default=None)

    def fail(self, failed: Collection[Sequence], now: float) -> None:
        """Recompute the pins that failed requests may have forked, including shorter prefixes."""
        for sequence in failed:
            for pin in () if not sequence.samples else list(self._pinned.fitting(sequence)):
                self._compute(pin, now)

    def reset(self, now: float) -> None:
        """Preempt the sequences that compute prefixes. They begin again, with new names."""
        for pin in self._pinned.by_id.values():
            if pin.sequence is not None and pin.sequence.row >= 0:
                self._lifecycle.preempt(pin.sequence, pin.request.request_id, now)

    def _start_over(self, message: ResetPrefixCache, now: float) -> None:
        """Recompute all pins under new names. No pin has a row."""
        for pin in self._pinned.by_id.values():
            self._pinned.name(pin, pin.sequence or self._compute(pin, now))

    def _compute(self, pin: Pin, now: float) -> Sequence:
        """Free the blocks of a pin, and queue a sequence that recomputes it."""
        self._pinned.give_up(pin)
        self._find_next()
        self._pinned.num_changes += 1
        sequence = pin.sequence = self._arrivals.new_sequence(pin.request, now)
        sequence.blockers = frozenset()  # it was ready before
        self._arrivals.enter(sequence, now)
        return sequence

    def _leaves_room_for(self, sequence: Sequence, reserved: list[int]) -> bool:
        """Return whether an open request can still finish if pins reserve these blocks, by cache
        group."""
        memory = self._memory
        away = [m.host_blocks for m in sequence.members if m.host_blocks is not None]
        if not memory.fits_at_all(memory.needs_to_stand(away), reserved):
            return False
        if not sequence.samples:
            return True
        num = sequence.request.params.num_samples
        return memory.fits_at_all(memory.needs_of_all(sequence, sequence.limit - 1, num), reserved)

    def _max_blocks(self, request: Request) -> list[int]:
        return self._memory.needs_of_prefix(len(request.prompt_token_ids))


def _is_computed(pin: Pin, in_flight: Iterable[InFlightStep]) -> bool:
    sequence = pin.sequence
    if sequence is None or sequence.state is not State.RUNNING:
        return False
    if sequence.num_computed_tokens < sequence.num_prompt_tokens:
        return False
    return all(sequence.row not in step.plan.rows for step in in_flight)
