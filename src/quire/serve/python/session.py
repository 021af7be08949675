"""`llm.session()`: tokens to extend, fork and rewind, with KV blocks retained in the engine.

with llm.session() as story:
    story.append("Once upon a time")
    story.generate(SamplingParams(max_tokens=20))
    other = story.fork()                                 # both continue, over the same blocks
    other.rewind(5)
    other.append(" a bear")
    other.generate(SamplingParams(max_tokens=20))
"""

from collections.abc import Callable

from quire.base.messages import Request
from quire.base.requests.outputs import RequestOutput
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.engine.client.admission import checked_grammar
from quire.engine.start.build import Engine
from quire.render.media.parts import refuse_media
from quire.render.renderer import Messages, Prompt, RenderedPrompt, is_conversation
from quire.render.templates.chat_template import ChatOptions
from quire.render.templates.turns import after_answer
from quire.serve.processes.core_processes import ProcessEngine
from quire.serve.python.session_tokens import KEEP_S, SessionTokens, Source, check_answer

Run = Callable[[Request], RequestOutput]


class Session(SessionTokens):
    """A session of an `LLM`. run: executes a request."""

    def __init__(
        self,
        engine: Engine | ProcessEngine,
        run: Run,
        keep_s: float = KEEP_S,
        cache_salt: str = "",
    ) -> None:
        super().__init__(engine.requests, engine.renderer, keep_s, cache_salt)
        self._engine, self._run = engine, run

    def append(self, prompt: Prompt | Messages) -> "Session":
        """Append a text, token ids or messages to the tokens, without computing them. After an
        answer, messages are formatted as the chat template does at that position."""
        self._replace(self.token_ids + self._tokens_of(prompt))
        return self

    def generate(self, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Continue the tokens; the new tokens become part of the session. Raises RequestError, and
        StepFailed if a step failed on the request. After an error the tokens are unchanged."""
        params = self._params(sampling_params)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        grammar = checked_grammar(self._renderer, params, RenderedPrompt(self.token_ids))
        request = self._request(self._engine.client, params, grammar)
        output = self._run(request)
        [completion] = output.outputs
        check_answer(completion)
        self._replace(self.token_ids + completion.token_ids)
        core_id = None
        if isinstance(self._engine, ProcessEngine):
            found = self._engine.client.held(request.request_id)
            core_id = found[0].core_id if found else None
        self._release()
        self._begin_with(Source(request.request_id, core_id), len(self.token_ids))
        return output

    def close(self) -> None:
        """Release the retained request. A second call does nothing."""
        self._release()
        self._replace([])

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tokens_of(self, prompt: Prompt | Messages) -> list[int]:
        renderer, is_first = self._renderer, not self.token_ids
        refuse_media(prompt, "a session")
        self._check_salt(prompt)
        if not is_conversation(prompt) or is_first:
            return renderer.render(prompt, add_special_tokens=is_first).token_ids
        conversation, mark = after_answer(list(prompt))  # type: ignore[arg-type]
        tail = self._tail_of(renderer.chat_text(conversation, ChatOptions()), mark)
        return renderer.render(tail, add_special_tokens=False).token_ids

    def _release(self) -> None:
        source = self._detach()
        if source is not None:
            self._engine.client.keep(source.request_id, 0.0, source.core_id)
