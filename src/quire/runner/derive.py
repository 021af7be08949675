"""Fill in open settings for a device: dtype, lengths, rows. No torch."""

import dataclasses
from pathlib import Path

from quire.base.errors import ConfigError
from quire.base.settings.config import AUTO_LENGTH, EngineConfig
from quire.base.settings.speculation import parse_speculation
from quire.ops.host.native import core
from quire.runner.setup.step_size import MAX_TOKENS
from quire.spec.cuts import cut_block
from quire.spec.model_spec import DTYPE_BYTES, ModelSpec

CPU_SEQS, GPU_SEQS = 64, 256
GPU_TOKENS = 8192


def choose_dtype(name: str, spec: ModelSpec, device: str) -> str:
    """Choose the dtype of weights, activations and KV. `auto` avoids 16 bits on a CPU that is slow
    with them: one without our core and without bfloat16 products. device: its type."""
    if name != "auto":
        return name
    name = spec.dtype if spec.dtype in DTYPE_BYTES else "float32"
    if device == "cpu" and name in ("bfloat16", "float16"):
        is_fast = core() is not None or (name == "bfloat16" and has_native_bfloat16())
        name = name if is_fast else "float32"
    return name


def has_native_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, Arm BF16)."""
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


def cpu_flags() -> set[str]:
    """Return all words of the values in /proc/cpuinfo, including the CPU's features."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return {flag for line in text.splitlines() if ":" in line for flag in line.split()}


def default_depth(device: str) -> int:
    """Return the default number of plans in flight. On a CPU, planning uses cores that compute."""
    return 1 if device == "cpu" else 2


def depth_of(config: EngineConfig, device: str) -> int:
    """Return the number of plans in flight.
    With several stages: one for each, and one in transit."""
    stages = config.parallel.pipeline_parallel_size
    default = default_depth(device) if stages == 1 else stages + 1
    return config.scheduler.pipeline_depth or default


