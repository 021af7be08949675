"""Weights that change in place, an order of a trainer to a running engine (T 5.2.2).

    staging thread   begin -> load and pack the new weights, beside the old ones
    core's thread    steps continue ...... | swap | next step
                                           no plan is in flight

A swap happens between two steps. It exchanges the model, then renames all blocks
(`ResetPrefixCache`, whose epoch names the version for recordings). So later requests never find
blocks of older weights, on the device, in host memory or in a store. Running requests continue with
their blocks; retained requests and pinned prefixes are computed again when they are needed. If
loading fails, the old weights stay.
"""

import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue

from quire.base.errors import EngineBusy, QuireError
from quire.base.messages import ResetPrefixCache
from quire.engine.attachments.order import Order
from quire.engine.loop.attachment import Attachment, Loop, Pending
from quire.engine.loop.core import EngineCore

logger = logging.getLogger("quire")

Swap = Callable[[], None]  # exchanges the model; called while no plan is in flight
OnEnd = Callable[[str | None], None]  # gets the error of an order, or None

CLOSED = "the engine has ended; start it again with the new weights."


class WeightUpdates(Attachment):
    """Attachment that stages new weights on a thread, and swaps them in between two steps.

    stage: loads and packs the weights of a path and returns the swap; called on the thread. Its
    second argument is true for a path with some of the tensors. Raises QuireError.
    stage_again: the same for the present weights, from their files.
    digest: returns a digest of the current weights, to see whether a swap has changed them.
    version: name of the current weights; empty until the first update.
    on_change: called with the version right after a swap to another version or to other weights,
    before any later output."""

    order = Order.PAUSING
    is_vital = False

    def __init__(
        self,
        core: EngineCore,
        stage: Callable[[Path, bool], Swap],
        stage_again: Callable[[], Swap] | None = None,
        digest: Callable[[], str] = str,
    ) -> None:
        self.version = ""
        self.on_change: Callable[[str], None] = lambda version: None
        self._core, self._stage, self._stage_again = weakref.ref(core), stage, stage_again
        self._digest = digest
        self._staged: SimpleQueue[Swap | str] = SimpleQueue()  # a swap, or an error
        self._thread: threading.Thread | None = None
        self._num_begun = 0
        self._next: tuple[str, OnEnd] | None = None  # version and listener of the update

    def begin(self, path: Path, version: str, on_end: OnEnd, *, is_partial: bool = False) -> str:
        """Begin an update and return the new version's name: `version`, or a number if it is empty.
        is_partial: see UpdateWeights.
        on_end: called on the core's thread once the update has succeeded or failed. Raises
        EngineBusy during another update."""
        self.check_idle()
        self._num_begun += 1
        version = version or str(self._num_begun)
        self._begin(lambda: self._stage(path, is_partial), version, on_end)
        return version

    def begin_again(self, on_end: OnEnd) -> None:
        """Begin to load the present weights again, under their version. Otherwise as `begin`."""
        self.check_idle()
        assert self._stage_again is not None
        self._begin(self._stage_again, self.version, on_end)

    def check_idle(self) -> None:
        """Raise EngineBusy during an update."""
        if self._next is not None:
            raise EngineBusy("another update of the weights has not ended; wait for its answer.")

    def wait(self) -> None:
        """Wait until the weights are staged."""
        if self._thread is not None:
            self._thread.join()

    @property
    def pending(self) -> Pending:
        """See Attachment: once the weights are staged, the next plan waits for the swap."""
        if self._next is None:
            return Pending()
        is_staged = not self._staged.empty()
        return Pending(is_staged and self._is_idle, int(not is_staged), holds_plans=is_staged)

    def answers(self, now: float) -> list[ResetPrefixCache]:
        """Swap staged weights in if no plan is in flight, and rename all blocks."""
        if self._next is None or not self._is_idle:
            return []
        try:
            staged = self._staged.get_nowait()
        except Empty:
            return []
        assert self._thread is not None
        self._thread.join()  # it has put its result
        version, on_end = self._next
        self._next = self._thread = None
        if isinstance(staged, str):
            on_end(staged)
            return []
        began, digest = time.perf_counter(), self._digest()
        try:
            staged()
        except Exception as error:
            logger.exception("new weights cannot be used")
            on_end(f"the weights cannot be used: {type(error).__name__}: {error}")
            return []
        if version != self.version or digest != self._digest():
            self.version = version
            self.on_change(version)
        on_end(None)
        pause_ms = 1000 * (time.perf_counter() - began)
        logger.info("weights %s are in use; the swap took %.1f ms", version, pause_ms)
        return [ResetPrefixCache(f"weights {version!r} {secrets.token_hex(16)}")]

    def close(self, loop: Loop) -> None:
        """Fail an update that has not ended."""
        if self._next is not None:
            _, on_end = self._next
            self._next = None
            on_end(CLOSED)

    @property
    def _is_idle(self) -> bool:
        core = self._core()
        return core is not None and core.num_in_flight == 0

    def _begin(self, stage: Callable[[], Swap], version: str, on_end: OnEnd) -> None:
        self._next = version, on_end
        self._thread = threading.Thread(
            target=self._load, args=(stage,), name="quire-weights", daemon=True
        )
        self._thread.start()

    def _load(self, stage: Callable[[], Swap]) -> None:
        result: Swap | str
        try:
            result = stage()
        except QuireError as error:
            result = str(error)
        except BaseException as error:
            logger.exception("new weights cannot be loaded")
            result = f"the weights cannot be loaded: {type(error).__name__}: {error}"
        self._staged.put(result)
        core = self._core()
        if core is not None:
            core.bell.ring()
