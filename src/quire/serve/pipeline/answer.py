"""`Answer`: the jobs of one HTTP request through the engine, and their outputs as JSON.

The outputs become one object, or chunks of a stream. They are plain dictionaries, since the time
per chunk is paid for every token of every stream. All jobs end when the client leaves, or when one
of them fails.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, cast

import fastapi
from starlette.responses import Response

from quire.base.errors import STEP_FAILED, TIMED_OUT, StepFailed
from quire.base.messages import Request
from quire.base.prefix import PrefixReport
from quire.base.requests.numerics import fingerprint, with_adapter
from quire.base.requests.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.base.step_outputs import Failure
from quire.engine.client.async_client import AsyncClient
from quire.engine.observability.prefix_words import shown_to
from quire.serve.errors import bad_request, timed_out
from quire.serve.hooks.hooks import RequestHooks
from quire.serve.http.sse import DONE, encode, event, start_stream, unless_disconnected
from quire.serve.pipeline.hooked_answer import HookedAnswer
from quire.serve.pipeline.plan import Plan
from quire.serve.pipeline.request_times import metrics_json
from quire.serve.pipeline.requests import PromptJob

Json = dict[str, Any]
Indexed = tuple[int, RequestOutput]  # with the index of its job
Outputs = AsyncGenerator[RequestOutput, None]
OUTPUT_METHODS = ("on_output", "on_tool_call")


def weights_fields(completion: CompletionOutput) -> Json:
    """Return the field of an ended choice that names the weights of its tokens. It is absent before
    the first update of the weights."""
    spans = completion.weights_versions if completion.finish_reason is not None else ()
    return {"weights_versions": [each._asdict() for each in spans]} if spans else {}


def without_tokens(completion: CompletionOutput) -> CompletionOutput:
    """Remove the token that the engine samples even for max_tokens 0."""
    reason = completion.finish_reason
    reason = "length" if reason == "stop" else reason
    return CompletionOutput(completion.index, "", [], None, None, reason)


@dataclass
class UsageCounter:
    """Counts the tokens of one prompt and its continuations."""

    num_prompt: int
    num_completion: int = 0  # tokens of the continuations that are shown
    num_cached: int = 0  # prompt tokens found in the prefix cache
    num_dropped: int = 0  # tokens of the continuations that best_of dropped
    tenant: str = ""
    prefix: PrefixReport | None = None
    num_reasoning: int | None = None  # None: the model writes no reasoning
    num_drafted: int = 0  # draft tokens that were verified
    num_accepted: int = 0  # draft tokens that were accepted
    metrics: RequestMetrics | None = None  # times of the last output with tokens

    def count(self, num_tokens: int, output: RequestOutput) -> None:
        """Count new tokens of one continuation."""
        self.num_completion += num_tokens
        self.num_cached = output.num_cached_tokens or self.num_cached
        self.prefix = output.prefix
        if num_tokens and output.metrics is not None:
            self.metrics = output.metrics
            self.num_dropped = output.metrics.num_dropped_tokens
            self.num_drafted = output.metrics.num_draft_tokens
            self.num_accepted = output.metrics.num_accepted_draft_tokens


class Choice(Protocol):
    """Makes the JSON of one choice from its outputs. `completion` is this choice's part of an
    output."""

    usage: UsageCounter

    def chunks(self, output: RequestOutput, completion: CompletionOutput) -> list[Json]:
        """Return the chunks of an output, without the head that all chunks have."""
        ...

    def whole(self, output: RequestOutput, completion: CompletionOutput) -> Json:
        """Return the choice made from its only output, and its fields of the response."""
        ...


@dataclass(frozen=True)
class Answer:
    """The answer to one HTTP request."""

    client: AsyncClient
    plan: Plan[Any]
    head: Json  # fields of every object that is sent: id, object, created, model
    jobs: list[PromptJob]
    choices: Sequence[Sequence[Choice]]  # n for each job
    hooks: Sequence[RequestHooks] | None = None  # one for each job
    reports_metrics: bool = False  # the answer to a single prompt says how long it took
    names_numerics: bool = False  # every object has system_fingerprint

    async def respond(self, request: fastapi.Request) -> Response:
        """Send the response. Raise ApiError or QuireError as long as nothing was sent."""
        if self.plan.body.stream:
            return await start_stream(request, self._events())
        whole = await unless_disconnected(request.receive, self.whole())
        return Response(encode(whole), media_type="application/json")

    async def whole(self) -> Json:
        """Return the whole response."""
        outputs = await collect(self.client, self.jobs)
        found = self._head()
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
        """Yield the chunks of each output that has something to show, then the usage."""
        hooked = self._hooked()
        usage = self.plan.usage
        first = head = dict(self.head)
        outputs = run(self.client, self.jobs)
        last: RequestOutput | None = None
        async with aclosing(outputs):
            async for index, output in outputs:
                if last is None:
                    first = self._head()
                    head = first | {"usage": None} if usage.at_end else dict(first)
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
                if usage.in_each:
                    head["usage"] = usage_json(self.choices)
                if chunks:
                    yield [head | chunk for chunk in chunks]
        if usage.at_end:
            measured = {} if last is None else await self._measured(last)
            yield [first | {"choices": [], "usage": usage_json(self.choices)} | measured]

    def _head(self) -> Json:
        """Return the head, with the numerics of the engine now. A request may have waited for other
        weights, so nothing is read before its first output."""
        if not self.names_numerics:
            return dict(self.head)
        adapter_id = self.jobs[0].request.adapter_id  # the body names it, so all jobs share it
        parts = with_adapter(self.client.ready.numerics, adapter_id)
        return self.head | {"system_fingerprint": fingerprint(parts)}

    async def _measured(self, output: RequestOutput) -> Json:
        """Return the times of the request that ended with this output, if they are reported."""
        if not self.reports_metrics or len(self.jobs) > 1 or output.metrics is None:
            return {}
        request = self.jobs[0].request
        return {"metrics": await metrics_json(self.client, request, output.metrics)}

    def _transfer(self, output: RequestOutput) -> Json:
        """Return the parameters of a KV transfer to another engine, if there are any."""
        if len(self.jobs) > 1 or output.kv_transfer_params is None:
            return {}
        return {"kv_transfer_params": output.kv_transfer_params}

    def _hooked(self) -> HookedAnswer | None:
        if self.hooks is None or not any(self.hooks[0].see(name) for name in OUTPUT_METHODS):
            return None
        return HookedAnswer(self.hooks, [len(mine) for mine in self.choices])


def usage_json(choices: Sequence[Sequence[Choice]]) -> Json:
    """Return the usage of all prompts; the choices of one prompt share a counter."""
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
    if drafted := sum([counter.num_drafted for counter in counters]):
        accepted = sum([counter.num_accepted for counter in counters])
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = drafted - accepted
    if details:
        usage["completion_tokens_details"] = details
    return usage


# Outputs of the jobs


async def run(client: AsyncClient, jobs: list[PromptJob]) -> AsyncGenerator[Indexed, None]:
    """Yield outputs with the index of their job, as they come. Raise ApiError for a request that
    failed, and StepFailed if a step was at fault."""
    outputs = _run_one(client, jobs[0]) if len(jobs) == 1 else _run_many(client, jobs)
    async with aclosing(outputs):
        async for index, output in outputs:
            for completion in output.outputs:
                if completion.error is not None:
                    raise _failed(completion.error, jobs[index])
            yield index, output


async def collect(client: AsyncClient, jobs: list[PromptJob]) -> list[RequestOutput]:
    """Return the last output of each job."""
    last: dict[int, RequestOutput] = {}
    outputs = run(client, jobs)
    async with aclosing(outputs):
        async for index, output in outputs:
            last[index] = output
    return [last[index] for index in range(len(jobs))]


def _generate(client: AsyncClient, job: PromptJob) -> Outputs:
    def generate(request: Request) -> Outputs:
        return cast(Outputs, client.generate(request, job.prompt.text))

    if job.retention is None:
        return generate(job.request)
    return job.retention.outputs(client, job.request, generate)


async def _run_one(client: AsyncClient, job: PromptJob) -> AsyncGenerator[Indexed, None]:
    async with aclosing(_generate(client, job)) as outputs:
        async for output in outputs:
            yield 0, output


async def _run_many(client: AsyncClient, jobs: list[PromptJob]) -> AsyncGenerator[Indexed, None]:
    """Run one task per job. The queue is short, so a slow client lets the engine's side merge
    outputs."""
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(len(jobs))
    tasks = [
        asyncio.create_task(_pump(client, job, index, queue)) for index, job in enumerate(jobs)
    ]
    num_open = len(jobs)
    try:
        while num_open:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            num_open -= item.finished
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    client: AsyncClient,
    job: PromptJob,
    index: int,
    queue: "asyncio.Queue[tuple[int, RequestOutput | Exception]]",
) -> None:
    try:
        async with aclosing(_generate(client, job)) as outputs:
            async for output in outputs:
                await queue.put((index, output))
    except Exception as error:
        await queue.put((index, error))


def _failed(failure: Failure, job: PromptJob) -> Exception:
    """Return the error of a failed request. After a failed step the client does not see a library's
    message; the log has it."""
    if failure.code == TIMED_OUT:
        return timed_out(failure.message)
    if failure.code == STEP_FAILED:
        return StepFailed(f"{job.request.request_id}: {failure.message}")
    return bad_request(f"the request failed: {failure.message}", code=failure.code)
