"""Outputs of one request on their way to one reader, who may be slower than the engine."""

import asyncio

from quire.base.outputs import CompletionOutput, RequestOutput


class Mailbox:
    """Holds what the reader has not taken; several outputs become one.

    deltas: whether each output holds only what is new; otherwise the last one says everything.
    """

    __slots__ = ("_deltas", "_error", "_outputs", "_waiter")

    def __init__(self, deltas: bool) -> None:
        self._deltas = deltas
        self._outputs: list[RequestOutput] = []
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def failed(self) -> bool:
        return self._error is not None

    def put(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """The reader gets what is there, then the error."""
        self._error = error
        self._wake()

    async def take(self) -> RequestOutput:
        """All that has come since the last time, as one output; waits if there is nothing."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        outputs, self._outputs = self._outputs, []
        return merged(outputs) if self._deltas and len(outputs) > 1 else outputs[-1]

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merged(outputs: list[RequestOutput]) -> RequestOutput:
    """Outputs that each hold what is new, as one; of several continuations by their index."""
    last = outputs[-1]
    parts: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        for part in output.outputs:
            parts.setdefault(part.index, []).append(part)
    scored = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    return RequestOutput(
        last.request_id,
        last.prompt,
        last.prompt_token_ids,
        scored[0] if scored else None,
        [_joined(parts[index]) for index in sorted(parts)],
        last.finished,
        last.metrics,
        last.num_cached_tokens,
        last.prefix,
    )


def _joined(parts: list[CompletionOutput]) -> CompletionOutput:
    """What came of one continuation, in order, as one piece."""
    last = parts[-1]
    logprobs = None
    if last.logprobs is not None:
        logprobs = [position for part in parts for position in part.logprobs or ()]
    return CompletionOutput(
        last.index,
        "".join([part.text for part in parts]),
        [token_id for part in parts for token_id in part.token_ids],
        last.cumulative_logprob,
        logprobs,
        last.finish_reason,
        last.stop_reason,
        last.error,
    )
