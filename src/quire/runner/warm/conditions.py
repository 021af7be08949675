"""Conditions under which starts, plans and requests need no torch."""

from pathlib import Path

import numpy as np

from quire.base.messages import Request
from quire.base.plan import Plan, RowStart
from quire.base.settings.config import EngineConfig
from quire.base.settings.speculation import FORCED, NONE, Speculation, parse_speculation
from quire.models.checkpoint.source import ModelSource
from quire.models.load.cache_files import weight_cache
from quire.ops.host.native import core
from quire.runner.step_ops import requests_features
from quire.runner.warm.start_file import start_path
from quire.spec.cache_group import FULL, WINDOW
from quire.spec.model_spec import PART_OF, QUIRE, ModelSpec

GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # device files that indicate a GPU


def path_for(config: EngineConfig, source: ModelSource, *, has_torch: bool = False) -> Path | None:
    """Return the file of the start with these settings; None if it needs torch. has_torch: torch is
    there, and runs the steps with draft tokens that the host proposes."""
    cache, parallel = weight_cache(config.model.weight_cache), config.parallel
    on_cpu = config.device == "cpu" or not any(map(Path.exists, map(Path, GPUS)))
    speculation = parse_speculation(config.speculative_config)
    is_simple = not (
        (speculation is not None and not _runs_plain_steps(speculation, has_torch=has_torch))
        or config.logits_processors
        or config.deterministic
        or config.model.enable_return_routed_experts
        or config.lora.enable_lora
        or config.cache.stores
        or config.cache.kv_host_gb
        or parallel.has_rank_processes
        or (config.scheduler.pipeline_depth or 1) > 1
    )
    is_served = config.attention_backend in ("auto", "cpu") and config.device != "cuda"
    is_served = is_served and config.cache.kv_cache_dtype in ("auto", "int8")
    if cache is None or core() is None or not (on_cpu and is_simple and is_served):
        return None
    return start_path(cache, config, source)


def _runs_plain_steps(speculation: Speculation, *, has_torch: bool) -> bool:
    """Return whether steps without draft tokens need no torch with this method."""
    is_rare = speculation.method in (FORCED, NONE)
    return is_rare or (has_torch and not speculation.has_drafter)


def can_save_start(spec: ModelSpec) -> bool:
    """Return whether a start of this model can do without torch later. The model must be quire's
    own, generate from text alone, and cache only keys and values."""
    kinds = {group.kind for group in spec.cache_groups}
    is_own = spec.implementation == QUIRE and PART_OF not in spec.raw
    is_text = spec.pooling is None and spec.encoder is None
    return is_own and is_text and kinds <= {FULL, WINDOW}


def is_plain(plan: Plan) -> bool:
    """Return whether a plan only needs tokens chosen by temperature and filters, for rows that were
    plain when they started."""
    if plan.drafts or plan.is_guessing or len(plan.masked_rows) or len(plan.last_ids):
        return False
    if any(move.kind != "copy" for move in plan.moves):
        return False
    has_candidates = bool((plan.num_candidates >= 0).any())
    return not has_candidates and all(map(is_plain_row, plan.started))


def is_plain_request(request: Request) -> bool:
    """Return whether plans of this request alone are plain."""
    start = RowStart(
        row=0,
        token_ids=np.empty(0, np.int32),
        num_computed_tokens=0,
        num_prompt_tokens=0,
        params=request.params,
        seed=request.seed,
        stop_token_ids=request.stop_token_ids,
        bad_words_token_ids=request.bad_words_token_ids,
    )
    return not request.grammar and is_plain_row(start)


def is_plain_row(start: RowStart) -> bool:
    """Return whether a row that starts is plain."""
    params = start.params
    return not (params.has_penalties or params.use_beam_search or requests_features(start))
