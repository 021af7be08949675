"""`LLM.embed`, `classify`, `encode` and `score`: vLLM's offline interface of pooling models. The
HTTP endpoints of pooling models share the conversion of outputs and the pairing of texts."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.base.errors import RequestError
from quire.base.messages import Request
from quire.base.plan import Float64
from quire.base.requests.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.base.requests.pooling import CLASSIFY, EMBED, PoolingSpec, plain_id
from quire.base.requests.pooling_params import (
    PoolingParams,
    cosine,
    embedding,
    needed_task,
    probabilities,
)
from quire.base.step_outputs import Failure
from quire.engine.client.admission import admit
from quire.render.pooling_prompts import to_pool
from quire.render.renderer import Prompt, RenderedPrompt

if TYPE_CHECKING:  # the server's API processes use this module, and need no engine
    from quire.engine.start.build import Engine
    from quire.serve.processes.core_processes import ProcessEngine


def numbers_of(output: RequestOutput, spec: PoolingSpec, params: PoolingParams) -> Float64:
    """Return the embedding or the probabilities, [K]. Raises RequestError for a failed request."""
    if output.pooled is None:
        raise RequestError(f"the prompt was not pooled: {_why(output)}")
    if spec.task == EMBED:
        return embedding(output.pooled, spec, params)
    return probabilities(output.pooled, spec, params)


def paired(first: Sequence[Any], second: Sequence[Any], names: tuple[str, str]) -> list[Any]:
    """Return pairs of texts: one text with each, or the texts pair by pair. Raises RequestError."""
    if not first or not second or len(first) not in (1, len(second)):
        raise RequestError(
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}; give one text for"
            f" all {names[1]}, or as many.",
            names[0],
        )
    return list(zip(list(first) * (len(second) // len(first)), second, strict=True))


def check_scorer(spec: PoolingSpec) -> None:
    """Raise RequestError for a classification model that is not a cross-encoder."""
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
    """Return the cache_salt of a program's prompt."""
    return prompt.get("cache_salt") or "" if isinstance(prompt, Mapping) else ""


def parts_of(output: RequestOutput, made: Any) -> tuple[str, Any, list[int], int]:
    """Return the arguments of a pooled prompt's output. made: the pooled result."""
    ids, cached = output.prompt_token_ids or [], output.num_cached_tokens or 0
    return output.request_id, made, list(map(plain_id, ids)), cached


Finish = Callable[[list[Request], list[RenderedPrompt]], list[RequestOutput]]


class Pooling:
    """Pooling requests of an engine. finish: runs checked requests."""

    def __init__(self, engine: "Engine | ProcessEngine", finish: Finish) -> None:
        self._engine, self._finish = engine, finish

    def embed(
        self, prompts: Sequence[Prompt], params: PoolingParams
    ) -> list[EmbeddingRequestOutput]:
        """See LLM.embed."""
        spec = needed_task(self._engine.spec.pooling, EMBED)
        return [
            EmbeddingRequestOutput(*parts_of(each, EmbeddingOutput(value.tolist())))
            for each, value in self._pooled([[prompt] for prompt in prompts], spec, params)
        ]

    def classify(
        self, prompts: Sequence[Prompt], params: PoolingParams
    ) -> list[ClassificationRequestOutput]:
        """See LLM.classify."""
        spec = needed_task(self._engine.spec.pooling, CLASSIFY)
        return [
            ClassificationRequestOutput(*parts_of(each, ClassificationOutput(value.tolist())))
            for each, value in self._pooled([[prompt] for prompt in prompts], spec, params)
        ]

    def encode(
        self, prompts: Sequence[Prompt], params: PoolingParams, task: str | None
    ) -> list[PoolingRequestOutput]:
        """See LLM.encode."""
        if task not in (None, EMBED, CLASSIFY):
            raise RequestError(
                f"pooling_task must be embed or classify, got {task!r}: quire pools a prompt as a"
                " whole, not its tokens.",
                "pooling_task",
            )
        spec = needed_task(self._engine.spec.pooling, *([task] if task else [EMBED, CLASSIFY]))
        return [
            PoolingRequestOutput(*parts_of(each, PoolingOutput(value)))
            for each, value in self._pooled([[prompt] for prompt in prompts], spec, params)
        ]

    def score(
        self, first: Sequence[Prompt], second: Sequence[Prompt], params: PoolingParams
    ) -> list[ScoringRequestOutput]:
        """See LLM.score."""
        spec = needed_task(self._engine.spec.pooling, EMBED, CLASSIFY)
        pairs = paired(first, second, ("data_1", "data_2"))
        if spec.task == CLASSIFY:
            check_scorer(spec)
            return [
                ScoringRequestOutput(*parts_of(each, ScoringOutput(float(value[0]))))
                for each, value in self._pooled([list(pair) for pair in pairs], spec, params)
            ]
        found = self._pooled([[each] for each in (*first, *second)], spec, params)
        ones, twos = found[: len(first)], found[len(first) :]
        outputs = []
        for (a, value), (b, other) in zip(ones * (len(pairs) // len(ones)), twos, strict=True):
            made = ScoringRequestOutput(*parts_of(b, ScoringOutput(cosine(value, other))))
            made.request_id = f"{a.request_id}_{b.request_id}"
            made.prompt_token_ids = (a.prompt_token_ids or []) + made.prompt_token_ids
            made.num_cached_tokens += a.num_cached_tokens or 0
            outputs.append(made)
        return outputs

    def _pooled(
        self, inputs: list[list[Prompt]], spec: PoolingSpec, params: PoolingParams
    ) -> list[tuple[RequestOutput, Float64]]:
        """Run prompts, or pairs of texts; return each output with its numbers, [K]."""
        engine = self._engine
        longest = engine.client.max_model_len
        rendered = [to_pool(engine.renderer, each, params, longest) for each in inputs]
        make, has_text_pairs = engine.requests.make_pooling, spec.has_text_pairs
        requests = [
            admit(
                engine.client,
                make(prompt, cache_salt=salt_of(each[0]), has_text_pairs=has_text_pairs),
            )
            for prompt, each in zip(rendered, inputs, strict=True)
        ]
        outputs = self._finish(requests, rendered)
        return [(each, numbers_of(each, spec, params)) for each in outputs]
