"""A client of the engine that reports each ended request to observers and charges rate limits.

The observers are the usage log, rate limits and traces. A server without them has no such client.
The outputs show what a request used. If its reader disconnected early, the engine's timeline does.
"""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

from quire.base.errors import EngineBusy, EngineDead, QuireError, RequestError
from quire.base.messages import Request
from quire.base.requests.outputs import RequestOutput
from quire.base.tenants import key_index
from quire.engine.client.async_client import AsyncClient, ForwardingClient
from quire.serve.errors import ApiError
from quire.serve.observers.rate_limits import RateLimits, Refused

logger = logging.getLogger("quire")

# Trace headers of the HTTP request that an engine request is made from, in whichever task.
NONE: Mapping[str, str] = MappingProxyType({})
TRACE_HEADERS: ContextVar[Mapping[str, str]] = ContextVar("trace_headers", default=NONE)
ABORT = "abort"
LOOK_S, MAX_LOOKS = 0.05, 20  # interval and number of looks at an aborted request still in a step
UNKNOWN_TOKENS = 256  # output tokens to reserve for a sequence without max_tokens
REPORT_S = 2.0  # time for the last reports when the server ends


@dataclass(slots=True)
class ObservedRequest:
    """One prompt in the engine, as observers see it.

    began_s: unix time; start_s: monotonic time. status: finish_reason of the end, or `busy`,
    `refused`, `engine_dead` or `failed` if an error ended it. num_prompt: prompt tokens; 0 after
    the end if there was no output. num_reserved: its maximum number of tokens, which were charged
    to its key at the start; num_charged: tokens charged now. timeline: as in /v1/requests/ID, empty
    if not requested. trace_headers: W3C trace headers of its client.
    """

    request: Request
    began_s: float
    start_s: float
    num_prompt: int
    num_cached: int = 0
    num_completion: int = 0
    status: str = ABORT
    duration_s: float = 0.0
    first_token_s: float | None = None  # from the arrival in the engine
    num_reserved: int = 0
    num_charged: int = 0
    is_settled: bool = False
    has_output: bool = False
    is_finished: bool = False
    weights_version: str = ""  # of the last tokens; empty before the first update
    timeline: dict[str, Any] = field(default_factory=dict)
    trace_headers: Mapping[str, str] = field(default_factory=TRACE_HEADERS.get)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_completion

    def take(self, output: RequestOutput) -> None:
        self.has_output = True
        self.num_cached = output.num_cached_tokens or self.num_cached
        if output.metrics is not None:
            self.num_completion = output.metrics.num_generation_tokens
            self.first_token_s = output.metrics.first_token_latency
        if output.finished:
            self.is_finished = True
            spans = [span for each in output.outputs for span in each.weights_versions]
            self.weights_version = spans[-1].version if spans else ""
            reasons = [each.finish_reason for each in output.outputs if each.finish_reason]
            self.status = reasons[0] if reasons else self.status

    def fail(self, error: BaseException) -> None:
        for kind, status in (
            (EngineBusy, "busy"), (RequestError, "refused"), (EngineDead, "engine_dead"),
            (Exception, "failed"),
        ):  # fmt: skip
            if isinstance(error, kind):
                self.status = status
                return

    def take_timeline(self, timeline: dict[str, Any]) -> None:
        self.timeline = timeline
        if self.status == ABORT:
            self.has_output |= timeline.get("first_token_ms") is not None
            self.num_cached = timeline.get("cached_tokens") or self.num_cached
            self.num_completion = max(self.num_completion, timeline.get("output_tokens") or 0)


Listener = Callable[[ObservedRequest], None]


def max_written_tokens(request: Request) -> int:
    """Return the maximum number of output tokens of a request. Without max_tokens, each of its
    sequences counts as UNKNOWN_TOKENS."""
    if request.pin_s is not None or request.pools:
        return 0
    limit_tokens = request.params.max_tokens
    return request.params.num_samples * (UNKNOWN_TOKENS if limit_tokens is None else limit_tokens)


