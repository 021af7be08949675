"""The table of vLLM's modules: for each one the names that it offers, and where quire has them.

A home is `module` for the same name, or `module:name`. Data only, so that a name costs its own
import and no other.
"""

from collections.abc import Mapping
from types import MappingProxyType

VLLM = "vllm"
VERSION = "0.33.0"  # the version of vLLM whose names these are

_OWN = "quire.vllm."
_OUTPUTS = "quire.base.requests.outputs"
_REPETITION = "quire.base.requests.repetition"


def _from(home: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, home)


_ENGINE_ARGS = _from(_OWN + "arguments", "EngineArgs", "AsyncEngineArgs")
_PARSER = _from(_OWN + "arguments", "FlexibleArgumentParser")
_SAMPLING = {
    **_from(_OWN + "params", "SamplingParams", "BeamSearchParams", "GuidedDecodingParams"),
    "StructuredOutputsParams": "quire.base.requests.structured_outputs",
    "RequestOutputKind": "quire.base.requests.sampling_params",
    "RepetitionDetectionParams": _REPETITION,
}
_REQUEST_OUTPUTS = _from(
    _OUTPUTS, "RequestOutput", "CompletionOutput", "PoolingOutput", "PoolingRequestOutput",
    "EmbeddingOutput", "EmbeddingRequestOutput", "ClassificationOutput",
    "ClassificationRequestOutput", "ScoringOutput", "ScoringRequestOutput",
)  # fmt: skip
_BEAMS = _from("quire.serve.python.beam_search", "BeamSearchOutput", "BeamSearchSequence")
_INPUTS = _from(
    _OWN + "prompts", "TextPrompt", "TokensPrompt", "EmbedsPrompt", "SingletonPrompt", "PromptType"
)
_LOGPROBS = {
    "Logprob": _OUTPUTS,
    "PromptLogprobs": _OUTPUTS,
    "SampleLogprobs": _OUTPUTS,
}
_LLM_ENGINE = {"LLMEngine": _OWN + "llm"}
_ASYNC = {
    "AsyncLLM": _OWN + "async_llm",
    "AsyncLLMEngine": _OWN + "async_llm:AsyncLLM",
}
_PROCESSORS = _from(
    _OWN + "logits_processors", "LogitsProcessor", "AdapterLogitsProcessor", "BatchUpdate",
    "MoveDirectionality", "RequestLogitsProcessor", "process_dict_updates",
)  # fmt: skip
_CONFIGS = _from(
    _OWN + "configs", "VllmConfig", "KVTransferConfig", "KVEventsConfig", "CompilationConfig",
    "CompilationMode", "CUDAGraphMode", "PoolerConfig", "SpeculativeConfig",
    "StructuredOutputsConfig", "AttentionConfig", "ProfilerConfig",
)  # fmt: skip
_CLEANUP = _from(
    _OWN + "helpers", "cleanup_dist_env_and_memory", "destroy_model_parallel",
    "destroy_distributed_environment",
)  # fmt: skip
_TOKENIZER = {"get_tokenizer": _OWN + "tokenizer"}

