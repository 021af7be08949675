"""The client's side of a request: from the core's step outputs to the user's output.

In: `StepOutputs`, in order. Out: requests with new output, and an `Abort` for each sequence that a
stop string ended. Only this side sees stop strings; later output of such a
sequence is dropped.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from quire.base.errors import RequestError
from quire.base.messages import Abort, Request, Rewind
from quire.base.plan import Float64
from quire.base.prefix import PrefixReport
from quire.base.requests.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.base.requests.validation import RequestLimits
from quire.base.settings.kv_transfer import answer_params
from quire.base.step_outputs import (
    CANCELLED,
    BeamOutput,
    Finish,
    RowName,
    SequenceUpdate,
    StepOutputs,
)
from quire.engine.client.logprobs import PromptLogprobCollector
from quire.engine.client.sample import Sample
from quire.render.tokens.detokenizer import open_stream
from quire.render.tokens.tokenizer import Tokenizer

FAILED = ("error", "timeout")
ABORTED = Finish("abort")
Ending = Abort | Rewind  # message to the core about a sequence that ends here


class StepReader:
    """Tracker of the sequence that holds each row, fed with all outputs of one core in order."""

    def __init__(self) -> None:
        self._names: dict[int, RowName] = {}

    def tokens(self, outputs: StepOutputs) -> list[tuple[RowName, int]]:
        """Return the tokens of sequences without other output, each with its sequence."""
        names = self._names
        for name in outputs.names:
            names[name.row] = name
        rows, token_ids = outputs.rows.tolist(), outputs.token_ids.tolist()
        return [(names[row], token_id) for row, token_id in zip(rows, token_ids, strict=True)]


class OutputProcessor:
    """All requests of one client that are not finished. Not thread-safe."""

    def __init__(self) -> None:
        self._requests: dict[str, OpenRequest] = {}
        self._reader = StepReader()
        self._version = ""  # of the weights; empty until the first update

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
    ) -> "OpenRequest":
        """Begin to follow a request. Without a tokenizer its text stays empty."""
        name = request.request_id
        if name in self._requests:
            raise RequestError(f"request id {name!r} is in use; give each request its own.")
        opened = self._requests[name] = OpenRequest(request, prompt_text, tokenizer, arrival_s)
        if self._version:
            opened.change_weights(self._version)
        return opened

    def change_weights(self, version: str) -> None:
        """Note that other weights make all later tokens."""
        self._version = version
        for request in self._requests.values():
            request.change_weights(version)

    def process(
        self, outputs: StepOutputs, now_s: float
    ) -> "tuple[list[OpenRequest], list[Ending]]":
        """Apply the outputs of a step. Return the requests with new output, and messages to the
        core that end sequences. Outputs of unknown requests are dropped."""
        aborts: list[Ending] = []
        touched: dict[OpenRequest, None] = {}
        for name, token_id in self._reader.tokens(outputs):
            request = self._requests.get(name.request_id)
            if request is not None:
                aborts += request.take_token(name, token_id, now_s)
                touched[request] = None
        for update in outputs.details:
            request = self._requests.get(update.request_id)
            if request is not None:
                aborts += request.take(update, now_s)
                touched[request] = None
        for request in touched:
            if request.num_open == 0:
                del self._requests[request.request_id]
        return [request for request in touched if request.is_due()], aborts

    def append(
        self, request_id: str, token_ids: list[int], is_last: bool, limits: RequestLimits
    ) -> None:
        """Extend an open prompt.

        Raises RequestError if the request has ended, or if the prompt would become too long; it
        then stays unchanged."""
        request = self._requests.get(request_id)
        if request is None:
            raise RequestError(f"no request {request_id!r} is open; it may have ended.")
        limits.check_piece(token_ids, request.num_prompt_tokens)
        request.append(token_ids, is_last)

    def drop(self, request_id: str) -> None:
        """Stop following a request whose output has no reader any more."""
        self._requests.pop(request_id, None)

    def abort(
        self, request_ids: Iterable[str], now_s: float, finish: Finish = ABORTED
    ) -> "list[OpenRequest]":
        """Finish requests on this side, with what they have. The caller notifies the core."""
        known = [name for name in request_ids if name in self._requests]
        ended = [self._requests.pop(name) for name in known]
        for request in ended:
            request.finish(finish, now_s)
        return ended


class OpenRequest:
    """One request: its samples, and the state that they share.

    only: the sample of a request with a single one, which takes the fast path. num_open:
    samples that continue.
    """

    __slots__ = (
        "_kind", "_metrics", "_num_cached_tokens", "_params", "_pooled", "_prefix", "_prompt",
        "_prompt_logprobs", "_prompt_token_ids", "_request", "_samples", "_tokenizer", "_transfer",
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
        self._prompt_token_ids = (
            own.copy() if request.is_open else own
        )  # the request's own list must not change
        self._params = params = request.params
        self._kind = RequestOutputKind.FINAL_ONLY if params.is_ranked else params.output_kind
        self._metrics = RequestMetrics(arrival_s)
        self._num_cached_tokens: int | None = None
        self._prefix: PrefixReport | None = None
        self._pooled: Float64 | None = None
        self._transfer: dict[str, Any] | None = None
        self._tokenizer = tokenizer
        self._prompt_logprobs = _prompt_collector(request.prompt_token_ids, params, tokenizer)
        self._samples = [
            Sample(index, request.prompt_token_ids, params, tokenizer, request.hides_logprobs)
            for index in range(params.num_samples)
        ]
        self.num_open = len(self._samples)
        self.only = self._samples[0] if self.num_open == 1 else None

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt_token_ids)

    def append(self, token_ids: list[int], is_last: bool) -> None:
        """Take a piece of the prompt. There is no output before the last one."""
        prompt, hides = self._prompt_token_ids, self._request.hides_logprobs
        prompt += token_ids
        if is_last:  # the text of the output continues that of the whole prompt
            versions = self._samples[0].versions
            self.only = Sample(0, prompt, self._params, self._tokenizer, hides)
            self.only.values = self._samples[0].values
            self._samples, self.only.versions = [self.only], versions

    def change_weights(self, version: str) -> None:
        """Note that other weights make all later tokens of the open samples."""
        for sample in self._samples:
            if sample.finish is None:
                sample.change_weights(version)

    def take_token(self, name: RowName, token_id: int, now_s: float) -> Sequence[Ending]:
        """Take in the token of a sequence that got nothing else; as `take`."""
        sample = self.only or self._samples[name.index]
        if sample.finish is not None:
            return ()
        if self._num_cached_tokens is None:
            self._num_cached_tokens = name.num_cached_tokens
        self._count(1, now_s)
        sample.take([token_id])
        return () if sample.finish is None else self._end(sample, now_s)

    def take(self, update: SequenceUpdate, now_s: float) -> Sequence[Ending]:
        """Take one step's output of one sequence. Return its abort if a stop string ended it."""
        sample = self.only or self._samples[update.index]
        if update.token_values is not None:
            sample.values.append(update.token_values)
        if sample.finish is not None:  # ended by a stop string; the core has not been notified yet
            return ()
        if update.prompt_candidates and self._prompt_logprobs is not None:
            self._prompt_logprobs.extend(update.prompt_candidates)
        metrics, finish = self._metrics, update.finish
        if update.num_preemptions:
            sample.num_preemptions = update.num_preemptions
            metrics.num_preemptions = sum([s.num_preemptions for s in self._samples])
        if self._num_cached_tokens is None:
            self._num_cached_tokens = update.num_cached_tokens
        self._prefix = update.prefix or self._prefix
        if update.pooled is not None:
            self._pooled = update.pooled
        if update.handed_over is not None:
            self._transfer = answer_params(update.handed_over)
        if update.beams is not None:
            self._take_beams(update.beams, now_s)
            return ()
        if update.token_ids:
            self._count(0 if update.pooled is not None else len(update.token_ids), now_s)
        if finish is not None and (finish.error is not None or finish == CANCELLED):
            self.finish(finish, now_s)
            return ()
        if update.num_draft_tokens:
            metrics.num_draft_tokens += update.num_draft_tokens
            metrics.num_accepted_draft_tokens += max(0, len(update.token_ids) - 1)
        sample.take(update.token_ids, finish, update.candidates)
        return () if sample.finish is None else self._end(sample, now_s)

    def _count(self, num_tokens: int, now_s: float) -> None:
        """Count tokens that have come."""
        metrics = self._metrics
        metrics.num_generation_tokens += num_tokens
        metrics.last_token_s = now_s
        if metrics.first_token_s is None:
            metrics.first_token_s = now_s

    def _end(self, sample: Sample, now_s: float) -> Sequence[Ending]:
        """Count a sample that has ended. Return its abort if the core still computes it."""
        self.num_open -= 1
        if self.num_open == 0:
            self._metrics.finished_s = now_s
        if not sample.was_stopped:
            return ()
        index = -1 if self.only is not None else sample.index
        reason = "stop" if sample.finish is None else sample.finish.reason
        abort = Abort(self.request_id, reason, index)
        if not self._request.keep_s:
            return (abort,)
        # A retained sequence ends where its text does; the core may be further.
        num_tokens = self.num_prompt_tokens + len(sample.token_ids)
        return abort, Rewind(self.request_id, sample.index, num_tokens)

    def _take_beams(self, beams: list[BeamOutput], now_s: float) -> None:
        """Take in all results of a beam search, best first: as many samples, each in one piece."""
        self._samples = self._samples[: len(beams)]
        self.only = None
        for sample, beam in zip(self._samples, beams, strict=True):
            sample.take(beam.token_ids, beam.finish)
            sample.cumulative_logprob = beam.cumulative_logprob
        self.num_open = 0
        self._count(sum([len(beam.token_ids) for beam in beams]), now_s)
        self._metrics.finished_s = now_s

    def finish(self, finish: Finish, now_s: float) -> None:
        """End all open samples with their output so far.

        After a failure all samples of best_of end with it, since the best of the others need not
        be the best of all.
        """
        for sample in self._samples:
            if sample.finish is None or (self._params.is_ranked and finish.reason in FAILED):
                sample.end(finish)
        self.num_open = 0
        self._metrics.finished_s = now_s

    def is_due(self) -> bool:
        """Return whether the user's kind of output is due."""
        if self.num_open == 0:
            return True
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return False
        if self.only is not None:
            return self.only.is_due
        return any(sample.is_due for sample in self._samples)

    def output(self) -> RequestOutput:
        """Make what the user gets now: everything so far, or what is new since the last (DELTA)."""
        delta = self._kind is RequestOutputKind.DELTA
        collector = self._prompt_logprobs
        prompt_logprobs = None if collector is None else collector.logprobs
        if delta:
            self._prompt_logprobs = None  # sent once
        only = self.only
        return RequestOutput(
            self.request_id,
            self._prompt,
            self._prompt_token_ids,
            prompt_logprobs,
            self._completions(delta) if only is None else [self._completion(only, delta)],
            self.num_open == 0,
            self._metrics,
            self._num_cached_tokens,
            self._prefix,
            self._pooled,
            self._transfer,
        )

    def _completions(self, delta: bool) -> list[CompletionOutput]:
        if self._params.use_beam_search:
            return [sample.completion(delta=False) for sample in self._samples]
        if self._params.is_ranked:
            return self._best()
        shown = [sample for sample in self._samples if not delta or sample.is_due]
        return [self._completion(sample, delta) for sample in shown]

    def _completion(self, sample: Sample, delta: bool) -> CompletionOutput:
        """Return a sample's output, with the values of its tokens once it has ended."""
        found, leader = sample.completion(delta), self._samples[0]
        if leader.values and sample.finish is not None:
            found.routed_experts = sample.values_of_all(leader, self.num_prompt_tokens)
        return found

    def _best(self) -> list[CompletionOutput]:
        """Return the n with the highest cumulative log-probability, numbered from 0 again."""
        by_rank = sorted(self._samples, key=lambda s: s.cumulative_logprob or 0.0, reverse=True)
        num_shown = self._params.n
        self._metrics.num_dropped_tokens = sum([len(s.token_ids) for s in by_rank[num_shown:]])
        completions = [self._completion(sample, delta=False) for sample in by_rank[:num_shown]]
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
    if params.prompt_logprob_token_ids is None:
        return PromptLogprobCollector(prompt_token_ids, params.prompt_logprobs, stream)
    start = params.prompt_logprob_start or 0
    return PromptLogprobCollector(prompt_token_ids, -1, stream, named_from=start)
