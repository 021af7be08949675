"""What memory there is, what a step needs, and what is left for the KV pool (A18, text H).

On a CPU the workspace is computed from the model's shape; on a GPU a worst-case step is measured.
"""

from pathlib import Path

import torch

from quire.base.config import AUTO_LENGTH, EngineConfig
from quire.base.errors import ConfigError, OutOfMemory
from quire.base.model_spec import DTYPE_BYTES, ModelSpec
from quire.kv.sizing import MIB, MemoryPlan, longest_sequence, size_pools
from quire.ops.attention.select import kv_block_bytes
from quire.ops.native import core

CPU_POOL_SHARE = 0.25
CGROUP = Path("/sys/fs/cgroup")
GPU_RESERVE_BYTES = 256 * MIB  # fragmentation and libraries' own buffers


def available_cpu_bytes() -> int:
    """Memory that this process may still take: the system's, or its control group's if less."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            system = int(line.split()[1]) * 1024
            return min([system, *_cgroup_left()])
    raise OutOfMemory("/proc/meminfo does not say how much memory is available.")


def _cgroup_left() -> list[int]:
    """Bytes left under the limit of a version 2 or version 1 control group, if there is one."""
    pairs = (
        (CGROUP / "memory.max", CGROUP / "memory.current"),
        (CGROUP / "memory/memory.limit_in_bytes", CGROUP / "memory/memory.usage_in_bytes"),
    )
    left = []
    for limit, usage in pairs:
        try:
            left.append(max(0, int(limit.read_text()) - int(usage.read_text())))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return left


def workspace_bytes(spec: ModelSpec, dtype_bytes: int, num_tokens: int, num_seqs: int) -> int:
    """Upper bound of what one step allocates beside weights and KV, from the model's shape.

    Per token: the residual stream, queries, keys and values, both halves of the feed-forward layer
    and its product. Per sampling row: logits in the model's dtype and twice in float32.
    """
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    per_token = (4 * spec.hidden_size + 2 * qkv + 3 * spec.intermediate_size) * dtype_bytes
    per_sample = spec.vocab_size * (dtype_bytes + 3 * 4)
    return num_tokens * per_token + num_seqs * per_sample


def choose_dtype(name: str, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """The dtype of weights, activations and KV. `auto` avoids 16 bits where a CPU
    is slow with them: without our core and without products of bfloat16."""
    if name == "auto":
        name = spec.dtype if spec.dtype in DTYPE_BYTES else "float32"
        if device.type == "cpu" and name in ("bfloat16", "float16"):
            is_fast = core() is not None or (name == "bfloat16" and has_native_bfloat16())
            name = name if is_fast else "float32"
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, Arm BF16)."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = {flag for line in text.splitlines() if ":" in line for flag in line.split()}
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def choose_device(name: str) -> torch.device:
    """Raises ConfigError if CUDA is asked for and absent."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device; use device='cpu'.")
    return torch.device(name)


def plan_cpu_memory(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, weights_bytes: int, free_bytes: int
) -> MemoryPlan:
    """Pool of max_num_seqs x max_model_len tokens, at most a quarter of the free memory.

    config: with all derived values filled in. free_bytes: available before the weights are loaded.
    """
    scheduler, size = config.scheduler, dtype.itemsize
    assert scheduler.max_num_seqs and scheduler.max_num_batched_tokens
    workspace = workspace_bytes(
        spec, size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    )
    if weights_bytes + workspace > free_bytes:
        raise OutOfMemory(
            f"weights ({weights_bytes / MIB:,.0f} MiB) and workspace ({workspace / MIB:,.0f} MiB) "
            f"exceed the free memory ({free_bytes / MIB:,.0f} MiB). Use a smaller model or dtype, "
            "or lower max_num_seqs."
        )
    budget = min(int(free_bytes * CPU_POOL_SHARE), free_bytes - weights_bytes - workspace)
    return make_plan(config, spec, dtype, weights_bytes, workspace, budget, free_bytes)


def make_plan(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    weights_bytes: int,
    workspace: int,
    budget: int,
    total_bytes: int,
) -> MemoryPlan:
    """Cut the budget (or kv_cache_memory_bytes, if given) into blocks.

    The plan's max_model_len is the config's, and if that is to be what fits, what does.
    """
    cache, scheduler = config.cache, config.scheduler
    length = config.model.max_model_len
    assert length and scheduler.max_num_seqs and scheduler.max_num_batched_tokens
    block_bytes = [
        kv_block_bytes(group, cache.block_size, dtype, cache.kv_cache_dtype)
        for group in spec.cache_groups
    ]
    pool = (spec.cache_groups, block_bytes, cache.kv_cache_memory_bytes or budget, cache.block_size)
    rows = (scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    if length == AUTO_LENGTH:
        length = longest_sequence(*pool, spec.max_position, *rows)
    num_blocks = size_pools(*pool, length, *rows)
    return MemoryPlan(
        total_bytes=total_bytes,
        weights_bytes=weights_bytes,
        workspace_bytes=workspace,
        pool_bytes=sum(n * b for n, b in zip(num_blocks, block_bytes, strict=True)),
        num_blocks=num_blocks,
        block_size=cache.block_size,
        max_model_len=length,
    )
