"""The memory plan of a GPU: run the largest step once and see what it takes (text H)."""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from quire.base.config import AUTO_LENGTH, EngineConfig
from quire.base.errors import OutOfMemory
from quire.base.model_spec import ModelSpec
from quire.base.plan import BlockWrites, Plan, RowStart
from quire.base.sampling_params import SamplingParams
from quire.kv.sizing import MemoryPlan
from quire.runner.launched import Runner
from quire.runner.memory import gpu_pool_budget, make_plan

MakeRunner = Callable[[EngineConfig, tuple[int, ...]], Runner]


def with_length(config: EngineConfig, length: int) -> EngineConfig:
    """The config with another max_model_len."""
    model = dataclasses.replace(config.model, max_model_len=length)
    return dataclasses.replace(config, model=model)


def plan_gpu_memory(
    config: EngineConfig,
    spec: ModelSpec,
    device: torch.device,
    weights_bytes: int,
    make_runner: MakeRunner,
) -> MemoryPlan:
    """The pool gets what the largest step, the graphs and other processes leave of our share.

    make_runner: of a config and pools of these numbers of blocks. Raises OutOfMemory.
    """
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    is_auto = config.model.max_model_len == AUTO_LENGTH
    largest = with_length(config, spec.max_position) if is_auto else config
    try:
        plan, num_blocks = worst_case_plan(largest, len(spec.cache_groups), spec.vocab_size)
        runner = make_runner(largest, num_blocks)
        runner.run(plan)
        workspace = torch.cuda.max_memory_allocated(device) - before
        graphs = runner.graph_bytes(config)
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfMemory(
            f"a step of {config.scheduler.max_num_batched_tokens} tokens does not fit beside the "
            "weights; lower max_num_batched_tokens or max_num_seqs."
        ) from error
    del runner
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used = total - free  # by this process and all others
    share = config.cache.gpu_memory_utilization
    budget = gpu_pool_budget(total, share, used, workspace + graphs)
    plan_ = make_plan(config, spec, weights_bytes, workspace, max(0, budget), total)
    return dataclasses.replace(plan_, graph_bytes=graphs)


def worst_case_plan(
    config: EngineConfig, num_groups: int, vocab_size: int
) -> tuple[Plan, tuple[int, ...]]:
    """A step of max_num_batched_tokens tokens in which as many rows as possible sample with every
    filter on; and the pool that it needs. All rows write the same blocks: harmless here."""
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
