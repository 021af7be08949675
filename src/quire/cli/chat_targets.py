"""Targets of `quire chat`: a model in this process, or a server.

Both stream answers and count the tokens of a conversation.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from quire.base.errors import EngineError

if TYPE_CHECKING:
    from quire.base.requests.sampling_params import SamplingParams
    from quire.serve.python.llm import LLM

Content = str | list[dict[str, Any]]  # a text, or parts with images
Messages = list[dict[str, Any]]
LOOK_S = 0.1  # interval between two checks whether the user stopped the answer


@dataclass(frozen=True)
class Piece:
    """A chunk of an answer. `finish_reason` comes with the last chunk."""

    text: str
    finish_reason: str | None = None


class ChatTarget(Protocol):
    def answer(self, messages: Messages, is_enough: Callable[[], bool]) -> Iterator[Piece]:
        """Yield the answer until it ends or `is_enough` returns True. Raises RequestError,
        EngineError and HttpError."""
        ...

    def size(self, messages: Messages) -> tuple[int, int] | None:
        """Return the tokens of a conversation with the context's length; None if unknown."""
        ...

    def close(self) -> None: ...


class ModelTarget:
    """A model in this process."""

    def __init__(self, llm: "LLM", params: "SamplingParams") -> None:
        from quire.serve.media.local_media import LocalMedia

        self._llm = llm
        self._params = params
        self._media = LocalMedia(llm.engine.renderer)

    def answer(self, messages: Messages, is_enough: Callable[[], bool]) -> Iterator[Piece]:
        with closing(self._llm.stream(messages, self._params)) as outputs:  # type: ignore[type-var]
            for output in outputs:
                (part,) = output.outputs
                if part.error is not None:
                    raise EngineError(part.error.message)
                yield Piece(part.text, part.finish_reason)
                if is_enough():
                    return

    def size(self, messages: Messages) -> tuple[int, int]:
        engine = self._llm.engine
        length = engine.config.model.max_model_len
        assert length
        prompt, media = self._media.take(messages)
        return len(engine.renderer.render(prompt, media=media).token_ids), length

    def close(self) -> None:
        self._llm.close()


class ServerTarget:
    """A server with OpenAI's HTTP API.

    model: name of the model; None for the server's first one.
    sampling: fields of the request.
    Raises HttpError if the server does not answer.
    """

    def __init__(self, url: str, key: str | None, model: str | None, sampling: dict[str, Any]):
        from quire.tools.http_client import HttpClient, first_model

        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = HttpClient(url.rstrip("/").removesuffix("/v1"), headers)
        self._sampling = sampling
        self._runner = asyncio.Runner()
        self._counts = True
        try:
            self.model = model or self._runner.run(first_model(self._client))
        except BaseException:
            self.close()
            raise

    def answer(self, messages: Messages, is_enough: Callable[[], bool]) -> Iterator[Piece]:
        body = {"model": self.model, "messages": messages, "stream": True} | self._sampling
        events = self._client.stream_json("/v1/chat/completions", body)
        try:
            while (data := self._runner.run(_next(events, is_enough))) is not None:
                yield from _pieces(data)
        finally:
            self._runner.run(events.aclose())

    def size(self, messages: Messages) -> tuple[int, int] | None:
        """Call /tokenize, which only quire and vLLM offer."""
        from quire.tools.http_client import HttpError

        if not self._counts:
            return None
        body = {"model": self.model, "messages": messages}
        try:
            answer = self._runner.run(self._client.request("/tokenize", "POST", body)).json()
            return answer["count"], answer["max_model_len"]
        except HttpError as error:
            if error.status not in (404, 405):
                raise
        except (LookupError, TypeError):  # another API, such as llama.cpp's /tokenize
            pass
        self._counts = False
        return None

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


async def _next(events: AsyncGenerator[str, None], is_enough: Callable[[], bool]) -> str | None:
    """Return the next event; None at the end, or as soon as `is_enough` returns True."""
    task = asyncio.ensure_future(anext(events, None))
    while not task.done() and not is_enough():
        await asyncio.wait([task], timeout=LOOK_S)
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None
    return task.result()


def _pieces(data: str) -> Iterator[Piece]:
    """Yield the pieces in an event of a chat completion. Raises EngineError for an error event."""
    chunk = json.loads(data)
    if "error" in chunk:
        error = chunk["error"]
        raise EngineError(str(error.get("message", error) if isinstance(error, dict) else error))
    for choice in chunk.get("choices", ()):
        text = (choice.get("delta") or {}).get("content") or ""
        yield Piece(text, choice.get("finish_reason"))
