"""Targets of `quire chat`: a model in this process, or a server.

Both stream answers and count the tokens of a conversation.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from quire.base.errors import ConfigError, EngineError
from quire.cli.sampling import params_of

if TYPE_CHECKING:
    from quire.base.requests.sampling_params import SamplingParams
    from quire.serve.python.llm import LLM

Content = str | list[dict[str, Any]]  # a text, or parts with images
Messages = list[dict[str, Any]]
LOOK_S = 0.1  # interval between two checks whether the user stopped the answer


@dataclass(frozen=True)
class Piece:
    """A chunk of an answer. `finish_reason` comes with the last chunk. num_tokens: tokens of the
    whole answer so far, where the target reports them."""

    text: str
    finish_reason: str | None = None
    num_tokens: int | None = None


class ChatTarget(Protocol):
    def answer(self, messages: Messages, is_enough: Callable[[], bool]) -> Iterator[Piece]:
        """Yield the answer until it ends or `is_enough` returns True. Raises RequestError,
        EngineError and HttpError."""
        ...

    def size(self, messages: Messages) -> tuple[int, int] | None:
        """Return the tokens of a conversation with the context's length; None if unknown."""
        ...

    def models(self) -> list[str]:
        """Return the names of the models. Raises HttpError."""
        ...

    def use_model(self, name: str) -> None:
        """Let another model answer. Raises ConfigError if there is no such model."""
        ...

    def use_sampling(self, fields: Mapping[str, Any]) -> None:
        """Use these sampling options, and defaults for the others. Raises RequestError."""
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
            num_tokens = 0
            for output in outputs:
                (part,) = output.outputs
                if part.error is not None:
                    raise EngineError(part.error.message)
                num_tokens += len(part.token_ids)
                yield Piece(part.text, part.finish_reason, num_tokens)
                if is_enough():
                    return

    def size(self, messages: Messages) -> tuple[int, int]:
        engine = self._llm.engine
        length = engine.config.model.max_model_len
        assert length
        prompt, media = self._media.take(messages)
        return len(engine.renderer.render(prompt, media=media).token_ids), length

    def models(self) -> list[str]:
        return [self._llm.engine.config.model.model]

    def use_model(self, name: str) -> None:
        raise ConfigError(
            f"this chat has loaded one model; exit, and run `quire chat {name}` or `quire run"
            f" {name}`."
        )

    def use_sampling(self, fields: Mapping[str, Any]) -> None:
        self._params = params_of(fields, self._llm.get_default_sampling_params())

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
        body["stream_options"] = {"include_usage": True}
        events = self._client.stream_json("/v1/chat/completions", body)
        last = None  # the piece with the reason of the end, before the event with the usage
        try:
            while (data := self._runner.run(_next(events, is_enough))) is not None:
                for piece in _pieces(data):
                    if last is not None and piece.num_tokens is not None:
                        last = replace(last, num_tokens=piece.num_tokens)
                    elif piece.finish_reason is not None:
                        last = piece
                    else:
                        yield piece
            if last is not None:
                yield last
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

    def models(self) -> list[str]:
        listed = self._runner.run(self._client.request("/v1/models")).json()
        try:
            return [str(each["id"]) for each in listed["data"]]
        except (LookupError, TypeError) as error:
            raise ConfigError("the server's list of models cannot be read.") from error

    def use_model(self, name: str) -> None:
        if name not in (known := self.models()):
            raise ConfigError(f"the server has no model {name!r}; it has {', '.join(known)}.")
        self.model = name

    def use_sampling(self, fields: Mapping[str, Any]) -> None:
        self._sampling = dict(fields)

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
    if num_tokens := (chunk.get("usage") or {}).get("completion_tokens"):
        yield Piece("", None, num_tokens)
