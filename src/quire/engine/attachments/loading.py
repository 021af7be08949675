"""Requests that wait for a part of the engine that is loaded in the background.

    core's thread   accept(request)    hear(request)      answers() -> GrammarReady
                    marks it               |                  ^
    loading                                +---- load() ------+

The scheduler parks a marked request as it parks one whose grammar is being compiled, so every plan
made meanwhile can be carried out with what is loaded. A request with a grammar is not marked: its
grammar is ready only once everything is loaded.
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
    """Loads once a request needs it, on a thread that ends with the load.

    needs: returns whether a request needs what is not loaded yet. load: loads it and waits; called
    on any thread, and again after it raised. on_ready: called, from any thread, when `answers` has
    something to return.
    """

    order = Order.LOADING

    def __init__(
        self,
        needs: Callable[[Request], bool],
        load: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._needs, self._load, self._on_ready = needs, load, on_ready
        self._waiting: dict[str, Request] = {}
        self._loaded: SimpleQueue[str | None] = SimpleQueue()  # errors
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> Pending:
        return Pending(not self._loaded.empty(), int(self._thread is not None))

    def accept(self, request: Request) -> Request:
        """Return the request, held back if it has to wait."""
        if request.grammar or not self._needs(request):
            return request
        return msgspec.structs.replace(request, is_held_back=True)

    def hear(self, given: Given, decisions: Decisions) -> None:
        """Forget the requests that have ended; load for one that was queued, if it is marked."""
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
        """Release the requests that waited, if the load has ended."""
        try:
            error = self._loaded.get_nowait()
        except Empty:
            return []
        assert self._thread is not None
        self._thread.join()  # it has put its last words
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
