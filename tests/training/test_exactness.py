"""A trainer's log-probabilities equal the engine's bit for bit, in any batch and chunks.

Covers `training/engine_pass.py` and `training/packing.py`.
"""

import random
from collections import Counter
from typing import Any

import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.engine.drafting.draft_pace import StepTimes
from quire.ops.host.native import core
from quire.training import Samples, TrainingModel
from tests.support.models.reference_checkpoints import checkpoint, pool_bytes

if core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)

BLOCK, VOCAB = 4, 11  # a small vocabulary, so drafts are often accepted
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def open_llm(architecture: str, dtype: str, num_blocks: int = 200, **settings: Any) -> LLM:
    """Open an engine that chunks prompts, verifies drafts, and has too few blocks for its rows."""
    path = checkpoint(architecture, VOCAB)
    pool = pool_bytes(path, num_blocks, BLOCK, 4) // (1 if dtype == "float32" else 2)
    defaults: dict[str, Any] = {
        "dtype": dtype, "block_size": BLOCK, "kv_cache_memory_bytes": pool,
        "max_num_batched_tokens": 48, "max_num_seqs": 32, "speculative_config": NGRAM,
    }  # fmt: skip
    return LLM(str(path), disable_log_stats=True, **(defaults | settings))


def generate(llm: LLM, num_requests: int, max_tokens: int, seed: int) -> list[RequestOutput]:
    """Sample several responses per prompt. Prompts share a prefix, and are longer than a step's
    budget. Some responses are greedy, so that drafts are accepted."""
    numbers = random.Random(seed)
    start = numbers.choices(range(VOCAB), k=50)
    ends = [numbers.choices(range(VOCAB), k=1 + i % 9) for i in range(num_requests)]
    params = [
        SamplingParams(
            n=1 + i % 4, temperature=(0.0, 1.0, 0.3, 2.0)[i % 4], top_p=0.9 if i % 2 else 1.0,
            seed=seed + i, max_tokens=max_tokens, ignore_eos=True, logprobs=0,
        )
        for i in range(num_requests)
    ]  # fmt: skip
    prompts = [{"prompt_token_ids": [*start, *end]} for end in ends]
    return llm.generate(prompts, params, use_tqdm=False)


def num_differences(model: TrainingModel, outputs: list[RequestOutput]) -> tuple[int, int]:
    """Return how many log-probabilities differ in any bit, and how many there are."""
    samples = Samples.of(outputs)
    with torch.no_grad():
        found = model(samples.prompts, samples.responses)
    differ = found.view(torch.int32) != samples.logprobs.view(torch.int32)
    return int(differ.sum()), len(found)


def events_of(outputs: list[RequestOutput]) -> Counter[str]:
    """Count preemptions, accepted drafts and cached tokens."""
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    return Counter(
        preempted=sum(each.num_preemptions for each in metrics),
        accepted=sum(each.num_accepted_draft_tokens for each in metrics),
        cached=sum(output.num_cached_tokens or 0 for output in outputs),
    )


def check_events(events: Counter[str]) -> None:
    """Check that rows were preempted, drafts accepted, and prefixes hit."""
    assert events["preempted"] > 2 and events["accepted"] > 0 and events["cached"] > 100


@pytest.mark.parametrize(
    ("architecture", "dtype", "num_requests"),
    [("qwen3", "float32", 32), ("llama", "bfloat16", 32), ("mistral", "float16", 6)],
)
def test_logprobs_are_bitwise_equal(
    architecture: str, dtype: str, num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares 7,000 tokens in all, with prefix hits, chunked prompts, preemption, drafts and
    several responses per prompt, in one packed batch."""
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)  # drafts on slow machines, too
    model = TrainingModel(str(checkpoint(architecture, VOCAB)), dtype=dtype)
    with open_llm(architecture, dtype) as llm:
        outputs = generate(llm, num_requests, 44, seed=7)
    if num_requests > 10:
        check_events(events_of(outputs))
    num, total = num_differences(model, outputs)
    assert num == 0 and total == sum(44 * (1 + i % 4) for i in range(num_requests))


def test_logprobs_are_bitwise_equal_after_a_weight_update() -> None:
    """After a step of the optimizer they differ, until the running engine is updated."""
    model = TrainingModel(str(checkpoint("qwen2", VOCAB)), dtype="bfloat16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with open_llm("qwen2", "bfloat16") as llm:
        samples = Samples.of(generate(llm, 4, 8, seed=1))
        (-model(samples.prompts, samples.responses).mean()).backward()
        optimizer.step()
        assert num_differences(model, generate(llm, 4, 8, seed=2))[0] > 0
        llm.update_weights(model.state_dict())
        assert num_differences(model, generate(llm, 4, 8, seed=2)) == (0, 80)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_of_many_tokens_are_bitwise_equal(dtype: str) -> None:
    """Half a million tokens per dtype, in large batches: two CPU minutes each."""
    model = TrainingModel(str(checkpoint("qwen3", VOCAB)), dtype=dtype)
    differ, total, events = 0, 0, Counter[str]()
    with open_llm("qwen3", dtype, 2400, max_num_batched_tokens=1024, max_num_seqs=256) as llm:
        for seed in range(0, 3000, 100):
            outputs = generate(llm, 136, 50, seed)
            events += events_of(outputs)
            num, count = num_differences(model, outputs)
            differ, total = differ + num, total + count
    assert differ == 0 and total >= 500_000
    check_events(events)
