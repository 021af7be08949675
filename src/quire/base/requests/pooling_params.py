"""Parameters of requests to a pooling model, and the last steps of its results."""

from dataclasses import dataclass

import numpy as np

from quire.base.errors import WRONG_RUNNER, RequestError
from quire.base.plan import Float64
from quire.base.requests.pooling import CLASSIFY, EMBED, NONE, SOFTMAX, PoolingSpec

TASK_NAMES = {EMBED: "embeddings", CLASSIFY: "classes"}


@dataclass(frozen=True)
class PoolingParams:
    """vLLM's pooling parameters."""

    dimensions: int | None = None  # leading elements of an embedding to keep; None for all
    use_activation: bool | None = None  # whether to normalize or activate; None for the default
    truncate_prompt_tokens: int | None = None  # limit with special tokens; -1 the model's, None off
    truncation_side: str = "right"  # end of the prompt at which tokens are dropped

    def __post_init__(self) -> None:
        if (side := self.truncation_side) not in ("left", "right"):
            message = f"truncation_side must be left or right, got {side!r}."
            raise RequestError(message, "truncation_side")


def needed_task(pooling: PoolingSpec | None, *tasks: str) -> PoolingSpec:
    """Return a model's pooling. Raises RequestError if it supports none of the tasks."""
    names = " or ".join(TASK_NAMES[task] for task in tasks)
    if pooling is None:
        raise RequestError(
            f"this engine generates text and does not return {names}. Start one with a model that"
            " pools, or with runner='pooling' (--runner pooling).",
            code=WRONG_RUNNER,
        )
    if pooling.task not in tasks:
        raise RequestError(
            f"this model gives {TASK_NAMES[pooling.task]}, not {names}; use another model, or"
            f" start this one with convert={tasks[0]!r} (--convert {tasks[0]}).",
            code=WRONG_RUNNER,
        )
    return pooling


def embedding(pooled_K: Float64, pooling: PoolingSpec, params: PoolingParams) -> Float64:
    """Return the embedding for a pooled output, [K] or fewer. Raises RequestError for invalid
    dimensions."""
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
    """Return the classes' probabilities, [K], or their scores if there is no activation."""
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
    """Return the vector scaled to length 1; a zero vector stays zero."""
    found: Float64 = vector_K / max(float(np.sqrt((vector_K * vector_K).sum())), 1e-12)
    return found
