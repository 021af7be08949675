"""quire: an LLM inference engine on paged KV memory.

    from quire import LLM, SamplingParams

Names are imported when they are first used, so that `import quire` costs next to nothing.
"""

from typing import TYPE_CHECKING, Any

from quire.base.version import QUIRE_VERSION

if TYPE_CHECKING:
    from quire.base.errors import QuireError as QuireError
    from quire.base.outputs import CompletionOutput as CompletionOutput
    from quire.base.outputs import Logprob as Logprob
    from quire.base.outputs import RequestOutput as RequestOutput
    from quire.base.pooling_params import PoolingParams as PoolingParams
    from quire.base.repetition import RepetitionDetectionParams as RepetitionDetectionParams
    from quire.base.sampling_params import RequestOutputKind as RequestOutputKind
    from quire.base.sampling_params import SamplingParams as SamplingParams
    from quire.base.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from quire.serve.async_llm import AsyncEngineArgs as AsyncEngineArgs
    from quire.serve.async_llm import AsyncLLM as AsyncLLM
    from quire.serve.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from quire.serve.beam_search import BeamSearchParams as BeamSearchParams
    from quire.serve.llm import LLM as LLM

_HOMES = {
    "LLM": "quire.serve.llm",
    "AsyncLLM": "quire.serve.async_llm",
    "AsyncLLMEngine": "quire.serve.async_llm",
    "AsyncEngineArgs": "quire.serve.async_llm",
    "SamplingParams": "quire.base.sampling_params",
    "StructuredOutputsParams": "quire.base.structured_outputs",
    "RepetitionDetectionParams": "quire.base.repetition",
    "BeamSearchParams": "quire.serve.beam_search",
    "PoolingParams": "quire.base.pooling_params",
    "RequestOutputKind": "quire.base.sampling_params",
    "RequestOutput": "quire.base.outputs",
    "CompletionOutput": "quire.base.outputs",
    "Logprob": "quire.base.outputs",
    "QuireError": "quire.base.errors",
}

__all__ = [*_HOMES]
__version__ = QUIRE_VERSION


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
