"""Configuration: a few frozen dataclasses. The command line and its help are made from them.

Each field carries its help, and its unit where it has one, in the dataclass field's metadata;
`None` means "derived when the engine starts", by the function that the help names.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.base.cache_config import CacheConfig
from quire.base.config_checks import check, check_choices, check_duration, check_installed
from quire.base.durations import is_duration
from quire.base.errors import ConfigError
from quire.base.kv_events import parse_kv_events
from quire.base.parallel import ParallelConfig
from quire.base.plugins import (
    ATTENTION_BACKENDS,
    HOOKS,
    LOGITS_PROCESSORS,
    POLICIES,
)
from quire.base.secrets import Secret, SecretUrl, public_value, wrap_secrets
from quire.base.settings import json_object, number_of, setting
from quire.base.several_models import SeveralModels
from quire.base.speculation import parse_speculation

# vLLM's names.
MODEL_IMPL_ALIASES = {"vllm": "quire"}
CHECKPOINT_FORMATS = (
    "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt", "fbgemm_fp8",
    "mxfp4",
)  # fmt: skip
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
JSON_OF_MODEL = (
    "override_generation_config", "default_chat_template_kwargs", "hf_overrides", "pooler_config",
)  # fmt: skip
# Which Python may give as dictionaries
JSON_SETTINGS = ("speculative_config", "kv_events_config", "kv_transfer_config", *JSON_OF_MODEL)
AUTO_LENGTH = -1  # max_model_len: as long as fits the memory


def most_tokens(max_model_len: int, runner: str) -> int:
    """Return the most tokens that a row holds: one that pools has room for a prompt of the whole
    length, behind which nothing is sampled, and for what stands for that."""
    return max_model_len + (runner == "pooling")


@dataclass(frozen=True)
class ModelConfig:
    """Which model, in which precision, with which tokenizer."""

    model: str = setting(
        "demo",
        "directory, GGUF file, Hugging Face id, `demo`, or a named shape such as shape:qwen3-0.6b",
    )
    tokenizer: str | None = setting(
        None, "directory, GGUF file or id of the tokenizer; the model's if absent"
    )
    revision: str | None = setting(None, "branch, tag or commit on the hub")
    tokenizer_revision: str | None = setting(
        None, "the same of the tokenizer; the model's if absent and the tokenizer is the model's"
    )
    hf_overrides: str | None = setting(
        None,
        "values in place of those of the model's config.json, as JSON; objects in it are merged:"
        ' {"rope_theta": 1e6, "text_config": {"sliding_window": null}}',
    )
    runner: str = setting(
        "auto",
        "whether the model generates text or pools hidden states to embeddings, classes or scores;"
        " auto is told by its architecture's name and by sentence-transformers' files",
        choices=("auto", "generate", "pooling"),
    )
    convert: str = setting(
        "auto",
        "what a model that pools gives; auto is told by its architecture's name",
        choices=("auto", "none", "embed", "classify"),
    )
    pooler_config: str | None = setting(
        None,
        "how a model pools, in place of what its files say, as JSON:"
        ' {"seq_pooling_type": "LAST", "use_activation": true}; the type is LAST, MEAN or CLS',
    )
    dtype: str = setting(
        "auto",
        "of weights and activations; auto is the checkpoint's, and float32 on a CPU without"
        " native bfloat16",
        choices=("auto", "float32", "bfloat16", "float16", "float64", *DTYPE_ALIASES),
    )
    model_impl: str = setting(
        "auto",
        "whose code computes the model: quire's, or a class of the transformers package, slower"
        " (needs quire[transformers]); auto is quire's where it has the model's type",
        choices=("auto", "quire", "transformers", *MODEL_IMPL_ALIASES),
    )
    torch_compile: bool = setting(
        False,
        "let torch compile a class of transformers, which takes minutes at the first steps, instead"
        " of translating it into quire's operations",
    )
    max_model_len: int | None = setting(
        None,
        "longest sequence, prompt and output together; the model's limit if absent, and with auto"
        " (or -1) what of it fits the memory",
        unit="tokens",
        words={"auto": AUTO_LENGTH},
    )
    load_format: str = setting(
        "auto",
        "dummy fills the weights with seeded random numbers",
        choices=("auto", "safetensors", "dummy"),
    )
    chat_template: str | None = setting(None, "file or text that replaces the model's template")
    tool_call_parser: str = setting(
        "auto",
        "how the model writes calls of tools; auto is told from its chat template, none reads none"
        " (docs/use/tools.md)",
    )
    reasoning_parser: str = setting(
        "auto",
        "how the model marks its reasoning; auto is told from its chat template, none tells none"
        " apart",
    )
    generation_config: str = setting(
        "auto",
        "auto takes sampling defaults from the model's generation_config.json; `none` does not",
    )
    override_generation_config: str | None = setting(
        None,
        'sampling defaults and ends of sequences in place of the model\'s, as JSON: {"temperature":'
        ' 0.5, "eos_token_id": [1, 2]}',
    )
    default_chat_template_kwargs: str | None = setting(
        None,
        'variables of the chat template that requests do not set, as JSON: {"enable_thinking":'
        " false}",
    )
    stream_interval: int = setting(
        1,
        "output tokens that a stream gathers before it sends them; the first comes at once, and"
        " what there is at the end. Requests may ask for more",
        unit="tokens",
    )
    seed: int = setting(0, "of requests that bring none, and of dummy weights")
    quantization: str | None = setting(
        None,
        "store the weights in 8 or 4 bits (CPUs with the C++ core, which multiplies in integers but"
        " for fp8; GPUs with triton); none takes the dtype; if absent they are as in the model's"
        " files, whose own format may be named as vLLM does it",
        choices=("none", "fp8", "int8", "int4", *CHECKPOINT_FORMATS),
    )
    quantization_group_size: int | None = setting(
        None,
        "inputs that share a scale: 32, 64, 128, or for int8 and fp8 0, which is all of an"
        " output's; if absent 128 for int8, 32 for int4",
    )
    quantized_head: str = setting(
        "auto",
        "the head's weights where the others are quantised; auto is int8, or fp8 where they are;"
        " none leaves them",
        choices=("auto", "none", "fp8", "int8", "int4"),
    )
    weight_cache: str = setting(
        "auto",
        "directory for packed weights, which the next start maps instead of reading the model's"
        " (CPUs with the C++ core); auto is ~/.cache/quire/weights for models of 64 MB and more"
        " without dummy weights; off keeps none",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        impl = MODEL_IMPL_ALIASES.get(self.model_impl, self.model_impl)
        object.__setattr__(self, "model_impl", impl)
        if self.quantization in CHECKPOINT_FORMATS:  # the files say it
            object.__setattr__(self, "quantization", None)
        for name in JSON_OF_MODEL:
            json_object(name, getattr(self, name))

    @property
    def most_tokens(self) -> int:
        """Return the most tokens that a row holds, once the length is derived."""
        return most_tokens(self.max_model_len or 0, self.runner)


@dataclass(frozen=True)
class SchedulerConfig:
    """How much runs at once."""

    max_num_seqs: int | None = setting(
        None, "sequences that run at once; 64 on a CPU, 256 on a GPU if absent"
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "tokens of one step; if absent 8192 on a GPU, and on a CPU what takes about 250 ms there,"
        " from 16 to 256, as measured while it runs",
        unit="tokens",
    )
    max_num_queued_reqs: int | None = setting(
        None,
        "requests that may wait beside those that run; more are refused, by the server with status"
        " 503. No limit if absent",
    )
    scheduling_policy: str = setting(
        "two-level",
        "who is served first: fifo (fcfs and priority are vLLM's names of it, as a request's"
        " priority always comes first), srtf (the shortest remaining"
        " prompt), two-level (srtf within batches of 8 arrivals, and nobody starves)",
        choices=("fifo", "fcfs", "priority", "srtf", "two-level"),
        plugins=POLICIES,
    )
    preemption_mode: str = setting(
        "auto",
        "what happens to the KV cache of a sequence that must give way: it is computed again, or"
        " swapped to host memory; auto takes what costs less",
        choices=("auto", "recompute", "swap"),
    )
    long_prefill_token_threshold: int = setting(
        0, "most tokens of one prompt in one step; 0 is no limit but the step's", unit="tokens"
    )
    pipeline_depth: int | None = setting(
        None,
        "plans in flight; 1 waits for each result; from 2 on the model runs on a thread of its own,"
        " and the next step is planned, and on a GPU launched, meanwhile. 1 on a CPU, 2 on a GPU if"
        " absent",
    )


@dataclass(frozen=True)
class EngineConfig:
    """Everything that an engine is made from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: str = setting("auto", "auto, cpu or cuda", choices=("auto", "cpu", "cuda"))
    attention_backend: str = setting(
        "auto",
        "cpu (C++ core), torch, reference or triton (GPUs); auto picks the fastest that can serve"
        " the model",
        choices=("auto", "cpu", "torch", "reference", "triton"),
        plugins=ATTENTION_BACKENDS,
    )
    compilation: str = setting(
        "full",
        "how decoding steps are recorded as CUDA graphs: whole, or piecewise, between the calls of"
        " attention",
        choices=("full", "piecewise"),
    )
    enforce_eager: bool = setting(False, "launch each kernel by itself, without CUDA graphs")
    deterministic: bool = setting(
        False,
        "on a GPU, by triton: a request gets the same tokens and log-probabilities, to the last"
        " bit, alone and in any batch, in any chunks, preempted or with a cached prefix; slower",
    )
    debug_transfers: bool = setting(
        False, "on a GPU: fail where a step makes the host wait; for finding mistakes"
    )
    logits_processors: tuple[str, ...] = setting(
        (), "logits processors of installed packages that requests may ask for by name"
    )
    speculative_config: str | None = setting(
        None,
        'guess tokens ahead and try them beside the next one, as JSON: {"method": "ngram",'
        ' "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 5} guesses what'
        " followed the same tokens before; the method suffix learns from earlier answers, too;"
        ' {"method": "draft_model", "model": DIR} lets a small model guess, eagle3 a head.'
        " No answer changes by it, only how fast it comes. What a grammar forces is guessed with"
        " any method, and where one plan is in flight without one;"
        ' {"method": "forced"}: only that, {"method": "none"}: nothing',
    )
    kv_events_config: str | None = setting(
        None,
        "tell routers which blocks the prefix cache has, over ZeroMQ as vLLM does, as JSON:"
        ' {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"} (needs quire[events]);'
        ' without tokens unless it says "token_ids": true',
    )
    max_logprobs: int = setting(20, "most logprobs a request may ask for; -1 is no limit")
    disable_log_stats: bool = setting(False, "do not log the memory plan and statistics")
    record: str | None = setting(
        None,
        "directory for a record of all that the scheduler is asked and decides, for `quire replay`,"
        " `explain` and `trace`; without texts and tokens",
    )
    record_tokens: bool = setting(
        False, "keep token ids in the record, so that it can be run with the model again"
    )
    record_max_mb: int = setting(256, "most that a record takes; the oldest part goes", unit="MB")

    def __post_init__(self) -> None:
        cache, scheduler = self.cache, self.scheduler
        check(1 <= cache.block_size <= 256, "block_size", cache.block_size, "from 1 to 256")
        share = cache.gpu_memory_utilization
        check(0 < share <= 1, "gpu_memory_utilization", share, "in (0, 1]")
        check(0 <= cache.watermark < 1, "watermark", cache.watermark, "in [0, 1)")
        names = "max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs", "pipeline_depth"
        for name in names:
            value = getattr(scheduler, name)
            check(value is None or value >= 1, name, value, "at least 1")
        length = self.model.max_model_len
        fits = length is None or length >= 1 or length == AUTO_LENGTH
        check(fits, "max_model_len", length, "at least 1, or auto (-1)")
        interval = self.model.stream_interval
        check(interval >= 1, "stream_interval", interval, "at least 1")
        pool = cache.kv_cache_memory_bytes
        check(pool is None or pool > 0, "kv_cache_memory_bytes", pool, "above 0")
        check(self.record_max_mb >= 1, "record_max_mb", self.record_max_mb, "at least 1")
        check_installed(LOGITS_PROCESSORS, self.logits_processors)
        parse_speculation(self.speculative_config)
        parse_kv_events(self.kv_events_config)
        check_choices(self, self.model, self.cache, self.scheduler, self.parallel)


