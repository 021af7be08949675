"""Requests that wait for a part of the engine that is loaded in the background.

    core's thread   accept(request)    hear(request)      answers() -> GrammarReady
                    marks it               |                  ^
    loading                                +---- load() ------+

The scheduler parks a marked request like one whose grammar is being compiled. So plans made
meanwhile need only what is loaded. A request with a grammar is not marked: its grammar is ready
only once everything is loaded.
"""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

import msgspec

from quire.base.events import Finished
from quire.base.messages import GrammarReady, Request
from quire.engine.attachments.order import Order
from quire.engine.loop.attachment import Attachment, Given, Pending
from quire.scheduler.decisions import Decisions


class Loading(Attachment):
    """Attachment that starts to load when a request needs it, on a thread that ends with the load.

    needs: returns whether a request needs the unloaded part.
    load: loads it and waits; called on any thread, and again after it raised.
    on_ready: called, from any thread, when `answers` has something to return."""

    order = Order.LOADING

    def __init__(
        self,
        needs: Callable[[Request], bool],
        load: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._needs, self._load, self._on_ready = needs, load, on_ready
        self._waiting: dict[str, Request] = {}
        self._loaded: SimpleQueue[str | None] = SimpleQueue()  # errors of loads; None for success
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> Pending:
        return Pending(not self._loaded.empty(), int(self._thread is not None))

    def accept(self, request: Request) -> Request:
        """Return the request, marked as held back if it must wait for the load."""
        if request.grammar or not self._needs(request):
            return request
        return msgspec.structs.replace(request, is_held_back=True)

    def hear(self, given: Given, decisions: Decisions) -> None:
        """Drop the requests that have ended. Start the load for a queued request that is marked."""
        if self._waiting:
            for event in decisions.events:
                if isinstance(event, Finished):
                    self._waiting.pop(event.request_id, None)
        if type(given) is Request and given.is_held_back and decisions.refusal is None:
            self._begin(given)

    def _begin(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="quire-loading", daemon=True)
            self._thread.start()

    def answers(self, now: float) -> list[GrammarReady]:
        """Return messages that release the waiting requests, if the load has ended."""
        try:
            error = self._loaded.get_nowait()
        except Empty:
            return []
        assert self._thread is not None
        self._thread.join()  # it has put its result
        self._thread = None
        waiting, self._waiting = self._waiting, {}
        return [GrammarReady(request_id, error) for request_id in waiting]

    def _run(self) -> None:
        error = None
        try:
            self._load()
        except BaseException as raised:
            error = (
                f"the code that this request needs cannot be loaded: {type(raised).__name__}:"
                f" {raised}"
            )
        self._loaded.put(error)
        self._on_ready()
