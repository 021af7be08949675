"""Groups of settings, with the names in `--help GROUP` and docs/use/settings.md: data only.

Every setting is in exactly one group. `--help` shows the settings of `USUAL`.
"""

from dataclasses import dataclass

from quire.base.settings.secrets import KEY_VARIABLES
from quire.engine.wire.logs import FORMAT_VARIABLE


@dataclass(frozen=True)
class Group:
    """A group of settings. `text` is the group's subject, as `--help` lists it."""

    name: str
    text: str
    settings: tuple[str, ...]


GROUPS = (
    Group(
        "model",
        "model files, tokenizer, length, data type, quantization",
        (
            "model", "tokenizer", "revision", "tokenizer_revision", "max_model_len", "dtype",
            "load_format", "weight_cache", "seed", "hf_overrides", "runner", "convert",
            "pooler_config", "model_impl", "torch_compile", "quantization",
            "quantization_group_size", "quantized_head",
        ),
    ),
    Group(
        "chat",
        "chat templates, tools, reasoning, sampling defaults",
        (
            "chat_template", "default_chat_template_kwargs", "trust_request_chat_template",
            "tool_call_parser", "reasoning_parser", "exclude_tools_when_tool_choice_none",
            "response_role", "generation_config", "override_generation_config",
        ),
    ),
    Group(
        "scheduling",
        "running requests, step size, order, preemption",
        (
            "max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs", "scheduling_policy",
            "scheduler_extensions", "preemption_mode", "long_prefill_token_threshold",
            "pipeline_depth", "watermark", "max_encoder_tokens", "encoder_cache_tokens",
        ),
    ),
    Group(
        "cache",
        "KV cache: memory, data type, prefixes, stores",
        (
            "gpu_memory_utilization", "kv_cache_memory_bytes", "kv_cache_dtype", "block_size",
            "enable_prefix_caching", "reuse_partial_blocks", "eviction_policy",
            "prefix_caching_hash_algo", "pin_prefix", "pin_share", "kv_host_gb", "kv_disk_dir",
            "kv_disk_gb", "kv_store", "kv_eager", "kv_transfer_config", "kv_events_config",
        ),
    ),
    Group("speculation", "speculative decoding", ("speculative_config",)),
    Group(
        "device",
        "device, attention kernels and CUDA graphs",
        (
            "device", "attention_backend", "compilation", "enforce_eager", "graph_warmup",
            "deterministic", "native_launch", "debug_transfers",
        ),
    ),
    Group(
        "parallel",
        "several devices and machines",
        (
            "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
            "enable_expert_parallel", "decode_context_parallel_size",
            "distributed_executor_backend", "nnodes", "node_rank", "master_addr", "master_port",
            "ray_address", "node_wait_s",
        ),
    ),
    Group(
        "server",
        "address, names, processes and shutdown",
        (
            "host", "port", "uds", "root_path", "served_model_name", "page", "disable_fastapi_docs",
            "api_server_count", "shutdown_timeout", "restart_engine",
        ),
    ),
    Group(
        "models",
        "several models on one server, and adapters (LoRA)",
        (
            "max_loaded_models", "idle_unload_s", "model_wait_s", "enable_lora", "lora_modules",
            "max_loras", "max_lora_rank", "max_cpu_loras", "lora_target_modules", "lora_roots",
        ),
    ),
    Group(
        "security",
        "API keys, rate limits, HTTPS and browsers",
        (
            "api_key", "urgent_api_key", "admin_api_key", "requests_per_minute",
            "tokens_per_minute", "ssl_keyfile", "ssl_certfile", "allowed_origins", "allowed_hosts",
            "allowed_media_domains", "allowed_local_media_path",
        ),
    ),
    Group(
        "requests",
        "form and limits of requests, files, batches",
        (
            "max_body_bytes", "max_media_bytes", "limit_mm_per_prompt", "strict_fields",
            "max_logprobs", "logits_processors", "hooks",
            "hook_timeout", "stream_interval", "sse_keep_alive_interval",
            "enable_return_routed_experts",
            "enable_force_include_usage", "enable_per_request_metrics",
            "return_tokens_as_token_ids", "response_store_bytes", "files_dir", "files_gb",
        ),
    ),
    Group(
        "logs",
        "logs, metrics, traces and recordings",
        (
            "log_level", "log_format", "disable_log_stats", "log_requests", "usage_log",
            "metrics_prefix", "otlp_traces_endpoint", "record", "record_tokens", "record_max_mb",
        ),
    ),
)  # fmt: skip
# Groups of the options that belong to one command and are not settings.
COMMAND_GROUPS = {
    "sampling": "how tokens are sampled",
    "requests": "prompts and outputs of the requests",
    "server": "the server that answers",
    "load": "when requests arrive",
    "results": "metrics and output files",
    "measurement": "repetitions and output files",
    "device": "the simulated device",
}
USUAL = (
    "model", "max_model_len", "dtype", "quantization", "host", "port", "served_model_name",
    "api_key", "max_num_seqs", "gpu_memory_utilization", "speculative_config",
    "tensor_parallel_size", "device", "log_level",
)  # fmt: skip
# Environment variables that apply if a setting is not given.
VARIABLES = {
    "api_key": KEY_VARIABLES,
    "ray_address": ("RAY_ADDRESS",),
    "log_format": (FORMAT_VARIABLE,),
}
# Other environment variables.
OTHER_VARIABLES = {
    "QUIRE_NUM_THREADS": "threads of the C++ core in each process; by default one per usable core",
    "QUIRE_ALL_CORES": "`1` lets the engine of `quire serve` use slow cores, too; by default it"
    " stays on the fast ones if they have most of the speed",
    "QUIRE_CPU_VARIANT": "kernels of the C++ core, such as `avx2`; by default the fastest",
    "QUIRE_OVERLAP_LAUNCHES": "`1` lets GPU kernels overlap; off by default, as no GPU has run it",
    "QUIRE_MERGE_IN_ATTENTION": "`1` merges attention's parts in the same launch; off by"
    " default, as no GPU has run it",
    "QUIRE_STREAM_PRODUCTS": "`1` computes products of 5 to 64 rows by stream-K on GPUs; off by"
    " default, as no GPU has run it",
    "QUIRE_PREPARED_LAUNCHES": "`1` launches kernels on GPUs without Triton's work for each"
    " launch; off by default, as no GPU has run it",
    "QUIRE_KV_SECRET": "secret that engines with `serve://` and `peer://` stores share",
    "QUIRE_RANK_TOKEN": "secret that the machines of `--nnodes` share",
    "HF_HOME": "directory of the models that were downloaded from Hugging Face",
    "HF_TOKEN": "token for models on Hugging Face that need one",
    "OPENAI_API_KEY": "API key that `quire chat --url` and `quire bench serve` send",
    "OTEL_SERVICE_NAME": "name of the service in spans (`--otlp-traces-endpoint`)",
    "CUDA_VISIBLE_DEVICES": "GPUs that quire may use",
}


def text_of(name: str, *, has_settings: bool) -> str:
    """Return the subject of a group of settings or of other options."""
    if not has_settings:
        return COMMAND_GROUPS.get(name, "")
    return next(group.text for group in GROUPS if group.name == name)
