"""What `quire chat` talks to: a model in this process, or a server.

Both answer a conversation in pieces and tell how many tokens it has.
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
LOOK_S = 0.1  # between two looks at whether a person wants no more


@dataclass(frozen=True)
class Piece:
    """Some of an answer. finish_reason: with the last piece."""

    text: str
    finish_reason: str | None = None


class ChatTarget(Protocol):
    def answer(self, messages: Messages, is_enough: Callable[[], bool]) -> Iterator[Piece]:
        """Yield the answer, until it ends or `is_enough`. Raises RequestError, EngineError,
        HttpError."""
        ...

    def size(self, messages: Messages) -> tuple[int, int] | None:
        """Count the tokens of the conversation, and of the longest context; None if nobody
        knows."""
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
    """A server that speaks OpenAI's HTTP API.

    model: its first one if None. sampling: fields of the request. Raises HttpError if it does not
    answer.
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
        """Ask /tokenize, which servers other than quire and vLLM do not have."""
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
        except (LookupError, TypeError):  # llama.cpp's /tokenize, for one, answers otherwise
            pass
        self._counts = False
        return None

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


async def _next(events: AsyncGenerator[str, None], is_enough: Callable[[], bool]) -> str | None:
    """Read the next event; None at the end, or as soon as it is enough."""
    task = asyncio.ensure_future(anext(events, None))
    while not task.done() and not is_enough():
        await asyncio.wait([task], timeout=LOOK_S)
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None
    return task.result()


def _pieces(data: str) -> Iterator[Piece]:
    """Return what an event of a chat completion holds. Raises EngineError for an error event."""
    chunk = json.loads(data)
    if "error" in chunk:
        error = chunk["error"]
        raise EngineError(str(error.get("message", error) if isinstance(error, dict) else error))
    for choice in chunk.get("choices", ()):
        text = (choice.get("delta") or {}).get("content") or ""
        yield Piece(text, choice.get("finish_reason"))
