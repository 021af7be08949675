"""vLLM's scheduler under the loads of steps.py, in an environment that has vLLM.

steps.py --vllm starts it. It reads a load per line (JSON, the fields of Load) and answers with the
milliseconds per step. `add` makes the requests, which hashes their blocks, and queues them.
`schedule` is Scheduler.schedule, `update` is Scheduler.update_from_output, which makes the messages
too. The first line is vLLM's version. For vLLM 0.32, without asynchronous scheduling and without
statistics. As in its engine's core, the heap of the start is frozen and hashes are SHA-256.
"""

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM logs to stdout
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import numpy as np  # noqa: E402
import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig  # noqa: E402
from vllm.envs import enable_envs_cache  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from benchmarks.scheduler.loads import BLOCK_SIZE, VOCAB_SIZE, Arrival, Load  # noqa: E402

MODEL = {  # the smallest that vLLM takes; nothing of it is computed
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
}


def model_config() -> ModelConfig:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        return ModelConfig(model=directory, skip_tokenizer_init=True, dtype="float32")


def make_scheduler(model: ModelConfig, load: Load) -> tuple[Scheduler, Any]:
    """Return the scheduler, and the hasher of a request's blocks (None without prefix caching)."""
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_model_len=model.max_model_len,
            is_encoder_decoder=False,
            max_num_seqs=load.rows,
            max_num_batched_tokens=load.token_budget,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=load.prefix_caching),
    )
    num_blocks = load.num_blocks + 1  # one of them is its null block
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32
    )
    kv_cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = StructuredOutputManager(config)
    scheduler = Scheduler(config, kv_cache, manager, block_size=BLOCK_SIZE)
    if not load.prefix_caching:
        return scheduler, None
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    return scheduler, get_request_block_hasher(BLOCK_SIZE, hash_function)


def run(model: ModelConfig, load: Load) -> dict[str, list[float]]:
    """Return the milliseconds of each timed step, by part."""
    scheduler, hasher = make_scheduler(model, load)
    gc.unfreeze()  # the scheduler of the last load
    gc.collect()
    gc.freeze()
    rng, clock = np.random.default_rng(0), time.perf_counter
    times: dict[str, list[float]] = {"add": [], "schedule": [], "update": []}
    is_warm = False
    for is_timed, arrivals in load.steps():
        if is_timed and not is_warm:
            gc.collect()
            is_warm = True
        new = [(arrival, params_of(arrival)) for arrival in arrivals]
        began = clock()
        for arrival, params in new:
            request = Request(
                arrival.request_id, arrival.prompt_token_ids, params, None, block_hasher=hasher
            )
            scheduler.add_request(request)
        added = clock()
        plan = scheduler.schedule()
        planned = clock()
        result = answer(plan, rng)
        resulted = clock()
        outputs = scheduler.update_from_output(plan, result)
        updated = clock()
        if is_timed:
            check(scheduler, load, plan, outputs)
            spans = added - began, planned - added, updated - resulted
            for part, span in zip(times, spans, strict=True):
                times[part].append(span * 1e3)
    scheduler.shutdown()
    return times


def params_of(arrival: Arrival) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=arrival.max_tokens, ignore_eos=True)


def answer(plan: Any, rng: np.random.Generator) -> ModelRunnerOutput:
    """Return a random token for each request of the plan."""
    names = list(plan.num_scheduled_tokens)
    token_ids = rng.integers(0, VOCAB_SIZE, (len(names), 1)).tolist()
    return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, token_ids)


def check(scheduler: Scheduler, load: Load, plan: Any, outputs: Any) -> None:
    """Check that all rows ran, nothing else, and that the right number ended."""
    ended = sum(output.finish_reason is not None for output in outputs[0].outputs)
    assert len(plan.num_scheduled_tokens) == len(outputs[0].outputs) == load.rows, "not all ran"
    assert plan.total_num_scheduled_tokens >= load.rows, "not all ran"
    assert ended == load.num_ends, f"{ended} ended"
    assert len(scheduler.waiting) == load.num_waiting, "more wait than should"


def main() -> None:
    model = model_config()
    enable_envs_cache()
    print(json.dumps(vllm.__version__), file=ANSWERS, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(model, Load(**json.loads(line)))), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
