"""Pauses and sleeps of a whole engine: nothing is computed, and requests wait.

    set(paused)            plan in flight ends  | nothing runs ... | set(not paused)
    set(paused, drains)    present requests end | nothing runs ... | later requests are released

While present requests finish, later ones are parked like requests whose grammar is compiled. A
later request that another attachment parks, such as for its grammar, finishes as well.

A sleep is a pause that starts with no running request. So it can free the memory of all KV blocks,
and on level 2 the weights. `ResetPrefixCache` renames all blocks, since their contents are lost.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from quire.base.errors import RequestError
from quire.base.messages import (
    SLEEPING_PARTS,
    WEIGHTS,
    Cancel,
    Control,
    Freeze,
    GrammarReady,
    Request,
    ResetPrefixCache,
)
from quire.engine.attachments.order import Order
from quire.engine.attachments.weight_updates import CLOSED, WeightUpdates
from quire.engine.attachments.weight_updates import OnEnd as OnResult
from quire.engine.loop.attachment import Attachment, Given, Loop, Pending
from quire.engine.loop.core import EngineCore
from quire.scheduler.decisions import Decisions

OnEnd = Callable[[], None]


class Pausing(Attachment):
    """Attachment that freezes the scheduler while it is paused."""

    order = Order.PAUSING

    def __init__(self, core: EngineCore) -> None:
        self._core = weakref.ref(core)
        self._is_paused = self._drains = False
        self._waiting: list[OnEnd] = []  # listeners of a pause that has not begun
        self._marked: str | None = None  # the request that the scheduler gets next
        self._parked: dict[str, None] = {}  # requests that wait for the end of the pause
        self._messages: list[Control] = []  # for the scheduler

    @property
    def is_paused(self) -> bool:
        """Whether nothing is computed."""
        return self._is_paused

    def set(self, is_paused: bool, drains: bool, on_end: OnEnd) -> None:
        """Pause or continue. drains: let the present requests finish first, unless the engine is
        paused already. on_end: called on the core's thread once no plan is in flight, or at once if
        the engine continues."""
        self._drains = is_paused and drains and not self._is_paused  # frozen requests never end
        self._waiting.append(on_end)
        if not self._drains:
            self._freeze(is_paused)
        if not is_paused:
            self._messages += [GrammarReady(name) for name in self._parked]
            self._parked = {}
            self._report()

    @property
    def pending(self) -> Pending:
        """See Attachment."""
        return Pending(bool(self._messages) or (bool(self._waiting) and self._can_begin))

    def accept(self, request: Request) -> Request:
        """Return the request, marked as held back while present requests finish."""
        if not self._drains or request.grammar or request.is_held_back:
            return request
        self._marked = request.request_id
        return msgspec.structs.replace(request, is_held_back=True)

    def hear(self, given: Given, decisions: Decisions) -> None:
        """Remember the request that was marked here, unless the scheduler has refused it."""
        if type(given) is not Request or given.request_id != self._marked:
            return
        if decisions.refusal is None:
            self._parked[given.request_id] = None
        self._marked = None

    def answers(self, now: float) -> list[Control]:
        """Begin a pause that nothing delays any more. Return the messages for the scheduler."""
        if self._waiting and self._can_begin:
            if self._drains:
                self._drains = False
                self._freeze(True)
            self._report()
        messages, self._messages = self._messages, []
        return messages

    def close(self, loop: Loop) -> None:
        """Continue, so that the last plans can save the cache."""
        if self._is_paused and not loop.has_failed:
            loop.control(Freeze(False))
        self._report()

    def _freeze(self, is_frozen: bool) -> None:
        self._is_paused = is_frozen
        self._messages.append(Freeze(is_frozen))

    def _report(self) -> None:
        waiting, self._waiting = self._waiting, []
        for on_end in waiting:
            on_end()

    @property
    def _can_begin(self) -> bool:
        """Whether no plan is in flight and, while requests finish, all have ended."""
        core = self._core()
        if core is None or core.num_in_flight:
            return False
        names = (view.request.request_id for view in core.requests()) if self._drains else ()
        return all(name in self._parked for name in names)


class SleepMemory(Protocol):
    """Memory that a sleeping engine gives back."""

    @property
    def has_weights(self) -> bool:
        """Return whether the weights are in memory."""
        ...

    def why_not(self, level: int) -> str | None:
        """Return why a sleep of this level is impossible, or None."""
        ...

    def free(self, level: int) -> None:
        """Free the KV memory, and on level 2 the weights. No plan may be in flight."""
        ...


class Sleeping(Attachment):
    """Attachment that pauses an engine and frees its memory.

    A woken part is allocated by the next step that writes it. Weights that no update has replaced
    are loaded again once all parts are awake. Attach it before `pausing`, so that it closes first.
    """

    order = Order.PAUSING

    def __init__(
        self, core: EngineCore, pausing: Pausing, updates: WeightUpdates, memory: SleepMemory
    ) -> None:
        self._core = weakref.ref(core)
        self._pausing, self._updates, self._memory = pausing, updates, memory
        self._asleep: set[str] = set()  # parts that sleep
        self._messages: list[Control] = []  # for the scheduler
        self._is_closed = self._is_pending = False

    @property
    def is_sleeping(self) -> bool:
        """Whether a part sleeps."""
        return bool(self._asleep)

    def begin(self, level: int, aborts: bool, on_end: OnResult) -> None:
        """Pause, then free memory. aborts: end the present requests, instead of letting them finish
        first. Requests of an engine that is already paused wait. Calls on_end as `WeightUpdates`
        does. Raises RequestError if a sleep is impossible, EngineBusy during an update."""
        if level not in (1, 2):
            raise RequestError(f"level={level} is unknown; use 1 or 2.", "level")
        if (reason := self._memory.why_not(level)) is not None:
            raise RequestError(f"this engine cannot sleep on level {level}: {reason}.", "level")
        self._updates.check_idle()
        core = self._core()
        assert core is not None
        views, is_paused = core.requests(), self._pausing.is_paused
        if is_paused and any(view.num_cached_tokens >= 0 for view in views):
            raise RequestError(
                "the pause has frozen requests that need their KV blocks; continue them with"
                " resume, then sleep."
            )
        if aborts and not is_paused:
            requests = (view.request for view in views)
            names = [each.request_id for each in requests if each.pin_s is None]
            self._messages += map(Cancel, names)
        self._is_pending = True
        self._pausing.set(True, True, lambda: self._free(level, on_end))

    def wake(self, parts: Sequence[str], on_end: OnResult) -> None:
        """Wake parts, of SLEEPING_PARTS. With the last one, load missing weights and continue all
        requests. Calls on_end as `WeightUpdates` does. Raises RequestError for an unknown part,
        EngineBusy during an update."""
        if unknown := set(parts) - set(SLEEPING_PARTS):
            raise RequestError(
                f"tags={sorted(unknown)} are unknown; use {' and '.join(SLEEPING_PARTS)}.", "tags"
            )
        if self._is_pending and not self._asleep:
            self._continue(on_end)
            return
        left = self._asleep - set(parts)
        if left or not self._asleep:
            self._asleep = left
            on_end(None)
        elif self._memory.has_weights:
            self._updates.check_idle()
            self._continue(on_end)
        else:
            self._asleep = {WEIGHTS}
            self._updates.begin_again(
                lambda error: self._continue(on_end) if error is None else on_end(error)
            )

    @property
    def pending(self) -> Pending:
        """See Attachment."""
        return Pending(bool(self._messages))

    def answers(self, now: float) -> list[Control]:
        """Return the messages for the scheduler."""
        messages, self._messages = self._messages, []
        return messages

    def close(self, loop: Loop) -> None:
        """Free nothing any more."""
        self._is_closed = True

    def _free(self, level: int, on_end: OnResult) -> None:
        self._is_pending = False
        if self._is_closed or not self._pausing.is_paused:
            on_end(CLOSED if self._is_closed else "the engine was resumed before it slept.")
            return
        core = self._core()
        if core is None or any(view.num_cached_tokens >= 0 for view in core.requests()):
            on_end("a pause has frozen requests that need their KV blocks; resume, then sleep.")
            return
        self._memory.free(level)
        self._asleep = set(SLEEPING_PARTS)
        self._messages.append(ResetPrefixCache())
        on_end(None)

    def _continue(self, on_end: OnResult) -> None:
        self._asleep = set()
        self._pausing.set(False, False, lambda: on_end(None))