MODULES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "vllm": {
            "__version__": _OWN + "names:VERSION",
            "LLM": _OWN + "llm",
            **_LLM_ENGINE,
            "AsyncLLMEngine": _ASYNC["AsyncLLMEngine"],
            **_ENGINE_ARGS,
            "SamplingParams": _SAMPLING["SamplingParams"],
            "PoolingParams": _OWN + "params",
            **_from(_OWN + "prompts", "TextPrompt", "TokensPrompt", "PromptType"),
            **_REQUEST_OUTPUTS,
        },
        "vllm.beam_search": _BEAMS,
        "vllm.config": _CONFIGS,
        "vllm.config.kv_transfer": {"KVTransferConfig": _CONFIGS["KVTransferConfig"]},
        "vllm.distributed": _CLEANUP,
        "vllm.distributed.parallel_state": _CLEANUP,
        "vllm.engine": {},
        "vllm.engine.arg_utils": _ENGINE_ARGS,
        "vllm.engine.async_llm_engine": {"AsyncLLMEngine": _ASYNC["AsyncLLMEngine"]},
        "vllm.engine.llm_engine": _LLM_ENGINE,
        "vllm.entrypoints": {},
        "vllm.entrypoints.llm": {"LLM": _OWN + "llm"},
        "vllm.inputs": _INPUTS,
        "vllm.inputs.data": _INPUTS,
        "vllm.logger": {"init_logger": _OWN + "helpers"},
        "vllm.logprobs": _LOGPROBS,
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": "quire.base.requests.lora_request"},
        "vllm.outputs": {**_REQUEST_OUTPUTS, **_BEAMS},
        "vllm.platforms": {"current_platform": _OWN + "helpers"},
        "vllm.pooling_params": {"PoolingParams": _OWN + "params"},
        "vllm.sampling_params": _SAMPLING,
        "vllm.sequence": {"Logprob": _OUTPUTS},
        "vllm.tokenizers": _TOKENIZER,
        "vllm.transformers_utils": {},
        "vllm.transformers_utils.tokenizer": _TOKENIZER,
        "vllm.usage": {},
        "vllm.usage.usage_lib": {"UsageContext": _OWN + "helpers"},
        "vllm.utils": {**_PARSER, **_from(_OWN + "helpers", "random_uuid", "Counter")},
        "vllm.utils.argparse_utils": _PARSER,
        "vllm.utils.counter": {"Counter": _OWN + "helpers"},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": _ASYNC["AsyncLLM"]},
        "vllm.v1.engine.llm_engine": _LLM_ENGINE,
        "vllm.v1.metrics": {},
        "vllm.v1.metrics.reader": _from(
            _OWN + "metrics", "Metric", "Counter", "Gauge", "Histogram", "Vector"
        ),
        "vllm.v1.sample": {},
        "vllm.v1.sample.logits_processor": _PROCESSORS,
        "vllm.v1.sample.logits_processor.builtin": {
            "process_dict_updates": _PROCESSORS["process_dict_updates"]
        },
        "vllm.v1.sample.logits_processor.interface": _PROCESSORS,
        "vllm.version": {"__version__": _OWN + "names:VERSION"},
    }
)

# What to do instead of importing a module, or a name of one, that quire does not offer.
ADD_MODELS = "add an architecture as a package (docs/extend/models.md)"
NEW_WEIGHTS = "call update_weights with tensors or a path (docs/use/training.md)"
OPEN_MEDIA = "open a file of your own with PIL, or give its URL in a message"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "vllm.ModelRegistry": ADD_MODELS,
        "vllm.assets": f"it downloads vLLM's sample files; {OPEN_MEDIA}",
        "vllm.benchmarks": "use `quire bench` (docs/use/commands.md)",
        "vllm.config.LoRAConfig": "give enable_lora, max_loras and max_lora_rank as settings",
        "vllm.config.WeightTransferConfig": NEW_WEIGHTS,
        "vllm.distributed.kv_transfer": "write a store (docs/extend/kv-stores.md)",
        "vllm.distributed.weight_transfer": NEW_WEIGHTS,
        "vllm.entrypoints.openai": "run `quire serve`, which has vLLM's endpoints",
        "vllm.model_executor": ADD_MODELS,
        "vllm.multimodal": OPEN_MEDIA,
        "vllm.plugins": "use entry points (docs/extend/README.md)",
        "vllm.renderers": "give `generate` the text or the messages themselves",
        "vllm.v1.core": "see docs/extend/scheduler.md for policies and extensions",
        "vllm.v1.metrics.loggers": "read `llm.get_metrics()`, or `/metrics` of a server",
        "vllm.v1.sample.logits_processor.LogitsProcessors": "quire builds them itself",
    }
)


def reason_for(name: str) -> str:
    """Return why quire does not offer a module or name, from the longest entry that covers it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (reason := REFUSED.get(".".join(parts[:length]))) is not None:
            return reason
    return "quire offers the names in docs/use/vllm.md"
