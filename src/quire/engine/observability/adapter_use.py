"""The adapters (LoRA) that requests use: counted by name, and by state when metrics are read.

Clients choose names, so only the first MAX_NAMES names have a count of their own.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from quire.base.messages import Request
from quire.scheduler.views import RequestView

MAX_NAMES = 100
MAX_NAME_CHARS = 256
OTHERS = "(others)"  # no adapter can have this name


class AdapterUse:
    """Use of adapters on one core. num_requests: accepted requests by adapter. max_adapters: used
    at once."""

    def __init__(
        self, max_adapters: int, requests: Callable[[], Iterable[RequestView]] = tuple
    ) -> None:
        self.max_adapters, self._requests = max_adapters, requests
        self.num_requests: Counter[str] = Counter()

    def count(self, request: Request) -> None:
        """Count a request that uses an adapter."""
        name = _name(request)
        is_known = name in self.num_requests or len(self.num_requests) < MAX_NAMES
        self.num_requests[name if is_known else OTHERS] += 1

    def by_state(self) -> tuple[list[str], list[str]]:
        """Return the adapters of running and of waiting requests."""
        running, waiting = set[str](), set[str]()
        for view in self._requests():
            if view.request.adapter_id:
                (running if view.rows else waiting).add(_name(view.request))
        return sorted(running)[:MAX_NAMES], sorted(waiting)[:MAX_NAMES]


def _name(request: Request) -> str:
    return request.adapter_name[:MAX_NAME_CHARS] or request.adapter_id[:16]
