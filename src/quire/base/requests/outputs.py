"""Outputs of `generate`, `chat`, `embed`, `classify`, `score` and `encode`.

The classes have the names and fields of vLLM's output classes. Numbers are numpy arrays.
"""

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from quire.base.plan import Float64
from quire.base.prefix import PrefixReport
from quire.base.step_outputs import Failure


@dataclass(slots=True)
class Logprob:
    """Log-probability of one candidate. rank is 1 for the most probable token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One dictionary per position; the first position of a prompt has none.
PromptLogprobs = list[dict[int, Logprob] | None]
SampleLogprobs = list[dict[int, Logprob]]


@dataclass(slots=True)
class CompletionOutput:
    """One continuation.

    finish_reason: stop, length, repetition, abort, error, timeout or pinned; None: it goes on.
    index: its place among the n of its request.
    stop_reason: the stop string or stop token id that ended it; None for end of sequence. error:
    after an error, and when the time was up, what happened, and for programs its code: step_failed
    (the engine's fault), request_failed, grammar_failed or timed_out.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Failure | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request on the engine's clock, in seconds; None until they happened.

    num_generation_tokens: output tokens of all its continuations; num_dropped_tokens: of those that
    best_of made and did not return.
    num_draft_tokens: guesses at output tokens that were tried (`speculative_config`), by all of its
    continuations; num_accepted_draft_tokens: those that were right.
    """

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_dropped_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    last_token_s: float | None = None
    num_generation_tokens: int = 0

    # The same by vLLM's names.

    @property
    def arrival_time(self) -> float:
        return self.arrival_s

    @property
    def first_token_ts(self) -> float | None:
        return self.first_token_s

    @property
    def last_token_ts(self) -> float | None:
        return self.last_token_s

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from the request to its first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclass(slots=True)
class RequestOutput:
    """The state of a request: its prompt and its continuations.

    prefix: where the cached tokens of the prompt were, and why there were no more. pooled: what the
    prompt came to, of a model that pools, before the last activation. kv_transfer_params: of a
    prompt that was computed for another engine, what its request is to bring.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    prefix: PrefixReport | None = None
    pooled: Float64 | None = None
    kv_transfer_params: dict[str, Any] | None = None


T = TypeVar("T")


@dataclass(slots=True)
class PoolingOutput:
    """data: what a prompt came to, float64 [K]."""

    data: Float64


@dataclass(slots=True)
class EmbeddingOutput:
    """embedding: its numbers."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """probs: of each class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """score: how well two texts go together."""

    score: float


@dataclass(slots=True)
class PooledRequestOutput(Generic[T]):
    """One prompt, or pair, and what it came to. num_cached_tokens: of the prompt, that were not
    computed again."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class PoolingRequestOutput(PooledRequestOutput[PoolingOutput]):
    """Of `encode`."""


class EmbeddingRequestOutput(PooledRequestOutput[EmbeddingOutput]):
    """Of `embed`."""


class ClassificationRequestOutput(PooledRequestOutput[ClassificationOutput]):
    """Of `classify`."""


class ScoringRequestOutput(PooledRequestOutput[ScoringOutput]):
    """Of `score`."""
