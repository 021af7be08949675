"""What both endpoints make of outputs: one JSON object, or a stream of chunks. Plain dictionaries,
because the time per chunk is paid for every token of every stream.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import fastapi
from starlette.responses import Response

from quire.base.outputs import RequestOutput
from quire.engine.remote import AsyncClient
from quire.serve.api.disconnect import unless_disconnected
from quire.serve.api.jobs import Job, collect, run
from quire.serve.api.protocol import GenerationRequest
from quire.serve.api.sse import DONE, encode, event, start_stream

Json = dict[str, Any]


@dataclass
class Tally:
    """Tokens of one choice so far."""

    num_prompt: int
    num_completion: int = 0
    num_cached: int = 0

    def count(self, num_tokens: int, output: RequestOutput) -> None:
        self.num_completion += num_tokens
        self.num_cached = output.num_cached_tokens or self.num_cached


class Choice(Protocol):
    """Makes the JSON of one choice; the object may change as outputs are taken."""

    tally: Tally

    def chunks(self, output: RequestOutput) -> list[Json]:
        """What a stream sends for an output: chunks without what all of them have."""
        ...

    def whole(self, output: RequestOutput) -> Json:
        """The choice, from its only output; with what stands beside it in the answer."""
        ...


@dataclass(frozen=True)
class Answer:
    """head: the fields of every object that is sent: id, object, created and model."""

    client: AsyncClient
    body: GenerationRequest
    head: Json
    jobs: list[Job]
    choices: Sequence[Choice]

    async def respond(self, request: fastapi.Request) -> Response:
        """Raises ApiError or QuireError as long as nothing was sent."""
        if self.body.stream:
            return await start_stream(request, self._events())
        whole = await unless_disconnected(request.receive, self._whole())
        return Response(encode(whole), media_type="application/json")

    async def _whole(self) -> Json:
        outputs = await collect(self.client, self.jobs)
        found = dict(self.head)
        choices: list[Json] = []
        for choice, output in zip(self.choices, outputs, strict=True):
            found |= choice.whole(output)
            choices += found["choices"]
        return found | {"choices": choices, "usage": usage(self.choices)}

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """One piece per output that has something to show."""
        running = self.body.wants_running_usage
        beside: Json = {"usage": None} if self.body.wants_usage_chunk else {}
        head = self.head | beside
        outputs = run(self.client, self.jobs)
        async with aclosing(outputs):
            async for index, output in outputs:
                chunks = self.choices[index].chunks(output)
                if running:
                    head["usage"] = usage(self.choices)
                if chunks:
                    yield b"".join([event(head | chunk) for chunk in chunks])
        if self.body.wants_usage_chunk:
            yield event(self.head | {"choices": [], "usage": usage(self.choices)})
        yield DONE


def usage(choices: Sequence[Choice]) -> Json:
    prompt = sum([choice.tally.num_prompt for choice in choices])
    completion = sum([choice.tally.num_completion for choice in choices])
    cached = sum([choice.tally.num_cached for choice in choices])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
