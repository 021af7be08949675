"""One continuation of a prompt: the tokens of one sequence, to the text and the logprobs to show.

The token that ended a sequence is among its token ids, but not in its text.
"""

import numpy as np

from quire.base.plan import Candidates, Int16, TokenValues
from quire.base.requests.outputs import CompletionOutput, Logprob, WeightsSpan
from quire.base.requests.repetition import RepetitionDetectionParams
from quire.base.requests.sampling_params import SamplingParams
from quire.base.step_outputs import Finish
from quire.engine.client.logprobs import logprobs_of
from quire.engine.client.token_values import joined
from quire.render.tokens.detokenizer import IncrementalDetokenizer
from quire.render.tokens.tokenizer import Tokenizer

REPEATED = "repetition_detected"  # the stop_reason of such an end


class Sample:
    """Its output so far, and how much of it the user has seen.

    num_sent: tokens that the user has. finish: None while it continues. was_stopped: a stop
    string or a repetition ended it, which the core does not know.
    """

    __slots__ = (
        "_all_values", "_detokenizer", "_interval", "_is_end_sent", "_logprobs", "_params", "_text",
        "_watch", "cumulative_logprob", "finish", "index", "num_preemptions", "num_sent",
        "token_ids", "values", "versions", "was_stopped",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        hides_logprobs: bool = False,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.num_sent = 0
        self.num_preemptions = 0
        self.finish: Finish | None = None
        self.was_stopped = False
        self.versions: tuple[WeightsSpan, ...] = ()
        self.values: list[TokenValues] = []  # of computed tokens, in the order of steps
        self._all_values: Int16 | None = None
        self.cumulative_logprob: float | None = None
        self._params = params
        self._interval = params.stream_interval or 1
        watch = params.repetition_detection
        self._watch = None if watch is None or not watch.is_on else RepetitionWatch(watch)
        self._is_end_sent = False
        self._text: list[str] = []  # in pieces; sent pieces are joined or dropped
        self._logprobs: list[dict[int, Logprob]] | None = None
        if params.logprobs is not None:
            self.cumulative_logprob = 0.0
            self._logprobs = None if hides_logprobs else []
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(tokenizer, params, prompt_token_ids)

    @property
    def is_due(self) -> bool:
        """Whether the user is to see now what there is: at first at once, then in pieces of
        `stream_interval` tokens."""
        num_unsent = len(self.token_ids) - self.num_sent
        if self.finish is not None:
            return num_unsent > 0 or not self._is_end_sent
        return num_unsent >= (self._interval if self.num_sent else 1)

    def take(
        self,
        token_ids: list[int],
        finish: Finish | None = None,
        candidates: list[Candidates] | None = None,
    ) -> None:
        """Take in one step's tokens, one by one: a stop string, or a repetition, may end the text
        at any of them."""
        detokenizer, hidden = self._detokenizer, -1
        is_stop = finish is not None and finish.reason == "stop"
        if is_stop and not self._params.include_stop_str_in_output:
            hidden = len(token_ids) - 1
        for place, token_id in enumerate(token_ids):
            if candidates is not None:
                self._take_candidates(candidates[place])
            self.token_ids.append(token_id)
            if detokenizer is not None:
                text = detokenizer.push(token_id, place == hidden)
                if text:
                    self._text.append(text)
                if detokenizer.stop_string is not None:
                    self.was_stopped = finish is None
                    self.end(Finish("stop", detokenizer.stop_string))
                    return
            is_end = finish is not None and place == len(token_ids) - 1
            if self._watch is not None and self._repeats(token_id) and not is_end:
                self.was_stopped = finish is None
                self.end(Finish("repetition", REPEATED))
                return
        if finish is not None:
            self.end(finish)

    def change_weights(self, version: str) -> None:
        """Note that other weights make the tokens after those so far."""
        span, before = WeightsSpan(len(self.token_ids), version), self.versions
        if before and before[-1].first_token == span.first_token:
            before = before[:-1]
        self.versions = (*before, span)

    def values_of_all(self, leader: "Sample", num_prompt_tokens: int) -> Int16 | None:
        """Return the values of all tokens but the last, which no step has computed, of a sample
        that has ended. All calls return the same array. leader: the sample that computed the prompt
        for all samples of its request."""
        if self._all_values is None:
            num_tokens = num_prompt_tokens + len(self.token_ids) - 1
            shared = [each for each in leader.values if each.first < num_prompt_tokens]
            self._all_values = joined([*shared, *self.values], num_tokens)
        return self._all_values

    def _repeats(self, token_id: int) -> bool:
        """Return whether the text ends with a repetition and is long enough to end."""
        assert self._watch is not None
        return self._watch.push(token_id) and len(self.token_ids) >= self._params.min_tokens

    def end(self, finish: Finish) -> None:
        """End it with what it has."""
        if self._detokenizer is not None and self.finish is None:
            self._text.append(self._detokenizer.flush())
        self.finish = finish

    def completion(self, delta: bool) -> CompletionOutput:
        """Return what the user gets now: everything so far, or what is new."""
        start = self.num_sent if delta else 0
        self.num_sent = len(self.token_ids)
        finish = self.finish
        self._is_end_sent = finish is not None
        text = "".join(self._text)
        self._text = [] if delta else [text]
        return CompletionOutput(
            self.index,
            text,
            self.token_ids[start:],
            self.cumulative_logprob,
            None if self._logprobs is None else self._logprobs[start:],
            None if finish is None else finish.reason,
            None if finish is None else finish.stop_reason,
            None if finish is None else finish.error,
            self.versions,
        )

    def _take_candidates(self, candidates: Candidates) -> None:
        if self.cumulative_logprob is None:
            return  # not requested
        if self._logprobs is not None:
            stream = None if self._detokenizer is None else self._detokenizer.stream
            named, num_top = self._params.logprob_token_ids, self._params.logprobs or 0
            num = num_top if named is None else len(named)
            self._logprobs.append(logprobs_of(candidates, num, stream, named is None))
        self.cumulative_logprob += float(candidates.logprobs[0])


class RepetitionWatch:
    """Watches one sequence of tokens for `RepetitionDetectionParams`.

    For each length L of a pattern it counts for how many tokens in a row each was the one L places
    before it. The end of the text is a pattern of L tokens, c times, where that is (c - 1) * L.
    """

    __slots__ = ("_needed", "_recent", "_runs")

    def __init__(self, params: RepetitionDetectionParams) -> None:
        sizes = np.arange(1, params.max_pattern_size + 1, dtype=np.int64)
        self._needed = sizes * (params.min_count - 1)
        self._needed[: params.effective_min_size - 1] = np.iinfo(np.int64).max
        self._recent = np.full(params.max_pattern_size, -1, np.int64)  # the last token comes first
        self._runs = np.zeros(params.max_pattern_size, np.int64)

    def push(self, token_id: int) -> bool:
        """Take the next token, and return whether the text ends with a repeated pattern."""
        self._runs = np.where(self._recent == token_id, self._runs + 1, 0)
        self._recent[1:] = self._recent[:-1]
        self._recent[0] = token_id
        return bool((self._runs >= self._needed).any())
