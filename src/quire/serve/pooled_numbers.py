"""What `LLM` and the endpoints of models that pool share: from outputs to numbers, and pairs."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.base.errors import RequestError
from quire.base.outputs import RequestOutput
from quire.base.plan import Float64
from quire.base.pooling import EMBED, PoolingSpec, plain_id
from quire.base.pooling_params import PoolingParams, embedding, probabilities
from quire.base.step_outputs import Failure


def numbers_of(output: RequestOutput, spec: PoolingSpec, params: PoolingParams) -> Float64:
    """Return an embedding or probabilities. Raises RequestError for a request that failed."""
    if output.pooled is None:
        raise RequestError(f"the prompt was not pooled: {_why(output)}")
    if spec.task == EMBED:
        return embedding(output.pooled, spec, params)
    return probabilities(output.pooled, spec, params)


def paired(first: Sequence[Any], second: Sequence[Any], names: tuple[str, str]) -> list[Any]:
    """Pair texts: one with each, or as many with as many. Raises RequestError."""
    if not first or not second or len(first) not in (1, len(second)):
        raise RequestError(
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}; give one text for"
            f" all {names[1]}, or as many.",
            names[0],
        )
    return list(zip(list(first) * (len(second) // len(first)), second, strict=True))


def check_scorer(spec: PoolingSpec) -> None:
    """Raise RequestError for a model of classes that is no cross-encoder."""
    if not spec.is_scorer:
        raise RequestError(
            f"this model has {len(spec.labels)} classes; scores are for embeddings, and for"
            " models with one class (num_labels=1)."
        )


def _why(output: RequestOutput) -> str:
    [only] = output.outputs
    error: Failure | None = only.error
    return error.message if error is not None else str(only.finish_reason)


def salt_of(prompt: object) -> str:
    """Return the cache_salt of a prompt of a program's."""
    return prompt.get("cache_salt") or "" if isinstance(prompt, Mapping) else ""


def parts_of(output: RequestOutput, made: Any) -> tuple[str, Any, list[int], int]:
    """Return what makes an output of a pooled prompt, which came to `made`."""
    ids, cached = output.prompt_token_ids or [], output.num_cached_tokens or 0
    return output.request_id, made, list(map(plain_id, ids)), cached
