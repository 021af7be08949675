"""What both endpoints make of outputs: one JSON object, or a stream of chunks. Plain dictionaries,
because the time per chunk is paid for every token of every stream.
"""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import fastapi
from starlette.responses import Response

from quire.base.messages import Request
from quire.base.prefix import PrefixReport
from quire.base.requests.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.engine.client.async_client import AsyncClient
from quire.engine.observability.prefix_words import shown_to
from quire.serve.api.bodies.protocol import GenerationRequest
from quire.serve.api.http.sse import DONE, encode, event, start_stream, unless_disconnected
from quire.serve.api.openai.hooked_answer import HookedAnswer
from quire.serve.api.openai.jobs import PromptJob, collect, run
from quire.serve.hooks import RequestHooks

Json = dict[str, Any]
OUTPUT_METHODS = ("on_output", "on_tool_call")


@dataclass
class UsageCounter:
    """Tokens of one prompt and its continuations so far; also of those that best_of dropped.

    tenant: whose request it is. prefix: what of the prompt was cached. num_reasoning: of the
    continuations' tokens; None for a model that writes no reasoning. num_guessed: guesses at tokens
    that were tried; num_accepted: those that were right.
    """

    num_prompt: int
    num_completion: int = 0
    num_cached: int = 0
    num_dropped: int = 0
    tenant: str = ""
    prefix: PrefixReport | None = None
    num_reasoning: int | None = None
    num_guessed: int = 0
    num_accepted: int = 0

    def count(self, num_tokens: int, output: RequestOutput) -> None:
        """Count new tokens of one continuation."""
        self.num_completion += num_tokens
        self.num_cached = output.num_cached_tokens or self.num_cached
        self.prefix = output.prefix
        if num_tokens and output.metrics is not None:
            self.num_dropped = output.metrics.num_dropped_tokens
            self.num_guessed = output.metrics.num_draft_tokens
            self.num_accepted = output.metrics.num_accepted_draft_tokens


class Choice(Protocol):
    """Makes the JSON of one choice; the object may change as outputs are taken.

    An output may be of several choices: completion is this one's part.
    """

    usage: UsageCounter

    def chunks(self, output: RequestOutput, completion: CompletionOutput) -> list[Json]:
        """Return what a stream sends for an output: chunks without what all of them have."""
        ...

    def whole(self, output: RequestOutput, completion: CompletionOutput) -> Json:
        """Return the choice, made of its only output, with what stands beside it in the answer."""
        ...


