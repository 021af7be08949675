"""vLLM's settings that have no counterpart here, for those who bring their scripts along.

A value that asks for nothing, or for what is so anyway, is accepted and ignored; any other is
refused with the reason, never taken silently. `LLM` and the command line read this one table.
"""

from dataclasses import dataclass
from typing import Any

from quire.base.errors import ConfigError


@dataclass(frozen=True)
class VllmSetting:
    """harmless: values that may be ignored; None is all of them. reason: why, and what to do.

    is_switch: a flag without a value. short: other spellings of the flag.
    """

    reason: str
    harmless: tuple[Any, ...] | None = None
    is_switch: bool = False
    short: tuple[str, ...] = ()


def _switch(reason: str, *harmless: bool) -> VllmSetting:
    return VllmSetting(reason, harmless, is_switch=True)


def _value(reason: str, *harmless: Any, short: str = "") -> VllmSetting:
    return VllmSetting(reason, harmless, short=(short,) if short else ())


def _ignored(reason: str, is_switch: bool = False) -> VllmSetting:
    return VllmSetting(reason, None, is_switch)


VLLM_SETTINGS: dict[str, VllmSetting] = {
    # What is so anyway.
    "enable_chunked_prefill": _switch("prompts are always computed in chunks", True),
    "async_scheduling": _ignored("pipeline_depth says how many steps are in flight", True),
    "enable_log_requests": _switch("requests are not logged", False),
    "disable_log_requests": _ignored("requests are not logged", is_switch=True),
    "enable_prompt_tokens_details": _ignored("the usage always has them", is_switch=True),
    "enable_request_id_headers": _ignored("every answer has X-Request-Id", is_switch=True),
    "enable_server_load_tracking": _ignored("/load always answers", is_switch=True),
    "disable_fastapi_docs": _ignored("there are no pages of documentation", is_switch=True),
    "enable_auto_tool_choice": _ignored("tool calls are always read", is_switch=True),
    "use_v2_block_manager": _ignored("there is one way to manage blocks", is_switch=True),
    "disable_custom_all_reduce": _ignored("there is one way to add", is_switch=True),
    "uvicorn_log_level": _ignored("--log-level is for everything"),
    "disable_uvicorn_access_log": _ignored("there is no access log", is_switch=True),
    "compilation_config": _ignored("--compilation says how steps are recorded"),
    "optimization_level": _ignored("--compilation says how steps are recorded"),
    "cudagraph_capture_sizes": _ignored("sizes are recorded as they are used"),
    "max_seq_len_to_capture": _ignored("graphs are for every length"),
    "max_parallel_loading_workers": _ignored("weights are mapped from their files"),
    "limit_mm_per_prompt": _ignored("prompts are text"),
    "prefix_caching_hash_algo": _value("blocks are hashed with SHA-256", "sha256", "sha256_cbor"),
    # What one might count on and would not get.
    "trust_remote_code": _switch(
        "code from a model's repository is never run, only quire's and the transformers package's",
        False,
    ),
    "swap_space": _value("swap space is as large as the KV pool", 0, 4),
    "cpu_offload_gb": _value("weights stay on the device", 0),
    "tokenizer_mode": _value("there is one tokenizer, from tokenizer.json", "auto"),
    "skip_tokenizer_init": _switch("the tokenizer is loaded if the model has one", False),
    "num_gpu_blocks_override": _value("use --kv-cache-memory-bytes"),
    "task": _value("models generate text", "auto", "generate"),
    "runner": _value("models generate text", "auto", "generate"),
    "download_dir": _value("set the environment variable HF_HOME"),
    "hf_token": _value("set the environment variable HF_TOKEN"),
    "logprobs_mode": _value("logprobs are those before sampling's changes", "raw_logprobs"),
    "chat_template_content_format": _value("the template tells it", "auto"),
    "enable_lora": _switch("adapters are not supported yet", False),
    "guided_decoding_backend": _ignored("llguidance is the one for all grammars"),
    "structured_outputs_config": _ignored("llguidance is the one for all grammars"),
    "structured_outputs_config.backend": _ignored("llguidance is the one for all grammars"),
    "middleware": _value("put a proxy in front"),
}


def ignore_vllm_setting(name: str, value: Any) -> str:
    """Return why a setting with this value may be ignored. Raise ConfigError if it may not.

    name: a key of VLLM_SETTINGS. value: as Python has it (None is not given), or as text from a
    command line.
    """
    setting = VLLM_SETTINGS[name]
    if value is None or setting.harmless is None:
        return setting.reason
    if str(value) not in [str(harmless) for harmless in setting.harmless]:
        raise ConfigError(f"{name}={value!r} is not supported: {setting.reason}.")
    return setting.reason


def drop_vllm_settings(settings: dict[str, Any]) -> None:
    """Take those settings out that may be ignored. Raise ConfigError for one that may not."""
    for name in [name for name in settings if name in VLLM_SETTINGS]:
        ignore_vllm_setting(name, settings.pop(name))
