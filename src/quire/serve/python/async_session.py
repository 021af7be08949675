"""`AsyncLLM.session()`: the equivalent of `LLM.session()` for asyncio programs.

    async with llm.session() as story:
        await story.append("Once upon a time")
        async for output in story.generate(SamplingParams(max_tokens=20)):
            print(output.outputs[0].text)
        other = story.fork().rewind(5)                       # both continue, over the same blocks

An answer becomes part of the session's tokens with its last output. If the caller changes the
tokens or stops reading before that output, the session continues without the answer.
"""

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from quire.base.errors import EngineDead
from quire.base.messages import Request
from quire.base.requests.outputs import RequestOutput
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.engine.client.admission import checked_grammar_async
from quire.engine.client.fleet import CoreClient
from quire.engine.start.text import TextSide
from quire.render.media.parts import refuse_media
from quire.render.renderer import Messages, Prompt, RenderedPrompt, is_conversation
from quire.render.templates.chat_template import ChatOptions
from quire.render.templates.turns import after_answer
from quire.serve.async_renderer import AsyncRenderer
from quire.serve.python.session_tokens import KEEP_S, SessionTokens, Source, check_answer

Outputs = AsyncGenerator[RequestOutput, None]


class AsyncSession(SessionTokens):
    """A session of an `AsyncLLM`. run: executes a request. connected: returns the client of the
    running event loop. num_cores: number of the engine's cores."""

    def __init__(
        self,
        text: TextSide,
        renderer: AsyncRenderer,
        run: Callable[[Request], Outputs],
        connected: Callable[[], Awaitable[CoreClient]],
        num_cores: int = 1,
        keep_s: float = KEEP_S,
        cache_salt: str = "",
    ) -> None:
        super().__init__(text.requests, text.renderer, keep_s, cache_salt)
        self._async_renderer, self._run, self._connected = renderer, run, connected
        self._num_cores = num_cores

    async def append(self, prompt: Prompt | Messages) -> "AsyncSession":
        """Append a text, token ids or messages to the tokens, without computing them. After an
        answer, messages are formatted as the chat template does at that position."""
        before, added = self.token_ids, await self._tokens_of(prompt)
        self._replace(before + added)
        return self

    async def generate(self, sampling_params: SamplingParams | None = None) -> Outputs:
        """Continue the tokens, and yield outputs as `AsyncLLM.generate` does. With the last output,
        the new tokens become part of the session. After an error or an early stop, the tokens are
        unchanged. Raises RequestError, EngineDead, and StepFailed if a step failed."""
        params = self._params(sampling_params)
        before = self.token_ids
        grammar = await checked_grammar_async(self._renderer, params, RenderedPrompt(before))
        request = self._request(await self._connected(), params, grammar)
        is_delta, token_ids = params.output_kind is RequestOutputKind.DELTA, list[int]()
        async with contextlib.aclosing(self._run(request)) as outputs:
            async for output in outputs:
                [completion] = output.outputs
                check_answer(completion)
                new = completion.token_ids
                token_ids = token_ids + new if is_delta else new
                if output.finished:
                    await self._take(request.request_id, before, token_ids)
                yield output

    async def close(self) -> None:
        """Release the retained request. A second call does nothing."""
        self._replace([])
        await self._release(self._detach())

    async def __aenter__(self) -> "AsyncSession":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------------

    async def _take(self, request_id: str, before: list[int], token_ids: list[int]) -> None:
        """Add a finished answer to the tokens, unless they were changed meanwhile."""
        source = Source(request_id, await self._core_of(request_id))
        if self.token_ids is not before:
            await self._release(source)
            return
        self._replace(before + token_ids)
        former = self._detach()
        self._begin_with(source, len(self.token_ids))
        await self._release(former)

    async def _core_of(self, request_id: str) -> int | None:
        """Return the number of the core that holds a request; None with a single core."""
        if self._num_cores == 1:
            return None
        found = await (await self._connected()).held(request_id)
        return found[0].core_id if found else None

    async def _tokens_of(self, prompt: Prompt | Messages) -> list[int]:
        renderer, is_first = self._async_renderer, not self.token_ids
        refuse_media(prompt, "a session")
        self._check_salt(prompt)
        if not is_conversation(prompt) or is_first:
            return (await renderer.render(prompt, add_special_tokens=is_first)).token_ids
        conversation, mark = after_answer(list(prompt))  # type: ignore[arg-type]
        whole = await self._renderer.chat_text_async(conversation, ChatOptions())
        tail = self._tail_of(whole, mark)
        return (await renderer.render(tail, add_special_tokens=False)).token_ids

    async def _release(self, source: Source | None) -> None:
        if source is None:
            return
        with contextlib.suppress(EngineDead):  # an ended engine retains no requests
            client = await self._connected()
            await client.keep(source.request_id, 0.0, None, source.core_id)