class ObservedClient(ForwardingClient):
    """Client that calls listeners with each request that has ended, and charges tokens to `rates`.

    A request is charged its maximum at the start, and more if its outputs exceed that. Unused
    tokens are refunded at its end. needs_timeline: whether listeners need all timelines.
    """

    def __init__(
        self,
        client: AsyncClient,
        listeners: list[Listener],
        rates: RateLimits | None = None,
        needs_timeline: bool = False,
    ) -> None:
        super().__init__(client)
        self._listeners = listeners
        self._rates = rates
        self._needs_timeline = needs_timeline
        self._open: dict[str, ObservedRequest] = {}
        self._reporting: set[asyncio.Task[None]] = set()

    async def generate(
        self, request: Request, prompt_text: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        num_prompt = len(request.prompt_token_ids)
        seen = ObservedRequest(request, time.time(), time.monotonic(), num_prompt)
        self._reserve(seen)
        self._open[request.request_id] = seen
        outputs = cast(AsyncGenerator[RequestOutput, None], super().generate(request, prompt_text))
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    seen.take(output)
                    self._charge(seen)
                    yield output
        except BaseException as error:
            if not seen.is_finished:
                seen.fail(error)
            raise
        finally:
            self._end(seen)

    def append(self, request_id: str, token_ids: list[int], is_last: bool = False) -> None:
        super().append(request_id, token_ids, is_last)
        if (seen := self._open.get(request_id)) is not None:
            seen.num_prompt += len(token_ids)
            seen.num_reserved += len(token_ids)
            self._charge(seen)

    def _reserve(self, seen: ObservedRequest) -> None:
        """Charge the maximum number of tokens of a request. Raise ApiError 429 if the limit does
        not allow that."""
        if self._rates is None:
            return
        num = seen.num_prompt + max_written_tokens(seen.request)
        refused = self._rates.reserve(key_index(seen.request.tenant), num)
        if refused is not None:
            raise too_many(refused, num)
        seen.num_reserved = seen.num_charged = num

    def _charge(self, seen: ObservedRequest) -> None:
        """Charge the tokens that exceed the charge so far; at the end, refund unused tokens."""
        if self._rates is not None:
            num = seen.num_tokens if seen.is_settled else max(seen.num_reserved, seen.num_tokens)
            self._rates.charge(key_index(seen.request.tenant), num - seen.num_charged)
            seen.num_charged = num

    def _end(self, seen: ObservedRequest) -> None:
        self._open.pop(seen.request.request_id, None)
        seen.duration_s = time.monotonic() - seen.start_s
        if not self._needs_timeline and seen.status != ABORT:
            self._report(seen)
            return
        task = asyncio.create_task(self._report_with_timeline(seen))
        self._reporting.add(task)
        task.add_done_callback(self._reporting.discard)

    async def _report_with_timeline(self, seen: ObservedRequest) -> None:
        """Report a request with its timeline, which the engine completes shortly after the end."""
        try:
            for _ in range(MAX_LOOKS):
                text = await self._client.timeline(seen.request.request_id)
                timeline = json.loads(text or "{}")
                if not timeline or timeline.get("finish_reason"):
                    break
                await asyncio.sleep(LOOK_S)
            seen.take_timeline(timeline)
        except QuireError:  # the engine has ended
            pass
        finally:
            self._report(seen)

    def _report(self, seen: ObservedRequest) -> None:
        if not seen.has_output:
            seen.num_prompt = seen.num_cached = 0
        seen.is_settled = True
        self._charge(seen)
        for listener in self._listeners:
            try:
                listener(seen)
            except Exception:  # a failed report must not fail other reports
                logger.exception("request %s cannot be reported", seen.request.request_id)

    async def close(self) -> None:
        """Finish the open reports within 2 s, then close the inner client."""
        if self._reporting:
            await asyncio.wait(self._reporting, timeout=REPORT_S)
        await super().close()


def too_many(refused: Refused, num_tokens: int = 0) -> ApiError:
    """Return the error of a request beyond a limit. num_tokens: its maximum number of tokens."""
    seconds = max(1, math.ceil(refused.wait_s))
    key_limit = f"this key's limit of {refused.limit} {refused.kind} per minute"
    text = f"{key_limit} is reached; try again in {seconds} s."
    if num_tokens:
        text = (
            f"{key_limit} has no room left for the {num_tokens} that this request may use (prompt"
            " and"
            f" max_tokens); try again in {seconds} s, or request fewer."
        )
    headers = {"Retry-After": str(seconds)}
    return ApiError(429, text, refused.kind, code="rate_limit_exceeded", headers=headers)