@dataclass(frozen=True)
class ServerConfig(SeveralModels):
    """The HTTP server and its processes (`quire serve`)."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 is every network")
    port: int = setting(8000, "TCP port; 0 takes a free one")
    served_model_name: tuple[str, ...] = setting(
        (), "names that requests may give as model; the first one is shown; the model's if absent"
    )
    api_key: tuple[str, ...] = setting(
        (),
        "keys of which requests must bring one (Authorization: Bearer ...); none: open to all",
        secrecy=Secret,
    )
    urgent_api_key: tuple[str, ...] = setting(
        (),
        "those of the keys whose requests may have a priority below 0; without keys all may",
        secrecy=Secret,
    )
    admin_api_key: tuple[str, ...] = setting(
        (),
        "those of the keys that may reset the prefix cache, end the requests of others and watch"
        " the engine; without keys all may",
        secrecy=Secret,
    )
    pin_share: float | None = setting(
        None,
        "of what may be pinned or held, how much a key's may be, in (0, 1]; if absent each"
        " key's even share",
    )
    uds: str | None = setting(None, "path of a Unix socket to listen on, in place of host and port")
    root_path: str = setting(
        "", "prefix of all paths that a proxy in front takes away, such as /quire"
    )
    api_server_count: int = setting(1, "processes that answer HTTP")
    shutdown_timeout: float = setting(
        30.0, "how long requests may go on after SIGTERM; 0 ends them at once", unit="seconds"
    )
    restart_engine: bool = setting(
        False, "start the engine's process anew when it dies, instead of ending"
    )
    max_body_bytes: int = setting(16 << 20, "largest body of a request", unit="bytes")
    response_store_bytes: int = setting(
        64 << 20,
        "how much of /v1/responses each API process keeps, for previous_response_id and to be read"
        " again; the oldest make room; 0 keeps nothing",
        unit="bytes",
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "web origins that may call from a browser (CORS); * is all"
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "names that Host headers may give beside addresses and localhost; looked at without keys on"
        " the loopback interface, and where names are given; * is all",
    )
    page: bool = setting(
        True, "serve a page at / for browsers: chat, tokens, and what the engine does"
    )
    response_role: str = setting("assistant", "role of the messages that chat completions give")
    enable_force_include_usage: bool = setting(
        False, "end every stream with its usage, also where include_usage is not asked for"
    )
    enable_per_request_metrics: bool = setting(
        False, "tell in each answer how long its request took: `metrics`"
    )
    disable_fastapi_docs: bool = setting(
        False, "do not answer /openapi.json and /docs, the description of what can be asked"
    )
    return_tokens_as_token_ids: bool = setting(
        False, "show tokens of log-probabilities as token_id:N, where a request does not say it"
    )
    sse_keep_alive_interval: float = setting(
        0.0,
        "how long a stream may be silent before a comment is sent, which keeps proxies from cutting"
        " it off; 0 sends none",
        unit="seconds",
    )
    strict_fields: bool = setting(
        False, "refuse fields of a body that do not exist, instead of naming them in a header"
    )
    trust_request_chat_template: bool = setting(
        False, "let requests bring a chat template of their own"
    )
    hooks: tuple[str, ...] = setting(
        (),
        "names of hooks that other packages bring, such as safety filters: what comes in and goes"
        " out passes through them in this order",
    )
    hook_timeout: float = setting(
        5.0, "how long one call of a hook may take; then its request ends", unit="seconds"
    )
    files_dir: str | None = setting(
        None, "directory for /v1/files and /v1/batches, which there are none of without it"
    )
    files_gb: float = setting(10.0, "how much files_dir may hold", unit="GB")
    usage_log: str | None = setting(
        None, "file to which each request that has ended adds a line of JSON: whose it was, tokens"
    )
    requests_per_minute: tuple[int, ...] = setting(
        (), "requests that each key may send: one number for all, or one for each key; 0: no limit"
    )
    tokens_per_minute: tuple[int, ...] = setting(
        (), "tokens that each key may have, in and out; as requests_per_minute"
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "URL of a collector to which a span is sent for each request (needs quire[otel])",
        secrecy=SecretUrl,
    )
    metrics_prefix: str = setting(
        "quire",
        "how the names of metrics begin; vllm: those that vLLM has, too, as its dashboards and"
        " endpoint pickers know them",
        choices=("quire", "vllm"),
    )
    ssl_keyfile: str | None = setting(None, "private key for HTTPS")
    ssl_certfile: str | None = setting(None, "certificate for HTTPS")

    def __post_init__(self) -> None:
        super().__post_init__()
        wrap_secrets(self)
        check(0 <= self.port < 65536, "port", self.port, "from 0 to 65535")
        check(self.api_server_count >= 1, "api_server_count", self.api_server_count, "at least 1")
        path = self.root_path
        is_path = not path or (path.startswith("/") and not path.endswith("/"))
        check(is_path, "root_path", path, "empty, or like /quire")
        origins = [part for origin in self.allowed_origins for part in _list_of(origin)]
        object.__setattr__(self, "allowed_origins", tuple(origins))
        hosts = self.allowed_hosts
        is_name = all(name and not set(name) & set("/:@ ") for name in hosts)
        check(is_name, "allowed_hosts", hosts, "names without scheme and port, or *")
        check_duration("shutdown_timeout", self.shutdown_timeout, "to end at once")
        check_duration("sse_keep_alive_interval", self.sse_keep_alive_interval, "for none")
        check(self.max_body_bytes >= 1024, "max_body_bytes", self.max_body_bytes, "at least 1024")
        kept = self.response_store_bytes
        check(kept >= 0, "response_store_bytes", kept, "at least 0")
        share = self.pin_share
        check(share is None or 0 < share <= 1, "pin_share", share, "in (0, 1]")
        for name in ("urgent_api_key", "admin_api_key"):
            keys = set(getattr(self, name))
            if unknown := keys - set(self.api_key):  # never shown: they are secrets
                raise ConfigError(
                    f"{name} names {len(unknown)} of {len(keys)} keys that are not in api_key; add"
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
                    f"{name} has {len(values)} numbers for {num_keys} keys; give one for all of"
                    " them, or one for each."
                )

    @property
    def rate_limits(self) -> list[tuple[int, int]]:
        """Return for each key how many requests and tokens it may have in a minute, 0: any number;
        of a server without keys one pair for all together. Empty if nothing is limited."""
        given = (self.requests_per_minute, self.tokens_per_minute)
        num = len(self.api_key) or 1
        pairs = [values if len(values) > 1 else (values or (0,)) * num for values in given]
        return list(zip(*pairs, strict=True)) if any(map(any, pairs)) else []

    @property
    def pin_share_of_key(self) -> float:
        """Return the share of what may be pinned or held; all of it on a server without keys."""
        if not self.api_key:
            return 1.0
        return self.pin_share or 1 / len(set(self.api_key))


def _list_of(text: str) -> list[str]:
    """Return the texts of a JSON list, which vLLM's flags take, or the text itself."""
    if not text.startswith("["):
        return [text]
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"allowed_origins is not JSON ({error}): {text!r}.") from error
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"allowed_origins must be a list of texts, got {text!r}.")
    return value


SECTIONS: Mapping[str, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
}


def config_from_flat(**settings: Any) -> EngineConfig:
    """Build an EngineConfig from flat names, as `LLM(model, max_model_len=...)` gives them.

    Raises ConfigError for a name that no dataclass has.
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
            known = ", ".join(sorted(top | owners.keys()))
            raise ConfigError(f"there is no setting {name!r}; the settings are: {known}.")
    sections = {part: cls(**parts[part]) for part, cls in SECTIONS.items()}
    return EngineConfig(**sections, **parts[""])


def flat_settings(config: EngineConfig) -> dict[str, Any]:
    """Return all settings by name, without the groups."""
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(config).items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


def public_settings(config: EngineConfig) -> dict[str, Any]:
    """Return all settings by name as they may be shown: secrets are masked, and plain data."""
    return {name: public_value(value) for name, value in flat_settings(config).items()}
