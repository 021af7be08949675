"""Table of all flags of vLLM's `serve`, with what quire does with each. Data only.

`LLM` and the command line read vLLM's settings from it (`vllm_compat.py`). `python -m
quire.cli.migrating` generates the pages docs/use/vllm-flags*.md from it.
"""

from dataclasses import dataclass
from typing import Any

# Reasons that several settings share.
OWN_IMAGES = "the model's own settings decide how images are read"
IMAGE_CACHE = "each API process keeps the last prepared images"
NO_VIDEO_FILES = "the server decodes no video files"
OWN_KERNELS = "rows without an adapter cost nothing"
NO_TOWER_ADAPTERS = "adapters change no vision towers"
EXPERT_ADAPTERS = "adapters of experts are read in PEFT's format"
ONE_WAY = "quire has one implementation, with the same results"
GROUP = "use --nnodes, --node-rank and --master-addr"
COPIES = "one server runs all replicas of a model, or each replica has its own server"
COMPILATION = "use --compilation to choose the kind of CUDA graphs"
ONE_LOG = "--log-format and --log-level control the log, on standard error"
NO_TEXT = "quire never logs text"
LOG_REQUESTS = "use --log-requests; lengths and times, never text"
STATES = "states are cached in the data type of the computation"


@dataclass(frozen=True)
class VllmSetting:
    """A setting of vLLM.

    is_same: quire has a setting of this name; reason: the difference, if any.
    becomes: the quire setting that includes this one.
    harmless: values that may be ignored, because they request what quire does anyway. None means
    all values, () means none. reason: why a value is ignored or refused, and the alternative.
    is_switch: a flag without a value; several: it has any number of values. short: short names.
    """

    reason: str = ""
    harmless: tuple[Any, ...] | None = None
    is_switch: bool = False
    several: bool = False
    short: tuple[str, ...] = ()
    is_same: bool = False
    becomes: str = ""


def _same(note: str = "", short: str = "") -> VllmSetting:
    return VllmSetting(note, is_same=True, short=(short,) if short else ())


def _part(of: str, note: str) -> VllmSetting:
    return VllmSetting(note, becomes=of)


def _switch(reason: str, *harmless: bool, short: str = "") -> VllmSetting:
    return VllmSetting(reason, harmless, is_switch=True, short=(short,) if short else ())


def _value(reason: str, *harmless: Any, short: str = "") -> VllmSetting:
    return VllmSetting(reason, harmless, short=(short,) if short else ())


def _ignored(reason: str, is_switch: bool = False, several: bool = False) -> VllmSetting:
    return VllmSetting(reason, None, is_switch, several)


