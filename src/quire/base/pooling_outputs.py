"""What `embed`, `classify`, `score` and `encode` return: vLLM's output classes, by their names and
fields. Numbers are numpy's in the place of torch's."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from quire.base.plan import Float64

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
