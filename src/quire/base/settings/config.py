"""Configuration: a few frozen dataclasses. The command line, its help and docs/use/settings.md are
generated from them.

The metadata of each field holds its help and its unit. `None` means that the engine derives the
value when it starts.
"""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from quire.base.clock import is_duration
from quire.base.errors import ConfigError
from quire.base.plugins import (
    ATTENTION_BACKENDS,
    EXTENSIONS,
    GPU_ATTENTION,
    HOOKS,
    LOGITS_PROCESSORS,
    OWN_EXTENSIONS,
    POLICIES,
)
from quire.base.settings.cache_config import CacheConfig
from quire.base.settings.fields import (
    check,
    check_choices,
    check_duration,
    check_installed,
    json_object,
    list_of,
    number_of,
    setting,
)
from quire.base.settings.kv_events import parse_kv_events
from quire.base.settings.lora import LoraConfig, ServedAdapters
from quire.base.settings.parallel import ParallelConfig
from quire.base.settings.secrets import Secret, public_value, wrap_secrets
from quire.base.settings.server_media import ServerMedia
from quire.base.settings.server_reports import ServerReports
from quire.base.settings.several_models import SeveralModels
from quire.base.settings.speculation import parse_speculation

# vLLM's names.
MODEL_IMPL_ALIASES = {"vllm": "quire"}
CHECKPOINT_FORMATS = (
    "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt", "fbgemm_fp8",
    "mxfp4",
)  # fmt: skip
DTYPE_ALIASES = {
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16",
    "float": "float32", "fp32": "float32", "f32": "float32",
}  # fmt: skip
JSON_OF_MODEL = (
    "override_generation_config", "default_chat_template_kwargs", "hf_overrides", "pooler_config",
)  # fmt: skip
# Settings that Python callers may give as dictionaries
JSON_SETTINGS = (
    "speculative_config", "kv_events_config", "kv_transfer_config", "limit_mm_per_prompt",
    *JSON_OF_MODEL,
)  # fmt: skip
AUTO_LENGTH = -1  # max_model_len that fits the memory
AT_LEAST_ONE = (  # settings of the scheduler
    "max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs", "pipeline_depth",
    "encoder_cache_tokens",
)  # fmt: skip


def row_capacity(max_model_len: int, runner: str) -> int:
    """Return the row capacity in tokens. A pooling row may hold a prompt of the full length, and
    needs one extra slot for its placeholder output token."""
    return max_model_len + (runner == "pooling")


