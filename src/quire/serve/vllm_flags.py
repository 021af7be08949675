"""Every flag of vLLM's `serve`, and what becomes of it here: one table, data only.

`LLM` and the command line take vLLM's settings by it (`vllm_compat.py`), and docs/migrating.md is
made of it (`python -m quire.cli.migrating`).
"""

from dataclasses import dataclass
from typing import Any

# Reasons that many have in common.
TEXT = "prompts are text"
NO_ADAPTERS = "adapters are not supported yet"
ONE_WAY = "there is one way to do it here, with the same results"
GROUP = "ranks find each other by --nnodes, --node-rank and --master-addr"
COPIES = "one server has all copies of a model, or each has its own"
COMPILATION = "--compilation says how steps are recorded"
ONE_LOG = "the log has one form, on standard error; --log-level says how much"
NO_REQUEST_LOG = "requests are not logged"
STATES = "states are kept as they are computed"


@dataclass(frozen=True)
class VllmSetting:
    """One of vLLM's settings.

    is_same: it is one of ours, under the same name; reason: how it differs, if it does.
    becomes: otherwise, the one of ours that it becomes a part of.
    harmless: of others, values that may be ignored, as they ask for what is so anyway; None is all
    of them, none at all is (). reason: why it may be ignored, or why not, and what to do.
    is_switch: a flag without a value; several: with any number of them. short: other spellings.
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
    "api_key": _same("of all but /health, /ready, /ping, the page of /docs; vLLM's of /v1 alone"),
    "allowed_origins": _same("none if absent; vLLM allows all"),
    "allowed_methods": _value("all methods are allowed to those origins", "*", '["*"]'),
    "allowed_headers": _value("all headers are allowed to those origins", "*", '["*"]'),
    "allow_credentials": _switch("keys are sent in a header, and there are no cookies", False),
    "ssl_keyfile": _same(),
    "ssl_certfile": _same(),
    "ssl_ca_certs": _value("put a proxy in front that asks for clients' certificates"),
    "ssl_cert_reqs": _value("put a proxy in front that asks for clients' certificates", 0),
    "ssl_ciphers": _value("Python's choice is taken; put a proxy in front for another one"),
    "enable_ssl_refresh": _switch("start the server anew with a new certificate", False),
    "middleware": _value("filter by --hooks (docs/extending.md), or put a proxy in front"),
    "api_server_count": _same("vLLM has as many as copies of the model", short="-asc"),
    "headless": _switch(GROUP, False),
    "grpc": _switch("the server speaks HTTP", False),
    "grpc_port": _value("the server speaks HTTP"),
    "shutdown_timeout": _same("vLLM's is 0: requests end at once"),
    "h11_max_incomplete_event_size": _ignored("heads have 64 KiB at most, bodies --max-body-bytes"),
    "h11_max_header_count": _ignored("heads have 64 KiB at most"),
    "sse_keep_alive_interval": _same(),
    "disable_fastapi_docs": _same(),
    "enable_offline_docs": _ignored("the page of /docs loads nothing from elsewhere", True),
    "enable_request_id_headers": _ignored("every answer has X-Request-Id", True),
    "enable_server_load_tracking": _ignored("/load always answers", True),
    "enable_tokenizer_info_endpoint": _ignored("/tokenizer_info always answers", True),
    "enable_scale_out": _switch("its endpoints are not here; prompts may be token ids", False),
    "tokens_only": _switch("leave it out: prompts may be token ids, answers, too", False),
    "disable_frontend_multiprocessing": _ignored("--api-server-count says how many", True),
    "fail_on_environ_validation": _ignored("few variables of the environment are read", True),
}
ANSWERS = {
    "served_model_name": _same(
        "of [several models](operating.md#several-models) each is named as `NAME=MODEL`"
    ),
    "response_role": _same(),
    "chat_template": _same(),
    "chat_template_content_format": _value("the template tells it", "auto"),
    "trust_request_chat_template": _same(),
    "default_chat_template_kwargs": _same(),
    "reasoning_effort_map": _value("templates get reasoning_effort as it is"),
    "return_tokens_as_token_ids": _same(),
    "enable_force_include_usage": _same(),
    "enable_prompt_tokens_details": _ignored("the usage always has them", True),
    "enable_per_request_metrics": _same(),
    "per_request_spec_decode_metrics": _ignored("--enable-per-request-metrics has them", True),
    "stream_interval": _same(),
    "tool_call_parser": _same("told by the template, where vLLM wants a name"),
    "tool_parser_plugin": _value("formats are rows of a table (docs/tools.md)", ""),
    "tool_server": _value("tools are called by clients"),
    "tool_strict_level": _value("a tool's definition says it: strict"),
    "enable_auto_tool_choice": _ignored("tool calls are always read", True),
    "exclude_tools_when_tool_choice_none": _switch("they are always left out then", True),
    "reasoning_parser": _same("told by the template, where vLLM wants a name"),
    "reasoning_parser_plugin": _value("formats are rows of a table (docs/tools.md)", ""),
    "reasoning_config": _value("the format tells it", "{}"),
    "enable_reasoning": _ignored("reasoning is always read", True),
    "structured_outputs_config": _ignored("llguidance is the one for all grammars"),
    "structured_outputs_config.backend": _ignored("llguidance is the one for all grammars"),
    "guided_decoding_backend": _ignored("llguidance is the one for all grammars"),
    "fingerprint_mode": _value("answers have no system_fingerprint", "none"),
    "fingerprint_value": _value("answers have no system_fingerprint"),
    "cohere_is_reasoning_model": _ignored("there are no endpoints of Cohere's form", True),
    "cohere_format": _ignored("there are no endpoints of Cohere's form"),
    "enable_flash_late_interaction": _ignored("there is no late interaction", True),
}
MODEL = {
    "model": _same("the model may also stand first"),
    "tokenizer": _same(),
    "tokenizer_revision": _same(),
    "revision": _same(),
    "code_revision": _ignored("code from a model's repository is never run"),
    "trust_remote_code": _switch(
        "code from a model's repository is never run, only quire's and the transformers package's",
        False,
    ),
    "tokenizer_mode": _value("there is one tokenizer, from tokenizer.json", "auto"),
    "skip_tokenizer_init": _switch("the tokenizer is loaded if the model has one", False),
    "tokenizer_pool_size": _ignored("texts are tokenised in threads"),
    "renderer_num_workers": _ignored("templates run in processes, as many as are needed"),
    "hf_config_path": _value("change config.json's values by --hf-overrides"),
    "hf_overrides": _same("a JSON object; in Python a dictionary, not a function"),
    "hf_token": _value("set the environment variable HF_TOKEN"),
    "config_format": _value("config.json is read", "auto", "hf"),
    "rope_scaling": _value("give it by --hf-overrides"),
    "rope_theta": _value("give it by --hf-overrides"),
    "model_impl": _same("auto, quire, transformers; vllm counts as quire"),
    "model_class_overrides": _value("an architecture is one file here (docs/models.md)"),
    "dtype": _same(),
    "seed": _same(),
    "max_model_len": _same("auto and -1: what fits the memory"),
    "max_logprobs": _same(),
    "logprobs_mode": _value("logprobs are those before sampling's changes", "raw_logprobs"),
    "quantization": _same(
        "rounds the weights: fp8, int8, int4, none. Names of a checkpoint's own format (awq, gptq,"
        " compressed-tensors ...) count as absent: its files say it"
    ),
    "quantization_config": _value("--quantization and --quantization-group-size say it", "{}"),
    "allow_deprecated_quantization": _ignored("docs/quantisation.md lists what is read", True),
    "generation_config": _same("auto, or none (vllm is the same); no folder"),
    "override_generation_config": _same(),
    "runner": _same("auto, generate and pooling"),
    "convert": _same(),
    "task": _value("--runner and --convert say it", "auto", "generate"),
    "pooler_config": _same(
        "with seq_pooling_type or pooling_type, and use_activation or normalize"
    ),
    "enable_prompt_embeds": _switch("send prompts as text or token ids", False),
    "logits_processors": _same("names that installed packages bring (docs/extending.md), no paths"),
    "io_processor_plugin": _value("filter by --hooks (docs/extending.md)"),
    "disable_sliding_window": _switch("a model's windows are obeyed", False),
    "disable_cascade_attn": _ignored("answers do not depend on it", True),
    "use_fp64_gumbel": _ignored("a request's noise is the same bits everywhere", True),
    "enable_return_routed_experts": _switch("which experts were chosen is not told", False),
    "return_sampling_mask": _switch("it is not told", False),
    "enable_trace_replay": _switch("quire replay runs recordings (docs/recording.md)", False),
    "enable_sleep_mode": _switch("there is no sleep; a start maps the weights", False),
    "enable_cumem_allocator": _ignored(ONE_WAY, True),
    "enable_nccl_comm_suspend": _ignored("there is no sleep", True),
    "diffusion_config": _value("models write one token after the other", short="-dc"),
    "watermark_config": _value("answers are not marked"),
    "weight_transfer_config": _value("weights are those of the model's files"),
    "additional_config": _value("there is nothing that would read it", "{}"),
}
LOADING = {
    "load_format": _same("auto, safetensors, dummy; a GGUF file is known by its name"),
    "download_dir": _value("set the environment variable HF_HOME"),
    "safetensors_load_strategy": _ignored("weights are mapped from their files"),
    "safetensors_prefetch_num_threads": _ignored("weights are mapped from their files"),
    "safetensors_prefetch_block_size": _ignored("weights are mapped from their files"),
    "model_loader_extra_config": _value("weights are mapped from their files", "{}"),
    "max_parallel_loading_workers": _ignored("weights are mapped from their files"),
    "ignore_patterns": _ignored("only safetensors files and texts are fetched", several=True),
    "use_tqdm_on_load": _ignored("a terminal is shown a bar, a log is not", True),
    "pt_load_map_location": _ignored("weights are safetensors"),
}
CACHE = {
    "block_size": _same(),
    "gpu_memory_utilization": _same("--device-memory-utilization is the same"),
    "kv_cache_memory_bytes": _same(),
    "kv_cache_dtype": _same("auto, int8, fp8 (fp8_e4m3)"),
    "kv_cache_dtype_skip_layers": _value("all layers store alike"),
    "calculate_kv_scales": _switch("scales are the checkpoint's, or 1", False),
    "num_gpu_blocks_override": _value("use --kv-cache-memory-bytes"),
    "enable_prefix_caching": _same(),
    "prefix_caching_hash_algo": _same(
        "sha256_cbor is sha256 here; xxhash comes from a package (docs/extending.md)"
    ),
    "prefix_cache_retention_interval": _value("pin what must stay: --pin-prefix, /v1/prefixes"),
    "prefix_match_unit": _ignored("whole blocks are matched"),
    "kv_sharing_fast_prefill": _switch("all layers are computed", False),
    "kv_offloading_size": _value("use --kv-host-gb, in units of 10**9 bytes, not 2**30"),
    "kv_offloading_backend": _value("--kv-host-gb and --kv-disk-dir are quire's own", "native"),
    "swap_space": _value("swap space is as large as the KV pool", 0, 4),
    "mamba_backend": _ignored(ONE_WAY),
    "mamba_ssu_algorithm": _ignored(ONE_WAY),
    "mamba_block_size": _value("states are kept at the ends of blocks: --block-size"),
    "mamba_cache_dtype": _value(STATES, "auto"),
    "mamba_ssm_cache_dtype": _value(STATES, "auto"),
    "mamba_cache_mode": _ignored("which states are kept follows from what they are worth"),
    "enable_mamba_cache_stochastic_rounding": _switch(STATES, False),
    "mamba_cache_philox_rounds": _ignored(STATES),
    "use_replayssm": _switch(STATES, False),
    "replayssm_buffer_len": _ignored(STATES),
    "offload_backend": _ignored("weights stay on the device"),
    "cpu_offload_gb": _value("weights stay on the device", 0),
    "cpu_offload_params": _ignored("weights stay on the device", several=True),
    "offload_group_size": _value("weights stay on the device", 0),
    "offload_num_in_group": _ignored("weights stay on the device"),
    "offload_prefetch_step": _ignored("weights stay on the device"),
    "offload_params": _ignored("weights stay on the device", several=True),
}
SCHEDULER = {
    "max_num_seqs": _same("64 on a CPU, 256 on a GPU if absent"),
    "max_num_batched_tokens": _same(
        "if absent 8192 on a GPU, on a CPU what takes about 250 ms, as measured"
    ),
    "max_num_scheduled_tokens": _value("use --max-num-batched-tokens"),
    "max_num_active_seqs": _value("use --max-num-seqs"),
    "max_num_queued_reqs": _same(),
    "max_num_queued_tokens": _value("use --max-num-queued-reqs"),
    "long_prefill_token_threshold": _same(),
    "long_prefill_token_threshold_adaptive": _ignored("two-level serves short prompts first", True),
    "max_num_partial_prefills": _ignored("any number of prompts may be in a step"),
    "max_long_partial_prefills": _ignored("--long-prefill-token-threshold bounds one of them"),
    "scheduling_policy": _same(
        "vLLM's is fcfs. fcfs and priority are fifo here: a request's priority always counts"
    ),
    "scheduler_cls": _value("packages bring policies (docs/extending.md)"),
    "scheduler_reserve_full_isl": _ignored("--watermark keeps blocks free", True),
    "scheduler_delay_factor": _value("nothing is delayed", 0),
    "num_scheduler_steps": _value("--pipeline-depth says how many steps are in flight", 1),
    "num_lookahead_slots": _ignored("blocks for guesses are taken as there are some"),
    "preemption_mode": _same(),
    "watermark": _same("vLLM's is 0"),
    "enable_chunked_prefill": _switch("prompts are always computed in chunks", True),
    "prefill_schedule_interval": _value("prompts go on in each step", 1),
    "async_scheduling": _ignored("pipeline_depth says how many steps are in flight", True),
    "disable_async_output_proc": _ignored("texts are made beside the steps", True),
    "disable_hybrid_kv_cache_manager": _switch("windows have groups of their own", False),
    "use_v2_block_manager": _ignored("there is one way to manage blocks", True),
}
PARALLEL = {
    "tensor_parallel_size": _same(short="-tp"),
    "pipeline_parallel_size": _same(short="-pp"),
    "data_parallel_size": _same(short="-dp"),
    "decode_context_parallel_size": _same(short="-dcp"),
    "prefill_context_parallel_size": _value("long prompts are computed in chunks", 1, short="-pcp"),
    "dcp_comm_backend": _ignored(ONE_WAY),
    "dcp_q_replicate": _ignored(ONE_WAY, True),
    "dcp_kv_cache_interleave_size": _value("blocks are dealt out whole"),
    "cp_kv_cache_interleave_size": _value("blocks are dealt out whole"),
    "enable_expert_parallel": _same(short="-ep"),
    "enable_eplb": _switch("experts stay where they are", False),
    "eplb_config": _value("experts stay where they are", "{}"),
    "expert_placement_strategy": _value("experts are dealt out in their order", "linear"),
    "enable_ep_weight_filter": _ignored("a rank reads its own experts alone", True),
    "enable_elastic_ep": _switch("the number of ranks stays as it is", False),
    "all2all_backend": _ignored(ONE_WAY),
    "enable_dbo": _ignored(ONE_WAY, True),
    "dbo_decode_token_threshold": _ignored(ONE_WAY),
    "dbo_prefill_token_threshold": _ignored(ONE_WAY),
    "ubatch_size": _ignored(ONE_WAY),
    "enable_batch_sharded_sampling": _ignored("each rank samples its part of the tokens", True),
    "distributed_executor_backend": _same("auto, uni, mp, ray"),
    "nnodes": _same(short="-n"),
    "node_rank": _same(short="-r"),
    "master_addr": _same(),
    "master_port": _same(),
    "distributed_timeout_seconds": _ignored("--node-wait-s bounds the start, heartbeats the rest"),
    "cpu_distributed_timeout_seconds": _ignored("--node-wait-s bounds the start"),
    "data_parallel_rank": _value(COPIES, short="-dpn"),
    "data_parallel_start_rank": _value(COPIES, short="-dpr"),
    "data_parallel_size_local": _value(COPIES, short="-dpl"),
    "data_parallel_address": _value(COPIES, short="-dpa"),
    "data_parallel_rpc_port": _value(COPIES, short="-dpp"),
    "data_parallel_backend": _value("--distributed-executor-backend says it", "mp", short="-dpb"),
    "data_parallel_hybrid_lb": _switch(COPIES, False, short="-dph"),
    "data_parallel_external_lb": _switch(COPIES, False, short="-dpe"),
    "data_parallel_multi_port_external_lb": _switch(COPIES, False, short="-dpm"),
    "data_parallel_supervisor_port": _value(COPIES),
    "dp_supervisor_probe_interval_s": _ignored("/health tells of all copies"),
    "dp_supervisor_probe_timeout_s": _ignored("/health tells of all copies"),
    "dp_supervisor_probe_failure_threshold": _ignored("/health tells of all copies"),
    "dp_sync_interval": _ignored("copies do not wait for each other"),
    "disable_nccl_for_dp_synchronization": _ignored("copies do not wait for each other", True),
    "disable_custom_all_reduce": _ignored("there is one way to add", True),
    "device_ids": _value("set the environment variable CUDA_VISIBLE_DEVICES"),
    "numa_bind": _ignored("copies of a model share the cores out by themselves", True),
    "numa_bind_nodes": _value("use numactl"),
    "numa_bind_cpus": _value("use taskset"),
    "ray_workers_use_nsight": _switch("start a rank by nsys yourself", False),
    "worker_cls": _value("there is one kind of worker", "auto"),
    "worker_extension_cls": _value("there is one kind of worker", ""),
    "enable_fault_tolerance": _switch("use --restart-engine", False),
    "fault_tolerance_config": _value("use --restart-engine", "{}"),
    "watchdog_config": _ignored("the supervisor watches the engine's heartbeat"),
}
KERNELS = {
    "device": _same(),
    "enforce_eager": _same("of no effect on a CPU, where nothing is recorded"),
    "attention_backend": _same("auto, cpu, torch, reference, triton"),
    "attention_config": _value("--attention-backend says it", "{}", short="-ac"),
    "compilation_config": VllmSetting(COMPILATION, short=("-cc",)),
    "optimization_level": VllmSetting(COMPILATION, short=("-O",)),
    "performance_mode": _ignored("--max-num-batched-tokens trades latency for throughput"),
    "cudagraph_capture_sizes": _ignored("sizes are recorded as they are used", several=True),
    "max_cudagraph_capture_size": _ignored("sizes are recorded as they are used"),
    "max_seq_len_to_capture": _ignored("graphs are for every length"),
    "cudagraph_metrics": _switch("they are not counted", False),
    "kernel_config": _ignored(ONE_WAY),
    "ir_op_priority": _ignored(ONE_WAY),
    "moe_backend": _ignored(ONE_WAY),
    "linear_backend": _ignored("the fastest that a device has is taken"),
    "gdn_prefill_backend": _ignored(ONE_WAY),
    "kda_prefill_backend": _ignored(ONE_WAY),
    "enable_flashinfer_autotune": _ignored("kernels are quire's own", True),
    "enable_bf16x3_router_gemm": _ignored("kernels are quire's own", True),
}
SPECULATION = {
    "speculative_config": _same("methods ngram, suffix, draft_model, eagle3", short="-sc"),
    "spec_method": _part("speculative_config", "the method of speculative_config"),
    "spec_model": _part("speculative_config", "the model of speculative_config"),
    "spec_tokens": _part("speculative_config", "its num_speculative_tokens"),
    "speculative_model": _value("use --speculative-config"),
    "num_speculative_tokens": _value("use --speculative-config"),
}
ADAPTERS = {
    "enable_lora": _switch(NO_ADAPTERS, False),
    "lora_modules": VllmSetting(NO_ADAPTERS, (), several=True),
    "default_mm_loras": _value(NO_ADAPTERS),
    "max_loras": _ignored(NO_ADAPTERS),
    "max_lora_rank": _ignored(NO_ADAPTERS),
    "max_cpu_loras": _ignored(NO_ADAPTERS),
    "lora_dtype": _ignored(NO_ADAPTERS),
    "lora_extra_vocab_size": _ignored(NO_ADAPTERS),
    "lora_target_modules": _ignored(NO_ADAPTERS, several=True),
    "fully_sharded_loras": _ignored(NO_ADAPTERS, True),
    "specialize_active_lora": _ignored(NO_ADAPTERS, True),
    "enable_tower_connector_lora": _ignored(NO_ADAPTERS, True),
    "enable_mixed_moe_lora_format": _ignored(NO_ADAPTERS, True),
    "enable_moe_shared_loras": _ignored(NO_ADAPTERS, True),
}
MEDIA = {
    "language_model_only": _ignored(TEXT, True),
    "limit_mm_per_prompt": _ignored(TEXT),
    "allowed_local_media_path": _value(TEXT, ""),
    "allowed_media_domains": _ignored(TEXT, several=True),
    "media_io_kwargs": _ignored(TEXT),
    "enable_mm_embeds": _switch(TEXT, False),
    "interleave_mm_strings": _ignored(TEXT, True),
    "skip_mm_profiling": _ignored(TEXT, True),
    "disable_chunked_mm_input": _ignored(TEXT, True),
    "mm_processor_kwargs": _ignored(TEXT),
    "mm_processor_cache_gb": _ignored(TEXT),
    "mm_processor_cache_type": _ignored(TEXT),
    "mm_processor_device": _ignored(TEXT),
    "mm_hasher_algorithm": _ignored(TEXT),
    "mm_shm_cache_max_object_size_mb": _ignored(TEXT),
    "mm_encoder_only": _switch(TEXT, False),
    "mm_encoder_tp_mode": _ignored(TEXT),
    "mm_encoder_attn_backend": _ignored(TEXT),
    "mm_encoder_attn_dtype": _ignored(TEXT),
    "mm_encoder_fp8_scale_path": _ignored(TEXT),
    "mm_encoder_fp8_scale_save_path": _ignored(TEXT),
    "mm_encoder_fp8_scale_save_margin": _ignored(TEXT),
    "mm_tensor_ipc": _ignored(TEXT),
    "mm_ipc_gpu_memory_gb": _ignored(TEXT),
    "mm_device_do_normalize": _ignored(TEXT, True),
    "video_pruning_rate": _ignored(TEXT),
    "video_pruning_method": _ignored(TEXT),
}
OBSERVATION = {
    "log_level": _same(),
    "disable_log_stats": _same(),
    "uvicorn_log_level": _ignored("--log-level is for everything"),
    "disable_uvicorn_access_log": _ignored("there is no access log", True),
    "disable_access_log_for_endpoints": _ignored("there is no access log"),
    "logging_config": _ignored(ONE_LOG),
    "log_config_file": _ignored(ONE_LOG),
    "aggregate_engine_logging": _ignored("each copy has its own line", True),
    "log_error_stack": _ignored("errors of the server are logged with their stack", True),
    "enable_log_requests": _switch(NO_REQUEST_LOG, False),
    "disable_log_requests": _ignored(NO_REQUEST_LOG, True),
    "enable_log_outputs": _switch(NO_REQUEST_LOG, False),
    "enable_log_deltas": _ignored(NO_REQUEST_LOG, True),
    "max_log_len": _ignored(NO_REQUEST_LOG),
    "show_hidden_metrics_for_version": _ignored("no metric is hidden"),
    "custom_histogram_buckets": _value("the buckets are fixed"),
    "otlp_traces_endpoint": _same("OTLP over HTTP; vLLM's is gRPC unless its environment says so"),
    "collect_detailed_traces": _value("use --record and quire trace (docs/recording.md)"),
    "kv_cache_metrics": _switch("/v1/requests/ID tells what was cached", False),
    "kv_cache_metrics_sample": _ignored("/v1/requests/ID tells what was cached"),
    "enable_mfu_metrics": _switch("quire fit tells what a device could do", False),
    "enable_layerwise_nvtx_tracing": _switch("quire verify compares layer by layer", False),
    "enable_logging_iteration_details": _switch("--record keeps each step", False),
    "jit_monitor_mode": _ignored("compilations are not watched"),
    "jit_monitor_verbose": _ignored("compilations are not watched", True),
    "profiler_config": _value("use --record and quire trace (docs/recording.md)", "{}"),
}
TRANSFERS = {
    "kv_transfer_config": _same("blocks go through --kv-store (docs/handover.md)"),
    "kv_events_config": _same("no tokens unless it says token_ids; the default is loopback"),
    "ec_transfer_config": _value(TEXT),
    "ec_manager_config": _value(TEXT),
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
