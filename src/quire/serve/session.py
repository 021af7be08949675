"""`llm.session()`: tokens that grow, branch and go back, whose KV blocks are held in the engine.

    with llm.session() as story:
        story.append("Once upon a time")
        story.generate(SamplingParams(max_tokens=20))
        other = story.fork()                                 # both go on, over the same blocks
        other.rewind(5)
        other.append(" a bear")
        other.generate(SamplingParams(max_tokens=20))

What a session knows are its tokens, and which held request has the first of them computed. If that
is gone, the engine computes them again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import msgspec

from quire.base.errors import STEP_FAILED, RequestError, StepFailed
from quire.base.messages import Fork, Request
from quire.base.outputs import RequestOutput
from quire.base.sampling_params import RequestOutputKind, SamplingParams
from quire.engine.build import Engine
from quire.render.chat_template import ChatOptions
from quire.render.renderer import Messages, Prompt, RenderedPrompt, is_conversation
from quire.render.turns import behind_an_answer, text_behind
from quire.serve.core_processes import ProcessEngine

KEEP_S = 600.0
Run = Callable[[Request], RequestOutput]


@dataclass(eq=False, slots=True)
class _Source:
    """A held request, for as many sessions as begin with its tokens."""

    request_id: str
    core_id: int | None
    num_users: int = 0


class Session:
    """token_ids: all of its tokens, those that were given and those that were generated.

    run: carries a request out. keep_s: how long blocks are held after each answer.
    """

    def __init__(
        self,
        engine: Engine | ProcessEngine,
        run: Run,
        keep_s: float = KEEP_S,
        cache_salt: str = "",
    ) -> None:
        self.token_ids: list[int] = []
        self._engine, self._run = engine, run
        self._keep_s, self._salt = keep_s, cache_salt
        self._source: _Source | None = None
        self._num_shared = 0  # of its tokens, from the first on, that the source has

    def append(self, prompt: Prompt | Messages) -> "Session":
        """Put a text, token ids or messages behind the tokens. Nothing is computed yet. Messages
        behind an answer are written as the chat template writes them there."""
        self.token_ids = self.token_ids + self._tokens_of(prompt)
        return self

    def generate(self, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Go on with the tokens; what comes becomes part of them. Raises RequestError, and
        StepFailed if a step failed on it; then they are as they were."""
        defaults = self._engine.requests.defaults
        params = (sampling_params or defaults.default_sampling_params()).clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        if params.num_samples > 1:
            raise RequestError("a session goes on in one way; fork it for others.", "n")
        if not self.token_ids:
            raise RequestError("the session has no tokens yet; append some.")
        made = self._engine.requests.make(
            RenderedPrompt(self.token_ids), params, cache_salt=self._salt
        )
        request = msgspec.structs.replace(made, keep_s=self._keep_s)
        if self._source is not None:
            fork = Fork(self._source.request_id, 0, self._num_shared)
            request = msgspec.structs.replace(request, fork=fork, core_id=self._source.core_id)
        output = self._run(request)
        [completion] = output.outputs
        if completion.error is not None:
            failed = completion.error
            raise (StepFailed if failed.code == STEP_FAILED else RequestError)(failed.message)
        self.token_ids = self.token_ids + completion.token_ids
        self._begin_with(request.request_id)
        return output

    def fork(self, at_token: int | None = None) -> "Session":
        """Return another session with the first at_token tokens, all if absent."""
        num_tokens = len(self.token_ids)
        at_token = num_tokens if at_token is None else at_token
        if not 0 <= at_token <= num_tokens:
            raise RequestError(
                f"at_token must be from 0 to {num_tokens}, the tokens there are; got {at_token}."
            )
        child = Session(self._engine, self._run, self._keep_s, self._salt)
        child.token_ids = self.token_ids[:at_token]
        child._share(self._source, self._num_shared)
        return child

    def rewind(self, num_tokens: int) -> "Session":
        """Drop the last tokens."""
        if not 0 <= num_tokens <= len(self.token_ids):
            raise RequestError(
                f"num_tokens must be from 0 to {len(self.token_ids)}, the tokens there are; got"
                f" {num_tokens}."
            )
        self.token_ids = self.token_ids[: len(self.token_ids) - num_tokens]
        self._num_shared = min(self._num_shared, len(self.token_ids))
        if not self._num_shared:
            self._let_go()
        return self

    def close(self) -> None:
        """Hold nothing for it any more. A second call does nothing."""
        self._let_go()
        self.token_ids = []

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------

    def _tokens_of(self, prompt: Prompt | Messages) -> list[int]:
        renderer, is_first = self._engine.renderer, not self.token_ids
        if not is_conversation(prompt) or is_first:
            return renderer.render(prompt, add_special_tokens=is_first).token_ids
        told, mark = behind_an_answer(list(prompt))  # type: ignore[arg-type]
        tokenizer = renderer.tokenizer
        assert tokenizer is not None, "a conversation has been rendered before"
        has_ended = self.token_ids[-1] in self._engine.requests.defaults.eos_token_ids
        end = tokenizer.decode(self.token_ids[-1:]) if has_ended else ""
        tail = text_behind(renderer.chat_text(told, ChatOptions()), mark, end)
        return renderer.render(tail, add_special_tokens=False).token_ids

    def _begin_with(self, request_id: str) -> None:
        """Go on from a request that has just ended, and from nothing else."""
        core_id = None
        if isinstance(self._engine, ProcessEngine):
            found = self._engine.client.held(request_id)
            core_id = found[0].core_id if found else None
        self._let_go()
        self._share(_Source(request_id, core_id), len(self.token_ids))

    def _share(self, source: _Source | None, num_shared: int) -> None:
        num_shared = min(num_shared, len(self.token_ids))
        if source is not None and num_shared:
            source.num_users += 1
            self._source, self._num_shared = source, num_shared

    def _let_go(self) -> None:
        source, self._source, self._num_shared = self._source, None, 0
        if source is None:
            return
        source.num_users -= 1
        if not source.num_users:
            self._engine.client.keep(source.request_id, 0.0, source.core_id)
