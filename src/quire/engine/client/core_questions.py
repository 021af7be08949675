"""`QuestionClient`: the questions of a client to a core in another process.

A question has a number, and the core's answer repeats it. Orders to the core have no answer.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

from quire.base.errors import EngineDead, RequestError
from quire.base.live import LiveFrame
from quire.base.messages import (
    Cancelled,
    CancelRequests,
    Done,
    GetLive,
    GetMetrics,
    GetPrefixes,
    GetRetained,
    GetTimeline,
    HeldList,
    Hold,
    Live,
    Metrics,
    PinnedPrefix,
    Prefixes,
    ResetPrefixCache,
    RetainedRequest,
    Rewind,
    SetPause,
    SetSleep,
    TimelineText,
    ToCore,
    Unpin,
    UpdateWeights,
)
from quire.engine.client.async_client import AsyncClient
from quire.engine.wire.core_choice import check_core

ANSWER_S = 60.0  # time limit for the core's answer
LOAD_S = 3600.0  # the same for an order that loads weights, or waits for a step

Answer = Metrics | TimelineText | Prefixes | HeldList | Cancelled | Done | Live


class QuestionClient(AsyncClient):
    """Implements every method of `AsyncClient` that is a question or an order to the core.

    A subclass has the connection: it sends messages and passes each answer to `_take_answer`.
    """

    def __init__(self) -> None:
        self._questions: dict[int, asyncio.Future[Any]] = {}  # by number
        self._num_questions = 0

    @abstractmethod
    def _send(self, message: ToCore) -> None:
        """Send a message to the core. Raise EngineDead without a connection."""

    async def metrics(self) -> str:
        return cast(str, await self._query(GetMetrics))

    async def timeline(self, request_id: str, tenant: str | None = None) -> str:
        return cast(str, await self._query(lambda number: GetTimeline(number, request_id, tenant)))

    async def live(self, core: int = 0) -> LiveFrame:
        check_core(core, 1)
        return cast(LiveFrame, await self._query(GetLive))

    async def prefixes(self, tenant: str | None = None) -> list[PinnedPrefix]:
        found = await self._query(lambda number: GetPrefixes(number, tenant))
        return cast(list[PinnedPrefix], found)

    async def unpin(self, prefix_id: str, tenant: str | None = None) -> bool:
        is_known = any(prefix.id == prefix_id for prefix in await self.prefixes(tenant))
        self._send(Unpin(prefix_id, tenant))
        return is_known

    async def held(
        self, request_id: str | None = None, index: int = 0, tenant: str | None = None
    ) -> list[RetainedRequest]:
        found = await self._query(lambda number: GetRetained(number, request_id, index, tenant))
        return cast(list[RetainedRequest], found)

    async def keep(
        self, request_id: str, keep_s: float, tenant: str | None = None, core_id: int | None = None
    ) -> None:
        self._send(Hold(request_id, keep_s, tenant))

    async def rewind(
        self,
        request_id: str,
        index: int,
        num_tokens: int,
        tenant: str | None = None,
        core_id: int | None = None,
    ) -> None:
        self._send(Rewind(request_id, index, num_tokens, tenant))

    async def cancel(self, request_ids: list[str] | None, tenant: str | None = None) -> list[str]:
        found = await self._query(lambda number: CancelRequests(number, request_ids, tenant))
        return cast(list[str], found)

    async def update_weights(
        self, path: str, version: str = "", *, is_partial: bool = False
    ) -> str:
        done = await self._query(
            lambda number: UpdateWeights(number, path, version, is_partial), LOAD_S
        )
        return _checked(cast(Done, done)).weights_version

    async def pause(self, is_paused: bool | None, drains: bool = False) -> bool:
        done = await self._query(lambda number: SetPause(number, is_paused, drains), LOAD_S)
        return _checked(cast(Done, done)).is_paused

    async def set_sleep(
        self, level: int = 0, wakes: Sequence[str] = (), *, aborts: bool = True
    ) -> bool:
        done = await self._query(
            lambda number: SetSleep(number, level, aborts, list(wakes)), LOAD_S
        )
        return _checked(cast(Done, done)).is_sleeping

    async def _query(self, question: Callable[[int], ToCore], limit_s: float = ANSWER_S) -> Any:
        number, self._num_questions = self._num_questions, self._num_questions + 1
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(question(number))
            return await asyncio.wait_for(answer, limit_s)
        except TimeoutError:
            text = f"the engine has not answered for {limit_s:g} s; try again in a moment."
            raise EngineDead(text) from None
        finally:
            del self._questions[number]

    async def reset_prefix_cache(self, message: ResetPrefixCache | None = None) -> None:
        self._send(message or ResetPrefixCache())

    def _take_answer(self, message: Answer) -> None:
        """Pass the core's answer to the caller that waits for it."""
        answer = self._questions.get(message.question_id)
        if answer is not None and not answer.done():
            answer.set_result(_content_of(message))

    def _fail_questions(self, error: EngineDead) -> None:
        """Raise an error in every caller that waits for an answer."""
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(error)


def _content_of(message: Answer) -> object:
    """Return the content of an answer."""
    if isinstance(message, HeldList):
        return message.requests
    if isinstance(message, Live):
        return message.frame
    if isinstance(message, Prefixes):
        return message.prefixes
    if isinstance(message, Done):
        return message
    return message.request_ids if isinstance(message, Cancelled) else message.text


def _checked(done: Done) -> Done:
    """Return the reply to an order. Raises RequestError if the order failed."""
    if done.error is not None:
        raise RequestError(done.error)
    return done
