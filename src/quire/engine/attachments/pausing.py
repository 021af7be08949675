"""Pauses of a whole engine: nothing is computed, and requests keep their blocks.

    set(paused)            plan in flight ends  | nothing runs ... | set(not paused)
    set(paused, drains)    present requests end | nothing runs ... | later requests are released

While present requests finish, later ones are parked like requests whose grammar is compiled. A
later request that another attachment parks, such as for its grammar, finishes as well.
"""

import weakref
from collections.abc import Callable

import msgspec

from quire.base.messages import Control, Freeze, GrammarReady, Request
from quire.engine.attachments.order import Order
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
