"""Outputs of `generate`, `chat`, `embed`, `classify`, `score` and `encode`.

The classes have the names and fields of vLLM's output classes. Numbers are numpy arrays.
"""

from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from quire.base.plan import Float64, Int16
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


class WeightsSpan(NamedTuple):
    """Tokens of a continuation made by the same weights, up to the next span."""

    first_token: int  # index in the continuation
    version: str


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int  # number among the request's n continuations
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    # stop, length, repetition, abort, error, timeout or pinned; None while it continues
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # stop string or stop token id; None for an end token
    error: Failure | None = None  # set for the reasons error and timeout
    # weights of the tokens, if they were replaced before the end (`update_weights`)
    weights_versions: tuple[WeightsSpan, ...] = ()
    # Experts of each token but the last, int16 [tokens, mixtures, experts per token], in order of
    # falling logits; -1 for tokens that another request computed. `enable_return_routed_experts`
    routed_experts: Int16 | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request on the engine's clock in seconds, None until they occur, and counts."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_dropped_tokens: int = 0  # output tokens of continuations that best_of did not return
    num_draft_tokens: int = 0  # verified draft tokens of all continuations (`speculative_config`)
    num_accepted_draft_tokens: int = 0
    last_token_s: float | None = None
    num_generation_tokens: int = 0  # output tokens of all continuations

    # vLLM's names for these times.

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
    """The state of a request: its prompt and its continuations."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    prefix: PrefixReport | None = None  # cached tokens of the prompt, and the reason for the miss
    pooled: Float64 | None = None  # pooled output before the last activation, of a pooling model
    # parameters for a request to another engine that continues this computed prompt
    kv_transfer_params: dict[str, Any] | None = None


T = TypeVar("T")


@dataclass(slots=True)
class PoolingOutput:
    """The raw pooled output of a prompt."""

    data: Float64  # [K]


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probability of each class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """The similarity or relevance of a pair of texts."""

    score: float


@dataclass(slots=True)
class PooledRequestOutput(Generic[T]):
    """The result for one prompt or pair of texts."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0  # prompt tokens that were not computed again
    finished: bool = True


class PoolingRequestOutput(PooledRequestOutput[PoolingOutput]):
    """A result of `encode`."""


class EmbeddingRequestOutput(PooledRequestOutput[EmbeddingOutput]):
    """A result of `embed`."""


class ClassificationRequestOutput(PooledRequestOutput[ClassificationOutput]):
    """A result of `classify`."""


class ScoringRequestOutput(PooledRequestOutput[ScoringOutput]):
    """A result of `score`."""
