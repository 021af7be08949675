"""Memory plan: available memory, needs of a step, and the rest for the KV pool (A18, text H).

On a CPU the workspace is computed from the model's shape; on a GPU a worst-case step is measured.
No torch: `quire fit` computes the same plan before anything is loaded.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.base.errors import ConfigError, OutOfMemory
from quire.base.settings.cache_config import SERVE
from quire.base.settings.config import AUTO_LENGTH, EngineConfig
from quire.base.settings.lora import EXPERTS
from quire.base.settings.speculation import max_draft_tokens, parse_speculation, speculation_of
from quire.kv.sizing import (
    MIB,
    host_tier_blocks,
    longest_sequence,
    num_states,
    size_pools,
)
from quire.spec.cuts import cut_block
from quire.spec.media_families import EncoderSize
from quire.spec.model_spec import DTYPE_BYTES, ModelSpec

CPU_POOL_SHARE = 0.25
MEMORY_VARIABLE = "QUIRE_MEMORY_BYTES"  # a process's share of a machine's memory
CGROUP = Path("/sys/fs/cgroup")
GPU_RESERVE_BYTES = 384 * MIB  # fragmentation, libraries, blocks in transit
MAX_SERVED_POOLS = 4  # host memory for blocks served to peers, in pools
PASSING_BYTES = 64 << 20, 1 << 30  # of host memory for blocks between the pool and a store
# Sizes at which the steps of a GPU are recorded as graphs.
MIXED_TOKENS: tuple[int, ...] = (
    16,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
    384,
    512,
    *range(640, 2049, 128),
)
MIXED_ROWS = (4, 32, 128)  # in addition to the maximum number of rows
MAX_OTHER_GRAPHS = 32  # graphs in addition to plain decoding steps
MAX_WARM_GRAPHS = 64  # the same if a warm-up records graphs for all steps
MAX_DRAFT_GRAPHS = 16  # graphs of a draft model's passes
MORE_POSITIONS = 256  # sampled positions of a recorded step, in addition to the maximum rows
GRAPH_BYTES = 4 << 20  # of a graph besides its tensors: nodes and parameters
# Modules of feed-forward layers; the last two route tokens to experts.
FEED_FORWARD = "gate_proj", "up_proj", "down_proj", "gate", "shared_expert_gate"
GPU_CONTEXT_BYTES = 512 * MIB  # of a process that uses a GPU, before any work


@dataclass(frozen=True)
class MemoryPlan:
    """Memory by use, in bytes, and the capacity of the pool."""

    total_bytes: int
    weights_bytes: int
    workspace_bytes: int
    pool_bytes: int
    num_blocks: tuple[int, ...]
    block_size: int
    max_model_len: int
    graph_bytes: int = 0  # of recorded steps, on a GPU
    num_states: int = 0  # of layers with a recurrent state

    @property
    def num_slots(self) -> int:
        """Return the number of tokens that the largest group can hold."""
        return max(self.num_blocks) * self.block_size

    def describe(self) -> str:
        """Return one line for the log."""
        fits = self.num_slots / self.max_model_len
        graphs = f"graphs {self.graph_bytes / MIB:,.0f} MiB, " if self.graph_bytes else ""
        rest = (
            f"memory: weights {self.weights_bytes / MIB:,.0f} MiB, workspace "
            f"{self.workspace_bytes / MIB:,.0f} MiB, {graphs}"
        )
        if self.pool_bytes == 0:
            return f"{rest}no KV pool: a prompt is computed in one step"
        return (
            f"{rest}KV pool {self.pool_bytes / MIB:,.0f} MiB = {self.num_slots:,} tokens in"
            f" {max(self.num_blocks):,} blocks of {self.block_size}"
            f"{f' and {self.num_states:,} states' if self.num_states else ''}"
            f" ({fits:.1f} sequences of {self.max_model_len:,})"
        )


def available_cpu_bytes() -> int:
    """Return the bytes that this process may still use: the minimum over the system's memory, its
    control group's limit, and its share (MEMORY_VARIABLE)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            system = int(line.split()[1]) * 1024
            return min([system, *_cgroup_left(), *_share()])
    raise OutOfMemory("/proc/meminfo does not say how much memory is available.")


def _share() -> list[int]:
    """Return this process's share from the environment, if it is set."""
    text = os.environ.get(MEMORY_VARIABLE, "").strip()
    if text and not text.isdigit():
        raise ConfigError(f"{MEMORY_VARIABLE} must be a number of bytes, got {text!r}.")
    return [int(text)] if text else []


