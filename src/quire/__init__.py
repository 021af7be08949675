"""quire: an LLM inference engine on paged KV memory.

    from quire import LLM, SamplingParams

Names are imported when they are first used, so that `import quire` costs next to nothing.
"""

import sys
from typing import TYPE_CHECKING, Any

from quire.base.version import QUIRE_VERSION

if TYPE_CHECKING:
    from quire.base.errors import QuireError as QuireError
    from quire.base.requests.lora_request import LoRARequest as LoRARequest
    from quire.base.requests.outputs import CompletionOutput as CompletionOutput
    from quire.base.requests.outputs import Logprob as Logprob
    from quire.base.requests.outputs import RequestOutput as RequestOutput
    from quire.base.requests.pooling_params import PoolingParams as PoolingParams
    from quire.base.requests.repetition import (
        RepetitionDetectionParams as RepetitionDetectionParams,
    )
    from quire.base.requests.sampling_params import RequestOutputKind as RequestOutputKind
    from quire.base.requests.sampling_params import SamplingParams as SamplingParams
    from quire.base.requests.structured_outputs import (
        StructuredOutputsParams as StructuredOutputsParams,
    )
    from quire.models.load.patches import SparseDelta as SparseDelta
    from quire.serve.python.async_llm import AsyncEngineArgs as AsyncEngineArgs
    from quire.serve.python.async_llm import AsyncLLM as AsyncLLM
    from quire.serve.python.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from quire.serve.python.beam_search import BeamSearchParams as BeamSearchParams
    from quire.serve.python.llm import LLM as LLM

_HOMES = {
    "LLM": "quire.serve.python.llm",
    "AsyncLLM": "quire.serve.python.async_llm",
    "AsyncLLMEngine": "quire.serve.python.async_llm",
    "AsyncEngineArgs": "quire.serve.python.async_llm",
    "SamplingParams": "quire.base.requests.sampling_params",
    "StructuredOutputsParams": "quire.base.requests.structured_outputs",
    "RepetitionDetectionParams": "quire.base.requests.repetition",
    "BeamSearchParams": "quire.serve.python.beam_search",
    "PoolingParams": "quire.base.requests.pooling_params",
    "LoRARequest": "quire.base.requests.lora_request",
    "RequestOutputKind": "quire.base.requests.sampling_params",
    "RequestOutput": "quire.base.requests.outputs",
    "CompletionOutput": "quire.base.requests.outputs",
    "Logprob": "quire.base.requests.outputs",
    "SparseDelta": "quire.models.load.patches",
    "QuireError": "quire.base.errors",
}

__all__ = [*_HOMES]
__version__ = QUIRE_VERSION


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    home = sys.modules.get(_HOMES[name])
    if home is not None and name in vars(home):  # not while it is being imported
        return vars(home)[name]
    import gc
    from importlib import import_module

    is_collecting = gc.isenabled()
    gc.disable()  # an import leaves little garbage, and each collection visits what it has made
    try:
        return getattr(import_module(_HOMES[name]), name)
    finally:
        if is_collecting:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation, which is visited least
            gc.enable()
