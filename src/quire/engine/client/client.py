"""The client: requests in tokens go to a core, `RequestOutput`s come back (seeds C4).

`InProcessClient` shares the caller's thread with its core; clients that reach a core in another
process have the same methods.
"""

from collections.abc import Iterable

from quire.base.clock import Clock
from quire.base.messages import (
    Abort,
    Append,
    HeldRequest,
    Hold,
    PinnedPrefix,
    Request,
    ResetPrefixCache,
    Rewind,
    Unpin,
)
from quire.base.outputs import RequestOutput
from quire.base.step_outputs import Finish
from quire.engine.client.output import ABORTED, OpenRequest, OutputProcessor
from quire.engine.loop.core import EngineCore
from quire.render.tokenizer import Tokenizer


class InProcessClient:
    """A core of one's own, without processes or sockets."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer | None, clock: Clock) -> None:
        self.core = core
        self._tokenizer = tokenizer
        self._clock = clock
        self._outputs = OutputProcessor()

    @property
    def num_unfinished(self) -> int:
        return len(self._outputs)

    @property
    def max_model_len(self) -> int:
        return self.core.limits.max_model_len

    def check(self, request: Request) -> None:
        """Raise RequestError if the engine can never serve this request."""
        self.core.limits.check(request)

    def add(self, request: Request, prompt_text: str | None = None) -> OpenRequest:
        """Queue a request. Raises RequestError if it cannot be served; then nothing is queued."""
        self.core.add(request)
        return self._outputs.add(request, prompt_text, self._tokenizer, self._clock.now())

    def append(self, request_id: str, token_ids: list[int], is_last: bool = False) -> None:
        """Add the next piece of a prompt that was added with is_open. Raise RequestError if the
        prompt cannot take it in; it stays as it was."""
        self._outputs.append(request_id, token_ids, is_last, self.core.limits)
        self.core.control(Append(request_id, token_ids, is_last))

    def step(self) -> list[RequestOutput]:
        """Let the core take one step; what became ready to show."""
        return [request.output() for request in self.advance()]

    def advance(self) -> list[OpenRequest]:
        """Let the core take one step; the requests that have something to show."""
        due, aborts = self._outputs.process(self.core.step(), self._clock.now())
        for abort in aborts:
            self.core.control(abort)
        if not self._outputs:
            self.core.settle()
        return due

    def abort(self, request_ids: Iterable[str], finish: Finish = ABORTED) -> list[OpenRequest]:
        """End requests now, with what they have."""
        ids = list(request_ids)
        for request_id in ids:
            self.core.control(Abort(request_id))
        return self._outputs.abort(ids, self._clock.now(), finish)

    def reset_prefix_cache(self) -> None:
        self.core.control(ResetPrefixCache())

    def prefixes(self) -> list[PinnedPrefix]:
        return self.core.prefixes()

    def unpin(self, prefix_id: str) -> bool:
        """Pin a prefix no longer; False if there is none of that id."""
        is_known = any(prefix.id == prefix_id for prefix in self.core.prefixes())
        self.core.control(Unpin(prefix_id))
        return is_known

    def held(self, request_id: str | None = None, index: int = 0) -> list[HeldRequest]:
        """List what is held, oldest first; or one sequence, held or not ended, with its tokens."""
        return self.core.held(request_id, index)

    def keep(self, request_id: str, keep_s: float, core_id: int | None = None) -> None:
        """Hold a request for so many seconds from now on; 0.0: let it go."""
        self.core.control(Hold(request_id, keep_s))

    def rewind(
        self, request_id: str, index: int, num_tokens: int, core_id: int | None = None
    ) -> None:
        """Leave of a held sequence the first num_tokens tokens."""
        self.core.control(Rewind(request_id, index, num_tokens))

    def close(self) -> None:
        self.core.close()
