"""The client's side of a request: what the core's steps gave, to what the user gets.

In: `SequenceOutput`s, in order. Out: `RequestOutput`s, and `Abort`s for requests that a stop string
ended, which only this side can see; what the core still sends for those is dropped. The token that
ended a sequence is among its token ids, but not in its text.
"""

from collections.abc import Iterable

from quire.base.errors import RequestError
from quire.base.messages import Abort, SequenceOutput
from quire.base.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from quire.base.sampling_params import RequestOutputKind, SamplingParams
from quire.engine.logprobs import PromptLogprobCollector, logprobs_of
from quire.render.detokenizer import IncrementalDetokenizer
from quire.render.token_stream import open_stream
from quire.render.tokenizer import Tokenizer

Processed = tuple[list[RequestOutput], list[Abort]]


class OutputProcessor:
    """All requests of one client that are not finished. Not thread-safe."""

    def __init__(self) -> None:
        self._requests: dict[str, _OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(
        self,
        request_id: str,
        prompt_text: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        arrival_s: float,
    ) -> None:
        """Begin to follow a request. Without a tokenizer its text stays empty."""
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use; give each request its own.")
        self._requests[request_id] = _OpenRequest(
            request_id, prompt_text, prompt_token_ids, params, tokenizer, arrival_s
        )

    def process(self, outputs: Iterable[SequenceOutput], now_s: float) -> Processed:
        """Take in what a step gave. Outputs of requests that are not followed are dropped."""
        ready: list[RequestOutput] = []
        aborts: list[Abort] = []
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            request.take(output, now_s)
            if request.finish_reason is not None:
                del self._requests[output.request_id]
                if output.finish_reason is None and output.error is None:  # the core goes on
                    aborts.append(Abort(output.request_id, "stop"))
            if request.has_news():
                ready.append(request.output())
        return ready, aborts

    def drop(self, request_id: str) -> None:
        """Follow a request no longer; nobody wants its output."""
        self._requests.pop(request_id, None)

    def abort(
        self, request_ids: Iterable[str], now_s: float, finish_reason: str = "abort"
    ) -> list[RequestOutput]:
        """Finish requests on this side, with what they have. The core is told by the caller."""
        ready = []
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None:
                request.take(SequenceOutput(request_id, [], finish_reason), now_s)
                ready.append(request.output())
        return ready


class _OpenRequest:
    """One request: its output so far and how much of it the user has seen."""

    __slots__ = (
        "_cumulative_logprob", "_detokenizer", "_logprobs", "_metrics", "_num_cached_tokens",
        "_num_sent", "_params", "_prompt", "_prompt_logprobs", "_prompt_token_ids", "_request_id",
        "_stop_reason", "_text", "_token_ids", "finish_reason",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        arrival_s: float,
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._params = params
        self._metrics = RequestMetrics(arrival_s)
        self._token_ids: list[int] = []
        self._text: list[str] = []  # in pieces; those that were sent are joined or dropped
        self._num_sent = 0
        self._num_cached_tokens: int | None = None
        self._logprobs: list[dict[int, Logprob]] | None = None
        self._cumulative_logprob: float | None = None
        if params.logprobs is not None:
            self._logprobs, self._cumulative_logprob = [], 0.0
        self.finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(tokenizer, params, prompt_token_ids)
        self._prompt_logprobs = _prompt_collector(prompt_token_ids, params, tokenizer)

    def take(self, output: SequenceOutput, now_s: float) -> None:
        """Take in one step's tokens and whether they end the request."""
        if output.prompt_candidates and self._prompt_logprobs is not None:
            self._prompt_logprobs.extend(output.prompt_candidates)
        metrics = self._metrics
        metrics.num_preemptions = output.num_preemptions or metrics.num_preemptions
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        if output.token_ids and metrics.first_token_s is None:
            metrics.first_token_s = now_s
        self.finish_reason = output.finish_reason
        self._stop_reason = output.stop_reason if output.error is None else output.error
        if output.error is not None:
            self.finish_reason = "error"
        self._take_tokens(output)
        if self.finish_reason is not None:
            metrics.finished_s = now_s
            self._flush()

    def has_news(self) -> bool:
        """Whether the user's kind of output is due."""
        if self.finish_reason is not None:
            return True
        if self._params.output_kind is RequestOutputKind.FINAL_ONLY:
            return False
        return len(self._token_ids) > self._num_sent

    def output(self) -> RequestOutput:
        """What the user gets now: everything so far, or what is new (DELTA)."""
        delta = self._params.output_kind is RequestOutputKind.DELTA
        start = self._num_sent if delta else 0
        self._num_sent = len(self._token_ids)
        text = "".join(self._text)
        self._text = [] if delta else [text]
        completion = CompletionOutput(
            0,
            text,
            self._token_ids[start:],
            self._cumulative_logprob,
            None if self._logprobs is None else self._logprobs[start:],
            self.finish_reason,
            self._stop_reason,
        )
        collector = self._prompt_logprobs
        prompt_logprobs = None if collector is None else collector.logprobs
        if delta:
            self._prompt_logprobs = None  # sent once
        return RequestOutput(
            self._request_id,
            self._prompt,
            self._prompt_token_ids,
            prompt_logprobs,
            [completion],
            self.finish_reason is not None,
            self._metrics,
            self._num_cached_tokens,
        )

    def _take_tokens(self, output: SequenceOutput) -> None:
        """Token by token, because a stop string may end the text at any of them."""
        detokenizer = self._detokenizer
        hidden = -1
        if output.finish_reason == "stop" and not self._params.include_stop_str_in_output:
            hidden = len(output.token_ids) - 1
        for place, token_id in enumerate(output.token_ids):
            if self._logprobs is not None and output.candidates is not None:
                self._take_candidates(output, place, self._logprobs)
            self._token_ids.append(token_id)
            if detokenizer is None:
                continue
            text = detokenizer.push(token_id, place == hidden)
            if text:
                self._text.append(text)
            if detokenizer.stop_string is not None:
                self.finish_reason, self._stop_reason = "stop", detokenizer.stop_string
                return

    def _take_candidates(
        self, output: SequenceOutput, place: int, logprobs: list[dict[int, Logprob]]
    ) -> None:
        assert output.candidates is not None and self._cumulative_logprob is not None
        stream = None if self._detokenizer is None else self._detokenizer.stream
        candidates, wanted = output.candidates[place], self._params.logprobs or 0
        logprobs.append(logprobs_of(candidates, wanted, stream))
        self._cumulative_logprob += float(candidates.logprobs[0])

    def _flush(self) -> None:
        if self._detokenizer is not None:
            self._text.append(self._detokenizer.flush())


def _prompt_collector(
    prompt_token_ids: list[int], params: SamplingParams, tokenizer: Tokenizer | None
) -> PromptLogprobCollector | None:
    if params.prompt_logprobs is None:
        return None
    shows = tokenizer is not None and params.detokenize
    stream = open_stream(tokenizer, skip_special_tokens=False) if tokenizer and shows else None
    return PromptLogprobCollector(prompt_token_ids, params.prompt_logprobs, stream)
