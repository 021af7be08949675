"""The client's side of a request: what the core's steps gave, to what the user gets.

In: `SequenceOutput`s, in order. Out: `RequestOutput`s, and `Abort`s for sequences that a stop
string ended, which only this side can see; what the core still sends for those is dropped.
"""

from collections.abc import Iterable

from quire.base.errors import RequestError
from quire.base.messages import Abort, BeamOutput, Request, SequenceOutput
from quire.base.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.base.prefix import PrefixReport
from quire.base.sampling_params import RequestOutputKind, SamplingParams
from quire.engine.logprobs import PromptLogprobCollector
from quire.engine.sample import Sample
from quire.render.token_stream import open_stream
from quire.render.tokenizer import Tokenizer

FAILED = ("error", "timeout")

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
        request: Request,
        prompt_text: str | None,
        tokenizer: Tokenizer | None,
        arrival_s: float,
    ) -> None:
        """Begin to follow a request. Without a tokenizer its text stays empty."""
        name = request.request_id
        if name in self._requests:
            raise RequestError(f"request id {name!r} is in use; give each request its own.")
        self._requests[name] = _OpenRequest(request, prompt_text, tokenizer, arrival_s)

    def process(self, outputs: Iterable[SequenceOutput], now_s: float) -> Processed:
        """Take in what a step gave. Outputs of requests that are not followed are dropped.

        A request gives one output per step, also if several of its sequences have news.
        """
        ready: list[RequestOutput] = []
        aborts: list[Abort] = []
        groups: dict[str, _OpenRequest] = {}
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            abort = request.take(output, now_s)
            if abort is not None:
                aborts.append(abort)
            if request.num_open == 0:
                del self._requests[output.request_id]
            if request.only is None:
                groups[output.request_id] = request
            elif request.is_due():
                ready.append(request.output())
        ready += [request.output() for request in groups.values() if request.is_due()]
        return ready, aborts

    def append(self, request_id: str, token_ids: list[int], is_last: bool) -> None:
        """A piece of a prompt that comes in pieces."""
        self._requests[request_id].append(token_ids, is_last)

    def num_prompt_tokens(self, request_id: str) -> int:
        return self._requests[request_id].num_prompt_tokens

    def drop(self, request_id: str) -> None:
        """Follow a request no longer; nobody wants its output."""
        self._requests.pop(request_id, None)

    def abort(
        self,
        request_ids: Iterable[str],
        now_s: float,
        finish_reason: str = "abort",
        stop_reason: str | None = None,
    ) -> list[RequestOutput]:
        """Finish requests on this side, with what they have. The core is told by the caller."""
        ready = []
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None:
                request.finish(finish_reason, stop_reason, now_s)
                ready.append(request.output())
        return ready


