"""Memory plan of a GPU: run the largest step once and measure its memory (text H)."""

import dataclasses
import gc
import logging
from collections.abc import Callable

import numpy as np
import torch

from quire.base.errors import OutOfMemory
from quire.base.plan import BlockWrites, DraftOrder, Plan, RowStart
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import AUTO_LENGTH, EngineConfig
from quire.runner.derive import with_length
from quire.runner.drafting.drafting import DraftPasses
from quire.runner.memory_plan import (
    GPU_CONTEXT_BYTES,
    MemoryPlan,
    encoding_bytes,
    gpu_pool_budget,
    make_plan,
    retained_inputs_bytes,
)
from quire.runner.model_runner import ModelRunner
from quire.spec.model_spec import ModelSpec

logger = logging.getLogger("quire")

MakeRunner = Callable[[EngineConfig, tuple[int, ...]], tuple[ModelRunner, DraftPasses | None]]


def plan_gpu_memory(
    config: EngineConfig,
    spec: ModelSpec,
    device: torch.device,
    weights_bytes: int,
    free_at_start: int,
    make_runner: MakeRunner,
) -> MemoryPlan:
    """Plan the KV pool. It gets our share of the GPU, less the memory of the largest step, the
    graphs and other processes.

    free_at_start: bytes of the device before anything was loaded. make_runner: makes a runner, with
    its drafter's passes, for a config and numbers of blocks. Raises OutOfMemory.
    """
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    is_auto = config.model.max_model_len == AUTO_LENGTH
    largest = with_length(config, spec.max_position) if is_auto else config
    try:
        plan, num_blocks = worst_case_plan(largest, len(spec.cache_groups), spec.vocab_size)
        runner, draft = make_runner(largest, num_blocks)
        runner.run(plan)
        if draft is not None:
            draft.run(worst_case_order(plan))
        workspace = torch.cuda.max_memory_allocated(device) - before
        graphs = runner.graph_bytes(config)
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfMemory(
            f"a step of {config.scheduler.max_num_batched_tokens} tokens does not fit next to the"
            f" weights ({weights_bytes / 1e9:.1f} GB) on {describe_memory(device)}. Lower"
            " max_num_batched_tokens or max_num_seqs, or end other processes on the GPU."
        ) from error
    del runner, draft
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # Weights and libraries; another process may have freed memory meanwhile.
    used = max(free_at_start - free, torch.cuda.memory_reserved(device)) + GPU_CONTEXT_BYTES
    # The measured step had no draft tokens and no media.
    workspace = max(workspace, encoding_bytes(config, spec)) + retained_inputs_bytes(config, spec)
    share, taken = config.cache.gpu_memory_utilization, workspace + graphs
    budget = gpu_pool_budget(total, share, used, free, taken)
    if budget < gpu_pool_budget(total, share, used, total, taken):
        logger.warning(
            "gpu_memory_utilization=%g is more than the free GPU memory (%.1f GB of %.1f, without"
            " the weights); all free memory is used.",
            share, free / 1e9, total / 1e9,
        )  # fmt: skip
    found = make_plan(config, spec, weights_bytes, workspace, max(0, budget), total)
    return dataclasses.replace(found, graph_bytes=graphs)


def worst_case_order(plan: Plan) -> DraftOrder:
    """Return the draft order after such a plan: the same tokens, and a draft token for each row."""
    nothing = np.zeros_like(plan.num_tokens)
    return DraftOrder(
        rows=plan.rows,
        first=nothing,
        num_tokens=plan.num_tokens,
        num_known=plan.num_tokens,
        num_draft_tokens=nothing + 1,
        capacity=plan.num_tokens,
        read_from=np.cumsum(plan.num_tokens, dtype=np.int32) - plan.num_tokens,
    )


def free_gpu_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU, after collecting an earlier engine of this process. A runner
    and its graphs refer to each other, so only the garbage collector frees them."""
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def describe_memory(device: torch.device) -> str:
    """Return the description of a GPU's memory for error messages."""
    free, total = torch.cuda.mem_get_info(device)
    name = torch.cuda.get_device_name(device)
    return f"{name} ({free / 1e9:.1f} of {total / 1e9:.1f} GB are free)"


def worst_case_plan(
    config: EngineConfig, num_groups: int, vocab_size: int
) -> tuple[Plan, tuple[int, ...]]:
    """Return a step of max_num_batched_tokens tokens in which as many rows as possible sample with
    every filter on. Also return the pool that it needs. All rows write the same blocks, which is
    harmless here."""
    scheduler, size = config.scheduler, config.cache.block_size
    assert scheduler.max_num_seqs and scheduler.max_num_batched_tokens
    assert config.model.max_model_len
    num_rows = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    share = min(scheduler.max_num_batched_tokens // num_rows, config.model.max_model_len - 1)
    params = SamplingParams(top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
    tokens = np.arange(share, dtype=np.int32) % vocab_size
    starts = tuple(RowStart(r, tokens, 0, share, params, seed=r) for r in range(num_rows))
    num_blocks = -(-share // size)
    group, row, index = np.meshgrid(
        np.arange(num_groups), np.arange(num_rows), np.arange(num_blocks), indexing="ij"
    )
    columns = [a.ravel().astype(np.int32) for a in (group, row, index, index)]
    rows = np.arange(num_rows, dtype=np.int32)
    plan = Plan(
        step_id=-1,
        rows=rows,
        num_tokens=np.full(num_rows, share, np.int32),
        computed_bound=np.zeros(num_rows, np.int32),
        sample_rows=rows,
        num_candidates=np.full(num_rows, -1, np.int32),
        started=starts,
        block_writes=BlockWrites(*columns),
    )
    return plan, (num_blocks,) * num_groups
