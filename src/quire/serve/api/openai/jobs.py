"""The prompts of one HTTP request on their way through the engine, together.

All of them end when the reader leaves, or when one of them fails.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from starlette.types import Scope

from quire.base.errors import STEP_FAILED, TIMED_OUT, StepFailed
from quire.base.messages import Fork, Request
from quire.base.requests.outputs import RequestOutput
from quire.base.requests.sampling_params import SamplingParams
from quire.base.step_outputs import Failure
from quire.engine.client.admission import admit
from quire.engine.client.async_client import AsyncClient
from quire.render.renderer import RenderedPrompt
from quire.serve.api.bodies.protocol import GenerationRequest
from quire.serve.api.bodies.validation_errors import shown
from quire.serve.api.context import ApiContext
from quire.serve.api.errors import bad_request, too_late

Indexed = tuple[int, RequestOutput]
Outputs = AsyncGenerator[RequestOutput, None]
CORE_HEADER = b"x-data-parallel-rank"
MAX_CORE_DIGITS = 9


@dataclass(frozen=True)
class PromptJob:
    """One prompt, and the request that the engine gets for it."""

    prompt: RenderedPrompt
    request: Request

    @property
    def token_ids(self) -> list[int]:
        return self.request.prompt_token_ids


@dataclass(frozen=True)
class Origin:
    """core_id: the core that a job must go to, if any. fork: what its prompt goes on from."""

    core_id: int | None = None
    fork: Fork | None = None


ANYWHERE = Origin()


def asked_core(scope: Scope) -> int | None:
    """Return the core's number, None if none is named. Whether there is one of that number is
    checked with the request. Raise ApiError for what is no number."""
    given = [value for name, value in scope["headers"] if name == CORE_HEADER]
    if not given:
        return None
    if len(given) > 1 or not given[0].isdigit() or len(given[0]) > MAX_CORE_DIGITS:
        what = shown(b", ".join(given).decode("latin-1"))
        raise bad_request(
            f"the header X-data-parallel-rank must be the number of a core, got {what}; remove it"
            " to let the server choose the core.",
            "data_parallel_rank",
        )
    return int(given[0])


def make_job(
    api: ApiContext,
    body: GenerationRequest,
    prompt: RenderedPrompt,
    params: SamplingParams,
    request_id: str,
    tenant: str,
    grammar: str = "",
    origin: Origin = ANYWHERE,
) -> PromptJob:
    """Make the job of a prompt. Raise RequestError for what the engine can never serve. grammar:
    what its answer must be, checked; empty: anything."""
    made = api.requests.make(
        prompt,
        params,
        request_id,
        body.cache_salt or "",
        body.priority or 0,
        tenant,
        body.timeout_s or 0.0,
        grammar,
    )
    request = admit(
        api.client,
        made,
        core_id=origin.core_id,
        fork=origin.fork,
        keep_s=body.keep_s or 0.0,
        pin_share=api.config.pin_share_of_key,
    )
    return PromptJob(prompt, request)


async def run(client: AsyncClient, jobs: list[PromptJob]) -> AsyncGenerator[Indexed, None]:
    """(index of the job, output) as they come. Raises ApiError for a request that failed, and
    StepFailed if that was a step's fault."""
    outputs = _run_one(client, jobs[0]) if len(jobs) == 1 else _run_many(client, jobs)
    async with aclosing(outputs):
        async for index, output in outputs:
            for completion in output.outputs:
                if completion.error is not None:
                    raise _failed(completion.error, jobs[index])
            yield index, output


async def collect(client: AsyncClient, jobs: list[PromptJob]) -> list[RequestOutput]:
    """Return the last output of each job."""
    found: dict[int, RequestOutput] = {}
    outputs = run(client, jobs)
    async with aclosing(outputs):
        async for index, output in outputs:
            found[index] = output
    return [found[index] for index in range(len(jobs))]


def _generate(client: AsyncClient, job: PromptJob) -> Outputs:
    return cast(Outputs, client.generate(job.request, job.prompt.text))


async def _run_one(client: AsyncClient, job: PromptJob) -> AsyncGenerator[Indexed, None]:
    async with aclosing(_generate(client, job)) as outputs:
        async for output in outputs:
            yield 0, output


async def _run_many(client: AsyncClient, jobs: list[PromptJob]) -> AsyncGenerator[Indexed, None]:
    """Run one task per job. The queue is short, so that a slow reader makes the engine's side
    merge."""
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
    """Return why a request failed. After a failed step a client is not told what a library said;
    the log has it."""
    if failure.code == TIMED_OUT:
        return too_late(failure.message)
    if failure.code == STEP_FAILED:
        return StepFailed(f"{job.request.request_id}: {failure.message}")
    return bad_request(f"the request failed: {failure.message}", code=failure.code)
