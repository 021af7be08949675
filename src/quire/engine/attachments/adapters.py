"""Adapters as an attachment: assign slots to the adapters of requests, and have them loaded.

    core's thread   accept(request)    hear(request)          answers() -> AdapterReady
                    marks it               |                      ^
    loading                                +---- load(slot) ------+

A request waits, parked, until its adapter is in a slot. Requests get slots in the order of their
arrival. A slot is free once no request uses its adapter; the least recently used adapter leaves
first. So an adapter in use is never replaced, and no adapter waits forever behind a popular one.
A pinned prefix that the scheduler computes again waits like a new request.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue

import msgspec

from quire.base.errors import QuireError, RequestError
from quire.base.events import Finished, Queued
from quire.base.messages import AdapterReady, Request
from quire.engine.attachments.order import Order
from quire.engine.executors.threaded import DeviceThread
from quire.engine.loop.attachment import Attachment, Given, Pending
from quire.scheduler.decisions import Decisions
from quire.scheduler.views import RequestView

LoadAdapter = Callable[[int, str, str], None]  # slot, adapter_id, path; raises QuireError


class NoAdapters(Attachment):
    """Attachment of an engine without adapters: it refuses requests that need one."""

    order = Order.LOADING

    def accept(self, request: Request) -> Request:
        """See Attachment."""
        if request.adapter_id:
            raise RequestError(
                "this engine has no adapters; start it with enable_lora, or remove the adapter.",
                "lora_request",
            )
        return request


class AdapterAttachment(Attachment):
    """Attachment that gives slots to adapters.

    load: loads an adapter into a slot and waits; called on a thread of its own. on_ready: called,
    from any thread, when `answers` has something to return. requests: lists the unfinished
    requests. count: called with each new request that uses an adapter."""

    order = Order.LOADING

    def __init__(
        self,
        load: LoadAdapter,
        num_slots: int,
        on_ready: Callable[[], None],
        requests: Callable[[], Iterable[RequestView]] = tuple,
        count: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self._load, self._on_ready, self._requests = load, on_ready, requests
        self._count = count
        self._free = list(range(num_slots))
        self._slots: OrderedDict[str, int] = OrderedDict()  # by adapter, least recently used first
        self._users: Counter[str] = Counter()  # requests that use or load an adapter
        self._adapters: dict[str, str] = {}  # of unfinished requests
        self._queue: deque[Request] = deque()  # requests without a slot, oldest first
        self._loading: dict[str, list[str]] = {}  # requests by the adapter that is being loaded
        self._loaded: SimpleQueue[tuple[str, str | None]] = SimpleQueue()  # adapter, error
        self._ready: list[AdapterReady] = []
        self._thread: DeviceThread | None = None

    @property
    def pending(self) -> Pending:
        has_answers = bool(self._ready) or not self._loaded.empty()
        return Pending(has_answers, len(self._loading))

    def accept(self, request: Request) -> Request:
        """Mark a request that needs an adapter."""
        if not request.adapter_id:
            return request
        return msgspec.structs.replace(request, awaits_adapter=True)

    def hear(self, given: Given, decisions: Decisions) -> None:
        """Queue a new request for a slot. Free the slots that ended requests used."""
        if self._adapters:
            for event in decisions.events:
                if isinstance(event, Finished) and event.request_id in self._adapters:
                    self._end(event.request_id)
        if type(given) is Request:
            if given.awaits_adapter and decisions.refusal is None:
                self._count(given)
                self._enter(given)
        elif names := {each.request_id for each in decisions.events if isinstance(each, Queued)}:
            for view in self._requests():
                if view.request.request_id in names and view.request.awaits_adapter:
                    self._enter(view.request)
        if self._queue:
            self._assign()

    def answers(self, now: float) -> list[AdapterReady]:
        """Return messages that let requests run, or end them if their adapter cannot be loaded."""
        while True:
            try:
                adapter_id, error = self._loaded.get_nowait()
            except Empty:
                break
            waiting = self._loading.pop(adapter_id)
            if error is not None:
                self._free.append(self._slots.pop(adapter_id))
            self._ready += [AdapterReady(each, error) for each in waiting if each in self._adapters]
        self._assign()
        ready, self._ready = self._ready, []
        return ready

    def close(self, loop: object) -> None:
        """End the loading thread after its queued work."""
        if self._thread is not None:
            self._thread.close()

    def _enter(self, request: Request) -> None:
        self._adapters[request.request_id] = request.adapter_id
        self._queue.append(request)

    def _end(self, request_id: str) -> None:
        adapter_id = self._adapters.pop(request_id)
        waiting = [each for each in self._queue if each.request_id != request_id]
        if len(waiting) < len(self._queue):
            self._queue = deque(waiting)
            return
        self._users[adapter_id] -= 1
        if not self._users[adapter_id]:
            del self._users[adapter_id]

    def _assign(self) -> None:
        """Give slots to the oldest requests, as far as there are any."""
        while self._queue:
            request = self._queue[0]
            adapter_id = request.adapter_id
            if adapter_id not in self._slots and not self._make_room():
                return
            self._queue.popleft()
            self._users[adapter_id] += 1
            if adapter_id not in self._slots:
                self._begin(request, self._free.pop())
            elif adapter_id in self._loading:
                self._loading[adapter_id].append(request.request_id)
            else:
                self._slots.move_to_end(adapter_id)
                self._ready.append(AdapterReady(request.request_id))

    def _make_room(self) -> bool:
        """Return whether there is a free slot, perhaps of an adapter that is not in use."""
        if not self._free:
            idle = (e for e in self._slots if not self._users[e] and e not in self._loading)
            if (adapter_id := next(idle, None)) is not None:
                self._free.append(self._slots.pop(adapter_id))
        return bool(self._free)

    def _begin(self, request: Request, slot: int) -> None:
        """Start to load an adapter into a slot."""
        if self._thread is None:
            self._thread = DeviceThread("adapters", is_background=True)
        adapter_id, path = request.adapter_id, request.adapter_path
        self._slots[adapter_id] = slot
        self._loading[adapter_id] = [request.request_id]

        def load() -> None:
            error = None
            try:
                self._load(slot, adapter_id, path)
            except QuireError as raised:
                error = str(raised)
            except BaseException as raised:
                error = f"the adapter cannot be loaded: {type(raised).__name__}: {raised}"
            self._loaded.put((adapter_id, error))
            self._on_ready()

        self._thread.do(load)
