"""What requests to a model that pools may ask for, and what becomes of its numbers."""

from dataclasses import dataclass

import numpy as np

from quire.base.errors import WRONG_RUNNER, RequestError
from quire.base.plan import Float64
from quire.base.requests.pooling import CLASSIFY, EMBED, NONE, SOFTMAX, PoolingSpec

TASK_NAMES = {EMBED: "embeddings", CLASSIFY: "classes"}


@dataclass(frozen=True)
class PoolingParams:
    """vLLM's parameters of pooling.

    dimensions: numbers of an embedding, the first ones; None is all. use_activation: False leaves
    embeddings as long as they are, and gives classes' numbers before softmax or sigmoid; None is as
    the model says. truncate_prompt_tokens: tokens that are kept of a longer prompt, special tokens
    counted; -1 is as many as the model takes, None cuts nothing. truncation_side: where tokens are
    left out.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "right"

    def __post_init__(self) -> None:
        if (side := self.truncation_side) not in ("left", "right"):
            message = f"truncation_side must be left or right, got {side!r}."
            raise RequestError(message, "truncation_side")


def needed_task(pooling: PoolingSpec | None, *tasks: str) -> PoolingSpec:
    """Return how a model pools. Raises RequestError for one that does nothing of this."""
    wanted = " or ".join(TASK_NAMES[task] for task in tasks)
    if pooling is None:
        raise RequestError(
            f"this engine generates text and does not return {wanted}. Start one with a model that"
            " pools, or with runner='pooling' (--runner pooling).",
            code=WRONG_RUNNER,
        )
    if pooling.task not in tasks:
        raise RequestError(
            f"this model gives {TASK_NAMES[pooling.task]}, not {wanted}; use another model, or"
            f" start this one with convert={tasks[0]!r} (--convert {tasks[0]}).",
            code=WRONG_RUNNER,
        )
    return pooling


def embedding(pooled_K: Float64, pooling: PoolingSpec, params: PoolingParams) -> Float64:
    """Make an embedding of what a prompt came to. Raises RequestError for dimensions that cannot
    be."""
    num, width = params.dimensions, len(pooled_K)
    if num is not None:
        known = pooling.dimensions
        if not 1 <= num <= width or (known is not None and num != width and num not in known):
            allowed = f"from 1 to {width}" if known is None else f"one of {[*known, width]}"
            message = f"dimensions must be {allowed} for this model, got {num}."
            raise RequestError(message, "dimensions")
        pooled_K = pooled_K[:num]
    is_active = params.use_activation
    return unit(pooled_K) if (pooling.normalize if is_active is None else is_active) else pooled_K


def probabilities(pooled_K: Float64, pooling: PoolingSpec, params: PoolingParams) -> Float64:
    """Make probabilities of classes, or whatever the model's activation gives."""
    if params.use_activation is False or pooling.activation == NONE:
        return pooled_K
    if pooling.activation == SOFTMAX:
        weights_K: Float64 = np.exp(pooled_K - pooled_K.max())
        shares_K: Float64 = weights_K / weights_K.sum()
        return shares_K
    small_K: Float64 = np.exp(-np.abs(pooled_K))
    return np.where(pooled_K >= 0, 1 / (1 + small_K), small_K / (1 + small_K))


def cosine(first_K: Float64, second_K: Float64) -> float:
    """Return the cosine of the angle between two embeddings."""
    return float(unit(first_K) @ unit(second_K))


def unit(vector_K: Float64) -> Float64:
    """Return a vector of length 1 in the same direction; nothing stays nothing."""
    found: Float64 = vector_K / max(float(np.sqrt((vector_K * vector_K).sum())), 1e-12)
    return found