def _cgroup_left() -> list[int]:
    """Return the bytes left under the limit of a version 2 or 1 control group, if there is one."""
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
    """Bound the bytes that one step allocates in addition to weights and KV, from the model's
    shape.

    Per token: the residual stream; queries, keys and values, or activations of linear attention.
    Also both halves of the feed-forward layer and their product, or the activations of experts. Per
    sampling row: logits in the model's dtype, and twice in float32.
    """
    experts = spec.experts
    inner = 3 * spec.intermediate_size
    if experts is not None:
        inner = max(inner, experts.activations(spec.hidden_size))
    mixing = 2 * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    if spec.linear_layers:
        gates = spec.num_heads * spec.head_dim
        mixing = max(mixing + 2 * gates, spec.linear_attention.activations)
    per_token = (4 * spec.hidden_size + mixing + inner) * dtype_bytes
    per_sample = spec.vocab_size * (dtype_bytes + 3 * 4)
    return num_tokens * per_token + num_seqs * per_sample


def plan_cpu_memory(
    config: EngineConfig, spec: ModelSpec, weights_bytes: int, free_bytes: int
) -> MemoryPlan:
    """Plan a pool of max_num_seqs x max_model_len tokens, at most a quarter of the free memory.

    config: with all derived values filled in. free_bytes: available before the weights are loaded.
    """
    workspace = workspace_of(config, spec)
    if weights_bytes + workspace > free_bytes:
        raise OutOfMemory(
            f"weights ({weights_bytes / MIB:,.0f} MiB) and workspace ({workspace / MIB:,.0f} MiB) "
            f"exceed the free memory ({free_bytes / MIB:,.0f} MiB). Use a smaller model or dtype, "
            "or lower max_num_seqs."
        )
    budget = cpu_pool_budget(free_bytes, weights_bytes, workspace)
    return make_plan(config, spec, weights_bytes, workspace, budget, free_bytes)


def cpu_pool_budget(free_bytes: int, weights_bytes: int, workspace: int) -> int:
    """Return the pool's budget on a CPU in bytes; below zero if not even the rest fits."""
    return min(int(free_bytes * CPU_POOL_SHARE), free_bytes - weights_bytes - workspace)


def gpu_pool_budget(
    total_bytes: int, utilization: float, used_bytes: int, free_bytes: int, workspace: int
) -> int:
    """Return the pool's budget on a GPU in bytes; below zero if not even the rest fits.

    The utilization is this process's share of the GPU, whatever others use, but memory in use by
    others is not available. used_bytes: by this process, with its context. free_bytes: of the
    device.
    """
    share = int(total_bytes * utilization) - used_bytes
    return min(share, free_bytes) - workspace - GPU_RESERVE_BYTES