class _OpenRequest:
    """One request: its samples, and what they have in common.

    only: the sample of a request that has one; most have, and their way is kept short. num_open:
    samples that go on.
    """

    __slots__ = (
        "_kind", "_metrics", "_num_cached_tokens", "_params", "_prefix", "_prompt",
        "_prompt_logprobs", "_prompt_token_ids", "_request", "_samples", "_tokenizer",
        "num_open", "only",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        arrival_s: float,
    ) -> None:
        self._request = request
        self._prompt = prompt
        own = request.prompt_token_ids
        self._prompt_token_ids = own.copy() if request.is_open else own  # the request's stay
        self._params = params = request.params
        self._kind = RequestOutputKind.FINAL_ONLY if params.is_ranked else params.output_kind
        self._metrics = RequestMetrics(arrival_s)
        self._num_cached_tokens: int | None = None
        self._prefix: PrefixReport | None = None
        self._tokenizer = tokenizer
        self._prompt_logprobs = _prompt_collector(request.prompt_token_ids, params, tokenizer)
        self._samples = [
            Sample(index, request.prompt_token_ids, params, tokenizer, request.hides_logprobs)
            for index in range(params.num_samples)
        ]
        self.num_open = len(self._samples)
        self.only = self._samples[0] if self.num_open == 1 else None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt_token_ids)

    def append(self, token_ids: list[int], is_last: bool) -> None:
        """Take a piece of the prompt. There is no output before the last one."""
        prompt, hides = self._prompt_token_ids, self._request.hides_logprobs
        prompt += token_ids
        if is_last:  # the text of the output continues that of the whole prompt
            self.only = Sample(0, prompt, self._params, self._tokenizer, hides)
            self._samples = [self.only]

    def take(self, output: SequenceOutput, now_s: float) -> Abort | None:
        """Take in what one step gave one sequence; the abort of one that a stop string ended."""
        if output.beams is not None:
            self._take_beams(output, output.beams, now_s)
            return None
        sample = self.only
        if sample is None:
            sample = self._samples[output.index]
            if sample.finish_reason is not None:  # by a stop string, which the core hears of later
                return None
        if output.prompt_candidates and self._prompt_logprobs is not None:
            self._prompt_logprobs.extend(output.prompt_candidates)
        metrics = self._metrics
        if output.num_preemptions:
            sample.num_preemptions = output.num_preemptions
            metrics.num_preemptions = sum([s.num_preemptions for s in self._samples])
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        self._prefix = output.prefix or self._prefix
        if output.token_ids and metrics.first_token_s is None:
            metrics.first_token_s = now_s
        if output.error is not None:
            reason = "timeout" if output.finish_reason == "timeout" else "error"
            self.finish(reason, output.error, now_s, output.error_code)
            return None
        sample.take(output)
        if sample.finish_reason is None:
            return None
        self.num_open -= 1
        if self.num_open == 0:
            metrics.finished_s = now_s
        if not sample.was_stopped:
            return None
        index = -1 if self.only is not None else sample.index
        return Abort(self._request.request_id, "stop", index)

    def _take_beams(self, output: SequenceOutput, beams: list[BeamOutput], now_s: float) -> None:
        """All results of a beam search, best first: as many samples, each in one piece."""
        self._samples = self._samples[: len(beams)]
        self.only = None
        for sample, beam in zip(self._samples, beams, strict=True):
            sample.take(
                SequenceOutput(
                    output.request_id, beam.token_ids, beam.finish_reason, beam.stop_reason
                )
            )
            sample.cumulative_logprob = beam.cumulative_logprob
        self.num_open = 0
        self._num_cached_tokens, self._prefix = output.num_cached_tokens, output.prefix
        metrics = self._metrics
        metrics.num_preemptions = output.num_preemptions
        metrics.first_token_s = metrics.finished_s = now_s

    def finish(
        self, reason: str, stop_reason: str | None, now_s: float, error_code: str | None = None
    ) -> None:
        """All samples that go on end with what they have.

        After a failure those of best_of all end with it: the best of them would not be the best.
        """
        for sample in self._samples:
            if sample.finish_reason is None or (self._params.is_ranked and reason in FAILED):
                sample.finish(reason, stop_reason, error_code)
        self.num_open = 0
        self._metrics.finished_s = now_s

    def is_due(self) -> bool:
        """Whether the user's kind of output is due."""
        if self.num_open == 0:
            return True
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return False
        if self.only is not None:
            return len(self.only.token_ids) > self.only.num_sent
        return any(sample.has_news for sample in self._samples)

    def output(self) -> RequestOutput:
        """What the user gets now: everything so far, or what is new (DELTA)."""
        delta = self._kind is RequestOutputKind.DELTA
        collector = self._prompt_logprobs
        prompt_logprobs = None if collector is None else collector.logprobs
        if delta:
            self._prompt_logprobs = None  # sent once
        only = self.only
        return RequestOutput(
            self._request.request_id,
            self._prompt,
            self._prompt_token_ids,
            prompt_logprobs,
            self._completions(delta) if only is None else [only.completion(delta)],
            self.num_open == 0,
            self._metrics,
            self._num_cached_tokens,
            self._prefix,
        )

    def _completions(self, delta: bool) -> list[CompletionOutput]:
        if self._params.use_beam_search:
            return [sample.completion(delta=False) for sample in self._samples]
        if self._params.is_ranked:
            return self._best()
        shown = [sample for sample in self._samples if not delta or sample.has_news]
        return [sample.completion(delta) for sample in shown]

    def _best(self) -> list[CompletionOutput]:
        """The n with the highest cumulative log-probability, numbered anew."""
        by_rank = sorted(self._samples, key=lambda s: s.cumulative_logprob or 0.0, reverse=True)
        num_wanted = self._params.n
        self._metrics.num_dropped_tokens = sum([len(s.token_ids) for s in by_rank[num_wanted:]])
        completions = [sample.completion(delta=False) for sample in by_rank[:num_wanted]]
        for index, completion in enumerate(completions):
            completion.index = index
        return completions


def _prompt_collector(
    prompt_token_ids: list[int], params: SamplingParams, tokenizer: Tokenizer | None
) -> PromptLogprobCollector | None:
    if params.prompt_logprobs is None:
        return None
    shows = tokenizer is not None and params.detokenize
    stream = open_stream(tokenizer, skip_special_tokens=False) if tokenizer and shows else None
    return PromptLogprobCollector(prompt_token_ids, params.prompt_logprobs, stream)
