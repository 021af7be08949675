"""The client of a core in the same process: requests in tokens go in, `RequestOutput`s come back.

It shares the caller's thread with its core. `async_client.py` has the clients' interface for
asyncio, which says what methods of the same names mean.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from quire.base.clock import Clock
from quire.base.errors import RequestError
from quire.base.messages import (
    Abort,
    Append,
    Hold,
    PinnedPrefix,
    Request,
    ResetPrefixCache,
    RetainedRequest,
    Rewind,
    Steer,
    Unpin,
)
from quire.base.requests.outputs import RequestOutput
from quire.base.step_outputs import Finish
from quire.engine.attachments.pausing import Sleeping
from quire.engine.attachments.weight_updates import WeightUpdates
from quire.engine.client.output import ABORTED, OpenRequest, OutputProcessor
from quire.engine.loop.core import EngineCore
from quire.render.tokens.tokenizer import Tokenizer


class InProcessClient:
    """Owns its core, without processes or sockets."""

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer | None,
        clock: Clock,
        updates: WeightUpdates | None = None,
        sleeping: Sleeping | None = None,
    ) -> None:
        self.core, self._updates, self._sleeping = core, updates, sleeping
        self._tokenizer = tokenizer
        self._clock = clock
        self._outputs = OutputProcessor()
        if updates is not None:
            updates.on_change = self._outputs.change_weights

    @property
    def num_unfinished(self) -> int:
        return len(self._outputs)

    @property
    def max_model_len(self) -> int:
        return self.core.limits.max_model_len

    def check(self, request: Request) -> None:
        self.core.limits.check(request)

    def add(self, request: Request, prompt_text: str | None = None) -> OpenRequest:
        """Queue a request. Raise RequestError, and queue nothing, if it cannot be served, or while
        the engine sleeps, as no other caller could wake it."""
        if self.set_sleep()[0]:
            raise RequestError("the engine sleeps; call wake_up() before a request.")
        self.core.add(request)
        return self._outputs.add(request, prompt_text, self._tokenizer, self._clock.now())

    def append(self, request_id: str, token_ids: list[int], is_last: bool = False) -> None:
        self._outputs.append(request_id, token_ids, is_last, self.core.limits)
        self.core.control(Append(request_id, token_ids, is_last))

    def steer(
        self, request_id: str, priority: int | None = None, pause_s: float | None = None
    ) -> None:
        """See `AsyncClient.steer`."""
        self.core.control(Steer(request_id, priority, pause_s))

    def step(self) -> list[RequestOutput]:
        """Let the core take one step. Return the outputs that are due."""
        return [request.output() for request in self.advance()]

    def advance(self) -> list[OpenRequest]:
        """Let the core take one step. Return the requests whose outputs are due."""
        due, aborts = self._outputs.process(self.core.step(), self._clock.now())
        for abort in aborts:
            self.core.control(abort)
        if not self._outputs:
            self.core.settle()
        return due

    def abort(self, request_ids: Iterable[str], finish: Finish = ABORTED) -> list[OpenRequest]:
        """End requests now, with the outputs that they have."""
        ids = list(request_ids)
        for request_id in ids:
            self.core.control(Abort(request_id))
        return self._outputs.abort(ids, self._clock.now(), finish)

    def reset_prefix_cache(self) -> None:
        self.core.control(ResetPrefixCache())

    def update_weights(
        self, path: Path, version: str = "", *, is_partial: bool = False
    ) -> tuple[str, list[RequestOutput]]:
        """See `AsyncClient.update_weights`. Steps of open requests go on meanwhile; also return
        the outputs that are due."""
        if self._updates is None:
            raise RequestError("this engine cannot replace its weights.")
        ended: list[str | None] = []
        version = self._updates.begin(path, version, ended.append, is_partial=is_partial)
        return version, self._until(ended)

    def set_sleep(
        self, level: int = 0, wakes: Sequence[str] = (), *, aborts: bool = True
    ) -> tuple[bool, list[RequestOutput]]:
        """See `AsyncClient.set_sleep`; also return the outputs that are due."""
        if self._sleeping is None or not (level or wakes):
            return self._sleeping is not None and self._sleeping.is_sleeping, []
        ended: list[str | None] = []
        if level:
            self._sleeping.begin(level, aborts, ended.append)
        else:
            self._sleeping.wake(wakes, ended.append)
        outputs = self._until(ended)
        return self._sleeping.is_sleeping, outputs

    def _until(self, ended: list[str | None]) -> list[RequestOutput]:
        """Step until an order has ended, and return the outputs that are due. Raise RequestError if
        it failed."""
        outputs: list[RequestOutput] = []
        while not ended:
            if not self.core.has_work and self._updates is not None:
                self._updates.wait()
            outputs += self.step()
        if ended[0] is not None:
            raise RequestError(ended[0])
        return outputs

    def prefixes(self) -> list[PinnedPrefix]:
        return self.core.prefixes()

    def unpin(self, prefix_id: str) -> bool:
        is_known = any(prefix.id == prefix_id for prefix in self.core.prefixes())
        self.core.control(Unpin(prefix_id))
        return is_known

    def held(self, request_id: str | None = None, index: int = 0) -> list[RetainedRequest]:
        return self.core.held(request_id, index)

    def keep(self, request_id: str, keep_s: float, core_id: int | None = None) -> None:
        self.core.control(Hold(request_id, keep_s))

    def rewind(
        self, request_id: str, index: int, num_tokens: int, core_id: int | None = None
    ) -> None:
        self.core.control(Rewind(request_id, index, num_tokens))

    def close(self) -> None:
        self.core.close()