def workspace_of(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the workspace bytes of a config with derived values, including the encoder cache. It
    is the maximum over the model's largest step, the drafter's largest step, and encoding. Kept
    inputs, encoder cache, adapters, routers' logits and spare blocks for draft tokens are
    added."""
    scheduler = config.scheduler
    assert scheduler.max_num_seqs and scheduler.max_num_batched_tokens
    tokens, rows = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    size = DTYPE_BYTES[config.model.dtype]
    largest = max(workspace_bytes(spec, size, tokens, rows), encoding_bytes(config, spec))
    retained = retained_inputs_bytes(config, spec) + encoder_cache_bytes(config, spec)
    retained += adapter_bytes(config, spec) + routes_bytes(config, spec)
    if spec.drafter is None:
        return largest + retained
    largest = max(largest, workspace_bytes(spec.drafter, size, tokens, rows))
    spare = rows * spare_blocks(config) * sum(block_bytes_of(config, spec.drafter))
    return largest + retained + spare


def adapter_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Bound the bytes of the adapters in memory: each with the maximum rank in all modules that
    adapters may change. An adapter of rank R has R numbers for each input and each output of a
    module. On a GPU, adapters do not change the experts of a mixture."""
    lora = config.lora
    if not lora.enable_lora:
        return 0
    sizes, targets = _module_sizes(spec), set(map(_last_name, lora.lora_target_modules))
    per_layer = sum(sizes.values())
    if targets and targets - {EXPERTS} <= sizes.keys():
        per_layer = sum(sizes[name] for name in targets - {EXPERTS})
    elif spec.linear_layers:
        per_layer = max(per_layer, sum(sizes[name] for name in FEED_FORWARD) + _linear_sizes(spec))
    changes_experts = lora.changes_experts and config.device != "cuda"
    if (experts := spec.experts) is not None and changes_experts:
        per_layer += experts.num_experts * 3 * (spec.hidden_size + experts.inner_size)
    numbers = spec.num_layers * per_layer * lora.max_lora_rank
    return num_adapters(config) * numbers * DTYPE_BYTES[config.model.dtype]


def num_adapters(config: EngineConfig) -> int:
    """Return the maximum number of adapters in the device's memory: on a GPU those in slots."""
    return config.lora.max_loras if config.device == "cuda" else config.lora.num_held


def _module_sizes(spec: ModelSpec) -> dict[str, int]:
    """Return the inputs plus outputs of a layer's modules, by the usual names. Modules with other
    names, such as merged ones, have no more of them together."""
    hidden, inner, experts = spec.hidden_size, spec.intermediate_size, spec.experts
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    gates = queries if spec.linear_layers else 0
    sizes = {"q_proj": hidden + queries + gates, "o_proj": hidden + queries}
    sizes |= dict.fromkeys(("k_proj", "v_proj"), hidden + keys)
    shared = hidden + experts.shared_size if experts is not None and experts.shared_size else 0
    sizes |= dict.fromkeys(FEED_FORWARD[:3], hidden + inner + shared)
    routers = (0, 0) if experts is None else (hidden + experts.num_experts, hidden + 1)
    return sizes | dict(zip(FEED_FORWARD[3:], routers, strict=True))


def _linear_sizes(spec: ModelSpec) -> int:
    """Return the inputs plus outputs of the modules of a layer with linear attention."""
    sizes = spec.linear_attention
    return 4 * spec.hidden_size + 2 * sizes.keys_size + 3 * sizes.value_heads * sizes.value_dim


def _last_name(module: str) -> str:
    return module.rpartition(".")[2]


def routes_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the bytes of a step's copied router logits, if the engine returns routed experts."""
    experts, tokens = spec.experts, config.scheduler.max_num_batched_tokens
    if not config.model.enable_return_routed_experts or experts is None or tokens is None:
        return 0
    num_mixtures = sum(map(experts.is_sparse, range(spec.num_layers)))
    size = max(4, DTYPE_BYTES[config.model.dtype])
    return tokens * num_mixtures * experts.num_experts * size


def encoder_cache_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the bytes of the encoder output slots, in float32; see Model.take_encoder_memory."""
    if spec.encoder is None:
        return 0
    size = max(4, DTYPE_BYTES[config.model.dtype])
    return config.scheduler.encoder_cache_tokens * spec.encoder.slot * size


def encoding_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Bound the vision tower's bytes while it encodes the largest item, one item at a time."""
    if spec.encoder is None:
        return 0
    size = max(4 if config.device == "cpu" else 0, DTYPE_BYTES[config.model.dtype])
    return largest_item(config, spec.encoder, spec.max_position) * spec.encoder.per_token * size


def largest_item(config: EngineConfig, encoder: EncoderSize, max_position: int) -> int:
    """Return the maximum number of tokens of an item that fits a prompt and the encoder cache."""
    length = config.model.max_model_len
    assert length, "it is derived"
    length = max_position if length == AUTO_LENGTH else length
    return min(config.scheduler.encoder_cache_tokens, length, encoder.max_tokens or length)


def retained_inputs_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Bound the bytes of inputs that layers with a state retain for drafting rows. They are needed
    until verification ends (ops/attention/states.py)."""
    scheduler = config.scheduler
    if not has_drafts(config) or not spec.linear_layers:
        return 0
    assert scheduler.max_num_seqs and scheduler.max_num_batched_tokens
    tokens = scheduler.max_num_seqs + max_draft_tokens(scheduler.max_num_seqs)
    size = max(4 if config.device == "cpu" else 0, DTYPE_BYTES[config.model.dtype])
    of_token = len(spec.linear_layers) * spec.linear_attention.num_inputs * size
    return min(tokens, scheduler.max_num_batched_tokens) * of_token


def spare_blocks(config: EngineConfig) -> int:
    """Return the number of spare blocks for the draft tokens of a row."""
    return -(-num_speculative_tokens(config) // config.cache.block_size)


def num_speculative_tokens(config: EngineConfig) -> int:
    """Return the maximum number of draft tokens of a row that a draft model proposes."""
    speculation = parse_speculation(config.speculative_config)
    assert speculation is not None
    return speculation.num_tokens


def block_bytes_of(config: EngineConfig, spec: ModelSpec) -> list[int]:
    """Return the bytes of a block of each cache group, or of a rank's part if ranks
    divide tokens."""
    cache, size = config.cache, DTYPE_BYTES[config.model.dtype]
    own = cut_block(cache.block_size, config.parallel.decode_context_parallel_size)
    return [
        group.stored_block_bytes(
            own if group.keeps_all else cache.block_size, size, cache.kv_cache_dtype
        )
        for group in spec.cache_groups
    ]


def _check_rows(
    length: int, num_rows: int, block_size: int, num_groups: int, total_bytes: int
) -> None:
    """Check that token ids and block tables of max_num_seqs whole sequences fit, also with windows.
    Raises OutOfMemory."""
    needed = 4 * num_rows * (length + num_groups * (length // block_size + 2))
    if needed > total_bytes:
        raise OutOfMemory(
            f"the token ids of {num_rows} sequences of max_model_len={length:,} take"
            f" {needed / MIB:,.0f} MiB, of {total_bytes / MIB:,.0f} MiB. Lower max_model_len or"
            " max_num_seqs."
        )


def make_plan(
    config: EngineConfig,
    spec: ModelSpec,
    weights_bytes: int,
    workspace: int,
    budget: int,
    total_bytes: int,
) -> MemoryPlan:
    """Cut the budget (or kv_cache_memory_bytes, if set) into blocks.

    The plan's max_model_len is the config's. If that is automatic, it is the longest that fits.
    """
    cache, scheduler = config.cache, config.scheduler
    length = config.model.max_model_len
    assert length and scheduler.max_num_seqs and scheduler.max_num_batched_tokens
    block_bytes = block_bytes_of(config, spec)
    pool = (spec.cache_groups, block_bytes, cache.kv_cache_memory_bytes or budget, cache.block_size)
    rows = (scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    if length == AUTO_LENGTH:
        length = longest_sequence(*pool, spec.max_position, *rows)
    num_blocks = size_pools(*pool, length, *rows)
    _check_rows(length, rows[0], cache.block_size, len(spec.cache_groups), total_bytes)
    return MemoryPlan(
        total_bytes=total_bytes,
        weights_bytes=weights_bytes,
        workspace_bytes=workspace,
        pool_bytes=sum(n * b for n, b in zip(num_blocks, block_bytes, strict=True)),
        num_blocks=num_blocks,
        block_size=cache.block_size,
        max_model_len=length,
        num_states=num_states(spec.cache_groups, num_blocks),
    )


def host_tier_limits(
    config: EngineConfig, spec: ModelSpec, memory: MemoryPlan, free_bytes: int, num_ranks: int = 1
) -> tuple[int, ...] | None:
    """Return the number of host blocks for evicted or swapped KV, by cache group; None: no host
    tier.

    By default a GPU gets as many blocks as its pool has, within a quarter of the free memory.
    Stores get a small number of blocks in transit, and serving peers gets several times the pool.
    config: with all derived values filled in. num_ranks: ranks that share the host's memory. Raises
    ConfigError if more than the free memory is requested.
    """
    cache = config.cache
    has_stores, on_cpu = bool(cache.stores), config.device == "cpu"
    if not cache.enable_prefix_caching or (cache.kv_host_gb == 0 and not has_stores):
        return None
    if cache.kv_host_gb is None and on_cpu and not has_stores:
        return None
    free = free_bytes // num_ranks
    num_bytes = min(memory.pool_bytes, free // 4)
    if has_stores and (on_cpu or cache.kv_host_gb == 0):
        num_bytes = min(max(memory.pool_bytes, PASSING_BYTES[0]), PASSING_BYTES[1], free // 4)
    if cache.kv_host_gb is None and any(store.startswith(SERVE) for store in cache.stores):
        num_bytes = min(max(MAX_SERVED_POOLS * memory.pool_bytes, num_bytes), free // 4)
    if cache.kv_host_gb:
        num_bytes = int(cache.kv_host_gb * 1e9) // num_ranks
    if num_bytes > free:
        raise ConfigError(
            f"kv_host_gb={cache.kv_host_gb:g} is more than the free memory"
            f" ({free_bytes / 1e9:.1f} GB)."
        )
    sizes = block_bytes_of(config, spec)
    limits = host_tier_blocks(spec.cache_groups, sizes, memory.num_blocks, num_bytes)
    if cache.kv_host_gb and not all(limits):
        raise ConfigError(
            f"kv_host_gb={cache.kv_host_gb:g} holds no block; one takes {sum(sizes) / 1e6:.1f} MB."
        )
    return limits if all(limits) else None


def ladder(max_rows: int) -> list[int]:
    """Return step sizes up to max_rows. A step padded to the next size has less than 16 surplus
    rows, or less than twice its rows."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_rows + 16, 16)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def max_mixed_tokens(max_rows: int) -> int:
    """Return the number of tokens of the largest mixed step that is recorded."""
    return max(MIXED_TOKENS[-1], max_rows)


def all_graphs_bytes(config: EngineConfig, tensors_bytes: int) -> int:
    """Return the bytes of all graphs. tensors_bytes: of the largest graph, shared by all."""
    assert config.scheduler.max_num_seqs
    num_plain = len(ladder(config.scheduler.max_num_seqs))
    num_plain *= 2 if config.lora.enable_lora else 1  # with adapters and without
    num_graphs = num_plain + max_other_graphs(config)
    speculation = parse_speculation(config.speculative_config)
    if speculation is not None and speculation.has_drafter:
        num_graphs += MAX_DRAFT_GRAPHS
    return tensors_bytes + GRAPH_BYTES * num_graphs


def max_other_graphs(config: EngineConfig) -> int:
    """Return the maximum number of graphs in addition to plain decoding steps."""
    return MAX_WARM_GRAPHS if config.graph_warmup else MAX_OTHER_GRAPHS


def max_positions(max_rows: int) -> int:
    """Return the maximum number of sampled positions of a recorded step with draft tokens."""
    return max_rows + MORE_POSITIONS


def has_drafts(config: EngineConfig) -> bool:
    """Return whether steps may have draft tokens."""
    depth = config.scheduler.pipeline_depth
    return speculation_of(config.speculative_config, depth) is not None


def max_read_tokens(config: EngineConfig) -> int:
    """Return the maximum number of tokens of a step, padding included, whose states a drafting head
    reads. Graphs hold the address of these states."""
    scheduler = config.scheduler
    assert scheduler.max_num_seqs and scheduler.max_num_batched_tokens
    recorded = max(max_mixed_tokens(scheduler.max_num_seqs), max_positions(scheduler.max_num_seqs))
    return max(scheduler.max_num_batched_tokens, recorded)


def estimated_graph_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Estimate the bytes of graphs on a GPU from the model's shape and a complete config."""
    num_rows = config.scheduler.max_num_seqs
    assert num_rows
    if config.enforce_eager:
        return 0
    size, tokens = DTYPE_BYTES[config.model.dtype], max_mixed_tokens(num_rows)
    positions = max_positions(num_rows) if has_drafts(config) else num_rows
    return all_graphs_bytes(config, workspace_bytes(spec, size, tokens, positions))


Minimum = Callable[[Sequence[int]], tuple[int, ...]]


@dataclass(frozen=True)
class MachineShare:
    """Share of a machine's memory for one rank. num_ranks: ranks that share the memory. free_bytes:
    free memory before any rank allocated; None: measured by each rank. minimum: returns the
    elementwise minimum of numbers over all ranks; all ranks must call it."""

    num_ranks: int = 1
    free_bytes: int | None = None
    minimum: Minimum = tuple

    @property
    def is_whole(self) -> bool:
        return self.num_ranks == 1

    def cpu_bytes(self, found: int) -> int:
        """Return this rank's part of the free host memory. found: bytes that it finds free."""
        return (found if self.free_bytes is None else self.free_bytes) // self.num_ranks

    def agree(self, plan: MemoryPlan, block_bytes: Sequence[int]) -> MemoryPlan:
        """Return a plan that fits all ranks, since block numbers are the same on every rank."""
        *blocks, length, states = self.minimum(
            (*plan.num_blocks, plan.max_model_len, plan.num_states)
        )
        if tuple(blocks) == plan.num_blocks and length == plan.max_model_len:
            return plan
        return dataclasses.replace(
            plan,
            num_blocks=tuple(blocks),
            max_model_len=length,
            num_states=states,
            pool_bytes=sum(n * size for n, size in zip(blocks, block_bytes, strict=True)),
        )

    def agree_on_limits(
        self, limits: tuple[int, ...] | None, num_groups: int
    ) -> tuple[int, ...] | None:
        """Return the number of host blocks that every rank can have; None if a rank has none."""
        found = self.minimum(limits or (0,) * num_groups)
        return found if all(found) else None


WHOLE_MACHINE = MachineShare()