@dataclass(frozen=True)
class Answer:
    """head: the fields of every object that is sent: id, object, created and model.

    choices: for each job its n. hooks: for each job its own; None where there are none.
    tells_metrics: of an answer to one prompt, how long it took.
    """

    client: AsyncClient
    body: GenerationRequest
    head: Json
    jobs: list[PromptJob]
    choices: Sequence[Sequence[Choice]]
    hooks: Sequence[RequestHooks] | None = None
    tells_metrics: bool = False

    async def respond(self, request: fastapi.Request) -> Response:
        """Answer. Raise ApiError or QuireError as long as nothing was sent."""
        if self.body.stream:
            return await start_stream(request, self._events())
        whole = await unless_disconnected(request.receive, self._whole())
        return Response(encode(whole), media_type="application/json")

    async def _whole(self) -> Json:
        outputs = await collect(self.client, self.jobs)
        found = dict(self.head)
        choices: list[Json] = []
        for mine, output in zip(self.choices, outputs, strict=True):
            for choice, completion in zip(mine, output.outputs, strict=True):
                found |= choice.whole(output, completion)
                choices += found["choices"]
        if (hooked := self._hooked()) is not None:
            choices = [await hooked.whole(choice) for choice in choices]
        measured = await self._measured(outputs[0]) | self._transfer(outputs[0])
        return found | {"choices": choices, "usage": usage_json(self.choices)} | measured

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Yield one piece per output that has something to show."""
        async with aclosing(self.chunks()) as pieces:
            async for chunks in pieces:
                yield b"".join(map(event, chunks))
        yield DONE

    async def chunks(self) -> AsyncGenerator[list[Json], None]:
        """Yield what a stream sends: the chunks of each output that has something to show, then
        usage."""
        hooked = self._hooked()
        running = self.body.wants_running_usage
        beside: Json = {"usage": None} if self.body.wants_usage_chunk else {}
        head = self.head | beside
        outputs = run(self.client, self.jobs)
        last: RequestOutput | None = None
        async with aclosing(outputs):
            async for index, output in outputs:
                last = output
                mine, chunks = self.choices[index], list[Json]()
                for completion in output.outputs:
                    chunks += mine[completion.index].chunks(output, completion)
                if hooked is not None:
                    chunks = await hooked.chunks(chunks)
                    if hooked.has_ended:
                        await outputs.aclose()  # before a slow client has read the end
                if chunks and output.finished:
                    chunks[-1] = chunks[-1] | self._transfer(output)
                if running:
                    head["usage"] = usage_json(self.choices)
                if chunks:
                    yield [head | chunk for chunk in chunks]
        if self.body.wants_usage_chunk:
            measured = {} if last is None else await self._measured(last)
            yield [self.head | {"choices": [], "usage": usage_json(self.choices)} | measured]

    async def _measured(self, output: RequestOutput) -> Json:
        """Return the times of a request whose last output this is, if they are to be told."""
        if not self.tells_metrics or len(self.jobs) > 1 or output.metrics is None:
            return {}
        request = self.jobs[0].request
        return {"metrics": await metrics_json(self.client, request, output.metrics)}

    def _transfer(self, output: RequestOutput) -> Json:
        """Return what another engine is to be told of an answer's only prompt, if anything is."""
        if len(self.jobs) > 1 or output.kv_transfer_params is None:
            return {}
        return {"kv_transfer_params": output.kv_transfer_params}

    def _hooked(self) -> HookedAnswer | None:
        if self.hooks is None or not any(self.hooks[0].see(name) for name in OUTPUT_METHODS):
            return None
        return HookedAnswer(self.hooks, [len(mine) for mine in self.choices])


def usage_json(choices: Sequence[Sequence[Choice]]) -> Json:
    """Sum up the usage, of which the choices of one prompt have one."""
    counters = [mine[0].usage for mine in choices]
    prompt = sum([counter.num_prompt for counter in counters])
    completion = sum([counter.num_completion + counter.num_dropped for counter in counters])
    details: Json = {"cached_tokens": sum([counter.num_cached for counter in counters])}
    if len(counters) == 1 and counters[0].prefix is not None:
        details |= shown_to(counters[0].prefix, counters[0].tenant)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }
    reasoning = [counter.num_reasoning for counter in counters if counter.num_reasoning is not None]
    details = {"reasoning_tokens": sum(reasoning)} if reasoning else {}
    if guessed := sum([counter.num_guessed for counter in counters]):
        accepted = sum([counter.num_accepted for counter in counters])
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = guessed - accepted
    if details:
        usage["completion_tokens_details"] = details
    return usage


async def metrics_json(client: AsyncClient, request: Request, found: RequestMetrics) -> Json:
    """Write the times of a request that is over, in ms; null for what did not happen. How long it
    was in the queue knows the engine alone, which is asked. The mean time between two tokens is
    that of one continuation."""
    first_s, last_s, num = found.first_token_s, found.last_token_s, found.num_generation_tokens
    generation_s = None if first_s is None or last_s is None else last_s - first_s
    timeline = json.loads(await client.timeline(request.request_id) or "{}")
    told: Json = {
        "time_to_first_token_ms": None if first_s is None else _ms(first_s - found.arrival_s),
        "generation_time_ms": None if generation_s is None else _ms(generation_s),
        "queue_time_ms": timeline.get("waited_ms"),
        "mean_itl_ms": None,
        "tokens_per_second": None,
    }
    if generation_s and num > 1:
        num_samples = request.params.num_samples
        told["tokens_per_second"] = round((num - 1) / generation_s, 3)
        if num > num_samples:
            told["mean_itl_ms"] = _ms(generation_s * num_samples / (num - num_samples))
    if found.num_draft_tokens:
        told["speculative_decoding"] = {
            "num_draft_tokens": found.num_draft_tokens,
            "num_accepted_tokens": found.num_accepted_draft_tokens,
        }
    return told


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