def check_context(config: EngineConfig, spec: ModelSpec) -> None:
    """Check that decode_context_parallel_size divides the ranks that share each KV head, for the
    model and its drafter. Check that a cache group keeps all tokens. Raises ConfigError."""
    parallel = config.parallel
    num_ranks, sharing = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    if sharing == 1:
        return
    name = f"decode_context_parallel_size={sharing}"
    cut_block(config.cache.block_size, sharing)
    for each in (spec, *([] if spec.drafter is None else [spec.drafter])):
        whole = each.num_kv_heads if each.num_ranks == 1 else 1
        group_size = max(1, num_ranks // whole)
        if group_size % sharing:
            raise ConfigError(
                f"{name} does not divide the {group_size} of tensor_parallel_size={num_ranks}"
                " ranks that"
                f" share each of {whole} heads of keys and values (num_key_value_heads). Choose a"
                " size that does, or more ranks."
            )
    if not any(group.keeps_all for group in spec.cache_groups):
        raise ConfigError(
            f"{name} divides the KV cache of all tokens, but this model caches only windows or"
            " states, which are not divided; remove it."
        )


def pooling_config(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Set whether the model pools. Raises ConfigError for settings that only generation supports.

    A model that pools all tokens, or an encoder, cannot use cached blocks or host memory, because
    they hold no hidden states. An encoder's steps are not recorded.
    """
    pooling, model = spec.pooling, config.model
    if pooling is None:
        model = dataclasses.replace(model, runner="generate", convert="none")
        return dataclasses.replace(config, model=model)
    if config.parallel.has_rank_processes:
        raise ConfigError(
            "a pooling model runs in its engine's process: remove tensor_parallel_size,"
            " pipeline_parallel_size and distributed_executor_backend, or use data_parallel_size."
        )
    speculation = parse_speculation(config.speculative_config)
    if speculation is not None and speculation.num_tokens:
        raise ConfigError(
            "speculative_config needs a model that generates text, and this one pools; remove it."
        )
    cache, scheduler = config.cache, config.scheduler
    if pooling.needs_all or spec.is_encoder:
        if cache.stores:
            raise ConfigError(
                f"{cache.stores[0]}: a model that pools all tokens of a prompt ({pooling.kind})"
                " cannot use blocks from a store; remove it."
            )
        cache = dataclasses.replace(cache, enable_prefix_caching=False, kv_host_gb=0.0)
        scheduler = dataclasses.replace(scheduler, preemption_mode="recompute")
    model = dataclasses.replace(model, runner="pooling", convert=pooling.task)
    is_eager = config.enforce_eager or spec.is_encoder  # its attention reads the host's lengths
    return dataclasses.replace(
        config, model=model, cache=cache, scheduler=scheduler, enforce_eager=is_eager
    )


def routes_config(config: EngineConfig, spec: ModelSpec, device: str) -> EngineConfig:
    """Turn prefix hits off in an engine that returns routed experts: the experts of cached tokens
    are not recorded. Raises ConfigError for what such an engine cannot do."""
    if not config.model.enable_return_routed_experts:
        return config
    speculation, cache = parse_speculation(config.speculative_config), config.cache
    has_drafts = speculation is not None and speculation.num_tokens > 0
    reasons = {
        f"runs on a CPU, and the device is {device}; set device to cpu": device != "cpu",
        "needs a model that generates with mixtures of experts; choose one": (
            spec.experts is None or spec.pooling is not None
        ),
        "needs one process for the model; use no ranks": config.parallel.has_rank_processes,
        "does not know the experts of drafts; remove speculative_config": has_drafts,
        f"does not know the experts of stored blocks; remove {cache.stores}": bool(cache.stores),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ConfigError(f"enable_return_routed_experts {reason}, or remove it.")
    cache = dataclasses.replace(cache, enable_prefix_caching=False, kv_host_gb=0.0)
    return dataclasses.replace(config, cache=cache)


def check_whole_prompts(config: EngineConfig, length: int) -> None:
    """Check that a step has room for the longest prompt of a model with bidirectional attention.
    Raises ConfigError."""
    scheduler = config.scheduler
    budget = scheduler.max_num_batched_tokens
    if budget is not None and budget < length:
        raise ConfigError(
            f"max_num_batched_tokens={budget} is less than max_model_len={length}, but this model"
            " computes a prompt in one step, as its tokens see each other in both directions."
            " Raise max_num_batched_tokens, remove it, or lower max_model_len."
        )
    if scheduler.long_prefill_token_threshold:
        raise ConfigError(
            "long_prefill_token_threshold cuts prompts, but this model computes a prompt in one"
            " step, as its tokens see each other in both directions; remove it."
        )
    if config.cache.kv_cache_dtype != "auto":
        raise ConfigError(
            f"kv_cache_dtype is {config.cache.kv_cache_dtype}, but this model keeps no keys and"
            " values; remove it."
        )


def derive_config(config: EngineConfig, spec: ModelSpec, device: str) -> EngineConfig:
    """Fill in all open settings except an automatic max_model_len, which the memory plan finds.
    device: its type, cpu or cuda. Raises ConfigError for settings that the model does not support.
    """
    on_cpu = device == "cpu"
    usual = None if spec.pooling is None else spec.pooling.longest
    length = config.model.max_model_len or min(usual or spec.max_position, spec.max_position)
    spec.check_length(length)
    if config.deterministic and on_cpu and config.attention_backend != "triton":
        raise ConfigError("deterministic is only for GPUs; remove it on a CPU.")
    check_context(config, spec)
    config = routes_config(pooling_config(config, spec), spec, device)
    dtype = choose_dtype(config.model.dtype, spec, device)
    budget = MAX_TOKENS if on_cpu else GPU_TOKENS
    if spec.is_encoder:
        length = spec.max_position if length == AUTO_LENGTH else length
        check_whole_prompts(config, length)
        budget = max(budget, length)
    scheduler = dataclasses.replace(
        config.scheduler,
        max_num_seqs=config.scheduler.max_num_seqs or (CPU_SEQS if on_cpu else GPU_SEQS),
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens or budget,
        pipeline_depth=depth_of(config, device),
    )
    model = dataclasses.replace(config.model, max_model_len=length, dtype=dtype)
    return dataclasses.replace(config, model=model, scheduler=scheduler, device=device)


def with_length(config: EngineConfig, length: int) -> EngineConfig:
    """Return the config with another max_model_len."""
    model = dataclasses.replace(config.model, max_model_len=length)
    return dataclasses.replace(config, model=model)
