"""What one API process holds of responses: those that are stored, and those that run alone."""

import uuid
from collections.abc import Callable

from quire.serve.api.errors import ApiError
from quire.serve.api.responses.background import RunningResponse
from quire.serve.api.responses.store import ResponseStore

MAX_RUNNING = 256
RETRY_AFTER_S = 5
_DIGITS = 4


def new_id(kind: str, process: int) -> str:
    """Return an id such as resp_00003f2a...: kind, number of the process, and chance."""
    return f"{kind}_{process:0{_DIGITS}x}{uuid.uuid4().hex}"


def process_of(given: str) -> int | None:
    """Return the number of the process that made an id; None for what is no id of ours."""
    _, _, rest = given.partition("_")
    if len(rest) != _DIGITS + 32:
        return None
    try:
        return int(rest[:_DIGITS], 16)
    except ValueError:
        return None


class Responses:
    """store: of those that are over. process: the number of this API process."""

    def __init__(self, store_bytes: int, process: int = 0) -> None:
        self.store = ResponseStore(store_bytes)
        self.process = process
        self._running: dict[tuple[str, str], RunningResponse] = {}

    def new_id(self, kind: str) -> str:
        """Return an id for a response or for an item of one."""
        return new_id(kind, self.process)

    def running(self, owner: str, response_id: str) -> RunningResponse | None:
        """Return a response of an owner that is being made in the background."""
        return self._running.get((owner, response_id))

    def check_room(self) -> None:
        """Raise ApiError if no more responses may be made in the background."""
        if len(self._running) >= MAX_RUNNING:
            text = (
                f"{MAX_RUNNING} responses are running in the background already; try again later."
            )
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            raise ApiError(503, text, "server_error", code="engine_busy", headers=headers)

    def begin(self, owner: str, running: RunningResponse) -> Callable[[], None]:
        """Know of a response until the function that this returns is called."""
        self._running[owner, running.id] = running
        return lambda: self._forget(owner, running.id)

    def _forget(self, owner: str, response_id: str) -> None:
        self._running.pop((owner, response_id), None)