SERVER = {
    "host": _same("vLLM listens on every network"),
    "port": _same(),
    "uds": _same(),
    "root_path": _same(),
    "api_key": _same(
        "for all paths but /health, /ready, /ping, the page of /docs; in vLLM for /v1 only"
    ),
    "allowed_origins": _same("none by default; vLLM allows all"),
    "allowed_methods": _value("allowed origins may use all methods", "*", '["*"]'),
    "allowed_headers": _value("allowed origins may send all headers", "*", '["*"]'),
    "allow_credentials": _switch("keys come in a header, never in a cookie", False),
    "ssl_keyfile": _same(),
    "ssl_certfile": _same(),
    "ssl_ca_certs": _value("put a proxy that checks clients' certificates in front"),
    "ssl_cert_reqs": _value("put a proxy that checks clients' certificates in front", 0),
    "ssl_ciphers": _value("Python's default ciphers are used; put a proxy in front for others"),
    "enable_ssl_refresh": _switch("restart the server with the new certificate", False),
    "middleware": _value("use --hooks (docs/extend/hooks.md), or put a proxy in front"),
    "api_server_count": _same("vLLM starts one per replica of the model", short="-asc"),
    "headless": _switch(GROUP, False),
    "grpc": _switch("the server speaks HTTP", False),
    "grpc_port": _value("the server speaks HTTP"),
    "shutdown_timeout": _same("in vLLM 0: requests end at once"),
    "h11_max_incomplete_event_size": _ignored("headers may have 64 KiB, bodies --max-body-bytes"),
    "h11_max_header_count": _ignored("headers may have 64 KiB"),
    "sse_keep_alive_interval": _same(),
    "disable_fastapi_docs": _same(),
    "enable_offline_docs": _ignored("the page of /docs always works offline", True),
    "enable_request_id_headers": _ignored("every answer has X-Request-Id", True),
    "enable_server_load_tracking": _ignored("/load always answers", True),
    "enable_tokenizer_info_endpoint": _ignored("/tokenizer_info always answers", True),
    "enable_scale_out": _ignored("/inference/v1/generate always answers", True),
    "tokens_only": _switch("remove it: prompts and outputs may be token ids", False),
    "disable_frontend_multiprocessing": _ignored("use --api-server-count", True),
    "fail_on_environ_validation": _ignored("quire reads few environment variables", True),
}
ANSWERS = {
    "served_model_name": _same(
        "name each of [several models](../operate/several-models.md) by `NAME=MODEL`"
    ),
    "response_role": _same(),
    "chat_template": _same(),
    "chat_template_content_format": _value("the chat template determines it", "auto"),
    "trust_request_chat_template": _same(),
    "default_chat_template_kwargs": _same(),
    "reasoning_effort_map": _value("templates get reasoning_effort unchanged"),
    "return_tokens_as_token_ids": _same(),
    "enable_force_include_usage": _same(),
    "enable_prompt_tokens_details": _ignored("the usage always includes them", True),
    "enable_per_request_metrics": _same(),
    "per_request_spec_decode_metrics": _ignored("use --enable-per-request-metrics", True),
    "stream_interval": _same(),
    "tool_call_parser": _same("detected from the chat template, where vLLM needs a name"),
    "tool_parser_plugin": _value("add a format as a row of a table (docs/use/tools.md)", ""),
    "tool_server": _value("the server runs no tools; clients call them"),
    "tool_strict_level": _value("set strict in the tool's definition"),
    "enable_auto_tool_choice": _ignored("tool calls are always read", True),
    "exclude_tools_when_tool_choice_none": _same(),
    "reasoning_parser": _same("detected from the chat template, where vLLM needs a name"),
    "reasoning_parser_plugin": _value("add a format as a row of a table (docs/use/tools.md)", ""),
    "reasoning_config": _value("the reasoning format determines it", "{}"),
    "enable_reasoning": _ignored("reasoning is always read", True),
    "structured_outputs_config": _ignored("llguidance compiles all grammars"),
    "structured_outputs_config.backend": _ignored("llguidance compiles all grammars"),
    "guided_decoding_backend": _ignored("llguidance compiles all grammars"),
    "fingerprint_mode": _ignored("system_fingerprint is always the digest of the numerics"),
    "fingerprint_value": _value("system_fingerprint is always the digest of the numerics"),
    "cohere_is_reasoning_model": _ignored("quire has no endpoints in Cohere's format", True),
    "cohere_format": _ignored("quire has no endpoints in Cohere's format"),
    "enable_flash_late_interaction": _ignored("quire has no late interaction", True),
}
MODEL = {
    "model": _same("the first argument may be the model, too"),
    "tokenizer": _same(),
    "tokenizer_revision": _same(),
    "revision": _same(),
    "code_revision": _ignored("quire never runs code from a model's repository"),
    "trust_remote_code": _ignored(
        "quire runs only its own code and the transformers package's; a model that needs code from"
        " its repository does not load",
        True,
    ),
    "tokenizer_mode": _value(
        "the files decide: tokenizer.json, or a vocabulary that is converted", "auto"
    ),
    "skip_tokenizer_init": _switch("quire loads the tokenizer if the model has one", False),
    "tokenizer_pool_size": _ignored("threads tokenise texts"),
    "renderer_num_workers": _ignored("processes render templates, as many as are needed"),
    "hf_config_path": _value("change config.json's values by --hf-overrides"),
    "hf_overrides": _same("a JSON object; in Python a dictionary, not a function"),
    "hf_token": _value("set the environment variable HF_TOKEN"),
    "config_format": _value("quire reads config.json", "auto", "hf"),
    "rope_scaling": _value("set it in --hf-overrides"),
    "rope_theta": _value("set it in --hf-overrides"),
    "model_impl": _same("auto, quire, transformers; vllm counts as quire"),
    "model_class_overrides": _value("add an architecture as a file (docs/extend/models.md)"),
    "dtype": _same(),
    "seed": _same(),
    "max_model_len": _same("auto and -1 take the longest length that fits the memory"),
    "max_logprobs": _same(),
    "logprobs_mode": _value(
        "log-probabilities are computed before penalties and filters", "raw_logprobs"
    ),
    "quantization": _same(
        "fp8, int8, int4 or none, for weights as they load. A checkpoint's own format (awq, gptq,"
        " compressed-tensors ...) is read from its files and needs no name"
    ),
    "quantization_config": _value("use --quantization and --quantization-group-size", "{}"),
    "allow_deprecated_quantization": _ignored(
        "docs/use/quantisation.md lists the supported formats", True
    ),
    "generation_config": _same("auto or none; vllm means none; no folder"),
    "override_generation_config": _same(),
    "runner": _same("auto, generate or pooling"),
    "convert": _same(),
    "task": _value("use --runner and --convert", "auto", "generate"),
    "pooler_config": _same(
        "with seq_pooling_type or pooling_type, and use_activation or normalize"
    ),
    "enable_prompt_embeds": _switch("send prompts as text or token ids", False),
    "logits_processors": _same(
        "names from installed packages (docs/extend/logits-processors.md), no paths"
    ),
    "io_processor_plugin": _value("use --hooks (docs/extend/hooks.md)"),
    "disable_sliding_window": _switch("sliding windows are always applied", False),
    "disable_cascade_attn": _ignored("answers do not depend on it", True),
    "use_fp64_gumbel": _ignored("sampling uses the same random bits on every device", True),
    "enable_return_routed_experts": _same(
        "mixtures on a CPU; Python programs and /inference/v1/generate"
    ),
    "return_sampling_mask": _switch("responses do not contain the mask", False),
    "enable_trace_replay": _switch("use quire replay (docs/operate/recording.md)", False),
    "enable_sleep_mode": _ignored("every engine on a CPU can sleep", True),
    "enable_cumem_allocator": _ignored(ONE_WAY, True),
    "enable_nccl_comm_suspend": _ignored("a sleep needs no communicator", True),
    "diffusion_config": _value("diffusion models are not supported", short="-dc"),
    "watermark_config": _value("outputs are not watermarked"),
    "weight_transfer_config": _value(
        "new weights come from a folder or as chunks (docs/use/training.md)",
        '{"backend": "http"}',
        '{"backend":"http"}',
    ),
    "additional_config": _value("no part of quire reads it", "{}"),
}
LOADING = {
    "load_format": _same("auto, safetensors or dummy; quire recognises a GGUF file by its content"),
    "download_dir": _value("set the environment variable HF_HOME"),
    "safetensors_load_strategy": _ignored("weights are mapped from their files"),
    "safetensors_prefetch_num_threads": _ignored("weights are mapped from their files"),
    "safetensors_prefetch_block_size": _ignored("weights are mapped from their files"),
    "model_loader_extra_config": _value("weights are mapped from their files", "{}"),
    "max_parallel_loading_workers": _ignored("weights are mapped from their files"),
    "ignore_patterns": _ignored("only safetensors and text files are downloaded", several=True),
    "use_tqdm_on_load": _ignored("a terminal gets a progress bar, a log none", True),
    "pt_load_map_location": _ignored("weights are safetensors files"),
}
CACHE = {
    "block_size": _same(),
    "gpu_memory_utilization": _same("--device-memory-utilization is another name"),
    "kv_cache_memory_bytes": _same(),
    "kv_cache_dtype": _same("auto, int8 or fp8 (fp8_e4m3)"),
    "kv_cache_dtype_skip_layers": _value("all layers have the same data type"),
    "calculate_kv_scales": _switch("scales come from the checkpoint, or are 1", False),
    "num_gpu_blocks_override": _value("use --kv-cache-memory-bytes"),
    "enable_prefix_caching": _same(),
    "prefix_caching_hash_algo": _same(
        "sha256_cbor means sha256; xxhash needs a package (docs/extend/block-hashes.md)"
    ),
    "prefix_cache_retention_interval": _value("pin a prefix instead: --pin-prefix or /v1/prefixes"),
    "prefix_match_unit": _ignored("prefixes match by whole blocks"),
    "kv_sharing_fast_prefill": _switch("quire computes all layers of a prompt", False),
    "kv_offloading_size": _value("use --kv-host-gb, in units of 10**9 bytes, not 2**30"),
    "kv_offloading_backend": _value("use --kv-host-gb or --kv-disk-dir", "native"),
    "swap_space": _value("the swap space is as large as the KV pool", 0, 4),
    "mamba_backend": _ignored(ONE_WAY),
    "mamba_ssu_algorithm": _ignored(ONE_WAY),
    "mamba_block_size": _value("states are stored at the ends of blocks; set --block-size"),
    "mamba_cache_dtype": _value(STATES, "auto"),
    "mamba_ssm_cache_dtype": _value(STATES, "auto"),
    "mamba_cache_mode": _ignored("quire stores the states that save the most work"),
    "enable_mamba_cache_stochastic_rounding": _switch(STATES, False),
    "mamba_cache_philox_rounds": _ignored(STATES),
    "use_replayssm": _switch(STATES, False),
    "replayssm_buffer_len": _ignored(STATES),
    "offload_backend": _ignored("weights always stay on the device"),
    "cpu_offload_gb": _value("weights always stay on the device", 0),
    "cpu_offload_params": _ignored("weights always stay on the device", several=True),
    "offload_group_size": _value("weights always stay on the device", 0),
    "offload_num_in_group": _ignored("weights always stay on the device"),
    "offload_prefetch_step": _ignored("weights always stay on the device"),
    "offload_params": _ignored("weights always stay on the device", several=True),
}
SCHEDULER = {
    "max_num_seqs": _same("by default 64 on a CPU, 256 on a GPU"),
    "max_num_batched_tokens": _same(
        "by default 8192 on a GPU, on a CPU as many as take about 250 ms"
    ),
    "max_num_scheduled_tokens": _value("use --max-num-batched-tokens"),
    "max_num_active_seqs": _value("use --max-num-seqs"),
    "max_num_queued_reqs": _same(),
    "max_num_queued_tokens": _value("use --max-num-queued-reqs"),
    "long_prefill_token_threshold": _same(),
    "long_prefill_token_threshold_adaptive": _ignored(
        "the policy two-level computes short prompts first", True
    ),
    "max_num_partial_prefills": _ignored("a step may have any number of prompts"),
    "max_long_partial_prefills": _ignored("--long-prefill-token-threshold limits each long prompt"),
    "scheduling_policy": _same(
        "vLLM's default is fcfs. fcfs and priority mean fifo; a request's priority always counts"
    ),
    "scheduler_cls": _value("give --scheduling-policy FILE.py:CLASS (docs/extend/policies.md)"),
    "scheduler_reserve_full_isl": _ignored("--watermark keeps blocks free", True),
    "scheduler_delay_factor": _value("quire never delays prompts", 0),
    "num_scheduler_steps": _value("--pipeline-depth sets the number of steps in flight", 1),
    "num_lookahead_slots": _ignored("blocks for draft tokens are allocated with the tokens"),
    "preemption_mode": _same(),
    "watermark": _same("vLLM's default is 0"),
    "enable_chunked_prefill": _switch("prompts are always computed in chunks", True),
    "prefill_schedule_interval": _value("prompts continue in every step", 1),
    "async_scheduling": _ignored("pipeline_depth sets the number of steps in flight", True),
    "disable_async_output_proc": _ignored("detokenization runs in parallel with the steps", True),
    "disable_hybrid_kv_cache_manager": _switch(
        "layers with windows have their own cache groups", False
    ),
    "use_v2_block_manager": _ignored("quire has one block manager", True),
}
PARALLEL = {
    "tensor_parallel_size": _same(short="-tp"),
    "pipeline_parallel_size": _same(short="-pp"),
    "data_parallel_size": _same(short="-dp"),
    "decode_context_parallel_size": _same(short="-dcp"),
    "prefill_context_parallel_size": _value(
        "quire computes long prompts in chunks", 1, short="-pcp"
    ),
    "dcp_comm_backend": _ignored(ONE_WAY),
    "dcp_q_replicate": _ignored(ONE_WAY, True),
    "dcp_kv_cache_interleave_size": _value("each rank of a group holds a part of every block"),
    "cp_kv_cache_interleave_size": _value("each rank of a group holds a part of every block"),
    "enable_expert_parallel": _same(short="-ep"),
    "enable_eplb": _switch("experts stay on their ranks", False),
    "eplb_config": _value("experts stay on their ranks", "{}"),
    "expert_placement_strategy": _value("experts are distributed in their order", "linear"),
    "enable_ep_weight_filter": _ignored("a rank reads only its own experts", True),
    "enable_elastic_ep": _switch("the number of ranks is fixed", False),
    "all2all_backend": _ignored(ONE_WAY),
    "enable_dbo": _ignored(ONE_WAY, True),
    "dbo_decode_token_threshold": _ignored(ONE_WAY),
    "dbo_prefill_token_threshold": _ignored(ONE_WAY),
    "ubatch_size": _ignored(ONE_WAY),
    "enable_batch_sharded_sampling": _ignored("each rank samples its part of the tokens", True),
    "distributed_executor_backend": _same("auto, uni, mp or ray"),
    "nnodes": _same(short="-n"),
    "node_rank": _same(short="-r"),
    "master_addr": _same(),
    "master_port": _same(),
    "distributed_timeout_seconds": _ignored(
        "--node-wait-s limits the start; heartbeats watch the rest"
    ),
    "cpu_distributed_timeout_seconds": _ignored("--node-wait-s limits the start"),
    "data_parallel_rank": _value(COPIES, short="-dpn"),
    "data_parallel_start_rank": _value(COPIES, short="-dpr"),
    "data_parallel_size_local": _value(COPIES, short="-dpl"),
    "data_parallel_address": _value(COPIES, short="-dpa"),
    "data_parallel_rpc_port": _value(COPIES, short="-dpp"),
    "data_parallel_backend": _value("use --distributed-executor-backend", "mp", short="-dpb"),
    "data_parallel_hybrid_lb": _switch(COPIES, False, short="-dph"),
    "data_parallel_external_lb": _switch(COPIES, False, short="-dpe"),
    "data_parallel_multi_port_external_lb": _switch(COPIES, False, short="-dpm"),
    "data_parallel_supervisor_port": _value(COPIES),
    "dp_supervisor_probe_interval_s": _ignored("/health reports all replicas"),
    "dp_supervisor_probe_timeout_s": _ignored("/health reports all replicas"),
    "dp_supervisor_probe_failure_threshold": _ignored("/health reports all replicas"),
    "dp_sync_interval": _ignored("replicas do not wait for each other"),
    "disable_nccl_for_dp_synchronization": _ignored("replicas do not wait for each other", True),
    "disable_custom_all_reduce": _ignored("quire has one implementation", True),
    "device_ids": _value("set the environment variable CUDA_VISIBLE_DEVICES"),
    "numa_bind": _ignored("replicas of a model divide the cores themselves", True),
    "numa_bind_nodes": _value("use numactl"),
    "numa_bind_cpus": _value("use taskset"),
    "ray_workers_use_nsight": _switch("start a rank under nsys yourself", False),
    "worker_cls": _value("quire has one kind of worker", "auto"),
    "worker_extension_cls": _value("quire has one kind of worker", ""),
    "enable_fault_tolerance": _switch("use --restart-engine", False),
    "fault_tolerance_config": _value("use --restart-engine", "{}"),
    "watchdog_config": _ignored("the supervisor watches the engine's heartbeat"),
}
KERNELS = {
    "device": _same(),
    "enforce_eager": _same("no effect on a CPU, which records no graphs"),
    "attention_backend": _same(
        "auto, cpu, torch, reference, triton, triton_64, flashinfer, flash_attention_3 or cudnn"
    ),
    "attention_config": _value("use --attention-backend", "{}", short="-ac"),
    "compilation_config": VllmSetting(COMPILATION, short=("-cc",)),
    "optimization_level": VllmSetting(COMPILATION, short=("-O",)),
    "performance_mode": _ignored("--max-num-batched-tokens trades latency for throughput"),
    "cudagraph_capture_sizes": _ignored("graphs are recorded for the sizes in use", several=True),
    "max_cudagraph_capture_size": _ignored("graphs are recorded for the sizes in use"),
    "max_seq_len_to_capture": _ignored("graphs work for every length"),
    "cudagraph_metrics": _switch("quire does not count them", False),
    "kernel_config": _ignored(ONE_WAY),
    "ir_op_priority": _ignored(ONE_WAY),
    "moe_backend": _ignored(ONE_WAY),
    "linear_backend": _ignored("quire takes the fastest kernel of the device"),
    "gdn_prefill_backend": _ignored(ONE_WAY),
    "kda_prefill_backend": _ignored(ONE_WAY),
    "enable_flashinfer_autotune": _ignored("quire has its own kernels", True),
    "enable_bf16x3_router_gemm": _ignored("quire has its own kernels", True),
}
SPECULATION = {
    "speculative_config": _same(
        "methods ngram, suffix, draft_model, eagle3, mtp, forced and none", short="-sc"
    ),
    "spec_method": _part("speculative_config", "the method in speculative_config"),
    "spec_model": _part("speculative_config", "the model in speculative_config"),
    "spec_tokens": _part("speculative_config", "num_speculative_tokens in speculative_config"),
    "speculative_model": _value("use --speculative-config"),
    "num_speculative_tokens": _value("use --speculative-config"),
}
ADAPTERS = {
    "enable_lora": _same(),
    "lora_modules": _same(),
    "default_mm_loras": _value("name the adapter in each request"),
    "max_loras": _same("vLLM's default is 1"),
    "max_lora_rank": _same("any rank up to 256"),
    "max_cpu_loras": _same(),
    "lora_dtype": _value("adapters have the model's data type", "auto"),
    "lora_extra_vocab_size": _ignored("adapters add no tokens"),
    "lora_target_modules": _same("adapters that change other modules are refused"),
    "fully_sharded_loras": _ignored("ranks cut adapters as they cut the weights", True),
    "specialize_active_lora": _ignored(OWN_KERNELS, True),
    "enable_tower_connector_lora": _switch(NO_TOWER_ADAPTERS, False),
    "enable_mixed_moe_lora_format": _switch(EXPERT_ADAPTERS, False),
    "enable_moe_shared_loras": _switch(EXPERT_ADAPTERS, False),
}
MEDIA = {
    "language_model_only": _ignored("without images the vision tower does not run", True),
    "limit_mm_per_prompt": _same("images only, by default 16; vLLM's default is 999"),
    "allowed_local_media_path": _same(),
    "allowed_media_domains": _same("none by default; vLLM allows all"),
    "media_io_kwargs": _value(OWN_IMAGES, "{}"),
    "enable_mm_embeds": _switch("quire encodes images itself; send images", False),
    "interleave_mm_strings": _ignored("images always stand where the messages have them", True),
    "skip_mm_profiling": _ignored("the memory of the vision tower is computed", True),
    "disable_chunked_mm_input": _ignored("the model decides whether images may be divided", True),
    "mm_processor_kwargs": _value(OWN_IMAGES, "{}"),
    "mm_processor_cache_gb": _ignored(IMAGE_CACHE),
    "mm_processor_cache_type": _ignored(IMAGE_CACHE),
    "mm_processor_device": _value("images are decoded on the CPU", "cpu"),
    "mm_hasher_algorithm": _ignored("images are identified by SHA-256"),
    "mm_shm_cache_max_object_size_mb": _ignored(IMAGE_CACHE),
    "mm_encoder_only": _switch("quire runs the language model as well", False),
    "mm_encoder_tp_mode": _ignored(ONE_WAY),
    "mm_encoder_attn_backend": _ignored(ONE_WAY),
    "mm_encoder_attn_dtype": _ignored("the vision tower has the data type of the model"),
    "mm_encoder_fp8_scale_path": _value("the vision tower has the data type of the model"),
    "mm_encoder_fp8_scale_save_path": _value("the vision tower has the data type of the model"),
    "mm_encoder_fp8_scale_save_margin": _ignored("the vision tower has the data type of the model"),
    "mm_tensor_ipc": _ignored("pixels come over the socket of the request"),
    "mm_ipc_gpu_memory_gb": _ignored("pixels come over the socket of the request"),
    "mm_device_do_normalize": _ignored("the device always normalises pixels", True),
    "video_pruning_rate": _value(NO_VIDEO_FILES, 0),
    "video_pruning_method": _ignored(NO_VIDEO_FILES),
}
OBSERVATION = {
    "log_level": _same(),
    "disable_log_stats": _same(),
    "uvicorn_log_level": _ignored("--log-level applies to all loggers"),
    "disable_uvicorn_access_log": _ignored("quire has no access log", True),
    "disable_access_log_for_endpoints": _ignored("quire has no access log"),
    "logging_config": _ignored(ONE_LOG),
    "log_config_file": _ignored(ONE_LOG),
    "aggregate_engine_logging": _ignored("each replica logs its own line", True),
    "log_error_stack": _ignored("server errors are always logged with their stack", True),
    "enable_log_requests": _switch(LOG_REQUESTS, False),
    "disable_log_requests": _ignored("requests are logged only with --log-requests", True),
    "enable_log_outputs": _switch(NO_TEXT, False),
    "enable_log_deltas": _ignored(NO_TEXT, True),
    "max_log_len": _ignored(NO_TEXT),
    "show_hidden_metrics_for_version": _ignored("quire does not hide metrics"),
    "custom_histogram_buckets": _value("the buckets are fixed"),
    "otlp_traces_endpoint": _same("OTLP over HTTP; vLLM's default is gRPC"),
    "collect_detailed_traces": _value("use --record and quire trace (docs/operate/recording.md)"),
    "kv_cache_metrics": _switch("/v1/requests/ID reports cached tokens", False),
    "kv_cache_metrics_sample": _ignored("/v1/requests/ID reports cached tokens"),
    "enable_mfu_metrics": _switch("quire fit shows what a device could do", False),
    "enable_layerwise_nvtx_tracing": _switch(
        "use quire verify, which compares layer by layer", False
    ),
    "enable_logging_iteration_details": _switch("use --record, which records each step", False),
    "jit_monitor_mode": _ignored("quire does not monitor compilations"),
    "jit_monitor_verbose": _ignored("quire does not monitor compilations", True),
    "profiler_config": _value("use --record and quire trace (docs/operate/recording.md)", "{}"),
}
TRANSFERS = {
    "kv_transfer_config": _same("blocks move through --kv-store (docs/operate/handover.md)"),
    "kv_events_config": _same("token ids only with token_ids; the default address is loopback"),
    "ec_transfer_config": _value("the outputs of the vision tower stay in their engine"),
    "ec_manager_config": _value("the outputs of the vision tower stay in their engine"),
}

GROUPS: dict[str, dict[str, VllmSetting]] = {
    "Server": SERVER,
    "Answers, tools, reasoning": ANSWERS,
    "Model": MODEL,
    "Loading": LOADING,
    "Cache and offloading": CACHE,
    "Scheduler": SCHEDULER,
    "Parallelism": PARALLEL,
    "Kernels and compilation": KERNELS,
    "Speculation": SPECULATION,
    "Adapters": ADAPTERS,
    "Images, sound, video": MEDIA,
    "Logs, metrics, traces": OBSERVATION,
    "Transfers between engines": TRANSFERS,
}
FLAGS = {name: setting for group in GROUPS.values() for name, setting in group.items()}