@dataclass(frozen=True)
class ModelConfig:
    """The model, its precision and its tokenizer."""

    model: str = setting(
        "demo",
        "model: a directory, GGUF file, Hugging Face id, the built-in `demo`, or random weights"
        " of a shape such as `shape:qwen3-0.6b`",
    )
    tokenizer: str | None = setting(
        None, "tokenizer: a directory, GGUF file or Hugging Face id; by default the model's own"
    )
    revision: str | None = setting(None, "branch, tag or commit of the model on Hugging Face")
    tokenizer_revision: str | None = setting(
        None,
        "branch, tag or commit of the tokenizer; by default `--revision` for the model's own"
        " tokenizer",
    )
    hf_overrides: str | None = setting(
        None,
        'JSON merged into config.json of the model, such as `{"rope_theta": 1e6}`',
    )
    runner: str = setting(
        "auto",
        "task of the model: `generate` text, or `pooling` for embeddings, classes and scores;"
        " `auto` follows the architecture",
        choices=("auto", "generate", "pooling"),
    )
    convert: str = setting(
        "auto",
        "output of a pooling model: `embed` or `classify`; `auto` follows the architecture",
        choices=("auto", "none", "embed", "classify"),
    )
    pooler_config: str | None = setting(
        None,
        "JSON that replaces the model's pooling settings, such as"
        ' `{"seq_pooling_type": "LAST", "use_activation": true}`; types are LAST, MEAN and CLS',
    )
    dtype: str = setting(
        "auto",
        "data type of weights and activations; `auto` takes the checkpoint's, or float32 on a CPU"
        " without native bfloat16",
        choices=("auto", "float32", "bfloat16", "float16", "float64"),
        words=DTYPE_ALIASES,
    )
    model_impl: str = setting(
        "auto",
        "model code: quire's, or the slower one of the transformers package"
        " (`quire[transformers]`); `auto` prefers quire's",
        choices=("auto", "quire", "transformers"),
        words=MODEL_IMPL_ALIASES,
    )
    torch_compile: bool = setting(
        False,
        "compile models of transformers' classes with torch.compile instead of using quire's"
        " operations; the first steps take minutes",
    )
    max_model_len: int | None = setting(
        None,
        "maximum length of a sequence, prompt and output together; `auto` (or -1) fits it to"
        " memory; by default the model's limit",
        unit="tokens",
        words={"auto": AUTO_LENGTH},
    )
    load_format: str = setting(
        "auto",
        "format of the weights; `dummy` fills them with seeded random numbers",
        choices=("auto", "safetensors", "dummy"),
    )
    chat_template: str | None = setting(
        None, "chat template that replaces the model's: a file, or the template itself"
    )
    tool_call_parser: str = setting(
        "auto",
        "format of the model's tool calls; `auto` detects it from the chat template, `none`"
        " disables parsing",
    )
    reasoning_parser: str = setting(
        "auto",
        "format of the model's reasoning; `auto` detects it from the chat template, `none`"
        " disables parsing",
    )
    generation_config: str = setting(
        "auto",
        "source of sampling defaults: `auto` reads the model's generation_config.json, `none`"
        " ignores it",
    )
    override_generation_config: str | None = setting(
        None,
        "JSON that replaces sampling defaults of the model, such as"
        ' `{"temperature": 0.5, "eos_token_id": [1, 2]}`',
    )
    default_chat_template_kwargs: str | None = setting(
        None,
        'JSON with default variables of the chat template, such as `{"enable_thinking": false}`',
    )
    enable_return_routed_experts: bool = setting(
        False, "return the experts of each token; for mixtures on a CPU; turns prefix hits off"
    )
    stream_interval: int = setting(
        1,
        "output tokens per streamed chunk; the first token is sent at once, and requests may set"
        " a larger value",
        unit="tokens",
    )
    seed: int = setting(0, "seed of requests that set none, and of dummy weights")
    quantization: str | None = setting(
        None,
        "quantization of the weights at load; `none` dequantizes them; by default as in the"
        " checkpoint",
        choices=("none", "fp8", "int8", "int4"),
        words=dict.fromkeys(CHECKPOINT_FORMATS, "as in the checkpoint"),
    )
    quantization_group_size: int | None = setting(
        None,
        "inputs per scale: 32, 64, 128, or 0 for one scale per output (int8, fp8); by default 128"
        " for int8, 32 for int4",
    )
    quantized_head: str = setting(
        "auto",
        "quantization of the output head of a quantized model; `auto` is int8, or fp8 with fp8"
        " weights",
        choices=("auto", "none", "fp8", "int8", "int4"),
    )
    weight_cache: str = setting(
        "auto",
        "directory of packed weights for faster starts; `auto` is ~/.cache/quire/weights for models"
        " from 64 MB, `off` disables it",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        impl = MODEL_IMPL_ALIASES.get(self.model_impl, self.model_impl)
        object.__setattr__(self, "model_impl", impl)
        if self.quantization in CHECKPOINT_FORMATS:  # the checkpoint's files contain the method
            object.__setattr__(self, "quantization", None)
        for name in JSON_OF_MODEL:
            json_object(name, getattr(self, name))

    @property
    def row_capacity(self) -> int:
        """Return the number of tokens that a row can hold, once max_model_len is derived."""
        return row_capacity(self.max_model_len or 0, self.runner)


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and policies of the scheduler."""

    max_num_seqs: int | None = setting(
        None, "maximum number of running sequences; by default 64 on a CPU, 256 on a GPU"
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "maximum number of tokens in one step; by default 8192 on a GPU, and 16 to 256 on a CPU"
        " (about 250 ms)",
        unit="tokens",
    )
    max_num_queued_reqs: int | None = setting(
        None, "maximum number of waiting requests; more get status 503; by default no limit"
    )
    scheduling_policy: str = setting(
        "two-level",
        "order of waiting requests: `fifo` (arrival), `srtf` (shortest remaining prompt), or"
        " `two-level` (`srtf` within batches of 8 arrivals); or `FILE.py:CLASS`",
        choices=("fifo", "srtf", "two-level"),
        words={"fcfs": "fifo", "priority": "fifo"},
        plugins=POLICIES,
    )
    scheduler_extensions: tuple[str, ...] = setting(
        (), "rules of the scheduler: `sessions`, rules of packages, or `FILE.py:CLASS`"
    )
    preemption_mode: str = setting(
        "auto",
        "KV cache of a preempted sequence: `recompute` it later, `swap` it to host memory, or"
        " `auto` for the cheaper of both",
        choices=("auto", "recompute", "swap"),
    )
    long_prefill_token_threshold: int = setting(
        0,
        "maximum number of tokens of one prompt in one step; 0 leaves only the limit of the step",
        unit="tokens",
    )
    max_encoder_tokens: int = setting(
        0,
        "maximum number of tokens of images and videos that one step encodes, if it encodes more"
        " than one item; 0 means max_num_batched_tokens",
        unit="tokens",
    )
    encoder_cache_tokens: int = setting(
        8192,
        "encoder outputs of images and videos that are kept, also the longest item; only used by"
        " models that take media",
        unit="tokens",
    )
    reuse_partial_blocks: bool = setting(
        False,
        "cache the last block of an ended request even if it is not full; then the next turn of"
        " a conversation computes only new tokens",
    )
    pipeline_depth: int | None = setting(
        None,
        "steps in flight; 1 waits for each result, 2 plans the next step meanwhile; by default 1"
        " on a CPU, 2 on a GPU",
    )


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of an engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    device: str = setting("auto", "device that runs the model", choices=("auto", "cpu", "cuda"))
    attention_backend: str = setting(
        "auto",
        "attention kernels: `cpu` (C++ core), `torch`, `reference` or `triton` (GPU); `auto` takes"
        " the fastest. Other names: `docs/inside/gpu.md`",
        choices=("auto", "cpu", "torch", "reference", *GPU_ATTENTION),
        plugins=ATTENTION_BACKENDS,
    )
    compilation: str = setting(
        "full",
        "CUDA graphs of decoding steps: one `full` graph, or `piecewise` graphs between attention"
        " calls",
        choices=("full", "piecewise"),
    )
    enforce_eager: bool = setting(False, "launch each kernel by itself, without CUDA graphs")
    graph_warmup: bool = setting(False, "record graphs for all steps before the server is ready")
    deterministic: bool = setting(
        False,
        "make results bit-identical in any batch, chunking or preemption, and with prefix hits"
        " (GPU with triton; slower)",
    )
    native_launch: bool = setting(False, "launch recorded GPU steps in C++; not yet run on a GPU")
    debug_transfers: bool = setting(False, "fail when a step makes the host wait for the GPU")
    logits_processors: tuple[str, ...] = setting(
        (), "logits processors that requests may name, of packages or `FILE.py:CLASS`"
    )
    speculative_config: str | None = setting(
        None,
        "method of speculative decoding; for example"
        ' `{"method": "ngram", "num_speculative_tokens": 4}`; methods are ngram, suffix,'
        " draft_model, eagle3, mtp, forced and none",
    )
    kv_events_config: str | None = setting(
        None,
        "JSON that publishes changes of the prefix cache over ZeroMQ, in vLLM's form:"
        ' `{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}` (`quire[events]`)',
    )
    max_logprobs: int = setting(
        20, "maximum number of log-probabilities that a request may ask for; -1 removes the limit"
    )
    disable_log_stats: bool = setting(False, "leave the memory plan and statistics out of the log")
    record: str | None = setting(
        None,
        "directory for a recording of the scheduler's inputs and plans, without text, for `quire"
        " replay`, `quire explain` and `quire trace`",
    )
    record_tokens: bool = setting(
        False, "add token ids to the recording, so that `quire replay` can run the model again"
    )
    record_max_mb: int = setting(256, "limit of a recording; its oldest part goes first", unit="MB")

    def __post_init__(self) -> None:
        cache, scheduler = self.cache, self.scheduler
        check(1 <= cache.block_size <= 256, "block_size", cache.block_size, "from 1 to 256")
        share = cache.gpu_memory_utilization
        check(0 < share <= 1, "gpu_memory_utilization", share, "in (0, 1]")
        check(0 <= cache.watermark < 1, "watermark", cache.watermark, "in [0, 1)")
        for name in AT_LEAST_ONE:
            value = getattr(scheduler, name)
            check(value is None or value >= 1, name, value, "at least 1")
        num = scheduler.max_encoder_tokens
        check(num >= 0, "max_encoder_tokens", num, "at least 0; 0 means max_num_batched_tokens")
        length = self.model.max_model_len
        fits = length is None or length >= 1 or length == AUTO_LENGTH
        check(fits, "max_model_len", length, "at least 1, or auto (-1)")
        interval = self.model.stream_interval
        check(interval >= 1, "stream_interval", interval, "at least 1")
        pool = cache.kv_cache_memory_bytes
        check(pool is None or pool > 0, "kv_cache_memory_bytes", pool, "above 0")
        check(self.record_max_mb >= 1, "record_max_mb", self.record_max_mb, "at least 1")
        check_installed(LOGITS_PROCESSORS, self.logits_processors)
        check_installed(EXTENSIONS, self.scheduler.scheduler_extensions, OWN_EXTENSIONS)
        parse_speculation(self.speculative_config)
        parse_kv_events(self.kv_events_config)
        if self.lora.enable_lora and self.parallel.pipeline_parallel_size > 1:
            raise ConfigError(
                "enable_lora: adapters do not work with stages; remove pipeline_parallel_size, or"
                " use tensor_parallel_size."
            )
        check_choices(self, self.model, self.cache, self.scheduler, self.parallel)


@dataclass(frozen=True)
class ServerConfig(ServerMedia, ServerReports, SeveralModels, ServedAdapters):
    """The HTTP server and its processes (`quire serve`)."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 is every network interface")
    port: int = setting(8000, "TCP port to listen on; 0 picks a free one")
    served_model_name: tuple[str, ...] = setting(
        (),
        "model names that requests may use; responses show the first; by default the name of the"
        " model",
    )
    api_key: tuple[str, ...] = setting(
        (),
        "API keys that clients send as `Authorization: Bearer KEY`; without any the server is open",
        secrecy=Secret,
    )
    urgent_api_key: tuple[str, ...] = setting(
        (),
        "API keys whose requests may set a priority below 0; on a server without keys every"
        " request may",
        secrecy=Secret,
    )
    admin_api_key: tuple[str, ...] = setting(
        (),
        "API keys that may reset the prefix cache, abort other keys' requests and watch the engine",
        secrecy=Secret,
    )
    pin_share: float | None = setting(
        None,
        "share of pinned and retained memory that one API key may use, above 0 to 1; by default an"
        " equal share",
    )
    uds: str | None = setting(None, "Unix socket to listen on, instead of a host and port")
    root_path: str = setting("", "path prefix that a reverse proxy strips, such as `/quire`")
    api_server_count: int = setting(1, "number of processes that answer HTTP")
    shutdown_timeout: float = setting(
        30.0,
        "time that open requests get to finish after SIGTERM; 0 aborts them at once",
        unit="seconds",
    )
    restart_engine: bool = setting(False, "restart a dead engine instead of stopping the server")
    max_body_bytes: int = setting(16 << 20, "maximum size of a request body", unit="bytes")
    response_store_bytes: int = setting(
        64 << 20,
        "memory of each API process for stored `/v1/responses`; the oldest are dropped first; 0"
        " stores none",
        unit="bytes",
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "web origins that browsers may call from (CORS); `*` allows all"
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "host names that requests may address, besides IP addresses and localhost; `*` allows all",
    )
    page: bool = setting(True, "serve the web page with chat, tokens and engine view at `/`")
    response_role: str = setting("assistant", "role of messages in chat completions")
    exclude_tools_when_tool_choice_none: bool = setting(
        False, "remove the tools from the prompt of a request with `tool_choice` `none`"
    )
    enable_force_include_usage: bool = setting(
        False, "end every stream with its token usage, even without `include_usage`"
    )
    enable_per_request_metrics: bool = setting(
        False, "add the timing of each request to its response, as `metrics`"
    )
    disable_fastapi_docs: bool = setting(False, "disable `/docs` and `/openapi.json`")
    return_tokens_as_token_ids: bool = setting(
        False, "show tokens of log-probabilities as `token_id:N` by default"
    )
    sse_keep_alive_interval: float = setting(
        0.0,
        "silence in a stream before a comment is sent, so that proxies keep the connection; 0"
        " sends none",
        unit="seconds",
    )
    strict_fields: bool = setting(
        False, "reject unknown fields of a request body, instead of naming them in a header"
    )
    trust_request_chat_template: bool = setting(False, "let requests bring their own chat template")
    hooks: tuple[str, ...] = setting(
        (),
        "hooks, such as safety filters, that see prompts and outputs in this order; of packages or"
        " `FILE.py:CLASS`",
    )
    hook_timeout: float = setting(
        5.0, "time limit of one hook call; the request fails after it", unit="seconds"
    )
    files_dir: str | None = setting(
        None, "directory that stores `/v1/files` and `/v1/batches`; without it both are disabled"
    )
    files_gb: float = setting(10.0, "maximum size of `--files-dir`", unit="GB")
    requests_per_minute: tuple[int, ...] = setting(
        (), "request limit of an API key, one number for all keys or one per key; 0 is no limit"
    )
    tokens_per_minute: tuple[int, ...] = setting(
        (),
        "limit of prompt and output tokens of an API key, one number for all or one per key; 0 is"
        " no limit",
    )
    ssl_keyfile: str | None = setting(None, "PEM file with the private key for HTTPS")
    ssl_certfile: str | None = setting(None, "PEM file with the certificate for HTTPS")

    @property
    def max_bytes_with_images(self) -> int:
        """Return the maximum size of a request body with base64 images, in bytes."""
        return self.max_body_bytes + self.max_media_bytes * 4 // 3

    def __post_init__(self) -> None:
        ServerMedia.__post_init__(self)
        SeveralModels.__post_init__(self)
        ServedAdapters.__post_init__(self)
        wrap_secrets(self)
        check(0 <= self.port < 65536, "port", self.port, "from 0 to 65535")
        check(self.api_server_count >= 1, "api_server_count", self.api_server_count, "at least 1")
        path = self.root_path
        is_path = not path or (path.startswith("/") and not path.endswith("/"))
        check(is_path, "root_path", path, "empty, or like /quire")
        origins = [
            part for origin in self.allowed_origins for part in list_of("allowed_origins", origin)
        ]
        object.__setattr__(self, "allowed_origins", tuple(origins))
        hosts = self.allowed_hosts
        is_name = all(name and not set(name) & set("/:@ ") for name in hosts)
        check(is_name, "allowed_hosts", hosts, "host names without scheme and port, or *")
        check_duration("shutdown_timeout", self.shutdown_timeout, "to end at once")
        check_duration("sse_keep_alive_interval", self.sse_keep_alive_interval, "for none")
        check(self.max_body_bytes >= 1024, "max_body_bytes", self.max_body_bytes, "at least 1024")
        store_bytes = self.response_store_bytes
        check(store_bytes >= 0, "response_store_bytes", store_bytes, "at least 0")
        share = self.pin_share
        check(share is None or 0 < share <= 1, "pin_share", share, "in (0, 1]")
        for name in ("urgent_api_key", "admin_api_key"):
            keys = set(getattr(self, name))
            if unknown := keys - set(self.api_key):  # not shown, because keys are secrets
                raise ConfigError(
                    f"{name} has {len(unknown)} of {len(keys)} keys that are not in api_key; add"
                    " them to api_key."
                )
        limit = self.hook_timeout
        check(limit > 0 and is_duration(limit), "hook_timeout", limit, "above 0, in seconds")
        check_installed(HOOKS, self.hooks)
        check(0 < self.files_gb < 1 << 20, "files_gb", self.files_gb, "above 0, and in GB")
        self._check_rates()
        pair = (self.ssl_keyfile is None) == (self.ssl_certfile is None)
        check(pair, "ssl_certfile", self.ssl_certfile, "given together with ssl_keyfile")

    def _check_rates(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute"):
            values, num_keys = getattr(self, name), len(self.api_key)
            check(min(values, default=0) >= 0, name, values, "0 (no limit) or more")
            if len(values) > 1 and len(values) != num_keys:
                raise ConfigError(
                    f"{name} has {len(values)} numbers for {num_keys} API keys; give one number, or"
                    " one per key."
                )

    @property
    def rate_limits(self) -> list[tuple[int, int]]:
        """Return (requests, tokens) per minute for each key; 0 is no limit. A server without keys
        has one pair. The list is empty if no limit is set."""
        given = (self.requests_per_minute, self.tokens_per_minute)
        num = len(self.api_key) or 1
        pairs = [values if len(values) > 1 else (values or (0,)) * num for values in given]
        return list(zip(*pairs, strict=True)) if any(map(any, pairs)) else []

    @cached_property
    def pin_share_of_key(self) -> float:
        """Return a key's share of the memory for pinned and retained requests; 1.0 without keys."""
        if not self.api_key:
            return 1.0
        return self.pin_share or 1 / len(set(self.api_key))


SECTIONS: Mapping[str, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "lora": LoraConfig,
}


def config_from_flat(**settings: Any) -> EngineConfig:
    """Build an EngineConfig from flat names, as in `LLM(model, max_model_len=...)`.

    Raises ConfigError for an unknown name.
    """
    parts: dict[str, dict[str, Any]] = {part: {} for part in (*SECTIONS, "")}
    owners = {
        item.name: (part, item.metadata["words"])
        for part, cls in SECTIONS.items()
        for item in dataclasses.fields(cls)
    }
    top = {item.name for item in dataclasses.fields(EngineConfig)} - SECTIONS.keys()
    for name, given in settings.items():
        is_json = name in JSON_SETTINGS and isinstance(given, Mapping)
        value = json.dumps(given) if is_json else given
        if name in owners:
            part, words = owners[name]
            parts[part][name] = number_of(name, value, words) if words else value
        elif name in top:
            parts[""][name] = value
        else:
            known = sorted(top | owners.keys())
            close = difflib.get_close_matches(name, known, n=1)
            hint = (
                f"did you mean {close[0]}?" if close else f"the settings are: {', '.join(known)}."
            )
            raise ConfigError(f"there is no setting {name!r}; {hint}")
    sections = {part: cls(**parts[part]) for part, cls in SECTIONS.items()}
    return EngineConfig(**sections, **parts[""])


def flat_settings(config: EngineConfig) -> dict[str, Any]:
    """Return all settings by name, without their sections."""
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(config).items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


def public_settings(config: EngineConfig) -> dict[str, Any]:
    """Return all settings by name for display: plain data with secrets masked."""
    return {name: public_value(value) for name, value in flat_settings(config).items()}
