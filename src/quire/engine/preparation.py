"""Requests that wait for a part of the engine that is loaded in the background.

    core's thread   mark(request)  begin(request)      take() -> GrammarReady
                                       |                   ^
    loading                            +--- load() --------+

The core parks a marked request as it parks one whose grammar is being compiled, so every plan that
is made meanwhile can be carried out with what is there. A request with a grammar is not marked: its
grammar is ready only once the engine is.
"""

import threading
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue

import msgspec

from quire.base.events import Event, Finished
from quire.base.messages import GrammarReady, Request


class Preparation:
    """Loads once a request needs it, on a thread that ends with the load.

    needs: returns whether a request needs what is not loaded yet. load: loads it and waits; called
    on any thread, and again after it raised. on_ready: called, from any thread, when `take` has
    something to give.
    """

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
    def num_open(self) -> int:
        """Loads that are under way."""
        return int(self._thread is not None)

    @property
    def has_answers(self) -> bool:
        return not self._loaded.empty()

    def mark(self, request: Request) -> Request:
        """Return the request, held back if it has to wait."""
        if request.grammar or not self._needs(request):
            return request
        return msgspec.structs.replace(request, is_held_back=True)

    def begin(self, request: Request) -> None:
        """Load for a request that was queued, if it is marked; `take` tells when it may run."""
        if not request.is_held_back:
            return
        self._waiting[request.request_id] = request
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="quire-loading", daemon=True)
            self._thread.start()

    def take(self) -> list[GrammarReady]:
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

    def hear(self, events: Iterable[Event]) -> None:
        """Forget the requests that have ended."""
        if self._waiting:
            for event in events:
                if isinstance(event, Finished):
                    self._waiting.pop(event.request_id, None)

    def _run(self) -> None:
        error = None
        try:
            self._load()
        except BaseException as raised:
            error = f"what this request needs cannot be loaded: {type(raised).__name__}: {raised}"
        self._loaded.put(error)
        self._on_ready()


def nothing_to_load() -> Preparation:
    """Make the preparation of an engine that has loaded everything."""
    return Preparation(lambda request: False, lambda: None, lambda: None)
